"""From what users pass as X to sequences of events, and checks that it fits what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osciformer._text import name_some
from osciformer.data.series import TimeAxis
from osciformer.events.sequences import UNNAMED_UNIT, EventSequences, events_from_frame


def as_events(
    X: Any, layout: Mapping[str, Any] | None = None, type_names: Sequence[str] | None = None
) -> EventSequences:
    """Return X as sequences of events.

    Args:
        X: An `EventSequences`, a data frame, or a list of pairs `(times [N], types [N])`.
        layout: Arguments of `events_from_frame`, such as the names of the columns.
        type_names: The types that a data frame may hold; those that it holds if not given.

    Example:
        >>> as_events([([0.0, 1.0], [0, 1]), ([0.5], [1])])
        EventSequences(2 sequences, 3 events of 2 types, lengths 1 to 2, time in unit of the data)
    """
    if isinstance(X, EventSequences):
        found = X
    elif isinstance(X, list | tuple):
        found = _from_pairs(X)
    elif hasattr(X, "columns") or hasattr(X, "__arrow_c_stream__") or isinstance(X, Mapping):
        settings = dict(layout or {})
        if type_names is not None and settings.get("type", "type") is not None:
            settings |= {"type_names": tuple(type_names), "num_types": len(type_names)}
        found = events_from_frame(X, **settings)
    else:
        raise TypeError(
            "X must be an EventSequences, a data frame with a row per event, or a list of (times, "
            f"types) pairs; got {type(X).__name__}"
        )
    if len(found) == 0:
        raise ValueError("X holds no sequences; pass at least one")
    return found


def _from_pairs(pairs: Sequence[Any]) -> EventSequences:
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(
                f"X must be a list of (times, types) pairs; item {number} is {type(pair).__name__}"
            )
    return EventSequences.from_arrays([t for t, _ in pairs], [k for _, k in pairs])


def check_learnable(events: EventSequences) -> None:
    """Refuse sequences from which nothing about waiting times can be learned."""
    if not (events.lengths > 1).any():
        raise ValueError(
            f"none of the {len(events)} sequences has a second event, and the first one of a "
            "sequence is not predicted; check which column says what belongs to one sequence"
        )
    if not (events.gaps > 0).any():
        raise ValueError(
            "all events of each sequence are at one time, so that there is no waiting time to "
            "learn; check the column of times, and its unit"
        )


def with_types(events: EventSequences, names: Sequence[str]) -> EventSequences:
    """Return the same events with types counted as in training, matched by their names.

    Args:
        events: Sequences whose types may be fewer, or in another order. Types without names are
            taken to be counted as in training.
        names: The types of training.

    Example:
        >>> events = EventSequences([0.0, 1.0], [0, 1], [0, 2], type_names=["sell", "buy"])
        >>> with_types(events, ["buy", "hold", "sell"]).types
        array([2, 0])
    """
    if tuple(events.type_names) == tuple(names):
        return events
    known = list(names)
    if events.type_names == tuple(map(str, range(events.num_types))):
        known = [str(number) for number in range(len(names))]
    position = {name: number for number, name in enumerate(known)}
    occurring = np.unique(events.types)
    unknown = [events.type_names[k] for k in occurring if events.type_names[k] not in position]
    if unknown:
        raise ValueError(
            f"X has types that were not there in fit: {name_some(unknown)}; the model knows "
            f"{name_some(list(names))}. Leave such events out, or fit again with data that have "
            "them"
        )
    codes = np.array([position.get(name, 0) for name in events.type_names], dtype=np.int64)
    return events.replace(types=codes[events.types], num_types=len(names), type_names=tuple(names))


def check_same_time(wanted: tuple[TimeAxis, str], events: EventSequences) -> None:
    """Refuse times that are known to be in another unit than in training.

    Args:
        wanted: Time axis and name of the unit in training.
        events: Sequences; a unit without a name is taken to be that of training.
    """
    axis, unit = wanted
    if axis.kind != events.time_axis.kind and events.time_axis.kind != "number":
        raise ValueError(
            f"the model was fitted with times of kind {axis.kind!r}; X has "
            f"{events.time_axis.kind!r}"
        )
    if UNNAMED_UNIT not in (unit, events.time_unit) and unit != events.time_unit:
        raise ValueError(
            f"the model was fitted with times in {unit}, and those of X are in {events.time_unit}; "
            "read X in the same unit, or use its method rescale"
        )


def refuse_empty(events: EventSequences) -> None:
    """Refuse sequences without an event to predict from."""
    empty = events.ids[events.lengths == 0]
    if len(empty):
        raise ValueError(
            f"{len(empty)} sequences have no event to start from, the first is {empty[0]!s}; "
            "leave them out"
        )
