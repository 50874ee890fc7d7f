"""The attentive neural Hawkes process: a query at any time attends to the events before it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Bool, Float, Int, Tensor, Times, Tokens
from osciformer.baselines.transformer import SinusoidalTime
from osciformer.events.neural.encoder import EventStates, Gaps, TypeEncoder, elapsed_of, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import register_backbone

# In radians per mean gap, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-2, math.pi)


class _Known(NamedTuple):
    """Keys and values of events in a layer, by head."""

    keys: Float[Tensor, "B H N C"]
    values: Float[Tensor, "B H N C"]


class HawkesAttention(nn.Module):
    r"""Attention whose weights need not add up to 1, so that nothing in the past is nothing.

    With $f = \exp(q \cdot k / \sqrt C)$ of the rows $[h; z]$, states beside an encoding of time,

    $$h'(t) = h(t) + \tanh\Big(\frac{\sum_j f_j v_j}{1 + \sum_j f_j}\Big)$$
    over the events j that the row sees; each head has its own weights.

    Args:
        dim: Width D of states.
        time_dim: Width E of the encoding of time.
        num_heads: Number of heads H.
        dropout: Dropout of what is added.
    """

    def __init__(self, dim: int, time_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads; got {dim=}, {num_heads=}")
        self.num_heads = num_heads
        self.query_projection = nn.Linear(dim + time_dim, dim)
        self.key_projection = nn.Linear(dim + time_dim, dim)
        self.value_projection = nn.Linear(dim + time_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def know(self, rows: Float[Tensor, "B N F"]) -> _Known:
        """Return what later rows may attend to, of rows `[h; z]` at events."""
        return _Known(*map(self._heads, (self.key_projection(rows), self.value_projection(rows))))

    def forward(
        self, rows: Float[Tensor, "B M F"], known: _Known, seen: Bool[Tensor, "*B M N"]
    ) -> Float[Tensor, "B M D"]:
        """Return what is added to the states of rows `[h; z]`, which may see nothing."""
        query = self._heads(self.query_projection(rows))
        # The 1 in the denominator is a first event with score 0 and value 0, which all rows see.
        keys, values = (functional.pad(x, (0, 0, 1, 0)) for x in known)
        seen = functional.pad(seen, (1, 0), value=True)[..., None, :, :]
        found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        return cast("Tensor", self.dropout(torch.tanh(found.transpose(1, 2).flatten(2))))

    def _heads(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B H M C"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class _Prepared(NamedTuple):
    """Times since the first event in the unit of the training events, and what layers know."""

    elapsed: Times
    position: Int[Tensor, "B N"]
    known: tuple[_Known, ...]


@register_backbone("attnhp", kind="events")
class AttentiveHawkesEncoder(TypeEncoder):
    """Layers of `HawkesAttention`: of events to those before them, of any time to all before it.

    Yang, Mei and Eisner, "Transformer Embeddings of Irregularly Spaced Events and Their
    Participants", ICLR 2022 (AttNHP), with one query for all types as in EasyTPP, whose figures the
    literature quotes, instead of one for each; with a `SoftplusHead` it is that model. Time counts
    from the first event, and its frequencies are what the training times resolve. The work is
    O(N^2) for each number of gaps.
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
        self.layers = nn.ModuleList(
            HawkesAttention(dim, dim, num_heads, dropout=dropout) for _ in range(num_layers)
        )

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and frequencies from half a turn over the longest sequence on."""
        super().fit_times(batch)
        if bool((gaps_of(batch) > 0).any()):
            # Between events the state must not turn faster than intensities do: half a turn a gap.
            low, _ = frequency_range(self.scale(elapsed_of(batch)), batch.mask)
            self.bank.reset((low, max(low, math.pi)))

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return keys and values of all events in all layers, see `EventEncoder`."""
        elapsed = self.scale(elapsed_of(batch))
        h = self.dropout(self.types(batch.clean_types))
        time = self._encoded(elapsed)
        position = torch.arange(h.shape[1], device=h.device)
        before = position < position[:, None]
        known: list[_Known] = []
        for layer in self._layers:
            rows = torch.cat((h, time), dim=-1)
            known.append(layer.know(rows))
            if len(known) < len(self.layers):  # no row attends to events after the last layer
                h = h + layer(rows, known[-1], before)
        return _Prepared(elapsed, position.expand(h.shape[:2]), tuple(known))

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        times = elapsed = prepared.elapsed[..., None]
        if gaps is not None:
            times = torch.cat((elapsed, elapsed + self.scale(gaps)), dim=-1)
        states = self._read(prepared, times)
        return EventStates(states[:, :, 0], None if gaps is None else states[:, :, 1:])

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> _Prepared:
        """Return what `prepare` returned, of some events, see `EventEncoder`."""
        return _Prepared(prepared.elapsed.gather(1, events), events, prepared.known)

    def _read(self, prepared: _Prepared, times: Gaps) -> Float[Tensor, "B N G D"]:
        """Return the states at times, of the events up to each event."""
        shape = times.shape[1:]
        time = self._encoded(times.flatten(1))
        position = prepared.position.repeat_interleave(times.shape[-1], dim=1)
        index = torch.arange(prepared.known[0].keys.shape[2], device=times.device)
        seen = index <= position[..., None]  # [B, N * G, N]
        h = torch.zeros_like(time)
        for layer, known in zip(self._layers, prepared.known, strict=True):
            h = h + layer(torch.cat((h, time), dim=-1), known, seen)
        return h.unflatten(1, shape)

    def _encoded(self, times: Float[Tensor, "*S"]) -> Tokens:
        return cast("Tensor", self.bank(times).to(self.types.weight.dtype))

    @property
    def _layers(self) -> list[HawkesAttention]:
        return cast("list[HawkesAttention]", list(self.layers))
