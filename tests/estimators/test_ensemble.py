"""Estimators with several networks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.estimators import OsciFormerClassifier, OsciFormerRegressor
from osciformer.estimators import load as load_any
from osciformer.saving import ModelFileError, load_model, save_model
from osciformer.train import TrainingInterrupted

from .test_export import LENGTH, padded
from .toy import TINY, make, two_levels


def fit_one(size: int, **given: Any) -> OsciFormerClassifier:
    """Return a fitted classifier of some networks."""
    model = make(OsciFormerClassifier, **{**TINY, "ensemble_size": size, **given})
    fitted: OsciFormerClassifier = model.fit(two_levels(40))
    return fitted


@pytest.fixture(scope="module")
def three() -> OsciFormerClassifier:
    return fit_one(3)


def test_the_first_network_is_the_same_whatever_the_size(three: OsciFormerClassifier) -> None:
    alone = fit_one(1)
    assert alone.networks_ == [alone.model_]
    for mine, its in zip(three.model_.parameters(), alone.model_.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert three.networks_[0] is three.model_
    pairs = zip(three.history_, alone.history_, strict=True)
    assert [a["val_loss"] for a, _ in pairs] == [b["val_loss"] for b in alone.history_]


def test_networks_differ_and_outputs_are_their_mean(three: OsciFormerClassifier) -> None:
    X = two_levels(20, seed=1)
    logits = []
    for network in three.networks_:
        alone = pickle.loads(pickle.dumps(three))
        alone.networks_ = [network]
        logits.append(alone._network_outputs(X))
    assert len(three.networks_) == len(three.histories_) == 3
    for other in logits[1:]:
        assert np.abs(other - logits[0]).max() > 1e-3
    wanted = torch.from_numpy(np.mean(logits, axis=0)).double().softmax(dim=1).numpy()
    assert three.predict_proba(X) == pytest.approx(wanted, abs=1e-6)


def test_the_same_seed_gives_the_same_ensemble(three: OsciFormerClassifier) -> None:
    X = two_levels(20, seed=1)
    assert (fit_one(3).predict_proba(X) == three.predict_proba(X)).all()
    other = fit_one(3, random_state=1)
    assert (other.predict_proba(X) != three.predict_proba(X)).any()


def test_saved_and_pickled_ensembles_predict_the_same_bits(
    three: OsciFormerClassifier, tmp_path: Path
) -> None:
    X = two_levels(20, seed=2)
    copies: list[Any] = [
        load_any(three.save(tmp_path / "model")),
        pickle.loads(pickle.dumps(three)),
    ]
    for copy in copies:
        assert (copy.predict_proba(X) == three.predict_proba(X)).all()
        assert copy.histories_ == three.histories_
        assert copy.ensemble_size == 3


def test_a_file_without_a_network_that_it_promises_is_refused(
    three: OsciFormerClassifier, tmp_path: Path
) -> None:
    saved = load_model(three.save(tmp_path / "model"))
    kept = {name: x for name, x in saved.weights.items() if not name.startswith("network-3/")}
    assert len(kept) < len(saved.weights)
    path = save_model(tmp_path / "less", saved.content, kept)
    with pytest.raises(ModelFileError, match="does not describe a usable"):
        load_any(path)


def test_resonators_are_joined_with_the_mean(tmp_path: Path) -> None:
    model = fit_one(2, resonators=True)
    X = two_levels(20, seed=1)
    mean, other = model._network_outputs(X), model.resonator_._outputs(X)
    weight = model.network_weight_
    assert 0.0 < weight < 1.0
    wanted = weight * mean.astype(np.float64) + (1.0 - weight) * other
    assert model._outputs(X) == pytest.approx(wanted, abs=1e-6)
    again: Any = load_any(model.save(tmp_path / "model"))
    assert (again.predict_proba(X) == model.predict_proba(X)).all()


def test_regression_averages_targets() -> None:
    X = two_levels(40)
    y = np.array([np.nanmean(one.values) for one in X])
    model = make(OsciFormerRegressor, **{**TINY, "ensemble_size": 2}).fit(X, y)
    ensemble, networks = model.predict(X), model.networks_
    single = []
    for network in networks:
        model.networks_ = [network]
        single.append(model.predict(X))
    assert ensemble == pytest.approx(np.mean(single, axis=0), abs=1e-5)
    assert np.abs(single[0] - single[1]).max() > 1e-3


def test_export_holds_all_networks(tmp_path: Path) -> None:
    model, X = fit_one(2, variables=False), two_levels(6, seed=3)
    program = torch.export.load(model.export(tmp_path / "net.pt2", length=LENGTH)).module()
    found = program(*padded(X)).detach().numpy()
    assert found == pytest.approx(model.predict_proba(X), abs=1e-5)


def test_interrupted_ensembles_keep_the_networks_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.train.module import TrainingModule

    X, step, begun = two_levels(40), TrainingModule.training_step, set[int]()

    def interrupted(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        begun.add(id(self))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    run = {"run_dir": tmp_path, "resume": True, "ensemble_size": 2}
    model = make(OsciFormerClassifier, **TINY, **run)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted):
            model.fit(X)
    assert len(model.networks_) == 1
    assert (model.predict_proba(X) == fit_one(1).predict_proba(X)).all()
    # Going on, the first is read from its checkpoint, and the second trained from the start.
    assert (model.fit(X).predict_proba(X) == fit_one(2).predict_proba(X)).all()


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_size_that_is_no_positive_number_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="ensemble_size must be"):
        fit_one(size)


def test_several_processes_are_refused() -> None:
    model = make(OsciFormerClassifier, **{**TINY, "ensemble_size": 2, "devices": 2})
    with pytest.raises(ValueError, match="ensemble_size must be 1 when several processes"):
        model.fit(two_levels(40))
    with pytest.raises(ValueError, match="random_state"):
        model.set_params(random_state=None).fit(two_levels(40))
