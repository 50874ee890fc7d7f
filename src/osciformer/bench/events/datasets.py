"""Data sets of the benchmark of events: their parts, units of time and what is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from osciformer.data import get_dataset
from osciformer.events import EventSequences, HawkesProcess, events_from_frame, sample

#: Folds are numbered from 1, seeds from 0.
REPEATS = {"fold": (1, 2, 3, 4, 5), "seed": (0, 1, 2, 3, 4)}
# Decides which training sequences become dev, and the folds of infants.
_SPLIT_SEED = 0
# Simulated sequences are cut after a number of events, not at a time: one that ends with the last
# event before some time has lost its long last gap, and then the true process is not the best one.
NUM_EVENTS = 50
# Number of sequences and seed of each simulated part; nothing else of the simulation is random.
_SIMULATED = {"train": (2000, 1), "dev": (200, 2), "test": (400, 3)}


class Parts(NamedTuple):
    """Sequences to fit to, to choose epochs and settings by, and to score once; all disjoint."""

    train: EventSequences
    dev: EventSequences
    test: EventSequences


@dataclass(frozen=True)
class EventTask:
    """A data set: what is varied over its repeats, how it is read, and how it is binned.

    `fold` varies data and initialisation, `seed` initialisation alone. `min_width` is the smallest
    width of a bin of a histogram of gaps: three steps of the grid of the times, or 0.05 if that is
    known from the literature. `truth` is the process that made the events, if that is known.
    """

    name: str
    title: str
    num_types: int
    repeat: Literal["fold", "seed"]
    read: Callable[[EventTask, int], Parts]
    min_width: float
    is_default: bool = True
    truth: Callable[[], Any] | None = None

    @property
    def repeats(self) -> tuple[int, ...]:
        """Numbers of all repeats."""
        return REPEATS[self.repeat]

    def load(self, repeat: int) -> Parts:
        """Return the parts of one repeat."""
        return self.read(self, repeat)


def from_first(sequences: EventSequences) -> EventSequences:
    """Return the sequences with their first events at time 0, and without windows.

    Example:
        >>> from_first(EventSequences.from_arrays([[5.0, 7.0], [3.0]])).times
        array([0., 2., 0.])
    """
    first = sequences.times[np.minimum(sequences.offsets[:-1], len(sequences.times) - 1)]
    times = sequences.times - np.repeat(first, sequences.lengths)
    return sequences.replace(times=times, starts=None, ends=None)


def clip_gaps(sequences: EventSequences, largest: float) -> EventSequences:
    """Return the sequences from time 0 on, with longer gaps shortened to the largest.

    Example:
        >>> clip_gaps(EventSequences.from_arrays([[1.0, 2.0, 9.0, 10.0], [4.0]]), 3.0).times
        array([0., 1., 4., 5., 0.])
    """
    gaps = np.diff(sequences.times, prepend=sequences.times[:1])
    begins = sequences.offsets[:-1][sequences.lengths > 0]
    gaps[begins] = 0.0
    total = np.cumsum(np.minimum(gaps, largest))
    base = np.repeat(total[begins], sequences.lengths[sequences.lengths > 0])
    return sequences.replace(times=total - base, starts=None, ends=None)


def hold_out(sequences: EventSequences, count: int) -> tuple[EventSequences, EventSequences]:
    """Return the sequences without `count` of them, and those, drawn with a fixed seed."""
    if not 0 < count < len(sequences):
        raise ValueError(f"cannot hold out {count} of {len(sequences)} sequences")
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(sequences))
    return sequences[np.sort(order[count:])], sequences[np.sort(order[:count])]


def published(
    unit: str,
    *,
    scale: float = 1.0,
    fold: int | None = None,
    max_events: int | None = None,
    clip: float | None = None,
    has_dev: bool = True,
) -> Callable[[EventTask, int], Parts]:
    """Return a reader of published splits, with times of the file multiplied by `scale`.

    Events after the first `max_events` are cut, and gaps are clipped in the new unit. Tasks that
    repeat seeds use one `fold`. Without a published dev part, a tenth of train is held out.
    """

    def read(task: EventTask, repeat: int) -> Parts:
        number = repeat if task.repeat == "fold" else fold
        parts = []
        for split in ("train", "dev", "test") if has_dev else ("train", "test"):
            table = get_dataset(task.name, split, fold=number)
            events = events_from_frame(table, id="seq_id", num_types=task.num_types)
            events = from_first(events) if clip is None else events
            events = (events if max_events is None else events.first(max_events)).rescale(
                scale, unit
            )
            parts.append(events if clip is None else clip_gaps(events, clip))
        if not has_dev:
            parts[:1] = hold_out(parts[0], len(parts[0]) // 10)
        return Parts(*parts)

    return read


def read_neonate(task: EventTask, fold: int) -> Parts:
    """Return a fold of infants to test, the next one as dev, the others to train.

    Seizures on which all three experts agree; infants with one or none have nothing to predict.
    """
    table = get_dataset("neonate", "all").to_pandas()
    events = events_from_frame(table[table["expert"] == "ABC"], id="seq_id", num_types=1)
    events = from_first(events[events.lengths > 1]).rescale(1 / 60, "min")
    folds = np.arange(len(events)) % len(REPEATS["fold"])
    folds = np.random.default_rng(_SPLIT_SEED).permutation(folds) + 1
    dev = fold % len(REPEATS["fold"]) + 1
    return Parts(
        events[(folds != fold) & (folds != dev)], events[folds == dev], events[folds == fold]
    )


def true_process() -> HawkesProcess:
    """Return the process of the simulation: three types that excite themselves and each other.

    Example:
        >>> process = true_process()
        >>> process.num_types, round(process.spectral_radius, 2)
        (3, 0.65)
    """
    return HawkesProcess(
        base=[0.20, 0.12, 0.16],
        branching=[[0.45, 0.00, 0.20], [0.35, 0.25, 0.00], [0.00, 0.40, 0.30]],
        decay=[[4.0, 1.0, 0.5], [1.5, 6.0, 1.0], [1.0, 0.7, 3.0]],
    )


@cache
def simulate(part: str) -> EventSequences:
    """Return the simulated sequences of a part, drawn by exact thinning; always the same ones."""
    count, seed = _SIMULATED[part]
    return sample(
        true_process(),
        EventSequences.from_arrays([[]] * count, num_types=3).batch(),
        until=1e6,
        generator=torch.Generator().manual_seed(seed),
        max_events=NUM_EVENTS,
        at_limit="stop",
        time_unit="unit of the simulation",
    ).sequences


def read_simulation(task: EventTask, seed: int) -> Parts:
    """Return the simulated Hawkes process."""
    return Parts(*(from_first(simulate(part)) for part in Parts._fields))


_BOOKORDER = published("0.001 min", scale=1e3, max_events=100, clip=70.0, has_dev=False)
_STACKOVERFLOW = published("1e6 s", scale=1e-6, fold=1, max_events=100, has_dev=False)
_NHP = published("unit of the file")
TASKS = {
    task.name: task
    for task in (
        EventTask("mimic2", "MIMIC-II", 75, "fold", published("year"), 0.05),
        EventTask("bookorder", "BookOrder", 2, "fold", _BOOKORDER, 0.05),
        EventTask("stackoverflow", "StackOverflow (part)", 22, "seed", _STACKOVERFLOW, 0.05),
        EventTask("neonate", "Neonate", 1, "fold", read_neonate, 0.05),
        EventTask("taxi", "Taxi", 10, "seed", published("h"), 3 / 3600),
        EventTask("taobao", "Taobao", 17, "seed", published("10,000 s"), 3e-4),
        EventTask(
            "hawkes", "Hawkes, simulated", 3, "seed", read_simulation, 0.01, truth=true_process
        ),
        EventTask("hawkes_nhp", "Hawkes (NHP)", 5, "seed", _NHP, 0.01, False),
        EventTask("conttime_nhp", "Neural Hawkes (NHP)", 5, "seed", _NHP, 0.01, False),
    )
}


def describe_parts(parts: Parts) -> dict[str, Any]:
    """Return sizes, gaps and the resolution of the times, for the notes of a table."""
    gaps = np.concatenate([part.gaps for part in parts])
    sizes = {
        name: {"sequences": len(part), "events": len(part.times), "scored": len(part.gaps)}
        for name, part in parts._asdict().items()
    }
    return {
        **sizes,
        "types": parts.train.num_types,
        "time_unit": parts.train.time_unit,
        "longest_sequence": int(max(part.lengths.max() for part in parts)),
        "mean_gap": float(gaps.mean()),
        "longest_train_gap": float(parts.train.gaps.max()),
        "smallest_gap": float(gaps[gaps > 0].min()),
        "zero_gaps": int((gaps == 0).sum()),
    }
