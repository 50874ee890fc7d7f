"""Encoder blocks that are asked some time after each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.nn.attention import KeyValues, OscillatorAttention
from osciformer.nn.encoder import FeedForward
from osciformer.nn.spectrum import Spectrum
from osciformer.ops.attention.after import (
    Rows,
    Seen,
    Transition,
    attend_after,
    compose,
    look_back,
)


class Moves(NamedTuple):
    """How oscillators move: from event to event, from the chunk before, from chunk to chunk."""

    step: Transition
    since_chunk: Transition
    chunk: Transition


@dataclass(frozen=True)
class PreparedBlock:
    """Keys and values, and how both move from the end of the chunk before to each event."""

    keys: Seen
    values: Seen
    key_over: Transition
    value_over: Transition


class AfterBlock(nn.Module):
    """An encoder block whose attention is asked some time after each token.

    Args:
        dim: Width D.
        num_heads: Number of heads.
        dropout: Dropout.
        value: `average` or `point`.
        zeta_range: Ends of the initial damping ratios.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dropout: float,
        value: Literal["average", "point"],
        zeta_range: tuple[float, float],
    ) -> None:
        super().__init__()
        self.attention = OscillatorAttention(
            dim, num_heads, value=value, dropout=dropout, zeta_range=zeta_range
        )
        self.attention_norm = nn.LayerNorm(dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.feedforward = FeedForward(dim, None, dropout=dropout)

    @property
    def spectra(self) -> tuple[Spectrum, Spectrum]:
        """Those of keys and of values."""
        return self.attention.key_spectrum, self.attention.value_spectrum

    def prepare(
        self, x: Float[Tensor, "B N D"], chunk: int, keys: Moves, values: Moves
    ) -> PreparedBlock:
        """Return what the tokens have become at later ones.

        Args:
            x: Tokens.
            chunk: Events of a chunk.
            keys: How keys move.
            values: How values move.
        """
        kv: KeyValues = self.attention.project_keys(self.attention_norm(x))
        seen = []
        for oscillators, moves in ((kv.keys, keys), (kv.values, values)):
            start, velocity = oscillators.start.flatten(2), oscillators.velocity
            seen.append(
                look_back(
                    start,
                    torch.zeros_like(start) if velocity is None else velocity.flatten(2),
                    moves.step,
                    moves.chunk,
                    chunk=chunk,
                    num_heads=self.attention.num_heads,
                )
            )
        return PreparedBlock(seen[0], seen[1], keys.since_chunk, values.since_chunk)

    def read(
        self,
        x: Float[Tensor, "B N G D"],
        rows: Rows,
        prepared: PreparedBlock,
        key_over: Transition,
        value_over: Transition,
    ) -> Float[Tensor, "B N G D"]:
        """Return rows after the block: each attends to the tokens up to its own.

        Args:
            x: Rows.
            rows: Where they stand in time.
            prepared: What they see.
            key_over: Transitions of keys over the gaps of the rows, [B, N, G, D].
            value_over: Those of values.
        """
        attention = self.attention
        heads = (attention.num_heads, attention.head_dim)
        assert attention.query_projection is not None
        query = attention.query_projection(self.attention_norm(x)).unflatten(-1, heads)

        def both(near: Transition, from_chunk: Transition) -> tuple[Transition, Transition]:
            far = compose(near, Transition(*(item[:, :, None] for item in from_chunk)))
            near, far = (
                Transition(*(item.unflatten(-1, heads) for item in over)) for over in (near, far)
            )
            return near, far

        attended = attend_after(
            query,
            prepared.keys,
            prepared.values,
            rows,
            both(key_over, prepared.key_over),
            both(value_over, prepared.value_over),
            scale=attention.head_dim**-0.5,
            average=attention.value == "average",
        )
        x = x + attention.dropout(attention.output_projection(attended.flatten(3)))
        return x + self.feedforward(self.feedforward_norm(x))
