"""Series whose class is visible in their mean, and a model that can see it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from osciformer.data import Batch, IrregularSeries
from osciformer.train import Classification, SeriesSource, TrainConfig


class MeanModel(nn.Module):
    """The mean of the observed values, a dropout and a linear map."""

    def __init__(self, input_dim: int = 2, output_dim: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(input_dim, output_dim)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.linear(self.dropout(batch.values.nanmean(dim=1)))


class LevelModel(nn.Module):
    """A learned level of each quantile, at whatever time is asked."""

    def __init__(self, input_dim: int, num_quantiles: int) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(input_dim, num_quantiles))

    def forward(self, batch: Batch) -> torch.Tensor:
        assert batch.query_times is not None
        return self.level.expand(*batch.query_times.shape, -1, -1)


def shifted_series(count: int, seed: int = 0) -> IrregularSeries:
    """Return series with two features; those of class 1 lie higher."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    lengths = generator.integers(3, 9, count)
    times = [np.sort(generator.uniform(0, 5, length)) for length in lengths]
    values = [
        generator.normal(1.5 * label, 1.0, (length, 2))
        for label, length in zip(labels, lengths, strict=True)
    ]
    return IrregularSeries.from_arrays(times, values, labels=labels)


def make_sources(
    config: TrainConfig, count: int = 60
) -> tuple[Classification, SeriesSource, SeriesSource]:
    """Return a task, training batches and validation batches."""
    train, validation = shifted_series(count), shifted_series(30, seed=1)
    return (
        Classification(2, monitor="auroc"),
        SeriesSource(train, config.batch_size, labels=train.labels, seed=config.seed),
        SeriesSource(validation, config.batch_size, labels=validation.labels, shuffle=False),
    )


def make_model(**settings: float) -> MeanModel:
    """Return a model with weights that are the same each time."""
    torch.manual_seed(0)
    return MeanModel(**settings)  # type: ignore[arg-type]
