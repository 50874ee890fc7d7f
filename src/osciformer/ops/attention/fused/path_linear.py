r"""Moments of a piecewise linear path over the gaps between tokens, in float64.

A path that goes from a to b within a gap of length s has the moments

$$b\,(g_{12} + 2\gamma i_{12}) - \tfrac{b - a}{s}(i_{12} + 2\gamma k_{12}),\qquad
b\,i_{12} - \tfrac{b - a}{s}\,k_{12},\qquad k_{12} = \textstyle\int i_{12}.$$

All regimes are one: a gap is halved until a power series serves it, and what that gives for a part
is doubled as often. Neither subtracts what is nearly equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.pieces import load_tokens, time_at


@triton.jit
def halvings(reach):
    """Return how often `reach`, the most that anything turns, is halved until it is below 1/2."""
    count = 0
    # float64 ends at 2^1024: what is not finite must not keep the loop going for ever.
    while (reach > 0.5) & (count < 1025):
        reach *= 0.5
        count += 1
    return count


@triton.jit
def halved(s, count):
    """Return `s` after as many halvings."""
    for _ in range(count):
        s *= 0.5
    return s


@triton.jit
def gap_integrals(s, gamma, omega2, SPECTRAL: tl.constexpr):
    """Return g12, i12, k12 after the times `s`, and their derivatives by omega^2.

    The latter are as many zeros unless SPECTRAL. Those by gamma follow: -s g12 - 2 gamma F, 2 F and
    2 J, where F and J are the first two.
    """
    rate = tl.maximum(tl.sqrt(omega2), 2.0 * gamma)
    count = halvings(tl.max(tl.max(rate * s, 1), 0))
    h = halved(s, count)
    x = 2.0 * gamma * h
    y = omega2 * h * h
    # The n-fold integral of g12, over h^(n + 1), is a(n + 1), and a(n) = 1 / n! - x a(n + 1) - y
    # a(n + 2): downwards nothing cancels. b is the derivative of a by y.
    inverse = tl.full([], 1 / 87178291200, tl.float64)
    a2 = tl.zeros_like(y) + inverse
    inverse *= 14.0
    a1 = inverse - x * a2
    b2 = tl.zeros_like(y)
    b1 = tl.zeros_like(y)
    for n in tl.static_range(12, 2, -1):
        inverse *= n + 1.0
        if SPECTRAL:
            b0 = -x * b1 - y * b2 - a2
            b2 = b1
            b1 = b0
        a0 = inverse - x * a1 - y * a2
        a2 = a1
        a1 = a0
    i = 0.5 - x * a1 - y * a2
    g12 = h * (1.0 - x * i - y * a1)
    i12 = h * h * i
    k12 = h * h * h * a1
    f = tl.zeros_like(g12)
    j = tl.zeros_like(g12)
    el = tl.zeros_like(g12)
    if SPECTRAL:
        b0 = -x * b1 - y * b2 - a2
        f = h * h * h * (-x * b0 - y * b1 - a1)
        j = h * h * h * h * b0
        el = h * h * h * h * h * b1
    for _ in range(count):
        g11 = 1.0 - omega2 * i12
        if SPECTRAL:
            e = -i12 - omega2 * j
            el += h * j + e * k12 + g11 * el + f * i12 + g12 * j
            j += e * i12 + g11 * j + 2.0 * g12 * f
            f = 2.0 * f * (g11 - gamma * g12) + 2.0 * g12 * (e - gamma * f)
        k12 += h * i12 + g11 * k12 + g12 * i12
        i12 += g11 * i12 + g12 * g12
        g12 = 2.0 * g12 * (g11 - gamma * g12)
        h *= 2.0
    return g12, i12, k12, f, j, el


@triton.jit
def load_channels(spectrum_ptr, head, heads, C: tl.constexpr, channels):
    """Return gamma and omega^2 of `channels`, ``[1, W]`` float64, from ``[2, heads, C]``."""
    at = spectrum_ptr + head * C + channels[None, :]
    return tl.load(at), tl.load(at + heads * C)


@triton.jit
def gaps_after(times, rows, length):
    """Return the gaps after `rows`, ``[R, 1]`` float64, 0 where there is none, and 1 over them."""
    begin = time_at(times, tl.maximum(rows, 0), length)
    s = tl.where(rows >= 0, time_at(times, rows + 1, length) - begin, 0.0)[:, None]
    return s, 1.0 / tl.where(s > 0, s, 1.0)


@triton.jit
def linear_moments(
    q_ptr,
    times_ptr,
    spectrum_ptr,
    moment_ptr,
    length,
    padded,
    heads,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """Write the moments over the gap after each token, float32 ``[B H, 2, padded, C]``.

    `q_ptr` is ``[B, N, H, C]``, `spectrum_ptr` float64 ``[2, H, C]``. One program takes WIDTH
    channels of ROWS tokens of one head.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gamma, omega2 = load_channels(spectrum_ptr, head, heads, C, channels)
    s, per_time = gaps_after(times, rows, length)
    a = load_tokens(q_ptr, first_token + rows, rows < length, head, heads, C, channels)
    b = load_tokens(q_ptr, first_token + rows + 1, rows + 1 < length, head, heads, C, channels)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, False)
    slope = (b.to(tl.float64) - a) * per_time
    at = (series * heads + head).to(tl.int64) * 2 * padded * C
    at += rows[:, None] * C + channels[None, :]
    first = b * (g12 + 2.0 * gamma * i12) - slope * (i12 + 2.0 * gamma * k12)
    second = b * i12 - slope * k12
    tl.store(moment_ptr + at, first.to(tl.float32))
    tl.store(moment_ptr + at + padded.to(tl.int64) * C, second.to(tl.float32))


@triton.jit
def linear_moments_adjoint(
    q_ptr,
    times_ptr,
    spectrum_ptr,
    to_moment,
    to_q,
    to_spectrum,
    length,
    padded,
    heads,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """Write the gradients of tokens, as `q_ptr`, and, per program, of gamma and omega^2.

    `to_spectrum` is float32 ``[B H, programs, 2, C]``.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64)
    size = padded.to(tl.int64) * C
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gamma, omega2 = load_channels(spectrum_ptr, head, heads, C, channels)

    # The gap before a token, which ends there.
    s, per_time = gaps_after(times, rows - 1, length)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, False)
    at = to_moment + 2 * plane * size + tl.maximum(rows - 1, 0)[:, None] * C + channels[None, :]
    to_first = tl.load(at)
    to_second = tl.load(at + size)
    to_b = to_first * (g12 + 2.0 * gamma * i12 - (i12 + 2.0 * gamma * k12) * per_time)
    to_b += to_second * (i12 - k12 * per_time)

    s, per_time = gaps_after(times, rows, length)
    a = load_tokens(q_ptr, first_token + rows, rows < length, head, heads, C, channels)
    b = load_tokens(q_ptr, first_token + rows + 1, rows + 1 < length, head, heads, C, channels)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, True)
    at = to_moment + 2 * plane * size + rows[:, None] * C + channels[None, :]
    to_first = tl.load(at)
    to_second = tl.load(at + size)
    to_a = (to_first * (i12 + 2.0 * gamma * k12) + to_second * k12) * per_time
    at = ((first_token + rows) * heads + head)[:, None] * C + channels[None, :]
    found = (to_a + to_b).to(tl.float32).to(to_q.dtype.element_ty)
    tl.store(to_q + at, found, mask=(rows < length)[:, None])

    slope = (b.to(tl.float64) - a) * per_time
    to_g12 = b * to_first
    to_i12 = (2.0 * gamma * b - slope) * to_first + b * to_second
    to_k12 = -slope * (2.0 * gamma * to_first + to_second)
    to_gamma = 2.0 * to_first * (b * i12 - slope * k12) - (s * g12 + 2.0 * gamma * f) * to_g12
    to_gamma += 2.0 * (f * to_i12 + j * to_k12)
    to_omega2 = f * to_g12 + j * to_i12 + el * to_k12
    at = (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + channels
    tl.store(to_spectrum + at, tl.sum(to_gamma, 0).to(tl.float32))
    tl.store(to_spectrum + at + C, tl.sum(to_omega2, 0).to(tl.float32))
