r"""GRU-D: a recurrent network whose inputs and hidden state decay while nothing is measured.

Che et al., "Recurrent Neural Networks for Multivariate Time Series with Missing Values",
Scientific Reports 8, 6085, 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from osciformer._text import check_choice
from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.models.forward_fill import forward_fill, positive_gaps
from osciformer.nn.encoder import with_indicators
from osciformer.nn.timeline import TimeScale, last_observation, take_tokens
from osciformer.ops.padding import clean_times


@dataclass(frozen=True)
class EncodedRecurrence:
    """States of one recurrence and what decays from them."""

    states: Tokens
    ages: Values  # since the last measurement, or the first row if there is none
    times: Times
    mask: Mask


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
        delta = take_tokens(encoded.ages, held) + moved[..., None].to(encoded.ages.dtype)
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
class GRUD(Backbone):
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
        super().__init__()
        check_choice("direction", direction, ("causal", "bidirectional"))
        self.dim, self.time_scale = dim, TimeScale()
        later = dim // 2 if direction == "bidirectional" else 0
        sizes: dict[str, Any] = {"static_dim": static_dim, "dropout": dropout}
        self.forwards = DecayRecurrence(input_dim, dim - later, **sizes)
        self.backwards = DecayRecurrence(input_dim, later, **sizes) if later else None

    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> EncodedDirections:
        """Return the encoded series, see `Backbone.encode`."""
        times = self.time_scale(times)
        early = self.forwards(values, times, mask, static)
        if self.backwards is None:
            return EncodedDirections(early, None)
        late = self.backwards(values.flip(1), -times.flip(1), mask.flip(1), static)
        return EncodedDirections(early, late)

    def read(self, encoded: EncodedDirections, query_times: QueryTimes) -> Reads:
        """Return the states at any times, in the unit of the data."""
        query_times = self.time_scale(query_times)
        early = self.forwards.read(encoded.forwards, query_times)
        if self.backwards is None or encoded.backwards is None:
            return early
        late = self.backwards.read(encoded.backwards, -query_times)
        return torch.cat((early, late), dim=-1)

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.time_scale.fit(times, mask)
        # The unit of the decays is the geometric mean of the longest span and the median gap.
        unit = torch.sqrt(positive_gaps(times, mask).median() * self.time_scale.scale)
        self.time_scale.set(float(self.time_scale.reference), float(unit))


@dataclass(frozen=True)
class EncodedDirections:
    """An encoded batch of one or two recurrences, the second in reversed time."""

    forwards: EncodedRecurrence
    backwards: EncodedRecurrence | None

    @property
    def states(self) -> Tokens:
        """States of the observations; zero where absent."""
        states = self.forwards.states
        if self.backwards is not None:
            states = torch.cat((states, self.backwards.states.flip(1)), dim=-1)
        return states.masked_fill(~self.forwards.mask[..., None], 0.0)
