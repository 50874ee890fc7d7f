"""The kernels as `torch.library` operators: opaque nodes for compile, export and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.triton.call import Call, format_for, padded_length, spectrum_table
from osciformer.ops.attention.triton.launch import run_backward, run_forward
from osciformer.ops.attention.triton.path_integrals import (
    ROWS,
    STEPS,
    Modes,
    linear_integrals,
    linear_integrals_backward,
    mode_integrals,
    mode_integrals_backward,
)
from osciformer.ops.attention.triton.primitives import WIDTH, Side, Sizes, Tokens

__all__ = ["integrate_line", "integrate_modes", "padded_length", "run_attention"]


# --- Attention. -----------------------------------------------------------------------------------


def _as_call(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    """Return the call of the operators' first ten arguments, and of scale and flags."""
    q, k, v, key_velocity, value_velocity, key_spectrum, value_spectrum, path, times, mask = tensors
    keys = Side(k, key_velocity, spectrum_table(key_spectrum))
    values = Side(v, value_velocity, spectrum_table(value_spectrum))
    scale, is_average, is_strict = options
    return Call(Tokens(q, keys, values, times, mask), scale, is_average, is_strict, path)


@torch.library.custom_op("osciformer::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    path: Tensor | None,
    times: Tensor,
    mask: Tensor | None,
    scale: float,
    is_average: bool,
    is_strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = (q, k, v, key_velocity, value_velocity, key_spectrum, value_spectrum, path)
    return run_forward(_as_call((*tokens, times, mask), (scale, is_average, is_strict)))


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, path = args[0], args[7]
    batch, length, heads, channels = q.shape
    shape = (batch * heads, padded_length(length, channels, q.dtype))
    biases = (0,) if path is None else (2, *shape)
    lse, biases = (q.new_empty(x, dtype=torch.float32) for x in (shape, biases))
    return torch.empty_like(q), lse, biases


@torch.library.custom_op("osciformer::attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    path: Tensor | None,
    times: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    biases: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    scale: float,
    is_average: bool,
    is_strict: bool,
    is_spectral: bool,
) -> list[Tensor]:
    tokens = (q, k, v, key_velocity, value_velocity, key_spectrum, value_spectrum, path)
    call = _as_call((*tokens, times, mask), (scale, is_average, is_strict))
    return run_backward(call, out, lse, biases, d_out, d_lse, is_spectral=is_spectral)


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    *_, is_spectral = args
    given = [*args[:5], *(args[5:7] if is_spectral else ()), args[7]]
    return [torch.empty_like(x) for x in given if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.is_average, ctx.is_strict = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[2])


def _pull_back(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    # Path integrals depend on the keys' spectrum, and their gradient always includes it.
    has_path = tensors[7] is not None
    is_spectral = ctx.needs_input_grad[5] or ctx.needs_input_grad[6] or has_path
    options = (ctx.scale, ctx.is_average, ctx.is_strict, is_spectral)
    found = iter(_backward(*tensors, d_out.contiguous(), d_lse.contiguous(), *options))
    grads = [None if x is None else next(found) for x in tensors[:5]]
    spectra = [next(found) if is_spectral else None for _ in range(2)]
    return (*grads, *spectra, next(found) if has_path else None, *[None] * 5)


_forward.register_autograd(_pull_back, setup_context=_setup_context)


def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    velocities: Sequence[Tensor | None],
    spectra: tuple[Tensor, Tensor],
    path: Tensor | None,
    times: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    is_average: bool,
    is_strict: bool,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp to base 2 ``[B H, padded]``.

    Tokens are ``[B, N, H, C]`` of one dtype, times ``[B, N]`` float64 and sorted, spectra (decay
    rate and squared frequency, of keys and values) ``[2, H, C]`` float64. `path` ``[B H, 2, padded,
    C]`` float32 are the integrals of a path that all rows share over the gap after each token
    (`integrate_line`, `integrate_modes`); the queries are then the path at each row's own time,
    which counts for ties alone.
    """
    tensors = (q, k, v, *velocities, *spectra, path, times, mask)
    out, lse, _ = _forward(*tensors, scale, is_average, is_strict)
    return out, lse


# --- Integrals of shared query paths over the gaps between tokens. --------------------------------


def _path_launch(spectrum: Tensor, times: Tensor, padded: int, is_precise: bool) -> Any:
    """Return sizes, the grid but for its first number, and options of the kernels."""
    heads, channels = spectrum.shape[1:]
    precision = format_for(channels, torch.float32 if is_precise else torch.float16)
    grid = (heads * (channels // WIDTH.value), times.shape[0])
    return Sizes(times.shape[1], padded, heads), grid, {"K": precision, "num_warps": 4}


def _as_modes(weight: Any, bank: Any, origin: Any, times: Tensor) -> Modes:
    """Return modes with their cosines and sines at the tokens, ``[B, N, J, 2]`` float64."""
    angle = (times - origin).unsqueeze(-1) * bank
    return Modes(weight, bank, torch.stack([angle.cos(), angle.sin()], dim=-1), origin)


@torch.library.custom_op("osciformer::path_forward", mutates_args=())
def _path_forward(
    q: Tensor | None,
    weight: Tensor | None,
    bank: Tensor | None,
    spectrum: Tensor,
    origin: Tensor | None,
    times: Tensor,
    padded: int,
    is_precise: bool,
) -> Tensor:
    heads, channels = spectrum.shape[1:]
    shape = (times.shape[0] * heads, 2, padded, channels)
    path = torch.empty(shape, dtype=torch.float32, device=times.device)
    sizes, grid, options = _path_launch(spectrum, times, padded, is_precise)
    given = (times, spectrum, path, sizes)
    if q is not None:
        linear_integrals[(padded // ROWS.value, *grid)](q, *given, **options)
    else:
        modes = _as_modes(weight, bank, origin, times)
        mode_integrals[(padded // ROWS.value, *grid)](modes, *given, len(modes.bank), **options)
    return path


@_path_forward.register_fake
def _(*args: Any) -> Tensor:
    spectrum, times, padded = args[3], args[5], args[6]
    heads, channels = spectrum.shape[1:]
    shape = (times.shape[0] * heads, 2, padded, channels)
    return times.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("osciformer::path_backward", mutates_args=())
def _path_backward(
    q: Tensor | None,
    weight: Tensor | None,
    bank: Tensor | None,
    spectrum: Tensor,
    origin: Tensor | None,
    times: Tensor,
    d_path: Tensor,
    is_precise: bool,
) -> list[Tensor]:
    batch, length = times.shape
    heads, channels = spectrum.shape[1:]
    sizes, grid, options = _path_launch(spectrum, times, d_path.shape[2], is_precise)
    if q is not None:
        programs = triton.cdiv(length, ROWS.value)
        d_q = torch.empty_like(q)
        parts = d_path.new_empty(batch, heads, programs, 2, channels)
        line = (q, times, spectrum, d_path, d_q, parts, sizes)
        linear_integrals_backward[(programs, *grid)](*line, **options)
        return [d_q, parts.sum((0, 2), dtype=torch.float64).transpose(0, 1).contiguous()]
    assert weight is not None
    assert bank is not None
    programs, num_modes = triton.cdiv(length, ROWS.value * STEPS.value), bank.shape[0]
    d_weight = weight.new_empty(batch * heads, programs, num_modes, 2, channels)
    d_bank = weight.new_empty(batch * heads, programs, channels, num_modes)
    d_spectrum = weight.new_empty(batch, heads, programs, 2, channels)
    modes = _as_modes(weight, bank, origin, times)
    d_modes = (Modes(d_weight, d_bank), d_spectrum)
    given = (modes, times, spectrum, d_path, *d_modes, sizes, num_modes)
    mode_integrals_backward[(programs, *grid)](*given, **options)
    return [
        d_weight.sum(1).view_as(weight),
        d_bank.sum((0, 1, 2)),
        d_spectrum.sum((0, 2)).transpose(0, 1).contiguous(),
    ]


@_path_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in args[:4] if x is not None]


def _path_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.is_precise = inputs[7]


def _path_pull_back(ctx: Any, d_path: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = iter(_path_backward(*tensors, d_path.contiguous(), ctx.is_precise))
    return (*(None if x is None else next(found) for x in tensors[:4]), *[None] * 4)


_path_forward.register_autograd(_path_pull_back, setup_context=_path_context)


def integrate_line(q: Tensor, spectrum: Tensor, times: Tensor, padded: int) -> Tensor:
    """Return the integrals of the path through tokens ``[B, N, H, C]`` over the gap after each.

    They are ``[B H, 2, padded, C]`` float32, 0 after the last token. The spectrum of the keys is
    ``[2, H, C]``, times are ``[B, N]``, both float64 and the latter contiguous.
    """
    found: Tensor = _path_forward(
        q.contiguous(), None, None, spectrum.contiguous(), None, times, padded, True
    )
    return found


def integrate_modes(
    weight: Tensor,
    bank: Tensor,
    spectrum: Tensor,
    times: Tensor,
    origin: Tensor,
    padded: int,
    *,
    is_precise: bool,
) -> Tensor:
    """Return the integrals of a sum of sinusoids over the gap after each token.

    As `integrate_line`. Coefficients of cosine and sine are ``[B, H, J, 2, C]``, frequencies
    ``[J]``, origins, the times that phases count from, ``[B, 1]``, all float64 and contiguous. With
    `is_precise` the result is good for float32 tokens, else for half precision.
    """
    found: Tensor = _path_forward(None, weight, bank, spectrum, origin, times, padded, is_precise)
    return found
