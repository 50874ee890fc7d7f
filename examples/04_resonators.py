"""Hear which frequency a machine shakes at, from a few noisy readings at random times.

Machines shake at one of several close frequencies, with any phase, and one of three gauges hears
it. Gauges are read at random times, each reading is noisy, and a fifth of them is missing. Each
series drives a bank of damped oscillators, whose answers a simple regression reads. The model then
says what it listens to: which gauge, and which periods.

The trap: readings on a grid could not tell frequencies above half the sampling rate from lower
ones. Random times can, so all of these are above that rate on purpose.

Run `python examples/04_resonators.py`. Expect a few seconds on a CPU, the accuracy on other
machines beside that of guessing, and a picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from osciformer import IrregularSeries, ResonatorClassifier
from osciformer._optional import need

SEED = 0
FREQUENCIES = (0.35, 0.40, 0.45)  # turns per hour
HOURS = 100.0
NUM_READINGS = 60  # so that half the mean sampling rate is 0.3
NOISE = 0.5  # of the amplitude
MISSING = 0.2
GAUGES = ("bearing", "casing", "room")
PICTURE = Path("outputs/resonators.png")


def make_machines(count: int, rng: np.random.Generator) -> IrregularSeries:
    """Return readings of machines, labelled by the frequency at the bearing."""
    labels = np.arange(count) % len(FREQUENCIES)
    times, values = [], []
    for label in labels:
        hours = np.sort(rng.uniform(0.0, HOURS, NUM_READINGS))
        readings = NOISE * rng.standard_normal((NUM_READINGS, len(GAUGES)))
        phase = rng.uniform(0.0, 2.0 * np.pi)
        readings[:, 0] += np.sin(2.0 * np.pi * FREQUENCIES[label] * hours + phase)
        readings[rng.random(readings.shape) < MISSING] = np.nan
        times.append(hours)
        values.append(readings)
    names = [f"{frequency:g} per hour" for frequency in FREQUENCIES]
    return IrregularSeries.from_arrays(
        times, values, labels=np.array(names)[labels], feature_names=GAUGES
    )


def main(num_train=300, num_test=300, picture=PICTURE) -> dict[str, float]:
    pyplot = need("matplotlib.pyplot", extra="plot")  # asked for here, not after the training
    rng = np.random.default_rng(SEED)
    train, test = make_machines(num_train, rng), make_machines(num_test, rng)
    model = ResonatorClassifier(random_state=SEED).fit(train)
    accuracy = model.score(test)
    print(f"fitted to {num_train} machines in {model.fit_seconds_:.1f} s")
    print(f"accuracy on {num_test} others: {accuracy:.3f}; guessing: {1 / len(FREQUENCIES):.3f}")
    rows = model.importance()
    print("what it listens to:")
    for row in rows[:5]:
        period = "no period" if row["period"] is None else f"period {row['period']:.2f} h"
        print(f"  {row['variable']:8s} {period}  {row['importance']:.1%}")

    figure, axis = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for gauge in GAUGES:
        own = [r for r in rows if r["variable"] == gauge and r["period"] is not None]
        own.sort(key=lambda row: row["period"])
        turns, parts = ([1.0 / r["period"] for r in own], [100.0 * r["importance"] for r in own])
        axis.plot(turns, parts, label=gauge)
    for frequency in FREQUENCIES:
        axis.axvline(frequency, color="0.8", zorder=0)
    axis.set(xlabel="turns per hour", ylabel="importance, %", title="What the model listens to")
    axis.set_xlim(0.0, 2.0 * max(FREQUENCIES))
    axis.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    return {"accuracy": accuracy}


if __name__ == "__main__":
    main()
