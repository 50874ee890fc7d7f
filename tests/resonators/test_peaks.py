"""Peaks: the frequency of a wave, to a fraction of a line, whatever its times, mean and phase."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from osciformer import ResonatorRegressor
from osciformer.data import IrregularSeries
from osciformer.resonators.peaks import STATISTICS, Peaks, highest, with_harmonics

from .cases import fitted

SPAN = 40.0
CLOSE = 0.07 / SPAN


def waves(
    frequencies: np.ndarray, amplitudes: tuple[float, ...] = (1.0,), *, noise: float = 0.1
) -> IrregularSeries:
    """Return waves with harmonics of some amplitudes at random times, and a second variable."""
    generator = np.random.default_rng(0)
    times = np.sort(generator.uniform(0.0, SPAN, (len(frequencies), 150)), axis=1)
    phases = generator.uniform(0.0, 2 * np.pi, (len(frequencies), 1))
    turns = 2 * np.pi * frequencies[:, None] * times + phases
    wave = 3.0 + sum(a * np.sin(k * turns) for k, a in enumerate(amplitudes, start=1))
    both = np.stack([wave + noise * generator.normal(size=times.shape), np.sin(times)], axis=-1)
    both[generator.random(both.shape) < 0.2] = np.nan
    return IrregularSeries.from_arrays(list(times), list(both))


def columns_of(series: IrregularSeries) -> dict[tuple[str, str], np.ndarray]:
    family = fitted(Peaks, series)
    columns = family.transform(series).T
    names = ((name.statistic, name.variables[0]) for name in family.names())
    return dict(zip(names, columns, strict=True))


def test_the_peak_is_the_frequency_of_a_wave() -> None:
    frequencies = np.random.default_rng(1).uniform(0.1, 1.5, 60)
    found = columns_of(waves(frequencies))
    place, log_place, share = (found[name, "feature_0"] for name in STATISTICS[:3])
    # A turn over the span apart, waves can be told apart; this is a fifteenth of it.
    np.testing.assert_allclose(place, frequencies, atol=CLOSE)
    np.testing.assert_allclose(log_place, np.log(place), rtol=1e-5)
    assert ((share > 0.95) & (share <= 1.01)).all()
    other = found[STATISTICS[0], "feature_1"]
    np.testing.assert_allclose(other, 1 / (2 * np.pi), atol=CLOSE)


def test_the_fundamental_is_found_below_a_stronger_harmonic() -> None:
    frequencies = np.random.default_rng(2).uniform(0.2, 0.6, 40)
    found = columns_of(waves(frequencies, (0.8, 1.0, 0.6)))
    # Each wave is noise to the other two.
    np.testing.assert_allclose(found[STATISTICS[0], "feature_0"], 2 * frequencies, atol=2 * CLOSE)
    is_right = np.abs(found[STATISTICS[3], "feature_0"] - frequencies) < 2 * CLOSE
    assert is_right.mean() >= 0.95


def test_a_lone_wave_is_its_own_fundamental() -> None:
    frequencies = np.random.default_rng(3).uniform(0.2, 1.4, 40)
    found = columns_of(waves(frequencies))
    np.testing.assert_allclose(found[STATISTICS[3], "feature_0"], frequencies, atol=CLOSE)


def test_too_few_observations_have_no_peak() -> None:
    series = waves(np.array([0.3, 0.5]))
    values = series.values.copy()
    values[series.offsets[1] :, 0] = np.nan
    values[series.offsets[1] : series.offsets[1] + 4, 0] = 1.0
    family = fitted(Peaks, series)
    found = family.transform(series.replace(values=values)).reshape(2, len(STATISTICS), 2)
    assert np.isnan(found[1, :, 0]).all()
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[1, :, 1]).all()


def test_the_top_of_a_parabola_is_exact() -> None:
    lines = torch.arange(1.0, 9.0, dtype=torch.float64)
    curves = torch.stack([2.0 - 0.1 * (lines - 3.3) ** 2, -(lines - 6.8).square()])[None]
    place, height = highest(curves, np.array([8, 8]))
    torch.testing.assert_close(place, torch.tensor([[3.3, 6.8]], dtype=torch.float64))
    torch.testing.assert_close(height, torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    # Lines beyond a variable's own do not count, and at the last line there is no parabola.
    place, _ = highest(curves, np.array([8, 4]))
    assert place[0, 1] == 4.0


def test_harmonics_are_those_on_the_grid() -> None:
    share = torch.rand(2, 3, 20)
    found = with_harmonics(share)
    for line in range(1, 21):
        wanted = torch.zeros(2, 3)
        for number, weight in ((1, 1.0), (2, 0.5), (3, 0.3)):
            if number * line <= 20:
                wanted += weight * share[..., number * line - 1]
        torch.testing.assert_close(found[..., line - 1], wanted)


@pytest.mark.parametrize("families", [None, ("spectrum",)])
def test_a_regressor_tells_the_frequency_by_the_peak(families: tuple[str, ...] | None) -> None:
    frequencies = np.random.default_rng(4).uniform(0.2, 1.4, 160)
    series = waves(frequencies, noise=0.5)
    model = ResonatorRegressor(families=families, random_state=0)
    model.fit(series[:120], frequencies[:120])
    error = np.sqrt(np.mean((model.predict(series[120:]) - frequencies[120:]) ** 2))
    # Shares of variance at each frequency are no linear function of it.
    assert (error < 0.02) == (families is None)
