"""Pairs within tiles, and spans of tokens, under a query path that all rows share.

The integral of the path over the gap after token g, against the first row of the propagator from
the gap's start, is a pair m of numbers a channel, the gap's *path integral* (`path_integrals`).
Key i *contributes* m . x_i(t_g) over that gap, so a logit is the sum of the contributions of its
key over the gaps from key to row. Over spans of tokens everything is a sum of path integrals moved
back to one reference time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import closed_form as cf
from osciformer.ops.attention.triton import intra_tile
from osciformer.ops.attention.triton import primitives as lib
from osciformer.ops.attention.triton.intra_tile import NUM_LEVELS
from osciformer.ops.attention.triton.primitives import TILE, WIDTH, product

#: Key spans a program of the kernels between spans.
COLUMNS = tl.constexpr(8)


class TilePath(NamedTuple):
    """Pointers to integrals of the path, or to their gradients, float32."""

    gaps: Any  # over the gaps after the tokens ``[B H, 2, padded, C]``
    remainder: Any  # from ends of tiles to those of far spans, if any, ``[B H, tiles, 2, C]``


class SpanPath(NamedTuple):
    """Pointers to integrals of the path, or to their gradients, float32 ``[B H, spans, 2, C]``."""

    total: Any  # over each span
    remainder: Any  # from the end of each span to that of its group


class Reach(NamedTuple):
    """The closed form over a block of tokens, or a part of it, and its derivatives F and J."""

    g11: Any
    g12: Any
    i12: Any
    f: Any
    j: Any


# --- Propagators of blocks. -----------------------------------------------------------------------


@triton.jit
def moved_back(m1, m2, g11, g12, spectrum):
    """Return the row (m1, m2) times the propagator: an integral as seen from the span's start."""
    gamma, omega2 = spectrum.gamma, spectrum.omega2
    first = m1 * g11 - omega2 * (m2 * g12)
    second = m1 * g12 + m2 * (g11 - 2.0 * gamma * g12)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def moved_on(x, u, g11, g12, spectrum):
    """Return the propagator times the column (x, u): position and velocity at the span's end."""
    gamma, omega2 = spectrum.gamma, spectrum.omega2
    position = g11 * x + g12 * u
    velocity = (g11 - 2.0 * gamma * g12) * u - omega2 * (g12 * x)
    return position.to(tl.float32), velocity.to(tl.float32)


@triton.jit
def spectral_adjoint(s, g12, f, spectrum, l1, l2, r1, r2):
    """Return gradients of gamma and omega^2 of (l1, l2) P (r1, r2), P the propagator after s."""
    gamma, omega2 = spectrum.gamma, spectrum.omega2
    d_g11 = l1 * r1 + l2 * r2
    d_g12 = l1 * r2 - omega2 * (l2 * r1) - 2.0 * gamma * (l2 * r2)
    d_gamma = -2.0 * omega2 * f * d_g11 - (s * g12 + 2.0 * gamma * f) * d_g12
    d_omega2 = (gamma * f - 0.5 * s * g12) * d_g11 + f * d_g12
    return d_gamma - 2.0 * g12 * (l2 * r2), d_omega2 - g12 * (l2 * r1)


@triton.jit
def single_tokens(gap, spectrum, SLOPES: tl.constexpr, K: tl.constexpr):
    """Return prefixes and suffixes of blocks of one token, from the gaps to the next tokens."""
    found = cf.oscillate(gap, spectrum, K)
    zero = tl.zeros_like(found.g11)
    f, j = zero, zero
    if SLOPES:
        f, j = cf.spectral_derivatives(gap, spectrum, found, K)
    return Reach(zero + 1.0, zero, zero, zero, zero), Reach(found.g11, found.g12, found.i12, f, j)


@triton.jit
def pick(x, index):
    """Return ``x[index[i, c], c]``; float64 goes in two halves of float32."""
    if x.dtype == tl.float64:
        high = x.to(tl.float32)
        low = (x - high.to(tl.float64)).to(tl.float32)
        return tl.gather(high, index, 0).to(tl.float64) + tl.gather(low, index, 0).to(tl.float64)
    return tl.gather(x, index, 0)


@triton.jit
def climb(
    prefix, suffix, s_own, s_other, spectrum, n, INTEGRAL: tl.constexpr, SLOPES: tl.constexpr
):
    """Return prefixes and suffixes of blocks of 2 n tokens from those of n, by the product rule.

    A prefix runs from the first token of a token's block to the token, a suffix from the token to
    the first token of the next block. The suffix of a block's first token is the whole block.
    `s_own` is the duration of what grows, prefixes in the later block of two, else suffixes;
    `s_other` that of the other block. i12 and J need INTEGRAL, F and J need SLOPES.
    """
    gamma = spectrum.gamma
    place = tl.arange(0, TILE)
    late = ((place & n) != 0)[:, None]
    sibling = tl.broadcast_to(((place ^ n) & (TILE - n))[:, None], (TILE, WIDTH))
    a11, a12 = tl.where(late, prefix.g11, suffix.g11), tl.where(late, prefix.g12, suffix.g12)
    b11, b12 = pick(suffix.g11, sibling), pick(suffix.g12, sibling)
    g11 = a11 * b11 - spectrum.omega2 * (a12 * b12)
    g12 = a11 * b12 + a12 * (b11 - 2.0 * gamma * b12)
    prefix_i12, prefix_f, prefix_j = prefix.i12, prefix.f, prefix.j
    suffix_i12, suffix_f, suffix_j = suffix.i12, suffix.f, suffix.j
    if INTEGRAL:
        ai, bi = tl.where(late, prefix.i12, suffix.i12), pick(suffix.i12, sibling)
        i12 = ai + a11 * bi + a12 * b12
        prefix_i12, suffix_i12 = tl.where(late, i12, prefix.i12), tl.where(late, suffix.i12, i12)
    if SLOPES:
        af, bf = tl.where(late, prefix.f, suffix.f), pick(suffix.f, sibling)
        # Derivatives of g11 by omega^2.
        slope_a = gamma * af - 0.5 * s_own * a12
        slope_b = gamma * bf - 0.5 * s_other * b12
        f = slope_a * b12 + a11 * bf + af * (b11 - 2.0 * gamma * b12)
        f += a12 * (slope_b - 2.0 * gamma * bf)
        prefix_f, suffix_f = tl.where(late, f, prefix.f), tl.where(late, suffix.f, f)
    if INTEGRAL and SLOPES:
        aj = tl.where(late, prefix.j, suffix.j)
        j = aj + slope_a * bi + a11 * pick(suffix.j, sibling) + af * b12 + a12 * bf
        prefix_j, suffix_j = tl.where(late, j, prefix.j), tl.where(late, suffix.j, j)
    p11, p12 = tl.where(late, g11, prefix.g11), tl.where(late, g12, prefix.g12)
    s11, s12 = tl.where(late, suffix.g11, g11), tl.where(late, suffix.g12, g12)
    prefix = Reach(p11, p12, prefix_i12, prefix_f, prefix_j)
    return prefix, Reach(s11, s12, suffix_i12, suffix_f, suffix_j)


# --- Loads and sums. ------------------------------------------------------------------------------


@triton.jit
def load_path(path_ptr, at, tokens, channels, K: tl.constexpr):
    """Return both numbers of the path integrals of `tokens` from ``[B H, 2, padded, C]``."""
    where = path_ptr + 2 * at.row * K.C + tokens[:, None] * K.C + channels[None, :]
    return tl.load(where), tl.load(where + at.size)


@triton.jit
def sum_others(x, AFTER: tl.constexpr):
    """Return for each row of a tile the sum of the rows of `x` before (or after) it, float32."""
    # A product with zeros and ones shifts nothing across threads.
    row, other = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    counts = row < other if AFTER else row > other
    return tl.dot(tl.where(counts, 1.0, 0.0), x, input_precision="tf32x3")


# --- Pairs within a tile. -------------------------------------------------------------------------


@triton.jit
def meeting_bits():
    """Return row xor key if the row is later, else 0; the highest bit is the level of the pair."""
    place = tl.arange(0, TILE)
    later = place[:, None] > place[None, :]
    return tl.where(later, place[:, None] ^ place[None, :], 0)


@triton.jit
def pair_gaps(times, present, bits):
    """Return which pairs of a tile count, row later than key in time, and 1 / gap, else 0."""
    gap = (times[:, None] - times[None, :]).to(tl.float32)
    seen = (gap > 0) & present[None, :] & (bits > 0)
    return seen, tl.where(seen, 1.0 / tl.where(seen, gap, 1.0), 0.0)


@triton.jit
def contributions(side, path_ptr, gap_to_next, at, tokens, present, K: tl.constexpr):
    """Return what key i (column) contributes over the gap after token g (row), 0 if g < i."""
    place = tl.arange(0, TILE)
    bits = meeting_bits()
    raw = tl.zeros([TILE, TILE], tl.float32)
    own = tl.zeros([TILE], tl.float32)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = cf.load_spectrum(side.spectrum, at.head, channels, K)
        m1, m2 = load_path(path_ptr, at, tokens, channels, K)
        x, u = lib.load_side(side, at, tokens, present, channels, K)
        own += tl.sum(m1 * x + m2 * u, 1)
        prefix, suffix = single_tokens(gap_to_next, spectrum, False, K)
        for level in range(NUM_LEVELS):
            x1, x2 = moved_on(x, u, suffix.g11, suffix.g12, spectrum)
            f1, f2 = moved_back(m1, m2, prefix.g11, prefix.g12, spectrum)
            part = product(f1.to(K.OPERAND), tl.trans(x1.to(K.OPERAND)), K)
            part += product(f2.to(K.OPERAND), tl.trans(x2.to(K.OPERAND)), K)
            raw = tl.where((bits >> level) == 1, raw + part, raw)
            prefix, suffix = climb(prefix, suffix, 0.0, 0.0, spectrum, 1 << level, False, False)
    return tl.where(place[:, None] == place[None, :], own[:, None], raw)


@triton.jit
def tile_path_forward(
    t, path, spans, biases, out_ptr, lse_ptr, sizes, STRICT: tl.constexpr, K: tl.constexpr
):
    """Write output and logsumexp (base 2) over the keys of each row's own tile.

    Also the set-up of the first sweep: states at the end of each tile, row factors of values, and
    `biases`, two of ``[B H, padded]``: the integrals of path times key from each key to the end of
    its tile and of its far span. Queries, the path at each row's own time, count for ties alone.
    """
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    size = at.size
    tokens = tile * TILE + tl.arange(0, TILE)
    present = lib.present_tokens(t.mask, at, tokens)
    times = lib.time_at(at, tokens)
    gap_to_next = (lib.time_at(at, tokens + 1) - times)[:, None]
    HAS_VU: tl.constexpr = t.v.velocity is not None

    contributed = contributions(t.k, path.gaps, gap_to_next, at, tokens, present, K)
    bias = tl.sum(contributed, 0)
    tl.store(biases[0] + at.row + tokens, bias)
    until_end = (lib.time_at(at, tile * TILE + TILE) - times)[:, None]
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = cf.load_spectrum(t.k.spectrum, at.head, channels, K)
        x, u = lib.load_side(t.k, at, tokens, present, channels, K)
        gap = cf.oscillate(until_end, spectrum, K)
        x1, x2 = moved_on(x, u, gap.g11, gap.g12, spectrum)
        lib.store_planes(spans.key_state + 3 * at.row * K.C, tokens, size, (x1, x2), channels, K)
        if path.remainder is not None:
            rest = path.remainder + (at.row // TILE + tile) * (2 * K.C) + channels[None, :]
            bias += tl.sum(tl.load(rest) * x1 + tl.load(rest + K.C) * x2, 1)
    if path.remainder is not None:
        tl.store(biases[1] + at.row + tokens, bias)

    bits = meeting_bits()
    seen, inverse = pair_gaps(times, present, bits)
    raw = sum_others(contributed, False)
    logits = tl.where(seen, raw * inverse * sizes.logit_scale, float("-inf"))
    top = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mass = tl.sum(weights, 1)
    if K.AVERAGE:
        weights *= inverse

    low, high = tile, tile
    if not STRICT:
        low, high = intra_tile.tie_range(at, tile)
        nearer = top
        for other in range(low, high + 1):
            tied = intra_tile.tied_logits(t, at, tile, other, sizes, K)
            top, mass, _, keep = lib.softmax_step(top, mass, tied)
        weights *= tl.exp2(nearer - tl.where(top == float("-inf"), 0.0, top))[:, None]
    lse, safe = lib.logsumexp(top, mass)
    weights = weights / safe[:, None]
    tl.store(lse_ptr + at.row + tokens, lse)
    shift = tl.where(mass > 0, lse, 0.0)

    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        acc = tl.zeros([TILE, WIDTH], tl.float32)
        if not STRICT:
            for other in range(low, high + 1):
                tied = intra_tile.tied_logits(t, at, tile, other, sizes, K)
                acc += intra_tile.tied_output(tied, shift, t, at, other, channels, K)
        spectrum = cf.load_spectrum(t.v.spectrum, at.head, channels, K)
        x, u = lib.load_side(t.v, at, tokens, present, channels, K)
        prefix, suffix = single_tokens(gap_to_next, spectrum, False, K)
        for level in range(NUM_LEVELS):
            x1, x2, xs = cf.aged_state(suffix, spectrum, x, u, HAS_VU)
            f1, f2 = cf.row_factors(prefix, spectrum, K.AVERAGE)
            part = tl.where((bits >> level) == 1, weights, 0.0).to(K.OPERAND)
            acc += f1 * product(part, x1.to(K.OPERAND), K)
            acc += f2 * product(part, x2.to(K.OPERAND), K)
            if K.AVERAGE:
                acc += product(part, xs.to(K.OPERAND), K)
            prefix, suffix = climb(prefix, suffix, 0.0, 0.0, spectrum, 1 << level, True, False)
        lib.store_plane(out_ptr + at.row * K.C, tokens, acc, channels, K)
        state = cf.aged_state(suffix, spectrum, x, u, HAS_VU)
        lib.store_planes(spans.value_state + 3 * at.row * K.C, tokens, size, state, channels, K)
        factors = cf.row_factors(prefix, spectrum, K.AVERAGE)
        lib.store_planes(spans.value_factor + 2 * at.row * K.C, tokens, size, factors, channels, K)


@triton.jit
def elapsed(n, tile, at, times, K: tl.constexpr):
    """Return the durations of what grows in blocks of n, and of the other block of the two."""
    # What grows: a row's time since its block began, or a key's until the next block begins.
    place = tl.arange(0, TILE)
    late = (place & n) != 0
    base = tile * TILE + (place // n) * n
    own = tl.abs(lib.time_at(at, base + tl.where(late, 0, n)) - times)
    begin = lib.time_at(at, base + tl.where(late, -n, n))
    other = lib.time_at(at, base + tl.where(late, 0, 2 * n)) - begin
    return cf.rounded(own, K)[:, None], cf.rounded(other, K)[:, None]


@triton.jit
def level_adjoint(
    late, s, prefix, suffix, form, x, u, d_state, d_factors, HAS_U: tl.constexpr, K: tl.constexpr
):
    """Return the gradients of x, u, gamma and omega^2 at one level.

    There a token is either a row (`late`), with gradients of its factors, or a key, with gradients
    of its state; the others are 0, so one evaluation serves both.
    """
    gamma, omega2 = form.gamma, form.omega2
    d_x1, d_x2, d_xs = d_state
    d_f1, d_f2 = tl.where(late, d_factors[0], 0.0), tl.where(late, d_factors[1], 0.0)
    g11, g12, i12 = suffix.g11, suffix.g12, suffix.i12
    d_x = d_x1 * g11 - omega2 * g12 * d_x2 + (g12 + 2.0 * gamma * i12) * d_xs
    d_u = d_x1 * g12 + (g11 - 2.0 * gamma * g12) * d_x2 + i12 * d_xs
    g12, i12 = tl.where(late, prefix.g12, g12), tl.where(late, prefix.i12, i12)
    f, j = tl.where(late, prefix.f, suffix.f), tl.where(late, prefix.j, suffix.j)
    d_i11 = d_xs * x
    d_g11 = d_x1 * x
    d_g12 = -omega2 * d_x2 * x
    d_i12 = tl.zeros_like(d_i11)
    if HAS_U:
        d_g11 += d_x2 * u
        d_g12 += (d_x1 - 2.0 * gamma * d_x2) * u
        d_i12 += d_xs * u
    if K.AVERAGE:
        d_i11 += d_f1
        d_i12 += d_f2
    else:
        d_g11 += d_f1
        d_g12 += d_f2
    d_gamma, d_omega2 = cf.pull_back_through(
        s, form, g12, f, j, d_g11, d_g12 + d_i11, d_i12 + 2.0 * gamma * d_i11
    )
    d_gamma += 2.0 * i12 * d_i11
    d_omega2 -= g12 * d_x2 * x
    if HAS_U:
        d_gamma -= 2.0 * g12 * d_x2 * u
    return d_x.to(tl.float32), d_u.to(tl.float32), d_gamma, d_omega2


@triton.jit
def tile_path_backward(
    t, path, up, d_biases, grads, d_path, sizes, STRICT: tl.constexpr, K: tl.constexpr
):
    """Add to the gradients of keys, values and path integrals; write those of ties and spectra.

    Shapes are those of `tile_path_forward`. The gradients of the biases, from the sweeps after (or
    None), are passed on to keys and path integrals.
    """
    tile = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    size = at.size
    plane = at.row * K.C
    program = at.row // TILE + tile
    place = tl.arange(0, TILE)
    tokens = tile * TILE + place
    inside = tokens < at.length
    present = lib.present_tokens(t.mask, at, tokens)
    times = lib.time_at(at, tokens)
    gap_to_next = (lib.time_at(at, tokens + 1) - times)[:, None]
    bits = meeting_bits()
    seen, inverse = pair_gaps(times, present, bits)
    lse = lib.load_lse(up.lse + at.row, tokens)
    delta = tl.load(up.delta + at.row + tokens)
    HAS_VU: tl.constexpr = t.v.velocity is not None

    contributed = contributions(t.k, path.gaps, gap_to_next, at, tokens, present, K)
    raw = sum_others(contributed, False)
    weights = tl.where(seen, tl.exp2(raw * inverse * sizes.logit_scale - lse[:, None]), 0.0)
    shares = weights
    if K.AVERAGE:
        shares = weights * inverse
    low, high = tile, tile
    if not STRICT:
        low, high = intra_tile.tie_range(at, tile)

    d_weights = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = cf.load_spectrum(t.v.spectrum, at.head, channels, K)
        o = lib.load_tokens(up.d_out, at, tokens, inside, channels, K)
        x, u = lib.load_side(t.v, at, tokens, present, channels, K)
        prefix, suffix = single_tokens(gap_to_next, spectrum, True, K)
        d_x, d_u = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
        d_gamma, d_omega2 = tl.zeros_like(prefix.g11), tl.zeros_like(prefix.g11)
        for level in range(NUM_LEVELS):
            n = 1 << level
            late = ((place & n) != 0)[:, None]
            s_own, s_other = elapsed(n, tile, at, times, K)
            meeting = (bits >> level) == 1
            x1, x2, xs = cf.aged_state(suffix, spectrum, x, u, HAS_VU)
            f1, f2 = cf.row_factors(prefix, spectrum, K.AVERAGE)
            o1, o2 = (o * f1).to(K.OPERAND), (o * f2).to(K.OPERAND)
            part = product(o1, tl.trans(x1.to(K.OPERAND)), K)
            part += product(o2, tl.trans(x2.to(K.OPERAND)), K)
            if K.AVERAGE:
                part += product(o.to(K.OPERAND), tl.trans(xs.to(K.OPERAND)), K)
            d_weights = tl.where(meeting, d_weights + part, d_weights)
            part = tl.where(meeting, shares, 0.0).to(K.OPERAND)
            d_xs = tl.zeros([TILE, WIDTH], tl.float32)
            if K.AVERAGE:
                d_xs = product(tl.trans(part), o.to(K.OPERAND), K)
            d_state = (product(tl.trans(part), o1, K), product(tl.trans(part), o2, K), d_xs)
            d_f1 = o * product(part, x1.to(K.OPERAND), K)
            d_f2 = o * product(part, x2.to(K.OPERAND), K)
            more_x, more_u, more_gamma, more_omega2 = level_adjoint(
                late, s_own, prefix, suffix, spectrum, x, u, d_state, (d_f1, d_f2), HAS_VU, K
            )
            d_x += more_x
            d_u += more_u
            d_gamma += more_gamma
            d_omega2 += more_omega2
            prefix, suffix = climb(prefix, suffix, s_own, s_other, spectrum, n, True, True)
        if not STRICT:
            for other in range(low, high + 1):
                tied, _ = intra_tile.tied_pairs(t, up, at, other, tile, sizes, K)
                d_x += intra_tile.tied_sums(tl.trans(tied), up.d_out, at, other, channels, K)
        lib.add_plane(grads.v.x + plane, tokens, d_x, channels, K)
        if HAS_VU:
            lib.add_plane(grads.v.velocity + plane, tokens, d_u, channels, K)
        lib.store_spectral(grads.v.spectrum, program, d_gamma, d_omega2, channels, K)

    if K.AVERAGE:
        d_weights *= inverse
    d_raw_near = weights * (d_weights - delta[:, None]) * inverse * sizes.scale
    # What a key contributes over a gap counts for all later rows of the tile and, as its bias, for
    # those of later tiles.
    d_contributed = sum_others(d_raw_near, True)
    far = tl.zeros([TILE], tl.float32)
    if d_biases[1] is not None:
        far = tl.load(d_biases[1] + at.row + tokens)
        d_contributed += far[None, :]
    if d_biases[0] is not None:
        d_contributed += tl.load(d_biases[0] + at.row + tokens)[None, :]
    is_own = place[:, None] == place[None, :]
    d_own = tl.sum(tl.where(is_own, d_contributed, 0.0), 1)[:, None]
    for start in range(0, K.C, WIDTH):
        channels = start + tl.arange(0, WIDTH)
        spectrum = cf.load_spectrum(t.k.spectrum, at.head, channels, K)
        m1, m2 = load_path(path.gaps, at, tokens, channels, K)
        x, u = lib.load_side(t.k, at, tokens, present, channels, K)
        prefix, suffix = single_tokens(gap_to_next, spectrum, True, K)
        d_m1, d_m2, d_x, d_u = d_own * x, d_own * u, d_own * m1, d_own * m2
        d_gamma, d_omega2 = tl.zeros_like(suffix.g11), tl.zeros_like(suffix.g11)
        for level in range(NUM_LEVELS):
            n = 1 << level
            late = ((place & n) != 0)[:, None]
            s_own, s_other = elapsed(n, tile, at, times, K)
            x1, x2 = moved_on(x, u, suffix.g11, suffix.g12, spectrum)
            f1, f2 = moved_back(m1, m2, prefix.g11, prefix.g12, spectrum)
            part = tl.where((bits >> level) == 1, d_contributed, 0.0).to(K.OPERAND)
            # A token is either a gap's, and left of the propagator, or a key, and right of it.
            r1 = tl.where(late, product(part, x1.to(K.OPERAND), K), x)
            r2 = tl.where(late, product(part, x2.to(K.OPERAND), K), u)
            l1 = tl.where(late, m1, product(tl.trans(part), f1.to(K.OPERAND), K))
            l2 = tl.where(late, m2, product(tl.trans(part), f2.to(K.OPERAND), K))
            g11 = tl.where(late, prefix.g11, suffix.g11)
            g12 = tl.where(late, prefix.g12, suffix.g12)
            f = tl.where(late, prefix.f, suffix.f)
            more1, more2 = moved_on(r1, r2, g11, g12, spectrum)
            d_m1 += tl.where(late, more1, 0.0)
            d_m2 += tl.where(late, more2, 0.0)
            more1, more2 = moved_back(l1, l2, g11, g12, spectrum)
            d_x += tl.where(late, 0.0, more1)
            d_u += tl.where(late, 0.0, more2)
            more1, more2 = spectral_adjoint(s_own, g12, f, spectrum, l1, l2, r1, r2)
            d_gamma += more1
            d_omega2 += more2
            prefix, suffix = climb(prefix, suffix, s_own, s_other, spectrum, n, False, True)
        if d_biases[1] is not None:
            s_own, s_other = elapsed(TILE, tile, at, times, K)
            rest = program * (2 * K.C) + channels
            l1 = far[:, None] * tl.load(path.remainder + rest)[None, :]
            l2 = far[:, None] * tl.load(path.remainder + rest + K.C)[None, :]
            x1, x2 = moved_on(x, u, suffix.g11, suffix.g12, spectrum)
            tl.store(d_path.remainder + rest, tl.sum(far[:, None] * x1, 0))
            tl.store(d_path.remainder + rest + K.C, tl.sum(far[:, None] * x2, 0))
            more1, more2 = moved_back(l1, l2, suffix.g11, suffix.g12, spectrum)
            d_x += more1
            d_u += more2
            more1, more2 = spectral_adjoint(s_own, suffix.g12, suffix.f, spectrum, l1, l2, x, u)
            d_gamma += more1
            d_omega2 += more2
        lib.add_plane(d_path.gaps + 2 * plane, tokens, d_m1, channels, K)
        lib.add_plane(d_path.gaps + 2 * plane + size, tokens, d_m2, channels, K)
        lib.store_spectral(grads.k.spectrum, program, d_gamma, d_omega2, channels, K)

        d_row = tl.zeros([TILE, WIDTH], tl.float32)
        if not STRICT:
            for other in range(low, high + 1):
                _, d_raw = intra_tile.tied_pairs(t, up, at, tile, other, sizes, K)
                d_row += intra_tile.tied_sums(d_raw, t.k.x, at, other, channels, K)
                _, d_raw = intra_tile.tied_pairs(t, up, at, other, tile, sizes, K)
                d_x += intra_tile.tied_sums(tl.trans(d_raw), t.q, at, other, channels, K)
        lib.store_plane(grads.q + plane, tokens, d_row, channels, K)
        lib.add_plane(grads.k.x + plane, tokens, d_x, channels, K)
        if t.k.velocity is not None:
            lib.add_plane(grads.k.velocity + plane, tokens, d_u, channels, K)


# --- Integrals of the path within spans and between them. -----------------------------------------


@triton.jit
def path_factors(t, path_ptr, factor_ptr, total_ptr, sizes, SPAN: tl.constexpr, K: tl.constexpr):
    """Write the path's integrals from each span's start to its tokens, and over the whole span.

    `factor_ptr` is ``[B H, 2, padded, C]``, as `path_ptr`, `total_ptr` float32 ``[B H, spans, 2,
    C]``. One program takes WIDTH channels of one span of one head, a tile at a time.
    """
    at = lib.locate(t.times, sizes, K, K.C // WIDTH)
    channels = lib.own_channels(K)
    spectrum = cf.load_spectrum(t.k.spectrum, at.head, channels, K)
    first = tl.program_id(0) * SPAN
    begin = lib.time_at(at, first)
    sum1, sum2 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(first, tl.minimum(first + SPAN, sizes.padded), TILE):
        rows = start + tl.arange(0, TILE)
        gap = cf.oscillate((lib.time_at(at, rows) - begin)[:, None], spectrum, K)
        m1, m2 = load_path(path_ptr, at, rows, channels, K)
        f1, f2 = moved_back(m1, m2, gap.g11, gap.g12, spectrum)
        sums = (sum_others(f1, False) + sum1[None, :], sum_others(f2, False) + sum2[None, :])
        lib.store_planes(factor_ptr + 2 * at.row * K.C, rows, at.size, sums, channels, K)
        sum1 += tl.sum(f1, 0)
        sum2 += tl.sum(f2, 0)
    to = total_ptr + (at.plane * tl.num_programs(0) + tl.program_id(0)) * (2 * K.C) + channels
    tl.store(to, sum1)
    tl.store(to + K.C, sum2)


@triton.jit
def path_factors_backward(
    t, path_ptr, d_factor, d_total, d_path, d_spectrum, sizes, SPAN: tl.constexpr, K: tl.constexpr
):
    """Add to the gradients of path integrals; write, per span, those of gamma and omega^2.

    `d_factor` is float32 ``[B H, 4, padded, C]``, of which the first two planes count.
    """
    at = lib.locate(t.times, sizes, K, K.C // WIDTH)
    channels = lib.own_channels(K)
    spectrum = cf.load_spectrum(t.k.spectrum, at.head, channels, K)
    size = at.size
    first = tl.program_id(0) * SPAN
    past = tl.minimum(first + SPAN, sizes.padded)
    begin = lib.time_at(at, first)
    spans = (at.plane * tl.num_programs(0) + tl.program_id(0)) * (2 * K.C) + channels
    sum1, sum2 = tl.load(d_total + spans), tl.load(d_total + spans + K.C)
    d_gamma, d_omega2 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for back in range(first, past, TILE):
        rows = first + past - TILE - back + tl.arange(0, TILE)
        s = (lib.time_at(at, rows) - begin)[:, None]
        gap = cf.oscillate(s, spectrum, K)
        f, _ = cf.spectral_derivatives(s, spectrum, gap, K)
        m1, m2 = load_path(path_ptr, at, rows, channels, K)
        where = rows[:, None] * K.C + channels[None, :]
        given = d_factor + 4 * at.row * K.C + where
        f1, f2 = tl.load(given), tl.load(given + size)
        r1, r2 = sum_others(f1, True) + sum1[None, :], sum_others(f2, True) + sum2[None, :]
        sum1 += tl.sum(f1, 0)
        sum2 += tl.sum(f2, 0)
        more1, more2 = moved_on(r1, r2, gap.g11, gap.g12, spectrum)
        found = d_path + 2 * at.row * K.C + where
        tl.store(found, tl.load(found) + more1)
        tl.store(found + size, tl.load(found + size) + more2)
        x = s.to(gap.g12.dtype)
        more1, more2 = spectral_adjoint(x, gap.g12, f, spectrum, m1, m2, r1, r2)
        d_gamma += tl.sum(more1, 0).to(tl.float32)
        d_omega2 += tl.sum(more2, 0).to(tl.float32)
    tl.store(d_spectrum + spans, d_gamma)
    tl.store(d_spectrum + spans + K.C, d_omega2)


@triton.jit
def _propagators(
    matrix, span, GROUP, columns, there, PLANES: tl.constexpr, FIRST: tl.constexpr, C: tl.constexpr
):
    """Return four planes, from FIRST on, of the span from the ends of `columns` to `span`."""
    at = matrix + (span * GROUP + columns % GROUP)[:, None].to(tl.int64) * (PLANES * C)
    at += FIRST * C + tl.arange(0, C)[None, :]
    p11, p12 = tl.load(at, mask=there, other=0.0), tl.load(at + C, mask=there, other=0.0)
    at += 2 * C
    return p11, p12, tl.load(at, mask=there, other=0.0), tl.load(at + C, mask=there, other=0.0)


@triton.jit(do_not_specialize=["GROUP", "num_spans", "num_totals"])
def path_between(
    matrix_ptr, path, num_spans, num_totals, GROUP, SPECTRAL: tl.constexpr, K: tl.constexpr
):
    """Write the path's integrals between spans of one group to planes 4 and 5 of their matrices.

    Totals are read, remainders are written. Program (c, plane) takes COLUMNS columns of the table
    of `sweep.span_matrices`: key spans, whose ends are the reference times.
    """
    PLANES: tl.constexpr = 18 if SPECTRAL else 6
    C: tl.constexpr = K.C
    chunks = (GROUP + COLUMNS - 1) // COLUMNS
    low = tl.program_id(0) // chunks * GROUP
    columns = low + tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    plane = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, C)[None, :]
    matrix = matrix_ptr + plane * num_spans * GROUP * (PLANES * C)
    total = path.total + plane * num_totals * (2 * C) + channels
    past = tl.minimum(low + GROUP, num_spans)
    sum1, sum2 = tl.zeros([COLUMNS, C], tl.float32), tl.zeros([COLUMNS, C], tl.float32)
    for span in range(low + 1, past):
        there = (columns < tl.minimum(span, low + GROUP))[:, None]
        at = matrix + (span * GROUP + columns % GROUP)[:, None].to(tl.int64) * (PLANES * C)
        tl.store(at + 4 * C + channels, sum1, mask=there)
        tl.store(at + 5 * C + channels, sum2, mask=there)
        p11, p12, p21, p22 = _propagators(matrix, span, GROUP, columns, there, PLANES, 0, C)
        m1, m2 = tl.load(total + span * (2 * C)), tl.load(total + span * (2 * C) + C)
        sum1 += m1 * p11 + m2 * p21
        sum2 += m1 * p12 + m2 * p22
    there = (columns < tl.minimum(low + GROUP, num_totals))[:, None]
    at = path.remainder + plane * num_totals * (2 * C) + columns[:, None] * (2 * C) + channels
    tl.store(at, sum1, mask=there)
    tl.store(at + C, sum2, mask=there)


@triton.jit(do_not_specialize=["GROUP", "num_spans", "num_totals"])
def path_between_backward(
    matrix_ptr, path, d_path, d_between, d_spectrum, num_spans, num_totals, GROUP, K: tl.constexpr
):
    """Write, per program, the gradients of totals and of gamma and omega^2.

    `d_between` is ``[B H, num_spans, GROUP, 2, C]``; matrices have 18 planes. Gradients of totals
    are ``[B H, chunks, num_totals, 2, C]``, chunks of COLUMNS spans of a group, those of remainders
    may be None, and `d_spectrum` is ``[B H, programs, 2, C]``.
    """
    C: tl.constexpr = K.C
    chunks = (GROUP + COLUMNS - 1) // COLUMNS
    low = tl.program_id(0) // chunks * GROUP
    columns = low + tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    plane = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, C)[None, :]
    matrix = matrix_ptr + plane * num_spans * GROUP * (18 * C)
    total = path.total + plane * num_totals * (2 * C) + channels
    part = plane * chunks + tl.program_id(0) % chunks
    found = d_path.total + part * num_totals * (2 * C) + tl.arange(0, C)
    past = tl.minimum(low + GROUP, num_spans)
    sum1, sum2 = tl.zeros([COLUMNS, C], tl.float32), tl.zeros([COLUMNS, C], tl.float32)
    if d_path.remainder is not None:
        there = (columns < tl.minimum(low + GROUP, num_totals))[:, None]
        at = d_path.remainder + plane * num_totals * (2 * C) + columns[:, None] * (2 * C) + channels
        sum1, sum2 = tl.load(at, mask=there, other=0.0), tl.load(at + C, mask=there, other=0.0)
    d_gamma, d_omega2 = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    # Nothing comes after the last span.
    for span in range(past, tl.minimum(low + GROUP, num_totals)):
        tl.store(found + span * (2 * C), tl.zeros([C], tl.float32))
        tl.store(found + span * (2 * C) + C, tl.zeros([C], tl.float32))
    for back in range(low, past):
        span = low + past - 1 - back
        there = (columns < span)[:, None]
        p11, p12, p21, p22 = _propagators(matrix, span, GROUP, columns, there, 18, 0, C)
        tl.store(found + span * (2 * C), tl.sum(sum1 * p11 + sum2 * p12, 0))
        tl.store(found + span * (2 * C) + C, tl.sum(sum1 * p21 + sum2 * p22, 0))
        m1, m2 = tl.load(total + span * (2 * C)), tl.load(total + span * (2 * C) + C)
        p11, p12, p21, p22 = _propagators(matrix, span, GROUP, columns, there, 18, 6, C)
        d_gamma += tl.sum(sum1 * (m1 * p11 + m2 * p21) + sum2 * (m1 * p12 + m2 * p22), 0)
        p11, p12, p21, p22 = _propagators(matrix, span, GROUP, columns, there, 18, 12, C)
        d_omega2 += tl.sum(sum1 * (m1 * p11 + m2 * p21) + sum2 * (m1 * p12 + m2 * p22), 0)
        at = (plane * num_spans + span) * GROUP + columns % GROUP
        at = d_between + at[:, None] * (2 * C) + channels
        sum1 += tl.load(at, mask=there, other=0.0)
        sum2 += tl.load(at + C, mask=there, other=0.0)
    at = (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + tl.arange(0, C)
    tl.store(d_spectrum + at, d_gamma)
    tl.store(d_spectrum + at + C, d_omega2)
