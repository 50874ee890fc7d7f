"""Each inequality on many random cases, and where its constant is reached."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from osciformer.theory import (
    OscillatorBank,
    damping_bound,
    fejer_bound,
    fejer_coefficients,
    fejer_states,
    logit_bound,
    output_bound,
    perturbation_constant,
    readout_constant,
    softmax_bound,
)

from .cases import NUM_CASES, normal, sup, uniform, waves, whole, zigzag

SLACK = 1 + 1e-9  # for rounding


@pytest.mark.parametrize("count", NUM_CASES)
class TestRandomCases:
    def test_fejer_mean_of_a_lipschitz_path(self, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            length = uniform(generator, 0.3, 5.0)
            path, lipschitz = zigzag(generator, whole(generator, 1, 3), length)
            order = whole(generator, 0, 60)
            bank = OscillatorBank.on_grid(order, length)
            anchor = uniform(generator, 0.0, 0.9) * length
            states = fejer_states(path, bank, anchor, start=0.0, end=length)
            times = torch.linspace(anchor, length, 301, dtype=torch.float64)
            error = sup(path(times) - bank.path(states, times - anchor))
            # The rule that finds the coefficients does not know the corners.
            assert error <= fejer_bound(lipschitz, length, order) * (1 + 1e-3)

    def test_damping_moves_a_path(self, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            length, num_modes = uniform(generator, 0.3, 5.0), whole(generator, 0, 12)
            strength = 10.0 ** uniform(generator, -4.0, 1.5)
            rates = strength * torch.rand(num_modes + 1, generator=generator, dtype=torch.float64)
            free = OscillatorBank.on_grid(num_modes, length)
            damped = free.damped(rates)
            states = normal(generator, num_modes + 1, 2, 2)
            states[0, 1] = 0.0
            gaps = torch.linspace(0.0, length, 101, dtype=torch.float64)
            moved = sup(damped.path(states, gaps) - free.path(states, gaps))
            assert moved <= damping_bound(damped, states, length) * SLACK

    def test_damping_moves_the_readout(self, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            length, num_modes = uniform(generator, 0.3, 5.0), whole(generator, 0, 12)
            strength = 10.0 ** uniform(generator, -4.0, 1.5)
            rates = strength * torch.rand(num_modes + 1, generator=generator, dtype=torch.float64)
            bank = OscillatorBank.on_grid(num_modes, length)
            slope = readout_slope(bank, rates, length)
            better = readout_constant(bank, length)
            assert slope <= better * SLACK
            assert better <= perturbation_constant(bank, length)

    def test_softmax(self, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            size, spread = whole(generator, 2, 20), 10.0 ** uniform(generator, -2.0, 1.5)
            x = spread * normal(generator, size)
            y = x + 10.0 ** uniform(generator, -4.0, 1.0) * normal(generator, size)
            moved = float((x.softmax(-1) - y.softmax(-1)).abs().sum())
            error = float((x - y).abs().max())
            assert moved <= softmax_bound(error) + 1e-14
            assert softmax_bound(error) <= error

    def test_logits_weights_and_averaged_values(
        self, count: int, generator: torch.Generator
    ) -> None:
        """Keys, queries and values are moved at random, in the direction that hurts or any."""
        nodes, shares = _rule()
        for _ in range(count):
            size, width = whole(generator, 1, 6), whole(generator, 1, 4)
            query, moved_query = _moved(generator, 1, width)
            keys, moved_keys = _moved(generator, size, width)
            values, moved_values = _moved(generator, size, 2)
            q, near_q = query(nodes), moved_query(nodes)  # [1, T, d]
            k, near_k = keys(nodes), moved_keys(nodes)  # [N, T, d]
            v, near_v = values(nodes), moved_values(nodes)
            logits, near_logits = ((a * b).sum(-1) @ shares for a, b in ((q, k), (near_q, near_k)))
            bound = logit_bound(sup(q), sup(k), sup(q - near_q), sup(k - near_k))
            assert float((logits - near_logits).abs().max()) <= bound * SLACK
            scale = width**-0.5
            w, near_w = ((scale * x).softmax(-1) for x in (logits, near_logits))
            weight_bound = softmax_bound(scale * bound)
            assert float((w - near_w).abs().sum()) <= weight_bound * SLACK + 1e-14
            rows = [a @ torch.einsum("ntd,t->nd", b, shares) for a, b in ((w, v), (near_w, near_v))]
            total = output_bound(weight_bound, sup(v), sup(v - near_v))
            assert float((rows[0] - rows[1]).norm()) <= total * SLACK + 1e-14


def _rule() -> tuple[Tensor, Tensor]:
    """Positive weights: a mean is a mean, whatever the functions."""
    nodes = torch.linspace(0.0, 2.0, 40, dtype=torch.float64)
    return nodes, torch.full((40,), 1 / 40, dtype=torch.float64)


def _moved(generator: torch.Generator, count: int, width: int):  # type: ignore[no-untyped-def]
    """Return random paths as one function to [N, T, d], and the same a little or much off."""
    paths = [waves(generator, width)[0] for _ in range(count)]
    others = [waves(generator, width)[0] for _ in range(count)]
    step = 10.0 ** uniform(generator, -4.0, 0.5)

    def exact(t: Tensor) -> Tensor:
        return torch.stack([path(t) for path in paths])

    def off(t: Tensor) -> Tensor:
        return exact(t) + step * torch.stack([path(t) for path in others])

    return exact, off


def readout_slope(bank: OscillatorBank, rates: Tensor, length: float) -> float:
    """Return the largest norm of the change of the readout C exp(A s) over the largest rate."""
    gaps = torch.linspace(0.0, length, 61, dtype=torch.float64)
    moved = bank.damped(rates).readout(gaps) - bank.readout(gaps)
    return float(moved.flatten(1).norm(dim=-1).max() / rates.max())


def test_a_straight_line_reaches_the_fejer_bound() -> None:
    for order in (0, 1, 10, 100):
        found = fejer_coefficients(lambda t: 3.0 * t[:, None], 0.0, 2.0, order)
        assert float(found.sum()) == pytest.approx(fejer_bound(3.0, 2.0, order), rel=1e-10)


@pytest.mark.parametrize("step", [1e-4, 0.3, 4.0])
def test_two_equal_logits_that_move_apart_reach_the_softmax_bound(step: float) -> None:
    x = torch.tensor([0.5 * step, -0.5 * step], dtype=torch.float64)
    moved = float((x.softmax(-1) - (-x).softmax(-1)).abs().sum())
    assert moved == pytest.approx(softmax_bound(step), rel=1e-12)


def test_damping_bound_is_within_a_factor_of_two_for_weak_damping() -> None:
    free = OscillatorBank.on_grid(1, 1.0)
    states = torch.tensor([[[0.0], [0.0]], [[1.0], [0.0]]], dtype=torch.float64)
    damped = free.damped(1e-4)
    gaps = torch.linspace(0.0, 10.0, 1001, dtype=torch.float64)
    moved = sup(damped.path(states, gaps) - free.path(states, gaps))
    assert 0.49 < moved / float(damping_bound(damped, states, 10.0)) <= 0.5


def test_readout_moves_linearly_in_weak_damping() -> None:
    bank = OscillatorBank.on_grid(8, 3.0)
    slopes = [readout_slope(bank, torch.full((9,), g).double(), 3.0) for g in (1e-3, 1e-4, 1e-5)]
    assert slopes[2] == pytest.approx(slopes[1], rel=1e-3)
    assert slopes[1] == pytest.approx(slopes[0], rel=1e-2)
    # What happens, our constant, the paper's.
    assert 10 < slopes[2] < readout_constant(bank, 3.0) < 20 < 900
    assert perturbation_constant(bank, 3.0) > 900


def test_query_and_values_enter_as_the_derivation_says() -> None:
    assert logit_bound(2.0, 3.0, 0.0, 0.1) == pytest.approx(0.2)
    assert logit_bound(2.0, 3.0, 0.1, 0.0) == pytest.approx(0.3)
    assert output_bound(0.1, 2.0, 0.3) == pytest.approx(0.5)
    assert math.isclose(softmax_bound(0.0), 0.0)
