"""Moments of shared query paths over the gaps between tokens, as `torch.library` operators."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.fused.path_linear import linear_moments, linear_moments_adjoint
from osciformer.ops.attention.fused.path_modes import mode_moments, mode_moments_adjoint

# Tokens and channels a program takes at a time: few, for the arithmetic is float64; and how often,
# where it writes sums over them.
_ROWS, _CHANNELS, _STEPS = 32, 16, 4


@torch.library.custom_op("osciformer::linear_moments_forward", mutates_args=())
def _line(q: Tensor, spectrum: Tensor, times: Tensor, padded: int) -> Tensor:
    batch, length, heads, channels = q.shape
    shape = (batch * heads, 2, padded, channels)
    moment = torch.empty(shape, dtype=torch.float32, device=q.device)
    linear_moments[(padded // _ROWS, heads * (channels // _CHANNELS), batch)](
        q,
        times,
        spectrum,
        moment,
        length,
        padded,
        heads,
        ROWS=_ROWS,
        WIDTH=_CHANNELS,
        C=channels,
        num_warps=4,
    )
    return moment


@_line.register_fake
def _(q: Tensor, spectrum: Tensor, times: Tensor, padded: int) -> Tensor:
    batch, _, heads, channels = q.shape
    return q.new_empty((batch * heads, 2, padded, channels), dtype=torch.float32)


@torch.library.custom_op("osciformer::linear_moments_backward", mutates_args=())
def _line_back(q: Tensor, spectrum: Tensor, times: Tensor, to_moment: Tensor) -> list[Tensor]:
    batch, length, heads, channels = q.shape
    padded = to_moment.shape[2]
    programs = triton.cdiv(length, _ROWS)
    to_q = torch.empty_like(q)
    parts = to_moment.new_empty(batch, heads, programs, 2, channels)
    linear_moments_adjoint[(programs, heads * (channels // _CHANNELS), batch)](
        q,
        times,
        spectrum,
        to_moment,
        to_q,
        parts,
        length,
        padded,
        heads,
        ROWS=_ROWS,
        WIDTH=_CHANNELS,
        C=channels,
        num_warps=4,
    )
    return [to_q, parts.sum((0, 2), dtype=torch.float64).transpose(0, 1).contiguous()]


@_line_back.register_fake
def _(q: Tensor, spectrum: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(q), torch.empty_like(spectrum)]


def _line_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _line_pull_back(ctx: Any, to_moment: Tensor) -> tuple[Tensor | None, ...]:
    return (*_line_back(*ctx.saved_tensors, to_moment.contiguous()), None, None)


_line.register_autograd(_line_pull_back, setup_context=_line_context)


def moments_of_line(q: Tensor, spectrum: Tensor, times: Tensor, padded: int) -> Tensor:
    """Return the moments of the path through tokens over the gap after each.

    Args:
        q: ``[B, N, H, C]``.
        spectrum: Decay rate and squared frequency of the keys, ``[2, H, C]`` float64.
        times: ``[B, N]`` float64, contiguous.
        padded: Rows of the result, a multiple of 64.

    Returns:
        ``[B H, 2, padded, C]`` float32, 0 after the last token.
    """
    found: Tensor = _line(q.contiguous(), spectrum.contiguous(), times, padded)
    return found


@torch.library.custom_op("osciformer::mode_moments_forward", mutates_args=())
def _modes(
    weight: Tensor,
    bank: Tensor,
    spectrum: Tensor,
    times: Tensor,
    origin: Tensor,
    padded: int,
    is_precise: bool,
) -> Tensor:
    batch, length = times.shape
    num_modes = bank.shape[0]
    heads, channels = spectrum.shape[1:]
    shape = (batch * heads, 2, padded, channels)
    moment = torch.empty(shape, dtype=torch.float32, device=times.device)
    mode_moments[(padded // _ROWS, heads * (channels // _CHANNELS), batch)](
        weight,
        _phases(times, origin, bank),
        bank,
        times,
        spectrum,
        moment,
        length,
        padded,
        heads,
        num_modes,
        ROWS=_ROWS,
        WIDTH=_CHANNELS,
        C=channels,
        PRECISE=is_precise,
        num_warps=4,
    )
    return moment


def _phases(times: Tensor, origin: Tensor, bank: Tensor) -> Tensor:
    """Return cosine and sine of each mode at the tokens, ``[B, N, J, 2]`` float64."""
    angle = (times - origin).unsqueeze(-1) * bank
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


@_modes.register_fake
def _(
    weight: Tensor,
    bank: Tensor,
    spectrum: Tensor,
    times: Tensor,
    origin: Tensor,
    padded: int,
    is_precise: bool,
) -> Tensor:
    heads, channels = spectrum.shape[1:]
    shape = (times.shape[0] * heads, 2, padded, channels)
    return times.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("osciformer::mode_moments_backward", mutates_args=())
def _modes_back(
    weight: Tensor,
    bank: Tensor,
    spectrum: Tensor,
    times: Tensor,
    origin: Tensor,
    to_moment: Tensor,
    is_precise: bool,
) -> list[Tensor]:
    batch, length = times.shape
    num_modes = bank.shape[0]
    heads, channels = spectrum.shape[1:]
    programs = triton.cdiv(length, _ROWS * _STEPS)
    new = weight.new_empty
    to_weight = new(batch * heads, programs, num_modes, 2, channels)
    to_bank = new(batch * heads, programs, channels, num_modes)
    to_spectrum = new(batch, heads, programs, 2, channels)
    mode_moments_adjoint[(programs, heads * (channels // _CHANNELS), batch)](
        weight,
        _phases(times, origin, bank),
        bank,
        times,
        origin,
        spectrum,
        to_moment,
        to_weight,
        to_bank,
        to_spectrum,
        length,
        to_moment.shape[2],
        heads,
        num_modes,
        STEPS=_STEPS,
        ROWS=_ROWS,
        WIDTH=_CHANNELS,
        C=channels,
        PRECISE=is_precise,
        num_warps=4,
    )
    return [
        to_weight.sum(1).view_as(weight),
        to_bank.sum((0, 1, 2)),
        to_spectrum.sum((0, 2)).transpose(0, 1).contiguous(),
    ]


@_modes_back.register_fake
def _(weight: Tensor, bank: Tensor, spectrum: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (weight, bank, spectrum)]


def _modes_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.is_precise = inputs[6]


def _modes_pull_back(ctx: Any, to_moment: Tensor) -> tuple[Tensor | None, ...]:
    found = _modes_back(*ctx.saved_tensors, to_moment.contiguous(), ctx.is_precise)
    return (*found, None, None, None, None)


_modes.register_autograd(_modes_pull_back, setup_context=_modes_context)


def moments_of_modes(
    weight: Tensor,
    bank: Tensor,
    spectrum: Tensor,
    times: Tensor,
    origin: Tensor,
    padded: int,
    *,
    is_precise: bool,
) -> Tensor:
    """Return the moments of a sum of sinusoids over the gap after each token.

    Tensors are float64 and contiguous.

    Args:
        weight: Coefficients of cosine and sine, ``[B, H, J, 2, C]``.
        bank: Frequencies of the modes, ``[J]``.
        spectrum: Decay rate and squared frequency of the keys, ``[2, H, C]``.
        times: ``[B, N]``.
        origin: ``[B, 1]``, the times that phases count from.
        padded: Rows of the result, a multiple of 64.
        is_precise: As float32 tokens need it; otherwise good for half precision.

    Returns:
        ``[B H, 2, padded, C]`` float32, 0 after the last token.
    """
    found: Tensor = _modes(weight, bank, spectrum, times, origin, padded, is_precise)
    return found
