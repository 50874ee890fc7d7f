"""Classical processes with known likelihoods: Poisson, renewal and Hawkes, with their fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data.ragged import offsets_of
from osciformer.events.likelihood import Choice, Span, choose, likelihood_terms
from osciformer.events.process import EventProcess, just_after
from osciformer.events.sequences import EventBatch, EventSequences

# From times [B, M] to rates, or their integrals since any fixed time, [B, M, K].
RateFunction = Callable[[Tensor], Tensor]
MarkRule = Literal["markov", "repeat", "independent"]
# Largest numbers of bins to choose among; 0 is an exponential density.
NUM_BINS = (0, 4, 8, 12, 20, 40, 80, 160)
# Weights of the frequencies of types to choose among, in events.
_SMOOTHINGS = (1.0, 5.0, 20.0)
DecayShape = Literal["shared", "by_cause", "by_pair"]
# Evaluations to choose among: with many pairs of types and few events a fit must stop early.
_HAWKES_STEPS = (10, 30, 100)
# A kernel for each pair of types takes memory and time with the square of their number.
_MOST_TYPES_BY_PAIR = 3
_HAWKES_BATCH = 256


class PoissonProcess(EventProcess):
    r"""Events of each type at a constant rate, $\lambda_k(t) = \mu_k$.

    Args:
        rates: Events of each type per unit of time [K], not negative.

    Example:
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 4.0]], [[0, 1, 1]])
        >>> PoissonProcess.fit(events).rates  # 0 and 2 of 2 scored events within 4
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """

    def __init__(self, rates: Sequence[float] | Float[Tensor, "K"]) -> None:
        self.rates = torch.as_tensor(rates, dtype=torch.float64)
        _check_rates("rates", self.rates)
        self.num_types = len(self.rates)

    @classmethod
    def fit(cls, sequences: EventSequences, *, smoothing: float = 0.0) -> PoissonProcess:
        """Return the maximum-likelihood process of events 2 to N; `smoothing` adds to counts."""
        spans = float(sequences.gaps.sum())
        if spans <= 0:
            raise ValueError("a rate needs a sequence with two events at different times")
        types = torch.from_numpy(sequences.types[1:][sequences.same_sequence])
        counts = torch.bincount(types, minlength=sequences.num_types).double()
        return cls((counts + smoothing) / spans)

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        """Return the rates at each time."""
        return self.rates.to(query_times.device).expand(*query_times.shape, -1)

    def compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "B M K"]:
        """Return the rates times the lengths of the intervals."""
        return (end - start)[..., None] * self.rates.to(start.device)

    def upper_bound(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "B"]:
        """Return the sum of the rates."""
        return self.rates.sum().to(start.device).expand(start.shape)

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        """Return the rates at each gap."""
        return self.rates.to(gaps.device).expand(*gaps.shape, -1)

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G"]:
        """Return the sum of the rates times the gaps."""
        return self.rates.sum().to(gaps.device) * gaps


@dataclass(eq=False, repr=False)
class InhomogeneousPoissonProcess(EventProcess):
    r"""Events of each type at a rate that is a given function of time, $\lambda_k(t) = f_k(t)$."""

    rate: RateFunction  #: Returns the rates [B, M, K] at times [B, M].
    _: KW_ONLY
    num_types: int  #: K.
    cumulative: RateFunction | None = None  #: An antiderivative of the rates, or quadrature.
    bound: float | None = None  #: Upper bound of the total rate, for sampling, or probing.

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        """Return the rates at each time."""
        rates, expected = self.rate(query_times), [*query_times.shape, self.num_types]
        if list(rates.shape) != expected:
            raise ValueError(f"rate must return the shape {expected}; got {list(rates.shape)}")
        return rates

    def compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the difference of the antiderivative, or None without it."""
        return None if self.cumulative is None else self.cumulative(end) - self.cumulative(start)

    def upper_bound(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the given bound, or None without it."""
        return None if self.bound is None else torch.full_like(start, self.bound)

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        """Return the rates at times after each event."""
        times = batch.finite_times[..., None] + gaps
        return self.intensity(batch, times.flatten(1)).unflatten(1, gaps.shape[1:])

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Tensor | None:
        """Return the difference of the antiderivative, or None without it."""
        times = batch.finite_times[..., None]
        start, end = times.expand_as(gaps).flatten(1), (times + gaps).flatten(1)
        total = self.total_compensator(batch, start, end)
        return None if total is None else total.unflatten(1, gaps.shape[1:])


def _check_rates(name: str, rates: Any) -> None:
    """Refuse rates that are not a vector of finite numbers from 0."""
    if rates.dim() != 1 or len(rates) == 0:
        raise ValueError(f"{name} must be [K]; got the shape {list(rates.shape)}")
    wrong = ~(torch.isfinite(rates) & (rates >= 0))
    if bool(wrong.any()):
        where = int(wrong.nonzero()[0, 0])
        raise ValueError(f"{name} must be finite and not negative; entry {where} is {rates[where]}")


@dataclass(frozen=True)
class GapDensity:
    """A density of gaps that is constant within bins, and exponential beyond the last one."""

    edges: Float[Tensor, "m+1"]  #: Edges of the bins, increasing from 0; [0] if it is exponential.
    mass: Float[Tensor, "m"]  #: Probability of each bin.
    tail_rate: float  #: Hazard beyond the last edge, where the rest of the probability lies.

    @classmethod
    def fit(
        cls,
        gaps: Float[np.ndarray, "G"],
        *,
        num_bins: int = 20,
        min_width: float = 0.0,
        smoothing: float = 0.5,
    ) -> GapDensity:
        """Return the histogram of gaps in at most `num_bins` bins (0: an exponential density).

        Bins have about equal counts, to which `smoothing` is added, also in the tail. They are not
        narrower than `min_width`, which should be at least the resolution of the clock.
        """
        gaps = np.asarray(gaps, dtype=np.float64)
        if len(gaps) == 0 or not gaps.max() > 0:
            raise ValueError("a density of gaps needs a gap that is not zero")
        rate, largest = float(1.0 / gaps.mean()), float(gaps.max())
        if num_bins == 0:
            return cls(torch.zeros(1, dtype=torch.float64), torch.zeros(0).double(), rate)
        edges = [0.0]
        for edge in np.quantile(gaps, np.linspace(0, 1, num_bins + 1)[1:]).tolist():
            if edge - edges[-1] >= max(min_width, 1e-12 * largest):
                edges.append(edge)
        # The last bin ends at the largest gap, even if that makes it wider.
        edges = [*edges[:-1], largest] if len(edges) > 1 else [0.0, max(largest, min_width)]
        counts = np.histogram(gaps, bins=edges)[0] + smoothing
        mass = counts / (counts.sum() + smoothing)
        return cls(torch.tensor(edges, dtype=torch.float64), torch.from_numpy(mass), rate)

    def hazard(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the hazard as a left limit: at an edge, that of the bin before it."""
        density, left, is_tail, _ = self._at(gaps)
        return torch.where(is_tail, torch.full_like(gaps, self.tail_rate), density / left)

    def cumulative_hazard(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the integral of the hazard from 0, minus the log of the survival function."""
        _, left, is_tail, beyond = self._at(gaps)
        tail = -beyond.log() + self.tail_rate * (gaps - self.edges[-1].to(gaps.device))
        return torch.where(is_tail, tail, -left.log())

    def _at(self, gaps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return density and survival at gaps, which ones are in the tail, and its probability."""
        edges, mass = self.edges.to(gaps.device), self.mass.to(gaps.device)
        beyond = (1.0 - mass.sum()).clamp(min=0.0)
        # From the tail inwards, so that small probabilities keep their digits.
        survival = torch.cat([mass, beyond[None]]).flip(0).cumsum(0).flip(0)
        position = (torch.searchsorted(edges, gaps.contiguous()) - 1).clamp(min=0)
        density = torch.nn.functional.pad(mass / edges.diff(), (0, 1))[position]
        left = survival[position] - density * (gaps - edges[position])
        # Without a tail nothing is left at the end of the last bin; the guard keeps that finite.
        left = left.clamp(min=torch.finfo(gaps.dtype).tiny)
        return density, left, position == len(mass), beyond


class RenewalProcess(EventProcess):
    r"""Gaps drawn from one density, types from a chain: $\lambda_k(t) = h(t - t_i)\,P_{k_i k}$.

    Before the first event, gaps count from the start of the window, or from that event without one.

    Args:
        gaps: The density of gaps, with its hazard h.
        transition: Probability of the next type (second axis) after each type (first axis).
        initial: Probability of each type at the first event.
    """

    def __init__(
        self, gaps: GapDensity, transition: Float[Tensor, "K K"], initial: Float[Tensor, "K"]
    ) -> None:
        self.gaps = gaps
        self.transition = torch.as_tensor(transition, dtype=torch.float64)
        self.initial = torch.as_tensor(initial, dtype=torch.float64)
        self.num_types = count = len(self.initial)
        if self.transition.shape != (count, count):
            shape = list(self.transition.shape)
            raise ValueError(f"transition must be [{count}, {count}]; got {shape}")
        rows = torch.cat([self.transition, self.initial[None]])
        if bool((rows < 0).any()) or not torch.allclose(rows.sum(1), rows.new_ones(1)):
            raise ValueError("each row of transition, and initial, must be probabilities")
        self.gap_breaks = gaps.edges[1:] if len(gaps.mass) else None

    @classmethod
    def fit(
        cls,
        sequences: EventSequences,
        *,
        marks: MarkRule = "markov",
        num_bins: int = 20,
        min_width: float = 0.0,
        smoothing: float = 1.0,
    ) -> RenewalProcess:
        """Return the process with the transitions of the data and its `GapDensity`.

        Types (`marks`) are a chain of first order (`markov`); the last type with one probability,
        otherwise another by frequency (`repeat`); or by frequency alone (`independent`).
        `smoothing` is the weight of the frequencies of types in each transition, in events.
        """
        check_choice("marks", marks, ("markov", "repeat", "independent"))
        count = sequences.num_types
        types, same = sequences.types, sequences.same_sequence
        codes = count * types[:-1][same] + types[1:][same]
        pairs = np.bincount(codes, minlength=count**2).reshape(count, count)
        frequency = np.bincount(types, minlength=count) + 0.5
        frequency = frequency / frequency.sum()
        if marks == "markov":
            smoothed = pairs + smoothing * frequency
            transition = smoothed / smoothed.sum(axis=1, keepdims=True)
        elif marks == "repeat" and count > 1:
            again = (np.trace(pairs) + smoothing) / (pairs.sum() + 2 * smoothing)
            transition = np.tile((1 - again) * frequency, (count, 1))
            np.fill_diagonal(transition, 0.0)
            transition /= (1 - frequency)[:, None]
            np.fill_diagonal(transition, again)
        else:
            transition = np.tile(frequency, (count, 1))
        gaps = GapDensity.fit(sequences.gaps, num_bins=num_bins, min_width=min_width)
        return cls(gaps, torch.from_numpy(transition), torch.from_numpy(frequency))

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        """Return the hazard of the gap times the probabilities of the types."""
        begin, marks = self._past(batch, batch.count_before(query_times))
        return self.gaps.hazard((query_times - begin).clamp(min=0.0))[..., None] * marks

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        """Return the same at gaps after each event."""
        marks = self.transition.to(gaps.device)[batch.clean_types]
        return self.gaps.hazard(gaps)[..., None] * marks[:, :, None]

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G"]:
        """Return the integral of the hazard of the gap."""
        return self.gaps.cumulative_hazard(gaps)

    def compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the exact integrals; None if an interval has events within it."""
        known = batch.count_until(start)
        if bool((batch.count_before(end) > known).any()):
            return None
        begin, marks = self._past(batch, known)
        since = start - begin
        total = self._integrated(since + (end - start)) - self._integrated(since)
        # Empty intervals give 0, even where a density without a tail has no survival left.
        return torch.where(end > start, total, 0.0)[..., None] * marks

    def _integrated(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the integral from 0 of the hazard, which is constant before 0."""
        first = self.gaps.hazard(torch.zeros_like(gaps))
        return self.gaps.cumulative_hazard(gaps.clamp(min=0.0)) + first * gaps.clamp(max=0.0)

    def upper_bound(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "B"]:
        """Return the largest hazard of the gaps from start to end; it rises within each bin."""
        begin, _ = self._past(batch, batch.count_until(start[:, None]))
        since = just_after(start)[:, None] - begin
        until = (since + (end - start).clamp(min=0.0)[:, None]).clamp(min=0.0)
        edges = self.gaps.edges.to(start.device)
        met = (edges > since) & (edges < until)
        highest = torch.where(met, self.gaps.hazard(edges), 0.0).amax(dim=1)
        # Slightly more, since gaps are rounded differences of times.
        return torch.maximum(highest, self.gaps.hazard(until)[:, 0]) * (1 + 1e-6)

    def _past(self, batch: EventBatch, known: Int[Tensor, "B M"]) -> tuple[Tensor, Tensor]:
        """Return the time of the last known event [B, M], and probabilities of the next type."""
        begin = batch.first_times if batch.starts is None else batch.starts
        types = batch.clean_types.gather(1, (known - 1).clamp(min=0))
        after, initial = self.transition.to(types.device)[types], self.initial.to(types.device)
        return batch.time_of_last(known, begin), torch.where((known > 0)[..., None], after, initial)


def choose_renewal(
    train: EventSequences,
    validation: EventSequences,
    *,
    marks: MarkRule = "markov",
    num_bins: tuple[int, ...] = NUM_BINS,
    min_width: float = 0.0,
) -> Choice[RenewalProcess]:
    """Return the renewal process whose bins and smoothing suit validation data best."""
    smoothings = _SMOOTHINGS if marks == "markov" else _SMOOTHINGS[:1]
    grid = itertools.product(num_bins, smoothings)
    settings: list[dict[str, Any]] = [{"num_bins": b, "smoothing": weight} for b, weight in grid]
    fit = partial(RenewalProcess.fit, train, marks=marks, min_width=min_width)
    return choose(((one, fit(**one)) for one in settings), validation)


class HawkesProcess(EventProcess):
    r"""Events at base rates, and each event of type j raises the rate of type k for a while.

    $$\lambda_k(t) = \mu_k + \sum_{t_i < t} \alpha_{k j_i} \beta_{k j_i} e^{-\beta_{k j_i}(t-t_i)}$$
    `branching[k, j]`, $\alpha_{kj}$, is the number of events of type k that an event of type j
    causes directly, on average. Intensities cost O(N log N) for each kernel.

    Args:
        base: Base rates $\mu$ [K], not negative.
        branching: $\alpha$ [K, K], caused type first, causing type second; not negative.
        decay: $\beta$, positive: a number, or [K] by causing type; [K, K] needs K times the memory.

    Example:
        >>> process = HawkesProcess([0.5], [[0.8]], 2.0)
        >>> batch = EventSequences.from_arrays([[0.0]]).batch()
        >>> process.intensity(batch, torch.tensor([[0.0, 1e-9]], dtype=torch.float64)).squeeze()
        tensor([0.5000, 2.1000], dtype=torch.float64)
    """

    def __init__(self, base: Any, branching: Any, decay: Any) -> None:
        self.base = torch.as_tensor(base, dtype=torch.float64)
        self.branching = torch.as_tensor(branching, dtype=torch.float64)
        decay = torch.as_tensor(decay, dtype=torch.float64)
        _check_rates("base", self.base.detach())
        self.num_types = count = len(self.base)
        if self.branching.shape != (count, count):
            shape = list(self.branching.shape)
            raise ValueError(f"branching must be [{count}, {count}]; got {shape}")
        _check_rates("branching", self.branching.detach().flatten())
        if decay.shape not in ((), (count,), (1, count), (count, count)):
            shapes = f"a number, [{count}] or [{count}, {count}]"
            raise ValueError(f"decay must be {shapes}; got {list(decay.shape)}")
        # [1 or K, K]: kernels that all caused types share need one state only.
        self.decay = decay if decay.dim() == 2 else decay.expand(1, count)
        if not bool((torch.isfinite(self.decay) & (self.decay > 0)).all()):
            raise ValueError(f"decay must be positive and finite; got {decay.tolist()}")

    @property
    def spectral_radius(self) -> float:
        """Largest modulus of the eigenvalues of the branching matrix."""
        return float(torch.linalg.eigvals(self.branching.detach()).abs().max())

    @property
    def is_stationary(self) -> bool:
        """Whether the number of events per unit of time stays bounded."""
        return self.spectral_radius < 1

    @property
    def stationary_rates(self) -> Float[Tensor, "K"]:
        """Mean events of each type per unit of time in the long run."""
        if not self.is_stationary:
            radius = f"the spectral radius of branching is {self.spectral_radius:.3g}, not below 1"
            raise ValueError(f"there is no stationary rate: {radius}")
        eye = torch.eye(self.num_types, dtype=torch.float64)
        return torch.linalg.solve(eye - self.branching.detach(), self.base.detach())

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        """Return the intensities at any times, from the events strictly before."""
        return self._rates(self._state_at(batch, query_times, batch.count_before(query_times)))

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        """Return the intensities after each event if no other one follows."""
        return self._rates(self._states(batch)[:, :, None] * self._fade(gaps))

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G"]:
        """Return the base rates times the gaps, plus the part of all causes that has faded."""
        base, branching, decay = self._on(gaps.device)
        faded = self._states(batch)[:, :, None] * -torch.expm1(-decay * gaps[..., None, None])
        return base.sum() * gaps + _sum_causes(branching, faded).sum(dim=-1)

    def compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "B M K"]:
        r"""Return the exact integrals over (start, end], events within them included.

        $$\int_s^e \lambda_k = \mu_k (e - s) + \sum_j \alpha_{kj} \Big[ S_{kj}(s^+)
        (1 - e^{-\beta_{kj} (e-s)}) + \sum_{s < t_i < e,\, j_i = j} (1 - e^{-\beta_{kj} (e-t_i)})
        \Big]$$
        """
        # S sums the faded past events. The last sum is the number of events inside, plus S(s+)
        # faded until e, less S(e-); without events inside it is exactly 0.
        width = (end - start)[..., None, None]
        base, branching, decay = self._on(start.device)
        first, last = batch.count_until(start), batch.count_before(end)
        after, left = self._state_at(batch, start, first), self._state_at(batch, end, last)
        counts = torch.nn.functional.pad(self._one_hot(batch).cumsum(dim=1), (0, 0, 1, 0))
        old, new = (counts.take_along_dim(known[..., None], 1) for known in (first, last))
        inner = (new - old)[..., None, :] + after * torch.exp(-decay * width) - left
        inner = torch.where((last > first)[..., None, None], inner, 0.0)
        total = after * -torch.expm1(-decay * width) + inner
        return base * width[..., 0] + _sum_causes(branching, total)

    def upper_bound(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "B"]:
        """Return the total intensity just after the start, from which it only falls."""
        start = start[:, None]
        rates = self._rates(self._state_at(batch, start, batch.count_until(start)))
        # Slightly more, since candidates sum in another order and round differently.
        return rates.sum(dim=-1)[:, 0] * (1 + 1e-12)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return self.base.to(device), self.branching.to(device), self.decay.to(device)

    def _rates(self, state: Float[Tensor, "*S R K"]) -> Float[Tensor, "*S K"]:
        base, branching, decay = self._on(state.device)
        return base + _sum_causes(branching * decay, state)

    def _fade(self, gaps: Float[Tensor, "*S"]) -> Float[Tensor, "*S R K"]:
        """Return what is left of each kernel after some gaps."""
        return torch.exp(-self.decay.to(gaps.device) * gaps[..., None, None])

    def _states(self, batch: EventBatch) -> Float[Tensor, "B N R K"]:
        """Return sums of faded past events just after each event, itself included."""
        times = batch.finite_times
        gaps = torch.diff(times, dim=1, prepend=times[:, :1]).clamp(min=0.0)
        jumps = self._one_hot(batch).double()[:, :, None].expand(-1, -1, len(self.decay), -1)
        return scan_decay(self._fade(gaps), jumps)

    def _one_hot(self, batch: EventBatch) -> Bool[Tensor, "B N K"]:
        types = torch.arange(self.num_types, device=batch.times.device)
        return batch.mask[..., None] & (batch.clean_types[..., None] == types)

    def _state_at(
        self, batch: EventBatch, times: Float[Tensor, "B M"], known: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M R K"]:
        """Return sums of faded events at any times, given how many events are known there."""
        last = (known - 1).clamp(min=0)[..., None, None]
        since = (times - batch.time_of_last(known, batch.first_times)).clamp(min=0.0)
        state = self._states(batch).take_along_dim(last, 1) * self._fade(since)
        return torch.where((known == 0)[..., None, None], 0.0, state)


def _sum_causes(weight: Float[Tensor, "K K"], state: Float[Tensor, "*S R K"]) -> Tensor:
    """Return the sums [*S, K] over causing types; shared kernels need no table of all pairs."""
    if state.shape[-2] == 1:
        return state.squeeze(-2) @ weight.T
    return (weight * state).sum(dim=-1)


def scan_decay(fade: Float[Tensor, "B N *S"], jumps: Float[Tensor, "B N *S"]) -> Tensor:
    r"""Return $s_i = f_i s_{i-1} + j_i$ along the second axis, with $s_0 = j_0$, by doubling."""
    # Sums run in an order that no later entry changes: it changes no bit of an earlier state.
    reach = 1
    while reach < jumps.shape[1]:
        summed = jumps[:, reach:] + fade[:, reach:] * jumps[:, :-reach]
        jumps = torch.cat([jumps[:, :reach], summed], dim=1)
        fade = torch.cat([fade[:, :reach], fade[:, reach:] * fade[:, :-reach]], dim=1)
        reach *= 2
    return jumps


@dataclass(frozen=True)
class HawkesFit:
    """A fitted Hawkes process, and how the fit went."""

    process: HawkesProcess
    log_likelihood: float  #: Nats per scored event of the data that it was fitted to.
    is_stationary: bool  #: Whether its branching matrix has a spectral radius below 1.
    spectral_radius: float
    gradient: float  #: Largest entry at the end, in nats per event; 0 at an optimum.
    num_steps: int  #: Evaluations of the likelihood.


def fit_hawkes(
    sequences: EventSequences,
    *,
    decay: DecayShape = "shared",
    span: Span = "events",
    max_steps: int = 200,
    batch_size: int = 64,
) -> HawkesFit:
    """Return the maximum-likelihood Hawkes process, found by L-BFGS on the logs of all parameters.

    The `decay` is `shared` by all kernels, one `by_cause`, or one `by_pair` of types; `span` is
    that of `likelihood_terms`. After `max_steps` evaluations of the likelihood the search ends. The
    optimum is a local one, since the likelihood is not concave in the decays.
    """
    check_choice("decay", decay, ("shared", "by_cause", "by_pair"))
    mean_gap = float(sequences.gaps.mean()) if len(sequences.gaps) else 0.0
    if mean_gap <= 0:
        raise ValueError("a Hawkes process needs a sequence with two events at different times")
    count = sequences.num_types
    shape = {"shared": (), "by_cause": (count,), "by_pair": (count, count)}[decay]
    counts = torch.bincount(torch.from_numpy(sequences.types), minlength=count).double() + 0.5
    share = counts / counts.sum()
    # Times in mean gaps: all parameters are then of order 1.
    parameters = [
        (0.5 * share).log().requires_grad_(),
        (0.5 * share[:, None].expand(count, count)).log().requires_grad_(),
        torch.zeros(shape, dtype=torch.float64, requires_grad=True),
    ]
    batches = list(sequences.rescale(1 / mean_gap, "mean gap").batches(batch_size))
    # The first event of a sequence is scored only in a window.
    num_scored = sum(int(b.mask[:, 0 if span == "window" else 1 :].sum()) for b in batches)
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=max_steps,
        max_eval=max_steps,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    losses: list[float] = []

    def process_in(unit: float) -> HawkesProcess:
        base, branching, rate = (logarithm.exp() for logarithm in parameters)
        return HawkesProcess(base / unit, branching, rate / unit)

    def loss() -> float:
        optimizer.zero_grad()
        losses.append(0.0)
        for batch in batches:
            terms = likelihood_terms(process_in(1.0), batch, span=span)
            part = -terms.per_sequence.sum() / num_scored
            part.backward()
            losses[-1] += float(part.detach())
        return losses[-1]

    optimizer.step(loss)
    final = loss()
    with torch.no_grad():
        process = process_in(mean_gap)
    nats, radius = -final - math.log(mean_gap), process.spectral_radius
    gradient = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    return HawkesFit(process, nats, process.is_stationary, radius, gradient, len(losses))


def simulate_hawkes(
    process: HawkesProcess,
    *,
    num_sequences: int,
    horizon: float,
    generator: torch.Generator,
    max_events: int = 100_000,
    time_unit: str | None = None,
) -> EventSequences:
    """Return sequences drawn from a Hawkes process on (0, horizon], without a history.

    A step costs the same however long the history is. The `generator` must be on the CPU; more than
    `max_events` in a sequence are an error. `sample` draws from any process and any history.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon must be positive and finite; got {horizon}")
    base, jump = process.base, process.branching * process.decay
    state = torch.zeros(num_sequences, len(process.decay), len(base), dtype=torch.float64)
    now = torch.zeros(num_sequences, dtype=torch.float64)
    live = torch.arange(num_sequences)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    counts = torch.zeros(num_sequences, dtype=torch.int64)
    while len(live):
        bound = (base + (jump * state).sum(dim=-1)).sum(dim=-1)  # it falls until the next event
        uniform = torch.rand(2, len(live), generator=generator, dtype=torch.float64)
        wait = -torch.log1p(-uniform[0]) / bound
        now = now + wait
        state = state * process._fade(wait)
        rates = base + (jump * state).sum(dim=-1)  # [R, K]
        kind = torch.searchsorted(rates.cumsum(dim=-1), (uniform[1] * bound)[:, None])[:, 0]
        happens = (kind < process.num_types) & (now <= horizon)
        drawn.append((live[happens], now[happens], kind[happens]))
        counts[live[happens]] += 1
        state[happens, :, kind[happens]] += 1.0
        if bool((counts > max_events).any()):
            raise RuntimeError(
                f"a sequence has more than {max_events} events before {horizon:g}; the spectral "
                f"radius of the branching matrix is {process.spectral_radius:.3g}, and events "
                "multiply without end from 1 on"
            )
        stays = now <= horizon
        live, now, state = live[stays], now[stays], state[stays]
    owner, times, types = (torch.cat(part) for part in zip(*drawn, strict=True))
    # Stable: events were drawn in the order of time.
    order = torch.argsort(owner, stable=True)
    return EventSequences(
        times[order].numpy(),
        types[order].numpy(),
        offsets_of(counts.numpy()),
        num_types=process.num_types,
        starts=np.zeros(num_sequences),
        ends=np.full(num_sequences, horizon),
        time_unit=time_unit,
    )


def choose_hawkes(train: EventSequences, validation: EventSequences) -> Choice[HawkesProcess]:
    """Return the Hawkes process whose kernels and number of steps suit validation data best."""
    shapes = ["shared"] if train.num_types == 1 else ["shared", "by_cause"]
    if 1 < train.num_types <= _MOST_TYPES_BY_PAIR:
        shapes.append("by_pair")
    grid = itertools.product(shapes, _HAWKES_STEPS)
    settings: list[dict[str, Any]] = [{"decay": shape, "max_steps": steps} for shape, steps in grid]
    fit = partial(fit_hawkes, train, batch_size=_HAWKES_BATCH)
    return choose(((one, fit(**one).process) for one in settings), validation)
