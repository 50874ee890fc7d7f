"""Gradients of the pairs within one tile; what `near_forward` did is done again on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import pull_back_through
from osciformer.ops.attention.fused.gap_form import (
    damping_matrix,
    gap_functions,
    gap_slopes,
    load_form,
    load_slopes,
    slope_matrix,
    step_matrix,
)
from osciformer.ops.attention.fused.near_forward import (
    halves,
    level_logits,
    meeting_gaps,
    state_of,
    tied_logits,
)
from osciformer.ops.attention.fused.pieces import load_tokens, product, row_lse, time_at


@triton.jit
def row_sums(
    out_ptr,
    to_out_ptr,
    to_lse_ptr,
    delta_ptr,
    length,
    padded,
    heads,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """Write delta, the inner product of output and its gradient less the logsumexp's gradient."""
    series, head = tl.program_id(2), tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    at = series.to(tl.int64) * length + rows
    out = load_tokens(out_ptr, at, inside, head, heads, C, tl.arange(0, C))
    to_out = load_tokens(to_out_ptr, at, inside, head, heads, C, tl.arange(0, C))
    plane = (series * heads + head).to(tl.int64) * padded
    # The logsumexp is to base 2, its gradient is wanted for base e.
    to_lse = tl.load(to_lse_ptr + plane + rows) * 1.4426950408889634
    tl.store(delta_ptr + plane + rows, tl.sum(out * to_out, 1) - to_lse)


@triton.jit
def tied_pair(
    q_ptr,
    k_ptr,
    v_ptr,
    to_out_ptr,
    times,
    mask_ptr,
    lse,
    delta,
    first_token,
    tile,
    other,
    length,
    head,
    heads,
    logit_scale,
    scale,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Return weights, and gradients of inner products, of rows of `tile` tied with `other`."""
    # fmt: off
    logits = tied_logits(
        q_ptr, k_ptr, times, mask_ptr, first_token, tile, other, length, head, heads,
        logit_scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
    )
    # fmt: on
    rows = tile * TILE + tl.arange(0, TILE)
    keys = other * TILE + tl.arange(0, TILE)
    weights = tl.exp2(logits - row_lse(lse, rows)[:, None])
    to_weights = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        o = load_tokens(to_out_ptr, first_token + rows, rows < length, head, heads, C, channels)
        v = load_tokens(v_ptr, first_token + keys, keys < length, head, heads, C, channels)
        to_weights += product(o.to(OPERAND), tl.trans(v.to(OPERAND)), PREC)
    to_raw = weights * (to_weights - tl.load(delta + rows)[:, None]) * scale
    return weights.to(OPERAND), tl.where(weights > 0, to_raw, 0.0).to(OPERAND)


@triton.jit
def elapsed(level, tile, times, t, length, TILE: tl.constexpr, PRECISE: tl.constexpr):
    """Return the durations of what grows at a level, and of the other block of the two.

    The first is a row's time since its block began, or a key's until the next block begins.
    """
    n = 1 << level
    place = tl.arange(0, TILE)
    late = (place & n) != 0
    base = tile * TILE + (place // n) * n
    own = tl.abs(time_at(times, base + tl.where(late, 0, n), length) - t)
    begin = time_at(times, base + tl.where(late, -n, n), length)
    other = time_at(times, base + tl.where(late, 0, 2 * n), length) - begin
    if not PRECISE:
        own = own.to(tl.float32)
        other = other.to(tl.float32)
    return own[:, None], other[:, None]


@triton.jit
def level_adjoint(
    level,
    s,
    prefix,
    suffix,
    spectrum,
    x,
    u,
    to_x1,
    to_x2,
    to_xs,
    to_f1,
    to_f2,
    HAS_VELOCITY: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the gradients of x, u, gamma and omega^2 at one level.

    There a token is either a row, with gradients of its factors, or a key, with gradients of its
    state; the others are 0, so one evaluation serves both.
    """
    gamma, omega2 = spectrum[1], spectrum[2]
    g11, g12, i12 = suffix[0], suffix[1], suffix[2]
    to_x = to_x1 * g11 - omega2 * g12 * to_x2 + (g12 + 2.0 * gamma * i12) * to_xs
    to_u = to_x1 * g12 + (g11 - 2.0 * gamma * g12) * to_x2 + i12 * to_xs
    to_gamma = tl.zeros_like(g11)
    to_omega2 = tl.zeros_like(g11)
    if SPECTRAL:
        late = ((tl.arange(0, TILE) & (1 << level)) != 0)[:, None]
        g12 = tl.where(late, prefix[1], g12)
        i12 = tl.where(late, prefix[2], i12)
        f = tl.where(late, prefix[3], suffix[3])
        j = tl.where(late, prefix[4], suffix[4])
        to_m1 = to_xs * x
        to_g11 = to_x1 * x
        to_g12 = -omega2 * to_x2 * x
        to_i12 = tl.zeros_like(to_m1)
        if HAS_VELOCITY:
            to_g11 += to_x2 * u
            to_g12 += (to_x1 - 2.0 * gamma * to_x2) * u
            to_i12 += to_xs * u
        if AVERAGE:
            to_m1 += tl.where(late, to_f1, 0.0)
            to_i12 += tl.where(late, to_f2, 0.0)
        else:
            to_g11 += tl.where(late, to_f1, 0.0)
            to_g12 += tl.where(late, to_f2, 0.0)
        to_gamma, to_omega2 = pull_back_through(
            s, spectrum, g12, f, j, to_g11, to_g12 + to_m1, to_i12 + 2.0 * gamma * to_m1
        )
        to_gamma += 2.0 * i12 * to_m1
        to_omega2 -= g12 * to_x2 * x
        if HAS_VELOCITY:
            to_gamma -= 2.0 * g12 * to_x2 * u
    return to_x.to(tl.float32), to_u.to(tl.float32), to_gamma, to_omega2


@triton.jit
def add_rows(x, rows, more, C: tl.constexpr, channels):
    """Add to `channels` ``[rows, W]`` of rows of a float32 plane ``[padded, C]``."""
    at = x + rows.to(tl.int64)[:, None] * C + channels
    tl.store(at, tl.load(at) + more)


@triton.jit
def near_adjoint(
    row_ptr,
    x_ptr,
    u_ptr,
    table,
    shares,
    to_row,
    to_x,
    to_u,
    to_spectrum,
    first_token,
    early,
    late,
    until,
    since,
    present,
    length,
    head,
    heads,
    HAS_U: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    OF_KEYS: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to the gradients of one side at one level, as `close_adjoint` does for a block."""
    found = tl.zeros([HALF, HALF], tl.float32)
    part = shares.to(OPERAND)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
        form, widest = load_form(table, head, C, wide, PRECISE)
        x = load_tokens(x_ptr, first_token + early, present, head, heads, C, channels)
        u = x
        if HAS_U:
            u = load_tokens(u_ptr, first_token + early, present, head, heads, C, channels)
        row = load_tokens(row_ptr, first_token + late, late < length, head, heads, C, channels)
        s = until[:, None]
        g11, ct, g12, i12 = gap_functions(s, form, widest, PRECISE)
        m = step_matrix(g11, g12, i12, form)
        if SPECTRAL:
            slopes = load_slopes(table, head, C, wide, PRECISE)
            f, j = gap_slopes(s, form, slopes, ct, g12, i12, widest, PRECISE)
            by_omega2 = state_of(slope_matrix(s, g12, f, j, form, PRECISE), x, u, HAS_U)
            by_gamma = state_of(damping_matrix(s, g12, f, j, form, PRECISE), x, u, HAS_U)
        x1, x2, xs = state_of(m, x, u, HAS_U)
        s = since[:, None]
        g11, ct, g12, i12 = gap_functions(s, form, widest, PRECISE)
        n = step_matrix(g11, g12, i12, form)
        f1, f2 = n[0], n[1]
        if AVERAGE:
            f1, f2 = n[4], n[5]
        first = (row * f1).to(OPERAND)
        second = (row * f2).to(OPERAND)
        to_x1 = product(tl.trans(part), first, PREC)
        to_x2 = product(tl.trans(part), second, PREC)
        to_xs = tl.zeros([HALF, WIDTH], tl.float32)
        if AVERAGE:
            to_xs = product(tl.trans(part), row.to(OPERAND), PREC)
        more = to_x1 * m[0] + to_x2 * m[2] + to_xs * m[4]
        add_rows(to_x, early, more, C, wide)
        if HAS_U:
            more = to_x1 * m[1] + to_x2 * m[3] + to_xs * m[5]
            add_rows(to_u, early, more, C, wide)
        if not OF_KEYS:
            found += product(first, tl.trans(x1.to(OPERAND)), PREC)
            found += product(second, tl.trans(x2.to(OPERAND)), PREC)
            if AVERAGE:
                found += product(row.to(OPERAND), tl.trans(xs.to(OPERAND)), PREC)
        if OF_KEYS or SPECTRAL:
            y1 = product(part, x1.to(OPERAND), PREC)
            y2 = product(part, x2.to(OPERAND), PREC)
        if OF_KEYS:
            more = f1 * y1 + f2 * y2 + product(part, xs.to(OPERAND), PREC)
            add_rows(to_row, late, more, C, wide)
        if SPECTRAL:
            to_gamma = to_x1 * by_gamma[0] + to_x2 * by_gamma[1] + to_xs * by_gamma[2]
            to_omega2 = to_x1 * by_omega2[0] + to_x2 * by_omega2[1] + to_xs * by_omega2[2]
            f, j = gap_slopes(s, form, slopes, ct, g12, i12, widest, PRECISE)
            by_omega2 = slope_matrix(s, g12, f, j, form, PRECISE)
            by_gamma = damping_matrix(s, g12, f, j, form, PRECISE)
            if AVERAGE:
                to_gamma += y1 * (row * by_gamma[4]) + y2 * (row * by_gamma[5])
                to_omega2 += y1 * (row * by_omega2[4]) + y2 * (row * by_omega2[5])
            else:
                to_gamma += y1 * (row * by_gamma[0]) + y2 * (row * by_gamma[1])
                to_omega2 += y1 * (row * by_omega2[0]) + y2 * (row * by_omega2[1])
            tl.store(to_spectrum + channels, tl.sum(to_gamma, 0))
            tl.store(to_spectrum + C + channels, tl.sum(to_omega2, 0))
    return found


@triton.jit
def near_backward(
    q_ptr,
    k_ptr,
    ku_ptr,
    v_ptr,
    vu_ptr,
    times_ptr,
    mask_ptr,
    key_table,
    value_table,
    to_out_ptr,
    lse_ptr,
    delta_ptr,
    to_q,
    to_k,
    to_ku,
    to_v,
    to_vu,
    to_key_spectrum,
    to_value_spectrum,
    length,
    padded,
    heads,
    logit_scale,
    scale,
    HAS_KU: tl.constexpr,
    HAS_VU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    TILE: tl.constexpr,
    LOWEST: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to the gradients of tokens ``[B H, padded, C]`` what the pairs of `near_forward` give.

    Those of gamma and omega^2 are written per program and level, ``[B H, tiles, levels, 2, C]``.
    """
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    first_token = series.to(tl.int64) * length
    times = times_ptr + first_token
    plane = (series * heads + head).to(tl.int64) * padded
    program = (series * heads + head).to(tl.int64) * tl.num_programs(0) + tile
    HALF: tl.constexpr = TILE // 2
    for level in range(LOWEST, LEVELS):
        at = (program * (LEVELS - LOWEST) + level - LOWEST) * (2 * C)
        early, late, until, since, present = halves(
            level, tile, times, mask_ptr + first_token, length, HAS_MASK, TILE
        )
        inverse = meeting_gaps(level, until, since, present, TILE)
        # fmt: off
        raw = level_logits(
            q_ptr, k_ptr, ku_ptr, key_table, first_token, early, late, until, since, present,
            length, head, heads, HAS_KU, HALF, C, WIDTH, PRECISE, PREC, OPERAND,
        )
        lse = row_lse(lse_ptr + plane, late)
        weights = tl.exp2(raw * inverse * logit_scale - lse[:, None])
        weights = tl.where(inverse > 0, weights, 0.0)
        shares = weights
        if AVERAGE:
            shares = weights * inverse
        to_weights = near_adjoint(
            to_out_ptr, v_ptr, vu_ptr, value_table, shares, to_q, to_v + plane * C,
            to_vu + plane * C, to_value_spectrum + at, first_token, early, late, until, since,
            present, length, head, heads, HAS_VU, AVERAGE, SPECTRAL, False, HALF, C, WIDTH,
            PRECISE, PREC, OPERAND,
        )
        if AVERAGE:
            to_weights *= inverse
        delta = tl.load(delta_ptr + plane + late)
        to_raw = weights * (to_weights - delta[:, None]) * inverse * scale
        near_adjoint(
            q_ptr, k_ptr, ku_ptr, key_table, to_raw, to_q + plane * C, to_k + plane * C,
            to_ku + plane * C, to_key_spectrum + at, first_token, early, late, until, since,
            present, length, head, heads, HAS_KU, True, SPECTRAL, True, HALF, C, WIDTH,
            PRECISE, PREC, OPERAND,
        )
        # fmt: on
        # What one level wrote the next one reads, by other threads.
        tl.debug_barrier()
