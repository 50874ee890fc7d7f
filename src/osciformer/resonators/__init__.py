"""Features of oscillators that series drive, and linear models on them."""

from osciformer.resonators.along_time import ResponseAlongTime, respond_along
from osciformer.resonators.families import Columns, Family, FeatureName
from osciformer.resonators.features import FAMILIES, ResonatorFeatures
from osciformer.resonators.linear import LinearHead, MatrixRows

__all__ = [
    "FAMILIES",
    "Columns",
    "Family",
    "FeatureName",
    "LinearHead",
    "MatrixRows",
    "ResonatorFeatures",
    "ResponseAlongTime",
    "respond_along",
]
