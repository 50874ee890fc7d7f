"""Closed forms as the Triton kernels evaluate them, against many digits."""

from __future__ import annotations

from functools import cache

import mpmath
import pytest
import torch

from .cases import DOUBLE
from .interpreter_cases import quick_interpreter, tl, triton  # noqa: F401  (a fixture)
from .triton_cases import ZETA

from osciformer.ops.attention.triton.call import format_for, spectrum_table  # isort: skip
from osciformer.ops.attention.triton.closed_form import (  # isort: skip  (needs Triton)
    gap_functions,
    gap_slopes,
    load_spectrum,
    oscillate,
    spectral_derivatives,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

NAMES = ("g11", "g12", "i12", "F", "J")
# Relative to the largest value up to that time. The float64 mode is there for float32 tokens.
FORM_TOLERANCES = {
    True: (1e-7, 2e-7, 5e-7, 2e-7, 3e-5),
    False: (1e-6, 1e-6, 5e-6, 3e-6, 2e-3),
}


@triton.jit
def evaluate_forms(s_ptr, table, found, N: tl.constexpr, OF_GAP: tl.constexpr, K: tl.constexpr):
    """Write the five functions of `NAMES`, ``[5, N, C]`` float64."""
    C: tl.constexpr = K.C
    i = tl.arange(0, N)
    c = tl.arange(0, C)
    s = tl.load(s_ptr + i)[:, None]
    if OF_GAP:
        form = load_spectrum(table, 0, tl.broadcast_to(c[None, :], (N, C)), K)
        gap = gap_functions(s, form, K)
        f, j = gap_slopes(s, form, form, gap, K)
    else:
        spectrum = load_spectrum(table, 0, c, K)
        gap = oscillate(s, spectrum, K)
        f, j = spectral_derivatives(s, spectrum, gap, K)
    at = found + i[:, None] * C + c[None, :]
    tl.store(at, gap.g11.to(tl.float64))
    tl.store(at + N * C, gap.g12.to(tl.float64))
    tl.store(at + 2 * N * C, gap.i12.to(tl.float64))
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
    table = spectrum_table(torch.stack([gamma, omega2])[:, None])
    precision = format_for(want.shape[2], torch.float32 if is_precise else torch.float16)
    evaluate_forms[(1,)](s, table, found, want.shape[1], of_gap, precision)
    largest = want.abs().cummax(1).values
    assert not found[largest == 0].any()
    error = ((found - want).abs() / largest.where(largest > 0, 1.0)).amax((1, 2))
    for name, e, tolerance in zip(NAMES, error, FORM_TOLERANCES[is_precise], strict=True):
        assert e <= tolerance, (name, float(e))
