"""The Triton kernels in Triton's interpreter, on the CPU, against `reference` in float64.

Query paths that all rows share are in `test_triton_shared`; what only hardware shows, other
precisions at real sizes, is in `tests/gpu`.
"""

from __future__ import annotations

import importlib
from functools import cache

import mpmath
import pytest
import torch

from osciformer.ops import oscillator_attention
from osciformer.testing import assert_causal, assert_padding_invariant, assert_time_shift_invariant

from .cases import DOUBLE, SPECTRA, call
from .triton_cases import (
    VELOCITIES,
    ZETA,
    assert_within,
    cotangent,
    errors,
    exact,
    make_inputs,
    memory_full_of_nan,
    plain,
    run,
)

triton = pytest.importorskip("triton", reason="kernels need Triton")
tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

operator = importlib.import_module("osciformer.ops.attention.fused.operator")
# A function of that name hides the module.
way_in = importlib.import_module("osciformer.ops.attention.fused.attend")
from osciformer.ops.attention.fused.closed_form import (  # noqa: E402
    load_spectrum,
    oscillate,
    spectral_derivatives,
)
from osciformer.ops.attention.fused.gap_form import (  # noqa: E402
    gap_functions,
    gap_slopes,
    load_form,
    load_slopes,
)
from osciformer.ops.attention.fused.launch import spectrum_table  # noqa: E402

# numpy speaks up where a kernel computes a branch that it then does not take.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def one_patch_a_launch():
    """Spare the interpreter a third of its time: it prepares the language for each device function.

    Mostly it has done so already; then members of the language are no builtins any more.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_lang, scope = (getattr(interpreter, n, None) for n in ("_patch_lang", "_LangPatchScope"))

    def patch_once(fn):
        seen = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        return patch_lang(fn) if any(tl.core.is_builtin(x.load) for x in seen) else scope()

    with pytest.MonkeyPatch.context() as patch:
        if patch_lang is not None and scope is not None:
            patch.setattr(interpreter, "_patch_lang", patch_once)
        yield


# The largest errors seen: 5e-7 of outputs, 2.5e-6 of gradients (of a spectrum). In float32,
# `blocked` errs as much.
TOLERANCE = 5e-6


def assert_close(got, want, tolerance=TOLERANCE):
    found = errors(got, want)
    wrong = {name: f"{e:.1e}" for name, e in found.items() if not e <= tolerance}
    assert not wrong, f"errors above {tolerance:g}: {wrong}"


def check(x, *, judge="reference", tolerance=TOLERANCE, **options):
    """Compare output and all gradients; the judge gets the same rounded inputs in float64.

    Buffers start as NaN: nothing may be read before it is written.
    """
    with memory_full_of_nan() as shapes:
        got = run(x, backend="triton", **options)
    assert len(shapes) > 10
    assert_close(got, run(exact(x), backend=judge, **options), tolerance)
    return got


def uneven_times(length, *, batch=1, seed=3):
    """Gaps of 1e-9 to 1, one of 1e4, and every 16th token at the time of the one before."""
    g = torch.Generator().manual_seed(seed)
    gaps = 10 ** (torch.rand(batch, length, generator=g, dtype=DOUBLE) * 9 - 9)
    gaps[:, 10::16] = 0.0
    gaps[:, 40] = 1e4
    return gaps.cumsum(1)


def tied_times(length, groups):
    """Times that are all different but for groups of places from (first, last)."""
    times = torch.arange(length, dtype=DOUBLE) * 0.037
    for first, last in groups:
        times[first : last + 1] = times[first]
    return times[None]


# --- Sizes: a block is 8 tokens, a tile 64, a span of the far stage 512. --------------------------


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_lengths_around_a_tile(length):
    check(make_inputs(1, length))


@pytest.mark.parametrize(("length", "value"), [(7, "point"), (8, "average"), (9, "point")])
def test_lengths_around_a_block(length, value):
    check(make_inputs(1, length), value=value)


@pytest.mark.parametrize("length", [15, 16, 17])
def test_ties_across_the_borders_of_blocks(length):
    mask = torch.arange(length)[None] % 7 != 5
    check(make_inputs(1, length, times=tied_times(length, [(2, 3), (6, 9), (12, 16)])), mask=mask)


def test_several_tiles_with_tiny_and_huge_gaps():
    check(make_inputs(1, 257, times=uneven_times(257)), judge="blocked", value="point")


def test_two_spans():
    check(make_inputs(1, 577), judge="blocked")


@pytest.mark.parametrize("value", ["average", "point"])
def test_every_stage_with_ties_and_a_mask(value, monkeypatch):
    # Spans of two tiles: the far stage starts at the third one. Ties straddle its border.
    monkeypatch.setattr("osciformer.ops.attention.fused.tiling.SPAN", 128)
    times = tied_times(140, [(60, 66), (120, 131), (135, 137)])
    mask = torch.arange(140)[None] % 5 != 1
    check(make_inputs(1, 140, times=times), judge="blocked", value=value, mask=mask)


@pytest.mark.slow  # some 25 seconds
def test_spans_of_spans_in_long_series(monkeypatch):
    # Spans of two tiles, then of four: both are needed from 513 tokens on.
    monkeypatch.setattr("osciformer.ops.attention.fused.tiling.SPAN", 128)
    monkeypatch.setattr("osciformer.ops.attention.fused.tiling.WIDE", 2)
    times = tied_times(530, [(120, 131), (250, 260), (511, 512)])
    mask = torch.arange(530)[None] % 5 != 1
    check(make_inputs(1, 530, times=times), judge="blocked", mask=mask)


@pytest.mark.parametrize(("batch", "heads"), [(3, 1), (1, 3), (2, 2)])
def test_parts_of_a_large_call(batch, heads, monkeypatch):
    monkeypatch.setattr("osciformer.ops.attention.fused.launch._MANY_ROWS", 1)
    mask = torch.arange(17).expand(batch, 17) % 5 != torch.arange(batch)[:, None]
    check(make_inputs(batch, 17, heads=heads), judge="blocked", mask=mask)


@pytest.mark.parametrize(("channels", "length"), [(32, 17), (64, 65), (128, 17)])
def test_head_sizes(channels, length):
    check(make_inputs(1, length, channels=channels))


def test_batch_and_heads_with_everything_in_float32():
    x = {name: t.float() for name, t in make_inputs(2, 20, heads=2).items()}
    found = check(x)
    assert {t.dtype for t in found.values()} == {torch.float32}


# --- Modes. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "value", "direction"),
    [(65, "point", "causal"), (66, "average", "bidirectional"), (20, "point", "bidirectional")],
)
def test_other_values_and_directions(length, value, direction):
    check(make_inputs(1, length), value=value, direction=direction)


@pytest.mark.parametrize(
    ("velocities", "value"),
    [
        ((), "average"),
        ((), "point"),
        (("key_velocity",), "point"),
        (("value_velocity",), "average"),
    ],
    ids=["none-average", "none-point", "key-point", "value-average"],
)
def test_without_velocities(velocities, value):
    check(make_inputs(1, 20, velocities=velocities), value=value)


@pytest.mark.parametrize("scale", [2.5, 1e-3], ids=str)
def test_other_scales(scale):
    check(make_inputs(1, 65), scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.4], ids=str)
def test_scales_that_no_kernel_serves(scale):
    x = make_inputs(1, 65)
    way_in._say_once.cache_clear()
    with pytest.warns(UserWarning, match="is not positive"):
        got = run(x, backend="triton", scale=scale)
    assert_close(got, run(exact(x), backend="blocked", scale=scale))


# --- Rows with times of their own. ----------------------------------------------------------------


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_queries_with_times_of_their_own(direction):
    x = make_inputs(1, 40, 33)
    assert (x["query_times"] < x["key_times"][:, :1]).sum() > 2
    assert torch.isin(x["query_times"], x["key_times"]).sum() > 5
    mask = torch.arange(40)[None] % 6 != 2 if direction == "bidirectional" else None
    found = check(x, value="point", direction=direction, mask=mask)
    if direction == "causal":
        assert not found["out"][x["query_times"] < x["key_times"][:, :1]].any()


def test_one_query_far_after_many_keys():
    x = make_inputs(1, 20, 1)
    x["query_times"] = x["key_times"][:, -1:] + 50.0
    check(x)


# --- Times and spectra. ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["average", "point"])
def test_every_regime_in_one_head_channel_by_channel(value):
    # Tiny and huge gaps; each channel is measured against its own largest entry. A gradient of the
    # spectrum is then a single number. That of omega has two parts, since gamma = zeta omega; they
    # may cancel, and the other part is what zeta's gradient tells.
    x = make_inputs(1, 64, times=uneven_times(64))
    assert set(ZETA) <= set(x["key_zeta"][0].tolist())
    got = run(x, backend="triton", value=value)
    want = run(exact(x), backend="reference", value=value)
    assert_close(got, want)
    for name, expected in want.items():
        error = (got[name].double() - expected.double()).abs().flatten(0, -2).amax(0)
        size = expected.double().abs().flatten(0, -2).amax(0)
        if name.endswith("omega"):
            zeta = name.replace("omega", "zeta")
            size = torch.maximum(size, (want[zeta] * x[zeta] / x[name]).abs()[0])
        error = error / size
        assert error.max() <= (2e-5 if name in SPECTRA else TOLERANCE), (name, error)


def test_free_particles():
    x = make_inputs(1, 20)
    for name in SPECTRA:
        x[name][:, ::3] = 0.0
    check(x, direction="bidirectional")


def test_tiny_gaps_only():
    # Nothing swings: gradients of the spectra are far below those of the tokens, and may be noise.
    x = make_inputs(1, 20)
    x["times"] = x["times"] * 1e-9
    got, want = run(x, backend="triton"), run(exact(x), backend="reference")
    for name in SPECTRA:
        assert float((got.pop(name) - want.pop(name)).abs().max()) <= 1e-12, name
    assert_close(got, want)


def test_ties_within_a_tile_and_across_its_border():
    times = tied_times(70, [(0, 1), (7, 12), (60, 66), (68, 69)])
    check(make_inputs(1, 70, times=times), direction="bidirectional")


@pytest.mark.parametrize(("length", "direction"), [(65, "causal"), (9, "bidirectional")])
def test_all_tokens_at_one_time(length, direction):
    times = torch.full((1, length), 2.5, dtype=DOUBLE)
    check(make_inputs(1, length, times=times), direction=direction)


# --- Masks. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_ragged_masks_with_nan_in_absent_tokens(direction):
    place = torch.arange(30)[None]
    mask = (place < torch.tensor([[30], [17], [0]])) & (place % 7 != 4)
    x = make_inputs(3, 30)
    for name in ("times", "q", "k", "v", *VELOCITIES):
        x[name][~mask] = torch.nan
    found = check(x, mask=mask, direction=direction)
    assert not any(found[name][2].any() for name in ("out", "q", "k", "v", *VELOCITIES))


# --- Precision and what wants gradients. ----------------------------------------------------------


@pytest.fixture
def rounding_to_nearest(monkeypatch):
    """Let the interpreter round float32 to bfloat16 as hardware does; it cuts the digits off."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    cut_off = interpreter.InterpreterBuilder.cast_impl

    def cast(builder, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cut_off(builder, src, dst_type)
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize(
    ("dtype", "length", "options"),
    [
        (torch.bfloat16, 65, {}),
        (torch.bfloat16, 20, {"value": "point", "direction": "bidirectional"}),
        (torch.float16, 65, {}),
    ],
    ids=["bf16-average", "bf16-point", "fp16"],
)
def test_half_precision_errs_as_plain_pytorch_does(dtype, length, options):
    x = make_inputs(1, length, dtype=dtype)
    want = run(exact(x), backend="reference", **options)
    got = run(x, backend="triton", **options)
    assert got["out"].dtype == got["q"].dtype == got["key_velocity"].dtype == dtype
    assert_within(errors(got, want), errors(plain(x, dtype, **options), want), dtype)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("rows", [None, 9], ids=["self", "cross"])
def test_the_yardstick_of_precision_is_the_formula(rows, direction, value):
    x = make_inputs(2, 12, rows, heads=2, dtype=DOUBLE)
    mask = torch.arange(12)[None] % 5 != torch.tensor([[1], [4]])
    options = {"value": value, "direction": direction, "mask": mask}
    got = plain(x, DOUBLE, budget=12 * 32 * 2 * 5, **options)
    assert_close(got, run(x, backend="reference", **options), 1e-11)


def test_frozen_spectra_change_no_other_gradient():
    x = make_inputs(1, 65)
    want = run(x, backend="triton")
    got = run(x, backend="triton", frozen=SPECTRA)
    assert_close(got, {name: want[name] for name in got}, 1e-7)


def test_gradients_of_a_few_inputs_alone():
    x = make_inputs(1, 20)
    want = run(x, backend="triton")
    for kept in ("value_velocity", "key_zeta"):
        frozen = [name for name in x if name != kept]
        got = run(x, backend="triton", frozen=frozen)
        assert got.keys() == {"out", kept}
        torch.testing.assert_close(got[kept], want[kept])


def test_strided_tokens():
    x = make_inputs(1, 20)
    strided = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t
        for name, t in x.items()
    }
    assert_close(run(strided, backend="triton"), run(x, backend="triton"), 0.0)


# --- Closed forms on the device. ------------------------------------------------------------------

NAMES = ("g11", "g12", "i12", "F", "J")
# Relative to the largest value up to that time. The float64 mode is there for float32 tokens.
FORM_TOLERANCES = {
    True: (1e-7, 2e-7, 5e-7, 2e-7, 3e-5),
    False: (1e-6, 1e-6, 5e-6, 3e-6, 2e-3),
}


@triton.jit
def evaluate_forms(
    s_ptr,
    table,
    found,
    N: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
    OF_GAP: tl.constexpr,
):
    """Write the five functions of `NAMES`, ``[5, N, C]`` float64."""
    i = tl.arange(0, N)
    c = tl.arange(0, C)
    s = tl.load(s_ptr + i)[:, None]
    if OF_GAP:
        wide = tl.broadcast_to(c[None, :], (N, C))
        form, widest = load_form(table, 0, C, wide, PRECISE)
        slopes = load_slopes(table, 0, C, wide, PRECISE)
        g11, ct, g12, i12 = gap_functions(s, form, widest, PRECISE)
        f, j = gap_slopes(s, form, slopes, ct, g12, i12, widest, PRECISE)
    else:
        spectrum = load_spectrum(table, 0, C, c, PRECISE)
        g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
        f, j = spectral_derivatives(s, spectrum, ct, g12, i12, PRECISE)
    at = found + i[:, None] * C + c[None, :]
    tl.store(at, g11.to(tl.float64))
    tl.store(at + N * C, g12.to(tl.float64))
    tl.store(at + 2 * N * C, i12.to(tl.float64))
    tl.store(at + 3 * N * C, f.to(tl.float64))
    tl.store(at + 4 * N * C, j.to(tl.float64))


@cache
def exact_forms():
    """Return times, gamma, omega^2 and ``[5, N, C]`` by many digits.

    Derivatives of `moments` would not do as a judge: for far overdamped channels at short times
    they have lost more digits than the functions under test.
    """
    times = [0.0, *torch.logspace(-6, 3, 31, dtype=DOUBLE).tolist()]
    zeta = torch.tensor([*ZETA, 0.9, 1.001, 10.0, 1000.0], dtype=DOUBLE)[torch.arange(64) % 13]
    omega = torch.logspace(-3, 3, 64, dtype=DOUBLE)[torch.arange(64) * 37 % 64]
    gamma, omega2 = omega * zeta, omega**2

    def forms(s, g, w):
        root = mpmath.sqrt(g * g - w)
        decay = mpmath.exp(-g * s)
        g12 = mpmath.re(decay * mpmath.sinh(root * s) / root)
        g11 = mpmath.re(decay * mpmath.cosh(root * s)) + g * g12
        return g11, g12, (1 - g11) / w

    found = torch.zeros(5, len(times), 64, dtype=DOUBLE)
    with mpmath.workdps(120):
        for c in range(64):
            g, w = mpmath.mpf(gamma[c].item()), mpmath.mpf(omega2[c].item())
            h = w * mpmath.mpf(10) ** -40  # also keeps critical channels off the root's zero
            for n, s in enumerate(times):
                up, down = forms(s, g, w + h), forms(s, g, w - h)
                values = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
                slopes = [(a - b) / (2 * h) for a, b in zip(up, down, strict=True)]
                found[:, n, c] = torch.tensor([float(x) for x in (*values, *slopes[1:])])
    return torch.tensor(times, dtype=DOUBLE), gamma, omega2, found


@pytest.mark.parametrize("zeta", ["any", "at most 1"])
@pytest.mark.parametrize(
    ("is_precise", "of_gap"),
    [(True, False), (False, False), (False, True)],
    ids=["float64", "float32", "float32 of gaps"],
)
def test_closed_forms_and_their_derivatives(is_precise, of_gap, zeta):
    s, gamma, omega2, want = exact_forms()
    if zeta != "any":
        # Without an overdamped channel a head takes no branch. Its head size must be a power of 2.
        kept = (gamma**2 <= omega2).nonzero()[:16, 0]
        gamma, omega2, want = gamma[kept], omega2[kept], want[..., kept]
    found = torch.full_like(want, torch.nan, memory_format=torch.contiguous_format)
    table = spectrum_table(gamma[None], omega2[None])
    evaluate_forms[(1,)](s, table, found, *want.shape[1:], is_precise, of_gap)
    largest = want.abs().cummax(1).values
    assert not found[largest == 0].any()
    error = ((found - want).abs() / largest.where(largest > 0, 1.0)).amax((1, 2))
    for name, e, tolerance in zip(NAMES, error, FORM_TOLERANCES[is_precise], strict=True):
        assert e <= tolerance, (name, float(e))


# --- Graphs. --------------------------------------------------------------------------------------


def test_one_compiled_graph_gives_the_same():
    x = make_inputs(1, 5)
    options = {
        "backend": "triton",
        "direction": "bidirectional",
        "mask": torch.arange(5)[None] != 2,
    }
    want = run(x, **options)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return call(x, **options)

    leaves = {name: t.clone().requires_grad_(name != "times") for name, t in x.items()}
    out = compiled(leaves)
    del leaves["times"]
    grads = torch.autograd.grad((out.double() * cotangent(out)).sum(), list(leaves.values()))
    assert_close({"out": out.detach()} | dict(zip(leaves, grads, strict=True)), want, 1e-6)


def recorded(name, x, monkeypatch, **options):
    """Return the arguments that a call and its backward pass hand to a custom operator."""
    calls, original = [], getattr(operator, name)

    def spy(*args):
        calls.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
        return original(*args)

    monkeypatch.setattr(operator, name, spy)
    run(x, backend="triton", **options)
    assert len(calls) == 1
    return calls[0]


def test_opcheck_of_the_forward_operator(monkeypatch):
    args = recorded("_forward", make_inputs(1, 3), monkeypatch)
    for a in args[:7]:
        a.requires_grad_()
    # The compiled graph above stands for the rest.
    torch.library.opcheck(
        torch.ops.osciformer.fused_forward.default,
        tuple(args),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("frozen", [(), SPECTRA], ids=["all", "frozen"])
def test_opcheck_of_the_backward_operator(frozen, monkeypatch):
    x = make_inputs(1, 3, velocities=("key_velocity",) if frozen else VELOCITIES)
    args = recorded("_backward", x, monkeypatch, frozen=frozen, mask=torch.arange(3)[None] != 1)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.osciformer.fused_backward.default, tuple(args), test_utils=tests
    )


# --- Laws. ----------------------------------------------------------------------------------------


def as_layer(**options):
    """Return the operator as a function of one tensor ``[B, N, 16]``, for `osciformer.testing`."""
    x = make_inputs(1, 1)
    spectra = {name: x[name] for name in SPECTRA}

    def apply(tokens, times, mask):
        q = tokens[:, :, None].float()
        k, v = q.flip(-1), q.roll(3, -1)
        return oscillator_attention(
            q, k, v, times, times, **spectra, mask=mask, backend="triton",
            key_velocity=v, value_velocity=q, **options,
        )  # fmt: skip

    return apply


def layer_inputs():
    g = torch.Generator().manual_seed(4)
    times = tied_times(66, [(20, 22), (63, 64)])
    return torch.randn(1, 66, 16, generator=g), times


@pytest.mark.parametrize("value", ["average", "point"])
def test_no_token_reaches_an_earlier_row(value):
    assert_causal(as_layer(value=value), *layer_inputs(), positions=(22, 63))


def test_padding_changes_nothing():
    assert_padding_invariant(as_layer(), *layer_inputs(), tolerance=TOLERANCE)


def test_a_shift_of_all_times_changes_nothing():
    assert_time_shift_invariant(as_layer(), *layer_inputs(), shift=1e5, tolerance=TOLERANCE)


# --- What the kernels do not serve. ---------------------------------------------------------------


def with_a_drive():
    x = make_inputs(1, 5) | {"drive_omega": torch.tensor([1.3], dtype=DOUBLE)}
    return x | {"key_cos": torch.ones(1, 1, 16), "value_sin": torch.ones(1, 1, 16)}


def with_a_rest_position():
    return make_inputs(1, 5) | {"key_equilibrium": torch.ones(1, 5, 1, 16)}


UNSERVED = {
    "the query is not 'hold'|sinusoids of its own": (
        lambda: make_inputs(1, 5),
        {"query": "ridge_causal"},
    ),
    "the head size is 24": (lambda: make_inputs(1, 5, channels=24), {}),
    "tokens are float64": (lambda: make_inputs(1, 5, dtype=DOUBLE), {}),
    "there is a drive": (with_a_drive, {}),
    "or a rest position": (with_a_rest_position, {}),
    "weights are asked for": (lambda: make_inputs(1, 5), {"return_weights": True}),
}


@pytest.fixture
def nothing_said():
    way_in._say_once.cache_clear()
    yield
    way_in._say_once.cache_clear()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("reason", UNSERVED)
def test_blocked_serves_the_rest_and_says_so_once(reason):
    make, options = UNSERVED[reason]
    x = make()
    with pytest.warns(UserWarning, match=f"({reason}).*'blocked' runs instead"):
        got = call(x, backend="triton", **options)
    again = call(x, backend="triton", **options)  # a warning here would be an error
    want = call(x, backend="blocked", **options)
    for each in (got, again):
        torch.testing.assert_close(each, want, rtol=0.0, atol=0.0)


@pytest.mark.usefixtures("nothing_said")
def test_times_that_want_gradients_go_to_blocked():
    x = make_inputs(1, 5)
    x["times"].requires_grad_()
    with pytest.warns(UserWarning, match="times want gradients"):
        out = call(x, backend="triton")
    want = call(x, backend="blocked")
    got, expected = (torch.autograd.grad(o.sum(), x["times"])[0] for o in (out, want))
    assert torch.equal(got, expected)
    assert got.any()


def test_no_gpu_and_no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match=r"on cpu: .*CUDA.*'blocked'.*TRITON_INTERPRET=1"):
        call(make_inputs(1, 3), backend="triton")


def test_no_triton(monkeypatch):
    monkeypatch.setattr(way_in, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"not installed: pip install triton.*'blocked'"):
        call(make_inputs(1, 3), backend="triton")
