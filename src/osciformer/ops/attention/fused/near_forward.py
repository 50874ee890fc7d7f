"""Pairs within one tile of tokens: halved and halved again, so that r lies between key and row."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.gap_form import gap_functions, load_form, step_matrix
from osciformer.ops.attention.fused.pieces import (
    load_tokens,
    product,
    soften,
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
def halves(level, tile, times, mask, length, HAS_MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the tokens of all earlier and of all later halves of blocks of 2^(level + 1).

    With them the keys' times until their block's middle, the rows' times since, and which of the
    keys are present.
    """
    place = tl.arange(0, TILE // 2)
    n = 1 << level
    within = place & (n - 1)
    early = tile * TILE + 2 * (place - within) + within
    r = time_at(times, early - within + n, length)
    until = r - time_at(times, early, length)
    since = time_at(times, early + n, length) - r
    present = early < length
    if HAS_MASK:
        present = tl.load(mask + early, mask=present, other=0) != 0
    return early, early + n, until, since, present


@triton.jit
def meeting_gaps(level, until, since, present, TILE: tl.constexpr):
    """Return 1 / gap of the pairs that meet, later half and earlier half of one block, else 0."""
    block = tl.arange(0, TILE // 2) >> level
    gap = since.to(tl.float32)[:, None] + until.to(tl.float32)[None, :]
    seen = (block[:, None] == block[None, :]) & (gap > 0) & present[None, :]
    root = tl.rsqrt(tl.where(seen, gap, 1.0))
    return tl.where(seen, root * root, 0.0)


@triton.jit
def state_of(m, x, u, HAS_U: tl.constexpr):
    """Return position, velocity and integral of tokens after the time of `m` (`step_matrix`)."""
    x1 = m[0] * x
    x2 = m[2] * x
    xs = m[4] * x
    if HAS_U:
        x1 += m[1] * u
        x2 += m[3] * u
        xs += m[5] * u
    return x1, x2, xs


@triton.jit
def level_logits(
    q_ptr,
    k_ptr,
    ku_ptr,
    table,
    first_token,
    early,
    late,
    until,
    since,
    present,
    length,
    head,
    heads,
    HAS_KU: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Return the integrals of query times key for later rows and earlier keys of `halves`."""
    raw = tl.zeros([HALF, HALF], tl.float32)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
        form, widest = load_form(table, head, C, wide, PRECISE)
        q = load_tokens(q_ptr, first_token + late, late < length, head, heads, C, channels)
        x = load_tokens(k_ptr, first_token + early, present, head, heads, C, channels)
        u = x
        if HAS_KU:
            u = load_tokens(ku_ptr, first_token + early, present, head, heads, C, channels)
        g11, ct, g12, i12 = gap_functions(until[:, None], form, widest, PRECISE)
        x1, x2, xs = state_of(step_matrix(g11, g12, i12, form), x, u, HAS_KU)
        g11, ct, g12, i12 = gap_functions(since[:, None], form, widest, PRECISE)
        m = step_matrix(g11, g12, i12, form)
        raw += product(q.to(OPERAND), tl.trans(xs.to(OPERAND)), PREC)
        raw += product((q * m[4]).to(OPERAND), tl.trans(x1.to(OPERAND)), PREC)
        raw += product((q * m[5]).to(OPERAND), tl.trans(x2.to(OPERAND)), PREC)
    return raw


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
    out_ptr,
    lse_ptr,
    length,
    padded,
    heads,
    logit_scale,
    HAS_KU: tl.constexpr,
    HAS_VU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    TILE: tl.constexpr,
    LOWEST: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to each row the keys of its tile that are not of its block of 2^LOWEST tokens.

    `out_ptr` ``[B H, padded, C]`` and `lse_ptr` ``[B H, padded]`` hold output and logsumexp (base
    2) over nearer keys and are updated. One program takes one tile of one head. At each level half
    of its tokens are rows and half are keys, and each has one time to evaluate a closed form at.
    """
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    first_token = series.to(tl.int64) * length
    times = times_ptr + first_token
    plane = (series * heads + head).to(tl.int64) * padded
    HALF: tl.constexpr = TILE // 2
    for level in range(LOWEST, LEVELS):
        early, late, until, since, present = halves(
            level, tile, times, mask_ptr + first_token, length, HAS_MASK, TILE
        )
        inverse = meeting_gaps(level, until, since, present, TILE)
        # fmt: off
        raw = level_logits(
            q_ptr, k_ptr, ku_ptr, key_table, first_token, early, late, until, since, present,
            length, head, heads, HAS_KU, HALF, C, WIDTH, PRECISE, PREC, OPERAND,
        )
        # fmt: on
        logits = tl.where(inverse > 0, raw * inverse * logit_scale, float("-inf"))
        nearer = tl.load(lse_ptr + plane + late)
        mass = tl.where(nearer == float("-inf"), 0.0, 1.0)
        top, mass, weights, keep = soften(nearer, mass, logits)
        safe = tl.where(mass > 0, mass, 1.0)
        tl.store(lse_ptr + plane + late, tl.where(mass > 0, top + tl.log2(safe), float("-inf")))
        unit = 1.0 / safe
        if AVERAGE:
            weights *= inverse
        weights = (weights * unit[:, None]).to(OPERAND)
        for start in range(0, C, WIDTH):
            channels = start + tl.arange(0, WIDTH)
            wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
            form, widest = load_form(value_table, head, C, wide, PRECISE)
            x = load_tokens(v_ptr, first_token + early, present, head, heads, C, channels)
            u = x
            if HAS_VU:
                u = load_tokens(vu_ptr, first_token + early, present, head, heads, C, channels)
            g11, ct, g12, i12 = gap_functions(until[:, None], form, widest, PRECISE)
            x1, x2, xs = state_of(step_matrix(g11, g12, i12, form), x, u, HAS_VU)
            g11, ct, g12, i12 = gap_functions(since[:, None], form, widest, PRECISE)
            m = step_matrix(g11, g12, i12, form)
            f1, f2 = m[0], m[1]
            if AVERAGE:
                f1, f2 = m[4], m[5]
            more = f1 * product(weights, x1.to(OPERAND), PREC)
            more += f2 * product(weights, x2.to(OPERAND), PREC)
            if AVERAGE:
                more += product(weights, xs.to(OPERAND), PREC)
            at = out_ptr + plane * C + late.to(tl.int64)[:, None] * C + wide
            tl.store(at, tl.load(at) * (keep * unit)[:, None] + more)
        # What one level wrote the next one reads, by other threads.
        tl.debug_barrier()
