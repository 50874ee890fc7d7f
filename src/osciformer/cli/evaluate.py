"""`osciformer evaluate`: scores of a trained model on a table, with bootstrap intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from typer import Option

from osciformer._files import finite_json, write_json
from osciformer.cli import pictures, predict, tables
from osciformer.cli.errors import CommandError
from osciformer.config import SERIES_TASKS

if TYPE_CHECKING:
    from osciformer._types import Float, Int
    from osciformer.estimators.forecasting import Hidden

# Bins of the calibration error, of equal numbers of series.
NUM_BINS = 10
# Sums over hidden values, before those of each quantile; see `sum_answers`.
NUM_SUMS = 6
LEVEL = 0.95

Scores = dict[str, float]


def evaluate(
    run: predict.RunArgument,
    table: predict.TableArgument,
    *,
    target: Annotated[str | None, Option(help="Column of true labels, if another one.")] = None,
    labels: predict.LabelsOption = None,
    labels_id: predict.LabelsIdOption = None,
    rounds: Annotated[int, Option("--bootstrap", min=0, help="Resamplings, or 0.")] = 1000,
    seed: Annotated[int, Option(help="Decides the samples, and hidden values.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    output: Annotated[Path | None, Option("--output", "-o", help="Write a JSON file.")] = None,
    picture: Annotated[Path | None, Option(help="Draw a .png, .pdf or .svg file.")] = None,
    stream: predict.StreamOption = None,
    accelerator: predict.AcceleratorOption = "auto",
) -> None:
    """Score a trained model on a table with true labels, or by hiding values.

    Forecasts are scored on the end of each series, up to the horizon of training; imputations on
    values that are hidden. Their errors are in units of each feature's spread in training. Events
    are scored by their likelihood and by predictions of each from those before.
    """
    if picture is not None:
        pictures.check_picture(picture)
    model = predict.Model.load(run, table, labels, accelerator=accelerator)
    if model.task == "events":
        model.refuse(target=target, labels=labels, labels_id=labels_id, stream=stream)
        found = _judge_events(model, table)
    else:
        given = {
            **model.settings,
            "labels": labels,
            "target": tuple(target.split(",")) if target else model.settings.get("target"),
            "labels_id": labels_id or model.settings.get("labels_id"),
        }
        in_table = model.task in SERIES_TASKS and labels is None
        label = tables.one_or_all(given["target"]) if in_table else None
        data = model.open_series(table, labels, labels_id, stream=stream, label=label)
        if model.task in SERIES_TASKS:
            truth = tables.labels_for(data, {"id": model.layout.get("id"), **given}, model.task)
            found = _judge_labels(model, data, truth)
        else:
            found = _judge_answers(model, data, seed)
    if picture is not None:
        found.draw(picture)
    scores = bootstrap(found.score, found.num_series, rounds=rounds, seed=seed)
    content = {
        "task": model.task,
        "series": found.num_series,
        "bootstrap": rounds,
        "metrics": {name: asdict(interval) for name, interval in scores.items()},
        **found.facts,
    }
    if output is not None:
        write_json(output, content)
    if as_json:
        typer.echo(json.dumps(finite_json(content), allow_nan=False))
        return
    tables.print_table(
        f"{model.task.capitalize()}, {found.title or f'{found.num_series} series'}",
        ("metric", "value", "95 % interval"),
        [(name, f"{s.value:.4f}", f"{s.low:.4f} to {s.high:.4f}") for name, s in scores.items()],
    )
    if found.remark:
        typer.echo(found.remark)


class _Judged(NamedTuple):
    """What a table says of a model: scores of any sample of its series, and how to show them."""

    score: Callable[[np.ndarray], Scores]
    num_series: int
    draw: Callable[[Path], None]
    facts: Mapping[str, Any] = {}
    title: str = ""
    remark: str = ""


def _judge_events(model: predict.Model, table: Path) -> _Judged:
    """Score the likelihood of events, and predictions of each from those before."""
    events = model.open_events(table)
    if not (events.lengths > 1).any():
        raise CommandError(f"{table} has nothing to score: no sequence has a second event")
    found = model.estimator.evaluate_sequences(events)
    calibration, likelihood = model.estimator.calibration(events), found.log_likelihood
    return _Judged(
        found.means,
        len(events),
        lambda path: pictures.draw_calibration(calibration, path),
        {
            "events": likelihood.num_scored,
            "time_unit": likelihood.time_unit,
            "quadrature_error": likelihood.error,
            "horizon": found.horizon,
            "calibration": {"statistic": calibration.statistic, "p_value": calibration.p_value},
        },
        f"{len(events)} sequences, {likelihood.num_scored} scored events",
        f"log-likelihoods in nats per event, times in {likelihood.time_unit}; quadrature error "
        f"{likelihood.error:.1e}\ntime rescaling: KS distance {calibration.statistic:.4f}, p = "
        f"{calibration.p_value:.3g}",
    )


def _judge_labels(model: predict.Model, data: Any, labels: np.ndarray | None) -> _Judged:
    """Score predictions of classes or values; the data have the labels if none are given."""
    from osciformer.estimators.series import labels_of
    from osciformer.estimators.supervised import encode_classes

    truth, estimator = np.asarray(labels_of(data) if labels is None else labels), model.estimator
    parts = tables.parts_of(data)
    if model.task == "regression":
        values = np.concatenate([estimator.predict(part) for part in parts]).reshape(len(truth), -1)
        real = truth.reshape(len(truth), -1).astype(float)
        return _Judged(
            lambda i: value_scores(values[i], real[i]),
            len(real),
            lambda path: pictures.draw_values(values, real, path),
        )
    classes = encode_classes(truth, estimator.classes_)
    chance = np.concatenate([estimator.predict_proba(part) for part in parts])

    def draw(path: Path) -> None:
        if chance.shape[1] != 2:
            raise CommandError("--picture draws curves of two classes; leave it out")
        pictures.draw_classes(classes == 1, {"OsciFormer": chance[:, 1]}, path)

    return _Judged(lambda i: class_scores(chance[i], classes[i]), len(classes), draw)


def _judge_answers(model: predict.Model, data: Any, seed: int) -> _Judged:
    """Score predictions of hidden values: the end of each series, or random ones."""
    levels = tuple(map(float, model.estimator.quantiles))
    generator = np.random.default_rng(seed)
    hidden = (model.estimator.answer_hidden(part, generator) for part in tables.parts_of(data))
    parts = [sum_answers(item, levels) for items in hidden for item in items]
    sums = np.concatenate(parts)
    below = sums[:, NUM_SUMS:].sum(axis=0) / max(sums[:, 0].sum(), 1.0)
    return _Judged(
        lambda i: answer_scores(sums[i]),
        len(data),
        lambda path: pictures.draw_quantiles(levels, below, path),
    )


@dataclass(frozen=True)
class Interval:
    """A score and the bounds between which resampled series put it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def bootstrap(
    score: Callable[[Int[np.ndarray, "n"]], Scores], count: int, *, rounds: int, seed: int
) -> dict[str, Interval]:
    """Return scores of `count` series, with percentile intervals of resampled ones (or NaN)."""
    generator = np.random.default_rng(seed)
    values = score(np.arange(count))
    drawn = [score(generator.integers(0, count, count)) for _ in range(rounds)]
    tail = 50.0 * (1.0 - LEVEL)
    result = {}
    for name, value in values.items():
        sample = np.array([item[name] for item in drawn])
        sample = sample[~np.isnan(sample)]
        low, high = np.percentile(sample, [tail, 100.0 - tail]) if len(sample) else (np.nan, np.nan)
        result[name] = Interval(float(value), float(low), float(high))
    return result


def class_scores(chance: Float[np.ndarray, "n C"], labels: Int[np.ndarray, "n"]) -> Scores:
    """Return AUROC, AUPRC, accuracy, log loss, Brier score and calibration error.

    The calibration error is the mean difference between predicted chance and frequency, over bins
    of equally many series; of class 1 if there are two classes, else of the predicted class.
    """
    from osciformer.train import class_metrics

    with np.errstate(divide="ignore"):
        found = class_metrics(np.log(np.maximum(chance, 1e-300)), labels)
    if chance.shape[1] == 2:
        said, is_hit = chance[:, 1], labels == 1
    else:
        said, is_hit = chance.max(axis=1), chance.argmax(axis=1) == labels
    bins = np.array_split(np.argsort(said, kind="stable"), min(NUM_BINS, len(said)))
    gaps = [abs(said[part].mean() - is_hit[part].mean()) * len(part) for part in bins]
    hits = np.eye(chance.shape[1])[labels]
    return {
        **{name: found[name] for name in ("auroc", "auprc", "accuracy", "log_loss")},
        "brier": float(np.square(chance - hits).sum(axis=1).mean()),
        "calibration_error": float(sum(gaps) / len(said)),
    }


def value_scores(found: Float[np.ndarray, "n K"], truth: Float[np.ndarray, "n K"]) -> Scores:
    """Return RMSE, MAE and R², means over the targets; R² of constant targets is NaN."""
    error = found - truth
    spread = np.square(truth - truth.mean(axis=0)).sum(axis=0)
    r2 = 1.0 - np.square(error).sum(axis=0) / np.where(spread > 0, spread, np.nan)
    return {
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": float(r2.mean()),
    }


def sum_answers(hidden: Hidden, levels: tuple[float, ...]) -> Float[np.ndarray, "n S"]:
    """Return sums over the hidden values of each series.

    They are the number of values, pinball loss, absolute and squared error, values inside the
    widest interval, absolute error of the baseline, and values below each of the L quantiles.
    """
    from osciformer.data.ragged import series_of_rows

    found, truth, baseline, offsets = hidden
    error = np.nan_to_num(truth)[..., None] - found
    level = np.array(levels)
    pinball = np.maximum(level * error, (level - 1.0) * error).mean(axis=-1)
    middle = error[..., levels.index(0.5)]
    inside = (error[..., 0] >= 0) & (error[..., -1] <= 0)
    parts = (np.ones_like(truth), pinball, np.abs(middle), np.square(middle), inside)
    columns = (*parts, np.abs(baseline - truth), *np.moveaxis(error <= 0, -1, 0))
    is_scored = ~np.isnan(truth)[..., None]
    sums = np.zeros((len(offsets) - 1, len(columns)))
    rows = np.where(is_scored, np.stack(columns, axis=-1), 0.0).sum(axis=1)  # [Q, S]
    np.add.at(sums, series_of_rows(offsets), rows)
    return sums


def answer_scores(sums: Float[np.ndarray, "n S"]) -> Scores:
    """Return pinball loss, MAE, RMSE, coverage and the improvement on the baseline."""
    total, *parts = sums[:, :NUM_SUMS].sum(axis=0)
    loss, absolute, squared, inside, simple = np.array(parts) / (total or np.nan)
    return {
        "pinball": float(loss),
        "mae": float(absolute),
        "rmse": float(np.sqrt(squared)),
        "coverage": float(inside),
        "skill": float(1.0 - absolute / simple) if simple > 0 else float("nan"),
    }
