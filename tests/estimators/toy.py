"""Irregular series with known answers, and settings that train in a moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from osciformer.config import estimator_arguments, estimator_settings
from osciformer.data import IrregularSeries

TINY: dict[str, Any] = {
    "dim": 8,
    "num_layers": 1,
    "num_heads": 1,
    "max_epochs": 2,
    "batch_size": 16,
    "accelerator": "cpu",
    "random_state": 0,
}


def make(kind: Any, **given: Any) -> Any:
    """Return an estimator with settings where they belong: keywords, or options.

    A network stands alone unless `resonators=True`: most tests are about it, and soon done.
    """
    known = estimator_settings(kind.task)
    if "resonators" in known:
        given.setdefault("resonators", False)
    settings = {name: value for name, value in given.items() if name in known}
    others = {name: value for name, value in given.items() if name not in known}
    return kind(**others, **estimator_arguments(kind.task, settings))


def two_levels(count: int, seed: int = 0, *, missing: float = 0.2) -> IrregularSeries:
    """Return series of two features around a level, which is higher in class "b"."""
    generator = np.random.default_rng(seed)
    classes = np.arange(count) % 2
    times, values = [], []
    for number in classes:
        times.append(np.sort(generator.uniform(0, 10, generator.integers(4, 12))))
        table = generator.normal(2.0 * number, 0.5, (len(times[-1]), 2))
        table[1:][generator.random((len(table) - 1, 2)) < missing] = np.nan
        values.append(table)
    static = np.stack([classes + generator.normal(0, 2, count), generator.normal(size=count)], 1)
    return IrregularSeries.from_arrays(
        times,
        values,
        labels=np.array(["a", "b"])[classes],
        static=static,
        feature_names=["pulse", "pressure"],
        static_names=["age", "height"],
        ids=[f"p{k}" for k in range(count)],
    )


def frequencies(count: int, seed: int = 0) -> IrregularSeries:
    """Return sines at irregular times; the label is which of two frequencies they have."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    times = [np.sort(generator.uniform(0, 10, generator.integers(15, 25))) for _ in labels]
    values = [
        np.sin((0.3 + 2.7 * label) * t + generator.uniform(0, 2 * np.pi))
        for label, t in zip(labels, times, strict=True)
    ]
    return IrregularSeries.from_arrays(times, values, labels=labels)


def close_frequencies(count: int, seed: int = 0) -> IrregularSeries:
    """Return noisy sines of any phase: the label is which of three close frequencies they have."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    times = [np.sort(generator.uniform(0, 100, 60)) for _ in labels]
    phases = generator.uniform(0, 2 * np.pi, count)
    values = [
        np.sin(2 * np.pi * (0.45 + 0.05 * k) * t + phase) + generator.normal(0, 0.5, 60)
        for k, t, phase in zip(labels, times, phases, strict=True)
    ]
    return IrregularSeries.from_arrays(times, values, labels=labels)


def decays(count: int, seed: int = 0) -> IrregularSeries:
    """Return exponentials of one rate and different heights, and a column of noise."""
    generator = np.random.default_rng(seed)
    times = [np.sort(generator.uniform(0, 4, generator.integers(8, 16))) for _ in range(count)]
    values = [
        np.stack([generator.uniform(2, 6) * np.exp(-0.7 * t), generator.normal(size=len(t))], 1)
        for t in times
    ]
    return IrregularSeries.from_arrays(times, values, feature_names=["level", "noise"])
