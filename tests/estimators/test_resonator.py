"""`ResonatorClassifier` and `ResonatorRegressor`: proper estimators, fast and repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import osciformer
from osciformer import ResonatorClassifier, ResonatorFeatures, ResonatorRegressor
from osciformer.data import IrregularSeries, ParquetSeries
from osciformer.data.series import to_frame
from osciformer.estimators import resonator
from osciformer.resonators import shape
from osciformer.saving import ModelFileError

from .toy import close_frequencies, frequencies, two_levels

LAYOUT = dict(id="id", time="time", label="label", static=("age", "height"))
ALL_FILTERS = shape.NUM_FILTERS


@pytest.fixture(scope="module", autouse=True)
def few_filters() -> Iterator[None]:
    """Have fewer random filters than in earnest, which these easy tasks do not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "NUM_FILTERS", 128)
        yield


@pytest.fixture(scope="module")
def levels() -> ResonatorClassifier:
    return ResonatorClassifier(random_state=0).fit(two_levels(60))


def three_means(count: int, seed: int = 0) -> IrregularSeries:
    generator = np.random.default_rng(seed)
    labels = np.array(["low", "middle", "high"])[np.arange(count) % 3]
    times = [np.sort(generator.uniform(0, 10, 8)) for _ in range(count)]
    values = [generator.normal(k % 3, 0.7, (8, 1)) for k in range(count)]
    return IrregularSeries.from_arrays(times, values, labels=labels)


def means(count: int, seed: int = 0, num_targets: int = 1) -> tuple[IrregularSeries, np.ndarray]:
    series = three_means(count, seed).replace(labels=None)
    level = np.add.reduceat(series.values[:, 0], series.offsets[:-1]) / series.lengths
    y = 100.0 + 5.0 * level
    return series, y if num_targets == 1 else np.stack([y, -3.0 * y], axis=1)


def test_levels_are_told_apart(levels: ResonatorClassifier) -> None:
    test = two_levels(60, seed=1)
    chance = levels.predict_proba(test)
    assert levels.score(test) > 0.95
    np.testing.assert_allclose(chance.sum(axis=1), 1.0)
    np.testing.assert_array_equal(levels.predict(test), levels.classes_[chance.argmax(axis=1)])
    np.testing.assert_allclose(np.log(chance), levels.predict_log_proba(test))
    decision = levels.decision_function(test)
    assert decision.shape == (60,)
    np.testing.assert_array_equal(decision > 0, levels.predict(test) == "b")
    assert levels.left_out_scores_["accuracy"] > 0.95


def test_frequencies_are_told_apart() -> None:
    model = ResonatorClassifier(random_state=0).fit(frequencies(80))
    assert model.score(frequencies(200, seed=1)) > 0.9


def test_close_frequencies_in_noise_are_told_apart_by_their_spectrum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shape, "NUM_FILTERS", ALL_FILTERS)
    model = ResonatorClassifier(random_state=0).fit(close_frequencies(150))
    assert [family.name for family in model.features_.families_] == ["spectrum"]
    assert model.score(close_frequencies(150, seed=1)) > 0.95
    for number, frequency in enumerate((0.45, 0.5, 0.55)):
        rows = [row for row in model.explain(top=5) if row["output"] == number]
        best = max(rows, key=lambda row: row["weight"])
        assert 1 / best["period"] == pytest.approx(frequency, abs=0.01)


def test_families_that_are_chosen_come_back_from_files(tmp_path: Path) -> None:
    model = ResonatorClassifier(random_state=0).fit(close_frequencies(60))
    again = osciformer.load(model.save(tmp_path / "model.safetensors"))
    names = [family.name for family in model.features_.families_]
    assert [family.name for family in again.features_.families_] == names
    assert len(model.features_.names()) == len(model.head_.families) == len(model.head_.shares)
    test = close_frequencies(30, seed=1)
    np.testing.assert_array_equal(again.predict_proba(test), model.predict_proba(test))
    # Named families are all kept.
    both = ResonatorClassifier(random_state=0, families=("spectrum", "states"))
    kept = [family.name for family in both.fit(close_frequencies(30)).features_.families_]
    assert kept == ["spectrum", "states"]


def test_families_are_chosen_on_some_of_many_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resonator, "CHOICE_SIZE", 60)
    model = ResonatorClassifier(random_state=0, head="ridge").fit(close_frequencies(120))
    assert [family.name for family in model.features_.families_] == ["spectrum"]
    assert model.score(close_frequencies(60, seed=1)) > 0.95


def test_three_classes_have_three_logits_and_calibrated_chances() -> None:
    model = ResonatorClassifier(random_state=0).fit(three_means(150))
    test = three_means(600, seed=1)
    assert model.decision_function(test).shape == (600, 3)
    chance = model.predict_proba(test)
    assert model.score(test) > 0.9
    said, is_right = chance.max(axis=1), model.predict(test) == test.labels
    assert abs(said.mean() - is_right.mean()) < 0.04


@pytest.mark.parametrize("head", ["ridge", "logistic"])
def test_the_same_seed_gives_the_same_model(head: str) -> None:
    test = two_levels(20, seed=1)
    first, second = (
        ResonatorClassifier(random_state=3, head=head).fit(two_levels(40)).predict_proba(test)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("data", [two_levels, frequencies, three_means])
def test_saved_models_predict_the_same_bits(data: Any, tmp_path: Path) -> None:
    model = ResonatorClassifier(random_state=0).fit(data(50))
    path = model.save(tmp_path / "model.safetensors")
    test = data(30, seed=1)
    for again in (osciformer.load(path), ResonatorClassifier.load(path)):
        assert again.get_params() == model.get_params()
        np.testing.assert_array_equal(again.predict_proba(test), model.predict_proba(test))
        assert again.explain() == model.explain()
        assert again.left_out_scores_ == model.left_out_scores_
    with pytest.raises(ModelFileError, match="holds 'ResonatorClassifier'"):
        ResonatorRegressor.load(path)


def test_regression_of_one_target_and_of_two(tmp_path: Path) -> None:
    for num_targets in (1, 2):
        X, y = means(80, num_targets=num_targets)
        test, truth = means(40, 1, num_targets)
        model = ResonatorRegressor(random_state=0).fit(X, y)
        assert model.predict(test).shape == truth.shape
        assert model.score(test, truth) > 0.95
        assert model.left_out_scores_["r2"] > 0.95
        again = osciformer.load(model.save(tmp_path / "model.safetensors"))
        np.testing.assert_array_equal(again.predict(test), model.predict(test))


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_parquet_frames_and_memory_agree(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resonator, "MEMORY", memory)
    series = two_levels(60)
    frame = to_frame(series)
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    table = ParquetSeries(tmp_path / "t.parquet", **LAYOUT, chunk_rows=100)
    chances = [
        ResonatorClassifier(random_state=0, layout=LAYOUT, head="ridge").fit(X).predict_proba(X)
        for X in (series, table, frame)
    ]
    np.testing.assert_allclose(chances[1], chances[0], atol=1e-6)
    np.testing.assert_allclose(chances[2], chances[0], atol=1e-6)


def test_many_series_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    from osciformer.resonators import linear

    series, test = two_levels(120), two_levels(60, seed=1)
    monkeypatch.setattr(linear, "SEARCH_SIZE", 40)
    monkeypatch.setattr(linear, "LARGEST_KERNEL", 50)
    few: dict[str, Any] = {"families": ("states", "summary", "static"), "random_state": 0}
    inside = ResonatorClassifier(head="ridge", **few).fit(series)
    monkeypatch.setattr(resonator, "MEMORY", 0)
    outside = ResonatorClassifier(head="ridge", **few).fit(series)
    assert outside.score(test) > 0.95
    np.testing.assert_allclose(
        outside.predict_proba(test), inside.predict_proba(test), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="head='logistic' needs all features in memory"):
        ResonatorClassifier(head="logistic", **few).fit(series)


def test_lists_of_pairs_are_series() -> None:
    series = two_levels(20)
    pairs = [(one.times, one.values) for one in series]
    model = ResonatorClassifier(random_state=0).fit(pairs, series.labels)
    assert model.predict(pairs).shape == (20,)


def test_weights_move_the_chances() -> None:
    X = three_means(90).replace(labels=(np.arange(90) % 3 == 2).astype(int))
    noisy = X.replace(values=X.values * 0.2)  # the chances stay away from 0 and 1
    plain = ResonatorClassifier(random_state=0).fit(noisy).predict_proba(noisy)[:, 1].mean()
    weight = np.where(X.labels == 1, 8.0, 1.0)
    settings: list[dict[str, Any]] = [{"class_weight": {1: 8.0}}, {"class_weight": "balanced"}, {}]
    means_found = [
        ResonatorClassifier(random_state=0, **given)
        .fit(noisy, sample_weight=None if given else weight)
        .predict_proba(noisy)[:, 1]
        .mean()
        for given in settings
    ]
    assert means_found[0] == pytest.approx(means_found[2])
    assert min(means_found) > plain


def test_explanations_name_what_matters() -> None:
    model = ResonatorClassifier(random_state=0, families=("summary",)).fit(two_levels(60))
    for X in (None, two_levels(40, seed=1)):
        (row,) = model.explain(X, top=1)
        assert (row["output"], row["statistic"]) == ("b", "mean")
        assert row["weight"] > 0  # class b is the higher one
        sums = model.importance(X)
        assert sum(row["importance"] for row in sums) == pytest.approx(1.0)
        assert sums[0]["variable"] in ("pulse", "pressure")
    three = ResonatorClassifier(random_state=0).fit(three_means(60))
    assert [row["output"] for row in three.explain(top=1)] == ["high", "low", "middle"]


def test_explanations_of_lines_add_up_to_the_logit() -> None:
    X, y = means(60)
    model = ResonatorRegressor(random_state=0).fit(X, y)
    if model.head_.gaussian is None:
        steps = model.head_.standardiser.transform(model.features_.transform(X))
        weights = model.head_.effects()[0] @ np.diag(model.target_scale_)
        drawn = model.predict(X) - model.predict(X)[0]
        np.testing.assert_allclose(((steps - steps[0]) @ weights)[:, 0], drawn, atol=1e-6)


def test_response_of_one_series(levels: ResonatorClassifier) -> None:
    found = levels.response(two_levels(3)[1:2], num_times=50)
    assert found.amplitude.shape == (50, 2, resonator.NUM_PERIODS)
    assert found.variables == ("pulse", "pressure")
    with pytest.raises(ValueError, match="X must be one series of at least two rows"):
        levels.response(two_levels(3))


def test_scikit_learn_takes_them() -> None:
    X = two_levels(40)
    model = ResonatorClassifier(random_state=0)
    assert clone(model).get_params() == model.get_params()
    assert cross_val_score(model, X, X.labels, cv=3).mean() > 0.9
    search = GridSearchCV(model, {"families": [("states",), ("summary",)]}, cv=2)
    assert search.fit(X, X.labels).best_score_ > 0.9
    pipeline = make_pipeline(ResonatorFeatures(random_state=0), StandardScaler())
    assert np.isfinite(pipeline.fit_transform(X)).all()


def test_series_without_values_get_a_prediction(levels: ResonatorClassifier) -> None:
    test = two_levels(4)
    values = test.values.copy()
    values[test.offsets[1] : test.offsets[2]] = np.nan
    chance = levels.predict_proba(test.replace(values=values))
    assert np.isfinite(chance).all()
    empty = IrregularSeries(
        np.empty(0),
        np.empty((0, 2)),
        np.zeros(2, dtype=int),
        static=np.full((1, 2), np.nan),
        feature_names=test.feature_names,
        static_names=test.static_names,
    )
    assert np.isfinite(levels.predict_proba(empty)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": ["a"] * 20}, "y has one class only, 'a'"),
        ({"y": np.linspace(0, 1, 20)}, "Use ResonatorRegressor"),
        ({"y": ["a"] * 3}, "y must have 20 entries"),
        ({"sample_weight": [1.0]}, "sample_weight must be"),
        ({"head": "tree"}, "^head must be one of"),
        ({"families": ("waves",)}, "families must be one of"),
        ({"class_weight": {"z": 1.0}}, "class_weight names 'z'"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change: dict[str, Any], message: str) -> None:
    data = {name: change.pop(name) for name in ("y", "sample_weight") if name in change}
    with pytest.raises(ValueError, match=message):
        ResonatorClassifier(**change).fit(two_levels(20), **data)


def test_other_refusals_name_the_way_out(levels: ResonatorClassifier) -> None:
    with pytest.raises(TypeError, match="has no parameter 'familys'; did you mean 'families'"):
        ResonatorClassifier(familys=())
    with pytest.raises(TypeError, match="Use ResonatorClassifier for classes"):
        ResonatorRegressor().fit(two_levels(10))
    with pytest.raises(ValueError, match="not fitted; call fit, or load"):
        ResonatorClassifier().predict(two_levels(2))
    with pytest.raises(ValueError, match="a data frame needs a layout"):
        levels.predict(to_frame(two_levels(2)))


def test_progress_is_shown_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("summary", "observation")
    ResonatorClassifier(families=few, verbose=2).fit(two_levels(20))
    assert "20 series, 22 features" in capsys.readouterr().err
    ResonatorClassifier(random_state=0, verbose=1).fit(two_levels(20))
    assert "20/20" in capsys.readouterr().err
    ResonatorClassifier(random_state=0).fit(two_levels(20))
    assert capsys.readouterr() == ("", "")
