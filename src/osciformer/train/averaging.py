"""An exponential average of the weights, which is what is validated, kept and returned."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from osciformer._optional import need
from osciformer._types import Tensor

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = need("pytorch_lightning", extra="train")

# At step s the decay is at most s / (s + WARMUP), so that the weights before training, which have
# learned nothing, are soon forgotten.
WARMUP = 4


class WeightAverage(pl.Callback):
    """Averages the parameters after each step; the model has the average between epochs.

    From the last step of an epoch, through validation and what other callbacks do then, to the
    start of the next one the parameters are the averages, and those that training goes on with are
    set aside. So the weights in a checkpoint are the averages, and those set aside are this
    callback's part of it. Buffers are left as they are; with FSDP each process averages its pieces.
    It must come before the callbacks that read weights at the end of an epoch.

    Args:
        decay: Part of the average that a step leaves, from 0 to below 1.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: list[Tensor] = []
        self._set_aside: dict[str, Tensor] | None = None

    @property
    def state_key(self) -> str:
        """Name of this callback's part of a checkpoint."""
        return "osciformer.average"

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
        """Move the average towards the new weights."""
        step = trainer.global_step  # this one included
        average = get_ema_multi_avg_fn(min(self.decay, step / (step + WARMUP)))
        average(self._average, [piece.detach() for piece in pl_module.parameters()], None)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average into the model, and set the weights of training aside."""
        if self._set_aside is not None:
            return
        # Validation is in inference mode; what is set aside should be ordinary tensors.
        with torch.inference_mode(False), torch.no_grad(), _whole_parameters(trainer):
            weights = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in pl_module.named_parameters()
            }
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
