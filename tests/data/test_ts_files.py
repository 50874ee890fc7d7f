"""The archives' text format, with and without timestamps."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from osciformer.data import IrregularSeries, UnreadableFileError, read_ts

from .series_cases import irregular_series

NAN = float("nan")
Read = Callable[..., IrregularSeries]


def header(*, timestamps: bool = False, dimensions: int = 2, label: str = "class") -> str:
    labels = {
        "class": "@classLabel true a b",
        "target": "@targetlabel true",
        "none": "@classLabel false",
    }
    return (
        "# a comment\n@problemName Toy\n"
        f"@timeStamps {str(timestamps).lower()}\n@missing true\n"
        f"@univariate {str(dimensions == 1).lower()}\n@dimensions {dimensions}\n"
        f"@equalLength false\n{labels[label]}\n@data\n"
    )


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str, **options: object) -> IrregularSeries:
        path = tmp_path / "toy.ts"
        path.write_text(text)
        return read_ts(path, **options)  # type: ignore[arg-type]

    return read


def test_steps_are_times_without_timestamps(read: Read) -> None:
    series = read(header() + "1,2,?:3,4,5:a\n\n6:7:b\n")
    assert series.times.tolist() == [0.0, 1.0, 2.0, 0.0]
    np.testing.assert_array_equal(series.values, [[1, 3], [2, 4], [NAN, 5], [6, 7]])
    assert series.labels.tolist() == ["a", "b"]
    assert series.ids.tolist() == [0, 1]
    assert series.feature_names == ("dim_0", "dim_1")


def test_dimensions_of_different_length_end_in_missing_values(read: Read) -> None:
    series = read(header() + "1,2,3:4:a\n")
    np.testing.assert_array_equal(series.values, [[1, 4], [2, NAN], [3, NAN]])


def test_timestamps_are_kept_and_dimensions_aligned(read: Read) -> None:
    series = read(header(timestamps=True) + "(0,1),(0.5,2),(2,?):(0.5,7),(0.25,8):a\n(1,2):?:b\n")
    assert series.times.tolist() == [0.0, 0.25, 0.5, 1.0]
    np.testing.assert_array_equal(series.values, [[1, NAN], [NAN, 8], [2, 7], [2, NAN]])
    assert series.lengths.tolist() == [3, 1]


def test_dates_are_times(read: Read) -> None:
    text = "(2020-01-01 00:00:00,1),(2020-01-01 01:30:00,3):(2020-01-01 00:00:00,2):a\n"
    series = read(header(timestamps=True) + text, unit="h")
    assert series.times.tolist() == [0.0, 1.5]
    assert series.decode_times()[1] == np.datetime64("2020-01-01T01:30")


def test_univariate_series_with_timestamps_and_targets(read: Read) -> None:
    text = header(timestamps=True, dimensions=1, label="target") + "(0,1),(3,2):0.25\n(1,1):-3\n"
    series = read(text)
    assert series.labels.tolist() == [0.25, -3.0]
    assert series.times.tolist() == [0.0, 3.0, 1.0]


def test_files_without_labels(read: Read) -> None:
    assert read(header(label="none") + "1,2:3,4\n").labels is None


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "toy.ts.gz"
    path.write_bytes(gzip.compress((header() + "1:2:a\n").encode()))
    assert len(read_ts(path)) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(series=irregular_series(min_length=1, ties=False))
def test_what_is_written_with_timestamps_is_read(series: IrregularSeries, tmp_path: Path) -> None:
    lines = []
    for one in series:
        dimensions = [
            ",".join(
                f"({float(t)!r},{'?' if np.isnan(x) else repr(float(x))})"
                for t, x in zip(one.times, one.values[:, k], strict=True)
            )
            for k in range(series.num_features)
        ]
        lines.append(":".join([*dimensions, "a"]))
    path = tmp_path / "toy.ts"
    top = header(timestamps=True, dimensions=series.num_features)
    path.write_text(top + "\n".join(lines))
    back = read_ts(path, empty="keep")
    observed = ~np.isnan(series.values).all(axis=1)
    np.testing.assert_array_equal(back.times, series.times[observed])
    np.testing.assert_array_equal(back.values, series.values[observed])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "line 1: expected a header line"),
        ("@problemName x\n", "no @data line"),
        (header(), "no series after @data"),
        (header() + "1,2:3,4:a\n5,6:7", "line 11: class '7' is not one of 'a', 'b'"),
        (header() + "1,2:3,4:a\n5,6:b", "line 11: 1 dimensions where 2 are expected"),
        (header() + "1,2:3,x:a\n", "line 10: .*'x'"),
        (header() + "1,2", "line 10: there is no label"),
        (header(timestamps=True) + "(0,1),(0.5", "line 10: there is no label"),
        (header(timestamps=True) + "(0,1),(0.5:(1,2):a", r"such as \(0.5,1.2\); got '\(0.5'"),
        (header(timestamps=True) + "(0,1),(x,2):(1,2):a", "line 10: .* among the timestamps"),
        (header(timestamps=True) + "(0,1),(nan,2):(1,2):a", "line 10: a time is not finite"),
        (header(label="target") + "1:2:abc\n", "the target 'abc' is not a number"),
        (
            "@equalLength true\n@seriesLength 3\n@classLabel true a\n@data\n1,2:a\n",
            "line 5: dimension 0 has 2 values and @equalLength promises 3",
        ),
        ("@classLabel true a\n@data\n1,2:3,4:a\n1,2:a\n", "1 dimensions where 2 are expected"),
    ],
)
def test_damaged_files_are_refused(read: Read, text: str, message: str) -> None:
    with pytest.raises(UnreadableFileError, match=message):
        read(text)


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.ts"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UnreadableFileError, match="line 1: expected a header line"):
        read_ts(path)


def test_comments_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "toy.ts"
    path.write_bytes(
        b"# Universit\xe9\n" + header().replace(" true", "\ttrue").encode() + b"1:2:a\n"
    )
    assert read_ts(path).labels.tolist() == ["a"]  # type: ignore[union-attr]


def test_missing_files_and_bad_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_ts(tmp_path / "none.ts")
    with pytest.raises(ValueError, match="unit must be one of"):
        read_ts(tmp_path / "none.ts", unit="week")


def test_ties_and_empty_series_follow_the_options(read: Read) -> None:
    text = header(timestamps=True, dimensions=1) + "(0,1),(0,3):a\n?:b\n"
    with pytest.raises(ValueError, match="duplicates='mean'"):
        read(text)
    with pytest.raises(ValueError, match="1 of 2 series have no value"):
        read(text, duplicates="mean")
    assert read(text, duplicates="mean", empty="keep").values.tolist() == [[2.0]]
    assert read(text, duplicates="keep", empty="drop").times.tolist() == [0.0, 0.0]
