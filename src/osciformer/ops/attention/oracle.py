r"""Float64 quadrature of the definition: the judge of every other backend.

Nothing here is a closed form. Trajectories come from `torch.matrix_exp` of the oscillator's
first-order system, integrals from composite Gauss-Legendre rules, and gradients from autograd.
Cost is about a hundred matrix exponentials per pair and channel, so it is for short sequences;
rows are recomputed in the backward pass to keep memory bounded.

A key (or value) with its drive is the first coordinate of the linear system

$$\dot y = Z y, \quad y = (x, \dot x / \mu, f_1, \tilde f_1, f_2, \tilde f_2, \dots), \quad
  f_m(s) = P_m \cos\varpi_m s + Q_m \sin\varpi_m s,$$

where the scale $\mu$ balances position and velocity: with the plain pair (x, x') the entries of Z
would range over omega^2, and the exponential would lose that many digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return attention over the keys before each query time, by quadrature in float64.

    At a zero gap the logit is its limit, `<q_j(t_i), K_i>`, and the value is `V_i`; there, neither
    has a derivative in the gap, while the path keeps its own in `t_i`.
    """
    path, mask, scale = _double(inputs.path), inputs.mask, inputs.scale
    query_times, key_times = inputs.query_times.double(), inputs.key_times.double()
    keys = _Moving("key", inputs.keys, inputs.drive)
    values = _Moving("value", inputs.values, inputs.drive)
    read_value = _mean_value if inputs.value == "average" else _end_value
    batch, num_keys, heads, channels = inputs.keys.start.shape
    rows = query_times.shape[1]

    outs, lses, weights = [], [], []
    for b in range(batch):
        present = torch.ones_like(key_times[b], dtype=torch.bool) if mask is None else mask[b]
        linear = []
        if isinstance(path, LinearPath):
            linear = _linear_integrals(path, keys, b, query_times[b], key_times[b], present)
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
            anchor = key_times[b, seen]
            if isinstance(path, LinearPath):
                logits = scale * _linear_logits(linear[j], path, keys, b, j, seen, delta)
            else:
                logits = scale * _again(_mean_product, keys, path, b, j, seen, anchor, delta)
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
        self.heads, self.channels = tokens.start.shape[2:]
        tokens = tokens.map_tokens(lambda x: x.double().flatten(2))
        self.content, still = tokens.start, torch.zeros_like(tokens.start)  # [B, N, G]
        self.velocity = still if tokens.velocity is None else tokens.velocity
        self.rest = still if tokens.equilibrium is None else tokens.equilibrium
        self.omega, self.zeta = tokens.omega.double().flatten(), tokens.zeta.double().flatten()
        gains = None if drive is None else drive.gains(role)
        if gains is None:
            self.drive_omega = self.omega.new_zeros(self.heads * self.channels, 0)
            self.gains = self.omega.new_zeros(self.heads * self.channels, 0)
        else:
            drive_omega, cos, sin = (x.double() for x in gains)
            modes = drive_omega.shape[1]
            per_channel = drive_omega[:, None].expand(self.heads, self.channels, modes)
            self.drive_omega = per_channel.flatten(0, 1)  # [G, Md]
            pairs = torch.stack([cos, sin], dim=-1)  # [H, Md, C, 2]
            self.gains = pairs.transpose(1, 2).flatten(2).flatten(0, 1)  # [G, 2 Md]

    def by_head(self, x: Float[Tensor, "n G"]) -> Float[Tensor, "n H C"]:
        return x.unflatten(1, (self.heads, self.channels))

    def scale_of_velocity(self, longest: float) -> Float[Tensor, " G"]:
        return self.omega.detach().clamp(min=1.0 / longest if longest > 0 else 1.0)

    def initial(self, b: int, seen: Tensor, mu: Tensor) -> Float[Tensor, "n G S"]:
        content = self.content[b, seen]
        state = [content - self.rest[b, seen], self.velocity[b, seen] / mu]
        return torch.cat([torch.stack(state, dim=-1), content[..., None] * self.gains], dim=-1)

    def system(self, mu: Tensor) -> Float[Tensor, "G S S"]:
        size = 2 + 2 * self.drive_omega.shape[1]
        z = self.omega.new_zeros(self.omega.shape[0], size, size)
        z[:, 0, 1] = mu
        z[:, 1, 0] = -(self.omega**2) / mu
        z[:, 1, 1] = -2.0 * self.zeta * self.omega
        for m in range(self.drive_omega.shape[1]):
            cos, sin = 2 + 2 * m, 3 + 2 * m
            z[:, 1, cos] = 1.0 / mu
            z[:, cos, sin] = self.drive_omega[:, m]
            z[:, sin, cos] = -self.drive_omega[:, m]
        return z

    def panels(self, longest: float, path_rate: float) -> list[tuple[float, float, int]]:
        """Return (start, width, count) groups of panels on [0, 1], for windows up to `longest`.

        Equal panels resolve every oscillation. Real decay can be far faster, but it is over after
        its first few time constants, so the first panel is halved toward 0 until it resolves them.
        """
        omega, zeta = self.omega.detach(), self.zeta.detach()
        turning = torch.where(zeta < 1.0, omega, 0.0).max().item() + path_rate
        turning += self.drive_omega.detach().abs().max().item() if self.drive_omega.numel() else 0.0
        decay = (omega * (1.0 + 2.0 * zeta)).max().item()
        count = max(1, math.ceil(turning * longest / _PHASE_PER_PANEL))
        width = 1.0 / count
        halvings = 0
        while decay * longest * width * 0.5**halvings > 4.0:
            halvings += 1
        groups = [(0.0, width * 0.5**halvings, 1)]
        groups += [(width * 0.5**h, width * 0.5**h, 1) for h in range(halvings, 0, -1)]
        return groups if count == 1 else [*groups, (width, width, count - 1)]


def _window_means(
    osc: _Moving,
    start: Float[Tensor, " W"],
    length: Float[Tensor, " W"],
    weight: Callable[[Tensor], Tensor],
    path_rate: float,
    mu: Float[Tensor, " G"],
) -> tuple[Float[Tensor, "W G S"], Float[Tensor, "W G"]]:
    """Return the means of `weight * first row of exp(Z s)` and of `weight` over windows of s.

    A window of length zero gives the integrand at `start`. `weight` maps s `[W, X]` to weights
    `[W, X, G]`; `path_rate` is its fastest angular frequency, `mu` the velocity scale of the state.
    """
    x, w = (t.to(start) for t in gauss_legendre(_NODES))
    z = osc.system(mu)
    rows_mean: Tensor = torch.zeros((), dtype=torch.float64)
    weight_mean: Tensor = torch.zeros((), dtype=torch.float64)
    for first, width, count in osc.panels(length.detach().max().item(), path_rate):
        inner = length[:, None] * (width * x)  # [W, n]
        row = _exp(z[:, None] * inner[:, None, :, None, None])[..., 0, :]  # [W, G, n, S]
        entry = _exp(z * (start + first * length)[:, None, None, None])
        entries = _powers_times(_exp(z * (width * length)[:, None, None, None]), entry, count)
        steps = first + width * torch.arange(count, dtype=torch.float64, device=start.device)
        s = start[:, None, None] + length[:, None, None] * (steps[:, None] + width * x)  # [W, p, n]
        q = weight(s.flatten(1)).unflatten(1, (count, _NODES)) * (width * w)[:, None]
        inside = torch.einsum("wpng,wgns->wgps", q, row)
        rows_mean = rows_mean + torch.einsum("wgps,wgpst->wgt", inside, entries)
        weight_mean = weight_mean + q.sum((1, 2))
    return rows_mean, weight_mean


def _powers_times(step: Tensor, entry: Tensor, count: int) -> Float[Tensor, "W G p S S"]:
    """Return `step^p entry` for p < count, doubling the number of powers each time."""
    powers = entry[:, :, None]
    while powers.shape[2] < count:
        powers = torch.cat([powers, step[:, :, None] @ powers], dim=2)
        step = step @ step
    return powers[:, :, :count]


def _mean_product(
    keys: _Moving, path: QueryPath, b: int, j: int, seen: Tensor, anchor: Tensor, delta: Tensor
) -> Float[Tensor, "n H"]:
    """Mean of <q_j, k_i> over each gap."""
    row = _row(path, b, j)

    def query(s: Tensor) -> Tensor:
        return row.evaluate((anchor[:, None] + s)[None, None])[0, 0].flatten(-2)

    rate = path.omega.detach().abs().max().item() if isinstance(path, SinusoidPath) else 0.0
    mu = keys.scale_of_velocity(delta.detach().max().item())
    means, q_mean = _window_means(keys, torch.zeros_like(delta), delta, query, rate, mu)
    product = (means * keys.initial(b, seen, mu)).sum(-1) + q_mean * keys.rest[b, seen]
    return keys.by_head(product).sum(-1)


def _mean_value(values: _Moving, b: int, seen: Tensor, delta: Tensor) -> Tensor:
    mu = values.scale_of_velocity(delta.detach().max().item())

    def one(s: Tensor) -> Tensor:
        return torch.ones(*s.shape, values.omega.shape[0], dtype=s.dtype, device=s.device)

    means, _ = _window_means(values, torch.zeros_like(delta), delta, one, 0.0, mu)
    return values.by_head((means * values.initial(b, seen, mu)).sum(-1) + values.rest[b, seen])


def _end_value(values: _Moving, b: int, seen: Tensor, delta: Tensor) -> Tensor:
    mu = values.scale_of_velocity(delta.detach().max().item())
    row = _exp(values.system(mu) * delta[:, None, None, None])[..., 0, :]
    return values.by_head((row * values.initial(b, seen, mu)).sum(-1) + values.rest[b, seen])


def _linear_integrals(
    path: LinearPath, keys: _Moving, b: int, rows: Tensor, anchors: Tensor, present: Tensor
) -> list[Tensor]:
    """Integrals of <q, k_i> from t_i to each row's time, `[N, H]` a row, knot by knot.

    Every row ends at a knot of the path, so one pass over the segments serves all rows.
    """
    if not torch.equal(path.times[b], rows):
        raise ValueError(
            "a LinearPath must have its knots at query_times; build both from one tensor"
        )
    knots, q = path.times[b], path.q[b].flatten(1)
    total = keys.omega.new_zeros(anchors.shape[0], keys.heads)
    totals = []
    for j in range(rows.shape[0]):
        # The path is constant before the first knot.
        segment: tuple[Any, ...] = (anchors, knots[0], None, q[0], q[0])
        if j > 0:
            segment = (knots[j - 1], knots[j], knots[j - 1], q[j - 1], q[j])
        total = total + _again(_linear_segment, keys, b, present, anchors, *segment)
        totals.append(total)
    return totals


def _linear_segment(
    keys: _Moving,
    b: int,
    present: Tensor,
    anchors: Tensor,
    low: Tensor,
    high: Tensor,
    knot: Tensor | None,
    q_low: Tensor,
    q_high: Tensor,
) -> Float[Tensor, "N H"]:
    # At a tie the bound is the key's time: a knot that moves there moves no bound.
    low, end = (torch.where(t > anchors, t, anchors) for t in (low, high))
    live = torch.nonzero(present & (end > low))[:, 0]
    out = keys.omega.new_zeros(anchors.shape[0], keys.heads)
    if live.numel() == 0:
        return out
    low, end, anchor = low[live], end[live], anchors[live]
    length = end - low

    def query(s: Tensor) -> Tensor:
        if knot is None:
            return q_low.expand(*s.shape, -1)
        # Differences of neighbouring times are exact; absolute times would lose tiny gaps.
        theta = ((anchor - knot)[:, None] + s) / (high - knot)
        return q_low + theta[..., None] * (q_high - q_low)

    mu = keys.scale_of_velocity((end - anchor).detach().max().item())
    means, q_mean = _window_means(keys, low - anchor, length, query, 0.0, mu)
    product = (means * keys.initial(b, live, mu)).sum(-1) + q_mean * keys.rest[b, live]
    return out.index_add(0, live, length[:, None] * keys.by_head(product).sum(-1))


def _linear_logits(
    integrals: Tensor, path: LinearPath, keys: _Moving, b: int, j: int, seen: Tensor, delta: Tensor
) -> Float[Tensor, "n H"]:
    limit = keys.by_head(path.q[b, j].flatten() * keys.content[b, seen]).sum(-1)
    apart = (delta > 0)[:, None]
    return torch.where(apart, integrals[seen] / torch.where(apart, delta[:, None], 1.0), limit)


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


def _exp(a: Tensor) -> Tensor:
    out: Tensor = _MatrixExponential.apply(a)
    return out


def _again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call `function` keeping nothing for the backward pass, which calls it again."""
    out: Tensor = checkpoint(function, *args, use_reentrant=False)
    return out


def _row(path: QueryPath, b: int, j: int) -> QueryPath:
    """Return the path of one row as a path of one sequence and one row."""

    def pick(x: Tensor) -> Tensor:
        r = j if x.shape[1] > 1 else 0
        return x[b : b + 1, r : r + 1]

    tensors = {name: x for name, x in vars(path).items() if name != "omega" and x is not None}
    picked: dict[str, Any] = {name: pick(x) for name, x in tensors.items()}
    return replace(path, **picked)


def _double(path: QueryPath) -> QueryPath:
    tensors: dict[str, Any] = {n: x.double() for n, x in vars(path).items() if x is not None}
    return replace(path, **tensors)
