from __future__ import annotations

import math

import pytest
import torch

from osciformer.ops.attention import oracle, reference
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import ConstantPath, resolve_query
from osciformer.ops.oscillator_attention import attend_unchecked

from .cases import attention_inputs

DOUBLE = torch.float64
MODES = ["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]
# One channel per regime: slow, undamped, critical, fast, stiff, undamped and resonant with a
# query mode and a drive, near-critical, free particle.
OMEGA = [1e-3, 0.3, 2.0, 60.0, 40.0, 7.0, 3.0, 0.0]
ZETA = [0.3, 0.0, 1.0, 0.2, 20.0, 0.0, 1.0001, 0.5]
H, C = 2, 4
# Inputs without batch and token axes.
OPERATOR_WIDE = {
    "key_omega", "key_zeta", "value_omega", "value_zeta", "drive_omega", "key_cos", "key_sin",
    "value_cos", "value_sin", "bank", "mode_cos", "mode_sin", "mode_constant",
}  # fmt: skip


def tensor(data):
    return torch.tensor(data, dtype=DOUBLE)


def full_case(batch=2, num_keys=6, rows=4):
    """Everything at once: ties, a gap of 1e-9, a hidden key, a row before all keys."""
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=DOUBLE)

    key_times = (torch.rand(batch, num_keys, generator=g, dtype=DOUBLE) * 1.5).sort(1).values
    key_times[0, 3] = key_times[0, 2]
    key_times[1, 1] = key_times[1, 0] + 1e-9
    rows_low = key_times[:, :1] - 0.2
    query_times = rows_low + torch.rand(batch, rows, generator=g, dtype=DOUBLE).cumsum(1) * 0.5
    query_times[:, :1] = rows_low
    query_times[0, 2] = key_times[0, 2]
    query_times = query_times.sort(1).values
    x = {"q": normal(batch, rows, H, C), "query_times": query_times, "key_times": key_times}
    for name in (
        "k",
        "v",
        "key_velocity",
        "value_velocity",
        "key_equilibrium",
        "value_equilibrium",
    ):
        x[name] = normal(batch, num_keys, H, C)
    x["key_omega"], x["key_zeta"] = tensor(OMEGA).reshape(H, C), tensor(ZETA).reshape(H, C)
    x["value_omega"], x["value_zeta"] = x["key_omega"].flip(0), x["key_zeta"].flip(0)
    x["drive_omega"] = tensor([7.0])
    for name in ("key_cos", "key_sin", "value_cos", "value_sin"):
        x[name] = normal(H, 1, C)
    x["bank"] = tensor([0.5, 7.0])
    x["mode_cos"], x["mode_sin"] = normal(H, 2, C), normal(H, 2, C)
    x["mode_constant"] = normal(H, C)
    mask = torch.ones(batch, num_keys, dtype=torch.bool)
    mask[0, 4] = False
    return x, mask


def self_case(length=5):
    """Self-attention in the plainest form: no drive, no velocity, no rest position, no mask."""
    x, _ = full_case(2, 6, 6)
    x = {name: t if name in OPERATOR_WIDE else t[:1, :length] for name, t in x.items()}
    x["key_times"] = x["query_times"] = tensor([[0.0, 0.2, 0.9, 1.0, 1.4]])[:, :length]
    keep = ("q", "k", "v", "query_times", "key_times", "bank", "mode_cos", "mode_sin")
    return {name: t for name, t in x.items() if name in keep or name.endswith(("omega", "zeta"))}


def run(backend, x, **options):
    return backend.attend(inputs_of(x, **options))


def inputs_of(x, *, query, mask=None, scale=0.5, **options):
    x = dict(x)
    bank, cos, sin = (x.pop(name) for name in ("bank", "mode_cos", "mode_sin"))
    constant = x.pop("mode_constant", None)
    params = {"omega": bank} if query.startswith("ridge") else None
    if query in ("anchored", "learned"):
        params = {"omega": bank, "cos": cos, "sin": sin, "constant": constant}
    frequency = x.pop("drive_omega")
    gains = [x.pop(name, None) for name in ("key_cos", "key_sin", "value_cos", "value_sin")]
    drive = Drive(frequency, *gains) if gains[0] is not None else None
    path = resolve_query(query, x.pop("q"), x["query_times"], params)
    return attention_inputs(path, mask=mask, scale=scale, drive=drive, **x, **options)


def outputs_and_gradients(backend, x, **options):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out, lse, weights = run(backend, leaves, return_weights=True, **options)
    g = torch.Generator().manual_seed(9)
    loss = (out.double() * torch.randn(out.shape, generator=g, dtype=DOUBLE)).sum()
    loss = loss + torch.where(torch.isfinite(lse), lse.double(), 0.0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {"out": out, "lse": lse, "weights": weights}
    results |= {f"d/d {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return results


def assert_agree(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, reference_value in want.items():
        finite = torch.isfinite(reference_value)
        assert torch.equal(torch.isfinite(got[name]), finite), name
        a, b = got[name].double()[finite], reference_value.double()[finite]
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-2)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("strict", [False, True], ids=["ties-seen", "strict"])
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_equals_oracle_with_every_term(query, value, strict):
    x, mask = full_case()
    options = {"query": query, "value": value, "strict": strict, "mask": mask}
    got, want = (outputs_and_gradients(b, x, **options) for b in (reference, oracle))
    assert_agree(got, want, 1e-10)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", MODES)
def test_equals_oracle_in_plain_self_attention(query, value):
    x = self_case()
    got, want = (outputs_and_gradients(b, x, query=query, value=value) for b in (reference, oracle))
    assert_agree(got, want, 1e-10)


@pytest.mark.parametrize("query", ["hold", "linear", "anchored"])
def test_equals_oracle_over_the_whole_range(query):
    x = self_case()
    x["key_times"] = x["query_times"] = tensor([[0.0, 1e-9, 1e-4, 1.0, 10.0]])
    x["key_omega"] = tensor([1e-3, 1e-3, 0.1, 1.0, 10.0, 200.0, 200.0, 200.0]).reshape(H, C)
    x["key_zeta"] = tensor([0.0, 20.0, 1.0, 20.0, 1.0, 0.0, 1.0, 20.0]).reshape(H, C)
    x["value_omega"], x["value_zeta"] = x["key_omega"], x["key_zeta"].flip(0)
    x["key_velocity"] = x["k"] * x["key_omega"]
    got, want = (outputs_and_gradients(b, x, query=query) for b in (reference, oracle))
    assert_agree(got, want, 1e-10)


@pytest.mark.parametrize("query", MODES)
def test_linear_path_and_fits_accept_tied_queries(query):
    x = self_case()
    x["key_times"] = x["query_times"] = tensor([[0.0, 0.2, 0.2, 0.2, 1.4]])
    with torch.no_grad():
        got, want = (run(b, x, query=query) for b in (reference, oracle))
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("query", MODES)
def test_float32_stays_within_single_precision_of_the_oracle(query):
    x, mask = full_case()
    x = {name: t.float() for name, t in x.items()}
    got = run(reference, x, query=query, mask=mask)
    want = run(oracle, x, query=query, mask=mask)
    assert got[0].dtype == torch.float32
    assert_agree({"out": got[0]}, {"out": want[0]}, 1e-5)


def test_bfloat16_content_keeps_exact_times():
    x, _ = full_case()
    times = {n: t for n, t in x.items() if n.endswith("times")}
    x = {n: t.bfloat16() for n, t in x.items() if n in ("q", "k", "v")} | {
        n: x[n].float() for n in ("key_omega", "key_zeta", "value_omega", "value_zeta")
    }
    path = ConstantPath(x.pop("q"))
    inputs = attention_inputs(path, **x, **times, scale=0.5)
    out, want = reference.attend(inputs).out, oracle.attend(inputs).out
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("query", ["hold", "linear", "ridge_causal"])
def test_chunks_of_rows_change_nothing(query, monkeypatch):
    x, mask = full_case()
    whole = outputs_and_gradients(reference, x, query=query, mask=mask)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 1)
    assert_agree(outputs_and_gradients(reference, x, query=query, mask=mask), whole, 1e-11)


@pytest.mark.parametrize("backend", [reference, oracle], ids=["reference", "oracle"])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge_causal"])
def test_fully_masked_sequence_is_zero_with_finite_gradients(backend, query):
    x, mask = full_case()
    mask[1] = False
    result = outputs_and_gradients(backend, x, query=query, mask=mask)
    assert torch.equal(result["out"][1], torch.zeros_like(result["out"][1]))
    assert torch.equal(result["lse"][1], torch.full_like(result["lse"][1], -math.inf))
    assert torch.equal(result["weights"][1], torch.zeros_like(result["weights"][1]))
    # Row 0 lies before every key.
    assert torch.equal(result["out"][:, 0], torch.zeros_like(result["out"][:, 0]))
    for name, t in result.items():
        assert name == "lse" or torch.isfinite(t).all(), name
    assert (result["d/d k"][1] == 0).all()


@pytest.mark.parametrize("backend", [reference, oracle], ids=["reference", "oracle"])
@pytest.mark.parametrize("query", ["hold", "linear"])
def test_absent_keys_may_hold_anything(backend, query):
    x, mask = full_case()
    clean = outputs_and_gradients(backend, x, query=query, mask=mask)
    for name in ("k", "v", "key_velocity", "value_equilibrium"):
        x[name] = torch.where(mask[..., None, None], x[name], math.nan)
    dirty = outputs_and_gradients(backend, x, query=query, mask=mask)
    for name in ("out", "lse", "d/d k", "d/d key_omega", "d/d key_times", "d/d query_times"):
        assert torch.equal(dirty[name], clean[name]), name


@pytest.mark.parametrize("backend", [reference, oracle], ids=["reference", "oracle"])
@pytest.mark.parametrize("query", ["hold", "linear", "anchored"])
def test_one_key_and_one_row_give_the_value(backend, query):
    x = self_case(1)
    out, _, weights = run(backend, x, query=query, return_weights=True)
    torch.testing.assert_close(out, x["v"])
    assert (weights == 1).all()


@pytest.mark.parametrize("backend", ["reference", "oracle", "blocked"])
@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0)])
def test_empty_axes_give_empty_or_zero_output(backend, rows, keys):
    x, _ = full_case()
    x = {
        n: t[:, :rows] if n in ("q", "query_times") else t[:, :keys] if t.shape[:2] == (2, 6) else t
        for n, t in x.items()
    }
    inputs = inputs_of(x, query="hold", return_weights=True)
    out, lse, weights = attend_unchecked(inputs, backend)
    assert torch.equal(out, torch.zeros(2, rows, H, C, dtype=DOUBLE))
    assert torch.equal(lse, torch.full((2, H, rows), -math.inf, dtype=DOUBLE))
    assert weights.shape == (2, H, rows, keys)


@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "ridge_causal", "anchored"])
def test_a_shift_of_all_times_changes_nothing(query):
    x, mask = full_case()
    here = run(reference, x, query=query, mask=mask)[0]
    x["key_times"], x["query_times"] = x["key_times"] + 8.0, x["query_times"] + 8.0
    # The gap of 1e-9 survives the shift to about 7 digits.
    torch.testing.assert_close(
        run(reference, x, query=query, mask=mask)[0], here, rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("query", ["hold", "linear", "ridge_causal", "anchored", "learned"])
def test_rows_ignore_later_tokens_bit_for_bit(query):
    x = self_case()
    before = run(reference, x, query=query)[0]
    for name in ("q", "k", "v"):
        x[name] = x[name].clone()
        x[name][:, 3:] = 5.0
    x["key_times"] = x["query_times"] = tensor([[0.0, 0.2, 0.9, 1.1, 2.0]])
    after = run(reference, x, query=query)[0]
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("term", ["k", "key_velocity"])
def test_logit_is_linear_in_the_key(term):
    x, _ = full_case()
    x = {n: t[:1, :1] if n not in OPERATOR_WIDE else t for n, t in x.items()}
    x["query_times"] = x["key_times"] + 0.7
    zeroed = dict(x)
    for name in ("k", "key_velocity", "key_equilibrium"):
        zeroed[name] = torch.zeros_like(x[name])

    def logit(factor):  # of a single pair: its log-sum-exp
        return run(reference, zeroed | {term: factor * x[term]}, query="hold")[1]

    torch.testing.assert_close(logit(3.0), 3.0 * logit(1.0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", [reference, oracle], ids=["reference", "oracle"])
def test_linear_path_must_have_its_knots_at_the_rows(backend):
    x = self_case()
    path = resolve_query("linear", x["q"], x["query_times"] + 1.0)
    rates = {n: x[n] for n in ("key_omega", "key_zeta", "value_omega", "value_zeta")}
    times = (x["query_times"], x["key_times"])
    with pytest.raises(ValueError, match="knots at query_times"):
        backend.attend(attention_inputs(path, x["k"], x["v"], *times, **rates))
