"""Gradients of the pairs within one tile, under a query path that all rows share."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum
from osciformer.ops.attention.fused.near_backward import elapsed, level_adjoint, row_lse, tied_pair
from osciformer.ops.attention.fused.near_forward import meeting_bits, tie_range
from osciformer.ops.attention.fused.near_shared_forward import gains
from osciformer.ops.attention.fused.path_pieces import (
    climb_with_slope,
    load_moment,
    load_velocity,
    moved_back,
    moved_on,
    propagator_with_slope,
    spectral_adjoint,
    sum_after,
    sum_before,
)
from osciformer.ops.attention.fused.pieces import (
    aged_state,
    bottom_with_slopes,
    climb_with_slopes,
    load_tokens,
    product,
    row_factors,
    store_plane,
    time_at,
)


@triton.jit
def add_plane(x, rows, value, C: tl.constexpr, channels):
    """Add to `channels` of rows of a plane ``[padded, C]``."""
    at = x + rows[:, None] * C + channels[None, :]
    tl.store(at, tl.load(at) + value.to(tl.float32))


@triton.jit
def near_shared_backward(
    q_ptr,
    k_ptr,
    ku_ptr,
    v_ptr,
    vu_ptr,
    times_ptr,
    mask_ptr,
    key_table,
    value_table,
    moment_ptr,
    beyond_ptr,
    to_out_ptr,
    lse_ptr,
    delta_ptr,
    to_bias,
    to_far_bias,
    to_q,
    to_k,
    to_ku,
    to_v,
    to_vu,
    to_moment,
    to_beyond,
    to_key_spectrum,
    to_value_spectrum,
    length,
    padded,
    heads,
    logit_scale,
    scale,
    HAS_MIDDLE: tl.constexpr,
    HAS_FAR: tl.constexpr,
    HAS_KU: tl.constexpr,
    HAS_VU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    STRICT: tl.constexpr,
    AVERAGE: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to the gradients of keys, values and moments; write those of ties' queries and spectra.

    Shapes are those of `near_backward` and `near_shared_forward`. The gradients of the biases, from
    the stages after, are taken on to keys, moments and `to_beyond` ``[B H, tiles, 2, C]``.
    """
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
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

    # fmt: off
    gained = gains(
        k_ptr, ku_ptr, key_table, moment_ptr, gap_to_next, first_token, tokens, present, plane,
        size, head, heads, HAS_KU, TILE, LEVELS, C, WIDTH, PRECISE, PREC, OPERAND,
    )
    # fmt: on
    raw = sum_before(gained, TILE)
    weights = tl.where(seen, tl.exp2(raw * inverse * logit_scale - lse[:, None]), 0.0)
    shares = weights
    if AVERAGE:
        shares = weights * inverse
    low = tile
    high = tile
    if not STRICT:
        low, high = tie_range(times, tile, length, TILE)

    # Values, as in `near_backward`.
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
            to_f1 = o * product(part, x1.to(OPERAND), PREC)
            to_f2 = o * product(part, x2.to(OPERAND), PREC)
            # fmt: off
            more_x, more_u, more_gamma, more_omega2 = level_adjoint(
                level, s_own, prefix, suffix, spectrum, x, u, to_x1, to_x2, to_xs,
                to_f1, to_f2, HAS_VU, AVERAGE, True, TILE,
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
        add_plane(to_v + plane * C, tokens, to_x, C, channels)
        if HAS_VU:
            add_plane(to_vu + plane * C, tokens, to_u, C, channels)
        at = to_value_spectrum + (plane // TILE + tile) * (2 * C) + channels
        tl.store(at, tl.sum(to_gamma, 0).to(tl.float32))
        tl.store(at + C, tl.sum(to_omega2, 0).to(tl.float32))

    if AVERAGE:
        to_weights *= inverse
    to_raw_near = weights * (to_weights - delta[:, None]) * inverse * scale
    # What a key gains over a gap counts for all later rows of the tile and, as its bias, beyond.
    to_gain = sum_after(to_raw_near, TILE)
    far = tl.zeros([TILE], tl.float32)
    if HAS_FAR:
        far = tl.load(to_far_bias + plane + tokens)
        to_gain += far[None, :]
    if HAS_MIDDLE:
        to_gain += tl.load(to_bias + plane + tokens)[None, :]
    is_own = place[:, None] == place[None, :]
    to_own = tl.sum(tl.where(is_own, to_gain, 0.0), 1)[:, None]
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(key_table, head, C, channels, PRECISE)
        m1, m2 = load_moment(moment_ptr, plane, tokens, size, C, channels)
        x = load_tokens(k_ptr, first_token + tokens, present, head, heads, C, channels)
        u = load_velocity(ku_ptr, first_token + tokens, present, head, heads, C, channels, HAS_KU)
        suffix = propagator_with_slope(gap_to_next, spectrum, PRECISE)
        still = tl.zeros_like(suffix[0])
        prefix = (still + 1.0, still, still)
        to_m1 = to_own * x
        to_m2 = to_own * u
        to_x = to_own * m1
        to_u = to_own * m2
        to_gamma = still
        to_omega2 = still
        for level in range(LEVELS):
            n = 1 << level
            late = ((place & n) != 0)[:, None]
            s_own, s_other = elapsed(level, tile, times, t, length, TILE, PRECISE)
            x1, x2 = moved_on(x, u, suffix[0], suffix[1], spectrum)
            f1, f2 = moved_back(m1, m2, prefix[0], prefix[1], spectrum)
            part = tl.where((bits >> level) == 1, to_gain, 0.0).to(OPERAND)
            # A token is either a gap's, and left of the propagator, or a key, and right of it.
            r1 = tl.where(late, product(part, x1.to(OPERAND), PREC), x)
            r2 = tl.where(late, product(part, x2.to(OPERAND), PREC), u)
            l1 = tl.where(late, m1, product(tl.trans(part), f1.to(OPERAND), PREC))
            l2 = tl.where(late, m2, product(tl.trans(part), f2.to(OPERAND), PREC))
            g11 = tl.where(late, prefix[0], suffix[0])
            g12 = tl.where(late, prefix[1], suffix[1])
            f = tl.where(late, prefix[2], suffix[2])
            more1, more2 = moved_on(r1, r2, g11, g12, spectrum)
            to_m1 += tl.where(late, more1, 0.0)
            to_m2 += tl.where(late, more2, 0.0)
            more1, more2 = moved_back(l1, l2, g11, g12, spectrum)
            to_x += tl.where(late, 0.0, more1)
            to_u += tl.where(late, 0.0, more2)
            more1, more2 = spectral_adjoint(s_own, g12, f, spectrum, l1, l2, r1, r2)
            to_gamma += more1
            to_omega2 += more2
            prefix, suffix = climb_with_slope(
                prefix, suffix, s_own, s_other, spectrum, n, TILE, WIDTH
            )
        tiles = (plane // TILE + tile) * (2 * C) + channels
        if HAS_FAR:
            s_own, s_other = elapsed(LEVELS, tile, times, t, length, TILE, PRECISE)
            l1 = far[:, None] * tl.load(beyond_ptr + tiles)[None, :]
            l2 = far[:, None] * tl.load(beyond_ptr + tiles + C)[None, :]
            x1, x2 = moved_on(x, u, suffix[0], suffix[1], spectrum)
            tl.store(to_beyond + tiles, tl.sum(far[:, None] * x1, 0))
            tl.store(to_beyond + tiles + C, tl.sum(far[:, None] * x2, 0))
            more1, more2 = moved_back(l1, l2, suffix[0], suffix[1], spectrum)
            to_x += more1
            to_u += more2
            more1, more2 = spectral_adjoint(s_own, suffix[1], suffix[2], spectrum, l1, l2, x, u)
            to_gamma += more1
            to_omega2 += more2
        add_plane(to_moment + 2 * plane * C, tokens, to_m1, C, channels)
        add_plane(to_moment + 2 * plane * C + size, tokens, to_m2, C, channels)
        tl.store(to_key_spectrum + tiles, tl.sum(to_gamma, 0).to(tl.float32))
        tl.store(to_key_spectrum + tiles + C, tl.sum(to_omega2, 0).to(tl.float32))

        to_row = tl.zeros([TILE, WIDTH], tl.float32)
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
        add_plane(to_k + plane * C, tokens, to_x, C, channels)
        if HAS_KU:
            add_plane(to_ku + plane * C, tokens, to_u, C, channels)
