"""Laws of all families: company, padding, order, clocks and units do not matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer import ResonatorFeatures
from osciformer.data import IrregularSeries
from osciformer.resonators import FAMILIES, Family
from osciformer.resonators.families import similar_lengths
from osciformer.resonators.shape import Shape
from osciformer.resonators.spectrum import Spectrum
from osciformer.resonators.states import States

from .cases import fitted, ragged

DRIVEN = (Shape, Spectrum, States)


def share_apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the share of columns that differ by more than rounding.

    A response that is just at its level may be above it or not.
    """
    assert found.shape == wanted.shape
    return float((~np.isclose(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True)).mean())


@pytest.mark.parametrize("kind", DRIVEN)
def test_neither_company_nor_padding_nor_order_matters(kind: type[Family]) -> None:
    series = ragged()
    family = fitted(kind, series)
    whole = family.transform(series)
    alone = np.concatenate([family.transform(series[k : k + 1]) for k in range(len(series))])
    assert share_apart(alone, whole) < 1e-3
    order = np.random.default_rng(1).permutation(len(series))
    assert share_apart(family.transform(series.take(order)), whole[order]) < 1e-3
    longer = ragged(2, shortest=90, longest=100)
    times, values = zip(*[(one.times, one.values) for one in (*series, *longer)], strict=True)
    more = family.transform(IrregularSeries.from_arrays(times, values))
    assert share_apart(more[: len(series)], whole) < 1e-3


@pytest.mark.parametrize("kind", DRIVEN)
def test_company_does_not_matter_to_constant_series(kind: type[Family]) -> None:
    series = ragged()
    family = fitted(kind, series)
    times = np.cumsum(np.random.default_rng(3).exponential(size=30))
    level = np.full((30, series.num_features), 0.7)
    pairs = [(times, level), *((one.times, one.values) for one in series)]
    both = IrregularSeries.from_arrays(*zip(*pairs, strict=True))
    alone, company = family.transform(both[:1]), family.transform(both)[:1]
    assert share_apart(alone, company) < 1e-3


@pytest.mark.parametrize("kind", DRIVEN)
@settings(max_examples=4, deadline=None)
@given(shift=st.floats(-1e4, 1e4), unit=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_clocks_and_units_of_time_do_not_matter(
    kind: type[Family], shift: float, unit: float, seed: int
) -> None:
    series = ragged(seed=seed)
    family = fitted(kind, series)
    whole = family.transform(series)
    later = series.replace(times=series.times + shift)
    assert share_apart(family.transform(later), whole) < 5e-3
    slower = series.replace(times=series.times * unit)
    other = fitted(kind, slower)
    assert share_apart(other.transform(slower), whole) < 5e-3
    pairs = zip(family.names(), other.names(), strict=True)
    for mine, theirs in pairs:
        assert mine.period is not None
        assert theirs.period == pytest.approx(unit * mine.period)


@pytest.mark.parametrize("kind", FAMILIES.values())
@pytest.mark.parametrize("variables", [1, 3, 20])
def test_names_are_those_of_the_columns(kind: type[Family], variables: int) -> None:
    series = ragged(4, variables)
    family = fitted(kind, series)
    names = family.names()
    assert family.transform(series).shape == (4, len(names))
    assert all(name.family == kind.name for name in names)
    assert all(set(name.variables) <= set(series.feature_names) for name in names)
    # Lines next to each other may have the same period to three digits.
    assert len(set(names)) == len(names)


def test_names_can_be_read() -> None:
    series = ragged(4, 1)
    kinds = (kind for name, kind in FAMILIES.items() if name != "static")
    assert [str(fitted(kind, series).names()[0]) for kind in kinds] == [
        "feature_0 at period 7.29, Q 1.85, filter 1 of values, share of time above",
        "feature_0 at period 34.7, share of variance",
        "feature_0 at period 0.395, Q 1, position at the end",
        "feature_0, last",
        "feature_0, observations (log)",
        "feature_0, frequency of the peak",
    ]


@pytest.mark.parametrize("variables", [2, 20])
def test_odd_series_have_finite_features(variables: int) -> None:
    some = [(one.times, one.values) for one in ragged(6, variables, longest=40)]
    one_row = ([3.0], np.ones((1, variables)))
    tied = (np.full(6, 2.0), np.arange(6.0)[:, None] * np.ones(variables))
    constant = (np.arange(12.0), np.full((12, variables), 2.0))
    lacking = (np.arange(9.0), np.full((9, variables), np.nan))
    whole = IrregularSeries.from_arrays(
        *zip(*some, one_row, tied, constant, lacking, strict=True), duplicates="keep", empty="keep"
    )
    for sample in (whole, whole[:6], whole[6:], whole[6:7]):
        features = ResonatorFeatures(random_state=0).fit(sample)
        found = features.transform(whole)
        assert np.isfinite(found).all()
        assert found.shape == (10, len(features.names()))


@pytest.mark.parametrize("kind", DRIVEN)
def test_seeds_decide_what_is_random(kind: type[Family]) -> None:
    series = ragged()
    first, same, other = (fitted(kind, series, seed) for seed in (0, 0, 1))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, same.arrays[name])
    is_same = all(np.array_equal(first.arrays[name], other.arrays[name]) for name in first.arrays)
    assert is_same == (kind is not Shape)


def test_groups_that_are_dropped_take_their_columns_with_them() -> None:
    series = ragged()
    features = ResonatorFeatures(random_state=0).fit(series)
    whole, names = features.transform(series), features.names()
    stays = features.keep(["spectrum", "summary"])
    assert [family.name for family in features.families_] == [
        "spectrum",
        "states",
        "summary",
        "observation",
    ]
    assert features.names() == [name for name, stay in zip(names, stays, strict=True) if stay]
    np.testing.assert_array_equal(features.transform(series), whole[:, stays])
    again = ResonatorFeatures().restore(*features.state())
    np.testing.assert_array_equal(again.transform(series), whole[:, stays])


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), most=st.integers(1, 40))
def test_similar_lengths_are_all_series_within_the_limit(lengths: list[int], most: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    series = IrregularSeries(np.zeros(offsets[-1]), np.zeros((offsets[-1], 1)), offsets)
    parts = list(similar_lengths(series, most))
    assert sorted(np.concatenate(parts)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * series.lengths[part].max() <= most
