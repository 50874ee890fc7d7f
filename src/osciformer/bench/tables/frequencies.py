"""`osciformer bench frequencies`: which of some close frequencies a noisy sine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.models import spectral
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries
from osciformer.estimators.base import training_length

SPAN = 100.0
NOISE = 0.5
#: Seeds of data count from here; those from 0 on were seen when the features were chosen.
SEEDS = {"train": 50, "test": 1050, "validation": 2050}
FREQUENCIES = {
    "two": (0.35, 0.65),
    "three": (0.45, 0.5, 0.55),
    "ten": tuple(np.arange(30, 76, 5) / 100),
}
#: Settings of `make_series` by case.
CASES: dict[str, dict[str, Any]] = {
    f"{name} x {rows}": {"frequencies": frequencies, "rows": rows}
    for rows in (60, 20, 200)
    for name, frequencies in FREQUENCIES.items()
}
CASES["forty-one x 60"] = {"frequencies": tuple(np.arange(30, 71) / 100)}
#: Times as many training series as the other cases have.
MORE_SERIES = {"forty-one x 60": 7}
CASES |= {
    f"{name} drift": {"frequencies": frequencies, "drift": 0.1}
    for name, frequencies in FREQUENCIES.items()
}
CASES |= {
    f"{name} of 5 variables{times}": {
        "frequencies": frequencies,
        "variables": 5,
        "has_own_times": bool(times),
    }
    for times in ("", " at own times")
    for name, frequencies in FREQUENCIES.items()
}


def make_series(
    number: int,
    seed: int,
    frequencies: Sequence[float],
    *,
    rows: int = 60,
    drift: float = 0.0,
    variables: int = 1,
    has_own_times: bool = False,
) -> IrregularSeries:
    """Return series whose label is the number of their frequency.

    Args:
        number: How many.
        seed: Of all randomness.
        frequencies: Those of the classes, in turns a unit of time.
        rows: Times of a series, or of each variable if they have their own.
        drift: By how much of itself the frequency rises over the span.
        variables: Of which the middle one carries the signal.
        has_own_times: Whether each variable is seen at its own times.
    """
    generator = np.random.default_rng(seed)
    labels = generator.integers(len(frequencies), size=number)
    labels[: len(frequencies)] = np.arange(len(frequencies))  # each class is there
    frequency = np.array(frequencies)[labels][:, None]

    def draw_times() -> np.ndarray:
        return np.sort(generator.uniform(0, SPAN, (number, rows)), axis=1)

    def signal(times: np.ndarray) -> np.ndarray:
        phase = generator.uniform(0, 2 * np.pi, (number, 1))
        turns = frequency * (times + drift * times**2 / (2 * SPAN))
        sine: np.ndarray = np.sin(2 * np.pi * turns + phase)
        return sine + NOISE * generator.standard_normal(times.shape)

    def other(times: np.ndarray, variable: int) -> np.ndarray:
        normal = generator.standard_normal(times.shape)
        if variable % 2:
            return normal
        return np.cumsum(0.3 * normal * np.sqrt(np.diff(times, axis=1, prepend=0)), axis=1)

    times = [draw_times() for _ in range(variables if has_own_times else 1)]
    values = [
        signal(at) if variable == variables // 2 else other(at, variable)
        for variable, at in enumerate(times if has_own_times else times * variables)
    ]
    if not has_own_times:
        return IrregularSeries.from_arrays(
            list(times[0]), list(np.stack(values, axis=-1)), labels=labels
        )
    at, whole = (
        np.concatenate(times, axis=1),
        np.full((number, rows * variables, variables), np.nan),
    )
    for variable, value in enumerate(values):
        whole[:, variable * rows : (variable + 1) * rows, variable] = value
    order = np.argsort(at, axis=1)
    at, whole = (np.take_along_axis(x, i, 1) for x, i in ((at, order), (whole, order[..., None])))
    return IrregularSeries.from_arrays(list(at), list(whole), labels=labels)


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of a case; its data are drawn anew for each seed."""
    factor = {"train": MORE_SERIES.get(case, 1)}
    parts = {
        name: Part(make_series(factor.get(name, 1) * size[name], first + seed, **CASES[case]))
        for name, first in SEEDS.items()
    }
    length = training_length(len(parts["train"].series))
    settings = {"max_epochs": size["epochs"] or length.max_epochs, "dim": size["dim"]}
    settings["batch_size"] = length.batch_size
    tests = {"test": parts["test"]}
    return Problem("classification", parts["train"], parts["validation"], tests, settings)


SUITE = Table(
    name="frequencies",
    module="frequencies",
    summary="Close frequencies in noise.",
    rows=tuple(CASES),
    load=load,
    tasks="classification",
    sizes={
        "small": {"train": 600, "validation": 200, "test": 1000, "epochs": 0, "dim": 32},
        "full": {"train": 6000, "validation": 1000, "test": 5000, "epochs": 0, "dim": 64},
        "quick": {"train": 60, "validation": 20, "test": 40, "epochs": 1, "dim": 8},
    },
    own={"lomb_scargle": spectral(0.005, 200)},
    note=(
        "A class is a frequency (two: 0.35, 0.65; three: 0.45, 0.50, 0.55; ten: from 0.30 to 0.75; "
        "forty-one: from 0.30 to 0.70 by 0.01, a turn over the span apart, with seven times as "
        "many training series). A series is a sine of that frequency, of amplitude 1 and random "
        "phase, with noise of 0.5, at so many random times on [0, 100], others for each series. "
        "With drift the frequency rises by 10 % over the span. Of 5 variables the third carries "
        "the signal, the others are random walks and noise; they are seen at the same 60 times, or "
        "each at its own. `lomb_scargle` is logistic regression on spectra from 0.005 to 1, a "
        "range that it is told. Epochs are those of `training_length`: 600 steps or 15 passes."
    ),
)
