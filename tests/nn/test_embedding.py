from __future__ import annotations

import pytest
import torch

from osciformer.nn import SeriesEmbedding

NAN = torch.nan


def test_nan_and_an_explicit_mask_say_the_same():
    embed = SeriesEmbedding(2, 8)
    values = torch.tensor([[[1.0, NAN], [NAN, NAN], [0.0, 3.0]]])
    observed = ~values.isnan()
    junk = torch.where(observed, values, 99.0)
    assert torch.equal(embed(values), embed(junk, observed))
    assert bool(embed(values).isfinite().all())


def test_a_missing_value_differs_from_a_measured_zero():
    embed = SeriesEmbedding(1, 8)
    tokens = embed(torch.tensor([[[0.0], [NAN]]]))[0]
    assert not torch.equal(tokens[0], tokens[1])


def test_static_features_reach_every_token_and_may_be_missing():
    embed = SeriesEmbedding(1, 8, static_dim=2)
    values = torch.zeros(1, 3, 1)
    a = embed(values, static=torch.tensor([[1.0, 2.0]]))
    b = embed(values, static=torch.tensor([[1.0, NAN]]))
    assert bool(b.isfinite().all())
    assert bool(((a - b).abs().amax(dim=-1) > 0).all())
    assert torch.allclose((a - b)[:, 0], (a - b)[:, 2])


def test_gradients_are_finite_with_missing_values_and_reach_every_parameter():
    embed = SeriesEmbedding(2, 8, static_dim=1)
    values = torch.tensor([[[1.0, NAN], [2.0, 1.0]]], requires_grad=True)
    embed(values, static=torch.ones(1, 1)).sum().backward()
    assert bool(values.grad.isfinite().all())
    assert values.grad[0, 0, 1] == 0
    for parameter in embed.parameters():
        assert float(parameter.grad.abs().max()) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e(torch.zeros(1, 2, 3), static=None), r"values must be \[B, N, 2\]"),
        (lambda e: e(torch.zeros(1, 2, 2)), r"static must be \[1, 1\]; got None"),
        (
            lambda e: e(torch.zeros(1, 2, 2), torch.ones(1, 2, 1).bool(), static=torch.ones(1, 1)),
            "observed must have the shape of values",
        ),
        (
            lambda e: SeriesEmbedding(2, 4)(torch.zeros(1, 2, 2), static=torch.ones(1, 1)),
            "static_dim=0",
        ),
        (lambda e: SeriesEmbedding(0, 4), "input_dim must be at least 1"),
    ],
    ids=["values", "static", "observed", "no static", "input_dim"],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(SeriesEmbedding(2, 4, static_dim=1))
