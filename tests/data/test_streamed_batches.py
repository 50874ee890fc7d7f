"""Training batches from a table: each series once, ranks in step, the order decided by the seed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.data import (
    Batch,
    IrregularSeries,
    ParquetSeries,
    SeriesTransform,
    StreamedBatches,
    collate,
    make_stream_loader,
)

from .series_cases import random_series

parquet = pytest.importorskip("pyarrow.parquet")

SERIES = random_series(97)
COLUMNS: dict[str, Any] = {
    "id": "id",
    "time": "time",
    "static": ["age", "height"],
    "label": "label",
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ParquetSeries:
    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    parquet.write_table(SERIES.to_frame("pyarrow"), path, row_group_size=64)
    return ParquetSeries(path, chunk_rows=30, **COLUMNS)


def order(batches: Any) -> list[list[int]]:
    return [batch.index.tolist() for batch in batches]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("pool_blocks", [1, 3, 100])
@pytest.mark.parametrize("batch_size", [1, 7, 200])
def test_each_series_comes_once_as_it_is(
    table: ParquetSeries, shuffle: bool, pool_blocks: int, batch_size: int
) -> None:
    stream = StreamedBatches(table, batch_size, shuffle=shuffle, pool_blocks=pool_blocks)
    batches = list(stream)
    assert len(batches) == len(stream)
    assert sorted(np.concatenate(order(batches))) == list(range(97))
    for batch in batches:
        assert len(batch) <= batch_size
        expected = collate(SERIES, batch.index.numpy())
        torch.testing.assert_close(batch.values, expected.values, equal_nan=True)
        assert torch.equal(batch.times, expected.times)
        assert batch.labels is not None
        assert torch.equal(batch.labels, expected.labels)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_equally_many_batches_and_share_the_series(
    table: ParquetSeries, world_size: int
) -> None:
    streams = [StreamedBatches(table, 6, rank=r, world_size=world_size) for r in range(world_size)]
    for epoch in range(3):
        for stream in streams:
            stream.set_epoch(epoch)
        ranks = [order(stream) for stream in streams]
        assert {len(batches) for batches in ranks} == {len(stream) for stream in streams}
        seen = np.concatenate([np.concatenate(batches) for batches in ranks])
        assert sorted(seen) == list(range(97))


def test_seed_and_epoch_decide_the_order(table: ParquetSeries) -> None:
    stream = StreamedBatches(table, 8)
    first = order(stream)
    assert first == order(stream)
    stream.set_epoch(1)
    assert first != order(stream)
    assert first != order(StreamedBatches(table, 8, seed=1))
    assert len(first) == len(stream)


def test_a_series_meets_others_in_each_epoch(table: ParquetSeries) -> None:
    stream = StreamedBatches(table, 8, pool_blocks=100)
    companions = set()
    for epoch in range(5):
        stream.set_epoch(epoch)
        companions.add(next(frozenset(batch) for batch in order(stream) if 30 in batch))
    assert len(companions) == 5


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
def test_workers_share_the_table(table: ParquetSeries) -> None:
    loader: Any = make_stream_loader(table, 8, num_workers=2)
    epochs = []
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)
        epochs.append(order(loader))
        assert len(epochs[-1]) == len(loader)
        assert sorted(np.concatenate(epochs[-1])) == list(range(97))
    assert epochs[0] != epochs[1]


def test_chunks_are_prepared_and_weighted(table: ParquetSeries) -> None:
    transform = SeriesTransform().fit(SERIES)
    weight = np.arange(97, dtype=np.float32)
    stream = StreamedBatches(table, 8, prepare=transform.transform, weight=weight)
    scaled = transform.transform(SERIES)
    for batch in stream:
        assert batch.weight is not None
        assert batch.weight.tolist() == batch.index.tolist()
        expected = collate(scaled, batch.index.numpy())
        torch.testing.assert_close(batch.values, expected.values, equal_nan=True)


def test_batches_can_be_made_otherwise(table: ParquetSeries) -> None:
    def make(series: IrregularSeries, index: np.ndarray) -> Batch:
        return collate(series, index, queries=series)

    for batch in StreamedBatches(table, 8, make_batch=make):
        assert batch.query_times is not None
        assert torch.equal(batch.query_times, batch.times)


def test_a_selection_is_streamed_with_its_own_numbers(table: ParquetSeries) -> None:
    chosen = table.select(np.arange(0, 97, 3))
    assert sorted(np.concatenate(order(StreamedBatches(chosen, 5)))) == list(range(len(chosen)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"pool_blocks": 0}, "pool_blocks must be at least 1"),
        ({"rank": 1}, "rank must be from 0"),
        ({"weight": [1.0]}, r"weight must be \[97\]"),
        ({"world_size": 60}, "smaller chunk_rows"),
    ],
)
def test_bad_settings_are_refused(
    table: ParquetSeries, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StreamedBatches(table, **{"batch_size": 4, **settings})


def test_the_number_of_workers_must_be_announced(table: ParquetSeries) -> None:
    stream = StreamedBatches(table, 4, num_workers=2)
    with pytest.raises(ValueError, match="num_workers=2 was announced"):
        next(iter(stream))


def peaks(path: Path, num_series: int) -> tuple[int, int]:
    """Return the largest memory of NumPy and of Arrow while a table is read as batches."""
    import pyarrow as pa

    rows = np.arange(num_series * 50)
    columns = {"id": rows // 50, "time": rows.astype(float), "x": np.sin(rows), "y": np.cos(rows)}
    parquet.write_table(pa.table(columns), path, row_group_size=1000)
    del rows, columns
    table = ParquetSeries(path, id="id", time="time", chunk_rows=1000)
    pool = pa.system_memory_pool()
    before, default = pool.bytes_allocated(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        arrow = max(pool.bytes_allocated() - before for _ in StreamedBatches(table, 16))
        return tracemalloc.get_traced_memory()[1], arrow
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    small, large = (peaks(tmp_path / "a.parquet", count) for count in (200, 1600))
    # The ids and beginnings of eight times the series are all that is more.
    assert large[0] < 1.5 * small[0]
    assert large[1] <= 1.5 * small[1]
