"""Data and settings with which a classifier cannot be fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier

from .toy import TINY, make, two_levels


def labelled(labels: Any) -> tuple[IrregularSeries, Any]:
    return two_levels(4).replace(labels=None), labels


@pytest.mark.parametrize(
    ("X", "y", "error", "message"),
    [
        (*labelled(["a"] * 4), ValueError, "one class only, .*'a'"),
        (*labelled(None), ValueError, "y is not given and X has no labels"),
        (*labelled([0.0, 1.0, np.nan, 1.0]), ValueError, r"it is at 2 \(1 of 4\)"),
        (*labelled(["a", None, "b", "a"]), ValueError, r"it is at 1 \(1 of 4\)"),
        (*labelled([0.5, 1.0, 0.0, 1.0]), ValueError, "holds 0.5. Use OsciFormerRegressor"),
        (*labelled(["a", "b"]), ValueError, r"y must have 4 entries.*\[2\]"),
        ([], ["a"], ValueError, "X holds no series"),
        (two_levels(4)[:0], None, ValueError, "X holds no series"),
        (np.zeros((4, 5, 2)), [0, 1, 0, 1], TypeError, "from_padded"),
        ([np.zeros(3), np.zeros(3), 1], [0, 1, 0], TypeError, "item 0 is ndarray"),
        ({"id": [1], "time": [0.0]}, [0], ValueError, "needs a layout"),
    ],
    ids=[
        "one class", "no labels", "nan", "none", "real", "length", "no pairs", "no series", "array",
        "no pair", "no layout",
    ],
)  # fmt: skip
def test_bad_training_data_are_named(X: Any, y: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(OsciFormerClassifier, **TINY).fit(X, y)


def test_all_values_missing_is_an_error() -> None:
    X = two_levels(4)
    with pytest.raises(ValueError, match="all values of all 4 series are missing"):
        make(OsciFormerClassifier, **TINY, validation_fraction=0.0).fit(
            X.replace(values=np.full_like(X.values, np.nan))
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_weight": "heavy"}, "class_weight must be None, 'balanced' or a dict"),
        ({"class_weight": {"c": 2.0}}, "class_weight names 'c', which y does not have"),
        ({"validation_fraction": 1.0}, "validation_fraction must be from 0 to below 1; got 1.0"),
        ({"weight_averaging": 1.0}, "weight_averaging must be from 0 to below 1; got 1.0"),
        ({"statistics": ("median",)}, "statistics must be one of 'last', .*; got 'median'"),
        ({"monitor": "rmse"}, "monitor must be .*'auprc'; got 'rmse'"),
        ({"learning_rate": -1.0}, "learning_rate must be positive and finite; got -1.0"),
        ({"backbone": "oracle"}, "backbone must be one of"),
        ({"random_state": None, "devices": 2}, "random_state must be a number when several"),
    ],
)
def test_bad_settings_are_named_in_fit(settings: dict[str, Any], message: str) -> None:
    model = make(OsciFormerClassifier, **{**TINY, **settings})
    with pytest.raises(ValueError, match=message):
        model.fit(two_levels(20))


def test_unfitted_model_says_so() -> None:
    with pytest.raises(NotFittedError, match="is not fitted; call fit"):
        OsciFormerClassifier().predict(two_levels(4))
    with pytest.raises(NotFittedError):
        OsciFormerClassifier().save("nowhere")
