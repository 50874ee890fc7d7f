from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from osciformer.data import IrregularSeries, ParquetSeries
from osciformer.train import SeriesSource, StreamSource
from osciformer.train.sources import BatchSource, _order

from .toy import shifted_series


def halves(
    series: IrregularSeries, generator: np.random.Generator
) -> tuple[IrregularSeries, IrregularSeries]:
    """Ask for all rows, shifted by a random time."""
    return series, series.replace(times=series.times + generator.random())


@pytest.fixture
def table(tmp_path: Path) -> ParquetSeries:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    frame = shifted_series(40).to_frame("pyarrow")
    parquet.write_table(frame, tmp_path / "table.parquet")
    return ParquetSeries(
        tmp_path / "table.parquet", id="id", time="time", label="label", chunk_rows=40
    )


def streamed(table: ParquetSeries, **settings: object) -> StreamSource:
    labels = table.labels()
    return StreamSource(table, 8, prepare=lambda s: s, labels=labels, **settings)  # type: ignore[arg-type]


def positions(source: BatchSource, number: int, rank: int = 0, world_size: int = 1) -> list[int]:
    batches = source.epoch(number, rank=rank, world_size=world_size)
    return [int(i) for batch in batches for i in batch.index]


def test_two_processes_share_the_batches_of_one() -> None:
    source = SeriesSource(shifted_series(30), 8)
    whole = [set(batch.index.tolist()) for batch in source.epoch(3)]
    parts = [
        [set(batch.index.tolist()) for batch in source.epoch(3, rank=rank, world_size=2)]
        for rank in (0, 1)
    ]
    assert [a | b for a, b in zip(*parts, strict=True)] == whole


def test_epoch_decides_order_and_draw() -> None:
    source = SeriesSource(shifted_series(30), 8, draw=halves)
    first, again, other = (next(iter(source.epoch(number))) for number in (0, 0, 1))
    assert torch.equal(first.index, again.index)
    assert torch.equal(first.query_times, again.query_times)
    assert not torch.equal(first.index, other.index)


def test_validation_asks_the_same_in_each_epoch() -> None:
    source = SeriesSource(shifted_series(9), 4, draw=halves, shuffle=False)
    first, other = (next(iter(source.epoch(number))) for number in (0, 5))
    assert torch.equal(first.query_times, other.query_times)


def test_stream_gives_each_series_once_with_its_label(table: ParquetSeries) -> None:
    source = streamed(table)
    found = {}
    for batch in source.epoch(0):
        assert batch.labels is not None
        found.update(zip(batch.index.tolist(), batch.labels.tolist(), strict=True))
    assert found == dict(enumerate(table.labels().tolist()))


def test_stream_is_decided_by_the_epoch(table: ParquetSeries) -> None:
    source = streamed(table)
    assert positions(source, 1) == positions(source, 1)
    assert positions(source, 1) != positions(source, 2)


def test_stream_shares_series_among_processes(table: ParquetSeries) -> None:
    parts = [positions(streamed(table), 0, rank, 2) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == list(range(40))


def test_stream_draws_queries_for_each_batch(table: ParquetSeries) -> None:
    source = streamed(table, draw=halves)
    times = [
        [b.query_times for b in source.epoch(number) if b.query_times is not None]
        for number in (0, 0, 1)
    ]
    assert all(torch.equal(a, b) for a, b in zip(times[0], times[1], strict=True))
    assert not torch.equal(times[0][0], times[2][0])


def test_batch_size_counts_all_processes() -> None:
    source = SeriesSource(IrregularSeries.from_arrays([[0.0]], [[1.0]]), 64)
    shares = [_order(source, 0, n)["batch_size"] for n in (1, 2, 3, 100)]
    assert shares == [64, 32, 22, 1]
