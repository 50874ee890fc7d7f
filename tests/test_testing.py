from __future__ import annotations

import pytest
import torch

from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    assert_parity,
    assert_time_shift_invariant,
    irregular_batch,
    relative_error,
)


def running_mean(x, times, mask):
    """A causal layer that respects the mask."""
    if mask is None:
        mask = torch.ones_like(times, dtype=torch.bool)
    x = torch.where(mask[..., None], x, 0.0)
    return x.cumsum(dim=1) / mask.cumsum(dim=1).clamp(min=1)[..., None]


def whole_mean(x, times, mask):
    return running_mean(x, times, mask)[:, -1:].expand_as(x).nan_to_num()


def sum_with_padding(x, times, mask):
    return x.nan_to_num().cumsum(dim=1)


def last_time(x, times, mask):
    return times.nan_to_num().cummax(dim=1).values[..., None].expand_as(x)


def next_time(x, times, mask):
    return times.roll(-1, dims=1)[..., None].expand_as(x)


def place_in_batch(x, times, mask):
    return torch.arange(len(x), dtype=x.dtype)[:, None, None].expand_as(x)


BATCH = irregular_batch(3, 6, 2, ragged=False)
RAGGED = irregular_batch(3, 6, 2)


def test_a_causal_layer_passes_every_law():
    assert_causal(running_mean, RAGGED.x, RAGGED.times, RAGGED.mask)
    assert_padding_invariant(running_mean, RAGGED.x, RAGGED.times, RAGGED.mask)
    assert_time_shift_invariant(running_mean, BATCH.x, BATCH.times)
    assert_batch_order_invariant(running_mean, BATCH.x, BATCH.times)


@pytest.mark.parametrize("leak", [whole_mean, next_time], ids=["values", "times"])
def test_a_leak_of_values_or_times_is_found(leak):
    with pytest.raises(AssertionError, match=r"tokens 1\.\.1 reach the past"):
        assert_causal(leak, BATCH.x, BATCH.times)


def test_tied_tokens_may_see_each_other():
    tied = irregular_batch(2, 6, 2, ragged=False, ties=True)

    def mean_up_to_now(x, times, mask):
        seen = (times[:, None, :] <= times[:, :, None]).to(x.dtype)
        return seen @ x

    assert_causal(mean_up_to_now, tied.x, tied.times)


@pytest.mark.parametrize("layer", [sum_with_padding, lambda x, t, m: x], ids=["huge", "nan"])
def test_a_layer_that_reads_padding_is_found(layer):
    with pytest.raises(AssertionError, match="padding of"):
        assert_padding_invariant(layer, RAGGED.x, RAGGED.times, RAGGED.mask)


def test_a_layer_that_knows_the_clock_is_found():
    with pytest.raises(AssertionError, match=r"shift of all times by 64\.0"):
        assert_time_shift_invariant(last_time, BATCH.x, BATCH.times)


def test_a_layer_that_knows_its_place_is_found():
    with pytest.raises(AssertionError, match="order of the batch"):
        assert_batch_order_invariant(place_in_batch, BATCH.x, BATCH.times)


def test_parity_compares_outputs_and_gradients():
    x = torch.randn(4)
    index = torch.tensor([0, 2])
    assert_parity(lambda a, i: a[i].sin(), lambda a, i: a.sin()[i], (x, index), tolerance=1e-6)
    with pytest.raises(AssertionError, match="output differs by"):
        assert_parity(torch.sin, torch.cos, (x,), tolerance=1e-6)
    with pytest.raises(AssertionError, match="gradient of input 0 differs by"):
        assert_parity(lambda a: a + (a - a.detach()), lambda a: a.clone(), (x,), tolerance=1e-6)


def test_errors_are_relative_and_nan_is_infinitely_wrong():
    assert relative_error(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 10.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([torch.nan]), torch.tensor([1.0])) == float("inf")
    with pytest.raises(AssertionError, match="shapes differ"):
        relative_error(torch.zeros(2), torch.zeros(3))


def test_the_toy_batch_is_padded_sorted_and_reproducible():
    batch = irregular_batch(3, 9, 2, ties=True, dtype=torch.float32)
    assert batch.x.dtype == batch.times.dtype == torch.float32
    assert batch.mask.sum(dim=1).tolist() == [9, 7, 5]
    assert torch.equal(batch.times.isnan(), ~batch.mask)
    assert bool((batch.times.diff(dim=1)[batch.mask[:, 1:]] >= 0).all())
    assert torch.equal(batch.times[:, 1], batch.times[:, 2])
    again = irregular_batch(3, 9, 2, ties=True, dtype=torch.float32)
    assert torch.equal(batch.x.nan_to_num(), again.x.nan_to_num())
    other = irregular_batch(3, 9, 2, ties=True, dtype=torch.float32, seed=1)
    assert not torch.equal(batch.x.nan_to_num(), other.x.nan_to_num())
