"""What a model of a table is given, and how its answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from osciformer._types import Float
from osciformer.data import IrregularSeries

Task = Literal["classification", "regression", "interpolation", "forecasting"]
#: Tasks that ask for values at times, and not for a label.
QUERY_TASKS = ("interpolation", "forecasting")
Metric = Callable[[np.ndarray, np.ndarray], float]  # of true and predicted values


class Part(NamedTuple):
    """Series, and what is asked of them."""

    series: IrregularSeries  #: What a model sees; with labels, if these are asked.
    asked: IrregularSeries | None = None  #: Times and true values, if these are asked.

    @property
    def truth(self) -> np.ndarray:
        """Labels [n], or values [Q, F]."""
        return np.asarray(self.series.labels) if self.asked is None else self.asked.values


@dataclass(frozen=True)
class Problem:
    """A task with its parts; a model is fitted to the first two, and the others are scored once.

    Args:
        task: What is asked.
        train: What models learn from.
        validation: What decides the best epoch, and the settings.
        tests: Parts to score, by name.
        settings: Of all neural models, by the names of `estimator_arguments`.
        thin: For queries: what is left of the series that a model sees in training, anew each
            epoch.
    """

    task: Task
    train: Part
    validation: Part
    tests: Mapping[str, Part]
    settings: Mapping[str, Any] = field(default_factory=dict)
    thin: Callable[[IrregularSeries, np.random.Generator], IrregularSeries] | None = None


def accuracy(truth: np.ndarray, found: np.ndarray) -> float:
    """Return the part of the series whose class is right, in per cent."""
    return 100.0 * float(np.mean(truth == found))


def rmse(truth: Float[np.ndarray, "*B"], found: Float[np.ndarray, "*B"]) -> float:
    """Return the root of the mean squared error of all values."""
    return float(np.sqrt(np.mean(np.square(found - truth))))


#: Of each task, the first of them decides on the validation part.
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "classification": {"accuracy": accuracy},
    **{task: {"rmse": rmse} for task in ("regression", *QUERY_TASKS)},
}
#: Metrics of which more is better.
RISING = ("accuracy",)


def split_in_three(
    count: int, generator: np.random.Generator, shares: tuple[float, float] = (0.7, 0.15)
) -> list[np.ndarray]:
    """Return positions of a training, a validation and a test part, drawn at random."""
    ends = np.round(np.cumsum(shares) * count).astype(int)
    return [np.sort(part) for part in np.split(generator.permutation(count), ends)]
