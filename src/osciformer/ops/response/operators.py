"""The scan as `torch.library` operators: opaque nodes for compile and export, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from osciformer.ops.response.gaps import Channels
from osciformer.ops.response.scan import Block, Sums, plan
from osciformer.ops.response.step import PUSHES, Push, Response

_INPUTS = (
    "Tensor drive, Tensor gaps, Tensor omega, Tensor zeta, Tensor initial, int push,"
    " bool with_kernels"
)


def respond(
    drive: Tensor,
    gaps: Tensor,
    omega: Tensor,
    zeta: Tensor,
    initial: Response,
    push: Push,
    *,
    with_kernels: bool,
) -> Response:
    """Return positions and velocities at all rows, ``[B, N, F, K]`` of the drive's dtype.

    Args:
        drive: What each variable is at each row, or its kicks ``[B, N, F]``.
        gaps: Times to the next row ``[B, N]`` float64; the last is 0.
        omega: Natural frequencies ``[1|F, K]`` float64.
        zeta: Damping ratios, alike.
        initial: The states before the first row acts, ``[B, F, K]`` of the drive's dtype.
        push: How the drive acts.
        with_kernels: Whether Triton's kernels run.
    """
    given = (drive, gaps, omega, zeta, torch.stack(initial))
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    # The first call of an operator imports all of torch's compiler, which takes a second.
    run = _forward if has_gradient or torch.compiler.is_compiling() else forward
    return Response(*run(*given, PUSHES.index(push), with_kernels).unbind(0))


def _parts(with_kernels: bool) -> tuple[Any, type[Channels], type[Block]]:
    if with_kernels:
        # Inside a function: the package must import without Triton.
        from osciformer.ops.response.triton import scan as kernel_scan

        return kernel_scan.plan, kernel_scan.KernelChannels, kernel_scan.KernelBlock
    return plan, Channels, Block


def _blocks(
    args: tuple[Any, ...], *, with_gradients: bool = False
) -> Iterator[tuple[slice, int, Block]]:
    """Yield parts of the batch, the number of their chunks, and blocks, from operators' inputs."""
    drive, gaps, omega, zeta, _, push, with_kernels = args
    planned, channels_type, block_type = _parts(with_kernels)
    channels = channels_type(omega.flatten(), zeta.flatten(), with_gradients=with_gradients)
    batch, rows, variables = drive.shape
    size, chunks = planned(batch, rows, variables * omega.shape[-1])
    for start in range(0, batch, size):
        part = slice(start, start + size)
        block = block_type(drive[part], gaps[part], omega, channels, chunks, PUSHES[push])
        yield part, chunks, block


def forward(*args: Any) -> Tensor:
    """Return what `respond` does as ``[2, B, N, F, K]``, for a `Push` by its place in `PUSHES`."""
    drive, _, omega, _, initial, _, _ = args
    out = drive.new_empty(2, *drive.shape, omega.shape[-1])
    for part, chunks, block in _blocks(args):
        state = initial[:, part].to(torch.float64, copy=True)
        if chunks > 1:
            shape = (2, block.batch * chunks, *initial.shape[2:])
            state = block.starts(state, block.forward(omega.new_zeros(shape), None))
        block.forward(state, out[:, part])
    return out


_forward = torch.library.custom_op(
    "osciformer::response_forward",
    forward,
    mutates_args=(),
    schema=f"({_INPUTS}) -> Tensor",
)


@_forward.register_fake
def _(*args: Any) -> Tensor:
    drive, omega = args[0], args[2]
    return drive.new_empty(2, *drive.shape, omega.shape[-1])


@torch.library.custom_op(
    "osciformer::response_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor states, Tensor grads, bool of_spectrum) -> Tensor[]",
)
def _backward(*args: Any) -> list[Tensor]:
    drive, gaps, omega, _, initial, push, _, states, upstream, of_spectrum = args
    d_drive, d_gaps, d_initial = (z.new_zeros(z.shape) for z in (drive, gaps, initial))
    d_spectrum = omega.new_zeros(2, omega.numel())
    for part, chunks, block in _blocks(args[:7], with_gradients=of_spectrum):
        shape = (2, block.batch * chunks, *initial.shape[2:])
        ends = omega.new_zeros(shape)
        if chunks > 1:
            ends = block.ends(block.backward(ends, upstream[:, part], None))
        sums = Sums(states[:, part], of_spectrum)
        starts = block.backward(ends, upstream[:, part], sums)
        d_initial[:, part] = starts.unflatten(1, (block.batch, chunks))[:, :, 0]
        if sums.drive:
            d_drive[part] = block.join(sums.drive)
        if PUSHES[push].slope is not None:
            change = block.join(sums.change)[:, :-1].to(drive.dtype)
            d_drive[part, 1:] += change
            d_drive[part, :-1] -= change
        if of_spectrum:
            d_gaps[part] = block.join(sums.gaps)
            d_spectrum += torch.stack(sums.spectrum).sum(0)
    return [d_drive, d_gaps, *(x.clone().view_as(omega) for x in d_spectrum), d_initial]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:5]]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5], output)
    ctx.modes = inputs[5:]


def _pull_back(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, states = ctx.saved_tensors
    of_spectrum = any(ctx.needs_input_grad[1:4])
    return (*_backward(*inputs, *ctx.modes, states, grads, of_spectrum), None, None)


_forward.register_autograd(_pull_back, setup_context=_setup_context)
