"""The log-likelihood of events under any process, with the error of its integrals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.events.process import EventProcess, batches_for, just_after
from osciformer.events.sequences import UNNAMED_UNIT, EventBatch, EventSequences

Span = Literal["events", "window"]
Process = TypeVar("Process", bound=EventProcess)

# Nodes from 1 to 0 of the Kronrod rule with 15 nodes on [-1, 1] (QUADPACK's qk15). Every second one
# is a node of the Gauss rule with 7.
_NODES = (
    0.991455371120812639206854697526329,
    0.949107912342758524526189684047851,
    0.864864423359769072789712788640926,
    0.741531185599394439863864773280788,
    0.586087235467691130294144691693013,
    0.405845151377397166906606412076961,
    0.207784955007898467600689403773245,
    0.0,
)
NUM_NODES = 15
# Deeper panels are allowed this part of the tolerance, so that their sum stays within it.
_DEEPER = 1 / 16


class Integral(NamedTuple):
    """Integrals of intensities, and how far off they may be.

    Attributes:
        value: Integrals by type.
        error: Estimate of the absolute error of their sum over types: the difference between the
            rules with 15 and with 7 nodes, summed over panels. If the intensity is smooth, it is
            far above the error of the rule with 15 nodes.
        converged: Whether each interval met the tolerance.
    """

    value: Float[Tensor, "B M K"]
    error: Float[Tensor, "B M"]
    converged: bool


class QuadratureRule(NamedTuple):
    """Nodes on [0, 1], their Kronrod weights, and their Gauss weights (0 at every second node)."""

    nodes: Float[Tensor, "15"]
    kronrod: Float[Tensor, "15"]
    gauss: Float[Tensor, "15"]


@lru_cache(maxsize=1)
def _rule_arrays() -> tuple[np.ndarray, ...]:
    half = np.array(_NODES)
    nodes = np.concatenate([-half[:-1], half[::-1]])
    # The weights that integrate polynomials of degree 14 exactly.
    basis = np.polynomial.legendre.legvander(nodes, NUM_NODES - 1)
    kronrod = np.linalg.solve(basis.T, 2.0 * np.eye(NUM_NODES)[0])
    gauss = np.zeros(NUM_NODES)
    gauss[1::2] = np.polynomial.legendre.leggauss(NUM_NODES // 2)[1]
    return (nodes + 1) / 2, (kronrod + kronrod[::-1]) / 4, gauss / 2


def kronrod_rule(device: torch.device | str = "cpu") -> QuadratureRule:
    """Return the Gauss-Kronrod rule with 7 and 15 nodes in float64.

    Example:
        >>> nodes, kronrod, gauss = kronrod_rule()
        >>> round(float((kronrod * nodes**3).sum()), 12), round(float((gauss * nodes**3).sum()), 12)
        (0.25, 0.25)
    """
    return QuadratureRule(*(torch.tensor(array, device=device) for array in _rule_arrays()))


def integrate_intensity(
    process: EventProcess,
    batch: EventBatch,
    start: Float[Tensor, "B M"],
    end: Float[Tensor, "B M"],
    *,
    tolerance: float = 1e-6,
    max_halvings: int = 30,
) -> Integral:
    """Return integrals of the intensities over (start, end], to a checked tolerance.

    A panel is halved as long as its two rules differ by more than the tolerance. Intervals are cut
    at the events within them. Between events intensities must be smooth: a jump elsewhere can hide
    between two nodes, where no rule sees it. An easy interval without events costs 15 evaluations.
    Gradients reach the process.

    Args:
        process: The process.
        batch: Events.
        start: Where the intervals begin.
        end: Where they end, not before `start`; the integral over an empty interval is 0.
        tolerance: Largest error of an interval, absolute and relative: an interval passes if its
            error is below `tolerance * max(1, integral)`.
        max_halvings: How often a panel may be halved; 0 takes one panel of 15 nodes for each
            interval, and only measures the error. `converged` says whether the tolerance was met.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {tolerance}")
    if bool((end < start).any()):
        raise ValueError("intervals must not end before they start")
    if bool((batch.count_before(end) > batch.count_until(start)).any()):
        # N + 1 pieces for each interval, most of them empty.
        times = batch.clean_times[:, None]  # [B, 1, N]
        cuts = torch.minimum(torch.maximum(times, start[..., None]), end[..., None])
        left = torch.cat([start[..., None], cuts], dim=-1)
        right = torch.cat([cuts, end[..., None]], dim=-1)
        parts = _integrate_smooth(
            process, batch, left.flatten(1), right.flatten(1), tolerance, max_halvings
        )
        value = parts.value.unflatten(1, left.shape[1:]).sum(dim=2)
        return Integral(value, parts.error.reshape(left.shape).sum(dim=2), parts.converged)
    return _integrate_smooth(process, batch, start, end, tolerance, max_halvings)


def _integrate_smooth(
    process: EventProcess,
    batch: EventBatch,
    start: Float[Tensor, "B M"],
    end: Float[Tensor, "B M"],
    tolerance: float,
    max_halvings: int,
) -> Integral:
    """Return integrals over intervals without events inside."""
    size, count = start.shape
    value, error = _panels(process, batch, start, end)
    num_types = value.shape[-1]
    bad = error > _allowed(value, tolerance)
    if max_halvings == 0 or not bool(bad.any()):
        return Integral(value, error.detach(), not bool(bad.any()))
    value = value.reshape(-1, num_types).masked_fill(bad.reshape(-1, 1), 0.0)
    total_error = error.detach().reshape(-1).masked_fill(bad.reshape(-1), 0.0)
    rows, slots = bad.nonzero(as_tuple=True)
    left, right = start[rows, slots], end[rows, slots]
    owner = rows * count + slots
    for depth in range(1, max_halvings + 1):
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
        owner = owner.repeat(2)
        part, error = _ragged_panels(process, batch, owner // count, left, right)
        # If halving no longer moves the edges, there is nothing left to refine.
        stuck = (left + right) / 2 <= left
        bad = (error > _DEEPER * _allowed(part, tolerance)) & ~stuck
        done = ~bad if depth < max_halvings else torch.ones_like(bad)
        value = value.index_add(0, owner[done], part[done])
        total_error = total_error.index_add(0, owner[done], error.detach()[done])
        if bool(done.all()):
            break
        left, right, owner = left[bad], right[bad], owner[bad]
    value = value.reshape(size, count, num_types)
    total_error = total_error.reshape(size, count)
    return Integral(value, total_error, bool((total_error <= _allowed(value, tolerance)).all()))


def _allowed(value: Float[Tensor, "*S K"], tolerance: float) -> Float[Tensor, "*S"]:
    """Return the largest error that an integral may have."""
    total = value.detach().sum(dim=-1)
    # Below this, the difference of two rules is rounding.
    rounding = 64 * torch.finfo(value.dtype).eps
    return torch.maximum(tolerance * total.clamp(min=1.0), rounding * total)


def _panels(
    process: EventProcess, batch: EventBatch, start: Tensor, end: Tensor
) -> tuple[Float[Tensor, "B P K"], Float[Tensor, "B P"]]:
    """Return the integral over each panel [B, P] by 15 nodes, and its difference from that by 7."""
    rule = kronrod_rule(start.device)
    width = end - start
    query = start[..., None] + width[..., None] * rule.nodes
    # Rounding must not move a node to the event at the start, whose left limit is another one.
    query = torch.minimum(torch.maximum(query, just_after(start)[..., None]), end[..., None])
    rates = process.intensity(batch, query.flatten(1)).unflatten(1, query.shape[1:])
    width = width.to(rates.dtype)[..., None]
    fine = width * torch.einsum("bpnk,n->bpk", rates, rule.kronrod.to(rates.dtype))
    coarse = width * torch.einsum("bpnk,n->bpk", rates, rule.gauss.to(rates.dtype))
    fine = torch.where(width > 0, fine, torch.zeros_like(fine))
    error = torch.where(width > 0, fine - coarse, torch.zeros_like(fine)).abs().sum(dim=-1)
    return fine, error


def _ragged_panels(
    process: EventProcess, batch: EventBatch, rows: Tensor, left: Tensor, right: Tensor
) -> tuple[Float[Tensor, "P K"], Float[Tensor, "P"]]:
    """Return `_panels` of panels [P] that belong to any rows; only those rows are evaluated."""
    order = torch.argsort(rows, stable=True)
    used, row, counts = torch.unique_consecutive(
        rows[order], return_inverse=True, return_counts=True
    )
    begins = counts.cumsum(0) - counts
    slot = torch.arange(len(rows), device=rows.device) - begins[row]
    start = batch.last_times[used][:, None].repeat(1, int(counts.max()))
    end = start.clone()
    start[row, slot], end[row, slot] = left[order], right[order]
    value, error = _panels(process, batch.take(used), start, end)
    back = torch.argsort(order)
    return value[row, slot][back], error[row, slot][back]


@dataclass(frozen=True)
class LikelihoodTerms:
    """The parts of the log-likelihood, event by event.

    Attributes:
        log_intensity: Log of the intensity of the type that came, at its time; 0 if not scored.
        compensator: Integral of the total intensity since the event before; 0 if not scored.
        scored: True where an event is scored.
        tail: Integral from the last event to the end of the window; 0 for `span="events"`.
        error: Estimated absolute error of all integrals of a sequence; 0 if they are exact.
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
        macro: The average of the ContiFormer protocol: the log-likelihood of each sequence divided
            by all its events (N, although N - 1 are scored), then the mean over sequences with a
            scored event.
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
    for `span="events"`. For `span="window"` the sum begins with the first event and the integral
    runs from the start of the window to its end. If the intensity of an observed type is 0, the
    log-likelihood is minus infinity.

    Args:
        process: The process.
        batch: Events; with `starts` and `ends` for `span="window"`.
        span: What is scored: `events` 2 to N given the first, or all events in the `window`.
        tolerance: Of the integral over each gap, if the process has no exact one.
        max_halvings: As for `integrate_intensity`; 0 for a single rule of 15 nodes, as in training.
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
    # Padding and unscored events become empty gaps at the first event.
    first = batch.first_times if batch.starts is None or span == "events" else batch.starts
    times = torch.where(batch.mask, batch.finite_times, first[:, None])
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
    # Ones, not zeros, under the log: gradients of unscored events must be 0, not NaN.
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
    """Return the averages over the sequences of several batches, whose terms have the same span."""
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
    batch_size: int = 64,
    **settings: Any,
) -> LogLikelihood:
    """Return the log-likelihood of sequences under a process.

    Args:
        process: The process.
        sequences: The sequences; without a scored event the averages are NaN.
        span: What is scored, as for `likelihood_terms`.
        batch_size: Sequences per batch.
        **settings: `tolerance` and `max_halvings` of `likelihood_terms`.

    Example:
        >>> from osciformer.events import PoissonProcess
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 3.0]], time_unit="h")
        >>> print(log_likelihood(PoissonProcess([1.0]), events))  # 2 log 1 - 3, over 2
        -1.5000 nats per event (time in h, 2 events of 1 sequences, quadrature error 0.0e+00)
    """
    terms = (
        likelihood_terms(process, batch, span=span, **settings)
        for batch in batches_for(process, sequences, batch_size)
    )
    return summarise(terms, time_unit=sequences.time_unit, span=span)


class Choice(NamedTuple, Generic[Process]):
    """The best of several processes, its nats per validation event, and its settings."""

    process: Process
    likelihood: float
    settings: Mapping[str, Any]


def choose(
    candidates: Iterable[tuple[Mapping[str, Any], Process]], validation: EventSequences
) -> Choice[Process]:
    """Return the best of pairs of settings and process, by the likelihood of validation data.

    A candidate whose likelihood is not finite loses against all others.
    """
    best: Choice[Process] | None = None
    for settings, process in candidates:
        found = log_likelihood(process, validation).micro
        found = found if math.isfinite(found) else -math.inf
        if best is None or found > best.likelihood:
            best = Choice(process, found, settings)
    if best is None:
        raise ValueError("there is no candidate")
    return best
