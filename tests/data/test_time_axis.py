"""Times as numbers, and back to what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import IrregularSeries, TimeAxis

UNITS = ["ns", "us", "ms", "s", "min", "h", "d"]


@given(
    st.sampled_from(["datetime", "duration"]),
    st.sampled_from(UNITS),
    st.sampled_from(["s", "ms", "us", "ns"]),
    st.integers(-(2**60), 2**60),
    st.lists(st.integers(0, 2**50), min_size=1, max_size=5),
)
def test_dates_come_back_exactly(
    kind: Any, unit: str, resolution: str, origin: int, steps: list[int]
) -> None:
    axis = TimeAxis(kind, unit=unit, resolution=resolution, origin="series")
    origins = np.full(len(steps), origin)
    ticks = origins + np.array(steps)
    decoded = axis.decode(axis.encode(ticks, origins), origins)
    np.testing.assert_array_equal(axis.ticks_of(decoded), ticks)


@given(st.sampled_from(UNITS), st.sampled_from(["number", "datetime"]))
def test_axes_survive_json_values(unit: str, kind: Any) -> None:
    axis = TimeAxis() if kind == "number" else TimeAxis(kind, unit, "us", "Asia/Tokyo", "series")
    assert TimeAxis.from_dict(axis.to_dict()) == axis


def test_large_integers_need_an_origin() -> None:
    ticks = np.array([2**60, 2**60 + 1])
    with pytest.raises(ValueError, match="origin='series'"):
        TimeAxis().encode(ticks, None)
    assert TimeAxis(origin="series").encode(ticks, ticks[:1]).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "date"},
        {"unit": "s"},
        {"kind": "datetime", "unit": "week", "resolution": "s"},
        {"kind": "datetime", "unit": "s"},
        {"origin": "start"},
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        TimeAxis(**settings)


def test_a_container_decodes_and_encodes_times_of_its_series() -> None:
    axis = TimeAxis("datetime", unit="h", resolution="s", origin="series")
    starts = np.array(["2024-01-01", "2024-06-01"], dtype="datetime64[s]")
    series = IrregularSeries(
        [0.0, 1.0, 0.0],
        np.ones((3, 1)),
        [0, 2, 3],
        time_axis=axis,
        origins=starts.astype(np.int64),
    )
    assert series.decode_times()[1] == np.datetime64("2024-01-01T01:00")
    moments = series.decode_times(np.array([24.0]), [1])
    assert moments[0] == np.datetime64("2024-06-02")
    assert series.encode_times(moments, [1]).tolist() == [24.0]
    assert series[[1]].decode_times()[0] == starts[1]
    with pytest.raises(ValueError, match="positions"):
        series.decode_times(np.array([1.0]))
    with pytest.raises(TypeError, match=r"kind 'datetime'; got float64.*tz_convert"):
        series.encode_times([1.0], [0])
