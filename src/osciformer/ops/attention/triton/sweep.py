"""Keys of earlier spans: flash attention with row factors moved from span to span.

First the set-up (states at span ends, row factors from span starts, the table of the spans
between), then the forward sweep, then the backward sweeps along rows and along keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import closed_form as cf
from osciformer.ops.attention.triton import primitives as lib
from osciformer.ops.attention.triton.primitives import TILE, product


@dataclass(frozen=True)
class Cut:
    """How a sweep is cut, its argument S."""

    SPAN: int  # keys with one reference time
    ROWS: int  # rows (or, along keys, keys) a program
    STEP: int  # keys (or rows) at a time
    STAGES: int  # depth of the pipeline
    # A backward sweep may take keys and values in turn, if both would not fit the registers.
    OF_KEYS: bool
    OF_VALUES: bool


class Spans(NamedTuple):
    """Pointers to the set-up of a sweep.

    States ``[B H, 3, padded, C]`` are those at span ends, row factors ``[B H, 2, padded, C]`` count
    from span starts, matrices ``[B H, spans, GROUP, planes, C]`` lie between (`span_matrices`).

    If all rows share the query's path, the key factors are integrals of the path itself, and `bias`
    ``[B H, padded]`` are those of path times key from each key to its span's end; else it is None.
    """

    key_state: Any
    value_state: Any
    key_factor: Any
    value_factor: Any
    key_matrix: Any = None
    value_matrix: Any = None
    bias: Any = None


# --- Set-up. --------------------------------------------------------------------------------------


@triton.jit
def set_up(side, times_ptr, mask, state, factor, sizes, SPAN, K: tl.constexpr):
    """Write states (position, velocity, integral) at the end of each span, and row factors.

    Shapes are those of `Spans`. A span ends at the first token of the next.
    """
    channels = tl.arange(0, K.C)
    at = lib.locate(times_ptr, sizes, K)
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    present = lib.present_tokens(mask, at, tokens)
    t = lib.time_at(at, tokens)
    begin = lib.time_at(at, (tokens // SPAN) * SPAN)
    end = lib.time_at(at, (tokens // SPAN + 1) * SPAN)
    spectrum = cf.load_spectrum(side.spectrum, at.head, channels, K)
    x, u = lib.load_side(side, at, tokens, present, channels, K)
    gap = cf.oscillate((end - t)[:, None], spectrum, K)
    aged = cf.aged_state(gap, spectrum, x, u, side.velocity is not None)
    lib.store_planes(state + 3 * at.row * K.C, tokens, at.size, aged, channels, K)
    factors = cf.row_factors(cf.oscillate((t - begin)[:, None], spectrum, K), spectrum, K.AVERAGE)
    lib.store_planes(factor + 2 * at.row * K.C, tokens, at.size, factors, channels, K)


@triton.jit
def _store_step(at, m, there, K: tl.constexpr):
    """Write six planes of a table of matrices; the integrals are 0 for point values."""
    for n in tl.static_range(6):
        plane = m[n] if K.AVERAGE or n < 4 else tl.zeros_like(m[n])
        tl.store(at + n * K.C, plane, mask=there)


@triton.jit(do_not_specialize=["GROUP"])
def span_matrices(
    times_ptr, table, matrix_ptr, sizes, SPAN, GROUP, SPECTRAL: tl.constexpr, K: tl.constexpr
):
    """Write the `Step` from the end of key span i to the start of row span j, float32.

    If SPECTRAL, 12 more planes follow the six: derivatives by gamma and by omega^2. Program
    (j, head, series) writes ``matrix[b h, j, i % GROUP]`` for the spans i before j in its group of
    GROUP spans.
    """
    PLANES: tl.constexpr = 18 if SPECTRAL else 6
    C: tl.constexpr = K.C
    row = tl.program_id(0)
    channels = tl.arange(0, C)
    place = lib.locate(times_ptr, sizes, K)
    spectrum = cf.load_spectrum(table, place.head, channels, K)
    begin = lib.time_at(place, row * SPAN)
    index = place.plane * tl.num_programs(0) + row
    base = matrix_ptr + index * (GROUP * PLANES * C)
    for low in range((row // GROUP) * GROUP, row, 8):
        spans = low + tl.arange(0, 8)
        end = lib.time_at(place, (spans + 1) * SPAN)
        s = tl.where(spans < row, begin - end, 0.0)[:, None]
        gap = cf.oscillate(s, spectrum, K)
        at = base + (spans % GROUP)[:, None] * (PLANES * C) + channels[None, :]
        there = (spans < row)[:, None]
        _store_step(at, cf.step_matrix(gap, spectrum), there, K)
        if SPECTRAL:
            f, j = cf.spectral_derivatives(s, spectrum, gap, K)
            m = cf.damping_matrix(s, gap, f, j, spectrum, False, K)
            _store_step(at + 6 * C, m, there, K)
            m = cf.slope_matrix(s, gap, f, j, spectrum, K)
            _store_step(at + 12 * C, m, there, K)


@triton.jit(do_not_specialize=["length"])
def span_times(times_ptr, age_ptr, rest_ptr, length, padded, unit, SPAN, ROWS: tl.constexpr):
    """Write the time from the start of a token's span, and to its end, times `unit`.

    ``[B, padded]`` float32. None is negative, so sums of them and of the time between spans lose
    nothing, and the loops over tokens need no float64.
    """
    series = tl.program_id(1).to(tl.int64)
    times, last = times_ptr + series * length, length - 1
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.load(times + tl.minimum(tokens, last))
    begin = tl.load(times + tl.minimum((tokens // SPAN) * SPAN, last))
    end = tl.load(times + tl.minimum((tokens // SPAN + 1) * SPAN, last))
    at, inside = series * padded + tokens, tokens < padded
    tl.store(age_ptr + at, (t - begin).to(tl.float32) * unit, mask=inside)
    tl.store(rest_ptr + at, (end - t).to(tl.float32) * unit, mask=inside)


@triton.jit
def load_step(matrix, C: tl.constexpr):
    """Return the `Step` in six planes of a table of matrices, ``[1, C]`` each."""
    planes = ()
    for n in tl.static_range(6):
        planes = planes + (tl.load(matrix + n * C + tl.arange(0, C)[None, :]),)  # noqa: RUF005
    return cf.Step(*planes)


# --- Forward. -------------------------------------------------------------------------------------


@triton.jit
def load_factors(factor, rows, size, C: tl.constexpr):
    """Return both factors (or two planes of a state) of `rows`, float32."""
    first, second = lib.load_plane(factor, rows, C), lib.load_plane(factor + size, rows, C)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def moved_factors(factor, matrix, rows, size, C: tl.constexpr):
    """Return the row factors with their reference time moved back over the span `matrix`."""
    f1, f2 = load_factors(factor, rows, size, C)
    m = load_step(matrix, C)
    return f1 * m.p11 + f2 * m.p21 + m.i11, f1 * m.p12 + f2 * m.p22 + m.i12


@triton.jit
def inverse_gaps(late, early, HAS_ZERO: tl.constexpr):
    """Return 1 / (late + early), and 0 for zero gaps."""
    gap = late[:, None] + early[None, :]
    root = tl.rsqrt(gap)
    inverse = root * root
    if HAS_ZERO:
        inverse = tl.where(gap > 0, inverse, 0.0)
    return inverse


@triton.jit
def tied_spans(at, own, low, first_time, SPAN: tl.constexpr):
    """Return how many of the spans before `own` end at the time of the first row."""
    count = 0
    while tl.load(at.times + (own - count) * SPAN) == first_time and own - count > low:
        count += 1
    return count


@triton.jit(do_not_specialize=["GROUP"])
def sweep_forward(
    t, rest_ptr, spans, acc_ptr, lse_ptr, out_ptr, sizes, GROUP, S: tl.constexpr, K: tl.constexpr
):
    """Add to each row the keys of the earlier spans of its group of GROUP spans.

    One program takes ROWS rows of one span. `acc_ptr` ``[B H, padded, C]`` and `lse_ptr`
    ``[B H, padded]`` hold output and logsumexp over nearer keys. They are updated; the last stage
    writes the output to `out_ptr` ``[B, N, H, C]``, which is None in the others.
    """
    C: tl.constexpr = K.C
    SPAN: tl.constexpr = S.SPAN
    ROWS: tl.constexpr = S.ROWS
    SHARED: tl.constexpr = spans.bias is not None
    # The longest rows first.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < at.length
    own = chunk * ROWS // SPAN
    low = (own // GROUP) * GROUP
    first_time = lib.time_at(at, chunk * ROWS)
    row_times = lib.time_at(at, rows)
    q = lib.load_tokens(t.q, at, rows, inside, tl.arange(0, C), K)
    num_spans = (at.length + SPAN - 1) // SPAN
    matrix = (at.plane * num_spans + own) * (GROUP * 6 * C)
    rest = rest_ptr + tl.program_id(2).to(tl.int64) * sizes.padded

    top = tl.load(lse_ptr + at.row + rows)
    acc = lib.load_plane(acc_ptr + at.row * C, rows, C)
    unit = 1.0
    if K.AVERAGE:
        unit = sizes.logit_scale
    acc *= unit
    mass = tl.where(top == float("-inf"), 0.0, 1.0)
    tied = tied_spans(at, own, low, first_time, SPAN)
    qo = q.to(K.OPERAND)
    size, state, factor = at.size, 3 * at.row * C, 2 * at.row * C
    ks, vs = spans.key_state + state, spans.value_state + state
    kf, vf = spans.key_factor + factor, spans.value_factor + factor
    # First the spans that end at the time of the first row, so that the other loop, which is the
    # usual one, needs no test for zero gaps.
    for HAS_ZERO in tl.static_range(1, -1, -1):
        begin = 0 if HAS_ZERO else tied
        end = tied if HAS_ZERO else own - low
        for back in range(begin, end):
            span = own - 1 - back
            entry = matrix + (span % GROUP) * (6 * C)
            f1, f2 = moved_factors(kf, spans.key_matrix + entry, rows, size, C)
            if not SHARED:
                f1 *= q
                f2 *= q
            q1, q2 = f1.to(K.OPERAND), f2.to(K.OPERAND)
            r = tl.load(at.times + (span + 1) * SPAN)
            # Inverse gaps carry the scale of the logits; averages are divided by it at the end.
            late = (row_times - r).to(tl.float32) * (1.0 / sizes.logit_scale)
            y1, y2 = tl.zeros([ROWS, C], tl.float32), tl.zeros([ROWS, C], tl.float32)
            for step in tl.range(0, SPAN // S.STEP, num_stages=S.STAGES):
                keys = span * SPAN + step * S.STEP + tl.arange(0, S.STEP)
                early = tl.load(rest + keys)
                raw = product(q1, tl.trans(lib.load_plane(ks, keys, C)), K)
                raw += product(q2, tl.trans(lib.load_plane(ks + size, keys, C)), K)
                if SHARED:
                    raw += tl.load(spans.bias + at.row + keys)[None, :]
                else:
                    raw += product(qo, tl.trans(lib.load_plane(ks + 2 * size, keys, C)), K)
                inverse = inverse_gaps(late, early, HAS_ZERO)
                logits = raw * inverse
                if t.mask is not None:
                    present = tl.load(t.mask + at.first_token + keys) != 0
                    logits = tl.where(present[None, :], logits, float("-inf"))
                if HAS_ZERO:
                    logits = tl.where(inverse > 0, logits, float("-inf"))
                top, mass, weights, keep = lib.softmax_step(top, mass, logits)
                if K.AVERAGE:
                    weights *= inverse
                weights = weights.to(K.OPERAND)
                y1 = y1 * keep[:, None] + product(weights, lib.load_plane(vs, keys, C), K)
                y2 = y2 * keep[:, None] + product(weights, lib.load_plane(vs + size, keys, C), K)
                acc *= keep[:, None]
                if K.AVERAGE:
                    acc += product(weights, lib.load_plane(vs + 2 * size, keys, C), K)
            f1, f2 = moved_factors(vf, spans.value_matrix + entry, rows, size, C)
            acc += f1 * y1 + f2 * y2

    lse, safe = lib.logsumexp(top, mass)
    acc = acc / (safe * unit)[:, None]
    if out_ptr is not None:
        token = (at.first_token + rows) * at.heads + at.head
        to = out_ptr + token[:, None] * C + tl.arange(0, C)[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        lib.store_plane(acc_ptr + at.row * C, rows.to(tl.int64), acc, tl.arange(0, C), K)
    tl.store(lse_ptr + at.row + rows, lse)


# --- Backward along rows: queries, and the spectra through row factors and spans. -----------------


@triton.jit
def add_to_factors(d_factor, factor, matrix, rows, size, d_first, d_second, C: tl.constexpr):
    """Pull gradients of moved row factors back: add to both planes of `d_factor`.

    Returns, through the span alone, the gradients of gamma and of omega^2, ``[C]``.
    """
    c = tl.arange(0, C)[None, :]
    f1, f2 = load_factors(factor, rows, size, C)
    at = d_factor + rows[:, None] * C + c
    # Registers are short: what is read is read as late as can be.
    m = matrix + c
    more = d_first * tl.load(m) + d_second * tl.load(m + C)
    tl.store(at, tl.load(at) + more)
    more = d_first * tl.load(m + 2 * C) + d_second * tl.load(m + 3 * C)
    tl.store(at + size, tl.load(at + size) + more)
    d_gamma = d_first * (f1 * tl.load(m + 6 * C) + f2 * tl.load(m + 8 * C) + tl.load(m + 10 * C))
    d_gamma += d_second * (f1 * tl.load(m + 7 * C) + f2 * tl.load(m + 9 * C) + tl.load(m + 11 * C))
    m += 12 * C
    d_omega2 = d_first * (f1 * tl.load(m) + f2 * tl.load(m + 2 * C) + tl.load(m + 4 * C))
    d_omega2 += d_second * (f1 * tl.load(m + C) + f2 * tl.load(m + 3 * C) + tl.load(m + 5 * C))
    return tl.sum(d_gamma, 0), tl.sum(d_omega2, 0)


@triton.jit
def value_weights(weights, inverse, K: tl.constexpr):
    """Return the weights of values as operands, 0 if a pair does not count."""
    if K.AVERAGE:
        weights *= inverse
    else:
        weights = tl.where(inverse > 0, weights, 0.0)
    return weights.to(K.OPERAND)


@triton.jit
def common_factors(sizes, K: tl.constexpr):
    """Return factors of inverse gaps, of values, 1 over the latter, and of logits.

    They are common to all pairs and stay out of the loops.
    """
    unit = 1.0 / sizes.logit_scale
    share, unshare = 1.0, 1.0
    if K.AVERAGE:
        share, unshare = unit, sizes.logit_scale
    return unit, share, unshare, sizes.scale * unit * share


@triton.jit(do_not_specialize=["GROUP"])
def sweep_rows(
    t,
    rest_ptr,
    spans,
    up,
    grads,
    d_factor,
    d_between,
    sizes,
    GROUP,
    S: tl.constexpr,
    K: tl.constexpr,
):
    """Add to the gradients of queries, and write those of the spectra through rows and spans.

    Values have no gradient of their own along rows, only their spectrum has. `d_factor` is float32
    ``[B H, 4, padded, C]``, set to 0 before: both factors of keys, then those of values
    (`add_to_factors`). Gradients of the spectra, through the spans alone, are ``[B H, programs, 2,
    C]``. If rows share the query's path, `d_between` ``[B H, j, i, 2, C]`` collects the gradient
    of its integrals over the spans between.
    """
    C: tl.constexpr = K.C
    SPAN: tl.constexpr = S.SPAN
    ROWS: tl.constexpr = S.ROWS
    SPECTRAL: tl.constexpr = grads.k.spectrum is not None
    PLANES: tl.constexpr = 18 if SPECTRAL else 6
    SHARED: tl.constexpr = spans.bias is not None
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    rest = rest_ptr + tl.program_id(2).to(tl.int64) * sizes.padded
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < at.length
    own = chunk * ROWS // SPAN
    low = (own // GROUP) * GROUP
    row_times = lib.time_at(at, rows)
    channels = tl.arange(0, C)
    unit, share, unshare, turned = common_factors(sizes, K)
    size, state, factor = at.size, 3 * at.row * C, 2 * at.row * C
    ks, vs = spans.key_state + state, spans.value_state + state
    kf, vf = spans.key_factor + factor, spans.value_factor + factor
    num_spans = (at.length + SPAN - 1) // SPAN
    matrix = (at.plane * num_spans + own) * (GROUP * PLANES * C)
    lse = lib.load_lse(up.lse + at.row, rows)
    delta = tl.load(up.delta + at.row + rows) * unshare
    zero = tl.zeros([ROWS, C], tl.float32)
    total = zero
    if not SHARED:
        total = lib.load_plane(grads.q + at.row * C, rows, C)
    none = tl.zeros([C], tl.float32)
    key_gamma, key_omega2, value_gamma, value_omega2 = none, none, none, none
    for back in range(0, own - low):
        span = own - 1 - back
        entry = matrix + (span % GROUP) * (PLANES * C)
        # Tokens are read where they are needed: registers are what this kernel lacks.
        q = lib.load_tokens(t.q, at, rows, inside, channels, K)
        qo = q.to(K.OPERAND)
        f1, f2 = moved_factors(kf, spans.key_matrix + entry, rows, size, C)
        if not SHARED:
            f1 *= q
            f2 *= q
        q1, q2 = f1.to(K.OPERAND), f2.to(K.OPERAND)
        if S.OF_KEYS:
            o = lib.load_tokens(up.d_out, at, rows, inside, channels, K)
            oo = o.to(K.OPERAND)
            f1, f2 = moved_factors(vf, spans.value_matrix + entry, rows, size, C)
            o1, o2 = (o * f1).to(K.OPERAND), (o * f2).to(K.OPERAND)
        r = tl.load(at.times + (span + 1) * SPAN)
        # Inverse gaps carry the scale of the logits, as in the forward pass.
        late = (row_times - r).to(tl.float32) * unit
        z1, z2, z3, y1, y2 = zero, zero, zero, zero, zero
        for step in tl.range(0, SPAN // S.STEP, num_stages=S.STAGES):
            keys = span * SPAN + step * S.STEP + tl.arange(0, S.STEP)
            early = tl.load(rest + keys)
            x1, x2 = lib.load_plane(ks, keys, C), lib.load_plane(ks + size, keys, C)
            raw = product(q1, tl.trans(x1), K)
            raw += product(q2, tl.trans(x2), K)
            if SHARED:
                raw += tl.load(spans.bias + at.row + keys)[None, :]
            else:
                xs = lib.load_plane(ks + 2 * size, keys, C)
                raw += product(qo, tl.trans(xs), K)
            inverse = inverse_gaps(late, early, True)
            if t.mask is not None:
                present = tl.load(t.mask + at.first_token + keys) != 0
                inverse = tl.where(present[None, :], inverse, 0.0)
            # Weights are at most 1; a pair that does not count must not overflow.
            weights = tl.exp2(tl.minimum(raw * inverse - lse[:, None], 0.0))
            v1, v2 = lib.load_plane(vs, keys, C), lib.load_plane(vs + size, keys, C)
            if S.OF_KEYS:
                d_weights = product(o1, tl.trans(v1), K)
                d_weights += product(o2, tl.trans(v2), K)
                if K.AVERAGE:
                    d_weights += product(oo, tl.trans(lib.load_plane(vs + 2 * size, keys, C)), K)
                    d_weights *= inverse
                # If a pair does not count, its inverse gap is 0.
                d_raw = ((weights * inverse) * (d_weights - delta[:, None])).to(K.OPERAND)
                z1 += product(d_raw, x1, K)
                z2 += product(d_raw, x2, K)
                if not SHARED:
                    z3 += product(d_raw, xs, K)
            if S.OF_VALUES:
                weights = value_weights(weights, inverse, K)
                y1 += product(weights, v1, K)
                y2 += product(weights, v2, K)
        if S.OF_KEYS:
            z1 *= turned
            z2 *= turned
            if SHARED:
                m = d_between + entry // PLANES * 2 + channels
                tl.atomic_add(m, tl.sum(z1, 0))
                tl.atomic_add(m + C, tl.sum(z2, 0))
            else:
                f1, f2 = moved_factors(kf, spans.key_matrix + entry, rows, size, C)
                q = lib.load_tokens(t.q, at, rows, inside, channels, K)
                total += f1 * z1 + f2 * z2 + turned * z3
                z1 *= q
                z2 *= q
            if SPECTRAL:
                to = d_factor + 4 * at.row * C
                m = spans.key_matrix + entry
                d_gamma, d_omega2 = add_to_factors(to, kf, m, rows, size, z1, z2, C)
                key_gamma += d_gamma
                key_omega2 += d_omega2
        if S.OF_VALUES:
            o = lib.load_tokens(up.d_out, at, rows, inside, channels, K)
            o *= share
            to = d_factor + 4 * at.row * C + 2 * size
            m = spans.value_matrix + entry
            d_gamma, d_omega2 = add_to_factors(to, vf, m, rows, size, o * y1, o * y2, C)
            value_gamma += d_gamma
            value_omega2 += d_omega2
    if S.OF_KEYS and not SHARED:
        lib.store_plane(grads.q + at.row * C, rows, total, channels, K)
    program = (at.plane * tl.num_programs(0) + chunk) * (2 * C) + channels
    if SPECTRAL and S.OF_KEYS:
        tl.store(grads.k.spectrum + program, key_gamma)
        tl.store(grads.k.spectrum + program + C, key_omega2)
    if S.OF_VALUES:
        tl.store(grads.v.spectrum + program, value_gamma)
        tl.store(grads.v.spectrum + program + C, value_omega2)


@triton.jit
def factors_backward(
    times_ptr, table, d_factor, d_spectrum, sizes, SPAN: tl.constexpr, K: tl.constexpr
):
    """Write, per program, the gradients of gamma and omega^2 from those of the row factors.

    `d_factor` is the first of two planes of ``[B H, 4, padded, C]``.
    """
    at = lib.locate(times_ptr, sizes, K)
    channels = tl.arange(0, K.C)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    t = lib.time_at(at, rows)
    s = (t - lib.time_at(at, (rows // SPAN) * SPAN))[:, None]
    spectrum = cf.load_spectrum(table, at.head, channels, K)
    plane = d_factor + 4 * at.row * K.C
    d_first, d_second = load_factors(plane, rows, at.size, K.C)
    gap = cf.oscillate(s, spectrum, K)
    d_gamma, d_omega2 = cf.row_factors_adjoint(s, gap, spectrum, d_first, d_second, K)
    program = at.plane * tl.num_programs(0) + tl.program_id(0)
    lib.store_spectral(d_spectrum, program, d_gamma, d_omega2, channels, K)


# --- Backward along keys: keys and values, and through them the spectra. --------------------------


@triton.jit
def weigh_rows(x_ptr, times_ptr, factor, weighed, sizes, K: tl.constexpr):
    """Write row factors times the rows ``[B, N, H, C]``: ``[B H, 2, padded, C]``."""
    at = lib.locate(times_ptr, sizes, K)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channels = tl.arange(0, K.C)
    x = lib.load_tokens(x_ptr, at, rows, rows < at.length, channels, K)
    for index in tl.static_range(2):
        plane = 2 * at.plane * at.size + index * at.size
        f = lib.load_plane(factor + plane, rows, K.C).to(tl.float32)
        lib.store_plane(weighed + plane, rows, x * f, channels, K)


@triton.jit
def load_operand(x, at, tokens, inside, K: tl.constexpr):
    """Return rows of one head of ``[B, N, H, C]``, 0 outside, straight as an operand."""
    rows = (at.first_token + tokens).to(tl.int64)
    where = (rows * at.heads + at.head)[:, None] * K.C + tl.arange(0, K.C)[None, :]
    return tl.load(x + where, mask=inside[:, None], other=0.0).to(K.OPERAND)


@triton.jit
def moved_states(state, matrix, keys, size, HAS_THIRD: tl.constexpr, C: tl.constexpr):
    """Return states at the end of a span moved on over the span `matrix`, float32.

    Position, velocity, and with HAS_THIRD the integral; without, what is added to it.
    """
    x1, x2 = load_factors(state, keys, size, C)
    first, second, third = cf.state_of(load_step(matrix, C), x1, x2, True)
    if HAS_THIRD:
        third += lib.load_plane(state + 2 * size, keys, C).to(tl.float32)
    return first, second, third


@triton.jit
def finish_tokens(
    s, side, d_state, d_side, program, at, keys, present, SPECTRAL: tl.constexpr, K: tl.constexpr
):
    """Pull gradients of states after times `s` back to the tokens and their spectrum."""
    HAS_U: tl.constexpr = side.velocity is not None
    channels = tl.arange(0, K.C)
    spectrum = cf.load_spectrum(side.spectrum, at.head, channels, K)
    x, u = lib.load_side(side, at, keys, present, channels, K)
    gap = cf.oscillate(s, spectrum, K)
    d_x, d_u, d_gamma, d_omega2 = cf.aged_state_adjoint(
        s, gap, spectrum, x, u, d_state, HAS_U, SPECTRAL, K
    )
    lib.add_plane(d_side.x + at.row * K.C, keys, d_x, channels, K)
    if HAS_U:
        lib.add_plane(d_side.velocity + at.row * K.C, keys, d_u, channels, K)
    if SPECTRAL:
        lib.store_spectral(d_side.spectrum, program, d_gamma, d_omega2, channels, K)


@triton.jit(do_not_specialize=["GROUP"])
def sweep_keys(
    t, age_ptr, rest_ptr, spans, up, d_bias, grads, sizes, GROUP, S: tl.constexpr, K: tl.constexpr
):
    """Add to the gradients of keys and values; write those of their spectra, per program.

    The factors of `spans` are row factors times queries (not under a shared path) and times
    gradients of outputs (`weigh_rows`). Gradients of spectra are ``[B H, programs, 2, C]``.
    """
    C: tl.constexpr = K.C
    KEYS: tl.constexpr = S.ROWS
    SPAN: tl.constexpr = S.SPAN
    SPECTRAL: tl.constexpr = grads.k.spectrum is not None
    PLANES: tl.constexpr = 18 if SPECTRAL else 6
    SHARED: tl.constexpr = spans.bias is not None
    chunk = tl.program_id(0)
    at = lib.locate(t.times, sizes, K)
    unit, share, unshare, turned = common_factors(sizes, K)
    keys = chunk * KEYS + tl.arange(0, KEYS)
    span = chunk * KEYS // SPAN
    num_spans = (at.length + SPAN - 1) // SPAN
    past = tl.minimum((span // GROUP + 1) * GROUP, num_spans)
    r = lib.time_at(at, (span + 1) * SPAN)
    key_times = lib.time_at(at, keys)
    series_row = tl.program_id(2).to(tl.int64) * sizes.padded
    early = tl.load(rest_ptr + series_row + keys)
    present = lib.present_tokens(t.mask, at, keys)
    size, state, factor = at.size, 3 * at.row * C, 2 * at.row * C
    ks, vs = spans.key_state + state, spans.value_state + state
    qs, os = spans.key_factor + factor, spans.value_factor + factor
    zero = tl.zeros([KEYS, C], tl.float32)
    d_x1, d_x2, d_xs = zero, zero, zero
    d_v1, d_v2, d_vs = zero, zero, zero
    d_integral = tl.zeros([KEYS], tl.float32)
    for row_span in range(span + 1, past):
        entry = (at.plane * num_spans + row_span) * (GROUP * PLANES * C)
        entry += (span % GROUP) * (PLANES * C)
        # Keys move to where the rows' span begins, so that rows need not move for each of them.
        x1, x2, xs = moved_states(ks, spans.key_matrix + entry, keys, size, not SHARED, C)
        if SHARED:
            bias = tl.load(spans.bias + at.row + keys) + tl.sum(xs, 1)
        x1, x2, xs = x1.to(K.OPERAND), x2.to(K.OPERAND), xs.to(K.OPERAND)
        if S.OF_KEYS:
            v1, v2, vi = moved_states(vs, spans.value_matrix + entry, keys, size, True, C)
            v1, v2, vi = v1.to(K.OPERAND), v2.to(K.OPERAND), vi.to(K.OPERAND)
        a1, a2, a3 = zero, zero, zero
        b1, b2, b3 = zero, zero, zero
        d_bias_here = tl.zeros([KEYS], tl.float32)
        between = (tl.load(at.times + row_span * SPAN) - r).to(tl.float32) * unit
        steps = tl.minimum(SPAN, at.length - row_span * SPAN)
        for start in tl.range(0, steps, S.STEP, num_stages=S.STAGES):
            rows = row_span * SPAN + start + tl.arange(0, S.STEP)
            inside = rows < at.length
            q1, q2 = lib.load_plane(qs, rows, C), lib.load_plane(qs + size, rows, C)
            o1, o2 = lib.load_plane(os, rows, C), lib.load_plane(os + size, rows, C)
            late = tl.load(age_ptr + series_row + rows) + between
            lse = lib.load_lse(up.lse + at.row, rows)
            inverse = inverse_gaps(early, late, True)
            if t.mask is not None:
                inverse = tl.where(present[:, None], inverse, 0.0)
            raw = product(x1, tl.trans(q1), K)
            raw += product(x2, tl.trans(q2), K)
            if SHARED:
                raw += bias[:, None]
            else:
                q = load_operand(t.q, at, rows, inside, K)
                raw += product(xs, tl.trans(q), K)
            weights = tl.exp2(tl.minimum(raw * inverse - lse[None, :], 0.0))
            if K.AVERAGE:
                o = load_operand(up.d_out, at, rows, inside, K)
            if S.OF_KEYS:
                delta = tl.load(up.delta + at.row + rows) * unshare
                d_weights = product(v1, tl.trans(o1), K)
                d_weights += product(v2, tl.trans(o2), K)
                if K.AVERAGE:
                    d_weights += product(vi, tl.trans(o), K)
                    d_weights *= inverse
                d_raw = (weights * inverse) * (d_weights - delta[None, :])
                if SHARED:
                    d_bias_here += tl.sum(d_raw, 1)
                d_raw = d_raw.to(K.OPERAND)
                a1 += product(d_raw, q1, K)
                a2 += product(d_raw, q2, K)
                if not SHARED:
                    a3 += product(d_raw, q, K)
            if S.OF_VALUES:
                weights = value_weights(weights, inverse, K)
                b1 += product(weights, o1, K)
                b2 += product(weights, o2, K)
                if K.AVERAGE:
                    b3 += product(weights, o, K)
        if S.OF_KEYS:
            if SHARED:
                a3 += d_bias_here[:, None]
                d_integral += d_bias_here
            else:
                d_xs += a3
            a1, a2 = cf.state_adjoint(load_step(spans.key_matrix + entry, C), a1, a2, a3)
            d_x1 += a1
            d_x2 += a2
        if S.OF_VALUES:
            d_vs += b3
            b1, b2 = cf.state_adjoint(load_step(spans.value_matrix + entry, C), b1, b2, b3)
            d_v1 += b1
            d_v2 += b2

    program = at.plane * tl.num_programs(0) + chunk
    s = (r - key_times)[:, None]
    d_integral *= turned
    if S.OF_KEYS and SHARED:
        tl.store(d_bias + at.row + keys, d_integral)
    if S.OF_KEYS:
        d_state = (d_x1 * turned, d_x2 * turned, d_xs * turned)
        finish_tokens(s, t.k, d_state, grads.k, program, at, keys, present, SPECTRAL, K)
    if S.OF_VALUES:
        d_state = (d_v1 * share, d_v2 * share, d_vs * share)
        finish_tokens(s, t.v, d_state, grads.v, program, at, keys, present, SPECTRAL, K)
