"""What a model sees and what it is asked: cuts for forecasts, hidden values for imputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._types import Bool, Float, Int
from osciformer.data.ragged import offsets_of, series_of_rows
from osciformer.data.series import IrregularSeries
from osciformer.events import EventSequences

#: In training: chance of each part of the later rows that show what is known ahead.
SHOWN_AHEAD = {1.0: 0.5, 0.5: 0.25, 0.0: 0.25}
#: Times must lie within this of 0 in their unit, and gaps be above its inverse: ages are float32.
LARGEST_TIME = 1e30
_NAN = np.float32(np.nan)


def keep_rows(
    series: IrregularSeries, keep: Bool[np.ndarray, "T"], values: Float[np.ndarray, "T F"]
) -> IrregularSeries:
    """Return the series with other values, and some of their rows."""
    counts = np.bincount(series_of_rows(series.offsets)[keep], minlength=len(series))
    return series.replace(times=series.times[keep], values=values[keep], offsets=offsets_of(counts))


def drop_blank_rows(
    series: IrregularSeries, values: Float[np.ndarray, "T F"] | None = None
) -> IrregularSeries:
    """Return the series, perhaps with other values, without rows in which nothing is observed."""
    values = series.values if values is None else values
    return keep_rows(series, ~np.isnan(values).all(axis=1), values)


@dataclass(frozen=True)
class Columns:
    """Which features are predicted, and which are known beforehand."""

    is_target: Bool[np.ndarray, "F"]  # features that are predicted; the others are inputs only
    is_known: Bool[np.ndarray, "F"]  # inputs that are known after the cut too
    clip: float | None  # bound on the absolute scaled input; targets are not clipped

    def clipped(self, values: Float[np.ndarray, "T F"]) -> Float[np.ndarray, "T F"]:
        """Return values as inputs."""
        return values if self.clip is None else values.clip(-self.clip, self.clip)

    def as_inputs(self, series: IrregularSeries) -> IrregularSeries:
        """Return scaled series as a trained model sees them."""
        return drop_blank_rows(series, self.clipped(series.values))


def find_columns(
    names: Sequence[str], covariates: Sequence[str], known: Sequence[str], clip: float | None
) -> Columns:
    """Return the roles of features by name, and refuse names that there are not."""
    for what, given in (("covariates", covariates), ("known_covariates", known)):
        if isinstance(given, str):
            raise TypeError(f"{what} must be a list of names; got {given!r}. Use [{given!r}]")
        absent = [name for name in given if name not in names]
        if absent:
            raise ValueError(f"{what} names {absent}, which X lacks; it has {list(names)}")
    is_known = np.array([name in known for name in names])
    is_target = ~is_known & np.array([name not in covariates for name in names])
    if not is_target.any():
        raise ValueError("all features are covariates; at least one must be left to predict")
    return Columns(is_target, is_known, clip)


@dataclass(frozen=True)
class ForecastDraw:
    """Cuts each series: what is before is input, what follows within a horizon is asked."""

    columns: Columns
    horizon: float  # how far after the cut observations are asked
    # Cut at the horizon before the last row (but not before the first row), rather than at a random
    # row, and show all inputs that are known ahead.
    at_end: bool = False

    def __call__(
        self, series: IrregularSeries, generator: np.random.Generator
    ) -> tuple[IrregularSeries, IrregularSeries]:
        """Return inputs and queries."""
        cut = self._cut_times(series, generator)[series_of_rows(series.offsets)]
        is_after = series.times > cut
        is_shown = ~is_after[:, None] | self.columns.is_known
        if self.columns.is_known.any() and not self.at_end:
            # A model that met them in every row it is asked about could not answer at other times.
            is_shown &= (~is_after | _shown_ahead(series, generator))[:, None]
        seen = np.where(is_shown, series.values, _NAN)
        asked = np.where(self.columns.is_target, series.values, _NAN)
        is_asked = is_after & (series.times <= cut + self.horizon) & ~np.isnan(asked).all(axis=1)
        inputs = drop_blank_rows(series, self.columns.clipped(seen))
        return inputs, keep_rows(series, is_asked, asked)

    def _cut_times(
        self, series: IrregularSeries, generator: np.random.Generator
    ) -> Float[np.ndarray, "n"]:
        lengths, starts = series.lengths, series.offsets[:-1]
        if len(series.times) == 0:
            return np.zeros(len(series))
        first = series.times[np.minimum(starts, len(series.times) - 1)]
        if self.at_end:
            return np.maximum(first + series.spans - self.horizon, first)
        # Any row but the last, after which there would be nothing to ask.
        row = (generator.random(len(series)) * np.maximum(lengths - 1, 1)).astype(np.int64)
        return series.times[np.minimum(starts + row, len(series.times) - 1)]


def _shown_ahead(series: IrregularSeries, generator: np.random.Generator) -> Bool[np.ndarray, "T"]:
    """Return which rows show what is known ahead: of each series all, about half, or none."""
    shares, chances = zip(*SHOWN_AHEAD.items(), strict=True)
    share = generator.choice(shares, size=len(series), p=chances)
    return generator.random(len(series.times)) < share[series_of_rows(series.offsets)]


@dataclass(frozen=True)
class HideDraw:
    """Hides a fraction of the observed targets of each series, and asks for them."""

    columns: Columns
    fraction: float

    def __call__(
        self, series: IrregularSeries, generator: np.random.Generator
    ) -> tuple[IrregularSeries, IrregularSeries]:
        """Return inputs and queries; a series always keeps at least one value."""
        observed = ~np.isnan(series.values)
        hide = observed & self.columns.is_target
        hide &= generator.random(series.values.shape, dtype=np.float32) < self.fraction
        owner = series_of_rows(series.offsets)
        left = np.bincount(owner, weights=(observed & ~hide).sum(axis=1), minlength=len(series))
        hide &= (left > 0)[owner, None]
        seen = self.columns.clipped(np.where(hide, _NAN, series.values))
        queries = keep_rows(series, hide.any(axis=1), np.where(hide, series.values, _NAN))
        return drop_blank_rows(series, seen), queries


def is_list_of_times(times: Any, count: int, what: str) -> bool:
    """Return whether times are a list with an array per series, and not one array for all."""
    is_list = len(times) > 0 and np.ndim(times[0]) > 0
    if is_list and len(times) != count:
        plural = what if what == "series" else f"{what}s"
        raise ValueError(
            f"times must be one array for all {plural}, or a list of {count} arrays, one per "
            f"{what}; got {len(times)}"
        )
    return is_list


def flatten_times(
    series: IrregularSeries | EventSequences,
    times: Sequence[Any],
    *,
    relative_to: Float[np.ndarray, "n"] | None = None,
) -> tuple[Float[np.ndarray, "Q"], Int[np.ndarray, "n+1"]]:
    """Return query times, an array [M] per series, one after another, and their offsets.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0], [2.0]], [[1.0], [3.0]])
        >>> flatten_times(series, [[1.0, 5.0], [3.0]], relative_to=np.array([10.0, 20.0]))
        (array([11., 15., 23.]), array([0, 2, 3]))
    """
    lists = [np.asarray(array) for array in times]
    for number, array in enumerate(lists):
        if array.ndim != 1:
            raise ValueError(
                f"the times of a series must be [M]; those of series number {number} have the "
                f"shape {list(array.shape)}"
            )
    offsets = offsets_of(np.array([len(array) for array in lists]))
    flat = np.concatenate(lists)
    owner = series_of_rows(offsets)
    if relative_to is not None:
        flat = np.asarray(flat, dtype=np.float64) + relative_to[owner]
    elif flat.dtype.kind in "Mm" or series.time_axis.kind == "number":
        flat = series.encode_times(flat, owner)
    flat = np.asarray(flat, dtype=np.float64)
    refuse_far_times(series, flat, offsets, "is asked about")
    return flat, offsets


def refuse_far_times(
    series: IrregularSeries | EventSequences,
    times: Float[np.ndarray, "Q"],
    offsets: Int[np.ndarray, "n+1"],
    verb: str = "has",
) -> None:
    """Refuse times, of the rows of series or asked about, that a model cannot compute with."""
    far = ~(np.abs(times) <= LARGEST_TIME)
    if far.any():
        row = int(np.argmax(far))
        what = "sequence" if isinstance(series, EventSequences) else "series"
        name = f"{what} {series.ids[series_of_rows(offsets)[row]]!s}"
        raise ValueError(
            f"times must be finite and within {LARGEST_TIME:g} of 0; {name} {verb} the time "
            f"{times[row]:g}. Check the unit of times and horizons"
        )


def last_target_times(
    series: IrregularSeries, is_target: Bool[np.ndarray, "F"]
) -> Float[np.ndarray, "n"]:
    """Return when a target was last observed in each series; if never, its first time or 0."""
    observed = ~np.isnan(series.values[:, is_target]).all(axis=1)
    owner = series_of_rows(series.offsets)
    last = np.zeros(len(series))
    some = series.lengths > 0
    last[some] = series.times[series.offsets[:-1][some]]
    np.maximum.at(last, owner[observed], series.times[observed])
    return last


def _feature_by_feature(
    series: IrregularSeries,
    queries: IrregularSeries,
    value_at: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> Float[np.ndarray, "Q F"]:
    """Return values at the queries, given their times, and known times and values; 0 for none."""
    found = np.zeros_like(queries.values)
    for position in range(len(series)):
        one, rows = series[position], slice(*queries.offsets[position : position + 2])
        for column in range(series.num_features):
            here = ~np.isnan(one.values[:, column])
            if here.any():
                known = one.times[here], one.values[here, column]
                found[rows, column] = value_at(queries.times[rows], *known)
    return found


def last_value_before(
    series: IrregularSeries, queries: IrregularSeries
) -> Float[np.ndarray, "Q F"]:
    """Return the last value of each feature at or before each query; 0 if there is none."""

    def hold(asked: np.ndarray, times: np.ndarray, values: np.ndarray) -> np.ndarray:
        last = np.searchsorted(times, asked, side="right") - 1
        return np.where(last >= 0, values[np.maximum(last, 0)], 0.0)

    return _feature_by_feature(series, queries, hold)


def interpolate(series: IrregularSeries, queries: IrregularSeries) -> Float[np.ndarray, "Q F"]:
    """Return each feature, interpolated (flat at the ends); 0 if it has no value."""
    return _feature_by_feature(series, queries, np.interp)
