from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from osciformer.data import collate
from osciformer.train.scores import (
    ClassScores,
    QuantileScores,
    RegressionScores,
    class_metrics,
)

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


def test_processes_together_give_the_metrics_of_one() -> None:
    series = shifted_series(21)
    logits = torch.randn(21, 2)
    whole, parts = ClassScores(), [ClassScores(), ClassScores()]
    whole.add(logits, collate(series))
    for rank, part in enumerate(parts):
        index = np.arange(rank, 21, 2)
        part.add(logits[index], collate(series, index))
    together = ClassScores.result([part.state() for part in parts])
    assert together == pytest.approx(ClassScores.result([whole.state()]))


def test_series_that_two_processes_share_counts_once() -> None:
    series = shifted_series(5)
    logits = torch.randn(5, 2)
    whole, again = ClassScores(), ClassScores()
    whole.add(logits, collate(series))
    again.add(logits[:1], collate(series, [0]))
    assert ClassScores.result([whole.state(), again.state()]) == ClassScores.result([whole.state()])


def test_regression_errors_are_in_the_unit_of_the_targets() -> None:
    series = shifted_series(3).replace(labels=[1.0, 2.0, 3.0])
    scores = RegressionScores([10.0])
    scores.add(torch.tensor([[1.0], [2.0], [6.0]]), collate(series))
    found = RegressionScores.result([scores.state()])
    assert found == pytest.approx({"rmse": (900 / 3) ** 0.5, "mae": 10.0})


def test_quantile_scores_pass_over_what_is_not_scored() -> None:
    series = shifted_series(2)
    targets = series.values.copy()
    targets[1:] = np.nan
    targets[0] = [1.0, 5.0]
    batch = collate(series, queries=series.replace(values=targets))
    levels = torch.tensor([0.0, 2.0, 4.0]).expand(*batch.values.shape, 3)
    scores = QuantileScores((0.1, 0.5, 0.9))
    scores.add(levels, batch)
    found = QuantileScores.result([scores.state(), np.zeros(5)])
    assert found["mae"] == pytest.approx(2.0)
    assert found["coverage"] == pytest.approx(0.5)
    assert found["rmse"] == pytest.approx(((1 + 9) / 2) ** 0.5)


def test_nothing_scored_is_not_a_number() -> None:
    assert np.isnan(QuantileScores.result([np.zeros(5)])["pinball"])
