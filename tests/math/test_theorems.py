"""The statements of the paper's Harmonic Approximation Theorem, as measurements.

Trajectories come from `torch.matrix_exp` and integrals from Gauss-Legendre rules, so nothing here
depends on the closed forms of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from osciformer.math.banks import frequency_bank
from osciformer.math.quadrature import graded_panels

START, END = -0.5, 2.5
LENGTH = END - START
PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "line": lambda t: t,
    "corner": lambda t: (t - 0.9).abs(),
    "smooth": lambda t: t.exp() * torch.sin(5 * t),
}
KEY_TIMES = torch.tensor([-0.5, -0.1, 0.45, 1.2, 2.3], dtype=torch.float64)
MODES = [4, 16, 64]


def fejer_kernel(order: int, theta: Tensor) -> Tensor:
    """The closed form of the kernel, for theta away from multiples of 2 pi."""
    ratio = torch.sin((order + 1) * theta / 2) / torch.sin(theta / 2)
    return ratio**2 / (order + 1)


def fejer_sum(order: int, theta: Tensor) -> Tensor:
    """The Fourier form of the kernel."""
    k = torch.arange(1, order + 1, dtype=torch.float64)
    return 1 + 2 * (torch.cos(theta[..., None] * k) @ (1 - k / (order + 1)))


def cosine_coefficients(path: Callable[[Tensor], Tensor], order: int, kink: float) -> Tensor:
    """Return c_0..c_order of the Fejer mean of the even 2L-periodic extension of a path.

    The rule is cut at `kink` (a time), where the path may have a corner.
    """
    nodes, weights = graded_panels(order * math.pi)
    times = torch.cat((START + (kink - START) * nodes, kink + (END - kink) * nodes))
    weights = torch.cat(((kink - START) * weights, (END - kink) * weights))
    n = torch.arange(order + 1, dtype=torch.float64)
    waves = torch.cos(n[:, None] * math.pi / LENGTH * (times - START))
    values = path(times)  # [nodes] or [nodes, channels]
    coefficients = torch.einsum("nk,k,k...->n...", waves, weights, values) * (2 / LENGTH)
    coefficients[0] /= 2
    shrink = 1 - n / (order + 1)
    return coefficients * shrink.reshape(-1, *[1] * (values.ndim - 1))


def cosine_sum(coefficients: Tensor, times: Tensor) -> Tensor:
    n = torch.arange(len(coefficients), dtype=torch.float64)
    return torch.cos((times[:, None] - START) * n * math.pi / LENGTH) @ coefficients


def bank_blocks(gamma: Tensor) -> Tensor:
    """Return the 2x2 diagonal blocks of A for modes 0..M with the given decay rates [M + 1]."""
    grid = frequency_bank("harmonics", len(gamma) - 1, length=LENGTH)
    omega = torch.cat((torch.zeros(1, dtype=torch.float64), grid))
    blocks = torch.zeros(len(gamma), 2, 2, dtype=torch.float64)
    blocks[:, 0, 1] = 1.0
    blocks[:, 1, 0] = -(omega**2)
    blocks[:, 1, 1] = -2 * gamma
    return blocks


def bank_flow(gamma: Tensor, gaps: Tensor) -> Tensor:
    """Return the blocks [T, M + 1, 2, 2] of exp(A s)."""
    return torch.matrix_exp(bank_blocks(gamma) * gaps[:, None, None, None])


def bank_path(gamma: Tensor, states: Tensor, gaps: Tensor) -> Tensor:
    """Return C exp(A s) z for gaps [T] and states [M + 1, 2, d]: positions added over modes."""
    return torch.einsum("tnx,nxd->td", bank_flow(gamma, gaps)[..., 0, :], states)


def shifted(coefficients: Tensor, anchor: float) -> tuple[Tensor, Tensor]:
    """Return the coefficients about `anchor` of a cosine sum about START: the phase shift."""
    n = torch.arange(len(coefficients), dtype=torch.float64)
    phase = (n * math.pi / LENGTH * (anchor - START))[:, None]
    return phase.cos() * coefficients, -phase.sin() * coefficients


def initial_state(coefficients: Tensor, anchor: float) -> Tensor:
    """Return the bank state at `anchor` that realises a cosine sum exactly (no damping)."""
    cos, sin = shifted(coefficients, anchor)
    omega = torch.arange(len(cos), dtype=torch.float64)[:, None] * math.pi / LENGTH
    return torch.stack((cos, omega * sin), dim=1)  # position and velocity of each mode


class TestFejerKernel:
    @pytest.mark.parametrize("order", [0, 1, 7, 40])
    def test_both_forms_agree_and_are_not_negative(self, order: int) -> None:
        theta = torch.linspace(-math.pi, math.pi, 2000, dtype=torch.float64)  # even: never 0
        kernel = fejer_kernel(order, theta)
        torch.testing.assert_close(kernel, fejer_sum(order, theta), rtol=1e-9, atol=1e-10)
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


class TestUniformConvergence:
    @pytest.mark.parametrize("name", PATHS)
    def test_fejer_means_converge_uniformly_on_the_half_range_grid(self, name: str) -> None:
        times = torch.linspace(START, END, 1501, dtype=torch.float64)
        errors = []
        for order in (8, 16, 32, 64, 128, 256):
            mean = cosine_sum(cosine_coefficients(PATHS[name], order, kink=0.9), times)
            errors.append(float((mean - PATHS[name](times)).abs().max()))
        assert all(later < earlier for earlier, later in pairwise(errors))
        assert errors[5] < errors[2] / 4  # order 256 against 32; log N / N gives 0.2

    def test_one_order_serves_all_coordinates_of_a_vector_path(self) -> None:
        def path(t: Tensor) -> Tensor:
            return torch.stack([f(t) for f in PATHS.values()], dim=-1)

        times = torch.linspace(START, END, 1501, dtype=torch.float64)
        coefficients = cosine_coefficients(path, 64, kink=0.9)
        error = (cosine_sum(coefficients, times) - path(times)).abs().amax(0)
        joint = (cosine_sum(coefficients, times) - path(times)).norm(dim=-1).max()
        assert error.max() <= joint <= math.sqrt(3) * error.max()
        for index, single in enumerate(PATHS.values()):
            torch.testing.assert_close(
                coefficients[:, index],
                cosine_coefficients(single, 64, kink=0.9),
                rtol=1e-10,
                atol=1e-12,
            )


def test_phase_shift_moves_the_origin_of_a_pair() -> None:
    generator = torch.Generator().manual_seed(1)
    c, s = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    omega = frequency_bank("harmonics", 9, length=LENGTH)[:, None]
    times = START + LENGTH * torch.rand(200, 1, 1, generator=generator, dtype=torch.float64)
    for anchor in KEY_TIMES.tolist():
        phi = omega * (anchor - START)
        moved_c, moved_s = phi.cos() * c + phi.sin() * s, -phi.sin() * c + phi.cos() * s
        about_start = c * torch.cos(omega * (times - START)) + s * torch.sin(
            omega * (times - START)
        )
        about_anchor = moved_c * torch.cos(omega * (times - anchor)) + moved_s * torch.sin(
            omega * (times - anchor)
        )
        torch.testing.assert_close(about_start, about_anchor, rtol=0, atol=1e-12)


class TestRealizability:
    @pytest.mark.parametrize("anchor", KEY_TIMES.tolist())
    def test_undamped_bank_draws_every_trigonometric_polynomial(self, anchor: float) -> None:
        generator = torch.Generator().manual_seed(2)
        coefficients = torch.randn(9, 2, generator=generator, dtype=torch.float64)
        times = torch.linspace(anchor, END, 40, dtype=torch.float64)
        state = initial_state(coefficients, anchor)
        path = bank_path(torch.zeros(9), state, times - anchor)
        torch.testing.assert_close(path, cosine_sum(coefficients, times), rtol=0, atol=1e-11)
        # The same from the one large matrix of the definition and its readout C.
        matrix = torch.block_diag(*bank_blocks(torch.zeros(9)))
        flow = torch.matrix_exp(matrix * (times - anchor)[:, None, None])
        whole = (flow @ state.flatten(0, 1))[:, ::2].sum(1)
        torch.testing.assert_close(path, whole, rtol=0, atol=1e-11)

    def test_more_modes_than_needed_change_nothing(self) -> None:
        coefficients = torch.zeros(9, 1, dtype=torch.float64)
        coefficients[:4, 0] = torch.tensor([1.0, -2.0, 0.5, 3.0])
        gaps = torch.linspace(0, 2, 11, dtype=torch.float64)
        wide = bank_path(torch.zeros(9), initial_state(coefficients, 0.2), gaps)
        narrow = bank_path(torch.zeros(4), initial_state(coefficients[:4], 0.2), gaps)
        torch.testing.assert_close(wide, narrow, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0, 200.0])
    def test_zero_mode_at_rest_stays_for_any_decay_rate(self, gamma: float) -> None:
        gaps = torch.linspace(0, 3, 13, dtype=torch.float64)
        flow = torch.matrix_exp(
            torch.tensor([[0.0, 1.0], [0.0, -2 * gamma]], dtype=torch.float64) * gaps[:, None, None]
        )
        torch.testing.assert_close(flow[:, 0, 0], torch.ones_like(gaps), rtol=0, atol=1e-13)
        # With a velocity it saturates; the straight line of the paper's remark is gamma = 0.
        drift = gaps if gamma == 0 else -torch.expm1(-2 * gamma * gaps) / (2 * gamma)
        torch.testing.assert_close(flow[:, 0, 1], drift, rtol=1e-11, atol=1e-13)


GAPS = torch.linspace(0, LENGTH, 61, dtype=torch.float64)


def perturbation_constant(num_modes: int, bound: float) -> float:
    """Return K = 2 |C| M_bound M_0 T with the suprema taken over a grid of times and rates."""

    def largest(rate: float) -> float:
        # The norm of a block-diagonal matrix is the largest norm of a block.
        flow = bank_flow(torch.full((num_modes + 1,), rate, dtype=torch.float64), GAPS)
        return float(torch.linalg.matrix_norm(flow, ord=2).max())

    damped = max(largest(bound * share) for share in (0.0, 0.5, 1.0))
    return 2 * math.sqrt(num_modes + 1) * damped * largest(0.0) * LENGTH


class TestPerturbation:
    NUM_MODES = 8

    def slope(self, gamma: Tensor) -> float:
        moved = bank_flow(gamma, GAPS) - bank_flow(torch.zeros_like(gamma), GAPS)
        readout = moved[..., 0, :].flatten(1)  # C adds the positions: one row of all blocks
        return float(readout.norm(dim=-1).max() / gamma.max())

    @pytest.mark.parametrize("bound", [1e-1, 1e-2, 1e-4])
    def test_readout_moves_at_most_linearly_in_the_damping(self, bound: float) -> None:
        constant = perturbation_constant(self.NUM_MODES, bound)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            draw = torch.rand(self.NUM_MODES + 1, generator=generator, dtype=torch.float64)
            assert self.slope(bound * draw) <= constant
        assert self.slope(torch.full((self.NUM_MODES + 1,), bound, dtype=torch.float64)) <= constant

    def test_slope_has_a_limit_at_zero_damping(self) -> None:
        slopes = [
            self.slope(torch.full((self.NUM_MODES + 1,), g, dtype=torch.float64))
            for g in (1e-3, 1e-4, 1e-5)
        ]
        assert slopes[2] == pytest.approx(slopes[1], rel=1e-3)
        assert slopes[1] == pytest.approx(slopes[0], rel=1e-2)
        assert slopes[2] > 1.0  # damping does move the readout: the bound is not about nothing


class TestSoftmax:
    @pytest.mark.parametrize("size", [2, 3, 17])
    @pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
    def test_weights_move_at_most_as_far_as_the_worst_logit(self, size: int, spread: float) -> None:
        generator = torch.Generator().manual_seed(4)
        x, y = spread * torch.randn(2, 5000, size, generator=generator, dtype=torch.float64)
        for other in (y, x + 1e-3 * y):
            moved = (x.softmax(-1) - other.softmax(-1)).abs().sum(-1)
            assert (moved <= (x - other).abs().amax(-1) * (1 + 1e-12)).all()

    def test_constant_one_is_reached_at_equal_weights(self) -> None:
        step = 1e-4
        x = torch.tensor([step, -step], dtype=torch.float64)
        moved = (x.softmax(-1) - torch.zeros_like(x).softmax(-1)).abs().sum()
        assert float(moved / step) == pytest.approx(1.0, abs=1e-7)


CHANNELS = 3


def query(t: Tensor) -> Tensor:
    return torch.stack((torch.cos(3 * t), 1 - t, 0.5 * torch.sin(7 * t)), dim=-1)


def key(index: int) -> Callable[[Tensor], Tensor]:
    """Return a continuous key on [t_i, END], held constant before t_i as in the proof."""
    anchor = float(KEY_TIMES[index])

    def path(t: Tensor) -> Tensor:
        s = (t - anchor).clamp(min=0.0)
        return torch.stack(
            (
                (index + 1) * torch.exp(-s) * torch.cos(4 * s),
                (s - 0.3).abs() - 0.2 * index,
                torch.sin(s * s + index),
            ),
            dim=-1,
        )

    return path


def logits(q: Callable[[Tensor], Tensor], keys: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Return alpha[j, i] of the definition by quadrature, -inf where t_i > t_j."""
    # 16 nodes over two turns of the fastest mode are good to 1e-10.
    nodes, weights = graded_panels(MODES[-1] * math.pi, phase_per_panel=4 * math.pi)
    n = len(KEY_TIMES)
    alpha = torch.full((n, n), -torch.inf, dtype=torch.float64)
    for j in range(n):
        for i in range(j + 1):
            # Also right for i = j: every node is then t_i.
            tau = KEY_TIMES[i] + (KEY_TIMES[j] - KEY_TIMES[i]) * nodes
            alpha[j, i] = (weights * (q(tau) * keys[i](tau)).sum(-1)).sum()
    return alpha


def bank_keys(num_modes: int, gamma: float = 0.0) -> list[Callable[[Tensor], Tensor]]:
    """Return the keys of the shared bank, started from Fejer coefficients of the true keys."""
    rates = torch.full((num_modes + 1,), gamma, dtype=torch.float64)

    def realised(index: int) -> Callable[[Tensor], Tensor]:
        anchor = float(KEY_TIMES[index])
        state = initial_state(
            cosine_coefficients(key(index), num_modes, kink=min(anchor + 1e-9, END)), anchor
        )
        return lambda t: bank_path(rates, state, t - anchor)

    return [realised(i) for i in range(len(KEY_TIMES))]


def sup_error(
    index: int, one: Callable[[Tensor], Tensor], two: Callable[[Tensor], Tensor]
) -> float:
    times = torch.linspace(float(KEY_TIMES[index]), END, 161, dtype=torch.float64)
    return float((one(times) - two(times)).norm(dim=-1).max())


def sup_norm(path: Callable[[Tensor], Tensor], start: float = START) -> float:
    times = torch.linspace(start, END, 2001, dtype=torch.float64)
    return float(path(times).norm(dim=-1).max())


KEYS = [key(i) for i in range(len(KEY_TIMES))]
VISIBLE = torch.ones(len(KEY_TIMES), len(KEY_TIMES)).tril().bool()


def softmax_weights(alpha: Tensor) -> Tensor:
    return (alpha / math.sqrt(CHANNELS)).softmax(-1)


class TestTheorem:
    def test_both_inequalities_hold_for_every_pair_and_the_error_vanishes(self) -> None:
        alpha = logits(query, KEYS)
        errors = []
        for num_modes in MODES:
            approximate = bank_keys(num_modes)
            epsilon = max(sup_error(i, KEYS[i], approximate[i]) for i in range(len(KEY_TIMES)))
            alpha_bank = logits(query, approximate)
            bound = sup_norm(query) * epsilon
            assert ((alpha - alpha_bank)[VISIBLE].abs() <= bound).all()
            moved = (softmax_weights(alpha) - softmax_weights(alpha_bank)).abs().sum(-1)
            assert (moved <= bound / math.sqrt(CHANNELS)).all()
            assert (alpha - alpha_bank)[VISIBLE].abs().max() > 1e-3 * bound
            errors.append(epsilon)
        # The held start puts a corner into every key, so the rate is log M / M.
        many = bank_keys(512)
        errors.append(max(sup_error(i, KEYS[i], many[i]) for i in range(len(KEY_TIMES))))
        assert errors[0] > errors[1] > errors[2] > errors[3]
        assert errors[3] < errors[2] / 4

    @pytest.mark.parametrize("gamma", [1e-3, 5e-4])
    def test_small_damping_keeps_the_approximation(self, gamma: float) -> None:
        num_modes = 16
        constant = perturbation_constant(num_modes, gamma)
        free, damped = bank_keys(num_modes), bank_keys(num_modes, gamma)
        largest = max(
            float(
                initial_state(
                    cosine_coefficients(KEYS[i], num_modes, kink=float(KEY_TIMES[i]) + 1e-9),
                    float(KEY_TIMES[i]),
                ).norm()
            )
            for i in range(len(KEY_TIMES))
        )
        epsilon = 0.0
        for i in range(len(KEY_TIMES)):
            fit = sup_error(i, KEYS[i], free[i])
            total = sup_error(i, KEYS[i], damped[i])
            assert total <= fit + constant * gamma * largest
            epsilon = max(epsilon, total)
        moved = softmax_weights(logits(query, damped)) - softmax_weights(logits(query, KEYS))
        assert (moved.abs().sum(-1) <= sup_norm(query) * epsilon / math.sqrt(CHANNELS)).all()

    def test_halving_the_damping_halves_its_effect(self) -> None:
        free = bank_keys(16)
        effect = [
            max(sup_error(i, free[i], bank_keys(16, gamma)[i]) for i in range(len(KEY_TIMES)))
            for gamma in (1e-3, 5e-4)
        ]
        assert effect[1] / effect[0] == pytest.approx(0.5, rel=0.02)

    @pytest.mark.parametrize("num_modes", MODES)
    def test_approximate_query_and_keys_obey_the_joint_bound(self, num_modes: int) -> None:
        coefficients = cosine_coefficients(query, num_modes, kink=0.9)

        def approximate_query(t: Tensor) -> Tensor:
            return cosine_sum(coefficients, t)

        approximate = bank_keys(num_modes)
        times = torch.linspace(START, END, 2001, dtype=torch.float64)
        error_q = float((query(times) - approximate_query(times)).norm(dim=-1).max())
        alpha, alpha_bank = logits(query, KEYS), logits(approximate_query, approximate)
        for i in range(len(KEY_TIMES)):
            error_k = sup_error(i, KEYS[i], approximate[i])
            size_k = sup_norm(KEYS[i], float(KEY_TIMES[i]))
            bound = sup_norm(query) * error_k + (size_k + error_k) * error_q
            assert ((alpha - alpha_bank)[i:, i].abs() <= bound).all()
