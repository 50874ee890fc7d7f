"""Data sets of the benchmark of events: their parts, units of time and what is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from osciformer.bench.events import simulation
from osciformer.data import get_dataset
from osciformer.events import EventSequences, events_from_frame

#: Folds are numbered from 1, seeds from 0.
REPEATS = {"fold": (1, 2, 3, 4, 5), "seed": (0, 1, 2, 3, 4)}
MAX_EVENTS = 100
BOOKORDER_CLIP = 70.0
# Of everything that is drawn here: which training sequences become dev, and folds of infants.
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Parts:
    """Three sets of sequences without a sequence in common.

    Attributes:
        train: What models are fitted to.
        dev: What decides epochs and settings.
        test: What is scored, once.
    """

    train: EventSequences
    dev: EventSequences
    test: EventSequences


@dataclass(frozen=True)
class EventTask:
    """A data set of the benchmark and its protocol.

    Attributes:
        name: On the command line.
        title: In tables.
        num_types: Number of types.
        repeat: What is varied: `fold`, data and initialisation; `seed`, initialisation alone.
        load: Returns the parts of one repeat.
        min_width: Smallest width of a bin of a histogram of gaps: three steps of the grid of the
            times, or 0.05 where that is known from the literature.
        notes: Where the data come from, their unit, what was cut, and the grid of the times.
        is_default: Whether it runs if no data set is named.
        truth: The process that made the events, if that is known.
    """

    name: str
    title: str
    num_types: int
    repeat: Literal["fold", "seed"]
    load: Callable[[int], Parts]
    min_width: float
    notes: str
    is_default: bool = True
    truth: Callable[[], Any] | None = None

    @property
    def repeats(self) -> tuple[int, ...]:
        """Numbers of all repeats."""
        return REPEATS[self.repeat]


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
    """Return the sequences with longer gaps shortened to the largest, and times added up anew.

    Example:
        >>> clip_gaps(EventSequences.from_arrays([[1.0, 2.0, 9.0, 10.0], [4.0]]), 3.0).times
        array([0., 1., 4., 5., 0.])
    """
    gaps = np.diff(sequences.times, prepend=sequences.times[:1])
    begins = sequences.offsets[:-1][sequences.lengths > 0]
    gaps[begins] = 0.0
    total = np.cumsum(np.minimum(gaps, largest))
    # From the first event of each sequence on; what ran up before is subtracted.
    base = np.repeat(total[begins], sequences.lengths[sequences.lengths > 0])
    return sequences.replace(times=total - base, starts=None, ends=None)


def hold_out(sequences: EventSequences, count: int) -> tuple[EventSequences, EventSequences]:
    """Return the sequences without some of them, and those, drawn with a fixed seed.

    Args:
        sequences: At least `count` + 1 sequences.
        count: How many are held out.
    """
    if not 0 < count < len(sequences):
        raise ValueError(f"cannot hold out {count} of {len(sequences)} sequences")
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(sequences))
    return sequences[np.sort(order[count:])], sequences[np.sort(order[:count])]


def _read(name: str, split: str, *, num_types: int, fold: int | None = None) -> EventSequences:
    table = get_dataset(name, split, fold=fold)
    return events_from_frame(table, id="seq_id", num_types=num_types)


def _given_splits(name: str, num_types: int, time_unit: str) -> Callable[[int], Parts]:
    def load(seed: int) -> Parts:
        parts = (
            from_first(_read(name, split, num_types=num_types)).rescale(1.0, time_unit)
            for split in ("train", "dev", "test")
        )
        return Parts(*parts)

    return load


def load_mimic2(fold: int) -> Parts:
    """Return a fold of MIMIC-II as it is given."""
    parts = (
        from_first(_read("mimic2", split, num_types=75, fold=fold)).rescale(1.0, "year")
        for split in ("train", "dev", "test")
    )
    return Parts(*parts)


def load_bookorder(fold: int) -> Parts:
    """Return a fold of BookOrder: times x 1000, gaps clipped, first events, a tenth as dev."""
    train, test = (
        clip_gaps(
            _read("bookorder", split, num_types=2, fold=fold)
            .first(MAX_EVENTS)
            .rescale(1000.0, "0.001 min"),
            BOOKORDER_CLIP,
        )
        for split in ("train", "test")
    )
    return Parts(*hold_out(train, len(train) // 10), test)


def load_stackoverflow(seed: int) -> Parts:
    """Return fold 1 of StackOverflow, the first events of each user; a tenth of train as dev."""
    train, test = (
        from_first(_read("stackoverflow", split, num_types=22, fold=1))
        .first(MAX_EVENTS)
        .rescale(1e-6, "1e6 s")
        for split in ("train", "test")
    )
    return Parts(*hold_out(train, len(train) // 10), test)


def load_neonate(fold: int) -> Parts:
    """Return a fold of infants to test, the next one as dev, the others to train.

    Seizures on which all three experts agree; infants with one or none have nothing to predict.
    """
    table = get_dataset("neonate", "all").to_pandas()
    table = table[table["expert"] == "ABC"]
    events = events_from_frame(table, id="seq_id", num_types=1)
    events = from_first(events[events.lengths > 1]).rescale(1 / 60, "min")
    folds = np.arange(len(events)) % len(REPEATS["fold"])
    folds = np.random.default_rng(_SPLIT_SEED).permutation(folds) + 1
    dev = fold % len(REPEATS["fold"]) + 1
    return Parts(
        events[(folds != fold) & (folds != dev)], events[folds == dev], events[folds == fold]
    )


def load_simulation(seed: int) -> Parts:
    """Return the simulated Hawkes process."""
    return Parts(*(from_first(simulation.simulate(part)) for part in ("train", "dev", "test")))


TASKS = {
    task.name: task
    for task in (
        EventTask(
            "mimic2",
            "MIMIC-II",
            75,
            "fold",
            load_mimic2,
            0.05,
            "Five folds of the authors with their own dev parts. Unit of the file, in which times "
            "lie on a grid of 1/52: years, by weeks. Nothing is cut.",
        ),
        EventTask(
            "bookorder",
            "BookOrder",
            2,
            "fold",
            load_bookorder,
            0.05,
            "Five folds of the authors; 10 of the 100 training sequences are dev. Times of the "
            "file x 1000; gaps clipped at 70 and added up anew; first 100 events of each "
            "sequence. Grid of 1/60 (1 ms, if the unit of the file is a minute).",
        ),
        EventTask(
            "stackoverflow",
            "StackOverflow (part)",
            22,
            "seed",
            load_stackoverflow,
            0.05,
            "Fold 1 of the authors: its 1,326 test users are complete; of its 5,307 training "
            "users the 3,142 whose times are at hand, a tenth of them dev. Unit 1e6 s from the "
            "first event; first 100 events of each user. Times have milliseconds.",
        ),
        EventTask(
            "neonate",
            "Neonate",
            1,
            "fold",
            load_neonate,
            0.05,
            "Onsets of seizures on which three experts agree; infants with at least two of them, "
            "in five folds by infant: one test, the next dev, three train. Minutes, on a grid of "
            "1 s. One type.",
        ),
        EventTask(
            "taxi",
            "Taxi",
            10,
            "seed",
            _given_splits("taxi", 10, "h"),
            3 / 3600,
            "Given parts. Hours, on a grid of 1 s.",
        ),
        EventTask(
            "taobao",
            "Taobao",
            17,
            "seed",
            _given_splits("taobao", 17, "10,000 s"),
            3e-4,
            "Given parts. Unit of the file, 10,000 s, on a grid of 1 s for the most part. Events "
            "at one time are predicted from what is strictly before.",
        ),
        EventTask(
            "hawkes",
            "Hawkes, simulated",
            3,
            "seed",
            load_simulation,
            0.01,
            "Our own simulation of a Hawkes process with three types and exponential kernels, "
            "each pair its own decay, 50 events from an empty history, by exact thinning with a "
            "fixed seed. Not on a grid.",
            truth=simulation.true_process,
        ),
        EventTask(
            "hawkes_nhp",
            "Hawkes (NHP)",
            5,
            "seed",
            _given_splits("hawkes_nhp", 5, "unit of the file"),
            0.01,
            "A part of the synthetic Hawkes data of Mei and Eisner (2017); given parts, unit of "
            "the file, rounded to single precision.",
            is_default=False,
        ),
        EventTask(
            "conttime_nhp",
            "Neural Hawkes (NHP)",
            5,
            "seed",
            _given_splits("conttime_nhp", 5, "unit of the file"),
            0.01,
            "A part of the data of Mei and Eisner (2017) that a neural Hawkes process made; given "
            "parts, unit of the file, rounded to single precision.",
            is_default=False,
        ),
    )
}


def describe_parts(parts: Parts) -> dict[str, Any]:
    """Return sizes, gaps and the resolution of the times, for the notes of a table.

    Args:
        parts: Of one repeat.
    """
    gaps = np.concatenate([part.gaps for part in (parts.train, parts.dev, parts.test)])
    sizes = {
        name: {"sequences": len(part), "events": len(part.times), "scored": len(part.gaps)}
        for name, part in (("train", parts.train), ("dev", parts.dev), ("test", parts.test))
    }
    return {
        **sizes,
        "types": parts.train.num_types,
        "time_unit": parts.train.time_unit,
        "longest_sequence": int(max(part.lengths.max() for part in vars(parts).values())),
        "mean_gap": float(gaps.mean()),
        "longest_train_gap": float(parts.train.gaps.max()),
        "smallest_gap": float(gaps[gaps > 0].min()),
        "zero_gaps": int((gaps == 0).sum()),
    }
