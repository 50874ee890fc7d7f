"""Labels of series: reading them, classes and targets as numbers, and answers in their terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import name_some
from osciformer._types import Bool, Float, Int
from osciformer.data.inputs import SeriesData, check_weight, labels_of
from osciformer.data.ragged import DATES_AS_LABELS, as_plain_array
from osciformer.estimators.base import ClassifierMixin, RegressorMixin, split
from osciformer.estimators.conformal import Conformal, ScoreLevels
from osciformer.resonators.calibration import log_softmax, smooth_hits, temperature_losses
from osciformer.train.tasks import power_of_two

#: Largest size of a regression target, and its smallest standard deviation, that float64 can bear.
LARGEST_TARGET, SMALLEST_SPREAD = 1e300, 1e-290


class SeriesClassifier(Conformal, ClassifierMixin):
    """Methods of classifiers: from logits to classes and probabilities, and classes in files.

    Attributes:
        temperature_: What logits are divided by; 1 unless `calibrate` set it.
    """

    classes_: np.ndarray
    temperature_: float = 1.0
    _regressor: ClassVar[str]  # what to use for real targets, in Python
    _validate: Callable[[Any], SeriesData]  # X as series with the columns of training
    _outputs: Callable[[SeriesData], np.ndarray]  # a logit per class [n, C]

    def _learn(self, data: SeriesData, y: Any) -> Int[np.ndarray, "n"]:
        self.conformal_, self.temperature_ = None, 1.0
        labels = read_labels(data, y)
        if labels.ndim != 1:
            shape = list(labels.shape)
            raise ValueError(f"a classifier takes one label per series; got y of shape {shape}")
        fractions = _fractions(labels)
        if len(fractions):
            raise advise(
                ValueError,
                f"y looks like a real target, not a class: it holds {fractions[0]!s}. Use ",
                Mention("task", "regression", self._regressor),
                ", or turn y into classes",
            )
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            (only,) = self.classes_.tolist()
            raise ValueError(f"y has one class only, {only!r}; a classifier needs at least two")
        return numbers

    def _encode(self, labels: np.ndarray) -> Int[np.ndarray, "n"]:
        return encode_classes(labels, self.classes_)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the probability of each class, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return the logarithms of the probabilities."""
        return torch.from_numpy(self._logits(self._validate(X))).double().log_softmax(dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each series."""
        best = self._logits(self._validate(X)).argmax(axis=1)
        found: np.ndarray = self.classes_[best]
        return found

    def calibrate(self, X: Any, y: Any = None, *, probabilities: bool = False) -> Self:
        """Learn how sure to be from series that the model was not fitted to, for `predict_set`.

        Args:
            X: Series drawn like those to predict, 100 or more.
            y: Their classes; the labels of X if not given.
            probabilities: Also set `temperature_` to what makes probabilities most likely, by a
                random half of the series; sets are calibrated by the other half. The most probable
                class stays the same.
        """
        data = self._validate(X)
        classes, outputs = self._encode(read_labels(data, y)), self._outputs(data)
        logits = finite_outputs(outputs, data).astype(np.float64)
        self.temperature_ = 1.0
        if probabilities:
            rest, half = split(np.zeros(len(data), dtype=np.int64), 0.5, np.random.default_rng(0))
            if len(half) == 0:
                raise ValueError(f"probabilities need at least 2 series; got {len(data)}")
            hits = smooth_hits(classes[half], len(self.classes_))
            (scale,), _ = temperature_losses(logits[None, half], hits, np.ones(len(half)))
            self.temperature_, logits, classes = float(1.0 / scale), logits[rest], classes[rest]
        chances = np.exp(log_softmax(logits / self.temperature_))
        scores = 1.0 - chances[np.arange(len(classes)), classes]
        by_class = (scores[classes == number] for number in range(len(self.classes_)))
        self.conformal_ = tuple(map(ScoreLevels.of, (scores, *by_class)))
        return self

    def predict_set(
        self, X: Any, coverage: float = 0.9, *, per_class: bool = False
    ) -> Bool[np.ndarray, "n C"]:
        """Return which classes are in a set that holds the true one with this chance.

        It has the classes whose probability is above a threshold, and always the most probable.

        Args:
            X: The series.
            coverage: Least chance that the set of a new series holds its class, if it is drawn as
                those of `calibrate` were.
            per_class: So that this holds for the series of each class, rather than for all.
        """
        return self.sets_of(self.predict_proba(X), coverage, per_class=per_class)

    def sets_of(
        self, probabilities: Float[np.ndarray, "n C"], coverage: float, *, per_class: bool = False
    ) -> Bool[np.ndarray, "n C"]:
        """Return `predict_set` for probabilities that `predict_proba` returned."""
        of_all, *of_classes = self._score_levels()
        highest: Any = of_all.at(coverage)
        if per_class:
            names = [f"series of the class {name!r}" for name in self.classes_.tolist()]
            highest = [one.at(coverage, of) for one, of in zip(of_classes, names, strict=True)]
        best = probabilities.argmax(axis=1)[:, None] == np.arange(len(self.classes_))
        found: np.ndarray = (1.0 - probabilities <= np.asarray(highest)) | best
        return found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy; `y` are the labels of X if not given."""
        data = self._validate(X)
        is_right = self._logits(data).argmax(axis=1) == self._encode(read_labels(data, y))
        return float(np.average(is_right, weights=check_weight(sample_weight, len(data))))

    def _logits(self, data: SeriesData) -> Float[np.ndarray, "n C"]:
        return finite_outputs(self._outputs(data), data) / self.temperature_

    def _task_state(self) -> dict[str, Any]:
        state = {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}
        return {**state, "temperature": self.temperature_, **self._conformal_state()}

    def _restore_task(self, task: Mapping[str, Any]) -> None:
        self.classes_ = np.array(task["classes"], dtype=np.dtype(task["dtype"]))
        self.temperature_ = float(task.get("temperature", 1.0))
        if not 0.0 < self.temperature_ < float("inf"):
            raise ValueError(f"its temperature must be positive; got {self.temperature_}")
        self._restore_conformal(task)


class SeriesRegressor(Conformal, RegressorMixin):
    """Methods of regressors: targets in their own unit, and their scales in files."""

    target_center_: Float[np.ndarray, "K"]
    target_scale_: Float[np.ndarray, "K"]
    is_single_target_: bool
    _classifier: ClassVar[str]  # what to use for classes, in Python
    _validate: Callable[[Any], SeriesData]  # X as series with the columns of training
    _outputs: Callable[[SeriesData], np.ndarray]  # the scaled targets [n, K]

    def _learn(self, data: SeriesData, y: Any) -> Float[np.ndarray, "n K"]:
        self.conformal_ = None
        labels = as_targets(read_labels(data, y), self._classifier)
        self.is_single_target_ = labels.ndim == 1
        columns = labels.reshape(len(labels), -1).astype(np.float64)
        size = np.abs(columns).max(axis=0)
        unit = power_of_two(columns)
        self.target_center_ = (columns / unit).mean(axis=0) * unit
        spread = (columns / unit).std(axis=0) * unit
        is_constant = spread <= 1e-9 * np.abs(self.target_center_)
        self.target_scale_ = np.where(is_constant, 1.0, spread)
        bad = (size > LARGEST_TARGET) | (~is_constant & (spread < SMALLEST_SPREAD))
        if bad.any():
            place = int(np.argmax(bad))
            raise ValueError(
                f"y has numbers up to {size[place]:g} with a spread of {spread[place]:g}; sizes up "
                f"to {LARGEST_TARGET:g} and spreads from {SMALLEST_SPREAD:g} can be "
                "computed with. Use another unit"
            )
        return self._encode(labels)

    def _scaled(self, labels: np.ndarray) -> Float[np.ndarray, "n K"]:
        """Return targets in the unit of the model, float64."""
        columns = as_targets(labels, self._classifier).reshape(len(labels), -1)
        scaled: np.ndarray = (columns - self.target_center_) / self.target_scale_
        return scaled

    def _encode(self, labels: np.ndarray) -> Float[np.ndarray, "n K"]:
        scaled = self._scaled(labels)
        far = ~(np.abs(scaled) <= np.finfo(np.float32).max).all(axis=1)
        if far.any():
            place = int(np.argmax(far))
            raise ValueError(
                f"y[{place}] = {name_some(labels.reshape(len(labels), -1)[place])} is too far from "
                "the targets of training; check its unit"
            )
        return scaled.astype(np.float32)

    def predict(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Return the targets [n], or [n, K] if there are several, in their own unit."""
        return self._values(self._validate(X))

    def _values(self, data: SeriesData) -> np.ndarray:
        found = finite_outputs(self._outputs(data), data)
        values = finite_outputs(found * self.target_scale_ + self.target_center_, data)
        return values[:, 0] if self.is_single_target_ else values

    def calibrate(self, X: Any, y: Any = None) -> Self:
        """Learn how far off predictions are, for `predict_interval`.

        Args:
            X: Series drawn like those to predict, 100 or more, to which the model was not fitted.
            y: Their targets; the labels of X if not given.
        """
        data = self._validate(X)
        targets = self._scaled(read_labels(data, y))
        errors = np.abs(finite_outputs(self._outputs(data), data) - targets)
        self.conformal_ = tuple(map(ScoreLevels.of, errors.T))
        return self

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Float[np.ndarray, "n K 2"]:
        """Return the ends of intervals [n, 2], or [n, K, 2] if there are several targets.

        Args:
            X: The series.
            coverage: Least chance that the interval of a target of a new series holds it, if the
                series is drawn as those of `calibrate` were.
        """
        margin, values = self.margin(coverage), self.predict(X)
        return np.stack((values - margin, values + margin), axis=-1)

    def margin(self, coverage: float) -> Float[np.ndarray, "K"]:
        """Return half the width of the intervals, a number or [K] as a prediction is."""
        scaled = np.array([levels.at(coverage) for levels in self._score_levels()])
        found: np.ndarray = scaled * self.target_scale_
        return found[0] if self.is_single_target_ else found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R²; `y` are the labels of X if not given."""
        data = self._validate(X)
        weight = check_weight(sample_weight, len(data))
        r2_score = need("sklearn.metrics", extra="train").r2_score
        # Scaled, as squares of the targets need not be representable; R² is the same.
        found = finite_outputs(self._outputs(data), data)
        return float(r2_score(self._scaled(read_labels(data, y)), found, sample_weight=weight))

    def _task_state(self) -> dict[str, Any]:
        center, scale = self.target_center_.tolist(), self.target_scale_.tolist()
        state = {"center": center, "scale": scale, "is_single": self.is_single_target_}
        return {**state, **self._conformal_state()}

    def _restore_task(self, task: Mapping[str, Any]) -> None:
        self.target_center_, self.target_scale_ = np.array(task["center"]), np.array(task["scale"])
        self.is_single_target_ = bool(task["is_single"])
        self._restore_conformal(task)


def finite_outputs(outputs: np.ndarray, data: SeriesData) -> np.ndarray:
    """Return what a model says about each series, and refuse infinity and NaN."""
    bad = ~np.isfinite(outputs).all(axis=1)
    if bad.any():
        raise ValueError(
            f"the prediction for series {data.ids[int(np.argmax(bad))]!s} is not finite (so for "
            f"{int(bad.sum())} of {len(bad)} series); look for times or values of extreme size"
        )
    return outputs


def read_labels(data: SeriesData, y: Any) -> np.ndarray:
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
    if labels.dtype.kind == "M":
        raise TypeError(f"y must be numbers or text; got dates. {DATES_AS_LABELS}")
    if labels.dtype.kind == "f":
        _refuse_missing(~np.isfinite(labels.reshape(len(data), -1)).all(axis=1))
    return labels


def _refuse_missing(missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"y must not be missing or infinite; it is at {name_some(np.flatnonzero(missing))} "
            f"({int(missing.sum())} of {len(missing)}). Drop those series: X[mask], y[mask]"
        )


def _fractions(labels: np.ndarray) -> np.ndarray:
    """Return labels with a fraction; of text, only if they hardly repeat and all are numbers."""
    if labels.dtype.kind == "U" and 2 * len(np.unique(labels)) > len(labels):
        try:
            labels = labels.astype(np.float64)
        except ValueError:
            return labels[:0]
    return labels[labels % 1 != 0] if labels.dtype.kind == "f" else labels[:0]


def as_targets(labels: np.ndarray, classifier: str) -> np.ndarray:
    """Return real targets, also those that are text such as '1.5'; `classifier` is for others."""
    if labels.dtype.kind in "fiub":
        return labels
    numbers = [None if number is None else float(number) for number in map(_as_number, labels.flat)]
    if None in numbers:
        raise advise(
            TypeError,
            f"a regressor takes numbers as y; got {name_some([labels.flat[numbers.index(None)]])}. "
            "Use ",
            Mention("task", "classification", classifier),
            " for classes",
        )
    targets = np.array(numbers, dtype=np.float64).reshape(labels.shape)
    _refuse_missing(np.asarray(~np.isfinite(targets.reshape(len(labels), -1)).all(axis=1)))
    return targets


def _as_number(text: Any) -> Any:
    """Return the number or truth value that a text means; None if it means none."""
    if not isinstance(text, str):
        return text
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        # Python would read 1_0 as 10.
        return None if "_" in word else int(word) if word.lstrip("+-").isdecimal() else float(word)
    except ValueError:
        return None


def find_classes(labels: Iterable[Any], classes: np.ndarray) -> list[int]:
    """Return the position of each label among the classes, or -1.

    Classes that are numbers or truth values are also found by text, and the other way round: CSV
    has text only, Parquet has types, and a flag is text whatever it names.

    Example:
        >>> find_classes(["1", "01", "true", "?"], np.array([0, 1]))
        [1, 1, 1, -1]
        >>> find_classes([1, 1.0, True, 2], np.array(["1", "True"]))
        [0, 0, 1, -1]
    """
    position = {name: number for number, name in enumerate(classes.tolist())}
    is_text = classes.dtype.kind == "U"

    def find(label: Any) -> int:
        names: tuple[Any, ...] = (label,) if isinstance(label, str) else (str(label),)
        if not is_text:
            names = (_as_number(label),)
        elif isinstance(label, bool):
            names = (str(label), str(label).lower(), str(label).upper())
        elif isinstance(label, float) and label.is_integer():
            names = (str(label), str(int(label)))
        return next((position[name] for name in names if name in position), -1)

    return [find(label.item() if hasattr(label, "item") else label) for label in labels]


def encode_classes(labels: np.ndarray, classes: np.ndarray) -> Int[np.ndarray, "n"]:
    """Return the position of each label among the classes, and refuse an unknown one."""
    entries, numbers = np.unique(labels, return_inverse=True)
    positions = np.array(find_classes(entries, classes), dtype=np.int64)
    if (positions < 0).any():
        raise ValueError(
            f"y has labels that were not there in fit: {name_some(entries[positions < 0])}; "
            f"the classes are {name_some(classes)}"
        )
    return positions[numbers.reshape(labels.shape)]


def weigh_classes(
    given: str | Mapping[Any, float] | None, classes: np.ndarray, encoded: Int[np.ndarray, "n"]
) -> list[float] | None:
    """Return the weight of each class, or None for equal weights."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        named = dict(zip(given, find_classes(given, classes), strict=True))
        unknown = [label for label, position in named.items() if position < 0]
        if unknown:
            raise ValueError(
                f"class_weight names {name_some(unknown)}, which y does not have; its classes are "
                f"{name_some(classes)}"
            )
        weights = dict.fromkeys(range(len(classes)), 1.0)
        for label, position in named.items():
            weight = given[label]
            if not isinstance(weight, Real) or not 0 <= weight < float("inf"):
                raise ValueError(
                    f"class_weight must be numbers that are not negative; that of {label!r} is "
                    f"{weight!r}"
                )
            weights[position] = float(weight)
        if len(set(named.values())) < len(named):
            raise ValueError(f"class_weight names a class twice, in {name_some(named)}")
        return list(weights.values())
    if given != "balanced":
        wanted = "None, 'balanced' or a dict from label to weight"
        raise ValueError(f"class_weight must be {wanted}; got {given!r}")
    weigh = need("sklearn.utils.class_weight", extra="train").compute_class_weight
    found: list[float] = weigh(given, classes=np.arange(len(classes)), y=encoded).tolist()
    return found
