"""Sequences of events as batches for training."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from osciformer.data.batches import LengthBatches
from osciformer.events.sequences import EventBatch, EventSequences
from osciformer.train.sources import EpochBatches, per_process


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
            per_process(self.batch_size, world_size),
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
