"""ContiFormer over events: the integrals of a read, and which trajectories are solved."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from osciformer.baselines import contiformer
from osciformer.events import EventSequences

from .event_cases import padded
from .test_neural_baselines import EVENTS, small, some_gaps


@torch.no_grad()
def test_contiformer_integrates_keys_and_values_until_the_read() -> None:
    options = {"num_nodes": 200}  # the path of the queries has corners
    encoder = small("contiformer", encoder_options=options).encoder
    batch, i, gap = EVENTS[:1].batch(), 3, 1.7
    unit = float(encoder.embedding.scale.unit) * encoder.gaps_per_unit
    times = ((batch.times[0] - batch.times[0, 0]) / unit).numpy()
    block = encoder.blocks[0]
    layer, tokens = block.attention, encoder.embedding(batch)[0]
    normed = block.attention_norm(tokens)
    q, k, v = (
        projection(normed).detach().numpy()
        for projection in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    end = times[i] + gap / unit

    def path(t: float) -> np.ndarray:
        return np.array([np.interp(t, times[: i + 1], q[: i + 1, c]) for c in range(8)])

    logits, means = np.zeros((i + 1, 2)), np.zeros((i + 1, 8))
    for j in range(i + 1):

        def speed(t: float, y: np.ndarray) -> np.ndarray:
            states, now = torch.from_numpy(y[:16]), torch.tensor(t, dtype=torch.float64)
            fields = layer.key_field(now, states[:8]), layer.value_field(now, states[8:])
            product = (path(t) * y[:8]).reshape(2, 4).sum(axis=1)
            return np.concatenate([*(f.detach().numpy() for f in fields), product, y[8:16]])

        start = np.concatenate([k[j], v[j], np.zeros(10)])
        y = start
        for left, right in zip(times[j : i + 1], [*times[j + 1 : i + 1], end], strict=True):
            y = solve_ivp(speed, (left, right), y, rtol=1e-8, atol=1e-10).y[:, -1]
        logits[j] = y[16:18] / (end - times[j]) / math.sqrt(4)
        means[j] = y[18:] / (end - times[j])
    shares = np.exp(logits) / np.exp(logits).sum(axis=0)
    attended = torch.from_numpy((shares.repeat(4, axis=1) * means).sum(axis=0))
    expected = encoder.norm(block.residual(tokens[i], layer.output_projection(attended)))
    gaps = torch.full((1, 9, 1), gap, dtype=torch.float64)
    now = encoder.states(encoder.prepare(batch), gaps).now
    torch.testing.assert_close(now[0, i, 0], expected, rtol=0, atol=2e-5)


def test_contiformer_in_parts_is_contiformer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, results = EVENTS.batch(), []
    gaps = some_gaps(batch)
    for largest in (2**22, 1000):
        monkeypatch.setattr(contiformer, "_LARGEST_PART", {"cpu": largest})
        model = small("contiformer")
        rates = model.intensity_after(batch, gaps)
        rates.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(model.intensity_after(batch, gaps), rates)
        results.append((rates, *(p.grad for p in model.parameters())))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole)


@pytest.mark.slow  # compiles for some 20 seconds
# Of the compiler, which looks at a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_fused_steps_change_nothing_but_rounding() -> None:
    batch, results = EVENTS.batch(), []
    gaps = some_gaps(batch)
    for fuse in (False, True):
        model = small("contiformer", encoder_options={"fuse": fuse})
        rates = model.intensity_after(batch, gaps)
        (rates * torch.linspace(0, 1, rates.numel()).view_as(rates)).sum().backward()
        results.append((rates, *(p.grad for p in model.parameters())))
    assert any(bool((x != y).any()) for x, y in zip(*results, strict=True))  # two programs ran
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("largest", [1000, 20], ids=["whole", "parts"])
def test_only_the_past_of_present_events_is_solved(
    monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    encoder = small("contiformer").encoder
    monkeypatch.setattr(contiformer, "_LARGEST_PART", {"cpu": largest * encoder.dim})
    layer, asked = encoder.blocks[0].attention, []
    layer.value_field.register_forward_hook(lambda _, inputs, out: asked.append(len(inputs[1])))
    num_pairs = sum(n * (n + 1) // 2 for n in (9, 6, 1, 0))
    evaluations = 3 * 4  # a step to each node
    batch = padded(EVENTS.batch(), 5, math.nan)
    prepared = encoder.prepare(batch)
    assert asked == [num_pairs] * evaluations
    asked.clear()
    encoder.states(prepared, some_gaps(batch, 3))
    assert sum(asked) == 3 * num_pairs * evaluations
    assert max(asked) == min(largest, 3 * num_pairs)


@pytest.mark.parametrize(("lengths", "num_gaps"), [([0, 0], 2), ([2, 0], 0)])
def test_nothing_to_read_gives_finite_states(lengths: list[int], num_gaps: int) -> None:
    encoder = small("contiformer").encoder
    events = EventSequences.from_arrays(
        [np.arange(n) for n in lengths], [np.zeros(n, dtype=int) for n in lengths], num_types=2
    )
    batch = events.batch()
    gaps = torch.ones(*batch.mask.shape, num_gaps, dtype=torch.float64)
    states = encoder.states(encoder.prepare(batch), gaps)
    assert states.now.shape == (*gaps.shape, encoder.dim)
    assert torch.isfinite(states.after).all()
    assert torch.isfinite(states.now).all()
