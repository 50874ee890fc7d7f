"""Point processes with a neural network."""

from osciformer.events.neural.blended import BlendConfig, BlendedEventProcess
from osciformer.events.neural.config import EventModelConfig
from osciformer.events.neural.encoder import EventEncoder, EventStates
from osciformer.events.neural.factory import make_event_model
from osciformer.events.neural.heads import (
    EventHead,
    ExponentialHead,
    MixtureHead,
    SoftplusHead,
)
from osciformer.events.neural.process import NeuralEventProcess

__all__ = [
    "BlendConfig",
    "BlendedEventProcess",
    "EventEncoder",
    "EventHead",
    "EventModelConfig",
    "EventStates",
    "ExponentialHead",
    "MixtureHead",
    "NeuralEventProcess",
    "SoftplusHead",
    "make_event_model",
]
