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
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from osciformer._types import Complex, Float, Tensor
from osciformer.math.driven import driven_averages, driven_integrals, driven_response
from osciformer.math.integrals import modulated_averages, phi1
from osciformer.math.oscillator import moments, propagator
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult, Oscillators
from osciformer.ops.attention.query import ConstantPath, LinearPath, SinusoidPath
from osciformer.ops.padding import blank_absent

_CHUNK_ELEMENTS = 2**17  # pairs x channels evaluated at once; temporaries then fit in cache


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return attention over the keys before each query time, by closed forms.

    Kernels are evaluated in the dtype of the keys (at least float32); gaps, phases and driven
    kernels always in float64.
    """
    path, k = inputs.path, inputs.keys.start
    batch, num_keys, heads, channels = k.shape
    rows = inputs.query_times.shape[1]
    dtype = torch.promote_types(k.dtype, torch.float32)
    query_times, key_times = inputs.query_times.double(), inputs.key_times.double()
    present = torch.ones_like(key_times, dtype=torch.bool) if inputs.mask is None else inputs.mask
    key_times = torch.where(present, key_times, 0.0)
    keys = _Moving.make("key", inputs.keys, inputs.drive, present, dtype)
    values = _Moving.make("value", inputs.values, inputs.drive, present, dtype)
    read_value = _mean_value if inputs.value == "average" else _end_value

    totals = query_times  # of a linear path only
    if isinstance(path, LinearPath):
        totals = _linear_integrals(path, keys, query_times, key_times)
    pairs_per_row = max(1, batch * num_keys * heads * channels)
    chunk = max(1, _CHUNK_ELEMENTS // pairs_per_row)
    outs, lses, weights = [], [], []
    for first in range(0, rows, chunk):
        part = slice(first, min(rows, first + chunk))
        gap = query_times[:, part, None] - key_times[:, None]  # [B, R, N]
        seen = present[:, None] & (gap > 0 if inputs.strict else gap >= 0)
        # A zero gap is a constant: its limit has, by convention, no derivative in the gap.
        delta = torch.where(seen & (gap > 0), gap, 0.0)
        if isinstance(path, LinearPath):
            logits = _linear_logits(totals[:, part], path, keys, part, delta)
        else:
            logits = _again(_logits, path, keys, part, key_times, delta)
        weight, lse = _masked_softmax(inputs.scale * logits, seen[..., None])
        content = _again(read_value, values, delta)
        outs.append((weight[..., None] * content).sum(2))
        lses.append(lse)
        weights.append(weight)

    out, lse = torch.cat(outs, 1).to(k.dtype), torch.cat(lses, 1).transpose(1, 2)
    if not inputs.return_weights:
        return AttentionResult(out, lse)
    return AttentionResult(out, lse, torch.cat(weights, 1).permute(0, 3, 1, 2))


@dataclass(frozen=True)
class _Moving:
    """Keys or values: initial states, rest positions and spectra in the kernel dtype."""

    displacement: Float[Tensor, "B N H C"]  # content - rest
    velocity: Float[Tensor, "B N H C"]
    rest: Float[Tensor, "B N H C"] | None
    content: Float[Tensor, "B N H C"]
    omega: Float[Tensor, "H C"]
    zeta: Float[Tensor, "H C"]
    forces: list[tuple[Float[Tensor, "H 1"], Complex[Tensor, "B N H C"]]]

    @staticmethod
    def make(
        role: Role, tokens: Oscillators, drive: Drive | None, present: Tensor, dtype: torch.dtype
    ) -> _Moving:
        # Absent tokens may hold anything, NaN included.
        tokens = tokens.map_tokens(lambda x: blank_absent(x, present).to(dtype))
        held, rest = tokens.start, tokens.equilibrium
        gains = None if drive is None else drive.gains(role)
        forces = []
        if gains is not None:
            drive_omega, cos, sin = (x.double() for x in gains)
            for n in range(drive_omega.shape[1]):
                # f = P - iQ, P = g * K, Q = h * K
                amplitude = held.double() * torch.complex(cos[:, n], -sin[:, n])
                forces.append((drive_omega[:, n, None], amplitude))
        return _Moving(
            held if rest is None else held - rest,
            torch.zeros_like(held) if tokens.velocity is None else tokens.velocity,
            rest,
            held,
            tokens.omega.to(dtype),
            tokens.zeta.to(dtype),
            forces,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.omega.dtype

    @property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        return self.omega.double(), self.zeta.double()


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
    path: ConstantPath | SinusoidPath, keys: _Moving, rows: slice, key_times: Tensor, delta: Tensor
) -> Float[Tensor, "B R N H"]:
    gap = delta.to(keys.dtype)[..., None, None]
    total = gap.new_zeros(*delta.shape, keys.omega.shape[0])
    for w, a in _modes(path, rows, key_times):
        g11, g12 = modulated_averages(gap, w.to(keys.dtype), keys.omega, keys.zeta)
        kernel = keys.displacement[:, None] * g11 + keys.velocity[:, None] * g12
        if keys.rest is not None:
            turn = torch.complex(torch.zeros_like(delta), w * delta)
            kernel = kernel + keys.rest[:, None] * phi1(turn)[..., None, None].to(g11.dtype)
        for drive_omega, f in keys.forces:
            wide = delta[..., None, None]
            ahead = driven_averages(wide, w, drive_omega, *keys.spectrum)
            behind = driven_averages(wide, w, -drive_omega, *keys.spectrum)
            driven = 0.5 * (f[:, None] * ahead + f[:, None].conj() * behind)
            kernel = kernel + driven.to(g11.dtype)
        total = total + (a * kernel).real.sum(-1).to(total.dtype)
    return total


def _mean_value(values: _Moving, delta: Float[Tensor, "B R N"]) -> Tensor:
    """The value averaged over the gap: the kernels at w = 0."""
    gap = delta.to(values.dtype)[..., None, None]
    g11, g12 = modulated_averages(gap, torch.zeros_like(gap), values.omega, values.zeta)
    out = values.displacement[:, None] * g11.real + values.velocity[:, None] * g12.real
    if values.rest is not None:
        out = out + values.rest[:, None]
    for drive_omega, f in values.forces:
        wide = delta[..., None, None]
        driven = driven_averages(wide, torch.zeros_like(wide), drive_omega, *values.spectrum)
        out = out + (f[:, None] * driven).real.to(out.dtype)
    return out


def _end_value(values: _Moving, delta: Float[Tensor, "B R N"]) -> Tensor:
    """The value at the query time."""
    return _state(values, delta.transpose(1, 2))[0].transpose(1, 2)


def _state(osc: _Moving, s: Float[Tensor, "B N R"]) -> tuple[Tensor, Tensor]:
    """Return position and velocity `[B, N, R, H, C]` at times s after each token."""
    elapsed = s.to(osc.dtype)[..., None, None]
    g11, g12, g21, g22 = propagator(elapsed, osc.omega, osc.zeta)
    x0, v0 = osc.displacement[:, :, None], osc.velocity[:, :, None]
    x, dx = x0 * g11 + v0 * g12, x0 * g21 + v0 * g22
    if osc.rest is not None:
        x = x + osc.rest[:, :, None]
    for drive_omega, f in osc.forces:
        response, slope = driven_response(s[..., None, None], drive_omega, *osc.spectrum)
        x = x + (f[:, :, None] * response).real.to(x.dtype)
        dx = dx + (f[:, :, None] * slope).real.to(x.dtype)
    return x, dx


def _linear_integrals(
    path: LinearPath, keys: _Moving, query_times: Tensor, key_times: Tensor
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
    return torch.stack(totals, 1)


def _linear_segment(
    keys: _Moving, key_times: Tensor, low: Tensor, high: Tensor, q_low: Tensor, q_high: Tensor
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
    x, dx = (y[:, :, 0] for y in _state(keys, elapsed))
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
        wide = length[..., None, None]
        once, twice = driven_integrals(wide, drive_omega, *keys.spectrum)
        phase = drive_omega * elapsed[..., None]
        turned = f * torch.exp(torch.complex(torch.zeros_like(phase), phase))
        mean_0 = mean_0 + (turned * once).real.to(u.dtype)
        mean_1 = mean_1 + (turned * (wide * once - twice)).real.to(u.dtype)
    return (q_start * mean_0 + rate * mean_1).sum(-1)


def _linear_logits(
    totals: Tensor, path: LinearPath, keys: _Moving, rows: slice, delta: Tensor
) -> Float[Tensor, "B R N H"]:
    limit = torch.einsum("brhc,bnhc->brnh", path.q[:, rows].to(keys.dtype), keys.content)
    apart = (delta > 0)[..., None]
    mean = totals / torch.where(apart, delta[..., None], 1.0)
    return torch.where(apart, mean, limit).to(keys.dtype)


def _masked_softmax(logits: Tensor, seen: Tensor) -> tuple[Tensor, Float[Tensor, "B R H"]]:
    """Softmax over the seen keys; a row that sees none has weights 0 and log-sum-exp -inf."""
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
