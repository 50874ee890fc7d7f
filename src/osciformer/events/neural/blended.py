"""A network and classical processes as one model that can be moved, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from osciformer._advice import Mention, advise
from osciformer._text import check_choice
from osciformer._types import Float, Tensor
from osciformer.config import EventModelConfig
from osciformer.events.blending import BlendedProcess, check_members, fit_weights, log_densities
from osciformer.events.classical import (
    GapDensity,
    HawkesProcess,
    RenewalProcess,
    choose_hawkes,
    choose_renewal,
)
from osciformer.events.neural.heads import grid_step
from osciformer.events.neural.process import NeuralEventProcess, make_event_model
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

Companion = Literal["renewal", "repeat", "hawkes"]
# Types up to which `auto` takes a Hawkes process: it has a number for each pair of them.
_MOST_HAWKES_TYPES = 10
# A histogram must not be finer than the grid of the times, or it scores what is not there.
_GRID_STEPS = 3.0


def companions_of(blend_with: str | Sequence[str] | None, num_types: int) -> tuple[str, ...]:
    """Return which classical processes a setting means; `auto` depends on the number of types."""
    if blend_with is None:
        return ()
    if not isinstance(blend_with, str | Sequence):
        raise TypeError(f"blend_with must be 'auto', names or None; got {blend_with!r}")
    names = (blend_with,) if isinstance(blend_with, str) else tuple(blend_with)
    for name in names:
        check_choice("blend_with", name, ("auto", *get_args(Companion)))
    if names == ("auto",):
        fits = {"renewal": True, "repeat": num_types > 1, "hawkes": num_types <= _MOST_HAWKES_TYPES}
        return tuple(name for name, does in fits.items() if does)
    if len(set(names)) < len(names) or "auto" in names:
        raise ValueError(f"blend_with must be 'auto', or name each process once; got {names}")
    return names


def check_can_blend(network: NeuralEventProcess, validation: EventSequences) -> None:
    """Refuse a network without closed integrals, and too few events to fit the weights to."""
    _check_head(network)
    if not bool((validation.lengths > 1).any()):
        message = (
            "blend_with needs validation sequences with two events or more, to find the weights; "
            "give validation_data or a larger validation_fraction, or "
        )
        raise advise(ValueError, message, Mention("blend_with", None))


def _check_head(network: NeuralEventProcess) -> None:
    if not network.head.is_closed:
        closed = f"'mixture' or 'exponential'; got {network.config.head!r}"
        raise ValueError(f"blend_with needs a head whose integrals have a closed form, {closed}")


@dataclass(frozen=True)
class BlendConfig:
    """What a `BlendedEventProcess` is made of."""

    network: EventModelConfig  #: Settings of the network.
    #: Name and kind of each classical process, and the shapes of its tensors by name.
    companions: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {"network": self.network.to_dict(), "companions": list(map(dict, self.companions))}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> BlendConfig:
        """Return the configuration that `to_dict` wrote."""
        return cls(EventModelConfig.from_dict(settings["network"]), tuple(settings["companions"]))


class _Kept(nn.Module):
    """A classical process whose tensors are buffers."""

    def __init__(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind = kind
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())
        self._made: EventProcess | None = None

    @classmethod
    def of(cls, process: EventProcess) -> _Kept:
        if isinstance(process, HawkesProcess):
            return cls("hawkes", {name: getattr(process, name) for name in _HAWKES})
        if not isinstance(process, RenewalProcess):
            got = f"got {type(process).__name__}. BlendedProcess takes any, but cannot be saved"
            raise TypeError(f"a network is blended with renewal and Hawkes processes; {got}")
        gaps, types = process.gaps, {"transition": process.transition, "initial": process.initial}
        tail_rate = torch.tensor(gaps.tail_rate, dtype=torch.float64)
        tensors = {"edges": gaps.edges, "mass": gaps.mass, "tail_rate": tail_rate}
        return cls("renewal", {**tensors, **types})

    @classmethod
    def empty(cls, described: Mapping[str, Any]) -> _Kept:
        """Return a module with room for the tensors of a process."""
        check_choice("kind", described["kind"], tuple(_MAKERS))
        shapes = described["shapes"].items()
        tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes}
        return cls(described["kind"], tensors)

    @property
    def process(self) -> EventProcess:
        """The process; it is made once, as its checks wait for the device."""
        if self._made is None:
            # A model may be cast; classical processes compute in double precision.
            tensors = {name: tensor.double() for name, tensor in self.named_buffers()}
            self._made = _MAKERS[self.kind](tensors)
        return self._made

    def _apply(self, *args: Any, **options: Any) -> Self:
        self._made = None
        return super()._apply(*args, **options)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._made = None
        super()._load_from_state_dict(*args, **options)


_HAWKES = ("base", "branching", "decay")
_MAKERS: dict[str, Callable[[dict[str, Tensor]], EventProcess]] = {
    "renewal": lambda kept: RenewalProcess(
        GapDensity(kept["edges"], kept["mass"], float(kept["tail_rate"])),
        kept["transition"],
        kept["initial"],
    ),
    "hawkes": lambda kept: HawkesProcess(*(kept[name] for name in _HAWKES)),
}


class BlendedEventProcess(nn.Module, BlendedProcess):
    """A trained network and classical processes, blended as in `BlendedProcess`.

    Args:
        network: The network, with a head that has integrals in closed form.
        companions: Classical processes by name.
        weights: Of the network and of each of them [M].
    """

    shares: Tensor

    def __init__(
        self,
        network: NeuralEventProcess,
        companions: Mapping[str, RenewalProcess | HawkesProcess],
        weights: Sequence[float] | Float[Tensor, "M"],
    ) -> None:
        weights = torch.as_tensor(weights, dtype=torch.float64)
        _check_head(network)
        check_members((network, *companions.values()), weights)
        kept = {name: _Kept.of(process) for name, process in companions.items()}
        self._set(network, kept, weights / weights.sum())

    def _set(self, network: NeuralEventProcess, kept: Mapping[str, _Kept], shares: Tensor) -> None:
        nn.Module.__init__(self)
        self.network, self.companions = network, nn.ModuleDict(kept)
        self.register_buffer("shares", shares)
        self.num_types = network.num_types

    @classmethod
    def from_config(cls, config: BlendConfig) -> BlendedEventProcess:
        """Return a model without content, to load a state into."""
        model = cls.__new__(cls)
        kept = {item["name"]: _Kept.empty(item) for item in config.companions}
        shares = torch.zeros(len(kept) + 1, dtype=torch.float64)
        model._set(make_event_model(config.network), kept, shares)
        return model

    @classmethod
    def fit(
        cls,
        network: NeuralEventProcess,
        names: Sequence[str],
        train: EventSequences,
        validation: EventSequences,
        *,
        batch_size: int = 64,
    ) -> BlendedEventProcess:
        """Return a trained network with classical processes that are fitted to training events.

        Args:
            network: The network.
            names: Which processes: `renewal, repeat, hawkes`.
            train: What the classical processes are fitted to.
            validation: What decides their settings and the weights.
            batch_size: Sequences that the network reads at a time.
        """
        check_can_blend(network, validation)
        min_width = _GRID_STEPS * float(grid_step(torch.from_numpy(train.gaps[train.gaps > 0])))
        renewal = partial(choose_renewal, train, validation, min_width=min_width)
        makers: dict[str, Callable[[], Any]] = {
            "renewal": renewal,
            "repeat": partial(renewal, marks="repeat"),
            "hawkes": partial(choose_hawkes, train, validation),
        }
        companions = {name: makers[name]().process for name in names}
        members = (network.eval(), *companions.values())
        densities = [log_densities(member, validation, batch_size=batch_size) for member in members]
        return cls(network, companions, fit_weights(torch.stack(densities))).to(network.device)

    @property
    def config(self) -> BlendConfig:
        """What it is made of."""
        described = []
        for name, kept in self._kept.items():
            shapes = {key: list(tensor.shape) for key, tensor in kept.named_buffers()}
            described.append({"name": name, "kind": kept.kind, "shapes": shapes})
        return BlendConfig(self.network.config, tuple(described))

    @property
    def _kept(self) -> dict[str, _Kept]:
        return {name: kept for name, kept in self.companions.items() if isinstance(kept, _Kept)}

    @property
    def members(self) -> tuple[EventProcess, ...]:
        """The network and the classical processes."""
        return (self.network, *(kept.process for kept in self._kept.values()))

    @property
    def weights(self) -> Float[Tensor, "M"]:
        """Their weights."""
        return self.shares

    @property
    def named_weights(self) -> dict[str, float]:
        """The weight of the `network`, and of each classical process by its name."""
        return dict(zip(("network", *self.companions), self.shares.tolist(), strict=True))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the network is."""
        return self.network.device
