"""Events, processes and slow oracles that several tests use."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from osciformer._types import Tensor
from osciformer.events import EventBatch, EventProcess, EventSequences, HawkesProcess

HAWKES = HawkesProcess(
    base=[0.3, 0.1], branching=[[0.4, 0.1], [0.3, 0.2]], decay=[[2.0, 0.7], [1.1, 3.0]]
)


def random_events(
    lengths: list[int], *, num_types: int = 2, seed: int = 0, windows: bool = True
) -> EventSequences:
    """Return sequences of these lengths, with windows around them."""
    rng = np.random.default_rng(seed)
    times = [np.cumsum(rng.exponential(size=n)) + rng.normal() for n in lengths]
    types = [rng.integers(0, num_types, size=n) for n in lengths]
    starts = np.array([t[0] - rng.exponential() if len(t) else -1.0 for t in times])
    ends = np.array([t[-1] + rng.exponential() if len(t) else 1.5 for t in times])
    edges = {"starts": starts, "ends": ends} if windows else {}
    return EventSequences.from_arrays(times, types, num_types=num_types, **edges)


@st.composite
def event_sequences(draw: st.DrawFn, max_sequences: int = 3, max_events: int = 6) -> EventSequences:
    """Draw sequences, some of them empty, some with events at one time."""
    gap = st.one_of(st.just(0.0), st.floats(0.001, 3.0))
    gaps = draw(st.lists(st.lists(gap, max_size=max_events), min_size=1, max_size=max_sequences))
    first = draw(st.floats(-5, 5))
    times = [first + np.cumsum(some) for some in gaps]
    types = [draw(st.lists(st.integers(0, 1), min_size=len(t), max_size=len(t))) for t in times]
    return EventSequences.from_arrays(
        times,
        types,
        num_types=2,
        starts=np.full(len(times), first - 0.5),
        ends=np.array([t[-1] if len(t) else first for t in times]) + 0.7,
    )


def hawkes_rate(process: HawkesProcess, times: np.ndarray, types: np.ndarray, t: float, k: int):
    """Return the intensity of type k at t by the sum of its definition."""
    count = process.num_types
    decay = process.decay.expand(count, count).numpy()
    total = float(process.base[k])
    for time, kind in zip(times, types, strict=True):
        if time < t:
            beta = decay[k, kind]
            total += float(process.branching[k, kind]) * beta * math.exp(-beta * (t - time))
    return total


def hawkes_log_likelihood(
    process: HawkesProcess,
    times: np.ndarray,
    types: np.ndarray,
    start: float,
    end: float,
    first_scored: int,
) -> float:
    """Return the log-likelihood on (start, end] by double sums over pairs of events."""
    count = process.num_types
    decay = process.decay.expand(count, count).numpy()
    total = sum(
        math.log(hawkes_rate(process, times, types, times[i], types[i]))
        for i in range(first_scored, len(times))
    )
    total -= float(process.base.sum()) * (end - start)
    for time, kind in zip(times, types, strict=True):
        for k in range(count):
            begin = max(start, time)
            if begin < end:
                beta = decay[k, kind]
                mass = math.exp(-beta * (begin - time)) - math.exp(-beta * (end - time))
                total -= float(process.branching[k, kind]) * mass
    return total


class WithoutClosedForms(EventProcess):
    """Another process, of which only the intensity is told."""

    def __init__(self, process: EventProcess) -> None:
        self.process, self.num_types = process, process.num_types
        self.gap_breaks = process.gap_breaks

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Tensor:
        return self.process.intensity(batch, query_times)


def padded(batch: EventBatch, extra: int, junk: float) -> EventBatch:
    """Return the batch with more padding, all of which holds junk."""
    pad = torch.nn.functional.pad
    mask = pad(batch.mask, (0, extra), value=False)
    times = pad(batch.times, (0, extra)).masked_fill(~mask, junk)
    types = pad(batch.types, (0, extra)).masked_fill(~mask, 10**6)
    return EventBatch(times, types, mask, batch.starts, batch.ends, batch.index)
