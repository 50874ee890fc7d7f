"""Cases and an independent oracle of the response operator: matrix exponentials, row by row."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import expm

DOUBLE = torch.float64
MODES = [
    ("linear", "value"),
    ("hold", "value"),
    ("impulse", "value"),
    ("linear", "rate"),
    ("hold", "rate"),
]
# Every regime: undamped, weak, strong, critical and next to it, overdamped.
ZETAS = (0.0, 0.05, 0.7, 1.0 - 1e-12, 1.0, 1.0 + 1e-12, 1.003, 3.0, 20.0)


def make_case(batch=2, rows=12, variables=2, *, smallest=1e-9, missing=0.3, seed=0, dtype=DOUBLE):
    """Return values with gaps of their own, times with ties and tiny gaps, and a bank [K]."""
    g = torch.Generator().manual_seed(seed)
    exponent = torch.rand(batch, rows, generator=g, dtype=DOUBLE)
    times = (smallest ** (exponent * (exponent < 0.7))).cumsum(1) * 0.3
    if rows > 6:
        times[:, 5:7] = times[:, 4:5]
    values = torch.randn(batch, rows, variables, generator=g, dtype=DOUBLE).to(dtype)
    values[torch.rand(batch, rows, variables, generator=g) < missing] = torch.nan
    omega = 10 ** torch.linspace(-3, 2.3, len(ZETAS), dtype=DOUBLE)
    order = torch.randperm(len(ZETAS), generator=g)
    return values, times, omega[order], torch.tensor(ZETAS, dtype=DOUBLE)


def oracle_series(values, times, omega, zeta, drive, of, start, t_end):
    """Return (x, v) at t_end of one variable driven by one series; `start` is (x, v) or a word.

    Each piece between observations is the exponential of the system of state, drive and slope.
    """
    seen = ~np.isnan(values)
    own_times, own = times[seen], values[seen]
    first = own[0] if len(own) else 0.0
    has_level = of == "value" and drive != "impulse"
    x, v = (first if has_level else 0.0, 0.0) if start == "steady" else start
    if t_end < times[0]:
        return x, v
    now, level = times[0], first
    # Each event of the variable in turn, then the rest of the way.
    for t, u in [*zip(own_times, own, strict=True), (t_end, None)]:
        until = min(t, t_end)
        s = until - now
        is_line = drive == "linear" and u is not None and now >= own_times[0]
        slope = (u - level) / (t - now) if is_line and t > now else 0.0
        matrix = np.zeros((4, 4))  # of x, v, u, u'
        matrix[0, 1], matrix[2, 3] = 1.0, 1.0
        matrix[1, :2] = -(omega**2), -2 * zeta * omega
        if has_level:
            matrix[1, 2] = omega**2
        elif of == "rate":
            matrix[1, 3] = omega
        if s > 0:
            x, v, level, _ = expm(matrix * s) @ np.array([x, v, level, slope])
        now = until
        if t > t_end or u is None:
            break
        if drive == "impulse":
            v += omega * u
        elif of == "rate":
            v += omega * (u - level)  # a jump; 0 where the path is continuous
        level = u
    return x, v


def oracle(values, times, omega, zeta, *, drive, of, start="steady", query=None):
    """Return (x, v) at rows or query times, each [B, N or M, F, K] float64."""
    values, times = values.double().numpy(), times.double().numpy()
    batch, _, variables = values.shape
    omega, zeta = (np.broadcast_to(z.numpy(), (variables, z.shape[-1])) for z in (omega, zeta))
    at = times if query is None else query.numpy()
    found = np.zeros((2, batch, at.shape[1], variables, omega.shape[1]))
    for b, m, f, k in np.ndindex(found.shape[1:]):
        state = "steady" if start == "steady" else tuple(start[:, b, f, k].tolist())
        given = (values[b, :, f], times[b], omega[f, k], zeta[f, k], drive, of, state, at[b, m])
        found[:, b, m, f, k] = oracle_series(*given)
    return torch.from_numpy(found)


def relative_error(found, wanted):
    """Return the largest error of each oscillator over its largest response, the worst of all."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        scale = b.abs().amax(dim=(0, 1, 2))
        error = (a.double() - b).abs().amax(dim=(0, 1, 2))
        worst = max(worst, float((error / scale.clamp(min=1e-300)).max()))
    return worst
