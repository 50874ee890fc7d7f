"""Multi-time attention over events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Float, Tensor
from osciformer.events.neural.baselines.times import elapsed_of
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_bank, frequency_range
from osciformer.nn.encoder import FeedForward
from osciformer.nn.exact import ExactBuffers

# In radians per mean gap, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-2, math.pi)


class TimeEmbedding(ExactBuffers):
    r"""A learned embedding of time, $(w_0 t + a_0, \sin(w_1 t + a_1), \sin(w_2 t + a_2), \dots)$.

    The frequencies are $w = r e^p$, r from the time scales of the training events and kept in
    float64, p learned: long times need more digits than float32 has.

    Args:
        dim: Width E.

    Example:
        >>> TimeEmbedding(8)(torch.rand(2, 5)).shape
        torch.Size([2, 5, 8])
    """

    reference: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"dim must be at least 2, a line and a sine; got {dim}")
        self.register_buffer("reference", torch.zeros(dim, dtype=torch.float64))
        self.log_factor = nn.Parameter(torch.zeros(dim))
        shift = 2.0 * torch.pi * torch.rand(dim)
        shift[0] = 0.0
        self.shift = nn.Parameter(shift)
        self.reset(_FIRST_RANGE)

    @torch.no_grad()
    def reset(self, omega_range: tuple[float, float]) -> None:
        """Space the frequencies over a range; the line rises to pi where the lowest one turns."""
        low, high = omega_range
        bank = frequency_bank("log_spaced", len(self.reference) - 1, low=low, high=high)
        self.reference.copy_(torch.cat((bank.new_tensor([low]), bank)))

    def forward(self, times: Float[Tensor, "*S"]) -> Float[Tensor, "*S E"]:
        """Return the embedded times, in the dtype of the weights."""
        phase = times.double()[..., None] * (self.reference * self.log_factor.double().exp())
        phase = phase + self.shift.double()
        return torch.cat((phase[..., :1], phase[..., 1:].sin()), dim=-1).to(self.shift.dtype)


@dataclass(frozen=True)
class _Prepared:
    """Times since the first event in the unit of the training events, keys and values by head."""

    elapsed: Float[Tensor, "B N"]
    keys: Float[Tensor, "B H N C"]
    values: Float[Tensor, "B H N C"]


class MultiTimeAttentionEncoder(EventEncoder):
    """Attention from a time to the times of events, which averages what these were.

    Shukla and Marlin, "Multi-Time Attention Networks for Irregularly Sampled Time Series", ICLR
    2021: queries and keys are learned embeddings of time alone, each head has its own map of them.
    The state at t is asked at t, of the events up to the last one by their index.

    Args:
        num_types: Number of event types K.
        dim: Width D, a multiple of `num_heads`, and width of the time embedding.
        num_heads: Number of heads.
        dropout: Dropout of tokens and feed-forward.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = MultiTimeAttentionEncoder(1, 8, num_heads=2)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), torch.rand(2, 2, 4)).now.shape
        torch.Size([2, 2, 4, 8])
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, num_heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads; got {dim=}, {num_heads=}")
        self.dim, self.num_heads = dim, num_heads
        self.embedding = EventEmbedding(num_types, dim)
        self.time = TimeEmbedding(dim)
        self.query_projection = nn.Linear(dim, dim)
        # A bias would add the same to all logits of a row.
        self.key_projection = nn.Linear(dim, dim, bias=False)
        self.value_projection = nn.Linear(dim, dim)
        self.output_projection = nn.Linear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.feedforward = FeedForward(dim, dropout=dropout)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and the frequencies from half a turn over the longest sequence on.

        The highest makes half a turn over a mean gap: between events the state is asked at any
        time, and must not turn faster than intensities do.
        """
        self.embedding.fit(batch)
        if bool((gaps_of(batch) > 0).any()):
            low, _ = frequency_range(self.embedding.scale(elapsed_of(batch)), batch.mask)
            self.time.reset((low, max(low, math.pi)))

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return keys and values of all events, see `EventEncoder`."""
        elapsed = self.embedding.scale(elapsed_of(batch))
        keys = self.key_projection(self.time(elapsed))
        values = self.value_projection(self.dropout(self.embedding(batch)))
        return _Prepared(elapsed, self._heads(keys), self._heads(values))

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        elapsed = prepared.elapsed[..., None]
        if gaps is None:
            return EventStates(self._read(prepared, elapsed)[:, :, 0], None)
        times = torch.cat((elapsed, elapsed + self.embedding.scale(gaps)), dim=-1)
        states = self._read(prepared, times)
        return EventStates(states[:, :, 0], states[:, :, 1:])

    def _read(self, known: _Prepared, times: Float[Tensor, "B N G"]) -> Float[Tensor, "B N G D"]:
        width, num_gaps = times.shape[1:]
        queries = self._heads(self.query_projection(self.time(times.flatten(1))))
        index = torch.arange(width, device=times.device)
        seen = index <= index.repeat_interleave(num_gaps)[:, None]  # [N * G, N]
        attended = scaled_dot_product_attention(queries, known.keys, known.values, attn_mask=seen)
        x = self.output_projection(attended.transpose(1, 2).flatten(2))
        x = x + self.feedforward(self.feedforward_norm(x))
        states: Tensor = self.norm(x)
        return states.unflatten(1, (width, num_gaps))

    def _heads(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B H M C"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
