from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from osciformer.baselines.state_space import (
    DiagonalRecurrence,
    LinearRecurrentUnit,
    LinOSS,
    OscillatoryStateSpace,
    S5Layer,
    SelectiveStateSpace,
    linear_scan,
)

DIM, MODES, ROWS = 3, 4, 11


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def loop(a: Tensor, b: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    state, states = torch.zeros_like(b[:, 0]), []
    for n in range(b.shape[1]):
        state = a[:, n] * state + b[:, n]
        states.append(state)
    return torch.stack(states, dim=1) if states else b


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 256, 300])
def test_the_scan_is_a_loop_with_its_gradients(rows, dtype):
    a = (0.9 * draw(2, rows, 1, dtype=dtype).tanh()).requires_grad_()
    b = draw(2, rows, 3, dtype=dtype).requires_grad_()
    weight, results = draw(2, rows, 3, dtype=dtype), []
    for scan in (linear_scan, loop):
        states = scan(a, b)
        results.append((states, *torch.autograd.grad((states * weight).real.sum(), (a, b))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_scan_of_a_real_factor_and_complex_inputs_has_a_real_gradient():
    a, b = draw(1, 20, 2).tanh().requires_grad_(), draw(1, 20, 2, dtype=torch.complex128)
    grads = [torch.autograd.grad(scan(a, b).abs().sum(), a)[0] for scan in (linear_scan, loop)]
    torch.testing.assert_close(*grads)


def test_the_scan_of_no_rows_is_empty():
    assert linear_scan(torch.ones(2, 0, 3), torch.ones(2, 0, 3)).shape == (2, 0, 3)


def inputs(whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, gaps (the first is 1), and a mask without holes."""
    gaps = torch.randint(1, 4, (1, ROWS)).double() if whole else 0.1 + 2.0 * torch.rand(1, ROWS)
    gaps[:, 0] = 1.0
    return draw(1, ROWS, DIM), gaps.double(), torch.ones(1, ROWS, dtype=torch.bool)


def complex_maps(layer: DiagonalRecurrence) -> tuple[Tensor, Tensor]:
    """Return B `[P, D]` and C `[D, P]` as the paper has them, with y = Re(C h)."""
    enter, leave = layer.enter.weight, layer.leave.weight
    return torch.complex(enter[::2], enter[1::2]), torch.complex(leave[:, ::2], -leave[:, 1::2])


@torch.no_grad()
def test_lru_is_its_recurrence():
    layer, (u, gaps, mask) = LinearRecurrentUnit(DIM, MODES).double(), inputs()
    modulus, angle = torch.exp(-torch.exp(layer.log_decay)), layer.log_angle.exp()
    enter, leave = complex_maps(layer)
    state, wanted = torch.zeros(MODES, dtype=torch.complex128), []
    for row, gap in zip(u[0], gaps[0], strict=True):
        driven = torch.exp(layer.log_gain) * (enter @ row.to(enter.dtype))
        state = torch.polar(modulus**gap, angle * gap) * state + driven
        wanted.append((leave @ state).real + layer.skip * row)
    torch.testing.assert_close(layer(u, gaps, mask)[0][0], torch.stack(wanted))


def test_lru_starts_in_a_ring_and_keeps_the_size_of_noise():
    layer = LinearRecurrentUnit(DIM, 500)
    modulus = layer.rates().exp().abs()
    assert 0.01 <= modulus.min() < modulus.max() <= 0.999
    torch.testing.assert_close(layer.log_gain.exp() ** 2, 1.0 - modulus**2, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_s5_is_a_held_input_through_the_normal_part_of_hippo():
    layer, (u, gaps, mask) = S5Layer(DIM, MODES).double(), inputs()
    layer.log_step.copy_(torch.linspace(-2.0, 0.0, MODES))
    enter, leave = complex_maps(layer)
    wanted = layer.skip * u[0]
    for p, (rate, step) in enumerate(zip(layer.rates(), layer.log_step.exp(), strict=True)):
        # (Re h, Im h, Re w, Im w), where w is what enters, which stands still over the gap.
        flow = torch.zeros(4, 4, dtype=torch.float64)
        flow[:2, :2] = torch.tensor([[rate.real, -rate.imag], [rate.imag, rate.real]])
        flow[:2, 2:] = step * torch.eye(2)
        state = torch.zeros(2, dtype=torch.float64)
        for n in range(ROWS):
            driven = torch.view_as_real(enter[p] @ u[0, n].to(enter.dtype))
            state = (torch.matrix_exp(flow * gaps[0, n]) @ torch.cat((state, driven)))[:2]
            wanted[n] += (leave[:, p] * torch.view_as_complex(state)).real
    torch.testing.assert_close(layer(u, gaps, mask)[0][0], wanted)


@torch.no_grad()
def test_s5_starts_as_a_real_system_with_the_modes_of_hippo():
    layer, size = S5Layer(DIM, MODES).double(), 2 * MODES
    hippo = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            root = ((i + 0.5) * (j + 0.5)) ** 0.5
            hippo[i, j] = -0.5 if i == j else (root if j > i else -root)
    modes = torch.linalg.eigvals(hippo)
    wanted = modes[modes.imag > 0].imag.sort().values
    torch.testing.assert_close(layer.angle, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.log_decay.exp(), torch.full_like(layer.angle, 0.5))
    # An orthonormal change of basis: responses to impulses have the size of random real maps.
    assert 0.3 < float(layer.enter.weight.norm() ** 2 / MODES) < 3.0


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["im", "imex"])
def test_linoss_takes_the_steps_of_its_scheme(scheme):
    layer, (u, gaps, mask) = OscillatoryStateSpace(DIM, MODES, scheme=scheme), inputs(whole=True)
    layer = layer.double()
    stiffness, step = layer.stiffness, layer.raw_step.sigmoid()
    z, x, wanted = torch.zeros_like(step), torch.zeros_like(step), []

    def move(z: Tensor, x: Tensor, driven: Tensor) -> tuple[Tensor, Tensor]:
        if scheme == "imex":
            z = z + step * (driven - stiffness * x)
            return z, x + step * z
        pairs = []
        for p in range(MODES):  # z' = z + s (b - A x'), x' = x + s z'
            s, stiff = float(step[p]), float(stiffness[p])
            system = torch.tensor([[1.0, s * stiff], [-s, 1.0]], dtype=torch.float64)
            right = torch.stack((z[p] + s * driven[p], x[p]))
            pairs.append(torch.linalg.solve(system, right))
        return torch.stack(pairs).unbind(1)

    for row, gap in zip(u[0], gaps[0], strict=True):
        for _ in range(int(gap) - 1):
            z, x = move(z, x, torch.zeros_like(z))
        z, x = move(z, x, layer.enter.weight @ row)
        wanted.append(layer.leave.weight @ x + layer.skip * row)
    found, memory = layer(u, gaps, mask)
    torch.testing.assert_close(found[0], torch.stack(wanted))

    z, x = move(*move(z, x, torch.zeros_like(z)), torch.zeros_like(z))
    read = layer.read(u[:, -1:], torch.tensor([[2.0]]).double(), memory[:, -1:])
    torch.testing.assert_close(read[0, 0], layer.leave.weight @ x + layer.skip * u[0, -1])


def test_linoss_imex_keeps_its_size_whatever_the_gaps():
    layer = OscillatoryStateSpace(DIM, MODES, scheme="imex").double()
    gaps = 100.0 * torch.rand(1, 5000).double()
    u = torch.zeros(1, 5000, DIM).double()
    u[:, 0] = 1.0
    states = layer(u, gaps, torch.ones(1, 5000, dtype=torch.bool))[1].detach()
    torch.testing.assert_close(states[:, -1].abs(), states[:, 0].abs())


@torch.no_grad()
def test_mamba_is_a_convolution_a_selective_recurrence_and_a_gate():
    layer, (u, gaps, mask) = SelectiveStateSpace(DIM, MODES).double(), inputs()
    inner = 2 * DIM
    x, gate = (u[0] @ layer.enter.weight.T).split(inner, dim=1)
    padded = functional.pad(x.T, (3, 0))[None]
    x = functional.conv1d(padded, layer.taps[:, None], layer.bias, groups=inner)[0].T
    x = functional.silu(x)
    state, wanted = torch.zeros(inner, MODES).double(), []
    for n in range(ROWS):
        rank = layer.select(x[n])
        low, enter, leave = rank[: layer.rank], *rank[layer.rank :].chunk(2)
        step = functional.softplus(layer.step(low)) * gaps[0, n]
        for e in range(inner):
            for s in range(MODES):
                a = -layer.log_decay[e, s].exp()
                factor = torch.exp(a * step[e])
                state[e, s] = factor * state[e, s] + (factor - 1.0) / a * enter[s] * x[n, e]
        y = (state @ leave + layer.skip * x[n]) * functional.silu(gate[n])
        wanted.append(layer.leave(y))
    torch.testing.assert_close(layer(u, gaps, mask)[0][0], torch.stack(wanted))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="scheme must be one of 'im', 'imex'; got 'ex'"):
        LinOSS(2, scheme="ex")
