"""Estimators that answer at any time: forecasts after a series, and values inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from osciformer._advice import Mention, advise
from osciformer._types import Float, Int, Tensor
from osciformer.config import QueryModelConfig, estimator_defaults
from osciformer.data.inputs import SeriesData, chunks
from osciformer.data.ragged import series_of_rows
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.estimators import queries
from osciformer.estimators.base import TransformerMixin, estimator
from osciformer.estimators.conformal import Conformal, ScoreLevels
from osciformer.estimators.series import SeriesEstimator
from osciformer.models import QueryModel
from osciformer.train.sources import Draw, SeriesSource
from osciformer.train.tasks import Quantiles, Task

# Values at query times: [n, M, F] for times that all series share, else one [M, F] per series.
Answers = np.ndarray | list[np.ndarray]
Baseline = Callable[[IrregularSeries, IrregularSeries], np.ndarray]
# The part of a typical series that is the horizon, if none is given.
HORIZON_PART = 0.25
# Least distance of a quantile from the median that intervals are widened by, in unit spreads.
_LEAST_DISTANCE = 1e-6


class Hidden(NamedTuple):
    """Hidden values, and what a model and a baseline say of them, scaled to unit spread."""

    quantiles: Float[np.ndarray, "Q F L"]  # predicted, of the targets
    truth: Float[np.ndarray, "Q F"]  # NaN where none is hidden
    baseline: Float[np.ndarray, "Q F"]  # the last value, or a straight line
    offsets: Int[np.ndarray, "n+1"]  # rows of the n series


@estimator
class QueryEstimator(Conformal, SeriesEstimator):
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
    transform_clips: ClassVar[bool] = False

    predict_quantiles: ClassVar[Callable[..., Answers]]

    def _learn(self, data: SeriesData, y: Any) -> None:
        self.conformal_ = None
        ends = (0.0, *self._levels, 1.0)
        if any(low >= high for low, high in pairwise(ends)) or 0.5 not in self._levels:
            wanted = "rise between 0 and 1 and contain 0.5"
            raise ValueError(f"quantiles must {wanted}; got {self.quantiles}")
        self._set_columns()

    @property
    def _levels(self) -> tuple[float, ...]:
        return tuple(map(float, self.quantiles))

    def _make_task(self, numbers: Any, watched: Any) -> Task:
        return Quantiles(self._levels)

    def _model_config(self, **of_data: Any) -> Any:
        return super()._model_config(direction=self.direction, **of_data)

    def _set_columns(self) -> None:
        known = self.settings().get("known_covariates", ())
        names, clip = list(self.feature_names_in_), self.settings()["clip"]
        self._columns = queries.find_columns(names, self.covariates, known, clip)
        self.target_names_ = tuple(self.feature_names_in_[self._columns.is_target])

    def _answer(
        self, series: IrregularSeries, asked: IrregularSeries
    ) -> Float[np.ndarray, "Q F L"]:
        """Return scaled quantiles of the targets at the rows of `asked`, for scaled series."""
        size, is_target = self._prediction_batch, self._columns.is_target
        source = SeriesSource(series, size, draw=lambda s, _: (s, asked), shuffle=False)
        shape = len(asked.times), len(self.target_names_), len(self.quantiles)
        found = np.empty(shape, dtype=np.float32)
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
        scaled = self._columns.as_inputs(self._scale(series.replace(labels=None)))
        order = np.lexsort((times, series_of_rows(offsets)))
        blank = np.full((len(times), series.num_features), np.nan, dtype=np.float32)
        found = self._answer(scaled, IrregularSeries(times[order], blank, offsets))
        result = np.empty_like(found)
        scaler, is_target = self.transform_.value_scaler, self._columns.is_target
        result[order] = found * scaler.scale[is_target, None] + scaler.center[is_target, None]
        bad = ~np.isfinite(result).all(axis=(1, 2))
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"the prediction for series {series.ids[series_of_rows(offsets)[row]]!s} at the "
                f"time {times[row]:g} is not finite; look for times or values of extreme size"
            )
        return result

    def _predict(self, X: Any, times: Any, *, relative: bool = False) -> Answers:
        """Return quantiles at times, or the rows of X: [n, M, F, L], or a list of [M, F, L]."""
        data = self._validate(X)
        is_list = times is None or queries.is_list_of_times(times, len(data), "series")
        parts: list[np.ndarray] = []
        for chunk in chunks(data):
            flat, offsets = chunk.times, chunk.offsets
            if times is not None:
                last = len(parts) + len(chunk)
                asked = times[len(parts) : last] if is_list else [times] * len(chunk)
                origins = self._ends(chunk) if relative else None
                flat, offsets = queries.flatten_times(chunk, asked, relative_to=origins)
                self._check_times(chunk, flat, offsets)
            parts += np.split(self._quantiles_at(chunk, flat, offsets), offsets[1:-1])
        return parts if is_list else np.stack(parts)

    def _ends(self, series: IrregularSeries) -> np.ndarray:
        return queries.last_target_times(series, self._columns.is_target)

    def _check_times(self, series: IrregularSeries, times: Any, offsets: Any) -> None:
        """Refuse query times that the model was not trained for."""

    def _median_of(self, answers: Answers) -> Answers:
        middle = self._levels.index(0.5)
        if isinstance(answers, list):
            return [answer[..., middle] for answer in answers]
        return answers[..., middle]

    def answer_hidden(self, X: Any, generator: np.random.Generator) -> Iterator[Hidden]:
        """Hide values as `score` says, and yield what is predicted for them, chunk by chunk."""
        data = self._validate(X)
        is_target = self._columns.is_target
        draw, baseline = self._scoring()
        for chunk in chunks(data):
            scaled = self._scale(chunk.replace(labels=None))
            series, asked = draw(scaled, generator)
            truth, simple = asked.values[:, is_target], baseline(series, asked)[:, is_target]
            yield Hidden(self._answer(series, asked), truth, simple, asked.offsets)

    def calibrate(self, X: Any, y: Any = None) -> Self:
        """Learn how far to widen the outermost quantiles, for `predict_interval`.

        Args:
            X: Series drawn like those to predict, 100 or more, to which the model was not fitted.
                Values are hidden as `score` says.
            y: Ignored.
        """
        scores, owners, count = [], [], 0
        for found, truth, _, offsets in self.answer_hidden(X, np.random.default_rng(0)):
            middle, below, above = self._distances(found, 1.0)
            scores.append(np.maximum((middle - truth) / below, (truth - middle) / above))
            owners.append(series_of_rows(offsets) + count)
            count += len(offsets) - 1
        table, owner = np.concatenate(scores), np.concatenate(owners)
        hidden = ~np.isnan(table)
        for name, column in zip(self.target_names_, hidden.T, strict=True):
            if not column.any():
                raise ValueError(f"X has no value of {name!r} to hide; give more or longer series")
        pairs = zip(table.T, hidden.T, strict=True)
        self.conformal_ = tuple(ScoreLevels.of(s[here], owner[here]) for s, here in pairs)
        return self

    def predict_interval(
        self, X: Any, times: Any = None, *, coverage: float = 0.9, **options: Any
    ) -> Answers:
        """Return the ends of intervals, as `predict` returns medians, with a last axis of 2.

        Args:
            X: The series.
            times: As in `predict`.
            coverage: Least chance that an interval holds a value of a new series that is hidden as
                in `calibrate`, each series counting alike, if it is drawn as those there were.
            options: Others of `predict`, such as `relative`.
        """
        self._score_levels()  # refuses before the work
        answers = self.predict_quantiles(X, times, **options)
        if isinstance(answers, list):
            return [self.intervals_of(answer, coverage) for answer in answers]
        return self.intervals_of(answers, coverage)

    def intervals_of(
        self, quantiles: Float[np.ndarray, "*B F L"], coverage: float
    ) -> Float[np.ndarray, "*B F 2"]:
        """Return `predict_interval` for quantiles that `predict_quantiles` returned."""
        factor = np.array([levels.at(coverage) for levels in self._score_levels()])
        unit = self.transform_.value_scaler.scale[self._columns.is_target]
        middle, below, above = self._distances(quantiles, unit)
        return np.stack((middle - factor * below, middle + factor * above), axis=-1)

    def _distances(self, quantiles: np.ndarray, unit: Any) -> tuple[np.ndarray, ...]:
        """Return medians, and how far the outermost quantiles are below and above them."""
        if not self._levels[0] < 0.5 < self._levels[-1]:
            raise ValueError(
                f"intervals need quantiles below and above 0.5; this model has {self._levels}"
            )
        low, middle, high = (quantiles[..., k] for k in (0, self._levels.index(0.5), -1))
        least = _LEAST_DISTANCE * unit
        return middle, np.maximum(middle - low, least), np.maximum(high - middle, least)

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
            raise ValueError("X has nothing to score: none is hidden, or the baseline is perfect")
        return float(1.0 - errors[0] / errors[1])

    def _state(self) -> dict[str, Any]:
        task = {"targets": list(self.target_names_), **self._conformal_state()}
        return {**super()._state(), "task": task}

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super()._restore(content, weights)
        self._set_columns()
        self._restore_conformal(content["task"])


@estimator
class OsciFormerForecaster(QueryEstimator):
    """Forecasts of irregularly sampled series at any future times, with quantiles.

    In training each series is cut at a random row, anew each epoch. Besides those below it has the
    keywords and attributes of `TrainedEstimator`, `SeriesEstimator` and `QueryEstimator`.

    Args:
        horizon: How far ahead to look in training; a quarter of the median span if not given.
        known_covariates: Names of features that are inputs, are not predicted, and are known ahead,
            such as a planned dose: in `predict`, X may hold rows in the future with their values.
            Give them at the times you ask for: between rows, those of the row before count.

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
            times: One array [M] for all series, or a list with one per series; numbers or dates.
            relative: Count numeric times from the last observation of each series.

        Returns:
            [n, M, F] if the times are shared, else a list of [M, F]; F are the `target_names_`.
        """
        return self._median_of(self.predict_quantiles(X, times, relative=relative))

    def predict_quantiles(self, X: Any, times: Any = None, *, relative: bool = False) -> Answers:
        """Return quantiles, as `predict` returns medians, with a last axis for the levels."""
        if times is None:
            raise ValueError(
                "times must say when: one array for all series or a list with one per series; "
                "with relative=True they count from the end of each series"
            )
        return self._predict(X, times, relative=relative)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the skill against the last value, on the end of each series.

        What lies within the horizon before the end is hidden. The score is 1 - e / b, with e the
        mean absolute error of the medians and b that of the last value (the training mean if there
        is none), over targets scaled to unit spread: 1 is perfect, 0 as good as the last value.
        """
        return self._skill(X)

    def _scoring(self) -> tuple[Draw, Baseline]:
        draw = queries.ForecastDraw(self._columns, self.horizon_, at_end=True)
        return draw, queries.last_value_before

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

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return {**state, "task": {**state["task"], "horizon": self.horizon_}}

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super()._restore(content, weights)
        self.horizon_ = float(content["task"]["horizon"])


@estimator
class OsciFormerImputer(TransformerMixin, QueryEstimator):
    """Missing values of irregularly sampled series, and values at any time inside them.

    Besides those below it has the keywords and attributes of `TrainedEstimator`, `SeriesEstimator`
    and `QueryEstimator`.

    Args:
        hidden_fraction: Part of the observations that is hidden in training, anew each epoch.
    """

    hidden_fraction: float = 0.2
    num_layers: int = estimator_defaults("imputation")["num_layers"]
    learning_rate: float = estimator_defaults("imputation")["learning_rate"]

    task: ClassVar[str] = "imputation"
    direction: ClassVar[str] = "bidirectional"
    largest_batch: ClassVar[int] = 32  # with the cost of an epoch the same, twice the steps

    def _make_draw(self, sample: IrregularSeries) -> Draw:
        return queries.HideDraw(self._columns, self.hidden_fraction)

    def predict(self, X: Any, times: Any = None) -> Answers:
        """Return medians of the targets, in the shape of `OsciFormerForecaster.predict`.

        Args:
            X: The series.
            times: One array [M] for all series, or a list with one each; by default the rows of X.
        """
        return self._median_of(self.predict_quantiles(X, times))

    def predict_quantiles(self, X: Any, times: Any = None) -> Answers:
        """Return quantiles, as `predict` returns medians, with a last axis for the levels."""
        return self._predict(X, times)

    def transform(self, X: Any) -> IrregularSeries:
        """Return X with medians in place of missing values; covariates stay as they are."""
        parts = []
        is_target = self._columns.is_target
        for chunk in chunks(self._validate(X)):
            found = self._quantiles_at(chunk, chunk.times, chunk.offsets)
            values = chunk.values.copy()
            known = values[:, is_target]
            values[:, is_target] = np.where(np.isnan(known), self._median_of(found), known)
            parts.append(chunk.replace(values=values))
        return concatenate(parts)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the skill against straight lines, on a part of the observations.

        The same `hidden_fraction` is hidden each time. The score is 1 - e / b, with e the mean
        absolute error of the medians and b that of interpolation (the training mean if a feature
        has no other value), over targets scaled to unit spread: 1 is perfect.
        """
        return self._skill(X)

    def _scoring(self) -> tuple[Draw, Baseline]:
        return queries.HideDraw(self._columns, self.hidden_fraction), queries.interpolate
