"""Laws of the layer, on drawn series: what changes nothing, what cannot reach what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .cases import CAUSAL_MODES, DOUBLE, MODES, call, make_case, with_drive, with_mode

PER_KEY = (
    "k", "v", "key_times", "key_velocity", "value_velocity", "key_equilibrium", "value_equilibrium",
)  # fmt: skip
PER_ROW = ("q", "query_times")
DIRECTIONS = ("causal", "bidirectional")
# Modes whose rows do not depend on the other query tokens.
ROW_WISE = ("hold", "anchored", "learned")

seeds = st.integers(0, 10_000)
lengths = st.integers(2, 20)
few = settings(max_examples=6)


def drawn(seed, length, query, *, batch=2, rows=None, smallest=1e-9, **options):
    return with_mode(
        make_case(batch, length, rows, smallest=smallest, seed=seed, **options), query, seed=seed
    )


def run(x, **options):
    return call(x, backend="blocked", **options)


def assert_same(got, want, tolerance=1e-11):
    assert torch.isfinite(got).all()
    error = (got - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"relative error {error:.1e}"


def pick(x, index, names=PER_KEY + PER_ROW):
    """Return the inputs with tokens `index` of the named ones, in that order."""
    return {name: t[:, index] if name in names else t for name, t in x.items()}


@few
@given(seed=seeds, length=lengths, data=st.data())
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_absent_tokens_anywhere_change_nothing(query, direction, seed, length, data):
    x = drawn(seed, length, query)
    want = run(x, query=query, direction=direction)
    absent = data.draw(st.integers(1, 9))
    kept = torch.randperm(length + absent)[:length].sort().values
    mask = torch.zeros(2, length + absent, dtype=torch.bool)
    mask[:, kept] = True
    padded = dict(x)
    for name in (PER_KEY + PER_ROW) if "q" in x else (*PER_KEY, "query_times"):
        t = x[name]
        padded[name] = t.new_full((2, length + absent, *t.shape[2:]), torch.nan)
        padded[name][:, kept] = t
    out = run(padded, query=query, direction=direction, mask=mask)
    assert torch.isfinite(out).all()
    assert_same(out[:, kept], want)


@few
@given(seed=seeds, length=lengths)
@pytest.mark.parametrize("query", MODES)
def test_the_order_of_the_batch_changes_nothing(query, seed, length):
    x = drawn(seed, length, query, batch=3)
    want = run(x, query=query)
    turned = {n: t.flip(0) if n in PER_KEY + PER_ROW else t for n, t in x.items()}
    assert_same(run(turned, query=query).flip(0), want, 1e-13)


@few
@given(seed=seeds, length=lengths, data=st.data())
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", CAUSAL_MODES)
def test_later_tokens_never_reach_earlier_rows(query, value, seed, length, data):
    x = drawn(seed, length, query)
    before = run(x, query=query, value=value)
    n = data.draw(st.integers(1, length - 1))
    changed = {name: t.clone() for name, t in x.items()}
    for name in PER_KEY + PER_ROW:
        if name in changed:
            changed[name][:, n:] = 0.37 + 1.5 * changed[name][:, n:]
    after = run(changed, query=query, value=value)
    assert torch.equal(after[:, :n], before[:, :n])
    assert not torch.equal(after[:, n:], before[:, n:])


@few
@given(seed=seeds, length=lengths, data=st.data())
@pytest.mark.parametrize("query", CAUSAL_MODES)
def test_gradients_of_a_row_in_later_tokens_are_exactly_zero(query, seed, length, data):
    x = {name: t.requires_grad_() for name, t in drawn(seed, length, query).items()}
    n = data.draw(st.integers(0, length - 1))
    tokens = [name for name in PER_KEY + PER_ROW if name in x]
    out = run(x, query=query)[:, n]
    grads = torch.autograd.grad(out.square().sum(), [x[name] for name in tokens])
    for name, grad in zip(tokens, grads, strict=True):
        assert (grad[:, n + 1 :] == 0).all(), name
    assert (grads[tokens.index("v")][:, n] != 0).any()


def test_global_fit_lets_the_future_through():
    x = drawn(0, 6, "ridge")
    before = run(x, query="ridge")
    changed = x | {"q": torch.cat([x["q"][:, :-1], 1 + x["q"][:, -1:]], dim=1)}
    assert not torch.equal(run(changed, query="ridge")[:, :-1], before[:, :-1])


@few
@given(seed=seeds, length=lengths, shift=st.floats(-50, 50))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", ["hold", "linear", "anchored", "ridge", "ridge_causal"])
def test_a_shift_of_all_times_changes_nothing(query, direction, seed, length, shift):
    x = with_drive(drawn(seed, length, query, smallest=1e-2))
    moved = x | {name: x[name] + shift for name in ("query_times", "key_times")}
    # Shifted times have lost digits: of 50 units, 1e-14, seen at 200 radians per unit.
    tolerance = 1e-7 if query.startswith("ridge") else 1e-9
    options = {"query": query, "direction": direction}
    assert_same(run(moved, **options), run(x, **options), tolerance)


def test_a_learned_trajectory_notices_a_shift():
    x = drawn(0, 5, "learned")
    moved = x | {name: x[name] + 1.0 for name in ("query_times", "key_times")}
    assert (run(moved, query="learned") - run(x, query="learned")).abs().max() > 1e-3


@few
@given(seed=seeds, length=lengths, factor=st.floats(1e-3, 1e3))
@pytest.mark.parametrize("query", MODES)
def test_the_unit_of_time_changes_nothing(query, seed, length, factor):
    x = with_drive(drawn(seed, length, query))
    powers = {
        "query_times": 1,
        "key_times": 1,
        "key_velocity": -1,
        "value_velocity": -1,
        "bank": -1,
    }
    powers |= {name: -1 for name in x if name.endswith("omega")}
    # A force is a rate of a rate.
    powers |= {f"{role}_{wave}": -2 for role in ("key", "value") for wave in ("cos", "sin")}
    scaled = {name: t * factor ** powers.get(name, 0) for name, t in x.items()}
    tolerance = 1e-9 if query.startswith("ridge") else 1e-10
    # In some units `blocked` refuses the drive, which `auto` gives to another backend.
    got, want = (call(y, backend="auto", query=query) for y in (scaled, x))
    assert_same(got, want, tolerance)


@few
@given(seed=seeds, length=st.integers(3, 16), data=st.data())
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_the_order_of_keys_at_one_time_changes_nothing(query, direction, seed, length, data):
    x = drawn(seed, length, query, rows=5)
    first = data.draw(st.integers(0, length - 2))
    last = data.draw(st.integers(first + 1, length - 1))
    times = x["key_times"].clone()
    times[:, first : last + 1] = times[:, first : first + 1]
    x["key_times"] = times.sort(1).values
    x["query_times"] = torch.cat([x["query_times"], times[:, first : first + 1]], 1)[:, 1:]
    x["query_times"] = x["query_times"].sort(1).values
    tied = first + torch.randperm(last - first + 1)
    order = torch.cat([torch.arange(first), tied, torch.arange(last + 1, length)])
    options = {"query": query, "direction": direction}
    assert_same(run(pick(x, order, PER_KEY), **options), run(x, **options), 1e-12)


@few
@given(seed=seeds, length=lengths, rows=st.sampled_from([None, 4]))
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "ridge_causal", "anchored"])
def test_bidirectional_attention_has_no_arrow_of_time(query, value, seed, length, rows):
    if query == "ridge_causal":
        # A key at the row's own time meets the fit to the past, not the one to the future.
        x = drawn(seed, length, query, rows=4)
    else:
        x = drawn(seed, length, query, rows=rows, ties=True)
    turned = {n: t.flip(1) if n in PER_KEY + PER_ROW else t for n, t in x.items()}
    for name in ("query_times", "key_times"):
        turned[name] = -turned[name]
    options = {"query": query, "value": value, "direction": "bidirectional"}
    tolerance = 1e-8 if query.startswith("ridge") else 1e-11
    assert_same(run(turned, **options).flip(1), run(x, **options), tolerance)


@few
@given(seed=seeds, length=lengths, a=st.floats(-3, 3), b=st.floats(-3, 3))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", ["average", "point"])
def test_output_is_linear_in_the_values(value, direction, seed, length, a, b):
    x = drawn(seed, length, "hold", extras=False)
    other = torch.randn(x["v"].shape, dtype=DOUBLE)
    options = {"value": value, "direction": direction}
    both = run(x | {"v": a * x["v"] + b * other}, **options)
    apart = a * run(x, **options) + b * run(x | {"v": other}, **options)
    torch.testing.assert_close(both, apart, rtol=1e-11, atol=1e-11)


@few
@given(seed=seeds, length=lengths, data=st.data())
@pytest.mark.parametrize("query", CAUSAL_MODES)
def test_a_prefix_gives_the_same_rows(query, seed, length, data):
    x = drawn(seed, length, query)
    n = data.draw(st.integers(1, length))
    want = run(x, query=query)[:, :n]
    assert_same(run(pick(x, slice(n)), query=query), want, 1e-12)


@few
@given(seed=seeds, length=lengths)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", MODES)
def test_reading_at_the_observations_is_self_attention(query, direction, seed, length):
    x = drawn(seed, length, query)
    both = {n: t for n, t in x.items() if not n.endswith("times")} | {"times": x["key_times"]}
    options = {"query": query, "direction": direction}
    assert_same(run(x, **options), run(both, **options), 1e-13)


@few
@given(seed=seeds, length=lengths, data=st.data())
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("query", ROW_WISE)
def test_fewer_rows_read_the_same(query, direction, seed, length, data):
    x = drawn(seed, length, query)
    options = {"query": query, "direction": direction}
    kept = sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))
    want = run(x, **options)[:, kept]
    assert_same(run(pick(x, kept, PER_ROW), **options), want)


@few
@given(seed=seeds, length=lengths)
@pytest.mark.parametrize("query", ROW_WISE)
def test_further_rows_change_no_other(query, seed, length):
    x = drawn(seed, length, query)
    want = run(x, query=query)
    more = make_case(2, length, 6, seed=seed + 1)
    times, order = torch.cat([x["query_times"], more["query_times"]], 1).sort(dim=1, stable=True)
    y = x | {"query_times": times}
    if "q" in x:
        tokens = torch.cat([x["q"], more["q"]], 1)
        y["q"] = tokens.gather(1, order[..., None, None].expand(tokens.shape))
    place = order.argsort(dim=1)[:, :length]
    out = run(y, query=query)
    assert_same(out.gather(1, place[..., None, None].expand(want.shape)), want)
