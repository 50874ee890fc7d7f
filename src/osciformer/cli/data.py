"""`osciformer data`: public data sets by name, and a summary of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from osciformer._files import replacing
from osciformer._optional import need
from osciformer.cli import tables
from osciformer.cli.errors import Misuse, guarded
from osciformer.config import EVENT_TASKS

app = typer.Typer(no_args_is_help=True, help="Public data sets: list, describe, get.")


@app.command("list")
@guarded
def list_(task: Annotated[str | None, Option(help="Only those for this task.")] = None) -> None:
    """Show the data sets that are known."""
    from osciformer.data import dataset_info, list_datasets

    infos = [dataset_info(name) for name in list_datasets()]
    tasks = sorted({info.task for info in infos})
    if task is not None and task not in tasks:
        raise Misuse(f"there is no task {task!r}; known are {', '.join(tasks)}")
    rows = [(i.name, i.task, ", ".join(i.splits)) for i in infos if task in (None, i.task)]
    tables.print_table(f"{len(rows)} data sets", ("name", "task", "splits"), rows)


@app.command("describe")
@guarded
def describe(
    name: Annotated[str, Argument(help="Name of a data set, or a file of your own.")],
    id: Annotated[str | None, Option(help="For a file: column of ids.")] = None,
    time: Annotated[str | None, Option(help="For a file: column of times.")] = None,
    variable: Annotated[str | None, Option(help="For a file: column of names.")] = None,
    value: Annotated[str | None, Option(help="For a file: column of values.")] = None,
    stream: Annotated[bool | None, Option(help="For a file: read Parquet part by part.")] = None,
) -> None:
    """Show content, splits, licence, citation and files of a data set, or sum up a table."""
    from osciformer.data import SeriesStatistics, describe_dataset

    path = Path(name)
    if not path.exists():
        typer.echo(describe_dataset(name))
        return
    given = {"id": id, "time": time, "variable": variable, "value": value, "empty": "keep"}
    layout = tables.make_layout(given, EVENT_TASKS[0], path)  # a task whose tables have no label
    data: Any = tables.open_table(path, layout, stream=stream)
    is_streamed = tables.is_streamed(data)
    counts = data.num_rows if is_streamed else data.lengths
    features = (data.statistics() if is_streamed else SeriesStatistics.of(data)).features
    typer.echo(f"{name}: {tables.describe(data)}, {counts.min()} to {counts.max()} rows a series")
    told = zip(data.feature_names, features.count, features.mean, features.std, strict=True)
    rows = [(str(n), str(int(count)), f"{mean:.4g}", f"{std:.4g}") for n, count, mean, std in told]
    tables.print_table("Features", ("feature", "values", "mean", "spread"), rows)


@app.command("get")
@guarded
def get(
    name: Annotated[str, Argument(help="Name of a data set.")],
    split: Annotated[str | None, Option(help="One of its splits; all if not given.")] = None,
    fold: Annotated[int | None, Option(help="One of its folds.")] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="File for a split.")] = None,
) -> None:
    """Download a data set if it is not here, check it, and say where it is."""
    from osciformer.data import fetch_dataset, get_dataset, save_npz, to_frame

    if output is None:
        for path in fetch_dataset(name, split, fold=fold):
            typer.echo(str(path))
        return
    if split is None:
        raise Misuse("--split is needed with -o: one split is written")
    tables.check_ending(output, (*tables.TABLE_ENDINGS, ".npz"))
    found = get_dataset(name, split, fold=fold)
    is_series, ending = hasattr(found, "offsets"), output.suffix.lower()
    if ending == ".npz" and not is_series:
        raise Misuse("a table of events can be written as .parquet or .csv")
    with replacing(output) as part:
        if ending == ".npz":
            save_npz(found, part)
        else:
            table = to_frame(_with_unique_names(found), "pyarrow") if is_series else found
            if ending == ".csv":
                need("pyarrow.csv", extra="data").write_csv(table, part)
            else:
                options = {"compression": "zstd", "write_page_checksum": True}
                need("pyarrow.parquet", extra="data").write_table(table, part, **options)
    typer.echo(f"{output}: {len(found)} {'series' if is_series else 'rows'}")


def _with_unique_names(series: Any) -> Any:
    """Return the series with other names for static features that are called like features."""
    taken = set(series.feature_names)
    names = tuple(f"static_{n}" if n in taken else n for n in series.static_names)
    return series.replace(static=series.static, static_names=names)
