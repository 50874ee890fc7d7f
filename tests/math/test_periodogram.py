"""Periodograms: lines are sums, shares are those of Lomb and Scargle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import lombscargle

from osciformer.math import line_sums, periodogram, variance_shares
from osciformer.ops import oscillator_response


@pytest.mark.parametrize("lines", [1, 5, 64, 150])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_lines_are_plain_sums_and_ends_of_undamped_oscillators(
    lines: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodogram, "_CHUNK", chunk)
    generator = np.random.default_rng(0)
    times, step = np.sort(generator.uniform(50, 60, (3, 9))), 0.07
    kicks = generator.normal(size=(3, 9, 2))
    found = line_sums(torch.from_numpy(times), torch.from_numpy(kicks), step, lines).numpy()
    numbers = np.arange(1, lines + 1)
    turns = np.exp(2j * np.pi * numbers * step * times[:, :, None])
    np.testing.assert_allclose(found, np.einsum("nif,nil->nfl", kicks, turns), atol=1e-5)
    omega = torch.from_numpy(2 * np.pi * step * numbers)
    x, v = oscillator_response(
        torch.from_numpy(kicks), torch.from_numpy(times), omega, torch.zeros(()), drive="impulse"
    )
    swing = torch.hypot(x, v / omega)[:, -1].numpy()
    np.testing.assert_allclose(np.abs(found), swing, atol=1e-5)


@pytest.mark.parametrize("hidden", [0.0, 0.3])
def test_shares_are_those_of_lomb_and_scargle(hidden: float) -> None:
    generator = np.random.default_rng(1)
    times = np.sort(generator.uniform(0, 10, (4, 40)))
    values = generator.normal(size=(4, 40, 3)) + 5.0
    known = generator.uniform(size=values.shape) >= hidden
    step, lines = 0.15, 30  # from one and a half turns on: less can hardly be told from a mean
    share, count, total = variance_shares(
        *(torch.from_numpy(x) for x in (times, values, known)), step, lines
    )
    angular = 2 * np.pi * step * np.arange(1, lines + 1)
    for b, f in np.ndindex(4, 3):
        seen = known[b, :, f]
        x = values[b, seen, f]
        wanted = lombscargle(times[b, seen], x, angular, floating_mean=True, normalize=True)
        np.testing.assert_allclose(share[b, f], wanted, atol=1e-4)
        np.testing.assert_allclose(total[b, f, 0], np.square(x - x.mean()).sum())
        assert count[b, f, 0] == seen.sum()


def test_a_sine_explains_itself_and_a_constant_has_no_variance() -> None:
    times = torch.rand(1, 50, dtype=torch.float64) * 20
    values = torch.stack((3 + torch.sin(2 * torch.pi * 0.35 * times), torch.ones_like(times)), -1)
    share, _, total = variance_shares(times, values, torch.ones_like(values).bool(), 0.05, 20)
    assert share[0, 0].argmax() == 6
    torch.testing.assert_close(share[0, 0, 6].item(), 1.0, atol=1e-5, rtol=0)
    assert total[0, 1] < 1e-20
    assert (share[0, 1] < 1e-6).all()
