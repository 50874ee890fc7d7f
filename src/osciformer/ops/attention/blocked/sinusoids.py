r"""Integrals of a sinusoidal query over one gap, with no modes in the elementwise work.

For $q(\tau) = \sum_m A_m \cos\omega_m\tau + B_m \sin\omega_m\tau$ the drift over [t, t + s] is

$$\Big(\int q - s\,q(t)\Big) e_1^\top
+ \int_0^s q(t+\sigma)\,(g_{11}(\sigma) - 1,\; g_{12}(\sigma))\,d\sigma$$

and the whole integral has $s\,q(t)$ more in its first component. Modes enter only through matrix
products of ``[gaps, 2J]`` with ``[2J, channels]``. The README explains series and resolvent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from osciformer.math.oscillator import SERIES_RADIUS, Moments, fastest_rate, iterated_integrals

_MAX_ORDER = 15
# |omega_c^2 - omega_m^2 - 2 i gamma_c omega_m| / omega_m^2 below which a pair counts as resonant.
_RESONANT = 1e-3

_Pair = tuple[Tensor, Tensor]


def _combine(basis: _Pair, cos: Tensor, sin: Tensor) -> Tensor:
    """Sum over modes: bases ``[B, X, J]`` with weights ``[B, J, F, D]``: ``[B, X, F, D]``."""
    joint = torch.cat(basis, dim=-1).to(cos.dtype)
    weights = torch.cat([cos, sin], dim=-3).flatten(-2)
    return torch.matmul(joint, weights).unflatten(-1, cos.shape[-2:])


def _sinc_minus_one(h: Tensor) -> Tensor:
    """Return sin(h) / h - 1 without cancellation."""
    is_small = h.abs() < 0.5
    x = torch.where(is_small, h, 0.0) ** 2
    series = torch.zeros_like(h)
    for n in range(8, 0, -1):
        series = (series + (-1.0) ** n / math.factorial(2 * n + 1)) * x
    y = torch.where(is_small, 1.0, h)
    return torch.where(is_small, series, torch.sin(y) / y - 1.0)


def basis_steps(start: Tensor, gap: Tensor, bank: Tensor) -> _Pair:
    """Return the change of cos and sin of bank * time over each gap, free of cancellation."""
    half = 0.5 * gap * bank
    middle, swing = start * bank + half, 2.0 * half.sin()
    return -swing * middle.sin(), swing * middle.cos()


def sinusoid_integral(
    start: Tensor, gap: Tensor, modes: Modes, m: Moments, *, is_drift: bool
) -> _Pair:
    """Return both components of the integral over gaps ``[B, X, 1]``, ``[B, X, F, D]``.

    Phases are always float64; the rest is in the dtype of the spectra of `modes`, float32 only if
    `is_short`. `m` are the moments of the gaps.
    """
    cos, sin, bank, omega, zeta = modes
    theta, half = start * bank, 0.5 * gap * bank
    lag = _sinc_minus_one(half)
    quarter = 2.0 * (0.5 * half).sin()
    area_basis = (
        gap * ((theta + half).cos() * lag - quarter * (theta + 0.5 * half).sin()),
        gap * ((theta + half).sin() * lag + quarter * (theta + 0.5 * half).cos()),
    )
    whole = area_basis
    if not is_drift:
        whole = (area_basis[0] + gap * theta.cos(), area_basis[1] + gap * theta.sin())
    area = _combine(whole, cos, sin)
    can_read = not torch.compiler.is_compiling()
    if can_read and is_short(gap, bank, omega, zeta):
        second, first = modes.series(theta, gap)
        return area + first, second
    reach = (fastest_rate(omega, zeta) * gap).detach()
    slow_mode = (bank * gap).detach() < SERIES_RADIUS
    slow_channel = (reach < SERIES_RADIUS).unsqueeze(-2)
    slow = slow_mode.to(theta.dtype)
    resolvent = _Resolvent(modes)
    second_far, first_far = resolvent.integrals(theta, gap, area_basis, slow, m)
    second, first = resolvent.integrals(theta, gap, area_basis, 1.0 - slow, m)
    if can_read and not (bool(slow_mode.any()) and bool(slow_channel.any())):
        return area + first + first_far, second + second_far
    # Channels that turn fast within the gap are left out below; a free particle keeps them finite.
    safe_omega = torch.where(reach < SERIES_RADIUS, omega, 0.0)
    second_near, first_near = modes._replace(omega=safe_omega).series(theta, gap, slow)
    return (
        area + first + torch.where(slow_channel, first_near, first_far),
        second + torch.where(slow_channel, second_near, second_far),
    )


def is_short(gap: Tensor, bank: Tensor, omega: Tensor, zeta: Tensor) -> bool:
    """Return whether no mode and no oscillator turns far within any gap (reads values)."""
    rate = torch.maximum(bank.max(), fastest_rate(omega, zeta).max()).detach()
    return bool(rate * gap.detach().max() < SERIES_RADIUS)


class Modes(NamedTuple):
    """F functions as sums over the modes of a bank, and the spectra of the channels."""

    cos: Tensor  # [B, J, F, D], B may be 1
    sin: Tensor  # [B, J, F, D]
    bank: Tensor  # [J]
    omega: Tensor  # [D]
    zeta: Tensor  # [D]

    def series(self, theta: Tensor, gap: Tensor, part: Tensor | None = None) -> _Pair:
        """Return the integrals of q g12 and of q (g11 - 1) by repeated integration by parts.

        `part` selects the modes that turn little within each gap; None is all.
        """
        cos, sin, bank, omega, zeta = self
        turn_bound = reach_bound = SERIES_RADIUS
        if part is None and not torch.compiler.is_compiling():
            longest = float(gap.detach().max())
            turn_bound = float(bank.detach().max()) * longest
            reach_bound = float(fastest_rate(omega, zeta).detach().max()) * longest
        eps = torch.finfo(omega.dtype).eps
        orders = 3
        while orders < _MAX_ORDER and turn_bound**orders / math.factorial(orders + 1) > 0.1 * eps:
            orders += 1
        turn, end = bank * gap, theta + bank * gap
        c, s = end.cos(), end.sin()
        if part is not None:
            turn, c, s = turn * part, c * part, s * part
        gap = gap.to(omega.dtype)
        ladder = iterated_integrals(gap, omega, zeta, orders + 3, reach_bound)
        second: Tensor | float = 0.0
        first: Tensor | float = 0.0
        for p in range(orders):
            derivative = _combine((c, s), cos, sin)  # q^(p) times gap^p
            sign = -1.0 if p % 2 else 1.0
            second = second + derivative * (sign * ladder[p + 1]).unsqueeze(-2)
            first = first + derivative * (sign * ladder[p + 2]).unsqueeze(-2)
            c, s = -s * turn, c * turn
        squared = (gap * gap).unsqueeze(-2)
        stiffness = (omega * omega).unsqueeze(-2)
        return squared * second, -squared * gap.unsqueeze(-2) * stiffness * first


class _Resolvent:
    """Coefficients of the modes, multiplied by the transfer function of each channel."""

    def __init__(self, modes: Modes) -> None:
        self.cos, self.sin, self.bank = cos, sin, bank = modes[:3]
        mode = bank[:, None, None]
        self.omega, self.zeta = omega, zeta = modes.omega[None], modes.zeta[None]  # [1, D]
        real = (omega - mode) * (omega + mode)  # [J, 1, D]
        imag = -2.0 * zeta * omega * mode
        size = real * real + imag * imag
        self.is_resonant = size.detach() <= (_RESONANT * mode.detach() ** 2) ** 2
        size = torch.where(self.is_resonant, 1.0, size)
        # 1 / (real + i imag), 0 for resonant pairs
        real = torch.where(self.is_resonant, 0.0, real / size)
        imag = torch.where(self.is_resonant, 0.0, -imag / size)
        # (A - iB)(real + i imag) = x + iy, and Re[(x + iy) e^{i theta}] = x cos - y sin
        self.x = cos * real + sin * imag
        self.minus_y = -(cos * imag - sin * real)

    def integrals(
        self, theta: Tensor, gap: Tensor, area_basis: _Pair, part: Tensor, m: Moments
    ) -> _Pair:
        """Return the integrals of q g12 and of q (g11 - 1), over the modes that `part` selects."""
        cos, sin, bank = self.cos, self.sin, self.bank
        end = theta + bank * gap
        at_start = (theta.cos() * part, theta.sin() * part)
        at_end = (end.cos() * part, end.sin() * part)

        def turned(basis: _Pair) -> _Pair:
            return -basis[1] * bank, basis[0] * bank

        bases = (at_start, turned(at_start), at_end, turned(at_end), turned(turned(at_end)))
        y0_start, y1_start, y0_end, y1_end, y2_end = (
            _combine(basis, self.x, self.minus_y) for basis in bases
        )
        g12 = m.g12.unsqueeze(-2)
        g11 = 1.0 - self.omega * self.omega * m.i12.unsqueeze(-2)
        second = y0_start - g11 * y0_end + g12 * y1_end
        slope = y1_start - g11 * y1_end + g12 * y2_end  # integral of q' g12
        more = self._resonant_integrals(theta, gap, part)
        if more is not None:
            second, slope = second + more[0], slope + more[1]
        area = _combine((area_basis[0] * part, area_basis[1] * part), cos, sin)
        total = area + gap.unsqueeze(-2) * _combine(at_start, cos, sin)
        gamma = self.zeta * self.omega
        first = g12 * _combine(at_end, cos, sin) + 2.0 * gamma * second - slope - total
        return second, first

    def _resonant_integrals(self, theta: Tensor, gap: Tensor, part: Tensor) -> _Pair | None:
        """Return what resonant pairs add to the integrals of q g12 and q' g12, or None."""
        found: _Pair | None = None
        for j in range(self.bank.shape[0]):
            # A free particle under a constant query is no resonance; the series covers it.
            is_resonant = self.is_resonant[j] & (self.omega > 0)  # [1, D]
            if not torch.compiler.is_compiling() and not bool(is_resonant.any()):
                continue
            mode, wide = self.bank[j], gap.unsqueeze(-2)
            # Stand-ins keep pairs that are not resonant finite.
            omega = torch.where(is_resonant, self.omega, 1.0)
            zeta = torch.where(is_resonant, self.zeta, 0.0)
            gamma, damped = zeta * omega, omega * ((1.0 - zeta) * (1.0 + zeta)).sqrt()
            plus, minus = (_phi1(-gamma * wide, w * wide) for w in (mode + damped, mode - damped))
            # s (phi1(plus) - phi1(minus)) / (2 i damped)
            scale = wide / (2.0 * damped)
            real, imag = scale * (plus[1] - minus[1]), -scale * (plus[0] - minus[0])
            c, s = theta[..., j, None, None].cos(), theta[..., j, None, None].sin()
            in_phase = self.cos[:, None, j] * c + self.sin[:, None, j] * s
            quadrature = self.cos[:, None, j] * s - self.sin[:, None, j] * c
            chosen = is_resonant * part[..., j, None, None]
            second = chosen * (in_phase * real - quadrature * imag)
            slope = -mode * chosen * (in_phase * imag + quadrature * real)
            found = (second, slope) if found is None else (found[0] + second, found[1] + slope)
        return found


def _phi1(x: Tensor, y: Tensor) -> _Pair:
    """Return real and imaginary part of (e^z - 1) / z for z = x + iy, x <= 0."""
    is_small = x * x + y * y < 0.25
    a, b = torch.where(is_small, x, 0.0), torch.where(is_small, y, 0.0)
    real, imag = torch.zeros_like(a * b), torch.zeros_like(a * b)
    for n in range(14, -1, -1):
        real, imag = real * a - imag * b + 1.0 / math.factorial(n + 1), real * b + imag * a
    x, y = torch.where(is_small, -1.0, x), torch.where(is_small, 1.0, y)
    size = x * x + y * y
    p, q = torch.exp(x) * y.cos() - 1.0, torch.exp(x) * y.sin()
    return (
        torch.where(is_small, real, (p * x + q * y) / size),
        torch.where(is_small, imag, (q * x - p * y) / size),
    )
