"""Data frames of pandas, polars and pyarrow to series, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer._types import Float, Int
from osciformer.data import columns
from osciformer.data.checks import check_choice, name_some
from osciformer.data.layout import Layout, make_layout
from osciformer.data.narrow import pivot
from osciformer.data.ragged import offsets_of, series_of_rows
from osciformer.data.series import IrregularSeries
from osciformer.data.ties import settle_ties
from osciformer.data.time_axis import TimeAxis


def from_frame(frame: Any, layout: Layout | None = None, **settings: Any) -> IrregularSeries:
    """Return the series of a table with a row per observation.

    Args:
        frame: A pandas, polars or pyarrow table, another one with the Arrow PyCapsule interface,
            or a dict of columns.
        layout: Which column means what; or give the arguments of `Layout` by name.
        **settings: Arguments of `Layout`; they win over `layout`.

    Returns:
        The series, in the order in which their ids first appear, sorted by time.

    Example:
        >>> table = {"who": ["a", "b", "a"], "hour": [1.0, 0.0, 0.0], "pulse": [80, 70, None]}
        >>> series = from_frame(table, id="who", time="hour")
        >>> series.ids, series[0].times, series[0].values.ravel()
        (array(['a', 'b'], dtype='<U1'), array([0., 1.]), array([nan, 80.], dtype=float32))
    """
    layout = make_layout(layout, settings)
    table = columns.as_table(frame)
    columns.check_columns(table.column_names, layout.columns)
    if table.num_rows == 0:
        raise ValueError("the table has no rows")
    rows = sorted_rows(table, layout)
    variables = _Variables.of(rows, layout) if layout.is_narrow else None
    static, static_names = _static(rows, layout, variables)
    read = _wide if variables is None else _narrow
    times, values, offsets, feature_names = read(rows, layout, variables)
    return IrregularSeries(
        times,
        values,
        offsets,
        ids=rows.ids,
        static=static,
        labels=_labels(rows, layout),
        feature_names=feature_names,
        static_names=static_names,
        time_axis=rows.axis,
        origins=rows.origins,
    ).settle_empty(layout.empty)


def join_frame(
    series: IrregularSeries,
    frame: Any,
    *,
    id: str,
    label: str | Sequence[str] | None = None,
    static: Sequence[str] | None = None,
) -> IrregularSeries:
    """Return the series with labels or static features from a table with a row per series.

    Args:
        series: The series; those whose id the table lacks are an error.
        frame: A table as for `from_frame`; ids that no series has are passed over.
        id: Column of ids.
        label: Label column, or several columns of real targets; None keeps the labels.
        static: Columns of static features; None keeps the static features.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0], [1.0]], [[1.0], [2.0]], ids=["a", "b"])
        >>> outcomes = {"who": ["b", "a", "c"], "died": [1, 0, 0]}
        >>> join_frame(series, outcomes, id="who", label="died").labels
        array([0, 1])
    """
    layout = Layout(id=id, time="", label=label, static=static or ())
    table = columns.as_table(frame)
    columns.check_columns(table.column_names, (id, *layout.labels, *layout.static))
    rows = _rows_by_id(table, id)
    pick = _match(series.ids, rows.ids, id)
    changes: dict[str, Any] = {}
    if label is not None:
        changes["labels"] = _labels(rows, layout, pick)
    if static is not None:
        changes["static"] = np.asarray(_static(rows, layout, None)[0])[pick]
        changes["static_names"] = layout.static
    return series.replace(**changes)


def read_labels(table: Any, layout: Layout) -> np.ndarray | None:
    """Return the label of each series, in the order of first appearance; None without labels.

    Args:
        table: An Arrow table with at least the id and label columns.
        layout: Names them.
    """
    return _labels(_rows_by_id(table, layout.id), layout)


def to_frame(
    series: IrregularSeries,
    library: str = "pandas",
    *,
    id: str = "id",
    time: str = "time",
    label: str = "label",
) -> Any:
    """Return a table with a row per observation, as `from_frame` reads it.

    Static features and labels are repeated in each row of their series; times are numbers, dates
    or durations, as they came. Series without rows cannot be seen in such a table.

    Args:
        series: The series.
        library: `pandas`, `polars` or `pyarrow`: whose table to return.
        id: Name of the column of ids.
        time: Name of the column of times.
        label: Name of the label column; several targets get `_0`, `_1`, ... appended.
    """
    check_choice("library", library, ("pandas", "polars", "pyarrow"))
    pa = need("pyarrow", extra="data")
    owner = series_of_rows(series.offsets)
    table: dict[str, Any] = {id: pa.array(series.ids[owner]), time: _moments(series)}
    parts = [(series.feature_names, series.values)]
    if series.static is not None:
        parts.append((series.static_names, series.static[owner]))
    if series.labels is not None:
        labels = series.labels[owner]
        names: tuple[str, ...] = (label,)
        if labels.ndim == 2:
            names = tuple(f"{label}_{k}" for k in range(labels.shape[1]))
        parts.append((names, labels.reshape(len(owner), -1)))
    for names, block in parts:
        for position, name in enumerate(names):
            if name in table:
                raise ValueError(f"column {name!r} would occur twice; choose other names")
            table[name] = pa.array(np.ascontiguousarray(block[:, position]), from_pandas=True)
    result = pa.table(table)
    if library == "pandas":
        need("pandas", extra="data")
        return result.to_pandas()
    return need("polars", extra="data").from_arrow(result) if library == "polars" else result


@dataclass(frozen=True)
class SortedRows:
    """A table in order of series and time.

    `order` [T] sorts the rows, None if they are in order; `offsets` [n+1] and `ids` [n] are those
    of the series, `times` [T] their sorted times.
    """

    table: Any
    order: Int[np.ndarray, "T"] | None
    offsets: Int[np.ndarray, "n+1"]
    ids: np.ndarray
    times: Float[np.ndarray, "T"]
    axis: TimeAxis
    origins: np.ndarray | None

    def numbers(self, name: str, role: str) -> Float[np.ndarray, "T"]:
        """Return a column of numbers, sorted."""
        return self.sort(columns.read_numbers(self.table.column(name), name, role=role))

    def sort(self, array: np.ndarray) -> np.ndarray:
        """Return an array [T] in the order of the sorted rows."""
        return array if self.order is None else array[self.order]


@dataclass(frozen=True)
class _Variables:
    """The narrow layout: which variable each sorted row holds, and its value."""

    names: tuple[str, ...]
    codes: Int[np.ndarray, "T"]
    values: Float[np.ndarray, "T"]

    @classmethod
    def of(cls, rows: SortedRows, layout: Layout) -> _Variables:
        codes, names = columns.read_codes(rows.table.column(layout.variable))
        if (codes < 0).any():
            raise ValueError(
                f"column {layout.variable!r} has {int((codes < 0).sum())} rows without the name of "
                "a variable; drop those rows"
            )
        values = rows.numbers(str(layout.value), "value")
        return cls(tuple(map(str, names)), rows.sort(codes), values)


def sorted_rows(table: Any, layout: Layout) -> SortedRows:
    """Return the rows of an Arrow table by series, in order of appearance, and by time.

    Args:
        table: An Arrow table.
        layout: Names the columns of ids and times, and says what the times mean.
    """
    codes, ids = _read_ids(table, layout.id)
    ticks, axis = columns.read_times(table.column(layout.time), layout)
    if ticks.dtype.kind == "f" and not np.isfinite(ticks).all():
        wrong = ~np.isfinite(ticks)
        raise ValueError(
            f"column {layout.time!r} has {int(wrong.sum())} rows with a time that is not finite, "
            f"in series {name_some(ids[np.unique(codes[wrong])])}; drop those rows"
        )
    order = None
    steps = np.diff(codes)
    if (steps < 0).any() or ((steps == 0) & (ticks[1:] < ticks[:-1])).any():
        order = np.lexsort((ticks, codes))  # stable: rows at one time keep their order
        ticks = ticks[order]
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    origins = ticks[offsets[:-1]] if axis.origin == "series" else None
    repeated = None if origins is None else np.repeat(origins, np.diff(offsets))
    times = axis.encode(ticks, repeated)
    return SortedRows(table, order, offsets, ids, times, axis, origins)


def _rows_by_id(table: Any, id: str) -> SortedRows:
    """Return the rows in the order of series alone, without times."""
    codes, ids = _read_ids(table, id)
    order = np.argsort(codes, kind="stable")
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    return SortedRows(table, order, offsets, ids, np.empty(0), TimeAxis(), None)


def _read_ids(table: Any, name: str) -> tuple[Int[np.ndarray, "T"], np.ndarray]:
    codes, ids = columns.read_codes(table.column(name))
    if (codes < 0).any():
        raise ValueError(
            f"column {name!r} has {int((codes < 0).sum())} rows without an id, the first is row "
            f"{int(np.argmin(codes))}; drop those rows"
        )
    return codes, ids


def _wide(
    rows: SortedRows, layout: Layout, variables: _Variables | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    present = rows.table.column_names
    taken = {*layout.columns, *layout.static, *columns.index_columns(rows.table)}
    names = layout.values or tuple(name for name in present if name not in taken)
    if not names:
        raise ValueError(f"the table has no feature columns besides {sorted(taken)}")
    if not layout.allow_absent:
        columns.check_columns(present, names)
    values = np.full((rows.table.num_rows, len(names)), np.nan, dtype=np.float32)
    for position, name in enumerate(names):
        if name in present:
            values[:, position] = rows.numbers(name, "feature")
    times, values, offsets = settle_ties(
        rows.times, values, rows.offsets, rows.ids, duplicates=layout.duplicates or "error"
    )
    return times, values, offsets, tuple(names)


def _narrow(
    rows: SortedRows, layout: Layout, variables: _Variables | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    assert variables is not None
    names = layout.values or tuple(sorted(set(variables.names) - set(layout.static)))
    if not layout.allow_absent:
        _check_variables(variables.names, names, layout)
    if not names:
        raise ValueError(f"column {layout.variable!r} names no variable besides static ones")
    column_of = {name: position for position, name in enumerate(names)}
    feature = np.array([column_of.get(name, -1) for name in variables.names])[variables.codes]
    keep = (feature >= 0) & ~np.isnan(variables.values)
    times, values, offsets = pivot(
        series_of_rows(rows.offsets)[keep],
        rows.times[keep],
        feature[keep],
        variables.values[keep],
        num_series=len(rows.ids),
        feature_names=tuple(names),
        ids=rows.ids,
        duplicates=layout.duplicates or "mean",
    )
    return times, values, offsets, tuple(names)


def _check_variables(present: Sequence[str], wanted: Sequence[str], layout: Layout) -> None:
    try:
        columns.check_columns(present, wanted)
    except ValueError as error:
        raise ValueError(
            str(error).replace("column ", f"entry in column {layout.variable!r} called ", 1)
        ) from None


def _static(
    rows: SortedRows, layout: Layout, variables: _Variables | None
) -> tuple[Float[np.ndarray, "n S"] | None, tuple[str, ...] | None]:
    if not layout.static:
        return None, None
    static = np.full((len(rows.ids), len(layout.static)), np.nan, dtype=np.float32)
    for position, name in enumerate(layout.static):
        if name in rows.table.column_names:
            numbers = rows.numbers(name, "static")
        elif variables is not None and name in variables.names:
            chosen = variables.codes == variables.names.index(name)
            numbers = np.where(chosen, variables.values, np.float32(np.nan))
        elif layout.allow_absent:
            continue
        else:
            names = () if variables is None else variables.names
            columns.check_columns((*rows.table.column_names, *names), [name])
            continue
        static[:, position] = _one_per_series(numbers, rows, name)
    return static, tuple(layout.static)


def _one_per_series(
    numbers: Float[np.ndarray, "T"], rows: SortedRows, name: str
) -> Float[np.ndarray, "n"]:
    low = np.fmin.reduceat(numbers, rows.offsets[:-1])
    high = np.fmax.reduceat(numbers, rows.offsets[:-1])
    differ = low < high
    if differ.any():
        where = int(np.argmax(differ))
        raise ValueError(
            f"{name!r} must have one value per series; {int(differ.sum())} series have several, "
            f"such as {low[where]:g} and {high[where]:g} of series {rows.ids[where]!s}. "
            "Reduce it to one value per series first, or use it as a feature"
        )
    return low


def _labels(
    rows: SortedRows, layout: Layout, pick: Int[np.ndarray, "m"] | None = None
) -> np.ndarray | None:
    """Return the labels of the series, or of the picked ones, which alone need to have one."""
    if layout.label is None:
        return None
    read = []
    for name in layout.labels:
        codes, entries = columns.read_codes(rows.table.column(name))
        known = np.where(codes >= 0, codes, np.nan).astype(np.float64)
        low = np.fmin.reduceat(rows.sort(known), rows.offsets[:-1])
        high = np.fmax.reduceat(rows.sort(known), rows.offsets[:-1])
        ids = rows.ids
        if pick is not None:
            low, high, ids = low[pick], high[pick], ids[pick]
        if (low < high).any():
            where = int(np.argmax(low < high))
            two = entries[int(low[where])], entries[int(high[where])]
            raise ValueError(
                f"label column {name!r} must be constant within a series; series "
                f"{ids[where]!s} has {two[0]!s} and {two[1]!s}. A quantity that changes with time "
                "is a feature, to be forecast"
            )
        if np.isnan(low).any():
            raise ValueError(
                f"label column {name!r} is empty for series {name_some(ids[np.isnan(low)])}; "
                "drop those series, or leave label out for prediction"
            )
        read.append(entries[low.astype(np.int64)])
    return read[0] if isinstance(layout.label, str) else np.stack(read, axis=1)


def _match(wanted: np.ndarray, present: np.ndarray, name: str) -> Int[np.ndarray, "n"]:
    if (wanted.dtype.kind == "U") != (present.dtype.kind == "U"):
        raise TypeError(
            f"ids of the series are {wanted.dtype} and column {name!r} holds {present.dtype}; "
            "make them the same"
        )
    position = {entry: number for number, entry in enumerate(present.tolist())}
    missing = [entry for entry in wanted.tolist() if entry not in position]
    if missing:
        raise ValueError(f"column {name!r} lacks {len(missing)} ids: {name_some(missing)}")
    return np.array([position[entry] for entry in wanted.tolist()], dtype=np.int64)


def _moments(series: IrregularSeries) -> Any:
    pa = need("pyarrow", extra="data")
    axis, moments = series.time_axis, series.decode_times()
    if axis.kind == "datetime":
        return pa.array(moments.astype(np.int64)).cast(pa.timestamp(axis.resolution, axis.timezone))
    return pa.array(moments)
