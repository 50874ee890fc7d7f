"""What the estimators of series share: reading X, scaling, columns, and training on series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from osciformer._types import Int, Tensor
from osciformer.config import TaskConfig, TrainConfig
from osciformer.data.batches import Batch, collate
from osciformer.data.inputs import (
    SeriesData,
    as_series,
    check_same_columns,
    check_weight,
    chunks,
)
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis, concatenate
from osciformer.data.tables import Layout
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators.base import TrainedEstimator, estimator, split
from osciformer.estimators.queries import LARGEST_TIME, refuse_far_times
from osciformer.train.fitting import choose_device, predict, undisturbed_random_state
from osciformer.train.sources import Draw, SeriesSource, StreamSource
from osciformer.train.tasks import Task

# Series from which the time scale is learned.
SAMPLE_SIZE = 1000


class Numbered(NamedTuple):
    """Series, and their numeric targets if the task has any."""

    data: SeriesData
    numbers: np.ndarray | None = None

    def part(self, index: Int[np.ndarray, "m"]) -> Numbered:
        """Return some of the series."""
        data, numbers = self
        chosen = data.select(index) if isinstance(data, ParquetSeries) else data.take(index)
        return Numbered(chosen, None if numbers is None else numbers[index])


class Held(NamedTuple):
    """Series that a network is validated with: their positions among all, or other series."""

    places: Int[np.ndarray, "m"]
    others: Numbered | None = None


class Training(NamedTuple):
    """What training a network needs, in the order of `osciformer.train.fit`."""

    model: nn.Module
    task: Task
    train: SeriesSource | StreamSource
    validation: SeriesSource | StreamSource | None
    config: TrainConfig


def _learn_scales(
    data: SeriesData, transform: SeriesTransform, generator: np.random.Generator
) -> IrregularSeries:
    """Fit the transform in one pass, and return a sample of the series."""
    parts = []
    share = -(-SAMPLE_SIZE // (data.num_blocks if isinstance(data, ParquetSeries) else 1))
    for chunk in chunks(data):
        refuse_far_times(chunk, chunk.times, chunk.offsets)
        transform.partial_fit(chunk)
        chosen = generator.permutation(len(chunk))[:share]
        parts.append(chunk.take(np.sort(chosen)).replace(labels=None))
    assert transform.statistics is not None
    if transform.statistics.features.count.sum() == 0:
        missing = f"all values of all {len(data)} series are missing (NaN)"
        raise ValueError(f"{missing}; check the value columns")
    return concatenate(parts)


@estimator
class SeriesEstimator(TrainedEstimator):
    """Keywords that all estimators of series have, besides those of `TrainedEstimator`.

    Args:
        dim: Width of the model.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        layout: For data frames as X: a `Layout`, or a dict of its arguments.
        model_options: Further settings of the model, by name: `observation_dropout`, `carry`,
            `backbone` and `backbone_options`, see `TaskConfig`; `scaling` and `clip` of the values,
            see `EstimatorConfig`.

    Attributes:
        transform_: The fitted scaling.
        n_features_in_: Number of features F.
        feature_names_in_: Their names.
        static_names_in_: Names of the static features.
        time_axis_: What the times mean.
    """

    dim: int = TaskConfig.dim
    num_layers: int = TaskConfig.num_layers
    num_heads: int = TaskConfig.num_heads
    dropout: float = TaskConfig.dropout
    layout: Layout | Mapping[str, Any] | None = None

    transform_clips: ClassVar[bool] = True  # if not, the draw clips inputs and leaves targets

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, validation_data: Any = None
    ) -> Self:
        """Train on series.

        Args:
            X: The series.
            y: Class [n], or targets [n] or [n, K]; the labels of X, if the task has any.
            sample_weight: Weight of each series [n].
            validation_data: `(X, y)` or X for early stopping, in place of `validation_fraction`.
        """
        data = as_series(X, self.layout)
        first = next(chunks(data))
        self._remember_columns(first.feature_names, first.static_names, first.time_axis)
        seed = self._start()
        whole, validation, others = Numbered(data, self._learn(data, y)), None, None
        if validation_data is not None:
            is_pair = isinstance(validation_data, tuple) and len(validation_data) == 2
            other_X, other_y = validation_data if is_pair else (validation_data, None)
            other = self._with_same_columns(other_X)
            validation = others = Numbered(other, self._numbers(other, other_y))
        fraction = 0.0 if validation is not None else self.validation_fraction
        generator = np.random.default_rng(seed)
        index, rest = split(self._strata(whole), fraction, generator)
        if validation is None and len(rest):
            validation = whole.part(rest)
        task = self._make_task(whole.numbers, None if validation is None else validation.numbers)
        weight = check_weight(sample_weight, len(data))
        config, train = self._train_config(seed, len(index)), whole.part(index)
        clip = self.settings()["clip"] if self.transform_clips else None
        self.transform_ = SeriesTransform(self.settings()["scaling"], clip=clip)
        if whole.numbers is not None:  # runs of earlier versions, which may go on, drew it so
            generator = np.random.default_rng(seed)
        sample = _learn_scales(train.data, self.transform_, generator)
        shared: dict[str, Any] = {
            "batch_size": config.batch_size,
            "draw": self._make_draw(sample),
            "num_workers": config.num_workers,
            "pin_memory": choose_device(config.accelerator).type == "cuda",
        }
        judged = None if weight is None else weight[index]

        def begin(number: int) -> Training:
            own = seed + number
            model = self._build_model(own, sample)
            source = self._source(train, weight=judged, seed=own, **shared)
            watched = None
            if validation is not None:
                watched = self._source(validation, shuffle=False, seed=own, **shared)
            return Training(model, task, source, watched, replace(config, seed=own))

        beginning = begin(0)  # refuses before the work
        with self._accompanied(whole, weight, Held(rest, others), seed):
            self._train(*beginning)
            self._train_more(begin)
        return self

    def _train_more(self, begin: Callable[[int], Training]) -> None:
        """Train further networks, if the estimator has some; `begin` prepares one by number."""

    @contextmanager
    def _accompanied(
        self, whole: Numbered, weight: np.ndarray | None, held: Held, seed: int
    ) -> Iterator[None]:
        """Do what belongs to a fit before and after training."""
        yield

    def _learn(self, data: SeriesData, y: Any) -> np.ndarray | None:
        """Learn classes, scales of targets or columns of training data; return their numbers."""
        raise NotImplementedError

    def _numbers(self, data: SeriesData, y: Any) -> np.ndarray | None:
        """Return labels as the numbers that the model is trained with, if the task has labels."""
        return None

    def _strata(self, whole: Numbered) -> Int[np.ndarray, "n"]:
        """Return the classes that a split keeps in proportion."""
        return np.zeros(len(whole.data), dtype=np.int64)

    def _make_task(self, numbers: np.ndarray | None, watched: np.ndarray | None) -> Task:
        """Return the task; `watched` are the numbers of the validation series."""
        raise NotImplementedError

    def _make_draw(self, sample: IrregularSeries) -> Draw | None:
        """Return what splits series into inputs and queries, if the task has queries."""
        return None

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "transform": self.transform_.to_dict(),
            "feature_names": list(map(str, self.feature_names_in_)),
            "static_names": list(self.static_names_in_),
            "time_axis": self.time_axis_.to_dict(),
        }

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super()._restore(content, weights)
        axis = TimeAxis.from_dict(content["time_axis"])
        self._remember_columns(content["feature_names"], content["static_names"], axis)
        self.transform_ = SeriesTransform.from_dict(content["transform"])

    def _remember_columns(self, features: Any, static: Any, time_axis: TimeAxis) -> None:
        self.feature_names_in_ = np.array([str(name) for name in features], dtype=object)
        self.static_names_in_ = tuple(static)
        self.n_features_in_ = len(self.feature_names_in_)
        self.time_axis_ = time_axis

    def _validate(self, X: Any) -> SeriesData:
        """Return X as series with the columns of training; called once, by public methods."""
        self._check_fitted()
        return self._with_same_columns(X)

    def _with_same_columns(self, X: Any) -> SeriesData:
        features = list(map(str, self.feature_names_in_))
        data = as_series(X, self.layout, features)
        check_same_columns(data, features, self.static_names_in_, self.time_axis_)
        return data

    def _source(self, part: Numbered, **settings: Any) -> SeriesSource | StreamSource:
        """Return the batches of scaled series."""
        settings["labels"] = part.numbers
        if isinstance(part.data, ParquetSeries):
            return StreamSource(part.data, prepare=self._scale, **settings)
        refuse_far_times(part.data, part.data.times, part.data.offsets)
        return SeriesSource(self.transform_.transform(part.data), **settings)

    def _scale(self, series: IrregularSeries) -> IrregularSeries:
        """Return series with values in the unit of the model."""
        refuse_far_times(series, series.times, series.offsets)
        return self.transform_.transform(series)

    def _model_config(self, **of_data: Any) -> Any:
        sizes = {"input_dim": self.n_features_in_, "static_dim": len(self.static_names_in_)}
        return super()._model_config(**sizes, **of_data)

    def _build_model(self, seed: int, sample: IrregularSeries) -> nn.Module:
        batch = collate(sample)
        with undisturbed_random_state():
            torch.manual_seed(seed)
            model: Any = self.model_class(self._model_config())
            model.fit_time_scale(batch.times, batch.mask)
        gap = float(model.inputs.age_scale.gap)
        if gap * LARGEST_TIME < 1.0:
            raise ValueError(
                f"times must be {1 / LARGEST_TIME:g} apart or more; the median gap between rows is "
                f"{gap:g}. Use a smaller unit of time"
            )
        return model

    def _outputs_of(
        self, source: SeriesSource | StreamSource, network: nn.Module | None = None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with the output of a network, `model_` if not given.

        The network is on the CPU afterwards.
        """
        network = self.model_ if network is None else network
        device = choose_device(self.accelerator)
        precision = self.settings()["precision"]
        yield from predict(network, source.epoch(0), device=device, precision=precision)
        network.cpu()
