"""Tables of three libraries, in two layouts, to series and back."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import IrregularSeries, Layout, from_frame, join_frame

from .series_cases import irregular_series, random_series

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

LIBRARIES = ["pandas", "polars", "pyarrow"]
WIDE = {"who": ["b", "a", "b"], "hour": [2.0, 0.0, 1.0], "x": [1.0, 2.0, None], "y": [1, 2, 3]}
WHO = {"id": "who", "time": "hour"}


def table_of(library: str, columns: dict[str, Any]) -> Any:
    make = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table}
    return make[library](columns)


@pytest.mark.parametrize("library", LIBRARIES)
@given(series=irregular_series(min_length=1))
def test_a_table_gives_the_series_back(library: str, series: IrregularSeries) -> None:
    back = from_frame(
        series.to_frame(library),
        id="id",
        time="time",
        static=series.static_names,
        label=None if series.labels is None else "label",
        duplicates="keep",
        empty="keep",
    )
    assert back.equals(series)


@given(irregular_series(min_length=1, ties=False), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(series: IrregularSeries, random: Any) -> None:
    table = series.to_frame("pyarrow")
    order = list(range(table.num_rows))
    random.shuffle(order)
    shuffled = from_frame(
        table.take(pa.array(order)),
        id="id",
        time="time",
        static=series.static_names,
        label=None if series.labels is None else "label",
        empty="keep",
    )
    back = shuffled[np.argsort(shuffled.ids)]
    assert back.equals(series)


@given(irregular_series(min_length=1, ties=False))
def test_the_narrow_layout_holds_what_the_wide_one_holds(series: IrregularSeries) -> None:
    owner = np.repeat(np.arange(len(series)), series.lengths)
    rows, features = np.nonzero(~np.isnan(series.values))
    if len(rows) == 0:
        return
    names = np.array(series.feature_names)
    narrow = {
        "id": series.ids[owner][rows],
        "time": series.times[rows],
        "name": names[features],
        "value": series.values[rows, features],
    }
    layout = Layout(
        id="id",
        time="time",
        variable="name",
        value="value",
        values=series.feature_names,
        allow_absent=True,
    )
    back = from_frame(narrow, layout)
    observed = ~np.isnan(series.values).all(axis=1)
    kept = series.num_observed > 0
    np.testing.assert_array_equal(back.ids, series.ids[kept])
    np.testing.assert_array_equal(back.times, series.times[observed])
    np.testing.assert_array_equal(back.values, series.values[observed])


@pytest.mark.parametrize("library", LIBRARIES)
def test_wide_rows_are_sorted_within_series_in_order_of_appearance(library: str) -> None:
    series = from_frame(table_of(library, WIDE), **WHO)
    assert series.ids.tolist() == ["b", "a"]
    assert series.feature_names == ("x", "y")
    assert series.times.tolist() == [1.0, 2.0, 0.0]
    np.testing.assert_array_equal(series[0].values, [[np.nan, 3.0], [1.0, 1.0]])


@pytest.mark.parametrize("library", LIBRARIES)
def test_narrow_rows_become_columns(library: str) -> None:
    columns = {
        "who": [1, 1, 1, 2, 1],
        "hour": [0, 0, 5, 0, 0],
        "what": ["pulse", "age", "temp", "pulse", "temp"],
        "value": [80.0, 61.0, 37.5, 90.0, 36.0],
    }
    layout = Layout(**WHO, variable="what", value="value", static=["age"])
    series = from_frame(table_of(library, columns), layout)
    assert series.feature_names == ("pulse", "temp")
    np.testing.assert_array_equal(series[0].values, [[80.0, 36.0], [np.nan, 37.5]])
    np.testing.assert_array_equal(series.static, [[61.0], [np.nan]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (None, [[2.0, 5.0]]),
        ("mean", [[2.0, 5.0]]),
        ("last", [[3.0, 5.0]]),
        ("keep", [[1.0, 5.0], [3.0, np.nan]]),
    ],
)
def test_values_in_duplicate_are_averaged_unless_told_otherwise(how: Any, expected: Any) -> None:
    columns = {"who": [1] * 3, "hour": [0] * 3, "what": ["a", "b", "a"], "value": [1.0, 5.0, 3.0]}
    series = from_frame(columns, **WHO, variable="what", value="value", duplicates=how)
    np.testing.assert_array_equal(series.values, expected)
    with pytest.raises(ValueError, match="'a' at t=0 of series 1"):
        from_frame(columns, **WHO, variable="what", value="value", duplicates="error")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("zone", [None, "Europe/Vienna"])
def test_dates_begin_at_zero_and_can_be_mapped_back(library: str, zone: str | None) -> None:
    # The night in which clocks are put forward in Vienna.
    stamps = pd.to_datetime(["2024-03-31 01:00", "2024-03-31 04:00"]).tz_localize(zone)
    frame = pd.DataFrame({"who": ["a", "a"], "when": stamps, "x": [1.0, 2.0]})
    source = {"pandas": lambda f: f, "polars": pl.from_pandas, "pyarrow": pa.Table.from_pandas}
    series = from_frame(source[library](frame), id="who", time="when", unit="h")
    assert series.times.tolist() == [0.0, 3.0 if zone is None else 2.0]
    back = series.to_frame("pandas", id="who", time="when")["when"]
    assert list(back) == list(stamps)
    absolute = from_frame(frame, id="who", time="when", unit="s", origin="absolute")
    assert absolute.times.tolist() == [stamp.timestamp() for stamp in stamps]
    assert list(absolute.to_frame(time="when")["when"]) == list(stamps)


def test_days_and_durations_are_times() -> None:
    days = {"who": [1, 1], "hour": [datetime.date(2024, 1, 1), datetime.date(2024, 1, 3)]}
    series = from_frame({**days, "x": [1.0, 2.0]}, **WHO, unit="d")
    assert series.times.tolist() == [0.0, 2.0]
    waits = {"who": [1, 1], "hour": pa.array([90, 120], pa.duration("s")), "x": [1.0, 2.0]}
    series = from_frame(waits, **WHO, unit="min")
    assert series.times.tolist() == [1.5, 2.0]
    assert series.decode_times()[0] == np.timedelta64(90, "s")


def test_large_integer_times_keep_every_tick() -> None:
    start = 1_700_000_000_000_000_000
    columns = {"who": [1, 1], "hour": [start, start + 1], "x": [1.0, 2.0]}
    assert from_frame(columns, **WHO, origin="series").times.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="origin='series'"):
        from_frame(columns, **WHO)


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.float32(), pa.decimal128(9, 1)])
def test_small_types_of_times_do_not_overflow(kind: Any) -> None:
    signed = -100 if kind != pa.uint8() else 100
    times = pa.array([signed, 120], pa.int16()).cast(kind, safe=False)
    series = from_frame({"who": [1, 1], "hour": times, "x": [1.0, 2.0]}, **WHO, origin="series")
    assert series.times.tolist() == [0.0, 120.0 - signed]


def test_numbers_may_begin_at_zero_as_well() -> None:
    series = from_frame(WIDE, **WHO, origin="series")
    assert series.times.tolist() == [0.0, 1.0, 0.0]
    assert series.decode_times().tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("text", "time_format"),
    [
        ("2024-01-01 06:00:00", "iso"),
        ("2024-01-01T06:00:00+02:00", "iso"),
        ("01.01.2024 06:00", "%d.%m.%Y %H:%M"),
    ],
)
def test_times_as_text_are_read_if_asked(text: str, time_format: str) -> None:
    columns = {"who": [1], "hour": [text], "x": [1.0]}
    with pytest.raises(TypeError, match=r"holds text such as .* time_format='iso'"):
        from_frame(columns, **WHO)
    series = from_frame(columns, **WHO, time_format=time_format, origin="absolute", unit="h")
    hour = 4.0 if "+02:00" in text else 6.0
    assert series.times[0] % 24 == hour


def test_text_in_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read with time_format='iso'"):
        from_frame({"who": [1], "hour": ["noon"], "x": [1.0]}, **WHO, time_format="iso")


def test_pandas_index_can_be_the_id_and_is_no_feature() -> None:
    frame = pd.DataFrame(WIDE)
    by_id = from_frame(frame.set_index("who"), **WHO)
    assert by_id.equals(from_frame(frame, **WHO))
    renumbered = frame.set_index(pd.Index([7, 8, 9], name="row"))
    assert from_frame(renumbered, **WHO).feature_names == ("x", "y")
    assert from_frame(frame.iloc[[2, 0, 1]], **WHO).feature_names == ("x", "y")


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([True, False, True]),
        pd.Series([1, 2, None], dtype="Int64"),
        pd.Categorical([3, 4, 3]),
        pa.array([1, 2, 3], pa.uint8()),
        pa.array([None, None, None], pa.null()),
        pa.array([1, 2, 3]).cast(pa.decimal128(20, 1)),
    ],
)
def test_all_kinds_of_numbers_are_features(column: Any) -> None:
    table = from_frame(pa.table({**WIDE, "z": pa.array(column, from_pandas=True)}), **WHO)
    assert table.feature_names == ("x", "y", "z")


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["a", "b"]), pl.String])
def test_categories_can_be_ids_and_labels(kind: Any) -> None:
    frame = pl.DataFrame(WIDE).with_columns(
        pl.col("who").cast(kind), group=pl.Series(["b", "a", "b"]).cast(kind)
    )
    series = from_frame(frame, **WHO, label="group")
    assert series.ids.tolist() == ["b", "a"]
    assert series.labels is not None
    assert series.labels.tolist() == ["b", "a"]


def test_several_labels_are_real_targets() -> None:
    series = from_frame({**WIDE, "u": [1.5, 2.5, 1.5]}, **WHO, label=["u"], values=["x"])
    assert series.labels is not None
    assert series.labels.tolist() == [[1.5], [2.5]]


def test_absent_features_are_missing_if_allowed() -> None:
    series = from_frame(
        WIDE, **WHO, values=["x", "z"], static=["s"], allow_absent=True, empty="keep"
    )
    assert series.feature_names == ("x", "z")
    assert np.isnan(series.values[:, 1]).all()
    assert np.isnan(series.static).all()


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"id": "Who"}, r"no column 'Who'; did you mean 'who'"),
        ({}, {"time": "ours"}, r"did you mean 'hour'\?"),
        ({}, {"time": "zzzzz"}, r"the columns are \['who'"),
        ({}, {"values": ["x", "yy"]}, "no column 'yy'; did you mean 'y'"),
        ({}, {"static": ["ages"]}, "no column 'ages'"),
        ({}, {"label": "died"}, "no column 'died'"),
        ({}, {"values": "x"}, r"Use \['x'\]"),
        ({}, {"values": []}, "at least one feature"),
        ({}, {"values": ["who"]}, "both id and values"),
        ({}, {"variable": "x"}, "belong together"),
        ({}, {"unit": "week"}, "unit must be one of"),
        ({}, {"origin": "start"}, "origin must be one of"),
        ({}, {"duplicates": "first"}, "duplicates must be one of"),
        ({"x": ["low", "high", "low"]}, {}, "feature column 'x' must hold numbers.*'low'.*values="),
        ({"x": ["u", "v", "u"]}, {"static": ["x"]}, "static column 'x' must hold numbers"),
        ({"who": ["a", None, "b"]}, {}, "1 rows without an id, the first is row 1"),
        ({"hour": [1.0, None, 2.0]}, {}, "1 rows without a time"),
        ({"hour": [1.0, np.nan, 2.0]}, {}, r"1 rows with a time that is not finite, in series 'a'"),
        ({"hour": [True, False, True]}, {}, "must hold numbers, dates or durations"),
        ({"hour": [1.0, 0.0, 1.0]}, {}, r"the first at t=1 of series b; series concerned: 'b'"),
        ({"y": [1, 2, 3]}, {"label": "y"}, "constant within a series; series b has 1 and 3"),
        ({"y": [None, 2, None]}, {"label": "y"}, "'y' is empty for series 'b'"),
        ({"y": [1, 2, 3]}, {"static": ["y"]}, "'y' must have one value per series; 1 series"),
        ({"x": [None] * 3, "y": [None] * 3}, {}, "2 of 2 series have no value at all: 'b', 'a'"),
        ({"x": [np.inf, 1.0, 1.0]}, {}, "'x' of series b is inf"),
        ({name: [] for name in WIDE}, {}, "no rows"),
    ],
)
def test_bad_tables_are_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        from_frame(pa.table({**WIDE, **changes}), **{**WHO, **settings})


def test_a_table_without_features_is_refused() -> None:
    with pytest.raises(ValueError, match="no feature columns"):
        from_frame({"who": [1], "hour": [0.0]}, **WHO)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([1, 2], "got list"),
        (pl.LazyFrame(WIDE), "collect"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "names that differ"),
        (pd.DataFrame({"who": [1, 2], "x": [1, "a"]}), "A column of one type"),
    ],
)
def test_what_is_no_table_is_refused(frame: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        from_frame(frame, **WHO)


def test_unknown_variables_name_near_ones() -> None:
    columns = {"who": [1], "hour": [0.0], "what": ["pulse"], "value": [1.0]}
    with pytest.raises(ValueError, match=r"column 'what' called 'pulses'; did you mean 'pulse'"):
        from_frame(columns, **WHO, variable="what", value="value", values=["pulses"])
    with pytest.raises(ValueError, match="no variable besides static ones"):
        from_frame(columns, **WHO, variable="what", value="value", static=["pulse"])
    with pytest.raises(ValueError, match="without the name of a variable"):
        from_frame(
            {**columns, "what": pa.array([None], "str")}, **WHO, variable="what", value="value"
        )


def test_variables_may_be_named_like_columns() -> None:
    columns = {"who": [1], "hour": [0.0], "what": ["hour"], "value": [1.0]}
    series = from_frame(columns, **WHO, variable="what", value="value", values=["hour"])
    assert series.feature_names == ("hour",)
    with pytest.raises(ValueError, match="'a' is both static and values"):
        Layout(**WHO, variable="what", value="value", values=["a"], static=["a"])


def test_static_columns_may_have_gaps() -> None:
    series = from_frame({**WIDE, "age": [None, 30, 50]}, **WHO, static=["age"])
    assert series.static is not None
    assert series.static.tolist() == [[50.0], [30.0]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_labels_can_come_from_a_table_of_their_own(library: str) -> None:
    series = random_series(3, static=False, labels=False)
    outcomes = {"name": ["a2", "a0", "a9", "a1"], "y": [2, 0, 9, 1], "z": [2.5, 0.5, 9.5, None]}
    joined = join_frame(series, table_of(library, outcomes), id="name", label="y", static=["z"])
    assert joined.labels is not None
    assert joined.labels.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(joined.static, [[0.5], [np.nan], [2.5]])
    assert joined.static_names == ("z",)


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ({"name": ["a0"], "y": [1]}, "lacks 2 ids: 'a1', 'a2'"),
        ({"name": [0, 1, 2], "y": [1, 1, 1]}, "lacks 3 ids: .* it has ids such as '0'"),
        ({"name": ["a0", "a1", "a2", "a2"], "y": [1, 1, 1, 0]}, "series a2 has 1 and 0"),
        ({"name": ["a0", "a1", "a2"], "y": [1, None, 1]}, "'y' is empty for series 'a1'"),
    ],
)
def test_outcomes_that_do_not_fit_are_refused(outcomes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        join_frame(random_series(3), outcomes, id="name", label="y")


def test_names_of_a_written_table_must_differ() -> None:
    with pytest.raises(ValueError, match="'feature_0' would occur twice"):
        random_series(2).to_frame("pyarrow", time="feature_0")
    with pytest.raises(ValueError, match="library must be one of"):
        random_series(2).to_frame("dask")


def test_layouts_survive_json_values() -> None:
    layout = Layout(id="a", time="b", values=["x"], static=["s"], label="y", unit="h")
    assert Layout.from_dict(layout.to_dict()) == layout
