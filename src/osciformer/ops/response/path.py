"""The drive: what each variable is at all rows, also at those where it was not observed."""

from __future__ import annotations

import torch

from osciformer._types import Bool, Float, Tensor, Times, Values
from osciformer.math.oscillator import is_cheap_to_read
from osciformer.ops.attention.ties import take_rows


def fill(
    values: Values, times: Times, measured: Bool[Tensor, "B N F"], *, is_straight: bool
) -> Values:
    """Return values at all rows: on the line between a variable's own neighbours, or held.

    Before its first observation a variable is that observation, after its last one that; a variable
    without any is 0. Gradients pass to values and times.
    """
    rows = values.shape[1]
    if rows == 0 or (is_cheap_to_read(values) and bool(measured.all())):
        return values
    known = torch.where(measured, values, 0.0)
    index = torch.arange(rows, device=values.device)[:, None]
    last = torch.where(measured, index, -1).cummax(dim=1).values
    coming = torch.where(measured, index, rows).flip(1).cummin(dim=1).values.flip(1)
    before = torch.where(last >= 0, last, coming).clamp(max=rows - 1)
    start = known.gather(1, before)
    if not is_straight:
        return start
    after = torch.where(coming < rows, coming, last).clamp(min=0)
    here = times.unsqueeze(-1).expand(values.shape)
    since, until = here.gather(1, before), here.gather(1, after)
    is_gap = until > since
    share = torch.where(is_gap, here - since, 0.0) / torch.where(is_gap, until - since, 1.0)
    return start + (known.gather(1, after) - start) * share.to(values.dtype)


def read_times(
    path: Values, times: Times, query_times: Float[Tensor, "B M"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, at query times, the last row ``[B, M]`` (-1 before the first), the time since.

    Also the level of the drive at that row and what it gains since on the line to the next row,
    each ``[B, M, F]``; after the last row the drive is held.
    """
    index = (
        torch.searchsorted(
            times.detach().contiguous(), query_times.detach().contiguous(), right=True
        )
        - 1
    )
    row = index.clamp(min=0)
    following = (row + 1).clamp(max=times.shape[1] - 1)
    start = times.gather(1, row)
    since = torch.where(index >= 0, query_times - start, 0.0)
    whole = times.gather(1, following) - start
    is_gap = whole > 0
    share = torch.where(is_gap, since, 0.0) / torch.where(is_gap, whole, 1.0)
    level = take_rows(path, row)
    change = (take_rows(path, following) - level) * share.unsqueeze(-1)
    return index, since, level, change
