"""What is kept of a run: its history, the best weights and when to stop."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from osciformer._optional import need
from osciformer._types import Tensor
from osciformer.train.module import TrainingModule
from osciformer.train.tasks import HIGHER_IS_BETTER

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")

PREFIX = "model."


class Journal(pl.Callback):
    """A row per epoch, the weights of the best one, and early stopping.

    All of it is part of the checkpoint.

    Args:
        monitor: The metric that decides, or None if there is no validation.
        patience: Epochs without a better one after which training stops; None for no stopping.
        restore_best: Keep the weights of the best epoch.
        keep_latest: Take for the best epoch the latest one that is worse than the best by no more
            than the standard error of the metric, where that is known.

    Attributes:
        history: One dict of numbers per finished epoch.
        best_epoch: The best epoch, or -1.
        waited: Epochs since the metric was at its best; patience counts them.
        weights: Weights of the best epoch, or of the last one; set at the end of training.
        stopped_early: Whether patience ran out.
    """

    def __init__(
        self,
        monitor: str | None,
        patience: int | None,
        restore_best: bool,
        keep_latest: bool = False,
    ) -> None:
        self.monitor, self.patience, self.restore_best = monitor, patience, restore_best
        self.keep_latest = keep_latest
        self.history: list[dict[str, float]] = []
        self.best_epoch = -1
        self.waited = 0
        self.best_value = math.nan
        self.best_error = 0.0
        self.best_weights: dict[str, Tensor] | None = None
        self.weights: dict[str, Tensor] | None = None
        self.stopped_early = False
        self.interrupted: BaseException | None = None
        self._started = time.perf_counter()

    @property
    def state_key(self) -> str:
        """Name of this callback's part of a checkpoint."""
        return "osciformer.journal"

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
            **{f"val_{name}": value for name, value in pl_module.metrics.items()},
        }
        self.history.append(row)
        self._started = now
        if self.monitor is None:
            return
        value = pl_module.metrics[self.monitor]
        is_better = self._is_better(value)
        self.waited = 0 if is_better else self.waited + 1
        if is_better:
            self.best_value = value
            error = pl_module.errors.get(self.monitor, 0.0) if self.keep_latest else 0.0
            self.best_error = error if math.isfinite(error) else 0.0
        if is_better or self._is_hardly_worse(value):
            self.best_epoch = len(self.history) - 1
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
        if math.isnan(value) or math.isnan(self.best_value):
            return math.isnan(self.best_value) and (self.best_epoch < 0 or not math.isnan(value))
        if self.monitor in HIGHER_IS_BETTER:
            return value > self.best_value
        return value < self.best_value

    def _is_hardly_worse(self, value: float) -> bool:
        return self.best_error > 0.0 and abs(value - self.best_value) <= self.best_error

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs."""
        return {
            "history": self.history,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
            "best_value": self.best_value,
            "best_error": self.best_error,
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run stopped."""
        # Older checkpoints lack it: patience counted from the epoch that is kept.
        self.waited = len(state_dict["history"]) - 1 - state_dict["best_epoch"]
        for name, value in state_dict.items():
            setattr(self, name, value)


def current_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return a copy of the model's weights on the CPU; with FSDP, on the first process only."""
    weights = trainer.strategy.lightning_module_state_dict()
    return {
        name.removeprefix(PREFIX): tensor.detach().to("cpu", copy=True)
        for name, tensor in weights.items()
    }
