"""Tables of pandas, polars and pyarrow to series; `Layout` says which column means what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import check_choice, did_you_mean, name_some
from osciformer._types import Float, Int
from osciformer.data import ragged
from osciformer.data.ragged import Duplicates, Rows, offsets_of, series_of_rows
from osciformer.data.series import (
    NANOSECONDS,
    Empty,
    IrregularSeries,
    TimeAxis,
    TimeKind,
    TimeOrigin,
)

#: Texts that mean that nothing is known, in every table; an empty one always does.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "?")
# A longer id or class is most likely a table with a quotation mark too few.
LONGEST_ENTRY = 1000

# The code of each row's entry [T], and the distinct entries.
Codes = tuple[Int[np.ndarray, "T"], np.ndarray]


@dataclass(frozen=True)
class Layout:
    """The columns of a table of observations, and how to read them.

    Wide: a row has an id, a time and one column per feature. Narrow: a row has an id, a time, the
    name of a variable and its value; give `variable` and `value`. Rows may come in any order.
    """

    id: str  #: Column that says which series a row belongs to.
    time: str  #: Column of times, as numbers, dates (with or without time zone) or durations.
    #: Feature columns, or variables in the narrow layout; all others if not given.
    values: Sequence[str] | None = None
    variable: str | None = None  #: Column with the name of the variable, in the narrow layout.
    value: str | None = None  #: Column with its value, in the narrow layout.
    static: Sequence[str] = ()  #: Columns (or variables) that have one value per series.
    #: Column of classes or of a target, constant within a series; or a list of real targets.
    label: str | Sequence[str] | None = None
    unit: str = "s"  #: Unit of dates and durations as numbers: ns, us, ms, s, min, h or d.
    #: `series`, each series begins at time 0; `absolute`, numbers stay as they are and dates count
    #: from 1970-01-01 UTC; `auto`, `series` for dates and `absolute` otherwise.
    origin: Literal["auto", "series", "absolute"] = "auto"
    time_format: str | None = None  #: How to read text as times: `iso`, or as of `strptime`.
    #: For several values at one time of a series: `error`, `mean`, `last` or `keep`. By default an
    #: error in the wide layout and the mean in the narrow one.
    duplicates: Duplicates | None = None
    empty: Empty = "error"  #: For series without any value: `error`, `drop` or `keep`.
    allow_absent: bool = False  #: Take features that the table lacks as missing throughout.
    #: Texts that mean missing, besides an empty one, for ids, classes and names in any table, and
    #: for numbers in CSV.
    missing: Sequence[str] = MISSING
    #: Read ids and classes of CSV as numbers if they look like some, so that 007 and 7 are the
    #: same; otherwise they are text, exactly as they are written.
    guess_types: bool = False

    def __post_init__(self) -> None:
        for name in ("id", "time", "variable", "value"):
            given = getattr(self, name)
            if not isinstance(given, str) and (given is not None or name in ("id", "time")):
                hint = "" if given is None else f". Use {str(given)!r}"
                raise TypeError(f"{name} must be the name of a column, a text; got {given!r}{hint}")
        for name in ("values", "static", "missing"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable | None):
                hint = f" Use [{str(given)!r}]"
                raise TypeError(f"{name} must be a list of names; got {given!r}.{hint}")
            object.__setattr__(self, name, None if given is None else tuple(map(str, given)))
        label: Any = self.label
        if not isinstance(label, Iterable | None):
            hint = f"Use {str(label)!r}"
            raise TypeError(f"label must be the name of a column; got {label!r}. {hint}")
        if label is not None and not isinstance(label, str):
            object.__setattr__(self, "label", tuple(map(str, label)))
        if (self.variable is None) != (self.value is None):
            raise ValueError(
                "variable and value belong together: one names the column of names, the other the "
                f"column of values; got variable={self.variable!r}, value={self.value!r}"
            )
        if self.values is not None and len(self.values) == 0:
            raise ValueError("values must name at least one feature; got none")
        check_choice("unit", self.unit, tuple(NANOSECONDS))
        check_choice("origin", self.origin, ("auto", "series", "absolute"))
        check_choice("duplicates", self.duplicates, (None, *get_args(Duplicates)))
        check_choice("empty", self.empty, get_args(Empty))
        roles = [("id", self.id), ("time", self.time)]
        roles += [("variable", str(self.variable)), ("value", str(self.value))] * self.is_narrow
        roles += [("label", name) for name in self.labels]
        features = [("static", name) for name in self.static]
        features += [("values", name) for name in self.values or ()]
        # Variables of the narrow layout may be named like columns.
        for group in (roles, features) if self.is_narrow else (roles + features,):
            seen: dict[str, str] = {}
            for role, name in group:
                if name in seen:
                    both = f"{seen[name]} and {role}"
                    raise ValueError(f"column {name!r} is both {both}; it can be one of them")
                seen[name] = role

    @property
    def is_narrow(self) -> bool:
        """Whether a row holds the name of a variable and its value."""
        return self.variable is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, as a tuple."""
        several = () if self.label is None else self.label
        return (several,) if isinstance(several, str) else tuple(several)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a role by name, without features and static ones."""
        narrow = (self.variable, self.value)
        return (self.id, self.time, *(name for name in narrow if name is not None), *self.labels)

    def replace(self, **changes: Any) -> Layout:
        """Return a layout with some settings changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = asdict(self).items()
        return {name: list(item) if isinstance(item, tuple) else item for name, item in plain}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Layout:
        """Return the layout that `to_dict` wrote."""
        return cls(**state)


def make_layout(layout: Layout | None, columns: dict[str, Any]) -> Layout:
    """Return the layout with some settings changed, or the one that the settings describe."""
    if not isinstance(layout, Layout | None):
        raise TypeError(
            f"layout must be a Layout, such as Layout(id='patient', time='hour'); got {layout!r}"
        )
    return Layout(**columns) if layout is None else replace(layout, **columns)


def from_frame(frame: Any, layout: Layout | None = None, **settings: Any) -> IrregularSeries:
    """Return the series of a table with a row per observation, in the order of their first rows.

    Args:
        frame: A table of pandas, polars or another Arrow PyCapsule library, or a dict of columns.
        layout: Which column means what; or give the arguments of `Layout` by name.
        **settings: Arguments of `Layout`; they win over `layout`.

    Example:
        >>> table = {"who": ["a", "b", "a"], "hour": [1.0, 0.0, 0.0], "pulse": [80, 70, None]}
        >>> series = from_frame(table, id="who", time="hour")
        >>> series.ids, series[0].times, series[0].values.ravel()
        (array(['a', 'b'], dtype='<U1'), array([0., 1.]), array([nan, 80.], dtype=float32))
    """
    layout, table = make_layout(layout, settings), as_table(frame)
    check_layout(table.column_names, layout)
    if table.num_rows == 0:
        raise ValueError("the table has no rows")
    rows = sorted_rows(table, layout)
    names = feature_names(table, layout, rows.variables and rows.variables.names)
    return IrregularSeries(
        *_read_values(rows, layout, names),
        ids=rows.ids,
        static=_read_static(rows, layout),
        labels=read_labels(rows, layout),
        feature_names=names,
        static_names=layout.static or None,
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
    missing: Sequence[str] = MISSING,
) -> IrregularSeries:
    """Return the series with labels or static features from a table with a row per series.

    If only one of the two has ids that are text, as those of CSV are, 7 there is '7' here.

    Args:
        series: The series; those whose id the table lacks are an error.
        frame: A table as for `from_frame`; ids that no series has are ignored.
        id: Column of ids.
        label: Label column, or several columns of real targets; None keeps the labels.
        static: Columns of static features; None keeps the static features.
        missing: Texts that mean missing, as in `Layout`.
    """
    layout = Layout(id=id, time="", label=label, static=static or (), missing=missing)
    table = as_table(frame)
    check_columns(table.column_names, (id, *layout.labels, *layout.static))
    rows = sorted_rows(table, layout)
    ours, theirs = (ids.tolist() for ids in as_same_kind(series.ids, rows.ids))
    position = {entry: number for number, entry in enumerate(theirs)}
    absent = [entry for entry in ours if entry not in position]
    if absent:
        has = f"it has ids such as {name_some(theirs[:1])}"
        raise ValueError(f"column {id!r} lacks {len(absent)} ids: {name_some(absent)}; {has}")
    pick = np.array([position[entry] for entry in ours], dtype=np.int64)
    changes: dict[str, Any] = {}
    if label is not None:
        changes["labels"] = read_labels(rows, layout, pick)
    if static is not None:
        changes["static"] = np.asarray(_read_static(rows, layout))[pick]
        changes["static_names"] = layout.static
    return series.replace(**changes)


def as_same_kind(ids: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays of ids, both as text if only one of them is: 7 is '7', and not '07'."""
    if (ids.dtype.kind == "U") == (others.dtype.kind == "U"):
        return ids, others

    def as_text(some: np.ndarray) -> np.ndarray:
        # Whole numbers are floats in a column of pandas that had a gap once.
        is_whole = some.dtype.kind == "f" and (np.abs(some) < ragged.EXACT_INTEGER).all()
        whole = some.astype(np.int64) if is_whole else some
        return (whole if (whole == some).all() else some).astype(np.str_)

    return as_text(ids), as_text(others)


class _Variables(NamedTuple):
    names: tuple[str, ...]
    codes: Int[np.ndarray, "T"]  # which variable each sorted row holds, in the narrow layout
    values: Float[np.ndarray, "T"]


@dataclass(frozen=True)
class SortedRows:
    """A table by series and time, with ids [n], offsets [n+1] and sorted times [T]."""

    table: Any
    order: Int[np.ndarray, "T"] | None  # sorts the rows of the table; None if they are sorted
    offsets: Int[np.ndarray, "n+1"]
    ids: np.ndarray
    times: Float[np.ndarray, "T"]
    axis: TimeAxis
    origins: np.ndarray | None
    variables: _Variables | None = None

    def numbers(self, name: str, role: str) -> Float[np.ndarray, "T"]:
        """Return a column of numbers, sorted."""
        return self.sort(read_numbers(self.table.column(name), name, role=role))

    def sort(self, array: np.ndarray) -> np.ndarray:
        """Return an array [T] in the order of the sorted rows."""
        return array if self.order is None else array[self.order]


def sorted_rows(table: Any, layout: Layout) -> SortedRows:
    """Return the rows by series, in order of appearance, and by time if the table has times."""
    column, missing = table.column(layout.id), layout.missing
    codes, ids = read_full_codes(column, layout.id, "an id", missing=missing)
    ticks, axis = np.zeros(len(codes)), TimeAxis()
    if layout.time in table.column_names:
        ticks, axis = read_times(table.column(layout.time), layout)
    if ticks.dtype.kind == "f" and not np.isfinite(ticks).all():
        wrong = ~np.isfinite(ticks)
        raise ValueError(
            f"column {layout.time!r} has {int(wrong.sum())} rows with a time that is not finite, "
            f"in series {name_some(ids[np.unique(codes[wrong])])}; drop those rows"
        )
    order, steps = None, np.diff(codes)
    if (steps < 0).any() or ((steps == 0) & (ticks[1:] < ticks[:-1])).any():
        order = np.lexsort((ticks, codes))  # stable: rows at one time keep their order
        ticks = ticks[order]
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    origins = ticks[offsets[:-1]] if axis.origin == "series" else None
    repeated = None if origins is None else np.repeat(origins, np.diff(offsets))
    rows = SortedRows(table, order, offsets, ids, axis.encode(ticks, repeated), axis, origins)
    if not layout.is_narrow:
        return rows
    name = str(layout.variable)
    column = table.column(name)
    codes, names = read_full_codes(column, name, "the name of a variable", missing=missing)
    values = rows.numbers(str(layout.value), "value")
    return replace(rows, variables=_Variables(tuple(map(str, names)), rows.sort(codes), values))


def feature_names(table: Any, layout: Layout, variables: Sequence[str] | None) -> tuple[str, ...]:
    """Return the features by name; those that the layout names are there, unless allowed absent."""
    if variables is None:
        # The index of a pandas frame is no feature.
        index = (table.schema.pandas_metadata or {}).get("index_columns", [])
        taken = {*layout.columns, *layout.static, *(name for name in index if type(name) is str)}
        names = layout.values or tuple(name for name in table.column_names if name not in taken)
        if not names:
            raise ValueError(f"the table has no feature columns besides {table.column_names}")
        return tuple(names)
    names = layout.values or tuple(sorted(set(variables) - set(layout.static)))
    if not names:
        raise ValueError(f"column {layout.variable!r} names no variable besides static ones")
    if not layout.allow_absent:
        check_columns(variables, names, what=f"entry in column {layout.variable!r} called")
        check_columns((*table.column_names, *variables), layout.static)
    return tuple(names)


def _read_values(rows: SortedRows, layout: Layout, names: tuple[str, ...]) -> Rows:
    """Return the features of both layouts, with rows at one time settled."""
    variables = rows.variables
    if variables is None:
        values = np.full((rows.table.num_rows, len(names)), np.nan, dtype=np.float32)
        for position, name in enumerate(names):
            if name in rows.table.column_names:
                values[:, position] = rows.numbers(name, "feature")
        wide = Rows(rows.times, values, rows.offsets)
        return ragged.merge_equal_times(wide, rows.ids, duplicates=layout.duplicates or "error")
    column_of = {name: position for position, name in enumerate(names)}
    feature = np.array([column_of.get(name, -1) for name in variables.names])[variables.codes]
    keep = (feature >= 0) & ~np.isnan(variables.values)
    entries = (series_of_rows(rows.offsets), rows.times, feature, variables.values)
    return ragged.pivot_variables(
        *(column[keep] for column in entries),
        ids=rows.ids,
        feature_names=names,
        duplicates=layout.duplicates or "mean",
    )


def _read_static(rows: SortedRows, layout: Layout) -> Float[np.ndarray, "n S"] | None:
    if not layout.static:
        return None
    variables = rows.variables
    static = np.full((len(rows.ids), len(layout.static)), np.nan, dtype=np.float32)
    for position, name in enumerate(layout.static):
        if name in rows.table.column_names:
            numbers = rows.numbers(name, "static")
        elif variables is not None and name in variables.names:
            chosen = variables.codes == variables.names.index(name)
            numbers = np.where(chosen, variables.values, np.float32(np.nan))
        else:
            continue  # allowed to be absent
        low, high = _range_per_series(numbers, rows)
        differ = low < high
        if differ.any():
            where = int(np.argmax(differ))
            raise ValueError(
                f"{name!r} must have one value per series; {int(differ.sum())} series have "
                f"several, such as {low[where]:g} and {high[where]:g} of series "
                f"{rows.ids[where]!s}. Reduce it to one value per series first, or use it as a "
                "feature"
            )
        static[:, position] = low
    return static


def _range_per_series(numbers: np.ndarray, rows: SortedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest number of each series; NaN if it has none."""
    starts = rows.offsets[:-1]
    return np.fmin.reduceat(numbers, starts), np.fmax.reduceat(numbers, starts)


def read_labels(
    rows: SortedRows, layout: Layout, pick: Int[np.ndarray, "m"] | None = None
) -> np.ndarray | None:
    """Return the labels of all series, or of the picked ones; the others need not have a label."""
    if layout.label is None:
        return None
    read = []
    for name in layout.labels:
        codes, entries = read_codes(rows.table.column(name), name, missing=layout.missing)
        _check_label_kind(entries, name, is_target=not isinstance(layout.label, str))
        known = np.where(codes >= 0, codes, np.nan).astype(np.float64)
        chosen = slice(None) if pick is None else pick
        low, high = (edge[chosen] for edge in _range_per_series(rows.sort(known), rows))
        ids = rows.ids[chosen]
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


def _check_label_kind(entries: np.ndarray, name: str, *, is_target: bool) -> None:
    """Refuse dates as labels, and all but numbers as real targets."""
    if entries.dtype.kind == "M":
        first = f"dates such as {entries[0]!s}" if len(entries) else "dates"
        raise TypeError(f"label column {name!r} holds {first}. {ragged.DATES_AS_LABELS}")
    if is_target and entries.dtype.kind not in "biuf":
        found = f"it holds text such as {entries[0]!s}" if len(entries) else "it is text"
        raise TypeError(
            f"label column {name!r} must hold numbers, since a list of labels means real targets; "
            f"{found}. Name a single column, not in a list, for classes"
        )


def as_table(frame: Any) -> Any:
    """Return a `pyarrow.Table` of a data frame, without a copy if the library allows it."""
    pa = need("pyarrow", extra="data")
    if isinstance(frame, pa.Table):
        refuse_twice(frame.column_names)
        return frame
    if type(frame).__name__ == "LazyFrame":
        raise TypeError("frame is a lazy one, without data yet; pass frame.collect()")
    if not (hasattr(frame, "__arrow_c_stream__") or isinstance(frame, dict | pa.RecordBatch)):
        raise TypeError(
            "frame must be a table of pandas, polars, pyarrow or another library with the Arrow "
            f"PyCapsule interface, or a dict of columns; got {type(frame).__name__}"
        )
    try:
        return pa.table(frame)
    except (pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        advice = "A column of one type, and names that differ from each other, are needed"
        if "sparse" in str(error).lower():
            advice = "Make it dense first: frame.sparse.to_dense()"
        raise ValueError(f"frame cannot be read as an Arrow table: {error}. {advice}") from error


def check_columns(present: Sequence[str], wanted: Iterable[str], *, what: str = "column") -> None:
    """Refuse names that a table does not have, and suggest near ones."""
    for name in wanted:
        if name not in present:
            hint = did_you_mean(name, present) or f"the columns are {list(present)}"
            raise ValueError(f"there is no {what} {name!r}; {hint}")


def refuse_twice(present: Sequence[str]) -> None:
    """Refuse a table with two columns of one name."""
    twice = sorted(name for name, count in Counter(present).items() if count > 1)
    if twice:
        raise ValueError(f"several columns are called {name_some(twice)}; rename all but one")


def check_layout(present: Sequence[str], layout: Layout) -> None:
    """Refuse a layout whose columns a table lacks; features of the narrow layout are no columns."""
    refuse_twice(present)
    check_columns(present, layout.columns)
    if not layout.is_narrow and not layout.allow_absent:
        check_columns(present, (*(layout.values or ()), *layout.static))


def read_numbers(column: Any, name: str, *, role: str) -> Float[np.ndarray, "T"]:
    """Return a column of numbers or booleans as float32, null as NaN; `role` is for messages."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    column, types = _decode(column), pa.types
    kind, is_plain = column.type, (types.is_integer, types.is_floating, types.is_null)
    if not any(is_kind(kind) for is_kind in (*is_plain, types.is_boolean, types.is_decimal)):
        raise advise(
            TypeError,
            f"{role} column {name!r} must hold numbers; it holds {_kind_of(kind)} such as "
            f"{_example(column)!r}. Encode it as numbers (one-hot, or codes), or leave it out by "
            "naming the columns to use: ",
            Mention("values", python="values=[...]"),
        )
    if types.is_boolean(kind) or types.is_decimal(kind):  # Arrow has no direct cast to float32
        column = pc.cast(column, pa.int8() if types.is_boolean(kind) else pa.float64())
    narrow = np.asarray(pc.cast(column, pa.float32(), safe=False))
    ragged.warn_of_lost_digits(np.asarray(column), narrow, f"{role} column {name!r}")
    return narrow


def read_codes(column: Any, name: str, *, missing: Sequence[str] = MISSING) -> Codes:
    """Return the code of each row's entry (-1 if missing), and the entries as they appear.

    Missing are null, NaN, and text that is one of `missing` or blank; other text stays as it is.
    """
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    column, types = _decode(column), pa.types
    is_plain = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    is_other = (types.is_date, types.is_timestamp, types.is_decimal)
    is_text = _kind_of(column.type) == "text"
    if not is_text and not any(is_kind(column.type) for is_kind in (*is_plain, *is_other)):
        raise TypeError(
            f"column {name!r} holds {column.type} such as {_example(column)!r}, which cannot be an "
            "id, a class or a name; make it a column of text or of numbers"
        )
    if types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    encoded = column.dictionary_encode().unify_dictionaries()
    if encoded.num_chunks == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    codes = np.concatenate([np.asarray(chunk.indices.fill_null(-1)) for chunk in encoded.chunks])
    codes, distinct = codes.astype(np.int64), encoded.chunk(0).dictionary
    if is_text:
        _check_text(distinct, name)
        empty = pa.array({"", *missing}, distinct.type)
        known = ~np.asarray(pc.is_in(pc.utf8_trim_whitespace(distinct), empty), dtype=bool)
        # The last number is for code -1.
        codes = np.append(np.where(known, np.cumsum(known) - 1, -1), -1)[codes]
        distinct = distinct.filter(pa.array(known))
    entries = distinct.to_numpy(zero_copy_only=False)
    return codes, entries.astype(np.str_) if entries.dtype == object else entries


def _check_text(entries: Any, name: str) -> None:
    """Refuse text that NumPy would change or that is no text: bad UTF-8, NUL, endless entries."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    try:
        entries.validate(full=True)
    except pa.ArrowInvalid as error:
        advice = "Write the table again with text in UTF-8"
        raise ValueError(f"column {name!r} holds bytes that are not UTF-8. {advice}") from error
    longest = pc.max(pc.utf8_length(entries)).as_py() or 0
    if longest > LONGEST_ENTRY:
        raise ValueError(
            f"column {name!r} has an entry of {longest} characters, and ids, classes and names may "
            f"have {LONGEST_ENTRY}; a quotation mark may be missing in the table"
        )
    if pc.any(pc.match_substring(entries, "\0")).as_py():
        raise ValueError(f"column {name!r} has an entry with a NUL character; remove it")


def read_full_codes(
    column: Any, name: str, what: str, *, first_row: int = 0, missing: Sequence[str] = MISSING
) -> Codes:
    """Return what `read_codes` does, and refuse rows without an entry; `what` is for messages."""
    codes, entries = read_codes(column, name, missing=missing)
    if (codes < 0).any():
        count, first = int((codes < 0).sum()), first_row + int(np.argmin(codes))
        rows = f"{count} rows without {what}, the first is row {first}"
        raise ValueError(f"column {name!r} has {rows}; drop those rows")
    return codes, entries


def read_times(column: Any, layout: Layout) -> tuple[np.ndarray, TimeAxis]:
    """Return times as ticks [T], as `TimeAxis.encode` takes them, and the axis."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    types, column = pa.types, _decode(column)
    if _kind_of(column.type) == "text":
        column = _parse_text_times(column, layout)
    if empty := column.null_count:
        raise ValueError(f"column {layout.time!r} has {empty} rows without a time; drop those rows")
    if types.is_date(column.type):
        column = pc.cast(column, pa.timestamp("s" if types.is_date32(column.type) else "ms"))
    kind: TimeKind = "duration" if types.is_duration(column.type) else "number"
    kind = "datetime" if types.is_timestamp(column.type) else kind
    natural: TimeOrigin = "series" if kind == "datetime" else "absolute"
    origin = natural if layout.origin == "auto" else layout.origin
    if kind == "number":
        is_numeric = (types.is_integer, types.is_floating, types.is_decimal)
        if not any(is_kind(column.type) for is_kind in is_numeric):
            raise TypeError(
                f"column {layout.time!r} must hold numbers, dates or durations; it holds "
                f"{_kind_of(column.type)} such as {_example(column)!r}"
            )
        # In 64 bits, so that differences of small integers cannot overflow.
        wide = pa.int64() if types.is_integer(column.type) else pa.float64()
        try:
            return np.asarray(pc.cast(column, wide)), TimeAxis(origin=origin)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"column {layout.time!r} has times up to {pc.max(column)}, of type {column.type}, "
                "which no 64-bit integer can be; count from a later time, or in a larger unit"
            ) from error
    zone = getattr(column.type, "tz", None)  # durations have none
    axis = TimeAxis(kind, layout.unit, column.type.unit, zone, origin)
    return np.asarray(pc.cast(column, pa.int64())), axis


def _parse_text_times(column: Any, layout: Layout) -> Any:
    """Return text as dates, by the format of the layout."""
    pa, pc = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    if layout.time_format is None:
        raise advise(
            TypeError,
            f"column {layout.time!r} holds text such as {_example(column)!r}; convert it to "
            "numbers or dates, or pass ",
            Mention("time_format", "iso"),
            " for ISO 8601 dates, or a format such as ",
            Mention("time_format", "%d.%m.%Y %H:%M"),
        )
    try:
        if layout.time_format == "iso":
            zoned = pc.any(pc.match_substring_regex(column, r"\d(Z|[+-]\d\d:?\d\d)$")).as_py()
            return pc.cast(column, pa.timestamp("us", tz="UTC" if zoned else None))
        return pc.strptime(column, format=layout.time_format, unit="us")
    except pa.ArrowInvalid as error:
        form = f"time_format={layout.time_format!r}"
        raise ValueError(f"column {layout.time!r} cannot be read with {form}: {error}") from error


def _decode(column: Any) -> Any:
    """Return the column with categories spelled out, and text as ordinary text."""
    pa, kind = need("pyarrow", extra="data"), column.type
    is_dictionary = pa.types.is_dictionary(kind)
    spelled = kind.value_type if is_dictionary else kind
    plain = pa.large_string() if pa.types.is_string_view(spelled) else spelled
    if is_dictionary and plain != spelled:
        # Arrow spells out categories of ordinary text, but not those of the views of polars.
        parts = [
            pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(plain))
            for chunk in column.chunks
        ]
        column = pa.chunked_array(parts, pa.dictionary(kind.index_type, plain))
    return column if plain == kind else column.cast(plain)


def _kind_of(kind: Any) -> str:
    pa = need("pyarrow", extra="data")
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind)


def _example(column: Any) -> Any:
    present = column.drop_null()
    try:
        return present[0].as_py() if len(present) else None
    except UnicodeDecodeError:  # text of a file that another program wrote need not be text
        return present[0].as_buffer().to_pybytes()
