"""Which epoch is kept, and when training stops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pytorch_lightning", reason="training needs Lightning")

from torch import nn

from osciformer.train import journal as journals
from osciformer.train.config import TrainConfig
from osciformer.train.curves import auroc, auroc_error
from osciformer.train.module import TrainingModule
from osciformer.train.scores import class_errors, class_metrics
from osciformer.train.tasks import Classification


@pytest.fixture
def follow(monkeypatch):
    """Return a function that shows a journal some epochs, and returns what it has kept."""
    monkeypatch.setattr(TrainingModule, "finish_epoch", lambda self: None)
    monkeypatch.setattr(journals, "current_weights", lambda trainer: trainer.current_epoch)

    def run(values, *, error=None, monitor="auroc", patience=None, keep_latest=True):
        module = TrainingModule(nn.Linear(1, 1), Classification(num_classes=2), TrainConfig())
        journal = journals.Journal(monitor, patience, True, keep_latest)
        trainer = SimpleNamespace(
            optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])], should_stop=False
        )
        for epoch, value in enumerate(values):
            trainer.current_epoch = epoch
            module.metrics = {monitor: value}
            module.errors = {} if error is None else {monitor: error}
            journal.on_train_epoch_end(trainer, module)
            if trainer.should_stop:
                break
        return journal

    return run


@pytest.mark.parametrize(
    ("values", "error", "kept"),
    [
        ([0.70, 0.80, 0.79, 0.78], 0.03, 3),  # all within the error of the best
        ([0.70, 0.80, 0.79, 0.76], 0.03, 2),  # the last one is clearly worse
        ([0.70, 0.80, 0.76, 0.78], 0.03, 3),  # back within reach
        ([0.80, 0.79, 0.78, 0.90, 0.86], 0.03, 3),  # the reach is that of the best
        ([0.70, 0.80, 0.79, 0.78], None, 1),  # nothing is known of the error
        ([0.70, 0.80, 0.79, 0.78], math.nan, 1),
        ([math.nan, 0.80, math.nan, 0.79], 0.03, 3),
    ],
)
def test_the_latest_epoch_within_the_error_of_the_best_is_kept(follow, values, error, kept):
    journal = follow(values, error=error)
    assert (journal.best_epoch, journal.best_weights) == (kept, kept)
    assert journal.best_value == np.nanmax(values)
    plain = follow(values, error=error, keep_latest=False)
    assert plain.best_epoch == int(np.nanargmax(values))


def test_small_steps_downwards_do_not_add_up(follow):
    # Each is within the error of the one before, but what counts is the best of all.
    assert follow([0.90, 0.88, 0.86, 0.84], error=0.03).best_epoch == 1


def test_less_is_better_for_losses(follow):
    assert follow([0.5, 0.4, 0.42, 0.6], error=0.05, monitor="loss").best_epoch == 2


def test_patience_counts_from_the_best_epoch_and_not_from_the_one_that_is_kept(follow):
    for keep_latest, kept in ((True, 2), (False, 0)):
        values = [0.80, 0.70, 0.79, 0.70, 0.90]
        journal = follow(values, error=0.02, patience=3, keep_latest=keep_latest)
        assert journal.stopped_early
        assert (journal.best_epoch, len(journal.history)) == (kept, 4)


def test_a_continued_journal_keeps_the_reach(follow):
    journal = follow([0.70, 0.80], error=0.03)
    other = journals.Journal("auroc", None, True, True)
    other.load_state_dict(journal.state_dict())
    assert other._is_hardly_worse(0.775)
    assert not other._is_hardly_worse(0.765)


def test_a_continued_journal_goes_on_waiting(follow):
    state = follow([0.80, 0.70, 0.79, 0.70], error=0.02).state_dict()
    assert (state["best_epoch"], state["waited"]) == (2, 3)
    journal = journals.Journal("auroc", 5, True, True)
    journal.load_state_dict(state)
    assert journal.waited == 3
    # An older checkpoint kept the best epoch alone and did not say how long it had waited.
    del state["waited"]
    journal.load_state_dict({**state, "best_epoch": 0})
    assert journal.waited == 3


def test_errors_are_those_of_resampled_series():
    generator = np.random.default_rng(0)
    labels = (generator.random(400) < 0.2).astype(np.int64)
    logits = np.stack([np.zeros(400), 1.5 * labels + generator.normal(size=400) - 1.5], axis=1)
    found = class_errors(logits, labels)
    draws = [generator.integers(400, size=400) for _ in range(2000)]
    resampled = [class_metrics(logits[draw], labels[draw]) for draw in draws]
    for name in ("accuracy", "log_loss", "auroc"):
        spread = np.std([metrics[name] for metrics in resampled])
        assert found[name] == pytest.approx(spread, rel=0.15)
    assert found["loss"] == found["log_loss"]
    assert "auroc" not in class_errors(generator.normal(size=(30, 3)), np.arange(30) % 3)


def test_the_error_of_an_area_without_a_class_is_unknown_and_that_of_a_perfect_one_nothing():
    assert math.isnan(auroc_error(math.nan, 0, 5))
    assert auroc_error(1.0, 3, 5) == 0.0
    assert auroc(np.array([True, False]), np.array([1.0, 0.0])) == 1.0
