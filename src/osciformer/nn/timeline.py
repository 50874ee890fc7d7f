"""Tokens in time: what a layer refuses, what was observed last, and the unit of a data set."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Float, Mask, Tensor, Times
from osciformer.nn.parameters import ExactBuffers
from osciformer.ops._checks import DeferredChecks, check_times
from osciformer.ops.padding import last_present_index


def check_tokens(
    x: Tensor, times: Tensor, mask: Tensor | None, *reads: Tensor | None, name: str, dim: int
) -> None:
    """Refuse tokens `[B, N, dim]`, times and a mask `[B, N]` that do not fit, and bad `reads`."""
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be [B, N, {dim}]; got {list(x.shape)}")
    shape = list(x.shape[:2])
    for what, tensor in (("times", times), ("mask", mask)):
        if tensor is not None and list(tensor.shape) != shape:
            got = list(tensor.shape)
            raise ValueError(f"{what} must be [B, N] = {shape} like {name}; got {got}")
    _check_float(name, x)
    _check_float("times", times)
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a token is present; got {mask.dtype}")
    check_reads(*reads, batch=x.shape[0], dim=dim)  # len would fix an exported batch size


def check_reads(
    query_times: Tensor | None = None, query_x: Tensor | None = None, *, batch: int, dim: int
) -> None:
    """Refuse query times `[B, M]` and query tokens `[B, M, dim]` that do not fit a batch."""
    if query_times is None:
        if query_x is not None:
            raise ValueError("query_x is given without query_times; a read needs both")
        return
    shape = list(query_times.shape)
    if query_times.ndim != 2 or query_times.shape[0] != batch:
        raise ValueError(f"query_times must be [B, M] with B = {batch}; got {shape}")
    _check_float("query_times", query_times)
    if query_x is not None and list(query_x.shape) != [*shape, dim]:
        raise ValueError(f"query_x must be [B, M, D] = {[*shape, dim]}; got {list(query_x.shape)}")


def check_time_values(
    times: Tensor, mask: Tensor | None, query_times: Tensor | None, checks: DeferredChecks
) -> None:
    """Refuse times that decrease or are not finite, and query times that are not finite."""
    check_times("times", times, mask, checks)
    if query_times is not None:
        check_times("query_times", query_times.sort(dim=1).values, None, checks)


def _check_float(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor; got {x.dtype}")


def last_observation(
    times: Tensor, query_times: Tensor, mask: Tensor | None = None, *, backfill: bool = False
) -> Tensor:
    """Return the index `[B, M]` of the last present observation at or before each query; else -1.

    `times` are those of `clean_times`; among observations at one time the last one counts. With
    `backfill`, which is not causal, a query before all observations gets the first one.
    """
    dtype = torch.promote_types(times.dtype, query_times.dtype)
    known, asked = (x.detach().to(dtype).contiguous() for x in (times, query_times))
    before = torch.searchsorted(known, asked, right=True)
    mask = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
    # Position 0 stands for "nothing yet", so that a query before all observations finds -1.
    present = nn.functional.pad(last_present_index(mask), (1, 0), value=-1)
    index = present.gather(1, before)
    if not backfill or times.shape[1] == 0:
        return index
    first = torch.where(mask.any(dim=1), mask.to(torch.uint8).argmax(dim=1), -1)
    return torch.where(index >= 0, index, first[:, None])


def take_tokens(tokens: Tensor, index: Tensor, *, fill: float = 0.0) -> Tensor:
    """Return `tokens[b, index[b, m]]`, and `fill` where the index is -1."""
    if tokens.shape[1] == 0:
        return tokens.new_full((*index.shape, tokens.shape[2]), fill)
    picked = tokens.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, tokens.shape[2]))
    return torch.where((index >= 0)[..., None], picked, fill)


class TimeScale(ExactBuffers):
    r"""Time in the unit of a data set: $(t - t_{ref}) / T$ with two constants of the training set.

    A sequence's own end must never set its unit, which would tell its first tokens how long it is
    going to be. All is float64: seconds since 1970 have a resolution of two minutes in float32.

    Args:
        reference: The time that becomes 0.
        scale: The length that becomes 1, positive.

    Example:
        >>> TimeScale(reference=10.0, scale=2.0)(torch.tensor([[10.0, 14.0]]))
        tensor([[0., 2.]], dtype=torch.float64)
    """

    reference: Tensor
    scale: Tensor

    def __init__(self, reference: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("reference", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))
        self.set(reference, scale)

    def set(self, reference: float, scale: float) -> None:
        """Set both constants."""
        if not (0.0 < scale < float("inf")):
            raise ValueError(f"scale must be a positive, finite length of time; got {scale}")
        if not abs(reference) < float("inf"):
            raise ValueError(f"reference must be a finite time; got {reference}")
        self.reference.fill_(reference)
        self.scale.fill_(scale)

    def fit(self, times: Times, mask: Mask | None = None) -> TimeScale:
        """Set both from training times `[B, N]`: the earliest one, the longest span of a series."""
        times = times.detach().double()
        mask = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        if not bool(mask.any()):
            raise ValueError("times must hold at least one present observation; mask is all False")
        first = torch.where(mask, times, torch.inf).amin(dim=1)
        final = torch.where(mask, times, -torch.inf).amax(dim=1)
        span = float(torch.where(mask.any(dim=1), final - first, 0.0).max())
        if not 0.0 < span < float("inf"):
            raise ValueError(
                "times must be finite and some series must have a positive duration; the longest "
                f"span is {span}. Set the unit by hand with TimeScale.set(reference, scale)"
            )
        self.set(float(first.min()), span)
        return self

    def forward(self, times: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the times in the unit of the data set, float64."""
        return (times.double() - self.reference) / self.scale

    def extra_repr(self) -> str:
        """Show both constants."""
        return f"reference={self.reference.item():g}, scale={self.scale.item():g}"
