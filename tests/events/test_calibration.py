"""Rescaled gaps are exponential under the right process, and tests and pictures say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from osciformer.events import (
    EventSequences,
    HawkesProcess,
    PoissonProcess,
    calibrate,
    plot_calibration,
    plot_intensity,
    rescaled_gaps,
    simulate_hawkes,
)
from osciformer.events.scores import critical_distance

from .event_cases import HAWKES, random_events


@pytest.fixture(scope="module")
def simulated() -> EventSequences:
    generator = torch.Generator().manual_seed(11)
    return simulate_hawkes(HAWKES, num_sequences=40, horizon=40.0, generator=generator)


@pytest.mark.parametrize("count", [5, 40, 1000])
def test_statistic_and_p_value_are_those_of_scipy(count: int) -> None:
    draws = np.random.default_rng(count).exponential(1.05, size=count)
    found, known = calibrate(draws), stats.kstest(draws, "expon")
    assert found.statistic == pytest.approx(known.statistic, rel=1e-12)
    assert found.p_value == pytest.approx(known.pvalue, abs=0.02)


@pytest.mark.parametrize("count", [10, 100, 3000])
@pytest.mark.parametrize("level", [0.95, 0.999])
def test_small_p_values_are_right_for_few_draws_too(count: int, level: float) -> None:
    distance = critical_distance(count, level)
    assert stats.kstwo(count).sf(distance) == pytest.approx(1 - level, rel=0.25)


def test_right_process_passes_and_wrong_ones_fail(simulated: EventSequences) -> None:
    assert calibrate(rescaled_gaps(HAWKES, simulated, span="window")).p_value > 1e-3
    rate = len(simulated.times) / (40 * 40)
    without_memory = PoissonProcess([rate / 2, rate / 2])
    assert calibrate(rescaled_gaps(without_memory, simulated, span="window")).p_value < 1e-6
    too_slow = HawkesProcess(HAWKES.base, HAWKES.branching, HAWKES.decay / 10)
    assert calibrate(rescaled_gaps(too_slow, simulated, span="window")).p_value < 1e-3


def test_joined_windows_are_exponential_though_most_are_empty() -> None:
    rng = np.random.default_rng(2)
    times = [np.sort(rng.uniform(0, 1, size=n)) for n in rng.poisson(0.7, size=2000)]
    events = EventSequences.from_arrays(
        times, starts=np.zeros(2000), ends=np.ones(2000), num_types=1
    )
    process = PoissonProcess([0.7])
    joined = rescaled_gaps(process, events, span="window")
    assert len(joined) == len(events.times)
    assert calibrate(joined).p_value > 1e-3
    # Between events alone, gaps are short, as windows are.
    assert calibrate(rescaled_gaps(process, events)).p_value < 1e-6


def test_gaps_between_events_are_integrals_of_the_intensity() -> None:
    events = random_events([4, 1, 3])
    gaps = rescaled_gaps(PoissonProcess([0.5, 1.0]), events)
    assert gaps == pytest.approx(1.5 * events.gaps)


def test_band_holds_its_level() -> None:
    rng = np.random.default_rng(0)
    distance = critical_distance(50, 0.9)
    inside = [calibrate(rng.exponential(size=50)).statistic <= distance for _ in range(2000)]
    assert abs(np.mean(inside) - 0.9) < 4 * np.sqrt(0.09 / 2000)
    expected, found, lower, upper = calibrate(rng.exponential(size=50)).quantiles(0.9)
    assert (lower <= expected).all()
    assert (expected <= upper).all()
    assert (np.diff(found) >= 0).all()


def test_nothing_or_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no increment to test"):
        calibrate(np.empty(0))
    with pytest.raises(ValueError, match="not negative"):
        calibrate(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        critical_distance(5, 1.0)


def test_pictures_are_drawn(tmp_path: Path, simulated: EventSequences) -> None:
    calibration = calibrate(rescaled_gaps(HAWKES, simulated))
    figure = plot_calibration(calibration)
    assert f"{calibration.statistic:.3f}" in figure.axes[0].get_title()
    figure.savefig(tmp_path / "one.png")
    intensity = plot_intensity(HAWKES, simulated, 1, num_points=50)
    lines = intensity.axes[0].get_lines()
    assert [line.get_label() for line in lines[:2]] == ["0", "1"]
    # The curve of each type begins at its base rate, before any event.
    assert [line.get_ydata()[0] for line in lines[:2]] == HAWKES.base.tolist()
    assert sum(len(line.get_xdata()) for line in lines[2:]) == len(simulated[1])
    intensity.savefig(tmp_path / "two.png")
    many = random_events([5], num_types=12)
    drawn = plot_intensity(PoissonProcess(torch.ones(12)), many)
    assert drawn.axes[0].get_lines()[0].get_ydata()[0] == 12.0
    with pytest.raises(ValueError, match="no length that could be drawn"):
        plot_intensity(HAWKES, EventSequences.from_arrays([[1.0]], num_types=2))
