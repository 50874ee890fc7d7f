"""The encoder of ODE-RNN: a recurrent state that follows a differential equation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates, gaps_of
from osciformer.events.sequences import EventBatch


class GapFlow(nn.Module):
    r"""The flow of $dh/ds = f(h)$ over $s = \log(1 + g)$, g a gap in the unit of a data set.

    In g it is $dh/dg = f(h) / (1 + g)$: full speed just after an event, and less the longer nothing
    comes. So a gap a million times the mean takes as many steps as any other. f is a perceptron
    with outputs in [-1, 1], so no step can blow up, however long.

    Args:
        dim: Width D of the states.
        num_steps: Steps of the classical Runge-Kutta method, the same number over each gap.

    Example:
        >>> flow = GapFlow(8)
        >>> flow(torch.randn(2, 3, 8), torch.rand(2, 3)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, num_steps: int = 4) -> None:
        super().__init__()
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1; got {num_steps}")
        self.num_steps = num_steps
        self.field = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())

    def forward(
        self, states: Float[Tensor, "*S D"], gaps: Float[Tensor, "*S"]
    ) -> Float[Tensor, "*S D"]:
        """Return where the states are some gaps later."""
        step = (torch.log1p(gaps) / self.num_steps).to(states.dtype)[..., None]
        for _ in range(self.num_steps):
            k1 = self.field(states)
            k2 = self.field(states + step / 2 * k1)
            k3 = self.field(states + step / 2 * k2)
            k4 = self.field(states + step * k3)
            states = states + step / 6 * (k1 + 2 * (k2 + k3) + k4)
        return states


class ODERNNEncoder(EventEncoder):
    """A GRU that is updated at events and flows between them.

    Rubanova et al., "Latent ODEs for Irregularly-Sampled Time Series", NeurIPS 2019, their ODE-RNN.

    Args:
        num_types: Number of event types K.
        dim: Width D.
        dropout: Dropout of the tokens.
        num_steps: Steps of the solver over each gap, see `GapFlow`.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = ODERNNEncoder(1, 8)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), torch.rand(2, 2, 4)).now.shape
        torch.Size([2, 2, 4, 8])
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, dropout: float = 0.0, num_steps: int = 4
    ) -> None:
        super().__init__()
        self.dim = dim
        self.embedding = EventEmbedding(num_types, dim)
        self.update = nn.GRUCell(dim, dim)
        self.flow = GapFlow(dim, num_steps)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of gaps."""
        self.embedding.fit(batch)

    def prepare(self, batch: EventBatch) -> Float[Tensor, "B N D"]:
        """Return the states after all events, see `EventEncoder`."""
        tokens = self.dropout(self.embedding(batch))
        gaps = self.embedding.scale(gaps_of(batch))
        state = self.update(tokens[:, 0])
        after = [state]
        for token, gap in zip(tokens[:, 1:].unbind(1), gaps[:, 1:].unbind(1), strict=True):
            state = self.update(token, self.flow(state, gap))
            after.append(state)
        return torch.stack(after, dim=1)

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared, None)
        rows = prepared[:, :, None].expand(-1, -1, gaps.shape[-1], -1)
        return EventStates(prepared, self.flow(rows, self.embedding.scale(gaps)))
