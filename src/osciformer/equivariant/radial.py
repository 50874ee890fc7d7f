r"""Functions of the distance that are smooth at zero and at the cut-off.

A weight of degree l multiplies the harmonic $Y_l(\hat r)$, which has no value at r = 0. So the
bases start as $r^l$, and what is evaluated is $R_{nl}(r)/r^l$, an even and entire function, beside
the polynomial $r^l Y_l(\hat r)$: coincident points are nothing special, for gradients neither.
Distances are in units of the cut-off, and each function is scaled to a largest value of 1. (With
unit norm over the ball, as in the paper, narrow functions would dominate at short distance.)
"""

from __future__ import annotations

import math

import torch

from osciformer._types import Float, Tensor
from osciformer.ops._checks import check_choice

BASES = ("bessel", "gaussian")


def envelope(squared: Float[Tensor, "*E"]) -> Float[Tensor, "*E"]:
    """Return a weight that falls from 1 at zero to 0 at one, with two continuous derivatives.

    Args:
        squared: Square of a distance or gap in units of where it ends.

    Example:
        >>> envelope(torch.tensor([0.0, 0.5, 1.0, 2.0]))
        tensor([1.0000, 0.1250, 0.0000, 0.0000])
    """
    return (1.0 - squared).clamp(min=0.0) ** 3


def reduced_bessel(x: Float[Tensor, "*E"], degree: int) -> Float[Tensor, "L *E"]:
    r"""Return $j_l(x)/x^l$ for l up to `degree`, and x at least 0; $1/(2l + 1)!!$ at zero.

    Power series up to about the degree, above it the upward recurrence, which is stable there.

    Example:
        >>> reduced_bessel(torch.tensor([0.0, torch.pi]), 1)
        tensor([[ 1.0000e+00, -2.7828e-08],
                [ 3.3333e-01,  1.0132e-01]])
    """
    # The last term of the series is then below 1e-16 of the first.
    is_small = x < degree + 0.5
    near = torch.where(is_small, x, 0.0).square()
    far = torch.where(is_small, torch.pi, x)
    recurrence = [far.sin() / far]
    recurrence.append((recurrence[0] - far.cos()) / far.square())
    for l in range(1, degree):
        following = ((2 * l + 1) * recurrence[l] - recurrence[l - 1]) / far.square()
        recurrence.append(following)
    found = []
    for l in range(degree + 1):
        series = torch.zeros_like(x)
        for k in range(12 + degree, -1, -1):
            # sum of (-x^2 / 2)^k / (k! (2l + 2k + 1)!!)
            series = 1.0 - near * series / (2 * (k + 1) * (2 * l + 2 * k + 3))
        first = 1.0 / math.prod(range(1, 2 * l + 2, 2))
        found.append(torch.where(is_small, first * series, recurrence[l]))
    return torch.stack(found)


class RadialBasis:
    r"""Radial functions $R_{nl}$ divided by $r^l$, without their cut-off.

    `gaussian`: $r^l e^{-\beta_n r^2}$ with $\beta_n = 2^n$; `bessel`: $j_l(n \pi r)$.

    Args:
        name: `bessel` or `gaussian`.
        count: Number n of functions of each degree.
        degree: Largest degree L.
    """

    def __init__(self, name: str, count: int, degree: int) -> None:
        check_choice("basis", name, BASES)
        if count < 1:
            raise ValueError(f"num_radial must be at least 1; got {count}")
        self.name, self.count, self.degree = name, count, degree
        grid = torch.linspace(0.0, 1.0, 1025, dtype=torch.float64)
        powers = grid[:, None] ** torch.arange(degree + 1)
        heights = (self._unscaled(grid.square()) * powers[..., None]).abs().amax(dim=0)
        self.heights: Float[Tensor, "L n"] = heights

    def __call__(self, squared: Float[Tensor, "E"]) -> Float[Tensor, "E L n"]:
        """Return the functions at the square of distances in units of the cut-off."""
        return self._unscaled(squared) / self.heights.to(squared)

    def _unscaled(self, squared: Tensor) -> Tensor:
        steps = torch.arange(self.count, dtype=squared.dtype, device=squared.device)
        if self.name == "gaussian":
            same = torch.exp(-squared[:, None] * 2.0**steps)
            return same[:, None].expand(-1, self.degree + 1, -1)
        # The derivative of the root is infinite at zero, where that of the function is zero.
        is_zero = squared == 0
        distance = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squared).sqrt())
        turns = torch.pi * (steps + 1.0)
        return reduced_bessel(distance[:, None] * turns, self.degree).permute(1, 0, 2)
