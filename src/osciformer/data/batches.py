"""Padded batches of irregular series, and loaders that batch series of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data.ragged import check_shape, offsets_of
from osciformer.data.series import IrregularSeries

# Beyond this, larger pools hardly save padding.
LARGEST_POOL = 100


@dataclass(frozen=True)
class Batch:
    """Series padded to the longest one; True in a mask means present."""

    times: Float[Tensor, "B N"]  #: Observation times, float64; padding repeats the last time.
    values: Float[Tensor, "B N F"]  #: Values, float32; NaN where missing, and in the padding.
    mask: Bool[Tensor, "B N"]  #: True where there is an observation.
    static: Float[Tensor, "B S"] | None  #: Static features, NaN where missing.
    labels: Tensor | None  #: Classes (int64) or real targets (float32), [B] or [B, K].
    weight: Float[Tensor, "B"] | None  #: Weight of each series.
    query_times: Float[Tensor, "B M"] | None  #: Times to predict at; padding repeats the last one.
    targets: Float[Tensor, "B M F"] | None  #: Values at the query times; NaN is not scored.
    query_mask: Bool[Tensor, "B M"] | None  #: True where there is a query.
    index: Int[Tensor, "B"]  #: Position of each series in its container.

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which copies to a GPU are fast."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        present = {name: item for name, item in vars(self).items() if item is not None}
        return replace(self, **{name: change(item) for name, item in present.items()})


def collate(
    series: IrregularSeries,
    index: Sequence[int] | Int[np.ndarray, "B"] | None = None,
    *,
    labels: Any = None,
    weight: Any = None,
    queries: IrregularSeries | None = None,
) -> Batch:
    """Return the padded batch of the series at some positions; its width N is at least 1.

    Args:
        series: The container.
        index: Positions [B], not negative; all series if not given.
        labels: Numeric labels [n] or [n, K] of all series; those of the container if not given.
        weight: Weights [n] of all series.
        queries: Query times and targets, as n series; a NaN target is not scored.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> collate(series).mask.tolist()
        [[True, True], [True, False]]
    """
    index = np.arange(len(series)) if index is None else np.asarray(index, dtype=np.int64)
    times, values, mask = _pad(series, index)
    parts: dict[str, Any] = dict.fromkeys(("query_times", "targets", "query_mask"))
    if queries is not None:
        if len(queries) != len(series):
            raise ValueError(f"queries must hold {len(series)} series; got {len(queries)}")
        parts = dict(zip(parts, _pad(queries, index), strict=True))
    labels = series.labels if labels is None else np.asarray(labels)
    if labels is not None:
        if len(labels) != len(series):
            raise ValueError(f"labels must have {len(series)} entries; got {len(labels)}")
        if labels.dtype.kind not in "biuf":
            raise TypeError(
                f"labels must be numbers in a batch; got {labels.dtype}. Encode classes as 0, 1, "
                "... with np.unique(series.labels, return_inverse=True) and pass them as labels"
            )
        labels = labels[index].astype(np.float32 if labels.dtype.kind == "f" else np.int64)
    if weight is not None:
        weight = np.asarray(weight, dtype=np.float32)
        check_shape("weight", weight, (len(series),))
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise ValueError("weight must be finite and not negative")
        weight = weight[index]
    static = None if series.static is None else series.static[index]
    extra = {"static": static, "labels": labels, "weight": weight, "index": index}
    parts |= {k: None if array is None else torch.from_numpy(array) for k, array in extra.items()}
    return Batch(times=times, values=values, mask=mask, **parts)


def uncollate(batch: Batch) -> list[tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N F"]]]:
    """Return the times and values of each series of a batch, without padding."""
    mask = batch.mask.cpu().numpy()
    times, values = batch.times.cpu().numpy(), batch.values.cpu().numpy()
    return [(t[present], x[present]) for t, x, present in zip(times, values, mask, strict=True)]


def _pad(
    series: IrregularSeries, index: Int[np.ndarray, "B"]
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N F"], Bool[Tensor, "B N"]]:
    """Return times, values and mask of the series at some positions, padded to the longest."""
    starts = series.offsets[index]
    lengths = series.offsets[index + 1] - starts
    steps = np.arange(max(1, int(lengths.max(initial=0))))
    mask = steps < lengths[:, None]  # [B, N]
    # Padding reads the last row of its series, or any row where a series has none.
    rows = starts[:, None] + np.minimum(steps, np.maximum(lengths, 1)[:, None] - 1)
    times, values = series.times, series.values
    if len(times) == 0:
        times, values = np.zeros(1), np.full((1, series.num_features), np.nan, dtype=np.float32)
    rows = np.minimum(rows, len(times) - 1)
    times, values = times[rows], values[rows]
    times[lengths == 0] = 0.0
    values[~mask] = np.nan
    return torch.from_numpy(times), torch.from_numpy(values), torch.from_numpy(mask)


@dataclass(eq=False)
class LengthBatches(Sampler[list[int]]):
    """Lists of positions of series whose lengths are close, so that little is padding.

    Shuffled series are cut into pools of several batches. Each pool is sorted by length and cut
    into batches, which come in random order. Without shuffling, all series are sorted by length.
    Sizes differ by at most one, and each series comes once per epoch. Ranks share batches of
    `batch_size * world_size`; series repeat only if such a batch has fewer series than ranks.

    Example:
        >>> sampler = LengthBatches([5, 1, 4, 2], batch_size=2, shuffle=False)
        >>> list(sampler)
        [[1, 3], [2, 0]]
    """

    lengths: Any  #: Length of each series [n].
    batch_size: int  #: Largest number of series per batch and rank.
    _: KW_ONLY
    shuffle: bool = True  #: Draw another order each epoch.
    seed: int = 0  #: Seed of the order, which depends on seed and epoch only.
    #: Batches per pool: more gives less padding and less randomness. By default half of the
    #: batches, and at most `LARGEST_POOL`.
    pool_batches: int | None = None
    rank: int = 0  #: Number of this process.
    world_size: int = 1  #: Number of processes.
    epoch: int = field(default=0, init=False)  #: Number of the epoch.

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.lengths, dtype=np.int64)
        if self.lengths.ndim != 1 or len(self.lengths) == 0:
            raise ValueError(f"lengths must be [n], n > 0; got {list(self.lengths.shape)}")
        for name, number in (("batch_size", self.batch_size), ("pool_batches", self.pool_batches)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        check_rank(self.rank, self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which decides the order."""
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
        bounds = offsets_of(even_sizes(len(order), len(self)))
        pool = self.pool_batches or pool_size(len(self))
        batches = cut_by_length(order, self.lengths, bounds, pool)
        return [batches[position] for position in generator.permutation(len(batches))]


def cut_by_length(
    order: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, pool_batches: int
) -> list[Int[np.ndarray, "B"]]:
    """Return batches of shuffled positions, sorted by length within pools; `bounds` cuts them."""
    batches = []
    for first in range(0, len(bounds) - 1, pool_batches):
        cuts = bounds[first : first + pool_batches + 1]
        pool = order[cuts[0] : cuts[-1]]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += np.split(pool, cuts[1:-1] - cuts[0])
    return batches


def pool_size(num_batches: int) -> int:
    """Return the default number of batches per pool: half of them, at most `LARGEST_POOL`."""
    return min(LARGEST_POOL, -(-num_batches // 2))


def padding_fraction(
    lengths: Sequence[int] | Int[np.ndarray, "n"], batches: Sequence[Sequence[int]]
) -> float:
    """Return the fraction of the entries of padded batches that is padding."""
    lengths = np.asarray(lengths)
    entries = sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches)
    present = sum(int(lengths[list(batch)].sum()) for batch in batches)
    return 1.0 - present / max(entries, 1)


def even_sizes(total: int, parts: int) -> Int[np.ndarray, "parts"]:
    """Return the sizes of so many parts of `total` items, which differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that no process has."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; got {rank} of {world_size}")


@dataclass(eq=False)
class SeriesDataset(Dataset[Batch]):
    """A container whose items are padded batches: `dataset[[3, 1, 4]]` is a `Batch` of three.

    Use it in a `DataLoader` with `batch_size=None` and a sampler of lists, as `make_loader` does:
    this is much faster than collating items. Fields are as for `collate`.
    """

    series: IrregularSeries
    _: KW_ONLY
    labels: Any = None
    weight: Any = None
    queries: IrregularSeries | None = None

    def __post_init__(self) -> None:
        self.labels = None if self.labels is None else np.asarray(self.labels)
        self.weight = None if self.weight is None else np.asarray(self.weight, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int | list[int]) -> Batch:
        others = {"labels": self.labels, "weight": self.weight, "queries": self.queries}
        return collate(self.series, np.atleast_1d(index), **others)


def make_loader(
    series: IrregularSeries,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    **others: Any,
) -> DataLoader[Batch]:
    """Return a loader of batches of series of similar length.

    `loader.sampler.set_epoch(epoch)` chooses the order of an epoch; Lightning calls it by itself.
    Arguments are those of `LengthBatches` and, in `others`, `labels`, `weight` and `queries` of
    `collate`. `num_workers` processes collate in the background; `pin_memory` makes copies fast.
    """
    sampler = LengthBatches(
        series.lengths, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
    )
    return DataLoader(
        SeriesDataset(series, **others),
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        # A separate generator, so that drawing batches does not touch the global seed.
        generator=torch.Generator().manual_seed(seed),
    )
