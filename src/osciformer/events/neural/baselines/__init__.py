"""Encoders of published neural point processes, with the heads and the likelihood of all others.

`BASELINE_MODELS` has the settings with which each of them is the published model:

>>> from osciformer.events.neural import EventModelConfig, make_event_model
>>> config = EventModelConfig(num_types=3, **BASELINE_MODELS["neural_hawkes"])
>>> make_event_model(config).num_types
3
"""

from osciformer.events.neural.baselines.contiformer import ContiFormerEventEncoder
from osciformer.events.neural.baselines.models import BASELINE_ENCODERS, BASELINE_MODELS
from osciformer.events.neural.baselines.mtan import MultiTimeAttentionEncoder
from osciformer.events.neural.baselines.neural_hawkes import ContinuousTimeLSTMEncoder
from osciformer.events.neural.baselines.ode_rnn import ODERNNEncoder
from osciformer.events.neural.baselines.rmtpp import RecurrentEventEncoder
from osciformer.events.neural.baselines.transformer_hawkes import TransformerHawkesEncoder

__all__ = [
    "BASELINE_ENCODERS",
    "BASELINE_MODELS",
    "ContiFormerEventEncoder",
    "ContinuousTimeLSTMEncoder",
    "MultiTimeAttentionEncoder",
    "ODERNNEncoder",
    "RecurrentEventEncoder",
    "TransformerHawkesEncoder",
]
