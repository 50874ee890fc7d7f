"""Gradients of the keys of earlier spans: once along the rows, once along the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum, oscillate
from osciformer.ops.attention.fused.near_backward import row_lse
from osciformer.ops.attention.fused.pieces import (
    aged_state_adjoint,
    load_plane,
    load_tokens,
    product,
    row_factors_adjoint,
    store_plane,
    time_at,
)
from osciformer.ops.attention.fused.sweep_forward import moved_factors


@triton.jit
def checked_inverse(late, early):
    """Return 1 / (late + early), and 0 for zero gaps."""
    gap = late[:, None] + early[None, :]
    root = tl.rsqrt(tl.where(gap > 0, gap, 1.0))
    return tl.where(gap > 0, root * root, 0.0)


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

    `to_factor` has four planes, which are added to: the gradients of both factors, then, through
    the span alone, of gamma and of omega^2, row by row.
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
    more = to_first * (f1 * tl.load(m + 6 * C) + f2 * tl.load(m + 8 * C) + tl.load(m + 10 * C))
    more += to_second * (f1 * tl.load(m + 7 * C) + f2 * tl.load(m + 9 * C) + tl.load(m + 11 * C))
    tl.store(at + 2 * size, tl.load(at + 2 * size) + more)
    more = to_first * (f1 * tl.load(m + 12 * C) + f2 * tl.load(m + 14 * C) + tl.load(m + 16 * C))
    more += to_second * (f1 * tl.load(m + 13 * C) + f2 * tl.load(m + 15 * C) + tl.load(m + 17 * C))
    tl.store(at + 3 * size, tl.load(at + 3 * size) + more)


@triton.jit(do_not_specialize=["GROUP"])
def sweep_rows(
    q_ptr,
    to_out_ptr,
    times_ptr,
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
):
    """Add to the gradients of queries, or, for values, only to those of the spectrum.

    `to_factor` is float32 ``[B H, 4, padded, C]``, set to 0 before (`add_to_factors`). Where rows
    share the query's path, `to_moment` ``[B H, j, i, 2, C]`` collects the gradient of its integrals
    over the spans between.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    own = chunk * ROWS // SPAN
    low = (own // GROUP) * GROUP
    t = time_at(times, rows, length)
    channels = tl.arange(0, C)
    unit = 1.0 / logit_scale
    turned = scale * unit
    q = load_tokens(q_ptr, first_token + rows, inside, head, heads, C, channels)
    o = load_tokens(to_out_ptr, first_token + rows, inside, head, heads, C, channels)
    qo = q.to(OPERAND)
    oo = o.to(OPERAND)
    ks = key_state + 3 * plane * C
    vs = value_state + 3 * plane * C
    kf = key_factor + 2 * plane * C
    vf = value_factor + 2 * plane * C
    num_spans = (length + SPAN - 1) // SPAN
    matrix = ((series * heads + head).to(tl.int64) * num_spans + own) * (GROUP * PLANES * C)
    lse = row_lse(lse_ptr + plane, rows)
    delta = tl.load(delta_ptr + plane + rows)
    total = tl.zeros([ROWS, C], tl.float32)
    if not SHARED:
        total = load_plane(to_q + plane * C, rows, C)
    for back in range(0, own - low):
        span = own - 1 - back
        at = matrix + (span % GROUP) * (PLANES * C)
        f1, f2 = moved_factors(kf, key_matrix + at, rows, size, C)
        if not SHARED:
            f1 *= q
            f2 *= q
        q1 = f1.to(OPERAND)
        q2 = f2.to(OPERAND)
        f1, f2 = moved_factors(vf, value_matrix + at, rows, size, C)
        o1 = (o * f1).to(OPERAND)
        o2 = (o * f2).to(OPERAND)
        r = tl.load(times + (span + 1) * SPAN)
        # Inverse gaps carry the scale of the logits, as in the forward pass.
        late = (t - r).to(tl.float32) * unit
        z1 = tl.zeros([ROWS, C], tl.float32)
        z2 = tl.zeros([ROWS, C], tl.float32)
        y1 = tl.zeros([ROWS, C], tl.float32)
        y2 = tl.zeros([ROWS, C], tl.float32)
        for step in tl.range(0, SPAN // STEP, num_stages=STAGES):
            keys = span * SPAN + step * STEP + tl.arange(0, STEP)
            early = (r - tl.load(times + keys)).to(tl.float32) * unit
            x1 = load_plane(ks, keys, C)
            x2 = load_plane(ks + size, keys, C)
            raw = product(q1, tl.trans(x1), PREC)
            raw += product(q2, tl.trans(x2), PREC)
            if SHARED:
                raw += tl.load(bias_ptr + plane + keys)[None, :]
            else:
                xs = load_plane(ks + 2 * size, keys, C)
                raw += product(qo, tl.trans(xs), PREC)
            inverse = checked_inverse(late, early)
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
                    to_weights *= inverse * unit
                # Where a pair does not count, its inverse gap is 0.
                to_raw = weights * (to_weights - delta[:, None]) * (inverse * turned)
                to_raw = to_raw.to(OPERAND)
                z1 += product(to_raw, x1, PREC)
                z2 += product(to_raw, x2, PREC)
                if not SHARED:
                    total += product(to_raw, xs, PREC)
            else:
                if AVERAGE:
                    weights *= inverse * unit
                else:
                    weights = tl.where(inverse > 0, weights, 0.0)
                weights = weights.to(OPERAND)
                y1 += product(weights, v1, PREC)
                y2 += product(weights, v2, PREC)
        # fmt: off
        if OF_KEYS:
            if SHARED:
                m = to_moment + at // PLANES * 2 + channels
                tl.atomic_add(m, tl.sum(z1, 0))
                tl.atomic_add(m + C, tl.sum(z2, 0))
            else:
                f1, f2 = moved_factors(kf, key_matrix + at, rows, size, C)
                total += f1 * z1 + f2 * z2
                z1 *= q
                z2 *= q
            if SPECTRAL:
                add_to_factors(
                    to_factor + 4 * plane * C, kf, key_matrix + at, rows, size, z1, z2, C,
                )
        else:
            add_to_factors(
                to_factor + 4 * plane * C, vf, value_matrix + at, rows, size, o * y1, o * y2,
                C,
            )
        # fmt: on
    if OF_KEYS and not SHARED:
        store_plane(to_q + plane * C, rows, total, C, channels)


@triton.jit
def finish_tokens(
    s,
    x_ptr,
    u_ptr,
    table,
    to_position,
    to_velocity,
    to_integral,
    to_x_ptr,
    to_u_ptr,
    to_spectrum,
    first_token,
    keys,
    present,
    head,
    heads,
    HAS_U: tl.constexpr,
    SPECTRAL: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Pull gradients of states after times `s` back to the tokens and their spectrum."""
    channels = tl.arange(0, C)
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    x = load_tokens(x_ptr, first_token + keys, present, head, heads, C, channels)
    u = x
    if HAS_U:
        u = load_tokens(u_ptr, first_token + keys, present, head, heads, C, channels)
    g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
    # fmt: off
    to_x, to_u, to_gamma, to_omega2 = aged_state_adjoint(
        s, g11, ct, g12, i12, spectrum, x, u, to_position, to_velocity, to_integral, HAS_U,
        SPECTRAL, PRECISE,
    )
    # fmt: on
    store_plane(to_x_ptr, keys, load_plane(to_x_ptr, keys, C) + to_x, C, channels)
    if HAS_U:
        store_plane(to_u_ptr, keys, load_plane(to_u_ptr, keys, C) + to_u, C, channels)
    if SPECTRAL:
        tl.store(to_spectrum + channels, tl.sum(to_gamma, 0).to(tl.float32))
        tl.store(to_spectrum + C + channels, tl.sum(to_omega2, 0).to(tl.float32))


@triton.jit(do_not_specialize=["GROUP"])
def sweep_keys(
    q_ptr,
    k_ptr,
    ku_ptr,
    v_ptr,
    vu_ptr,
    to_out_ptr,
    times_ptr,
    mask_ptr,
    key_table,
    value_table,
    key_state,
    value_state,
    key_factor,
    value_factor,
    key_matrix,
    value_matrix,
    lse_ptr,
    delta_ptr,
    bias_ptr,
    to_bias,
    to_k,
    to_ku,
    to_v,
    to_vu,
    to_key_spectrum,
    to_value_spectrum,
    length,
    padded,
    heads,
    logit_scale,
    scale,
    SHARED: tl.constexpr,
    HAS_KU: tl.constexpr,
    HAS_VU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPECTRAL: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """Add to the gradients of keys and values; write those of their spectra, per program.

    Of both at once, or of one of them where both would not fit the registers.

    `to_key_spectrum` and `to_value_spectrum` are ``[B H, programs, 2, C]``.
    """
    chunk = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    channels = tl.arange(0, C)
    unit = 1.0 / logit_scale
    turned = scale * unit
    keys = chunk * KEYS + tl.arange(0, KEYS)
    span = chunk * KEYS // SPAN
    num_spans = (length + SPAN - 1) // SPAN
    past = tl.minimum((span // GROUP + 1) * GROUP, num_spans)
    r = time_at(times, (span + 1) * SPAN, length)
    t = time_at(times, keys, length)
    early = (r - t).to(tl.float32) * unit
    present = keys < length
    if HAS_MASK:
        present = tl.load(mask_ptr + first_token + keys, mask=present, other=0) != 0
    ks = key_state + 3 * plane * C
    vs = value_state + 3 * plane * C
    kf = key_factor + 2 * plane * C
    vf = value_factor + 2 * plane * C
    x1 = load_plane(ks, keys, C)
    x2 = load_plane(ks + size, keys, C)
    xs = load_plane(ks + 2 * size, keys, C)
    v1 = load_plane(vs, keys, C)
    v2 = load_plane(vs + size, keys, C)
    vi = load_plane(vs + 2 * size, keys, C)
    to_x1 = tl.zeros([KEYS, C], tl.float32)
    to_x2 = tl.zeros([KEYS, C], tl.float32)
    to_xs = tl.zeros([KEYS, C], tl.float32)
    to_v1 = tl.zeros([KEYS, C], tl.float32)
    to_v2 = tl.zeros([KEYS, C], tl.float32)
    to_vi = tl.zeros([KEYS, C], tl.float32)
    to_integral = tl.zeros([KEYS], tl.float32)
    for row_span in range(span + 1, past):
        at = ((series * heads + head).to(tl.int64) * num_spans + row_span) * (GROUP * PLANES * C)
        at += (span % GROUP) * (PLANES * C)
        steps = tl.minimum(SPAN, length - row_span * SPAN)
        for start in tl.range(0, steps, STEP, num_stages=STAGES):
            rows = row_span * SPAN + start + tl.arange(0, STEP)
            inside = rows < length
            q = load_tokens(q_ptr, first_token + rows, inside, head, heads, C, channels)
            f1, f2 = moved_factors(kf, key_matrix + at, rows, size, C)
            if not SHARED:
                f1 *= q
                f2 *= q
            q1 = f1.to(OPERAND)
            q2 = f2.to(OPERAND)
            qo = q.to(OPERAND)
            o = load_tokens(to_out_ptr, first_token + rows, inside, head, heads, C, channels)
            f1, f2 = moved_factors(vf, value_matrix + at, rows, size, C)
            o1 = (o * f1).to(OPERAND)
            o2 = (o * f2).to(OPERAND)
            oo = o.to(OPERAND)
            late = (time_at(times, rows, length) - r).to(tl.float32) * unit
            lse = row_lse(lse_ptr + plane, rows)
            delta = tl.load(delta_ptr + plane + rows)
            inverse = checked_inverse(early, late)
            if HAS_MASK:
                inverse = tl.where(present[:, None], inverse, 0.0)
            raw = product(x1, tl.trans(q1), PREC)
            raw += product(x2, tl.trans(q2), PREC)
            if SHARED:
                raw += tl.load(bias_ptr + plane + keys)[:, None]
            else:
                raw += product(xs, tl.trans(qo), PREC)
            weights = tl.exp2(tl.minimum(raw * inverse - lse[None, :], 0.0))
            if OF_KEYS:
                to_weights = product(v1, tl.trans(o1), PREC)
                to_weights += product(v2, tl.trans(o2), PREC)
                if AVERAGE:
                    to_weights += product(vi, tl.trans(oo), PREC)
                    to_weights *= inverse * unit
                to_raw = weights * (to_weights - delta[None, :]) * (inverse * turned)
                if SHARED:
                    to_integral += tl.sum(to_raw, 1)
                to_raw = to_raw.to(OPERAND)
                to_x1 += product(to_raw, q1, PREC)
                to_x2 += product(to_raw, q2, PREC)
                if not SHARED:
                    to_xs += product(to_raw, qo, PREC)
            if OF_VALUES:
                if AVERAGE:
                    weights *= inverse * unit
                else:
                    weights = tl.where(inverse > 0, weights, 0.0)
                weights = weights.to(OPERAND)
                to_v1 += product(weights, o1, PREC)
                to_v2 += product(weights, o2, PREC)
                if AVERAGE:
                    to_vi += product(weights, oo, PREC)

    spectra = (series * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    s = (r - t)[:, None]
    # fmt: off
    if OF_KEYS and SHARED:
        tl.store(to_bias + plane + keys, to_integral)
    if OF_KEYS:
        finish_tokens(
            s, k_ptr, ku_ptr, key_table, to_x1, to_x2, to_xs, to_k + plane * C, to_ku + plane * C,
            to_key_spectrum + spectra * (2 * C), first_token, keys, present, head, heads,
            HAS_KU, SPECTRAL, C, PRECISE,
        )
    if OF_VALUES:
        finish_tokens(
            s, v_ptr, vu_ptr, value_table, to_v1, to_v2, to_vi, to_v + plane * C, to_vu + plane * C,
            to_value_spectrum + spectra * (2 * C), first_token, keys, present, head, heads,
            HAS_VU, SPECTRAL, C, PRECISE,
        )
    # fmt: on


@triton.jit
def factors_adjoint(
    times_ptr,
    table,
    to_factor,
    to_spectrum,
    length,
    padded,
    heads,
    SHARED: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write, per program, the gradients of gamma and omega^2 from those of the row factors.

    Factors of a shared path are inputs of their own: then only the spans count.
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
    to_gamma = load_plane(to_factor + plane + 2 * size, rows, C)
    to_omega2 = load_plane(to_factor + plane + 3 * size, rows, C)
    if not SHARED:
        g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
        more_gamma, more_omega2 = row_factors_adjoint(
            s, ct, g12, i12, spectrum, to_first, to_second, AVERAGE, PRECISE
        )
        to_gamma += more_gamma
        to_omega2 += more_omega2
    at = ((series * heads + head).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (2 * C)
    tl.store(to_spectrum + at + channels, tl.sum(to_gamma, 0).to(tl.float32))
    tl.store(to_spectrum + at + C + channels, tl.sum(to_omega2, 0).to(tl.float32))
