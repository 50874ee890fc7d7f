from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.math.integrals import modulated_averages, phi1
from osciformer.math.quadrature import gauss_legendre

DOUBLE = torch.float64


def quadrature(delta, mode_omega, omega, zeta):
    """64-node Gauss-Legendre on equal panels of about 10 radians; propagator by matrix_exp."""
    x, w = gauss_legendre(64)
    gamma = zeta * omega
    panels = int(max(omega, 2 * gamma, abs(mode_omega)) * delta / 10) + 1
    s = (torch.arange(panels, dtype=DOUBLE)[:, None] + x).flatten() * (delta / panels)
    scale = max(omega, 1e-3)
    a = torch.tensor([[0.0, scale], [-(omega**2) / scale, -2 * gamma]], dtype=DOUBLE)
    row = torch.matrix_exp(a * s[:, None, None])[:, 0]
    turn = torch.exp(1j * mode_omega * s) * w.repeat(panels) / panels
    return (turn * row[:, 0]).sum(), (turn * row[:, 1]).sum() / scale


EDGES = [
    pytest.param(1.3, 2.0, 2.0, 0.0, id="undamped-resonance"),
    pytest.param(1.3, 2.0 + 1e-9, 2.0, 0.0, id="nearly-resonant"),
    pytest.param(40.0, 2.0, 2.0, 1e-4, id="weakly-damped-resonance-long"),
    pytest.param(1.3, 0.7, 2.0, 1.0, id="critical"),
    pytest.param(9.0, 0.7, 2.0, 1.0, id="critical-long"),
    pytest.param(9.0, 0.7, 2.0, 1.0 - 1e-12, id="just-under"),
    pytest.param(9.0, 0.7, 2.0, 1.0 + 1e-12, id="just-over"),
    pytest.param(1.3, 0.0, 2.0, 0.3, id="constant-weight"),
    pytest.param(1.3, 0.7, 0.0, 0.3, id="free-particle"),
    pytest.param(1.3, 0.0, 0.0, 0.0, id="all-zero-rates"),
    pytest.param(1e-8, 0.7, 2.0, 0.3, id="tiny-gap"),
    pytest.param(1e3, 0.7, 0.2, 0.3, id="huge-gap"),
    pytest.param(1.0, 3.0, 200.0, 20.0, id="stiff"),
    pytest.param(10.0, 100.0, 200.0, 0.01, id="fast"),
    pytest.param(3.0, -2.0, 2.0, 0.05, id="negative-frequency"),
    pytest.param(1.0, 0.01, 0.001, 20.0, id="slow-overdamped"),
]


@pytest.mark.parametrize(("delta", "mode_omega", "omega", "zeta"), EDGES)
def test_kernels_equal_quadrature_at_edges(delta, mode_omega, omega, zeta):
    got = modulated_averages(*torch.tensor([delta, mode_omega, omega, zeta], dtype=DOUBLE))
    want = quadrature(delta, mode_omega, omega, zeta)
    # G12 is at most of the order of the gap or of 1 / omega, whichever is smaller.
    scales = (1.0, min(delta, 1.0 / omega if omega else delta))
    for g, reference, scale in zip(got, want, scales, strict=True):
        assert abs(complex(g) - complex(reference)) <= 2e-12 * scale


def test_kernels_equal_quadrature_on_random_points():
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        u = torch.rand(4, generator=generator, dtype=DOUBLE)
        point = (10 ** (4 * u[0] - 3), 10 ** (3 * u[1] - 2), 10 ** (3 * u[2] - 2), 3 * u[3])
        got = modulated_averages(*point)
        want = quadrature(*(float(x) for x in point))
        assert abs(complex(got[0]) - complex(want[0])) < 1e-12
        assert abs(complex(got[1]) - complex(want[1])) < 1e-12 * float(point[0])


def test_undamped_kernels_equal_the_printed_integrals():
    delta, w, omega = (torch.tensor(x, dtype=DOUBLE) for x in (1.7, 3.1, 1.2))
    g11, g12 = modulated_averages(delta, w, omega, torch.zeros_like(delta))
    minus, plus = (omega - w) * delta, (omega + w) * delta
    cos_cos = (torch.sin(minus) / minus + torch.sin(plus) / plus) / 2
    sin_sin = (torch.sin(minus) / minus - torch.sin(plus) / plus) / 2
    torch.testing.assert_close(g11.real, cos_cos, rtol=1e-13, atol=0)
    torch.testing.assert_close(g12.imag * omega, sin_sin, rtol=1e-13, atol=0)


def test_zero_gap_is_the_initial_state():
    zero = torch.zeros(3, dtype=DOUBLE)
    g11, g12 = modulated_averages(
        zero,
        torch.tensor([0.0, 3.0, 200.0], dtype=DOUBLE),
        torch.tensor([0.0, 3.0, 200.0], dtype=DOUBLE),
        torch.tensor([0.0, 1.0, 20.0], dtype=DOUBLE),
    )
    assert torch.equal(g11, torch.ones_like(g11))
    assert torch.equal(g12, torch.zeros_like(g12))


def wide_grid(dtype):
    delta = [0.0, 1e-8, 1e-3, 0.1, 1.0, 10.0]
    omega = [0.0, 1e-3, 0.1, 1.0, 7.0, 200.0]
    zeta = [0.0, 1e-4, 0.3, 0.99, 1.0, 1.01, 2.0, 20.0]
    mode = [0.0, 0.01, 1.0, 7.0, 7.001]
    grid = torch.tensor(list(itertools.product(delta, mode, omega, zeta)), dtype=DOUBLE)
    return [x.contiguous() for x in grid.to(dtype).T]


def test_float32_agrees_with_float64():
    single = wide_grid(torch.float32)
    delta, mode, omega, zeta = (x.double() for x in single)
    for g, want, scale in zip(
        modulated_averages(*single),
        modulated_averages(delta, mode, omega, zeta),
        (torch.ones_like(delta), delta.clamp(min=1e-30)),
        strict=True,
    ):
        # Rounding of the phase itself, a part in 2^24 of omega * delta, is not the kernel's fault.
        allowed = 1e-6 + 1e-7 * (omega + mode) * delta
        assert ((g - want).abs() / scale <= allowed.clamp(max=1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_finite_everywhere(dtype):
    inputs = [x.requires_grad_() for x in wide_grid(dtype)]
    g11, g12 = modulated_averages(*inputs)
    loss = (g11.real + g11.imag + g12.real + g12.imag).sum()
    for grad in (g11, g12, *torch.autograd.grad(loss, inputs)):
        assert torch.isfinite(torch.view_as_real(grad) if grad.is_complex() else grad).all()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param((1.3, 0.7, 2.0, 0.3), id="ordinary"),
        pytest.param((1.3, 0.7, 2.0, 1.0), id="critical"),
        pytest.param((0.2, 0.7, 2.0, 1.0), id="critical-short"),
        pytest.param((9.0, 0.7, 2.0, 1.0), id="critical-long"),
        pytest.param((9.0, 0.7, 2.0, 2.5), id="overdamped"),
        pytest.param((1.3, 0.7, 2.0, 0.0), id="undamped"),
        pytest.param((1.3, 2.0, 2.0, 0.0), id="undamped-resonance"),
        pytest.param((1.3, 2.0, 2.0, 0.2), id="resonance"),
        pytest.param((0.0, 0.7, 2.0, 0.3), id="zero-gap"),
        pytest.param((1.3, 0.0, 2.0, 0.3), id="constant-weight"),
        pytest.param((1.3, 0.7, 0.0, 0.3), id="zero-frequency"),
        pytest.param((60.0, 0.1, 20.0, 3.0), id="huge-decay"),
    ],
)
def test_gradcheck(point):
    inputs = tuple(torch.tensor([x], dtype=DOUBLE, requires_grad=True) for x in point)

    def kernels(*args):
        return tuple(torch.view_as_real(g) for g in modulated_averages(*args))

    # Central differences reach to either side of zero: the kernels are entire, so they may.
    assert torch.autograd.gradcheck(kernels, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


def test_damping_gradient_is_continuous_through_critical():
    delta, w, omega = (torch.tensor(x, dtype=DOUBLE) for x in (1.3, 0.7, 2.0))
    slopes = []
    for zeta in (1 - 1e-9, 1.0, 1 + 1e-9):
        z = torch.tensor(zeta, dtype=DOUBLE, requires_grad=True)
        _, g12 = modulated_averages(delta, w, omega, z)
        slopes.append(torch.autograd.grad(g12.real, z)[0].item())
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-7)
    assert slopes[2] == pytest.approx(slopes[1], rel=1e-7)


rate = st.floats(1e-3, 200.0)


@given(
    delta=st.floats(0.0, 10.0),
    mode=st.floats(-30.0, 30.0),
    omega=rate,
    zeta=st.one_of(st.floats(0.0, 20.0), st.floats(0.999, 1.001)),
)
def test_kernels_are_averages_of_a_bounded_motion(delta, mode, omega, zeta):
    g11, g12 = modulated_averages(*torch.tensor([delta, mode, omega, zeta], dtype=DOUBLE))
    assert abs(complex(g11)) <= 1 + 1e-12  # |g11| <= 1
    assert abs(complex(g12)) <= min(delta / 2, 1 / omega) * (1 + 1e-9)  # |g12| <= s, 1 / omega


@given(st.floats(-50.0, 0.0), st.floats(-50.0, 50.0))
def test_phi1_solves_its_equation(real, imag):
    z = torch.tensor(complex(real, imag), dtype=torch.complex128)
    assert abs(complex(z * phi1(z) - torch.exp(z) + 1)) <= 1e-13 * (1 + abs(z))
