"""Plain Transformers that know time from a sinusoidal encoding, of series and of events."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Tensor
from osciformer.config import DEFAULT_OMEGA_RANGE
from osciformer.events.neural.encoder import EventEncoder, GapScale, elapsed_of, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.nn.encoder import Encoded, EncoderBlock, SeriesEmbedding
from osciformer.nn.parameters import FrequencyBank
from osciformer.nn.timeline import (
    TimeScale,
    check_reads,
    check_tokens,
    last_observation,
    take_tokens,
)
from osciformer.ops.padding import clean_times

# In radians per mean gap of events, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-3, 10.0)


class ProjectedAttention(nn.Module):
    """What multi-head attention layers share: four projections and a dropout."""

    def __init__(self, dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(
                f"dim must be a positive multiple of num_heads; got {dim=}, {num_heads=}"
            )
        self.dim, self.num_heads = dim, num_heads
        self.query_projection = nn.Linear(dim, dim)
        self.key_projection = nn.Linear(dim, dim)
        self.value_projection = nn.Linear(dim, dim)
        self.output_projection = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def project(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, M, H, C]` of rows, and keys and values `[B, N, H, C]` of tokens."""
        q, k, v = self.query_projection(rows), self.key_projection(x), self.value_projection(x)
        heads = (self.num_heads, -1)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)

    def finish(self, attended: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        """Return the layer's output."""
        out: Tensor = self.dropout(self.output_projection(attended))
        return out


class DotProductAttention(ProjectedAttention):
    """Multi-head softmax attention with the interface of `OscillatorAttention`.

    Times only decide who sees whom: in direction `causal` a row sees the tokens at or before its
    time.

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
        super().__init__(dim, num_heads, dropout=dropout)
        check_choice("direction", direction, ("causal", "bidirectional"))
        self.direction = direction

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        *,
        query_x: Float[Tensor, "B M D"] | None = None,
        validate: bool = True,
    ) -> Float[Tensor, "B M D"]:
        """Return the attended rows: those of the tokens `x`, or of `query_x` at `query_times`.

        A row that sees no token gets what a row of zeros would: the bias of the output. Arguments
        are those of `OscillatorAttention.forward`.
        """
        if validate:
            check_tokens(x, times, mask, name="x", dim=self.dim)
            check_reads(query_times, query_x, batch=x.shape[0], dim=self.dim)
        row_times = times if query_times is None else query_times
        seen = self._seen(row_times, times, mask)  # [B, M, N] or [B, 1, N]
        blind = ~seen.any(dim=-1, keepdim=True)
        projected = self.project(x if query_x is None else query_x, x)
        q, k, v = (tokens.transpose(1, 2) for tokens in projected)  # [B, H, M or N, C]
        # A softmax over nothing is NaN, so a blind row sees all and its result is dropped.
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=(seen | blind)[:, None],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return self.finish(attended.transpose(1, 2).flatten(2).masked_fill(blind, 0.0))

    def _seen(self, row_times: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        """Return which tokens each row sees."""
        if mask is None:
            mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
        if self.direction == "bidirectional":
            return mask[:, None]
        return mask[:, None] & (times[:, None] <= row_times[..., None])


class SinusoidalTime(FrequencyBank):
    """An encoding of time by sines and cosines of log-spaced frequencies."""

    def __init__(self, dim: int, omega_range: tuple[float, float]) -> None:
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines; got {dim}")
        super().__init__("log_spaced", dim // 2, omega_range=omega_range)

    def forward(self, times: Float[Tensor, "*S"]) -> Float[Tensor, "*S D"]:
        """Return the encoding, float64: the phase may be many turns."""
        phase = times.double()[..., None] * self.omega
        return torch.cat((phase.sin(), phase.cos()), dim=-1)


def dot_product_blocks(
    num_layers: int,
    dim: int,
    num_heads: int,
    *,
    direction: str,
    dropout: float,
    feedforward_dim: int | None = None,
) -> nn.ModuleList:
    """Return encoder blocks with `DotProductAttention`."""
    return nn.ModuleList(
        EncoderBlock(
            DotProductAttention(dim, num_heads, direction=direction, dropout=dropout),
            feedforward_dim=feedforward_dim,
            dropout=dropout,
        )
        for _ in range(num_layers)
    )


@register_backbone("transformer")
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
        self.dim, self.direction = dim, direction
        self.time_scale = TimeScale()
        self.bank = SinusoidalTime(dim, DEFAULT_OMEGA_RANGE)
        self.embedding = SeriesEmbedding(input_dim, dim, static_dim=static_dim)
        self.blocks = dot_product_blocks(
            num_layers,
            dim,
            num_heads,
            direction=direction,
            dropout=dropout,
            feedforward_dim=feedforward_dim,
        )
        self.norm = nn.LayerNorm(dim)

    def encode(
        self, values: Tensor, times: Tensor, mask: Tensor, static: Tensor | None = None
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        prepared = self._encode_for_reads(values, times, mask, static)
        x = self.blocks[-1](prepared.layer_inputs[-1], prepared.times, mask, validate=False)
        return replace(prepared, states=self.norm(x).masked_fill(~mask[..., None], 0.0))

    def _encode_for_reads(
        self, values: Tensor, times: Tensor, mask: Tensor, static: Tensor | None
    ) -> Encoded:
        """Return the series without states; first of `layer_inputs` are tokens without times.

        No read sees what the last block makes of the observations, so it is not computed.
        """
        times = self.time_scale(clean_times(times, mask))
        tokens = self.embedding(values, static=static).masked_fill(~mask[..., None], 0.0)
        inputs = [tokens, self._at(tokens, times)]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], times, mask, validate=False))
        return Encoded(tokens, times, mask, tuple(inputs))

    def read(self, encoded: Encoded, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states at any times, in the unit of the data."""
        times, mask, (tokens, *inputs) = encoded.times, encoded.mask, encoded.layer_inputs
        query_times = self.time_scale(query_times)
        backfill = self.direction == "bidirectional"
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = self._at(take_tokens(tokens, held), query_times)
        for item, x in zip(self.blocks, inputs, strict=True):
            block = cast("EncoderBlock", item)
            reads = block.read(reads, query_times, x, times, mask, validate=False)
        states: Tensor = self.norm(reads)
        return states

    def _at(self, tokens: Float[Tensor, "B N D"], times: Float[Tensor, "B N"]) -> Tensor:
        """Return tokens with the encoding of their times."""
        return tokens + self.bank(times).to(self.norm.weight.dtype)

    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        self.time_scale.fit(times, mask)
        self.bank.reset(frequency_range(self.time_scale(times), mask), generator=generator)


@register_backbone("transformer_hawkes", kind="events")
class TransformerHawkesEncoder(EventEncoder):
    """A causal Transformer over types and a sinusoidal encoding of time.

    Zuo et al., "Transformer Hawkes Process", ICML 2020, with the state after event i predicting
    event i + 1 (the released code lets it see that event), pre-norm blocks, time since the first
    event, and frequencies that the training times can resolve. With `SoftplusHead(decay=True)` it
    is that model: the state stands still between events.
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
        self.dim = dim
        self.scale = GapScale()
        self.bank = SinusoidalTime(dim, _FIRST_RANGE)
        self.types = nn.Embedding(num_types, dim)
        self.blocks = dot_product_blocks(
            num_layers, dim, num_heads, direction="causal", dropout=dropout
        )
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and the frequencies to what the training times can resolve."""
        self.scale.fit_batch(batch)
        if bool((gaps_of(batch) > 0).any()):
            self.bank.reset(frequency_range(self.scale(elapsed_of(batch)), batch.mask))

    def prepare(self, batch: EventBatch) -> Float[Tensor, "B N D"]:
        """Return the states after all events, see `EventEncoder`."""
        encoding = self.bank(self.scale(elapsed_of(batch))).to(self.norm.weight.dtype)
        x = self.dropout(self.types(batch.clean_types) + encoding)
        # Attention by the index: an event does not see those that come later at the same time, and
        # padding is behind all events.
        index = torch.arange(x.shape[1], dtype=torch.float64, device=x.device).expand(x.shape[:2])
        for block in self.blocks:
            x = block(x, index, validate=False)
        after: Tensor = self.norm(x)
        return after
