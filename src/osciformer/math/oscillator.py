r"""The damped oscillator: one smooth formula for all regimes, and its iterated integrals.

For $\ddot x + 2\gamma\dot x + \omega^2 x = 0$ with $\gamma = \zeta\omega$ the propagator of the
state $(x, \dot x)$ over a time $s \ge 0$ is

$$e^{As} = \begin{pmatrix} g_{11} & g_{12} \\ g_{21} & g_{22} \end{pmatrix}, \qquad
g_{12} = s\,e^{-\gamma s} S(\sigma^2 s^2),\quad \sigma^2 = \gamma^2 - \omega^2,$$

with the entire function $S(z) = \sinh\sqrt z/\sqrt z$. Everything the attention layer needs over
one gap follows from $g_{12}$ and its iterated integrals $i_{12} = \int g_{12}$,
$k_{12} = \int i_{12}$, $l_{12} = \int k_{12}$ through the recurrences (integrate the equation of
motion once, twice, ...)

$$g_{22} - 1 = -2\gamma g_{12} - \omega^2 i_{12},\quad
g_{12} = s - 2\gamma i_{12} - \omega^2 k_{12},\quad
i_{12} = \tfrac{s^2}{2} - 2\gamma k_{12} - \omega^2 l_{12}.$$

Read downwards they are free of cancellation for short gaps, read upwards for long ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from osciformer._types import Float, Tensor

_Real = Float[Tensor, "*#batch"]

#: Below this value of |eigenvalue| * s the power series is used, above it the recurrence upwards.
SERIES_RADIUS = 0.5
# Discriminant over gamma^2 above which the two real decay rates are treated one by one.
_SPLIT_DISCRIMINANT = 0.1
_NEAR_CRITICAL = 0.1
# |zeta^2 - 1| of channels that single precision treats as nearly critical.
_CRITICAL_EXCESS = 1e-6


def is_cheap_to_read(x: Tensor) -> bool:
    """Return whether the host can look at values of `x` without waiting or breaking a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _none(condition: Tensor) -> bool:
    """Return whether `condition` holds nowhere, if that is cheap to find out; else False."""
    return is_cheap_to_read(condition) and not bool(condition.any())


def fastest_rate(omega: Tensor, zeta: Tensor) -> Tensor:
    """Return the larger modulus of the two eigenvalues of the oscillator."""
    discriminant = omega * omega * (zeta - 1.0) * (zeta + 1.0)
    is_over = discriminant > 0
    root = torch.where(is_over, discriminant, 1.0).sqrt()
    return torch.where(is_over, zeta * omega + root, omega)


class Moments(NamedTuple):
    r"""$g_{12}$ and its first three iterated integrals over $[0, s]$; all broadcast alike."""

    g12: Tensor
    i12: Tensor
    k12: Tensor
    l12: Tensor


def _host_bounds(x: Tensor) -> tuple[float, float]:
    """Return (min, max) of `x` if it is cheap to read, else the widest range."""
    if not is_cheap_to_read(x) or x.numel() == 0:
        return 0.0, math.inf
    low, high = torch.aminmax(x.detach())
    return float(low), float(high)


def num_terms(radius: float, order: int, eps: float) -> int:
    """Return how many terms sum (n + 1) radius^n / (n + order)! needs to be exact to rounding."""
    terms, size = 2, 1.0
    while size > 0.1 * eps and terms < 18:
        size = (terms + 1) * radius**terms * math.factorial(order) / math.factorial(terms + order)
        terms += 1
    return terms


def iterated_integrals(
    s: Tensor, omega: Tensor, zeta: Tensor, count: int, radius: float = SERIES_RADIUS
) -> list[Tensor]:
    r"""Return $i_0, \dots, i_{n-1}$ with $i_k s^{k+1}$ the k-fold iterated integral of $g_{12}$.

    For short gaps only: every eigenvalue times `s` is at most `radius`, which is at most 1/2. There
    $i_k \approx 1/(k+1)!$, so nothing overflows or cancels however many (at least 2) are asked for.
    """
    minus_two_x, y = -2.0 * (zeta * omega * s), omega * omega * s * s
    # u_n are the complete homogeneous polynomials of the two eigenvalues times s, so that
    # |u_n| <= (n+1) r^n.
    previous, current = torch.zeros_like(minus_two_x), torch.ones_like(minus_two_x)
    low = torch.full_like(minus_two_x, 1.0 / math.factorial(count - 1))
    high = torch.full_like(minus_two_x, 1.0 / math.factorial(count))
    for n in range(1, num_terms(radius, count - 1, torch.finfo(s.dtype).eps)):
        following = torch.addcmul(minus_two_x * current, y, previous, value=-1.0)
        previous, current = current, following
        low = torch.add(low, current, alpha=1.0 / math.factorial(n + count - 1))
        high = torch.add(high, current, alpha=1.0 / math.factorial(n + count))
    found = [high, low]  # i_{count-1}, i_{count-2}
    for k in range(count - 2, 0, -1):
        start = 1.0 / math.factorial(k) + minus_two_x * found[-1]
        found.append(torch.addcmul(start, y, found[-2], value=-1.0))
    return found[::-1]


def _phi(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return $e^z$ and $\varphi_1, \varphi_2, \varphi_3$ for real $z \le 0$."""
    small = z > -1.0
    x = torch.where(small, z, -0.5)
    phi3 = torch.zeros_like(z)
    for n in range(17, -1, -1):
        phi3 = phi3 * x + 1.0 / math.factorial(n + 3)
    phi2 = 0.5 + x * phi3
    phi1 = 1.0 + x * phi2
    y = torch.where(small, -1.0, z)
    big1 = torch.expm1(y) / y
    big2 = (big1 - 1.0) / y
    big3 = (big2 - 0.5) / y
    return (
        torch.exp(z),
        torch.where(small, phi1, big1),
        torch.where(small, phi2, big2),
        torch.where(small, phi3, big3),
    )


def _two_rates(s: Tensor, slow: Tensor, fast: Tensor) -> Moments:
    """Return the moments of a clearly overdamped oscillator from its two decay rates."""
    near, far = _phi(-slow * s), _phi(-fast * s)
    spread = fast - slow
    powers = (torch.ones_like(s), s, s * s, s * s * s)
    parts = zip(powers, near, far, strict=True)
    return Moments(*(power * (a - b) / spread for power, a, b in parts))


def cosh_and_sinh(z: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return $\cosh\sqrt z$ and $\sinh\sqrt z/\sqrt z$ by power series, for |z| at most 1."""
    cosh, sinh = torch.zeros_like(z), torch.zeros_like(z)
    for n in range(7, -1, -1):
        cosh = cosh * z + 1.0 / math.factorial(2 * n)
        sinh = sinh * z + 1.0 / math.factorial(2 * n + 1)
    return cosh, sinh


def _decayed_pair(
    s: Tensor, gamma: Tensor, omega_squared: Tensor, discriminant: Tensor, near: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return $e^{-\gamma s} C(\sigma^2 s^2)$ and $s\,e^{-\gamma s} S(\sigma^2 s^2)$.

    The entire functions $C(z) = \cosh\sqrt z$ and $S(z) = \sinh\sqrt z/\sqrt z$ are summed as power
    series if `near` (|z| at most 1), so values and gradients pass smoothly through critical
    damping. No other code evaluates the regimes apart.
    """
    under = discriminant < 0
    root = torch.where(discriminant == 0, 1.0, discriminant).abs().sqrt()
    decay = torch.exp(-gamma * s)
    angle = torch.where(near | ~under, 1.0, root * s)
    even, odd = decay * torch.cos(angle), decay * torch.sin(angle) / root
    if not _none(~under):
        # Two exponentials: cosh alone overflows. gamma - sigma would cancel, this does not.
        fast = gamma + root
        slow_part, fast_part = torch.exp(-(omega_squared / fast) * s), torch.exp(-fast * s)
        even = torch.where(under, even, 0.5 * (slow_part + fast_part))
        odd = torch.where(under, odd, 0.5 * (slow_part - fast_part) / root)
    if not _none(near):
        cosh, sinh = cosh_and_sinh(torch.where(near, discriminant * s * s, 0.0))
        even, odd = torch.where(near, decay * cosh, even), torch.where(near, decay * s * sinh, odd)
    return even, odd


def _oscillation(s: Tensor, gamma: Tensor, omega_squared: Tensor, discriminant: Tensor) -> Moments:
    """Return the moments of an underdamped or nearly critical oscillator for long gaps."""
    near = (discriminant * s * s).detach().abs() < _NEAR_CRITICAL
    cosh, g12 = _decayed_pair(s, gamma, omega_squared, discriminant, near)
    i12 = (1.0 - torch.addcmul(cosh, gamma, g12)) / omega_squared
    k12 = torch.addcmul(s - g12, gamma, i12, value=-2.0) / omega_squared
    l12 = torch.addcmul(0.5 * s * s - i12, gamma, k12, value=-2.0) / omega_squared
    return Moments(g12, i12, k12, l12)


def single_precision_moments(s: Tensor, omega: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
    """Return g12 and i12 from float64 inputs, with enough digits for single precision.

    The difference in i12 cancels for short gaps, to an error of about 1e-16 / (omega s) relative to
    s / omega. That saves most of the work of `moments`.
    """
    gamma, omega_squared = zeta * omega, omega * omega
    excess = (zeta - 1.0) * (zeta + 1.0)
    # Other channels keep ten digits of the gradients through the root of the discriminant.
    near = excess.detach().abs() < _CRITICAL_EXCESS
    if not _none(near):
        # Keeps |z| below 1; past this bound the oscillator has decayed to zero.
        s = torch.where(near & (gamma * s > 900.0), 900.0 / torch.where(near, gamma, 1.0), s)
    even, g12 = _decayed_pair(s, gamma, omega_squared, omega_squared * excess, near)
    return g12, (1.0 - even - gamma * g12) / omega_squared


def _select(condition: Tensor, a: Moments, b: Moments) -> Moments:
    return Moments(*(torch.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def moments(s: _Real, omega: _Real, zeta: _Real) -> Moments:
    r"""Return $g_{12}$ and its iterated integrals $i_{12}, k_{12}, l_{12}$ over $[0, s]$.

    Relative accuracy is near machine precision in every regime: underdamped, critical, overdamped,
    undamped, $\omega = 0$ (free particle), $s \to 0$ and $s \to \infty$. Gradients are smooth
    through critical damping. Useful identities: $g_{11} - 1 = -\omega^2 i_{12}$,
    $\int_0^s g_{11} = s - \omega^2 k_{12}$.

    Args:
        s: Elapsed time, at least 0.
        omega: Natural frequency, at least 0.
        zeta: Damping ratio, at least 0; below 1 the oscillator swings, above 1 it creeps.

    Example:
        >>> m = moments(torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.0))
        >>> bool(torch.isclose(m.g12, torch.sin(torch.tensor(1.0)) / 2))
        True
    """
    is_table = omega.ndim == 1 and zeta.ndim == 1 and s.shape[-1:] == (1,)
    if is_table and is_cheap_to_read(s):
        # Slow channels have short gaps only: they need none of the rest.
        is_slow = fastest_rate(omega, zeta).detach() * _host_bounds(s)[1] < SERIES_RADIUS
        slow, fast = is_slow.nonzero().squeeze(-1), (~is_slow).nonzero().squeeze(-1)
        if slow.numel() and fast.numel():
            parts = [_moments(s, omega[index], zeta[index]) for index in (slow, fast)]
            back = torch.cat([slow, fast]).argsort()
            joined = (torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True))
            return Moments(*(x.index_select(-1, back) for x in joined))
    return _moments(s, omega, zeta)


def _moments(s: Tensor, omega: Tensor, zeta: Tensor) -> Moments:
    gamma = zeta * omega
    omega_squared = omega * omega
    discriminant = omega_squared * (zeta - 1.0) * (zeta + 1.0)
    split = discriminant > _SPLIT_DISCRIMINANT * gamma * gamma
    rate = fastest_rate(omega, zeta)
    reach = rate.detach() * s.detach()
    low, high = _host_bounds(reach)
    is_short = reach < SERIES_RADIUS

    long: Moments | None = None
    if high >= SERIES_RADIUS:
        # Short gaps are replaced by a harmless long one, so that no unselected branch yields NaN.
        stand_in = 1.0 / torch.where(rate > 0, rate, 1.0).detach()
        long_s = torch.where(is_short, stand_in, s)
        safe_omega_squared = torch.where(omega > 0, omega_squared, 1.0)
        if not _none(split):
            root = torch.where(split, discriminant, 1.0).sqrt()
            fast = torch.where(split, gamma + root, 2.0)
            slow = torch.where(split, omega_squared / torch.where(split, fast, 1.0), 1.0)
            long = _two_rates(long_s, slow, fast)
        if not _none(~split):
            swing_discriminant = torch.where(split, -1.0, discriminant)
            swing = _oscillation(long_s, gamma, safe_omega_squared, swing_discriminant)
            long = swing if long is None else _select(split, long, swing)
        if low >= SERIES_RADIUS and long is not None:
            return long
    short_s = s if long is None else torch.where(is_short, s, 0.0)
    g, i, k, l = iterated_integrals(short_s, omega, zeta, 4, min(high, SERIES_RADIUS))
    squared = short_s * short_s
    short = Moments(short_s * g, squared * i, squared * short_s * k, squared * squared * l)
    return short if long is None else _select(is_short, short, long)


def propagator(s: _Real, omega: _Real, zeta: _Real) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return the entries $(g_{11}, g_{12}, g_{21}, g_{22})$ of $e^{As}$ in every regime.

    Arguments are those of `moments`.

    Returns:
        Position from position and from velocity, velocity from position and from velocity.

    Example:
        >>> g11, g12, g21, g22 = propagator(torch.zeros(1), torch.ones(1), torch.ones(1))
        >>> (g11 * g22 - g12 * g21).item()
        1.0
    """
    m = moments(s, omega, zeta)
    g11 = 1.0 - omega * omega * m.i12
    return g11, m.g12, -omega * omega * m.g12, g11 - 2.0 * zeta * omega * m.g12
