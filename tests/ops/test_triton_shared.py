"""The Triton kernels under query paths that all rows share, in Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch

from osciformer.math.oscillator import propagator
from osciformer.ops import oscillator_attention
from osciformer.ops.attention.query import LinearPath, SinusoidPath
from osciformer.testing import assert_causal, assert_padding_invariant, assert_time_shift_invariant

from .cases import DOUBLE, SPECTRA, call
from .test_triton import (  # noqa: F401  (fixtures)
    TOLERANCE,
    assert_close,
    check,
    layer_inputs,
    one_patch_a_launch,
    rounding_to_nearest,
    tied_times,
    uneven_times,
)
from .triton_cases import (
    VELOCITIES,
    assert_within,
    cotangent,
    errors,
    exact,
    gap_moments,
    make_inputs,
    memory_full_of_nan,
    plain,
    run,
)

attend = importlib.import_module("osciformer.ops.attention.fused.attend")
launch = importlib.import_module("osciformer.ops.attention.fused.launch")
paths = importlib.import_module("osciformer.ops.attention.fused.path_operator")
operator = importlib.import_module("osciformer.ops.attention.fused.shared_operator")
stages = importlib.import_module("osciformer.ops.attention.fused.shared_launch")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

QUERIES = ("linear", "ridge", "learned")


def path_inputs(query, *args, **options):
    """Return `make_inputs` with what a path needs: three modes, or those of a trajectory."""
    x = make_inputs(*args, **options)
    if query != "linear":
        x["bank"] = torch.tensor([0.3, 2.0, 20.0], dtype=DOUBLE)
    if query == "learned":
        g = torch.Generator().manual_seed(1)
        heads, channels = x.pop("q").shape[2:]
        for n in ("cos", "sin"):
            x[f"mode_{n}"] = torch.randn(heads, 3, channels, generator=g).double()
    return x


@pytest.fixture
def short_spans(monkeypatch):
    """Make two tiles a span, so that three spans are a short series."""
    monkeypatch.setattr("osciformer.ops.attention.fused.tiling.SPAN", 128)


@pytest.fixture(autouse=True)
def no_blocked(monkeypatch):
    """Let nothing be handed on to `blocked` by the kernels' way in."""
    monkeypatch.setattr(attend, "blocked", None)


# --- Moments over gaps, against the closed forms of `blocked`. ------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_precise", "tolerance"),
    [("line", True, 2e-6), ("modes", True, 2e-6), ("modes", False, 1e-4)],
)
def test_moments_over_gaps_and_their_gradients(kind, is_precise, tolerance):
    # Zero, tiny and huge gaps; free particles; modes at rest, in resonance and beside it.
    x = exact(make_inputs(1, 70, heads=2, times=uneven_times(70)))
    omega, zeta, bank = x["key_omega"], x["key_zeta"], torch.tensor([0.0, 0.3, 2.0, 2.001, 20.0])
    bank = bank.double()
    omega[0, :3] = torch.tensor([0.0, 2.0, 20.0])
    zeta[0, :3] = 0.0
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(1, 2, 5, 2, 16, generator=g, dtype=DOUBLE)
    inputs = [t.clone().requires_grad_() for t in (x["q"], weight, bank, omega, zeta)]
    q, weight, bank, omega, zeta = inputs
    spectrum = torch.stack([omega * zeta, omega**2])
    with memory_full_of_nan():
        if kind == "line":
            path = LinearPath(q, x["times"])
            got = paths.moments_of_line(q.float(), spectrum, x["times"], 128)
        else:
            origin = torch.full((1, 1), 0.25, dtype=DOUBLE)
            path = SinusoidPath(bank, None, *weight[:, None].unbind(-2), origin)
            got = paths.moments_of_modes(
                weight, bank, spectrum, x["times"], origin, 128, is_precise=is_precise
            )
    assert not got[:, :, 69:].any()
    want = gap_moments(path, x["times"], omega, zeta)
    # How large they can be: the first is an integral over the gap, the second a slower one.
    gap = torch.diff(x["times"])[:, None, :, None]
    size = torch.stack([gap.expand(-1, 2, -1, 16), gap * gap / (1 + gap * omega[:, None])], dim=2)
    error = (got.unflatten(0, (1, 2))[:, :, :, :69] - want).abs() / size.where(size > 0, 1.0)
    assert error.max() <= tolerance, error.amax((0, 1, 3))

    noise = torch.randn(want.shape, generator=g, dtype=DOUBLE) / size.detach().where(size > 0, 1.0)
    padded = torch.nn.functional.pad(noise, (0, 0, 0, 59)).flatten(0, 1)
    got, want = (
        torch.autograd.grad((a * b).sum(), inputs, allow_unused=True)
        for a, b in ((got, padded), (want, noise))
    )
    for name, a, b in zip(("q", "weight", "bank", "omega", "zeta"), got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert float((a - b).abs().max() / b.abs().max()) <= tolerance, name


# --- Moments over spans, against sums written out. ------------------------------------------------


def path_call(length, *, batch=2, heads=2, channels=16):
    """Return a call in float32 whose moments are noise, and what it was made of."""
    x = make_inputs(batch, length, heads=heads, channels=channels, window=length / 40)
    spectrum = torch.stack([x["key_omega"] * x["key_zeta"], x["key_omega"] ** 2])
    tables = launch.spectrum_tables(spectrum, spectrum)
    padded = launch.padded_length(length, channels, torch.float32)
    g = torch.Generator().manual_seed(2)
    moment = torch.randn(batch * heads, 2, padded, channels, generator=g)
    moment[:, :, length - 1 :] = 0.0
    tokens = (x["k"], x["k"], x["v"], None, None, x["times"], None)
    return launch.Call(*tokens, *tables, 1.0, True, False, moment), x


def moved(moment, seconds, omega, zeta):
    """Return moments ``[B, H, 2, ..., C]`` times the propagator after ``[B, ...]``."""
    shape = (1, omega.shape[0], *[1] * (seconds.ndim - 1), omega.shape[1])
    p11, p12, p21, p22 = propagator(
        seconds[:, None, ..., None], omega.view(shape), zeta.view(shape)
    )
    first, second = moment.unbind(2)
    return torch.stack([first * p11 + second * p21, first * p12 + second * p22], dim=2)


def sums_written_out(moment, times, omega, zeta, span, group):
    """Return row factors, moments between spans and beyond them, token by token in float64."""
    batch, length = times.shape
    moment = moment.unflatten(0, (batch, -1))[:, :, :, :length]
    place = torch.arange(length)
    spans = place // span
    starts = times[:, ::span]
    by_row = moved(moment, times - starts[:, spans], omega, zeta)
    before = (place[None, :] < place[:, None]) & (spans[None, :] == spans[:, None])
    factor = torch.einsum("jg,bhpgc->bhpjc", before.double(), by_row)
    # Gap g as seen from the end of span i.
    ends = torch.cat([starts[:, 1:], times[:, -1:]], dim=1)
    seconds = (times[:, None, :] - ends[:, :, None]).clamp(min=0)
    seen = moved(moment[:, :, :, None].expand(-1, -1, -1, ends.shape[1], -1, -1), seconds, omega,
                 zeta)  # fmt: skip
    columns = torch.arange(ends.shape[1])
    is_group = (spans // group)[None, :] == (columns // group)[:, None]
    later = (spans[None, :] > columns[:, None]) & is_group  # [i, g]
    beyond = torch.einsum("ig,bhpigc->bhipc", later.double(), seen)
    until = later[None] & (spans[None, None, :] < columns[:, None, None])  # [j, i, g]
    between = torch.einsum("jig,bhpigc->bhjipc", until.double(), seen)
    kept = (columns[:, None] // group == columns[None, :] // group)[:, :, None, None]
    return factor, torch.where(kept, between, 0.0), beyond


def assert_channels_close(got, want, tolerance=2e-6):
    """Compare channel by channel, relative to its largest entry: frequencies are 1e-2 to 1e2."""
    error = (got.double() - want).abs().flatten(0, -2).amax(0)
    assert (error <= tolerance * want.abs().flatten(0, -2).amax(0)).all(), error


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("stage", ["middle", "far"])
def test_moments_over_spans_and_their_gradients(stage):
    length = 300 if stage == "middle" else 600
    call_, x = path_call(length, batch=2 if stage == "middle" else 1)
    cut = getattr(call_.tiling, stage)
    spans, group = launch.num_groups(call_, cut)
    assert (spans, group) == ((5, 2) if stage == "middle" else (5, 5))
    with memory_full_of_nan():
        prepared = launch.empty_set_up(call_)
        path = stages.prepare_path(call_, cut, prepared, 18)
    planes = (call_.batch, call_.heads)
    leaves = [t.detach().clone().requires_grad_() for t in (x["key_omega"], x["key_zeta"])]
    moment = call_.moment.double().requires_grad_()
    factor, between, beyond = sums_written_out(moment, x["times"], *leaves, cut.span, group)
    assert_channels_close(prepared.key_factor.unflatten(0, planes)[:, :, :, :length], factor)
    assert_channels_close(path.beyond.unflatten(0, planes)[:, :, :spans], beyond)
    rows, columns = (torch.arange(spans).view(s) for s in ((spans, 1), (1, spans)))
    kept = (columns < rows) & (columns // group == rows // group)
    table = prepared.matrices[0].unflatten(0, planes)[:, :, :, :, 4:6].double()
    j, i = kept.nonzero().unbind(1)
    assert_channels_close(table[:, :, j, i % group], between[:, :, j, i])

    # Gradients along noise; entries that no row meets have none.
    g = torch.Generator().manual_seed(3)
    noise = [torch.randn(t.shape, generator=g, dtype=DOUBLE) for t in (factor, between, beyond)]
    noise[1] *= kept[:, :, None, None]
    wanted = zip((factor, between, beyond), noise, strict=True)
    loss = sum((a * b).sum() for a, b in wanted)
    want = torch.autograd.grad(loss, [moment, *leaves])
    to_factor = torch.zeros(call_.num_planes, 4, call_.padded, call_.channels)
    to_factor[:, :2, :length] = noise[0].flatten(0, 1)
    grads = stages.begin_backward(
        call_, x["v"], x["v"], torch.zeros(call_.num_planes, call_.padded)
    )[0]
    grads.between = torch.zeros(call_.num_planes, spans, group, 2, call_.channels)
    grads.between.unflatten(0, planes)[:, :, j, i % group] = noise[1][:, :, j, i].float()
    to_beyond = torch.zeros_like(path.beyond)
    to_beyond[:, :spans] = noise[2].flatten(0, 1)
    found = stages.SharedGradients(grads, torch.zeros_like(call_.moment))
    with memory_full_of_nan():
        stages._finish_path(call_, cut, prepared, path, found, to_factor, to_beyond)
    # Of the padding anything will do.
    assert_channels_close(found.moment[:, :, :length], want[0][:, :, :length])
    grads.value_spectrum = grads.key_spectrum
    to_gamma, to_omega2 = grads.spectra()[0]
    omega, zeta = (t.detach() for t in leaves)
    for got, expected in (
        (to_gamma * zeta + 2.0 * omega * to_omega2, want[1]),
        (to_gamma * omega, want[2]),
    ):
        assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5


# --- Sizes. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_lengths_around_a_tile(length):
    judge = "reference" if length < 3 else "blocked"
    check(path_inputs("linear", 1, length), judge=judge, query="linear")


@pytest.mark.parametrize(("query", "value"), [("linear", "average"), ("learned", "point")])
def test_several_tiles_with_tiny_and_huge_gaps(query, value):
    x = path_inputs(query, 1, 130, times=uneven_times(130))
    check(x, judge="blocked", query=query, value=value)


def test_two_spans():
    check(path_inputs("linear", 1, 577), judge="blocked", query="linear")


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("linear", {"direction": "bidirectional", "value": "point"}),
        ("ridge", {}),
        ("learned", {"value": "point"}),
    ],
    ids=QUERIES,
)
def test_every_stage_with_ties_and_a_mask(query, options):
    # Ties straddle the borders of tiles and of spans; a third span has a whole one before it.
    length = 262 if query == "ridge" else 140
    times = tied_times(length, [(60, 66), (120, 131), (length - 9, length - 6)])
    mask = torch.arange(length)[None] % 9 != 4
    x = path_inputs(query, 1, length, times=times)
    # A gradient of a spectrum, a sum that has cancelled, was off by 1e-5.
    check(x, judge="blocked", tolerance=2e-5, query=query, mask=mask, **options)


@pytest.mark.parametrize(("channels", "length"), [(32, 17), (64, 17), (128, 17)])
def test_head_sizes(channels, length):
    x = path_inputs("linear", 1, length, channels=channels)
    check(x, judge="blocked", query="linear")


def test_batch_and_heads():
    check(path_inputs("linear", 2, 66, heads=2), judge="blocked", query="linear", value="point")


# --- Modes, times, masks. -------------------------------------------------------------------------


def test_both_directions():
    check(path_inputs("learned", 1, 20), query="learned", direction="bidirectional")


@pytest.mark.parametrize(
    ("velocities", "value"),
    [((), "average"), (("key_velocity",), "point"), (("value_velocity",), "average")],
    ids=["none-average", "key-point", "value-average"],
)
def test_without_velocities(velocities, value):
    check(path_inputs("linear", 1, 20, velocities=velocities), query="linear", value=value)


def test_a_constant_in_the_path():
    x = path_inputs("learned", 1, 40)
    x["mode_constant"] = torch.linspace(-1, 1, 16, dtype=DOUBLE)[None]
    check(x, query="learned")


@pytest.mark.parametrize("value", ["average", "point"])
def test_every_regime_in_one_head_channel_by_channel(value):
    x = path_inputs("linear", 1, 64, times=uneven_times(64))
    got = run(x, backend="triton", query="linear", value=value)
    want = run(exact(x), backend="reference", query="linear", value=value)
    assert_close(got, want)
    for name, expected in want.items():
        error = (got[name].double() - expected.double()).abs().flatten(0, -2).amax(0)
        error = error / expected.double().abs().flatten(0, -2).amax(0)
        assert error.max() <= (1e-4 if name in SPECTRA else TOLERANCE), (name, error)


def test_tiny_gaps_only():
    # Nothing swings: gradients of the spectra are far below those of the tokens, and may be noise.
    x = path_inputs("linear", 1, 20)
    x["times"] = x["times"] * 1e-9
    got = run(x, backend="triton", query="linear")
    want = run(exact(x), backend="reference", query="linear")
    for name in SPECTRA:
        assert float((got.pop(name) - want.pop(name)).abs().max()) <= 1e-12, name
    assert_close(got, want)


def test_free_particles():
    x = path_inputs("linear", 1, 20)
    for name in SPECTRA:
        x[name][:, ::3] = 0.0
    check(x, query="linear", direction="bidirectional")


@pytest.mark.parametrize("query", ["linear", "ridge"])
def test_all_tokens_at_one_time(query):
    length = 65 if query == "linear" else 9
    times = torch.full((1, length), 2.5, dtype=DOUBLE)
    check(path_inputs(query, 1, length, times=times), query=query)


def test_ragged_masks_with_nan_in_absent_tokens():
    query = "ridge"
    place = torch.arange(30)[None]
    mask = (place < torch.tensor([[30], [17], [0]])) & (place % 7 != 4)
    x = path_inputs(query, 3, 30)
    for name in ("times", "q", "k", "v", *VELOCITIES):
        x[name][~mask] = torch.nan
    found = check(x, query=query, mask=mask)
    assert not any(found[name][2].any() for name in ("out", "k", "v", *VELOCITIES))


# --- Precision, gradients, graphs. ----------------------------------------------------------------


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", QUERIES)
def test_the_yardstick_of_precision_is_the_formula(query, value):
    times = tied_times(12, [(0, 1), (4, 6)])
    x = exact(path_inputs(query, 1, 12, heads=2, times=times))
    got = plain(x, DOUBLE, query=query, value=value, budget=12 * 12 * 2 * 5)
    assert_close(got, run(x, backend="reference", query=query, value=value), 1e-11)


@pytest.mark.usefixtures("rounding_to_nearest", "short_spans")
@pytest.mark.parametrize(
    ("query", "dtype"),
    [("linear", torch.bfloat16), ("ridge", torch.bfloat16), ("linear", torch.float16)],
    ids=["linear-bf16", "ridge-bf16", "linear-fp16"],
)
def test_half_precision_errs_as_plain_pytorch_does(query, dtype):
    x = path_inputs(query, 1, 140, dtype=dtype)
    got = run(x, backend="triton", query=query)
    assert got["out"].dtype == got["q"].dtype == got["key_velocity"].dtype == dtype
    want = run(exact(x), backend="blocked", query=query)
    assert_within(errors(got, want), errors(plain(x, dtype, query=query), want), dtype)


def test_gradients_of_a_few_inputs_alone():
    x = path_inputs("ridge", 1, 20)
    want = run(x, backend="triton", query="ridge")
    for kept in ("key_zeta", "bank"):
        frozen = [name for name in x if name != kept]
        got = run(x, backend="triton", query="ridge", frozen=frozen)
        assert got.keys() == {"out", kept}
        torch.testing.assert_close(got[kept], want[kept])


def test_one_compiled_graph_gives_the_same():
    x = path_inputs("linear", 1, 5)
    options = {"query": "linear", "backend": "triton"}
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


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_opcheck(name, monkeypatch):
    calls, original = [], getattr(operator, f"_{name}")

    def spy(*args):
        calls.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
        return original(*args)

    monkeypatch.setattr(operator, f"_{name}", spy)
    x = path_inputs("linear", 1, 3, velocities=("key_velocity",))
    run(x, backend="triton", query="linear", mask=torch.arange(3)[None] != 1)
    (args,) = calls
    tests = ["test_schema", "test_faketensor"]
    if name == "forward":
        tests.append("test_autograd_registration")
        for a in args[:8]:
            if a is not None:
                a.requires_grad_()
    op = getattr(torch.ops.osciformer, f"shared_{name}").default
    torch.library.opcheck(op, tuple(args), test_utils=tests)


# --- Laws. ----------------------------------------------------------------------------------------


def as_layer():
    """Return the operator as a function of one tensor ``[B, N, 16]``, for `osciformer.testing`."""
    x = make_inputs(1, 1)
    spectra = {name: x[name] for name in SPECTRA}

    def apply(tokens, times, mask):
        q = tokens[:, :, None].float()
        k, v = q.flip(-1), q.roll(3, -1)
        return oscillator_attention(
            q, k, v, times, times, **spectra, mask=mask, backend="triton", query="linear",
            key_velocity=v, value_velocity=q,
        )  # fmt: skip

    return apply


def test_no_token_reaches_an_earlier_row():
    assert_causal(as_layer(), *layer_inputs(), positions=(22, 63))


def test_padding_changes_nothing():
    assert_padding_invariant(as_layer(), *layer_inputs(), tolerance=TOLERANCE)


def test_a_shift_of_all_times_changes_nothing():
    assert_time_shift_invariant(as_layer(), *layer_inputs(), shift=1e5, tolerance=TOLERANCE)
