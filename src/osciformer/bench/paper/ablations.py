"""`osciformer bench ablations`: one setting of the layer at a time, on four tasks."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from osciformer.bench.documents import Document, mean_of_seeds, spread
from osciformer.bench.events.datasets import TASKS as EVENT_TASKS
from osciformer.bench.paper import resonance
from osciformer.bench.paper.suite import NEAR_IN_WORDS, regimes, zetas
from osciformer.bench.report import Row, markdown_table
from osciformer.bench.suite import COLOURS, REFERENCE, Suite, new_figure, rounded
from osciformer.bench.tables.heart_rate import read_recordings
from osciformer.bench.workers import Job
from osciformer.config import estimator_arguments
from osciformer.data import IrregularSeries, get_dataset
from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    OsciFormerRegressor,
)
from osciformer.nn import Spectrum

#: What each factor changes of the base: the paper's setting, but for frequencies from the times,
#: and values at the end of a gap. In a series of unit span, as a model sees it, L is 1.
BASE: dict[str, Any] = {"query": "ridge", "value": "point", "omega_range": "data", "bank": "data"}
_PAPER = (1e-2, 10.0)
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {"base": {}},
    "modes": {f"J = {j}": {"num_modes": j} for j in (1, 2, 4, 6, 12, 16)},
    "damping": {
        "[0, 0]": {"undamped": True},
        **{
            f"[{low:g}, {high:g}]": {"zeta_range": (low, high)}
            for low, high in ((0.01, 0.1), (0.1, 0.6), (0.2, 0.8), (0.5, 1.0))
        },
    },
    "grid": {
        "linear [0.1, 10]": {"bank": "linear", "omega_range": (0.1, 10.0)},
        "log-uniform [0.01, 10]": {"bank": "log_uniform", "omega_range": _PAPER},
        "random uniform [0.01, 10]": {"bank": "random_uniform", "omega_range": _PAPER},
        "geometric [0.01, 10]": {"bank": "geometric", "omega_range": _PAPER},
        "harmonics n pi / L": {"bank": "harmonics", "omega_range": (math.pi, 8 * math.pi)},
    },
    "query": {q: {"query": q} for q in ("hold", "linear", "ridge_causal", "anchored", "learned")},
    "value": {"averaged value": {"value": "average"}},
    "velocity": {"no velocity maps": {"velocity": False}},
    "drive": {"4 drive modes": {"drive_modes": 4}},
    "decay": {"spectra decay": {}},
    "library": {
        "library's defaults": {"query": "hold", "value": "point", "omega_range": "typical"}
    },
}
#: Factors of events: their encoder has `hold` queries, and no bank.
OF_EVENTS = ("base", "damping", "value", "decay")
_OF_LEVEL = {level: factor for factor, levels in FACTORS.items() for level in levels}
TASKS = ("synthetic", "libras", "bookorder", "heart_rate")
MEASURES = {
    "synthetic": "accuracy, %",
    "libras": "accuracy, %",
    "bookorder": "log-likelihood an event",
    "heart_rate": "RMSE, beats a minute",
}
#: Series that accuracies are of.
TEST_SERIES = {"synthetic": 600, "libras": 180}
_SHARES = ("under", "near", "over")
#: Of the heart rates: windows of each recording, their length, and rows that are kept of each.
RECORDINGS, WINDOWS, WINDOW_SECONDS, ROWS_SEEN = 53, 6, 16, 64


class Parts(NamedTuple):
    """What is trained on, and what is scored once."""

    train: Any
    test: Any


def load_synthetic(size: int) -> Parts:
    """Return series of the paper's classification, of every fifth frequency."""
    parts = []
    for seed, count in enumerate((size, 2 * size)):
        times, values, labels = resonance.make_series(8 * count, seed)
        kept = (labels % 5 == 0).nonzero().flatten()[:count]
        at, seen, of = (x[kept].numpy() for x in (times, values, labels))
        parts.append(IrregularSeries.from_arrays(list(at), list(seen), labels=of))
    return Parts(*parts)


def _some(series: IrregularSeries, size: int) -> IrregularSeries:
    """Return some series of many, drawn at random."""
    return series[np.random.default_rng(0).permutation(len(series))[:size]]


def load_libras(size: int) -> Parts:
    """Return Libras."""
    train, test = (get_dataset("Libras", part) for part in ("train", "test"))
    return Parts(_some(train, size), test)


def load_bookorder(size: int) -> Parts:
    """Return the first 64 events of the sequences of BookOrder, fold 1."""
    parts = EVENT_TASKS["bookorder"].load(1)
    return Parts(parts.train.first(64)[:size], parts.test.first(64))


def load_heart_rate(size: int) -> Parts:
    """Return windows of the pulse and one ECG lead, at random times, with their mean heart rate.

    Recordings of the train and the test part are not the same.
    """
    channels, rate, frequency = read_recordings()
    generator = np.random.default_rng(0)
    parts = []
    order = generator.permutation(RECORDINGS)
    for recordings in np.split(order, [int(0.7 * RECORDINGS)]):
        times, values, targets = [], [], []
        for recording in recordings:
            for start in np.linspace(0, 480 - WINDOW_SECONDS, WINDOWS).astype(int):
                target = np.nanmean(rate[recording, start : start + WINDOW_SECONDS])
                picked = generator.choice(WINDOW_SECONDS * frequency, ROWS_SEEN, replace=False)
                rows = start * frequency + np.sort(picked)
                times.append((rows - start * frequency) / frequency)
                values.append(channels[recording, rows])
                targets.append(target)
        series = IrregularSeries.from_arrays(times, values, labels=np.array(targets))
        parts.append(series)
    return Parts(_some(parts[0], size), parts[1])


LOAD: dict[str, Callable[[int], Parts]] = {
    "synthetic": load_synthetic,
    "libras": load_libras,
    "bookorder": load_bookorder,
    "heart_rate": load_heart_rate,
}


@contextlib.contextmanager
def spectra_that_decay(*, is_wanted: bool) -> Iterator[None]:
    """Let the optimizer's weight decay reach spectra inside the block."""
    before = Spectrum.no_weight_decay
    Spectrum.no_weight_decay = () if is_wanted else before  # type: ignore[assignment]
    try:
        yield
    finally:
        Spectrum.no_weight_decay = before


def make_estimator(task: str, level: str, seed: int, **training: Any) -> Any:
    """Return the untrained estimator of a cell."""
    change = FACTORS[_OF_LEVEL[level]][level]
    given: dict[str, Any] = {
        **{"dim": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.0, "batch_size": 32},
        **{"learning_rate": 1e-2, "weight_decay": 0.01, "patience": None, "seed": seed},
        "accelerator": "cpu",
        **training,
    }
    if task == "bookorder":
        is_undamped = change.get("undamped", False)
        options = {"zeta_range": (1e-6, 2e-6)} if is_undamped else change
        options = {"memory": False, "value": "point", **options}  # attention is all there is
        given |= {"encoder_options": options, "head": "mixture"}
        return OsciFormerEventPredictor(**estimator_arguments("events", given))
    # Neither statistics nor last values, so that attention has to find what counts.
    given |= {"backbone_options": {**BASE, **change}, "skip": False, "carry": False}
    given |= {"resonators": False, "variables": False, "observation_dropout": 0.0}
    if task == "heart_rate":
        return OsciFormerRegressor(**estimator_arguments("regression", given))
    return OsciFormerClassifier(**estimator_arguments("classification", given))


def score(task: str, model: Any, test: Any) -> float:
    """Return the measure of a task."""
    if task == "heart_rate":
        return float(np.sqrt(np.mean((model.predict(test).ravel() - test.labels) ** 2)))
    return float(model.score(test)) * (1 if task == "bookorder" else 100)


def trivial(task: str, parts: Parts) -> float | None:
    """Return the measure of the best constant answer; none for events."""
    if task == "bookorder":
        return None
    if task == "heart_rate":
        return float(np.sqrt(np.mean((parts.train.labels.mean() - parts.test.labels) ** 2)))
    classes, counts = np.unique(parts.train.labels, return_counts=True)
    return 100 * float(np.mean(parts.test.labels == classes[counts.argmax()]))


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Train and score one cell."""
    task, level, seed = job["task"], job["level"], job["seed"]
    size, epochs = (24, 1) if settings["quick"] else (300, 15)
    parts = LOAD[task](size)
    row: Row = {"factor": _OF_LEVEL[level], "trivial": trivial(task, parts)}
    if level == "base":
        # One epoch of steps of no length leaves the spectra where they started.
        still = make_estimator(task, level, seed, max_epochs=1, learning_rate=1e-12)
        row["regimes_before"] = regimes(zetas(still.fit(parts.train).model_))
    model = make_estimator(task, level, seed, max_epochs=epochs)
    started = time.process_time()
    with spectra_that_decay(is_wanted=level == "spectra decay"):
        model.fit(parts.train)
    seconds = (time.process_time() - started) / epochs
    return rounded(
        {
            **row,
            "measure": score(task, model, parts.test),
            "epoch_seconds": seconds,
            "best_epoch": model.best_epoch_,
            "regimes_after": regimes(zetas(model.model_)),
        }
    )


def make_jobs(rows: Sequence[str], seeds: int) -> list[Job]:
    """Return a job for each cell of the chosen tasks: one seed of all, then the next."""
    return [
        {"task": task, "level": level, "seed": seed}
        for seed in range(seeds)
        for factor, levels in FACTORS.items()
        for level in levels
        for task in rows
        if task != "bookorder" or factor in OF_EVENTS
    ]


def _cells(document: Document, task: str, level: str) -> list[Row]:
    return [r for r in document.finished if (r["task"], r["level"]) == (task, level)]


def _tasks(document: Document) -> list[str]:
    """Return the tasks of finished cells."""
    finished = {row["task"] for row in document.finished}
    return [task for task in TASKS if task in finished]


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    seeds = len({row["seed"] for row in document.finished})
    tasks = _tasks(document)
    lines = [
        "# Ablations",
        "",
        "Base: query `ridge`, J = 8, zeta in [0.05, 0.4], values at the end,",
    ]
    lines += [
        "velocity maps, no drive, frequencies from the times. Trivial: the best constant.",
        "",
    ]
    forms = {"synthetic": "{:.1f}", "libras": "{:.1f}", "heart_rate": "{:.2f}"}
    body = []
    for factor, levels in FACTORS.items():
        for level in levels:
            entries, costs = [], []
            for task in tasks:
                found, form = _cells(document, task, level), forms.get(task, "{:.3f}")
                entries.append(mean_of_seeds([r["measure"] for r in found], seeds, form))
                costs += [spread([r["epoch_seconds"] for r in found], "{:.2f}")]
            if any(entry != "-" for entry in entries):
                body.append([factor, level, *entries, *costs])
    constant = []
    for task in tasks:
        of_task = [r["trivial"] for r in document.finished if r["task"] == task]
        known = [x for x in of_task if x is not None]
        constant.append(spread(known[:1], forms.get(task, "{:.3f}")))
    body.append(["trivial", "", *constant, *["-"] * len(tasks)])
    columns = ["factor", "level", *(f"{task}: {MEASURES[task]}" for task in tasks)]
    columns += [f"{task}: s an epoch" for task in tasks]
    lines += [
        *markdown_table(columns, body),
        "",
        f"Damping ratios of all channels, base ({NEAR_IN_WORDS}):",
        "",
    ]
    body = []
    for task in tasks:
        for when, level in (("before", "base"), ("after", "base"), ("after", "spectra decay")):
            told = when if level == "base" else "after, with decay"
            shares = [r[f"regimes_{when}"] for r in _cells(document, task, level)]
            if shares:
                means = (statistics.fmean(r[key] for r in shares) for key in _SHARES)
                median = spread([r["median_zeta"] for r in shares])
                body.append([task, told, *(f"{mean:.1f}" for mean in means), median])
    columns = ["task", "training", "under, %", "near, %", "over, %", "median zeta"]
    return [*lines, *markdown_table(columns, body), "", *document.origin()]


def draw(document: Document) -> Any:
    """Return the figure: the measure of each level, a panel per task.

    Lines are the range of seeds; of one seed, the standard error of its test accuracy.
    """
    levels = list(_OF_LEVEL)
    tasks = _tasks(document)
    figure, axes = new_figure(1, len(tasks), (2.5 + 3.0 * len(tasks), 7.6))
    factors = list(FACTORS)
    labels = ["base", *(f"{_OF_LEVEL[level]}: {level}" for level in levels[1:])]
    for axis, task in zip(axes[0], tasks, strict=True):
        for place, level in enumerate(levels):
            values = [row["measure"] for row in _cells(document, task, level)]
            if values:
                colour = COLOURS[factors.index(_OF_LEVEL[level]) % len(COLOURS)]
                colour = REFERENCE if level == "base" else colour
                mean = statistics.fmean(values)
                reach = [[mean - min(values)], [max(values) - mean]]
                if len(values) == 1 and task in TEST_SERIES:
                    error = math.sqrt(mean * (100 - mean) / TEST_SERIES[task])
                    reach = [[error], [error]]
                axis.errorbar(mean, place, xerr=reach, fmt="o", color=colour, ms=5, capsize=3)
        base = [row["measure"] for row in _cells(document, task, "base")]
        if base:
            axis.axvspan(min(base), max(base), color="0.88", zorder=0, lw=1, ec="0.7")
        axis.set(ylim=(len(levels) - 0.5, -0.5), xlabel=MEASURES[task])
        axis.set_yticks(range(len(levels)), labels if axis is axes[0, 0] else [])
        for place in range(1, len(levels)):
            if _OF_LEVEL[levels[place]] != _OF_LEVEL[levels[place - 1]]:
                axis.axhline(place - 0.5, color="0.85", lw=0.8)
        axis.locator_params(axis="x", nbins=4)
        axis.set_title(task.replace("_", " "), fontsize=10)
    return figure


SUITE = Suite(
    name="ablations",
    summary="One setting of the layer at a time; `--rows` are tasks.",
    rows=TASKS,
    jobs=make_jobs,
    work=work,
    tables=tables,
    pictures={"paper_ablations": draw},
)
