"""The files of a run: history, logs and the checkpoint to continue from."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from osciformer._advice import Mention, advise
from osciformer._files import write_text
from osciformer._optional import need
from osciformer._text import check_choice
from osciformer.config import LoggerName, TrainConfig, differences, without_removed
from osciformer.train.tasks import Task

CHECKPOINT = "last.ckpt"
HISTORY = "history.csv"
CONFIG_KEY = "osciformer.config"
SETUP_KEY = "osciformer.setup"
_LOGGERS = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}


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


def check_logger(name: str, folder: str | Path | None) -> None:
    """Refuse a logger of `TrainConfig` whose package is not installed, before any work."""
    check_choice("logger", name, get_args(LoggerName))
    if name not in _LOGGERS:
        return
    if importlib.util.find_spec(name) is None:
        raise advise(
            ImportError,
            Mention("logger", name),
            f" needs the package {name}, which is not installed; run: pip install {name}",
        )
    if name == "tensorboard" and folder is None:
        raise ValueError("logger='tensorboard' writes into the run folder; give a run_dir")


def make_loggers(name: str, folder: Path | None) -> list[Any]:
    """Return the loggers of Lightning that `TrainConfig.logger` means here."""
    if name == "auto":
        has_board = folder is not None and importlib.util.find_spec("tensorboard") is not None
        name = "tensorboard" if has_board else "csv"
    check_logger(name, folder)
    if name == "csv":  # the history, which is written in any case
        return []
    make = getattr(need("pytorch_lightning.loggers", extra="train"), _LOGGERS[name])
    if name == "tensorboard":
        return [make(folder, name="tensorboard", version="")]
    # Their files lie where these tools have them, not in the run folder, which is ours alone.
    if name == "wandb":
        return [make(project="osciformer")]
    # Lightning's own default is a kind of store that mlflow has given up.
    place = need("mlflow", extra="train").get_tracking_uri()
    return [make(experiment_name="osciformer", tracking_uri=place)]
