"""From states to intensities: when the next event comes, and of which type."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Int, Tensor
from osciformer.config import EventModelConfig
from osciformer.events.neural.encoder import EventStates, GapScale

# Smallest waiting time that a density may resolve, in typical gaps, for times not on a grid.
_FINEST = 1e-3
# Components of a mixture are not narrower than this, in the logarithm of the gap.
_NARROWEST = 0.25
# Bound on the first preference for the last type, in nats.
_LARGEST_PREFERENCE = 8.0


class EventPairs(NamedTuple):
    """All pairs of neighbouring training events."""

    gaps: Float[Tensor, "P"]  # times between them, float64
    before: Int[Tensor, "P"]  # type of the first of each pair
    after: Int[Tensor, "P"]  # type of the second
    num_types: int

    @property
    def shares(self) -> Float[Tensor, "K"]:
        """How often each type is the second one; half an event more for each."""
        counts = torch.bincount(self.after, minlength=self.num_types).double() + 0.5
        return counts / counts.sum()


class EventHead(nn.Module, ABC):
    """What turns an encoder's states into intensities; write another one for other marks."""

    needs_now: bool = True  #: Whether it needs the states some gaps after events.
    is_closed: bool = False  #: Whether it has a `hazard_integral`, so that none is approximated.

    def __init__(self) -> None:
        super().__init__()
        self.scale = GapScale()

    @abstractmethod
    def log_intensity(self, states: EventStates, last_types: Tensor, gaps: Tensor) -> Tensor:
        """Return the logarithms of the intensities `[B, N, G, K]` some gaps after each event.

        Args:
            states: What the encoder returned; `states.now` belongs to `gaps`.
            last_types: Type of each event `[B, N]`.
            gaps: Times since it `[B, N, G]`, float64, in the unit of the data.
        """

    def hazard_integral(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the integral of the total intensity from each event to some gaps after it."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form")

    def fit(self, pairs: EventPairs) -> None:
        """Set the first values from the training events; here their time scale."""
        self.scale.fit(pairs.gaps)


class CopyLast(nn.Module):
    """A preference for the type of the last event, or against it, that depends on the state."""

    def __init__(self, dim: int, num_types: int) -> None:
        super().__init__()
        self.num_types = num_types
        self.gate = nn.Linear(dim, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, states: Float[Tensor, "B N G D"], last_types: Tensor) -> Tensor:
        """Return what to add to the scores of the types `[B, N, G, K]`."""
        is_last = functional.one_hot(last_types, self.num_types).to(states.dtype)
        return self.gate(states) * is_last[:, :, None]

    @torch.no_grad()
    def fit(self, pairs: EventPairs) -> None:
        """Start at the constant preference that is likeliest for the training events."""
        repeats = (pairs.before == pairs.after).double().sum()
        odds = (pairs.shares / (1.0 - pairs.shares))[pairs.before]
        low, high = -_LARGEST_PREFERENCE, _LARGEST_PREFERENCE
        for _ in range(60):
            middle = (low + high) / 2
            raised = odds * math.exp(middle)
            expected = (raised / (1.0 + raised)).nan_to_num(nan=1.0).sum()
            low, high = (middle, high) if bool(expected < repeats) else (low, middle)
        self.gate.bias.fill_((low + high) / 2)


class SoftplusHead(EventHead):
    r"""$\lambda_k(t) = s_k\,\mathrm{softplus}((w_k \cdot h(t) + b_k) / s_k)$, h read at t itself.

    Args:
        dim: Width D of the states.
        num_types: Number of types K.
        decay: The usual form instead: $w_k \cdot h_i + a_k g + b_k$ under the softplus, with the
            state h after the last event and the gap g since then.
    """

    def __init__(self, dim: int, num_types: int, *, decay: bool = False) -> None:
        super().__init__()
        self.needs_now = not decay
        self.linear = nn.Linear(dim, num_types)
        self.copy = CopyLast(dim, num_types)
        self.sharpness = nn.Parameter(torch.zeros(num_types))
        self.slope = nn.Parameter(torch.full((num_types,), -0.1)) if decay else None
        nn.init.normal_(self.linear.weight, std=0.1 * dim**-0.5)

    def log_intensity(self, states: EventStates, last_types: Tensor, gaps: Tensor) -> Tensor:
        """Return the logarithms of the intensities, see `EventHead`."""
        source = states.after[:, :, None] if self.slope is not None else states.now
        assert source is not None
        raw = self.linear(source) + self.copy(source, last_types)
        if self.slope is not None:
            raw = raw + self.slope * self.scale(gaps)[..., None].to(raw.dtype)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        sharpness = self.sharpness.to(raw.dtype)
        # For low scores softplus is the exponential: its logarithm must not be taken of 0.
        scaled = raw * torch.exp(-sharpness)
        exact = functional.softplus(scaled.clamp(min=-15.0)).log()
        return (
            torch.where(scaled < -15.0, scaled, exact)
            + sharpness
            - self.scale.unit.log().to(raw.dtype)
        )

    @torch.no_grad()
    def fit(self, pairs: EventPairs) -> None:
        """Start at the rates of the training events, see `EventHead`."""
        super().fit(pairs)
        self.linear.bias.copy_(torch.log(torch.expm1(pairs.shares)))


class _MarksAtTime(EventHead):
    """A hazard in closed form, and types by the state at the time itself."""

    is_closed = True

    def __init__(self, dim: int, num_types: int) -> None:
        super().__init__()
        self.needs_now = num_types > 1
        self.marks = nn.Linear(dim, num_types) if num_types > 1 else None
        self.copy = CopyLast(dim, num_types) if num_types > 1 else None
        if self.marks is not None:
            nn.init.normal_(self.marks.weight, std=0.1 * dim**-0.5)

    @abstractmethod
    def log_hazard(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the logarithm of the total intensity."""

    def log_intensity(self, states: EventStates, last_types: Tensor, gaps: Tensor) -> Tensor:
        """Return the logarithms of the intensities, see `EventHead`."""
        hazard = self.log_hazard(states, gaps)[..., None]
        if self.marks is None or self.copy is None:
            return hazard
        assert states.now is not None
        scores = self.marks(states.now) + self.copy(states.now, last_types)
        return hazard + functional.log_softmax(scores.to(hazard.dtype), dim=-1)

    @torch.no_grad()
    def fit(self, pairs: EventPairs) -> None:
        """Start at the shares of the types and of repetitions, see `EventHead`."""
        super().fit(pairs)
        if self.marks is not None and self.copy is not None:
            self.marks.bias.copy_(pairs.shares.log())
            self.copy.fit(pairs)


class ExponentialHead(_MarksAtTime):
    r"""The hazard of RMTPP, $\exp(w \cdot h_i + a g + b)$; types by the last event's state."""

    def __init__(self, dim: int, num_types: int) -> None:
        super().__init__(dim, num_types)
        self.needs_now = False
        self.level = nn.Linear(dim, 1)
        self.slope = nn.Parameter(torch.tensor(-0.1))
        nn.init.normal_(self.level.weight, std=0.1 * dim**-0.5)
        nn.init.zeros_(self.level.bias)

    def log_intensity(self, states: EventStates, last_types: Tensor, gaps: Tensor) -> Tensor:
        """Return the logarithms of the intensities, see `EventHead`."""
        held = EventStates(states.after, states.after[:, :, None])
        return super().log_intensity(held, last_types, gaps)

    def log_hazard(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the logarithm of the total intensity."""
        level = self.level(states.after).double()
        return level + self.slope.double() * self.scale(gaps) - self.scale.unit.log()

    def hazard_integral(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the integral of the total intensity, see `EventHead`."""
        gaps = self.scale(gaps)
        rise = self.slope.double() * gaps
        # (e^x - 1) / x has its limit where the slope or the gap is 0.
        flat = rise.abs() < 1e-6
        mean = torch.where(flat, 1.0 + rise / 2, torch.expm1(rise) / torch.where(flat, 1.0, rise))
        return torch.exp(self.level(states.after).double()) * gaps * mean


class MixtureHead(_MarksAtTime):
    r"""A mixture of log-normal densities of the waiting time, and types by the state at the time.

    With $u = \log(g + c)$ the waiting time g after an event has the density of a mixture of normal
    distributions of u, cut off at g = 0. The hazard, its integral and the density are closed forms,

    $$\int_0^g \lambda = \log S(\log c) - \log S(\log(g + c)), \qquad
    S(u) = \sum_m \pi_m\,\Phi\big((\mu_m - u) / \sigma_m\big),$$

    and the type of an event at g has probabilities $\mathrm{softmax}(W h(t) + b)$.

    Times on a grid (seconds, weeks) have no density: a peak on each point would score without end.
    So c is three steps of the grid, or a thousandth of the mean gap, and $\sigma \ge 1/4$.

    Args:
        dim: Width D of the states.
        num_types: Number of types K.
        num_components: Number of components.
    """

    def __init__(self, dim: int, num_types: int, num_components: int = 16) -> None:
        super().__init__(dim, num_types)
        first, last = nn.Linear(dim, dim), nn.Linear(dim, 3 * num_components)
        self.mixture = nn.Sequential(first, nn.GELU(), last)
        # Beside the unit, since buffers there keep their precision in any dtype.
        self.scale.register_buffer("offset", torch.tensor(_FINEST, dtype=torch.float64))
        nn.init.normal_(last.weight, std=0.1 * dim**-0.5)
        nn.init.zeros_(last.bias)
        self._set_means(torch.linspace(-3, 1, num_components))

    @torch.no_grad()
    def _set_means(self, means: Float[Tensor, "m"]) -> None:
        cast("nn.Linear", self.mixture[-1]).bias.chunk(3)[1].copy_(means)

    def _components(self, states: EventStates) -> tuple[Tensor, Tensor, Tensor]:
        """Return log weights, means and widths [B, N, 1, m], float64."""
        weight, mean, width = self.mixture(states.after).double()[:, :, None].chunk(3, dim=-1)
        return weight.log_softmax(dim=-1), mean, _NARROWEST + functional.softplus(width)

    def _log_survival(self, parts: tuple[Tensor, Tensor, Tensor], u: Tensor) -> Tensor:
        weight, mean, width = parts
        return torch.logsumexp(weight + torch.special.log_ndtr((mean - u[..., None]) / width), -1)

    def log_hazard(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the logarithm of the total intensity."""
        weight, mean, width = parts = self._components(states)
        u = torch.log(self.scale(gaps) + self.scale.offset)
        normal = -0.5 * ((u[..., None] - mean) / width).square() - width.log()
        log_density = torch.logsumexp(weight + normal, dim=-1) - 0.5 * math.log(2 * math.pi)
        return log_density - u - self._log_survival(parts, u) - self.scale.unit.log()

    def hazard_integral(self, states: EventStates, gaps: Tensor) -> Tensor:
        """Return the integral of the total intensity, see `EventHead`."""
        parts = self._components(states)
        u = torch.log(self.scale(gaps) + self.scale.offset)
        start = self.scale.offset.log().expand(u.shape[:2])[..., None]
        return self._log_survival(parts, start) - self._log_survival(parts, u)

    @torch.no_grad()
    def fit(self, pairs: EventPairs) -> None:
        """Find the grid of the times, and start at their density, see `EventHead`."""
        super().fit(pairs)
        self.scale.offset.fill_(_FINEST)
        positive = pairs.gaps[pairs.gaps > 0].double()
        if len(positive):
            step = 3.0 * grid_step(positive) / self.scale.unit
            self.scale.offset.fill_(max(_FINEST, float(step)))
            u = torch.log(self.scale(positive) + self.scale.offset)
            count = cast("nn.Linear", self.mixture[-1]).out_features // 3
            levels = torch.linspace(0.02, 0.98, count, dtype=u.dtype, device=u.device)
            self._set_means(torch.quantile(u[:: max(1, len(u) // 100_000)], levels))


def grid_step(gaps: Float[Tensor, "G"]) -> Float[Tensor, ""]:
    """Return the smallest gap if most occur more than once (times on a grid), else 0.

    >>> [float(grid_step(torch.tensor(x))) for x in ([1.0, 2.0, 1.0], [1.0, 2.1, 3.0])]
    [1.0, 0.0]
    """
    _, counts = (gaps / gaps.max() * 1e9).round().unique(return_counts=True)
    is_grid = 2 * counts[counts > 1].sum() > len(gaps)
    return torch.where(is_grid, gaps.min(), 0.0)


def make_head(config: EventModelConfig, dim: int) -> EventHead:
    """Return the head of a configuration, for states of a width."""
    if config.head == "mixture":
        return MixtureHead(dim, config.num_types, config.num_components)
    if config.head == "exponential":
        return ExponentialHead(dim, config.num_types)
    return SoftplusHead(dim, config.num_types, decay=config.head == "decay")
