"""The files of a run: history, logs and the checkpoint to continue from."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from osciformer._files import write_text
from osciformer._optional import need
from osciformer.config import TrainConfig, differences, without_removed
from osciformer.train.tasks import Task

CHECKPOINT = "last.ckpt"
HISTORY = "history.csv"
CONFIG_KEY = "osciformer.config"
SETUP_KEY = "osciformer.setup"


class CheckpointError(ValueError):
    """A file from which training cannot go on."""


def describe_setup(model: nn.Module, task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name and as JSON has it, what decides the result besides `TrainConfig`."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    if is_dataclass(task) and not isinstance(task, type):
        found |= asdict(task)
    return _as_json({**found, **settings})


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write one line per epoch, as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(history[0]))
    writer.writeheader()
    writer.writerows({**row, "epoch": int(row["epoch"])} for row in history)
    write_text(path, text.getvalue())


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
    """Refuse a checkpoint that cannot be read, or that belongs to a run with other settings."""
    try:
        # weights_only: nothing in the file is executed.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the reader stumble over
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(found, dict) or CONFIG_KEY not in found:
        raise CheckpointError(f"{path} is not a checkpoint of osciformer.train.fit")
    try:
        before = without_removed(found.get(SETUP_KEY, {}))
        conflicts = config.differences(found[CONFIG_KEY])
        if before and is_dataclass(getattr(model, "config", None)):
            # Settings of the model that an older run lacks had their defaults.
            usual = {x.name: x.default for x in fields(model.config) if x.default is not MISSING}  # type: ignore[arg-type]
            before = {**_as_json(usual), **before}
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be continued: {error}") from error
    conflicts += differences(before, setup)
    if conflicts:
        raise CheckpointError(
            f"{path} belongs to a run with other settings: {'; '.join(conflicts)}. Use the same "
            "settings to continue it, or another run folder to start afresh"
        )


def make_loggers(folder: Path | None) -> list[Any]:
    """Return a TensorBoard logger if that is installed."""
    if folder is None or importlib.util.find_spec("tensorboard") is None:
        return []
    loggers = need("pytorch_lightning.loggers", extra="train")
    return [loggers.TensorBoardLogger(folder, name="tensorboard", version="")]
