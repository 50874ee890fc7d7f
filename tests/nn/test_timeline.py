from __future__ import annotations

import pytest
import torch

from osciformer.nn.timeline import TimeScale, last_observation, take_tokens
from osciformer.ops.padding import clean_times

NAN = torch.nan


@pytest.mark.parametrize(
    ("times", "mask", "expected"),
    [
        ([1.0, 2.0, NAN], [1, 1, 0], [1.0, 2.0, 2.0]),
        ([NAN, 2.0, 3.0], [0, 1, 1], [2.0, 2.0, 3.0]),
        ([1.0, NAN, 3.0], [1, 0, 1], [1.0, 1.0, 3.0]),
        ([NAN, torch.inf, -1.0], [0, 0, 0], [0.0, 0.0, 0.0]),
        # Present times are left alone, so that a decrease can be refused later.
        ([2.0, 1.0, 3.0], [1, 1, 1], [2.0, 1.0, 3.0]),
    ],
    ids=["end", "start", "inside", "all", "decreasing"],
)
def test_padding_takes_the_time_before_it(times, mask, expected):
    cleaned = clean_times(torch.tensor([times]), torch.tensor([mask]).bool())
    assert cleaned.tolist() == [expected]


def test_padding_gets_no_gradient_and_follows_the_time_it_stands_for():
    times = torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
    clean_times(times, torch.tensor([[True, True, False]])).sum().backward()
    assert times.grad.tolist() == [[1.0, 2.0, 0.0]]


def test_last_observation_skips_absent_tokens_and_takes_the_last_of_a_tie():
    times = torch.tensor([[0.0, 1.0, 1.0, 2.0]])
    mask = torch.tensor([[True, True, True, False]])
    query_times = torch.tensor([[3.0, 1.0, 0.5, -1.0]])
    assert last_observation(times, query_times, mask).tolist() == [[2, 2, 0, -1]]
    assert last_observation(times, query_times).tolist() == [[3, 2, 0, -1]]
    assert last_observation(times, query_times, mask, backfill=True).tolist() == [[2, 2, 0, 0]]
    nothing = torch.zeros_like(mask)
    assert last_observation(times, query_times, nothing, backfill=True).tolist() == [[-1] * 4]


def test_tokens_of_no_observation_are_zero():
    tokens = torch.tensor([[[1.0], [2.0]]])
    assert take_tokens(tokens, torch.tensor([[1, -1]])).tolist() == [[[2.0], [0.0]]]
    assert take_tokens(tokens[:, :0], torch.tensor([[-1]])).tolist() == [[[0.0]]]


def test_the_unit_is_the_longest_span_and_ignores_padding():
    times = torch.tensor([[10.0, 12.0, 14.0], [11.0, 12.0, NAN]])
    scale = TimeScale().fit(times, torch.tensor([[True] * 3, [True, True, False]]))
    assert (scale.reference.item(), scale.scale.item()) == (10.0, 4.0)
    assert scale(torch.tensor([[10.0, 16.0]])).tolist() == [[0.0, 1.5]]


def test_time_stamps_keep_their_fractions():
    scale = TimeScale(reference=1.7e9, scale=3600.0)
    times = 1.7e9 + torch.tensor([[0.0, 0.25, 7.5]], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        scale = scale.to(dtype)
        assert scale(times).tolist() == [[0.0, 0.25 / 3600, 7.5 / 3600]]


def test_the_unit_is_saved_with_the_weights():
    other = TimeScale()
    other.load_state_dict(TimeScale(3.0, 7.0).state_dict())
    assert (other.reference.item(), other.scale.item()) == (3.0, 7.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TimeScale(0.0, 0.0), "scale must be a positive, finite length of time; got 0.0"),
        (lambda: TimeScale(NAN, 1.0), "reference must be a finite time"),
        (lambda: TimeScale().fit(torch.ones(2, 3)), "the longest span is 0.0"),
        (lambda: TimeScale().fit(torch.ones(1, 1), torch.tensor([[False]])), "mask is all False"),
    ],
    ids=["scale", "reference", "span", "mask"],
)
def test_impossible_units_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
