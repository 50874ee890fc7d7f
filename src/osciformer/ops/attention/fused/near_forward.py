"""Pairs within one tile of tokens: halved and halved again, so that r lies between key and row."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum
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
def tie_range(times, tile, length, TILE: tl.constexpr):
    """Return the first and the last tile that hold a token at a time of this tile."""
    low = tile
    high = tile
    first = time_at(times, tile * TILE, length)
    last = time_at(times, tile * TILE + TILE - 1, length)
    while time_at(times, tl.maximum(low * TILE - 1, 0), length) == first and low > 0:
        low -= 1
    while time_at(times, (high + 1) * TILE, length) == last and (high + 1) * TILE < length:
        high += 1
    return low, high


@triton.jit
def meeting_bits(TILE: tl.constexpr):
    """Return row xor key where the row comes later, else 0.

    Its highest bit is the level at which the pair meets: shifted right by it, 1 is left.
    """
    place = tl.arange(0, TILE)
    later = place[:, None] > place[None, :]
    return tl.where(later, place[:, None] ^ place[None, :], 0)


@triton.jit
def tied_logits(
    q_ptr,
    k_ptr,
    times,
    mask_ptr,
    first_token,
    tile,
    other,
    length,
    head,
    heads,
    logit_scale,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Return the logits of the rows of `tile` for the keys of `other` at their very times."""
    rows = tile * TILE + tl.arange(0, TILE)
    keys = other * TILE + tl.arange(0, TILE)
    present = keys < length
    if HAS_MASK:
        present = tl.load(mask_ptr + first_token + keys, mask=present, other=0) != 0
    same = time_at(times, rows, length)[:, None] == time_at(times, keys, length)[None, :]
    raw = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        q = load_tokens(q_ptr, first_token + rows, rows < length, head, heads, C, channels)
        k = load_tokens(k_ptr, first_token + keys, present, head, heads, C, channels)
        raw += product(q.to(OPERAND), tl.trans(k.to(OPERAND)), PREC)
    return tl.where(same & present[None, :], raw * logit_scale, float("-inf"))


@triton.jit
def near_forward(
    q_ptr,
    k_ptr,
    ku_ptr,
    v_ptr,
    vu_ptr,
    times_ptr,
    mask_ptr,
    key_table,
    value_table,
    key_state,
    value_state,
    key_factor,
    value_factor,
    out_ptr,
    lse_ptr,
    length,
    padded,
    heads,
    logit_scale,
    HAS_KU: tl.constexpr,
    HAS_VU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    STRICT: tl.constexpr,
    AVERAGE: tl.constexpr,
    WRITE: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Write output and logsumexp (base 2) over the keys of each row's own tile.

    Also the set-up of the next stage: states at the end of the tile, ``[B H, 3, padded, C]``, and
    row factors from its start, ``[B H, 2, padded, C]``. One program takes one tile of one head.
    `logit_scale` is the scale of the logits times log2(e).
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

    bits = meeting_bits(TILE)
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
        if WRITE:
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_KU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, True)
            store_plane(key_state + 3 * plane * C, tokens, x1, C, channels)
            store_plane(key_state + 3 * plane * C + size, tokens, x2, C, channels)
            store_plane(key_state + 3 * plane * C + 2 * size, tokens, xs, C, channels)
            store_plane(key_factor + 2 * plane * C, tokens, f1, C, channels)
            store_plane(key_factor + 2 * plane * C + size, tokens, f2, C, channels)

    gap = (t[:, None] - t[None, :]).to(tl.float32)
    seen = (gap > 0) & present[None, :] & (bits > 0)
    inverse = tl.where(seen, 1.0 / tl.where(seen, gap, 1.0), 0.0)
    logits = tl.where(seen, raw * inverse * logit_scale, float("-inf"))
    top = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mass = tl.sum(weights, 1)
    if AVERAGE:
        weights *= inverse

    # At a zero gap nothing has moved: plain attention among the tokens of one time. First its
    # logits, so that the weights above can be scaled once and for all.
    low = tile
    high = tile
    if not STRICT:
        low, high = tie_range(times, tile, length, TILE)
        nearer = top
        for other in range(low, high + 1):
            tied = tied_logits(
                q_ptr,
                k_ptr,
                times,
                mask_ptr,
                first_token,
                tile,
                other,
                length,
                head,
                heads,
                logit_scale,
                HAS_MASK,
                TILE,
                C,
                WIDTH,
                PREC,
                OPERAND,
            )
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
                tied = tied_logits(
                    q_ptr,
                    k_ptr,
                    times,
                    mask_ptr,
                    first_token,
                    tile,
                    other,
                    length,
                    head,
                    heads,
                    logit_scale,
                    HAS_MASK,
                    TILE,
                    C,
                    WIDTH,
                    PREC,
                    OPERAND,
                )
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
        if WRITE:
            x1, x2, xs = aged_state(suffix[0], suffix[1], suffix[2], spectrum, x, u, HAS_VU)
            f1, f2 = row_factors(prefix[0], prefix[1], prefix[2], spectrum, AVERAGE)
            store_plane(value_state + 3 * plane * C, tokens, x1, C, channels)
            store_plane(value_state + 3 * plane * C + size, tokens, x2, C, channels)
            store_plane(value_state + 3 * plane * C + 2 * size, tokens, xs, C, channels)
            store_plane(value_factor + 2 * plane * C, tokens, f1, C, channels)
            store_plane(value_factor + 2 * plane * C + size, tokens, f2, C, channels)
