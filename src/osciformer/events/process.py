"""The interface of a marked temporal point process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from osciformer._types import Float, Tensor
from osciformer.events.sequences import EventBatch, EventSequences

# Entries of histories that the default of `intensity_after` holds at once.
LARGEST_EXPANSION = 2_000_000


class EventProcess(ABC):
    r"""A process with events of K types, given by its conditional intensities.

    $$\lambda_k(t) = \lim_{h \to 0} \frac1h
    P(\text{an event of type } k \text{ in } [t, t + h) \mid \text{events before } t)$$

    A process must define `intensity`. All other methods have defaults, or return None if there is
    no closed form; quadrature and a verified bound are used then.
    """

    num_types: int
    device: torch.device | str = "cpu"  # where it expects its batches
    # Times since the last event (or the start of the window) at which the intensity jumps or has a
    # corner, increasing [P]; integrators of `predict_next` do not step across them.
    gap_breaks: Float[Tensor, "P"] | None = None

    @abstractmethod
    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the intensity of each type, in events per unit of time, at any times (float64).

        The value at t depends only on the events of its row strictly before t: an event at t sees
        neither itself nor others at the same time. Padding must not matter, whatever it holds.
        """

    def total_intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M"]:
        """Return the intensity of any event, the sum over types."""
        return self.intensity(batch, query_times).sum(dim=-1)

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"] | None:
        """Return the exact integral of the intensities over (start, end], or None.

        Events within an interval act on the rest of it. No `end` lies before its `start`.
        """
        return None

    def total_compensator(
        self, batch: EventBatch, start: Tensor, end: Tensor
    ) -> Float[Tensor, "B M"] | None:
        """Return the exact integral of the intensity of any event, or None; see `compensator`."""
        by_type = self.compensator(batch, start, end)
        return None if by_type is None else by_type.sum(dim=-1)

    def remember(self, batch: EventBatch) -> AbstractContextManager[None]:
        """Return a context in which repeated queries of a batch may share one encoding of it."""
        return nullcontext()

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"] | None:
        """Return an upper bound of the total intensity on (start, end], or None if unknown.

        All events of the batch lie at or before `start`, and no further one happens.
        """
        return None

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the intensities after each event if no other event follows it.

        The value at (b, i, g) is the intensity at `times[b, i] + gaps[b, i, g]` given only the
        events up to and including i. A gap of 0 stands for just after the event. Values at padding
        are finite but have no meaning. A process with a state after each event should override it.
        """
        size, width, num_gaps = gaps.shape
        rows = torch.arange(size, device=gaps.device).repeat_interleave(width)
        known = torch.arange(1, width + 1, device=gaps.device).repeat(size)
        known = torch.minimum(known, batch.lengths[rows])
        base = torch.where(batch.mask, batch.finite_times, batch.last_times[:, None])
        query = query_after(base.reshape(-1, 1), gaps.reshape(-1, num_gaps))
        step = max(1, LARGEST_EXPANSION // (width + num_gaps))
        parts = zip(rows.split(step), known.split(step), query.split(step), strict=True)
        rates = [self.intensity(batch.known_until(r, k), q) for r, k, q in parts]
        return torch.cat(rates).reshape(size, width, num_gaps, -1)

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"] | None:
        """Return exact integrals of `intensity_after` from 0 to gaps, over all types, or None."""
        return None


def query_after(event_times: Tensor, gaps: Tensor) -> Tensor:
    """Return times at some gaps after events, strictly later even where the sum rounds down."""
    return torch.maximum(event_times + gaps, just_after(event_times))


def just_after(times: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Return the next larger floating-point numbers."""
    return torch.nextafter(times, times.new_tensor(torch.inf))


def batches_for(
    process: EventProcess, sequences: EventSequences, batch_size: int
) -> Iterator[EventBatch]:
    """Yield the sequences in batches on the device of the process; K must be the same."""
    if process.num_types != sequences.num_types:
        raise ValueError(
            f"the process has {process.num_types} types and the sequences have "
            f"{sequences.num_types}; read them with type_names or num_types of the training data"
        )
    for batch in sequences.batches(batch_size):
        yield batch.to(process.device)
