"""The log-likelihood of events under any process, with the error of its integral."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.process import EventProcess
from osciformer.events.quadrature import integrate_intensity
from osciformer.events.sequences import UNNAMED_UNIT, EventSequences

Span = Literal["events", "window"]


@dataclass(frozen=True)
class LikelihoodTerms:
    """The parts of the log-likelihood, event by event.

    Attributes:
        log_intensity: Log of the intensity of the type that came, at the time at which it came; 0
            where nothing is scored.
        compensator: Integral of the total intensity since the event before; 0 likewise.
        scored: True where an event is scored.
        tail: Integral from the last event to the end of the window; 0 for `span="events"`.
        error: Estimated absolute error of all integrals of a sequence; 0 where they are exact.
        num_events: Number of events of each sequence, scored or not.
    """

    log_intensity: Float[Tensor, "B N"]
    compensator: Float[Tensor, "B N"]
    scored: Bool[Tensor, "B N"]
    tail: Float[Tensor, "B"]
    error: Float[Tensor, "B"]
    num_events: Int[Tensor, "B"]

    @property
    def per_sequence(self) -> Float[Tensor, "B"]:
        """Log-likelihood of each sequence, in nats."""
        return (self.log_intensity - self.compensator).sum(dim=1) - self.tail

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Negative log-likelihood per scored event, for training."""
        return -self.per_sequence.sum() / self.scored.sum().clamp(min=1)


@dataclass(frozen=True)
class LogLikelihood:
    """The log-likelihood of many sequences.

    Attributes:
        micro: Nats per scored event: the total divided by the number of scored events.
        macro: The average of the ContiFormer protocol: of each sequence, its log-likelihood divided
            by all its events (N, although N - 1 are scored); then the mean over sequences. Those
            without a scored event are left out.
        total: Sum over all sequences, in nats.
        num_scored: Scored events.
        num_sequences: Sequences with a scored event.
        error: Estimated error of `micro` due to quadrature, 0 if all integrals are exact.
        time_unit: Unit of the times. In units c times as long, `micro` is larger by log(c).
        span: `events` or `window`, see `likelihood_terms`.
    """

    micro: float
    macro: float
    total: float
    num_scored: int
    num_sequences: int
    error: float
    time_unit: str
    span: Span

    def __str__(self) -> str:
        return (
            f"{self.micro:.4f} nats per event (time in {self.time_unit}, {self.num_scored} events "
            f"of {self.num_sequences} sequences, quadrature error {self.error:.1e})"
        )


def likelihood_terms(
    process: EventProcess,
    batch: EventBatch,
    *,
    span: Span = "events",
    tolerance: float = 1e-6,
    max_halvings: int = 30,
) -> LikelihoodTerms:
    r"""Return the log-likelihood of each event given those before it.

    $$\log L = \sum_{i=2}^{N} \log \lambda_{k_i}(t_i^-)
    - \int_{t_1}^{t_N} \sum_k \lambda_k(t)\,dt$$
    for `span="events"`; for `span="window"` the sum begins with the first event and the integral
    runs from the start of the window to its end. Events are counted by the mask. A type whose
    intensity is 0 when it comes has the log-likelihood minus infinity.

    Args:
        process: The process.
        batch: Events; with `starts` and `ends` for `span="window"`.
        span: What is scored.
        tolerance: Of the integral over each gap, where the process has no exact one.
        max_halvings: As of `integrate_intensity`; 0 for the one rule of 15 nodes, as in training.
    """
    check_choice("span", span, ("events", "window"))
    if span == "window" and (batch.starts is None or batch.ends is None):
        raise ValueError(
            "span='window' needs to know where the windows begin and end: give starts and ends to "
            "EventSequences, or use span='events'"
        )
    scored = batch.mask.clone()
    if span == "events":
        scored[:, 0] = False
    # Padding and what is not scored becomes an empty gap at the first event.
    first = batch.first_times if batch.starts is None or span == "events" else batch.starts
    times = torch.where(batch.mask, batch.times.masked_fill(~batch.mask, 0.0), first[:, None])
    end = torch.where(scored, times, first[:, None])
    start = torch.where(scored, torch.cat([first[:, None], times[:, :-1]], dim=1), first[:, None])
    if span == "window":
        assert batch.ends is not None
        last = torch.where(batch.lengths > 0, batch.last_times, first)
        start = torch.cat([start, last[:, None]], dim=1)
        end = torch.cat([end, batch.ends[:, None]], dim=1)
    gaps = process.total_compensator(batch, start, end)
    error = torch.zeros_like(start)
    if gaps is None:
        by_type, error, _ = integrate_intensity(
            process, batch, start, end, tolerance=tolerance, max_halvings=max_halvings
        )
        gaps = by_type.sum(dim=-1)
    gaps = gaps.double()
    rates = process.intensity(batch, times)
    of_type = rates.gather(-1, batch.clean_types[..., None])[..., 0].double()
    # Ones, not zeros, under the log: gradients of what is not scored must be 0, not NaN.
    log_intensity = torch.where(scored, of_type, torch.ones_like(of_type)).log()
    width = scored.shape[1]
    return LikelihoodTerms(
        log_intensity=log_intensity,
        compensator=gaps[:, :width],
        scored=scored,
        tail=gaps[:, width] if span == "window" else torch.zeros_like(gaps[:, 0]),
        error=error.double().sum(dim=1),
        num_events=batch.lengths,
    )


def summarise(
    terms: Iterable[LikelihoodTerms], *, time_unit: str = UNNAMED_UNIT, span: Span = "events"
) -> LogLikelihood:
    """Return the averages over the sequences of several batches.

    Args:
        terms: Of each batch.
        time_unit: Name of the unit of the times.
        span: What was scored.
    """
    total = error = of_sequences = 0.0
    num_scored = num_sequences = 0
    for part in terms:
        per_sequence = part.per_sequence.detach()
        some = part.scored.any(dim=1)
        total += float(per_sequence.sum())
        error += float(part.error.sum())
        of_sequences += float((per_sequence[some] / part.num_events[some]).sum())
        num_scored += int(part.scored.sum())
        num_sequences += int(some.sum())
    return LogLikelihood(
        micro=total / num_scored if num_scored else math.nan,
        macro=of_sequences / num_sequences if num_sequences else math.nan,
        total=total,
        num_scored=num_scored,
        num_sequences=num_sequences,
        error=error / num_scored if num_scored else math.nan,
        time_unit=time_unit,
        span=span,
    )


@torch.no_grad()
def log_likelihood(
    process: EventProcess,
    sequences: EventSequences,
    *,
    span: Span = "events",
    tolerance: float = 1e-6,
    max_halvings: int = 30,
    batch_size: int = 64,
) -> LogLikelihood:
    """Return the log-likelihood of sequences under a process.

    Args:
        process: The process.
        sequences: The sequences; with no event to score the averages are NaN.
        span: `events`, 2 to N given the first; `window`, all in the observed window.
        tolerance: Of the integral over each gap, where the process has no exact one.
        max_halvings: As of `likelihood_terms`.
        batch_size: Sequences per batch.

    Example:
        >>> from osciformer.events import PoissonProcess
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 3.0]], time_unit="h")
        >>> print(log_likelihood(PoissonProcess([1.0]), events))  # 2 log 1 - 3, over 2
        -1.5000 nats per event (time in h, 2 events of 1 sequences, quadrature error 0.0e+00)
    """
    check_num_types(process, sequences)
    terms = (
        likelihood_terms(
            process,
            batch.to(process.device),
            span=span,
            tolerance=tolerance,
            max_halvings=max_halvings,
        )
        for batch in sequences.batches(batch_size)
    )
    return summarise(terms, time_unit=sequences.time_unit, span=span)


def check_num_types(process: EventProcess, sequences: EventSequences) -> None:
    """Refuse sequences with another number of types than the process has."""
    if process.num_types != sequences.num_types:
        raise ValueError(
            f"the process has {process.num_types} types and the sequences have "
            f"{sequences.num_types}; pass type_names or num_types of the training data when "
            "reading them"
        )
