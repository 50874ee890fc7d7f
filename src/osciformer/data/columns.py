"""Columns of Arrow tables as NumPy arrays."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer._types import Float, Int
from osciformer.data.layout import Layout
from osciformer.data.time_axis import TimeAxis, TimeKind


def as_table(frame: Any) -> Any:
    """Return a `pyarrow.Table` of a data frame, without copying where the library allows it.

    Args:
        frame: A pandas, polars or pyarrow table, any object with the Arrow PyCapsule interface, or
            a dict of columns.
    """
    pa = need("pyarrow", extra="data")
    if isinstance(frame, pa.Table):
        return frame
    if type(frame).__name__ == "LazyFrame":
        raise TypeError("frame is a lazy one, without data yet; pass frame.collect()")
    if not (hasattr(frame, "__arrow_c_stream__") or isinstance(frame, dict | pa.RecordBatch)):
        raise TypeError(
            "frame must be a table of pandas, polars, pyarrow or another library with the Arrow "
            f"PyCapsule interface, or a dict of columns; got {type(frame).__name__}"
        )
    try:
        return pa.table(frame)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as error:
        raise ValueError(
            f"frame cannot be read as an Arrow table: {error}. A column of one type, and names "
            "that differ from each other, are needed"
        ) from error


def index_columns(table: Any) -> set[str]:
    """Return the columns that were the index of a pandas frame."""
    metadata = table.schema.pandas_metadata or {}
    return {name for name in metadata.get("index_columns", []) if isinstance(name, str)}


def check_columns(present: Sequence[str], wanted: Iterable[str]) -> None:
    """Refuse names that a table does not have, and say which ones are near."""
    for name in wanted:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=3, cutoff=0.5)
            caseless = [other for other in present if other.lower() == name.lower()]
            hint = ", ".join(map(repr, dict.fromkeys(caseless + near)))
            raise ValueError(
                f"there is no column {name!r}; "
                + (f"did you mean {hint}?" if hint else f"the columns are {list(present)}")
            )


def check_layout(present: Sequence[str], layout: Layout) -> None:
    """Refuse a layout whose columns a table does not have, before a part of them is read.

    Near matches are sought among all columns. In the narrow layout features are no columns, and
    static ones need not be.

    Args:
        present: All columns of the table.
        layout: Which column means what.
    """
    check_columns(present, layout.columns)
    if not layout.is_narrow and not layout.allow_absent:
        check_columns(present, (*(layout.values or ()), *layout.static))


def read_numbers(column: Any, name: str, *, role: str) -> Float[np.ndarray, "T"]:
    """Return a column of numbers or booleans as float32; null is NaN.

    Args:
        column: A `pyarrow.ChunkedArray` [T].
        name: Its name, for messages.
        role: What it is, for messages, such as `feature`.
    """
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    kind = _decoded_type(column.type)
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    ):
        raise TypeError(
            f"{role} column {name!r} must hold numbers; it holds {_kind_of(kind)} such as "
            f"{_example(column)!r}. Encode it as numbers (one-hot, or codes), or leave it out by "
            "naming the columns to use: values=[...]"
        )
    column = _decode(column)
    if pa.types.is_boolean(kind):
        column = pc.cast(column, pa.int8())
    if pa.types.is_decimal(kind):
        column = pc.cast(column, pa.float64())
    return _to_numpy(pc.cast(column, pa.float32(), safe=False))


def read_codes(column: Any) -> tuple[Int[np.ndarray, "T"], np.ndarray]:
    """Return the distinct entries in order of appearance, and which one each row holds.

    Args:
        column: A `pyarrow.ChunkedArray` [T] of integers, floats, booleans, text or dates.

    Returns:
        Codes [T], -1 for null and NaN, and the entries that they stand for.
    """
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    column = _decode(column)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    encoded = column.dictionary_encode().unify_dictionaries()
    if encoded.num_chunks == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    codes = np.concatenate(
        [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    )
    entries = encoded.chunk(0).dictionary.to_numpy(zero_copy_only=False)
    return codes.astype(np.int64), entries.astype(np.str_) if entries.dtype == object else entries


def read_times(column: Any, layout: Layout) -> tuple[np.ndarray, TimeAxis]:
    """Return times as integers or floats, and what they mean.

    Args:
        column: A `pyarrow.ChunkedArray` [T].
        layout: Says the unit, the origin and how to read text.

    Returns:
        Ticks [T] as `TimeAxis.encode` takes them, and the axis.
    """
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    types = pa.types
    column = _decode(column)
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = _parse_text_times(column, layout)
    if column.null_count:
        raise ValueError(
            f"column {layout.time!r} has {column.null_count} rows without a time; drop those rows"
        )
    if types.is_date(column.type):
        column = pc.cast(column, pa.timestamp("s" if types.is_date32(column.type) else "ms"))
    kind: TimeKind = "number"
    if types.is_timestamp(column.type):
        kind = "datetime"
    elif types.is_duration(column.type):
        kind = "duration"
    origin = layout.origin
    if origin == "auto":
        origin = "series" if kind == "datetime" else "absolute"
    if kind == "number":
        numeric = (types.is_integer, types.is_floating, types.is_decimal)
        if not any(is_kind(column.type) for is_kind in numeric):
            raise TypeError(
                f"column {layout.time!r} must hold numbers, dates or durations; it holds "
                f"{_kind_of(column.type)} such as {_example(column)!r}"
            )
        # In 64 bits, so that differences of small integers cannot overflow.
        wide = pa.int64() if types.is_integer(column.type) else pa.float64()
        return _to_numpy(pc.cast(column, wide)), TimeAxis(origin=origin)
    axis = TimeAxis(
        kind,
        unit=layout.unit,
        resolution=column.type.unit,
        timezone=column.type.tz if kind == "datetime" else None,
        origin=origin,
    )
    return _to_numpy(pc.cast(column, pa.int64())), axis


def _parse_text_times(column: Any, layout: Layout) -> Any:
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    if layout.time_format is None:
        raise TypeError(
            f"column {layout.time!r} holds text such as {_example(column)!r}; convert it to "
            "numbers or dates, or pass time_format='iso' for ISO 8601 dates, or a format such as "
            "time_format='%d.%m.%Y %H:%M'"
        )
    try:
        if layout.time_format == "iso":
            zoned = pc.any(pc.match_substring_regex(column, r"\d(Z|[+-]\d\d:?\d\d)$")).as_py()
            return pc.cast(column, pa.timestamp("us", tz="UTC" if zoned else None))
        return pc.strptime(column, format=layout.time_format, unit="us")
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {layout.time!r} cannot be read with time_format={layout.time_format!r}: "
            f"{error}"
        ) from error


def _decode(column: Any) -> Any:
    """Return the column with categories spelled out, and text as ordinary text."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    kind = _decoded_type(column.type)
    if kind == column.type:
        return column
    if pa.types.is_dictionary(column.type) and kind != column.type.value_type:
        # Arrow spells out categories of ordinary text, but not those of the views of polars.
        parts = [
            pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind))
            for chunk in column.chunks
        ]
        column = pa.chunked_array(parts, pa.dictionary(column.type.index_type, kind))
    return pc.cast(column, kind)


def _decoded_type(kind: Any) -> Any:
    pa = need("pyarrow", extra="data")
    if pa.types.is_dictionary(kind):
        return _decoded_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return kind


def _kind_of(kind: Any) -> str:
    pa = need("pyarrow", extra="data")
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind)


def _example(column: Any) -> Any:
    present = column.drop_null()
    return present[0].as_py() if len(present) else None


def _to_numpy(column: Any) -> np.ndarray:
    return np.asarray(column.to_numpy())
