"""Poisson processes: events that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

# From times [B, M] to rates, or their integrals since any fixed time, [B, M, K].
RateFunction = Callable[[Tensor], Tensor]


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
        check_rates("rates", self.rates)
        self.num_types = len(self.rates)

    @classmethod
    def fit(cls, sequences: EventSequences, *, smoothing: float = 0.0) -> PoissonProcess:
        """Return the process of largest likelihood of events 2 to N, given the first ones.

        Args:
            sequences: The events.
            smoothing: Added to the count of each type, so that none has the rate 0.
        """
        spans = float(sequences.gaps.sum())
        if spans <= 0:
            raise ValueError("a rate needs a sequence with two events at different times")
        scored = torch.ones(len(sequences.times), dtype=torch.bool)
        begins = sequences.offsets[:-1][sequences.lengths > 0]
        scored[torch.from_numpy(begins)] = False
        types = torch.from_numpy(sequences.types)[scored]
        counts = torch.bincount(types, minlength=sequences.num_types).double()
        return cls((counts + smoothing) / spans)

    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the rates at each time."""
        return self.rates.to(query_times.device).expand(*query_times.shape, -1)

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the rates times the lengths of the intervals."""
        return (end - start)[..., None] * self.rates.to(start.device)

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"]:
        """Return the sum of the rates."""
        return self.rates.sum().to(start.device).expand(start.shape)

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the rates at each gap."""
        return self.rates.to(gaps.device).expand(*gaps.shape, -1)

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"]:
        """Return the sum of the rates times the gaps."""
        return self.rates.sum().to(gaps.device) * gaps


class InhomogeneousPoissonProcess(EventProcess):
    r"""Events of each type at a rate that is a given function of time, $\lambda_k(t) = f_k(t)$.

    Args:
        rate: Returns the rates [B, M, K] at times [B, M].
        num_types: K.
        cumulative: Returns an antiderivative of the rates, of the same shape; without it integrals
            are found by quadrature.
        bound: What the total rate nowhere exceeds, for sampling; without it bounds are found and
            checked while sampling.

    Example:
        >>> process = InhomogeneousPoissonProcess(lambda t: (1 + t.cos())[..., None], num_types=1)
        >>> batch = EventSequences.from_arrays([[0.0]]).batch()
        >>> process.intensity(batch, torch.zeros(1, 1))
        tensor([[[2.]]])
    """

    def __init__(
        self,
        rate: RateFunction,
        *,
        num_types: int,
        cumulative: RateFunction | None = None,
        bound: float | None = None,
    ) -> None:
        self.rate, self.cumulative, self.bound = rate, cumulative, bound
        self.num_types = num_types

    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the rates at each time."""
        rates = self.rate(query_times)
        expected = (*query_times.shape, self.num_types)
        if rates.shape != expected:
            raise ValueError(
                f"rate must return the shape {list(expected)}; got {list(rates.shape)}"
            )
        return rates

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"] | None:
        """Return the difference of the antiderivative, or None without it."""
        if self.cumulative is None:
            return None
        return self.cumulative(end) - self.cumulative(start)

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"] | None:
        """Return the given bound, or None without it."""
        return None if self.bound is None else torch.full_like(start, self.bound)

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the rates at times after each event."""
        times = batch.times.masked_fill(~batch.mask, 0.0)[..., None] + gaps
        return self.intensity(batch, times.flatten(1)).unflatten(1, gaps.shape[1:])

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"] | None:
        """Return the difference of the antiderivative, or None without it."""
        if self.cumulative is None:
            return None
        times = batch.times.masked_fill(~batch.mask, 0.0)[..., None]
        start, end = times.expand_as(gaps).flatten(1), (times + gaps).flatten(1)
        total = (self.cumulative(end) - self.cumulative(start)).sum(dim=-1)
        return total.unflatten(1, gaps.shape[1:])


def check_rates(name: str, rates: Any) -> None:
    """Refuse rates that are not a vector of finite numbers from 0."""
    if rates.dim() != 1 or len(rates) == 0:
        raise ValueError(f"{name} must be [K]; got the shape {list(rates.shape)}")
    wrong = ~(torch.isfinite(rates) & (rates >= 0))
    if bool(wrong.any()):
        where = int(wrong.nonzero()[0, 0])
        raise ValueError(f"{name} must be finite and not negative; entry {where} is {rates[where]}")
