"""Variables by themselves: their spectra, their reads at shared times, and what comes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lombscargle

from osciformer.data.batches import Batch
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.models.variables import VariableEncoder

from .task_batches import FEATURES, STATIC, make_batch, pad_with_garbage, take

WIDTHS = (0.25, 1.0, 4.0)


def make(**settings) -> SeriesModel:
    sizes = {"input_dim": FEATURES, "static_dim": STATIC, "output_dim": 2, "dim": 8}
    batch = make_batch()
    model = SeriesModel(SeriesModelConfig(**{**sizes, "variables": True, **settings}))
    return model.fit_time_scale(batch.times, batch.mask).eval()


def encoder_of(batch: Batch, **settings) -> VariableEncoder:
    encoder = VariableEncoder(batch.values.shape[2], dim=8, num_heads=2, **settings)
    return encoder.fit_time_scale(batch.times, batch.mask).eval()


def split(encoder: VariableEncoder, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return spectra [B, F, L], means [B, F, G, 2, K] (past, future) and densities [B, F, G]."""
    found = encoder.describe(batch.values, batch.times, batch.mask).numpy()
    lines, reads = encoder.lines.most, encoder.num_reads
    spectra, means, near = np.split(found, [lines, found.shape[2] - reads], axis=2)
    return spectra, means.reshape(*found.shape[:2], reads, 2, len(WIDTHS)), near


def test_reads_are_means_with_weights_that_fall_off_exponentially() -> None:
    batch = make_batch(5, 12)
    encoder = encoder_of(batch, num_reads=5)
    _, means, near = split(encoder, batch)
    for b, f in np.ndindex(5, FEATURES):
        present = batch.mask[b].numpy()
        times = batch.times[b].numpy()[present]
        values = batch.values[b, :, f].double().numpy()[present]
        known = ~np.isnan(values)
        if not present.any():
            assert (means[b] == 0).all()
            continue
        distance = (times[-1] - times[0]) / 4 if len(times) > 1 else 1.0
        for g in range(5):
            ahead = (times[0] + g * distance - times) / distance
            for side, sign in enumerate((1.0, -1.0)):
                for k, width in enumerate(WIDTHS):
                    some = known & (sign * ahead >= -1e-12)
                    weight = np.exp(-sign * ahead[some] / width)
                    mean = (weight * values[some]).sum() / (weight.sum() + 1e-3)
                    np.testing.assert_allclose(means[b, f, g, side, k], mean, atol=1e-5)
                    if side == 0 and width == 1.0:
                        wanted = np.log1p(weight.sum()) - 0.7
                        np.testing.assert_allclose(near[b, f, g], wanted, atol=1e-5)


def test_spectra_are_scaled_shares_of_lomb_and_scargle() -> None:
    batch = make_batch(4, 40, ragged=False)
    encoder = encoder_of(batch)
    spectra, _, _ = split(encoder, batch)
    count = int(encoder.lines.count)
    frequency = float(encoder.lines.step) * np.arange(1, count + 1)
    checked = frequency > 1.5 / 40.0  # less than a turn can hardly be told from a mean
    assert checked.sum() > 50
    for b, f in ((0, 0), (1, 1), (3, 2)):
        seen = ~batch.values[b, :, f].isnan().numpy()
        times, values = batch.times[b].numpy()[seen], batch.values[b, :, f].double().numpy()[seen]
        angular = 2 * np.pi * frequency[checked]
        share = lombscargle(times, values, angular, floating_mean=True, normalize=True)
        wanted = np.arcsinh(2 * (np.sqrt(seen.sum() * share / 2) - np.sqrt(np.pi) / 2))
        np.testing.assert_allclose(spectra[b, f, :count][checked], wanted, atol=5e-3)
    assert (spectra[:, :, count:] == 0).all()
    assert (spectra[1, 2] == 0).all()  # never measured


@given(shift=st.floats(-1e6, 1e6), scale=st.floats(1e-3, 1e3))
def test_neither_the_unit_nor_the_origin_of_time_matters(shift: float, scale: float) -> None:
    batch = make_batch(4, 20)
    # Powers of two and whole numbers leave the gaps as they are.
    scale, shift = 2.0 ** round(np.log2(scale)), float(round(shift))
    other = replace(batch, times=batch.times * scale + scale * shift)
    wanted = encoder_of(batch).describe(batch.values, batch.times, batch.mask)
    found = encoder_of(other).describe(other.values, other.times, other.mask)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_variables_are_described_one_by_one() -> None:
    batch = make_batch(4, 20)
    encoder = encoder_of(batch)
    order = [2, 0, 1]
    found = encoder.describe(batch.values[..., order], batch.times, batch.mask)
    wanted = encoder.describe(batch.values, batch.times, batch.mask)[:, order]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("span", [50.0, 2000.0])
def test_lines_reach_from_a_slow_turn_to_the_small_gaps(span: float) -> None:
    times = torch.linspace(0, span, 51, dtype=torch.float64).expand(3, -1)
    lines = VariableEncoder(1).fit_time_scale(times).lines
    top = 0.5 / (span / 50)
    assert lines.step * lines.count == pytest.approx(top, rel=0.05)
    assert 2.0 <= 1.0 / (float(lines.step) * span) <= 4.0


@pytest.mark.parametrize("dim", [5, 18])
def test_any_width_will_do(dim: int) -> None:
    assert make(dim=dim, num_heads=1)(make_batch()).isfinite().all()


def test_times_may_be_many() -> None:
    times = torch.arange(2**24 + 8, dtype=torch.float64)[None]  # more than torch.quantile takes
    lines = VariableEncoder(1).fit_time_scale(times).lines
    assert lines.step.item() == pytest.approx(0.5 / times.amax().item())


def test_the_last_values_of_each_variable_reach_its_own_token(monkeypatch) -> None:
    model, batch, seen = make(statistics=("last", "count")), make_batch(), []
    assert model.variables is not None
    monkeypatch.setattr(
        model.variables, "forward", lambda *given: seen.append(given[-1]) or torch.zeros(4, 16)
    )
    model(batch)
    rows = batch.values[0, :, 0]
    assert seen[0].shape == (4, FEATURES, 2)
    assert seen[0][0, 0, 0] == rows[~rows.isnan()][-1]
    assert seen[0][1, 2].tolist() == [0.0, 0.0]  # never measured


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("static", [0, STATIC])
def test_padding_and_the_order_of_the_batch_change_nothing(skip: bool, static: int) -> None:
    model, batch = make(skip=skip, static_dim=static), make_batch(static=bool(static))
    out = model(batch)
    assert out.isfinite().all()
    torch.testing.assert_close(model(pad_with_garbage(batch)), out, rtol=1e-5, atol=1e-5)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(take(batch, order)), out[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_and_empty_series_are_finite(length: int) -> None:
    batch = make_batch(3, length, ragged=False)
    assert make()(batch).isfinite().all()
