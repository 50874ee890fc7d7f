"""Ragged series for tests: fixed ones, random ones, and strategies for hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from osciformer.data import IrregularSeries


def random_series(
    num_series: int = 20,
    *,
    num_features: int = 3,
    seed: int = 0,
    longest: int = 12,
    static: bool = True,
    labels: bool = True,
    missing: float = 0.3,
) -> IrregularSeries:
    """Series with ids a0, a1, ..., each with a value at its first time."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_series)
    tables = [rng.standard_normal((n, num_features)).astype(np.float32) for n in lengths]
    for table in tables:
        hidden = rng.random(table.shape) < missing
        hidden[0, 0] = False
        table[hidden] = np.nan
    return IrregularSeries.from_arrays(
        [np.cumsum(rng.random(n) + 0.01) for n in lengths],
        tables,
        ids=[f"a{k}" for k in range(num_series)],
        static=rng.standard_normal((num_series, 2)) if static else None,
        static_names=["age", "height"] if static else None,
        labels=rng.integers(0, 2, num_series) if labels else None,
    )


finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def irregular_series(
    draw: st.DrawFn, *, min_length: int = 0, ties: bool = True, max_series: int = 6
) -> IrregularSeries:
    """Any valid container, by default with ties and with series that have no rows."""
    num_series = draw(st.integers(1, max_series))
    num_features = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(min_length, 6), min_size=num_series, max_size=num_series))
    steps = st.floats(0.0 if ties else 0.015625, 100.0, width=32)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    times = np.concatenate(
        [
            draw(finite) + np.cumsum(draw(npst.arrays(np.float64, length, elements=steps)))
            for length in lengths
        ]
    )
    values = st.one_of(finite, st.just(float("nan")))
    others: dict[str, Any] = {}
    if draw(st.booleans()):
        others["static"] = draw(npst.arrays(np.float32, (num_series, 2), elements=values))
    if draw(st.booleans()):
        others["labels"] = draw(npst.arrays(np.int64, num_series, elements=st.integers(0, 3)))
    return IrregularSeries(
        times,
        draw(npst.arrays(np.float32, (int(offsets[-1]), num_features), elements=values)),
        offsets,
        ids=[f"s{k}" for k in range(num_series)],
        **others,
    )
