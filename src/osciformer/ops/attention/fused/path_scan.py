"""Integrals of a shared query path over spans of tokens, from its integrals over single gaps."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import load_spectrum, oscillate, pull_back
from osciformer.ops.attention.fused.pieces import time_at


@triton.jit
def _transition(s, spectrum, PRECISE: tl.constexpr):
    """Return the entries 11, 12, 21, 22 of the propagator after time `s`."""
    g11, ct, g12, i12 = oscillate(tl.zeros([1, 1], tl.float64) + s, spectrum, PRECISE)
    return (
        g11.to(tl.float32),
        g12.to(tl.float32),
        (-spectrum[2] * g12).to(tl.float32),
        (g11 - 2.0 * spectrum[1] * g12).to(tl.float32),
    )


@triton.jit
def _transition_adjoint(s, spectrum, to11, to12, to21, to22, PRECISE: tl.constexpr):
    """Return the gradients of gamma and omega^2 from those of `_transition`."""
    gamma, omega2 = spectrum[1], spectrum[2]
    s = tl.zeros([1, 1], tl.float64) + s
    g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
    to_gamma, to_omega2 = pull_back(
        s,
        spectrum,
        ct,
        g12,
        i12,
        to11 + to22,
        to12 - omega2 * to21 - 2.0 * gamma * to22,
        tl.zeros_like(to11),
        PRECISE,
    )
    return to_gamma - 2.0 * g12 * to22, to_omega2 - g12 * to21


@triton.jit
def scan_forward(
    moment_ptr,
    times_ptr,
    table,
    factor_ptr,
    suffix_ptr,
    length,
    padded,
    heads,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the integrals from each span's start to its tokens, and from them to its end.

    `moment_ptr`, `factor_ptr`, `suffix_ptr` are float32 ``[B H, 2, padded, C]``; moments belong to
    the gap after each token. One program takes one span of one head.
    """
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    spectrum = load_spectrum(table, head, C, tl.arange(0, C), PRECISE)
    size = padded.to(tl.int64) * C
    base = (series * heads + head).to(tl.int64) * 2 * size + tl.arange(0, C)[None, :]
    first = tl.program_id(0) * SPAN
    past = tl.minimum(first + SPAN, padded)
    begin = time_at(times, first, length)
    sum1 = tl.zeros([1, C], tl.float32)
    sum2 = tl.zeros([1, C], tl.float32)
    for token in range(first, past):
        at = base + token * C
        tl.store(factor_ptr + at, sum1)
        tl.store(factor_ptr + at + size, sum2)
        p11, p12, p21, p22 = _transition(time_at(times, token, length) - begin, spectrum, PRECISE)
        m1 = tl.load(moment_ptr + at)
        m2 = tl.load(moment_ptr + at + size)
        sum1 += m1 * p11 + m2 * p21
        sum2 += m1 * p12 + m2 * p22
    sum1 = tl.zeros([1, C], tl.float32)
    sum2 = tl.zeros([1, C], tl.float32)
    for back in range(first, past):
        token = first + past - 1 - back
        at = base + token * C
        gap = time_at(times, token + 1, length) - time_at(times, token, length)
        p11, p12, p21, p22 = _transition(gap, spectrum, PRECISE)
        moved1 = tl.load(moment_ptr + at) + sum1 * p11 + sum2 * p21
        sum2 = tl.load(moment_ptr + at + size) + sum1 * p12 + sum2 * p22
        sum1 = moved1
        tl.store(suffix_ptr + at, sum1)
        tl.store(suffix_ptr + at + size, sum2)


@triton.jit
def scan_backward(
    moment_ptr,
    times_ptr,
    table,
    suffix_ptr,
    to_factor,
    to_suffix,
    to_moment,
    to_spectrum,
    length,
    padded,
    heads,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the gradients of moments and, ``[B H, spans, 2, C]``, of gamma and omega^2."""
    series, head = tl.program_id(2), tl.program_id(1)
    times = times_ptr + series.to(tl.int64) * length
    spectrum = load_spectrum(table, head, C, tl.arange(0, C), PRECISE)
    size = padded.to(tl.int64) * C
    plane = (series * heads + head).to(tl.int64)
    base = plane * 2 * size + tl.arange(0, C)[None, :]
    first = tl.program_id(0) * SPAN
    past = tl.minimum(first + SPAN, padded)
    begin = time_at(times, first, length)
    to_gamma = tl.zeros([1, C], tl.float32)
    to_omega2 = tl.zeros([1, C], tl.float32)
    sum1 = tl.zeros([1, C], tl.float32)
    sum2 = tl.zeros([1, C], tl.float32)
    for back in range(first, past):
        token = first + past - 1 - back
        at = base + token * C
        s = time_at(times, token, length) - begin
        p11, p12, p21, p22 = _transition(s, spectrum, PRECISE)
        m1 = tl.load(moment_ptr + at)
        m2 = tl.load(moment_ptr + at + size)
        tl.store(to_moment + at, sum1 * p11 + sum2 * p12)
        tl.store(to_moment + at + size, sum1 * p21 + sum2 * p22)
        more_gamma, more_omega2 = _transition_adjoint(
            s, spectrum, m1 * sum1, m1 * sum2, m2 * sum1, m2 * sum2, PRECISE
        )
        to_gamma += more_gamma.to(tl.float32)
        to_omega2 += more_omega2.to(tl.float32)
        sum1 += tl.load(to_factor + at)
        sum2 += tl.load(to_factor + at + size)
    sum1 = tl.zeros([1, C], tl.float32)
    sum2 = tl.zeros([1, C], tl.float32)
    for token in range(first, past):
        at = base + token * C
        sum1 += tl.load(to_suffix + at)
        sum2 += tl.load(to_suffix + at + size)
        tl.store(to_moment + at, tl.load(to_moment + at) + sum1)
        tl.store(to_moment + at + size, tl.load(to_moment + at + size) + sum2)
        gap = time_at(times, token + 1, length) - time_at(times, token, length)
        # Nothing lies beyond the last token of the span.
        after = base + tl.minimum(token + 1, past - 1) * C
        inner = tl.where(token + 1 < past, 1.0, 0.0)
        s1 = tl.load(suffix_ptr + after) * inner
        s2 = tl.load(suffix_ptr + after + size) * inner
        more_gamma, more_omega2 = _transition_adjoint(
            gap, spectrum, s1 * sum1, s1 * sum2, s2 * sum1, s2 * sum2, PRECISE
        )
        to_gamma += more_gamma.to(tl.float32)
        to_omega2 += more_omega2.to(tl.float32)
        p11, p12, p21, p22 = _transition(gap, spectrum, PRECISE)
        moved1 = sum1 * p11 + sum2 * p12
        sum2 = sum1 * p21 + sum2 * p22
        sum1 = moved1
    at = (plane * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + tl.arange(0, C)[None, :]
    tl.store(to_spectrum + at, to_gamma)
    tl.store(to_spectrum + at + C, to_omega2)
