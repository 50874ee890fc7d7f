"""Questions about hidden values of series, simple answers, and scores of answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from osciformer.bench.workers import Row
from osciformer.data import IrregularSeries
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import queries

#: Levels of the quantiles: the defaults of the estimators, and the ends of the 80 % interval.
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
#: Names of the coverages in a row, with the ends of their intervals.
COVERAGES = {"coverage_50": (0.25, 0.75), "coverage_80": (0.1, 0.9), "coverage_90": (0.05, 0.95)}
# Fewer errors than this say little about the 5 % quantile; then those of all variables count.
_FEWEST_ERRORS = 20


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
    return Question(queries.keep_rows(series, ~is_later), queries.keep_rows(series, is_asked))


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
        "mae_of": variables,
        "values_of": dict(zip(asked.feature_names, count.tolist(), strict=True)),
    }
    for name, (low, high) in COVERAGES.items():
        low_end, high_end = said[:, LEVELS.index(low)], said[:, LEVELS.index(high)]
        row[name] = float(((low_end <= known) & (known <= high_end)).mean())
    return row
