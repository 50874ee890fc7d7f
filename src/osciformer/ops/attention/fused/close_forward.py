"""Pairs within a block of eight tokens: row factors moved back from key to key, in registers.

Tensors are ``[blocks, channels]``, one for each of the eight tokens of a block, so that which row
meets which key is known when the kernel is compiled: no masks, no exchange between threads but the
sum over channels. From one key to the one before it a row's factors move by the closed form of
that one gap, which all rows of the block and the set-up of the next stage share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.gap_form import gap_functions, load_form, step_matrix
from osciformer.ops.attention.fused.pieces import (
    aged_state,
    compose,
    load_tokens,
    row_lse,
    store_plane,
    time_at,
)

#: Tokens of a block; the kernels are unrolled over them.
BLOCK = tl.constexpr(8)


@triton.constexpr_function
def pair(row, key):
    """Return the place of a pair, a token with itself included, in tuples of 36.

    The last keys come first, rows in order.
    """
    return (BLOCK - 1 - key) * (BLOCK - key) // 2 + row - key


@triton.jit
def put(items, index: tl.constexpr, value):
    """Return the tuple `items` with one of them replaced."""
    return items[:index] + (value,) + items[index + 1 :]  # noqa: RUF005


@triton.jit
def append(items, value):
    """Return the tuple `items` and one more."""
    return items + (value,)  # noqa: RUF005


@triton.jit
def repeated(value, COUNT: tl.constexpr):
    """Return a tuple of COUNT times `value`."""
    items = ()
    for _ in tl.static_range(COUNT):
        items = append(items, value)
    return items


@triton.jit
def block_times(times, first, length, mask, HAS_MASK: tl.constexpr):
    """Return eight gaps to the next token in float64, and which tokens are present."""
    gaps = ()
    present = ()
    t = time_at(times, first, length)
    for i in tl.static_range(BLOCK):
        following = time_at(times, first + (i + 1), length)
        gaps = append(gaps, following - t)
        t = following
        seen = first + i < length
        if HAS_MASK:
            seen = tl.load(mask + first + i, mask=seen, other=0) != 0
        present = append(present, seen)
    return gaps, present


@triton.jit
def inverse_gaps(gaps, present):
    """Return 1 / gap in float32 for each pair of a block, 0 for zero gaps and absent keys."""
    found = ()
    for i in tl.static_range(BLOCK - 1, -1, -1):
        total = tl.zeros_like(gaps[0].to(tl.float32))
        found = append(found, total)
        for j in tl.static_range(i + 1, BLOCK):
            # All are positive, so their sum in float32 is as good as their float64 difference.
            total += gaps[j - 1].to(tl.float32)
            seen = (total > 0) & present[i]
            root = tl.rsqrt(tl.where(seen, total, 1.0))
            found = append(found, tl.where(seen, root * root, 0.0))
    return found


@triton.jit
def move_onto(first, second, f1, f2, m):
    """Return row factors moved back over a gap plus two numbers, by four multiply-adds."""
    return first + f1 * m[0] + f2 * m[2], second + f1 * m[1] + f2 * m[3]


@triton.jit
def move(f1, f2, m, AVERAGE: tl.constexpr):
    """Return row factors with their reference time moved back over a gap."""
    if AVERAGE:
        return move_onto(m[4], m[5], f1, f2, m)
    return f1 * m[0] + f2 * m[2], f1 * m[1] + f2 * m[3]


@triton.jit
def rest(like, AVERAGE: tl.constexpr):
    """Return a row's factors at its own time."""
    still = tl.zeros_like(like)
    first = still + 1.0
    if AVERAGE:
        first = still
    return first, still


@triton.jit
def seen_from(f1, f2, x, u, HAS_VELOCITY: tl.constexpr):
    """Return a token as a row with these factors sees it."""
    moved = f1 * x
    if HAS_VELOCITY:
        moved += f2 * u
    return moved


@triton.jit
def store_state(state, rows, size, to_end, form, x, u, HAS_U: tl.constexpr, C: tl.constexpr, c):
    """Write states of tokens that have aged by `to_end`, three planes of `size`."""
    x1, x2, xs = aged_state(to_end[0], to_end[1], to_end[2], form, x, u, HAS_U)
    store_plane(state, rows, x1, C, c)
    store_plane(state + size, rows, x2, C, c)
    store_plane(state + 2 * size, rows, xs, C, c)


@triton.jit
def store_factors(factor, rows, size, f1, f2, m, AVERAGE: tl.constexpr, C: tl.constexpr, c):
    """Write row factors, their reference time moved back by `m`, two planes of `size`."""
    f1, f2 = move(f1, f2, m, AVERAGE)
    store_plane(factor, rows, f1, C, c)
    store_plane(factor + size, rows, f2, C, c)


@triton.jit
def load_pairs(pairs, stride):
    """Return the numbers of all pairs, from planes that are `stride` apart."""
    found = ()
    for n in tl.static_range(BLOCK * (BLOCK + 1) // 2):
        found = append(found, tl.load(pairs + n * stride))
    return found


@triton.jit
def store_pairs(pairs, stride, values):
    """Write the numbers of all pairs to planes that are `stride` apart."""
    for n in tl.static_range(BLOCK * (BLOCK + 1) // 2):
        tl.store(pairs + n * stride, values[n])


@triton.jit
def locate(times_ptr, length, padded, heads, BLOCKS: tl.constexpr):
    """Return a program's head, times, first token of its series, row of planes, blocks, pairs.

    Blocks are given by their first tokens. Pairs are the places of the blocks in ``[B H, 36,
    padded / 8]``, and the distance of its planes.
    """
    series, head = tl.program_id(2), tl.program_id(1)
    first_token = series.to(tl.int64) * length
    row = (series * heads + head).to(tl.int64)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    stride = padded // BLOCK
    pairs = row * (BLOCK * (BLOCK + 1) // 2) * stride + blocks
    return head, times_ptr + first_token, first_token, row * padded, blocks * BLOCK, pairs, stride


@triton.jit
def close_keys(
    q_ptr,
    k_ptr,
    ku_ptr,
    times_ptr,
    mask_ptr,
    table,
    key_state,
    key_factor,
    pairs_ptr,
    lse_ptr,
    length,
    padded,
    heads,
    logit_scale,
    HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr,
    STRICT: tl.constexpr,
    AVERAGE: tl.constexpr,
    FORWARD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write what rows give to the earlier keys of their block, and to their own, to `pairs_ptr`.

    Keys at a row's very time are left to `tied_forward`, but for the row's own. In the forward pass
    that is the weight, divided by the gap for averaged values; the logsumexp (base 2) over these
    keys is written too, and the set-up of the middle stage: states at the end of the tile, ``[B H,
    3, padded, C]``, and row factors from its start, ``[B H, 2, padded, C]``. In the backward pass
    the logsumexp over all keys is known, and it is the weight. One program takes BLOCKS blocks of
    one head. `logit_scale` is the scale of the logits times log2(e).
    """
    head, times, first_token, plane, first, pairs, stride = locate(
        times_ptr, length, padded, heads, BLOCKS
    )
    size = padded.to(tl.int64) * C
    state = key_state + 3 * plane * C
    factor = key_factor + 2 * plane * C
    tokens = first_token + first
    gaps, present = block_times(times, first, length, mask_ptr + first_token, HAS_MASK)
    tile = first // TILE * TILE
    since_tile = time_at(times, first, length) - time_at(times, tile, length)
    until_tile = time_at(times, tile + TILE, length) - time_at(times, first + BLOCK, length)
    weights = repeated(tl.zeros([BLOCKS], tl.float32), BLOCK * (BLOCK + 1) // 2)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (BLOCKS, WIDTH))
        form, widest = load_form(table, head, C, wide, PRECISE)
        a, b = rest(tl.zeros([BLOCKS, WIDTH], tl.float32), True)
        f1 = repeated(a, BLOCK)
        f2 = repeated(b, BLOCK)
        q = ()
        for j in tl.static_range(BLOCK):
            row = load_tokens(q_ptr, tokens + j, first + j < length, head, heads, C, channels)
            q = append(q, row)
        if FORWARD:
            g11, ct, g12, i12 = gap_functions(until_tile[:, None], form, widest, PRECISE)
            to_end = (g11, g12, i12)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            x = load_tokens(k_ptr, tokens + i, present[i], head, heads, C, channels)
            u = x
            if HAS_U:
                u = load_tokens(ku_ptr, tokens + i, present[i], head, heads, C, channels)
            weights = put(weights, pair(i, i), weights[pair(i, i)] + tl.sum(q[i] * x, 1))
            if FORWARD or i < BLOCK - 1:
                g11, ct, g12, i12 = gap_functions(gaps[i][:, None], form, widest, PRECISE)
                m = step_matrix(g11, g12, i12, form)
            if FORWARD:
                to_end = compose((g11, g12, i12), to_end, form)
                store_state(state, first + i, size, to_end, form, x, u, HAS_U, C, channels)
            for j in tl.static_range(i + 1, BLOCK):
                a, b = move(f1[j], f2[j], m, True)
                f1 = put(f1, j, a)
                f2 = put(f2, j, b)
                part = tl.sum(q[j] * seen_from(a, b, x, u, HAS_U), 1)
                weights = put(weights, pair(j, i), weights[pair(j, i)] + part)
        if FORWARD:
            g11, ct, g12, i12 = gap_functions(since_tile[:, None], form, widest, PRECISE)
            m = step_matrix(g11, g12, i12, form)
            for j in tl.static_range(BLOCK):
                store_factors(factor, first + j, size, f1[j], f2[j], m, True, C, channels)

    inverse = inverse_gaps(gaps, present)
    for j in tl.static_range(BLOCK):
        own = tl.where(present[j], weights[pair(j, j)] * logit_scale, float("-inf"))
        if STRICT:
            own = tl.zeros_like(own) + float("-inf")
        top = own
        for i in tl.static_range(j):
            logit = weights[pair(j, i)] * inverse[pair(j, i)] * logit_scale
            logit = tl.where(inverse[pair(j, i)] > 0, logit, float("-inf"))
            weights = put(weights, pair(j, i), logit)
            top = tl.maximum(top, logit)
        if FORWARD:
            shift = tl.where(top == float("-inf"), 0.0, top)
        else:
            shift = row_lse(lse_ptr + plane, first + j)
        mass = tl.exp2(own - shift)
        weights = put(weights, pair(j, j), mass)
        for i in tl.static_range(j):
            weight = tl.exp2(weights[pair(j, i)] - shift)
            weights = put(weights, pair(j, i), weight)
            mass += weight
        if FORWARD:
            safe = tl.where(mass > 0, mass, 1.0)
            lse = tl.where(mass > 0, top + tl.log2(safe), float("-inf"))
            tl.store(lse_ptr + plane + first + j, lse)
            unit = 1.0 / safe
            weights = put(weights, pair(j, j), weights[pair(j, j)] * unit)
            for i in tl.static_range(j):
                weight = weights[pair(j, i)] * unit
                if AVERAGE:
                    weight *= inverse[pair(j, i)]
                weights = put(weights, pair(j, i), weight)
    store_pairs(pairs_ptr + pairs, stride, weights)


@triton.jit
def close_values(
    v_ptr,
    vu_ptr,
    times_ptr,
    mask_ptr,
    table,
    value_state,
    value_factor,
    pairs_ptr,
    out_ptr,
    length,
    padded,
    heads,
    HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the output over the keys of `close_keys`, and the set-up of values as that of keys."""
    head, times, first_token, plane, first, pairs, stride = locate(
        times_ptr, length, padded, heads, BLOCKS
    )
    size = padded.to(tl.int64) * C
    state = value_state + 3 * plane * C
    factor = value_factor + 2 * plane * C
    tokens = first_token + first
    gaps, present = block_times(times, first, length, mask_ptr + first_token, HAS_MASK)
    tile = first // TILE * TILE
    since_tile = time_at(times, first, length) - time_at(times, tile, length)
    until_tile = time_at(times, tile + TILE, length) - time_at(times, first + BLOCK, length)
    weights = load_pairs(pairs_ptr + pairs, stride)
    for start in range(0, C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (BLOCKS, WIDTH))
        form, widest = load_form(table, head, C, wide, PRECISE)
        g11, ct, g12, i12 = gap_functions(until_tile[:, None], form, widest, PRECISE)
        to_end = (g11, g12, i12)
        a, b = rest(tl.zeros([BLOCKS, WIDTH], tl.float32), AVERAGE)
        f1 = repeated(a, BLOCK)
        f2 = repeated(b, BLOCK)
        acc = repeated(b, BLOCK)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            x = load_tokens(v_ptr, tokens + i, present[i], head, heads, C, channels)
            u = x
            if HAS_U:
                u = load_tokens(vu_ptr, tokens + i, present[i], head, heads, C, channels)
            g11, ct, g12, i12 = gap_functions(gaps[i][:, None], form, widest, PRECISE)
            to_end = compose((g11, g12, i12), to_end, form)
            store_state(state, first + i, size, to_end, form, x, u, HAS_U, C, channels)
            m = step_matrix(g11, g12, i12, form)
            acc = put(acc, i, acc[i] + weights[pair(i, i)][:, None] * x)
            for j in tl.static_range(i + 1, BLOCK):
                a, b = move(f1[j], f2[j], m, AVERAGE)
                f1 = put(f1, j, a)
                f2 = put(f2, j, b)
                weight = weights[pair(j, i)][:, None]
                acc = put(acc, j, acc[j] + weight * seen_from(a, b, x, u, HAS_U))
        g11, ct, g12, i12 = gap_functions(since_tile[:, None], form, widest, PRECISE)
        m = step_matrix(g11, g12, i12, form)
        for j in tl.static_range(BLOCK):
            store_plane(out_ptr + plane * C, first + j, acc[j], C, channels)
            store_factors(factor, first + j, size, f1[j], f2[j], m, AVERAGE, C, channels)
