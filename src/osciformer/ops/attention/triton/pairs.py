r"""Short series: each pair of a row and a key is evaluated in registers, in one kernel a pass.

A logit is $\sum_c q_{jc}\,[K_{ic} A_{1c}(s) + \dot K_{ic} A_{2c}(s)]$ with the closed forms of the
gap s, $A_1 = \frac1s\int_0^s g_{11}$ and $A_2 = \frac1s\int_0^s g_{12}$. A program has a tile of
rows and keys and takes one channel after the other: its constants are scalars, its tokens two
columns, and sums over channels stay in registers. Nothing is split, so nothing cancels; the cost is
two closed forms a pair and channel forward, and three with their derivatives backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from osciformer.ops.attention.triton import closed_form as cf
from osciformer.ops.attention.triton import primitives as lib

#: Rows and keys of a tile of pairs.
ROWS, KEYS = tl.constexpr(32), tl.constexpr(32)
# Gaps below are those of ties: their reciprocals leave float32.
_TINY = tl.constexpr(1e-30)

# --- Arguments of the kernels. --------------------------------------------------------------------


class View(NamedTuple):
    """A pointer to ``[B, N, H, C]`` and its strides as 2 n + 1; channels follow each other."""

    x: Any
    odd_series: Any
    odd_token: Any
    odd_head: Any


class Swing(NamedTuple):
    """Keys or values: tokens, velocities or None, frequencies and damping ratios ``[H, C]``."""

    x: Any
    velocity: Any
    omega: Any
    zeta: Any


class Pairs(NamedTuple):
    """What a call is about; times are ``[B, M]`` and ``[B, N]``, the mask of keys may be None.

    Numbers that vary come as 2 n + 1, see `primitives.sizes_of`.
    """

    q: Any
    k: Any
    v: Any
    row_times: Any
    key_times: Any
    mask: Any
    odd_rows: Any
    odd_keys: Any
    odd_heads: Any
    odd_channels: Any
    scale: Any


class TokenGradients(NamedTuple):
    """Pointers to gradients ``[B, N, H, C]``, or None.

    Those of queries are by tile of keys, ``[tiles, B, M, H, C]`` float32; those of the spectra by
    series and tile of keys, ``[4, B tiles, H, C]`` float32: omega and zeta of keys, then of values.
    """

    q: Any
    k: Any
    key_velocity: Any
    v: Any
    value_velocity: Any
    spectra: Any


class Upstream(NamedTuple):
    """What a backward pass knows of rows: output, logsumexps ``[B, H, M]`` and their gradients."""

    out: Any
    d_out: Any
    lse: Any
    d_lse: Any  # any pointer if the logsumexp has no gradient
    has_d_lse: Any  # 1.0 or 0.0: Triton compiles again for other kinds of arguments


class Place(NamedTuple):
    """What a program works on."""

    series: Any
    head: Any
    heads: Any
    rows: Any  # their number
    keys: Any
    channels: Any


class Gaps(NamedTuple):
    """Gaps of a tile of pairs, ``[rows, keys]``: float64, 0 where the row does not see the key."""

    s: Any
    inverse: Any  # float32, 0 at ties
    seen: Any


# --- Device functions. ----------------------------------------------------------------------------


@triton.jit
def locate(t):
    """Return a program's `Place`."""
    heads = t.odd_heads // 2
    plane = tl.program_id(0)
    series, head = (plane // heads).to(tl.int64), plane % heads
    return Place(series, head, heads, t.odd_rows // 2, t.odd_keys // 2, t.odd_channels // 2)


@triton.jit
def column(view, at, tokens, inside, c):
    """Return one channel of some tokens as float32, 0 outside."""
    first = view.x + at.series * (view.odd_series // 2) + at.head * (view.odd_head // 2)
    where = first + tokens.to(tl.int64) * (view.odd_token // 2) + c
    return tl.load(where, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rectangle(view, at, tokens, inside, channels):
    """Return some channels of some tokens, ``[tokens, channels]`` float32, 0 outside."""
    first = view.x + at.series * (view.odd_series // 2) + at.head * (view.odd_head // 2)
    tokens = tokens.to(tl.int64) * (view.odd_token // 2)
    inside = inside[:, None] & (channels < at.channels)[None, :]
    where = first + tokens[:, None] + channels[None, :]
    return tl.load(where, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def times_of(times, at, tokens, length):
    """Return times as float64; past the end, the last one."""
    return tl.load(times + at.series * length + tl.minimum(tokens, length - 1)).to(tl.float64)


@triton.jit
def present_keys(mask, at, keys):
    """Return which keys exist and are not masked."""
    present = keys < at.keys
    if mask is not None:
        present = tl.load(mask + at.series * at.keys + keys, mask=present, other=0) != 0
    return present


@triton.jit
def gaps_between(t, at, rows, keys, STRICT: tl.constexpr):
    """Return the `Gaps` of some rows and keys."""
    row_times = times_of(t.row_times, at, rows, at.rows)
    elapsed = row_times[:, None] - times_of(t.key_times, at, keys, at.keys)[None, :]
    seen = elapsed > 0 if STRICT else elapsed >= 0
    seen = seen & (rows < at.rows)[:, None] & present_keys(t.mask, at, keys)[None, :]
    s = tl.where(seen, elapsed, 0.0)
    x = s.to(tl.float32)
    inverse = tl.where(x > _TINY, 1.0 / tl.where(x > _TINY, x, 1.0), 0.0)
    return Gaps(s, inverse, seen)


@triton.jit
def channel_form(side, at, c, K: tl.constexpr):
    """Return the `Spectrum` of one channel."""
    where = at.head * at.channels + c
    omega, zeta = tl.load(side.omega + where), tl.load(side.zeta + where)
    return cf.spectrum_of(omega.to(tl.float64), zeta.to(tl.float64), K)


@triton.jit
def averaged(step, gaps, AVERAGE: tl.constexpr):
    """Return what multiplies position and velocity, from a `Step` or from its derivative."""
    first, second = cf.factors_of(step, AVERAGE)
    if AVERAGE:
        first, second = first * gaps.inverse, second * gaps.inverse
    return first, second


@triton.jit
def pair_factors(gap, form, gaps, AVERAGE: tl.constexpr):
    """Return what multiplies position and velocity of the key, for each pair."""
    first, second = averaged(cf.step_matrix(gap, form), gaps, AVERAGE)
    if AVERAGE:
        # The limit of small gaps: a key that has not moved.
        first = tl.where(gaps.inverse > 0, first, 1.0)
    return first, second


@triton.jit
def pair_logits(t, at, rows, keys, gaps, K: tl.constexpr):
    """Return the scaled logits of a tile of pairs, -inf for pairs that do not see each other."""
    raw = gaps.inverse * 0.0
    inside, present = rows < at.rows, keys < at.keys
    for c in range(at.channels):
        form = channel_form(t.k, at, c, K)
        first, second = pair_factors(cf.gap_functions(gaps.s, form, K), form, gaps, True)
        met = first * column(t.k.x, at, keys, present, c)[None, :]
        if t.k.velocity is not None:
            met += second * column(t.k.velocity, at, keys, present, c)[None, :]
        raw += column(t.q, at, rows, inside, c)[:, None] * met
    return tl.where(gaps.seen, raw * t.scale, float("-inf"))


# --- Forward. -------------------------------------------------------------------------------------


@triton.jit
def pair_forward(t, out_ptr, lse_ptr, STRICT: tl.constexpr, K: tl.constexpr):
    """Write output ``[B, M, H, C]`` and logsumexp ``[B, H, M]`` of a tile of rows."""
    at = locate(t)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < at.rows
    C: tl.constexpr = K.C
    wide = tl.arange(0, C)
    last = times_of(t.row_times, at, tl.program_id(1) * ROWS + ROWS - 1, at.rows)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, C], tl.float32)
    start = 0
    while (start < at.keys) & (times_of(t.key_times, at, start, at.keys) <= last):
        keys = start + tl.arange(0, KEYS)
        present = keys < at.keys
        gaps = gaps_between(t, at, rows, keys, STRICT)
        logits = pair_logits(t, at, rows, keys, gaps, K) * 1.4426950408889634
        top, mass, weights, keep = lib.softmax_step(top, mass, logits)
        acc *= keep[:, None]
        for c in range(at.channels):
            form = channel_form(t.v, at, c, K)
            gap = cf.gap_functions(gaps.s, form, K)
            first, second = pair_factors(gap, form, gaps, K.AVERAGE)
            met = first * column(t.v.x, at, keys, present, c)[None, :]
            if t.v.velocity is not None:
                met += second * column(t.v.velocity, at, keys, present, c)[None, :]
            acc += tl.where((wide == c)[None, :], tl.sum(weights * met, 1)[:, None], 0.0)
        start += KEYS
    lse, safe = lib.logsumexp(top, mass)
    plane = at.series * at.heads + at.head
    tl.store(lse_ptr + plane * at.rows + rows, lse * 0.6931471805599453, mask=inside)
    where = (at.series * at.rows + rows)[:, None] * at.heads + at.head
    where = where * at.channels + wide[None, :]
    inside = inside[:, None] & (wide < at.channels)[None, :]
    tl.store(out_ptr + where, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


# --- Backward. ------------------------------------------------------------------------------------


@triton.jit
def meet_backward(
    side, row_view, at, rows, keys, gaps, shares, d_x, d_u, d_gamma, d_omega2,
    OF_KEYS: tl.constexpr, SPECTRAL: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of one side, of which each pair has a share, and return them.

    Those of tokens and velocities are ``[channels, keys]``, those of gamma and omega^2
    ``[channels]``. The last result are the gradients of rows ``[rows, channels]``, or for values
    those of their weights ``[rows, keys]``.
    """
    AVERAGE: tl.constexpr = OF_KEYS or K.AVERAGE
    HAS_U: tl.constexpr = side.velocity is not None
    inside, present = rows < at.rows, keys < at.keys
    wide = tl.arange(0, K.C)
    WIDE: tl.constexpr = K.C if OF_KEYS else KEYS
    found = tl.zeros([ROWS, WIDE], tl.float32)
    for c in range(at.channels):
        form = channel_form(side, at, c, K)
        gap = cf.gap_functions(gaps.s, form, K)
        first, second = pair_factors(gap, form, gaps, AVERAGE)
        row = column(row_view, at, rows, inside, c)[:, None]
        x = column(side.x, at, keys, present, c)[None, :]
        met = first * x
        if HAS_U:
            u = column(side.velocity, at, keys, present, c)[None, :]
            met += second * u
        if OF_KEYS:
            found += tl.where((wide == c)[None, :], tl.sum(shares * met, 1)[:, None], 0.0)
        else:
            found += row * met
        part = shares * row
        own = (wide == c)[:, None]
        d_x += tl.where(own, tl.sum(part * first, 0)[None, :], 0.0)
        if HAS_U:
            d_u += tl.where(own, tl.sum(part * second, 0)[None, :], 0.0)
        if SPECTRAL:
            f, j = cf.gap_slopes(gaps.s, form, form, gap, K)
            slopes = cf.damping_matrix(gaps.s, gap, f, j, form, True, K)
            first, second = averaged(slopes, gaps, AVERAGE)
            by_gamma = first * x
            if HAS_U:
                by_gamma += second * u
            d_gamma += tl.where(wide == c, tl.sum(tl.sum(part * by_gamma, 0), 0), 0.0)
            slopes = cf.slope_matrix(gaps.s, gap, f, j, form, K)
            first, second = averaged(slopes, gaps, AVERAGE)
            by_omega2 = first * x
            if HAS_U:
                by_omega2 += second * u
            d_omega2 += tl.where(wide == c, tl.sum(tl.sum(part * by_omega2, 0), 0), 0.0)
    return d_x, d_u, d_gamma, d_omega2, found


@triton.jit
def store_columns(x, at, keys, value, K: tl.constexpr):
    """Store ``[channels, keys]`` as one head of ``[B, N, H, C]``."""
    wide = tl.arange(0, K.C)
    where = ((at.series * at.keys + keys) * at.heads + at.head)[None, :] * at.channels
    inside = (keys < at.keys)[None, :] & (wide < at.channels)[:, None]
    tl.store(x + where + wide[:, None], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def store_spectrum(d_spectra, side, at, program, programs, d_gamma, d_omega2, K: tl.constexpr):
    """Store the gradients of omega and zeta, from those of gamma = zeta omega and omega^2."""
    wide = tl.arange(0, K.C)
    inside = wide < at.channels
    own = at.head * at.channels + wide
    omega = tl.load(side.omega + own, mask=inside, other=0.0).to(tl.float32)
    zeta = tl.load(side.zeta + own, mask=inside, other=0.0).to(tl.float32)
    size = at.heads * at.channels
    where = d_spectra + program * size + own
    d_omega = zeta * d_gamma + 2.0 * omega * d_omega2
    tl.store(where, d_omega, mask=inside)
    tl.store(where + programs * size, omega * d_gamma, mask=inside)


@triton.jit
def pair_backward(t, up, grads, odd_batch, STRICT: tl.constexpr, K: tl.constexpr):
    """Write the gradients of a tile of keys, and what it adds to those of rows and spectra."""
    SPECTRAL: tl.constexpr = grads.spectra is not None
    at = locate(t)
    tile = tl.program_id(1)
    keys = tile * KEYS + tl.arange(0, KEYS)
    C: tl.constexpr = K.C
    wide = tl.arange(0, C)
    batch = odd_batch // 2
    earliest = times_of(t.key_times, at, tile * KEYS, at.keys)
    d_k = tl.zeros([C, KEYS], tl.float32)
    d_v, d_key_u, d_value_u = d_k, d_k, d_k
    key_gamma = tl.zeros([C], tl.float32)
    key_omega2, value_gamma, value_omega2 = key_gamma, key_gamma, key_gamma
    lines = (at.series * at.heads + at.head) * at.rows
    for start in range(0, at.rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < at.rows
        d_q = tl.zeros([ROWS, C], tl.float32)
        if times_of(t.row_times, at, start + ROWS - 1, at.rows) >= earliest:
            gaps = gaps_between(t, at, rows, keys, STRICT)
            # Rows that saw nothing have logits of -inf alone.
            lse = tl.load(up.lse + lines + rows, mask=inside, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            weights = tl.exp(pair_logits(t, at, rows, keys, gaps, K) - lse[:, None])
            out = rectangle(up.out, at, rows, inside, wide)
            delta = tl.sum(out * rectangle(up.d_out, at, rows, inside, wide), 1)
            is_given = inside & (up.has_d_lse > 0)
            delta -= tl.load(up.d_lse + lines + rows, mask=is_given, other=0.0)
            d_v, d_value_u, value_gamma, value_omega2, d_weights = meet_backward(
                t.v, up.d_out, at, rows, keys, gaps, weights,
                d_v, d_value_u, value_gamma, value_omega2, False, SPECTRAL, K,
            )  # fmt: skip
            shares = weights * (d_weights - delta[:, None]) * t.scale
            d_k, d_key_u, key_gamma, key_omega2, d_q = meet_backward(
                t.k, t.q, at, rows, keys, gaps, shares,
                d_k, d_key_u, key_gamma, key_omega2, True, SPECTRAL, K,
            )  # fmt: skip
        where = ((tile * batch + at.series) * at.rows + rows) * at.heads + at.head
        inside_d_q = inside[:, None] & (wide < at.channels)[None, :]
        tl.store(grads.q + where[:, None] * at.channels + wide[None, :], d_q, mask=inside_d_q)
    store_columns(grads.k, at, keys, d_k, K)
    store_columns(grads.v, at, keys, d_v, K)
    if t.k.velocity is not None:
        store_columns(grads.key_velocity, at, keys, d_key_u, K)
    if t.v.velocity is not None:
        store_columns(grads.value_velocity, at, keys, d_value_u, K)
    if SPECTRAL:
        program, programs = at.series * tl.num_programs(1) + tile, batch * tl.num_programs(1)
        store_spectrum(grads.spectra, t.k, at, program, programs, key_gamma, key_omega2, K)
        of_values = grads.spectra + 2 * programs.to(tl.int64) * at.heads * at.channels
        store_spectrum(of_values, t.v, at, program, programs, value_gamma, value_omega2, K)
