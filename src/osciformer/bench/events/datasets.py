"""Data sets of the benchmark of events: their parts, units of time and what is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from osciformer.data import get_dataset
from osciformer.events import EventSequences, HawkesProcess, events_from_frame, sample

REPEATS = {"fold": (1, 2, 3, 4, 5), "seed": (0, 1, 2, 3, 4)}
_SPLIT_SEED = 0  # decides which training sequences become dev, and the folds of infants
# In the test part of Taobao no gap is longer than this, and an eighth of the gaps are uniform up to
# the second number and not on the grid of 1 s: what was longer has been drawn anew there.
_TAOBAO_LONGEST, _TAOBAO_DRAWN = 1.0, 0.1
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
    """A data set: what is varied over its repeats, how it is read, and how it is binned."""

    name: str
    title: str
    num_types: int
    repeat: Literal["fold", "seed"]  # folds vary data and initialisation, seeds the latter alone
    read: Callable[[EventTask, int], Parts]
    # Smallest bin of a histogram of gaps: three steps of the grid of times, or a published 0.05.
    min_width: float
    is_default: bool = True
    truth: Callable[[], Any] | None = None  # the process that made the events, if it is known

    @property
    def repeats(self) -> tuple[int, ...]:
        """Numbers of all repeats."""
        return REPEATS[self.repeat]

    def load(self, repeat: int) -> Parts:
        """Return the parts of one repeat."""
        return self.read(self, repeat)


def from_first(sequences: EventSequences) -> EventSequences:
    """Return the sequences with their first events at time 0, and without windows."""
    first = sequences.times[np.minimum(sequences.offsets[:-1], len(sequences.times) - 1)]
    times = sequences.times - np.repeat(first, sequences.lengths)
    return sequences.replace(times=times, starts=None, ends=None)


def clip_gaps(sequences: EventSequences, largest: float) -> EventSequences:
    """Return the sequences from time 0 on, with longer gaps shortened to the largest."""
    return _with_gaps(sequences, lambda gaps: np.minimum(gaps, largest))


def redraw_gaps(
    sequences: EventSequences, longest: float, *, below: float, seed: int
) -> EventSequences:
    """Return the sequences from time 0 on, with gaps from `longest` on uniform up to `below`."""
    random = np.random.default_rng(seed)
    return _with_gaps(
        sequences,
        lambda gaps: np.where(gaps < longest, gaps, random.uniform(0.0, below, len(gaps))),
    )


def _with_gaps(
    sequences: EventSequences, change: Callable[[np.ndarray], np.ndarray]
) -> EventSequences:
    """Return the sequences from time 0 on, with other gaps, added up anew."""
    gaps = np.diff(sequences.times, prepend=sequences.times[:1])
    begins = sequences.offsets[:-1][sequences.lengths > 0]
    gaps[begins] = 0.0
    total = np.cumsum(change(gaps))
    base = np.repeat(total[begins], sequences.lengths[sequences.lengths > 0])
    return sequences.replace(times=total - base, starts=None, ends=None)


def _published(
    task: EventTask,
    repeat: int,
    unit: str,
    scale: float = 1.0,  # of the times of the file
    fold: int | None = None,  # of a task that repeats seeds
    max_events: int | None = None,  # of a sequence; later ones are cut
    clip: float | None = None,  # the longest gap in the new unit
    has_dev: bool = True,  # else a tenth of train is held out
) -> Parts:
    parts = []
    for split in ("train", "dev", "test") if has_dev else ("train", "test"):
        table = get_dataset(task.name, split, fold=repeat if task.repeat == "fold" else fold)
        events = events_from_frame(table, id="seq_id", num_types=task.num_types)
        events = from_first(events) if clip is None else events
        events = events if max_events is None else events.first(max_events)
        events = events.rescale(scale, unit)
        parts.append(events if clip is None else clip_gaps(events, clip))
    if not has_dev:
        whole = parts[0]
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(whole))
        dev, train = np.split(order, [len(whole) // 10])
        parts[:1] = whole[np.sort(train)], whole[np.sort(dev)]
    return Parts(*parts)


def read_neonate(task: EventTask, fold: int) -> Parts:
    """Return a fold of infants to test, the next one as dev, the others to train."""
    table = get_dataset("neonate", "all").to_pandas()
    agreed = table[table["expert"] == "ABC"]  # by all three experts
    events = events_from_frame(agreed, id="seq_id", num_types=1)
    # Infants with one seizure or none have nothing to predict.
    return in_folds(from_first(events[events.lengths > 1]).rescale(1 / 60, "min"), fold)


def in_folds(events: EventSequences, fold: int) -> Parts:
    """Return a fifth of the sequences to test, the next one as dev, the others to train."""
    count = len(REPEATS["fold"])
    folds = np.random.default_rng(_SPLIT_SEED).permutation(np.arange(len(events)) % count) + 1
    is_test, is_dev = folds == fold, folds == fold % count + 1
    return Parts(events[~is_test & ~is_dev], events[is_dev], events[is_test])


def read_taobao(task: EventTask, repeat: int, *, is_in_folds: bool) -> Parts:
    """Return Taobao with training events like those of the test part.

    In folds, it is the test part alone; else the long gaps of train and dev are drawn anew.
    """
    published = replace(task, name="taobao", repeat="seed")
    parts = _published(published, repeat, unit="10,000 s")
    if is_in_folds:
        return in_folds(parts.test, repeat)
    train, dev = (
        redraw_gaps(part, _TAOBAO_LONGEST, below=_TAOBAO_DRAWN, seed=number)
        for number, part in enumerate(parts[:2])
    )
    return Parts(train, dev, parts.test)


def true_process() -> HawkesProcess:
    """Return the process of the simulation: three types that excite themselves and each other."""
    return HawkesProcess(
        base=[0.20, 0.12, 0.16],
        branching=[[0.45, 0.00, 0.20], [0.35, 0.25, 0.00], [0.00, 0.40, 0.30]],
        decay=[[4.0, 1.0, 0.5], [1.5, 6.0, 1.0], [1.0, 0.7, 3.0]],
    )


@cache
def simulate(part: str) -> EventSequences:
    """Return the simulated sequences of a part, drawn by exact thinning; always the same ones."""
    count, seed = _SIMULATED[part]
    empty = EventSequences.from_arrays([[]] * count, num_types=3).batch()
    limits: dict[str, Any] = {"until": 1e6, "max_events": NUM_EVENTS, "at_limit": "stop"}
    generator, unit = torch.Generator().manual_seed(seed), "unit of the simulation"
    return sample(true_process(), empty, generator=generator, time_unit=unit, **limits).sequences


_CUT = partial(_published, max_events=100, has_dev=False)
_BOOKORDER = partial(_CUT, unit="0.001 min", scale=1e3, clip=70.0)
_STACKOVERFLOW = partial(_CUT, unit="1e6 s", scale=1e-6, fold=1)
_NHP = partial(_published, unit="unit of the file")
_ALIKE, _FOLDS = (partial(read_taobao, is_in_folds=flag) for flag in (False, True))


def _simulation(task: EventTask, seed: int) -> Parts:
    return Parts(*(from_first(simulate(part)) for part in Parts._fields))


_ROWS = (
    EventTask("mimic2", "MIMIC-II", 75, "fold", partial(_published, unit="year"), 0.05),
    EventTask("bookorder", "BookOrder", 2, "fold", _BOOKORDER, 0.05),
    EventTask("stackoverflow", "StackOverflow (part)", 22, "seed", _STACKOVERFLOW, 0.05),
    EventTask("neonate", "Neonate", 1, "fold", read_neonate, 0.05),
    EventTask("taxi", "Taxi", 10, "seed", partial(_published, unit="h"), 3 / 3600),
    EventTask("taobao", "Taobao", 17, "seed", partial(_published, unit="10,000 s"), 3e-4),
    EventTask("taobao_alike", "Taobao (parts alike)", 17, "seed", _ALIKE, 3e-4, False),
    EventTask("taobao_folds", "Taobao (test part in folds)", 17, "fold", _FOLDS, 3e-4, False),
    EventTask("hawkes", "Hawkes, simulated", 3, "seed", _simulation, 0.01, truth=true_process),
    EventTask("hawkes_nhp", "Hawkes (NHP)", 5, "seed", _NHP, 0.01, False),
    EventTask("conttime_nhp", "Neural Hawkes (NHP)", 5, "seed", _NHP, 0.01, False),
)
TASKS = {task.name: task for task in _ROWS}


def describe_parts(parts: Parts) -> dict[str, Any]:
    """Return sizes, gaps and the resolution of the times, for the notes of a table."""
    gaps = np.concatenate([part.gaps for part in parts])
    sizes = {
        name: {"sequences": len(part), "events": len(part.times), "scored": len(part.gaps)}
        for name, part in parts._asdict().items()
    }
    return sizes | {
        "types": parts.train.num_types,
        "time_unit": parts.train.time_unit,
        "longest_sequence": int(max(part.lengths.max() for part in parts)),
        "mean_gap": float(gaps.mean()),
        "longest_train_gap": float(parts.train.gaps.max()),
        "smallest_gap": float(gaps[gaps > 0].min()),
        "zero_gaps": int((gaps == 0).sum()),
    }
