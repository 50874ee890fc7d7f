"""Pairs within one tile of tokens, under a query path that all rows share."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum
from osciformer.ops.attention.fused.near_forward import meeting_bits, tie_range, tied_logits
from osciformer.ops.attention.fused.path_pieces import (
    climb_propagator,
    load_moment,
    load_velocity,
    moved_back,
    moved_on,
    propagator,
    sum_before,
)
from osciformer.ops.attention.fused.pieces import (
    aged_state,
    bottom,
    climb,
    load_tokens,
    product,
    row_factors,
    soften,
    store_plane,
    time_at,
)


@triton.jit
def gains(
    k_ptr,
    ku_ptr,
    key_table,
    moment_ptr,
    gap_to_next,
    first_token,
    tokens,
    present,
    plane,
    size,
    head,
    heads,
    HAS_KU: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Return what key i (column) gains over the gap after token g (row), 0 where g < i."""
    place = tl.arange(0, TILE)
    bits = meeting_bits(TILE)
    raw = tl.zeros([TILE, TILE], tl.float32)
    own = tl.zeros([TILE], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(key_table, head, C, channels, PRECISE)
        m1, m2 = load_moment(moment_ptr, plane, tokens, size, C, channels)
        x = load_tokens(k_ptr, first_token + tokens, present, head, heads, C, channels)
        u = load_velocity(ku_ptr, first_token + tokens, present, head, heads, C, channels, HAS_KU)
        own += tl.sum(m1 * x + m2 * u, 1)
        suffix = propagator(gap_to_next, spectrum, PRECISE)
        prefix = (tl.zeros_like(suffix[0]) + 1.0, tl.zeros_like(suffix[0]))
        for level in range(LEVELS):
            x1, x2 = moved_on(x, u, suffix[0], suffix[1], spectrum)
            f1, f2 = moved_back(m1, m2, prefix[0], prefix[1], spectrum)
            part = product(f1.to(OPERAND), tl.trans(x1.to(OPERAND)), PREC)
            part += product(f2.to(OPERAND), tl.trans(x2.to(OPERAND)), PREC)
            raw = tl.where((bits >> level) == 1, raw + part, raw)
            prefix, suffix = climb_propagator(prefix, suffix, spectrum, 1 << level, TILE, WIDTH)
    return tl.where(place[:, None] == place[None, :], own[:, None], raw)


@triton.jit
def near_shared_forward(
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
    key_state,
    value_state,
    value_factor,
    bias_ptr,
    far_bias_ptr,
    out_ptr,
    lse_ptr,
    length,
    padded,
    heads,
    logit_scale,
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
    """Write output and logsumexp (base 2) over the keys of each row's own tile.

    `q_ptr` holds the path at each row's own time, for ties alone. `moment_ptr` ``[B H, 2, padded,
    C]`` float32 are the path's moments over the gaps after the tokens.

    Also the set-up of the next stage as `near_forward` does, but for row factors of keys, which are
    integrals of the path, and the integrals of path times key from each key to the end of its tile
    and of its far span, `bias_ptr` and `far_bias_ptr` ``[B H, padded]``; the latter by way of the
    moments from the ends of tiles to those of their spans, `beyond_ptr` ``[B H, tiles, 2, C]``.
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

    # fmt: off
    gained = gains(
        k_ptr, ku_ptr, key_table, moment_ptr, gap_to_next, first_token, tokens, present, plane,
        size, head, heads, HAS_KU, TILE, LEVELS, C, WIDTH, PRECISE, PREC, OPERAND,
    )
    # fmt: on
    bias = tl.sum(gained, 0)
    tl.store(bias_ptr + plane + tokens, bias)
    end = (time_at(times, tile * TILE + TILE, length) - t)[:, None]
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = load_spectrum(key_table, head, C, channels, PRECISE)
        x = load_tokens(k_ptr, first_token + tokens, present, head, heads, C, channels)
        u = load_velocity(ku_ptr, first_token + tokens, present, head, heads, C, channels, HAS_KU)
        g11, g12 = propagator(end, spectrum, PRECISE)
        x1, x2 = moved_on(x, u, g11, g12, spectrum)
        store_plane(key_state + 3 * plane * C, tokens, x1, C, channels)
        store_plane(key_state + 3 * plane * C + size, tokens, x2, C, channels)
        if HAS_FAR:
            beyond = beyond_ptr + (plane // TILE + tile) * (2 * C) + channels[None, :]
            bias += tl.sum(tl.load(beyond) * x1 + tl.load(beyond + C) * x2, 1)
    if HAS_FAR:
        tl.store(far_bias_ptr + plane + tokens, bias)

    bits = meeting_bits(TILE)
    gap = (t[:, None] - t[None, :]).to(tl.float32)
    seen = (gap > 0) & present[None, :] & (bits > 0)
    inverse = tl.where(seen, 1.0 / tl.where(seen, gap, 1.0), 0.0)
    raw = sum_before(gained, TILE)
    logits = tl.where(seen, raw * inverse * logit_scale, float("-inf"))
    top = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mass = tl.sum(weights, 1)
    if AVERAGE:
        weights *= inverse

    # Ties, then values, as in `near_forward`.
    low = tile
    high = tile
    if not STRICT:
        low, high = tie_range(times, tile, length, TILE)
        nearer = top
        for other in range(low, high + 1):
            # fmt: off
            tied = tied_logits(
                q_ptr, k_ptr, times, mask_ptr, first_token, tile, other, length, head, heads,
                logit_scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
            )
            # fmt: on
            top, mass, _, keep = soften(top, mass, tied)
        weights *= tl.exp2(nearer - tl.where(top == float("-inf"), 0.0, top))[:, None]
    safe = tl.where(mass > 0, mass, 1.0)
    weights = weights / safe[:, None]
    lse = tl.where(mass > 0, top + tl.log2(safe), float("-inf"))
    tl.store(lse_ptr + plane + tokens, lse)
    shift = tl.where(mass > 0, lse, 0.0)

    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        acc = tl.zeros([TILE, WIDTH], tl.float32)
        if not STRICT:
            for other in range(low, high + 1):
                # fmt: off
                tied = tied_logits(
                    q_ptr, k_ptr, times, mask_ptr, first_token, tile, other, length, head, heads,
                    logit_scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
                )
                # fmt: on
                others = other * TILE + place
                v = load_tokens(
                    v_ptr, first_token + others, others < length, head, heads, C, channels
                )
                part = tl.exp2(tied - shift[:, None]).to(OPERAND)
                acc += product(part, v.to(OPERAND), PREC)
        spectrum = load_spectrum(value_table, head, C, channels, PRECISE)
        x = load_tokens(v_ptr, first_token + tokens, present, head, heads, C, channels)
        u = x
        if HAS_VU:
            u = load_tokens(vu_ptr, first_token + tokens, present, head, heads, C, channels)
        prefix, suffix = bottom(gap_to_next, spectrum, PRECISE)
        for level in range(LEVELS):
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_VU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, AVERAGE)
            part = tl.where((bits >> level) == 1, weights, 0.0).to(OPERAND)
            acc += f1 * product(part, x1.to(OPERAND), PREC)
            acc += f2 * product(part, x2.to(OPERAND), PREC)
            if AVERAGE:
                acc += product(part, xs.to(OPERAND), PREC)
            prefix, suffix = climb(prefix, suffix, spectrum, 1 << level, TILE, WIDTH)
        store_plane(out_ptr + plane * C, tokens, acc, C, channels)
        x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_VU)
        f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, AVERAGE)
        store_plane(value_state + 3 * plane * C, tokens, x1, C, channels)
        store_plane(value_state + 3 * plane * C + size, tokens, x2, C, channels)
        store_plane(value_state + 3 * plane * C + 2 * size, tokens, xs, C, channels)
        store_plane(value_factor + 2 * plane * C, tokens, f1, C, channels)
        store_plane(value_factor + 2 * plane * C + size, tokens, f2, C, channels)
