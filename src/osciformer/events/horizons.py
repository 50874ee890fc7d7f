"""Several events at once: forecasts from drawn futures, and how far they are from what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from osciformer._optional import need
from osciformer._types import Bool, Float, Int
from osciformer.events.prediction import sample
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences


@dataclass(frozen=True)
class EventsAhead:
    """The events that follow the end of each of n histories; without some of them if they end."""

    waits: Float[np.ndarray, "*n J"]  #: Times since the end of the history; inf where none comes.
    types: Int[np.ndarray, "*n J"]  #: Their types; where none comes, any.

    def __len__(self) -> int:
        return len(self.waits)


@dataclass(frozen=True)
class HorizonForecast:
    """A forecast of the next J events of n histories."""

    waits: Float[np.ndarray, "n J"]  #: When the j-th event is expected, since the history's end.
    probability: Float[np.ndarray, "n J K"]  #: Probability of its type; sums to at most 1.
    sequence: EventsAhead  #: The forecast as one sequence of events.


@dataclass(frozen=True)
class HorizonScores:
    """How good forecasts of several events are."""

    t_map: float  #: See `temporal_average_precision`; more is better.
    transport: float  #: Mean of `transport_distance`; less is better, 0 to 2 J.
    num_histories: int  #: Number of histories n.


def split_last(
    sequences: EventSequences, num_events: int, *, min_history: int = 1
) -> tuple[EventSequences, EventsAhead]:
    """Return sequences without their last J events, and these; shorter ones are left out.

    Args:
        sequences: The sequences.
        num_events: Number of events J to cut off.
        min_history: Smallest number of events that must be left.
    """
    if num_events < 1 or min_history < 1:
        got = f"{num_events} and {min_history}"
        raise ValueError(f"num_events and min_history must be at least 1; got {got}")
    kept = sequences[sequences.lengths >= num_events + min_history].replace(starts=None, ends=None)
    rows = kept.offsets[1:, None] + np.arange(-num_events, 0)  # [n, J]
    last = kept.times[kept.offsets[1:] - num_events - 1]
    is_known = np.ones(len(kept.times), dtype=bool)
    is_known[rows] = False
    histories = kept.replace(
        times=kept.times[is_known],
        types=kept.types[is_known],
        offsets=kept.offsets - num_events * np.arange(len(kept.offsets)),
    )
    return histories, EventsAhead(kept.times[rows] - last[:, None], kept.types[rows])


def draw_next(
    process: EventProcess,
    histories: EventSequences,
    num_events: int,
    *,
    num_draws: int,
    longest: float,
    generator: torch.Generator,
    batch_size: int = 64,
) -> EventsAhead:
    """Return drawn continuations of histories, `[n, S, J]`.

    Args:
        process: The process.
        histories: n histories, each with an event.
        num_events: Number of events J.
        num_draws: Number of draws S of each history.
        longest: Time after which an event that has not come never comes.
        generator: Source of randomness, on the CPU.
        batch_size: Histories that are continued together.
    """
    shape = len(histories), num_draws, num_events
    waits, types = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    for batch in histories.batches(batch_size):
        futures = sample(
            process,
            batch,
            until=batch.last_times + longest,
            generator=generator,
            num_futures=num_draws,
            max_events=num_events,
            at_limit="stop",
        )
        assert batch.index is not None
        drawn = futures.sequences
        owner = np.repeat(np.arange(len(drawn)), drawn.lengths)
        slot = np.arange(len(drawn.times)) - drawn.offsets[owner]
        place = batch.index.numpy()[futures.source[owner]], owner % num_draws, slot
        waits[place] = drawn.times - batch.last_times.numpy()[futures.source[owner]]
        types[place] = drawn.types
    return EventsAhead(waits, types)


def forecast_from_draws(
    draws: EventsAhead, num_types: int, costs: Sequence[float]
) -> HorizonForecast:
    """Return the forecast of drawn futures `[n, S, J]`.

    The j-th event is expected at the median of the j-th drawn ones, its type has their shares. The
    sequence is the medoid: the draw with the least mean `transport_distance` from the others.

    Args:
        draws: The drawn events.
        num_types: Number of types K.
        costs: Costs of `transport_distance`.
    """
    num_draws = draws.waits.shape[1]
    # Of infinite numbers there is no mean: the upper one of two in the middle.
    waits = np.sort(draws.waits, axis=1)[:, num_draws // 2]
    comes = np.isfinite(draws.waits)
    is_type = draws.types[..., None] == np.arange(num_types)
    probability = (is_type & comes[..., None]).mean(axis=1)
    first, second = np.triu_indices(num_draws, 1)
    medoids = np.zeros(len(draws), dtype=np.int64)
    for row, futures in enumerate(zip(draws.waits, draws.types, strict=True)):
        one, other = (EventsAhead(*(x[which] for x in futures)) for which in (first, second))
        apart = np.zeros((num_draws, num_draws))
        apart[first, second] = transport_distance(one, other, costs)
        medoids[row] = (apart + apart.T).sum(axis=1).argmin()
    rows = np.arange(len(draws))
    sequence = EventsAhead(draws.waits[rows, medoids], draws.types[rows, medoids])
    return HorizonForecast(waits, probability, sequence)


def transport_distance(
    predicted: EventsAhead, actual: EventsAhead, costs: Sequence[float]
) -> Float[np.ndarray, "n"]:
    r"""Return the optimal-transport distances between sequences of events, in events.

    Events are moved, deleted and inserted until the sequences are equal. A deletion or insertion
    costs 1, a move by a time d to an event of the same type $d / C$; the cheapest way counts, so
    that an event is moved by at most 2 C (Mei, Qin and Eisner, "Imputing Missing Events in
    Continuous-Time Event Streams", ICML 2019). The mean over the costs C is returned.

    Args:
        predicted: Sequences `[n, J]`.
        actual: As many, of any length.
        costs: Costs C of an insertion or deletion, in units of time; positive.

    Example:
        >>> one, other = (EventsAhead(np.array([[t, 5.0]]), np.array([[0, 1]])) for t in (1.0, 1.5))
        >>> transport_distance(one, other, [1.0])
        array([0.5])
    """
    if not all(cost > 0 for cost in costs) or not costs:
        raise ValueError(f"costs must be positive and at least one; got {list(costs)}")
    assign = need("scipy.optimize", extra="train").linear_sum_assignment
    found = np.zeros(len(predicted))
    for row in range(len(predicted)):
        times, types = _those_that_come(predicted, row)
        other_times, other_types = _those_that_come(actual, row)
        apart = np.abs(times[:, None] - other_times)
        apart = np.where(types[:, None] == other_types, apart, np.inf)
        for cost in costs:
            # A pair that is not moved is deleted and inserted, for 2.
            moves = np.minimum(apart / cost, 2.0)
            rest = abs(len(times) - len(other_times))
            found[row] += moves[assign(moves)].sum() + rest
    return found / len(costs)


def _those_that_come(events: EventsAhead, row: int) -> tuple[np.ndarray, np.ndarray]:
    comes = np.isfinite(events.waits[row])
    return events.waits[row, comes], events.types[row, comes]


def temporal_average_precision(
    forecast: HorizonForecast, actual: EventsAhead, tolerances: Sequence[float]
) -> float:
    """Return T-mAP, the mean over types and tolerances of the average precision of events.

    For each type, every expected event is a prediction with the probability of that type as its
    score. Of each history, predictions are matched to events of the type at most a tolerance away,
    each to one, such that the sum of matched scores is largest; matched ones are right. Average
    precision is taken over the predictions of all histories, recall over all events of the type,
    predictions of the same score counting together. Karpukhin et al., "HoTPP Benchmark: Are We Good
    at the Long Horizon Events Forecasting?", 2024; here the horizon is a number of events, and
    the mean is over the types that occur.

    Args:
        forecast: Forecasts of n histories.
        actual: What came `[n, J]`.
        tolerances: Largest errors of the time.
    """
    precisions = []
    for kind in np.unique(actual.types[np.isfinite(actual.waits)]):
        is_actual = (actual.types == kind) & np.isfinite(actual.waits)
        scores = forecast.probability[..., kind]
        is_predicted = (scores > 0) & np.isfinite(forecast.waits)
        for tolerance in tolerances:
            hits = np.zeros(scores.shape, dtype=bool)
            for row in (is_actual.any(axis=1) & is_predicted.any(axis=1)).nonzero()[0]:
                slots = is_predicted[row].nonzero()[0]
                times = forecast.waits[row, slots], actual.waits[row, is_actual[row]]
                hits[row, slots] = _matched(*times, scores[row, slots], tolerance)
            found = average_precision(
                scores[is_predicted], hits[is_predicted], int(is_actual.sum())
            )
            precisions.append(found)
    return float(np.mean(precisions)) if precisions else float("nan")


def _matched(
    times: Float[np.ndarray, "P"],
    targets: Float[np.ndarray, "T"],
    scores: Float[np.ndarray, "P"],
    tolerance: float,
) -> Bool[np.ndarray, "P"]:
    """Return which predictions are matched to targets, each to one, for the largest score."""
    assign = need("scipy.optimize", extra="train").linear_sum_assignment
    # As scores are positive, the largest sum also has the most matches, at every threshold.
    gains = np.where(np.abs(times[:, None] - targets) <= tolerance, scores[:, None], 0.0)
    rows, columns = assign(gains, maximize=True)
    matched = np.zeros(len(times), dtype=bool)
    matched[rows] = gains[rows, columns] > 0
    return matched


def average_precision(
    scores: Float[np.ndarray, "P"], is_right: Bool[np.ndarray, "P"], num_targets: int
) -> float:
    """Return the area under the steps of precision over recall of predictions of P targets.

    Example:
        >>> average_precision(np.array([0.9, 0.5, 0.5]), np.array([True, True, False]), 4)
        0.41666666666666663
    """
    order = np.argsort(-scores, kind="stable")
    right, scores = np.cumsum(is_right[order]), scores[order]
    # Predictions of one score are taken in together.
    ends = np.append((np.diff(scores) != 0).nonzero()[0], len(scores) - 1)[: len(scores)]
    right = right[ends]
    gained = np.diff(right, prepend=0) / max(num_targets, 1)
    return float((gained * right / (ends + 1)).sum())


def score_horizon(
    forecast: HorizonForecast, actual: EventsAhead, tolerances: Sequence[float]
) -> HorizonScores:
    """Return the scores of forecasts; the tolerances are the costs of the distance, doubled.

    So an event is never moved further than it may be away to be matched.
    """
    costs = [tolerance / 2.0 for tolerance in tolerances]
    distances = transport_distance(forecast.sequence, actual, costs)
    return HorizonScores(
        t_map=temporal_average_precision(forecast, actual, tolerances),
        transport=float(distances.mean()) if len(distances) else float("nan"),
        num_histories=len(actual),
    )
