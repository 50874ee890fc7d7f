"""What is known at a time: the last value of each feature and its age."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.nn.exact import ExactBuffers
from osciformer.nn.timeline import last_observation
from osciformer.ops.padding import clean_times


def carry_forward(
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
    mask: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B N F"], Float[Tensor, "B N F"]]:
    """Return, for each row and feature, the last measured value and the time since it was measured.

    Nothing later than a row reaches it. Differences of times are taken in the dtype of the times.

    Args:
        values: Values; NaN is a missing one.
        times: Their times, not decreasing among the present rows of a series.
        mask: True where a row is present; other rows hold no measurements, whatever is in them.

    Returns:
        The last values and their ages, in the dtype of the values and the unit of the times; both
        are NaN as long as a feature was never measured, and the age is 0 at a measurement.

    Example:
        >>> nan = float("nan")
        >>> values = torch.tensor([[[nan], [5.0], [nan]]])
        >>> last, age = carry_forward(values, torch.tensor([[0.0, 1.0, 3.5]]))
        >>> last.flatten(), age.flatten()
        (tensor([nan, 5., 5.]), tensor([   nan, 0.0000, 2.5000]))
    """
    measured = ~values.isnan()
    if mask is not None:
        measured = measured & mask[..., None]
    times = clean_times(times, mask)
    rows = torch.arange(values.shape[1], device=values.device)[:, None]
    # One row index for both: -1 stands for "never measured".
    index = torch.where(measured, rows, -1).cummax(dim=1).values
    unknown = index < 0
    index = index.clamp(min=0)
    last = values.gather(1, index).masked_fill(unknown, torch.nan)
    since = times[..., None].expand(values.shape)
    age = (since - since.gather(1, index)).to(values.dtype)
    return last, age.masked_fill(unknown, torch.nan)


def known_at(
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
    query_times: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B M F"], Float[Tensor, "B M F"]]:
    """Return the last value of each feature at or before the query times, and its age there.

    Args:
        values: Values; NaN is a missing one.
        times: Their times, not decreasing among the present rows of a series.
        query_times: Times in any order.
        mask: True where a row is present.

    Returns:
        Values and ages as those of `carry_forward`, at the query times.

    Example:
        >>> values, times = torch.tensor([[[5.0], [7.0]]]), torch.tensor([[0.0, 1.0]])
        >>> known_at(values, times, torch.tensor([[0.5, 3.0]]))
        (tensor([[[5.], [7.]]]), tensor([[[0.5000], [2.0000]]]))
    """
    last, age = carry_forward(values, times, mask)
    times = clean_times(times, mask)
    held = last_observation(times, query_times, mask)
    moved = query_times - take_rows(times[..., None], held)[..., 0]
    return take_rows(last, held), take_rows(age, held) + moved[..., None].to(age.dtype)


def known_after(
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
    query_times: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B M F"], Float[Tensor, "B M F"]]:
    """Return the next value of each feature at or after the query times, and the time until then.

    Arguments and results are those of `known_at` with time reversed.

    Example:
        >>> values, times = torch.tensor([[[5.0], [7.0]]]), torch.tensor([[0.0, 1.0]])
        >>> known_after(values, times, torch.tensor([[0.25, 3.0]]))
        (tensor([[[7.], [nan]]]), tensor([[[0.7500], [   nan]]]))
    """
    flipped = None if mask is None else mask.flip(1)
    return known_at(values.flip(1), -times.flip(1), -query_times, flipped)


def take_rows(x: Float[Tensor, "B N F"], index: Tensor) -> Float[Tensor, "B M F"]:
    """Return `x[b, index[b, m]]`, and NaN where the index is -1."""
    if x.shape[1] == 0:
        return x.new_full((*index.shape, x.shape[2]), torch.nan)
    picked = x.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
    return picked.masked_fill((index < 0)[..., None], torch.nan)


class AgeScale(ExactBuffers):
    r"""Ages as $\log(1 + \mathrm{age} / g)$, g the median gap between rows of the training series.

    The constant is a float64 buffer that keeps its precision when the model changes its dtype.

    Args:
        gap: The gap g, positive.

    Example:
        >>> scale = AgeScale().fit(torch.tensor([[0.0, 2.0, 4.0, 4.0, 9.0]]))
        >>> scale(torch.tensor([0.0, 2.0]))
        tensor([0.0000, 0.6931])
    """

    gap: Tensor

    def __init__(self, gap: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("gap", torch.tensor(float(gap), dtype=torch.float64))

    def fit(self, times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None = None) -> AgeScale:
        """Set the gap to the median of the positive ones; keep it where there is none."""
        gaps = positive_gaps(times, mask)
        if len(gaps):
            self.gap.fill_(gaps.median())
        return self

    def forward(self, age: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the scaled ages, in the dtype of `age`; NaN stays NaN."""
        return nn.functional.relu(age / self.gap.to(age.dtype)).log1p()

    def extra_repr(self) -> str:
        """Say the gap."""
        return f"gap={self.gap.item():g}"


def positive_gaps(
    times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None = None
) -> Float[Tensor, "G"]:
    """Return all positive gaps between neighbouring present rows, float64.

    Example:
        >>> positive_gaps(torch.tensor([[0.0, 2.0, 2.0, 5.0]]))
        tensor([2., 3.], dtype=torch.float64)
    """
    gaps = clean_times(times.detach().double(), mask).diff(dim=1)
    return gaps[gaps > 0]
