"""Renewal processes: hazards of a histogram, chains of types, likelihoods by a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from osciformer.events import (
    EventSequences,
    GapDensity,
    PoissonProcess,
    RenewalProcess,
    calibrate,
    likelihood_terms,
    log_likelihood,
    sample,
)

from .event_cases import WithoutClosedForms, random_events

DENSITY = GapDensity(torch.tensor([0.0, 0.5, 2.0]).double(), torch.tensor([0.3, 0.6]).double(), 0.4)


def density_at(density: GapDensity, g: float) -> float:
    """Return the density of a gap by its definition."""
    edges, mass = density.edges.tolist(), density.mass.tolist()
    for low, high, share in zip(edges[:-1], edges[1:], mass, strict=True):
        if low <= g <= high and (g > low or low == 0):
            return share / (high - low)
    return (1 - sum(mass)) * density.tail_rate * math.exp(-density.tail_rate * (g - edges[-1]))


@given(st.floats(0, 12))
def test_hazard_times_survival_is_the_density(g: float) -> None:
    gap = torch.tensor([g], dtype=torch.float64)
    product = DENSITY.hazard(gap) * torch.exp(-DENSITY.cumulative_hazard(gap))
    assert float(product) == pytest.approx(density_at(DENSITY, g), rel=1e-10)


def test_survival_is_what_the_density_leaves() -> None:
    for g in (0.2, 0.5, 1.7, 3.0):
        mass = quad(lambda t: density_at(DENSITY, t), 0, g, points=[0.5, 2.0], epsabs=1e-12)[0]
        found = torch.exp(-DENSITY.cumulative_hazard(torch.tensor([g], dtype=torch.float64)))
        assert float(found) == pytest.approx(1 - mass, rel=1e-9)


def test_fitted_bins_hold_equal_shares_and_all_gaps() -> None:
    gaps = np.random.default_rng(0).exponential(size=1000)
    density = GapDensity.fit(gaps, num_bins=10)
    assert len(density.mass) == 10
    assert density.mass.numpy() == pytest.approx(np.full(10, 0.1), abs=0.002)
    assert float(density.edges[-1]) == gaps.max()
    assert 0 < 1 - float(density.mass.sum()) < 0.001


def test_bins_are_not_narrower_than_asked_for() -> None:
    gaps = np.round(np.random.default_rng(0).exponential(size=500), 1)
    density = GapDensity.fit(gaps, num_bins=50, min_width=0.25)
    assert float(density.edges.diff().min()) >= 0.25
    assert float(density.edges[-1]) == gaps.max()
    assert len(GapDensity.fit(np.full(5, 0.1), num_bins=4, min_width=1.0).mass) == 1


def test_no_bins_make_a_poisson_process() -> None:
    events = random_events([8, 5], windows=False)
    process = RenewalProcess.fit(events, num_bins=0, marks="independent")
    share = process.initial
    poisson = PoissonProcess(share / float(events.gaps.mean()))
    assert log_likelihood(process, events).total == pytest.approx(
        log_likelihood(poisson, events).total, rel=1e-12
    )


@pytest.mark.parametrize("marks", ["markov", "repeat", "independent"])
def test_likelihood_is_that_of_a_loop_over_gaps(marks: str) -> None:
    events = random_events([9, 4, 2, 1, 0], num_types=3)
    process = RenewalProcess.fit(events, marks=marks, num_bins=4)
    total = 0.0
    for one in events:
        for i in range(1, len(one)):
            total += math.log(density_at(process.gaps, one.times[i] - one.times[i - 1]))
            total += math.log(process.transition[one.types[i - 1], one.types[i]])
    found = log_likelihood(process, events)
    assert (found.total, found.error) == (pytest.approx(total, rel=1e-10), 0.0)
    assert torch.allclose(process.transition.sum(1), torch.ones(3).double())


def test_windows_begin_like_after_an_event() -> None:
    events = random_events([3], num_types=2)
    process = RenewalProcess.fit(events, num_bins=3)
    terms = likelihood_terms(process, events.batch(), span="window")
    one = events[0]
    first = math.log(density_at(process.gaps, one.times[0] - one.start))
    first += math.log(process.initial[one.types[0]])
    assert float((terms.log_intensity - terms.compensator)[0, 0]) == pytest.approx(first)
    tail = torch.tensor([one.end - one.times[-1]], dtype=torch.float64)
    assert float(terms.tail[0]) == pytest.approx(float(process.gaps.cumulative_hazard(tail)))


def test_repetition_has_one_probability_for_all_types() -> None:
    events = EventSequences.from_arrays([[0.0, 1, 2, 3, 4]], [[0, 0, 0, 2, 2]], num_types=3)
    process = RenewalProcess.fit(events, marks="repeat", smoothing=1.0)
    assert process.transition.diagonal().tolist() == pytest.approx([4 / 6] * 3)
    assert bool((process.transition.argmax(1) == torch.arange(3)).all())


def test_chain_counts_what_follows_within_sequences_only() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0], [0.0, 1.0]], [[0, 1], [0, 1]])
    process = RenewalProcess.fit(events, smoothing=1e-9)
    assert float(process.transition[0, 1]) == pytest.approx(1.0)
    assert process.transition[1].tolist() == pytest.approx([0.5, 0.5])  # nothing followed type 1


def test_compensator_with_events_within_is_left_to_quadrature() -> None:
    events = random_events([5])
    process = RenewalProcess.fit(events, num_bins=0)
    one, batch = events[0], events.batch()
    edges = torch.tensor([[one.start], [one.end]], dtype=torch.float64)
    assert process.compensator(batch, edges[:1], edges[1:]) is None
    found = log_likelihood(WithoutClosedForms(process), events).total
    assert found == pytest.approx(log_likelihood(process, events).total, abs=1e-6)


def test_compensator_may_begin_within_a_gap() -> None:
    events = EventSequences.from_arrays([[1.0, 9.0]], [[1, 0]])
    process = RenewalProcess(DENSITY, torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.ones(2) / 2)
    start, end = torch.tensor([[1.3, 4.0]]).double(), torch.tensor([[3.2, 8.5]]).double()
    found = process.compensator(events.batch(), start, end)

    def hazard(gap: float) -> float:
        return float(DENSITY.hazard(torch.tensor([gap], dtype=torch.float64)))

    first = quad(hazard, 0.3, 2.2, points=[0.5, 2.0], epsabs=1e-11)[0]
    assert found[0, 0].tolist() == pytest.approx([0.2 * first, 0.8 * first], rel=1e-6)
    assert float(found[0, 1].sum()) == pytest.approx(0.4 * 4.5)  # beyond the bins


@given(st.floats(0, 5), st.floats(0.01, 5))
def test_bound_holds_from_any_time_on(start: float, width: float) -> None:
    batch = EventSequences.from_arrays([[0.0]]).batch()
    process = RenewalProcess(DENSITY, torch.ones(1, 1), torch.ones(1))
    edges = torch.tensor([start, start + width], dtype=torch.float64)
    bound = float(process.upper_bound(batch, edges[:1], edges[1:]))
    grid = torch.linspace(start, start + width, 400, dtype=torch.float64)[1:]
    rates = process.intensity(batch, grid[None]).sum(-1)
    assert float(rates.max()) <= bound
    assert bound <= 1.2 * float(rates.max())  # and it is not far above


def test_sampled_gaps_follow_the_density() -> None:
    batch = EventSequences.from_arrays([[0.0]]).batch()
    process = RenewalProcess(DENSITY, torch.ones(1, 1), torch.ones(1))
    generator = torch.Generator().manual_seed(0)
    found = sample(process, batch, until=300.0, generator=generator, num_futures=8)
    gaps = torch.from_numpy(found.sequences.gaps)
    assert len(gaps) > 1000
    assert calibrate(DENSITY.cumulative_hazard(gaps).numpy()).p_value > 1e-3
    assert found.num_candidates < 4 * len(gaps)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a gap that is not zero"):
        GapDensity.fit(np.zeros(3))
    with pytest.raises(ValueError, match="must be probabilities"):
        RenewalProcess(DENSITY, torch.ones(2, 2), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="transition must be"):
        RenewalProcess(DENSITY, torch.ones(1, 2), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="marks must be one of"):
        RenewalProcess.fit(random_events([3]), marks="last")
