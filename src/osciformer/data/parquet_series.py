"""Parquet tables that are larger than memory, as chunks of whole series."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer._types import Bool, Float, Int
from osciformer.data.checks import check_names, check_static, name_some
from osciformer.data.columns import check_columns, index_columns, read_codes
from osciformer.data.combine import add_static, concatenate
from osciformer.data.files import (
    parquet_columns,
    parquet_files,
    parquet_schema,
    unreadable_parquet,
)
from osciformer.data.frames import from_frame, read_labels
from osciformer.data.layout import Layout, make_layout
from osciformer.data.ragged import positions_of
from osciformer.data.series import IrregularSeries
from osciformer.data.statistics import SeriesStatistics

# Rows that are decoded at a time: small beside a chunk, large beside the cost of a call.
BATCH_ROWS = 1 << 16


class ParquetSeries:
    """The series of a Parquet table that need not fit into memory.

    The rows of a series must lie one after another; within a series any order will do. Opening
    reads the column of ids once, to learn where each series begins: 16 bytes a series are kept,
    and the ids. After that, memory holds one chunk at a time, or the largest series if it is longer
    than a chunk, and the compressed columns of one row group. Reading in random order decodes a row
    group from its beginning for each block: write large tables in row groups of about `chunk_rows`.

    Args:
        path: A Parquet file, or a folder of them, read in the order of their names.
        layout: Which column means what; or give the arguments of `Layout` by name. Series without
            any value can be kept or be an error, but not be dropped.
        chunk_rows: Rows of a chunk, about.
        **settings: Arguments of `Layout`.

    Attributes:
        layout: The layout, with the features by name.
        ids: Names of the series [n], in the order of the file.
        num_rows: Rows of the table that each series takes [n].
    """

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
        layout = make_layout(layout, settings)
        if layout.empty == "drop":
            raise ValueError(
                "empty='drop' would change the numbers of the series from chunk to chunk; pass "
                "empty='keep', and leave series out with select"
            )
        self._files = parquet_files(path)
        self._groups = _row_groups(self._files)
        schema = parquet_schema(self._files)
        self._columns = parquet_columns(schema.names, layout)
        self.ids, self._offsets = self._find_series(layout.id)
        self._all_ids, self._kept = self.ids, np.ones(len(self.ids), dtype=bool)
        self._blocks = _cut_blocks(self._offsets, chunk_rows)
        self._further = np.empty((len(self.ids), 0), dtype=np.float32)  # static, see `with_static`
        self._further_names: tuple[str, ...] = ()
        self.layout = self._name_features(layout, schema)

    def __len__(self) -> int:
        return int(self._kept.sum())

    def __repr__(self) -> str:
        return (
            f"ParquetSeries({len(self)} series, {int(self.num_rows.sum())} rows, "
            f"{len(self.feature_names)} features, {self.num_blocks} blocks)"
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self.layout.values or ())

    @property
    def static_names(self) -> tuple[str, ...]:
        """Names of the static features."""
        return (*self.layout.static, *self._further_names)

    @property
    def num_rows(self) -> Int[np.ndarray, "n"]:
        """Rows of the table that each series takes."""
        return np.diff(self._offsets)[self._kept]

    @property
    def num_blocks(self) -> int:
        """Number of chunks in the whole file."""
        return len(self._blocks) - 1

    def select(self, index: Any) -> ParquetSeries:
        """Return the series at some positions (integers or a mask), in the order of the file.

        Example: `train, test = table.select(fold_a), table.select(fold_b)`.
        """
        chosen = np.flatnonzero(self._kept)[positions_of(index, len(self))]
        if len(chosen) == 0:
            raise ValueError("index selects no series; at least one is needed")
        result = copy.copy(self)
        result._kept = np.zeros(len(self._kept), dtype=bool)
        result._kept[chosen] = True
        result.ids = self._all_ids[result._kept]
        return result

    def with_static(self, static: Float[np.ndarray, "n S"], names: Sequence[str]) -> ParquetSeries:
        """Return the table with further static features, such as those of a table of patients.

        Args:
            static: A row for each series, in the order of `ids`; NaN is a missing value. They stay
                in memory.
            names: Names of the S features.
        """
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
        """Yield all series, in the order of the file, about `chunk_rows` rows at a time."""
        for _, series in self.read_blocks(range(self.num_blocks)):
            yield series

    def read(self) -> IrregularSeries:
        """Return all series, in memory."""
        return concatenate(list(self.chunks()))

    def labels(self) -> np.ndarray:
        """Return the label of each series [n] or [n, K], reading the label column alone."""
        if not self.layout.labels:
            raise ValueError("the layout names no label column; pass label='...'")
        wanted = [self.layout.id, *self.layout.labels]
        found = []
        for block, table in self._tables(range(self.num_blocks), wanted):
            labels = read_labels(table, self.layout)
            assert labels is not None
            found.append(labels[self._kept_in(block)])
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

    def read_blocks(
        self, blocks: Sequence[int]
    ) -> Iterator[tuple[Int[np.ndarray, "m"], IrregularSeries]]:
        """Yield the selected series of consecutive blocks, and their positions in this table.

        Args:
            blocks: Consecutive numbers of blocks, at least one; a block without a selected series
                gives nothing.
        """
        number = np.cumsum(self._kept) - 1
        for block, table in self._tables(blocks, self._columns):
            kept = self._kept_in(block)
            if not kept.any():
                continue
            try:
                series = from_frame(table, self.layout)
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
        position, block, parts = self._first_row(cuts[0]), 0, []
        for batch in self._decode(cuts[0], names):
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

    def _first_row(self, row: int) -> int:
        """Return where the row group of a row begins."""
        return max(group.start for group in self._groups if group.start <= row)

    def _decode(self, row: int, names: list[str] | None) -> Iterator[Any]:
        """Yield record batches from the row group of a row on."""
        pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
        first = self._first_row(row)
        for number, path in enumerate(self._files):
            groups = [g for g in self._groups if g.file == number and g.start >= first]
            if not groups:
                continue
            try:
                with parquet.ParquetFile(path) as file:
                    for group in groups:
                        yield from file.iter_batches(
                            BATCH_ROWS, row_groups=[group.number], columns=names, use_threads=False
                        )
            except (pa.ArrowInvalid, OSError) as error:
                raise unreadable_parquet(path, error) from error

    def _find_series(self, id: str) -> tuple[np.ndarray, Int[np.ndarray, "n+1"]]:
        """Return the ids and where each begins, from runs of equal entries in the id column."""
        pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
        ids, starts, position, last = [], [], 0, None
        for batch in self._decode(0, [id]):
            if batch.num_rows == 0:
                continue
            codes, entries = read_codes(pa.chunked_array([batch.column(0)]))
            if (codes < 0).any():
                raise ValueError(
                    f"column {id!r} has rows without an id, the first is row "
                    f"{position + int(np.argmin(codes))}; drop those rows"
                )
            begins = np.flatnonzero(np.concatenate(([True], np.diff(codes) != 0)))
            runs = entries[codes[begins]]
            if len(runs) > len(entries):
                _refuse_scattered(runs, id)
            if runs[0] == last:
                runs, begins = runs[1:], begins[1:]
            last = entries[codes[-1]]
            ids.append(runs)
            starts.append(begins + position)
            position += batch.num_rows
        if position == 0:
            raise ValueError("the table has no rows")
        joined = np.concatenate(ids)
        if pc.count_distinct(pa.array(joined)).as_py() != len(joined):
            _refuse_scattered(joined, id)
        return joined, np.append(np.concatenate(starts), position)

    def _name_features(self, layout: Layout, schema: Any) -> Layout:
        """Return the layout with all features by name, which no single chunk needs to show."""
        if not layout.is_narrow:
            taken = {*layout.columns, *layout.static, *index_columns(schema.empty_table())}
            names = layout.values or tuple(name for name in schema.names if name not in taken)
            return layout.replace(values=names)
        pa, found = need("pyarrow", extra="data"), set[str]()
        for batch in self._decode(0, [str(layout.variable)]):
            found.update(map(str, read_codes(pa.chunked_array([batch.column(0)]))[1]))
        names = layout.values or tuple(sorted(found - set(layout.static)))
        if not layout.allow_absent:
            check_columns(sorted({*found, *schema.names}), (*names, *layout.static))
        return layout.replace(values=names, allow_absent=True)


@dataclass(frozen=True)
class _RowGroup:
    """A row group: which file, its number there, and its first row in the whole table."""

    file: int
    number: int
    start: int


def _row_groups(files: list[Path]) -> list[_RowGroup]:
    pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
    groups, start = [], 0
    for number, path in enumerate(files):
        try:
            metadata = parquet.read_metadata(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable_parquet(path, error) from error
        for group in range(metadata.num_row_groups):
            groups.append(_RowGroup(number, group, start))
            start += metadata.row_group(group).num_rows
    return groups or [_RowGroup(0, 0, 0)]


def _cut_blocks(offsets: Int[np.ndarray, "n+1"], rows: int) -> Int[np.ndarray, "blocks+1"]:
    """Return the series at which each block begins, and behind them n."""
    cuts = [0]
    while cuts[-1] < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[cuts[-1]] + rows, side="right")) - 1
        cuts.append(max(stop, cuts[-1] + 1))
    return np.array(cuts)


def _refuse_scattered(ids: np.ndarray, column: str) -> None:
    entries, counts = np.unique(ids, return_counts=True)
    raise ValueError(
        "the rows of a series must lie one after another; those of "
        f"{name_some(entries[counts > 1])} do not. Sort the table by {column!r} first, for example "
        f"with polars: pl.scan_parquet(old).sort({column!r}).sink_parquet(new); or use "
        "read_parquet if the table fits into memory"
    )
