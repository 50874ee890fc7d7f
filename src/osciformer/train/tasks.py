"""What a model is trained for: a loss, metrics, and the metric that picks the best epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from osciformer._types import Float, Tensor
from osciformer.data.batches import Batch
from osciformer.train.scores import (
    ClassScores,
    QuantileScores,
    RegressionScores,
    Scores,
    pinball,
    scored_targets,
)

HIGHER_IS_BETTER = frozenset(
    {"accuracy", "auroc", "auprc", "log_likelihood", "macro_log_likelihood"}
)


class Task(ABC):
    """A loss as a sum and a count, so that batches and processes can be added, and metrics."""

    monitor: str = "loss"
    metrics: tuple[str, ...] = ()

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the weighted sum of the losses of a batch, and the sum of the weights.

        Args:
            output: What the model returned.
            batch: What it was given: a `Batch`, or an `EventBatch`.
        """

    @abstractmethod
    def new_scores(self) -> Scores:
        """Return an empty collection of metrics."""

    def resolve_monitor(self, monitor: str) -> str:
        """Return the metric that `TrainConfig.monitor` means, and refuse an unknown one."""
        name = self.monitor if monitor == "auto" else monitor
        if name not in ("loss", *self.metrics):
            raise ValueError(
                f"monitor must be 'auto', 'loss' or one of {', '.join(map(repr, self.metrics))}; "
                f"got {name!r}"
            )
        return name


@dataclass(frozen=True)
class Classification(Task):
    """Cross entropy of C classes; labels are 0 to C - 1, outputs are logits [B, C].

    Attributes:
        num_classes: Number of classes C.
        class_weight: Weight of each class in the loss; None for equal ones.
        label_smoothing: Part of the target that is spread over all classes.
        monitor: Metric that picks the best epoch.
    """

    num_classes: int
    class_weight: Sequence[float] | None = None
    label_smoothing: float = 0.0
    monitor: str = "loss"
    metrics = ("accuracy", "log_loss", "auroc", "auprc")

    def __post_init__(self) -> None:
        if self.class_weight is not None and len(self.class_weight) != self.num_classes:
            raise ValueError(
                f"class_weight must have {self.num_classes} entries; got {len(self.class_weight)}"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be from 0 to below 1; got {self.label_smoothing}"
            )

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of weighted cross entropies, and of the weights."""
        assert batch.labels is not None
        losses = functional.cross_entropy(
            output.float(), batch.labels, reduction="none", label_smoothing=self.label_smoothing
        )
        weight = torch.ones_like(losses) if batch.weight is None else batch.weight
        if self.class_weight is not None:
            weight = weight * losses.new_tensor(self.class_weight)[batch.labels]
        return (weight * losses).sum(), weight.sum()

    def new_scores(self) -> Scores:
        """Return an empty collection of accuracy, log loss and areas under curves."""
        return ClassScores()


@dataclass(frozen=True)
class Regression(Task):
    """Huber or squared loss of scaled targets; labels and outputs are [B, K].

    Attributes:
        scale: What 1 of a scaled target is in its unit, for each of the K targets.
        criterion: `huber` (squared up to an error of 1, linear beyond) or `mse`.
        monitor: Metric that picks the best epoch.
    """

    scale: Sequence[float] = (1.0,)
    criterion: str = "huber"
    monitor: str = "loss"
    metrics = ("rmse", "mae")

    def __post_init__(self) -> None:
        if self.criterion not in ("huber", "mse"):
            raise ValueError(f"criterion must be 'huber' or 'mse'; got {self.criterion!r}")

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of weighted losses, averaged over the targets, and of the weights."""
        assert batch.labels is not None
        criterion = functional.huber_loss if self.criterion == "huber" else functional.mse_loss
        targets = batch.labels.reshape(output.shape)
        losses = criterion(output.float(), targets, reduction="none").mean(dim=-1)
        weight = torch.ones_like(losses) if batch.weight is None else batch.weight
        return (weight * losses).sum(), weight.sum()

    def new_scores(self) -> Scores:
        """Return an empty collection of errors."""
        return RegressionScores(self.scale)


@dataclass(frozen=True)
class Quantiles(Task):
    """Pinball loss of quantiles [B, M, F, Q] at query times; a target that is NaN is not scored.

    Attributes:
        quantiles: Levels of the Q quantiles, rising.
        monitor: Metric that picks the best epoch.
    """

    quantiles: Sequence[float]
    monitor: str = "loss"
    metrics = ("pinball", "mae", "rmse", "coverage")

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of weighted pinball losses over scored targets, and of the weights."""
        targets, scored = scored_targets(batch)
        losses = pinball(output.float(), targets.nan_to_num(), self.quantiles).mean(dim=-1)
        weight = scored.to(losses.dtype)
        if batch.weight is not None:
            weight = weight * batch.weight[:, None, None]
        return (weight * losses).sum(), weight.sum()

    def new_scores(self) -> Scores:
        """Return an empty collection of pinball loss, errors and coverage."""
        return QuantileScores(self.quantiles)
