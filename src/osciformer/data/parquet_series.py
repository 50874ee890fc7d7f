"""Parquet tables that are larger than memory: chunks of whole series, and training batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import name_some
from osciformer._types import Bool, Float, Int
from osciformer.data import tables
from osciformer.data.batches import Batch, check_rank, collate, cut_by_length, even_sizes, pool_size
from osciformer.data.files import (
    columns_to_read,
    damage_named,
    open_parquet,
    parquet_files,
    parquet_schema,
)
from osciformer.data.ragged import check_names, check_shape, check_static, offsets_of, positions_of
from osciformer.data.series import IrregularSeries, add_static, concatenate
from osciformer.data.tables import Layout
from osciformer.data.transforms import SeriesStatistics

# Rows that are decoded at a time: small beside a chunk, large beside the cost of a call.
BATCH_ROWS = 1 << 16

# Positions [m] of some series in their table, and the series.
_Chunk = tuple[Int[np.ndarray, "m"], IrregularSeries]


class ParquetSeries:
    """The series of a Parquet table that need not fit into memory.

    The rows of a series must lie one after another, in any order of time. Memory holds the ids, 16
    bytes per series, one chunk (or the largest series), and the compressed columns of one row
    group. Random access decodes row groups from their beginning: give each about `chunk_rows`.

    Args:
        path: A Parquet file, or a folder of them, read in the order of their names.
        layout: Which column means what; series without any value cannot be dropped.
        chunk_rows: Rows of a chunk, about.
        **settings: Arguments of `Layout`.
    """

    ids: np.ndarray  #: Names of the series [n], in the order of the file.
    layout: Layout  #: The layout, with the features by name.
    feature_names: tuple[str, ...]  #: Names of the features.
    num_blocks: int  #: Number of chunks in the whole file.

    def __init__(
        self,
        path: str | Path,
        layout: Layout | None = None,
        *,
        chunk_rows: int = 1 << 18,
        **settings: Any,
    ) -> None:
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1; got {chunk_rows}")
        layout = tables.make_layout(layout, settings)
        if layout.empty == "drop":
            raise advise(
                ValueError,
                Mention("empty", "drop"),
                " would change the numbers of the series from chunk to chunk; pass ",
                Mention("empty", "keep"),
                ", and leave series out with select",
            )
        files = parquet_files(path)
        self._groups, schema = _row_groups(files), parquet_schema(files)
        self._columns = columns_to_read(schema.names, layout)
        self.ids, self._offsets = self._find_series(layout)
        self._all_ids, self._kept = self.ids, np.ones(len(self.ids), dtype=bool)
        self._blocks = _cut_blocks(self._offsets, chunk_rows)
        self.num_blocks = len(self._blocks) - 1
        self._further = np.empty((len(self.ids), 0), dtype=np.float32)  # static, see `with_static`
        self._further_names: tuple[str, ...] = ()
        self.layout = self._name_features(layout, schema)
        self.feature_names = tuple(self.layout.values or ())

    def __len__(self) -> int:
        return int(self._kept.sum())

    def __repr__(self) -> str:
        return (
            f"ParquetSeries({len(self)} series, {int(self.num_rows.sum())} rows, "
            f"{len(self.feature_names)} features, {self.num_blocks} blocks)"
        )

    @property
    def static_names(self) -> tuple[str, ...]:
        """Names of the static features."""
        return (*self.layout.static, *self._further_names)

    @property
    def num_rows(self) -> Int[np.ndarray, "n"]:
        """Rows of the table that each series takes."""
        return np.diff(self._offsets)[self._kept]

    def select(self, index: Any) -> ParquetSeries:
        """Return the series at some positions (integers or a mask), in the order of the file."""
        chosen = np.flatnonzero(self._kept)[positions_of(index, len(self))]
        if len(chosen) == 0:
            raise ValueError("index selects no series; at least one is needed")
        result = copy.copy(self)
        result._kept = np.zeros(len(self._kept), dtype=bool)
        result._kept[chosen] = True
        result.ids = self._all_ids[result._kept]
        return result

    def with_static(self, static: Float[np.ndarray, "n S"], names: Sequence[str]) -> ParquetSeries:
        """Return the table with further static features, in the order of `ids`, kept in memory."""
        static = check_static(static, len(self))
        whole = np.full((len(self._kept), static.shape[1]), np.nan, dtype=np.float32)
        whole[self._kept] = static
        result = copy.copy(self)
        result._further = np.concatenate((self._further, whole), axis=1)
        result._further_names = (*self._further_names, *map(str, names))
        count = len(self.layout.static) + result._further.shape[1]
        check_names("static_names", result.static_names, count, "static")
        return result

    def chunks(self) -> Iterator[IrregularSeries]:
        """Return all series, in the order of the file, about `chunk_rows` rows at a time."""
        return (series for _, series in self.read_blocks(range(self.num_blocks)))

    def read(self) -> IrregularSeries:
        """Return all series, in memory."""
        return concatenate(list(self.chunks()))

    def labels(self) -> np.ndarray:
        """Return the label of each series [n] or [n, K], reading only the label column."""
        if not self.layout.labels:
            raise ValueError("the layout names no label column; pass label='...'")
        used = {name: getattr(self.layout, name) for name in ("id", "label", "missing")}
        layout = Layout(time="", **used)
        wanted, found = [layout.id, *layout.labels], []
        for block, table in self._tables(range(self.num_blocks), wanted):
            labels = tables.read_labels(tables.sorted_rows(table, layout), layout)
            found.append(np.asarray(labels)[self._kept_in(block)])
        return np.concatenate(found)

    def statistics(self) -> SeriesStatistics:
        """Return the statistics of all series, in one pass over the table."""
        chunks = self.chunks()
        statistics = SeriesStatistics.of(next(chunks))
        for chunk in chunks:
            statistics.update(chunk)
        return statistics

    def series_per_block(self) -> Int[np.ndarray, "blocks"]:
        """Return how many of the selected series each block holds."""
        return np.add.reduceat(self._kept.astype(np.int64), self._blocks[:-1])

    def blocks_per_row_group(self) -> list[list[int]]:
        """Return runs of blocks that begin in one row group, and are best read together."""
        starts = np.array([group.start for group in self._groups])
        group = np.searchsorted(starts, self._offsets[self._blocks[:-1]], side="right")
        cuts = np.flatnonzero(np.diff(group)) + 1
        return [run.tolist() for run in np.split(np.arange(self.num_blocks), cuts)]

    def read_blocks(self, blocks: Sequence[int]) -> Iterator[_Chunk]:
        """Yield the selected series of consecutive blocks, if any, and their positions here."""
        number = np.cumsum(self._kept) - 1
        for block, table in self._tables(blocks, self._columns):
            kept = self._kept_in(block)
            if not kept.any():
                continue
            try:
                series = tables.from_frame(table, self.layout)
            except (TypeError, ValueError) as error:
                rows = self._offsets[self._blocks[block : block + 2]]
                raise type(error)(f"rows {rows[0]} to {rows[1] - 1}: {error}") from error
            series = series if kept.all() else series[kept]
            positions = self._blocks[block] + np.flatnonzero(kept)
            if self._further_names:
                series = add_static(series, self._further[positions], self._further_names)
            yield number[positions], series

    def _kept_in(self, block: int) -> Bool[np.ndarray, "m"]:
        return self._kept[self._blocks[block] : self._blocks[block + 1]]

    def _tables(self, blocks: Sequence[int], names: list[str] | None) -> Iterator[tuple[int, Any]]:
        """Yield the rows of consecutive blocks, each as an Arrow table."""
        pa = need("pyarrow", extra="data")
        cuts = self._offsets[self._blocks[blocks[0] : blocks[-1] + 2]]
        position = max(group.start for group in self._groups if group.start <= cuts[0])
        block, parts = 0, []
        for batch in self._decode(position, names):
            start = max(cuts[block] - position, 0)
            while block < len(blocks) and position + batch.num_rows >= cuts[block + 1]:
                stop = cuts[block + 1] - position
                parts.append(batch.slice(start, stop - start))
                yield blocks[block], pa.Table.from_batches(parts)
                start, parts, block = stop, [], block + 1
            if block == len(blocks):
                return
            if start < batch.num_rows:
                parts.append(batch.slice(start))
            position += batch.num_rows

    def _decode(self, first: int, names: list[str] | None) -> Iterator[Any]:
        """Yield record batches from the row group on that begins at row `first`."""
        later = (group for group in self._groups if group.start >= first)
        for path, groups in groupby(later, key=lambda group: group.path):
            with damage_named(path), open_parquet(path) as file:
                for group in groups:
                    yield from file.iter_batches(
                        BATCH_ROWS, row_groups=[group.number], columns=names, use_threads=False
                    )

    def _find_series(self, layout: Layout) -> tuple[np.ndarray, Int[np.ndarray, "n+1"]]:
        """Return the ids and where each begins, from runs of equal entries in the id column."""
        pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
        ids, starts, position, id = [], [], 0, layout.id
        for batch in self._decode(0, [id]):
            column = pa.chunked_array([batch.column(0)])
            codes, entries = tables.read_full_codes(
                column, id, "an id", first_row=position, missing=layout.missing
            )
            begins = np.flatnonzero(np.diff(codes, prepend=-1))
            if len(begins) > len(entries):
                _refuse_scattered(entries[codes[begins]], id)
            if batch.num_rows:
                ids.append(entries[codes[begins]])
                starts.append(begins + position)
            position += batch.num_rows
        if position == 0:
            raise ValueError("the table has no rows")
        runs = np.concatenate(ids)
        fresh = np.append(True, runs[1:] != runs[:-1])  # a series may go on in the next batch
        if pc.count_distinct(pa.array(runs[fresh])).as_py() != fresh.sum():
            _refuse_scattered(runs[fresh], id)
        return runs[fresh], np.append(np.concatenate(starts)[fresh], position)

    def _name_features(self, layout: Layout, schema: Any) -> Layout:
        """Return the layout with all features by name, which no single chunk needs to show."""
        pa, found, name = need("pyarrow", extra="data"), set[str](), layout.variable
        for batch in self._decode(0, [name]) if name else ():
            column = pa.chunked_array([batch.column(0)])
            found.update(map(str, tables.read_codes(column, str(name), missing=layout.missing)[1]))
        variables = sorted(found) if layout.is_narrow else None
        names = tables.feature_names(schema.empty_table(), layout, variables)
        return layout.replace(values=names, allow_absent=layout.allow_absent or layout.is_narrow)


class _RowGroup(NamedTuple):
    path: Path
    number: int  # in its file
    start: int  # its first row, in the whole table


def _row_groups(files: list[Path]) -> list[_RowGroup]:
    parquet, groups, start = need("pyarrow.parquet", extra="data"), [], 0
    for path in files:
        with damage_named(path):
            metadata = parquet.read_metadata(path)
        for number in range(metadata.num_row_groups):
            groups.append(_RowGroup(path, number, start))
            start += metadata.row_group(number).num_rows
    return groups or [_RowGroup(files[0], 0, 0)]


def _cut_blocks(offsets: Int[np.ndarray, "n+1"], rows: int) -> Int[np.ndarray, "blocks+1"]:
    """Return the series at which each block begins, followed by n."""
    cuts = [0]
    while cuts[-1] < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[cuts[-1]] + rows, side="right")) - 1
        cuts.append(max(stop, cuts[-1] + 1))
    return np.array(cuts)


def _refuse_scattered(ids: np.ndarray, column: str) -> None:
    entries, counts = np.unique(ids, return_counts=True)
    raise advise(
        ValueError,
        "the rows of a series must lie one after another; those of "
        f"{name_some(entries[counts > 1])} do not. Sort the table by {column!r} first, for example "
        f"with polars: pl.scan_parquet(old).sort({column!r}).sink_parquet(new); or use ",
        Mention("stream", False, "read_parquet"),
        " if the table fits into memory",
    )


@dataclass(eq=False)
class StreamedBatches(IterableDataset[Batch]):
    """Batches of a `ParquetSeries`, shuffled through a pool, with bounded memory.

    Each rank and worker reads its blocks in random order into a pool, shuffles the pool, and cuts
    it into batches of similar length. Each series comes once per epoch. All ranks and workers
    have the same number of batches, of nearly equal sizes.
    """

    table: ParquetSeries  #: The table.
    batch_size: int  #: Largest number of series per batch.
    _: KW_ONLY
    shuffle: bool = True  #: Draw another order each epoch; otherwise keep the order of the blocks.
    seed: int = 0  #: Seed of the order, which depends on seed and epoch only.
    pool_blocks: int = 4  #: Blocks in the pool: more mixes better and takes more memory.
    #: Applied to each chunk, such as `SeriesTransform.transform`; keeps the number of series.
    prepare: Callable[[IrregularSeries], IrregularSeries] | None = None
    #: Makes a batch of some positions of the pooled series.
    make_batch: Callable[[IrregularSeries, Int[np.ndarray, "B"]], Batch] = collate
    weight: Any = None  #: Weights of the series of the table [n].
    rank: int = 0  #: Number of this process.
    world_size: int = 1  #: Number of processes.
    num_workers: int = 0  #: Workers of the `DataLoader` that will read this; 0 for none.
    epoch: int = field(default=0, init=False)  #: Number of the epoch.

    def __post_init__(self) -> None:
        for name in ("batch_size", "pool_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        check_rank(self.rank, self.world_size)
        if self.weight is not None:
            self.weight = np.asarray(self.weight, dtype=np.float32)
            check_shape("weight", self.weight, (len(self.table),))
        self._deal()  # refuses too few blocks early

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which decides the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._deal()[1] * max(self.num_workers, 1)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        if workers != max(self.num_workers, 1):
            announced = f"num_workers={self.num_workers} was announced"
            advice = "give both the same, or use make_stream_loader"
            raise ValueError(f"{announced} and the DataLoader has {workers}; {advice}")
        shard = self.rank * workers + (0 if worker is None else worker.id)
        shards, steps = self._deal()
        generator = np.random.default_rng((self.seed, self.epoch, shard))
        yield from self._batches(shards[shard], steps, generator)

    def _deal(self) -> tuple[list[list[list[int]]], int]:
        """Return the runs of blocks of each shard, in order, and the number of batches of a shard.

        Which runs go together, and with it the number of batches, is the same in all epochs.
        """
        num_shards = self.world_size * max(self.num_workers, 1)
        sizes = self.table.series_per_block()
        runs = [[b for b in run if sizes[b]] for run in self.table.blocks_per_row_group()]
        runs = [run for run in runs if run]
        if len(runs) < 2 * num_shards:
            runs = [[block] for run in runs for block in run]
        shards: list[list[list[int]]] = [[] for _ in range(num_shards)]
        load = np.zeros(num_shards, dtype=np.int64)
        for run in sorted(runs, key=lambda run: -sizes[run].sum()):  # large ones first
            shards[int(np.argmin(load))].append(run)
            load[np.argmin(load)] += sizes[run].sum()
        steps = -(-int(load.max()) // self.batch_size)
        if load.min() < steps:
            cause = f"the {len(runs)} blocks of the table cannot be shared evenly by {num_shards}"
            advice = "open the table with a smaller chunk_rows, or use fewer workers"
            raise ValueError(f"{cause} shards (ranks times workers); {advice}")
        if not self.shuffle:
            return [sorted(shard) for shard in shards], steps
        generator = np.random.default_rng((self.seed, self.epoch))
        shards = [shards[position] for position in generator.permutation(num_shards)]
        return [[shard[k] for k in generator.permutation(len(shard))] for shard in shards], steps

    def _batches(
        self, runs: list[list[int]], steps: int, generator: np.random.Generator
    ) -> Iterator[Batch]:
        """Yield the batches of one shard, which reads these runs of blocks."""
        sizes = self.table.series_per_block()
        widths = even_sizes(sum(int(sizes[run].sum()) for run in runs), steps)
        # A run may have holes where nothing is selected; reading skips those.
        ranges = (range(run[0], run[-1] + 1) for run in runs)
        chunks = chain.from_iterable(map(self.table.read_blocks, ranges))
        pool: list[_Chunk] = []
        for number_read, (positions, chunk) in enumerate(chunks, start=1):
            pool.append((positions, chunk if self.prepare is None else self.prepare(chunk)))
            if number_read % self.pool_blocks == 0:
                pooled = sum(len(positions) for positions, _ in pool)
                ready = int(np.searchsorted(np.cumsum(widths), pooled, side="right"))
                yield from self._cut(pool, widths[:ready], steps, generator)
                widths = widths[ready:]
        yield from self._cut(pool, widths, steps, generator)

    def _cut(
        self, pool: list[_Chunk], widths: np.ndarray, steps: int, generator: np.random.Generator
    ) -> Iterator[Batch]:
        """Yield batches of these sizes from the pool, and leave the rest in it."""
        if len(widths) == 0:
            return
        positions = np.concatenate([positions for positions, _ in pool])
        series = concatenate([part for _, part in pool])
        order = generator.permutation(len(series)) if self.shuffle else np.arange(len(series))
        used, rest = order[: widths.sum()], order[widths.sum() :]
        batches = cut_by_length(used, series.lengths, offsets_of(widths), pool_size(steps))
        turns = generator.permutation(len(batches)) if self.shuffle else range(len(batches))
        pool[:] = [(positions[rest], series[rest])] if len(rest) else []
        for turn in turns:
            batch = self.make_batch(series, batches[turn])
            index = positions[batches[turn]]
            weight = batch.weight if self.weight is None else torch.from_numpy(self.weight[index])
            yield replace(batch, index=torch.from_numpy(index), weight=weight)


def make_stream_loader(
    table: ParquetSeries,
    batch_size: int,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    **settings: Any,
) -> DataLoader[Batch]:
    """Return a loader over `StreamedBatches`; call `loader.dataset.set_epoch` before each epoch."""
    dataset = StreamedBatches(table, batch_size, num_workers=num_workers, **settings)
    # Workers start afresh each epoch: they learn its number when they get the data set.
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(dataset.seed),
    )
