"""The continuous-time LSTM of the Neural Hawkes process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Tensor
from osciformer.events.neural.encoder import EventEncoder, EventStates, GapScale, gaps_of
from osciformer.events.sequences import EventBatch


class _Cells(NamedTuple):
    """What each event leaves: the cell, where it decays to, how fast, and the output gate."""

    start: Float[Tensor, "B N D"]
    target: Float[Tensor, "B N D"]
    rate: Float[Tensor, "B N D"]
    output: Float[Tensor, "B N D"]

    def after(self, gaps: Float[Tensor, "*#S"] | float) -> Float[Tensor, "*S D"]:
        """Return the states some gaps after the event, in the unit of the training events."""
        cell = torch.lerp(self.target, self.start, torch.exp(-self.rate * gaps))
        return self.output * torch.tanh(cell)


class ContinuousTimeLSTMEncoder(EventEncoder):
    r"""An LSTM whose cells decay exponentially between events, each to a target of its own.

    $$c(t) = \bar c_i + (c_i - \bar c_i) e^{-\delta_i (t - t_i)}, \qquad
    h(t) = o_i \odot \tanh c(t)$$
    Mei and Eisner, "The Neural Hawkes Process", NeurIPS 2017, eq. 4 to 7. At an event,
    seven gates of its type and of h just before it make $c_i, \bar c_i, \delta_i, o_i$. As
    there, the time since the event before is known from the decay alone. Rates are per mean gap of
    the training events. Before the first event all cells are 0.

    Args:
        num_types: Number of event types K.
        dim: Width D.
        dropout: Dropout of the type embedding.

    Example:
        >>> from osciformer.events import EventSequences
        >>> encoder = ContinuousTimeLSTMEncoder(1, 8)
        >>> batch = EventSequences.from_arrays([[1.0, 3.0], [5.0]]).batch()
        >>> encoder.states(encoder.prepare(batch), torch.rand(2, 2, 4)).now.shape
        torch.Size([2, 2, 4, 8])
    """

    def __init__(self, num_types: int, dim: int = 64, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = dim
        self.scale = GapScale()
        self.types = nn.Embedding(num_types, dim)
        self.from_type = nn.Linear(dim, 7 * dim)
        self.from_state = nn.Linear(dim, 7 * dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of gaps."""
        self.scale.fit(gaps_of(batch)[:, 1:][batch.mask[:, 1:]])

    def prepare(self, batch: EventBatch) -> _Cells:
        """Return the cells after all events, see `EventEncoder`."""
        inputs = self.from_type(self.dropout(self.types(batch.clean_types)))
        gaps = self.scale(gaps_of(batch)).to(inputs.dtype)
        zero = inputs.new_zeros(len(batch), self.dim)
        cells = _Cells(zero, zero, zero, zero)
        weight = self.from_state.weight.t()
        steps = []
        for raw, gap in zip(inputs.unbind(1), gaps[..., None].unbind(1), strict=True):
            before = torch.lerp(cells.target, cells.start, torch.exp(-cells.rate * gap))
            raw = torch.addmm(raw, cells.output * torch.tanh(before), weight)
            gates, rest = raw.split((5 * self.dim, 2 * self.dim), dim=-1)
            enter, forget, enter_target, forget_target, output = gates.sigmoid().chunk(5, dim=-1)
            value, rate = rest.chunk(2, dim=-1)
            value = value.tanh()
            cells = _Cells(
                forget * before + enter * value,
                forget_target * cells.target + enter_target * value,
                functional.softplus(rate),
                output,
            )
            steps.append(cells)
        return _Cells(*(torch.stack(items, dim=1) for items in zip(*steps, strict=True)))

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        after = prepared.output * torch.tanh(prepared.start)
        if gaps is None:
            return EventStates(after, None)
        scaled = self.scale(gaps).to(after.dtype)[..., None]
        return EventStates(after, _Cells(*(item[:, :, None] for item in prepared)).after(scaled))
