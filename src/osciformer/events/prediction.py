"""What comes next: the distribution of the next event, and futures drawn by thinning."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.polynomial import legendre

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data.ragged import offsets_of
from osciformer.events.likelihood import NUM_NODES, kronrod_rule
from osciformer.events.process import EventProcess, just_after, query_after
from osciformer.events.sequences import EventBatch, EventSequences

# Halvings that locate the median within a step of the integration.
_BISECTIONS = 50
# A bound found by probing is the largest of this many values, times a margin.
_PROBES, _MARGIN = 16, 1.5
# Before a jump, an interval ends when the intensity reaches this multiple of that at its start.
_STEEPEST = 4.0
# A bound that proves too low is raised by this factor, at most so many times per interval.
_RAISE, _LARGEST_RAISES = 2.0, 30


@dataclass(frozen=True)
class NextEvent:
    """The next event after each event, predicted from the events up to it; all is finite."""

    mean: Float[Tensor, "B N"]  #: Expected gap, given that the event comes before the horizon.
    restricted_mean: Float[Tensor, "B N"]  #: Expected minimum of the gap and the horizon.
    median: Float[Tensor, "B N"]  #: Median of the gap, at most the horizon.
    survival: Float[Tensor, "B N"]  #: Probability that no event comes before the horizon.
    type_probability: Float[Tensor, "B N K"]  #: Given that the event comes before the horizon.
    error: float  #: Largest estimated error of the probabilities, over all events.
    mask: Bool[Tensor, "B N"]  #: True where there is an event to predict from.


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
    r"""Return summaries of the distribution of the next event after each event of a batch.

    With the survival function $S(g) = \exp(-\int_0^g \lambda)$ of the gap g,
    $$E[\min(g, H)] = \int_0^H S, \qquad p_k = \int_0^H \lambda_k S \Big/ (1 - S(H)).$$

    Args:
        process: The process.
        batch: Events; the prediction at (b, i) knows the events up to and including i.
        horizon: Where to stop, as a gap. It matters only if survival beyond it does.
        tolerance: Largest error of a step, in probability and in mean gaps.
        negligible: Stop when survival falls below this.
        max_steps: Largest number of steps; more are an error.
        scale: Length of the first steps, and unit of gaps; by default the mean gap of the batch.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon must be positive and finite; got {horizon}")
    scale = _typical_gap(batch, horizon) if scale is None else scale
    march = _March(process, batch, horizon, scale)
    with process.remember(batch):
        for _ in range(max_steps):
            live = batch.mask & (march.gap < horizon) & (march.hazard < -math.log(negligible))
            if not bool(live.any()):
                break
            march.advance(live, tolerance)
        else:
            raise RuntimeError(
                f"the next event is not predicted after {max_steps} steps; the intensity may jump "
                "at gaps that gap_breaks of the process does not name, or the tolerance may be too "
                "small"
            )
    # Events that stopped at negligible survival are predicted to come before the horizon.
    survival = torch.where(march.gap >= horizon, torch.exp(-march.hazard), 0.0)
    comes = march.marks.sum(dim=-1)
    divisor = comes.clamp(min=torch.finfo(comes.dtype).tiny)
    never = comes <= 1e-12
    mean = ((march.restricted - horizon * survival) / divisor).clamp(0.0, horizon)
    mean = torch.where(never, horizon, mean)
    marks = march.marks / divisor[..., None]
    marks = torch.where(never[..., None], 1.0 / process.num_types, marks)
    error = float(march.error.masked_fill(~batch.mask, 0.0).max())
    return NextEvent(mean, march.restricted, march.median, survival, marks, error, batch.mask)


def predict_last(process: EventProcess, batch: EventBatch, **settings: Any) -> NextEvent:
    """Return `predict_next` after the last event of each row only (N = 1), with its settings."""
    last = (batch.lengths - 1).clamp(min=0)[:, None]
    times, types = (item.gather(1, last) for item in (batch.finite_times, batch.clean_types))
    ends = EventBatch(times, types, (batch.lengths > 0)[:, None])
    settings = {"scale": _typical_gap(batch, settings["horizon"]), **settings}
    return predict_next(_AfterLast(process, batch), ends, **settings)


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
    """Return the probability of each type if an event comes at a time; 1/K if none can come."""
    rates = process.intensity(batch, query_times)
    total = rates.sum(dim=-1, keepdim=True)
    shares = rates / total.clamp(min=torch.finfo(rates.dtype).tiny)
    return torch.where(total > 0, shares, 1.0 / rates.shape[-1])


class _March:
    """Integrals after each event [B, N] up to its `gap`, advanced by adaptive steps."""

    def __init__(self, process: EventProcess, batch: EventBatch, horizon: float, scale: float):
        self.process, self.batch, self.scale = process, batch, scale
        zeros = torch.zeros(batch.mask.shape, dtype=torch.float64, device=batch.times.device)
        self.gap = self.hazard = self.restricted = self.error = zeros
        self.step, self.median = torch.full_like(zeros, scale), torch.full_like(zeros, horizon)
        self.marks = zeros[..., None].repeat(1, 1, process.num_types)
        self.rule = kronrod_rule(zeros.device)
        # Integrals from 0 to each node of the polynomial through values at all nodes.
        basis = legendre.legvander(2 * self.rule.nodes.cpu().numpy() - 1, NUM_NODES)
        self.running = torch.from_numpy(basis @ _antiderivative()).to(zeros.device)
        breaks = zeros.new_zeros(0) if process.gap_breaks is None else process.gap_breaks
        self.edges = torch.cat([breaks.to(zeros), zeros.new_tensor([horizon])]).clamp(max=horizon)

    def advance(self, live: Bool[Tensor, "B N"], tolerance: float) -> None:
        """Try a step after each live event, and keep the accurate ones."""
        nodes, kronrod, gauss = self.rule
        following = torch.searchsorted(self.edges, self.gap.contiguous(), right=True)
        limit = self.edges[following.clamp(max=len(self.edges) - 1)]
        room = (limit - self.gap).clamp(min=0.0)
        step = torch.where(live, torch.minimum(self.step, room), 0.0)
        gaps = self.gap[..., None] + step[..., None] * nodes
        # Finished events are evaluated at a harmless gap and ignored.
        gaps = torch.where(live[..., None], gaps, self.scale * nodes)
        rates = self.process.intensity_after(self.batch, gaps).double()
        rates = torch.where(live[..., None, None], rates, 0.0)
        total = rates.sum(dim=-1)  # [B, N, nodes]
        survival = torch.exp(-(self.hazard[..., None] + step[..., None] * (total @ self.running.T)))
        comes = total * survival
        fine, late = total @ kronrod, survival @ kronrod
        off, late_off = (fine - total @ gauss).abs(), (late - survival @ gauss).abs()
        comes_off = (comes @ kronrod - comes @ gauss).abs()
        error = step * (off * torch.exp(-self.hazard) + comes_off) + step / self.scale * late_off
        good = live & (error <= tolerance) & torch.isfinite(error)
        # A step that cannot be halved any more is taken, and its error is reported.
        taken = good | (live & (self.gap + step / 2 <= self.gap))
        after = self.hazard + step * fine
        crosses = taken & (self.hazard < math.log(2.0)) & (after >= math.log(2.0))
        if bool(crosses.any()):
            share = _locate_median(total[crosses], self.hazard[crosses], step[crosses])
            self.median[crosses] = self.gap[crosses] + step[crosses] * share
        marks = step[..., None] * torch.einsum("bngk,bng,g->bnk", rates, survival, kronrod)
        self.marks = self.marks + torch.where(taken[..., None], marks, 0.0)
        self.restricted = self.restricted + torch.where(taken, step * late, 0.0)
        self.error = self.error + torch.where(taken, error, 0.0)
        self.hazard = torch.where(taken, after, self.hazard)
        reached = torch.where(step >= room, limit, self.gap + step)
        self.gap = torch.where(taken, reached, self.gap)
        shrunk = torch.where(live & ~taken, step / 2, self.step)
        self.step = torch.where(taken & (error <= tolerance / 16), self.step * 2, shrunk)


def _typical_gap(batch: EventBatch, horizon: float) -> float:
    """Return the mean gap of a batch, as a scale to begin with; at most the horizon."""
    gaps = batch.finite_times.diff(dim=1)[batch.mask[:, 1:]]
    mean = float(gaps.mean()) if gaps.numel() else 0.0
    return min(mean, horizon) if mean > 0 else horizon / 16


@lru_cache(maxsize=1)
def _antiderivative() -> Float[np.ndarray, "16 15"]:
    """Return Legendre coefficients of the integral from 0, for values at the nodes on [0, 1]."""
    nodes = 2 * kronrod_rule().nodes.numpy() - 1
    coefficients = np.linalg.inv(legendre.legvander(nodes, NUM_NODES - 1))
    return legendre.legint(coefficients, lbnd=-1) / 2


def _locate_median(total: Float[Tensor, "R n"], before: Tensor, step: Tensor) -> Tensor:
    """Return the part [R] of each step after which the integrated hazard is log 2."""
    coefficients = total.cpu().numpy() @ _antiderivative().T
    missing = (math.log(2.0) - before.cpu().numpy()) / step.cpu().numpy()
    low, high = np.zeros(len(total)), np.ones(len(total))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        basis = legendre.legvander(2 * middle - 1, NUM_NODES)
        below = (basis * coefficients).sum(axis=-1) < missing
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return torch.from_numpy((low + high) / 2).to(total.device)


class InvalidBoundError(RuntimeError):
    """The intensity exceeds the upper bound that the process gives."""


@dataclass(frozen=True)
class Futures:
    """Sequences drawn from a process."""

    sequences: EventSequences  #: The drawn events, without the histories; ids are `source`.
    source: Int[np.ndarray, "R"]  #: The row of the batch of histories that each one continues.
    is_cut: Bool[np.ndarray, "R"]  #: Whether it stopped at the largest number of events.
    num_candidates: int  #: Number of candidate events that were accepted or rejected.
    num_raised: int  #: How often a bound found by probing proved too low and was raised.


@torch.no_grad()
def sample(
    process: EventProcess,
    histories: EventBatch,
    *,
    until: float | Float[Tensor, "B"],
    generator: torch.Generator,
    start: float | Float[Tensor, "B"] | None = None,
    num_futures: int = 1,
    max_events: int = 10_000,
    at_limit: Literal["error", "stop"] = "error",
    progress: Callable[[int, int], None] | None = None,
    time_unit: str | None = None,
) -> Futures:
    """Return futures of histories, all drawn together by thinning.

    If the intensity exceeds the `upper_bound` of the process, an `InvalidBoundError` is raised. If
    the process has no bound, its intensity is probed on short intervals and around each of its
    `gap_breaks`. A peak between the probes can go unseen, so a process with sharp peaks should
    state its bound.

    Args:
        process: The process.
        histories: What has happened before; rows may be empty.
        until: Where futures end, as a time.
        generator: Source of randomness, on the CPU: the same seed gives the same futures.
        start: Where futures begin, not before the last event; there if not given.
        num_futures: Futures of each history.
        max_events: Largest number of events of a future.
        at_limit: What happens to a future with more events: an `error`, or it is cut (`stop`).
        progress: Called with the number of finished futures and that of all.
        time_unit: Name of the unit of time of the result.
    """
    check_choice("at_limit", at_limit, ("error", "stop"))
    if num_futures < 1 or max_events < 1:
        got = f"{num_futures} and {max_events}"
        raise ValueError(f"num_futures and max_events must be at least 1; got {got}")
    histories = histories.to(process.device)
    begin = histories.last_times if start is None else _per_row(start, histories)
    end = _per_row(until, histories)
    if bool((begin < histories.last_times).any() | (end < begin).any()):
        raise ValueError(
            "futures must start at or after the last event, and end after they start; got starts "
            f"{begin.tolist()[:5]}, ends {end.tolist()[:5]}"
        )
    source = torch.arange(len(histories)).repeat_interleave(num_futures)
    walk = _Thinning(process, histories.take(source.to(end.device)), begin[source], end[source])
    while len(walk.live):
        walk.draw(generator)
        full = walk.num_new >= max_events
        if at_limit == "error" and bool((full & (walk.now < walk.end)).any()):
            raise RuntimeError(
                f"a future has {max_events} events before it ends; the process may explode. "
                "Raise max_events, or pass at_limit='stop'"
            )
        walk.live = walk.live[~full[walk.live]]
        if progress is not None:
            progress(len(source) - len(walk.live), len(source))
    events, counts = walk.events, walk.num_new.cpu()
    steps = torch.arange(events.times.shape[1], device=events.times.device)
    drawn = events.mask & (steps >= walk.num_old[:, None])
    now, ends = walk.now.cpu(), walk.end.cpu()
    is_cut = (counts >= max_events) & (now < ends)
    sequences = EventSequences(
        events.times[drawn].cpu().numpy(),
        events.types[drawn].cpu().numpy(),
        offsets_of(counts.numpy()),
        ids=source.numpy(),
        num_types=process.num_types,
        starts=walk.begin.cpu().numpy(),
        # A cut future is observed only until its last event.
        ends=torch.where(is_cut, now, ends).numpy(),
        time_unit=time_unit,
    )
    return Futures(sequences, source.numpy(), is_cut.numpy(), walk.num_candidates, walk.num_raised)


def _per_row(value: float | Float[Tensor, "B"], histories: EventBatch) -> Float[Tensor, "B"]:
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if tensor.dim() > 1 or (tensor.dim() == 1 and len(tensor) != len(histories)):
        raise ValueError(f"times must be a number or [{len(histories)}]; got {tensor.shape}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("futures must start and end at finite times")
    return tensor.to(histories.times.device).expand(len(histories)).clone()


class _Thinning:
    """Unfinished futures: their events so far, and the time each has reached."""

    def __init__(self, process: EventProcess, events: EventBatch, begin: Tensor, end: Tensor):
        self.process, self.events = process, events
        self.begin, self.end, self.now = begin, end, begin.clone()
        self.num_old = events.lengths
        self.num_new = torch.zeros_like(self.num_old)
        self.live = (self.now < self.end).nonzero()[:, 0]
        self.factor = torch.ones_like(begin)  # of bounds that were found too low
        self.width = end - begin  # over which a bound of the process is asked for
        self.num_candidates = self.num_raised = 0

    def draw(self, generator: torch.Generator) -> None:
        """Draw a candidate for each live future, and accept it or not."""
        live = self.live
        batch, now, end = self.events.take(live), self.now[live], self.end[live]
        draws = torch.rand(3, len(live), generator=generator, dtype=torch.float64).to(now.device)
        with self.process.remember(batch):
            bound, stop, is_given = self._bound(batch, now, end)
            # If the bound is 0, nothing comes and the wait is infinite.
            candidate = now - torch.log1p(-draws[0]) / bound
            inside = candidate <= stop
            query = torch.maximum(torch.where(inside, candidate, stop), just_after(now))
            rates = self.process.intensity(batch, query[:, None])[:, 0].double()
        total = rates.sum(dim=-1)
        too_high = (total > bound) & inside
        if is_given and bool(too_high.any()):
            row = int(too_high.nonzero()[0, 0])
            raise InvalidBoundError(
                f"the intensity is {float(total[row]):.6g} at time {float(query[row]):.6g}, above "
                f"the bound {float(bound[row]):.6g} that the process gives"
            )
        if not bool(torch.isfinite(total[inside]).all()):
            raise RuntimeError("the intensity is not finite where an event may come")
        self.factor[live] = torch.where(too_high, self.factor[live] * _RAISE, 1.0)
        if bool((self.factor > _RAISE**_LARGEST_RAISES).any()):
            raise RuntimeError("no bound of the intensity is found; give the process upper_bound")
        self.num_raised += int(too_high.sum())
        self.num_candidates += int(inside.sum())
        happens = inside & ~too_high & (draws[1] * bound < total)
        kind = torch.searchsorted(rates.cumsum(dim=-1), (draws[2] * total)[:, None])[:, 0]
        # After a rejection the bound is taken over less time, which makes it lower.
        rejected = inside & ~too_high & ~happens
        self.width[live] *= torch.where(rejected, 0.5, torch.where(inside, 1.0, 2.0))
        self._append(live[happens], query[happens], kind.clamp(max=rates.shape[-1] - 1)[happens])
        self.now[live] = torch.where(too_high, now, query)
        self.live = live[self.now[live] < end]

    def _bound(self, batch: EventBatch, now: Tensor, end: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return a bound, until when it holds, and whether the process gave it."""
        first = just_after(now)
        stop = torch.maximum(torch.minimum(end, now + self.width[self.live]), first)
        given = self.process.upper_bound(batch, now, stop)
        if given is not None:
            return given.double(), stop, True
        rate = self.process.total_intensity(batch, first[:, None])[:, 0].double()
        # A part of the whole: parts of what is left would never come to the end.
        longest = (self.end - self.begin)[self.live] / 8
        stop = torch.maximum(torch.minimum(end, now + torch.minimum(2.0 / rate, longest)), first)
        share = torch.linspace(0, 1, _PROBES, dtype=torch.float64, device=now.device)
        probes = first[:, None] + (stop - first)[:, None] * share
        breaks = self.process.gap_breaks
        if breaks is not None:
            # Just before and just after each jump, which sums would miss by rounding.
            jumps = batch.last_times[:, None] + breaks.to(batch.times)
            before = torch.nextafter(jumps, jumps.new_tensor(-math.inf))
            jumps = torch.cat([before, just_after(jumps)], dim=1)
            jumps = torch.minimum(torch.maximum(jumps, first[:, None]), stop[:, None])
            probes = torch.cat([probes, jumps], dim=1).sort(dim=1).values
        peaks = self.process.total_intensity(batch, probes).double().cummax(dim=1).values
        if breaks is not None:
            # A bound that holds for a peak ahead would reject nearly all that comes before it.
            reached = (peaks <= _STEEPEST * peaks[:, :1]).sum(dim=1, keepdim=True).clamp(min=1) - 1
            stop, peaks = probes.gather(1, reached)[:, 0], peaks.gather(1, reached)
        return peaks[:, -1] * _MARGIN * self.factor[self.live], stop, False

    def _append(self, rows: Tensor, times: Tensor, types: Tensor) -> None:
        events, slot = self.events, self.events.lengths[rows]
        width = events.times.shape[1]
        if bool((slot >= width).any()):
            pad, names = torch.nn.functional.pad, ("times", "types", "mask")
            longer = {name: pad(getattr(events, name), (0, width)) for name in names}
            self.events = events = replace(events, **longer)
        events.times[rows, slot], events.types[rows, slot] = times, types
        events.mask[rows, slot] = True
        self.num_new[rows] += 1
