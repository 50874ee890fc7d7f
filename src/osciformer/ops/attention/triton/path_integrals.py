r"""Integrals of shared query paths over the gaps between tokens.

A piecewise linear path that goes from a to b within a gap of length s has the integrals

$$b\,(g_{12} + 2\gamma i_{12}) - \tfrac{b - a}{s}(i_{12} + 2\gamma k_{12}),\qquad
b\,i_{12} - \tfrac{b - a}{s}\,k_{12},\qquad k_{12} = \textstyle\int i_{12}.$$

All regimes are one: a gap is halved until a power series serves it, and what that gives for a part
is doubled as often. Neither subtracts what is nearly equal.

For a sinusoidal mode, $e^{iw\sigma}g_{12}(\sigma) = e$ and its integral $\Phi$ are $g_{12}$ and
$i_{12}$ of an oscillator with complex constants: $c = \gamma - iw$ for $\gamma$, and for $\omega^2$
$D = \omega^2 - w^2 - 2i\gamma w$. So all is as for a straight path, with the doubling

$$\Phi \leftarrow (2 - D\Phi)\,\Phi + e^2,\qquad e \leftarrow 2\,(1 - ce - D\Phi)\,e .$$

With $F = \partial e/\partial D$ and $J = \partial\Phi/\partial D$ the derivatives by c are
$\partial e/\partial c = -se - 2cF$ and $\partial\Phi/\partial c = 2F$. A mode in resonance with a
channel is nothing special: D is 0 there, and nothing is divided by it. The integrals of
$z\,e^{iw\sigma}$ are the real parts of $z\,(e + (c + \gamma)\Phi)$ and $z\,\Phi$.

Straight paths are float64. So are modes for float32 tokens. Other tokens have no digits for that:
gaps that are doubled a few times only, most of them, are done in float32 with half the terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import primitives as lib
from osciformer.ops.attention.triton.primitives import WIDTH

#: Tokens a program takes at a time: few, for the arithmetic is float64.
ROWS = tl.constexpr(32)
#: How often, if it writes sums over them.
STEPS = tl.constexpr(4)


class Complex(NamedTuple):
    """A complex number."""

    re: Any
    im: Any


class Modes(NamedTuple):
    """Pointers to the modes of a path, or to gradients, all float64."""

    weight: Any  # coefficients of cosine and sine ``[B H, modes, 2, C]``
    bank: Any  # frequencies ``[modes]``
    phase: Any = None  # cosine and sine at the tokens ``[B, N, modes, 2]``
    origin: Any = None  # the times that phases count from ``[B]``


@triton.jit
def halvings(reach):
    """Return how often `reach`, the most that anything turns, is halved until it is below 1/2."""
    count = 0
    # float64 ends at 2^1024: a number that is not finite must not keep the loop going.
    while (reach > 0.5) & (count < 1025):
        reach *= 0.5
        count += 1
    return count


@triton.jit
def halved(s, count):
    """Return `s` after as many halvings."""
    for _ in range(count):
        s *= 0.5
    return s


@triton.jit
def _reach(s, gamma, omega2):
    """Return the most that a channel turns within a gap, and the longest gap."""
    rate = tl.maximum(tl.sqrt(omega2), 2.0 * gamma)
    return tl.max(tl.max(rate * s, 1), 0), tl.max(tl.max(s, 1), 0)


@triton.jit
def gap_integrals(s, gamma, omega2, SPECTRAL: tl.constexpr):
    """Return g12, i12, k12 after `s`, and their derivatives by omega^2, 0 unless SPECTRAL.

    Those by gamma follow: -s g12 - 2 gamma F, 2 F and 2 J, where F and J are the first two.
    """
    count = halvings(_reach(s, gamma, omega2)[0])
    h = halved(s, count)
    x, y = 2.0 * gamma * h, omega2 * h * h
    # The n-fold integral of g12, over h^(n + 1), is a(n + 1), and a(n) = 1 / n! - x a(n + 1) - y
    # a(n + 2): downwards nothing cancels. b is the derivative of a by y.
    inverse = tl.full([], 1 / 87178291200, tl.float64)
    a2 = tl.zeros_like(y) + inverse
    inverse *= 14.0
    a1 = inverse - x * a2
    b1, b2 = tl.zeros_like(y), tl.zeros_like(y)
    for n in tl.static_range(12, 2, -1):
        inverse *= n + 1.0
        if SPECTRAL:
            b1, b2 = -x * b1 - y * b2 - a2, b1
        a1, a2 = inverse - x * a1 - y * a2, a1
    i = 0.5 - x * a1 - y * a2
    g12 = h * (1.0 - x * i - y * a1)
    i12, k12 = h * h * i, h * h * h * a1
    f, j, el = tl.zeros_like(g12), tl.zeros_like(g12), tl.zeros_like(g12)
    if SPECTRAL:
        b0 = -x * b1 - y * b2 - a2
        f = h * h * h * (-x * b0 - y * b1 - a1)
        j = h * h * h * h * b0
        el = h * h * h * h * h * b1
    for _ in range(count):
        g11 = 1.0 - omega2 * i12
        if SPECTRAL:
            e = -i12 - omega2 * j
            el += h * j + e * k12 + g11 * el + f * i12 + g12 * j
            j += e * i12 + g11 * j + 2.0 * g12 * f
            f = 2.0 * f * (g11 - gamma * g12) + 2.0 * g12 * (e - gamma * f)
        k12 += h * i12 + g11 * k12 + g12 * i12
        i12 += g11 * i12 + g12 * g12
        g12 = 2.0 * g12 * (g11 - gamma * g12)
        h *= 2.0
    return g12, i12, k12, f, j, el


@triton.jit
def locate_channels(times_ptr, spectrum_ptr, sizes, K: tl.constexpr):
    """Return a program's `Place`, its channels, and their gamma and omega^2, ``[1, W]`` float64."""
    at = lib.locate(times_ptr, sizes, K, K.C // WIDTH)
    channels = lib.own_channels(K)
    where = spectrum_ptr + at.head * K.C + channels[None, :]
    return at, channels, tl.load(where), tl.load(where + at.heads * K.C)


@triton.jit
def gaps_after(at, rows):
    """Return the gaps after `rows`, ``[R, 1]`` float64, 0 if there is none, and 1 over them."""
    begin = lib.time_at(at, tl.maximum(rows, 0))
    s = tl.where(rows >= 0, lib.time_at(at, rows + 1) - begin, 0.0)[:, None]
    return s, 1.0 / tl.where(s > 0, s, 1.0)


# --- Piecewise linear paths. ----------------------------------------------------------------------


@triton.jit
def linear_integrals(q_ptr, times_ptr, spectrum_ptr, path_ptr, sizes, K: tl.constexpr):
    """Write the integrals over the gap after each token, float32 ``[B H, 2, padded, C]``.

    `q_ptr` is ``[B, N, H, C]``, `spectrum_ptr` float64 ``[2, H, C]``. One program takes WIDTH
    channels of ROWS tokens of one head.
    """
    at, channels, gamma, omega2 = locate_channels(times_ptr, spectrum_ptr, sizes, K)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, per_time = gaps_after(at, rows)
    a = lib.load_tokens(q_ptr, at, rows, rows < at.length, channels, K)
    b = lib.load_tokens(q_ptr, at, rows + 1, rows + 1 < at.length, channels, K)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, False)
    slope = (b.to(tl.float64) - a) * per_time
    first = b * (g12 + 2.0 * gamma * i12) - slope * (i12 + 2.0 * gamma * k12)
    second = b * i12 - slope * k12
    lib.store_planes(path_ptr + 2 * at.row * K.C, rows, at.size, (first, second), channels, K)


@triton.jit
def linear_integrals_backward(
    q_ptr, times_ptr, spectrum_ptr, d_path, d_q, d_spectrum, sizes, K: tl.constexpr
):
    """Write gradients of tokens, and of gamma and omega^2, float32 ``[B H, programs, 2, C]``."""
    at, channels, gamma, omega2 = locate_channels(times_ptr, spectrum_ptr, sizes, K)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    given = d_path + 2 * at.row * K.C + channels[None, :]

    # The gap before a token, which ends there.
    s, per_time = gaps_after(at, rows - 1)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, False)
    before = given + tl.maximum(rows - 1, 0)[:, None] * K.C
    d_first, d_second = tl.load(before), tl.load(before + at.size)
    d_b = d_first * (g12 + 2.0 * gamma * i12 - (i12 + 2.0 * gamma * k12) * per_time)
    d_b += d_second * (i12 - k12 * per_time)

    s, per_time = gaps_after(at, rows)
    a = lib.load_tokens(q_ptr, at, rows, rows < at.length, channels, K)
    b = lib.load_tokens(q_ptr, at, rows + 1, rows + 1 < at.length, channels, K)
    g12, i12, k12, f, j, el = gap_integrals(s, gamma, omega2, True)
    after = given + rows[:, None] * K.C
    d_first, d_second = tl.load(after), tl.load(after + at.size)
    d_a = (d_first * (i12 + 2.0 * gamma * k12) + d_second * k12) * per_time
    to = ((at.first_token + rows) * at.heads + at.head)[:, None] * K.C + channels[None, :]
    found = (d_a + d_b).to(tl.float32).to(d_q.dtype.element_ty)
    tl.store(d_q + to, found, mask=(rows < at.length)[:, None])

    slope = (b.to(tl.float64) - a) * per_time
    d_g12 = b * d_first
    d_i12 = (2.0 * gamma * b - slope) * d_first + b * d_second
    d_k12 = -slope * (2.0 * gamma * d_first + d_second)
    d_gamma = 2.0 * d_first * (b * i12 - slope * k12) - (s * g12 + 2.0 * gamma * f) * d_g12
    d_gamma += 2.0 * (f * d_i12 + j * d_k12)
    d_omega2 = f * d_g12 + j * d_i12 + el * d_k12
    program = at.plane * tl.num_programs(0) + tl.program_id(0)
    lib.store_spectral(d_spectrum, program, d_gamma, d_omega2, channels, K)


# --- Sums of sinusoids. ---------------------------------------------------------------------------


@triton.jit
def _times(a, b):
    """Return the product of two complex numbers."""
    return Complex(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


@triton.jit
def _rounded(a, WORK: tl.constexpr):
    """Return a complex number in another precision."""
    return Complex(a.re.to(WORK), a.im.to(WORK))


@triton.jit
def _integrals(s, c, d, reach, SPECTRAL: tl.constexpr, K: tl.constexpr):
    """Return e, Phi, F and J after `s` (F, J: 0 unless SPECTRAL), float32 unless PRECISE."""
    count = halvings(reach)
    if K.PRECISE:
        e, phi, f, j = doubled_series(s, c, d, count, SPECTRAL, tl.float64, 12)
    elif count <= 8:
        # Each doubling doubles the error of a phase: 256 times float32's is below half precision's.
        rounded_c, rounded_d = _rounded(c, tl.float32), _rounded(d, tl.float32)
        short = s.to(tl.float32)
        e, phi, f, j = doubled_series(short, rounded_c, rounded_d, count, SPECTRAL, tl.float32, 6)
    else:
        e, phi, f, j = doubled_series(s, c, d, count, SPECTRAL, tl.float64, 12)
        e, phi = _rounded(e, tl.float32), _rounded(phi, tl.float32)
        f, j = _rounded(f, tl.float32), _rounded(j, tl.float32)
    return e, phi, f, j


@triton.jit
def doubled_series(s, c, d, count, SPECTRAL: tl.constexpr, WORK: tl.constexpr, TERMS: tl.constexpr):
    """Return what `_integrals` does in precision WORK, from 12 or 6 terms of the power series."""
    h = halved(s, count)
    x = Complex(2.0 * c.re * h, 2.0 * c.im * h)
    y = Complex(d.re * h * h, d.im * h * h)
    # As in `gap_integrals`, from 1 / 14! or 1 / 8! on.
    inverse = tl.full([], 1 / 87178291200 if TERMS == 12 else 1 / 40320, WORK)
    still = tl.zeros_like(y.re)
    a2 = Complex(still + inverse, still)
    inverse *= TERMS + 2.0
    a1 = Complex(inverse - x.re * a2.re, still - x.im * a2.re)
    b1, b2 = Complex(still, still), Complex(still, still)
    for n in tl.static_range(TERMS, 0, -1):
        inverse *= n + 1.0
        if SPECTRAL:
            p, q = _times(x, b1), _times(y, b2)
            b1, b2 = Complex(-p.re - q.re - a2.re, -p.im - q.im - a2.im), b1
        p, q = _times(x, a1), _times(y, a2)
        a1, a2 = Complex(inverse - p.re - q.re, -p.im - q.im), a1
    e = Complex(h * a1.re, h * a1.im)
    phi = Complex(h * h * a2.re, h * h * a2.im)
    f = Complex(h * h * h * b1.re, h * h * h * b1.im)
    j = Complex(h * h * h * h * b2.re, h * h * h * h * b2.im)
    for _ in range(count):
        p, q = _times(d, phi), _times(c, e)
        grow = Complex(2.0 * (1.0 - p.re - q.re), -2.0 * (p.im + q.im))
        square = _times(e, e)
        if SPECTRAL:
            # d (D Phi) / d D = Phi + D J
            u = _times(d, j)
            u = Complex(phi.re + u.re, phi.im + u.im)
            v, ef = _times(c, f), _times(e, f)
            more = _times(e, Complex(v.re + u.re, v.im + u.im))
            f = _times(grow, f)
            f = Complex(f.re - 2.0 * more.re, f.im - 2.0 * more.im)
            more = _times(phi, u)
            j = _times(j, Complex(2.0 - p.re, -p.im))
            j = Complex(j.re - more.re + 2.0 * ef.re, j.im - more.im + 2.0 * ef.im)
        phi = _times(phi, Complex(2.0 - p.re, -p.im))
        phi = Complex(phi.re + square.re, phi.im + square.im)
        e = _times(grow, e)
    return e, phi, f, j


@triton.jit
def _constants(gamma, omega2, w):
    """Return c and D of a mode."""
    zero = tl.zeros_like(gamma)
    return Complex(gamma, zero - w), Complex(omega2 - w * w, -2.0 * gamma * w)


@triton.jit
def _load_mode(
    modes, at, rows, inside, mode, num_modes, channels, WORK: tl.constexpr, K: tl.constexpr
):
    """Return cosine and sine of a mode at `rows`, and its complex amplitude z there."""
    where = modes.phase + ((at.first_token + rows) * num_modes + mode)[:, None] * 2
    cos = tl.load(where, mask=inside[:, None], other=0.0).to(WORK)
    sin = tl.load(where + 1, mask=inside[:, None], other=0.0).to(WORK)
    where = modes.weight + (at.plane * num_modes + mode) * 2 * K.C + channels[None, :]
    a = tl.load(where).to(WORK)
    b = tl.load(where + K.C).to(WORK)
    return Complex(cos, sin), Complex(a * cos + b * sin, a * sin - b * cos)


@triton.jit(do_not_specialize=["num_modes"])
def mode_integrals(modes, times_ptr, spectrum_ptr, path_ptr, sizes, num_modes, K: tl.constexpr):
    """Write the integrals over the gap after each token, as `linear_integrals` does."""
    at, channels, gamma, omega2 = locate_channels(times_ptr, spectrum_ptr, sizes, K)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, _ = gaps_after(at, rows)
    turned, longest = _reach(s, gamma, omega2)
    WORK: tl.constexpr = tl.float64 if K.PRECISE else tl.float32
    first, second = tl.zeros([ROWS, WIDTH], WORK), tl.zeros([ROWS, WIDTH], WORK)
    damping = gamma.to(WORK)
    for mode in range(num_modes):
        w = tl.load(modes.bank + mode)
        c, d = _constants(gamma, omega2, w)
        e, phi, f, j = _integrals(s, c, d, turned + tl.abs(w) * longest, False, K)
        inside = rows < at.length
        basis, z = _load_mode(modes, at, rows, inside, mode, num_modes, channels, WORK, K)
        u, v = _times(z, e), _times(z, phi)
        first += u.re + 2.0 * damping * v.re + w.to(WORK) * v.im
        second += v.re
    lib.store_planes(path_ptr + 2 * at.row * K.C, rows, at.size, (first, second), channels, K)


@triton.jit(do_not_specialize=["num_modes"])
def mode_integrals_backward(
    modes, times_ptr, spectrum_ptr, d_path, d_modes, d_spectrum, sizes, num_modes, K: tl.constexpr
):
    """Write, per program, the gradients of coefficients, frequencies, gamma and omega^2.

    All float64: coefficients ``[B H, programs, modes, 2, C]``, frequencies ``[B H, programs, C,
    modes]`` and `d_spectrum` ``[B H, programs, 2, C]``. One program takes STEPS times ROWS tokens.
    """
    at, channels, gamma, omega2 = locate_channels(times_ptr, spectrum_ptr, sizes, K)
    part = at.plane * tl.num_programs(0) + tl.program_id(0)
    origin = tl.load(modes.origin + tl.program_id(2))
    WORK: tl.constexpr = tl.float64 if K.PRECISE else tl.float32
    d_gamma, d_omega2 = tl.zeros([WIDTH], tl.float64), tl.zeros([WIDTH], tl.float64)
    for mode in range(num_modes):
        w = tl.load(modes.bank + mode)
        c, d = _constants(gamma, omega2, w)
        d_cos, d_sin = tl.zeros([WIDTH], tl.float64), tl.zeros([WIDTH], tl.float64)
        d_w = tl.zeros([WIDTH], tl.float64)
        damping, turn = gamma.to(WORK), w.to(WORK)
        for step in range(STEPS):
            rows = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
            inside = rows < at.length
            s, _ = gaps_after(at, rows)
            gap = s.to(WORK)
            turned, longest = _reach(s, gamma, omega2)
            e, phi, f, j = _integrals(s, c, d, turned + tl.abs(w) * longest, True, K)
            basis, z = _load_mode(modes, at, rows, inside, mode, num_modes, channels, WORK, K)
            given = d_path + 2 * at.row * K.C + rows[:, None] * K.C + channels[None, :]
            d1 = tl.load(given, mask=inside[:, None], other=0.0).to(WORK)
            d2 = tl.load(given + at.size, mask=inside[:, None], other=0.0).to(WORK)
            # The integrals of a mode with z = 1, against their gradients.
            nu = Complex(
                d1 * (e.re + 2.0 * damping * phi.re + turn * phi.im) + d2 * phi.re,
                d1 * (e.im + 2.0 * damping * phi.im - turn * phi.re) + d2 * phi.im,
            )
            turned_nu = _times(basis, nu)
            d_cos += tl.sum(turned_nu.re, 0)
            d_sin += tl.sum(turned_nu.im, 0)
            znu, zphi, ze = _times(z, nu), _times(z, phi), _times(z, e)
            zf, zj = _times(z, f), _times(z, j)
            d_phi = Complex(2.0 * damping * d1 + d2, -turn * d1)
            more = _times(d_phi, zj)
            by_d = Complex(d1 * zf.re + more.re, d1 * zf.im + more.im)
            more = _times(d_phi, zf)
            cf = _times(_rounded(c, WORK), zf)
            by_c = Complex(
                2.0 * more.re - d1 * (gap * ze.re + 2.0 * cf.re),
                2.0 * more.im - d1 * (gap * ze.im + 2.0 * cf.im),
            )
            d_omega2 += tl.sum(by_d.re, 0)
            d_gamma += tl.sum(by_c.re + 2.0 * turn * by_d.im + 2.0 * d1 * zphi.re, 0)
            since = (lib.time_at(at, rows) - origin)[:, None].to(WORK)
            more = by_c.im - 2.0 * (turn * by_d.re - damping * by_d.im) + d1 * zphi.im
            d_w += tl.sum(more - since * znu.im, 0)
        to = d_modes.weight + (part * num_modes + mode) * (2 * K.C) + channels
        tl.store(to, d_cos)
        tl.store(to + K.C, d_sin)
        tl.store(d_modes.bank + (part * K.C + channels) * num_modes + mode, d_w)
    to = d_spectrum + part * (2 * K.C) + channels
    tl.store(to, d_gamma)
    tl.store(to + K.C, d_omega2)
