"""What holds for all recurrent baselines: interface, laws, and that they learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from osciformer.baselines import RecurrentBackbone
from osciformer.models import Backbone, QueryModel, QueryModelConfig, SeriesModel, SeriesModelConfig
from osciformer.models.backbones import backbone_names, make_backbone
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
)

from ..models.task_batches import FEATURES, STATIC, make_batch, pad_with_garbage

# Cells whose states stand still between rows, and those that move.
STILL = ("lstm", "gru", "phased_lstm", "cornn", "lmu")
MOVING = ("rnn_decay", "ct_rnn", "ct_gru", "ct_lstm", "ode_rnn", "gru_ode", "ode_lstm", "ltc")
MOVING = (*MOVING, "cfc", "cfc mixed", "cfc no gate")
OPTIONS = {
    "cfc mixed": {"mixed_memory": True},
    "cfc no gate": {"gated": False, "trunk_dim": 16},
    # Published sizes are for long series: a small step, and gates that are mostly closed.
    "cornn": {"step": 0.5},
    "phased_lstm": {"open_share": 0.5},
}
each = pytest.mark.parametrize("name", [*STILL, *MOVING])


def settings(name: str, **options) -> dict:
    options = {**OPTIONS.get(name, {}), **options}
    return {"backbone": name.split()[0], "backbone_options": options, "dim": 8}


def make(name: str, features: int = FEATURES, **options) -> Backbone:
    config = SeriesModelConfig(input_dim=features, output_dim=1, **settings(name, **options))
    batch = irregular_batch(dim=features)
    backbone = make_backbone(config, features).double().eval()
    return backbone.fit_time_scale(batch.times, batch.mask)


def states_of(backbone: Backbone):
    def apply(x: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        return backbone.encode(x, times, present).states

    return apply


def test_the_names_are_registered() -> None:
    assert {name.split()[0] for name in (*STILL, *MOVING)} <= set(backbone_names())


@each
@torch.no_grad()
def test_padding_the_order_of_the_batch_and_the_future_change_nothing(name: str) -> None:
    for direction in ("causal", "bidirectional"):
        apply, batch = states_of(make(name, direction=direction)), irregular_batch(dim=FEATURES)
        assert_padding_invariant(apply, batch.x, batch.times, batch.mask, tolerance=1e-9)
        assert_batch_order_invariant(apply, batch.x, batch.times, batch.mask)
    whole = irregular_batch(dim=FEATURES, ragged=False)
    assert_causal(states_of(make(name)), whole.x, whole.times)


@each
@torch.no_grad()
def test_absent_rows_may_be_anywhere(name: str) -> None:
    backbone, batch = make(name), irregular_batch(dim=FEATURES, length=5, ragged=False)
    where = torch.tensor([1, 2, 4, 5, 8])
    x, times = torch.full((3, 9, FEATURES), torch.nan).double(), torch.full((3, 9), -7.0).double()
    mask = torch.zeros(3, 9, dtype=torch.bool)
    x[:, where], times[:, where], mask[:, where] = batch.x, batch.times, True
    encoded = backbone.encode(x, times, mask)
    expected = backbone.encode(batch.x, batch.times, mask[:, where])
    torch.testing.assert_close(encoded.states[:, where], expected.states)
    assert not encoded.states[~mask].any()
    asked = batch.times + 0.1
    reads = backbone.read(expected, asked)
    torch.testing.assert_close(backbone.read(encoded, asked), reads)


@each
@torch.no_grad()
def test_reads_start_at_the_states_and_move_where_the_model_says_so(name: str) -> None:
    backbone, batch = make(name), irregular_batch(dim=FEATURES, ragged=False)
    mask = torch.ones_like(batch.times, dtype=torch.bool)
    encoded = backbone.encode(batch.x, batch.times, mask)
    assert torch.equal(backbone.read(encoded, batch.times), encoded.states)
    later = batch.times + 0.5 * batch.times.diff(dim=1, append=batch.times[:, -1:] + 1.0)
    reads = backbone.read(encoded, later)
    moved = (reads - encoded.states).abs().amax(dim=-1)
    assert bool((moved > 1e-6).all()) == (name in MOVING)
    assert bool((moved == 0).all()) == (name in STILL)
    # Reads do not jump, and stay finite however late.
    close = backbone.read(encoded, batch.times + 1e-9)
    torch.testing.assert_close(close, encoded.states, rtol=0, atol=1e-6)
    assert backbone.read(encoded, batch.times[:, -1:] + 1e7).isfinite().all()
    assert not backbone.read(encoded, batch.times[:, :1] - 1.0).any()


@each
@torch.no_grad()
def test_neither_the_unit_nor_the_origin_of_time_matters_once_it_is_fitted(name: str) -> None:
    backbone, batch = make(name), irregular_batch(dim=FEATURES, ragged=False)
    mask = torch.ones_like(batch.times, dtype=torch.bool)
    results = []
    for times in (batch.times, 3600.0 * batch.times, batch.times - 5.0):
        backbone.fit_time_scale(times, mask)
        encoded = backbone.encode(batch.x, times, mask)
        late = times[:, -1:] + (times[:, -1:] - times[:, :1])
        results.append(torch.cat((encoded.states, backbone.read(encoded, late)), dim=1))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-8, atol=1e-10)


@each
@torch.no_grad()
def test_the_gap_before_a_row_matters(name: str) -> None:
    backbone, batch = make(name), irregular_batch(dim=FEATURES, ragged=False)
    apply, times = states_of(backbone), batch.times.clone()
    times[:, 3:] += 0.4
    before, after = apply(batch.x, batch.times, None), apply(batch.x, times, None)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before - after)[:, 3:].abs().amax() > 1e-4


@each
def test_gradients_reach_all_parameters_past_missing_values_and_padding(name: str) -> None:
    config = SeriesModelConfig(
        input_dim=FEATURES, static_dim=STATIC, output_dim=2, **settings(name)
    )
    batch = make_batch()
    model = SeriesModel(config).fit_time_scale(batch.times, batch.mask)
    out = model.eval()(batch)
    torch.testing.assert_close(model(pad_with_garbage(batch)), out, rtol=1e-5, atol=1e-5)
    out = model.train()(pad_with_garbage(batch))
    (out * torch.randn_like(out)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@each
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_a_model_of_queries_has_finite_gradients(name: str, direction: str) -> None:
    config = QueryModelConfig(input_dim=FEATURES, direction=direction, **settings(name))
    batch = make_batch(queries=4, static=False)
    batch = replace(batch, times=batch.times * 1e3, query_times=batch.query_times * 1e3)
    model = QueryModel(config)  # with its first unit: gaps are a thousand times too long
    out = model(batch)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@each
def test_bfloat16_is_close(name: str) -> None:
    backbone, batch = make(name).float(), irregular_batch(dim=FEATURES, dtype=torch.float32)
    exact = backbone.encode(batch.x, batch.times, batch.mask).states
    with torch.autocast("cpu", torch.bfloat16):
        encoded = backbone.encode(batch.x, batch.times, batch.mask)
        reads = backbone.read(encoded, batch.times[:, :1] + 1.0)
    torch.testing.assert_close(encoded.states.float(), exact, rtol=0, atol=0.05)
    assert reads.isfinite().all()


@torch.no_grad()
def test_half_of_a_bidirectional_network_is_the_causal_one_in_reversed_time() -> None:
    both, batch = make("ct_lstm", direction="bidirectional"), irregular_batch(dim=FEATURES)
    early, late = both.encode(batch.x, batch.times, batch.mask).states.chunk(2, dim=-1)
    one = RecurrentBackbone(type(both.forwards.cell), FEATURES, dim=4).double()
    one.time_scale.load_state_dict(both.time_scale.state_dict())
    one.forwards.load_state_dict(both.forwards.state_dict())
    expected = one.encode(batch.x, batch.times, batch.mask).states
    torch.testing.assert_close(early, expected)
    one.time_scale.set(-float(both.time_scale.reference), float(both.time_scale.scale))
    one.forwards.load_state_dict(both.backwards.state_dict())
    expected = one.encode(batch.x.flip(1), -batch.times.flip(1), batch.mask.flip(1)).states
    torch.testing.assert_close(late, expected.flip(1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cfc", {"mixed": True}, "unknown option of backbone cfc 'mixed'.*'mixed_memory'"),
        ("lstm", {"direction": "both"}, "direction must be one of"),
        ("ltc", {"num_steps": 0}, "num_steps must be at least 1; got 0"),
        ("ode_rnn", {"num_steps": 0}, "num_steps must be at least 1; got 0"),
        ("lmu", {"window": 0.0}, "window must be positive, in mean gaps; got 0.0"),
        ("phased_lstm", {"open_share": 1.0}, "open_share must be between 0 and 1; got 1.0"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def sign_of_the_first(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, times, and whether the first of four values is positive."""
    values = torch.randn(count, 4, 1)
    return values, torch.rand(count, 4).double().cumsum(dim=1), values[:, 0, 0] > 0


def longer_gap(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, which are the same for all, times, and whether the first gap is longer."""
    values = torch.tensor([1.0, -1.0, 1.0])[None, :, None].repeat(count, 1, 1)
    times = torch.rand(count, 3).double().sort(dim=1).values
    return values, times, times[:, 1] > 0.5 * (times[:, 0] + times[:, 2])


@each
@pytest.mark.parametrize("task", [sign_of_the_first, longer_gap])
def test_it_learns_to_remember_and_to_tell_gaps(name: str, task) -> None:
    torch.manual_seed(1)
    values, times, labels = task(512)
    mask, train = torch.ones_like(times, dtype=torch.bool), slice(256)
    chosen = {**settings(name), "dim": 16}
    config = SeriesModelConfig(input_dim=1, output_dim=1, **chosen)
    backbone = make_backbone(config, 1).fit_time_scale(times[train], mask[train])
    head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=0.02)

    def logits(part: slice) -> Tensor:
        states = backbone.encode(values[part], times[part], mask[part]).states
        return head(states[:, -1])[:, 0]

    for _ in range(60):
        optimizer.zero_grad()
        wanted = labels[train].float()
        nn.functional.binary_cross_entropy_with_logits(logits(train), wanted).backward()
        optimizer.step()
    backbone.eval()
    with torch.no_grad():
        right = (logits(slice(256, None)) > 0) == labels[256:]
    assert right.float().mean() > 0.8
