"""A ragged container for sequences of typed events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from osciformer._types import Float, Int
from osciformer.data import ragged as checks
from osciformer.data.batches import LengthBatches
from osciformer.data.ragged import offsets_of, positions_of, rows_of_series, series_of_rows
from osciformer.data.series import TimeAxis
from osciformer.events.batch import EventBatch, pad_events
from osciformer.events.checks import check_range, check_windows, whole_numbers, window_edges

UNNAMED_UNIT = "unit of the data"


@dataclass(frozen=True)
class EventSequence:
    """One sequence of an `EventSequences`; its arrays are views.

    Attributes:
        id: Its name.
        times: Event times [N], float64.
        types: Event types [N], int64.
        start: Where the observed window begins, or None.
        end: Where the observed window ends, or None.
    """

    id: Any
    times: Float[np.ndarray, "N"]
    types: Int[np.ndarray, "N"]
    start: float | None = None
    end: float | None = None

    def __len__(self) -> int:
        return len(self.times)


class EventSequences:
    """Many sequences of events, each event with a time and a type, in flat arrays.

    `len()` counts sequences, and indexing takes what scikit-learn's splitters give: a slice, a
    boolean mask or an integer array returns an `EventSequences`, a single integer an
    `EventSequence`.

    What odd input means:

    * Times that are not finite or that decrease within a sequence are refused; negative times are
      allowed, since only differences matter. Types outside 0 to K-1 are refused.
    * Events at one time are kept, in the order of their rows. Each of them is predicted from the
      events strictly before that time, so that they do not see each other, and the gap of zero
      between them adds nothing to the compensator. `ties` counts them.
    * A sequence of one event has nothing to score but its window, if it has one; without windows
      it counts for nothing. The same holds for a sequence without events.

    Args:
        times: Times of all events, in one unit, not decreasing within a sequence.
        types: Their types, 0 to K-1.
        offsets: Row at which each sequence begins, and behind them T.
        ids: Names of the sequences [n]; 0, 1, ... if not given.
        num_types: K; one more than the largest type, or the number of names, if not given.
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
        self.times = checks.as_float_array("times", times, np.float64)
        self.offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        if self.times.ndim != 1:
            raise ValueError(f"times must be [T]; got the shape {list(self.times.shape)}")
        checks.check_offsets(self.offsets, len(self.times))
        count = len(self.offsets) - 1
        self.ids = np.arange(count) if ids is None else checks.as_plain_array("ids", ids)
        if self.ids.shape != (count,):
            raise ValueError(f"ids must be [{count}]; got {list(self.ids.shape)}")
        checks.check_times(self.times, self.offsets, self.ids)
        self.types = whole_numbers(types, len(self.times))
        if num_types is None:
            num_types = int(self.types.max(initial=0)) + 1
            num_types = num_types if type_names is None else len(type_names)
        if num_types < 1:
            raise ValueError(f"num_types must be at least 1; got {num_types}")
        self.num_types = int(num_types)
        names = map(str, range(self.num_types)) if type_names is None else type_names
        self.type_names = checks.check_names("type_names", tuple(names), self.num_types, "type")
        check_range(self.types, self.num_types, self.offsets, self.ids)
        self.time_axis = TimeAxis() if time_axis is None else time_axis
        self.origins = None if origins is None else np.asarray(origins)
        if (self.origins is None) != (self.time_axis.origin != "series") or (
            self.origins is not None and self.origins.shape != (count,)
        ):
            raise ValueError(
                f"origins [{count}] must be given for time_axis.origin='series', and only then"
            )
        self.time_unit = time_unit or self.time_axis.unit or UNNAMED_UNIT
        self.starts = None if starts is None else window_edges("starts", starts, count)
        self.ends = None if ends is None else window_edges("ends", ends, count)
        check_windows(self.times, self.offsets, self.ids, self.starts, self.ends)

    @classmethod
    def from_arrays(
        cls, times: Sequence[Any], types: Sequence[Any] | None = None, **others: Any
    ) -> EventSequences:
        """Return the container of sequences that come as lists of arrays, some perhaps empty.

        Args:
            times: One array [N] per sequence.
            types: One array [N] of integers per sequence; all of type 0 if not given.
            **others: As for the class.

        Example:
            >>> EventSequences.from_arrays([[0.0, 1.0], []], [[0, 2], []]).lengths
            array([2, 0])
        """
        columns = [checks.as_float_array("times", column, np.float64) for column in times]
        kinds = [np.zeros(len(c), np.int64) for c in columns] if types is None else list(types)
        if len(kinds) != len(columns):
            raise ValueError(
                f"times and types must have one entry per sequence; got {len(columns)} and "
                f"{len(kinds)}"
            )
        kinds = [np.asarray(k) if len(k) else np.empty(0, np.int64) for k in kinds]
        for number, (column, kind) in enumerate(zip(columns, kinds, strict=True)):
            if column.ndim != 1 or kind.shape != column.shape:
                raise ValueError(
                    f"sequence number {number} must have times [N] and types [N]; "
                    f"got {list(column.shape)} and {list(kind.shape)}"
                )
        offsets = offsets_of(np.array([len(column) for column in columns], dtype=np.int64))
        flat = np.concatenate([np.empty(0), *columns])
        return cls(flat, np.concatenate([np.empty(0, np.int64), *kinds]), offsets, **others)

    @classmethod
    def from_frame(cls, frame: Any, **settings: Any) -> EventSequences:
        """Return the sequences of a table; see `osciformer.events.events_from_frame`."""
        from osciformer.events.reading import events_from_frame

        return events_from_frame(frame, **settings)

    @classmethod
    def from_parquet(cls, path: str | Path, **settings: Any) -> EventSequences:
        """Return the sequences of a file; see `osciformer.events.events_from_parquet`."""
        from osciformer.events.reading import events_from_parquet

        return events_from_parquet(path, **settings)

    @property
    def shape(self) -> tuple[int]:
        """Number of sequences; scikit-learn takes it as that of the samples."""
        return (len(self),)

    @property
    def lengths(self) -> Int[np.ndarray, "n"]:
        """Number of events of each sequence."""
        return np.diff(self.offsets)

    @property
    def gaps(self) -> Float[np.ndarray, "G"]:
        """Times between neighbouring events, of all sequences one after another."""
        inside = np.diff(series_of_rows(self.offsets)) == 0
        return np.diff(self.times)[inside]

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
            (position,) = positions_of([key], len(self))
            rows = slice(self.offsets[position], self.offsets[position + 1])
            return EventSequence(
                id=self.ids[position],
                times=self.times[rows],
                types=self.types[rows],
                start=None if self.starts is None else float(self.starts[position]),
                end=None if self.ends is None else float(self.ends[position]),
            )
        if isinstance(key, slice):
            key = np.arange(*key.indices(len(self)))
        index = positions_of(key, len(self))
        chosen, offsets = rows_of_series(self.offsets, index)
        picked = {
            name: None if getattr(self, name) is None else getattr(self, name)[index]
            for name in ("ids", "starts", "ends", "origins")
        }
        return self.replace(
            times=self.times[chosen], types=self.types[chosen], offsets=offsets, **picked
        )

    def replace(self, **changes: Any) -> EventSequences:
        """Return a container with some of the constructor's arguments changed."""
        return EventSequences(**{**vars(self), **changes})

    def first(self, num_events: int) -> EventSequences:
        """Return the first events of each sequence; the window of a cut one ends with the last."""
        keep = np.arange(len(self.times)) - np.repeat(self.offsets[:-1], self.lengths) < num_events
        offsets = offsets_of(np.minimum(self.lengths, num_events))
        times, ends = self.times[keep], self.ends
        if ends is not None and num_events > 0:
            ends = np.where(self.lengths > num_events, times[offsets[1:] - 1], ends)
        return self.replace(times=times, types=self.types[keep], offsets=offsets, ends=ends)

    def rescale(self, factor: float, time_unit: str) -> EventSequences:
        """Return the same events with times in another unit.

        Log-likelihoods per event fall by log(factor), since they are those of densities.

        Args:
            factor: What to multiply times by, such as 1/60 from seconds to minutes.
            time_unit: Name of the new unit.
        """
        if not (np.isfinite(factor) and factor > 0):
            raise ValueError(f"factor must be positive and finite; got {factor}")
        scaled = {
            name: None if getattr(self, name) is None else getattr(self, name) * factor
            for name in ("times", "starts", "ends")
        }
        # Dates cannot be found again from times in a unit that the axis does not know.
        return self.replace(**scaled, time_unit=time_unit, time_axis=None, origins=None)

    def decode_times(
        self, times: Float[np.ndarray, "..."] | None = None, positions: Any = None
    ) -> np.ndarray:
        """Return times as the numbers, dates (UTC) or durations that they came from.

        Args:
            times: Times in the unit of this container, of any shape; its own [T] if not given.
            positions: The sequence that each of them belongs to, broadcast against `times`.
        """
        if times is None:
            times, positions = self.times, series_of_rows(self.offsets)
        origins = None if self.origins is None else self.origins[np.asarray(positions)]
        return self.time_axis.decode(np.asarray(times, dtype=np.float64), origins)

    def encode_times(self, moments: Any, positions: Any) -> Float[np.ndarray, "..."]:
        """Return numbers, `datetime64` (UTC) or `timedelta64` as times in the unit of this one.

        Args:
            moments: As they came, of any shape.
            positions: The sequence that each of them belongs to, broadcast against `moments`.
        """
        origins = None if self.origins is None else self.origins[np.asarray(positions)]
        return self.time_axis.encode(self.time_axis.ticks_of(np.asarray(moments)), origins)

    def batch(self, index: Any = None) -> EventBatch:
        """Return the padded batch of the sequences at some positions; all if not given."""
        positions = np.arange(len(self)) if index is None else positions_of(index, len(self))
        return pad_events(
            self.times, self.types, self.offsets, positions, starts=self.starts, ends=self.ends
        )

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
