"""The files of a run: history, logs and the checkpoint to continue from."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from osciformer._optional import need
from osciformer.train.config import TrainConfig, differences
from osciformer.train.journal import Journal
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")

CHECKPOINT = "last.ckpt"
HISTORY = "history.csv"
CONFIG_KEY = "osciformer.config"
SETUP_KEY = "osciformer.setup"


class CheckpointError(ValueError):
    """A file from which training cannot go on."""


class RunFolder(pl.Callback):
    """Writes the history and a checkpoint after each epoch, each as a whole or not at all.

    Args:
        folder: The run's folder, made if it is not there.
        journal: Its history is written; it must come before this callback.
        config: Put into the checkpoint, so that a run is not continued with other settings.
        setup: What `describe_setup` says of model and task, put there for the same end.
    """

    def __init__(
        self, folder: Path, journal: Journal, config: TrainConfig, setup: Mapping[str, Any]
    ) -> None:
        self.folder, self.journal, self.config, self.described = folder, journal, config, setup
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write both files."""
        row = self.journal.history[-1]
        for logger in trainer.loggers:
            logger.log_metrics(row, step=int(row["epoch"]))
        if trainer.is_global_zero:
            write_history(self.folder / HISTORY, self.journal.history)
        target = self.folder / CHECKPOINT
        trainer.save_checkpoint(target.with_suffix(".part"))  # a collective call with FSDP
        if trainer.is_global_zero:
            os.replace(target.with_suffix(".part"), target)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the settings."""
        checkpoint[CONFIG_KEY] = self.config.to_dict()
        checkpoint[SETUP_KEY] = dict(self.described)


def describe_setup(model: nn.Module, task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name and as JSON has it, what decides the result besides `TrainConfig`.

    Args:
        model: Its `config`, if it has one, is a part; weights would not show another dropout.
        task: Its fields are a part.
        settings: Further settings.
    """
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = {}
    if hasattr(config, "to_dict"):
        found |= config.to_dict()
    if is_dataclass(task) and not isinstance(task, type):
        found |= asdict(task)
    plain: dict[str, Any] = json.loads(json.dumps({**found, **settings}, default=str))
    return plain


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write one line per epoch, as CSV."""
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows({**row, "epoch": int(row["epoch"])} for row in history)
    os.replace(part, path)


def find_checkpoint(resume: str | Path) -> Path:
    """Return the checkpoint that a run folder or a path names."""
    path = Path(resume)
    path = path / CHECKPOINT if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint to continue from: {path}")
    return path


def check_checkpoint(
    path: Path, config: TrainConfig, setup: Mapping[str, Any], model: nn.Module
) -> None:
    """Refuse a checkpoint that cannot be read, or that belongs to a run with other settings.

    Args:
        path: The checkpoint.
        config: Settings of training.
        setup: What `describe_setup` says.
        model: The model that is to go on.
    """
    try:
        # weights_only: nothing in the file is executed.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the reader stumble over
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(found, dict) or CONFIG_KEY not in found:
        raise CheckpointError(f"{path} is not a checkpoint of osciformer.train.fit")
    conflicts = config.conflicts(found[CONFIG_KEY])
    conflicts += differences(found.get(SETUP_KEY, {}), setup)
    conflicts += _newer_settings(found.get(SETUP_KEY, {}), model)
    if conflicts:
        raise CheckpointError(
            f"{path} belongs to a run with other settings: {'; '.join(conflicts)}. Use the same "
            "settings to continue it, or another run folder to start afresh"
        )


def _newer_settings(before: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return, in words, which settings of the model an older run lacks and did not have like this.

    What it lacks, as an older version did not know it, had the default of the configuration.
    """
    config: Any = getattr(model, "config", None)
    if not before or not is_dataclass(config) or not hasattr(config, "to_dict"):
        return []
    usual = {item.name: item.default for item in fields(config) if item.default is not MISSING}
    lacked = {name: value for name, value in usual.items() if name not in before}
    as_json = json.loads(json.dumps([lacked, config.to_dict()], default=str))
    return differences(*as_json)


def make_loggers(folder: Path | None) -> list[Any]:
    """Return a TensorBoard logger where that is installed."""
    if folder is None or importlib.util.find_spec("tensorboard") is None:
        return []
    loggers = need("pytorch_lightning.loggers", extra="train")
    return [loggers.TensorBoardLogger(folder, name="tensorboard", version="")]
