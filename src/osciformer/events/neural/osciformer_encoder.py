"""Histories of events read by oscillators: attention that is asked at any time, and a memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from osciformer._types import Float, Int, Tensor
from osciformer.events.neural.after_block import AfterBlock, Moves, PreparedBlock
from osciformer.events.neural.encoder import EventEmbedding, EventEncoder, EventStates, gaps_of
from osciformer.events.neural.resonator_memory import MEMORY_ZETA, ResonatorMemory
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.ops.attention.after import (
    Rows,
    Seen,
    Transition,
    transition,
)

# Events of a chunk: pairs within it are worked out one by one, others by products of matrices.
_CHUNK = 16


@dataclass(frozen=True)
class _Timeline:
    """Times of a batch in the unit of the training events; N is a multiple of the chunk.

    Attributes:
        gaps: Since the event before.
        chunk_gaps: From the end of the chunk before to that of each chunk.
        since_chunk: From the end of the chunk before to each event.
        near_ages: Of the events of the same chunk at each event; -1 where there is none.
        far_ages: Of the events of earlier chunks, likewise.
    """

    gaps: Float[Tensor, "B N"]
    chunk_gaps: Float[Tensor, "B P"]
    since_chunk: Float[Tensor, "B N"]
    near_ages: Float[Tensor, "B N R"]
    far_ages: Float[Tensor, "B N F"]

    @property
    def moves(self) -> tuple[Tensor, Tensor, Tensor]:
        """All gaps over which oscillators are moved, in the order of `Moves`."""
        return self.gaps, self.since_chunk, self.chunk_gaps


@dataclass(frozen=True)
class _Prepared:
    """An encoded batch: states after the events, and what reads some time later need."""

    timeline: _Timeline
    after: Float[Tensor, "B N D"]
    tokens: Float[Tensor, "B N D"]
    trace: tuple[Tensor, ...] | None
    blocks: tuple[PreparedBlock, ...]


def _take(x: Float[Tensor, "B N *S"], index: Int[Tensor, "B S"]) -> Float[Tensor, "B S *S"]:
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _no_transition(like: Tensor) -> Transition:
    """Return the transitions over no time at all."""
    none, all_of_it = torch.zeros_like(like), torch.ones_like(like)
    return Transition(none, none, all_of_it, none, none, all_of_it)


class OsciFormerEventEncoder(EventEncoder):
    r"""A causal OsciFormer that is read at any time after each event.

    Tokens are types and gaps. A `ResonatorMemory` adds up what events leave behind, and blocks of
    oscillator attention (query mode `hold`) follow. A read at time t starts as the token of the
    last event, takes in the memory at t and passes through all blocks, which are asked at t: it is
    the layer's own continuous output. The result is the normalised row plus a linear map of the
    memory, so that intensities linear in decaying sums, as those of Hawkes, are within reach.

    Args:
        num_types: Number of event types K.
        dim: Width D.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.
        value: `average` or `point` values of the attention.
        zeta_range: Ends of the initial damping ratios of keys and values.
        context: How many of the last events attention sees, None for all; the memory has all.
        memory: Whether there is a memory.
    """

    def __init__(
        self,
        num_types: int,
        dim: int = 64,
        *,
        num_layers: int = 1,
        num_heads: int = 4,
        dropout: float = 0.1,
        value: Literal["average", "point"] = "point",
        zeta_range: tuple[float, float] = (0.05, 0.4),
        context: int | None = None,
        memory: bool = True,
    ) -> None:
        super().__init__()
        if context is not None and context < 1:
            raise ValueError(f"context must be at least 1, or None; got {context}")
        self.dim, self.context = dim, context
        self.embedding = EventEmbedding(num_types, dim)
        self.memory = ResonatorMemory(dim) if memory else None
        self.mix = nn.Linear(2 * dim, dim) if memory else None
        self.skip = nn.Linear(2 * dim, dim, bias=False) if memory else None
        self.blocks = nn.ModuleList(
            AfterBlock(
                dim,
                num_heads,
                dropout=dropout,
                value=value,
                zeta_range=(zeta_range[0], zeta_range[1]),
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and draw the spectra from what the training times can resolve."""
        self.embedding.fit(batch)
        gaps = gaps_of(batch)[batch.mask]
        if not bool((gaps > 0).any()):
            return
        times = self.embedding.scale(batch.times.masked_fill(~batch.mask, 0.0))
        low, high = frequency_range(times.cpu(), batch.mask.cpu())
        for block in self._blocks:
            block.attention.reset_spectra((low, high))
        if self.memory is not None:
            self.memory.spectrum.reset((low, high), MEMORY_ZETA)

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return the encoded batch, see `EventEncoder`."""
        timeline = self._timeline(batch)
        tokens = self._padded(self.dropout(self.embedding(batch)), timeline)
        moves = self._moves(timeline, tokens.dtype)
        trace = columns = None
        if self.memory is not None:
            trace = self.memory(tokens, moves[0].step)
            columns = self.memory.columns(*trace)
        chunk = timeline.near_ages.shape[-1]
        no_gap = torch.zeros_like(timeline.gaps)[..., None]
        at_once = Rows(no_gap, timeline.near_ages, timeline.far_ages)
        still = _no_transition(tokens[:, :, None])
        rows = self._begin(tokens, columns)
        blocks = []
        for number, block in enumerate(self._blocks):
            blocks.append(block.prepare(rows, chunk, *moves[2 * number + 1 : 2 * number + 3]))
            rows = block.read(rows[:, :, None], at_once, blocks[-1], still, still)[:, :, 0]
        after = self._finish(rows, columns)[:, : batch.mask.shape[1]]
        return _Prepared(timeline, after, tokens, trace, tuple(blocks))

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        num_events, timeline = gaps.shape[1], prepared.timeline
        gaps = self._padded(self.embedding.scale(gaps), timeline)
        over = self._over(gaps, prepared.tokens.dtype)
        columns = None
        if self.memory is not None and prepared.trace is not None:
            columns = self.memory.later(prepared.trace, over[0])
        rows = self._begin(prepared.tokens[:, :, None].expand(-1, -1, gaps.shape[-1], -1), columns)
        where = Rows(gaps, timeline.near_ages, timeline.far_ages)
        for number, (block, known) in enumerate(zip(self._blocks, prepared.blocks, strict=True)):
            rows = block.read(rows, where, known, *over[2 * number + 1 : 2 * number + 3])
        return EventStates(prepared.after, self._finish(rows, columns)[:, :num_events])

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> _Prepared:
        """Return the encoded batch of some events alone, see `EventEncoder`."""
        timeline: _Timeline = prepared.timeline
        chunks = events // timeline.near_ages.shape[-1]

        def take(x: Tensor) -> Tensor:
            return _take(x, events)

        def look(seen: Seen) -> Seen:
            return Seen(take(seen.intra), _take(seen.past, chunks))

        return _Prepared(
            timeline=_Timeline(
                gaps=take(timeline.gaps),
                chunk_gaps=timeline.chunk_gaps,
                since_chunk=take(timeline.since_chunk),
                near_ages=take(timeline.near_ages),
                far_ages=take(timeline.far_ages),
            ),
            after=take(prepared.after),
            tokens=take(prepared.tokens),
            trace=None if prepared.trace is None else tuple(map(take, prepared.trace)),
            blocks=tuple(
                PreparedBlock(
                    look(block.keys),
                    look(block.values),
                    Transition(*map(take, block.key_over)),
                    Transition(*map(take, block.value_over)),
                )
                for block in prepared.blocks
            ),
        )

    @property
    def _blocks(self) -> list[AfterBlock]:
        return [block for block in self.blocks if isinstance(block, AfterBlock)]

    def _over(self, gaps: Float[Tensor, "*S"], dtype: torch.dtype) -> list[Transition]:
        """Return the transitions of the memory and of all keys and values, at one stroke."""
        spectra = [pair for block in self._blocks for pair in block.spectra]
        spectra.insert(0, spectra[0] if self.memory is None else self.memory.spectrum)
        omega, zeta = (
            torch.cat([getattr(item, name).flatten() for item in spectra])
            for name in ("omega", "zeta")
        )
        over = transition(gaps.to(dtype), omega.to(dtype), zeta.to(dtype))
        parts = zip(*(item.split(self.dim, dim=-1) for item in over), strict=True)
        return [Transition(*part) for part in parts]

    def _moves(self, timeline: _Timeline, dtype: torch.dtype) -> list[Moves]:
        lengths = [item.shape[1] for item in timeline.moves]
        parts = []
        for over in self._over(torch.cat(timeline.moves, dim=1), dtype):
            cut = zip(*(item.split(lengths, dim=1) for item in over), strict=True)
            parts.append(Moves(*(Transition(*piece) for piece in cut)))
        return parts

    def _begin(self, tokens: Tensor, columns: Tensor | None) -> Tensor:
        return tokens if self.mix is None or columns is None else tokens + self.mix(columns)

    def _finish(self, rows: Tensor, columns: Tensor | None) -> Tensor:
        states: Tensor = self.norm(rows)
        return states if self.skip is None or columns is None else states + self.skip(columns)

    @staticmethod
    def _padded(x: Tensor, timeline: _Timeline) -> Tensor:
        more = timeline.gaps.shape[1] - x.shape[1]
        return nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, more))

    def _timeline(self, batch: EventBatch) -> _Timeline:
        first, last = batch.first_times[:, None], batch.last_times[:, None]
        times = torch.where(batch.mask, batch.times.masked_fill(~batch.mask, 0.0), last) - first
        width = times.shape[1]
        chunk = min(_CHUNK, width)
        num_chunks = -(-width // chunk)
        more = num_chunks * chunk - width
        # Padding repeats the last time: it is never seen, and moves nothing.
        times = self.embedding.scale(torch.cat((times, times[:, -1:].expand(-1, more)), dim=1))
        index = torch.arange(times.shape[1], device=times.device)
        ends = torch.cat((times[:, :1], times[:, chunk - 1 :: chunk]), dim=1)  # [B, P + 1]
        lags = torch.arange(chunk, device=times.device)
        near = index[:, None] - lags
        is_near = lags <= index[:, None] % chunk
        near_ages = times[..., None] - times[:, near.clamp(min=0)]
        far = torch.arange((num_chunks - 1) * chunk, device=times.device)
        is_far = far < (index // chunk * chunk)[:, None]
        if self.context is not None:
            is_near = is_near & (lags < self.context)
            is_far = is_far & (index[:, None] - far < self.context)
        far_ages = times[..., None] - times[:, None, : len(far)]
        return _Timeline(
            gaps=torch.diff(times, dim=1, prepend=times[:, :1]),
            chunk_gaps=torch.diff(ends, dim=1),
            since_chunk=times - ends[:, index // chunk],
            near_ages=torch.where(is_near, near_ages, -1.0),
            far_ages=torch.where(is_far, far_ages, -1.0),
        )
