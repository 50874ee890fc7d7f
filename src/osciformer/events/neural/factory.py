"""Neural processes by the names of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from osciformer.events.neural.baselines import BASELINE_ENCODERS
from osciformer.events.neural.config import EventModelConfig
from osciformer.events.neural.encoder import EventEncoder
from osciformer.events.neural.heads import (
    EventHead,
    ExponentialHead,
    MixtureHead,
    SoftplusHead,
)
from osciformer.events.neural.osciformer_encoder import OsciFormerEventEncoder
from osciformer.events.neural.process import NeuralEventProcess


def make_event_model(config: EventModelConfig) -> NeuralEventProcess:
    """Return the untrained process of a configuration.

    Example:
        >>> model = make_event_model(EventModelConfig(num_types=4, dim=16))
        >>> model.num_types
        4
    """
    encoder = _make_encoder(config)
    return NeuralEventProcess(encoder, _make_head(config, encoder.dim), config)


def _make_encoder(config: EventModelConfig) -> EventEncoder:
    kind: type[EventEncoder] = OsciFormerEventEncoder
    names: tuple[str, ...] = ("num_layers", "num_heads", "dropout")
    if config.encoder != "osciformer":
        kind, names = BASELINE_ENCODERS[config.encoder]
    _check_options(kind, names, config.encoder_options)
    settings = {name: getattr(config, name) for name in names}
    make: Any = kind
    encoder: EventEncoder = make(config.num_types, config.dim, **settings, **config.encoder_options)
    return encoder


def _check_options(
    kind: type[EventEncoder], taken: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    """Refuse options that an encoder does not have, or that are settings of the configuration."""
    allowed = sorted(set(signature(kind).parameters) - {"num_types", "dim", *taken})
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(
            f"encoder_options {unknown} are not those of {kind.__name__}; allowed: "
            f"{', '.join(allowed) or 'none'}"
        )


def _make_head(config: EventModelConfig, dim: int) -> EventHead:
    if config.head == "mixture":
        return MixtureHead(dim, config.num_types, config.num_components)
    if config.head == "exponential":
        return ExponentialHead(dim, config.num_types)
    return SoftplusHead(dim, config.num_types, decay=config.head == "decay")
