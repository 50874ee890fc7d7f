"""Settings of a neural event model as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from osciformer.nn.checks import check_choice

EncoderName = Literal[
    "osciformer", "rmtpp", "neural_hawkes", "transformer_hawkes", "ode_rnn", "mtan", "contiformer"
]
HeadName = Literal["softplus", "decay", "mixture", "exponential"]


@dataclass(frozen=True)
class EventModelConfig:
    """Everything that decides the shape and behaviour of a `NeuralEventProcess`.

    Attributes:
        num_types: Number of event types K.
        encoder: What reads the history: `osciformer` or a baseline.
        head: What makes intensities of states: `softplus` of the state at the time itself,
            `decay` of the state after the last event, `mixture` density of the waiting time with
            types by the state at the time itself, or `exponential` hazard (RMTPP).
        dim: Width D of the states.
        num_layers: Number of blocks of the encoder.
        num_heads: Number of heads of its attention.
        dropout: Dropout.
        num_components: Components of the `mixture` head.
        encoder_options: Further settings of the encoder, by name.

    Example:
        >>> config = EventModelConfig(num_types=3, head="softplus")
        >>> EventModelConfig.from_dict(config.to_dict()) == config
        True
    """

    num_types: int
    encoder: EncoderName = "osciformer"
    head: HeadName = "mixture"
    dim: int = 64
    num_layers: int = 1
    num_heads: int = 4
    dropout: float = 0.1
    num_components: int = 16
    encoder_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_types", "dim", "num_layers", "num_heads", "num_components"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1; got {self.dropout}")
        check_choice("encoder", self.encoder, get_args(EncoderName))
        check_choice("head", self.head, get_args(HeadName))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EventModelConfig:
        """Return the configuration that `to_dict` wrote; an unknown key is an error."""
        allowed = [item.name for item in fields(cls)]
        unknown = sorted(set(settings) - set(allowed))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; allowed: {', '.join(allowed)}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return {**asdict(self), "encoder_options": dict(self.encoder_options)}
