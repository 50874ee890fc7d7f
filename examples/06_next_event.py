"""When does the next event come, and what will it be?

Quakes come in swarms: each one, large or small, makes others likelier for a while. The catalogue
here is drawn from such a process (a Hawkes process), so that the best possible score is known.

The trap: a likelihood of events is a density. It has a unit (nats per event, with times in days
here), it must be taken of each event given those before it alone, and it says nothing without
something to compare with. So three numbers stand side by side: a process with constant rates, the
model, and the process that the events were drawn from, which nothing can beat but by chance.
Sequences are cut after a number of events. Were they cut at a time, last gaps would be lost, long
ones most often, and the true process would no longer be the best.

Run `python examples/06_next_event.py`. Expect a minute or two on a CPU, the three likelihoods, and
a forecast of what follows after the last quake of one region.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from osciformer import OsciFormerEventPredictor
from osciformer.events import (
    EventSequences,
    HawkesProcess,
    PoissonProcess,
    log_likelihood,
    plot_intensity,
    simulate_hawkes,
)

SEED = 0
NAMES = ("small", "large")
DAYS = 150.0  # long enough for NUM_EVENTS in practically every region
NUM_EVENTS = 20
# Small ones follow small ones at once; large ones are rare, and have many followers for days.
TRUTH = HawkesProcess(
    base=[0.2, 0.05], branching=[[0.5, 1.5], [0.05, 0.1]], decay=[[3.0, 0.7], [3.0, 0.7]]
)


def make_catalogue(num_regions: int, seed: int) -> EventSequences:
    """Return the quakes of regions that know nothing of each other."""
    generator = torch.Generator().manual_seed(seed)
    drawn = simulate_hawkes(
        TRUTH, num_sequences=num_regions, horizon=DAYS, generator=generator, time_unit="d"
    )
    catalogue = drawn.replace(type_names=NAMES).first(NUM_EVENTS)
    return catalogue[catalogue.lengths == NUM_EVENTS]


def constant_rates(events: EventSequences) -> PoissonProcess:
    """Return the process whose rates are the mean ones of these events."""
    counts = np.bincount(np.concatenate([one.types[1:] for one in events]), minlength=len(NAMES))
    return PoissonProcess(counts / events.gaps.sum())


def main(num_train=300, num_test=100, max_epochs=15, dim=32, picture=None) -> dict[str, float]:
    train, test = make_catalogue(num_train, SEED), make_catalogue(num_test, SEED + 1)
    print(f"{len(train)} regions with {NUM_EVENTS} quakes each")
    model = OsciFormerEventPredictor(
        dim=dim,
        max_epochs=max_epochs,
        learning_rate=5e-3,
        random_state=SEED,
        verbose=1,
    ).fit(train)

    found = model.evaluate(test)
    scores = {
        "constant rates": log_likelihood(constant_rates(train), test).micro,
        "model": found.log_likelihood.micro,
        "true process": log_likelihood(TRUTH, test).micro,
    }
    print(f"log-likelihood of {len(test)} other regions, nats per event, time in days:")
    for name, value in scores.items():
        print(f"  {name:15s} {value:.4f}")
    print(f"  types right: {found.accuracy:.1%}; calibration: KS {calibration(model, test):.3f}")

    region = test[[0]]
    following = model.predict(region)
    day = model.sample(region, until=1.0, relative=True, num_futures=20, random_state=SEED)
    print(
        f"region {following.ids[0]}, last quake on day {following.last_time[0]:.2f}: the next one "
        f"is {following.type[0]}, half of the time within {following.median_gap[0]:.2f} days;\n"
        f"  {day.sequences.lengths.mean():.1f} quakes in the following day (mean of 20 futures)"
    )
    if picture is not None:
        plot_intensity(model.model_, region).savefig(picture, dpi=120)
        print(f"rates of the first quakes of that region: {picture}")
    return {"gap to the true process": abs(scores["true process"] - scores["model"])}


def calibration(model: OsciFormerEventPredictor, events: EventSequences) -> float:
    """Return the distance of rescaled gaps from the exponential law; 0 for the right process."""
    return model.calibration(events).statistic


if __name__ == "__main__":
    main(picture=Path(sys.argv[1] if len(sys.argv) > 1 else "next_event.png"))
