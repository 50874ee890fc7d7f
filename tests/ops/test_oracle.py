"""The oracle judges every backend, so it is itself judged by other people's solvers."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from osciformer.ops.attention import oracle
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import ConstantPath, SinusoidPath, resolve_query

from .cases import attention_inputs

DOUBLE = torch.float64


def attend(*args, **flat):
    return oracle.attend(attention_inputs(*args, **flat))


def spectrum(omega, zeta):
    omega, zeta = (torch.tensor(x, dtype=DOUBLE).reshape(1, -1) for x in (omega, zeta))
    return {"key_omega": omega, "key_zeta": zeta, "value_omega": omega, "value_zeta": zeta}


def logit(path, k, gap, *, start=0.0, **kwargs):
    """The logit of one key and one row: the log-sum-exp of a single entry."""
    times = torch.tensor([[start]], dtype=DOUBLE)
    out, lse, _ = attend(path, k, k, times + gap, times, scale=1.0, **kwargs)
    return out[0, 0, 0], lse.item()


def by_solve_ivp(query, start, gap, omega, zeta, k, velocity, rest, drive):
    """Integrate keys, drives and <q, k> as one system of differential equations."""
    size = len(omega)
    frequency, cos, sin = drive

    def rhs(t, y):
        x, dx = y[:size], y[size : 2 * size]
        s = t - start
        force = k * (cos.T @ np.cos(frequency * s) + sin.T @ np.sin(frequency * s))
        ddx = force - 2 * zeta * omega * dx - omega**2 * (x - rest)
        return np.concatenate([dx, ddx, x, [query(t) @ x]])

    y0 = np.concatenate([k, velocity, np.zeros(size + 1)])
    solution = solve_ivp(rhs, (start, start + gap), y0, "DOP853", rtol=1e-13, atol=1e-14)
    y = solution.y[:, -1]
    return y[-1] / gap, y[2 * size : 3 * size] / gap, y[:size]


@pytest.mark.parametrize("gap", [0.03, 2.7])
@pytest.mark.parametrize("value", ["average", "point"])
def test_equals_an_ode_solver_with_all_terms(gap, value):
    rng = np.random.default_rng(0)
    omega, zeta = np.array([0.7, 2.0, 2.0, 3.0, 1.9]), np.array([0.0, 0.3, 1.0, 2.2, 0.0])
    k, velocity, rest = rng.normal(size=(3, 5))
    frequency, (cos, sin) = np.array([1.9, 4.0]), rng.normal(size=(2, 2, 5))
    modes, constant = np.array([0.0, 0.7, 3.0]), rng.normal(size=5)
    a, b = rng.normal(size=(2, 3, 5))
    start = 0.4

    def query(t):
        return constant + a.T @ np.cos(modes * t) + b.T @ np.sin(modes * t)

    def tensor(x, *shape):
        return torch.tensor(x, dtype=DOUBLE).reshape(*shape, *np.shape(x))

    path = SinusoidPath(
        tensor(modes), tensor(constant, 1, 1, 1), tensor(a, 1, 1, 1), tensor(b, 1, 1, 1),
        torch.zeros(1, 1, dtype=DOUBLE),
    )  # fmt: skip
    gains = (tensor(cos, 1), tensor(sin, 1))
    out, alpha = logit(
        path,
        tensor(k, 1, 1, 1),
        gap,
        start=start,
        value=value,
        key_velocity=tensor(velocity, 1, 1, 1),
        value_velocity=tensor(velocity, 1, 1, 1),
        key_equilibrium=tensor(rest, 1, 1, 1),
        value_equilibrium=tensor(rest, 1, 1, 1),
        drive=Drive(tensor(frequency), *gains, *gains),
        **spectrum(omega, zeta),
    )
    want, mean, end = by_solve_ivp(
        query, start, gap, omega, zeta, k, velocity, rest, (frequency, cos, sin)
    )
    assert alpha == pytest.approx(want, rel=1e-10, abs=1e-11)
    np.testing.assert_allclose(out.numpy(), mean if value == "average" else end, atol=1e-11)


def exact_average(gap, mode, omega, zeta):
    """Means of (g11, g12) e^{i w s} with 60 digits, by the exponential of an extended matrix."""
    with mp.workdps(60):
        gap, mode, omega, zeta = (mp.mpf(x) for x in (gap, mode, omega, zeta))
        i_w = mp.mpc(0, mode)
        extended = mp.matrix([[i_w, 1, 0], [-(omega**2), i_w - 2 * zeta * omega, 0], [1, 0, 0]])
        e = mp.expm(extended * gap)
        return complex(e[2, 0] / gap), complex(e[2, 1] / gap)


@pytest.mark.parametrize("gap", [1e-9, 1e-3, 1.0, 10.0], ids=lambda d: f"gap={d:g}")
@pytest.mark.parametrize(
    ("omega", "zeta", "mode"),
    [
        (200.0, 20.0, 3.0),
        (200.0, 0.0, 200.0),
        (200.0, 1.0, 7.0),
        (200.0, 0.01, 0.0),
        (1e-3, 20.0, 1.0),
        (1e-3, 0.0, 1e-3),
        (0.0, 0.3, 2.0),
        (3.0, 1.0, 3.0),
    ],
)
def test_keeps_twelve_digits_over_the_whole_range(gap, omega, zeta, mode):
    zero, one = torch.zeros(1, 1, 1, 1, dtype=DOUBLE), torch.ones(1, 1, 1, 1, dtype=DOUBLE)
    speed = max(omega, 1.0 / gap)  # a velocity that matters as much as the displacement
    origin = torch.zeros(1, 1, dtype=DOUBLE)
    frequency = torch.tensor([mode], dtype=DOUBLE)
    g11, g12 = exact_average(gap, mode, omega, zeta)
    want = g11 + speed * g12
    for cos, sin, part in ((1.0, 0.0, want.real), (0.0, 1.0, want.imag)):
        path = SinusoidPath(frequency, None, cos * one[:, :, None], sin * one[:, :, None], origin)
        _, alpha = logit(path, one, gap, key_velocity=speed * one, **spectrum([omega], [zeta]))
        assert alpha == pytest.approx(part, rel=1e-12, abs=1e-12 * abs(want))
    mean, _ = logit(ConstantPath(zero), one, gap, **spectrum([omega], [zeta]))
    want = exact_average(gap, 0.0, omega, zeta)[0].real
    assert mean.item() == pytest.approx(want, rel=1e-12, abs=1e-15)


def small_case(mode, seed=0):
    g = torch.Generator().manual_seed(seed)
    names = ["q", "k", "v", "key_velocity", "value_velocity", "key_equilibrium"]
    case = {name: torch.randn(1, 3, 1, 3, generator=g, dtype=DOUBLE) for name in names}
    case["times"] = torch.tensor([[0.1, 0.5, 1.3]], dtype=DOUBLE)
    case["key_omega"] = torch.tensor([[2.0, 3.0, 0.5]], dtype=DOUBLE)
    case["key_zeta"] = torch.tensor([[0.2, 1.0, 2.0]], dtype=DOUBLE)
    case["value_omega"], case["value_zeta"] = case["key_omega"] + 1, case["key_zeta"] + 0.0
    case["drive_omega"] = torch.tensor([3.0], dtype=DOUBLE)
    for gain in ("key_cos", "key_sin", "value_cos", "value_sin"):
        case[gain] = torch.randn(1, 1, 3, generator=g, dtype=DOUBLE)
    params = None
    if mode == "anchored":
        params = {key: torch.randn(1, 2, 3, generator=g, dtype=DOUBLE) for key in ("cos", "sin")}
        params["omega"] = torch.tensor([1.0, 5.0], dtype=DOUBLE)
    return case, params


@pytest.mark.parametrize("mode", ["hold", "linear", "ridge_causal", "anchored"])
def test_gradcheck_of_every_input(mode):
    case, params = small_case(mode)
    inputs = tuple(x.requires_grad_() for x in case.values())

    def run(*tensors):
        x = dict(zip(case, tensors, strict=True))
        gains = (x.pop(name) for name in ("key_cos", "key_sin", "value_cos", "value_sin"))
        drive = Drive(x.pop("drive_omega"), *gains)
        times = x.pop("times")
        path = resolve_query(mode, x.pop("q"), times, params)
        # Row 0 sees only itself, whose gap is zero and stays zero.
        out, lse, _ = attend(
            path, x.pop("k"), x.pop("v"), times, times, drive=drive, scale=0.6, **x
        )
        return out, lse

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["hold", "linear"])
def test_finer_panels_change_nothing(mode, monkeypatch):
    case, params = small_case(mode)
    case["key_omega"] = torch.tensor([[200.0, 50.0, 1e-3]], dtype=DOUBLE)
    case["key_zeta"] = torch.tensor([[0.05, 20.0, 3.0]], dtype=DOUBLE)

    def run():
        path = resolve_query(mode, case["q"], case["times"], params)
        rest = {n: case[n] for n in ("key_omega", "key_zeta", "value_omega", "value_zeta")}
        return attend(
            path, case["k"], case["v"], case["times"], case["times"], scale=1.0,
            key_velocity=case["key_velocity"], **rest,
        )[:2]  # fmt: skip

    coarse = run()
    monkeypatch.setattr(oracle, "_PHASE_PER_PANEL", 2.0)
    monkeypatch.setattr(oracle, "_NODES", 26)
    torch.testing.assert_close(run(), coarse, rtol=1e-12, atol=1e-13)


def test_zero_gap_is_the_limit_and_constant_in_the_gap():
    k, q, v = (torch.randn(1, 1, 1, 3, dtype=DOUBLE) for _ in range(3))
    times = torch.zeros(1, 1, dtype=DOUBLE, requires_grad=True)
    rates = spectrum([1.0, 2.0, 3.0], [0.3, 1.0, 3.0])
    out, lse, weights = attend(
        ConstantPath(q), k, v, times, torch.zeros(1, 1, dtype=DOUBLE), scale=0.5,
        key_velocity=k, return_weights=True, **rates,
    )  # fmt: skip
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse[0, 0, 0], 0.5 * (q * k).sum())
    assert weights.item() == 1.0
    (slope,) = torch.autograd.grad(lse.sum() + out.sum(), times)
    assert slope.item() == 0.0


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    k = torch.randn(1, 2, 1, 1, dtype=DOUBLE, requires_grad=True)
    times = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
    q = torch.randn(1, 3, 1, 1, dtype=DOUBLE)
    rows = torch.tensor([[-1.0, 0.0, 2.0]], dtype=DOUBLE)
    out, lse, weights = attend(
        ConstantPath(q), k, k, rows, times, scale=1.0, strict=True, return_weights=True,
        mask=torch.tensor([[True, False]]), **spectrum([1.0], [0.1]),
    )  # fmt: skip
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert torch.equal(lse[0, 0, :2], torch.full((2,), -math.inf, dtype=DOUBLE))
    assert weights[0, 0].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert torch.isfinite(grad).all()
    assert grad[0, 1] == 0


def test_float32_inputs_are_judged_in_float64():
    k, times = torch.randn(1, 2, 1, 1), torch.tensor([[0.0, 1.0]])
    rates = {name: rate.float() for name, rate in spectrum([1.0], [0.1]).items()}
    out, lse, _ = attend(ConstantPath(k), k, k, times, times, scale=1.0, **rates)
    assert out.dtype == lse.dtype == DOUBLE
