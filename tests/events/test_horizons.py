"""Forecasts of several events: known distances and precisions, and the right process wins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

from osciformer.events import (
    EventsAhead,
    EventSequences,
    HawkesProcess,
    HorizonForecast,
    PoissonProcess,
    average_precision,
    draw_next,
    forecast_from_draws,
    score_horizon,
    simulate_hawkes,
    split_last,
    temporal_average_precision,
    transport_distance,
)

# Types come in turns, soon after each other.
ALTERNATING = HawkesProcess(base=[0.1, 0.1], branching=[[0.0, 0.8], [0.8, 0.0]], decay=3.0)


def events(waits: list[list[float]], types: list[list[int]]) -> EventsAhead:
    return EventsAhead(np.array(waits), np.array(types))


def cheapest(one: EventsAhead, other: EventsAhead, cost: float) -> float:
    """Return the distance of one pair of short sequences, by trying all matchings."""
    (times, kinds), (waits, types) = (
        (item.waits[0][comes], item.types[0][comes])
        for item in (one, other)
        for comes in [np.isfinite(item.waits[0])]
    )
    if len(times) > len(waits):
        (times, kinds), (waits, types) = (waits, types), (times, kinds)
    best = math.inf
    for size in range(len(times) + 1):
        for chosen in itertools.combinations(range(len(times)), size):
            for onto in itertools.permutations(range(len(waits)), size):
                pairs = list(zip(chosen, onto, strict=True))
                if all(kinds[i] == types[j] for i, j in pairs):
                    moved = sum(abs(times[i] - waits[j]) for i, j in pairs) / cost
                    best = min(best, moved + len(times) + len(waits) - 2 * size)
    return best


def test_the_distance_is_that_of_the_cheapest_way() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        pair = [
            EventsAhead(np.cumsum(rng.exponential(size=(1, n)), axis=1), rng.integers(0, 2, (1, n)))
            for n in rng.integers(1, 5, size=2)
        ]
        pair[0].waits[0, rng.uniform(size=pair[0].waits.shape[1]) < 0.2] = np.inf
        for cost in (0.2, 1.0, 5.0):
            expected = cheapest(*pair, cost)
            assert transport_distance(*pair, [cost])[0] == pytest.approx(expected)


def test_the_distance_is_a_mean_over_costs_between_0_and_two_for_each_event() -> None:
    one = events([[1.0, 2.0], [1.0, 2.0]], [[0, 1], [0, 1]])
    other = events([[1.0, 2.5], [9.0, 9.0]], [[0, 1], [1, 0]])
    assert transport_distance(one, one, [0.3]).tolist() == [0.0, 0.0]
    # Half a unit is half the cost of 1, and beyond twice that of 0.1.
    assert transport_distance(one, other, [1.0, 0.1]).tolist() == [(0.5 + 2.0) / 2, 4.0]
    assert np.array_equal(
        transport_distance(one, other, [1.0]), transport_distance(other, one, [1.0])
    )
    with pytest.raises(ValueError, match="costs must be positive"):
        transport_distance(one, other, [0.0])


def test_average_precision_is_the_area_under_its_steps() -> None:
    right = np.array([True, False, True, True])
    scores = np.array([0.9, 0.8, 0.7, 0.6])
    assert average_precision(scores, right, 5) == pytest.approx((1 + 2 / 3 + 3 / 4) / 5)
    # The order of what is given, and of equal scores, does not matter.
    assert average_precision(scores[::-1], right[::-1], 5) == average_precision(scores, right, 5)
    for order in itertools.permutations(range(4)):
        assert average_precision(np.ones(4), right[list(order)], 3) == pytest.approx(0.75)
    assert average_precision(np.empty(0), np.empty(0, dtype=bool), 3) == 0.0
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores, right = rng.integers(0, 5, 50) / 5.0, rng.uniform(size=50) < 0.4
    found = average_precision(scores, right, int(right.sum()))
    assert found == pytest.approx(sklearn.average_precision_score(right, scores))


def sure(actual: EventsAhead, num_types: int) -> HorizonForecast:
    return HorizonForecast(actual.waits, np.eye(num_types)[actual.types], actual)


def test_a_forecast_of_what_came_is_perfect_and_a_late_one_is_not() -> None:
    actual = events([[1.0, 2.0, 3.0], [0.5, 4.0, 4.5]], [[0, 1, 1], [1, 0, 1]])
    perfect = score_horizon(sure(actual, 3), actual, [0.1, 0.4])
    assert (perfect.t_map, perfect.transport, perfect.num_histories) == (1.0, 0.0, 2)
    late = EventsAhead(actual.waits + 0.25, actual.types)
    # Within one of two tolerances; costs are half of them.
    found = score_horizon(sure(late, 3), actual, [0.1, 0.4])
    assert found.t_map == pytest.approx(0.5)
    assert found.transport == pytest.approx((6.0 + 3 * 0.25 / 0.2) / 2)


def test_no_histories_have_no_score() -> None:
    none = EventsAhead(np.empty((0, 3)), np.empty((0, 3), dtype=np.int64))
    found = score_horizon(sure(none, 3), none, [0.1, 0.4])
    assert found.num_histories == 0
    assert np.isnan(found.t_map)
    assert np.isnan(found.transport)


def test_precision_of_types_by_hand() -> None:
    # Type 0: a right prediction of score 0.6 and a wrong one of 0.9, for two events.
    # Type 1: one of score 0.4, right, for one event; another of 0.1, wrong.
    actual = events([[1.0, 2.0, 3.0]], [[0, 1, 0]])
    forecast = HorizonForecast(
        np.array([[1.0, 2.0, 9.0]]),
        np.array([[[0.6, 0.0], [0.0, 0.4], [0.9, 0.1]]]),
        actual,
    )
    expected = (0.5 * 0.5 + 1.0) / 2
    assert temporal_average_precision(forecast, actual, [0.5]) == pytest.approx(expected)
    # An event is found once: the second prediction of it is wrong.
    twice = HorizonForecast(np.array([[1.0, 1.1, 3.0]]), np.full((1, 3, 1), 0.5), actual)
    alone = events([[1.0]], [[0]])
    assert temporal_average_precision(twice, alone, [0.5]) == pytest.approx(1 / 3)


def test_the_matching_finds_all_that_can_be_found() -> None:
    # Taking the nearest event for the first prediction would leave none for the second.
    actual = events([[1.0, 2.0]], [[0, 0]])
    forecast = HorizonForecast(np.array([[1.6, 2.4]]), np.array([[[0.5], [0.4]]]), actual)
    assert temporal_average_precision(forecast, actual, [0.7]) == 1.0


def test_last_events_are_cut_off() -> None:
    given = EventSequences.from_arrays(
        [[0.0, 1.0, 3.0, 7.0], [2.0, 5.0], [1.0, 2.0, 4.0]], [[0, 1, 2, 0], [1, 1], [2, 0, 1]]
    )
    histories, after = split_last(given, 2)
    assert [item.times.tolist() for item in histories] == [[0.0, 1.0], [1.0]]
    assert [item.types.tolist() for item in histories] == [[0, 1], [2]]
    assert histories.ids.tolist() == [0, 2]
    assert after.waits.tolist() == [[2.0, 6.0], [1.0, 3.0]]
    assert after.types.tolist() == [[2, 0], [0, 1]]
    assert len(split_last(given, 2, min_history=2)[0]) == 1
    assert len(split_last(given, 5)[1]) == 0


def test_draws_are_those_of_the_process() -> None:
    histories = EventSequences.from_arrays([[3.0], [0.0, 1.0]], num_types=2)
    process = PoissonProcess([1.5, 0.5])
    generator = torch.Generator().manual_seed(0)
    settings = {"num_draws": 4000, "generator": generator}
    draws = draw_next(process, histories, 3, longest=100.0, **settings)
    assert draws.waits.shape == draws.types.shape == (2, 4000, 3)
    # Gamma variables of 1, 2 and 3 events; a quarter are of type 1.
    assert draws.waits.mean(axis=(0, 1)) == pytest.approx([0.5, 1.0, 1.5], rel=0.03)
    assert draws.types.mean() == pytest.approx(0.25, abs=0.01)
    short = draw_next(process, histories, 3, longest=0.5, **settings)
    assert np.isfinite(short.waits[..., 0]).mean() == pytest.approx(1 - math.exp(-1.0), abs=0.02)
    assert short.waits[np.isfinite(short.waits)].max() <= 0.5


def test_a_forecast_has_medians_shares_and_the_middle_draw() -> None:
    waits = np.array([[[1.0, 2.0], [1.2, 3.0], [9.0, np.inf]]])
    types = np.array([[[0, 1], [0, 1], [1, 0]]])
    forecast = forecast_from_draws(EventsAhead(waits, types), 2, [1.0])
    assert forecast.waits.tolist() == [[1.2, 3.0]]
    expected = [[[2 / 3, 1 / 3], [0.0, 2 / 3]]]
    assert forecast.probability == pytest.approx(np.array(expected))
    assert forecast.sequence.waits.tolist() in ([[1.0, 2.0]], [[1.2, 3.0]])


def test_the_process_itself_forecasts_better_than_constant_rates() -> None:
    generator = torch.Generator().manual_seed(0)
    given = simulate_hawkes(ALTERNATING, num_sequences=150, horizon=60.0, generator=generator)
    histories, after = split_last(given, 5, min_history=5)
    tolerances, scores = [0.5, 2.0], []
    for process in (ALTERNATING, PoissonProcess.fit(given)):
        draws = draw_next(process, histories, 5, num_draws=16, longest=100.0, generator=generator)
        forecast = forecast_from_draws(draws, 2, tolerances)
        scores.append(score_horizon(forecast, after, tolerances))
    assert scores[0].num_histories == len(after) > 100
    assert scores[0].t_map > 1.15 * scores[1].t_map
    assert scores[0].transport < 0.95 * scores[1].transport
