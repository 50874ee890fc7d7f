"""Times, targets and weights of extreme size: the right answer, or an error that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
    ResonatorRegressor,
    load,
)
from osciformer.train.tasks import Quantiles, root_mean_square

from .toy import TINY, decays, make, two_levels

KINDS = (OsciFormerClassifier, OsciFormerForecaster, OsciFormerImputer)


@pytest.fixture(scope="module")
def fitted() -> dict[Any, Any]:
    return {kind: make(kind, **{**TINY, "max_epochs": 1}).fit(two_levels(12)) for kind in KINDS}


def ask(model: Any, X: Any) -> np.ndarray:
    is_forecast = isinstance(model, OsciFormerForecaster)
    found = model.predict(X, [20.0]) if is_forecast else model.predict(X)
    return np.concatenate(found) if isinstance(found, list) else np.asarray(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [1e39, -1e60, 1e300])
def test_far_times_are_refused_with_the_series_named(fitted: Any, kind: Any, far: float) -> None:
    X = two_levels(3)
    times = X.times.copy()
    times[X.offsets[1] if far < 0 else X.offsets[2] - 1] = far
    # A forecaster meets the times that are asked first, which lie before the far one.
    kinds = "has the time" if far < 0 or kind is not OsciFormerForecaster else "ends at"
    with pytest.raises(ValueError, match=rf"series p1 {kinds} {far:g}".replace("+", r"\+")):
        ask(fitted[kind], X.replace(times=times))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stretch", "message"),
    [(1e38, r"series p0 has the time .*e\+3"), (1e-32, r"the median gap between rows is .*e-33")],
)
def test_no_model_is_fitted_to_times_it_cannot_tell_apart(
    kind: Any, stretch: float, message: str
) -> None:
    X = two_levels(12)
    with pytest.raises(ValueError, match=message):
        make(kind, **TINY).fit(X.replace(times=X.times * stretch))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("horizon", [1e31, 1e100, 1e308, np.inf])
def test_horizons_beyond_measure_are_refused(fitted: Any, horizon: float, relative: bool) -> None:
    asked = rf"series p0 is asked about the time {horizon:g}".replace("+", r"\+")
    with pytest.raises(ValueError, match=rf"within 1e\+30 of 0; {asked}"):
        fitted[OsciFormerForecaster].predict(two_levels(3), [horizon], relative=relative)


@pytest.mark.parametrize("exponent", [0, 9, 18, 29])
@pytest.mark.parametrize("kind", KINDS)
def test_long_but_possible_times_give_finite_answers(fitted: Any, kind: Any, exponent: int) -> None:
    X = two_levels(3)
    if kind is OsciFormerForecaster:
        found = fitted[kind].predict(X, [10.0**exponent * 10.0])
    else:
        found = ask(fitted[kind], X.replace(times=X.times * 10.0**exponent))
    assert not any(x != x for x in np.ravel(found).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_models_that_are_not_finite_are_refused(kind: Any, tmp_path: Path) -> None:
    model = make(kind, **{**TINY, "max_epochs": 1}).fit(two_levels(12))
    with torch.no_grad():
        next(model.model_.head.parameters()).fill_(float("inf"))
    with pytest.raises(ValueError, match=r"the prediction for series p0 .*is not finite"):
        ask(model, two_levels(3))
    with pytest.raises(ValueError, match=r"not written: head.0.weight|not written: head.1.weight"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def levels(count: int) -> tuple[Any, np.ndarray]:
    X = two_levels(count)
    return X, np.array([np.nanmean(one.values) for one in X], dtype=np.float64)


@pytest.mark.parametrize("kind", [OsciFormerRegressor, ResonatorRegressor])
@pytest.mark.parametrize("size", [1e-280, 1e153])
def test_targets_of_any_unit_give_the_same_model(kind: Any, size: float, tmp_path: Path) -> None:
    settings: Any = {"random_state": 0}
    if kind is OsciFormerRegressor:
        settings = {**TINY, "model_options": {"observation_dropout": 0.0}, "resonators": False}
    X, y = levels(24)
    want = kind(**settings).fit(X, y)
    model = kind(**settings).fit(X, y * size)
    np.testing.assert_allclose(model.predict(X) / size, want.predict(X), rtol=1e-4, atol=1e-5)
    assert model.score(X, y * size) == pytest.approx(want.score(X, y), abs=1e-5)
    again = load(model.save(tmp_path / "model"))
    assert (again.predict(X) == model.predict(X)).all()
    if kind is OsciFormerRegressor:
        scores, unit = model.history_[-1]["val_rmse"], want.history_[-1]["val_rmse"]
    else:
        scores, unit = model.left_out_scores_["rmse"], want.left_out_scores_["rmse"]
    assert scores / size == pytest.approx(unit, rel=1e-3)


@pytest.mark.parametrize("kind", [OsciFormerRegressor, ResonatorRegressor])
@pytest.mark.parametrize(
    ("size", "message"),
    [(1e303, r"numbers up to .*e\+30.*Use another unit"), (1e-300, "a spread of .*e-301; sizes")],
)
def test_targets_that_float64_cannot_bear_are_refused(kind: Any, size: float, message: str) -> None:
    X, y = levels(12)
    with pytest.raises(ValueError, match=message):
        kind(random_state=0).fit(X, y * size)


def test_validation_targets_in_another_unit_are_refused() -> None:
    X, y = levels(12)
    with pytest.raises(ValueError, match=r"y\[3\] = 1e\+60 is too far from the targets"):
        make(OsciFormerRegressor, **TINY).fit(
            X, y, validation_data=(X, np.where(np.arange(12) == 3, 1e60, y))
        )


def test_root_mean_square_is_that_of_numpy() -> None:
    x = np.random.default_rng(0).normal(size=(50, 2))
    assert root_mean_square(x) == np.sqrt(np.square(x).mean())
    assert root_mean_square(np.zeros(3)) == 0.0
    assert root_mean_square(np.full(3, 1.7e308)) == pytest.approx(1.7e308)
    assert root_mean_square(np.full(3, 5e-324)) == 5e-324


def test_errors_beyond_the_root_of_float32_have_a_root_mean_square() -> None:
    from osciformer.data.batches import collate

    X = decays(2)
    batch = collate(X, queries=X)
    output = torch.full((*batch.targets.shape, 1), 1e25)
    columns = [x.numpy() for x in Quantiles((0.5,)).rows(output, batch)]
    assert Quantiles((0.5,)).summarise(*columns)["rmse"] == pytest.approx(1e25)


def test_far_events_are_refused_with_the_sequence_named() -> None:
    events = [([0.0, 1.0, 2.5], [0, 1, 0])] * 3 + [([0.0, 1e39], [0, 1])]
    model = OsciFormerEventPredictor(dim=8, num_layers=1, num_heads=1, max_epochs=1, random_state=0)
    with pytest.raises(ValueError, match=r"sequence 3 has the time 1e\+39"):
        model.fit(events)
    with pytest.raises(ValueError, match=r"sequence 3 has the time 1e\+39"):
        model.fit(events[:3]).predict(events)
