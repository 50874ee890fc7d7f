"""The last ten events of each test sequence at once: what is drawn from models, and two rules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float
from osciformer.bench.events.datasets import Parts
from osciformer.bench.report import Row
from osciformer.events import (
    EventProcess,
    EventsAhead,
    EventSequences,
    HorizonForecast,
    draw_next,
    forecast_from_draws,
    score_horizon,
    split_last,
)

NUM_EVENTS = 10
NUM_DRAWS = 16
MOST_HISTORIES = 100
#: Largest errors of times, as parts of the median time that ten training events take.
TOLERANCES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
_SEED = 0  # of the draws: models that do not differ draw the same futures

#: `constant`: the median waits and the shares of types of the training events; `repeat`: the last
#: ten events again, with their types and the gaps before them.
RULES = ("constant", "repeat")


class _Asked(NamedTuple):
    histories: EventSequences
    actual: EventsAhead
    median_waits: Float[np.ndarray, "J"]  # of training events, until the j-th next one
    tolerances: list[float]


def _ask(parts: Parts) -> _Asked:
    # Enough events to repeat the last ten with their gaps.
    asked = split_last(parts.test, NUM_EVENTS, min_history=NUM_EVENTS + 1)
    histories, actual = asked[0][:MOST_HISTORIES], asked[1]
    actual = EventsAhead(actual.waits[:MOST_HISTORIES], actual.types[:MOST_HISTORIES])
    median_waits = _median_waits(parts.train)
    return _Asked(
        histories, actual, median_waits, [part * float(median_waits[-1]) for part in TOLERANCES]
    )


def _median_waits(train: EventSequences) -> Float[np.ndarray, "J"]:
    owner = np.repeat(np.arange(len(train)), train.lengths)
    medians = []
    for step in range(1, NUM_EVENTS + 1):
        is_in = owner[step:] == owner[:-step]
        waits = (train.times[step:] - train.times[:-step])[is_in]
        medians.append(float(np.median(waits)) if len(waits) else np.nan)
    return np.array(medians)


def score_process(process: EventProcess, parts: Parts) -> Row:
    """Return the scores of futures drawn from a process; empty without a long test sequence."""
    asked = _ask(parts)
    if len(asked.histories) == 0:
        return {}
    draws = draw_next(
        process,
        asked.histories,
        NUM_EVENTS,
        num_draws=NUM_DRAWS,
        longest=NUM_EVENTS * float(parts.train.gaps.max()),
        generator=torch.Generator().manual_seed(_SEED),
    )
    costs = [tolerance / 2 for tolerance in asked.tolerances]
    return _scored(forecast_from_draws(draws, parts.train.num_types, costs), asked)


def score_rule(rule: str, parts: Parts) -> Row:
    """Return the scores of one of `RULES`; empty without a test sequence that is long enough."""
    check_choice("rule", rule, RULES)
    asked, num_types = _ask(parts), parts.train.num_types
    count = len(asked.histories)
    if count == 0:
        return {}
    if rule == "constant":
        shares = np.bincount(parts.train.types, minlength=num_types) / len(parts.train.types)
        waits = np.tile(asked.median_waits, (count, 1))
        probability = np.broadcast_to(shares, (count, NUM_EVENTS, num_types))
        types = np.full(waits.shape, shares.argmax())
    else:
        _, last = split_last(asked.histories, NUM_EVENTS)
        waits, types = last.waits, last.types
        probability = np.eye(num_types)[types]
    forecast = HorizonForecast(waits, probability, EventsAhead(waits, types))
    return _scored(forecast, asked)


def _scored(forecast: HorizonForecast, asked: _Asked) -> Row:
    scores = score_horizon(forecast, asked.actual, asked.tolerances)
    return {
        "horizon_t_map": scores.t_map,
        "horizon_transport": scores.transport,
        "horizon_histories": scores.num_histories,
        "horizon_tolerances": asked.tolerances,
    }
