"""The closed form of a gap in as few instructions as it takes.

`closed_form.oscillate` serves every regime by evaluating all of them and choosing. Where that
happens once per token, it is most of the work. Here, for products below float32, channels that are
not overdamped need no series about critical damping: sin(sigma s) / sigma keeps its digits however
small sigma is. Overdamped channels are a branch that is taken where a head has any.

What the kernels use of the functions are the propagator over a time and the integral of its first
row, six numbers a channel (`step_matrix`), and their derivatives by the spectrum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import (
    NUM_PLANES,
    load_spectrum,
    oscillate,
    spectral_derivatives,
    turn,
)

# Adding it rounds a float64 to an integer, eight times as fast as `floor` does.
_ROUNDING = tl.constexpr(6755399441055744.0)


@triton.jit
def load_form(table, head, C: tl.constexpr, channels, PRECISE: tl.constexpr):
    """Return what `gap_functions` needs, and the head's largest spread, above 0 if overdamped.

    gamma and omega^2 stand where `load_spectrum` has them. `channels` is ``[rows, W]``: all tensors
    then get the layout of the tokens.
    """
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    form = spectrum
    if not PRECISE:
        form = (
            spectrum[0],
            spectrum[1],
            spectrum[2],
            spectrum[3] * -1.4426950408889634,
            spectrum[6],
            spectrum[7],
            tl.where(spectrum[5] == 0.0, 1.0, 0.0),
            spectrum[9],
            spectrum[11],
            spectrum[12],
            spectrum[13],
            spectrum[14],
            spectrum[15],
            spectrum[16],
            spectrum[4],
        )
    return form, tl.load(table + head * NUM_PLANES * C + 22 * C)


@triton.jit
def _overdamped(x, ct, g12, i12, form):
    """Return ct, g12 and i12 of overdamped channels, the given ones of others."""
    spread = form[14]
    over = spread > 0
    inv_spread = 1.0 / tl.where(over, spread, 1.0)
    w = form[3] * -0.6931471805599453 * x
    slow_decay = tl.exp(-w)
    second = tl.exp(-spread * x)
    z = 0.25 * spread * spread * x * x
    near = z < 0.5
    decay = tl.where(near, tl.exp(-form[1] * x), slow_decay)
    sinh = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880))))
    cosh = 1.0 + z * (0.5 + z * (1 / 24 + z * (1 / 720 + z * (1 / 40320 + z * (1 / 3628800)))))
    g12 = tl.where(over, decay * tl.where(near, x * sinh, (1.0 - second) * inv_spread), g12)
    ct = tl.where(over, decay * tl.where(near, cosh, 0.5 + 0.5 * second), ct)
    i12 = tl.where(over, (1.0 - ct - form[1] * g12) * form[7], i12)
    # Far overdamped, 1 - g11 may be nearly nothing: take the two decays apart.
    fast = w + spread * x
    phi = 1 / 24 - w * (1 / 120 - w * (1 / 720 - w * (1 / 5040)))
    phi = 1.0 - w * (0.5 - w * (1 / 6 - w * phi))
    phi = tl.where(w < 0.4, phi, (1.0 - slow_decay) / tl.where(w < 0.4, 1.0, w))
    faded = (1.0 - slow_decay * second) / tl.where(fast > 0, fast, 1.0)
    i12 = tl.where(spread > 0.5 * form[4], x * (phi - faded) * inv_spread, i12)
    return ct, g12, i12


@triton.jit
def _gap_functions(s, form, widest):
    turns = s * form[0]
    cos, sin = turn((turns - ((turns + _ROUNDING) - _ROUNDING)).to(tl.float32))
    x = s.to(tl.float32)
    decay = tl.exp2(form[3] * x)
    # The second term is for critical damping alone.
    g12 = decay * (sin * form[5] + x * form[6])
    ct = decay * cos
    i12 = (1.0 - ct - form[1] * g12) * form[7]
    if widest > 0:
        ct, g12, i12 = _overdamped(x, ct, g12, i12, form)
    y = form[4] * x
    series = form[12] + y * form[13]
    series = form[10] + y * (form[11] + y * series)
    series = 0.5 + y * (form[8] + y * (form[9] + y * series))
    return ct + form[1] * g12, ct, g12, tl.where(y < 0.4, x * x * series, i12)


@triton.jit
def gap_functions(s, form, widest, PRECISE: tl.constexpr):
    """Return g11, e^{-gamma s} cosh(sigma s), g12 and i12 after the times `s`, as `oscillate`."""
    if PRECISE:
        g11 = s + form[1]
        ct, g12, i12 = g11, g11, g11
        # Always true, but without a branch the compiler would evaluate all of it anew for each
        # layout that a product wants.
        if widest >= 0:
            g11, ct, g12, i12 = oscillate(s, form, PRECISE)
    else:
        g11, ct, g12, i12 = _gap_functions(s, form, widest)
    return g11, ct, g12, i12


@triton.jit
def load_slopes(table, head, C: tl.constexpr, channels, PRECISE: tl.constexpr):
    """Return what `gap_slopes` needs beside the form."""
    spectrum = load_spectrum(table, head, C, channels, PRECISE)
    return (
        spectrum[5],
        spectrum[10],
        spectrum[17],
        spectrum[18],
        spectrum[19],
        spectrum[20],
        spectrum[21],
    )


@triton.jit
def _gap_slopes(s, form, slopes, ct, g12, i12, widest):
    gamma, spread = form[1], form[14]
    x = s.to(tl.float32)
    z = slopes[0] * x * x
    decay = tl.exp2(gamma * -1.4426950408889634 * x)
    slope = 1 / 6 + z * (1 / 60 + z * (1 / 1680 + z * (1 / 90720 + z * (5 / 39916800))))
    f = tl.where(tl.abs(z) < 0.5, -decay * x * x * x * slope, (g12 - x * ct) * slopes[1])
    y = form[4] * x
    series = slopes[4] + y * (slopes[5] + y * slopes[6])
    series = 1 / 24 + y * (slopes[2] + y * (slopes[3] + y * series))
    j = (0.5 * x * g12 - gamma * f - i12) * form[7]
    if widest > 0:
        # Far overdamped that cancels; from the two decays apart it does not.
        w = form[3] * -0.6931471805599453 * x
        fast = w + spread * x
        psi = 1 / 8 - w * (1 / 30 - w * (1 / 144 - w * (1 / 840 - w * (1 / 5760))))
        psi = 0.5 - w * (1 / 3 - w * psi)
        late = (1.0 - (1.0 + w) * tl.exp(-w)) / tl.where(w < 0.4, 1.0, w * w)
        psi = tl.where(w < 0.4, psi, late)
        faded = (1.0 - (1.0 + fast) * tl.exp(-fast)) / tl.where(fast > 0, fast * fast, 1.0)
        inv_spread = 1.0 / tl.where(spread > 0, spread, 1.0)
        apart = (2.0 * i12 - x * x * (psi + faded)) * inv_spread * inv_spread
        j = tl.where(spread > 0.5 * form[4], apart, j)
    return f, tl.where(y < 0.3, -x * x * x * x * series, j)


@triton.jit
def gap_slopes(s, form, slopes, ct, g12, i12, widest, PRECISE: tl.constexpr):
    """Return F = d g12 / d omega^2 and J = d i12 / d omega^2, as `spectral_derivatives`."""
    if PRECISE:
        found = spectral_derivatives(s, form, ct, g12, i12, PRECISE)
    else:
        found = _gap_slopes(s, form, slopes, ct, g12, i12, widest)
    return found


@triton.jit
def step_matrix(g11, g12, i12, spectrum):
    """Return the propagator over a gap and the integral of its first row, in float32."""
    gamma, omega2 = spectrum[1], spectrum[2]
    velocity = -omega2 * g12
    decay = g11 - 2.0 * gamma * g12
    first = g12 + 2.0 * gamma * i12
    return (
        g11.to(tl.float32),
        g12.to(tl.float32),
        velocity.to(tl.float32),
        decay.to(tl.float32),
        first.to(tl.float32),
        i12.to(tl.float32),
    )


@triton.jit
def slope_matrix(s, g12, f, j, form, PRECISE: tl.constexpr):
    """Return the derivatives by omega^2 of what `step_matrix` returns, in float32."""
    gamma, omega2 = form[1], form[2]
    x = s
    if not PRECISE:
        x = s.to(tl.float32)
    g11 = gamma * f - 0.5 * x * g12
    velocity = -g12 - omega2 * f
    decay = g11 - 2.0 * gamma * f
    first = f + 2.0 * gamma * j
    return (
        g11.to(tl.float32),
        f.to(tl.float32),
        velocity.to(tl.float32),
        decay.to(tl.float32),
        first.to(tl.float32),
        j.to(tl.float32),
    )


@triton.jit
def damping_matrix(s, g12, f, j, form, PRECISE: tl.constexpr):
    """Return the derivatives by gamma of what `step_matrix` returns, in float32."""
    gamma, omega2 = form[1], form[2]
    x = s
    if not PRECISE:
        x = s.to(tl.float32)
    g11 = -2.0 * omega2 * f
    by_g12 = -x * g12 - 2.0 * gamma * f
    velocity = -omega2 * by_g12
    decay = g11 - 2.0 * g12 - 2.0 * gamma * by_g12
    first = -2.0 * omega2 * j
    second = 2.0 * f
    return (
        g11.to(tl.float32),
        by_g12.to(tl.float32),
        velocity.to(tl.float32),
        decay.to(tl.float32),
        first.to(tl.float32),
        second.to(tl.float32),
    )
