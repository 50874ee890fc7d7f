from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor, nn

from osciformer.models.baselines import (
    ContiFormerAttention,
    VectorField,
    contiformer_attention,
)
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
    relative_error,
)

HEADS, CHANNELS = 2, 2
WIDTH = HEADS * CHANNELS
QUERIES = ("hermite", "linear")
DIRECTIONS = ("causal", "bidirectional")
QUADRATURES = ("gauss", "trapezoid")


def make_tokens(length: int = 4, batch: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
    """Return q, k, v [B, N, H, C] and times [B, N], float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(
        3, batch, length, HEADS, CHANNELS, generator=generator, dtype=torch.float64
    )
    gaps = 0.2 + torch.rand(batch, length, generator=generator, dtype=torch.float64)
    return q, k, v, gaps.cumsum(dim=1)


def make_fields(**settings) -> dict[str, VectorField]:
    """Return fields in which every parameter matters."""
    fields = {name: VectorField(WIDTH, **settings).double() for name in ("key", "value")}
    for parameter in (p for field in fields.values() for p in field.parameters()):
        nn.init.normal_(parameter, std=0.7)
    return {f"{name}_field": field for name, field in fields.items()}


def make_layer(**settings) -> ContiFormerAttention:
    return ContiFormerAttention(8, 2, **{"num_nodes": 2, "step": 0.5, **settings}).double()


def linear_field(matrix: Tensor):
    return lambda t, y: y @ matrix.T


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
    slopes = np.diff(q, axis=0) / np.diff(times)[:, None]
    before = np.concatenate([slopes[:1], slopes[:-1]])

    def value(t: float) -> np.ndarray:
        n = min(max(int(np.searchsorted(times, t)) - 1, 0), len(times) - 2)
        start = slopes[n] if query == "linear" else before[n]
        ends = np.stack([start, slopes[n]])
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
            if i == j:
                logits.append((q[j] * k[i]).reshape(HEADS, CHANNELS).sum(1))
                means.append(v[i])
            elif i < j or direction == "bidirectional":
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


@pytest.mark.parametrize("quadrature", QUADRATURES)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_future_does_not_reach_the_past(query, quadrature, ties):
    batch = irregular_batch(2, 6, 8, ragged=False, ties=ties)
    layer = make_layer(query=query, quadrature=quadrature)
    assert_causal(layer, batch.x, batch.times)


def test_bidirectional_rows_see_the_future():
    batch = irregular_batch(2, 6, 8, ragged=False)
    layer = make_layer(direction="bidirectional")
    with pytest.raises(AssertionError, match="reach the past"):
        assert_causal(layer, batch.x, batch.times)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_and_batch_order_change_nothing(query, direction):
    batch = irregular_batch(3, 6, 8)
    layer = make_layer(query=query, direction=direction)
    assert_padding_invariant(layer, batch.x, batch.times, batch.mask)
    assert_batch_order_invariant(layer, batch.x, batch.times, batch.mask)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_absent_tokens_between_present_ones_change_nothing(query, direction):
    full = irregular_batch(1, 5, 8, ragged=False)
    layer = make_layer(query=query, direction=direction)
    where = [1, 2, 5, 6, 8]
    x = torch.full((1, 10, 8), float("nan"), dtype=torch.float64)
    times = torch.full((1, 10), float("nan"), dtype=torch.float64)
    mask = torch.zeros(1, 10, dtype=torch.bool)
    x[:, where], times[:, where], mask[:, where] = full.x, full.times, True
    x.requires_grad_()
    out = layer(x, times, mask)
    assert relative_error(out[:, where], layer(full.x, full.times)) < 1e-12
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[~mask].any()


def test_a_series_without_tokens_gives_zero():
    *tokens, times = make_tokens(batch=2)
    mask = torch.tensor([[True] * 4, [False] * 4])
    fields = make_fields()
    out = contiformer_attention(*tokens, times, mask, **fields)
    assert not out[1].any()
    alone = contiformer_attention(*(x[:1] for x in tokens), times[:1], **fields)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("quadrature", QUADRATURES)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_at_one_time_attend_as_in_a_transformer(query, quadrature, direction):
    q, k, v, times = make_tokens()
    out = contiformer_attention(
        *(q, k, v, torch.full_like(times, 0.7)),
        query=query,
        quadrature=quadrature,
        direction=direction,
        **make_fields(),
    )
    expected = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert relative_error(out, expected.transpose(1, 2)) < 1e-12


@pytest.mark.parametrize("quadrature", QUADRATURES)
@pytest.mark.parametrize("query", QUERIES)
def test_ties_are_the_limit_of_small_gaps_in_the_rows_outside(query, quadrature):
    """A row at another time than the tie is continuous where two tokens meet."""
    *tokens, times = make_tokens(length=5)
    fields = make_fields()

    def row(gap: float, j: int) -> Tensor:
        moved = times.clone()
        moved[:, 3] = moved[:, 2] + gap
        settings = {"query": query, "quadrature": quadrature}
        return contiformer_attention(*tokens, moved, **settings, **fields)[:, j]

    assert relative_error(row(1e-9, 1), row(0.0, 1)) == 0.0
    if query == "linear":  # a cubic spline with backward differences overshoots after a small gap
        assert relative_error(row(1e-9, 4), row(0.0, 4)) < 1e-6


def test_one_token_attends_to_itself():
    q, k, v, times = make_tokens(length=1)
    for query, quadrature in product(QUERIES, QUADRATURES):
        out = contiformer_attention(
            q, k, v, times, query=query, quadrature=quadrature, **make_fields()
        )
        assert relative_error(out, v) < 1e-14


def test_no_tokens_and_no_series_give_empty_output():
    layer = make_layer()
    for shape in ((2, 0), (0, 3)):
        x = torch.zeros(*shape, 8, dtype=torch.float64)
        assert layer(x, torch.zeros(shape, dtype=torch.float64)).shape == x.shape


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


@pytest.mark.parametrize("vector_field", ["linear", "mlp"])
@pytest.mark.parametrize("activation", ["sigmoid", "softplus", "tanh"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_every_parameter_gets_a_gradient(vector_field, activation, norm):
    batch = irregular_batch(2, 5, 8)
    layer = make_layer(vector_field=vector_field, activation=activation, norm=norm)
    layer(batch.x, batch.times, batch.mask)[batch.mask].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


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


def test_autocast_keeps_states_in_float32():
    batch = irregular_batch(2, 6, 8, dtype=torch.float32)
    layer = ContiFormerAttention(8, 2)
    expected = layer(batch.x, batch.times, batch.mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(batch.x, batch.times, batch.mask)
    assert out.dtype == torch.bfloat16
    assert relative_error(out[batch.mask], expected[batch.mask]) < 0.03
    out[batch.mask].float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_times_in_double_precision_are_used_as_such():
    """Gaps of 1e-3 after 1e5 are lost in float32."""
    *tokens, times = make_tokens()
    tokens = [x.float() for x in tokens]
    fields = {"key_field": lambda t, y: -y, "value_field": lambda t, y: -y}
    near = contiformer_attention(*tokens, 1e-3 * times, **fields)
    far = contiformer_attention(*tokens, 1e5 + 1e-3 * times, **fields)
    assert near.dtype == torch.float32
    assert relative_error(far, near) < 1e-6


BAD_SETTINGS = {
    "query": ("spline", "query must be one of hermite, linear; got 'spline'"),
    "direction": ("both", "direction must be one of causal, bidirectional"),
    "quadrature": ("simpson", "quadrature must be one of gauss, trapezoid"),
    "solver": ("euler", "solver must be one of rk4, torchdiffeq"),
    "method": ("euler", "method must be one of rk4, dopri5"),
    "vector_field": ("deep", "vector_field must be one of linear, mlp"),
    "activation": ("relu", "activation must be one of sigmoid, softplus, tanh"),
    "num_nodes": (0, "num_nodes must be at least 1; got 0"),
    "step": (0.0, r"step must lie in \(0, 2\]"),
    "adjoint": (True, "need solver='torchdiffeq'"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_are_refused_when_the_layer_is_built(name):
    value, message = BAD_SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        make_layer(**{name: value})


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="method='dopri5' need"):
        make_layer(method="dopri5")
    with pytest.raises(ValueError, match="recompute needs"):
        make_layer(solver="torchdiffeq", recompute=True)
    with pytest.raises(ValueError, match="multiple of num_heads; got dim=8, num_heads=3"):
        ContiFormerAttention(8, 3)


def test_bad_tensors_are_refused():
    q, k, v, times = make_tokens()
    fields = make_fields()
    with pytest.raises(ValueError, match=r"times must not decrease within a series; series 0"):
        contiformer_attention(q, k, v, times.flip(1), **fields)
    with pytest.raises(ValueError, match=r"k must have shape \[B, N, H, C\] = \[1, 4, 2, 2\]"):
        contiformer_attention(q, k[:, :3], v, times, **fields)
    with pytest.raises(ValueError, match=r"q must have shape \[B, N, H, C\], got \[1, 4, 2\]"):
        contiformer_attention(q[..., 0], k, v, times, **fields)
    with pytest.raises(ValueError, match=r"times must have shape \[B, N\]"):
        contiformer_attention(q, k, v, times[:, :3], **fields)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        contiformer_attention(q, k, v, times, torch.ones(1, 4), **fields)
    with pytest.raises(TypeError, match="v must be a floating-point tensor"):
        contiformer_attention(q, k, v.long(), times, **fields)
    with pytest.raises(ValueError, match=r"x must be \[B, N, 8\]"):
        make_layer()(torch.zeros(1, 4, 7), times)


def test_the_layer_shows_its_settings():
    assert "query=hermite, direction=causal, quadrature=gauss" in repr(make_layer())
