"""Values of irregular series at future times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from osciformer.data.ragged import series_of_rows
from osciformer.data.series import IrregularSeries
from osciformer.estimators import queries
from osciformer.estimators.query_base import Answers, QueryEstimator, last_target_times
from osciformer.train.sources import Draw

# The part of a typical series that is the horizon, if none is given.
HORIZON_PART = 0.25


@dataclass(eq=False, repr=False, kw_only=True)
class OsciFormerForecaster(QueryEstimator):
    """Forecasts of irregularly sampled series at any future times, with quantiles.

    In training each series is cut at a random row, anew each epoch: the model sees what comes
    before and is scored on the observations after the cut, up to the horizon. Besides those below
    it has the arguments and attributes of `SeriesEstimator` and `QueryEstimator`; all are keywords.

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

    direction: ClassVar[str] = "causal"

    def _find_columns(self) -> queries.Columns:
        names = list(self.feature_names_in_)
        return queries.find_columns(names, self.covariates, self.known_covariates, self.clip)

    def _learn_times(self, sample: IrregularSeries) -> None:
        horizon = self.horizon
        if horizon is None:
            horizon = HORIZON_PART * float(np.median(sample.spans))
        if not 0 < horizon < float("inf"):
            raise ValueError(
                f"horizon must be positive and finite; got {horizon}"
                + (", as most series have one time only" if self.horizon is None else "")
            )
        self.horizon_ = float(horizon)

    def _training_draw(self) -> Draw:
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
        return self._predict(X, times, self._ends if relative else None)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the skill against the last value, on the end of each series.

        What lies within the horizon before the end of a series is hidden and predicted from the
        rest. The score is 1 - e / b, with e the mean absolute error of the medians and b that of
        the last value (the training mean if there is none), over all targets scaled to unit spread:
        1 is perfect, 0 as good as the last value.
        """
        self._look_again(X)
        draw = queries.ForecastDraw(self._columns, self.horizon_, at_end=True)
        return self._skill(X, draw, queries.last_value_before)

    def _ends(self, series: IrregularSeries) -> np.ndarray:
        return last_target_times(series, self._columns.is_target)

    def _check_times(self, series: IrregularSeries, times: Any, offsets: Any) -> None:
        owner = series_of_rows(offsets)
        early = times <= self._ends(series)[owner]
        early &= series.num_observed[owner] > 0
        if early.any():
            row = int(np.argmax(early))
            raise ValueError(
                f"times must lie after the last observation; series {series.ids[owner[row]]!s} "
                f"ends at {self._ends(series)[owner[row]]:g}, and {times[row]:g} is asked. Pass "
                "relative=True to count from the end, or use OsciFormerImputer for times inside"
            )

    def _task_state(self) -> dict[str, Any]:
        return {**super()._task_state(), "horizon": self.horizon_}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        super()._restore_task(state)
        self.horizon_ = float(state["horizon"])
