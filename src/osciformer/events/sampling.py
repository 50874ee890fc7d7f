"""Futures drawn from any process, by thinning with a bound that is checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

# A bound that was found, not given: the largest of this many values, times a margin.
_PROBES = 16
_MARGIN = 1.5
# Where an intensity jumps: an interval ends before it is so many times that at the beginning.
_STEEPEST = 4.0
_RAISE = 2.0
# Times that a bound may be raised for one and the same interval.
_LARGEST_RAISES = 30


class InvalidBoundError(RuntimeError):
    """The intensity exceeds what the process said it does not exceed."""


@dataclass(frozen=True)
class Futures:
    """Sequences drawn from a process.

    Attributes:
        sequences: What was drawn, without the histories; ids are the rows of `source`. Windows run
            from where each history ended to the end that was asked for.
        source: The row of the batch of histories that each one continues.
        is_cut: Whether a sequence stopped at the largest number of events.
        num_candidates: How often the intensity was looked at to accept or reject an event.
        num_raised: How often a bound that was found by probing proved too low, and was raised.
    """

    sequences: EventSequences
    source: Int[np.ndarray, "R"]
    is_cut: Bool[np.ndarray, "R"]
    num_candidates: int
    num_raised: int


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
    """Return futures of histories, drawn by thinning, all of them together.

    Candidates come at the rate of a bound of the intensity, and each is accepted with the
    probability intensity / bound. A bound of the process (`upper_bound`) that the intensity is
    found to exceed is an `InvalidBoundError`. A process without one has its intensity probed on
    short intervals, and around each jump that `gap_breaks` names; whenever a candidate shows
    that such a bound is too low, it is raised and the interval is drawn anew. That is as good as
    the probes: a peak between them that no candidate meets goes unseen, so a process with sharp
    peaks should state its bound.

    Args:
        process: The process.
        histories: What has happened before; rows may be empty.
        until: Where futures end, as a time.
        generator: Source of randomness, on the CPU: the same seed gives the same futures.
        start: From when on nothing is known, not before the last event; the time of the last event
            (the start of the window, or 0, where there is none) if not given.
        num_futures: Futures of each history.
        max_events: Largest number of events of a future.
        at_limit: What a future with more events is: an `error`, or cut there (`stop`).
        progress: Called with the number of finished futures and that of all.
        time_unit: Name of the unit of time of the result.
    """
    check_choice("at_limit", at_limit, ("error", "stop"))
    if num_futures < 1 or max_events < 1:
        raise ValueError(
            f"num_futures and max_events must be at least 1; got {num_futures} and {max_events}"
        )
    histories = histories.to(process.device)
    begin = histories.last_times if start is None else _per_row(start, histories)
    end = _per_row(until, histories)
    if bool((begin < histories.last_times).any() | (end < begin).any()):
        raise ValueError(
            "futures must start at or after the last event, and end after they start; got starts "
            f"{begin.tolist()[:5]}, ends {end.tolist()[:5]}"
        )
    source = torch.arange(len(histories)).repeat_interleave(num_futures)
    walk = _Walk(process, histories, source, begin[source], end[source], generator)
    total = len(source)
    while len(walk.live):
        walk.step()
        full = walk.num_new >= max_events
        if bool(full.any()):
            if at_limit == "error" and bool((full & (walk.now < walk.end)).any()):
                raise RuntimeError(
                    f"a future has {max_events} events before it ends; the process may explode. "
                    "Raise max_events, or pass at_limit='stop'"
                )
            walk.live = walk.live[~full[walk.live]]
        if progress is not None:
            progress(total - len(walk.live), total)
    return walk.finish(max_events, time_unit)


def _per_row(value: float | Float[Tensor, "B"], histories: EventBatch) -> Float[Tensor, "B"]:
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if tensor.dim() > 1 or (tensor.dim() == 1 and len(tensor) != len(histories)):
        raise ValueError(f"times must be a number or [{len(histories)}]; got {tensor.shape}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("futures must start and end at finite times")
    return tensor.to(histories.times.device).expand(len(histories)).clone()


class _Walk:
    """Futures under way: events so far, and how far each one has come."""

    def __init__(
        self,
        process: EventProcess,
        histories: EventBatch,
        source: Tensor,
        begin: Tensor,
        end: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.process, self.generator = process, generator
        self.source, self.begin, self.end, self.now = source, begin, end, begin.clone()
        self.events = histories.take(source.to(histories.times.device))
        self.num_old = self.events.lengths
        self.num_new = torch.zeros_like(self.num_old)
        self.live = (self.now < self.end).nonzero()[:, 0]
        self.factor = torch.ones_like(begin)  # of bounds that were found too low
        self.width = end - begin  # over which a bound of the process is asked for
        self.num_candidates = self.num_raised = 0

    def step(self) -> None:
        """Draw a candidate for each future under way, and accept it or not."""
        live = self.live
        batch, now, end = self.events.take(live), self.now[live], self.end[live]
        with self.process.remember(batch):
            self._draw(live, batch, now, end)

    def _draw(self, live: Tensor, batch: EventBatch, now: Tensor, end: Tensor) -> None:
        bound, stop, is_given = self._bound(batch, now, end)
        draws = torch.rand(3, len(live), generator=self.generator, dtype=torch.float64)
        draws = draws.to(now.device)
        # A bound of 0 says that nothing comes: the wait is infinite.
        candidate = now - torch.log1p(-draws[0]) / bound
        inside = candidate <= stop
        query = torch.where(inside, candidate, stop)
        query = torch.maximum(query, torch.nextafter(now, now.new_tensor(math.inf)))
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
        # Where many candidates are rejected, a bound over less time is a lower one.
        rejected = inside & ~too_high & ~happens
        self.width[live] *= torch.where(rejected, 0.5, torch.where(inside, 1.0, 2.0))
        self._append(live[happens], query[happens], kind.clamp(max=rates.shape[-1] - 1)[happens])
        self.now[live] = torch.where(too_high, now, query)
        self.live = live[self.now[live] < end]

    def _bound(self, batch: EventBatch, now: Tensor, end: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return a bound, until when it holds, and whether the process gave it."""
        just_after = torch.nextafter(now, now.new_tensor(math.inf))
        stop = torch.maximum(torch.minimum(end, now + self.width[self.live]), just_after)
        given = self.process.upper_bound(batch, now, stop)
        if given is not None:
            return given.double(), stop, True
        rate = self.process.total_intensity(batch, just_after[:, None])[:, 0].double()
        # A part of the whole: parts of what is left would never come to the end.
        longest = (self.end - self.begin)[self.live] / 8
        stop = torch.minimum(end, now + torch.minimum(2.0 / rate, longest))
        stop = torch.maximum(stop, just_after)
        share = torch.linspace(0, 1, _PROBES, dtype=torch.float64, device=now.device)
        probes = just_after[:, None] + (stop - just_after)[:, None] * share
        if self.process.gap_breaks is not None:
            jumps = self._around_breaks(batch, self.process.gap_breaks)
            jumps = torch.minimum(torch.maximum(jumps, just_after[:, None]), stop[:, None])
            probes = torch.cat([probes, jumps], dim=1).sort(dim=1).values
        peaks = self.process.total_intensity(batch, probes).double().cummax(dim=1).values
        if self.process.gap_breaks is not None:
            # A bound that holds for a peak ahead would reject nearly all that comes before it.
            reached = (peaks <= _STEEPEST * peaks[:, :1]).sum(dim=1, keepdim=True)
            reached = (reached - 1).clamp(min=0)
            stop, peaks = probes.gather(1, reached)[:, 0], peaks.gather(1, reached)
        return peaks[:, -1] * _MARGIN * self.factor[self.live], stop, False

    @staticmethod
    def _around_breaks(batch: EventBatch, breaks: Float[Tensor, "P"]) -> Float[Tensor, "L 2P"]:
        """Return times just before and just after each jump, which sums would miss by rounding."""
        moments = batch.last_times[:, None] + breaks.to(batch.times)
        sides = [torch.nextafter(moments, moments.new_tensor(to)) for to in (-math.inf, math.inf)]
        return torch.cat(sides, dim=1)

    def _append(self, rows: Tensor, times: Tensor, types: Tensor) -> None:
        if not len(rows):
            return
        slot = self.events.lengths[rows]
        width = self.events.times.shape[1]
        if int(slot.max()) >= width:
            more = (0, width)
            pad = torch.nn.functional.pad
            self.events = replace(
                self.events,
                times=pad(self.events.times, more),
                types=pad(self.events.types, more),
                mask=pad(self.events.mask, more),
            )
        self.events.times[rows, slot] = times
        self.events.types[rows, slot] = types
        self.events.mask[rows, slot] = True
        self.num_new[rows] += 1

    def finish(self, max_events: int, time_unit: str | None) -> Futures:
        """Return the events behind the histories as sequences."""
        steps = torch.arange(self.events.times.shape[1], device=self.events.times.device)
        drawn = self.events.mask & (steps >= self.num_old[:, None])
        counts = self.num_new.cpu().numpy()
        source = self.source.cpu().numpy()
        is_cut = ((self.num_new >= max_events) & (self.now < self.end)).cpu()
        sequences = EventSequences(
            self.events.times[drawn].cpu().numpy(),
            self.events.types[drawn].cpu().numpy(),
            np.concatenate([[0], np.cumsum(counts)]),
            ids=source,
            num_types=self.process.num_types,
            starts=self.begin.cpu().numpy(),
            # What was cut has been observed until its last event only.
            ends=torch.where(is_cut, self.now.cpu(), self.end.cpu()).numpy(),
            time_unit=time_unit,
        )
        return Futures(sequences, source, is_cut.numpy(), self.num_candidates, self.num_raised)
