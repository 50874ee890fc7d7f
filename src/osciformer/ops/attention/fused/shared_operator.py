"""The far stage under a shared query path, and the scan of that path, as operators."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.fused.backward import run_backward
from osciformer.ops.attention.fused.launch import (
    SPAN,
    Call,
    SharedPath,
    padded_length,
    precision,
    run_far,
    spectrum_table,
    spectrum_tables,
)
from osciformer.ops.attention.fused.path_scan import scan_backward, scan_forward


@torch.library.custom_op("osciformer::path_scan_forward", mutates_args=())
def _scan(moment: Tensor, spectrum: Tensor, times: Tensor, is_precise: bool) -> list[Tensor]:
    batch, length = times.shape
    heads, channels = spectrum.shape[1:]
    padded = moment.shape[2]
    factor, suffix = torch.empty_like(moment), torch.empty_like(moment)
    scan_forward[(triton.cdiv(padded, SPAN), heads, batch)](
        moment,
        times,
        spectrum_table(*spectrum.unbind(0)),
        factor,
        suffix,
        length,
        padded,
        heads,
        SPAN=SPAN,
        C=channels,
        PRECISE=is_precise,
        num_warps=1,
    )
    return [factor, suffix]


@_scan.register_fake
def _(moment: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(moment), torch.empty_like(moment)]


@torch.library.custom_op("osciformer::path_scan_backward", mutates_args=())
def _scan_back(
    moment: Tensor,
    spectrum: Tensor,
    times: Tensor,
    suffix: Tensor,
    to_factor: Tensor,
    to_suffix: Tensor,
    is_precise: bool,
) -> list[Tensor]:
    batch, length = times.shape
    heads, channels = spectrum.shape[1:]
    padded = moment.shape[2]
    spans = triton.cdiv(padded, SPAN)
    to_moment = torch.empty_like(moment)
    parts = moment.new_empty(batch * heads, spans, 2, channels)
    scan_backward[(spans, heads, batch)](
        moment,
        times,
        spectrum_table(*spectrum.unbind(0)),
        suffix,
        to_factor,
        to_suffix,
        to_moment,
        parts,
        length,
        padded,
        heads,
        SPAN=SPAN,
        C=channels,
        PRECISE=is_precise,
        num_warps=1,
    )
    sums = parts.sum(1, dtype=torch.float64).view(batch, heads, 2, channels).sum(0)
    return [to_moment, sums.transpose(0, 1).to(spectrum.dtype).contiguous()]


@_scan_back.register_fake
def _(moment: Tensor, spectrum: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(moment), torch.empty_like(spectrum)]


def _scan_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.is_precise = inputs
    ctx.save_for_backward(*tensors, output[1])


def _scan_pull_back(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    found = _scan_back(
        *ctx.saved_tensors, grads[0].contiguous(), grads[1].contiguous(), ctx.is_precise
    )
    return (*found, None, None)


_scan.register_autograd(_scan_pull_back, setup_context=_scan_context)


def scan_path(moment: Tensor, spectrum: Tensor, times: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return integrals of a path from span starts to tokens and from tokens to span ends.

    Args:
        moment: Integrals over the gap after each token, ``[B H, 2, padded, C]`` float32.
        spectrum: Decay rate and squared frequency of the keys, ``[2, H, C]`` float64.
        times: ``[B, N]`` float64.
        dtype: Of the tokens; it decides the precision of closed forms.
    """
    found: list[Tensor] = _scan(moment.contiguous(), spectrum, times, precision(dtype).is_precise)
    return found


@torch.library.custom_op("osciformer::shared_far_forward", mutates_args=())
def _far(
    factor: Tensor,
    bias: Tensor,
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
) -> tuple[Tensor, Tensor]:
    path = SharedPath(factor, bias, moment)
    tables = spectrum_tables(key_spectrum, value_spectrum)
    return run_far(
        Call(
            k,
            k,
            v,
            key_velocity,
            value_velocity,
            times,
            mask,
            *tables,
            scale,
            is_average,
            True,
            path,
        )
    )


@_far.register_fake
def _(factor: Tensor, bias: Tensor, moment: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    batch, length, heads, channels = k.shape
    shape = (batch * heads, padded_length(length, channels, k.dtype))
    return torch.empty_like(v), v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("osciformer::shared_far_backward", mutates_args=())
def _far_back(
    factor: Tensor,
    bias: Tensor,
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
    to_out: Tensor,
    to_lse: Tensor,
    scale: float,
    is_average: bool,
) -> list[Tensor]:
    path = SharedPath(factor, bias, moment)
    tables = spectrum_tables(key_spectrum, value_spectrum)
    call = Call(
        k, k, v, key_velocity, value_velocity, times, mask, *tables, scale, is_average, True, path
    )
    # The gradients of row factors and of the spectra come from the same sums.
    grads = run_backward(call, out, lse, to_out, to_lse, is_spectral=True)
    assert grads.factor is not None
    assert grads.bias is not None
    assert grads.moment is not None
    found = [grads.factor.to(factor.dtype), grads.bias, grads.moment]
    for sums, given in (
        (grads.k, k),
        (grads.v, v),
        (grads.key_velocity, key_velocity),
        (grads.value_velocity, value_velocity),
    ):
        if given is not None and sums is not None:
            found.append(grads.tokens(sums, given))
    spectra = zip(grads.spectra(), (key_spectrum, value_spectrum), strict=True)
    return found + [grad.to(given.dtype).contiguous() for grad, given in spectra]


@_far_back.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in args[:9] if x is not None]


def _far_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.is_average = inputs
    ctx.save_for_backward(*tensors, *output)


def _far_pull_back(ctx: Any, to_out: Tensor, to_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    found = iter(
        _far_back(
            *tensors,
            out,
            lse,
            to_out.contiguous(),
            to_lse.contiguous(),
            ctx.scale,
            ctx.is_average,
        )
    )
    return (*(None if x is None else next(found) for x in tensors[:9]), None, None, None, None)


_far.register_autograd(_far_pull_back, setup_context=_far_context)


def attend_far(
    path: SharedPath,
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
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp (base 2) over the keys of spans before a row's own.

    The arguments are those of `operator.attend_fused`, with a path in place of queries.
    """
    found: tuple[Tensor, Tensor] = _far(
        path.factor,
        path.bias,
        path.moment,
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
    )
    return found
