"""Cells whose states follow a differential equation, solved with a fixed number of steps a gap."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.baselines.recurrence import Cell, register_cell


class GapFlow(nn.Module):
    r"""The flow of $dh/ds = f(h)$ over $s = \log(1 + g)$, g a gap in the unit of a data set.

    So each gap, however long, takes `num_steps` steps of the classical Runge-Kutta method. f is a
    perceptron with outputs in [-1, 1], so no step can blow up.
    """

    def __init__(self, dim: int, num_steps: int = 4) -> None:
        super().__init__()
        _check_steps(num_steps)
        self.num_steps = num_steps
        self.field = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())

    def forward(self, states: Float[Tensor, "*S D"], gaps: Float[Tensor, "*S"]) -> Tensor:
        """Return where the states are some gaps later `[*S, D]`."""
        step = (torch.log1p(gaps) / self.num_steps).to(states.dtype)[..., None]
        for _ in range(self.num_steps):
            k1 = self.field(states)
            k2 = self.field(states + step / 2 * k1)
            k3 = self.field(states + step / 2 * k2)
            k4 = self.field(states + step * k3)
            states = states + step / 6 * (k1 + 2 * (k2 + k3) + k4)
        return states


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1; got {num_steps}")


@register_cell("ode_rnn")
class ODERNN(Cell):
    """A GRU whose state follows a `GapFlow` between rows.

    Rubanova et al., "Latent ODEs for Irregularly-Sampled Time Series", NeurIPS 2019.
    """

    def __init__(self, input_dim: int, dim: int, num_steps: int = 4) -> None:
        super().__init__(dim)
        self.update = nn.GRUCell(input_dim, dim)
        self.flow = GapFlow(dim, num_steps)

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        return cast("Tensor", self.flow(state, gap[..., 0]))

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        return cast("Tensor", self.update(inputs, self.evolve(state, gap)))


@register_cell("ode_lstm")
class ODELSTM(Cell):
    """An LSTM whose output follows a `GapFlow` between rows; its memory stands still.

    Lechner and Hasani, "Learning Long-Term Dependencies in Irregularly-Sampled Time Series", 2020.
    """

    def __init__(self, input_dim: int, dim: int, num_steps: int = 4) -> None:
        super().__init__(dim, 2 * dim)
        self.update = nn.LSTMCell(input_dim, dim)
        # Remember at first, as in the authors' code.
        nn.init.constant_(self.update.bias_hh[dim : 2 * dim].detach(), 3.0)
        self.flow = GapFlow(dim, num_steps)

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        output, memory = state.chunk(2, dim=-1)
        return torch.cat((self.flow(output, gap[..., 0]), memory), dim=-1)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        return torch.cat(self.update(inputs, self.evolve(state, gap).chunk(2, dim=-1)), dim=-1)


class RelaxingCell(Cell):
    r"""A state that relaxes to a target, $h' = b(h, u) - a(h, u) h$ with a > 0, u what drives it.

    The inputs of a row drive the gap before it, as in the authors' code, and after the last row
    they go on. So a row at the time of the one before has no effect. The solver is the fused one of
    LTC: a step of length s is $h \leftarrow (h + s b) / (1 + s a)$, which is stable at any gap.

    Args:
        input_dim: Number of inputs I.
        dim: Width D.
        num_drives: Number of linear maps of the inputs, the columns of u by D.
        num_steps: Steps a gap.
    """

    def __init__(self, input_dim: int, dim: int, num_drives: int, num_steps: int) -> None:
        super().__init__(dim, (1 + num_drives) * dim)
        _check_steps(num_steps)
        self.num_steps = num_steps
        self.drive = nn.Linear(input_dim, num_drives * dim)

    def field(self, hidden: Tensor, drive: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and b."""
        raise NotImplementedError

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        hidden, drive = state[..., : self.dim], state[..., self.dim :]
        step = gap / self.num_steps
        for _ in range(self.num_steps):
            rate, gain = self.field(hidden, drive)
            hidden = (hidden + step * gain) / (1.0 + step * rate)
        return torch.cat((hidden, drive), dim=-1)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        return self.evolve(torch.cat((state[..., : self.dim], self.drive(inputs)), dim=-1), gap)


@register_cell("ct_rnn")
class ContinuousTimeRNN(RelaxingCell):
    r"""A leaky network in continuous time, $h' = r \odot (\tanh(W h + u) - h)$, rates r learned.

    Funahashi and Nakamura, "Approximation of Dynamical Systems by Continuous Time Recurrent Neural
    Networks", Neural Networks 6, 1993; see `RelaxingCell`.
    """

    def __init__(self, input_dim: int, dim: int, num_steps: int = 6) -> None:
        super().__init__(input_dim, dim, 1, num_steps)
        self.recurrent = nn.Linear(dim, dim, bias=False)
        self.raw_rate = nn.Parameter(3.0 * torch.rand(dim) - 3.0)

    def field(self, hidden: Tensor, drive: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rate, and rate times target."""
        rate = self.raw_rate.exp()
        return rate, rate * torch.tanh(self.recurrent(hidden) + drive)


@register_cell("gru_ode")
class GRUODE(RelaxingCell):
    r"""The limit of a GRU in continuous time, $h' = (1 - z) \odot (g - h)$, all gates with inputs.

    De Brouwer et al., "GRU-ODE-Bayes", NeurIPS 2019, eq. 3, without the part that makes it a filter
    (Bayes); see `RelaxingCell`.
    """

    def __init__(self, input_dim: int, dim: int, num_steps: int = 6) -> None:
        super().__init__(input_dim, dim, 3, num_steps)
        self.gates = nn.Linear(dim, 2 * dim, bias=False)
        self.candidate = nn.Linear(dim, dim, bias=False)

    def field(self, hidden: Tensor, drive: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - z, and that times g."""
        gates, own = drive[..., : 2 * self.dim], drive[..., 2 * self.dim :]
        reset, keep = (self.gates(hidden) + gates).sigmoid().chunk(2, dim=-1)
        return 1.0 - keep, (1.0 - keep) * torch.tanh(self.candidate(reset * hidden) + own)
