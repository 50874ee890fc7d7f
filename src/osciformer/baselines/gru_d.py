r"""GRU-D: a recurrent network whose inputs and hidden state decay while nothing is measured.

Che et al., "Recurrent Neural Networks for Multivariate Time Series with Missing Values",
Scientific Reports 8, 6085, 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Values
from osciformer.baselines.directions import DirectedBackbone
from osciformer.baselines.recurrence import EncodedRecurrence
from osciformer.models.backbones import register_backbone
from osciformer.models.forward_fill import forward_fill
from osciformer.nn.encoder import with_indicators
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import clean_times


class DecayRecurrence(nn.Module):
    r"""The recurrence of GRU-D over one direction of time.

    With m the sign that a feature was measured, x' its last value before, delta the time since:

    $$\gamma_x = e^{-\max(0,\, w \delta + b)}, \qquad
    \hat x = m x + (1 - m) \gamma_x x', \qquad
    \gamma_h = e^{-\max(0,\, W \delta + b_h)}, \qquad
    h \leftarrow \mathrm{GRU}([\hat x, m],\, \gamma_h h)$$

    Values have zero mean, so they decay to zero. Static features enter each step. The dropout of
    the hidden state is the same at every step.
    """

    no_weight_decay = ("value_rate",)

    def __init__(
        self, input_dim: int, dim: int, *, static_dim: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim = dim
        self.cell = nn.GRUCell(2 * input_dim, dim)
        self.static = nn.Linear(2 * static_dim, 3 * dim, bias=False) if static_dim else None
        # Rates start positive, where they have a gradient, and slow.
        self.value_rate = nn.Parameter(0.5 * torch.rand(input_dim))
        self.value_bias = nn.Parameter(torch.zeros(input_dim))
        self.hidden_decay = nn.Linear(input_dim, dim)
        nn.init.uniform_(self.hidden_decay.weight, 0.0, 0.05 / input_dim)
        nn.init.zeros_(self.hidden_decay.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> EncodedRecurrence:
        """Return the states of the series; times are in the unit of the decays."""
        times = clean_times(times, mask)
        measured = ~values.isnan() & mask[..., None]
        last, age = forward_fill(values, times, mask)
        since_start = (times - times[:, :1])[..., None].to(age.dtype)
        ages = torch.where(age.isnan(), since_start, age)
        # Before a row's own measurement, features are as old as in the row before, plus the gap.
        gaps = functional.pad(times.diff(dim=1), (1, 0))[..., None].to(age.dtype)
        delta = functional.pad(ages[:, :-1], (0, 0, 1, 0)) + gaps

        faded = torch.exp(-functional.relu(self.value_rate * delta + self.value_bias))
        filled = torch.where(measured, values, faded * last.nan_to_num(0.0))
        inputs = torch.cat((filled, measured.to(filled.dtype)), dim=-1)
        gates = functional.linear(inputs, self.cell.weight_ih, self.cell.bias_ih)  # [B, N, 3 D]
        if self.static is not None and static is not None:
            gates = gates + self.static(with_indicators(static))[:, None]
        decay = self._decay(delta)
        hidden = gates.new_zeros(len(values), self.dim)
        kept = self.dropout(torch.ones_like(hidden))
        states = []
        steps = zip(decay.unbind(1), gates.unbind(1), mask[..., None].unbind(1), strict=True)
        for fade, gate, present in steps:
            hidden = torch.where(present, self._step(fade * hidden, gate, kept), hidden)
            states.append(hidden)
        return EncodedRecurrence(torch.stack(states, dim=1), ages, times, mask)

    def read(self, encoded: EncodedRecurrence, query_times: QueryTimes) -> Reads:
        """Return the hidden states at any times, decayed since the row before; zeros before all."""
        held = last_observation(encoded.times, query_times, encoded.mask)
        moved = query_times - take_tokens(encoded.times[..., None], held)[..., 0]
        delta = take_tokens(encoded.carried, held) + moved[..., None].to(encoded.carried.dtype)
        return self._decay(delta.clamp(min=0.0)) * take_tokens(encoded.states, held)

    def _decay(self, delta: Float[Tensor, "B N F"]) -> Float[Tensor, "B N D"]:
        return torch.exp(-functional.relu(self.hidden_decay(delta)))

    def _step(self, hidden: Tensor, gate: Tensor, kept: Tensor) -> Tensor:
        own = functional.linear(hidden * kept, self.cell.weight_hh, self.cell.bias_hh)
        width = 2 * self.dim
        reset, update = (gate[:, :width] + own[:, :width]).sigmoid().chunk(2, dim=-1)
        candidate = torch.tanh(gate[:, width:] + reset * own[:, width:])
        return torch.lerp(candidate, hidden, update)


@register_backbone("gru_d", settings=("dropout",))
class GRUD(DirectedBackbone):
    """GRU-D as a backbone. A read is the last hidden state, decayed until the query time.

    Args:
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D.
        direction: `causal`, or `bidirectional`: half of the width runs backwards in time.
        dropout: Dropout of the hidden state.
    """

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        direction: str = "causal",
        dropout: float = 0.0,
    ) -> None:
        sizes: dict[str, Any] = {"static_dim": static_dim, "dropout": dropout}
        super().__init__(lambda dim: DecayRecurrence(input_dim, dim, **sizes), dim, direction)

    def _unit(self, gaps: Float[Tensor, "G"]) -> Tensor:
        # The geometric mean of the longest span and the median gap.
        return torch.sqrt(gaps.median() * self.time_scale.scale)
