"""Launches of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.fused.launch import (
    Call,
    Prepared,
    Stage,
    empty_set_up,
    fill_matrices,
    fill_set_up,
    sweep_options,
)
from osciformer.ops.attention.fused.near_backward import row_sums
from osciformer.ops.attention.fused.near_launch import run_near_backward
from osciformer.ops.attention.fused.sweep_backward import factors_adjoint, sweep_keys, sweep_rows

# Rows a program of the kernels that go over tokens once.
_ROWS = 64


@dataclass
class Gradients:
    """Sums of gradients: tokens as ``[B H, padded, C]`` float32, spectra as lists of parts.

    Under a shared path `bias` ``[B H, padded]`` and `between` ``[B H, spans, group, 2, C]`` are
    those of the stage at hand (`shared_launch`).
    """

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    key_velocity: Tensor
    value_velocity: Tensor
    bias: Tensor | None = None
    between: Tensor | None = None
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


def begin_backward(
    call: Call, out: Tensor, to_out: Tensor, to_lse: Tensor
) -> tuple[Gradients, Tensor, tuple[Tensor, ...]]:
    """Return empty sums, delta ``[B H, padded]`` (`row_sums`) and the tokens."""
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
    return grads, delta, tokens


def run_backward(
    call: Call, out: Tensor, lse: Tensor, to_out: Tensor, to_lse: Tensor, *, is_spectral: bool
) -> Gradients:
    """Return the gradients of one call from those of its output and logsumexp ``[B H, padded]``."""
    grads, delta, tokens = begin_backward(call, out, to_out, to_lse)
    run_near_backward(call, grads, to_out, lse, delta, is_spectral=is_spectral)
    prepared = empty_set_up(call)
    for along_rows, along_keys in zip(call.tiling.rows, call.tiling.keys, strict=True):
        if call.length <= along_rows.span:
            continue
        fill_set_up(call, along_rows, prepared)
        fill_matrices(call, along_rows, prepared, 18 if is_spectral else 6)
        given = (to_out, lse, delta)
        run_sweep_keys(call, along_keys, prepared, grads, tokens, *given, is_spectral)
        run_sweep_rows(call, along_rows, prepared, grads, *given, is_spectral)
    return grads


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
        delta if prepared.bias is None else prepared.bias,
    )


def _sizes(call: Call) -> tuple[Any, ...]:
    return (call.length, call.padded, call.heads, call.logit_scale, call.scale)


def run_sweep_keys(
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
    """Add to the gradients of keys and values, and of their spectra, by one stage."""
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


def run_sweep_rows(
    call: Call,
    stage: Stage,
    prepared: Prepared,
    grads: Gradients,
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    is_spectral: bool,
) -> Tensor:
    """Add to the gradients of queries, and of the spectra, by one stage.

    Returns:
        ``[B H, 4, padded, C]`` float32, whose first planes are the gradients of the row factors of
        keys, where the spectra want theirs.
    """
    # Values have no gradient of their own along rows, only their spectrum has.
    count = call.padded // _ROWS
    parts = grads.parts(count, is_spectral)
    to_factor = call.buffer(4, torch.float32) if is_spectral else delta
    for side in (1, 0) if is_spectral else (0,):
        _, _, table, is_average = call.sides()[side]
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
            delta if grads.between is None else grads.between,
            *_sizes(call),
            SPECTRAL=is_spectral,
            OF_KEYS=side == 0,
            **sweep_options(call, stage, 18 if is_spectral else 6),
        )
        if is_spectral:
            factors_adjoint[(count, call.heads, call.batch)](
                call.times,
                table,
                to_factor,
                parts[side],
                call.length,
                call.padded,
                call.heads,
                SHARED=side == 0 and call.moment is not None,
                AVERAGE=is_average,
                SPAN=stage.span,
                ROWS=_ROWS,
                C=call.channels,
                PRECISE=call.precision.is_precise,
                num_warps=4,
            )
    return to_factor
