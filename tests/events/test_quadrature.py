"""Integrals agree with known ones, and their estimated error is above the true one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from osciformer._types import Tensor
from osciformer.events import (
    EventSequences,
    InhomogeneousPoissonProcess,
    integrate_intensity,
)
from osciformer.events.likelihood import kronrod_rule

from .event_cases import HAWKES, WithoutClosedForms, hawkes_rate, random_events

BATCH = EventSequences.from_arrays([[0.0], [0.0]]).batch()


def process_of(rate, dtype: torch.dtype = torch.float64) -> InhomogeneousPoissonProcess:
    return InhomogeneousPoissonProcess(lambda t: rate(t).to(dtype)[..., None], num_types=1)


def intervals(*pairs: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the intervals of each of two rows, as start and end."""
    edges = torch.tensor(pairs, dtype=torch.float64).T
    return edges[0].repeat(2, 1), edges[1].repeat(2, 1)


@pytest.mark.parametrize("degree", range(24))
def test_rules_are_exact_for_polynomials_of_their_degree(degree: int) -> None:
    nodes, kronrod, gauss = kronrod_rule()
    exact = 1 / (degree + 1)
    assert float((kronrod * nodes**degree).sum()) == pytest.approx(exact, rel=1e-14)
    if degree < 14:
        assert float((gauss * nodes**degree).sum()) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize(
    ("rate", "antiderivative"),
    [
        (lambda t: 2 + torch.cos(9 * t), lambda t: 2 * t + math.sin(9 * t) / 9),
        (lambda t: torch.exp(-40 * t), lambda t: -math.exp(-40 * t) / 40),
        (lambda t: 1 / (1e-3 + (t - 1) ** 2), lambda t: math.atan((t - 1) / 1e-3**0.5) / 1e-3**0.5),
        (lambda t: t.sqrt(), lambda t: 2 / 3 * t**1.5),
    ],
    ids=["wave", "decay", "peak", "root"],
)
@pytest.mark.parametrize("tolerance", [1e-4, 1e-8])
def test_error_is_below_its_estimate_and_the_tolerance(rate, antiderivative, tolerance) -> None:
    pairs = [(0.0, 0.5), (0.5, 5.0), (2.0, 2.0)]
    found = integrate_intensity(process_of(rate), BATCH, *intervals(*pairs), tolerance=tolerance)
    exact = torch.tensor(
        [antiderivative(b) - antiderivative(a) for a, b in pairs], dtype=torch.float64
    )
    error = (found.value[..., 0] - exact).abs()
    assert found.converged
    assert bool((error <= found.error + 1e-13 * (1 + exact)).all())
    assert bool((found.error <= tolerance * exact.clamp(min=1.0)).all())
    assert found.value[:, 2].abs().max() == 0


def test_single_panel_measures_its_error_and_says_that_it_is_too_large() -> None:
    rate = lambda t: 1 + torch.cos(6 * t)  # noqa: E731
    start, end = intervals((0.0, 4.0))
    once = integrate_intensity(process_of(rate), BATCH, start, end, max_halvings=0)
    exact = 4 + math.sin(24) / 6
    assert not once.converged
    assert abs(float(once.value[0, 0, 0]) - exact) <= float(once.error[0, 0])
    assert integrate_intensity(process_of(rate), BATCH, start, end).converged


def test_an_integral_that_does_not_converge_says_so() -> None:
    rate = lambda t: (t - 1.0).abs().clamp(min=1e-12) ** -0.99  # noqa: E731
    found = integrate_intensity(process_of(rate), BATCH, *intervals((0.3, 2.0)), max_halvings=4)
    assert not found.converged
    assert float(found.error.min()) > 1e-6


def test_refinement_looks_at_hard_panels_alone() -> None:
    looked_at = []

    def rate(t: Tensor) -> Tensor:
        looked_at.append(t.numel())
        return torch.exp(-1000 * t.clamp(min=0)) + 1

    integrate_intensity(process_of(rate), BATCH, *intervals(*[(i, i + 1) for i in range(20)]))
    # 20 intervals in 2 rows at first; then 2 halves of one interval a row.
    assert looked_at[0] == 2 * 20 * 15
    assert max(looked_at[1:]) <= 2 * 2 * 15


def test_events_within_an_interval_are_found() -> None:
    events = random_events([6])
    one, batch = events[0], events.batch()
    start = torch.tensor([[one.start]], dtype=torch.float64)
    end = torch.tensor([[one.end]], dtype=torch.float64)
    found = integrate_intensity(WithoutClosedForms(HAWKES), batch, start, end, tolerance=1e-7)
    exact = [
        quad(
            lambda t, k=k: hawkes_rate(HAWKES, one.times, one.types, t, k),
            one.start,
            one.end,
            points=one.times,
            epsabs=1e-11,
            limit=200,
        )[0]
        for k in range(2)
    ]
    assert found.converged
    assert np.allclose(found.value[0, 0].numpy(), exact, atol=1e-7)


def test_float32_intensities_stop_at_their_rounding() -> None:
    rate = lambda t: 100 * (2 + torch.cos(t))  # noqa: E731
    found = integrate_intensity(
        process_of(rate, torch.float32), BATCH, *intervals((0.0, 3.0)), tolerance=1e-12
    )
    assert found.converged
    assert float(found.value[0, 0, 0]) == pytest.approx(600 + 100 * math.sin(3), rel=1e-6)


def test_gradients_pass_through_refined_panels() -> None:
    decay = torch.tensor(80.0, dtype=torch.float64, requires_grad=True)
    process = process_of(lambda t: torch.exp(-decay * t))
    found = integrate_intensity(process, BATCH, *intervals((0.0, 2.0)), tolerance=1e-9)
    found.value[0].sum().backward()
    assert float(decay.grad) == pytest.approx(-1 / 80.0**2, rel=1e-6)


def test_wrong_arguments_are_refused() -> None:
    start, end = intervals((0.0, 1.0))
    process = process_of(torch.ones_like)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        integrate_intensity(process, BATCH, start, end, tolerance=0.0)
    with pytest.raises(ValueError, match="must not end before they start"):
        integrate_intensity(process, BATCH, end, start)
