"""What the backbones of differential equations, state spaces, attention and signatures obey."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from osciformer import IrregularSeries, OsciFormerClassifier
from osciformer.models import (
    Backbone,
    QueryModel,
    QueryModelConfig,
    SeriesModel,
    SeriesModelConfig,
)
from osciformer.models.backbones import make_backbone
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    irregular_batch,
)

from ..models.task_batches import FEATURES, STATIC, make_batch, pad_with_garbage

NAMES = ("neural_cde", "log_ncde", "mtan", "lru", "s5", "linoss", "mamba", "rough_transformer")
DIRECTIONS = ("causal", "bidirectional")
# Small windows, so that a short series has several.
SMALL = {"log_ncde": {"window": 3}, "rough_transformer": {"window": 3}}


def make(name: str, direction: str = "causal", **settings) -> Backbone:
    options = {"direction": direction, **SMALL.get(name, {})}
    sizes = {"input_dim": FEATURES, "output_dim": 1, "dim": 8, "dropout": 0.0, **settings}
    config = SeriesModelConfig(**sizes, backbone=name, backbone_options=options)
    return make_backbone(config, FEATURES).double().eval()


def with_gaps(x: Tensor) -> Tensor:
    """Return values of which a third is missing."""
    generator = torch.Generator().manual_seed(1)
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.3, torch.nan)


def states_of(backbone: Backbone):
    def apply(x: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        return backbone.encode(x, times, present).states

    return apply


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_padding_and_the_order_of_the_batch_change_nothing(name, direction):
    apply, batch = states_of(make(name, direction)), irregular_batch(dim=FEATURES)
    x = with_gaps(batch.x)
    assert_padding_invariant(apply, x, batch.times, batch.mask, tolerance=1e-9)
    assert_batch_order_invariant(apply, x, batch.times, batch.mask)


@pytest.mark.parametrize("name", NAMES)
def test_causal_states_do_not_see_the_future(name):
    batch = irregular_batch(dim=FEATURES, length=9, ragged=False)
    assert_causal(states_of(make(name)), with_gaps(batch.x), batch.times)


@pytest.mark.parametrize("name", NAMES)
def test_causal_reads_do_not_see_the_future(name):
    batch = irregular_batch(dim=FEATURES, length=9, ragged=False)
    backbone, x, times = make(name), with_gaps(batch.x), batch.times
    asked = torch.linspace(-0.1, 1.2, 27).double().expand(3, -1)
    full = backbone.read(backbone.encode(x, times, times > -1), asked)
    for n in (1, 3, 5):
        part = backbone.encode(x[:, :n], times[:, :n], times[:, :n] > -1)
        early = asked < times[:, n : n + 1]
        torch.testing.assert_close(backbone.read(part, asked)[early], full[early])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_read_at_an_observation_is_its_state_and_reads_move_on_from_there(name, direction):
    batch = irregular_batch(dim=FEATURES, length=9)
    backbone = make(name, direction).fit_time_scale(batch.times, batch.mask)
    encoded = backbone.encode(with_gaps(batch.x), batch.times, batch.mask)
    states, times = encoded.states[batch.mask], batch.times.nan_to_num(0.0)
    torch.testing.assert_close(backbone.read(encoded, times)[batch.mask], states)
    if direction == "causal" and name != "mtan":  # its state jumps at each reference
        soon = backbone.read(encoded, times + 1e-9)[batch.mask]
        torch.testing.assert_close(soon, states, rtol=1e-5, atol=1e-6)
    later = backbone.read(encoded, times + 0.3)[batch.mask]
    assert (later - states).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_of_time_does_not_matter_once_it_is_fitted(name):
    batch = irregular_batch(dim=FEATURES, ragged=False)
    backbone, mask = make(name), torch.ones_like(batch.times, dtype=torch.bool)

    def states(times: Tensor) -> tuple[Tensor, Tensor]:
        backbone.fit_time_scale(times, mask)
        encoded = backbone.encode(batch.x, times, mask)
        return encoded.states, backbone.read(encoded, times[:, :3] + 0.1 * times[0, -1])

    for mine, theirs in zip(states(batch.times), states(3600.0 * batch.times), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_all_parameters_and_are_finite(name):
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "output_dim": 2, "dim": 8}
    config = SeriesModelConfig(**sizes, backbone=name, backbone_options=SMALL.get(name))
    batch = make_batch()
    model = SeriesModel(config).fit_time_scale(batch.times, batch.mask).train()
    out = model(batch)
    (out * torch.randn_like(out)).sum().backward()
    for part, parameter in model.named_parameters():
        assert parameter.grad is not None, part
        assert parameter.grad.isfinite().all(), part
        assert parameter.grad.abs().max() > 0, part
    model.eval()
    with torch.inference_mode():
        out, padded = model(batch), model(pad_with_garbage(batch))
        torch.testing.assert_close(padded, out, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(batch).float(), out, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_quantiles_at_any_time(name, direction):
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "dim": 8, "direction": direction}
    config = QueryModelConfig(**sizes, backbone=name, backbone_options=SMALL.get(name))
    batch = make_batch(queries=6)
    model = QueryModel(config).fit_time_scale(batch.times, batch.mask).train()
    out = model(batch)
    (out * torch.randn_like(out)).sum().backward()
    for part, parameter in model.backbone.named_parameters():
        assert parameter.grad.isfinite().all(), part
        assert parameter.grad.abs().max() > 0, part
    padded = model.eval()(pad_with_garbage(batch))
    torch.testing.assert_close(padded, model(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_series_without_rows_and_features_without_values_have_finite_states(name, direction):
    backbone, times = make(name, direction, static_dim=STATIC), torch.rand(3, 4).double().sort()[0]
    values = torch.randn(3, 4, FEATURES).double()
    values[0], values[1, 2:] = torch.nan, torch.nan
    mask = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    static = torch.tensor([[1.0, torch.nan]] * 3).double()
    encoded = backbone.encode(values.requires_grad_(), times, mask, static)
    reads = backbone.read(encoded, torch.tensor([[-9.0, 0.5, 50.0]] * 3).double())
    assert encoded.states.isfinite().all()
    assert reads.isfinite().all()
    assert not encoded.states[2].any()
    reads.sum().backward()
    assert values.grad.isfinite().all()
    alone = backbone.encode(values[:, :1], times[:, :1], mask[:, :1], static)
    if direction == "causal":
        torch.testing.assert_close(alone.states, encoded.states[:, :1])
    assert alone.states.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_missing_is_not_zero_and_static_features_count(name):
    batch, backbone = irregular_batch(dim=FEATURES, ragged=False), make(name, static_dim=STATIC)
    mask = torch.ones_like(batch.times, dtype=torch.bool)

    def last(x: Tensor, static: Tensor) -> Tensor:
        return backbone.encode(x, batch.times, mask, static.double().expand(3, -1)).states[:, -1]

    zero, nothing = batch.x.clone(), batch.x.clone()
    zero[:, 3], nothing[:, 3] = 0.0, torch.nan
    known = torch.tensor([1.0, 2.0])
    assert (last(zero, known) - last(nothing, known)).abs().max() > 1e-6
    assert (last(zero, known) - last(zero, -known)).abs().max() > 1e-6


def turning(count: int, seed: int, phases: float) -> IrregularSeries:
    """Return points that turn round a circle one way or the other, seen at random times."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(count, 12, generator=generator).double().sort(dim=1).values
    labels = torch.arange(count) % 2
    turn = 6.0 * (2 * labels[:, None] - 1) * times
    turn = turn + phases * torch.rand(count, 1, generator=generator)
    values = torch.stack((turn.cos(), turn.sin()), dim=-1)
    values = values + 0.1 * torch.randn(values.shape, generator=generator)
    return IrregularSeries.from_arrays(
        list(times.numpy()), list(values.numpy()), labels=labels.numpy()
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_learns_which_way_a_point_turns(name):
    phases = 0.0 if name == "mtan" else 6.3  # which finds times faster than orders
    options = {"backbone": name, "pool": ("last",), "skip": False, "carry": False}
    model = OsciFormerClassifier(
        dim=16,
        dropout=0.0,
        max_epochs=20 if name in ("lru", "s5") else 8,
        learning_rate=1e-2,
        resonators=False,
        validation_fraction=0.0,
        random_state=0,
        model_options={**options, "observation_dropout": 0.0},
    ).fit(turning(256, 0, phases))
    assert model.score(turning(200, 1, phases)) > 0.85  # chance is 0.5
