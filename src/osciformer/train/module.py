"""A model and its task as PyTorch Lightning sees them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn

from osciformer._optional import need
from osciformer._types import Tensor
from osciformer.data.batches import Batch
from osciformer.nn.parameters import parameter_groups
from osciformer.train.config import TrainConfig
from osciformer.train.schedule import warmup_cosine
from osciformer.train.scores import Scores
from osciformer.train.sources import BatchSource, EpochBatches
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")


class TrainingModule(pl.LightningModule):
    """One step, one validation and one optimizer, for any model and task.

    Args:
        model: Takes a `Batch`, returns what the task wants.
        task: Loss and metrics.
        config: Settings.

    Attributes:
        train_loss: Mean training loss of the last finished epoch.
        metrics: Validation metrics of the last validation, and `loss`.
        errors: Standard errors of those for which they are known.
    """

    def __init__(self, model: nn.Module, task: Task, config: TrainConfig) -> None:
        super().__init__()
        self.model, self.task, self.config = model, task, config
        self.train_loss = float("nan")
        self.metrics: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self._sums: Tensor | None = None
        self._scores: Scores | None = None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed all generators by the epoch, so that a continued run draws what it would have."""
        if batch_idx == 0:
            seed_everything(self.config.seed, self.trainer.current_epoch, self.trainer.global_rank)
            self._sums = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a step over the batches of all processes.

        A model may have a method `learn`, which besides its output returns a `SideLoss` or None,
        the same of both whatever is in the batch. The reported loss is that of the task alone.
        """
        learn = getattr(self.model, "learn", None)
        output, side = (self.model(batch), None) if learn is None else learn(batch)
        total, count = self.task.loss(output, batch)
        self._add(total, count)
        loss = self._mean_of_all(total, count)
        if side is not None:
            loss = loss + side.weight * self._mean_of_all(side.total, side.count)
        if self.trainer.world_size > 1 and self.config.strategy != "fsdp":
            # DDP waits for a gradient of every parameter, and series of a single row use no
            # frequency; so each parameter gets at least a zero.
            loss = loss + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        return loss

    def _mean_of_all(self, total: Tensor, count: Tensor) -> Tensor:
        """Return what has the gradient of the mean over the batches of all processes."""
        world_size = self.trainer.world_size
        if world_size > 1:
            # DDP takes the mean of the gradients of all processes, whose counts may differ.
            count = count.detach().clone()
            distributed.all_reduce(count)
            total = total * world_size
        return total / count.clamp(min=1e-8)

    def finish_epoch(self) -> None:
        """Put the training loss of all processes together, and refuse one that is not finite."""
        self.train_loss = self._mean_loss()
        if not np.isfinite(self.train_loss):
            raise FloatingPointError(
                f"the training loss became {self.train_loss} in epoch "
                f"{self.trainer.current_epoch}; use a smaller learning_rate or precision='32-true'"
            )

    def on_validation_epoch_start(self) -> None:
        """Forget the metrics of the epoch before."""
        self._train_sums, self._sums = self._sums, None
        self._scores = self.task.new_scores()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to loss and metrics."""
        assert self._scores is not None
        output = self.model(batch)
        self._add(*self.task.loss(output, batch))
        self._scores.add(output, batch)

    def on_validation_epoch_end(self) -> None:
        """Put the metrics of all processes together."""
        assert self._scores is not None
        states = [self._scores.state()]
        if self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            distributed.all_gather_object(states, self._scores.state())
        self.metrics = {"loss": self._mean_loss(), **self._scores.result(states)}
        self.errors = self._scores.errors(states)
        self._scores, self._sums = None, self._train_sums

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and cosine."""
        optimizer = torch.optim.AdamW(
            parameter_groups(self, self.config.weight_decay), lr=self.config.learning_rate
        )
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: warmup_cosine(
                step, num_steps=num_steps, warmup_fraction=self.config.warmup_fraction
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Bound the norm of the gradient; with FSDP, which Lightning leaves out, of all pieces."""
        clip_pieces = getattr(self.trainer.strategy.model, "clip_grad_norm_", None)
        if clip_pieces is not None and gradient_clip_val is not None:
            clip_pieces(gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _add(self, total: Tensor, count: Tensor) -> None:
        sums = torch.stack((total.detach(), count.detach())).double()
        self._sums = sums if self._sums is None else self._sums + sums

    def _mean_loss(self) -> float:
        assert self._sums is not None
        sums = self._sums.clone()
        if self.trainer.world_size > 1:
            distributed.all_reduce(sums)
        total, count = sums.tolist()
        return total / count if count > 0 else 0.0


class TrainingData(pl.LightningDataModule):
    """Loaders that are asked for anew each epoch, with its number."""

    def __init__(self, train: BatchSource, validation: BatchSource | None) -> None:
        super().__init__()
        self.train, self.validation = train, validation

    def train_dataloader(self) -> EpochBatches:
        """Return the training batches of the current epoch and this process."""
        return self._batches(self.train)

    def val_dataloader(self) -> EpochBatches | list[Any]:
        """Return the validation batches of this process."""
        return [] if self.validation is None else self._batches(self.validation)

    def _batches(self, source: BatchSource) -> EpochBatches:
        trainer = self.trainer
        assert trainer is not None
        return source.epoch(
            trainer.current_epoch, rank=trainer.global_rank, world_size=trainer.world_size
        )


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed Python, NumPy and torch with numbers that these three decide."""
    numbers = np.random.SeedSequence((seed, epoch, rank)).generate_state(3)
    random.seed(int(numbers[0]))
    np.random.seed(int(numbers[1]))  # noqa: NPY002, models of users may draw from it
    torch.manual_seed(int(numbers[2]))
