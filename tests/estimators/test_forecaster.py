from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.data import IrregularSeries, TimeAxis
from osciformer.estimators import OsciFormerForecaster, load_estimator

from .toy import TINY, decays, make

SETTINGS: dict[str, Any] = {**TINY, "max_epochs": 12, "learning_rate": 0.03, "dropout": 0.0}


@pytest.fixture(scope="module")
def fitted() -> OsciFormerForecaster:
    return make(OsciFormerForecaster, **SETTINGS, covariates=("noise",)).fit(decays(80))


def test_decay_is_forecast_better_than_by_the_last_value(fitted: OsciFormerForecaster) -> None:
    assert fitted.score(decays(40, seed=1)) > 0.3


def test_only_targets_are_predicted(fitted: OsciFormerForecaster) -> None:
    X = decays(5, seed=1)
    assert fitted.target_names_ == ("level",)
    assert np.shape(fitted.predict(X, [5.0, 6.0])) == (5, 2, 1)
    assert np.shape(fitted.predict_quantiles(X, [5.0, 6.0])) == (5, 2, 1, 5)


def test_quantiles_rise_and_hold_the_median(fitted: OsciFormerForecaster) -> None:
    X = decays(5, seed=1)
    found = np.asarray(fitted.predict_quantiles(X, [5.0]))
    assert (np.diff(found, axis=-1) >= 0).all()
    assert (found[..., 2] == fitted.predict(X, [5.0])).all()


def test_times_may_differ_among_series_and_come_in_any_order(fitted: OsciFormerForecaster) -> None:
    X = decays(3, seed=1)
    times = [[6.0, 5.0], [], [7.0]]
    found = fitted.predict(X, times)
    assert [part.shape for part in found] == [(2, 1), (0, 1), (1, 1)]
    swapped = fitted.predict(X, [[5.0, 6.0], [4.5], [7.0]])
    assert found[0] == pytest.approx(swapped[0][::-1], abs=1e-5)


def test_relative_times_count_from_the_last_observation(fitted: OsciFormerForecaster) -> None:
    X = decays(3, seed=1)
    ends = [one.times[-1] for one in X]
    found = fitted.predict(X, [0.5, 1.0], relative=True)
    absolute = fitted.predict(X, [[end + 0.5, end + 1.0] for end in ends])
    assert np.asarray(found) == pytest.approx(np.stack(absolute), abs=1e-5)


def test_past_times_are_refused_with_the_series_named(fitted: OsciFormerForecaster) -> None:
    X = decays(3, seed=1).replace(ids=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"series x ends at .* and 1 is asked.*relative=True"):
        fitted.predict(X, [1.0])


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (None, "times must say when"),
        ([[5.0]], "a list of 3 arrays, one per series; got 1"),
        ([[[5.0]]] * 3, r"must be \[M\]; those of series number 0 have the shape \[1, 1\]"),
        ([np.inf], "times must be finite .* the time inf"),
    ],
)
def test_bad_times_are_named(fitted: OsciFormerForecaster, times: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted.predict(decays(3), times)


def test_saved_model_forecasts_the_same_bits(fitted: OsciFormerForecaster, tmp_path: Path) -> None:
    X = decays(4, seed=1)
    again = load_estimator(fitted.save(tmp_path / "model"))
    assert isinstance(again, OsciFormerForecaster)
    wanted = fitted.predict_quantiles(X, [5.0])
    assert (np.asarray(again.predict_quantiles(X, [5.0])) == wanted).all()
    assert again.score(X) == fitted.score(X)
    assert again.horizon_ == fitted.horizon_


def test_dates_can_be_asked(fitted: OsciFormerForecaster) -> None:
    X = decays(20)
    axis = TimeAxis("datetime", unit="d", resolution="s", origin="series")
    start = np.datetime64("2024-01-01", "s").astype(np.int64)
    dated = X.replace(time_axis=axis, origins=np.full(20, start))
    model = make(OsciFormerForecaster, **TINY).fit(dated)
    dates = np.array(["2024-01-06", "2024-01-07"], dtype="datetime64[D]")
    assert np.asarray(model.predict(dated, dates)) == pytest.approx(
        np.asarray(model.predict(dated, [5.0, 6.0])), abs=1e-5
    )


def switches(count: int, seed: int) -> IrregularSeries:
    """Return series that jump to the value of a switch, which is known ahead."""
    generator = np.random.default_rng(seed)
    times, values = [], []
    for _ in range(count):
        t = np.sort(generator.uniform(0, 4, 12))
        switch = np.where(t > 2.0, generator.choice([-2.0, 2.0]), 0.0)
        times.append(t)
        values.append(np.stack([switch, switch], axis=1))
    return IrregularSeries.from_arrays(times, values, feature_names=["level", "switch"])


def test_covariate_that_is_known_ahead_is_seen_ahead() -> None:
    X, future = switches(60, 0), switches(30, 1)
    known = make(OsciFormerForecaster, **SETTINGS, known_covariates=("switch",), horizon=2.0).fit(X)
    blind = make(OsciFormerForecaster, **SETTINGS, covariates=("switch",), horizon=2.0).fit(X)
    assert known.score(future) > blind.score(future) + 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantiles": (0.1, 0.9)}, "contain 0.5"),
        ({"quantiles": (0.5, 0.5)}, "must rise between 0 and 1"),
        ({"covariates": ("weather",)}, r"covariates names \['weather'\], which X lacks"),
        ({"covariates": ("level", "noise")}, "at least one must be left to predict"),
        ({"horizon": -1.0}, "horizon must be positive and finite, or None; got -1.0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(OsciFormerForecaster, **{**TINY, **settings}).fit(decays(10))


def test_single_observations_cannot_be_forecast() -> None:
    X = IrregularSeries.from_arrays([[0.0], [1.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="most series have one time only"):
        make(OsciFormerForecaster, **TINY, validation_fraction=0.0).fit(X)
