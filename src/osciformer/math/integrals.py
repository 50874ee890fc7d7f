r"""Averages of the propagator against sinusoids, the kernels of the paper's closed-form logit.

With $z_{1,2} = (-\gamma + i w \pm \sigma)\Delta$ and $\varphi_1(z) = (e^z - 1)/z$ the averages are

$$\frac1\Delta\int_0^\Delta g_{12}(s) e^{iws} ds = \Delta\,\Phi, \qquad
  \frac1\Delta\int_0^\Delta g_{11}(s) e^{iws} ds = \Psi + \gamma\Delta\,\Phi,$$

$\Phi = \varphi_1[z_1, z_2]$ (divided difference), $\Psi = (\varphi_1(z_1) + \varphi_1(z_2))/2$,
entire functions of $m = (z_1 + z_2)/2$ and $h^2 = ((z_1 - z_2)/2)^2$: no regime, resonance or zero
gap is special, only the way of evaluating them is. The paper prints one underdamped formula, which
divides by zero at each of those.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from osciformer._types import Complex, Float, Tensor
from osciformer.math.oscillator import cosh_and_sinh

_Real = Float[Tensor, "*#S"]
_SMALL = 0.5


def phi1(z: Complex[Tensor, "*S"]) -> Complex[Tensor, "*S"]:
    r"""Return $\varphi_1(z) = (e^z - 1)/z = \int_0^1 e^{z\theta} d\theta$, which is 1 at zero.

    Accuracy does not depend on the size of `z` where its real part is at most zero.

    Example:
        >>> phi1(torch.tensor([0j, 1j * torch.pi])).abs()
        tensor([1.0000, 0.6366])
    """
    small = z.detach().abs() < _SMALL
    near, far = torch.where(small, z, 0.0), torch.where(small, 1.0, z)
    series = torch.zeros_like(z)
    for n in range(_num_terms(z.dtype, 12, 18) - 1, -1, -1):
        series = series * near + 1.0 / math.factorial(n + 1)
    return torch.where(small, series, (torch.exp(far) - 1.0) / far)


def modulated_averages(
    delta: _Real, mode_omega: _Real, omega: _Real, zeta: _Real
) -> tuple[Complex[Tensor, "*#S"], Complex[Tensor, "*#S"]]:
    r"""Return the averages of $g_{11}$ and $g_{12}$ over a gap, weighted with $e^{iws}$.

    $$G_{1k} = \frac1\Delta \int_0^\Delta g_{1k}(s)\, e^{iws}\, ds$$

    Finite and smooth in every argument at zero gap (where $G_{11} = 1$, $G_{12} = 0$), critical
    damping, zero damping, resonance, $w = 0$ and $\omega = 0$.

    Args:
        delta: Gap, at least 0.
        mode_omega: Frequency w of the weight, of either sign.
        omega: Natural frequency of the oscillator, at least 0.
        zeta: Its damping ratio, at least 0.

    Example:
        >>> g11, g12 = modulated_averages(*torch.tensor([2.0, 0.0, 3.0, 0.0]))
        >>> bool(torch.isclose(g11.real, torch.sin(torch.tensor(6.0)) / 6.0))
        True
    """
    inputs = torch.broadcast_tensors(delta, mode_omega, omega, zeta)
    shape = inputs[0].shape
    phi, psi = (x.reshape(shape) for x in _phi_psi(*(x.reshape(-1) for x in inputs)))
    g12 = delta * phi
    return psi + zeta * omega * g12, g12


def _phi_psi(
    delta: Tensor, mode_omega: Tensor, omega: Tensor, zeta: Tensor
) -> tuple[Tensor, Tensor]:
    gamma_d, omega_d, mode_d = zeta * omega * delta, omega * delta, mode_omega * delta
    m = torch.complex(-gamma_d, mode_d)
    h2 = (zeta - 1.0) * (zeta + 1.0) * omega_d * omega_d
    # z1 * z2; m^2 - h^2 would cancel near resonance.
    product = torch.complex(
        (omega - mode_omega) * (omega + mode_omega) * delta * delta, -2.0 * gamma_d * mode_d
    )

    points = _Points(m, h2, product, gamma_d, omega_d, mode_d)
    with torch.no_grad():
        size1, size2 = (z.abs() for z in points.roots())
        short = torch.maximum(size1, size2) < 1.0
        near_pole = ~short & (torch.minimum(size1, size2) < _SMALL)
        critical = ~short & ~near_pole & (h2.abs().sqrt() < 0.25)
    phi, psi = torch.zeros_like(m), torch.zeros_like(m)
    for chosen, branch in (
        (short, _by_series),
        (near_pole, _by_difference),
        (critical, _by_product_near_critical),
        (~short & ~near_pole & ~critical, _by_product),
    ):
        # Each branch sees only its own points, so none can leak a NaN into another's gradient.
        where = chosen.nonzero()[:, 0]
        if where.numel():
            parts = branch(_Points(*(x[where] for x in points)))
            phi, psi = (x.index_copy(0, where, y) for x, y in zip((phi, psi), parts, strict=True))
    return phi, psi


class _Points(NamedTuple):
    """Arguments of Phi and Psi; the rates are multiplied by the gap."""

    m: Tensor
    h2: Tensor
    product: Tensor
    gamma_d: Tensor
    omega_d: Tensor
    mode_d: Tensor

    def roots(self) -> tuple[Tensor, Tensor]:
        """Return z1 and z2, overdamped or underdamped; differentiable for |h^2| > 0."""
        over = self.h2 > 0
        root = self.h2.abs().sqrt()
        fast = torch.where(over, self.gamma_d + root, self.gamma_d)
        # gamma - sigma, written without the cancellation that costs zeta^2 in accuracy.
        slow = torch.where(over, self.omega_d**2 / torch.where(over, fast, 1.0), self.gamma_d)
        turn = torch.where(over, 0.0, root)
        return torch.complex(-slow, self.mode_d + turn), torch.complex(-fast, self.mode_d - turn)


def _by_series(p: _Points) -> tuple[Tensor, Tensor]:
    """Both |z| < 1: power series in the symmetric functions of z1 and z2, without a root."""
    m, product = p.m, p.product
    u_previous, u = torch.zeros_like(m), torch.ones_like(m)
    t_previous, t = torch.ones_like(m), m
    phi, psi = torch.zeros_like(m), torch.ones_like(m)
    for n in range(1, _num_terms(m.dtype, 14, 24)):
        weight = 1.0 / math.factorial(n + 1)
        phi, psi = phi + weight * u, psi + weight * t
        u_previous, u = u, 2.0 * m * u - product * u_previous
        t_previous, t = t, 2.0 * m * t - product * t_previous
    return phi, psi


def _by_difference(p: _Points) -> tuple[Tensor, Tensor]:
    """One |z| small, the other not: resonance, or slow creep. Then |h| >= 1/4."""
    z1, z2 = p.roots()
    a, b = phi1(z1), phi1(z2)
    return (a - b) / (z1 - z2), 0.5 * (a + b)


def _by_product(p: _Points) -> tuple[Tensor, Tensor]:
    """Both |z| >= 1/2 and well apart. Dividing by z1 z2 keeps all digits for large z."""
    z1, z2 = p.roots()
    e1, e2 = torch.exp(z1), torch.exp(z2)
    phi = (1.0 - (z1 * e2 - z2 * e1) / (z1 - z2)) / p.product
    return phi, 0.5 * ((e1 - 1.0) / z1 + (e2 - 1.0) / z2)


def _by_product_near_critical(p: _Points) -> tuple[Tensor, Tensor]:
    """Both |z| >= 1/2 and |h| < 1/4: cosh h and sinh h / h as series in h^2."""
    m, h2, e = p.m, p.h2, torch.exp(p.m)
    cosh, sinhc = cosh_and_sinh(h2)
    phi = (1.0 - e * (cosh - m * sinhc)) / p.product
    return phi, (e * (m * cosh - h2 * sinhc) - m) / p.product


def _num_terms(dtype: torch.dtype, single: int, double: int) -> int:
    return double if dtype in (torch.float64, torch.complex128) else single
