"""Times of a batch as encoders see them, clean of what padding holds."""

from __future__ import annotations

import torch

from osciformer._types import Float, Tensor
from osciformer.events.sequences import EventBatch


def elapsed_of(batch: EventBatch) -> Float[Tensor, "B N"]:
    """Return the time of each event since the first one of its sequence; 0 for padding.

    Example:
        >>> from osciformer.events import EventSequences
        >>> elapsed_of(EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch())
        tensor([[0., 2.],
                [0., 0.]], dtype=torch.float64)
    """
    first = batch.first_times[:, None]
    return torch.where(batch.mask, batch.times.masked_fill(~batch.mask, 0.0) - first, 0.0)


def index_of(batch: EventBatch) -> Float[Tensor, "B N"]:
    """Return the position of each event in its sequence, for attention that goes by the index.

    An event sees those before it and itself, not those that come later at the same time. Padding
    is behind all events, so no event sees it.
    """
    index = torch.arange(batch.times.shape[1], dtype=torch.float64, device=batch.times.device)
    return index.expand(batch.times.shape)
