"""Classifier and regressor on features of driven oscillators: a linear model, in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from osciformer._optional import need
from osciformer._text import check_choice
from osciformer._types import Float, Tensor
from osciformer.data.inputs import SeriesData, as_series, check_weight, chunks, take
from osciformer.data.tables import Layout
from osciformer.estimators.base import SavedEstimator, draw_seed, estimator
from osciformer.estimators.labels import SeriesClassifier, SeriesRegressor, weigh_classes
from osciformer.resonators.along_time import ResponseAlongTime, respond_along
from osciformer.resonators.explanation import heaviest, sum_importance
from osciformer.resonators.families import time_scales
from osciformer.resonators.features import SAMPLE_SIZE, ResonatorFeatures
from osciformer.resonators.linear import (
    CHOICE_SIZE,
    HEADS,
    LeftOut,
    LinearHead,
    MatrixRows,
    Rows,
)
from osciformer.resonators.trees import TreeShare
from osciformer.train.tasks import class_metrics, root_mean_square

# Features of more bytes are computed part by part, and more than once.
MEMORY = 1 << 30
NUM_PERIODS = 32  # of a response along time


@dataclass(frozen=True)
class FeatureRows:
    """Features of series that are computed as they are needed."""

    features: ResonatorFeatures
    data: SeriesData
    report: Callable[[int], None]  # called with the number of series of each part

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: Any) -> Float[np.ndarray, "m P"]:
        """Return the features of some series: increasing positions, or `slice(None)`."""
        if isinstance(index, slice):
            return np.concatenate(list(self.blocks()))
        return np.concatenate(list(self.features.transform_parts(take(self.data, index))))

    def blocks(self) -> Iterator[Float[np.ndarray, "m P"]]:
        """Yield the features of all series, in order."""
        for part in self.features.transform_parts(self.data):
            self.report(len(part))
            yield part


@estimator
class ResonatorEstimator(SavedEstimator):
    """What both estimators on resonator features have.

    Args:
        families: Names of the families of features, see `osciformer.resonators`; None for those
            that tell most about series left out.
        layout: For data frames as X: a `Layout`, or a dict of its arguments.
        random_state: Seed, or a NumPy `RandomState`, or None. With a seed, the model is the same
            each time.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line at the end.

    Attributes:
        features_: The fitted `ResonatorFeatures`.
        head_: The fitted linear model.
        trees_: Boosted trees that are mixed with it, or None.
        left_out_scores_: Scores of training series, each by the model of the others.
        fit_seconds_: Seconds that `fit` took.
        n_features_in_: Number of features F.
        feature_names_in_: Their names.
        static_names_in_: Names of the static features.
        time_axis_: What the times mean.
    """

    families: Sequence[str] | None = None
    layout: Layout | Mapping[str, Any] | None = None
    random_state: Any = None
    verbose: int = 0

    model: ClassVar[str] = "resonator"
    _fitted_attribute: ClassVar[str] = "head_"
    # Groups of families that are there for those who name them.
    _unused_groups: ClassVar[Sequence[str]] = ()

    # `SeriesClassifier` and `SeriesRegressor` have them.
    _learn: ClassVar[Callable[..., np.ndarray]]
    _task_state: ClassVar[Callable[..., dict[str, Any]]]
    _restore_task: ClassVar[Callable[..., None]]

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn features and a linear model.

        Args:
            X: The series.
            y: Class [n], or targets [n] or [n, K]; the labels of X if not given.
            sample_weight: Weight of each series [n].
        """
        data = as_series(X, self.layout)
        self._fit(data, self._learn(data, y), check_weight(sample_weight, len(data)))
        return self

    def _fit(self, data: SeriesData, numbers: np.ndarray, weight: np.ndarray | None) -> LeftOut:
        """Fit to numbers in place of labels, and return what each series gets left out."""
        started = time.perf_counter()
        self._head_settings()  # refuses bad settings before the work
        weight = self._weigh(numbers, weight)
        seed = draw_seed(self.random_state)
        features = ResonatorFeatures(families=self.families, random_state=seed).fit(data)
        bar = need("tqdm", extra="train").tqdm(
            total=len(data), unit="series", desc="features", disable=self.verbose != 1
        )
        with bar:
            rows: Rows = FeatureRows(features, data, bar.update)
            if self.families is None:
                groups = {family.group for family in features.families_}
                features.keep(sorted(groups.difference(self._unused_groups)))
                index = np.sort(np.random.default_rng(seed).permutation(len(data))[:CHOICE_SIZE])
                is_whole = len(index) == len(data)
                some = rows.take(slice(None) if is_whole else index)
                judges = None if weight is None else weight[index]
                head = self._make_head(features, seed)
                stays = features.keep(head.choose(some, numbers[index], judges))
                if is_whole:
                    rows = MatrixRows(some[:, stays])
            head = self._make_head(features, seed)
            if not isinstance(rows, MatrixRows) and len(data) * len(head.families) * 4 <= MEMORY:
                rows = MatrixRows(rows.take(slice(None)))
            left_out = head.fit(rows, numbers, weight)
        trees = None
        is_seen = [family.group == "summary" for family in features.families_]
        if self._may_have_trees() and any(is_seen) and isinstance(rows, MatrixRows):
            columns = np.flatnonzero(np.array(is_seen)[head.families])
            given = (rows.matrix, columns, numbers, weight, left_out, seed)
            trees, left_out = TreeShare.fit(*given, has_bar=self.verbose == 1)
        self._remember(features, head, trees)
        self.left_out_scores_ = self._judge(left_out.outputs, numbers[left_out.places])
        self.fit_seconds_ = time.perf_counter() - started
        if self.verbose > 1:
            scores = " ".join(f"{name} {x:.4f}" for name, x in self.left_out_scores_.items())
            size = f"{len(data)} series, {len(head.families)} features, {self.fit_seconds_:.1f} s"
            print(f"{size}; left out: {scores}", file=sys.stderr, flush=True)
        return left_out

    def _make_head(self, features: ResonatorFeatures, seed: int) -> LinearHead:
        families = features.families_
        owner = np.repeat(np.arange(len(families)), [len(family.names()) for family in families])
        powers, groups = [f.power for f in families], [f.group for f in families]
        settings = self._head_settings()
        return LinearHead(owner, powers=powers, groups=groups, seed=seed, **settings)

    def explain(self, X: Any = None, *, top: int = 10) -> list[dict[str, Any]]:
        """Return the heaviest features of each output, the heaviest first, a dict each.

        `output` is a class (of two, the second) or the number of a target; `weight` is the change
        of its logit, or of the target, for one standard deviation of the feature; `importance`
        the mean size of what the feature adds, over X or, without X, about as in training.
        """
        weights, sizes = self._effects(X)
        return heaviest(self.features_.names(), weights, sizes, self._output_names(), top)

    def importance(self, X: Any = None) -> list[dict[str, Any]]:
        """Return how much each variable and period counts, in parts of 1, the largest first.

        A period of None stands for features without one.
        """
        return sum_importance(self.features_.names(), self._effects(X)[1])

    def response(
        self, X: Any, *, periods: Any = None, q: float = 2.0, num_times: int = 200
    ) -> ResponseAlongTime:
        """Return how oscillators respond along the time of one series, and a way to draw it.

        Args:
            X: One series, such as `X[3:4]`.
            periods: Periods [K] of the oscillators; from a short to a long one of the features, if
                not given.
            q: Their quality: a higher one tells periods apart more sharply, and times less.
            num_times: Number of times, evenly from the first row to the last.
        """
        scaled = self.features_.transform_.transform(next(chunks(self._validate(X))))
        if len(scaled) != 1 or len(scaled.times) < 2:
            found = f"{len(scaled)} series of {len(scaled.times)} rows"
            raise ValueError(f"X must be one series of at least two rows, as X[k:k+1]; got {found}")
        if periods is None:
            known = [name.period for name in self.features_.names() if name.period]
            low, high = (min(known), max(known)) if known else time_scales(scaled)
            periods = np.geomspace(low, high, NUM_PERIODS)
        return respond_along(scaled, np.asarray(periods, dtype=np.float64), q, num_times)

    def _effects(self, X: Any) -> tuple[Float[np.ndarray, "P K"], Float[np.ndarray, "P K"]]:
        """Return what a standard deviation of each feature adds to outputs, and mean sizes."""
        self._check_fitted()
        matrix = None
        if X is not None:
            data = self._validate(X)
            chosen = np.random.default_rng(0).permutation(len(data))[:SAMPLE_SIZE]
            parts = self.features_.transform_parts(take(data, np.sort(chosen)))
            matrix = np.concatenate(list(parts))
        weights, sizes = self.head_.effects(matrix)
        if self.trees_ is not None:
            weights, sizes = self.trees_.mix_effects(matrix, (weights, sizes))
        return weights @ self._contrast(), sizes @ np.abs(self._contrast())

    def _contrast(self) -> Float[np.ndarray, "C K"]:
        """Return the outputs that are explained as sums of those of the head."""
        raise NotImplementedError

    def _output_names(self) -> list[Any]:
        raise NotImplementedError

    def _head_settings(self) -> dict[str, Any]:
        """Return arguments of `LinearHead`, checked."""
        raise NotImplementedError

    def _may_have_trees(self) -> bool:
        """Return whether trees are tried beside the linear model."""
        return False

    def _judge(self, outputs: np.ndarray, numbers: np.ndarray) -> dict[str, float]:
        """Return scores of outputs."""
        raise NotImplementedError

    def _weigh(self, numbers: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        """Return the weight of each series."""
        return weight

    def _outputs(self, data: SeriesData) -> Float[np.ndarray, "n K"]:
        parts = self.features_.transform_parts(data)
        return np.concatenate([self._head_outputs(part) for part in parts])

    def _head_outputs(self, matrix: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n K"]:
        found = self.head_.outputs(matrix)
        return found if self.trees_ is None else self.trees_.mix(matrix, found)

    def _validate(self, X: Any) -> SeriesData:
        self._check_fitted()
        return self.features_.validate(X, self.layout)

    def _remember(
        self, features: ResonatorFeatures, head: LinearHead, trees: TreeShare | None
    ) -> None:
        self.features_, self.head_, self.trees_ = features, head, trees
        for name in ("n_features_in_", "feature_names_in_", "static_names_in_", "time_axis_"):
            setattr(self, name, getattr(features, name))

    def _state(self) -> dict[str, Any]:
        facts = {"scores": self.left_out_scores_, "seconds": self.fit_seconds_}
        states = {name: part.state()[0] for name, part in self._parts().items()}
        return {**states, **facts, "task": self._task_state()}

    def _parts(self) -> dict[str, Any]:
        """Return what has a state, by the name in a file."""
        parts = {"features": self.features_, "head": self.head_, "trees": self.trees_}
        return {name: part for name, part in parts.items() if part is not None}

    def _weights(self) -> Mapping[str, Tensor]:
        return {
            f"{name}.{key}": torch.from_numpy(np.array(array))
            for name, part in self._parts().items()
            for key, array in part.state()[1].items()
        }

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        arrays: dict[str, dict[str, np.ndarray]] = {"features": {}, "head": {}, "trees": {}}
        for key, tensor in weights.items():
            part, _, name = key.partition(".")
            arrays[part][name] = tensor.numpy()
        self._restore_task(content["task"])
        features = ResonatorFeatures(families=self.families)
        self._remember(
            features.restore(content["features"], arrays["features"]),
            LinearHead.from_state(content["head"], arrays["head"]),
            TreeShare.from_state(content["trees"], arrays["trees"]) if "trees" in content else None,
        )
        self.left_out_scores_, self.fit_seconds_ = content["scores"], content["seconds"]


@estimator
class ResonatorClassifier(SeriesClassifier, ResonatorEstimator):
    """Classifier of irregular series: features of driven oscillators, and a linear model on them.

    X is an `IrregularSeries`, a `ParquetSeries` (read part by part), a data frame with a `layout`,
    or a list of `(times, values)` pairs. It takes seconds on one core, the same seed gives the same
    model, and probabilities are calibrated on series left out. Besides those below it has the
    keywords and attributes of `ResonatorEstimator`.

    Args:
        head: `ridge`; `logistic`; or `auto`: `ridge`, but of two classes whose features fit into
            memory that of the lower log loss on series left out.
        class_weight: None, `balanced`, or a dict from label to weight.

    Attributes:
        classes_: The classes, sorted.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> times = [[0.0, 1.0 + k, 3.0 + k] for k in range(8)]
        >>> values = [[[k % 2], [1.0], [k % 2]] for k in range(8)]
        >>> X = IrregularSeries.from_arrays(times, values, labels=["no", "yes"] * 4)
        >>> model = ResonatorClassifier(random_state=0).fit(X)
        >>> model.score(X), model.predict_proba(X).shape
        (1.0, (8, 2))
    """

    head: str = "auto"
    class_weight: str | Mapping[Any, float] | None = None

    task: ClassVar[str] = "classification"
    _regressor: ClassVar[str] = "ResonatorRegressor"
    # Classes are told apart by shares at all frequencies, and were never judged with peaks.
    _unused_groups: ClassVar[Sequence[str]] = ("peaks",)

    def decision_function(self, X: Any) -> Float[np.ndarray, "n C"]:
        """Return logits; of two classes their difference [n], positive for the second."""
        logits = self._logits(self._validate(X))
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def _head_settings(self) -> dict[str, Any]:
        check_choice("head", self.head, HEADS)
        return {"head": self.head, "num_classes": len(self.classes_)}

    def _may_have_trees(self) -> bool:
        return self.head == "auto" and len(self.classes_) == 2

    def _weigh(self, numbers: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        by_class = weigh_classes(self.class_weight, self.classes_, numbers)
        if by_class is None:
            return weight
        found = np.array(by_class)[numbers]
        return found if weight is None else found * weight

    def _judge(self, outputs: np.ndarray, numbers: np.ndarray) -> dict[str, float]:
        return class_metrics(outputs, numbers)

    def _contrast(self) -> Float[np.ndarray, "C K"]:
        count = len(self.classes_)
        # A logit means nothing but beside the others: of two, the difference; else from the mean.
        return np.array([[-1.0], [1.0]]) if count == 2 else np.eye(count) - 1.0 / count

    def _output_names(self) -> list[Any]:
        return self.classes_.tolist()[1 if len(self.classes_) == 2 else 0 :]


@estimator
class ResonatorRegressor(SeriesRegressor, ResonatorEstimator):
    """Regressor of irregular series: features of driven oscillators, and ridge regression on them.

    X is what `ResonatorClassifier` takes; y is [n], or [n, K] for several targets. It has the
    keywords and attributes of `ResonatorEstimator`.

    Attributes:
        target_center_: Mean of the targets [K].
        target_scale_: Their standard deviation [K].
    """

    task: ClassVar[str] = "regression"
    _classifier: ClassVar[str] = "ResonatorClassifier"

    def _head_settings(self) -> dict[str, Any]:
        return {}

    def _judge(self, outputs: np.ndarray, numbers: np.ndarray) -> dict[str, float]:
        error = outputs - numbers
        spread = np.square(numbers - numbers.mean(axis=0)).mean(axis=0)
        r2 = 1.0 - np.square(error).mean(axis=0) / np.where(spread > 0, spread, np.nan)
        error = error * self.target_scale_
        scores = {"rmse": root_mean_square(error), "mae": np.abs(error).mean()}
        return {name: float(value) for name, value in {**scores, "r2": r2.mean()}.items()}

    def _contrast(self) -> Float[np.ndarray, "C K"]:
        return np.diag(self.target_scale_)

    def _output_names(self) -> list[Any]:
        return list(range(len(self.target_scale_)))
