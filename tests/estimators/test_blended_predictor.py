"""`OsciFormerEventPredictor` with `blend_with`: every question, files, clones, interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone

from osciformer.estimators import OsciFormerEventPredictor, load_estimator
from osciformer.events import EventSequences, log_likelihood
from osciformer.events.neural import BlendedEventProcess, NeuralEventProcess
from osciformer.train import EventSource, TrainingInterrupted

from .test_event_predictor import NAMES, TINY, same_weights, taking_turns
from .toy import make

BLENDED = {**TINY, "blend_with": ("renewal", "repeat"), "validation_fraction": 0.25}


@pytest.fixture(scope="module")
def fitted() -> OsciFormerEventPredictor:
    return make(OsciFormerEventPredictor, **{**BLENDED, "blend_with": "auto"}).fit(taking_turns(48))


@pytest.fixture(scope="module")
def new() -> EventSequences:
    return taking_turns(8, seed=1)


def test_weights_are_named_and_better_than_the_network(fitted: Any) -> None:
    weights = fitted.blend_weights_
    assert list(weights) == ["network", "renewal", "repeat", "hawkes"]
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) > 0
    kept = taking_turns(48)[fitted.validation_index_]
    best = fitted.history_[fitted.best_epoch_]["val_log_likelihood"]
    # The history is that of the network, two epochs of which have learned little.
    assert log_likelihood(fitted.model_.network, kept).micro == pytest.approx(best, abs=1e-5)
    assert fitted.score(kept) > best + 0.02
    alone = make(OsciFormerEventPredictor, **TINY).fit(taking_turns(16))
    assert alone.blend_weights_ == {"network": 1.0}


def test_every_question_is_answered_by_the_blend(fitted: Any, new: EventSequences) -> None:
    process = fitted.model_
    assert isinstance(process, BlendedEventProcess)
    assert fitted.score(new) == pytest.approx(log_likelihood(process, new).micro, abs=1e-6)
    scores = fitted.evaluate(new)
    assert scores.log_likelihood.error == 0  # closed forms
    assert scores.accuracy > 0.8
    assert fitted.evaluate_sequences(new).means()["accuracy"] == pytest.approx(scores.accuracy)
    assert 0 < fitted.calibration(new).statistic < 0.5
    found = fitted.predict(new)
    np.testing.assert_allclose(found.type_probability.sum(axis=1), 1.0)
    futures = fitted.sample(new, until=2.0, relative=True, random_state=0)
    assert len(futures.sequences.times) > 4
    asked = new[0].times[-1] + 0.4
    stream = fitted.stream()
    stream.observe(new[0].times, [NAMES[k] for k in new[0].types])
    rates = fitted.intensity(new[[0]], [asked])[0]
    np.testing.assert_allclose(stream.intensity(asked), rates, rtol=1e-6)
    following = stream.predict_next(horizon=fitted.horizon_)
    assert float(following.median) == pytest.approx(found.median_gap[0], rel=1e-3)


def test_a_saved_blend_gives_the_same_bits(
    fitted: Any, new: EventSequences, tmp_path: Path
) -> None:
    loaded: Any = load_estimator(fitted.save(tmp_path / "model.safetensors"))
    assert loaded.get_params() == fitted.get_params()
    assert loaded.blend_weights_ == fitted.blend_weights_
    assert loaded.score(new) == fitted.score(new)
    one, two = loaded.predict(new), fitted.predict(new)
    assert (one.median_gap == two.median_gap).all()
    assert (one.type_probability == two.type_probability).all()
    assert (loaded.intensity(new, [1.0, 3.0]) == fitted.intensity(new, [1.0, 3.0])).all()
    draws = [
        m.sample(new, until=1.0, relative=True, random_state=0).sequences.times
        for m in (loaded, fitted)
    ]
    assert draws[0].tolist() == draws[1].tolist()
    # Saved again, it is the same file.
    again = loaded.save(tmp_path / "again.safetensors")
    assert again.read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_clones_and_settings_of_json_are_the_same_model() -> None:
    model = make(OsciFormerEventPredictor, **BLENDED)
    assert clone(model).get_params() == model.get_params()
    events = taking_turns(24)
    other = make(OsciFormerEventPredictor, **json.loads(json.dumps(BLENDED)))
    assert other.blend_with == ["renewal", "repeat"]
    assert same_weights(model.fit(events), other.fit(events))


def test_ctrl_c_leaves_the_network_and_the_resumed_run_is_blended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, events = {**BLENDED, "max_epochs": 3}, taking_turns(24)
    whole = make(OsciFormerEventPredictor, **settings).fit(events)
    epoch = EventSource.epoch

    def interrupted(self: EventSource, number: int, **place: int) -> Any:
        if number == 1 and self.shuffle:
            raise KeyboardInterrupt
        return epoch(self, number, **place)

    monkeypatch.setattr(EventSource, "epoch", interrupted)
    model = make(OsciFormerEventPredictor, **settings, run_dir=tmp_path)
    with pytest.raises(TrainingInterrupted):
        model.fit(events)
    assert isinstance(model.model_, NeuralEventProcess)
    assert model.blend_weights_ == {"network": 1.0}
    assert np.isfinite(model.score(events))
    monkeypatch.setattr(EventSource, "epoch", epoch)
    resumed = make(OsciFormerEventPredictor, **settings, run_dir=tmp_path, resume=True).fit(events)
    assert same_weights(resumed, whole)
    assert resumed.blend_weights_ == whole.blend_weights_


def test_one_type_and_own_validation_data() -> None:
    def one_type(count: int, seed: int) -> EventSequences:
        rng = np.random.default_rng(seed)
        return EventSequences.from_arrays([np.cumsum(rng.exponential(size=6))] * count)

    model = make(OsciFormerEventPredictor, **{**TINY, "blend_with": "auto"})
    model.fit(one_type(12, 0), validation_data=one_type(4, 1))
    assert list(model.blend_weights_) == ["network", "renewal", "hawkes"]
    assert (model.predict(one_type(2, 2)).type_probability == 1.0).all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"blend_with": "poisson"}, ValueError, "blend_with must be one of.*'poisson'"),
        ({"blend_with": True}, TypeError, "names or None; got True"),
        ({"head": "softplus"}, ValueError, "'mixture' or 'exponential'; got 'softplus'"),
        ({"validation_fraction": 0.0}, ValueError, "larger validation_fraction, or blend_with="),
    ],
    ids=["unknown", "switch", "head", "validation"],
)
def test_what_cannot_be_blended_is_refused_before_training(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make(OsciFormerEventPredictor, **{**BLENDED, **settings})
    with pytest.raises(error, match=message):
        model.fit(taking_turns(12))
    assert not hasattr(model, "model_")


def test_random_generators_are_left_alone() -> None:
    state = torch.get_rng_state()
    make(OsciFormerEventPredictor, **BLENDED).fit(taking_turns(16))
    assert torch.equal(torch.get_rng_state(), state)
