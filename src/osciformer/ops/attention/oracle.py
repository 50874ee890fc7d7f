r"""Float64 quadrature of the definition: the judge of every other backend.

Nothing here is a closed form. Trajectories come from `torch.matrix_exp` of the oscillator's
first-order system, integrals from composite Gauss-Legendre rules, and gradients from autograd.
Cost is about a hundred matrix exponentials per pair and channel, so it is for short sequences;
rows are recomputed in the backward pass to keep memory bounded.

A key (or value) with its drive and its rest position c is the first coordinate of the linear system

$$\dot y = Z y, \quad y = (x, \dot x / \mu, f_1, \tilde f_1, f_2, \tilde f_2, \dots, c), \quad
  f_m(s) = P_m \cos\varpi_m s + Q_m \sin\varpi_m s,$$

where the scale $\mu$ balances position and velocity: with the plain pair (x, x') the entries of Z
would range over omega^2, and the exponential would lose that many digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from osciformer._types import Float, Tensor
from osciformer.math.quadrature import gauss_legendre
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult, Oscillators
from osciformer.ops.attention.query import LinearPath, QueryPath, SinusoidPath

# 20 nodes integrate exp(i phase x) over [0, 1] to rounding up to a phase of about 8.
_NODES = 20
_PHASE_PER_PANEL = 6.0

# Keeps nothing for the backward pass, which calls the function again.
_again = partial(checkpoint, use_reentrant=False)


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return attention over the keys before each query time, by quadrature in float64.

    At a zero gap the logit is its limit, `<q_j(t_i), K_i>`, and the value is `V_i`; there, neither
    has a derivative in the gap, while the path keeps its own in `t_i`.
    """
    path = inputs.path.map(lambda x: x.double())
    query_times, key_times = inputs.query_times.double(), inputs.key_times.double()
    if isinstance(path, LinearPath):
        path.check_knots(query_times)
    keys = _Moving("key", inputs.keys, inputs.drive)
    values = _Moving("value", inputs.values, inputs.drive)
    read_value = _mean_value if inputs.value == "average" else _end_value
    batch, num_keys, heads, channels = inputs.keys.start.shape
    rows = query_times.shape[1]

    outs, lses, weights = [], [], []
    for b in range(batch):
        present = inputs.present[b]
        linear = _linear_integrals(path, keys, b, key_times[b], present)
        for j in range(rows):
            gap = query_times[b, j] - key_times[b]
            seen = torch.nonzero(present & (gap > 0 if inputs.strict else gap >= 0))[:, 0]
            if seen.numel() == 0:
                outs.append(key_times.new_zeros(heads, channels))
                lses.append(key_times.new_full((heads,), -math.inf))
                weights.append(key_times.new_zeros(heads, num_keys))
                continue
            # A zero gap is a constant: its limit has, by convention, no derivative in the gap.
            delta = torch.where(gap[seen] > 0, gap[seen], 0.0)
            if isinstance(path, LinearPath):
                limit = keys.by_head(path.q[b, j].flatten() * keys.start[b, seen]).sum(-1)
                apart = (delta > 0)[:, None]
                mean = linear[j][seen] / torch.where(apart, delta[:, None], 1.0)
                logits = inputs.scale * torch.where(apart, mean, limit)
            else:
                row = path.row(b, j)
                logits = _again(_mean_product, keys, row, b, seen, key_times[b, seen], delta)
                logits = inputs.scale * logits
            content = _again(read_value, values, b, seen, delta)
            p = torch.softmax(logits, dim=0)  # [n, H]
            outs.append((p[..., None] * content).sum(0))
            lses.append(torch.logsumexp(logits, dim=0))
            weights.append(p.new_zeros(heads, num_keys).index_add(1, seen, p.T))

    out = torch.stack(outs).reshape(batch, rows, heads, channels)
    lse = torch.stack(lses).reshape(batch, rows, heads).transpose(1, 2)
    all_weights = torch.stack(weights).reshape(batch, rows, heads, num_keys).transpose(1, 2)
    return AttentionResult(out, lse, all_weights if inputs.return_weights else None)


class _Moving:
    """Initial states and dynamics of the keys or values, channels of all heads in one axis G."""

    def __init__(self, role: Role, tokens: Oscillators, drive: Drive | None) -> None:
        self.shape = tokens.omega.shape  # heads and channels
        self.omega, self.zeta = tokens.omega.double().flatten(), tokens.zeta.double().flatten()
        tokens = tokens.map_tokens(lambda x: x.double().flatten(2))
        self.start, self.rest = tokens.start, tokens.equilibrium  # [B, N, G]
        still = torch.zeros_like(self.start)
        self.velocity = still if tokens.velocity is None else tokens.velocity
        self.drive: list[tuple[Tensor, Tensor, Tensor]] = []  # frequency, P / K and Q / K, [G]
        gains = None if drive is None else drive.gains(role)
        if gains is not None:
            omega, cos, sin = (x.double() for x in gains)
            for m in range(omega.shape[1]):
                parts = omega[:, m, None].expand(self.shape), cos[:, m], sin[:, m]
                self.drive.append((parts[0].flatten(), parts[1].flatten(), parts[2].flatten()))

    def by_head(self, x: Float[Tensor, "n G"]) -> Float[Tensor, "n H C"]:
        return x.unflatten(1, self.shape)

    def scale_of_velocity(self, longest: float) -> Float[Tensor, " G"]:
        return self.omega.detach().clamp(min=1.0 / longest if longest > 0 else 1.0)

    def initial(self, b: int, seen: Tensor, mu: Tensor) -> Float[Tensor, "n G S"]:
        start = self.start[b, seen]
        state = [start, self.velocity[b, seen] / mu]
        for _, cos, sin in self.drive:
            state += [start * cos, start * sin]
        if self.rest is not None:
            state.append(self.rest[b, seen])
        return torch.stack(state, dim=-1)

    def system(self, mu: Tensor) -> Float[Tensor, "G S S"]:
        size = 2 + 2 * len(self.drive) + (self.rest is not None)
        z = self.omega.new_zeros(self.omega.shape[0], size, size)
        z[:, 0, 1] = mu
        z[:, 1, 0] = -(self.omega**2) / mu
        z[:, 1, 1] = -2.0 * self.zeta * self.omega
        for m, (drive_omega, _, _) in enumerate(self.drive):
            cos, sin = 2 + 2 * m, 3 + 2 * m
            z[:, 1, cos] = 1.0 / mu
            z[:, cos, sin] = drive_omega
            z[:, sin, cos] = -drive_omega
        if self.rest is not None:
            z[:, 1, -1] = self.omega**2 / mu
        return z

    def panels(self, longest: float, path_rate: float) -> list[tuple[float, float, int]]:
        """Return (start, width, count) groups of panels on [0, 1], for windows up to `longest`.

        Equal panels resolve every oscillation. Real decay can be far faster, but it is over after
        its first few time constants, so the first panel is halved toward 0 until it resolves them.
        """
        omega, zeta = self.omega.detach(), self.zeta.detach()
        turning = torch.where(zeta < 1.0, omega, 0.0).max().item() + path_rate
        turning += max((w.detach().abs().max().item() for w, _, _ in self.drive), default=0.0)
        decay = (omega * (1.0 + 2.0 * zeta)).max().item()
        count = max(1, math.ceil(turning * longest / _PHASE_PER_PANEL))
        width = 1.0 / count
        halvings = 0
        while decay * longest * width * 0.5**halvings > 4.0:
            halvings += 1
        groups = [(0.0, width * 0.5**halvings, 1)]
        groups += [(width * 0.5**h, width * 0.5**h, 1) for h in range(halvings, 0, -1)]
        return groups if count == 1 else [*groups, (width, width, count - 1)]

    def window_mean(
        self,
        tokens: tuple[int, Tensor],
        start: Float[Tensor, " W"],
        length: Float[Tensor, " W"],
        weight: Callable[[Tensor], Tensor],
        path_rate: float = 0.0,
    ) -> Float[Tensor, "W H C"]:
        """Return the means of `weight` times position over windows of time after each token.

        `tokens` are a series and the index of its token in each window. A window of length zero
        gives the integrand at `start`. `weight` maps times `[W, X]` to weights `[W, X, G]`;
        `path_rate` is its fastest angular frequency.
        """
        x, w = (t.to(start) for t in gauss_legendre(_NODES))
        mu = self.scale_of_velocity((start + length).detach().max().item())
        z = self.system(mu)
        mean: Tensor = torch.zeros((), dtype=torch.float64)
        for first, width, count in self.panels(length.detach().max().item(), path_rate):
            inner = length[:, None] * (width * x)  # [W, n]
            row = _exp(z[:, None] * inner[:, None, :, None, None])[..., 0, :]  # [W, G, n, S]
            entry = _exp(z * (start + first * length)[:, None, None, None])
            entries = _powers_times(_exp(z * (width * length)[:, None, None, None]), entry, count)
            steps = first + width * torch.arange(count, dtype=torch.float64, device=start.device)
            s = start[:, None, None] + length[:, None, None] * (steps[:, None] + width * x)
            q = weight(s.flatten(1)).unflatten(1, (count, _NODES)) * (width * w)[:, None]
            inside = torch.einsum("wpng,wgns->wgps", q, row)
            mean = mean + torch.einsum("wgps,wgpst->wgt", inside, entries)
        return self.by_head((mean * self.initial(*tokens, mu)).sum(-1))


def _powers_times(step: Tensor, entry: Tensor, count: int) -> Float[Tensor, "W G p S S"]:
    """Return `step^p entry` for p < count, doubling the number of powers each time."""
    powers = entry[:, :, None]
    while powers.shape[2] < count:
        powers = torch.cat([powers, step[:, :, None] @ powers], dim=2)
        step = step @ step
    return powers[:, :, :count]


def _mean_product(
    keys: _Moving, row: QueryPath, b: int, seen: Tensor, anchor: Tensor, delta: Tensor
) -> Float[Tensor, "n H"]:
    """Mean of <q_j, k_i> over each gap."""

    def query(s: Tensor) -> Tensor:
        return row.evaluate((anchor[:, None] + s)[None, None])[0, 0].flatten(-2)

    rate = row.omega.detach().abs().max().item() if isinstance(row, SinusoidPath) else 0.0
    return keys.window_mean((b, seen), torch.zeros_like(delta), delta, query, rate).sum(-1)


def _mean_value(values: _Moving, b: int, seen: Tensor, delta: Tensor) -> Float[Tensor, "n H C"]:
    def one(s: Tensor) -> Tensor:
        return s.new_ones(*s.shape, values.omega.shape[0])

    return values.window_mean((b, seen), torch.zeros_like(delta), delta, one)


def _end_value(values: _Moving, b: int, seen: Tensor, delta: Tensor) -> Float[Tensor, "n H C"]:
    mu = values.scale_of_velocity(delta.detach().max().item())
    row = _exp(values.system(mu) * delta[:, None, None, None])[..., 0, :]
    return values.by_head((row * values.initial(b, seen, mu)).sum(-1))


def _linear_integrals(
    path: QueryPath, keys: _Moving, b: int, anchors: Tensor, present: Tensor
) -> list[Tensor]:
    """Return the integrals of <q, k_i> from t_i to each knot of a linear path, `[N, H]` a knot."""
    if not isinstance(path, LinearPath):
        return []
    knots, q = path.times[b], path.q[b].flatten(1)
    totals: list[Tensor] = []
    for j in range(len(knots)):
        before = max(j - 1, 0)  # the path is constant before the first knot
        low = anchors if j == 0 else knots[before]
        ends = (low, knots[j], q[before], q[j])
        segment = _again(_linear_segment, keys, b, present, anchors, *ends)
        totals.append(totals[-1] + segment if totals else segment)
    return totals


def _linear_segment(
    keys: _Moving, b: int, present: Tensor, anchors: Tensor, low: Tensor, high: Tensor, *q: Tensor
) -> Float[Tensor, "N H"]:
    """Integrate over the part after t_i of a segment; the query goes from `q[0]` to `q[1]`."""
    # At a tie the bound is the key's time: a knot that moves there moves no bound.
    start, end = (torch.where(t > anchors, t, anchors) for t in (low, high))
    live = torch.nonzero(present & (end > start))[:, 0]
    out = keys.by_head(torch.zeros_like(keys.start[b])).sum(-1)
    if live.numel() == 0:
        return out
    start, end, anchor = start[live], end[live], anchors[live]
    knot = low.expand_as(anchors)[live]

    def query(s: Tensor) -> Tensor:
        # Differences of neighbouring times are exact; absolute times would lose tiny gaps.
        theta = ((anchor - knot)[:, None] + s) / (high - knot)[:, None]
        return q[0] + theta[..., None] * (q[1] - q[0])

    product = keys.window_mean((b, live), start - anchor, end - start, query).sum(-1)
    return out.index_add(0, live, (end - start)[:, None] * product)


class _MatrixExponential(torch.autograd.Function):
    """`torch.matrix_exp` with a backward pass whose accuracy ignores the gradient's size.

    The derivative is the corner of the exponential of a block matrix that contains the gradient.
    A large gradient would dominate that matrix's norm and cost digits, so it is scaled to 1.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return torch.matrix_exp(a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        grad, at, size = grads[0], a.mT, a.shape[-1]
        norm = grad.abs().amax((-2, -1), keepdim=True)
        norm = torch.where(norm > 0, norm, 1.0)
        block = torch.cat(
            [torch.cat([at, grad / norm], -1), torch.cat([torch.zeros_like(at), at], -1)], -2
        )
        corner: Tensor = torch.matrix_exp(block)[..., :size, size:]
        return corner * norm


_exp: Callable[[Tensor], Tensor] = _MatrixExponential.apply
