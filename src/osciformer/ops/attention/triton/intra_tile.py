"""Pairs within one tile of tokens, outside chunks, and ties.

A tile is halved and halved again, so that r lies between key and row. At each level half of its
tokens are rows and half are keys, and each has one time, to the middle of its block, to evaluate a
closed form at.

Ties, keys at a row's time other than its own, may reach over several tiles. Mostly there are
none: a program that finds all times of its tile different is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import closed_form as cf
from osciformer.ops.attention.triton import primitives as lib
from osciformer.ops.attention.triton.primitives import TILE, WIDTH, product

#: Levels of halving: from blocks of two chunks to the tile.
FIRST_LEVEL = tl.constexpr(3)
NUM_LEVELS = tl.constexpr(6)
HALF = tl.constexpr(32)


class Halves(NamedTuple):
    """Tokens of the earlier (keys) and later (rows) halves of all blocks of 2^(level + 1)."""

    keys: Any
    rows: Any
    until: Any  # keys' times until their block's middle
    since: Any  # rows' times since
    present: Any  # which keys are present


@triton.jit
def find_halves(level, tile, at, mask):
    """Return the `Halves` of a tile."""
    place = tl.arange(0, HALF)
    n = 1 << level
    within = place & (n - 1)
    keys = tile * TILE + 2 * (place - within) + within
    r = lib.time_at(at, keys - within + n)
    until = r - lib.time_at(at, keys)
    since = lib.time_at(at, keys + n) - r
    return Halves(keys, keys + n, until, since, lib.present_tokens(mask, at, keys))


@triton.jit
def meeting_gaps(level, halves):
    """Return 1 / gap of the pairs that meet, later half and earlier half of one block, else 0."""
    block = tl.arange(0, HALF) >> level
    gap = halves.since.to(tl.float32)[:, None] + halves.until.to(tl.float32)[None, :]
    seen = (block[:, None] == block[None, :]) & (gap > 0) & halves.present[None, :]
    root = tl.rsqrt(tl.where(seen, gap, 1.0))
    return tl.where(seen, root * root, 0.0)


@triton.jit
def level_logits(q_ptr, side, halves, at, K: tl.constexpr):
    """Return the integrals of query times key for the rows and keys of `halves`."""
    raw = tl.zeros([HALF, HALF], tl.float32)
    HAS_U: tl.constexpr = side.velocity is not None
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
        form = cf.load_spectrum(side.spectrum, at.head, wide, K)
        q = lib.load_tokens(q_ptr, at, halves.rows, halves.rows < at.length, channels, K)
        x, u = lib.load_side(side, at, halves.keys, halves.present, channels, K)
        gap = cf.gap_functions(halves.until[:, None], form, K)
        x1, x2, xs = cf.state_of(cf.step_matrix(gap, form), x, u, HAS_U)
        m = cf.step_matrix(cf.gap_functions(halves.since[:, None], form, K), form)
        raw += product(q.to(K.OPERAND), tl.trans(xs.to(K.OPERAND)), K)
        raw += product((q * m.i11).to(K.OPERAND), tl.trans(x1.to(K.OPERAND)), K)
        raw += product((q * m.i12).to(K.OPERAND), tl.trans(x2.to(K.OPERAND)), K)
    return raw


@triton.jit
def tile_forward(t, out_ptr, lse_ptr, sizes, K: tl.constexpr):
    """Add to each row the keys of its tile that are not of its chunk.

    `out_ptr` ``[B H, padded, C]`` and `lse_ptr` ``[B H, padded]`` hold output and logsumexp (base
    2) over nearer keys and are updated.
    """
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    HAS_U: tl.constexpr = t.v.velocity is not None
    for level in range(FIRST_LEVEL, NUM_LEVELS):
        halves = find_halves(level, tile, at, t.mask)
        inverse = meeting_gaps(level, halves)
        raw = level_logits(t.q, t.k, halves, at, K)
        logits = tl.where(inverse > 0, raw * inverse * sizes.logit_scale, float("-inf"))
        nearer = tl.load(lse_ptr + at.row + halves.rows)
        mass = tl.where(nearer == float("-inf"), 0.0, 1.0)
        top, mass, weights, keep = lib.softmax_step(nearer, mass, logits)
        lse, safe = lib.logsumexp(top, mass)
        tl.store(lse_ptr + at.row + halves.rows, lse)
        unit = 1.0 / safe
        if K.AVERAGE:
            weights *= inverse
        weights = (weights * unit[:, None]).to(K.OPERAND)
        for start in range(0, K.C, WIDTH):
            channels = start + tl.arange(0, WIDTH)
            wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
            form = cf.load_spectrum(t.v.spectrum, at.head, wide, K)
            x, u = lib.load_side(t.v, at, halves.keys, halves.present, channels, K)
            gap = cf.gap_functions(halves.until[:, None], form, K)
            x1, x2, xs = cf.state_of(cf.step_matrix(gap, form), x, u, HAS_U)
            m = cf.step_matrix(cf.gap_functions(halves.since[:, None], form, K), form)
            f1, f2 = cf.factors_of(m, K.AVERAGE)
            more = f1 * product(weights, x1.to(K.OPERAND), K)
            more += f2 * product(weights, x2.to(K.OPERAND), K)
            if K.AVERAGE:
                more += product(weights, xs.to(K.OPERAND), K)
            to = out_ptr + at.row * K.C + halves.rows.to(tl.int64)[:, None] * K.C + wide
            tl.store(to, tl.load(to) * (keep * unit)[:, None] + more)
        # What one level wrote the next one reads, by other threads.
        tl.debug_barrier()


# --- Gradients; what the forward pass did is done again on the way. -------------------------------


@triton.jit
def row_sums(times_ptr, out_ptr, d_out_ptr, d_lse_ptr, delta_ptr, sizes, K: tl.constexpr):
    """Write delta, the inner product of output and its gradient less the logsumexp's gradient."""
    at = lib.locate(times_ptr, sizes, K)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = rows < at.length
    channels = tl.arange(0, K.C)
    out = lib.load_tokens(out_ptr, at, rows, inside, channels, K)
    d_out = lib.load_tokens(d_out_ptr, at, rows, inside, channels, K)
    # The logsumexp is to base 2; its gradient is wanted for base e.
    d_lse = tl.load(d_lse_ptr + at.row + rows) * 1.4426950408889634
    tl.store(delta_ptr + at.row + rows, tl.sum(out * d_out, 1) - d_lse)


@triton.jit
def level_backward(
    t, up, grads, shares, program, halves, at, OF_KEYS: tl.constexpr, K: tl.constexpr
):
    """Add to the gradients of one side at one level; return those of weights, unless OF_KEYS."""
    AVERAGE: tl.constexpr = OF_KEYS or K.AVERAGE
    SPECTRAL: tl.constexpr = grads.k.spectrum is not None
    side = t.k if OF_KEYS else t.v
    d_side = grads.k if OF_KEYS else grads.v
    row_ptr = t.q if OF_KEYS else up.d_out
    found = tl.zeros([HALF, HALF], tl.float32)
    part = shares.to(K.OPERAND)
    plane = at.row * K.C
    keys, rows = halves.keys, halves.rows
    HAS_U: tl.constexpr = side.velocity is not None
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        wide = tl.broadcast_to(channels[None, :], (HALF, WIDTH))
        form = cf.load_spectrum(side.spectrum, at.head, wide, K)
        x, u = lib.load_side(side, at, keys, halves.present, channels, K)
        row = lib.load_tokens(row_ptr, at, rows, rows < at.length, channels, K)
        s = halves.until[:, None]
        gap = cf.gap_functions(s, form, K)
        m = cf.step_matrix(gap, form)
        if SPECTRAL:
            slopes = cf.load_spectrum(side.spectrum, at.head, wide, K)
            f, j = cf.gap_slopes(s, form, slopes, gap, K)
            by_omega2 = cf.state_of(cf.slope_matrix(s, gap, f, j, form, K), x, u, HAS_U)
            by_gamma = cf.state_of(cf.damping_matrix(s, gap, f, j, form, True, K), x, u, HAS_U)
        x1, x2, xs = cf.state_of(m, x, u, HAS_U)
        s = halves.since[:, None]
        gap = cf.gap_functions(s, form, K)
        f1, f2 = cf.factors_of(cf.step_matrix(gap, form), AVERAGE)
        first, second = (row * f1).to(K.OPERAND), (row * f2).to(K.OPERAND)
        d_x1, d_x2 = product(tl.trans(part), first, K), product(tl.trans(part), second, K)
        d_xs = tl.zeros([HALF, WIDTH], tl.float32)
        if AVERAGE:
            d_xs = product(tl.trans(part), row.to(K.OPERAND), K)
        d_x, d_u = cf.state_adjoint(m, d_x1, d_x2, d_xs)
        lib.add_plane(d_side.x + plane, keys, d_x, channels, K)
        if HAS_U:
            lib.add_plane(d_side.velocity + plane, keys, d_u, channels, K)
        if not OF_KEYS:
            found += product(first, tl.trans(x1.to(K.OPERAND)), K)
            found += product(second, tl.trans(x2.to(K.OPERAND)), K)
            if AVERAGE:
                found += product(row.to(K.OPERAND), tl.trans(xs.to(K.OPERAND)), K)
        if OF_KEYS or SPECTRAL:
            y1, y2 = product(part, x1.to(K.OPERAND), K), product(part, x2.to(K.OPERAND), K)
        if OF_KEYS:
            more = f1 * y1 + f2 * y2 + product(part, xs.to(K.OPERAND), K)
            lib.add_plane(grads.q + plane, rows, more, channels, K)
        if SPECTRAL:
            d_gamma = d_x1 * by_gamma[0] + d_x2 * by_gamma[1] + d_xs * by_gamma[2]
            d_omega2 = d_x1 * by_omega2[0] + d_x2 * by_omega2[1] + d_xs * by_omega2[2]
            f, j = cf.gap_slopes(s, form, slopes, gap, K)
            omega2_step = cf.slope_matrix(s, gap, f, j, form, K)
            gamma_step = cf.damping_matrix(s, gap, f, j, form, True, K)
            f1, f2 = cf.factors_of(gamma_step, AVERAGE)
            d_gamma += y1 * (row * f1) + y2 * (row * f2)
            f1, f2 = cf.factors_of(omega2_step, AVERAGE)
            d_omega2 += y1 * (row * f1) + y2 * (row * f2)
            lib.store_spectral(d_side.spectrum, program, d_gamma, d_omega2, channels, K)
    return found


@triton.jit
def tile_backward(t, up, grads, sizes, K: tl.constexpr):
    """Add to the gradients of tokens ``[B H, padded, C]`` the pairs of `tile_forward`.

    Those of gamma and omega^2 are written per program and level, ``[B H, tiles, levels, 2, C]``.
    """
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    program = at.plane * tl.num_programs(0) + tile
    for level in range(FIRST_LEVEL, NUM_LEVELS):
        part = program * (NUM_LEVELS - FIRST_LEVEL) + level - FIRST_LEVEL
        halves = find_halves(level, tile, at, t.mask)
        inverse = meeting_gaps(level, halves)
        raw = level_logits(t.q, t.k, halves, at, K)
        lse = lib.load_lse(up.lse + at.row, halves.rows)
        weights = tl.exp2(raw * inverse * sizes.logit_scale - lse[:, None])
        weights = tl.where(inverse > 0, weights, 0.0)
        shares = weights
        if K.AVERAGE:
            shares = weights * inverse
        d_weights = level_backward(t, up, grads, shares, part, halves, at, False, K)
        if K.AVERAGE:
            d_weights *= inverse
        delta = tl.load(up.delta + at.row + halves.rows)
        d_raw = weights * (d_weights - delta[:, None]) * inverse * sizes.scale
        level_backward(t, up, grads, d_raw, part, halves, at, True, K)
        # What one level wrote the next one reads, by other threads.
        tl.debug_barrier()


# --- Ties: other keys at a row's time, by plain attention over any number of tiles. ---------------


@triton.jit
def has_ties(at, tile):
    """Return whether a token of the tile shares its time with another token, of any tile."""
    tokens = tile * TILE + tl.arange(0, TILE)
    t = lib.time_at(at, tokens)
    after = (lib.time_at(at, tokens + 1) == t) & (tokens + 1 < at.length)
    before = (lib.time_at(at, tl.maximum(tokens - 1, 0)) == t) & (tokens > 0)
    return tl.max(((after | before) & (tokens < at.length)).to(tl.int32), 0) > 0


@triton.jit
def tie_range(at, tile):
    """Return the first and the last tile that hold a token at a time of this tile."""
    low, high = tile, tile
    first = lib.time_at(at, tile * TILE)
    last = lib.time_at(at, tile * TILE + TILE - 1)
    while lib.time_at(at, tl.maximum(low * TILE - 1, 0)) == first and low > 0:
        low -= 1
    while lib.time_at(at, (high + 1) * TILE) == last and (high + 1) * TILE < at.length:
        high += 1
    return low, high


@triton.jit
def are_different(tile, other):
    """Return ``[rows, keys]``: whether row and key are different tokens."""
    place = tl.arange(0, TILE)
    return (tile != other) | (place[:, None] != place[None, :])


@triton.jit
def tied_logits(t, at, tile, other, sizes, K: tl.constexpr):
    """Return the logits of the rows of `tile` for the keys of `other` at the same times."""
    rows = tile * TILE + tl.arange(0, TILE)
    keys = other * TILE + tl.arange(0, TILE)
    present = lib.present_tokens(t.mask, at, keys)
    same = lib.time_at(at, rows)[:, None] == lib.time_at(at, keys)[None, :]
    raw = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        q = lib.load_tokens(t.q, at, rows, rows < at.length, channels, K)
        k = lib.load_tokens(t.k.x, at, keys, present, channels, K)
        raw += product(q.to(K.OPERAND), tl.trans(k.to(K.OPERAND)), K)
    return tl.where(same & present[None, :], raw * sizes.logit_scale, float("-inf"))


@triton.jit
def tied_sums(weights, x, at, other, channels, K: tl.constexpr):
    """Return `weights` times the tokens of tile `other`."""
    others = other * TILE + tl.arange(0, TILE)
    theirs = lib.load_tokens(x, at, others, others < at.length, channels, K)
    return product(weights, theirs.to(K.OPERAND), K)


@triton.jit
def tied_output(logits, shift, t, at, other, channels, K: tl.constexpr):
    """Return what the keys of tile `other` add to the output, given logsumexps `shift`."""
    part = tl.exp2(logits - shift[:, None]).to(K.OPERAND)
    return tied_sums(part, t.v.x, at, other, channels, K)


@triton.jit
def ties_forward(t, out_ptr, lse_ptr, sizes, K: tl.constexpr):
    """Add to each row the other keys at its time; shapes are those of `tile_forward`."""
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    tokens = tile * TILE + tl.arange(0, TILE)
    if has_ties(at, tile):
        low, high = tie_range(at, tile)
        before = tl.load(lse_ptr + at.row + tokens)
        top = before
        mass = tl.where(before == float("-inf"), 0.0, 1.0)
        for other in range(low, high + 1):
            logits = tied_logits(t, at, tile, other, sizes, K)
            logits = tl.where(are_different(tile, other), logits, float("-inf"))
            top, mass, _, keep = lib.softmax_step(top, mass, logits)
        lse, _ = lib.logsumexp(top, mass)
        tl.store(lse_ptr + at.row + tokens, lse)
        shift = tl.where(mass > 0, lse, 0.0)
        keep = tl.exp2(before - shift)
        for start in range(0, K.C, WIDTH):
            channels = start + tl.arange(0, WIDTH)
            to = out_ptr + at.row * K.C + tokens.to(tl.int64)[:, None] * K.C + channels[None, :]
            acc = tl.load(to) * keep[:, None]
            for other in range(low, high + 1):
                logits = tied_logits(t, at, tile, other, sizes, K)
                logits = tl.where(are_different(tile, other), logits, float("-inf"))
                acc += tied_output(logits, shift, t, at, other, channels, K)
            tl.store(to, acc)


@triton.jit
def tied_pairs(t, up, at, tile, other, sizes, K: tl.constexpr):
    """Return weights, and gradients of inner products, of rows of `tile` tied with `other`."""
    logits = tied_logits(t, at, tile, other, sizes, K)
    rows = tile * TILE + tl.arange(0, TILE)
    keys = other * TILE + tl.arange(0, TILE)
    weights = tl.exp2(logits - lib.load_lse(up.lse + at.row, rows)[:, None])
    d_weights = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        o = lib.load_tokens(up.d_out, at, rows, rows < at.length, channels, K)
        v = lib.load_tokens(t.v.x, at, keys, keys < at.length, channels, K)
        d_weights += product(o.to(K.OPERAND), tl.trans(v.to(K.OPERAND)), K)
    delta = tl.load(up.delta + at.row + rows)
    d_raw = weights * (d_weights - delta[:, None]) * sizes.scale
    return weights.to(K.OPERAND), tl.where(weights > 0, d_raw, 0.0).to(K.OPERAND)


@triton.jit
def ties_backward(t, up, grads, sizes, K: tl.constexpr):
    """Add to the gradients ``[B H, padded, C]`` of queries, keys and values those of ties."""
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    tokens = tile * TILE + tl.arange(0, TILE)
    plane = at.row * K.C
    if has_ties(at, tile):
        low, high = tie_range(at, tile)
        for other in range(low, high + 1):
            different = are_different(tile, other)
            _, d_raw = tied_pairs(t, up, at, tile, other, sizes, K)
            weights, d_raw_back = tied_pairs(t, up, at, other, tile, sizes, K)
            d_raw = tl.where(different, d_raw, 0.0).to(K.OPERAND)
            weights = tl.trans(tl.where(different, weights, 0.0).to(K.OPERAND))
            d_raw_back = tl.trans(tl.where(different, d_raw_back, 0.0).to(K.OPERAND))
            for start in range(0, K.C, WIDTH):
                channels = start + tl.arange(0, WIDTH)
                more = tied_sums(d_raw, t.k.x, at, other, channels, K)
                lib.add_plane(grads.q + plane, tokens, more, channels, K)
                more = tied_sums(d_raw_back, t.q, at, other, channels, K)
                lib.add_plane(grads.k.x + plane, tokens, more, channels, K)
                more = tied_sums(weights, up.d_out, at, other, channels, K)
                lib.add_plane(grads.v.x + plane, tokens, more, channels, K)
