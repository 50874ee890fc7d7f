"""Series for PyTorch's `DataLoader`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from osciformer.data.batches import Batch, collate
from osciformer.data.sampler import LengthBatches
from osciformer.data.series import IrregularSeries


class SeriesDataset(Dataset[Batch]):
    """A container whose items are padded batches: `dataset[[3, 1, 4]]` is a `Batch` of three.

    Collating a list of positions at once is a few array operations, where collating items one by
    one would be a Python loop. Give it to a `DataLoader` with `batch_size=None` and a sampler of
    lists, as `make_loader` does.

    Args:
        series: The series.
        labels: Numeric labels [n] or [n, K]; those of the container if not given.
        weight: Weights [n].
        queries: Query times and targets of each series, see `collate`.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> SeriesDataset(series)[[1, 0]].values.shape
        torch.Size([2, 2, 1])
    """

    def __init__(
        self,
        series: IrregularSeries,
        *,
        labels: Any = None,
        weight: Any = None,
        queries: IrregularSeries | None = None,
    ) -> None:
        self.series, self.queries = series, queries
        self.labels = series.labels if labels is None else np.asarray(labels)
        self.weight = None if weight is None else np.asarray(weight, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int | list[int]) -> Batch:
        return collate(
            self.series,
            np.atleast_1d(np.asarray(index, dtype=np.int64)),
            labels=self.labels,
            weight=self.weight,
            queries=self.queries,
        )


def make_loader(
    series: IrregularSeries,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    labels: Any = None,
    weight: Any = None,
    queries: IrregularSeries | None = None,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Return a loader of batches of series of similar length.

    `loader.sampler.set_epoch(epoch)` chooses the order of an epoch; Lightning calls it by itself.

    Args:
        series: The series.
        batch_size: Largest number of series per batch and rank.
        shuffle: Draw another order each epoch; otherwise series come sorted by length, and
            `batch.index` says where they belong.
        seed: Seed of the order.
        labels: Numeric labels [n] or [n, K]; those of the container if not given.
        weight: Weights [n].
        queries: Query times and targets of each series, see `collate`.
        rank: Number of this process.
        world_size: Number of processes.
        num_workers: Processes that collate in the background.
        pin_memory: Put batches into page-locked memory, for fast copies to a GPU.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> [batch.index.tolist() for batch in make_loader(series, 1, shuffle=False)]
        [[1], [0]]
    """
    sampler = LengthBatches(
        series.lengths, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
    )
    return DataLoader(
        SeriesDataset(series, labels=labels, weight=weight, queries=queries),
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        # A generator of its own, so that drawing batches leaves the global seed alone.
        generator=torch.Generator().manual_seed(seed),
    )
