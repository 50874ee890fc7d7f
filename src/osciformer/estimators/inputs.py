"""From what users pass as X to series, and checks that it fits what was seen in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osciformer._text import name_some
from osciformer._types import Float
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis
from osciformer.data.tables import Layout, as_table, from_frame

SeriesData = IrregularSeries | ParquetSeries


def as_series(
    X: Any,
    layout: Layout | Mapping[str, Any] | None = None,
    feature_names: Sequence[str] | None = None,
) -> SeriesData:
    """Return X as series, in memory or on disk.

    Args:
        X: An `IrregularSeries`, a `ParquetSeries`, a data frame, or a list of pairs
            `(times [N], values [N, F])`.
        layout: Which column of a data frame means what; labels may be absent from the frame.
        feature_names: Features of the frame to read; all that the layout leaves if not given.

    Example:
        >>> as_series([([0.0, 1.0], [[1.0], [2.0]]), ([0.5], [[3.0]])])
        IrregularSeries(2 series, 3 observations of 1 feature, lengths 1 to 2)
    """
    if isinstance(X, IrregularSeries | ParquetSeries):
        found: SeriesData = X
    elif isinstance(X, list | tuple):
        found = _from_pairs(X)
    elif hasattr(X, "columns") or hasattr(X, "__arrow_c_stream__") or isinstance(X, Mapping):
        found = _from_table(X, layout, feature_names)
    else:
        raise TypeError(
            "X must be an IrregularSeries, a ParquetSeries, a data frame with a layout, or a list "
            f"of (times, values) pairs; got {type(X).__name__}. A padded array can be read with "
            "osciformer.data.IrregularSeries.from_padded"
        )
    if len(found) == 0:
        raise ValueError("X holds no series; pass at least one")
    return found


def _from_pairs(pairs: Sequence[Any]) -> IrregularSeries:
    if len(pairs) == 0:
        raise ValueError("X holds no series; pass at least one")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(
                f"X must be a list of (times, values) pairs; item {number} is {type(pair).__name__}"
            )
    return IrregularSeries.from_arrays([t for t, _ in pairs], [x for _, x in pairs], empty="keep")


def _from_table(
    frame: Any, layout: Layout | Mapping[str, Any] | None, feature_names: Sequence[str] | None
) -> IrregularSeries:
    if layout is None:
        raise ValueError(
            "a data frame needs a layout that names its columns, such as "
            "layout=dict(id='patient', time='hour', label='outcome')"
        )
    if not isinstance(layout, Layout):
        layout = Layout(**layout)
    table = as_table(frame)
    if not set(layout.labels) <= set(table.column_names):
        layout = layout.replace(label=None)
    if feature_names is not None:
        layout = layout.replace(values=tuple(feature_names))
    return from_frame(table, layout)


def check_same_columns(what: str, wanted: Sequence[str], got: Sequence[str]) -> None:
    """Refuse features that are not those of training, in the same order."""
    wanted, got = list(wanted), list(got)
    if wanted == got:
        return
    absent = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    problems = []
    if absent:
        problems.append(f"{name_some(absent)} are missing")
    if extra:
        problems.append(f"{name_some(extra)} were not there in fit")
    if not problems:
        problems.append(f"they come in another order, {name_some(got)}")
    raise ValueError(
        f"the model was fitted with {len(wanted)} {what}, {name_some(wanted)}; in X "
        f"{' and '.join(problems)}. Pass the same {what} in the same order; NaN stands for a "
        "missing value"
    )


def check_same_times(wanted: TimeAxis, got: TimeAxis) -> None:
    """Refuse times in another unit than in training."""
    if (wanted.kind, wanted.unit, wanted.origin) != (got.kind, got.unit, got.origin):
        raise ValueError(
            f"the model was fitted with times of kind {wanted.kind!r}, unit {wanted.unit!r} and "
            f"origin {wanted.origin!r}; X has {got.kind!r}, {got.unit!r} and {got.origin!r}. Read "
            "X with the same layout as in fit"
        )


def check_weight(sample_weight: Any, count: int) -> Float[np.ndarray, "n"] | None:
    """Return sample weights as float32 [n]."""
    if sample_weight is None:
        return None
    weight = np.asarray(sample_weight, dtype=np.float32)
    if weight.shape != (count,):
        raise ValueError(
            f"sample_weight must be [{count}], one per series; got {list(weight.shape)}"
        )
    if not (np.isfinite(weight) & (weight >= 0)).all() or weight.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative, and not all zero")
    return weight


def split_validation_data(validation_data: Any) -> tuple[Any, Any]:
    """Return X and y of `validation_data`, which may be X alone or a pair `(X, y)`."""
    if isinstance(validation_data, tuple) and len(validation_data) == 2:
        return validation_data
    return validation_data, None
