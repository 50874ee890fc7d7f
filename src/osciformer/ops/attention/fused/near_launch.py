"""Launches of what happens within tiles: close pairs, near pairs, ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from osciformer.ops.attention.fused.attend import is_interpreted
from osciformer.ops.attention.fused.close_backward import close_adjoint
from osciformer.ops.attention.fused.close_forward import BLOCK, close_keys, close_values
from osciformer.ops.attention.fused.near_backward import near_backward
from osciformer.ops.attention.fused.near_forward import near_forward
from osciformer.ops.attention.fused.tied import tied_backward, tied_forward

if TYPE_CHECKING:
    from osciformer.ops.attention.fused.backward import Gradients
    from osciformer.ops.attention.fused.launch import Call, Prepared

# Blocks a program of the close kernels, and channels at a time.
_BLOCKS, _WIDTH = 2, 32


def _tokens(call: Call) -> tuple[Tensor, ...]:
    return (
        call.q,
        call.k,
        call.k if call.key_velocity is None else call.key_velocity,
        call.v,
        call.v if call.value_velocity is None else call.value_velocity,
        call.times,
        call.mask_or_times,
        call.key_table,
        call.value_table,
    )


def _close_options(call: Call) -> dict[str, Any]:
    """Return the arguments of the close kernels that are known when they are compiled."""
    given = call.near_options()
    # A thread has two channels: sums over channels then take few steps, and registers last. The
    # interpreter is the faster the more a program does.
    width = min(call.channels, _WIDTH)
    return {name: given[name] for name in ("HAS_MASK", "C", "PRECISE")} | {
        "BLOCKS": 8 if is_interpreted() else _BLOCKS * _WIDTH // width,
        "WIDTH": width,
        "num_warps": 1,
        "num_stages": 1,
    }


def _close_grid(call: Call, options: dict[str, Any]) -> tuple[int, int, int]:
    return call.padded // (BLOCK.value * options["BLOCKS"]), call.heads, call.batch


def _pairs(call: Call) -> Tensor:
    """Return an empty ``[B H, 36, padded / 8]`` float32, a number for each pair within blocks."""
    block: int = BLOCK.value
    shape = (call.num_planes, block * (block + 1) // 2, call.padded // block)
    return torch.empty(shape, dtype=torch.float32, device=call.q.device)


def _run_close_keys(
    call: Call, state: Tensor, factor: Tensor, lse: Tensor, *, is_forward: bool
) -> Tensor:
    """Return the weights of pairs within blocks, in the form that the pass asks for."""
    options, pairs = _close_options(call), _pairs(call)
    close_keys[_close_grid(call, options)](
        call.q,
        call.k,
        call.k if call.key_velocity is None else call.key_velocity,
        call.times,
        call.mask_or_times,
        call.key_table,
        state,
        factor,
        pairs,
        lse,
        call.length,
        call.padded,
        call.stride,
        call.logit_scale,
        HAS_U=call.key_velocity is not None,
        STRICT=call.is_strict,
        AVERAGE=call.is_average,
        FORWARD=is_forward,
        TILE=call.near_options()["TILE"],
        **options,
    )
    return pairs


def _near_options(call: Call) -> dict[str, Any]:
    """Return the arguments of the near kernels that are known when they are compiled."""
    options = call.near_options()
    del options["STRICT"]
    return options | {
        "LOWEST": BLOCK.value.bit_length() - 1,
        "WIDTH": 16,
        # A warp has sixteen rows, the least that products take; float64 takes registers.
        "num_warps": 8 if call.precision.is_precise else 2,
        "num_stages": 1,
    }


def _tied_options(call: Call) -> dict[str, Any]:
    """Return the arguments of the kernels for ties that are known when they are compiled."""
    given = call.near_options()
    names = ("HAS_MASK", "TILE", "C", "WIDTH", "PREC", "OPERAND", "num_warps")
    return {name: given[name] for name in names}


def run_near(call: Call, prepared: Prepared, acc: Tensor, lse: Tensor) -> None:
    """Write output and logsumexp over each row's tile, and the set-up of the middle stage."""
    pairs = _run_close_keys(call, prepared.key_state, prepared.key_factor, lse, is_forward=True)
    options, sizes = _close_options(call), (call.length, call.padded, call.stride)
    close_values[_close_grid(call, options)](
        call.v,
        call.v if call.value_velocity is None else call.value_velocity,
        call.times,
        call.mask_or_times,
        call.value_table,
        prepared.value_state,
        prepared.value_factor,
        pairs,
        acc,
        *sizes,
        HAS_U=call.value_velocity is not None,
        AVERAGE=call.is_average,
        TILE=call.near_options()["TILE"],
        **options,
    )
    options = _near_options(call)
    grid = (call.padded // options["TILE"], call.heads, call.batch)
    near_forward[grid](*_tokens(call), acc, lse, *sizes, call.logit_scale, **options)
    if not call.is_strict:
        tied_forward[grid](
            call.q,
            call.k,
            call.v,
            call.times,
            call.mask_or_times,
            acc,
            lse,
            *sizes,
            call.logit_scale,
            **_tied_options(call),
        )


def _run_close_backward(
    call: Call, grads: Gradients, to_out: Tensor, lse: Tensor, delta: Tensor, is_spectral: bool
) -> None:
    weights = _run_close_keys(call, grads.k, grads.k, lse, is_forward=False)
    to_weights, options = _pairs(call), _close_options(call)
    grid = _close_grid(call, options)
    parts = grads.parts(grid[0], is_spectral)
    sides = (
        (call.q, grads.q, grads.k, grads.key_velocity),
        (to_out, grads.q, grads.v, grads.value_velocity),
    )
    # Values first: they give the gradients of the weights.
    for side in (1, 0):
        x, u, table, is_average = call.sides()[side]
        close_adjoint[grid](
            sides[side][0],
            x,
            x if u is None else u,
            call.times,
            call.mask_or_times,
            table,
            weights,
            to_weights,
            delta,
            *sides[side][1:],
            parts[side],
            call.length,
            call.padded,
            call.stride,
            call.scale,
            HAS_U=u is not None,
            AVERAGE=is_average,
            SPECTRAL=is_spectral,
            OF_KEYS=side == 0,
            **options,
        )


def run_near_backward(
    call: Call,
    grads: Gradients,
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    is_spectral: bool,
) -> None:
    """Write the gradients that pairs within tiles contribute."""
    _run_close_backward(call, grads, to_out, lse, delta, is_spectral)
    sizes = (call.length, call.padded, call.stride, call.logit_scale, call.scale)
    options = _near_options(call)
    grid = (call.padded // options["TILE"], call.heads, call.batch)
    near_backward[grid](
        *_tokens(call),
        to_out,
        lse,
        delta,
        grads.q,
        grads.k,
        grads.key_velocity,
        grads.v,
        grads.value_velocity,
        *grads.parts(grid[0] * (options["LEVELS"] - options["LOWEST"]), is_spectral),
        *sizes,
        SPECTRAL=is_spectral,
        **options,
    )
    if not call.is_strict:
        tied_backward[grid](
            call.q,
            call.k,
            call.v,
            call.times,
            call.mask_or_times,
            to_out,
            lse,
            delta,
            grads.q,
            grads.k,
            grads.v,
            *sizes,
            **_tied_options(call),
        )
