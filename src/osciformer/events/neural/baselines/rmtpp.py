"""The recurrent encoder of RMTPP."""

from __future__ import annotations

from typing import Any

from torch import nn

from osciformer._types import Float, Tensor
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates
from osciformer.events.sequences import EventBatch


class RecurrentEventEncoder(EventEncoder):
    """A GRU over types and gaps, whose state stands still between events.

    Du et al., "Recurrent Marked Temporal Point Processes", KDD 2016; with an `ExponentialHead` it
    is that model.

    Args:
        num_types: Number of event types K.
        dim: Width D.
        num_layers: Number of recurrent layers.
        dropout: Dropout of the tokens, between layers and of the states.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = RecurrentEventEncoder(1, 8)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), None).after.shape
        torch.Size([2, 2, 8])
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, num_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim = dim
        self.embedding = EventEmbedding(num_types, dim)
        between = dropout if num_layers > 1 else 0.0
        self.recurrence = nn.GRU(dim, dim, num_layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of gaps."""
        self.embedding.fit(batch)

    def prepare(self, batch: EventBatch) -> Float[Tensor, "B N D"]:
        """Return the states after all events, see `EventEncoder`."""
        after: Tensor = self.recurrence(self.dropout(self.embedding(batch)))[0]
        return self.dropout(after)

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and the same ones at any gap after it."""
        if gaps is None:
            return EventStates(prepared, None)
        return EventStates(prepared, prepared[:, :, None].expand(-1, -1, gaps.shape[-1], -1))
