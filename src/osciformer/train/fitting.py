"""Training of any model for any task, on one device or many, and predictions."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import distributed, nn

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._processes import lost_peers, name_lost, terminable
from osciformer._text import check_choice
from osciformer._types import Tensor
from osciformer.config import Accelerator, Precision, TrainConfig
from osciformer.data.batches import Batch
from osciformer.train import run_folder
from osciformer.train.sources import BatchSource
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    from osciformer.train.callbacks import Journal

_RANDOM_STATE = threading.RLock()
_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")


@dataclass(frozen=True)
class FitResult:
    """What training gave."""

    model: nn.Module  #: The given model (with FSDP a copy), on the CPU and in evaluation mode.
    #: Per epoch: `epoch`, `learning_rate`, `seconds`, `train_loss`, `val_loss` and metrics.
    history: list[dict[str, float]]
    best_epoch: int  #: Epoch of the best validation metric; the last one without validation data.
    stopped_early: bool  #: Whether training ended before the last epoch for want of improvement.
    seconds: float  #: How long it took.


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during training; its `__cause__` tells which.

    Attributes:
        result: What was reached, with the best weights so far, or the latest in the first epoch.
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
    """Train a model and return it, with the weights of the best epoch, and its history.

    All randomness of an epoch comes from `config.seed`, the epoch and the rank, so a run that is
    killed and continued ends with the same weights. Several processes share each batch.

    Args:
        model: Takes a `Batch`, returns what the task wants. Trained in place.
        task: Loss and metrics.
        train: Training batches.
        validation: Validation batches, for early stopping and the choice of the best epoch.
        config: Settings.
        run_dir: Folder for `history.csv`, `last.ckpt` and the log of TensorBoard, or None.
        resume: Checkpoint, or run folder with one, to go on from.
        settings: What else decides the result, by name; checkpoints with other ones are refused.

    Raises:
        TrainingInterrupted: On Ctrl-C or SIGTERM; it holds what was reached.
        CheckpointError: If there is nothing to resume from, or it belongs to other settings.
        FloatingPointError: If the loss is not finite.
    """
    with _quiet_lightning():
        pl = need("pytorch_lightning", extra="train")
    from osciformer.train import callbacks, module  # they need Lightning

    check_hardware(config.accelerator, config.strategy, config.devices)
    checkpoint = None if resume is None else run_folder.find_checkpoint(resume)
    setup = run_folder.describe_setup(model, task, settings or {})
    if checkpoint is not None:
        run_folder.check_checkpoint(checkpoint, config, setup, model)
    folder = None if run_dir is None else Path(run_dir)
    monitor = None if validation is None else task.resolve_monitor(config.monitor)
    journal = callbacks.Journal(monitor, config.patience, config.restore_best)
    active: list[Any] = [journal]
    if config.weight_averaging:
        active.insert(0, callbacks.WeightAverage(config.weight_averaging))
    if config.verbose:
        active.append(callbacks.ProgressReport(journal, is_bar=config.verbose == 1))
    if folder is not None:
        active.append(callbacks.RunWriter(folder, journal, config, setup))
    # FSDP leaves the model's parameters in pieces; the result then goes into a copy.
    result_model = copy.deepcopy(model) if config.strategy == "fsdp" else model
    started = time.perf_counter()
    with undisturbed_random_state(), _quiet_lightning(), terminable():
        active.append(callbacks.Ending())
        trainer = pl.Trainer(
            max_epochs=config.max_epochs,
            accelerator="gpu" if choose_device(config.accelerator).type == "cuda" else "cpu",
            precision=config.precision,
            gradient_clip_val=config.gradient_clip,
            callbacks=active,
            logger=run_folder.make_loggers(config.logger, folder),
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
                module.TrainingModule(model, task, config, train, validation),
                ckpt_path=None if checkpoint is None else str(checkpoint),
                weights_only=True,
            )
        except RuntimeError as error:
            if num_processes(config) == 1 or not _is_broken_connection(error):
                raise
            raise RuntimeError(
                f"{name_lost(lost_peers())}, so that this one cannot go on; what that one said "
                "last may tell why. Go on from the last checkpoint with --resume, or resume=True "
                "in Python"
            ) from error
        except SystemExit:  # so Lightning ends after Ctrl-C
            if not isinstance(journal.interrupted, KeyboardInterrupt):
                raise
    result = _result(result_model, journal, config, time.perf_counter() - started)
    if journal.interrupted is not None:
        last = None if folder is None else folder / run_folder.CHECKPOINT
        last = last if last is not None and last.is_file() else None
        raise TrainingInterrupted(result, last) from journal.interrupted
    return result


def _result(model: nn.Module, journal: Journal, config: TrainConfig, seconds: float) -> FitResult:
    # A finished run that is resumed has no further step, and so no end at which to settle these.
    box = [journal.weights or journal.best_weights]
    if config.strategy == "fsdp" and distributed.is_initialized():
        distributed.broadcast_object_list(box)  # the first process alone has them
    (weights,) = box
    model.cpu()
    if weights:
        model.load_state_dict(weights)
    model.eval()
    best = journal.best_epoch if journal.best_epoch >= 0 else len(journal.history) - 1
    return FitResult(model, journal.history, best, journal.stopped_early, seconds)


def predict(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    precision: Precision = "32-true",
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield each batch with the model's output for it, in float32 on the CPU.

    Args:
        model: The model; it stays on the device, in evaluation mode.
        batches: Batches on the CPU; `batch.index` says which series they hold.
        device: Where to compute.
        precision: With a mixed one, computed under autocast.
    """
    device = torch.device(device)
    model = model.to(device).eval()
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for batch in batches:
        autocast = torch.autocast(device.type, dtype, enabled=precision != "32-true")
        with torch.inference_mode(), autocast:
            output = model(batch.to(device))
        yield batch, output.float().cpu()


def num_processes(config: TrainConfig) -> int:
    """Return how many processes will train together."""
    return math.prod(_devices_and_nodes(config))


def choose_device(accelerator: str) -> torch.device:
    """Return the device that `TrainConfig.accelerator` means here."""
    check_choice("accelerator", accelerator, get_args(Accelerator))
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise advise(
            RuntimeError,
            Mention("accelerator", "gpu"),
            " needs a CUDA device, and torch sees none here; use ",
            Mention("accelerator", "auto"),
            " to compute on what there is",
        )
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def check_hardware(accelerator: str, strategy: str, devices: int) -> None:
    """Refuse settings of `TrainConfig` that the devices of this machine cannot serve."""
    device = choose_device(accelerator)
    if strategy == "fsdp" and device.type != "cuda":
        raise advise(
            ValueError,
            Mention("strategy", "fsdp"),
            " needs GPUs; use ",
            Mention("strategy", "ddp"),
            " or 'auto' on CPUs",
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and not _is_under_torchrun() and devices > count:
        raise advise(
            ValueError,
            Mention("devices", devices),
            f" needs as many GPUs, and torch sees {count} here",
        )


def _is_broken_connection(error: RuntimeError) -> bool:
    is_told = any(word in str(error).lower() for word in ("gloo", "by peer", "nccl"))
    return is_told or isinstance(error, distributed.DistError)


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _devices_and_nodes(config: TrainConfig) -> tuple[int, int]:
    if not _is_under_torchrun():
        return config.devices, config.num_nodes
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return devices, int(os.environ["WORLD_SIZE"]) // devices


def _processes(config: TrainConfig) -> dict[str, Any]:
    """Return what the Trainer needs to know of processes and machines."""
    devices, num_nodes = _devices_and_nodes(config)
    strategy: Any = config.strategy
    if strategy == "auto":
        strategy = "ddp" if devices * num_nodes > 1 else "auto"
    if strategy == "fsdp":
        strategies = need("pytorch_lightning.strategies", extra="train")
        strategy = strategies.FSDPStrategy(state_dict_type="full")
    return {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}


@contextlib.contextmanager
def undisturbed_random_state() -> Iterator[None]:
    """Put the states of Python's, NumPy's and torch's generators back afterwards.

    All threads share these generators, so that another thread waits until then.
    """
    with _RANDOM_STATE:
        python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence what Lightning says about itself, and put the handler of Ctrl-C back afterwards."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS)}
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for module in ("pytorch_lightning", "lightning_fabric", "torchmetrics"):
                warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
            # Advice whose origin Lightning gives as the caller's.
            for message in (".*does not have many workers.*", ".*GPU available but not used.*"):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
