"""Batches for the tests of the task models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from osciformer.data.batches import Batch

FEATURES, STATIC = 3, 2


def make_batch(
    batch_size: int = 4,
    length: int = 9,
    *,
    queries: int = 0,
    static: bool = True,
    ragged: bool = True,
    seed: int = 0,
) -> Batch:
    """Return a batch with missing values; its last series is empty if it is ragged."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    times = 40.0 * draw(batch_size, length).double().sort(dim=1).values
    lengths = torch.tensor([length - 2 * b for b in range(batch_size)]).clamp(min=1)
    lengths[-1] = 0
    mask = torch.arange(length) < lengths[:, None] if ragged else torch.ones_like(times) > 0
    values = torch.randn(batch_size, length, FEATURES, generator=generator)
    values[draw(batch_size, length, FEATURES) < 0.5] = torch.nan
    values[0, 1:2] = torch.nan  # a row in which nothing was measured
    values[:, :, 2][1] = torch.nan  # a feature that was never measured
    values[~mask] = torch.nan
    known = torch.randn(batch_size, STATIC, generator=generator)
    known[0, 1] = torch.nan
    asked = 50.0 * draw(batch_size, queries).double() - 5.0 if queries else None
    return Batch(
        times=times,
        values=values,
        mask=mask,
        static=known if static else None,
        labels=None,
        weight=None,
        query_times=asked,
        targets=None,
        query_mask=None,
        index=torch.arange(batch_size),
    )


def pad_with_garbage(batch: Batch, extra: int = 3) -> Batch:
    """Return the batch with more padding, in which NaN and large numbers stand."""
    size, length, features = batch.values.shape
    values = torch.full((size, length + extra, features), 1e3)
    values[:, :length] = batch.values
    values[:, -1] = torch.nan
    times = torch.full((size, length + extra), torch.nan, dtype=batch.times.dtype)
    times[:, :length] = batch.times
    mask = torch.zeros(size, length + extra, dtype=torch.bool)
    mask[:, :length] = batch.mask
    return replace(batch, values=values, times=times, mask=mask)


def take(batch: Batch, index: Tensor) -> Batch:
    """Return some series of a batch."""
    return replace(
        batch,
        **{
            name: getattr(batch, name)[index]
            for name in ("times", "values", "mask", "static", "query_times")
            if getattr(batch, name) is not None
        },
    )
