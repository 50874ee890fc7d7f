from __future__ import annotations

import math

import mpmath as mp
import pytest
import torch

from osciformer.math.oscillator import (
    SERIES_RADIUS,
    fastest_rate,
    iterated_integrals,
    moments,
    propagator,
)

DOUBLE = torch.float64
EPS = torch.finfo(DOUBLE).eps
# zeta at which the overdamped branch with two separate rates takes over: 1 / sqrt(1 - 0.1).
SPLIT_ZETA = 1.0 / math.sqrt(0.9)
ZETAS = [0.0, 1e-9, 0.2, 1 - 1e-12, 1.0, 1 + 1e-12, 1.02, SPLIT_ZETA, 1.06, 3.0, 20.0]


def tensor(data):
    return torch.tensor(data, dtype=DOUBLE)


def exact(s, omega, zeta, count):
    """g12 and its iterated integrals with 60 digits, by the exponential of an extended matrix."""
    with mp.workdps(60):
        s, omega, zeta = (mp.mpf(x) for x in (s, omega, zeta))
        size = 2 + count - 1
        a = mp.zeros(size)
        a[0, 1], a[1, 0], a[1, 1] = 1, -(omega**2), -2 * zeta * omega
        for n in range(2, size):
            a[n, 0 if n == 2 else n - 1] = 1
        e = mp.expm(a * s)
        return [float(e[n, 1]) for n in [0, *range(2, size)]]


def matrix_exponential(s, omega, zeta):
    a = torch.stack(
        [torch.zeros_like(omega), torch.ones_like(omega), -(omega**2), -2 * zeta * omega], dim=-1
    )
    return torch.matrix_exp((a * s.unsqueeze(-1)).unflatten(-1, (2, 2)))


def as_matrix(s, omega, zeta):
    return torch.stack(propagator(s, omega, zeta), dim=-1).unflatten(-1, (2, 2))


@pytest.mark.parametrize("zeta", ZETAS, ids=lambda z: f"zeta={z:.12g}")
@pytest.mark.parametrize("omega", [0.0, 1e-3, 0.7, 2.0])
def test_propagator_equals_the_matrix_exponential(omega, zeta):
    s = tensor([0.0, 1e-9, 1e-3, 0.2, 0.26, 1.0, 5.0])
    rates = (torch.full_like(s, omega), torch.full_like(s, zeta))
    want = matrix_exponential(s, *rates)
    scale = want.abs().amax((-2, -1), keepdim=True)
    assert ((as_matrix(s, *rates) - want).abs() / scale).max() < 1e-12


@pytest.mark.parametrize("zeta", [0.5, 1.0, 1.05, 2.0])
def test_propagator_after_two_hundred_decay_times(zeta):
    omega = 40.0
    s = 200.0 / (zeta * omega)
    got = [g.item() for g in propagator(tensor(s), tensor(omega), tensor(zeta))]
    with mp.workdps(120):
        a = mp.matrix([[0, 1], [-(mp.mpf(omega) ** 2), -2 * mp.mpf(zeta) * omega]]) * mp.mpf(s)
        want = [float(x) for x in mp.expm(a)]
    scales = [1.0, 1.0 / omega, omega, 1.0]
    assert all(math.isfinite(g) for g in got)
    for value, expected, scale in zip(got, want, scales, strict=True):
        assert abs(value - expected) <= 1e-13 * scale


@pytest.mark.parametrize("zeta", ZETAS, ids=lambda z: f"zeta={z:.12g}")
def test_propagators_compose(zeta):
    omega = tensor([0.0, 1e-3, 2.0, 30.0])
    zeta = torch.full_like(omega, zeta)
    a, b = tensor(0.03), tensor(0.4)
    whole = as_matrix(a + b, omega, zeta)
    parts = as_matrix(a, omega, zeta) @ as_matrix(b, omega, zeta)
    balance = torch.stack(
        [
            torch.ones_like(omega),
            omega.clamp(min=1),
            1 / omega.clamp(min=1),
            torch.ones_like(omega),
        ],
        dim=-1,
    ).unflatten(-1, (2, 2))
    assert ((whole - parts) * balance).abs().max() < 1e-12


@pytest.mark.parametrize("zeta", ZETAS, ids=lambda z: f"zeta={z:.12g}")
def test_determinant_decays_with_twice_gamma(zeta):
    s, omega = tensor([1e-6, 0.1, 0.3, 0.8])[:, None], tensor([0.0, 0.5, 3.0])
    zeta = torch.full_like(omega, zeta)
    g11, g12, g21, g22 = propagator(s, omega, zeta)
    # The products cancel where the slow rate has hardly decayed.
    size = (g11 * g22).abs() + (g12 * g21).abs()
    error = (g11 * g22 - g12 * g21 - torch.exp(-2 * zeta * omega * s)).abs()
    assert (error <= 1e-13 * (1.0 + size)).all()


@pytest.mark.parametrize(
    "zeta", [0.0, 0.1, 1.0, 1.02, SPLIT_ZETA, 20.0], ids=lambda z: f"zeta={z:.6g}"
)
@pytest.mark.parametrize("omega", [0.0, 1e-3, 1.0, 200.0])
@pytest.mark.parametrize("s", [1e-9, 1e-4, 0.02, 1.0, 10.0])
def test_moments_are_accurate_to_about_machine_precision(s, omega, zeta):
    got = moments(*(tensor(x) for x in (s, omega, zeta)))
    want = exact(s, omega, zeta, 4)
    rate = max(fastest_rate(tensor(omega), tensor(zeta)).item(), 1e-300)
    # g12 passes through zero; each moment is judged against its size before cancellation.
    sizes = [min(s, 1.0 / rate), min(s, 1.0 / rate) ** 2 / 2, 0.0, 0.0]
    for name, value, expected, size in zip(got._fields, got, want, sizes, strict=True):
        # A phase of omega * s loses that many digits by itself.
        slack = 100 * EPS * (1 + rate * s * (zeta < 1))
        assert abs(value.item() - expected) <= slack * max(abs(expected), size), name


@pytest.mark.parametrize("power", range(4), ids=["g12", "i12", "k12", "l12"])
def test_moments_of_a_tiny_gap_keep_relative_accuracy(power):
    s = 1e-9
    value = moments(tensor(s), tensor(2.0), tensor(0.3))[power].item()
    assert value == pytest.approx(exact(s, 2.0, 0.3, 4)[power], rel=4 * EPS)
    assert value == pytest.approx(s ** (power + 1) / math.factorial(power + 1), rel=1e-8)


@pytest.mark.parametrize("s", [0.1, 0.7])
@pytest.mark.parametrize("zeta", [0.0, 0.4, 1.0, 5.0])
def test_moments_equal_quadrature_of_each_other(s, zeta):
    """Each moment is the integral of the one before it, by mpmath's quadrature of the function."""
    omega = 3.0

    def moment(power):
        return lambda x: moments(tensor(float(x)), tensor(omega), tensor(zeta))[power].item()

    for power in range(3):
        want = mp.quad(moment(power), [0, s / 2, s])
        assert moment(power + 1)(s) == pytest.approx(float(want), rel=1e-12)


def test_identities_link_moments_and_propagator():
    s = torch.logspace(-6, 1, 50, dtype=DOUBLE)[:, None]
    omega, zeta = tensor([0.5, 2.0, 2.0, 9.0]), tensor([0.0, 0.3, 1.0, 4.0])
    g11, g12, g21, g22 = propagator(s, omega, zeta)
    m = moments(s, omega, zeta)
    torch.testing.assert_close(g11 - 1.0, -(omega**2) * m.i12, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(g12, m.g12, rtol=0, atol=0)
    torch.testing.assert_close(g21, -(omega**2) * g12)
    torch.testing.assert_close(g22, g11 - 2 * zeta * omega * g12, rtol=1e-12, atol=1e-14)
    back = s - 2 * zeta * omega * m.i12 - omega**2 * m.k12
    torch.testing.assert_close(g12, back, rtol=1e-10, atol=1e-12)


def test_float32_and_float64_agree():
    s = torch.logspace(-9, 0.7, 60, dtype=DOUBLE)[:, None].float()
    omega, zeta = tensor([1e-3, 0.7, 2.0, 3.0, 8.0]).float(), tensor([0.2, 0, 1, 1.05, 20]).float()
    single = moments(s, omega, zeta)
    double = moments(s.double(), omega.double(), zeta.double())
    for a, b in zip(single, double, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("s", [0.0, 1e-9, 0.01, 0.03])
def test_iterated_integrals_equal_those_of_high_precision(s, zeta):
    omega, count = 1.2, 9
    got = iterated_integrals(tensor(s), tensor(omega), tensor(zeta), count)
    assert len(got) == count
    if s == 0.0:
        want = [1.0 / math.factorial(n + 1) for n in range(count)]
    else:
        found = exact(s, omega, zeta, count)
        want = [x / s ** (n + 1) for n, x in enumerate(found)]
    for value, expected in zip(got, want, strict=True):
        assert value.item() == pytest.approx(expected, rel=1e-14)


def at_series_edge(omega, zeta, factor):
    """The time at which the power series hands over to the recurrence, times `factor`."""
    return SERIES_RADIUS / fastest_rate(tensor(omega), tensor(zeta)).item() * factor


EDGES = {
    "ordinary": (0.7, 2.0, 0.3),
    "overdamped": (0.7, 2.0, 3.0),
    "critical": (0.9, 2.0, 1.0),
    "critical-long": (7.0, 2.0, 1.0),
    "critical-short": (0.01, 2.0, 1.0),
    "undamped": (0.9, 2.0, 0.0),
    "undamped-short": (0.01, 2.0, 0.0),
    "two-rates-take-over": (2.0, 1.5, SPLIT_ZETA),
    "tiny-gap": (1e-5, 2.0, 0.3),
    "below-series-edge": (at_series_edge(2.0, 0.3, 0.999), 2.0, 0.3),
    "above-series-edge": (at_series_edge(2.0, 0.3, 1.001), 2.0, 0.3),
    "near-critical-edge": (0.5 / (2.0 * math.sqrt(1 - 0.9**2)), 2.0, 0.9),
}


@pytest.mark.parametrize("edge", EDGES)
def test_gradcheck_of_moments_and_propagator(edge):
    inputs = tuple(tensor(x).requires_grad_() for x in EDGES[edge])
    # Tiny gaps need a step below the gap, and moments of it are scaled back to order one.
    s = EDGES[edge][0]
    scale = [max(1.0, 1.0 / s) ** n for n in (1, 2, 3, 4)]

    def scaled(relative, omega, zeta):
        found = moments(relative * s, omega, zeta)
        return (
            *(m * f for m, f in zip(found, scale, strict=True)),
            *propagator(s * relative, omega, zeta),
        )

    relative = torch.ones((), dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(scaled, (relative, *inputs[1:]), eps=1e-6, atol=1e-7, rtol=1e-6)


def gradients(s, omega, zeta):
    leaves = [tensor(x).requires_grad_() for x in (s, omega, zeta)]
    total = sum(m * f for m, f in zip(moments(*leaves), (1.0, 2.0, 3.0, 4.0), strict=True))
    return torch.stack(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("s", [0.05, 0.24, 0.26, 1.0, 6.0])
def test_one_sided_derivatives_agree_across_critical_damping(s):
    below, at, above = (gradients(s, 2.0, z) for z in (1 - 1e-9, 1.0, 1 + 1e-9))
    torch.testing.assert_close(below, at, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(above, at, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ((0.7, 2.0, SPLIT_ZETA - 1e-9), (0.7, 2.0, SPLIT_ZETA + 1e-9)),
        (
            (at_series_edge(2.0, 0.3, 1 - 1e-9), 2.0, 0.3),
            (at_series_edge(2.0, 0.3, 1 + 1e-9), 2.0, 0.3),
        ),
        (
            (at_series_edge(2.0, 3.0, 1 - 1e-9), 2.0, 3.0),
            (at_series_edge(2.0, 3.0, 1 + 1e-9), 2.0, 3.0),
        ),
    ],
    ids=["two-rates", "series-underdamped", "series-overdamped"],
)
def test_branches_meet_in_value_and_slope(low, high):
    a, b = (moments(*(tensor(x) for x in point)) for point in (low, high))
    torch.testing.assert_close(tuple(a), tuple(b), rtol=1e-8, atol=0)
    torch.testing.assert_close(gradients(*low), gradients(*high), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("s", "omega", "zeta"),
    [
        (0.0, 2.0, 0.3), (0.0, 2.0, 1.0), (0.0, 2.0, 5.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0),
        (1.0, 0.0, 0.0), (1.0, 0.0, 0.5), (1.0, 0.0, 1.0), (1.0, 0.0, 3.0), (1e6, 200.0, 20.0),
        (1e6, 1e-3, 0.0), (1.0, 1.0, 1.0), (1e3, 1.0, 1e3),
    ],
)  # fmt: skip
def test_gradients_are_finite_at_every_edge(s, omega, zeta):
    assert torch.isfinite(gradients(s, omega, zeta)).all()
    # The same point beside ordinary ones, where all branches are evaluated.
    leaves = [tensor([x, y]).requires_grad_() for x, y in ((s, 0.9), (omega, 2.0), (zeta, 0.3))]
    total = sum(m.sum() for m in (*moments(*leaves), *propagator(*leaves)))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, leaves))


def test_a_zero_gap_moves_nothing_and_starts_with_the_velocity():
    s = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    g11, g12, g21, g22 = propagator(s, tensor(2.0), tensor(0.3))
    assert [g.item() for g in (g11, g12, g21, g22)] == [1.0, 0.0, 0.0, 1.0]
    slopes = [torch.autograd.grad(g, s, retain_graph=True)[0].item() for g in (g11, g12, g21, g22)]
    assert slopes == pytest.approx([0.0, 1.0, -4.0, -1.2])


def test_free_particle_moves_on_a_straight_line():
    s = tensor([0.0, 0.3, 40.0])
    m = moments(s, torch.zeros_like(s), torch.full_like(s, 0.7))
    for power, moment in enumerate(m):
        torch.testing.assert_close(moment, s ** (power + 1) / math.factorial(power + 1))


def test_fastest_rate_is_the_larger_eigenvalue():
    omega, zeta = tensor([2.0, 2.0, 2.0, 0.0]), tensor([0.3, 1.0, 4.0, 1.0])
    torch.testing.assert_close(
        fastest_rate(omega, zeta), tensor([2.0, 2.0, 8.0 + 2.0 * math.sqrt(15.0), 0.0])
    )


def test_broadcasting_equals_one_by_one():
    s, omega, zeta = (
        tensor([[1e-3], [0.6], [4.0]]),
        tensor([0.0, 1.0, 50.0]),
        tensor([0.0, 1.0, 2.0]),
    )
    together = moments(s, omega, zeta)
    for i in range(3):
        for j in range(3):
            alone = moments(s[i, 0], omega[j], zeta[j])
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[i, j], b, rtol=1e-14, atol=0)
