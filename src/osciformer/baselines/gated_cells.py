"""Gated cells with the gap as an input, or whose states decay exponentially in closed form."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Tensor, Tokens
from osciformer.baselines.recurrence import Cell, register_cell


class _FusedCell(Cell):
    """A layer of torch, whose kernels do all rows at once; its state stands still between rows."""

    sees_gap = True
    layer: type[nn.LSTM] | type[nn.GRU]

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__(dim)
        self.recurrence = self.layer(input_dim, dim, batch_first=True)

    def run(self, inputs: Tokens, gaps: Tensor) -> Tokens:
        """Return the states after all rows, see `Cell`."""
        return cast("Tensor", self.recurrence(inputs)[0])


@register_cell("lstm")
class AugmentedLSTM(_FusedCell):
    """An LSTM with the gap as an input."""

    layer = nn.LSTM


@register_cell("gru")
class GapGRU(_FusedCell):
    """A GRU with the gap as an input, the GRU-dt of Rubanova et al., 2019."""

    layer = nn.GRU


@register_cell("rnn_decay")
class RNNDecay(Cell):
    r"""A GRU whose state decays between rows, $h(t) = h_i e^{-r (t - t_i)}$, with learned rates r.

    Rubanova et al., "Latent ODEs for Irregularly-Sampled Time Series", NeurIPS 2019, their
    RNN-Decay, with a rate for each unit.
    """

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__(dim)
        self.update = nn.GRUCell(input_dim, dim)
        # So that units forget over some 1 to 150 mean gaps.
        self.raw_rate = nn.Parameter(5.0 * torch.rand(dim) - 5.0)

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        return state * torch.exp(-functional.softplus(self.raw_rate) * gap)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        return cast("Tensor", self.update(inputs, self.evolve(state, gap)))


class DecayingCells(NamedTuple):
    r"""The cells of a continuous-time LSTM, which decay to targets until the next event.

    $$c(t) = \bar c_i + (c_i - \bar c_i) e^{-\delta_i (t - t_i)}, \qquad
    h(t) = o_i \odot \tanh c(t)$$
    Mei and Eisner, "The Neural Hawkes Process", NeurIPS 2017, eq. 4 to 7.
    """

    start: Float[Tensor, "*A D"]
    target: Float[Tensor, "*A D"]
    rate: Float[Tensor, "*A D"]
    output: Float[Tensor, "*A D"]

    def at(self, gap: Float[Tensor, "*A 1"]) -> Float[Tensor, "*A D"]:
        """Return the cells a gap later."""
        return torch.lerp(self.target, self.start, torch.exp(-self.rate * gap))

    def jump(self, gates: Float[Tensor, "*A 7D"], before: Tensor) -> DecayingCells:
        """Return the cells after an event, from its raw gates and from the cells just before it."""
        dim = before.shape[-1]
        squashed, rest = gates.split((5 * dim, 2 * dim), dim=-1)
        enter, forget, enter_target, forget_target, output = squashed.sigmoid().chunk(5, dim=-1)
        value, rate = rest.chunk(2, dim=-1)
        value = value.tanh()
        target = forget_target * self.target + enter_target * value
        start = forget * before + enter * value
        return DecayingCells(start, target, functional.softplus(rate), output)


@register_cell("ct_lstm")
class ContinuousTimeLSTM(Cell):
    """An LSTM whose cells decay between rows, see `DecayingCells`."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__(dim, 4 * dim)
        self.gates = nn.Linear(input_dim + dim, 7 * dim)

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        cells = DecayingCells(*state.chunk(4, dim=-1))
        return torch.cat(cells._replace(start=cells.at(gap)), dim=-1)

    def hidden(self, state: Tensor) -> Tensor:
        """Return the hidden state, see `Cell`."""
        cells = DecayingCells(*state.chunk(4, dim=-1))
        return cells.output * torch.tanh(cells.start)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        before = self.evolve(state, gap)
        gates = self.gates(torch.cat((inputs, self.hidden(before)), dim=-1))
        cells = DecayingCells(*before.chunk(4, dim=-1))
        return torch.cat(cells.jump(gates, cells.start), dim=-1)
