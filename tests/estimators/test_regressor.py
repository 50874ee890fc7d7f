from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerRegressor

from .toy import TINY, make, two_levels


def levels(count: int, seed: int = 0) -> IrregularSeries:
    """Return series whose target is 100 plus ten times their level."""
    X = two_levels(count, seed)
    means = [np.nanmean(one.values) for one in X]
    return X.replace(labels=100.0 + 10.0 * np.array(means))


@pytest.fixture(scope="module")
def fitted() -> OsciFormerRegressor:
    settings = {**TINY, "max_epochs": 12, "learning_rate": 0.02, "dropout": 0.0}
    return make(OsciFormerRegressor, **settings, observation_dropout=0.0).fit(levels(80))


def test_level_of_a_series_is_found(fitted: OsciFormerRegressor) -> None:
    assert fitted.score(levels(40, seed=1)) > 0.8


def test_predictions_are_in_the_unit_of_the_targets(fitted: OsciFormerRegressor) -> None:
    found = fitted.predict(levels(40, seed=1))
    assert found.shape == (40,)
    assert found.mean() == pytest.approx(110, abs=5)
    assert fitted.history_[-1]["val_rmse"] > 0.5


def test_saved_model_predicts_the_same_bits(fitted: OsciFormerRegressor, tmp_path: Path) -> None:
    X = levels(10, seed=2)
    again = OsciFormerRegressor.load(fitted.save(tmp_path / "model"))
    assert (again.predict(X) == fitted.predict(X)).all()


@pytest.mark.parametrize("criterion", ["huber", "mse"])
def test_several_targets(criterion: str) -> None:
    X = levels(20)
    y = np.stack([X.labels, -X.labels], axis=1)
    model = make(OsciFormerRegressor, **TINY, criterion=criterion).fit(X, y)
    assert model.predict(X).shape == (20, 2)


def test_constant_target_is_predicted_near_its_value() -> None:
    X = levels(20)
    model = make(OsciFormerRegressor, **TINY).fit(X, np.full(20, 7.0))
    assert model.predict(X) == pytest.approx(7.0, abs=2.0)


def test_text_targets_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes numbers as y.*Use OsciFormerClassifier"):
        make(OsciFormerRegressor, **TINY).fit(two_levels(10))


def test_missing_targets_are_named() -> None:
    y = np.ones(10)
    y[[2, 5]] = np.nan
    with pytest.raises(ValueError, match=r"it is at 2, 5 \(2 of 10\)"):
        make(OsciFormerRegressor, **TINY).fit(two_levels(10), y)
