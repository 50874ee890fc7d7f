"""Areas under curves of ranked scores, exact with ties."""

from __future__ import annotations

import numpy as np

from osciformer._types import Bool, Float, Int


def auroc(is_positive: Bool[np.ndarray, "n"], score: Float[np.ndarray, "n"]) -> float:
    """Return the area under the receiver operating characteristic; NaN if one class is absent.

    It is the chance that a random positive has a higher score than a random negative, a tie
    counting as half.

    Example:
        >>> auroc(np.array([False, True, True]), np.array([0.1, 0.1, 0.9]))
        0.75
    """
    below, negatives, positives = _counts_at_scores(is_positive, score)
    total = int(negatives.sum()), int(positives.sum())
    if 0 in total:
        return float("nan")
    return float((positives * (below + 0.5 * negatives)).sum() / (total[0] * total[1]))


def auroc_error(area: float, num_positive: int, num_negative: int) -> float:
    """Return the standard error of an area, by Hanley and McNeil (1982); NaN without a class.

    Args:
        area: The area under the receiver operating characteristic.
        num_positive: Positives it was found with.
        num_negative: Negatives.

    Example:
        >>> round(auroc_error(0.85, 50, 310), 3)
        0.035
    """
    if min(num_positive, num_negative) < 1:
        return float("nan")
    above, below = area / (2.0 - area), 2.0 * area**2 / (1.0 + area)
    variance = area * (1.0 - area)
    variance += (num_positive - 1) * (above - area**2) + (num_negative - 1) * (below - area**2)
    return float(np.sqrt(max(0.0, variance) / (num_positive * num_negative)))


def average_precision(is_positive: Bool[np.ndarray, "n"], score: Float[np.ndarray, "n"]) -> float:
    """Return the mean precision over the positives, the area under precision and recall.

    Example:
        >>> average_precision(np.array([False, True, True]), np.array([0.5, 0.1, 0.9])).__round__(3)
        0.833
    """
    _, negatives, positives = _counts_at_scores(is_positive, score)
    if positives.sum() == 0:
        return float("nan")
    hits = np.cumsum(positives[::-1])
    named = hits + np.cumsum(negatives[::-1])
    return float((hits / named * positives[::-1]).sum() / hits[-1])


def _counts_at_scores(
    is_positive: Bool[np.ndarray, "n"], score: Float[np.ndarray, "n"]
) -> tuple[Int[np.ndarray, "u"], Int[np.ndarray, "u"], Int[np.ndarray, "u"]]:
    """Return, for each distinct score, negatives below it, and negatives and positives at it."""
    distinct, place = np.unique(score, return_inverse=True)
    positives = np.bincount(place, weights=is_positive, minlength=len(distinct)).astype(np.int64)
    negatives = np.bincount(place, minlength=len(distinct)) - positives
    return np.cumsum(negatives) - negatives, negatives, positives
