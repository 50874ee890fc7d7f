"""Imputation and forecasting of intensive-care stays (PhysioNet 2012, set-a), with intervals.

    PYTHONPATH=src python benchmarks/forecast_imputation.py --output fi.json --table fi.md --jobs 16
    PYTHONPATH=src python benchmarks/forecast_imputation.py --output toy.json --quick

`OsciFormerImputer` and `OsciFormerForecaster` with their default settings, the same with other
backbones, and simple methods, on random splits of the stays. The data are found through the
environment variable OSCIFORMER_DATA. A run that ends before all jobs are done is continued by the
same command; with --checkpoints, trainings that were stopped go on as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from attention_gpu.document import markdown_table
from training_jobs import answers
from training_jobs.answers import LEVELS, Question
from training_jobs.command import (
    command_line,
    estimator_settings,
    make_parser,
    names_among,
    run_benchmark,
    training_entries,
)
from training_jobs.document import Document, spread

from osciformer.bench.workers import Job, Row
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import OsciFormerForecaster, OsciFormerImputer

TASKS = ("imputation", "forecasting")
BACKBONES = ("osciformer", "transformer", "gru_d")
#: Simple methods of each task.
SIMPLE = {
    "imputation": ("linear", "last_value", "mean"),
    "forecasting": ("last_value", "mean"),
}
METHODS = (*BACKBONES, "linear", "last_value", "mean")
TEST_PART = 0.2
HIDDEN_PART = 0.2
# Minutes: what is observed, and what is then asked.
CUT, HORIZON = 24 * 60.0, 24 * 60.0
_TINY = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 1}
_TINY_STAYS = 60

PROTOCOL = """\
Protocol: the {stays} stays of set-a, 37 variables; a seed decides a random split into 80 % of the
stays for training and 20 % for testing, what is hidden, and all randomness of training.
Imputation: of the test stays a random 20 % of the observed values is hidden and predicted from
all others, earlier and later. Forecasting: the first 24 hours are seen, and all values of the
following 24 hours are predicted at their times, as in the extrapolation task of Latent ODE
(Rubanova et al. 2019), which sees the first half of the time points. Values are standardised by
mean and standard deviation of each variable over the training stays, without any clipping of
outliers in the scores; a variable that is constant there (MechVent) is not scored. MAE, RMSE and
pinball loss are means over all scored values, MAE by variable is the mean over the variables. The
estimators have their default settings but for the levels of the quantiles ({levels}) and, in
forecasting, the horizon of 24 hours; they keep a tenth of the training stays for early stopping,
and see age, gender, height, unit and first weight as well. The other backbones take the place of
the oscillator attention in the same estimator. Linear interpolation takes the nearest value at
the ends; it, the last value and the training mean, which also stands in where a stay has no other
value of the variable, have as quantiles those of their own errors on the training stays, variable
by variable. Pinball loss is the mean over the levels; coverage is the part of the values within
the central interval. Mean ± standard deviation over the splits; in brackets the number of splits
where it is not {seeds}."""


@functools.cache
def load_stays() -> IrregularSeries:
    """Return the stays that have at least one observation."""
    stays = get_dataset("physionet2012", "set-a").replace(labels=None)
    return stays[np.flatnonzero(stays.num_observed > 0)]


def split_stays(
    stays: IrregularSeries, seed: int, most: int | None = None
) -> tuple[IrregularSeries, IrregularSeries]:
    """Return training and test stays; `most` takes no more than so many in all."""
    order = np.random.default_rng([seed, 0]).permutation(len(stays))[:most]
    num_test = round(TEST_PART * len(order))
    return stays[np.sort(order[num_test:])], stays[np.sort(order[:num_test])]


def ask(task: str, stays: IrregularSeries, seed: int, part: int) -> Question:
    """Return what is seen of the stays and what is asked."""
    if task == "forecasting":
        return answers.ask_after(stays, CUT, HORIZON)
    return answers.ask_hidden(stays, HIDDEN_PART, np.random.default_rng([seed, 1, part]))


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Answer the questions about the test stays of one split, and score the answers."""
    task, method, seed = job["task"], job["method"], job["seed"]
    train, test = split_stays(load_stays(), seed, settings["stays"])
    transform = SeriesTransform("standard").fit(train)
    question = ask(task, test, seed, part=1)
    row: Row = {"train_size": len(train), "test_size": len(test)}
    if method in SIMPLE[task]:
        practice = ask(task, train, seed, part=0)
        found = answers.answer_simply(method, transform, question, practice)
    else:
        chosen = estimator_settings(method, job, settings) | {"quantiles": LEVELS}
        model: OsciFormerImputer | OsciFormerForecaster
        if task == "imputation":
            model = OsciFormerImputer(**chosen)
        else:
            model = OsciFormerForecaster(**chosen, horizon=HORIZON)
        found = answers.answer_by(model.fit(train), transform, question)
        row |= training_entries(model, job, settings)
    return row | answers.score(found, transform, question.asked)


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    rows = document.finished
    seeds = len({row["seed"] for row in rows})
    stays = rows[0]["train_size"] + rows[0]["test_size"] if rows else 0
    lines = [
        "# Imputation and forecasting of intensive-care stays",
        "",
        PROTOCOL.format(stays=stays, seeds=seeds, levels=", ".join(map(str, LEVELS))),
        *document.changes(),
    ]
    for task in TASKS:
        of_task = [row for row in rows if row["task"] == task]
        if of_task:
            lines += ["", f"## {task.capitalize()}", "", *_task_table(of_task, seeds)]
    return [*lines, "", *document.origin()]


def _task_table(rows: list[Row], seeds: int) -> list[str]:
    measures = ("mae", "rmse", "mae_by_variable", "pinball", *answers.COVERAGES, "fit_seconds")
    titles = ["method", "MAE", "RMSE", "MAE by variable", "pinball loss"]
    titles += [f"{name.removeprefix('coverage_')} % interval" for name in answers.COVERAGES]
    body = []
    for method in METHODS:
        found = [row for row in rows if row["method"] == method]
        if not found:
            continue
        short = f" ({len(found)})" if len(found) != seeds else ""
        line = [method.replace("_", " ") if method not in BACKBONES else f"`{method}`"]
        for measure in measures:
            numbers = [row[measure] for row in found if row.get(measure) is not None]
            line.append(spread(numbers, "{:.0f}" if measure == "fit_seconds" else "{:.3f}"))
        line[0] += short
        body.append(line)
    counts = sorted({row["values"] for row in rows})
    number = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    return [
        f"{number} scored values of {rows[0]['test_size']} test stays a split, "
        f"{rows[0]['train_size']} training stays.",
        "",
        *markdown_table([*titles, "seconds of training"], body),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = command_line(argv)
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", type=names_among(TASKS), default=list(TASKS))
    parser.add_argument("--methods", type=names_among(METHODS), default=list(METHODS))
    options = parser.parse_args(arguments)
    jobs: list[Job] = [
        {"task": task, "method": method, "seed": seed}
        for seed in range(1 if options.quick else options.seeds)
        for method in options.methods
        for task in options.tasks
        if method in (*BACKBONES, *SIMPLE[task])
    ]
    settings: dict[str, Any] = {"estimator": {}, "stays": None}
    if options.quick:
        settings = {"estimator": _TINY, "stays": _TINY_STAYS}
    script = "benchmarks/forecast_imputation.py"
    return run_benchmark(script, arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
