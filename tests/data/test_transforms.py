"""Scaling: invertible, learned from training data alone, the same from chunks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import IrregularSeries, SeriesTransform

from .series_cases import irregular_series, random_series

scalings = st.sampled_from(["standard", "robust", "asinh", "none"])


@given(irregular_series(), scalings)
def test_inverse_undoes_the_transform(series: IrregularSeries, scaling: Any) -> None:
    transform = SeriesTransform(scaling, static=scaling)
    back = transform.inverse_values(transform.fit_transform(series).values)
    size = np.abs(np.nan_to_num(series.values)).max(initial=1.0)
    np.testing.assert_allclose(back, series.values, atol=1e-5 * size)


@given(irregular_series(), scalings, st.data())
def test_chunks_teach_what_the_whole_teaches(
    series: IrregularSeries, scaling: Any, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(series)))
    whole = SeriesTransform(scaling, static=scaling).fit(series)
    parts = SeriesTransform(scaling, static=scaling)
    parts.partial_fit(series[:cut]).partial_fit(series[cut:])
    for one, other in (
        (whole.value_scaler, parts.value_scaler),
        (whole.static_scaler, parts.static_scaler),
    ):
        if one is None or other is None:
            assert one is other
            continue
        np.testing.assert_allclose(one.center, other.center, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-4, atol=1e-4)
    assert (whole.time_reference, whole.time_span) == (parts.time_reference, parts.time_span)


@given(irregular_series(), scalings, st.sampled_from(["none", "span"]))
def test_json_keeps_the_transform(series: IrregularSeries, scaling: Any, time: Any) -> None:
    transform = SeriesTransform(scaling, clip=3.0, time=time).fit(series)
    back = SeriesTransform.from_dict(json.loads(json.dumps(transform.to_dict())))
    assert back.transform(series).equals(transform.transform(series))
    assert back.to_dict() == transform.to_dict()


def test_standard_values_have_mean_zero_and_spread_one() -> None:
    series = random_series(200)
    scaled = SeriesTransform().fit_transform(series)
    np.testing.assert_allclose(np.nanmean(scaled.values, axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.nanstd(scaled.values, axis=0), 1.0, atol=1e-5)
    assert scaled.static is not None
    np.testing.assert_allclose(scaled.static.std(axis=0), 1.0, atol=1e-5)
    np.testing.assert_array_equal(np.isnan(scaled.values), np.isnan(series.values))


def test_robust_scaling_does_not_see_an_outlier() -> None:
    values = np.concatenate([np.linspace(-1, 1, 101), [1e6]])
    series = IrregularSeries.from_arrays([np.arange(102.0)], [values])
    scaler = SeriesTransform("robust").fit(series).value_scaler
    assert abs(scaler.center[0]) < 0.02
    assert 0.6 < scaler.scale[0] < 0.9


def test_asinh_keeps_what_is_usual_and_squeezes_what_is_not() -> None:
    usual = np.linspace(-1, 1, 101)
    series = IrregularSeries.from_arrays([np.arange(102.0)], [np.concatenate([usual, [1e6]])])
    robust = SeriesTransform("robust").fit_transform(series).values[:, 0].astype(np.float64)
    squeezed = SeriesTransform("asinh").fit_transform(series).values[:, 0]
    np.testing.assert_allclose(squeezed, np.log(robust + np.hypot(robust, 1)), atol=1e-4)
    # The bound is one on what the model sees.
    assert SeriesTransform("asinh", clip=6.0).fit_transform(series).values.max() == 6.0
    assert 10 < squeezed[-1] < 20


def test_scales_from_before_there_was_asinh_are_read() -> None:
    series = random_series(5)
    state = SeriesTransform("robust", clip=3.0).fit(series).to_dict()
    for scales in ("values", "static"):
        del state["scales"][scales]["squash"]
    back = SeriesTransform.from_dict(state)
    assert back.transform(series).equals(SeriesTransform("robust", clip=3.0).fit_transform(series))


@pytest.mark.parametrize("scaling", ["standard", "robust", "asinh"])
def test_constant_and_absent_features_are_safe(scaling: Any) -> None:
    values = [[0.1, np.nan, 0.0], [0.1, np.nan, 0.0], [0.1, np.nan, 5.0], [0.1, np.nan, 0.0]]
    series = IrregularSeries.from_arrays([np.arange(4.0)], [values])
    scaled = SeriesTransform(scaling).fit_transform(series).values
    np.testing.assert_allclose(scaled[:, 0], 0.0, atol=1e-6)
    assert np.isnan(scaled[:, 1]).all()
    assert np.abs(scaled[:, 2]).max() < 10


def test_other_data_are_scaled_as_the_training_data() -> None:
    train = IrregularSeries.from_arrays([[0.0, 10.0]], [[0.0, 2.0]])
    other = IrregularSeries.from_arrays([[5.0, 25.0]], [[3.0, 101.0]])
    scaled = SeriesTransform(clip=5.0, time="span").fit(train).transform(other)
    assert scaled.values.ravel().tolist() == [2.0, 5.0]
    assert scaled.times.tolist() == [0.5, 2.5]


@pytest.mark.parametrize("time", ["none", "span"])
def test_times_of_queries_go_there_and_back(time: Any) -> None:
    transform = SeriesTransform(time=time).fit(random_series(5))
    times = torch.tensor([[0.5, 7.0]], dtype=torch.float64)
    torch.testing.assert_close(transform.inverse_times(transform.transform_times(times)), times)


@pytest.mark.parametrize("scaling", ["standard", "asinh"])
def test_tensors_and_arrays_are_treated_alike(scaling: Any) -> None:
    transform = SeriesTransform(scaling).fit(random_series(5))
    values = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    for change in (transform.inverse_values, transform.value_scaler.transform):
        found = change(torch.from_numpy(values)).numpy()
        np.testing.assert_allclose(found, change(values), rtol=1e-6)


def test_fit_forgets_and_partial_fit_remembers() -> None:
    one, other = random_series(5, seed=1), random_series(5, seed=2)
    again = SeriesTransform().fit(one).fit(other)
    np.testing.assert_array_equal(
        again.value_scaler.center, SeriesTransform().fit(other).value_scaler.center
    )
    both = SeriesTransform().fit(one).partial_fit(other)
    assert both.statistics is not None
    assert both.statistics.num_series == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"values": "minmax"}, "values must be one of 'standard', 'robust', 'asinh', 'none'"),
        ({"static": "minmax"}, "static must be one of"),
        ({"time": "days"}, "time must be one of 'span', 'none'"),
        ({"clip": -1.0}, "clip must be positive"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeriesTransform(**settings)


def test_other_features_are_refused() -> None:
    transform = SeriesTransform()
    with pytest.raises(RuntimeError, match="not fitted"):
        transform.transform(random_series(2))
    transform.fit(random_series(2))
    with pytest.raises(ValueError, match="must have the features"):
        transform.transform(random_series(2, num_features=2))
    with pytest.raises(ValueError, match="static features"):
        transform.transform(random_series(2, static=False))
    with pytest.raises(ValueError, match=r"values must be \[..., 3\]"):
        transform.inverse_values(np.zeros((2, 2)))
