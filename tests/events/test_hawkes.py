"""Hawkes processes against sums over pairs, adaptive quadrature, and the laws of causality."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from osciformer.events import (
    EventProcess,
    EventSequences,
    HawkesProcess,
    fit_hawkes,
    likelihood_terms,
    log_likelihood,
    simulate_hawkes,
)
from osciformer.events.classical import scan_decay

from .event_cases import HAWKES, event_sequences, hawkes_rate, random_events

SHARED = HawkesProcess(HAWKES.base, HAWKES.branching, 1.7)
BY_CAUSE = HawkesProcess(HAWKES.base, HAWKES.branching, [0.6, 2.5])


@pytest.mark.parametrize("process", [HAWKES, SHARED, BY_CAUSE], ids=["pair", "shared", "cause"])
@given(events=event_sequences(), shifts=st.lists(st.floats(-1, 4), min_size=1, max_size=4))
def test_intensity_is_the_sum_over_events_strictly_before(
    process: HawkesProcess, events: EventSequences, shifts: list[float]
) -> None:
    batch = events.batch()
    own = batch.times.masked_fill(~batch.mask, 0.0)
    query = torch.cat([own, own[:, :1] + torch.tensor(shifts, dtype=torch.float64)], dim=1)
    found = process.intensity(batch, query)
    for row, one in enumerate(events):
        for column, t in enumerate(query[row].tolist()):
            for k in range(2):
                exact = hawkes_rate(process, one.times, one.types, t, k)
                assert float(found[row, column, k]) == pytest.approx(exact, rel=1e-12)


def test_left_limit_is_used_at_an_event_and_the_right_one_after_it() -> None:
    batch = EventSequences.from_arrays([[0.0, 1.0]], [[0, 1]], num_types=2).batch()
    query = torch.tensor([[1.0, math.nextafter(1.0, 2.0)]], dtype=torch.float64)
    at, after = HAWKES.intensity(batch, query)[0]
    jump = (HAWKES.branching * HAWKES.decay)[:, 1]
    later = HAWKES.intensity_after(batch, torch.zeros(1, 2, 1, dtype=torch.float64))[0, 1, 0]
    torch.testing.assert_close(after, at + jump, rtol=1e-14, atol=0)
    torch.testing.assert_close(later, at + jump, rtol=1e-14, atol=0)


def test_long_sequences_far_from_zero_agree_with_many_digits() -> None:
    events = random_events([300])
    times = events[0].times + 1e6
    batch = EventSequences.from_arrays([times], [events[0].types], num_types=2).batch()
    t = float(times[-1]) + 0.25
    found = HAWKES.intensity(batch, torch.tensor([[t]], dtype=torch.float64))[0, 0]
    with mpmath.workdps(40):
        for k in range(2):
            total = mpmath.mpf(float(HAWKES.base[k]))
            for time, kind in zip(times.tolist(), events[0].types, strict=True):
                beta = mpmath.mpf(float(HAWKES.decay[k, kind]))
                weight = mpmath.mpf(float(HAWKES.branching[k, kind])) * beta
                total += weight * mpmath.exp(-beta * (mpmath.mpf(t) - mpmath.mpf(time)))
            assert float(found[k]) == pytest.approx(float(total), rel=1e-13)


@given(st.integers(1, 9), st.integers(0, 2**31))
def test_scan_is_the_recurrence(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fade, jumps = torch.rand(2, 2, width, 3, generator=generator, dtype=torch.float64)
    state, states = torch.zeros(2, 3, dtype=torch.float64), []
    for i in range(width):
        state = fade[:, i] * state * (i > 0) + jumps[:, i]
        states.append(state)
    torch.testing.assert_close(scan_decay(fade, jumps), torch.stack(states, 1))


@given(events=event_sequences(max_sequences=1), edges=st.tuples(st.floats(-6, 9), st.floats(0, 4)))
def test_compensator_is_the_integral_though_events_lie_within(
    events: EventSequences, edges: tuple[float, float]
) -> None:
    one = events[0]
    start, end = edges[0], edges[0] + edges[1]
    found = HAWKES.compensator(
        events.batch(),
        torch.tensor([[start]], dtype=torch.float64),
        torch.tensor([[end]], dtype=torch.float64),
    )[0, 0]
    cuts = sorted({start, end, *(t for t in one.times if start < t < end)})
    for k in range(2):
        rate = partial(hawkes_rate, HAWKES, one.times, one.types, k=k)
        exact = sum(quad(rate, a, b, epsabs=1e-12)[0] for a, b in pairwise(cuts))
        assert float(found[k]) == pytest.approx(exact, rel=1e-8, abs=1e-9)


def test_compensator_of_tiny_gaps_keeps_its_digits() -> None:
    batch = EventSequences.from_arrays([[0.0]], num_types=2).batch()
    tiny = torch.tensor([[1e-12]], dtype=torch.float64)
    found = HAWKES.compensator(batch, torch.zeros_like(tiny), tiny)[0, 0]
    rates = HAWKES.intensity(batch, tiny)[0, 0]
    torch.testing.assert_close(found, 1e-12 * rates, rtol=1e-10, atol=0)


def test_intensity_after_events_is_that_of_their_histories() -> None:
    batch = random_events([5, 3, 0]).batch()
    gaps = torch.rand(3, 5, 4, dtype=torch.float64) * 3
    found = HAWKES.intensity_after(batch, gaps)
    default = EventProcess.intensity_after(HAWKES, batch, gaps)
    torch.testing.assert_close(found[batch.mask], default[batch.mask], rtol=1e-12, atol=0)
    assert torch.isfinite(default).all()
    for row, one in enumerate(random_events([5, 3, 0])):
        for i in range(len(one)):
            t = one.times[i] + float(gaps[row, i, 2])
            exact = hawkes_rate(HAWKES, one.times[: i + 1], one.types[: i + 1], t, 1)
            assert float(found[row, i, 2, 1]) == pytest.approx(exact, rel=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    batch = random_events([4, 2]).batch()

    def total(base: torch.Tensor, branching: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        terms = likelihood_terms(HawkesProcess(base, branching, decay), batch, span="window")
        return terms.per_sequence

    inputs = [p.clone().requires_grad_() for p in (HAWKES.base, HAWKES.branching, HAWKES.decay)]
    assert torch.autograd.gradcheck(total, inputs)


@pytest.fixture(scope="module")
def simulated() -> EventSequences:
    generator = torch.Generator().manual_seed(5)
    return simulate_hawkes(HAWKES, num_sequences=30, horizon=120.0, generator=generator)


def test_simulated_counts_have_the_stationary_rate(simulated: EventSequences) -> None:
    counts = np.stack([np.bincount(one.types, minlength=2) for one in simulated])
    rates = HAWKES.stationary_rates.numpy()
    error = counts.std(axis=0, ddof=1) / math.sqrt(len(counts))
    # The start without a history costs less than one event of each type.
    low, high = rates * 120 - 1.0 - 4 * error, rates * 120 + 4 * error
    assert (low < counts.mean(axis=0)).all()
    assert (counts.mean(axis=0) < high).all()
    assert (error < 0.06 * rates * 120).all()  # the interval is a narrow one


def test_fit_recovers_the_process(simulated: EventSequences) -> None:
    fit = fit_hawkes(simulated, decay="by_pair", span="window")
    assert fit.is_stationary
    assert fit.gradient < 1e-4
    true = log_likelihood(HAWKES, simulated, span="window").micro
    found = log_likelihood(fit.process, simulated, span="window").micro
    assert fit.log_likelihood == pytest.approx(found, abs=1e-9)
    # 10 parameters: twice the gain over the truth is chi-square, mean 10; 0.999 quantile 29.6.
    assert 0 < 2 * (found - true) * len(simulated.times) < 29.6
    assert torch.allclose(fit.process.base, HAWKES.base, rtol=0.15)
    assert torch.allclose(fit.process.branching, HAWKES.branching, atol=0.12)


def test_fit_does_not_depend_on_the_unit(simulated: EventSequences) -> None:
    small = simulated[:3]
    one, other = (
        fit_hawkes(small.rescale(factor, "u"), decay="shared").process for factor in (1.0, 3600.0)
    )
    assert torch.allclose(one.base, 3600 * other.base, rtol=1e-4)
    assert torch.allclose(one.branching, other.branching, atol=1e-4)
    assert torch.allclose(one.decay, 3600 * other.decay, rtol=1e-4)


def test_simulation_is_seeded_and_refuses_explosions() -> None:
    def draw(process: HawkesProcess, seed: int, **others: float) -> EventSequences:
        generator = torch.Generator().manual_seed(seed)
        return simulate_hawkes(process, num_sequences=3, generator=generator, **others)

    one, same, other = (draw(HAWKES, seed, horizon=10.0) for seed in (0, 0, 1))
    assert np.array_equal(one.times, same.times)
    assert not np.array_equal(one.times, other.times)
    wild = HawkesProcess([1.0], [[1.5]], 5.0)
    assert not wild.is_stationary
    with pytest.raises(RuntimeError, match=r"spectral radius of the branching matrix is 1\.5"):
        draw(wild, 0, horizon=1e3, max_events=500)
    with pytest.raises(ValueError, match="there is no stationary rate"):
        _ = wild.stationary_rates
    with pytest.raises(ValueError, match="horizon must be positive"):
        draw(HAWKES, 0, horizon=-1.0)


def test_a_silent_process_has_no_events() -> None:
    silent = HawkesProcess([0.0], [[0.5]], 1.0)
    events = simulate_hawkes(
        silent, num_sequences=2, horizon=5.0, generator=torch.Generator().manual_seed(0)
    )
    assert events.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-0.1], [[0.1]], 1.0), "base must be finite and not negative; entry 0 is -0.1"),
        (([0.1], [[0.1, 0.2]], 1.0), "branching must be [1, 1]; got [1, 2]"),
        (([0.1], [[-0.1]], 1.0), "branching must be finite and not negative"),
        (([0.1], [[0.1]], 0.0), "decay must be positive and finite"),
        (([0.1], [[0.1]], [1.0, 2.0]), "decay must be a number, [1] or [1, 1]; got [2]"),
    ],
)
def test_wrong_parameters_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HawkesProcess(*arguments)


def test_fit_needs_events() -> None:
    with pytest.raises(ValueError, match="two events at different times"):
        fit_hawkes(random_events([1, 0]))
