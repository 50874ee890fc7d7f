r"""The common time line of rows and keys, and the dyadic levels at which they meet.

**Time line.** Slots lie in time order, each with up to `fan` keys and then at most one query. Slot
e lies at position e + 1; what happens at position 0 is seen by nobody. With X positions as padded
by `levels` and K = X * fan places for keys, both kinds of time line have, in float64 or bool,

- `gaps`, `starts`: ``[B, X]``, length (0 in the padding) and start of the span that ends at a slot;
- `age`, `key_times`: ``[B, K]``, slot time minus key time (0 in the padding), and key time;
- `present`: ``[B, K]``, which places hold a present key, or None: all that count do;
- `holds_query`: ``[B, X + 1]``, which positions hold a query, or None: all that count do.

**Levels.** At level n = 1, 2, 4, ... the rows whose position has the bit n set meet the n slots
just before their block, as in a Fenwick tree: every (row, key) pair with slot < position meets at
exactly one level, and the time of the first row of the block lies between all its keys and all its
rows. That time is the reference time of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from osciformer.ops.attention.ties import take_rows

# Blocks below 1/16 of the whole are handled in one batch; the few larger ones one by one, so that
# a length just above a power of two is not padded to the next.
_SINGLE_BLOCKS = 16


@dataclass(frozen=True)
class Group:
    """`count` neighbouring pairs of (key block, row block), each block `size` slots long."""

    size: int  # the level n
    origin: int  # slot of the first key block
    count: int  # number of pairs, `2 * size` apart
    row_length: int  # rows in a row block; below `size` only in a last block alone in its group
    fan: int  # keys a slot

    def rows(self, x: Tensor) -> Tensor:
        """View ``[..., X, C]`` as the rows of each pair, ``[..., g, row_length, C]``."""
        if self.count == 1:
            return x.narrow(-2, self.origin + self.size, self.row_length).unsqueeze(-3)
        return self._pairs(x, 1).narrow(-2, self.size, self.size)

    def keys(self, x: Tensor) -> Tensor:
        """View ``[..., X * fan, C]`` as the keys of each pair, ``[..., g, size * fan, C]``."""
        if self.count == 1:
            return x.narrow(-2, self.origin * self.fan, self.size * self.fan).unsqueeze(-3)
        return self._pairs(x, self.fan).narrow(-2, 0, self.size * self.fan)

    def _pairs(self, x: Tensor, fan: int) -> Tensor:
        pair = 2 * self.size * fan
        pairs = x.narrow(-2, self.origin * fan, self.count * pair)
        return pairs.unflatten(-2, (self.count, pair))

    @property
    def spans_before_rows(self) -> slice:
        """Indices, among the spans of this level, that lead from a parent's start to its rows."""
        first = self.origin // self.size
        return slice(first, first + 2 * self.count, 2)

    @property
    def spans_after_keys(self) -> slice:
        """Indices, among the spans of this level, that lead from the keys to the parent's end."""
        first = self.origin // self.size + 1
        return slice(first, first + 2 * self.count, 2)

    def at_rows(self, x: Tensor) -> Tensor:
        """View ``[..., X + 1, C]`` at the first row of each pair, ``[..., g, 1, C]``."""
        start = self.origin + self.size
        return x[..., start : start + 2 * self.size * self.count : 2 * self.size, :].unsqueeze(-2)

    def at_parent_end(self, x: Tensor) -> Tensor:
        """View ``[..., X + 1, C]`` at the end of each parent (or of all), ``[..., g, 1, C]``."""
        step = 2 * self.size
        first = min(self.origin + step, x.shape[-2] - 1)
        return x[..., first : self.origin + step * self.count + 1 : step, :].unsqueeze(-2)


@dataclass(frozen=True)
class Levels:
    """The level structure for `num_slots` slots of `fan` keys each."""

    num_slots: int
    fan: int

    @property
    def unit(self) -> int:
        """Block size up to which all pairs of a level form one group; padding is to multiples."""
        whole = 1 << self.num_slots.bit_length()
        is_nearly_full = 10 * (self.num_slots + 1) >= 9 * whole
        return whole if is_nearly_full or whole <= 4 * _SINGLE_BLOCKS else whole // _SINGLE_BLOCKS

    @property
    def padded(self) -> int:
        """Number of positions, with padding: at least `num_slots + 1`."""
        return -(-(self.num_slots + 1) // self.unit) * self.unit

    @property
    def num_levels(self) -> int:
        """Number of levels: enough for the highest bit of the last position."""
        return self.num_slots.bit_length()

    def groups(self, level: int) -> list[Group]:
        """Return the groups of pairs that meet at `level`."""
        size = 1 << level
        if size < self.unit:
            return [Group(size, 0, self.padded // (2 * size), size, self.fan)]
        return [
            Group(size, origin, 1, min(size, self.num_slots + 1 - origin - size), self.fan)
            for origin in range(0, self.num_slots + 1 - size, 2 * size)
        ]


def _pad(x: Tensor, total: int) -> Tensor:
    """Pad axis 1 of ``[B, N, ...]`` with zeros up to `total`."""
    missing = total - x.shape[1]
    return x if missing == 0 else functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))


class SelfTimeline:
    """Query j and key j have the same time.

    Slot e is the time of token e + 1: it holds key e, aged by one gap, and query e + 1. Position
    and place are then the index of the token. The first query and the last key meet nobody.
    """

    holds_query = None

    def __init__(self, query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> None:
        self.num_rows = query_times.shape[1]
        self.levels = Levels(self.num_rows - 1, 1)
        total = self.levels.padded
        self.gaps = self.age = _pad(torch.diff(query_times, dim=1), total)
        if key_times is not query_times:
            self.age = _pad(query_times[:, 1:] - key_times[:, :-1], total)
        self.starts, self.key_times = _pad(query_times, total), _pad(key_times, total)
        self.present = None if mask is None else _pad(mask, total)

    def rows_to_positions(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, M, ...]`` to ``[B, X, ...]``; positions without a query hold anything."""
        return _pad(x, self.levels.padded)

    keys_to_places = rows_to_positions  # [B, N, ...] to [B, K, ...]; empty places: anything finite

    def positions_to_rows(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, X, ...]`` to ``[B, M, ...]``."""
        return x.narrow(1, 0, self.num_rows)

    def places_to_keys(self, x: Tensor, num_keys: int) -> Tensor:
        """Rearrange logits ``[B, M, H, K]`` to ``[B, M, H, N]``; keys without a place get -inf."""
        return x.narrow(-1, 0, num_keys)


class CrossTimeline:
    """Separate queries ``[B, M]`` and keys ``[B, N]``, both sorted; methods as in `SelfTimeline`.

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
        can_read = not torch.compiler.is_compiling()
        count = int(end[:, -1].max()) if can_read else num_rows + -(-num_keys // fan)
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

        # A position takes its time from its query, else from its last key, else the last query.
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
        holds_query = torch.zeros_like(self._position_row, dtype=torch.bool)
        self.holds_query = functional.pad(holds_query, (0, 1)).scatter(1, end, True)

    def rows_to_positions(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._position_row)

    def positions_to_rows(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._row_position)

    def keys_to_places(self, x: Tensor) -> Tensor:  # noqa: D102
        return take_rows(x, self._place_key)

    def places_to_keys(self, x: Tensor, num_keys: int) -> Tensor:  # noqa: D102
        padded = functional.pad(x, (0, 1), value=float("-inf"))
        return padded.gather(-1, self._key_place[:, None, None].expand(*x.shape[:3], num_keys))


Timeline = SelfTimeline | CrossTimeline
