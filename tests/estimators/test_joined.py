"""A network and resonators as one estimator."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import r2_score

from osciformer.data import ParquetSeries
from osciformer.estimators import OsciFormerClassifier, OsciFormerRegressor, ResonatorClassifier
from osciformer.estimators import load as load_any
from osciformer.estimators.base import draw_seed, split
from osciformer.estimators.joining import (
    WEIGHTS,
    class_log_likelihood,
    mix,
    target_log_likelihood,
    weigh_network,
)
from osciformer.resonators.spectrum import Spectrum
from osciformer.resonators.states import States
from osciformer.train import TrainingInterrupted

from .toy import TINY, frequencies, make, two_levels

JOINED: dict[str, Any] = {**TINY, "resonators": True}


@pytest.fixture(autouse=True, scope="module")
def few_families() -> Iterator[None]:
    """Leave resonators two families of features, so that a fit is a matter of milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "osciformer.resonators.features.FAMILIES", {"states": States, "spectrum": Spectrum}
        )
        yield


def weigh(truth: np.ndarray, network: np.ndarray, other: np.ndarray) -> float:
    judge = partial(class_log_likelihood, classes=truth, weight=np.ones(len(truth)))
    return weigh_network(network, other, judge)


def guess(truth: np.ndarray, skill: float, seed: int) -> np.ndarray:
    """Return logits that are right by some skill, calibrated."""
    noise = np.random.default_rng(seed).normal(size=(len(truth), 3))
    return skill * (noise + skill * np.eye(3)[truth])


TRUTH = np.arange(300) % 3


@pytest.mark.parametrize(
    ("network", "other", "low", "high"),
    [
        (0.0, 3.0, 0.0, 0.02),
        (3.0, 0.0, 0.85, 1.0),
        (1.5, 1.5, 0.35, 0.65),
    ],
    ids=["useless", "much better", "as good"],
)
def test_many_series_find_the_weight(network: float, other: float, low: float, high: float) -> None:
    wrong = guess(TRUTH, 1.0, 1)[::-1] if not network else guess(TRUTH, network, 1)
    wrong_other = guess(TRUTH, 1.0, 2)[::-1] if not other else guess(TRUTH, other, 2)
    assert low <= weigh(TRUTH, wrong, wrong_other) <= high


def test_few_series_stay_near_the_prior() -> None:
    none = np.zeros((0, 3))
    assert weigh(TRUTH[:0], none, none) == 0.14
    few = TRUTH[:6]
    assert 0.05 < weigh(few, guess(few, 1.5, 1), guess(few, 1.5, 2)) < 0.4


def test_weight_is_the_posterior_mean() -> None:
    truth, network, other = TRUTH[:20], guess(TRUTH[:20], 2.0, 1), guess(TRUTH[:20], 1.0, 2)
    prior = [0.75] + [0.025] * 10
    total = mean = 0.0
    for weight, belief in zip(WEIGHTS, prior, strict=True):
        for row, label in zip(range(20), truth, strict=True):
            chances = [
                np.exp(logits[row]) / np.exp(logits[row]).sum() for logits in (network, other)
            ]
            pooled = chances[0] ** weight * chances[1] ** (1.0 - weight)
            belief *= pooled[label] / pooled.sum()
        total, mean = total + belief, mean + weight * belief
    assert weigh(truth, network, other) == pytest.approx(mean / total, abs=0.005)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(-50, 50), st.integers(1, 12))
def test_order_and_level_of_logits_do_not_matter(seed: int, shift: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    truth, (network, other) = rng.integers(0, 3, count), rng.normal(size=(2, count, 3))
    order = rng.permutation(count)
    found = weigh(truth, network, other)
    assert 0.0 <= found <= 1.0
    assert weigh(truth[order], network[order], other[order]) == pytest.approx(found, abs=0.011)
    assert weigh(truth, network + shift, other - shift) == pytest.approx(found, abs=0.011)


@pytest.mark.parametrize("is_classes", [True, False])
def test_series_of_weight_zero_count_as_absent(is_classes: bool) -> None:
    rng = np.random.default_rng(0)
    outputs, weight = rng.normal(size=(9, 3)), np.arange(9) % 3 * 1.0
    kept = weight > 0
    judge: Any = class_log_likelihood if is_classes else target_log_likelihood
    truth = TRUTH[:9] if is_classes else rng.normal(size=(9, 3))
    found = judge(outputs, truth, weight)
    assert found == pytest.approx(judge(outputs[kept], truth[kept], 7.0 * weight[kept]))
    assert judge(outputs, truth, 0.0 * weight) == 0.0


def test_likelihood_of_targets_is_that_of_normal_errors() -> None:
    rng = np.random.default_rng(0)
    targets, near, far = rng.normal(size=(3, 12, 1))
    by_scipy = []
    for outputs in (near, far):
        error = outputs - targets
        by_scipy.append(stats.norm.logpdf(error, scale=np.sqrt(np.square(error).mean())).sum())
    found = [target_log_likelihood(outputs, targets, np.ones(12)) for outputs in (near, far)]
    assert found[0] - found[1] == pytest.approx(by_scipy[0] - by_scipy[1])


@pytest.fixture(scope="module")
def joined() -> OsciFormerClassifier:
    return make(OsciFormerClassifier, **JOINED).fit(two_levels(60))


def test_network_is_the_same_with_resonators_and_without(joined: OsciFormerClassifier) -> None:
    alone = make(OsciFormerClassifier, **TINY, resonators=False).fit(two_levels(60))
    for mine, its in zip(alone.model_.parameters(), joined.model_.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert (alone.resonator_, alone.network_weight_) == (None, 1.0)
    assert [row["val_loss"] for row in alone.history_] == [r["val_loss"] for r in joined.history_]


def test_predictions_are_the_mixture(joined: OsciFormerClassifier) -> None:
    X = two_levels(20, seed=1)
    alone = make(OsciFormerClassifier, **TINY, resonators=False).fit(two_levels(60))
    weight = joined.network_weight_
    assert 0.0 < weight < 1.0
    pooled = alone.predict_proba(X) ** weight
    pooled *= joined.resonator_.predict_proba(X) ** (1.0 - weight)
    pooled /= pooled.sum(axis=1, keepdims=True)
    assert joined.predict_proba(X) == pytest.approx(pooled, abs=1e-6)
    assert (joined.predict(X) == joined.classes_[pooled.argmax(axis=1)]).all()
    assert joined.score(X) == (joined.predict(X) == X.labels).mean() > 0.9


def test_validation_series_are_judged_by_the_model_of_the_others(
    joined: OsciFormerClassifier,
) -> None:
    X, seed = two_levels(60), draw_seed(0)
    numbers = (X.labels == "b").astype(int)
    _, places = split(numbers, 0.1, np.random.default_rng(seed))
    resonator = ResonatorClassifier(random_state=seed)
    resonator.classes_ = joined.classes_
    left_out = resonator._fit(X, numbers, None)
    alone = make(OsciFormerClassifier, **TINY, resonators=False).fit(X)
    network = alone.predict_log_proba(X[places])
    assert left_out.places.tolist() == list(range(60))
    wanted = weigh(numbers[places], network, left_out.outputs[places])
    assert joined.network_weight_ == pytest.approx(wanted, abs=0.011)


def test_few_epochs_do_not_matter_where_resonators_know() -> None:
    model = make(OsciFormerClassifier, **{**JOINED, "max_epochs": 1}).fit(frequencies(120))
    assert model.network_weight_ < 0.3
    assert model.score(frequencies(60, seed=1)) > 0.9


def test_saved_and_pickled_models_predict_the_same_bits(
    joined: OsciFormerClassifier, tmp_path: Path
) -> None:
    X = two_levels(20, seed=2)
    copies: list[Any] = [
        load_any(joined.save(tmp_path / "model")),
        pickle.loads(pickle.dumps(joined)),
    ]
    for copy in copies:
        assert (copy.predict_proba(X) == joined.predict_proba(X)).all()
        assert copy.get_params() == joined.get_params()
        assert copy.network_weight_ == joined.network_weight_
        assert copy.resonator_.score(X) == joined.resonator_.score(X)
    again = load_any(copies[0].save(tmp_path / "again"))
    assert (again.predict_proba(X) == joined.predict_proba(X)).all()  # type: ignore[attr-defined]


def test_one_of_them_alone_answers_if_the_other_has_no_weight(
    joined: OsciFormerClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = two_levels(20, seed=2)
    monkeypatch.setattr(joined, "network_weight_", 0.0)
    assert (joined.predict_proba(X) == joined.resonator_.predict_proba(X)).all()
    monkeypatch.setattr(joined, "network_weight_", 1.0)
    alone = make(OsciFormerClassifier, **TINY, resonators=False).fit(two_levels(60))
    assert (joined.predict_proba(X) == alone.predict_proba(X)).all()


def test_no_validation_leaves_the_weight_of_the_prior() -> None:
    model = make(OsciFormerClassifier, **JOINED, validation_fraction=0.0).fit(two_levels(20))
    assert model.network_weight_ == 0.14


def test_validation_data_are_asked_of_both() -> None:
    X, turned = two_levels(40), two_levels(40, seed=1)
    # Resonators that are wrong throughout are worse than a network that knows nothing.
    turned = turned.replace(labels=np.where(turned.labels == "a", "b", "a"))
    model = make(OsciFormerClassifier, **JOINED).fit(X, validation_data=turned)
    assert model.network_weight_ > 0.9
    right = make(OsciFormerClassifier, **JOINED).fit(X, validation_data=two_levels(40, seed=1))
    assert right.network_weight_ < 0.3


def test_interrupted_fit_joins_what_there_is_and_can_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.train.module import TrainingModule

    X, step = two_levels(40), TrainingModule.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.current_epoch == 1:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    run = {"run_dir": tmp_path, "resume": True}
    model = make(OsciFormerClassifier, **JOINED, **run)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted):
            model.fit(X)
    assert model.score(X) > 0.9
    assert model.network_weight_ < 1.0
    # The network of a run does not depend on resonators, so that they may come or go.
    whole = make(OsciFormerClassifier, **TINY).fit(X)
    model.set_params(resonators=False).fit(X)
    assert (model.predict_proba(X) == whole.predict_proba(X)).all()
    assert model.resonator_ is None


def test_sample_weights_count_for_both() -> None:
    X, wrong = two_levels(60), np.arange(60) < 30
    y = np.where(wrong, np.where(X.labels == "a", "b", "a"), X.labels)
    model = make(OsciFormerClassifier, **JOINED)
    model.fit(X, y, sample_weight=np.where(wrong, 0.0, 1.0))
    assert model.score(two_levels(40, seed=1)) > 0.9


def test_class_weights_count_for_both() -> None:
    X = two_levels(60)
    y = np.random.default_rng(0).choice(["a", "b"], 60)
    model, even = (
        make(OsciFormerClassifier, **JOINED, class_weight=given).fit(X, y)
        for given in ({"b": 5.0}, None)
    )
    assert (model.predict_proba(X)[:, 1] > even.predict_proba(X)[:, 1] + 0.1).all()


def test_table_on_disk(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    X = two_levels(60)
    parquet.write_table(X.to_frame("pyarrow"), tmp_path / "x.parquet", row_group_size=50)
    columns = {"id": "id", "time": "time", "label": "label", "static": ["age", "height"]}
    table = ParquetSeries(tmp_path / "x.parquet", chunk_rows=60, **columns)
    model = make(OsciFormerClassifier, **JOINED).fit(table)
    assert 0.0 < model.network_weight_ < 0.4
    assert model.predict_proba(table) == pytest.approx(model.predict_proba(X), abs=1e-5)


@pytest.mark.parametrize("num_targets", [1, 2])
def test_regression(num_targets: int, tmp_path: Path) -> None:
    X, test = two_levels(60), two_levels(40, seed=1)
    y, truth = (
        np.array([[100.0 + 10.0 * np.nanmean(one.values), -5.0] for one in part])[:, :num_targets]
        for part in (X, test)
    )
    model = make(OsciFormerRegressor, **JOINED).fit(X, y)
    assert model.network_weight_ < 0.3
    found = model.predict(test).reshape(40, -1)
    assert r2_score(truth[:, 0], found[:, 0]) > 0.8
    assert np.abs(found[:, 1:] + 5.0).max(initial=0.0) < 0.3  # a constant target
    assert model.predict(test).shape == ((40, 2) if num_targets == 2 else (40,))
    again: Any = load_any(model.save(tmp_path / "model"))
    assert (again.predict(test) == model.predict(test)).all()


def test_verbose_says_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    make(OsciFormerClassifier, **{**JOINED, "max_epochs": 1}, verbose=2).fit(two_levels(20))
    assert "joined with the weights network 0." in capsys.readouterr().err


def test_mix_is_a_weighted_mean() -> None:
    one, other = np.ones((2, 3), dtype=np.float32), np.zeros((2, 3))
    assert (mix(one, other, 0.3) == 0.3).all()
