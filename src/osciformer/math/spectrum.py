"""Positive parametrisations of (omega, zeta), the quantities they imply, and initial draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from osciformer._types import Float, Int, Tensor

_Shaped = Float[Tensor, "*shape"]
_Operand = Float[Tensor, "*#shape"]


def _check_positive(name: str, values: Tensor, advice: str) -> None:
    bad = (~((values > 0) & values.isfinite())).nonzero()
    if len(bad):
        where = tuple(bad[0].tolist())
        raise ValueError(
            f"{name} must be positive and finite to have a raw value;"
            f" {name}{list(where)} = {float(values[where])}. {advice}"
        )


def omega_from_raw(raw: _Shaped) -> _Shaped:
    r"""Return the natural frequency $\omega = e^{raw}$, positive for every finite raw value."""
    return raw.exp()


def raw_from_omega(omega: _Shaped) -> _Shaped:
    """Return the raw value whose `omega_from_raw` is `omega`, which is positive and finite."""
    _check_positive("omega", omega, "A zero frequency is a fixed buffer, not a learned value")
    return omega.log()


def zeta_from_raw(raw: _Shaped) -> _Shaped:
    r"""Return the damping ratio $\zeta = \mathrm{softplus}(raw) = \log(1 + e^{raw})$.

    There is no upper bound: critical ($\zeta = 1$) and overdamped channels are reachable.
    """
    # The usual threshold of 20 would drop exp(-raw) above it, an error of 1e-10 in float64.
    return torch.nn.functional.softplus(raw, threshold=40.0)


def raw_from_zeta(zeta: _Shaped) -> _Shaped:
    r"""Return the raw value whose `zeta_from_raw` is `zeta`: $\zeta + \log(1 - e^{-\zeta})$.

    `zeta` must be positive and finite.

    Example:
        >>> zeta_from_raw(raw_from_zeta(torch.tensor(0.25)))
        tensor(0.2500)
    """
    advice = "For no damping at all keep an exact zero in a fixed buffer: softplus only tends to it"
    _check_positive("zeta", zeta, advice)
    return zeta + torch.log(-torch.expm1(-zeta))


def decay_rate(omega: _Operand, zeta: _Operand) -> _Shaped:
    r"""Return the decay rate $\gamma = \zeta \omega$ of the free oscillation $e^{-\gamma s}$."""
    return zeta * omega


def damped_frequency(omega: _Operand, zeta: _Operand) -> _Shaped:
    r"""Return $\omega_d = \omega\sqrt{1 - \zeta^2}$, and 0 at and above critical damping.

    A quantity to look at, not to compute with: its slope is unbounded below $\zeta = 1$, which is
    why the propagator never forms it. The gradient is 0 where the value is.

    Example:
        >>> damped_frequency(torch.tensor(5.0), torch.tensor([0.6, 1.0, 3.0]))
        tensor([4., 0., 0.])
    """
    squared = (1 - zeta) * (1 + zeta)
    oscillates = squared > 0
    root = torch.where(oscillates, squared, 1.0).sqrt()
    return omega * torch.where(oscillates, root, 0.0)


def regime(omega: _Operand, zeta: _Operand, *, tolerance: float = 0.0) -> Int[Tensor, "*shape"]:
    r"""Return -1 (underdamped), 0 (critical) or +1 (overdamped): the sign of $\gamma - \omega$.

    Only for reports: no formula of this package branches on it.

    A zero frequency counts as critical, since both roots are 0, and so does any `zeta` within
    `tolerance` of 1.

    Example:
        >>> regime(torch.tensor(1.0), torch.tensor([0.2, 1.0, 4.0]))
        tensor([-1,  0,  1])
    """
    excess = zeta - 1
    sign = torch.sign(excess) * ((excess.abs() > tolerance) & (omega != 0))
    return sign.to(torch.int64)


_Generator = torch.Generator | None


def init_omega(
    shape: Sequence[int], low: float = 1e-2, high: float = 10.0, generator: _Generator = None
) -> Tensor:
    """Return natural frequencies drawn log-uniformly from `[low, high]`, in the default dtype."""
    if not (0.0 < low <= high < math.inf):
        raise ValueError(f"low and high must satisfy 0 < low <= high; got low={low}, high={high}")
    draw = _uniform(shape, generator)
    omega = low * (draw * math.log(high / low)).exp()
    return omega.clamp(low, high).to(torch.get_default_dtype())


def init_zeta(
    shape: Sequence[int], low: float = 0.05, high: float = 0.4, generator: _Generator = None
) -> Tensor:
    """Return damping ratios drawn uniformly from `[low, high]`, in the default dtype."""
    if not (0.0 <= low <= high < math.inf):
        raise ValueError(f"low and high must satisfy 0 <= low <= high; got low={low}, high={high}")
    draw = _uniform(shape, generator)
    return (low + (high - low) * draw).to(torch.get_default_dtype())


def _uniform(shape: Sequence[int], generator: _Generator) -> Tensor:
    # float64 draws make the values of a seed independent of the default dtype.
    device = generator.device if generator is not None else "cpu"
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64, device=device)
