"""Arguments of the kernels, and device functions that several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

#: Tokens of a chunk; its kernels are unrolled over them.
CHUNK = tl.constexpr(8)
#: Tokens of a tile, which is also a span of the first sweep.
TILE = tl.constexpr(64)
#: Channels at a time of the kernels within tiles and of those for paths.
WIDTH = tl.constexpr(16)


@dataclass(frozen=True)
class Format:
    """What a kernel is compiled for, its argument K."""

    C: int  # head size
    OPERAND: Any  # type of the operands of products
    PREC: str  # how products of float32 operands run
    PRECISE: bool  # whether closed forms are float64
    AVERAGE: bool = True  # whether values are averages over the gap

    @property
    def dtype(self) -> torch.dtype:
        """The operands' dtype."""
        return torch.bfloat16 if self.OPERAND is tl.bfloat16 else torch.float32


class Side(NamedTuple):
    """Pointers to the keys or the values: tokens, velocities or None, spectrum table.

    Or to gradients: of tokens and velocities ``[B H, padded, C]``, of gamma and omega^2 by program.
    """

    x: Any
    velocity: Any
    spectrum: Any


class Tokens(NamedTuple):
    """Pointers to what a call is about: tokens ``[B, N, H, C]``, times and mask (or None)."""

    q: Any
    k: Side
    v: Side
    times: Any
    mask: Any


class Gradients(NamedTuple):
    """Pointers to gradients of the tokens."""

    q: Any
    k: Side
    v: Side


class Upstream(NamedTuple):
    """Pointers to what a backward pass knows of rows: d out ``[B, N, H, C]``, lse and delta."""

    d_out: Any
    lse: Any
    delta: Any


class Sizes(NamedTuple):
    """Numbers of a call (`sizes_of`); buffers are ``[B H, planes, padded, C]``."""

    odd_length: Any
    padded: Any
    odd_heads: Any  # tokens of one head are that many heads apart
    scale: Any = 1.0  # of the logits
    logit_scale: Any = 1.0  # the same to base 2


def sizes_of(
    length: int, padded: int, heads: int, scale: float = 1.0, logit_scale: float = 1.0
) -> Sizes:
    """Return the numbers of a call, those that vary as 2 n + 1.

    Triton compiles a kernel again for numbers that are 1 or divisible by 16. A training meets both.
    """
    return Sizes(2 * length + 1, padded, 2 * heads + 1, scale, logit_scale)


class Place(NamedTuple):
    """What a program of a (tokens, heads, series) grid works on."""

    head: Any
    heads: Any
    length: Any
    first_token: Any
    times: Any
    plane: Any  # of series and head in buffers
    row: Any  # the first one of that plane
    size: Any  # numbers of a plane


@triton.jit
def locate(times_ptr, sizes, K: tl.constexpr, PARTS: tl.constexpr = 1):
    """Return a program's `Place`; PARTS programs share a head."""
    series, head = tl.program_id(2), tl.program_id(1) // PARTS
    length, padded, heads = sizes.odd_length // 2, sizes.padded, sizes.odd_heads // 2
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64)
    size = padded.to(tl.int64) * K.C
    times = times_ptr + first_token
    return Place(head, heads, length, first_token, times, plane, plane * padded, size)


@triton.jit
def own_channels(K: tl.constexpr):
    """Return the channels of a program; programs of one head follow each other."""
    return tl.program_id(1) % (K.C // WIDTH) * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def time_at(at, index):
    """Return times by index; past the end, the last one."""
    return tl.load(at.times + tl.minimum(index, at.length - 1))


@triton.jit
def present_tokens(mask, at, tokens):
    """Return which tokens exist and are not masked."""
    present = tokens < at.length
    if mask is not None:
        present = tl.load(mask + at.first_token + tokens, mask=present, other=0) != 0
    return present


@triton.jit
def load_tokens(x, at, tokens, inside, channels, K: tl.constexpr):
    """Return `channels` of one head of ``[B, N, H, C]`` as float32, 0 outside."""
    rows = (at.first_token + tokens).to(tl.int64)
    where = (rows * at.heads + at.head)[:, None] * K.C + channels[None, :]
    return tl.load(x + where, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_side(side, at, tokens, inside, channels, K: tl.constexpr):
    """Return positions and velocities, 0 if there are none."""
    x = load_tokens(side.x, at, tokens, inside, channels, K)
    u = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    if side.velocity is not None:
        u = load_tokens(side.velocity, at, tokens, inside, channels, K)
    return x, u


@triton.jit
def load_plane(x, rows, C: tl.constexpr):
    """Return ``[rows, C]`` of a plane ``[padded, C]``; every row exists."""
    return tl.load(x + rows[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def store_plane(x, rows, value, channels, K: tl.constexpr):
    """Store `channels` of rows to a plane ``[padded, C]``."""
    at = x + rows[:, None] * K.C + channels[None, :]
    tl.store(at, value.to(x.dtype.element_ty))


@triton.jit
def store_planes(x, rows, size, values, channels, K: tl.constexpr):
    """Store a tuple to planes that are `size` apart."""
    for n in tl.static_range(len(values)):
        store_plane(x + n * size, rows, values[n], channels, K)


@triton.jit
def add_plane(x, rows, more, channels, K: tl.constexpr):
    """Add to `channels` of rows of a float32 plane ``[padded, C]``."""
    at = x + rows.to(tl.int64)[:, None] * K.C + channels[None, :]
    tl.store(at, tl.load(at) + more.to(tl.float32))


@triton.jit
def store_spectral(d_spectrum, program, d_gamma, d_omega2, channels, K: tl.constexpr):
    """Store sums over rows of gradients of gamma and omega^2 to ``[programs, 2, C]`` float32."""
    at = d_spectrum + program * (2 * K.C) + channels
    tl.store(at, tl.sum(d_gamma, 0).to(tl.float32))
    tl.store(at + K.C, tl.sum(d_omega2, 0).to(tl.float32))


@triton.jit
def product(a, b, K: tl.constexpr):
    """Return a @ b with float32 sums."""
    if K.PREC == "upcast":
        # The interpreter cannot multiply bfloat16; its float32 products of them are the same.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=K.PREC)


@triton.jit
def softmax_step(top, mass, logits):
    """Return the next top, the next mass, the weights and the factor of earlier sums."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - shift)
    weights = tl.exp2(logits - shift[:, None])
    return new_top, mass * keep + tl.sum(weights, 1), weights, keep


@triton.jit
def logsumexp(top, mass):
    """Return top + log2(mass), -inf if nothing was seen, and a mass that is safe to divide by."""
    safe = tl.where(mass > 0, mass, 1.0)
    return tl.where(mass > 0, top + tl.log2(safe), float("-inf")), safe


@triton.jit
def load_lse(lse_ptr, rows):
    """Return logsumexps for a backward pass: rows that saw nothing get weights 0."""
    lse = tl.load(lse_ptr + rows)
    return tl.where(lse == float("-inf"), float("inf"), lse)
