"""Pictures of scores, and of runs on events."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer._files import replacing
from osciformer._optional import need
from osciformer.cli.tables import check_ending

if TYPE_CHECKING:
    from osciformer.events import Calibration, EventSequences

OF_RUN = ("training.png", "calibration.png", "intensity.png")  # what `draw_run` draws


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is computed for it."""
    check_ending(path, (".png", ".pdf", ".svg"))
    need("matplotlib.figure", extra="plot")


def _new_figure(num_panels: int) -> tuple[Any, Sequence[Any]]:
    make = need("matplotlib.figure", extra="plot").Figure
    figure = make(figsize=(4.6 * num_panels, 4.4), layout="constrained")
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the ending of the path names."""
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def draw_classes(is_positive: np.ndarray, scores: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw ROC, precision and recall, and calibration of several models of one class."""
    metrics = need("sklearn.metrics", extra="train")
    calibration = need("sklearn.calibration", extra="train").CalibrationDisplay
    figure, axes = _new_figure(3)
    for number, (name, score) in enumerate(scores.items()):
        chance = {"plot_chance_level": number == len(scores) - 1}
        panels: dict[str, tuple[Any, dict[str, Any]]] = {
            "ROC, with areas": (metrics.RocCurveDisplay, chance),
            "Precision and recall, with areas": (metrics.PrecisionRecallDisplay, chance),
            "Calibration": (calibration, {"n_bins": 10, "strategy": "quantile"}),
        }
        for axis, (title, (display, options)) in zip(axes, panels.items(), strict=True):
            display.from_predictions(is_positive, score, name=name, ax=axis, **options)
            axis.set_title(title)
    save(figure, path)


def draw_values(found: np.ndarray, truth: np.ndarray, path: Path) -> None:
    """Draw predictions [n, K] against true values, a panel per target."""
    display = need("sklearn.metrics", extra="train").PredictionErrorDisplay
    figure, axes = _new_figure(found.shape[1])
    options = {"kind": "actual_vs_predicted", "subsample": None}
    for values, predicted, axis in zip(truth.T, found.T, axes, strict=True):
        display.from_predictions(values, predicted, ax=axis, **options)
    save(figure, path)


def draw_quantiles(levels: Sequence[float], frequency: np.ndarray, path: Path) -> None:
    """Draw how often values lie below each predicted quantile."""
    figure, (axis,) = _new_figure(1)
    axis.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    axis.plot(levels, frequency, "o-")
    axis.set(title="Calibration of quantiles", xlabel="level", ylabel="part of values below")
    save(figure, path)


def draw_calibration(calibration: Calibration, path: Path) -> None:
    """Draw rescaled gaps between events against Exp(1)."""
    from osciformer.events import plot_calibration

    save(plot_calibration(calibration), path)


def draw_run(estimator: Any, events: EventSequences, folder: Path) -> None:
    """Draw training, calibration and the rates along a sequence; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    figure, (axis,) = _new_figure(1)
    history = estimator.history_
    epochs = [row["epoch"] + 1 for row in history]
    axis.plot(epochs, [-row["train_loss"] for row in history], label="training")
    if all("val_log_likelihood" in row for row in history):
        axis.plot(epochs, [row["val_log_likelihood"] for row in history], label="validation")
    axis.axvline(estimator.best_epoch_ + 1, color="0.7", linestyle=":", label="kept")
    axis.set(title="Training", xlabel="epoch", ylabel="log-likelihood, nats per event")
    axis.legend(loc="lower right")
    training, calibrated, rates = (folder / name for name in OF_RUN)
    save(figure, training)
    calibration = estimator.calibration(events)
    if len(calibration.increments):
        draw_calibration(calibration, calibrated)
    shown = events.first(60)  # more of one sequence cannot be told apart in a picture
    spans = np.array([np.ptp(one.times) if len(one) else 0.0 for one in shown])
    if (spans > 0).any():
        from osciformer.events import plot_intensity

        # A typical one: of middle length among those with events at different times.
        lengths = np.where(spans > 0, shown.lengths, -1)
        order = np.argsort(lengths, kind="stable")[(spans <= 0).sum() :]
        figure = plot_intensity(estimator.model_, shown, int(order[len(order) // 2]))
        save(figure, rates)
