"""The baselines by name: which encoder, which head, which sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from osciformer.events.neural.baselines.contiformer import ContiFormerEventEncoder
from osciformer.events.neural.baselines.mtan import MultiTimeAttentionEncoder
from osciformer.events.neural.baselines.neural_hawkes import ContinuousTimeLSTMEncoder
from osciformer.events.neural.baselines.ode_rnn import ODERNNEncoder
from osciformer.events.neural.baselines.rmtpp import RecurrentEventEncoder
from osciformer.events.neural.baselines.transformer_hawkes import TransformerHawkesEncoder
from osciformer.events.neural.encoder import EventEncoder


class BaselineEncoder(NamedTuple):
    """An encoder, called with `(num_types, dim)` and some settings of `EventModelConfig`.

    Attributes:
        kind: The class.
        settings: Names of the settings that it takes; the others mean nothing to it.
    """

    kind: type[EventEncoder]
    settings: tuple[str, ...]


BASELINE_ENCODERS: dict[str, BaselineEncoder] = {
    "rmtpp": BaselineEncoder(RecurrentEventEncoder, ("num_layers", "dropout")),
    "neural_hawkes": BaselineEncoder(ContinuousTimeLSTMEncoder, ("dropout",)),
    "transformer_hawkes": BaselineEncoder(
        TransformerHawkesEncoder, ("num_layers", "num_heads", "dropout")
    ),
    "ode_rnn": BaselineEncoder(ODERNNEncoder, ("dropout",)),
    "mtan": BaselineEncoder(MultiTimeAttentionEncoder, ("num_heads", "dropout")),
    "contiformer": BaselineEncoder(ContiFormerEventEncoder, ("num_layers", "num_heads", "dropout")),
}

# Settings of `EventModelConfig` besides the number of types.
BASELINE_MODELS: dict[str, dict[str, Any]] = {
    "rmtpp": {"encoder": "rmtpp", "head": "exponential", "dim": 64, "num_layers": 1},
    "neural_hawkes": {"encoder": "neural_hawkes", "head": "softplus", "dim": 64, "num_layers": 1},
    "transformer_hawkes": {
        "encoder": "transformer_hawkes",
        "head": "decay",
        "dim": 64,
        "num_layers": 2,
        "num_heads": 4,
    },
    "ode_rnn": {"encoder": "ode_rnn", "head": "softplus", "dim": 64, "num_layers": 1},
    "mtan": {"encoder": "mtan", "head": "softplus", "dim": 64, "num_layers": 1, "num_heads": 4},
    # Its width is half that of the others: each pair of an event and a read has a state of its own.
    "contiformer": {
        "encoder": "contiformer",
        "head": "softplus",
        "dim": 32,
        "num_layers": 1,
        "num_heads": 4,
    },
}
