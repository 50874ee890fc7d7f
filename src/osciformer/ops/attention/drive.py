"""Sinusoidal forcing of the key and value oscillators."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from osciformer._types import Tensor

Role = Literal["key", "value"]

# How much larger than the response its two parts, or their slopes, may be: float64 arithmetic then
# leaves errors of about 1e-11 for float64 tokens, and of 1e-7 for others.
_LARGEST_PARTS, _LARGEST_PARTS_SINGLE = 1e5, 1e9


@dataclass(frozen=True)
class Drive:
    r"""Forces that start with each token and scale with its own content.

    Token i, in every channel, is pushed by

    $$F_i(s) = \sum_m (g_m \odot K_i) \cos(\varpi_m s) + (h_m \odot K_i) \sin(\varpi_m s),
      \qquad s = t - t_i,$$

    with $V_i$ in place of $K_i$ for values. The response has zero position and velocity at
    `s = 0`, so a drive never changes the token's own initial state. The phase counts from the
    token, which makes the layer invariant to a shift of all times.

    Attributes:
        omega: Drive frequencies, shared by all heads `[Md]` or per head `[H, Md]`.
        key_cos: Gains g of the keys `[H, Md, C]`; None is zero. The other gains alike.
        key_sin: Gains h of the keys.
        value_cos: Gains g of the values.
        value_sin: Gains h of the values.
    """

    omega: Tensor
    key_cos: Tensor | None = None
    key_sin: Tensor | None = None
    value_cos: Tensor | None = None
    value_sin: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse integers, and gains whose shape does not follow from `omega`."""
        shape = list(self.omega.shape)
        for field in fields(self):
            x = getattr(self, field.name)
            if x is not None and not x.is_floating_point():
                raise TypeError(
                    f"drive.{field.name} must be a floating-point tensor, got {x.dtype}"
                )
            if field.name == "omega" and x.ndim not in (1, 2):
                raise ValueError(f"drive.omega must have shape [Md] or [H, Md], got {shape}")
            if field.name == "omega" or x is None:
                continue
            if x.ndim != 3 or list(x.shape[2 - len(shape) : 2]) != shape:
                raise ValueError(
                    f"drive.{field.name} must have shape [H, Md, C] with Md = {shape[-1]} modes as"
                    f" in drive.omega {shape}, got {list(x.shape)}"
                )

    def gains(self, role: Role) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `(omega [H, Md], cos [H, Md, C], sin [H, Md, C])`, or None if nothing is driven.

        Example:
            >>> drive = Drive(torch.tensor([1.0, 2.0]), key_cos=torch.ones(3, 2, 4))
            >>> [tuple(x.shape) for x in drive.gains("key")], drive.gains("value")
            ([(3, 2), (3, 2, 4), (3, 2, 4)], None)
        """
        cos, sin = getattr(self, f"{role}_cos"), getattr(self, f"{role}_sin")
        given = cos if cos is not None else sin
        if given is None:
            return None
        cos = torch.zeros_like(given) if cos is None else cos
        sin = torch.zeros_like(given) if sin is None else sin
        return self.omega.expand(given.shape[:2]), cos, sin

    def loses_digits(self, role: Role, omega: Tensor, zeta: Tensor, dtype: torch.dtype) -> bool:
        r"""Return whether steady state and free oscillation are too large to be split (reads them).

        Each has the size $|H|$, its slopes in the frequencies and in the damping the size
        $|H|^2 |\partial(1/H)|$, while the response, their difference, stays bounded: near an
        undamped resonance, and of slow channels under a slow drive, it is all cancellation.

        Args:
            role: Whose drive.
            omega: Natural frequencies of that role `[H, C]`.
            zeta: Their damping ratios `[H, C]`.
            dtype: Of the tokens, which decides how many digits are wanted.
        """
        gains = self.gains(role)
        if gains is None:
            return False
        mode = gains[0].detach().double().abs()[..., None]
        omega, zeta = (x.detach().double()[:, None] for x in (omega, zeta))
        gain = torch.hypot(*detuning(mode, omega, zeta)).reciprocal()
        slope = 2.0 * torch.maximum(mode, omega) * (1.0 + zeta)
        limit = _LARGEST_PARTS if dtype == torch.float64 else _LARGEST_PARTS_SINGLE
        # Not `>`: at rest under a constant force, infinity times zero is NaN.
        return not bool((gain * (1.0 + gain * slope) <= limit).all())


def detuning(mode: Tensor, omega: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
    """Return real and imaginary part of 1/H, the inverse of the transfer function."""
    return (omega - mode) * (omega + mode), 2.0 * zeta * omega * mode
