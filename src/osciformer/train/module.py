"""A model and its task as PyTorch Lightning sees them."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn

from osciformer._advice import Mention, advise
from osciformer._optional import need
from osciformer._types import Tensor
from osciformer.config import TrainConfig
from osciformer.nn.parameters import parameter_groups
from osciformer.train.sources import BatchSource, EpochBatches
from osciformer.train.tasks import Scores, Task

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")


class TrainingModule(pl.LightningModule):
    """One step, one validation and one optimizer, for any model, task and sources of batches."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        train: BatchSource | None = None,
        validation: BatchSource | None = None,
    ) -> None:
        super().__init__()
        self.model, self.task, self.config = model, task, config
        self._train_source, self._validation_source = train, validation
        self.train_loss = float("nan")  # mean of the last finished epoch
        self.metrics: dict[str, float] = {}  # of the last validation, and `loss`
        self._sums: Tensor | None = None
        self._scores = Scores(task)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed all generators by the epoch, so that a continued run draws what it would have."""
        if batch_idx == 0:
            seed_everything(self.config.seed, self.trainer.current_epoch, self.trainer.global_rank)
            self._sums = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of a step over the batches of all processes."""
        total, count = self.task.loss(self.model(batch), batch)
        self._add(total, count)
        world_size = self.trainer.world_size
        if world_size > 1:
            # DDP takes the mean of the gradients of all processes, whose counts may differ.
            count = count.detach().clone()
            distributed.all_reduce(count)
            total = total * world_size
        loss = total / count.clamp(min=1e-8)
        if world_size > 1 and self.config.strategy != "fsdp":
            # DDP waits for a gradient of every parameter, and series of a single row use no
            # frequency; so each parameter gets at least a zero.
            loss = loss + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        return loss

    def finish_epoch(self) -> None:
        """Put the training loss of all processes together; refuse what is not finite."""
        self.train_loss = self._mean_loss()
        watched = self.metrics.get("loss", 0.0)
        # The last step of an epoch may overflow after its loss was computed.
        is_sound = all(bool(p.isfinite().all()) for p in self.parameters())
        for name, value, is_bad in (
            ("training loss", self.train_loss, not np.isfinite(self.train_loss)),
            ("weights", "infinite or nan", not is_sound),
            ("validation loss", watched, np.isnan(watched)),
        ):
            if is_bad:
                raise advise(
                    FloatingPointError,
                    f"the {name} became {value} in epoch {self.trainer.current_epoch}; use a "
                    "smaller learning_rate or ",
                    Mention("precision", "32-true"),
                    ", and look for values of extreme size",
                )

    def on_validation_epoch_start(self) -> None:
        """Forget the metrics of the epoch before."""
        self._train_sums, self._sums = self._sums, None
        self._scores = Scores(self.task)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to loss and metrics."""
        output = self.model(batch)
        self._add(*self.task.loss(output, batch))
        self._scores.add(output, batch)

    def on_validation_epoch_end(self) -> None:
        """Put the metrics of all processes together."""
        states: list[Any] = [self._scores.state()]
        if self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            distributed.all_gather_object(states, self._scores.state())
        self.metrics = {"loss": self._mean_loss(), **self._scores.result(states)}
        self._sums = self._train_sums

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and cosine."""
        groups = parameter_groups(self, self.config.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, num_steps, self.config.warmup_fraction)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

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

    def train_dataloader(self) -> EpochBatches | list[Any]:
        """Return the training batches of the current epoch and this process."""
        return self._batches(self._train_source)

    def val_dataloader(self) -> EpochBatches | list[Any]:
        """Return the validation batches of this process."""
        return self._batches(self._validation_source)

    def _batches(self, source: BatchSource | None) -> EpochBatches | list[Any]:
        place = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return [] if source is None else source.epoch(self.trainer.current_epoch, **place)

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


def warmup_cosine(step: int, num_steps: int, warmup_fraction: float) -> float:
    r"""Return the factor $\min((s + 1) / w, (1 + \cos \pi s / S) / 2)$ of the learning rate.

    Example:
        >>> [round(warmup_cosine(s, 8, 0.25), 2) for s in (0, 2, 4, 8)]
        [0.5, 0.85, 0.5, 0.0]
    """
    ramp = (step + 1) / max(warmup_fraction * num_steps, 1.0)
    return min(ramp, 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(num_steps, 1)))))


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed Python, NumPy and torch with numbers that these three decide."""
    numbers = np.random.SeedSequence((seed, epoch, rank)).generate_state(3)
    random.seed(int(numbers[0]))
    np.random.seed(int(numbers[1]))  # noqa: NPY002, models of users may draw from it
    torch.manual_seed(int(numbers[2]))
