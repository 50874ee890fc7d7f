"""Batches of series of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from osciformer._types import Int

# Beyond this, larger pools hardly save padding.
LARGEST_POOL = 100


class LengthBatches(Sampler[list[int]]):
    """Lists of positions of series whose lengths are close, so that little is padding.

    Shuffled series are cut into pools of several batches, and each pool is sorted by length before
    it is cut into batches, which come in random order: batches differ from epoch to epoch, and a
    series meets others of about its own length. Without shuffling all series are sorted at once.

    The series are spread evenly: `ceil(n / (batch_size * world_size))` batches whose sizes differ
    by at most one, so that none is tiny and each series comes once per epoch. With several ranks,
    each takes every `world_size`-th series of each batch: all ranks have the same number of
    batches, and together they hold the batch that a single process with `batch_size * world_size`
    would have. Only where a batch has fewer series than there are ranks are some repeated.

    Args:
        lengths: Length of each series.
        batch_size: Largest number of series per batch and rank.
        shuffle: Draw another order each epoch.
        seed: Seed of the order; with the epoch it decides everything.
        pool_batches: Batches per pool: more gives less padding and less randomness. By default
            half of the batches, so that a series has other companions in each epoch, and at most
            `LARGEST_POOL`.
        rank: Number of this process.
        world_size: Number of processes.

    Example:
        >>> sampler = LengthBatches([5, 1, 4, 2], batch_size=2, shuffle=False)
        >>> list(sampler)
        [[1, 3], [2, 0]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | Int[np.ndarray, "n"],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        pool_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.ndim != 1 or len(self.lengths) == 0:
            raise ValueError(f"lengths must be [n], n > 0; got {list(self.lengths.shape)}")
        for name, number in (("batch_size", batch_size), ("pool_batches", pool_batches)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        check_rank(rank, world_size)
        self.batch_size, self.pool_batches = batch_size, pool_batches
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number the order depends on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._global_batches():
            part = batch[self.rank :: self.world_size]
            if len(part) == 0:
                part = batch[self.rank % len(batch) :][:1]
            yield part.tolist()

    def _global_batches(self) -> list[Int[np.ndarray, "B"]]:
        if not self.shuffle:
            return np.array_split(np.argsort(self.lengths, kind="stable"), len(self))
        generator = np.random.default_rng((self.seed, self.epoch))
        order = generator.permutation(len(self.lengths))
        bounds = even_bounds(len(order), len(self))
        pool = self.pool_batches or default_pool(len(self))
        batches = cut_by_length(order, self.lengths, bounds, pool)
        return [batches[position] for position in generator.permutation(len(batches))]


def cut_by_length(
    order: Int[np.ndarray, "n"],
    lengths: Int[np.ndarray, "..."],
    bounds: Int[np.ndarray, "k+1"],
    pool_batches: int,
) -> list[Int[np.ndarray, "B"]]:
    """Return batches of series that are sorted by length within pools of several batches.

    Args:
        order: Positions of the series, shuffled.
        lengths: Lengths of all series, by position.
        bounds: Where each batch begins, and behind them n.
        pool_batches: Batches per pool.

    Example:
        >>> cut_by_length(np.array([2, 0, 1]), np.array([9, 4, 5]), np.array([0, 2, 3]), 2)
        [array([1, 2]), array([0])]
    """
    batches = []
    for first in range(0, len(bounds) - 1, pool_batches):
        cuts = bounds[first : first + pool_batches + 1]
        pool = order[cuts[0] : cuts[-1]]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += np.split(pool, cuts[1:-1] - cuts[0])
    return batches


def default_pool(num_batches: int) -> int:
    """Return the batches per pool where none is asked for: half of them, at most 100."""
    return min(LARGEST_POOL, -(-num_batches // 2))


def padding_fraction(
    lengths: Sequence[int] | Int[np.ndarray, "n"], batches: Sequence[Sequence[int]]
) -> float:
    """Return the part of the entries of padded batches that is padding.

    Example:
        >>> round(padding_fraction([5, 1, 4, 2], [[0, 2], [1, 3]]), 3)
        0.143
    """
    lengths = np.asarray(lengths)
    entries = sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches)
    present = sum(int(lengths[list(batch)].sum()) for batch in batches)
    return 1.0 - present / max(entries, 1)


def even_bounds(total: int, parts: int) -> Int[np.ndarray, "parts+1"]:
    """Return where to cut `total` items into parts whose sizes differ by at most one.

    Example:
        >>> even_bounds(10, 4)
        array([ 0,  3,  6,  8, 10])
    """
    small, extra = divmod(total, parts)
    sizes = np.full(parts, small, dtype=np.int64)
    sizes[:extra] += 1
    return np.concatenate(([0], np.cumsum(sizes)))


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank outside the processes that there are."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; got {rank} of {world_size}")
