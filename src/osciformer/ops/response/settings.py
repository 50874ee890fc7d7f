"""What drives the oscillators, and their spectra: modes and checks of arguments."""

from __future__ import annotations

from typing import Literal

import torch

from osciformer._types import Tensor
from osciformer.ops._checks import DeferredChecks, can_look, check_choice, check_float
from osciformer.ops.response.step import HOLD, KICKS, LINEAR, LINEAR_RATE, Push

DriveMode = Literal["linear", "hold", "impulse"]
DrivenBy = Literal["value", "rate"]
_PUSHES = {
    ("linear", "value"): LINEAR,
    ("hold", "value"): HOLD,
    ("impulse", "value"): KICKS,
    ("linear", "rate"): LINEAR_RATE,
    ("hold", "rate"): KICKS,  # by the jumps
}


def resolve_push(drive: str, of: str) -> Push:
    """Return how a drive acts; refuse one that does not exist."""
    check_choice("drive", drive, ("linear", "hold", "impulse"))
    check_choice("of", of, ("value", "rate"))
    if (drive, of) not in _PUSHES:
        raise ValueError("of='rate' needs a path; drive='impulse' has none: use 'linear' or 'hold'")
    return _PUSHES[drive, of]


def check_bank(omega: Tensor, zeta: Tensor, variables: int) -> tuple[Tensor, Tensor]:
    """Return spectra ``[K]`` or ``[F, K]`` as ``[1, K]`` or ``[F, K]`` float64; refuse bad ones."""
    for name, x in (("omega", omega), ("zeta", zeta)):
        check_float(name, x)
    try:
        shape = torch.broadcast_shapes(omega.shape, zeta.shape)
    except RuntimeError:
        shape = torch.Size()
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, variables)):
        raise ValueError(
            f"omega and zeta must broadcast to [K] or [F, K] with F = {variables} as in values,"
            f" got {list(omega.shape)} and {list(zeta.shape)}"
        )
    checks = DeferredChecks()
    for name, x, is_bad in (
        ("omega", omega, ~((omega > 0) & omega.isfinite())),
        ("zeta", zeta, ~((zeta >= 0) & zeta.isfinite())),
    ):
        if can_look(x):

            def refuse(name: str = name, x: Tensor = x, is_bad: Tensor = is_bad) -> None:
                sense = "above 0" if name == "omega" else "at least 0"
                got = x[is_bad].flatten()[0].item()
                raise ValueError(f"{name} must be finite and {sense}; got {got}")

            checks.add(is_bad.any(), refuse)
    checks.finish()
    shape = (*(1,) * (2 - len(shape)), *shape)
    return omega.double().expand(shape), zeta.double().expand(shape)
