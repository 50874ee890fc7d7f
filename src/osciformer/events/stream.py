"""Events as they arrive, with queries in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from osciformer._text import name_some
from osciformer._types import Float, Int, Tensor
from osciformer.events.prediction import Futures, NextEvent, predict_last, sample
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventBatch

# Initial number of slots for events; it doubles whenever they run out.
_FIRST_SLOTS = 16


class EventStream:
    """Sequences that grow event by event, and can be queried at any time.

    The stream keeps the events and evaluates the process on them, so all answers are the same as
    for a batch of these events. With a `context` it keeps only the last events, which bounds memory
    and time.

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
            raise ValueError(
                f"type_names must be {process.num_types}, one per type; got {len(type_names)}"
            )
        self.process, self.context, self.time_unit = process, context, time_unit
        self.num_sequences = num_sequences
        self.type_names = None if type_names is None else tuple(type_names)
        self._times = np.zeros((num_sequences, _FIRST_SLOTS))
        self._types = np.zeros((num_sequences, _FIRST_SLOTS), dtype=np.int64)
        self._kept = np.zeros(num_sequences, dtype=np.int64)
        self._seen = np.zeros(num_sequences, dtype=np.int64)

    @property
    def num_events(self) -> Int[np.ndarray, "B"]:
        """Number of events that each sequence has had, kept or not."""
        return self._seen.copy()

    @property
    def last_times(self) -> Float[np.ndarray, "B"]:
        """Time of the last event of each sequence; minus infinity before the first one."""
        last = self._times[np.arange(self.num_sequences), np.maximum(self._kept - 1, 0)]
        return np.where(self._kept > 0, last, -np.inf)

    def observe(self, times: Any, types: Any = 0, *, sequence: int | None = None) -> None:
        """Add events; if one is refused, none is added.

        Args:
            times: A time, or the times [M] of several events, not decreasing, and not before the
                last event. Without `sequence` and with several sequences, one time for each [B].
            types: Their types: numbers from 0, or names; one for all, or as many as times.
            sequence: The sequence that they belong to. By default one event for each sequence, or
                all for the only one.
        """
        moments = np.atleast_1d(np.asarray(times, dtype=np.float64))
        if moments.ndim != 1:
            raise ValueError(f"times must be a number or [M]; got {list(moments.shape)}")
        codes = np.broadcast_to(self._codes(types), moments.shape)
        if sequence is None and self.num_sequences > 1:
            if len(moments) != self.num_sequences:
                raise ValueError(
                    f"times must be [{self.num_sequences}], one per sequence, or sequence must say "
                    f"which one they belong to; got {len(moments)}"
                )
            rows = np.arange(self.num_sequences)
        else:
            row = 0 if sequence is None else sequence
            if not 0 <= row < self.num_sequences:
                raise ValueError(
                    f"sequence must be from 0 to {self.num_sequences - 1}; got {sequence}"
                )
            rows = np.full(len(moments), row)
        self._check_order(moments, rows)
        for row, moment, code in zip(rows.tolist(), moments.tolist(), codes.tolist(), strict=True):
            self._append(row, moment, code)

    def _codes(self, types: Any) -> Int[np.ndarray, "..."]:
        given, names = np.asarray(types), self.type_names
        if given.dtype.kind in "UO" and names is not None:
            asked = given.reshape(-1).tolist()
            unknown = [name for name in asked if name not in names]
            if unknown:
                raise ValueError(
                    f"there is no type {name_some(unknown)}; the types are {name_some(names)}"
                )
            return np.array([names.index(name) for name in asked], int).reshape(given.shape)
        if given.dtype.kind not in "iu":
            raise TypeError(
                f"types must be integers from 0{', or names' if names else ''}; got {given.dtype}"
            )
        wrong = given[(given < 0) | (given >= self.process.num_types)]
        if wrong.size:
            raise ValueError(
                f"types must be from 0 to {self.process.num_types - 1}; got {wrong.flat[0]}"
            )
        return given.astype(np.int64)

    def _check_order(self, moments: Float[np.ndarray, "M"], rows: Int[np.ndarray, "M"]) -> None:
        _check_finite(moments)
        latest = self.last_times
        for row, moment in zip(rows.tolist(), moments.tolist(), strict=True):
            if moment < latest[row]:
                raise ValueError(
                    f"events must come in the order of their times; {moment:g} is before "
                    f"{latest[row]:g}, the last event of sequence {row}"
                )
            latest[row] = moment

    def _append(self, row: int, moment: float, code: int) -> None:
        slot = int(self._kept[row])
        if slot == self._times.shape[1]:
            self._times = np.pad(self._times, ((0, 0), (0, slot)))
            self._types = np.pad(self._types, ((0, 0), (0, slot)))
        self._times[row, slot], self._types[row, slot] = moment, code
        self._seen[row] += 1
        self._kept[row] += 1
        # The older half of twice the context is dropped at once, so that events rarely move.
        if self.context is not None and self._kept[row] > 2 * self.context:
            for array in (self._times, self._types):
                array[row, : self.context] = array[row, slot + 1 - self.context : slot + 1]
            self._kept[row] = self.context

    def batch(self) -> EventBatch:
        """Return the events that are kept, on the device of the process."""
        known = self._kept if self.context is None else np.minimum(self._kept, self.context)
        steps = np.arange(max(1, int(known.max())))
        last = np.maximum(self._kept - 1, 0)[:, None]
        where = (
            np.arange(len(known))[:, None],
            np.minimum((self._kept - known)[:, None] + steps, last),
        )
        arrays = (self._times[where], self._types[where], steps < known[:, None])
        return EventBatch(*map(torch.from_numpy, arrays)).to(self.process.device)

    @torch.no_grad()
    def intensity(self, times: Any) -> Float[np.ndarray, "..."]:
        """Return the rates of all types at a time, if nothing happens before it.

        Args:
            times: A time for all sequences, or one for each [B], or several for each [B, M]; not
                before the last event. At the time of the last event it is the rate just before it.

        Returns:
            Events per unit of time, [B, K]; [B, M, K] for several times.
        """
        asked = self._after_last(times)
        query = torch.from_numpy(asked.reshape(self.num_sequences, -1)).to(self.process.device)
        rates: np.ndarray = self.process.intensity(self.batch(), query).cpu().numpy()
        return rates[:, 0] if asked.ndim == 1 else rates

    def predict_next(self, *, horizon: float, tolerance: float = 1e-6) -> NextEvent:
        """Return the prediction after the last event of each sequence, with N = 1.

        Args:
            horizon: Where to stop, as a gap.
            tolerance: As for `osciformer.events.predict_next`.
        """
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
        """Return futures of the sequences; see `osciformer.events.sample`.

        Args:
            until: Where futures end, as a time.
            generator: Source of randomness.
            now: Until when nothing further has happened; the last event if not given.
            **settings: `num_futures`, `max_events`, `at_limit` and `progress` of `sample`.
        """
        self._need_events("a future")
        settings = {"start": now, "time_unit": self.time_unit, **settings}
        return sample(self.process, self.batch(), until=until, generator=generator, **settings)

    def reset(self, sequence: int | None = None) -> None:
        """Forget the events of a sequence, or of all."""
        rows = slice(None) if sequence is None else sequence
        self._kept[rows] = self._seen[rows] = 0

    def _after_last(self, times: Any) -> Float[np.ndarray, "..."]:
        asked = np.asarray(times, dtype=np.float64)
        if asked.ndim == 0:
            asked = np.full(self.num_sequences, asked)
        if asked.ndim > 2 or len(asked) != self.num_sequences:
            raise ValueError(
                f"times must be a number, [{self.num_sequences}] or [{self.num_sequences}, M]; "
                f"got {list(asked.shape)}"
            )
        _check_finite(asked)
        early = asked < (self.last_times if asked.ndim == 1 else self.last_times[:, None])
        if early.any():
            raise ValueError(
                f"times must not lie before the last event; {asked[early][0]:g} is asked, and the "
                f"last events are at {self.last_times.tolist()[:5]}"
            )
        return asked

    def _need_events(self, what: str) -> None:
        if (self._kept == 0).any():
            row = int(np.argmax(self._kept == 0))
            raise ValueError(f"{what} needs an event to start from; sequence {row} has none")


def _check_finite(times: Float[np.ndarray, "..."]) -> None:
    if not np.isfinite(times).all():
        raise ValueError(f"times must be finite; got {times[~np.isfinite(times)][0]}")
