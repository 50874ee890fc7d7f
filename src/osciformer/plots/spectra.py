"""Pictures of learned oscillators: where they lie, and what they answer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from osciformer.inspection.spectra import NEAR_CRITICAL, LayerSpectrum, ProbeResponse
from osciformer.plots.axes import COLOURS, STYLES, legend_below, panels, plain, with_unit

_MARKERS = "os^Dv<>P"
_NUM_PHASES = 73


def plot_spectra(spectra: Sequence[LayerSpectrum]) -> Any:
    """Return a figure of frequencies and damping ratios, a panel per layer and role.

    Above each panel stand the periods, in the time unit of the data. The grey band is near critical
    damping; below it oscillators swing, above it they creep back.

    Args:
        spectra: Those of `osciformer.inspection.find_spectra`, or some of them.
    """
    if not spectra:
        raise ValueError("spectra must not be empty; the model may have no oscillators of its own")
    columns = min(2, len(spectra))
    rows = -(-len(spectra) // columns)
    figure, axes = panels(rows, columns, [2.6] * rows, sharex=True, sharey=True)
    ratios = np.concatenate([item.zeta.ravel() for item in spectra])
    top = max(1.25, 1.1 * float(ratios.max()))
    for axis, item in zip(axes.flat, spectra, strict=False):
        near = 1 - NEAR_CRITICAL, 1 + NEAR_CRITICAL
        axis.axhspan(*near, color="0.85", linewidth=0, label="near critical")
        for head, (omega, zeta) in enumerate(zip(item.omega, item.zeta, strict=True)):
            style = {"color": COLOURS[head % 8], "marker": _MARKERS[head % 8], "s": 18}
            axis.scatter(omega, zeta, label=f"head {head + 1}", alpha=0.8, linewidth=0, **style)
        axis.set(xscale="log", ylim=(-0.04, top), title=item.name)
        above = axis.secondary_xaxis("top", functions=(_turn, _turn))
        above.set_xlabel(with_unit("period", item.unit), fontsize=8)
        above.tick_params(labelsize=7)
    for axis in axes.flat[len(spectra) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(_omega(spectra[0].unit))
    for axis in axes[:, 0]:
        axis.set_ylabel("damping ratio ζ")
    legend_below(figure, axes[0, 0])
    return figure


def _omega(unit: str | None) -> str:
    return f"ω, radians per {plain(unit) if unit else 'unit of time'}"


def _turn(x: Any) -> Any:
    """Return a period for a frequency, or a frequency for a period."""
    with np.errstate(divide="ignore"):
        return 2.0 * np.pi / np.asarray(x, dtype=float)


def plot_probe(probe: ProbeResponse) -> Any:
    """Return a figure of a key's answer to cosines, beside the transfer function H.

    On the left the logit by frequency and phase, with the best phase as a line; on the right its
    largest value and the size of H, in parts of their peaks, and below the best phase and arg H.
    """
    figure, axes = panels(2, 2, [1.9, 1.9], sharey=False)
    phase = np.linspace(-np.pi, np.pi, _NUM_PHASES)
    for axis in axes[:, 0]:
        axis.remove()
    whole = figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    found = probe.attention(phase)
    top = float(np.abs(found).max()) or 1.0
    w = probe.drive_omega
    mesh = whole.pcolormesh(w, phase, found.T, cmap="PuOr", vmin=-top, vmax=top, rasterized=True)
    whole.plot(w, _broken(probe.best_phase), color="black", linewidth=1, label="best phase")
    label = "phase of the cosine, radians"
    whole.set(xscale="log", ylabel=label, title="attention logit α(ω, φ)")
    whole.legend(loc="lower left", fontsize=7)
    figure.colorbar(mesh, ax=whole, shrink=0.7)
    size, angle = axes[:, 1]
    for axis, curves in (
        (size, {"largest logit": probe.best, "|H|": np.abs(probe.gain)}),
        (angle, {"best phase": probe.best_phase, "arg H": np.angle(probe.gain)}),
    ):
        for number, (name, curve) in enumerate(curves.items()):
            style = {"color": COLOURS[number], "linestyle": STYLES[number]}
            values = curve / curve.max() if axis is size else _broken(curve)
            axis.plot(w, values, label=name, **style)
        axis.axvline(probe.omega, color="0.7", linestyle=":", linewidth=1)
        axis.set(xscale="log")
        axis.legend(fontsize=7, frameon=False)
    title = f"ω {probe.omega:.3g}, ζ {probe.zeta:.3g}, gap {probe.gap:.3g}"
    size.set(ylabel="part of the peak", title=title)
    angle.set(ylabel="radians", ylim=(-3.4, 3.4))
    for axis in (whole, angle):
        axis.set_xlabel(_omega(probe.unit))
    return figure


def _broken(angle: np.ndarray) -> np.ndarray:
    """Return angles with NaN where they jump by a turn, so that no line crosses the picture."""
    jumps = np.append(np.abs(np.diff(angle)) > np.pi, False)
    return np.where(jumps, np.nan, angle)
