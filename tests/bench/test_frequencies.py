"""The benchmark of frequencies in noise: its series, the spectra, and a toy run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from .scripts import load

(script,) = load("frequencies")


@pytest.mark.parametrize("case", script.CASES)
def test_the_signal_is_a_sine_of_the_frequency_of_the_label(case):
    settings = script.CASES[case]
    series = script.make_series(50, 3, **settings)
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
    assert not np.isnan(script.make_series(4, 0, **settings).values).any()
    own = script.make_series(4, 0, **settings, has_own_times=True)
    assert own.lengths.tolist() == [35] * 4
    assert (np.isnan(own.values).sum(axis=1) == 4).all()


def test_a_spectrum_peaks_at_the_frequency_of_each_variable():
    series = script.make_series(6, 0, (0.3, 0.7), rows=200, variables=3, has_own_times=True)
    found = script.spectra(series).reshape(6, 3, -1)
    peaks = script.LINES[found[:, 1].argmax(axis=1)]
    np.testing.assert_allclose(peaks, np.array([0.3, 0.7])[series.labels], atol=0.006)


def test_a_toy_run_writes_rows_and_a_table(tmp_path):
    output, table = tmp_path / "out.json", tmp_path / "out.md"
    files = ["--output", str(output), "--table", str(table)]
    models = "--models=resonator,lomb_scargle,osciformer"
    assert script.main([*files, "--quick", "--cases=two x 60", models]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["model"] for row in rows] == ["resonator", "lomb_scargle", "osciformer"]
    assert all(row["accuracy"] > 0.9 for row in rows)
    text = table.read_text()
    assert "| case | resonator | osciformer | network | lomb_scargle |" in text
    assert f"| two x 60 | {rows[0]['accuracy']:.3f} | {rows[2]['accuracy']:.3f} |" in text
