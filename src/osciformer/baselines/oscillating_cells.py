"""Cells that oscillate: coupled oscillators as a state, and gates that open periodically."""

from __future__ import annotations

import math

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.baselines.recurrence import Cell, register_cell


@register_cell("cornn")
class CoupledOscillators(Cell):
    r"""The coRNN: $y'' = \tanh(W y + V y' + u) - \gamma y - \epsilon y'$, one step for each row.

    Rusch and Mishra, "Coupled Oscillatory Recurrent Neural Network", ICLR 2021, eq. 3. The step is
    theirs, whatever the gap, which is an input. The state stands still between rows.

    Args:
        input_dim: Number of inputs I.
        dim: Width D.
        step: Length of a step.
        stiffness: Their gamma.
        friction: Their epsilon.
    """

    sees_gap = True

    def __init__(
        self,
        input_dim: int,
        dim: int,
        step: float = 0.1,
        stiffness: float = 2.7,
        friction: float = 4.7,
    ) -> None:
        super().__init__(dim, 2 * dim)
        self.length, self.stiffness, self.friction = step, stiffness, friction
        self.force = nn.Linear(input_dim + 2 * dim, dim)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        position, velocity = state.chunk(2, dim=-1)
        force = self.force(torch.cat((inputs, state), dim=-1)).tanh()
        force = force - self.stiffness * position - self.friction * velocity
        velocity = velocity + self.length * force
        return torch.cat((position + self.length * velocity, velocity), dim=-1)


@register_cell("phased_lstm")
class PhasedLSTM(Cell):
    """An LSTM whose units are updated while their gates, which oscillate in time, are open.

    Neil et al., "Phased LSTM", NeurIPS 2016, eq. 6 to 11. Each gate has a period, a shift and a
    share of the period in which it opens and closes, all learned; closed gates leak in training.
    Time is counted from one mean gap before the first row. The state stands still between rows.

    Args:
        input_dim: Number of inputs I.
        dim: Width D.
        open_share: First share of the period in which a gate is open.
        leak: Opening at the end of the period, in training.
    """

    no_weight_decay = ("log_period", "shift", "raw_share")

    def __init__(
        self, input_dim: int, dim: int, open_share: float = 0.05, leak: float = 1e-3
    ) -> None:
        if not 0.0 < open_share < 1.0:
            raise ValueError(f"open_share must be between 0 and 1; got {open_share}")
        super().__init__(dim, 2 * dim + 1)
        self.leak = leak
        self.update = nn.LSTMCell(input_dim, dim)
        self.log_period = nn.Parameter(3.0 * torch.rand(dim))
        self.shift = nn.Parameter(torch.rand(dim) * self.log_period.detach().exp())
        raw = math.log(open_share / (1.0 - open_share))
        self.raw_share = nn.Parameter(torch.full((dim,), raw))

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        hidden, cells, clock = state.split((self.dim, self.dim, 1), dim=-1)
        clock = clock + gap
        after, filled = self.update(inputs, (hidden, cells))
        opening = self.opening(clock)
        hidden, cells = hidden + opening * (after - hidden), cells + opening * (filled - cells)
        return torch.cat((hidden, cells, clock), dim=-1)

    def opening(self, clock: Float[Tensor, "B 1"]) -> Float[Tensor, "B D"]:
        """Return how far the gates are open at a time, from 0 to 1."""
        turns = (clock - self.shift) / self.log_period.exp()
        phase = turns - turns.floor()
        rise = 2.0 * phase / self.raw_share.sigmoid()
        leak = self.leak * phase if self.training else torch.zeros_like(phase)
        return torch.where(rise < 2.0, torch.minimum(rise, 2.0 - rise), leak)
