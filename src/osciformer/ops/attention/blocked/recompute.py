"""Cheap set-up: evaluated in chunks that fit the cache, not kept, evaluated again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Elements of one temporary for each thread: a quarter of a mebibyte stays in a core's own cache.
_CHUNK_ELEMENTS = 1 << 15
# Elsewhere launches cost more than memory traffic: few chunks, 64 MiB for a temporary.
_DEVICE_CHUNK_ELEMENTS = 1 << 23


def _chunk(width: int, device: torch.device) -> int:
    """Return how many positions of `width` elements to evaluate at once."""
    is_cpu = device.type == "cpu"
    budget = _CHUNK_ELEMENTS * torch.get_num_threads() if is_cpu else _DEVICE_CHUNK_ELEMENTS
    return max(1, budget // max(1, width))


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        function: Callable[..., list[Tensor]],
        chunk: int,
        sliced: int,
        dtype: torch.dtype,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.function, ctx.chunk, ctx.sliced = function, chunk, sliced
        ctx.save_for_backward(*inputs)
        length = inputs[0].shape[-2]
        output: Tensor | None = None
        for start in range(0, length, chunk):
            size = min(chunk, length - start)
            planes = function(*_cut(inputs, sliced, start, size))
            if output is None:
                shape = list(torch.broadcast_shapes(*(p.shape for p in planes)))
                shape[-2] = length
                output = planes[0].new_empty(len(planes), *shape, dtype=dtype)
            for target, plane in zip(output, planes, strict=True):
                target.narrow(-2, start, size).copy_(plane)
        assert output is not None
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        needed = [i for i, want in enumerate(ctx.needs_input_grad[4:]) if want]
        sums = {i: torch.zeros_like(inputs[i]) for i in needed}
        length = inputs[0].shape[-2]
        for start in range(0, length, ctx.chunk):
            size = min(ctx.chunk, length - start)
            parts = [p.detach() for p in _cut(inputs, ctx.sliced, start, size)]
            for i in needed:
                parts[i].requires_grad_()
            with torch.enable_grad():
                planes = ctx.function(*parts)
            pairs = [
                (plane, grad.narrow(-2, start, size).to(plane.dtype).expand_as(plane))
                for plane, grad in zip(planes, grads, strict=True)
                if plane.requires_grad
            ]
            found = torch.autograd.grad(
                [plane for plane, _ in pairs],
                [parts[i] for i in needed],
                [grad for _, grad in pairs],
                allow_unused=True,
            )
            for i, grad in zip(needed, found, strict=True):
                if grad is not None:
                    target = sums[i].narrow(-2, start, size) if i < ctx.sliced else sums[i]
                    target.add_(grad)
        return (None, None, None, None, *(sums.get(i) for i in range(len(inputs))))


def _cut(inputs: tuple[Tensor, ...], sliced: int, start: int, size: int) -> list[Tensor]:
    return [x.narrow(-2, start, size) if i < sliced else x for i, x in enumerate(inputs)]


def recomputed(
    function: Callable[..., list[Tensor]],
    along: list[Tensor],
    whole: list[Tensor],
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the planes of `function(*along, *whole)`, stacked along a leading axis and cast.

    Evaluated in chunks along axis -2 and not remembered: backward evaluates again.

    Args:
        function: Returns planes of equal shape; pointwise along axis -2.
        along: Tensors ``[..., X, .]`` that are cut.
        whole: Tensors that every chunk needs whole.
        width: Elements per position of its largest temporary, to choose the chunk.
        dtype: Of the results.
    """
    if torch.compiler.is_compiling():
        planes = torch.broadcast_tensors(*function(*along, *whole))
        return torch.stack([p.to(dtype) for p in planes])
    chunk = _chunk(width, along[0].device)
    result: Tensor = _Recompute.apply(function, chunk, len(along), dtype, *along, *whole)
    return result
