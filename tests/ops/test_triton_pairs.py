"""The kernels of short series in Triton's interpreter, against judges in float64."""

from __future__ import annotations

import importlib

import pytest
import torch

from osciformer.ops import oscillator_attention
from osciformer.ops.attention.query import ConstantPath
from osciformer.testing import assert_causal, assert_padding_invariant

from .cases import DOUBLE, SPECTRA, attention_inputs, call
from .interpreter_cases import (  # noqa: F401  (fixtures)
    TOLERANCE,
    assert_close,
    check,
    no_blocked,
    quick_interpreter,
    rounding_to_nearest,
    tied_times,
    uneven_times,
    way_in,
)
from .triton_cases import (
    VELOCITIES,
    ZETA,
    assert_within,
    cotangent,
    errors,
    exact,
    make_inputs,
    plain,
    run,
)

# A tile has 32 rows and 32 keys.
PAIRS = importlib.import_module("osciformer.ops.attention.triton.pair_call")
OPERATORS = importlib.import_module("osciformer.ops.attention.triton.operators")

# numpy speaks up where a kernel computes a branch that it then does not take.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Collect the kernels that run, and let none but those of this file run."""
    names = []
    launch = PAIRS.launch

    def noted(kernel, *args, **options):
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(PAIRS, "launch", noted)
    monkeypatch.setattr(OPERATORS, "run_forward", None)
    return names


def judged(x, **options):
    """Compare output and all gradients with the judge's."""
    return check(x, buffers=7, **options)


# --- Sizes. ---------------------------------------------------------------------------------------


def test_each_pass_is_one_kernel(launches):
    judged(make_inputs(1, 20, channels=4))
    assert launches == ["pair_forward", "pair_backward"]


@pytest.mark.parametrize(("length", "channels"), [(1, 1), (32, 5), (33, 24), (65, 4), (9, 32)])
def test_lengths_around_a_tile_and_head_sizes(length, channels):
    judged(make_inputs(1, length, channels=channels))


def test_batch_and_heads_with_everything_in_float32():
    x = {name: t.float() for name, t in make_inputs(2, 20, heads=2, channels=4).items()}
    got, _ = judged(x)
    assert {t.dtype for t in got.values()} == {torch.float32}


def test_equals_the_quadrature_of_the_definition():
    x = make_inputs(1, 5, channels=4, window=3.0)
    got, want = call(x, backend="triton"), call(exact(x), backend="oracle")
    assert_close({"out": got}, {"out": want})


# --- Modes. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("velocities", "value"),
    [((), "average"), (("key_velocity",), "point"), (("value_velocity",), "average")],
    ids=["none-average", "key-point", "value-average"],
)
def test_without_velocities(velocities, value):
    judged(make_inputs(1, 20, channels=4, velocities=velocities), value=value, scale=2.5)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_queries_with_times_of_their_own(direction):
    x = make_inputs(1, 41, 35, channels=4)
    assert (x["query_times"] < x["key_times"][:, :1]).sum() > 2
    assert torch.isin(x["query_times"], x["key_times"]).sum() > 5
    mask = torch.arange(41)[None] % 6 != 2 if direction == "bidirectional" else None
    got, _ = judged(x, value="point", direction=direction, mask=mask)
    if direction == "causal":
        assert not got["out"][x["query_times"] < x["key_times"][:, :1]].any()


def test_one_query_far_after_many_keys():
    x = make_inputs(1, 40, 1, channels=4)
    x["query_times"] = x["key_times"][:, -1:] + 50.0
    judged(x)


@pytest.mark.parametrize("strict", [False, True])
def test_logsumexps_of_rows_that_see_something_or_nothing(strict):
    x = make_inputs(1, 9, 12, channels=4)
    q = x.pop("q")
    found = []
    for backend in ("triton", "reference"):
        tokens = {n: t if backend == "triton" else t.double() for n, t in x.items()}
        inputs = attention_inputs(
            ConstantPath(q if backend == "triton" else q.double()), **tokens, strict=strict
        )
        module = importlib.import_module(f"osciformer.ops.attention.{backend}")
        found.append(module.attend(inputs))
    got, want = found
    assert (want.lse == float("-inf")).sum() > 2
    torch.testing.assert_close(got.lse.double(), want.lse.double(), rtol=1e-5, atol=1e-5)


# --- Times and spectra. ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["average", "point"])
def test_every_regime_in_one_head_channel_by_channel(value):
    # As the test of that name of the tiled kernels, which says why. The slowest channel has little
    # left of a sum of terms that a gap of 1e4 makes large.
    x = make_inputs(1, 44, times=uneven_times(44))
    assert set(ZETA) <= set(x["key_zeta"][0].tolist())
    got, want = judged(x, value=value)
    for name, expected in want.items():
        error = (got[name].double() - expected.double()).abs().flatten(0, -2).amax(0)
        size = expected.double().abs().flatten(0, -2).amax(0)
        if name.endswith("omega"):
            zeta = name.replace("omega", "zeta")
            size = torch.maximum(size, (want[zeta] * x[zeta] / x[name]).abs()[0])
        error = error / size
        assert error.max() <= (5e-5 if name in SPECTRA else TOLERANCE), (name, error)


def test_free_particles():
    x = make_inputs(1, 20, channels=4)
    for name in SPECTRA:
        x[name][:, ::3] = 0.0
    judged(x)


@pytest.mark.parametrize("scale", [1e-9, 1e-40])
def test_tiny_gaps_only(scale):
    # Nothing swings: gradients of the spectra are far below those of the tokens, and may be noise.
    x = make_inputs(1, 20, channels=4)
    x["times"] = x["times"] * scale
    got, want = run(x, backend="triton"), run(exact(x), backend="reference")
    # Below 1e-30 gaps are those of ties, where velocities do not count.
    for name in (*SPECTRA, *(VELOCITIES if scale < 1e-30 else ())):
        assert float((got.pop(name) - want.pop(name)).abs().max()) <= 1e-12, name
    assert_close(got, want)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_ties_across_a_border_of_tiles(direction):
    times = tied_times(40, [(0, 1), (7, 12), (30, 36), (38, 39)])
    judged(make_inputs(1, 40, channels=4, times=times), direction=direction)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_all_tokens_at_one_time(direction):
    times = torch.full((1, 35), 2.5, dtype=DOUBLE)
    judged(make_inputs(1, 35, channels=4, times=times), direction=direction)


# --- Masks, memory, precision. --------------------------------------------------------------------


def test_ragged_masks_with_nan_in_absent_tokens():
    place = torch.arange(40)[None]
    mask = (place < torch.tensor([[37], [0]])) & (place % 7 != 4)
    x = make_inputs(2, 40, channels=4)
    for name in ("times", "q", "k", "v", *VELOCITIES):
        x[name][~mask] = torch.nan
    got, _ = judged(x, mask=mask, direction="bidirectional")
    assert not any(got[name][1].any() for name in ("out", "q", "k", "v", *VELOCITIES))


def test_strided_tokens_are_read_in_place():
    x = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t
        for name, t in make_inputs(2, 20, heads=2, channels=4).items()
    }
    assert not x["k"].is_contiguous()
    judged(x)
    # Channels that do not follow each other are copied.
    judged({n: t.mT.contiguous().mT if t.ndim == 4 else t for n, t in x.items()})


@pytest.mark.parametrize("kept", ["value_velocity", "key_zeta"])
def test_gradients_of_a_few_inputs_alone(kept):
    x = make_inputs(1, 20, channels=4)
    got, _ = judged(x, frozen=[name for name in x if name != kept])
    assert got.keys() == {"out", kept}


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bfloat16, "average"), (torch.bfloat16, "point"), (torch.float16, "average")],
    ids=["bf16-average", "bf16-point", "fp16"],
)
def test_half_precision_errs_as_plain_pytorch_does(dtype, value):
    x = make_inputs(1, 40, dtype=dtype)
    want = run(exact(x), backend="blocked", value=value)
    got = run(x, backend="triton", value=value)
    assert got["out"].dtype == got["q"].dtype == got["key_velocity"].dtype == dtype
    assert_within(errors(got, want), errors(plain(x, dtype, value=value), want), dtype)


# --- Laws. ----------------------------------------------------------------------------------------


def test_the_future_reaches_no_row_and_padding_nothing():
    x = make_inputs(1, 1, channels=4)
    spectra = {name: x[name] for name in SPECTRA}

    def apply(tokens, times, mask):
        q = tokens[:, :, None].float()
        k, v = q.flip(-1), q.roll(3, -1)
        velocities = {"key_velocity": v, "value_velocity": q}
        return oscillator_attention(
            q, k, v, times, times, **spectra, **velocities, mask=mask, backend="triton"
        )

    g = torch.Generator().manual_seed(4)
    tokens, times = torch.randn(1, 40, 4, generator=g), tied_times(40, [(20, 22), (31, 32)])
    assert_causal(apply, tokens, times, positions=(22, 31))
    assert_padding_invariant(apply, tokens, times, tolerance=TOLERANCE)


# --- Graphs, and which calls take the kernels. ----------------------------------------------------


def test_one_compiled_graph_gives_the_same():
    x, options = make_inputs(1, 5, channels=4), {"mask": torch.arange(5)[None] != 2}
    want = run(x, backend="triton", **options)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return call(x, backend="triton", **options)

    leaves = {name: t.clone().requires_grad_(name != "times") for name, t in x.items()}
    out = compiled(leaves)
    del leaves["times"]
    grads = torch.autograd.grad((out.double() * cotangent(out)).sum(), list(leaves.values()))
    assert_close({"out": out.detach()} | dict(zip(leaves, grads, strict=True)), want, 1e-6)


@pytest.mark.parametrize("is_spectral", [True, False])
def test_opcheck(is_spectral):
    x = make_inputs(1, 3, channels=4, velocities=("key_velocity",))
    times, mask = x["times"], torch.arange(3)[None] != 1
    spectra = [x[name] for name in SPECTRA]
    tokens = [x["q"], x["k"], x["v"], x["key_velocity"], None, *spectra]
    given, options = (*tokens, times, times, mask), (0.5, True, False)
    operators, tests = torch.ops.osciformer, ["test_schema", "test_faketensor"]
    out, lse = operators.pair_forward(*given, *options)
    torch.library.opcheck(
        operators.pair_backward.default,
        (*given, out, lse, out, lse, *options, is_spectral),
        test_utils=tests,
    )
    for t in tokens:
        if t is not None:
            t.requires_grad_()
    torch.library.opcheck(
        operators.pair_forward.default,
        (*given, *options),
        test_utils=[*tests, "test_autograd_registration"],
    )


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "is_paired"),
    [
        (180, (32, 180, 4, 32), torch.bfloat16, True),
        (300, (32, 180, 4, 32), torch.bfloat16, False),
        (180, (32, 300, 4, 32), torch.bfloat16, False),
        (180, (32, 180, 4, 32), torch.float32, False),
        (180, (8, 180, 4, 32), torch.float32, True),
        (20, (32, 1024, 8, 8), torch.float32, True),  # a head size that no tiled kernel has
        (1025, (1, 20, 1, 24), torch.float32, False),
        (20, (1, 1025, 1, 32), torch.float32, False),
        (20, (1, 20, 1, 129), torch.float32, False),
    ],
)
def test_calls_of_little_work_and_odd_head_sizes_take_them(rows, size, dtype, is_paired):
    batch, keys, heads, channels = size
    tokens = torch.empty(size, dtype=dtype, device="meta")
    query = torch.empty(batch, rows, heads, channels, dtype=dtype, device="meta")
    spectra = dict.fromkeys(SPECTRA, torch.ones(heads, channels))
    times = {"query_times": torch.empty(batch, rows), "key_times": torch.empty(batch, keys)}
    inputs = attention_inputs(ConstantPath(query), tokens, tokens, **times, **spectra)
    assert way_in.is_paired(inputs) == is_paired
    supported = way_in.unsupported(inputs, dtype) is None
    assert supported == (is_paired or channels == 32)
