"""Event sequences are read as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from osciformer.data.errors import UnreadableFileError
from osciformer.data.registry import get_dataset


@pytest.fixture(autouse=True)
def arrow() -> None:
    pytest.importorskip("pyarrow")


def test_text_files_become_a_table(local: Path) -> None:
    folder = local / "bookorder"
    folder.mkdir()
    (folder / "event-2-test.txt").write_text("1 2 1 \n2 \n")
    (folder / "time-2-test.txt").write_text("0 0.5 0.75 \n1.25 \n")
    table = get_dataset("bookorder", "test", fold=2)
    assert table.to_pydict() == {
        "seq_id": [0, 0, 0, 1],
        "time": [0.0, 0.5, 0.75, 1.25],
        "type": [0, 1, 0, 1],
    }


@pytest.mark.parametrize(
    ("types", "times", "message"),
    [
        ("1 1\n", "0 1\n0 1\n", "1 sequences, time-1-train.txt has 2"),
        ("1 1\n", "0 1 2\n", "line 1 has 2 types .* 3 times"),
        ("a\n", "0\n", r"event-1-train\.txt"),
    ],
)
def test_text_files_that_do_not_fit_are_named(
    local: Path, types: str, times: str, message: str
) -> None:
    folder = local / "stackoverflow"
    folder.mkdir()
    (folder / "event-1-train.txt").write_text(types)
    (folder / "time-1-train.txt").write_text(times)
    with pytest.raises(UnreadableFileError, match=message):
        get_dataset("stackoverflow", "train", fold=1)


@pytest.mark.parametrize("is_list", [True, False])
def test_json_files_become_a_table(local: Path, is_list: bool) -> None:
    sequences = [
        {"time_since_start": [0.0, 0.5], "type_event": [3, 1], "seq_len": 2},
        {"time_since_start": [0.0], "type_event": [0], "seq_len": 1},
    ]
    text = json.dumps(sequences) if is_list else "\n".join(map(json.dumps, sequences))
    (local / "taxi").mkdir()
    (local / "taxi" / "dev.json").write_text(text)
    table = get_dataset("taxi", "dev")
    assert table.to_pydict() == {
        "seq_id": [0, 0, 1],
        "time": [0.0, 0.5, 0.0],
        "type": [3, 1, 0],
    }


def test_json_of_another_form_is_named(local: Path) -> None:
    (local / "taxi").mkdir()
    (local / "taxi" / "dev.json").write_text('[{"times": []}]')
    with pytest.raises(UnreadableFileError, match="time_since_start"):
        get_dataset("taxi", "dev")


def test_a_fold_of_the_copy_is_chosen(local: Path) -> None:
    write(
        local / "tpp" / "mimic2.parquet",
        fold=[1, 2, 2, 2],
        split=["train", "train", "train", "dev"],
        seq_id=[0, 0, 0, 0],
        time=[0.0, 1.0, 2.0, 3.0],
        type=[1, 2, 3, 4],
    )
    table = get_dataset("mimic2", "train", fold=2, verify=False)
    assert table.to_pydict() == {"seq_id": [0, 0], "time": [1.0, 2.0], "type": [2, 3]}


def test_the_test_fold_of_stackoverflow_is_a_bit_of_its_mask(local: Path) -> None:
    write(
        local / "tpp" / "stackoverflow.parquet",
        split=["test", "test", "train"],
        seq_id=[0, 1, 2],
        time=[0.0, 1.0, 2.0],
        type=[1, 2, 3],
        test_fold_mask=[0b00001, 0b10001, 0b10000],
    )
    chosen = {
        (split, fold): get_dataset("stackoverflow", split, fold=fold, verify=False)["seq_id"]
        for split in ("train", "test")
        for fold in (1, 5)
    }
    assert {key: column.to_pylist() for key, column in chosen.items()} == {
        ("test", 1): [0, 1],
        ("train", 1): [2],
        ("test", 5): [1, 2],
        ("train", 5): [0],
    }


def write(path: Path, **columns: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir()
    table = {name: pyarrow.array(column) for name, column in columns.items()}
    table["split"] = table["split"].dictionary_encode()
    parquet.write_table(pyarrow.table(table), path)
