"""Pictures of attention on the real time axis of series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from osciformer.inspection.attention import ClassAttention, LayerAttention
from osciformer.plots.axes import COLOURS, SEEN, STYLES, legend_below, panels, plain, with_unit

_NUM_POINTS = 400


def plot_attention(layers: Sequence[LayerAttention], *, row: int = -1) -> Any:
    """Return a figure of the weights with which one row attends to those before it.

    Args:
        layers: Those of `osciformer.inspection.attend_series`; a panel each.
        row: Number of the row that attends; the last one if not given.
    """
    if not layers:
        raise ValueError("layers must not be empty; the model may have no oscillator attention")
    figure, axes = panels(len(layers), 1, sharey=False)
    for axis, layer in zip(axes[:, 0], layers, strict=True):
        heads = len(layer.weights)
        # Heads side by side about each time, so that none hides another.
        step = 0.004 * np.ptp(layer.times)
        for head, weights in enumerate(layer.weights[:, row]):
            shift = (head - (heads - 1) / 2) * step
            style = {"color": COLOURS[head % 8], "linewidth": 1.5, "alpha": 0.9}
            some = weights > 0
            x = layer.times[some] + shift
            axis.vlines(x, 0, weights[some], label=f"head {head + 1}", **style)
        axis.axvline(layer.times[row], color="0.6", linestyle=":", linewidth=1)
        axis.plot(layer.times, np.zeros_like(layer.times), "|", color=SEEN, markersize=5)
        axis.set_ylabel(f"weight, layer {layer.layer}")
        axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel(with_unit("time", layers[0].unit))
    legend_below(figure, axes[0, 0])
    return figure


def plot_trajectories(
    layer: LayerAttention,
    *,
    head: int = 0,
    role: Literal["key", "value"] = "key",
    rows: Sequence[int] | None = None,
    channels: int = 3,
) -> Any:
    """Return a figure of how keys or values swing between and after observations.

    Args:
        layer: One of `osciformer.inspection.attend_series`.
        head: Number of the head, from 0.
        role: `key` or `value`.
        rows: Rows whose oscillators are drawn; if not given, the four that the last row attends to
            most.
        channels: Number of channels, those that swing most, a panel each.
    """
    if rows is None:
        rows = np.sort(np.argsort(-layer.weights[head, -1], kind="stable")[:4]).tolist()
    grid = np.linspace(layer.times[0], layer.times[-1], _NUM_POINTS)
    found = layer.trajectories(role, grid)[:, rows, head]  # [T, R, C]
    size = np.nanmax(np.abs(found), axis=(0, 1))
    chosen = np.sort(np.argsort(-size, kind="stable")[:channels])
    omega = getattr(layer.internals, f"{role}_omega")[head].detach().numpy() / layer.scale
    figure, axes = panels(len(chosen), 1, [1.6] * len(chosen), sharey=False)
    for axis, channel in zip(axes[:, 0], chosen, strict=True):
        for number, row in enumerate(rows):
            style = {"color": COLOURS[number % 8], "linestyle": STYLES[number % 8]}
            label = f"row {row} at {layer.times[row]:.4g}"
            axis.plot(grid, found[:, number, channel], label=label, linewidth=1.1, **style)
        period = f"{2 * np.pi / omega[channel]:.3g}{f' {layer.unit}' if layer.unit else ''}"
        axis.set_title(f"channel {channel}, period {period}", fontsize=9, loc="left")
        axis.set_ylabel(role)
        axis.plot(layer.times, np.full(len(layer.times), axis.get_ylim()[0]), "|", color=SEEN)
    axes[-1, 0].set_xlabel(with_unit("time", layer.unit))
    legend_below(figure, axes[0, 0])
    return figure


def plot_class_attention(found: ClassAttention) -> Any:
    """Return a figure of where last rows look, a line per class and a panel per layer."""
    if not found.layers:
        raise ValueError("found has no layers; the model may have no oscillator attention")
    figure, axes = panels(len(found.layers), 1)
    for axis, layer, weights in zip(axes[:, 0], found.layers, found.weights, strict=True):
        for number, (name, curve) in enumerate(zip(found.classes, weights, strict=True)):
            style = {"color": COLOURS[number % 8], "linestyle": STYLES[number % 8]}
            axis.stairs(curve, found.edges, label=plain(name), linewidth=1.4, **style)
        axis.set_ylabel(f"mean weight, layer {layer}")
    axes[-1, 0].set_xlabel(with_unit("time before the last row", found.unit))
    legend_below(figure, axes[0, 0])
    return figure
