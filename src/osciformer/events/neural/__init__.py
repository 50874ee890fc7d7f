"""Point processes with a neural network."""

from osciformer.config import EventModelConfig
from osciformer.events.neural.blended import BlendConfig, BlendedEventProcess
from osciformer.events.neural.encoder import EventEncoder, EventStates
from osciformer.events.neural.heads import (
    EventHead,
    ExponentialHead,
    MixtureHead,
    SoftplusHead,
)
from osciformer.events.neural.osciformer_encoder import OsciFormerEventEncoder
from osciformer.events.neural.process import NeuralEventProcess, make_event_model

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
    "OsciFormerEventEncoder",
    "SoftplusHead",
    "make_event_model",
]
