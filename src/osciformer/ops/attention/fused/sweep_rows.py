"""Gradients along rows: of queries, and of the spectra through row factors and spans."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum, oscillate
from osciformer.ops.attention.fused.near_backward import row_lse
from osciformer.ops.attention.fused.pieces import (
    load_plane,
    load_tokens,
    product,
    row_factors_adjoint,
    store_plane,
    time_at,
)
from osciformer.ops.attention.fused.sweep_forward import inverse_gaps, moved_factors


@triton.jit
def add_to_factors(
    to_factor,
    factor,
    matrix,
    rows,
    size,
    to_first,
    to_second,
    C: tl.constexpr,
):
    """Pull gradients of moved row factors back.

    `to_factor` has two planes, which are added to: the gradients of both factors. Returned are,
    through the span alone, those of gamma and of omega^2, ``[C]``.
    """
    c = tl.arange(0, C)[None, :]
    f1 = load_plane(factor, rows, C).to(tl.float32)
    f2 = load_plane(factor + size, rows, C).to(tl.float32)
    at = to_factor + rows[:, None] * C + c
    m = matrix + c
    more = to_first * tl.load(m) + to_second * tl.load(m + C)
    tl.store(at, tl.load(at) + more)
    more = to_first * tl.load(m + 2 * C) + to_second * tl.load(m + 3 * C)
    tl.store(at + size, tl.load(at + size) + more)
    to_gamma = to_first * (f1 * tl.load(m + 6 * C) + f2 * tl.load(m + 8 * C) + tl.load(m + 10 * C))
    to_gamma += to_second * (
        f1 * tl.load(m + 7 * C) + f2 * tl.load(m + 9 * C) + tl.load(m + 11 * C)
    )
    to_omega2 = to_first * (
        f1 * tl.load(m + 12 * C) + f2 * tl.load(m + 14 * C) + tl.load(m + 16 * C)
    )
    to_omega2 += to_second * (
        f1 * tl.load(m + 13 * C) + f2 * tl.load(m + 15 * C) + tl.load(m + 17 * C)
    )
    return tl.sum(to_gamma, 0), tl.sum(to_omega2, 0)


@triton.jit(do_not_specialize=["GROUP"])
def sweep_rows(
    q_ptr,
    to_out_ptr,
    times_ptr,
    rest_ptr,
    mask_ptr,
    key_state,
    value_state,
    key_factor,
    value_factor,
    key_matrix,
    value_matrix,
    lse_ptr,
    delta_ptr,
    bias_ptr,
    to_q,
    to_factor,
    to_moment,
    to_key_spectrum,
    to_value_spectrum,
    length,
    padded,
    heads,
    logit_scale,
    scale,
    SHARED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """Add to the gradients of queries, and write those of the spectra through rows and spans.

    Values have no gradient of their own along rows, only their spectrum has. Of both at once, or of
    one of them where both would not fit the registers.

    `to_factor` is float32 ``[B H, 4, padded, C]``, set to 0 before: both factors of keys, then
    those of values (`add_to_factors`). `to_key_spectrum` and `to_value_spectrum`, through the
    spans alone, are ``[B H, programs, 2, C]``. Where rows share the query's path, `to_moment`
    ``[B H, j, i, 2, C]`` collects the gradient of its integrals over the spans between.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
    times = times_ptr + series.to(tl.int64) * length
    rest = rest_ptr + series.to(tl.int64) * padded
    first_token = series.to(tl.int64) * length
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    own = chunk * ROWS // SPAN
    low = (own // GROUP) * GROUP
    t = time_at(times, rows, length)
    channels = tl.arange(0, C)
    unit = 1.0 / logit_scale
    # Factors common to all pairs stay out of the loop: that of averages, and that of logits.
    share, unshare = 1.0, 1.0
    if AVERAGE:
        share, unshare = unit, logit_scale
    turned = scale * unit * share
    ks = key_state + 3 * plane * C
    vs = value_state + 3 * plane * C
    kf = key_factor + 2 * plane * C
    vf = value_factor + 2 * plane * C
    num_spans = (length + SPAN - 1) // SPAN
    matrix = ((series * heads + head).to(tl.int64) * num_spans + own) * (GROUP * PLANES * C)
    lse = row_lse(lse_ptr + plane, rows)
    delta = tl.load(delta_ptr + plane + rows) * unshare
    total = tl.zeros([ROWS, C], tl.float32)
    if not SHARED:
        total = load_plane(to_q + plane * C, rows, C)
    key_gamma = tl.zeros([C], tl.float32)
    key_omega2 = tl.zeros([C], tl.float32)
    value_gamma = tl.zeros([C], tl.float32)
    value_omega2 = tl.zeros([C], tl.float32)
    for back in range(0, own - low):
        span = own - 1 - back
        at = matrix + (span % GROUP) * (PLANES * C)
        # Tokens are read where they are needed: registers are what this kernel lacks.
        q = load_tokens(q_ptr, first_token + rows, inside, head, heads, C, channels)
        qo = q.to(OPERAND)
        f1, f2 = moved_factors(kf, key_matrix + at, rows, size, C)
        if not SHARED:
            f1 *= q
            f2 *= q
        q1 = f1.to(OPERAND)
        q2 = f2.to(OPERAND)
        if OF_KEYS:
            o = load_tokens(to_out_ptr, first_token + rows, inside, head, heads, C, channels)
            oo = o.to(OPERAND)
            f1, f2 = moved_factors(vf, value_matrix + at, rows, size, C)
            o1 = (o * f1).to(OPERAND)
            o2 = (o * f2).to(OPERAND)
        r = tl.load(times + (span + 1) * SPAN)
        # Inverse gaps carry the scale of the logits, as in the forward pass.
        late = (t - r).to(tl.float32) * unit
        z1 = tl.zeros([ROWS, C], tl.float32)
        z2 = tl.zeros([ROWS, C], tl.float32)
        z3 = tl.zeros([ROWS, C], tl.float32)
        y1 = tl.zeros([ROWS, C], tl.float32)
        y2 = tl.zeros([ROWS, C], tl.float32)
        for step in tl.range(0, SPAN // STEP, num_stages=STAGES):
            keys = span * SPAN + step * STEP + tl.arange(0, STEP)
            early = tl.load(rest + keys)
            x1 = load_plane(ks, keys, C)
            x2 = load_plane(ks + size, keys, C)
            raw = product(q1, tl.trans(x1), PREC)
            raw += product(q2, tl.trans(x2), PREC)
            if SHARED:
                raw += tl.load(bias_ptr + plane + keys)[None, :]
            else:
                xs = load_plane(ks + 2 * size, keys, C)
                raw += product(qo, tl.trans(xs), PREC)
            inverse = inverse_gaps(late, early, True)
            if HAS_MASK:
                present = tl.load(mask_ptr + first_token + keys) != 0
                inverse = tl.where(present[None, :], inverse, 0.0)
            # Weights are at most 1; a pair that does not count must not overflow.
            weights = tl.exp2(tl.minimum(raw * inverse - lse[:, None], 0.0))
            v1 = load_plane(vs, keys, C)
            v2 = load_plane(vs + size, keys, C)
            if OF_KEYS:
                to_weights = product(o1, tl.trans(v1), PREC)
                to_weights += product(o2, tl.trans(v2), PREC)
                if AVERAGE:
                    to_weights += product(oo, tl.trans(load_plane(vs + 2 * size, keys, C)), PREC)
                    to_weights *= inverse
                # Where a pair does not count, its inverse gap is 0.
                to_raw = (weights * inverse) * (to_weights - delta[:, None])
                to_raw = to_raw.to(OPERAND)
                z1 += product(to_raw, x1, PREC)
                z2 += product(to_raw, x2, PREC)
                if not SHARED:
                    z3 += product(to_raw, xs, PREC)
            if OF_VALUES:
                if AVERAGE:
                    weights *= inverse
                else:
                    weights = tl.where(inverse > 0, weights, 0.0)
                weights = weights.to(OPERAND)
                y1 += product(weights, v1, PREC)
                y2 += product(weights, v2, PREC)
        # fmt: off
        if OF_KEYS:
            z1 *= turned
            z2 *= turned
            if SHARED:
                m = to_moment + at // PLANES * 2 + channels
                tl.atomic_add(m, tl.sum(z1, 0))
                tl.atomic_add(m + C, tl.sum(z2, 0))
            else:
                f1, f2 = moved_factors(kf, key_matrix + at, rows, size, C)
                q = load_tokens(q_ptr, first_token + rows, inside, head, heads, C, channels)
                total += f1 * z1 + f2 * z2 + turned * z3
                z1 *= q
                z2 *= q
            if SPECTRAL:
                to_gamma, to_omega2 = add_to_factors(
                    to_factor + 4 * plane * C, kf, key_matrix + at, rows, size, z1, z2, C,
                )
                key_gamma += to_gamma
                key_omega2 += to_omega2
        if OF_VALUES:
            o = load_tokens(to_out_ptr, first_token + rows, inside, head, heads, C, channels)
            o *= share
            to_gamma, to_omega2 = add_to_factors(
                to_factor + 4 * plane * C + 2 * size, vf, value_matrix + at, rows, size, o * y1,
                o * y2, C,
            )
            value_gamma += to_gamma
            value_omega2 += to_omega2
        # fmt: on
    if OF_KEYS and not SHARED:
        store_plane(to_q + plane * C, rows, total, C, channels)
    spectra = (series * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    if SPECTRAL and OF_KEYS:
        tl.store(to_key_spectrum + spectra * (2 * C) + channels, key_gamma)
        tl.store(to_key_spectrum + spectra * (2 * C) + C + channels, key_omega2)
    if OF_VALUES:
        tl.store(to_value_spectrum + spectra * (2 * C) + channels, value_gamma)
        tl.store(to_value_spectrum + spectra * (2 * C) + C + channels, value_omega2)


@triton.jit
def factors_adjoint(
    times_ptr,
    table,
    to_factor,
    to_spectrum,
    length,
    padded,
    heads,
    AVERAGE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write, per program, the gradients of gamma and omega^2 from those of the row factors.

    `to_factor` is the first of two planes of ``[B H, 4, padded, C]``.
    """
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    channels = tl.arange(0, C)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = time_at(times, rows, length)
    s = (t - time_at(times, (rows // SPAN) * SPAN, length))[:, None]
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    plane = 4 * (series * heads + head).to(tl.int64) * padded * C
    size = padded.to(tl.int64) * C
    to_first = load_plane(to_factor + plane, rows, C)
    to_second = load_plane(to_factor + plane + size, rows, C)
    _, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
    to_gamma, to_omega2 = row_factors_adjoint(
        s, ct, g12, i12, spectrum, to_first, to_second, AVERAGE, PRECISE
    )
    at = ((series * heads + head).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (2 * C)
    tl.store(to_spectrum + at + channels, tl.sum(to_gamma, 0).to(tl.float32))
    tl.store(to_spectrum + at + C + channels, tl.sum(to_omega2, 0).to(tl.float32))
