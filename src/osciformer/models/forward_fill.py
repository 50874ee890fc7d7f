"""What is known at a time: last values, their ages, and the baseline predictions they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from osciformer._types import Bool, Float, Mask, QueryTimes, Tensor, Times, Values
from osciformer.nn.parameters import ExactBuffers
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import clean_times


def forward_fill(values: Values, times: Times, mask: Mask | None = None) -> tuple[Values, Values]:
    """Return, for each row and feature, the last measured value and the time since it was measured.

    Args:
        values: Values `[B, N, F]`; NaN is a missing one.
        times: Their times `[B, N]`, not decreasing among the present rows of a series.
        mask: True where a row is present `[B, N]`; other rows hold no measurements.

    Returns:
        The last values and their ages `[B, N, F]`, in the dtype of the values and the unit of the
        times; NaN as long as a feature was never measured. The age is 0 at a measurement.

    Example:
        >>> nan = float("nan")
        >>> values = torch.tensor([[[nan], [5.0], [nan]]])
        >>> last, age = forward_fill(values, torch.tensor([[0.0, 1.0, 3.5]]))
        >>> last.flatten(), age.flatten()
        (tensor([nan, 5., 5.]), tensor([   nan, 0.0000, 2.5000]))
    """
    measured = ~values.isnan() if mask is None else ~values.isnan() & mask[..., None]
    times = clean_times(times, mask)
    rows = torch.arange(values.shape[1], device=values.device)[:, None]
    # One row index for both: -1 stands for "never measured".
    index = torch.where(measured, rows, -1).cummax(dim=1).values
    unknown, index = index < 0, index.clamp(min=0)
    last = values.gather(1, index).masked_fill(unknown, torch.nan)
    since = times[..., None].expand(values.shape)
    age = (since - since.gather(1, index)).to(values.dtype)
    return last, age.masked_fill(unknown, torch.nan)


def known_at(
    values: Values, times: Times, query_times: QueryTimes, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Return values and ages as `forward_fill` does, at query times in any order."""
    last, age = forward_fill(values, times, mask)
    times = clean_times(times, mask)
    held = last_observation(times, query_times, mask)
    last, age, since = (take_tokens(x, held, fill=torch.nan) for x in (last, age, times[..., None]))
    return last, age + (query_times[..., None] - since).to(age.dtype)


def known_after(
    values: Values, times: Times, query_times: QueryTimes, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Return the next values and the times until then: `known_at` with time reversed."""
    flipped = None if mask is None else mask.flip(1)
    return known_at(values.flip(1), -times.flip(1), -query_times, flipped)


class AgeScale(ExactBuffers):
    r"""Ages as $\log(1 + \mathrm{age} / g)$, g the median gap between rows in training."""

    gap: Tensor

    def __init__(self, gap: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("gap", torch.tensor(float(gap), dtype=torch.float64))

    def fit(self, times: Times, mask: Mask | None = None) -> AgeScale:
        """Set the gap to the median of the positive ones; keep it if there is none."""
        gaps = positive_gaps(times, mask)
        if len(gaps):
            self.gap.fill_(gaps.median())
        return self

    def forward(self, age: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the scaled ages, in the dtype of `age`; NaN stays NaN."""
        return nn.functional.relu(age / self.gap.to(age.dtype)).log1p()

    def extra_repr(self) -> str:
        """Show the gap."""
        return f"gap={self.gap.item():g}"


def positive_gaps(times: Times, mask: Mask | None = None) -> Float[Tensor, "G"]:
    """Return all positive gaps between neighbouring present rows, float64."""
    gaps = clean_times(times.detach().double(), mask).diff(dim=1)
    return gaps[gaps > 0]


@dataclass(frozen=True)
class BaselinePrediction:
    """Simple predictions at query times; 0, the mean of scaled values, where nothing is known."""

    base: Float[Tensor, "B M F"]  # last known value, or in both directions linear interpolation
    level: Float[Tensor, "B M F"]  # mean of the values known, until the time or of the series
    distance: Float[Tensor, "B M F"]  # scaled time to the nearest known value; 0 if there is none
    columns: Float[Tensor, "B M P"]  # for a network: values, times to them, whether they are known

    @staticmethod
    def num_columns(input_dim: int, direction: str) -> int:
        """Return the number P of columns for F features."""
        return input_dim * (4 if direction == "causal" else 8)


def baseline_prediction(
    values: Values,
    times: Times,
    query_times: QueryTimes,
    mask: Mask,
    *,
    direction: str,
    age_scale: AgeScale,
) -> BaselinePrediction:
    """Return baseline predictions; `causal` ones use measurements until a query time alone."""
    last, age = known_at(values, times, query_times, mask)
    is_known = ~last.isnan()
    last, age = last.nan_to_num(0.0), age.nan_to_num(0.0)
    scaled = age_scale(age)
    if direction == "causal":
        held = last_observation(clean_times(times, mask), query_times, mask)
        level = take_tokens(_running_mean(values), held)
        columns = torch.cat((last, level, scaled, is_known.to(last.dtype)), dim=-1)
        return BaselinePrediction(last, level, scaled, columns)

    coming, until = known_after(values, times, query_times, mask)
    is_coming = ~coming.isnan()
    coming, until = coming.nan_to_num(0.0), until.nan_to_num(0.0)
    base = _between(last, age, coming, until, is_known, is_coming)
    level = _running_mean(values)[:, -1:].expand_as(base).nan_to_num(0.0)
    ahead = age_scale(until)
    nearest = torch.where(is_known, torch.where(is_coming, scaled.minimum(ahead), scaled), ahead)
    signs = (is_known.to(last.dtype), is_coming.to(last.dtype))
    columns = torch.cat((last, coming, base, level, scaled, ahead), dim=-1)
    return BaselinePrediction(base, level, nearest, torch.cat((columns, *signs), dim=-1))


def deviations(
    values: Values, times: Times, query_times: QueryTimes, mask: Mask
) -> tuple[Float[Tensor, "B M F"], Bool[Tensor, "B M F"]]:
    """Return how far features measured at a time are from the line between their neighbours.

    What is measured together deviates together. A feature that is not measured at the query time,
    or never before and after it, deviates by 0; the second result says which ones are measured.

    Example:
        >>> values, times = torch.tensor([[[1.0], [5.0], [3.0]]]), torch.tensor([[0.0, 1.0, 2.0]])
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> deviations(values, times, torch.tensor([[0.5, 1.0]]), mask)[0].flatten()
        tensor([0., 3.])
    """
    value, age = known_at(values, times, query_times, mask)
    is_measured = age == 0
    far = torch.full_like(query_times, torch.inf)
    last, age = known_at(values, times, query_times.nextafter(-far), mask)
    coming, until = known_after(values, times, query_times.nextafter(far), mask)
    signs = ~last.isnan(), ~coming.isnan()
    last, age, coming, until = (x.nan_to_num(0.0) for x in (last, age, coming, until))
    line = _between(last, age, coming, until, *signs)
    has_line = is_measured & (signs[0] | signs[1])
    return torch.where(has_line, value - line, 0.0), is_measured


def _between(
    last: Tensor, age: Tensor, coming: Tensor, until: Tensor, is_known: Tensor, is_coming: Tensor
) -> Float[Tensor, "B M F"]:
    """Return the line between two values; if only one is known, that one."""
    # At a measurement both sides agree.
    share = torch.where(is_known, age, 1.0) / torch.where(is_known & is_coming, age + until, 1.0)
    share = torch.where(is_coming, share, 0.0).nan_to_num(0.0)
    return torch.lerp(last, coming, share)


def _running_mean(values: Values) -> Values:
    """Return the mean of the values measured so far; 0 before the first one."""
    measured = ~values.isnan()
    total = torch.where(measured, values, 0.0).cumsum(dim=1)
    return total / measured.cumsum(dim=1).clamp(min=1)
