"""Estimators with one label per series: classes, or real targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import name_some
from osciformer._types import Float, Int
from osciformer.config import SERIES_BACKBONE_DEFAULTS, SeriesModelConfig, estimator_defaults
from osciformer.data.ragged import as_plain_array
from osciformer.estimators.base import ClassifierMixin, RegressorMixin, estimator
from osciformer.estimators.series import (
    Numbered,
    SeriesData,
    SeriesEstimator,
    check_weight,
    chunks,
    labels_of,
)
from osciformer.models import SeriesModel
from osciformer.train.tasks import Classification, Regression, Task

# Fewer of the rarer class than this, and AUROC is too noisy to pick an epoch by.
FEWEST_FOR_AUROC = 10
_DEFAULTS = estimator_defaults("classification")


@estimator
class SupervisedEstimator(SeriesEstimator):
    """Estimators that map a whole series to a class or to numbers.

    Args:
        model_options: Further settings of the model, by name, besides those of `SeriesEstimator`:
            `pool`, `skip` and `statistics`, see `SeriesModelConfig`. For the backbone `osciformer`,
            `backbone_options` start from `SERIES_BACKBONE_DEFAULTS` unless they hold a preset.
    """

    dim: int = _DEFAULTS["dim"]
    num_heads: int = _DEFAULTS["num_heads"]
    dropout: float = _DEFAULTS["dropout"]
    learning_rate: float = _DEFAULTS["learning_rate"]

    model_class: ClassVar[Any] = SeriesModel
    config_class: ClassVar[Any] = SeriesModelConfig

    def _model_config(self, **of_data: Any) -> Any:
        config = super()._model_config(output_dim=self._output_dim, **of_data)
        given = config.backbone_options
        # They become part of the model's configuration, so that a saved model keeps its own.
        if config.backbone == "osciformer" and "preset" not in given:
            config = replace(config, backbone_options={**SERIES_BACKBONE_DEFAULTS, **given})
        return config

    def _numbers(self, data: SeriesData, y: Any) -> np.ndarray:
        return self._encode(self._labels(data, y))

    def _labels(self, data: SeriesData, y: Any) -> np.ndarray:
        """Return y, or the labels that the data have: one per series, and none missing."""
        y = labels_of(data) if y is None else y
        if y is None:
            raise ValueError(
                "y is not given and X has no labels; pass y, or X with labels (label='...' in the "
                "layout of a table)"
            )
        values = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
        if values.dtype.kind == "O":
            _refuse_missing(np.array([item is None or item != item for item in values.ravel()]))
            values = np.asarray(values.tolist())
        labels = as_plain_array("y", values)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim not in (1, 2) or len(labels) != len(data):
            shape = list(labels.shape)
            raise ValueError(f"y must have {len(data)} entries, one per series; got shape {shape}")
        if labels.dtype.kind == "f":
            _refuse_missing(~np.isfinite(labels.reshape(len(data), -1)).all(axis=1))
        return labels

    def _outputs(self, data: SeriesData) -> Float[np.ndarray, "n O"]:
        """Return what the model says about each series."""
        parts = []
        for chunk in chunks(data):
            settings = {"batch_size": self._prediction_batch, "shuffle": False}
            source = self._source(Numbered(chunk), **settings)
            found = np.empty((len(chunk), self.model_.config.output_dim), dtype=np.float32)
            for batch, output in self._outputs_of(source):
                found[batch.index.numpy()] = output.numpy()
            parts.append(found)
        return np.concatenate(parts)


@estimator
class OsciFormerClassifier(ClassifierMixin, SupervisedEstimator):
    """Classifier of irregularly sampled series, in scikit-learn's manner.

    X is an `IrregularSeries`, a `ParquetSeries` (read from disk in each epoch), a data frame with a
    `layout`, or a list of `(times, values)` pairs. Besides those below it has the keywords and
    attributes of `TrainedEstimator`, `SeriesEstimator` and `SupervisedEstimator`.

    Args:
        class_weight: None, `balanced`, or a dict from label to weight.
        train_options: Further settings of training, by name: `label_smoothing`; `monitor` (`loss`,
            `accuracy`, `log_loss`, `auroc`, `auprc`; `auto` is `auroc` if there are two classes
            with at least 10 validation series each, and `loss` otherwise), and those above.

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

    task: ClassVar[str] = "classification"

    @property
    def _output_dim(self) -> int:
        return len(self.classes_)

    def _learn(self, data: SeriesData, y: Any) -> np.ndarray:
        labels = self._labels(data, y)
        if labels.ndim != 1:
            shape = list(labels.shape)
            raise ValueError(f"a classifier takes one label per series; got y of shape {shape}")
        if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
            raise advise(
                ValueError,
                "y looks like a real target, not a class: it holds "
                f"{labels[labels % 1 != 0][0]!s}. Use ",
                Mention("task", "regression", "OsciFormerRegressor"),
                ", or turn y into classes",
            )
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_[0]
            raise ValueError(f"y has one class only, {only!r}; a classifier needs at least two")
        return numbers

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        return encode_classes(labels, self.classes_)

    def _strata(self, whole: Numbered) -> Any:
        return whole.numbers

    def _make_task(self, numbers: Any, watched: Any) -> Task:
        counts = np.bincount(() if watched is None else watched, minlength=len(self.classes_))
        is_ranked = len(counts) == 2 and counts.min() >= FEWEST_FOR_AUROC
        return Classification(
            num_classes=len(self.classes_),
            class_weight=_weigh_classes(self.class_weight, self.classes_, numbers),
            label_smoothing=self.settings()["label_smoothing"],
            monitor="auroc" if is_ranked else "loss",
        )

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the probability of each class, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the logarithms of the probabilities."""
        logits = torch.from_numpy(self._outputs(self._validate(X))).double()
        return logits.log_softmax(dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each series."""
        best = self._outputs(self._validate(X)).argmax(axis=1)
        found: np.ndarray = self.classes_[best]
        return found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy; `y` are the labels of X if not given."""
        data = self._validate(X)
        is_right = self._outputs(data).argmax(axis=1) == self._encode(self._labels(data, y))
        return float(np.average(is_right, weights=check_weight(sample_weight, len(data))))

    def _state(self) -> dict[str, Any]:
        task = {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}
        return {**super()._state(), "task": task}

    def _restore(self, content: Mapping[str, Any]) -> None:
        super()._restore(content)
        classes, dtype = content["task"]["classes"], content["task"]["dtype"]
        self.classes_ = np.array(classes, dtype=np.dtype(dtype))


@estimator
class OsciFormerRegressor(RegressorMixin, SupervisedEstimator):
    """Regressor of irregularly sampled series, in scikit-learn's manner.

    X is what `OsciFormerClassifier` takes; y is [n], or [n, K] for several targets. Besides those
    below it has the keywords and attributes of `TrainedEstimator`, `SeriesEstimator` and
    `SupervisedEstimator`.

    Args:
        criterion: `huber` (linear for errors above one standard deviation of the target) or `mse`.
        train_options: Further settings of training, by name: `monitor` (`loss`, which is `auto`,
            `rmse` or `mae`), and those above.

    Attributes:
        target_center_: Mean of the targets [K].
        target_scale_: Their standard deviation [K].
    """

    criterion: str = "huber"

    task: ClassVar[str] = "regression"

    @property
    def _output_dim(self) -> int:
        return len(self.target_scale_)

    def _learn(self, data: SeriesData, y: Any) -> np.ndarray:
        labels = self._labels(data, y)
        self.is_single_target_ = labels.ndim == 1
        if labels.dtype.kind not in "fiub":
            raise advise(
                TypeError,
                f"a regressor takes numbers as y; got {labels.dtype}. Use ",
                Mention("task", "classification", "OsciFormerClassifier"),
                " for classes",
            )
        columns = labels.reshape(len(labels), -1).astype(np.float64)
        self.target_center_, scale = columns.mean(axis=0), columns.std(axis=0)
        is_constant = scale <= 1e-9 * np.abs(self.target_center_) + 1e-30
        self.target_scale_ = np.where(is_constant, 1.0, scale)
        return self._encode(labels)

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        scaled = (labels.reshape(len(labels), -1) - self.target_center_) / self.target_scale_
        numbers: np.ndarray = scaled.astype(np.float32)
        return numbers

    def _make_task(self, numbers: Any, watched: Any) -> Task:
        return Regression(scale=self.target_scale_.tolist(), criterion=self.criterion)

    def predict(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Return the targets [n], or [n, K] if there are several, in their own unit."""
        return self._values(self._validate(X))

    def _values(self, data: SeriesData) -> np.ndarray:
        found = self._outputs(data) * self.target_scale_ + self.target_center_
        return found[:, 0] if self.is_single_target_ else found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R²; `y` are the labels of X if not given."""
        data = self._validate(X)
        weight = check_weight(sample_weight, len(data))
        r2_score = need("sklearn.metrics", extra="train").r2_score
        return float(r2_score(self._labels(data, y), self._values(data), sample_weight=weight))

    def _state(self) -> dict[str, Any]:
        center, scale = self.target_center_.tolist(), self.target_scale_.tolist()
        task = {"center": center, "scale": scale, "is_single": self.is_single_target_}
        return {**super()._state(), "task": task}

    def _restore(self, content: Mapping[str, Any]) -> None:
        super()._restore(content)
        task = content["task"]
        self.target_center_, self.target_scale_ = np.array(task["center"]), np.array(task["scale"])
        self.is_single_target_ = bool(task["is_single"])


def _refuse_missing(missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"y must not be missing or infinite; it is at {name_some(np.flatnonzero(missing))} "
            f"({int(missing.sum())} of {len(missing)}). Drop those series: X[mask], y[mask]"
        )


def encode_classes(labels: np.ndarray, classes: np.ndarray) -> Int[np.ndarray, "n"]:
    """Return the position of each label among the classes, and refuse an unknown one."""
    unknown = ~np.isin(labels, classes)
    if unknown.any():
        raise ValueError(
            f"y has labels that were not there in fit: {name_some(np.unique(labels[unknown]))}; "
            f"the classes are {name_some(classes)}"
        )
    return np.searchsorted(classes, labels)


def _weigh_classes(
    given: str | Mapping[Any, float] | None, classes: np.ndarray, encoded: Int[np.ndarray, "n"]
) -> list[float] | None:
    """Return the weight of each class, or None for equal weights."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        unknown = [label for label in given if label not in classes]
        if unknown:
            raise ValueError(
                f"class_weight names {name_some(unknown)}, which y does not have; its classes are "
                f"{name_some(classes)}"
            )
        return [float(given.get(label, 1.0)) for label in classes.tolist()]
    if given != "balanced":
        wanted = "None, 'balanced' or a dict from label to weight"
        raise ValueError(f"class_weight must be {wanted}; got {given!r}")
    weigh = need("sklearn.utils.class_weight", extra="train").compute_class_weight
    found: list[float] = weigh(given, classes=np.arange(len(classes)), y=encoded).tolist()
    return found
