"""Fit and predict, in scikit-learn's manner."""

from osciformer.estimators.classifier import OsciFormerClassifier
from osciformer.estimators.forecaster import OsciFormerForecaster
from osciformer.estimators.imputer import OsciFormerImputer
from osciformer.estimators.loading import load_estimator
from osciformer.estimators.regressor import OsciFormerRegressor

__all__ = [
    "OsciFormerClassifier",
    "OsciFormerForecaster",
    "OsciFormerImputer",
    "OsciFormerRegressor",
    "load_estimator",
]
