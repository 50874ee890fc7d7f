"""Training on PyTorch Lightning: one function for one device and for many."""

from osciformer.train.config import TrainConfig
from osciformer.train.event_source import EventSource
from osciformer.train.event_task import EventLikelihood
from osciformer.train.fitting import FitResult, TrainingInterrupted, choose_device, fit
from osciformer.train.predicting import predict
from osciformer.train.scores import class_metrics
from osciformer.train.sources import BatchSource, SeriesSource, StreamSource
from osciformer.train.tasks import Classification, Quantiles, Regression, Task

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
