"""Any estimator from its file."""

from __future__ import annotations

from pathlib import Path

from osciformer.estimators.classifier import OsciFormerClassifier
from osciformer.estimators.event_predictor import OsciFormerEventPredictor
from osciformer.estimators.forecaster import OsciFormerForecaster
from osciformer.estimators.imputer import OsciFormerImputer
from osciformer.estimators.regressor import OsciFormerRegressor
from osciformer.estimators.trained import TrainedEstimator
from osciformer.saving import ModelFileError, read_header

ESTIMATORS: dict[str, type[TrainedEstimator]] = {
    kind.__name__: kind
    for kind in (
        OsciFormerClassifier,
        OsciFormerEventPredictor,
        OsciFormerForecaster,
        OsciFormerImputer,
        OsciFormerRegressor,
    )
}


def load_estimator(path: str | Path) -> TrainedEstimator:
    """Return the estimator in a file, whichever it is; nothing in the file is executed.

    Raises:
        FileNotFoundError: If there is no such file.
        ModelFileError: If it is not a model file, is damaged, or needs a newer version.
    """
    kind = read_header(path)["content"].get("estimator")
    if kind not in ESTIMATORS:
        raise ModelFileError(
            f"{path} holds {kind!r}, which is none of {', '.join(ESTIMATORS)}; a newer version of "
            "osciformer may know it"
        )
    return ESTIMATORS[kind].load(path)
