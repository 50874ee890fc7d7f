"""What encodes a series or a history of events: an interface, and a registry by name."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar, cast

import torch
from torch import nn

from osciformer._text import did_you_mean
from osciformer._types import Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.config import OsciFormerConfig, TaskConfig, refuse_unknown
from osciformer.models.forward_fill import positive_gaps
from osciformer.models.osciformer import OsciFormer
from osciformer.nn.encoder import Encoded

#: Modules that register further backbones when they are imported; they need not be installed.
PLUGINS = ("osciformer.baselines",)

Kind = Literal["series", "events"]
_Class = TypeVar("_Class", bound=type[nn.Module])


class _Entry(NamedTuple):
    make: Callable[..., Any]
    settings: tuple[str, ...]
    options: tuple[str, ...]


_REGISTRY: dict[tuple[Kind, str], _Entry] = {}
_SETTING = {"series": "backbone", "events": "encoder"}


def register_backbone(
    name: str,
    *,
    kind: Kind = "series",
    settings: Iterable[str] = ("num_layers", "num_heads", "dropout"),
    options: Iterable[str] | None = None,
) -> Callable[[_Class], _Class]:
    """Return a class decorator that makes a backbone known by a name.

    A backbone of series is a `Backbone`, called with `input_dim=, static_dim=, dim=`; one of events
    is an `EventEncoder`, called with `num_types=, dim=`.

    Args:
        name: What configurations call it.
        kind: `series` (the setting `backbone`) or `events` (the setting `encoder`).
        settings: Settings of the configuration that are handed on besides these.
        options: What `backbone_options` or `encoder_options` may hold; None takes all further
            parameters of the class.
    """
    settings = tuple(settings)
    sizes = ("input_dim", "static_dim") if kind == "series" else ("num_types",)

    def register(cls: _Class) -> _Class:
        found = signature(cls).parameters if options is None else options
        further = tuple(item for item in found if item not in (*sizes, "dim", *settings))
        _REGISTRY[kind, name] = _Entry(cls, settings, further)
        return cls

    return register


def find_backbone(name: str, kind: Kind = "series") -> _Entry:
    """Return how a backbone is made; the plugins are imported if its name is not known yet."""
    if (kind, name) not in _REGISTRY and name not in (known := backbone_names(kind)):
        hint = did_you_mean(name, known)
        message = f"{_SETTING[kind]} must be one of {', '.join(map(repr, known))}; got {name!r}"
        raise ValueError(f"{message}; {hint}" if hint else message)
    return _REGISTRY[kind, name]


def backbone_names(kind: Kind = "series") -> list[str]:
    """Return the names of all backbones of a kind, those of the plugins included."""
    for plugin in PLUGINS:
        if importlib.util.find_spec(plugin) is not None:
            importlib.import_module(plugin)
    return [name for of, name in _REGISTRY if of == kind]


def build_backbone(
    name: str, kind: Kind, config: Any, options: Mapping[str, Any], **sizes: Any
) -> Any:
    """Return a backbone by its name, with sizes, settings of a configuration, and its options."""
    entry = find_backbone(name, kind)
    refuse_unknown(f"option of {_SETTING[kind]} {name}", options, entry.options)
    settings = {item: getattr(config, item) for item in entry.settings}
    return entry.make(**sizes, **settings, **options)


def make_backbone(config: TaskConfig, input_dim: int, **options: Any) -> Backbone:
    """Return the backbone of a task model, with options besides `config.backbone_options`."""
    options = {**(config.backbone_options or {}), **options}
    sizes = {"input_dim": input_dim, "static_dim": config.static_dim, "dim": config.dim}
    if config.blocks is not None and "blocks" not in find_backbone(config.backbone).settings:
        raise ValueError(
            f"blocks={config.blocks} is a setting of backbone 'osciformer'; backbone"
            f" {config.backbone!r} has blocks of its own: leave it out"
        )
    return cast("Backbone", build_backbone(config.backbone, "series", config, options, **sizes))


class EncodedSeries(Protocol):
    """An encoded batch; what else it holds is for `Backbone.read`."""

    @property
    def states(self) -> Tokens:
        """States of the observations; zero where absent."""


class Backbone(nn.Module, ABC):
    """An encoder of irregular series; its caller, a task model, has validated the arguments."""

    dim: int  #: Width D of the states.
    can_read: bool = True  #: Whether there are states between the observations.

    @abstractmethod
    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> EncodedSeries:
        """Return the encoded series; arguments are those of `OsciFormer.forward`."""

    @abstractmethod
    def read(self, encoded: Any, query_times: QueryTimes) -> Reads:
        """Return the states of an encoded batch at any times, in the unit of the data."""

    def read_series(
        self, values: Values, times: Times, mask: Mask, static: Static | None, query_times: Tensor
    ) -> Reads:
        """Return `read(encode(values, times, mask, static), query_times)`, if possible faster."""
        return self.read(self.encode(values, times, mask, static), query_times)

    @abstractmethod
    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        """Set all that depends on the times of the training set, which has a positive gap."""

    def fit_time_scale(
        self, times: Times, mask: Mask | None = None, generator: torch.Generator | None = None
    ) -> Self:
        """Set the unit of time from the training times; keep it if no series has two of them."""
        if len(positive_gaps(times, mask)):
            self._fit_time_scale(times, mask, generator)
        return self


@register_backbone(
    "osciformer",
    settings=("num_layers", "blocks", "num_heads", "dropout"),
    options=("preset", *(item.name for item in fields(OsciFormerConfig))),
)
class OsciFormerBackbone(Backbone):
    """An `OsciFormer` as a backbone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = OsciFormer(**settings)
        self.dim = self.model.dim

    def encode(self, *args: Any, **kwargs: Any) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        return cast("Encoded", self.model(*args, **kwargs, validate=False))

    def read(self, encoded: Encoded, query_times: QueryTimes) -> Reads:
        """Return the states at any times, see `OsciFormer.read`."""
        return self.model.read(encoded, query_times)

    def read_series(self, *args: Any, **kwargs: Any) -> Reads:
        """Return the states at any times, see `OsciFormer.read_series`."""
        return self.model.read_series(*args, **kwargs, validate=False)

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.model.fit_time_scale(times, mask, generator=generator)
