"""Laws of attention that the Triton kernels keep, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import oscillator_attention
from osciformer.testing import assert_causal, assert_padding_invariant, assert_time_shift_invariant

from .cases import SPECTRA
from .interpreter_cases import (  # noqa: F401  (fixtures)
    TOLERANCE,
    no_blocked,
    quick_interpreter,
    tied_times,
    tiled,
)
from .triton_cases import make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

# "linear" is a path that all rows share, and has kernels of its own.
QUERIES = ("hold", "linear")


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
    """Return tokens and times of two tiles, with ties within the first and across the border."""
    g = torch.Generator().manual_seed(4)
    times = tied_times(66, [(20, 22), (63, 64)])
    return torch.randn(1, 66, 16, generator=g), times


@pytest.mark.parametrize(
    ("query", "value", "positions"),
    [("hold", "average", (22, 63)), ("hold", "point", (63,)), ("linear", "average", (22, 63))],
    ids=["hold-average", "hold-point", "linear-average"],
)
def test_no_token_reaches_an_earlier_row(query, value, positions):
    assert_causal(as_layer(query=query, value=value), *layer_inputs(), positions=positions)


@pytest.mark.parametrize("query", QUERIES)
def test_padding_changes_nothing(query):
    assert_padding_invariant(as_layer(query=query), *layer_inputs(), tolerance=TOLERANCE)


@pytest.mark.parametrize("query", QUERIES)
def test_a_shift_of_all_times_changes_nothing(query):
    layer = as_layer(query=query)
    assert_time_shift_invariant(layer, *layer_inputs(), shift=1e5, tolerance=TOLERANCE)
