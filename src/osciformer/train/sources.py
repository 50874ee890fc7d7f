"""Where batches come from: series or events in memory, or a table on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from osciformer._types import Int
from osciformer.data.batches import Batch, LengthBatches, collate, make_loader
from osciformer.data.parquet_series import ParquetSeries, StreamedBatches, make_stream_loader
from osciformer.data.series import IrregularSeries
from osciformer.events import EventBatch, EventSequences

# Splits series into what a model sees and what it is asked, one query series per series.
Draw = Callable[[IrregularSeries, np.random.Generator], tuple[IrregularSeries, IrregularSeries]]
Prepare = Callable[[IrregularSeries], IrregularSeries]


class EpochBatches:
    """The batches of one epoch and process; workers start with the first batch, not before.

    Args:
        loader: A loader with a length.
        finish: Applied to each batch.
    """

    def __init__(self, loader: DataLoader[Any], finish: Callable[[Any], Any] | None = None) -> None:
        self.loader, self.finish = loader, finish

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch if self.finish is None else self.finish(batch)


class BatchSource(Protocol):
    """Series that come as batches, in an order that the number of the epoch decides."""

    def __len__(self) -> int:
        """Return the number of series."""

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""


class SeriesSource:
    """Batches of series of similar length, in memory.

    Args:
        series: The series, scaled.
        batch_size: Series per step, of all processes together.
        labels: Numeric labels [n] or [n, K].
        weight: Weights [n].
        draw: For query tasks: splits the series into inputs and queries, anew each epoch.
        shuffle: Another order and another draw each epoch; otherwise both stay as they are.
        seed: Seed of the order and of the draws.
        num_workers: Processes that collate in the background.
        pin_memory: Put batches into page-locked memory.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> source = SeriesSource(series, 1, shuffle=False)
        >>> [batch.index.tolist() for batch in source.epoch(0)]
        [[1], [0]]
    """

    def __init__(
        self,
        series: IrregularSeries,
        batch_size: int,
        *,
        labels: Any = None,
        weight: Any = None,
        draw: Draw | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.series, self.batch_size, self.draw = series, batch_size, draw
        self.labels, self.shuffle, self.seed = labels, shuffle, seed
        self.options = {"weight": weight, "num_workers": num_workers, "pin_memory": pin_memory}
        self._fixed: tuple[IrregularSeries, IrregularSeries | None] | None = None

    def __len__(self) -> int:
        return len(self.series)

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        inputs, queries = self._split(number)
        loader = make_loader(
            inputs,
            _per_process(self.batch_size, world_size),
            labels=self.labels,
            queries=queries,
            shuffle=self.shuffle,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            **self.options,
        )
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return EpochBatches(loader)

    def _split(self, number: int) -> tuple[IrregularSeries, IrregularSeries | None]:
        series = self.series.replace(labels=None)
        if self.draw is None:
            return series, None
        if self.shuffle:
            return self.draw(series, np.random.default_rng((self.seed, number)))
        if self._fixed is None:
            self._fixed = self.draw(series, np.random.default_rng(self.seed))
        return self._fixed


class StreamSource(SeriesSource):
    """Batches of a table that need not fit into memory.

    Args:
        table: The table.
        batch_size: Series per step, of all processes together.
        prepare: Applied to each chunk, such as `SeriesTransform.transform`.
        **settings: As of `SeriesSource`; inputs and queries are drawn anew for each batch.
    """

    def __init__(
        self, table: ParquetSeries, batch_size: int, *, prepare: Prepare, **settings: Any
    ) -> None:
        super().__init__(table, batch_size, **settings)  # type: ignore[arg-type]
        self.table, self.prepare = table, prepare

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        draw_seed = (self.seed, number, rank) if self.shuffle else (self.seed, 0, rank)
        loader = make_stream_loader(
            self.table,
            _per_process(self.batch_size, world_size),
            shuffle=self.shuffle,
            seed=self.seed,
            prepare=_Prepared(self.prepare),
            make_batch=collate if self.draw is None else _Drawn(self.draw, draw_seed),
            rank=rank,
            world_size=world_size,
            **self.options,
        )
        assert isinstance(loader.dataset, StreamedBatches)
        loader.dataset.set_epoch(number)
        return EpochBatches(loader, self._label)

    def _label(self, batch: Batch) -> Batch:
        if self.labels is None:
            return batch
        return replace(batch, labels=torch.from_numpy(np.asarray(self.labels)[batch.index.numpy()]))


def _per_process(batch_size: int, world_size: int) -> int:
    """Return how many series of a step one process has: a share, rounded up."""
    return max(1, -(-batch_size // world_size))


class _Prepared:
    """Chunks as the model wants them; labels, which may be text, are added later."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __call__(self, chunk: IrregularSeries) -> IrregularSeries:
        return self.prepare(chunk.replace(labels=None))


class _Drawn:
    """Batches of freshly drawn inputs and queries."""

    def __init__(self, draw: Draw, seed: tuple[int, ...]) -> None:
        self.draw, self.seed = draw, seed
        self._generator: np.random.Generator | None = None

    def __call__(self, series: IrregularSeries, index: Int[np.ndarray, "B"]) -> Batch:
        if self._generator is None:
            worker = get_worker_info()
            self._generator = np.random.default_rng(
                (*self.seed, 0 if worker is None else worker.id)
            )
        inputs, queries = self.draw(series[index], self._generator)
        return collate(inputs, queries=queries)


class EventSource:
    """Batches of sequences of similar length, in memory; a `BatchSource`.

    Args:
        sequences: The sequences.
        batch_size: Sequences per step, of all processes together.
        shuffle: Another order each epoch; otherwise they come sorted by length.
        seed: Seed of the order.
        num_workers: Processes that pad in the background.

    Example:
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 4.0], [0.5], [2.0, 3.0]])
        >>> source = EventSource(events, 2, shuffle=False)
        >>> [batch.index.tolist() for batch in source.epoch(0)]
        [[1, 2], [0]]
    """

    def __init__(
        self,
        sequences: EventSequences,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        self.sequences, self.batch_size = sequences, batch_size
        self.shuffle, self.seed, self.num_workers = shuffle, seed, num_workers

    def __len__(self) -> int:
        return len(self.sequences)

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        sampler = LengthBatches(
            self.sequences.lengths,
            _per_process(self.batch_size, world_size),
            shuffle=self.shuffle,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        sampler.set_epoch(number)
        loader: DataLoader[EventBatch] = DataLoader(
            _PaddedBatches(self.sequences),
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            # A generator of its own, so that drawing batches leaves the global seed alone.
            generator=torch.Generator().manual_seed(self.seed),
        )
        return EpochBatches(loader)


class _PaddedBatches(Dataset[EventBatch]):
    """Sequences whose items are padded batches, as `SeriesDataset` has them for series."""

    def __init__(self, sequences: EventSequences) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int | list[int]) -> EventBatch:
        return self.sequences.batch(np.atleast_1d(np.asarray(index, dtype=np.int64)))
