"""What the task models need to know of a batch; `osciformer.data.Batch` has it all."""

from __future__ import annotations

from typing import Protocol

from osciformer._types import Bool, Float, Tensor


class SeriesBatch(Protocol):
    """Padded series, True in a mask means present, NaN is a missing value."""

    @property
    def times(self) -> Float[Tensor, "B N"]:
        """Observation times, not decreasing among the present ones of a series."""

    @property
    def values(self) -> Float[Tensor, "B N F"]:
        """Scaled values; NaN is a missing one."""

    @property
    def mask(self) -> Bool[Tensor, "B N"]:
        """True where there is an observation."""

    @property
    def static(self) -> Float[Tensor, "B S"] | None:
        """Static features; NaN is a missing one."""


class QueryBatch(SeriesBatch, Protocol):
    """Padded series and the times at which something is asked."""

    @property
    def query_times(self) -> Float[Tensor, "B M"] | None:
        """Query times, in any order."""

    @property
    def query_mask(self) -> Bool[Tensor, "B M"] | None:
        """True where there is a query."""
