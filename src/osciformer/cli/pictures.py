"""Pictures of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer._optional import need
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.output import replacing
from osciformer.cli.scoring import calibration_bins

if TYPE_CHECKING:
    from osciformer._types import Bool, Float

ENDINGS = (".png", ".pdf", ".svg")


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is computed for it."""
    if path.suffix.lower() not in ENDINGS:
        raise CommandError(
            f"{path} must end in {', '.join(ENDINGS)}, which says the format", MISUSED
        )
    need("matplotlib.figure", extra="plot")


def new_figure(num_panels: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure with panels side by side."""
    figure = need("matplotlib.figure", extra="plot").Figure(
        figsize=(4.6 * num_panels, 4.4), layout="constrained"
    )
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure, as a whole or not at all; the ending says the format."""
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def draw_classes(
    is_positive: Bool[np.ndarray, "n"], scores: Mapping[str, Float[np.ndarray, "n"]], path: Path
) -> None:
    """Draw ROC, precision and recall, and calibration of several models of one class.

    Args:
        is_positive: Whether each series is of the class.
        scores: Its chance, by the name of the model.
        path: The file.
    """
    metrics = need("sklearn.metrics", extra="train")
    figure, (roc, precision, calibration) = new_figure(3)
    for name, score in scores.items():
        false, true, _ = metrics.roc_curve(is_positive, score)
        roc.plot(false, true, label=f"{name}: {metrics.roc_auc_score(is_positive, score):.3f}")
        right, found, _ = metrics.precision_recall_curve(is_positive, score)
        area = metrics.average_precision_score(is_positive, score)
        precision.step(found, right, where="post", label=f"{name}: {area:.3f}")
        _, said, frequency, _ = calibration_bins(score, is_positive)
        calibration.plot(said, frequency, "o-", markersize=4, label=name)
    roc.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    calibration.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    precision.axhline(float(np.mean(is_positive)), color="0.7", linestyle=":")
    for axis, title, x, y in (
        (roc, "ROC, with areas", "false positive rate", "true positive rate"),
        (precision, "Precision and recall, with areas", "recall", "precision"),
        (calibration, "Calibration", "predicted chance", "frequency"),
    ):
        axis.set(title=title, xlabel=x, ylabel=y, xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
        axis.legend(loc="lower right" if axis is roc else "upper right")
    calibration.legend(loc="upper left")
    save_figure(figure, path)


def draw_values(
    found: Float[np.ndarray, "n K"], truth: Float[np.ndarray, "n K"], path: Path
) -> None:
    """Draw predictions against true values, a panel per target."""
    figure, axes = new_figure(found.shape[1])
    for column, axis in enumerate(axes):
        axis.plot(truth[:, column], found[:, column], ".", alpha=0.5)
        low, high = float(truth[:, column].min()), float(truth[:, column].max())
        axis.plot([low, high], [low, high], color="0.7", linestyle=":")
        axis.set(xlabel="true value", ylabel="prediction")
    save_figure(figure, path)


def draw_quantiles(levels: Sequence[float], frequency: Float[np.ndarray, "L"], path: Path) -> None:
    """Draw how often values lie below each predicted quantile."""
    figure, (axis,) = new_figure(1)
    axis.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    axis.plot(levels, frequency, "o-")
    axis.set(title="Calibration of quantiles", xlabel="level", ylabel="part of values below")
    save_figure(figure, path)
