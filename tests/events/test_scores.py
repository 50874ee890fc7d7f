"""Scores are those of plain loops, and trivial models score what they are known to score."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from osciformer.events import (
    EventSequences,
    HawkesProcess,
    PoissonProcess,
    RenewalProcess,
    log_likelihood,
    score,
)

from .event_cases import HAWKES, WithoutClosedForms, random_events

MIMIC = Path(os.environ.get("OSCIFORMER_DATA", ""), "tpp", "mimic2.parquet")


def test_scores_of_a_poisson_process_are_those_of_constants() -> None:
    events = random_events([6, 3, 1, 0])
    found = score(PoissonProcess([0.5, 2.0]), events)
    types = np.concatenate([one.types[1:] for one in events])
    assert found.num_predicted == 7
    assert found.accuracy == found.accuracy_at_time == (types == 1).mean()
    assert found.time_rmse == pytest.approx(np.sqrt(np.mean((events.gaps - 0.4) ** 2)), rel=1e-6)
    assert found.time_mae == pytest.approx(
        np.mean(np.abs(events.gaps - math.log(2) / 2.5)), rel=1e-6
    )
    assert found.never == 0.0
    assert found.log_likelihood == log_likelihood(PoissonProcess([0.5, 2.0]), events)


def test_fewer_halvings_show_in_the_error_of_the_likelihood() -> None:
    steep = HawkesProcess(HAWKES.base, HAWKES.branching, 60.0)
    events = random_events([8, 5])
    found, rough = (
        score(WithoutClosedForms(steep), events, tolerance=1e-7, max_halvings=count).log_likelihood
        for count in (30, 0)
    )
    assert found.error < 1e-6 < rough.error
    assert found.micro == pytest.approx(log_likelihood(steep, events).micro, abs=1e-6)


def test_repeating_the_last_type_is_right_as_often_as_types_repeat() -> None:
    rng = np.random.default_rng(0)
    types = [np.repeat(rng.integers(0, 4, size=8), rng.integers(3, 9, size=8)) for _ in range(5)]
    events = EventSequences.from_arrays(
        [np.cumsum(rng.exponential(size=len(k))) for k in types], types
    )
    found = score(RenewalProcess.fit(events, marks="repeat"), events)
    again = np.concatenate([k[1:] == k[:-1] for k in types])
    assert found.accuracy == again.mean()


def test_closed_forms_and_batches_do_not_change_scores() -> None:
    events = random_events([5, 2, 4])
    one = score(HAWKES, events)
    other = score(WithoutClosedForms(HAWKES), events, batch_size=1)
    assert other.accuracy == one.accuracy
    assert other.time_rmse == pytest.approx(one.time_rmse, rel=1e-5)
    assert other.time_mae == pytest.approx(one.time_mae, rel=1e-5)
    assert other.log_likelihood.micro == pytest.approx(one.log_likelihood.micro, abs=1e-6)
    assert "3 sequences" not in str(one)
    assert f"{one.num_predicted} events" in str(one)


def test_nothing_to_predict_is_not_a_number() -> None:
    found = score(HAWKES, random_events([1, 0]))
    assert math.isnan(found.accuracy)
    assert math.isnan(found.time_rmse)
    assert found.num_predicted == 0


@pytest.mark.skipif(not MIMIC.is_file(), reason="needs OSCIFORMER_DATA with tpp/mimic2.parquet")
def test_copying_the_last_type_scores_845_on_mimic2() -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(MIMIC).to_pandas()
    right = total = 0
    for fold in range(1, 6):
        part = table[table["fold"] == fold]
        train, test = (
            EventSequences.from_frame(part[part["split"] == split], id="seq_id", num_types=75)
            for split in ("train", "test")
        )
        found = score(RenewalProcess.fit(train, marks="repeat", min_width=0.05), test)
        right += round(found.accuracy * found.num_predicted)
        total += found.num_predicted
    assert right / total == pytest.approx(0.845, abs=0.002)
