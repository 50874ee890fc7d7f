"""The entry of the Triton backend: which calls it supports, and which fall back to `blocked`."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from functools import cache
from typing import NamedTuple

import torch

from osciformer._types import Tensor
from osciformer.ops._checks import can_look
from osciformer.ops.attention import blocked
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult
from osciformer.ops.attention.query import ConstantPath, LinearPath, SinusoidPath
from osciformer.ops.attention.ties import take_rows

#: Head sizes of the tiled kernels, and dtypes of all kernels.
CHANNELS = (16, 32, 64, 128)
#: Up to how many rows and keys pairs may be evaluated one by one, and up to which head size.
PAIRED_LENGTH, PAIRED_CHANNELS = 1024, 128
#: Up to how many pairs times channels they are so where the tiled kernels have the head size, for
#: tokens of half precision and of float32: about as long as those keep the host busy.
PAIRED_WORK = 2**27, 2**25
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_available() -> bool:
    """Return whether Triton is installed. Nothing is imported."""
    return _HAS_TRITON


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def missing(device: torch.device, *, instead: str = "blocked") -> str | None:
    """Return why kernels cannot run on `device`, with remedies, a backend among them, or None."""
    if not is_available():
        return f"Triton is not installed: pip install triton (Linux), or use backend={instead!r}"
    if device.type != "cuda" and not is_interpreted():
        return (
            f"the tensors are on {device.type}: move them to a CUDA device, use"
            f" backend={instead!r}, or set TRITON_INTERPRET=1 before Python starts to run the"
            " kernels slowly on the CPU"
        )
    return None


def is_paired(inputs: AttentionInputs) -> bool:
    """Return whether a call is one for the kernels of short series, if any kernel supports it."""
    keys, rows = inputs.keys.start, inputs.query_times.shape[1]
    length, channels = max(rows, keys.shape[1]), keys.shape[-1]
    if not isinstance(inputs.path, ConstantPath) or channels > PAIRED_CHANNELS:
        return False
    most = PAIRED_WORK[keys.dtype == torch.float32]
    is_little = rows * keys.numel() <= most or channels not in CHANNELS
    return length <= PAIRED_LENGTH and is_little


def unsupported(inputs: AttentionInputs, dtype: torch.dtype) -> str | None:
    """Return why no kernel supports a call whose products are of `dtype`, or None."""
    path, query_times, key_times = inputs.path, inputs.query_times, inputs.key_times
    if isinstance(path, SinusoidPath) and not path.is_shared:
        return "each row has sinusoids of its own"
    if not isinstance(path, ConstantPath) and not _are_same(query_times, key_times):
        return "the query path is shared by all rows, and these have times of their own"
    channels = inputs.keys.start.shape[-1]
    if channels not in CHANNELS and not is_paired(inputs):
        return f"the head size is {channels}, not one of {', '.join(map(str, CHANNELS))}"
    if dtype not in DTYPES:
        return f"tokens are {str(dtype).removeprefix('torch.')}"
    at_rest = inputs.keys.equilibrium is None and inputs.values.equilibrium is None
    if inputs.drive is not None or not at_rest:
        return "there is a drive or a rest position"
    if query_times.requires_grad or key_times.requires_grad:
        return "times want gradients"
    if inputs.scale <= 0:
        return f"the scale {inputs.scale} is not positive"
    return "weights are asked for" if inputs.return_weights else None


@cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"backend 'triton' has no kernel for this call ({reason}); 'blocked' runs instead",
        stacklevel=5,
    )


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return output and logsumexp; `blocked` runs instead if no kernel supports the call.

    bfloat16 tokens are multiplied in bfloat16, float16 ones in tf32, float32 ones in float32, all
    with float32 sums.
    """
    path, keys, values, mask = inputs.path, inputs.keys, inputs.values, inputs.mask
    k, v, query_times, key_times = keys.start, values.start, inputs.query_times, inputs.key_times
    dtype = torch.promote_types(k.dtype, v.dtype)
    if isinstance(path, ConstantPath):
        dtype = torch.promote_types(dtype, path.q.dtype)
    reason = unsupported(inputs, dtype)
    if reason is not None:
        if not torch.compiler.is_compiling():
            _say_once(reason)
        return blocked.attend(inputs)
    # The only import inside a function: the package must import without Triton.
    from osciformer.ops.attention.triton import operators

    if is_paired(inputs):
        assert isinstance(path, ConstantPath)
        tokens = (path.q, k, v, keys.velocity, values.velocity)
        dense = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tokens]
        others = (keys.omega, keys.zeta, values.omega, values.zeta, query_times, key_times, mask)
        dense += [None if x is None else x.contiguous() for x in others]
        options = (inputs.scale, inputs.value == "average", inputs.strict)
        return AttentionResult(*operators.attend_pairs(*dense, *options))
    times, out_dtype, line, integrals = key_times.double(), v.dtype, None, None
    velocities = [keys.velocity, values.velocity]
    key_spectrum, value_spectrum = (
        torch.stack([omega.double() * zeta.double(), omega.double() ** 2])
        for omega, zeta in ((keys.omega, keys.zeta), (values.omega, values.zeta))
    )
    if isinstance(path, ConstantPath):
        q = path.q
        if not _are_same(query_times, key_times):
            line = _merge(query_times.double(), times, mask)
            times, mask = line.times, line.mask
            q, k, v = take_rows(q, line.row), take_rows(k, line.key), take_rows(v, line.key)
            velocities = [None if x is None else take_rows(x, line.key) for x in velocities]
        times = times.contiguous()
    else:
        times = times.contiguous()
        if isinstance(path, LinearPath):
            q = path.q
            source: tuple[Tensor | None, ...] = (q.contiguous(), None, None)
            origin, is_precise = None, True
        else:
            weight, bank = _modes(path)
            source, is_precise = (None, weight, bank), dtype == torch.float32
            origin = path.origin.double().contiguous()
            # Without ties the kernels do not read the path at the rows.
            q = k.detach() if inputs.strict else _at_tokens(weight, bank, times - origin, dtype)
        padded = operators.padded_length(k.shape[1], k.shape[-1], dtype)
        where = (key_spectrum, origin, times, padded, is_precise)
        integrals = operators.path_forward(*source, *where)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    velocities = [None if x is None else x.to(dtype).contiguous() for x in velocities]
    mask = None if mask is None else mask.contiguous()
    tensors = (q, k, v, *velocities, key_spectrum, value_spectrum, integrals, times, mask)
    options = (inputs.scale, inputs.value == "average", inputs.strict)
    out, lse, _ = operators.attention_forward(*tensors, *options)
    batch, length, heads, _ = q.shape
    lse = lse.view(batch, heads, -1)[..., :length] * math.log(2.0)
    if line is not None:
        out = take_rows(out, line.place)
        lse = take_rows(lse.transpose(1, 2), line.place).transpose(1, 2)
    return AttentionResult(out.to(out_dtype), lse)


def _modes(path: SinusoidPath) -> tuple[Tensor, Tensor]:
    """Return coefficients ``[B, H, J, 2, C]`` and frequencies; a constant is a mode of its own."""
    weight = torch.stack([path.cos[:, 0], path.sin[:, 0]], dim=3).double()
    bank = path.omega.double()
    if path.constant is not None:
        still = path.constant[:, 0, :, None].double()
        still = torch.stack([still, torch.zeros_like(still)], dim=3)
        weight = torch.cat([weight, still], dim=2)
        bank = torch.cat([bank, bank.new_zeros(1)])
    return weight.contiguous(), bank.contiguous()


def _at_tokens(weight: Tensor, bank: Tensor, times: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the path at the tokens, ``[B, N, H, C]``."""
    # Phases are float64; products need no more digits than the result can hold.
    work = torch.float64 if dtype == torch.float32 else torch.float32
    angle = times.unsqueeze(-1) * bank
    basis = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2).to(work)  # [B, N, 2J]
    weight = weight.flatten(2, 3).transpose(1, 2)  # [B, 2J, H, C]
    found = basis @ weight.flatten(-2).to(work)
    return found.unflatten(-1, weight.shape[-2:]).to(dtype).contiguous()


def _are_same(query_times: Tensor, key_times: Tensor) -> bool:
    if query_times is key_times:
        return True
    if query_times.shape != key_times.shape or not can_look(query_times):
        return False
    return torch.equal(query_times, key_times)


class _Line(NamedTuple):
    """Rows and keys of different times on one line of M + N places, in time order."""

    times: Tensor
    mask: Tensor  # which places are keys that are present
    key: Tensor  # the key of each place, some key at places of rows
    row: Tensor  # the row of each place, some row at places of keys
    place: Tensor  # of each row


def _merge(rows: Tensor, cols: Tensor, mask: Tensor | None) -> _Line:
    num_keys = cols.shape[1]
    times, source = torch.cat([cols, rows], dim=1).sort(dim=1, stable=True)
    key, row = source.clamp(max=num_keys - 1), (source - num_keys).clamp(min=0)
    is_key = source < num_keys
    present = is_key if mask is None else is_key & mask.gather(1, key)
    return _Line(times, present, key, row, source.argsort(dim=1)[:, num_keys:])
