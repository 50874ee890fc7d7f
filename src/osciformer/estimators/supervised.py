"""Estimators with one label per series: classes, or real targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import name_some
from osciformer._types import Float, Int
from osciformer.config import SERIES_BACKBONE_DEFAULTS, SeriesModelConfig, estimator_defaults
from osciformer.data.ragged import as_plain_array
from osciformer.estimators.base import estimator, split
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

if TYPE_CHECKING:
    from sklearn.base import ClassifierMixin, RegressorMixin
else:
    ClassifierMixin = need("sklearn.base", extra="train").ClassifierMixin
    RegressorMixin = need("sklearn.base", extra="train").RegressorMixin

# Fewer of the rarer class than this, and AUROC is too noisy to pick an epoch by.
FEWEST_FOR_AUROC = 10
_DEFAULTS = estimator_defaults("classification")


@estimator
class SupervisedEstimator(SeriesEstimator):
    """Estimators that map a whole series to a class or to numbers.

    Args:
        dim: Width of the model.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        learning_rate: Highest learning rate.
        model_options: Further settings of the model, by name, besides those of `SeriesEstimator`:
            `pool` (how states become one: any of `last`, `mean` and `max`), `skip` (show summary
            statistics of the series to the head as well) and `statistics` (which ones, of each
            feature; all of them by default: `last`, `mean`, `min`, `max`, `rise`, last minus first,
            `count`, its logarithm, `std`, `age`, time since the last measurement, and `first`). The
            `scaling` is `asinh`. For the backbone `osciformer`, `backbone_options` start from
            `SERIES_BACKBONE_DEFAULTS` unless they hold a preset.
        train_options: As of `TrainedEstimator`; `weight_averaging` is 0.99.
    """

    dim: int = _DEFAULTS["dim"]
    num_heads: int = _DEFAULTS["num_heads"]
    dropout: float = _DEFAULTS["dropout"]
    learning_rate: float = _DEFAULTS["learning_rate"]

    model_class: ClassVar[Any] = SeriesModel
    config_class: ClassVar[Any] = SeriesModelConfig

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, validation_data: Any = None
    ) -> Self:
        """Train on series and their labels.

        Args:
            X: The series.
            y: Class [n], or targets [n] or [n, K], of each series; the labels of X if not given.
            sample_weight: Weight of each series [n].
            validation_data: Series for early stopping, `(X, y)` or X with labels, in place of
                `validation_fraction` of X.
        """
        data = self._validate_training(X)
        seed = self._start()
        labels = self._labels(data, y)
        self._learn_labels(labels)
        numbers = self._encode(labels)
        validation = None
        if validation_data is not None:
            is_pair = isinstance(validation_data, tuple) and len(validation_data) == 2
            other_X, other_y = validation_data if is_pair else (validation_data, None)
            other = self._with_same_columns(other_X)
            validation = Numbered(other, self._encode(self._labels(other, other_y)))
        fraction = 0.0 if validation is not None else self.validation_fraction
        parts = split(self._strata(numbers), fraction, np.random.default_rng(seed))
        watched = numbers[parts[1]] if validation is None else validation.numbers
        assert watched is not None
        self._fit_series(
            Numbered(data, numbers),
            validation,
            parts,
            task=self._make_task(numbers, watched),
            seed=seed,
            generator=np.random.default_rng(seed),
            sample_weight=sample_weight,
            clip=self.settings()["clip"],
            output_dim=self._output_dim,
        )
        return self

    def _model_config(self, **of_data: Any) -> Any:
        config = super()._model_config(**of_data)
        given = config.backbone_options
        # They become part of the model's configuration, so that a saved model keeps its own.
        if config.backbone == "osciformer" and "preset" not in given:
            options = {**SERIES_BACKBONE_DEFAULTS, **given}
            config = type(config)(**{**vars(config), "backbone_options": options})
        return config

    @property
    def _output_dim(self) -> int:
        raise NotImplementedError

    def _learn_labels(self, labels: np.ndarray) -> None:
        """Learn classes or scales from the labels of training."""
        raise NotImplementedError

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        """Return labels as the numbers that the model is trained with."""
        raise NotImplementedError

    def _strata(self, numbers: np.ndarray) -> Int[np.ndarray, "n"]:
        """Return the classes that a split keeps in proportion."""
        return np.zeros(len(numbers), dtype=np.int64)

    def _make_task(self, numbers: np.ndarray, watched: np.ndarray) -> Task:
        """Return the task; `watched` are the numbers of the validation series."""
        raise NotImplementedError

    def _labels(self, data: SeriesData, y: Any) -> np.ndarray:
        """Return y, or the labels that the data have, as an array without missing entries."""
        return _check_labels(labels_of(data) if y is None else y, len(data))

    def _outputs(self, data: SeriesData) -> Float[np.ndarray, "n O"]:
        """Return what the model says about each series."""
        parts = []
        for chunk in chunks(data):
            source = self._source(Numbered(chunk), self._prediction_batch, shuffle=False)
            found = np.empty((len(chunk), self.model_.config.output_dim), dtype=np.float32)
            for batch, output in self._outputs_of(source):
                found[batch.index.numpy()] = output.numpy()
            parts.append(found)
        return np.concatenate(parts)


@estimator
class OsciFormerClassifier(ClassifierMixin, SupervisedEstimator):
    """Classifier of irregularly sampled series, in scikit-learn's manner.

    X is an `IrregularSeries`, a `ParquetSeries` (read from disk in each epoch), a data frame with a
    `layout`, or a list of `(times, values)` pairs.

    Besides those below it has the arguments and attributes of `TrainedEstimator`,
    `SeriesEstimator` and `SupervisedEstimator`; all are keywords.

    Args:
        class_weight: None, `balanced`, or a dict from label to weight.
        train_options: Further settings of training, by name: `label_smoothing` (part of the target
            that is spread over all classes), `monitor` (metric that picks the best epoch: `loss`,
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

    def _learn_labels(self, labels: np.ndarray) -> None:
        self.classes_ = _find_classes(labels)

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        return encode_classes(labels, self.classes_)

    def _strata(self, numbers: np.ndarray) -> Int[np.ndarray, "n"]:
        return numbers

    def _make_task(self, numbers: np.ndarray, watched: np.ndarray) -> Task:
        counts = np.bincount(watched, minlength=len(self.classes_))
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

    def _task_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        self.classes_ = np.array(state["classes"], dtype=np.dtype(state["dtype"]))


@estimator
class OsciFormerRegressor(RegressorMixin, SupervisedEstimator):
    """Regressor of irregularly sampled series, in scikit-learn's manner.

    X is what `OsciFormerClassifier` takes; y is [n], or [n, K] for several targets. Besides those
    below it has the arguments and attributes of `TrainedEstimator`, `SeriesEstimator` and
    `SupervisedEstimator`; all are keywords.

    Args:
        criterion: `huber` (squared for errors below one standard deviation of the target, linear
            beyond) or `mse`.
        train_options: Further settings of training, by name: `monitor` (metric that picks the best
            epoch: `loss`, `rmse`, `mae`; `auto` is `loss`), and those above.

    Attributes:
        target_center_: Mean of the targets [K].
        target_scale_: Their standard deviation [K].
    """

    criterion: str = "huber"

    task: ClassVar[str] = "regression"

    @property
    def _output_dim(self) -> int:
        return len(self.target_scale_)

    def _learn_labels(self, labels: np.ndarray) -> None:
        self.is_single_target_ = labels.ndim == 1
        self.target_center_, self.target_scale_ = _find_scale(labels)

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        scaled = (labels.reshape(len(labels), -1) - self.target_center_) / self.target_scale_
        numbers: np.ndarray = scaled.astype(np.float32)
        return numbers

    def _make_task(self, numbers: np.ndarray, watched: np.ndarray) -> Task:
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


def _check_labels(y: Any, count: int) -> np.ndarray:
    """Return labels as a plain array with one entry per series, none of them missing."""
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
    if labels.ndim not in (1, 2) or len(labels) != count:
        raise ValueError(
            f"y must have {count} entries, one per series; got the shape {list(labels.shape)}"
        )
    if labels.dtype.kind == "f":
        _refuse_missing(~np.isfinite(labels.reshape(count, -1)).all(axis=1))
    return labels


def _refuse_missing(missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"y must not be missing or infinite; it is at {name_some(np.flatnonzero(missing))} "
            f"({int(missing.sum())} of {len(missing)}). Drop those series: X[mask], y[mask]"
        )


def _find_classes(labels: np.ndarray) -> np.ndarray:
    """Return the classes that occur, sorted; refuse what is no class, and a single one."""
    if labels.ndim != 1:
        raise ValueError(
            f"a classifier takes one label per series; got y of shape {list(labels.shape)}"
        )
    if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
        raise advise(
            ValueError,
            f"y looks like a real target, not a class: it holds {labels[labels % 1 != 0][0]!s}. "
            "Use ",
            Mention("task", "regression", "OsciFormerRegressor"),
            ", or turn y into classes",
        )
    classes = np.unique(labels)
    if len(classes) < 2:
        raise ValueError(
            f"y has one class only, {classes[0]!r}; a classifier needs series of at least two"
        )
    return classes


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
    class_weight: str | Mapping[Any, float] | None,
    classes: np.ndarray,
    encoded: Int[np.ndarray, "n"],
) -> list[float] | None:
    """Return the weight of each class, or None for equal weights.

    Example:
        >>> _weigh_classes("balanced", np.array(["a", "b"]), np.array([0, 0, 0, 1]))
        [0.6666666666666666, 2.0]
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping):
        if class_weight != "balanced":
            raise ValueError(
                f"class_weight must be None, 'balanced' or a dict from label to weight; "
                f"got {class_weight!r}"
            )
        weigh = need("sklearn.utils.class_weight", extra="train").compute_class_weight
        found = weigh("balanced", classes=np.arange(len(classes)), y=encoded)
        return [float(weight) for weight in found]
    unknown = [label for label in class_weight if label not in classes]
    if unknown:
        raise ValueError(
            f"class_weight names {name_some(unknown)}, which y does not have; its classes are "
            f"{name_some(classes)}"
        )
    return [float(class_weight.get(label, 1.0)) for label in classes.tolist()]


def _find_scale(labels: np.ndarray) -> tuple[Float[np.ndarray, "K"], Float[np.ndarray, "K"]]:
    """Return mean and spread of each target; the spread of a constant one is 1.

    Example:
        >>> _find_scale(np.array([1.0, 3.0]))
        (array([2.]), array([1.]))
    """
    if labels.dtype.kind not in "fiub":
        raise advise(
            TypeError,
            f"a regressor takes numbers as y; got {labels.dtype}. Use ",
            Mention("task", "classification", "OsciFormerClassifier"),
            " for classes",
        )
    columns = labels.reshape(len(labels), -1).astype(np.float64)
    center, scale = columns.mean(axis=0), columns.std(axis=0)
    return center, np.where(scale > 1e-9 * np.abs(center) + 1e-30, scale, 1.0)
