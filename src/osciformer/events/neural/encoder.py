"""What turns a history of events into states: one small interface for all neural processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from osciformer._types import Float, Int, Tensor, Times, Tokens
from osciformer.events.sequences import EventBatch
from osciformer.nn.parameters import ExactBuffers


class EventStates(NamedTuple):
    """States that follow from each event and those before it."""

    after: Tokens  #: State just after each event `[B, N, D]`.
    #: States some gaps later `[B, N, G, D]`, if no other event came; None if not asked for.
    now: Float[Tensor, "B N G D"] | None


Gaps = Float[Tensor, "B N G"]


class EventEncoder(nn.Module, ABC):
    """A network that reads the events up to each event and gives its state at any later time.

    Everything at (b, i) may depend on the events 0 to i of row b, by their index, and on nothing
    else: intensities at any time come from the state after the last event before it.
    """

    dim: int  #: Width D of the states.

    @abstractmethod
    def prepare(self, batch: EventBatch) -> Any:
        """Return all that does not depend on gaps, for `states`; padding must not matter."""

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it if these are given.

        Args:
            prepared: What `prepare` returned; by default states that stay constant between events.
            gaps: Times `[B, N, G]` since each event, float64, not negative, in the data's unit.
        """
        still = None if gaps is None else prepared[:, :, None].expand(-1, -1, gaps.shape[-1], -1)
        return EventStates(prepared, still)

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> Any | None:
        """Return what `prepare` returned, of events at some positions; None if not offered.

        By default offered where that is a tensor of rows at events.
        """
        return take_events(prepared, events) if isinstance(prepared, Tensor) else None

    def fit_times(self, batch: EventBatch) -> None:
        """Set what depends on the time scales of the training events; by default nothing."""


def take_events(rows: Tensor, events: Int[Tensor, "B S"]) -> Tensor:
    """Return rows `[B, N, ...]` at some events `[B, S, ...]`."""
    return rows[torch.arange(len(events), device=events.device)[:, None], events]


class GapScale(ExactBuffers):
    r"""Gaps in the unit of a data set, $g / u$, u the mean gap between its events."""

    unit: Tensor
    offset: Tensor  # a `MixtureHead` adds it

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unit", torch.tensor(1.0, dtype=torch.float64))

    def fit(self, gaps: Float[Tensor, "G"]) -> GapScale:
        """Set the unit to the mean of the positive gaps; keep it if there is none."""
        gaps = gaps[gaps > 0]
        if len(gaps):
            self.unit.fill_(gaps.double().mean())
        return self

    def fit_batch(self, batch: EventBatch) -> GapScale:
        """Set the unit to the mean gap of a batch of events."""
        return self.fit(gaps_of(batch)[:, 1:][batch.mask[:, 1:]])

    def forward(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the gaps in that unit, float64."""
        return gaps.double() / self.unit


def gaps_of(batch: EventBatch) -> Times:
    """Return the time since the event before each event; 0 for the first one and for padding."""
    times = batch.times.masked_fill(~batch.mask, 0.0)
    return torch.diff(times, dim=1, prepend=times[:, :1]).masked_fill(~batch.mask, 0.0)


def elapsed_of(batch: EventBatch) -> Times:
    """Return the time of each event since the first one of its sequence; 0 for padding."""
    first = batch.first_times[:, None]
    return torch.where(batch.mask, batch.times.masked_fill(~batch.mask, 0.0) - first, 0.0)


class EventEmbedding(nn.Module):
    """Tokens of events: their type and the time since the event before."""

    def __init__(self, num_types: int, dim: int) -> None:
        super().__init__()
        self.scale = GapScale()
        self.types = nn.Embedding(num_types, dim)
        self.gap = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, batch: EventBatch) -> Tokens:
        """Return the tokens; those of padding are those of type 0 after a gap of 0."""
        gaps = self.scale(gaps_of(batch))
        is_first = torch.zeros_like(gaps)
        is_first[:, 0] = 1.0
        columns = torch.stack((torch.log1p(gaps), torch.log1p(100.0 * gaps), is_first), dim=-1)
        gap: Tensor = self.gap(columns.to(self.types.weight.dtype))
        return self.types(batch.clean_types) + gap


class TypeEncoder(EventEncoder):
    """An encoder with an embedding of the types and a unit of gaps."""

    def __init__(self, num_types: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.scale = dim, GapScale()
        self.types = nn.Embedding(num_types, dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of gaps."""
        self.scale.fit_batch(batch)


class TokenEncoder(EventEncoder):
    """An encoder that starts from an `EventEmbedding`, whose unit of gaps it shares."""

    def __init__(self, num_types: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.embedding = dim, EventEmbedding(num_types, dim)
        self.dropout = nn.Dropout(dropout)

    def tokens(self, batch: EventBatch) -> Tokens:
        """Return the embedded events after dropout."""
        return cast("Tensor", self.dropout(self.embedding(batch)))

    def scale(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return gaps in the unit of the training events."""
        return cast("Tensor", self.embedding.scale(gaps))

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of gaps."""
        self.embedding.scale.fit_batch(batch)
