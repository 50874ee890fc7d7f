from __future__ import annotations

import pytest
import torch

from osciformer.nn import Encoder, EncoderBlock, OscillatorAttention
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
    relative_error,
)

DIM = 8
CAUSAL_QUERIES = ("hold", "linear", "ridge_causal", "anchored", "learned")


def make_encoder(query: str = "hold", num_layers: int = 2) -> Encoder:
    return Encoder(
        EncoderBlock(
            OscillatorAttention(DIM, 2, query=query, num_modes=3, omega_range=(0.5, 20.0)),
            feedforward_dim=12,
        )
        for _ in range(num_layers)
    ).double()


@pytest.fixture
def batch():
    return irregular_batch(3, 7, DIM)


@pytest.mark.parametrize("query", CAUSAL_QUERIES)
def test_the_future_does_not_reach_the_past_through_a_stack(query):
    batch = irregular_batch(2, 7, DIM, ragged=False)
    encoder = make_encoder(query)
    assert_causal(lambda *args: encoder(*args).states, batch.x, batch.times)


def test_padding_and_batch_order_change_nothing(batch):
    encoder = make_encoder()
    args = (lambda *args: encoder(*args).states, batch.x, batch.times, batch.mask)
    assert_padding_invariant(*args)
    assert_batch_order_invariant(*args)


@pytest.mark.parametrize("query", CAUSAL_QUERIES)
def test_a_read_at_an_observation_is_its_state(batch, query):
    encoder = make_encoder(query)
    encoded = encoder(batch.x, batch.times, batch.mask, batch.times.nan_to_num(5.0))
    assert relative_error(encoded.reads[batch.mask], encoded.states[batch.mask]) < 1e-9


def test_reads_afterwards_and_along_the_way_are_the_same(batch):
    encoder = make_encoder()
    query_times = torch.tensor([[3.0, -1.0, 0.4]], dtype=torch.float64).expand(3, 3)
    encoded = encoder(batch.x, batch.times, batch.mask, query_times)
    assert torch.equal(encoder.read(encoded, query_times), encoded.reads)


def test_a_read_before_the_first_observation_is_the_same_for_all_series(batch):
    encoder = make_encoder()
    encoded = encoder(batch.x, batch.times, batch.mask)
    reads = encoder.read(encoded, torch.full((3, 1), -1.0, dtype=torch.float64))
    assert bool(reads.isfinite().all())
    assert torch.equal(reads, reads[:1].expand_as(reads))


def test_internals_come_one_per_block_and_do_not_change_the_states(batch):
    encoder = make_encoder()
    plain = encoder(batch.x, batch.times, batch.mask)
    inspected = encoder(batch.x, batch.times, batch.mask, return_internals=True)
    assert plain.internals == ()
    assert len(inspected.internals) == 2
    assert inspected.internals[0].weights.shape == (3, 2, 7, 7)
    assert relative_error(inspected.states, plain.states) < 1e-12


def test_last_and_mean_count_present_observations_only(batch):
    encoder = make_encoder()
    mask = batch.mask.clone()
    mask[2] = False
    encoded = encoder(batch.x, batch.times, mask)
    count = int(mask[1].sum())
    assert torch.equal(encoded.last()[1], encoded.states[1, count - 1])
    torch.testing.assert_close(encoded.mean()[1], encoded.states[1, :count].mean(dim=0))
    assert bool((encoded.last()[2] == 0).all())
    assert bool((encoded.mean()[2] == 0).all())
    whole = encoder(batch.x[:1], batch.times[:1])
    assert torch.equal(whole.last(), whole.states[:, -1])


def test_blocks_of_different_widths_are_refused():
    blocks = [EncoderBlock(OscillatorAttention(dim, 2)) for dim in (4, 8)]
    with pytest.raises(ValueError, match=r"got widths \[4, 8\]"):
        Encoder(blocks)
    with pytest.raises(ValueError, match="at least one"):
        Encoder([])
