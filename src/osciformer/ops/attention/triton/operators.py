"""The kernels as `torch.library` operators: opaque nodes for compile, export and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from osciformer.ops.attention.triton import pair_call, path_integrals
from osciformer.ops.attention.triton.call import (
    Call,
    format_for,
    padded_length,
    spectrum_table,
    stages_for,
    tiling,
)
from osciformer.ops.attention.triton.compilation import launch, prepare
from osciformer.ops.attention.triton.launch import run_backward, run_forward
from osciformer.ops.attention.triton.path_integrals import ROWS, STEPS, Modes
from osciformer.ops.attention.triton.primitives import WIDTH, Side, Tokens, sizes_of

__all__ = ["attend_pairs", "attention_forward", "padded_length", "path_forward"]


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"osciformer::{name}", mutates_args=(), schema=schema)


# --- Attention. -----------------------------------------------------------------------------------

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_velocity, Tensor? value_velocity, "
    "Tensor key_spectrum, Tensor value_spectrum, Tensor? path, Tensor times, Tensor? mask"
)
_OPTIONS = "float scale, bool is_average, bool is_strict"


def _as_call(tensors: Sequence[Any], options: Sequence[Any]) -> Call:
    q, k, v, key_velocity, value_velocity, key_spectrum, value_spectrum, path, times, mask = tensors
    keys = Side(k, key_velocity, spectrum_table(key_spectrum))
    values = Side(v, value_velocity, spectrum_table(value_spectrum))
    scale, is_average, is_strict = options
    return Call(Tokens(q, keys, values, times, mask), scale, is_average, is_strict, path)


def _prepare(
    tensors: Sequence[Any], options: Sequence[Any], *, is_trained: bool, is_spectral: bool
) -> None:
    """Compile the kernels of calls like this one; with `is_trained` those of the backward pass."""
    q: Tensor = tensors[0]
    length, channels = q.shape[1], q.shape[3]
    stages = tiling(channels, format_for(channels, q.dtype).dtype).forward
    # Which stages run, and whether there is a sweep backward.
    spans = (*(stage.span for stage in stages_for(stages, length)), length <= stages[0].span)
    given = tuple(x is None for x in tensors)
    kind = (q.device, q.dtype, channels, spans, given, *options[1:], is_trained, is_spectral)

    def rehearse() -> None:
        shapes = [None if x is None else torch.empty_like(x, device="meta") for x in tensors]
        call = _as_call(shapes, options)
        out, lse, biases = run_forward(call)
        if is_trained:
            run_backward(call, out, lse, biases, out, lse, is_spectral=is_spectral)

    prepare(kind, rehearse, f"head size {channels} in {str(q.dtype).removeprefix('torch.')}")


@_operator("attention_forward", f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
def attention_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[B, N, H, C]``, logsumexp to base 2 ``[B H, padded]``, and biases.

    Tokens are ``[B, N, H, C]`` of one dtype, times ``[B, N]`` float64 and sorted, spectra (decay
    rate and squared frequency, of keys and values) ``[2, H, C]`` float64. `path` ``[B H, 2, padded,
    C]`` float32 are the integrals of a path that all rows share over the gap after each token
    (`path_forward`); the queries are then the path at each row's own time, which counts for ties
    alone. The backward pass needs the biases.
    """
    tensors, options = args[:10], args[10:]
    # Inputs want gradients here in an eager training step only. Elsewhere the backward pass
    # prepares its kernels itself.
    wants = [x is not None and x.requires_grad for x in tensors[:8]]
    is_spectral = any(wants) and (any(wants[5:7]) or tensors[7] is not None)
    _prepare(tensors, options, is_trained=any(wants), is_spectral=is_spectral)
    return run_forward(_as_call(tensors, options))


@attention_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, path = args[0], args[7]
    batch, length, heads, channels = q.shape
    shape = (batch * heads, padded_length(length, channels, q.dtype))
    biases = (0,) if path is None else (2, *shape)
    lse, biases = (q.new_empty(x, dtype=torch.float32) for x in (shape, biases))
    return torch.empty_like(q), lse, biases


@_operator(
    "attention_backward",
    f"({_TENSORS}, Tensor out, Tensor lse, Tensor biases, Tensor d_out, Tensor d_lse, {_OPTIONS}, "
    "bool is_spectral) -> Tensor[]",
)
def attention_backward(*args: Any) -> list[Tensor]:
    """Return what `run_backward` does."""
    *options, is_spectral = args[15:]
    _prepare(args[:10], options, is_trained=True, is_spectral=is_spectral)
    return run_backward(_as_call(args[:10], options), *args[10:15], is_spectral=is_spectral)


@attention_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    given = [*args[:5], *(args[5:7] if args[-1] else ()), args[7]]
    return [torch.empty_like(x) for x in given if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[10:]
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.mark_non_differentiable(output[2])


def _pull_back(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    # Path integrals depend on the keys' spectrum, and their gradient always includes it.
    has_path = tensors[7] is not None
    is_spectral = ctx.needs_input_grad[5] or ctx.needs_input_grad[6] or has_path
    upstream = (d_out.contiguous(), d_lse.contiguous())
    found = iter(attention_backward(*tensors, *upstream, *ctx.options, is_spectral))
    grads = [None if x is None else next(found) for x in tensors[:5]]
    spectra = [next(found) if is_spectral else None for _ in range(2)]
    return (*grads, *spectra, next(found) if has_path else None, *[None] * 5)


attention_forward.register_autograd(_pull_back, setup_context=_setup_context)


# --- Attention over short series, pair by pair. ---------------------------------------------------

_PAIRED = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_velocity, Tensor? value_velocity, Tensor key_omega, "
    "Tensor key_zeta, Tensor value_omega, Tensor value_zeta, Tensor query_times, Tensor key_times, "
    "Tensor? mask"
)


def _prepare_pairs(
    tensors: Sequence[Any], options: Sequence[Any], *, is_trained: bool, is_spectral: bool
) -> None:
    """Compile both kernels of calls like this one; without `is_trained` the first."""
    q: Tensor = tensors[0]
    width = triton.next_power_of_2(q.shape[3])
    dtypes = (None if x is None else x.dtype for x in tensors)
    kind = ("pairs", q.device, width, *dtypes, *options[1:], is_trained, is_spectral)

    def rehearse() -> None:
        shapes = [None if x is None else torch.empty_like(x, device="meta") for x in tensors]
        call = pair_call.PairCall(shapes, *options)
        out, lse = pair_call.run_forward(call)
        if is_trained:
            pair_call.run_backward(call, out, lse, out, None, is_spectral=is_spectral)

    prepare(kind, rehearse, f"short series, head size {width}")


def _run_pairs(*args: Any) -> tuple[Tensor, Tensor]:
    """Return output ``[B, M, H, C]`` and logsumexp ``[B, H, M]`` float32.

    Tokens are ``[B, M, H, C]`` and ``[B, N, H, C]`` of any strides but over channels, which follow
    each other. The others are contiguous: times ``[B, M]`` and ``[B, N]``, sorted, a mask of keys
    ``[B, N]``, frequencies and damping ratios ``[H, C]``, in any floating-point dtype.
    """
    tensors, options = args[:12], args[12:]
    # As in `attention_forward`.
    wants = [x is not None and x.requires_grad for x in tensors[:9]]
    _prepare_pairs(tensors, options, is_trained=any(wants), is_spectral=any(wants[5:]))
    return pair_call.run_forward(pair_call.PairCall(tensors, *options))


def _run_pairs_backward(*args: Any) -> list[Tensor]:
    """Return what `pair_call.run_backward` does."""
    *options, is_spectral = args[16:]
    _prepare_pairs(args[:12], options, is_trained=True, is_spectral=is_spectral)
    call = pair_call.PairCall(args[:12], *options)
    return pair_call.run_backward(call, *args[12:16], is_spectral=is_spectral)


pair_forward = _operator("pair_forward", f"({_PAIRED}, {_OPTIONS}) -> (Tensor, Tensor)")(_run_pairs)
pair_backward = _operator(
    "pair_backward",
    f"({_PAIRED}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {_OPTIONS}, "
    "bool is_spectral) -> Tensor[]",
)(_run_pairs_backward)


@pair_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    batch, num_rows, heads, _ = q.shape
    return v.new_empty(q.shape), q.new_empty((batch, heads, num_rows), dtype=torch.float32)


@pair_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    # Gradients are contiguous, tokens need not be.
    found = [x.new_empty(x.shape) for x in args[:5] if x is not None]
    if args[-1]:
        found.append(args[5].new_empty((4, *args[5].shape), dtype=torch.float32))
    return found


def _pair_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[12:]
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.set_materialize_grads(False)


def _pull_back_pairs(
    run: Callable[..., list[Tensor]], ctx: Any, d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    is_spectral = any(ctx.needs_input_grad[5:9])
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    found = run(*tensors, out, lse, d_out, d_lse, *ctx.options, is_spectral)
    tokens = iter(found)
    grads = [None if x is None else next(tokens) for x in tensors[:5]]
    spectra: Sequence[Tensor | None] = [None] * 4
    if is_spectral:
        pieces = zip(found[-1].unbind(), tensors[5:9], strict=True)
        spectra = [piece.to(x.dtype) for piece, x in pieces]
    return (*grads, *spectra, *[None] * 6)


pair_forward.register_autograd(
    partial(_pull_back_pairs, pair_backward), setup_context=_pair_context
)


class _Paired(torch.autograd.Function):
    """What the operators do, for a fraction of the host's time."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        found = _run_pairs(*args)
        _pair_context(ctx, args, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _pull_back_pairs(_run_pairs_backward, ctx, *grads)


def attend_pairs(*args: Any) -> tuple[Tensor, Tensor]:
    """Return what `pair_forward` does, through the operator where a graph is traced."""
    is_traced = torch.compiler.is_compiling() or isinstance(args[0], torch._subclasses.FakeTensor)
    found: tuple[Tensor, Tensor] = pair_forward(*args) if is_traced else _Paired.apply(*args)
    return found


# --- Integrals of shared query paths over the gaps between tokens. --------------------------------

_PATH = (
    "Tensor? q, Tensor? weight, Tensor? bank, Tensor spectrum, Tensor? origin, Tensor times, "
    "{}, bool is_precise"
)


def _path_launch(spectrum: Tensor, times: Tensor, padded: int, is_precise: bool) -> Any:
    """Return sizes, the grid but for its first number, and options of the kernels."""
    heads, channels = spectrum.shape[1:]
    precision = format_for(channels, torch.float32 if is_precise else torch.float16)
    grid = (heads * (channels // WIDTH.value), times.shape[0])
    return sizes_of(times.shape[1], padded, heads), grid, {"K": precision, "num_warps": 4}


def _as_modes(weight: Any, bank: Any, origin: Any, times: Tensor) -> Modes:
    """Return modes with their cosines and sines at the tokens, ``[B, N, J, 2]`` float64."""
    angle = (times - origin).unsqueeze(-1) * bank
    return Modes(weight, bank, torch.stack([angle.cos(), angle.sin()], dim=-1), origin)


def _empty_path(*args: Any) -> Tensor:
    spectrum, times, padded = args[3], args[5], args[6]
    heads, channels = spectrum.shape[1:]
    shape = (times.shape[0] * heads, 2, padded, channels)
    return torch.empty(shape, dtype=torch.float32, device=times.device)


@_operator("path_forward", f"({_PATH.format('SymInt padded')}) -> Tensor")
def path_forward(*args: Any) -> Tensor:
    """Return the integrals of a path over the gap after each token.

    They are ``[B H, 2, padded, C]`` float32, 0 after the last token. The path goes straight through
    tokens ``[B, N, H, C]``, or it is a sum of sinusoids: coefficients of cosine and sine are
    ``[B, H, J, 2, C]``, frequencies ``[J]``, origins, the times that phases count from, ``[B, 1]``.
    The spectrum of the keys is ``[2, H, C]``, times are ``[B, N]``. All but tokens are float64, all
    are contiguous. With `is_precise` sinusoids are good for float32 tokens, else for half
    precision.
    """
    q, weight, bank, spectrum, origin, times, padded, is_precise = args
    path = _empty_path(*args)
    sizes, grid, options = _path_launch(spectrum, times, padded, is_precise)
    grid, given = (padded // ROWS.value, *grid), (times, spectrum, path, sizes)
    if q is not None:
        launch(path_integrals.linear_integrals, grid, q, *given, **options)
    else:
        modes = _as_modes(weight, bank, origin, times)
        launch(path_integrals.mode_integrals, grid, modes, *given, len(bank), **options)
    return path


path_forward.register_fake(_empty_path)


@_operator("path_backward", f"({_PATH.format('Tensor d_path')}) -> Tensor[]")
def _path_backward(*args: Any) -> list[Tensor]:
    q, weight, bank, spectrum, origin, times, d_path, is_precise = args
    batch, length = times.shape
    heads, channels = spectrum.shape[1:]
    sizes, grid, options = _path_launch(spectrum, times, d_path.shape[2], is_precise)
    if q is not None:
        programs = triton.cdiv(length, ROWS.value)
        d_q = torch.empty_like(q)
        parts = d_path.new_empty(batch, heads, programs, 2, channels)
        line = (q, times, spectrum, d_path, d_q, parts, sizes)
        launch(path_integrals.linear_integrals_backward, (programs, *grid), *line, **options)
        return [d_q, parts.sum((0, 2), dtype=torch.float64).transpose(0, 1).contiguous()]
    programs, num_modes = triton.cdiv(length, ROWS.value * STEPS.value), len(bank)
    d_weight = weight.new_empty(batch * heads, programs, num_modes, 2, channels)
    d_bank = weight.new_empty(batch * heads, programs, channels, num_modes)
    d_spectrum = weight.new_empty(batch, heads, programs, 2, channels)
    modes, d_modes = _as_modes(weight, bank, origin, times), Modes(d_weight, d_bank)
    given = (modes, times, spectrum, d_path, d_modes, d_spectrum, sizes, num_modes)
    launch(path_integrals.mode_integrals_backward, (programs, *grid), *given, **options)
    d_spectrum = d_spectrum.sum((0, 2)).transpose(0, 1).contiguous()
    return [d_weight.sum(1).view_as(weight), d_bank.sum((0, 1, 2)), d_spectrum]


@_path_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in args[:4] if x is not None]


def _path_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.is_precise = inputs[7]


def _path_pull_back(ctx: Any, d_path: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = iter(_path_backward(*tensors, d_path.contiguous(), ctx.is_precise))
    return (*(None if x is None else next(found) for x in tensors[:4]), *[None] * 4)


path_forward.register_autograd(_path_pull_back, setup_context=_path_context)
