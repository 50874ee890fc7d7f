"""Events as they arrive, with queries in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from osciformer._text import name_some
from osciformer._types import Float, Int, Tensor
from osciformer.events.prediction import Futures, NextEvent, predict_last, sample
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventBatch


class EventStream:
    """Sequences that grow event by event, and can be queried at any time.

    All answers are the same as for a batch of the events that are kept.

    Args:
        process: Any process; a network should be in evaluation mode.
        num_sequences: Sequences B that run side by side.
        context: How many of the last events of each sequence are kept; all if not given.
        type_names: Names of the types, so that events may be named instead of numbered.
        time_unit: Name of the unit of time, for futures.

    Example:
        >>> from osciformer.events import PoissonProcess
        >>> stream = EventStream(PoissonProcess([1.0, 3.0]), type_names=["buy", "sell"])
        >>> stream.observe(0.5, "buy")
        >>> stream.observe([0.7, 0.9], ["sell", "sell"])
        >>> stream.num_events, stream.intensity(1.0)
        (array([3]), array([[1., 3.]]))
    """

    def __init__(
        self,
        process: EventProcess,
        *,
        num_sequences: int = 1,
        context: int | None = None,
        type_names: Sequence[str] | None = None,
        time_unit: str | None = None,
    ) -> None:
        for name, number in (("num_sequences", num_sequences), ("context", context)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        if type_names is not None and len(type_names) != process.num_types:
            given = len(type_names)
            raise ValueError(f"type_names must be {process.num_types}, one per type; got {given}")
        self.process, self.context, self.time_unit = process, context, time_unit
        self.num_sequences = num_sequences
        self.type_names = None if type_names is None else tuple(type_names)
        self._times = [deque[float](maxlen=context) for _ in range(num_sequences)]
        self._types = [deque[int](maxlen=context) for _ in range(num_sequences)]
        self._seen = np.zeros(num_sequences, dtype=np.int64)

    @property
    def num_events(self) -> Int[np.ndarray, "B"]:
        """Number of events that each sequence has had, kept or not."""
        return self._seen.copy()

    @property
    def last_times(self) -> Float[np.ndarray, "B"]:
        """Time of the last event of each sequence; minus infinity before the first one."""
        return np.array([times[-1] if times else -np.inf for times in self._times])

    def observe(self, times: Any, types: Any = 0, *, sequence: int | None = None) -> None:
        """Add events; if one is refused, none is added.

        Args:
            times: A time, or several [M], not decreasing and not before the last event.
            types: Their types: numbers from 0, or names; one for all, or as many as times.
            sequence: Where they belong; by default one to each of the sequences, M = B, or all to
                the only one.
        """
        moments = np.atleast_1d(np.asarray(times, dtype=np.float64))
        if moments.ndim != 1:
            raise ValueError(f"times must be a number or [M]; got {list(moments.shape)}")
        codes = np.broadcast_to(self._codes(types), moments.shape)
        count, row = self.num_sequences, sequence or 0
        if not 0 <= row < count:
            raise ValueError(f"sequence must be from 0 to {count - 1}; got {sequence}")
        rows = [row] * len(moments)
        if sequence is None and count > 1:
            if len(moments) != count:
                raise ValueError(
                    f"times must be [{count}], one per sequence, or sequence must say which one "
                    f"they belong to; got {len(moments)}"
                )
            rows = list(range(count))
        _check_finite(moments)
        events = list(zip(rows, moments.tolist(), codes.tolist(), strict=True))
        latest = self.last_times
        for row, moment, _ in events:
            if moment < latest[row]:
                raise ValueError(
                    f"events must come in the order of their times; {moment:g} is before "
                    f"{latest[row]:g}, the last event of sequence {row}"
                )
            latest[row] = moment
        for row, moment, code in events:
            self._times[row].append(moment)
            self._types[row].append(code)
            self._seen[row] += 1

    def _codes(self, types: Any) -> Int[np.ndarray, "..."]:
        given, names = np.asarray(types), self.type_names
        if given.dtype.kind in "UO" and names is not None:
            asked = given.reshape(-1).tolist()
            unknown = [name for name in asked if name not in names]
            if unknown:
                known = name_some(names)
                raise ValueError(f"there is no type {name_some(unknown)}; the types are {known}")
            return np.array([names.index(name) for name in asked], int).reshape(given.shape)
        if given.dtype.kind not in "iu":
            allowed = f"integers from 0{', or names' if names else ''}"
            raise TypeError(f"types must be {allowed}; got {given.dtype}")
        largest = self.process.num_types - 1
        wrong = given[(given < 0) | (given > largest)]
        if wrong.size:
            raise ValueError(f"types must be from 0 to {largest}; got {wrong.flat[0]}")
        return given.astype(np.int64)

    def batch(self) -> EventBatch:
        """Return the events that are kept, on the device of the process."""
        lengths = np.array([len(times) for times in self._times])
        mask = np.arange(max(1, lengths.max())) < lengths[:, None]
        times, types = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.int64)
        times[mask] = np.fromiter(chain.from_iterable(self._times), np.float64)
        types[mask] = np.fromiter(chain.from_iterable(self._types), np.int64)
        return EventBatch(*map(torch.from_numpy, (times, types, mask))).to(self.process.device)

    @torch.no_grad()
    def intensity(self, times: Any) -> Float[np.ndarray, "..."]:
        """Return the rates [B, K] of all types at a time, if nothing happens before it.

        `times` is one for all sequences, or [B]; or [B, M], for rates [B, M, K]. None lies before
        the last event; at its time the rate is that just before it.
        """
        count, last = self.num_sequences, self.last_times
        asked = np.asarray(times, dtype=np.float64)
        asked = np.full(count, asked) if asked.ndim == 0 else asked
        if asked.ndim > 2 or len(asked) != count:
            shape = list(asked.shape)
            raise ValueError(f"times must be a number, [{count}] or [{count}, M]; got {shape}")
        _check_finite(asked)
        query = asked.reshape(count, -1)
        early = query < last[:, None]
        if early.any():
            raise ValueError(
                f"times must not lie before the last event; {query[early][0]:g} is asked, and the "
                f"last events are at {last.tolist()[:5]}"
            )
        at = torch.from_numpy(query).to(self.process.device)
        rates: np.ndarray = self.process.intensity(self.batch(), at).cpu().numpy()
        return rates[:, 0] if asked.ndim == 1 else rates

    def predict_next(self, *, horizon: float, tolerance: float = 1e-6) -> NextEvent:
        """Return `osciformer.events.predict_last` of the sequences."""
        self._need_events("a prediction")
        return predict_last(self.process, self.batch(), horizon=horizon, tolerance=tolerance)

    def sample(
        self,
        *,
        until: float | Float[Tensor, "B"],
        generator: torch.Generator,
        now: float | Float[Tensor, "B"] | None = None,
        **settings: Any,
    ) -> Futures:
        """Return futures of the sequences; settings are those of `osciformer.events.sample`.

        Until `now` nothing further has happened; it is the last event if not given.
        """
        self._need_events("a future")
        settings = {"start": now, "time_unit": self.time_unit, **settings}
        return sample(self.process, self.batch(), until=until, generator=generator, **settings)

    def reset(self, sequence: int | None = None) -> None:
        """Forget the events of a sequence, or of all."""
        for row in range(self.num_sequences) if sequence is None else [sequence]:
            self._times[row].clear()
            self._types[row].clear()
            self._seen[row] = 0

    def _need_events(self, what: str) -> None:
        for row, times in enumerate(self._times):
            if not times:
                raise ValueError(f"{what} needs an event to start from; sequence {row} has none")


def _check_finite(times: Float[np.ndarray, "..."]) -> None:
    if not np.isfinite(times).all():
        raise ValueError(f"times must be finite; got {times[~np.isfinite(times)][0]}")
