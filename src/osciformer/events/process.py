"""What a marked temporal point process must be able to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch

from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch

# Entries of histories that the default of `intensity_after` holds at once.
LARGEST_EXPANSION = 2_000_000


class EventProcess(ABC):
    r"""A process with events of K types, given by its conditional intensities.

    $$\lambda_k(t) = \lim_{h \to 0} \frac1h
    P(\text{an event of type } k \text{ in } [t, t + h) \mid \text{events before } t)$$

    `intensity` is all that a process must have. The rest has defaults, or returns None for "there
    is no closed form", in which case quadrature and a verified bound take its place.
    """

    num_types: int
    # Where batches are put that this process is asked about.
    device: torch.device | str = "cpu"
    # Times since the last event (or the start of the window) at which the intensity jumps or has a
    # corner, increasing [P]; integrators of `predict_next` do not step across them.
    gap_breaks: Float[Tensor, "P"] | None = None

    @abstractmethod
    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the intensity of each type at any times, as left limits.

        The value at t depends on the events of its row strictly before t alone: an event at t does
        not see itself, nor others at the same time.

        Args:
            batch: Events; padding must not matter, whatever it holds.
            query_times: Times, float64, in any order.

        Returns:
            Intensities, not negative, in events per unit of time.
        """

    def total_intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """Return the intensity of any event, the sum over types."""
        return self.intensity(batch, query_times).sum(dim=-1)

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"] | None:
        """Return the exact integral of the intensities over (start, end], or None.

        Args:
            batch: Events; those within an interval act on the rest of it.
            start: Where the intervals begin.
            end: Where they end, not before `start`.
        """
        return None

    def total_compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M"] | None:
        """Return the exact integral of the intensity of any event, or None; see `compensator`."""
        by_type = self.compensator(batch, start, end)
        return None if by_type is None else by_type.sum(dim=-1)

    def remember(self, batch: EventBatch) -> AbstractContextManager[None]:
        """Return a context in which a batch is asked about repeatedly; it may be encoded once."""
        return nullcontext()

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"] | None:
        """Return what the total intensity does not exceed on (start, end], or None if not known.

        Args:
            batch: The events so far, all at or before `start`; no further one happens.
            start: Where the intervals begin.
            end: Where they end.
        """
        return None

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the intensities that each event would be followed by if no other one came.

        The value at (b, i, g) is the intensity at `times[b, i] + gaps[b, i, g]` given the events up
        to and including i, as if those after it had not happened. This default builds a history for
        each event; a process with a state after each event should do better.

        Args:
            batch: Events.
            gaps: Times since the event, not negative; 0 stands for just after it.

        Returns:
            Intensities; what stands at padding has no meaning, but is finite.
        """
        size, width, num_gaps = gaps.shape
        rows = torch.arange(size, device=gaps.device).repeat_interleave(width)
        known = torch.arange(1, width + 1, device=gaps.device).repeat(size)
        known = torch.minimum(known, batch.lengths[rows])
        base = batch.times.masked_fill(~batch.mask, 0.0).reshape(-1, 1)
        base = torch.where(batch.mask.reshape(-1, 1), base, batch.last_times[rows, None])
        query = query_after(base, gaps.reshape(-1, num_gaps))
        step = max(1, LARGEST_EXPANSION // (width + num_gaps))
        parts = [
            self.intensity(
                batch.known_until(rows[i : i + step], known[i : i + step]), query[i : i + step]
            )
            for i in range(0, len(rows), step)
        ]
        return torch.cat(parts).reshape(size, width, num_gaps, -1)

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"] | None:
        """Return the exact integral of `intensity_after` from each event on, or None.

        Args:
            batch: Events.
            gaps: Where the integrals end, as times since the event, not negative.

        Returns:
            Integrals of the intensity of any event; what stands at padding has no meaning.
        """
        return None


def query_after(
    event_times: Float[Tensor, "*#S"], gaps: Float[Tensor, "*#S"]
) -> Float[Tensor, "*#S"]:
    """Return times at some gaps after events, later than these even where the sum rounds down."""
    event_times = event_times.expand_as(gaps) if event_times.dim() == gaps.dim() else event_times
    return torch.maximum(
        event_times + gaps, torch.nextafter(event_times, event_times.new_tensor(torch.inf))
    )
