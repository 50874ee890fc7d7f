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
    """Integrals of intensities, and how far off they may be."""

    value: Float[Tensor, "B M K"]  #: Integrals by type.
    error: Float[Tensor, "B M"]  #: Absolute error of their sum over types, estimated from above.
    converged: bool  #: Whether each interval met the tolerance.


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
    """Return the Gauss-Kronrod rule with 7 and 15 nodes in float64."""
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

    Intervals are cut at the events within them. A panel is halved as long as its rules with 7 and
    15 nodes differ by more than the tolerance. Between events intensities must be smooth: a jump
    elsewhere can hide between two nodes. Gradients reach the process.

    Args:
        process: The process.
        batch: Events.
        start: Where the intervals begin.
        end: Where they end, not before `start`.
        tolerance: Largest error of an interval, as a part of `max(1, integral)`.
        max_halvings: How often a panel may be halved; 0 only measures the error.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {tolerance}")
    if bool((end < start).any()):
        raise ValueError("intervals must not end before they start")
    lefts, rights = start[..., None], end[..., None]  # [B, M, pieces]
    if bool((batch.count_before(end) > batch.count_until(start)).any()):
        # N + 1 pieces for each interval, most of them empty.
        cuts = torch.minimum(torch.maximum(batch.clean_times[:, None], lefts), rights)
        lefts, rights = torch.cat([lefts, cuts], dim=-1), torch.cat([cuts, rights], dim=-1)
    pieces, start, end = lefts.shape[1:], lefts.flatten(1), rights.flatten(1)
    value, error = _panels(process, batch, start, end)
    bad = error > _allowed(value, tolerance)
    total_error, converged = error.detach(), not bool(bad.any())
    if max_halvings > 0 and not converged:
        shape = value.shape
        value = value.masked_fill(bad[..., None], 0.0).flatten(0, 1)
        total_error = total_error.masked_fill(bad, 0.0).flatten()
        owner = bad.flatten().nonzero()[:, 0]
        left, right = start.flatten()[owner], end.flatten()[owner]
        for depth in range(1, max_halvings + 1):
            middle = (left + right) / 2
            left, right = torch.cat([left, middle]), torch.cat([middle, right])
            owner = owner.repeat(2)
            part, error = _ragged_panels(process, batch, owner // shape[1], left, right)
            # If halving no longer moves the edges, there is nothing left to refine.
            stuck = (left + right) / 2 <= left
            bad = (error > _DEEPER * _allowed(part, tolerance)) & ~stuck
            done = ~bad if depth < max_halvings else torch.ones_like(bad)
            value = value.index_add(0, owner[done], part[done])
            total_error = total_error.index_add(0, owner[done], error.detach()[done])
            if bool(done.all()):
                break
            left, right, owner = left[bad], right[bad], owner[bad]
        value, total_error = value.reshape(shape), total_error.reshape(shape[:2])
        converged = bool((total_error <= _allowed(value, tolerance)).all())
    value, total_error = value.unflatten(1, pieces), total_error.unflatten(1, pieces)
    return Integral(value.sum(dim=2), total_error.sum(dim=2), converged)


def _allowed(value: Float[Tensor, "*S K"], tolerance: float) -> Float[Tensor, "*S"]:
    total = value.detach().sum(dim=-1)
    # Below this, the difference of two rules is rounding.
    rounding = 64 * torch.finfo(value.dtype).eps
    return torch.maximum(tolerance * total.clamp(min=1.0), rounding * total)


def _panels(
    process: EventProcess, batch: EventBatch, start: Tensor, end: Tensor
) -> tuple[Float[Tensor, "B P K"], Float[Tensor, "B P"]]:
    """Return the integral over each panel [B, P] by 15 nodes, and its difference from that by 7."""
    rule = kronrod_rule(start.device)
    width = (end - start)[..., None]
    query = start[..., None] + width * rule.nodes
    # Rounding must not move a node to the event at the start, whose left limit is another one.
    query = torch.minimum(torch.maximum(query, just_after(start)[..., None]), end[..., None])
    rates = process.intensity(batch, query.flatten(1)).unflatten(1, query.shape[1:])
    width = width.to(rates.dtype)
    fine, coarse = (
        torch.where(width > 0, width * torch.einsum("bpnk,n->bpk", rates, weights.to(rates)), 0.0)
        for weights in (rule.kronrod, rule.gauss)
    )
    return fine, (fine - coarse).abs().sum(dim=-1)


def _ragged_panels(
    process: EventProcess, batch: EventBatch, rows: Tensor, left: Tensor, right: Tensor
) -> tuple[Float[Tensor, "P K"], Float[Tensor, "P"]]:
    """Return `_panels` of panels [P] that belong to any rows; only those rows are evaluated."""
    order = torch.argsort(rows, stable=True)
    used, row, counts = torch.unique(rows[order], return_inverse=True, return_counts=True)
    slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[row]
    start = batch.last_times[used][:, None].repeat(1, int(counts.max()))
    end = start.clone()
    start[row, slot], end[row, slot] = left[order], right[order]
    value, error = _panels(process, batch.take(used), start, end)
    back = torch.argsort(order)
    return value[row, slot][back], error[row, slot][back]


@dataclass(frozen=True)
class LikelihoodTerms:
    """The parts of the log-likelihood, event by event; both are 0 if an event is not scored."""

    log_intensity: Float[Tensor, "B N"]  #: Log of the intensity of the type that came, at its time.
    compensator: Float[Tensor, "B N"]  #: Integral of the total intensity since the event before.
    scored: Bool[Tensor, "B N"]  #: True where an event is scored.
    tail: Float[Tensor, "B"]  #: From the last event to the end of the window; 0 for `events`.
    error: Float[Tensor, "B"]  #: Estimated error of all integrals of a sequence; 0 if exact.
    num_events: Int[Tensor, "B"]  #: Number of events of each sequence, scored or not.

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
    """The log-likelihood of many sequences."""

    micro: float  #: Nats per scored event; larger by log(c) in a unit of time c times as long.
    #: The average of the ContiFormer protocol: the mean over sequences with a scored event of the
    #: log-likelihood divided by all events (N, although N - 1 are scored).
    macro: float
    total: float  #: Sum over all sequences, in nats.
    num_scored: int  #: Scored events.
    num_sequences: int  #: Sequences with a scored event.
    error: float  #: Estimated error of `micro` due to quadrature, 0 if all integrals are exact.
    time_unit: str  #: Unit of the times.
    span: Span  #: `events` or `window`, see `likelihood_terms`.

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
    runs from the start of the window to its end.

    Args:
        process: The process.
        batch: Events; with `starts` and `ends` for `span="window"`.
        span: What is scored: `events` 2 to N given the first, or all events in the `window`.
        tolerance: Of the integral over each gap, if the process has no exact one.
        max_halvings: As for `integrate_intensity`; training takes 0.
    """
    check_choice("span", span, ("events", "window"))
    scored, first, ends = batch.mask.clone(), batch.first_times, batch.ends
    if span == "events":
        scored[:, 0] = False
        ends = None
    elif batch.starts is None or ends is None:
        raise ValueError(
            "span='window' needs to know where the windows begin and end: give starts and ends to "
            "EventSequences, or use span='events'"
        )
    else:
        first = batch.starts
    # Padding and unscored events become empty gaps at the first event.
    begin = first[:, None]
    times = torch.where(batch.mask, batch.times, begin)
    end = torch.where(scored, times, begin)
    start = torch.where(scored, torch.cat([begin, times[:, :-1]], dim=1), begin)
    if ends is not None:
        start = torch.cat([start, batch.last_times[:, None]], dim=1)
        end = torch.cat([end, ends[:, None]], dim=1)
    gaps = process.total_compensator(batch, start, end)
    error = torch.zeros_like(start)
    if gaps is None:
        by_type, error, _ = integrate_intensity(
            process, batch, start, end, tolerance=tolerance, max_halvings=max_halvings
        )
        gaps = by_type.sum(dim=-1)
    of_type = process.intensity(batch, times).gather(-1, batch.clean_types[..., None])[..., 0]
    inner, tail = gaps.double().tensor_split([scored.shape[1]], dim=1)
    return LikelihoodTerms(
        # Ones, not zeros, under the log: gradients of unscored events must be 0, not NaN.
        log_intensity=torch.where(scored, of_type.double(), 1.0).log(),
        compensator=inner,
        scored=scored,
        tail=tail.sum(dim=1),  # of no column for events
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
    micro, error = (item / (num_scored or math.nan) for item in (total, error))
    macro = of_sequences / (num_sequences or math.nan)
    return LogLikelihood(micro, macro, total, num_scored, num_sequences, error, time_unit, span)


@torch.no_grad()
def log_likelihood(
    process: EventProcess,
    sequences: EventSequences,
    *,
    span: Span = "events",
    batch_size: int = 64,
    **settings: Any,
) -> LogLikelihood:
    """Return the log-likelihood of sequences under a process; NaN without a scored event.

    `span` and the settings are those of `likelihood_terms`.

    Example:
        >>> from osciformer.events import PoissonProcess
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 3.0]], time_unit="h")
        >>> print(log_likelihood(PoissonProcess([1.0]), events))  # 2 log 1 - 3, over 2
        -1.5000 nats per event (time in h, 2 events of 1 sequences, quadrature error 0.0e+00)
    """
    batches = batches_for(process, sequences, batch_size)
    terms = (likelihood_terms(process, batch, span=span, **settings) for batch in batches)
    return summarise(terms, time_unit=sequences.time_unit, span=span)


class Choice(NamedTuple, Generic[Process]):
    """The best of several processes, its nats per validation event, and its settings."""

    process: Process
    likelihood: float
    settings: Mapping[str, Any]


def choose(
    candidates: Iterable[tuple[Mapping[str, Any], Process]], validation: EventSequences
) -> Choice[Process]:
    """Return the best of pairs of settings and process; a likelihood that is not finite loses."""
    found = []
    for settings, process in candidates:
        nats = log_likelihood(process, validation).micro
        found.append(Choice(process, nats if math.isfinite(nats) else -math.inf, settings))
    return max(found, key=lambda choice: choice.likelihood)
