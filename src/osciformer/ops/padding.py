"""Padding: absent tokens may hold anything, NaN included, and must reach nothing."""

from __future__ import annotations

import torch

from osciformer._types import Bool, Float, Int, Tensor


def clean_times(times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Tensor:
    """Return the times with padding replaced, so that padding may hold anything, NaN included.

    An absent token gets the time of the last present one before it, one before the first present
    token gets that token's time, and a series without any present token gets zeros. Gradients pass
    from there to the present times, and none to what was in the padding.

    Example:
        >>> times = torch.tensor([[1.0, 2.0, float("nan")]])
        >>> clean_times(times, torch.tensor([[True, True, False]]))
        tensor([[1., 2., 2.]])
    """
    if mask is None or times.shape[1] == 0:
        return times
    known = torch.where(mask, times, 0.0)
    last = last_present_index(mask)
    first = mask.to(torch.uint8).argmax(dim=1, keepdim=True)
    fill = known.gather(1, torch.where(last >= 0, last, first))
    return torch.where(mask, times, fill)


def last_present_index(mask: Bool[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return, for each position, the last present position at or before it; -1 for none."""
    index = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return torch.where(mask, index, -1).cummax(dim=1).values


def blank_absent(x: Tensor, mask: Bool[Tensor, "B N"]) -> Tensor:
    """Return ``[B, N, H, C]`` with absent tokens set to 0, so that NaN there reaches nothing."""
    return torch.where(mask[..., None, None], x, 0.0)
