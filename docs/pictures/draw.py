"""Draw the pictures of the README and of the docs from models that this script trains.

Run `python docs/pictures/draw.py` (a few minutes on a CPU). It writes one picture per task beside
this file, and `landing.png`, which shows three of them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

mpl.use("Agg")
from matplotlib import pyplot as plt

from osciformer import (
    IrregularSeries,
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
)
from osciformer.events import HawkesProcess, simulate_hawkes

HERE = Path(__file__).parent
BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#374151"
SEED = 0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TRAINING: dict[str, Any] = {
    "max_epochs": 20,
    "batch_size": 32,
    "random_state": SEED,
    "train_options": {"patience": None},
}

Draw = Callable[[Any], None]


def fading(count: int, rng: np.random.Generator) -> IrregularSeries:
    """Return pressures that fade quickly (good valves) or slowly (worn ones)."""
    labels = np.array(["good", "worn"])[np.arange(count) % 2]
    times = [np.cumsum(rng.exponential(rng.uniform(0.05, 0.5), size=12)) for _ in labels]
    fall = np.where(labels == "worn", 1.5, 0.5)
    values = [
        (rng.uniform(1, 3) * np.exp(-t / f) + 0.05 * rng.normal(size=12))[:, None]
        for t, f in zip(times, fall, strict=True)
    ]
    return IrregularSeries.from_arrays(times, values, labels=labels)


def classification() -> Draw:
    """Classify series: the colour of a curve is its predicted probability."""
    rng = np.random.default_rng(SEED)
    train, test = fading(400, rng), fading(24, rng)
    model = OsciFormerClassifier(dim=16, **TRAINING).fit(train)
    worn = model.predict_proba(test)[:, 1]
    print(f"classification: accuracy {model.score(fading(400, rng)):.3f} on 400 other series")

    def draw(axis: Any) -> None:
        colours = mpl.colors.LinearSegmentedColormap.from_list("", [BLUE, "#d1d5db", ORANGE])
        for one, chance in zip(test, worn, strict=True):
            axis.plot(one.times, one.values[:, 0], "-o", color=colours(chance), ms=3, lw=0.8)
        scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, 1), colours)
        bar = axis.figure.colorbar(scale, ax=axis, ticks=[0, 0.5, 1], shrink=0.7)
        bar.set_label("P(worn)")
        axis.set(title="Classify whole series", xlabel="hours", xlim=(0, 4), ylim=(-0.2, 3))

    return draw


def regression() -> Draw:
    """Predict a number: the frequency of a noisy irregular oscillation."""
    rng = np.random.default_rng(SEED)

    def make(count: int) -> IrregularSeries:
        rate = rng.uniform(0.2, 1.0, size=count)
        times = [np.sort(rng.uniform(0, 10, size=25)) for _ in rate]
        values = [
            (np.sin(2 * np.pi * w * t / 2 + rng.uniform(0, 6)) + 0.1 * rng.normal(size=25))[:, None]
            for t, w in zip(times, rate, strict=True)
        ]
        return IrregularSeries.from_arrays(times, values, labels=rate / 2)

    model = OsciFormerRegressor(dim=32, **TRAINING).fit(make(600))
    test = make(200)
    found = model.predict(test)
    print(f"regression: R2 {model.score(test):.3f} on 200 other series")

    def draw(axis: Any) -> None:
        axis.plot([0.1, 0.5], [0.1, 0.5], color=GREY, lw=0.8)
        axis.plot(test.labels, found, "o", color=BLUE, ms=3, alpha=0.6)
        axis.set(title="Predict a number per series", xlabel="true frequency", ylabel="predicted")

    return draw


def tides(count: int, rng: np.random.Generator, gap: bool) -> tuple[IrregularSeries, list]:
    """Return irregular readings of tides and the functions that they were read from."""
    times, values, truths = [], [], []
    for _ in range(count):
        phase, height = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 1.5)

        def truth(t: np.ndarray, phase: float = phase, height: float = height) -> np.ndarray:
            return height * np.sin(2 * np.pi * t / 12.4 + phase)

        hour = np.sort(rng.uniform(0, 48, size=36))
        if gap:
            start = rng.uniform(8, 34)
            hour = hour[(hour < start) | (hour > start + 6)]
        times.append(hour)
        values.append((truth(hour) + 0.1 * rng.normal(size=len(hour)))[:, None])
        truths.append(truth)
    return IrregularSeries.from_arrays(times, values, feature_names=["level"]), truths


def band(axis: Any, hours: np.ndarray, curve: np.ndarray) -> None:
    """Draw the median and the 50 % and 90 % intervals of quantiles ``[M, 5]``."""
    axis.fill_between(hours, curve[:, 0], curve[:, 4], color=BLUE, alpha=0.18, lw=0)
    axis.fill_between(hours, curve[:, 1], curve[:, 3], color=BLUE, alpha=0.3, lw=0)
    axis.plot(hours, curve[:, 2], color=BLUE, lw=1.4)


def forecasting() -> Draw:
    """Forecast at any time, with intervals."""
    rng = np.random.default_rng(SEED)
    train, _ = tides(300, rng, gap=False)
    test, truths = tides(3, rng, gap=False)
    model = OsciFormerForecaster(
        horizon=9.0, quantiles=QUANTILES, dim=16, learning_rate=1e-2, **TRAINING
    ).fit(train)
    one = test[0]
    known = IrregularSeries.from_arrays(
        [one.times[one.times < 36]], [one.values[one.times < 36]], feature_names=["level"]
    )
    ahead = np.linspace(known.times[-1] + 0.02, known.times[-1] + 9, 80)
    curve = model.predict_quantiles(known, times=ahead)[0, :, 0]

    def draw(axis: Any) -> None:
        band(axis, ahead, curve)
        axis.plot(ahead, truths[0](ahead), "--", color=ORANGE, lw=1, label="truth")
        axis.plot(known.times, known.values[:, 0], "o", color=GREY, ms=3.5, label="readings")
        axis.set(title="Forecast at any time", xlabel="hours", xlim=(8, ahead[-1]))
        axis.legend(loc="lower left", frameon=False, ncols=2, fontsize=8)

    return draw


def imputation() -> Draw:
    """Fill gaps, with intervals."""
    rng = np.random.default_rng(SEED)
    train, _ = tides(300, rng, gap=True)
    test, truths = tides(1, rng, gap=True)
    model = OsciFormerImputer(
        quantiles=QUANTILES, hidden_fraction=0.3, dim=16, learning_rate=1e-2, **TRAINING
    ).fit(train)
    hours = np.linspace(2, 46, 250)
    curve = model.predict_quantiles(test, times=hours)[0, :, 0]

    def draw(axis: Any) -> None:
        band(axis, hours, curve)
        axis.plot(hours, truths[0](hours), "--", color=ORANGE, lw=1, label="truth")
        axis.plot(test.times, test.values[:, 0], "o", color=GREY, ms=3.5, label="readings")
        axis.set(title="Fill gaps", xlabel="hours")
        axis.legend(loc="lower left", frameon=False, ncols=2, fontsize=8)

    return draw


def events() -> Draw:
    """Rate of the next event along time, beside the rate that the events were drawn from."""
    truth = HawkesProcess(base=[0.3], branching=[[0.7]], decay=[[1.2]])

    def make(count: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return simulate_hawkes(truth, num_sequences=count, horizon=40.0, generator=generator)

    model = OsciFormerEventPredictor(dim=16, num_heads=2, learning_rate=5e-3, **TRAINING)
    model.fit(make(300, SEED))
    drawn = make(12, SEED + 1)
    one = drawn[[int(np.argmax([min(n, 30) for n in drawn.lengths]))]]
    days = np.linspace(0.05, 40, 600)
    rate = model.intensity(one, days)[0, :, 0]
    with torch.no_grad():
        gap = days[:, None] - one.times[None, :]
        real = 0.3 + 0.7 * 1.2 * np.where(gap > 0, np.exp(-1.2 * np.maximum(gap, 0)), 0).sum(1)

    def draw(axis: Any) -> None:
        axis.fill_between(days, rate, color=BLUE, alpha=0.2, lw=0)
        axis.plot(days, rate, color=BLUE, lw=1.2, label="model")
        axis.plot(days, real, "--", color=ORANGE, lw=0.9, label="truth")
        axis.plot(one.times, np.full(len(one.times), -0.12), "|", color=GREY, ms=8)
        axis.set(title="Rate of the next event", xlabel="days")
        axis.legend(loc="upper right", frameon=False, fontsize=8)

    return draw


def main() -> None:
    """Train the models, and draw a card for each task and the landing picture."""
    torch.set_num_threads(1)
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    drawn: dict[str, Draw] = {}
    for task in (classification, regression, forecasting, imputation, events):
        drawn[task.__name__] = task()
        figure, axis = plt.subplots(figsize=(3.6, 2.4), layout="constrained")
        drawn[task.__name__](axis)
        figure.savefig(HERE / f"{task.__name__}.png", dpi=130)
        print(f"drawn: {task.__name__}.png", flush=True)
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
    for axis, name in zip(axes, ("classification", "forecasting", "events"), strict=True):
        drawn[name](axis)
    figure.savefig(HERE / "landing.png", dpi=130)


if __name__ == "__main__":
    main()
