from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from osciformer.data import collate
from osciformer.train import Classification, Quantiles, Regression, class_metrics
from osciformer.train.tasks import Scores

from .toy import shifted_series


@pytest.mark.parametrize("num_classes", [2, 4])
def test_class_metrics_equal_those_of_scikit_learn(num_classes: int) -> None:
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(50, num_classes)), np.arange(50) % num_classes
    chance = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = class_metrics(logits, labels)
    given = chance[:, 1] if num_classes == 2 else chance
    areas = [roc_auc_score(labels == k, chance[:, k]) for k in range(num_classes)]
    assert found["log_loss"] == pytest.approx(log_loss(labels, chance))
    assert found["accuracy"] == pytest.approx((chance.argmax(axis=1) == labels).mean())
    wanted = roc_auc_score(labels, given) if num_classes == 2 else np.mean(areas)
    assert found["auroc"] == pytest.approx(wanted)


def scores_of(task: Any, output: torch.Tensor, batch: Any) -> Scores:
    scores = Scores(task)
    scores.add(output, batch)
    return scores


def test_processes_together_give_the_metrics_of_one() -> None:
    series, task = shifted_series(21), Classification(2)
    logits = torch.randn(21, 2)
    whole = scores_of(task, logits, collate(series))
    parts = [
        scores_of(task, logits[index], collate(series, index))
        for index in (np.arange(0, 21, 2), np.arange(1, 21, 2))
    ]
    idle = Scores(task)
    together = whole.result([part.state() for part in (*parts, idle)])
    assert together == pytest.approx(whole.result([whole.state()]))


def test_series_that_two_processes_share_counts_once() -> None:
    series, task = shifted_series(5), Classification(2)
    logits = torch.randn(5, 2)
    whole = scores_of(task, logits, collate(series))
    again = scores_of(task, logits[:1], collate(series, [0]))
    assert whole.result([whole.state(), again.state()]) == whole.result([whole.state()])


def test_regression_errors_are_in_the_unit_of_the_targets() -> None:
    series = shifted_series(3).replace(labels=[1.0, 2.0, 3.0])
    output = torch.tensor([[1.0], [2.0], [6.0]])
    scores = scores_of(Regression([10.0]), output, collate(series))
    found = scores.result([scores.state()])
    assert found == pytest.approx({"rmse": (900 / 3) ** 0.5, "mae": 10.0})


def test_quantile_scores_pass_over_what_is_not_scored() -> None:
    series = shifted_series(2)
    targets = series.values.copy()
    targets[1:] = np.nan
    targets[0] = [1.0, 5.0]
    batch = collate(series, queries=series.replace(values=targets))
    levels = torch.tensor([0.0, 2.0, 4.0]).expand(*batch.values.shape, 3)
    scores = scores_of(Quantiles((0.1, 0.5, 0.9)), levels, batch)
    found = scores.result([scores.state()])
    assert found["mae"] == pytest.approx(2.0)
    assert found["coverage"] == pytest.approx(0.5)
    assert found["rmse"] == pytest.approx(((1 + 9) / 2) ** 0.5)


def test_nothing_scored_is_not_a_number() -> None:
    assert np.isnan(Quantiles((0.5,)).summarise(*np.zeros((5, 3)))["pinball"])


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1, 1]])
def test_area_without_a_class_is_not_a_number(labels: list[int]) -> None:
    found = class_metrics(np.random.default_rng(0).normal(size=(3, 2)), np.array(labels))
    assert np.isnan([found["auroc"], found["auprc"]]).all()


def test_metrics_of_logits_that_are_not_numbers_are_not_numbers() -> None:
    found = class_metrics(np.full((4, 2), np.nan), np.array([0, 1, 0, 1]))
    assert np.isnan([found["log_loss"], found["auroc"], found["auprc"]]).all()


ranked = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40).filter(
    lambda pairs: 0 < sum(p for p, _ in pairs) < len(pairs)
)


@given(ranked)
def test_areas_with_ties_equal_those_of_scikit_learn(pairs: list[tuple[bool, int]]) -> None:
    truth = np.array([p for p, _ in pairs])
    score = np.array([s for _, s in pairs], dtype=float)
    found = class_metrics(np.stack([np.zeros_like(score), score], 1), truth.astype(int))
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, score))
    assert found["auprc"] == pytest.approx(average_precision_score(truth, score))
