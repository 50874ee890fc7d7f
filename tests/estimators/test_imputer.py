from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerImputer

from .toy import TINY, make


def twins(count: int, seed: int = 0, *, missing: float = 0.3) -> IrregularSeries:
    """Return two equal noisy features, so that one tells what the other is."""
    generator = np.random.default_rng(seed)
    times = [np.sort(generator.uniform(0, 4, generator.integers(8, 14))) for _ in range(count)]
    values = []
    for t in times:
        table = np.repeat(generator.normal(size=(len(t), 1)), 2, axis=1)
        table[generator.random(table.shape) < missing] = np.nan
        values.append(table)
    return IrregularSeries.from_arrays(times, values, empty="keep")


@pytest.fixture(scope="module")
def fitted() -> OsciFormerImputer:
    settings: dict[str, Any] = {**TINY, "max_epochs": 12, "learning_rate": 0.02, "dropout": 0.0}
    return make(OsciFormerImputer, **settings).fit(twins(80))


def test_missing_values_are_found_better_than_on_straight_lines(fitted: OsciFormerImputer) -> None:
    assert fitted.score(twins(40, seed=1)) > 0.1


def test_transform_fills_what_is_missing_and_nothing_else(fitted: OsciFormerImputer) -> None:
    X = twins(10, seed=2)
    filled = fitted.transform(X)
    was_there = ~np.isnan(X.values)
    assert not np.isnan(filled.values).any()
    assert (filled.values[was_there] == X.values[was_there]).all()
    assert (filled.times == X.times).all()


def test_filled_values_are_the_medians_at_the_rows(fitted: OsciFormerImputer) -> None:
    X = twins(3, seed=2)
    medians = np.concatenate(fitted.predict(X))
    missing = np.isnan(X.values)
    assert fitted.transform(X).values[missing] == pytest.approx(medians[missing], abs=1e-6)


def test_any_time_can_be_asked(fitted: OsciFormerImputer) -> None:
    X = twins(3, seed=2)
    assert np.shape(fitted.predict(X, [0.5, 3.0, 1.0])) == (3, 3, 2)
    assert np.shape(fitted.predict_quantiles(X, [0.5])) == (3, 1, 2, 5)


def test_covariates_are_left_alone() -> None:
    X = twins(20)
    model = make(OsciFormerImputer, **TINY, covariates=("feature_1",)).fit(X)
    filled = model.transform(X)
    assert not np.isnan(filled.values[:, 0]).any()
    assert np.array_equal(filled.values[:, 1], X.values[:, 1], equal_nan=True)


def test_each_epoch_hides_other_values() -> None:
    model = make(OsciFormerImputer, **{**TINY, "max_epochs": 1}).fit(twins(20))
    X = twins(5)
    draw = model._make_draw(X)
    first, second = (draw(X, np.random.default_rng(seed))[1] for seed in (0, 1))
    assert not first.equals(second)


def test_saved_model_fills_the_same_bits(fitted: OsciFormerImputer, tmp_path: Path) -> None:
    X = twins(5, seed=3)
    again = OsciFormerImputer.load(fitted.save(tmp_path / "model"))
    assert (again.transform(X).values == fitted.transform(X).values).all()


def test_bad_fraction_is_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_fraction must be between 0 and 1; got 1.0"):
        make(OsciFormerImputer, **TINY, hidden_fraction=1.0).fit(twins(10))
