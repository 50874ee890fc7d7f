"""Index arithmetic of ragged arrays: the rows of all series, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from osciformer._types import Float, Int
from osciformer.data.checks import as_float_array


def offsets_of(lengths: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n+1"]:
    """Return where each series begins, and behind them the total.

    Example:
        >>> offsets_of(np.array([2, 0, 3]))
        array([0, 2, 2, 5])
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def series_of_rows(offsets: Int[np.ndarray, "n+1"]) -> Int[np.ndarray, "T"]:
    """Return the position of the series that each row belongs to.

    Example:
        >>> series_of_rows(np.array([0, 2, 2, 5]))
        array([0, 0, 2, 2, 2])
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def rows_of_series(
    offsets: Int[np.ndarray, "n+1"], index: Int[np.ndarray, "m"]
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "m+1"]]:
    """Return the rows of the chosen series, one after another, and the offsets of the choice.

    Example:
        >>> rows_of_series(np.array([0, 2, 2, 5]), np.array([2, 0]))
        (array([2, 3, 4, 0, 1]), array([0, 3, 5]))
    """
    chosen = offsets_of(offsets[index + 1] - offsets[index])
    shift = np.repeat(offsets[index] - chosen[:-1], np.diff(chosen))
    return np.arange(chosen[-1]) + shift, chosen


def positions_of(key: Any, length: int) -> Int[np.ndarray, "m"]:
    """Return the positions that an index array, a list or a boolean mask names.

    Args:
        key: Integers (negative ones count from the end) or one boolean per series.
        length: Number of series.

    Example:
        >>> positions_of([True, False, True], 3), positions_of([-1, 0], 3)
        (array([0, 2]), array([2, 0]))
    """
    array = np.asarray(key)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise IndexError(f"an index must be one-dimensional; got the shape {list(array.shape)}")
    if array.dtype == np.bool_:
        if len(array) != length:
            raise IndexError(
                f"a boolean index must have one entry per series, {length}; got {len(array)}"
            )
        return np.flatnonzero(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise IndexError(
            f"series are indexed by integers, booleans or slices; got {array.dtype}. "
            "To select by id: series[np.isin(series.ids, wanted)]"
        )
    outside = (array < -length) | (array >= length)
    if outside.any():
        raise IndexError(f"index {array[outside][0]} is out of range for {length} series")
    return np.where(array < 0, array + length, array).astype(np.int64)


def flatten(
    times: Sequence[Any], values: Sequence[Any]
) -> tuple[Float[np.ndarray, "T"], Float[np.ndarray, "T F"], Int[np.ndarray, "n+1"]]:
    """Return lists of per-series arrays as flat arrays with offsets.

    Args:
        times: One array [N] per series.
        values: One array [N, F] per series, or [N] for a single feature.

    Example:
        >>> flatten([[0.0, 1.0], [5.0]], [[1, 2], [3]])[2]
        array([0, 2, 3])
    """
    if len(times) != len(values):
        raise ValueError(
            f"times and values must have one entry per series; got {len(times)} and {len(values)}"
        )
    if len(times) == 0:
        raise ValueError("times must hold at least one series; got none")
    tables = [as_float_array("values", table, np.float32) for table in values]
    tables = [table[:, None] if table.ndim == 1 else table for table in tables]
    columns = [as_float_array("times", column, np.float64) for column in times]
    width = max((table.shape[1] for table in tables if table.ndim == 2), default=0)
    for number, (column, table) in enumerate(zip(columns, tables, strict=True)):
        if table.shape == (0, 1) and width != 1:
            tables[number] = table.reshape(0, width)  # an empty list does not tell its width
        elif column.ndim != 1 or table.shape != (len(column), width):
            raise ValueError(
                f"series number {number} must have times [N] and values [N, {width}]; "
                f"got {list(column.shape)} and {list(table.shape)}"
            )
    lengths = np.array([len(column) for column in columns])
    return np.concatenate(columns), np.concatenate(tables), offsets_of(lengths)
