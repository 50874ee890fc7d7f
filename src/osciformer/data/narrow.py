"""From rows of (series, time, variable, value) to rows with one column per variable."""

from __future__ import annotations

import numpy as np

from osciformer._types import Float, Int
from osciformer.data.ragged import offsets_of
from osciformer.data.ties import Duplicates


def pivot(
    owner: Int[np.ndarray, "T"],
    times: Float[np.ndarray, "T"],
    feature: Int[np.ndarray, "T"],
    value: Float[np.ndarray, "T"],
    *,
    num_series: int,
    feature_names: tuple[str, ...],
    ids: np.ndarray,
    duplicates: Duplicates,
) -> tuple[Float[np.ndarray, "R"], Float[np.ndarray, "R F"], Int[np.ndarray, "n+1"]]:
    """Return one row per series and time, with a column per variable and NaN where none was given.

    Args:
        owner: Series of each value, not decreasing.
        times: Time of each value, not decreasing within a series.
        feature: Column of each value.
        value: The values, not NaN.
        num_series: Number of series n.
        feature_names: Names of the F columns, for messages.
        ids: Names of the series, for messages [n].
        duplicates: For several values of one variable at one time: `error`, `mean`, `last`, or
            `keep`, which gives several rows at that time.

    Returns:
        Times, values and offsets.

    Example:
        >>> owner, times, feature = np.zeros(3, int), np.array([1.0, 1.0, 2.0]), np.array([0, 1, 0])
        >>> names, ids = ("a", "b"), np.array([7])
        >>> rules = {"feature_names": names, "ids": ids, "duplicates": "error"}
        >>> pivot(owner, times, feature, np.array([5.0, 6.0, 7.0]), num_series=1, **rules)[1]
        array([[ 5.,  6.],
               [ 7., nan]], dtype=float32)
    """
    width = len(feature_names)
    if len(owner) == 0:
        return np.empty(0), np.empty((0, width), dtype=np.float32), np.zeros(num_series + 1, int)
    begins = np.concatenate(([True], (np.diff(owner) != 0) | (np.diff(times) != 0)))
    row = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    table = np.full((len(first), width), np.nan, dtype=np.float32)
    table[row, feature] = value  # of several values the last one stays
    row_owner, row_times = owner[first], times[first]
    num_repeated = len(value) - int(np.count_nonzero(~np.isnan(table)))
    if num_repeated and duplicates != "last":
        order = np.argsort(row * width + feature, kind="stable")
        cell = (row * width + feature)[order]
        fresh = np.concatenate(([True], np.diff(cell) != 0))
        if duplicates == "error":
            where = order[np.argmin(fresh)]
            raise ValueError(
                f"{num_repeated} values repeat a variable at the same time of a series, such as "
                f"{feature_names[feature[where]]!r} at t={times[where]:g} of series "
                f"{ids[owner[where]]!s}; pass duplicates='mean', 'last' or 'keep'"
            )
        starts = np.flatnonzero(fresh)
        if duplicates == "mean":
            total = np.add.reduceat(value[order].astype(np.float64), starts)
            table.reshape(-1)[cell[starts]] = total / np.diff(np.append(starts, len(cell)))
        else:
            rank = np.empty(len(cell), dtype=np.int64)
            rank[order] = np.arange(len(cell)) - np.repeat(
                starts, np.diff(np.append(starts, len(cell)))
            )
            copies = np.maximum.reduceat(rank, first) + 1
            row = offsets_of(copies)[row] + rank
            table = np.full((int(copies.sum()), width), np.nan, dtype=np.float32)
            table[row, feature] = value
            row_owner, row_times = np.repeat(row_owner, copies), np.repeat(row_times, copies)
    offsets = offsets_of(np.bincount(row_owner, minlength=num_series))
    return row_times, table, offsets
