"""A network and classical processes as one model that can be moved, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.data.checks import check_choice
from osciformer.events.blending import BlendedProcess, check_members, fit_weights, log_densities
from osciformer.events.classical import GapDensity, HawkesProcess, RenewalProcess
from osciformer.events.classical.selection import choose_hawkes, choose_renewal
from osciformer.events.neural.config import EventModelConfig
from osciformer.events.neural.factory import make_event_model
from osciformer.events.neural.heads import grid_step
from osciformer.events.neural.process import NeuralEventProcess
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

Companion = Literal["renewal", "repeat", "hawkes"]
#: Types up to which `auto` takes a Hawkes process: it has a number for each pair of them.
MOST_TYPES_OF_HAWKES = 10
# A histogram must not be finer than the grid of the times, or it scores what is not there.
_GRID_STEPS = 3.0


def companions_of(blend_with: str | Sequence[str] | None, num_types: int) -> tuple[str, ...]:
    """Return which classical processes a setting means.

    Args:
        blend_with: Names, or `auto`: `renewal`; with several types `repeat`; with up to 10
            `hawkes`.
        num_types: Number of types.

    Example:
        >>> companions_of("auto", 75), companions_of(None, 75)
        (('renewal', 'repeat'), ())
    """
    if blend_with is None:
        return ()
    if blend_with == "auto":
        several = ("repeat",) if num_types > 1 else ()
        return ("renewal", *several, *(("hawkes",) if num_types <= MOST_TYPES_OF_HAWKES else ()))
    names = (blend_with,) if isinstance(blend_with, str) else tuple(blend_with)
    for name in names:
        check_choice("blend_with", name, ("auto", *get_args(Companion)))
    if len(set(names)) < len(names) or "auto" in names:
        raise ValueError(f"blend_with must be 'auto', or name each process once; got {names}")
    return names


def check_can_blend(network: NeuralEventProcess, validation: EventSequences) -> None:
    """Refuse a network without closed integrals, and too little to find weights by.

    Args:
        network: The network, trained or not.
        validation: Sequences that it is not trained on.
    """
    if not network.head.is_closed:
        raise ValueError(
            f"blend_with needs a head whose integrals have a closed form, 'mixture' or "
            f"'exponential'; got {network.config.head!r}"
        )
    if not bool((validation.lengths > 1).any()):
        raise ValueError(
            "blend_with needs validation sequences with two events or more, to find the weights; "
            "give validation_data or a larger validation_fraction, or blend_with=None"
        )


@dataclass(frozen=True)
class BlendConfig:
    """What a `BlendedEventProcess` is made of.

    Attributes:
        network: Settings of the network.
        companions: Kind of each classical process, and the shapes of its tensors by name.
    """

    network: EventModelConfig
    companions: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "network": self.network.to_dict(),
            "companions": [dict(item) for item in self.companions],
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> BlendConfig:
        """Return the configuration that `to_dict` wrote."""
        network = EventModelConfig.from_dict(settings["network"])
        return cls(network, tuple(settings["companions"]))


class _Kept(nn.Module):
    """A classical process whose tensors are buffers."""

    def __init__(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind = kind
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    @classmethod
    def of(cls, process: EventProcess) -> _Kept:
        """Return the module that keeps a process."""
        if isinstance(process, RenewalProcess):
            gaps = process.gaps
            return cls(
                "renewal",
                {
                    "edges": gaps.edges,
                    "mass": gaps.mass,
                    "tail_rate": torch.tensor(gaps.tail_rate, dtype=torch.float64),
                    "transition": process.transition,
                    "initial": process.initial,
                },
            )
        assert isinstance(process, HawkesProcess)
        return cls("hawkes", {name: getattr(process, name) for name in _HAWKES})

    @classmethod
    def empty(cls, described: Mapping[str, Any]) -> _Kept:
        """Return a module with room for the tensors of a process."""
        shapes = described["shapes"].items()
        tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes}
        check_choice("kind", described["kind"], tuple(_MAKERS))
        return cls(described["kind"], tensors)

    def describe(self) -> dict[str, Any]:
        shapes = {name: list(tensor.shape) for name, tensor in self.named_buffers()}
        return {"kind": self.kind, "shapes": shapes}

    @property
    def process(self) -> EventProcess:
        return _MAKERS[self.kind](dict(self.named_buffers()))


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

    Few events teach a network little that a histogram does not say, and the mixture of their
    densities is better than either of them.

    Args:
        network: The network, with a head that has integrals in closed form.
        companions: Classical processes.
        weights: Of the network and of each of them [M].
    """

    shares: Tensor

    def __init__(
        self,
        network: NeuralEventProcess,
        companions: Sequence[RenewalProcess | HawkesProcess],
        weights: Float[Tensor, "M"],
    ) -> None:
        check_members((network, *companions), weights)
        self._put_together(network, [_Kept.of(process) for process in companions], weights)

    def _put_together(
        self, network: NeuralEventProcess, companions: Sequence[_Kept], weights: Tensor
    ) -> None:
        nn.Module.__init__(self)
        self.network, self.companions = network, nn.ModuleList(companions)
        self.register_buffer("shares", weights.double() / weights.sum())
        self.num_types = network.num_types

    @classmethod
    def from_config(cls, config: BlendConfig) -> BlendedEventProcess:
        """Return a model without content, to load a state into."""
        model = cls.__new__(cls)
        companions = [_Kept.empty(item) for item in config.companions]
        weights = torch.ones(len(companions) + 1)
        model._put_together(make_event_model(config.network), companions, weights)
        return model

    @classmethod
    def fit(
        cls,
        network: NeuralEventProcess,
        names: Sequence[str],
        train: EventSequences,
        validation: EventSequences,
    ) -> BlendedEventProcess:
        """Return a trained network with classical processes; weights are fitted to other events.

        Args:
            network: The network.
            names: Which ones, as of `companions_of`.
            train: What the classical processes are fitted to.
            validation: What decides their settings and the weights.
        """
        check_can_blend(network, validation)
        min_width = _GRID_STEPS * float(grid_step(torch.from_numpy(train.gaps[train.gaps > 0])))
        makers: dict[str, Callable[[], RenewalProcess | HawkesProcess]] = {
            "renewal": lambda: choose_renewal(train, validation, min_width=min_width).process,
            "repeat": lambda: (
                choose_renewal(train, validation, marks="repeat", min_width=min_width).process
            ),
            "hawkes": lambda: choose_hawkes(train, validation).process,
        }
        companions = [makers[name]() for name in names]
        members = (network.eval(), *companions)
        densities = torch.stack([log_densities(member, validation) for member in members])
        return cls(network, companions, fit_weights(densities))

    @property
    def config(self) -> BlendConfig:
        """What it is made of."""
        described = tuple(kept.describe() for kept in self._kept)
        return BlendConfig(self.network.config, described)

    @property
    def _kept(self) -> list[_Kept]:
        return [kept for kept in self.companions if isinstance(kept, _Kept)]

    @property
    def members(self) -> tuple[EventProcess, ...]:
        """The network and the classical processes."""
        return (self.network, *(kept.process for kept in self._kept))

    @property
    def weights(self) -> Float[Tensor, "M"]:
        """Their weights."""
        return self.shares

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the network is."""
        return self.network.device
