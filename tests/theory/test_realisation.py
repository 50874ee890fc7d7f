"""From paths to initial states: each lemma of the proof, measured with tools of its own."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from osciformer.math.quadrature import graded_panels
from osciformer.theory import (
    OscillatorBank,
    fejer_coefficients,
    fejer_kernel,
    fejer_states,
    least_squares_states,
    realise,
    shift_phase,
)
from osciformer.theory.realisation import Path

START, END = -0.5, 2.5
LENGTH = END - START
PATHS: dict[str, Path] = {
    "line": lambda t: t[:, None],
    "corner": lambda t: (t[:, None] - 0.9).abs(),
    "smooth": lambda t: (t.exp() * torch.sin(5 * t))[:, None],
}
ANCHORS = (-0.5, -0.1, 0.45, 1.2, 2.3, 2.5)
GRID = torch.linspace(START, END, 1501, dtype=torch.float64)


def joined(t: Tensor) -> Tensor:
    return torch.cat([path(t) for path in PATHS.values()], dim=-1)


def cosine_sum(coefficients: Tensor, times: Tensor) -> Tensor:
    n = torch.arange(len(coefficients), dtype=torch.float64)
    return torch.cos((times[:, None] - START) * n * math.pi / LENGTH) @ coefficients


def worst(path: Path, bank: OscillatorBank, states: Tensor, anchor: float) -> float:
    times = torch.linspace(anchor, END, 1501, dtype=torch.float64)
    return float((path(times) - bank.path(states, times - anchor)).norm(dim=-1).max())


class TestFejerKernel:
    @pytest.mark.parametrize("order", [0, 1, 7, 40])
    def test_is_the_positive_sum_of_its_fourier_series(self, order: int) -> None:
        theta = torch.linspace(-7.0, 7.0, 2001, dtype=torch.float64)  # 0 is among them
        k = torch.arange(1, order + 1, dtype=torch.float64)
        series = 1 + 2 * (torch.cos(theta[:, None] * k) @ (1 - k / (order + 1)))
        kernel = fejer_kernel(order, theta)
        torch.testing.assert_close(kernel, series, rtol=1e-9, atol=1e-10)
        assert (kernel >= 0).all()

    @pytest.mark.parametrize("order", [0, 1, 7, 40])
    def test_mean_is_one(self, order: int) -> None:
        nodes, weights = graded_panels(2 * math.pi * (order + 1))
        mean = (weights * fejer_kernel(order, 2 * math.pi * nodes)).sum()
        assert float(mean) == pytest.approx(1.0, abs=1e-12)

    @pytest.mark.parametrize("delta", [0.05, 0.5, 2.0, math.pi])
    @pytest.mark.parametrize("order", [1, 7, 40])
    def test_tail_is_bounded(self, order: int, delta: float) -> None:
        nodes, weights = graded_panels(math.pi * (order + 1))
        theta = delta + (math.pi - delta) * nodes
        tail = 2 * (math.pi - delta) * (weights * fejer_kernel(order, theta)).sum() / (2 * math.pi)
        assert float(tail) <= 1 / ((order + 1) * math.sin(delta / 2) ** 2)


class TestFejerMeans:
    @pytest.mark.parametrize("held_until", [None, 0.3, END])
    def test_coefficients_are_integrals(self, held_until: float | None) -> None:
        def value(t: float) -> float:
            t = t if held_until is None else max(t, held_until)
            return float(PATHS["smooth"](torch.tensor([t], dtype=torch.float64)))

        found = fejer_coefficients(PATHS["smooth"], START, END, 5, held_until=held_until)
        for n, coefficient in enumerate(found[:, 0].tolist()):
            omega = n * math.pi / LENGTH
            kinks = [0.3] if held_until == 0.3 else None
            total, _ = quad(
                lambda t, omega=omega: value(t) * math.cos(omega * (t - START)),
                *(START, END),
                points=kinks,
                limit=200,
            )
            wanted = (1 - n / 6) * total * (1 if n == 0 else 2) / LENGTH
            assert coefficient == pytest.approx(wanted, abs=1e-9)

    def test_are_convolutions_with_the_kernel(self) -> None:
        nodes, weights = graded_panels(60 * math.pi)
        theta = 2 * math.pi * nodes - math.pi
        for t in (-0.2, 0.9, 2.1):
            s = torch.remainder((t - START) * math.pi / LENGTH - theta + math.pi, 2 * math.pi)
            s = (s - math.pi).abs() * LENGTH / math.pi  # the even extension
            mean = (weights * fejer_kernel(9, theta)) @ PATHS["smooth"](START + s)
            found = fejer_coefficients(PATHS["smooth"], START, END, 9)
            at = torch.tensor([t], dtype=torch.float64)
            torch.testing.assert_close(cosine_sum(found, at)[0], mean, rtol=0, atol=1e-3)

    @pytest.mark.parametrize("name", PATHS)
    def test_converge_uniformly(self, name: str) -> None:
        errors = []
        for order in (8, 16, 32, 64, 128, 256):
            mean = cosine_sum(fejer_coefficients(PATHS[name], START, END, order), GRID)
            errors.append(float((mean - PATHS[name](GRID)).abs().max()))
        assert all(later < earlier for earlier, later in pairwise(errors))
        assert errors[5] < errors[2] / 4  # order 256 against 32; log N / N gives 0.2

    def test_one_order_serves_all_channels(self) -> None:
        together = fejer_coefficients(joined, START, END, 64)
        apart = [fejer_coefficients(path, START, END, 64) for path in PATHS.values()]
        torch.testing.assert_close(together, torch.cat(apart, dim=-1), rtol=1e-10, atol=1e-12)


def test_phase_shift_moves_the_origin() -> None:
    c, s = torch.randn(2, 9, 3, dtype=torch.float64)
    omega = torch.arange(9, dtype=torch.float64) * math.pi / LENGTH
    times = START + LENGTH * torch.rand(200, dtype=torch.float64)

    def waves(c: Tensor, s: Tensor, origin: float) -> Tensor:
        phase = (times[:, None] - origin) * omega
        return phase.cos() @ c + phase.sin() @ s

    for anchor in ANCHORS:
        moved = shift_phase(c, s, omega * (anchor - START))
        torch.testing.assert_close(waves(c, s, START), waves(*moved, anchor), rtol=0, atol=1e-12)


class TestRealise:
    def test_draws_every_trigonometric_polynomial(self) -> None:
        bank = OscillatorBank.on_grid(8, LENGTH)
        c, s = torch.randn(2, 9, 2, dtype=torch.float64)
        states = realise(bank, c, s)
        matrix = torch.zeros(9, 2, 2, dtype=torch.float64)
        matrix[:, 0, 1], matrix[:, 1, 0] = 1.0, -(bank.omega**2)
        for gap in (0.0, 0.3, 2.9):
            flow = torch.matrix_exp(torch.block_diag(*(matrix * gap)))
            drawn = (flow @ states.flatten(0, 1))[::2].sum(dim=0)
            wanted = torch.cos(bank.omega * gap) @ c + torch.sin(bank.omega * gap) @ s
            torch.testing.assert_close(drawn, wanted, rtol=0, atol=1e-11)

    def test_more_modes_than_needed_change_nothing(self) -> None:
        c, s = torch.randn(2, 4, 1, dtype=torch.float64)
        gaps = torch.linspace(0, 2, 11, dtype=torch.float64)
        narrow, wide = (OscillatorBank.on_grid(m, LENGTH) for m in (3, 8))
        drawn = [bank.path(realise(bank, c, s), gaps) for bank in (narrow, wide)]
        torch.testing.assert_close(*drawn, rtol=0, atol=1e-13)

    def test_refuses_a_bank_with_too_few_modes(self) -> None:
        with pytest.raises(ValueError, match=r"as many modes as the polynomial, 3; it has 2"):
            realise(OscillatorBank.on_grid(2, 1.0), torch.zeros(4, 1), torch.zeros(4, 1))


class TestStates:
    @pytest.mark.parametrize("anchor", ANCHORS)
    def test_fejer_states_draw_the_fejer_mean_of_the_held_key(self, anchor: float) -> None:
        bank = OscillatorBank.on_grid(12, LENGTH)
        states = fejer_states(joined, bank, anchor, start=START, end=END)

        def held(t: Tensor) -> Tensor:
            return joined(t.clamp(min=anchor))

        times = torch.linspace(anchor, END, 40, dtype=torch.float64)
        mean = cosine_sum(fejer_coefficients(held, START, END, 12), times)
        # The reference does not cut its rule at the corner.
        found = bank.path(states, times - anchor)
        torch.testing.assert_close(found, mean, rtol=0, atol=3e-4)

    @pytest.mark.parametrize("anchor", ANCHORS)
    def test_least_squares_find_a_path_of_the_bank(self, anchor: float) -> None:
        bank = OscillatorBank.on_grid(5, LENGTH)
        c, s = torch.randn(2, 6, 2, dtype=torch.float64)

        def path(t: Tensor) -> Tensor:
            phase = t[:, None] * bank.omega
            return phase.cos() @ c + phase.sin() @ s

        states = least_squares_states(path, bank, anchor, end=END)
        assert worst(path, bank, states, anchor) < 1e-10

    def test_least_squares_converge_far_faster(self) -> None:
        errors = []
        for num_modes in (4, 8, 16, 32):
            bank = OscillatorBank.on_grid(num_modes, LENGTH)
            fejer = fejer_states(PATHS["smooth"], bank, START, start=START, end=END)
            fitted = least_squares_states(PATHS["smooth"], bank, START, end=END)
            pair = [worst(PATHS["smooth"], bank, z, START) for z in (fejer, fitted)]
            assert pair[1] < pair[0]
            errors.append(pair)
        assert errors[2][1] < 1e-4 < 0.3 < errors[2][0]
        assert errors[3][1] < 1e-10

    def test_least_squares_fit_damped_banks_too(self) -> None:
        bank = OscillatorBank.on_grid(16, LENGTH, gamma=0.3)
        states = least_squares_states(PATHS["smooth"], bank, START, end=END)
        assert worst(PATHS["smooth"], bank, states, START) < 1e-4
