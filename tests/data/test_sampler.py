"""Batches by length: each series once, the same on every machine, little padding."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.data import LengthBatches, padding_fraction

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(lengths, st.integers(1, 9), st.booleans(), st.integers(1, 3), st.integers(0, 5))
def test_each_series_comes_once_per_epoch(
    lengths: list[int], batch_size: int, shuffle: bool, pool_batches: int, epoch: int
) -> None:
    sampler = LengthBatches(lengths, batch_size, shuffle=shuffle, pool_batches=pool_batches)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


@given(lengths, st.integers(2, 5), st.integers(2, 4), st.booleans())
def test_ranks_together_hold_the_batches_of_one_process(
    lengths: list[int], batch_size: int, world_size: int, shuffle: bool
) -> None:
    ranks = [
        list(LengthBatches(lengths, batch_size, shuffle=shuffle, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    alone = list(LengthBatches(lengths, batch_size * world_size, shuffle=shuffle))
    assert {len(batches) for batches in ranks} == {len(alone)}
    for step, whole in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        assert all(0 < len(part) <= batch_size for part in parts)
        assert set(chain.from_iterable(parts)) == set(whole)
        if len(whole) >= world_size:
            assert sorted(chain.from_iterable(parts)) == sorted(whole)


def test_seed_and_epoch_decide_the_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 200)

    def batches(seed: int, epoch: int) -> list[list[int]]:
        sampler = LengthBatches(lengths, 8, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(0, 0) == batches(0, 0)
    assert batches(0, 0) != batches(0, 1)
    assert batches(0, 0) != batches(1, 0)


def test_a_series_meets_others_in_each_epoch() -> None:
    sampler = LengthBatches(np.arange(1, 65), 8)
    companions = set()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        companions.add(next(frozenset(batch) for batch in sampler if 30 in batch))
    assert len(companions) == 5


def test_little_is_padding() -> None:
    lengths = np.random.default_rng(0).geometric(0.01, 20_000)
    shuffled = list(LengthBatches(lengths, 32))
    plain = np.array_split(np.arange(len(lengths)), len(shuffled))
    assert padding_fraction(lengths, plain) > 0.6
    assert padding_fraction(lengths, shuffled) < 0.06
    assert padding_fraction(lengths, list(LengthBatches(lengths, 32, shuffle=False))) < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "n > 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"pool_batches": 0}, "pool_batches must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthBatches(**{"lengths": [1, 2], "batch_size": 1, **settings})
