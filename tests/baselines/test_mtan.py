from __future__ import annotations

import pytest
import torch

from osciformer.baselines import MultiTimeAttentionNetwork
from osciformer.baselines.mtan import ReferenceRecurrence, SeriesTimeAttention
from osciformer.testing import irregular_batch

FEATURES, HEADS, DIM = 3, 2, 8


@torch.no_grad()
def test_each_feature_attends_to_its_own_measurements():
    layer, batch = SeriesTimeAttention(DIM, HEADS).double(), irregular_batch(dim=FEATURES)
    values, times, mask = batch.x[0].clone(), batch.times[0], batch.mask[0]
    values[1:4, 0] = values[:, 2] = torch.nan  # the last feature is never measured
    asked = torch.tensor([0.2, 0.5, 2.0]).double()
    seen = mask & (times <= asked[:, None])
    found = layer(asked[None], values[None], times[None], seen[None])[0]
    queries, keys = (
        project(layer.time(t)).unflatten(1, (HEADS, -1))
        for project, t in ((layer.query_projection, asked), (layer.key_projection, times))
    )
    for m in range(3):
        for h in range(HEADS):
            logits = [q @ queries[m, h] / (DIM / HEADS) ** 0.5 for q in keys[:, h]]
            weights = [float(seen[m, n]) * logits[n].exp() for n in range(len(times))]
            for f in range(FEATURES):
                own = [n for n in range(len(times)) if seen[m, n] and not values[n, f].isnan()]
                total = sum(weights[n] for n in own)
                mean = sum(weights[n] * values[n, f] for n in own) / total if own else 0.0
                place = 2 * FEATURES * h + f
                assert float(found[m, place]) == pytest.approx(float(mean))
                share = float(total / sum(weights))
                assert float(found[m, place + FEATURES]) == pytest.approx(share)


@torch.no_grad()
@pytest.mark.parametrize("sees_all", [False, True], ids=["causal", "all"])
def test_a_read_is_one_more_reference(sees_all):
    sizes = {"static_dim": 0, "num_heads": HEADS, "num_references": 5, "sees_all": sees_all}
    layer = ReferenceRecurrence(FEATURES, DIM, **sizes).double()
    batch = irregular_batch(dim=FEATURES, ragged=False)
    encoded = layer(batch.x, batch.times, batch.mask)
    asked = [0.1, 0.25, 0.6, 1.7]
    reads = layer.read(encoded, batch.times[:, :1] + torch.tensor(asked).double())
    for m, t in enumerate(asked):
        times = [r for r in (0.0, 0.25, 0.5, 0.75, 1.0) if r < t] + [t]
        times = torch.tensor(times).double().expand(3, -1)
        wanted = layer.recurrence(layer._attend(encoded, times))[0][:, -1]
        torch.testing.assert_close(reads[:, m], wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_references": 1}, "num_references must be at least 2; got 1"),
        ({"dim": 9, "direction": "causal"}, "dim must be a multiple of num_heads; got dim=9"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MultiTimeAttentionNetwork(2, **settings)
