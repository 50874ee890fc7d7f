"""Which epoch is kept, and when training stops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pytorch_lightning", reason="training needs Lightning")

from torch import nn

from osciformer.config import TrainConfig
from osciformer.train import callbacks as journals
from osciformer.train.module import TrainingModule
from osciformer.train.tasks import Classification


@pytest.fixture
def follow(monkeypatch):
    """Return a function that shows a journal some epochs, and returns what it has kept."""
    monkeypatch.setattr(TrainingModule, "finish_epoch", lambda self: None)
    monkeypatch.setattr(journals, "current_weights", lambda trainer: trainer.current_epoch)

    def run(values, *, monitor="auroc", patience=None):
        module = TrainingModule(nn.Linear(1, 1), Classification(num_classes=2), TrainConfig())
        journal = journals.Journal(monitor, patience, True)
        trainer = SimpleNamespace(
            optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])], should_stop=False, loggers=[]
        )
        for epoch, value in enumerate(values):
            trainer.current_epoch = epoch
            module.metrics = {monitor: value}
            journal.on_train_epoch_end(trainer, module)
            if trainer.should_stop:
                break
        return journal

    return run


@pytest.mark.parametrize("values", [[0.7, 0.8, 0.79, 0.78], [math.nan, 0.8, math.nan, 0.79]])
def test_the_best_epoch_is_kept(follow, values):
    journal = follow(values)
    assert journal.best_epoch == journal.best_weights == int(np.nanargmax(values))
    assert journal.best_value == np.nanmax(values)


def test_less_is_better_for_losses(follow):
    assert follow([0.5, 0.4, 0.42, 0.6], monitor="loss").best_epoch == 1


def test_patience_counts_from_the_best_epoch(follow):
    journal = follow([0.80, 0.70, 0.79, 0.70, 0.90], patience=3)
    assert journal.stopped_early
    assert (journal.best_epoch, len(journal.history)) == (0, 4)


def test_a_continued_journal_goes_on_waiting(follow):
    state = follow([0.80, 0.70, 0.79, 0.70]).state_dict()
    assert (state["best_epoch"], state["waited"]) == (0, 3)
    journal = journals.Journal("auroc", 5, True)
    # Older checkpoints hold an error of the metric, which is passed over.
    journal.load_state_dict({**state, "best_error": 0.0})
    assert journal.waited == 3
    # Still older ones do not say how long they had waited.
    del state["waited"]
    journal.load_state_dict(state)
    assert journal.waited == 3
