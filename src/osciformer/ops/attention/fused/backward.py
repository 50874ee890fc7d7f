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
    cut_in_parts,
    empty_set_up,
    fill_matrices,
    fill_set_up,
    planes_of,
    sweep_options,
)
from osciformer.ops.attention.fused.near_backward import row_sums
from osciformer.ops.attention.fused.near_launch import run_near_backward
from osciformer.ops.attention.fused.sweep_keys import sweep_keys, weigh_rows
from osciformer.ops.attention.fused.sweep_rows import factors_adjoint, sweep_rows
from osciformer.ops.attention.fused.tiling import Stage, reaching

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

    def sums(self) -> list[Tensor]:
        """Return the sums of q, k, v and of those velocities that there are."""
        call = self.call
        velocities = (
            (self.key_velocity, call.key_velocity),
            (self.value_velocity, call.value_velocity),
        )
        return [self.q, self.k, self.v, *(x for x, given in velocities if given is not None)]

    def tokens(self, x: Tensor) -> Tensor:
        """Return ``[B H, padded, C]`` as ``[B, N, H, C]``."""
        call = self.call
        x = x.view(call.batch, call.heads, call.padded, call.channels)[:, :, : call.length]
        return x.transpose(1, 2)


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
        call.stride,
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
) -> list[Tensor]:
    """Return gradients from those of output and logsumexp ``[B H, padded]``.

    Of q, k, v, of those velocities that there are, and with `is_spectral` of (gamma, omega^2) of
    keys and of values, ``[2, H, C]`` float64.
    """
    tokens = (call.q, call.k, call.v, call.key_velocity, call.value_velocity)
    found = [torch.empty_like(x) for x in tokens if x is not None]
    shape = (2, call.heads, call.channels)
    spectra = [
        torch.zeros(shape, dtype=torch.float64, device=call.q.device)
        for _ in range(2 * is_spectral)
    ]
    for series, heads in cut_in_parts(call):
        piece = call.part(series, heads)
        grads = _run_part(
            piece,
            out[series, :, heads],
            planes_of(lse, call, series, heads),
            to_out[series, :, heads],
            planes_of(to_lse, call, series, heads),
            is_spectral=is_spectral,
        )
        for to, sums in zip(found, grads.sums(), strict=True):
            to[series, :, heads] = grads.tokens(sums)
        for to, more in zip(spectra, grads.spectra() if is_spectral else (), strict=True):
            to[:, heads] += more
    return found + spectra


def _run_part(
    call: Call, out: Tensor, lse: Tensor, to_out: Tensor, to_lse: Tensor, *, is_spectral: bool
) -> Gradients:
    grads, delta, tokens = begin_backward(call, out, to_out, to_lse)
    run_near_backward(call, grads, to_out, lse, delta, is_spectral=is_spectral)
    prepared = empty_set_up(call)
    stages = zip(
        reaching(call.tiling.rows, call.length),
        reaching(call.tiling.keys, call.length),
        strict=True,
    )
    for along_rows, along_keys in stages:
        if call.length <= along_rows.span:
            continue
        fill_set_up(call, along_rows, prepared)
        fill_matrices(call, along_rows, prepared, 18 if is_spectral else 6)
        given = (to_out, lse, delta)
        run_sweep_keys(call, along_keys, prepared, grads, tokens, *given, is_spectral)
        run_sweep_rows(call, along_rows, prepared, grads, *given, is_spectral)
    return grads


def _given(
    call: Call,
    prepared: Prepared,
    factors: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, ...]:
    assert prepared.matrices is not None
    return (
        prepared.key_state,
        prepared.value_state,
        *factors,
        *prepared.matrices,
        lse,
        delta,
        delta if prepared.bias is None else prepared.bias,
    )


def _sizes(call: Call) -> tuple[Any, ...]:
    return (call.length, call.padded, call.stride, call.logit_scale, call.scale)


def _weighed_rows(call: Call, x: Tensor, factor: Tensor) -> Tensor:
    """Return row factors times rows ``[B, N, H, C]``."""
    weighed = torch.empty_like(factor)
    weigh_rows[(call.padded // _ROWS, call.heads, call.batch)](
        x,
        factor,
        weighed,
        call.length,
        call.padded,
        call.stride,
        ROWS=_ROWS,
        C=call.channels,
        num_warps=4,
    )
    return weighed


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
    factors = (
        prepared.key_factor
        if call.moment is not None
        else _weighed_rows(call, call.q, prepared.key_factor),
        _weighed_rows(call, to_out, prepared.value_factor),
    )
    options = sweep_options(call, stage, 18 if is_spectral else 6)
    del options["ROWS"]
    count = call.padded // stage.rows
    parts = grads.parts(count, is_spectral)
    for of_keys, of_values in ((True, False), (False, True)) if stage.is_split else ((True, True),):
        sweep_keys[(count, call.heads, call.batch)](
            *tokens,
            to_out,
            call.times,
            *call.span_times(stage.span),
            call.mask_or_times,
            call.key_table,
            call.value_table,
            *_given(call, prepared, factors, lse, delta),
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
        ``[B H, 4, padded, C]`` float32, whose first two planes are the gradients of the row
        factors of keys, where the spectra want theirs.
    """
    factors = prepared.key_factor, prepared.value_factor
    count = triton.cdiv(call.length, stage.rows)
    parts = grads.parts(count, is_spectral)
    to_factor = call.buffer(4, torch.float32).zero_() if is_spectral else delta
    # Values have no gradient of their own along rows, only their spectrum has.
    both = ((True, False), (False, True)) if stage.is_split else ((True, True),)
    for of_keys, of_values in both if is_spectral else ((True, False),):
        sweep_rows[(count, call.heads, call.batch)](
            call.q,
            to_out,
            call.times,
            call.span_times(stage.span)[1],
            call.mask_or_times,
            *_given(call, prepared, factors, lse, delta),
            grads.q,
            to_factor,
            delta if grads.between is None else grads.between,
            *parts,
            *_sizes(call),
            SPECTRAL=is_spectral,
            OF_KEYS=of_keys,
            OF_VALUES=of_values,
            **sweep_options(call, stage, 18 if is_spectral else 6),
        )
    if is_spectral:
        _finish_factors(call, stage, grads, to_factor)
    return to_factor


def _finish_factors(call: Call, stage: Stage, grads: Gradients, to_factor: Tensor) -> None:
    """Add to the gradients of the spectra by those of the row factors."""
    count = call.padded // _ROWS
    parts = grads.parts(count, True)
    for side in (0, 1):
        _, _, table, is_average = call.sides()[side]
        if side == 0 and call.moment is not None:
            # Row factors of a shared path are inputs of their own.
            parts[side].zero_()
            continue
        factors_adjoint[(count, call.heads, call.batch)](
            call.times,
            table,
            to_factor[:, 2 * side :],
            parts[side],
            call.length,
            call.padded,
            call.stride,
            AVERAGE=is_average,
            SPAN=stage.span,
            ROWS=_ROWS,
            C=call.channels,
            PRECISE=call.precision.is_precise,
            num_warps=4,
        )
