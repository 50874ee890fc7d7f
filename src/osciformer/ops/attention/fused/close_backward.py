"""Gradients of the pairs within a block of eight tokens, as `close_forward` has them."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.close_forward import (
    BLOCK,
    append,
    block_times,
    inverse_gaps,
    load_pairs,
    locate,
    move,
    move_onto,
    pair,
    put,
    repeated,
    rest,
    seen_from,
    store_pairs,
)
from osciformer.ops.attention.fused.gap_form import (
    gap_functions,
    gap_slopes,
    load_form,
    load_slopes,
    slope_matrix,
    step_matrix,
)
from osciformer.ops.attention.fused.pieces import load_tokens, store_plane


@triton.jit
def spectral_sums(d1, d2, late, form, x, u, HAS_U: tl.constexpr, AVERAGE: tl.constexpr):
    """Return what a key adds to the gradients of gamma and omega^2.

    Args:
        d1: Sum over rows of gradient times derivative by omega^2 of the first row factor.
        d2: The same of the second.
        late: For point values, sum over rows of gradient times duration times second row factor.
        form: Constants of the channels.
        x: Positions.
        u: Velocities.
        HAS_U: Whether there are velocities.
        AVERAGE: Whether the row factors are integrals.
    """
    gamma, omega2 = form[1].to(tl.float32), form[2].to(tl.float32)
    to_omega2 = d1 * x
    if AVERAGE:
        # The integral of g11 changes by -2 omega^2 J with gamma, that of g12 by 2 F.
        to_gamma = -2.0 * omega2 * d2 * x
        if HAS_U:
            to_gamma += 2.0 * (d1 - 2.0 * gamma * d2) * u
    else:
        to_gamma = -2.0 * omega2 * d2 * x
        if HAS_U:
            to_gamma -= (late + 2.0 * gamma * d2) * u
    if HAS_U:
        to_omega2 += d2 * u
    return to_gamma, to_omega2


@triton.jit
def close_adjoint(
    row_ptr,
    x_ptr,
    u_ptr,
    times_ptr,
    mask_ptr,
    table,
    weights_ptr,
    to_weights_ptr,
    delta_ptr,
    to_row,
    to_x,
    to_u,
    to_spectrum,
    length,
    padded,
    heads,
    scale,
    HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the gradients of one side's tokens, ``[B H, padded, C]``, and of its spectrum.

    First of values: rows are gradients of the output, and those of the weights are written for the
    keys. Then of keys: rows are queries, and their gradients are written. `to_spectrum` ``[B H,
    programs, 2, C]`` are those of gamma and omega^2.
    """
    head, times, first_token, plane, first, pairs, stride = locate(
        times_ptr, length, padded, heads, BLOCKS
    )
    tokens = first_token + first
    program = plane // padded * tl.num_programs(0) + tl.program_id(0)
    parts = to_spectrum + program * (2 * C)
    gaps, present = block_times(times, first, length, mask_ptr + first_token, HAS_MASK)
    inverse = inverse_gaps(gaps, present)
    shares = load_pairs(weights_ptr + pairs, stride)
    if OF_KEYS:
        to_weights = load_pairs(to_weights_ptr + pairs, stride)
        for j in tl.static_range(BLOCK):
            delta = tl.load(delta_ptr + plane + first + j)
            for i in tl.static_range(j + 1):
                to_raw = shares[pair(j, i)] * (to_weights[pair(j, i)] - delta) * scale
                if i < j:
                    to_raw *= inverse[pair(j, i)]
                shares = put(shares, pair(j, i), to_raw)
    elif AVERAGE:
        for j in tl.static_range(BLOCK):
            for i in tl.static_range(j):
                shares = put(shares, pair(j, i), shares[pair(j, i)] * inverse[pair(j, i)])
    found = repeated(tl.zeros([BLOCKS], tl.float32), BLOCK * (BLOCK + 1) // 2)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (BLOCKS, WIDTH))
        form, widest = load_form(table, head, C, wide, PRECISE)
        if SPECTRAL:
            slopes = load_slopes(table, head, C, wide, PRECISE)
        a, zero = rest(tl.zeros([BLOCKS, WIDTH], tl.float32), AVERAGE)
        f1 = repeated(a, BLOCK)
        f2 = repeated(zero, BLOCK)
        d1 = f2
        d2 = f2
        to_rows = f2
        to_gamma = zero
        to_omega2 = zero
        rows = ()
        for j in tl.static_range(BLOCK):
            row = load_tokens(row_ptr, tokens + j, first + j < length, head, heads, C, channels)
            rows = append(rows, row)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            x = load_tokens(x_ptr, tokens + i, present[i], head, heads, C, channels)
            u = x
            if HAS_U:
                u = load_tokens(u_ptr, tokens + i, present[i], head, heads, C, channels)
            share = shares[pair(i, i)][:, None]
            sum1 = share * rows[i]
            sum2 = zero
            slope1 = zero
            slope2 = zero
            late = zero
            if OF_KEYS:
                to_rows = put(to_rows, i, to_rows[i] + share * x)
            else:
                found = put(found, pair(i, i), found[pair(i, i)] + tl.sum(rows[i] * x, 1))
            if i < BLOCK - 1:
                s = gaps[i][:, None]
                g11, ct, g12, i12 = gap_functions(s, form, widest, PRECISE)
                m = step_matrix(g11, g12, i12, form)
                if SPECTRAL:
                    f, g = gap_slopes(s, form, slopes, ct, g12, i12, widest, PRECISE)
                    n = slope_matrix(s, g12, f, g, form, PRECISE)
            for j in tl.static_range(i + 1, BLOCK):
                if SPECTRAL:
                    a, b = move(f1[j], f2[j], n, AVERAGE)
                    a, b = move_onto(a, b, d1[j], d2[j], m)
                    d1 = put(d1, j, a)
                    d2 = put(d2, j, b)
                a, b = move(f1[j], f2[j], m, AVERAGE)
                f1 = put(f1, j, a)
                f2 = put(f2, j, b)
                share = shares[pair(j, i)][:, None]
                to_factor = share * rows[j]
                sum1 += to_factor * a
                if HAS_U:
                    sum2 += to_factor * b
                if SPECTRAL:
                    slope1 += to_factor * d1[j]
                    slope2 += to_factor * d2[j]
                    if not AVERAGE and HAS_U:
                        near = inverse[pair(j, i)]
                        gap = 1.0 / tl.where(near > 0, near, 1.0)
                        late += to_factor * gap[:, None] * b
                moved = seen_from(a, b, x, u, HAS_U)
                if OF_KEYS:
                    to_rows = put(to_rows, j, to_rows[j] + share * moved)
                else:
                    part = tl.sum(rows[j] * moved, 1)
                    found = put(found, pair(j, i), found[pair(j, i)] + part)
            store_plane(to_x + plane * C, first + i, sum1, C, channels)
            if HAS_U:
                store_plane(to_u + plane * C, first + i, sum2, C, channels)
            if SPECTRAL:
                more_gamma, more_omega2 = spectral_sums(
                    slope1, slope2, late, form, x, u, HAS_U, AVERAGE
                )
                to_gamma += more_gamma
                to_omega2 += more_omega2
        if OF_KEYS:
            for j in tl.static_range(BLOCK):
                store_plane(to_row + plane * C, first + j, to_rows[j], C, channels)
        if SPECTRAL:
            tl.store(parts + channels, tl.sum(to_gamma, 0))
            tl.store(parts + C + channels, tl.sum(to_omega2, 0))
    if not OF_KEYS:
        if AVERAGE:
            for j in tl.static_range(BLOCK):
                for i in tl.static_range(j):
                    found = put(found, pair(j, i), found[pair(j, i)] * inverse[pair(j, i)])
        store_pairs(to_weights_ptr + pairs, stride, found)
