"""Recurrent backbones over one direction of time or over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osciformer._text import check_choice
from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.models.backbones import Backbone, EncodedSeries
from osciformer.models.forward_fill import positive_gaps
from osciformer.nn.timeline import TimeScale, last_observation, take_tokens


class DirectedBackbone(Backbone):
    """A recurrence as a backbone; in both directions half of the width runs backwards in time.

    Args:
        make: Returns a recurrence of a width. It is called as `Backbone.encode` is, with times in
            the unit of the training set, and returns `states` and a `mask`; its `read` is that of a
            backbone. Rows that are absent come last.
        dim: Width D.
        direction: `causal` or `bidirectional`.
    """

    def __init__(self, make: Callable[[int], nn.Module], dim: int, direction: str) -> None:
        super().__init__()
        check_choice("direction", direction, ("causal", "bidirectional"))
        self.dim, self.time_scale = dim, TimeScale()
        later = dim // 2 if direction == "bidirectional" else 0
        self.forwards: Any = make(dim - later)
        self.backwards: Any = make(later) if later else None

    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> EncodedDirections:
        """Return the encoded series, see `Backbone.encode`."""
        times = self.time_scale(times)
        early = self.forwards(values, times, mask, static)
        if self.backwards is None:
            return EncodedDirections(early, None, mask, None)
        # Present rows from the last to the first, then the others.
        width = mask.shape[1]
        order = width - 1 - (~mask.flip(1)).to(torch.uint8).argsort(dim=1, stable=True)
        rows = take_tokens(values, order), -take_tokens(times[..., None], order)[..., 0]
        late = self.backwards(*rows, mask.gather(1, order), static)
        return EncodedDirections(early, late, mask, order.argsort(dim=1))

    def read(self, encoded: EncodedDirections, query_times: QueryTimes) -> Reads:
        """Return the states at any times, in the unit of the data."""
        query_times = self.time_scale(query_times)
        early: Tensor = self.forwards.read(encoded.forwards, query_times)
        if encoded.backwards is None:
            return early
        return torch.cat((early, self.backwards.read(encoded.backwards, -query_times)), dim=-1)

    def _unit(self, gaps: Float[Tensor, "G"]) -> Tensor:
        """Return the unit of time, given the gaps of the training set; its longest span if not."""
        return self.time_scale.scale

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.time_scale.fit(times, mask)
        unit = self._unit(positive_gaps(times, mask))
        self.time_scale.set(float(self.time_scale.reference), float(unit))


@dataclass(frozen=True)
class EncodedDirections:
    """An encoded batch of one or two recurrences, the second in reversed time."""

    forwards: EncodedSeries
    backwards: EncodedSeries | None
    mask: Mask
    place: Tensor | None  # of each row in reversed time

    @property
    def states(self) -> Tokens:
        """States of the observations; zero where absent."""
        states = self.forwards.states
        if self.backwards is not None and self.place is not None:
            states = torch.cat((states, take_tokens(self.backwards.states, self.place)), dim=-1)
        return states.masked_fill(~self.mask[..., None], 0.0)


def rows_before(times: Times, query_times: QueryTimes, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last present row at or before each time, the time since, and where there is none.

    Where there is none the row is 0, and so is the time.
    """
    row = last_observation(times, query_times, mask)
    is_before = row < 0
    since = query_times - take_tokens(times[..., None], row)[..., 0]
    return row.clamp(min=0), since.masked_fill(is_before, 0.0), is_before[..., None]
