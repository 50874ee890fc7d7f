"""Cells with a memory of fixed linear dynamics: a bank of decays, or Legendre coefficients."""

from __future__ import annotations

import math

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.baselines.recurrence import Cell, register_cell
from osciformer.nn.parameters import ExactBuffers


@register_cell("ct_gru")
class ContinuousTimeGRU(Cell):
    r"""A GRU with traces that decay at fixed time scales; its gates choose the scales.

    $$h = \sum_m h_m, \quad q = \tanh(W x + U \textstyle\sum_m r_m h_m), \quad
    h_m \leftarrow (1 - s_m) h_m + s_m q, \quad h_m(t) = h_m e^{-t / \tau_m}$$
    Mozer et al., "Discrete Event, Continuous Time RNNs", 2017. The weights r and s are largest at
    scales that x and h choose. Scales are half a decade apart, from 0.3 mean gaps on.
    """

    log_scales: Tensor

    def __init__(self, input_dim: int, dim: int, num_scales: int = 8) -> None:
        super().__init__(dim, num_scales * dim)
        log_scales = 0.5 * math.log(10.0) * (torch.arange(num_scales) - 1.0)
        self.register_buffer("log_scales", log_scales, persistent=False)
        self.choice = nn.Linear(input_dim + dim, 2 * dim)
        self.event = nn.Linear(input_dim + dim, dim)
        # Units start with scales of their own.
        nn.init.uniform_(self.choice.bias, float(log_scales[0]), float(log_scales[-1]))

    def evolve(self, state: Tensor, gap: Tensor) -> Tensor:
        """Return the state a gap later, see `Cell`."""
        decay = torch.exp(-gap / self.log_scales.exp())[..., None, :]
        return (self._traces(state) * decay).flatten(-2)

    def hidden(self, state: Tensor) -> Tensor:
        """Return the hidden state, see `Cell`."""
        return self._traces(state).sum(dim=-1)

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        state = self.evolve(state, gap)
        traces = self._traces(state)
        chosen = self.choice(torch.cat((inputs, self.hidden(state)), dim=-1))
        distance = chosen[..., None] - self.log_scales
        retrieve, store = (-distance.square()).softmax(dim=-1).chunk(2, dim=-2)
        retrieved = (retrieve * traces).sum(dim=-1)
        event = self.event(torch.cat((inputs, retrieved), dim=-1)).tanh()[..., None]
        return (traces + store * (event - traces)).flatten(-2)

    def _traces(self, state: Tensor) -> Float[Tensor, "*A D M"]:
        return state.unflatten(-1, (self.dim, -1))


def legendre_system(order: int) -> tuple[Float[Tensor, "K K"], Float[Tensor, "K 1"]]:
    r"""Return A, B of $\theta m' = A m + B u$, float64: m holds u over the last $\theta$.

    They are its coefficients in shifted Legendre polynomials, up to an approximation (Voelker et
    al., eq. 2).
    """
    i = torch.arange(order, dtype=torch.float64)[:, None]
    sign = torch.where((i - i.T) % 2 == 0, -1.0, 1.0).to(torch.float64)
    a = (2.0 * i + 1.0) * torch.where(i < i.T, -1.0, sign)
    return a, (2.0 * i + 1.0) * torch.where(i % 2 == 0, 1.0, -1.0)


@register_cell("lmu")
class LegendreMemoryUnit(Cell, ExactBuffers):
    """A plain recurrent network beside a memory of a learned signal over a sliding window.

    Voelker et al., "Legendre Memory Units", NeurIPS 2019. They have equidistant rows; here each gap
    has its own exact transition, with the signal of a row held over the gap before it. The state
    stands still after the last row.

    Args:
        input_dim: Number of inputs I.
        dim: Width D.
        order: Number of Legendre polynomials of a memory.
        window: Length of the window, in mean gaps.
        num_memories: Number of signals that are remembered.
    """

    system: Tensor

    def __init__(
        self, input_dim: int, dim: int, order: int = 16, window: float = 32.0, num_memories: int = 1
    ) -> None:
        if not window > 0.0:
            raise ValueError(f"window must be positive, in mean gaps; got {window}")
        memory_dim = num_memories * order
        super().__init__(dim, dim + memory_dim)
        self.num_memories = num_memories
        system = torch.cat(legendre_system(order), dim=1) / window
        # A row of zeros: the signal is constant over a gap.
        system = torch.cat((system, system.new_zeros(1, order + 1)))
        self.register_buffer("system", system, persistent=False)
        self.signal = nn.Linear(input_dim + dim + memory_dim, num_memories)
        self.update = nn.Linear(input_dim + dim + memory_dim, dim)
        nn.init.zeros_(self.signal.weight[:, -memory_dim:].detach())

    def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
        """Return the state after a row, see `Cell`."""
        hidden, memory = state[..., : self.dim], state[..., self.dim :]
        signal = self.signal(torch.cat((inputs, state), dim=-1))[..., None]
        transition = torch.linalg.matrix_exp(self.system * gap[..., None].double()).to(memory.dtype)
        known = torch.cat((memory.unflatten(-1, (self.num_memories, -1)), signal), dim=-1)
        memory = (known @ transition[:, :-1].mT).flatten(-2)
        hidden = self.update(torch.cat((inputs, hidden, memory), dim=-1)).tanh()
        return torch.cat((hidden, memory), dim=-1)
