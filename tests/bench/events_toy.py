"""Events in the place of those that the benchmark has."""

from __future__ import annotations

import numpy as np

from osciformer.bench.events.datasets import Parts
from osciformer.events import EventSequences


def random_parts(seed: int = 0, count: int = 24) -> Parts:
    """Return Poisson processes with types at random; `count` sequences to train on."""
    rng = np.random.default_rng(seed)

    def part(number: int) -> EventSequences:
        times = [np.cumsum(rng.exponential(size=rng.integers(2, 7))) for _ in range(number)]
        types = [rng.integers(0, 2, size=len(t)) for t in times]
        return EventSequences.from_arrays(times, types, num_types=2, time_unit="h")

    return Parts(part(count), part(6), part(7))
