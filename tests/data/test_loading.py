"""Series through PyTorch's DataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from osciformer.data import Batch, SeriesDataset, make_loader

from .series_cases import random_series


def order(loader: DataLoader[Batch]) -> list[list[int]]:
    return [batch.index.tolist() for batch in loader]


def test_batches_are_those_of_the_container() -> None:
    series = random_series(20)
    assert series.labels is not None
    for batch in make_loader(series, 4, weight=np.arange(20)):
        assert isinstance(batch, Batch)
        assert batch.labels is not None
        assert batch.weight is not None
        assert batch.labels.tolist() == series.labels[batch.index].tolist()
        assert batch.weight.tolist() == batch.index.tolist()
        assert batch.mask.sum(dim=1).tolist() == series.lengths[batch.index].tolist()


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
def test_workers_change_nothing() -> None:
    series = random_series(20)
    alone, helped = make_loader(series, 4), make_loader(series, 4, num_workers=2)
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.times, other.times)
        assert torch.equal(one.values.nan_to_num(7.0), other.values.nan_to_num(7.0))


def test_epochs_differ_and_repeat() -> None:
    loader: Any = make_loader(random_series(40), 4)
    first = order(loader)
    loader.sampler.set_epoch(1)
    second = order(loader)
    loader.sampler.set_epoch(0)
    assert first == order(loader)
    assert first != second


def test_iterating_leaves_the_global_seed_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(make_loader(random_series(8), 4))
    assert torch.equal(torch.rand(2), expected)


def test_a_single_position_is_a_batch_of_one() -> None:
    dataset = SeriesDataset(random_series(5))
    assert len(dataset) == 5
    assert dataset[3].index.tolist() == [3]
