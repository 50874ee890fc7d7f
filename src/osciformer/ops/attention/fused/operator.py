"""The kernels as `torch.library` operators: opaque nodes for compile, export and CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from osciformer.ops.attention.fused.backward import run_backward
from osciformer.ops.attention.fused.launch import (
    Call,
    padded_length,
    run_forward,
    spectrum_tables,
)


@torch.library.custom_op("osciformer::fused_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    times: Tensor,
    mask: Tensor | None,
    scale: float,
    is_average: bool,
    is_strict: bool,
) -> tuple[Tensor, Tensor]:
    tables = spectrum_tables(key_spectrum, value_spectrum)
    call = Call(
        q, k, v, key_velocity, value_velocity, times, mask, *tables, scale, is_average, is_strict
    )
    return run_forward(call)


@_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, channels = q.shape
    shape = (batch * heads, padded_length(length, channels, q.dtype))
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("osciformer::fused_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    times: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    to_out: Tensor,
    to_lse: Tensor,
    scale: float,
    is_average: bool,
    is_strict: bool,
    is_spectral: bool,
) -> list[Tensor]:
    tables = spectrum_tables(key_spectrum, value_spectrum)
    call = Call(
        q, k, v, key_velocity, value_velocity, times, mask, *tables, scale, is_average, is_strict
    )
    return run_backward(call, out, lse, to_out, to_lse, is_spectral=is_spectral)


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    *rest: Any,
) -> list[Tensor]:
    like = [q, k, v, key_velocity, value_velocity]
    like += [key_spectrum, value_spectrum] if rest[-1] else []
    return [torch.empty_like(x) for x in like if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.is_average, ctx.is_strict = inputs
    ctx.save_for_backward(*tensors, *output)


def _pull_back(ctx: Any, to_out: Tensor, to_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    is_spectral = ctx.needs_input_grad[5] or ctx.needs_input_grad[6]
    found = iter(
        _backward(
            *tensors,
            out,
            lse,
            to_out.contiguous(),
            to_lse.contiguous(),
            ctx.scale,
            ctx.is_average,
            ctx.is_strict,
            is_spectral,
        )
    )
    grads = [None if x is None else next(found) for x in tensors[:5]]
    spectra = [next(found), next(found)] if is_spectral else [None, None]
    return (*grads, *spectra, None, None, None, None, None)


_forward.register_autograd(_pull_back, setup_context=_setup_context)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    key_spectrum: Tensor,
    value_spectrum: Tensor,
    times: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    is_average: bool,
    is_strict: bool,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp to base 2 ``[B H, padded]``.

    Args:
        q: Queries ``[B, N, H, C]``, constant in time.
        k: Keys, in the dtype of `q`.
        v: Values, in the dtype of `q`.
        key_velocity: Initial velocities of the keys; None is 0.
        value_velocity: Initial velocities of the values; None is 0.
        key_spectrum: Decay rate and squared frequency of the keys, ``[2, H, C]`` float64.
        value_spectrum: The same of the values.
        times: ``[B, N]`` float64, sorted; queries, keys and values share them.
        mask: ``[B, N]`` bool, which keys are present; None is all.
        scale: Factor of the logits.
        is_average: Values averaged over the gap, or read at its end.
        is_strict: Leave out keys at a row's own time.
    """
    found: tuple[Tensor, Tensor] = _forward(
        q,
        k,
        v,
        key_velocity,
        value_velocity,
        key_spectrum,
        value_spectrum,
        times,
        mask,
        scale,
        is_average,
        is_strict,
    )
    return found
