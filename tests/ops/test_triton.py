"""The Triton kernels in Triton's interpreter, on the CPU, against `reference` in float64.

Query paths that all rows share are in `test_triton_shared`; what only hardware shows, other
precisions at real sizes, is in `tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from .cases import DOUBLE, SPECTRA
from .interpreter_cases import (  # noqa: F401  (fixtures)
    TOLERANCE,
    assert_close,
    check,
    no_blocked,
    quick_interpreter,
    short_spans,
    tied_times,
    tiled,
    uneven_times,
)
from .triton_cases import VELOCITIES, ZETA, exact, make_inputs, run

# numpy speaks up where a kernel computes a branch that it then does not take.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


# --- Sizes: a chunk is 8 tokens, a tile 64, a span of the far stage 512. --------------------------


@pytest.mark.parametrize("length", [1, 63, 65])
def test_lengths_around_a_tile(length):
    check(make_inputs(1, length))


@pytest.mark.parametrize(("length", "value"), [(8, "average"), (9, "point")])
def test_lengths_around_a_chunk(length, value):
    check(make_inputs(1, length), value=value)


@pytest.mark.parametrize("length", [15, 17])
def test_ties_across_the_borders_of_chunks(length):
    mask = torch.arange(length)[None] % 7 != 5
    check(make_inputs(1, length, times=tied_times(length, [(2, 3), (6, 9), (12, 16)])), mask=mask)


def test_several_tiles_with_tiny_and_huge_gaps():
    check(make_inputs(1, 130, times=uneven_times(130)), judge="blocked", value="point")


def test_two_spans_with_frozen_spectra():
    # Every stage without the gradients of spectra, which the next test has.
    got, _ = check(make_inputs(1, 520), judge="blocked", frozen=SPECTRA)
    assert got.keys().isdisjoint(SPECTRA)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(("length", "value"), [(262, "average"), (140, "point")])
def test_every_stage_with_ties_and_a_mask(length, value):
    # The far stage starts at the third tile, and 262 tokens are three spans. Ties straddle the
    # borders of tiles and of spans.
    times = tied_times(length, [(60, 66), (120, 131), (length - 9, length - 5)])
    mask = torch.arange(length)[None] % 5 != 1
    check(make_inputs(1, length, times=times), judge="blocked", value=value, mask=mask)


@pytest.mark.slow  # some 12 seconds
@pytest.mark.usefixtures("short_spans")
def test_spans_of_spans_in_long_series(monkeypatch):
    # Spans of two tiles, then of four: both are needed from 513 tokens on.
    monkeypatch.setattr("osciformer.ops.attention.triton.call.WIDE", 2)
    times = tied_times(530, [(120, 131), (250, 260), (511, 512)])
    mask = torch.arange(530)[None] % 5 != 1
    check(make_inputs(1, 530, times=times), judge="blocked", mask=mask)


@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (2, 2)])
def test_parts_of_a_large_call(batch, heads, monkeypatch):
    monkeypatch.setattr("osciformer.ops.attention.triton.call._MANY_ROWS", 1)
    mask = torch.arange(17).expand(batch, 17) % 5 != torch.arange(batch)[:, None]
    check(make_inputs(batch, 17, heads=heads), judge="blocked", mask=mask)


@pytest.mark.parametrize(
    ("channels", "length"),
    # Sizes of 64 and 128 are cut alike.
    [(32, 17), (64, 65), pytest.param(128, 17, marks=pytest.mark.slow)],
)
def test_head_sizes(channels, length):
    check(make_inputs(1, length, channels=channels), judge="blocked")


def test_batch_and_heads_with_everything_in_float32():
    x = {name: t.float() for name, t in make_inputs(2, 20, heads=2).items()}
    got, _ = check(x)
    assert {t.dtype for t in got.values()} == {torch.float32}


# --- Modes. ---------------------------------------------------------------------------------------


def test_point_values_in_both_directions():
    check(make_inputs(1, 20), value="point", direction="bidirectional")


@pytest.mark.parametrize(
    ("length", "velocities", "value"),
    [
        (65, (), "average"),
        (20, ("key_velocity",), "point"),
        (20, ("value_velocity",), "average"),
    ],
    ids=["none-average", "key-point", "value-average"],
)
def test_without_velocities(length, velocities, value):
    check(make_inputs(1, length, velocities=velocities), judge="blocked", value=value)


@pytest.mark.parametrize(("scale", "length"), [(2.5, 20), (1e-3, 65)])
def test_other_scales(scale, length):
    check(make_inputs(1, length), judge="blocked", scale=scale)


# --- Rows with times of their own. ----------------------------------------------------------------


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_queries_with_times_of_their_own(direction):
    x = make_inputs(1, 33, 31)  # 64 places on one line
    assert (x["query_times"] < x["key_times"][:, :1]).sum() > 2
    assert torch.isin(x["query_times"], x["key_times"]).sum() > 5
    mask = torch.arange(33)[None] % 6 != 2 if direction == "bidirectional" else None
    got, _ = check(x, value="point", direction=direction, mask=mask)
    if direction == "causal":
        assert not got["out"][x["query_times"] < x["key_times"][:, :1]].any()


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
    got, want = check(x, value=value)
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
    check(x)


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
    check(make_inputs(1, 70, times=times), judge="blocked", direction="bidirectional")


@pytest.mark.parametrize(("length", "direction"), [(65, "causal"), (9, "bidirectional")])
def test_all_tokens_at_one_time(length, direction):
    times = torch.full((1, length), 2.5, dtype=DOUBLE)
    check(make_inputs(1, length, times=times), direction=direction)


# --- Masks. ---------------------------------------------------------------------------------------


def test_ragged_masks_with_nan_in_absent_tokens():
    place = torch.arange(30)[None]
    mask = (place < torch.tensor([[17], [0]])) & (place % 7 != 4)
    x = make_inputs(2, 30)
    for name in ("times", "q", "k", "v", *VELOCITIES):
        x[name][~mask] = torch.nan
    got, _ = check(x, mask=mask, direction="bidirectional")
    assert not any(got[name][1].any() for name in ("out", "q", "k", "v", *VELOCITIES))


# --- What wants gradients, and how tokens lie in memory. ------------------------------------------


@pytest.mark.parametrize("kept", ["value_velocity", "key_zeta"])
def test_gradients_of_a_few_inputs_alone(kept):
    x = make_inputs(1, 20)
    got, _ = check(x, frozen=[name for name in x if name != kept])
    assert got.keys() == {"out", kept}


def test_strided_tokens():
    x = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t
        for name, t in make_inputs(1, 20, heads=2).items()
    }
    assert not x["k"].is_contiguous()
    check(x)
