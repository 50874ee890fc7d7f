"""One vector per series: pooled states and simple statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import AgeScale, carry_forward
from osciformer.nn.timeline import take_tokens
from osciformer.ops.padding import last_present_index

# The statistic `age` of what was never measured: e^8 typical gaps old.
AGE_OF_UNKNOWN = 2.0


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
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
    mask: Bool[Tensor, "B N"],
    kinds: Sequence[str],
    age_scale: AgeScale,
) -> Float[Tensor, "B P"]:
    """Return statistics of each feature over the measured values of a series.

    They are `last`, `first`, `mean`, `min` and `max` of the values; `rise`, last minus first;
    `std`, the standard deviation (of n, not n - 1); `count`, log(1 + n) / 3, about 1 for twenty
    values; and `age`, a quarter of the scaled time from the last measurement to the last row.

    Args:
        values: Values; NaN is a missing one.
        times: Their times.
        mask: True where a row is present.
        kinds: Which statistics, one after the other.
        age_scale: Scales ages.

    Returns:
        Statistics, P = F times the number of kinds. Of a feature that was never measured they are
        zero, but for the age, which is 2: as of one that was last measured very long ago.

    Example:
        >>> values = torch.tensor([[[1.0], [float("nan")], [4.0], [float("nan")]]])
        >>> rows = torch.arange(4.0)[None], torch.ones(1, 4, dtype=torch.bool)
        >>> summarise_series(values, *rows, ("last", "mean", "rise", "std", "count"), AgeScale())
        tensor([[4.0000, 2.5000, 3.0000, 1.5000, 0.3662]])
        >>> summarise_series(values, *rows, ("age",), AgeScale())  # log(1 + 1) / 4
        tensor([[0.1733]])
    """
    measured = ~values.isnan() & mask[..., None]
    count = measured.sum(dim=1)
    last, age = (known[:, -1] for known in carry_forward(values, times, mask))
    first = values.gather(1, measured.to(torch.uint8).argmax(dim=1, keepdim=True))[:, 0]
    mean = torch.where(measured, values, 0.0).sum(dim=1) / count.clamp(min=1)

    def deviation() -> Tensor:
        apart = torch.where(measured, values - mean[:, None], 0.0)
        variance = apart.square().sum(dim=1) / count.clamp(min=1)
        # The slope of the square root has no end at 0, and infinity times 0 would be NaN.
        return torch.where(variance > 0, variance, 1.0).sqrt().masked_fill(variance == 0, 0.0)

    makers: dict[str, Callable[[], Tensor]] = {
        "last": lambda: last,
        "mean": lambda: mean,
        "min": lambda: torch.where(measured, values, torch.inf).amin(dim=1),
        "max": lambda: torch.where(measured, values, -torch.inf).amax(dim=1),
        "rise": lambda: last - first,
        "count": lambda: count.to(values.dtype).log1p() / 3.0,
        "std": deviation,
        "age": lambda: age_scale(age) / 4.0,
        "first": lambda: first,
    }
    unknown = {"age": AGE_OF_UNKNOWN}
    return torch.cat(
        [torch.where(count > 0, makers[kind](), unknown.get(kind, 0.0)) for kind in kinds], dim=-1
    )
