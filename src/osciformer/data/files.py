"""Series from files and to files: CSV, Parquet and npz; `read_ts` for the archives' format."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer.data.checks import name_some
from osciformer.data.columns import check_layout
from osciformer.data.errors import UnreadableFileError
from osciformer.data.frames import from_frame
from osciformer.data.layout import Layout, make_layout
from osciformer.data.series import IrregularSeries
from osciformer.data.time_axis import TimeAxis
from osciformer.data.ts_files import read_ts

__all__ = ["load_npz", "read_csv", "read_parquet", "read_table", "read_ts", "save_npz"]

NPZ_FORMAT = "osciformer series 1"
_NPZ_ARRAYS = ("times", "values", "offsets", "ids", "static", "labels", "origins")


def read_table(path: str | Path, layout: Layout | None = None, **settings: Any) -> IrregularSeries:
    """Return the series of a file of any format that is known by its ending.

    Files in npz and `.ts` format say themselves what is what; `layout` is then not looked at.

    Args:
        path: A file that ends in .csv, .csv.gz, .parquet, .npz, .ts or .ts.gz; or a folder of
            Parquet files.
        layout: Which column means what, for CSV and Parquet; or give the arguments of `Layout`.
        **settings: Arguments of `Layout`.
    """
    path = Path(path)
    name = path.name.lower()
    if name.endswith((".npz", ".ts", ".ts.gz")):
        return load_npz(path) if name.endswith(".npz") else read_ts(path)
    if name.endswith((".csv", ".csv.gz")):
        return read_csv(path, layout, **settings)
    if name.endswith((".parquet", ".pq")) or path.is_dir():
        return read_parquet(path, layout, **settings)
    raise ValueError(
        f"{path} has an ending that is not known; use .csv, .csv.gz, .parquet, .npz, .ts or .ts.gz"
    )


def read_csv(
    path: str | Path,
    layout: Layout | None = None,
    *,
    delimiter: str = ",",
    missing: Sequence[str] = ("", "NA", "NaN", "nan", "null", "?"),
    **settings: Any,
) -> IrregularSeries:
    """Return the series of a CSV file with a header line.

    Args:
        path: The file, also compressed as `.csv.gz`.
        layout: Which column means what; or give the arguments of `Layout` by name.
        delimiter: What separates columns.
        missing: Texts that stand for a missing value.
        **settings: Arguments of `Layout`.
    """
    pa, csv = need("pyarrow", extra="data"), need("pyarrow.csv", extra="data")
    layout, path = make_layout(layout, settings), existing_file(path)
    parse = csv.ParseOptions(delimiter=delimiter)
    # Types are guessed from the first block alone: numbers are therefore declared as such.
    read = csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), 1 << 26))
    try:
        with csv.open_csv(path, parse_options=parse, read_options=read) as reader:
            names = reader.schema.names
        check_layout(names, layout)
        numbers = [name for name in names if name not in layout.columns]
        if layout.value is not None:
            numbers = [layout.value, *(name for name in layout.static if name in names)]
        elif layout.values is not None:
            wanted = {*layout.values, *layout.static}
            numbers = [name for name in names if name in wanted]
        kept = list(dict.fromkeys((*layout.columns, *numbers)))
        convert = csv.ConvertOptions(
            include_columns=kept,
            column_types=dict.fromkeys(numbers, pa.float64()),
            null_values=list(missing),
            strings_can_be_null=True,
        )
        table = csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    except (pa.ArrowInvalid, OSError) as error:
        raise UnreadableFileError(
            f"{path} cannot be read as CSV: {error}{_csv_hint(error)}"
        ) from error
    return from_frame(table, layout)


def read_parquet(
    path: str | Path, layout: Layout | None = None, **settings: Any
) -> IrregularSeries:
    """Return the series of a Parquet file, or of a folder of such files, all in memory.

    `ParquetSeries` reads tables that are larger than memory.

    Args:
        path: The file or folder.
        layout: Which column means what; or give the arguments of `Layout` by name.
        **settings: Arguments of `Layout`.
    """
    pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
    layout = make_layout(layout, settings)
    files = parquet_files(path)
    names = parquet_columns(parquet_schema(files).names, layout)
    tables = []
    for file in files:
        try:
            tables.append(parquet.read_table(file, columns=names))
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable_parquet(file, error) from error
    return from_frame(pa.concat_tables(tables), layout)


def parquet_files(path: str | Path) -> list[Path]:
    """Return the Parquet files that a path stands for, in the order of their names."""
    path = Path(path)
    if not path.is_dir():
        return [existing_file(path)]
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"the folder {path} holds no file that ends in .parquet")
    return files


def parquet_schema(files: Sequence[Path]) -> Any:
    """Return the Arrow schema that all of the files have."""
    pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
    schemas = []
    for path in files:
        try:
            schemas.append(parquet.read_schema(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable_parquet(path, error) from error
        if not schemas[-1].equals(schemas[0], check_metadata=False):
            differ = set(map(str, schemas[-1])) ^ set(map(str, schemas[0]))
            raise ValueError(
                f"{path} and {files[0]} must have the same columns, in the same order and of the "
                f"same types; they differ in {name_some(sorted(differ))}"
            )
    return schemas[0]


def parquet_columns(present: Sequence[str], layout: Layout) -> list[str] | None:
    """Return the columns that need to be read; None for all."""
    check_layout(present, layout)
    if layout.values is None and not layout.is_narrow:
        return None
    wanted = (*layout.columns, *layout.static, *(() if layout.is_narrow else layout.values or ()))
    return [name for name in dict.fromkeys(wanted) if name in present]


def unreadable_parquet(path: Path, error: Exception) -> UnreadableFileError:
    """Return the error for a file that is not Parquet or is damaged."""
    return UnreadableFileError(
        f"{path} cannot be read as Parquet; it may be cut off, or have another format: {error}"
    )


def save_npz(series: IrregularSeries, path: str | Path) -> None:
    """Write the series to an npz file, without pickled objects; replaces the file as a whole.

    Args:
        series: The series.
        path: The file to write; should end in .npz.
    """
    path = Path(path)
    arrays = {name: getattr(series, name) for name in _NPZ_ARRAYS}
    description = {
        "format": NPZ_FORMAT,
        "feature_names": series.feature_names,
        "static_names": series.static_names,
        "time_axis": series.time_axis.to_dict(),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                allow_pickle=False,
                description=np.array(json.dumps(description)),
                **{name: array for name, array in arrays.items() if array is not None},
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_npz(path: str | Path) -> IrregularSeries:
    """Return the series that `save_npz` wrote. Loading never executes code.

    Args:
        path: The file.

    Raises:
        UnreadableFileError: If the file is damaged or was not written by `save_npz`.
    """
    path = existing_file(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
        raise UnreadableFileError(
            f"{path} cannot be read as npz; it may be cut off, or hold pickled objects: {error}"
        ) from error
    try:
        description = json.loads(str(arrays.pop("description")))
        if description.pop("format") != NPZ_FORMAT:
            raise ValueError(f"the format is not {NPZ_FORMAT!r}")
        axis = TimeAxis.from_dict(description.pop("time_axis"))
        if "static" not in arrays:
            description.pop("static_names")
        return IrregularSeries(**arrays, **description, time_axis=axis)
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFileError(
            f"{path} was not written by save_npz ({error!r}); it holds {name_some(arrays)}. "
            "Build the series from its arrays with IrregularSeries.from_padded or from_arrays"
        ) from error


def existing_file(path: str | Path) -> Path:
    """Return the path if a file is there."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; a file is needed here")
    return path


def _csv_hint(error: Exception) -> str:
    if "conversion error" not in str(error):
        return ""
    return (
        ". Feature columns must hold numbers: name them with values=[...] to leave others out, or "
        "list the texts that mean missing: missing=['?', ...]"
    )
