"""`blocked` against the quadrature of the definition: outputs and the gradients of every input."""

from __future__ import annotations

import math

import pytest
import torch

from .cases import (
    DOUBLE,
    MODES,
    C,
    assert_agree,
    call,
    make_case,
    outputs_and_gradients,
    tensor,
    with_drive,
    with_mode,
)

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-10, 1e-5
WIDE_TIMES = [0.0, 1e-9, 1e-6, 1e-3, 0.4, 5.0]
WIDE_ZETA = [0.0, 0.02, 0.3, 1.0, 3.0, 20.0]


def assert_parity(x, tolerance=DOUBLE_TOLERANCE, judge="oracle", **options):
    got = outputs_and_gradients(x, backend="blocked", **options)
    want = outputs_and_gradients(x, backend=judge, **options)
    assert_agree(got, want, tolerance)


def hide_some(batch, num_keys):
    mask = torch.ones(batch, num_keys, dtype=torch.bool)
    mask[0, num_keys // 2] = False
    return mask


def wide_case():
    """The promised range: omega 1e-3 to 200, zeta 0 to 20 on both ends, gaps 1e-9 to the window."""
    x = make_case(1, len(WIDE_TIMES), channels=2 * len(WIDE_ZETA))
    x |= {"query_times": tensor([WIDE_TIMES]), "key_times": tensor([WIDE_TIMES])}
    omega, zeta = torch.logspace(-3, math.log10(200.0), 12, dtype=DOUBLE), tensor(2 * WIDE_ZETA)
    x["key_omega"], x["key_zeta"] = torch.stack([omega, omega]), torch.stack([zeta, zeta.flip(0)])
    x["value_omega"], x["value_zeta"] = x["key_omega"], x["key_zeta"].flip(0)
    # Velocities that matter as much as the displacements.
    x["key_velocity"] = x["key_velocity"] * x["key_omega"]
    x["value_velocity"] = x["value_velocity"] * x["value_omega"]
    return x


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_every_mode_equals_the_oracle_with_rows_of_its_own(query, value, direction):
    x = with_mode(make_case(1, 5, 4), query)
    assert_parity(x, query=query, value=value, direction=direction, mask=hide_some(1, 5))


@pytest.mark.parametrize("query", MODES)
def test_self_attention_equals_the_oracle(query):
    x = with_mode(make_case(1, 5), query)
    assert_parity(x, query=query, direction="bidirectional", mask=hide_some(1, 5))


@pytest.mark.parametrize("rows", [None, 4], ids=["self", "cross"])
@pytest.mark.parametrize("query", MODES)
def test_times_without_gradient_change_nothing_else(query, rows):
    x = with_mode(make_case(2, 40, rows, seed=5), query)
    options = {"query": query, "backend": "blocked", "direction": "bidirectional"}
    got = outputs_and_gradients(x, of_times=False, **options)
    want = outputs_and_gradients(x, of_times=True, **options)
    assert_agree(got, {name: want[name] for name in got}, DOUBLE_TOLERANCE)


@pytest.mark.parametrize("query", MODES)
def test_one_leaf_for_both_times_equals_the_oracle(query):
    x = with_mode(make_case(1, 4), query)
    del x["query_times"], x["key_times"]
    assert_parity(x | {"times": tensor([[0.1, 0.4, 0.9, 1.6]])}, query=query)


@pytest.mark.parametrize("rows", [None, 3], ids=["self", "cross"])
@pytest.mark.parametrize("query", MODES)
def test_drives_equal_the_oracle(query, rows):
    x = with_drive(with_mode(make_case(1, 4, rows), query))
    assert_parity(x, query=query, value="point" if rows else "average")


# Which of six instants each row and each key has.
TIES = {
    "both-tied": ((0, 1, 1, 3, 5), (1, 1, 2, 3, 3, 4)),
    "tied-rows-after-tied-keys": ((1, 1, 2, 2, 5), (0, 1, 1, 1, 3, 5, 5)),
    "many-keys": ((2, 5), (0, 0, 0, 3, 3, 4, 4, 5)),
    "many-rows": ((0, 2, 2, 2, 4, 4), (0, 2, 4)),
}


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("query", MODES)
def test_ties_equal_the_oracle(query, ties):
    # Tokens at one time have one derivative: that of moving them together.
    rows, keys = TIES[ties]
    x = with_mode(make_case(1, len(keys), len(rows)), query)
    del x["query_times"], x["key_times"]
    # No short fractions, so that a sum of a time and a gap may round.
    x["instants"] = tensor([[-0.61, 0.317, 0.3551, 0.8319, 1.1043, 1.5207]])
    assert_parity(x, query=query, direction="bidirectional", rows=rows, keys=keys)


@pytest.mark.parametrize("of_times", [True, False], ids=["times-learned", "times-fixed"])
@pytest.mark.parametrize("query", MODES)
def test_whole_range_equals_the_oracle_in_float64(query, of_times):
    value = "average" if of_times else "point"
    assert_parity(with_mode(wide_case(), query), query=query, value=value, of_times=of_times)


@pytest.mark.parametrize("of_times", [True, False], ids=["times-learned", "times-fixed"])
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_whole_range_equals_the_oracle_in_float32(query, value, of_times):
    x = with_mode(wide_case(), query)
    single = {name: t.float() for name, t in x.items()}
    rounded = {name: t.double() for name, t in single.items()}
    options = {"query": query, "value": value, "of_times": of_times}
    got = outputs_and_gradients(single, backend="blocked", **options)
    want = outputs_and_gradients(rounded, backend="oracle", **options)
    assert got["out"].dtype == torch.float32
    assert_agree(got, want, SINGLE_TOLERANCE)


@pytest.mark.parametrize("of_times", [True, False], ids=["times-learned", "times-fixed"])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "anchored"])
def test_float32_keeps_its_digits_at_a_hundred_tokens(query, of_times):
    x = with_mode(make_case(1, 100, seed=4), query)
    single = {name: t.float() for name, t in x.items()}
    rounded = {name: t.double() for name, t in single.items()}
    options = {"query": query, "backend": "blocked"}
    got = outputs_and_gradients(single, of_times=of_times, **options)
    want = outputs_and_gradients(rounded, of_times=of_times, **options)
    assert_agree(got, want, SINGLE_TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 33])
@pytest.mark.parametrize("query", MODES)
def test_every_length_equals_the_reference(query, length):
    # The reference differentiates a line over a gap with an error of 1e-16 / gap.
    x = with_mode(make_case(1, length, smallest=1e-4, extras=length < 20), query)
    assert_parity(x, judge="reference", query=query, mask=hide_some(1, length))


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("query", ["hold", "ridge"])
def test_lengths_around_a_power_of_two_equal_the_reference(query, length):
    x = with_mode(make_case(1, length, extras=False), query)
    assert_parity(x, judge="reference", query=query)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 9), (9, 1), (2, 33), (17, 6)])
@pytest.mark.parametrize("query", MODES)
def test_any_number_of_rows_and_keys_equals_the_reference(query, rows, keys):
    x = with_mode(make_case(1, keys, rows, smallest=1e-4), query)
    assert_parity(x, judge="reference", query=query, direction="bidirectional")


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("rows", [None, 4], ids=["self", "cross"])
@pytest.mark.parametrize("query", MODES)
def test_weights_equal_those_of_the_oracle(query, rows, direction):
    x = with_mode(make_case(2, 6, rows, ties=True), query)
    options = {"query": query, "direction": direction, "mask": hide_some(2, 6)}
    out, weights = call(x, backend="blocked", return_weights=True, **options)
    _, want = call(x, backend="oracle", return_weights=True, **options)
    torch.testing.assert_close(weights, want, rtol=0, atol=1e-12)
    sees_a_key = want.sum(-1) > 0
    torch.testing.assert_close(weights.sum(-1), sees_a_key.to(DOUBLE), rtol=0, atol=1e-12)
    assert torch.equal(out, call(x, backend="blocked", **options))


@pytest.mark.parametrize("query", MODES)
def test_bfloat16_tokens_lose_only_their_own_rounding(query):
    x = with_mode(make_case(2, 20, extras=False), query)
    x = {name: t.float() for name, t in x.items()}
    for name in ("q", "k", "v"):
        if name in x:
            x[name] = x[name].bfloat16()
    got = call(x, query=query, backend="blocked")
    # The times stay in float32: only the tokens and the result are rounded.
    want = call({name: t.float() for name, t in x.items()}, query=query, backend="blocked")
    assert got.dtype == torch.bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    assert (got.float() - want).abs().max() <= eps * want.abs().max()


def test_scale_multiplies_the_logits():
    x = make_case(1, 5)
    scaled = call(x | {"q": 3.0 * x["q"]}, backend="blocked", scale=0.2)
    torch.testing.assert_close(call(x, backend="blocked", scale=0.6), scaled)
    plain = call(x, backend="blocked")
    torch.testing.assert_close(call(x, backend="blocked", scale=C**-0.5), plain)
