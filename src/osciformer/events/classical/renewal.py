"""Renewal processes: a histogram of gaps, and types that depend on the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

MarkRule = Literal["markov", "repeat", "independent"]


@dataclass(frozen=True)
class GapDensity:
    """A density of gaps that is constant within bins, and exponential beyond the last one.

    Attributes:
        edges: Edges of the bins, from 0 on, increasing; [0] alone for an exponential density.
        mass: Probability of each bin.
        tail_rate: Hazard beyond the last edge, where the rest of the probability lies.
    """

    edges: Float[Tensor, "m+1"]
    mass: Float[Tensor, "m"]
    tail_rate: float

    @classmethod
    def fit(
        cls,
        gaps: Float[np.ndarray, "G"],
        *,
        num_bins: int = 20,
        min_width: float = 0.0,
        smoothing: float = 0.5,
    ) -> GapDensity:
        """Return the histogram of gaps in bins of about equal counts.

        Args:
            gaps: Gaps, not negative, some of them positive.
            num_bins: Largest number of bins; 0 for an exponential density.
            min_width: Smallest width of a bin: below the resolution of the clock a density says
                more of the clock than of the events, and its likelihood grows without bound.
            smoothing: Added to the count of each bin, and of what lies beyond the largest gap.
        """
        gaps = np.asarray(gaps, dtype=np.float64)
        if len(gaps) == 0 or not gaps.max() > 0:
            raise ValueError("a density of gaps needs a gap that is not zero")
        rate = 1.0 / gaps.mean()
        if num_bins == 0:
            return cls(torch.zeros(1, dtype=torch.float64), torch.zeros(0).double(), float(rate))
        edges = [0.0]
        for edge in np.quantile(gaps, np.linspace(0, 1, num_bins + 1)[1:]):
            if edge - edges[-1] >= max(min_width, 1e-12 * gaps.max()):
                edges.append(float(edge))
        # The largest gap closes the last bin, be that a little wider than the others.
        if edges[-1] < gaps.max() and len(edges) > 1:
            edges[-1] = float(gaps.max())
        elif len(edges) == 1:
            edges.append(float(max(gaps.max(), min_width)))
        counts = np.histogram(gaps, bins=edges)[0] + smoothing
        mass = counts / (counts.sum() + smoothing)
        return cls(torch.tensor(edges, dtype=torch.float64), torch.from_numpy(mass), float(rate))

    def hazard(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the hazard as a left limit: at an edge, that of the bin before it."""
        edges, density, survival = self._parts(gaps)
        if len(density) == 0:
            return torch.full_like(gaps, self.tail_rate)
        bin = (torch.searchsorted(edges, gaps.contiguous()) - 1).clamp(min=0)
        inner = bin.clamp(max=len(density) - 1)
        left = survival[inner] - density[inner] * (gaps - edges[inner])
        # At the end of the last bin without a tail nothing is left; the guard keeps that finite.
        inside = density[inner] / left.clamp(min=torch.finfo(gaps.dtype).tiny)
        return torch.where(bin < len(density), inside, torch.full_like(gaps, self.tail_rate))

    def cumulative_hazard(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the integral of the hazard from 0, minus the log of the survival function."""
        edges, density, survival = self._parts(gaps)
        if len(density) == 0:
            return gaps * self.tail_rate
        bin = (torch.searchsorted(edges, gaps.contiguous()) - 1).clamp(min=0)
        inner = bin.clamp(max=len(density) - 1)
        left = survival[inner] - density[inner] * (gaps - edges[inner])
        tail = -survival[-1].log() + self.tail_rate * (gaps - edges[-1])
        inside = -left.clamp(min=torch.finfo(gaps.dtype).tiny).log()
        return torch.where(bin < len(density), inside, tail)

    def _parts(self, gaps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        edges, mass = self.edges.to(gaps.device), self.mass.to(gaps.device)
        beyond = (1.0 - mass.sum()).clamp(min=0.0)
        # From the tail inwards, so that small probabilities keep their digits.
        survival = torch.cat([mass, beyond[None]]).flip(0).cumsum(0).flip(0)
        return edges, mass / edges.diff(), survival


class RenewalProcess(EventProcess):
    r"""Gaps drawn from one density, types from a chain: $\lambda_k(t) = h(t - t_i)\,P_{k_i k}$.

    Before the first event, gaps count from the start of the window (from the first event if there
    is no window), and the type has the distribution `initial`.

    Args:
        gaps: The density of gaps, with its hazard h.
        transition: Probability of the next type (second axis) after each type (first axis).
        initial: Probability of each type at the first event.
    """

    def __init__(
        self, gaps: GapDensity, transition: Float[Tensor, "K K"], initial: Float[Tensor, "K"]
    ) -> None:
        self.gaps = gaps
        self.transition = torch.as_tensor(transition, dtype=torch.float64)
        self.initial = torch.as_tensor(initial, dtype=torch.float64)
        self.num_types = len(self.initial)
        if self.transition.shape != (self.num_types, self.num_types):
            raise ValueError(
                f"transition must be [{self.num_types}, {self.num_types}]; "
                f"got {list(self.transition.shape)}"
            )
        rows = torch.cat([self.transition, self.initial[None]])
        if bool((rows < 0).any()) or not torch.allclose(rows.sum(1), rows.new_ones(1)):
            raise ValueError("each row of transition, and initial, must be probabilities")
        self.gap_breaks = gaps.edges[1:] if len(gaps.mass) else None

    @classmethod
    def fit(
        cls,
        sequences: EventSequences,
        *,
        marks: MarkRule = "markov",
        num_bins: int = 20,
        min_width: float = 0.0,
        smoothing: float = 1.0,
    ) -> RenewalProcess:
        """Return the process with the gaps and the transitions of the data.

        Args:
            sequences: The events.
            marks: `markov`, a chain of first order; `repeat`, the last type again with one
                probability for all types, and otherwise another one by its frequency;
                `independent`, by frequency alone.
            num_bins: Bins of the histogram of gaps; 0 for exponential gaps.
            min_width: Smallest width of a bin.
            smoothing: Weight of the frequencies of types, in events, against what followed a type.
        """
        check_choice("marks", marks, ("markov", "repeat", "independent"))
        count = sequences.num_types
        owner = np.repeat(np.arange(len(sequences)), sequences.lengths)
        inside = np.diff(owner) == 0
        before, after = sequences.types[:-1][inside], sequences.types[1:][inside]
        pairs = np.zeros((count, count))
        np.add.at(pairs, (before, after), 1.0)
        frequency = np.bincount(sequences.types, minlength=count) + 0.5
        frequency = frequency / frequency.sum()
        if marks == "markov":
            smoothed = pairs + smoothing * frequency
            transition = smoothed / smoothed.sum(axis=1, keepdims=True)
        elif marks == "repeat" and count > 1:
            again = (np.trace(pairs) + smoothing) / (pairs.sum() + 2 * smoothing)
            transition = np.tile((1 - again) * frequency, (count, 1))
            np.fill_diagonal(transition, 0.0)
            transition /= (1 - frequency)[:, None]
            np.fill_diagonal(transition, again)
        else:
            transition = np.tile(frequency, (count, 1))
        gaps = GapDensity.fit(sequences.gaps, num_bins=num_bins, min_width=min_width)
        return cls(gaps, torch.from_numpy(transition), torch.from_numpy(frequency))

    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the hazard of the gap, shared out among types."""
        since, marks = self._past(batch, query_times)
        return self.gaps.hazard(since.clamp(min=0.0))[..., None] * marks

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the same at gaps after each event."""
        marks = self.transition.to(gaps.device)[batch.clean_types]
        return self.gaps.hazard(gaps)[..., None] * marks[:, :, None]

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"]:
        """Return the integral of the hazard of the gap."""
        return self.gaps.cumulative_hazard(gaps)

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"] | None:
        """Return the exact integrals; None if an interval has events within it."""
        if bool((batch.count_before(end) > batch.count_until(start)).any()):
            return None
        # Just after the start, so that an event there is already the last one.
        inf = start.new_tensor(torch.inf)
        probe = torch.minimum(torch.nextafter(start, inf), torch.maximum(start, end))
        probe = torch.where(end > start, probe, start)
        since, marks = self._past(batch, probe)
        since = since - (probe - start)
        # Rounding must not make a gap after an event negative.
        since = torch.where(batch.count_until(start) > 0, since.clamp(min=0.0), since)
        total = self._integrated(since + (end - start)) - self._integrated(since)
        # Nothing, even where a density without a tail leaves no chance of having come so far.
        total = torch.where(end > start, total, 0.0)
        return total[..., None] * marks

    def _integrated(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the integral of the hazard from 0; before that, it is constant."""
        first = self.gaps.hazard(torch.zeros_like(gaps))
        return self.gaps.cumulative_hazard(gaps.clamp(min=0.0)) + first * gaps.clamp(max=0.0)

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"]:
        """Return the largest hazard of the gaps from start to end; it rises within each bin."""
        just_after = torch.nextafter(start, start.new_tensor(torch.inf))
        since = self._past(batch, just_after[:, None])[0]
        until = (since + (end - start).clamp(min=0.0)[:, None]).clamp(min=0.0)
        edges = self.gaps.edges.to(start.device)
        peaks = self.gaps.hazard(edges).expand(len(start), -1)
        met = (edges > since) & (edges < until)
        highest = torch.where(met, peaks, torch.zeros_like(peaks)).amax(dim=1)
        # A hair more, since gaps are rounded differences of times.
        return torch.maximum(highest, self.gaps.hazard(until)[:, 0]) * (1 + 1e-6)

    def _past(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M K"]]:
        """Return the time since the last event, and the probabilities of the next type.

        Before the first event it is the time since the beginning, which may be negative.
        """
        known = batch.count_before(query_times)
        last = (known - 1).clamp(min=0)
        times = batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        begin = batch.first_times if batch.starts is None else batch.starts
        times = torch.where(known > 0, times, begin[:, None])
        types = batch.clean_types.gather(1, last)
        marks = torch.where(
            (known > 0)[..., None],
            self.transition.to(times.device)[types],
            self.initial.to(times.device),
        )
        return query_times - times, marks
