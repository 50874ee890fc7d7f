"""Likelihoods as a task: sums and counts are exact, and training finds the best process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osciformer.events import (
    EventBatch,
    EventSequences,
    LikelihoodTerms,
    PoissonProcess,
    likelihood_terms,
    log_likelihood,
)
from osciformer.events.neural import EventModelConfig, make_event_model
from osciformer.train import EventLikelihood, EventSource, FitResult, TrainConfig, fit
from osciformer.train.tasks import HIGHER_IS_BETTER, Scores

CONFIG = TrainConfig(max_epochs=3, batch_size=8, learning_rate=0.02, accelerator="cpu")


class LearnedRates(nn.Module):
    """A Poisson process whose rates are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rates = nn.Parameter(torch.zeros(2))

    def forward(self, batch: EventBatch) -> LikelihoodTerms:
        return likelihood_terms(PoissonProcess(self.log_rates.exp()), batch)


def sequences(count: int = 30, seed: int = 0) -> EventSequences:
    """Return sequences of 0 to 8 events of two types."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, count)
    times = [np.cumsum(rng.exponential(0.5, n)) for n in lengths]
    return EventSequences.from_arrays(
        times, [rng.integers(0, 2, n) for n in lengths], num_types=2, time_unit="h"
    )


def run(config: TrainConfig = CONFIG, **options: Any) -> FitResult:
    """Train a network whose compensator draws random nodes in training."""
    events = sequences()
    torch.manual_seed(0)
    settings = EventModelConfig(num_types=2, head="softplus", dim=8, num_layers=1, num_heads=1)
    return fit(
        make_event_model(settings).fit_times(events),
        EventLikelihood(),
        options.pop("source", EventSource(events, config.batch_size)),
        EventSource(sequences(seed=1), config.batch_size, shuffle=False),
        config,
        **options,
    )


def test_loss_is_the_sum_over_scored_events_and_their_number() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0, 3.0], [5.0], [2.0, 2.5]])
    batch = events.batch()
    total, count = EventLikelihood().loss(likelihood_terms(PoissonProcess([2.0]), batch), batch)
    assert count == 3  # a sequence of one event has nothing to predict
    assert float(total) == pytest.approx(-(3 * np.log(2.0) - 2.0 * 3.5), abs=1e-12)


def test_metrics_are_those_of_all_sequences_at_once() -> None:
    events, process = sequences(), PoissonProcess([0.5, 2.0])
    scores = Scores(EventLikelihood())
    for batch in EventSource(events, 7).epoch(0):
        scores.add(likelihood_terms(process, batch), batch)
    found, wanted = scores.result([scores.state()]), log_likelihood(process, events)
    assert found["log_likelihood"] == pytest.approx(wanted.micro, abs=1e-12)
    assert found["macro_log_likelihood"] == pytest.approx(wanted.macro, abs=1e-12)


def test_a_sequence_that_two_processes_had_counts_once() -> None:
    events, process = sequences(5), PoissonProcess([0.5, 2.0])
    states = []
    for rank in range(4):
        scores = Scores(EventLikelihood())
        for batch in EventSource(events, 4, shuffle=False).epoch(0, rank=rank, world_size=4):
            scores.add(likelihood_terms(process, batch), batch)
        states.append(scores.state())
    assert sum(len(state[0]) for state in states) > len(events)
    found = Scores(EventLikelihood()).result(states)
    assert found["log_likelihood"] == pytest.approx(log_likelihood(process, events).micro)


def test_metrics_without_a_scored_event_are_nan() -> None:
    events = EventSequences.from_arrays([[1.0], []])
    scores = Scores(EventLikelihood())
    assert np.isnan(list(scores.result([scores.state()]).values())).all()
    scores.add(likelihood_terms(PoissonProcess([1.0]), events.batch()), events.batch())
    assert np.isnan(list(scores.result([scores.state()]).values())).all()


def test_higher_likelihood_is_better() -> None:
    assert EventLikelihood().resolve_monitor("auto") in HIGHER_IS_BETTER


def test_training_finds_the_rates_of_the_data() -> None:
    events = sequences()
    scored = np.concatenate([one.types[1:] for one in events])
    best = np.bincount(scored, minlength=2) / events.gaps.sum()
    config = replace(CONFIG, max_epochs=80, weight_decay=0.0, learning_rate=0.05)
    result = fit(LearnedRates(), EventLikelihood(), EventSource(events, 30), None, config)
    np.testing.assert_allclose(result.model.log_rates.exp().tolist(), best, rtol=0.01)


def test_training_improves_a_network_and_reports_its_likelihood() -> None:
    result = run()
    losses = [row["train_loss"] for row in result.history]
    assert losses[-1] < losses[0]
    best = max(row["val_log_likelihood"] for row in result.history)
    found = log_likelihood(result.model, sequences(seed=1))
    assert found.micro == pytest.approx(best, abs=1e-5)


class Killed(Exception):
    """Stands in for a process that dies."""


class DyingSource(EventSource):
    """Batches that raise in the middle of the second epoch."""

    def epoch(self, number: int, **place: int) -> Any:
        batches = super().epoch(number, **place)
        return _Dying(batches) if number == 1 else batches


class _Dying:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        yield next(iter(self.batches))
        raise Killed


def test_a_killed_run_is_continued_to_the_same_bits(tmp_path: Path) -> None:
    whole = run().model.state_dict()
    with pytest.raises(Killed):
        run(source=DyingSource(sequences(), CONFIG.batch_size), run_dir=tmp_path)
    continued = run(run_dir=tmp_path, resume=tmp_path).model.state_dict()
    assert [name for name in whole if not torch.equal(whole[name], continued[name])] == []


def test_each_sequence_comes_once_per_epoch_in_another_order() -> None:
    source = EventSource(sequences(), 8)
    orders = [[i for b in source.epoch(k) for i in b.index.tolist()] for k in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(30))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_processes_share_each_batch() -> None:
    source = EventSource(sequences(), 8, seed=3)
    whole = [sorted(batch.index.tolist()) for batch in source.epoch(2)]
    ranks = [list(source.epoch(2, rank=rank, world_size=2)) for rank in range(2)]
    together = [sorted(a.index.tolist() + b.index.tolist()) for a, b in zip(*ranks, strict=True)]
    assert together == whole
