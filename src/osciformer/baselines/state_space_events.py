"""The state-space point process: layers of linear jump equations, nonlinearities in between."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Int, Tensor, Tokens
from osciformer.baselines.state_space import linear_scan
from osciformer.events.neural.encoder import (
    EventStates,
    Gaps,
    TypeEncoder,
    elapsed_of,
    gaps_of,
    take_events,
)
from osciformer.events.sequences import EventBatch
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import register_backbone

# First decay rates, per mean gap, until `fit_times` finds what the training times resolve.
_FIRST_RANGE = (0.1, 10.0)
_START = 1e-3  # size of the first states before the first event, as in the released code


class LatentLinearHawkes(nn.Module):
    r"""Complex modes that jump at events and follow a linear equation in between.

    With the rates $\Lambda_i$ after event i, the normalised input $\bar u$ and the embedding
    $\alpha$ of a type,

    $$x(t_i + g) = e^{\Lambda_i g} x_i + (e^{\Lambda_i g} - 1) B \bar u_i, \qquad
    x_i = x(t_i^-) + E \alpha_{k_i}$$
    $$y = \mathrm{Re}(C x) + d \odot \bar u, \qquad u' = u + \mathrm{GLU}(y)$$

    where $\bar u_i$, the input just after event i, is held until the next one, and
    $\Lambda_i = \mathrm{softplus}(W \bar u_i + b)\,\Lambda$. The first layer has no input, and
    $\Lambda_i = \Lambda$.

    Args:
        dim: Width D of inputs, outputs and embeddings of types.
        num_modes: Number of modes P.
        is_first: Whether there is no input.
        dropout: Dropout of the output.
    """

    no_weight_decay = ("log_decay", "angle", "start", "skip")

    def __init__(self, dim: int, num_modes: int, *, is_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.zeros(num_modes))
        self.angle = nn.Parameter(torch.zeros(num_modes))
        self.start = nn.Parameter(_START * torch.randn(num_modes, 2))
        self.jump = nn.Linear(dim, 2 * num_modes, bias=False)
        self.leave = nn.Linear(2 * num_modes, dim, bias=False)
        self.gate = nn.Linear(dim, 2 * dim)
        self.dropout = nn.Dropout(dropout)
        self.norm: nn.LayerNorm | None = None
        if not is_first:
            self.norm = nn.LayerNorm(dim)
            self.enter = nn.Linear(dim, 2 * num_modes, bias=False)
            self.step = nn.Linear(dim, num_modes)
            self.skip = nn.Parameter(torch.randn(dim))
            nn.init.normal_(self.step.weight, std=0.1 * dim**-0.5)
            nn.init.constant_(self.step.bias, math.log(math.e - 1.0))  # softplus is 1 there
        self.reset(_FIRST_RANGE)

    @torch.no_grad()
    def reset(self, decay_range: tuple[float, float]) -> None:
        """Space the decay rates over a range; modes turn at most once in their time of decay."""
        low, high = map(math.log, decay_range)
        decay = torch.linspace(low, high, len(self.log_decay), dtype=torch.float64)
        turns = torch.rand(len(decay), dtype=torch.float64)
        self.log_decay.copy_(decay)
        self.angle.copy_(2.0 * math.pi * turns * decay.exp())

    def forward(
        self, after: Tokens | None, jumps: Tokens, gaps: Float[Tensor, "B N"]
    ) -> tuple[Float[Tensor, "B N P"], Tokens]:
        """Return states and outputs just after events.

        Args:
            after: Inputs just after events; None for the first layer.
            jumps: Embeddings of their types.
            gaps: Time since the event before, 0 for the first one.
        """
        held = self._normed(after)
        # What follows event i acts over the gap before event i + 1; before the first one is none.
        factor = _factors(self._rates(held, slice(None, -1)), gaps[:, 1:, None])
        entering = self._modes(self.jump, jumps)
        first = torch.view_as_complex(self.start.to(jumps.dtype)) + entering[:, :1]
        later = entering[:, 1:]
        if held is not None:
            later = later + (factor - 1.0) * self._modes(self.enter, held[:, :-1])
        factor = torch.cat((torch.ones_like(first), factor), dim=1)
        states = linear_scan(factor, torch.cat((first, later), dim=1))
        return states, self._output(states, after)

    def later(
        self,
        states: Float[Tensor, "B N P"],
        after: Tokens | None,
        gaps: Gaps,
        now: Float[Tensor, "B N G D"] | None,
    ) -> Float[Tensor, "B N G D"]:
        """Return outputs some gaps after events.

        Args:
            states: States just after events.
            after: Inputs just after events; None for the first layer.
            gaps: Times since each event.
            now: Inputs these gaps later; None for the first layer.
        """
        held = self._normed(after)
        rates = self._rates(held, slice(None))
        rates = rates if held is None else rates[:, :, None]
        factor = _factors(rates, gaps[..., None])
        moved = factor * states[:, :, None]
        if held is not None:
            moved = moved + (factor - 1.0) * self._modes(self.enter, held)[:, :, None]
        return self._output(moved, now)

    def _normed(self, u: Tensor | None) -> Tensor | None:
        return None if self.norm is None or u is None else self.norm(u)

    def _rates(self, held: Tensor | None, which: slice) -> Tensor:
        """Return the exponents after some events `[B, N, P]`, or `[P]` if they are all alike."""
        rates = torch.complex(-self.log_decay.exp(), self.angle)
        return rates if held is None else functional.softplus(self.step(held[:, which])) * rates

    def _modes(self, layer: nn.Linear, x: Tensor) -> Tensor:
        parts = layer(x).unflatten(-1, (-1, 2))
        return torch.view_as_complex(parts.to(self.log_decay.dtype))  # no complex half precision

    def _output(self, states: Tensor, u: Tensor | None) -> Tensor:
        y = self.leave(torch.view_as_real(states).flatten(-2))
        normed = self._normed(u)
        y = y if normed is None else y + self.skip * normed
        out = self.dropout(functional.glu(self.gate(y)))
        return cast("Tensor", out if u is None else u + out)


def _factors(rates: Tensor, gaps: Tensor) -> Tensor:
    """Return the exponentials of rates times gaps; that of complex numbers is slow on a CPU."""
    size, phase = (rates.real * gaps).exp(), rates.imag * gaps
    return torch.complex(size * phase.cos(), size * phase.sin())


class _Prepared(NamedTuple):
    """Of each layer, the states and the inputs just after events; and what the last one gives."""

    states: tuple[Float[Tensor, "B N P"], ...]
    inputs: tuple[Tokens | None, ...]
    after: Tokens


@register_backbone("s2p2", kind="events", settings=("num_layers", "dropout"))
class StateSpaceEventEncoder(TypeEncoder):
    """Layers of `LatentLinearHawkes` over the types of events, exact at any time.

    Chang, Boyd et al., "Deep Continuous-Time State-Space Models for Marked Event Sequences",
    NeurIPS 2025 (S2P2), with dynamics that depend on the input, inputs held forward, and first
    decay rates from what the training times resolve instead of HiPPO's; with a `SoftplusHead` it is
    that model. The work is O(N), by a scan.

    Args:
        num_types: Number of event types K.
        dim: Width D.
        num_layers: Number of layers.
        dropout: Dropout.
        num_modes: Complex modes of a layer; half the width if not given.
    """

    def __init__(
        self,
        num_types: int,
        dim: int = 64,
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        num_modes: int | None = None,
    ) -> None:
        super().__init__(num_types, dim, dropout)
        modes = max(1, dim // 2) if num_modes is None else num_modes
        self.layers = nn.ModuleList(
            LatentLinearHawkes(dim, modes, is_first=number == 0, dropout=dropout)
            for number in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def fit_times(self, batch: EventBatch) -> None:
        """Set the unit of time, and decay rates from the longest sequence to the short gaps."""
        super().fit_times(batch)
        if bool((gaps_of(batch) > 0).any()):
            found = frequency_range(self.scale(elapsed_of(batch)), batch.mask)
            for layer in self._layers:
                layer.reset(found)

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return states and inputs of all layers after all events, see `EventEncoder`."""
        jumps = self.dropout(self.types(batch.clean_types))
        gaps = self.scale(gaps_of(batch)).to(jumps.dtype)
        states: list[Tensor] = []
        inputs: list[Tokens | None] = []
        u: Tokens | None = None
        for layer in self._layers:
            inputs.append(u)
            x, u = layer(u, jumps, gaps)
            states.append(x)
        return _Prepared(tuple(states), tuple(inputs), self.norm(u))

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        gaps, now = self.scale(gaps).to(prepared.after.dtype), None
        known = zip(self._layers, prepared.states, prepared.inputs, strict=True)
        for layer, states, after in known:
            now = layer.later(states, after, gaps, now)
        return EventStates(prepared.after, self.norm(now))

    def pick(self, prepared: Any, events: Int[Tensor, "B S"]) -> _Prepared:
        """Return what `prepare` returned, of some events, see `EventEncoder`."""
        return _Prepared(
            tuple(take_events(x, events) for x in prepared.states),
            tuple(None if u is None else take_events(u, events) for u in prepared.inputs),
            take_events(prepared.after, events),
        )

    @property
    def _layers(self) -> list[LatentLinearHawkes]:
        return cast("list[LatentLinearHawkes]", list(self.layers))
