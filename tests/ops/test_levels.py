"""Every row meets every key before it, once."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops.attention.blocked.timeline import Levels


def meetings(levels):
    """Count how often each (position, place of a key) is met over all levels."""
    total = levels.padded
    count = torch.zeros(total, total * levels.fan, dtype=torch.int64)
    rows, keys = torch.arange(total)[:, None], torch.arange(total * levels.fan)[:, None]
    for level in range(levels.num_levels):
        for group in levels.groups(level):
            row_blocks, key_blocks = group.rows(rows)[..., 0], group.keys(keys)[..., 0]
            assert row_blocks.shape == (group.count, group.row_length)
            assert key_blocks.shape == (group.count, group.size * group.fan)
            for row_block, key_block in zip(row_blocks, key_blocks, strict=True):
                count[row_block[:, None], key_block] += 1
    return count


@pytest.mark.parametrize("fan", [1, 2, 3])
@pytest.mark.parametrize("first", range(1, 131, 13), ids=lambda n: f"slots {n}..{n + 12}")
def test_every_pair_is_met_exactly_once(first, fan):
    for num_slots in range(first, first + 13):
        levels = Levels(num_slots, fan)
        count = meetings(levels)[: num_slots + 1, : num_slots * fan]
        position = torch.arange(num_slots + 1)[:, None]
        slot = torch.arange(num_slots * fan) // fan
        assert torch.equal(count, (slot < position).long()), num_slots


@pytest.mark.parametrize("num_slots", [1, 2, 63, 64, 65, 127, 128, 1000, 4097])
def test_padding_is_small(num_slots):
    levels = Levels(num_slots, 1)
    assert levels.padded >= num_slots + 1
    assert levels.padded <= max(64, num_slots * 1.2)


@pytest.mark.parametrize("num_slots", [5, 70, 130])
def test_spans_lead_from_keys_to_rows_and_to_the_parents_end(num_slots):
    """Positions are times here, so that a span's length is known."""
    levels = Levels(num_slots, 1)
    ends = torch.arange(levels.padded + 1)[:, None]
    lengths = torch.ones(levels.padded)
    for level in range(levels.num_levels):
        size = 1 << level
        for group in levels.groups(level):
            start = group.at_rows(ends)[:, 0, 0]
            assert torch.equal(start, torch.arange(group.count) * 2 * size + group.origin + size)
            end = group.at_parent_end(ends)[:, 0, 0]
            whole = start + size
            if group.count == 1:
                whole = whole.clamp(max=levels.padded)
            assert torch.equal(end, whole)
            assert (lengths[group.spans_before_rows] == size).all()
            # The last block may be cut short, and then has nothing after its keys to add.
            after = lengths[group.spans_after_keys]
            assert (after[: group.count - 1] == size).all()
        if lengths.shape[0] % 2:
            lengths = torch.cat([lengths, lengths.new_zeros(1)])
        lengths = lengths[0::2] + lengths[1::2]
