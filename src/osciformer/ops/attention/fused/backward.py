"""Launches of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.fused.launch import (
    TILE,
    Call,
    Prepared,
    Stage,
    empty_set_up,
    fill_matrices,
    fill_set_up,
    sweep_options,
)
from osciformer.ops.attention.fused.near_backward import near_backward, row_sums
from osciformer.ops.attention.fused.sweep_backward import factors_adjoint, sweep_keys, sweep_rows

# Rows a program of the kernels that go over tokens once.
_ROWS = 64


@dataclass
class Gradients:
    """Sums of gradients: tokens as ``[B H, padded, C]`` float32, spectra as lists of parts."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    key_velocity: Tensor
    value_velocity: Tensor
    factor: Tensor | None = None
    bias: Tensor | None = None
    moment: Tensor | None = None
    key_spectrum: list[Tensor] = field(default_factory=list)
    value_spectrum: list[Tensor] = field(default_factory=list)

    def parts(self, count: int, is_wanted: bool) -> tuple[Tensor, Tensor]:
        """Return buffers ``[B H, count, 2, C]`` for gradients of the spectra, one row a program."""
        shape = (self.call.num_planes, count, 2, self.call.channels)
        key, value = (
            torch.empty(shape, dtype=torch.float32, device=self.q.device) for _ in range(2)
        )
        if is_wanted:
            self.key_spectrum.append(key)
            self.value_spectrum.append(value)
        return key, value

    def spectra(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of (gamma, omega^2) of keys and values, ``[2, H, C]`` float64."""
        call = self.call
        shape = (call.batch, call.heads, 2, call.channels)
        sums = []
        for parts in (self.key_spectrum, self.value_spectrum):
            total = sum(p.sum(1, dtype=torch.float64) for p in parts)
            assert isinstance(total, Tensor)
            sums.append(total.view(shape).sum(0).transpose(0, 1))
        return sums[0], sums[1]

    def tokens(self, x: Tensor, like: Tensor) -> Tensor:
        """Return ``[B H, padded, C]`` as ``[B, N, H, C]`` in the dtype of `like`."""
        call = self.call
        x = x.view(call.batch, call.heads, call.padded, call.channels)[:, :, : call.length]
        return x.transpose(1, 2).to(like.dtype).contiguous()


def run_backward(
    call: Call, out: Tensor, lse: Tensor, to_out: Tensor, to_lse: Tensor, *, is_spectral: bool
) -> Gradients:
    """Return the gradients of one call from those of its output and logsumexp ``[B H, padded]``."""
    plane = (call.num_planes, call.padded, call.channels)

    def sums(of: Tensor | None) -> Tensor:
        shape = plane if of is not None else (1,)
        return torch.empty(shape, dtype=torch.float32, device=call.q.device)

    grads = Gradients(
        call,
        sums(call.q),
        sums(call.k),
        sums(call.v),
        sums(call.key_velocity),
        sums(call.value_velocity),
    )
    delta = call.per_row()
    row_sums[(call.padded // _ROWS, call.heads, call.batch)](
        out,
        to_out,
        to_lse,
        delta,
        call.length,
        call.padded,
        call.heads,
        ROWS=_ROWS,
        C=call.channels,
        num_warps=4,
    )
    tokens = (
        call.q,
        call.k,
        call.k if call.key_velocity is None else call.key_velocity,
        call.v,
        call.v if call.value_velocity is None else call.value_velocity,
    )
    if call.shared is None:
        _near(call, grads, tokens, to_out, lse, delta, is_spectral)
    else:
        for x in (grads.k, grads.v, grads.key_velocity, grads.value_velocity):
            x.zero_()
        grads.bias, grads.moment = call.per_row(), torch.zeros_like(call.shared.moment)
    prepared = empty_set_up(call)
    for along_rows, along_keys in zip(call.tiling.rows, call.tiling.keys, strict=True):
        is_far = along_rows is call.tiling.rows[-1]
        if call.length <= along_rows.span or (call.shared is not None and not is_far):
            continue
        fill_set_up(call, along_rows, prepared)
        fill_matrices(call, along_rows, prepared, 18 if is_spectral else 6)
        given = (to_out, lse, delta)
        _sweep_keys(call, along_keys, prepared, grads, tokens, *given, is_spectral)
        _sweep_rows(call, along_rows, prepared, grads, *given, is_spectral)
    return grads


def _near(
    call: Call,
    grads: Gradients,
    tokens: tuple[Tensor, ...],
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    is_spectral: bool,
) -> None:
    near_backward[(call.padded // TILE, call.heads, call.batch)](
        *tokens,
        call.times,
        call.mask_or_times,
        call.key_table,
        call.value_table,
        to_out,
        lse,
        delta,
        grads.q,
        grads.k,
        grads.key_velocity,
        grads.v,
        grads.value_velocity,
        *grads.parts(call.padded // TILE, is_spectral),
        call.length,
        call.padded,
        call.heads,
        call.logit_scale,
        call.scale,
        SPECTRAL=is_spectral,
        **call.near_options(is_backward=True),
    )


def _given(call: Call, prepared: Prepared, lse: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    assert prepared.matrices is not None
    return (
        prepared.key_state,
        prepared.value_state,
        prepared.key_factor,
        prepared.value_factor,
        *prepared.matrices,
        lse,
        delta,
        delta if call.shared is None else call.shared.bias,
    )


def _sizes(call: Call) -> tuple[Any, ...]:
    return (call.length, call.padded, call.heads, call.logit_scale, call.scale)


def _sweep_keys(
    call: Call,
    stage: Stage,
    prepared: Prepared,
    grads: Gradients,
    tokens: tuple[Tensor, ...],
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    is_spectral: bool,
) -> None:
    options = sweep_options(call, stage, 18 if is_spectral else 6)
    del options["ROWS"]
    count = call.padded // stage.rows
    parts = grads.parts(count, is_spectral)
    for of_keys, of_values in ((True, False), (False, True)) if stage.is_split else ((True, True),):
        sweep_keys[(count, call.heads, call.batch)](
            *tokens,
            to_out,
            call.times,
            call.mask_or_times,
            call.key_table,
            call.value_table,
            *_given(call, prepared, lse, delta),
            delta if grads.bias is None else grads.bias,
            grads.k,
            grads.key_velocity,
            grads.v,
            grads.value_velocity,
            *parts,
            *_sizes(call),
            HAS_KU=call.key_velocity is not None,
            HAS_VU=call.value_velocity is not None,
            SPECTRAL=is_spectral,
            KEYS=stage.rows,
            PRECISE=call.precision.is_precise,
            OF_KEYS=of_keys,
            OF_VALUES=of_values,
            **options,
        )


def _sweep_rows(
    call: Call,
    stage: Stage,
    prepared: Prepared,
    grads: Gradients,
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    is_spectral: bool,
) -> None:
    # Values have no gradient of their own along rows, only their spectrum has.
    count = call.padded // _ROWS
    parts = grads.parts(count, is_spectral)
    to_factor = call.buffer(4, torch.float32) if is_spectral else delta
    for side, (_, _, table, is_average) in enumerate(call.sides()[: 1 + is_spectral]):
        if is_spectral:
            to_factor.zero_()
        sweep_rows[(triton.cdiv(call.length, stage.rows), call.heads, call.batch)](
            call.q,
            to_out,
            call.times,
            call.mask_or_times,
            *_given(call, prepared, lse, delta),
            grads.q,
            to_factor,
            delta if grads.moment is None else grads.moment,
            *_sizes(call),
            SPECTRAL=is_spectral,
            OF_KEYS=side == 0,
            **sweep_options(call, stage, 18 if is_spectral else 6),
        )
        if side == 0 and call.shared is not None:
            grads.factor = to_factor[:, :2].clone()  # the buffer is used again
        if is_spectral:
            factors_adjoint[(count, call.heads, call.batch)](
                call.times,
                table,
                to_factor,
                parts[side],
                call.length,
                call.padded,
                call.heads,
                SHARED=side == 0 and call.shared is not None,
                AVERAGE=is_average,
                SPAN=stage.span,
                ROWS=_ROWS,
                C=call.channels,
                PRECISE=call.precision.is_precise,
                num_warps=4,
            )
