"""Classes of irregular series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from osciformer._optional import need
from osciformer._types import Float
from osciformer.estimators import inputs, targets
from osciformer.estimators.splits import stratified_split
from osciformer.estimators.supervised import SupervisedEstimator
from osciformer.train.tasks import Classification

if TYPE_CHECKING:
    from sklearn.base import ClassifierMixin
else:
    ClassifierMixin = need("sklearn.base", extra="train").ClassifierMixin

# Fewer of the rarer class than this, and AUROC is too noisy to pick an epoch by.
FEWEST_FOR_AUROC = 10


@dataclass(eq=False, repr=False, kw_only=True)
class OsciFormerClassifier(ClassifierMixin, SupervisedEstimator):
    """Classifier of irregularly sampled series, in scikit-learn's manner.

    X is an `IrregularSeries`, a `ParquetSeries` (read from disk in each epoch), a data frame with a
    `layout`, or a list of `(times, values)` pairs.

    Besides those below it has the arguments and attributes of `SeriesEstimator` and `pool`,
    `skip`, `statistics` and defaults of `SupervisedEstimator`; all are keywords.

    Args:
        class_weight: None, `balanced`, or a dict from label to weight.
        label_smoothing: Part of the target that is spread over all classes.
        monitor: Metric that picks the best epoch: `loss`, `accuracy`, `log_loss`, `auroc`, `auprc`.
            `auto` is `auroc` if there are two classes with at least 10 validation series each, and
            `loss` otherwise.

    Attributes:
        classes_: The classes, sorted.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> times = [[0.0, 1.0 + k, 3.0 + k] for k in range(8)]
        >>> values = [[[k % 2], [1.0], [k % 2]] for k in range(8)]
        >>> X = IrregularSeries.from_arrays(times, values, labels=["no", "yes"] * 4)
        >>> model = OsciFormerClassifier(dim=8, num_heads=1, max_epochs=1, random_state=0).fit(X)
        >>> model.classes_, model.predict_proba(X).shape
        (array(['no', 'yes'], dtype='<U3'), (8, 2))
    """

    class_weight: str | Mapping[Any, float] | None = None
    label_smoothing: float = 0.0

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, validation_data: Any = None
    ) -> Self:
        """Train on series and their classes.

        Args:
            X: The series.
            y: Class of each series [n]; the labels of X if not given.
            sample_weight: Weight of each series [n].
            validation_data: Series for early stopping, `(X, y)` or X with labels, in place of
                `validation_fraction` of X.
        """
        data = self._first_look(X)
        seed = self._draw_seed()
        labels = self._labels(data, y)
        self.classes_ = targets.find_classes(labels)
        encoded = self._encode(labels)
        given = self._validation(validation_data)
        fraction = 0.0 if given is not None else self.validation_fraction
        split = stratified_split(encoded, fraction, np.random.default_rng(seed))
        watched = encoded[split[1]] if given is None else given[1]
        counts = np.bincount(watched, minlength=len(self.classes_))
        is_ranked = len(counts) == 2 and counts.min() >= FEWEST_FOR_AUROC
        task = Classification(
            num_classes=len(self.classes_),
            class_weight=targets.weigh_classes(self.class_weight, self.classes_, encoded),
            label_smoothing=self.label_smoothing,
            monitor="auroc" if is_ranked else "loss",
        )
        self._fit(
            data,
            encoded,
            split,
            given,
            sample_weight=sample_weight,
            task=task,
            output_dim=len(self.classes_),
            seed=seed,
        )
        return self

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        return targets.encode_classes(labels, self.classes_)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the probability of each class, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the logarithms of the probabilities."""
        logits = self._outputs(X).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_chance: np.ndarray = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return log_chance

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each series."""
        best = self._outputs(X).argmax(axis=1)
        found: np.ndarray = self.classes_[best]
        return found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy; `y` are the labels of X if not given."""
        data = self._look_again(X)
        encoded = self._encode(self._labels(data, y))
        weight = inputs.check_weight(sample_weight, len(data))
        return float(np.average(self._outputs(data).argmax(axis=1) == encoded, weights=weight))

    def _task_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        self.classes_ = np.array(state["classes"], dtype=np.dtype(state["dtype"]))
