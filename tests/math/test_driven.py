from __future__ import annotations

import math

import pytest
import torch

from osciformer.math.driven import (
    driven_averages,
    driven_integrals,
    driven_response,
    transfer_function,
)
from osciformer.math.oscillator import propagator
from osciformer.math.quadrature import gauss_legendre

DOUBLE = torch.float64

# (drive_omega, omega, zeta)
REGIMES = [
    pytest.param((3.1, 2.0, 0.2), id="under"),
    pytest.param((3.1, 2.0, 1.0), id="critical"),
    pytest.param((3.1, 2.0, 1.0 + 1e-9), id="nearly-critical"),
    pytest.param((3.1, 2.0, 3.0), id="over"),
    pytest.param((3.1, 2.0, 0.0), id="undamped"),
    pytest.param((2.0, 2.0, 0.0), id="undamped-resonance"),
    pytest.param((2.0 + 1e-8, 2.0, 0.0), id="nearly-resonant"),
    pytest.param((2.0, 2.0, 0.1), id="resonance"),
    pytest.param((3.1, 0.0, 0.0), id="free-particle"),
    pytest.param((0.0, 2.0, 0.3), id="constant-force"),
    pytest.param((0.0, 0.0, 0.0), id="constant-force-free"),
    pytest.param((0.01, 0.01, 0.05), id="slow"),
    pytest.param((5.0, 50.0, 10.0), id="stiff"),
]


def tensors(*values, grad=False):
    return [torch.tensor(v, dtype=DOUBLE, requires_grad=grad) for v in values]


def quadrature(function, end):
    """Integrate over [0, end] with 64 nodes on 16 panels."""
    x, w = gauss_legendre(64)
    s = (torch.arange(16, dtype=DOUBLE)[:, None] + x).flatten() * (end / 16)
    return (function(s) * w.repeat(16)).sum() * (end / 16)


@pytest.mark.parametrize("rates", REGIMES)
@pytest.mark.parametrize("part", ["cos", "sin"])
def test_response_solves_the_forced_equation(rates, part):
    drive, omega, zeta = tensors(*rates)
    s = torch.linspace(0.05, 4.0, 9, dtype=DOUBLE, requires_grad=True)
    x = driven_response(s, drive, omega, zeta)[0]
    x = x.real if part == "cos" else x.imag
    (dx,) = torch.autograd.grad(x.sum(), s, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), s)
    force = torch.cos(drive * s) if part == "cos" else torch.sin(drive * s)
    residual = ddx + 2 * zeta * omega * dx + omega**2 * x - force
    # The terms that have to add up are of the order of the force, or of stiffness times rounding.
    assert residual.abs().max() < 1e-10 * max(1.0, rates[1] ** 2 * 0.01)


@pytest.mark.parametrize("rates", REGIMES)
def test_response_starts_from_rest(rates):
    s = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    x, dx = driven_response(s, *tensors(*rates))
    (slope,) = torch.autograd.grad(x.real, s)
    assert x.abs() == 0
    assert dx.abs() == 0
    assert slope == 0


@pytest.mark.parametrize("rates", REGIMES)
def test_velocity_is_the_derivative_of_position(rates):
    s = torch.linspace(0.05, 4.0, 9, dtype=DOUBLE, requires_grad=True)
    x, dx = driven_response(s, *tensors(*rates))
    real = torch.autograd.grad(x.real.sum(), s, retain_graph=True)[0]
    imag = torch.autograd.grad(x.imag.sum(), s)[0]
    torch.testing.assert_close(torch.complex(real, imag), dx, rtol=1e-10, atol=1e-13)


def test_resonant_response_equals_its_elementary_limit():
    s, omega = torch.linspace(0.1, 5.0, 20, dtype=DOUBLE), torch.tensor(1.7, dtype=DOUBLE)
    x, _ = driven_response(s, omega, omega, torch.zeros_like(omega))
    cos = s * torch.sin(omega * s) / (2 * omega)
    sin = (torch.sin(omega * s) - omega * s * torch.cos(omega * s)) / (2 * omega**2)
    torch.testing.assert_close(x, torch.complex(cos, sin), rtol=1e-13, atol=1e-15)


def test_response_is_steady_state_minus_transient():
    s = torch.linspace(0.5, 5.0, 20, dtype=DOUBLE)
    drive, omega, zeta = tensors(3.1, 2.0, 0.2)
    gain = transfer_function(drive, omega=omega, gamma=zeta * omega)
    g11, g12, _, _ = propagator(s, omega, zeta)
    want = gain * (torch.exp(1j * drive * s) - g11 - 1j * drive * g12)
    got, _ = driven_response(s, drive, omega, zeta)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def test_transfer_function_is_infinite_only_at_undamped_resonance():
    omega = torch.tensor(2.0)
    assert torch.isinf(transfer_function(omega, omega=omega, gamma=torch.tensor(0.0)).abs())
    assert transfer_function(omega, omega=omega, gamma=torch.tensor(0.5)) == -0.5j


@pytest.mark.parametrize("rates", REGIMES)
@pytest.mark.parametrize("mode", [0.0, 1.3, -3.1, 2.0], ids=lambda w: f"w={w}")
@pytest.mark.parametrize("delta", [1e-6, 0.3, 6.0], ids=lambda d: f"gap={d}")
def test_average_equals_quadrature_of_the_response(rates, mode, delta):
    drive, omega, zeta = tensors(*rates)
    got = driven_averages(*tensors(delta, mode), drive, omega, zeta)

    def integrand(s):
        return driven_response(s, drive, omega, zeta)[0] * torch.exp(1j * mode * s)

    want = quadrature(integrand, delta) / delta
    assert abs(complex(got - want)) <= 1e-11 * max(abs(complex(want)), 1e-3 * delta**2)


@pytest.mark.parametrize("rates", REGIMES)
def test_integrals_differentiate_to_the_response(rates):
    s = torch.linspace(0.05, 4.0, 9, dtype=DOUBLE, requires_grad=True)
    inputs = tensors(*rates)
    once, twice = driven_integrals(s, *inputs)
    x, _ = driven_response(s, *inputs)
    (slope,) = torch.autograd.grad(once.real.sum(), s, retain_graph=True)
    (slope_twice,) = torch.autograd.grad(twice.real.sum(), s)
    torch.testing.assert_close(slope, x.real, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(slope_twice, once.real, rtol=1e-10, atol=1e-14)


def test_average_equals_the_bidiagonal_exponential():
    delta, mode, drive, omega, zeta = 2.3, 1.1, 1.9, 1.3, 0.4
    gamma = zeta * omega
    sigma = complex(gamma**2 - omega**2) ** 0.5
    p = complex(-gamma, mode)
    nodes = torch.tensor([p + sigma, p - sigma, 1j * (mode + drive), 0.0], dtype=torch.complex128)
    z = torch.diag(nodes) + torch.diag(torch.ones(3, dtype=torch.complex128), 1)
    want = torch.matrix_exp(delta * z)[0, 3] / delta
    got = driven_averages(*tensors(delta, mode, drive, omega, zeta))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_one_call_serves_tiny_and_huge_gaps_alike():
    delta = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 100.0], dtype=DOUBLE)
    rates = tensors(0.4, 2.0, 3.0, 0.3)
    together = driven_averages(delta, *rates)
    alone = torch.stack([driven_averages(d, *rates) for d in delta])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    assert together[1].real / 1e-18 == pytest.approx(1 / 6, rel=1e-8)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param((1.3, 0.7, 3.1, 2.0, 0.3), id="ordinary"),
        pytest.param((1.3, 0.7, 3.1, 2.0, 1.0), id="critical"),
        pytest.param((1.3, 0.7, 3.1, 2.0, 0.0), id="undamped"),
        pytest.param((1.3, 0.7, 2.0, 2.0, 0.0), id="undamped-resonance"),
        pytest.param((1.3, 2.0, 2.0, 2.0, 0.0), id="threefold-resonance"),
        pytest.param((1.3, 2.0, -2.0, 2.0, 0.0), id="opposed-resonance"),
        pytest.param((0.0, 0.7, 3.1, 2.0, 0.3), id="zero-gap"),
        pytest.param((1.3, 0.0, 3.1, 0.0, 0.3), id="zero-frequency"),
        pytest.param((9.0, 0.7, 3.1, 2.0, 4.0), id="overdamped"),
    ],
)
def test_gradcheck(point):
    def everything(delta, mode, drive, omega, zeta):
        results = (
            driven_averages(delta, mode, drive, omega, zeta),
            *driven_response(delta, drive, omega, zeta),
            *driven_integrals(delta, drive, omega, zeta),
        )
        return torch.stack([torch.view_as_real(x) for x in results])

    inputs = tuple(torch.tensor([x], dtype=DOUBLE, requires_grad=True) for x in point)
    assert torch.autograd.gradcheck(everything, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


def test_slow_channels_keep_their_digits():
    # |H| is 1e5 here while the response stays below s^2 / 2: the textbook form loses ten digits.
    s, omega, zeta = tensors(1e-2, 0.01, 0.05)
    x, _ = driven_response(s, omega, omega, zeta)
    assert x.real.item() == pytest.approx(0.5e-4, rel=1e-5)
    average = driven_averages(s, torch.zeros_like(s), omega, omega, zeta)
    assert average.real.item() == pytest.approx(1e-4 / 6, rel=1e-5)
    assert math.isfinite(average.imag.item())
