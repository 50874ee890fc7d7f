"""When the next event comes, and of which type it is."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess, query_after
from osciformer.events.quadrature import NUM_NODES, kronrod_rule

# Halvings that locate the median within a step of the integration.
_BISECTIONS = 50


@dataclass(frozen=True)
class NextEvent:
    """The next event after each event, predicted from those up to it.

    All entries are finite. Where the hazard dies out there may be no next event: `survival` says
    with which probability none comes before the horizon.

    Attributes:
        mean: Expected gap, given that the event comes before the horizon; the horizon where that
            has the probability 0.
        restricted_mean: Expected gap, where a gap beyond the horizon counts as the horizon.
        median: The gap after which the event has come with probability 1/2; the horizon where that
            is not reached.
        survival: Probability that no event comes before the horizon.
        type_probability: Probability of each type, whenever the event comes before the horizon.
        error: Largest estimated error of the probabilities, over all events.
        mask: True where there is an event to predict from.
    """

    mean: Float[Tensor, "B N"]
    restricted_mean: Float[Tensor, "B N"]
    median: Float[Tensor, "B N"]
    survival: Float[Tensor, "B N"]
    type_probability: Float[Tensor, "B N K"]
    error: float
    mask: Tensor


@dataclass
class _March:
    """Running integrals of each event up to its `gap` [R]."""

    gap: Tensor
    step: Tensor
    hazard: Tensor
    restricted: Tensor
    median: Tensor
    marks: Tensor
    error: Tensor


@torch.no_grad()
def predict_next(
    process: EventProcess,
    batch: EventBatch,
    *,
    horizon: float,
    tolerance: float = 1e-6,
    negligible: float = 1e-9,
    max_steps: int = 10_000,
    scale: float | None = None,
) -> NextEvent:
    r"""Return the distribution of the next event after each event of a batch, in summary.

    With the survival function $S(g) = \exp(-\int_0^g \lambda)$ of the gap g,
    $$E[\min(g, H)] = \int_0^H S, \qquad p_k = \int_0^H \lambda_k S \Big/ (1 - S(H)).$$
    All integrals run along one grid of steps that each event has of its own: a step is halved when
    two rules differ by more than the tolerance, and doubled when they agree well.

    Args:
        process: The process.
        batch: Events; the prediction at (b, i) knows the events up to and including i.
        horizon: Where to stop, as a gap. It matters only where survival beyond it does.
        tolerance: Largest error of a step, in probability and in mean gaps.
        negligible: Survival below which the rest is left out.
        max_steps: Largest number of steps; more are an error.
        scale: Length of the first steps, and unit of the tolerance of gaps; the mean gap of the
            batch if not given.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon must be positive and finite; got {horizon}")
    shape, like = batch.mask.shape, batch.times
    zeros = torch.zeros(shape, dtype=torch.float64, device=like.device)
    scale = _typical_gap(batch, horizon) if scale is None else scale
    march = _March(
        gap=zeros.clone(),
        step=torch.full_like(zeros, scale),
        hazard=zeros.clone(),
        restricted=zeros.clone(),
        median=torch.full_like(zeros, horizon),
        marks=torch.zeros(*shape, process.num_types, dtype=torch.float64, device=like.device),
        error=zeros.clone(),
    )
    breaks = process.gap_breaks
    with process.remember(batch):
        for _ in range(max_steps):
            live = batch.mask & (march.gap < horizon) & (march.hazard < -math.log(negligible))
            if not bool(live.any()):
                break
            _advance(process, batch, march, live, horizon, breaks, tolerance, scale)
        else:
            raise RuntimeError(
                f"the next event is not predicted after {max_steps} steps; the intensity may jump "
                "at gaps that gap_breaks of the process does not name, or the tolerance be too "
                "small"
            )
    survival = torch.exp(-march.hazard)
    # What is left out has been predicted to come before the horizon.
    survival = torch.where(march.gap >= horizon, survival, torch.zeros_like(survival))
    comes = march.marks.sum(dim=-1)
    mean = (march.restricted - horizon * survival) / comes.clamp(min=torch.finfo(comes.dtype).tiny)
    never = comes <= 1e-12
    mean = torch.where(never, torch.full_like(mean, horizon), mean.clamp(0.0, horizon))
    marks = march.marks / comes.clamp(min=torch.finfo(comes.dtype).tiny)[..., None]
    even = torch.full_like(marks, 1.0 / process.num_types)
    return NextEvent(
        mean=mean,
        restricted_mean=march.restricted,
        median=march.median,
        survival=survival,
        type_probability=torch.where(never[..., None], even, marks),
        error=float(march.error.masked_fill(~batch.mask, 0.0).max()),
        mask=batch.mask,
    )


def predict_last(process: EventProcess, batch: EventBatch, **settings: Any) -> NextEvent:
    """Return the distribution of the event after the last one of each row, in summary.

    It is what `predict_next` says there, without the work for all events before.

    Args:
        process: The process.
        batch: Events.
        **settings: Those of `predict_next`.

    Returns:
        Predictions with N = 1; where a row has no event its mask is False.
    """
    last = (batch.lengths - 1).clamp(min=0)[:, None]
    times = batch.times.masked_fill(~batch.mask, 0.0)
    ends = EventBatch(
        times=times.gather(1, last),
        types=batch.clean_types.gather(1, last),
        mask=(batch.lengths > 0)[:, None],
    )
    return predict_next(
        _AfterLast(process, batch), ends, scale=_typical_gap(batch, settings["horizon"]), **settings
    )


class _AfterLast(EventProcess):
    """A process as it goes on after the last event of each row of a batch."""

    def __init__(self, process: EventProcess, batch: EventBatch) -> None:
        self.process, self.batch = process, batch
        self.num_types, self.gap_breaks = process.num_types, process.gap_breaks

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        return self.process.intensity(self.batch, query_times)

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        return self.intensity(batch, query_after(batch.times, gaps[:, 0]))[:, None]

    def remember(self, batch: EventBatch) -> AbstractContextManager[None]:
        return self.process.remember(self.batch)


def type_probabilities_at(
    process: EventProcess, batch: EventBatch, query_times: Float[Tensor, "B M"]
) -> Float[Tensor, "B M K"]:
    """Return the probability of each type, if an event comes at these very times.

    Given the events strictly before. Where no event can come, all types are equally likely.

    Args:
        process: The process.
        batch: Events.
        query_times: Times.
    """
    rates = process.intensity(batch, query_times)
    total = rates.sum(dim=-1, keepdim=True)
    even = torch.full_like(rates, 1.0 / rates.shape[-1])
    return torch.where(total > 0, rates / total.clamp(min=torch.finfo(rates.dtype).tiny), even)


def _advance(
    process: EventProcess,
    batch: EventBatch,
    march: _March,
    live: Tensor,
    horizon: float,
    breaks: Tensor | None,
    tolerance: float,
    scale: float,
) -> None:
    """Try a step of each event, and take those that are accurate."""
    nodes, kronrod, gauss = (item.to(march.gap.device) for item in kronrod_rule())
    inner, _ = (item.to(march.gap.device) for item in _integration())
    limit = torch.full_like(march.gap, horizon)
    if breaks is not None:
        edges = torch.cat([breaks.to(limit), limit.new_tensor([horizon])]).clamp(max=horizon)
        following = torch.searchsorted(edges, march.gap.contiguous(), right=True)
        limit = edges[following.clamp(max=len(edges) - 1)]
    room = (limit - march.gap).clamp(min=0.0)
    step = torch.where(live, torch.minimum(march.step, room), torch.zeros_like(room))
    last = step >= room
    gaps = march.gap[..., None] + step[..., None] * nodes
    # Hidden rows stay at a harmless gap, whatever they have come to.
    rates = process.intensity_after(batch, torch.where(live[..., None], gaps, scale * nodes))
    rates = torch.where(live[..., None, None], rates.double(), torch.zeros(1).double().to(gaps))
    total = rates.sum(dim=-1)  # [B, N, nodes]
    hazard = march.hazard[..., None] + step[..., None] * (total @ inner.T)
    survival = torch.exp(-hazard)
    fine, coarse = total @ kronrod, total @ gauss
    late, late_coarse = survival @ kronrod, survival @ gauss
    comes, comes_coarse = (total * survival) @ kronrod, (total * survival) @ gauss
    left = torch.exp(-march.hazard)
    error = (
        step * ((fine - coarse).abs() * left + (comes - comes_coarse).abs())
        + step / scale * (late - late_coarse).abs()
    )
    good = live & (error <= tolerance) & torch.isfinite(error)
    # A step that cannot be halved any more is taken, and its error is reported.
    stuck = live & (march.gap + step / 2 <= march.gap)
    taken = good | stuck
    after = march.hazard + step * fine
    crosses = taken & (march.hazard < math.log(2.0)) & (after >= math.log(2.0))
    if bool(crosses.any()):
        march.median[crosses] = march.gap[crosses] + step[crosses] * _locate_median(
            total[crosses], march.hazard[crosses], step[crosses]
        )
    march.marks += torch.where(
        taken[..., None],
        step[..., None] * torch.einsum("bngk,bng,g->bnk", rates, survival, kronrod),
        torch.zeros_like(march.marks),
    )
    march.restricted += torch.where(taken, step * late, torch.zeros_like(step))
    march.error += torch.where(taken, error, torch.zeros_like(step))
    march.hazard = torch.where(taken, after, march.hazard)
    reached = torch.where(last, limit, march.gap + step)
    march.gap = torch.where(taken, reached, march.gap)
    grow = taken & (error <= tolerance / 16)
    shrunk = torch.where(live & ~taken, step / 2, march.step)
    march.step = torch.where(grow, march.step * 2, shrunk)


def _typical_gap(batch: EventBatch, horizon: float) -> float:
    """Return the mean gap of a batch, as a scale to begin with; never beyond the horizon."""
    times = batch.times.masked_fill(~batch.mask, 0.0)
    gaps = times.diff(dim=1)[batch.mask[:, 1:]]
    mean = float(gaps.mean()) if gaps.numel() else 0.0
    return min(mean, horizon) if mean > 0 else horizon / 16


@lru_cache(maxsize=1)
def _integration() -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Return two matrices for values at the nodes on [0, 1].

    The first gives the integrals of their polynomial from 0 to each node, the second its
    coefficients in Legendre polynomials.
    """
    nodes = 2 * kronrod_rule()[0].numpy() - 1
    to_coefficients = np.linalg.inv(np.polynomial.legendre.legvander(nodes, NUM_NODES - 1))
    integrals = _legendre_integrals(nodes) @ to_coefficients
    return torch.from_numpy(integrals), torch.from_numpy(to_coefficients)


def _legendre_integrals(points: np.ndarray) -> np.ndarray:
    """Return integrals of Legendre polynomials from -1 to points, halved as on [0, 1]."""
    values = np.polynomial.legendre.legvander(points, NUM_NODES)
    degree = np.arange(1, NUM_NODES)
    higher = (values[..., 2:] - values[..., :-2]) / (2 * degree + 1)
    return np.concatenate([values[..., 1:2] + 1.0, higher], axis=-1) / 2


def _locate_median(
    total: Float[Tensor, "R n"], before: Float[Tensor, "R"], step: Float[Tensor, "R"]
) -> Float[Tensor, "R"]:
    """Return the part of each step after which the integrated hazard is log 2."""
    coefficients = (total.cpu() @ _integration()[1].T).numpy()
    before, step = before.cpu(), step.cpu()
    low, high = np.zeros(len(total)), np.ones(len(total))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        part = (_legendre_integrals(2 * middle - 1) * coefficients).sum(axis=-1)
        below = before.numpy() + step.numpy() * part < math.log(2.0)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return torch.from_numpy((low + high) / 2).to(total.device)
