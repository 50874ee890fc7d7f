from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from osciformer.models import QueryModel, QueryModelConfig
from osciformer.models.forward_fill import AgeScale, baseline_prediction

from .task_batches import FEATURES, STATIC, make_batch, pad_with_garbage, take

BACKBONES = ("osciformer", "transformer", "gru_d")
DIRECTIONS = ("causal", "bidirectional")
QUANTILES = (0.05, 0.25, 0.5, 0.9)
NAN = torch.nan


def make(backbone: str = "osciformer", direction: str = "causal", **settings) -> QueryModel:
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "dim": 8, "quantiles": QUANTILES}
    sizes |= {"feature_dim": 4}
    config = QueryModelConfig(**{**sizes, "backbone": backbone, "direction": direction, **settings})
    batch = make_batch()
    return QueryModel(config).fit_time_scale(batch.times, batch.mask).eval()


def stir(model: QueryModel) -> QueryModel:
    """Return the model far from its start, where every part of it speaks."""
    with torch.no_grad():
        heads = [model.head, *filter(None, [model.feature_head])]
        for parameter in (*nn.ModuleList(heads).parameters(), model.distance_slopes):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "settings",
    [{"carry": False, "feature_dim": 0}, {"carry": True}],
    ids=["values", "carry-and-feature-head"],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_padding_changes_nothing_and_quantiles_never_cross(backbone, direction, settings):
    model = stir(make(backbone, direction, **settings))
    batch = make_batch(queries=6)
    out = model(batch)
    assert out.shape == (4, 6, FEATURES, len(QUANTILES))
    assert out.isfinite().all()
    assert (out.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(model(pad_with_garbage(batch)), out, rtol=1e-5, atol=1e-5)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(take(batch, order)), out[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("cut", [0.0, 11.0, 23.0])
def test_a_causal_model_does_not_see_the_future_to_the_last_bit(backbone, cut):
    model = stir(make(backbone))
    batch = make_batch(ragged=False, queries=8)
    batch = replace(batch, query_times=batch.query_times.clamp(max=cut))
    later = batch.times > cut
    assert later.any()
    changed = replace(
        batch,
        values=torch.where(later[..., None], 5.0, batch.values),
        times=torch.where(later, batch.times + 1.0, batch.times),
    )
    assert torch.equal(model(changed), model(batch))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_bidirectional_model_sees_the_future(backbone):
    model = stir(make(backbone, "bidirectional"))
    batch = make_batch(ragged=False, queries=8)
    batch = replace(batch, query_times=batch.query_times.clamp(max=10.0))
    changed = replace(batch, values=torch.where(batch.times[..., None] > 10.0, 5.0, batch.values))
    assert not torch.allclose(model(changed), model(batch))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_reads_do_not_depend_on_each_other(backbone, direction):
    model = stir(make(backbone, direction))
    batch = make_batch(queries=6)
    alone = replace(batch, query_times=batch.query_times[:, 2:3])
    torch.testing.assert_close(model(alone), model(batch)[:, 2:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_reach_all_parameters_and_are_finite(backbone, direction):
    model, batch = make(backbone, direction).train(), make_batch(queries=6)
    batch.query_times[:, :3] = batch.times[:, 2:5]  # where features are measured together
    out = model(batch)
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("width", [0, 1, 5])
def test_series_without_observations_get_finite_quantiles(direction, width):
    model = stir(make(direction=direction))
    batch = make_batch(3, 5, queries=4)
    empty = replace(
        batch,
        values=batch.values[:, :width],
        times=batch.times[:, :width],
        mask=torch.zeros(3, width, dtype=torch.bool),
    )
    out = model(empty)
    assert out.shape == (3, 4, FEATURES, len(QUANTILES))
    assert out.isfinite().all()


def interpolated_by_hand(batch, direction: str) -> Tensor:
    out = torch.zeros(*batch.query_times.shape, FEATURES)
    for b, m in torch.cartesian_prod(*map(torch.arange, batch.query_times.shape)).tolist():
        for f in range(FEATURES):
            asked = float(batch.query_times[b, m])
            rows = [
                (float(t), float(x))
                for t, x, present in zip(
                    batch.times[b], batch.values[b, :, f], batch.mask[b], strict=True
                )
                if present and x == x
            ]
            before = [row for row in rows if row[0] <= asked]
            after = [row for row in rows if row[0] >= asked] if direction != "causal" else []
            if before and after:
                (t0, x0), (t1, x1) = before[-1], after[0]
                out[b, m, f] = x0 if t1 == t0 else x0 + (x1 - x0) * (asked - t0) / (t1 - t0)
            elif before or after:
                out[b, m, f] = before[-1][1] if before else after[0][1]
    return out


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_untrained_model_says_about_what_the_simple_method_says(direction):
    batch = make_batch(queries=30)
    # Also at observations themselves, and far from them.
    batch.query_times[:, :4] = batch.times[:, 2:6]
    batch.query_times[:, 5] = 1e3
    expected = interpolated_by_hand(batch, direction)
    options = {"direction": direction, "age_scale": AgeScale()}
    baseline = baseline_prediction(
        batch.values, batch.times, batch.query_times, batch.mask, **options
    )
    torch.testing.assert_close(baseline.base, expected)
    median = make(direction=direction)(batch)[..., 2]
    assert (median - expected).abs().max() < 0.05


def test_the_level_of_a_forecast_is_the_mean_so_far():
    values, times = torch.tensor([[[1.0], [NAN], [4.0]]]), torch.tensor([[0.0, 1.0, 2.0]])
    asked, mask = torch.tensor([[-1.0, 1.5, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    options = {"direction": "causal", "age_scale": AgeScale()}
    level = baseline_prediction(values, times, asked, mask, **options).level
    torch.testing.assert_close(level.flatten(), torch.tensor([0.0, 1.0, 2.5]))


def test_first_quantiles_are_those_of_a_normal_distribution():
    out = make(static_dim=0)(make_batch(queries=2, static=False))
    normal = torch.special.ndtri(torch.tensor(QUANTILES))
    wanted = (0.5 * normal.diff()).expand(4, 2, FEATURES, -1)
    torch.testing.assert_close(out.diff(dim=-1), wanted, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("quantiles", [(0.5,), (0.9,), (0.1, 0.2), (0.6, 0.7, 0.99)])
def test_any_levels_are_possible(quantiles):
    out = stir(make(quantiles=quantiles))(make_batch(queries=2))
    assert out.shape[-1] == len(quantiles)
    assert (out.diff(dim=-1) >= 0).all()


def test_padded_queries_may_hold_anything():
    model, batch = stir(make()), make_batch(queries=3)
    query_mask = torch.tensor([[True, True, False]]).repeat(4, 1)
    times = batch.query_times.masked_fill(~query_mask, NAN)
    out = model(replace(batch, query_times=times, query_mask=query_mask))
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :2], model(batch)[:, :2], rtol=1e-5, atol=1e-5)


def test_no_queries_are_no_rows_and_missing_ones_an_error():
    model, batch = make(), make_batch(queries=3)
    none = replace(batch, query_times=batch.query_times[:, :0])
    assert model(none).shape == (4, 0, FEATURES, len(QUANTILES))
    with pytest.raises(ValueError, match=r"batch.query_times must be given"):
        model(replace(batch, query_times=None))


def test_observations_are_hidden_in_training_only():
    model, batch = make(dropout=0.0, observation_dropout=0.5), make_batch(queries=3)
    assert torch.equal(model(batch), model(batch))
    assert not torch.equal(model.train()(batch), model(batch))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_training_answers_what_has_a_target_as_prediction_does(direction):
    model, batch = stir(make(direction=direction, dropout=0.0)), make_batch(queries=6)
    targets = torch.randn(4, 6, FEATURES)
    targets[torch.rand_like(targets) < 0.5] = NAN
    asked = ~targets.isnan()
    wanted = model(replace(batch, targets=targets))
    found = model.train()(replace(batch, targets=targets))
    torch.testing.assert_close(found[asked], wanted[asked])
    assert (found[~asked] == 0).all()
    assert (wanted[~asked] != 0).any()


def test_the_head_of_a_feature_reads_what_is_known_of_that_feature():
    """The part that is a feature's own: with the shared inputs cut off, others have no say."""
    model, batch = stir(make(direction="bidirectional")), make_batch(ragged=False, queries=6)
    with torch.no_grad():
        model.head[0].weight.zero_()
    out = model(batch)
    changed = batch.values.clone()
    changed[..., 0] += 1.0
    moved = (model(replace(batch, values=changed)) - out).abs().amax(dim=(0, 1, 3))
    assert moved[0] > 0.1
    assert (moved[1:] == 0).all()


def test_what_is_measured_at_the_query_time_speaks_through_the_relations():
    model, batch = make(direction="bidirectional"), make_batch(ragged=False, queries=1)
    values = batch.values.clone()
    values[:, :, :2], values[:, 4, 0] = 0.0, NAN  # the first is hidden where the second jumps
    values[:, 4, 1] = 2.0
    batch = replace(batch, values=values, query_times=batch.times[:, 4:5])
    before = model(batch)[:, 0, 0]
    with torch.no_grad():
        model.relations.weight[0, 1] = 0.7
    torch.testing.assert_close(model(batch)[:, 0, 0], before + 1.4)
