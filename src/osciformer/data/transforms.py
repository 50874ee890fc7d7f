"""Scaling that is fitted on training data and saved with the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.data.checks import check_choice
from osciformer.data.series import IrregularSeries
from osciformer.data.statistics import ColumnStatistics, SeriesStatistics

Scaling = Literal["standard", "robust", "asinh", "none"]
TimeScaling = Literal["span", "none"]
Array = TypeVar("Array", np.ndarray, Tensor)

# The distance between the quartiles of a normal distribution, in standard deviations.
QUARTILES_OF_NORMAL = 1.3489795003921634


@dataclass(frozen=True)
class ColumnScaler:
    """Columns as `(x - center) / scale`, or the arsinh of that, clipped; NaN stays NaN.

    Attributes:
        center: What becomes 0 [F].
        scale: What becomes 1 [F], or arsinh 1 = 0.88; 1 for a constant column and for one without
            any value.
        clip: Bound on the absolute scaled value, or None.
        squash: Take the arsinh: nearly linear up to 1, and as slow as the logarithm far beyond it.
    """

    center: Float[np.ndarray, "F"]
    scale: Float[np.ndarray, "F"]
    clip: float | None = None
    squash: bool = False

    @classmethod
    def fit(cls, columns: ColumnStatistics, scaling: Scaling, clip: float | None) -> ColumnScaler:
        """Return the scaler of columns with these statistics."""
        center, scale = columns.mean, columns.std
        if scaling == "none":
            center, scale = np.zeros_like(center), np.ones_like(scale)
        if scaling in ("robust", "asinh"):
            spread = (columns.quantile(0.75) - columns.quantile(0.25)) / QUARTILES_OF_NORMAL
            center = np.nan_to_num(columns.quantile(0.5))
            # Quartiles that coincide, as of a mostly constant column, say nothing about its spread.
            scale = np.where(spread > _smallest_scale(center), spread, scale)
        scale = np.where(scale > _smallest_scale(center), scale, 1.0)
        return cls(center, scale, clip, scaling == "asinh")

    def transform(self, values: Array) -> Array:
        """Return scaled values [..., F], in the dtype of the input."""
        center, scale = self._like(values)
        scaled = (values - center) / scale
        if self.squash:
            scaled = scaled.arcsinh() if isinstance(scaled, Tensor) else np.arcsinh(scaled)
        return scaled if self.clip is None else scaled.clip(-self.clip, self.clip)

    def inverse(self, values: Array) -> Array:
        """Return values [..., F] in the units of the data; what was clipped stays clipped."""
        center, scale = self._like(values)
        if self.squash:
            values = values.sinh() if isinstance(values, Tensor) else np.sinh(values)
        return values * scale + center

    def _like(self, values: Array) -> tuple[Any, Any]:
        if values.shape[-1] != len(self.center):
            raise ValueError(f"values must be [..., {len(self.center)}]; got {list(values.shape)}")
        if isinstance(values, Tensor):
            return (
                torch.as_tensor(self.center).to(values),
                torch.as_tensor(self.scale).to(values),
            )
        return self.center.astype(values.dtype), self.scale.astype(values.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "center": self.center.tolist(),
            "scale": self.scale.tolist(),
            "clip": self.clip,
            "squash": self.squash,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ColumnScaler:
        """Return the scaler that `to_dict` wrote, also before there was `squash`."""
        center, scale = np.array(state["center"]), np.array(state["scale"])
        return cls(center, scale, state["clip"], state.get("squash", False))


class SeriesTransform:
    """Scaling of values, static features and times, fitted on training data alone.

    Args:
        values: `standard` (mean and standard deviation), `robust` (median and quartiles), `asinh`
            (the arsinh of `robust`, for columns whose few large values say more by their order of
            magnitude than by their size) or `none`.
        static: The same for static features.
        clip: Bound on the absolute scaled value, against outliers; None for no bound.
        time: `span` makes the longest span of a training series the unit of time and the earliest
            time 0; `none` leaves times alone, since `OsciFormer` has a time scale of its own, to
            which `time_reference` and `time_span` of this object can be given.

    Example:
        >>> train = IrregularSeries.from_arrays([[0.0, 4.0], [1.0]], [[1.0, 3.0], [5.0]])
        >>> transform = SeriesTransform().fit(train)
        >>> transform.transform(train).values.ravel().round(2)
        array([-1.22,  0.  ,  1.22], dtype=float32)
        >>> transform.time_span
        4.0
    """

    def __init__(
        self,
        values: Scaling = "standard",
        *,
        static: Scaling = "standard",
        clip: float | None = None,
        time: TimeScaling = "none",
    ) -> None:
        check_choice("values", values, get_args(Scaling))
        check_choice("static", static, get_args(Scaling))
        check_choice("time", time, get_args(TimeScaling))
        if clip is not None and not 0 < clip < float("inf"):
            raise ValueError(f"clip must be positive and finite, or None; got {clip}")
        self.values, self.static, self.clip, self.time = values, static, clip, time
        self.statistics: SeriesStatistics | None = None
        self._fitted: _Fitted | None = None

    def fit(self, series: IrregularSeries) -> SeriesTransform:
        """Learn the scales of training series, forgetting earlier ones, and return this object."""
        self.statistics = None
        return self.partial_fit(series)

    def partial_fit(self, series: IrregularSeries) -> SeriesTransform:
        """Learn the scales of another chunk of training series as well and return this object."""
        if self.statistics is None:
            self.statistics = SeriesStatistics.of(series)
        else:
            self.statistics.update(series)
        self._fitted = None
        return self

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that were seen in training."""
        return self._scales.feature_names

    @property
    def time_reference(self) -> float:
        """Earliest time of the training series."""
        return self._scales.time_reference

    @property
    def time_span(self) -> float:
        """Longest span of a training series; 1 if no series lasts."""
        return self._scales.time_span

    @property
    def value_scaler(self) -> ColumnScaler:
        """The scaler of the features."""
        return self._scales.values

    @property
    def static_scaler(self) -> ColumnScaler | None:
        """The scaler of the static features."""
        return self._scales.static

    def transform(self, series: IrregularSeries) -> IrregularSeries:
        """Return scaled series; features must be those of the training series."""
        scales = self._scales
        if series.feature_names != scales.feature_names:
            raise ValueError(
                f"the series must have the features {scales.feature_names}; "
                f"got {series.feature_names}"
            )
        if (series.static is None) != (scales.static is None):
            raise ValueError(
                "static features must be there in training and afterwards, or in neither"
            )
        changes: dict[str, Any] = {"values": scales.values.transform(series.values)}
        if series.static is not None and scales.static is not None:
            changes["static"] = scales.static.transform(series.static)
            changes["static_names"] = series.static_names
        if self.time == "span":
            changes["times"] = self.transform_times(series.times)
        return series.replace(**changes)

    def fit_transform(self, series: IrregularSeries) -> IrregularSeries:
        """Return the scaled training series."""
        return self.fit(series).transform(series)

    def transform_times(self, times: Array) -> Array:
        """Return times of any shape in the unit that `transform` gives."""
        if self.time == "none":
            return times
        return (times - self.time_reference) / self.time_span

    def inverse_times(self, times: Array) -> Array:
        """Return scaled times in the unit of the data."""
        return times if self.time == "none" else times * self.time_span + self.time_reference

    def inverse_values(self, values: Array) -> Array:
        """Return scaled values [..., F], such as predictions, in the units of the data."""
        return self._scales.values.inverse(values)

    def to_dict(self) -> dict[str, Any]:
        """Return settings and scales as plain values, for JSON."""
        return {
            "settings": {
                "values": self.values,
                "static": self.static,
                "clip": self.clip,
                "time": self.time,
            },
            "scales": self._scales.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> SeriesTransform:
        """Return the fitted transform that `to_dict` wrote; `partial_fit` begins afresh."""
        result = cls(**state["settings"])
        result._fitted = _Fitted.from_dict(state["scales"])
        return result

    @property
    def _scales(self) -> _Fitted:
        if self._fitted is None:
            if self.statistics is None:
                raise RuntimeError("this transform is not fitted; call fit or partial_fit first")
            self._fitted = self._fit_scales(self.statistics)
        return self._fitted

    def _fit_scales(self, found: SeriesStatistics) -> _Fitted:
        static = None
        if found.static is not None:
            static = ColumnScaler.fit(found.static, self.static, self.clip)
        return _Fitted(
            values=ColumnScaler.fit(found.features, self.values, self.clip),
            static=static,
            feature_names=found.feature_names,
            time_reference=found.first_time if np.isfinite(found.first_time) else 0.0,
            time_span=found.longest_span if found.longest_span > 0 else 1.0,
        )


@dataclass(frozen=True)
class _Fitted:
    """What a transform has learned."""

    values: ColumnScaler
    static: ColumnScaler | None
    feature_names: tuple[str, ...]
    time_reference: float
    time_span: float

    def to_dict(self) -> dict[str, Any]:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **state,
            "values": self.values.to_dict(),
            "static": None if self.static is None else self.static.to_dict(),
            "feature_names": list(self.feature_names),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> _Fitted:
        static = state["static"]
        return cls(
            **{
                **state,
                "values": ColumnScaler.from_dict(state["values"]),
                "static": None if static is None else ColumnScaler.from_dict(static),
                "feature_names": tuple(state["feature_names"]),
            }
        )


def _smallest_scale(center: Float[np.ndarray, "F"]) -> Float[np.ndarray, "F"]:
    """Return the spread below which a column is constant up to the rounding of float32."""
    return 1e-6 * np.abs(center) + 1e-30
