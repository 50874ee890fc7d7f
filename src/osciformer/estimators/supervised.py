"""Training and outputs of estimators with one label per series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
from torch import nn

from osciformer._types import Float, Int
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import data_access, inputs, targets
from osciformer.estimators.base import SeriesEstimator
from osciformer.estimators.inputs import SeriesData
from osciformer.models.series_model import SeriesModel
from osciformer.models.task_config import SeriesModelConfig, Statistic
from osciformer.train.fitting import choose_device
from osciformer.train.predicting import predict
from osciformer.train.tasks import Task

#: Where a series as a whole counts, values at the end of a gap tell a frequency, which averages
#: over the gap hardly keep; and frequencies of rare short gaps are of no use.
OSCIFORMER_DEFAULTS: Mapping[str, Any] = {"value": "point", "omega_range": "typical"}


@dataclass(eq=False, repr=False, kw_only=True)
class SupervisedEstimator(SeriesEstimator):
    """Estimators that map a whole series to a class or to numbers.

    Args:
        pool: How states become one: any of `last`, `mean` and `max`.
        skip: Show summary statistics of the series to the head as well.
        statistics: Which ones, of each feature; all of them by default: `last`, `mean`, `min`,
            `max`, `rise` (last minus first), `count` (its logarithm), `std`, `age` (time since the
            last measurement) and `first`.
        foresight: Weight of a second aim of training, to predict the next measurements from what
            came before; 0 for none.
        dim: Width of the model.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        scaling: Scaling of the values: `asinh`, `standard`, `robust` or `none`.
        learning_rate: Highest learning rate.
        weight_averaging: Decay of an exponential average of the weights, which is what is validated
            and kept; from 0, for none, to below 1.
        backbone_options: Further settings of the backbone, by name; those in
            `OSCIFORMER_DEFAULTS` hold for `osciformer` unless they, or a preset, are given.
    """

    pool: tuple[str, ...] = ("last", "mean", "max")
    skip: bool = True
    statistics: tuple[str, ...] = get_args(Statistic)
    foresight: float = 0.0
    dim: int = 32
    num_heads: int = 1
    dropout: float = 0.2
    scaling: str = "asinh"
    learning_rate: float = 1e-3
    weight_averaging: float = 0.99

    model_class: ClassVar[type[nn.Module]] = SeriesModel
    config_class: ClassVar[Any] = SeriesModelConfig

    def _fit(
        self,
        data: SeriesData,
        numbers: np.ndarray,
        split: tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]],
        validation: tuple[SeriesData, np.ndarray] | None,
        *,
        sample_weight: Any,
        task: Task,
        output_dim: int,
        seed: int,
    ) -> None:
        """Train on the first part of the split, and stop early by the other part, or validation.

        Args:
            data: The series.
            numbers: Their numeric targets.
            split: Rising positions of training and of validation series.
            validation: Series and targets that were given for early stopping.
            sample_weight: Weights of the series [n], or None.
            task: The task.
            output_dim: Outputs of the model.
            seed: Decides everything random.
        """
        weight = inputs.check_weight(sample_weight, len(data))
        train_index, validation_index = split
        config = self._train_config(seed, len(train_index))
        train_data = data_access.take(data, train_index)
        if validation is None and len(validation_index):
            validation = data_access.take(data, validation_index), numbers[validation_index]
        self.transform_ = SeriesTransform(self.scaling, clip=self.clip)  # type: ignore[arg-type]
        sample = data_access.learn_scales(train_data, self.transform_, np.random.default_rng(seed))
        model = self._build_model(
            seed,
            sample,
            output_dim=output_dim,
            pool=self.pool,
            skip=self.skip,
            statistics=self.statistics,
            foresight=self.foresight,
        )
        shared: dict[str, Any] = {
            "seed": seed,
            "num_workers": self.num_workers,
            "pin_memory": choose_device(self.accelerator).type == "cuda",
        }
        train_source = data_access.make_source(
            train_data,
            self.transform_,
            config.batch_size,
            labels=numbers[train_index],
            weight=None if weight is None else weight[train_index],
            **shared,
        )
        validation_source = None
        if validation is not None:
            validation_source = data_access.make_source(
                validation[0],
                self.transform_,
                config.batch_size,
                labels=validation[1],
                shuffle=False,
                **shared,
            )
        self._train(model, task, train_source, validation_source, config)

    def _model_settings(self) -> dict[str, Any]:
        settings = super()._model_settings()
        given = settings["backbone_options"]
        # They become part of the model's configuration, so that a saved model keeps its own.
        if self.backbone == "osciformer" and "preset" not in given:
            settings["backbone_options"] = {**OSCIFORMER_DEFAULTS, **given}
        return settings

    def _labels(self, data: SeriesData, y: Any) -> np.ndarray:
        """Return y, or the labels that the data have, as an array without missing entries."""
        return targets.check_targets(data_access.labels_of(data) if y is None else y, len(data))

    def _encode(self, labels: np.ndarray) -> np.ndarray:
        """Return labels as the numbers that the model is trained with."""
        raise NotImplementedError

    def _validation(self, validation_data: Any) -> tuple[SeriesData, np.ndarray] | None:
        """Return series and numeric targets for early stopping, if they were given."""
        if validation_data is None:
            return None
        X, y = inputs.split_validation_data(validation_data)
        data = self._check_columns(
            inputs.as_series(X, self.layout, tuple(map(str, self.feature_names_in_)))
        )
        return data, self._encode(self._labels(data, y))

    def _outputs(self, X: Any) -> Float[np.ndarray, "n O"]:
        """Return what the model says about each series."""
        data = self._look_again(X)
        parts = []
        for chunk in data_access.chunks(data):
            source = data_access.make_source(
                chunk, self.transform_, self._prediction_batch, shuffle=False
            )
            found = np.empty((len(chunk), self.model_.config.output_dim), dtype=np.float32)
            for batch, output in predict(
                self.model_,
                source.epoch(0),
                device=choose_device(self.accelerator),
                precision=self.precision,  # type: ignore[arg-type]
            ):
                found[batch.index.numpy()] = output.numpy()
            parts.append(found)
        self.model_.cpu()
        return np.concatenate(parts)
