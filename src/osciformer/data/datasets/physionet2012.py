"""PhysioNet / Computing in Cardiology Challenge 2012: mortality of intensive-care patients.

A record is one stay: five descriptors and up to 37 parameters at irregular minutes of its first 48
hours. Read as series,

- times are minutes since admission; of several entries of a parameter at one minute, the last
  counts (about 1 entry in 500);
- Age, Gender, Height, ICUType and the first Weight are static; -1 (unknown) is NaN, also for later
  Weights; other implausible entries, such as a temperature of -17.8, stay;
- a stay with only descriptors (3 in set-a, 7 in set-b) is a series without rows;
- the label is In-hospital_death, 0 or 1.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from osciformer._optional import need
from osciformer.data.archives import iter_members
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError
from osciformer.data.series import IrregularSeries
from osciformer.data.tables import Layout, from_frame, join_frame

STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")
PARAMETERS = (
    *("ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP"),
    *("FiO2", "GCS", "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg"),
    *("NIDiasABP", "NIMAP", "NISysABP", "Na", "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2"),
    *("SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC", "Weight", "pH"),
)
LABEL = "In-hospital_death"

_FIRST_WEIGHT = "first Weight"
_DESCRIPTORS = (*STATIC[:-1], _FIRST_WEIGHT)
_KNOWN = {*PARAMETERS, *STATIC}
_HEADER = "Time,Parameter,Value"
_LINE = re.compile(r"(\d+):([0-5]\d),([^,]*),([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
# Set-a unpacks to about 35 MB.
_MAX_BYTES = 1 << 30


def load_copy(request: Request) -> IrregularSeries:
    """Return the series of the compact copy: Parquet in long format, and outcomes."""
    parquet, letter = need("pyarrow.parquet", extra="data"), request.split[-1]
    entries = parquet.read_table(request.files[f"physionet2012/set-{letter}.parquet"])
    outcomes = parquet.read_table(request.files[f"physionet2012/outcomes-{letter}.parquet"])
    _refuse_unknown(entries["parameter"].unique().to_pylist(), "the copy")
    return _to_series(entries.to_pandas(), outcomes.to_pandas().astype("int64"))


def load_original(request: Request) -> IrregularSeries:
    """Return the series of the published archive, one text file a record, and its outcomes."""
    letter = request.split[-1]
    entries = _read_records(request.files[f"set-{letter}.tar.gz"])
    return _to_series(entries, read_outcomes(request.files[f"Outcomes-{letter}.txt"]))


def _to_series(entries: Any, outcomes: Any) -> IrregularSeries:
    """Return one series per record, in the order of the record numbers."""
    present, labelled = set(entries["record_id"].unique()), set(outcomes["RecordID"])
    unlabelled, absent = present - labelled, labelled - present
    if unlabelled:
        raise UnreadableFileError(f"record {min(unlabelled)} has no outcome")
    if absent:
        raise UnreadableFileError(f"record {min(absent)} has an outcome and no entries")
    # A stable sort, so that entries of one minute keep the order of the file.
    entries = entries.sort_values(["record_id", "minute"], kind="stable", ignore_index=True)
    entries["parameter"] = entries["parameter"].astype(
        need("pandas", extra="data").CategoricalDtype([*_DESCRIPTORS, *PARAMETERS])
    )
    first = entries[entries["parameter"] == "Weight"].drop_duplicates("record_id")
    entries.loc[first.index[first["minute"] == 0], "parameter"] = _FIRST_WEIGHT
    is_unknown = (entries["value"] == -1) & entries["parameter"].isin((*_DESCRIPTORS, "Weight"))
    entries["value"] = entries["value"].mask(is_unknown)
    columns = Layout("record_id", "minute", PARAMETERS, "parameter", "value", _DESCRIPTORS)
    series = from_frame(entries, columns, duplicates="last", empty="keep", allow_absent=True)
    return join_frame(series, outcomes, id="RecordID", label=LABEL).replace(static_names=STATIC)


def _read_records(archive: Path) -> Any:
    """Return the entries of all records in `set-a.tar.gz`, `set-a.zip` and the like."""
    pandas = need("pandas", extra="data")
    columns: tuple[list[Any], ...] = ([], [], [], [])
    members = iter_members(archive, _is_record, lambda file: file.read(), max_bytes=_MAX_BYTES)
    for name, content in members:
        lines = content.decode("utf-8-sig").splitlines()
        if not lines or lines[0].strip() != _HEADER:
            raise UnreadableFileError(f"{name} must begin with the line {_HEADER!r}")
        matches = [_LINE.fullmatch(line) for line in lines[1:]]
        if None in matches:
            where = matches.index(None) + 1
            raise UnreadableFileError(
                f"{name}, line {where + 1}: expected hh:mm,parameter,number; got {lines[where]!r}"
            )
        # RecordID repeats the name of the file; some lines have no parameter at all.
        found = [match.groups() for match in matches if match and match[3] not in ("RecordID", "")]
        _refuse_unknown({entry[2] for entry in found}, name)
        columns[0].extend([int(PurePosixPath(name).stem)] * len(found))
        columns[1].extend([60 * int(hour) + int(minute) for hour, minute, _, _ in found])
        columns[2].extend([parameter for _, _, parameter, _ in found])
        columns[3].extend([float(value) for _, _, _, value in found])
    if not columns[0]:
        raise UnreadableFileError(f"{archive} holds no record (<number>.txt)")
    names = ("record_id", "minute", "parameter", "value")
    return pandas.DataFrame(dict(zip(names, columns, strict=True)))


def _is_record(name: str) -> bool:
    return re.fullmatch(r"(.*/)?\d+\.txt", name) is not None


def _refuse_unknown(parameters: Any, where: str) -> None:
    for parameter in sorted(set(parameters) - _KNOWN):
        raise UnreadableFileError(f"{where}: unknown parameter {parameter!r}")


def read_outcomes(path: Path) -> Any:
    """Return `Outcomes-a.txt` and the like as a data frame."""
    pandas = need("pandas", extra="data")
    try:
        columns = ["RecordID", LABEL]
        return pandas.read_csv(path, usecols=columns, dtype="int64", skipinitialspace=True)
    except ValueError as error:
        wanted = f"the columns RecordID and {LABEL}, of integers"
        raise UnreadableFileError(f"{path} must have {wanted}: {error}") from error
