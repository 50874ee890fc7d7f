"""The laws of ContiFormer attention: what a row may see, ties, padding, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from osciformer.baselines import ContiFormerAttention, contiformer_attention
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
    relative_error,
)

from .contiformer_cases import (
    DIRECTIONS,
    QUADRATURES,
    QUERIES,
    WIDTH,
    gradients,
    make_fields,
    make_layer,
    make_tokens,
)


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


SOLVERS = {
    "rk4": {},
    "recompute": {"recompute": True},
    "torchdiffeq": {"solver": "torchdiffeq"},
    "adjoint": {"solver": "torchdiffeq", "adjoint": True},
    "dopri5": {"solver": "torchdiffeq", "method": "dopri5"},
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_only_pairs_that_are_seen_are_solved(solver, direction):
    if "solver" in SOLVERS[solver]:
        pytest.importorskip("torchdiffeq")
    *tokens, times = (x.requires_grad_() for x in make_tokens(length=5, batch=3))
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
    with torch.no_grad():
        times[0, 2] = times[0, 1]  # one more pair, causally
    asked = set()

    def field(t: Tensor, y: Tensor) -> Tensor:
        asked.add((*t.shape, *y.shape))
        return -y

    fields = {"key_field": field, "value_field": field}
    settings = {"direction": direction, "step": 1.0, **SOLVERS[solver]}
    contiformer_attention(*tokens, times, mask, **fields, **settings).sum().backward()
    num_pairs = 15 + 1 + 6 if direction == "causal" else 25 + 9
    assert asked == {(num_pairs, num_pairs, WIDTH)}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_batch_without_tokens_gives_zero_and_zero_gradients(solver):
    if "solver" in SOLVERS[solver]:
        pytest.importorskip("torchdiffeq")
    *tokens, times = (x.requires_grad_() for x in make_tokens(batch=2))
    fields = make_fields()
    mask = torch.zeros(2, 4, dtype=torch.bool)
    out = contiformer_attention(*tokens, times, mask, **fields, **SOLVERS[solver])
    assert not out.any()
    inputs = [*tokens, times, *fields["key_field"].parameters()]
    assert not any(gradient.any() for gradient in gradients(out, inputs))


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
    "query": ("spline", "query must be one of 'hermite', 'linear'; got 'spline'"),
    "direction": ("both", "direction must be one of 'causal', 'bidirectional'"),
    "quadrature": ("simpson", "quadrature must be one of 'gauss', 'trapezoid'"),
    "solver": ("euler", "solver must be one of 'rk4', 'torchdiffeq'"),
    "method": ("euler", "method must be one of 'rk4', 'dopri5'"),
    "vector_field": ("deep", "vector_field must be one of 'linear', 'mlp'"),
    "activation": ("relu", "activation must be one of 'sigmoid', 'softplus', 'tanh'"),
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
    with pytest.raises(ValueError, match="fuse needs solver='rk4'"):
        make_layer(solver="torchdiffeq", fuse=True)
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
