"""Spectra: lines are sums, shares are those of Lomb and Scargle, slow parts are what is left."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lombscargle

from osciformer.data import IrregularSeries
from osciformer.data.batches import collate
from osciformer.resonators import spectrum
from osciformer.resonators.spectrum import Spectrum

from .cases import fitted, ragged


def test_shares_are_those_of_lomb_and_scargle() -> None:
    series = ragged(3, shortest=20, longest=30)
    family = fitted(Spectrum, series)
    assert "coarse" not in family.arrays
    found = dict(zip(family.names(), family.transform(series).T, strict=True))
    spans = series.spans.max()
    checked = 0
    for name, column in found.items():
        # Shorter than a turn, a sine and a mean can hardly be told apart.
        if name.statistic != spectrum.STATISTICS[0] or name.period > 0.8 * spans:
            continue
        for number, one in enumerate(series):
            values = one.values[:, series.feature_names.index(name.variables[0])].astype(float)
            seen = ~np.isnan(values)
            count = seen.sum()
            share = lombscargle(
                one.times[seen],
                values[seen],
                np.array([2 * np.pi / name.period]),
                floating_mean=True,
                normalize=True,
            ).item()
            # A mean and two amplitudes fit three observations of whatever.
            share = max(0.0, 1.0 - (1.0 - share) * (count - 1) / (count - 3))
            assert column[number] == pytest.approx(share**1.5, abs=2e-3)
            checked += 1
    assert checked > 100


def test_the_slow_part_is_a_mean_with_exponential_weights() -> None:
    series = ragged(4)
    family = fitted(Spectrum, series)
    batch = collate(series)
    values, times = batch.values.double(), batch.times.double()
    known = ~values.isnan() & batch.mask[..., None]
    found = family._without_slow(values, times, batch.mask, known).numpy()
    for number, one in enumerate(series):
        for variable in range(2):
            seen = ~np.isnan(one.values[:, variable])
            t, u = one.times[seen], one.values[seen, variable].astype(float)
            apart = np.abs(t[:, None] - t) / (6.0 * family.arrays["gap"][variable])
            wanted = u - np.exp(-apart) @ u / np.exp(-apart).sum(axis=1)
            row = found[number, :, variable]
            np.testing.assert_allclose(row[: len(one)][seen], wanted, atol=1e-9)
            assert np.isnan(np.delete(row, np.flatnonzero(seen))).all()


def waves(rows: int, count: int = 4) -> IrregularSeries:
    generator = np.random.default_rng(0)
    times = [np.sort(generator.uniform(0, 100, rows)) for _ in range(count)]
    phases = generator.uniform(0, 2 * np.pi, count)
    values = [np.sin(2 * np.pi * 0.5 * t + p) for t, p in zip(times, phases, strict=True)]
    return IrregularSeries.from_arrays(times, values)


@pytest.mark.parametrize("rows", [60, 2000])
def test_a_sine_of_any_phase_is_all_variance_at_its_line(rows: int) -> None:
    series = waves(rows)
    family = fitted(Spectrum, series)
    assert ("coarse" in family.arrays) == (rows == 2000)
    found, names = family.transform(series), family.names()
    for kind in dict.fromkeys(name.statistic for name in names):
        own = [k for k, name in enumerate(names) if name.statistic == kind]
        best = found[:, own].argmax(axis=1)
        for place in best:
            period = names[own[place]].period
            assert period is not None
            step = family.arrays["coarse" if "blocks" in kind else "spacing"]
            assert abs(1.0 / period - 0.5) <= step
    assert found[:, : int(family.arrays["lines"][0])].max(axis=1).min() > 0.75


def test_blocks_are_sums_over_parts_of_rows() -> None:
    series = waves(700)
    values = series.values.copy()
    values[::7] = np.nan
    series = series.replace(values=values)
    family = fitted(Spectrum, series)
    rows, step = int(family.arrays["block"]), float(family.arrays["coarse"])
    (lines,) = family.arrays["coarse_lines"]
    batch = collate(series)
    known = ~batch.values.isnan() & batch.mask[..., None]
    found = family._shares_of_blocks(batch.values.double(), batch.times, known)
    one = series[0]
    t, u = one.times, one.values[:, 0].astype(float)
    u = np.where(np.isnan(u), 0.0, u - np.nanmean(u))
    count, power = np.sum(u != 0), np.zeros(lines)
    for start in range(0, len(t), rows):
        part = slice(start, start + rows)
        turns = np.exp(2j * np.pi * step * np.outer(np.arange(1, lines + 1), t[part]))
        power += np.abs(turns @ u[part]) ** 2
    parts = np.ceil(count / rows)
    share = np.clip(2 * parts * power / (count * np.sum(u**2)) - 2 * parts / count, 0, 1)
    np.testing.assert_allclose(found[0], share**1.5, atol=1e-4)


def test_too_few_observations_and_none_have_no_spectrum() -> None:
    series = ragged(5)
    family = fitted(Spectrum, series)
    times = [np.arange(4.0), np.arange(9.0), np.arange(9.0)]
    values = [np.eye(4)[:, :2], np.full((9, 2), 3.0), np.full((9, 2), np.nan)]
    odd = IrregularSeries.from_arrays(times, values, empty="keep")
    assert (family.transform(odd) == 0).all()


def test_lines_end_at_half_a_turn_over_small_gaps_and_stay_few() -> None:
    for variables, rows in ((1, 30), (3, 30), (80, 30), (1, 5000)):
        series = ragged(2, variables, shortest=rows, longest=rows)
        family = fitted(Spectrum, series)
        names = family.names()
        assert len(names) <= 2 * max(spectrum.ALL_LINES, variables * spectrum.FEWEST_LINES)
        spans = series.spans
        assert max(name.period or 0.0 for name in names) >= 0.9 * spans.min()
