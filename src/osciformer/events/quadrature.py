"""Integrals of intensities with a measured error: Gauss-Kronrod panels, halved where needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from osciformer._types import Float, Int, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess

# The rule of Kronrod with 15 nodes and, within it, that of Gauss with 7 (QUADPACK's qk15), on
# [-1, 1]: nodes from 1 to 0, their weights, and the weights of Gauss at every second node.
_NODES = (
    0.991455371120812639206854697526329,
    0.949107912342758524526189684047851,
    0.864864423359769072789712788640926,
    0.741531185599394439863864773280788,
    0.586087235467691130294144691693013,
    0.405845151377397166906606412076961,
    0.207784955007898467600689403773245,
    0.0,
)
_KRONROD = (
    0.022935322010529224963732008058970,
    0.063092092629978553290700663189204,
    0.104790010322250183839876322541518,
    0.140653259715525918745189590510238,
    0.169004726639267902826583426598550,
    0.190350578064785409913256402421014,
    0.204432940075298892414161999234649,
    0.209482141084727828012999174891714,
)
_GAUSS = (
    0.129484966168869693270611432679082,
    0.279705391489276667901467771423780,
    0.381830050505118944950369775488975,
    0.417959183673469387755102040816327,
)
NUM_NODES = 15
# Deeper panels are allowed this part of the tolerance, so that their sum stays within it.
_DEEPER = 1 / 16


class Integral(NamedTuple):
    """Integrals of intensities, and how far off they may be.

    Attributes:
        value: Integrals by type.
        error: Estimate of the absolute error of their sum over types: the difference between the
            rules with 15 and with 7 nodes, added up over panels. It is far above the error of the
            rule with 15 nodes where the intensity is smooth.
        converged: Whether each interval met the tolerance.
    """

    value: Float[Tensor, "B M K"]
    error: Float[Tensor, "B M"]
    converged: bool


def kronrod_rule() -> tuple[Float[Tensor, "nodes"], Float[Tensor, "nodes"], Float[Tensor, "nodes"]]:
    """Return 15 nodes on [0, 1], the weights of Kronrod, and those of Gauss (0 at the others).

    Example:
        >>> nodes, kronrod, gauss = kronrod_rule()
        >>> round(float((kronrod * nodes**3).sum()), 12), round(float((gauss * nodes**3).sum()), 12)
        (0.25, 0.25)
    """
    half = torch.tensor(_NODES, dtype=torch.float64)
    nodes = torch.cat([-half[:-1], half.flip(0)])
    kronrod = torch.tensor(_KRONROD, dtype=torch.float64)
    gauss = torch.zeros(8, dtype=torch.float64)
    gauss[1::2] = torch.tensor(_GAUSS, dtype=torch.float64)
    kronrod, gauss = (torch.cat([w[:-1], w.flip(0)]) / 2 for w in (kronrod, gauss))
    return (nodes + 1) / 2, kronrod, gauss


def integrate_intensity(
    process: EventProcess,
    batch: EventBatch,
    start: Float[Tensor, "B M"],
    end: Float[Tensor, "B M"],
    *,
    tolerance: float = 1e-6,
    max_halvings: int = 30,
) -> Integral:
    """Return integrals of the intensities over (start, end], to a tolerance that is checked.

    A panel whose two rules differ by more than the tolerance is halved, again and again, each time
    for those panels alone. Intervals are cut at the events within them, between which intensities
    are taken to be smooth: a jump elsewhere can hide between two nodes, where no rule sees it. An
    easy interval without events in it costs 15 evaluations. Gradients reach the process.

    Args:
        process: The process.
        batch: Events.
        start: Where the intervals begin.
        end: Where they end, not before `start`; where they are equal the integral is 0.
        tolerance: Largest error of an interval, absolute and relative: an interval passes if its
            error is below `tolerance * max(1, integral)`.
        max_halvings: How often a panel may be halved; 0 takes one panel of 15 nodes for each
            interval, and only measures the error. What is not met then is said by `converged`.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {tolerance}")
    if bool((end < start).any()):
        raise ValueError("intervals must not end before they start")
    if bool((batch.count_before(end) > batch.count_until(start)).any()):
        left, right = _cut_at_events(batch, start, end)
        parts = integrate_intensity(
            process, batch, left, right, tolerance=tolerance, max_halvings=max_halvings
        )
        shape = (*start.shape, -1)
        value = parts.value.unflatten(1, shape[1:]).sum(dim=2)
        return Integral(value, parts.error.reshape(shape).sum(dim=2), parts.converged)
    size, count = start.shape
    value, error = _panels(process, batch, start, end)
    num_types = value.shape[-1]
    bad = error > _allowed(value, tolerance)
    if max_halvings == 0 or not bool(bad.any()):
        return Integral(value, error.detach(), not bool(bad.any()))
    value = value.reshape(-1, num_types).masked_fill(bad.reshape(-1, 1), 0.0)
    total_error = error.detach().reshape(-1).masked_fill(bad.reshape(-1), 0.0)
    rows, slots = bad.nonzero(as_tuple=True)
    left, right = start[rows, slots], end[rows, slots]
    owner = rows * count + slots
    for depth in range(1, max_halvings + 1):
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
        owner = owner.repeat(2)
        part, error = _ragged_panels(process, batch, owner // count, left, right)
        # Where halving no longer moves the edges, there is nothing left to refine.
        stuck = (left + right) / 2 <= left
        bad = (error > _DEEPER * _allowed(part, tolerance)) & ~stuck
        done = ~bad if depth < max_halvings else torch.ones_like(bad)
        value = value.index_add(0, owner[done], part[done])
        total_error = total_error.index_add(0, owner[done], error.detach()[done])
        if bool(done.all()):
            break
        left, right, owner = left[bad], right[bad], owner[bad]
    value = value.reshape(size, count, num_types)
    total_error = total_error.reshape(size, count)
    return Integral(value, total_error, bool((total_error <= _allowed(value, tolerance)).all()))


def _cut_at_events(
    batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
) -> tuple[Float[Tensor, "B P"], Float[Tensor, "B P"]]:
    """Return the pieces of intervals between events, N + 1 for each, most of them empty."""
    times = batch.clean_times[:, None]  # [B, 1, N]
    cuts = torch.minimum(torch.maximum(times, start[..., None]), end[..., None])
    left = torch.cat([start[..., None], cuts], dim=-1)
    right = torch.cat([cuts, end[..., None]], dim=-1)
    return left.flatten(1), right.flatten(1)


def _allowed(value: Float[Tensor, "*S K"], tolerance: float) -> Float[Tensor, "*S"]:
    total = value.detach().sum(dim=-1)
    # Below this, the difference of two rules is rounding.
    rounding = 64 * torch.finfo(value.dtype).eps
    return torch.maximum(tolerance * total.clamp(min=1.0), rounding * total)


def _panels(
    process: EventProcess,
    batch: EventBatch,
    start: Float[Tensor, "B P"],
    end: Float[Tensor, "B P"],
) -> tuple[Float[Tensor, "B P K"], Float[Tensor, "B P"]]:
    """Return the integral over each panel by 15 nodes, and its difference from that by 7."""
    nodes, kronrod, gauss = (item.to(start.device) for item in kronrod_rule())
    width = end - start
    query = start[..., None] + width[..., None] * nodes
    # Rounding must not move a node to the event at the start, whose left limit is another one.
    low = torch.nextafter(start, start.new_tensor(torch.inf))
    query = torch.minimum(torch.maximum(query, low[..., None]), end[..., None])
    rates = process.intensity(batch, query.flatten(1)).unflatten(1, query.shape[1:])
    width = width.to(rates.dtype)[..., None]
    fine = width * torch.einsum("bpnk,n->bpk", rates, kronrod.to(rates.dtype))
    coarse = width * torch.einsum("bpnk,n->bpk", rates, gauss.to(rates.dtype))
    fine = torch.where(width > 0, fine, torch.zeros_like(fine))
    error = torch.where(width > 0, fine - coarse, torch.zeros_like(fine)).abs().sum(dim=-1)
    return fine, error


def _ragged_panels(
    process: EventProcess,
    batch: EventBatch,
    rows: Int[Tensor, "P"],
    left: Float[Tensor, "P"],
    right: Float[Tensor, "P"],
) -> tuple[Float[Tensor, "P K"], Float[Tensor, "P"]]:
    """Return `_panels` of panels that belong to any rows, of which only those are evaluated."""
    order = torch.argsort(rows, stable=True)
    used, row, counts = torch.unique_consecutive(
        rows[order], return_inverse=True, return_counts=True
    )
    begins = counts.cumsum(0) - counts
    slot = torch.arange(len(rows), device=rows.device) - begins[row]
    shape = (len(used), int(counts.max()))
    start = batch.last_times[used][:, None].expand(shape).clone()
    end = start.clone()
    start[row, slot], end[row, slot] = left[order], right[order]
    value, error = _panels(process, batch.take(used), start, end)
    back = torch.argsort(order)
    return value[row, slot][back], error[row, slot][back]
