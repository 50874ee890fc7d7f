from __future__ import annotations

import math

import pytest
import torch

from osciformer.models import forward_fill
from osciformer.models.forward_fill import AgeScale, known_after, known_at, positive_gaps

from .task_batches import make_batch, pad_with_garbage

NAN = torch.nan


def same(a, b):
    torch.testing.assert_close(a, b, equal_nan=True)


def filled_by_hand(batch):
    last, age = torch.full_like(batch.values, NAN), torch.full_like(batch.values, NAN)
    size, length, features = batch.values.shape
    for b in range(size):
        for f in range(features):
            value = since = NAN
            for n in range(length):
                if not batch.mask[b, n]:
                    continue
                if not math.isnan(batch.values[b, n, f]):
                    value, since = float(batch.values[b, n, f]), float(batch.times[b, n])
                last[b, n, f], age[b, n, f] = value, float(batch.times[b, n]) - since
    return last, age


@pytest.mark.parametrize("seed", range(3))
def test_forward_fill_is_the_loop_over_rows(seed):
    batch = make_batch(seed=seed)
    last, age = forward_fill(batch.values, batch.times, batch.mask)
    expected = filled_by_hand(batch)
    same(last[batch.mask], expected[0][batch.mask])
    same(age[batch.mask], expected[1][batch.mask])


def test_forward_fill_ignores_what_is_in_the_padding():
    batch = make_batch()
    padded = pad_with_garbage(batch)
    wanted = forward_fill(batch.values, batch.times, batch.mask)
    got = forward_fill(padded.values, padded.times, padded.mask)
    for mine, theirs in zip(got, wanted, strict=True):
        same(mine[:, :9][batch.mask], theirs[batch.mask])


def test_forward_fill_is_causal_to_the_last_bit():
    batch = make_batch(ragged=False)
    before = forward_fill(batch.values, batch.times)
    values, times = batch.values.clone(), batch.times.clone()
    values[:, 5:] = 7.0
    times[:, 5:] += 1.0
    after = forward_fill(values, times)
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine[:, :5].nan_to_num(-1.0), theirs[:, :5].nan_to_num(-1.0))


def test_ages_of_calendar_times_are_exact():
    times = torch.tensor([[1.7e9, 1.7e9 + 0.25]], dtype=torch.float64)
    age = forward_fill(torch.tensor([[[1.0], [NAN]]]), times)[1]
    assert age[0, 1, 0].item() == 0.25


def test_known_at_reads_between_rows_and_before_all():
    values = torch.tensor([[[1.0, NAN], [NAN, 2.0], [3.0, NAN]]])
    times = torch.tensor([[0.0, 1.0, 4.0]])
    asked = torch.tensor([[-1.0, 0.5, 4.0, 2.0]])
    last, age = known_at(values, times, asked)
    same(last, torch.tensor([[[NAN, NAN], [1.0, NAN], [3.0, 2.0], [1.0, 2.0]]]))
    same(age, torch.tensor([[[NAN, NAN], [0.5, NAN], [0.0, 3.0], [2.0, 1.0]]]))
    coming, until = known_after(values, times, asked)
    same(coming, torch.tensor([[[1.0, 2.0], [3.0, 2.0], [3.0, NAN], [3.0, NAN]]]))
    same(until, torch.tensor([[[1.0, 2.0], [3.5, 0.5], [0.0, NAN], [2.0, NAN]]]))


def test_known_after_ignores_padding():
    batch = make_batch(queries=6)
    padded = pad_with_garbage(batch)
    wanted = known_after(batch.values, batch.times, batch.query_times, batch.mask)
    got = known_after(padded.values, padded.times, batch.query_times, padded.mask)
    for mine, theirs in zip(got, wanted, strict=True):
        same(mine, theirs)


def test_age_scale_is_the_median_gap_and_is_not_rounded():
    times = torch.tensor([[0.0, 0.3, 0.3, 5.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    scale = AgeScale().fit(times, mask)
    same(positive_gaps(times, mask), torch.tensor([0.3, 4.7], dtype=torch.float64))
    assert scale.half().gap.dtype == torch.float64
    assert scale(torch.tensor([0.3])).item() == pytest.approx(math.log(2.0))


def test_age_scale_keeps_its_gap_where_there_is_none_to_see():
    assert AgeScale(3.0).fit(torch.tensor([[1.0], [2.0]])).gap.item() == 3.0
