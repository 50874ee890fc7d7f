"""Intervals and sets hold the truth as often as they say, for series drawn alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import osciformer
from osciformer import (
    IrregularSeries,
    OsciFormerClassifier,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
    ResonatorClassifier,
    ResonatorRegressor,
)
from osciformer.estimators.conformal import NUM_KEPT, ScoreLevels

from .toy import TINY, decays, make, two_levels


def least_hits(coverage: float, calibration: int, count: int) -> float:
    """Return a number of hits that is missed with a chance of about 1e-5 at most.

    Given the calibration series the coverage has a beta distribution around its mean.
    """
    spread = coverage * (1 - coverage) * (1 / (calibration + 2) + 1 / count)
    return count * (coverage - 4.3 * math.sqrt(spread))


def noisy_levels(count: int, seed: int) -> IrregularSeries:
    """Return constant series with noise; the label is the level with noise of its own."""
    generator = np.random.default_rng(seed)
    level = generator.normal(size=count)
    times = [np.sort(generator.uniform(0, 4, 5)) for _ in range(count)]
    values = [generator.normal(x, 0.3, (5, 1)) for x in level]
    return IrregularSeries.from_arrays(
        times, values, labels=level + generator.normal(0, 0.5, count)
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 99))
def test_the_score_is_that_of_the_finite_sample_rule(scores: list[float], percent: int) -> None:
    levels = ScoreLevels.of(np.array(scores))
    rank = -(-percent * (len(scores) + 1) // 100)  # in whole numbers, so without rounding
    if rank > len(scores):
        with pytest.raises(ValueError, match="needs at least"):
            levels.at(percent / 100)
    else:
        assert levels.at(percent / 100) == sorted(scores)[rank - 1]


def test_the_error_names_the_fewest_series_that_do() -> None:
    with pytest.raises(ValueError, match="at least 19 calibration series; calibrate had 18"):
        ScoreLevels.of(np.arange(18.0)).at(0.95)
    assert ScoreLevels.of(np.arange(19.0)).at(0.95) == 18.0


def test_values_of_one_series_share_its_part() -> None:
    # Brute force: each of the three series has 1/4, of which its values have equal parts.
    levels = ScoreLevels.of(np.array([1.0, 5.0, 2.0, 3.0, 4.0, 9.0]), np.array([0, 0, 1, 1, 1, 7]))
    parts = {1.0: 1 / 8, 5.0: 1 / 8, 2.0: 1 / 12, 3.0: 1 / 12, 4.0: 1 / 12, 9.0: 1 / 4}
    for coverage in (0.1, 0.2, 0.29, 0.37, 0.5, 0.7, 0.75):
        total = 0.0
        for score in sorted(parts):
            total += parts[score]
            if total >= coverage - 1e-12:
                break
        assert levels.at(coverage) == score
    assert levels.count == 3


def test_of_many_scores_those_kept_are_never_too_low() -> None:
    scores = np.random.default_rng(0).normal(size=30_011)
    levels, exact = ScoreLevels.of(scores), np.sort(scores)
    assert len(levels.scores) <= NUM_KEPT
    for coverage in (0.001, 0.5, 0.9, 0.99, 0.9999):
        rank = math.ceil(coverage * (len(scores) + 1))
        upper = min(rank + len(scores) // NUM_KEPT + 1, len(scores))
        assert exact[rank - 1] <= levels.at(coverage) <= exact[upper - 1]


@pytest.mark.parametrize("coverage", [0.0, 1.0, -1, float("nan"), 90])
def test_coverage_is_a_chance(coverage: float) -> None:
    with pytest.raises(ValueError, match="coverage must be between 0 and 1"):
        ScoreLevels.of(np.arange(5.0)).at(coverage)


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_intervals_of_a_regressor_cover(coverage: float) -> None:
    model = ResonatorRegressor(families=["summary"], random_state=0).fit(noisy_levels(60, 0))
    model.calibrate(noisy_levels(200, 1))
    new = noisy_levels(1000, 2)
    low, high = model.predict_interval(new, coverage).T
    hits = int(((low <= new.labels) & (new.labels <= high)).sum())
    assert least_hits(coverage, 200, 1000) <= hits
    assert 1000 - hits >= least_hits(1 - coverage - 1 / 201, 200, 1000)
    np.testing.assert_allclose((low + high) / 2, model.predict(new))


def test_two_targets_have_margins_of_their_own() -> None:
    series = noisy_levels(60, 0)
    both = np.stack([series.labels, 100 * series.labels**2], axis=1)
    model = ResonatorRegressor(families=["summary"], random_state=0).fit(series, both)
    model.calibrate(series, both)
    assert model.predict_interval(series).shape == (60, 2, 2)
    assert model.margin(0.9)[1] > 10 * model.margin(0.9)[0]


def overlapping(count: int, seed: int) -> IrregularSeries:
    """Return series of three classes, one of them rare, that cannot be told apart for sure."""
    generator = np.random.default_rng(seed)
    classes = generator.choice(3, size=count, p=[0.6, 0.3, 0.1])
    times = [np.sort(generator.uniform(0, 4, 5)) for _ in classes]
    levels = classes + generator.normal(0, 0.7, count)
    values = [generator.normal(level, 0.3, (5, 1)) for level in levels]
    return IrregularSeries.from_arrays(times, values, labels=np.array(["a", "b", "c"])[classes])


def test_sets_of_a_classifier_cover_over_all_and_by_class() -> None:
    model = ResonatorClassifier(families=["summary"], random_state=0).fit(overlapping(100, 0))
    model.calibrate(overlapping(400, 1))
    new = overlapping(1500, 2)
    numbers = np.searchsorted(model.classes_, new.labels)
    rows = np.arange(len(numbers))
    assert model.predict_set(new)[rows, numbers].sum() >= least_hits(0.9, 400, 1500)
    found = model.predict_set(new, per_class=True)[rows, numbers]
    for number in range(3):
        calibration = model.conformal_[1 + number].count
        here = numbers == number
        assert found[here].sum() >= least_hits(0.9, calibration, int(here.sum()))
    # Over all, the rare class pays.
    rare = numbers == 2
    assert model.predict_set(new)[rows, numbers][rare].mean() < found[rare].mean()


def test_larger_coverage_means_larger_sets_that_have_the_best_class() -> None:
    model = ResonatorClassifier(families=["summary"], random_state=0).fit(overlapping(100, 0))
    model.calibrate(overlapping(100, 1))
    new = overlapping(50, 2)
    small, large = model.predict_set(new, 0.3), model.predict_set(new, 0.95)
    assert (small <= large).all()
    assert small[np.arange(50), model.predict_proba(new).argmax(axis=1)].all()
    with pytest.raises(ValueError, match=r"calibration series of the class 'c'; calibrate had"):
        model.predict_set(new, 0.95, per_class=True)


def test_temperature_mends_a_model_that_is_too_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ResonatorClassifier(families=["summary"], random_state=0).fit(overlapping(300, 0))
    sure = type(model)._outputs
    monkeypatch.setattr(type(model), "_outputs", lambda self, data: 5.0 * sure(self, data))
    new = overlapping(300, 2)
    numbers, rows = np.searchsorted(model.classes_, new.labels), np.arange(300)
    before, guesses = model.predict_log_proba(new)[rows, numbers].mean(), model.predict(new)
    model.calibrate(overlapping(600, 1), probabilities=True)
    assert 4.0 < model.temperature_ < 6.5
    assert model.predict_log_proba(new)[rows, numbers].mean() > before + 0.2
    np.testing.assert_array_equal(model.predict(new), guesses)
    assert model.conformal_[0].count == 300
    assert model.calibrate(overlapping(600, 1)).temperature_ == 1.0


def make_calibrated(kind: Any) -> tuple[Any, IrregularSeries]:
    series = decays(60) if kind in (OsciFormerForecaster, OsciFormerImputer) else two_levels(60)
    if "Regressor" in kind.__name__:
        series = series.replace(labels=series.static[:, 0])
    more = {"horizon": 2.0} if kind is OsciFormerForecaster else {}
    model = (
        make(kind, **{**TINY, "max_epochs": 1}, **more)
        if "Osci" in kind.__name__
        else kind(families=["summary"])
    )
    return model.fit(series).calibrate(series), series


def answer(model: Any, series: IrregularSeries) -> np.ndarray:
    if model.task == "classification":
        return model.predict_set(series)
    more = {"times": [0.5, 1.0], "relative": True} if model.task == "forecasting" else {}
    found = model.predict_interval(series, **more)
    return np.concatenate(found) if isinstance(found, list) else found


@pytest.mark.parametrize(
    "kind",
    [
        OsciFormerClassifier,
        OsciFormerForecaster,
        OsciFormerImputer,
        OsciFormerRegressor,
        ResonatorClassifier,
        ResonatorRegressor,
    ],
)
def test_calibration_is_saved_and_a_new_fit_drops_it(kind: Any, tmp_path: Path) -> None:
    model, series = make_calibrated(kind)
    again: Any = osciformer.load(model.save(tmp_path / "model.safetensors"))
    np.testing.assert_allclose(answer(again, series), answer(model, series), rtol=1e-6)
    model.fit(series)
    with pytest.raises(ValueError, match=r"not calibrated; call calibrate with series"):
        answer(model, series)


@pytest.mark.parametrize("kind", [OsciFormerForecaster, OsciFormerImputer])
def test_widened_quantiles_cover_hidden_values(kind: Any) -> None:
    more = {"horizon": 2.0} if kind is OsciFormerForecaster else {}
    model = make(kind, **{**TINY, "max_epochs": 1}, **more).fit(decays(40))
    model.calibrate(decays(150, seed=1))
    shares = []
    for found, truth, _, offsets in model.answer_hidden(
        decays(400, seed=2), np.random.default_rng(5)
    ):
        unit = model.transform_.value_scaler.scale[model._columns.is_target]
        center = model.transform_.value_scaler.center[model._columns.is_target]
        ends = model.intervals_of(found * unit[:, None] + center[:, None], 0.8)
        inside = (ends[..., 0] <= truth * unit + center) & (truth * unit + center <= ends[..., 1])
        for rows in np.split(np.where(np.isnan(truth), np.nan, inside), offsets[1:-1]):
            if len(rows) and not np.isnan(rows).all(axis=0).any():
                shares.append(np.nanmean(rows, axis=0))
    # Each series counts alike; a share of its values has less spread than one hit.
    count = len(shares)
    assert count > 200
    assert (np.sum(shares, axis=0) >= least_hits(0.8, 150, count)).all()
    assert (count - np.sum(shares, axis=0) >= least_hits(0.2 - 1 / 151, 150, count)).all()


def test_intervals_need_quantiles_on_both_sides() -> None:
    model = make(OsciFormerImputer, **{**TINY, "max_epochs": 1}, quantiles=(0.5, 0.9))
    with pytest.raises(ValueError, match=r"quantiles below and above 0\.5"):
        model.fit(decays(20)).calibrate(decays(20))


@pytest.mark.parametrize(
    "damage",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"conformal": [{"scores": [1.0, 0.0], "levels": [0.3, 0.6], "count": 2}]},
        {"conformal": [{"scores": [1.0, None], "levels": [0.3, 0.6], "count": 2}]},
        {"conformal": [{"scores": [1.0], "levels": [0.3, 0.6], "count": 2}]},
    ],
)
def test_a_damaged_calibration_is_refused(damage: dict[str, Any]) -> None:
    model = ResonatorClassifier(families=["summary"], random_state=0).fit(overlapping(40, 0))
    with pytest.raises(ValueError, match=r"its temperature must be|of its calibration must be"):
        model._restore_task({**model._task_state(), **damage})


def test_one_series_cannot_set_a_temperature() -> None:
    model = ResonatorClassifier(families=["summary"], random_state=0).fit(overlapping(40, 0))
    with pytest.raises(ValueError, match="at least 2 series; got 1"):
        model.calibrate(overlapping(1, 1), probabilities=True)
