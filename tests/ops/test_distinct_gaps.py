"""Series sampled on a grid have few different gaps; closed forms are evaluated for those alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.ops.attention.blocked.paths import distinct_gaps
from osciformer.testing import relative_error

from .cases import call


def on_a_grid(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Times at ten-minute steps, in days: their differences are equal up to rounding only."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 288, (batch, length), generator=g).sort(1).values.double() / 144.0


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e9]))
def test_each_gap_is_there_to_more_digits_than_float32_has(seed, unit):
    gap = on_a_grid(3, 50, seed).mul(unit).diff(dim=1).unsqueeze(-1)
    found, place = distinct_gaps(gap)
    if place is None:
        assert found is gap
        return
    assert found.numel() <= gap.numel() // 2
    spread = found.flatten()[place].view_as(gap)
    assert bool(((spread - gap).abs() <= 2.0**-35 * gap).all())
    assert torch.equal(spread == 0, gap == 0)


def test_equal_steps_are_one_gap():
    gap = torch.arange(1000, dtype=torch.float64).div(7.0).diff()[None, :, None]
    assert gap.unique().numel() > 1
    found, place = distinct_gaps(gap)
    assert found.shape == (1, 1, 1)
    assert place is not None


def test_gaps_that_differ_stay_as_they_are():
    gap = torch.rand(2, 100, 1, dtype=torch.float64)
    found, place = distinct_gaps(gap)
    assert found is gap
    assert place is None


def test_gaps_that_want_gradients_stay_as_they_are():
    gap = torch.ones(2, 100, 1, dtype=torch.float64, requires_grad=True)
    assert distinct_gaps(gap)[1] is None


def test_a_grid_gives_what_float64_gives():
    g = torch.Generator().manual_seed(1)
    shape = (4, 60, 2, 8)
    tokens = {name: torch.randn(shape, generator=g) for name in ("q", "k", "v")}
    tokens |= {f"{n}_velocity": torch.randn(shape, generator=g) for n in ("key", "value")}
    spectra = {
        f"{n}_omega": 10 ** (3 * torch.rand(2, 8, generator=g) - 1) for n in ("key", "value")
    }
    spectra |= {f"{n}_zeta": 1.5 * torch.rand(2, 8, generator=g) for n in ("key", "value")}
    times = on_a_grid(4, 60)
    assert distinct_gaps(times.diff(dim=1).unsqueeze(-1))[1] is not None
    found = []
    for dtype in (torch.float32, torch.float64):
        x = {n: t.to(dtype).requires_grad_() for n, t in (tokens | spectra).items()}
        out = call(x | {"times": times}, backend="blocked")
        grads = torch.autograd.grad(out.square().sum(), list(x.values()))
        found.append([out.detach(), *grads])
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) <= 1e-5
