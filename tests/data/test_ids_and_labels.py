"""Ids and classes come back as they were written; what is missing or no id is refused by name."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer.data import Layout, ParquetSeries, from_frame, join_frame, read_csv, read_table
from osciformer.data.tables import MISSING

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS = {"id": "id", "time": "t"}
LIKE_NUMBERS = ["007", "07", "7", "7.0", "1e2", "100", " 100", "+7", "true", "0x7", "2024-01-01"]
LONG = [f"{10**19 + k}" for k in range(40)]  # 20 digits: the same number in float64


def write(path: Path, ids: Any, labels: Any = None) -> Path:
    pairs = enumerate(zip(ids, range(len(ids)) if labels is None else labels, strict=True))
    rows = [f'"{id}",{k},1.5,"{label}"' for k, (id, label) in pairs]
    path.write_text("\n".join(["id,t,x,y", *rows]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("entries", [LIKE_NUMBERS, LIKE_NUMBERS[:6], LONG])
def test_ids_and_classes_of_csv_are_text(tmp_path: Path, entries: list[str]) -> None:
    series = read_csv(write(tmp_path / "a.csv", entries, entries), label="y", **COLUMNS)
    assert series.ids.tolist() == entries
    assert series.labels is not None
    assert series.labels.tolist() == entries


@settings(deadline=None, max_examples=30)
@given(
    ids=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters='"\0\r\n'), min_size=1).filter(
            lambda text: text.strip() and text.strip() not in MISSING
        ),
        min_size=1,
        unique=True,
    )
)
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.csv", ids)
    assert read_csv(path, **COLUMNS, values=["x"]).ids.tolist() == ids


def test_types_are_guessed_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ["007", "8"], ["01", "2"])
    series = read_csv(path, label="y", guess_types=True, **COLUMNS)
    assert series.ids.tolist() == [7, 8]
    assert series.labels is not None
    assert series.labels.tolist() == [1, 2]


def test_real_targets_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ["a", "b"], ["01", "2.5"])
    labels = read_csv(path, label=["y"], **COLUMNS).labels
    assert labels is not None
    assert labels.tolist() == [[1.0], [2.5]]
    with pytest.raises(ValueError, match="invalid value 'low'"):
        read_csv(write(tmp_path / "b.csv", ["a"], ["low"]), label=["y"], **COLUMNS)
    with pytest.raises(TypeError, match="'y' must hold numbers, since a list of labels"):
        from_frame({"id": [1], "t": [0], "x": [1], "y": ["low"]}, label=["y"], **COLUMNS)


def test_parquet_keeps_types(tmp_path: Path) -> None:
    table = {"id": pa.array([7, 8], pa.int32()), "t": [0, 1], "x": [1.0, 2.0], "y": [True, False]}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    series = read_table(tmp_path / "a.parquet", label="y", **COLUMNS)
    assert series.ids.dtype == np.int32
    assert series.labels is not None
    assert series.labels.dtype == np.bool_


@pytest.mark.parametrize("entry", [*MISSING, "  ", " NA "])
def test_one_rule_for_what_is_missing(tmp_path: Path, entry: str) -> None:
    path = write(tmp_path / "a.csv", ["a", "b"], ["yes", entry])
    frame = {"id": ["a", "b"], "t": [0, 1], "x": [1.0, 2.0], "y": ["yes", entry]}
    parquet.write_table(pa.table(frame), tmp_path / "a.parquet")
    for found in (path, tmp_path / "a.parquet"):
        with pytest.raises(ValueError, match="label column 'y' is empty for series 'b'"):
            read_table(found, label="y", **COLUMNS)
    with pytest.raises(ValueError, match="label column 'y' is empty for series 'b'"):
        ParquetSeries(tmp_path / "a.parquet", label="y", **COLUMNS).labels()
    series = from_frame(frame, values=["x"], **COLUMNS)
    with pytest.raises(ValueError, match="label column 'y' is empty for series 'b'"):
        join_frame(series, frame, id="id", label="y")
    with pytest.raises(ValueError, match="'id' has 1 rows without an id, the first is row 1"):
        from_frame(frame | {"id": ["a", entry]}, values=["x"], **COLUMNS)
    with pytest.raises(ValueError, match="1 rows without the name of a variable"):
        from_frame({**frame, "v": ["p", entry]}, variable="v", value="x", **COLUMNS)


def test_other_texts_can_mean_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ["a", "b"], ["NA", "no"])
    series = read_csv(path, label="y", missing=["-"], **COLUMNS)
    assert series.labels is not None
    assert series.labels.tolist() == ["NA", "no"]
    layout = Layout(**COLUMNS, missing=["-"])
    assert Layout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize("where", ["series", "outcomes"])
def test_ids_of_csv_are_found_in_parquet(where: str) -> None:
    numbers, texts = {"id": [7, 8], "t": [0, 1], "x": [1.0, 2.0]}, {"id": ["8", "7"], "y": [1, 0]}
    if where == "outcomes":
        numbers["id"], texts["id"] = ["7", "8"], [8, 7]  # type: ignore[list-item]
    found = join_frame(from_frame(numbers, **COLUMNS), texts, id="id", label="y")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1]
    floats = {name: pa.array(cells) for name, cells in texts.items()}
    if where == "outcomes":
        floats["id"] = floats["id"].cast(pa.float64())
    assert join_frame(from_frame(numbers, **COLUMNS), floats, id="id", label="y").equals(found)
    with pytest.raises(ValueError, match=r"lacks 1 ids: '7'; it has ids such as '8'"):
        join_frame(from_frame(numbers, **COLUMNS), texts | {"id": ["8", "07"]}, id="id", label="y")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], [2]]), r"'id' holds list<.*> such as \[1\]"),
        (pa.array([{"a": 1}, {"a": 2}]), r"'id' holds struct<.*> such as {'a': 1}"),
        (pa.array([b"\xff", b"a"]), r"'id' holds binary such as b'\\xff'"),
        (pa.array([1, 2], pa.duration("s")), r"'id' holds duration\[s\]"),
        (pa.array([b"\xff", b"a"]).view(pa.string()), "'id' holds bytes that are not UTF-8"),
        (pa.array(["a", "a\0"]), "'id' has an entry with a NUL"),
        (pa.array(["a", "b" * 1001]), "'id' has an entry of 1001 characters"),
        (pa.array(["a", "b" * 1001]).dictionary_encode(), "'id' has an entry of 1001 characters"),
    ],
)
@pytest.mark.parametrize("role", ["id", "label"])
def test_what_cannot_be_an_id_or_a_class_is_refused(column: Any, message: str, role: str) -> None:
    name = {"id": "id", "label": "y"}[role]
    table = pa.table({"id": ["a", "b"], "t": [0, 1], "x": [1.0, 2.0], "y": [0, 1]})
    table = table.set_column(table.column_names.index(name), name, column)
    with pytest.raises((TypeError, ValueError), match=message.replace("'id'", f"'{name}'")):
        from_frame(table, label="y", **COLUMNS)


def test_dates_are_no_labels() -> None:
    days = [date(2024, 1, 1), date(2024, 1, 2)]
    table = {"id": ["a", "b"], "t": [0, 1], "x": [1.0, 2.0], "y": days}
    with pytest.raises(TypeError, match="'y' holds dates such as 2024-01-01"):
        from_frame(table, label="y", **COLUMNS)
    series = from_frame(table, values=["x"], **COLUMNS)
    with pytest.raises(TypeError, match="labels must be numbers or text; got dates"):
        series.replace(labels=np.array(days, dtype="datetime64[D]"))


@pytest.mark.parametrize("cell", ["id", "t", "x", "y", "a", "0", "1.5", "b"])
def test_csv_that_is_not_utf_8_is_refused(tmp_path: Path, cell: str) -> None:
    text = "id,t,x,y\na,0,1.5,b\n".replace(cell, "\xe4", 1)
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    name = {"id": "id", "time": "t", "label": "y"}
    with pytest.raises((TypeError, ValueError), match=r"UTF-8|UTF8|no column|invalid value|'t'"):
        read_csv(tmp_path / "a.csv", **name)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"id": 5}, "id must be the name of a column, a text; got 5. Use '5'"),
        ({"id": None}, "id must be the name of a column, a text; got None"),
        ({"time": 1.5}, "time must be the name of a column"),
        ({"values": 3}, r"values must be a list of names; got 3. Use \['3'\]"),
        ({"label": 3}, "label must be the name of a column; got 3"),
        ({"layout": 3}, "layout must be a Layout"),
    ],
)
def test_a_layout_of_numbers_is_refused(settings_: dict[str, Any], message: str) -> None:
    given = settings_ if "layout" in settings_ else {**COLUMNS, **settings_}
    with pytest.raises(TypeError, match=message):
        from_frame({"id": [1], "t": [0], "x": [1]}, **given)


def test_sparse_frames_are_refused() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"id": [1], "t": [0], "x": pd.arrays.SparseArray([1.0])})
    with pytest.raises(ValueError, match=r"column x.*to_dense\(\)"):
        from_frame(frame, **COLUMNS)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,t,x,x\n1,0,1,2\n")
    with pytest.raises(ValueError, match="several columns are called 'x'"):
        read_csv(tmp_path / "a.csv", **COLUMNS)
    table = pa.Table.from_arrays([[1], [0], [1], [2]], names=["id", "t", "x", "x"])
    with pytest.raises(ValueError, match="several columns are called 'x'"):
        from_frame(table, **COLUMNS)


def test_no_flipped_bit_of_the_footer_loses_rows(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"] * 3, "t": [0.0, 1.0, 2.0], "x": [1.5, 2.5, 3.5]})
    path, options = tmp_path / "a.parquet", {"compression": "none", "use_dictionary": False}
    options |= {"write_page_checksum": True, "store_schema": False, "write_statistics": False}
    parquet.write_table(table, path, **options)
    content = path.read_bytes()
    num_refused = 0
    size = int.from_bytes(content[-8:-4], "little")
    for where in range(len(content) - 8 - size, len(content)):
        damaged = bytearray(content)
        damaged[where] ^= 2
        path.write_bytes(damaged)
        try:
            assert len(read_table(path, **COLUMNS, values=["x"]).times) == 3, where
        except (TypeError, ValueError):
            num_refused += 1
    assert num_refused > size / 3


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    table = pa.table({"id": np.arange(200), "t": np.arange(200), "x": np.arange(200) + 0.5})
    path, marker = tmp_path / "a.parquet", np.float64(57.5).tobytes()
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, path, **options)
    content = bytearray(path.read_bytes())
    content[content.index(marker)] ^= 1
    path.write_bytes(content)
    for read in (read_table, lambda path, **names: ParquetSeries(path, **names).read()):
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet.*CRC"):
            read(path, **COLUMNS)
