"""The next event: means, medians and types against closed forms and against quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from osciformer._types import Tensor
from osciformer.events import (
    EventBatch,
    EventProcess,
    EventSequences,
    PoissonProcess,
    RenewalProcess,
    predict_last,
    predict_next,
    type_probabilities_at,
)

from .event_cases import HAWKES, WithoutClosedForms, hawkes_rate, padded, random_events


class GapHazard(EventProcess):
    """A process whose intensities are functions of the time since the last event."""

    def __init__(self, *hazards) -> None:
        self.hazards, self.num_types = hazards, len(hazards)

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Tensor:
        last = (batch.count_before(query_times) - 1).clamp(min=0)
        gap = query_times - batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        return torch.stack([hazard(gap) for hazard in self.hazards], dim=-1)


BATCH = random_events([3, 1, 0]).batch()


def test_constant_rates_have_their_closed_forms() -> None:
    found = predict_next(PoissonProcess([0.5, 1.5]), BATCH, horizon=1e3)
    mask = found.mask
    assert found.mean[mask].tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    assert found.restricted_mean[mask].tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    assert found.median[mask].tolist() == pytest.approx([math.log(2) / 2] * 4, rel=1e-6)
    assert found.type_probability[mask][:, 0].tolist() == pytest.approx([0.25] * 4, rel=1e-6)
    assert found.survival[mask].max() == 0
    assert found.error < 1e-4


@pytest.mark.parametrize("slope", [1e-4, 1.0, 1e4])
def test_linear_hazards_have_their_closed_forms_on_any_scale(slope: float) -> None:
    found = predict_next(GapHazard(lambda g: slope * g), BATCH, horizon=1e6, tolerance=1e-8)
    mean, median = math.sqrt(math.pi / (2 * slope)), math.sqrt(2 * math.log(2) / slope)
    assert found.mean[found.mask].tolist() == pytest.approx([mean] * 4, rel=1e-6)
    assert found.median[found.mask].tolist() == pytest.approx([median] * 4, rel=1e-7)


def test_types_are_those_of_the_times_at_which_they_come() -> None:
    early, late = lambda g: 3 * torch.exp(-2 * g), lambda g: g**2
    found = predict_next(GapHazard(early, late), BATCH, horizon=1e3, tolerance=1e-8)

    def survival(g: float) -> float:
        return math.exp(-1.5 * (1 - math.exp(-2 * g)) - g**3 / 3)

    share = quad(lambda g: 3 * math.exp(-2 * g) * survival(g), 0, 20, epsabs=1e-12)[0]
    mean = quad(survival, 0, 20, epsabs=1e-12)[0]
    assert found.type_probability[found.mask][:, 0].tolist() == pytest.approx([share] * 4, abs=1e-7)
    assert found.mean[found.mask].tolist() == pytest.approx([mean] * 4, abs=1e-6)


@pytest.mark.parametrize("total", [0.3, 2.0])
def test_a_hazard_that_dies_out_has_finite_predictions(total: float) -> None:
    process = GapHazard(lambda g: total * torch.exp(-g))
    horizon = 50.0
    found = predict_next(process, BATCH, horizon=horizon, tolerance=1e-9)
    never = math.exp(-total)
    density = lambda g: total * math.exp(-g - total * (1 - math.exp(-g)))  # noqa: E731
    mean = quad(lambda g: g * density(g), 0, horizon, epsabs=1e-13, limit=200)[0] / (1 - never)
    mask = found.mask
    assert found.survival[mask].tolist() == pytest.approx([never] * 4, rel=1e-8)
    assert found.mean[mask].tolist() == pytest.approx([mean] * 4, rel=1e-6)
    restricted = mean * (1 - never) + horizon * never
    assert found.restricted_mean[mask].tolist() == pytest.approx([restricted] * 4, rel=1e-6)
    reached = total > math.log(2)
    median = -math.log(1 - math.log(2) / total) if reached else horizon
    assert found.median[mask].tolist() == pytest.approx([median] * 4, rel=1e-7)


def test_a_process_without_events_predicts_the_horizon_and_even_types() -> None:
    found = predict_next(PoissonProcess([0.0, 0.0]), BATCH, horizon=7.0)
    mask = found.mask
    assert found.mean[mask].tolist() == [7.0] * 4
    assert found.median[mask].tolist() == [7.0] * 4
    assert found.survival[mask].tolist() == [1.0] * 4
    assert found.type_probability[mask].tolist() == [[0.5, 0.5]] * 4


def test_jumps_that_the_process_names_cost_no_accuracy() -> None:
    events = random_events([60], num_types=1)
    process = RenewalProcess.fit(events, num_bins=7)
    density = process.gaps
    middle = (density.edges[:-1] + density.edges[1:]) / 2
    beyond = 1 - float(density.mass.sum())
    mean = float((density.mass * middle).sum())
    mean += beyond * (float(density.edges[-1]) + 1 / density.tail_rate)
    found = predict_next(process, events.batch(), horizon=1e4, tolerance=1e-8)
    assert found.mean[0].tolist() == pytest.approx([mean] * 60, rel=1e-6)
    calls = []
    counted = RenewalProcess(density, process.transition, process.initial)
    ask = counted.intensity_after
    counted.intensity_after = lambda *given: calls.append(1) or ask(*given)
    predict_next(counted, events.batch(), horizon=1e4, tolerance=1e-8)
    assert len(calls) < 100  # jumps that have to be found cost some twenty halvings each
    half = torch.exp(-density.cumulative_hazard(found.median[0]))
    assert half.tolist() == pytest.approx([0.5] * 60, rel=1e-7)


@pytest.mark.parametrize("wrap", [lambda p: p, WithoutClosedForms], ids=["own", "default"])
def test_prediction_knows_the_events_up_to_each_one_and_no_others(wrap) -> None:
    events = random_events([4, 2])
    found = predict_next(wrap(HAWKES), events.batch(), horizon=500.0, tolerance=1e-8)
    one = events[0]
    for i in range(len(one)):
        times, types = one.times[: i + 1], one.types[: i + 1]

        def total(gap: float, times=times, types=types) -> float:
            t = times[-1] + gap
            return sum(hawkes_rate(HAWKES, times, types, t, k) for k in range(2))

        grid = np.concatenate([np.linspace(1e-12, 6, 3001), np.linspace(6, 60, 3001)[1:]])
        rates = np.array([total(g) for g in grid])
        hazard = np.concatenate([[0], np.cumsum(np.diff(grid) * (rates[1:] + rates[:-1]) / 2)])
        survival = np.exp(-hazard)
        mean = np.trapezoid(survival, grid)
        assert float(found.mean[0, i]) == pytest.approx(mean, rel=1e-4)
        assert float(found.median[0, i]) == pytest.approx(
            np.interp(math.log(2), hazard, grid), rel=1e-4
        )


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_padding_changes_nothing(junk: float) -> None:
    before = predict_next(HAWKES, BATCH, horizon=100.0)
    after = predict_next(HAWKES, padded(BATCH, 2, junk), horizon=100.0)
    for name in ("mean", "median", "survival", "type_probability"):
        new, old = (getattr(item, name)[item.mask] for item in (after, before))
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-12)


def test_types_at_a_time_are_shares_of_left_limits() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0]], [[0, 1]])
    batch = events.batch()
    found = type_probabilities_at(HAWKES, batch, batch.times)
    rates = [hawkes_rate(HAWKES, np.zeros(1), np.zeros(1, int), 1.0, k) for k in range(2)]
    assert found[0, 1].tolist() == pytest.approx([rate / sum(rates) for rate in rates])
    dead = type_probabilities_at(PoissonProcess([0.0, 0.0]), batch, batch.times)
    assert dead[0].tolist() == [[0.5, 0.5]] * 2


def test_wrong_arguments_and_endless_work_are_refused() -> None:
    with pytest.raises(ValueError, match="horizon must be positive and finite"):
        predict_next(HAWKES, BATCH, horizon=math.inf)
    with pytest.raises(RuntimeError, match="not predicted after 3 steps"):
        predict_next(HAWKES, BATCH, horizon=1e9, negligible=1e-300, max_steps=3)


@pytest.mark.parametrize("process", [HAWKES, RenewalProcess.fit(random_events([30]), num_bins=5)])
def test_the_last_event_is_predicted_as_among_all(process: EventProcess) -> None:
    batch = random_events([9, 4, 1, 0]).batch()
    last = predict_last(process, batch, horizon=50.0, tolerance=1e-8)
    among_all = predict_next(process, batch, horizon=50.0, tolerance=1e-8)
    assert last.mask[:, 0].tolist() == [True, True, True, False]
    rows = torch.arange(3)
    for name in ("mean", "restricted_mean", "median", "survival", "type_probability"):
        found, wanted = getattr(last, name)[:3, 0], getattr(among_all, name)
        torch.testing.assert_close(found, wanted[rows, batch.lengths[:3] - 1], rtol=1e-6, atol=1e-7)
