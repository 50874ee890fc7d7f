"""What all estimators of series share: settings of the model, scaling, columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from osciformer.data.batches import collate
from osciformer.data.series import IrregularSeries, TimeAxis
from osciformer.data.tables import Layout
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import inputs
from osciformer.estimators.data_access import names_and_axis
from osciformer.estimators.inputs import SeriesData
from osciformer.estimators.trained import TrainedEstimator
from osciformer.train.quiet import undisturbed_random_state


@dataclass(eq=False, repr=False, kw_only=True)
class SeriesEstimator(TrainedEstimator):
    """Settings that all estimators of series have, besides those of `TrainedEstimator`.

    Args:
        dim: Width of the model.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        observation_dropout: Part of the observed values that is hidden at random in training.
        carry: Give each token the last known value of each feature and its age as well.
        backbone: `osciformer`, or a baseline: `transformer`, `gru_d`.
        backbone_options: Further settings of the backbone, by name.
        scaling: Scaling of the values: `standard`, `robust`, `asinh` or `none`.
        clip: Bound on the absolute scaled input, against outliers; None for no bound.
        layout: For data frames as X: a `Layout`, or a dict of its arguments.

    Attributes:
        transform_: The fitted scaling.
        n_features_in_: Number of features F.
        feature_names_in_: Their names.
        static_names_in_: Names of the static features.
        time_axis_: What the times mean.
    """

    dim: int = 64
    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.3
    observation_dropout: float = 0.2
    carry: bool = True
    backbone: str = "osciformer"
    backbone_options: Mapping[str, Any] | None = None
    scaling: str = "standard"
    clip: float | None = 6.0
    layout: Layout | Mapping[str, Any] | None = None

    model_class: ClassVar[type[nn.Module]]
    config_class: ClassVar[Any]

    @classmethod
    def _model_from_dict(cls, config: Mapping[str, Any]) -> nn.Module:
        return cls.model_class(cls.config_class.from_dict(config))

    def _data_state(self) -> dict[str, Any]:
        return {
            "transform": self.transform_.to_dict(),
            "feature_names": list(map(str, self.feature_names_in_)),
            "static_names": list(self.static_names_in_),
            "time_axis": self.time_axis_.to_dict(),
        }

    def _restore_data(self, content: Mapping[str, Any]) -> None:
        self._remember_columns(
            content["feature_names"],
            content["static_names"],
            TimeAxis.from_dict(content["time_axis"]),
        )
        self.transform_ = SeriesTransform.from_dict(content["transform"])

    def _first_look(self, X: Any) -> SeriesData:
        """Return X as series, and remember its columns."""
        data = inputs.as_series(X, self.layout)
        self._check_validation_fraction()
        self._remember_columns(*names_and_axis(data))
        return data

    def _remember_columns(self, features: Any, static: Any, time_axis: TimeAxis) -> None:
        self.feature_names_in_ = np.array([str(name) for name in features], dtype=object)
        self.static_names_in_ = tuple(static)
        self.n_features_in_ = len(self.feature_names_in_)
        self.time_axis_ = time_axis

    def _look_again(self, X: Any) -> SeriesData:
        """Return X as series with the columns of training."""
        self._check_fitted()
        return self._check_columns(
            inputs.as_series(X, self.layout, tuple(map(str, self.feature_names_in_)))
        )

    def _check_columns(self, data: SeriesData) -> SeriesData:
        features, static, time_axis = names_and_axis(data)
        inputs.check_same_columns("features", list(self.feature_names_in_), features)
        inputs.check_same_columns("static features", self.static_names_in_, static)
        inputs.check_same_times(self.time_axis_, time_axis)
        return data

    def _model_settings(self) -> dict[str, Any]:
        """Return the settings that the configurations of all models share."""
        return {
            "input_dim": self.n_features_in_,
            "static_dim": len(self.static_names_in_),
            "backbone": self.backbone,
            "carry": self.carry,
            "dim": self.dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "dropout": self.dropout,
            "observation_dropout": self.observation_dropout,
            "backbone_options": dict(self.backbone_options or {}),
        }

    def _build_model(self, seed: int, sample: IrregularSeries, **settings: Any) -> nn.Module:
        config = self.config_class(**self._model_settings(), **settings)
        batch = collate(sample)
        with undisturbed_random_state():
            torch.manual_seed(seed)
            model: Any = self.model_class(config)
            model.fit_time_scale(batch.times, batch.mask)
        return model
