"""Training on PyTorch Lightning: one function for one device and for many."""

from osciformer.config import TrainConfig
from osciformer.train.fitting import FitResult, TrainingInterrupted, choose_device, fit, predict
from osciformer.train.sources import BatchSource, EventSource, SeriesSource, StreamSource
from osciformer.train.tasks import (
    Classification,
    EventLikelihood,
    Quantiles,
    Regression,
    Task,
    class_metrics,
)

__all__ = [
    "BatchSource",
    "Classification",
    "EventLikelihood",
    "EventSource",
    "FitResult",
    "Quantiles",
    "Regression",
    "SeriesSource",
    "StreamSource",
    "Task",
    "TrainConfig",
    "TrainingInterrupted",
    "choose_device",
    "class_metrics",
    "fit",
    "predict",
]
