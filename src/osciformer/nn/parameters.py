"""Parameters with rules of their own: spectra, banks, buffers that keep their precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.math.banks import BankKind, frequency_bank
from osciformer.math.spectrum import (
    init_omega,
    init_zeta,
    omega_from_raw,
    raw_from_omega,
    raw_from_zeta,
    zeta_from_raw,
)

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


class ExactBuffers(nn.Module):
    """A module whose own buffers follow the model to a device but keep their precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> ExactBuffers:
        exact = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class Spectrum(nn.Module):
    r"""One oscillator per head and channel: $\omega = e^{raw} > 0$ and $\zeta \ge 0$.

    Frequencies are drawn log-uniformly, damping ratios uniformly. The raw values have no weight
    decay and stay in float32 in a model of half precision (it loses a third of a radian at 100).

    Args:
        num_heads: Number of heads H.
        head_dim: Channels a head C.
        omega_range: Ends of the initial frequencies, in radians per unit of time.
        zeta_range: Ends of the initial damping ratios; not used if `undamped`.
        undamped: Keep zeta at exactly zero, as a buffer: softplus only tends to it.
        generator: Source of randomness; None is the global one.
    """

    no_weight_decay = ("raw_omega", "raw_zeta")
    zero_zeta: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        omega_range: tuple[float, float],
        zeta_range: tuple[float, float] = (0.05, 0.4),
        undamped: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        shape = (num_heads, head_dim)
        self.undamped = undamped
        self.raw_omega = nn.Parameter(torch.empty(shape))
        if undamped:
            self.register_buffer("zero_zeta", torch.zeros(shape))
        else:
            self.raw_zeta = nn.Parameter(torch.empty(shape))
        self.reset(omega_range, zeta_range, generator=generator)

    @torch.no_grad()
    def reset(
        self,
        omega_range: tuple[float, float],
        zeta_range: tuple[float, float] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw the frequencies again, and the damping ratios if a range is given."""
        shape = tuple(self.raw_omega.shape)
        self.raw_omega.copy_(raw_from_omega(init_omega(shape, *omega_range, generator=generator)))
        if zeta_range is not None and not self.undamped:
            self.raw_zeta.copy_(raw_from_zeta(init_zeta(shape, *zeta_range, generator=generator)))

    @property
    def omega(self) -> Float[Tensor, "H C"]:
        """Natural frequencies."""
        return omega_from_raw(self.raw_omega)

    @property
    def zeta(self) -> Float[Tensor, "H C"]:
        """Damping ratios."""
        return self.zero_zeta if self.undamped else zeta_from_raw(self.raw_zeta)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Spectrum:
        def at_least_float32(before: Tensor) -> Tensor:
            after = fn(before)
            is_half = after.dtype in (torch.float16, torch.bfloat16)
            return before.to(after.device, torch.float32) if is_half else after

        super()._apply(at_least_float32, *args, **kwargs)
        return self

    def extra_repr(self) -> str:
        """Show the sizes."""
        heads, channels = self.raw_omega.shape
        return f"num_heads={heads}, head_dim={channels}, undamped={self.undamped}"


class FrequencyBank(ExactBuffers):
    """Fixed frequencies on which query paths and drives are expanded, kept in float64.

    They are not learned: the gradient of a ridge fit has a condition number of about J / ridge.

    Args:
        kind: Kind of bank, see `frequency_bank`. `data` is log-spaced over `omega_range`, then
            the `frequency_range` of the training times; `harmonics` starts at its low end.
        num_modes: Number of frequencies J.
        omega_range: Lowest and highest frequency, in radians per unit of time.
        generator: Source of randomness for the random kinds.

    Example:
        >>> FrequencyBank("geometric", 3, omega_range=(1.0, 8.0)).omega.tolist()
        [2.0, 4.0, 8.0]
    """

    omega: Tensor

    def __init__(
        self,
        kind: BankKind,
        num_modes: int,
        *,
        omega_range: tuple[float, float],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kind: BankKind = kind
        self.register_buffer("omega", torch.zeros(num_modes, dtype=torch.float64))
        self.reset(omega_range, generator=generator)

    def reset(
        self, omega_range: tuple[float, float], *, generator: torch.Generator | None = None
    ) -> None:
        """Set the frequencies to another range."""
        kind: BankKind = "log_spaced" if self.kind == "data" else self.kind
        ends: dict[str, Any] = dict(zip(("low", "high"), omega_range, strict=True))
        ends["length"] = math.pi / ends["low"] if kind == "harmonics" else None
        self.omega.copy_(frequency_bank(kind, len(self.omega), **ends, generator=generator))

    def extra_repr(self) -> str:
        """Show the kind and the size."""
        return f"kind={self.kind}, num_modes={len(self.omega)}"


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups in which spectra, norms and biases have no weight decay.

    A module names such parameters in its attribute `no_weight_decay`.

    Args:
        module: A module; parameters that need no gradient are left out, shared ones occur once.
        weight_decay: Decay of the first of the two groups; the second has none.

    Example:
        >>> groups = parameter_groups(nn.Linear(2, 3), weight_decay=0.01)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.01), (1, 0.0)]
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay must not be negative; got {weight_decay}")
    is_exempt: dict[nn.Parameter, bool] = {}  # of shared parameters, the first owner decides
    for owner in module.modules():
        named = getattr(owner, "no_weight_decay", ())
        for name, parameter in owner.named_parameters(recurse=False):
            exempt = isinstance(owner, _NORMS) or name.endswith("bias") or name in named
            if parameter.requires_grad:
                is_exempt.setdefault(parameter, exempt)
    decaying = [x for x, exempt in is_exempt.items() if not exempt]
    others = [x for x, exempt in is_exempt.items() if exempt]
    groups = ((decaying, weight_decay), (others, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups]
