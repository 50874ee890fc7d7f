"""Set-up of the far stages: states at span ends, row factors from span starts, table of spans."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import (
    load_spectrum,
    oscillate,
    spectral_derivatives,
)
from osciformer.ops.attention.fused.pieces import (
    aged_state,
    load_tokens,
    row_factors,
    store_plane,
    time_at,
)


@triton.jit
def set_up(
    x_ptr,
    u_ptr,
    times_ptr,
    mask_ptr,
    table,
    state_ptr,
    factor_ptr,
    length,
    padded,
    heads,
    HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPAN,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write states at the end of each span of keys, and row factors from its start.

    `state_ptr` is ``[B H, 3, padded, C]`` (position, velocity, integral), `factor_ptr` is
    ``[B H, 2, padded, C]``. A span ends at the first token of the next.
    """
    channels = tl.arange(0, C)
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = tokens < length
    if HAS_MASK:
        present = tl.load(mask_ptr + first_token + tokens, mask=present, other=0) != 0
    t = time_at(times, tokens, length)
    begin = time_at(times, (tokens // SPAN) * SPAN, length)
    end = time_at(times, (tokens // SPAN + 1) * SPAN, length)
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    x = load_tokens(x_ptr, first_token + tokens, present, head, heads, C, channels)
    u = x
    if HAS_U:
        u = load_tokens(u_ptr, first_token + tokens, present, head, heads, C, channels)
    g11, ct, g12, i12 = oscillate((end - t)[:, None], spectrum, PRECISE)
    x1, x2, xs = aged_state(g11, g12, i12, spectrum, x, u, HAS_U)
    plane = (series * heads + head).to(tl.int64) * padded * C
    size = padded.to(tl.int64) * C
    store_plane(state_ptr + 3 * plane, tokens, x1, C, channels)
    store_plane(state_ptr + 3 * plane + size, tokens, x2, C, channels)
    store_plane(state_ptr + 3 * plane + 2 * size, tokens, xs, C, channels)
    g11, ct, g12, i12 = oscillate((t - begin)[:, None], spectrum, PRECISE)
    f1, f2 = row_factors(g11, g12, i12, spectrum, AVERAGE)
    store_plane(factor_ptr + 2 * plane, tokens, f1, C, channels)
    store_plane(factor_ptr + 2 * plane + size, tokens, f2, C, channels)


@triton.jit(do_not_specialize=["GROUP"])
def span_matrices(
    times_ptr,
    table,
    matrix_ptr,
    length,
    heads,
    SPAN,
    GROUP,
    PLANES: tl.constexpr,
    AVERAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the span from the end of key span i to the start of row span j, float32.

    Planes 0 to 3 are the entries of the propagator, 4 and 5 the integral of its first row (0 for
    point values). With 18 planes the same follows twice: their derivatives by gamma and by
    omega^2. Program (j, head, series) writes ``matrix[b h, j, i % GROUP]`` for the spans i before
    j in its group of GROUP spans.
    """
    row = tl.program_id(0)
    channels = tl.arange(0, C)
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    gamma, omega2 = spectrum[1], spectrum[2]
    begin = time_at(times, row * SPAN, length)
    index = (series * heads + head).to(tl.int64) * tl.num_programs(0) + row
    base = matrix_ptr + index * (GROUP * PLANES * C)
    for low in range((row // GROUP) * GROUP, row, WIDTH):
        spans = low + tl.arange(0, WIDTH)
        end = time_at(times, (spans + 1) * SPAN, length)
        s = tl.where(spans < row, begin - end, 0.0)[:, None]
        g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
        at = base + (spans % GROUP)[:, None] * (PLANES * C) + channels[None, :]
        there = (spans < row)[:, None]
        m1 = tl.zeros_like(g11)
        m2 = tl.zeros_like(g11)
        if AVERAGE:
            m1 = g12 + 2.0 * gamma * i12
            m2 = i12
        tl.store(at, g11.to(tl.float32), mask=there)
        tl.store(at + C, g12.to(tl.float32), mask=there)
        tl.store(at + 2 * C, (-omega2 * g12).to(tl.float32), mask=there)
        tl.store(at + 3 * C, (g11 - 2.0 * gamma * g12).to(tl.float32), mask=there)
        tl.store(at + 4 * C, m1.to(tl.float32), mask=there)
        tl.store(at + 5 * C, m2.to(tl.float32), mask=there)
        if PLANES == 18:
            f, j = spectral_derivatives(s, spectrum, ct, g12, i12, PRECISE)
            d11 = -2.0 * omega2 * f
            d12 = -(s.to(g12.dtype) * g12 + 2.0 * gamma * f)
            if AVERAGE:
                m1 = d12 + 2.0 * i12 + 4.0 * gamma * f
                m2 = 2.0 * f
            tl.store(at + 6 * C, d11.to(tl.float32), mask=there)
            tl.store(at + 7 * C, d12.to(tl.float32), mask=there)
            tl.store(at + 8 * C, (-omega2 * d12).to(tl.float32), mask=there)
            d22 = d11 - 2.0 * g12 - 2.0 * gamma * d12
            tl.store(at + 9 * C, d22.to(tl.float32), mask=there)
            tl.store(at + 10 * C, m1.to(tl.float32), mask=there)
            tl.store(at + 11 * C, m2.to(tl.float32), mask=there)
            d11 = gamma * f - 0.5 * s.to(g12.dtype) * g12
            if AVERAGE:
                m1 = f + 2.0 * gamma * j
                m2 = j
            tl.store(at + 12 * C, d11.to(tl.float32), mask=there)
            tl.store(at + 13 * C, f.to(tl.float32), mask=there)
            tl.store(at + 14 * C, (-g12 - omega2 * f).to(tl.float32), mask=there)
            tl.store(at + 15 * C, (d11 - 2.0 * gamma * f).to(tl.float32), mask=there)
            tl.store(at + 16 * C, m1.to(tl.float32), mask=there)
            tl.store(at + 17 * C, m2.to(tl.float32), mask=there)


@triton.jit
def span_times(
    times_ptr,
    age_ptr,
    rest_ptr,
    length,
    padded,
    unit,
    SPAN,
    ROWS: tl.constexpr,
):
    """Write the time from the start of a token's span, and to its end, times `unit`.

    ``[B, padded]`` float32. None is negative, so sums of them and of the time between spans lose
    nothing, and the loops over tokens need no float64.
    """
    series = tl.program_id(1).to(tl.int64)
    times = times_ptr + series * length
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = time_at(times, tokens, length)
    begin = time_at(times, (tokens // SPAN) * SPAN, length)
    end = time_at(times, (tokens // SPAN + 1) * SPAN, length)
    inside = tokens < padded
    tl.store(age_ptr + series * padded + tokens, (t - begin).to(tl.float32) * unit, mask=inside)
    tl.store(rest_ptr + series * padded + tokens, (end - t).to(tl.float32) * unit, mask=inside)
