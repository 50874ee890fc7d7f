"""Pictures of processes: data in, a figure of matplotlib out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from osciformer._optional import need
from osciformer.events.calibration import Calibration
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

# More types than that are drawn as their sum.
_LARGEST_NUM_LINES = 10


def plot_calibration(calibration: Calibration, *, level: float = 0.95) -> Any:
    """Return a figure of found against expected quantiles of rescaled gaps, with a band.

    Args:
        calibration: Of `calibrate`.
        level: Of the band.
    """
    figure, axis = _figure(4.6)
    expected, found, lower, upper = calibration.quantiles(level)
    top = 1.05 * max(expected[-1], found[-1])
    axis.fill_between(
        expected,
        lower,
        np.minimum(upper, top),
        color="0.85",
        label=f"{level:.0%} band of the right process",
    )
    axis.plot([0, top], [0, top], color="0.5", linestyle=":")
    axis.plot(expected, found, ".", markersize=3, label="events")
    axis.set(
        xlabel="quantile of Exp(1)",
        ylabel="integral of the intensity between events",
        title=f"KS distance {calibration.statistic:.3f}, p = {calibration.p_value:.3g}",
        xlim=(0, top),
        ylim=(0, top),
    )
    axis.legend(loc="upper left")
    return figure


@torch.no_grad()
def plot_intensity(
    process: EventProcess,
    sequences: EventSequences,
    position: int = 0,
    *,
    num_points: int = 1000,
    logarithmic: bool = False,
) -> Any:
    """Return a figure of the intensities along one sequence, with its events below.

    Args:
        process: The process.
        sequences: The sequences.
        position: Which of them to draw; it must have an event, or a window.
        num_points: Points of the curves, besides those at the events.
        logarithmic: Whether intensities are on a logarithmic axis.
    """
    sequence = sequences[position]
    known = [t for t in (sequence.start, *sequence.times, sequence.end) if t is not None]
    if not known or not max(known) > min(known):
        raise ValueError(f"sequence {sequence.id!s} has no length that could be drawn")
    begin, end = min(known), max(known)
    after = np.nextafter(sequence.times, np.inf)
    grid = np.linspace(begin, end, num_points)
    grid = np.unique(np.concatenate([grid, sequence.times, after[after <= end]]))
    batch = sequences.batch([position]).to(process.device)
    query = torch.from_numpy(grid)[None].to(process.device)
    rates = process.intensity(batch, query)[0].cpu().numpy()
    figure, axis = _figure(8.0)
    names: tuple[str, ...] = sequences.type_names
    if sequences.num_types > _LARGEST_NUM_LINES:
        rates, names = rates.sum(axis=1, keepdims=True), ("all types",)
    for rate, name in zip(rates.T, names, strict=True):
        axis.plot(grid, rate, linewidth=1, label=name)
    several = len(names) == sequences.num_types
    for number in range(len(names)):
        times = sequence.times[sequence.types == number] if several else sequence.times
        axis.plot(
            times,
            np.full(len(times), -0.03 - 0.03 * number),
            "|",
            color=f"C{number}",
            transform=axis.get_xaxis_transform(),
            clip_on=False,
        )
    axis.set(
        xlabel=f"time, {sequences.time_unit}",
        ylabel="events per unit of time",
        title=f"sequence {sequence.id!s}",
        yscale="log" if logarithmic else "linear",
    )
    axis.tick_params(axis="x", pad=4 + 8 * len(names))
    axis.legend(loc="upper right")
    return figure


def _figure(width: float) -> tuple[Any, Any]:
    figure = need("matplotlib.figure", extra="plot").Figure(
        figsize=(width, 4.4), layout="constrained"
    )
    return figure, figure.subplots()
