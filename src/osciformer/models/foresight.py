"""An aim besides the labels: to tell the next measurements of a series from what came before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import AgeScale
from osciformer.nn.timeline import take_tokens
from osciformer.ops.padding import clean_times, last_present_index


@dataclass(frozen=True)
class SideLoss:
    """A loss besides that of the task.

    Attributes:
        total: Sum over all targets.
        count: Number of targets.
        weight: What its mean is multiplied with.
    """

    total: Float[Tensor, ""]
    count: Float[Tensor, ""]
    weight: float


class Foresight(nn.Module):
    """Predicts each row of a series from the state at the row before and the time between them.

    There is one label per series, but a value to predict for every measurement: states that can
    tell what comes next have learned from all of them. The network is of no use after training.
    A row at the time of the row before it is no target: tokens of one time see each other.

    Args:
        dim: Width D of the states, which must not know of rows at later times.
        input_dim: Number of features F.
        dropout: Dropout.

    Example:
        >>> foresight = Foresight(8, 2, dropout=0.0)
        >>> values = torch.ones(1, 3, 2)
        >>> values[0, 1, 0] = torch.nan
        >>> rows = torch.arange(3.0)[None], torch.ones(1, 3, dtype=torch.bool)
        >>> foresight(torch.randn(1, 3, 8), values, *rows, AgeScale(), weight=0.5).count
        tensor(3.)
    """

    def __init__(self, dim: int, input_dim: int, *, dropout: float) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(dim + 1, 2 * dim),
            nn.GELU(),
            nn.Linear(2 * dim, input_dim),
        )

    def forward(
        self,
        states: Float[Tensor, "B N D"],
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        age_scale: AgeScale,
        *,
        weight: float,
    ) -> SideLoss:
        """Return Huber's loss of the predictions: squared up to an error of 1, then linear.

        Args:
            states: State at each row; one at least, also where the others have none.
            values: What was measured; NaN is no target.
            times: Times of the rows.
            mask: True where a row is present; other rows may hold anything.
            age_scale: Scales the time until the next row.
            weight: Handed on.

        Returns:
            The loss, of all series alike, whatever their weights; it depends on all parameters of
            the head, even where there is no target.
        """
        times = clean_times(times, mask)
        gaps = times[:, 1:] - times[:, :-1]
        before = take_tokens(states, last_present_index(mask)[:, :-1])
        found = self.head(torch.cat((before, age_scale(gaps)[..., None].to(before.dtype)), dim=-1))
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        target = values[:, 1:].to(found.dtype)
        is_target = ~target.isnan() & (mask[:, 1:] & (gaps > 0))[..., None]
        loss = functional.huber_loss(found, torch.where(is_target, target, 0.0), reduction="none")
        return SideLoss(
            torch.where(is_target, loss, 0.0).sum(), is_target.sum().to(loss.dtype), weight
        )
