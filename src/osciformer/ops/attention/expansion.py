r"""Rest positions and drives as further channels of plain oscillators.

A forced oscillator is its steady state plus a free oscillation. The steady state at a drive
frequency is itself an undamped oscillator of that frequency, and a rest position is one of
frequency zero. So a key with a rest position and M drive modes is 2 + M free oscillators a channel,
started from

$$x_m = \mathrm{Re}\,[H(\varpi_m) f_m], \quad
\dot x_m = \mathrm{Re}\,[i \varpi_m H(\varpi_m) f_m], \quad
f_m = (g_m - i h_m) \odot K_i,$$

and the free one from what is left of $(K_i, \dot K_i)$. Every algorithm for plain oscillators then
serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osciformer._types import Float, Tensor
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath

# Below this |1/H| relative to the drive frequency squared the split above is all cancellation.
_SMALLEST_DETUNING = 1e-6


@dataclass(frozen=True)
class Oscillators:
    """Free oscillators, `groups` of them a channel, laid out ``[B, N, H, groups * C]``."""

    start: Tensor
    velocity: Tensor | None
    omega: Tensor
    zeta: Tensor
    groups: int

    def collapse(self, out: Tensor) -> Tensor:
        """Add up the groups of ``[..., groups * C]``."""
        return out if self.groups == 1 else out.unflatten(-1, (self.groups, -1)).sum(-2)


def is_resonant(drive: Drive | None, role: Role, omega: Tensor, zeta: Tensor) -> bool:
    """Return whether a drive hits an undamped channel at its own frequency (looks at values)."""
    gains = None if drive is None else drive.gains(role)
    if gains is None:
        return False
    mode = gains[0].detach()[..., None]
    real, imag = _detuning(mode, omega.detach()[:, None], zeta.detach()[:, None])
    return bool((torch.hypot(real, imag) < _SMALLEST_DETUNING * mode * mode).any())


def _detuning(mode: Tensor, omega: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
    return (omega - mode) * (omega + mode), 2.0 * zeta * omega * mode


def expand_channels(
    x: Float[Tensor, "B N H C"],
    velocity: Float[Tensor, "B N H C"] | None,
    omega: Float[Tensor, "H C"],
    zeta: Float[Tensor, "H C"],
    equilibrium: Float[Tensor, "B N H C"] | None,
    drive: Drive | None,
    role: Role,
) -> Oscillators:
    """Return tokens with rest positions and drives as free oscillators.

    Args:
        x: Tokens at their own times.
        velocity: Their initial velocities; None is 0.
        omega: Natural frequencies.
        zeta: Damping ratios.
        equilibrium: Rest positions; None is 0.
        drive: Forces; None is none.
        role: Whose gains of the drive to use.
    """
    gains = None if drive is None else drive.gains(role)
    if equilibrium is None and gains is None:
        return Oscillators(x, velocity, omega, zeta, 1)
    start = x.double()
    speed = torch.zeros_like(start) if velocity is None else velocity.double()
    starts, speeds, omegas, zetas = [], [], [], []
    free_start, free_speed = start, speed
    if equilibrium is not None:
        rest = equilibrium.double()
        free_start = free_start - rest
        starts.append(rest)
        speeds.append(torch.zeros_like(rest))
        omegas.append(torch.zeros_like(omega))
        zetas.append(torch.zeros_like(zeta))
    if gains is not None:
        mode, cos, sin = (g.double() for g in gains)
        real, imag = _detuning(mode[..., None], omega.double()[:, None], zeta.double()[:, None])
        size = real * real + imag * imag
        # H (g - i h) with H = (real - i imag) / size
        in_phase = (real * cos - imag * sin) / size
        quadrature = -(real * sin + imag * cos) / size
        for m in range(mode.shape[-1]):
            position = start * in_phase[:, m]
            rate = -start * quadrature[:, m] * mode[:, m, None]
            free_start, free_speed = free_start - position, free_speed - rate
            starts.append(position)
            speeds.append(rate)
            omegas.append(mode[:, m, None].expand(omega.shape).to(omega.dtype))
            zetas.append(torch.zeros_like(zeta))
    return Oscillators(
        torch.cat([free_start, *starts], dim=-1),
        torch.cat([free_speed, *speeds], dim=-1),
        torch.cat([omega, *omegas], dim=-1),
        torch.cat([zeta, *zetas], dim=-1),
        1 + len(starts),
    )


def expand_path(path: QueryPath, groups: int) -> QueryPath:
    """Return the path that asks every group of channels the same."""
    if groups == 1:
        return path

    def repeated(x: Tensor) -> Tensor:
        return torch.cat([x] * groups, dim=-1)

    if isinstance(path, ConstantPath):
        return ConstantPath(repeated(path.q))
    if isinstance(path, LinearPath):
        return LinearPath(repeated(path.q), path.times)
    return SinusoidPath(
        path.omega,
        None if path.constant is None else repeated(path.constant),
        repeated(path.cos),
        repeated(path.sin),
        path.origin,
    )
