"""One pass over chunks finds what NumPy finds over everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from osciformer.data import IrregularSeries, SeriesStatistics, transforms
from osciformer.data.transforms import ColumnStatistics

from .series_cases import irregular_series, random_series

rows = npst.arrays(
    np.float32,
    st.tuples(st.integers(1, 30), st.just(2)),
    elements=st.one_of(st.floats(-1e3, 1e3, width=32), st.just(float("nan"))),
)


@given(rows, st.data())
def test_chunks_of_rows_give_the_moments_of_the_whole(
    rows: np.ndarray, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    found = ColumnStatistics(2)
    for part in np.split(rows, cuts):
        found.update(part)
    for column in range(2):
        values = rows[:, column].astype(np.float64)
        values = values[~np.isnan(values)]
        assert found.count[column] == len(values)
        if len(values) == 0:
            assert np.isnan(found.quantile(0.5)[column])
            continue
        np.testing.assert_allclose(found.mean[column], values.mean(), atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(found.std[column], values.std(), atol=1e-6, rtol=1e-9)
        assert (found.low[column], found.high[column]) == (values.min(), values.max())
        np.testing.assert_allclose(found.quantile(0.25)[column], np.quantile(values, 0.25))


def test_sampled_quantiles_do_not_depend_on_chunks(monkeypatch: Any) -> None:
    monkeypatch.setattr(transforms, "SAMPLE_SIZE", 500)
    values = np.random.default_rng(0).standard_normal((20_000, 1)).astype(np.float32)
    whole = ColumnStatistics(1).update(values).quantile(0.75)
    parts = ColumnStatistics(1)
    for part in np.array_split(values, 7):
        parts.update(part)
    np.testing.assert_array_equal(whole, parts.quantile(0.75))
    np.testing.assert_allclose(whole, 0.6745, atol=0.15)


@given(irregular_series(), st.data())
def test_chunks_of_series_give_the_times_of_the_whole(
    series: IrregularSeries, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(series)))
    whole, parts = SeriesStatistics.of(series), SeriesStatistics.of(series[:cut], series[cut:])
    names = ("num_series", "num_rows", "longest", "first_time", "last_time", "longest_span")
    for name in names:
        assert getattr(whole, name) == getattr(parts, name)
    assert whole.num_gaps == parts.num_gaps
    assert whole.longest_span == max(
        one.times[-1] - one.times[0] if len(one) else 0 for one in series
    )


def test_description_has_a_line_per_feature() -> None:
    series = IrregularSeries.from_arrays(
        [[0.0, 2.0, 3.0]], [[[1, np.nan], [3, np.nan], [2, np.nan]]]
    )
    found = SeriesStatistics.of(series)
    first, second = found.describe()
    assert (first["count"], first["missing"], first["mean"]) == (3, 0.0, 2.0)
    assert (second["count"], second["missing"]) == (0, 1.0)
    assert np.isnan(second["mean"])
    assert found.mean_gap == 1.5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one chunk"):
        SeriesStatistics.of()
    with pytest.raises(ValueError, match="all chunks must have the features"):
        SeriesStatistics.of(random_series(2), random_series(2, num_features=1))
    with pytest.raises(ValueError, match=r"rows must be \[T, 2\]"):
        ColumnStatistics(2).update(np.zeros((3, 1)))
