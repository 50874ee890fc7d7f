"""Events that come one by one are answered as the same events at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from osciformer.events import (
    EventProcess,
    EventSequences,
    EventStream,
    PoissonProcess,
    predict_next,
    sample,
)
from osciformer.events.neural import EventModelConfig, make_event_model

from .event_cases import HAWKES, random_events

EVENTS = random_events([20, 20, 20], windows=False)


def neural(head: str) -> EventProcess:
    """Return an untrained network whose states matter."""
    torch.manual_seed(0)
    config = EventModelConfig(num_types=2, head=head, dim=8, num_layers=2, num_heads=2)  # type: ignore[arg-type]
    model = make_event_model(config).fit_times(EVENTS).double().eval()
    with torch.no_grad():
        for weight in model.head.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


PROCESSES = {
    "hawkes": lambda: HAWKES,
    "mixture": lambda: neural("mixture"),
    "softplus": lambda: neural("softplus"),
}


@pytest.mark.parametrize("kind", PROCESSES)
def test_stream_equals_batch(kind: str) -> None:
    process = PROCESSES[kind]()
    stream = EventStream(process, num_sequences=3)
    times = np.stack([one.times for one in EVENTS])
    types = np.stack([one.types for one in EVENTS])
    for step in range(20):
        stream.observe(times[:, step], types[:, step])
        if step not in (0, 1, 9, 18):
            continue
        asked = times[:, step, None] + (times[:, step + 1] - times[:, step])[:, None] * [0.3, 1.0]
        # The whole batch knows the later events too; they must not matter.
        with torch.no_grad():
            wanted = process.intensity(EVENTS.batch(), torch.from_numpy(asked)).numpy()
        np.testing.assert_allclose(stream.intensity(asked), wanted, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(
            stream.intensity(asked[:, 0]), wanted[:, 0], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("kind", PROCESSES)
def test_predictions_are_those_of_the_last_events(kind: str) -> None:
    process = PROCESSES[kind]()
    part = EVENTS.first(6)
    stream = EventStream(process, num_sequences=3)
    for row, one in enumerate(part):
        stream.observe(one.times, one.types, sequence=row)
    found = stream.predict_next(horizon=50.0)
    wanted = predict_next(process, part.batch(), horizon=50.0)
    for name in ("mean", "median", "survival", "type_probability"):
        torch.testing.assert_close(
            getattr(found, name)[:, 0], getattr(wanted, name)[:, -1], rtol=1e-10, atol=1e-10
        )


def test_futures_are_those_of_the_batch() -> None:
    part = EVENTS.first(4)
    stream = EventStream(HAWKES, num_sequences=3, time_unit="h")
    for row, one in enumerate(part):
        stream.observe(one.times, one.types, sequence=row)
    until = float(part.times.max()) + 5.0
    found, wanted = (
        draw(until=until, generator=torch.Generator().manual_seed(1), num_futures=4)
        for draw in (stream.sample, lambda **options: sample(HAWKES, part.batch(), **options))
    )
    assert len(found.sequences.times) > 10
    assert found.sequences.times.tolist() == wanted.sequences.times.tolist()
    assert found.sequences.time_unit == "h"
    later = stream.sample(until=until, now=until - 1.0, generator=torch.Generator().manual_seed(1))
    assert (later.sequences.times > until - 1.0).all()


def test_groups_and_single_events_are_the_same() -> None:
    one_by_one, at_once = EventStream(HAWKES), EventStream(HAWKES)
    sequence = random_events([40], windows=False)[0]
    for time, kind in zip(sequence.times, sequence.types, strict=True):
        one_by_one.observe(time, kind)
    at_once.observe(sequence.times, sequence.types)
    asked = sequence.times[-1] + 0.7
    assert one_by_one.num_events.tolist() == [40]
    np.testing.assert_array_equal(one_by_one.intensity(asked), at_once.intensity(asked))


@pytest.mark.parametrize("count", [3, 5, 9, 11, 25])
def test_context_keeps_the_last_events_alone(count: int) -> None:
    sequence = random_events([count], windows=False)[0]
    stream = EventStream(HAWKES, context=5)
    for time, kind in zip(sequence.times, sequence.types, strict=True):
        stream.observe(time, kind)
    short = EventStream(HAWKES)
    short.observe(sequence.times[-5:], sequence.types[-5:])
    asked = sequence.times[-1] + 0.2
    np.testing.assert_array_equal(stream.intensity(asked), short.intensity(asked))
    assert stream.num_events.tolist() == [count]
    assert stream.batch().mask.shape[1] == min(count, 5)


def test_sequences_of_different_lengths_do_not_mix() -> None:
    stream = EventStream(HAWKES, num_sequences=2)
    stream.observe([1.0, 1.5, 1.7], [0, 1, 1], sequence=0)
    stream.observe(0.5, 1, sequence=1)
    alone = EventStream(HAWKES)
    alone.observe(0.5, 1)
    np.testing.assert_array_equal(stream.intensity([2.0, 0.8])[1], alone.intensity(0.8)[0])


def test_before_the_first_event_the_base_rates_hold() -> None:
    np.testing.assert_allclose(EventStream(HAWKES).intensity(3.0), HAWKES.base[None].numpy())


def named() -> EventStream:
    stream = EventStream(PoissonProcess([1.0, 2.0]), type_names=["buy", "sell"])
    stream.observe([1.0, 2.0], ["buy", "sell"])
    return stream


@pytest.mark.parametrize(
    ("times", "types", "message"),
    [
        (1.5, 0, r"1\.5 is before 2, the last event of sequence 0"),
        ([3.0, 2.5], 0, r"2\.5 is before 3"),
        (float("nan"), 0, "must be finite; got nan"),
        (3.0, 2, "from 0 to 1; got 2"),
        (3.0, -1, "from 0 to 1; got -1"),
        (3.0, "hold", "there is no type 'hold'"),
        (3.0, 0.5, "must be integers from 0, or names; got float64"),
        ([[3.0]], 0, r"must be a number or \[M\]; got \[1, 1\]"),
    ],
    ids=["back", "back in group", "nan", "unknown", "negative", "name", "real", "shape"],
)
def test_bad_events_are_refused_and_change_nothing(times: Any, types: Any, message: str) -> None:
    stream = named()
    with pytest.raises((ValueError, TypeError), match=message):
        stream.observe(times, types)
    assert stream.num_events.tolist() == [2]
    assert stream.last_times.tolist() == [2.0]
    stream.observe(2.0, "buy")  # at the time of the last event: allowed
    assert stream.num_events.tolist() == [3]


def test_questions_that_have_no_answer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 is asked, and the last events are at \[2\.0\]"):
        named().intensity(1.0)
    with pytest.raises(ValueError, match=r"number, \[1\] or \[1, M\]; got \[3\]"):
        named().intensity([3.0, 4.0, 5.0])
    with pytest.raises(ValueError, match="sequence 0 has none"):
        EventStream(HAWKES).predict_next(horizon=1.0)
    with pytest.raises(ValueError, match=r"\[2\], one per sequence"):
        EventStream(HAWKES, num_sequences=2).observe(1.0)
    with pytest.raises(ValueError, match="from 0 to 1; got 2"):
        EventStream(HAWKES, num_sequences=2).observe(1.0, sequence=2)
    with pytest.raises(ValueError, match="context must be at least 1; got 0"):
        EventStream(HAWKES, context=0)
    with pytest.raises(ValueError, match="type_names must be 2"):
        EventStream(HAWKES, type_names=["a"])


def test_reset_forgets() -> None:
    stream = EventStream(HAWKES, num_sequences=2)
    stream.observe([1.0, 2.0])
    stream.reset(0)
    assert stream.num_events.tolist() == [0, 1]
    stream.observe(0.5, sequence=0)
    stream.reset()
    assert stream.num_events.tolist() == [0, 0]


def test_a_sequence_from_a_container_can_be_fed() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0]], [[0, 1]])
    stream = EventStream(HAWKES)
    stream.observe(events[0].times, events[0].types)
    assert stream.batch().times.tolist() == [[0.0, 1.0]]
