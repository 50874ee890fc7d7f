"""Series from files and to files: CSV, Parquet, npz, and the `.ts` format of the UEA archive."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np

from osciformer._files import replacing
from osciformer._optional import need
from osciformer._text import check_choice, name_some
from osciformer._types import Float
from osciformer.data.errors import UnreadableFileError
from osciformer.data.ragged import Duplicates, Rows, flatten, pivot_variables, series_of_rows
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

    Args:
        path: A .csv, .csv.gz, .parquet, .npz, .ts or .ts.gz file, or a folder of Parquet files.
        layout: Which column means what, for CSV and Parquet; the other formats say so themselves.
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
    endings = ".csv, .csv.gz, .parquet, .npz, .ts or .ts.gz"
    raise ValueError(f"{path} has an unknown ending; use {endings}")


def read_csv(
    path: str | Path,
    layout: Layout | None = None,
    *,
    delimiter: str = ",",
    missing: Sequence[str] = ("", "NA", "NaN", "nan", "null", "?"),
    **settings: Any,
) -> IrregularSeries:
    """Return the series of a CSV file, also compressed, with a header line; see `read_table`.

    `missing` are the texts that stand for a missing value.
    """
    pa, csv = need("pyarrow", extra="data"), need("pyarrow.csv", extra="data")
    layout, path = make_layout(layout, settings), existing_file(path)
    # Arrow guesses types from the first block only, so numbers are declared as such.
    block_size = min(max(path.stat().st_size, 1 << 20), 1 << 26)
    options = {"parse_options": csv.ParseOptions(delimiter=delimiter)}
    options["read_options"] = csv.ReadOptions(block_size=block_size)
    nulls = {"null_values": list(missing), "strings_can_be_null": True}
    with damage_named(path, "CSV", _CSV_HINT):
        with csv.open_csv(path, **options) as reader:
            kept = columns_to_read(reader.schema.names, layout)
        numbers = [name for name in kept if name == layout.value or name not in layout.columns]
        types = dict.fromkeys(numbers, pa.float64())
        convert = csv.ConvertOptions(include_columns=kept, column_types=types, **nulls)
        table = csv.read_csv(path, convert_options=convert, **options)
    return from_frame(table, layout)


def read_parquet(
    path: str | Path, layout: Layout | None = None, **settings: Any
) -> IrregularSeries:
    """Return the series of a Parquet file or of a folder of them, in memory; see `read_table`."""
    layout, files = make_layout(layout, settings), parquet_files(path)
    columns = columns_to_read(parquet_schema(files).names, layout)
    return from_frame(load_parquet(files, columns), layout)


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
    parquet, first = need("pyarrow.parquet", extra="data"), None
    for path in files:
        with damage_named(path):
            schema = parquet.read_schema(path)
        first = first or schema
        if not schema.equals(first, check_metadata=False):
            differ = set(map(str, schema)) ^ set(map(str, first))
            raise ValueError(
                f"{path} and {files[0]} must have the same columns, in the same order and of the "
                f"same types; they differ in {name_some(sorted(differ))}"
            )
    return first


def columns_to_read(present: Sequence[str], layout: Layout) -> list[str]:
    """Return the columns of a file that the layout needs, and refuse a layout that does not fit."""
    check_layout(present, layout)
    if layout.values is None and not layout.is_narrow:
        return list(present)
    features = () if layout.is_narrow else layout.values or ()
    wanted = dict.fromkeys((*layout.columns, *layout.static, *features))
    return [name for name in wanted if name in present]


@contextlib.contextmanager
def damage_named(path: Path, kind: str = "Parquet", hint: str = "") -> Iterator[None]:
    """Name the file in errors of Arrow; `hint` says what to do about entries that are text."""
    try:
        yield
    except (need("pyarrow", extra="data").ArrowInvalid, OSError) as error:
        what = hint if "conversion error" in str(error) else ""
        why = f"it may be cut off, or have another format: {error}{what}"
        raise UnreadableFileError(f"{path} cannot be read as {kind}; {why}") from error


def existing_file(path: str | Path) -> Path:
    """Return the path of a file that exists."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; a file is needed here")
    return path


def save_npz(series: IrregularSeries, path: str | Path) -> None:
    """Write the series to an npz file, complete or not at all, without pickled objects."""
    arrays = {name: getattr(series, name) for name in _NPZ_ARRAYS}
    description = {
        "format": NPZ_FORMAT,
        "feature_names": series.feature_names,
        "static_names": series.static_names,
        "time_axis": series.time_axis.to_dict(),
    }
    arrays["description"] = np.array(json.dumps(description))
    present = {name: array for name, array in arrays.items() if array is not None}
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **present)


def load_npz(path: str | Path) -> IrregularSeries:
    """Return the series that `save_npz` wrote; loading never executes code."""
    path = existing_file(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            held = archive.files  # of which others may be of any size
            known = (*_NPZ_ARRAYS, "description")
            arrays = {name: archive[name] for name in held if name in known}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
        why = f"it may be cut off, or hold pickled objects: {error}"
        raise UnreadableFileError(f"{path} cannot be read as npz; {why}") from error
    try:
        description = json.loads(str(arrays.pop("description")))
        if description.pop("format") != NPZ_FORMAT:
            raise ValueError(f"the format is not {NPZ_FORMAT!r}")
        axis = TimeAxis.from_dict(description.pop("time_axis"))
        if "static" not in arrays:
            description.pop("static_names")
        return IrregularSeries(**arrays, **description, time_axis=axis)
    except (KeyError, TypeError, ValueError) as error:
        cause = f"{path} was not written by save_npz ({error!r}); it holds {name_some(held)}"
        advice = "Build the series from its arrays with IrregularSeries.from_padded or from_arrays"
        raise UnreadableFileError(f"{cause}. {advice}") from error


def read_ts(
    path: str | Path, *, unit: str = "s", duplicates: Duplicates = "error", empty: Empty = "error"
) -> IrregularSeries:
    """Return the series of a `.ts` file, at the times that the file gives.

    With `@timestamps true`, a series gets a row for each time of any dimension, with NaN for the
    others; without, step k is time k. Class labels are text; targets of regression are float64.

    Args:
        path: The file, also compressed as `.ts.gz`.
        unit: For dates, the unit of the times since the first one: ns, us, ms, s, min, h or d.
        duplicates: For several values of a dimension at one time: `error`, `mean`, `last`, `keep`.
        empty: What to do about series without any value: `error`, `drop` or `keep`.
    """
    check_choice("unit", unit, tuple(NANOSECONDS))
    check_choice("duplicates", duplicates, get_args(Duplicates))
    path = Path(path)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = _TsFile(path, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableFileError(f"{path} is damaged, or is cut off: {error}") from error
    return content.series(unit, duplicates).settle_empty(empty)


def parse_ts(file: IO[bytes], name: str) -> IrregularSeries:
    """Return the series of an open `.ts` file."""
    return _TsFile(name, file).series().settle_empty("error")


class _TsFile:
    """The content of a `.ts` file, one series per line."""

    def __init__(self, path: str | Path, file: Iterable[bytes]) -> None:
        self.tags = dict[str, str]()  # what lines with `@` say, by name in lower case
        self.is_dated: bool | None = None  # until a timestamp comes
        # Times and values of each dimension of each series; dates are microseconds since 1970.
        self.cases: list[list[tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]]] = []
        self.labels: list[Any] = []
        in_data = False
        for number, raw in enumerate(file, start=1):
            # Comments of the archives' files are not always UTF-8; nothing else may be otherwise.
            line = raw.decode("utf-8", errors="surrogateescape").strip()
            if not line or line.startswith(("#", "%")):
                continue
            try:
                if in_data:
                    self._add_series(line)
                elif line.lower() == "@data":
                    in_data = True
                    self._read_tags()
                elif line.startswith("@") and len(line) > 1:
                    name, *rest = line[1:].split(maxsplit=1)
                    self.tags[name.lower()] = "".join(rest)
                else:
                    got = repr(line[:40])
                    raise ValueError(f"expected a header line that begins with '@'; got {got}")
            except ValueError as error:
                hint = "the line may be cut off" if in_data else "this may not be a .ts file"
                raise UnreadableFileError(f"{path}, line {number}: {error}; {hint}") from None
        if not self.cases:
            lacks = "series after @data" if in_data else "@data line; it may not be a .ts file"
            raise UnreadableFileError(f"{path} has no {lacks}, or is cut off")

    def _read_tags(self) -> None:
        """Set what the header says about the lines that follow."""
        true = {name for name, text in self.tags.items() if text.lower().split()[:1] == ["true"]}
        dimensions = self.tags.get("dimensions", self.tags.get("dimension", ""))
        length = self.tags.get("serieslength", "")
        self.has_timestamps, self.has_targets = "timestamps" in true, "targetlabel" in true
        self.is_labelled = "classlabel" in true or self.has_targets
        self.classes = self.tags.get("classlabel", "").split()[1:]
        self.num_dimensions = int(dimensions) if dimensions.isdigit() else None
        self.num_dimensions = 1 if "univariate" in true else self.num_dimensions
        self.has_equal_length = "equallength" in true and not self.has_timestamps
        self.length = int(length) if length.isdigit() else None

    def _add_series(self, line: str) -> None:
        """Read one line, and refuse it if it is not what the header promises."""
        if self.is_labelled:
            line, _, label = line.rpartition(":")
            label = label.strip()
            if not line or not label or label.endswith(")"):
                raise ValueError("there is no label at the end")
            if self.classes and label not in self.classes:
                raise ValueError(f"class {label!r} is not one of {name_some(self.classes)}")
            if self.has_targets and not _is_number(label):
                raise ValueError(f"the target {label!r} is not a number")
            self.labels.append(float(label) if self.has_targets else label)
        if self.has_timestamps:
            dimensions = [self._read_pairs(part) for part in _BETWEEN.split(line)]
        else:
            tables = [_numbers(part.split(",")) for part in line.split(":")]
            dimensions = [(np.arange(len(values), dtype=float), values) for values in tables]
        if not self.cases:
            self.num_dimensions = self.num_dimensions or len(dimensions)
            self.length = len(dimensions[0][1]) if self.length is None else self.length
        count, wanted = len(dimensions), self.num_dimensions
        if count != wanted:
            raise ValueError(f"{count} dimensions where {wanted} are expected")
        for position, (_, values) in enumerate(dimensions):
            if self.has_equal_length and len(values) != self.length:
                found = f"dimension {position} has {len(values)} values"
                raise ValueError(f"{found} and @equalLength promises {self.length}")
        self.cases.append(dimensions)

    def _read_pairs(self, part: str) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        """Return times and values of pairs such as `(0.5,1.2),(0.9,?)`."""
        pairs = _PAIR.findall(part)
        rest = _PAIR.sub("", part).replace(",", "").strip()
        if rest not in ("", "?"):
            raise ValueError(f"expected pairs such as (0.5,1.2); got {rest[:40]!r}")
        stamps = [stamp.strip() for stamp, _ in pairs]
        if stamps and self.is_dated is None:
            self.is_dated = not _is_number(stamps[0])
        try:
            ticks = np.array(stamps, dtype="datetime64[us]" if self.is_dated else np.float64)
        except ValueError as error:
            raise ValueError(f"{error} among the timestamps") from None
        if not np.isfinite(ticks).all():
            raise ValueError("a time is not finite among the timestamps")
        # Whole microseconds are exact in float64 until the year 2255.
        ticks = ticks.astype(np.int64) if self.is_dated else ticks
        return ticks.astype(np.float64), _numbers([value for _, value in pairs])

    def series(self, unit: str = "s", duplicates: Duplicates = "error") -> IrregularSeries:
        """Return the series, at the times or steps of the file."""
        names = tuple(f"dim_{number}" for number in range(len(self.cases[0])))
        axis, origins = TimeAxis(), None
        rows = self._rows_by_time(names, duplicates) if self.has_timestamps else self._rows()
        if self.is_dated:
            axis = TimeAxis("datetime", unit=unit, resolution="us", origin="series")
            ticks, some = rows.times.astype(np.int64), np.diff(rows.offsets) > 0
            origins = np.zeros(len(some), dtype=np.int64)
            origins[some] = ticks[rows.offsets[:-1][some]]
            rows = rows._replace(times=axis.encode(ticks, origins[series_of_rows(rows.offsets)]))
        meaning: dict[str, Any] = {"feature_names": names, "time_axis": axis, "origins": origins}
        labels = np.array(self.labels) if self.is_labelled else None
        return IrregularSeries(*rows, labels=labels, **meaning)

    def _rows(self) -> Rows:
        """Return a row per step; shorter dimensions end in NaN."""
        tables = []
        for case in self.cases:
            length = max(len(values) for _, values in case)
            table = np.full((length, len(case)), np.nan, dtype=np.float32)
            for position, (_, values) in enumerate(case):
                table[: len(values), position] = values
            tables.append(table)
        return flatten([np.arange(len(table)) for table in tables], tables)

    def _rows_by_time(self, names: tuple[str, ...], duplicates: Duplicates) -> Rows:
        """Return a row for each time of any dimension."""
        lengths = [[len(times) for times, _ in case] for case in self.cases]
        owner = np.repeat(np.arange(len(lengths)), [sum(counts) for counts in lengths])
        feature = np.concatenate([np.repeat(np.arange(len(row)), row) for row in lengths])
        ticks = np.concatenate([times for case in self.cases for times, _ in case])
        values = np.concatenate([values for case in self.cases for _, values in case])
        order = np.lexsort((ticks, owner))
        order = order[~np.isnan(values[order])]
        return pivot_variables(
            *(column[order] for column in (owner, ticks, feature, values)),
            ids=np.arange(len(self.cases)),
            feature_names=names,
            duplicates=duplicates,
        )


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
