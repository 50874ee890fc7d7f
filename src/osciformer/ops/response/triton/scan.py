"""Launches of the kernels, in place of the closed forms and loops of the scan for any device."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.response.gaps import Channels, Hats
from osciformer.ops.response.scan import Block, Sums, count_chunks
from osciformer.ops.response.triton import kernels

# Channels and gaps a program has; numbers of a segment: its buffers take some hundred MiB.
_WIDTH, _SEGMENT_SIZE = 256, 2**22
# Oscillators that move side by side, so that a GPU is busy.
_STEP_SIZE = 2**18


def plan(batch: int, rows: int, width: int) -> tuple[int, int]:
    """Return how many series of `width` oscillators form a block, and into how many chunks."""
    return max(1, batch), count_chunks(_STEP_SIZE // max(1, width), batch, rows)


class KernelChannels(Channels):
    """Channels whose integrals over gaps come from one kernel; the host waits for nothing."""

    def _sort(self) -> None:
        self._table = torch.stack([self.gamma, self.square, self.discriminant, self.rate])

    def hats(self, s: Tensor) -> Hats:
        """Return the integrals over gaps ``[R, 1]``, each ``[R, C]``."""
        rows, channels, more = len(s), self._table.shape[1], self.with_gradients
        out = s.new_empty(6 if more else 3, rows, channels)
        if out.numel():
            given = (s.contiguous(), self._table, out, rows, channels)
            grid = (triton.cdiv(rows * channels, _WIDTH),)
            kernels.gap_integrals[grid](*given, MORE=more, BLOCK=_WIDTH, num_warps=4)
        return Hats(*out)


class KernelBlock(Block):
    """A block whose lanes move along a segment in one launch."""

    segment_size = _SEGMENT_SIZE

    def forward(self, state: Tensor, out: Tensor | None) -> Tensor:
        """Return the states at the chunks' ends, in place of those at their starts."""
        has_level, slope, has_kicks = self.push
        stored = state if out is None else out
        for rows in self.segments():
            part = slice(rows.start, rows.stop)
            drive = self.drive[part]
            change = drive if slope is None else self.change[part]
            steps = self.steps(rows)[1]
            used = [*steps[:2], *steps[2:3][: int(has_level)], *steps[3:][: int(slope is not None)]]
            grid, sizes, options = self._launch(rows, state, stored)
            options |= {"LEVEL": has_level, "SLOPE": slope is not None, "KICKS": has_kicks}
            given = (torch.stack(used), drive, change, self.omega.contiguous(), stored, sizes)
            kernels.scan_forward[grid](state, *given, STORE=out is not None, **options)
        return state

    def backward(self, adjoint: Tensor, upstream: Tensor, sums: Sums | None) -> Tensor:
        """Return the adjoints at the chunks' starts, in place of those at their ends."""
        upstream = upstream.contiguous()
        for rows in reversed(self.segments(keeps_adjoints=True)):
            hats, steps = self.steps(rows)
            kept = None if sums is None else self.space_for(rows, adjoint)
            grid, sizes, options = self._launch(rows, adjoint, upstream)
            given = (torch.stack(steps[:2]), upstream, adjoint if kept is None else kept, sizes)
            kernels.scan_backward[grid](adjoint, *given, KEEP=kept is not None, **options)
            if sums is not None and kept is not None:
                sums.add(self, rows, kept, hats, steps)
        return adjoint

    def _launch(
        self, rows: range, state: Tensor, stored: Tensor
    ) -> tuple[Any, kernels.Sizes, dict[str, Any]]:
        lanes, variables, oscillators = state.shape[1:]
        bank, series = (len(self.omega), oscillators), (self.rows, self.chunks, self.length)
        places = (rows.start, stored.stride(0))
        sizes = kernels.Sizes._make([len(rows), lanes, variables, *bank, *series, *places])
        block = min(128, max(16, 2 ** math.ceil(math.log2(max(1, oscillators)))))
        grid = (lanes * variables, triton.cdiv(oscillators, block))
        return grid, sizes, {"BLOCK": block, "num_warps": max(1, block // 32)}
