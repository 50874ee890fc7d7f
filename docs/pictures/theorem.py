"""Draw docs/pictures/theorem.png: errors against the number of modes, with what is proved.

    python docs/pictures/theorem.py

Half a minute on one core.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor

mpl.use("Agg")
from matplotlib import pyplot as plt

from osciformer.theory import (
    OscillatorBank,
    approximate_attention,
    fejer_bound,
    fejer_states,
    least_squares_states,
)
from osciformer.theory import Path as Trajectory

LENGTH = 2.0
MODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TIMES = torch.tensor([0.0, 0.3, 0.8, 1.3, 2.0], dtype=torch.float64)
FEJER, FITTED, PROVED = "#ea580c", "#2563eb", "#374151"


def smooth(t: Tensor) -> Tensor:
    """Return a key without corners."""
    return (t.exp() * torch.sin(5 * t))[:, None] / 5


def corner(t: Tensor) -> Tensor:
    """Return a key with a corner."""
    return (t[:, None] - 0.7).abs()


def query(t: Tensor) -> Tensor:
    """Return a query of two channels."""
    return torch.stack((torch.cos(2 * t), 1 - t), dim=-1)


def key(index: int) -> Trajectory:
    """Return the key of an observation."""

    def path(t: Tensor) -> Tensor:
        return torch.stack((torch.sin(4 * t + index), torch.exp(-t) * torch.cos(3 * t)), dim=-1)

    return path


def draw_paths(axis: plt.Axes, path: Trajectory, title: str) -> None:
    """Draw the suprema of the errors of one key."""
    grid = torch.linspace(0.0, LENGTH, 4001, dtype=torch.float64)
    values = path(grid)
    lipschitz = float((values.diff(dim=0).abs() / grid[1]).max())
    errors = []
    for num_modes in MODES:
        bank = OscillatorBank.on_grid(num_modes, LENGTH)
        found = (
            fejer_states(path, bank, 0.0, start=0.0, end=LENGTH),
            least_squares_states(path, bank, 0.0, end=LENGTH),
        )
        errors.append([float((values - bank.path(z, grid)).abs().max()) for z in found])
    by_method = np.array(errors).T
    bound = [fejer_bound(lipschitz, LENGTH, m) for m in MODES]
    axis.loglog(MODES, bound, "--", color=PROVED, label="bound for Fejér means")
    axis.loglog(MODES, by_method[0], "o-", ms=3, color=FEJER, label="Fejér means")
    axis.loglog(MODES, by_method[1], "o-", ms=3, color=FITTED, label="least squares")
    axis.set(title=title, xlabel="modes M", ylabel="largest error of the key")


def draw_attention(axis: plt.Axes) -> None:
    """Draw the errors of an attention matrix, as measured and as proved."""
    keys = [key(i) for i in range(len(TIMES))]
    for method, tolerances, colour, name in (
        ("fejer", (1.0, 0.5, 0.25, 0.12, 0.06), FEJER, "Fejér means"),
        ("least_squares", 10.0 ** np.arange(0, -10, -1.0), FITTED, "least squares"),
    ):
        found = [
            approximate_attention(query, keys, TIMES, float(tol), method=method).certificate
            for tol in tolerances
        ]
        modes = [item.num_modes for item in found]
        proved = [item.weights.proved for item in found]
        axis.loglog(modes, proved, "--", color=colour, label=f"{name}, proved")
        measured = [item.weights.measured for item in found]
        axis.loglog(modes, measured, "o-", ms=3, color=colour, label=f"{name}, measured")
    axis.set(title="attention matrix", xlabel="modes M", ylabel="largest error of a row")


def main() -> None:
    """Draw the picture beside this file."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    draw_paths(axes[0], smooth, "a smooth key")
    draw_paths(axes[1], corner, "a key with a corner")
    draw_attention(axes[2])
    for axis in axes:
        # Of a smooth key, "best" would put it onto a line.
        place = {"loc": "upper right", "bbox_to_anchor": (1.05, 0.85)} if axis is axes[0] else {}
        axis.legend(frameon=False, fontsize=8, **place)
        axis.spines[["right", "top"]].set_visible(False)
        axis.title.set_fontsize(10)
    figure.savefig(Path(__file__).with_name("theorem.png"), dpi=110)


if __name__ == "__main__":
    main()
