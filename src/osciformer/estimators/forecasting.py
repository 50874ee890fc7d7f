"""Estimators that answer at any time: forecasts after a series, and values inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._types import Float, Int
from osciformer.config import QueryModelConfig, estimator_defaults
from osciformer.data.ragged import series_of_rows
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.estimators import queries
from osciformer.estimators.base import estimator, split
from osciformer.estimators.series import Numbered, SeriesData, SeriesEstimator, chunks
from osciformer.models import QueryModel
from osciformer.train.sources import Draw, SeriesSource
from osciformer.train.tasks import Quantiles

if TYPE_CHECKING:
    from sklearn.base import TransformerMixin
else:
    TransformerMixin = need("sklearn.base", extra="train").TransformerMixin

# Values at query times: [n, M, F] for times that all series share, else one [M, F] per series.
Answers = np.ndarray | list[np.ndarray]
Baseline = Callable[[IrregularSeries, IrregularSeries], np.ndarray]
# The part of a typical series that is the horizon, if none is given.
HORIZON_PART = 0.25


class Hidden(NamedTuple):
    """Hidden values, and what a model and a baseline say of them, scaled to unit spread.

    Attributes:
        quantiles: Predicted quantiles of the targets.
        truth: The hidden values; NaN where none is hidden.
        baseline: The last value, or a straight line.
        offsets: Rows of the n series.
    """

    quantiles: Float[np.ndarray, "Q F L"]
    truth: Float[np.ndarray, "Q F"]
    baseline: Float[np.ndarray, "Q F"]
    offsets: Int[np.ndarray, "n+1"]


@estimator
class QueryEstimator(SeriesEstimator):
    """Estimators that predict the values of a series at times that the user chooses.

    Args:
        quantiles: Levels of the predicted quantiles, rising; 0.5, the median, must be among them.
        covariates: Names of features that are inputs and not predicted.

    Attributes:
        target_names_: Names of the features that are predicted.
    """

    quantiles: tuple[float, ...] = estimator_defaults("forecasting")["quantiles"]
    covariates: tuple[str, ...] = ()
    dropout: float = QueryModelConfig.dropout

    model_class: ClassVar[Any] = QueryModel
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
        data = self._validate_training(X)
        seed = self._start()
        levels = self._check_quantiles()
        self._set_columns()
        validation = None
        if validation_data is not None:
            is_pair = isinstance(validation_data, tuple) and len(validation_data) == 2
            other = validation_data[0] if is_pair else validation_data
            validation = Numbered(self._with_same_columns(other))
        fraction = 0.0 if validation is not None else self.validation_fraction
        generator = np.random.default_rng(seed)
        self._fit_series(
            Numbered(data),
            validation,
            split(np.zeros(len(data), dtype=np.int64), fraction, generator),
            task=Quantiles(levels),
            seed=seed,
            generator=generator,
            sample_weight=sample_weight,
            clip=None,
            make_draw=self._make_draw,
            direction=self.direction,
        )
        return self

    def _make_draw(self, sample: IrregularSeries) -> Draw:
        """Learn about times from a sample; return what splits series into inputs and queries."""
        raise NotImplementedError

    def _check_quantiles(self) -> tuple[float, ...]:
        levels = tuple(float(level) for level in self.quantiles)
        is_rising = all(low < high for low, high in pairwise((0.0, *levels, 1.0)))
        if not is_rising or 0.5 not in levels:
            raise ValueError(
                f"quantiles must rise between 0 and 1 and contain 0.5; got {self.quantiles}"
            )
        return levels

    def _set_columns(self) -> None:
        known = self.settings().get("known_covariates", ())
        names, clip = list(self.feature_names_in_), self.settings()["clip"]
        self._columns = queries.find_columns(names, self.covariates, known, clip)
        self.target_names_ = tuple(self.feature_names_in_[self._columns.is_target])

    def _answer(
        self, series: IrregularSeries, asked: IrregularSeries
    ) -> Float[np.ndarray, "Q F L"]:
        """Return scaled quantiles of the targets at the rows of `asked`, for scaled series."""
        source = SeriesSource(
            series, self._prediction_batch, draw=lambda s, _: (s, asked), shuffle=False
        )
        shape = len(asked.times), len(self.target_names_), len(self.quantiles)
        found = np.empty(shape, dtype=np.float32)
        is_target = self._columns.is_target
        for batch, output in self._outputs_of(source):
            assert batch.query_mask is not None
            is_asked = batch.query_mask.numpy()
            step = np.arange(is_asked.shape[1])
            rows = (asked.offsets[batch.index.numpy()][:, None] + step)[is_asked]
            found[rows] = output.numpy()[is_asked][:, is_target]
        return found

    def _quantiles_at(
        self, series: IrregularSeries, times: Float[np.ndarray, "Q"], offsets: np.ndarray
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
        self, data: SeriesData, times: Any, origins: Callable[[IrregularSeries], np.ndarray] | None
    ) -> Answers:
        """Return quantiles at times: [n, M, F, L] if they are shared, else a list of [M, F, L]."""
        is_list = queries.is_list_of_times(times, len(data), "series")
        parts: list[np.ndarray] = []
        for chunk in chunks(data):
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

    def answer_hidden(self, X: Any, generator: np.random.Generator) -> Iterator[Hidden]:
        """Hide values as `score` says, and yield what is predicted for them, chunk by chunk.

        Args:
            X: The series.
            generator: Decides which values are hidden, if that is random.
        """
        data = self._validate(X)
        is_target = self._columns.is_target
        draw, baseline = self._scoring()
        for chunk in chunks(data):
            scaled = self.transform_.transform(chunk.replace(labels=None))
            series, asked = draw(scaled, generator)
            truth, simple = asked.values[:, is_target], baseline(series, asked)[:, is_target]
            yield Hidden(self._answer(series, asked), truth, simple, asked.offsets)

    def _scoring(self) -> tuple[Draw, Baseline]:
        """Return what hides values to score, and the baseline."""
        raise NotImplementedError

    def _skill(self, X: Any) -> float:
        """Return 1 - mean absolute error / that of the baseline, on hidden values."""
        errors = np.zeros(2)
        for quantiles, truth, simple, _ in self.answer_hidden(X, np.random.default_rng(0)):
            found = self._median_of(quantiles)
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


@estimator
class OsciFormerForecaster(QueryEstimator):
    """Forecasts of irregularly sampled series at any future times, with quantiles.

    In training each series is cut at a random row, anew each epoch: the model sees what comes
    before and is scored on the observations after the cut, up to the horizon. Besides those below
    it has the arguments and attributes of `TrainedEstimator`, `SeriesEstimator` and
    `QueryEstimator`; all are keywords.

    Args:
        horizon: How far ahead the model is trained to look, in the unit of the times; a quarter of
            the median span of the training series if not given.
        known_covariates: Names of features that are inputs, are not predicted, and are known ahead,
            such as a planned dose: in `predict`, X may hold rows in the future with their values.
            In training all, some or none of the rows after the cut show them. Between rows that
            show them the values of the row before count, so give them at the times you ask for.

    Attributes:
        horizon_: The horizon.
    """

    horizon: float | None = None
    known_covariates: tuple[str, ...] = ()

    task: ClassVar[str] = "forecasting"
    direction: ClassVar[str] = "causal"

    def _make_draw(self, sample: IrregularSeries) -> Draw:
        horizon = self.horizon
        if horizon is None:
            horizon = HORIZON_PART * float(np.median(sample.spans))
            if not 0 < horizon < float("inf"):
                raise ValueError(
                    f"horizon must be positive and finite; got {horizon}, as most series have one "
                    "time only"
                )
        self.horizon_ = float(horizon)
        return queries.ForecastDraw(self._columns, self.horizon_)

    def predict(self, X: Any, times: Any = None, *, relative: bool = False) -> Answers:
        """Return medians of the targets at future times.

        Args:
            X: The series up to now.
            times: One array [M] for all series, or a list of arrays, one per series; numbers in the
                unit of the series, or dates if the series have such.
            relative: Count numeric times from the last observation of each series.

        Returns:
            [n, M, F] if the times are shared, otherwise a list with an [M, F] per series; F are the
            `target_names_`.
        """
        return self._median_of(self.predict_quantiles(X, times, relative=relative))

    def predict_quantiles(self, X: Any, times: Any = None, *, relative: bool = False) -> Answers:
        """Return quantiles, as `predict` returns medians, with a last axis for the levels."""
        if times is None:
            raise ValueError(
                "times must say when: one array for all series or a list with one per series; "
                "with relative=True they count from the end of each series"
            )
        return self._predict(self._validate(X), times, self._ends if relative else None)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the skill against the last value, on the end of each series.

        What lies within the horizon before the end of a series is hidden and predicted from the
        rest. The score is 1 - e / b, with e the mean absolute error of the medians and b that of
        the last value (the training mean if there is none), over all targets scaled to unit spread:
        1 is perfect, 0 as good as the last value.
        """
        return self._skill(X)

    def _scoring(self) -> tuple[Draw, Baseline]:
        draw = queries.ForecastDraw(self._columns, self.horizon_, at_end=True)
        return draw, queries.last_value_before

    def _ends(self, series: IrregularSeries) -> np.ndarray:
        return queries.last_target_times(series, self._columns.is_target)

    def _check_times(self, series: IrregularSeries, times: Any, offsets: Any) -> None:
        owner, ends = series_of_rows(offsets), self._ends(series)
        early = (times <= ends[owner]) & (series.num_observed[owner] > 0)
        if early.any():
            row = int(np.argmax(early))
            raise advise(
                ValueError,
                f"times must lie after the last observation; series {series.ids[owner[row]]!s} "
                f"ends at {ends[owner[row]]:g}, and {times[row]:g} is asked. Pass ",
                Mention("horizon", python="relative=True"),
                " to count from the end, or use ",
                Mention("task", "imputation", "OsciFormerImputer"),
                " for times inside",
            )

    def _task_state(self) -> dict[str, Any]:
        return {**super()._task_state(), "horizon": self.horizon_}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        super()._restore_task(state)
        self.horizon_ = float(state["horizon"])


@estimator
class OsciFormerImputer(TransformerMixin, QueryEstimator):
    """Missing values of irregularly sampled series, and values at any time inside them.

    In training a part of the observations is hidden, anew each epoch, and the model is scored on
    those. Besides those below it has the arguments and attributes of `TrainedEstimator`,
    `SeriesEstimator` and `QueryEstimator`; all are keywords.

    Args:
        hidden_fraction: Part of the observations that is hidden.
    """

    hidden_fraction: float = 0.2

    task: ClassVar[str] = "imputation"
    direction: ClassVar[str] = "bidirectional"

    def _make_draw(self, sample: IrregularSeries) -> Draw:
        return queries.HideDraw(self._columns, self.hidden_fraction)

    def predict(self, X: Any, times: Any = None) -> Answers:
        """Return medians of the targets.

        Args:
            X: The series.
            times: One array [M] for all series, or a list of arrays, one per series; numbers in the
                unit of the series, or dates if the series have such. The rows of X if not given.

        Returns:
            [n, M, F] if the times are shared, otherwise a list with an [M, F] per series; F are the
            `target_names_`.
        """
        return self._median_of(self.predict_quantiles(X, times))

    def predict_quantiles(self, X: Any, times: Any = None) -> Answers:
        """Return quantiles, as `predict` returns medians, with a last axis for the levels."""
        data = self._validate(X)
        if times is not None:
            return self._predict(data, times, None)
        parts: list[np.ndarray] = []
        for chunk in chunks(data):
            found = self._quantiles_at(chunk, chunk.times, chunk.offsets)
            parts += np.split(found, chunk.offsets[1:-1])
        return parts

    def transform(self, X: Any) -> IrregularSeries:
        """Return X with medians in place of missing values; covariates stay as they are."""
        parts = []
        for chunk in chunks(self._validate(X)):
            found = self._quantiles_at(chunk, chunk.times, chunk.offsets)
            values, is_target = chunk.values.copy(), self._columns.is_target
            medians = self._median_of(found)
            values[:, is_target] = np.where(
                np.isnan(values[:, is_target]), medians, values[:, is_target]
            )
            parts.append(chunk.replace(values=values))
        return concatenate(parts)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the skill against straight lines, on a part of the observations.

        `hidden_fraction` of the observations is hidden and predicted from the rest. The score is
        1 - e / b, with e the mean absolute error of the medians and b that of linear interpolation
        (the training mean if a feature has no other value), over all targets scaled to unit spread:
        1 is perfect, 0 as good as interpolation. The same observations are hidden each time.
        """
        return self._skill(X)

    def _scoring(self) -> tuple[Draw, Baseline]:
        return queries.HideDraw(self._columns, self.hidden_fraction), queries.interpolate
