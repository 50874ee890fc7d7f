r"""Response of the damped oscillator to a sinusoidal force, from rest, and its averages.

The textbook form $X = H(\varpi)[e^{i\varpi s} - g_{11} - i\varpi g_{12}]$ is a steady state minus a
transient. It cancels for slow channels ($|H| = 10^5$ where $X \le s^2/2$) and is infinite minus
infinite at undamped resonance. The same quantities are divided differences of the exponential,

$$X(s) = s^2 e^{\cdot}[\lambda_1 s, \lambda_2 s, i\varpi s], \qquad
  \frac1\Delta\int_0^\Delta X(s) e^{iws} ds = \Delta^2 e^{\cdot}[z_1, z_2, z_3, 0],$$

with $z_{1,2} = (-\gamma + iw \pm \sigma)\Delta$ and $z_3 = i(w + \varpi)\Delta$, entire in all
arguments. The averages are evaluated by power series of the arguments divided by a power of two,
then doubled back: no case distinction, and gradients that are finite everywhere.
All results are complex128; forces are real parts, so use `Re(f X)` with `f = P - iQ` for
$P\cos\varpi s + Q\sin\varpi s$.
"""

from __future__ import annotations

import math

import torch

from osciformer._types import Complex, Float, Tensor
from osciformer.math.integrals import modulated_averages
from osciformer.math.oscillator import propagator

_Real = Float[Tensor, "*#S"]
_Complex = Complex[Tensor, "*#S"]

_NUM_TERMS = 18  # of a series in arguments of modulus at most 1, to float64 rounding


def transfer_function(drive_omega: _Real, *, omega: _Real, gamma: _Real) -> _Complex:
    r"""Return the steady-state gain of a damped oscillator driven at `drive_omega`.

    $$H(\varpi) = \frac{1}{\omega^2 - \varpi^2 + 2 i \gamma \varpi}$$

    Infinite at `drive_omega == omega` when `gamma == 0`; `driven_response` is finite there.

    Args:
        drive_omega: Driving frequency, in radians per unit of time.
        omega: Natural frequency, in the same unit.
        gamma: Decay rate, `zeta * omega`.

    Example:
        >>> slow, omega, gamma = torch.tensor([0.0, 2.0, 0.1])
        >>> transfer_function(slow, omega=omega, gamma=gamma).real
        tensor(0.2500)
    """
    parts = (omega - drive_omega) * (omega + drive_omega), 2.0 * gamma * drive_omega
    return torch.complex(*torch.broadcast_tensors(*parts)).reciprocal()


def driven_response(
    s: _Real, drive_omega: _Real, omega: _Real, zeta: _Real
) -> tuple[_Complex, _Complex]:
    r"""Return position and velocity, from rest, under the unit force $e^{i\varpi s}$.

    $$X(s) = \int_0^s g_{12}(u)\, e^{i\varpi(s - u)}\, du, \qquad \dot X = g_{12} + i\varpi X$$

    Args:
        s: Time since the force began, at least 0.
        drive_omega: Frequency of the force, of either sign.
        omega: Natural frequency, at least 0.
        zeta: Damping ratio, at least 0.

    Returns:
        $(X, \dot X)$, complex128. Both vanish at `s == 0`.

    Example:
        >>> x, _ = driven_response(*torch.tensor([3.0, 2.0, 2.0, 0.0]))
        >>> bool(torch.isclose(x.real, 3 * torch.sin(torch.tensor(6.0)).double() / 4))
        True
    """
    s, drive_omega, omega, zeta = (x.double() for x in (s, drive_omega, omega, zeta))
    phase = s * drive_omega
    # int_0^s g12(u) e^{-i v u} du by the attention kernels, turned to the end of the interval.
    _, g12_turned = modulated_averages(s, -drive_omega, omega, zeta)
    position = s * g12_turned * torch.exp(1j * phase)
    _, g12, _, _ = propagator(s, omega, zeta)
    return position, g12 + 1j * drive_omega * position


def driven_averages(
    delta: _Real, mode_omega: _Real, drive_omega: _Real, omega: _Real, zeta: _Real
) -> _Complex:
    r"""Return the average of the driven response over a gap, weighted with $e^{iws}$.

    $$\frac1\Delta\int_0^\Delta X(s)\,e^{iws}\,ds, \qquad X \text{ from } `driven_response`$$

    Args:
        delta: Gap, at least 0; the average vanishes at 0.
        mode_omega: Frequency w of the weight, of either sign.
        drive_omega: Frequency of the force; this and the rest as in `driven_response`.
        omega: Natural frequency.
        zeta: Damping ratio.

    Returns:
        The average, complex128, finite at every resonance.
    """
    once, _ = _exponential_differences(delta, mode_omega, drive_omega, omega, zeta)
    return delta.double() ** 2 * once


def driven_integrals(
    s: _Real, drive_omega: _Real, omega: _Real, zeta: _Real
) -> tuple[_Complex, _Complex]:
    r"""Return $\int_0^s X$ and $\int_0^s\int_0^u X$ of the response X of `driven_response`.

    Arguments are as there. Both are complex128, of order $s^3$ and $s^4$ for small s.
    """
    once, twice = _exponential_differences(s, torch.zeros_like(s), drive_omega, omega, zeta)
    return s.double() ** 3 * once, s.double() ** 4 * twice


def _exponential_differences(
    delta: Tensor, mode_omega: Tensor, drive_omega: Tensor, omega: Tensor, zeta: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return divided differences of exp at $(z_1, z_2, z_3, 0)$ and $(z_1, z_2, z_3, 0, 0)$.

    They come from scaling and squaring a triangular matrix: a bidiagonal matrix with the nodes on
    its diagonal and ones above has them as the entries of its exponential. The nodes
    $z_{1,2} = m \pm h$ enter as one, $Z = m + \kappa$, in numbers $a + b\kappa$ with
    $\kappa^2 = h^2$: the part along $\kappa$ of a function of Z is its divided difference over
    $z_1, z_2$, and no root of $h^2$ is taken.
    """
    tensors = torch.broadcast_tensors(delta, mode_omega, drive_omega, omega, zeta)
    delta, mode_omega, drive_omega, omega, zeta = (x.double() for x in tensors)
    gamma_d, omega_d = zeta * omega * delta, omega * delta
    m = torch.complex(-gamma_d, mode_omega * delta)
    h2 = (zeta - 1.0) * (zeta + 1.0) * omega_d * omega_d
    z3 = torch.complex(torch.zeros_like(m.real), (mode_omega + drive_omega) * delta)

    sizes = torch.maximum(m.detach().abs() + h2.detach().abs().sqrt(), z3.detach().abs())
    largest = float(sizes.max()) if sizes.numel() else 0.0
    doublings = max(0, math.ceil(math.log2(largest))) if largest > 0 else 0
    step = 0.5**doublings

    def times(p: Tensor, q: Tensor) -> Tensor:
        (a, b), (c, d) = p.unbind(-1), q.unbind(-1)
        return torch.stack((a * c + h2 * b * d, a * d + b * c), dim=-1)

    # Series: entries of exp(step * matrix) are sums of the complete homogeneous polynomials of
    # the nodes Z, z3, 0, 0 (a node 0 does not change them), over factorials; t02 is the entry in
    # row 0, column 2.
    node = torch.stack((m * step, torch.full_like(m, step)), dim=-1)
    w, w_power = z3 * step, torch.ones_like(z3)
    unit = torch.stack((torch.ones_like(m), torch.zeros_like(m)), dim=-1)
    power, polynomial = unit, unit
    t00, t01, t02, t03 = unit, unit, unit / 2, unit / 6
    t12, t13 = w_power, w_power / 2
    for n in range(1, _NUM_TERMS):
        w_power = w_power * w
        power = times(power, node)
        polynomial = times(polynomial, node) + w_power[..., None] * unit
        t00 = t00 + power / math.factorial(n)
        t01 = t01 + polynomial / math.factorial(n + 1)
        t02 = t02 + polynomial / math.factorial(n + 2)
        t03 = t03 + polynomial / math.factorial(n + 3)
        t12 = t12 + w_power / math.factorial(n + 1)
        t13 = t13 + w_power / math.factorial(n + 2)
    t01, t02, t03 = t01 * step, t02 * step**2, t03 * step**3
    t12, t13, t23 = t12 * step, t13 * step**2, step

    for _ in range(doublings):
        t11 = torch.exp(z3 * step)
        t03 = times(t00, t03) + t01 * t13[..., None] + t02 * t23 + t03
        t02 = times(t00, t02) + t01 * t12[..., None] + t02
        t01 = times(t00, t01) + t01 * t11[..., None]
        t13 = t11 * t13 + t12 * t23 + t13
        t12 = t11 * t12 + t12
        t00 = times(t00, t00)
        step, t23 = 2.0 * step, 2.0 * t23
    return t02[..., 1], t03[..., 1]
