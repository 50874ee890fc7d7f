"""Real targets of irregular series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from osciformer._optional import need
from osciformer._types import Float
from osciformer.estimators import inputs, targets
from osciformer.estimators.splits import random_split
from osciformer.estimators.supervised import SupervisedEstimator
from osciformer.train.tasks import Regression

if TYPE_CHECKING:
    from sklearn.base import RegressorMixin
else:
    RegressorMixin = need("sklearn.base", extra="train").RegressorMixin


@dataclass(eq=False, repr=False, kw_only=True)
class OsciFormerRegressor(RegressorMixin, SupervisedEstimator):
    """Regressor of irregularly sampled series, in scikit-learn's manner.

    X is what `OsciFormerClassifier` takes; y is [n], or [n, K] for several targets. Besides those
    below it has the arguments and attributes of `SeriesEstimator` and `pool`, `skip`,
    `statistics` and defaults of `SupervisedEstimator`; all are keywords.

    Args:
        criterion: `huber` (squared for errors below one standard deviation of the target, linear
            beyond) or `mse`.
        monitor: Metric that picks the best epoch: `loss`, `rmse`, `mae`; `auto` is `loss`.

    Attributes:
        target_center_: Mean of the targets [K].
        target_scale_: Their standard deviation [K].
    """

    criterion: str = "huber"

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, validation_data: Any = None
    ) -> Self:
        """Train on series and their targets.

        Args:
            X: The series.
            y: Targets [n] or [n, K]; the labels of X if not given.
            sample_weight: Weight of each series [n].
            validation_data: Series for early stopping, `(X, y)` or X with labels, in place of
                `validation_fraction` of X.
        """
        data = self._first_look(X)
        seed = self._draw_seed()
        labels = self._labels(data, y)
        self.is_single_target_ = labels.ndim == 1
        self.target_center_, self.target_scale_ = targets.find_scale(labels)
        scaled = self._encode(labels)
        given = self._validation(validation_data)
        fraction = 0.0 if given is not None else self.validation_fraction
        self._fit(
            data,
            scaled,
            random_split(len(data), fraction, np.random.default_rng(seed)),
            given,
            sample_weight=sample_weight,
            task=Regression(scale=self.target_scale_.tolist(), criterion=self.criterion),
            output_dim=scaled.shape[1],
            seed=seed,
        )
        return self

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        scaled = (labels.reshape(len(labels), -1) - self.target_center_) / self.target_scale_
        numbers: np.ndarray = scaled.astype(np.float32)
        return numbers

    def predict(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Return the targets [n], or [n, K] if there are several, in their own unit."""
        found = self._outputs(X) * self.target_scale_ + self.target_center_
        return found[:, 0] if self.is_single_target_ else found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R²; `y` are the labels of X if not given."""
        data = self._look_again(X)
        labels = self._labels(data, y)
        weight = inputs.check_weight(sample_weight, len(data))
        return float(super().score(data, labels, weight))

    def _task_state(self) -> dict[str, Any]:
        return {
            "center": self.target_center_.tolist(),
            "scale": self.target_scale_.tolist(),
            "is_single": self.is_single_target_,
        }

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        self.target_center_ = np.array(state["center"])
        self.target_scale_ = np.array(state["scale"])
        self.is_single_target_ = bool(state["is_single"])
