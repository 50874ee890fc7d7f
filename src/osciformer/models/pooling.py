"""One vector per series: pooled states and simple statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import carry_forward
from osciformer.nn.timeline import take_tokens
from osciformer.ops.padding import last_present_index

# last, mean, min, max, rise and log-count of each feature
NUM_STATISTICS = 6


def pool_states(
    states: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"], kinds: Sequence[str]
) -> Float[Tensor, "B P"]:
    """Return the pooled states of the present rows, one kind after the other.

    Args:
        states: States; those of absent rows are ignored.
        mask: True where a row is present.
        kinds: Any of `last, mean, max`.

    Returns:
        The pooled states, P = D times the number of kinds; zeros for a series without any row.

    Example:
        >>> states = torch.tensor([[[1.0], [-3.0], [9.0]]])
        >>> pool_states(states, torch.tensor([[True, True, False]]), ("last", "mean", "max"))
        tensor([[-3., -1.,  1.]])
    """
    present = mask[..., None]
    pooled = []
    for kind in kinds:
        if kind == "last":
            pooled.append(take_tokens(states, last_present_index(mask)[:, -1:])[:, 0])
        elif kind == "mean":
            count = mask.sum(dim=1, keepdim=True).clamp(min=1)
            pooled.append(states.masked_fill(~present, 0.0).sum(dim=1) / count)
        else:
            largest = states.masked_fill(~present, -torch.inf).amax(dim=1)
            pooled.append(largest.masked_fill(~mask.any(dim=1, keepdim=True), 0.0))
    return torch.cat(pooled, dim=-1)


def summarise_series(
    values: Float[Tensor, "B N F"], times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B P"]:
    """Return last, mean, least, largest, last minus first, and log-count of each feature.

    Args:
        values: Values; NaN is a missing one.
        times: Their times.
        mask: True where a row is present.

    Returns:
        Statistics, P = 6 F, statistic by statistic; zero where a feature was never measured. The
        count is log(1 + n) / 3, about 1 for twenty measurements.

    Example:
        >>> values = torch.tensor([[[1.0], [float("nan")], [4.0]]])
        >>> summarise_series(values, torch.arange(3.0)[None], torch.ones(1, 3, dtype=torch.bool))
        tensor([[4.0000, 2.5000, 1.0000, 4.0000, 3.0000, 0.3662]])
    """
    measured = ~values.isnan() & mask[..., None]
    count = measured.sum(dim=1)
    last = carry_forward(values, times, mask)[0][:, -1]
    first = values.gather(1, measured.to(torch.uint8).argmax(dim=1, keepdim=True))[:, 0]
    statistics = (
        last,
        torch.where(measured, values, 0.0).sum(dim=1) / count.clamp(min=1),
        torch.where(measured, values, torch.inf).amin(dim=1),
        torch.where(measured, values, -torch.inf).amax(dim=1),
        last - first,
        count.to(values.dtype).log1p() / 3.0,
    )
    return torch.cat([torch.where(count > 0, item, 0.0) for item in statistics], dim=-1)
