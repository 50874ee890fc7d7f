"""The common time line of rows and keys: slots with at most one query and a few keys each."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from osciformer.ops.attention.blocked.levels import Levels
from osciformer.ops.attention.rows import take_rows


class Timeline(ABC):
    """Slots in time order, each with up to `fan` keys and then at most one query.

    Slot e lies at position e + 1; what happens at position 0 is seen by nobody. X is the number of
    positions as padded by `Levels`, K = X * fan the number of places for keys.

    Attributes:
        levels: Number of slots and keys a slot.
        gaps: ``[B, X]`` float64, length of the span that ends at each slot; 0 in the padding.
        starts: ``[B, X]`` float64, time where that span begins.
        age: ``[B, K]`` float64, slot time minus key time; 0 in the padding.
        key_times: ``[B, K]`` float64, time of the key in each place.
        present: ``[B, K]`` bool, which places hold a present key, or None: all that count do.
    """

    levels: Levels
    gaps: Tensor
    starts: Tensor
    age: Tensor
    key_times: Tensor
    present: Tensor | None

    @abstractmethod
    def rows_to_positions(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, M, ...]`` to ``[B, X, ...]``; positions without a query hold anything."""

    @abstractmethod
    def positions_to_rows(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, X, ...]`` to ``[B, M, ...]``."""

    @abstractmethod
    def keys_to_places(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, N, ...]`` to ``[B, K, ...]``; empty places hold anything finite."""

    @abstractmethod
    def places_to_keys(self, x: Tensor, num_keys: int) -> Tensor:
        """Rearrange logits ``[B, M, H, K]`` to ``[B, M, H, N]``; keys without a place get -inf."""

    @abstractmethod
    def holds_query(self) -> Tensor | None:
        """Return ``[B, X + 1]`` bool: which positions hold a query; None is all that count."""


def _pad(x: Tensor, total: int) -> Tensor:
    """Pad axis 1 of ``[B, N, ...]`` with zeros up to `total`."""
    missing = total - x.shape[1]
    return x if missing == 0 else functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))


class SelfTimeline(Timeline):
    """Query j and key j have the same time; N at least 2.

    Slot e is the time of token e + 1: it holds key e, aged by one gap, and query e + 1. Position
    and place are then the index of the token. The first query and the last key meet nobody.
    """

    def __init__(self, query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> None:
        self.num_rows = query_times.shape[1]
        self.levels = Levels(self.num_rows - 1, 1)
        total = self.levels.padded
        self.gaps = self.age = _pad(torch.diff(query_times, dim=1), total)
        if key_times is not query_times:
            self.age = _pad(query_times[:, 1:] - key_times[:, :-1], total)
        self.starts, self.key_times = _pad(query_times, total), _pad(key_times, total)
        self.present = None if mask is None else _pad(mask, total)

    def rows_to_positions(self, x: Tensor) -> Tensor:  # noqa: D102
        return _pad(x, self.levels.padded)

    def positions_to_rows(self, x: Tensor) -> Tensor:  # noqa: D102
        return x.narrow(1, 0, self.num_rows)

    def keys_to_places(self, x: Tensor) -> Tensor:  # noqa: D102
        return _pad(x, self.levels.padded)

    def places_to_keys(self, x: Tensor, num_keys: int) -> Tensor:  # noqa: D102
        return x.narrow(-1, 0, num_keys)

    def holds_query(self) -> Tensor | None:  # noqa: D102
        return None


class CrossTimeline(Timeline):
    """Separate queries ``[B, M]`` and keys ``[B, N]``, both sorted.

    The keys between two queries are cut into slots of `fan` keys, about N / M of them, so that
    neither many keys before few queries nor the reverse wastes work. A slot's time is its query's,
    or that of its last key if it has none. Keys after the last query are left out.
    """

    def __init__(self, query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> None:
        batch, num_rows = query_times.shape
        num_keys = key_times.shape[1]
        device = query_times.device
        fan = max(1, round(num_keys / num_rows))
        q, k = query_times.detach().contiguous(), key_times.detach().contiguous()
        seen = torch.searchsorted(k, q, right=True)  # [B, M], keys up to each query
        before = torch.cat([seen.new_zeros(batch, 1), seen[:, :-1]], dim=1)
        num_slots = ((seen - before + fan - 1) // fan).clamp(min=1)
        end = num_slots.cumsum(dim=1)  # also the position of each query
        if torch.compiler.is_compiling():
            count = num_rows + -(-num_keys // fan)
        else:
            count = int(end[:, -1].max())
        self.levels = Levels(count, fan)
        total = self.levels.padded

        next_row = torch.searchsorted(q, k, right=False)  # [B, N], first query at or after each key
        is_seen = next_row < num_rows
        row = next_row.clamp(max=num_rows - 1)
        index = torch.arange(num_keys, device=device).expand(batch, -1)
        rank = index - before.gather(1, row)
        slot = (end - num_slots).gather(1, row) + rank // fan
        # Keys that no query sees go to one spare place past the end, which is cut off.
        place = torch.where(is_seen, slot * fan + rank % fan, total * fan)
        self._place_key = index.new_zeros(batch, total * fan + 1).scatter_(1, place, index)[:, :-1]
        there = torch.ones_like(is_seen) if mask is None else mask
        present = torch.zeros_like(self._place_key, dtype=torch.bool)
        present = functional.pad(present, (0, 1)).scatter(1, place, there)[:, :-1]

        # Where a position takes its time from: its query, else its last key, else the last query.
        rows = torch.arange(num_rows, device=device).expand(batch, -1)
        source = index.new_full((batch, total + 2), num_rows - 1)
        last_key = torch.where(is_seen, slot + 1, total + 1)
        source.scatter_reduce_(1, last_key, num_rows + index, "amax", include_self=True)
        source = source[:, :-1].scatter(1, end, rows)
        source[:, 0] = source[:, 1]
        times = torch.cat([query_times, key_times], dim=1).gather(1, source)  # positions 0 .. X
        self.gaps, self.starts = torch.diff(times, dim=1), times[:, :-1]
        self.key_times = key_times.gather(1, self._place_key)
        at_places = times[:, 1:].repeat_interleave(fan, dim=1)
        self.age = torch.where(present, at_places - self.key_times, 0.0)
        self.key_times = torch.where(present, self.key_times, at_places)
        self.present = present
        self._row_position, self._key_place = end, place
        self._position_row = index.new_zeros(batch, total + 1).scatter_(1, end, rows)[:, :total]
        self._holds_query = torch.zeros_like(self._position_row, dtype=torch.bool)
        self._holds_query = functional.pad(self._holds_query, (0, 1)).scatter(1, end, True)

    def rows_to_positions(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._position_row)

    def positions_to_rows(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._row_position)

    def keys_to_places(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._place_key)

    def places_to_keys(self, x: Tensor, num_keys: int) -> Tensor:  # noqa: D102
        padded = functional.pad(x, (0, 1), value=float("-inf"))
        return padded.gather(-1, self._key_place[:, None, None].expand(*x.shape[:3], num_keys))

    def holds_query(self) -> Tensor | None:  # noqa: D102
        return self._holds_query
