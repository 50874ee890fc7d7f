"""Scores of a process on sequences: likelihood, next type and next time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float, Int
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

Expectation = Literal["conditional", "restricted"]


@dataclass(frozen=True)
class EventScores:
    """How well a process predicts events 2 to N, each from those before it.

    Attributes:
        log_likelihood: Of events 2 to N.
        accuracy: Part of the events whose type was the likeliest one, whenever the event would
            come. Of equally likely types the first counts as predicted.
        accuracy_at_time: The same, when it is known at which time the event came.
        time_rmse: Root mean squared error of the expected gap, in the unit of time. Which
            expectation that is, `score` was told.
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


# Columns of the sums of a sequence.
_SUMS = (
    "log_likelihood",
    "num_scored",
    "num_events",
    "num_right",
    "num_right_at_time",
    "squared_error",
    "absolute_error",
    "never",
)


@dataclass(frozen=True)
class SequenceScores:
    """What `score` is made of, sequence by sequence, so that sequences can be resampled.

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
        """Return the scores of some sequences, one perhaps several times; of all if not given."""
        chosen = self.sums if index is None else self.sums[index]
        total = dict(zip(_SUMS, chosen.sum(axis=0).tolist(), strict=True))
        count = total["num_scored"] or math.nan
        some = chosen[chosen[:, 1] > 0]
        return {
            "log_likelihood": total["log_likelihood"] / count,
            "macro_log_likelihood": float((some[:, 0] / some[:, 2]).mean())
            if len(some)
            else math.nan,
            "accuracy": total["num_right"] / count,
            "accuracy_at_time": total["num_right_at_time"] / count,
            "time_rmse": math.sqrt(total["squared_error"] / count),
            "time_mae": total["absolute_error"] / count,
            "never": total["never"] / count,
        }


def score(
    process: EventProcess,
    sequences: EventSequences,
    *,
    horizon: float | None = None,
    expectation: Expectation = "conditional",
    tolerance: float = 1e-6,
    max_halvings: int = 30,
    prediction_tolerance: float | None = None,
    batch_size: int = 64,
) -> EventScores:
    """Return the scores of a process on sequences, all together; see `score_sequences`."""
    found = score_sequences(
        process,
        sequences,
        horizon=horizon,
        expectation=expectation,
        tolerance=tolerance,
        max_halvings=max_halvings,
        prediction_tolerance=prediction_tolerance,
        batch_size=batch_size,
    )
    means, summary = found.means(), found.log_likelihood
    return EventScores(
        log_likelihood=summary,
        accuracy=means["accuracy"],
        accuracy_at_time=means["accuracy_at_time"],
        time_rmse=means["time_rmse"],
        time_mae=means["time_mae"],
        num_predicted=summary.num_scored,
        horizon=found.horizon,
        never=means["never"],
        time_unit=sequences.time_unit,
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
        expectation: What the squared error is taken of: `conditional`, the expected gap given that
            it ends before the horizon; `restricted`, the expectation of the gap or the horizon,
            whichever is less.
        tolerance: Of integrals.
        max_halvings: As of `integrate_intensity`, for the likelihood; fewer than are needed show in
            its `error`.
        prediction_tolerance: Of those of predictions, if it is not the same: of probabilities, and
            of times in mean gaps. Survival below it is left out. Networks in single precision are
            exact to some 1e-6, and a network is asked 15 times for each step of an integral.
        batch_size: Sequences per batch.
    """
    check_num_types(process, sequences)
    check_choice("expectation", expectation, get_args(Expectation))
    rough = tolerance if prediction_tolerance is None else prediction_tolerance
    negligible = 1e-9 if prediction_tolerance is None else prediction_tolerance
    gaps = sequences.gaps
    if horizon is None:
        longest = float(gaps.max()) if len(gaps) else 0.0
        horizon = 100.0 * longest if longest > 0 else 1.0
    terms: list[LikelihoodTerms] = []
    sums = np.zeros((len(sequences), len(_SUMS)))
    for batch in sequences.batches(batch_size):
        batch = batch.to(process.device)
        scored = batch.mask[:, 1:]
        times = batch.times.masked_fill(~batch.mask, 0.0)
        with process.remember(batch):
            terms.append(
                likelihood_terms(process, batch, tolerance=tolerance, max_halvings=max_halvings)
            )
            if not bool(scored.any()):
                continue
            at_time = type_probabilities_at(process, batch, times)[:, 1:][scored]
        gap, types = times.diff(dim=1)[scored], batch.clean_types[:, 1:][scored]
        found = predict_next(
            process, batch, horizon=horizon, tolerance=rough, negligible=negligible
        )
        mean = found.mean if expectation == "conditional" else found.restricted_mean
        columns = (
            terms[-1].per_sequence,
            scored.sum(dim=1),
            batch.lengths,
            *(
                torch.zeros(len(batch), dtype=torch.float64, device=gap.device).index_add(
                    0, scored.nonzero()[:, 0], quantity.double()
                )
                for quantity in (
                    found.type_probability[:, :-1][scored].argmax(dim=-1) == types,
                    at_time.argmax(dim=-1) == types,
                    (mean[:, :-1][scored] - gap).square(),
                    (found.median[:, :-1][scored] - gap).abs(),
                    found.survival[:, :-1][scored],
                )
            ),
        )
        assert batch.index is not None
        sums[batch.index.cpu().numpy()] = torch.stack(
            [column.double().cpu() for column in columns], dim=1
        ).numpy()
    return SequenceScores(
        sums=sums,
        log_likelihood=summarise(terms, time_unit=sequences.time_unit),
        horizon=horizon,
    )
