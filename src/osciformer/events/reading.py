"""Tables with a row per event to sequences of events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from osciformer._text import check_choice, name_some
from osciformer._types import Int
from osciformer.data import tables as columns
from osciformer.data.files import load_parquet, parquet_files, parquet_schema
from osciformer.data.tables import Layout, SortedRows, sorted_rows
from osciformer.events.sequences import EventSequences


def events_from_frame(
    frame: Any,
    *,
    id: str = "id",
    time: str = "time",
    type: str | None = "type",
    start: str | None = None,
    end: str | None = None,
    type_names: Sequence[str] | None = None,
    num_types: int | None = None,
    unit: str = "s",
    origin: Literal["auto", "series", "absolute"] = "auto",
    time_format: str | None = None,
    time_unit: str | None = None,
    duplicates: Literal["keep", "error"] = "keep",
) -> EventSequences:
    """Return the sequences of a table with a row per event.

    Rows may come in any order: sequences keep the order in which their ids first appear, and their
    events are sorted by time; events at one time keep the order of their rows. A sequence without
    events has no row and cannot be seen in a table: see `EventSequences.from_arrays`.

    Args:
        frame: A pandas, polars or pyarrow table, another one with the Arrow PyCapsule interface,
            or a dict of columns.
        id: Column that says which sequence an event belongs to.
        time: Column of times: numbers, dates or durations.
        type: Column of types: text, or integers from 0; None if there is one type only.
        start: Column that says where the observed window of the sequence begins, if there is one.
        end: Column that says where it ends.
        type_names: The types that there may be, in order, such as those of the training data;
            others are refused by name. In alphabetical order if not given.
        num_types: Number of types, for integers.
        unit: Unit of times that are dates or durations: ns, us, ms, s, min, h or d.
        origin: `series`, the first event of each sequence is at 0; `absolute`, numbers stay as they
            are and dates count from 1970; `auto` takes `series` for dates.
        time_format: How to read times that are text, as of `Layout`.
        time_unit: Name of the unit, for times that are numbers.
        duplicates: `keep` events at one time, or refuse them with an `error`.

    Example:
        >>> table = {"id": ["a", "b", "a"], "time": [2.0, 0.5, 1.0], "type": ["buy", "buy", "sell"]}
        >>> events = events_from_frame(table)
        >>> events.type_names, events[0].times, events[0].types
        (('buy', 'sell'), array([1., 2.]), array([1, 0]))
    """
    check_choice("duplicates", duplicates, ("keep", "error"))
    layout = Layout(id=id, time=time, unit=unit, origin=origin, time_format=time_format)
    table = columns.as_table(frame)
    others = [name for name in (type, start, end) if name is not None]
    columns.check_columns(table.column_names, (id, time, *others))
    if table.num_rows == 0:
        raise ValueError("the table has no rows")
    rows = sorted_rows(table, layout)
    if type is None:
        codes = np.zeros(table.num_rows, dtype=np.int64)
    else:
        codes, type_names = _read_types(table.column(type), type, type_names, num_types)
    events = EventSequences(
        rows.times,
        rows.sort(codes),
        rows.offsets,
        ids=rows.ids,
        num_types=num_types,
        type_names=type_names,
        starts=None if start is None else _edges(rows, start, layout),
        ends=None if end is None else _edges(rows, end, layout),
        time_unit=time_unit,
        time_axis=rows.axis,
        origins=rows.origins,
    )
    if duplicates == "error" and events.ties:
        tied = [item.id for item in events if (np.diff(item.times) == 0).any()]
        raise ValueError(
            f"{events.ties} events are at the time of another one of their sequence, in "
            f"{name_some(tied)}. Pass duplicates='keep' to take them as they are, or move them "
            "apart by less than the resolution of the clock"
        )
    return events


def events_from_parquet(path: str | Path, **settings: Any) -> EventSequences:
    """Return the sequences of a Parquet file, or of a folder of such files.

    Args:
        path: The file or folder.
        **settings: Arguments of `events_from_frame`.
    """
    files = parquet_files(path)
    parquet_schema(files)
    return events_from_frame(load_parquet(files), **settings)


def _read_types(
    column: Any, name: str, type_names: Sequence[str] | None, num_types: int | None
) -> tuple[Int[np.ndarray, "T"], Sequence[str] | None]:
    codes, entries = columns.read_codes(column)
    if (codes < 0).any():
        raise ValueError(
            f"column {name!r} has {int((codes < 0).sum())} events without a type, the first is row "
            f"{int(np.argmin(codes))}; drop them, or give them a type of their own"
        )
    if entries.dtype.kind in "iu":
        limit = len(type_names) if type_names is not None else num_types
        wrong = entries[(entries < 0) | (entries >= (np.inf if limit is None else limit))]
        if len(wrong):
            allowed = "0 on" if limit is None else f"0 to {limit - 1}"
            raise ValueError(
                f"types in column {name!r} must be from {allowed}; there is {name_some(wrong)}. "
                "Codes that do not count from 0 can be read as text"
            )
        return entries.astype(np.int64)[codes], type_names
    if entries.dtype.kind != "U":
        raise TypeError(
            f"types in column {name!r} must be text or integers from 0; got {entries.dtype}"
        )
    known = tuple(sorted(entries)) if type_names is None else tuple(map(str, type_names))
    position = {entry: number for number, entry in enumerate(known)}
    unknown = [str(entry) for entry in entries if entry not in position]
    if unknown:
        _refuse_type(unknown, known, name)
    return np.array([position[entry] for entry in entries], dtype=np.int64)[codes], known


def _refuse_type(unknown: Sequence[str], known: Sequence[str], name: str) -> None:
    try:
        columns.check_columns(known, unknown)
    except ValueError as error:
        hint = str(error).partition("; ")[2].replace("the columns are", "the types are", 1)
        raise ValueError(
            f"column {name!r} has types that are not known, {name_some(unknown)}; {hint}"
        ) from None


def _edges(rows: SortedRows, name: str, layout: Layout) -> np.ndarray:
    """Return one edge of the window of each sequence, in the unit of its times."""
    ticks, axis = columns.read_times(rows.table.column(name), layout.replace(time=name))
    if axis != rows.axis:
        raise TypeError(
            f"column {name!r} must hold times as column {layout.time!r} does: numbers, or dates of "
            f"the same resolution and zone; got {axis} and {rows.axis}"
        )
    ticks = rows.sort(ticks)
    firsts = ticks[rows.offsets[:-1]]
    differ = ticks != np.repeat(firsts, np.diff(rows.offsets))
    if differ.any():
        owner = np.searchsorted(rows.offsets, int(np.argmax(differ)), side="right") - 1
        raise ValueError(
            f"column {name!r} must have one value per sequence; {rows.ids[owner]!s} has several"
        )
    return axis.encode(firsts, rows.origins)
