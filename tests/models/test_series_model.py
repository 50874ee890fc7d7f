from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from osciformer.config import Statistic
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.models.forward_fill import AgeScale
from osciformer.models.task_models import pool_states, summarise_series
from osciformer.nn.parameters import parameter_groups

from .task_batches import FEATURES, STATIC, make_batch, pad_with_garbage, take

BACKBONES = ("osciformer", "transformer", "gru_d", "contiformer")
# Coarse steps, so that the pairwise equations of ContiFormer are solved quickly.
COARSE = {"contiformer": {"step": 1.0, "num_nodes": 2}}


def make(backbone: str = "osciformer", **settings) -> SeriesModel:
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "output_dim": 2, "dim": 8}
    options = {"backbone_options": COARSE.get(backbone, {})}
    config = SeriesModelConfig(**{**sizes, **options, "backbone": backbone, **settings})
    batch = make_batch()
    return SeriesModel(config).fit_time_scale(batch.times, batch.mask).eval()


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("carry", [False, True], ids=["values", "carry"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_padding_changes_nothing_and_all_is_finite(backbone, carry, skip):
    model = make(backbone, carry=carry, skip=skip)
    batch = make_batch()
    out = model(batch)
    assert out.shape == (4, 2)
    assert out.isfinite().all()
    torch.testing.assert_close(model(pad_with_garbage(batch)), out, rtol=1e-5, atol=1e-5)
    for b in range(2):
        length = int(batch.mask[b].sum())
        alone = take(batch, torch.tensor([b]))
        alone = replace(
            alone,
            times=alone.times[:, :length],
            values=alone.values[:, :length],
            mask=alone.mask[:, :length],
        )
        torch.testing.assert_close(model(alone), out[b : b + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_order_of_the_batch_changes_nothing(backbone):
    model, batch = make(backbone, skip=True), make_batch()
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(take(batch, order)), model(batch)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variables", [False, True], ids=["rows", "variables"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_reach_all_parameters_and_are_finite(backbone, variables):
    model = make(backbone, skip=True, variables=variables).train()
    out = model(make_batch())
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("width", [0, 1, 5])
def test_series_without_observations_are_told_apart_by_their_static_features(backbone, width):
    model = make(backbone, skip=True)
    batch = make_batch(3, 5, ragged=False)
    empty = replace(
        batch,
        values=batch.values[:, :width],
        times=batch.times[:, :width],
        mask=torch.zeros(3, width, dtype=torch.bool),
    )
    out = model(empty)
    assert out.isfinite().all()
    assert not torch.equal(out[0], out[1])
    twins = replace(empty, static=torch.ones(3, STATIC))
    torch.testing.assert_close(model(twins)[0], model(twins)[2])
    model.train()(empty).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_model_without_static_features(backbone):
    model = make(backbone, static_dim=0, skip=True)
    assert model(make_batch(static=False)).isfinite().all()
    with pytest.raises(ValueError, match=r"static must be \[B, 0\] as configured; got \[B, 2\]"):
        model(make_batch())


def test_static_features_that_the_batch_lacks_count_as_missing():
    model, batch = make(), make_batch()
    unknown = replace(batch, static=torch.full((4, STATIC), torch.nan))
    assert torch.equal(model(replace(batch, static=None)), model(unknown))


def test_a_batch_in_which_nothing_was_measured():
    model, batch = make(skip=True), make_batch()
    assert model(replace(batch, values=torch.full_like(batch.values, torch.nan))).isfinite().all()


def test_observations_are_hidden_in_training_only():
    model, batch = make(dropout=0.0, observation_dropout=0.5), make_batch()
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.equal(model(batch), model(batch))
    torch.manual_seed(3)
    first = model(batch)
    torch.manual_seed(3)
    assert torch.equal(model(batch), first)
    hidden = model.inputs.series(batch).values
    assert hidden.isnan().sum() > batch.values.isnan().sum()
    kept = ~hidden.isnan()
    assert torch.equal(hidden[kept], batch.values[kept])


def test_weights_are_loaded_to_the_last_bit():
    model, batch = make(), make_batch()
    other = SeriesModel(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch), model(batch))
    assert other.inputs.age_scale.gap == model.inputs.age_scale.gap != 1.0


def test_a_generator_decides_the_spectra():
    batch = make_batch()

    def frequencies(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        model = make().fit_time_scale(batch.times, batch.mask, generator=generator)
        return next(p for name, p in model.named_parameters() if "raw_omega" in name)

    assert torch.equal(frequencies(1), frequencies(1))
    assert not torch.equal(frequencies(1), frequencies(2))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_single_observations_have_no_time_scale_and_still_a_prediction(backbone):
    batch = make_batch(4, 1, ragged=False)
    model = make(backbone).fit_time_scale(batch.times, batch.mask)
    assert model(batch).isfinite().all()


def test_every_parameter_is_in_one_optimizer_group():
    model = make()
    groups = parameter_groups(model, 0.1)
    count = sum(len(group["params"]) for group in groups)
    assert count == len(list(model.parameters()))


def test_pooled_states_are_those_of_the_present_rows():
    states = torch.randn(4, 9, 5)
    mask = make_batch().mask
    pooled = pool_states(states.masked_fill(~mask[..., None], torch.nan), mask, ("max", "mean"))
    last = pool_states(states, mask, ("last",))
    for b in range(4):
        own = states[b][mask[b]]
        if len(own) == 0:
            assert not pooled[b].any()
            assert not last[b].any()
            continue
        torch.testing.assert_close(pooled[b], torch.cat((own.amax(0), own.mean(0))))
        torch.testing.assert_close(last[b], own[-1])


# What NumPy says of the values of a feature, their times and the time of the last row.
STATISTICS = {
    "last": lambda own, when, end: own[-1],
    "mean": lambda own, when, end: np.mean(own),
    "min": lambda own, when, end: np.min(own),
    "max": lambda own, when, end: np.max(own),
    "rise": lambda own, when, end: own[-1] - own[0],
    "count": lambda own, when, end: np.log(1 + len(own)) / 3,
    "std": lambda own, when, end: np.std(own),
    "age": lambda own, when, end: np.log(1 + (end - when[-1]) / 2.5) / 4,
    "first": lambda own, when, end: own[0],
}


@pytest.mark.parametrize("kind", get_args(Statistic))
@pytest.mark.parametrize("seed", range(3))
def test_statistics_are_those_of_the_measured_values(kind, seed):
    batch = make_batch(6, 11, seed=seed)
    batch.values[0, :, 0] = batch.values[2, 1:, 1] = torch.nan
    batch.values[0, 4, 0] = 3.0  # the only value of a feature, within the series
    batch.values[2, 0, 1] = -2.0  # and at its start
    for given in (batch, pad_with_garbage(batch)):
        got = summarise_series(given.values, given.times, given.mask, (kind,), AgeScale(2.5))
        assert got.shape == (6, FEATURES)
        assert not got.requires_grad
        for b, f in np.ndindex(6, FEATURES):
            mask = batch.mask[b].numpy()
            values, times = batch.values[b, mask, f].numpy(), batch.times[b, mask].numpy()
            seen = ~np.isnan(values)
            wanted = 2.0 if kind == "age" else 0.0
            if seen.any():
                wanted = STATISTICS[kind](values[seen].astype(float), times[seen], times[-1])
            assert got[b, f].item() == pytest.approx(wanted, rel=1e-5, abs=1e-6), (b, f)


def test_statistics_stand_in_the_order_in_which_they_are_named():
    batch = make_batch()
    rows = batch.values, batch.times, batch.mask
    kinds = get_args(Statistic)
    got = summarise_series(*rows, kinds[::-1], AgeScale()).split(FEATURES, dim=1)
    for part, kind in zip(got, kinds[::-1], strict=True):
        assert torch.equal(part, summarise_series(*rows, (kind,), AgeScale()))


def test_statistics_have_finite_gradients_where_nothing_varies():
    values = make_batch().values
    values[0, :, 0] = 1.5  # a feature that stays as it is
    values[0, :, 1] = torch.nan
    values[0, 3, 1] = 0.25  # a single value
    values.requires_grad_()
    rows = make_batch()
    kinds = get_args(Statistic)
    summarise_series(values, rows.times, rows.mask, kinds, AgeScale()).sum().backward()
    assert values.grad.isfinite().all()
    assert values.grad[0, 3, 1] == 5.0  # last, mean, min, max and first; neither rise nor std


def test_model_takes_the_statistics_that_are_named():
    kinds = get_args(Statistic)
    few, all_ = make(statistics=("std",)), make(statistics=list(kinds))
    width = few.head[1].in_features
    assert all_.head[1].in_features == width + (len(kinds) - 1) * FEATURES
    assert make(skip=False, statistics=kinds).head[1].in_features == width - FEATURES
    batch = make_batch()
    assert all_(batch).isfinite().all()
    torch.testing.assert_close(all_(pad_with_garbage(batch)), all_(batch), rtol=1e-5, atol=1e-5)
    # Twice the distance from the mean of a feature; its mean stays.
    values = batch.values.clone()
    values[0, :, 0] = 2 * values[0, :, 0] - values[0, :, 0].nanmean()
    seen = []
    few.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    few(batch), few(replace(batch, values=values))
    changed = seen[1][:, -FEATURES:] - seen[0][:, -FEATURES:]
    torch.testing.assert_close(changed[0, 0], seen[0][0, -FEATURES])
    assert changed.count_nonzero() == 1


def test_values_of_another_number_of_features_are_refused():
    batch = make_batch()
    with pytest.raises(ValueError, match=r"values must be \[B, N, 3\]"):
        make()(replace(batch, values=batch.values[..., :2]))
