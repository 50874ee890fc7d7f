"""From values to states: embedding, encoder blocks, and their stack, which is read at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.nn.attention import AttentionInternals, OscillatorAttention
from osciformer.nn.resonator import ResonatorInternals
from osciformer.nn.timeline import (
    check_reads,
    check_time_values,
    check_tokens,
    last_observation,
    take_tokens,
)
from osciformer.ops._checks import DeferredChecks, check_times
from osciformer.ops.padding import clean_times, last_present_index

Internals = AttentionInternals | ResonatorInternals


class SeriesEmbedding(nn.Module):
    """Tokens from the values at each time, which of them were measured, and static features.

    A missing feature counts as zero and switches its own learned vector off, so the model can
    tell a measured zero from nothing. Values should therefore be scaled to zero mean.

    Args:
        input_dim: Number of features F.
        dim: Width D of the tokens.
        static_dim: Number of static features S; 0 for none.
    """

    def __init__(self, input_dim: int, dim: int, *, static_dim: int = 0) -> None:
        super().__init__()
        if input_dim < 1 or static_dim < 0:
            got = f"{input_dim=}, {static_dim=}"
            raise ValueError(f"input_dim must be at least 1 and static_dim at least 0; got {got}")
        self.input_dim, self.static_dim = input_dim, static_dim
        self.values = nn.Linear(2 * input_dim, dim)
        self.static = nn.Linear(2 * static_dim, dim, bias=False) if static_dim else None

    def forward(
        self, values: Values, observed: Tensor | None = None, *, static: Static | None = None
    ) -> Tokens:
        """Return one token per time `[B, N, D]`.

        Args:
            values: Values `[B, N, F]`; NaN is a missing one.
            observed: True where a value was measured `[B, N, F]`; None takes all that are not NaN.
            static: Static features `[B, S]`, NaN if missing. None if the embedding has none.
        """
        shape = list(values.shape)
        if values.ndim != 3 or values.shape[2] != self.input_dim:
            raise ValueError(f"values must be [B, N, {self.input_dim}]; got {shape}")
        if observed is not None and observed.shape != values.shape:
            wrong = list(observed.shape)
            raise ValueError(f"observed must have the shape of values {shape}; got {wrong}")
        tokens = self.values(with_indicators(values, observed).to(self.values.weight.dtype))
        if self.static is None and static is None:
            return tokens
        if self.static is None:
            raise ValueError("static is given, but the embedding has static_dim=0")
        if static is None or static.shape != (values.shape[0], self.static_dim):
            got = None if static is None else list(static.shape)
            raise ValueError(f"static must be {[values.shape[0], self.static_dim]}; got {got}")
        return tokens + self.static(with_indicators(static).to(self.static.weight.dtype))[:, None]


def with_indicators(values: Float[Tensor, "*S F"], observed: Tensor | None = None) -> Tensor:
    """Return values with 0 for missing ones, and for each value whether it was measured."""
    measured = ~values.isnan() if observed is None else ~values.isnan() & observed
    return torch.cat((torch.where(measured, values, 0.0), measured.to(values.dtype)), dim=-1)


@dataclass(frozen=True)
class Encoded:
    """An encoded batch: one state per observation, and what later reads need."""

    states: Tokens  #: States of the observations `[B, N, D]`; zero where absent.
    times: Times  #: Times `[B, N]` as layers saw them: padding replaced, in the model's unit.
    mask: Mask | None  #: True where an observation is present `[B, N]`; None if all are.
    layer_inputs: tuple[Tensor, ...]  #: Tokens that entered each block, the embedding first.
    reads: Reads | None = None  #: States at the query times `[B, M, D]`, if some were given.
    internals: tuple[Internals, ...] = ()  #: One per block, if they were asked for.

    def last(self) -> Float[Tensor, "B D"]:
        """Return the state of the last present observation; zeros for a series without any."""
        return self.states[:, -1] if self.mask is None else last_state(self.states, self.mask)

    def mean(self) -> Float[Tensor, "B D"]:
        """Return the mean state of the present observations; zeros for a series without any."""
        return self.states.mean(dim=1) if self.mask is None else mean_state(self.states, self.mask)


def last_state(states: Tokens, mask: Mask) -> Tensor:
    """Return the states `[B, D]` of the last present rows; zeros for a series without any."""
    return take_tokens(states, last_present_index(mask)[:, -1:])[:, 0]


def mean_state(states: Tokens, mask: Mask) -> Tensor:
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
        attention: An `OscillatorAttention`, or what takes its place: a `ResonatorLayer`, or another
            layer with its `dim` (the block's) and `forward`.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        dropout: Dropout of the feed-forward (the attention has its own).
    """

    def __init__(
        self, attention: nn.Module, *, feedforward_dim: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention: Any = attention
        self.dim: int = cast("Any", attention).dim
        self.attention_norm = nn.LayerNorm(self.dim)
        self.feedforward_norm = nn.LayerNorm(self.dim)
        self.feedforward = FeedForward(self.dim, feedforward_dim, dropout=dropout)

    def forward(
        self, x: Tokens, times: Times, mask: Mask | None = None, *, validate: bool = True
    ) -> Tokens:
        """Return the tokens after the block, see `OscillatorAttention.forward`."""
        attended = self.attention(self.attention_norm(x), times, mask, validate=validate)
        return self.residual(x, attended)

    def inspect(
        self, x: Tokens, times: Times, mask: Mask | None = None, *, validate: bool = True
    ) -> tuple[Tokens, Internals]:
        """Return what `forward` does and the internals of the attention."""
        options = {"return_internals": True, "validate": validate}
        attended, internals = self.attention(self.attention_norm(x), times, mask, **options)
        return self.residual(x, attended), internals

    def read(
        self,
        reads: Reads,
        query_times: QueryTimes,
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        *,
        validate: bool = True,
    ) -> Reads:
        """Return `reads` after the block: they attend to `x`, nothing attends to them."""
        options = {"query_x": self.attention_norm(reads), "validate": validate}
        attended = self.attention(self.attention_norm(x), times, mask, query_times, **options)
        return self.residual(reads, attended)

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the tokens after both residual branches, given the attention's."""
        x = x + attended
        return x + self.feedforward(self.feedforward_norm(x))


class Encoder(nn.Module):
    """A stack of blocks with a final norm.

    **Reading at any time.** A read is a token that sees the observations and that nothing sees. It
    starts as the embedded token of the last observation at or before its time (before the first
    one as zeros, or as its token if a block is bidirectional) and passes through all blocks. So a
    read at an observation's time gives its state; among several at one time, the last one's.

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
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        query_times: QueryTimes | None = None,
        *,
        return_internals: bool = False,
        validate: bool = True,
    ) -> Encoded:
        """Return the encoded tokens, with reads at `query_times` and internals if asked for.

        Arguments are those of `OscillatorAttention.forward`.
        """
        x, times, checks = self._clean(x, times, mask, query_times, validate=validate)
        inputs: list[Tensor] = []
        internals: list[Internals] = []
        for block in self:
            inputs.append(x)
            if return_internals:
                x, found = block.inspect(x, times, mask, validate=False)
                internals.append(found)
            else:
                x = block(x, times, mask, validate=False)
        states = self.norm(x)
        if mask is not None:
            states = torch.where(mask[..., None], states, 0.0)
        reads = None if query_times is None else self._read(inputs, times, mask, query_times)
        checks.finish()
        return Encoded(states, times, mask, tuple(inputs), reads, tuple(internals))

    def read(self, encoded: Encoded, query_times: QueryTimes) -> Reads:
        """Return the states at any times, given in any order, of an encoded batch."""
        check_reads(query_times, batch=encoded.states.shape[0], dim=self.dim)
        check_times("query_times", query_times.sort(dim=1).values, None)
        return self._read(encoded.layer_inputs, encoded.times, encoded.mask, query_times)

    def read_tokens(
        self,
        x: Tokens,
        times: Times,
        mask: Mask | None,
        query_times: QueryTimes,
        *,
        validate: bool = True,
    ) -> Reads:
        """Return `read(forward(x, times, mask), query_times)`, and do only what that needs."""
        x, times, checks = self._clean(x, times, mask, query_times, validate=validate)
        inputs = [x]
        for block in list(self)[:-1]:  # no read sees what the last block makes of the observations
            inputs.append(block(inputs[-1], times, mask, validate=False))
        reads = self._read(inputs, times, mask, query_times)
        checks.finish()
        return reads

    def _clean(
        self, x: Tokens, times: Times, mask: Mask | None, query_times: Any, *, validate: bool
    ) -> tuple[Tokens, Times, DeferredChecks]:
        """Return tokens and times with harmless padding, and checks of times (always made)."""
        if validate:
            check_tokens(x, times, mask, query_times, name="x", dim=self.dim)
        checks = DeferredChecks()
        check_time_values(times, mask, query_times, checks)
        layers = [y.attention for y in self if isinstance(y.attention, OscillatorAttention)]
        for layer in layers:
            layer.check_spectra(checks)
        num_tolerant = sum(layer.tolerates_bad_values(x) for layer in layers)
        checks.start() if num_tolerant == len(self.blocks) else checks.finish()
        x = x if mask is None else torch.where(mask[..., None], x, 0.0)
        return x, clean_times(times, mask), checks

    def _read(
        self, inputs: Sequence[Tokens], times: Times, mask: Mask | None, query_times: QueryTimes
    ) -> Reads:
        """Return the states at query times, given the tokens that entered each block."""
        backfill = any(block.attention.direction == "bidirectional" for block in self)
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = take_tokens(inputs[0], held)
        for block, x in zip(self, inputs, strict=True):
            reads = block.read(reads, query_times, x, times, mask, validate=False)
        return cast("Tensor", self.norm(reads))
