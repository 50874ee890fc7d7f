"""Sequences of typed events: the ragged container, its padded batches, and tables as input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch

from osciformer._text import check_choice, did_you_mean, name_some
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data import Layout, LengthBatches, TimeAxis, ragged, tables
from osciformer.data.files import load_parquet, parquet_files, parquet_schema

UNNAMED_UNIT = "unit of the data"


@dataclass(frozen=True)
class EventBatch:
    """Sequences of events, padded at the end to the longest one."""

    times: Float[Tensor, "B N"]  #: Event times, float64, not decreasing; padding may hold anything.
    types: Int[Tensor, "B N"]  #: Event types, int64.
    mask: Bool[Tensor, "B N"]  #: True where there is an event; events come first in each row.
    starts: Float[Tensor, "B"] | None = None  #: Where the observed windows begin, or None.
    ends: Float[Tensor, "B"] | None = None  #: Where they end, or None.
    index: Int[Tensor, "B"] | None = None  #: Position of each sequence in its container, or None.

    def __len__(self) -> int:
        return len(self.times)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Number of events of each sequence."""
        return self.mask.sum(dim=1)

    @property
    def clean_times(self) -> Float[Tensor, "B N"]:
        """Times with infinite padding, which comes after every query."""
        return self.times.masked_fill(~self.mask, torch.inf)

    @property
    def finite_times(self) -> Float[Tensor, "B N"]:
        """Times with padding 0."""
        return self.times.masked_fill(~self.mask, 0.0)

    @property
    def clean_types(self) -> Int[Tensor, "B N"]:
        """Types with padding 0."""
        return self.types.masked_fill(~self.mask, 0)

    @property
    def last_times(self) -> Float[Tensor, "B"]:
        """Time of the last event; if there is none, the start of the window, or 0."""
        return self._time_of_last(self.lengths)

    @property
    def first_times(self) -> Float[Tensor, "B"]:
        """Time of the first event; if there is none, the start of the window, or 0."""
        return self._time_of_last(self.lengths.clamp(max=1))

    def _time_of_last(self, known: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        none = self.times.new_zeros(len(self)) if self.starts is None else self.starts
        return self.time_of_last(known[:, None], none)[:, 0]

    def time_of_last(self, known: Int[Tensor, "B M"], none: Float[Tensor, "B"]) -> Tensor:
        """Return the times [B, M] of the last of the first `known` events; `none` if that is 0."""
        last = self.finite_times.gather(1, (known - 1).clamp(min=0))
        return torch.where(known > 0, last, none[:, None])

    def count_before(self, query_times: Float[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Return how many events of the same row lie strictly before each query."""
        return torch.searchsorted(self.clean_times.contiguous(), query_times.contiguous())

    def count_until(self, query_times: Float[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Return how many events of the same row lie before or at each query."""
        clean = self.clean_times.contiguous()
        return torch.searchsorted(clean, query_times.contiguous(), right=True)

    def known_until(self, rows: Int[Tensor, "R"], num_events: Int[Tensor, "R"]) -> EventBatch:
        """Return the first `num_events` events of each of the rows, which may repeat."""
        width = max(1, int(num_events.max())) if len(rows) else 1
        known = self.take(rows)
        mask = known.mask[:, :width]
        mask = mask & (torch.arange(width, device=mask.device) < num_events[:, None])
        return replace(known, times=known.times[:, :width], types=known.types[:, :width], mask=mask)

    def take(self, rows: Int[Tensor, "R"]) -> EventBatch:
        """Return some of the rows."""
        return self._map(lambda item: item[rows])

    def to(self, device: torch.device | str) -> EventBatch:
        """Return the batch on another device."""
        return self._map(lambda item: item.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> EventBatch:
        items = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: change(item) for name, item in items if item is not None})


@dataclass(frozen=True)
class EventSequence:
    """One sequence of an `EventSequences`; its arrays are views."""

    id: Any
    times: Float[np.ndarray, "N"]
    types: Int[np.ndarray, "N"]
    start: float | None = None  #: Where the observed window begins, or None.
    end: float | None = None  #: Where the observed window ends, or None.

    def __len__(self) -> int:
        return len(self.times)


class EventSequences:
    """Many sequences of events, each event with a time and a type, in flat arrays.

    `len()` counts sequences. An integer as index returns an `EventSequence`; a slice, a boolean
    mask or an integer array returns an `EventSequences`, as scikit-learn's splitters expect. Events
    at the same time keep their order but do not see each other; `ties` counts them.

    Args:
        times: Times of all events, finite, in one unit, not decreasing within a sequence.
        types: Their types, 0 to K-1.
        offsets: Row at which each sequence begins, followed by T.
        ids: Names of the sequences [n]; 0, 1, ... if not given.
        num_types: K; if not given, the number of names, or one more than the largest type.
        type_names: Names of the K types; "0", "1", ... if not given.
        starts: Where the observed window of each sequence begins [n], not after its first event.
        ends: Where it ends [n], not before its last event.
        time_unit: Name of the unit of the times, printed with likelihoods.
        time_axis: What the times mean; plain numbers if not given.
        origins: Where time 0 of each sequence lies [n], for `time_axis.origin == "series"`.

    Example:
        >>> events = EventSequences([0.0, 0.5, 2.0], [1, 0, 1], [0, 2, 3], time_unit="h")
        >>> len(events), events.num_types, events[0].times, events[[1]].ids
        (2, 2, array([0. , 0.5]), array([1]))
    """

    def __init__(
        self,
        times: Float[np.ndarray, "T"],
        types: Int[np.ndarray, "T"],
        offsets: Int[np.ndarray, "n+1"],
        *,
        ids: Any = None,
        num_types: int | None = None,
        type_names: Sequence[str] | None = None,
        starts: Any = None,
        ends: Any = None,
        time_unit: str | None = None,
        time_axis: TimeAxis | None = None,
        origins: Any = None,
    ) -> None:
        self.times = ragged.as_float_array("times", times, np.float64)
        self.offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        if self.times.ndim != 1:
            raise ValueError(f"times must be [T]; got the shape {list(self.times.shape)}")
        ragged.check_offsets(self.offsets, len(self.times))
        count = len(self.offsets) - 1
        self.ids = np.arange(count) if ids is None else ragged.as_plain_array("ids", ids)
        if self.ids.shape != (count,):
            raise ValueError(f"ids must be [{count}]; got {list(self.ids.shape)}")
        ragged.check_times(self.times, self.offsets, self.ids)
        self.types = _integer_types(types, len(self.times))
        if num_types is None:
            largest = int(self.types.max(initial=0))
            num_types = largest + 1 if type_names is None else len(type_names)
        if num_types < 1:
            raise ValueError(f"num_types must be at least 1; got {num_types}")
        self.num_types = int(num_types)
        names = map(str, range(self.num_types)) if type_names is None else type_names
        self.type_names = ragged.check_names("type_names", tuple(names), self.num_types, "type")
        wrong = (self.types < 0) | (self.types >= self.num_types)
        if wrong.any():
            row = int(np.argmax(wrong))
            sequence, step = ragged.locate(self.offsets, row)
            raise ValueError(
                f"types must be from 0 to {self.num_types - 1}; event {step} of sequence "
                f"{self.ids[sequence]!s} has type {self.types[row]}. Types count from 0; pass a "
                "larger num_types if there are more of them"
            )
        self.time_axis = TimeAxis() if time_axis is None else time_axis
        self.origins = None if origins is None else np.asarray(origins)
        wanted = (count,) if self.time_axis.origin == "series" else None
        if wanted != (None if self.origins is None else self.origins.shape):
            raise ValueError(f"origins must be [{count}] if time_axis.origin='series', else None")
        self.time_unit = time_unit or self.time_axis.unit or UNNAMED_UNIT
        self.starts, self.ends = (
            None if edges is None else _window_edges(name, edges, count)
            for name, edges in (("starts", starts), ("ends", ends))
        )
        self._check_windows()

    @classmethod
    def from_arrays(
        cls, times: Sequence[Any], types: Sequence[Any] | None = None, **others: Any
    ) -> EventSequences:
        """Return the container of a list of sequences, some of which may be empty.

        Args:
            times: One array [N] per sequence.
            types: One array [N] of integers per sequence; all of type 0 if not given.
            **others: As for the class.
        """
        moments = [ragged.as_float_array("times", item, np.float64) for item in times]
        types = [np.zeros(len(moment), np.int64) for moment in moments] if types is None else types
        if len(types) != len(moments):
            got = f"{len(moments)} and {len(types)}"
            raise ValueError(f"times and types must have one entry per sequence; got {got}")
        kinds = [np.asarray(kind) if len(kind) else np.empty(0, np.int64) for kind in types]
        for number, (moment, kind) in enumerate(zip(moments, kinds, strict=True)):
            if moment.ndim != 1 or kind.shape != moment.shape:
                raise ValueError(
                    f"sequence number {number} must have times [N] and types [N]; "
                    f"got {list(moment.shape)} and {list(kind.shape)}"
                )
        offsets = ragged.offsets_of(np.array([len(moment) for moment in moments], dtype=np.int64))
        flat = np.concatenate([np.empty(0), *moments])
        ragged.check_distinct(others.get("ids"))
        return cls(flat, np.concatenate([np.empty(0, np.int64), *kinds]), offsets, **others)

    @classmethod
    def from_frame(cls, frame: Any, **settings: Any) -> EventSequences:
        """Return the sequences of a table; see `osciformer.events.events_from_frame`."""
        return events_from_frame(frame, **settings)

    @classmethod
    def from_parquet(cls, path: str | Path, **settings: Any) -> EventSequences:
        """Return the sequences of a file; see `osciformer.events.events_from_parquet`."""
        return events_from_parquet(path, **settings)

    @property
    def shape(self) -> tuple[int]:
        """Number of sequences; scikit-learn reads it as the number of samples."""
        return (len(self),)

    @property
    def lengths(self) -> Int[np.ndarray, "n"]:
        """Number of events of each sequence."""
        return np.diff(self.offsets)

    @property
    def gaps(self) -> Float[np.ndarray, "G"]:
        """Times between neighbouring events, of all sequences one after another."""
        return np.diff(self.times)[self.same_sequence]

    @property
    def same_sequence(self) -> Bool[np.ndarray, "T-1"]:
        """Whether each event but the last belongs to the sequence of the event after it."""
        return np.diff(ragged.series_of_rows(self.offsets)) == 0

    @property
    def ties(self) -> int:
        """Number of events at the same time as the one before them in their sequence."""
        return int((self.gaps == 0).sum())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[EventSequence]:
        return (self[position] for position in range(len(self)))

    @overload
    def __getitem__(self, key: int) -> EventSequence: ...
    @overload
    def __getitem__(self, key: slice | Sequence[Any] | np.ndarray) -> EventSequences: ...
    def __getitem__(self, key: Any) -> EventSequence | EventSequences:
        if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
            key = key[0]  # scikit-learn indexes with [rows, ...]
        if isinstance(key, int | np.integer):
            (place,) = ragged.positions_of([key], len(self))
            rows = slice(self.offsets[place], self.offsets[place + 1])
            edges = (None if e is None else float(e[place]) for e in (self.starts, self.ends))
            return EventSequence(self.ids[place], self.times[rows], self.types[rows], *edges)
        if isinstance(key, slice):
            key = np.arange(*key.indices(len(self)))
        index = ragged.positions_of(key, len(self))
        chosen, offsets = ragged.rows_of_series(self.offsets, index)
        picked = self._changed(lambda item: item[index], "ids", "starts", "ends", "origins")
        picked |= self._changed(lambda item: item[chosen], "times", "types")
        return self.replace(offsets=offsets, **picked)

    def _changed(self, change: Callable[[Any], Any], *names: str) -> dict[str, Any]:
        """Return those of the named arrays that are not None, with a change applied."""
        items = {name: getattr(self, name) for name in names}
        return {name: change(item) for name, item in items.items() if item is not None}

    def replace(self, **changes: Any) -> EventSequences:
        """Return a container with some of the constructor's arguments changed."""
        return EventSequences(**{**vars(self), **changes})

    def first(self, num_events: int) -> EventSequences:
        """Return the first events of each sequence; a shortened window ends at the last of them."""
        keep = np.arange(len(self.times)) - np.repeat(self.offsets[:-1], self.lengths) < num_events
        offsets = ragged.offsets_of(np.minimum(self.lengths, num_events))
        times, ends = self.times[keep], self.ends
        if ends is not None and num_events > 0:
            ends = np.where(self.lengths > num_events, times[offsets[1:] - 1], ends)
        return self.replace(times=times, types=self.types[keep], offsets=offsets, ends=ends)

    def rescale(self, factor: float, time_unit: str) -> EventSequences:
        """Return the same events with times multiplied, such as by 1/60 from seconds to "min"."""
        if not (np.isfinite(factor) and factor > 0):
            raise ValueError(f"factor must be positive and finite; got {factor}")
        scaled = self._changed(lambda item: item * factor, "times", "starts", "ends")
        # Without an axis: it could not turn times in an unknown unit back into dates.
        return self.replace(**scaled, time_unit=time_unit, time_axis=None, origins=None)

    def decode_times(
        self, times: Float[np.ndarray, "..."] | None = None, positions: Any = None
    ) -> np.ndarray:
        """Return times as the numbers, dates (UTC) or durations that they came from.

        Its own [T] if none are given; `positions` are their sequences, broadcast against `times`.
        """
        if times is None:
            times, positions = self.times, ragged.series_of_rows(self.offsets)
        return self.time_axis.decode(np.asarray(times, dtype=np.float64), self._origins(positions))

    def encode_times(self, moments: Any, positions: Any) -> Float[np.ndarray, "..."]:
        """Return numbers, `datetime64` (UTC) or `timedelta64` as times; see `decode_times`."""
        ticks = self.time_axis.ticks_of(np.asarray(moments))
        return self.time_axis.encode(ticks, self._origins(positions))

    def _origins(self, positions: Any) -> np.ndarray | None:
        return None if self.origins is None else self.origins[np.asarray(positions)]

    def batch(self, index: Any = None) -> EventBatch:
        """Return the padded batch of the sequences at some positions, or of all, with N >= 1."""
        positions = np.arange(len(self)) if index is None else ragged.positions_of(index, len(self))
        lengths = self.lengths[positions]
        steps = np.arange(max(1, int(lengths.max(initial=0))))
        mask = steps < lengths[:, None]  # [B, N]
        rows = self.offsets[positions][:, None] + np.minimum(steps, lengths[:, None] - 1)
        times, types = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.int64)
        times[lengths > 0] = self.times[rows[lengths > 0]]
        types[mask] = self.types[rows[mask]]
        arrays = {"times": times, "types": types, "mask": mask, "index": positions}
        arrays |= self._changed(lambda item: item[positions], "starts", "ends")
        return EventBatch(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def batches(
        self, batch_size: int = 64, *, shuffle: bool = False, seed: int = 0
    ) -> Iterator[EventBatch]:
        """Yield padded batches of sequences of similar length; `index` says which they are."""
        if len(self):
            sampler = LengthBatches(self.lengths, batch_size, shuffle=shuffle, seed=seed)
            yield from (self.batch(positions) for positions in sampler)

    def __repr__(self) -> str:
        parts = [f"{len(self)} sequences", f"{len(self.times)} events of {self.num_types} types"]
        if len(self):
            parts.append(f"lengths {self.lengths.min()} to {self.lengths.max()}")
        return f"EventSequences({', '.join(parts)}, time in {self.time_unit})"

    def _check_windows(self) -> None:
        """Refuse windows that leave out events, or that end before they start."""
        some = np.flatnonzero(self.lengths > 0)
        starts = np.full(len(self), -np.inf) if self.starts is None else self.starts
        ends = np.full(len(self), np.inf) if self.ends is None else self.ends
        first, last = ends.copy(), starts.copy()
        first[some] = self.times[self.offsets[some]]
        last[some] = self.times[self.offsets[some + 1] - 1]
        for name, edges, wrong in (("starts", starts, starts > first), ("ends", ends, ends < last)):
            if wrong.any():
                where = int(np.argmax(wrong))
                raise ValueError(
                    f"the window of a sequence must hold its events; {name} of sequence "
                    f"{self.ids[where]!s} is {edges[where]:g}, which leaves some outside, or ends "
                    "it before it starts"
                )


def _integer_types(types: Any, count: int) -> Int[np.ndarray, "T"]:
    types = np.asarray(types) if np.size(types) else np.empty(0, np.int64)
    if types.dtype.kind not in "iu":
        raise TypeError(
            f"types must be integers from 0; got {types.dtype}. EventSequences.from_frame reads "
            "types that are text"
        )
    if types.shape != (count,):
        raise ValueError(f"types must be [{count}], one per time; got {list(types.shape)}")
    return np.ascontiguousarray(types, dtype=np.int64)


def _window_edges(name: str, edges: Any, count: int) -> Float[np.ndarray, "n"]:
    edges = ragged.as_float_array(name, edges, np.float64)
    if edges.shape != (count,) or not np.isfinite(edges).all():
        raise ValueError(f"{name} must be [{count}] and finite; got {list(edges.shape)}")
    return edges


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

    Rows may come in any order: sequences keep the order in which their ids first appear, and events
    are sorted by time, in a stable way. Sequences without events need `EventSequences.from_arrays`.

    Args:
        frame: A table of pandas, polars or pyarrow, any other Arrow table, or a dict of columns.
        id: Column that says which sequence an event belongs to.
        time: Column of times: numbers, dates or durations.
        type: Column of types: text, or integers from 0; None if there is one type only.
        start: Column that says where the observed window of the sequence begins, if there is one.
        end: Column that says where it ends.
        type_names: The allowed types in order; by default all of the table, in alphabetical order.
        num_types: Number of types, for integers.
        unit: Unit of times that are dates or durations: ns, us, ms, s, min, h or d.
        origin: Time 0: the first event (`series`); 0 or 1970 (`absolute`); `auto`: `series` for
            dates, `absolute` for numbers.
        time_format: How to read times that are text, as in `Layout`.
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
    table = tables.as_table(frame)
    others = [name for name in (type, start, end) if name is not None]
    tables.check_columns(table.column_names, (id, time, *others))
    if table.num_rows == 0:
        raise ValueError("the table has no rows")
    rows = tables.sorted_rows(table, layout)
    codes = np.zeros(table.num_rows, dtype=np.int64)
    if type is not None:
        codes, type_names = _read_types(table.column(type), type, type_names, num_types)
    events = EventSequences(
        rows.times,
        rows.sort(codes),
        rows.offsets,
        ids=rows.ids,
        num_types=num_types,
        type_names=type_names,
        starts=None if start is None else _read_edges(rows, start, layout),
        ends=None if end is None else _read_edges(rows, end, layout),
        time_unit=time_unit,
        time_axis=rows.axis,
        origins=rows.origins,
    )
    if duplicates == "error" and events.ties:
        tied = [item.id for item in events if (np.diff(item.times) == 0).any()]
        raise ValueError(
            f"{events.ties} events are at the time of another one of their sequence, in "
            f"{name_some(tied)}. Pass duplicates='keep' to keep them, or move them apart by less "
            "than the resolution of the clock"
        )
    return events


def events_from_parquet(path: str | Path, **settings: Any) -> EventSequences:
    """Return the sequences of a Parquet file, or of a folder of such files, as from a frame."""
    files = parquet_files(path)
    parquet_schema(files)  # all files must have the same columns
    return events_from_frame(load_parquet(files), **settings)


def _read_types(
    column: Any, name: str, type_names: Sequence[str] | None, num_types: int | None
) -> tuple[Int[np.ndarray, "T"], Sequence[str] | None]:
    """Return the type of each row as a number, and the names of the types if they have any."""
    codes, entries = tables.read_full_codes(column, name, "a type")
    if entries.dtype.kind in "iu" and type_names is not None:
        # Names that are numbers, but not 0, 1, ..., are not codes: type 7 is the one called '7'.
        names = tuple(map(str, type_names))
        if all(map(str.isdecimal, names)) and names != tuple(map(str, range(len(names)))):
            entries = entries.astype(np.str_)
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
        wanted = "text or integers from 0"
        raise TypeError(f"types in column {name!r} must be {wanted}; got {entries.dtype}")
    known = tuple(sorted(entries)) if type_names is None else tuple(map(str, type_names))
    position = {entry: number for number, entry in enumerate(known)}
    unknown = [str(entry) for entry in entries if entry not in position]
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"the types are {list(known)}"
        found = name_some(unknown)
        raise ValueError(f"column {name!r} has types that are not known, {found}; {hint}")
    return np.array([position[entry] for entry in entries], dtype=np.int64)[codes], known


def _read_edges(rows: tables.SortedRows, name: str, layout: Layout) -> np.ndarray:
    """Return one edge of the window of each sequence, in the unit of its times."""
    ticks, axis = tables.read_times(rows.table.column(name), layout.replace(time=name))
    if axis != rows.axis:
        raise TypeError(
            f"column {name!r} must hold times as column {layout.time!r} does: numbers, or dates of "
            f"the same resolution and zone; got {axis} and {rows.axis}"
        )
    ticks = rows.sort(ticks)
    firsts = ticks[rows.offsets[:-1]]
    differ = ticks != np.repeat(firsts, np.diff(rows.offsets))
    if differ.any():
        owner = rows.ids[ragged.locate(rows.offsets, int(np.argmax(differ)))[0]]
        raise ValueError(f"column {name!r} must have one value per sequence; {owner!s} has several")
    return axis.encode(firsts, rows.origins)
