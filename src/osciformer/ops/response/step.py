"""One step of a driven oscillator in plain differentiable PyTorch: the readable definition."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from osciformer._types import Float, Tensor
from osciformer.math.oscillator import moments


class Response(NamedTuple):
    """Positions and velocities of oscillators, alike in shape."""

    position: Float[Tensor, "*B F K"]
    velocity: Float[Tensor, "*B F K"]


class Push(NamedTuple):
    """How the drive acts: as a level within gaps, by its slope within gaps, as kicks at rows."""

    has_level: bool
    slope: Literal["value", "rate"] | None  # a force of omega^2 u, or of omega u'
    has_kicks: bool


LINEAR, HOLD = Push(True, "value", False), Push(True, None, False)
LINEAR_RATE, KICKS = Push(False, "rate", False), Push(False, None, True)
PUSHES = (LINEAR, HOLD, LINEAR_RATE, KICKS)


def advance(
    state: Response,
    level: Float[Tensor, "*B F 1"],
    change: Float[Tensor, "*B F 1"],
    s: Float[Tensor, "*B #F 1"],
    omega: Float[Tensor, "#F K"],
    zeta: Float[Tensor, "#F K"],
    push: Push,
) -> Response:
    """Return the state after a gap `s`, within which the drive goes straight from `level` on.

    `change` is what the drive gains over the gap. All are float64. A gap of 0 leaves the state as
    it is, but for a change that drives by its rate: that is a kick.
    """
    m = moments(s, omega, zeta)
    square, twice_gamma = omega * omega, 2.0 * zeta * omega
    x, v = state
    pull = level - x if push.has_level else -x
    after_x = x + square * m.i12 * pull + m.g12 * v
    after_v = v - (square * m.i12 + twice_gamma * m.g12) * v + square * m.g12 * pull
    is_gap = s > 0
    safe = torch.where(is_gap, s, 1.0)
    # At s = 0 their limits, with the derivatives from the right.
    mean_i12 = torch.where(is_gap, m.i12 / safe, 0.5 * s)
    if push.slope == "value":
        after_x = after_x + square * (m.k12 / safe) * change
        after_v = after_v + square * mean_i12 * change
    elif push.slope == "rate":
        mean_g12 = torch.where(is_gap, m.g12 / safe, 1.0 - 0.5 * twice_gamma * s)
        after_x = after_x + omega * mean_i12 * change
        after_v = after_v + omega * mean_g12 * change
    return Response(after_x, after_v)


def run_rows(
    drive: Float[Tensor, "B N F"],
    gaps: Float[Tensor, "B N"],
    omega: Float[Tensor, "#F K"],
    zeta: Float[Tensor, "#F K"],
    initial: Response,
    push: Push,
) -> Response:
    """Return the states at all rows, one row after the other: what all backends compute."""
    rows, state = [], Response(*(z.double() for z in initial))
    path = drive.double().unsqueeze(-1)
    for n in range(drive.shape[1]):
        level = path[:, n]
        change = path[:, min(n + 1, drive.shape[1] - 1)] - level
        if push.has_kicks:
            state = Response(state.position, state.velocity + omega * level)
        rows.append(state)
        state = advance(state, level, change, gaps[:, n, None, None], omega, zeta, push)
    return Response(*(torch.stack(z, dim=1).to(drive.dtype) for z in zip(*rows, strict=True)))
