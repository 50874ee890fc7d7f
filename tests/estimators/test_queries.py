from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import IrregularSeries
from osciformer.data.ragged import series_of_rows
from osciformer.estimators.queries import (
    Columns,
    ForecastDraw,
    HideDraw,
    drop_blank_rows,
    interpolate,
    last_value_before,
)

NAN = np.nan


def random_series(seed: int, count: int = 8) -> IrregularSeries:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 7, count)
    values = generator.normal(size=(lengths.sum(), 3)).astype(np.float32)
    values[generator.random(values.shape) < 0.4] = np.nan
    times = [np.sort(generator.integers(0, 6, length)).astype(float) for length in lengths]
    return IrregularSeries(np.concatenate(times), values, np.append(0, np.cumsum(lengths)))


def columns(targets: tuple[bool, ...] = (True, True, False), *, known: bool = False) -> Columns:
    return Columns(np.array(targets), np.array([False, False, known]), None)


@given(seed=st.integers(0, 200), horizon=st.floats(0.5, 5))
def test_forecast_inputs_end_where_queries_begin(seed: int, horizon: float) -> None:
    series = random_series(seed)
    inputs, asked = ForecastDraw(columns(), horizon)(series, np.random.default_rng(seed))
    for before, after in zip(inputs, asked, strict=True):
        if len(before) and len(after):
            assert before.times[-1] < after.times[0]
        if len(after):
            assert after.times[-1] - after.times[0] <= horizon
    assert np.isnan(asked.values[:, 2]).all()
    assert not np.isnan(asked.values).all(axis=1).any()


@given(seed=st.integers(0, 200))
def test_only_known_covariates_are_seen_after_the_cut(seed: int) -> None:
    series = random_series(seed)
    for at_end in (False, True):
        draw = ForecastDraw(columns(known=True), 2.0, at_end=at_end)
        inputs, asked = draw(series, np.random.default_rng(seed))
        for seen, after in zip(inputs, asked, strict=True):
            if len(after):
                assert np.isnan(seen.values[seen.times >= after.times[0], :2]).all()
    assert np.nansum(inputs.values[:, 2]) == pytest.approx(np.nansum(series.values[:, 2]), abs=1e-4)


def test_training_asks_with_all_some_and_none_of_what_is_known_ahead() -> None:
    # Otherwise a forecast would jump at the first future row, and mean nothing without such rows.
    times, values = np.arange(20.0), np.ones((20, 3))
    series = IrregularSeries.from_arrays([times] * 300, [values] * 300)
    draw = ForecastDraw(columns(known=True), horizon=100.0)
    inputs, asked = draw(series, np.random.default_rng(0))
    later = [
        (int((~np.isnan(seen.values[seen.times >= after.times[0], 2])).sum()), len(after))
        for seen, after in zip(inputs, asked, strict=True)
        if len(after) > 5
    ]
    shown = np.array([known / count for known, count in later])
    assert (shown == 0).mean() > 0.15
    assert (shown == 1).mean() > 0.15
    assert ((shown > 0.1) & (shown < 0.9)).mean() > 0.1
    # What was observed before the cut is seen all the same.
    for seen, after in zip(inputs, asked, strict=True):
        assert (seen.values[seen.times < after.times[0]] == 1.0).all()


@given(seed=st.integers(0, 200), fraction=st.floats(0.05, 0.95))
def test_hidden_and_seen_values_together_are_the_observed_ones(seed: int, fraction: float) -> None:
    series = random_series(seed)
    inputs, asked = HideDraw(columns(), fraction)(series, np.random.default_rng(seed))
    counts = [np.count_nonzero(~np.isnan(s.values)) for s in (series, inputs, asked)]
    assert counts[0] == counts[1] + counts[2]
    had_some = series.num_observed > 0
    assert (inputs.num_observed[had_some] > 0).all()
    assert np.isnan(asked.values[:, 2]).all()


def test_score_of_a_forecast_hides_the_last_horizon() -> None:
    series = IrregularSeries.from_arrays([[0.0, 1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0, 4.0]])
    draw = ForecastDraw(Columns(np.array([True]), np.array([False]), None), 1.5, at_end=True)
    inputs, asked = draw(series, np.random.default_rng(0))
    assert inputs.times.tolist() == [0.0, 1.0]
    assert asked.values.ravel().tolist() == [3.0, 4.0]


def test_inputs_are_clipped_and_targets_are_not() -> None:
    series = IrregularSeries.from_arrays([[0.0, 1.0, 2.0]], [[50.0, 1.0, 50.0]])
    draw = ForecastDraw(Columns(np.array([True]), np.array([False]), 6.0), 9.0, at_end=True)
    inputs, asked = draw(series, np.random.default_rng(0))
    assert inputs.values.ravel().tolist() == [6.0]
    assert asked.values.max() == 50.0


def test_blank_rows_go() -> None:
    series = IrregularSeries.from_arrays([[0.0, 1.0], [2.0]], [[NAN, 2.0], [3.0]])
    left = drop_blank_rows(series)
    assert left.times.tolist() == [1.0, 2.0]
    assert left.lengths.tolist() == [1, 1]


def test_baselines_know_simple_cases() -> None:
    series = IrregularSeries.from_arrays(
        [[0.0, 2.0], [1.0]], [[[1.0, NAN], [3.0, 8.0]], [[NAN, 5.0]]]
    )
    asked = IrregularSeries.from_arrays(
        [[1.0, 3.0], [0.5]], [np.zeros((2, 2)), np.zeros((1, 2))], empty="keep"
    )
    assert last_value_before(series, asked).tolist() == [[1.0, 0.0], [3.0, 8.0], [0.0, 0.0]]
    assert interpolate(series, asked).tolist() == [[2.0, 8.0], [3.0, 8.0], [0.0, 5.0]]
    assert series_of_rows(asked.offsets).tolist() == [0, 0, 1]
