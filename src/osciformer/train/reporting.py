"""What a user sees while a model trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from osciformer._optional import need
from osciformer.train.journal import Journal

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")


class ProgressReport(pl.Callback):
    """A progress bar over all steps of a run, or a line per epoch, on standard error.

    Args:
        journal: Its last row is shown; it must come before this callback.
        is_bar: A bar; otherwise lines.
    """

    def __init__(self, journal: Journal, is_bar: bool) -> None:
        self.journal, self.is_bar = journal, is_bar
        self._bar: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show an empty bar."""
        if self.is_bar and trainer.is_global_zero:
            self._bar = need("tqdm", extra="train").tqdm(
                total=int(trainer.estimated_stepping_batches),
                initial=trainer.global_step,
                unit="step",
                dynamic_ncols=True,
                desc="training",
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics of the epoch."""
        row = self.journal.history[-1]
        line = describe_epoch(row, trainer.max_epochs)
        if self._bar is not None:
            self._bar.set_description(line)
        elif not self.is_bar and trainer.is_global_zero:
            print(line, file=sys.stderr, flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def on_exception(self, *_: Any) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def describe_epoch(row: Mapping[str, float], max_epochs: int | None) -> str:
    """Return an epoch in a line.

    Example:
        >>> describe_epoch({"epoch": 0.0, "train_loss": 0.5, "val_auroc": 0.75, "seconds": 2.0}, 9)
        'epoch 1/9 train_loss 0.5000 val_auroc 0.7500'
    """
    shown = {k: v for k, v in row.items() if k == "train_loss" or k.startswith("val_")}
    numbers = " ".join(f"{name} {value:.4f}" for name, value in shown.items())
    return f"epoch {int(row['epoch']) + 1}/{max_epochs} {numbers}"
