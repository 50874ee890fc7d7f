"""Files in the `.ts` format of the UEA and UCR archives, with their timestamps."""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from osciformer._types import Float
from osciformer.data.checks import check_choice, name_some
from osciformer.data.errors import UnreadableFileError
from osciformer.data.narrow import pivot
from osciformer.data.ragged import offsets_of
from osciformer.data.series import Empty, IrregularSeries
from osciformer.data.ties import Duplicates
from osciformer.data.time_axis import NANOSECONDS, TimeAxis

# "(time,value)"; a time may hold colons, as dates do, but no parenthesis.
_PAIR = re.compile(r"\(([^()]*),([^(),]*)\)")
# A colon between dimensions, unlike one inside a date.
_BETWEEN = re.compile(r":(?=\s*(?:\(|\?|$))")
_MISSING = {"?", "nan", ""}


def read_ts(
    path: str | Path,
    *,
    unit: str = "s",
    duplicates: Duplicates = "error",
    empty: Empty = "error",
) -> IrregularSeries:
    """Return the series of a `.ts` file, at the times that the file gives.

    With `@timestamps true` a value comes as `(time,value)`, and the dimensions of a series may have
    been measured at different times: a series then gets a row for each time of any of them, and
    NaN for the others. Without timestamps, step k is time k. `?` is a missing value. Class labels
    stay text; the targets of regression files are float64.

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
    path = Path(path)
    header, cases = _parse(path)
    labels: np.ndarray | None = None
    if header.is_labelled:
        labels = np.array([case.label for case in cases])
    if header.has_targets:
        labels = np.array([_number(case.label, case.line, path) for case in cases])
    read = _rows_by_time if header.has_timestamps else _rows_by_step
    times, values, offsets, axis, origins = read(header, cases, path, unit, duplicates)
    return IrregularSeries(
        times,
        values,
        offsets,
        labels=labels,
        feature_names=_names(cases),
        time_axis=axis,
        origins=origins,
    ).settle_empty(empty)


@dataclass
class _Header:
    tags: dict[str, str] = field(default_factory=dict)
    is_dated: bool | None = None  # None without timestamps; set by the first one that is seen

    def is_true(self, *names: str) -> bool:
        return any(self.tags.get(name, "").lower().split()[:1] == ["true"] for name in names)

    @property
    def has_timestamps(self) -> bool:
        return self.is_true("timestamps")

    @property
    def has_targets(self) -> bool:
        return self.is_true("targetlabel")

    @property
    def is_labelled(self) -> bool:
        return self.is_true("classlabel") or self.has_targets

    @property
    def classes(self) -> list[str]:
        return self.tags.get("classlabel", "").split()[1:]

    @property
    def num_dimensions(self) -> int | None:
        if self.is_true("univariate"):
            return 1
        given = self.tags.get("dimensions", self.tags.get("dimension", ""))
        return int(given) if given.isdigit() else None


@dataclass
class _Case:
    """One line: times as text (or none) and values of each dimension."""

    line: int
    dimensions: list[tuple[list[str], Float[np.ndarray, "N"]]]
    label: str


def _parse(path: Path) -> tuple[_Header, list[_Case]]:
    header, cases, in_data = _Header(), [], False
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        # Comments of the archives' files are not always UTF-8; nothing else may be otherwise.
        with open_text(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.strip()
                if not line or line.startswith(("#", "%")):
                    continue
                if in_data:
                    cases.append(_parse_case(line, number, header, path))
                elif line.lower() == "@data":
                    in_data = True
                elif line.startswith("@") and len(line) > 1:
                    name, *rest = line[1:].split(maxsplit=1)
                    header.tags[name.lower()] = "".join(rest)
                else:
                    raise UnreadableFileError(
                        f"{path}, line {number}: expected a header line that begins with '@'; got "
                        f"{line[:40]!r}. This does not seem to be a .ts file"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableFileError(f"{path} is damaged, or is cut off: {error}") from error
    if not in_data:
        raise UnreadableFileError(f"{path} has no @data line; it is not a .ts file, or is cut off")
    if not cases:
        raise UnreadableFileError(f"{path} has no series after @data; the file may be cut off")
    _check_lengths(header, cases, path)
    return header, cases


def _parse_case(line: str, number: int, header: _Header, path: Path) -> _Case:
    label = ""
    if header.is_labelled:
        line, colon, label = line.rpartition(":")
        label = label.strip()
        if not colon or not label or label.endswith(")"):
            raise UnreadableFileError(
                f"{path}, line {number}: there is no label at the end; the line may be cut off"
            )
        if header.classes and label not in header.classes:
            raise UnreadableFileError(
                f"{path}, line {number}: class {label!r} is not one of "
                f"{name_some(header.classes)}; the line may be cut off"
            )
    split = _split_timed if header.has_timestamps else _split_plain
    try:
        dimensions = split(line)
    except ValueError as error:
        raise UnreadableFileError(f"{path}, line {number}: {error}") from None
    expected = header.num_dimensions
    if expected is None:
        header.tags["dimensions"], expected = str(len(dimensions)), len(dimensions)
    if len(dimensions) != expected:
        raise UnreadableFileError(
            f"{path}, line {number}: {len(dimensions)} dimensions where {expected} are expected; "
            "the line may be cut off"
        )
    if header.has_timestamps and header.is_dated is None:
        stamps = next((stamps for stamps, _ in dimensions if stamps), None)
        if stamps:
            header.is_dated = not _is_number(stamps[0])
    return _Case(number, dimensions, label)


def _split_plain(line: str) -> list[tuple[list[str], Float[np.ndarray, "N"]]]:
    return [([], _numbers(part.split(","))) for part in line.split(":")]


def _split_timed(line: str) -> list[tuple[list[str], Float[np.ndarray, "N"]]]:
    """Return the dimensions of a line of pairs; colons inside parentheses are part of dates."""
    dimensions = []
    for part in _BETWEEN.split(line):
        pairs = _PAIR.findall(part)
        rest = _PAIR.sub("", part).replace(",", "").strip()
        if rest not in ("", "?"):
            raise ValueError(
                f"expected pairs such as (0.5,1.2); got {rest[:40]!r}. The line may be cut off"
            )
        times, values = zip(*pairs, strict=True) if pairs else ((), ())
        dimensions.append(([stamp.strip() for stamp in times], _numbers(list(values))))
    return dimensions


def _check_lengths(header: _Header, cases: list[_Case], path: Path) -> None:
    """Refuse a file that promises equal lengths and does not keep to it."""
    if header.has_timestamps or not header.is_true("equallength"):
        return
    given = header.tags.get("serieslength", "")
    wanted = int(given) if given.isdigit() else len(cases[0].dimensions[0][1])
    for case in cases:
        for position, (_, values) in enumerate(case.dimensions):
            if len(values) != wanted:
                raise UnreadableFileError(
                    f"{path}, line {case.line}: dimension {position} has {len(values)} values and "
                    f"@equalLength promises {wanted}; the line may be cut off"
                )


def _rows_by_step(
    header: _Header, cases: list[_Case], path: Path, unit: str, duplicates: Duplicates
) -> tuple[np.ndarray, np.ndarray, np.ndarray, TimeAxis, np.ndarray | None]:
    """Return times, values, offsets, axis and origins of values at steps 0, 1, ..."""
    tables = []
    for case in cases:
        length = max(len(values) for _, values in case.dimensions)
        table = np.full((length, len(case.dimensions)), np.nan, dtype=np.float32)
        for position, (_, values) in enumerate(case.dimensions):
            table[: len(values), position] = values
        tables.append(table)
    times = np.concatenate([np.arange(len(table), dtype=np.float64) for table in tables])
    offsets = offsets_of(np.array([len(table) for table in tables]))
    return times, np.concatenate(tables), offsets, TimeAxis(), None


def _rows_by_time(
    header: _Header, cases: list[_Case], path: Path, unit: str, duplicates: Duplicates
) -> tuple[np.ndarray, np.ndarray, np.ndarray, TimeAxis, np.ndarray | None]:
    """Return times, values, offsets, axis and origins of pairs of time and value."""
    parts = [
        (number, position, _ticks(stamps, header, case.line, path), values)
        for number, case in enumerate(cases)
        for position, (stamps, values) in enumerate(case.dimensions)
    ]
    lengths = [len(values) for _, _, _, values in parts]
    owner = np.repeat([number for number, _, _, _ in parts], lengths)
    feature = np.repeat([position for _, position, _, _ in parts], lengths)
    ticks = np.concatenate([ticks for _, _, ticks, _ in parts])
    values = np.concatenate([values for _, _, _, values in parts])
    order = np.lexsort((ticks, owner))
    order = order[~np.isnan(values[order])]
    times, table, offsets = pivot(
        owner[order],
        ticks[order],
        feature[order],
        values[order],
        num_series=len(cases),
        feature_names=_names(cases),
        ids=np.arange(len(cases)),
        duplicates=duplicates,
    )
    if not header.is_dated:
        return times, table, offsets, TimeAxis(), None
    origins = np.zeros(len(cases), dtype=np.int64)
    some = np.diff(offsets) > 0
    origins[some] = times[offsets[:-1][some]]
    axis = TimeAxis("datetime", unit=unit, resolution="us", origin="series")
    since = axis.encode(times.astype(np.int64), np.repeat(origins, np.diff(offsets)))
    return since, table, offsets, axis, origins


def _names(cases: list[_Case]) -> tuple[str, ...]:
    return tuple(f"dim_{position}" for position in range(len(cases[0].dimensions)))


def _ticks(stamps: list[str], header: _Header, line: int, path: Path) -> Float[np.ndarray, "N"]:
    """Return numbers, or microseconds since 1970, which float64 holds exactly until 2255."""
    try:
        if header.is_dated:
            dates = np.array(stamps, dtype="datetime64[us]")
            if np.isnat(dates).any():
                raise ValueError("a date is missing")
            return dates.astype(np.int64).astype(np.float64)
        ticks = np.array(stamps, dtype=np.float64)
        if not np.isfinite(ticks).all():
            raise ValueError("a time is not finite")
        return ticks
    except ValueError as error:
        raise UnreadableFileError(f"{path}, line {line}: {error} among the timestamps") from None


def _numbers(texts: list[str]) -> Float[np.ndarray, "N"]:
    try:
        return np.array(texts, dtype=np.float32)
    except ValueError:
        return np.array(
            ["nan" if text.strip().lower() in _MISSING else text for text in texts],
            dtype=np.float32,
        )


def _number(text: str, line: int, path: Path) -> float:
    if not _is_number(text):
        raise UnreadableFileError(
            f"{path}, line {line}: the target {text!r} is not a number; the line may be cut off"
        )
    return float(text)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
