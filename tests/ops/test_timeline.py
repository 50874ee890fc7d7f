"""Rows and keys on one time line: who shares a slot, and what nobody sees."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops.attention.blocked.timeline import CrossTimeline, SelfTimeline

from .cases import DOUBLE, tensor


def random_times(batch, length, seed, ties=False):
    g = torch.Generator().manual_seed(seed)
    times = torch.rand(batch, length, generator=g, dtype=DOUBLE).sort(1).values
    return (times * 6).round() / 6 if ties else times


def reach(line, num_keys):
    """Return ``[B, M, N]``: which keys sit in slots before each row's position, by its own maps."""
    positions, fan = line.levels.padded, line.levels.fan
    slot, position = torch.arange(positions * fan) // fan, torch.arange(positions)[:, None]
    met = torch.where(slot < position, 0.0, -torch.inf).expand(line.gaps.shape[0], 1, -1, -1)
    if line.present is not None:
        met = met.masked_fill(~line.present[:, None, None], -torch.inf)
    by_row = line.positions_to_rows(met.transpose(1, 2))  # [B, M, 1, places]
    return line.places_to_keys(by_row, num_keys)[:, :, 0] == 0.0


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize(
    ("num_rows", "num_keys"), [(1, 1), (1, 8), (8, 1), (5, 5), (3, 17), (17, 3), (4, 100)]
)
def test_each_row_reaches_exactly_the_keys_up_to_its_time(num_rows, num_keys, ties):
    rows, keys = random_times(3, num_rows, 0, ties), random_times(3, num_keys, 1, ties)
    line = CrossTimeline(rows, keys, None)
    assert torch.equal(reach(line, keys.shape[1]), keys[:, None] <= rows[:, :, None])


def test_absent_keys_are_reached_by_no_row():
    rows, keys = random_times(2, 4, 0), random_times(2, 9, 1)
    mask = torch.rand(2, 9) < 0.5
    line = CrossTimeline(rows, keys, mask)
    want = (keys[:, None] <= rows[:, :, None]) & mask[:, None]
    assert torch.equal(reach(line, keys.shape[1]), want)


@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 8), (5, 5), (3, 17), (17, 3)])
def test_positions_are_sorted_and_keys_age_toward_them(num_rows, num_keys):
    rows, keys = random_times(3, num_rows, 0), random_times(3, num_keys, 1)
    line = CrossTimeline(rows, keys, None)
    assert (line.gaps >= 0).all()
    assert (line.age >= 0).all()
    ends = line.starts + line.gaps  # of the span that leads to each slot
    torch.testing.assert_close(line.starts[:, 1:], ends[:, :-1])
    torch.testing.assert_close(line.positions_to_rows(line.starts), rows)
    at_places = line.keys_to_places(keys)
    there = line.present
    assert torch.equal(line.key_times[there], at_places[there])
    slot_times = ends.repeat_interleave(line.levels.fan, dim=1)
    torch.testing.assert_close((slot_times - at_places)[there], line.age[there])
    assert (line.age[~there] == 0).all()


@pytest.mark.parametrize(("num_rows", "num_keys"), [(8, 64), (64, 8), (20, 20)])
def test_the_line_is_no_longer_than_rows_and_keys_ask_for(num_rows, num_keys):
    rows, keys = random_times(1, num_rows, 0), random_times(1, num_keys, 1)
    line = CrossTimeline(rows, keys, None)
    assert line.levels.num_slots <= 2 * num_rows + 1
    assert line.levels.fan == max(1, num_keys // num_rows)
    assert line.gaps.shape == (1, line.levels.padded)


def test_rows_go_to_their_positions_and_back():
    rows, keys = random_times(2, 6, 0), random_times(2, 11, 1)
    line = CrossTimeline(rows, keys, None)
    x = torch.randn(2, 6, 3)
    assert torch.equal(line.positions_to_rows(line.rows_to_positions(x)), x)
    holds_query = line.holds_query[:, : line.levels.padded]
    assert holds_query.sum(1).tolist() == [6, 6]
    torch.testing.assert_close(line.starts[holds_query].reshape(2, 6), rows)


def test_keys_after_the_last_row_are_left_out():
    rows, keys = tensor([[1.0, 2.0]]), tensor([[0.5, 1.5, 2.5, 3.5]])
    line = CrossTimeline(rows, keys, None)
    assert line.present.sum().item() == 2
    assert (line.starts + line.gaps <= 2.0).all()


def test_gaps_and_ages_are_differentiable():
    rows, keys = random_times(1, 3, 0).requires_grad_(), random_times(1, 9, 1).requires_grad_()
    line = CrossTimeline(rows, keys, None)
    grad_rows, grad_keys = torch.autograd.grad(
        line.gaps.square().sum() + line.age.square().sum(), (rows, keys)
    )
    assert (grad_rows != 0).any()
    assert (grad_keys != 0).any()


def test_self_attention_needs_one_slot_less_than_tokens():
    times = random_times(2, 7, 0)
    line = SelfTimeline(times, times, None)
    assert line.levels.num_slots == 6
    assert line.age is line.gaps
    assert torch.equal(line.gaps[:, :6], times.diff())
    assert torch.equal(reach(line, 7), torch.ones(7, 7).tril(-1).bool().expand(2, 7, 7))
    x = torch.randn(2, 7, 3)
    assert torch.equal(line.positions_to_rows(line.rows_to_positions(x)), x)
    assert torch.equal(line.keys_to_places(x)[:, :7], x)


def test_self_attention_keeps_the_gradients_of_two_equal_times_apart():
    times = random_times(1, 4, 0)
    rows, keys = times.clone().requires_grad_(), times.clone().requires_grad_()
    line = SelfTimeline(rows, keys, None)
    age_rows, age_keys = torch.autograd.grad(line.age.sum(), (rows, keys))
    assert age_rows.tolist() == [[0.0, 1.0, 1.0, 1.0]]
    assert age_keys.tolist() == [[-1.0, -1.0, -1.0, 0.0]]
