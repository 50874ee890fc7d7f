"""A ragged container for irregularly sampled series, and the meaning of its times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import EllipsisType
from typing import Any, Literal, get_args, overload

import numpy as np

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._text import check_choice, name_some
from osciformer._types import Float, Int
from osciformer.data import ragged
from osciformer.data.ragged import (
    EXACT_INTEGER,
    Duplicates,
    Rows,
    as_float_array,
    offsets_of,
    series_of_rows,
)

Empty = Literal["error", "drop", "keep"]
TimeKind = Literal["number", "datetime", "duration"]
TimeOrigin = Literal["absolute", "series"]

# Nanoseconds of each unit, so that ratios are exact integers or their inverses.
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6} | {k: n * 10**9 for k, n in _SECONDS.items()}


@dataclass(frozen=True)
class TimeAxis:
    """The meaning of the float64 times of an `IrregularSeries`."""

    kind: TimeKind = "number"  #: What the times were.
    unit: str | None = None  #: Unit of the times: ns, us, ms, s, min, h or d; None for numbers.
    resolution: str | None = None  #: Unit of decoded dates and durations: ns, us, ms or s.
    timezone: str | None = None  #: Time zone of the dates, such as `Europe/Vienna`.
    #: `series`, each series begins at 0, and the container keeps where that was; or `absolute`,
    #: numbers stay as they were, and dates count from 1970-01-01 UTC.
    origin: TimeOrigin = "absolute"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("number", "datetime", "duration")),
            ("origin", ("absolute", "series")),
            ("unit", (None,) if self.kind == "number" else tuple(NANOSECONDS)),
            ("resolution", (None,) if self.kind == "number" else ("ns", "us", "ms", "s")),
        ):
            what = f"{name} of a time axis of kind {self.kind!r}"
            check_choice(what, getattr(self, name), allowed)

    @property
    def ticks_per_unit(self) -> float:
        """How many ticks of `resolution` one `unit` has; 1 for numbers."""
        if self.unit is None or self.resolution is None:
            return 1.0
        return NANOSECONDS[self.unit] / NANOSECONDS[self.resolution]

    def ticks_of(self, moments: np.ndarray) -> np.ndarray:
        """Return numbers as they are, and dates or durations as ticks of `resolution`."""
        wanted = {"number": "iuf", "datetime": "M", "duration": "m"}[self.kind]
        if moments.dtype.kind not in wanted:
            hint = ". Pass numpy.datetime64 in UTC, such as index.tz_convert(None).to_numpy()"
            got = f"{moments.dtype}{hint if self.kind == 'datetime' else ''}"
            raise TypeError(f"these series have times of kind {self.kind!r}; got {got}")
        return moments if self.kind == "number" else moments.astype(self._dtype).astype(np.int64)

    @property
    def _dtype(self) -> str:
        return f"{'datetime' if self.kind == 'datetime' else 'timedelta'}64[{self.resolution}]"

    def encode(self, ticks: np.ndarray, origins: np.ndarray | None) -> Float[np.ndarray, "T"]:
        """Return times [T] in `unit` from ticks [T] and, for `origin="series"`, their origins."""
        # Integers are subtracted as integers: that is exact even for nanoseconds since 1970.
        since = ticks if origins is None else ticks - origins
        if origins is not None and np.issubdtype(since.dtype, np.integer):
            wrapped = (since < 0) != (ticks < origins)
            if wrapped.any():
                where = np.unravel_index(np.argmax(wrapped), wrapped.shape)
                first = np.broadcast_to(origins, wrapped.shape)[where]
                raise ValueError(
                    f"times from {first} to {ticks[where]} span more than 64 bits can hold; one of "
                    "them is not a time, or stands for a missing one. Drop its row"
                )
        if self.kind == "number" and np.issubdtype(since.dtype, np.integer):
            # Not by `abs`, which leaves the lowest integer negative.
            far = (since > EXACT_INTEGER) | (since < -EXACT_INTEGER)
            if far.any():
                raise advise(
                    ValueError,
                    f"the integer time {since[far][0]} is beyond 2**53, where float64 cannot tell "
                    "neighbours apart; pass ",
                    Mention("origin", "series"),
                    " so that each series begins at 0",
                )
        return since.astype(np.float64) / self.ticks_per_unit

    def decode(self, times: Float[np.ndarray, "T"], origins: np.ndarray | None) -> np.ndarray:
        """Return numbers, `datetime64` (UTC if zoned) or `timedelta64`; `origins` are ticks."""
        if self.kind == "number":
            return np.asarray(times if origins is None else times + origins, dtype=np.float64)
        ticks = np.rint(np.asarray(times) * self.ticks_per_unit).astype(np.int64)
        return (ticks if origins is None else ticks + origins).astype(self._dtype)

    def to_dict(self) -> dict[str, str | None]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TimeAxis:
        """Return the axis that `to_dict` wrote."""
        return cls(**state)


@dataclass(frozen=True)
class SingleSeries:
    """One series of an `IrregularSeries`; its arrays are views."""

    id: Any  #: Its name.
    times: Float[np.ndarray, "N"]  #: Observation times, float64.
    values: Float[np.ndarray, "N F"]  #: Values, float32; NaN is a missing one.
    static: Float[np.ndarray, "S"] | None = None  #: Static features.
    label: Any = None  #: Its class, its target or its targets [K].

    def __len__(self) -> int:
        return len(self.times)


class IrregularSeries:
    """Many series of different lengths, each with its own times, in flat arrays.

    `len()` counts series, and indexing takes what scikit-learn's splitters give: a slice, a mask or
    an integer array returns an `IrregularSeries`, a single integer a `SingleSeries`.

    Times that are not finite or that decrease within a series, and infinite values, are errors.
    `from_arrays`, `from_padded` and `from_frame` have options for equal times and empty series.

    Args:
        times: Times of all rows, in one unit, not decreasing within a series.
        values: Values of all rows; NaN is a missing one.
        offsets: Row at which each series begins, followed by T.
        ids: Names of the series [n], numbers or text; 0, 1, ... if not given.
        static: Features that belong to a series as a whole; NaN is a missing one.
        labels: Classes or targets [n], or several real targets [n, K].
        feature_names: Names of the F features.
        static_names: Names of the S static features.
        time_axis: What the times mean; plain numbers if not given.
        origins: Where time 0 of each series lies [n], for `time_axis.origin == "series"`.

    Example:
        >>> series = IrregularSeries([0.0, 0.5, 2.0], [[1.0], [2.0], [3.0]], [0, 2, 3])
        >>> len(series), series[0].times, series[[1]].ids
        (2, array([0. , 0.5]), array([1]))
    """

    def __init__(
        self,
        times: Float[np.ndarray, "T"],
        values: Float[np.ndarray, "T F"],
        offsets: Int[np.ndarray, "n+1"],
        *,
        ids: Any = None,
        static: Float[np.ndarray, "n S"] | None = None,
        labels: Any = None,
        feature_names: Sequence[str] | None = None,
        static_names: Sequence[str] | None = None,
        time_axis: TimeAxis | None = None,
        origins: Any = None,
    ) -> None:
        self.times = as_float_array("times", times, np.float64, ("T",))
        self.values = as_float_array("values", values, np.float32, (len(self.times), "F"))
        self.offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        ragged.check_offsets(self.offsets, len(self.times))
        count = len(self.offsets) - 1
        self.ids = np.arange(count) if ids is None else ragged.as_plain_array("ids", ids)
        ragged.check_shape("ids", self.ids, (count,))
        self.static = None if static is None else ragged.check_static(static, count)
        self.labels = None if labels is None else ragged.check_labels(labels, count)
        width, num_static = self.num_features, 0 if self.static is None else self.static.shape[1]
        self.feature_names = ragged.check_names("feature_names", feature_names, width, "feature")
        self.static_names = ragged.check_names("static_names", static_names, num_static, "static")
        self.time_axis = TimeAxis() if time_axis is None else time_axis
        self.origins = None if origins is None else np.asarray(origins)
        wanted = (count,) if self.time_axis.origin == "series" else None
        if (None if self.origins is None else self.origins.shape) != wanted:
            raise ValueError(f"origins must be [{count}] if time_axis.origin='series', else None")
        ragged.check_times(self.times, self.offsets, self.ids)
        ragged.check_values(self.values, self.offsets, self.ids, self.feature_names)

    @classmethod
    def from_arrays(
        cls,
        times: Sequence[Any],
        values: Sequence[Any],
        *,
        sort: bool = False,
        duplicates: Duplicates = "error",
        empty: Empty = "error",
        **others: Any,
    ) -> IrregularSeries:
        """Return the container of series that come as lists of arrays.

        Args:
            times: One array [N] per series; N may differ.
            values: One array [N, F] per series, or [N] if there is one feature; NaN is missing.
            sort: Sort each series by time; otherwise unsorted times are an error.
            duplicates: For equal times: `error`, `keep`, or `mean` or `last` of each feature.
            empty: For series without any value: `error`, `drop` or `keep`.
            **others: `ids` (each a different one), `static`, `labels` and the other arguments of
                the class.

        Example:
            >>> IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
            IrregularSeries(2 series, 3 observations of 1 feature, lengths 1 to 2)
        """
        ragged.check_distinct(others.get("ids"))
        rows = ragged.flatten(times, values)
        if sort:
            order = np.lexsort((rows.times, series_of_rows(rows.offsets)))
            rows = Rows(rows.times[order], rows.values[order], rows.offsets)
        series = cls(*rows, **others)
        rows = ragged.merge_equal_times(rows, series.ids, duplicates=duplicates)
        return series._build(*rows, slice(None)).settle_empty(empty)

    @classmethod
    def from_padded(
        cls,
        values: Any,
        times: Any = None,
        *,
        lengths: Any = None,
        empty: Empty = "error",
        **others: Any,
    ) -> IrregularSeries:
        """Return the container of series that come as one padded array.

        Args:
            values: Padded values [n, N, F]; NaN is a missing one.
            times: Times [n, N], or [N] if all series share them; 0, 1, ... if not given.
            lengths: Rows of each series [n]; by default, rows of NaN at the end are padding.
            empty: For series without any value: `error`, `drop` or `keep`.
            **others: Arguments of the class.
        """
        ragged.check_distinct(others.get("ids"))
        values = as_float_array("values", values, np.float32, ("n", "N", "F"))
        count, width = values.shape[:2]
        steps = np.arange(width)
        times = steps if times is None else times
        times = as_float_array("times", times, float, (width,), (count, width))
        if lengths is None:
            observed = ~np.isnan(values).all(axis=2)
            lengths = np.where(observed, steps + 1, 0).max(axis=1, initial=0)
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.shape != (count,) or ((lengths < 0) | (lengths > width)).any():
            raise ValueError(f"lengths must be [{count}] with entries from 0 to {width}")
        present = steps < lengths[:, None]
        flat_times = np.broadcast_to(times, (count, width))[present]
        return cls(flat_times, values[present], offsets_of(lengths), **others).settle_empty(empty)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of series and number of features; scikit-learn takes the first as the samples."""
        return len(self), self.num_features

    @property
    def num_features(self) -> int:
        """Number of features F."""
        return self.values.shape[1]

    @property
    def lengths(self) -> Int[np.ndarray, "n"]:
        """Number of rows of each series."""
        return np.diff(self.offsets)

    @property
    def num_observed(self) -> Int[np.ndarray, "n"]:
        """Number of values of each series that are not missing."""
        return np.diff(offsets_of((~np.isnan(self.values)).sum(axis=1))[self.offsets])

    @property
    def spans(self) -> Float[np.ndarray, "n"]:
        """Time from the first to the last row of each series; 0 for a series without rows."""
        spans, some = np.zeros(len(self)), self.lengths > 0
        spans[some] = self.times[self.offsets[1:][some] - 1] - self.times[self.offsets[:-1][some]]
        return spans

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[SingleSeries]:
        return (self[position] for position in range(len(self)))

    @overload
    def __getitem__(self, key: int) -> SingleSeries: ...
    @overload
    def __getitem__(self, key: slice | Sequence[Any] | np.ndarray) -> IrregularSeries: ...
    @overload
    def __getitem__(self, key: tuple[Any, EllipsisType]) -> Any: ...
    def __getitem__(self, key: Any) -> SingleSeries | IrregularSeries:
        if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
            key = key[0]  # scikit-learn indexes with [rows, ...]
        if isinstance(key, int | np.integer):
            return self._single(int(key))
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return self.take(np.arange(start, stop, step))
            key = slice(start, max(start, stop))
            offsets = self.offsets[start : key.stop + 1]
            rows = slice(offsets[0], offsets[-1])
            return self._build(self.times[rows], self.values[rows], offsets - offsets[0], key)
        return self.take(key)

    def take(self, index: Any) -> IrregularSeries:
        """Return the series at these positions, in this order; a position may occur repeatedly."""
        index = ragged.positions_of(index, len(self))
        rows, offsets = ragged.rows_of_series(self.offsets, index)
        return self._build(self.times[rows], self.values[rows], offsets, index)

    def _single(self, position: int) -> SingleSeries:
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range for {len(self)} series")
        position %= len(self)
        rows = slice(self.offsets[position], self.offsets[position + 1])
        static = None if self.static is None else self.static[position]
        label = None if self.labels is None else self.labels[position]
        return SingleSeries(self.ids[position], self.times[rows], self.values[rows], static, label)

    def _build(self, times: Any, values: Any, offsets: Any, picked: Any) -> IrregularSeries:
        """Return a container of these rows, which need no check, and of picked per-series data."""
        result = object.__new__(IrregularSeries)
        result.times, result.values, result.offsets = times, values, offsets
        for name in ("ids", "static", "labels", "origins"):
            array = getattr(self, name)
            setattr(result, name, None if array is None else array[picked])
        for name in ("feature_names", "static_names", "time_axis"):
            setattr(result, name, getattr(self, name))
        return result

    def replace(self, **changes: Any) -> IrregularSeries:
        """Return a container with some of the constructor's arguments changed."""
        if "static" in changes and "static_names" not in changes:
            changes["static_names"] = None
        return IrregularSeries(**{**vars(self), **changes})

    def settle_empty(self, empty: Empty) -> IrregularSeries:
        """Return the series; those without any value are an `error`, or are to `drop` or `keep`."""
        check_choice("empty", empty, get_args(Empty))
        without = self.num_observed == 0
        if empty == "keep" or not without.any():
            return self
        if empty == "drop":
            return self.take(~without)
        raise advise(
            ValueError,
            f"{int(without.sum())} of {len(self)} series have no value at all: "
            f"{name_some(self.ids[without])}. Pass ",
            Mention("empty", "drop"),
            " to leave them out, or ",
            Mention("empty", "keep"),
            " to have predictions for them too",
        )

    def decode_times(self, times: Any = None, positions: Any = None) -> np.ndarray:
        """Return times of any shape, or all times [T], as numbers, dates (UTC) or durations.

        `positions` are the series of the times, broadcast against them.
        """
        if times is None:
            times, positions = self.times, series_of_rows(self.offsets)
        times = np.asarray(times, dtype=np.float64)
        return self.time_axis.decode(times, self._origin_of(positions))

    def encode_times(self, moments: Any, positions: Any = None) -> Float[np.ndarray, "..."]:
        """Return numbers, `datetime64` (UTC) or `timedelta64` of any shape as times in `unit`.

        `positions` are the series of the moments, broadcast against them.
        """
        ticks = self.time_axis.ticks_of(np.asarray(moments))
        return self.time_axis.encode(ticks, self._origin_of(positions))

    def to_frame(self, library: str = "pandas", *, id: str = "id", time: str = "time") -> Any:
        """Return a table with a row per observation; see `osciformer.data.to_frame`."""
        return to_frame(self, library, id=id, time=time)

    def _origin_of(self, positions: Any) -> np.ndarray | None:
        if self.origins is None:
            return None
        if positions is None:
            raise ValueError("positions must say which series each time belongs to")
        return self.origins[np.asarray(positions)]

    def equals(self, other: object) -> bool:
        """Return whether both hold the same; NaN equals NaN, and dtypes of ids may differ."""
        if not isinstance(other, IrregularSeries):
            return False
        return all(_same(mine, vars(other)[name]) for name, mine in vars(self).items())

    def __repr__(self) -> str:
        features = f"{self.num_features} feature{'' if self.num_features == 1 else 's'}"
        parts = [f"{len(self)} series", f"{len(self.times)} observations of {features}"]
        if len(self):
            parts.append(f"lengths {self.lengths.min()} to {self.lengths.max()}")
        if self.static is not None:
            parts.append(f"{self.static.shape[1]} static")
        if self.labels is not None:
            parts.append(f"labels {self.labels.dtype}{list(self.labels.shape)}")
        return f"IrregularSeries({', '.join(parts)})"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f"))
    return type(a) is type(b) and a == b


def concatenate(parts: Sequence[IrregularSeries]) -> IrregularSeries:
    """Return one container with the series of several, whose features and time axis must agree.

    Example:
        >>> one = IrregularSeries.from_arrays([[0.0, 1.0]], [[1.0, 2.0]], ids=["a"])
        >>> concatenate([one, one.replace(ids=["b"])]).ids
        array(['a', 'b'], dtype='<U1')
    """
    if not parts:
        raise ValueError("parts must hold at least one IrregularSeries")
    first = parts[0]
    for number, part in enumerate(parts):
        for name in ("feature_names", "static_names", "time_axis"):
            if getattr(part, name) != getattr(first, name):
                have = f"part 0 has {getattr(first, name)}, part {number} has {getattr(part, name)}"
                raise ValueError(f"all parts must have the same {name}; {have}")
        for name in ("labels", "static"):
            if (getattr(part, name) is None) != (getattr(first, name) is None):
                raise ValueError(f"part 0 and part {number} must both have {name}, or neither")
    changes: dict[str, Any] = {"static_names": first.static_names}
    for name in ("times", "values", "ids", "static", "labels", "origins"):
        if getattr(first, name) is not None:
            changes[name] = np.concatenate([getattr(part, name) for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return first.replace(offsets=offsets_of(lengths), **changes)


def add_static(
    series: IrregularSeries, static: Float[np.ndarray, "n S"], names: Sequence[str]
) -> IrregularSeries:
    """Return the series with further static features, appended to those that they have."""
    if series.static is not None:
        static = np.concatenate((series.static, static), axis=1)
    return series.replace(static=static, static_names=(*series.static_names, *names))


def to_frame(
    series: IrregularSeries,
    library: str = "pandas",
    *,
    id: str = "id",
    time: str = "time",
    label: str = "label",
) -> Any:
    """Return a table with a row per observation, as `from_frame` reads it.

    `library` is `pandas`, `polars` or `pyarrow`. Static features and labels are repeated in each
    row; several targets are `label_0`, `label_1`. Series without rows are not in the table.
    """
    check_choice("library", library, ("pandas", "polars", "pyarrow"))
    pa = need("pyarrow", extra="data")
    owner, axis = series_of_rows(series.offsets), series.time_axis
    moments = pa.array(series.decode_times())
    if axis.kind == "datetime":
        moments = moments.cast(pa.int64()).cast(pa.timestamp(axis.resolution, axis.timezone))
    table: dict[str, Any] = {id: pa.array(series.ids[owner]), time: moments}
    parts = [(series.feature_names, series.values)]
    if series.static is not None:
        parts.append((series.static_names, series.static[owner]))
    if series.labels is not None:
        labels = series.labels[owner].reshape(len(owner), -1)
        several = tuple(f"{label}_{k}" for k in range(labels.shape[1]))
        parts.append(((label,) if series.labels.ndim == 1 else several, labels))
    for names, block in parts:
        for position, name in enumerate(names):
            if name in table:
                raise ValueError(f"column {name!r} would occur twice; choose other names")
            table[name] = pa.array(np.ascontiguousarray(block[:, position]), from_pandas=True)
    result, package = pa.table(table), need(library, extra="data")
    if library == "pandas":
        return result.to_pandas()
    return package.from_arrow(result) if library == "polars" else result
