"""Several rows of one series at one time: refuse, merge or keep them."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from osciformer._types import Bool, Float, Int
from osciformer.data.checks import check_choice, name_some
from osciformer.data.ragged import offsets_of, series_of_rows

Duplicates = Literal["error", "mean", "last", "keep"]


def settle_ties(
    times: Float[np.ndarray, "T"],
    values: Float[np.ndarray, "T F"],
    offsets: Int[np.ndarray, "n+1"],
    ids: np.ndarray,
    *,
    duplicates: Duplicates,
) -> tuple[Float[np.ndarray, "R"], Float[np.ndarray, "R F"], Int[np.ndarray, "n+1"]]:
    """Return rows in which times of a series differ, unless ties are kept.

    Args:
        times: Times, not decreasing within a series.
        values: Values; NaN is a missing one.
        offsets: Where each series begins.
        ids: Names of the series, for messages [n].
        duplicates: `error`; `mean` of the values that are there, feature by feature; `last`, the
            last value that is there, feature by feature; `keep` all rows, as separate observations
            at one time.

    Returns:
        Times, values and offsets of the rows that are left.

    Example:
        >>> times, values = np.array([0.0, 0.0, 1.0]), np.array([[1.0], [3.0], [5.0]], np.float32)
        >>> offsets, ids = np.array([0, 3]), np.array(["a"])
        >>> settle_ties(times, values, offsets, ids, duplicates="mean")[1].ravel()
        array([2., 5.], dtype=float32)
    """
    check_choice("duplicates", duplicates, get_args(Duplicates))
    if duplicates == "keep" or len(times) == 0:
        return times, values, offsets
    begins = np.concatenate(([True], np.diff(times) != 0))
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    if begins.all():
        return times, values, offsets
    owner = series_of_rows(offsets)
    if duplicates == "error":
        repeated = np.flatnonzero(~begins)
        first = repeated[0]
        raise ValueError(
            f"{len(repeated)} rows have the time of another row of their series, the first at "
            f"t={times[first]:g} of series {ids[owner[first]]!s}; series concerned: "
            f"{name_some(ids[np.unique(owner[repeated])])}. Pass duplicates='mean' or 'last' to "
            "merge such rows, or 'keep' to take them as separate observations at one time"
        )
    merged = values[begins]
    tied = _in_group_of_several(begins)
    groups = np.cumsum(begins)[tied] - 1
    merged[np.unique(groups)] = _merge(values[tied], begins[tied], duplicates)
    lengths = np.bincount(owner[begins], minlength=len(offsets) - 1)
    return times[begins], merged, offsets_of(lengths)


def _in_group_of_several(begins: Bool[np.ndarray, "T"]) -> Bool[np.ndarray, "T"]:
    ends = np.concatenate((begins[1:], [True]))
    return ~(begins & ends)


def _merge(
    values: Float[np.ndarray, "T F"], begins: Bool[np.ndarray, "T"], how: str
) -> Float[np.ndarray, "R F"]:
    starts = np.flatnonzero(begins)
    observed = ~np.isnan(values)
    if how == "last":
        row = np.where(observed, np.arange(len(values))[:, None], -1)
        latest = np.maximum.reduceat(row, starts, axis=0)
        picked = np.take_along_axis(values, np.maximum(latest, 0), axis=0)
        return np.where(latest >= 0, picked, np.float32(np.nan))
    count = np.add.reduceat(observed.astype(np.int64), starts, axis=0)
    total = np.add.reduceat(np.where(observed, values.astype(np.float64), 0.0), starts, axis=0)
    mean = total / np.maximum(count, 1)
    return np.where(count > 0, mean, np.nan).astype(np.float32)
