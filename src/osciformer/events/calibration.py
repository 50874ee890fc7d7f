"""Whether a process is right: its compensator makes events a Poisson process of rate 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from osciformer._types import Float
from osciformer.events.likelihood import Span, check_num_types, likelihood_terms
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences


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

    def quantiles(
        self, level: float = 0.95
    ) -> tuple[
        Float[np.ndarray, "G"],
        Float[np.ndarray, "G"],
        Float[np.ndarray, "G"],
        Float[np.ndarray, "G"],
    ]:
        """Return what to draw: expected and found quantiles, and the edges of a band.

        Under the right process all points lie within the band with probability `level`.

        Args:
            level: Of the band, between 0 and 1.

        Returns:
            Quantiles of Exp(1), increments, and the lower and upper edge (which may be infinite).
        """
        count = len(self.increments)
        share = (np.arange(count) + 0.5) / count
        distance = critical_distance(count, level)
        with np.errstate(divide="ignore"):
            upper = -np.log1p(-np.minimum(share + distance, 1.0))
        lower = -np.log1p(-np.maximum(share - distance, 0.0))
        return -np.log1p(-share), self.increments, lower, upper


@torch.no_grad()
def rescaled_gaps(
    process: EventProcess,
    sequences: EventSequences,
    *,
    span: Span = "events",
    tolerance: float = 1e-6,
    batch_size: int = 64,
) -> Float[np.ndarray, "G"]:
    """Return the integrals of the total intensity between events: Exp(1) if the process is right.

    With `span="window"` the windows are joined: the rest behind the last event of one sequence is
    carried on to the first event of the next, so that the increments are independent and Exp(1)
    exactly. With `span="events"` they are those between neighbouring events, and rests are left
    out; in windows with few events that favours short gaps.

    Args:
        process: The process.
        sequences: The sequences.
        span: `events`, or `window` if the sequences have windows.
        tolerance: Of each integral, where the process has no exact one.
        batch_size: Sequences per batch.
    """
    check_num_types(process, sequences)
    parts: list[tuple[np.ndarray, float]] = [(np.empty(0), 0.0)] * len(sequences)
    for batch in sequences.batches(batch_size):
        batch = batch.to(process.device)
        terms = likelihood_terms(process, batch, span=span, tolerance=tolerance)
        assert batch.index is not None
        for row, position in enumerate(batch.index.tolist()):
            inner = terms.compensator[row][terms.scored[row]].cpu().numpy()
            parts[position] = (inner, float(terms.tail[row]))
    gaps, carried = [np.empty(0)], 0.0
    for inner, tail in parts:
        if len(inner):
            inner = inner.copy()
            inner[0] += carried
            gaps.append(inner)
            carried = 0.0
        carried += tail
    return np.concatenate(gaps)


def calibrate(increments: Float[np.ndarray, "G"]) -> Calibration:
    """Return the Kolmogorov-Smirnov test of increments against Exp(1).

    Args:
        increments: Of `rescaled_gaps`, at least one.

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
    """Return the Kolmogorov-Smirnov distance that is not exceeded with this probability.

    Args:
        count: Number of draws.
        level: Between 0 and 1.

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
    """Return Stephens' factor, with which the limit law holds well for few draws, too."""
    root = math.sqrt(count)
    return root + 0.12 + 0.11 / root


def _tail(x: float) -> float:
    """Return the probability that a Kolmogorov variable exceeds x."""
    if x < 0.2:  # 1 to all digits, where the series does not converge well
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
