"""Features: exact states, honest summaries, names, and the same rows however they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from osciformer import ResonatorFeatures
from osciformer.data import IrregularSeries, ParquetSeries
from osciformer.data.series import TimeAxis, to_frame
from osciformer.resonators import Columns, FeatureName, features, respond_along
from osciformer.resonators.families import time_scales
from osciformer.resonators.states import States
from osciformer.resonators.summary import Observation, Static, Summary

SIMPLE = (Summary, Observation, Static)


def some_series(count: int = 12, seed: int = 0, *, missing: float = 0.3) -> IrregularSeries:
    generator = np.random.default_rng(seed)
    times = [np.sort(generator.uniform(0, 10, generator.integers(2, 9))) for _ in range(count)]
    values = [generator.normal(size=(len(t), 2)) for t in times]
    for table in values:
        table[1:][generator.random((len(table) - 1, 2)) < missing] = np.nan
    static = np.where(np.arange(count) % 3 == 0, np.nan, np.arange(count))[:, None]
    return IrregularSeries.from_arrays(
        times, values, static=static, feature_names=["pulse", "pressure"], static_names=["age"]
    )


def test_states_solve_the_equation_of_motion() -> None:
    series = some_series(3)
    family = States(Columns(series.feature_names, (), None))
    family.fit(series, np.random.default_rng(0))
    found = family.transform(series).reshape(3, 2, -1)
    periods, zetas = family.arrays["period"], family.arrays["zeta"]
    for number, one in enumerate(series):
        for variable in range(2):
            seen = ~np.isnan(one.values[:, variable])
            times, values = one.times[seen], one.values[seen, variable].astype(float)
            for place, (period, zeta) in enumerate(zip(periods, zetas, strict=True)):
                omega = 2 * np.pi / period

                def motion(
                    t: float,
                    z: np.ndarray,
                    path: tuple[np.ndarray, np.ndarray] = (times, values),
                    omega: float = omega,
                    zeta: float = zeta,
                ) -> list[float]:
                    push = omega**2 * (np.interp(t, *path) - z[0]) - 2 * zeta * omega * z[1]
                    return [z[1], push]

                # From its own first observation to its own last one.
                ends = (times[0], times[-1])
                settings = {"rtol": 1e-8, "atol": 1e-8, "max_step": 0.2}
                end = solve_ivp(motion, ends, [values[0], 0.0], **settings).y[0, -1]
                assert found[number, variable, place] == pytest.approx(end, abs=2e-4)


def test_states_of_a_variable_that_a_series_lacks_are_unknown() -> None:
    times = [[0.0, 1.0], [0.0, 2.0]]
    values = [[[1.0, np.nan], [2.0, np.nan]], [[1.0, 1.0], [1.0, 1.0]]]
    series = IrregularSeries.from_arrays(times, values)
    for family in (States, Summary):
        fitted = family(Columns(series.feature_names, (), None))
        fitted.fit(series, np.random.default_rng(0))
        found = fitted.transform(series).reshape(2, 2, -1)
        assert np.isnan(found[0, 1]).all()
        assert np.isfinite(found[[0, 1, 1], [0, 0, 1]]).all()
    everything = ResonatorFeatures(random_state=0).fit(series)
    assert np.isfinite(everything.transform(series)).all()
    assert np.isnan(next(everything.transform_parts(series))).any()


def test_summaries_are_those_of_each_series_by_itself() -> None:
    series = some_series()
    families = [kind(Columns(series.feature_names, ("age",), None)) for kind in SIMPLE]
    for family in families:
        family.fit(series, np.random.default_rng(0))
    found = np.hstack([family.transform(series) for family in families])
    unit = float(families[1].arrays["span"])
    names = [str(name) for family in families for name in family.names()]
    for row, one in zip(found, series, strict=True):
        read = dict(zip(names, row, strict=True))
        assert len(read) == len(names)
        for number, name in enumerate(series.feature_names):
            column = one.values[:, number]
            (seen,) = np.nonzero(~np.isnan(column))
            known = column[seen]
            assert read[f"{name}, last"] == known[-1]
            assert read[f"{name}, first"] == known[0]
            assert read[f"{name}, smallest"] == known.min()
            assert read[f"{name}, largest"] == known.max()
            assert read[f"{name}, mean"] == pytest.approx(known.mean(), abs=1e-6)
            assert read[f"{name}, standard deviation"] == pytest.approx(known.std(), abs=1e-6)
            if len(known) > 1:
                slope = np.polyfit(one.times[seen], known, 1)[0]
                assert read[f"{name}, slope"] == pytest.approx(slope, rel=1e-4, abs=1e-5)
            else:
                assert np.isnan(read[f"{name}, slope"])
            assert read[f"{name}, observations (log)"] == pytest.approx(np.log1p(len(known)))
            since = (one.times[-1] - one.times[seen[-1]]) / unit
            assert read[f"{name}, time since the last observation"] == pytest.approx(since)
            assert read[f"{name}, share missing"] == pytest.approx(1 - len(known) / len(one))
        assert read["series, rows (log)"] == pytest.approx(np.log1p(len(one)))
        assert one.static is not None
        assert read["age, missing"] == np.isnan(one.static[0])
        kinds = [read[f"age, kind {k} of 8"] for k in range(1, 9)]
        assert sum(kinds) == (not np.isnan(one.static[0]))


def test_rows_do_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    series = some_series()
    fitted = ResonatorFeatures(random_state=0).fit(series)
    whole = fitted.transform(series)
    assert whole.dtype == np.float32
    for number in (0, 5, 11):
        np.testing.assert_allclose(
            fitted.transform(series[number : number + 1])[0], whole[number], atol=1e-6
        )
    monkeypatch.setattr(features, "_BLOCK_ROWS", 7)
    np.testing.assert_allclose(fitted.transform(series), whole, atol=1e-6)


def test_parquet_is_as_good_as_memory(tmp_path: Path) -> None:
    series = some_series(40)
    path = tmp_path / "t.parquet"
    to_frame(series).to_parquet(path, index=False)
    table = ParquetSeries(path, id="id", time="time", static=("age",), chunk_rows=30)
    assert table.num_blocks > 3
    fitted = [ResonatorFeatures(random_state=0).fit(X) for X in (series, table)]
    rows = [one.transform(X) for one, X in zip(fitted, (series, table), strict=True)]
    np.testing.assert_allclose(*rows, atol=1e-6)


def test_names_tell_variable_period_and_quality() -> None:
    times, values = [[0.0, 1.0, 2.0]], [[[1.0], [2.0], [1.0]]]
    axis = TimeAxis(kind="duration", unit="h", resolution="ns")
    series = IrregularSeries.from_arrays(times, values, feature_names=["pulse"], time_axis=axis)
    fitted = ResonatorFeatures(families=("states",)).fit(series)
    names = fitted.get_feature_names_out()
    assert names[0] == "pulse at period 1 h, Q 1, position at the end"
    assert len(names) == fitted.transform(series).shape[1]
    assert str(FeatureName("x", (), "span")) == "series, span"


@pytest.mark.parametrize("rows", [0, 1])
def test_series_with_no_row_or_one_have_finite_features(rows: int) -> None:
    times, values = [np.arange(4.0), np.arange(float(rows))], [np.ones((4, 1)), np.ones((rows, 1))]
    series = IrregularSeries.from_arrays(times, values, empty="keep")
    found = ResonatorFeatures(random_state=0).fit(series).transform(series)
    assert np.isfinite(found).all()
    only = ResonatorFeatures(random_state=0).fit(series[:1]).transform(series[1:])
    assert np.isfinite(only).all()


def test_missing_variables_and_constant_ones_are_fine() -> None:
    series = some_series()
    values = series.values.copy()
    values[:, 1] = np.nan
    values[:, 0] = np.where(np.isnan(values[:, 0]), np.nan, 3.0)
    found = ResonatorFeatures().fit_transform(series.replace(values=values))
    assert np.isfinite(found).all()
    with pytest.raises(ValueError, match="all values of all 12 series are missing"):
        ResonatorFeatures().fit(series.replace(values=np.full_like(values, np.nan)))


def test_other_columns_are_refused_by_name() -> None:
    fitted = ResonatorFeatures().fit(some_series())
    with pytest.raises(ValueError, match="'pressure' are missing"):
        fitted.transform(IrregularSeries.from_arrays([[0.0]], [[1.0]], feature_names=["pulse"]))


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (("spectra",), "families must be one of"),
        ((), "at least one"),
        (("states",) * 2, "each once"),
    ],
)
def test_families_that_are_not_there_are_refused(families: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResonatorFeatures(families=families).fit(some_series())


def test_unfitted_features_say_so() -> None:
    with pytest.raises(ValueError, match="this ResonatorFeatures is not fitted; call fit"):
        ResonatorFeatures().transform(some_series())


def test_state_is_plain_and_comes_back() -> None:
    series = some_series()
    fitted = ResonatorFeatures(random_state=0).fit(series)
    again = ResonatorFeatures().restore(*fitted.state())
    np.testing.assert_array_equal(again.transform(series), fitted.transform(series))


def test_time_scales_of_no_gap_are_one() -> None:
    assert time_scales(IrregularSeries.from_arrays([[2.0]], [[1.0]])) == (1.0, 1.0)


def test_response_along_time_peaks_at_the_period_while_it_lasts() -> None:
    times = np.sort(np.random.default_rng(0).uniform(0, 100, 400))
    wave = np.where(times > 50, np.sin(2 * np.pi * times / 5.0), 0.0)
    series = IrregularSeries.from_arrays([times], [np.stack((wave, 0 * wave), 1)])
    found = respond_along(series, np.array([1.0, 2.0, 5.0, 12.0, 30.0]), 4.0, 101)
    assert found.amplitude.shape == (101, 2, 5)
    late, early = found.amplitude[80:, 0].mean(axis=0), found.amplitude[20:45, 0].mean(axis=0)
    assert late.argmax() == 2
    assert late[2] > 5 * early[2]
    assert found.amplitude[:, 1].max() == 0.0
    axes = found.plot().axes
    assert [axis.get_title() for axis in axes[:2]] == ["feature_0", "feature_1"]
