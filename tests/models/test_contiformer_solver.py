"""The numbers of ContiFormer attention: trajectories, integrals and their gradients."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor

from osciformer.baselines import VectorField, contiformer_attention
from osciformer.testing import irregular_batch, relative_error

from .contiformer_cases import (
    CHANNELS,
    DIRECTIONS,
    HEADS,
    QUADRATURES,
    QUERIES,
    WIDTH,
    gradients,
    linear_field,
    make_fields,
    make_layer,
    make_tokens,
)

# An oracle that shares nothing with the code under test: scipy for the trajectories, the splines
# and the integrals, one pair at a time.


def numpy_field(field: VectorField):
    weights = {name: p.detach().numpy() for name, p in field.named_parameters()}

    def derivative(t: float, y: np.ndarray) -> np.ndarray:
        z = weights["maps.0.weight"] @ y + weights["maps.0.bias"] + t * weights["time_gain"][0]
        z = (z - z.mean()) / np.sqrt(z.var() + 1e-6)
        z = z * weights["norms.0.weight"] + weights["norms.0.bias"]
        return 1.0 / (1.0 + np.exp(-z))

    return derivative


def numpy_spline(q: np.ndarray, times: np.ndarray, query: str):
    def slope(n: int) -> np.ndarray:
        return (q[n + 1] - q[n]) / (times[n + 1] - times[n])

    def value(t: float) -> np.ndarray:
        n = min(max(int(np.searchsorted(times, t)) - 1, 0), len(times) - 2)
        is_smooth = query == "hermite" and n > 0 and times[n - 1] < times[n]
        ends = np.stack([slope(n - 1 if is_smooth else n), slope(n)])
        return CubicHermiteSpline(times[n : n + 2], q[n : n + 2], ends)(t)

    return value


def oracle(q, k, v, times, fields, *, query, direction, average) -> Tensor:
    """Return the output [N, H, C] of one series; `average(f, a, b)` averages f over [a, b]."""
    q, k, v = (x[0].flatten(1).numpy() for x in (q, k, v))
    times = times[0].numpy()
    path = numpy_spline(q, times, query)
    derivatives = {name: numpy_field(field) for name, field in fields.items()}

    def trajectory(name: str, start: np.ndarray, a: float, b: float):
        solution = solve_ivp(
            derivatives[name], (a, b), start, rtol=1e-11, atol=1e-12, dense_output=True
        )
        return solution.sol

    rows = []
    for j in range(len(times)):
        logits, means = [], []
        for i in range(len(times)):
            a, b = times[i], times[j]
            if a == b:
                logits.append((q[j] * k[i]).reshape(HEADS, CHANNELS).sum(1))
                means.append(v[i])
            elif a < b or direction == "bidirectional":
                key, value = (
                    trajectory(name, x[i], a, b)
                    for name, x in (("key_field", k), ("value_field", v))
                )
                both = average(lambda t, f=key, g=value: np.stack([path(t) * f(t), g(t)]), a, b)
                logits.append(both[0].reshape(HEADS, CHANNELS).sum(1))
                means.append(both[1])
        shares = np.exp(np.stack(logits) / np.sqrt(CHANNELS))
        shares /= shares.sum(0)
        rows.append((shares[..., None] * np.stack(means).reshape(-1, HEADS, CHANNELS)).sum(0))
    return torch.tensor(np.stack(rows))


def gauss_average(num_nodes: int):
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)

    def average(f, a, b):
        return (
            sum(w * f(a + (b - a) * (x + 1) / 2) for x, w in zip(nodes, weights, strict=True)) / 2
        )

    return average


def trapezoid_average(f, a, b):
    return 0.5 * (f(a) + f(b))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("quadrature", QUADRATURES)
def test_matches_the_oracle_with_the_same_quadrature(query, direction, quadrature):
    *tokens, times = make_tokens()
    fields = make_fields()
    settings = {"query": query, "direction": direction}
    average = gauss_average(3) if quadrature == "gauss" else trapezoid_average
    expected = oracle(*tokens, times, fields, average=average, **settings)
    actual = contiformer_attention(
        *tokens, times, quadrature=quadrature, step=0.05, **fields, **settings
    )
    assert relative_error(actual[0], expected) < 1e-7


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_matches_the_oracle_with_padding_and_ties(query, direction):
    *tokens, times = make_tokens(length=6, batch=2)
    times[0, 3] = times[0, 2]
    times[1, 4] = times[1, 1]
    mask = torch.tensor([[True] * 5 + [False], [False, True, False, False, True, True]])
    fields = make_fields()
    settings = {"query": query, "direction": direction}
    hidden = [x.masked_fill(~mask[..., None, None], torch.nan) for x in tokens]
    actual = contiformer_attention(
        *hidden, times.masked_fill(~mask, torch.nan), mask, step=0.05, **fields, **settings
    )
    for b, present in enumerate(mask):
        series = (x[b : b + 1, present] for x in (*tokens, times))
        expected = oracle(*series, fields, average=gauss_average(3), **settings)
        assert relative_error(actual[b, present], expected) < 1e-7
        assert not actual[b, ~present].any()


@pytest.mark.parametrize(("length", "tolerance"), [(2, 1e-8), (3, 1e-4)], ids=["smooth", "knot"])
def test_approaches_the_integral_of_the_definition(length, tolerance):
    """Fast over a single segment of the spline, slowly where an interval has a knot inside."""
    *tokens, times = make_tokens(length)
    fields = make_fields()
    knots = times[0].tolist()

    def average(f, a, b):
        inside = [t for t in knots if min(a, b) < t < max(a, b)]
        shape = f(a).shape
        entries = [
            quad(lambda t, at=at: f(t)[at], a, b, points=inside or None, epsabs=1e-9)[0]
            for at in product(*map(range, shape))
        ]
        return np.array(entries).reshape(shape) / (b - a)

    expected = oracle(*tokens, times, fields, query="hermite", direction="causal", average=average)
    errors = [
        relative_error(
            contiformer_attention(*tokens, times, num_nodes=n, step=0.05, **fields)[0], expected
        )
        for n in (1, 3, 16)
    ]
    assert errors[2] < tolerance
    assert errors[2] < errors[1] < errors[0]


def exponential_mean(matrix: Tensor, gap: float) -> Tensor:
    """Return the mean of exp(A s) over [0, gap], a corner of the exponential of a block matrix."""
    zero = torch.zeros_like(matrix)
    one = torch.eye(len(matrix), dtype=matrix.dtype)
    block = torch.cat([torch.cat([matrix, one], 1), torch.cat([zero, zero], 1)], 0)
    return torch.matrix_exp(gap * block)[: len(matrix), len(matrix) :] / gap


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_linear_field_gives_the_mean_of_the_matrix_exponential(direction):
    _, k, v, times = make_tokens()
    matrix = 0.3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    fields = {"key_field": linear_field(-matrix), "value_field": linear_field(matrix)}
    out = contiformer_attention(
        torch.zeros_like(k), k, v, times, num_nodes=8, step=0.02, direction=direction, **fields
    )
    values, t = v[0].flatten(1), times[0].tolist()
    for j in range(4):
        # A zero query weighs all that is seen alike.
        means = [
            values[i] if i == j else exponential_mean(matrix, t[j] - t[i]) @ values[i]
            for i in range(4 if direction == "bidirectional" else j + 1)
        ]
        assert relative_error(out[0, j].flatten(), torch.stack(means).mean(0)) < 1e-8


def test_error_falls_with_the_fourth_power_of_the_step():
    _, k, v, times = make_tokens(length=2)
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    fields = {"key_field": linear_field(matrix), "value_field": linear_field(matrix)}
    first, second = v[0].flatten(1)
    moved = torch.matrix_exp((times[0, 1] - times[0, 0]) * matrix) @ first
    expected = 0.5 * (0.5 * (first + moved) + second)
    errors = [
        relative_error(
            contiformer_attention(
                torch.zeros_like(k), k, v, times, quadrature="trapezoid", step=step, **fields
            )[0, 1].flatten(),
            expected,
        )
        for step in (0.1, 0.05, 0.025)
    ]
    assert 13.0 < errors[0] / errors[1] < 19.0
    assert 13.0 < errors[1] / errors[2] < 19.0


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("quadrature", QUADRATURES)
def test_gradients_agree_with_finite_differences(query, direction, quadrature):
    *tokens, times = make_tokens(length=3)
    fields = make_fields()
    names, parameters = zip(*fields["key_field"].named_parameters(), strict=True)
    inputs = [x.clone().requires_grad_() for x in (*tokens, times, *parameters)]

    def apply(q, k, v, times, *parameters):
        key = dict(zip(names, parameters, strict=True))
        return contiformer_attention(
            *(q, k, v, times),
            key_field=lambda t, y: torch.func.functional_call(fields["key_field"], key, (t, y)),
            value_field=fields["value_field"],
            query=query,
            direction=direction,
            quadrature=quadrature,
            num_nodes=2,
            step=1.0,
        )

    assert torch.autograd.gradcheck(apply, inputs)


def test_recomputed_steps_give_the_same_gradients():
    *tokens, times = (x.requires_grad_() for x in make_tokens())
    fields = make_fields()
    inputs = [*tokens, times, *fields["key_field"].parameters()]
    plain, again = (
        contiformer_attention(*tokens, times, recompute=recompute, **fields)
        for recompute in (False, True)
    )
    assert torch.equal(plain, again)
    for a, b in zip(gradients(again, inputs), gradients(plain, inputs), strict=True):
        assert relative_error(a, b) < 1e-14


@pytest.mark.parametrize("quadrature", QUADRATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_rk4_is_that_of_torchdiffeq(quadrature, dtype):
    pytest.importorskip("torchdiffeq")
    *tokens, times = (x.to(dtype).requires_grad_() for x in make_tokens())
    fields = {name: field.to(dtype) for name, field in make_fields().items()}
    inputs = [*tokens, times, *(p for field in fields.values() for p in field.parameters())]
    ours, theirs = (
        contiformer_attention(
            *tokens,
            times,
            solver=solver,
            quadrature=quadrature,
            direction="bidirectional",
            **fields,
        )
        for solver in ("rk4", "torchdiffeq")
    )
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    assert relative_error(ours, theirs) < tolerance
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert relative_error(a, b) < 10 * tolerance


@pytest.mark.parametrize(("method", "tolerance"), [("rk4", 1e-5), ("dopri5", 1e-3)])
def test_adjoint_gradients_approach_those_of_the_solver(method, tolerance):
    pytest.importorskip("torchdiffeq")
    *tokens, times = (x.requires_grad_() for x in make_tokens(length=3))
    fields = make_fields()
    inputs = [*tokens, times, *(p for field in fields.values() for p in field.parameters())]
    settings = {"solver": "torchdiffeq", "method": method, "adjoint": True}
    ours = contiformer_attention(*tokens, times, step=0.05, **fields)
    theirs = contiformer_attention(*tokens, times, step=0.05, **fields, **settings)
    assert relative_error(ours, theirs) < 1e-5
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert relative_error(a, b) < tolerance


def test_adjoint_takes_a_field_that_is_a_function():
    pytest.importorskip("torchdiffeq")
    *tokens, times = make_tokens()
    fields = {"key_field": lambda t, y: -y, "value_field": lambda t, y: t[..., None] * y}
    settings = {"solver": "torchdiffeq", "adjoint": True}
    ours = contiformer_attention(*tokens, times, **fields)
    assert relative_error(contiformer_attention(*tokens, times, **fields, **settings), ours) < 1e-12


def test_torchdiffeq_is_asked_for_only_where_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    batch = irregular_batch(1, 3, 8)
    make_layer()(batch.x, batch.times)
    with pytest.raises(ImportError, match=r"osciformer\[baselines\]"):
        make_layer(solver="torchdiffeq")(batch.x, batch.times)
