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


@dataclass(frozen=True)
class EventScores:
    """How well a process predicts events 2 to N, each from those before it.

    Attributes:
        log_likelihood: Of events 2 to N.
        accuracy: Fraction of events whose type was the likeliest one, whenever the event would
            come. Of equally likely types the first counts as predicted.
        accuracy_at_time: The same, given the time at which the event came.
        time_rmse: Root mean squared error of the expected gap, in the unit of time; see
            `expectation` of `score_sequences`.
        time_mae: Mean absolute error of the median gap.
        num_predicted: Number of events.
        horizon: Largest gap that was predicted, in the unit of time.
        never: Mean probability that no event comes before the horizon.
        time_unit: Name of the unit.
    """

    log_likelihood: LogLikelihood
    accuracy: float
    accuracy_at_time: float
    time_rmse: float
    time_mae: float
    num_predicted: int
    horizon: float
    never: float
    time_unit: str

    def __str__(self) -> str:
        return (
            f"LL {self.log_likelihood.micro:.4f} (macro {self.log_likelihood.macro:.4f}), accuracy "
            f"{self.accuracy:.4f}, RMSE {self.time_rmse:.4g}, MAE {self.time_mae:.4g} "
            f"{self.time_unit}, {self.num_predicted} events"
        )


@dataclass(frozen=True)
class SequenceScores:
    """The sums behind `score`, sequence by sequence, so that sequences can be resampled.

    Attributes:
        sums: Of each sequence: log-likelihood, scored events, all events, right types, right types
            at known times, squared and absolute errors of gaps, probabilities of no event.
        log_likelihood: Of all sequences together.
        horizon: Largest gap that was predicted.
    """

    sums: Float[np.ndarray, "n 8"]
    log_likelihood: LogLikelihood
    horizon: float

    def means(self, index: Int[np.ndarray, "m"] | None = None) -> dict[str, float]:
        """Return the scores of the sequences at some positions, which may repeat, or of all."""
        chosen = self.sums if index is None else self.sums[index]
        total, scored, _, right, right_at_time, squared, absolute, never = chosen.sum(
            axis=0
        ).tolist()
        count = scored or math.nan
        some = chosen[chosen[:, 1] > 0]
        macro = float((some[:, 0] / some[:, 2]).mean()) if len(some) else math.nan
        means = {
            "log_likelihood": total / count,
            "macro_log_likelihood": macro,
            "accuracy": right / count,
            "accuracy_at_time": right_at_time / count,
            "time_rmse": math.sqrt(squared / count),
            "time_mae": absolute / count,
            "never": never / count,
        }
        return {name: float(mean) for name, mean in means.items()}


def score(process: EventProcess, sequences: EventSequences, **settings: Any) -> EventScores:
    """Return the scores of a process on all sequences together; see `score_sequences`."""
    found = score_sequences(process, sequences, **settings)
    means, summary = found.means(), found.log_likelihood
    names = ("accuracy", "accuracy_at_time", "time_rmse", "time_mae", "never")
    return EventScores(
        log_likelihood=summary,
        num_predicted=summary.num_scored,
        horizon=found.horizon,
        time_unit=sequences.time_unit,
        **{name: means[name] for name in names},
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
        horizon: Where predicted gaps end. By default 100 times the longest gap of the sequences,
            which only matters for a process whose hazard dies out.
        expectation: Prediction whose squared error is scored: `conditional`, the expected gap given
            that it ends before the horizon; `restricted`, the expectation of the gap or the
            horizon, whichever is less.
        tolerance: Of integrals.
        max_halvings: As for `integrate_intensity`, for the likelihood, whose `error` shows whether
            they were enough.
        prediction_tolerance: Of predictions, if it is not the same: of probabilities, and of times
            in mean gaps. Survival below it is left out. Networks in single precision are exact to
            about 1e-6, and are evaluated 15 times for each step of an integral.
        batch_size: Sequences per batch.
    """
    check_choice("expectation", expectation, get_args(Expectation))
    rough = tolerance if prediction_tolerance is None else prediction_tolerance
    negligible = 1e-9 if prediction_tolerance is None else prediction_tolerance
    if horizon is None:
        longest = float(sequences.gaps.max(initial=0.0))
        horizon = 100.0 * longest if longest > 0 else 1.0
    terms: list[LikelihoodTerms] = []
    sums = np.zeros((len(sequences), 8))
    for batch in batches_for(process, sequences, batch_size):
        scored = batch.mask[:, 1:]
        times = batch.finite_times
        with process.remember(batch):
            terms.append(
                likelihood_terms(process, batch, tolerance=tolerance, max_halvings=max_halvings)
            )
            if not bool(scored.any()):
                continue
            at_time = type_probabilities_at(process, batch, times)[:, 1:]
        gap, types = times.diff(dim=1), batch.clean_types[:, 1:]
        found = predict_next(
            process, batch, horizon=horizon, tolerance=rough, negligible=negligible
        )
        mean = found.mean if expectation == "conditional" else found.restricted_mean
        by_event = (
            found.type_probability[:, :-1].argmax(dim=-1) == types,
            at_time.argmax(dim=-1) == types,
            (mean[:, :-1] - gap).square(),
            (found.median[:, :-1] - gap).abs(),
            found.survival[:, :-1],
        )
        by_sequence = [item.double().masked_fill(~scored, 0.0).sum(dim=1) for item in by_event]
        columns = (terms[-1].per_sequence, scored.sum(dim=1), batch.lengths, *by_sequence)
        assert batch.index is not None
        table = torch.stack([column.double() for column in columns], dim=1)
        sums[batch.index.cpu().numpy()] = table.cpu().numpy()
    return SequenceScores(sums, summarise(terms, time_unit=sequences.time_unit), horizon)


class QuantileBand(NamedTuple):
    """Expected and found quantiles, and the edges of a band around the expected ones."""

    expected: Float[np.ndarray, "G"]
    found: Float[np.ndarray, "G"]
    lower: Float[np.ndarray, "G"]
    upper: Float[np.ndarray, "G"]


@dataclass(frozen=True)
class Calibration:
    """The test of time rescaling.

    Attributes:
        increments: Integrals of the intensity between events, in increasing order.
        statistic: Largest distance between their distribution and Exp(1) (Kolmogorov-Smirnov).
        p_value: Probability of such a distance under the right process; small for a wrong one.
    """

    increments: Float[np.ndarray, "G"]
    statistic: float
    p_value: float

    def quantiles(self, level: float = 0.95) -> QuantileBand:
        """Return quantiles of Exp(1), the increments, and a band; its upper edge may be infinite.

        Under the right process all points lie within the band with probability `level`.
        """
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

    With `span="window"` the windows are joined: the rest after the last event of one sequence is
    added to the first gap of the next, so that the increments are independent and exactly Exp(1).
    With `span="events"` only gaps between neighbouring events count; in windows with few events
    that favours short gaps.

    Args:
        process: The process.
        sequences: The sequences.
        span: `events`, or `window` if the sequences have windows.
        batch_size: Sequences per batch.
        **settings: `tolerance` and `max_halvings` of `likelihood_terms`.
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
    """Return the Kolmogorov-Smirnov test of the increments of `rescaled_gaps` against Exp(1).

    Example:
        >>> round(calibrate(np.array([0.1, 0.5, 0.9, 2.0])).statistic, 3)
        0.157
    """
    increments = np.sort(np.asarray(increments, dtype=np.float64))
    count = len(increments)
    if count == 0:
        raise ValueError("there is no increment to test: no sequence has a scored event")
    if not (increments >= 0).all():
        raise ValueError("increments must be finite and not negative")
    expected = -np.expm1(-increments)
    above = np.arange(1, count + 1) / count - expected
    below = expected - np.arange(count) / count
    statistic = float(max(above.max(), below.max()))
    return Calibration(increments, statistic, _tail(_effective(count) * statistic))


def critical_distance(count: int, level: float) -> float:
    """Return the Kolmogorov-Smirnov distance of `count` draws that is exceeded in 1 - level.

    Example:
        >>> round(critical_distance(100, 0.95), 3)
        0.134
    """
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
