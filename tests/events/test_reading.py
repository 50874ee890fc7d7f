"""Tables of events become sequences; types that are not known are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osciformer.data import UnreadableFileError
from osciformer.events import EventSequences, events_from_frame, events_from_parquet

TABLE = {
    "id": ["b", "a", "b", "b"],
    "time": [3.0, 1.0, 2.0, 3.0],
    "type": ["sell", "buy", "buy", "buy"],
}


@pytest.mark.parametrize("library", [dict, pd.DataFrame, pl.DataFrame, pa.table])
def test_rows_of_any_table_are_sorted_and_types_numbered(library: type) -> None:
    events = EventSequences.from_frame(library(TABLE))
    assert events.ids.tolist() == ["b", "a"]
    assert events[0].times.tolist() == [2.0, 3.0, 3.0]
    assert events.type_names == ("buy", "sell")
    assert events[0].types.tolist() == [0, 1, 0]  # at one time, in the order of rows


def test_categories_of_pandas_are_types() -> None:
    frame = pd.DataFrame(TABLE).astype({"type": "category"})
    assert events_from_frame(frame)[0].types.tolist() == [0, 1, 0]


def test_dates_count_from_the_first_event_in_the_unit_asked_for() -> None:
    moments = pd.to_datetime(["2024-01-01 00:00", "2024-01-01 12:00", "2024-02-01 00:00"])
    frame = pd.DataFrame({"id": [1, 1, 2], "time": moments, "type": [0, 1, 0]})
    events = events_from_frame(frame, unit="h")
    assert events[0].times.tolist() == [0.0, 12.0]
    assert (events[1].times.tolist(), events.time_unit) == ([0.0], "h")


def test_windows_are_read_in_the_times_of_their_sequence() -> None:
    day = pd.Timestamp("2024-01-01")
    frame = pd.DataFrame(
        {
            "id": [1, 1],
            "time": [day + pd.Timedelta(hours=1), day + pd.Timedelta(hours=2)],
            "type": [0, 0],
            "begin": [day, day],
            "end": [day + pd.Timedelta(hours=9)] * 2,
        }
    )
    events = events_from_frame(frame, unit="h", start="begin", end="end")
    assert (events[0].start, events[0].end) == (-1.0, 8.0)
    with pytest.raises(ValueError, match="'end' must have one value per sequence; 1 has several"):
        events_from_frame({"id": [1, 1], "time": [0, 1], "type": [0, 0], "end": [2, 3]}, end="end")
    with pytest.raises(TypeError, match="must hold times as column 'time' does"):
        events_from_frame(frame.assign(end=5.0), end="end")


def test_one_type_needs_no_column() -> None:
    events = events_from_frame({"id": [1, 1], "time": [0, 1]}, type=None, time_unit="min")
    assert (events.num_types, events.types.tolist(), events.time_unit) == (1, [0, 0], "min")


@pytest.mark.parametrize(
    ("types", "settings", "message"),
    [
        (["buy", "Sel"], {"type_names": ["buy", "sell"]}, "'Sel'; did you mean 'sell'?"),
        (["buy", "xyz"], {"type_names": ["buy", "sell"]}, "the types are ['buy', 'sell']"),
        ([0, 7], {"num_types": 3}, "must be from 0 to 2; there is 7"),
        ([0, 7], {"type_names": ["a", "b"]}, "must be from 0 to 1; there is 7"),
        ([0, -1], {}, "must be from 0 on; there is -1"),
        (["buy", None], {}, "1 rows without a type, the first is row 1"),
        ([0.5, 1.0], {}, "must be text or integers from 0; got float64"),
    ],
)
def test_wrong_types_are_refused_by_name(types: list, settings: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        events_from_frame({"id": [1, 1], "time": [0.0, 1.0], "type": types}, **settings)


def test_types_of_the_training_data_keep_their_numbers() -> None:
    train = events_from_frame(TABLE)
    test = events_from_frame(
        {"id": [1], "time": [0.0], "type": ["sell"]}, type_names=train.type_names
    )
    assert (test.types.tolist(), test.num_types) == ([1], 2)


def test_ties_can_be_refused() -> None:
    with pytest.raises(ValueError, match=r"1 events are at the time of another one.*'b'"):
        events_from_frame(TABLE, duplicates="error")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": [3.0, np.nan, 2.0, 3.0]}, "rows with a time that is not finite"),
        ({"time": [3.0, None, 2.0, 3.0]}, "without a time"),
        ({"id": ["b", None, "b", "b"]}, "rows without an id"),
    ],
)
def test_missing_entries_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        events_from_frame({**TABLE, **changes})


def test_missing_columns_have_near_matches() -> None:
    with pytest.raises(ValueError, match="no column 'typ'; did you mean 'type'"):
        events_from_frame(TABLE, type="typ")


def test_parquet_files_and_folders_are_read(tmp_path: Path) -> None:
    table = pa.table(TABLE)
    pq.write_table(table.slice(0, 2), tmp_path / "one.parquet")
    pq.write_table(table.slice(2, 2), tmp_path / "two.parquet")
    events = EventSequences.from_parquet(tmp_path)
    assert events[0].types.tolist() == [0, 1, 0]
    (tmp_path / "one.parquet").write_bytes(b"no")
    with pytest.raises(UnreadableFileError, match="cannot be read as Parquet"):
        events_from_parquet(tmp_path / "one.parquet")
