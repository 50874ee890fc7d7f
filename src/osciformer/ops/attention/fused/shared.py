"""Query paths that all rows share: their integrals over gaps, and the way to the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from osciformer.ops.attention.fused.launch import padded_length
from osciformer.ops.attention.fused.path_operator import moments_of_line, moments_of_modes
from osciformer.ops.attention.fused.shared_operator import attend_path
from osciformer.ops.attention.query import LinearPath, SinusoidPath


def attend_shared(
    path: LinearPath | SinusoidPath,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    *,
    key_omega: Tensor,
    key_zeta: Tensor,
    value_omega: Tensor,
    value_zeta: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    value: str,
    mask: Tensor | None,
    scale: float,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp ``[B, H, N]`` for rows that share their path.

    Tokens are contiguous and of one dtype.
    """
    times = times.double().contiguous()
    batch, length, heads, channels = k.shape
    key_spectrum, value_spectrum = (
        torch.stack([omega.double() * zeta.double(), omega.double() ** 2])
        for omega, zeta in ((key_omega, key_zeta), (value_omega, value_zeta))
    )
    padded = padded_length(length, channels, k.dtype)
    if isinstance(path, LinearPath):
        own = path.q.to(k.dtype).contiguous()
        moment = moments_of_line(path.q, key_spectrum, times, padded)
    else:
        weight, bank = _modes(path)
        origin = path.origin.double().contiguous()
        # Without ties nobody reads the path at the rows.
        own = k.detach() if strict else _at_tokens(weight, bank, times - origin, k.dtype)
        is_precise = k.dtype == torch.float32
        moment = moments_of_modes(
            weight, bank, key_spectrum, times, origin, padded, is_precise=is_precise
        )
    out, lse = attend_path(
        own,
        moment,
        k,
        v,
        key_velocity,
        value_velocity,
        key_spectrum,
        value_spectrum,
        times,
        None if mask is None else mask.contiguous(),
        scale,
        is_average=value == "average",
        is_strict=strict,
    )
    return out, lse.view(batch, heads, -1)[..., :length] * math.log(2.0)


def _modes(path: SinusoidPath) -> tuple[Tensor, Tensor]:
    """Return coefficients ``[B, H, J, 2, C]`` and frequencies; a constant is a mode of its own."""
    weight = torch.stack([path.cos[:, 0], path.sin[:, 0]], dim=3).double()
    bank = path.omega.double()
    if path.constant is not None:
        still = path.constant[:, 0, :, None].double()
        still = torch.stack([still, torch.zeros_like(still)], dim=3)
        weight = torch.cat([weight, still], dim=2)
        bank = torch.cat([bank, bank.new_zeros(1)])
    return weight.contiguous(), bank.contiguous()


def _at_tokens(weight: Tensor, bank: Tensor, times: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the path at the tokens, ``[B, N, H, C]``."""
    # Phases are float64; products need no more digits than the result can hold.
    work = torch.float64 if dtype == torch.float32 else torch.float32
    angle = times.unsqueeze(-1) * bank
    basis = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2).to(work)  # [B, N, 2J]
    weight = weight.flatten(2, 3).transpose(1, 2)  # [B, 2J, H, C]
    found = basis @ weight.flatten(-2).to(work)
    return found.unflatten(-1, weight.shape[-2:]).to(dtype).contiguous()
