"""Where batches come from: series or events in memory, or a table on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from osciformer._types import Int
from osciformer.data.batches import Batch, LengthBatches, collate, make_loader
from osciformer.data.parquet_series import ParquetSeries, make_stream_loader
from osciformer.data.series import IrregularSeries
from osciformer.events import EventBatch, EventSequences

# Splits series into what a model sees and what it is asked, one query series per series.
Draw = Callable[[IrregularSeries, np.random.Generator], tuple[IrregularSeries, IrregularSeries]]
Prepare = Callable[[IrregularSeries], IrregularSeries]


class EpochBatches:
    """The batches of one epoch and process; `finish` is applied to each."""

    def __init__(self, loader: DataLoader[Any], finish: Callable[[Any], Any] | None = None) -> None:
        self.loader, self.finish = loader, finish

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader) if self.finish is None else map(self.finish, self.loader)


class BatchSource(Protocol):
    """Series that come as batches, in an order that the number of the epoch decides."""

    def __len__(self) -> int:
        """Return the number of series."""

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""


def _order(source: Any, rank: int, world_size: int) -> dict[str, Any]:
    """Return what decides which series of a source a process gets, and when."""
    share = max(1, -(-source.batch_size // world_size))
    order = {"batch_size": share, "shuffle": source.shuffle, "seed": source.seed}
    return {**order, "rank": rank, "world_size": world_size}


@dataclass(eq=False)
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
        >>> [batch.index.tolist() for batch in SeriesSource(series, 1, shuffle=False).epoch(0)]
        [[1], [0]]
    """

    series: IrregularSeries | ParquetSeries
    batch_size: int
    _: KW_ONLY
    labels: Any = None
    weight: Any = None
    draw: Draw | None = None
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0
    pin_memory: bool = False
    _kept: tuple[IrregularSeries, IrregularSeries | None] | None = field(
        default=None, init=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.series)

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        inputs, queries = self._split(number)
        settings = {**_order(self, rank, world_size), **self._loading}
        loader = make_loader(inputs, labels=self.labels, queries=queries, **settings)
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return EpochBatches(loader)

    @property
    def _loading(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("weight", "num_workers", "pin_memory")}

    def _split(self, number: int) -> tuple[IrregularSeries, IrregularSeries | None]:
        """Return inputs and queries of an epoch, or of all epochs if they are alike."""
        if self._kept is not None:
            return self._kept
        assert isinstance(self.series, IrregularSeries)
        inputs, queries = self.series.replace(labels=None), None
        if self.draw is not None:
            seed = (self.seed, number) if self.shuffle else self.seed
            inputs, queries = self.draw(inputs, np.random.default_rng(seed))
        if not self.shuffle:
            self._kept = inputs, queries
        return inputs, queries


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
        super().__init__(table, batch_size, **settings)
        self.table, self.prepare = table, prepare

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        seed = (self.seed, number if self.shuffle else 0, rank)
        loader: Any = make_stream_loader(
            self.table,
            prepare=functools.partial(_prepare_unlabelled, self.prepare),
            make_batch=collate if self.draw is None else _Drawn(self.draw, seed),
            **_order(self, rank, world_size),
            **self._loading,
        )
        loader.dataset.set_epoch(number)
        return EpochBatches(loader, None if self.labels is None else self._label)

    def _label(self, batch: Batch) -> Batch:
        return replace(batch, labels=torch.from_numpy(np.asarray(self.labels)[batch.index.numpy()]))


def _prepare_unlabelled(prepare: Prepare, chunk: IrregularSeries) -> IrregularSeries:
    """Return a chunk as the model wants it; labels, which may be text, are added later."""
    return prepare(chunk.replace(labels=None))


@dataclass
class _Drawn:
    """Batches of freshly drawn inputs and queries; each worker draws on its own."""

    draw: Draw
    seed: tuple[int, ...]
    generator: np.random.Generator | None = None

    def __call__(self, series: IrregularSeries, index: Int[np.ndarray, "B"]) -> Batch:
        if self.generator is None:
            worker = get_worker_info()
            self.generator = np.random.default_rng((*self.seed, worker.id if worker else 0))
        inputs, queries = self.draw(series[index], self.generator)
        return collate(inputs, queries=queries)


@dataclass(eq=False)
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
        >>> [batch.index.tolist() for batch in EventSource(events, 2, shuffle=False).epoch(0)]
        [[1, 2], [0]]
    """

    sequences: EventSequences
    batch_size: int
    _: KW_ONLY
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        """Return the batches of an epoch for one of several processes."""
        sampler = LengthBatches(self.sequences.lengths, **_order(self, rank, world_size))
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


@dataclass(eq=False)
class _PaddedBatches(Dataset[EventBatch]):
    """Sequences whose items are padded batches, as `SeriesDataset` has them for series."""

    sequences: EventSequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int | list[int]) -> EventBatch:
        return self.sequences.batch(np.atleast_1d(np.asarray(index, dtype=np.int64)))
