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

from osciformer._types import Bool, Float, Tensor
from osciformer.math.quadrature import gauss_legendre
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath

# 20 nodes integrate exp(i phase x) over [0, 1] to rounding up to a phase of about 8.
_NODES = 20
_PHASE_PER_PANEL = 6.0


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
    """Return attention over the keys before each query time, by quadrature in float64.

    At a zero gap the logit is its limit, `<q_j(t_i), K_i>`, and the value is `V_i`; there, neither
    has a derivative in the gap, while the path keeps its own in `t_i`.

    Args:
        path: The query as a function of time, from `resolve_query`.
        k: Keys at their own times.
        v: Values at their own times.
        query_times: Times at which attention is read.
        key_times: Times of the keys.
        key_omega: Natural frequencies of the key oscillators.
        key_zeta: Damping ratios of the key oscillators.
        value_omega: Natural frequencies of the value oscillators.
        value_zeta: Damping ratios of the value oscillators.
        key_velocity: Initial velocities of the keys; None is zero.
        value_velocity: Initial velocities of the values; None is zero.
        value: `average` over the gap, or `point`, the value at the query time.
        drive: Sinusoidal forces on keys and values.
        mask: Which keys are present.
        scale: Factor on the logits.
        strict: Whether a key must lie strictly before the query time to be seen.
        key_equilibrium: Rest positions of the keys; None is zero.
        value_equilibrium: Rest positions of the values; None is zero.
        return_weights: Whether to return the attention weights.

    Returns:
        Output, log-sum-exp of the scaled logits, and weights or None, all float64. A row that
        sees no key has output 0, weights 0 and log-sum-exp `-inf`.
    """
    path = _double(path)
    query_times, key_times = query_times.double(), key_times.double()
    keys = _Oscillators("key", k, key_omega, key_zeta, key_velocity, key_equilibrium, drive)
    values = _Oscillators(
        "value", v, value_omega, value_zeta, value_velocity, value_equilibrium, drive
    )
    batch, num_keys, heads, channels = k.shape
    rows = query_times.shape[1]

    outs, lses, weights = [], [], []
    for b in range(batch):
        present = torch.ones(num_keys, dtype=torch.bool, device=k.device)
        present = present if mask is None else mask[b]
        linear = (
            _linear_integrals(path, keys, b, query_times[b], key_times[b], present)
            if isinstance(path, LinearPath)
            else None
        )
        for j in range(rows):
            gap = query_times[b, j] - key_times[b]
            seen = torch.nonzero(present & (gap > 0 if strict else gap >= 0))[:, 0]
            if seen.numel() == 0:
                outs.append(key_times.new_zeros(heads, channels))
                lses.append(key_times.new_full((heads,), -math.inf))
                weights.append(key_times.new_zeros(heads, num_keys))
                continue
            # A zero gap is a constant: its limit has, by convention, no derivative in the gap.
            delta = torch.where(gap[seen] > 0, gap[seen], 0.0)
            anchor = key_times[b, seen]
            if not isinstance(path, LinearPath) or linear is None:
                logits = _again(_mean_product, keys, path, b, j, seen, anchor, delta)
            else:
                logits = _linear_logits(linear, path, keys, b, j, seen, delta)
            logits = scale * logits
            content = _again(
                _mean_value if value == "average" else _end_value, values, b, seen, delta
            )
            p = torch.softmax(logits, dim=0)  # [n, H]
            outs.append((p[..., None] * content).sum(0))
            lses.append(torch.logsumexp(logits, dim=0))
            weights.append(p.new_zeros(heads, num_keys).index_add(1, seen, p.T))

    if not outs:  # no batch or no rows
        out = k.new_zeros(batch, rows, heads, channels, dtype=torch.float64)
        lse = out.new_full((batch, heads, rows), -math.inf)
        return out, lse, out.new_zeros(batch, heads, rows, num_keys) if return_weights else None
    out = torch.stack(outs).reshape(batch, rows, heads, channels)
    lse = torch.stack(lses).reshape(batch, rows, heads).transpose(1, 2)
    if not return_weights:
        return out, lse, None
    return out, lse, torch.stack(weights).reshape(batch, rows, heads, num_keys).transpose(1, 2)


class _Oscillators:
    """Initial states and dynamics of one role, channels of all heads in one axis G."""

    def __init__(
        self,
        role: Any,
        content: Tensor,
        omega: Tensor,
        zeta: Tensor,
        velocity: Tensor | None,
        equilibrium: Tensor | None,
        drive: Drive | None,
    ) -> None:
        self.heads, self.channels = content.shape[2:]
        self.content = content.double().flatten(2)  # [B, N, G]
        self.omega, self.zeta = omega.double().flatten(), zeta.double().flatten()
        self.velocity = None if velocity is None else velocity.double().flatten(2)
        self.equilibrium = None if equilibrium is None else equilibrium.double().flatten(2)
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

    def scale_of_velocity(self, longest: float) -> Float[Tensor, " G"]:
        return self.omega.detach().clamp(min=1.0 / longest if longest > 0 else 1.0)

    def initial(self, b: int, seen: Tensor, mu: Tensor) -> Float[Tensor, "n G S"]:
        content = self.content[b, seen]
        shift = content if self.equilibrium is None else content - self.equilibrium[b, seen]
        velocity = torch.zeros_like(content) if self.velocity is None else self.velocity[b, seen]
        force = content[..., None] * self.gains
        return torch.cat([torch.stack([shift, velocity / mu], dim=-1), force], dim=-1)

    def rest(self, b: int, seen: Tensor) -> Float[Tensor, "n G"]:
        if self.equilibrium is None:
            return torch.zeros_like(self.content[b, seen])
        return self.equilibrium[b, seen]

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
    osc: _Oscillators,
    start: Float[Tensor, " W"],
    length: Float[Tensor, " W"],
    weight: Callable[[Tensor], Tensor],
    path_rate: float,
    mu: Float[Tensor, " G"],
) -> tuple[Float[Tensor, "W G S"], Float[Tensor, "W G"]]:
    """Return the means of `weight * first row of exp(Z s)` and of `weight` over windows of s.

    Args:
        osc: The oscillators.
        start: First s of each window, not negative.
        length: Length of each window; zero gives the integrand at `start`.
        weight: Maps s `[W, X]` to weights `[W, X, G]`.
        path_rate: Fastest angular frequency in `weight`.
        mu: Velocity scale of the state.
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
    keys: _Oscillators, path: QueryPath, b: int, j: int, seen: Tensor, anchor: Tensor, delta: Tensor
) -> Float[Tensor, "n H"]:
    """Mean of <q_j, k_i> over each gap."""
    row = _row(path, b, j)

    def query(s: Tensor) -> Tensor:
        return row.evaluate((anchor[:, None] + s)[None, None])[0, 0].flatten(-2)

    rate = path.omega.detach().abs().max().item() if isinstance(path, SinusoidPath) else 0.0
    mu = keys.scale_of_velocity(delta.detach().max().item())
    means, q_mean = _window_means(keys, torch.zeros_like(delta), delta, query, rate, mu)
    product = (means * keys.initial(b, seen, mu)).sum(-1) + q_mean * keys.rest(b, seen)
    return product.unflatten(1, (keys.heads, keys.channels)).sum(-1)


def _mean_value(values: _Oscillators, b: int, seen: Tensor, delta: Tensor) -> Tensor:
    mu = values.scale_of_velocity(delta.detach().max().item())

    def one(s: Tensor) -> Tensor:
        return torch.ones(*s.shape, values.omega.shape[0], dtype=s.dtype, device=s.device)

    means, _ = _window_means(values, torch.zeros_like(delta), delta, one, 0.0, mu)
    out = (means * values.initial(b, seen, mu)).sum(-1) + values.rest(b, seen)
    return out.unflatten(1, (values.heads, values.channels))


def _end_value(values: _Oscillators, b: int, seen: Tensor, delta: Tensor) -> Tensor:
    mu = values.scale_of_velocity(delta.detach().max().item())
    row = _exp(values.system(mu) * delta[:, None, None, None])[..., 0, :]
    out = (row * values.initial(b, seen, mu)).sum(-1) + values.rest(b, seen)
    return out.unflatten(1, (values.heads, values.channels))


def _linear_integrals(
    path: LinearPath, keys: _Oscillators, b: int, rows: Tensor, anchors: Tensor, present: Tensor
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
        if j == 0:  # constant before the first knot
            total = total + _again(
                _linear_segment, keys, b, present, anchors, anchors, knots[0], None, q[0], q[0]
            )
        else:
            low, high = knots[j - 1], knots[j]
            total = total + _again(
                _linear_segment, keys, b, present, anchors, low, high, low, q[j - 1], q[j]
            )
        totals.append(total)
    return totals


def _linear_segment(
    keys: _Oscillators,
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
    product = (means * keys.initial(b, live, mu)).sum(-1) + q_mean * keys.rest(b, live)
    product = product.unflatten(1, (keys.heads, keys.channels)).sum(-1)
    return out.index_add(0, live, length[:, None] * product)


def _linear_logits(
    integrals: list[Tensor],
    path: LinearPath,
    keys: _Oscillators,
    b: int,
    j: int,
    seen: Tensor,
    delta: Tensor,
) -> Float[Tensor, "n H"]:
    limit = (path.q[b, j].flatten() * keys.content[b, seen]).unflatten(
        1, (keys.heads, keys.channels)
    )
    apart = (delta > 0)[:, None]
    mean = integrals[j][seen] / torch.where(apart, delta[:, None], 1.0)
    return torch.where(apart, mean, limit.sum(-1))


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

    if isinstance(path, ConstantPath):
        return ConstantPath(pick(path.q))
    assert isinstance(path, SinusoidPath)
    constant = None if path.constant is None else pick(path.constant)
    return SinusoidPath(path.omega, constant, pick(path.cos), pick(path.sin), pick(path.origin))


def _double(path: QueryPath) -> QueryPath:
    tensors = {name: x.double() for name, x in vars(path).items() if x is not None}
    return replace(path, **tensors)
