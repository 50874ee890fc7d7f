"""What estimators take as X and as weights, and whether it has the columns of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from osciformer._text import name_some
from osciformer._types import Float, Int
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis
from osciformer.data.tables import Layout, as_table, from_frame

SeriesData = IrregularSeries | ParquetSeries


def chunks(data: SeriesData) -> Iterator[IrregularSeries]:
    """Yield the series, in order, a bounded part at a time if they are on disk."""
    yield from data.chunks() if isinstance(data, ParquetSeries) else (data,)


def take(data: SeriesData, index: Int[np.ndarray, "m"]) -> SeriesData:
    """Return the series at increasing positions, still on disk if they are there."""
    return data.select(index) if isinstance(data, ParquetSeries) else data.take(index)


def labels_of(data: SeriesData) -> np.ndarray | None:
    """Return the labels that the data themselves have, or None."""
    if isinstance(data, ParquetSeries):
        return data.labels() if data.layout.labels else None
    return data.labels


def as_series(
    X: Any,
    layout: Layout | Mapping[str, Any] | None = None,
    feature_names: Sequence[str] | None = None,
) -> SeriesData:
    """Return X, also a data frame or a list of `(times [N], values [N, F])`, as series."""
    if isinstance(X, IrregularSeries | ParquetSeries):
        found: SeriesData = X
    elif isinstance(X, list | tuple):
        times, values = split_pairs(X, "values", "series")
        found = IrregularSeries.from_arrays(times, values, empty="keep")
    elif is_table(X):
        if layout is None:
            raise ValueError(
                "a data frame needs a layout that names its columns, such as "
                "layout=dict(id='patient', time='hour', label='outcome')"
            )
        if not isinstance(layout, Layout | Mapping):
            raise TypeError(
                "layout must be a Layout, or a dict such as dict(id='patient', time='hour'); "
                f"got {layout!r}"
            )
        columns = layout if isinstance(layout, Layout) else Layout(**layout)
        table = as_table(X)
        if not set(columns.labels) <= set(table.column_names):
            columns = columns.replace(label=None)
        if feature_names is not None:
            columns = columns.replace(values=tuple(feature_names))
        found = from_frame(table, columns)
    else:
        raise TypeError(
            "X must be an IrregularSeries, a ParquetSeries, a data frame with a layout, or a list "
            f"of (times, values) pairs; got {type(X).__name__}. A padded array can be read with "
            "osciformer.data.IrregularSeries.from_padded"
        )
    if len(found) == 0:
        raise ValueError("X holds no series; pass at least one")
    return found


def is_table(X: Any) -> bool:
    """Return whether X is a data frame, an Arrow table, or a mapping of columns."""
    return hasattr(X, "columns") or hasattr(X, "__arrow_c_stream__") or isinstance(X, Mapping)


def split_pairs(pairs: Sequence[Any], second: str, what: str) -> tuple[list[Any], list[Any]]:
    """Return the parts of a list of pairs `(times, second)`."""
    if len(pairs) == 0:
        raise ValueError(f"X holds no {what}; pass at least one")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            kind = type(pair).__name__
            raise TypeError(f"X must be a list of (times, {second}) pairs; item {number} is {kind}")
    return [first for first, _ in pairs], [last for _, last in pairs]


def check_same_columns(
    data: SeriesData, features: Sequence[str], static: Sequence[str], time_axis: TimeAxis
) -> None:
    """Refuse series whose features, static features or times are not those of training."""
    first = next(chunks(data))
    _check_same_names("features", list(features), list(first.feature_names))
    _check_same_names("static features", list(static), list(first.static_names))
    wanted, got = time_axis, first.time_axis
    if (wanted.kind, wanted.unit, wanted.origin) != (got.kind, got.unit, got.origin):
        raise ValueError(
            f"the model was fitted with times of kind {wanted.kind!r}, unit {wanted.unit!r} "
            f"and origin {wanted.origin!r}; X has {got.kind!r}, {got.unit!r} and "
            f"{got.origin!r}. Read X with the same layout as in fit"
        )


def _check_same_names(what: str, wanted: list[str], got: list[str]) -> None:
    """Refuse features that are not those of training, in the same order."""
    if wanted == got:
        return
    absent = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    problems = [f"{name_some(absent)} are missing"] if absent else []
    problems += [f"{name_some(extra)} were not there in fit"] if extra else []
    problems = problems or [f"they come in another order, {name_some(got)}"]
    raise ValueError(
        f"the model was fitted with {len(wanted)} {what}, {name_some(wanted)}; in X "
        f"{' and '.join(problems)}. Pass the same {what} in the same order; NaN stands for a "
        "missing value"
    )


def check_weight(sample_weight: Any, count: int) -> Float[np.ndarray, "n"] | None:
    """Return sample weights as float32 [n]."""
    if sample_weight is None:
        return None
    weight = np.asarray(sample_weight, dtype=np.float32)
    if weight.shape != (count,):
        shape = list(weight.shape)
        raise ValueError(f"sample_weight must be [{count}], one per series; got {shape}")
    if not (np.isfinite(weight) & (weight >= 0)).all() or weight.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative, and not all zero")
    return weight
