"""Numbers that float32 or float64 cannot hold are named, and so are impossible times."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.data import IrregularSeries, UnreadableFileError, from_frame, load_npz, read_ts

pa = pytest.importorskip("pyarrow")
COLUMNS = {"id": "id", "time": "t"}
TS = "@timestamps {}\n@classLabel true a b\n@data\n"


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [
        (np.array([1, 2**24 + 1]), "16777217, which becomes 16777216"),
        (np.array([1, 2**24 + 1.0]), "16777217, which becomes 16777216"),
        (np.array([1, -(2**60) - 1]), "-1152921504606846977"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), "18446744073709551615"),
        (pa.array([None, 2**24 + 1]), "16777217"),
        (np.array([1, 2**24 + 2]), None),
        (np.array([1.5, 2**24 + 0.5]), None),
        (np.array([1.0, 6.02214076e23]), None),
        (np.array([True, False]), None),
    ],
)
def test_whole_numbers_that_lose_digits_are_named(numbers: Any, lost: str | None) -> None:
    table = pa.table({"id": ["a", "a"], "t": [0, 1], "x": numbers})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from_frame(table, **COLUMNS)
        if not isinstance(numbers, pa.Array):
            IrregularSeries.from_arrays([[0, 1]], [numbers])
    texts = [str(item.message) for item in told]
    assert bool(texts) == (lost is not None)
    assert all(lost is not None and lost in text for text in texts)
    if texts:
        assert texts[0].startswith("feature column 'x': 1 whole numbers beyond 2**24")


def test_whole_numbers_of_ts_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    path.write_text(TS.format("false") + "1,16777217:2,3:a\n16777219,3:1,1:b\n")
    with pytest.warns(UserWarning, match=r"dimension 'dim_0': 2 whole numbers") as told:
        read_ts(path)
    assert len(told) == 1


@pytest.mark.parametrize("make", ["from_arrays", "from_padded"])
def test_equal_ids_are_refused(make: str) -> None:
    arguments: dict[str, Any] = {
        "from_arrays": ([[0.0], [1.0]], [[1.0], [2.0]]),
        "from_padded": (np.ones((2, 1, 1)),),
    }
    with pytest.raises(ValueError, match="ids must differ from each other; 'a' occurs"):
        getattr(IrregularSeries, make)(*arguments[make], ids=["a", "a"])


@pytest.mark.parametrize("time", [-(2**63), 2**63 - 1, 2**53 + 1])
def test_impossible_integer_times_are_refused(time: int) -> None:
    times = sorted((0, time))
    with pytest.raises(ValueError, match=f"beyond 2.*53.*{abs(time)}"):
        IrregularSeries.from_arrays([np.array(times)], [[1.0, 2.0]])
    table = {"id": ["a", "a"], "t": times, "x": [1.0, 2.0]}
    with pytest.raises(ValueError, match=rf"{abs(time)} is beyond 2\*\*53"):
        from_frame(table, **COLUMNS)


def test_times_that_overflow_when_subtracted_are_refused() -> None:
    ticks = pa.array([-(2**63), 2**62], pa.int64())
    for column in (ticks, ticks.cast(pa.timestamp("us"))):
        with pytest.raises(ValueError, match="span more than 64 bits can hold"):
            from_frame({"id": ["a", "a"], "t": column, "x": [1, 2]}, origin="series", **COLUMNS)


def test_unsigned_times_are_refused_by_column() -> None:
    times = pa.array([0, 2**64 - 1], pa.uint64())
    with pytest.raises(ValueError, match="column 't' has times up to 18446744073709551615, of"):
        from_frame({"id": ["a", "a"], "t": times, "x": [1, 2]}, **COLUMNS)


@pytest.mark.parametrize(
    ("stamps", "lines", "message"),
    [
        ("false", "1,1_0:2,3:a", "line 4: there is a character that belongs to no number"),
        ("false", "1,\u0661:2,3:a", "line 4: there is a character that belongs to no number"),
        ("true", "(1_0,1):(2,3):a", "line 4: there is a character that belongs to no number"),
        ("true", "(0,1):(1,3):a\n(0,1):(2020-01-01,3):b", "line 5: .*'2020-01-01'"),
        ("true", "(2020-01-01,1):(5,3):a", "line 4: the number 5 is among the timestamps"),
        ("true", "(2020-01-01,1):(2020-01-02,3):a\n(0,1):(1,3):b", "line 5: the number 0 is"),
    ],
)
def test_odd_numbers_and_dates_of_ts_files_are_refused(
    tmp_path: Path, stamps: str, lines: str, message: str
) -> None:
    path = tmp_path / "a.ts"
    path.write_text(TS.format(stamps) + lines + "\n", encoding="utf-8")
    with pytest.raises(UnreadableFileError, match=message):
        read_ts(path)


def test_labels_of_ts_files_are_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.ts").write_bytes(b"@classLabel true\n@data\n1,2:\xe4\n")
    with pytest.raises(UnreadableFileError, match="line 3: the label is not UTF-8"):
        read_ts(tmp_path / "a.ts")


@pytest.mark.parametrize("text", ["5", "[1]", '"x"', "null", "[" * 100_000, '{"format": 3}', "{"])
def test_npz_with_another_description_is_refused(tmp_path: Path, text: str) -> None:
    np.savez(tmp_path / "a.npz", times=np.zeros(1), description=np.array(text))
    with pytest.raises(UnreadableFileError, match=re.escape("was not written by save_npz")):
        load_npz(tmp_path / "a.npz")
