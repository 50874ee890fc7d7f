"""The same few operations for series in memory and for a table on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from osciformer._types import Int
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis, concatenate
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators.inputs import SeriesData
from osciformer.train.sources import Draw, SeriesSource, StreamSource

# Series from which the time scale is learned.
SAMPLE_SIZE = 1000


def take(data: SeriesData, index: Int[np.ndarray, "m"]) -> SeriesData:
    """Return the series at rising positions."""
    return data.select(index) if isinstance(data, ParquetSeries) else data[index]


def chunks(data: SeriesData) -> Iterator[IrregularSeries]:
    """Yield the series, in order, a bounded part at a time."""
    if isinstance(data, ParquetSeries):
        yield from data.chunks()
    else:
        yield data


def first_chunk(data: SeriesData) -> IrregularSeries:
    """Return the first part of the series, for names and shapes."""
    return next(chunks(data))


def labels_of(data: SeriesData) -> np.ndarray | None:
    """Return the labels that the data themselves have, or None."""
    if isinstance(data, ParquetSeries):
        return data.labels() if data.layout.labels else None
    return data.labels


def learn_scales(
    data: SeriesData, transform: SeriesTransform, generator: np.random.Generator
) -> IrregularSeries:
    """Fit the transform in one pass, and return a sample of the series.

    Raises:
        ValueError: If there is not a single value.
    """
    parts = []
    share = -(-SAMPLE_SIZE // (data.num_blocks if isinstance(data, ParquetSeries) else 1))
    for chunk in chunks(data):
        transform.partial_fit(chunk)
        chosen = generator.permutation(len(chunk))[:share]
        parts.append(chunk[np.sort(chosen)].replace(labels=None))
    assert transform.statistics is not None
    if transform.statistics.features.count.sum() == 0:
        raise ValueError(
            f"all values of all {len(data)} series are missing (NaN); check the value columns"
        )
    return concatenate(parts)


def make_source(
    data: SeriesData,
    transform: SeriesTransform,
    batch_size: int,
    *,
    draw: Draw | None = None,
    **settings: Any,
) -> SeriesSource | StreamSource:
    """Return the batches of scaled series.

    Args:
        data: The series.
        transform: Their scaling, fitted.
        batch_size: Series per step.
        draw: Splits scaled series into inputs and queries.
        **settings: `labels`, `weight`, `shuffle`, `seed`, `num_workers`, `pin_memory`.
    """
    if isinstance(data, ParquetSeries):
        return StreamSource(data, batch_size, prepare=transform.transform, draw=draw, **settings)
    return SeriesSource(transform.transform(data), batch_size, draw=draw, **settings)


def names_and_axis(data: SeriesData) -> tuple[tuple[str, ...], tuple[str, ...], TimeAxis]:
    """Return the names of features and static features, and the time axis."""
    first = first_chunk(data)
    return first.feature_names, first.static_names, first.time_axis
