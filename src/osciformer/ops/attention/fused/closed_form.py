r"""Closed forms of one damped oscillator as device functions, in every damping regime.

`oscillate` gives $g_{11}, g_{12}$ and $i_{12} = \int g_{12}$ after an elapsed time; everything that
the kernels need follows from them (`math/README.md`). Phases are reduced in float64, so that long
times keep their digits; the rest is float32, or float64 where float32 tokens ask for it.

Derivatives with respect to the spectrum need one more function,
$F = \partial g_{12}/\partial\omega^2 = (g_{12} - s\,\tilde c)/(2\sigma^2)$, with $\tilde c =
e^{-\gamma s}\cosh\sigma s$: then $\partial i_{12}/\partial\gamma = 2F$, $\partial
g_{11}/\partial\gamma = -2\omega^2F$, $\partial g_{12}/\partial\gamma = -s g_{12} - 2\gamma F$,
$\partial g_{11}/\partial\omega^2 = \gamma F - s g_{12}/2$.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the table that `build_table` writes: constants of a channel, then coefficients
# of two power series in rate * s, of i12 / s^2 and of -J / s^4, without their leading terms. The
# last one is the head's largest spread, the same for all channels.
NUM_PLANES = tl.constexpr(23)


@triton.jit
def _plane(c, i: tl.constexpr, C: tl.constexpr, PRECISE: tl.constexpr):
    x = tl.load(c + i * C)
    if not PRECISE:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_spectrum(table, head, C: tl.constexpr, channels, PRECISE: tl.constexpr):
    """Return constants of `channels`, ``[W]`` or ``[rows, W]``, of one head.

    The first, turns per time, is float64.
    """
    if len(channels.shape) == 1:
        channels = channels[None, :]
    c = table + head * NUM_PLANES * C + channels
    return (
        tl.load(c),
        _plane(c, 1, C, PRECISE),
        _plane(c, 2, C, PRECISE),
        _plane(c, 3, C, PRECISE),
        _plane(c, 4, C, PRECISE),
        _plane(c, 5, C, PRECISE),
        _plane(c, 6, C, PRECISE),
        _plane(c, 7, C, PRECISE),
        _plane(c, 8, C, PRECISE),
        _plane(c, 9, C, PRECISE),
        _plane(c, 10, C, PRECISE),
        _plane(c, 11, C, PRECISE),
        _plane(c, 12, C, PRECISE),
        _plane(c, 13, C, PRECISE),
        _plane(c, 14, C, PRECISE),
        _plane(c, 15, C, PRECISE),
        _plane(c, 16, C, PRECISE),
        _plane(c, 17, C, PRECISE),
        _plane(c, 18, C, PRECISE),
        _plane(c, 19, C, PRECISE),
        _plane(c, 20, C, PRECISE),
        _plane(c, 21, C, PRECISE),
    )


@triton.jit
def _turn(turns, PRECISE: tl.constexpr):
    """Return cosine and sine of 2 pi turns."""
    f = turns - tl.floor(turns + 0.5)
    if not PRECISE:
        f = f.to(tl.float32)
    return turn(f)


@triton.jit
def turn(f):
    """Return cosine and sine of 2 pi f, |f| <= 1/2, from those of half the angle."""
    h = f * f
    s = h * 0.0004663028 - 0.0073704309
    s = s * h + 0.0821458866
    s = s * h - 0.5992645293
    s = s * h + 2.5501640399
    s = s * h - 5.1677127800
    s = (s * h + 3.1415926536) * f
    c = h * 0.0019295743 - 0.0258068913
    c = c * h + 0.2353306304
    c = c * h - 1.3352627688
    c = c * h + 4.0587121264
    c = c * h - 4.9348022005
    c = c * h + 1.0
    return 1.0 - 2.0 * s * s, 2.0 * s * c


@triton.jit
def oscillate(s, spectrum, PRECISE: tl.constexpr):
    """Return g11, e^{-gamma s} cosh(sigma s), g12 and i12 after the times `s` (float64, >= 0)."""
    nu, gamma, slow, spread = spectrum[0], spectrum[1], spectrum[3], spectrum[4]
    rate, inv_spread = spectrum[6], spectrum[8]
    cos, sin = _turn(s * nu, PRECISE)
    x = s
    if not PRECISE:
        x = s.to(tl.float32)
    z = spectrum[5] * x * x
    near = tl.abs(z) < 0.5
    decay = tl.exp(-tl.where(near, gamma, slow) * x)
    # Underdamped channels have spread 0, overdamped ones nu 0: each leaves the other's factor be.
    second = tl.exp(-spread * x)
    sinh = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880))))
    cosh = 1.0 + z * (0.5 + z * (1 / 24 + z * (1 / 720 + z * (1 / 40320 + z * (1 / 3628800)))))
    g12 = decay * tl.where(near, x * sinh, sin * spectrum[7] + (1.0 - second) * inv_spread)
    ct = decay * tl.where(near, cosh, cos * (0.5 + 0.5 * second))
    g11 = ct + gamma * g12
    y = rate * x
    series = spectrum[15] + y * spectrum[16]
    series = spectrum[13] + y * (spectrum[14] + y * series)
    series = 0.5 + y * (spectrum[11] + y * (spectrum[12] + y * series))
    i12 = tl.where(y < 0.4, x * x * series, (1.0 - g11) * spectrum[9])
    if tl.max(spread) > 0:
        # Far overdamped, 1 - g11 may be nearly nothing: take the two decays apart.
        w = slow * x
        fast = w + spread * x
        slow_decay = tl.exp(-w)
        phi = 1 / 24 - w * (1 / 120 - w * (1 / 720 - w * (1 / 5040)))
        phi = 1.0 - w * (0.5 - w * (1 / 6 - w * phi))
        phi = tl.where(w < 0.4, phi, (1.0 - slow_decay) / tl.where(w < 0.4, 1.0, w))
        faded = (1.0 - slow_decay * second) / tl.where(fast > 0, fast, 1.0)
        is_split = (spread > 0.5 * rate) & (y >= 0.4)
        i12 = tl.where(is_split, x * (phi - faded) * inv_spread, i12)
    return g11, ct, g12, i12


@triton.jit
def spectral_derivatives(s, spectrum, ct, g12, i12, PRECISE: tl.constexpr):
    """Return F = d g12 / d omega^2 and J = d i12 / d omega^2."""
    gamma, slow, spread, rate = spectrum[1], spectrum[3], spectrum[4], spectrum[6]
    inv_spread = spectrum[8]
    x = s
    if not PRECISE:
        x = s.to(tl.float32)
    z = spectrum[5] * x * x
    near = tl.abs(z) < 0.5
    slope = 1 / 6 + z * (1 / 60 + z * (1 / 1680 + z * (1 / 90720 + z * (5 / 39916800))))
    f = tl.where(
        near,
        -tl.exp(-gamma * x) * x * x * x * slope,
        (g12 - x * ct) * spectrum[10],
    )
    y = rate * x
    series = spectrum[19] + y * (spectrum[20] + y * spectrum[21])
    series = 1 / 24 + y * (spectrum[17] + y * (spectrum[18] + y * series))
    j = tl.where(
        y < 0.3,
        -x * x * x * x * series,
        (0.5 * x * g12 - gamma * f - i12) * spectrum[9],
    )
    if tl.max(spread) > 0:
        # Far overdamped that cancels; from the two decays apart it does not.
        w = slow * x
        fast = (slow + spread) * x
        psi = 1 / 8 - w * (1 / 30 - w * (1 / 144 - w * (1 / 840 - w * (1 / 5760))))
        psi = 0.5 - w * (1 / 3 - w * psi)
        decay = tl.exp(-w)
        psi = tl.where(w < 0.4, psi, (1.0 - (1.0 + w) * decay) / tl.where(w < 0.4, 1.0, w * w))
        faded = (1.0 - (1.0 + fast) * tl.exp(-fast)) / tl.where(fast > 0, fast * fast, 1.0)
        apart = (2.0 * i12 - x * x * (psi + faded)) * inv_spread * inv_spread
        j = tl.where((spread > 0.5 * rate) & (y >= 0.3), apart, j)
    return f, j


@triton.jit
def pull_back_through(x, spectrum, g12, f, j, to_g11, to_g12, to_i12):
    """Return the gradients of gamma and omega^2, given the derivatives F and J."""
    gamma, omega2 = spectrum[1], spectrum[2]
    to_gamma = 2.0 * f * (to_i12 - omega2 * to_g11) - (x * g12 + 2.0 * gamma * f) * to_g12
    to_omega2 = (gamma * f - 0.5 * x * g12) * to_g11 + f * to_g12 + j * to_i12
    return to_gamma, to_omega2


@triton.jit
def pull_back(s, spectrum, ct, g12, i12, to_g11, to_g12, to_i12, PRECISE: tl.constexpr):
    """Return the gradients of gamma and omega^2 from those of g11, g12 and i12."""
    f, j = spectral_derivatives(s, spectrum, ct, g12, i12, PRECISE)
    x = s
    if not PRECISE:
        x = s.to(tl.float32)
    return pull_back_through(x, spectrum, g12, f, j, to_g11, to_g12, to_i12)


@triton.jit
def build_table(gamma_ptr, omega2_ptr, table, C: tl.constexpr):
    """Write what `load_spectrum` reads, for one head a program, all in float64."""
    head = tl.program_id(0)
    c = tl.arange(0, C)
    gamma = tl.load(gamma_ptr + head * C + c)
    omega2 = tl.load(omega2_ptr + head * C + c)
    disc = gamma * gamma - omega2
    # gamma and omega come as one rounding each: a critical channel may be off by that much.
    disc = tl.where(tl.abs(disc) <= 1e-15 * omega2, 0.0, disc)
    root = tl.sqrt(tl.abs(disc))
    under = disc < 0
    over = disc > 0
    fast = gamma + root
    slow = tl.where(over, omega2 / tl.where(over, fast, 1.0), gamma)
    spread = tl.where(over, 2.0 * root, 0.0)
    rate = tl.where(over, fast, tl.sqrt(omega2))
    at = table + head * NUM_PLANES * C + c
    tl.store(at, tl.where(under, root * 0.15915494309189535, 0.0))
    tl.store(at + C, gamma)
    tl.store(at + 2 * C, omega2)
    tl.store(at + 3 * C, slow)
    tl.store(at + 4 * C, spread)
    tl.store(at + 5 * C, disc)
    tl.store(at + 6 * C, rate)
    tl.store(at + 7 * C, tl.where(under, 1.0 / tl.where(under, root, 1.0), 0.0))
    tl.store(at + 8 * C, tl.where(over, 1.0 / tl.where(over, spread, 1.0), 0.0))
    tl.store(at + 9 * C, 1.0 / tl.where(omega2 > 0, omega2, 1.0))
    tl.store(at + 10 * C, tl.where(disc == 0, 0.0, 0.5 / tl.where(disc == 0, 1.0, disc)))
    # Power series: 1 / (p^2 + a p + b), inverse Laplace transform term by term; then its square.
    scale = 1.0 / tl.where(rate > 0, rate, 1.0)
    a = 2.0 * gamma * scale
    b = omega2 * scale * scale
    v1 = -a
    v2 = -a * v1 - b
    v3 = -a * v2 - b * v1
    v4 = -a * v3 - b * v2
    v5 = -a * v4 - b * v3
    v6 = -a * v5 - b * v4
    tl.store(at + 11 * C, v1 / 6)
    tl.store(at + 12 * C, v2 / 24)
    tl.store(at + 13 * C, v3 / 120)
    tl.store(at + 14 * C, v4 / 720)
    tl.store(at + 15 * C, v5 / 5040)
    tl.store(at + 16 * C, v6 / 40320)
    tl.store(at + 17 * C, 2.0 * v1 / 120)
    tl.store(at + 18 * C, (2.0 * v2 + v1 * v1) / 720)
    tl.store(at + 19 * C, (2.0 * v3 + 2.0 * v1 * v2) / 5040)
    tl.store(at + 20 * C, (2.0 * v4 + 2.0 * v1 * v3 + v2 * v2) / 40320)
    tl.store(at + 21 * C, (2.0 * v5 + 2.0 * v1 * v4 + 2.0 * v2 * v3) / 362880)
    tl.store(at + 22 * C, tl.max(spread, 0) + tl.zeros_like(spread))
