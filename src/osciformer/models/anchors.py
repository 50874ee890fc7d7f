"""What simple methods say about a value at a query time, and how well known it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.models.carry import AgeScale, known_after, known_at, take_rows
from osciformer.nn.timeline import last_observation
from osciformer.ops.padding import clean_times


@dataclass(frozen=True)
class Anchors:
    """Simple predictions at query times; 0, the mean of scaled values, where nothing is known.

    Attributes:
        base: The last known value, or in both directions the linear interpolation.
        level: The mean of the values known, at or before the time or of the whole series.
        distance: Scaled time to the nearest known value; 0 where none is known.
        columns: All that is known, for a network: values, scaled times to them, and signs that
            they are known.
    """

    base: Float[Tensor, "B M F"]
    level: Float[Tensor, "B M F"]
    distance: Float[Tensor, "B M F"]
    columns: Float[Tensor, "B M P"]


def num_anchor_columns(input_dim: int, direction: str) -> int:
    """Return the number P of columns of the anchors of F features."""
    return input_dim * (4 if direction == "causal" else 8)


def find_anchors(
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
    query_times: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B N"],
    *,
    direction: str,
    age_scale: AgeScale,
) -> Anchors:
    """Return what simple methods say at the query times.

    Args:
        values: Values; NaN is a missing one.
        times: Their times, not decreasing among the present rows of a series.
        query_times: Times in any order.
        mask: True where a row is present.
        direction: `causal`: from measurements at or before a query time; or `bidirectional`.
        age_scale: The scale of ages.

    Example:
        >>> values, times = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[0.0, 1.0]])
        >>> known = torch.ones(1, 2, dtype=torch.bool)
        >>> options = dict(direction="bidirectional", age_scale=AgeScale())
        >>> find_anchors(values, times, torch.tensor([[0.25, 2.0]]), known, **options).base
        tensor([[[1.5000], [3.0000]]])
    """
    last, age = known_at(values, times, query_times, mask)
    is_known = ~last.isnan()
    last, age = last.nan_to_num(0.0), age.nan_to_num(0.0)
    scaled = age_scale(age)
    if direction == "causal":
        held = last_observation(clean_times(times, mask), query_times, mask)
        level = take_rows(_running_mean(values), held).nan_to_num(0.0)
        columns = torch.cat((last, level, scaled, is_known.to(last.dtype)), dim=-1)
        return Anchors(last, level, scaled, columns)

    coming, until = known_after(values, times, query_times, mask)
    is_coming = ~coming.isnan()
    coming, until = coming.nan_to_num(0.0), until.nan_to_num(0.0)
    # Where only one side is known the share goes to it; at a measurement both sides agree.
    share = torch.where(is_known, age, 1.0) / torch.where(is_known & is_coming, age + until, 1.0)
    share = torch.where(is_coming, share, 0.0).nan_to_num(0.0)
    base = torch.lerp(last, coming, share)
    level = _running_mean(values)[:, -1:].expand_as(base).nan_to_num(0.0)
    ahead = age_scale(until)
    nearest = torch.where(is_known, torch.where(is_coming, scaled.minimum(ahead), scaled), ahead)
    signs = (is_known.to(last.dtype), is_coming.to(last.dtype))
    columns = torch.cat((last, coming, base, level, scaled, ahead), dim=-1)
    return Anchors(base, level, nearest, torch.cat((columns, *signs), dim=-1))


def _running_mean(values: Float[Tensor, "B N F"]) -> Float[Tensor, "B N F"]:
    measured = ~values.isnan()
    total = torch.where(measured, values, 0.0).cumsum(dim=1)
    return total / measured.cumsum(dim=1).clamp(min=1)
