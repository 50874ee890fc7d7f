from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from osciformer.train.curves import auroc, average_precision

ranked = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40).filter(
    lambda pairs: 0 < sum(p for p, _ in pairs) < len(pairs)
)


@given(ranked)
def test_areas_equal_those_of_scikit_learn(pairs: list[tuple[bool, int]]) -> None:
    truth = np.array([p for p, _ in pairs])
    score = np.array([s for _, s in pairs], dtype=float)
    assert auroc(truth, score) == pytest.approx(roc_auc_score(truth, score))
    assert average_precision(truth, score) == pytest.approx(average_precision_score(truth, score))


@given(ranked)
def test_opposite_scores_give_the_complement(pairs: list[tuple[bool, int]]) -> None:
    truth = np.array([p for p, _ in pairs])
    score = np.array([s for _, s in pairs], dtype=float)
    assert auroc(truth, score) + auroc(truth, -score) == pytest.approx(1.0)


def test_one_class_has_no_area() -> None:
    assert math.isnan(auroc(np.array([True, True]), np.array([0.1, 0.2])))
    assert math.isnan(average_precision(np.array([False]), np.array([0.1])))
