"""Random continuous paths with a known Lipschitz constant, and how many cases a test draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from osciformer.theory.realisation import Path

#: A share of the cases runs by default, all of them with `-m slow`.
NUM_CASES = [
    pytest.param(25, id="some"),
    pytest.param(1000, id="thousand", marks=pytest.mark.slow),
]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def whole(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def waves(
    generator: torch.Generator, width: int, *, has_corner: bool = False
) -> tuple[Path, float]:
    """Return three random sinusoids a channel, perhaps with a corner, and a Lipschitz constant."""
    scale = uniform(generator, 0.2, 1.5)
    amplitude, rate, phase = (normal(generator, 3, width) for _ in range(3))
    amplitude, rate = scale * amplitude, 3.0 * rate
    centre = uniform(generator, 0.0, 2.0)
    corner = (0.5 if has_corner else 0.0) * normal(generator, width)

    def path(t: Tensor) -> Tensor:
        smooth = (amplitude * torch.sin(rate * t[:, None, None] + phase)).sum(dim=1)
        return smooth + corner * (t[:, None] - centre).abs()

    return path, float(((amplitude * rate).abs().sum(dim=0) + corner.abs()).norm())


def zigzag(generator: torch.Generator, width: int, length: float) -> tuple[Path, float]:
    """Return straight lines through random points of [0, length], and their steepest slope."""
    knots = whole(generator, 1, 6)
    values = normal(generator, knots + 1, width)

    def path(t: Tensor) -> Tensor:
        place = (t / length * knots).clamp(0, knots)
        left = place.floor().clamp(max=knots - 1).long()
        return values[left] + (place - left)[:, None] * (values[left + 1] - values[left])

    return path, float(values.diff(dim=0).norm(dim=-1).max()) * knots / length


def sup(values: Tensor) -> float:
    """Return the largest Euclidean norm of rows."""
    return float(values.norm(dim=-1).max())
