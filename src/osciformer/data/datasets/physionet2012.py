"""PhysioNet/Computing in Cardiology Challenge 2012: mortality of intensive-care patients.

A record is one stay: five descriptors and up to 37 parameters at irregular minutes of its first 48
hours. Read as series,

- times are minutes since admission, and one row holds all that was entered at that minute;
- Age, Gender, Height, ICUType and the first Weight are static features; -1 (unknown) is NaN there,
  and for the later Weights;
- if a parameter was entered more than once at a minute, the last entry of the file counts
  (about 1 entry in 500);
- nothing else is changed: implausible entries, such as a temperature of -17.8, stay;
- a stay with only descriptors (3 in set-a, 7 in set-b) is a series without rows;
- the label is In-hospital_death, 0 or 1.
"""

from __future__ import annotations

import csv
import re
from array import array
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from osciformer._optional import need
from osciformer.data.archives import iter_members
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError
from osciformer.data.ragged import pivot_variables
from osciformer.data.series import IrregularSeries

STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")
PARAMETERS = (
    *("ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP"),
    *("FiO2", "GCS", "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg"),
    *("NIDiasABP", "NIMAP", "NISysABP", "Na", "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2"),
    *("SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC", "Weight", "pH"),
)
LABEL = "In-hospital_death"

_UNKNOWN = -1.0
# Parameters have codes from 0, descriptors that are no parameters the codes below.
_CODES = {name: code for code, name in enumerate(PARAMETERS)}
_DESCRIPTOR_CODES = {name: -1 - number for number, name in enumerate(STATIC[:4])}
_ALL_CODES = _CODES | _DESCRIPTOR_CODES
_WEIGHT = _CODES["Weight"]
_HEADER = "Time,Parameter,Value"
_TIME = re.compile(r"(\d+):([0-5]\d)$")
# Set-a unpacks to about 35 MB.
_MAX_BYTES = 1 << 30


class Entries(NamedTuple):
    """Entries of all records [E], in the order of the files; `minute` counts from admission."""

    record: np.ndarray
    minute: np.ndarray
    code: np.ndarray
    value: np.ndarray


def to_series(entries: Entries, deaths: dict[int, int]) -> IrregularSeries:
    """Return one series per record, in the order of the record numbers, labelled by `deaths`."""
    ids = np.array(sorted(deaths), dtype=np.int64)
    present = np.unique(entries.record)
    unlabelled, absent = np.setdiff1d(present, ids), np.setdiff1d(ids, present)
    if len(unlabelled):
        raise UnreadableFileError(f"record {unlabelled[0]} has no outcome")
    if len(absent):
        raise UnreadableFileError(f"record {absent[0]} has an outcome and no entries")

    order = np.lexsort((entries.minute, entries.record))  # stable: ties keep the file's order
    owner = np.searchsorted(ids, entries.record[order])
    minute, code = entries.minute[order].astype(np.float64), entries.code[order]
    value = entries.value[order].astype(np.float32)
    value[(value == _UNKNOWN) & ((code < 0) | (code == _WEIGHT))] = np.nan

    static = np.full((len(ids), len(STATIC)), np.nan, dtype=np.float32)
    is_static = code < 0
    static[owner[is_static], -1 - code[is_static]] = value[is_static]
    # The first Weight of a record, if it is of minute 0, is one of the descriptors.
    weights = np.flatnonzero(code == _WEIGHT)
    first = weights[np.unique(owner[weights], return_index=True)[1]]
    first = first[minute[first] == 0]
    static[owner[first], STATIC.index("Weight")] = value[first]
    is_static[first] = True

    measured = ~is_static & ~np.isnan(value)
    rows = pivot_variables(
        *(column[measured] for column in (owner, minute, code, value)),
        ids=ids,
        feature_names=PARAMETERS,
        duplicates="last",
    )
    labels = np.array([deaths[int(record)] for record in ids], dtype=np.int64)
    return IrregularSeries(
        *rows,
        ids=ids,
        static=static,
        labels=labels,
        feature_names=PARAMETERS,
        static_names=STATIC,
    )


def load_copy(request: Request) -> IrregularSeries:
    """Return the series of the compact copy: Parquet in long format, and outcomes."""
    parquet = need("pyarrow.parquet", extra="data")
    letter = request.split[-1]
    table = parquet.read_table(request.files[f"physionet2012/set-{letter}.parquet"])
    parameter = table["parameter"].combine_chunks().dictionary_encode()
    codes = np.array([_code(name, "the copy") for name in parameter.dictionary.to_pylist()])
    entries = Entries(
        record=table["record_id"].to_numpy(),
        minute=table["minute"].to_numpy(),
        code=codes[parameter.indices.to_numpy()],
        value=table["value"].to_numpy(),
    )
    outcomes = parquet.read_table(request.files[f"physionet2012/outcomes-{letter}.parquet"])
    deaths = zip(outcomes["RecordID"].to_pylist(), outcomes[LABEL].to_pylist(), strict=True)
    return to_series(entries, dict(deaths))


def load_original(request: Request) -> IrregularSeries:
    """Return the series of the published archive, one text file a record, and its outcomes."""
    letter = request.split[-1]
    entries = read_records(request.files[f"set-{letter}.tar.gz"])
    return to_series(entries, read_outcomes(request.files[f"Outcomes-{letter}.txt"]))


def read_records(archive: Path) -> Entries:
    """Return the entries of all records in `set-a.tar.gz`, `set-a.zip` and the like."""
    record, minute, code = array("q"), array("q"), array("q")
    value = array("d")

    def is_record(name: str) -> bool:
        path = PurePosixPath(name)
        return path.suffix == ".txt" and path.stem.isdigit()

    for name, blocks in iter_members(archive, is_record, max_bytes=_MAX_BYTES):
        number = int(PurePosixPath(name).stem)
        before = len(record)
        _read_record(b"".join(blocks).decode("utf-8-sig"), name, minute, code, value)
        record.extend([number] * (len(minute) - before))
    if not record:
        raise UnreadableFileError(f"{archive} holds no record (<number>.txt)")
    return Entries(*(np.array(column) for column in (record, minute, code, value)))


def _read_record(
    text: str, name: str, minute: array[int], code: array[int], value: array[float]
) -> None:
    lines = text.splitlines()
    if not lines or lines[0].strip() != _HEADER:
        raise UnreadableFileError(f"{name} must begin with the line {_HEADER!r}")
    times: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            time, parameter, entry = line.split(",")
            if time not in times:
                times[time] = _minutes(time)
            # RecordID repeats the name of the file; some lines have no parameter at all.
            if parameter in ("RecordID", ""):
                continue
            found = _ALL_CODES.get(parameter)
            if found is None:
                found = _code(parameter, f"{name}, line {number}")
            amount = float(entry)
        except ValueError as error:
            if isinstance(error, UnreadableFileError):
                raise
            raise UnreadableFileError(
                f"{name}, line {number}: expected hh:mm,parameter,number; got {line!r}"
            ) from error
        minute.append(times[time])
        code.append(found)
        value.append(amount)


def _minutes(time: str) -> int:
    match = _TIME.match(time)
    if match is None:
        raise ValueError(time)
    return 60 * int(match[1]) + int(match[2])


def _code(parameter: str, where: str) -> int:
    try:
        return _ALL_CODES[parameter]
    except KeyError:
        raise UnreadableFileError(f"{where}: unknown parameter {parameter!r}") from None


def read_outcomes(path: Path) -> dict[int, int]:
    """Return the label of each record in `Outcomes-a.txt` and the like."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream, skipinitialspace=True)
        missing = {"RecordID", LABEL} - set(rows.fieldnames or ())
        if missing:
            raise UnreadableFileError(f"{path} has no column {', '.join(sorted(missing))}")
        try:
            return {int(row["RecordID"]): int(row[LABEL]) for row in rows}
        except (TypeError, ValueError) as error:
            raise UnreadableFileError(
                f"{path}, line {rows.line_num}: RecordID and {LABEL} must be integers"
            ) from error
