"""What a family of features is, and the names of its columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from osciformer._types import Float, Int
from osciformer.data.series import IrregularSeries


class FeatureName(NamedTuple):
    """What a column means.

    Example:
        >>> str(FeatureName("states", ("pulse",), "velocity at the end", 6.0, 0.5, "h"))
        'pulse at period 6 h, Q 0.5, velocity at the end'
    """

    family: str  #: The family that it belongs to.
    variables: tuple[str, ...]  #: Variables that it is computed from; none for the series itself.
    statistic: str  #: What of them.
    period: float | None = None  #: Period of the oscillator, in the unit of the times.
    q: float | None = None  #: Its quality, 1 / (2 zeta): how many periods it rings, about.
    unit: str | None = None  #: Unit of the period; None for plain numbers.

    def __str__(self) -> str:
        parts = [" + ".join(self.variables) or "series"]
        if self.period is not None:
            parts[0] += f" at period {self.period:.3g}{f' {self.unit}' if self.unit else ''}"
        if self.q is not None:
            parts.append(f"Q {self.q:.3g}")
        return ", ".join([*parts, self.statistic])


class Columns(NamedTuple):
    """Names of what series hold."""

    features: tuple[str, ...]
    static: tuple[str, ...]
    unit: str | None  # of the times


@dataclass
class Family(ABC):
    """A family of features: what it learns is plain arrays, so that it can be saved.

    Series come with scaled values (about 0, a spread of about 1; NaN is a missing one), static
    features alike, and without labels. The features of a series must not depend on the others in a
    batch.
    """

    name: ClassVar[str]
    #: Families of a group are chosen together.
    group: ClassVar[str]
    #: Power of their spread that standardised columns keep in a model: 0, or more if columns that
    #: vary more count for more.
    power: ClassVar[float] = 0.0

    columns: Columns
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def fit(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> Mapping[str, np.ndarray]:
        """Learn from a sample of the training series, and return what was learned."""
        self.arrays = self._learn(sample, generator)
        return self.arrays

    @abstractmethod
    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Return the arrays that decide the features."""

    @abstractmethod
    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return a row of numbers per series; NaN is unknown."""

    @abstractmethod
    def names(self) -> list[FeatureName]:
        """Return the names of the p columns."""


def time_scales(series: IrregularSeries) -> tuple[float, float]:
    """Return a typical gap between rows and a typical span of series, both positive.

    Example:
        >>> time_scales(IrregularSeries([0.0, 1.0, 3.0, 4.0], np.ones((4, 1)), [0, 4]))
        (1.0, 4.0)
    """
    gaps = np.diff(series.times)
    starts = series.offsets[1:-1]
    gaps[starts[(starts > 0) & (starts < len(series.times))] - 1] = 0.0
    gaps, spans = gaps[gaps > 0], series.spans[series.spans > 0]
    if len(gaps) == 0:
        return 1.0, 1.0
    return float(np.median(gaps)), float(np.median(spans))


def similar_lengths(
    series: IrregularSeries, most_rows: int, *, least: int = 1
) -> Iterator[Int[np.ndarray, "m"]]:
    """Yield positions of series of similar lengths, padded to `most_rows` rows at most, or one.

    A series counts for `least` rows or more. Together, long and short ones would be mostly padding.

    Example:
        >>> series = IrregularSeries(np.arange(6.0), np.ones((6, 1)), [0, 3, 4, 6])
        >>> [index.tolist() for index in similar_lengths(series, 4)]
        [[1, 2], [0]]
    """
    lengths = np.maximum(series.lengths, least)
    order = np.argsort(lengths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop - start + 1) * lengths[order[stop]] > most_rows:
            yield order[start:stop]
            start = stop
