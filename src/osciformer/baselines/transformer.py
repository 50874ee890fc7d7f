"""Plain Transformers that know time from a sinusoidal encoding, of series and of events."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._text import check_choice
from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.config import DEFAULT_OMEGA_RANGE
from osciformer.events.neural.encoder import TypeEncoder, elapsed_of, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.nn.encoder import Encoded, EncoderBlock, SeriesEmbedding
from osciformer.nn.parameters import FrequencyBank
from osciformer.nn.timeline import TimeScale, check_tokens, last_observation, take_tokens
from osciformer.ops.padding import clean_times

# In radians per mean gap of events, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-3, 10.0)


class ProjectedAttention(nn.Module):
    """What multi-head attention layers share: four projections and a dropout."""

    def __init__(self, dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            got = f"{dim=}, {num_heads=}"
            raise ValueError(f"dim must be a positive multiple of num_heads; got {got}")
        self.dim, self.num_heads = dim, num_heads
        self.query_projection = nn.Linear(dim, dim)
        self.key_projection = nn.Linear(dim, dim)
        self.value_projection = nn.Linear(dim, dim)
        self.output_projection = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def project(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, M, H, C]` of rows, and keys and values `[B, N, H, C]` of tokens."""
        projected = self.query_projection(rows), self.key_projection(x), self.value_projection(x)
        q, k, v = (tokens.unflatten(-1, (self.num_heads, -1)) for tokens in projected)
        return q, k, v

    def finish(self, attended: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        """Return the layer's output."""
        out: Tensor = self.dropout(self.output_projection(attended))
        return out


class DotProductAttention(ProjectedAttention):
    """Multi-head softmax attention with the interface of `OscillatorAttention`.

    Times only decide who sees whom: a `causal` row sees the tokens at or before its time.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H.
        direction: `causal` or `bidirectional`.
        dropout: Dropout of the weights and after the output projection.
    """

    def __init__(
        self, dim: int, num_heads: int, *, direction: str = "bidirectional", dropout: float = 0.0
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        check_choice("direction", direction, ("causal", "bidirectional"))
        self.direction = direction

    def forward(
        self,
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        query_times: QueryTimes | None = None,
        *,
        query_x: Reads | None = None,
        validate: bool = True,
    ) -> Reads:
        """Return the attended rows: of the tokens `x`, or of `query_x` at `query_times`."""
        if validate:
            check_tokens(x, times, mask, query_times, query_x, name="x", dim=self.dim)
        seen = (torch.ones_like(times, dtype=torch.bool) if mask is None else mask)[:, None]
        if self.direction == "causal":
            row_times = times if query_times is None else query_times
            seen = seen & (times[:, None] <= row_times[..., None])  # [B, M, N]
        blind = ~seen.any(dim=-1, keepdim=True)
        projected = self.project(x if query_x is None else query_x, x)
        q, k, v = (tokens.transpose(1, 2) for tokens in projected)  # [B, H, M or N, C]
        # A softmax over nothing is NaN, so a blind row sees all and its result is dropped.
        attended = scaled_dot_product_attention(
            q, k, v, (seen | blind)[:, None], self.dropout.p if self.training else 0.0
        )
        return self.finish(attended.transpose(1, 2).flatten(2).masked_fill(blind, 0.0))


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


def encoder_blocks(
    num_layers: int, *sizes: int, direction: str, dropout: float, feedforward_dim: int | None = None
) -> nn.ModuleList:
    """Return encoder blocks with `DotProductAttention`; the sizes are `dim, num_heads`."""
    layer = partial(DotProductAttention, *sizes, direction=direction, dropout=dropout)
    between: Any = {"feedforward_dim": feedforward_dim, "dropout": dropout}
    return nn.ModuleList(EncoderBlock(layer(), **between) for _ in range(num_layers))


@register_backbone("transformer")
class TimeTransformer(Backbone):
    """Pre-norm Transformer over tokens to which a sinusoidal encoding of real time is added.

    Frequencies are log-spaced over what the training times can resolve (`frequency_range`). A read
    is the embedded token of the last observation, with the encoding of its own time.

    Args:
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D, even.
        num_layers: Number of blocks.
        num_heads: Number of heads H.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        direction: `causal` or `bidirectional`.
        dropout: Dropout of attention and feed-forward.
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
        options: Any = {"dropout": dropout, "feedforward_dim": feedforward_dim}
        self.blocks = encoder_blocks(num_layers, dim, num_heads, direction=direction, **options)
        self.norm = nn.LayerNorm(dim)

    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        prepared = self._without_states(values, times, mask, static)
        x = self.blocks[-1](prepared.layer_inputs[-1], prepared.times, mask, validate=False)
        return replace(prepared, states=self.norm(x).masked_fill(~mask[..., None], 0.0))

    def read_series(self, *series: Any) -> Reads:
        """Return the states at any times; the last block, which no read sees, is left out."""
        return self.read(self._without_states(*series[:-1]), series[-1])

    def _without_states(
        self, values: Values, times: Times, mask: Mask, static: Static | None
    ) -> Encoded:
        """Return the series without states; first of `layer_inputs` are tokens without times."""
        times = self.time_scale(clean_times(times, mask))
        tokens = self.embedding(values, static=static).masked_fill(~mask[..., None], 0.0)
        inputs = [tokens, self._at(tokens, times)]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], times, mask, validate=False))
        return Encoded(tokens, times, mask, tuple(inputs))

    def read(self, encoded: Encoded, query_times: QueryTimes) -> Reads:
        """Return the states at any times, in the unit of the data."""
        times, mask, (tokens, *inputs) = encoded.times, encoded.mask, encoded.layer_inputs
        query_times = self.time_scale(query_times)
        backfill = self.direction == "bidirectional"
        held = last_observation(times, query_times, mask, backfill=backfill)
        reads = self._at(take_tokens(tokens, held), query_times)
        for block, x in zip(cast("list[EncoderBlock]", self.blocks), inputs, strict=True):
            reads = block.read(reads, query_times, x, times, mask, validate=False)
        return cast("Tensor", self.norm(reads))

    def _at(self, tokens: Tokens, times: Times) -> Tokens:
        """Return tokens with the encoding of their times."""
        return tokens + self.bank(times).to(self.norm.weight.dtype)

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.time_scale.fit(times, mask)
        self.bank.reset(frequency_range(self.time_scale(times), mask), generator=generator)


@register_backbone("transformer_hawkes", kind="events")
class TransformerHawkesEncoder(TypeEncoder):
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
        super().__init__(num_types, dim, dropout)
        self.bank = SinusoidalTime(dim, _FIRST_RANGE)
        self.blocks = encoder_blocks(
            num_layers, dim, num_heads, direction="causal", dropout=dropout
        )
        self.norm = nn.LayerNorm(dim)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and the frequencies to what the training times can resolve."""
        super().fit_times(batch)
        if bool((gaps_of(batch) > 0).any()):
            self.bank.reset(frequency_range(self.scale(elapsed_of(batch)), batch.mask))

    def prepare(self, batch: EventBatch) -> Tokens:
        """Return the states after all events, see `EventEncoder`."""
        encoding = self.bank(self.scale(elapsed_of(batch))).to(self.norm.weight.dtype)
        x = self.dropout(self.types(batch.clean_types) + encoding)
        # Attention by the index: an event does not see those that come later at the same time, and
        # padding is behind all events.
        index = torch.arange(x.shape[1], dtype=torch.float64, device=x.device).expand(x.shape[:2])
        for block in self.blocks:
            x = block(x, index, validate=False)
        return cast("Tensor", self.norm(x))
