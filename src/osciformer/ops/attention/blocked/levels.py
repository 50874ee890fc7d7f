r"""Dyadic levels: which block of rows meets which block of keys, and at which reference time.

Rows sit at positions 1, 2, ..., P on a common time line (position 0 is empty), keys in slots 0,
..., P-1, where slot e is seen from position e+1 on. At level n = 1, 2, 4, ... the rows whose
position has the bit n set meet the n slots just before their block, as in a Fenwick tree: every
(row, key) pair with slot < position is met at exactly one level, and the time of the first row of
the block lies between all its keys and all its rows. That time is the reference time of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Blocks below 1/16 of the whole are handled in one batch; the few larger ones one by one, so that
# a length just above a power of two is not padded to the next.
_SINGLE_BLOCKS = 16


@dataclass(frozen=True)
class Group:
    """`count` neighbouring pairs of (key block, row block), each block `size` slots long.

    Attributes:
        size: The level n.
        origin: Slot of the first key block.
        count: Number of pairs, `2 * size` apart.
        row_length: Rows in a row block; less than `size` only in a last block alone in its group.
        fan: Keys a slot.
    """

    size: int
    origin: int
    count: int
    row_length: int
    fan: int

    def rows(self, x: Tensor) -> Tensor:
        """View ``[..., X, C]`` as the rows of each pair, ``[..., g, row_length, C]``."""
        if self.count == 1:
            return x.narrow(-2, self.origin + self.size, self.row_length).unsqueeze(-3)
        pairs = x.narrow(-2, self.origin, self.count * 2 * self.size)
        return pairs.unflatten(-2, (self.count, 2 * self.size)).narrow(-2, self.size, self.size)

    def keys(self, x: Tensor) -> Tensor:
        """View ``[..., X * fan, C]`` as the keys of each pair, ``[..., g, size * fan, C]``."""
        size = self.size * self.fan
        if self.count == 1:
            return x.narrow(-2, self.origin * self.fan, size).unsqueeze(-3)
        pairs = x.narrow(-2, self.origin * self.fan, self.count * 2 * size)
        return pairs.unflatten(-2, (self.count, 2 * size)).narrow(-2, 0, size)

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
