"""Metrics that are collected batch by batch and put together across processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from osciformer._types import Float, Int, Tensor
from osciformer.data.batches import Batch
from osciformer.train.curves import auroc, auroc_error, average_precision


class Scores(ABC):
    """What the batches of one process have shown so far."""

    @abstractmethod
    def add(self, output: Any, batch: Any) -> None:
        """Take the model's output for a batch into account."""

    @abstractmethod
    def state(self) -> Any:
        """Return what `result` needs, to be sent to other processes."""

    @staticmethod
    @abstractmethod
    def result(states: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of all processes together."""

    @staticmethod
    def errors(states: Sequence[Any]) -> dict[str, float]:
        """Return standard errors of those metrics, and of the `loss`, for which they are known."""
        return {}


class _Collected(Scores):
    """Outputs and labels of single series; a series that came to two processes counts once."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        assert batch.labels is not None
        parts = (batch.index, output.detach().float(), batch.labels)
        self._parts.append(tuple(part.cpu().numpy() for part in parts))  # type: ignore[arg-type]

    def state(self) -> tuple[np.ndarray, ...]:
        return tuple(np.concatenate(column) for column in zip(*self._parts, strict=True))

    @staticmethod
    def _join(states: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        index, output, labels = (np.concatenate(column) for column in zip(*states, strict=True))
        _, first = np.unique(index, return_index=True)
        return output[first], labels[first]


class ClassScores(_Collected):
    """Accuracy, log loss, AUROC and AUPRC; with more than two classes, means over the classes."""

    @staticmethod
    def result(states: Sequence[Any]) -> dict[str, float]:
        """Return `accuracy`, `log_loss`, `auroc` and `auprc`."""
        return class_metrics(*_Collected._join(states))

    @staticmethod
    def errors(states: Sequence[Any]) -> dict[str, float]:
        """Return those of `accuracy`, `log_loss`, the `loss` and, for two classes, `auroc`."""
        return class_errors(*_Collected._join(states))


def class_metrics(
    logits: Float[np.ndarray, "n C"], labels: Int[np.ndarray, "n"]
) -> dict[str, float]:
    """Return accuracy, log loss, AUROC and AUPRC.

    Args:
        logits: Unnormalised log-probabilities of the C classes.
        labels: The true classes, 0 to C - 1.

    Returns:
        Areas are those of class 1 if there are two classes, else means over the classes (one
        against the rest) that have both members and others; NaN if there is no such class.

    Example:
        >>> class_metrics(np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0, 1]))["auroc"]
        1.0
    """
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_chance = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    classes = [1] if logits.shape[1] == 2 else range(logits.shape[1])
    some = [k for k in classes if 0 < (labels == k).sum() < len(labels)]
    # For two classes the difference of the logits ranks as the probability does, without rounding.
    score = [
        logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else log_chance[:, k] for k in some
    ]
    pairs = [(labels == k, s) for k, s in zip(some, score, strict=True)]
    nothing = float("nan")
    return {
        "accuracy": float((logits.argmax(axis=1) == labels).mean()),
        "log_loss": float(-log_chance[np.arange(len(labels)), labels].mean()),
        "auroc": float(np.mean([auroc(*pair) for pair in pairs])) if pairs else nothing,
        "auprc": float(np.mean([average_precision(*pair) for pair in pairs])) if pairs else nothing,
    }


def class_errors(
    logits: Float[np.ndarray, "n C"], labels: Int[np.ndarray, "n"]
) -> dict[str, float]:
    """Return standard errors of what `class_metrics` returns, due to the choice of series.

    Args:
        logits: Unnormalised log-probabilities of the C classes.
        labels: The true classes, 0 to C - 1.

    Returns:
        Of `accuracy` and `log_loss`, of the `loss`, taken to be the log loss, and for two classes
        of `auroc`; NaN where one class is absent.
    """
    found = class_metrics(logits, labels)
    count = len(labels)
    chance = torch.from_numpy(logits.astype(np.float64)).log_softmax(dim=1).numpy()
    of_loss = float(chance[np.arange(count), labels].std() / np.sqrt(count))
    share = found["accuracy"]
    errors = {
        "accuracy": float(np.sqrt(share * (1.0 - share) / count)),
        "log_loss": of_loss,
        "loss": of_loss,
    }
    if logits.shape[1] == 2:
        positive = int((labels == 1).sum())
        errors["auroc"] = auroc_error(found["auroc"], positive, count - positive)
    return errors


class RegressionScores(_Collected):
    """Root of the mean squared error and mean absolute error, in the unit of the targets.

    Args:
        scale: What 1 of the model's output is in that unit, for each of the K targets.
    """

    def __init__(self, scale: Sequence[float]) -> None:
        super().__init__()
        self.scale = np.asarray(scale)

    def state(self) -> tuple[np.ndarray, ...]:
        """Return positions, outputs and targets, the latter two in the unit of the targets."""
        index, output, labels = super().state()
        return index, output * self.scale, labels.reshape(output.shape) * self.scale

    @staticmethod
    def result(states: Sequence[Any]) -> dict[str, float]:
        """Return `rmse` and `mae`."""
        output, labels = _Collected._join(states)
        error = output.astype(np.float64) - labels
        return {
            "rmse": float(np.sqrt(np.square(error).mean())),
            "mae": float(np.abs(error).mean()),
        }


class QuantileScores(Scores):
    """Pinball loss, errors of the median and coverage of the widest interval, in scaled units.

    Args:
        quantiles: Levels of the Q quantiles, rising.
    """

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.quantiles = tuple(quantiles)
        self._sums = np.zeros(5)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add the errors at the scored targets of a batch."""
        targets, scored = scored_targets(batch)
        targets, found = targets[scored], output.detach()[scored].float()  # [S], [S, Q]
        middle = min(range(len(self.quantiles)), key=lambda k: abs(self.quantiles[k] - 0.5))
        error = found[:, middle] - targets
        inside = (found[:, 0] <= targets) & (targets <= found[:, -1])
        parts = (
            pinball(found, targets, self.quantiles).mean(dim=-1),
            error.abs(),
            error.square(),
            inside,
            torch.ones_like(error),
        )
        self._sums += torch.stack([part.double().sum() for part in parts]).cpu().numpy()

    def state(self) -> Float[np.ndarray, "5"]:
        """Return sums, and behind them the number of scored targets."""
        return self._sums

    @staticmethod
    def result(states: Sequence[Any]) -> dict[str, float]:
        """Return `pinball`, `mae`, `rmse` and `coverage`; NaN if nothing was scored."""
        *sums, count = np.sum(states, axis=0)
        if count == 0:
            return dict.fromkeys(("pinball", "mae", "rmse", "coverage"), float("nan"))
        loss, absolute, squared, inside = (float(part / count) for part in sums)
        return {"pinball": loss, "mae": absolute, "rmse": squared**0.5, "coverage": inside}


def scored_targets(batch: Batch) -> tuple[Float[Tensor, "B M F"], Tensor]:
    """Return the targets of a batch, and where [B, M, F] they are to be scored."""
    if batch.targets is None or batch.query_mask is None:
        raise ValueError("a batch of a query task must have query times and targets")
    return batch.targets, batch.query_mask[..., None] & ~batch.targets.isnan()


def pinball(
    found: Float[Tensor, "*S Q"], targets: Float[Tensor, "*S"], quantiles: Sequence[float]
) -> Float[Tensor, "*S Q"]:
    r"""Return the pinball loss $\max(\tau e, (\tau - 1) e)$ with $e = y - \hat y_\tau$.

    Example:
        >>> pinball(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0]), (0.1, 0.9))
        tensor([[0.1000, 0.1000]])
    """
    level = torch.tensor(quantiles, dtype=found.dtype, device=found.device)
    error = targets[..., None] - found
    return torch.maximum(level * error, (level - 1.0) * error)
