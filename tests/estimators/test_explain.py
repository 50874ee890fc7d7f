"""Explanations name the variable and the time that decide, and say how sure they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pandas")

from osciformer.data import IrregularSeries, from_frame
from osciformer.estimators import (
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
    ResonatorClassifier,
    ResonatorRegressor,
)
from osciformer.explain import (
    _donors,
    _exchange,
    leave_one_out,
    occlusion,
    permutation_importance,
)

from .toy import TINY, make

START, END = 6.0, 8.0  # only what `b` does in between decides


def decided(count: int, seed: int, *, shift: float = 0.0) -> IrregularSeries:
    """Return series whose class, and number, is whether `b` is high from START to END."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    times, values = [], []
    for label in labels:
        t = np.sort(rng.uniform(0, 10, size=24))
        table = rng.normal(size=(24, 3))
        table[:, 1] += 4.0 * label * ((t > START) & (t < END))
        table[rng.random(table.shape) < 0.2] = np.nan
        times.append(t + shift * len(times))
        values.append(table)
    static = rng.normal(size=(count, 1))
    names = {"feature_names": ["a", "b", "c"], "static": static, "static_names": ["age"]}
    return IrregularSeries.from_arrays(times, values, labels=labels, empty="keep", **names)


@pytest.fixture(scope="module")
def classifier() -> Any:
    return ResonatorClassifier(families=("summary",), random_state=0).fit(decided(200, 0))


def test_the_deciding_variable_is_first_and_the_others_cover_zero(classifier: Any) -> None:
    found = permutation_importance(classifier, decided(100, 1), n_repeats=2)
    assert set(found.variable) == {"a", "b", "c", "age"}
    assert found.variable[0] == "b"
    assert found.low[0] > 0.3
    assert set(found.loss) == {"log_loss"}
    assert dict(zip(found.variable, found.kind, strict=True))["age"] == "static"
    for row in found.itertuples():
        assert row.low <= row.importance <= row.high
        if row.variable != "b":
            assert row.low <= 0.01, row
            assert abs(row.importance) < 0.05, row


class Means:
    """A regressor that needs no training: a weighted sum of the means of the variables."""

    task, target_center_, target_scale_ = "regression", np.zeros(1), np.ones(1)
    weights = np.array([1.0, 0.5])

    def _validate(self, X: Any) -> Any:
        return X

    def _scaled(self, y: np.ndarray) -> np.ndarray:
        return y[:, None]

    def predict(self, X: Any) -> np.ndarray:
        return np.array([np.nanmean(one.values, axis=0) @ self.weights for one in X])


def test_importance_is_the_increase_of_the_loss() -> None:
    """On a grid an exchange is one of columns: scikit-learn's permutation by hand."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(30, 5, 2))
    y = values[:, :, 0].mean(axis=1) + 0.1 * rng.normal(size=30)
    found = permutation_importance(
        Means(), IrregularSeries.from_padded(values), y, n_repeats=2, random_state=5
    )
    rng = np.random.default_rng(5)
    rng.permutation(30)  # which series are used: all
    before = np.abs(values.mean(axis=1) @ Means.weights - y).mean()
    for column in range(2):
        losses = []
        for _ in range(2):
            altered = values.copy()
            altered[:, :, column] = values[_donors(30, rng), :, column]
            losses.append(np.abs(altered.mean(axis=1) @ Means.weights - y).mean())
        row = found.set_index("variable").loc[f"feature_{column}"]
        assert row.importance == pytest.approx(np.mean(losses) - before, abs=1e-6)


def test_intervals_cover_the_truth() -> None:
    """The importance of a useless variable that the model uses is 0; of 95 %, some are missed."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        values = rng.normal(size=(40, 2, 2))
        y = rng.normal(size=40)
        X = IrregularSeries.from_padded(values)
        found = permutation_importance(Means(), X, y, n_repeats=3)
        covered.append((found.low <= 0) & (found.high >= 0))
    assert 0.88 <= np.mean(covered) <= 0.99


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_exchange_keeps_the_others_and_brings_the_donor_s(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    times, values = [], []
    for number in range(count):
        grid = sorted(data.draw(st.sets(st.integers(0, 30), min_size=1, max_size=8)))
        seen = st.sampled_from([np.nan, 1.0])
        table = data.draw(st.lists(seen, min_size=2 * len(grid), max_size=2 * len(grid)))
        # Every value is another one, so that it can be found again.
        numbers = 100 * number + np.arange(len(table))
        times.append(np.array(grid, dtype=float))
        values.append((np.array(table) * numbers).reshape(-1, 2))
    series = IrregularSeries.from_arrays(times, values, empty="keep")
    donors = _donors(count, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert sorted(donors) == list(range(count))
    assert (donors != np.arange(count)).all()
    found = _exchange(series, donors, 0)
    for one, new, donor in zip(series, found, donors, strict=True):
        others = ~np.isnan(one.values[:, 1])
        stays = ~np.isnan(new.values[:, 1])
        assert new.times[stays].tolist() == one.times[others].tolist()
        assert new.values[stays, 1].tolist() == one.values[others, 1].tolist()
        given = series[int(donor)].values[:, 0]
        came = new.values[:, 0]
        came, given = came[~np.isnan(came)], given[~np.isnan(given)]
        # Two may meet at one time, and then one is lost: not if all get a row, or keep theirs.
        assert set(came) <= set(given)
        is_alone = np.isnan(series[int(donor)].values[:, 1])
        if is_alone.all() or (not is_alone.any() and len(given) <= others.sum()):
            assert sorted(came) == sorted(given)
        # No row holds nothing, unless it did before.
        blank = np.isnan(new.values).all(axis=1)
        assert set(new.times[blank]) <= set(one.times[np.isnan(one.values).all(axis=1)])


def test_what_was_observed_together_stays_together() -> None:
    nan = np.nan
    values = [[[1, 5], [2, 6], [nan, 7]], [[3, 8], [4, 9], [5, nan]]]
    series = IrregularSeries.from_arrays([[0, 1, 9], [0.2, 8, 9.5]], values)
    found = _exchange(series, np.array([1, 0]), 0)
    # 3 and 4 go to the rows nearest to 0.2 and 8; 5 was alone, and keeps its time.
    assert found[0].times.tolist() == [0, 1, 9, 9.5]
    np.testing.assert_array_equal(found[0].values, [[3, 5], [nan, 6], [4, 7], [5, nan]])
    # 1 and 2 want the same row, and get two; the row of 5 is gone.
    assert found[1].times.tolist() == [0.2, 8]
    assert found[1].values.tolist() == [[1, 8], [2, 9]]


def test_series_that_do_not_overlap_are_shifted_and_equal_times_stay_apart() -> None:
    values = [[[1.0, 5.0], [2.0, 6.0]], [[3.0, 7.0], [4.0, 8.0]]]
    alone = [[[1.0], [2.0]], [[3.0], [4.0]]]
    apart = IrregularSeries.from_arrays([[0, 1], [100, 102]], alone)
    found = _exchange(apart, np.array([1, 0]), 0)
    assert found.times.tolist() == [0, 2, 100, 101]
    assert found.values[:, 0].tolist() == [3, 4, 1, 2]
    tied = IrregularSeries.from_arrays([[0, 0], [0, 0]], values, duplicates="keep")
    found = _exchange(tied, np.array([1, 0]), 0)
    assert found.values.tolist() == [[3, 5], [4, 6], [1, 7], [2, 8]]


@pytest.mark.parametrize("has_background", [False, True])
def test_occlusion_finds_the_variable_and_the_window(classifier: Any, has_background: bool) -> None:
    test = decided(60, 3)
    chance = classifier.predict_proba(test)[:, 1]
    # One that the model is not so sure about: at a probability of 1 no single part counts.
    place = int(np.argmin(np.where(test.labels == 1, np.abs(chance - 0.95), 9)))
    one = test[place : place + 1]
    background = decided(60, 4) if has_background else None
    found = occlusion(classifier, one, background, n_windows=5)
    assert set(found.output) == {1}
    np.testing.assert_allclose(found.prediction, chance[place])
    np.testing.assert_allclose(found.effect, found.prediction - found.without)
    parts = {kind: rows for kind, rows in found.groupby("part")}
    assert parts["variable"].set_index("variable").effect.idxmax() == "b"
    strongest = parts["time"].loc[parts["time"].effect.idxmax()]
    assert strongest.start < END
    assert strongest.end > START
    cell = parts["cell"].loc[parts["cell"].effect.idxmax()]
    assert (cell.variable, cell.start, cell.end) == ("b", strongest.start, strongest.end)
    assert parts["static"].variable.tolist() == ["age"]
    assert ("low" in found) == has_background
    if has_background:
        assert (found.low <= found.effect + 1e-12).mean() > 0.95
        assert (found.low <= found.high).all()


def test_what_is_left_out_is_gone() -> None:
    """A model of the counts of rows and values sees exactly what stays."""
    times, nan = [[0.0, 1.0, 2.0, 10.0]], np.nan
    values = [[[1.0, nan], [2.0, 3.0], [nan, 4.0], [5.0, nan]]]
    X = IrregularSeries.from_arrays(times, values, feature_names=["a", "b"])

    class Counter:
        task, target_scale_ = "regression", np.ones(2)

        def _validate(self, X: Any) -> Any:
            return X

        def predict(self, X: Any) -> np.ndarray:
            return np.stack([X.lengths, X.num_observed], axis=1).astype(float)

    found = occlusion(Counter(), X, n_windows=2)
    left = {
        (row.part, row.variable if row.part != "time" else "", row.start, row.output): row.without
        for row in found.fillna({"start": -1.0}).itertuples()
    }
    assert left == {
        ("variable", "a", -1, 0): 2,
        ("variable", "a", -1, 1): 2,
        ("variable", "b", -1, 0): 3,
        ("variable", "b", -1, 1): 3,
        ("time", "", 0, 0): 1,
        ("time", "", 0, 1): 1,
        ("time", "", 5, 0): 3,
        ("time", "", 5, 1): 4,
        ("cell", "a", 0, 0): 3,
        ("cell", "a", 0, 1): 3,
        ("cell", "b", 0, 0): 3,
        ("cell", "b", 0, 1): 3,
        ("cell", "a", 5, 0): 3,
        ("cell", "a", 5, 1): 4,
    }


def test_regression_is_in_the_unit_of_the_target() -> None:
    train, test = decided(60, 0), decided(40, 1)
    small = ResonatorRegressor(families=("summary",), random_state=0).fit(
        train, train.labels.astype(float)
    )
    large = ResonatorRegressor(families=("summary",), random_state=0).fit(
        train, 1000.0 * train.labels
    )
    found = [
        permutation_importance(model, test, factor * test.labels, n_repeats=2)
        for model, factor in ((small, 1.0), (large, 1000.0))
    ]
    assert found[0].variable[0] == "b"
    assert found[0].loss[0] == "absolute_error"
    np.testing.assert_allclose(found[1].importance, 1000 * found[0].importance, rtol=1e-3)


def test_networks_are_explained_too() -> None:
    train = decided(40, 0)
    model = make(OsciFormerRegressor, **TINY).fit(train, np.stack([train.labels] * 2, 1) * 1.0)
    y = np.stack([train.labels] * 2, axis=1) * 1.0
    found = permutation_importance(model, train, y, n_repeats=1)
    assert len(found) == 4
    assert set(occlusion(model, train[:2], n_windows=3).output) == {0, 1}


@pytest.mark.parametrize("kind", [OsciFormerForecaster, OsciFormerImputer])
def test_forecasts_and_imputations_are_judged_on_hidden_values(kind: Any) -> None:
    """An untrained network of one layer uses its inputs somehow; a covariate of NaN it cannot."""
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(0, 10, 12)) for _ in range(30)]
    level = rng.normal(size=30)
    values = [np.stack([x + 0.1 * rng.normal(size=12), np.full(12, np.nan)], axis=1) for x in level]
    X = IrregularSeries.from_arrays(times, values, feature_names=["x", "nothing"])
    model = make(kind, **TINY | {"max_epochs": 15, "learning_rate": 1e-2}).fit(X)
    found = permutation_importance(model, X, n_repeats=2).set_index("variable")
    assert found.low["x"] > 0
    assert found.importance["nothing"] == pytest.approx(0, abs=1e-6)
    if kind is OsciFormerForecaster:
        parts = occlusion(model, X[:1])
        assert set(parts.output) == {"x", "nothing"}
        whole = np.concatenate(model.predict(X[:1], [[model.horizon_]], relative=True))[0, 0]
        np.testing.assert_allclose(parts.prediction[parts.output == "x"], whole, rtol=1e-5)
    else:
        with pytest.raises(TypeError, match="classification or regression or forecasting"):
            occlusion(model, X[:1])


def test_windows_of_dates_are_dates(classifier: Any) -> None:
    import pandas as pd

    rng = np.random.default_rng(0)
    days = pd.Timestamp("2024-03-01") + pd.to_timedelta(np.arange(12), unit="D")
    frame = pd.DataFrame({"who": np.repeat(np.arange(12), 12), "day": list(days) * 12})
    frame["x"] = rng.normal(size=144) + frame.who % 2
    frame["ill"] = frame.who % 2
    X = from_frame(frame, id="who", time="day", label="ill")
    model = ResonatorClassifier(families=("summary",), random_state=0).fit(X)
    found = occlusion(model, X[:1], n_windows=2)
    windows = found[found.part == "time"]
    assert windows.start.iloc[0] == pd.Timestamp("2024-03-01")
    assert windows.end.iloc[-1] == pd.Timestamp("2024-03-12")


def test_bad_calls_say_what_to_do(classifier: Any) -> None:
    X = decided(4, 0)
    with pytest.raises(ValueError, match=r"n_repeats must be 1 or more.*got 0"):
        permutation_importance(classifier, X, n_repeats=0)
    with pytest.raises(ValueError, match="use occlusion for a single one"):
        permutation_importance(classifier, X[:1])
    with pytest.raises(ValueError, match="n_windows and n_samples must be 1 or more; got 0"):
        occlusion(classifier, X[:1], n_windows=0)
    with pytest.raises(TypeError, match="got object"):
        occlusion(object(), X)


def test_leaving_out_names_the_observation_that_decides() -> None:
    """And each effect is that of predicting without it."""
    rng = np.random.default_rng(0)
    times, values = [np.arange(6.0)] * 40, []
    for number in range(40):
        table = np.stack([rng.normal(size=6), np.full(6, np.nan)], axis=1)
        table[number % 5, 1] = 3.0 * (number % 2)  # seen once, and all there is to know
        values.append(table)
    X = IrregularSeries.from_arrays(times, values, labels=np.arange(40) % 2)
    model = ResonatorClassifier(families=("summary",), random_state=0).fit(X)
    found = leave_one_out(model, X[7:8])
    assert len(found) == 7
    top = found.loc[found.effect.abs().idxmax()]
    assert (top.row, top.variable, top.time, top.value) == (2, X.feature_names[1], 2.0, 3.0)
    one = values[7].copy()
    one[2, 1] = np.nan
    left = IrregularSeries.from_arrays([times[7]], [one])
    assert top.without == pytest.approx(model.predict_proba(left)[0, 1], abs=1e-6)
    assert top.prediction == pytest.approx(model.predict_proba(X[7:8])[0, 1], abs=1e-6)
    assert top.effect == pytest.approx(top.prediction - top.without)
    assert leave_one_out(model, X[7:8], max_observations=5).row.min() == 2


def test_leaving_out_is_for_models_that_predict_from_the_past() -> None:
    with pytest.raises(TypeError, match="classification or regression or forecasting; got object"):
        leave_one_out(object(), decided(2, 0))
    model = ResonatorRegressor(families=("summary",)).fit(decided(20, 0), np.arange(20.0))
    with pytest.raises(ValueError, match="max_observations must be 1 or more; got 0"):
        leave_one_out(model, decided(2, 0), max_observations=0)
