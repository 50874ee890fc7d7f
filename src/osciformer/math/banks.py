"""Frequency banks: the fixed frequencies on which query paths and drives are expanded."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from osciformer._types import Bool, Float, Tensor

BankKind = Literal[
    "log_uniform", "log_spaced", "linear", "random_uniform", "geometric", "harmonics", "data"
]

# Share of the gaps that may be shorter than the gap which sets the highest frequency: one pair of
# nearly simultaneous tokens must not decide the whole bank.
_SMALL_GAP_QUANTILE = 0.05


def frequency_range(
    times: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None = None
) -> tuple[float, float]:
    r"""Return the lowest and highest frequency that the times of a data set can resolve.

    $$\omega_{low} = \pi / \max_b (\text{span of series } b), \qquad
    \omega_{high} = \pi / (\text{5 \% quantile of the positive gaps})$$
    The low end makes half a turn over the longest series, the high end is the Nyquist frequency of
    a short gap. Gaps are taken between neighbouring distinct times within a series and pooled.

    Args:
        times: Times, in any order within a series.
        mask: True where a token is present. Absent tokens may hold any value, NaN included.

    Returns:
        `(low, high)` in radians per unit of time, `low <= high`.

    Example:
        >>> low, high = frequency_range(torch.tensor([[0.0, 1.0, 2.0, 4.0]]))
        >>> round(low, 4), round(high, 4)
        (0.7854, 3.1416)
    """
    times = times.detach().double()
    if mask is None:
        mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
    if mask.shape != times.shape:
        raise ValueError(
            f"mask must have the shape of times, {tuple(times.shape)}; got {tuple(mask.shape)}"
        )
    bad = (mask & ~times.isfinite()).nonzero()
    if len(bad):
        where = tuple(bad[0].tolist())
        raise ValueError(
            f"times must be finite where mask is True; times{list(where)} = {times[where].item()}"
        )
    # Padding sorts last: the gap to it is infinite, or NaN between two of it.
    gaps = torch.where(mask, times, torch.inf).sort(dim=-1).values.diff(dim=-1)
    gaps = gaps[(gaps > 0) & gaps.isfinite()].sort().values
    if len(gaps) == 0:
        raise ValueError(
            "times must hold a series with two distinct present times to have a time scale; "
            f"got {int(mask.sum())} present tokens in {mask.shape[0]} series and no positive gap. "
            "Give low and high explicitly with another kind of bank"
        )
    first = torch.where(mask, times, torch.inf).amin(-1)
    final = torch.where(mask, times, -torch.inf).amax(-1)
    span = float((final - first).max())
    gap = float(gaps[int(_SMALL_GAP_QUANTILE * (len(gaps) - 1))])
    return math.pi / span, math.pi / gap


def frequency_bank(
    kind: BankKind,
    num_modes: int,
    *,
    low: float = 1e-2,
    high: float = 10.0,
    length: float | None = None,
    times: Float[Tensor, "B N"] | None = None,
    mask: Bool[Tensor, "B N"] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "J"]:
    r"""Return a bank of `num_modes` positive frequencies in increasing order.

    | kind | frequencies |
    | --- | --- |
    | `log_spaced` | equal ratios from `low` to `high`, both included |
    | `linear` | equal steps from `low` to `high`, both included |
    | `log_uniform` | random, uniform in $\log\omega$ on `[low, high]` |
    | `random_uniform` | random, uniform in $\omega$ on `[low, high]` |
    | `geometric` | octaves downwards from `high`: high, high/2, high/4, ...; `low` is not used |
    | `harmonics` | $n\pi/L$, n = 1..J, L = `length`: the half-range grid of the paper's theorem |
    | `data` | `log_spaced` over `frequency_range(times, mask)` |

    A single `log_spaced`, `data` or `linear` mode sits at the geometric or arithmetic mean.

    Args:
        kind: One of the kinds above.
        num_modes: Number of frequencies J, at least 1.
        low: Lowest frequency, in radians per unit of time.
        high: Highest frequency.
        length: Length L of the time interval; for `harmonics`.
        times: Times of the training part of the data set; for `data`.
        mask: True where a token of `times` is present; for `data`.
        generator: Source of randomness; for `log_uniform` and `random_uniform`.

    Returns:
        The frequencies in float64, on the CPU or the device of `times` or `generator`.

    Example:
        >>> frequency_bank("geometric", 4, high=8.0).tolist()
        [1.0, 2.0, 4.0, 8.0]
    """
    allowed = get_args(BankKind)
    if kind not in allowed:
        raise ValueError(f"kind must be one of {', '.join(allowed)}; got {kind!r}")
    if num_modes < 1:
        raise ValueError(f"num_modes must be at least 1; got {num_modes}")
    if kind == "harmonics":
        if length is None or not (math.isfinite(length) and length > 0):
            raise ValueError(
                f"length must be a positive number for the kind 'harmonics'; got {length}"
            )
        return torch.arange(1, num_modes + 1, dtype=torch.float64) * (math.pi / length)
    if kind == "geometric":
        if not 0.0 < high < math.inf:
            raise ValueError(f"high must be positive and finite; got high={high}")
        octaves = torch.arange(num_modes - 1, -1, -1, dtype=torch.float64)
        return high * torch.exp2(-octaves)
    is_random = kind in ("log_uniform", "random_uniform")
    device = torch.device("cpu") if generator is None or not is_random else generator.device
    if kind == "data":
        if times is None:
            raise ValueError("times must be given for the kind 'data'; got None")
        (low, high), device = frequency_range(times, mask), times.device
    if not (0.0 < low <= high < math.inf):
        raise ValueError(f"low and high must satisfy 0 < low <= high; got low={low}, high={high}")
    # Places of the frequencies between both ends, from 0 to 1.
    if is_random:
        places = torch.rand(num_modes, generator=generator, dtype=torch.float64, device=device)
        places = places.sort().values
    elif num_modes == 1:
        places = torch.tensor([0.5], dtype=torch.float64, device=device)
    else:
        places = torch.linspace(0.0, 1.0, num_modes, dtype=torch.float64, device=device)
    is_log = kind in ("log_uniform", "log_spaced", "data")
    bank = low * (places * math.log(high / low)).exp() if is_log else low + (high - low) * places
    return bank.clamp(low, high)  # the last value may exceed high by a rounding error
