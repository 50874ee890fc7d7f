"""Gradients along keys: of keys and values, and through them of the spectra."""

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
    store_plane,
    time_at,
)
from osciformer.ops.attention.fused.sweep_forward import inverse_gaps


@triton.jit
def weigh_rows(
    x_ptr,
    factor,
    weighed,
    length,
    padded,
    heads,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """Write row factors times the rows ``[B, N, H, C]``: ``[B H, 2, padded, C]``."""
    series, head = tl.program_id(2), tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, C)
    first_token = series.to(tl.int64) * length
    x = load_tokens(x_ptr, first_token + rows, rows < length, head, heads, C, channels)
    size = padded.to(tl.int64) * C
    plane = 2 * (series * heads + head).to(tl.int64) * size
    for index in tl.static_range(2):
        at = plane + index * size
        f = load_plane(factor + at, rows, C).to(tl.float32)
        store_plane(weighed + at, rows, x * f, C, channels)


@triton.jit
def load_operand(x, tokens, inside, head, heads, C: tl.constexpr, OPERAND: tl.constexpr):
    """Return rows of one head of ``[tokens, heads, C]``, 0 outside, straight as an operand."""
    at = (tokens.to(tl.int64) * heads + head)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(x + at, mask=inside[:, None], other=0.0).to(OPERAND)


@triton.jit
def moved_states(state, matrix, keys, size, HAS_THIRD: tl.constexpr, C: tl.constexpr):
    """Return states at the end of a span moved on over the span `matrix`.

    Position, velocity, and with HAS_THIRD the integral; without, what is added to it, all float32.
    """
    c = matrix + tl.arange(0, C)[None, :]
    x1 = load_plane(state, keys, C).to(tl.float32)
    x2 = load_plane(state + size, keys, C).to(tl.float32)
    first = x1 * tl.load(c) + x2 * tl.load(c + C)
    second = x1 * tl.load(c + 2 * C) + x2 * tl.load(c + 3 * C)
    third = x1 * tl.load(c + 4 * C) + x2 * tl.load(c + 5 * C)
    if HAS_THIRD:
        third += load_plane(state + 2 * size, keys, C).to(tl.float32)
    return first, second, third


@triton.jit
def moved_back(matrix, to_first, to_second, to_third, C: tl.constexpr):
    """Pull gradients of moved states back to position and velocity."""
    c = matrix + tl.arange(0, C)[None, :]
    to_x1 = to_first * tl.load(c) + to_second * tl.load(c + 2 * C) + to_third * tl.load(c + 4 * C)
    to_x2 = (
        to_first * tl.load(c + C) + to_second * tl.load(c + 3 * C) + to_third * tl.load(c + 5 * C)
    )
    return to_x1, to_x2


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
    age_ptr,
    rest_ptr,
    mask_ptr,
    key_table,
    value_table,
    key_state,
    value_state,
    key_rows,
    value_rows,
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

    `key_rows` and `value_rows` ``[B H, 2, padded, C]`` are row factors times queries (not under a
    shared path) and times gradients of outputs (`weigh_rows`). `to_key_spectrum` and
    `to_value_spectrum` are ``[B H, programs, 2, C]``.
    """
    chunk = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    unit = 1.0 / logit_scale
    # Factors common to all pairs stay out of the loop: that of averages, and that of logits.
    share, unshare = 1.0, 1.0
    if AVERAGE:
        share, unshare = unit, logit_scale
    turned = scale * unit * share
    keys = chunk * KEYS + tl.arange(0, KEYS)
    span = chunk * KEYS // SPAN
    num_spans = (length + SPAN - 1) // SPAN
    past = tl.minimum((span // GROUP + 1) * GROUP, num_spans)
    r = time_at(times, (span + 1) * SPAN, length)
    t = time_at(times, keys, length)
    age = age_ptr + series.to(tl.int64) * padded
    early = tl.load(rest_ptr + series.to(tl.int64) * padded + keys)
    present = keys < length
    if HAS_MASK:
        present = tl.load(mask_ptr + first_token + keys, mask=present, other=0) != 0
    ks = key_state + 3 * plane * C
    vs = value_state + 3 * plane * C
    qs = key_rows + 2 * plane * C
    os = value_rows + 2 * plane * C
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
        # Keys move to where the rows' span begins, so that rows need not move for each of them.
        x1, x2, xs = moved_states(ks, key_matrix + at, keys, size, not SHARED, C)
        if SHARED:
            bias = tl.load(bias_ptr + plane + keys) + tl.sum(xs, 1)
        x1 = x1.to(OPERAND)
        x2 = x2.to(OPERAND)
        xs = xs.to(OPERAND)
        if OF_KEYS:
            v1, v2, vi = moved_states(vs, value_matrix + at, keys, size, True, C)
            v1 = v1.to(OPERAND)
            v2 = v2.to(OPERAND)
            vi = vi.to(OPERAND)
        a1 = tl.zeros([KEYS, C], tl.float32)
        a2 = tl.zeros([KEYS, C], tl.float32)
        a3 = tl.zeros([KEYS, C], tl.float32)
        b1 = tl.zeros([KEYS, C], tl.float32)
        b2 = tl.zeros([KEYS, C], tl.float32)
        b3 = tl.zeros([KEYS, C], tl.float32)
        to_bias_here = tl.zeros([KEYS], tl.float32)
        between = (tl.load(times + row_span * SPAN) - r).to(tl.float32) * unit
        steps = tl.minimum(SPAN, length - row_span * SPAN)
        for start in tl.range(0, steps, STEP, num_stages=STAGES):
            rows = row_span * SPAN + start + tl.arange(0, STEP)
            inside = rows < length
            q1 = load_plane(qs, rows, C)
            q2 = load_plane(qs + size, rows, C)
            o1 = load_plane(os, rows, C)
            o2 = load_plane(os + size, rows, C)
            late = tl.load(age + rows) + between
            lse = row_lse(lse_ptr + plane, rows)
            inverse = inverse_gaps(early, late, True)
            if HAS_MASK:
                inverse = tl.where(present[:, None], inverse, 0.0)
            raw = product(x1, tl.trans(q1), PREC)
            raw += product(x2, tl.trans(q2), PREC)
            if SHARED:
                raw += bias[:, None]
            else:
                q = load_operand(q_ptr, first_token + rows, inside, head, heads, C, OPERAND)
                raw += product(xs, tl.trans(q), PREC)
            weights = tl.exp2(tl.minimum(raw * inverse - lse[None, :], 0.0))
            if AVERAGE:
                o = load_operand(to_out_ptr, first_token + rows, inside, head, heads, C, OPERAND)
            if OF_KEYS:
                delta = tl.load(delta_ptr + plane + rows) * unshare
                to_weights = product(v1, tl.trans(o1), PREC)
                to_weights += product(v2, tl.trans(o2), PREC)
                if AVERAGE:
                    to_weights += product(vi, tl.trans(o), PREC)
                    to_weights *= inverse
                to_raw = (weights * inverse) * (to_weights - delta[None, :])
                if SHARED:
                    to_bias_here += tl.sum(to_raw, 1)
                to_raw = to_raw.to(OPERAND)
                a1 += product(to_raw, q1, PREC)
                a2 += product(to_raw, q2, PREC)
                if not SHARED:
                    a3 += product(to_raw, q, PREC)
            if OF_VALUES:
                if AVERAGE:
                    weights *= inverse
                else:
                    weights = tl.where(inverse > 0, weights, 0.0)
                weights = weights.to(OPERAND)
                b1 += product(weights, o1, PREC)
                b2 += product(weights, o2, PREC)
                if AVERAGE:
                    b3 += product(weights, o, PREC)
        if OF_KEYS:
            if SHARED:
                a3 += to_bias_here[:, None]
                to_integral += to_bias_here
            else:
                to_xs += a3
            a1, a2 = moved_back(key_matrix + at, a1, a2, a3, C)
            to_x1 += a1
            to_x2 += a2
        if OF_VALUES:
            to_vi += b3
            b1, b2 = moved_back(value_matrix + at, b1, b2, b3, C)
            to_v1 += b1
            to_v2 += b2

    spectra = (series * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    s = (r - t)[:, None]
    to_integral *= turned
    # fmt: off
    if OF_KEYS and SHARED:
        tl.store(to_bias + plane + keys, to_integral)
    if OF_KEYS:
        finish_tokens(
            s, k_ptr, ku_ptr, key_table, to_x1 * turned,
            to_x2 * turned, to_xs * turned, to_k + plane * C, to_ku + plane * C,
            to_key_spectrum + spectra * (2 * C), first_token, keys, present, head, heads,
            HAS_KU, SPECTRAL, C, PRECISE,
        )
    if OF_VALUES:
        finish_tokens(
            s, v_ptr, vu_ptr, value_table, to_v1 * share,
            to_v2 * share, to_vi * share, to_v + plane * C, to_vu + plane * C,
            to_value_spectrum + spectra * (2 * C), first_token, keys, present, head, heads,
            HAS_VU, SPECTRAL, C, PRECISE,
        )
    # fmt: on
