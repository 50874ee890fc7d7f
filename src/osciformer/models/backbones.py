"""What encodes a series and can be read at any time: one small interface for all backbones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import positive_gaps
from osciformer.models.config import OsciFormerConfig
from osciformer.models.osciformer import OsciFormer
from osciformer.nn.encoder import Encoded


class EncodedSeries(Protocol):
    """An encoded batch; what else it holds is for `Backbone.read`."""

    @property
    def states(self) -> Float[Tensor, "B N D"]:
        """States of the observations; zero where absent."""


class Backbone(nn.Module, ABC):
    """An encoder of irregular series that keeps the real times.

    Attributes:
        dim: Width D of the states.
    """

    dim: int

    @abstractmethod
    def encode(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None = None,
    ) -> EncodedSeries:
        """Return the encoded series.

        Args:
            values: Values; NaN is a missing one. Where `mask` is False they may hold anything.
            times: Their times, in any unit, not decreasing among the present of a series.
            mask: True where an observation is present.
            static: Static features; NaN is a missing one.
        """

    @abstractmethod
    def read(self, encoded: Any, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states of an encoded batch at any times, in the unit of the data."""

    def read_series(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None,
        query_times: Float[Tensor, "B M"],
    ) -> Float[Tensor, "B M D"]:
        """Return `read(encode(values, times, mask, static), query_times)`.

        Backbones that need less for reads than for the states of the observations do only that.
        """
        return self.read(self.encode(values, times, mask, static), query_times)

    @abstractmethod
    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        """Set all that depends on the times of the training set, which has a positive gap."""

    def fit_time_scale(
        self,
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Set the unit of time, and what else depends on it, from the times of the training set.

        Where no series has two distinct times there is no scale to find, and all stays as it is.
        """
        if len(positive_gaps(times, mask)):
            self._fit_time_scale(times, mask, generator)
        return self


class OsciFormerBackbone(Backbone):
    """The package's own model as a backbone.

    Args:
        config: Its configuration.

    Example:
        >>> backbone = OsciFormerBackbone(OsciFormerConfig(input_dim=3, dim=8, num_heads=2))
        >>> times, mask = torch.rand(2, 5).sort().values, torch.ones(2, 5, dtype=torch.bool)
        >>> encoded = backbone.encode(torch.randn(2, 5, 3), times, mask)
        >>> encoded.states.shape, backbone.read(encoded, times[:, :2] + 1).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 2, 8]))
    """

    def __init__(self, config: OsciFormerConfig) -> None:
        super().__init__()
        self.model = OsciFormer.from_config(config)
        self.dim = config.dim

    def encode(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None = None,
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        encoded: Encoded = self.model(values, times, mask, static)
        return encoded

    def read(self, encoded: Encoded, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states at any times, see `OsciFormer.read`."""
        return self.model.read(encoded, query_times)

    def read_series(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None,
        query_times: Float[Tensor, "B M"],
    ) -> Float[Tensor, "B M D"]:
        """Return the states at any times, see `OsciFormer.read_series`."""
        return self.model.read_series(values, times, mask, static, query_times)

    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        self.model.fit_time_scale(times, mask, generator=generator)
