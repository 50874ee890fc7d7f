"""Tables read chunk by chunk hold what they hold in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer.data import (
    IrregularSeries,
    ParquetSeries,
    SeriesStatistics,
    UnreadableFileError,
    concatenate,
    read_parquet,
)

from .series_cases import random_series

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS: dict[str, Any] = {
    "id": "id",
    "time": "time",
    "static": ["age", "height"],
    "label": "label",
}
BARE: dict[str, Any] = {"id": "id", "time": "time", "label": "label"}
SERIES = random_series(60)


@pytest.fixture(scope="module")
def table_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    parquet.write_table(SERIES.to_frame("pyarrow"), path, row_group_size=37)
    return path


@pytest.mark.parametrize("chunk_rows", [1, 10, 64, 100_000])
def test_chunks_together_are_the_table(table_path: Path, chunk_rows: int) -> None:
    table = ParquetSeries(table_path, chunk_rows=chunk_rows, **COLUMNS)
    chunks = list(table.chunks())
    assert concatenate(chunks).equals(SERIES)
    assert len(chunks) == table.num_blocks
    longest = max(SERIES.lengths)
    assert all(len(chunk.times) <= max(chunk_rows, longest) for chunk in chunks)


def test_an_opened_table_knows_its_series(table_path: Path) -> None:
    table = ParquetSeries(table_path, chunk_rows=50, **COLUMNS)
    assert len(table) == 60
    assert table.ids.tolist() == SERIES.ids.tolist()
    assert table.num_rows.tolist() == SERIES.lengths.tolist()
    assert table.feature_names == SERIES.feature_names
    assert table.labels().tolist() == SERIES.labels.tolist()
    assert "60 series" in repr(table)
    found, expected = table.statistics(), SeriesStatistics.of(SERIES)
    np.testing.assert_allclose(found.features.mean, expected.features.mean)
    assert found.longest_span == expected.longest_span


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=60, max_size=60), st.sampled_from([5, 40]))
def test_a_selection_is_read_in_the_order_of_the_file(
    table_path: Path, kept: list[bool], chunk_rows: int
) -> None:
    table = ParquetSeries(table_path, chunk_rows=chunk_rows, **COLUMNS)
    if not any(kept):
        with pytest.raises(ValueError, match="selects no series"):
            table.select(kept)
        return
    table = table.select(kept)
    assert len(table) == sum(kept)
    parts = list(table.read_blocks(range(table.num_blocks)))
    positions = np.concatenate([positions for positions, _ in parts])
    assert positions.tolist() == list(range(len(table)))
    assert table.read().equals(SERIES[np.array(kept)])
    assert table.labels().tolist() == SERIES.labels[np.array(kept)].tolist()


@pytest.mark.parametrize("read", [ParquetSeries, read_parquet])
def test_files_of_a_folder_must_have_the_same_columns(tmp_path: Path, read: Any) -> None:
    write(tmp_path / "1.parquet", id=["a"], time=[0], x=[1.0])
    write(tmp_path / "2.parquet", id=["b"], time=[0], y=[1.0])
    with pytest.raises(ValueError, match=r"2\.parquet and .* differ in .*x: double"):
        read(tmp_path, id="id", time="time")


def test_selections_compose(table_path: Path) -> None:
    table = ParquetSeries(table_path, **COLUMNS)
    assert table.select([3, 50, 7]).select([0, 2]).ids.tolist() == SERIES.ids[[3, 50]].tolist()


@pytest.mark.parametrize("chunk_rows", [10, 1000])
def test_a_folder_is_one_table_and_series_may_cross_files(tmp_path: Path, chunk_rows: int) -> None:
    table = SERIES.to_frame("pyarrow")
    for number, start in enumerate(range(0, table.num_rows, 101)):
        part = table.slice(start, 101)
        parquet.write_table(part, tmp_path / f"part-{number}.parquet", row_group_size=20)
    assert ParquetSeries(tmp_path, chunk_rows=chunk_rows, **COLUMNS).read().equals(SERIES)


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_narrow_tables_have_the_same_features_in_all_chunks(
    tmp_path: Path, chunk_rows: int
) -> None:
    columns = {
        "id": ["a", "a", "a", "b", "c", "c"],
        "time": [0.0, 1.0, 1.0, 0.0, 2.0, 0.0],
        "what": ["x", "y", "age", "x", "z", "age"],
        "value": [1.0, 2.0, 60.0, 3.0, 4.0, 70.0],
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    layout = {"id": "id", "time": "time", "variable": "what", "value": "value", "static": ["age"]}
    table = ParquetSeries(path, chunk_rows=chunk_rows, **layout)
    assert table.feature_names == ("x", "y", "z")
    assert table.read().equals(read_parquet(path, **layout))


def write(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("ids", [["a", "b", "a", "b"], ["a", "a", "b", "a"]])
def test_scattered_series_are_refused_with_the_fix(tmp_path: Path, ids: list[str]) -> None:
    path = write(tmp_path / "a.parquet", id=ids, time=[0, 1, 2, 3], x=[1.0] * 4)
    with pytest.raises(ValueError, match=r"those of 'a'.* do not.*sort\('id'\)"):
        ParquetSeries(path, id="id", time="time")


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({}, {"values": ["xx"]}, "no column 'xx'; did you mean 'x'"),
        ({}, {"id": "name"}, "no column 'name'"),
        ({}, {"empty": "drop"}, "select"),
        ({}, {"chunk_rows": 0}, "chunk_rows must be at least 1"),
        ({"id": ["a", None]}, {}, "without an id, the first is row 1"),
        ({"id": [], "time": [], "x": []}, {}, "no rows"),
    ],
)
def test_bad_tables_are_refused_when_opened(
    tmp_path: Path, columns: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    path = write(
        tmp_path / "a.parquet", **{"id": ["a", "b"], "time": [0, 1], "x": [1, 2], **columns}
    )
    with pytest.raises(ValueError, match=message):
        ParquetSeries(path, **{"id": "id", "time": "time", **settings})


def test_bad_rows_are_refused_when_read_with_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=["a", "b", "b"], time=[0, 1, 1], x=[1, 2, 3])
    table = ParquetSeries(path, id="id", time="time", chunk_rows=1)
    with pytest.raises(ValueError, match=r"rows 1 to 2: .*series b"):
        list(table.chunks())
    with pytest.raises(ValueError, match="names no label column"):
        table.labels()


def test_damaged_files_are_refused(tmp_path: Path, table_path: Path) -> None:
    path = tmp_path / "a.parquet"
    content = table_path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(UnreadableFileError, match="cannot be read as Parquet"):
        ParquetSeries(path, **COLUMNS)
    path.write_bytes(content[:4] + bytes(2000) + content[2004:])
    with pytest.raises(UnreadableFileError, match="cannot be read as Parquet"):
        ParquetSeries(path, **COLUMNS).read()


def test_chunks_of_dates_agree(tmp_path: Path) -> None:
    stamps = pa.array([0, 3600, 7200], pa.timestamp("s", "Asia/Tokyo"))
    path = write(tmp_path / "a.parquet", id=["a", "a", "b"], time=stamps, x=[1.0, 2.0, 3.0])
    series = ParquetSeries(path, id="id", time="time", unit="h", chunk_rows=1).read()
    assert isinstance(series, IrregularSeries)
    assert series.times.tolist() == [0.0, 1.0, 0.0]
    assert series.to_frame("pyarrow")["time"].to_pylist() == stamps.to_pylist()


def test_further_static_features_come_with_their_series(table_path: Path) -> None:
    table = ParquetSeries(table_path, chunk_rows=50, **COLUMNS)
    number = np.arange(60.0)[:, None]
    wider = table.with_static(number, ["number"]).with_static(-number, ["minus"])
    assert wider.static_names == ("age", "height", "number", "minus")
    found = concatenate(list(wider.chunks()))
    assert found.static_names == wider.static_names
    np.testing.assert_array_equal(found.static, np.hstack([SERIES.static, number, -number]))
    assert table.static_names == ("age", "height")


def test_further_static_features_follow_selections(table_path: Path) -> None:
    table = ParquetSeries(table_path, chunk_rows=50, static=["age"], **BARE)
    chosen = np.array([3, 17, 40, 59])
    later = table.with_static(np.arange(60.0)[:, None], ["number"]).select(chosen).read()
    assert later.static[:, 1].tolist() == chosen.tolist()
    first = table.select(chosen).with_static(np.arange(4.0)[:, None], ["number"])
    assert first.read().static[:, 1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first.select([2]).read().static[:, 1].tolist() == [2.0]


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        (59, ["number"], r"static must be \[60, S\]; got \[59, 1\]"),
        (60, ["age"], "'age' occurs twice"),
        (60, ["a", "b"], "must have 2 entries; got 3"),
    ],
)
def test_bad_static_features_are_refused(
    table_path: Path, rows: int, names: list[str], message: str
) -> None:
    table = ParquetSeries(table_path, static=["age"], **BARE)
    with pytest.raises(ValueError, match=message):
        table.with_static(np.zeros((rows, 1)), names)
