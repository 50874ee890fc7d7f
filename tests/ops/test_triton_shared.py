"""The Triton kernels under query paths that all rows share, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from .cases import DOUBLE, SPECTRA
from .interpreter_cases import (  # noqa: F401  (fixtures)
    TOLERANCE,
    assert_close,
    check,
    no_blocked,
    path_inputs,
    quick_interpreter,
    short_spans,
    tied_times,
    uneven_times,
)
from .triton_cases import VELOCITIES, exact, run

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


# --- Sizes. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 65])
def test_lengths_around_a_tile(length):
    judge = "reference" if length < 3 else "blocked"
    check(path_inputs("linear", 1, length), judge=judge, query="linear")


def test_several_tiles_with_tiny_and_huge_gaps():
    check(path_inputs("linear", 1, 130, times=uneven_times(130)), judge="blocked", query="linear")


@pytest.mark.slow  # shorter spans, below, take the same way
def test_two_spans():
    check(path_inputs("linear", 1, 577), judge="blocked", query="linear")


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("linear", {"direction": "bidirectional", "value": "point"}),
        ("ridge", {}),
        # A trajectory has the modes that ridge regression has.
        pytest.param("learned", {"value": "point"}, marks=pytest.mark.slow),
    ],
    ids=["linear", "ridge", "learned"],
)
def test_every_stage_with_ties_and_a_mask(query, options):
    # Ties straddle the borders of tiles and of spans; a third span has a whole one before it.
    length = 262 if query == "ridge" else 140
    times = tied_times(length, [(60, 66), (120, 131), (length - 9, length - 6)])
    mask = torch.arange(length)[None] % 9 != 4
    x = path_inputs(query, 1, length, times=times)
    # A gradient of a spectrum, a sum that has cancelled, was off by 1e-5.
    check(x, judge="blocked", tolerance=2e-5, query=query, mask=mask, **options)


@pytest.mark.parametrize(("channels", "length"), [(64, 65), (128, 17)])
def test_head_sizes(channels, length):
    x = path_inputs("linear", 1, length, channels=channels)
    check(x, judge="blocked", query="linear")


def test_batch_and_heads():
    check(path_inputs("linear", 2, 66, heads=2), judge="blocked", query="linear", value="point")


# --- Modes, times, masks. -------------------------------------------------------------------------


def test_both_directions():
    check(path_inputs("learned", 1, 20), query="learned", direction="bidirectional")


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
    x = path_inputs("linear", 1, length, velocities=velocities)
    check(x, judge="blocked", query="linear", value=value)


def test_a_constant_in_the_path():
    x = path_inputs("learned", 1, 40)
    x["mode_constant"] = torch.linspace(-1, 1, 16, dtype=DOUBLE)[None]
    check(x, query="learned")


@pytest.mark.parametrize(("value", "judge"), [("average", "reference"), ("point", "blocked")])
def test_every_regime_in_one_head_channel_by_channel(value, judge):
    x = path_inputs("linear", 1, 64, times=uneven_times(64))
    got, want = check(x, judge=judge, query="linear", value=value)
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
    check(x, query="linear")


@pytest.mark.parametrize("query", ["linear", "ridge"])
def test_all_tokens_at_one_time(query):
    length = 65 if query == "linear" else 9
    times = torch.full((1, length), 2.5, dtype=DOUBLE)
    check(path_inputs(query, 1, length, times=times), judge="blocked", query=query)


def test_ragged_masks_with_nan_in_absent_tokens():
    query = "ridge"
    place = torch.arange(30)[None]
    mask = (place < torch.tensor([[17], [0]])) & (place % 7 != 4)
    x = path_inputs(query, 2, 30)
    for name in ("times", "q", "k", "v", *VELOCITIES):
        x[name][~mask] = torch.nan
    got, _ = check(x, query=query, mask=mask)
    assert not any(got[name][1].any() for name in ("out", "k", "v", *VELOCITIES))


# --- What wants gradients. ------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["key_zeta", "bank"])
def test_gradients_of_a_few_inputs_alone(kept):
    x = path_inputs("ridge", 1, 20)
    got, _ = check(x, query="ridge", frozen=[name for name in x if name != kept])
    assert got.keys() == {"out", kept}
