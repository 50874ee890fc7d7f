r"""Closed forms of one damped oscillator as device functions, in every damping regime.

`oscillate` returns $g_{11}, g_{12}$ and $i_{12} = \int g_{12}$ after an elapsed time; everything
that the kernels need follows from them (`math/README.md`). Phases are reduced in float64, so that
long times keep their digits; the rest is float32, or float64 for float32 tokens.

Derivatives with respect to the spectrum need one more function,
$F = \partial g_{12}/\partial\omega^2 = (g_{12} - s\,\tilde c)/(2\sigma^2)$, with $\tilde c =
e^{-\gamma s}\cosh\sigma s$: then $\partial i_{12}/\partial\gamma = 2F$, $\partial
g_{11}/\partial\gamma = -2\omega^2F$, $\partial g_{12}/\partial\gamma = -s g_{12} - 2\gamma F$,
$\partial g_{11}/\partial\omega^2 = \gamma F - s g_{12}/2$.

`oscillate` evaluates every regime and selects, which is most of the work of kernels that do it once
per token. `gap_functions` does the same in fewer instructions for products below float32: channels
that are not overdamped need no series about critical damping, because sin(sigma s) / sigma keeps
its digits however small sigma is. Overdamped channels are a branch, taken if a head has any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Planes of the table that `build_table` writes: the fields of `Spectrum`, then the head's largest
# spread, the same for all channels.
NUM_PLANES = tl.constexpr(23)
# Adding it rounds a float64 to an integer, eight times as fast as `floor` does.
_ROUNDING = tl.constexpr(6755399441055744.0)


class Spectrum(NamedTuple):
    """Constants of channels, in the order of the table's planes; `turns` (per time) is float64."""

    turns: Any  # damped frequency / 2 pi, 0 unless underdamped
    gamma: Any
    omega2: Any
    slow: Any  # the slower decay rate
    spread: Any  # the faster decay rate minus the slower one, 0 unless overdamped
    disc: Any  # sigma^2 = gamma^2 - omega^2
    rate: Any  # bounds how fast anything changes
    inv_root: Any  # 1 / |sigma| if underdamped, else 0
    inv_spread: Any
    inv_omega2: Any
    half_inv_disc: Any
    # Coefficients of two power series in rate * s, without their leading terms.
    i1: Any  # i12 / s^2
    i2: Any
    i3: Any
    i4: Any
    i5: Any
    i6: Any
    j1: Any  # -J / s^4
    j2: Any
    j3: Any
    j4: Any
    j5: Any
    widest: Any  # the head's largest spread, a scalar: above 0 if a channel is overdamped
    exponent: Any  # -slow log2(e)
    is_critical: Any  # 1 or 0


class Gap(NamedTuple):
    """The closed form after a time: g11, e^{-gamma s} cosh(sigma s), g12 and i12."""

    g11: Any
    ct: Any
    g12: Any
    i12: Any


class Span(NamedTuple):
    """g11, g12 and i12 after a time."""

    g11: Any
    g12: Any
    i12: Any


class Step(NamedTuple):
    """The propagator over a time and the integral of its first row, or derivatives of them."""

    p11: Any
    p12: Any
    p21: Any
    p22: Any
    i11: Any
    i12: Any


@triton.jit
def _constants(gamma, omega2):
    """Return the fields of `Spectrum` up to `j5` from float64 numbers, in float64."""
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
    turns = tl.where(under, root * 0.15915494309189535, 0.0)
    inv_root = tl.where(under, 1.0 / tl.where(under, root, 1.0), 0.0)
    inv_spread = tl.where(over, 1.0 / tl.where(over, spread, 1.0), 0.0)
    inv_omega2 = 1.0 / tl.where(omega2 > 0, omega2, 1.0)
    half_inv_disc = tl.where(disc == 0, 0.0, 0.5 / tl.where(disc == 0, 1.0, disc))
    planes = (turns, gamma, omega2, slow, spread, disc, rate)
    planes = planes + (inv_root, inv_spread, inv_omega2, half_inv_disc)  # noqa: RUF005
    planes = planes + (v1 / 6, v2 / 24, v3 / 120, v4 / 720, v5 / 5040, v6 / 40320)  # noqa: RUF005
    return planes + (  # noqa: RUF005
        2.0 * v1 / 120,
        (2.0 * v2 + v1 * v1) / 720,
        (2.0 * v3 + 2.0 * v1 * v2) / 5040,
        (2.0 * v4 + 2.0 * v1 * v3 + v2 * v2) / 40320,
        (2.0 * v5 + 2.0 * v1 * v4 + 2.0 * v2 * v3) / 362880,
    )


@triton.jit
def build_table(gamma_ptr, omega2_ptr, table, C: tl.constexpr):
    """Write what `load_spectrum` reads, for one head a program, all in float64."""
    head = tl.program_id(0)
    c = tl.arange(0, C)
    gamma = tl.load(gamma_ptr + head * C + c)
    omega2 = tl.load(omega2_ptr + head * C + c)
    planes = _constants(gamma, omega2)
    planes = planes + (tl.max(planes[4], 0) + tl.zeros_like(gamma),)  # noqa: RUF005
    for n in tl.static_range(NUM_PLANES):
        tl.store(table + (head * NUM_PLANES + n) * C + c, planes[n])


@triton.jit
def rounded(x, K: tl.constexpr):
    """Return float64 `x` in the precision of the closed forms."""
    if not K.PRECISE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _as_spectrum(turns, planes, widest):
    """Return a `Spectrum` from `turns`, the other planes, rounded, and the largest spread."""
    exponent = planes[2] * -1.4426950408889634
    is_critical = tl.where(planes[4] == 0.0, 1.0, 0.0)
    return Spectrum(turns, *planes, widest, exponent, is_critical)


@triton.jit
def load_spectrum(table, head, channels, K: tl.constexpr):
    """Return the `Spectrum` of `channels` of one head, ``[W]`` or ``[rows, W]``.

    In the second form all tensors get the layout of tokens.
    """
    if len(channels.shape) == 1:
        channels = channels[None, :]
    c = table + head * NUM_PLANES * K.C + channels
    planes = ()
    for i in tl.static_range(1, 22):
        planes = planes + (rounded(tl.load(c + i * K.C), K),)  # noqa: RUF005
    widest = tl.load(table + (head * NUM_PLANES + 22) * K.C)
    return _as_spectrum(tl.load(c), planes, widest)


@triton.jit
def spectrum_of(omega, zeta, K: tl.constexpr):
    """Return the `Spectrum` of one channel, scalars, from float64 frequency and damping ratio."""
    exact = _constants(zeta * omega, omega * omega)
    planes = ()
    for i in tl.static_range(1, 22):
        planes = planes + (rounded(exact[i], K),)  # noqa: RUF005
    return _as_spectrum(exact[0], planes, exact[4])


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
def _near_critical(z):
    """Return sinh(sqrt z) / sqrt z and cosh(sqrt z), |z| < 1/2."""
    sinh = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880))))
    cosh = 1.0 + z * (0.5 + z * (1 / 24 + z * (1 / 720 + z * (1 / 40320 + z * (1 / 3628800)))))
    return sinh, cosh


@triton.jit
def _f_series(z):
    """Return -F e^{gamma s} / s^3 about critical damping."""
    return 1 / 6 + z * (1 / 60 + z * (1 / 1680 + z * (1 / 90720 + z * (5 / 39916800))))


@triton.jit
def _i12_series(y, form):
    """Return i12 / s^2 for short times."""
    series = form.i5 + y * form.i6
    series = form.i3 + y * (form.i4 + y * series)
    return 0.5 + y * (form.i1 + y * (form.i2 + y * series))


@triton.jit
def _j_series(y, form):
    """Return -J / s^4 for short times."""
    series = form.j3 + y * (form.j4 + y * form.j5)
    return 1 / 24 + y * (form.j1 + y * (form.j2 + y * series))


@triton.jit
def _i12_apart(x, w, fast, slow_decay, second, inv_spread):
    """Return i12 of far overdamped channels from the two decays: 1 - g11 may be tiny there."""
    phi = 1 / 24 - w * (1 / 120 - w * (1 / 720 - w * (1 / 5040)))
    phi = 1.0 - w * (0.5 - w * (1 / 6 - w * phi))
    phi = tl.where(w < 0.4, phi, (1.0 - slow_decay) / tl.where(w < 0.4, 1.0, w))
    faded = (1.0 - slow_decay * second) / tl.where(fast > 0, fast, 1.0)
    return x * (phi - faded) * inv_spread


@triton.jit
def _j_apart(x, w, fast, i12, inv_spread):
    """Return J of far overdamped channels from the two decays, where the usual form cancels."""
    psi = 1 / 8 - w * (1 / 30 - w * (1 / 144 - w * (1 / 840 - w * (1 / 5760))))
    psi = 0.5 - w * (1 / 3 - w * psi)
    late = (1.0 - (1.0 + w) * tl.exp(-w)) / tl.where(w < 0.4, 1.0, w * w)
    psi = tl.where(w < 0.4, psi, late)
    faded = (1.0 - (1.0 + fast) * tl.exp(-fast)) / tl.where(fast > 0, fast * fast, 1.0)
    return (2.0 * i12 - x * x * (psi + faded)) * inv_spread * inv_spread


@triton.jit
def oscillate(s, spectrum, K: tl.constexpr):
    """Return the `Gap` after the times `s` (float64, >= 0)."""
    gamma, slow, spread, rate = spectrum.gamma, spectrum.slow, spectrum.spread, spectrum.rate
    inv_spread = spectrum.inv_spread
    turns = s * spectrum.turns
    cos, sin = turn(rounded(turns - tl.floor(turns + 0.5), K))
    x = rounded(s, K)
    z = spectrum.disc * x * x
    near = tl.abs(z) < 0.5
    decay = tl.exp(-tl.where(near, gamma, slow) * x)
    # Underdamped channels have spread 0, overdamped ones turns 0: the other factor is then neutral.
    second = tl.exp(-spread * x)
    sinh, cosh = _near_critical(z)
    g12 = decay * tl.where(near, x * sinh, sin * spectrum.inv_root + (1.0 - second) * inv_spread)
    ct = decay * tl.where(near, cosh, cos * (0.5 + 0.5 * second))
    g11 = ct + gamma * g12
    y = rate * x
    i12 = tl.where(y < 0.4, x * x * _i12_series(y, spectrum), (1.0 - g11) * spectrum.inv_omega2)
    if spectrum.widest > 0:
        w = slow * x
        apart = _i12_apart(x, w, w + spread * x, tl.exp(-w), second, inv_spread)
        i12 = tl.where(spread > 0.5 * rate, tl.where(y >= 0.4, apart, i12), i12)
    return Gap(g11, ct, g12, i12)


@triton.jit
def spectral_derivatives(s, spectrum, gap, K: tl.constexpr):
    """Return F = d g12 / d omega^2 and J = d i12 / d omega^2."""
    ct, g12, i12 = gap.ct, gap.g12, gap.i12
    gamma, slow, spread, rate = spectrum.gamma, spectrum.slow, spectrum.spread, spectrum.rate
    inv_spread = spectrum.inv_spread
    x = rounded(s, K)
    z = spectrum.disc * x * x
    near = tl.abs(z) < 0.5
    critical = -tl.exp(-gamma * x) * x * x * x * _f_series(z)
    f = tl.where(near, critical, (g12 - x * ct) * spectrum.half_inv_disc)
    y = rate * x
    j = (0.5 * x * g12 - gamma * f - i12) * spectrum.inv_omega2
    j = tl.where(y < 0.3, -x * x * x * x * _j_series(y, spectrum), j)
    if spectrum.widest > 0:
        apart = _j_apart(x, slow * x, (slow + spread) * x, i12, inv_spread)
        j = tl.where(spread > 0.5 * rate, tl.where(y >= 0.3, apart, j), j)
    return f, j


@triton.jit
def pull_back_through(x, spectrum, g12, f, j, d_g11, d_g12, d_i12):
    """Return the gradients of gamma and omega^2, given the derivatives F and J."""
    gamma, omega2 = spectrum.gamma, spectrum.omega2
    d_gamma = 2.0 * f * (d_i12 - omega2 * d_g11) - (x * g12 + 2.0 * gamma * f) * d_g12
    d_omega2 = (gamma * f - 0.5 * x * g12) * d_g11 + f * d_g12 + j * d_i12
    return d_gamma, d_omega2


@triton.jit
def pull_back(s, spectrum, gap, d_g11, d_g12, d_i12, K: tl.constexpr):
    """Return the gradients of gamma and omega^2 from those of g11, g12 and i12."""
    f, j = spectral_derivatives(s, spectrum, gap, K)
    x = rounded(s, K)
    return pull_back_through(x, spectrum, gap.g12, f, j, d_g11, d_g12, d_i12)


# --- The closed form of a gap in few instructions. ------------------------------------------------


@triton.jit
def _overdamped(x, ct, g12, i12, form):
    """Return ct, g12 and i12 of overdamped channels, the given ones of others."""
    spread = form.spread
    over = spread > 0
    inv_spread = 1.0 / tl.where(over, spread, 1.0)
    w = form.exponent * -0.6931471805599453 * x
    slow_decay = tl.exp(-w)
    second = tl.exp(-spread * x)
    z = 0.25 * spread * spread * x * x
    near = z < 0.5
    decay = tl.where(near, tl.exp(-form.gamma * x), slow_decay)
    sinh, cosh = _near_critical(z)
    g12 = tl.where(over, decay * tl.where(near, x * sinh, (1.0 - second) * inv_spread), g12)
    ct = tl.where(over, decay * tl.where(near, cosh, 0.5 + 0.5 * second), ct)
    i12 = tl.where(over, (1.0 - ct - form.gamma * g12) * form.inv_omega2, i12)
    apart = _i12_apart(x, w, w + spread * x, slow_decay, second, inv_spread)
    i12 = tl.where(spread > 0.5 * form.rate, apart, i12)
    return ct, g12, i12


@triton.jit
def _gap_functions(s, form):
    """Return a `Gap` below float32."""
    turns = s * form.turns
    cos, sin = turn((turns - ((turns + _ROUNDING) - _ROUNDING)).to(tl.float32))
    x = s.to(tl.float32)
    decay = tl.exp2(form.exponent * x)
    # The second term is for critical damping alone.
    g12 = decay * (sin * form.inv_root + x * form.is_critical)
    ct = decay * cos
    i12 = (1.0 - ct - form.gamma * g12) * form.inv_omega2
    if form.widest > 0:
        ct, g12, i12 = _overdamped(x, ct, g12, i12, form)
    y = form.rate * x
    i12 = tl.where(y < 0.4, x * x * _i12_series(y, form), i12)
    return Gap(ct + form.gamma * g12, ct, g12, i12)


@triton.jit
def gap_functions(s, form, K: tl.constexpr):
    """Return the `Gap` after the times `s`, as `oscillate` does."""
    if K.PRECISE:
        g11 = s + form.gamma
        ct, g12, i12 = g11, g11, g11
        # Always true. Without a branch the compiler would evaluate all of it again for each layout
        # that a product wants.
        if form.widest >= 0:
            g11, ct, g12, i12 = oscillate(s, form, K)
        gap = Gap(g11, ct, g12, i12)
    else:
        gap = _gap_functions(s, form)
    return gap


@triton.jit
def _gap_slopes(s, form, slopes, gap):
    """Return F and J below float32."""
    ct, g12, i12 = gap.ct, gap.g12, gap.i12
    gamma, spread = form.gamma, form.spread
    x = s.to(tl.float32)
    z = slopes.disc * x * x
    decay = tl.exp2(gamma * -1.4426950408889634 * x)
    critical = -decay * x * x * x * _f_series(z)
    f = tl.where(tl.abs(z) < 0.5, critical, (g12 - x * ct) * slopes.half_inv_disc)
    y = form.rate * x
    j = (0.5 * x * g12 - gamma * f - i12) * form.inv_omega2
    if form.widest > 0:
        w = form.exponent * -0.6931471805599453 * x
        inv_spread = 1.0 / tl.where(spread > 0, spread, 1.0)
        apart = _j_apart(x, w, w + spread * x, i12, inv_spread)
        j = tl.where(spread > 0.5 * form.rate, apart, j)
    return f, tl.where(y < 0.3, -x * x * x * x * _j_series(y, slopes), j)


@triton.jit
def gap_slopes(s, form, slopes, gap, K: tl.constexpr):
    """Return F = d g12 / d omega^2 and J = d i12 / d omega^2, as `spectral_derivatives` does.

    `slopes` is the form loaded once more: registers would not hold all of it through a kernel.
    """
    if K.PRECISE:
        found = spectral_derivatives(s, form, gap, K)
    else:
        found = _gap_slopes(s, form, slopes, gap)
    return found


# --- What follows from the closed form. -----------------------------------------------------------


@triton.jit
def _as_step(entries):
    planes = ()
    for n in tl.static_range(6):
        planes = planes + (entries[n].to(tl.float32),)  # noqa: RUF005
    return Step(*planes)


@triton.jit
def step_matrix(gap, form):
    """Return the `Step` over a gap, in float32."""
    g11, g12, i12 = gap.g11, gap.g12, gap.i12
    p21 = -form.omega2 * g12
    p22 = g11 - 2.0 * form.gamma * g12
    i11 = g12 + 2.0 * form.gamma * i12
    return _as_step((g11, g12, p21, p22, i11, i12))


@triton.jit
def factors_of(m, AVERAGE: tl.constexpr):
    """Return what a row multiplies position and velocity before the `Step` m with."""
    return (m.i11, m.i12) if AVERAGE else (m.p11, m.p12)


@triton.jit
def slope_matrix(s, gap, f, j, form, K: tl.constexpr):
    """Return the derivatives of a `Step` by omega^2, in float32."""
    gamma, g12 = form.gamma, gap.g12
    x = rounded(s, K)
    p11 = gamma * f - 0.5 * x * g12
    p21 = -g12 - form.omega2 * f
    p22 = p11 - 2.0 * gamma * f
    i11 = f + 2.0 * gamma * j
    return _as_step((p11, f, p21, p22, i11, j))


@triton.jit
def damping_matrix(s, gap, f, j, form, BY_J: tl.constexpr, K: tl.constexpr):
    """Return the derivatives of a `Step` by gamma, in float32; BY_J: that of i11 from J alone."""
    gamma, omega2, g12 = form.gamma, form.omega2, gap.g12
    x = rounded(s, K)
    p11 = -2.0 * omega2 * f
    p12 = -x * g12 - 2.0 * gamma * f
    p21 = -omega2 * p12
    p22 = p11 - 2.0 * g12 - 2.0 * gamma * p12
    i11 = -2.0 * omega2 * j if BY_J else p12 + 2.0 * gap.i12 + 4.0 * gamma * f
    return _as_step((p11, p12, p21, p22, i11, 2.0 * f))


@triton.jit
def state_of(m, x, u, HAS_U: tl.constexpr):
    """Return position, velocity and integral of tokens after the `Step` m."""
    x1, x2, xs = m.p11 * x, m.p21 * x, m.i11 * x
    if HAS_U:
        x1 += m.p12 * u
        x2 += m.p22 * u
        xs += m.i12 * u
    return x1, x2, xs


@triton.jit
def state_adjoint(m, d_x1, d_x2, d_xs):
    """Return the gradients of x and u from those of `state_of`."""
    d_x = d_x1 * m.p11 + d_x2 * m.p21 + d_xs * m.i11
    return d_x, d_x1 * m.p12 + d_x2 * m.p22 + d_xs * m.i12


@triton.jit
def aged_state(gap, form, x, u, HAS_U: tl.constexpr):
    """Return position, velocity and integral of tokens that started as (x, u), in float32."""
    g11, g12, i12 = gap.g11, gap.g12, gap.i12
    i11 = g12 + 2.0 * form.gamma * i12
    position = g11 * x
    velocity = -form.omega2 * g12 * x
    integral = i11 * x
    if HAS_U:
        position += g12 * u
        velocity += (g11 - 2.0 * form.gamma * g12) * u
        integral += i12 * u
    return position.to(tl.float32), velocity.to(tl.float32), integral.to(tl.float32)


@triton.jit
def row_factors(gap, form, AVERAGE: tl.constexpr):
    """Return what a row multiplies position and velocity at its reference time with.

    The integral of the propagator's first row, or for point values that row itself.
    """
    first, second = gap.g11, gap.g12
    if AVERAGE:
        first, second = gap.g12 + 2.0 * form.gamma * gap.i12, gap.i12
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def aged_state_adjoint(
    s, gap, form, x, u, d_state, HAS_U: tl.constexpr, SPECTRAL: tl.constexpr, K: tl.constexpr
):
    """Return the gradients of x, u, gamma and omega^2 from those of `aged_state`."""
    gamma, omega2 = form.gamma, form.omega2
    g11, g12, i12 = gap.g11, gap.g12, gap.i12
    d_position, d_velocity, d_integral = d_state
    d_x = d_position * g11 - omega2 * g12 * d_velocity + (g12 + 2.0 * gamma * i12) * d_integral
    d_u = d_position * g12 + (g11 - 2.0 * gamma * g12) * d_velocity + i12 * d_integral
    d_gamma = tl.zeros_like(d_x)
    d_omega2 = tl.zeros_like(d_x)
    if SPECTRAL:
        d_g11 = d_position * x
        d_g12 = d_integral * x - omega2 * d_velocity * x
        d_i12 = 2.0 * gamma * d_integral * x
        if HAS_U:
            d_g11 += d_velocity * u
            d_g12 += (d_position - 2.0 * gamma * d_velocity) * u
            d_i12 += d_integral * u
        d_gamma, d_omega2 = pull_back(s, form, gap, d_g11, d_g12, d_i12, K)
        d_gamma += 2.0 * i12 * d_integral * x
        d_omega2 -= g12 * d_velocity * x
        if HAS_U:
            d_gamma -= 2.0 * g12 * d_velocity * u
    return d_x.to(tl.float32), d_u.to(tl.float32), d_gamma, d_omega2


@triton.jit
def row_factors_adjoint(s, gap, form, d_first, d_second, K: tl.constexpr):
    """Return the gradients of gamma and omega^2 from those of `row_factors`."""
    zero = tl.zeros_like(d_first)
    d_g11, d_g12, d_i12 = d_first, d_second, zero
    if K.AVERAGE:
        d_g11, d_g12, d_i12 = zero, d_first, 2.0 * form.gamma * d_first + d_second
    d_gamma, d_omega2 = pull_back(s, form, gap, d_g11, d_g12, d_i12, K)
    if K.AVERAGE:
        d_gamma += 2.0 * gap.i12 * d_first
    return d_gamma, d_omega2


@triton.jit
def compose(a, b, form):
    """Return the `Span` of two spans of time, one after the other."""
    g11 = a.g11 * b.g11 - form.omega2 * (a.g12 * b.g12)
    g12 = a.g11 * b.g12 + a.g12 * (b.g11 - 2.0 * form.gamma * b.g12)
    i12 = a.i12 + a.g11 * b.i12 + a.g12 * b.g12
    return Span(g11, g12, i12)
