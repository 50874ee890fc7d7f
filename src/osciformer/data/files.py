"""Series from files and to files: CSV, Parquet, npz, and the `.ts` format of the UEA archive."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from osciformer._files import replacing
from osciformer._optional import need
from osciformer._text import check_choice, name_some
from osciformer._types import Float
from osciformer.data.errors import UnreadableFileError
from osciformer.data.ragged import Duplicates, Rows, offsets_of, pivot_variables
from osciformer.data.series import NANOSECONDS, Empty, IrregularSeries, TimeAxis
from osciformer.data.tables import Layout, check_layout, from_frame, make_layout

NPZ_FORMAT = "osciformer series 1"
_NPZ_ARRAYS = ("times", "values", "offsets", "ids", "static", "labels", "origins")

# "(time,value)"; a time may hold colons, as dates do, but no parenthesis.
_PAIR = re.compile(r"\(([^()]*),([^(),]*)\)")
# A colon between dimensions, unlike one inside a date.
_BETWEEN = re.compile(r":(?=\s*(?:\(|\?|$))")
_MISSING = {"?", "nan", ""}
_CSV_HINT = (
    ". Feature columns must hold numbers: name them with values=[...] to leave others out, or "
    "list the texts that mean missing: missing=['?', ...]"
)


def read_table(path: str | Path, layout: Layout | None = None, **settings: Any) -> IrregularSeries:
    """Return the series of a file, whose format its ending tells.

    Files in npz and `.ts` format describe themselves; `layout` is ignored for them.

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
        f"{path} has an unknown ending; use .csv, .csv.gz, .parquet, .npz, .ts or .ts.gz"
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
    # Arrow guesses types from the first block only, so numbers are declared as such.
    read = csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), 1 << 26))
    with damage_named(path, "CSV", _CSV_HINT):
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
    layout = make_layout(layout, settings)
    files = parquet_files(path)
    return from_frame(load_parquet(files, parquet_columns(parquet_schema(files), layout)), layout)


def load_parquet(files: Sequence[Path], columns: Sequence[str] | None = None) -> Any:
    """Return the Arrow table of some Parquet files, or of some of their columns."""
    pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
    tables = []
    for file in files:
        with damage_named(file):
            tables.append(parquet.read_table(file, columns=columns))
    return pa.concat_tables(tables)


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
    parquet, schemas = need("pyarrow.parquet", extra="data"), []
    for path in files:
        with damage_named(path):
            schemas.append(parquet.read_schema(path))
        if not schemas[-1].equals(schemas[0], check_metadata=False):
            differ = set(map(str, schemas[-1])) ^ set(map(str, schemas[0]))
            raise ValueError(
                f"{path} and {files[0]} must have the same columns, in the same order and of the "
                f"same types; they differ in {name_some(sorted(differ))}"
            )
    return schemas[0]


def parquet_columns(schema: Any, layout: Layout) -> list[str] | None:
    """Return the columns to read, which the files have; None for all."""
    check_layout(schema.names, layout)
    if layout.values is None and not layout.is_narrow:
        return None
    wanted = (*layout.columns, *layout.static, *(() if layout.is_narrow else layout.values or ()))
    return [name for name in dict.fromkeys(wanted) if name in schema.names]


@contextlib.contextmanager
def damage_named(path: Path, kind: str = "Parquet", hint: str = "") -> Iterator[None]:
    """Turn Arrow's error about a damaged file into one that names the file.

    `hint` says what to do about entries that are not numbers.
    """
    try:
        yield
    except (need("pyarrow", extra="data").ArrowInvalid, OSError) as error:
        what = hint if "conversion error" in str(error) else ""
        raise UnreadableFileError(
            f"{path} cannot be read as {kind}; it may be cut off, or have another format: "
            f"{error}{what}"
        ) from error


def existing_file(path: str | Path) -> Path:
    """Return the path of a file that exists."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; a file is needed here")
    return path


def save_npz(series: IrregularSeries, path: str | Path) -> None:
    """Write the series to an npz file, without pickled objects; replaces the file as a whole.

    Args:
        series: The series.
        path: The file to write; should end in .npz.
    """
    arrays = {name: getattr(series, name) for name in _NPZ_ARRAYS}
    description = {
        "format": NPZ_FORMAT,
        "feature_names": series.feature_names,
        "static_names": series.static_names,
        "time_axis": series.time_axis.to_dict(),
    }
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            description=np.array(json.dumps(description)),
            **{name: array for name, array in arrays.items() if array is not None},
        )


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


def read_ts(
    path: str | Path,
    *,
    unit: str = "s",
    duplicates: Duplicates = "error",
    empty: Empty = "error",
) -> IrregularSeries:
    """Return the series of a `.ts` file, at the times that the file gives.

    With `@timestamps true` a value is written as `(time,value)`, and the dimensions of a series may
    have been measured at different times: a series then gets a row for each time of any dimension,
    with NaN for the others. Without timestamps, step k is time k. `?` is a missing value. Class
    labels stay text; the targets of regression files are float64.

    Args:
        path: The file, also compressed as `.ts.gz`.
        unit: Unit of the times if the timestamps are dates: ns, us, ms, s, min, h or d. Each series
            then begins at 0.
        duplicates: What to do about several values of a dimension at one time: `error`, `mean`,
            `last` or `keep`.
        empty: What to do about series without any value: `error`, `drop` or `keep`.

    Returns:
        The series, with ids 0, 1, ... in the order of the file.

    Raises:
        UnreadableFileError: If the file is not in this format, or ends too early.
    """
    check_choice("unit", unit, tuple(NANOSECONDS))
    check_choice("duplicates", duplicates, get_args(Duplicates))
    file = _TsFile(Path(path))
    axis, origins = TimeAxis(), None
    rows = file.rows_by_time(duplicates) if file.has_timestamps else file.rows_by_step()
    if file.is_dated:
        axis = TimeAxis("datetime", unit=unit, resolution="us", origin="series")
        ticks, lengths = rows.times.astype(np.int64), np.diff(rows.offsets)
        origins = np.zeros(len(lengths), dtype=np.int64)
        origins[lengths > 0] = ticks[rows.offsets[:-1][lengths > 0]]
        rows = rows._replace(times=axis.encode(ticks, np.repeat(origins, lengths)))
    return IrregularSeries(
        *rows,
        labels=np.array(file.labels) if file.is_labelled else None,
        feature_names=file.names,
        time_axis=axis,
        origins=origins,
    ).settle_empty(empty)


class _TsFile:
    """The content of a `.ts` file, one series per line.

    Attributes:
        tags: What the lines that begin with `@` say, by name in lower case.
        cases: Line number of each series, and times (as text, or none) and values per dimension.
        labels: Class (text) or target (float) of each series, if there are any.
        is_dated: Whether the timestamps are dates.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tags, self.is_dated = path, dict[str, str](), False
        self.cases: list[tuple[int, list[tuple[list[str], Float[np.ndarray, "N"]]]]] = []
        self.labels: list[Any] = []
        in_data = False
        try:
            # Comments of the archives' files are not always UTF-8; nothing else may be otherwise.
            with (gzip.open if path.suffix == ".gz" else open)(
                path, "rt", encoding="utf-8", errors="surrogateescape"
            ) as file:
                for number, raw in enumerate(file, start=1):
                    line = raw.strip()
                    if not line or line.startswith(("#", "%")):
                        continue
                    if in_data:
                        self._add_series(line, number)
                    elif line.lower() == "@data":
                        in_data = True
                        self._read_tags()
                    elif line.startswith("@") and len(line) > 1:
                        name, *rest = line[1:].split(maxsplit=1)
                        self.tags[name.lower()] = "".join(rest)
                    else:
                        raise self._error(
                            number,
                            f"expected a header line that begins with '@'; got {line[:40]!r}. This "
                            "does not seem to be a .ts file",
                        )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UnreadableFileError(f"{path} is damaged, or is cut off: {error}") from error
        if not self.cases:
            lacks = "series after @data" if in_data else "@data line; it may not be a .ts file"
            raise UnreadableFileError(f"{path} has no {lacks}, or is cut off")
        self.names = tuple(f"dim_{number}" for number in range(len(self.cases[0][1])))

    def _error(self, line: int, message: str) -> UnreadableFileError:
        return UnreadableFileError(f"{self.path}, line {line}: {message}")

    def _read_tags(self) -> None:
        """Set what the header says about the lines that follow."""

        def is_true(name: str) -> bool:
            return self.tags.get(name, "").lower().split()[:1] == ["true"]

        def number(*names: str) -> int | None:
            given = next((self.tags[name] for name in names if name in self.tags), "")
            return int(given) if given.isdigit() else None

        self.has_timestamps, self.has_targets = is_true("timestamps"), is_true("targetlabel")
        self.is_labelled = is_true("classlabel") or self.has_targets
        self.classes = self.tags.get("classlabel", "").split()[1:]
        self.num_dimensions = 1 if is_true("univariate") else number("dimensions", "dimension")
        self.has_equal_length = is_true("equallength") and not self.has_timestamps
        self.length = number("serieslength")

    def _add_series(self, line: str, number: int) -> None:
        """Read one line, and refuse it if it is not what the header promises."""
        if self.is_labelled:
            line, colon, label = line.rpartition(":")
            label = label.strip()
            if not colon or not label or label.endswith(")"):
                raise self._error(number, "there is no label at the end; the line may be cut off")
            if self.classes and label not in self.classes:
                known = name_some(self.classes)
                raise self._error(
                    number, f"class {label!r} is not one of {known}; the line may be cut off"
                )
            if self.has_targets and not _is_number(label):
                raise self._error(
                    number, f"the target {label!r} is not a number; the line may be cut off"
                )
            self.labels.append(float(label) if self.has_targets else label)
        try:
            if self.has_timestamps:
                dimensions = [_split_pairs(part) for part in _BETWEEN.split(line)]
            else:
                dimensions = [([], _numbers(part.split(","))) for part in line.split(":")]
        except ValueError as error:
            raise self._error(number, str(error)) from None
        if not self.cases:
            self.num_dimensions = self.num_dimensions or len(dimensions)
            self.length = len(dimensions[0][1]) if self.length is None else self.length
        if len(dimensions) != self.num_dimensions:
            raise self._error(
                number,
                f"{len(dimensions)} dimensions where {self.num_dimensions} are expected; the line "
                "may be cut off",
            )
        for position, (_, values) in enumerate(dimensions):
            if self.has_equal_length and len(values) != self.length:
                raise self._error(
                    number,
                    f"dimension {position} has {len(values)} values and @equalLength promises "
                    f"{self.length}; the line may be cut off",
                )
        self.cases.append((number, dimensions))

    def rows_by_step(self) -> Rows:
        """Return values at the times 0, 1, ...; shorter dimensions end in NaN."""
        tables = []
        for _, dimensions in self.cases:
            length = max(len(values) for _, values in dimensions)
            table = np.full((length, len(dimensions)), np.nan, dtype=np.float32)
            for position, (_, values) in enumerate(dimensions):
                table[: len(values), position] = values
            tables.append(table)
        times = np.concatenate([np.arange(len(table), dtype=np.float64) for table in tables])
        offsets = offsets_of(np.array([len(table) for table in tables]))
        return Rows(times, np.concatenate(tables), offsets)

    def rows_by_time(self, duplicates: Duplicates) -> Rows:
        """Return a row for each time of any dimension; dates are microseconds since 1970."""
        stamps = (stamps[0] for _, case in self.cases for stamps, _ in case if stamps)
        self.is_dated = not _is_number(next(stamps, "0"))
        lengths = [[len(values) for _, values in case] for _, case in self.cases]
        owner = np.repeat(np.arange(len(lengths)), [sum(counts) for counts in lengths])
        feature = np.concatenate([np.repeat(np.arange(len(row)), row) for row in lengths])
        ticks = np.concatenate(
            [self._read_stamps(stamps, line) for line, case in self.cases for stamps, _ in case]
        )
        values = np.concatenate([values for _, case in self.cases for _, values in case])
        order = np.lexsort((ticks, owner))
        order = order[~np.isnan(values[order])]
        return pivot_variables(
            *(column[order] for column in (owner, ticks, feature, values)),
            ids=np.arange(len(self.cases)),
            feature_names=self.names,
            duplicates=duplicates,
        )

    def _read_stamps(self, stamps: list[str], line: int) -> Float[np.ndarray, "N"]:
        """Return numbers, or microseconds since 1970, which float64 holds exactly until 2255."""
        try:
            if self.is_dated:
                dates = np.array(stamps, dtype="datetime64[us]")
                if np.isnat(dates).any():
                    raise ValueError("a date is missing")
                return dates.astype(np.int64).astype(np.float64)
            ticks = np.array(stamps, dtype=np.float64)
            if not np.isfinite(ticks).all():
                raise ValueError("a time is not finite")
            return ticks
        except ValueError as error:
            raise self._error(line, f"{error} among the timestamps") from None


def _split_pairs(part: str) -> tuple[list[str], Float[np.ndarray, "N"]]:
    """Return times as text and values of pairs such as `(0.5,1.2),(0.9,?)`."""
    pairs = _PAIR.findall(part)
    rest = _PAIR.sub("", part).replace(",", "").strip()
    if rest not in ("", "?"):
        raise ValueError(
            f"expected pairs such as (0.5,1.2); got {rest[:40]!r}. The line may be cut off"
        )
    return [stamp.strip() for stamp, _ in pairs], _numbers([value for _, value in pairs])


def _numbers(texts: list[str]) -> Float[np.ndarray, "N"]:
    try:
        return np.array(texts, dtype=np.float32)
    except ValueError:
        known = ["nan" if text.strip().lower() in _MISSING else text for text in texts]
        return np.array(known, dtype=np.float32)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
