"""Training of any model for any task, on one device or many."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import distributed, nn

from osciformer._optional import need
from osciformer.train.config import Accelerator, TrainConfig
from osciformer.train.quiet import quiet_lightning, undisturbed_random_state
from osciformer.train.sources import BatchSource
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    from osciformer.train.journal import Journal


@dataclass(frozen=True)
class FitResult:
    """What training gave.

    Attributes:
        model: The trained model, on the CPU and in evaluation mode. It is the one that was given,
            except with FSDP, where it is a copy.
        history: One dict per epoch: `epoch`, `learning_rate`, `seconds`, `train_loss` and, with
            validation data, `val_loss` and the task's metrics.
        best_epoch: Epoch of the best validation metric; the last one without validation data.
        stopped_early: Whether training ended before the last epoch for want of improvement.
        seconds: How long it took.
    """

    model: nn.Module
    history: list[dict[str, float]]
    best_epoch: int
    stopped_early: bool
    seconds: float


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training.

    Attributes:
        result: What was reached: the model has the best weights so far, or the latest ones (their
            average, if that is asked for) if no epoch was finished.
        checkpoint: The checkpoint to continue from, or None.
    """

    def __init__(self, result: FitResult, checkpoint: Path | None) -> None:
        super().__init__(f"interrupted after {len(result.history)} epochs")
        self.result, self.checkpoint = result, checkpoint


def fit(
    model: nn.Module,
    task: Task,
    train: BatchSource,
    validation: BatchSource | None,
    config: TrainConfig,
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> FitResult:
    """Train a model and return it with its history.

    All randomness of an epoch comes from `config.seed`, the epoch and the rank. So a run that is
    killed and continued ends with the weights of one that was not, and the generators of the
    calling program stay as they are. Under `torchrun`, or with `config.devices` or
    `config.num_nodes` above 1, the processes share each batch and take the steps that a single one
    would.

    Args:
        model: Takes a `Batch`, returns what the task wants. Trained in place. If it has a method
            `learn`, that is called in training; it also returns a `SideLoss`, or None.
        task: Loss and metrics.
        train: Training batches.
        validation: Validation batches, for early stopping and the choice of the best epoch.
        config: Settings.
        run_dir: Folder for `history.csv`, `last.ckpt` (written after each epoch) and, if
            TensorBoard is installed, its log; nothing is written if not given.
        resume: Checkpoint, or run folder with one, to go on from.
        settings: What else decides the result, such as the scaling of the series, by name. A
            checkpoint of a run with other ones, or with another configuration of the model or the
            task, is refused.

    Returns:
        The model, with the weights of the best epoch, and the history.

    Raises:
        TrainingInterrupted: On Ctrl-C; it holds what was reached.
        CheckpointError: If there is nothing to resume from, or it belongs to other settings.
        FloatingPointError: If the loss is not finite.
    """
    pl = _import_lightning()
    from osciformer.train import averaging, reporting, run_folder
    from osciformer.train import journal as journals
    from osciformer.train import module as modules

    check_hardware(config.accelerator, config.strategy, config.devices)
    checkpoint = None if resume is None else run_folder.find_checkpoint(resume)
    setup = run_folder.describe_setup(model, task, settings or {})
    if checkpoint is not None:
        run_folder.check_checkpoint(checkpoint, config, setup, model)
    folder = None if run_dir is None else Path(run_dir)
    monitor = None if validation is None else task.resolve_monitor(config.monitor)
    journal = journals.Journal(monitor, config.patience, config.restore_best, config.keep_latest)
    callbacks: list[Any] = [journal]
    if config.weight_averaging:
        callbacks.insert(0, averaging.WeightAverage(config.weight_averaging))
    if config.verbose:
        callbacks.append(reporting.ProgressReport(journal, is_bar=config.verbose == 1))
    if folder is not None:
        callbacks.append(run_folder.RunFolder(folder, journal, config, setup))
    # FSDP leaves the model's parameters in pieces; the result then goes into a copy.
    result_model = copy.deepcopy(model) if config.strategy == "fsdp" else model
    started = time.perf_counter()
    with undisturbed_random_state(), quiet_lightning():
        trainer = pl.Trainer(
            max_epochs=config.max_epochs,
            accelerator=_accelerator(config),
            precision=config.precision,
            gradient_clip_val=config.gradient_clip,
            callbacks=callbacks,
            logger=run_folder.make_loggers(folder),
            default_root_dir=folder,
            log_every_n_steps=1,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            **_processes(config),
        )
        try:
            trainer.fit(
                modules.TrainingModule(model, task, config),
                datamodule=modules.TrainingData(train, validation),
                ckpt_path=None if checkpoint is None else str(checkpoint),
                weights_only=True,
            )
        except SystemExit:  # so Lightning ends after Ctrl-C
            if not isinstance(journal.interrupted, KeyboardInterrupt):
                raise
    result = _result(result_model, journal, config, time.perf_counter() - started)
    if journal.interrupted is not None:
        last = None if folder is None else folder / run_folder.CHECKPOINT
        raise TrainingInterrupted(result, last if last is not None and last.is_file() else None)
    return result


def under_torchrun() -> bool:
    """Return whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_processes(config: TrainConfig) -> int:
    """Return how many processes will train together."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return config.devices * config.num_nodes


def choose_device(accelerator: str) -> torch.device:
    """Return the device that `TrainConfig.accelerator` means here."""
    if accelerator not in get_args(Accelerator):
        allowed = ", ".join(map(repr, get_args(Accelerator)))
        raise ValueError(f"accelerator must be one of {allowed}; got {accelerator!r}")
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise RuntimeError(
            "accelerator='gpu' needs a CUDA device, and torch sees none here; use "
            "accelerator='auto' to compute on what there is"
        )
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def check_hardware(accelerator: str, strategy: str, devices: int) -> None:
    """Refuse settings that the devices of this machine cannot serve.

    Args:
        accelerator: As in `TrainConfig`.
        strategy: As in `TrainConfig`.
        devices: As in `TrainConfig`; under `torchrun` it is not looked at.
    """
    device = choose_device(accelerator)
    if strategy == "fsdp" and device.type != "cuda":
        raise ValueError("strategy='fsdp' needs GPUs; use strategy='ddp' or 'auto' on CPUs")
    count = torch.cuda.device_count()
    if device.type == "cuda" and not under_torchrun() and devices > count:
        raise ValueError(f"devices={devices} needs as many GPUs, and torch sees {count} here")


def _accelerator(config: TrainConfig) -> str:
    return "gpu" if choose_device(config.accelerator).type == "cuda" else "cpu"


def _processes(config: TrainConfig) -> dict[str, Any]:
    """Return what the Trainer needs to know of processes and machines."""
    devices, num_nodes = config.devices, config.num_nodes
    if under_torchrun():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    strategy: Any = config.strategy
    if strategy == "auto":
        strategy = "ddp" if devices * num_nodes > 1 else "auto"
    if strategy == "fsdp":
        strategies = need("pytorch_lightning.strategies", extra="train")
        strategy = strategies.FSDPStrategy(state_dict_type="full")
    return {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}


def _result(model: nn.Module, journal: Journal, config: TrainConfig, seconds: float) -> FitResult:
    # A finished run that is resumed has no further step, and so no end at which to settle these.
    weights = journal.weights or journal.best_weights
    if config.strategy == "fsdp" and distributed.is_initialized():
        box = [weights]
        distributed.broadcast_object_list(box)  # the first process alone has them
        weights = box[0]
    model.cpu()
    if weights:
        model.load_state_dict(weights)
    model.eval()
    best = journal.best_epoch if journal.best_epoch >= 0 else len(journal.history) - 1
    return FitResult(model, journal.history, best, journal.stopped_early, seconds)


def _import_lightning() -> Any:
    with quiet_lightning():
        return need("pytorch_lightning", extra="train")
