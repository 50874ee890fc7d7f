"""Launches for query paths that all rows share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.fused.backward import (
    Gradients,
    begin_backward,
    run_sweep_keys,
    run_sweep_rows,
)
from osciformer.ops.attention.fused.launch import (
    Call,
    Prepared,
    empty_set_up,
    fill_matrices,
    fill_set_up,
    num_groups,
    run_sweep,
)
from osciformer.ops.attention.fused.near_shared_backward import near_shared_backward
from osciformer.ops.attention.fused.near_shared_forward import near_shared_forward
from osciformer.ops.attention.fused.path_spans import (
    path_between,
    path_between_adjoint,
    path_factors,
    path_factors_adjoint,
)
from osciformer.ops.attention.fused.tiling import TILE, Stage

# Channels a program of the kernels within spans, and key spans a program of those between them.
_CHANNELS = 16
_WIDTH = 8


@dataclass
class PathSpans:
    """The path's moments over the spans of a stage, float32 ``[B H, spans, 2, C]``.

    Attributes:
        total: Over each span.
        beyond: From the end of each span to that of its group.
    """

    total: Tensor
    beyond: Tensor


def _has_far(call: Call) -> bool:
    return call.length > call.tiling.far.span


def _factor_options(call: Call, stage: Stage) -> dict[str, int | bool]:
    return {
        "SPAN": stage.span,
        "ROWS": TILE,
        "WIDTH": _CHANNELS,
        "C": call.channels,
        "PRECISE": call.precision.is_precise,
        "num_warps": 4,
    }


def _factor_grid(call: Call, count: int) -> tuple[int, int, int]:
    return count, call.heads * (call.channels // _CHANNELS), call.batch


def prepare_path(call: Call, stage: Stage, prepared: Prepared, planes: int = 6) -> PathSpans:
    """Write row factors of keys and matrices of a stage, with the path's moments in them."""
    assert call.moment is not None
    count = triton.cdiv(call.padded, stage.span)
    shape = (call.num_planes, count, 2, call.channels)
    total, beyond = (
        torch.empty(shape, dtype=torch.float32, device=call.q.device) for _ in range(2)
    )
    path_factors[_factor_grid(call, count)](
        call.moment,
        call.times,
        call.key_table,
        prepared.key_factor,
        total,
        call.length,
        call.padded,
        call.heads,
        **_factor_options(call, stage),
    )
    fill_matrices(call, stage, prepared, planes)
    assert prepared.matrices is not None
    spans, group = num_groups(call, stage)
    path_between[(_num_columns(count, group), call.num_planes)](
        prepared.matrices[0],
        total,
        beyond,
        spans,
        count,
        group,
        PLANES=planes,
        WIDTH=_WIDTH,
        C=call.channels,
        num_warps=4,
    )
    return PathSpans(total, beyond)


def _num_columns(count: int, group: int) -> int:
    """Return the number of programs that take `_WIDTH` spans of a group each."""
    return triton.cdiv(count, group) * triton.cdiv(group, _WIDTH)


def run_shared_forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output ``[B, N, H, C]``, and logsumexp to base 2 and both biases ``[B H, padded]``.

    The biases, integrals of path times key from each key to the end of its tile and of its far
    span, are what the backward pass does not compute again.
    """
    acc, lse, out = call.buffer(1, torch.float32), call.per_row(), torch.empty_like(call.q)
    bias, far_bias = call.per_row(), call.per_row()
    middle, far = call.tiling.middle, call.tiling.far
    has_far = _has_far(call)
    prepared = empty_set_up(call)
    path = prepare_path(call, middle, prepared)
    near_shared_forward[(call.padded // TILE, call.heads, call.batch)](
        call.q,
        call.k,
        call.k if call.key_velocity is None else call.key_velocity,
        call.v,
        call.v if call.value_velocity is None else call.value_velocity,
        call.times,
        call.mask_or_times,
        call.key_table,
        call.value_table,
        call.moment,
        path.beyond,
        prepared.key_state,
        prepared.value_state,
        prepared.value_factor,
        bias,
        far_bias,
        acc,
        lse,
        call.length,
        call.padded,
        call.heads,
        call.logit_scale,
        HAS_FAR=has_far,
        **call.near_options(),
    )
    prepared.bias = bias
    run_sweep(call, middle, prepared, acc, lse, None if has_far else out)
    if has_far:
        fill_set_up(call, far, prepared)
        prepare_path(call, far, prepared)
        prepared.bias = far_bias
        run_sweep(call, far, prepared, acc, lse, out)
    else:
        far_bias.zero_()  # nobody reads it, but it is returned
    return out, lse, bias, far_bias


@dataclass
class SharedGradients:
    """Gradients of one call, and of the path's moments ``[B H, 2, padded, C]`` float32."""

    grads: Gradients
    moment: Tensor


def run_shared_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    biases: tuple[Tensor, Tensor],
    to_out: Tensor,
    to_lse: Tensor,
) -> SharedGradients:
    """Return the gradients of one call from those of its output and logsumexp ``[B H, padded]``.

    From far to near: what a stage does to the biases goes on to the near tiles.
    """
    assert call.moment is not None
    grads, delta, tokens = begin_backward(call, out, to_out, to_lse)
    for x in (grads.k, grads.v, grads.key_velocity, grads.value_velocity):
        x.zero_()
    found = SharedGradients(grads, torch.zeros_like(call.moment))
    given = (to_out, lse, delta)
    prepared = empty_set_up(call)
    to_biases, beyond, to_beyond = [delta, delta], delta, delta
    for index in (1, 0):
        along_rows, along_keys = call.tiling.rows[index], call.tiling.keys[index]
        is_middle = index == 0
        if call.length > along_rows.span:
            fill_set_up(call, along_rows, prepared)
            path = prepare_path(call, along_rows, prepared, 18)
            spans, group = num_groups(call, along_rows)
            shape = (call.num_planes, spans, group, 2, call.channels)
            grads.between = torch.zeros(shape, dtype=torch.float32, device=call.q.device)
            grads.bias = to_biases[index] = call.per_row()
            prepared.bias = biases[index]
            run_sweep_keys(call, along_keys, prepared, grads, tokens, *given, True)
            to_factor = run_sweep_rows(call, along_rows, prepared, grads, *given, True)
            if is_middle:
                beyond, to_beyond = path.beyond, torch.empty_like(path.beyond)
        if is_middle:
            _near(call, found, tokens, *given, to_biases, beyond, to_beyond)
        if call.length > along_rows.span:
            has_beyond = is_middle and _has_far(call)
            _finish_path(
                call,
                along_rows,
                prepared,
                path,
                found,
                to_factor,
                to_beyond if has_beyond else None,
            )
            del to_factor  # large, and the next stage has one of its own
    return found


def _near(
    call: Call,
    found: SharedGradients,
    tokens: tuple[Tensor, ...],
    to_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    to_biases: list[Tensor],
    beyond: Tensor,
    to_beyond: Tensor,
) -> None:
    grads = found.grads
    near_shared_backward[(call.padded // TILE, call.heads, call.batch)](
        *tokens,
        call.times,
        call.mask_or_times,
        call.key_table,
        call.value_table,
        call.moment,
        beyond,
        to_out,
        lse,
        delta,
        *to_biases,
        grads.q,
        grads.k,
        grads.key_velocity,
        grads.v,
        grads.value_velocity,
        found.moment,
        to_beyond,
        *grads.parts(call.padded // TILE, True),
        call.length,
        call.padded,
        call.heads,
        call.logit_scale,
        call.scale,
        HAS_MIDDLE=call.length > TILE,
        HAS_FAR=_has_far(call),
        **call.near_options(),
    )


def _finish_path(
    call: Call,
    stage: Stage,
    prepared: Prepared,
    path: PathSpans,
    found: SharedGradients,
    to_factor: Tensor,
    to_beyond: Tensor | None,
) -> None:
    """Pull the gradients of a stage's moments and row factors back to the gaps' moments."""
    grads = found.grads
    assert prepared.matrices is not None
    spans, group = num_groups(call, stage)
    count, programs = path.total.shape[1], _num_columns(path.total.shape[1], group)
    new = path.total.new_empty
    to_totals = new(call.num_planes, triton.cdiv(group, _WIDTH), count, 2, call.channels)
    parts = new(call.num_planes, programs, 2, call.channels)
    path_between_adjoint[(programs, call.num_planes)](
        prepared.matrices[0],
        path.total,
        grads.between,
        path.beyond if to_beyond is None else to_beyond,
        to_totals,
        parts,
        spans,
        count,
        group,
        HAS_BEYOND=to_beyond is not None,
        WIDTH=_WIDTH,
        C=call.channels,
        num_warps=4,
    )
    more_parts = torch.empty_like(path.total)
    path_factors_adjoint[_factor_grid(call, count)](
        call.moment,
        call.times,
        call.key_table,
        to_factor,
        to_totals.sum(1),
        found.moment,
        more_parts,
        call.length,
        call.padded,
        call.heads,
        PLANES=to_factor.shape[1],
        **_factor_options(call, stage),
    )
    grads.key_spectrum += [parts, more_parts]
