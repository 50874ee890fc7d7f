"""Published encoders of events: RMTPP, the Neural Hawkes process, ODE-RNN and mTAN."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Float, Int, Tensor, Times, Tokens
from osciformer.baselines.gated_cells import DecayingCells
from osciformer.baselines.ode_cells import GapFlow
from osciformer.events.neural.encoder import (
    EventStates,
    Gaps,
    TokenEncoder,
    TypeEncoder,
    elapsed_of,
    gaps_of,
    take_events,
)
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_bank, frequency_range
from osciformer.models.backbones import register_backbone
from osciformer.nn.encoder import FeedForward
from osciformer.nn.parameters import ExactBuffers

# In radians per mean gap, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (1e-2, math.pi)


@register_backbone("rmtpp", kind="events", settings=("num_layers", "dropout"))
class RecurrentEventEncoder(TokenEncoder):
    """A GRU over types and gaps, whose state stands still between events.

    Du et al., "Recurrent Marked Temporal Point Processes", KDD 2016; with an `ExponentialHead` it
    is that model.
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, num_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(num_types, dim, dropout)
        between = dropout if num_layers > 1 else 0.0
        self.recurrence = nn.GRU(dim, dim, num_layers, batch_first=True, dropout=between)

    def prepare(self, batch: EventBatch) -> Tokens:
        """Return the states after all events, see `EventEncoder`."""
        return cast("Tensor", self.dropout(self.recurrence(self.tokens(batch))[0]))


@register_backbone("neural_hawkes", kind="events", settings=("dropout",))
class ContinuousTimeLSTMEncoder(TypeEncoder):
    """An LSTM whose cells decay between events, see `DecayingCells`.

    At an event, seven gates of its type and of the hidden state just before it make the cells,
    their targets, rates and output gates. Rates are per mean gap of the training events. Before the
    first event all cells are 0.
    """

    def __init__(self, num_types: int, dim: int = 64, *, dropout: float = 0.0) -> None:
        super().__init__(num_types, dim, dropout)
        self.from_type = nn.Linear(dim, 7 * dim)
        self.from_state = nn.Linear(dim, 7 * dim, bias=False)

    def prepare(self, batch: EventBatch) -> DecayingCells:
        """Return the cells after all events, see `EventEncoder`."""
        inputs = self.from_type(self.dropout(self.types(batch.clean_types)))
        gaps = self.scale(gaps_of(batch)).to(inputs.dtype)
        cells = DecayingCells(*[inputs.new_zeros(len(batch), self.dim)] * 4)
        weight = self.from_state.weight.t()
        steps = []
        for raw, gap in zip(inputs.unbind(1), gaps[..., None].unbind(1), strict=True):
            before = cells.at(gap)
            gates = torch.addmm(raw, cells.output * torch.tanh(before), weight)
            cells = cells.jump(gates, before)
            steps.append(cells)
        return DecayingCells(*(torch.stack(items, dim=1) for items in zip(*steps, strict=True)))

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        after = prepared.output * torch.tanh(prepared.start)
        if gaps is None:
            return EventStates(after, None)
        cells = DecayingCells(*(item[:, :, None] for item in prepared))
        now = cells.at(self.scale(gaps).to(after.dtype)[..., None])
        return EventStates(after, cells.output * torch.tanh(now))

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> DecayingCells:
        """Return the cells after some events, see `EventEncoder`."""
        return DecayingCells(*(take_events(item, events) for item in prepared))


@register_backbone("ode_rnn", kind="events", settings=("dropout",))
class ODERNNEncoder(TokenEncoder):
    """A GRU that is updated at events and flows between them.

    Rubanova et al., "Latent ODEs for Irregularly-Sampled Time Series", NeurIPS 2019, their ODE-RNN.
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, dropout: float = 0.0, num_steps: int = 4
    ) -> None:
        super().__init__(num_types, dim, dropout)
        self.update = nn.GRUCell(dim, dim)
        self.flow = GapFlow(dim, num_steps)

    def prepare(self, batch: EventBatch) -> Tokens:
        """Return the states after all events, see `EventEncoder`."""
        tokens, gaps = self.tokens(batch), self.scale(gaps_of(batch))
        state = self.update(tokens[:, 0])
        after = [state]
        for token, gap in zip(tokens[:, 1:].unbind(1), gaps[:, 1:].unbind(1), strict=True):
            state = self.update(token, self.flow(state, gap))
            after.append(state)
        return torch.stack(after, dim=1)

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        after, still = super().states(prepared, gaps)
        if gaps is None or still is None:
            return EventStates(after, None)
        return EventStates(after, self.flow(still, self.scale(gaps)))


class TimeEmbedding(ExactBuffers):
    r"""A learned embedding of time, $(w_0 t + a_0, \sin(w_1 t + a_1), \sin(w_2 t + a_2), \dots)$.

    The frequencies are $w = r e^p$, r from the training times and in float64, p learned.
    """

    reference: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"dim must be at least 2, a line and a sine; got {dim}")
        self.register_buffer("reference", torch.zeros(dim, dtype=torch.float64))
        self.log_factor = nn.Parameter(torch.zeros(dim))
        shift = 2.0 * torch.pi * torch.rand(dim)
        shift[0] = 0.0
        self.shift = nn.Parameter(shift)
        self.reset(_FIRST_RANGE)

    @torch.no_grad()
    def reset(self, omega_range: tuple[float, float]) -> None:
        """Space the frequencies over a range; the line rises to pi where the lowest one turns."""
        low, high = omega_range
        bank = frequency_bank("log_spaced", len(self.reference) - 1, low=low, high=high)
        self.reference.copy_(torch.cat((bank.new_tensor([low]), bank)))

    def forward(self, times: Float[Tensor, "*S"]) -> Float[Tensor, "*S E"]:
        """Return the embedded times, in the dtype of the weights."""
        phase = times.double()[..., None] * (self.reference * self.log_factor.double().exp())
        phase = phase + self.shift.double()
        return torch.cat((phase[..., :1], phase[..., 1:].sin()), dim=-1).to(self.shift.dtype)


class _PreparedTimes(NamedTuple):
    """Times since the first event in the unit of the training events, keys and values by head."""

    elapsed: Times
    keys: Float[Tensor, "B H N C"]
    values: Float[Tensor, "B H N C"]


@register_backbone("mtan", kind="events", settings=("num_heads", "dropout"))
class MultiTimeAttentionEncoder(TokenEncoder):
    """Attention from a time to the times of events, which averages what these were.

    Shukla and Marlin, "Multi-Time Attention Networks for Irregularly Sampled Time Series", ICLR
    2021: queries and keys are learned embeddings of time alone, each head has its own map of them.
    """

    def __init__(
        self, num_types: int, dim: int = 64, *, num_heads: int = 4, dropout: float = 0.0
    ) -> None:
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads; got {dim=}, {num_heads=}")
        super().__init__(num_types, dim, dropout)
        self.num_heads = num_heads
        self.time = TimeEmbedding(dim)
        self.query_projection = nn.Linear(dim, dim)
        # A bias would add the same to all logits of a row.
        self.key_projection = nn.Linear(dim, dim, bias=False)
        self.value_projection = nn.Linear(dim, dim)
        self.output_projection = nn.Linear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.feedforward = FeedForward(dim, dropout=dropout)
        self.norm = nn.LayerNorm(dim)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and frequencies from half a turn over the longest sequence on."""
        super().fit_times(batch)
        if bool((gaps_of(batch) > 0).any()):
            # Between events the state must not turn faster than intensities do: half a turn a gap.
            low, _ = frequency_range(self.scale(elapsed_of(batch)), batch.mask)
            self.time.reset((low, max(low, math.pi)))

    def prepare(self, batch: EventBatch) -> _PreparedTimes:
        """Return keys and values of all events, see `EventEncoder`."""
        elapsed = self.scale(elapsed_of(batch))
        keys = self.key_projection(self.time(elapsed))
        values = self.value_projection(self.tokens(batch))
        return _PreparedTimes(elapsed, self._heads(keys), self._heads(values))

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        times = elapsed = prepared.elapsed[..., None]
        if gaps is not None:
            times = torch.cat((elapsed, elapsed + self.scale(gaps)), dim=-1)
        states = self._read(prepared, times)
        return EventStates(states[:, :, 0], None if gaps is None else states[:, :, 1:])

    def _read(self, known: _PreparedTimes, times: Gaps) -> Float[Tensor, "B N G D"]:
        """Return the states at times, of the events up to each event."""
        width, num_gaps = times.shape[1:]
        queries = self._heads(self.query_projection(self.time(times.flatten(1))))
        index = torch.arange(width, device=times.device)
        seen = index <= index.repeat_interleave(num_gaps)[:, None]  # [N * G, N]
        attended = scaled_dot_product_attention(queries, known.keys, known.values, attn_mask=seen)
        x = self.output_projection(attended.transpose(1, 2).flatten(2))
        states: Tensor = self.norm(x + self.feedforward(self.feedforward_norm(x)))
        return states.unflatten(1, (width, num_gaps))

    def _heads(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B H M C"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
