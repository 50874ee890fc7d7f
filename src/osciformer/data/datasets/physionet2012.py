"""PhysioNet/Computing in Cardiology Challenge 2012: mortality of intensive-care patients.

A record is one stay: five descriptors and up to 37 parameters at irregular minutes of its first 48
hours. Read as series,

- times are minutes since admission, and one row holds all that was entered at that minute;
- Age, Gender, Height, ICUType and the first Weight are static features; -1 (unknown) is NaN there,
  and for the later Weights;
- where a parameter was entered more than once at a minute, the last entry of the file counts
  (about 1 entry in 500);
- nothing else is changed: implausible entries, such as a temperature of -17.8, stay;
- a stay with descriptors alone (3 in set-a, 7 in set-b) is a series without rows;
- the label is In-hospital_death, 0 or 1.
"""

from __future__ import annotations

import csv
import re
from array import array
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from osciformer._optional import need
from osciformer.data.archives import iter_members
from osciformer.data.dataset_info import DataFile, DatasetInfo, Request, Source
from osciformer.data.errors import UnreadableFileError
from osciformer.data.ragged import offsets_of
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


@dataclass(frozen=True)
class Entries:
    """Entries of all records, in the order of the files.

    Attributes:
        record: Number of the record [E].
        minute: Minutes since admission [E].
        code: Parameter or descriptor [E].
        value: Value [E].
    """

    record: np.ndarray
    minute: np.ndarray
    code: np.ndarray
    value: np.ndarray


def to_series(entries: Entries, deaths: dict[int, int]) -> IrregularSeries:
    """Return one series a record, in the order of the record numbers.

    Args:
        entries: What the files say.
        deaths: The label of each record.
    """
    ids = np.array(sorted(deaths), dtype=np.int64)
    present = np.unique(entries.record)
    unlabelled = np.setdiff1d(present, ids)
    if len(unlabelled):
        raise UnreadableFileError(f"record {unlabelled[0]} has no outcome")
    absent = np.setdiff1d(ids, present)
    if len(absent):
        raise UnreadableFileError(f"record {absent[0]} has an outcome and no entries")

    order = np.lexsort((entries.minute, entries.record))  # stable: ties keep the file's order
    position = np.searchsorted(ids, entries.record[order])
    minute, code = entries.minute[order].astype(np.int64), entries.code[order]
    value = entries.value[order].astype(np.float32)
    value[(value == _UNKNOWN) & ((code < 0) | (code == _WEIGHT))] = np.nan

    static = np.full((len(ids), len(STATIC)), np.nan, dtype=np.float32)
    is_static = code < 0
    static[position[is_static], -1 - code[is_static]] = value[is_static]
    # The first Weight of a record, if it is of minute 0, stands among the descriptors.
    weights = np.flatnonzero(code == _WEIGHT)
    first = weights[np.unique(position[weights], return_index=True)[1]]
    first = first[minute[first] == 0]
    static[position[first], STATIC.index("Weight")] = value[first]
    is_static[first] = True

    measured = ~is_static & ~np.isnan(value)
    position, minute = position[measured], minute[measured]
    code, value = code[measured], value[measured]
    is_new = np.ones(len(position), dtype=bool)
    is_new[1:] = (np.diff(position) != 0) | (np.diff(minute) != 0)
    row = np.cumsum(is_new) - 1
    values = np.full((int(is_new.sum()), len(PARAMETERS)), np.nan, dtype=np.float32)
    values[row, code] = value  # of repeated indices the last one counts
    lengths = np.bincount(position[is_new], minlength=len(ids))
    return IrregularSeries(
        minute[is_new].astype(np.float64),
        values,
        offsets_of(lengths),
        ids=ids,
        static=static,
        labels=np.array([deaths[int(record)] for record in ids], dtype=np.int64),
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

    for name, content in iter_members(archive, is_record, max_bytes=_MAX_BYTES):
        number = int(PurePosixPath(name).stem)
        before = len(record)
        _read_record(content.decode("utf-8-sig"), name, minute, code, value)
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


_BASE = "https://physionet.org/files/challenge-2012/1.0.0/"
# SHA-256 and size as several public projects state them alike, for files of _BASE.
_PUBLIC = {
    "set-a.tar.gz": (
        "8cb250f179cd0952b4b9ebcf8954b63d70383131670fac1cfee13deaa13ca920",
        6_632_372,
    ),
    "set-b.tar.gz": (
        "b1637a2a423a8e76f8f087896cfc5fdf28f88519e1f4e874fbda69b2a64dac30",
        6_652_690,
    ),
    "set-c.tar.gz": (
        "a4a56b95bcee4d50a3874fe298bf2998f2ed0dd98a676579573dc10419329ee1",
        6_600_293,
    ),
    "Outcomes-a.txt": ("2613ea60ccda29f87571a7d6b09ad130858a8ccd66325bd073365925026883c2", 79_219),
    "Outcomes-b.txt": ("1305f29734da374a809483229a99f33a9230aa8d4fa74b1a2d6ad788136423d5", 79_149),
    "Outcomes-c.txt": ("0b32dcb7753c0f18f2f5fde498a28618b8879c5e527ce0dae8ad120dd7e205c9", 79_191),
}
_COPIES = {
    "set-a.parquet": "f43cad740b01cd99c525201a4c82df842c1515c480c6ffc20e3470ac18551a3b",
    "outcomes-a.parquet": "4739d5d475cf384001af37596412e8a286b1667c318962eaabc62c0b794fd932",
    "set-b.parquet": "3ea51bf1356189118f4075cc23bd99147f94232cbecf4539b6b6036eb0465cb0",
    "outcomes-b.parquet": "807249b86527f701c55d5b78c4e3180bd5c118851dd350af1f28f85268e075b6",
}


def _split_of(file: str) -> tuple[str]:
    letter = file.partition(".")[0][-1]
    return (f"set-{letter}",)


PHYSIONET_2012 = DatasetInfo(
    name="physionet2012",
    description=(
        "Intensive-care stays of at least 48 hours: 37 irregular clinical parameters and five "
        "descriptors each, with in-hospital death as the label. 4,000 stays a set."
    ),
    task="classification",
    splits=("set-a", "set-b", "set-c"),
    split_definition=(
        "The sets of the challenge: set-a to train on, set-b the open and set-c the hidden test "
        "set of that time. All outcomes are public now."
    ),
    licence="Open Data Commons Attribution License v1.0 (ODC-By)",
    citation=(
        "Silva I, Moody G, Scott DJ, Celi LA, Mark RG. Predicting in-hospital mortality of ICU "
        "patients: The PhysioNet/Computing in Cardiology Challenge 2012. Computing in Cardiology "
        "39:245-248, 2012. Goldberger AL et al. PhysioBank, PhysioToolkit, and PhysioNet. "
        "Circulation 101(23):e215-e220, 2000."
    ),
    homepage="https://physionet.org/content/challenge-2012/1.0.0/",
    local=Source(
        files=tuple(
            DataFile(f"physionet2012/{file}", sha256=sha256, splits=_split_of(file))
            for file, sha256 in _COPIES.items()
        ),
        load=load_copy,
        splits=("set-a", "set-b"),
    ),
    public=Source(
        files=tuple(
            DataFile(
                file,
                sha256=sha256,
                size=size,
                addresses=(_BASE + file,),
                splits=_split_of(file),
            )
            for file, (sha256, size) in _PUBLIC.items()
        ),
        load=load_original,
    ),
    notes=(
        "Times are minutes since admission. Of several entries of a parameter at one minute the "
        "last one counts. A few stays have no time-varying entry at all.",
    ),
)
