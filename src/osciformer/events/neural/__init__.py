"""Point processes with a neural network."""

from osciformer.config import EventModelConfig as EventModelConfig
from osciformer.events.neural.blended import BlendConfig as BlendConfig
from osciformer.events.neural.blended import BlendedEventProcess as BlendedEventProcess
from osciformer.events.neural.encoder import EventEncoder as EventEncoder
from osciformer.events.neural.encoder import EventStates as EventStates
from osciformer.events.neural.heads import EventHead as EventHead
from osciformer.events.neural.heads import ExponentialHead as ExponentialHead
from osciformer.events.neural.heads import MixtureHead as MixtureHead
from osciformer.events.neural.heads import SoftplusHead as SoftplusHead
from osciformer.events.neural.osciformer_encoder import (
    OsciFormerEventEncoder as OsciFormerEventEncoder,
)
from osciformer.events.neural.process import NeuralEventProcess as NeuralEventProcess
from osciformer.events.neural.process import make_event_model as make_event_model
