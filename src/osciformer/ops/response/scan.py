"""The response of many oscillators along many rows, forward and adjoint, on any device.

Rows are taken one after the other, for all series of a block at once; where those are few, a series
is cut into chunks that are taken side by side. Chunks then need their initial states: a first pass
from rest finds what each chunk adds, and the closed form over a whole chunk carries the states from
one to the next. States are float64 and rounded only where they are stored: rounding of float32
steps would add up, since equal gaps err equally. The adjoint is the same scan backwards. Memory
beside the states does not grow with the number of oscillators times rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from osciformer.ops.response.gaps import Channels, Hats, StepGrads, Steps
from osciformer.ops.response.step import Push

# Numbers a step works on, so that it pays to start it and stays in cache; and those of a segment,
# for which the numbers of the gaps are found at once.
_STEP_SIZE, _SEGMENT_SIZE = 2**15, 2**19
# Numbers of gaps that are kept for a second pass.
_KEPT_SIZE = 2**21
# Two passes are twice the work: from this many chunks on they pay.
_FEWEST_CHUNKS = 4


def plan(batch: int, rows: int, width: int) -> tuple[int, int]:
    """Return how many series of `width` oscillators form a block, and into how many chunks."""
    lanes = max(1, _STEP_SIZE // max(1, width))
    chunks = count_chunks(lanes, batch, rows)
    return (lanes, 1) if chunks == 1 else (max(1, batch), chunks)


def count_chunks(lanes: int, batch: int, rows: int) -> int:
    """Return into how many chunks series are cut, for up to that many lanes in all."""
    chunks = min(lanes // max(1, batch), math.isqrt(rows))
    return chunks if chunks >= _FEWEST_CHUNKS else 1


class Block:
    """Some series, each cut into `chunks` of `length` rows: lanes that are taken side by side.

    The gap after the last row is 0, so rows that fill up the last chunk change nothing.
    """

    segment_size = _SEGMENT_SIZE

    def __init__(
        self,
        drive: Tensor,
        gaps: Tensor,
        omega: Tensor,
        channels: Channels,
        chunks: int,
        push: Push,
    ) -> None:
        self.batch, self.rows, _ = drive.shape
        self.omega, self.channels, self.chunks, self.push = omega, channels, chunks, push
        self.length = -(-self.rows // chunks)
        # [length, lanes, ...]: what a step reads lies together.
        drive = drive.double()
        self.drive = self._split(drive).unsqueeze(-1)
        if push.slope is not None:
            self.change = self._split(pad(drive.diff(dim=1), (0, 0, 0, 1))).unsqueeze(-1)
        self.gaps = self._split(gaps.unsqueeze(-1))
        self._kept: dict[int, Hats] = {}
        self._space: Tensor | None = None

    def _split(self, x: Tensor) -> Tensor:
        """Return ``[batch, rows, X]`` as ``[length, lanes, X]``, filled up with 0."""
        x = pad(x, (0, 0, 0, self.chunks * self.length - self.rows))
        x = x.unflatten(1, (self.chunks, self.length)).permute(2, 0, 1, 3)
        return x.flatten(1, 2).contiguous()

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return ``[batch, rows, ...]`` from segments ``[length, lanes, ...]``, last one first."""
        x = torch.cat(parts[::-1]).unflatten(1, (self.batch, self.chunks))
        return x.movedim(0, 2).flatten(1, 2)[:, : self.rows]

    def lanes_at(self, state: Tensor, n: int) -> Tensor:
        """Return, of ``[2, lanes, F, K]``, chunks that have a row n, ``[2, batch, X, F, K]``."""
        if self.chunks == 1:
            return state.unsqueeze(2)
        count = -(-(self.rows - n) // self.length)
        return state.unflatten(1, (self.batch, self.chunks))[:, :, :count]

    def segments(self, *, keeps_adjoints: bool = False) -> list[range]:
        """Return ranges of rows for which the numbers of the gaps are found at once."""
        lanes, variables = self.drive.shape[1:3]
        rows = self.segment_size // max(1, lanes * self.omega.numel())
        if keeps_adjoints:
            width = lanes * variables * self.omega.shape[-1]
            rows = min(rows, 4 * self.segment_size // max(1, width))
        starts = range(0, self.length, max(1, rows))
        return [range(start, min(start + max(1, rows), self.length)) for start in starts]

    def steps(self, rows: range) -> tuple[Hats, Steps]:
        """Return what the gaps of a segment do, as ``[..., R lanes, C]``."""
        s = self.gaps[rows.start : rows.stop].flatten(0, 1)
        hats = self._kept.get(rows.start)
        if hats is None:
            hats = self.channels.hats(s)
            # The second of two passes needs them again.
            size = self.gaps.numel() * self.channels.omega.numel()
            if self.chunks > 1 and size <= _KEPT_SIZE:
                self._kept[rows.start] = hats
        return hats, self.channels.steps(s, hats, slope=self.push.slope)

    def by_row(self, factors: Tensor) -> Tensor:
        """Return factors ``[2, R lanes, C]`` as ``[R, 2, lanes, 1|F, K]``, a view."""
        lanes = self.gaps.shape[1]
        return factors.unflatten(1, (-1, lanes)).unflatten(-1, self.omega.shape).transpose(0, 1)

    def forward(self, state: Tensor, out: Tensor | None) -> Tensor:
        """Return the states ``[2, lanes, F, K]`` at the chunks' ends from those at their starts.

        Those at all rows are stored in `out` ``[2, batch, rows, F, K]``.
        """
        other = torch.empty_like(state)
        has_level, slope, has_kicks = self.push
        for rows in self.segments():
            part = slice(rows.start, rows.stop)
            steps = self.steps(rows)[1]
            drives = self.drive[part].unbind(0)
            changes = drives if slope is None else self.change[part].unbind(0)
            # What is not needed is there, but not used.
            factors = [self.by_row(x if x is not None else steps.of_x).unbind(0) for x in steps]
            for n, u, change, of_x, of_v, of_u, of_c in zip(
                rows, drives, changes, *factors, strict=True
            ):
                x, v = state
                if has_kicks:
                    v.addcmul_(self.omega, u)
                if out is not None:
                    out[:, :, n :: self.length].copy_(self.lanes_at(state, n))
                torch.mul(of_x, x, out=other).addcmul_(of_v, v)
                if has_level:
                    other.addcmul_(of_u, u)
                if slope is not None:
                    other.addcmul_(of_c, change)
                state, other = other, state
        return state

    def starts(self, state: Tensor, added: Tensor) -> Tensor:
        """Return the states at which chunks start, from that of the first and what chunks add."""
        begin = torch.empty_like(added)
        by_chunk = (z.unflatten(1, (self.batch, self.chunks)).unbind(2) for z in (begin, added))
        for start, more, (of_x, of_v) in zip(*by_chunk, self._over_chunks(), strict=True):
            start.copy_(state)
            x, v = state
            state = of_x * x + of_v * v + more
        return begin

    def ends(self, added: Tensor) -> Tensor:
        """Return the adjoints at which chunks end, 0 for the last, from what chunks add."""
        found = torch.empty_like(added)
        by_chunk = (z.unflatten(1, (self.batch, self.chunks)).unbind(2) for z in (found, added))
        adjoint = torch.zeros_like(added.unflatten(1, (self.batch, self.chunks))[:, :, 0])
        chunks = list(zip(*by_chunk, self._over_chunks(), strict=True))
        for end, more, (of_x, of_v) in reversed(chunks):
            end.copy_(adjoint)
            adjoint = torch.stack([(of_x * adjoint).sum(0), (of_v * adjoint).sum(0)]) + more
        return found

    def _over_chunks(self) -> list[tuple[Tensor, Tensor]]:
        """Return the factors of both states over each whole chunk, ``[2, batch, 1|F, K]``."""
        s = self.gaps.sum(0).unflatten(0, (self.batch, self.chunks)).transpose(0, 1)
        shape = (self.chunks, self.batch, *self.omega.shape)
        flat = s.reshape(-1, 1)
        factors = self.channels.steps(flat, self.channels.hats(flat), slope=None)[:2]
        by_chunk = (x.unflatten(1, shape[:2]).unflatten(-1, shape[2:]).unbind(1) for x in factors)
        return list(zip(*by_chunk, strict=True))

    def space_for(self, rows: range, adjoint: Tensor) -> Tensor:
        """Return memory for the adjoints of a segment, ``[R, 3, lanes, F, K]``; all share it."""
        if self._space is None:
            longest = len(self.segments(keeps_adjoints=True)[0])
            self._space = adjoint.new_empty(longest, 3, *adjoint.shape[1:])
        return self._space[: len(rows)]

    def backward(self, adjoint: Tensor, upstream: Tensor, sums: Sums | None) -> Tensor:
        """Return the adjoints ``[2, lanes, F, K]`` at the chunks' starts from those at their ends.

        Those from above are `upstream` ``[2, batch, rows, F, K]``; gradients are added up.
        """
        other = torch.empty_like(adjoint)
        for rows in reversed(self.segments(keeps_adjoints=True)):
            hats, steps = self.steps(rows)
            # Transposed: what becomes of the adjoint of position, and of that of velocity.
            of_x, of_v = torch.stack(steps[:2], dim=1)
            # Of each row: the adjoints after its gap, and that of the velocity at the row itself.
            kept = None if sums is None else self.space_for(rows, adjoint)
            factors = zip(
                rows, self.by_row(of_x).unbind(0), self.by_row(of_v).unbind(0), strict=True
            )
            for n, after_x, after_v in reversed(list(factors)):
                if kept is not None:
                    kept[n - rows.start, :2] = adjoint
                torch.mul(after_x, adjoint[0], out=other).addcmul_(after_v, adjoint[1])
                self.lanes_at(other, n).add_(upstream[:, :, n :: self.length])
                if kept is not None and self.push.has_kicks:
                    kept[n - rows.start, 2] = other[1]
                adjoint, other = other, adjoint
            if sums is not None and kept is not None:
                sums.add(self, rows, kept, hats, steps)
        return adjoint


class Sums:
    """Gradients of a block's drive and gaps, and of the spectrum."""

    def __init__(self, states: Tensor, of_spectrum: bool) -> None:
        self.states, self.of_spectrum = states, of_spectrum
        self.drive: list[Tensor] = []
        self.change: list[Tensor] = []
        self.gaps: list[Tensor] = []
        self.spectrum: list[Tensor] = []

    def add(self, block: Block, rows: range, kept: Tensor, hats: Hats, steps: Steps) -> None:
        """Add the gradients of a segment from the adjoints of its rows ``[R, 3, lanes, F, K]``."""
        # [lanes, 1|F, K] of each row: gradients of the six numbers, filled some rows at a time.
        shape = (len(rows), *kept.shape[2:3], *block.omega.shape)
        found = StepGrads(*kept.new_empty(6, *shape)) if self.of_spectrum else None
        size = max(1, block.segment_size // 4 // max(1, kept[0, 0].numel()))
        groups = [range(n, min(n + size, len(rows))) for n in range(0, len(rows), size)]
        drive, change = [], []
        for group in groups:
            part = slice(group.start, group.stop)
            after, at_row = kept[part, :2], kept[part, 2]
            if block.push.has_level:
                drive.append((block.by_row(steps.of_level)[part] * after).sum((1, -1)))
            if block.push.slope is not None:
                change.append((block.by_row(steps.of_change)[part] * after).sum((1, -1)))
            if block.push.has_kicks:
                drive.append((block.omega * at_row).sum(-1))
            if found is not None:
                whole = range(rows.start + group.start, rows.start + group.stop)
                self._add_steps(block, whole, kept[part], StepGrads(*(x[part] for x in found)))
        self.drive += [torch.cat(drive)] if drive else []
        self.change += [torch.cat(change)] if change else []
        if found is None:
            return
        s = block.gaps[rows.start : rows.stop].flatten(0, 1)
        grads = StepGrads(*(x.flatten(2).flatten(0, 1) for x in found))
        slope = block.push.slope
        d_gaps, *spectrum = block.channels.pull_back(s, hats, steps, grads, slope=slope)
        self.gaps.append(d_gaps.view(shape[:2]))
        self.spectrum.append(torch.stack(spectrum))

    def _add_steps(self, block: Block, rows: range, kept: Tensor, out: StepGrads) -> None:
        """Write the gradients of the six numbers of some rows."""
        # Rows that fill up the last chunk may hold anything: their gaps and adjoints are 0.
        part = slice(rows.start, rows.stop)
        place = torch.arange(rows.start, rows.stop, device=kept.device)[:, None]
        place = place + torch.arange(block.chunks, device=kept.device) * block.length
        index = place.clamp(max=block.rows - 1).flatten()
        states = self.states.index_select(2, index).unflatten(2, place.shape).movedim(2, 0)
        x, v = states.flatten(2, 3).double().unbind(1)
        of_x, of_v, at_row = kept.unbind(1)
        pull = block.drive[part] - x if block.push.has_level else -x
        pairs = [(out.g, of_x, v), (out.q, of_x, pull), (out.h, of_v, pull), (out.a, of_v, v)]
        if block.push.slope is not None:
            pairs += [(out.r, of_x, block.change[part]), (out.e, of_v, block.change[part])]
        for total, p, z in pairs:
            if len(block.omega) > 1:
                torch.mul(p, z, out=total)
            else:
                torch.sum(p * z, -2, keepdim=True, out=total)  # variables share the bank
        if block.push.has_kicks:
            kicks = (at_row * block.drive[part]).sum((0, 1))
            kicks = kicks if len(block.omega) > 1 else kicks.sum(0)
            self.spectrum.append(torch.stack([kicks.flatten(), torch.zeros_like(kicks.flatten())]))
