"""What happens around the epochs: history, early stopping, averages, reports and files."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.optim.swa_utils import get_ema_multi_avg_fn

from osciformer._files import replacing
from osciformer._optional import need
from osciformer._processes import meet
from osciformer._types import Tensor
from osciformer.config import TrainConfig
from osciformer.train.module import TrainingModule
from osciformer.train.run_folder import CHECKPOINT, CONFIG_KEY, HISTORY, SETUP_KEY, write_history
from osciformer.train.tasks import HIGHER_IS_BETTER

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")

# At step s the decay is at most s / (s + AVERAGE_WARMUP), to forget the first weights soon.
AVERAGE_WARMUP = 4


class Journal(pl.Callback):
    """A row per epoch, the weights of the best one, and early stopping; kept in the checkpoint."""

    state_key = "osciformer.journal"  # type: ignore[assignment]

    def __init__(self, monitor: str | None, patience: int | None, restore_best: bool) -> None:
        self.monitor, self.patience, self.restore_best = monitor, patience, restore_best
        self.history: list[dict[str, float]] = []
        self.best_epoch, self.best_value, self.waited = -1, math.nan, 0
        self.best_weights: dict[str, Tensor] | None = None
        self.weights: dict[str, Tensor] | None = None  # of best or last epoch, when training ends
        self.stopped_early = False
        self.interrupted: BaseException | None = None
        self._started = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a row, and see whether this epoch is the best so far."""
        assert isinstance(pl_module, TrainingModule)
        # Lightning calls callbacks before the module's own hook of this name.
        pl_module.finish_epoch()
        now = time.perf_counter()
        row = {
            "epoch": float(trainer.current_epoch),
            "learning_rate": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "seconds": now - self._started,
            "train_loss": pl_module.train_loss,
        }
        row |= {f"val_{name}": x for name, x in pl_module.metrics.items()}
        self.history.append(row)
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.current_epoch)
        self._started = now
        if self.monitor is None:
            return
        self.waited += 1
        if self._is_better(pl_module.metrics[self.monitor]):
            self.waited, self.best_epoch = 0, len(self.history) - 1
            self.best_value = pl_module.metrics[self.monitor]
            if self.restore_best:
                self.best_weights = current_weights(trainer)
        if self.patience is not None and self.waited >= self.patience:
            trainer.should_stop = self.stopped_early = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settle which weights are the result."""
        self.weights = self.best_weights or current_weights(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remember what ended training, and keep the best weights so far."""
        self.interrupted, self.weights = exception, self.best_weights

    def _is_better(self, value: float) -> bool:
        best = self.best_value
        if math.isnan(value) or math.isnan(best):
            return math.isnan(best) and (self.best_epoch < 0 or not math.isnan(value))
        return value > best if self.monitor in HIGHER_IS_BETTER else value < best

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs."""
        names = ("history", "best_epoch", "waited", "best_value", "best_weights")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run stopped."""
        # Older checkpoints lack it: patience counted from the epoch that is kept.
        self.waited = len(state_dict["history"]) - 1 - state_dict["best_epoch"]
        for name in self.state_dict().keys() & state_dict.keys():
            setattr(self, name, state_dict[name])


def current_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return a copy of the model's weights on the CPU; with FSDP, on the first process only."""
    weights = _copy_to_cpu(trainer.strategy.lightning_module_state_dict())
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _copy_to_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


class WeightAverage(pl.Callback):
    """An exponential average of the parameters, which the model has between epochs.

    Between epochs the weights of training are set aside, as this callback's part of a checkpoint.
    Buffers stay as they are; with FSDP each process averages its pieces, which Lightning's own
    callback cannot. It must come before callbacks that read weights at the end of an epoch.
    """

    state_key = "osciformer.average"  # type: ignore[assignment]

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: list[Tensor] = []
        self._set_aside: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start with the weights that there are; in a continued run they are the averages."""
        self._average = [piece.detach().clone() for piece in pl_module.parameters()]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take up again the weights that were set aside."""
        if self._set_aside is None:
            return
        # First of all, so that Ctrl-C in between has the average put back.
        weights, self._set_aside = self._set_aside, None
        with torch.no_grad(), _whole_parameters(trainer):
            for name, parameter in pl_module.named_parameters():
                parameter.copy_(weights[name])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Move the average towards the weights that the step left."""
        step = trainer.global_step  # this one included
        average = get_ema_multi_avg_fn(min(self.decay, step / (step + AVERAGE_WARMUP)))
        average(self._average, [piece.detach() for piece in pl_module.parameters()], None)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average into the model, and set the weights of training aside."""
        if self._set_aside is not None:
            return
        # Validation is in inference mode; what is set aside should be ordinary tensors.
        with torch.inference_mode(False), torch.no_grad(), _whole_parameters(trainer):
            weights = _copy_to_cpu(dict(pl_module.named_parameters()))
        # After a step FSDP has nothing but the pieces, so that these may be written to directly.
        self._copy_average(pl_module)
        self._set_aside = weights

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put it there without validation, too."""
        self.on_validation_start(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave a model with the average, unless it is in pieces, which is never handed out."""
        if self._set_aside is None and self._average and not _is_in_pieces(trainer):
            self._copy_average(pl_module)

    def _copy_average(self, pl_module: pl.LightningModule) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for piece, average in zip(pl_module.parameters(), self._average, strict=True):
                piece.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs besides the averages: what was set aside."""
        return {"set_aside": self._set_aside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run stopped."""
        self._set_aside = state_dict["set_aside"]


def _is_in_pieces(trainer: pl.Trainer) -> bool:
    return hasattr(trainer.strategy.model, "summon_full_params")


def _whole_parameters(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Let the parameters be whole, and written to; FSDP may still hold those of a forward pass."""
    model: Any = trainer.strategy.model
    return model.summon_full_params(model) if _is_in_pieces(trainer) else contextlib.nullcontext()


class Ending(pl.Callback):
    """Lets processes know each other, and keeps the handler of SIGTERM that there is at first.

    Lightning's own ends a script with the exit code 0, and waits for processes that may be gone.
    """

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of Lightning's handler, and meet the others."""
        if trainer.world_size > 1:
            meet(distributed.all_gather_object, trainer.world_size)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)


class ProgressReport(pl.Callback):
    """A progress bar, or a line per epoch, on standard error; the journal comes before it."""

    def __init__(self, journal: Journal, is_bar: bool) -> None:
        self.journal, self.is_bar = journal, is_bar
        self._bar: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show an empty bar."""
        self._bar = need("tqdm", extra="train").tqdm(
            total=int(trainer.estimated_stepping_batches),
            initial=trainer.global_step,
            unit="step",
            dynamic_ncols=True,
            desc="training",
            disable=not (self.is_bar and trainer.is_global_zero),
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Move the bar."""
        self._bar.update()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics of the epoch."""
        row = self.journal.history[-1]
        shown = {k: v for k, v in row.items() if k == "train_loss" or k.startswith("val_")}
        numbers = " ".join(f"{name} {value:.4f}" for name, value in shown.items())
        line = f"epoch {int(row['epoch']) + 1}/{trainer.max_epochs} {numbers}"
        if self.is_bar:
            self._bar.set_description(line)
        elif trainer.is_global_zero:
            print(line, file=sys.stderr, flush=True)

    def on_train_end(self, *_: Any) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    on_exception = on_train_end  # type: ignore[assignment]


class RunWriter(pl.Callback):
    """Writes history and checkpoint atomically after each epoch; the journal comes before it."""

    def __init__(
        self, folder: Path, journal: Journal, config: TrainConfig, setup: Mapping[str, Any]
    ) -> None:
        self.folder, self.journal, self.config, self.described = folder, journal, config, setup

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write both files."""
        target = self.folder / CHECKPOINT
        if not trainer.is_global_zero:
            trainer.save_checkpoint(target)  # a collective call with FSDP; it writes nothing here
            return
        write_history(self.folder / HISTORY, self.journal.history)
        with replacing(target) as part:
            trainer.save_checkpoint(part)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the settings, so that a run is not continued with other ones."""
        checkpoint[CONFIG_KEY] = self.config.to_dict()
        checkpoint[SETUP_KEY] = dict(self.described)
