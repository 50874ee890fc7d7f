"""Integrals of shared query paths by the Triton kernels, stage by stage, in the interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch

from osciformer.math.oscillator import propagator
from osciformer.ops.attention.query import LinearPath, SinusoidPath

from .cases import DOUBLE
from .interpreter_cases import quick_interpreter, uneven_times  # noqa: F401  (a fixture)
from .triton_cases import exact, gap_integrals, make_inputs, memory_full_of_nan

calls = importlib.import_module("osciformer.ops.attention.triton.call")
launch = importlib.import_module("osciformer.ops.attention.triton.launch")
operators = importlib.import_module("osciformer.ops.attention.triton.operators")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


# --- Integrals over gaps, against the closed forms of `blocked`. ----------------------------------


@pytest.mark.parametrize(
    ("kind", "is_precise", "tolerance"),
    [("line", True, 2e-6), ("modes", True, 2e-6), ("modes", False, 1e-4)],
)
def test_integrals_over_gaps_and_their_gradients(kind, is_precise, tolerance):
    # Zero, tiny and huge gaps; free particles; modes at rest, in resonance and beside it.
    x = exact(make_inputs(1, 70, heads=2, times=uneven_times(70)))
    omega, zeta, bank = x["key_omega"], x["key_zeta"], torch.tensor([0.0, 2.0, 2.001, 20.0])
    bank = bank.double()
    omega[0, :3] = torch.tensor([0.0, 2.0, 20.0])
    zeta[0, :3] = 0.0
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(1, 2, 4, 2, 16, generator=g, dtype=DOUBLE)
    inputs = [t.clone().requires_grad_() for t in (x["q"], weight, bank, omega, zeta)]
    q, weight, bank, omega, zeta = inputs
    spectrum = torch.stack([omega * zeta, omega**2])
    with memory_full_of_nan():
        if kind == "line":
            path = LinearPath(q, x["times"])
            given = (q.float(), None, None, spectrum, None)
        else:
            origin = torch.full((1, 1), 0.25, dtype=DOUBLE)
            path = SinusoidPath(bank, None, *weight[:, None].unbind(-2), origin)
            given = (None, weight, bank, spectrum, origin)
        got = operators.path_forward(*given, x["times"], 128, is_precise)
    assert not got[:, :, 69:].any()
    want = gap_integrals(path, x["times"], omega, zeta)
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


# --- Integrals over spans, against sums written out. ----------------------------------------------


def path_call(length, *, batch=1, heads=1, channels=16):
    """Return a call in float32 whose path integrals are noise, and what it was made of."""
    x = make_inputs(batch, length, heads=heads, channels=channels, window=length / 40)
    table = calls.spectrum_table(torch.stack([x["key_omega"] * x["key_zeta"], x["key_omega"] ** 2]))
    padded = calls.padded_length(length, channels, torch.float32)
    g = torch.Generator().manual_seed(2)
    path = torch.randn(batch * heads, 2, padded, channels, generator=g)
    path[:, :, length - 1 :] = 0.0
    keys, values = (launch.Side(x[name], None, table) for name in "kv")
    tokens = calls.Tokens(x["k"], keys, values, x["times"], None)
    return calls.Call(tokens, 1.0, True, False, path), x


def moved(path, seconds, omega, zeta):
    """Return integrals ``[B, H, 2, ..., C]`` times the propagator after ``[B, ...]``."""
    shape = (1, omega.shape[0], *[1] * (seconds.ndim - 1), omega.shape[1])
    p11, p12, p21, p22 = propagator(
        seconds[:, None, ..., None], omega.view(shape), zeta.view(shape)
    )
    first, second = path.unbind(2)
    return torch.stack([first * p11 + second * p21, first * p12 + second * p22], dim=2)


def sums_written_out(path, times, omega, zeta, span, group):
    """Return row factors, integrals between spans and to the ends of groups, in float64."""
    batch, length = times.shape
    path = path.unflatten(0, (batch, -1))[:, :, :, :length]
    place = torch.arange(length)
    spans = place // span
    starts = times[:, ::span]
    by_row = moved(path, times - starts[:, spans], omega, zeta)
    before = (place[None, :] < place[:, None]) & (spans[None, :] == spans[:, None])
    factor = torch.einsum("jg,bhpgc->bhpjc", before.double(), by_row)
    # Gap g as seen from the end of span i.
    ends = torch.cat([starts[:, 1:], times[:, -1:]], dim=1)
    seconds = (times[:, None, :] - ends[:, :, None]).clamp(min=0)
    seen = moved(path[:, :, :, None].expand(-1, -1, -1, ends.shape[1], -1, -1), seconds, omega,
                 zeta)  # fmt: skip
    columns = torch.arange(ends.shape[1])
    is_group = (spans // group)[None, :] == (columns // group)[:, None]
    later = (spans[None, :] > columns[:, None]) & is_group  # [i, g]
    remainder = torch.einsum("ig,bhpigc->bhipc", later.double(), seen)
    until = later[None] & (spans[None, None, :] < columns[:, None, None])  # [j, i, g]
    between = torch.einsum("jig,bhpigc->bhjipc", until.double(), seen)
    kept = (columns[:, None] // group == columns[None, :] // group)[:, :, None, None]
    return factor, torch.where(kept, between, 0.0), remainder


def assert_channels_close(got, want, tolerance=2e-6):
    """Compare channel by channel, relative to its largest entry: frequencies are 1e-2 to 1e2."""
    error = (got.double() - want).abs().flatten(0, -2).amax(0)
    assert (error <= tolerance * want.abs().flatten(0, -2).amax(0)).all(), error


@pytest.mark.parametrize(
    ("stage", "length", "span", "want_spans", "want_group"),
    # Tiles in the spans that there are; and more spans than one program takes.
    [("middle", 600, 512, 10, 8), ("far", 1100, 128, 9, 9)],
    ids=["middle", "far"],
)
def test_integrals_over_spans_and_their_gradients(
    stage, length, span, want_spans, want_group, monkeypatch
):
    monkeypatch.setattr("osciformer.ops.attention.triton.call.SPAN", span)
    call_, x = path_call(length, **{"batch" if stage == "middle" else "heads": 2})
    cut = call_.tiling.forward[["middle", "far"].index(stage)]
    spans, group = call_.num_spans(cut)
    assert (spans, group) == (want_spans, want_group)
    with memory_full_of_nan():
        set_up, path = launch.with_path(call_, cut, launch.empty_spans(call_), is_spectral=True)
    planes = (call_.batch, call_.heads)
    leaves = [t.detach().clone().requires_grad_() for t in (x["key_omega"], x["key_zeta"])]
    gaps = call_.path.double().requires_grad_()
    factor, between, remainder = sums_written_out(gaps, x["times"], *leaves, cut.span, group)
    assert_channels_close(set_up.key_factor.unflatten(0, planes)[:, :, :, :length], factor)
    assert_channels_close(path.remainder.unflatten(0, planes)[:, :, :spans], remainder)
    rows, columns = (torch.arange(spans).view(s) for s in ((spans, 1), (1, spans)))
    kept = (columns < rows) & (columns // group == rows // group)
    table = set_up.key_matrix.unflatten(0, planes)[:, :, :, :, 4:6].double()
    j, i = kept.nonzero().unbind(1)
    assert_channels_close(table[:, :, j, i % group], between[:, :, j, i])

    # Gradients along noise; entries that no row meets have none.
    g = torch.Generator().manual_seed(3)
    noise = [torch.randn(t.shape, generator=g, dtype=DOUBLE) for t in (factor, between, remainder)]
    noise[1] *= kept[:, :, None, None]
    wanted = zip((factor, between, remainder), noise, strict=True)
    loss = sum((a * b).sum() for a, b in wanted)
    want = torch.autograd.grad(loss, [gaps, *leaves])
    d_factor = torch.zeros(call_.num_planes, 4, call_.padded, call_.channels)
    d_factor[:, :2, :length] = noise[0].flatten(0, 1)
    d_between = torch.zeros(call_.num_planes, spans, group, 2, call_.channels)
    d_between.unflatten(0, planes)[:, :, j, i % group] = noise[1][:, :, j, i].float()
    d_remainder = torch.zeros_like(path.remainder)
    d_remainder[:, :spans] = noise[2].flatten(0, 1)
    sums, d_path = launch.GradientSums(call_, is_spectral=True), torch.zeros_like(call_.path)
    sweep = launch._PathSweep(cut, set_up, path, d_factor, d_between)
    with memory_full_of_nan():
        launch._finish_path(call_, sweep, d_remainder, sums, d_path)
    # The padding may hold anything.
    assert_channels_close(d_path[:, :, :length], want[0][:, :, :length])
    sums.parts = (sums.parts[0],) * 2
    d_gamma, d_omega2 = sums.spectra()[0]
    omega, zeta = (t.detach() for t in leaves)
    for got, expected in (
        (d_gamma * zeta + 2.0 * omega * d_omega2, want[1]),
        (d_gamma * omega, want[2]),
    ):
        assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5
