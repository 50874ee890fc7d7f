"""Encoder blocks and their stack, which can be read at any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.checks import check_reads, check_tokens
from osciformer.nn.internals import AttentionInternals
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import clean_times, last_present_index


@dataclass(frozen=True)
class Encoded:
    """An encoded batch: one state per observation, and what later reads need.

    Attributes:
        states: States of the observations; zero where absent.
        times: Times as the layers saw them: padding replaced, in the model's unit.
        mask: True where an observation is present; None if all are.
        layer_inputs: Tokens that entered each block, the embedding first.
        reads: States at the query times, where some were given.
        internals: One `AttentionInternals` per block, where they were asked for.
    """

    states: Float[Tensor, "B N D"]
    times: Float[Tensor, "B N"]
    mask: Bool[Tensor, "B N"] | None
    layer_inputs: tuple[Tensor, ...]
    reads: Float[Tensor, "B M D"] | None = None
    internals: tuple[AttentionInternals, ...] = ()

    def last(self) -> Float[Tensor, "B D"]:
        """Return the state of the last present observation; zeros for a series without any."""
        if self.mask is None:
            return self.states[:, -1]
        index = last_present_index(self.mask)[:, -1:]
        return take_tokens(self.states, index)[:, 0]

    def mean(self) -> Float[Tensor, "B D"]:
        """Return the mean state of the present observations; zeros for a series without any."""
        if self.mask is None:
            return self.states.mean(dim=1)
        count = self.mask.sum(dim=1, keepdim=True).clamp(min=1)
        return self.states.sum(dim=1) / count


# So that torch.export can return one.
torch.export.register_dataclass(Encoded, serialized_type_name="osciformer.Encoded")


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, token by token.

    Args:
        dim: Width D.
        hidden_dim: Width between the maps; None is 4 D.
        dropout: Dropout after each map.

    Example:
        >>> FeedForward(8)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        self.expand = nn.Linear(dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return the mapped tokens."""
        return self.dropout(self.contract(self.dropout(nn.functional.gelu(self.expand(x)))))


class EncoderBlock(nn.Module):
    """Pre-norm block: tokens plus attention, plus feed-forward.

    Args:
        attention: The attention layer; its width is the block's.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        dropout: Dropout of the feed-forward (the attention has its own).

    Example:
        >>> block = EncoderBlock(OscillatorAttention(16, 4))
        >>> block(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        attention: OscillatorAttention,
        *,
        feedforward_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim = attention.dim
        self.attention = attention
        self.attention_norm = nn.LayerNorm(self.dim)
        self.feedforward_norm = nn.LayerNorm(self.dim)
        self.feedforward = FeedForward(self.dim, feedforward_dim, dropout=dropout)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return the tokens after the block; rows where `mask` is False mean nothing."""
        return self.residual(x, self.attention(self.attention_norm(x), times, mask))

    def inspect(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B N D"], AttentionInternals]:
        """Return what `forward` does and the internals of the attention."""
        attended, internals = self.attention(
            self.attention_norm(x), times, mask, return_internals=True
        )
        return self.residual(x, attended), internals

    def read(
        self,
        reads: Float[Tensor, "B M D"],
        query_times: Float[Tensor, "B M"],
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """Return `reads` after the block: they attend to `x`, nothing attends to them."""
        attended = self.attention(
            self.attention_norm(x),
            times,
            mask,
            query_times,
            query_x=self.attention_norm(reads),
        )
        return self.residual(reads, attended)

    def residual(
        self, x: Float[Tensor, "B N D"], attended: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B N D"]:
        """Return the tokens after both residual branches, given the attention's."""
        x = x + attended
        return x + self.feedforward(self.feedforward_norm(x))


class Encoder(nn.Module):
    """A stack of blocks with a final norm.

    **Reading at any time.** A read is a token that sees the observations and that nothing sees. It
    starts as the embedded token of the last observation at or before its time and passes through
    all blocks. Before the first observation it starts as zeros, or where a block is bidirectional
    as the first observation's token. So a read at an observation's time gives that
    observation's state; among observations at one time, the last one's. In query mode `linear` a
    read may depend on earlier reads of the same call, see `OscillatorAttention`.

    Args:
        blocks: Blocks of one width.

    Example:
        >>> encoder = Encoder(EncoderBlock(OscillatorAttention(16, 4)) for _ in range(2))
        >>> encoded = encoder(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values)
        >>> encoded.states.shape, encoder.read(encoded, torch.tensor([[2.0], [3.0]])).shape
        (torch.Size([2, 5, 16]), torch.Size([2, 1, 16]))
    """

    def __init__(self, blocks: Iterable[EncoderBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        widths = sorted({block.dim for block in self})
        if len(widths) != 1:
            raise ValueError(f"blocks must be at least one, all of one width; got widths {widths}")
        self.dim = widths[0]
        self.norm = nn.LayerNorm(self.dim)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.blocks)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        *,
        return_internals: bool = False,
    ) -> Encoded:
        """Return the encoded tokens.

        Args:
            x: Tokens; where `mask` is False they may hold anything.
            times: Their times, not decreasing among the present tokens of a series.
            mask: True where a token is present.
            query_times: Also read at these times.
            return_internals: Also return the internals of each block's attention.
        """
        check_reads(query_times, None, batch=x.shape[0], dim=self.dim)
        x, times = self._cleaned(x, times, mask)
        inputs: list[Tensor] = []
        internals: list[AttentionInternals] = []
        for block in self:
            inputs.append(x)
            if return_internals:
                x, inside = block.inspect(x, times, mask)
                internals.append(inside)
            else:
                x = block(x, times, mask)
        states = self.norm(x)
        if mask is not None:
            states = torch.where(mask[..., None], states, 0.0)
        reads = None
        if query_times is not None:
            reads = self._read(inputs, times, mask, query_times)
        return Encoded(states, times, mask, tuple(inputs), reads, tuple(internals))

    def read(self, encoded: Encoded, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states at any times, given in any order, of an encoded batch."""
        check_reads(query_times, None, batch=encoded.states.shape[0], dim=self.dim)
        return self._read(encoded.layer_inputs, encoded.times, encoded.mask, query_times)

    def read_tokens(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None,
        query_times: Float[Tensor, "B M"],
    ) -> Float[Tensor, "B M D"]:
        """Return `read(forward(x, times, mask), query_times)`, and do only what that needs.

        No read sees what the last block makes of the observations, so it is not computed.

        Args:
            x: This, `times` and `mask` are those of `forward`.
            times: See `x`.
            mask: See `x`.
            query_times: Times in any order.
        """
        check_reads(query_times, None, batch=x.shape[0], dim=self.dim)
        x, times = self._cleaned(x, times, mask)
        inputs = [x]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], times, mask))
        return self._read(inputs, times, mask, query_times)

    def _cleaned(self, x: Tensor, times: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        check_tokens(x, times, mask, name="x", dim=self.dim)
        times = clean_times(times, mask)
        return x if mask is None else torch.where(mask[..., None], x, 0.0), times

    def _read(
        self,
        inputs: Iterable[Tensor],
        times: Tensor,
        mask: Tensor | None,
        query_times: Tensor,
    ) -> Tensor:
        inputs = list(inputs)
        backfill = any(block.attention.direction == "bidirectional" for block in self)
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = take_tokens(inputs[0], held)
        for block, x in zip(self, inputs, strict=True):
            reads = block.read(reads, query_times, x, times, mask)
        states: Tensor = self.norm(reads)
        return states
