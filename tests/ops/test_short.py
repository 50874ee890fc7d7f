"""`short` against the quadrature of the definition, and what it leaves to `blocked`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer.ops import choose_backend
from osciformer.ops.attention import blocked, short
from osciformer.testing import assert_causal, assert_padding_invariant, irregular_batch

from .cases import (
    H,
    assert_agree,
    call,
    make_case,
    outputs_and_gradients,
    tensor,
    with_mode,
)

TOLERANCE = 1e-5  # that of `blocked` in float32
# Waves and overdamped channels, slow and fast, undamped too: all that one product serves.
OMEGA = [0.05, 3.0, 2.0, 200.0, 20.0, 0.7]
ZETA = [0.3, 0.0, 0.96, 0.05, 4.0, 1.7]


def short_case(*args, omega=OMEGA, zeta=ZETA, **options):
    """Return float32 inputs with the spectra above, the other way round for values."""
    x = make_case(*args, **options)
    for name in ("key_equilibrium", "value_equilibrium"):
        x.pop(name, None)
    x["key_omega"], x["key_zeta"] = (tensor(r).reshape(H, -1) for r in (omega, zeta))
    x["value_omega"], x["value_zeta"] = (x[f"key_{n}"].flip(0, 1) for n in ("omega", "zeta"))
    return {name: t.float() for name, t in x.items()}


@pytest.fixture
def no_blocked(monkeypatch):
    """Let a call fail that is handed to `blocked`."""

    def refuse(inputs):
        raise AssertionError(f"not served: {short.unserved(inputs)}")

    monkeypatch.setattr(short, "blocked", SimpleNamespace(attend=refuse))


def judged(x, tolerance=TOLERANCE, **options):
    """Compare with the oracle at the same numbers in float64."""
    got = outputs_and_gradients(x, of_times=False, backend="short", **options)
    rounded = {name: t.double() for name, t in x.items()}
    want = outputs_and_gradients(rounded, of_times=False, backend="oracle", **options)
    assert got["out"].dtype == torch.float32
    assert_agree(got, want, tolerance)


def hide_some(batch, num_keys):
    mask = torch.ones(batch, num_keys, dtype=torch.bool)
    mask[0, num_keys // 2] = False
    mask[1:, -2:] = False
    return mask


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("rows", [None, 5], ids=["self", "cross"])
def test_equals_the_oracle(rows, value, direction):
    # Gaps from 1e-9, ties, absent keys, rows before all keys.
    x = short_case(2, 8, rows, ties=True)
    judged(x, 1e-6, value=value, direction=direction, mask=hide_some(2, 8))


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_rows_that_are_padding_see_what_is_before_them(direction):
    x, mask = short_case(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[0, 6:] = mask[1, 4:] = False
    judged(x, 1e-6, direction=direction, mask=mask)


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("value", ["average", "point"])
def test_without_velocities_equals_the_oracle(value):
    judged(short_case(1, 6, extras=False), 1e-6, value=value)


@pytest.mark.usefixtures("no_blocked")
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slowest=st.floats(-0.6, 0.0),
    fastest=st.floats(0.0, 2.3),
    zeta=st.lists(st.sampled_from([0.0, 0.05, 0.4, 0.9, 1.1, 3.0]), min_size=6, max_size=6),
    exponent=st.floats(-9.0, -6.0),
)
def test_any_spectrum_and_gap_in_range_equals_blocked(seed, slowest, fastest, zeta, exponent):
    omega = torch.logspace(slowest, fastest, 6).tolist()
    zeta = [z if w * z < 40.0 else 0.3 for w, z in zip(omega, zeta, strict=True)]
    x = short_case(2, 17, omega=omega, zeta=zeta, seed=seed, smallest=10.0**exponent)
    got = outputs_and_gradients(x, of_times=False, backend="short")
    rounded = {name: t.double() for name, t in x.items()}
    want = outputs_and_gradients(rounded, of_times=False, backend="blocked")
    assert_agree(got, want, TOLERANCE)


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("rows", [None, 25], ids=["self", "cross"])
def test_decay_beyond_the_range_of_exponents_equals_blocked(rows):
    # About exp(-1800) over the series: blocks of rows have reference times of their own.
    x = short_case(2, 30, rows, omega=[0.3, 3.0, 400.0, 20.0, 150.0, 0.7], seed=3, smallest=1e-8)
    options = {"of_times": False, "mask": hide_some(2, 30), "direction": "bidirectional"}
    got = outputs_and_gradients(x, backend="short", **options)
    rounded = {name: t.double() for name, t in x.items()}
    want = outputs_and_gradients(rounded, backend="blocked", **options)
    assert_agree(got, want, TOLERANCE)


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("value", ["average", "point"])
def test_tiles_change_nothing(value, monkeypatch):
    x = short_case(3, 40, 37, ties=True)
    options = {"of_times": False, "backend": "short", "value": value, "direction": "bidirectional"}
    whole = outputs_and_gradients(x, **options)
    for name, size in (("_TILE", 400), ("_ROWS", 7), ("_KEPT", 0)):
        monkeypatch.setattr(short, name, size)
        assert_agree(outputs_and_gradients(x, **options), whole, 1e-6)


@pytest.mark.usefixtures("no_blocked")
@pytest.mark.parametrize("rows", [None, 4], ids=["self", "cross"])
def test_weights_equal_those_of_the_oracle(rows):
    x = short_case(2, 6, rows, ties=True)
    options = {"return_weights": True, "mask": hide_some(2, 6), "direction": "bidirectional"}
    _, weights = call(x, backend="short", **options)
    _, want = call({n: t.double() for n, t in x.items()}, backend="oracle", **options)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_blocked")
def test_the_past_ignores_the_future_and_padding_reaches_nothing():
    x = short_case(1, 3, extras=False)
    spectra = {n: t for n, t in x.items() if n.endswith(("omega", "zeta"))}

    def apply(tokens, times, mask):
        q, k, v = tokens.unflatten(-1, (3, H, -1)).unbind(2)
        tensors = {"q": q, "k": k, "v": v, "times": times, **spectra}
        return call(tensors, mask=mask, backend="short")

    batch = irregular_batch(3, 9, 18, ties=True, dtype=torch.float32)
    assert_causal(apply, batch.x.nan_to_num(), batch.times.nan_to_num(2.0))
    assert_padding_invariant(apply, batch.x, batch.times, batch.mask, tolerance=1e-6)


@pytest.mark.usefixtures("no_blocked")
def test_bfloat16_tokens_keep_exact_times():
    x = short_case(2, 9)
    half = {n: t.bfloat16() if t.dim() == 4 else t for n, t in x.items()}
    got = call(half, backend="short")
    want = call({n: t.double() for n, t in half.items()}, backend="oracle")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.01)


UNSERVED = {
    "query changes": lambda x: (with_mode(x, "linear"), {"query": "linear"}),
    "rest position": lambda x: (x | {"key_equilibrium": x["k"]}, {}),
    "float64": lambda x: ({n: t.double() for n, t in x.items()}, {}),
    "decays very often": lambda x: (x | {"key_omega": x["key_omega"] * 1e4}, {}),
    "slow": lambda x: (x | {"value_omega": x["value_omega"] * 1e-3}, {}),
    "critical": lambda x: (x | {"value_zeta": torch.ones_like(x["value_zeta"])}, {}),
    "close together": lambda x: (x | {"key_times": x["key_times"] * 0 + 1.0}, {}),
    "one time": lambda x: (x | {n: x[n] * 0 for n in ("query_times", "key_times")}, {}),
}


@pytest.mark.parametrize("why", UNSERVED)
def test_what_is_not_served_runs_on_blocked(why, monkeypatch):
    x, options = UNSERVED[why](short_case(2, 20))
    calls = []
    watched = SimpleNamespace(attend=lambda inputs: calls.append(1) or blocked.attend(inputs))
    monkeypatch.setattr(short, "blocked", watched)
    got = call(x, backend="short", **options)
    assert calls
    assert torch.equal(got, call(x, backend="blocked", **options))


def test_times_with_gradients_run_on_blocked():
    x = short_case(1, 5)
    got, want = (
        outputs_and_gradients(x, of_times=True, backend=b)["gradient of key_times"]
        for b in ("short", "blocked")
    )
    assert torch.equal(got, want)


def test_auto_takes_it_for_short_series_of_single_precision():
    def chosen(channels, dtype, length):
        spectrum = (torch.ones(2, channels), torch.ones(2, channels))
        return choose_backend("auto", None, {"key": spectrum, "value": spectrum}, dtype, length)[0]

    assert chosen(8, torch.float32, 512) == chosen(16, torch.bfloat16, 1024) == "short"
    assert chosen(8, torch.float32, 513) == chosen(16, torch.float32, 1025) == "blocked"
    assert chosen(8, torch.float64, 20) == chosen(8, torch.float32, None) == "blocked"


def test_the_call_itself_is_short_by_default(monkeypatch):
    monkeypatch.setattr(short, "blocked", SimpleNamespace(attend=None))
    x = short_case(1, 9)
    assert torch.equal(call(x), call(x, backend="short"))
    assert not torch.equal(call(x), call(x, backend="blocked"))
