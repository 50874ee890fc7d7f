"""The shared bank, against `torch.matrix_exp`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from osciformer.theory import OscillatorBank

LENGTH = 3.0


def exponential(bank: OscillatorBank, s: float) -> Tensor:
    """Return the blocks [M + 1, 2, 2] of exp(A s)."""
    blocks = torch.zeros(len(bank.omega), 2, 2, dtype=torch.float64)
    blocks[:, 0, 1] = 1.0
    blocks[:, 1, 0] = -(bank.omega**2)
    blocks[:, 1, 1] = -2 * bank.gamma
    return torch.matrix_exp(blocks * s)


# Decay rates: none, small, critical for some mode, overdamped, and a different one for each mode.
RATES = [0.0, 0.1, math.pi / LENGTH, 9.0, torch.linspace(0.0, 8.0, 7, dtype=torch.float64)]


@pytest.mark.parametrize("gamma", RATES)
def test_flow_is_the_exponential(gamma: float | Tensor) -> None:
    bank = OscillatorBank.on_grid(6, LENGTH, gamma)
    gaps = torch.tensor([0.0, 1e-9, 0.4, 3.0], dtype=torch.float64)
    wanted = torch.stack([exponential(bank, s) for s in gaps.tolist()])
    torch.testing.assert_close(bank.flow(gaps), wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("gamma", [0.0, 0.2])
def test_path_adds_up_positions_and_speed_is_its_derivative(gamma: float) -> None:
    bank = OscillatorBank.on_grid(4, LENGTH, gamma)
    states = torch.randn(3, 5, 2, 2, dtype=torch.float64)
    gaps = torch.rand(3, 7, dtype=torch.float64, requires_grad=True)
    path = bank.path(states, gaps)
    for i in range(3):
        for k in range(7):
            moved = exponential(bank, gaps[i, k].item()) @ states[i]
            torch.testing.assert_close(path[i, k].detach(), moved[:, 0].sum(dim=0))
    for channel in range(2):
        (slope,) = torch.autograd.grad(path[..., channel].sum(), gaps, retain_graph=True)
        torch.testing.assert_close(bank.speed(states, gaps)[..., channel].detach(), slope)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0, 200.0])
def test_zero_mode_at_rest_stays_whatever_the_damping(gamma: float) -> None:
    bank = OscillatorBank.on_grid(0, LENGTH, gamma)
    gaps = torch.linspace(0, 3, 13, dtype=torch.float64)
    flow = bank.flow(gaps)[:, 0]
    assert (flow[:, 0, 0] == 1).all()
    # With a velocity it saturates; the straight line of the paper's remark is gamma = 0.
    drift = gaps if gamma == 0 else -torch.expm1(-2 * gamma * gaps) / (2 * gamma)
    torch.testing.assert_close(flow[:, 0, 1], drift, rtol=1e-12, atol=0)


def test_amplitudes_bound_undamped_modes_and_are_reached() -> None:
    bank = OscillatorBank.on_grid(3, LENGTH)
    states = torch.randn(4, 2, 1, dtype=torch.float64)
    states[0, 1] = 0
    gaps = torch.linspace(0, 6 * LENGTH, 4001, dtype=torch.float64)
    moved = (bank.readout(gaps)[..., None] * states).sum(dim=-2).norm(dim=-1)
    torch.testing.assert_close(moved.amax(dim=0), bank.amplitudes(states), rtol=1e-4, atol=0)


def test_damped_keeps_the_grid() -> None:
    bank = OscillatorBank.on_grid(3, LENGTH)
    assert torch.equal(bank.damped(0.2).omega, bank.omega)
    assert bank.damped(0.2).gamma.tolist() == [0.2] * 4
    assert bank.num_modes == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1.0), "num_modes must not be negative; got -1"),
        ((2, 0.0), "length must be positive and finite; got 0.0"),
        ((2, 1.0, -0.5), "gamma must not be negative; got -0.5"),
    ],
)
def test_refuses_what_is_no_bank(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OscillatorBank.on_grid(*arguments)
