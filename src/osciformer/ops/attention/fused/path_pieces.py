"""Device functions for query paths that all rows share: propagators that climb, and their adjoints.

The integral of a path over the gap after token g, against the first row of the propagator from
the gap's start, is the pair m: its *moment*. Key i gains m . x_i(t_g) over that gap, so a logit is
the sum of what its key gains over the gaps from key to row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import oscillate, spectral_derivatives
from osciformer.ops.attention.fused.pieces import load_tokens, pick


@triton.jit
def moved_back(m1, m2, g11, g12, spectrum):
    """Return the row (m1, m2) times the propagator: a moment as seen from the span's start."""
    gamma, omega2 = spectrum[1], spectrum[2]
    first = m1 * g11 - omega2 * (m2 * g12)
    second = m1 * g12 + m2 * (g11 - 2.0 * gamma * g12)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def moved_on(x, u, g11, g12, spectrum):
    """Return the propagator times the column (x, u): position and velocity at the span's end."""
    gamma, omega2 = spectrum[1], spectrum[2]
    position = g11 * x + g12 * u
    velocity = (g11 - 2.0 * gamma * g12) * u - omega2 * (g12 * x)
    return position.to(tl.float32), velocity.to(tl.float32)


@triton.jit
def spectral_adjoint(s, g12, f, spectrum, l1, l2, r1, r2):
    """Return the gradients of gamma and omega^2 of (l1, l2) P (r1, r2), P the propagator after s.

    f is the derivative of g12 by omega^2; all others follow (`closed_form`).
    """
    gamma, omega2 = spectrum[1], spectrum[2]
    to_g11 = l1 * r1 + l2 * r2
    to_g12 = l1 * r2 - omega2 * (l2 * r1) - 2.0 * gamma * (l2 * r2)
    to_gamma = -2.0 * omega2 * f * to_g11 - (s * g12 + 2.0 * gamma * f) * to_g12
    to_omega2 = (gamma * f - 0.5 * s * g12) * to_g11 + f * to_g12
    return to_gamma - 2.0 * g12 * (l2 * r2), to_omega2 - g12 * (l2 * r1)


@triton.jit
def propagator(s, spectrum, PRECISE: tl.constexpr):
    """Return g11 and g12 after the times `s` (float64)."""
    g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
    return g11, g12


@triton.jit
def propagator_with_slope(s, spectrum, PRECISE: tl.constexpr):
    """Return g11, g12 and the derivative F of g12 by omega^2 after the times `s` (float64)."""
    g11, ct, g12, i12 = oscillate(s, spectrum, PRECISE)
    f, j = spectral_derivatives(s, spectrum, ct, g12, i12, PRECISE)
    return g11, g12, f


@triton.jit
def load_moment(moment_ptr, plane, tokens, size, C: tl.constexpr, channels):
    """Return both numbers of the moments of `tokens` from ``[B H, 2, padded, C]``."""
    at = moment_ptr + 2 * plane * C + tokens[:, None] * C + channels[None, :]
    return tl.load(at), tl.load(at + size)


@triton.jit
def sum_before(x, ROWS: tl.constexpr):
    """Return for each row the sum of the rows of `x` before it, float32.

    As a product with zeros and ones, so that nothing is shifted across threads.
    """
    place = tl.arange(0, ROWS)
    ones = tl.where(place[:, None] > place[None, :], 1.0, 0.0)
    return tl.dot(ones, x, input_precision="tf32x3")


@triton.jit
def sum_after(x, ROWS: tl.constexpr):
    """Return for each row the sum of the rows of `x` after it, float32."""
    place = tl.arange(0, ROWS)
    ones = tl.where(place[:, None] < place[None, :], 1.0, 0.0)
    return tl.dot(ones, x, input_precision="tf32x3")


@triton.jit
def load_velocity(
    u_ptr, rows, inside, head, heads, C: tl.constexpr, channels, HAS_VELOCITY: tl.constexpr
):
    """Do what `load_tokens` does; velocities that are not given are 0."""
    if HAS_VELOCITY:
        return load_tokens(u_ptr, rows, inside, head, heads, C, channels)
    return tl.zeros([rows.shape[0], channels.shape[0]], tl.float32)


@triton.jit
def climb_propagator(prefix, suffix, spectrum, n, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Do what `pieces.climb` does, for g11 and g12 alone."""
    gamma, omega2 = spectrum[1], spectrum[2]
    place = tl.arange(0, TILE)
    late = ((place & n) != 0)[:, None]
    sibling = tl.broadcast_to(((place ^ n) & (TILE - n))[:, None], (TILE, WIDTH))
    b11 = pick(suffix[0], sibling)
    b12 = pick(suffix[1], sibling)
    a11 = tl.where(late, prefix[0], suffix[0])
    a12 = tl.where(late, prefix[1], suffix[1])
    g11 = a11 * b11 - omega2 * (a12 * b12)
    g12 = a11 * b12 + a12 * (b11 - 2.0 * gamma * b12)
    prefix = (tl.where(late, g11, prefix[0]), tl.where(late, g12, prefix[1]))
    suffix = (tl.where(late, suffix[0], g11), tl.where(late, suffix[1], g12))
    return prefix, suffix


@triton.jit
def climb_with_slope(
    prefix, suffix, s_own, s_other, spectrum, n, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Do what `pieces.climb_with_slopes` does, for g11, g12 and F."""
    gamma, omega2 = spectrum[1], spectrum[2]
    place = tl.arange(0, TILE)
    late = ((place & n) != 0)[:, None]
    sibling = tl.broadcast_to(((place ^ n) & (TILE - n))[:, None], (TILE, WIDTH))
    b11 = pick(suffix[0], sibling)
    b12 = pick(suffix[1], sibling)
    bf = pick(suffix[2], sibling)
    a11 = tl.where(late, prefix[0], suffix[0])
    a12 = tl.where(late, prefix[1], suffix[1])
    af = tl.where(late, prefix[2], suffix[2])
    g11 = a11 * b11 - omega2 * (a12 * b12)
    g12 = a11 * b12 + a12 * (b11 - 2.0 * gamma * b12)
    # The derivative of g11 by omega^2 is gamma F - s g12 / 2.
    f = (gamma * af - 0.5 * s_own * a12) * b12 + a11 * bf + af * (b11 - 2.0 * gamma * b12)
    f += a12 * (gamma * bf - 0.5 * s_other * b12 - 2.0 * gamma * bf)
    prefix = (
        tl.where(late, g11, prefix[0]),
        tl.where(late, g12, prefix[1]),
        tl.where(late, f, prefix[2]),
    )
    suffix = (
        tl.where(late, suffix[0], g11),
        tl.where(late, suffix[1], g12),
        tl.where(late, suffix[2], f),
    )
    return prefix, suffix
