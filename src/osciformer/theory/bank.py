"""The bank that all keys share: modes on a fixed grid, read by adding up their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from osciformer._types import Float, Tensor
from osciformer.math.oscillator import propagator


@dataclass(frozen=True)
class OscillatorBank:
    r"""Oscillators $\ddot x_n + 2\gamma_n\dot x_n + \omega_n^2 x_n = 0$, one set for every channel.

    A path is $\sum_n x_n$. Paths of one bank differ in their initial states alone: `[M + 1, 2, d]`,
    the position and the velocity of each mode in each channel.

    Example:
        >>> bank = OscillatorBank.on_grid(2, length=1.0)
        >>> (bank.omega / math.pi).tolist()
        [0.0, 1.0, 2.0]
    """

    omega: Float[Tensor, "M+1"]  #: Frequencies, not negative; the first is the zero mode.
    gamma: Float[Tensor, "M+1"]  #: Decay rates, not negative.

    @classmethod
    def on_grid(
        cls, num_modes: int, length: float, gamma: float | Float[Tensor, "M+1"] = 0.0
    ) -> OscillatorBank:
        r"""Return the theorem's bank: $\omega_n = n\pi/L$ for n = 0..M, by default undamped.

        Args:
            num_modes: Number of modes M beside the zero mode, at least 0.
            length: Length L of the interval of times.
            gamma: Decay rates, one for all or one each.
        """
        if num_modes < 0:
            raise ValueError(f"num_modes must not be negative; got {num_modes}")
        if not 0.0 < length < math.inf:
            raise ValueError(f"length must be positive and finite; got {length}")
        omega = torch.arange(num_modes + 1, dtype=torch.float64) * (math.pi / length)
        return cls(omega, torch.zeros_like(omega)).damped(gamma)

    @property
    def num_modes(self) -> int:
        """Number of modes M beside the zero mode."""
        return len(self.omega) - 1

    def damped(self, gamma: float | Float[Tensor, "M+1"]) -> OscillatorBank:
        """Return the bank with the same frequencies and other decay rates."""
        rates = torch.as_tensor(gamma, dtype=torch.float64).expand_as(self.omega)
        if bool((rates < 0).any()):
            raise ValueError(f"gamma must not be negative; got {float(rates.min())}")
        return OscillatorBank(self.omega, rates)

    def readout(self, s: Float[Tensor, "*S"]) -> Float[Tensor, "*S M+1 2"]:
        """Return what position and velocity of each mode become in the path after times `s`."""
        return torch.stack(self._entries(s)[:2], dim=-1)

    def flow(self, s: Float[Tensor, "*S"]) -> Float[Tensor, "*S M+1 2 2"]:
        r"""Return the blocks of $e^{As}$ of the modes, for times `s` that are not negative."""
        return torch.stack(self._entries(s), dim=-1).unflatten(-1, (2, 2))

    def _entries(self, s: Tensor) -> tuple[Tensor, ...]:
        s = s.double()[..., None]
        omega, gamma, is_free = self.omega, self.gamma, self.omega == 0
        safe = torch.where(is_free, 1.0, omega)
        if not bool(gamma.any()):
            cos, sin = torch.cos(omega * s), torch.sin(omega * s)
            return cos, torch.where(is_free, s, sin / safe), -omega * sin, cos
        # The free particle has no damping ratio: it slows down, and a constant stays.
        entries = propagator(s, safe, torch.where(is_free, 0.0, gamma / safe))
        rate = 2.0 * torch.where(gamma > 0, gamma, 1.0)
        drift = torch.where(gamma > 0, -torch.expm1(-rate * s) / rate, s)
        slowed = torch.exp(-2.0 * gamma * s)
        free = (torch.ones_like(drift), drift, torch.zeros_like(drift), slowed)
        return tuple(torch.where(is_free, x, y) for x, y in zip(free, entries, strict=True))

    def path(
        self, states: Float[Tensor, "*S M+1 2 d"], s: Float[Tensor, "*#S T"]
    ) -> Float[Tensor, "*S T d"]:
        """Return the paths some times `s` after their initial states."""
        return _read(self.readout(s), states)

    def speed(
        self, states: Float[Tensor, "*S M+1 2 d"], s: Float[Tensor, "*#S T"]
    ) -> Float[Tensor, "*S T d"]:
        """Return the derivatives of the paths, as `path` returns their positions."""
        return _read(torch.stack(self._entries(s)[2:], dim=-1), states)

    def amplitudes(self, states: Float[Tensor, "*S M+1 2 d"]) -> Float[Tensor, "*S M+1"]:
        r"""Return $r_n = \sqrt{|x_n|^2 + |\dot x_n/\omega_n|^2}$, how far undamped modes swing.

        Of the zero mode it is $|x_0|$: it is meant to have no velocity.
        """
        omega = torch.where(self.omega == 0, torch.inf, self.omega)[:, None]
        scaled = torch.cat((states[..., 0, :], states[..., 1, :] / omega), dim=-1)
        return scaled.norm(dim=-1)


def _read(rows: Tensor, states: Tensor) -> Tensor:
    """Return the sums over modes of rows `[*S, T, M + 1, 2]` times states `[*S, M + 1, 2, d]`."""
    return rows.flatten(-2) @ states.flatten(-3, -2)
