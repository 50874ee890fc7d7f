"""Tables in and out: series and events from files, predictions to files, scores to the screen."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer._files import replacing
from osciformer._optional import need
from osciformer.cli.errors import CommandError, Misuse
from osciformer.config import SERIES_TASKS

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries, Layout, ParquetSeries
    from osciformer.events import EventSequences

    Series = IrregularSeries | ParquetSeries

# A larger Parquet file is read from disk in each epoch; in memory it is several times larger.
STREAM_BYTES = 256 * 2**20
CHUNK_SERIES = 4096  # that are predicted at a time
TABLE_ENDINGS = (".parquet", ".csv")
_SELF_DESCRIBING = (".npz", ".ts", ".ts.gz")
_TIME_SETTINGS = ("unit", "origin", "time_format", "duplicates")
_SERIES_SETTINGS = ("id", "time", "variable", "value", "static", "empty", *_TIME_SETTINGS)
_EVENT_SETTINGS = ("id", "time", "start", "end", "time_unit", "num_types", *_TIME_SETTINGS)


def make_layout(given: Mapping[str, Any], task: str, path: Path) -> Layout | None:
    """Return which column means what; None for files that say it themselves."""
    if format_of(path) == "own":
        return None
    chosen = _columns(given, path, _SERIES_SETTINGS)
    from osciformer.data import Layout  # slow to import; wrong calls are refused before

    label = given.get("target") if task in SERIES_TASKS and not given.get("labels") else None
    return Layout(values=given.get("features"), label=one_or_all(label), **chosen)


def make_event_layout(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return which column means what, as arguments of `events_from_frame`."""
    if format_of(path) == "own":
        raise Misuse(
            f"{path} holds series; events are read from CSV or Parquet, with a row per event"
        )
    chosen = _columns(given, path, _EVENT_SETTINGS)
    if "type" not in given:
        raise Misuse(
            f"--type is needed: the column of {path} that holds the types of events, or none if "
            "all are of one type"
        )
    return {**chosen, "type": given["type"]}


def _columns(given: Mapping[str, Any], path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the settings that have a value; id and time must."""
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    for name in ("id", "time"):
        if name not in chosen:
            raise Misuse(f"--{name} is needed: the column of {path} that holds it")
    return chosen


def one_or_all(names: Sequence[str] | None) -> Any:
    """Return a single name as text, and several as they are."""
    return names[0] if names and len(names) == 1 else names or None


def format_of(path: Path) -> str:
    """Return "csv", "parquet" (also for a folder), or "own" for files that need no columns."""
    name = path.name.lower()
    if name.endswith(_SELF_DESCRIBING):
        return "own"
    if name.endswith((".csv", ".csv.gz")):
        return "csv"
    return "parquet" if path.is_dir() or name.endswith((".parquet", ".pq")) else ""


def refuse_absent(*paths: Path | None) -> None:
    """Refuse paths at which there is nothing, before anything is imported or read."""
    for path in paths:
        if path is not None and not path.exists():
            raise FileNotFoundError(f"there is no file {path}; check the path")


def open_table(path: Path, layout: Layout | None, *, stream: bool | None = None) -> Series:
    """Return the series of a file, in memory or on disk; by default its size decides."""
    from osciformer.data import ParquetSeries, read_table

    if stream and format_of(path) != "parquet":
        raise Misuse(f"--stream reads Parquet only, not {path}; convert it first")
    if layout is None and format_of(path) != "own":
        raise CommandError(
            f"the model was trained on a file that needs no columns, so that those of {path} "
            f"mean nothing to it; give a file that ends in {', '.join(_SELF_DESCRIBING)}"
        )
    if stream is None and format_of(path) == "parquet":
        files = path.rglob("*.parquet") if path.is_dir() else [path]
        stream = sum(file.stat().st_size for file in files if file.is_file()) > STREAM_BYTES
    if layout is not None and stream:
        return ParquetSeries(path, layout)
    series = read_table(path, layout and layout.replace(empty="keep"))
    if len(series) and (series.num_observed == 0).all():
        raise CommandError(
            f"all values of all {len(series)} series are missing; check which columns hold the "
            f"values. The features are {', '.join(series.feature_names)}"
        )
    return series.settle_empty(layout.empty if layout else "error")


def read_events(
    path: Path, layout: Mapping[str, Any], type_names: Sequence[str] | None = None
) -> EventSequences:
    """Return the sequences of a CSV file, a Parquet file or a folder, perhaps of known types."""
    frame = read_frame(path)
    from osciformer.events import events_from_frame

    if type_names is None or layout["type"] is None:
        return events_from_frame(frame, **layout)
    known = {"type_names": tuple(type_names), "num_types": len(type_names)}
    return events_from_frame(frame, **{**layout, **known})


def labels_for(data: Series, given: Mapping[str, Any], task: str) -> np.ndarray | None:
    """Return labels from another table, if there is one; None if the data have their own."""
    if task not in SERIES_TASKS:
        return None
    target, labels = given.get("target"), given.get("labels")
    # Files in npz and .ts format bring their labels along.
    has_labels = given.get("id") is None and getattr(data, "labels", None) is not None
    if not target and (labels or not has_labels):
        where = ": the column of --labels" if labels else f" for {task}: the column"
        raise Misuse(f"--target is needed{where} to predict")
    if not labels:
        return None
    id = given.get("labels_id") or given.get("id")
    return np.asarray(_join(data, labels, id, label=one_or_all(target)).labels)


def static_elsewhere(given: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the static columns that the table lacks and the one of `--labels` has."""
    static, labels = given.get("static"), given.get("labels")
    if not static or not labels:
        return ()
    from osciformer.data.tables import check_columns

    here, there = [] if format_of(path) == "own" else _names(path), _names(Path(labels))
    if given.get("variable") is None:  # else it may be the name of a variable
        check_columns((*here, *there), static)
    return tuple(name for name in static if name not in here and name in there)


def join_static(
    data: Series, names: Sequence[str], *, labels: str | Path | None, labels_id: str | None
) -> Series:
    """Return the series with these static features from a table with a row per series."""
    if not names:
        return data
    if labels is None:
        raise Misuse(
            f"the table lacks {', '.join(names)}, one value per series, which the model was "
            "trained with; pass --labels with a table that has a row per series and these columns"
        )
    from osciformer.data.series import add_static

    found = _join(data, labels, labels_id, static=names).static
    assert found is not None
    if is_streamed(data):
        return data.with_static(found, names)  # type: ignore[union-attr]
    return add_static(data, found, names)  # type: ignore[arg-type]


def _join(data: Series, path: str | Path, id: str | None, **columns: Any) -> IrregularSeries:
    """Return series of the same ids, without rows, with columns of a table of a row per series."""
    if id is None:
        raise Misuse("--labels-id is needed: the column of ids in --labels")
    from osciformer.data import IrregularSeries, join_frame

    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    bare = IrregularSeries(np.empty(0), np.empty((0, 1)), offsets, ids=data.ids)
    return join_frame(bare, read_frame(Path(path)), id=id, **columns)


def read_frame(path: Path) -> Any:
    """Return a CSV file, a Parquet file or a folder of such as an Arrow table."""
    refuse_absent(path)
    from osciformer.data.files import damage_named, load_parquet, parquet_files

    if format_of(path) != "csv":
        return load_parquet(parquet_files(path))
    with damage_named(path, "CSV"):
        return need("pyarrow.csv", extra="data").read_csv(path)


def _names(path: Path) -> list[str]:
    from osciformer.data.files import damage_named

    kind = "csv" if format_of(path) == "csv" else "parquet"
    with damage_named(path, kind):
        return list(need("pyarrow.dataset", extra="data").dataset(path, format=kind).schema.names)


def is_streamed(data: Series) -> bool:
    """Return whether the series are read from disk as needed."""
    return hasattr(data, "read_blocks")


def describe(data: Series) -> str:
    """Return how much there is, in a line."""
    where, name = ("read from disk", "num_rows") if is_streamed(data) else ("in memory", "lengths")
    count, features = getattr(data, name).sum(), len(data.feature_names)
    return f"{len(data)} series, {count} rows, {features} features, {where}"


def parts_of(data: Any, size: int = CHUNK_SERIES) -> Iterator[Any]:
    """Yield series or sequences in order, a bounded part at a time, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from osciformer.data.inputs import chunks

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=len(data))
        for chunk in chunks(data):
            for start in range(0, len(chunk), size):
                part = chunk[start : start + size]
                yield part
                bar.advance(task, len(part))


def check_ending(path: Path, endings: Sequence[str]) -> None:
    """Refuse a file whose ending names no format that can be written."""
    if path.suffix.lower() not in endings:
        raise Misuse(f"{path} must end in {' or '.join(endings)}, which says the format")


def write_table(path: Path, parts: Iterable[Mapping[str, Any]]) -> int:
    """Write a table, given part by part as arrays by name, and return its number of rows."""
    pa = need("pyarrow", extra="data")
    kind, name = ("csv", "CSV") if path.suffix.lower() == ".csv" else ("parquet", "Parquet")
    make = getattr(need(f"pyarrow.{kind}", extra="data"), f"{name}Writer")
    writer, num_rows = None, 0
    with replacing(path) as file, ExitStack() as stack:
        for columns in parts:
            table = pa.table({name: pa.array(array) for name, array in columns.items()})
            if writer is None:
                schema, writer = table.schema, stack.enter_context(make(file, table.schema))
            writer.write_table(table.cast(schema))
            num_rows += len(table)
    return num_rows


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output; all but the first column are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width at which text would have to be cut off.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    console.print(title)
    console.print(table)
