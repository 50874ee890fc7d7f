r"""Moments of a sum of sinusoids over the gaps between tokens.

For one mode, $e^{iw\sigma}g_{12}(\sigma) = e$ and its integral $\Phi$ are $g_{12}$ and $i_{12}$ of
an oscillator with complex constants: $c = \gamma - iw$ for $\gamma$, and for $\omega^2$
$D = \omega^2 - w^2 - 2i\gamma w$. So all is as for a straight path (`path_linear`): a gap is
halved, a power series serves it, and it is doubled by

$$\Phi \leftarrow (2 - D\Phi)\,\Phi + e^2,\qquad e \leftarrow 2\,(1 - ce - D\Phi)\,e .$$

With $F = \partial e/\partial D$ and $J = \partial\Phi/\partial D$ the derivatives by c are
$\partial e/\partial c = -se - 2cF$ and $\partial\Phi/\partial c = 2F$. A mode in resonance with a
channel is nothing special: D is 0 there, and nothing is divided by it.

The moments of $z\,e^{iw\sigma}$ are the real parts of $z\,(e + (c + \gamma)\Phi)$ and $z\,\Phi$.

All of it is float64 for float32 tokens. Others have no digits for that: gaps that are doubled a few
times only, most of them, are done in float32 with half the terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.path_linear import (
    gaps_after,
    halved,
    halvings,
    load_channels,
)


@triton.jit
def _times(a, b):
    """Return the product of two complex numbers."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


@triton.jit
def _rounded(a, WORK: tl.constexpr):
    """Return a complex number in another precision."""
    return a[0].to(WORK), a[1].to(WORK)


@triton.jit
def mode_integrals(s, c, d, reach, SPECTRAL: tl.constexpr, PRECISE: tl.constexpr):
    """Return e, Phi, F and J after the times `s`; the last two are 0 unless SPECTRAL.

    Arguments are float64, results float32 unless PRECISE.
    """
    count = halvings(reach)
    if PRECISE:
        e, phi, f, j = doubled_series(s, c, d, count, SPECTRAL, tl.float64, 12)
    elif count <= 8:
        # Each doubling doubles the error of a phase: 256 times float32's is below half precision's.
        rounded_c, rounded_d = _rounded(c, tl.float32), _rounded(d, tl.float32)
        # fmt: off
        e, phi, f, j = doubled_series(
            s.to(tl.float32), rounded_c, rounded_d, count, SPECTRAL, tl.float32, 6
        )
        # fmt: on
    else:
        found = doubled_series(s, c, d, count, SPECTRAL, tl.float64, 12)
        e = _rounded(found[0], tl.float32)
        phi = _rounded(found[1], tl.float32)
        f = _rounded(found[2], tl.float32)
        j = _rounded(found[3], tl.float32)
    return e, phi, f, j


@triton.jit
def doubled_series(s, c, d, count, SPECTRAL: tl.constexpr, WORK: tl.constexpr, TERMS: tl.constexpr):
    """Return what `mode_integrals` does in precision WORK, from TERMS terms of the power series.

    TERMS is 12 or 6, the series then starts at 1 / 14! or 1 / 8!.
    """
    h = halved(s, count)
    x = (2.0 * c[0] * h, 2.0 * c[1] * h)
    y = (d[0] * h * h, d[1] * h * h)
    # As in `gap_integrals`.
    inverse = tl.full([], 1 / 87178291200 if TERMS == 12 else 1 / 40320, WORK)
    still = tl.zeros_like(y[0])
    a2 = (still + inverse, still)
    inverse *= TERMS + 2.0
    a1 = (inverse - x[0] * a2[0], still - x[1] * a2[0])
    b2 = (still, still)
    b1 = (still, still)
    for n in tl.static_range(TERMS, 0, -1):
        inverse *= n + 1.0
        if SPECTRAL:
            p = _times(x, b1)
            q = _times(y, b2)
            b2 = b1
            b1 = (-p[0] - q[0] - a2[0], -p[1] - q[1] - a2[1])
        p = _times(x, a1)
        q = _times(y, a2)
        a2 = a1
        a1 = (inverse - p[0] - q[0], -p[1] - q[1])
    e = (h * a1[0], h * a1[1])
    phi = (h * h * a2[0], h * h * a2[1])
    f = (h * h * h * b1[0], h * h * h * b1[1])
    j = (h * h * h * h * b2[0], h * h * h * h * b2[1])
    for _ in range(count):
        p = _times(d, phi)
        q = _times(c, e)
        grow = (2.0 * (1.0 - p[0] - q[0]), -2.0 * (p[1] + q[1]))
        square = _times(e, e)
        if SPECTRAL:
            # d (D Phi) / d D = Phi + D J
            u = _times(d, j)
            u = (phi[0] + u[0], phi[1] + u[1])
            v = _times(c, f)
            ef = _times(e, f)
            more = _times(e, (v[0] + u[0], v[1] + u[1]))
            f = _times(grow, f)
            f = (f[0] - 2.0 * more[0], f[1] - 2.0 * more[1])
            more = _times(phi, u)
            j = _times(j, (2.0 - p[0], -p[1]))
            j = (j[0] - more[0] + 2.0 * ef[0], j[1] - more[1] + 2.0 * ef[1])
        phi = _times(phi, (2.0 - p[0], -p[1]))
        phi = (phi[0] + square[0], phi[1] + square[1])
        e = _times(grow, e)
    return e, phi, f, j


@triton.jit
def _constants(gamma, omega2, w):
    """Return c and D of a mode."""
    zero = tl.zeros_like(gamma)
    return (gamma, zero - w), (omega2 - w * w, -2.0 * gamma * w)


@triton.jit
def _reach(s, gamma, omega2):
    """Return the most that a channel turns within a gap, and the longest gap."""
    rate = tl.maximum(tl.sqrt(omega2), 2.0 * gamma)
    return tl.max(tl.max(rate * s, 1), 0), tl.max(tl.max(s, 1), 0)


@triton.jit
def _load_mode(
    weight_ptr,
    phase_ptr,
    plane,
    first_token,
    rows,
    inside,
    mode,
    modes,
    C,
    channels,
    WORK: tl.constexpr,
):
    """Return cosine and sine of a mode at `rows`, and its complex amplitude z there."""
    at = phase_ptr + ((first_token + rows) * modes + mode)[:, None] * 2
    cos = tl.load(at, mask=inside[:, None], other=0.0).to(WORK)
    sin = tl.load(at + 1, mask=inside[:, None], other=0.0).to(WORK)
    at = weight_ptr + (plane * modes + mode) * 2 * C + channels[None, :]
    a = tl.load(at).to(WORK)
    b = tl.load(at + C).to(WORK)
    return (cos, sin), (a * cos + b * sin, a * sin - b * cos)


@triton.jit(do_not_specialize=["modes"])
def mode_moments(
    weight_ptr,
    phase_ptr,
    bank_ptr,
    times_ptr,
    spectrum_ptr,
    moment_ptr,
    length,
    padded,
    heads,
    modes,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write the moments over the gap after each token, float32 ``[B H, 2, padded, C]``.

    All others are float64: `weight_ptr` ``[B H, modes, 2, C]`` the coefficients of cosine and sine,
    `phase_ptr` ``[B, N, modes, 2]`` cosine and sine at the tokens, `bank_ptr` the frequencies,
    `spectrum_ptr` ``[2, H, C]``. One program takes WIDTH channels of ROWS tokens of one head.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gamma, omega2 = load_channels(spectrum_ptr, head, heads, C, channels)
    s, _ = gaps_after(times, rows, length)
    turned, longest = _reach(s, gamma, omega2)
    WORK: tl.constexpr = tl.float64 if PRECISE else tl.float32
    first = tl.zeros([ROWS, WIDTH], WORK)
    second = tl.zeros([ROWS, WIDTH], WORK)
    damping = gamma.to(WORK)
    for mode in range(modes):
        w = tl.load(bank_ptr + mode)
        c, d = _constants(gamma, omega2, w)
        e, phi, f, j = mode_integrals(s, c, d, turned + tl.abs(w) * longest, False, PRECISE)
        # fmt: off
        basis, z = _load_mode(
            weight_ptr, phase_ptr, plane, first_token, rows, rows < length, mode, modes, C,
            channels, WORK,
        )
        # fmt: on
        u = _times(z, e)
        v = _times(z, phi)
        first += u[0] + 2.0 * damping * v[0] + w.to(WORK) * v[1]
        second += v[0]
    at = moment_ptr + 2 * plane * padded * C + rows[:, None] * C + channels[None, :]
    tl.store(at, first.to(tl.float32))
    tl.store(at + padded.to(tl.int64) * C, second.to(tl.float32))


@triton.jit(do_not_specialize=["modes"])
def mode_moments_adjoint(
    weight_ptr,
    phase_ptr,
    bank_ptr,
    times_ptr,
    origin_ptr,
    spectrum_ptr,
    to_moment,
    to_weight,
    to_bank,
    to_spectrum,
    length,
    padded,
    heads,
    modes,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write, per program, the gradients of coefficients, frequencies, gamma and omega^2.

    `to_weight` is float64 ``[B H, programs, modes, 2, C]``, `to_bank` ``[B H, programs, C, modes]``
    and `to_spectrum` ``[B H, programs, 2, C]``. One program takes STEPS times ROWS tokens.
    """
    series, head = tl.program_id(2), tl.program_id(1) // (C // WIDTH)
    channels = tl.program_id(1) % (C // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    plane = (series * heads + head).to(tl.int64)
    part = plane * tl.num_programs(0) + tl.program_id(0)
    gamma, omega2 = load_channels(spectrum_ptr, head, heads, C, channels)
    origin = tl.load(origin_ptr + series)
    WORK: tl.constexpr = tl.float64 if PRECISE else tl.float32
    to_gamma = tl.zeros([WIDTH], tl.float64)
    to_omega2 = tl.zeros([WIDTH], tl.float64)
    for mode in range(modes):
        w = tl.load(bank_ptr + mode)
        c, d = _constants(gamma, omega2, w)
        to_cos = tl.zeros([WIDTH], tl.float64)
        to_sin = tl.zeros([WIDTH], tl.float64)
        to_w = tl.zeros([WIDTH], tl.float64)
        damping = gamma.to(WORK)
        turn = w.to(WORK)
        for step in range(STEPS):
            rows = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
            inside = rows < length
            s, _ = gaps_after(times, rows, length)
            gap = s.to(WORK)
            turned, longest = _reach(s, gamma, omega2)
            e, phi, f, j = mode_integrals(s, c, d, turned + tl.abs(w) * longest, True, PRECISE)
            # fmt: off
            basis, z = _load_mode(
                weight_ptr, phase_ptr, plane, first_token, rows, inside, mode, modes, C, channels,
                WORK,
            )
            # fmt: on
            at = to_moment + 2 * plane * padded * C + rows[:, None] * C + channels[None, :]
            d1 = tl.load(at, mask=inside[:, None], other=0.0).to(WORK)
            at += padded.to(tl.int64) * C
            d2 = tl.load(at, mask=inside[:, None], other=0.0).to(WORK)
            # The moments of a mode with z = 1, against their gradients.
            nu = (
                d1 * (e[0] + 2.0 * damping * phi[0] + turn * phi[1]) + d2 * phi[0],
                d1 * (e[1] + 2.0 * damping * phi[1] - turn * phi[0]) + d2 * phi[1],
            )
            turned_nu = _times(basis, nu)
            to_cos += tl.sum(turned_nu[0], 0)
            to_sin += tl.sum(turned_nu[1], 0)
            znu = _times(z, nu)
            zphi = _times(z, phi)
            ze = _times(z, e)
            zf = _times(z, f)
            zj = _times(z, j)
            to_phi = (2.0 * damping * d1 + d2, -turn * d1)
            more = _times(to_phi, zj)
            by_d = (d1 * zf[0] + more[0], d1 * zf[1] + more[1])
            more = _times(to_phi, zf)
            cf = _times(_rounded(c, WORK), zf)
            by_c = (
                2.0 * more[0] - d1 * (gap * ze[0] + 2.0 * cf[0]),
                2.0 * more[1] - d1 * (gap * ze[1] + 2.0 * cf[1]),
            )
            to_omega2 += tl.sum(by_d[0], 0)
            to_gamma += tl.sum(by_c[0] + 2.0 * turn * by_d[1] + 2.0 * d1 * zphi[0], 0)
            since = (tl.load(times + tl.minimum(rows, length - 1)) - origin)[:, None].to(WORK)
            more = by_c[1] - 2.0 * (turn * by_d[0] - damping * by_d[1]) + d1 * zphi[1]
            to_w += tl.sum(more - since * znu[1], 0)
        at = to_weight + (part * modes + mode) * (2 * C) + channels
        tl.store(at, to_cos)
        tl.store(at + C, to_sin)
        tl.store(to_bank + (part * C + channels) * modes + mode, to_w)
    at = to_spectrum + part * (2 * C) + channels
    tl.store(at, to_gamma)
    tl.store(at + C, to_omega2)
