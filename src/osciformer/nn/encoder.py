"""From values to states: embedding, encoder blocks, and their stack, which is read at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.nn.attention import AttentionInternals, OscillatorAttention
from osciformer.nn.timeline import (
    check_reads,
    check_time_values,
    check_tokens,
    last_observation,
    take_tokens,
)
from osciformer.ops._checks import DeferredChecks, check_times
from osciformer.ops.padding import clean_times, last_present_index


class SeriesEmbedding(nn.Module):
    """Tokens from the values at each time, which of them were measured, and static features.

    A missing feature counts as zero and switches its own learned vector off, so the model can
    tell a measured zero from nothing. Values should therefore be scaled to zero mean.

    Args:
        input_dim: Number of features F.
        dim: Width D of the tokens.
        static_dim: Number of static features S; 0 for none.

    Example:
        >>> embed = SeriesEmbedding(3, 8, static_dim=2)
        >>> values = torch.tensor([[[1.0, float("nan"), 0.5]]])
        >>> embed(values, static=torch.zeros(1, 2)).shape
        torch.Size([1, 1, 8])
    """

    def __init__(self, input_dim: int, dim: int, *, static_dim: int = 0) -> None:
        super().__init__()
        if input_dim < 1 or static_dim < 0:
            raise ValueError(
                f"input_dim must be at least 1 and static_dim at least 0; "
                f"got input_dim={input_dim}, static_dim={static_dim}"
            )
        self.input_dim, self.static_dim = input_dim, static_dim
        self.values = nn.Linear(2 * input_dim, dim)
        self.static = nn.Linear(2 * static_dim, dim, bias=False) if static_dim else None

    def forward(
        self,
        values: Float[Tensor, "B N F"],
        observed: Bool[Tensor, "B N F"] | None = None,
        *,
        static: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return one token per time.

        Args:
            values: Values; NaN is a missing one.
            observed: True where a value was measured; None takes all that are not NaN.
            static: Static features; NaN is a missing one. None if the embedding has none.
        """
        if values.ndim != 3 or values.shape[2] != self.input_dim:
            raise ValueError(f"values must be [B, N, {self.input_dim}]; got {list(values.shape)}")
        if observed is not None and observed.shape != values.shape:
            raise ValueError(
                f"observed must have the shape of values {list(values.shape)}; "
                f"got {list(observed.shape)}"
            )
        tokens = self.values(with_indicators(values, observed).to(self.values.weight.dtype))
        if self.static is None:
            if static is not None:
                raise ValueError("static is given, but the embedding has static_dim=0")
            return tokens
        if static is None or static.shape != (values.shape[0], self.static_dim):
            got = None if static is None else list(static.shape)
            raise ValueError(f"static must be {[values.shape[0], self.static_dim]}; got {got}")
        return tokens + self.static(with_indicators(static).to(self.static.weight.dtype))[:, None]


def with_indicators(values: Float[Tensor, "*S F"], observed: Tensor | None = None) -> Tensor:
    """Return values with 0 for missing ones, and for each value whether it was measured."""
    measured = ~values.isnan()
    if observed is not None:
        measured = measured & observed
    return torch.cat((torch.where(measured, values, 0.0), measured.to(values.dtype)), dim=-1)


@dataclass(frozen=True)
class Encoded:
    """An encoded batch: one state per observation, and what later reads need.

    Attributes:
        states: States of the observations; zero where absent.
        times: Times as the layers saw them: padding replaced, in the model's unit.
        mask: True where an observation is present; None if all are.
        layer_inputs: Tokens that entered each block, the embedding first.
        reads: States at the query times, if some were given.
        internals: One `AttentionInternals` per block, if they were asked for.
    """

    states: Float[Tensor, "B N D"]
    times: Float[Tensor, "B N"]
    mask: Bool[Tensor, "B N"] | None
    layer_inputs: tuple[Tensor, ...]
    reads: Float[Tensor, "B M D"] | None = None
    internals: tuple[AttentionInternals, ...] = ()

    def last(self) -> Float[Tensor, "B D"]:
        """Return the state of the last present observation; zeros for a series without any."""
        return self.states[:, -1] if self.mask is None else last_state(self.states, self.mask)

    def mean(self) -> Float[Tensor, "B D"]:
        """Return the mean state of the present observations; zeros for a series without any."""
        return self.states.mean(dim=1) if self.mask is None else mean_state(self.states, self.mask)


def last_state(states: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"]) -> Tensor:
    """Return the states `[B, D]` of the last present rows; zeros for a series without any."""
    return take_tokens(states, last_present_index(mask)[:, -1:])[:, 0]


def mean_state(states: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"]) -> Tensor:
    """Return the mean states `[B, D]` of the present rows; zeros for a series without any."""
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return states.masked_fill(~mask[..., None], 0.0).sum(dim=1) / count


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

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        """Return the mapped tokens."""
        return self.dropout(self.contract(self.dropout(nn.functional.gelu(self.expand(x)))))


class EncoderBlock(nn.Module):
    """Pre-norm block: tokens plus attention, plus feed-forward.

    Args:
        attention: An `OscillatorAttention`, or another layer with its `dim` and its `forward`; its
            width is the block's.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        dropout: Dropout of the feed-forward (the attention has its own).

    Example:
        >>> block = EncoderBlock(OscillatorAttention(16, 4))
        >>> block(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        attention: nn.Module,
        *,
        feedforward_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention: Any = attention
        self.dim: int = cast("Any", attention).dim
        self.attention_norm = nn.LayerNorm(self.dim)
        self.feedforward_norm = nn.LayerNorm(self.dim)
        self.feedforward = FeedForward(self.dim, feedforward_dim, dropout=dropout)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        *,
        validate: bool = True,
    ) -> Float[Tensor, "B N D"]:
        """Return the tokens after the block; rows where `mask` is False mean nothing.

        Arguments are those of `OscillatorAttention.forward`.
        """
        attended = self.attention(self.attention_norm(x), times, mask, validate=validate)
        return self.residual(x, attended)

    def inspect(
        self, x: Tensor, times: Tensor, mask: Tensor | None = None, *, validate: bool = True
    ) -> tuple[Tensor, AttentionInternals]:
        """Return what `forward` does and the internals of the attention."""
        attended, internals = self.attention(
            self.attention_norm(x), times, mask, return_internals=True, validate=validate
        )
        return self.residual(x, attended), internals

    def read(
        self,
        reads: Float[Tensor, "B M D"],
        query_times: Float[Tensor, "B M"],
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        *,
        validate: bool = True,
    ) -> Float[Tensor, "B M D"]:
        """Return `reads` after the block: they attend to `x`, nothing attends to them."""
        queries, tokens = self.attention_norm(reads), self.attention_norm(x)
        attended = self.attention(
            tokens, times, mask, query_times, query_x=queries, validate=validate
        )
        return self.residual(reads, attended)

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the tokens after both residual branches, given the attention's."""
        x = x + attended
        return x + self.feedforward(self.feedforward_norm(x))


class Encoder(nn.Module):
    """A stack of blocks with a final norm.

    **Reading at any time.** A read is a token that sees the observations and that nothing sees. It
    starts as the embedded token of the last observation at or before its time and passes through
    all blocks. Before the first observation it starts as zeros, or if a block is bidirectional
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

    def __iter__(self) -> Iterator[EncoderBlock]:
        return iter(cast("Iterable[EncoderBlock]", self.blocks))

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        *,
        return_internals: bool = False,
        validate: bool = True,
    ) -> Encoded:
        """Return the encoded tokens.

        Args:
            x: Tokens; where `mask` is False they may hold anything.
            times: Their times, not decreasing among the present tokens of a series.
            mask: True where a token is present.
            query_times: Also read at these times.
            return_internals: Also return the internals of each block's attention.
            validate: Check shapes and dtypes; False if the caller has done so.
        """
        x, times, checks = self._clean(x, times, mask, query_times, validate=validate)
        inputs: list[Tensor] = []
        internals: list[AttentionInternals] = []
        for block in self:
            inputs.append(x)
            if return_internals:
                x, inside = block.inspect(x, times, mask, validate=False)
                internals.append(inside)
            else:
                x = block(x, times, mask, validate=False)
        states = self.norm(x)
        if mask is not None:
            states = torch.where(mask[..., None], states, 0.0)
        reads = None
        if query_times is not None:
            reads = self._read(inputs, times, mask, query_times)
        checks.finish()
        return Encoded(states, times, mask, tuple(inputs), reads, tuple(internals))

    def read(self, encoded: Encoded, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states at any times, given in any order, of an encoded batch."""
        check_reads(query_times, None, batch=encoded.states.shape[0], dim=self.dim)
        check_times("query_times", query_times.sort(dim=1).values, None)
        return self._read(encoded.layer_inputs, encoded.times, encoded.mask, query_times)

    def read_tokens(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None,
        query_times: Float[Tensor, "B M"],
        *,
        validate: bool = True,
    ) -> Float[Tensor, "B M D"]:
        """Return `read(forward(x, times, mask), query_times)`, and do only what that needs.

        No read sees what the last block makes of the observations, so it is not computed.
        Arguments are those of `forward`.
        """
        x, times, checks = self._clean(x, times, mask, query_times, validate=validate)
        inputs = [x]
        for block in list(self)[:-1]:
            inputs.append(block(inputs[-1], times, mask, validate=False))
        reads = self._read(inputs, times, mask, query_times)
        checks.finish()
        return reads

    def _clean(
        self,
        x: Tensor,
        times: Tensor,
        mask: Tensor | None,
        query_times: Tensor | None,
        *,
        validate: bool,
    ) -> tuple[Tensor, Tensor, DeferredChecks]:
        """Return tokens and times whose padding is harmless, for all blocks, and checks of times.

        Values of times are checked here even if the caller has validated the rest.
        """
        if validate:
            check_tokens(x, times, mask, name="x", dim=self.dim)
            check_reads(query_times, None, batch=x.shape[0], dim=self.dim)
        checks = DeferredChecks()
        check_time_values(times, mask, query_times, checks)
        layers = [y.attention for y in self if isinstance(y.attention, OscillatorAttention)]
        for layer in layers:
            layer.check_spectra(checks)
        is_tolerant = len(layers) == len(self.blocks)
        is_tolerant = is_tolerant and all(layer.tolerates_bad_values(x) for layer in layers)
        checks.start() if is_tolerant else checks.finish()
        x = x if mask is None else torch.where(mask[..., None], x, 0.0)
        return x, clean_times(times, mask), checks

    def _read(
        self, inputs: Iterable[Tensor], times: Tensor, mask: Tensor | None, query_times: Tensor
    ) -> Tensor:
        """Return the states at query times, given the tokens that entered each block."""
        inputs = list(inputs)
        backfill = any(block.attention.direction == "bidirectional" for block in self)
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = take_tokens(inputs[0], held)
        for block, x in zip(self, inputs, strict=True):
            reads = block.read(reads, query_times, x, times, mask, validate=False)
        states: Tensor = self.norm(reads)
        return states
