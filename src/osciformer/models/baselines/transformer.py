"""A plain Transformer that knows time from a sinusoidal encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Bool, Float, Tensor
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import Backbone
from osciformer.nn.checks import check_choice
from osciformer.nn.embedding import SeriesEmbedding
from osciformer.nn.encoder import EncoderBlock
from osciformer.nn.presets import DEFAULT_OMEGA_RANGE
from osciformer.nn.spectrum import FrequencyBank
from osciformer.nn.timeline import TimeScale, last_observation, take_tokens
from osciformer.ops.padding import clean_times


class DotProductAttention(nn.Module):
    """Multi-head softmax attention with the interface of `OscillatorAttention`.

    Times only say who sees whom: in direction `causal` a row sees the tokens at or before its time.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H.
        direction: `causal` or `bidirectional`.
        dropout: Dropout of the weights and after the output projection.

    Example:
        >>> layer = DotProductAttention(16, 4, direction="causal")
        >>> layer(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, num_heads: int, *, direction: str = "bidirectional", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads; got {dim=}, {num_heads=}")
        check_choice("direction", direction, ("causal", "bidirectional"))
        self.dim, self.num_heads, self.direction = dim, num_heads, direction
        self.query_projection = nn.Linear(dim, dim)
        self.key_projection = nn.Linear(dim, dim)
        self.value_projection = nn.Linear(dim, dim)
        self.output_projection = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        *,
        query_x: Float[Tensor, "B M D"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """Return the attended rows: those of the tokens `x`, or of `query_x` at `query_times`.

        A row that sees no token gets what a row of zeros would: the bias of the output.
        """
        rows = x if query_x is None else query_x
        row_times = times if query_times is None else query_times
        seen = self._seen(row_times, times, mask)  # [B, M, N] or [B, 1, N]
        blind = ~seen.any(dim=-1, keepdim=True)
        q, k, v = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, tokens in (
                (self.query_projection, rows),
                (self.key_projection, x),
                (self.value_projection, x),
            )
        )  # [B, H, M or N, C]
        # A softmax over nothing is NaN, so a blind row looks at all and its result is dropped.
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=(seen | blind)[:, None],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        attended = attended.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)
        out: Tensor = self.dropout(self.output_projection(attended))
        return out

    def _seen(self, row_times: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
        if self.direction == "bidirectional":
            return mask[:, None]
        return mask[:, None] & (times[:, None] <= row_times[..., None])


@dataclass(frozen=True)
class EncodedTokens:
    """An encoded batch.

    Attributes:
        states: States of the observations; zero where absent.
        times: Times with padding replaced, in the model's unit.
        mask: True where an observation is present.
        tokens: Embedded observations, without their times.
        layer_inputs: Tokens that entered each block.
    """

    states: Float[Tensor, "B N D"]
    times: Float[Tensor, "B N"]
    mask: Bool[Tensor, "B N"]
    tokens: Float[Tensor, "B N D"]
    layer_inputs: tuple[Tensor, ...]


class TimeTransformer(Backbone):
    """Pre-norm Transformer over tokens to which a sinusoidal encoding of real time is added.

    Frequencies are log-spaced over what the training times can resolve (`frequency_range`). A read
    is a token that sees the observations and that nothing sees: the embedded token of the last
    observation at or before its time, with the encoding of its own time.

    Args:
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D, even.
        num_layers: Number of blocks.
        num_heads: Number of heads H.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        direction: `causal` or `bidirectional`.
        dropout: Dropout of attention and feed-forward.

    Example:
        >>> backbone = TimeTransformer(3, dim=8, num_heads=2)
        >>> times, mask = torch.rand(2, 5).sort().values, torch.ones(2, 5, dtype=torch.bool)
        >>> encoded = backbone.encode(torch.randn(2, 5, 3), times, mask)
        >>> encoded.states.shape, backbone.read(encoded, times[:, :2] + 1).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 2, 8]))
    """

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        feedforward_dim: int | None = None,
        direction: str = "bidirectional",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines; got {dim}")
        self.dim, self.direction = dim, direction
        self.time_scale = TimeScale()
        self.bank = FrequencyBank("log_spaced", dim // 2, omega_range=DEFAULT_OMEGA_RANGE)
        self.embedding = SeriesEmbedding(input_dim, dim, static_dim=static_dim)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                # It has the part of OscillatorAttention's interface that a block uses.
                cast(
                    "Any",
                    DotProductAttention(dim, num_heads, direction=direction, dropout=dropout),
                ),
                feedforward_dim=feedforward_dim,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def encode(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None = None,
    ) -> EncodedTokens:
        """Return the encoded series, see `Backbone.encode`."""
        times, tokens, inputs = self._layer_inputs(values, times, mask, static)
        x = self.blocks[-1](inputs[-1], times, mask)
        states = self.norm(x).masked_fill(~mask[..., None], 0.0)
        return EncodedTokens(states, times, mask, tokens, inputs)

    def read(
        self, encoded: EncodedTokens, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M D"]:
        """Return the states at any times, in the unit of the data."""
        layers = encoded.times, encoded.tokens, encoded.layer_inputs
        return self._read(layers, encoded.mask, query_times)

    def read_series(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None,
        query_times: Float[Tensor, "B M"],
    ) -> Float[Tensor, "B M D"]:
        """Return the states at any times, see `Backbone.read_series`.

        No read sees what the last block makes of the observations, so it is not computed.
        """
        layers = self._layer_inputs(values, times, mask, static)
        return self._read(layers, mask, query_times)

    def _layer_inputs(
        self, values: Tensor, times: Tensor, mask: Tensor, static: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return scaled times, embedded observations, and the tokens that enter each block."""
        times = self.time_scale(clean_times(times, mask))
        tokens = self.embedding(values, static=static).masked_fill(~mask[..., None], 0.0)
        inputs = [tokens + self._encoding(times)]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], times, mask))
        return times, tokens, tuple(inputs)

    def _read(
        self,
        layers: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        mask: Tensor,
        query_times: Tensor,
    ) -> Tensor:
        times, tokens, inputs = layers
        query_times = self.time_scale(query_times)
        backfill = self.direction == "bidirectional"
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = take_tokens(tokens, held) + self._encoding(query_times)
        for block, x in zip(self.blocks, inputs, strict=True):
            reads = cast("EncoderBlock", block).read(reads, query_times, x, times, mask)
        states: Tensor = self.norm(reads)
        return states

    def _encoding(self, times: Float[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        # The phase may be many turns, so it is taken in float64.
        phase = times.double()[..., None] * self.bank.omega
        encoding = torch.cat((phase.sin(), phase.cos()), dim=-1)
        return encoding.to(self.norm.weight.dtype)

    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        self.time_scale.fit(times, mask)
        self.bank.reset(frequency_range(self.time_scale(times), mask), generator=generator)
