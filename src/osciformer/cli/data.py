"""`osciformer data`: public data sets by name, and a look at a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from osciformer.cli import tables
from osciformer.cli.errors import MISUSED, CommandError, guarded
from osciformer.cli.output import TABLE_ENDINGS, print_table, replacing
from osciformer.cli.settings import TASKS

app = typer.Typer(no_args_is_help=True, help="Public data sets: list, describe, get.")

NameArgument = Annotated[str, typer.Argument(help="Name of a data set.")]


@app.command("list")
@guarded
def list_(
    task: Annotated[
        str | None, typer.Option(help="Only those for this task, such as classification.")
    ] = None,
) -> None:
    """Show the data sets that are known."""
    from osciformer.data import dataset_info, list_datasets

    infos = [dataset_info(name) for name in list_datasets()]
    tasks = sorted({info.task for info in infos})
    if task is not None and task not in tasks:
        raise CommandError(f"there is no task {task!r}; known are {', '.join(tasks)}", MISUSED)
    rows = [
        (info.name, info.task, ", ".join(info.splits))
        for info in infos
        if task in (None, info.task)
    ]
    print_table(f"{len(rows)} data sets", ("name", "task", "splits"), rows)


@app.command("describe")
@guarded
def describe(
    name: Annotated[str, typer.Argument(help="Name of a data set, or a file of your own.")],
    id: Annotated[str | None, typer.Option(help="For a file: column of ids.")] = None,
    time: Annotated[str | None, typer.Option(help="For a file: column of times.")] = None,
    variable: Annotated[str | None, typer.Option(help="For a file: column of names.")] = None,
    value: Annotated[str | None, typer.Option(help="For a file: column of values.")] = None,
    stream: Annotated[
        bool | None, typer.Option(help="For a file: read Parquet part by part.")
    ] = None,
) -> None:
    """Show content, splits, licence, citation and files of a data set, or sum up a table."""
    from osciformer.data import describe_dataset

    path = Path(name)
    if not path.exists():
        typer.echo(describe_dataset(name))
        return
    given = {"id": id, "time": time, "variable": variable, "value": value, "empty": "keep"}
    layout = tables.make_layout(given, TASKS[-1], path)
    _print_summary(name, tables.open_table(path, layout, stream=stream))


def _print_summary(name: str, data: Any) -> None:
    from osciformer.data import SeriesStatistics

    statistics: SeriesStatistics | None = None
    lengths, series = [], 0
    for chunk in tables.chunks(data):
        lengths.append(chunk.lengths)
        series += len(chunk)
        if statistics is None:
            statistics = SeriesStatistics.of(chunk)
        else:
            statistics.update(chunk)
    assert statistics is not None
    rows = np.concatenate(lengths)
    features = statistics.features
    typer.echo(f"{name}: {tables.describe(data)}, {rows.min()} to {rows.max()} rows a series")
    print_table(
        "Features",
        ("feature", "values", "mean", "spread"),
        [
            (str(label), str(int(count)), f"{mean:.4g}", f"{spread:.4g}")
            for label, count, mean, spread in zip(
                data.feature_names, features.count, features.mean, features.std, strict=True
            )
        ],
    )


@app.command("get")
@guarded
def get(
    name: NameArgument,
    split: Annotated[str | None, typer.Option(help="One of its splits; all if not given.")] = None,
    fold: Annotated[int | None, typer.Option(help="One of its folds.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a split as .parquet, .csv or .npz."),
    ] = None,
) -> None:
    """Download a data set if it is not here, check it, and say where it is."""
    from osciformer.data import fetch_dataset, get_dataset

    if output is None:
        for path in fetch_dataset(name, split, fold=fold):
            typer.echo(str(path))
        return
    if split is None:
        raise CommandError("--split is needed with -o: one split is written", MISUSED)
    endings = (*TABLE_ENDINGS, ".npz")
    if output.suffix.lower() not in endings:
        raise CommandError(f"{output} must end in {', '.join(endings)}", MISUSED)
    found = get_dataset(name, split, fold=fold)
    _write(found, output)
    typer.echo(f"{output}: {len(found)} {'series' if hasattr(found, 'offsets') else 'rows'}")


def _write(found: Any, output: Path) -> None:
    from osciformer._optional import need
    from osciformer.data import save_npz, to_frame

    is_series = hasattr(found, "offsets")
    with replacing(output) as part:
        if output.suffix.lower() == ".npz":
            if not is_series:
                raise CommandError("a table of events can be written as .parquet or .csv", MISUSED)
            save_npz(found, part)
            return
        table = _unique_names(found) if is_series else found
        table = to_frame(table, "pyarrow") if is_series else table
        if output.suffix.lower() == ".csv":
            need("pyarrow.csv", extra="data").write_csv(table, part)
        else:
            need("pyarrow.parquet", extra="data").write_table(table, part, compression="zstd")


def _unique_names(series: Any) -> Any:
    """Return the series with static features that are not called like features."""
    taken = set(series.feature_names)
    names = tuple(f"static_{n}" if n in taken else n for n in series.static_names)
    return (
        series
        if series.static is None
        else series.replace(static=series.static, static_names=names)
    )
