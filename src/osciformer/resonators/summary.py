"""Simple features: of the values of each variable, of when it was observed, and static ones."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from osciformer._types import Float
from osciformer.data.ragged import series_of_rows
from osciformer.data.series import IrregularSeries
from osciformer.resonators.families import Family, FeatureName, time_scales

OF_VALUES = ("last", "first", "smallest", "largest", "mean", "standard deviation", "slope")
OF_TIMES = ("observations (log)", "time since the last observation", "share missing")
OF_SERIES = ("rows (log)", "span")
# A static feature of so many distinct values or fewer, but more than two, may mean kinds.
_MOST_KINDS = 10


class Summary(Family):
    """Statistics of the values of each variable; NaN for one that a series lacks."""

    name: ClassVar[str] = "summary"
    group: ClassVar[str] = "summary"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        return {}

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return statistics by variable."""
        shape = (len(series), series.num_features, len(OF_VALUES))
        found = np.full(shape, np.nan, dtype=np.float32)
        for number, column in enumerate(series.values.T):
            (rows,) = np.nonzero(~np.isnan(column))
            values, counts = column[rows].astype(np.float64), _counts(series, rows)
            held = counts[counts > 0]
            if len(held) == 0:
                continue
            stop = np.cumsum(held)
            start = stop - held
            mean = np.add.reduceat(values, start) / held
            apart = values - np.repeat(mean, held)
            spread = np.add.reduceat(np.square(apart), start) / held
            low, high = (of.reduceat(values, start) for of in (np.minimum, np.maximum))
            times = series.times[rows]
            times = times - np.repeat(np.add.reduceat(times, start) / held, held)
            square = np.add.reduceat(np.square(times), start)
            slope = np.add.reduceat(apart * times, start) / np.where(square > 0, square, np.nan)
            parts = (values[stop - 1], values[start], low, high, mean, np.sqrt(spread), slope)
            found[counts > 0, number] = np.stack(parts, axis=1)
        return found.reshape(len(series), -1)

    def names(self) -> list[FeatureName]:
        """Return names in the order of the columns."""
        pairs = ((v, kind) for v in self.columns.features for kind in OF_VALUES)
        return [FeatureName(self.name, (variable,), kind) for variable, kind in pairs]


class Observation(Family):
    """How often and when each variable was observed, and how long and dense the series is."""

    name: ClassVar[str] = "observation"
    group: ClassVar[str] = "summary"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        return {"span": np.array(time_scales(sample)[1])}

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return statistics by variable, then those of the series."""
        unit, lengths = float(self.arrays["span"]), np.maximum(series.lengths, 1)
        found = np.empty((len(series), series.num_features, len(OF_TIMES)))
        for number, column in enumerate(series.values.T):
            (rows,) = np.nonzero(~np.isnan(column))
            counts, since = _counts(series, rows), series.spans
            some = counts > 0
            last = rows[np.cumsum(counts)[some] - 1]
            since[some] = series.times[series.offsets[1:][some] - 1] - series.times[last]
            parts = (np.log1p(counts), since / unit, 1.0 - counts / lengths)
            found[:, number] = np.stack(parts, axis=1)
        whole = np.stack((np.log1p(series.lengths), series.spans / unit), axis=1)
        return np.hstack((found.reshape(len(series), -1), whole)).astype(np.float32)

    def names(self) -> list[FeatureName]:
        """Return names in the order of the columns."""
        found = [FeatureName(self.name, (v,), k) for v in self.columns.features for k in OF_TIMES]
        return found + [FeatureName(self.name, (), kind) for kind in OF_SERIES]


class Static(Family):
    """Static features, whether each is known, and which of a few values it has, if they are few."""

    name: ClassVar[str] = "static"
    group: ClassVar[str] = "summary"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        found = np.full((len(self.columns.static), _MOST_KINDS), np.nan, dtype=np.float32)
        for number, column in enumerate(() if sample.static is None else sample.static.T):
            kinds = np.unique(column[~np.isnan(column)])
            if 2 < len(kinds) <= _MOST_KINDS:
                found[number, : len(kinds)] = kinds
        return {"kinds": found}

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return values, whether they are missing, and indicators of kinds."""
        if series.static is None:
            return np.zeros((len(series), 0), dtype=np.float32)
        missing = np.isnan(series.static)
        kinds = self.arrays["kinds"]
        is_kind = (series.static[:, :, None] == kinds)[:, ~np.isnan(kinds)]
        return np.hstack((np.where(missing, 0.0, series.static), missing, is_kind)).astype(
            np.float32
        )

    def names(self) -> list[FeatureName]:
        """Return names in the order of the columns."""
        pairs = [(v, kind) for kind in ("value", "missing") for v in self.columns.static]
        for variable, kinds in zip(self.columns.static, self.arrays["kinds"], strict=True):
            known = kinds[~np.isnan(kinds)]
            pairs += [(variable, f"kind {k + 1} of {len(known)}") for k in range(len(known))]
        return [FeatureName(self.name, (variable,), kind) for variable, kind in pairs]


def _counts(series: IrregularSeries, rows: np.ndarray) -> np.ndarray:
    """Return how many of the rows each series has."""
    return np.bincount(series_of_rows(series.offsets)[rows], minlength=len(series))
