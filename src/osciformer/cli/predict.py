"""`osciformer predict`: predictions for the series of a table, written as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from osciformer.cli import events, tables
from osciformer.cli.asking import Asked, ask
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.output import TableWriter, check_table_name, replacing
from osciformer.cli.progress import progress
from osciformer.cli.run_folder import find_model, read_config
from osciformer.cli.settings import QUERY_TASKS
from osciformer.cli.static import join_static
from osciformer.cli.training import check_device, task_of

RunArgument = Annotated[Path, typer.Argument(help="Run folder, or model file.")]
TableArgument = Annotated[Path, typer.Argument(help="Table with the columns of training.")]
StreamOption = Annotated[bool | None, typer.Option(help="Read Parquet part by part.")]
AcceleratorOption = Annotated[str, typer.Option(help="auto, cpu or gpu.")]
LabelsIdOption = Annotated[str | None, typer.Option(help="Its column of ids.")]


def predict(
    run: RunArgument,
    table: TableArgument,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .parquet or .csv.")
    ],
    times: Annotated[
        Path | None, typer.Option(help="Table of times to predict at, by id or for all.")
    ] = None,
    horizon: Annotated[
        float | None, typer.Option(help="Forecast so far beyond the end of each series.")
    ] = None,
    every: Annotated[float | None, typer.Option(help="And at these steps on the way.")] = None,
    quantiles: Annotated[
        bool, typer.Option("--quantiles", help="Write the quantiles besides the median.")
    ] = False,
    labels: Annotated[
        Path | None,
        typer.Option(help="Table with a row per series, for static columns the table lacks."),
    ] = None,
    labels_id: LabelsIdOption = None,
    stream: StreamOption = None,
    accelerator: AcceleratorOption = "auto",
) -> None:
    """Predict for each series of a table.

    Classification writes the class and the probability of each class; regression the value;
    forecasting and imputation a row for each series, time and variable; events the next event of
    each sequence, its time and type.
    """
    check_table_name(output)
    if events.is_event_model(run, table):
        asked_for = (times, horizon, every, labels, labels_id, stream)
        if quantiles or any(item is not None for item in asked_for):
            raise CommandError(
                "--times, --horizon, --every, --quantiles, --labels and --stream do not apply to "
                "events",
                MISUSED,
            )
        events.predict_events(run, table, output, accelerator=accelerator)
        return
    estimator, task, data = open_run(
        run, table, stream=stream, accelerator=accelerator, labels=labels, labels_id=labels_id
    )
    asked = None
    if task in QUERY_TASKS:
        asked = ask(estimator, task, data.ids, times=times, horizon=horizon, every=every)
    elif times is not None or horizon is not None or every is not None or quantiles:
        raise CommandError(
            f"--times, --horizon, --every and --quantiles do not apply to {task}", MISUSED
        )
    name = id_name(estimator)
    num_rows = 0
    with replacing(output) as part, TableWriter(part) as writer:
        for chunk in progress(tables.chunks(data), len(data)):
            if task in QUERY_TASKS:
                columns = answer_columns(estimator, task, chunk, asked, with_quantiles=quantiles)
            else:
                columns = label_columns(estimator, task, chunk)
            num_rows += len(next(iter(columns.values())))
            writer.write({name if key == "id" else key: item for key, item in columns.items()})
    typer.echo(f"{output}: {num_rows} rows for {len(data)} series")


def open_run(
    run: Path,
    table: Path,
    *,
    stream: bool | None,
    accelerator: str,
    label: Any = None,
    labels: Path | None = None,
    labels_id: str | None = None,
) -> tuple[Any, str, Any]:
    """Return the estimator of a run, its task, and the series of a table read as in training.

    Args:
        run: Run folder or model file.
        table: The table.
        stream: Whether to read it part by part; None decides by its size.
        accelerator: Where to compute.
        label: Label columns to read as well.
        labels: Table of the static features that came from such a table in training.
        labels_id: Its column of ids; that of training if not given.
    """
    model = find_model(run)
    for path in (table, labels):
        if path is not None:
            tables.refuse_absent(path)
    check_device({"accelerator": accelerator})
    from osciformer.estimators import load_estimator

    estimator = load_estimator(model)
    estimator.accelerator = accelerator
    layout = tables.prediction_layout(
        estimator.layout, tuple(map(str, estimator.feature_names_in_))
    )
    if label is not None and layout is not None:
        layout = layout.replace(label=label)
    data = tables.open_table(table, layout, stream=stream)
    if labels_id is None and run.is_dir():
        labels_id = read_config(run).get("labels_id")
    data = join_static(
        data,
        [name for name in estimator.static_names_in_ if name not in data.static_names],
        labels=labels,
        labels_id=labels_id or (None if estimator.layout is None else id_name(estimator)),
    )
    return estimator, task_of(estimator), data


def id_name(estimator: Any) -> str:
    """Return the name of the column of ids."""
    return "id" if estimator.layout is None else str(dict(estimator.layout)["id"])


def label_columns(estimator: Any, task: str, series: Any) -> dict[str, np.ndarray]:
    """Return the predictions of classes or values, a row per series."""
    columns = {"id": series.ids}
    if task == "classification":
        chance = estimator.predict_proba(series)
        columns["prediction"] = estimator.classes_[chance.argmax(axis=1)]
        for number, name in enumerate(estimator.classes_.tolist()):
            columns[f"probability_{name}"] = chance[:, number]
        return columns
    found = estimator.predict(series).reshape(len(series), -1)
    target = None if estimator.layout is None else dict(estimator.layout)["label"]
    names = target if isinstance(target, list | tuple) else range(found.shape[1])
    if found.shape[1] == 1:
        return {**columns, "prediction": found[:, 0]}
    return columns | {f"prediction_{name}": found[:, number] for number, name in enumerate(names)}


def answer_columns(
    estimator: Any, task: str, series: Any, asked: Asked | None, *, with_quantiles: bool
) -> dict[str, np.ndarray]:
    """Return predictions at times, a row per series, time and variable."""
    from osciformer.data.ragged import offsets_of, series_of_rows
    from osciformer.estimators.query_base import last_target_times

    if asked is None:
        answers, moments = estimator.predict_quantiles(series), series.decode_times()
        owner = series_of_rows(series.offsets)
    else:
        lists = asked.of(series.ids)
        options = {"relative": True} if asked.is_relative else {}
        answers = estimator.predict_quantiles(series, lists, **options)
        owner = series_of_rows(offsets_of(np.array([len(item) for item in lists])))
        moments = np.concatenate(lists)
        if asked.is_relative:
            is_target = np.isin(estimator.feature_names_in_, estimator.target_names_)
            ends = last_target_times(series, is_target)
            moments = series.decode_times(moments + ends[owner], owner)
    found = np.concatenate(answers)  # [Q, F, L]
    variables = np.array(list(map(str, estimator.target_names_)))
    levels = tuple(map(float, estimator.quantiles))
    columns = {
        "id": np.repeat(series.ids[owner], len(variables)),
        "time" if estimator.layout is None else dict(estimator.layout)["time"]: np.repeat(
            moments, len(variables)
        ),
        "variable": np.tile(variables, len(found)),
        "prediction": found[..., levels.index(0.5)].reshape(-1),
    }
    if with_quantiles:
        columns |= {f"q{level:g}": found[..., k].reshape(-1) for k, level in enumerate(levels)}
    return columns
