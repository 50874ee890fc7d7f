"""Multi-time attention onto reference times, and a GRU along these."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.directions import DirectedBackbone
from osciformer.baselines.event_encoders import TimeEmbedding
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import register_backbone
from osciformer.nn.encoder import with_indicators
from osciformer.ops.attention.ties import take_rows
from osciformer.ops.padding import clean_times

# A feature whose measurements have less than this share of the attention counts as missing.
_SMALLEST_SHARE = 1e-6


class SeriesTimeAttention(nn.Module):
    r"""Attention from times to measurements, for each feature to its own ones.

    Head h averages feature f with weights $\mathrm{softmax}_n(q_h(t) \cdot k_h(t_n))$ over the rows
    n in which f was measured; queries and keys are maps of one learned embedding of time. Beside
    each mean stands the share of the attention to all rows that these rows have.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads; got {dim=}, {num_heads=}")
        self.num_heads, self.time = num_heads, TimeEmbedding(dim)
        self.query_projection = nn.Linear(dim, dim)
        # A bias would add the same to all logits of a row.
        self.key_projection = nn.Linear(dim, dim, bias=False)

    def forward(
        self, query_times: QueryTimes, values: Values, times: Times, seen: Tensor
    ) -> Float[Tensor, "B M P"]:
        """Return means and shares over the rows that are `seen`; 0 if there are none."""
        queries = self._heads(self.query_projection(self.time(query_times)))
        keys = self._heads(self.key_projection(self.time(times)))
        rows = with_indicators(values).to(keys.dtype)[:, None].expand(-1, self.num_heads, -1, -1)
        # A softmax over nothing is NaN, so a blind row sees all and its result is dropped.
        blind = ~seen.any(dim=-1, keepdim=True)
        total = scaled_dot_product_attention(queries, keys, rows, (seen | blind)[:, None])
        # The softmax over some rows is that over all of them, divided by their share.
        mean, share = total.chunk(2, dim=-1)
        found = torch.cat((mean / share.clamp(min=_SMALLEST_SHARE), share), dim=-1)
        return found.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)

    def _heads(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B H M C"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class _EncodedReferences(NamedTuple):
    values: Values
    times: Times  # since the first row
    start: Times
    mask: Mask
    static: Tokens  # [B, 1, 2 S]
    hidden: Tokens  # at the references, zeros before the first
    states: Tokens


class ReferenceRecurrence(nn.Module):
    """A GRU over what attention finds at reference times, over one direction of time.

    References are even over one longest span of the training set, from the first row of a series
    on. The state at any time is that of one more reference there.
    """

    def __init__(
        self,
        input_dim: int,
        dim: int,
        *,
        static_dim: int,
        num_heads: int,
        num_references: int,
        sees_all: bool,
    ) -> None:
        super().__init__()
        self.num_references, self.sees_all = num_references, sees_all
        self.attention = SeriesTimeAttention(dim, num_heads)
        self.embedding = nn.Linear(2 * num_heads * input_dim + 2 * static_dim, dim)
        self.recurrence = nn.GRU(dim, dim, batch_first=True)

    def forward(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> _EncodedReferences:
        """Return the states of the series."""
        times = clean_times(times, mask)
        start, none = times[:, :1], values.new_zeros(len(values), 1, 0)
        known = none if static is None else with_indicators(static).to(values.dtype)[:, None]
        values = values.masked_fill(~mask[..., None], torch.nan)
        encoded = _EncodedReferences(values, times - start, start, mask, known, none, none)
        references = torch.linspace(0.0, 1.0, self.num_references).to(times)
        hidden = self.recurrence(self._attend(encoded, references.expand(len(times), -1)))[0]
        encoded = encoded._replace(hidden=functional.pad(hidden, (0, 0, 1, 0)))
        return encoded._replace(states=self.read(encoded, times))

    def read(self, encoded: _EncodedReferences, query_times: QueryTimes) -> Reads:
        """Return the states at any times, each one step of the GRU from the reference before."""
        since = query_times - encoded.start
        num_passed = (since * (self.num_references - 1)).ceil().clamp(0, self.num_references)
        before = take_rows(encoded.hidden, num_passed.long())
        pair = (x.flatten(0, 1) for x in (self._attend(encoded, since), before))
        states = torch.gru_cell(*pair, *self.recurrence.all_weights[0])
        return states.unflatten(0, since.shape)

    def _attend(self, encoded: _EncodedReferences, since: Times) -> Float[Tensor, "B M D"]:
        seen = encoded.mask[:, None].expand(-1, since.shape[1], -1)
        if not self.sees_all:
            seen = seen & (encoded.times[:, None] <= since[..., None])
        found = self.attention(since, encoded.values, encoded.times, seen)
        static = encoded.static.expand(-1, since.shape[1], -1)
        embedded: Tensor = self.embedding(torch.cat((found, static), dim=-1))
        return embedded


@register_backbone("mtan", settings=("num_heads",))
class MultiTimeAttentionNetwork(DirectedBackbone):
    """Multi-time attention onto reference times, then a GRU along these, as a backbone.

    Shukla and Marlin, "Multi-Time Attention Networks for Irregularly Sampled Time Series", ICLR
    2021, their encoder. If it is causal, a time sees the measurements until then, otherwise all.

    Args:
        input_dim: Number of input columns F.
        static_dim: Number of static features S.
        dim: Width D, that of the embedding of time too; half of it a multiple of `num_heads`.
        num_heads: Number of heads H.
        direction: `causal`, or `bidirectional`: half of the width runs backwards in time.
        num_references: Number of reference times.
    """

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_heads: int = 2,
        direction: str = "bidirectional",
        num_references: int = 32,
    ) -> None:
        if num_references < 2:
            raise ValueError(f"num_references must be at least 2; got {num_references}")
        settings: Any = {"static_dim": static_dim, "num_heads": num_heads}
        settings |= {"num_references": num_references, "sees_all": direction == "bidirectional"}
        super().__init__(partial(ReferenceRecurrence, input_dim, **settings), dim, direction)

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        super()._fit_time_scale(times, mask, generator)
        found = frequency_range(self.time_scale(times), mask)
        for part in (self.forwards, self.backwards):
            if part is not None:
                part.attention.time.reset(found)
