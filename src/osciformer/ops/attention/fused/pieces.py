"""Device functions that several kernels share: states, row factors, the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.closed_form import oscillate, pull_back, spectral_derivatives


@triton.jit
def product(a, b, PREC: tl.constexpr):
    """Return a @ b with float32 sums."""
    if PREC == "upcast":
        # The interpreter cannot multiply bfloat16; its float32 products of them are the same.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PREC)


@triton.jit
def load_tokens(x, rows, inside, head, heads, C: tl.constexpr, channels):
    """Return `channels` of rows of one head of ``[tokens, heads, C]`` as float32, 0 outside."""
    at = (rows.to(tl.int64) * heads + head)[:, None] * C + channels[None, :]
    return tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_plane(x, rows, C: tl.constexpr):
    """Return ``[rows, C]`` of a plane ``[padded, C]``; every row exists."""
    return tl.load(x + rows[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def store_plane(x, rows, value, C: tl.constexpr, channels):
    """Store `channels` of rows to a plane ``[padded, C]``."""
    at = x + rows[:, None] * C + channels[None, :]
    tl.store(at, value.to(x.dtype.element_ty))


@triton.jit
def aged_state(g11, g12, i12, spectrum, x, u, HAS_VELOCITY: tl.constexpr):
    """Return position, velocity and integral of tokens that started as (x, u)."""
    gamma, omega2 = spectrum[1], spectrum[2]
    m1 = g12 + 2.0 * gamma * i12
    position = g11 * x
    velocity = -omega2 * g12 * x
    integral = m1 * x
    if HAS_VELOCITY:
        position += g12 * u
        velocity += (g11 - 2.0 * gamma * g12) * u
        integral += i12 * u
    return position.to(tl.float32), velocity.to(tl.float32), integral.to(tl.float32)


@triton.jit
def row_factors(g11, g12, i12, spectrum, AVERAGE: tl.constexpr):
    """Return what a row multiplies position and velocity at its reference time with.

    The integral of the propagator's first row, or for point values that row itself.
    """
    first, second = g11, g12
    if AVERAGE:
        first, second = g12 + 2.0 * spectrum[1] * i12, i12
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def aged_state_adjoint(
    s,
    g11,
    ct,
    g12,
    i12,
    spectrum,
    x,
    u,
    to_position,
    to_velocity,
    to_integral,
    HAS_VELOCITY: tl.constexpr,
    SPECTRAL: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Return the gradients of x, u, gamma and omega^2 from those of `aged_state`."""
    gamma, omega2 = spectrum[1], spectrum[2]
    to_x = to_position * g11 - omega2 * g12 * to_velocity + (g12 + 2.0 * gamma * i12) * to_integral
    to_u = to_position * g12 + (g11 - 2.0 * gamma * g12) * to_velocity + i12 * to_integral
    to_gamma = tl.zeros_like(to_x)
    to_omega2 = tl.zeros_like(to_x)
    if SPECTRAL:
        to_g11 = to_position * x
        to_g12 = to_integral * x - omega2 * to_velocity * x
        to_i12 = 2.0 * gamma * to_integral * x
        if HAS_VELOCITY:
            to_g11 += to_velocity * u
            to_g12 += (to_position - 2.0 * gamma * to_velocity) * u
            to_i12 += to_integral * u
        to_gamma, to_omega2 = pull_back(s, spectrum, ct, g12, i12, to_g11, to_g12, to_i12, PRECISE)
        to_gamma += 2.0 * i12 * to_integral * x
        to_omega2 -= g12 * to_velocity * x
        if HAS_VELOCITY:
            to_gamma -= 2.0 * g12 * to_velocity * u
    return to_x.to(tl.float32), to_u.to(tl.float32), to_gamma, to_omega2


@triton.jit
def row_factors_adjoint(
    s,
    ct,
    g12,
    i12,
    spectrum,
    to_first,
    to_second,
    AVERAGE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Return the gradients of gamma and omega^2 from those of `row_factors`."""
    gamma = spectrum[1]
    to_g11 = to_first
    to_g12 = to_second
    to_i12 = tl.zeros_like(to_first)
    if AVERAGE:
        to_g11 = tl.zeros_like(to_first)
        to_g12 = to_first
        to_i12 = 2.0 * gamma * to_first + to_second
    to_gamma, to_omega2 = pull_back(s, spectrum, ct, g12, i12, to_g11, to_g12, to_i12, PRECISE)
    if AVERAGE:
        to_gamma += 2.0 * i12 * to_first
    return to_gamma, to_omega2


@triton.jit
def soften(top, mass, logits):
    """Return the new top, the new mass, the weights and the factor of what was summed before."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - shift)
    weights = tl.exp2(logits - shift[:, None])
    return new_top, mass * keep + tl.sum(weights, 1), weights, keep


@triton.jit
def row_lse(lse_ptr, rows):
    """Return logsumexps for use in a backward pass: rows that saw nothing get weights 0."""
    lse = tl.load(lse_ptr + rows)
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def time_at(times, index, length):
    """Return times by index, the last one beyond the end."""
    return tl.load(times + tl.minimum(index, length - 1))


@triton.jit
def compose(a, b, spectrum):
    """Return g11, g12, i12 after two spans of time; both are functions of the same matrix A."""
    gamma, omega2 = spectrum[1], spectrum[2]
    g11 = a[0] * b[0] - omega2 * (a[1] * b[1])
    g12 = a[0] * b[1] + a[1] * (b[0] - 2.0 * gamma * b[1])
    i12 = a[2] + a[0] * b[2] + a[1] * b[1]
    return g11, g12, i12


@triton.jit
def pick(x, index):
    """Return ``x[index[i, c], c]``; float64 goes in two halves of float32."""
    if x.dtype == tl.float64:
        high = x.to(tl.float32)
        low = (x - high.to(tl.float64)).to(tl.float32)
        return tl.gather(high, index, 0).to(tl.float64) + tl.gather(low, index, 0).to(tl.float64)
    return tl.gather(x, index, 0)


@triton.jit
def climb(prefix, suffix, spectrum, n, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return prefixes and suffixes of blocks of 2 n tokens from those of n.

    A prefix runs from the first token of a token's block to the token, a suffix from the token to
    the first token of the next block. The suffix of a block's first token is the whole block.
    """
    place = tl.arange(0, TILE)
    late = ((place & n) != 0)[:, None]
    sibling = tl.broadcast_to(((place ^ n) & (TILE - n))[:, None], (TILE, WIDTH))
    other = (
        pick(suffix[0], sibling),
        pick(suffix[1], sibling),
        pick(suffix[2], sibling),
    )
    own = (
        tl.where(late, prefix[0], suffix[0]),
        tl.where(late, prefix[1], suffix[1]),
        tl.where(late, prefix[2], suffix[2]),
    )
    longer = compose(own, other, spectrum)
    prefix = (
        tl.where(late, longer[0], prefix[0]),
        tl.where(late, longer[1], prefix[1]),
        tl.where(late, longer[2], prefix[2]),
    )
    suffix = (
        tl.where(late, suffix[0], longer[0]),
        tl.where(late, suffix[1], longer[1]),
        tl.where(late, suffix[2], longer[2]),
    )
    return prefix, suffix


@triton.jit
def compose_with_slopes(a, b, s_a, s_b, spectrum):
    """Return g11, g12, i12, F and J after two spans of time, by the product rule.

    F and J are the derivatives of g12 and i12 by omega^2 (`closed_form`); that of g11 follows.
    """
    gamma = spectrum[1]
    g11, g12, i12 = compose((a[0], a[1], a[2]), (b[0], b[1], b[2]), spectrum)
    slope_a = gamma * a[3] - 0.5 * s_a * a[1]
    slope_b = gamma * b[3] - 0.5 * s_b * b[1]
    f = slope_a * b[1] + a[0] * b[3] + a[3] * (b[0] - 2.0 * gamma * b[1])
    f += a[1] * (slope_b - 2.0 * gamma * b[3])
    j = a[4] + slope_a * b[2] + a[0] * b[4] + a[3] * b[1] + a[1] * b[3]
    return g11, g12, i12, f, j


@triton.jit
def climb_with_slopes(
    prefix,
    suffix,
    s_own,
    s_other,
    spectrum,
    n,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Do what `climb` does, for five planes.

    Args:
        prefix: From the first token of each token's block of n to the token.
        suffix: From the token to the first token of the next block.
        s_own: Duration of what grows: of prefixes in the later block of two, else of suffixes.
        s_other: Duration of the other block of the two.
        spectrum: Constants of the channels.
        n: Tokens a block.
        TILE: Tokens.
        WIDTH: Channels.
    """
    place = tl.arange(0, TILE)
    late = ((place & n) != 0)[:, None]
    sibling = tl.broadcast_to(((place ^ n) & (TILE - n))[:, None], (TILE, WIDTH))
    other = (
        pick(suffix[0], sibling),
        pick(suffix[1], sibling),
        pick(suffix[2], sibling),
        pick(suffix[3], sibling),
        pick(suffix[4], sibling),
    )
    own = (
        tl.where(late, prefix[0], suffix[0]),
        tl.where(late, prefix[1], suffix[1]),
        tl.where(late, prefix[2], suffix[2]),
        tl.where(late, prefix[3], suffix[3]),
        tl.where(late, prefix[4], suffix[4]),
    )
    longer = compose_with_slopes(own, other, s_own, s_other, spectrum)
    prefix = (
        tl.where(late, longer[0], prefix[0]),
        tl.where(late, longer[1], prefix[1]),
        tl.where(late, longer[2], prefix[2]),
        tl.where(late, longer[3], prefix[3]),
        tl.where(late, longer[4], prefix[4]),
    )
    suffix = (
        tl.where(late, suffix[0], longer[0]),
        tl.where(late, suffix[1], longer[1]),
        tl.where(late, suffix[2], longer[2]),
        tl.where(late, suffix[3], longer[3]),
        tl.where(late, suffix[4], longer[4]),
    )
    return prefix, suffix


@triton.jit
def bottom_with_slopes(gap, spectrum, PRECISE: tl.constexpr):
    """Do what `bottom` does, for five planes."""
    g11, ct, g12, i12 = oscillate(gap, spectrum, PRECISE)
    f, j = spectral_derivatives(gap, spectrum, ct, g12, i12, PRECISE)
    still = tl.zeros_like(g11)
    return (still + 1.0, still, still, still, still), (g11, g12, i12, f, j)


@triton.jit
def bottom(gap, spectrum, PRECISE: tl.constexpr):
    """Return prefixes and suffixes of blocks of one token, from the gaps to the next tokens."""
    g11, ct, g12, i12 = oscillate(gap, spectrum, PRECISE)
    still = tl.zeros_like(g11)
    return (still + 1.0, still, still), (g11, g12, i12)
