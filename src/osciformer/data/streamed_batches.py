"""Training batches from a table that does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from osciformer._types import Int
from osciformer.data.batches import Batch, collate
from osciformer.data.combine import concatenate
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.sampler import check_rank, cut_by_length, default_pool, even_bounds
from osciformer.data.series import IrregularSeries


class StreamedBatches(IterableDataset[Batch]):
    """Batches of a `ParquetSeries`, shuffled through a pool, with bounded memory.

    Blocks of the table are dealt to shards, one per rank and worker. A shard reads its blocks in
    random order into a pool of `pool_blocks`, shuffles the pool, and cuts it into batches of
    similar length. Each series comes once per epoch. All shards have the same number of batches;
    their sizes differ a little so that this comes out even.

    Args:
        table: The table.
        batch_size: Largest number of series per batch.
        shuffle: Draw another order each epoch; otherwise blocks come in the order of the file.
        seed: Seed of the order; with the epoch it decides everything.
        pool_blocks: Blocks in the pool: more mixes better and takes more memory.
        prepare: Applied to each chunk, such as `SeriesTransform.transform`, or the encoding of
            labels. It must keep the number of series.
        make_batch: Makes a batch of the series of a pool at some positions; `collate` by default.
        weight: Weights of the series of the table [n].
        rank: Number of this process.
        world_size: Number of processes.
        num_workers: Workers of the `DataLoader` that will read this; 0 for none.
    """

    def __init__(
        self,
        table: ParquetSeries,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        pool_blocks: int = 4,
        prepare: Callable[[IrregularSeries], IrregularSeries] | None = None,
        make_batch: Callable[[IrregularSeries, Int[np.ndarray, "B"]], Batch] = collate,
        weight: Any = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        for name, number in (("batch_size", batch_size), ("pool_blocks", pool_blocks)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        check_rank(rank, world_size)
        self.table, self.batch_size, self.pool_blocks = table, batch_size, pool_blocks
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.prepare, self.make_batch = prepare, make_batch
        self.weight = None if weight is None else np.asarray(weight, dtype=np.float32)
        if self.weight is not None and self.weight.shape != (len(table),):
            raise ValueError(f"weight must be [{len(table)}]; got {list(self.weight.shape)}")
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self._deal()  # says at once if there are too few blocks

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number the order depends on."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank in this epoch."""
        return self._num_steps(self._deal()) * max(self.num_workers, 1)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        if workers != max(self.num_workers, 1):
            raise ValueError(
                f"num_workers={self.num_workers} was announced and the DataLoader has {workers}; "
                "give both the same, or use make_stream_loader"
            )
        shard = self.rank * workers + (0 if worker is None else worker.id)
        deal = self._deal()
        generator = np.random.default_rng((self.seed, self.epoch, shard))
        yield from self._batches(deal[shard], self._num_steps(deal), generator)

    def _deal(self) -> list[list[list[int]]]:
        """Return the runs of blocks of each shard, in the order of this epoch.

        Large runs are dealt first, each to the shard that has least. Which runs go together is the
        same in all epochs, and with it the number of batches; who gets them, and when, is not.
        """
        num_shards = self.world_size * max(self.num_workers, 1)
        sizes = self.table.series_per_block()
        runs = [[b for b in run if sizes[b]] for run in self.table.blocks_per_row_group()]
        runs = [run for run in runs if run]
        if len(runs) < 2 * num_shards:
            runs = [[block] for run in runs for block in run]
        shards: list[list[list[int]]] = [[] for _ in range(num_shards)]
        load = np.zeros(num_shards, dtype=np.int64)
        for run in sorted(runs, key=lambda run: -sizes[run].sum()):
            shards[int(np.argmin(load))].append(run)
            load[np.argmin(load)] += sizes[run].sum()
        if load.min() < -(-load.max() // self.batch_size):
            raise ValueError(
                f"the {len(runs)} blocks of the table cannot be shared evenly by {num_shards} "
                "shards (ranks times workers); open the table with a smaller chunk_rows, or use "
                "fewer workers"
            )
        if not self.shuffle:
            return [sorted(shard) for shard in shards]
        generator = np.random.default_rng((self.seed, self.epoch))
        shards = [shards[position] for position in generator.permutation(num_shards)]
        return [[shard[k] for k in generator.permutation(len(shard))] for shard in shards]

    def _num_steps(self, deal: list[list[list[int]]]) -> int:
        """Return the number of batches of a shard: as many as the largest one needs."""
        sizes = self.table.series_per_block()
        largest = max(sum(int(sizes[run].sum()) for run in runs) for runs in deal)
        return -(-largest // self.batch_size)

    def _batches(
        self, runs: list[list[int]], steps: int, generator: np.random.Generator
    ) -> Iterator[Batch]:
        sizes = self.table.series_per_block()
        total = sum(int(sizes[run].sum()) for run in runs)
        widths = np.diff(even_bounds(total, steps))
        pool, together = _Pool(), default_pool(steps)
        for number_read, (positions, chunk) in enumerate(self._chunks(runs), start=1):
            pool.add(positions, chunk)
            if number_read % self.pool_blocks == 0:
                ready = int(np.searchsorted(np.cumsum(widths), len(pool), side="right"))
                yield from self._cut(pool, widths[:ready], together, generator)
                widths = widths[ready:]
        yield from self._cut(pool, widths, together, generator)

    def _chunks(
        self, runs: list[list[int]]
    ) -> Iterator[tuple[Int[np.ndarray, "m"], IrregularSeries]]:
        for run in runs:
            # A run may have holes where nothing is selected; reading passes over those.
            for positions, chunk in self.table.read_blocks(range(run[0], run[-1] + 1)):
                yield positions, chunk if self.prepare is None else self.prepare(chunk)

    def _cut(
        self,
        pool: _Pool,
        widths: Int[np.ndarray, "k"],
        pool_batches: int,
        generator: np.random.Generator,
    ) -> Iterator[Batch]:
        """Yield batches of these sizes from the pool, and leave the rest in it."""
        if len(widths) == 0:
            return
        positions, series = pool.take_all()
        order = generator.permutation(len(series)) if self.shuffle else np.arange(len(series))
        used, rest = order[: widths.sum()], order[widths.sum() :]
        bounds = np.concatenate(([0], np.cumsum(widths)))
        batches = cut_by_length(used, series.lengths, bounds, pool_batches)
        turns = generator.permutation(len(batches)) if self.shuffle else range(len(batches))
        if len(rest):
            pool.add(positions[rest], series[rest])
        for turn in turns:
            chosen = batches[turn]
            batch = self.make_batch(series, chosen)
            index = positions[chosen]
            weight = batch.weight if self.weight is None else torch.from_numpy(self.weight[index])
            yield replace(batch, index=torch.from_numpy(index), weight=weight)


class _Pool:
    """Series that were read and are not yet in a batch, with their positions in the table."""

    def __init__(self) -> None:
        self.positions: list[Int[np.ndarray, "m"]] = []
        self.parts: list[IrregularSeries] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def add(self, positions: Int[np.ndarray, "m"], series: IrregularSeries) -> None:
        self.positions.append(positions)
        self.parts.append(series)

    def take_all(self) -> tuple[Int[np.ndarray, "m"], IrregularSeries]:
        taken = np.concatenate(self.positions), concatenate(self.parts)
        self.positions, self.parts = [], []
        return taken


def make_stream_loader(
    table: ParquetSeries,
    batch_size: int,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    **settings: Any,
) -> DataLoader[Batch]:
    """Return a loader over `StreamedBatches`; call `loader.dataset.set_epoch` before each epoch.

    Args:
        table: The table.
        batch_size: Largest number of series per batch.
        num_workers: Processes that read in the background.
        pin_memory: Put batches into page-locked memory, for fast copies to a GPU.
        **settings: Other arguments of `StreamedBatches`.
    """
    dataset = StreamedBatches(table, batch_size, num_workers=num_workers, **settings)
    # Workers are started afresh each epoch: they learn its number when they get the data set.
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(dataset.seed),
    )
