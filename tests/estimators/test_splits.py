from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from osciformer.estimators.base import split


@given(
    classes=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 9),
)
def test_parts_are_disjoint_sorted_and_complete(
    classes: list[int], fraction: float, seed: int
) -> None:
    labels = np.array(classes)
    train, validation = split(labels, fraction, np.random.default_rng(seed))
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    assert set(labels[train]) == set(classes)


def test_each_class_gives_its_share() -> None:
    labels = np.array([0] * 100 + [1] * 20)
    _, validation = split(labels, 0.2, np.random.default_rng(0))
    assert np.bincount(labels[validation]).tolist() == [20, 4]


def test_zero_leaves_all_for_training() -> None:
    train, validation = split(np.zeros(5, dtype=np.int64), 0.0, np.random.default_rng(0))
    assert (len(train), len(validation)) == (5, 0)
