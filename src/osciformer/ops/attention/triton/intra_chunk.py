"""Pairs within a chunk of eight tokens: row factors move back from key to key, in registers.

Tensors are ``[chunks, channels]``, one for each of the eight tokens of a chunk, so that which row
meets which key is known when the kernel is compiled: no masks, no exchange between threads but the
sum over channels. From one key to the key before it a row's factors move by the closed form of
that gap, which all rows of the chunk and the set-up of the first sweep share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import closed_form as cf
from osciformer.ops.attention.triton import primitives as lib
from osciformer.ops.attention.triton.primitives import CHUNK, TILE

#: Pairs of a chunk, each token with itself included.
NUM_PAIRS = tl.constexpr(36)


class Chunks(NamedTuple):
    """The chunks of a program, by their first tokens, and their places in pairs."""

    first: Any
    since_tile: Any  # time from the start of the tile
    until_tile: Any  # time from the end of the chunk to that of the tile
    pairs: Any  # place in ``[B H, 36, padded / 8]``
    stride: Any  # between its planes


@triton.constexpr_function
def pair(row, key):
    """Return the place of a pair in tuples of 36: the last keys come first, rows in order."""
    return (CHUNK - 1 - key) * (CHUNK - key) // 2 + row - key


@triton.constexpr_function
def chunk_width(C):
    """Return the channels at a time."""
    return min(C, 32)


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
def find_chunks(at, sizes, CHUNKS: tl.constexpr):
    """Return the `Chunks` of a program."""
    chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    first = chunks * CHUNK
    tile = first // TILE * TILE
    since_tile = lib.time_at(at, first) - lib.time_at(at, tile)
    until_tile = lib.time_at(at, tile + TILE) - lib.time_at(at, first + CHUNK)
    stride = sizes.padded // CHUNK
    pairs = at.plane * NUM_PAIRS * stride + chunks
    return Chunks(first, since_tile, until_tile, pairs, stride)


@triton.jit
def chunk_times(at, first, mask):
    """Return eight gaps to the next token in float64, and which tokens are present."""
    gaps, present = (), ()
    t = lib.time_at(at, first)
    for i in tl.static_range(CHUNK):
        following = lib.time_at(at, first + (i + 1))
        gaps = append(gaps, following - t)
        t = following
        present = append(present, lib.present_tokens(mask, at, first + i))
    return gaps, present


@triton.jit
def inverse_gaps(gaps, present):
    """Return 1 / gap in float32 for each pair of a chunk, 0 for zero gaps and absent keys."""
    found = ()
    for i in tl.static_range(CHUNK - 1, -1, -1):
        total = tl.zeros_like(gaps[0].to(tl.float32))
        found = append(found, total)
        for j in tl.static_range(i + 1, CHUNK):
            # All are positive, so their sum in float32 is as good as their float64 difference.
            total += gaps[j - 1].to(tl.float32)
            seen = (total > 0) & present[i]
            root = tl.rsqrt(tl.where(seen, total, 1.0))
            found = append(found, tl.where(seen, root * root, 0.0))
    return found


@triton.jit
def move_onto(first, second, f1, f2, m):
    """Return row factors moved back over the `Step` m, plus two numbers."""
    return first + f1 * m.p11 + f2 * m.p21, second + f1 * m.p12 + f2 * m.p22


@triton.jit
def move(f1, f2, m, AVERAGE: tl.constexpr):
    """Return row factors with their reference time moved back over the `Step` m."""
    if AVERAGE:
        return move_onto(m.i11, m.i12, f1, f2, m)
    return f1 * m.p11 + f2 * m.p21, f1 * m.p12 + f2 * m.p22


@triton.jit
def own_factors(like, AVERAGE: tl.constexpr):
    """Return a row's factors at its own time."""
    zero = tl.zeros_like(like)
    first = zero + 1.0
    if AVERAGE:
        first = zero
    return first, zero


@triton.jit
def weighted(f1, f2, x, u, HAS_U: tl.constexpr):
    """Return a token as a row with these factors sees it."""
    moved = f1 * x
    if HAS_U:
        moved += f2 * u
    return moved


@triton.jit
def load_pairs(pairs, stride):
    """Return the numbers of all pairs, from planes that are `stride` apart."""
    found = ()
    for n in tl.static_range(NUM_PAIRS):
        found = append(found, tl.load(pairs + n * stride))
    return found


@triton.jit
def store_pairs(pairs, stride, values):
    """Write the numbers of all pairs to planes that are `stride` apart."""
    for n in tl.static_range(NUM_PAIRS):
        tl.store(pairs + n * stride, values[n])


@triton.jit
def load_rows(row_ptr, at, first, channels, K: tl.constexpr):
    """Return a tuple of the eight rows of the chunks."""
    rows = ()
    for j in tl.static_range(CHUNK):
        inside = first + j < at.length
        rows = append(rows, lib.load_tokens(row_ptr, at, first + j, inside, channels, K))
    return rows


@triton.jit
def load_form(side, at, channels, CHUNKS: tl.constexpr, K: tl.constexpr):
    """Return the `Spectrum` of channels in the layout of chunks."""
    wide = tl.broadcast_to(channels[None, :], (CHUNKS, channels.shape[0]))
    return cf.load_spectrum(side.spectrum, at.head, wide, K)


@triton.jit
def chunk_keys(
    t, spans, pairs_ptr, lse_ptr, sizes, STRICT: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr
):
    """Write the weights of the pairs within chunks to `pairs_ptr` ``[B H, 36, padded / 8]``.

    In the forward pass also the logsumexp (base 2) over these keys, and the set-up of the first
    sweep: states at the end of each key's tile, and row factors from the start of each row's tile.
    The weights then carry the inverse gaps of average values. In the backward pass, where `spans`
    are None, `lse_ptr` is read, and weights are plain.
    """
    FORWARD: tl.constexpr = spans.key_state is not None
    WIDTH: tl.constexpr = chunk_width(K.C)
    side = t.k
    at = lib.locate(t.times, sizes, K)
    chunks = find_chunks(at, sizes, CHUNKS)
    first = chunks.first
    if FORWARD:
        state = spans.key_state + 3 * at.row * K.C
        factor = spans.key_factor + 2 * at.row * K.C
    HAS_U: tl.constexpr = side.velocity is not None
    gaps, present = chunk_times(at, first, t.mask)
    weights = repeated(tl.zeros([CHUNKS], tl.float32), NUM_PAIRS)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        form = load_form(side, at, channels, CHUNKS, K)
        a, b = own_factors(tl.zeros([CHUNKS, WIDTH], tl.float32), True)
        f1, f2 = repeated(a, CHUNK), repeated(b, CHUNK)
        q = load_rows(t.q, at, first, channels, K)
        if FORWARD:
            until_end = cf.gap_functions(chunks.until_tile[:, None], form, K)
        for i in tl.static_range(CHUNK - 1, -1, -1):
            x, u = lib.load_side(side, at, first + i, present[i], channels, K)
            weights = put(weights, pair(i, i), weights[pair(i, i)] + tl.sum(q[i] * x, 1))
            if FORWARD or i < CHUNK - 1:
                gap = cf.gap_functions(gaps[i][:, None], form, K)
                m = cf.step_matrix(gap, form)
            if FORWARD:
                until_end = cf.compose(gap, until_end, form)
                aged = cf.aged_state(until_end, form, x, u, HAS_U)
                lib.store_planes(state, first + i, at.size, aged, channels, K)
            for j in tl.static_range(i + 1, CHUNK):
                a, b = move(f1[j], f2[j], m, True)
                f1, f2 = put(f1, j, a), put(f2, j, b)
                part = tl.sum(q[j] * weighted(a, b, x, u, HAS_U), 1)
                weights = put(weights, pair(j, i), weights[pair(j, i)] + part)
        if FORWARD:
            m = cf.step_matrix(cf.gap_functions(chunks.since_tile[:, None], form, K), form)
            for j in tl.static_range(CHUNK):
                moved = move(f1[j], f2[j], m, True)
                lib.store_planes(factor, first + j, at.size, moved, channels, K)

    inverse = inverse_gaps(gaps, present)
    for j in tl.static_range(CHUNK):
        own = tl.where(present[j], weights[pair(j, j)] * sizes.logit_scale, float("-inf"))
        if STRICT:
            own = tl.zeros_like(own) + float("-inf")
        top = own
        for i in tl.static_range(j):
            logit = weights[pair(j, i)] * inverse[pair(j, i)] * sizes.logit_scale
            logit = tl.where(inverse[pair(j, i)] > 0, logit, float("-inf"))
            weights = put(weights, pair(j, i), logit)
            top = tl.maximum(top, logit)
        if FORWARD:
            shift = tl.where(top == float("-inf"), 0.0, top)
        else:
            shift = lib.load_lse(lse_ptr + at.row, first + j)
        mass = tl.exp2(own - shift)
        weights = put(weights, pair(j, j), mass)
        for i in tl.static_range(j):
            weight = tl.exp2(weights[pair(j, i)] - shift)
            weights = put(weights, pair(j, i), weight)
            mass += weight
        if FORWARD:
            safe = tl.where(mass > 0, mass, 1.0)
            lse = tl.where(mass > 0, top + tl.log2(safe), float("-inf"))
            tl.store(lse_ptr + at.row + first + j, lse)
            unit = 1.0 / safe
            weights = put(weights, pair(j, j), weights[pair(j, j)] * unit)
            for i in tl.static_range(j):
                weight = weights[pair(j, i)] * unit
                if K.AVERAGE:
                    weight *= inverse[pair(j, i)]
                weights = put(weights, pair(j, i), weight)
    store_pairs(pairs_ptr + chunks.pairs, chunks.stride, weights)


@triton.jit
def chunk_values(t, spans, pairs_ptr, out_ptr, sizes, CHUNKS: tl.constexpr, K: tl.constexpr):
    """Write the output over the keys of `chunk_keys`, and the set-up of values as that of keys."""
    WIDTH: tl.constexpr = chunk_width(K.C)
    side = t.v
    at = lib.locate(t.times, sizes, K)
    chunks = find_chunks(at, sizes, CHUNKS)
    first = chunks.first
    state = spans.value_state + 3 * at.row * K.C
    factor = spans.value_factor + 2 * at.row * K.C
    HAS_U: tl.constexpr = side.velocity is not None
    gaps, present = chunk_times(at, first, t.mask)
    weights = load_pairs(pairs_ptr + chunks.pairs, chunks.stride)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        form = load_form(side, at, channels, CHUNKS, K)
        until_end = cf.gap_functions(chunks.until_tile[:, None], form, K)
        a, b = own_factors(tl.zeros([CHUNKS, WIDTH], tl.float32), K.AVERAGE)
        f1, f2, acc = repeated(a, CHUNK), repeated(b, CHUNK), repeated(b, CHUNK)
        for i in tl.static_range(CHUNK - 1, -1, -1):
            x, u = lib.load_side(side, at, first + i, present[i], channels, K)
            gap = cf.gap_functions(gaps[i][:, None], form, K)
            until_end = cf.compose(gap, until_end, form)
            aged = cf.aged_state(until_end, form, x, u, HAS_U)
            lib.store_planes(state, first + i, at.size, aged, channels, K)
            m = cf.step_matrix(gap, form)
            acc = put(acc, i, acc[i] + weights[pair(i, i)][:, None] * x)
            for j in tl.static_range(i + 1, CHUNK):
                a, b = move(f1[j], f2[j], m, K.AVERAGE)
                f1, f2 = put(f1, j, a), put(f2, j, b)
                weight = weights[pair(j, i)][:, None]
                acc = put(acc, j, acc[j] + weight * weighted(a, b, x, u, HAS_U))
        m = cf.step_matrix(cf.gap_functions(chunks.since_tile[:, None], form, K), form)
        for j in tl.static_range(CHUNK):
            lib.store_plane(out_ptr + at.row * K.C, first + j, acc[j], channels, K)
            moved = move(f1[j], f2[j], m, K.AVERAGE)
            lib.store_planes(factor, first + j, at.size, moved, channels, K)


# --- Gradients. -----------------------------------------------------------------------------------


@triton.jit
def spectral_sums(d1, d2, late, form, x, u, HAS_U: tl.constexpr, AVERAGE: tl.constexpr):
    """Return what a key adds to the gradients of gamma and omega^2.

    `d1` and `d2` are sums over rows of gradient times derivative by omega^2 of the row factors;
    `late`, for point values, of gradient times duration times second row factor.
    """
    gamma, omega2 = form.gamma.to(tl.float32), form.omega2.to(tl.float32)
    d_omega2 = d1 * x
    if AVERAGE:
        # The integral of g11 changes by -2 omega^2 J with gamma, that of g12 by 2 F.
        d_gamma = -2.0 * omega2 * d2 * x
        if HAS_U:
            d_gamma += 2.0 * (d1 - 2.0 * gamma * d2) * u
    else:
        d_gamma = -2.0 * omega2 * d2 * x
        if HAS_U:
            d_gamma -= (late + 2.0 * gamma * d2) * u
    if HAS_U:
        d_omega2 += d2 * u
    return d_gamma, d_omega2


@triton.jit
def chunk_backward(
    t,
    up,
    grads,
    weights_ptr,
    d_weights_ptr,
    sizes,
    OF_KEYS: tl.constexpr,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
):
    """Write the gradients of one side's tokens, ``[B H, padded, C]``, and of its spectrum.

    First for values: rows are gradients of the output, and those of the weights are written for
    the keys. Then for keys: rows are queries, and their gradients are written. Those of gamma and
    omega^2 are ``[B H, programs, 2, C]``.
    """
    WIDTH: tl.constexpr = chunk_width(K.C)
    AVERAGE: tl.constexpr = OF_KEYS or K.AVERAGE
    SPECTRAL: tl.constexpr = grads.k.spectrum is not None
    side = t.k if OF_KEYS else t.v
    d_side = grads.k if OF_KEYS else grads.v
    row_ptr = t.q if OF_KEYS else up.d_out
    at = lib.locate(t.times, sizes, K)
    chunks = find_chunks(at, sizes, CHUNKS)
    first = chunks.first
    program = at.plane * tl.num_programs(0) + tl.program_id(0)
    HAS_U: tl.constexpr = side.velocity is not None
    gaps, present = chunk_times(at, first, t.mask)
    inverse = inverse_gaps(gaps, present)
    shares = load_pairs(weights_ptr + chunks.pairs, chunks.stride)
    if OF_KEYS:
        d_weights = load_pairs(d_weights_ptr + chunks.pairs, chunks.stride)
        for j in tl.static_range(CHUNK):
            delta = tl.load(up.delta + at.row + first + j)
            for i in tl.static_range(j + 1):
                d_raw = shares[pair(j, i)] * (d_weights[pair(j, i)] - delta) * sizes.scale
                if i < j:
                    d_raw *= inverse[pair(j, i)]
                shares = put(shares, pair(j, i), d_raw)
    elif AVERAGE:
        for j in tl.static_range(CHUNK):
            for i in tl.static_range(j):
                shares = put(shares, pair(j, i), shares[pair(j, i)] * inverse[pair(j, i)])
    found = repeated(tl.zeros([CHUNKS], tl.float32), NUM_PAIRS)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        form, slopes = (
            load_form(side, at, channels, CHUNKS, K),
            load_form(side, at, channels, CHUNKS, K),
        )
        a, zero = own_factors(tl.zeros([CHUNKS, WIDTH], tl.float32), AVERAGE)
        f1, f2 = repeated(a, CHUNK), repeated(zero, CHUNK)
        d1, d2, d_rows = f2, f2, f2
        d_gamma, d_omega2 = zero, zero
        rows = load_rows(row_ptr, at, first, channels, K)
        for i in tl.static_range(CHUNK - 1, -1, -1):
            x, u = lib.load_side(side, at, first + i, present[i], channels, K)
            share = shares[pair(i, i)][:, None]
            sum1, sum2 = share * rows[i], zero
            slope1, slope2, late = zero, zero, zero
            if OF_KEYS:
                d_rows = put(d_rows, i, d_rows[i] + share * x)
            else:
                found = put(found, pair(i, i), found[pair(i, i)] + tl.sum(rows[i] * x, 1))
            if i < CHUNK - 1:
                s = gaps[i][:, None]
                gap = cf.gap_functions(s, form, K)
                m = cf.step_matrix(gap, form)
                if SPECTRAL:
                    f, g = cf.gap_slopes(s, form, slopes, gap, K)
                    n = cf.slope_matrix(s, gap, f, g, form, K)
            for j in tl.static_range(i + 1, CHUNK):
                if SPECTRAL:
                    a, b = move(f1[j], f2[j], n, AVERAGE)
                    a, b = move_onto(a, b, d1[j], d2[j], m)
                    d1, d2 = put(d1, j, a), put(d2, j, b)
                a, b = move(f1[j], f2[j], m, AVERAGE)
                f1, f2 = put(f1, j, a), put(f2, j, b)
                share = shares[pair(j, i)][:, None]
                d_factor = share * rows[j]
                sum1 += d_factor * a
                if HAS_U:
                    sum2 += d_factor * b
                if SPECTRAL:
                    slope1 += d_factor * d1[j]
                    slope2 += d_factor * d2[j]
                    if not AVERAGE and HAS_U:
                        inv = inverse[pair(j, i)]
                        duration = 1.0 / tl.where(inv > 0, inv, 1.0)
                        late += d_factor * duration[:, None] * b
                moved = weighted(a, b, x, u, HAS_U)
                if OF_KEYS:
                    d_rows = put(d_rows, j, d_rows[j] + share * moved)
                else:
                    part = tl.sum(rows[j] * moved, 1)
                    found = put(found, pair(j, i), found[pair(j, i)] + part)
            lib.store_plane(d_side.x + at.row * K.C, first + i, sum1, channels, K)
            if HAS_U:
                lib.store_plane(d_side.velocity + at.row * K.C, first + i, sum2, channels, K)
            if SPECTRAL:
                more_gamma, more_omega2 = spectral_sums(
                    slope1, slope2, late, form, x, u, HAS_U, AVERAGE
                )
                d_gamma += more_gamma
                d_omega2 += more_omega2
        if OF_KEYS:
            for j in tl.static_range(CHUNK):
                lib.store_plane(grads.q + at.row * K.C, first + j, d_rows[j], channels, K)
        if SPECTRAL:
            lib.store_spectral(d_side.spectrum, program, d_gamma, d_omega2, channels, K)
    if not OF_KEYS:
        if AVERAGE:
            for j in tl.static_range(CHUNK):
                for i in tl.static_range(j):
                    found = put(found, pair(j, i), found[pair(j, i)] * inverse[pair(j, i)])
        store_pairs(d_weights_ptr + chunks.pairs, chunks.stride, found)
