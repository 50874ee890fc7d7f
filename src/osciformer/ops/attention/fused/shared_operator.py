"""Attention under a query path that all rows share, as a `torch.library` operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from osciformer.ops.attention.fused.launch import Call, padded_length, spectrum_tables
from osciformer.ops.attention.fused.shared_launch import run_shared_backward, run_shared_forward


@torch.library.custom_op("osciformer::shared_forward", mutates_args=())
def _forward(
    own: Tensor,
    moment: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tables = spectrum_tables(key_spectrum, value_spectrum)
    sides = (key_velocity, value_velocity, times, mask, *tables)
    call = Call(own, k, v, *sides, scale, is_average, is_strict, moment)
    return run_shared_forward(call)


@_forward.register_fake
def _(own: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, channels = own.shape
    shape = (batch * heads, padded_length(length, channels, own.dtype))
    lse, bias, far_bias = (own.new_empty(shape, dtype=torch.float32) for _ in range(3))
    return torch.empty_like(own), lse, bias, far_bias


@torch.library.custom_op("osciformer::shared_backward", mutates_args=())
def _backward(
    own: Tensor,
    moment: Tensor,
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
    bias: Tensor,
    far_bias: Tensor,
    to_out: Tensor,
    to_lse: Tensor,
    scale: float,
    is_average: bool,
    is_strict: bool,
) -> list[Tensor]:
    tables = spectrum_tables(key_spectrum, value_spectrum)
    sides = (key_velocity, value_velocity, times, mask, *tables)
    call = Call(own, k, v, *sides, scale, is_average, is_strict, moment)
    all_grads = run_shared_backward(call, out, lse, (bias, far_bias), to_out, to_lse)
    grads = all_grads.grads
    to_own, *found = (grads.tokens(x).to(own.dtype).contiguous() for x in grads.sums())
    found = [to_own, all_grads.moment, *found]
    spectra = zip(grads.spectra(), (key_spectrum, value_spectrum), strict=True)
    return found + [grad.to(given.dtype).contiguous() for grad, given in spectra]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in args[:8] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.is_average, ctx.is_strict = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])


def _pull_back(ctx: Any, to_out: Tensor, to_lse: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = iter(
        _backward(
            *tensors,
            to_out.contiguous(),
            to_lse.contiguous(),
            ctx.scale,
            ctx.is_average,
            ctx.is_strict,
        )
    )
    grads = [None if x is None else next(found) for x in tensors[:8]]
    return (*grads, None, None, None, None, None)


_forward.register_autograd(_pull_back, setup_context=_setup_context)


def attend_path(
    own: Tensor,
    moment: Tensor,
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
        own: The path at each row's own time, in the dtype of `k`; it counts for ties alone.
        moment: Integrals of the path against the first row of the keys' propagator over the gap
            after each token, from the gap's start, ``[B H, 2, padded, C]`` float32.
        k: Keys.
        v: Values, in the dtype of `k`.
        key_velocity: Initial velocities of the keys; None is 0.
        value_velocity: Initial velocities of the values; None is 0.
        key_spectrum: Decay rate and squared frequency of the keys, ``[2, H, C]`` float64.
        value_spectrum: The same of the values.
        times: ``[B, N]`` float64, sorted; rows, keys and values share them.
        mask: ``[B, N]`` bool, which keys are present; None is all.
        scale: Factor of the logits.
        is_average: Values averaged over the gap, or read at its end.
        is_strict: Leave out keys at a row's own time.
    """
    out, lse, _, _ = _forward(
        own,
        moment,
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
    return out, lse
