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

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

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

# Keeps nothing for the backward pass, which calls the function again.
_again = partial(checkpoint, use_reentrant=False)


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return attention over the keys before each query time, by closed forms.

    Kernels are evaluated in the dtype of the keys (at least float32); gaps, phases and driven
    kernels always in float64.
    """
    path, k, present = inputs.path, inputs.keys.start, inputs.present
    rows, pairs_per_row = inputs.query_times.shape[1], max(1, k.numel())
    dtype = torch.promote_types(k.dtype, torch.float32)
    query_times, key_times = inputs.query_times.double(), inputs.key_times.double()
    key_times = torch.where(present, key_times, 0.0)
    keys = _moving("key", inputs.keys, inputs.drive, present, dtype)
    values = _moving("value", inputs.values, inputs.drive, present, dtype)
    read_value = _mean_value if inputs.value == "average" else _end_value

    totals = query_times  # of a linear path only
    if isinstance(path, LinearPath):
        path.check_knots(query_times)
        totals = _linear_integrals(path, keys, key_times)
    chunk = max(1, _CHUNK_ELEMENTS // pairs_per_row)
    outs, lses, weights = [], [], []
    for first in range(0, rows, chunk):
        part = slice(first, min(rows, first + chunk))
        gap = query_times[:, part, None] - key_times[:, None]  # [B, R, N]
        seen = present[:, None] & (gap > 0 if inputs.strict else gap >= 0)
        # A zero gap is a constant: its limit has, by convention, no derivative in the gap.
        delta = torch.where(seen & (gap > 0), gap, 0.0)
        if isinstance(path, LinearPath):
            limit = torch.einsum("brhc,bnhc->brnh", path.q[:, part].to(dtype), keys.start)
            apart = (delta > 0)[..., None]
            mean = totals[:, part] / torch.where(apart, delta[..., None], 1.0)
            logits = torch.where(apart, mean, limit).to(dtype)
        else:
            logits = _again(_logits, path, keys, part, key_times, delta)
        logits = torch.where(seen[..., None], inputs.scale * logits, -torch.inf)
        # A row that sees no key has weights 0 and log-sum-exp -inf.
        some = seen.any(2, keepdim=True)[..., None]
        safe = torch.where(some, logits, 0.0)
        weight = torch.where(some, safe.softmax(2), 0.0)
        content = _again(read_value, values, delta)
        outs.append((weight[..., None] * content).sum(2))
        lses.append(torch.where(some[:, :, 0], safe.logsumexp(2), -torch.inf))
        weights.append(weight)

    out, lse = torch.cat(outs, 1).to(k.dtype), torch.cat(lses, 1).transpose(1, 2)
    if not inputs.return_weights:
        return AttentionResult(out, lse)
    return AttentionResult(out, lse, torch.cat(weights, 1).permute(0, 3, 1, 2))


class _Moving(NamedTuple):
    """Keys or values: initial states, rest positions and spectra in the kernel dtype."""

    start: Float[Tensor, "B N H C"]
    displacement: Float[Tensor, "B N H C"]  # start - rest
    velocity: Float[Tensor, "B N H C"]
    rest: Float[Tensor, "B N H C"]
    omega: Float[Tensor, "H C"]
    zeta: Float[Tensor, "H C"]
    forces: list[tuple[Float[Tensor, "H 1"], Complex[Tensor, "B N H C"]]]

    @property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        return self.omega.double(), self.zeta.double()


def _moving(
    role: Role, tokens: Oscillators, drive: Drive | None, present: Tensor, dtype: torch.dtype
) -> _Moving:
    # Absent tokens may hold anything, NaN included.
    tokens = tokens.map_tokens(lambda x: blank_absent(x, present).to(dtype))
    start, still = tokens.start, torch.zeros_like(tokens.start)
    rest = still if tokens.equilibrium is None else tokens.equilibrium
    velocity = still if tokens.velocity is None else tokens.velocity
    spectrum = tokens.omega.to(dtype), tokens.zeta.to(dtype)
    gains = None if drive is None else drive.gains(role)
    forces = []
    if gains is not None:
        drive_omega, cos, sin = (x.double() for x in gains)
        for n in range(drive_omega.shape[1]):
            # f = P - iQ, P = g * K, Q = h * K
            amplitude = start.double() * torch.complex(cos[:, n], -sin[:, n])
            forces.append((drive_omega[:, n, None], amplitude))
    return _Moving(start, start - rest, velocity, rest, *spectrum, forces)


def _modes(
    path: ConstantPath | SinusoidPath, rows: slice, key_times: Float[Tensor, "B N"]
) -> Iterator[tuple[Tensor, Complex[Tensor, "B R N H C"]]]:
    r"""Yield each frequency w and its amplitude at the key, $(A - iB) e^{iw(t_i - o_j)}$."""
    path = path.map(lambda x: x[:, rows] if x.shape[1] > 1 else x)
    constant = path.q if isinstance(path, ConstantPath) else path.constant
    if constant is not None:
        held = constant[:, :, None]
        held = held.to(torch.promote_types(held.dtype, torch.float32))  # no complex bfloat16
        yield key_times.new_zeros(()), torch.complex(held, torch.zeros_like(held))
    if isinstance(path, ConstantPath):
        return
    since = key_times[:, None] - path.origin.double()[..., None]  # [B, R|1, N]
    for m, w in enumerate(path.omega.double()):
        turn = torch.exp(1j * (w * since))
        a = torch.complex(path.cos[:, :, None, :, m], -path.sin[:, :, None, :, m])
        yield w, a * turn[..., None, None].to(a.dtype)


def _kernel(osc: _Moving, w: Tensor, delta: Tensor) -> Complex[Tensor, "B R N H C"]:
    r"""Return the mean of $e^{iws} k(s)$ over each gap."""
    gap = delta.to(osc.omega.dtype)[..., None, None]
    g11, g12 = modulated_averages(gap, w.to(gap.dtype), osc.omega, osc.zeta)
    turn = phi1(1j * (w * delta))[..., None, None].to(g11.dtype)
    kernel = osc.displacement[:, None] * g11 + osc.velocity[:, None] * g12
    kernel = kernel + osc.rest[:, None] * turn
    for drive_omega, f in osc.forces:
        wide = delta[..., None, None]
        ahead = driven_averages(wide, w, drive_omega, *osc.spectrum)
        behind = driven_averages(wide, w, -drive_omega, *osc.spectrum)
        driven = 0.5 * (f[:, None] * ahead + f[:, None].conj() * behind)
        kernel = kernel + driven.to(g11.dtype)
    return kernel


def _logits(
    path: ConstantPath | SinusoidPath, keys: _Moving, rows: slice, key_times: Tensor, delta: Tensor
) -> Float[Tensor, "B R N H"]:
    total = keys.omega.new_zeros(*delta.shape, keys.omega.shape[0])
    for w, a in _modes(path, rows, key_times):
        total = total + (a * _kernel(keys, w, delta)).real.sum(-1).to(total.dtype)
    return total


def _mean_value(values: _Moving, delta: Float[Tensor, "B R N"]) -> Float[Tensor, "B R N H C"]:
    return _kernel(values, delta.new_zeros(()), delta).real


def _end_value(values: _Moving, delta: Float[Tensor, "B R N"]) -> Float[Tensor, "B R N H C"]:
    return _state(values, delta.transpose(1, 2))[0].transpose(1, 2)


def _state(osc: _Moving, s: Float[Tensor, "B N R"]) -> tuple[Tensor, Tensor]:
    """Return position and velocity `[B, N, R, H, C]` at times s after each token."""
    elapsed = s.to(osc.omega.dtype)[..., None, None]
    g11, g12, g21, g22 = propagator(elapsed, osc.omega, osc.zeta)
    x0, v0 = osc.displacement[:, :, None], osc.velocity[:, :, None]
    x, dx = x0 * g11 + v0 * g12 + osc.rest[:, :, None], x0 * g21 + v0 * g22
    for drive_omega, f in osc.forces:
        response, slope = driven_response(s[..., None, None], drive_omega, *osc.spectrum)
        x = x + (f[:, :, None] * response).real.to(x.dtype)
        dx = dx + (f[:, :, None] * slope).real.to(x.dtype)
    return x, dx


def _linear_integrals(
    path: LinearPath, keys: _Moving, key_times: Tensor
) -> Float[Tensor, "B M N H"]:
    """Return the integrals of <q, k_i> from each key to each row, segment by segment.

    Adjacent integrals are added, never subtracted.
    """
    knots, q = path.times.double(), path.q.to(keys.omega.dtype)
    totals = [keys.omega.new_zeros(*key_times.shape, keys.omega.shape[0])]
    for j in range(knots.shape[1]):
        before = max(j - 1, 0)  # before the first knot the path is constant
        low = key_times if j == 0 else knots[:, before, None]
        ends = (low, knots[:, j, None], q[:, before], q[:, j])
        totals.append(totals[-1] + _again(_linear_segment, keys, key_times, *ends))
    return torch.stack(totals[1:], 1)


def _linear_segment(
    keys: _Moving, key_times: Tensor, low: Tensor, high: Tensor, q_low: Tensor, q_high: Tensor
) -> Float[Tensor, "B N H"]:
    r"""Return $\int \langle q, k_i \rangle$ over the part of a segment that lies after the key.

    The key restarts at the beginning of that part from its state there; on it, the path is
    $q_0 + r u$, so only the moments $\int g, \int u g$ of the propagator are needed.
    """
    dtype = keys.omega.dtype
    # At a tie the bound is the key's time: a knot that moves there moves no bound.
    start, end = (torch.where(t > key_times, t, key_times) for t in (low, high))
    length, width = end - start, (high - low).expand_as(key_times)
    live = width > 0
    inverse = torch.where(live, 1.0 / torch.where(live, width, 1.0), 0.0).to(dtype)
    rate = inverse[..., None, None] * (q_high - q_low)[:, None]  # [B, N, H, C]
    q_start = q_low[:, None] + (start - low).to(dtype)[..., None, None] * rate

    elapsed = (start - key_times)[..., None]
    x, dx = (y[:, :, 0] for y in _state(keys, elapsed))
    x = x - keys.rest
    u = length.to(dtype)[..., None, None]
    _, i12, k12, l12 = moments(u, keys.omega, keys.zeta)
    omega2, half_square = keys.omega**2, 0.5 * u * u
    # int k and int u k
    mean_0 = x * (u - omega2 * k12) + dx * i12 + keys.rest * u
    mean_1 = x * (half_square - omega2 * (u * k12 - l12)) + dx * (u * i12 - k12)
    mean_1 = mean_1 + keys.rest * half_square
    for drive_omega, f in keys.forces:
        wide = length[..., None, None]
        once, twice = driven_integrals(wide, drive_omega, *keys.spectrum)
        turned = f * torch.exp(1j * (drive_omega * elapsed[..., None]))
        mean_0 = mean_0 + (turned * once).real.to(u.dtype)
        mean_1 = mean_1 + (turned * (wide * once - twice)).real.to(u.dtype)
    return (q_start * mean_0 + rate * mean_1).sum(-1)
