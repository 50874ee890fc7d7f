"""Accuracy on multivariate series of the UEA archive, of which a part of the rows is dropped.

    PYTHONPATH=src python benchmarks/uea_dropping.py --output uea.json --table uea.md --jobs 16
    PYTHONPATH=src python benchmarks/uea_dropping.py --output toy.json --quick   # to see it run

`ResonatorClassifier` and `OsciFormerClassifier` with their default settings, other networks in the
place of the latter's, and, on interpolated rows, classifiers of aeon (in a virtual environment that
is made on first use) and one like InceptionTime. The data are found through the environment
variable OSCIFORMER_DATA. A run that ends before all jobs are done is continued by the same command.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aeon_models
import inception
import numpy as np
from scipy.stats import rankdata
from shared import (
    TINY,
    accuracies,
    make_parser,
    run_benchmark,
    score_network,
)

from osciformer.bench.documents import Document, mean_of_seeds
from osciformer.bench.report import Row, markdown_table, names_among, tuple_of
from osciformer.bench.tables.uea import drop_rows
from osciformer.bench.workers import Job
from osciformer.data import IrregularSeries, get_dataset
from osciformer.estimators import ResonatorClassifier

#: Every set with a complete official split, with its numbers in thousands, so that small ones come
#: first; PenDigits counts for more, since it has many series.
DATASETS = {
    "Libras": 32,
    "AtrialFibrillation": 38,
    "BasicMotions": 48,
    "RacketSports": 55,
    "ERing": 78,
    "JapaneseVowels": 120,
    "StandWalkJump": 270,
    "UWaveGestureLibrary": 416,
    "Handwriting": 456,
    "FingerMovements": 582,
    "ArticularyWordRecognition": 745,
    "HandMovementDirection": 936,
    "PenDigits": 1000,
    "LSST": 1064,
    "SelfRegulationSCP1": 3016,
    "MotorImagery": 72576,
}
#: Larger sets wait until all others are done at all seeds.
LARGE = 10_000
PERCENTAGES = (0, 30, 50, 70)
#: About how long a model takes beside the first.
MODELS = {
    "resonator": 1,
    "osciformer": 10,
    "multirocket_hydra": 2,
    "rocket": 1,
    "gru_d": 5,
    "transformer": 5,
    "inception": 5,
}
#: In tables; `network` is that of `osciformer`, without its resonators.
SHOWN = ("resonator", "osciformer", "network", *list(MODELS)[2:])
#: aeon's kernels have up to 9 points.
FEWEST_STEPS = 10

PROTOCOL = """\
Protocol: the archive's own training and test series. Of each series, in both parts, the given
percentage of its rows (all channels of a time step, rounded down, at least 2 rows stay) is
removed at random before anything else; the rows that stay keep their times. A seed decides
which rows go and all randomness of training. `resonator` is `ResonatorClassifier`, `osciformer`
is `OsciFormerClassifier`, both with default settings; `network` is the latter's network alone,
of the same training, and where `resonator` was not run by itself at a seed, it is the latter's
resonators. They see no test series before they are scored. The network keeps a tenth of the
training series, class by class, for early stopping and to be weighed. `gru_d` and `transformer`
take its place in the same estimator, with the same inputs, width and training, without
resonators beside them and without its encoder of variables. `multirocket_hydra` and `rocket`
are those of aeon with default settings, and `inception` is one network like those of
InceptionTime. They are given rows on a grid: interpolated linearly at each series' own steps 0,
1, ... (constant before the first and after the last row that stayed), and the last one repeated
up to the length of the longest training series; series of fewer than 10 steps are interpolated
at 10 points. Test accuracy, mean ± standard deviation over the seeds; in brackets the number of
seeds where it is not {seeds}."""


def interpolate(series: IrregularSeries, lengths: np.ndarray, steps: int) -> np.ndarray:
    """Return the series on a grid [n, F, T], float32, where T is `steps`, or 10 if that is fewer.

    Args:
        series: What is left of series whose rows were at 0, 1, ...
        lengths: Numbers of rows before some were dropped [n].
        steps: Those of the grid, at which a shorter series repeats its end.
    """
    grid = np.empty((len(series), series.num_features, steps), dtype=np.float32)
    for place, one, length in zip(grid, series, lengths, strict=True):
        at = np.minimum(np.arange(steps), length - 1)
        for row, values in zip(place, one.values.T, strict=True):
            row[:] = np.interp(at, one.times, values)
    if steps >= FEWEST_STEPS:
        return grid
    at, known = np.linspace(0, steps - 1, FEWEST_STEPS), np.arange(steps)
    fine = [[np.interp(at, known, row) for row in one] for one in grid]
    return np.array(fine, dtype=np.float32)


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Train and score one classifier."""
    whole = [get_dataset(job["dataset"], split) for split in ("train", "test")]
    # Drawn apart, so that the test series do not depend on the number of training series.
    train, test = (
        drop_rows(
            series, job["percentage"], np.random.default_rng([job["seed"], job["percentage"], n])
        )
        for n, series in enumerate(whole)
    )
    classes, numbers = np.unique(train.labels, return_inverse=True)
    facts = {
        "train_size": len(train),
        "test_size": len(test),
        "classes": len(classes),
        "median_rows": float(np.median(test.lengths)),
    }
    if job["model"] == "resonator":
        return {**score_resonator(train, test, job), **facts}
    if job["model"] in ("osciformer", "gru_d", "transformer"):
        return {**score_network(train, test, job, settings), **facts}
    steps = int(whole[0].lengths.max())
    arrays = {
        name: interpolate(part, before.lengths, steps)
        for name, part, before in zip(("train", "test"), (train, test), whole, strict=True)
    }
    arrays |= {"train_labels": numbers, "test_labels": np.searchsorted(classes, test.labels)}
    if job["model"] in aeon_models.MODELS:
        found = aeon_models.score(settings["aeon_venv"], job["model"], job["seed"], arrays)
    else:
        found = score_inception(arrays, job, settings)
    return {**found, **facts}


def score_resonator(train: IrregularSeries, test: IrregularSeries, job: Job) -> Row:
    """Return accuracy and processor seconds of `ResonatorClassifier`."""
    started = time.process_time()
    model = ResonatorClassifier(random_state=job["seed"]).fit(train)
    seconds = round(time.process_time() - started, 2)
    families = [family.name for family in model.features_.families_]
    return {"accuracy": model.score(test), "cpu_seconds": seconds, "families": families}


def score_inception(arrays: dict[str, np.ndarray], job: Job, settings: dict[str, Any]) -> Row:
    """Return accuracy and seconds of a network like InceptionTime."""
    epochs = 1 if settings["estimator"] else inception.num_epochs(len(arrays["train"]))
    started, processor = time.perf_counter(), time.process_time()
    found = inception.fit_predict(
        *(arrays[name] for name in ("train", "train_labels", "test")),
        seed=job["seed"],
        device=settings["device"],
        epochs=epochs,
    )
    return {
        "accuracy": float((found == arrays["test_labels"]).mean()),
        "device": settings["device"],
        "epochs": epochs,
        "fit_seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - processor, 2),
    }


#: Accuracies at the seeds, by data set, model and percentage.
Scores = dict[tuple[str, str, int], list[float]]


def gather(rows: Sequence[Row]) -> Scores:
    """Return the accuracies of rows, those of the network in `osciformer` among them.

    Its resonators count as `resonator` where that has no row of the same seed.
    """
    places = ("dataset", "percentage", "seed")
    own = [[row[key] for key in places] for row in rows if row["model"] == "resonator"]
    found: Scores = {}
    for row in rows:
        each = accuracies(row)
        if "resonator_accuracy" in row and [row[key] for key in places] not in own:
            each["resonator"] = row["resonator_accuracy"]
        for model, accuracy in each.items():
            key = row["dataset"], model, row["percentage"]
            found.setdefault(key, []).append(accuracy)
    return found


def rank_lines(scores: Scores, models: Sequence[str], datasets: Sequence[str]) -> list[str]:
    """Return, as a Markdown table, mean accuracy and mean rank of models over data sets.

    Ranks are those of means over seeds; equal ones share the mean of their ranks.
    """
    percentages = sorted({percentage for *_, percentage in scores})
    body = [[model] for model in models]
    for percentage in percentages:
        means = np.array(
            [[statistics.fmean(scores[d, m, percentage]) for m in models] for d in datasets]
        )
        # Rounded, since a mean of the same numbers in another order is not quite the same.
        ranks = rankdata(-means.round(9), axis=1).mean(axis=0)
        for line, accuracy, rank in zip(body, means.mean(axis=0), ranks, strict=True):
            line += [f"{accuracy:.4f}", f"{rank:.2f}"]
    titles = [f"{p} % dropped: {name}" for p in percentages for name in ("accuracy", "rank")]
    return markdown_table(["model", *titles], body)


def summary_lines(scores: Scores) -> list[str]:
    """Return the tables of means and ranks: over sets that all models have, then over all sets."""
    percentages = {percentage for *_, percentage in scores}
    datasets = [d for d in DATASETS if any(d == key[0] for key in scores)]
    models = [m for m in SHOWN if any(m == key[1] for key in scores)]

    def has(dataset: str, model: str) -> bool:
        return all((dataset, model, percentage) in scores for percentage in percentages)

    common = [d for d in datasets if all(has(d, m) for m in models)]
    complete = [m for m in models if all(has(d, m) for d in datasets)]
    lines = []
    if common:
        which = "all" if common == datasets else f"those that all models have: {', '.join(common)}"
        lines += ["", f"Mean accuracy and mean rank over {len(common)} sets, {which}.", ""]
        lines += rank_lines(scores, models, common)
    if complete and common != datasets:
        absent = ", ".join(m for m in models if m not in complete)
        lines += ["", f"The same over all {len(datasets)} sets, without {absent}.", ""]
        lines += rank_lines(scores, complete, datasets)
    return lines


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    rows = document.finished
    seeds = len({row["seed"] for row in rows})
    percentages = sorted({row["percentage"] for row in rows})
    scores = gather(rows)
    columns = ["data set", "classes", "training / test series", "model"]
    body = []
    for dataset in DATASETS:
        facts = next((row for row in rows if row["dataset"] == dataset), None)
        for model in SHOWN:
            found = [scores.get((dataset, model, percentage), []) for percentage in percentages]
            if facts is None or not any(found):
                continue
            line = [dataset, str(facts["classes"])]
            line += [f"{facts['train_size']} / {facts['test_size']}", model]
            for each in found:
                line.append(mean_of_seeds(each, seeds))
            body.append(line)
    columns += [f"{percentage} % dropped" for percentage in percentages]
    return [
        "# UEA series with dropped rows",
        "",
        PROTOCOL.format(seeds=seeds),
        *document.changes(),
        *summary_lines(scores),
        "",
        *markdown_table(columns, body),
        "",
        *document.origin(),
    ]


def make_jobs(
    datasets: Sequence[str], models: Sequence[str], percentages: Sequence[int], seeds: Sequence[int]
) -> list[Job]:
    """Return the jobs, so that an unfinished run has most cells from few seeds."""
    jobs: list[Job] = [
        {"dataset": dataset, "percentage": percentage, "model": model, "seed": seed}
        for seed in seeds
        for dataset in datasets
        for model in models
        for percentage in percentages
    ]

    def place(job: Job) -> tuple[bool, int, int]:
        size = DATASETS[job["dataset"]]
        return size > LARGE, job["seed"], size * MODELS[job["model"]]

    return sorted(jobs, key=place)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--datasets", type=names_among(DATASETS), default=list(DATASETS))
    add("--models", type=names_among(MODELS), default=list(MODELS))
    add("--percentages", type=tuple_of(int), default=PERCENTAGES, help="0,30,50,70 if not given")
    venv = aeon_models.default_folder()
    add("--aeon-venv", type=Path, default=venv, help=f"made if it is not there; {venv}")
    options = parser.parse_args(arguments)
    seeds, percentages = range(options.seeds), options.percentages
    if options.quick:
        seeds, percentages = range(1), percentages[::3]
    jobs = make_jobs(options.datasets, options.models, percentages, seeds)
    if options.minutes > 0 and set(options.models) & set(aeon_models.MODELS):
        aeon_models.prepare(options.aeon_venv)
    settings = {"estimator": TINY if options.quick else {}}
    return run_benchmark(
        "uea_dropping.py",
        arguments,
        options,
        jobs,
        work,
        settings,
        tables,
        aeon_venv=options.aeon_venv,
    )


if __name__ == "__main__":
    sys.exit(main())
