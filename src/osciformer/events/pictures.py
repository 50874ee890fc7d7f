"""Plots of processes as matplotlib figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from osciformer._optional import need
from osciformer.events.process import EventProcess
from osciformer.events.scores import Calibration
from osciformer.events.sequences import EventSequences

# More types than this are drawn as their sum.
_LARGEST_NUM_LINES = 10


def plot_calibration(calibration: Calibration, *, level: float = 0.95) -> Any:
    """Return a figure of found against expected quantiles, with a band of the given level."""
    figure, axis = _figure(4.6)
    expected, found, lower, upper = calibration.quantiles(level)
    top = 1.05 * max(expected[-1], found[-1])
    label = f"{level:.0%} band of the right process"
    axis.fill_between(expected, lower, np.minimum(upper, top), color="0.85", label=label)
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
    """Return a figure of the intensities along the sequence at `position`, with its events below.

    It must have a window or two events; `num_points` come on top of those at the events.
    """
    sequence = sequences[position]
    known = [t for t in (sequence.start, *sequence.times, sequence.end) if t is not None]
    begin, end = min(known, default=0.0), max(known, default=0.0)
    if not end > begin:
        raise ValueError(f"sequence {sequence.id!s} has no length that could be drawn")
    after = np.nextafter(sequence.times, np.inf)
    grid = np.linspace(begin, end, num_points)
    grid = np.unique(np.concatenate([grid, sequence.times, after[after <= end]]))
    batch = sequences.batch([position]).to(process.device)
    query = torch.from_numpy(grid)[None].to(process.device)
    rates = process.intensity(batch, query)[0].cpu().numpy()
    figure, axis = _figure(8.0)
    names, types = sequences.type_names, sequence.types
    if sequences.num_types > _LARGEST_NUM_LINES:
        rates, names, types = rates.sum(axis=1, keepdims=True), ("all types",), 0 * types
    axis.plot(grid, rates, linewidth=1, label=names)
    below = {"transform": axis.get_xaxis_transform(), "clip_on": False}
    for number in range(len(names)):
        times = sequence.times[types == number]
        height = np.full(len(times), -0.03 - 0.03 * number)
        axis.plot(times, height, "|", color=f"C{number}", **below)
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
    make = need("matplotlib.figure", extra="plot").Figure
    figure = make(figsize=(width, 4.4), layout="constrained")
    return figure, figure.subplots()
