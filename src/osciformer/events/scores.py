"""How good a process is: likelihood, next type, next time, and calibration by time rescaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float, Int
from osciformer.events.likelihood import (
    LikelihoodTerms,
    LogLikelihood,
    Span,
    likelihood_terms,
    summarise,
)
from osciformer.events.prediction import predict_next, type_probabilities_at
from osciformer.events.process import EventProcess, batches_for
from osciformer.events.sequences import EventSequences

Expectation = Literal["conditional", "restricted"]
# Scores that are means over events, in the order of their sums.
_MEANS = ("accuracy", "accuracy_at_time", "time_rmse", "time_mae", "never")


@dataclass(frozen=True)
class EventScores:
    """How well a process predicts events 2 to N, each from those before it."""

    log_likelihood: LogLikelihood  #: Of events 2 to N.
    accuracy: float  #: Fraction of events of the likeliest type, whenever the event would come.
    accuracy_at_time: float  #: The same, given the time at which the event came.
    time_rmse: float  #: Of the expected gap; see `expectation` of `score_sequences`.
    time_mae: float  #: Mean absolute error of the median gap.
    num_predicted: int  #: Number of events.
    horizon: float  #: Largest gap that was predicted.
    never: float  #: Mean probability that no event comes before the horizon.
    time_unit: str  #: Unit of gaps and their errors.

    def __str__(self) -> str:
        return (
            f"LL {self.log_likelihood.micro:.4f} (macro {self.log_likelihood.macro:.4f}), accuracy "
            f"{self.accuracy:.4f}, RMSE {self.time_rmse:.4g}, MAE {self.time_mae:.4g} "
            f"{self.time_unit}, {self.num_predicted} events"
        )


@dataclass(frozen=True)
class SequenceScores:
    """The sums behind `score`, sequence by sequence, so that sequences can be resampled.

    The columns of `sums` are log-likelihood, scored events, all events, right types, right types at
    known times, squared and absolute errors of gaps, and probabilities of no event.
    """

    sums: Float[np.ndarray, "n 8"]
    log_likelihood: LogLikelihood  #: Of all sequences together.
    horizon: float  #: Largest gap that was predicted.

    def means(self, index: Int[np.ndarray, "m"] | None = None) -> dict[str, float]:
        """Return the scores of the sequences at some positions, which may repeat, or of all."""
        chosen = self.sums if index is None else self.sums[index]
        total, scored, _, *sums = chosen.sum(axis=0).tolist()
        count = scored or math.nan
        some = chosen[chosen[:, 1] > 0]
        macro = float((some[:, 0] / some[:, 2]).mean()) if len(some) else math.nan
        means = {name: item / count for name, item in zip(_MEANS, sums, strict=True)}
        means["time_rmse"] = math.sqrt(means["time_rmse"])
        return {"log_likelihood": total / count, "macro_log_likelihood": macro, **means}


def score(process: EventProcess, sequences: EventSequences, **settings: Any) -> EventScores:
    """Return the scores of a process on all sequences together; see `score_sequences`."""
    found = score_sequences(process, sequences, **settings)
    means, summary = found.means(), found.log_likelihood
    return EventScores(
        log_likelihood=summary,
        num_predicted=summary.num_scored,
        horizon=found.horizon,
        time_unit=sequences.time_unit,
        **{name: means[name] for name in _MEANS},
    )


@torch.no_grad()
def score_sequences(
    process: EventProcess,
    sequences: EventSequences,
    *,
    horizon: float | None = None,
    expectation: Expectation = "conditional",
    tolerance: float = 1e-6,
    max_halvings: int = 30,
    prediction_tolerance: float | None = None,
    batch_size: int = 64,
) -> SequenceScores:
    """Return the scores of a process on each of many sequences.

    Args:
        process: The process.
        sequences: The sequences; without a second event anywhere the scores are NaN.
        horizon: Where predicted gaps end, by default 100 times the longest gap of the sequences.
        expectation: Prediction whose squared error is scored: `conditional`, the expected gap given
            that it ends before the horizon; `restricted`, the expected minimum of gap and horizon.
        tolerance: Of integrals.
        max_halvings: As for `integrate_intensity`, for the likelihood.
        prediction_tolerance: Of predictions, if it differs; survival below it is left out. Networks
            in single precision reach about 1e-6.
        batch_size: Sequences per batch.
    """
    check_choice("expectation", expectation, get_args(Expectation))
    precision: dict[str, Any] = {"tolerance": tolerance}
    if prediction_tolerance is not None:
        precision = {"tolerance": prediction_tolerance, "negligible": prediction_tolerance}
    if horizon is None:
        horizon = 100.0 * float(sequences.gaps.max(initial=0.0)) or 1.0
    terms: list[LikelihoodTerms] = []
    sums = np.zeros((len(sequences), 8))
    for batch in batches_for(process, sequences, batch_size):
        scored, times = batch.mask[:, 1:], batch.finite_times
        with process.remember(batch):
            part = likelihood_terms(process, batch, tolerance=tolerance, max_halvings=max_halvings)
            terms.append(part)
            if not bool(scored.any()):
                continue
            at_time = type_probabilities_at(process, batch, times)[:, 1:]
        gap, types = times.diff(dim=1), batch.clean_types[:, 1:]
        found = predict_next(process, batch, horizon=horizon, **precision)
        mean = found.mean if expectation == "conditional" else found.restricted_mean
        by_event = (
            found.type_probability[:, :-1].argmax(dim=-1) == types,
            at_time.argmax(dim=-1) == types,
            (mean[:, :-1] - gap).square(),
            (found.median[:, :-1] - gap).abs(),
            found.survival[:, :-1],
        )
        by_sequence = [item.double().masked_fill(~scored, 0.0).sum(dim=1) for item in by_event]
        columns = (part.per_sequence, scored.sum(dim=1), batch.lengths, *by_sequence)
        assert batch.index is not None
        table = torch.stack([column.double() for column in columns], dim=1)
        sums[batch.index.cpu().numpy()] = table.cpu().numpy()
    return SequenceScores(sums, summarise(terms, time_unit=sequences.time_unit), horizon)


class QuantileBand(NamedTuple):
    """Expected and found quantiles, and the edges of a band around the expected ones."""

    expected: Float[np.ndarray, "G"]
    found: Float[np.ndarray, "G"]
    lower: Float[np.ndarray, "G"]
    upper: Float[np.ndarray, "G"]  # may be infinite


@dataclass(frozen=True)
class Calibration:
    """The test of time rescaling."""

    increments: Float[np.ndarray, "G"]  #: Integrals of the intensity between events, increasing.
    statistic: float  #: Distance of their distribution from Exp(1) (Kolmogorov-Smirnov).
    p_value: float  #: Probability of such a distance under the right process.

    def quantiles(self, level: float = 0.95) -> QuantileBand:
        """Return a band that, with probability `level`, holds all points of the right process."""
        count = len(self.increments)
        share = (np.arange(count) + 0.5) / count
        distance = critical_distance(count, level)
        with np.errstate(divide="ignore"):
            upper = -np.log1p(-np.minimum(share + distance, 1.0))
        lower = -np.log1p(-np.maximum(share - distance, 0.0))
        return QuantileBand(-np.log1p(-share), self.increments, lower, upper)


@torch.no_grad()
def rescaled_gaps(
    process: EventProcess,
    sequences: EventSequences,
    *,
    span: Span = "events",
    batch_size: int = 64,
    **settings: Any,
) -> Float[np.ndarray, "G"]:
    """Return the integrals of the total intensity between events: Exp(1) if the process is right.

    With `span="window"` the rest after the last event of one sequence is added to the first gap of
    the next, so that the increments are independent and exactly Exp(1). With `span="events"` only
    gaps between neighbouring events count; in windows with few events that favours short gaps. The
    settings are those of `likelihood_terms`.
    """
    parts: list[tuple[np.ndarray, float]] = [(np.empty(0), 0.0)] * len(sequences)
    for batch in batches_for(process, sequences, batch_size):
        terms = likelihood_terms(process, batch, span=span, **settings)
        assert batch.index is not None
        for row, position in enumerate(batch.index.tolist()):
            inner = terms.compensator[row][terms.scored[row]].cpu().numpy()
            parts[position] = (inner, float(terms.tail[row]))
    gaps, rest = [np.empty(0)], 0.0
    for inner, tail in parts:
        if len(inner):
            gaps.append(np.concatenate([inner[:1] + rest, inner[1:]]))
            rest = 0.0
        rest += tail
    return np.concatenate(gaps)


def calibrate(increments: Float[np.ndarray, "G"]) -> Calibration:
    """Return the Kolmogorov-Smirnov test of the increments of `rescaled_gaps` against Exp(1)."""
    increments = np.sort(np.asarray(increments, dtype=np.float64))
    count = len(increments)
    if count == 0:
        raise ValueError("there is no increment to test: no sequence has a scored event")
    if not (increments >= 0).all():
        raise ValueError("increments must be finite and not negative")
    expected, steps = -np.expm1(-increments), np.arange(count + 1) / count
    statistic = float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()))
    return Calibration(increments, statistic, _tail(_effective(count) * statistic))


def critical_distance(count: int, level: float) -> float:
    """Return the Kolmogorov-Smirnov distance of `count` draws that is exceeded in 1 - level."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}")
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle) > 1 - level else (low, middle)
    return high / _effective(count)


def _effective(count: int) -> float:
    """Return Stephens' factor, which makes the limit law accurate for few draws too."""
    root = math.sqrt(count)
    return root + 0.12 + 0.11 / root


def _tail(x: float) -> float:
    """Return the probability that a Kolmogorov variable exceeds x."""
    if x < 0.2:  # 1 to all digits, where the series does not converge well
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
