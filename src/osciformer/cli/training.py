"""Training into a run folder, for `fit` and for `demo`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from osciformer.cli import run_folder
from osciformer.cli.config import did_you_mean
from osciformer.cli.errors import INTERRUPTED, MISUSED, CommandError
from osciformer.cli.output import print_table, write_json
from osciformer.cli.run_folder import RunFolder

if TYPE_CHECKING:
    from osciformer.estimators.trained import TrainedEstimator


def estimator_class(task: str) -> type[TrainedEstimator]:
    """Return the estimator of a task."""
    from osciformer import estimators

    return {
        "classification": estimators.OsciFormerClassifier,
        "regression": estimators.OsciFormerRegressor,
        "forecasting": estimators.OsciFormerForecaster,
        "imputation": estimators.OsciFormerImputer,
        "events": estimators.OsciFormerEventPredictor,
    }[task]


def task_of(estimator: Any) -> str:
    """Return the task of a loaded estimator."""
    from osciformer.cli.settings import TASKS

    return next(task for task in TASKS if isinstance(estimator, estimator_class(task)))


def check_device(given: Mapping[str, Any]) -> None:
    """Refuse devices that are not there, before a table is read."""
    from osciformer.train.fitting import check_hardware

    check_hardware(
        given.get("accelerator", "auto"), given.get("strategy", "auto"), given.get("devices", 1)
    )


def verbosity(progress: str) -> int:
    """Return what the estimators call the kind of progress report."""
    levels = {"none": 0, "bar": 1, "lines": 2, "auto": 1 if sys.stderr.isatty() else 2}
    if progress not in levels:
        raise CommandError(
            f"there is no progress {progress!r}; {did_you_mean(progress, levels)}", MISUSED
        )
    return levels[progress]


def train(
    estimator: Any,
    folder: RunFolder,
    data: Any,
    y: Any = None,
    *,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    validation_data: Any = None,
) -> dict[str, Any]:
    """Fit the estimator, write the run folder, and return the metrics.

    Ctrl-C writes what was reached, says how to go on, and ends the program.

    Args:
        estimator: Not fitted; its `run_dir` is the folder.
        folder: The run folder.
        data: The series.
        y: Their labels, if the data have none of their own.
        settings: Written as the configuration.
        facts: What is known of the data, written too.
        validation_data: Series for early stopping.
    """
    from osciformer.train import TrainingInterrupted

    try:
        folder.open(settings, facts)
        estimator.fit(data, y, validation_data=validation_data)
        metrics = _write_result(estimator, folder.path, is_finished=True)
    except TrainingInterrupted as interruption:
        _keep_interrupted(estimator, folder, interruption.checkpoint)
        raise typer.Exit(INTERRUPTED) from interruption
    except BaseException:
        folder.abandon()
        raise
    folder.close()
    return metrics


def _keep_interrupted(estimator: Any, folder: RunFolder, checkpoint: Path | None) -> None:
    if not run_folder.is_first_process():
        return
    if checkpoint is None:
        folder.abandon()
        typer.echo(
            "interrupted before the first epoch was finished, so that nothing is kept; start again "
            "with the same command",
            err=True,
        )
        return
    _write_result(estimator, folder.path, is_finished=False)
    folder.close()
    alone = ", the network alone," if getattr(estimator, "blend_with", None) else ""
    typer.echo(
        f"interrupted after epoch {estimator.n_iter_}; the checkpoint "
        f"and the best model so far{alone} are in {folder.path}. Go on with: "
        f"osciformer fit --resume -o {folder.path}",
        err=True,
    )


def _write_result(estimator: Any, path: Path, *, is_finished: bool) -> dict[str, Any]:
    history = estimator.history_
    best = dict(history[estimator.best_epoch_])
    metrics = {
        "is_finished": is_finished,
        "num_epochs": len(history),
        "best_epoch": estimator.best_epoch_,
        "seconds": sum(row["seconds"] for row in history),
        "train_loss": best["train_loss"],
        "validation": {
            name.removeprefix("val_"): value
            for name, value in best.items()
            if name.startswith("val_")
        },
    }
    if hasattr(estimator, "blend_weights_"):
        metrics["blend_weights"] = estimator.blend_weights_
    if run_folder.is_first_process():
        estimator.save(path / run_folder.MODEL)
        write_json(path / run_folder.METRICS, metrics)
    return metrics


def print_validation(metrics: Mapping[str, Any], path: Path) -> None:
    """Print the validation scores of the epoch that was kept, and where the run is."""
    scores = metrics["validation"] or {"train_loss": metrics["train_loss"]}
    print_table(
        f"Validation, epoch {metrics['best_epoch'] + 1} of {metrics['num_epochs']}",
        ("metric", "value"),
        [(name, f"{value:.4f}") for name, value in scores.items()],
    )
    weights = metrics.get("blend_weights", {})
    if len(weights) > 1:
        listed = ", ".join(f"{name} {weight:.3f}" for name, weight in weights.items())
        typer.echo(f"blended since, by the weights {listed}; the scores are those of the network")
    typer.echo(f"run folder: {path} ({metrics['seconds']:.0f} s of training)")
