"""Triton kernels of the response: integrals over gaps, and the scan along rows, both ways.

They do what `gaps.Channels` and the loops of `scan` do, in float64; a program of the scan has one
lane, one variable and a block of oscillators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Rate times gap up to which power series are used, |discriminant| s^2 up to which an oscillator
# counts as critical, and the terms of the series.
_RADIUS, _NEAR = tl.constexpr(0.25), tl.constexpr(1e-2)
_TERMS, _EXP_TERMS = tl.constexpr(13), tl.constexpr(15)


@triton.jit
def _expm1(z):
    """Return e^z - 1 for z <= 0."""
    x = tl.where(z > -0.5, z, 0.0)
    total = x * 0.0 + 1.0
    for n in tl.static_range(_EXP_TERMS, 1, -1):
        total = 1.0 + x * total / n
    return tl.where(z > -0.5, x * total, tl.exp(z) - 1.0)


@triton.jit
def gap_integrals(
    s_ptr, bank_ptr, out_ptr, rows, channels, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write `gaps.Hats` of gaps ``[R]`` to ``[3 or 6, R, C]``.

    The bank is decay rate, squared frequency, discriminant and fastest rate, ``[4, C]``.
    """
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    size = (program * 0 + rows) * channels  # a size of 1 is a constant, which has no `to`
    is_there = at < size
    s = tl.load(s_ptr + at // channels, mask=is_there, other=1.0)
    bank = bank_ptr + at % channels
    gamma = tl.load(bank, mask=is_there, other=1.0)
    square = tl.load(bank + channels, mask=is_there, other=1.0)
    disc = tl.load(bank + 2 * channels, mask=is_there, other=-1.0)
    rate = tl.load(bank + 3 * channels, mask=is_there, other=1.0)
    is_short = rate * s < _RADIUS

    # Power series: u_n are the homogeneous polynomials of both eigenvalues times s, w_n those of
    # the square of their generating function.
    x = tl.where(is_short, s, 0.0)
    two_x, y = -2.0 * gamma * x, -square * x * x
    u, before = x * 0.0 + 1.0, x * 0.0
    w, w_before = u, before
    i, k, c1, c2 = u / 2.0, u / 6.0, u / 24.0, u / 120.0
    inverse = 1.0 / 2.0
    for n in tl.static_range(1, _TERMS):
        u, before = two_x * u + y * before, u
        # (1 - a z - b z^2)^-2 has (n w_n) = (n + 1) a w_{n-1} + (n + 2) b w_{n-2}.
        w, w_before = (two_x * w * (n + 1) + y * w_before * (n + 2)) / n, w
        inverse = inverse / (n + 2)
        i += u * inverse
        k += u * (inverse / (n + 3))
        if MORE:
            c1 += w * (inverse / ((n + 3) * (n + 4)))
            c2 += w * (inverse / ((n + 3) * (n + 4) * (n + 5)))
    g = 1.0 + two_x * i + y * k
    c = k + two_x * c1 + y * c2

    # Closed forms for gaps that are not short.
    far = tl.where(is_short, 1.0 / rate, s)
    is_over = disc > 0
    root = tl.sqrt(tl.abs(tl.where(disc == 0, 1.0, disc)))
    decay = tl.exp(-gamma * far)
    angle = tl.where(is_over, 0.0, root * far)
    even, odd = decay * tl.cos(angle), decay * tl.sin(angle) / root
    slow = square / rate
    first, second = _expm1(-slow * far), _expm1(-rate * far)
    even = tl.where(is_over, 1.0 + 0.5 * (first + second), even)
    odd = tl.where(is_over, 0.5 * (first - second) / root, odd)
    z = disc * far * far
    is_near = tl.abs(z) < _NEAR
    z = tl.where(is_near, z, 0.0)
    cosh = 1.0 + z * (1 / 2 + z * (1 / 24 + z * (1 / 720 + z * (1 / 40320))))
    sinh = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880))))
    even = tl.where(is_near, decay * cosh, even)
    odd = tl.where(is_near, decay * far * sinh, odd)
    swung = 1.0 - even - gamma * odd
    settled = tl.where(is_over, 0.5 * (slow * second - rate * first) / root, swung)
    settled = tl.where(is_near, swung, settled)
    i12 = settled / square
    k12 = (far - odd - 2.0 * gamma * i12) / square
    r = 1.0 / far
    out = out_ptr + at
    tl.store(out, tl.where(is_short, g, odd * r), mask=is_there)
    tl.store(out + size, tl.where(is_short, i, i12 * r * r), mask=is_there)
    tl.store(out + 2 * size, tl.where(is_short, k, k12 * r * r * r), mask=is_there)
    if MORE:
        wide = (far * even - odd) / (2.0 * tl.where(disc == 0, 1.0, disc))
        series = 1 / 6 + z * (2 / 120 + z * (3 / 5040 + z * (4 / 362880 + z * (5 / 39916800))))
        wide = tl.where(is_near, decay * far * far * far * series, wide)
        wide1 = (i12 - 0.5 * far * odd - gamma * wide) / square
        wide2 = (k12 - wide - 2.0 * gamma * wide1) / square
        tl.store(out + 3 * size, tl.where(is_short, c, wide * r * r * r), mask=is_there)
        tl.store(out + 4 * size, tl.where(is_short, c1, wide1 * r * r * r * r), mask=is_there)
        tl.store(out + 5 * size, tl.where(is_short, c2, wide2 * r * r * r * r * r), mask=is_there)


class Sizes(NamedTuple):
    """Numbers of a segment: of its rows, of lanes, variables, spectra and oscillators.

    Then of rows and chunks of a series, of rows of a chunk, the segment's first row, and how far
    the velocities are from the positions in what is stored.
    """

    rows: Any
    lanes: Any
    variables: Any
    spectra: Any
    oscillators: Any
    all_rows: Any
    chunks: Any
    length: Any
    first: Any
    out_half: Any


@triton.jit
def _place(sizes, BLOCK: tl.constexpr):
    """Return lane, variable, oscillators, which exist, place in the bank, and place of row 0."""
    pair = tl.program_id(0).to(tl.int64)
    lane, f = pair // sizes.variables, pair % sizes.variables
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bank = (f % sizes.spectra) * sizes.oscillators + k
    row = (lane % sizes.chunks) * sizes.length + sizes.first
    at = ((lane // sizes.chunks * sizes.all_rows + row) * sizes.variables + f) * sizes.oscillators
    return lane, f, k, k < sizes.oscillators, bank, row, at + k


@triton.jit
def _load_step(steps_ptr, n, lane, bank, is_there, sizes):
    """Return the factors of both states of a row, and where the others are."""
    width = sizes.spectra * sizes.oscillators
    plane = (lane * 0 + sizes.rows) * sizes.lanes * width
    at = steps_ptr + (n * sizes.lanes + lane) * width + bank
    xx = tl.load(at, mask=is_there, other=0.0)
    vx = tl.load(at + plane, mask=is_there, other=0.0)
    xv = tl.load(at + 2 * plane, mask=is_there, other=0.0)
    vv = tl.load(at + 3 * plane, mask=is_there, other=0.0)
    return xx, vx, xv, vv, at + 4 * plane, plane


@triton.jit
def scan_forward(
    state_ptr,
    steps_ptr,
    drive_ptr,
    change_ptr,
    omega_ptr,
    out_ptr,
    sizes,
    LEVEL: tl.constexpr,
    SLOPE: tl.constexpr,
    KICKS: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move states ``[2, lanes, F, K]`` along a segment in place; store those of its rows.

    Steps are ``[2, 2, R, lanes, 1|F, K]`` and those of level and change, as far as they act.
    """
    lane, f, k, is_there, bank, row, at = _place(sizes, BLOCK)
    apart = sizes.variables * sizes.oscillators
    half = (lane * 0 + sizes.lanes) * apart
    x_ptr = state_ptr + (lane * sizes.variables + f) * sizes.oscillators + k
    x = tl.load(x_ptr, mask=is_there, other=0.0)
    v = tl.load(x_ptr + half, mask=is_there, other=0.0)
    omega = tl.load(omega_ptr + bank, mask=is_there, other=1.0)
    out = out_ptr + at
    for n in range(sizes.rows):
        xx, vx, xv, vv, more, plane = _load_step(steps_ptr, n, lane, bank, is_there, sizes)
        place = (n * sizes.lanes + lane) * sizes.variables + f
        u = tl.load(drive_ptr + place)
        if KICKS:
            v += omega * u
        if STORE:
            is_row = k < tl.where(row + n < sizes.all_rows, sizes.oscillators, 0)
            here = out + n * apart
            tl.store(here, x.to(out_ptr.dtype.element_ty), mask=is_row)
            tl.store(here + sizes.out_half, v.to(out_ptr.dtype.element_ty), mask=is_row)
        x, v = xx * x + xv * v, vx * x + vv * v
        if LEVEL:
            x += tl.load(more, mask=is_there, other=0.0) * u
            v += tl.load(more + plane, mask=is_there, other=0.0) * u
            more += 2 * plane
        if SLOPE:
            change = tl.load(change_ptr + place)
            x += tl.load(more, mask=is_there, other=0.0) * change
            v += tl.load(more + plane, mask=is_there, other=0.0) * change
    tl.store(x_ptr, x, mask=is_there)
    tl.store(x_ptr + half, v, mask=is_there)


@triton.jit
def scan_backward(
    state_ptr, steps_ptr, grad_ptr, kept_ptr, sizes, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Move adjoints ``[2, lanes, F, K]`` against a segment in place; keep those around its gaps.

    Kept are, ``[R, 3, lanes, F, K]``, both after each row's gap and that of the velocity before it.
    """
    lane, f, k, is_there, bank, row, at = _place(sizes, BLOCK)
    apart = sizes.variables * sizes.oscillators
    half = (lane * 0 + sizes.lanes) * apart
    state = (lane * sizes.variables + f) * sizes.oscillators + k
    x = tl.load(state_ptr + state, mask=is_there, other=0.0)
    v = tl.load(state_ptr + half + state, mask=is_there, other=0.0)
    grad = grad_ptr + at
    for m in range(sizes.rows):
        n = sizes.rows - 1 - m
        xx, vx, xv, vv, more, plane = _load_step(steps_ptr, n, lane, bank, is_there, sizes)
        kept = kept_ptr + n * 3 * half + state
        if KEEP:
            tl.store(kept, x, mask=is_there)
            tl.store(kept + half, v, mask=is_there)
        x, v = xx * x + vx * v, xv * x + vv * v
        is_row = k < tl.where(row + n < sizes.all_rows, sizes.oscillators, 0)
        here = grad + n * apart
        x += tl.load(here, mask=is_row, other=0.0).to(tl.float64)
        v += tl.load(here + sizes.out_half, mask=is_row, other=0.0).to(tl.float64)
        if KEEP:
            tl.store(kept + 2 * half, v, mask=is_there)
    tl.store(state_ptr + state, x, mask=is_there)
    tl.store(state_ptr + half + state, v, mask=is_there)
