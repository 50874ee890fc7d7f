"""Fit and predict, in scikit-learn's manner."""

from osciformer.estimators.base import load, load_estimator
from osciformer.estimators.events import NextEvents, OsciFormerEventPredictor
from osciformer.estimators.forecasting import OsciFormerForecaster, OsciFormerImputer
from osciformer.estimators.resonator import ResonatorClassifier, ResonatorRegressor
from osciformer.estimators.supervised import OsciFormerClassifier, OsciFormerRegressor

__all__ = [
    "NextEvents",
    "OsciFormerClassifier",
    "OsciFormerEventPredictor",
    "OsciFormerForecaster",
    "OsciFormerImputer",
    "OsciFormerRegressor",
    "ResonatorClassifier",
    "ResonatorRegressor",
    "load",
    "load_estimator",
]
