"""Gradients of the pairs within one tile; what `near_forward` did is done again on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum, pull_back_through
from osciformer.ops.attention.fused.near_forward import meeting_bits, tie_range, tied_logits
from osciformer.ops.attention.fused.pieces import (
    aged_state,
    bottom,
    bottom_with_slopes,
    climb,
    climb_with_slopes,
    load_tokens,
    product,
    row_factors,
    store_plane,
    time_at,
)


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
def row_lse(lse_ptr, rows):
    """Return logsumexps for use in a backward pass: rows that saw nothing get weights 0."""
    lse = tl.load(lse_ptr + rows)
    return tl.where(lse == float("-inf"), float("inf"), lse)


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
    STRICT: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Write the gradients of tokens ``[B H, padded, C]`` and, per program, of gamma and omega^2.

    `to_key_spectrum` and `to_value_spectrum` are ``[B H, tiles, 2, C]``.
    """
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64) * padded
    place = tl.arange(0, TILE)
    tokens = tile * TILE + place
    inside = tokens < length
    present = inside
    if HAS_MASK:
        present = tl.load(mask_ptr + first_token + tokens, mask=inside, other=0) != 0
    t = time_at(times, tokens, length)
    gap_to_next = (time_at(times, tokens + 1, length) - t)[:, None]
    gap = (t[:, None] - t[None, :]).to(tl.float32)
    bits = meeting_bits(TILE)
    seen = (gap > 0) & present[None, :] & (bits > 0)
    inverse = tl.where(seen, 1.0 / tl.where(seen, gap, 1.0), 0.0)
    lse = row_lse(lse_ptr + plane, tokens)
    delta = tl.load(delta_ptr + plane + tokens)

    raw = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(key_table, head, C, channels, PRECISE)
        q = load_tokens(q_ptr, first_token + tokens, inside, head, heads, C, channels)
        x = load_tokens(k_ptr, first_token + tokens, present, head, heads, C, channels)
        u = x
        if HAS_KU:
            u = load_tokens(ku_ptr, first_token + tokens, present, head, heads, C, channels)
        prefix, suffix = bottom(gap_to_next, spectrum, PRECISE)
        for level in range(LEVELS):
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_KU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, True)
            part = product(q.to(OPERAND), tl.trans(xs.to(OPERAND)), PREC)
            part += product((q * f1).to(OPERAND), tl.trans(x1.to(OPERAND)), PREC)
            part += product((q * f2).to(OPERAND), tl.trans(x2.to(OPERAND)), PREC)
            raw = tl.where((bits >> level) == 1, raw + part, raw)
            prefix, suffix = climb(prefix, suffix, spectrum, 1 << level, TILE, WIDTH)
    weights = tl.where(seen, tl.exp2(raw * inverse * logit_scale - lse[:, None]), 0.0)
    shares = weights
    if AVERAGE:
        shares = weights * inverse
    low = tile
    high = tile
    if not STRICT:
        low, high = tie_range(times, tile, length, TILE)

    to_weights = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(value_table, head, C, channels, PRECISE)
        o = load_tokens(to_out_ptr, first_token + tokens, inside, head, heads, C, channels)
        x = load_tokens(v_ptr, first_token + tokens, present, head, heads, C, channels)
        u = x
        if HAS_VU:
            u = load_tokens(vu_ptr, first_token + tokens, present, head, heads, C, channels)
        prefix, suffix = bottom_with_slopes(gap_to_next, spectrum, PRECISE)
        to_x = tl.zeros([TILE, WIDTH], tl.float32)
        to_u = tl.zeros([TILE, WIDTH], tl.float32)
        to_gamma = tl.zeros_like(prefix[0])
        to_omega2 = tl.zeros_like(prefix[0])
        for level in range(LEVELS):
            n = 1 << level
            s_own, s_other = elapsed(level, tile, times, t, length, TILE, PRECISE)
            meeting = (bits >> level) == 1
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_VU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, AVERAGE)
            o1 = (o * f1).to(OPERAND)
            o2 = (o * f2).to(OPERAND)
            part = product(o1, tl.trans(x1.to(OPERAND)), PREC)
            part += product(o2, tl.trans(x2.to(OPERAND)), PREC)
            if AVERAGE:
                part += product(o.to(OPERAND), tl.trans(xs.to(OPERAND)), PREC)
            to_weights = tl.where(meeting, to_weights + part, to_weights)
            part = tl.where(meeting, shares, 0.0).to(OPERAND)
            to_x1 = product(tl.trans(part), o1, PREC)
            to_x2 = product(tl.trans(part), o2, PREC)
            to_xs = tl.zeros([TILE, WIDTH], tl.float32)
            if AVERAGE:
                to_xs = product(tl.trans(part), o.to(OPERAND), PREC)
            to_f1 = to_x1
            to_f2 = to_x2
            if SPECTRAL:
                to_f1 = o * product(part, x1.to(OPERAND), PREC)
                to_f2 = o * product(part, x2.to(OPERAND), PREC)
            # fmt: off
            more_x, more_u, more_gamma, more_omega2 = level_adjoint(
                level, s_own, prefix, suffix, spectrum, x, u, to_x1, to_x2, to_xs,
                to_f1, to_f2, HAS_VU, AVERAGE, SPECTRAL, TILE,
            )
            # fmt: on
            to_x += more_x
            to_u += more_u
            to_gamma += more_gamma
            to_omega2 += more_omega2
            prefix, suffix = climb_with_slopes(
                prefix, suffix, s_own, s_other, spectrum, n, TILE, WIDTH
            )
        if not STRICT:
            for other in range(low, high + 1):
                # fmt: off
                tied, to_raw = tied_pair(
                    q_ptr, k_ptr, v_ptr, to_out_ptr, times, mask_ptr, lse_ptr + plane,
                    delta_ptr + plane, first_token, other, tile, length, head, heads, logit_scale,
                    scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
                )
                # fmt: on
                others = other * TILE + place
                theirs = load_tokens(
                    to_out_ptr, first_token + others, others < length, head, heads, C, channels
                )
                to_x += product(tl.trans(tied), theirs.to(OPERAND), PREC)
        store_plane(to_v + plane * C, tokens, to_x, C, channels)
        if HAS_VU:
            store_plane(to_vu + plane * C, tokens, to_u, C, channels)
        if SPECTRAL:
            at = ((series * heads + head).to(tl.int64) * tl.num_programs(0) + tile) * (
                2 * C
            ) + channels
            tl.store(to_value_spectrum + at, tl.sum(to_gamma, 0).to(tl.float32))
            tl.store(to_value_spectrum + at + C, tl.sum(to_omega2, 0).to(tl.float32))

    if AVERAGE:
        to_weights *= inverse
    to_raw_near = weights * (to_weights - delta[:, None]) * inverse * scale
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(key_table, head, C, channels, PRECISE)
        q = load_tokens(q_ptr, first_token + tokens, inside, head, heads, C, channels)
        x = load_tokens(k_ptr, first_token + tokens, present, head, heads, C, channels)
        u = x
        if HAS_KU:
            u = load_tokens(ku_ptr, first_token + tokens, present, head, heads, C, channels)
        prefix, suffix = bottom_with_slopes(gap_to_next, spectrum, PRECISE)
        to_row = tl.zeros([TILE, WIDTH], tl.float32)
        to_x = tl.zeros([TILE, WIDTH], tl.float32)
        to_u = tl.zeros([TILE, WIDTH], tl.float32)
        to_gamma = tl.zeros_like(prefix[0])
        to_omega2 = tl.zeros_like(prefix[0])
        for level in range(LEVELS):
            n = 1 << level
            s_own, s_other = elapsed(level, tile, times, t, length, TILE, PRECISE)
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_KU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, True)
            part = tl.where((bits >> level) == 1, to_raw_near, 0.0).to(OPERAND)
            y1 = product(part, x1.to(OPERAND), PREC)
            y2 = product(part, x2.to(OPERAND), PREC)
            to_row += f1 * y1 + f2 * y2 + product(part, xs.to(OPERAND), PREC)
            to_x1 = product(tl.trans(part), (q * f1).to(OPERAND), PREC)
            to_x2 = product(tl.trans(part), (q * f2).to(OPERAND), PREC)
            to_xs = product(tl.trans(part), q.to(OPERAND), PREC)
            # fmt: off
            more_x, more_u, more_gamma, more_omega2 = level_adjoint(
                level, s_own, prefix, suffix, spectrum, x, u, to_x1, to_x2, to_xs,
                q * y1, q * y2, HAS_KU, True, SPECTRAL, TILE,
            )
            # fmt: on
            to_x += more_x
            to_u += more_u
            to_gamma += more_gamma
            to_omega2 += more_omega2
            prefix, suffix = climb_with_slopes(
                prefix, suffix, s_own, s_other, spectrum, n, TILE, WIDTH
            )
        if not STRICT:
            for other in range(low, high + 1):
                others = other * TILE + place
                # fmt: off
                tied, to_raw = tied_pair(
                    q_ptr, k_ptr, v_ptr, to_out_ptr, times, mask_ptr, lse_ptr + plane,
                    delta_ptr + plane, first_token, tile, other, length, head, heads, logit_scale,
                    scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
                )
                theirs = load_tokens(
                    k_ptr, first_token + others, others < length, head, heads, C, channels
                )
                to_row += product(to_raw, theirs.to(OPERAND), PREC)
                tied, to_raw = tied_pair(
                    q_ptr, k_ptr, v_ptr, to_out_ptr, times, mask_ptr, lse_ptr + plane,
                    delta_ptr + plane, first_token, other, tile, length, head, heads, logit_scale,
                    scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
                )
                # fmt: on
                theirs = load_tokens(
                    q_ptr, first_token + others, others < length, head, heads, C, channels
                )
                to_x += product(tl.trans(to_raw), theirs.to(OPERAND), PREC)
        store_plane(to_q + plane * C, tokens, to_row, C, channels)
        store_plane(to_k + plane * C, tokens, to_x, C, channels)
        if HAS_KU:
            store_plane(to_ku + plane * C, tokens, to_u, C, channels)
        if SPECTRAL:
            at = ((series * heads + head).to(tl.int64) * tl.num_programs(0) + tile) * (
                2 * C
            ) + channels
            tl.store(to_key_spectrum + at, tl.sum(to_gamma, 0).to(tl.float32))
            tl.store(to_key_spectrum + at + C, tl.sum(to_omega2, 0).to(tl.float32))
