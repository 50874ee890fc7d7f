"""From files to series: layout, labels of another table, and tables too large for memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer._optional import need
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.settings import SERIES_TASKS

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries, Layout, ParquetSeries

# A Parquet file of this size is read from disk in each epoch; in memory it is several times larger.
STREAM_BYTES = 256 * 2**20
# Series that are predicted at a time.
CHUNK_SERIES = 4096

CSV_ENDINGS = (".csv", ".csv.gz")
_SELF_DESCRIBING = (".npz", ".ts", ".ts.gz")
_LAYOUT_SETTINGS = ("variable", "value", "unit", "origin", "time_format", "duplicates", "empty")


def make_layout(given: Mapping[str, Any], task: str, path: Path) -> Layout | None:
    """Return which column means what; None for files that say it themselves."""
    if is_self_describing(path):
        return None
    for name in ("id", "time"):
        if given.get(name) is None:
            raise CommandError(f"--{name} is needed: the column of {path} that holds it", MISUSED)
    from osciformer.data import Layout  # which takes a second, so that errors come first

    label = given.get("target") if task in SERIES_TASKS and not given.get("labels") else None
    chosen = {name: given[name] for name in _LAYOUT_SETTINGS if given.get(name) is not None}
    return Layout(
        id=given["id"],
        time=given["time"],
        values=given.get("features"),
        static=given.get("static") or (),
        label=label if label is None or len(label) > 1 else label[0],
        **chosen,
    )


def is_self_describing(path: Path) -> bool:
    """Return whether a file says itself what is what, by its ending."""
    return path.name.lower().endswith(_SELF_DESCRIBING)


def refuse_absent(path: Path) -> None:
    """Refuse a path at which there is nothing, before anything is imported or read."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; check the path")


def open_table(
    path: Path, layout: Layout | None, *, stream: bool | None = None
) -> IrregularSeries | ParquetSeries:
    """Return the series of a file, in memory or on disk.

    Args:
        path: The file, or a folder of Parquet files.
        layout: Which column means what.
        stream: Read from disk as needed; None decides by the size.
    """
    refuse_absent(path)
    from osciformer.data import ParquetSeries, read_table

    if stream and not is_parquet(path):
        raise CommandError(f"--stream reads Parquet only, not {path}; convert it first", MISUSED)
    if stream is None:
        stream = is_parquet(path) and _size(path) > STREAM_BYTES
    if layout is None:
        if not is_self_describing(path):
            raise CommandError(
                f"the model was trained on a file that needs no columns, so that those of {path} "
                f"mean nothing to it; give a file that ends in {', '.join(_SELF_DESCRIBING)}"
            )
        return refuse_empty(read_table(path), "error")
    if stream:
        return ParquetSeries(path, layout)
    return refuse_empty(read_table(path, layout.replace(empty="keep")), layout.empty)


def is_parquet(path: Path) -> bool:
    """Return whether a path stands for Parquet: a file by its ending, or a folder."""
    return path.is_dir() or path.suffix.lower() in (".parquet", ".pq")


def refuse_empty(series: IrregularSeries, empty: str) -> IrregularSeries:
    """Return the series after doing what `--empty` says about those without values."""
    if len(series) and (series.num_observed == 0).all():
        raise CommandError(
            f"all values of all {len(series)} series are missing; check which columns hold the "
            f"values. The features are {', '.join(series.feature_names)}"
        )
    return series.settle_empty(empty)  # type: ignore[arg-type]


def find_labels(
    data: IrregularSeries | ParquetSeries, path: Path, id: str, target: Sequence[str]
) -> np.ndarray:
    """Return the labels of the series from a table with a row per series.

    Args:
        data: The series.
        path: The table.
        id: Its column of ids.
        target: Its label column or columns.
    """
    from osciformer.data import join_frame

    label = target[0] if len(target) == 1 else list(target)
    return np.asarray(join_frame(without_rows(data), read_frame(path), id=id, label=label).labels)


def without_rows(data: IrregularSeries | ParquetSeries) -> IrregularSeries:
    """Return series of the same ids that hold nothing, to join another table to."""
    from osciformer.data import IrregularSeries

    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    return IrregularSeries(np.empty(0), np.empty((0, 1)), offsets, ids=data.ids)


def labels_for(
    data: IrregularSeries | ParquetSeries, given: Mapping[str, Any], task: str
) -> np.ndarray | None:
    """Return labels from another table, if there is one; None if the data have their own."""
    if task not in SERIES_TASKS:
        return None
    target = given.get("target")
    if given.get("labels"):
        if not target:
            raise CommandError("--target is needed: the column of --labels to predict", MISUSED)
        id = given.get("labels_id") or given.get("id")
        if id is None:
            raise CommandError("--labels-id is needed: the column of ids in --labels", MISUSED)
        return find_labels(data, Path(given["labels"]), id, target)
    # Files in npz and .ts format bring their labels along.
    has_labels = given.get("id") is None and getattr(data, "labels", None) is not None
    if not target and not has_labels:
        raise CommandError(f"--target is needed for {task}: the column to predict", MISUSED)
    return None


def read_frame(path: Path) -> Any:
    """Return a CSV or Parquet file as an Arrow table."""
    from osciformer.data import UnreadableFileError

    pa = need("pyarrow", extra="data")
    if not path.is_file():
        raise CommandError(f"there is no file {path}; check the path")
    try:
        if path.name.lower().endswith(CSV_ENDINGS):
            return need("pyarrow.csv", extra="data").read_csv(path)
        return need("pyarrow.parquet", extra="data").read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UnreadableFileError(
            f"{path} cannot be read as CSV or Parquet; it may be cut off: {error}"
        ) from error


def column_names(path: Path) -> list[str]:
    """Return the columns of a CSV file, a Parquet file or a folder of such."""
    from osciformer.data import UnreadableFileError
    from osciformer.data.files import existing_file, parquet_files, parquet_schema

    if not path.name.lower().endswith(CSV_ENDINGS):
        return list(parquet_schema(parquet_files(path)).names)
    pa, reader = need("pyarrow", extra="data"), need("pyarrow.csv", extra="data")
    existing_file(path)
    try:
        with reader.open_csv(path) as file:
            return list(file.schema.names)
    except (pa.ArrowInvalid, OSError) as error:
        raise UnreadableFileError(f"{path} cannot be read as CSV: {error}") from error


def prediction_layout(saved: Layout | Mapping[str, Any] | None, features: Sequence[str]) -> Any:
    """Return the layout of training for another table, without labels.

    In a table of (id, time, variable, value) a variable that does not occur is missing throughout;
    a column that is not there is an error.
    """
    from osciformer.data import Layout

    if saved is None:
        return None
    layout = saved if isinstance(saved, Layout) else Layout.from_dict(dict(saved))
    return layout.replace(
        values=tuple(features), label=None, empty="keep", allow_absent=layout.is_narrow
    )


def chunks(
    data: IrregularSeries | ParquetSeries, size: int = CHUNK_SERIES
) -> Iterator[IrregularSeries]:
    """Yield the series in order, a bounded part at a time."""
    parts = data.chunks() if hasattr(data, "chunks") else (data,)
    for part in parts:
        for start in range(0, len(part), size):
            yield part[start : start + size]


def is_streamed(data: IrregularSeries | ParquetSeries) -> bool:
    """Return whether the series are read from disk as needed."""
    return hasattr(data, "read_blocks")


def describe(data: IrregularSeries | ParquetSeries) -> str:
    """Return how much there is, in a line.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> describe(IrregularSeries.from_arrays([[0.0, 1.0]], [[1.0, 2.0]]))
        '1 series, 2 rows, 1 features, in memory'
    """
    is_stream = is_streamed(data)
    lengths: np.ndarray = getattr(data, "num_rows" if is_stream else "lengths")
    where = "read from disk" if is_stream else "in memory"
    return f"{len(data)} series, {lengths.sum()} rows, {len(data.feature_names)} features, {where}"


def _size(path: Path) -> int:
    files = path.rglob("*.parquet") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
