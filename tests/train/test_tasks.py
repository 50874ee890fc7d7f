from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from osciformer.data import collate
from osciformer.train import Classification, Quantiles, Regression, Task

from .toy import shifted_series


def test_class_weights_and_sample_weights_multiply() -> None:
    series = shifted_series(12)
    batch = collate(series, weight=np.linspace(0, 2, 12))
    logits = torch.randn(12, 2)
    total, count = Classification(2, class_weight=(1.0, 3.0)).loss(logits, batch)
    assert batch.labels is not None
    assert batch.weight is not None
    weight = batch.weight * torch.tensor([1.0, 3.0])[batch.labels]
    each = functional.cross_entropy(logits, batch.labels, reduction="none")
    assert count == pytest.approx(weight.sum().item())
    assert total == pytest.approx((weight * each).sum().item())


@pytest.mark.parametrize(
    ("task", "output_shape"),
    [
        (Classification(2, class_weight=(1.0, 2.0), label_smoothing=0.1), (2,)),
        (Regression(criterion="huber"), (1,)),
        (Regression(criterion="mse"), (1,)),
    ],
    ids=["classification", "huber", "mse"],
)
def test_sums_and_counts_of_parts_add_up(task: Task, output_shape: tuple[int, ...]) -> None:
    series = shifted_series(10)
    if isinstance(task, Regression):
        series = series.replace(labels=np.linspace(-3, 3, 10))
    output = torch.randn(10, *output_shape)
    whole = task.loss(output, collate(series))
    parts = [task.loss(output[part], collate(series, part)) for part in ([0, 1, 2], range(3, 10))]
    for number in (0, 1):
        assert whole[number].item() == pytest.approx(sum(p[number].item() for p in parts), rel=1e-5)


def test_weight_zero_takes_a_series_out() -> None:
    series = shifted_series(4)
    targets = series.replace(values=series.values)
    batch = collate(series, weight=[1, 0, 0, 0], queries=targets)
    output = torch.randn(*batch.values.shape, 3)
    task = Quantiles((0.1, 0.5, 0.9))
    alone = collate(series[:1], queries=targets[:1])
    total, count = task.loss(output, batch)
    wanted = task.loss(output[:1, : alone.values.shape[1]], alone)
    assert (total.item(), count.item()) == pytest.approx((wanted[0].item(), wanted[1].item()))


def test_pinball_of_the_median_is_half_the_absolute_error() -> None:
    series = shifted_series(3)
    batch = collate(series, queries=series)
    total, count = Quantiles((0.5,)).loss(torch.zeros(*batch.values.shape, 1), batch)
    assert (total / count).item() == pytest.approx(0.5 * np.abs(series.values).mean(), rel=1e-5)


def test_batch_without_targets_has_count_zero_and_no_gradient() -> None:
    series = shifted_series(2)
    batch = collate(series, queries=series.replace(values=np.full_like(series.values, np.nan)))
    output = torch.randn(*batch.values.shape, 3, requires_grad=True)
    total, count = Quantiles((0.1, 0.5, 0.9)).loss(output, batch)
    total.backward()
    assert count.item() == 0
    assert output.grad is not None
    assert (output.grad == 0).all()


def test_unknown_monitor_names_the_metrics() -> None:
    with pytest.raises(ValueError, match="'auto', 'loss' or one of 'rmse', 'mae'; got 'auroc'"):
        Regression().resolve_monitor("auroc")
    assert Classification(2, monitor="auroc").resolve_monitor("auto") == "auroc"


def test_query_task_without_targets_is_refused() -> None:
    batch = replace(collate(shifted_series(2)), targets=None)
    with pytest.raises(ValueError, match="must have query times and targets"):
        Quantiles((0.5,)).loss(torch.zeros(2, 1, 2, 1), batch)
