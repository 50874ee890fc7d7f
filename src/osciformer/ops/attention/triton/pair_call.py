"""One call over short series: the arguments of its two kernels, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.triton.call import format_for
from osciformer.ops.attention.triton.compilation import launch
from osciformer.ops.attention.triton.pairs import (
    KEYS,
    ROWS,
    Pairs,
    Swing,
    TokenGradients,
    Upstream,
    View,
    pair_backward,
    pair_forward,
)


def _odd(count: int) -> int:
    return 2 * count + 1


def _view(x: Tensor) -> View:
    series, token, head, _ = x.stride()
    return View(x, _odd(series), _odd(token), _odd(head))


def _swing(x: Tensor, velocity: Tensor | None, omega: Tensor, zeta: Tensor) -> Swing:
    return Swing(_view(x), None if velocity is None else _view(velocity), omega, zeta)


class PairCall:
    """One call: tensors as `operators.pair_forward` takes them, and options of the kernels."""

    def __init__(
        self, tensors: Sequence[Any], scale: float, is_average: bool, is_strict: bool
    ) -> None:
        q, k, v, key_velocity, value_velocity, *spectra, row_times, key_times, mask = tensors
        self.q, self.keys, self.values = q, (k, key_velocity), (v, value_velocity)
        self.batch, self.num_rows, self.heads, channels = q.shape
        self.num_keys = k.shape[1]
        sides = _swing(k, key_velocity, *spectra[:2]), _swing(v, value_velocity, *spectra[2:])
        tokens = (_view(q), *sides, row_times, key_times, mask)
        rows, keys, heads, size = map(_odd, (self.num_rows, self.num_keys, self.heads, channels))
        self.pairs = Pairs(*tokens, rows, keys, heads, size, scale)
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        precision = format_for(triton.next_power_of_2(channels), dtype, is_average)
        self.options = {
            "STRICT": is_strict,
            "K": precision,
            # Closed forms in float64 and sums over rows of many channels take registers.
            "num_warps": 8 if precision.PRECISE or precision.C >= 64 else 4,
            "num_stages": 1,
        }

    def grid(self, length: int, tile: int) -> tuple[int, int]:
        """Return the grid of programs that take `tile` of `length` tokens."""
        return self.batch * self.heads, triton.cdiv(length, tile)


def run_forward(call: PairCall) -> tuple[Tensor, Tensor]:
    """Return output ``[B, M, H, C]`` and logsumexp ``[B, H, M]`` float32."""
    q, v = call.q, call.values[0]
    out = torch.empty(q.shape, dtype=v.dtype, device=v.device)
    lse = torch.empty(call.batch, call.heads, call.num_rows, dtype=torch.float32, device=v.device)
    grid = call.grid(call.num_rows, ROWS.value)
    launch(pair_forward, grid, call.pairs, out, lse, **call.options)
    return out, lse


def run_backward(
    call: PairCall,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    is_spectral: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of those velocities that exist.

    With `is_spectral` also those of the spectra, omega and zeta of keys and of values,
    ``[4, H, C]``, float32.
    """
    grid = call.grid(call.num_keys, KEYS.value)
    new = partial(torch.empty, device=out.device)
    d_q = new(grid[1], *call.q.shape, dtype=torch.float32)
    tokens = (*call.keys, *call.values)
    made = (None if x is None else new(x.shape, dtype=x.dtype) for x in tokens)
    d_k, d_key_velocity, d_v, d_value_velocity = made
    d_spectra = None
    if is_spectral:
        size = call.heads, call.q.shape[3]
        d_spectra = new(4, call.batch * grid[1], *size, dtype=torch.float32)
    grads = TokenGradients(d_q, d_k, d_key_velocity, d_v, d_value_velocity, d_spectra)
    has_d_lse = d_lse is not None
    up = Upstream(_view(out), _view(d_out), lse, d_lse if has_d_lse else lse, float(has_d_lse))
    launch(pair_backward, grid, call.pairs, up, grads, _odd(call.batch), **call.options)
    total = d_q[0] if grid[1] == 1 else d_q.sum(0)
    found = [total.to(call.q.dtype), d_k, d_v, d_key_velocity, d_value_velocity]
    if d_spectra is not None:
        found.append(d_spectra.sum(1))
    return [x for x in found if x is not None]
