"""Irregular series of ragged lengths, with gaps of each variable's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from osciformer.data import IrregularSeries
from osciformer.resonators import Columns, Family


def ragged(
    count: int = 8, variables: int = 2, *, shortest: int = 6, longest: int = 25, seed: int = 0
) -> IrregularSeries:
    """Return noise at random times, a third of it missing."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(shortest, longest + 1, count)
    times = [np.sort(generator.uniform(0, 10, length)) for length in lengths]
    values = [generator.normal(size=(length, variables)) for length in lengths]
    for table in values:
        table[generator.random(table.shape) < 0.33] = np.nan
    return IrregularSeries.from_arrays(times, values)


def fitted(kind: type[Family], series: IrregularSeries, seed: int = 0) -> Any:
    """Return a family that has learned from series."""
    family = kind(Columns(series.feature_names, (), None))
    family.fit(series, np.random.default_rng(seed))
    return family
