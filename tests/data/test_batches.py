"""Padding series into batches, and taking the padding off."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import Batch, IrregularSeries, collate, uncollate

from .series_cases import irregular_series, random_series

FIELDS = [
    "times",
    "values",
    "mask",
    "static",
    "labels",
    "weight",
    "query_times",
    "targets",
    "query_mask",
    "index",
]


@given(irregular_series(), st.data())
def test_uncollate_undoes_collate(series: IrregularSeries, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(series) - 1), min_size=1, max_size=5))
    parts = uncollate(collate(series, index))
    for position, (times, values) in zip(index, parts, strict=True):
        np.testing.assert_array_equal(times, series[position].times)
        np.testing.assert_array_equal(values, series[position].values)


@given(irregular_series())
def test_padding_repeats_the_last_time_and_holds_nan(series: IrregularSeries) -> None:
    batch = collate(series)
    assert batch.times.dtype == torch.float64
    assert batch.values.dtype == torch.float32
    assert batch.values[~batch.mask].isnan().all()
    assert (batch.times.diff(dim=1) >= 0).all()
    assert batch.mask.sum(dim=1).tolist() == series.lengths.tolist()
    for row, one in zip(batch.times, series, strict=True):
        assert row[-1] == (one.times[-1] if len(one) else 0.0)


def test_fields_are_the_agreed_ones() -> None:
    assert [field.name for field in dataclasses.fields(Batch)] == FIELDS
    batch = collate(random_series(3), [2, 0])
    assert (len(batch), batch.index.tolist()) == (2, [2, 0])
    assert batch.weight is None
    assert batch.query_times is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.index = batch.index  # type: ignore[misc]


def test_static_labels_and_weights_follow_the_index() -> None:
    series = random_series(4)
    assert series.static is not None
    assert series.labels is not None
    batch = collate(series, [3, 1], weight=[0.0, 1.0, 2.0, 3.0])
    assert batch.static is not None
    np.testing.assert_array_equal(batch.static, series.static[[3, 1]])
    assert batch.labels is not None
    assert batch.labels.tolist() == series.labels[[3, 1]].tolist()
    assert batch.labels.dtype == torch.int64
    assert batch.weight is not None
    assert batch.weight.tolist() == [3.0, 1.0]


def test_real_targets_are_float32() -> None:
    labels = np.array([[0.5, 1.0], [1.5, 2.0]])
    batch = collate(random_series(2), labels=labels)
    assert batch.labels is not None
    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == labels.tolist()


def test_queries_are_padded_with_their_targets() -> None:
    series = random_series(2, num_features=1)
    nan = np.nan
    queries = IrregularSeries.from_arrays([[7.0, 8.0], [9.0]], [[1.0, nan], [nan]], empty="keep")
    batch = collate(series, queries=queries)
    assert batch.query_times is not None
    assert batch.query_mask is not None
    assert batch.targets is not None
    assert batch.query_times.tolist() == [[7.0, 8.0], [9.0, 9.0]]
    assert batch.query_mask.tolist() == [[True, True], [True, False]]
    assert batch.targets.isnan().tolist() == [[[False], [True]], [[True], [True]]]


def test_series_without_rows_have_an_empty_mask() -> None:
    series = IrregularSeries.from_arrays([[], []], [[], []], empty="keep")
    batch = collate(series)
    assert batch.times.shape == (2, 1)
    assert not batch.mask.any()


def test_to_moves_what_is_there() -> None:
    batch = collate(random_series(2)).to("meta")
    assert batch.times.device.type == "meta"
    assert batch.labels is not None
    assert batch.labels.device.type == "meta"
    assert batch.targets is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": ["a", "b"]}, "np.unique"),
        ({"labels": [1]}, "labels must have 2 entries"),
        ({"weight": [1.0]}, r"weight must be \[2\]"),
        ({"weight": [1.0, -1.0]}, "not negative"),
        ({"queries": random_series(3)}, "queries must hold 2 series"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        collate(random_series(2), **settings)
