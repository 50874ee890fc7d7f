"""Pictures of a run on events."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer.cli.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from osciformer.events import Calibration, EventSequences

TRAINING, CALIBRATION, INTENSITY = "training.png", "calibration.png", "intensity.png"
# More events of one sequence cannot be told apart in a picture.
_SHOWN_EVENTS = 60


def draw_run(estimator: Any, events: EventSequences, folder: Path) -> None:
    """Draw training, calibration and the rates along a sequence; nothing without matplotlib.

    Args:
        estimator: Fitted.
        events: Sequences that were not trained on, if there are such.
        folder: Where to write the pictures.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    save_figure(training_figure(estimator.history_, estimator.best_epoch_), folder / TRAINING)
    calibration = estimator.calibration(events)
    if len(calibration.increments):
        save_figure(calibration_figure(calibration), folder / CALIBRATION)
    shown = events.first(_SHOWN_EVENTS)
    spans = np.array([np.ptp(one.times) if len(one) else 0.0 for one in shown])
    if (spans > 0).any():
        from osciformer.events import plot_intensity

        # A typical one: of middle length among those with events at different times.
        lengths = np.where(spans > 0, shown.lengths, -1)
        order = np.argsort(lengths, kind="stable")[(spans <= 0).sum() :]
        figure = plot_intensity(estimator.model_, shown, int(order[len(order) // 2]))
        save_figure(figure, folder / INTENSITY)


def calibration_figure(calibration: Calibration) -> Any:
    """Return a figure of rescaled gaps against Exp(1)."""
    from osciformer.events import plot_calibration

    return plot_calibration(calibration)


def training_figure(history: Sequence[Mapping[str, float]], best_epoch: int) -> Any:
    """Return a figure of the log-likelihood over the epochs.

    Args:
        history: One dict per epoch.
        best_epoch: The epoch whose weights were kept.
    """
    figure, (axis,) = new_figure(1)
    epochs = [row["epoch"] + 1 for row in history]
    axis.plot(epochs, [-row["train_loss"] for row in history], label="training")
    if all("val_log_likelihood" in row for row in history):
        axis.plot(epochs, [row["val_log_likelihood"] for row in history], label="validation")
    axis.axvline(best_epoch + 1, color="0.7", linestyle=":", label="kept")
    axis.set(title="Training", xlabel="epoch", ylabel="log-likelihood, nats per event")
    axis.legend(loc="lower right")
    return figure
