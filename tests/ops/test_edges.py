"""Edges: nothing to see, one token, one time, huge gaps, and derivatives where formulas switch."""

from __future__ import annotations

import pytest
import torch

from .cases import (
    DOUBLE,
    MODES,
    SPECTRA,
    C,
    H,
    assert_agree,
    call,
    make_case,
    outputs_and_gradients,
    tensor,
    with_drive,
    with_mode,
)

DIRECTIONS = ("causal", "bidirectional")


def run(x, **options):
    return outputs_and_gradients(x, backend="blocked", **options)


def assert_finite(results):
    for name, t in results.items():
        assert torch.isfinite(t).all(), name


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_a_fully_masked_series_gives_zero_and_no_gradient(query, direction):
    x = with_mode(make_case(2, 4), query)
    mask = torch.tensor([[False] * 4, [True] * 4])
    for name in ("k", "v", "key_velocity", "key_times", "query_times"):
        x[name] = torch.cat([torch.full_like(x[name][:1], torch.nan), x[name][1:]])
    results = run(x, query=query, direction=direction, mask=mask)
    assert_finite(results)
    assert (results["out"][0] == 0).all()
    assert (results["out"][1] != 0).any()
    for name in ("k", "v", "key_velocity", "key_times", "query_times"):
        assert (results[f"gradient of {name}"][0] == 0).all(), name


@pytest.mark.parametrize("query", MODES)
def test_nothing_present_at_all(query):
    x = with_mode(make_case(2, 3, 5), query)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    results = run(x, query=query, direction="bidirectional", mask=mask)
    for name, t in results.items():
        assert (t == 0).all(), name
    _, weights = call(x, query=query, mask=mask, return_weights=True)
    assert (weights == 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_one_token_returns_its_value(query, direction):
    x = with_mode(make_case(2, 1), query)
    results = run(x, query=query, direction=direction)
    torch.testing.assert_close(results["out"], x["v"])
    for name, t in results.items():
        if name not in ("out", "gradient of v"):
            assert (t == 0).all(), name


@pytest.mark.parametrize("query", MODES)
def test_one_row_reads_many_keys(query):
    x = with_mode(make_case(2, 7, 1), query)
    x["query_times"] = x["key_times"][:, -1:] + 0.3
    got, want = (outputs_and_gradients(x, query=query, backend=b) for b in ("blocked", "oracle"))
    assert_agree(got, want, 1e-10)
    assert (got["gradient of k"] != 0).any()


@pytest.mark.parametrize("query", MODES)
def test_a_row_before_the_first_key_sees_nothing(query):
    x = with_mode(make_case(1, 4, 3), query)
    x["query_times"] = torch.cat([x["key_times"][:, :1] - 1.0, x["key_times"][:, :2] + 0.01], 1)
    results = run(x, query=query)
    assert_finite(results)
    assert (results["out"][:, 0] == 0).all()
    assert (results["out"][:, 1:] != 0).any()
    _, weights = call(x, query=query, backend="blocked", return_weights=True)
    assert (weights[:, :, 0] == 0).all()
    both = call(x, query=query, backend="blocked", direction="bidirectional")
    assert (both[:, 0] != 0).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_all_times_tied_is_plain_attention(query, direction):
    x = with_mode(make_case(2, 5), query)
    x["key_times"] = x["query_times"] = torch.full((2, 5), 0.7, dtype=DOUBLE)
    options = {"query": query, "direction": direction}
    results = run(x, **options)
    assert_finite(results)
    _, weights = call(x, backend="blocked", return_weights=True, **options)
    torch.testing.assert_close(results["out"], torch.einsum("bhmn,bnhc->bmhc", weights, x["v"]))
    torch.testing.assert_close(results["out"], call(x, backend="oracle", **options))
    # Nothing has moved, so nothing depends on how it would.
    for name in (*SPECTRA, "key_velocity", "value_velocity", "key_equilibrium"):
        assert (results[f"gradient of {name}"] == 0).all(), name
    if query == "hold":
        logits = torch.einsum("bmhc,bnhc->bhmn", x["q"], x["k"]) * C**-0.5
        torch.testing.assert_close(weights, logits.softmax(-1))


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge"])
def test_empty_axes(query, rows, keys):
    x = with_mode(make_case(2, 3, 3), query)
    for name, t in x.items():
        if t.ndim == 4 or name.endswith("times"):
            x[name] = t[:, : rows if name in ("q", "query_times") else keys]
    out, weights = call(x, query=query, return_weights=True)
    assert torch.equal(out, torch.zeros(2, rows, H, C, dtype=DOUBLE))
    assert weights.shape == (2, H, rows, keys)


def test_an_empty_batch():
    x = make_case(1, 3)
    x = {n: t[:0] if t.ndim == 4 or n.endswith("times") else t for n, t in x.items()}
    assert call(x).shape == (0, 3, H, C)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_huge_gaps_are_finite_and_equal_the_reference(query, value):
    x = with_mode(make_case(1, 4), query)
    x["key_times"] = tensor([[0.0, 0.5, 1e6, 1e6 + 0.25]])
    x["query_times"] = x["key_times"].clone()
    results = run(x, query=query, value=value)
    assert_finite(results)
    want = call(x, query=query, value=value, backend="reference")
    # 1e6 units at 200 radians each leave half of the digits of a phase.
    torch.testing.assert_close(results["out"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("query", MODES)
def test_extreme_damping_equals_the_oracle(query):
    x = with_mode(make_case(1, 4, smallest=1e-4), query)
    for role in ("key", "value"):
        x[f"{role}_zeta"] = x[f"{role}_zeta"].clone()
        x[f"{role}_zeta"][0, 1] = 1e3
    got, want = (outputs_and_gradients(x, query=query, backend=b) for b in ("blocked", "oracle"))
    assert_agree(got, want, 1e-9)


@pytest.mark.parametrize("query", MODES)
def test_free_particles_equal_the_oracle(query):
    x = with_mode(make_case(1, 4), query)
    # Without a restoring force a rest position means nothing.
    x = {name: t for name, t in x.items() if not name.endswith("equilibrium")}
    x["key_omega"] = torch.zeros_like(x["key_omega"])
    x["value_omega"] = torch.zeros_like(x["value_omega"])
    got, want = (outputs_and_gradients(x, query=query, backend=b) for b in ("blocked", "oracle"))
    assert_agree(got, want, 1e-10)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("query", ["hold", "ridge", "anchored"])
def test_absent_tokens_get_zero_gradient(query, role):
    x = with_mode(make_case(2, 6), query)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    results = run(x, query=query, direction="bidirectional", mask=mask)
    name = {"key": "k", "value": "v"}[role]
    for token in (name, f"{role}_velocity", f"{role}_equilibrium"):
        gradient = results[f"gradient of {token}"]
        assert (gradient[~mask] == 0).all()
        assert (gradient[mask] != 0).any()
    assert (results["gradient of key_times"][~mask] == 0).all()


def small(query, times, omega, zeta, bank=None):
    """A case with one leaf for both times and the given spectra in every head."""
    x = with_mode(make_case(1, len(times)), query)
    del x["query_times"], x["key_times"]
    x["times"] = tensor([times])
    for role in ("key", "value"):
        x[f"{role}_omega"] = tensor(omega).expand(H, C).contiguous()
        x[f"{role}_zeta"] = tensor(zeta).expand(H, C).contiguous()
    if bank is not None and "bank" in x:
        x["bank"] = tensor(bank)
    return x


def gradcheck(x, fixed=(), **options):
    names = [name for name in x if name not in fixed]
    constants = {name: x[name] for name in fixed if name in x}

    def function(*tensors):
        leaves = dict(zip(names, tensors, strict=True))
        return call(leaves | constants, backend="blocked", ridge=0.1, **options)

    inputs = tuple(x[name].clone().requires_grad_() for name in names)
    return torch.autograd.gradcheck(function, inputs, fast_mode=True, atol=1e-6, rtol=1e-4)


ORDINARY = ([0.1, 0.5, 1.3], [0.5, 2.0, 6.0], [0.1, 0.4, 2.0])
CRITICAL = ([0.1, 0.5, 1.3], [0.5, 2.0, 6.0], [1.0, 1.0, 1.0])
UNDAMPED = ([0.1, 0.5, 1.3], [0.5, 2.0, 6.0], [0.0, 0.0, 0.0])
TINY = ([0.1, 0.1 + 1e-9, 0.1 + 1e-6], [0.5, 2.0, 6.0], [0.1, 1.0, 2.0])
ZETAS = ("key_zeta", "value_zeta")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_gradcheck_at_an_ordinary_point(query, value, direction):
    assert gradcheck(small(query, *ORDINARY), query=query, value=value, direction=direction)


@pytest.mark.parametrize("query", MODES)
def test_gradcheck_of_the_drive(query):
    assert gradcheck(with_drive(small(query, *ORDINARY)), query=query)


@pytest.mark.parametrize("query", MODES)
def test_gradcheck_at_critical_damping(query):
    assert gradcheck(small(query, *CRITICAL), query=query)


@pytest.mark.parametrize("query", MODES)
def test_gradcheck_of_undamped_channels(query):
    # Damping ratios cannot be moved below zero; their one-sided derivative is checked below.
    assert gradcheck(small(query, *UNDAMPED), fixed=ZETAS, query=query)


@pytest.mark.parametrize("query", ["ridge", "ridge_causal", "anchored", "learned"])
def test_gradcheck_at_exact_resonance(query):
    x = small(query, *UNDAMPED, bank=[0.5, 2.0, 6.0, 9.0])
    assert gradcheck(x, fixed=ZETAS, query=query)


@pytest.mark.parametrize("query", MODES)
def test_gradcheck_with_tiny_gaps(query):
    # A finite difference in times would reorder them.
    assert gradcheck(small(query, *TINY), fixed=("times",), query=query)


@pytest.mark.parametrize("query", MODES)
def test_gradcheck_where_tokens_share_a_time(query):
    x = small(query, [0.2, 0.9, 1.6], *ORDINARY[1:])
    x["instants"] = x.pop("times")
    for name in (
        "k",
        "v",
        "key_velocity",
        "value_velocity",
        "key_equilibrium",
        "value_equilibrium",
    ):
        x[name] = torch.cat([x[name], 0.5 * x[name][:, :2]], dim=1)
    ties = {"rows": (0, 1, 1) if query != "learned" else (0, 1, 2), "keys": (0, 0, 1, 1, 2)}
    assert gradcheck(x, query=query, direction="bidirectional", **ties)


@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "learned"])
@pytest.mark.parametrize("name", ZETAS)
def test_one_sided_derivative_at_zero_damping(name, query):
    x = small(query, *UNDAMPED, bank=[0.5, 2.0, 6.0, 9.0])

    def total(zeta):
        return call(x | {name: zeta}, query=query, backend="blocked").square().sum()

    zero = torch.zeros(H, C, dtype=DOUBLE, requires_grad=True)
    (gradient,) = torch.autograd.grad(total(zero), zero)
    step = 1e-4 * torch.rand(H, C, dtype=DOUBLE)
    with torch.no_grad():
        # Third order, all points on the allowed side.
        slope = (
            -11 * total(zero) + 18 * total(step) - 9 * total(2 * step) + 2 * total(3 * step)
        ) / 6
    torch.testing.assert_close((gradient * step).sum(), slope, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("query", MODES)
def test_gradients_are_continuous_through_critical_damping(query):
    x = small(query, *CRITICAL)
    at = run(x, query=query)
    for step in (-1e-9, 1e-9):
        moved = x | {name: x[name] + step for name in ZETAS}
        assert_agree(run(moved, query=query), at, 1e-6)
