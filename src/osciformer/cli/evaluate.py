"""`osciformer evaluate`: scores of a trained model on a table, with bootstrap intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from typer import Option

from osciformer._files import finite_json, write_json
from osciformer.cli import pictures, predict, tables
from osciformer.cli.errors import CommandError
from osciformer.cli.runs import refuse_replacing
from osciformer.cli.undefined import print_reasons, shown, undefined
from osciformer.config import SERIES_TASKS

if TYPE_CHECKING:
    from osciformer._types import Float, Int
    from osciformer.estimators.forecasting import Hidden

NUM_BINS = 10  # of the calibration error, of equal numbers of series
NUM_SUMS = 6  # over hidden values, before those of each quantile; see `sum_answers`
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
    for file in (output, picture):
        refuse_replacing(file, run, table, labels)
    model = predict.Model.load(run, table, labels, accelerator=accelerator)
    if model.task == "events":
        model.refuse(target=target, labels=labels, labels_id=labels_id, stream=stream)
        data, truth = model.open_events(table), None
    else:
        data, truth = open_labelled(model, table, target, labels, labels_id, stream)
    found = judge(model, data, truth, seed)
    if picture is not None:
        found.draw(picture)
    scores = bootstrap(found.score, found.num_series, rounds=rounds, seed=seed)
    content = {"task": model.task, "series": found.num_series, "bootstrap": rounds}
    content["metrics"] = {name: interval._asdict() for name, interval in scores.items()}
    content |= found.facts
    reasons = undefined({name: interval.value for name, interval in scores.items()})
    if rounds == 0:
        reasons["interval"] = "--bootstrap 0 draws no samples"
    content |= {"undefined": reasons} if reasons else {}
    if output is not None:
        write_json(output, content)
    if as_json:
        typer.echo(json.dumps(finite_json(content), allow_nan=False))
        return
    rows = [(n, shown(s.value), f"{shown(s.low)} to {shown(s.high)}") for n, s in scores.items()]
    tables.print_table(
        f"{model.task.capitalize()}, {found.title or f'{found.num_series} series'}",
        ("metric", "value", "95 % interval"),
        rows if rounds else [(*row[:2], "-") for row in rows],
    )
    print_reasons(reasons)
    if found.remark:
        typer.echo(found.remark)


def open_labelled(
    model: predict.Model,
    table: Path,
    target: str | None,
    labels: Path | None,
    labels_id: str | None,
    stream: bool | None,
) -> tuple[Any, np.ndarray | None]:
    """Return the series of a table, and their labels; None if the series have them, or need none.

    Other names than those of training are in `target`, and where to find them in `labels`.
    """
    given = {"id": model.layout.get("id"), **model.settings, "labels": labels}
    given |= {"target": tuple(target.split(","))} if target else {}
    given |= {"labels_id": labels_id} if labels_id else {}
    in_table = model.task in SERIES_TASKS and labels is None
    label = tables.label_of(given, model.task) if in_table else None
    data = model.open_series(table, labels, labels_id, stream, label)
    return data, tables.labels_for(data, given, model.task)


class Judged(NamedTuple):
    """What a table says of a model: scores of any sample of its series, and how to show them."""

    score: Callable[[np.ndarray], Scores]
    num_series: int
    draw: Callable[[Path], None]
    facts: Mapping[str, Any] = {}
    title: str = ""
    remark: str = ""
    #: Probabilities [n, C], values [n, K], or the part of values below each quantile [L].
    found: np.ndarray | None = None
    truth: np.ndarray | None = None  #: Classes [n], or values [n, K].


def judge(model: predict.Model, data: Any, truth: np.ndarray | None, seed: int) -> Judged:
    """Judge a model by series with labels, by values that it hides, or by events."""
    if model.task == "events":
        return _judge_events(model, data)
    if model.task in SERIES_TASKS:
        return _judge_labels(model, data, truth)
    return _judge_answers(model, data, seed)


def _judge_events(model: predict.Model, events: Any) -> Judged:
    if not (events.lengths > 1).any():
        raise CommandError("the table has nothing to score: no sequence has a second event")
    found = model.estimator.evaluate_sequences(events)
    calibration, likelihood = model.estimator.calibration(events), found.log_likelihood
    facts = {"events": likelihood.num_scored, "time_unit": likelihood.time_unit}
    facts |= {"quadrature_error": likelihood.error, "horizon": found.horizon}
    facts["calibration"] = {"statistic": calibration.statistic, "p_value": calibration.p_value}
    return Judged(
        found.means,
        len(events),
        partial(pictures.draw_calibration, calibration),
        facts,
        f"{len(events)} sequences, {likelihood.num_scored} scored events",
        f"log-likelihoods in nats per event, times in {likelihood.time_unit}; quadrature error "
        f"{likelihood.error:.1e}\ntime rescaling: KS distance {calibration.statistic:.4f}, p = "
        f"{calibration.p_value:.3g}",
    )


def _judge_labels(model: predict.Model, data: Any, labels: np.ndarray | None) -> Judged:
    """Score predictions of classes or values; the data have the labels if none are given."""
    from osciformer.data.inputs import labels_of
    from osciformer.estimators.labels import as_targets, encode_classes

    truth, estimator = np.asarray(labels_of(data) if labels is None else labels), model.estimator
    predict_part = estimator.predict if model.task == "regression" else estimator.predict_proba
    found = np.concatenate([predict_part(part) for part in tables.parts_of(data)])
    if model.task == "regression":
        columns = found, as_targets(truth, "OsciFormerClassifier")
        values, real = (item.reshape(len(truth), -1).astype(float) for item in columns)
        draw = partial(pictures.draw_values, values, real)
        return Judged(
            lambda i: value_scores(values[i], real[i]), len(real), draw, found=values, truth=real
        )
    classes = encode_classes(truth, estimator.classes_)

    def draw_curves(path: Path) -> None:
        if found.shape[1] != 2:
            raise CommandError("--picture draws curves of two classes; leave it out")
        pictures.draw_classes(classes == 1, {"OsciFormer": found[:, 1]}, path)

    return Judged(
        lambda i: class_scores(found[i], classes[i]),
        len(classes),
        draw_curves,
        found=found,
        truth=classes,
    )


def _judge_answers(model: predict.Model, data: Any, seed: int) -> Judged:
    levels = tuple(map(float, model.estimator.quantiles))
    generator = np.random.default_rng(seed)
    hidden = (model.estimator.answer_hidden(part, generator) for part in tables.parts_of(data))
    sums = np.concatenate([sum_answers(item, levels) for items in hidden for item in items])
    below = sums[:, NUM_SUMS:].sum(axis=0) / max(sums[:, 0].sum(), 1.0)
    draw = partial(pictures.draw_quantiles, levels, below)
    return Judged(lambda i: answer_scores(sums[i]), len(data), draw, found=below)


class Interval(NamedTuple):
    """A score and the bounds between which resampled series put it."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def bootstrap(
    score: Callable[[Int[np.ndarray, "n"]], Scores], count: int, *, rounds: int, seed: int
) -> dict[str, Interval]:
    """Return scores of `count` series, with percentile intervals of resampled ones (or NaN)."""
    generator = np.random.default_rng(seed)
    drawn = [score(generator.integers(0, count, count)) for _ in range(rounds)]
    result = {}
    for name, value in score(np.arange(count)).items():
        sample = [item[name] for item in drawn if not np.isnan(item[name])]
        low, high = np.percentile(sample, (2.5, 97.5)) if sample else (np.nan, np.nan)
        result[name] = Interval(float(value), float(low), float(high))
    return result


def class_scores(chance: Float[np.ndarray, "n C"], labels: Int[np.ndarray, "n"]) -> Scores:
    """Return AUROC, AUPRC, accuracy, log loss, Brier score and calibration error."""
    from osciformer.train import class_metrics

    found = class_metrics(np.log(np.maximum(chance, 1e-300)), labels)
    # Calibration: of class 1 if there are two classes, else of the predicted class.
    if chance.shape[1] == 2:
        said, is_hit = chance[:, 1], labels == 1
    else:
        said, is_hit = chance.max(axis=1), chance.argmax(axis=1) == labels
    bins = np.array_split(np.argsort(said, kind="stable"), min(NUM_BINS, len(said)))
    gaps = [abs(said[part].mean() - is_hit[part].mean()) * len(part) for part in bins]
    hits = np.eye(chance.shape[1])[labels]
    scores = {name: found[name] for name in ("auroc", "auprc", "accuracy", "log_loss")}
    scores["brier"] = float(np.square(chance - hits).sum(axis=1).mean())
    return scores | {"calibration_error": float(sum(gaps) / len(said))}


def value_scores(found: Float[np.ndarray, "n K"], truth: Float[np.ndarray, "n K"]) -> Scores:
    """Return RMSE, MAE and R², means over the targets; R² of constant targets is NaN."""
    from osciformer.train.tasks import power_of_two, root_mean_square

    error, unit = found - truth, power_of_two(truth)  # squares in other units may overflow
    spread = np.square(truth / unit - (truth / unit).mean(axis=0)).sum(axis=0)
    r2 = 1.0 - np.square(error / unit).sum(axis=0) / np.where(spread > 0, spread, np.nan)
    scores = {"rmse": root_mean_square(error), "mae": np.abs(error).mean(), "r2": r2.mean()}
    return {name: float(value) for name, value in scores.items()}


def sum_answers(hidden: Hidden, levels: tuple[float, ...]) -> Float[np.ndarray, "n S"]:
    """Return sums over the hidden values of each series; the last L count those below quantiles."""
    from osciformer.data.ragged import series_of_rows

    found, truth, baseline, offsets = hidden
    error, level = np.nan_to_num(truth)[..., None] - found, np.array(levels)
    pinball = np.maximum(level * error, (level - 1.0) * error).mean(axis=-1)
    middle = error[..., levels.index(0.5)]
    inside = (error[..., 0] >= 0) & (error[..., -1] <= 0)  # the widest interval
    parts = (np.ones_like(truth), pinball, np.abs(middle), np.square(middle), inside)
    columns = (*parts, np.abs(baseline - truth), *np.moveaxis(error <= 0, -1, 0))
    sums = np.zeros((len(offsets) - 1, len(columns)))
    is_unknown = np.isnan(truth)[..., None]
    rows = np.where(is_unknown, 0.0, np.stack(columns, axis=-1)).sum(axis=1)  # [Q, S]
    np.add.at(sums, series_of_rows(offsets), rows)
    return sums


def answer_scores(sums: Float[np.ndarray, "n S"]) -> Scores:
    """Return pinball loss, MAE, RMSE, coverage and the improvement on the baseline."""
    total, *parts = sums[:, :NUM_SUMS].sum(axis=0)
    loss, absolute, squared, inside, simple = (float(part / (total or np.nan)) for part in parts)
    skill = 1.0 - absolute / simple if simple > 0 else float("nan")
    scores = {"pinball": loss, "mae": absolute, "rmse": float(np.sqrt(squared))}
    return scores | {"coverage": inside, "skill": skill}
