from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline

from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
)

from .toy import TINY, two_levels

ALL = [OsciFormerClassifier, OsciFormerForecaster, OsciFormerImputer, OsciFormerRegressor]


@pytest.mark.parametrize("kind", ALL)
def test_clone_has_the_parameters_and_nothing_learned(kind: Any) -> None:
    model = kind(dim=12, backbone_options={"num_modes": 4}, random_state=3)
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    assert vars(copy).keys() == copy.get_params().keys()


@pytest.mark.parametrize("kind", ALL)
def test_constructor_stores_what_it_gets(kind: Any) -> None:
    model = kind(dim="nonsense", learning_rate=-1)
    assert model.dim == "nonsense"
    assert model.set_params(dim=3).get_params()["dim"] == 3


@pytest.mark.parametrize("kind", ALL)
def test_representation_shows_what_differs_from_the_defaults(kind: Any) -> None:
    assert repr(kind(dim=12)) == f"{kind.__name__}(dim=12)"


def test_kinds_are_known_to_scikit_learn() -> None:
    assert is_classifier(OsciFormerClassifier())
    assert is_regressor(OsciFormerRegressor())


def test_cross_validation_takes_the_container() -> None:
    X = two_levels(30)
    scores = cross_val_score(OsciFormerClassifier(**TINY), X, X.labels, cv=3, scoring="roc_auc")
    assert scores.shape == (3,)
    assert np.isfinite(scores).all()


def test_cross_validated_predictions_are_in_order() -> None:
    X = two_levels(30)
    model = OsciFormerClassifier(**{**TINY, "max_epochs": 8, "learning_rate": 0.03})
    found = cross_val_predict(model, X, X.labels, cv=2)
    assert (found == X.labels).mean() > 0.8


def test_grid_search_sets_parameters() -> None:
    X = two_levels(24)
    search = GridSearchCV(
        OsciFormerClassifier(**TINY), {"dim": [4, 8]}, cv=2, scoring="neg_log_loss"
    ).fit(X, X.labels)
    assert search.best_params_["dim"] == search.best_estimator_.dim
    assert search.predict(X).shape == (24,)


def test_imputer_and_classifier_make_a_pipeline() -> None:
    X = two_levels(20)
    pipeline = make_pipeline(
        OsciFormerImputer(**{**TINY, "max_epochs": 1}), OsciFormerClassifier(**TINY)
    )
    pipeline.fit(X, X.labels)
    assert pipeline.predict_proba(X).shape == (20, 2)
