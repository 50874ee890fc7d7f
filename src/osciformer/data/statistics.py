"""Statistics of series in one pass, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._types import Float, Int
from osciformer.data.series import IrregularSeries

# Values per column from which quantiles are taken; more of them are sampled.
SAMPLE_SIZE = 1 << 16


class ColumnStatistics:
    """Count, mean, spread, range and quantiles of each column, ignoring NaN, from chunks of rows.

    Means and spreads are exact, whatever the chunks. Quantiles are exact up to `SAMPLE_SIZE` values
    of a column; beyond that they come from a sample that depends on the numbers of the rows alone,
    so that chunks of any size give the same ones.

    Args:
        num_columns: Number of columns F.

    Example:
        >>> table = ColumnStatistics(1)
        >>> table.update(np.array([[1.0], [np.nan]])).update(np.array([[3.0]])).mean
        array([2.])
    """

    def __init__(self, num_columns: int) -> None:
        self.num_rows = 0
        self.count = np.zeros(num_columns, dtype=np.int64)
        self.mean = np.zeros(num_columns)
        self.squares = np.zeros(num_columns)  # sum of squared differences from the mean
        self.low = np.full(num_columns, np.inf)
        self.high = np.full(num_columns, -np.inf)
        self._samples = [np.empty(0, dtype=np.float32) for _ in range(num_columns)]
        self._priorities = [np.empty(0, dtype=np.uint64) for _ in range(num_columns)]

    def update(self, rows: Float[np.ndarray, "T F"]) -> ColumnStatistics:
        """Take more rows into account and return this object."""
        if rows.ndim != 2 or rows.shape[1] != len(self.count):
            raise ValueError(f"rows must be [T, {len(self.count)}]; got {list(rows.shape)}")
        priority = _scramble(np.arange(self.num_rows, self.num_rows + len(rows), dtype=np.uint64))
        self.num_rows += len(rows)
        for column in range(rows.shape[1]):
            observed = ~np.isnan(rows[:, column])
            self._update_column(column, rows[observed, column], priority[observed])
        return self

    def _update_column(
        self, column: int, values: Float[np.ndarray, "T"], priority: Int[np.ndarray, "T"]
    ) -> None:
        if len(values) == 0:
            return
        exact = values.astype(np.float64)
        before, added = self.count[column], len(values)
        mean = exact.mean()
        shift = mean - self.mean[column]
        # Moments of two parts together, without subtracting large sums (Chan et al. 1979).
        self.mean[column] += shift * added / (before + added)
        self.squares[column] += np.square(exact - mean).sum()
        self.squares[column] += shift**2 * before * added / (before + added)
        self.count[column] += added
        self.low[column] = min(self.low[column], exact.min())
        self.high[column] = max(self.high[column], exact.max())
        sample = np.concatenate((self._samples[column], values.astype(np.float32)))
        priority = np.concatenate((self._priorities[column], priority))
        if len(sample) > SAMPLE_SIZE:
            lowest = np.argpartition(priority, SAMPLE_SIZE)[:SAMPLE_SIZE]
            sample, priority = sample[lowest], priority[lowest]
        self._samples[column], self._priorities[column] = sample, priority

    @property
    def std(self) -> Float[np.ndarray, "F"]:
        """Standard deviation of each column (of the population); 0 where there is no value."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def quantile(self, fraction: float) -> Float[np.ndarray, "F"]:
        """Return a quantile of each column; NaN where there is no value."""
        return np.array(
            [
                np.quantile(s.astype(np.float64), fraction) if len(s) else np.nan
                for s in self._samples
            ]
        )


@dataclass
class SeriesStatistics:
    """What a data set looks like, in one pass over chunks of it.

    Attributes:
        features: Statistics of the feature columns.
        static: Statistics of the static features, or None.
        feature_names: Names of the features.
        num_series: Number of series.
        num_rows: Number of rows.
        longest: Largest number of rows of a series.
        first_time: Earliest time.
        last_time: Latest time.
        longest_span: Longest time from the first to the last row of a series.
        gap_sum: Sum of the gaps between neighbouring rows of a series.
        num_gaps: Their number.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> found = SeriesStatistics.of(series)
        >>> found.num_rows, found.longest_span, found.features.mean
        (3, 1.0, array([2.]))
    """

    features: ColumnStatistics
    static: ColumnStatistics | None
    feature_names: tuple[str, ...]
    num_series: int = 0
    num_rows: int = 0
    longest: int = 0
    first_time: float = np.inf
    last_time: float = -np.inf
    longest_span: float = 0.0
    gap_sum: float = 0.0
    num_gaps: int = 0

    @classmethod
    def of(cls, *chunks: IrregularSeries) -> SeriesStatistics:
        """Return the statistics of one or more chunks."""
        if not chunks:
            raise ValueError("statistics need at least one chunk of series")
        first = chunks[0]
        static = None if first.static is None else ColumnStatistics(first.static.shape[1])
        result = cls(ColumnStatistics(first.num_features), static, first.feature_names)
        for chunk in chunks:
            result.update(chunk)
        return result

    def update(self, series: IrregularSeries) -> SeriesStatistics:
        """Take more series into account and return this object."""
        if series.feature_names != self.feature_names:
            raise ValueError(
                f"all chunks must have the features {self.feature_names}; "
                f"got {series.feature_names}"
            )
        self.features.update(series.values)
        if self.static is not None and series.static is not None:
            self.static.update(series.static)
        lengths, spans = series.lengths, series.spans
        self.num_series += len(series)
        self.num_rows += len(series.times)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.first_time = min(self.first_time, float(series.times.min(initial=np.inf)))
        self.last_time = max(self.last_time, float(series.times.max(initial=-np.inf)))
        self.longest_span = max(self.longest_span, float(spans.max(initial=0.0)))
        self.gap_sum += float(spans.sum())
        self.num_gaps += int(np.maximum(lengths - 1, 0).sum())
        return self

    @property
    def mean_gap(self) -> float:
        """Mean time between neighbouring rows of a series; NaN if no series has two."""
        return self.gap_sum / self.num_gaps if self.num_gaps else float("nan")

    def describe(self) -> list[dict[str, Any]]:
        """Return one plain dict per feature: name, count, missing, mean, std, low, high."""
        columns = self.features
        return [
            {
                "feature": name,
                "count": int(columns.count[k]),
                "missing": 1.0 - int(columns.count[k]) / max(self.num_rows, 1),
                "mean": float(columns.mean[k]) if columns.count[k] else float("nan"),
                "std": float(columns.std[k]) if columns.count[k] else float("nan"),
                "low": float(columns.low[k]) if columns.count[k] else float("nan"),
                "high": float(columns.high[k]) if columns.count[k] else float("nan"),
            }
            for k, name in enumerate(self.feature_names)
        ]


def _scramble(numbers: Int[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
    """Return a fixed pseudorandom number for each number (the finaliser of splitmix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
