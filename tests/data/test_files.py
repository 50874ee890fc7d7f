"""CSV, Parquet and npz: what is written is read, what is damaged is refused."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.data import (
    UnreadableFileError,
    from_frame,
    load_npz,
    read_csv,
    read_parquet,
    read_table,
    save_npz,
)

from .series_cases import random_series

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS = {"id": "id", "time": "time", "static": ["age", "height"], "label": "label"}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def cut_in_half(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def test_csv_and_parquet_hold_the_series(tmp_path: Path) -> None:
    series = random_series(8)
    frame = series.to_frame("pandas")
    frame.to_csv(tmp_path / "a.csv", index=False, float_format="%.17g")
    frame.to_csv(tmp_path / "a.csv.gz", index=False, float_format="%.17g")
    frame.to_parquet(tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet", **COLUMNS).equals(series)
    for name in ("a.csv", "a.csv.gz"):
        found = read_table(tmp_path / name, **COLUMNS)
        assert found.equals(series.replace(labels=series.labels.astype(str)))
        assert read_table(tmp_path / name, guess_types=True, **COLUMNS).equals(series)


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    series = random_series(8)
    table = series.to_frame("pyarrow")
    parquet.write_table(table.slice(0, 20), tmp_path / "part-0.parquet")
    parquet.write_table(table.slice(20), tmp_path / "part-1.parquet")
    assert read_table(tmp_path, **COLUMNS).equals(series)


def test_narrow_files_are_read(tmp_path: Path) -> None:
    text = "id,t,what,value,age,note\n1,0,a,1.5,60,x\n1,0,b,2,60,y\n2,3,a,NA,70,z\n"
    layout: dict[str, Any] = {"variable": "what", "value": "value", "static": ["age"]}
    series = read_csv(write(tmp_path / "a.csv", text), id="id", time="t", empty="keep", **layout)
    np.testing.assert_array_equal(series.values, [[1.5, 2.0]])
    np.testing.assert_array_equal(series.static, [[60.0], [70.0]])
    table = pa.table(
        {"id": [1], "t": [0], "what": ["a"], "value": [1.0], "note": ["x"], "age": [5]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read_parquet(tmp_path / "a.parquet", id="id", time="t", **layout).lengths.tolist() == [1]


def test_numbers_that_look_like_integers_at_first_are_read(tmp_path: Path) -> None:
    rows = ["id,t,x", *(f"1,{k},1" for k in range(200_000)), "1,200000,0.5"]
    series = read_csv(write(tmp_path / "long.csv", "\n".join(rows)), id="id", time="t")
    assert series.values[-1, 0] == 0.5


def test_a_header_may_be_longer_than_a_block(tmp_path: Path) -> None:
    names = ["id", "t", *(f"{k}{'x' * 300_000}" for k in range(4))]
    path = write(tmp_path / "a.csv", f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    assert read_csv(path, id="id", time="t").num_features == 4


def test_columns_that_are_not_wanted_may_hold_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id;t;x;note\n1;2024-01-01;?;hello\n1;2024-01-02;3;x\n")
    series = read_csv(path, id="id", time="t", values=["x"], unit="d", delimiter=";")
    assert series.times.tolist() == [0.0, 1.0]
    np.testing.assert_array_equal(series.values, [[np.nan], [3.0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as CSV"),
        ("id,t,x\n1,2\n", "Expected 3 columns, got 2"),
        ("id,t,x\n1,2,low\n", "invalid value 'low'.*missing="),
        ("id,when,x\n1,2,3\n", "no column 't'"),
        ("id,t,x\n1,noon,3\n", "holds text such as 'noon'"),
        ("id,t,x\n", "no rows"),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read_csv(write(tmp_path / "a.csv", text), id="id", time="t")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("role", ["values", "static"])
def test_missing_columns_have_near_matches_among_all(
    tmp_path: Path, ending: str, role: str
) -> None:
    frame = random_series(5).to_frame("pandas").rename(columns={"age": "Pulse"})
    path = tmp_path / f"a.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    # Of the columns that are read, none is near: `Pulse` is not among them.
    layout = {"id": "id", "time": "time", "values": ["height"]} | {role: ["pulse"]}
    with pytest.raises(ValueError, match="no column 'pulse'; did you mean 'Pulse'"):
        read_table(path, **layout)


def test_absent_columns_can_be_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,t,x\n1,2,3\n")
    series = read_csv(path, id="id", time="t", values=["x", "y"], allow_absent=True)
    np.testing.assert_array_equal(series.values, [[3.0, np.nan]])


@pytest.mark.parametrize("name", ["a.csv.gz", "a.parquet", "a.npz", "a.ts.gz"])
def test_files_that_are_cut_off_are_refused(tmp_path: Path, name: str) -> None:
    series, path = random_series(50), tmp_path / name
    if name.endswith(".npz"):
        save_npz(series, path)
    elif name.endswith(".parquet"):
        parquet.write_table(series.to_frame("pyarrow"), path)
    elif name.endswith(".csv.gz"):
        series.to_frame("pandas").to_csv(path, index=False)
    else:
        path.write_bytes(gzip.compress(b"@timestamps false\n@data\n" + b"1,2,3:4\n" * 999))
    with pytest.raises(UnreadableFileError, match=name.replace(".", r"\.")):
        read_table(cut_in_half(path), **COLUMNS)


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = random_series(500).to_frame("pyarrow")
    parquet.write_table(table, path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[100:4000] = bytes(3900)
    path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match="cannot be read as Parquet"):
        read_parquet(path, **COLUMNS)


@pytest.mark.parametrize("labels", [None, ["x", "y", "z"], [[0.5], [1.5], [2.5]]])
def test_npz_holds_everything(tmp_path: Path, labels: Any) -> None:
    series = random_series(3, static=labels is not None).replace(labels=labels)
    save_npz(series, tmp_path / "a.npz")
    assert read_table(tmp_path / "a.npz").equals(series)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_npz_keeps_dates(tmp_path: Path) -> None:
    stamps = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[us]")
    series = from_frame({"id": [1, 1], "time": stamps, "x": [1.0, 2.0]}, id="id", time="time")
    save_npz(series, tmp_path / "a.npz")
    assert load_npz(tmp_path / "a.npz").decode_times().tolist() == stamps.tolist()


def test_unknown_members_of_an_npz_are_not_read(tmp_path: Path) -> None:
    series = random_series(3)
    save_npz(series, tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("more.npy", b"no array, which reading would say")
    with pytest.raises(UnreadableFileError, match="it has other members"):
        load_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.arange(3)}, "was not written by save_npz.* holds 'x'"),
        ({"ids": np.array([{}], dtype=object)}, "pickled objects"),
        ({"description": np.array('{"format": "other"}')}, "was not written by save_npz"),
    ],
)
def test_foreign_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UnreadableFileError, match=message):
        load_npz(tmp_path / "a.npz")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.npz"
    save_npz(random_series(3), path)
    before = path.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        save_npz(random_series(4), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_paths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_table(tmp_path / "a.csv", id="id", time="t")
    with pytest.raises(FileNotFoundError, match=r"no file that ends in \.parquet"):
        read_table(tmp_path, id="id", time="t")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_npz(tmp_path)
    with pytest.raises(ValueError, match="unknown ending"):
        read_table(write(tmp_path / "a.xlsx", ""), id="id", time="t")
