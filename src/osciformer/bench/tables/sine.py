"""`osciformer bench sine`: the frequency of waves that are seen at random times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.models import peak, spectral
from osciformer.bench.tables.problem import Part, Problem, Task
from osciformer.data import IrregularSeries

#: Of the grid of classes, in turns a unit of time; the grid of the times.
LOWEST, STEP, STEPS = 10.0, 4.0, 2000
#: Amplitudes of a wave by the multiple of its frequency.
HARMONICS = {1: 0.5, 2: 0.2, 4: 0.1}
NOISE = 0.1
CASES: dict[str, Task] = {"regression": "regression", "classification": "classification"}
#: Of the spectra of classical models: four lines to a class.
LINE = 1.0


def make_waves(
    count: int, seed: int, *, classes: int, rows: int, is_class: bool
) -> IrregularSeries:
    r"""Return noisy waves at random times, labelled with their frequency or its class.

    With the frequency f, a random phase p and a random sign, values are

    $$0.5 \sin(2 \pi f t + p) + 0.2 \sin(4 \pi f t) + 0.1 \sin(8 \pi f t)
    \pm (t - 0.5)^2 + 0.1 n$$

    Args:
        count: How many.
        seed: Of all randomness.
        classes: Frequencies are 10, 14, ..., so many, or uniform over that range.
        rows: Of the 2,000 times on [0, 1], how many are seen, another choice for each series.
        is_class: Whether the label is a class.
    """
    generator = np.random.default_rng(seed)
    numbers = generator.integers(classes, size=count)
    frequency = LOWEST + STEP * numbers
    if not is_class:
        frequency = generator.uniform(LOWEST, LOWEST + STEP * (classes - 1), count)
    chosen = np.argsort(generator.random((count, STEPS)), axis=1)[:, :rows]
    times = np.linspace(0.0, 1.0, STEPS)[np.sort(chosen, axis=1)]
    turn = 2 * np.pi * frequency[:, None] * times
    phases = {1: generator.uniform(0, 2 * np.pi, (count, 1))}
    values = sum(a * np.sin(k * turn + phases.get(k, 0.0)) for k, a in HARMONICS.items())
    values = values + generator.choice((-1.0, 1.0), (count, 1)) * (times - 0.5) ** 2
    values = values + NOISE * generator.standard_normal(times.shape)
    labels = numbers if is_class else frequency
    return IrregularSeries.from_arrays(list(times), list(values), labels=labels)


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of a case; the data do not depend on the seed."""
    how = {"classes": size["classes"], "rows": size["rows"], "is_class": case == "classification"}
    parts = [
        Part(make_waves(size[name], number, **how))
        for number, name in enumerate(("train", "validation", "test"))
    ]
    settings = {"max_epochs": size["epochs"], "batch_size": size["batch"], "dim": size["dim"]}
    return Problem(CASES[case], parts[0], parts[1], {"test": parts[2]}, settings)


def _lines(size: Mapping[str, Any]) -> int:
    return int((LOWEST + STEP * size["classes"]) / LINE)


SIZES: dict[str, dict[str, int]] = {
    "small": {
        **{"train": 1000, "validation": 300, "test": 1000, "classes": 25, "rows": 150},
        **{"epochs": 30, "batch": 32, "dim": 32},
    },
    "full": {
        **{"train": 20_000, "validation": 2000, "test": 5000, "classes": 100, "rows": 600},
        **{"epochs": 100, "batch": 32, "dim": 64},
    },
    "quick": {
        **{"train": 60, "validation": 30, "test": 30, "classes": 5, "rows": 60},
        **{"epochs": 1, "batch": 16, "dim": 8},
    },
}
SUITE = Table(
    name="sine",
    module="sine",
    summary="Frequency of waves at random times.",
    rows=tuple(CASES),
    load=load,
    tasks=CASES,
    sizes=SIZES,
    own={
        "lomb_scargle": spectral(LINE, _lines(SIZES["full"])),
        "peak": peak(LINE / 4, 4 * _lines(SIZES["full"]), first=round(4 * 0.8 * LOWEST)),
    },
    note=(
        "A wave of three harmonics with a trend and noise, at random ones of 2,000 times on "
        "[0, 1]. `regression` asks for its frequency (RMSE, in turns a unit of time), uniform "
        "between 10 and 10 + 4 (classes - 1); `classification` asks which of 10, 14, ... it is. "
        "`peak` names the highest peak of the Lomb-Scargle periodogram, without training; "
        "`lomb_scargle` is ridge or logistic regression on periodograms."
    ),
)
