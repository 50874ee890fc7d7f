"""Statistics in one pass, and scaling that is fitted on training data and saved with the model."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float, Int, Tensor
from osciformer.data.ragged import check_shape
from osciformer.data.series import IrregularSeries

Scaling = Literal["standard", "robust", "asinh", "none"]
TimeScaling = Literal["span", "none"]
Array = TypeVar("Array", np.ndarray, Tensor)

# The distance between the quartiles of a normal distribution, in standard deviations.
QUARTILES_OF_NORMAL = 1.3489795003921634
# Values per column from which quantiles are taken; of more values a sample is drawn.
SAMPLE_SIZE = 1 << 16


class ColumnStatistics:
    """Count, mean, spread, range and quantiles of each column, ignoring NaN, from chunks of rows.

    Means and spreads are exact. Quantiles are exact up to `SAMPLE_SIZE` values of a column; beyond
    that they come from a sample that depends on the row numbers only, not on the chunks.
    """

    def __init__(self, num_columns: int) -> None:
        self.num_rows = 0
        self.count = np.zeros(num_columns, dtype=np.int64)
        self.mean = np.zeros(num_columns)
        self.squares = np.zeros(num_columns)  # sum of squared differences from the mean
        self.low = np.full(num_columns, np.inf)
        self.high = np.full(num_columns, -np.inf)
        self._samples = [np.empty(0, dtype=np.float32) for _ in range(num_columns)]
        self._priorities = [np.empty(0, dtype=np.uint64) for _ in range(num_columns)]

    def update(self, rows: Float[np.ndarray, "T F"]) -> ColumnStatistics:
        """Take more rows into account and return this object."""
        check_shape("rows", rows, ("T", len(self.count)))
        priority = _scramble(np.arange(self.num_rows, self.num_rows + len(rows), dtype=np.uint64))
        self.num_rows += len(rows)
        for column in range(rows.shape[1]):
            observed = ~np.isnan(rows[:, column])
            if observed.any():
                self._update_column(column, rows[observed, column], priority[observed])
        return self

    def _update_column(self, column: int, values: np.ndarray, priority: np.ndarray) -> None:
        exact = values.astype(np.float64)
        before, added, mean = self.count[column], len(values), exact.mean()
        shift = mean - self.mean[column]
        # Moments of two parts together, without subtracting large sums (Chan et al. 1979).
        self.mean[column] += shift * added / (before + added)
        self.squares[column] += np.square(exact - mean).sum()
        self.squares[column] += shift**2 * before * added / (before + added)
        self.count[column] += added
        self.low[column] = min(self.low[column], exact.min())
        self.high[column] = max(self.high[column], exact.max())
        sample = np.concatenate((self._samples[column], values.astype(np.float32)))
        priority = np.concatenate((self._priorities[column], priority))
        if len(sample) > SAMPLE_SIZE:
            lowest = np.argpartition(priority, SAMPLE_SIZE)[:SAMPLE_SIZE]
            sample, priority = sample[lowest], priority[lowest]
        self._samples[column], self._priorities[column] = sample, priority

    @property
    def std(self) -> Float[np.ndarray, "F"]:
        """Standard deviation of each column (of the population); 0 where there is no value."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def quantile(self, fraction: float) -> Float[np.ndarray, "F"]:
        """Return a quantile of each column; NaN where there is no value."""
        samples = [sample.astype(np.float64) for sample in self._samples]
        return np.array([np.quantile(s, fraction) if len(s) else np.nan for s in samples])


@dataclass
class SeriesStatistics:
    """What a data set looks like, in one pass over chunks of it.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> SeriesStatistics.of(series).features.mean
        array([2.])
    """

    features: ColumnStatistics  #: Statistics of the feature columns.
    static: ColumnStatistics | None  #: Statistics of the static features.
    feature_names: tuple[str, ...]  #: Names of the features.
    num_series: int = 0  #: Number of series.
    num_rows: int = 0  #: Number of rows.
    longest: int = 0  #: Largest number of rows of a series.
    first_time: float = np.inf  #: Earliest time.
    last_time: float = -np.inf  #: Latest time.
    longest_span: float = 0.0  #: Longest time from the first to the last row of a series.
    gap_sum: float = 0.0  #: Sum of the gaps between neighbouring rows of a series.
    num_gaps: int = 0  #: Their number.

    @classmethod
    def of(cls, *chunks: IrregularSeries) -> SeriesStatistics:
        """Return the statistics of one or more chunks."""
        if not chunks:
            raise ValueError("statistics need at least one chunk of series")
        first = chunks[0]
        static = None if first.static is None else ColumnStatistics(first.static.shape[1])
        result = cls(ColumnStatistics(first.num_features), static, first.feature_names)
        for chunk in chunks:
            result.update(chunk)
        return result

    def update(self, series: IrregularSeries) -> SeriesStatistics:
        """Take more series into account and return this object."""
        _check_features("all chunks", series, self.feature_names)
        self.features.update(series.values)
        if self.static is not None and series.static is not None:
            self.static.update(series.static)
        lengths, spans = series.lengths, series.spans
        self.num_series += len(series)
        self.num_rows += len(series.times)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.first_time = min(self.first_time, float(series.times.min(initial=np.inf)))
        self.last_time = max(self.last_time, float(series.times.max(initial=-np.inf)))
        self.longest_span = max(self.longest_span, float(spans.max(initial=0.0)))
        self.gap_sum += float(spans.sum())
        self.num_gaps += int(np.maximum(lengths - 1, 0).sum())
        return self

    @property
    def mean_gap(self) -> float:
        """Mean time between neighbouring rows of a series; NaN if no series has two."""
        return self.gap_sum / self.num_gaps if self.num_gaps else float("nan")

    def describe(self) -> list[dict[str, Any]]:
        """Return one plain dict per feature: name, count, missing, mean, std, low, high."""
        columns, rows = self.features, []
        for k, (name, count) in enumerate(zip(self.feature_names, columns.count, strict=True)):
            row = {"feature": name, "count": int(count)}
            row["missing"] = 1.0 - int(count) / max(self.num_rows, 1)
            for key in ("mean", "std", "low", "high"):
                row[key] = float(getattr(columns, key)[k]) if count else float("nan")
            rows.append(row)
        return rows


def _check_features(what: str, series: IrregularSeries, names: tuple[str, ...]) -> None:
    if series.feature_names != names:
        raise ValueError(f"{what} must have the features {names}; got {series.feature_names}")


def _scramble(numbers: Int[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
    """Return a fixed pseudorandom number for each number (the finaliser of splitmix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class ColumnScaler:
    """Columns as `(x - center) / scale`, or the arsinh of that, clipped; NaN stays NaN."""

    center: Float[np.ndarray, "F"]  #: What becomes 0.
    scale: Float[np.ndarray, "F"]  #: What becomes 1, or arsinh 1; 1 for constant or empty columns.
    clip: float | None = None  #: Bound on the absolute scaled value, or None.
    squash: bool = False  #: Take the arsinh: nearly linear up to 1, logarithmic far beyond.

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
        """Return center and scale with the type, dtype and device of the values."""
        if values.shape[-1] != len(self.center):
            raise ValueError(f"values must be [..., {len(self.center)}]; got {list(values.shape)}")
        if isinstance(values, Tensor):
            return torch.as_tensor(self.center).to(values), torch.as_tensor(self.scale).to(values)
        return self.center.astype(values.dtype), self.scale.astype(values.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self) | {"center": self.center.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ColumnScaler:
        """Return the scaler that `to_dict` wrote; `squash` is off if it is not named."""
        center, scale = np.array(state["center"]), np.array(state["scale"])
        return cls(center, scale, state["clip"], state.get("squash", False))


def _smallest_scale(center: Float[np.ndarray, "F"]) -> Float[np.ndarray, "F"]:
    """Return the spread below which a column is constant up to the rounding of float32."""
    return 1e-6 * np.abs(center) + 1e-30


class _Scales(NamedTuple):
    values: ColumnScaler
    static: ColumnScaler | None
    feature_names: tuple[str, ...]
    time_reference: float
    time_span: float


@dataclass(eq=False)
class SeriesTransform:
    """Scaling of values, static features and times, fitted on training data only.

    Example:
        >>> train = IrregularSeries.from_arrays([[0.0, 4.0], [1.0]], [[1.0, 3.0], [5.0]])
        >>> SeriesTransform().fit_transform(train).values.ravel().round(2)
        array([-1.22,  0.  ,  1.22], dtype=float32)
    """

    #: `standard` (mean and standard deviation), `robust` (median and quartiles), `asinh` (the
    #: arsinh of `robust`, for values of many orders of magnitude) or `none`.
    values: Scaling = "standard"
    _: KW_ONLY
    static: Scaling = "standard"  #: The same for static features.
    clip: float | None = None  #: Bound on the absolute scaled value, against outliers.
    #: `span` makes the longest span of a training series the unit of time and the earliest time 0;
    #: `none` keeps times, since models have a time scale of their own.
    time: TimeScaling = "none"
    statistics: SeriesStatistics | None = field(default=None, init=False, repr=False)
    _fitted: _Scales | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed in (("values", Scaling), ("static", Scaling), ("time", TimeScaling)):
            check_choice(name, getattr(self, name), get_args(allowed))
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip must be positive and finite, or None; got {self.clip}")

    def fit(self, series: IrregularSeries) -> SeriesTransform:
        """Learn the scales of training series, forgetting earlier ones, and return this object."""
        self.statistics = None
        return self.partial_fit(series)

    def partial_fit(self, series: IrregularSeries) -> SeriesTransform:
        """Learn the scales of another chunk of training series as well and return this object."""
        found = self.statistics
        self.statistics = SeriesStatistics.of(series) if found is None else found.update(series)
        self._fitted = None
        return self

    @property
    def _scales(self) -> _Scales:
        """The scales, computed from the statistics when they are first needed."""
        if self._fitted is None:
            found = self.statistics
            if found is None:
                raise RuntimeError("this transform is not fitted; call fit or partial_fit first")
            static = found.static
            self._fitted = _Scales(
                ColumnScaler.fit(found.features, self.values, self.clip),
                None if static is None else ColumnScaler.fit(static, self.static, self.clip),
                found.feature_names,
                time_reference=found.first_time if np.isfinite(found.first_time) else 0.0,
                time_span=found.longest_span if found.longest_span > 0 else 1.0,
            )
        return self._fitted

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
        _check_features("the series", series, scales.feature_names)
        if (series.static is None) != (scales.static is None):
            raise ValueError("static features must be present in training and later, or in neither")
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
        return times if self.time == "none" else (times - self.time_reference) / self.time_span

    def inverse_times(self, times: Array) -> Array:
        """Return scaled times in the unit of the data."""
        return times if self.time == "none" else times * self.time_span + self.time_reference

    def inverse_values(self, values: Array) -> Array:
        """Return scaled values [..., F], such as predictions, in the units of the data."""
        return self._scales.values.inverse(values)

    def to_dict(self) -> dict[str, Any]:
        """Return settings and scales as plain values, for JSON."""
        settings = {name: getattr(self, name) for name in ("values", "static", "clip", "time")}
        plain = self._scales._asdict()
        for name in ("values", "static"):
            plain[name] = plain[name] and plain[name].to_dict()
        return {"settings": settings, "scales": plain | {"feature_names": list(self.feature_names)}}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> SeriesTransform:
        """Return the fitted transform that `to_dict` wrote; `partial_fit` starts afresh."""
        result, scales = cls(**state["settings"]), dict(state["scales"])
        for name in ("values", "static"):
            scales[name] = scales[name] and ColumnScaler.from_dict(scales[name])
        scales["feature_names"] = tuple(scales["feature_names"])
        result._fitted = _Scales(**scales)
        return result
