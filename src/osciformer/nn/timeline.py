"""Times of padded sequences: what was seen last, and the unit of a data set."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Bool, Float, Int, Tensor
from osciformer.nn.exact import ExactBuffers
from osciformer.ops.padding import last_present_index


def last_observation(
    times: Float[Tensor, "B N"],
    query_times: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    backfill: bool = False,
) -> Int[Tensor, "B M"]:
    """Return the index of the last present observation at or before each query time; -1 for none.

    Args:
        times: Observation times as `clean_times` returns them.
        query_times: Times in any order.
        mask: True where an observation is present.
        backfill: Take the first present observation where there is none before; not causal.

    Returns:
        Indices; among observations at one time the last one.

    Example:
        >>> last_observation(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[-1.0, 0.5, 1.0]]))
        tensor([[-1,  0,  2]])
    """
    dtype = torch.promote_types(times.dtype, query_times.dtype)
    before = torch.searchsorted(
        times.detach().to(dtype).contiguous(),
        query_times.detach().to(dtype).contiguous(),
        right=True,
    )
    if mask is None:
        mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
    # Position 0 stands for "nothing yet", so that a query before all observations finds -1.
    present = nn.functional.pad(last_present_index(mask), (1, 0), value=-1)
    index = present.gather(1, before)
    if not backfill or times.shape[1] == 0:
        return index
    first = torch.where(mask.any(dim=1), mask.to(torch.uint8).argmax(dim=1), -1)
    return torch.where(index >= 0, index, first[:, None])


def take_tokens(
    tokens: Float[Tensor, "B N D"], index: Int[Tensor, "B M"]
) -> Float[Tensor, "B M D"]:
    """Return `tokens[b, index[b, m]]`, and zeros where the index is -1."""
    if tokens.shape[1] == 0:
        return tokens.new_zeros(*index.shape, tokens.shape[2])
    picked = tokens.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, tokens.shape[2]))
    return torch.where((index >= 0)[..., None], picked, 0.0)


class TimeScale(ExactBuffers):
    r"""Time in the unit of a data set: $(t - t_{ref}) / T$ with two constants of the training set.

    A sequence's own end must never set its unit: that would tell its first tokens how long it
    is going to be. Both constants are float64 buffers that keep their precision when the model is
    moved to another dtype, and the result is float64: a time stamp in seconds since 1970 has no
    room in float32 for anything below two minutes.

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

    def fit(
        self, times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None = None
    ) -> TimeScale:
        """Set the reference to the earliest time and the scale to the longest span of a series.

        Args:
            times: Times of the training set.
            mask: True where an observation is present.

        Returns:
            This module.
        """
        times = times.detach().double()
        if mask is None:
            mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
        if not bool(mask.any()):
            raise ValueError("times must hold at least one present observation; mask is all False")
        first = torch.where(mask, times, torch.inf).amin(dim=1)
        final = torch.where(mask, times, -torch.inf).amax(dim=1)
        span = float(torch.where(mask.any(dim=1), final - first, 0.0).max())
        if not 0.0 < span < float("inf"):
            raise ValueError(
                f"times must be finite and some series must last: the longest span is {span}. "
                "Set the unit by hand with TimeScale.set(reference, scale)"
            )
        self.set(float(first.min()), span)
        return self

    def forward(self, times: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the times in the unit of the data set, float64."""
        return (times.double() - self.reference) / self.scale

    def extra_repr(self) -> str:
        """Say both constants."""
        return f"reference={self.reference.item():g}, scale={self.scale.item():g}"
