"""ContiFormer over events: its attention is asked at any time after each event."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates, gaps_of
from osciformer.models.baselines.contiformer import ContiFormerAttention
from osciformer.models.baselines.contiformer_pairs import attend_pairs, query_spline
from osciformer.nn.encoder import EncoderBlock

# Events at one time are kept apart by this part of a unit, so that the order of their times is the
# order of their indices.
_SMALLEST_GAP = 1e-6
# Numbers in the states of the pairs that are solved at once, per vector field. Small parts stay in
# the caches of a processor; a GPU would spend its time on starting kernels.
_LARGEST_PART = {"cpu": 2**21, "cuda": 2**24}


@dataclass(frozen=True)
class _Prepared:
    """Times in the unit of the vector fields, what enters the last block, and states of events."""

    times: Float[Tensor, "B N"]
    tokens: Float[Tensor, "B N D"]
    after: Float[Tensor, "B N D"]


class ContiFormerEventEncoder(EventEncoder):
    r"""Blocks of ContiFormer attention, the last of which is asked at any time after each event.

    Chen et al., "ContiFormer", NeurIPS 2023. A row some gap after event i is the token of event i,
    whose query is held from $t_i$ on; it attends to the events 0 to i, whose keys and values have
    moved along their vector fields until then. Without a gap it is the row of event i itself. (The
    released event code computes the attention and does not use it.)

    A batch costs $N^2 (G + 1)$ trajectories for each field, which are solved in parts and solved
    again in the backward pass.

    Args:
        num_types: Number of event types K.
        dim: Width D, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.
        gaps_per_unit: Mean gaps of the training events in a unit of the fields' time. The fields
            are bounded, so this is how many events it takes until a key has moved by its size.
        quadrature: This, `num_nodes` and `step` are those of `ContiFormerAttention`; the defaults
            take one step of Runge-Kutta from node to node.
        num_nodes: See `quadrature`.
        step: See `quadrature`.

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
            tokens = block(tokens, times)
        return _Prepared(times, tokens, self.norm(self.blocks[-1](tokens, times)))

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        gaps = self.embedding.scale(gaps) / self.gaps_per_unit
        return EventStates(prepared.after, self._read(prepared, gaps))

    def _read(self, known: _Prepared, gaps: Float[Tensor, "B N G"]) -> Float[Tensor, "B N G D"]:
        """Return the rows of the last block some gaps after each event."""
        block = cast("EncoderBlock", self.blocks[-1])
        layer = cast("ContiFormerAttention", block.attention)
        normed = block.attention_norm(known.tokens)
        q, k, v = (
            projection(normed).to(torch.promote_types(normed.dtype, torch.float32))
            for projection in (layer.query_projection, layer.key_projection, layer.value_projection)
        )
        size, width, num_gaps = gaps.shape
        spline = query_spline(q, known.times, None, layer.options.query)
        row_times = (known.times[..., None] + gaps).flatten(1)  # [B, N * G]
        index = torch.arange(width, device=gaps.device)
        of_event = index.repeat_interleave(num_gaps)
        # Parts are recomputed as a whole.
        options = replace(layer.options, recompute=False)

        def attend(rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            event = of_event[rows]
            start = known.times[:, None, :].expand(-1, len(event), -1)
            seen = (index <= event[:, None]).expand_as(start)
            end = torch.where(seen, row_times[:, rows, None], start)
            last = known.times[:, event, None]
            return attend_pairs(
                q,
                k,
                v,
                lambda times: spline(torch.minimum(times, last)),
                start,
                end,
                seen,
                own=q[:, event, None],
                num_heads=layer.num_heads,
                key_field=layer.key_field,
                value_field=layer.value_field,
                options=options,
            )

        largest = _LARGEST_PART.get(gaps.device.type, _LARGEST_PART["cpu"])
        count = max(1, largest // max(1, size * width * self.dim))
        parts = []
        for begin in range(0, width * num_gaps, count):
            rows = slice(begin, begin + count)
            if torch.is_grad_enabled():
                settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
                parts.append(checkpoint(attend, rows, q, k, v, **settings))
            else:
                parts.append(attend(rows, q, k, v))
        attended = torch.cat(parts, dim=1).to(normed.dtype).unflatten(1, (width, num_gaps))
        attended = layer.dropout(layer.output_projection(attended))
        rows_of_events = known.tokens[:, :, None].expand_as(attended)
        states: Tensor = self.norm(block.residual(rows_of_events, attended))
        return states
