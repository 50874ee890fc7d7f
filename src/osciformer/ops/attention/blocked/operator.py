"""The quadratic part as a `torch.library` operator: one opaque node for compile and export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from osciformer.ops.attention.blocked import core
from osciformer.ops.attention.blocked.core import CoreInputs
from osciformer.ops.attention.blocked.side import SideInputs

_NUM_SIDE = 5  # tensors of a SideInputs


def _inputs(
    tensors: list[Tensor | None],
    present: Tensor | None,
    num_heads: int,
    num_slots: int,
    fan: int,
    is_drift: bool,
) -> CoreInputs:
    key, value = tensors[:_NUM_SIDE], tensors[_NUM_SIDE : 2 * _NUM_SIDE]
    span, age = tensors[2 * _NUM_SIDE :]
    assert span is not None
    assert age is not None
    return CoreInputs(
        SideInputs(*key),  # type: ignore[arg-type]
        SideInputs(*value),  # type: ignore[arg-type]
        span,
        age,
        present,
        num_heads,
        num_slots,
        fan,
        is_drift,
    )


@torch.library.custom_op("osciformer::blocked_forward", mutates_args=())
def _forward(
    key_matrix: Tensor,
    key_key: Tensor,
    key_amplitude: Tensor | None,
    key_base: Tensor | None,
    key_step: Tensor | None,
    value_matrix: Tensor,
    value_key: Tensor,
    value_amplitude: Tensor | None,
    value_base: Tensor | None,
    value_step: Tensor | None,
    span: Tensor,
    age: Tensor,
    present: Tensor | None,
    num_heads: int,
    num_slots: int,
    fan: int,
    is_drift: bool,
) -> tuple[Tensor, Tensor]:
    tensors = [key_matrix, key_key, key_amplitude, key_base, key_step]
    tensors += [value_matrix, value_key, value_amplitude, value_base, value_step, span, age]
    with torch.autocast(span.device.type, enabled=False):
        return core.forward(_inputs(tensors, present, num_heads, num_slots, fan, is_drift))


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    key, span, heads = args[6], args[10], args[13]
    shape = (span.shape[0], heads, span.shape[1])
    return span.new_empty(*shape, key.shape[-1] // heads), span.new_empty(shape)


@torch.library.custom_op("osciformer::blocked_backward", mutates_args=())
def _backward(
    given: list[Tensor],
    is_given: list[bool],
    present: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    num_heads: int,
    num_slots: int,
    fan: int,
    is_drift: bool,
) -> list[Tensor]:
    rest = iter(given)
    tensors = [next(rest) if there else None for there in is_given]
    inputs = _inputs(tensors, present, num_heads, num_slots, fan, is_drift)
    with torch.autocast(inputs.span.device.type, enabled=False):
        key, value, span, age = core.backward(inputs, out, lse, grad_out, grad_lse)
    grads = [*key.tensors(), *value.tensors(), span, age]
    return [
        torch.zeros_like(tensor) if grad is None else _own(grad)
        for tensor, grad in zip(tensors, grads, strict=True)
        if tensor is not None
    ]


def _own(x: Tensor) -> Tensor:
    """Return `x` as a tensor of its own memory, which is what operators must return."""
    is_whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if is_whole and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


@_backward.register_fake
def _(given: list[Tensor], *args: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, present, ctx.num_heads, ctx.num_slots, ctx.fan, ctx.is_drift = inputs
    ctx.is_given = [t is not None for t in tensors]
    ctx.save_for_backward(*(t for t in tensors if t is not None), present, *output)


def _pull_back(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *given, present, out, lse = ctx.saved_tensors
    found = iter(
        _backward(
            given,
            ctx.is_given,
            present,
            out,
            lse,
            grad_out.contiguous(),
            grad_lse.contiguous(),
            ctx.num_heads,
            ctx.num_slots,
            ctx.fan,
            ctx.is_drift,
        )
    )
    grads = [next(found) if there else None for there in ctx.is_given]
    return (*grads, None, None, None, None, None)


_forward.register_autograd(_pull_back, setup_context=_setup_context)


def attend_strictly_before(inputs: CoreInputs) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, X, C]`` and logsumexp ``[B, H, X]`` of rows over the keys before them.

    Differentiable in every tensor of `inputs` (in `span` and `age` where integrals are drifts);
    memory is linear in X, forward and backward.
    """
    found: tuple[Tensor, Tensor] = _forward(
        *inputs.key.tensors(),
        *inputs.value.tensors(),
        inputs.span,
        inputs.age,
        inputs.present,
        inputs.num_heads,
        inputs.num_slots,
        inputs.fan,
        inputs.is_drift,
    )
    return found
