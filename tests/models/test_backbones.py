from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from osciformer.baselines import GRUD, DotProductAttention, TimeTransformer
from osciformer.baselines.gru_d import DecayRecurrence
from osciformer.models import Backbone, SeriesModelConfig
from osciformer.models.backbones import make_backbone
from osciformer.nn.encoder import EncoderBlock
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
)

from .task_batches import FEATURES, make_batch

BACKBONES = ("osciformer", "transformer", "gru_d")


def make(backbone: str, direction: str = "causal") -> Backbone:
    config = SeriesModelConfig(
        input_dim=FEATURES,
        output_dim=1,
        dim=8,
        backbone=backbone,
        backbone_options={"direction": direction},
    )
    return make_backbone(config, FEATURES).double().eval()


def states_of(backbone: Backbone):
    def apply(x: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        return backbone.encode(x, times, present).states

    return apply


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", BACKBONES)
def test_padding_and_the_order_of_the_batch_change_nothing(name, direction):
    apply, batch = states_of(make(name, direction)), irregular_batch(dim=FEATURES)
    assert_padding_invariant(apply, batch.x, batch.times, batch.mask, tolerance=1e-9)
    assert_batch_order_invariant(apply, batch.x, batch.times, batch.mask)


@pytest.mark.parametrize("name", BACKBONES)
def test_causal_states_do_not_see_the_future(name):
    batch = irregular_batch(dim=FEATURES, ragged=False)
    assert_causal(states_of(make(name)), batch.x, batch.times)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_unit_of_time_does_not_matter_once_it_is_fitted(name):
    batch = irregular_batch(dim=FEATURES, ragged=False)
    mask = torch.ones_like(batch.times, dtype=torch.bool)
    backbone = make(name)

    def states(times: Tensor) -> tuple[Tensor, Tensor]:
        backbone.fit_time_scale(times, mask, torch.Generator().manual_seed(0))
        encoded = backbone.encode(batch.x, times, mask)
        return encoded.states, backbone.read(encoded, times[:, :3] + 0.1 * times[0, -1])

    for mine, theirs in zip(states(batch.times), states(3600.0 * batch.times), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_a_read_at_an_observation_is_its_state():
    batch = irregular_batch(dim=FEATURES, ragged=False)
    mask = torch.ones_like(batch.times, dtype=torch.bool)
    for name in ("osciformer", "transformer"):
        backbone = make(name)
        encoded = backbone.encode(batch.x, batch.times, mask)
        torch.testing.assert_close(backbone.read(encoded, batch.times), encoded.states)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", BACKBONES)
def test_reading_a_series_is_encoding_it_and_reading(name, direction):
    backbone, batch = make(name, direction), irregular_batch(dim=FEATURES)
    asked = torch.rand(len(batch.times), 5, dtype=torch.float64) * batch.times[batch.mask].max()
    values = batch.x.clone().requires_grad_()
    results = []
    for reads in (
        backbone.read(backbone.encode(values, batch.times, batch.mask), asked),
        backbone.read_series(values, batch.times, batch.mask, None, asked),
    ):
        weights = list(backbone.parameters())
        found = torch.autograd.grad(
            reads.square().sum(), [values, *weights], materialize_grads=True, allow_unused=True
        )
        results.append((reads, *found))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["osciformer", "transformer"])
def test_reading_a_series_skips_the_last_block_of_the_observations(name):
    backbone, batch = make(name), irregular_batch(dim=FEATURES)
    blocks = [block for block in backbone.modules() if isinstance(block, EncoderBlock)]
    calls: list[int] = []
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    backbone.read_series(batch.x, batch.times, batch.mask, None, batch.times[:, :2])
    assert calls == list(range(len(blocks) - 1))


def test_dot_product_attention_is_torch_multihead_attention():
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours = DotProductAttention(8, 2, direction="causal").double()
    names = ("query_projection", "key_projection", "value_projection")
    parts = zip(names, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    nn.init.normal_(theirs.in_proj_bias)
    for name, weight, bias in parts:
        getattr(ours, name).load_state_dict({"weight": weight, "bias": bias})
    ours.output_projection.load_state_dict(theirs.out_proj.state_dict())
    x, times = torch.randn(3, 6, 8).double(), torch.arange(6.0).expand(3, 6)
    mask = torch.arange(6) < torch.tensor([[6], [4], [2]])
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted = theirs(x, x, x, key_padding_mask=~mask, attn_mask=future, need_weights=False)[0]
    torch.testing.assert_close(ours(x, times, mask)[mask], wanted[mask])


def test_a_row_that_sees_nothing_gets_the_bias():
    layer = DotProductAttention(8, 2, direction="causal")
    x, times = torch.randn(1, 4, 8), torch.arange(4.0)[None]
    out = layer(x, times, None, torch.tensor([[-1.0, 9.0]]), query_x=torch.randn(1, 2, 8))
    torch.testing.assert_close(out[0, 0], layer.output_projection.bias)
    assert not torch.allclose(out[0, 1], out[0, 0])


def test_gru_d_without_decay_and_missing_values_is_a_gru():
    recurrence = DecayRecurrence(FEATURES, 5).double()
    for parameter in (recurrence.value_rate, *recurrence.hidden_decay.parameters()):
        nn.init.zeros_(parameter)
    batch = irregular_batch(dim=FEATURES, ragged=False)
    mask = torch.ones_like(batch.times, dtype=torch.bool)
    states = recurrence(batch.x, batch.times, mask).states
    hidden = torch.zeros(3, 5, dtype=torch.float64)
    for n in range(batch.x.shape[1]):
        hidden = recurrence.cell(torch.cat((batch.x[:, n], torch.ones(3, FEATURES)), -1), hidden)
        torch.testing.assert_close(states[:, n], hidden)


def gru_d_by_hand(layer: DecayRecurrence, values: Tensor, times: Tensor) -> list[Tensor]:
    """Equations 3 to 11 of the paper for one series, feature by feature; the mean is zero."""
    delta, last = torch.zeros(FEATURES).double(), torch.zeros(FEATURES).double()
    hidden, states = torch.zeros(1, layer.dim).double(), []
    measured_before = torch.zeros(FEATURES, dtype=torch.bool)
    for n, (x, t) in enumerate(zip(values, times, strict=True)):
        if n:
            gap = t - times[n - 1]
            delta = torch.where(measured_before, gap, gap + delta)
        measured_before = ~x.isnan()
        fade = torch.exp(-(layer.value_rate * delta + layer.value_bias).clamp(min=0.0))
        filled = torch.where(measured_before, x, fade * last + (1 - fade) * 0.0)
        last = torch.where(measured_before, x, last)
        rate = layer.hidden_decay.weight @ delta + layer.hidden_decay.bias
        decayed = torch.exp(-rate.clamp(min=0.0)) * hidden
        hidden = layer.cell(torch.cat((filled, measured_before.double()))[None], decayed)
        states.append(hidden[0])
    return states


def test_gru_d_is_the_paper_with_decay_and_missing_values():
    recurrence = DecayRecurrence(FEATURES, 5).double()
    for parameter in recurrence.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    batch = make_batch()
    values = batch.values.double()
    states = recurrence(values, batch.times, batch.mask).states
    for b in range(3):
        length = int(batch.mask[b].sum())
        wanted = gru_d_by_hand(recurrence, values[b, :length], batch.times[b, :length])
        torch.testing.assert_close(states[b, :length], torch.stack(wanted))


def test_a_read_of_gru_d_decays_from_the_last_row():
    recurrence = DecayRecurrence(FEATURES, 5).double()
    nn.init.constant_(recurrence.hidden_decay.weight, 0.1)
    values, times = torch.randn(1, 2, FEATURES).double(), torch.tensor([[0.0, 1.0]]).double()
    values[0, 1, 0] = torch.nan  # so it is 1 older than the others
    encoded = recurrence(values, times, torch.ones(1, 2, dtype=torch.bool))
    reads = recurrence.read(encoded, torch.tensor([[-1.0, 1.0, 3.0]]).double())
    assert not reads[0, 0].any()
    for row, total in ((1, 1.0), (2, 3.0 + 2.0 * 2.0)):
        decay = torch.exp(torch.tensor(-0.1 * total).double())
        torch.testing.assert_close(reads[0, row], decay * encoded.states[0, 1])


def test_recurrent_dropout_is_one_mask_for_all_steps_and_off_in_evaluation():
    layer = GRUD(FEATURES, dim=8, dropout=0.5)
    batch = make_batch()
    args = (batch.values, batch.times, batch.mask)
    assert not torch.equal(layer.encode(*args).states, layer.encode(*args).states)
    layer.eval()
    assert torch.equal(layer.encode(*args).states, layer.encode(*args).states)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GRUD(3, direction="both"), "direction must be one of 'causal', 'bidirectional'"),
        (lambda: TimeTransformer(3, dim=7), "dim must be even"),
        (lambda: DotProductAttention(8, 3), "dim must be a positive multiple of num_heads"),
    ],
    ids=["direction", "odd", "heads"],
)
def test_bad_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
