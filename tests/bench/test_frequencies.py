"""The table of frequencies in noise: its series, and the spectra."""

from __future__ import annotations

import numpy as np
import pytest

from osciformer.bench.tables import frequencies as suite
from osciformer.bench.tables.models import spectra


@pytest.mark.parametrize("case", suite.CASES)
def test_the_signal_is_a_sine_of_the_frequency_of_the_label(case):
    settings = suite.CASES[case]
    series = suite.make_series(50, 3, **settings)
    middle = settings.get("variables", 1) // 2
    residuals = []
    for one, label in zip(series, series.labels, strict=True):
        seen = ~np.isnan(one.values[:, middle])
        times, values = one.times[seen], one.values[seen, middle]
        # Frequency f (1 + drift t / 100): its integral is the phase.
        drift = settings.get("drift", 0.0)
        turns = settings["frequencies"][label] * (times + drift * times**2 / 200)
        waves = np.stack([np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)], axis=1)
        found, *_ = np.linalg.lstsq(waves, values, rcond=None)
        residuals.append(values - waves @ found)
        assert 0.4 < np.hypot(*found) < 1.6
        assert len(values) == settings.get("rows", 60)
        assert (np.diff(one.times) >= 0).all()
    assert np.std(np.concatenate(residuals)) == pytest.approx(0.5, rel=0.1)
    assert set(series.labels) == set(range(len(settings["frequencies"])))


def test_variables_have_own_times_or_share_them():
    settings = {"frequencies": (0.3, 0.5), "variables": 5, "rows": 7}
    assert not np.isnan(suite.make_series(4, 0, **settings).values).any()
    own = suite.make_series(4, 0, **settings, has_own_times=True)
    assert own.lengths.tolist() == [35] * 4
    assert (np.isnan(own.values).sum(axis=1) == 4).all()


def test_a_spectrum_peaks_at_the_frequency_of_each_variable():
    series = suite.make_series(6, 0, (0.3, 0.7), rows=200, variables=3, has_own_times=True)
    found = spectra(series, 0.005, 200)
    peaks = 0.005 * (1 + found[:, 1].argmax(axis=1))
    np.testing.assert_allclose(peaks, np.array([0.3, 0.7])[series.labels], atol=0.006)
