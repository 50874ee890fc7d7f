"""Fit and predict, in scikit-learn's manner."""

from osciformer.estimators.classifier import OsciFormerClassifier
from osciformer.estimators.event_predictor import OsciFormerEventPredictor
from osciformer.estimators.forecaster import OsciFormerForecaster
from osciformer.estimators.imputer import OsciFormerImputer
from osciformer.estimators.loading import load_estimator
from osciformer.estimators.next_events import NextEvents
from osciformer.estimators.regressor import OsciFormerRegressor

__all__ = [
    "NextEvents",
    "OsciFormerClassifier",
    "OsciFormerEventPredictor",
    "OsciFormerForecaster",
    "OsciFormerImputer",
    "OsciFormerRegressor",
    "load_estimator",
]
