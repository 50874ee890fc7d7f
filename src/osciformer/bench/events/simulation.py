"""Events of a Hawkes process that is known, so that the best possible likelihood is known too."""

from __future__ import annotations

from functools import cache

import torch

from osciformer.events import EventSequences, HawkesProcess, sample

TIME_UNIT = "unit of the simulation"
# Sequences are cut after a number of events, not at a time: one that ends with the last event
# before some time has lost its long last gap, and then the true process is not the best one.
NUM_EVENTS = 50
_FAR = 1e6
SIZES = {"train": 2000, "dev": 200, "test": 400}
# One for each part; nothing else of the simulation is random.
_SEEDS = {"train": 1, "dev": 2, "test": 3}


def true_process() -> HawkesProcess:
    """Return the process: three types that excite themselves and each other, fast and slowly.

    Example:
        >>> process = true_process()
        >>> process.num_types, round(process.spectral_radius, 2)
        (3, 0.65)
    """
    return HawkesProcess(
        base=[0.20, 0.12, 0.16],
        branching=[[0.45, 0.00, 0.20], [0.35, 0.25, 0.00], [0.00, 0.40, 0.30]],
        decay=[[4.0, 1.0, 0.5], [1.5, 6.0, 1.0], [1.0, 0.7, 3.0]],
    )


@cache
def simulate(part: str) -> EventSequences:
    """Return the sequences of a part, drawn by exact thinning; always the same ones.

    Args:
        part: `train`, `dev` or `test`.
    """
    nothing = EventSequences.from_arrays([[]] * SIZES[part], num_types=3).batch()
    return sample(
        true_process(),
        nothing,
        until=_FAR,
        generator=torch.Generator().manual_seed(_SEEDS[part]),
        max_events=NUM_EVENTS,
        at_limit="stop",
        time_unit=TIME_UNIT,
    ).sequences
