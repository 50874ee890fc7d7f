"""The encoder of the Transformer Hawkes process."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.events.neural.baselines.times import elapsed_of, index_of
from osciformer.events.neural.encoder import EventEncoder, EventStates, GapScale, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.baselines.transformer import DotProductAttention
from osciformer.nn.encoder import EncoderBlock
from osciformer.nn.spectrum import FrequencyBank

# In radians per mean gap, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-3, 10.0)


class TransformerHawkesEncoder(EventEncoder):
    """A causal Transformer over types and a sinusoidal encoding of time.

    Zuo et al., "Transformer Hawkes Process", ICML 2020, with the state after event i predicting
    event i + 1 (the released code lets it see that event), pre-norm blocks, time since the first
    event, and frequencies that the training times can resolve. With `SoftplusHead(decay=True)` it
    is that model: the state stands still between events.

    Args:
        num_types: Number of event types K.
        dim: Width D, even, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = TransformerHawkesEncoder(1, 8, num_heads=2)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), None).after.shape
        torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        num_types: int,
        dim: int = 64,
        *,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines; got {dim}")
        self.dim = dim
        self.scale = GapScale()
        self.bank = FrequencyBank("log_spaced", dim // 2, omega_range=_FIRST_RANGE)
        self.types = nn.Embedding(num_types, dim)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                # It has the part of OscillatorAttention's interface that a block uses.
                cast(
                    "Any", DotProductAttention(dim, num_heads, direction="causal", dropout=dropout)
                ),
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and the frequencies to what the training times can resolve."""
        gaps = gaps_of(batch)
        self.scale.fit(gaps[:, 1:][batch.mask[:, 1:]])
        if bool((gaps > 0).any()):
            self.bank.reset(frequency_range(self.scale(elapsed_of(batch)), batch.mask))

    def prepare(self, batch: EventBatch) -> Float[Tensor, "B N D"]:
        """Return the states after all events, see `EventEncoder`."""
        # The phase may be many turns, so it is taken in float64.
        phase = self.scale(elapsed_of(batch))[..., None] * self.bank.omega
        encoding = torch.cat((phase.sin(), phase.cos()), dim=-1).to(self.norm.weight.dtype)
        x = self.dropout(self.types(batch.clean_types) + encoding)
        index = index_of(batch)
        for block in self.blocks:
            x = block(x, index)
        after: Tensor = self.norm(x)
        return after

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and the same ones at any gap after it."""
        if gaps is None:
            return EventStates(prepared, None)
        return EventStates(prepared, prepared[:, :, None].expand(-1, -1, gaps.shape[-1], -1))
