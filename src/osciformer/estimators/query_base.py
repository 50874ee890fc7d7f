"""Training and predictions of estimators that answer at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from torch import nn

from osciformer._types import Bool, Float
from osciformer.data.ragged import series_of_rows
from osciformer.data.series import IrregularSeries
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators import data_access, inputs, queries
from osciformer.estimators.base import SeriesEstimator
from osciformer.estimators.splits import random_split
from osciformer.models.query_model import QueryModel
from osciformer.models.task_config import QueryModelConfig
from osciformer.train.fitting import choose_device
from osciformer.train.predicting import predict
from osciformer.train.sources import Draw, SeriesSource
from osciformer.train.tasks import Quantiles

# Values at query times: [n, M, F] for times that all series share, else one [M, F] per series.
Answers = np.ndarray | list[np.ndarray]
Baseline = Callable[[IrregularSeries, IrregularSeries], np.ndarray]


@dataclass(eq=False, repr=False, kw_only=True)
class QueryEstimator(SeriesEstimator):
    """Estimators that predict the values of a series at times that the user chooses.

    Args:
        quantiles: Levels of the predicted quantiles, rising; 0.5, the median, must be among them.
        covariates: Names of features that are inputs and not predicted.

    Attributes:
        target_names_: Names of the features that are predicted.
    """

    quantiles: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    covariates: tuple[str, ...] = ()
    observation_dropout: float = 0.0
    dropout: float = 0.1

    model_class: ClassVar[type[nn.Module]] = QueryModel
    config_class: ClassVar[Any] = QueryModelConfig
    direction: ClassVar[str]

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, validation_data: Any = None
    ) -> Self:
        """Train on series; what is asked is drawn from their own observations, anew each epoch.

        Args:
            X: The series.
            y: Not used; there for scikit-learn's sake.
            sample_weight: Weight of each series [n].
            validation_data: Series for early stopping, in place of `validation_fraction` of X.
        """
        data = self._first_look(X)
        seed = self._draw_seed()
        levels = self._check_quantiles()
        self._set_columns()
        weight = inputs.check_weight(sample_weight, len(data))
        fraction = 0.0 if validation_data is not None else self.validation_fraction
        generator = np.random.default_rng(seed)
        train_index, validation_index = random_split(len(data), fraction, generator)
        config = self._train_config(seed, len(train_index))
        train = data_access.take(data, train_index)
        watched = data_access.take(data, validation_index) if len(validation_index) else None
        if validation_data is not None:
            given, _ = inputs.split_validation_data(validation_data)
            names = tuple(map(str, self.feature_names_in_))
            watched = self._check_columns(inputs.as_series(given, self.layout, names))
        self.transform_ = SeriesTransform(self.scaling, clip=None)  # type: ignore[arg-type]
        sample = data_access.learn_scales(train, self.transform_, generator)
        self._learn_times(sample)
        settings: dict[str, Any] = {"quantiles": levels, "direction": self.direction}
        model = self._build_model(seed, sample, **settings)
        draw = self._training_draw()
        shared: dict[str, Any] = {
            "draw": draw,
            "seed": seed,
            "num_workers": self.num_workers,
            "pin_memory": choose_device(self.accelerator).type == "cuda",
        }
        self._train(
            model,
            Quantiles(levels),
            data_access.make_source(
                train,
                self.transform_,
                config.batch_size,
                weight=None if weight is None else weight[train_index],
                **shared,
            ),
            None
            if watched is None
            else data_access.make_source(
                watched, self.transform_, config.batch_size, shuffle=False, **shared
            ),
            config,
        )
        return self

    def _learn_times(self, sample: IrregularSeries) -> None:
        """Learn about times from a sample of the series."""
        raise NotImplementedError

    def _training_draw(self) -> Draw:
        """Return what splits series into inputs and queries."""
        raise NotImplementedError

    def _check_quantiles(self) -> tuple[float, ...]:
        levels = tuple(float(level) for level in self.quantiles)
        rising = all(a < b for a, b in zip((0.0, *levels), (*levels, 1.0), strict=True))
        if not rising or 0.5 not in levels:
            raise ValueError(
                f"quantiles must rise between 0 and 1 and contain 0.5; got {self.quantiles}"
            )
        return levels

    def _set_columns(self) -> None:
        self._columns = self._find_columns()
        self.target_names_ = tuple(self.feature_names_in_[self._columns.is_target])

    def _find_columns(self) -> queries.Columns:
        return queries.find_columns(list(self.feature_names_in_), self.covariates, (), self.clip)

    def _answer(
        self, series: IrregularSeries, asked: IrregularSeries
    ) -> Float[np.ndarray, "Q F L"]:
        """Return scaled quantiles of the targets at the rows of `asked`.

        Args:
            series: Scaled series, as the model sees them.
            asked: As many series, whose times are the query times.
        """
        source = SeriesSource(
            series, self._prediction_batch, draw=lambda s, _: (s, asked), shuffle=False
        )
        shape = len(asked.times), len(self.target_names_), len(self.quantiles)
        found = np.empty(shape, dtype=np.float32)
        is_target = self._columns.is_target
        for batch, output in predict(
            self.model_,
            source.epoch(0),
            device=choose_device(self.accelerator),
            precision=self.precision,  # type: ignore[arg-type]
        ):
            assert batch.query_mask is not None
            is_asked = batch.query_mask.numpy()
            step = np.arange(is_asked.shape[1])
            rows = (asked.offsets[batch.index.numpy()][:, None] + step)[is_asked]
            found[rows] = output.numpy()[is_asked][:, is_target]
        self.model_.cpu()
        return found

    def _quantiles_at(
        self,
        series: IrregularSeries,
        times: Float[np.ndarray, "Q"],
        offsets: np.ndarray,
    ) -> Float[np.ndarray, "Q F L"]:
        """Return quantiles, in the units of the data, at times in any order."""
        scaled = self._columns.as_inputs(self.transform_.transform(series.replace(labels=None)))
        order = np.lexsort((times, series_of_rows(offsets)))
        blank = np.full((len(times), series.num_features), np.nan, dtype=np.float32)
        found = self._answer(scaled, IrregularSeries(times[order], blank, offsets))
        result = np.empty_like(found)
        scaler, is_target = self.transform_.value_scaler, self._columns.is_target
        result[order] = found * scaler.scale[is_target, None] + scaler.center[is_target, None]
        return result

    def _predict(
        self, X: Any, times: Any, origins: Callable[[IrregularSeries], np.ndarray] | None
    ) -> Answers:
        """Return quantiles at times: [n, M, F, L] if they are shared, else a list of [M, F, L]."""
        data = self._look_again(X)
        is_list = len(times) > 0 and np.ndim(times[0]) > 0
        if is_list and len(times) != len(data):
            raise ValueError(
                f"times must be one array for all series, or a list of {len(data)} arrays, one per "
                f"series; got {len(times)}"
            )
        parts: list[np.ndarray] = []
        for chunk in data_access.chunks(data):
            asked = times[len(parts) : len(parts) + len(chunk)] if is_list else [times] * len(chunk)
            relative = None if origins is None else origins(chunk)
            flat, offsets = queries.flatten_times(chunk, asked, relative_to=relative)
            self._check_times(chunk, flat, offsets)
            parts += np.split(self._quantiles_at(chunk, flat, offsets), offsets[1:-1])
        return parts if is_list else np.stack(parts)

    def _check_times(self, series: IrregularSeries, times: Any, offsets: Any) -> None:
        """Refuse query times that the model was not trained for."""

    def _median_of(self, answers: Answers) -> Answers:
        middle = tuple(map(float, self.quantiles)).index(0.5)
        if isinstance(answers, list):
            return [answer[..., middle] for answer in answers]
        return answers[..., middle]

    def _skill(self, X: Any, draw: Draw, baseline: Baseline) -> float:
        """Return 1 - mean absolute error / that of a baseline, on values that `draw` hides."""
        errors = np.zeros(2)
        middle = tuple(map(float, self.quantiles)).index(0.5)
        for chunk in data_access.chunks(self._look_again(X)):
            scaled = self.transform_.transform(chunk.replace(labels=None))
            series, asked = draw(scaled, np.random.default_rng(0))
            truth = asked.values[:, self._columns.is_target]
            found = self._answer(series, asked)[..., middle]
            simple = baseline(series, asked)[:, self._columns.is_target]
            errors += np.nansum(np.abs(found - truth)), np.nansum(np.abs(simple - truth))
        if errors[1] == 0:
            raise ValueError(
                "X has nothing to score: no value is hidden, or the baseline is perfect"
            )
        return float(1.0 - errors[0] / errors[1])

    def _task_state(self) -> dict[str, Any]:
        return {"targets": list(self.target_names_)}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        self._set_columns()


def last_target_times(
    series: IrregularSeries, is_target: Bool[np.ndarray, "F"]
) -> Float[np.ndarray, "n"]:
    """Return the time of the last row of each series in which a target is observed.

    A series without any such row has its first time, or 0 if it has no rows.
    """
    observed = ~np.isnan(series.values[:, is_target]).all(axis=1)
    owner = series_of_rows(series.offsets)
    last = np.zeros(len(series))
    some = series.lengths > 0
    last[some] = series.times[series.offsets[:-1][some]]
    np.maximum.at(last, owner[observed], series.times[observed])
    return last
