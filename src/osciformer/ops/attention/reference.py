r"""The paper's closed-form logit, corrected, written to be read beside the paper.

For every pair of a query time $t_j$ and a key $i$ at $t_i$, with $\Delta = t_j - t_i$, and in every
channel c, the query seen from the key's time is $\mathrm{Re}\sum_m \tilde a_m e^{i w_m s}$,
$\tilde a_m = (A_m - iB_m) e^{i w_m t_i}$, the key is
$c_i + g_{11}(s)(K_i - c_i) + g_{12}(s) \dot K_i + \mathrm{Re}\sum_n f_n X_n(s)$, and the logit is

$$\alpha_{ij} = \sum_{c,m} \mathrm{Re}\,\tilde a_m \big[ (K_i - c_i) G_{11} + \dot K_i G_{12}
   + c_i \varphi_1(i w_m \Delta)
   + \tfrac12 \sum_n (f_n D(w_m, \varpi_n) + \bar f_n D(w_m, -\varpi_n)) \big].$$

Kernels depend on the channel and stay inside the sum over channels. They cost
$\Theta(N^2 J d)$, times $1 + M_d$ with drives; rows are taken in chunks and recomputed in the
backward pass, so memory does not grow with $N^2 J d$.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from osciformer._types import Bool, Complex, Float, Tensor
from osciformer.math.driven import driven_averages, driven_integrals, driven_response
from osciformer.math.integrals import modulated_averages, phi1
from osciformer.math.oscillator import moments, propagator
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath

_CHUNK_ELEMENTS = 2**17  # pairs x channels evaluated at once; temporaries then fit in cache


def attend(
    path: QueryPath,
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
    *,
    key_omega: Float[Tensor, "H C"],
    key_zeta: Float[Tensor, "H C"],
    value_omega: Float[Tensor, "H C"],
    value_zeta: Float[Tensor, "H C"],
    key_velocity: Float[Tensor, "B N H C"] | None = None,
    value_velocity: Float[Tensor, "B N H C"] | None = None,
    value: str = "average",
    drive: Drive | None = None,
    mask: Bool[Tensor, "B N"] | None = None,
    scale: float,
    strict: bool = False,
    key_equilibrium: Float[Tensor, "B N H C"] | None = None,
    value_equilibrium: Float[Tensor, "B N H C"] | None = None,
    return_weights: bool = False,
) -> tuple[Float[Tensor, "B M H C"], Float[Tensor, "B H M"], Float[Tensor, "B H M N"] | None]:
    """Return attention over the keys before each query time, by closed forms.

    Arguments and results are those of `oracle.attend`. Kernels are evaluated in the dtype of `k`
    (at least float32); gaps, phases and driven kernels always in float64.
    """
    batch, num_keys, heads, channels = k.shape
    rows = query_times.shape[1]
    dtype = torch.promote_types(k.dtype, torch.float32)
    query_times, key_times = query_times.double(), key_times.double()
    present = torch.ones_like(key_times, dtype=torch.bool) if mask is None else mask
    key_times = torch.where(present, key_times, 0.0)
    keys = _Oscillators.make(
        "key", k, key_omega, key_zeta, key_velocity, key_equilibrium, drive, present, dtype
    )
    values = _Oscillators.make(
        "value",
        v,
        value_omega,
        value_zeta,
        value_velocity,
        value_equilibrium,
        drive,
        present,
        dtype,
    )

    totals = (
        _linear_integrals(path, keys, query_times, key_times)
        if isinstance(path, LinearPath)
        else None
    )
    pairs_per_row = max(1, batch * num_keys * heads * channels)
    chunk = max(1, _CHUNK_ELEMENTS // pairs_per_row)
    outs, lses, weights = [], [], []
    for first in range(0, rows, chunk):
        part = slice(first, min(rows, first + chunk))
        gap = query_times[:, part, None] - key_times[:, None]  # [B, R, N]
        seen = present[:, None] & (gap > 0 if strict else gap >= 0)
        # A zero gap is a constant: its limit has, by convention, no derivative in the gap.
        delta = torch.where(seen & (gap > 0), gap, 0.0)
        if isinstance(path, LinearPath):
            assert totals is not None
            logits = _linear_logits(totals[:, part], path, keys, part, delta)
        else:
            logits = _again(_logits, path, keys, part, key_times, delta)
        weight, lse = _masked_softmax(scale * logits, seen[..., None])
        content = _again(_mean_value if value == "average" else _end_value, values, delta)
        outs.append((weight[..., None] * content).sum(2))
        lses.append(lse)
        weights.append(weight)

    if not outs:
        outs = [k.new_zeros(batch, 0, heads, channels)]
        lses = [k.new_zeros(batch, 0, heads)]
        weights = [k.new_zeros(batch, 0, num_keys, heads)]
    out, lse = torch.cat(outs, 1).to(k.dtype), torch.cat(lses, 1).transpose(1, 2)
    all_weights = torch.cat(weights, 1).permute(0, 3, 1, 2) if return_weights else None
    return out, lse, all_weights


@dataclass(frozen=True)
class _Oscillators:
    """Keys or values: initial states, rest positions and spectra in the kernel dtype."""

    displacement: Float[Tensor, "B N H C"]  # content - rest
    velocity: Float[Tensor, "B N H C"] | None
    rest: Float[Tensor, "B N H C"] | None
    content: Float[Tensor, "B N H C"]
    omega: Float[Tensor, "H C"]
    zeta: Float[Tensor, "H C"]
    forces: list[tuple[Float[Tensor, "H 1"], Complex[Tensor, "B N H C"]]]

    @staticmethod
    def make(
        role: Literal["key", "value"],
        content: Tensor,
        omega: Tensor,
        zeta: Tensor,
        velocity: Tensor | None,
        rest: Tensor | None,
        drive: Drive | None,
        present: Tensor,
        dtype: torch.dtype,
    ) -> _Oscillators:
        def clean(x: Tensor | None) -> Tensor | None:
            # Absent tokens may hold anything, NaN included.
            return None if x is None else torch.where(present[..., None, None], x, 0.0).to(dtype)

        held = clean(content)
        assert held is not None
        rest = clean(rest)
        gains = None if drive is None else drive.gains(role)
        forces = []
        if gains is not None:
            drive_omega, cos, sin = (x.double() for x in gains)
            for n in range(drive_omega.shape[1]):
                # f = P - iQ, P = g * K, Q = h * K
                amplitude = held.double() * torch.complex(cos[:, n], -sin[:, n])
                forces.append((drive_omega[:, n, None], amplitude))
        return _Oscillators(
            held if rest is None else held - rest,
            clean(velocity),
            rest,
            held,
            omega.to(dtype),
            zeta.to(dtype),
            forces,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.omega.dtype


def _modes(
    path: ConstantPath | SinusoidPath, rows: slice, key_times: Float[Tensor, "B N"]
) -> Iterator[tuple[Tensor, Complex[Tensor, "B R N H C"]]]:
    r"""Yield each frequency w and its amplitude at the key, $(A - iB) e^{iw(t_i - o_j)}$."""

    def pick(x: Tensor) -> Tensor:
        return x[:, rows] if x.shape[1] > 1 else x

    constant = path.q if isinstance(path, ConstantPath) else path.constant
    if constant is not None:
        held = pick(constant)[:, :, None]
        held = held.to(torch.promote_types(held.dtype, torch.float32))  # no complex bfloat16
        yield key_times.new_zeros(()), torch.complex(held, torch.zeros_like(held))
    if isinstance(path, ConstantPath):
        return
    since = key_times[:, None] - pick(path.origin.double())[..., None]  # [B, R|1, N]
    for m in range(path.omega.shape[0]):
        w = path.omega[m].double()
        turn = torch.exp(torch.complex(torch.zeros_like(since), w * since))
        a = torch.complex(pick(path.cos)[:, :, None, :, m], -pick(path.sin)[:, :, None, :, m])
        yield w, a * turn[..., None, None].to(a.dtype)


def _logits(
    path: ConstantPath | SinusoidPath,
    keys: _Oscillators,
    rows: slice,
    key_times: Float[Tensor, "B N"],
    delta: Float[Tensor, "B R N"],
) -> Float[Tensor, "B R N H"]:
    gap = delta.to(keys.dtype)[..., None, None]
    total = gap.new_zeros(*delta.shape, keys.omega.shape[0])
    for w, a in _modes(path, rows, key_times):
        g11, g12 = modulated_averages(gap, w.to(keys.dtype), keys.omega, keys.zeta)
        kernel = keys.displacement[:, None] * g11
        if keys.velocity is not None:
            kernel = kernel + keys.velocity[:, None] * g12
        if keys.rest is not None:
            turn = torch.complex(torch.zeros_like(delta), w * delta)
            kernel = kernel + keys.rest[:, None] * phi1(turn)[..., None, None].to(g11.dtype)
        for drive_omega, f in keys.forces:
            spectrum = (keys.omega.double(), keys.zeta.double())
            wide = delta[..., None, None]
            ahead = driven_averages(wide, w, drive_omega, *spectrum)
            behind = driven_averages(wide, w, -drive_omega, *spectrum)
            driven = 0.5 * (f[:, None] * ahead + f[:, None].conj() * behind)
            kernel = kernel + driven.to(g11.dtype)
        total = total + (a * kernel).real.sum(-1).to(total.dtype)
    return total


def _mean_value(values: _Oscillators, delta: Float[Tensor, "B R N"]) -> Tensor:
    """The value averaged over the gap: the kernels at w = 0."""
    gap = delta.to(values.dtype)[..., None, None]
    g11, g12 = modulated_averages(gap, torch.zeros_like(gap), values.omega, values.zeta)
    out = values.displacement[:, None] * g11.real
    if values.velocity is not None:
        out = out + values.velocity[:, None] * g12.real
    if values.rest is not None:
        out = out + values.rest[:, None]
    for drive_omega, f in values.forces:
        wide = delta[..., None, None]
        spectrum = (values.omega.double(), values.zeta.double())
        driven = driven_averages(wide, torch.zeros_like(wide), drive_omega, *spectrum)
        out = out + (f[:, None] * driven).real.to(out.dtype)
    return out


def _end_value(values: _Oscillators, delta: Float[Tensor, "B R N"]) -> Tensor:
    """The value at the query time."""
    return _state(values, delta.transpose(1, 2), velocity=False)[0].transpose(1, 2)


def _state(
    osc: _Oscillators, s: Float[Tensor, "B N R"], *, velocity: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return position and velocity `[B, N, R, H, C]` at times s after each token."""
    elapsed = s.to(osc.dtype)[..., None, None]
    g11, g12, g21, g22 = propagator(elapsed, osc.omega, osc.zeta)
    x0, v0 = osc.displacement[:, :, None], osc.velocity
    x, dx = x0 * g11, x0 * g21
    if v0 is not None:
        x, dx = x + v0[:, :, None] * g12, dx + v0[:, :, None] * g22
    if osc.rest is not None:
        x = x + osc.rest[:, :, None]
    for drive_omega, f in osc.forces:
        spectrum = (osc.omega.double(), osc.zeta.double())
        response, slope = driven_response(s[..., None, None], drive_omega, *spectrum)
        x = x + (f[:, :, None] * response).real.to(x.dtype)
        dx = dx + (f[:, :, None] * slope).real.to(x.dtype)
    return x, dx if velocity else None


def _linear_integrals(
    path: LinearPath,
    keys: _Oscillators,
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
) -> Float[Tensor, "B M N H"]:
    """Return the integrals of <q, k_i> from each key to each row, segment by segment.

    Every row ends at a knot of the path, so one pass over the segments serves all rows. Adjacent
    integrals are added, never subtracted.
    """
    if not torch.equal(path.times.double(), query_times):
        raise ValueError(
            "a LinearPath must have its knots at query_times; build both from one tensor"
        )
    knots, q = path.times.double(), path.q.to(keys.dtype)
    total = keys.omega.new_zeros(*key_times.shape, keys.omega.shape[0])
    totals = []
    for j in range(knots.shape[1]):
        before = max(j - 1, 0)  # before the first knot the path is constant
        low = key_times if j == 0 else knots[:, before, None]
        ends = (low, knots[:, j, None], q[:, before], q[:, j])
        total = total + _again(_linear_segment, keys, key_times, *ends)
        totals.append(total)
    return (
        torch.stack(totals, 1) if totals else total.new_zeros(total.shape[0], 0, *total.shape[1:])
    )


def _linear_segment(
    keys: _Oscillators,
    key_times: Float[Tensor, "B N"],
    low: Float[Tensor, "B #N"],
    high: Float[Tensor, "B 1"],
    q_low: Float[Tensor, "B H C"],
    q_high: Float[Tensor, "B H C"],
) -> Float[Tensor, "B N H"]:
    r"""Return $\int \langle q, k_i \rangle$ over the part of a segment that lies after the key.

    The key restarts at the beginning of that part from its state there; on it, the path is
    $q_0 + r u$, so only the moments $\int g, \int u g$ of the propagator are needed.
    """
    # At a tie the bound is the key's time: a knot that moves there moves no bound.
    start, end = (torch.where(t > key_times, t, key_times) for t in (low, high))
    length, width = end - start, (high - low).expand_as(key_times)
    live = width > 0
    inverse = torch.where(live, 1.0 / torch.where(live, width, 1.0), 0.0).to(keys.dtype)
    rate = inverse[..., None, None] * (q_high - q_low)[:, None]  # [B, N, H, C]
    q_start = q_low[:, None] + (start - low).to(keys.dtype)[..., None, None] * rate

    elapsed = (start - key_times)[..., None]
    x, dx = (y[:, :, 0] for y in _state(keys, elapsed) if y is not None)
    u = length.to(keys.dtype)[..., None, None]
    _, i12, k12, l12 = moments(u, keys.omega, keys.zeta)
    omega2 = keys.omega**2
    g11_0, g12_0 = u - omega2 * k12, i12
    g11_1, g12_1 = 0.5 * u * u - omega2 * (u * k12 - l12), u * i12 - k12
    rest = x if keys.rest is None else x - keys.rest
    mean_0 = rest * g11_0 + dx * g12_0  # int k
    mean_1 = rest * g11_1 + dx * g12_1  # int u k
    if keys.rest is not None:
        mean_0, mean_1 = mean_0 + keys.rest * u, mean_1 + keys.rest * (0.5 * u * u)
    for drive_omega, f in keys.forces:
        spectrum = (keys.omega.double(), keys.zeta.double())
        wide = length[..., None, None]
        once, twice = driven_integrals(wide, drive_omega, *spectrum)
        phase = drive_omega * elapsed[..., None]
        turned = f * torch.exp(torch.complex(torch.zeros_like(phase), phase))
        mean_0 = mean_0 + (turned * once).real.to(u.dtype)
        mean_1 = mean_1 + (turned * (wide * once - twice)).real.to(u.dtype)
    return (q_start * mean_0 + rate * mean_1).sum(-1)


def _linear_logits(
    totals: Float[Tensor, "B R N H"],
    path: LinearPath,
    keys: _Oscillators,
    rows: slice,
    delta: Float[Tensor, "B R N"],
) -> Float[Tensor, "B R N H"]:
    limit = torch.einsum("brhc,bnhc->brnh", path.q[:, rows].to(keys.dtype), keys.content)
    apart = (delta > 0)[..., None]
    return torch.where(apart, totals / torch.where(apart, delta[..., None], 1.0), limit).to(
        keys.dtype
    )


def _masked_softmax(
    logits: Float[Tensor, "B R N H"], seen: Bool[Tensor, "B R N 1"]
) -> tuple[Float[Tensor, "B R N H"], Float[Tensor, "B R H"]]:
    """Softmax over the seen keys; a row that sees none has weights 0 and log-sum-exp -inf."""
    if logits.shape[2] == 0:
        return logits, logits.new_full((*logits.shape[:2], logits.shape[3]), -math.inf)
    top = logits.detach().masked_fill(~seen, -math.inf).amax(2, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0.0)
    power = torch.exp(torch.where(seen, logits - top, -math.inf))
    total = power.sum(2, keepdim=True)
    some = total > 0
    safe = torch.where(some, total, 1.0)
    return power / safe, torch.where(some, top + torch.log(safe), -math.inf)[:, :, 0]


def _again(function: Any, *args: Any) -> Tensor:
    """Call `function` keeping nothing for the backward pass, which calls it again."""
    out: Tensor = checkpoint(function, *args, use_reentrant=False)
    return out
