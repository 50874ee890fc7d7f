"""Checks of ragged arrays at the door, each with an error that names the series and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from osciformer._types import Float, Int

NUM_NAMED = 5


def name_some(items: Iterable[Any]) -> str:
    """Return the first few items as text, and how many more there are.

    Example:
        >>> name_some(range(8))
        '0, 1, 2, 3, 4 and 3 more'
    """
    items = [item.item() if isinstance(item, np.generic) else item for item in items]
    shown = ", ".join(repr(item) for item in items[:NUM_NAMED])
    more = len(items) - NUM_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {choices}; got {value!r}")


def as_float_array(name: str, array: Any, dtype: Any) -> np.ndarray:
    """Return the array as floats, and say which argument holds something else."""
    source = np.asarray(array)
    if source.dtype.kind not in "fiub":
        raise TypeError(
            f"{name} must be numbers; got {source.dtype}. Encode categories as numbers first, and "
            "read dates with osciformer.data.from_frame"
        )
    with np.errstate(over="ignore"):  # what does not fit becomes inf, which is refused by name
        return np.ascontiguousarray(source, dtype=dtype)


def check_offsets(offsets: Int[np.ndarray, "n+1"], num_rows: int) -> None:
    """Refuse offsets that do not rise from 0 to the number of rows."""
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ValueError(f"offsets must be [n + 1]; got the shape {list(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] != num_rows or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"offsets must rise from 0 to the number of rows, {num_rows}; "
            f"they go from {offsets[0]} to {offsets[-1]}"
        )


def check_times(
    times: Float[np.ndarray, "T"], offsets: Int[np.ndarray, "n+1"], ids: np.ndarray
) -> None:
    """Refuse times that are not finite, or that decrease within a series."""
    wrong = ~np.isfinite(times)
    if wrong.any():
        row = int(np.argmax(wrong))
        series, step = locate(offsets, row)
        raise ValueError(
            f"times must be finite; series {ids[series]!s} has t[{step}]={times[row]}. "
            "Drop rows without a time"
        )
    row = first_decrease(times, offsets)
    if row >= 0:
        series, step = locate(offsets, row)
        raise ValueError(
            f"times must not decrease within a series; series {ids[series]!s} has "
            f"t[{step}]={times[row]:g} < t[{step - 1}]={times[row - 1]:g}. "
            "Sort the rows by time, or pass sort=True to from_arrays"
        )


def first_decrease(times: Float[np.ndarray, "T"], offsets: Int[np.ndarray, "n+1"]) -> int:
    """Return the first row whose time is before that of the row above in its series, or -1."""
    falls = np.diff(times) < 0
    starts = offsets[1:-1]
    falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
    return int(np.argmax(falls)) + 1 if falls.any() else -1


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
    static = as_float_array("static", static, np.float32)
    if static.ndim != 2 or len(static) != num_series:
        raise ValueError(f"static must be [{num_series}, S]; got {list(static.shape)}")
    if np.isinf(static).any():
        series = int(np.argwhere(np.isinf(static))[0, 0])
        raise ValueError(f"static must be finite or NaN; series number {series} has an infinity")
    return static


def check_labels(labels: Any, num_series: int) -> np.ndarray:
    """Return labels as an array [n], or real targets as [n, K], without missing ones."""
    labels = as_plain_array("labels", labels)
    if labels.ndim not in (1, 2) or len(labels) != num_series:
        raise ValueError(
            f"labels must be [{num_series}] or, for several real targets, [{num_series}, K]; "
            f"got {list(labels.shape)}"
        )
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


def as_plain_array(name: str, array: Any) -> np.ndarray:
    """Return an array of numbers, booleans, text or dates, but not of Python objects."""
    array = np.asarray(array)
    if array.dtype.kind == "O":
        kinds = sorted({type(item).__name__ for item in array.ravel()})
        if kinds != ["str"]:
            raise TypeError(
                f"{name} must be all numbers or all text; got a mixture of {', '.join(kinds)}"
            )
        array = array.astype(np.str_)
    if array.dtype.kind not in "biufUM":
        raise TypeError(f"{name} must be numbers or text; got {array.dtype}")
    return array


def locate(offsets: Int[np.ndarray, "n+1"], row: int) -> tuple[int, int]:
    """Return the series that a row belongs to, and its step there."""
    series = int(np.searchsorted(offsets, row, side="right")) - 1
    return series, row - int(offsets[series])
