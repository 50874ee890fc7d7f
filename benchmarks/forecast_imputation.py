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
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from shared import (
    TINY,
    estimator_settings,
    make_parser,
    run_benchmark,
    training_entries,
)

from osciformer.bench.documents import Document, spread
from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.workers import Job
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import OsciFormerForecaster, OsciFormerImputer, queries

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
_TINY_STAYS = 60
#: Levels of the quantiles: the defaults of the estimators, and the ends of the 80 % interval.
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
#: Names of the coverages in a row, with the ends of their intervals.
COVERAGES = {"coverage_50": (0.25, 0.75), "coverage_80": (0.1, 0.9), "coverage_90": (0.05, 0.95)}
# Fewer errors than this say little about the 5 % quantile; then those of all variables count.
_FEWEST_ERRORS = 20

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
the central interval. MSE of range is the mean over the variables of the squared error of the
mean, of values divided by the range of the variable in training; the mean of a model is that of
its quantiles. In forecasting, MAE shuffled is that after the values of each variable of a stay,
but for the last one, were put in random order: what a model loses by it, it had from their order.
Mean ± standard deviation over the splits; in brackets the number of splits where that is not
{seeds}."""


class Question(NamedTuple):
    """What is seen of each series, and what is asked: rows with the hidden values, else NaN."""

    seen: IrregularSeries
    asked: IrregularSeries


def ask_hidden(
    series: IrregularSeries, fraction: float, generator: np.random.Generator
) -> Question:
    """Hide a random part of the observed values."""
    everything = np.ones(series.num_features, dtype=bool)
    columns = queries.Columns(is_target=everything, is_known=~everything, clip=None)
    return Question(*queries.HideDraw(columns, fraction)(series, generator))


def ask_after(series: IrregularSeries, cut: float, horizon: float) -> Question:
    """Hide all after a time, and ask for what was observed within a horizon after it."""
    is_later = series.times > cut
    is_asked = is_later & (series.times <= cut + horizon)
    shown, asked = (
        queries.keep_rows(series, rows, series.values) for rows in (~is_later, is_asked)
    )
    return Question(shown, asked)


def shuffle_history(series: IrregularSeries, generator: np.random.Generator) -> IrregularSeries:
    """Put the values of each variable of a stay in random order, but for the last one."""
    values = series.values.copy()
    for start, stop in pairwise(series.offsets):
        for column in values[start:stop].T:
            earlier = np.flatnonzero(~np.isnan(column))[:-1]
            column[earlier] = column[generator.permutation(earlier)]
    return series.replace(values=values)


def answer_by(model: Any, transform: SeriesTransform, question: Question) -> np.ndarray:
    """Return the standardised quantiles [Q, F, L] of an imputer or a forecaster."""
    asked = question.asked
    times = np.split(asked.times, asked.offsets[1:-1])
    found = np.concatenate(model.predict_quantiles(question.seen, times))
    scaler = transform.value_scaler
    return (found - scaler.center[:, None]) / scaler.scale[:, None]


def answer_simply(
    method: str, transform: SeriesTransform, question: Question, practice: Question
) -> np.ndarray:
    """Return the standardised quantiles [Q, F, L] of a simple method.

    Its answer is the median; the other quantiles are those of its errors in practice.

    Args:
        method: `linear`, `last_value` or `mean`, the training mean.
        transform: Fitted on the training series.
        question: About test series.
        practice: About training series.
    """
    point, tried = (_point(method, transform, asked) for asked in (question, practice))
    errors = transform.transform(practice.asked).values - tried
    middle = LEVELS.index(0.5)
    offsets = np.empty((point.shape[1], len(LEVELS)))
    for column in range(point.shape[1]):
        known = errors[~np.isnan(errors[:, column]), column]
        if len(known) < _FEWEST_ERRORS:
            known = errors[~np.isnan(errors)]
        offsets[column] = np.quantile(known, LEVELS)
    offsets[:, middle] = 0.0
    return point[..., None] + offsets


def _point(method: str, transform: SeriesTransform, question: Question) -> np.ndarray:
    seen, asked = (transform.transform(series) for series in question)
    if method == "mean":
        return np.zeros_like(asked.values)
    simple = {"linear": queries.interpolate, "last_value": queries.last_value_before}
    return simple[method](seen, asked)


def score(found: np.ndarray, transform: SeriesTransform, asked: IrregularSeries) -> Row:
    """Return the scores of standardised quantiles [Q, F, L], over all values that were asked.

    Variables without spread in the training series are left out.
    """
    assert transform.statistics is not None
    features = transform.statistics.features
    truth = transform.transform(asked).values.astype(np.float64)
    truth[:, ~(features.high > features.low)] = np.nan
    is_scored = ~np.isnan(truth)
    column = np.nonzero(is_scored)[1]
    known, said = truth[is_scored], found[is_scored].astype(np.float64)  # [V], [V, L]
    error = known[:, None] - said
    pinball = np.maximum(np.array(LEVELS) * error, (np.array(LEVELS) - 1.0) * error)
    absolute = np.abs(error[:, LEVELS.index(0.5)])
    count = np.bincount(column, minlength=truth.shape[1])
    # Means of the quantile functions, as the squared error asks for means, in units of the range.
    middles = (np.array(LEVELS[1:]) + LEVELS[:-1]) / 2.0
    mean = said @ np.diff([0.0, *middles, 1.0])
    span = (features.high - features.low)[column] / transform.value_scaler.scale[column]
    squared = np.bincount(column, weights=((known - mean) / span) ** 2, minlength=truth.shape[1])
    by_variable = np.bincount(column, weights=absolute, minlength=truth.shape[1])
    variables = {
        name: round(float(total / number), 5)
        for name, total, number in zip(asked.feature_names, by_variable, count, strict=True)
        if number
    }
    row: Row = {
        "values": len(known),
        "mae": float(absolute.mean()),
        "rmse": float(np.sqrt(np.square(error[:, LEVELS.index(0.5)]).mean())),
        "mae_by_variable": float(np.mean(list(variables.values()))),
        "pinball": float(pinball.mean()),
        "mse_of_range": float((squared[count > 0] / count[count > 0]).mean()),
        "mae_of": variables,
        "values_of": dict(zip(asked.feature_names, count.tolist(), strict=True)),
    }
    for name, (low, high) in COVERAGES.items():
        low_end, high_end = said[:, LEVELS.index(low)], said[:, LEVELS.index(high)]
        row[name] = float(((low_end <= known) & (known <= high_end)).mean())
    return row


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
        return ask_after(stays, CUT, HORIZON)
    return ask_hidden(stays, HIDDEN_PART, np.random.default_rng([seed, 1, part]))


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Answer the questions about the test stays of one split, and score the"""
    task, method, seed = job["task"], job["method"], job["seed"]
    train, test = split_stays(load_stays(), seed, settings["stays"])
    transform = SeriesTransform("standard").fit(train)
    question = ask(task, test, seed, part=1)
    row: Row = {"train_size": len(train), "test_size": len(test)}
    if method in SIMPLE[task]:
        practice = ask(task, train, seed, part=0)
        found = answer_simply(method, transform, question, practice)
    else:
        chosen = estimator_settings(method, job, settings) | {"quantiles": LEVELS}
        model: OsciFormerImputer | OsciFormerForecaster
        if task == "imputation":
            model = OsciFormerImputer(**chosen)
        else:
            model = OsciFormerForecaster(**chosen, horizon=HORIZON)
        found = answer_by(model.fit(train), transform, question)
        row |= training_entries(model, job, settings)
        if task == "forecasting":
            order = np.random.default_rng([seed, 2])
            shuffled = question._replace(seen=shuffle_history(question.seen, order))
            answers = answer_by(model, transform, shuffled)
            row["mae_shuffled"] = score(answers, transform, question.asked)["mae"]
    return row | score(found, transform, question.asked)


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
    measures = ("mae", "rmse", "mae_by_variable", "pinball", "mse_of_range", *COVERAGES)
    measures = (*measures, "mae_shuffled", "fit_seconds")
    titles = ["method", "MAE", "RMSE", "MAE by variable", "pinball loss", "MSE of range, 1e-3"]
    titles += [f"{name.removeprefix('coverage_')} % interval" for name in COVERAGES]
    titles += ["MAE shuffled"]
    body = []
    for method in METHODS:
        found = [row for row in rows if row["method"] == method]
        if not found:
            continue
        short = f" ({len(found)})" if len(found) != seeds else ""
        line = [method.replace("_", " ") if method not in BACKBONES else f"`{method}`"]
        for measure in measures:
            numbers = [row[measure] for row in found if row.get(measure) is not None]
            if measure == "mse_of_range":
                numbers = [1e3 * number for number in numbers]
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
    arguments = list(sys.argv[1:] if argv is None else argv)
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
        settings = {"estimator": TINY, "stays": _TINY_STAYS}
    return run_benchmark("forecast_imputation.py", arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
