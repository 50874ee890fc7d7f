"""Bad input is refused at the door; the message names the argument, the place and the values."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from osciformer.ops import BACKEND_VARIABLE, choose_backend, oscillator_attention

from .cases import GAINS, SPECTRA, C, H, call, make_case, tensor, with_drive, with_mode

TOKENS = ("q", "k", "v", "key_velocity", "value_velocity", "key_equilibrium", "value_equilibrium")


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)


def with_value(x, name, index, value):
    x[name] = x[name].clone()
    x[name][index] = value
    return x


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["key_times", "query_times"])
def test_times_that_are_not_finite(name, bad):
    x = with_value(make_case(2, 5, 4), name, (1, 3), bad)
    message = rf"{name} must be finite; series 1 has {name}\[1, 3\] = {bad}"
    with pytest.raises(ValueError, match=message):
        call(x)


@pytest.mark.parametrize("name", ["key_times", "query_times"])
def test_decreasing_times(name):
    x = make_case(2, 5, 4)
    x[name] = torch.arange(float(x[name].shape[1])).double().repeat(2, 1)
    x = with_value(x, name, (1, 2), 0.5)
    message = (
        rf"{name} must not decrease within a series; series 1 has {name}\[1, 2\] = 0\.5 <"
        rf" {name}\[1, 1\] = 1\.0\. Sort"
    )
    with pytest.raises(ValueError, match=message):
        call(x)


def test_decreasing_times_are_found_across_absent_ones():
    x = make_case(1, 4, 2)
    x["key_times"] = tensor([[0.0, 3.0, math.nan, 1.0]])
    mask = torch.tensor([[True, True, False, True]])
    message = r"key_times\[0, 3\] = 1\.0 < key_times\[0, 1\] = 3\.0"
    with pytest.raises(ValueError, match=message):
        call(x, mask=mask)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30, 1e30], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["self", "cross"])
def test_absent_times_may_hold_anything(junk, shared):
    x = make_case(2, 5, None if shared else 3)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], dtype=torch.bool)
    want = call(x, mask=mask)
    x["key_times"] = x["key_times"].masked_fill(~mask, junk)
    if shared:
        x["query_times"] = x["key_times"].clone()
    got = call(x, mask=mask)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[mask] if shared else got, want[mask] if shared else want)


def test_equal_times_are_allowed():
    x = make_case(1, 3)
    x["key_times"] = x["query_times"] = tensor([[1.0, 1.0, 1.0]])
    assert torch.isfinite(call(x)).all()


@pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_below_zero_or_not_finite(name, bad):
    x = with_value(make_case(1, 3), name, (1, 2), bad)
    with pytest.raises(ValueError, match=rf"{name} must be finite and .*{name}\[1, 2\] = {bad}"):
        call(x)


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_of_zero_are_allowed(name):
    x = make_case(1, 3)
    assert torch.isfinite(call(x | {name: torch.zeros_like(x[name])})).all()


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_another_shape(name):
    x = make_case(2, 5, 4)
    x[name] = x[name][:, :-1]
    letters, length = ("M", 4) if name == "q" else ("N", 5)
    wrong = "v" if name == "k" else name  # k sets the shape, the next one differs from it
    length = 4 if name == "k" else length
    message = rf"{wrong} must have shape \[B, {letters}, H, C\] = \[2, {length}, 2, 3\], got"
    with pytest.raises(ValueError, match=message):
        call(x)


def test_tokens_without_a_head_axis():
    x = make_case(1, 3)
    message = r"k must have shape \[B, N, H, C\], got \[1, 3, 6\]"
    with pytest.raises(ValueError, match=message):
        call(x | {"k": x["k"].flatten(2)})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("key_times", (2, 4), r"key_times must have shape \[B, N\] = \[2, 5\], got \[2, 4\]"),
        ("query_times", (3, 4), r"query_times must have shape \[B, M\] with B = 2.*got \[3, 4\]"),
        ("query_times", (4,), r"query_times must have shape \[B, M\].*got \[4\]"),
        ("query_times", (2, 6), r"q must have shape \[B, M, H, C\] = \[2, 6, 2, 3\], got"),
    ],
)
def test_times_of_another_shape(name, shape, message):
    with pytest.raises(ValueError, match=message):
        call(make_case(2, 5, 4) | {name: torch.zeros(shape).double()})


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_of_another_shape(name):
    x = make_case(1, 3)
    message = rf"{name} must have shape \[H, C\] = \[2, 3\], got \[3\]"
    with pytest.raises(ValueError, match=message):
        call(x | {name: x[name][0]})


@pytest.mark.parametrize("name", [*TOKENS, *SPECTRA, "query_times", "key_times"])
def test_integer_tensors(name):
    x = make_case(1, 3)
    message = rf"{name} must be a floating-point tensor, got torch.int64; convert"
    with pytest.raises(TypeError, match=message):
        call(x | {name: x[name].long()})


@pytest.mark.parametrize("name", ["k", "key_times", "value_zeta"])
def test_what_is_no_tensor(name):
    x = make_case(1, 3)
    with pytest.raises(TypeError, match=rf"{name} must be a tensor, got list"):
        call(x | {name: x[name].tolist()})


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(1, 3), TypeError, r"mask must be a bool tensor.*got torch.float32"),
        (torch.ones(1, 3).long(), TypeError, r"mask must be a bool tensor.*got torch.int64"),
        ([[True] * 3], TypeError, r"mask must be a bool tensor.*got list"),
        (torch.ones(1, 4).bool(), ValueError, r"mask must have shape .* = \[1, 3\], got \[1, 4\]"),
    ],
    ids=["float", "integer", "list", "shape"],
)  # fmt: skip
def test_masks(mask, error, message):
    with pytest.raises(error, match=message):
        call(make_case(1, 3), mask=mask)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"query": "cubic"}, "query must be one of hold, linear, ridge, .*got 'cubic'"),
        ({"value": "mean"}, "value must be one of average, point; got 'mean'"),
        ({"direction": "both"}, "direction must be one of causal, bidirectional; got 'both'"),
        ({"backend": "cuda"}, "backend must be one of auto, oracle, .*got 'cuda'"),
    ],
    ids=["query", "value", "direction", "backend"],
)
def test_unknown_modes(option, message):
    with pytest.raises(ValueError, match=message):
        call(make_case(1, 3), **option)


def test_only_learned_goes_without_query_tokens():
    x = make_case(1, 3)
    del x["q"]
    with pytest.raises(ValueError, match="q is None: only query='learned'"):
        call(x)
    assert call(with_mode(x, "learned"), query="learned").shape == (1, 3, H, C)


def test_unknown_query_parameters():
    x = make_case(1, 3)
    spectra = {name: x[name] for name in SPECTRA}
    tokens = [x[name] for name in ("q", "k", "v", "query_times", "key_times")]
    with pytest.raises(ValueError, match=r"unknown keys \['modes'\].*allowed: omega, ridge, mask"):
        oscillator_attention(*tokens, **spectra, query="ridge", query_params={"modes": 3})


@pytest.mark.parametrize("name", GAINS)
def test_drive_gains_of_other_heads_or_channels(name):
    x = with_drive(make_case(1, 3))
    message = rf"drive.{name} must have shape \[H, Md, C\] with H = 2 and C = 3"
    with pytest.raises(ValueError, match=message):
        call(x | {name: torch.cat([x[name]] * 2, dim=2)})


@pytest.mark.parametrize("backend", ["auto", "oracle", "reference", "blocked"])
def test_every_backend_refuses_bad_times(backend):
    x = with_value(make_case(1, 3), "key_times", (0, 2), math.nan)
    with pytest.raises(ValueError, match=r"key_times\[0, 2\] = nan"):
        call(x, backend=backend)


# numpy speaks up where the interpreter computes with what is refused later.
@pytest.mark.filterwarnings("ignore:.*encountered.*:RuntimeWarning")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="kernels need Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu asks the kernels on the GPU")
@pytest.mark.parametrize("query", ["hold", "linear", "ridge"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0], ids=str)
def test_kernels_bear_bad_times_until_they_are_refused(query, bad):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 12, 1, 16, generator=g).unbind(0)
    times = torch.arange(12.0).double().unsqueeze(0)
    times[0, 7] = bad
    spectrum = torch.ones(1, 16)
    spectra = dict.fromkeys(SPECTRA, spectrum)
    with pytest.raises(ValueError, match=r"key_times\[0, 7\]"):
        oscillator_attention(q, k, v, times, times, query=query, backend="triton", **spectra)
    times[0, 7] = 7.0
    spectra["key_zeta"] = spectrum.index_fill(1, torch.tensor([3]), bad)
    with pytest.raises(ValueError, match=r"key_zeta\[0, 3\]"):
        oscillator_attention(q, k, v, times, times, query=query, backend="triton", **spectra)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_interpreter")
def test_triton_is_refused_on_a_cpu_with_advice():
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run here: .*'blocked'"):
        call(make_case(1, 3), backend="triton")


@pytest.mark.usefixtures("no_interpreter")
def test_triton_in_the_environment_is_refused_too(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    with pytest.raises(RuntimeError, match="backend='triton' cannot run here"):
        call(make_case(1, 3))
    assert choose_backend("blocked", None, spectra_of(make_case(1, 3)))[0] == "blocked"


def spectra_of(x):
    return {role: (x[f"{role}_omega"], x[f"{role}_zeta"]) for role in ("key", "value")}


def test_auto_is_blocked_and_says_why():
    name, reason = choose_backend("auto", None, spectra_of(make_case(1, 3)))
    assert name == "blocked"
    assert "exact" in reason
    assert choose_backend("oracle", None, spectra_of(make_case(1, 3))) == ("oracle", "asked for")


@pytest.mark.parametrize("is_there", [True, False], ids=["triton", "no-triton"])
def test_auto_goes_by_device_and_dtype(is_there, monkeypatch):
    monkeypatch.setattr(
        "osciformer.ops._dispatch.triton.missing", lambda device: None if is_there else "no Triton"
    )

    class OnCuda:
        """What `choose_backend` looks at of a tensor on a GPU."""

        device = torch.device("cuda")

    spectra = {role: (OnCuda(), OnCuda()) for role in ("key", "value")}
    assert choose_backend("auto", None, spectra, torch.float64)[0] == "blocked"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name, reason = choose_backend("auto", None, spectra, dtype)
        assert name == ("triton" if is_there else "blocked")
        assert reason
    assert choose_backend("auto", None, spectra_of(make_case(1, 3)))[0] == "blocked"


@pytest.mark.parametrize("backend", ["oracle", "reference", "blocked"])
def test_the_environment_replaces_auto(backend, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    spectra = spectra_of(make_case(1, 3))
    name, reason = choose_backend("auto", None, spectra)
    assert name == backend
    assert BACKEND_VARIABLE in reason
    assert choose_backend("blocked", None, spectra)[0] == "blocked"
    x = make_case(1, 3)
    assert torch.equal(call(x), call(x, backend=backend))


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "fast")
    with pytest.raises(ValueError, match=rf"{BACKEND_VARIABLE} must be one of .*got 'fast'"):
        call(make_case(1, 3))
