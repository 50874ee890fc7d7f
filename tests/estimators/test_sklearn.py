from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline

from osciformer.config import estimator_defaults, estimator_settings
from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
)

from .toy import TINY, make, two_levels

ALL = [
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
]


@pytest.mark.parametrize("kind", ALL)
def test_clone_has_the_parameters_and_nothing_learned(kind: Any) -> None:
    model = kind(
        dim=12,
        model_options={"backbone_options": {"num_modes": 4}},
        train_options={"patience": 3},
        random_state=3,
    )
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


@pytest.mark.parametrize("kind", ALL)
def test_keywords_are_few_and_have_the_defaults_of_the_task(kind: Any) -> None:
    params = kind().get_params()
    assert len(params) <= 20
    defaults = estimator_defaults(kind.task) | {"random_state": None}
    assert {name: v for name, v in params.items() if name in defaults} == {
        name: v for name, v in defaults.items() if name in params
    }
    direct = {n for n, item in estimator_settings(kind.task).items() if not item.group}
    assert direct <= set(params)
    assert kind().settings() == defaults


@pytest.mark.parametrize("kind", ALL)
def test_deprecated_keywords_go_where_they_belong(kind: Any) -> None:
    with pytest.warns(DeprecationWarning, match="weight_decay .* train_options=") as caught:
        model = kind(dim=8, weight_decay=0.5, train_options={"patience": 2})
    assert caught[0].filename == __file__
    assert model.train_options == {"patience": 2, "weight_decay": 0.5}
    assert clone(model).get_params() == model.get_params()
    with pytest.warns(DeprecationWarning, match="gradient_clip .* train_options"):
        model.set_params(gradient_clip=None, dim=4)
    assert (model.dim, model.settings()["gradient_clip"]) == (4, None)
    assert model.settings()["weight_decay"] == 0.5


def test_removed_keywords_are_refused_if_on() -> None:
    with pytest.warns(DeprecationWarning, match="foresight has no effect"):
        assert OsciFormerClassifier(foresight=0.0).get_params()["dim"] == 32
    with pytest.raises(ValueError, match=r"foresight=0.5 .*train the model again"):
        OsciFormerClassifier(foresight=0.5)


def test_unknown_keywords_and_options_are_refused_with_near_matches() -> None:
    with pytest.raises(TypeError, match="no parameter 'drop_out'; did you mean 'dropout'"):
        OsciFormerClassifier(drop_out=0.1)
    X = two_levels(8)
    with pytest.raises(ValueError, match="'weigth_decay'; did you mean 'weight_decay'"):
        OsciFormerClassifier(train_options={"weigth_decay": 0.1}).fit(X)
    with pytest.raises(ValueError, match="dim does not belong to model_options, but to the keyw"):
        OsciFormerClassifier(model_options={"dim": 8}).fit(X)
    with pytest.raises(ValueError, match="pool does not belong to train_options, but to model_"):
        OsciFormerClassifier(train_options={"pool": "last"}).fit(X)
    with pytest.raises(ValueError, match="Invalid parameter 'drop_out'"):
        OsciFormerClassifier().set_params(drop_out=0.1)


def test_options_can_be_searched() -> None:
    X = two_levels(16)
    grid = {"train_options__weight_decay": [0.0, 0.1], "model_options__pool": [("last",)]}
    model = make(OsciFormerClassifier, **{**TINY, "max_epochs": 1})
    search = GridSearchCV(model, grid, cv=2).fit(X, X.labels)
    assert search.best_estimator_.model_.config.pool == ("last",)
    assert model.train_options is None


@pytest.mark.parametrize("kind", ALL)
def test_unfitted_estimator_says_so(kind: Any) -> None:
    with pytest.raises(NotFittedError, match="is not fitted; call fit"):
        kind().score(two_levels(4))


def test_kinds_are_known_to_scikit_learn() -> None:
    assert is_classifier(OsciFormerClassifier())
    assert is_regressor(OsciFormerRegressor())


def test_cross_validation_takes_the_container() -> None:
    X = two_levels(30)
    scores = cross_val_score(
        make(OsciFormerClassifier, **TINY), X, X.labels, cv=3, scoring="roc_auc"
    )
    assert scores.shape == (3,)
    assert np.isfinite(scores).all()


def test_cross_validated_predictions_are_in_order() -> None:
    X = two_levels(30)
    model = make(OsciFormerClassifier, **{**TINY, "max_epochs": 8, "learning_rate": 0.03})
    found = cross_val_predict(model, X, X.labels, cv=2)
    assert (found == X.labels).mean() > 0.8


def test_grid_search_sets_parameters() -> None:
    X = two_levels(24)
    search = GridSearchCV(
        make(OsciFormerClassifier, **TINY), {"dim": [4, 8]}, cv=2, scoring="neg_log_loss"
    ).fit(X, X.labels)
    assert search.best_params_["dim"] == search.best_estimator_.dim
    assert search.predict(X).shape == (24,)


def test_imputer_and_classifier_make_a_pipeline() -> None:
    X = two_levels(20)
    pipeline = make_pipeline(
        make(OsciFormerImputer, **{**TINY, "max_epochs": 1}), make(OsciFormerClassifier, **TINY)
    )
    pipeline.fit(X, X.labels)
    assert pipeline.predict_proba(X).shape == (20, 2)
