r"""Oscillators in motion: their state at a common time, moved over a gap and integrated over it.

Over a gap the path of every oscillator is linear in what it has at the start: displacement,
velocity, rest position and drive. So one set of weights per head and channel, from the closed forms
of `math`, serves all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from osciformer._types import Complex, Float, Tensor
from osciformer.math.driven import driven_averages, driven_integrals, driven_response
from osciformer.math.integrals import modulated_averages, phi1
from osciformer.math.oscillator import moments, propagator

Gains = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Motion:
    """Keys or values at the current time, float64.

    Attributes:
        position: Displacement from rest.
        velocity: Velocity.
        rest: Rest position.
        force: Complex amplitude of each drive at the phase it has reached; None without drive.
    """

    position: Float[Tensor, "B N H C"]
    velocity: Float[Tensor, "B N H C"]
    rest: Float[Tensor, "B N H C"]
    force: Complex[Tensor, "B N H Md C"] | None


@dataclass(frozen=True)
class Medium:
    """What moves them: spectra, and the drive `(omega [H, Md], cos, sin [H, Md, C])` if any."""

    omega: Float[Tensor, "H C"]
    zeta: Float[Tensor, "H C"]
    gains: Gains | None = None

    @property
    def driven(self) -> tuple[Tensor, Tensor, Tensor]:
        """Drive frequencies `[H, Md, 1]` and spectra `[H, 1, C]` that broadcast with them."""
        assert self.gains is not None
        return self.gains[0][..., None], self.omega[:, None], self.zeta[:, None]


class GapWeights(NamedTuple):
    """What each part of a motion contributes to an integral over a gap."""

    position: Float[Tensor, "B H C"]
    velocity: Float[Tensor, "B H C"]
    rest: Float[Tensor, "B #H #C"]
    force: Complex[Tensor, "B H Md C"] | None


def start_motion(
    start: Float[Tensor, "B G H C"],
    velocity: Float[Tensor, "B G H C"] | None,
    rest: Float[Tensor, "B G H C"] | None,
    medium: Medium,
) -> Motion:
    """Return tokens at the moment they start."""
    start = start.double()
    still = torch.zeros_like(start)
    rest = still if rest is None else rest.double()
    force = None
    if medium.gains is not None:
        _, cos, sin = medium.gains
        force = start[:, :, :, None] * torch.complex(cos, -sin)
    return Motion(start - rest, still if velocity is None else velocity.double(), rest, force)


def join(a: Motion, b: Motion) -> Motion:
    """Return the tokens of both."""
    force = None
    if a.force is not None and b.force is not None:
        force = torch.cat((a.force, b.force), dim=1)
    return Motion(
        torch.cat((a.position, b.position), dim=1),
        torch.cat((a.velocity, b.velocity), dim=1),
        torch.cat((a.rest, b.rest), dim=1),
        force,
    )


def move(motion: Motion, gap: Float[Tensor, " B"], medium: Medium) -> Motion:
    """Return the motion after a gap."""
    delta = gap[:, None, None]
    g11, g12, g21, g22 = (g[:, None] for g in propagator(delta, medium.omega, medium.zeta))
    position = g11 * motion.position + g12 * motion.velocity
    velocity = g21 * motion.position + g22 * motion.velocity
    force = motion.force
    if force is not None:
        drive_omega, omega, zeta = medium.driven
        delta = delta[..., None]
        pushed, sped = driven_response(delta, drive_omega, omega, zeta)
        position = position + _push(force, pushed)
        velocity = velocity + _push(force, sped)
        phase = drive_omega * delta
        force = force * torch.polar(torch.ones_like(phase), phase)[:, None]
    return Motion(position, velocity, motion.rest, force)


def plain_weights(gap: Float[Tensor, " B"], medium: Medium) -> GapWeights:
    r"""Return the weights of $\int_0^\delta k(T + s)\, ds$."""
    delta = gap[:, None, None]
    m = moments(delta, medium.omega, medium.zeta)
    # Integrating the equation of motion: no difference of large numbers for long gaps.
    position = m.g12 + 2.0 * medium.zeta * medium.omega * m.i12
    force = None
    if medium.gains is not None:
        force, _ = driven_integrals(delta[..., None], *medium.driven)
    return GapWeights(position, m.i12, delta, force)


def ramp_weights(gap: Float[Tensor, " B"], medium: Medium) -> GapWeights:
    r"""Return the weights of $\int_0^\delta (s / \delta)\, k(T + s)\, ds$, zero at a zero gap."""
    delta = gap[:, None, None]
    m = moments(delta, medium.omega, medium.zeta)
    inverse = torch.where(delta > 0, 1.0 / torch.where(delta > 0, delta, 1.0), 0.0)
    two_gamma = 2.0 * medium.zeta * medium.omega
    position = m.g12 + two_gamma * m.i12 - (m.i12 + two_gamma * m.k12) * inverse
    velocity = m.i12 - m.k12 * inverse
    force = None
    if medium.gains is not None:
        once, twice = driven_integrals(delta[..., None], *medium.driven)
        force = once - twice * inverse[..., None]
    return GapWeights(position, velocity, 0.5 * delta, force)


def integral(weights: GapWeights, motion: Motion) -> Float[Tensor, "B N H C"]:
    """Return the integral that the weights stand for, of every token."""
    out = (
        weights.position[:, None] * motion.position
        + weights.velocity[:, None] * motion.velocity
        + weights.rest[:, None] * motion.rest
    )
    if motion.force is not None and weights.force is not None:
        out = out + _push(motion.force, weights.force)
    return out


def mode_integrals(
    motion: Motion, gap: Float[Tensor, " B"], mode_omega: Float[Tensor, " J"], medium: Medium
) -> Complex[Tensor, "B N H J C"]:
    r"""Return $\int_0^\delta e^{i w_m s} k(T + s)\, ds$ of every token and mode."""
    delta = gap[:, None, None, None]
    mode = mode_omega[:, None]
    g11, g12 = modulated_averages(delta, mode, medium.omega[:, None], medium.zeta[:, None])
    turn = mode * delta
    rest = phi1(torch.complex(torch.zeros_like(turn), turn))
    out = (
        g11[:, None] * motion.position[:, :, :, None]
        + g12[:, None] * motion.velocity[:, :, :, None]
        + rest[:, None] * motion.rest[:, :, :, None]
    )
    if motion.force is not None:
        drive_omega, omega, zeta = (x[:, None] for x in medium.driven)  # [H, 1, Md, 1] and so on
        args = (drive_omega, omega, zeta)
        with_mode = driven_averages(delta[..., None], mode[:, None], *args)
        against = driven_averages(delta[..., None], -mode[:, None], *args)
        # Re(F X) e^{iws} = (F X e^{iws} + conj(F X e^{-iws})) / 2
        out = out + 0.5 * (
            torch.einsum("bnhmc,bhjmc->bnhjc", motion.force, with_mode)
            + torch.einsum("bnhmc,bhjmc->bnhjc", motion.force, against).conj()
        )
    return out * delta[:, None]


def _push(force: Tensor, response: Tensor) -> Tensor:
    return torch.einsum("bnhmc,bhmc->bnhc", force, response).real
