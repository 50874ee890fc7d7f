"""`osciformer evaluate`: scores of a trained model on a table, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from osciformer.cli import events, pictures, run_folder, tables
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.output import print_scores, to_json, write_json
from osciformer.cli.predict import (
    AcceleratorOption,
    LabelsIdOption,
    RunArgument,
    StreamOption,
    TableArgument,
    open_run,
)
from osciformer.cli.progress import progress
from osciformer.cli.scoring import (
    AnswerSums,
    Interval,
    bootstrap,
    class_scores,
    sum_answers,
    value_scores,
)
from osciformer.cli.settings import SERIES_TASKS


def evaluate(
    run: RunArgument,
    table: TableArgument,
    *,
    target: Annotated[
        str | None, typer.Option(help="Column of true labels; that of training if not given.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Another table, with a row per series, that holds them.")
    ] = None,
    labels_id: LabelsIdOption = None,
    rounds: Annotated[
        int, typer.Option("--bootstrap", min=0, help="Samples for the intervals; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Decides the samples, and hidden values.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the scores to a JSON file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw curves into a .png, .pdf or .svg file.")
    ] = None,
    stream: StreamOption = None,
    accelerator: AcceleratorOption = "auto",
) -> None:
    """Score a trained model on a table with true labels, or by hiding values.

    Forecasts are scored on the end of each series, up to the horizon of training; imputations on
    values that are hidden. Their errors are in units of each feature's spread in training. Events
    are scored by their likelihood and by predictions of each from those before.
    """
    if picture is not None:
        pictures.check_picture(picture)
    if events.is_event_model(run, table):
        if target is not None or labels is not None or labels_id is not None or stream is not None:
            raise CommandError(
                "--target, --labels, --labels-id and --stream do not apply to events", MISUSED
            )
        events.evaluate_events(
            run,
            table,
            rounds=rounds,
            seed=seed,
            json=json,
            output=output,
            picture=picture,
            accelerator=accelerator,
        )
        return
    settings = run_folder.read_config(run) if run.is_dir() else {}
    settings |= {"labels": None if labels is None else str(labels)}
    if target is not None:
        settings["target"] = tuple(target.split(","))
    if labels_id is not None:
        settings["labels_id"] = labels_id
    estimator, task, data = _open(
        run,
        table,
        settings,
        stream=stream,
        accelerator=accelerator,
        labels=labels,
        labels_id=labels_id,
    )
    if task in SERIES_TASKS:
        truth = _true_labels(estimator, data, settings, task)
        scores = _score_labels(estimator, task, data, truth, rounds, seed, picture)
    else:
        answers = collect_answers(estimator, task, data, seed)
        scores = bootstrap(answers.scores, len(answers.count), rounds=rounds, seed=seed)
        if picture is not None:
            part = answers.below.sum(axis=0) / max(answers.count.sum(), 1.0)
            pictures.draw_quantiles(tuple(map(float, estimator.quantiles)), part, picture)
    content = {
        "task": task,
        "series": len(data),
        "bootstrap": rounds,
        "metrics": {name: asdict(interval) for name, interval in scores.items()},
    }
    if output is not None:
        write_json(output, content)
    if json:
        typer.echo(to_json(content))
    else:
        print_scores(f"{task.capitalize()}, {len(data)} series", scores)


def _open(
    run: Path, table: Path, settings: Mapping[str, Any], **options: Any
) -> tuple[Any, str, Any]:
    target = settings.get("target")
    task = settings.get("task", SERIES_TASKS[0])
    label = None
    if target and not settings["labels"] and task in SERIES_TASKS:
        label = target[0] if len(target) == 1 else tuple(target)
    return open_run(run, table, label=label, **options)


def _true_labels(estimator: Any, data: Any, settings: Mapping[str, Any], task: str) -> np.ndarray:
    if estimator.layout is not None:
        settings = {"id": dict(estimator.layout)["id"], **settings}
    labels = tables.labels_for(data, settings, task)
    if labels is None:
        labels = data.labels() if callable(data.labels) else data.labels
    return np.asarray(labels)


def _score_labels(
    estimator: Any,
    task: str,
    data: Any,
    truth: np.ndarray,
    rounds: int,
    seed: int,
    picture: Path | None,
) -> dict[str, Interval]:
    parts = progress(tables.chunks(data), len(data))
    if task == "regression":
        found = np.concatenate([estimator.predict(part) for part in parts])
        found, real = found.reshape(len(truth), -1), truth.reshape(len(truth), -1).astype(float)
        if picture is not None:
            pictures.draw_values(found, real, picture)
        return bootstrap(
            lambda i: value_scores(found[i], real[i]), len(real), rounds=rounds, seed=seed
        )
    classes = encode(truth, estimator.classes_)
    chance = np.concatenate([estimator.predict_proba(part) for part in parts])
    if picture is not None:
        if chance.shape[1] != 2:
            raise CommandError("--picture draws curves of two classes; leave it out")
        pictures.draw_classes(classes == 1, {"OsciFormer": chance[:, 1]}, picture)
    return bootstrap(
        lambda i: class_scores(chance[i], classes[i]), len(classes), rounds=rounds, seed=seed
    )


def encode(truth: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return true labels as positions among the classes, and refuse unknown ones."""
    from osciformer.estimators.targets import encode_classes

    if (truth.dtype.kind == "U") != (classes.dtype.kind == "U"):
        raise CommandError(
            f"the labels are {truth.dtype} and the classes of the model {classes.dtype}; make them "
            "the same"
        )
    return np.asarray(encode_classes(truth, classes))


def collect_answers(estimator: Any, task: str, data: Any, seed: int) -> AnswerSums:
    """Return the errors on hidden values: the end of each series, or random ones."""
    from osciformer.data.ragged import series_of_rows
    from osciformer.estimators import queries

    names = list(map(str, estimator.feature_names_in_))
    known = getattr(estimator, "known_covariates", ())
    columns = queries.find_columns(names, estimator.covariates, known, None)
    is_target = columns.is_target
    if task == "forecasting":
        draw: Any = queries.ForecastDraw(columns, estimator.horizon_, at_end=True)
        baseline = queries.last_value_before
    else:
        draw = queries.HideDraw(columns, estimator.hidden_fraction)
        baseline = queries.interpolate
    scaler = estimator.transform_.value_scaler
    scale, center = scaler.scale[is_target], scaler.center[is_target]
    generator = np.random.default_rng(seed)
    parts = []
    for chunk in progress(tables.chunks(data), len(data)):
        shown, hidden = draw(chunk, generator)
        owner = series_of_rows(hidden.offsets)
        moments = chunk.decode_times(hidden.times, owner)
        found = estimator.predict_quantiles(shown, np.split(moments, hidden.offsets[1:-1]))
        simple = baseline(estimator.transform_.transform(shown), hidden)[:, is_target]
        parts.append(
            sum_answers(
                (np.concatenate(found) - center[:, None]) / scale[:, None],
                (hidden.values[:, is_target] - center) / scale,
                simple,
                owner,
                len(chunk),
                tuple(map(float, estimator.quantiles)),
            )
        )
    return AnswerSums(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("sums", "count", "below")
        )
    )
