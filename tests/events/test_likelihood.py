"""The likelihood is the one of the definition, whatever the process, the padding and the unit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.events import (
    EventSequences,
    HawkesProcess,
    InhomogeneousPoissonProcess,
    PoissonProcess,
    likelihood_terms,
    log_likelihood,
    summarise,
)

from .event_cases import (
    HAWKES,
    WithoutClosedForms,
    event_sequences,
    hawkes_log_likelihood,
    padded,
    random_events,
)

RATES = [0.4, 1.3]


@given(event_sequences())
def test_poisson_likelihood_has_its_closed_form(events: EventSequences) -> None:
    found = log_likelihood(PoissonProcess(RATES), events)
    total, scored = 0.0, 0
    for one in events:
        total += sum(math.log(RATES[k]) for k in one.types[1:])
        total -= sum(RATES) * (one.times[-1] - one.times[0] if len(one) else 0.0)
        scored += max(len(one) - 1, 0)
    assert found.num_scored == scored
    assert found.error == 0.0 or scored == 0
    assert found.total == pytest.approx(total, abs=1e-10)


@given(event_sequences())
def test_poisson_likelihood_of_windows_has_its_closed_form(events: EventSequences) -> None:
    found = log_likelihood(PoissonProcess(RATES), events, span="window")
    total = sum(
        sum(math.log(RATES[k]) for k in one.types) - sum(RATES) * (one.end - one.start)
        for one in events
    )
    assert found.num_scored == len(events.times)
    assert found.total == pytest.approx(total, abs=1e-10)


@pytest.mark.parametrize("span", ["events", "window"])
@given(events=event_sequences())
def test_hawkes_likelihood_is_the_double_sum(events: EventSequences, span: str) -> None:
    found = log_likelihood(HAWKES, events, span=span)
    total = 0.0
    for one in events:
        if span == "window":
            total += hawkes_log_likelihood(HAWKES, one.times, one.types, one.start, one.end, 0)
        elif len(one):
            edges = one.times[0], one.times[-1]
            # A tie with the first event lies at the left edge, whose integral is empty.
            total += hawkes_log_likelihood(HAWKES, one.times, one.types, *edges, 1)
    assert found.total == pytest.approx(total, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("span", ["events", "window"])
def test_generic_code_gives_the_exact_likelihood_within_its_error(span: str) -> None:
    events = random_events([9, 2, 1, 0, 5])
    exact = log_likelihood(HAWKES, events, span=span)
    found = log_likelihood(WithoutClosedForms(HAWKES), events, span=span, tolerance=1e-9)
    assert 0 < found.error < 1e-8
    assert abs(found.micro - exact.micro) <= found.error + 1e-13
    rough = log_likelihood(WithoutClosedForms(HAWKES), events, span=span, tolerance=1e-2)
    assert abs(rough.micro - exact.micro) <= rough.error


def test_inhomogeneous_likelihood_has_its_known_integral() -> None:
    events = random_events([6, 4], num_types=1)
    process = InhomogeneousPoissonProcess(lambda t: (1.5 + torch.sin(t))[..., None], num_types=1)
    found = log_likelihood(process, events, span="window", tolerance=1e-10)
    total = sum(
        np.log(1.5 + np.sin(one.times)).sum()
        - (1.5 * (one.end - one.start) - math.cos(one.end) + math.cos(one.start))
        for one in events
    )
    assert found.total == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
@pytest.mark.parametrize("span", ["events", "window"])
@pytest.mark.parametrize("exact", [True, False])
def test_padding_changes_nothing(junk: float, span: str, exact: bool) -> None:
    batch = random_events([4, 1, 0, 7]).batch()
    process = HAWKES if exact else WithoutClosedForms(HAWKES)
    before = likelihood_terms(process, batch, span=span)
    after = likelihood_terms(process, padded(batch, 5, junk), span=span)
    assert torch.equal(after.scored[:, :7], before.scored)
    assert not after.scored[:, 7:].any()
    torch.testing.assert_close(after.per_sequence, before.per_sequence, rtol=0, atol=1e-12)


def test_events_are_counted_by_the_mask_though_their_terms_are_zero() -> None:
    # Rate 1 and gaps of 0 give log-likelihoods of exactly 0.
    events = EventSequences.from_arrays([[2.0, 2.0, 2.0]])
    found = log_likelihood(PoissonProcess([1.0]), events)
    assert (found.num_scored, found.total, found.micro) == (2, 0.0, 0.0)


@given(st.floats(1e-3, 1e3))
def test_another_unit_shifts_the_likelihood_by_its_log(factor: float) -> None:
    events = random_events([5, 3])
    scaled = events.rescale(factor, "other")
    process = HawkesProcess(HAWKES.base / factor, HAWKES.branching, HAWKES.decay / factor)
    for span in ("events", "window"):
        before = log_likelihood(HAWKES, events, span=span)
        after = log_likelihood(process, scaled, span=span)
        assert after.time_unit == "other"
        assert after.micro == pytest.approx(before.micro - math.log(factor), abs=1e-9)


def test_macro_average_divides_by_all_events_of_a_sequence() -> None:
    events = random_events([5, 2, 1, 0])
    terms = likelihood_terms(HAWKES, events.batch())
    found = summarise([terms])
    per_sequence = terms.per_sequence
    expected = (per_sequence[0] / 5 + per_sequence[1] / 2) / 2
    assert (found.num_sequences, found.num_scored) == (2, 5)
    assert found.macro == pytest.approx(float(expected), rel=1e-14)
    assert found.micro == pytest.approx(float(per_sequence.sum() / 5), rel=1e-14)


def test_batches_add_up_to_the_whole() -> None:
    events = random_events([5, 2, 1, 0, 9, 3])
    whole, parts = (log_likelihood(HAWKES, events, batch_size=size) for size in (10, 2))
    assert parts.total == pytest.approx(whole.total, rel=1e-13)
    assert parts.macro == pytest.approx(whole.macro, rel=1e-13)


def test_nothing_to_score_is_not_a_number_and_no_error() -> None:
    found = log_likelihood(HAWKES, random_events([1, 0]))
    assert (found.num_scored, found.total) == (0, 0.0)
    assert math.isnan(found.micro)
    assert math.isnan(found.macro)


def test_ties_do_not_see_each_other() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0, 1.0]], [[0, 0, 1]], num_types=2)
    terms = likelihood_terms(HAWKES, events.batch())
    alone = [
        likelihood_terms(HAWKES, EventSequences.from_arrays([[0.0, 1.0]], [[0, k]]).batch())
        if k
        else likelihood_terms(
            HAWKES, EventSequences.from_arrays([[0.0, 1.0]], [[0, 0]], num_types=2).batch()
        )
        for k in (0, 1)
    ]
    assert terms.log_intensity[0, 1] == alone[0].log_intensity[0, 1]
    assert terms.log_intensity[0, 2] == alone[1].log_intensity[0, 1]
    assert terms.compensator[0, 2] == 0


def test_impossible_types_are_minus_infinity() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0]], [[0, 1]])
    assert log_likelihood(PoissonProcess([1.0, 0.0]), events).micro == -math.inf


def test_gradients_of_unscored_rows_are_zero_and_of_others_right() -> None:
    base = torch.tensor([0.3, 0.0], dtype=torch.float64, requires_grad=True)
    events = EventSequences.from_arrays([[0.0, 1.0, 2.0], [0.0]], [[1, 0, 0], [1]], num_types=2)
    process = HawkesProcess(base, torch.zeros(2, 2), 1.0)
    likelihood_terms(process, events.batch()).loss.backward()
    # Of log(a) - a - b per event.
    assert base.grad is not None
    assert base.grad.tolist() == pytest.approx([-1 / 0.3 + 1, 1.0])


def test_windows_and_types_must_be_known() -> None:
    events = random_events([3], windows=False)
    with pytest.raises(ValueError, match="give starts and ends"):
        log_likelihood(HAWKES, events, span="window")
    with pytest.raises(ValueError, match="span must be one of 'events', 'window'"):
        log_likelihood(HAWKES, events, span="all")
    with pytest.raises(ValueError, match="the process has 2 types and the sequences have 3"):
        log_likelihood(HAWKES, random_events([3], num_types=3))


def test_text_names_unit_and_error() -> None:
    events = random_events([3]).rescale(1.0, "h")
    assert "time in h, 2 events of 1 sequences" in str(log_likelihood(HAWKES, events))
