"""Irregular series as a matrix of features, in scikit-learn's manner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from osciformer._optional import need
from osciformer._text import check_choice
from osciformer._types import Bool, Float
from osciformer.data.inputs import SeriesData, as_series, check_same_columns, chunks, take
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis
from osciformer.data.tables import Layout
from osciformer.data.transforms import SeriesTransform
from osciformer.resonators.families import Columns, Family, FeatureName
from osciformer.resonators.peaks import Peaks
from osciformer.resonators.shape import Shape
from osciformer.resonators.spectrum import Spectrum
from osciformer.resonators.states import States
from osciformer.resonators.summary import Observation, Static, Summary

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator, TransformerMixin
else:
    _sklearn = need("sklearn.base", extra="train")
    BaseEstimator, TransformerMixin = _sklearn.BaseEstimator, _sklearn.TransformerMixin

#: Families of features by name, in the order of their columns.
FAMILIES: Mapping[str, type[Family]] = {
    kind.name: kind for kind in (Shape, Spectrum, States, Summary, Observation, Static, Peaks)
}
#: Series from which spectra and the like are learned.
SAMPLE_SIZE = 1000
# Scaled values beyond this are cut off.
_CLIP = 10.0
# Rows that are transformed at a time.
_BLOCK_ROWS = 1 << 16


class ResonatorFeatures(TransformerMixin, BaseEstimator):
    """Features of series that drive damped oscillators, a row of numbers per series.

    X is an `IrregularSeries`, a `ParquetSeries` (read part by part), a data frame with a `layout`,
    or a list of `(times, values)` pairs. Missing values are fine: each variable drives with its
    own observations. All features are finite.

    Args:
        families: Names of the families of features; None for all, without shapes if most values
            are missing.
        layout: For data frames as X: a `Layout`, or a dict of its arguments.
        random_state: Seed, or a NumPy `RandomState`, or None.

    Attributes:
        transform_: The fitted scaling of the values.
        families_: The fitted families.
        feature_names_in_: Names of the variables.
        static_names_in_: Names of the static features.
        time_axis_: What the times mean.

    Example:
        >>> X = [([0.0, 1.0, 2.0], [[1.0], [3.0], [2.0]]), ([0.0, 1.5], [[2.0], [4.0]])]
        >>> features = ResonatorFeatures(families=["states", "summary"]).fit(X)
        >>> features.transform(X).shape, features.get_feature_names_out()[0]
        ((2, 11), 'feature_0 at period 1, Q 1, position at the end')
    """

    def __init__(
        self,
        *,
        families: Sequence[str] | None = None,
        layout: Layout | Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.families = families
        self.layout = layout
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn scales, time scales and spectra; `y` is not used."""
        data = as_series(X, self.layout)
        names = list(FAMILIES) if self.families is None else list(self.families)
        for name in names:
            check_choice("families", name, list(FAMILIES))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"families must name at least one, each once; got {self.families!r}")
        first = next(chunks(data))
        self._remember_columns(first.feature_names, first.static_names, first.time_axis)
        self.transform_ = SeriesTransform("asinh", clip=_CLIP)
        for chunk in chunks(data):
            self.transform_.partial_fit(chunk)
        assert self.transform_.statistics is not None
        if self.transform_.statistics.features.count.sum() == 0:
            missing = f"all values of all {len(data)} series are missing (NaN)"
            raise ValueError(f"{missing}; check the value columns")
        check_random_state = need("sklearn.utils", extra="train").check_random_state
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        index = np.random.default_rng(seed).permutation(len(data))[:SAMPLE_SIZE]
        part = take(data, np.sort(index))
        sample = self._scale(part.read() if isinstance(part, ParquetSeries) else part)
        if self.families is None and np.isnan(sample.values).mean() > 0.5:
            # Rarely observed variables have no shape, and what was observed says the most.
            names = [name for name in names if FAMILIES[name].group != "shape"]
            names.sort(key=lambda name: FAMILIES[name].group != "summary")
        self.families_ = [FAMILIES[name](self._columns) for name in names]
        for number, family in enumerate(self.families_):
            # One generator each: a family draws the same whatever the others do.
            family.fit(sample, np.random.default_rng([seed, number]))
        # Series without static features have none of that family.
        self.families_ = [family for family in self.families_ if family.names()]
        return self

    def transform(self, X: Any) -> Float[np.ndarray, "n P"]:
        """Return the features of each series, float32; 0 stands for what a series cannot tell."""
        found = np.concatenate(list(self.transform_parts(self.validate(X, self.layout))))
        return np.nan_to_num(found, copy=False)

    def transform_parts(self, data: SeriesData) -> Iterator[Float[np.ndarray, "m P"]]:
        """Yield the features of validated series, in order, some at a time; NaN is unknown."""
        for chunk in chunks(data):
            for part in _cut(chunk):
                scaled = self._scale(part)
                yield np.concatenate([f.transform(scaled) for f in self.families_], axis=1)

    def keep(self, groups: Sequence[str]) -> Bool[np.ndarray, "P"]:
        """Drop families of other groups; return which of the columns stay."""
        kept = [family.group in groups for family in self.families_]
        stays = np.repeat(kept, [len(family.names()) for family in self.families_])
        pairs = zip(self.families_, kept, strict=True)
        self.families_ = [family for family, is_kept in pairs if is_kept]
        return stays

    def _scale(self, series: IrregularSeries) -> IrregularSeries:
        """Return scaled series; labels, which may be text, are no concern of features."""
        return self.transform_.transform(series.replace(labels=None))

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the columns as text."""
        return np.array([str(name) for name in self.names()], dtype=object)

    def names(self) -> list[FeatureName]:
        """Return what each column means."""
        self._check_fitted()
        return [name for family in self.families_ for name in family.names()]

    def validate(self, X: Any, layout: Layout | Mapping[str, Any] | None = None) -> SeriesData:
        """Return X, which may be a frame with a layout, as series with the columns of training."""
        self._check_fitted()
        features = list(map(str, self.feature_names_in_))
        data = as_series(X, layout, features)
        check_same_columns(data, features, self.static_names_in_, self.time_axis_)
        return data

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what was learned as plain values and as arrays by name."""
        self._check_fitted()
        plain = {
            "families": [family.name for family in self.families_],
            "transform": self.transform_.to_dict(),
            "feature_names": list(map(str, self.feature_names_in_)),
            "static_names": list(self.static_names_in_),
            "time_axis": self.time_axis_.to_dict(),
        }
        arrays = {
            f"{family.name}.{name}": array
            for family in self.families_
            for name, array in family.arrays.items()
        }
        return plain, arrays

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """Set what `state` returned, and return this object."""
        axis = TimeAxis.from_dict(plain["time_axis"])
        self._remember_columns(plain["feature_names"], plain["static_names"], axis)
        self.transform_ = SeriesTransform.from_dict(plain["transform"])
        self.families_ = []
        for name in plain["families"]:
            check_choice("families", name, list(FAMILIES))
            own = {k.partition(".")[2]: v for k, v in arrays.items() if k.startswith(f"{name}.")}
            self.families_.append(FAMILIES[name](self._columns, own))
        return self

    @property
    def _columns(self) -> Columns:
        features = tuple(map(str, self.feature_names_in_))
        return Columns(features, self.static_names_in_, self.time_axis_.unit)

    def _remember_columns(self, features: Any, static: Any, time_axis: TimeAxis) -> None:
        self.feature_names_in_ = np.array([str(name) for name in features], dtype=object)
        self.static_names_in_ = tuple(static)
        self.n_features_in_ = len(self.feature_names_in_)
        self.time_axis_ = time_axis

    def _check_fitted(self) -> None:
        check = need("sklearn.utils.validation", extra="train").check_is_fitted
        check(self, "families_", msg="this %(name)s is not fitted; call fit")


def _cut(series: IrregularSeries) -> Iterator[IrregularSeries]:
    """Yield consecutive series of a bounded number of rows, at least one."""
    start = 0
    while start < len(series):
        limit = series.offsets[start] + _BLOCK_ROWS
        stop = int(np.searchsorted(series.offsets, limit, side="right")) - 1
        stop = min(max(stop, start + 1), start + _BLOCK_ROWS, len(series))
        yield series[start:stop]
        start = stop
