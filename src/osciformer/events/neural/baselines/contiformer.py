"""ContiFormer over events: its attention is asked at any time after each event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from osciformer._types import Float, Int, Tensor
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.models.baselines.contiformer import ContiFormerAttention
from osciformer.models.baselines.contiformer_pairs import Pairs, attend_pairs, query_spline
from osciformer.nn.encoder import EncoderBlock

# Events at one time are kept apart by this part of a unit, so that the order of their times is the
# order of their indices.
_SMALLEST_GAP = 1e-6
# Numbers in the states of the pairs that are solved at once, per vector field. Small parts stay in
# the caches of a processor; a GPU would spend its time on starting kernels.
_LARGEST_PART = {"cpu": 2**21, "cuda": 2**24}


@dataclass(frozen=True)
class _Prepared:
    """What a batch has before gaps are known.

    Attributes:
        times: Times in the unit of the vector fields.
        tokens: What enters the last block.
        after: States of the events.
        present: The events that are present, counted through all sequences.
        num_seen: How many events each of those sees, itself included; never on a GPU.
    """

    times: Float[Tensor, "B N"]
    tokens: Float[Tensor, "B N D"]
    after: Float[Tensor, "B N D"]
    present: Int[Tensor, "E"]
    num_seen: Int[Tensor, "E"]


class ContiFormerEventEncoder(EventEncoder):
    r"""Blocks of ContiFormer attention, the last of which is asked at any time after each event.

    Chen et al., "ContiFormer", NeurIPS 2023. A row some gap after event i is the token of event i,
    whose query is held from $t_i$ on; it attends to the events 0 to i, whose keys and values have
    moved along their vector fields until then. Without a gap it is the row of event i itself. (The
    released event code computes the attention and does not use it.)

    A sequence of n events costs $n (n + 1) (G + 1) / 2$ trajectories for each field, and padding
    none. They are solved in parts and solved again in the backward pass.

    Args:
        num_types: Number of event types K.
        dim: Width D, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.
        gaps_per_unit: Mean gaps of the training events in a unit of the fields' time. The fields
            are bounded, so this is how many events it takes until a key has moved by its size.
        quadrature: This, `num_nodes, step` and `fuse` are those of `ContiFormerAttention`; the
            defaults take one step of Runge-Kutta from node to node.
        num_nodes: See `quadrature`.
        step: See `quadrature`.
        fuse: See `quadrature`.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = ContiFormerEventEncoder(1, 8, num_heads=2)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), torch.rand(2, 2, 4)).now.shape
        torch.Size([2, 2, 4, 8])
    """

    def __init__(
        self,
        num_types: int,
        dim: int = 32,
        *,
        num_layers: int = 1,
        num_heads: int = 4,
        dropout: float = 0.0,
        gaps_per_unit: float = 10.0,
        quadrature: Literal["gauss", "trapezoid"] = "gauss",
        num_nodes: int = 3,
        step: float = 1.0,
        fuse: bool = False,
    ) -> None:
        super().__init__()
        if not 0.0 < gaps_per_unit < float("inf"):
            raise ValueError(f"gaps_per_unit must be positive and finite; got {gaps_per_unit}")
        self.dim, self.gaps_per_unit = dim, gaps_per_unit
        self.embedding = EventEmbedding(num_types, dim)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                # It has the part of OscillatorAttention's interface that a block uses to encode.
                cast(
                    "Any",
                    ContiFormerAttention(
                        dim,
                        num_heads,
                        dropout=dropout,
                        # A cubic through gaps of very different length overshoots by their ratio.
                        query="linear",
                        quadrature=quadrature,
                        num_nodes=num_nodes,
                        step=step,
                        recompute=True,
                        fuse=fuse,
                    ),
                ),
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time."""
        self.embedding.fit(batch)

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return what enters the last block and its rows at the events, see `EventEncoder`."""
        gaps = self.embedding.scale(gaps_of(batch)) / self.gaps_per_unit
        times = gaps.clamp(min=_SMALLEST_GAP).cumsum(dim=1)
        tokens = self.dropout(self.embedding(batch))
        for block in self.blocks[:-1]:
            tokens = block(tokens, times, batch.mask)
        after = self.norm(self.blocks[-1](tokens, times, batch.mask))
        # Parts are chosen by these numbers, which a GPU is asked for here and nowhere later.
        present = batch.mask.flatten().nonzero()[:, 0]
        num_seen = present.cpu() % batch.mask.shape[1] + 1
        return _Prepared(times, tokens, after, present, num_seen)

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        gaps = self.embedding.scale(gaps) / self.gaps_per_unit
        return EventStates(prepared.after, self._read(prepared, gaps))

    def _read(self, known: _Prepared, gaps: Float[Tensor, "B N G"]) -> Float[Tensor, "B N G D"]:
        """Return the rows of the last block some gaps after each event; zero after absent ones."""
        block = cast("EncoderBlock", self.blocks[-1])
        layer = cast("ContiFormerAttention", block.attention)
        size, width, num_gaps = gaps.shape
        tokens, gaps = (
            x.flatten(0, 1).index_select(0, known.present) for x in (known.tokens, gaps)
        )
        attended = self._attend(known, layer, block.attention_norm(known.tokens), gaps)
        attended = layer.dropout(layer.output_projection(attended))
        rows: Tensor = self.norm(block.residual(tokens[:, None], attended))
        states = rows.new_zeros(size * width, num_gaps, self.dim)
        states = states.index_copy(0, known.present, rows)
        return states.unflatten(0, (size, width))

    def _attend(
        self,
        known: _Prepared,
        layer: ContiFormerAttention,
        normed: Float[Tensor, "B N D"],
        gaps: Float[Tensor, "E G"],
    ) -> Float[Tensor, "E G D"]:
        """Return what is attended to some gaps after each present event."""
        q, k, v = (
            projection(normed).to(torch.promote_types(normed.dtype, torch.float32))
            for projection in (layer.query_projection, layer.key_projection, layer.value_projection)
        )
        times = known.times.flatten()
        event = known.present.repeat_interleave(gaps.shape[1])  # [R], as the rows below
        end = times.index_select(0, event) + gaps.flatten()
        num_seen = known.num_seen.repeat_interleave(gaps.shape[1])
        spline = query_spline(q, known.times, None, layer.options.query)
        # Parts are recomputed as a whole.
        options = replace(layer.options, recompute=False)

        def attend(rows: slice, num_pairs: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pairs = _past_pairs(event[rows], known.times.shape[1], num_pairs)
            last = times.index_select(0, event[rows].index_select(0, pairs.row))
            return attend_pairs(
                pairs,
                times.index_select(0, pairs.token),
                end[rows].index_select(0, pairs.row),
                lambda tau: spline(pairs, torch.minimum(tau, last)),
                tokens=q,
                keys=k,
                values=v,
                own=q.flatten(0, 1).index_select(0, event[rows]),
                num_heads=layer.num_heads,
                key_field=layer.key_field,
                value_field=layer.value_field,
                options=options,
            )

        largest = _LARGEST_PART.get(gaps.device.type, _LARGEST_PART["cpu"])
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [v.flatten(0, 1)[:0]]
        for part in _parts(num_seen, largest // self.dim):
            if torch.is_grad_enabled():
                parts.append(checkpoint(attend, *part, q, k, v, **settings))
            else:
                parts.append(attend(*part, q, k, v))
        return torch.cat(parts).to(normed.dtype).view(*gaps.shape, self.dim)


def _past_pairs(event: Int[Tensor, "R"], width: int, num_pairs: int) -> Pairs:
    """Return the pairs of events, counted through all sequences, and those up to each of them."""
    num_seen = event % width + 1
    first = num_seen.cumsum(0) - num_seen
    every = torch.arange(len(event), device=event.device)
    row = every.repeat_interleave(num_seen, output_size=num_pairs)  # known, so nothing waits
    slot = torch.arange(num_pairs, device=event.device) - first.index_select(0, row)
    return Pairs(event // width, row, slot, width)


def _parts(num_seen: Int[Tensor, "R"], largest: int) -> Iterator[tuple[slice, int]]:
    """Yield rows whose pairs are at most `largest`, or one row, and the number of their pairs."""
    ends = num_seen.cumsum(0)
    begin = done = 0
    while begin < len(ends):
        stop = int(torch.searchsorted(ends, done + largest, right=True))
        stop = max(stop, begin + 1)
        num_pairs = int(ends[stop - 1]) - done
        yield slice(begin, stop), num_pairs
        begin, done = stop, done + num_pairs
