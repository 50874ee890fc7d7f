"""From a batch to the columns of a backbone: hiding in training, carrying forward, static."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import AgeScale, carry_forward
from osciformer.models.task_batch import SeriesBatch
from osciformer.models.task_config import TaskConfig
from osciformer.nn.checks import check_tokens


class SeriesInputs(nn.Module):
    """Columns for a backbone: the values and, if carried, last known values and their ages.

    Args:
        config: Configuration of the task model.

    Example:
        >>> inputs = SeriesInputs(TaskConfig(input_dim=2)).eval()
        >>> times, mask = torch.rand(1, 5).sort().values, torch.ones(1, 5, dtype=torch.bool)
        >>> inputs.num_columns, inputs(torch.randn(1, 5, 2), times, mask).shape
        (6, torch.Size([1, 5, 6]))
    """

    def __init__(self, config: TaskConfig) -> None:
        super().__init__()
        self.input_dim, self.static_dim = config.input_dim, config.static_dim
        self.carry, self.observation_dropout = config.carry, config.observation_dropout
        self.age_scale = AgeScale()

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return self.input_dim * (3 if self.carry else 1)

    def rows(
        self, batch: SeriesBatch
    ) -> tuple[Float[Tensor, "B N F"], Float[Tensor, "B N"], Bool[Tensor, "B N"]]:
        """Return values, times and mask of a batch; some values are hidden (NaN) in training.

        A batch of width 0 gets one absent row, so that nothing after this meets an empty axis.
        """
        values, times, mask = batch.values, batch.times, batch.mask
        check_tokens(values, times, mask, name="values", dim=self.input_dim)
        if values.shape[1] == 0:
            values, times, mask = (
                functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 1)) for x in (values, times, mask)
            )
        values = values.masked_fill(~mask[..., None], torch.nan)
        if self.training and self.observation_dropout:
            is_hidden = torch.rand_like(values) < self.observation_dropout
            values = values.masked_fill(is_hidden, torch.nan)
        return values, times, mask

    def static(self, batch: SeriesBatch) -> Float[Tensor, "B S"] | None:
        """Return the static features; all missing where the model has some and the batch none."""
        if batch.static is None and self.static_dim:
            return batch.values.new_full((len(batch.values), self.static_dim), torch.nan)
        got = 0 if batch.static is None else batch.static.shape[-1]
        if got != self.static_dim:
            raise ValueError(f"static must be [B, {self.static_dim}] as configured; got [B, {got}]")
        return batch.static if self.static_dim else None

    def forward(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
    ) -> Float[Tensor, "B N G"]:
        """Return the columns; NaN is a missing one."""
        if not self.carry:
            return values
        last, age = carry_forward(values, times, mask)
        return torch.cat((values, last, self.age_scale(age)), dim=-1)


def static_columns(static: Float[Tensor, "B S"]) -> Float[Tensor, "B P"]:
    """Return static features for a head, each also with the sign that it is known; P = 2 S.

    They are among the tokens as well. But a series without observations has no tokens.

    Example:
        >>> static_columns(torch.tensor([[2.0, float("nan")]]))
        tensor([[2., 0., 1., 0.]])
    """
    known = ~static.isnan()
    return torch.cat((torch.where(known, static, 0.0), known.to(static.dtype)), dim=-1)
