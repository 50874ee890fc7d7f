"""Forecasts in PhysioNet 2012 in the protocol of t-PatchGNN: 24 hours seen, the next 24 asked.

    python benchmarks/tpatchgnn.py --output tpatchgnn.json --table tpatchgnn.md --jobs 4
    python benchmarks/tpatchgnn.py --output toy.json --quick

Zhang et al. (ICML 2024): of all stays a fifth is tested and a fifth kept for validation, by one
split that the seed 42 of scikit-learn decides; a seed decides the randomness of training alone.
What was measured before hour 24 is seen, all later values are asked at their times. Values are
scaled by the least and the largest value of training and validation stays. The squared and the
absolute error are means over the values of a variable, then over the variables that are asked at
all; one that is constant (MechVent) counts, in its own unit. Theirs are 12,000 stays of three
sets, in the order of a file system; here are those of set-a and set-b, in the order of their
numbers. Of several values of a minute the last counts, theirs is the mean; a weight of -1 is
missing here, and is a value there.

`OsciFormerForecaster` has default settings but for the levels of the quantiles and the horizon;
other backbones take the place of the oscillator attention in the same estimator. The squared error
is that of the mean of the predicted quantiles, the absolute one that of the median. A run that ends
before all jobs are done is continued by the same command; with --checkpoints, trainings that were
stopped go on as well. The data are found through the environment variable OSCIFORMER_DATA.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from forecast_imputation import LEVELS, ask_after
from physionet2012 import compare
from shared import TINY, estimator_settings, make_parser, run_benchmark, training_entries
from sklearn.model_selection import train_test_split

from osciformer.bench.documents import Document, spread
from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.workers import Job
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.ragged import series_of_rows
from osciformer.data.series import concatenate
from osciformer.estimators import OsciFormerForecaster, queries

BACKBONES = ("osciformer", "gru_d", "mtan")
SIMPLE = ("last_value", "constant")
METHODS = (*SIMPLE, *BACKBONES)
OURS = BACKBONES[0]
# Minutes. What is measured at hour 24 itself is asked; times are whole minutes.
CUT = 24 * 60.0 - 0.5
HORIZON = 24 * 60.0 + 0.5
#: Mean squared errors, 1e-3, of 12,000 stays as later papers report them.
PUBLISHED = {
    "IMTS-Mixer": "4.88",
    "GraFITi": "4.89",
    "t-PatchGNN": "4.98",
    "GRU-D": "5.59",
    "mTAND": "6.23",
}
_TOY_STAYS = 100
_ROUNDS = 2000

PROTOCOL = """\
Protocol: of the {stays} stays of set-a and set-b (the paper: 12,000 of three sets) {train} are
trained on, {validation} validate and {test} are tested, in one split. 24 hours are seen, {values}
values of the next 24 are asked. Values are divided by the range of their variable in training and
validation stays; errors are means over the {variables} variables that are asked. Mean ± standard
deviation over the seeds of training. A constant is the mean of the variable in training."""


class Parts(NamedTuple):
    """The three parts of the split."""

    train: IrregularSeries
    validation: IrregularSeries
    test: IrregularSeries


class Scale(NamedTuple):
    """Least value of each variable, and the range, 1 where it is 0 or nothing was measured."""

    low: np.ndarray
    span: np.ndarray


@functools.cache
def load_stays() -> IrregularSeries:
    """Return all stays of set-a and set-b."""
    return concatenate(
        [get_dataset("physionet2012", split).replace(labels=None) for split in ("set-a", "set-b")]
    )


def split_stays(stays: IrregularSeries, most: int | None = None) -> Parts:
    """Return the parts of the split; `most` takes no more than so many of the first stays."""
    count = len(stays) if most is None else min(most, len(stays))
    seen, test = train_test_split(np.arange(count), train_size=0.8, random_state=42, shuffle=True)
    train, validation = train_test_split(seen, train_size=0.75, shuffle=False)
    return Parts(*(stays[part] for part in (train, validation, test)))


def learn_scale(parts: Parts) -> Scale:
    """Return the scale that training and validation stays give."""
    values = np.concatenate((parts.train.values, parts.validation.values))
    low, high = np.fmin.reduce(values, axis=0), np.fmax.reduce(values, axis=0)
    span = (high - low).astype(np.float64)
    return Scale(low.astype(np.float64), np.where(span > 0, span, 1.0))


def score(mean: np.ndarray, median: np.ndarray, scale: Scale, asked: IrregularSeries) -> Row:
    """Return the errors of predictions, and what each stay adds to the squared one.

    Args:
        mean: Predicted means [Q, F], in the units of the data.
        median: Predicted medians [Q, F].
        scale: Of the variables.
        asked: The true values; NaN is not asked.
    """
    is_asked = ~np.isnan(asked.values)
    # A variable that was not seen to change has no range, and keeps its unit.
    squared, absolute = (
        np.where(is_asked, power((found - asked.values) / scale.span), 0.0)
        for power, found in ((np.square, mean), (np.abs, median))
    )
    count = is_asked.sum(axis=0)
    used = count > 0
    weight = np.where(used, 1.0 / np.maximum(count, 1), 0.0) / used.sum()
    by_stay = np.bincount(series_of_rows(asked.offsets), squared @ weight, minlength=len(asked))
    names = np.array(asked.feature_names)[used].tolist()
    of_variables = (squared.sum(axis=0) / np.maximum(count, 1))[used]
    return {
        "mse": float(by_stay.sum()),
        "mae": float((absolute @ weight).sum()),
        "values": int(count.sum()),
        "mse_of": dict(zip(names, of_variables.tolist(), strict=True)),
        "by_stay": [round(float(part), 10) for part in by_stay],
    }


def mean_of_quantiles(quantiles: np.ndarray) -> np.ndarray:
    """Return the mean of quantile functions that are steps around `LEVELS` [..., L]."""
    middles = (np.array(LEVELS[1:]) + LEVELS[:-1]) / 2.0
    found: np.ndarray = quantiles @ np.diff([0.0, *middles, 1.0])
    return found


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Predict what is asked of the test stays, and score it."""
    parts, method = split_stays(load_stays(), settings["stays"]), job["method"]
    scale = learn_scale(parts)
    seen, asked = ask_after(parts.test, CUT, HORIZON)
    row: Row = {"sizes": [len(part) for part in parts]}
    if method in SIMPLE:
        mean = np.broadcast_to(_means(parts.train), asked.values.shape)
        if method == "last_value":
            # The function takes standardised series, for which 0 is the mean of training.
            shifted = seen.replace(values=(seen.values - mean[:1]).astype(np.float32))
            mean = queries.last_value_before(shifted, asked) + mean
        return row | score(mean, mean, scale, asked)
    chosen = estimator_settings(method, job, settings)
    model = OsciFormerForecaster(**chosen, quantiles=LEVELS, horizon=HORIZON)
    train, validation = (_with_values(part) for part in parts[:2])
    model.fit(train, validation_data=validation)
    row |= training_entries(model, job, settings)
    times = np.split(asked.times, asked.offsets[1:-1])
    found = np.concatenate(model.predict_quantiles(seen, times)).astype(np.float64)
    return row | score(mean_of_quantiles(found), found[..., LEVELS.index(0.5)], scale, asked)


def _means(stays: IrregularSeries) -> np.ndarray:
    """Return the mean of each variable [F], 0 if nothing was measured."""
    count = (~np.isnan(stays.values)).sum(axis=0)
    total: np.ndarray = np.nansum(stays.values.astype(np.float64), axis=0)
    return total / np.maximum(count, 1)


def _with_values(stays: IrregularSeries) -> IrregularSeries:
    return stays[np.flatnonzero(stays.num_observed > 0)]


def differences(rows: Sequence[Row], rounds: int = _ROUNDS) -> dict[str, Row]:
    """Return how much larger the squared error of others is, with intervals of resampled stays."""
    by_stay: Mapping[str, np.ndarray] = {
        method: np.mean([row["by_stay"] for row in rows if row["method"] == method], axis=0)
        for method in dict.fromkeys(row["method"] for row in rows)
    }
    if OURS not in by_stay:
        return {}
    count = len(by_stay[OURS])
    generator = np.random.default_rng(0)
    draws = [generator.multinomial(count, np.full(count, 1.0 / count)) for _ in range(rounds)]
    index = np.stack([np.ones(count, dtype=np.int64), *draws])
    drawn = {method: index @ parts for method, parts in by_stay.items()}
    return {m: compare(drawn[m], drawn[OURS]) for m in METHODS if m in drawn and m != OURS}


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    rows = document.finished
    lines = ["# Forecasts in t-PatchGNN's protocol"]
    if rows:
        names = ("train", "validation", "test")
        facts = dict(zip(names, rows[0]["sizes"], strict=True))
        facts |= {"values": rows[0]["values"], "variables": len(rows[0]["mse_of"])}
        lines += ["", PROTOCOL.format(stays=sum(rows[0]["sizes"]), **facts)]
    body = []
    for method in METHODS[::-1]:
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        cells = [spread([1e3 * row["mse"] for row in own], "{:.2f}")]
        cells += [spread([1e2 * row["mae"] for row in own], "{:.2f}"), str(len(own))]
        seconds = [row["fit_seconds"] for row in own if "fit_seconds" in row]
        body.append([f"`{method}`", *cells, spread(seconds, "{:.0f}"), "-"])
    body += [[name, *"----", error] for name, error in PUBLISHED.items()]
    titles = ["method", "MSE, 1e-3", "MAE, 1e-2", "seeds", "seconds of training"]
    titles.append("published MSE, 12,000 stays")
    lines += [*document.changes(), "", *markdown_table(titles, body)]
    found = differences(rows)
    if found:
        lines += ["", f"Squared error less that of `{OURS}`, 1e-3, 95 % intervals of stays:", ""]
        for other, entry in found.items():
            low, middle, high = (1e3 * entry[name] for name in ("low", "difference", "high"))
            lines.append(f"- {other}: {middle:+.2f} ({low:+.2f} to {high:+.2f})")
    return [*lines, "", *document.origin()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(__doc__)
    parser.add_argument("--methods", type=names_among(METHODS), default=list(METHODS))
    options = parser.parse_args(arguments)
    jobs: list[Job] = [
        {"method": method, "seed": seed}
        for seed in range(1 if options.quick else options.seeds)
        for method in options.methods
        if seed == 0 or method in BACKBONES
    ]
    settings: dict[str, Any] = {"estimator": {}, "stays": None}
    if options.quick:
        settings = {"estimator": TINY, "stays": _TOY_STAYS}
    return run_benchmark("tpatchgnn.py", arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
