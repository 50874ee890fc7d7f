from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from osciformer.data.batches import Batch
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.models.carry import AgeScale
from osciformer.models.foresight import Foresight

from .task_batches import FEATURES, STATIC, make_batch, pad_with_garbage

# Every setting with which states are said to know nothing of later times.
CAUSAL = [
    ("osciformer", {}),
    *(("osciformer", {"query": q}) for q in ("linear", "ridge_causal", "anchored", "learned")),
    ("osciformer", {"preset": "paper", "query": "hold", "direction": None}),
    ("osciformer", {"value": "point", "omega_range": "typical"}),
    ("transformer", {"direction": "causal"}),
    ("gru_d", {}),
    ("contiformer", {"step": 1.0, "num_nodes": 2}),
]
LOOKS_AHEAD = [
    ("osciformer", {"direction": "bidirectional"}),
    ("osciformer", {"query": "ridge"}),
    ("osciformer", {"preset": "paper"}),
    ("transformer", {}),
    ("gru_d", {"direction": "bidirectional"}),
]


def make(backbone: str = "osciformer", options: dict | None = None, **settings) -> SeriesModel:
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "output_dim": 2, "dim": 8}
    steady = {"dropout": 0.0, "observation_dropout": 0.0, "foresight": 0.5}
    config = SeriesModelConfig(
        **{**sizes, **steady, "backbone": backbone, "backbone_options": options or {}, **settings}
    )
    batch = make_batch()
    torch.manual_seed(0)
    return SeriesModel(config).fit_time_scale(batch.times, batch.mask)


def states_of(model: SeriesModel, batch: Batch) -> torch.Tensor:
    values, times, mask = model.inputs.rows(batch)
    static = model.inputs.static(batch)
    return model.backbone.encode(model.inputs(values, times, mask), times, mask, static).states


def with_ties(batch: Batch) -> Batch:
    times = batch.times.clone()
    times[0, 4:7] = times[0, 3:4]
    return replace(batch, times=times)


def expected_loss(head: torch.nn.Module, states: torch.Tensor, batch: Batch, gap: float):
    """Return sum and count of Huber's loss, series by series and value by value."""
    total, count = 0.0, 0
    for b in range(len(batch.values)):
        rows = np.flatnonzero(batch.mask[b].numpy())
        for before, row in pairwise(rows):
            passed = float(batch.times[b, row] - batch.times[b, before])
            if passed <= 0:
                continue
            x = torch.cat((states[b, before], torch.tensor([np.log1p(passed / gap)]).float()))
            found = head(x).detach().numpy()
            for f in range(FEATURES):
                wanted = float(batch.values[b, row, f])
                if not np.isnan(wanted):
                    error = abs(float(found[f]) - wanted)
                    total += error**2 / 2 if error < 1 else error - 0.5
                    count += 1
    return total, count


@pytest.mark.parametrize("seed", range(3))
def test_loss_is_that_of_the_rows_after_the_first_one_by_one(seed):
    batch = with_ties(make_batch(5, 11, seed=seed))
    # Absent rows may also lie between present ones.
    mask = batch.mask.clone()
    mask[1, 2] = mask[0, 0] = False
    batch = replace(batch, mask=mask, values=4 * batch.values)
    foresight = Foresight(8, FEATURES, dropout=0.0)
    states = torch.randn(5, 11, 8)
    total, count = expected_loss(foresight.head, states, batch, gap=2.5)
    assert count > 10
    rows = batch.values, batch.times, batch.mask
    side = foresight(states, *rows, AgeScale(2.5), weight=0.25)
    assert side.total.item() == pytest.approx(total, rel=1e-5)
    assert (side.count.item(), side.weight) == (count, 0.25)


def test_loss_of_a_model_is_that_of_its_states_and_of_all_that_was_measured():
    model, batch = make(observation_dropout=0.6).train(), make_batch()
    torch.manual_seed(1)
    output, side = model.learn(batch)
    torch.manual_seed(1)
    states = states_of(model, batch)
    total, count = expected_loss(
        model.foresight.head, states, batch, model.inputs.age_scale.gap.item()
    )
    assert side.total.item() == pytest.approx(total, rel=1e-5)
    assert (side.count.item(), side.weight) == (count, 0.5)
    torch.manual_seed(1)
    assert torch.equal(model(batch), output)


@pytest.mark.parametrize(("backbone", "options"), CAUSAL, ids=str)
def test_no_prediction_knows_its_target(backbone, options):
    model, batch = make(backbone, options).eval(), with_ties(make_batch(ragged=False))
    seen = []
    model.foresight.head.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    model.learn(batch)
    for row in range(1, 9):
        if row in (4, 5, 6):  # of the time of the row before them, so that they are no targets
            continue
        values = batch.values.clone()
        values[0, row:] = torch.where(torch.rand(9 - row, FEATURES) < 0.5, torch.nan, 7.0)
        model.learn(replace(batch, values=values))
        # The prediction of a row is the one from the row before it.
        torch.testing.assert_close(seen[-1][:row], seen[0][:row], rtol=0, atol=1e-6)
        assert row == 8 or not torch.allclose(seen[-1][row:], seen[0][row:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("backbone", "options"), LOOKS_AHEAD, ids=str)
def test_states_that_know_what_follows_are_refused(backbone, options):
    with pytest.raises(ValueError, match=f"foresight=0.5 needs states .* of {backbone} with .*=0"):
        make(backbone, options)
    model = make(backbone, options, foresight=0).eval()
    assert not model.config.is_causal
    batch = make_batch(ragged=False)
    later = batch.values.clone()
    later[0, 6:] = 3.0
    apart = states_of(model, replace(batch, values=later)) - states_of(model, batch)
    assert apart[0, :6].abs().max() > 1e-6


@pytest.mark.parametrize("bad", [-0.1, float("inf"), float("nan")])
def test_weights_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="foresight must be finite and not negative; got"):
        make(foresight=bad)


def test_padding_adds_nothing_whatever_it_holds():
    model, batch = make(), make_batch()
    wanted = model.learn(batch)[1]
    side = model.learn(pad_with_garbage(batch))[1]
    torch.testing.assert_close(side.total, wanted.total)
    assert side.count == wanted.count > 0
    side.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("backbone", "options"), CAUSAL[-4:], ids=str)
def test_gradients_reach_the_backbone_and_the_network_of_foresight(backbone, options):
    model = make(backbone, options).train()
    model.learn(make_batch())[1].total.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("head."):
            assert parameter.grad is None
        elif name.startswith("foresight.") or parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
    assert any(p.grad is not None for p in model.backbone.parameters())


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("present", [False, True])
def test_without_targets_the_loss_is_zero_and_has_zero_gradients(width, present):
    batch = make_batch(3, 5, ragged=False)
    empty = replace(
        batch,
        values=torch.full_like(batch.values[:, :width], torch.nan),
        times=batch.times[:, :width],
        mask=torch.full((3, width), present),
    )
    model = make().train()
    side = model.learn(empty)[1]
    assert (side.total.item(), side.count.item()) == (0.0, 0.0)
    side.total.backward()
    # None would make DDP wait for ever.
    for parameter in model.foresight.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_summed_in_float32_where_states_have_less(dtype):
    model, batch = make(), make_batch()
    exact = model.learn(batch)[1]
    with torch.autocast("cpu", dtype=dtype):
        side = model.learn(batch)[1]
    assert side.total.dtype == side.count.dtype == torch.float32
    assert side.count == exact.count
    torch.testing.assert_close(side.total, exact.total, rtol=0.03, atol=0.0)


def test_predictions_do_not_depend_on_the_network_of_foresight():
    model, batch = make().eval(), make_batch()
    before = model(batch)
    for parameter in model.foresight.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert torch.equal(model(batch), before)


def test_a_model_without_foresight_has_neither_network_nor_loss():
    model, batch = make(foresight=0.0).eval(), make_batch()
    assert not [name for name in model.state_dict() if "foresight" in name]
    output, side = model.learn(batch)
    assert side is None
    assert torch.equal(output, model(batch))
    settings = model.config.to_dict()
    del settings["foresight"]  # as in files of before
    assert SeriesModelConfig.from_dict(settings) == model.config
