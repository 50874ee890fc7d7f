"""Padded batches of event sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from osciformer._types import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class EventBatch:
    """Sequences of events padded behind to the longest one; True in the mask means present.

    Attributes:
        times: Event times, float64, not decreasing; what padding holds is never looked at.
        types: Event types, int64.
        mask: True where there is an event; events come first in each row.
        starts: Where the observed windows begin, or None.
        ends: Where they end, or None.
        index: Position of each sequence in its container, or None.
    """

    times: Float[Tensor, "B N"]
    types: Int[Tensor, "B N"]
    mask: Bool[Tensor, "B N"]
    starts: Float[Tensor, "B"] | None = None
    ends: Float[Tensor, "B"] | None = None
    index: Int[Tensor, "B"] | None = None

    def __len__(self) -> int:
        return len(self.times)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Number of events of each sequence, counted by the mask."""
        return self.mask.sum(dim=1)

    @property
    def clean_times(self) -> Float[Tensor, "B N"]:
        """Times in which padding is infinite, so that it comes after every query."""
        return self.times.masked_fill(~self.mask, torch.inf)

    @property
    def clean_types(self) -> Int[Tensor, "B N"]:
        """Types in which padding is type 0."""
        return self.types.masked_fill(~self.mask, 0)

    @property
    def last_times(self) -> Float[Tensor, "B"]:
        """Time of the last event; the start of the window, or 0, where there is no event."""
        return self._edge(self.lengths - 1)

    @property
    def first_times(self) -> Float[Tensor, "B"]:
        """Time of the first event; the start of the window, or 0, where there is no event."""
        return self._edge(torch.zeros_like(self.lengths))

    def _edge(self, position: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        empty = self.lengths == 0
        # Padding may hold NaN, which is replaced before it can be picked.
        times = self.times.masked_fill(~self.mask, 0.0)
        picked = times.gather(1, position.clamp(min=0)[:, None])[:, 0]
        fallback = torch.zeros_like(picked) if self.starts is None else self.starts
        return torch.where(empty, fallback, picked)

    def count_before(self, query_times: Float[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Return how many events of the same row lie strictly before each query."""
        return torch.searchsorted(self.clean_times.contiguous(), query_times.contiguous())

    def count_until(self, query_times: Float[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Return how many events of the same row lie before each query, or at it."""
        clean = self.clean_times.contiguous()
        return torch.searchsorted(clean, query_times.contiguous(), right=True)

    def known_until(self, rows: Int[Tensor, "R"], num_events: Int[Tensor, "R"]) -> EventBatch:
        """Return histories: of each of these rows, the first events alone.

        Args:
            rows: Rows of this batch; one may occur repeatedly.
            num_events: How many of its events are known.
        """
        width = max(1, int(num_events.max())) if len(rows) else 1
        steps = torch.arange(width, device=self.times.device)
        return EventBatch(
            times=self.times[rows, :width],
            types=self.types[rows, :width],
            mask=self.mask[rows, :width] & (steps < num_events[:, None]),
            starts=None if self.starts is None else self.starts[rows],
            ends=None if self.ends is None else self.ends[rows],
            index=None if self.index is None else self.index[rows],
        )

    def take(self, rows: Int[Tensor, "R"]) -> EventBatch:
        """Return some of the rows."""
        items = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: item[rows] for name, item in items.items() if item is not None}
        )

    def to(self, device: torch.device | str) -> EventBatch:
        """Return the batch on another device."""
        items = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: item.to(device) for name, item in items.items() if item is not None}
        )


def pad_events(
    times: Float[np.ndarray, "T"],
    types: Int[np.ndarray, "T"],
    offsets: Int[np.ndarray, "n+1"],
    index: Int[np.ndarray, "B"],
    *,
    starts: Float[np.ndarray, "n"] | None = None,
    ends: Float[np.ndarray, "n"] | None = None,
) -> EventBatch:
    """Return the padded batch of some sequences of flat arrays; its width N is at least 1.

    Padding repeats the last time of its sequence, 0 if it has none, and has type 0.

    Args:
        times: Times of all events.
        types: Their types.
        offsets: Where each sequence begins.
        index: Positions of the sequences, not negative.
        starts: Where the windows begin, or None.
        ends: Where they end, or None.
    """
    lengths = offsets[index + 1] - offsets[index]
    steps = np.arange(max(1, int(lengths.max(initial=0))))
    mask = steps < lengths[:, None]  # [B, N]
    rows = offsets[index][:, None] + np.minimum(steps, np.maximum(lengths, 1)[:, None] - 1)
    rows[lengths == 0] = 0
    padded_times, padded_types = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.int64)
    if len(times):
        some = lengths > 0
        padded_times[some] = times[rows[some]]
        padded_types[mask] = types[rows[mask]]
    return EventBatch(
        times=torch.from_numpy(padded_times),
        types=torch.from_numpy(padded_types),
        mask=torch.from_numpy(mask),
        starts=None if starts is None else torch.from_numpy(starts[index]),
        ends=None if ends is None else torch.from_numpy(ends[index]),
        index=torch.from_numpy(index),
    )
