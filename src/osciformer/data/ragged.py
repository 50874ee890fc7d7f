"""Flat arrays of ragged series: index arithmetic, checks, and several rows at one time.

The rows of all series lie one after another, T in all; `offsets` [n + 1] says where each series
begins, followed by T.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from osciformer._advice import Mention, advise
from osciformer._text import check_choice, name_some
from osciformer._types import Float, Int

Duplicates = Literal["error", "mean", "last", "keep"]
# Beyond these a float64 and a float32 cannot tell neighbouring integers apart.
EXACT_INTEGER, EXACT_IN_FLOAT32 = 2**53, 2**24


DATES_AS_LABELS = "Make them text for classes, or numbers, such as days, for targets"


class Rows(NamedTuple):
    """Times [T], values [T, F] and offsets [n + 1] of ragged series."""

    times: Float[np.ndarray, "T"]
    values: Float[np.ndarray, "T F"]
    offsets: Int[np.ndarray, "n+1"]


def offsets_of(lengths: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n+1"]:
    """Return where each series begins, followed by the total: lengths 2, 0, 3 give 0, 2, 2, 5."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def series_of_rows(offsets: Int[np.ndarray, "n+1"]) -> Int[np.ndarray, "T"]:
    """Return the position of the series of each row: offsets 0, 2, 2, 5 give 0, 0, 2, 2, 2."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def rows_of_series(
    offsets: Int[np.ndarray, "n+1"], index: Int[np.ndarray, "m"]
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "m+1"]]:
    """Return the rows of the chosen series, one after another, and the offsets of the choice."""
    chosen = offsets_of(offsets[index + 1] - offsets[index])
    shift = np.repeat(offsets[index] - chosen[:-1], np.diff(chosen))
    return np.arange(chosen[-1]) + shift, chosen


def locate(offsets: Int[np.ndarray, "n+1"], row: int) -> tuple[int, int]:
    """Return the series that a row belongs to, and its step there."""
    series = int(np.searchsorted(offsets, row, side="right")) - 1
    return series, row - int(offsets[series])


def positions_of(key: Any, length: int) -> Int[np.ndarray, "m"]:
    """Return the positions that an index array, a list or a boolean mask names."""
    array = np.asarray(key)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise IndexError(f"an index must be one-dimensional; got the shape {list(array.shape)}")
    if array.dtype.kind not in "biu":
        raise IndexError(
            f"series are indexed by integers, booleans or slices; got {array.dtype}. "
            "To select by id: series[np.isin(series.ids, wanted)]"
        )
    if array.dtype == np.bool_ and len(array) != length:
        raise IndexError(f"a boolean index needs one entry per series, {length}; got {len(array)}")
    try:
        return np.arange(length)[array]
    except IndexError:
        wrong = array[(array < -length) | (array >= length)][0]
        raise IndexError(f"index {wrong} is out of range for {length} series") from None


def flatten(times: Sequence[Any], values: Sequence[Any]) -> Rows:
    """Return lists of per-series times [N] and values [N, F], or [N], as flat rows."""
    if len(times) != len(values):
        counts = f"{len(times)} and {len(values)}"
        raise ValueError(f"times and values must have one entry per series; got {counts}")
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
    return Rows(np.concatenate(columns), np.concatenate(tables), offsets_of(lengths))


def check_shape(name: str, array: np.ndarray, *shapes: tuple[int | str, ...]) -> None:
    """Refuse an array that has none of the shapes; a letter stands for any length."""
    for shape in shapes:
        fixed = {axis: size for axis, size in enumerate(shape) if not isinstance(size, str)}
        if len(shape) == array.ndim and all(array.shape[k] == size for k, size in fixed.items()):
            return
    allowed = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
    raise ValueError(f"{name} must be {allowed}; got {list(array.shape)}")


def as_float_array(name: str, array: Any, dtype: Any, *shapes: tuple[int | str, ...]) -> np.ndarray:
    """Return the array as floats, of one of the shapes if any are given.

    Whole numbers beyond 2**53 are refused in float64, and those that lose digits in float32 make a
    warning.
    """
    source = np.asarray(array)
    if source.dtype.kind not in "fiub":
        raise TypeError(
            f"{name} must be numbers; got {source.dtype}. Encode categories as numbers first, and "
            "read dates with osciformer.data.from_frame"
        )
    if shapes:
        check_shape(name, source, *shapes)
    if source.dtype.kind in "iu" and dtype != np.float32:
        far = (source > EXACT_INTEGER) | (source < -EXACT_INTEGER)
        if far.any():
            raise ValueError(
                f"{name} must not be integers beyond 2**53, where float64 cannot tell neighbours "
                f"apart; got {source[far][0]}. Count from a later time, such as the first one"
            )
    with np.errstate(over="ignore"):  # what does not fit becomes inf, which is refused by name
        floats = np.ascontiguousarray(source, dtype=dtype)
    if dtype == np.float32:
        warn_of_lost_digits(source, floats, name)
    return floats


def warn_of_lost_digits(source: np.ndarray, narrow: Float[np.ndarray, "..."], what: str) -> None:
    """Warn if whole numbers lost digits when they became float32; `what` names them."""
    if source.dtype.kind not in "iuf" or source.dtype == np.float32:
        return
    far = (source > EXACT_IN_FLOAT32) | (source < -EXACT_IN_FLOAT32)
    if source.dtype.kind == "f":  # beyond 2**53 it is a large quantity, not a count
        far &= (np.abs(source) <= EXACT_INTEGER) & (np.floor(source) == source)
    wide, kept = source[far], narrow[far]
    with np.errstate(invalid="ignore"):  # the largest integers round up to more than they can be
        lost = np.flatnonzero(kept.astype(source.dtype) != wide)
    if len(lost):
        warnings.warn(
            f"{what}: {len(lost)} whole numbers beyond 2**24 lose digits, since values are float32,"
            f" such as {int(wide[lost[0]])}, which becomes {int(kept[lost[0]])}. Subtract an "
            "offset, or leave the column out if it is a code",
            stacklevel=2,
        )


def as_plain_array(name: str, array: Any) -> np.ndarray:
    """Return an array of numbers, booleans, text or dates, but not of Python objects."""
    array = np.asarray(array)
    if array.dtype.kind == "O":
        kinds = sorted({type(item).__name__ for item in array.ravel()})
        if kinds != ["str"]:
            mixture = ", ".join(kinds)
            raise TypeError(f"{name} must be all numbers or all text; got a mixture of {mixture}")
        array = array.astype(np.str_)
    if array.dtype.kind not in "biufUM":
        raise TypeError(f"{name} must be numbers or text; got {array.dtype}")
    return array


def check_distinct(ids: Any) -> None:
    """Refuse ids, if any are given, that name two series alike."""
    if ids is None:
        return
    entries, counts = np.unique(as_plain_array("ids", ids), return_counts=True)
    if (counts > 1).any():
        twice = f"{name_some(entries[counts > 1])} occurs more than once"
        raise ValueError(f"ids must differ from each other; {twice}. Join those series first")


def check_offsets(offsets: Int[np.ndarray, "n+1"], num_rows: int) -> None:
    """Refuse offsets that do not rise from 0 to the number of rows."""
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ValueError(f"offsets must be [n + 1]; got the shape {list(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] != num_rows or (np.diff(offsets) < 0).any():
        found = f"they go from {offsets[0]} to {offsets[-1]}"
        raise ValueError(f"offsets must rise from 0 to the number of rows, {num_rows}; {found}")


def check_times(
    times: Float[np.ndarray, "T"], offsets: Int[np.ndarray, "n+1"], ids: np.ndarray
) -> None:
    """Refuse times that are not finite, or that decrease within a series."""
    wrong = ~np.isfinite(times)
    if wrong.any():
        row = int(np.argmax(wrong))
        series, step = locate(offsets, row)
        found = f"series {ids[series]!s} has t[{step}]={times[row]}"
        raise ValueError(f"times must be finite; {found}. Drop rows without a time")
    falls, starts = np.diff(times) < 0, offsets[1:-1]
    falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
    if falls.any():
        row = int(np.argmax(falls)) + 1
        series, step = locate(offsets, row)
        raise ValueError(
            f"times must not decrease within a series; series {ids[series]!s} has "
            f"t[{step}]={times[row]:g} < t[{step - 1}]={times[row - 1]:g}. "
            "Sort the rows by time, or pass sort=True to from_arrays"
        )


def check_values(
    values: Float[np.ndarray, "T F"],
    offsets: Int[np.ndarray, "n+1"],
    ids: np.ndarray,
    feature_names: tuple[str, ...],
) -> None:
    """Refuse infinite values; NaN is a missing one."""
    infinite = np.isinf(values)
    if infinite.any():
        row, feature = np.argwhere(infinite)[0]
        series, step = locate(offsets, int(row))
        raise ValueError(
            f"values must be finite float32 or NaN for missing; feature {feature_names[feature]!r} "
            f"of series {ids[series]!s} is {values[row, feature]} at step {step}. "
            "Replace infinite values by NaN, or rescale values beyond 3e38"
        )


def check_names(name: str, names: Sequence[str] | None, count: int, prefix: str) -> tuple[str, ...]:
    """Return the names as a tuple, made up from the prefix if there are none."""
    if names is None:
        return tuple(f"{prefix}_{i}" for i in range(count))
    names = tuple(str(item) for item in names)
    if len(names) != count:
        raise ValueError(f"{name} must have {count} entries; got {len(names)}: {name_some(names)}")
    if len(set(names)) != count:
        twice = sorted({item for item in names if names.count(item) > 1})
        raise ValueError(f"{name} must differ from each other; {name_some(twice)} occurs twice")
    return names


def check_static(static: Any, num_series: int) -> Float[np.ndarray, "n S"]:
    """Return static features as float32 [n, S]."""
    static = as_float_array("static", static, np.float32, (num_series, "S"))
    if np.isinf(static).any():
        series = int(np.isinf(static).any(axis=1).argmax())
        raise ValueError(f"static must be finite or NaN; series number {series} has an infinity")
    return static


def check_labels(labels: Any, num_series: int) -> np.ndarray:
    """Return labels as an array [n], or real targets as [n, K], without missing ones."""
    labels = as_plain_array("labels", labels)
    check_shape("labels", labels, (num_series,), (num_series, "K"))
    if labels.dtype.kind == "M":
        raise TypeError(f"labels must be numbers or text; got dates. {DATES_AS_LABELS}")
    if labels.ndim == 2 and labels.dtype.kind not in "fiub":
        raise TypeError(f"labels [n, K] must be real targets; got {labels.dtype}")
    if labels.dtype.kind == "f":
        missing = ~np.isfinite(labels.reshape(num_series, -1)).all(axis=1)
        if missing.any():
            raise ValueError(
                f"labels must be finite; series number {name_some(np.flatnonzero(missing))} has "
                "none. Drop those series, or leave labels out for prediction"
            )
    return labels


def merge_equal_times(rows: Rows, ids: np.ndarray, *, duplicates: Duplicates) -> Rows:
    """Return rows whose times differ within each series, merged by feature, unless kept."""
    check_choice("duplicates", duplicates, get_args(Duplicates))
    times, values, offsets = rows
    if duplicates == "keep" or len(times) == 0:
        return rows
    begins = np.concatenate(([True], np.diff(times) != 0))
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    if begins.all():
        return rows
    owner = series_of_rows(offsets)
    if duplicates == "error":
        wrong = np.flatnonzero(~begins)
        raise advise(
            ValueError,
            f"{len(wrong)} rows have the time of another row of their series, the first at "
            f"t={times[wrong[0]]:g} of series {ids[owner[wrong[0]]]!s}; series concerned: "
            f"{name_some(ids[np.unique(owner[wrong])])}. Pass ",
            Mention("duplicates", "mean"),
            " or 'last' to merge such rows, or 'keep' to take them as separate observations at one "
            "time",
        )
    tied = ~(begins & np.append(begins[1:], True))  # rows that share their time with another row
    groups, starts = np.cumsum(begins)[tied] - 1, np.flatnonzero(begins[tied])
    repeated, merged = values[tied], values[begins]
    observed = ~np.isnan(repeated)
    if duplicates == "last":
        row = np.where(observed, np.arange(len(repeated))[:, None], -1)
        latest = np.maximum.reduceat(row, starts, axis=0)
        settled = np.take_along_axis(repeated, np.maximum(latest, 0), axis=0)
        settled[latest < 0] = np.nan
    else:
        count = np.add.reduceat(observed.astype(np.int64), starts, axis=0)
        total = np.add.reduceat(np.where(observed, repeated, 0.0).astype(float), starts, axis=0)
        settled = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    merged[np.unique(groups)] = settled
    lengths = np.bincount(owner[begins], minlength=len(offsets) - 1)
    return Rows(times[begins], merged, offsets_of(lengths))


def pivot_variables(
    owner: Int[np.ndarray, "E"],
    times: Float[np.ndarray, "E"],
    feature: Int[np.ndarray, "E"],
    value: Float[np.ndarray, "E"],
    *,
    ids: np.ndarray,
    feature_names: tuple[str, ...],
    duplicates: Duplicates,
) -> Rows:
    """Return a row per series and time, with a column per variable and NaN where there is no entry.

    Entries are sorted by series (`owner`) and time, and none is NaN; `keep` may repeat rows.
    """
    width = len(feature_names)
    if len(owner) == 0:
        empty = np.empty((0, width), dtype=np.float32)
        return Rows(np.empty(0), empty, np.zeros(len(ids) + 1, dtype=np.int64))
    begins = np.concatenate(([True], (np.diff(owner) != 0) | (np.diff(times) != 0)))
    row, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
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
            raise advise(
                ValueError,
                f"{num_repeated} values repeat a variable at the same time of a series, such as "
                f"{feature_names[feature[where]]!r} at t={times[where]:g} of series "
                f"{ids[owner[where]]!s}; pass ",
                Mention("duplicates", "mean"),
                ", 'last' or 'keep'",
            )
        starts = np.flatnonzero(fresh)
        counts = np.diff(np.append(starts, len(cell)))
        if duplicates == "mean":
            total = np.add.reduceat(value[order].astype(np.float64), starts)
            table.reshape(-1)[cell[starts]] = total / counts
        else:
            rank = np.empty(len(cell), dtype=np.int64)
            rank[order] = np.arange(len(cell)) - np.repeat(starts, counts)
            copies = np.maximum.reduceat(rank, first) + 1
            row = offsets_of(copies)[row] + rank
            table = np.full((int(copies.sum()), width), np.nan, dtype=np.float32)
            table[row, feature] = value
            row_owner, row_times = np.repeat(row_owner, copies), np.repeat(row_times, copies)
    return Rows(row_times, table, offsets_of(np.bincount(row_owner, minlength=len(ids))))
