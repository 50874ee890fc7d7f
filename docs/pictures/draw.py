"""Draw the pictures of the README and of the docs from models that this script trains.

Run `python docs/pictures/draw.py` (a few minutes on a CPU). It writes one picture per task beside
this file, `landing.png`, which shows three of them side by side, and those of the pages on
resonators, explanations and looking inside. With names, as `python docs/pictures/draw.py responses
resonance`, it draws these alone.
"""

from __future__ import annotations

import functools
import sys
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
    ResonatorClassifier,
    oscillator_response,
)
from osciformer.events import HawkesProcess, simulate_hawkes
from osciformer.inspection import attend_series, find_spectra, probe_channel
from osciformer.plots import plot_predictions, plot_probe, plot_spectra, plot_trajectories

HERE = Path(__file__).parent
BLUE, ORANGE, GREY, GREEN = "#2563eb", "#ea580c", "#374151", "#059669"
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


def responses() -> Any:
    """Draw an irregular series, and what three resonators make of it."""
    rng = np.random.default_rng(SEED)
    hours = np.sort(rng.uniform(0, 72, size=260))

    def signal(t: np.ndarray) -> np.ndarray:
        burst = np.exp(-(((t - 45) / 7) ** 2))
        return np.sin(2 * np.pi * t / 24) + burst * np.sin(2 * np.pi * t / 3)

    values = signal(hours) + 0.15 * rng.normal(size=len(hours))
    grid, periods = np.linspace(0, 72, 1500), (24.0, 8.0, 3.0)
    omega = torch.tensor([2 * np.pi / period for period in periods], dtype=torch.float64)
    found = oscillator_response(
        torch.from_numpy(values)[None, :, None],
        torch.from_numpy(hours)[None],
        omega,
        torch.full_like(omega, 1 / 8),  # Q = 4
        of="rate",
        query_times=torch.from_numpy(grid)[None],
    )
    amplitude = torch.hypot(found.position, found.velocity / omega)[0, :, 0].numpy()
    figure, axes = plt.subplots(4, 1, figsize=(7.6, 5.6), sharex=True, layout="constrained")
    axes[0].plot(hours, values, "-o", color=GREY, ms=2.2, lw=0.5)
    axes[0].set_title("the series; its rate of change drives", loc="left", fontsize=9)
    for k, (axis, colour) in enumerate(zip(axes[1:], (BLUE, GREEN, ORANGE), strict=True)):
        axis.fill_between(grid, -amplitude[:, k], amplitude[:, k], color=colour, alpha=0.15, lw=0)
        axis.plot(grid, found.position[0, :, 0, k], color=colour, lw=1.1)
        axis.set_title(f"period {periods[k]:g} h, Q 4", loc="left", fontsize=9)
        axis.set_ylim(-5.5, 5.5)
    axes[-1].set(xlabel="hours", xlim=(0, 72))
    return figure


def resonance() -> Any:
    """Draw how far a steady sine drives an oscillator, and how it rings after a step."""
    rng = np.random.default_rng(SEED)
    ratio = np.geomspace(0.1, 10, 400)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.1), layout="constrained")
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.85, 4))
    one = torch.ones(1, dtype=torch.float64)
    turns = np.linspace(-0.5, 6, 900)
    step = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)[..., None]
    when = torch.tensor([[0.0, 0.0, 40.0]], dtype=torch.float64)
    for q, colour in zip((0.5, 1, 2, 5), colours, strict=True):
        gain = 1 / np.hypot(1 - ratio**2, ratio / q)
        left.plot(ratio, gain, color=colour, lw=1.4, label=f"Q {q:g}")
        for some in (0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0):
            times = torch.from_numpy(np.sort(rng.uniform(0, 240, size=40_000)))[None]
            driven = torch.sin(some * times)[..., None]
            x = oscillator_response(driven, times, one, one / (2 * q)).position
            late = x[0, times[0] > 180].abs().max()
            left.plot(some, late, "o", color=colour, ms=3.5)
        asked = torch.from_numpy(2 * np.pi * turns)[None]
        x = oscillator_response(step, when, one, one / (2 * q), query_times=asked).position
        right.plot(turns, x[0, :, 0, 0], color=colour, lw=1.4)
    left.axvline(1, color="#d1d5db", lw=0.8, zorder=0)
    left.set(xscale="log", yscale="log", ylim=(0.02, 8), title="Resonance: largest amplitude")
    left.set(xlabel="frequency of the drive / own frequency", ylabel="amplitude / drive")
    left.legend(frameon=False, fontsize=8)
    right.axhline(1, color="#d1d5db", lw=0.8, zorder=0)
    right.set(xlabel="own periods since the step", ylabel="position", xlim=(-0.5, 6))
    right.set_title("Ringing: the drive steps from 0 to 1")
    return figure


def bearings(count: int, rng: np.random.Generator) -> IrregularSeries:
    """Return readings of machines; worn ones shake at another period for a part of the time."""
    labels = np.array(["good", "worn"])[np.arange(count) % 2]
    times, values = [], []
    for label in labels:
        hours = np.sort(rng.uniform(0, 48, size=90))
        period, middle = (5.0 if label == "worn" else 9.0), rng.uniform(16, 36)
        burst = np.exp(-(((hours - middle) / 8) ** 2))
        shaking = 1.2 * burst * np.sin(2 * np.pi * hours / period + rng.uniform(0, 6))
        table = 0.5 * rng.normal(size=(90, 3))
        table[:, 0] += shaking
        table[:, 1:] += np.sin(2 * np.pi * hours / 24 + rng.uniform(0, 6, size=(2, 1))).T
        times.append(hours)
        values.append(table)
    names = ["shaking", "pressure", "temperature"]
    return IrregularSeries.from_arrays(times, values, labels=labels, feature_names=names)


def explanation() -> Any:
    """Draw what a trained classifier looks at, and one series along time."""
    rng = np.random.default_rng(SEED)
    model = ResonatorClassifier(random_state=SEED).fit(bearings(300, rng))
    test = bearings(400, rng)
    groups = sorted({family.group for family in model.features_.families_})
    print(f"explanation: accuracy {model.score(test):.3f} on 400 other series, groups {groups}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.1), layout="constrained")
    edges = np.geomspace(0.9, 55, 8)  # about one bin for each time scale of shapes
    for name, colour in zip(test.feature_names, (ORANGE, BLUE, GREEN), strict=True):
        rows = [r for r in model.importance() if r["variable"] == name and r["period"]]
        periods, parts = ([row[key] for row in rows] for key in ("period", "importance"))
        height, _ = np.histogram(periods, edges, weights=parts)
        left.stairs(100 * height, edges, color=colour, lw=1.5, label=name)
    left.set(xscale="log", xlabel="period, hours", ylabel="importance, %")
    left.set(title="What counts: variables and periods", xlim=(0.9, 55))
    left.set_xticks([1, 2, 5, 9, 24, 48], ["1", "2", "5", "9", "24", "48"])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    worn = int(np.flatnonzero(test.labels == "worn")[2])
    one = model.response(test[worn : worn + 1], periods=np.geomspace(1.5, 24, 60), q=3.0)
    mesh = right.pcolormesh(one.times, one.periods, one.amplitude[:, 0].T, cmap="magma_r", vmin=0)
    right.set(yscale="log", xlabel="hours", ylabel="period, hours")
    right.set_yticks([2, 5, 9, 24], ["2", "5", "9", "24"])
    right.minorticks_off()
    right.set_title("When: the shaking of one worn machine")
    figure.colorbar(mesh, ax=right, label="amplitude")
    return figure


def along_time() -> Any:
    """Draw the probability that machines are worn, if the readings ended at each of them."""
    rng = np.random.default_rng(SEED)
    model = ResonatorClassifier(random_state=SEED).fit(bearings(300, rng))
    test = bearings(40, rng)
    print(f"along_time: accuracy {model.score(test):.3f} on 40 other series")
    pair = test[:2].replace(ids=["a good machine", "a worn machine"])
    return plot_predictions(model, pair, variables=["shaking"], time="hour")


def ahead() -> Any:
    """Draw forecasts of two tides."""
    rng = np.random.default_rng(SEED)
    model = OsciFormerForecaster(
        horizon=9.0, quantiles=QUANTILES, dim=16, learning_rate=1e-2, **TRAINING
    ).fit(tides(300, rng, gap=False)[0])
    return plot_predictions(model, tides(2, rng, gap=False)[0], time="hour")


@functools.cache
def listener() -> tuple[OsciFormerForecaster, IrregularSeries]:
    """Return a network that forecasts tides, and tides that it never met."""
    rng = np.random.default_rng(SEED)
    model = OsciFormerForecaster(
        horizon=9.0, dim=16, num_heads=2, num_layers=1, learning_rate=1e-2, **TRAINING
    )
    model.fit(tides(600, rng, gap=False)[0])
    test, _ = tides(40, rng, gap=False)
    print(f"listener: skill {model.score(test):.3f} against the last value, on 40 other tides")
    return model, test


def spectra() -> Any:
    """Draw the periods and damping that a network has learned."""
    hours = [item._replace(unit="h") for item in find_spectra(listener()[0])]
    return plot_spectra(hours)


def probe() -> Any:
    """Draw what one key of the network answers to."""
    keys = find_spectra(listener()[0])[0]
    channel = int(np.argmin(np.abs(keys.period[0] - 12.4)))
    return plot_probe(probe_channel(keys._replace(unit="h"), 0, channel))


def trajectories() -> Any:
    """Draw keys between the readings of one tide."""
    model, test = listener()
    (layer,) = attend_series(model, test[1:2])
    return plot_trajectories(layer._replace(unit="h"), rows=[0, 12, 24], channels=2)


CARDS = (classification, regression, forecasting, imputation, events)
FIGURES = (responses, resonance, explanation, along_time, ahead, spectra, probe, trajectories)


def main(names: list[str]) -> None:
    """Train the models, and draw a card for each task, the landing picture, and figures."""
    torch.set_num_threads(1)
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    drawn: dict[str, Draw] = {}
    for task in CARDS:
        if names and task.__name__ not in names:
            continue
        drawn[task.__name__] = task()
        figure, axis = plt.subplots(figsize=(3.6, 2.4), layout="constrained")
        drawn[task.__name__](axis)
        save(figure, task.__name__)
    if not names:
        figure, axes = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
        for axis, name in zip(axes, ("classification", "forecasting", "events"), strict=True):
            drawn[name](axis)
        save(figure, "landing")
    for draw in FIGURES:
        if not names or draw.__name__ in names:
            save(draw(), draw.__name__)


def save(figure: Any, name: str) -> None:
    """Write a picture beside this file."""
    figure.savefig(HERE / f"{name}.png", dpi=130)
    print(f"drawn: {name}.png", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
