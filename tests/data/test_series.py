"""The ragged container: indexing laws, validation, scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import IrregularSeries, TimeAxis, concatenate

from .series_cases import irregular_series, random_series

ROWS = {"times": [0.0, 1.0, 5.0], "values": [[1.0], [2.0], [3.0]], "offsets": [0, 2, 3]}


def indices(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-length, length - 1), max_size=8)


@given(irregular_series(), st.data())
def test_indexing_with_an_array_is_indexing_one_by_one(
    series: IrregularSeries, data: st.DataObject
) -> None:
    index = data.draw(indices(len(series)))
    picked = series[index]
    assert len(picked) == len(index)
    for position, one in zip(index, picked, strict=True):
        other = series[position]
        assert one.id == other.id
        np.testing.assert_array_equal(one.times, other.times)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.static, other.static)
        assert one.label == other.label


@given(irregular_series(), st.data())
def test_slices_and_masks_are_index_arrays(series: IrregularSeries, data: st.DataObject) -> None:
    key = data.draw(st.slices(len(series)))
    positions = np.arange(len(series))[key]
    assert series[key].equals(series[positions])
    mask = data.draw(st.lists(st.booleans(), min_size=len(series), max_size=len(series)))
    assert series[np.array(mask)].equals(series[np.flatnonzero(mask)])


@given(irregular_series(), st.data())
def test_index_arrays_compose(series: IrregularSeries, data: st.DataObject) -> None:
    first = np.array(data.draw(indices(len(series)).filter(bool)))
    second = data.draw(indices(len(first)))
    assert series[first][second].equals(series[first[np.array(second, dtype=int)]])


@given(irregular_series(), st.data())
def test_concatenate_undoes_a_cut(series: IrregularSeries, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(series)))
    assert concatenate([series[:cut], series[cut:]]).equals(series)


@given(irregular_series())
def test_lists_of_arrays_give_the_container_back(series: IrregularSeries) -> None:
    built = IrregularSeries.from_arrays(
        [one.times for one in series],
        [one.values for one in series],
        duplicates="keep",
        empty="keep",
        ids=series.ids,
        static=series.static,
        labels=series.labels,
    )
    assert built.equals(series)


@given(irregular_series(ties=False, min_length=1), st.randoms(use_true_random=False))
def test_sorting_undoes_a_shuffle(series: IrregularSeries, random: Any) -> None:
    times, values = [], []
    for one in series:
        order = list(range(len(one)))
        random.shuffle(order)
        times.append(one.times[order])
        values.append(one.values[order])
    built = IrregularSeries.from_arrays(times, values, sort=True, empty="keep")
    np.testing.assert_array_equal(built.times, series.times)
    np.testing.assert_array_equal(built.values, series.values)


def test_one_series_has_simple_attributes() -> None:
    one = IrregularSeries(**ROWS, ids=["a", "b"], static=[[1.0], [2.0]], labels=["x", "y"])[-1]
    assert (one.id, one.label, len(one)) == ("b", "y", 1)
    assert one.times.tolist() == [5.0]
    assert one.values.tolist() == [[3.0]]
    assert one.static is not None
    assert one.static.tolist() == [2.0]


def test_dtypes_are_those_of_the_model() -> None:
    series = IrregularSeries(**ROWS)
    assert series.times.dtype == np.float64
    assert series.values.dtype == np.float32
    assert series.offsets.dtype == np.int64
    assert series.shape == (2, 1)


def test_padded_rows_at_the_end_are_dropped_and_gaps_are_kept() -> None:
    nan = np.nan
    padded = np.array([[[1.0], [nan], [2.0]], [[3.0], [nan], [nan]]])
    series = IrregularSeries.from_padded(padded, np.array([0.0, 2.0, 4.0]))
    assert series.lengths.tolist() == [3, 1]
    assert series.times.tolist() == [0.0, 2.0, 4.0, 0.0]
    assert IrregularSeries.from_padded(padded, lengths=[3, 2]).lengths.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        (np.zeros((2, 3)), {}, r"values must be \[n, N, F\]"),
        (np.zeros((2, 3, 1)), {"times": np.zeros(2)}, r"times must be \[3\] or \[2, 3\]"),
        (np.zeros((2, 3, 1)), {"lengths": [4, 1]}, "entries from 0 to 3"),
        (np.zeros((2, 3, 1)), {"times": [2.0, 1.0, 0.0]}, "must not decrease"),
        (np.full((2, 3, 1), np.nan), {}, "2 of 2 series have no value"),
    ],
)
def test_bad_padded_arrays_are_refused(values: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IrregularSeries.from_padded(values, **settings)


def test_equality_is_of_all_parts() -> None:
    series = random_series(4)
    assert series.equals(random_series(4))
    assert not series.equals(random_series(4, seed=1))
    assert not series.equals(series.replace(labels=None))
    assert not series.equals("series")


def test_repr_counts() -> None:
    text = repr(random_series(4))
    assert "4 series" in text
    assert "2 static" in text
    assert "labels int64[4]" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": [0.0, np.nan, 5.0]}, r"finite; series 0 has t\[1\]=nan"),
        ({"times": [0.0, 1.0, np.inf]}, r"finite; series 1 has t\[0\]=inf"),
        ({"times": [1.0, 0.0, 5.0]}, r"series 0 has t\[1\]=0 < t\[0\]=1.*sort=True"),
        ({"times": [[0.0, 1.0, 5.0]]}, r"times must be \[T\]"),
        ({"times": [0.0, 1.0]}, r"values must be \[2, F\]"),
        ({"times": ["a", "b", "c"]}, "times must be numbers"),
        ({"values": [1.0, 2.0, 3.0]}, r"values must be \[3, F\]"),
        ({"values": [[1.0], [np.inf], [3.0]]}, "'feature_0' of series 0 is inf at step 1"),
        ({"values": [[1.0], [1e300], [3.0]]}, "rescale values beyond 3e38"),
        ({"values": [["a"], ["b"], ["c"]]}, "values must be numbers"),
        ({"offsets": [0, 2]}, "rise from 0 to the number of rows, 3"),
        ({"offsets": [0, 4, 3]}, "rise from 0"),
        ({"offsets": []}, r"offsets must be \[n \+ 1\]"),
        ({"ids": ["a"]}, r"ids must be \[2\]"),
        ({"ids": np.array(["a", 1], dtype=object)}, "ids must be all numbers or all text"),
        ({"static": [[1.0]]}, r"static must be \[2, S\]"),
        ({"static": [[1.0], [np.inf]]}, "series number 1 has an infinity"),
        ({"labels": [1]}, r"labels must be \[2\]"),
        ({"labels": [1.0, np.nan]}, "series number 1 has none"),
        ({"labels": [[1.0], [np.nan]]}, "series number 1 has none"),
        ({"labels": np.array(["a", 1], dtype=object)}, "mixture of int, str"),
        ({"labels": [["a"], ["b"]]}, "must be real targets"),
        ({"feature_names": ["a", "b"]}, "feature_names must have 1 entries"),
        ({"static": [[1, 2], [1, 2]], "static_names": ["a", "a"]}, "'a' occurs twice"),
        ({"origins": [0, 0]}, "origins"),
        ({"origins": [0], "time_axis": TimeAxis(origin="series")}, r"origins must be \[2\]"),
        ({"ids": [1j, 2j]}, "ids must be numbers or text; got complex128"),
        ({"time_axis": TimeAxis(origin="series")}, "origins"),
    ],
)
def test_bad_arrays_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        IrregularSeries(**{**ROWS, **changes})


@pytest.mark.parametrize(
    ("times", "values", "message"),
    [
        ([[0.0]], [[1.0], [2.0]], "got 1 and 2"),
        ([], [], "at least one series"),
        ([[0.0, 1.0]], [[1.0]], r"series number 0 .* got \[2\] and \[1, 1\]"),
        ([[0.0], [0.0]], [[[1.0, 2.0]], [[1.0]]], r"series number 1 .* values \[N, 2\]"),
        ([[1.0, 0.0]], [[1.0, 2.0]], "must not decrease"),
        ([[0.0, 0.0]], [[1.0, 2.0]], "duplicates='mean'"),
        ([[0.0], []], [[1.0], []], "1 of 2 series have no value at all: 1"),
        ([[0.0], [1.0]], [[1.0], [np.nan]], "1 of 2 series have no value at all: 1"),
    ],
)
def test_bad_lists_are_refused(times: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IrregularSeries.from_arrays(times, values)


def test_series_without_values_are_dropped_or_kept_if_asked() -> None:
    times, values = [[0.0, 1.0], [], [3.0]], [[1.0, 2.0], [], [np.nan]]
    kept = IrregularSeries.from_arrays(times, values, empty="keep")
    dropped = IrregularSeries.from_arrays(times, values, empty="drop")
    assert kept.lengths.tolist() == [2, 0, 1]
    assert kept.num_observed.tolist() == [2, 0, 0]
    assert dropped.ids.tolist() == [0]


@pytest.mark.parametrize(
    ("how", "times", "values"),
    [
        ("mean", [0.0, 1.0], [[2.0, 5.0], [7.0, np.nan]]),
        ("last", [0.0, 1.0], [[3.0, 5.0], [7.0, np.nan]]),
        ("keep", [0.0, 0.0, 1.0], [[1.0, 5.0], [3.0, np.nan], [7.0, np.nan]]),
    ],
)
def test_ties_are_merged_feature_by_feature(how: Any, times: Any, values: Any) -> None:
    rows = [[1.0, 5.0], [3.0, np.nan], [7.0, np.nan]]
    series = IrregularSeries.from_arrays([[0.0, 0.0, 1.0]], [rows], duplicates=how)
    assert series.times.tolist() == times
    np.testing.assert_array_equal(series.values, np.array(values, dtype=np.float32))


def test_equal_times_of_neighbouring_series_are_no_tie() -> None:
    series = IrregularSeries.from_arrays([[0.0, 1.0], [1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]])
    assert len(series.times) == 4


@pytest.mark.parametrize("option", ["duplicates", "empty"])
def test_unknown_options_name_the_allowed_ones(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of 'error'"):
        IrregularSeries.from_arrays([[0.0]], [[1.0]], **{option: "average"})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, "index 5 is out of range for 2 series"),
        ([0, -3], "index -3 is out of range"),
        ([True], "one entry per series, 2"),
        (["a"], "np.isin"),
        ([[0]], "one-dimensional"),
    ],
)
def test_bad_indices_are_refused(key: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        IrregularSeries(**ROWS)[key]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"feature_names": ["x"]}, "same feature_names"),
        ({"labels": [0, 1]}, "both have labels"),
        ({"static": [[0.0], [1.0]]}, "same static_names"),
    ],
)
def test_parts_that_do_not_fit_are_not_joined(other: dict[str, Any], message: str) -> None:
    series = IrregularSeries(**ROWS)
    with pytest.raises(ValueError, match=message):
        concatenate([series, series.replace(**other)])


def test_nothing_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="at least one"):
        concatenate([])


class TestScikitLearn:
    """Splitters and searches take a container as they take an array."""

    def test_folds_cover_all_series(self) -> None:
        selection = pytest.importorskip("sklearn.model_selection")
        series = random_series(12)
        seen = [
            series[test].ids
            for _, test in selection.StratifiedKFold(2).split(series, series.labels)
        ]
        assert sorted(np.concatenate(seen)) == sorted(series.ids)

    def test_train_test_split_keeps_labels_with_their_series(self) -> None:
        selection = pytest.importorskip("sklearn.model_selection")
        series = random_series(12)
        train, test, y_train, y_test = selection.train_test_split(
            series, series.labels, test_size=0.25, random_state=0
        )
        assert isinstance(train, IrregularSeries)
        assert (len(train), len(test)) == (9, 3)
        np.testing.assert_array_equal(train.labels, y_train)
        np.testing.assert_array_equal(test.labels, y_test)

    @pytest.mark.parametrize("key", [[0, 2], np.array([True, False, True]), slice(0, 2)])
    def test_safe_indexing_gives_a_container(self, key: Any) -> None:
        utils = pytest.importorskip("sklearn.utils")
        series = random_series(3)
        assert utils._safe_indexing(series, key).equals(series[key])

    def test_grid_search_passes_containers(self) -> None:
        base = pytest.importorskip("sklearn.base")
        selection = pytest.importorskip("sklearn.model_selection")

        class Constant(base.ClassifierMixin, base.BaseEstimator):
            def __init__(self, answer: int = 0) -> None:
                self.answer = answer

            def fit(self, X: IrregularSeries, y: np.ndarray) -> Constant:
                assert isinstance(X, IrregularSeries)
                assert len(X) == len(y)
                self.classes_ = np.array([0, 1])
                return self

            def predict(self, X: IrregularSeries) -> np.ndarray:
                return np.full(len(X), self.answer)

        series = random_series(12)
        search = selection.GridSearchCV(Constant(), {"answer": [0, 1]}, cv=3)
        assert search.fit(series, np.ones(12, dtype=int)).best_params_ == {"answer": 1}
