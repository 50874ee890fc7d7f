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

_NUM_TERMS = 18  # of a series in arguments of modulus at most 1, to float64 rounding


def transfer_function(
    drive_omega: Float[Tensor, "*#S"],
    *,
    omega: Float[Tensor, "*#S"],
    gamma: Float[Tensor, "*#S"],
) -> Complex[Tensor, "*#S"]:
    r"""Return the steady-state gain of a damped oscillator driven at `drive_omega`.

    $$H(\varpi) = \frac{1}{\omega^2 - \varpi^2 + 2 i \gamma \varpi}$$

    Args:
        drive_omega: Driving frequency, in radians per unit of time.
        omega: Natural frequency, in the same unit.
        gamma: Decay rate, `zeta * omega`.

    Returns:
        Complex gain, broadcast over the inputs. Infinite at `drive_omega == omega` when
        `gamma == 0`; `driven_response` is finite there.

    Example:
        >>> transfer_function(
        ...     torch.tensor(0.0), omega=torch.tensor(2.0), gamma=torch.tensor(0.1)
        ... ).real
        tensor(0.2500)
    """
    real, imag = torch.broadcast_tensors(
        (omega - drive_omega) * (omega + drive_omega), 2.0 * gamma * drive_omega
    )
    return torch.complex(real, imag).reciprocal()


def driven_response(
    s: Float[Tensor, "*#S"],
    drive_omega: Float[Tensor, "*#S"],
    omega: Float[Tensor, "*#S"],
    zeta: Float[Tensor, "*#S"],
) -> tuple[Complex[Tensor, "*#S"], Complex[Tensor, "*#S"]]:
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
        At undamped resonance the amplitude grows like `s / (2 omega)`:

        >>> x, _ = driven_response(*torch.tensor([3.0, 2.0, 2.0, 0.0]))
        >>> bool(torch.isclose(x.real, 3 * torch.sin(torch.tensor(6.0)).double() / 4))
        True
    """
    s, drive_omega, omega, zeta = _double(s, drive_omega, omega, zeta)
    phase = torch.complex(torch.zeros_like(s * drive_omega), s * drive_omega)
    # int_0^s g12(u) e^{-i v u} du by the attention kernels, turned to the end of the interval.
    _, g12_turned = modulated_averages(s, -drive_omega, omega, zeta)
    position = s * g12_turned * torch.exp(phase)
    _, g12, _, _ = propagator(s, omega, zeta)
    return position, g12 + torch.complex(torch.zeros_like(drive_omega), drive_omega) * position


def driven_averages(
    delta: Float[Tensor, "*#S"],
    mode_omega: Float[Tensor, "*#S"],
    drive_omega: Float[Tensor, "*#S"],
    omega: Float[Tensor, "*#S"],
    zeta: Float[Tensor, "*#S"],
) -> Complex[Tensor, "*#S"]:
    r"""Return the average of the driven response over a gap, weighted with $e^{iws}$.

    $$\frac1\Delta\int_0^\Delta X(s)\,e^{iws}\,ds, \qquad X \text{ from } `driven_response`$$

    Args:
        delta: Gap, at least 0; the average vanishes at 0.
        mode_omega: Frequency w of the weight, of either sign.
        drive_omega: Frequency of the force, of either sign.
        omega: Natural frequency, at least 0.
        zeta: Damping ratio, at least 0.

    Returns:
        The average, complex128, finite at every resonance.

    Example:
        >>> inputs = torch.tensor([1e-6, 1.0, 2.0, 3.0, 0.5]).double()
        >>> bool(torch.isclose(driven_averages(*inputs).real * 1e12, torch.tensor(1 / 6).double()))
        True
    """
    delta, *rates = _double(delta, mode_omega, drive_omega, omega, zeta)
    return delta**2 * _exponential_differences(delta, *rates)[0]


def driven_integrals(
    s: Float[Tensor, "*#S"],
    drive_omega: Float[Tensor, "*#S"],
    omega: Float[Tensor, "*#S"],
    zeta: Float[Tensor, "*#S"],
) -> tuple[Complex[Tensor, "*#S"], Complex[Tensor, "*#S"]]:
    r"""Return the driven response integrated once and twice over $[0, s]$.

    Args:
        s: Time since the force began, at least 0.
        drive_omega: Frequency of the force, of either sign.
        omega: Natural frequency, at least 0.
        zeta: Damping ratio, at least 0.

    Returns:
        $\int_0^s X$ and $\int_0^s\int_0^u X$, complex128, of order $s^3$ and $s^4$ for small s.
    """
    s, drive_omega, omega, zeta = _double(s, drive_omega, omega, zeta)
    once, twice = _exponential_differences(s, torch.zeros_like(s), drive_omega, omega, zeta)
    return s**3 * once, s**4 * twice


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
    delta, mode_omega, drive_omega, omega, zeta = torch.broadcast_tensors(
        delta, mode_omega, drive_omega, omega, zeta
    )
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


def _double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)
