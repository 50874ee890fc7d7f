"""Histories of events read by oscillators: attention that is asked at any time, and a memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from osciformer._types import Float, Int, Tensor, Times, Tokens
from osciformer.events.neural.encoder import EventStates, Gaps, TokenEncoder, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import register_backbone
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.encoder import EncoderBlock
from osciformer.nn.parameters import Spectrum
from osciformer.ops.attention.after import (
    Rows,
    Seen,
    Transition,
    accumulate,
    attend_after,
    compose,
    look_back,
    transition,
)

# Events of a chunk: pairs within it are worked out one by one, others by products of matrices.
_CHUNK = 16
# Slow and overdamped modes too: the traces that events leave are often no oscillations at all.
_MEMORY_ZETA = (0.2, 2.0)


class _Moves(NamedTuple):
    """How oscillators move: from event to event, from the chunk before, from chunk to chunk."""

    step: Transition
    since_chunk: Transition
    chunk: Transition


class _Role(NamedTuple):
    """Keys or values, and how they move from the end of the chunk before to each event."""

    seen: Seen
    over: Transition


class AfterBlock(EncoderBlock):
    """An encoder block whose attention (query mode `hold`) is asked some time after each token."""

    attention: OscillatorAttention

    def prepare(self, x: Tokens, chunk: int, *moves: _Moves) -> tuple[_Role, ...]:
        """Return what tokens have become at later ones, given how keys and values move."""
        kv = self.attention.project_keys(self.attention_norm(x))
        roles, sizes = [], {"chunk": chunk, "num_heads": self.attention.num_heads}
        for oscillators, move in zip((kv.keys, kv.values), moves, strict=True):
            start, velocity = oscillators.start.flatten(2), oscillators.velocity
            velocity = torch.zeros_like(start) if velocity is None else velocity.flatten(2)
            seen = look_back(start, velocity, move.step, move.chunk, **sizes)
            roles.append(_Role(seen, move.since_chunk))
        return tuple(roles)

    def read_after(
        self, x: Float[Tensor, "B N G D"], rows: Rows, known: tuple[_Role, ...], *over: Transition
    ) -> Float[Tensor, "B N G D"]:
        """Return rows after the block, given the transitions of keys and values over their gaps."""
        attention = self.attention
        heads = (attention.num_heads, attention.head_dim)
        assert attention.query_projection is not None
        query = attention.query_projection(self.attention_norm(x)).unflatten(-1, heads)

        def by_heads(over: Transition) -> Transition:
            return Transition(*(item.unflatten(-1, heads) for item in over))

        parts = []
        for own, role in zip(over, known, strict=True):
            from_chunk = Transition(*(item[:, :, None] for item in role.over))
            parts.append((by_heads(own), by_heads(compose(own, from_chunk))))
        settings: Any = {"scale": attention.head_dim**-0.5, "average": attention.value == "average"}
        keys, values = (role.seen for role in known)
        attended = attend_after(query, keys, values, rows, *parts, **settings)
        return self.residual(x, attention.dropout(attention.output_projection(attended.flatten(3))))


class ResonatorMemory(nn.Module):
    r"""One oscillator per channel that every event kicks, and that swings freely in between.

    $$m(t) = \sum_{t_k \le t} e^{A (t - t_k)} B x_k$$
    It adds up what attention averages: how many events there were, and how recent they are.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.kick = nn.Linear(dim, 2 * dim)
        self.spectrum = Spectrum(1, dim, omega_range=(0.1, 10.0), zeta_range=_MEMORY_ZETA)

    def forward(self, tokens: Tokens, over: Transition) -> tuple[Tokens, Tokens]:
        """Return positions and velocities after each event; transitions are from the one before."""
        position, velocity = self.kick(tokens).chunk(2, dim=-1)
        return accumulate(position, self.spectrum.omega[0] * velocity, over)

    def columns(self, position: Tensor, velocity: Tensor) -> Float[Tensor, "*S 2D"]:
        """Return both as columns of one size."""
        return torch.cat((position, velocity / self.spectrum.omega[0]), dim=-1)

    def later(self, trace: tuple[Tensor, ...], over: Transition) -> Float[Tensor, "B N G 2D"]:
        """Return the columns some gaps after each event, given the transitions over these."""
        return self.columns(*over.move(*(x[:, :, None] for x in trace)))


class _Timeline(NamedTuple):
    """Times of a batch in the unit of the training events; N is a multiple of the chunk."""

    gaps: Times  # since the event before
    since_chunk: Times  # from the end of the chunk before to each event
    chunk_gaps: Float[Tensor, "B P"]  # from the end of the chunk before to that of each chunk
    intra_ages: Float[Tensor, "B N R"]  # of the events of the same chunk; -1 where there is none
    past_ages: Float[Tensor, "B N F"]  # of the events of earlier chunks, likewise


@dataclass(frozen=True)
class _Prepared:
    """An encoded batch: states after the events, and what reads some time later need."""

    rows: Rows  # without gaps
    after: Tokens
    tokens: Tokens
    trace: tuple[Tensor, ...] | None
    blocks: tuple[tuple[_Role, ...], ...]


@register_backbone("osciformer", kind="events")
class OsciFormerEventEncoder(TokenEncoder):
    r"""A causal OsciFormer that is read at any time after each event.

    Tokens are types and gaps. A `ResonatorMemory` adds up what events leave behind, and blocks of
    oscillator attention (query mode `hold`) follow. A read at time t starts as the token of the
    last event, takes in the memory at t and passes through all blocks, which are asked at t. The
    result is the normalised row plus a linear map of the memory, as a Hawkes process has it.

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
        if context is not None and context < 1:
            raise ValueError(f"context must be at least 1, or None; got {context}")
        super().__init__(num_types, dim, dropout)
        self.context = context
        self.memory = ResonatorMemory(dim) if memory else None
        self.mix = nn.Linear(2 * dim, dim) if memory else None
        self.skip = nn.Linear(2 * dim, dim, bias=False) if memory else None
        layer: dict[str, Any] = {"value": value, "zeta_range": zeta_range, "dropout": dropout}
        self.blocks = nn.ModuleList(
            AfterBlock(OscillatorAttention(dim, num_heads, **layer), dropout=dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and draw the spectra from what the training times can resolve."""
        super().fit_times(batch)
        if not bool((gaps_of(batch) > 0).any()):
            return
        times = self.scale(batch.times.masked_fill(~batch.mask, 0.0))
        omega_range = frequency_range(times.cpu(), batch.mask.cpu())
        for block in self._blocks:
            block.attention.reset_spectra(omega_range)
        if self.memory is not None:
            self.memory.spectrum.reset(omega_range, _MEMORY_ZETA)

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return the encoded batch, see `EventEncoder`."""
        timeline = self._timeline(batch)
        width, chunk = timeline.intra_ages.shape[1:]
        tokens = _padded(self.tokens(batch), width)
        moves = self._moves(timeline, tokens.dtype)
        trace = columns = None
        if self.memory is not None:
            trace = self.memory(tokens, moves[0].step)
            columns = self.memory.columns(*trace)
        no_gap = torch.zeros_like(timeline.gaps)[..., None]
        at_once = Rows(no_gap, timeline.intra_ages, timeline.past_ages)
        zero, one = torch.zeros_like(tokens[:, :, None]), torch.ones_like(tokens[:, :, None])
        still = Transition(zero, zero, one, zero, zero, one)
        rows = self._begin(tokens, columns)
        blocks = []
        for number, block in enumerate(self._blocks):
            blocks.append(block.prepare(rows, chunk, *moves[2 * number + 1 : 2 * number + 3]))
            rows = block.read_after(rows[:, :, None], at_once, blocks[-1], still, still)[:, :, 0]
        after = self._finish(rows, columns)[:, : batch.mask.shape[1]]
        return _Prepared(at_once, after, tokens, trace, tuple(blocks))

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        num_events, tokens = gaps.shape[1], prepared.tokens
        gaps = _padded(self.scale(gaps), tokens.shape[1])
        over = self._over(gaps, tokens.dtype)
        columns = None
        if self.memory is not None and prepared.trace is not None:
            columns = self.memory.later(prepared.trace, over[0])
        rows = self._begin(tokens[:, :, None].expand(-1, -1, gaps.shape[-1], -1), columns)
        where = prepared.rows._replace(gaps=gaps)
        for number, (block, known) in enumerate(zip(self._blocks, prepared.blocks, strict=True)):
            rows = block.read_after(rows, where, known, *over[2 * number + 1 : 2 * number + 3])
        return EventStates(prepared.after, self._finish(rows, columns)[:, :num_events])

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> _Prepared:
        """Return the encoded batch of some events alone, see `EventEncoder`."""
        series = torch.arange(len(events), device=events.device)[:, None]
        chunks = events // prepared.rows.intra_ages.shape[-1]

        def take(x: Tensor) -> Tensor:
            return x[series, events]

        def take_role(role: _Role) -> _Role:
            seen = Seen(take(role.seen.intra), role.seen.past[series, chunks])
            return _Role(seen, Transition(*map(take, role.over)))

        return replace(
            prepared,
            rows=Rows(*map(take, prepared.rows)),
            after=take(prepared.after),
            tokens=take(prepared.tokens),
            trace=None if prepared.trace is None else tuple(map(take, prepared.trace)),
            blocks=tuple(tuple(map(take_role, block)) for block in prepared.blocks),
        )

    @property
    def _blocks(self) -> list[AfterBlock]:
        return cast("list[AfterBlock]", list(self.blocks))

    def _over(self, gaps: Float[Tensor, "*S"], dtype: torch.dtype) -> list[Transition]:
        """Return the transitions of the memory, and of keys and values of each block, at once."""
        layers = [block.attention for block in self._blocks]
        spectra = [pair for x in layers for pair in (x.key_spectrum, x.value_spectrum)]
        spectra.insert(0, spectra[0] if self.memory is None else self.memory.spectrum)
        omega = torch.cat([item.omega.flatten() for item in spectra]).to(dtype)
        zeta = torch.cat([item.zeta.flatten() for item in spectra]).to(dtype)
        over = transition(gaps.to(dtype), omega, zeta)
        parts = zip(*(item.split(self.dim, dim=-1) for item in over), strict=True)
        return [Transition(*part) for part in parts]

    def _moves(self, timeline: _Timeline, dtype: torch.dtype) -> list[_Moves]:
        """Return how oscillators move over all gaps of a batch, in the order of `_over`."""
        gaps, lengths = timeline[:3], [item.shape[1] for item in timeline[:3]]
        parts = []
        for over in self._over(torch.cat(gaps, dim=1), dtype):
            cut = zip(*(item.split(lengths, dim=1) for item in over), strict=True)
            parts.append(_Moves(*(Transition(*piece) for piece in cut)))
        return parts

    def _begin(self, tokens: Tensor, columns: Tensor | None) -> Tensor:
        return tokens if self.mix is None or columns is None else tokens + self.mix(columns)

    def _finish(self, rows: Tensor, columns: Tensor | None) -> Tensor:
        states: Tensor = self.norm(rows)
        return states if self.skip is None or columns is None else states + self.skip(columns)

    def _timeline(self, batch: EventBatch) -> _Timeline:
        first, last = batch.first_times[:, None], batch.last_times[:, None]
        times = torch.where(batch.mask, batch.times.masked_fill(~batch.mask, 0.0), last) - first
        width = times.shape[1]
        chunk = min(_CHUNK, width)
        num_chunks = -(-width // chunk)
        more = num_chunks * chunk - width
        # Padding repeats the last time: it is never seen, and moves nothing.
        times = self.scale(torch.cat((times, times[:, -1:].expand(-1, more)), dim=1))
        index = torch.arange(times.shape[1], device=times.device)
        ends = torch.cat((times[:, :1], times[:, chunk - 1 :: chunk]), dim=1)  # [B, P + 1]
        lags = torch.arange(chunk, device=times.device)
        is_intra = lags <= index[:, None] % chunk
        intra_ages = times[..., None] - times[:, (index[:, None] - lags).clamp(min=0)]
        past = torch.arange((num_chunks - 1) * chunk, device=times.device)
        is_past = past < (index // chunk * chunk)[:, None]
        if self.context is not None:
            is_intra = is_intra & (lags < self.context)
            is_past = is_past & (index[:, None] - past < self.context)
        past_ages = times[..., None] - times[:, None, : len(past)]
        return _Timeline(
            gaps=torch.diff(times, dim=1, prepend=times[:, :1]),
            since_chunk=times - ends[:, index // chunk],
            chunk_gaps=torch.diff(ends, dim=1),
            intra_ages=torch.where(is_intra, intra_ages, -1.0),
            past_ages=torch.where(is_past, past_ages, -1.0),
        )


def _padded(x: Tensor, width: int) -> Tensor:
    """Return `x` filled up to whole chunks."""
    return nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, width - x.shape[1]))
