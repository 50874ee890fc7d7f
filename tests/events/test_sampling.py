"""Sampled events follow the law of their process, or an error says that they would not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from osciformer._types import Tensor
from osciformer.events import (
    EventSequences,
    HawkesProcess,
    InhomogeneousPoissonProcess,
    InvalidBoundError,
    PoissonProcess,
    calibrate,
    rescaled_gaps,
    sample,
)

from .event_cases import HAWKES, WithoutClosedForms, random_events

EMPTY = EventSequences.from_arrays([[]], num_types=2, starts=[0.0]).batch()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wave(**others) -> InhomogeneousPoissonProcess:
    return InhomogeneousPoissonProcess(
        lambda t: (2 + 1.9 * torch.sin(t / 2))[..., None],
        num_types=1,
        cumulative=lambda t: (2 * t - 3.8 * torch.cos(t / 2))[..., None],
        **others,
    )


@pytest.mark.parametrize("wrap", [lambda p: p, WithoutClosedForms], ids=["bound", "probed"])
def test_counts_times_and_types_of_a_poisson_process(wrap) -> None:
    rates, until = [1.0, 3.0], 5.0
    drawn = sample(
        wrap(PoissonProcess(rates)), EMPTY, until=until, generator=seeded(), num_futures=400
    ).sequences
    counts = drawn.lengths
    expected = sum(rates) * until
    assert abs(counts.mean() - expected) < 4 * math.sqrt(expected / 400)
    # The variance of a Poisson count is its mean: chi-square with 399 degrees of freedom.
    ratio = 399 * counts.var(ddof=1) / expected
    assert stats.chi2(399).ppf(1e-4) < ratio < stats.chi2(399).ppf(1 - 1e-4)
    assert stats.kstest(drawn.times / until, "uniform").pvalue > 1e-3
    share = (drawn.types == 1).mean()
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(drawn.types))


@pytest.mark.parametrize("process", [wave(bound=3.9), wave()], ids=["bound", "probed"])
def test_events_at_a_changing_rate_pass_time_rescaling(process) -> None:
    empty = EventSequences.from_arrays([[]], starts=[0.0]).batch()
    found = sample(process, empty, until=25.0, generator=seeded(), num_futures=40)
    gaps = rescaled_gaps(process, found.sequences, span="window")
    assert len(gaps) > 1000
    assert calibrate(gaps).p_value > 1e-3
    flat = PoissonProcess([2.0])
    assert calibrate(rescaled_gaps(flat, found.sequences, span="window")).p_value < 1e-6


@pytest.mark.parametrize("wrap", [lambda p: p, WithoutClosedForms], ids=["bound", "probed"])
def test_futures_of_a_hawkes_process_pass_time_rescaling(wrap) -> None:
    history = random_events([4, 0], windows=False).batch()
    found = sample(wrap(HAWKES), history, until=30.0, generator=seeded(3), num_futures=12)
    assert found.source.tolist() == [0] * 12 + [1] * 12
    # History and future together, scored in the window of the future.
    whole = [
        np.concatenate([random_events([4, 0])[int(row)].times, one.times])
        for row, one in zip(found.source, found.sequences, strict=True)
    ]
    types = [
        np.concatenate([random_events([4, 0])[int(row)].types, one.types])
        for row, one in zip(found.source, found.sequences, strict=True)
    ]
    events = EventSequences.from_arrays(whole, types, num_types=2)
    gaps = []
    for position, (row, one) in enumerate(zip(found.source, found.sequences, strict=True)):
        start = torch.tensor([[one.start, *one.times]], dtype=torch.float64)
        end = torch.tensor([[*one.times, one.end]], dtype=torch.float64)
        value = HAWKES.compensator(events.batch([position]), start, end)
        gaps.append(value[0].sum(-1).numpy())
        assert row == one.id
    # Windows are joined, so that rests are not lost.
    edges = np.cumsum(np.concatenate(gaps))
    last = np.cumsum([len(part) for part in gaps]) - 1
    rescaled = np.diff(np.delete(edges, last), prepend=0.0)
    assert len(rescaled) == len(found.sequences.times)
    assert calibrate(rescaled).p_value > 1e-3


def test_a_recent_event_brings_more() -> None:
    process = HawkesProcess([0.2], [[0.9]], 4.0)
    batch = EventSequences.from_arrays([[0.0] * 5, []], starts=[0.0, 0.0]).batch()
    counts = sample(process, batch, until=1.0, generator=seeded(), num_futures=200).sequences
    busy, calm = counts.lengths[:200].mean(), counts.lengths[200:].mean()
    assert busy > 5 * calm


def test_a_bound_that_does_not_hold_is_an_error() -> None:
    empty = EventSequences.from_arrays([[]], starts=[0.0]).batch()
    with pytest.raises(InvalidBoundError, match=r"above the bound 1\.5 that the process gives"):
        sample(wave(bound=1.5), empty, until=50.0, generator=seeded())


def test_a_probed_bound_that_is_too_low_is_raised_and_counted() -> None:
    def peak(t: Tensor) -> Tensor:
        # Between the probes of the first interval, a peak far above the margin.
        return (0.2 + 40 * torch.exp(-(((t - 0.93) / 0.02) ** 2)))[..., None]

    process = InhomogeneousPoissonProcess(peak, num_types=1)
    empty = EventSequences.from_arrays([[]], starts=[0.0]).batch()
    found = sample(process, empty, until=10.0, generator=seeded(), num_futures=300)
    assert found.num_raised > 0


def test_same_seed_gives_the_same_futures() -> None:
    history = random_events([3, 2]).batch()
    one, same, other = (
        sample(HAWKES, history, until=20.0, generator=seeded(seed)).sequences for seed in (1, 1, 2)
    )
    assert np.array_equal(one.times, same.times)
    assert np.array_equal(one.types, same.types)
    assert not np.array_equal(one.times, other.times)


def test_futures_lie_between_their_start_and_their_end() -> None:
    history = random_events([3, 2], windows=False).batch()
    start = history.last_times + torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = sample(
        HAWKES, history, start=start, until=start + 10, generator=seeded(), num_futures=3
    )
    for one in found.sequences:
        assert one.start == float(start[one.id])
        assert one.end == one.start + 10
        assert (one.times > one.start).all()
        assert (one.times <= one.end).all()
    assert found.num_candidates >= len(found.sequences.times)


def test_histories_are_left_as_they_were() -> None:
    history = random_events([3, 2]).batch()
    times = history.times.clone()
    sample(HAWKES, history, until=30.0, generator=seeded())
    assert torch.equal(history.times, times)
    assert history.lengths.tolist() == [3, 2]


def test_largest_number_of_events_is_an_error_or_a_cut() -> None:
    wild = HawkesProcess([1.0], [[1.5]], 5.0)
    empty = EventSequences.from_arrays([[]], starts=[0.0]).batch()
    with pytest.raises(RuntimeError, match="a future has 50 events before it ends"):
        sample(wild, empty, until=1e3, generator=seeded(), max_events=50)
    found = sample(wild, empty, until=1e3, generator=seeded(), max_events=50, at_limit="stop")
    assert (found.is_cut.tolist(), found.sequences.lengths.tolist()) == ([True], [50])
    assert found.sequences[0].end == found.sequences[0].times[-1]


def test_progress_counts_finished_futures() -> None:
    seen: list[tuple[int, int]] = []
    sample(
        HAWKES,
        EMPTY,
        until=5.0,
        generator=seeded(),
        num_futures=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_silent_process_has_no_future() -> None:
    for process in (PoissonProcess([0.0, 0.0]), WithoutClosedForms(PoissonProcess([0.0, 0.0]))):
        assert len(sample(process, EMPTY, until=5.0, generator=seeded()).sequences.times) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"until": -1.0}, "end after they start"),
        ({"until": math.inf}, "finite times"),
        ({"until": 1.0, "num_futures": 0}, "must be at least 1"),
        ({"until": torch.ones(3)}, "must be a number or"),
        ({"until": 1.0, "at_limit": "go on"}, "at_limit must be one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(HAWKES, EMPTY, generator=seeded(), **arguments)


def test_probing_comes_to_the_end_of_a_quiet_window_in_few_steps() -> None:
    reports: list[int] = []
    sample(
        WithoutClosedForms(PoissonProcess([1e-6, 1e-6])),
        EMPTY,
        until=10.0,
        generator=seeded(),
        progress=lambda done, total: reports.append(done),
    )
    assert len(reports) <= 9  # eighths of the window, and rounding
