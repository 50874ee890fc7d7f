"""Poisson processes with constant and with given rates."""

from __future__ import annotations

import math
import re

import pytest
import torch

from osciformer.events import (
    EventSequences,
    InhomogeneousPoissonProcess,
    PoissonProcess,
    log_likelihood,
)

from .event_cases import WithoutClosedForms, random_events


def test_fitted_rates_are_counts_over_spans_and_the_best_ones() -> None:
    events = random_events([6, 1, 0, 4])
    process = PoissonProcess.fit(events)
    spans = sum(one.times[-1] - one.times[0] for one in events if len(one))
    counts = [sum(int((one.types[1:] == k).sum()) for one in events) for k in (0, 1)]
    assert process.rates.tolist() == pytest.approx([c / spans for c in counts])
    best = log_likelihood(process, events).micro
    for factor in (0.9, 1.1):
        assert log_likelihood(PoissonProcess(process.rates * factor), events).micro < best


def test_rates_need_time_and_sense() -> None:
    with pytest.raises(ValueError, match="two events at different times"):
        PoissonProcess.fit(EventSequences.from_arrays([[1.0], [2.0, 2.0]]))
    with pytest.raises(ValueError, match=re.escape("rates must be [K]")):
        PoissonProcess([])
    with pytest.raises(ValueError, match="entry 1 is nan"):
        PoissonProcess([1.0, math.nan])


def test_given_antiderivative_agrees_with_quadrature() -> None:
    process = InhomogeneousPoissonProcess(
        lambda t: torch.stack([1 + torch.sin(t), torch.exp(-t)], dim=-1),
        num_types=2,
        cumulative=lambda t: torch.stack([t - torch.cos(t), -torch.exp(-t)], dim=-1),
    )
    events = random_events([7, 3])
    exact = log_likelihood(process, events)
    found = log_likelihood(WithoutClosedForms(process), events, tolerance=1e-10)
    assert exact.error == 0.0
    assert found.micro == pytest.approx(exact.micro, abs=1e-9)


def test_rate_of_another_shape_is_refused() -> None:
    process = InhomogeneousPoissonProcess(torch.ones_like, num_types=1)
    batch = EventSequences.from_arrays([[0.0, 1.0]]).batch()
    with pytest.raises(ValueError, match=re.escape("rate must return the shape [1, 2, 1]")):
        process.intensity(batch, batch.times)
