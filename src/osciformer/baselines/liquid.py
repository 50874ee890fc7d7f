"""Liquid networks: a state whose time constants depend on the input, by a solver or closed form."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Tensor
from osciformer.baselines.ode_cells import RelaxingCell
from osciformer.baselines.recurrence import Cell, register_cell


@register_cell("ltc")
class LiquidTimeConstant(RelaxingCell):
    r"""A liquid time-constant network, $h' = -(r + f) h + f A$ with $f = g \, \sigma(W h + u)$.

    Hasani et al., "Liquid Time-constant Networks", AAAI 2021, eq. 1 and 3, with a layer for f (the
    released code has a sigmoid for each pair of units). Rates r, gains g and levels A are learned.
    See `RelaxingCell`.
    """

    no_weight_decay = ("raw_rate", "raw_gain", "level")

    def __init__(self, input_dim: int, dim: int, num_steps: int = 6) -> None:
        super().__init__(input_dim, dim, 1, num_steps)
        self.recurrent = nn.Linear(dim, dim, bias=False)
        self.raw_rate = nn.Parameter(3.0 * torch.rand(dim) - 3.0)
        # Larger than the rates: a row must be able to turn the state.
        self.raw_gain = nn.Parameter(torch.ones(dim))
        self.level = nn.Parameter(torch.randn(dim).sign())

    def field(self, hidden: Tensor, drive: Tensor) -> tuple[Tensor, Tensor]:
        """Return r + f, and f A."""
        conductance = self.raw_gain.exp() * torch.sigmoid(self.recurrent(hidden) + drive)
        return self.raw_rate.exp() + conductance, conductance * self.level


@register_cell("cfc")
class ClosedFormContinuous(Cell):
    r"""A gate between two heads that opens with the time t since the row before.

    $$h(t) = (1 - \sigma(a t + b)) \odot f + \sigma(a t + b) \odot g$$
    Hasani et al., "Closed-form Continuous-time Neural Networks", Nature Machine Intelligence 4,
    2022. A trunk turns inputs and hidden state of the row before into a, b, f and g. After the last
    row t goes on.

    Args:
        input_dim: Number of inputs I.
        dim: Width D.
        trunk_dim: Width of the trunk.
        mixed_memory: Let an LSTM give the trunk its hidden state: their CfC-mmRNN.
        gated: Whether f has the factor $1 - \sigma$; else it has none: their CfC-noGate.
    """

    def __init__(
        self,
        input_dim: int,
        dim: int,
        trunk_dim: int = 128,
        mixed_memory: bool = False,
        gated: bool = True,
    ) -> None:
        # f, g, a, b, the cells of an LSTM, and the time.
        super().__init__(dim, (5 if mixed_memory else 4) * dim + 1)
        self.gated = gated
        self.memory = nn.LSTMCell(input_dim, dim) if mixed_memory else None
        if self.memory is not None:
            nn.init.constant_(self.memory.bias_hh[dim : 2 * dim].detach(), 1.0)
        self.trunk = nn.Linear(input_dim + dim, trunk_dim)
        self.heads = nn.Linear(trunk_dim, 4 * dim)
        for layer in (self.trunk, self.heads):
            nn.init.xavier_uniform_(layer.weight)

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        return torch.cat((state[..., :-1], state[..., -1:] + gap), dim=-1)

    def hidden(self, state: Tensor) -> Tensor:
        """Return the hidden state, see `Cell`."""
        early, late, rate, shift = state[..., : 4 * self.dim].chunk(4, dim=-1)
        share = torch.sigmoid(rate * state[..., -1:] + shift)
        return (early - share * early if self.gated else early) + share * late

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        hidden, cells = self.hidden(state), state[..., 4 * self.dim : -1]
        if self.memory is not None:
            hidden, cells = self.memory(inputs, (hidden, cells))
        # The hyperbolic tangent of LeCun, as in the authors' code.
        trunk = 1.7159 * torch.tanh(2.0 / 3.0 * self.trunk(torch.cat((inputs, hidden), dim=-1)))
        heads, gate = self.heads(trunk).split(2 * self.dim, dim=-1)
        return torch.cat((heads.tanh(), gate, cells, gap), dim=-1)
