"""PhysioNet 2012 is read as it is published."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.data.datasets import physionet2012
from osciformer.data.errors import ChecksumError, UnreadableFileError
from osciformer.data.registry import get_dataset
from osciformer.data.series import IrregularSeries

RECORDS = {
    132539: """\
Time,Parameter,Value
00:00,RecordID,132539
00:00,Age,54
00:00,Gender,0
00:00,Height,-1
00:00,ICUType,4
00:00,Weight,-1
00:07,GCS,15
00:07,HR,73
00:37,HR,77
00:37,,1
00:37,HR,78
47:37,Weight,81.6
47:37,pH,7.4
47:40,Weight,-1
""",
    132540: """\
Time,Parameter,Value
00:00,RecordID,132540
00:00,Age,76
00:00,Gender,1
00:00,Height,175.3
00:00,ICUType,2
00:00,Weight,76
00:00,Temp,-17.8
00:00,Weight,76.5
""",
    132541: """\
Time,Parameter,Value
00:00,RecordID,132541
00:00,Age,44
00:00,Gender,-1
00:00,Height,-1
00:00,ICUType,3
00:00,Weight,56.7
""",
}
OUTCOMES = """\
RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death
132539,6,1,5,-1,0
132540,16,8,8,-1,0
132541,21,11,19,3,1
"""


def write_physionet(folder: Path, records: dict[int, str], *, kind: str = "tar") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "set-a.tar.gz"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("set-a/", b"")
            for number, text in records.items():
                archive.writestr(f"set-a/{number}.txt", text)
    else:
        with tarfile.open(path, "w:gz") as archive:
            directory = tarfile.TarInfo("set-a")
            directory.type = tarfile.DIRTYPE
            archive.addfile(directory)
            for number, text in records.items():
                info = tarfile.TarInfo(f"set-a/{number}.txt")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    (folder / "Outcomes-a.txt").write_text(OUTCOMES)
    return path


def load_set_a(local: Path, records: dict[int, str] = RECORDS, **options: Any) -> Any:
    write_physionet(local / "physionet2012", records, **options)
    return get_dataset("physionet2012", "set-a", verify=False)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_the_published_archive_becomes_series(local: Path, kind: str) -> None:
    series = load_set_a(local, kind=kind)
    assert isinstance(series, IrregularSeries)
    assert series.ids.tolist() == [132539, 132540, 132541]
    assert series.labels.tolist() == [0, 0, 1]
    assert series.lengths.tolist() == [3, 1, 0]
    assert series[0].times.tolist() == [7, 37, 2857]
    assert series.num_features == 37


def test_descriptors_are_static_and_minus_one_is_missing(local: Path) -> None:
    series = load_set_a(local)
    assert series.static_names == ("Age", "Gender", "Height", "ICUType", "Weight")
    nan = np.nan
    expected = [[54, 0, nan, 4, nan], [76, 1, 175.3, 2, 76], [44, nan, nan, 3, 56.7]]
    np.testing.assert_array_equal(series.static, np.float32(expected))


def test_a_first_weight_after_admission_is_no_descriptor(local: Path) -> None:
    late = RECORDS[132541].replace("00:00,Weight,56.7", "03:10,Weight,56.7")
    series = load_set_a(local, RECORDS | {132541: late})
    assert np.isnan(series[2].static[-1])
    assert series[2].times.tolist() == [190]


def test_each_entry_stands_in_its_cell_and_nowhere_else(local: Path) -> None:
    series = load_set_a(local)
    names = np.array(series.feature_names)
    cells = {
        (int(series.ids[record]), int(series.times[row]), str(names[column])): float(value)
        for record in range(len(series))
        for row in range(series.offsets[record], series.offsets[record + 1])
        for column, value in enumerate(series.values[row])
        if not np.isnan(value)
    }
    assert cells == {
        (132539, 7, "GCS"): 15.0,
        (132539, 7, "HR"): 73.0,
        (132539, 37, "HR"): 78.0,  # the last of two at that minute
        (132539, 2857, "Weight"): pytest.approx(81.6),
        (132539, 2857, "pH"): pytest.approx(7.4),
        (132540, 0, "Temp"): pytest.approx(-17.8),
        (132540, 0, "Weight"): 76.5,  # the second one of minute 0
    }


def test_the_compact_copy_gives_the_same_series(local: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    original = load_set_a(local)
    rows = [
        (record, 60 * int(time[:2]) + int(time[3:]), parameter, float(value))
        for record, text in RECORDS.items()
        for time, parameter, value in (line.split(",") for line in text.splitlines()[1:])
        if parameter not in ("", "RecordID")
    ]
    record, minute, parameter, value = zip(*rows, strict=True)
    table = {
        "record_id": pyarrow.array(record, pyarrow.int32()),
        "minute": pyarrow.array(minute, pyarrow.int16()),
        "parameter": pyarrow.array(parameter).dictionary_encode(),
        "value": pyarrow.array(value, pyarrow.float32()),
    }
    folder = local / "physionet2012"
    parquet.write_table(pyarrow.table(table), folder / "set-a.parquet")
    lines = [line.split(",") for line in OUTCOMES.splitlines()]
    columns = dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))
    outcomes = {name: [int(x) for x in column] for name, column in columns.items()}
    parquet.write_table(pyarrow.table(outcomes), folder / "outcomes-a.parquet")
    shutil.move(folder / "set-a.tar.gz", folder / "elsewhere")
    assert get_dataset("physionet2012", "set-a", verify=False).equals(original)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("00:09,HR", r"132539\.txt, line 16: expected hh:mm,parameter,number"),
        ("00:61,HR,1", "expected hh:mm,parameter,number"),
        ("00:09,HR,high", "expected hh:mm,parameter,number"),
        ("00:09,Mood,1", "unknown parameter 'Mood'"),
    ],
)
def test_a_line_of_another_form_is_named(local: Path, line: str, message: str) -> None:
    records = RECORDS | {132539: RECORDS[132539] + line + "\n"}
    with pytest.raises(UnreadableFileError, match=message):
        load_set_a(local, records)


def test_a_record_without_header_is_named(local: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"132540\.txt must begin with"):
        load_set_a(local, RECORDS | {132540: ""})


def test_a_record_without_outcome_is_named(local: Path) -> None:
    with pytest.raises(UnreadableFileError, match="record 7 has no outcome"):
        load_set_a(local, RECORDS | {7: RECORDS[132541]})


def test_an_outcome_without_record_is_named(local: Path) -> None:
    with pytest.raises(UnreadableFileError, match="record 132541 has an outcome"):
        load_set_a(local, {n: t for n, t in RECORDS.items() if n != 132541})


def test_outcomes_need_their_columns(tmp_path: Path) -> None:
    (tmp_path / "outcomes").write_text("RecordID,SOFA\n1,2\n")
    with pytest.raises(
        UnreadableFileError, match="must have the columns RecordID and In-hospital_death"
    ):
        physionet2012.read_outcomes(tmp_path / "outcomes")


def test_the_original_is_checked_like_any_file(local: Path) -> None:
    write_physionet(local / "physionet2012", RECORDS)
    with pytest.raises(ChecksumError, match="8cb250f179cd"):
        get_dataset("physionet2012", "set-a")
