"""Scores of a process on sequences: likelihood, next type and next time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from osciformer.events.likelihood import (
    LikelihoodTerms,
    LogLikelihood,
    check_num_types,
    likelihood_terms,
    summarise,
)
from osciformer.events.prediction import predict_next, type_probabilities_at
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences


@dataclass(frozen=True)
class EventScores:
    """How well a process predicts events 2 to N, each from those before it.

    Attributes:
        log_likelihood: Of events 2 to N.
        accuracy: Part of the events whose type was the likeliest one, whenever the event would
            come. Of equally likely types the first counts as predicted.
        accuracy_at_time: The same, when it is known at which time the event came.
        time_rmse: Root mean squared error of the expected gap, in the unit of time.
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


@torch.no_grad()
def score(
    process: EventProcess,
    sequences: EventSequences,
    *,
    horizon: float | None = None,
    tolerance: float = 1e-6,
    batch_size: int = 64,
) -> EventScores:
    """Return the scores of a process on sequences.

    Args:
        process: The process.
        sequences: The sequences; without a second event anywhere the scores are NaN.
        horizon: Where predicted gaps end. By default 100 times the longest gap of the sequences,
            which only matters for a process whose hazard dies out.
        tolerance: Of integrals.
        batch_size: Sequences per batch.
    """
    check_num_types(process, sequences)
    gaps = sequences.gaps
    if horizon is None:
        longest = float(gaps.max()) if len(gaps) else 0.0
        horizon = 100.0 * longest if longest > 0 else 1.0
    terms: list[LikelihoodTerms] = []
    right = right_at_time = 0
    squared = absolute = never = 0.0
    for batch in sequences.batches(batch_size):
        batch = batch.to(process.device)
        terms.append(likelihood_terms(process, batch, tolerance=tolerance))
        scored = batch.mask[:, 1:]
        if not bool(scored.any()):
            continue
        times = batch.times.masked_fill(~batch.mask, 0.0)
        gap, types = times.diff(dim=1)[scored], batch.clean_types[:, 1:][scored]
        found = predict_next(process, batch, horizon=horizon, tolerance=tolerance)
        at_time = type_probabilities_at(process, batch, times)[:, 1:][scored]
        right += int((found.type_probability[:, :-1][scored].argmax(dim=-1) == types).sum())
        right_at_time += int((at_time.argmax(dim=-1) == types).sum())
        squared += float((found.mean[:, :-1][scored] - gap).square().sum())
        absolute += float((found.median[:, :-1][scored] - gap).abs().sum())
        never += float(found.survival[:, :-1][scored].sum())
    summary = summarise(terms, time_unit=sequences.time_unit)
    count = summary.num_scored or math.nan
    return EventScores(
        log_likelihood=summary,
        accuracy=right / count,
        accuracy_at_time=right_at_time / count,
        time_rmse=math.sqrt(squared / count) if summary.num_scored else math.nan,
        time_mae=absolute / count,
        num_predicted=summary.num_scored,
        horizon=horizon,
        never=never / count,
        time_unit=sequences.time_unit,
    )
