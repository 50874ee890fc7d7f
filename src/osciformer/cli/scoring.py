"""Scores of predictions, with bootstrap intervals over series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from osciformer._types import Float, Int


# Bins of the calibration error, of equal numbers of series.
NUM_BINS = 10
LEVEL = 0.95

Scores = dict[str, float]


@dataclass(frozen=True)
class Interval:
    """A score and the bounds between which resampled series put it.

    Attributes:
        value: The score.
        low: Lower bound.
        high: Upper bound.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def bootstrap(
    score: Callable[[Int[np.ndarray, "n"]], Scores], count: int, *, rounds: int, seed: int
) -> dict[str, Interval]:
    """Return scores with percentile intervals of resampled series.

    Args:
        score: Scores of the series at these positions.
        count: Number of series n.
        rounds: How often to resample; 0 for no intervals (NaN).
        seed: Decides the samples.

    Example:
        >>> values = np.array([1.0, 2.0, 3.0])
        >>> found = bootstrap(lambda i: {"mean": values[i].mean()}, 3, rounds=200, seed=0)
        >>> found["mean"].value, 1.0 <= found["mean"].low <= 2.0
        (2.0, True)
    """
    generator = np.random.default_rng(seed)
    values = score(np.arange(count))
    drawn = [score(generator.integers(0, count, count)) for _ in range(rounds)]
    tail = 50.0 * (1.0 - LEVEL)
    result = {}
    for name, value in values.items():
        sample = np.array([item[name] for item in drawn])
        sample = sample[~np.isnan(sample)]
        low, high = np.percentile(sample, [tail, 100.0 - tail]) if len(sample) else (np.nan, np.nan)
        result[name] = Interval(float(value), float(low), float(high))
    return result


def class_scores(chance: Float[np.ndarray, "n C"], labels: Int[np.ndarray, "n"]) -> Scores:
    """Return AUROC, AUPRC, accuracy, log loss, Brier score and calibration error.

    The calibration error is the mean difference between predicted chance and frequency, over bins
    of equally many series; of class 1 if there are two classes, else of the predicted class.

    Args:
        chance: Probabilities.
        labels: True classes, 0 to C - 1.

    Example:
        >>> scores = class_scores(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1]))
        >>> scores["auroc"], round(scores["brier"], 3)
        (1.0, 0.05)
    """
    from osciformer.train import class_metrics

    with np.errstate(divide="ignore"):
        found = class_metrics(np.log(np.maximum(chance, 1e-300)), labels)
    hits = np.eye(chance.shape[1])[labels]
    if chance.shape[1] == 2:
        said, is_hit = chance[:, 1], labels == 1
    else:
        said, is_hit = chance.max(axis=1), chance.argmax(axis=1) == labels
    return {
        "auroc": found["auroc"],
        "auprc": found["auprc"],
        "accuracy": found["accuracy"],
        "log_loss": found["log_loss"],
        "brier": float(np.square(chance - hits).sum(axis=1).mean()),
        "calibration_error": calibration_error(said, is_hit),
    }


def calibration_error(said: Float[np.ndarray, "n"], is_hit: Any) -> float:
    """Return the mean gap between chances and frequencies, bin by bin."""
    _, said_mean, frequency, size = calibration_bins(said, is_hit)
    return float((np.abs(said_mean - frequency) * size).sum() / size.sum())


def calibration_bins(
    said: Float[np.ndarray, "n"], is_hit: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return number, mean chance, frequency and size of bins of equally many series."""
    order = np.argsort(said, kind="stable")
    parts = np.array_split(order, min(NUM_BINS, len(order)))
    means = [(said[part].mean(), np.mean(np.asarray(is_hit)[part]), len(part)) for part in parts]
    said_mean, frequency, size = (
        np.array(column, dtype=float) for column in zip(*means, strict=True)
    )
    return np.arange(len(parts)), said_mean, frequency, size


def value_scores(found: Float[np.ndarray, "n K"], truth: Float[np.ndarray, "n K"]) -> Scores:
    """Return RMSE, MAE and R², means over the targets.

    Example:
        >>> value_scores(np.array([[1.0], [2.0]]), np.array([[1.0], [4.0]]))["mae"]
        1.0
    """
    error = found - truth
    spread = np.square(truth - truth.mean(axis=0)).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(spread > 0, 1.0 - np.square(error).sum(axis=0) / spread, np.nan)
    return {
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": float(r2.mean()),
    }


@dataclass(frozen=True)
class AnswerSums:
    """Sums over the hidden values of each series, in units of the spread in training.

    Attributes:
        sums: Pinball loss, absolute and squared error, values inside the widest interval, and
            absolute error of the baseline [n, 5].
        count: Hidden values [n].
        below: How many values lie below each quantile [n, L].
    """

    sums: Float[np.ndarray, "n 5"]
    count: Float[np.ndarray, "n"]
    below: Float[np.ndarray, "n L"]

    def scores(self, index: Int[np.ndarray, "m"]) -> Scores:
        """Return pinball loss, MAE, RMSE, coverage and the gain on the baseline."""
        total = self.count[index].sum()
        if total == 0:
            return dict.fromkeys(("pinball", "mae", "rmse", "coverage", "skill"), float("nan"))
        loss, absolute, squared, inside, simple = self.sums[index].sum(axis=0) / total
        return {
            "pinball": float(loss),
            "mae": float(absolute),
            "rmse": float(np.sqrt(squared)),
            "coverage": float(inside),
            "skill": float(1.0 - absolute / simple) if simple > 0 else float("nan"),
        }


def sum_answers(
    found: Float[np.ndarray, "Q F L"],
    truth: Float[np.ndarray, "Q F"],
    baseline: Float[np.ndarray, "Q F"],
    owner: Int[np.ndarray, "Q"],
    count: int,
    levels: tuple[float, ...],
) -> AnswerSums:
    """Return the sums of each series.

    Args:
        found: Quantiles, in units of the spread.
        truth: Hidden values, NaN where there is none.
        baseline: What a simple rule says.
        owner: Series of each row.
        count: Number of series.
        levels: Of the L quantiles.
    """
    is_scored = ~np.isnan(truth)
    error = np.nan_to_num(truth)[..., None] - found
    level = np.array(levels)
    pinball = np.maximum(level * error, (level - 1.0) * error).mean(axis=-1)
    middle = error[..., levels.index(0.5)]
    inside = (error[..., 0] >= 0) & (error[..., -1] <= 0)
    parts = (pinball, np.abs(middle), np.square(middle), inside, np.abs(baseline - truth))

    def per_series(values: np.ndarray) -> np.ndarray:
        rows = np.where(is_scored, values, 0.0).sum(axis=1)
        return np.bincount(owner, weights=rows, minlength=count)

    return AnswerSums(
        np.stack([per_series(part) for part in parts], axis=1),
        per_series(np.ones_like(truth)),
        np.stack([per_series(error[..., k] <= 0) for k in range(len(levels))], axis=1),
    )
