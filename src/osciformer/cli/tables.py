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
from osciformer._text import printable
from osciformer.cli.errors import CommandError, Misuse
from osciformer.config import SERIES_TASKS

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries, Layout, ParquetSeries
    from osciformer.events import EventSequences

    Series = IrregularSeries | ParquetSeries

# A larger Parquet file is read from disk in each epoch; in memory it is several times larger.
STREAM_BYTES = 256 * 2**20
_FORMULA_STARTS = ("=", "+", "-", "@")  # of a formula, in a spreadsheet
CHUNK_SERIES = 4096  # that are predicted at a time
TABLE_ENDINGS = (".parquet", ".csv")
_SELF_DESCRIBING = (".npz", ".ts", ".ts.gz")
_TIME_SETTINGS = ("unit", "origin", "time_format", "duplicates")
_VALUE_SETTINGS = ("variable", "value", "static", "empty", "guess_types")
_SERIES_SETTINGS = ("id", "time", *_VALUE_SETTINGS, *_TIME_SETTINGS)
_EVENT_SETTINGS = ("id", "time", "start", "end", "time_unit", "num_types", *_TIME_SETTINGS)


def make_layout(given: Mapping[str, Any], task: str, path: Path) -> Layout | None:
    """Return which column means what; None for files that say it themselves."""
    if format_of(path) == "own":
        return None
    chosen = _columns(given, path, _SERIES_SETTINGS)
    from osciformer.data import Layout  # slow to import; wrong calls are refused before

    label = label_of(given, task) if task in SERIES_TASKS and not given.get("labels") else None
    return Layout(values=given.get("features"), label=label, **chosen)


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


def label_of(given: Mapping[str, Any], task: str) -> Any:
    """Return the target as a layout has it: a name for classes, a list for real targets."""
    names = given.get("target") or None
    is_class = task == "classification" and names is not None and len(names) == 1
    return names[0] if names is not None and is_class else names


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
    id, type = layout.get("id", "id"), layout["type"]
    frame = read_frame(path, dict.fromkeys((id, type or id), "text"))
    from osciformer.events import events_from_frame

    if type is None:
        return events_from_frame(frame, **layout)
    if type_names is None:
        return events_from_frame(_with_whole_numbers(frame, type), **layout)
    known = {"type_names": tuple(type_names), "num_types": len(type_names)}
    return events_from_frame(frame, **{**layout, **known})


def _with_whole_numbers(frame: Any, name: str) -> Any:
    """Return the table with types that are text as integers, if all are: 0, 1, ..., but not 01."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    if name not in frame.column_names or not pa.types.is_string(frame.column(name).type):
        return frame
    column = frame.column(name)
    if not pc.all(pc.match_substring_regex(column, r"^(0|[1-9]\d{0,8})$")).as_py():
        return frame
    return frame.set_column(frame.column_names.index(name), name, column.cast(pa.int64()))


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
    guess = bool(given.get("guess_types"))
    return np.asarray(_join(data, labels, id, guess, label=label_of(given, task)).labels)


def static_elsewhere(given: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the static columns that the table lacks and the one of `--labels` has."""
    static, labels = given.get("static"), given.get("labels")
    if not static or not labels:
        return ()
    from osciformer.data.tables import check_columns

    here, there = [] if format_of(path) == "own" else column_names(path), column_names(Path(labels))
    if given.get("variable") is None:  # else it may be the name of a variable
        check_columns((*here, *there), static)
    return tuple(name for name in static if name not in here and name in there)


def join_static(
    data: Series,
    names: Sequence[str],
    *,
    labels: str | Path | None,
    labels_id: str | None,
    guess_types: bool = False,
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

    found = _join(data, labels, labels_id, guess_types, static=names).static
    assert found is not None
    if is_streamed(data):
        return data.with_static(found, names)  # type: ignore[union-attr]
    return add_static(data, found, names)  # type: ignore[arg-type]


def _join(
    data: Series, path: str | Path, id: str | None, guess_types: bool, **columns: Any
) -> IrregularSeries:
    """Return series of the same ids, without rows, with columns of a table of a row per series."""
    if id is None:
        raise Misuse("--labels-id is needed: the column of ids in --labels")
    from osciformer.data import IrregularSeries, join_frame

    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    bare = IrregularSeries(np.empty(0), np.empty((0, 1)), offsets, ids=data.ids)
    static, label = columns.get("static") or (), columns.get("label") or ()
    text, numbers = ([id, label], static) if isinstance(label, str) else ([id], (*static, *label))
    types = dict.fromkeys(numbers, "number")
    types |= {} if guess_types else dict.fromkeys(text, "text")
    return join_frame(bare, read_frame(Path(path), types), id=id, **columns)


def read_frame(path: Path, types: Mapping[str, str]) -> Any:
    """Return a CSV file, a Parquet file or a folder of such as an Arrow table.

    `types` are those of columns of CSV, `text` or `number`; those of the others are guessed.
    """
    refuse_absent(path)
    from osciformer.data.files import csv_options, damage_named, load_parquet, parquet_files

    if format_of(path) != "csv":
        return load_parquet(parquet_files(path))
    with damage_named(path, "CSV"):
        return need("pyarrow.csv", extra="data").read_csv(path, **csv_options(path, types))


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a CSV file, a Parquet file or a folder."""
    from osciformer.data.files import csv_names, parquet_files, parquet_schema

    if format_of(path) == "csv":
        return csv_names(path)
    return list(parquet_schema(parquet_files(path)).names)


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


def side_by_side(
    keys: Mapping[str, Any], answers: Mapping[str, Any], renamed: dict[str, str]
) -> dict[str, Any]:
    """Return the columns of both; answers that are called like keys get another name.

    `renamed` is told which, by their own names.
    """
    columns = dict(keys)
    for name, array in answers.items():
        free = name
        while free in columns or (free != name and free in answers):
            free += "_"
        if free != name:
            renamed[name] = free
        columns[free] = array
    return columns


def spreadsheet_safe(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns whose text no spreadsheet takes for a formula: an apostrophe comes before."""

    def safe(text: Any) -> str:
        return f"'{text}" if str(text).lstrip()[:1] in _FORMULA_STARTS else str(text)

    return {
        safe(name): np.array([safe(item) for item in array]) if array.dtype.kind in "UO" else array
        for name, array in columns.items()
    }


def write_table(path: Path, parts: Iterable[Mapping[str, Any]]) -> int:
    """Write a table, given part by part as arrays by name, and return its number of rows."""
    pa = need("pyarrow", extra="data")
    kind, name = ("csv", "CSV") if path.suffix.lower() == ".csv" else ("parquet", "Parquet")
    make = getattr(need(f"pyarrow.{kind}", extra="data"), f"{name}Writer")
    options = {} if kind == "csv" else {"write_page_checksum": True}
    writer, num_rows = None, 0
    with replacing(path) as file, ExitStack() as stack:
        for columns in parts:
            table = pa.table({name: pa.array(array) for name, array in columns.items()})
            if writer is None:
                schema = table.schema
                writer = stack.enter_context(make(file, schema, **options))
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
        table.add_row(*map(printable, row))  # names come from the data
    # A file or a pipe has no width at which text would have to be cut off.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    console.print(title)
    console.print(table)
