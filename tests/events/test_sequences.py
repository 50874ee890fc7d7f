"""Sequences of events are checked at the door, indexed like arrays, and padded in batches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import KFold, train_test_split

from osciformer.events import EventSequences

from .event_cases import event_sequences, random_events


def test_equal_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="ids must differ from each other; 'a' occurs"):
        EventSequences.from_arrays([[0.0], [1.0]], ids=["a", "a"])


def test_sequences_are_what_came_in() -> None:
    events = EventSequences.from_arrays([[0.0, 2.0], [], [1.0]], [[1, 0], [], [2]], ids=list("abc"))
    assert (len(events), events.num_types, events.lengths.tolist()) == (3, 3, [2, 0, 1])
    assert events[0].times.tolist() == [0.0, 2.0]
    assert events[-1].types.tolist() == [2]
    assert [len(one) for one in events] == [2, 0, 1]
    assert events.type_names == ("0", "1", "2")
    assert repr(events) == (
        "EventSequences(3 sequences, 3 events of 3 types, lengths 0 to 2, time in unit of the data)"
    )


def test_folds_of_scikit_learn_cover_each_sequence_once() -> None:
    events = random_events([3, 0, 5, 1, 2])
    tested = [one.id for _, test in KFold(2).split(events) for one in events[test]]
    assert sorted(tested) == [0, 1, 2, 3, 4]
    train, test = train_test_split(events, test_size=2, random_state=0)
    assert (len(train), len(test)) == (3, 2)


@given(event_sequences(), st.data())
def test_picked_sequences_keep_everything_that_is_theirs(
    events: EventSequences, data: st.DataObject
) -> None:
    index = data.draw(st.lists(st.integers(-len(events), len(events) - 1), max_size=4))
    picked = events[index]
    assert len(picked) == len(index)
    for one, position in zip(picked, index, strict=True):
        other = events[position]
        assert (one.id, one.start, one.end) == (other.id, other.start, other.end)
        assert np.array_equal(one.times, other.times)
        assert np.array_equal(one.types, other.types)


@pytest.mark.parametrize(
    ("times", "types", "others", "message"),
    [
        ([[1.0, 0.5]], [[0, 0]], {}, "times must not decrease within a series; series 0 has t[1]"),
        ([[0.0, np.nan]], [[0, 0]], {}, "times must be finite; series 0 has t[1]=nan"),
        ([[0.0]], [[-1]], {}, "event 0 of sequence 0 has type -1"),
        ([[0.0]], [[3]], {"num_types": 2}, "types must be from 0 to 1; event 0 of sequence 0"),
        ([[0.0]], [[2]], {"type_names": ["a", "b"]}, "types must be from 0 to 1"),
        ([[0.0]], [[0.5]], {}, "types must be integers from 0; got float64"),
        ([[0.0]], [["a"]], {}, "EventSequences.from_frame reads types that are text"),
        ([[0.0, 1.0]], [[0]], {}, "sequence number 0 must have times [N] and types [N]"),
        ([[0.0]], [[0], [1]], {}, "one entry per sequence; got 1 and 2"),
        ([[1.0]], [[0]], {"starts": [2.0]}, "starts of sequence 0 is 2"),
        ([[1.0]], [[0]], {"ends": [0.5]}, "ends of sequence 0 is 0.5"),
        ([[]], [[]], {"starts": [1.0], "ends": [0.0]}, "ends it before it starts"),
        ([[1.0]], [[0]], {"num_types": 0}, "num_types must be at least 1"),
        ([[1.0]], [[0]], {"ids": [1, 2]}, "ids must be [1]"),
    ],
)
def test_bad_input_is_refused_by_name(times: list, types: list, others: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        EventSequences.from_arrays(times, types, **others)


def test_negative_times_and_ties_are_kept_in_order() -> None:
    events = EventSequences.from_arrays([[-2.0, -1.0, -1.0, 0.0]], [[0, 2, 1, 0]])
    assert events[0].types.tolist() == [0, 2, 1, 0]
    assert events.ties == 1


def test_gaps_do_not_cross_sequences() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0], [5.0], [], [2.0, 2.5]])
    assert events.gaps.tolist() == [1.0, 0.5]


def test_first_events_end_the_window_where_they_cut() -> None:
    events = random_events([5, 2, 0])
    cut = events.first(3)
    assert cut.lengths.tolist() == [3, 2, 0]
    assert cut.ends is not None
    assert events.ends is not None
    assert cut.ends[0] == cut[0].times[-1]
    assert cut.ends[1:].tolist() == events.ends[1:].tolist()


def test_another_unit_scales_times_and_windows() -> None:
    events = random_events([4])
    minutes = events.rescale(1 / 60, "min")
    assert minutes.time_unit == "min"
    assert np.allclose(60 * minutes.times, events.times)
    assert np.allclose(60 * minutes.ends, events.ends)
    with pytest.raises(ValueError, match="factor must be positive"):
        events.rescale(-1.0, "min")


def test_batches_hold_each_event_once_and_little_padding() -> None:
    events = random_events([7, 1, 0, 6, 2, 7])
    batches = list(events.batches(2))
    index = torch.cat([batch.index for batch in batches])
    assert sorted(index.tolist()) == list(range(6))
    for batch in batches:
        for row, position in enumerate(batch.index.tolist()):
            one = events[position]
            assert batch.times[row][batch.mask[row]].tolist() == one.times.tolist()
            assert batch.types[row][batch.mask[row]].tolist() == one.types.tolist()
            assert float(batch.ends[row]) == one.end
    assert [batch.times.shape[1] for batch in batches] == [1, 6, 7]


def test_no_sequences_make_no_batches() -> None:
    assert list(random_events([3])[:0].batches(2)) == []


def test_edges_of_rows_look_at_no_padding() -> None:
    events = EventSequences.from_arrays([[1.0, 3.0], []], starts=[0.5, 0.25])
    batch = events.batch()
    batch.times[~batch.mask] = torch.nan
    assert batch.first_times.tolist() == [1.0, 0.25]
    assert batch.last_times.tolist() == [3.0, 0.25]
    query = torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64)
    assert batch.count_before(query).tolist() == [[0, 1], [0, 0]]
    assert batch.count_until(query).tolist() == [[1, 2], [0, 0]]
