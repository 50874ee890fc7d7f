"""Closed forms over one gap: what the quadratic part composes. All in float64, then cast."""

from __future__ import annotations

import torch
from torch import Tensor

from osciformer.math.oscillator import SERIES_RADIUS, Moments, fastest_rate, moments
from osciformer.ops.attention.blocked.recompute import recomputed

# Gaps that differ by less than this many leading bits are one to results in float32, which have 24.
_GAP_BITS = 36


def transition(m: Moments, omega: Tensor, zeta: Tensor) -> list[Tensor]:
    """Return the entries 11, 12, 21, 22 of P - I over a gap."""
    squared = omega * omega
    a11 = -squared * m.i12
    return [a11, m.g12, -squared * m.g12, torch.addcmul(a11, zeta * omega, m.g12, value=-2.0)]


def constant_integral(m: Moments, gap: Tensor, omega: Tensor, *, is_drift: bool) -> list[Tensor]:
    """Return the integral of a constant query of 1: of g11 (less 1 for drifts) and of g12."""
    drift = -omega * omega * m.k12
    return [drift if is_drift else gap + drift, m.i12]


def linear_integral(
    m: Moments, gap: Tensor, omega: Tensor, start: Tensor, step: Tensor, *, is_drift: bool
) -> list[Tensor]:
    """Return the integral of a query that goes from `start` to `start + step` over the gap."""
    squared = omega * omega
    over_gap = 1.0 / torch.where(gap > 0, gap, 1.0)
    constant = constant_integral(m, gap, omega, is_drift=is_drift)
    first = 0.5 * gap - squared * (m.k12 - m.l12 * over_gap)
    second = m.i12 - m.k12 * over_gap
    return [
        torch.addcmul(start * constant[0], step, first),
        torch.addcmul(start * constant[1], step, second),
    ]


def constant_spans(
    gap: Tensor,
    omega: Tensor,
    zeta: Tensor,
    dtype: torch.dtype,
    *,
    is_drift: bool,
    with_integral: bool = True,
) -> Tensor:
    """Return the spans ``[3, 2, B, X, D]`` of a constant query (`chain.Spans`).

    Averaged values are a constant query of 1, too.

    Args:
        gap: ``[B, X, 1]`` float64.
        omega: ``[D]`` float64.
        zeta: ``[D]`` float64.
        dtype: Of the results.
        is_drift: Drifts or whole integrals.
        with_integral: False for point values, which need none: then ``[2, 2, B, X, D]``.
    """

    def function(gap: Tensor, omega: Tensor, zeta: Tensor) -> list[Tensor]:
        m = moments(gap, omega, zeta)
        planes = transition(m, omega, zeta)
        if with_integral:
            planes += constant_integral(m, gap, omega, is_drift=is_drift)
        return planes

    shape, place = gap.shape[:2], None
    if dtype == torch.float32:
        gap, place = distinct_gaps(gap)
    gap, omega, zeta = for_moments(gap, omega, zeta, dtype)
    width = gap.shape[0] * omega.shape[0]
    planes = recomputed(function, [gap], [omega, zeta], width, dtype)
    if place is not None:
        planes = planes[:, 0].index_select(1, place).unflatten(1, shape)
    return planes.unflatten(0, (-1, 2))


def distinct_gaps(gap: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return gaps that occur, ``[1, U, 1]``, and the place of each in them, ``[B X]``, if few do.

    Observations by the minute, or at even steps with some missing, have few different gaps among
    many, and closed forms are most of the work for short series. Otherwise, and where looking
    costs more than it saves, the gaps ``[B, X, 1]`` come back as they are, with None.
    """
    if torch.compiler.is_compiling() or gap.device.type != "cpu" or gap.requires_grad:
        return gap, None
    # Differences of scaled times are equal up to rounding only.
    unit = 1 << (53 - _GAP_BITS)
    rounded = ((gap.flatten().view(torch.int64) + unit // 2) & -unit).view(torch.float64)
    found, place = rounded.unique(return_inverse=True)
    if 2 * found.numel() > gap.numel():
        return gap, None
    return found[None, :, None], place


def for_moments(
    gap: Tensor, omega: Tensor, zeta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `moments` in the precision that results of `dtype` need.

    Long gaps need float64, for their phases. Where every gap is short all is power series without
    cancellation, and single precision loses nothing that the result could hold.
    """
    if dtype == torch.float32 and not torch.compiler.is_compiling() and gap.numel():
        reach = fastest_rate(omega, zeta).detach().max() * gap.detach().max()
        if bool(reach < SERIES_RADIUS):
            return gap.float(), omega.float(), zeta.float()
    return gap, omega, zeta
