"""`OsciFormerEventPredictor`: it learns, answers in the unit of the data, and can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV

from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    load_estimator,
)
from osciformer.events import EventSequences, PoissonProcess, log_likelihood, predict_next
from osciformer.saving import ModelFileError
from osciformer.train import EventSource
from osciformer.train.run_folder import CheckpointError

from .toy import make

TINY: dict[str, Any] = {
    "dim": 8,
    "num_layers": 1,
    "num_heads": 1,
    "max_epochs": 2,
    "batch_size": 16,
    "learning_rate": 0.02,
    "accelerator": "cpu",
    "random_state": 0,
}
NAMES = ("buy", "sell")


def taking_turns(count: int, seed: int = 0, **others: Any) -> EventSequences:
    """Return sequences in which the types take turns: `sell` follows soon, `buy` late."""
    rng = np.random.default_rng(seed)
    types = [np.arange(rng.integers(2, 9)) % 2 for _ in range(count)]
    times = [np.cumsum(np.where(k, 0.5, 2.0) * rng.gamma(4, 0.25, len(k))) for k in types]
    settings = {"type_names": NAMES, "time_unit": "h", "ids": [f"s{k}" for k in range(count)]}
    return EventSequences.from_arrays(times, types, **settings | others)


def as_frame(events: EventSequences, dates: bool = False) -> pd.DataFrame:
    owner = np.repeat(np.arange(len(events)), events.lengths)
    times: Any = events.times
    if dates:
        times = pd.Timestamp("2024-05-01") + pd.to_timedelta(events.times, unit="h")
    return pd.DataFrame(
        {"user": events.ids[owner], "at": times, "what": np.array(NAMES)[events.types]}
    )


LAYOUT = {"id": "user", "time": "at", "type": "what", "unit": "h"}


@pytest.fixture(scope="module")
def fitted() -> OsciFormerEventPredictor:
    settings = {**TINY, "max_epochs": 20, "batch_size": 32}
    return make(OsciFormerEventPredictor, **settings).fit(taking_turns(64))


@pytest.fixture
def new() -> EventSequences:
    return taking_turns(12, seed=1)


def same_weights(first: Any, second: Any) -> bool:
    weights = second.model_.state_dict()
    return all(torch.equal(w, weights[k]) for k, w in first.model_.state_dict().items())


def test_types_and_times_are_learned(fitted: Any, new: EventSequences) -> None:
    counts = np.bincount(new.types, minlength=2)
    poisson = PoissonProcess(counts / new.gaps.sum())
    found = fitted.evaluate(new)
    assert found.accuracy > 0.95
    assert found.log_likelihood.micro > log_likelihood(poisson, new).micro + 0.5
    assert found.time_mae < np.abs(new.gaps - np.median(new.gaps)).mean()
    assert found.time_unit == "h"


def test_scores_are_those_of_the_process(fitted: Any, new: EventSequences) -> None:
    wanted = log_likelihood(fitted.model_, new, batch_size=3)
    assert fitted.score(new) == pytest.approx(wanted.micro, abs=1e-5)
    assert fitted.log_likelihood(new).macro == pytest.approx(wanted.macro, abs=1e-5)
    assert fitted.evaluate_sequences(new).means()["log_likelihood"] == pytest.approx(
        wanted.micro, abs=1e-5
    )
    with pytest.raises(ValueError, match="no sequence has a second event"):
        fitted.score([([1.0], [0])])


def test_resampled_scores_are_those_of_the_sequences(fitted: Any, new: EventSequences) -> None:
    index = np.array([3, 3, 7])
    found = fitted.evaluate_sequences(new).means(index)
    wanted = fitted.evaluate(new[index])
    assert found["accuracy"] == pytest.approx(wanted.accuracy)
    assert found["time_rmse"] == pytest.approx(wanted.time_rmse, rel=1e-4)
    assert found["macro_log_likelihood"] == pytest.approx(wanted.log_likelihood.macro, abs=1e-5)


def test_predictions_follow_the_last_event(fitted: Any, new: EventSequences) -> None:
    found = fitted.predict(new)
    for row in (0, 5, 11):
        alone = new[[row]].batch()
        wanted = predict_next(fitted.model_, alone, horizon=fitted.horizon_)
        assert found.median_gap[row] == pytest.approx(float(wanted.median[0, -1]), rel=1e-4)
        assert found.mean_gap[row] == pytest.approx(float(wanted.mean[0, -1]), rel=1e-4)
        np.testing.assert_allclose(
            found.type_probability[row], wanted.type_probability[0, -1], atol=1e-5
        )
    last = new.types[new.offsets[1:] - 1]
    assert (found.type == np.array(NAMES)[1 - last]).mean() > 0.9
    np.testing.assert_allclose(found.median_time, found.last_time + found.median_gap)
    np.testing.assert_allclose(found.type_probability.sum(axis=1), 1.0)


def test_predictions_as_a_table_have_names_and_ids(fitted: Any, new: EventSequences) -> None:
    frame = fitted.predict(new).to_frame(id="user")
    assert list(frame["user"]) == list(new.ids)
    assert list(frame.columns[-2:]) == ["probability_buy", "probability_sell"]
    assert set(frame["type"]) <= set(NAMES)
    assert fitted.predict(new).to_frame("pyarrow").num_rows == 12
    with pytest.raises(ValueError, match="id must not be 'type', a predicted column"):
        fitted.predict(new).to_frame(id="type")


def test_frames_with_dates_give_dates() -> None:
    numbers, dates = taking_turns(24), as_frame(taking_turns(24), dates=True)
    one = make(OsciFormerEventPredictor, **TINY).fit(numbers)
    other = make(OsciFormerEventPredictor, **TINY, layout=LAYOUT).fit(dates)
    assert other.time_unit_ == "h"
    assert other.score(dates) == pytest.approx(one.score(numbers), abs=1e-4)
    found = other.predict(dates)
    gaps = (found.median_time - found.last_time) / np.timedelta64(1, "h")
    np.testing.assert_allclose(gaps, found.median_gap, atol=1e-6)
    first = dates.groupby("user", sort=False)["at"].max().to_numpy()
    assert (found.last_time == first).all()
    moment = np.array([np.datetime64("2024-05-01T03:00")])
    hour = 3.0 - numbers.times[numbers.offsets[:-1]]  # dates are counted from the first event
    wanted = other.intensity(dates, [[t] for t in hour])
    np.testing.assert_allclose(other.intensity(dates, moment)[:, 0], np.concatenate(wanted))


def test_intensity_is_that_of_the_process(fitted: Any, new: EventSequences) -> None:
    shared = fitted.intensity(new, [1.0, 4.0, 2.0])
    assert shared.shape == (12, 3, 2)
    lists = fitted.intensity(new, [[1.0, 4.0, 2.0][: 1 + k % 3] for k in range(12)])
    assert [item.shape for item in lists[:3]] == [(1, 2), (2, 2), (3, 2)]
    np.testing.assert_allclose(lists[5], shared[5], rtol=1e-5)
    with torch.no_grad():
        wanted = fitted.model_.intensity(new[[5]].batch(), torch.tensor([[1.0, 4.0, 2.0]]))
    np.testing.assert_allclose(shared[5], wanted[0], rtol=1e-4)
    with pytest.raises(ValueError, match="a list of 12 arrays, one per sequence; got 2"):
        fitted.intensity(new, [[1.0], [2.0]])


def test_futures_are_seeded_and_named(fitted: Any, new: EventSequences) -> None:
    draw = {"until": 3.0, "relative": True, "num_futures": 3}
    found = fitted.sample(new[:4], **draw, random_state=0)
    again = fitted.sample(new[:4], **draw, random_state=0)
    other = fitted.sample(new[:4], **draw, random_state=1)
    assert found.sequences.times.tolist() == again.sequences.times.tolist()
    assert found.sequences.times.tolist() != other.sequences.times.tolist()
    assert found.source.tolist() == np.repeat(np.arange(4), 3).tolist()
    assert found.sequences.ids.tolist() == np.repeat(new.ids[:4], 3).tolist()
    assert found.sequences.type_names == NAMES
    last = new.times[new.offsets[1:] - 1][:4]
    np.testing.assert_allclose(found.sequences.ends, np.repeat(last + 3.0, 3))
    # Types take turns in futures as in the data.
    turns = [k for one in found.sequences for k in np.abs(np.diff(one.types))]
    assert np.mean(turns) > 0.8
    with pytest.raises(ValueError, match="end after they start"):
        fitted.sample(new, until=-5.0)


def test_futures_of_dates_are_dates() -> None:
    frame = as_frame(taking_turns(20), dates=True)
    model = make(OsciFormerEventPredictor, **TINY, layout=LAYOUT).fit(frame)
    last = frame.groupby("user", sort=False)["at"].max().to_numpy()
    until = last + np.timedelta64(2, "h")
    found = model.sample(frame, until=until, random_state=0)
    moments = found.sequences.decode_times()
    owner = np.repeat(found.source, found.sequences.lengths)
    assert len(moments) > 10
    assert ((last[owner] < moments) & (moments <= until[owner])).all()


def test_progress_of_sampling_is_shown(
    fitted: Any, new: EventSequences, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted.sample(new[:3], until=1.0, relative=True, random_state=0, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_stream_answers_as_the_estimator(fitted: Any, new: EventSequences) -> None:
    stream = fitted.stream()
    stream.observe(new[0].times, [NAMES[k] for k in new[0].types])
    asked = new[0].times[-1] + 0.4
    wanted = fitted.intensity(new[[0]], [asked])[0]
    np.testing.assert_allclose(stream.intensity(asked), wanted, rtol=1e-5)


def test_same_seed_gives_the_same_bits_and_leaves_the_generators_alone() -> None:
    state = torch.get_rng_state()
    one, two = (make(OsciFormerEventPredictor, **TINY).fit(taking_turns(24)) for _ in range(2))
    assert same_weights(one, two)
    assert torch.equal(torch.get_rng_state(), state)
    three = make(OsciFormerEventPredictor, **{**TINY, "random_state": 1}).fit(taking_turns(24))
    assert not same_weights(one, three)


def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**TINY, "max_epochs": 3}
    whole = make(OsciFormerEventPredictor, **settings).fit(taking_turns(24))
    epoch = EventSource.epoch

    def dying(self: EventSource, number: int, **place: int) -> Any:
        if number == 1 and self.shuffle:
            raise KeyError("killed")
        return epoch(self, number, **place)

    monkeypatch.setattr(EventSource, "epoch", dying)
    with pytest.raises(KeyError):
        make(OsciFormerEventPredictor, **settings, run_dir=tmp_path).fit(taking_turns(24))
    monkeypatch.setattr(EventSource, "epoch", epoch)
    resumed = make(OsciFormerEventPredictor, **settings, run_dir=tmp_path, resume=True)
    assert same_weights(resumed.fit(taking_turns(24)), whole)
    assert resumed.n_iter_ == 3
    with pytest.raises(CheckpointError, match="head was 'mixture', is 'decay'"):
        resumed.set_params(head="decay").fit(taking_turns(24))


def test_validation_data_stop_training_early() -> None:
    settings = {**TINY, "max_epochs": 30, "patience": 1, "learning_rate": 0.5}
    model = make(OsciFormerEventPredictor, **settings)
    model.fit(taking_turns(24), validation_data=taking_turns(9, seed=2))
    assert model.n_iter_ < 30
    assert len(model.validation_index_) == 0
    values = [row["val_log_likelihood"] for row in model.history_]
    assert model.best_epoch_ == int(np.argmax(values))
    assert model.score(taking_turns(9, seed=2)) == pytest.approx(max(values), abs=1e-5)


def test_a_part_is_kept_for_validation() -> None:
    events = taking_turns(20)
    model = make(OsciFormerEventPredictor, **{**TINY, "validation_fraction": 0.25}).fit(events)
    kept = events[model.validation_index_]
    assert len(kept) == 5
    best = model.history_[model.best_epoch_]["val_log_likelihood"]
    assert model.score(kept) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("head", ["softplus", "decay", "exponential"])
def test_other_heads_train(head: str, new: EventSequences) -> None:
    model = make(OsciFormerEventPredictor, **TINY, head=head).fit(taking_turns(24))
    found = model.log_likelihood(new)
    assert np.isfinite(found.micro)
    assert found.error < 1e-3


def test_saved_model_is_the_same(fitted: Any, new: EventSequences, tmp_path: Path) -> None:
    path = fitted.save(tmp_path / "model.safetensors")
    state = torch.get_rng_state()
    loaded = load_estimator(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(loaded, OsciFormerEventPredictor)
    assert loaded.get_params() == fitted.get_params()
    assert loaded.score(new) == fitted.score(new)
    one, two = loaded.predict(new), fitted.predict(new)
    assert (one.median_gap == two.median_gap).all()
    assert loaded.type_names_ == NAMES
    assert loaded.history_ == fitted.history_
    with pytest.raises(ModelFileError, match="holds 'OsciFormerEventPredictor', not"):
        OsciFormerClassifier.load(path)
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ModelFileError, match="damaged"):
        OsciFormerEventPredictor.load(path)


def test_clone_and_grid_search_take_sequences() -> None:
    model = make(OsciFormerEventPredictor, **TINY, encoder_options={"context": 4})
    assert clone(model).get_params() == model.get_params()
    assert repr(OsciFormerEventPredictor(dim=12)) == "OsciFormerEventPredictor(dim=12)"
    search = GridSearchCV(model, {"learning_rate": [1e-6, 0.02]}, cv=2).fit(taking_turns(30))
    assert search.best_params_ == {"learning_rate": 0.02}
    assert len(search.predict(taking_turns(3))) == 3


def test_one_type_is_a_process_too() -> None:
    events = [(np.cumsum(np.ones(5)), np.zeros(5, int))] * 10
    model = make(OsciFormerEventPredictor, **TINY).fit(events)
    found = model.predict(events)
    assert (found.type_probability == 1.0).all()
    table = pd.DataFrame({"id": [1, 1, 2, 2], "time": [0.0, 1.0, 0.0, 2.0]})
    model = make(OsciFormerEventPredictor, **TINY, layout={"type": None}).fit(table)
    assert model.predict(table).type_names == ("0",)


def test_types_are_matched_by_name(fitted: Any, new: EventSequences) -> None:
    turned = new.replace(types=1 - new.types, type_names=("sell", "buy"))
    assert fitted.score(turned) == fitted.score(new)
    few = EventSequences.from_arrays([[0.0, 1.0]], [[0, 0]], type_names=["sell"])
    assert np.isfinite(fitted.score(few))


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        ([([1.0], [0]), ([2.0], [0])], ValueError, "none of the 2 sequences has a second event"),
        ([([1.0, 1.0], [0, 1])] * 3, ValueError, "at one time.* no waiting time to learn"),
        ([], ValueError, "X holds no sequences"),
        (taking_turns(3)[:0], ValueError, "X holds no sequences"),
        ([([0.0, np.nan], [0, 1])], ValueError, "nan"),
        ([([0.0, 1.0], [0, -1])], ValueError, "has type -1"),
        ([([0.0, 1.0], [0.5, 1])], TypeError, "integers"),
        ([np.zeros(3)], TypeError, "item 0 is ndarray"),
        (np.zeros((3, 2)), TypeError, "got ndarray"),
        (pd.DataFrame({"id": [1], "time": [0.0]}), ValueError, "'type'"),
    ],
    ids=[
        "no second", "no gap", "no pairs", "no sequences", "nan", "negative", "real", "no pair",
        "array", "no column",
    ],
)  # fmt: skip
def test_bad_training_data_are_named(X: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(OsciFormerEventPredictor, **TINY).fit(X)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "lstm"}, "encoder must be one of.*'lstm'"),
        ({"head": "soft"}, "head must be one of.*'soft'"),
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"validation_fraction": 1.0}, "validation_fraction must be from 0"),
        ({"monitor": "auroc"}, "monitor must be 'auto', 'loss' or one of 'log_likelihood'"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(OsciFormerEventPredictor, **{**TINY, **settings}).fit(taking_turns(12))


def test_data_that_do_not_fit_are_refused(fitted: Any, new: EventSequences) -> None:
    strange = new.replace(type_names=("buy", "hold"))
    with pytest.raises(ValueError, match=r"not there in fit: 'hold'.*knows 'buy', 'sell'"):
        fitted.predict(strange)
    with pytest.raises(ValueError, match=r"fitted with times in h.*are in min.*rescale"):
        fitted.score(new.rescale(60.0, "min"))
    with pytest.raises(ValueError, match=r"1 sequences have no event to start from.*1"):
        fitted.predict([([0.0], [0]), ([], [])])
    with pytest.raises(NotFittedError, match="not fitted; call fit"):
        OsciFormerEventPredictor().predict(new)
    table = as_frame(taking_turns(12))
    model = make(OsciFormerEventPredictor, **TINY, layout=LAYOUT).fit(table)
    with pytest.raises(ValueError, match="'what' has types that are not known, 'hold'"):
        model.predict(table.replace({"what": {"sell": "hold"}}))
