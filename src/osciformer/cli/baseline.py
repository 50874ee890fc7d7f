"""Logistic regression on the last values, to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from osciformer._optional import need
from osciformer._types import Float

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries

PENALTIES = (0.001, 0.01, 0.1, 1.0)  # inverse strengths, chosen by cross-validation


def last_values(series: IrregularSeries) -> Float[np.ndarray, "n F"]:
    """Return the last known value of each feature, NaN if there is none, and static features.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> values = [[[1.0, np.nan], [2.0, np.nan]]]
        >>> last_values(IrregularSeries.from_arrays([[0.0, 1.0]], values))
        array([[ 2., nan]], dtype=float32)
    """
    row = np.where(np.isnan(series.values), -1, np.arange(len(series.values))[:, None])
    np.maximum.accumulate(row, axis=0, out=row)
    last = series.offsets[1:] - 1
    latest = np.where(series.lengths[:, None] > 0, row[last], -1)
    # A value of the series before is not this one's.
    latest = np.where(latest >= series.offsets[:-1, None], latest, -1)
    known = np.take_along_axis(series.values, np.maximum(latest, 0), axis=0)
    found = np.where(latest >= 0, known, np.float32(np.nan))
    return found if series.static is None else np.hstack((found, series.static))


def logistic_chances(
    train: IrregularSeries, test: IrregularSeries, seed: int
) -> Float[np.ndarray, "n"]:
    """Return the chance of the second class, by logistic regression on last values.

    Gaps are filled with medians and marked as such; the penalty is chosen by cross-validation.

    Args:
        train: Series with labels of two classes.
        test: Series to predict.
        seed: Decides the folds.
    """
    selection = need("sklearn.model_selection", extra="train")
    steps = (
        need("sklearn.impute", extra="train").SimpleImputer(
            strategy="median", add_indicator=True, keep_empty_features=True
        ),
        need("sklearn.preprocessing", extra="train").StandardScaler(),
        need("sklearn.linear_model", extra="train").LogisticRegression(max_iter=2000),
    )
    search = selection.GridSearchCV(
        need("sklearn.pipeline", extra="train").make_pipeline(*steps),
        {"logisticregression__C": PENALTIES},
        scoring="roc_auc",
        cv=selection.StratifiedKFold(5, shuffle=True, random_state=seed),
    )
    chance: np.ndarray = search.fit(last_values(train), train.labels).predict_proba(
        last_values(test)
    )
    return chance[:, 1]
