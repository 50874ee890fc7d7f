"""Values of irregular series at times inside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from osciformer._optional import need
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.estimators import data_access, queries
from osciformer.estimators.query_base import Answers, QueryEstimator
from osciformer.train.sources import Draw

if TYPE_CHECKING:
    from sklearn.base import TransformerMixin
else:
    TransformerMixin = need("sklearn.base", extra="train").TransformerMixin


@dataclass(eq=False, repr=False, kw_only=True)
class OsciFormerImputer(TransformerMixin, QueryEstimator):
    """Missing values of irregularly sampled series, and values at any time inside them.

    In training a part of the observations is hidden, anew each epoch, and the model is scored on
    those. Besides those below it has the arguments and attributes of `SeriesEstimator` and
    `QueryEstimator`; all are keywords.

    Args:
        hidden_fraction: Part of the observations that is hidden.
    """

    hidden_fraction: float = 0.2

    direction: ClassVar[str] = "bidirectional"

    def _learn_times(self, sample: IrregularSeries) -> None:
        if not 0 < self.hidden_fraction < 1:
            raise ValueError(
                f"hidden_fraction must lie between 0 and 1; got {self.hidden_fraction}"
            )

    def _training_draw(self) -> Draw:
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
        if times is not None:
            return self._predict(X, times, None)
        parts: list[np.ndarray] = []
        for chunk in data_access.chunks(self._look_again(X)):
            found = self._quantiles_at(chunk, chunk.times, chunk.offsets)
            parts += np.split(found, chunk.offsets[1:-1])
        return parts

    def transform(self, X: Any) -> IrregularSeries:
        """Return X with medians in place of missing values; covariates stay as they are."""
        parts = []
        for chunk in data_access.chunks(self._look_again(X)):
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
        self._look_again(X)
        return self._skill(X, self._training_draw(), queries.interpolate)
