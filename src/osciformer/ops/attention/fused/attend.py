"""What the kernels serve, what falls back to `blocked`, and the way in."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from functools import cache
from typing import Any

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.ops._checks import can_look
from osciformer.ops.attention import blocked
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath
from osciformer.ops.attention.rows import take_rows

#: Tokens of a span of the far stage.
SPAN = 512
#: Head sizes and dtypes that the kernels are compiled for.
CHANNELS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_available() -> bool:
    """Return whether Triton is installed. Nothing is imported."""
    return _HAS_TRITON


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def missing(device: torch.device) -> str | None:
    """Return what stands in the way of the kernels on `device`, with the remedy, or None."""
    if not is_available():
        return "Triton is not installed: pip install triton (Linux), or use backend='blocked'"
    if device.type != "cuda" and not is_interpreted():
        return (
            f"the tensors are on {device.type}: move them to a CUDA device, use backend='blocked',"
            " or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
        )
    return None


def unsupported(
    path: QueryPath,
    dtype: torch.dtype,
    query_times: Tensor,
    key_times: Tensor,
    drive: Drive | None,
    equilibria: tuple[Tensor | None, ...],
    scale: float,
    return_weights: bool,
) -> str | None:
    """Return why no kernel serves a call, or None."""
    if isinstance(path, SinusoidPath):
        channels = path.cos.shape[-1]
        if not path.is_shared:
            return "each row has sinusoids of its own"
    else:
        channels = path.q.shape[-1]
    if not isinstance(path, ConstantPath) and not _are_same(query_times, key_times):
        return "the query path is shared by all rows, and these have times of their own"
    if channels not in CHANNELS:
        return f"the head size is {channels}, not one of {', '.join(map(str, CHANNELS))}"
    if dtype not in DTYPES:
        return f"tokens are {str(dtype).removeprefix('torch.')}"
    if drive is not None or any(x is not None for x in equilibria):
        return "there is a drive or a rest position"
    if query_times.requires_grad or key_times.requires_grad:
        return "times want gradients"
    if scale <= 0:
        return f"the scale {scale} is not positive"
    return "weights are asked for" if return_weights else None


@cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"backend 'triton' has no kernel for this call ({reason}); 'blocked' runs instead",
        stacklevel=4,
    )


def attend(
    path: QueryPath,
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
    *,
    key_omega: Float[Tensor, "H C"],
    key_zeta: Float[Tensor, "H C"],
    value_omega: Float[Tensor, "H C"],
    value_zeta: Float[Tensor, "H C"],
    key_velocity: Float[Tensor, "B N H C"] | None = None,
    value_velocity: Float[Tensor, "B N H C"] | None = None,
    value: str = "average",
    drive: Drive | None = None,
    mask: Bool[Tensor, "B N"] | None = None,
    scale: float = 1.0,
    strict: bool = False,
    key_equilibrium: Float[Tensor, "B N H C"] | None = None,
    value_equilibrium: Float[Tensor, "B N H C"] | None = None,
    return_weights: bool = False,
) -> tuple[Float[Tensor, "B M H C"], Float[Tensor, "B H M"], Float[Tensor, "B H M N"] | None]:
    """Return output, logsumexp and weights of causal oscillator attention.

    The arguments are those of `blocked.attend`, which runs instead where no kernel serves a call.
    bfloat16 tokens are multiplied in bfloat16, float16 ones in tf32, float32 ones in float32, all
    with float32 sums.
    """
    options: dict[str, Any] = dict(
        key_omega=key_omega,
        key_zeta=key_zeta,
        value_omega=value_omega,
        value_zeta=value_zeta,
        key_velocity=key_velocity,
        value_velocity=value_velocity,
        value=value,
        drive=drive,
        mask=mask,
        scale=scale,
        strict=strict,
        key_equilibrium=key_equilibrium,
        value_equilibrium=value_equilibrium,
        return_weights=return_weights,
    )
    dtype = torch.promote_types(k.dtype, v.dtype)
    if isinstance(path, ConstantPath):
        dtype = torch.promote_types(dtype, path.q.dtype)
    reason = unsupported(
        path,
        dtype,
        query_times,
        key_times,
        drive,
        (key_equilibrium, value_equilibrium),
        scale,
        return_weights,
    )
    if reason is not None and not torch.compiler.is_compiling():
        _say_once(reason)
    if reason is not None:
        return blocked.attend(path, k, v, query_times, key_times, **options)
    if not isinstance(path, ConstantPath):
        return _attend_shared(path, k, v, key_times, dtype, options)
    # Not at the top: the package must import without Triton.
    from osciformer.ops.attention.fused.operator import attend_fused

    rows, times = query_times.double(), key_times.double()
    q, velocities = path.q, [key_velocity, value_velocity]
    out_dtype, line = v.dtype, None
    if not _are_same(query_times, key_times):
        line = _Merged(rows, times, mask)
        times, mask = line.times, line.mask
        q, k, v = line.rows_to_line(q), line.keys_to_line(k), line.keys_to_line(v)
        velocities = [None if x is None else line.keys_to_line(x) for x in velocities]
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    key_velocity, value_velocity = (
        None if x is None else x.to(dtype).contiguous() for x in velocities
    )
    key_spectrum, value_spectrum = (
        torch.stack([omega.double() * zeta.double(), omega.double() ** 2])
        for omega, zeta in ((key_omega, key_zeta), (value_omega, value_zeta))
    )
    out, lse = attend_fused(
        q,
        k,
        v,
        key_velocity,
        value_velocity,
        key_spectrum,
        value_spectrum,
        times.contiguous(),
        None if mask is None else mask.contiguous(),
        scale,
        is_average=value == "average",
        is_strict=strict,
    )
    batch, length, heads, _ = q.shape
    lse = lse.view(batch, heads, -1)[..., :length] * math.log(2.0)
    if line is not None:
        out = line.line_to_rows(out)
        lse = line.line_to_rows(lse.transpose(1, 2)).transpose(1, 2)
    return out.to(out_dtype), lse, None


def _attend_shared(
    path: LinearPath | SinusoidPath,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, None]:
    """Return what `attend` does for a path that all rows share."""
    from osciformer.ops.attention.fused.shared import attend_shared

    for name in ("drive", "key_equilibrium", "value_equilibrium", "return_weights"):
        del options[name]
    for name in ("key_velocity", "value_velocity"):
        x = options[name]
        options[name] = None if x is None else x.to(dtype).contiguous()
    out, lse = attend_shared(
        path, k.to(dtype).contiguous(), v.to(dtype).contiguous(), times, **options
    )
    return out.to(v.dtype), lse, None


def _are_same(query_times: Tensor, key_times: Tensor) -> bool:
    if query_times is key_times:
        return True
    if query_times.shape != key_times.shape or not can_look(query_times):
        return False
    return torch.equal(query_times, key_times)


class _Merged:
    """Rows and keys of different times on one line of M + N places, in time order."""

    def __init__(self, rows: Tensor, cols: Tensor, mask: Tensor | None) -> None:
        num_keys = cols.shape[1]
        self.times, self._source = torch.cat([cols, rows], dim=1).sort(dim=1, stable=True)
        self._place = self._source.argsort(dim=1)
        is_key = self._source < num_keys
        self._key = self._source.clamp(max=num_keys - 1)
        self._row = (self._source - num_keys).clamp(min=0)
        self.mask = is_key if mask is None else is_key & mask.gather(1, self._key)
        self._row_place = self._place[:, num_keys:]

    def rows_to_line(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, M, ...]``; places of keys hold some row's, which nobody reads."""
        return take_rows(x, self._row)

    def keys_to_line(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, N, ...]``; places of rows are masked."""
        return take_rows(x, self._key)

    def line_to_rows(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, M + N, ...]`` to rows."""
        return take_rows(x, self._row_place)
