"""Integrals of a shared query path over spans of tokens, from its moments over single gaps.

Everything is a sum over gaps, or over spans, of moments moved back to one reference time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum
from osciformer.ops.attention.fused.path_pieces import (
    load_moment,
    moved_back,
    moved_on,
    propagator,
    propagator_with_slope,
    spectral_adjoint,
    sum_after,
    sum_before,
)
from osciformer.ops.attention.fused.pieces import store_plane, time_at


@triton.jit
def path_factors(
    moment_ptr,
    times_ptr,
    table,
    factor_ptr,
    total_ptr,
    length,
    padded,
    heads,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the moments from each span's start to its tokens, and over the whole span.

    `moment_ptr` is float32 ``[B H, 2, padded, C]``, of the gap after each token; `factor_ptr` has
    its shape, `total_ptr` is float32 ``[B H, spans, 2, C]``. One program takes WIDTH
    channels of one span of one head, ROWS tokens at a time.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    plane = (series * heads + head).to(tl.int64)
    size = padded.to(tl.int64) * C
    first = tl.program_id(0) * SPAN
    begin = time_at(times, first, length)
    sum1 = tl.zeros([WIDTH], tl.float32)
    sum2 = tl.zeros([WIDTH], tl.float32)
    for start in range(first, tl.minimum(first + SPAN, padded), ROWS):
        rows = start + tl.arange(0, ROWS)
        s = (time_at(times, rows, length) - begin)[:, None]
        g11, g12 = propagator(s, spectrum, PRECISE)
        m1, m2 = load_moment(moment_ptr, plane * padded, rows, size, C, channels)
        f1, f2 = moved_back(m1, m2, g11, g12, spectrum)
        base = factor_ptr + 2 * plane * size
        store_plane(base, rows, sum_before(f1, ROWS) + sum1[None, :], C, channels)
        store_plane(base + size, rows, sum_before(f2, ROWS) + sum2[None, :], C, channels)
        sum1 += tl.sum(f1, 0)
        sum2 += tl.sum(f2, 0)
    at = total_ptr + (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + channels
    tl.store(at, sum1)
    tl.store(at + C, sum2)


@triton.jit
def path_factors_adjoint(
    moment_ptr,
    times_ptr,
    table,
    to_factor,
    to_total,
    to_moment,
    to_spectrum,
    length,
    padded,
    heads,
    PLANES: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Add to the gradients of moments; write, per program, those of gamma and omega^2.

    `to_factor` is float32 ``[B H, PLANES, padded, C]``, of which the first two planes count;
    `to_spectrum` is ``[B H, spans, 2, C]``.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    plane = (series * heads + head).to(tl.int64)
    size = padded.to(tl.int64) * C
    first = tl.program_id(0) * SPAN
    past = tl.minimum(first + SPAN, padded)
    begin = time_at(times, first, length)
    spans = (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + channels
    sum1 = tl.load(to_total + spans)
    sum2 = tl.load(to_total + spans + C)
    to_gamma = tl.zeros([WIDTH], tl.float32)
    to_omega2 = tl.zeros([WIDTH], tl.float32)
    for back in range(first, past, ROWS):
        rows = first + past - ROWS - back + tl.arange(0, ROWS)
        s = (time_at(times, rows, length) - begin)[:, None]
        g11, g12, f = propagator_with_slope(s, spectrum, PRECISE)
        m1, m2 = load_moment(moment_ptr, plane * padded, rows, size, C, channels)
        at = rows[:, None] * C + channels[None, :]
        given = to_factor + PLANES * plane * size + at
        f1 = tl.load(given)
        f2 = tl.load(given + size)
        r1 = sum_after(f1, ROWS) + sum1[None, :]
        r2 = sum_after(f2, ROWS) + sum2[None, :]
        sum1 += tl.sum(f1, 0)
        sum2 += tl.sum(f2, 0)
        more1, more2 = moved_on(r1, r2, g11, g12, spectrum)
        found = to_moment + 2 * plane * size + at
        tl.store(found, tl.load(found) + more1)
        tl.store(found + size, tl.load(found + size) + more2)
        more1, more2 = spectral_adjoint(s.to(g12.dtype), g12, f, spectrum, m1, m2, r1, r2)
        to_gamma += tl.sum(more1, 0).to(tl.float32)
        to_omega2 += tl.sum(more2, 0).to(tl.float32)
    tl.store(to_spectrum + spans, to_gamma)
    tl.store(to_spectrum + spans + C, to_omega2)


@triton.jit
def _propagator_between(
    matrix, span, GROUP, columns, there, PLANES: tl.constexpr, C: tl.constexpr, FIRST: tl.constexpr
):
    """Return four planes, from FIRST on, of the span from the ends of `columns` to `span`."""
    at = matrix + (span * GROUP + columns % GROUP)[:, None].to(tl.int64) * (PLANES * C)
    at += FIRST * C + tl.arange(0, C)[None, :]
    return (
        tl.load(at, mask=there, other=0.0),
        tl.load(at + C, mask=there, other=0.0),
        tl.load(at + 2 * C, mask=there, other=0.0),
        tl.load(at + 3 * C, mask=there, other=0.0),
    )


@triton.jit(do_not_specialize=["GROUP", "num_spans", "num_totals"])
def path_between(
    matrix_ptr,
    total_ptr,
    beyond_ptr,
    num_spans,
    num_totals,
    GROUP,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """Write the path's moments between spans of one group to planes 4 and 5 of their matrices.

    `matrix_ptr` is ``[B H, num_spans, GROUP, PLANES, C]`` (`spans.span_matrices`), `total_ptr`
    ``[B H, num_totals, 2, C]`` the moments over the spans. Those from the ends of spans to that of
    their group go to `beyond_ptr`, of the same shape. Program (c, plane) takes WIDTH columns of the
    table: key spans, whose ends are the reference times.
    """
    chunks = (GROUP + WIDTH - 1) // WIDTH
    low = tl.program_id(0) // chunks * GROUP
    columns = low + tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    plane = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, C)[None, :]
    matrix = matrix_ptr + plane * num_spans * GROUP * (PLANES * C)
    total = total_ptr + plane * num_totals * (2 * C) + channels
    past = tl.minimum(low + GROUP, num_spans)
    sum1 = tl.zeros([WIDTH, C], tl.float32)
    sum2 = tl.zeros([WIDTH, C], tl.float32)
    for span in range(low + 1, past):
        there = (columns < tl.minimum(span, low + GROUP))[:, None]
        at = matrix + (span * GROUP + columns % GROUP)[:, None].to(tl.int64) * (PLANES * C)
        tl.store(at + 4 * C + channels, sum1, mask=there)
        tl.store(at + 5 * C + channels, sum2, mask=there)
        p11, p12, p21, p22 = _propagator_between(matrix, span, GROUP, columns, there, PLANES, C, 0)
        m1 = tl.load(total + span * (2 * C))
        m2 = tl.load(total + span * (2 * C) + C)
        sum1 += m1 * p11 + m2 * p21
        sum2 += m1 * p12 + m2 * p22
    there = (columns < tl.minimum(low + GROUP, num_totals))[:, None]
    at = beyond_ptr + plane * num_totals * (2 * C) + columns[:, None] * (2 * C) + channels
    tl.store(at, sum1, mask=there)
    tl.store(at + C, sum2, mask=there)


@triton.jit(do_not_specialize=["GROUP", "num_spans", "num_totals"])
def path_between_adjoint(
    matrix_ptr,
    total_ptr,
    to_between,
    to_beyond,
    to_total,
    to_spectrum,
    num_spans,
    num_totals,
    GROUP,
    HAS_BEYOND: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """Write, per program, the gradients of totals and of gamma and omega^2.

    `to_between` is ``[B H, num_spans, GROUP, 2, C]``, `to_beyond` as in `path_between`; matrices
    have 18 planes. `to_total` is ``[B H, chunks, num_totals, 2, C]``, chunks of WIDTH spans of a
    group, and `to_spectrum` ``[B H, programs, 2, C]``.
    """
    PLANES: tl.constexpr = 18
    chunks = (GROUP + WIDTH - 1) // WIDTH
    low = tl.program_id(0) // chunks * GROUP
    columns = low + tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    plane = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, C)[None, :]
    matrix = matrix_ptr + plane * num_spans * GROUP * (PLANES * C)
    total = total_ptr + plane * num_totals * (2 * C) + channels
    part = plane * chunks + tl.program_id(0) % chunks
    found = to_total + part * num_totals * (2 * C) + tl.arange(0, C)
    past = tl.minimum(low + GROUP, num_spans)
    sum1 = tl.zeros([WIDTH, C], tl.float32)
    sum2 = tl.zeros([WIDTH, C], tl.float32)
    if HAS_BEYOND:
        there = (columns < tl.minimum(low + GROUP, num_totals))[:, None]
        at = to_beyond + plane * num_totals * (2 * C) + columns[:, None] * (2 * C) + channels
        sum1 = tl.load(at, mask=there, other=0.0)
        sum2 = tl.load(at + C, mask=there, other=0.0)
    to_gamma = tl.zeros([C], tl.float32)
    to_omega2 = tl.zeros([C], tl.float32)
    # Nothing lies beyond the last span.
    for span in range(past, tl.minimum(low + GROUP, num_totals)):
        tl.store(found + span * (2 * C), tl.zeros([C], tl.float32))
        tl.store(found + span * (2 * C) + C, tl.zeros([C], tl.float32))
    for back in range(low, past):
        span = low + past - 1 - back
        there = (columns < span)[:, None]
        p11, p12, p21, p22 = _propagator_between(matrix, span, GROUP, columns, there, PLANES, C, 0)
        tl.store(found + span * (2 * C), tl.sum(sum1 * p11 + sum2 * p12, 0))
        tl.store(found + span * (2 * C) + C, tl.sum(sum1 * p21 + sum2 * p22, 0))
        m1 = tl.load(total + span * (2 * C))
        m2 = tl.load(total + span * (2 * C) + C)
        p11, p12, p21, p22 = _propagator_between(matrix, span, GROUP, columns, there, PLANES, C, 6)
        to_gamma += tl.sum(sum1 * (m1 * p11 + m2 * p21) + sum2 * (m1 * p12 + m2 * p22), 0)
        p11, p12, p21, p22 = _propagator_between(matrix, span, GROUP, columns, there, PLANES, C, 12)
        to_omega2 += tl.sum(sum1 * (m1 * p11 + m2 * p21) + sum2 * (m1 * p12 + m2 * p22), 0)
        at = (plane * num_spans + span) * GROUP + columns % GROUP
        at = to_between + at[:, None] * (2 * C) + channels
        sum1 += tl.load(at, mask=there, other=0.0)
        sum2 += tl.load(at + C, mask=there, other=0.0)
    at = (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + tl.arange(0, C)
    tl.store(to_spectrum + at, to_gamma)
    tl.store(to_spectrum + at + C, to_omega2)
