r"""Attention some time after each token, to that token and those before it, by their index.

Row (i, g) is asked at $t_i + g$ and sees the tokens 0 to i, whatever comes between $t_i$ and that
time. With the reference $r = t_i$ the closed form factorises (see `math/README.md`): all that the
past has to say at $t_i$ is, per earlier token and channel, the integral so far, the position and
the velocity. These are carried from token to token by doubling: what is known over $2^l$ steps
gives what is known over $2^{l+1}$, so there are log N products and one closed form per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from osciformer._types import Float, Tensor
from osciformer.math.oscillator import moments


class Transition(NamedTuple):
    r"""What an oscillator does over a gap: integrals of its position, and where it ends.

    Attributes:
        i11: $\int_0^s g_{11}$, what the position contributes to the integral.
        i12: $\int_0^s g_{12}$, what the velocity contributes.
        g11: Position from position.
        g12: Position from velocity.
        g21: Velocity from position.
        g22: Velocity from velocity.
    """

    i11: Float[Tensor, "*S"]
    i12: Float[Tensor, "*S"]
    g11: Float[Tensor, "*S"]
    g12: Float[Tensor, "*S"]
    g21: Float[Tensor, "*S"]
    g22: Float[Tensor, "*S"]


class Carried(NamedTuple):
    """Oscillators at a common time: their integrals since they began, positions, velocities."""

    integral: Float[Tensor, "*S"]
    position: Float[Tensor, "*S"]
    velocity: Float[Tensor, "*S"]


def transition(
    gaps: Float[Tensor, "*S"], omega: Float[Tensor, "R"], zeta: Float[Tensor, "R"]
) -> Transition:
    """Return the transitions of channels with these spectra over gaps, with a last axis R.

    Args:
        gaps: Gaps, not negative.
        omega: Natural frequencies.
        zeta: Damping ratios.

    Example:
        >>> over = transition(torch.zeros(2, 3), torch.ones(4), torch.ones(4))
        >>> over.g11.shape, bool((over.g11 == 1).all()), bool((over.i11 == 0).all())
        (torch.Size([2, 3, 4]), True, True)
    """
    if gaps.dtype != torch.float64:
        return _plain_transition(gaps, omega, zeta)
    m = moments(gaps[..., None], omega, zeta)
    two_gamma, omega_squared = 2.0 * zeta * omega, omega * omega
    g11 = 1.0 - omega_squared * m.i12
    return Transition(
        m.g12 + two_gamma * m.i12,
        m.i12,
        g11,
        m.g12,
        -omega_squared * m.g12,
        g11 - two_gamma * m.g12,
    )


def _plain_transition(gaps: Tensor, omega: Tensor, zeta: Tensor) -> Transition:
    """Return the transitions to single precision, by the textbook's formulas in double.

    They lose digits where differences cancel, at most as many as single precision does not have:
    an error of about 1e-16 / (omega s) in the integrals. That saves most of the work of `moments`,
    which is exact to the last digit for any gap.
    """
    s, w, z = gaps.double()[..., None], omega.double(), zeta.double()
    gamma, w_squared = z * w, w * w
    discriminant = w_squared * (z - 1.0) * (z + 1.0)
    creeps = discriminant > 0
    # Kept off the critical point, where the two branches meet; at zeta = 1 itself, and nowhere
    # else, a part of the slope in zeta is lost.
    root = discriminant.abs().clamp(min=1e-12 * w_squared.detach()).sqrt()
    fast = gamma + root
    decay = torch.exp(-gamma * s)
    turn = root * s
    slow_part, fast_part = torch.exp(-(w_squared / fast) * s), torch.exp(-fast * s)
    even = torch.where(creeps, 0.5 * (slow_part + fast_part), decay * torch.cos(turn))
    odd = torch.where(creeps, 0.5 * (slow_part - fast_part), decay * torch.sin(turn)) / root
    g11 = even + gamma * odd
    i12 = (1.0 - g11) / w_squared
    both = Transition(
        odd + 2.0 * gamma * i12, i12, g11, odd, -w_squared * odd, g11 - 2.0 * gamma * odd
    )
    return Transition(*(x.to(gaps.dtype) for x in both))


def compose(later: Transition, earlier: Transition) -> Transition:
    """Return the transition over two gaps one after the other."""
    a, b = later, earlier
    return Transition(
        b.i11 + a.i11 * b.g11 + a.i12 * b.g21,
        b.i12 + a.i11 * b.g12 + a.i12 * b.g22,
        a.g11 * b.g11 + a.g12 * b.g21,
        a.g11 * b.g12 + a.g12 * b.g22,
        a.g21 * b.g11 + a.g22 * b.g21,
        a.g21 * b.g12 + a.g22 * b.g22,
    )


def carry(over: Transition, start: Carried) -> Carried:
    """Return oscillators after a gap."""
    return Carried(
        start.integral + over.i11 * start.position + over.i12 * start.velocity,
        over.g11 * start.position + over.g12 * start.velocity,
        over.g21 * start.position + over.g22 * start.velocity,
    )


def shift(x: Float[Tensor, "B N *S"], steps: int) -> Float[Tensor, "B N *S"]:
    """Return what stood some tokens earlier, zeros before the first one."""
    return pad(x[:, :-steps], (*(0, 0) * (x.dim() - 2), steps, 0))


def double(over: Transition, steps: int) -> Transition:
    """Return the transitions over twice as many tokens.

    Args:
        over: From the token `steps` before to each token, [B, N, R].
        steps: That number.
    """
    return compose(over, Transition(*(shift(x, steps) for x in over)))


def accumulate(
    position: Float[Tensor, "B N R"], velocity: Float[Tensor, "B N R"], over: Transition
) -> tuple[Float[Tensor, "B N R"], Float[Tensor, "B N R"]]:
    """Return one oscillator per channel that every token kicks: its state just after each token.

    Args:
        position: By how much each token moves it.
        velocity: By how much it changes its velocity.
        over: From the token before to each token; that of the first one is not looked at.
    """
    steps = 1
    while steps < position.shape[1]:
        earlier = Carried(torch.zeros(()), shift(position, steps), shift(velocity, steps))
        moved = carry(over, earlier)
        position, velocity = position + moved.position, velocity + moved.velocity
        over = double(over, steps)
        steps *= 2
    return position, velocity


def carry_all(
    position: Float[Tensor, "B N R"],
    velocity: Float[Tensor, "B N R"],
    over: Transition,
    num_lags: int,
) -> Carried:
    """Return what each of the last tokens has become at each token.

    Args:
        position: Where each token starts.
        velocity: How fast it starts.
        over: From the token before to each token.
        num_lags: How many tokens each token sees, itself included.

    Returns:
        At (b, i, l) the oscillators of token i - l at the time of token i, [B, N, L, R]; zeros
        where there is no such token.
    """
    still = torch.zeros_like(position)
    known = Carried(*(x[:, :, None] for x in (still, position, velocity)))
    steps = 1
    while steps < num_lags:
        more = min(steps, num_lags - steps)
        earlier = Carried(*(shift(x[:, :, :more], steps) for x in known))
        moved = carry(Transition(*(x[:, :, None] for x in over)), earlier)
        known = Carried(*(torch.cat(pair, dim=2) for pair in zip(known, moved, strict=True)))
        over = double(over, steps) if 2 * steps < num_lags else over
        steps *= 2
    return known


class Seen(NamedTuple):
    """Keys or values as products want them: those of the own chunk, and those before it.

    Attributes:
        near: Integrals, positions and velocities of the tokens of the own chunk at each token.
        far: Those of all tokens of earlier chunks at the last token before each chunk.
    """

    near: Float[Tensor, "B N R H 3C"]
    far: Float[Tensor, "B P F H 3C"]


class Rows(NamedTuple):
    """Where rows stand in time.

    Attributes:
        gaps: Time since token i, not negative.
        near_ages: Time of token i since the tokens of its chunk; below 0 where there is none.
        far_ages: Since the tokens of earlier chunks, likewise.
    """

    gaps: Float[Tensor, "B N G"]
    near_ages: Float[Tensor, "B N R"]
    far_ages: Float[Tensor, "B N F"]


def look_back(
    position: Float[Tensor, "B N R"],
    velocity: Float[Tensor, "B N R"],
    over: Transition,
    over_chunks: Transition,
    *,
    chunk: int,
    num_heads: int,
) -> Seen:
    """Return what tokens have become, for all tokens that come after them.

    Args:
        position: Where each token starts; N is a multiple of `chunk`.
        velocity: How fast it starts.
        over: From the token before to each token.
        over_chunks: From the end of the chunk before to that of each chunk, [B, P, R].
        chunk: Tokens of a chunk.
        num_heads: Number of heads, into which the channels are divided.
    """
    near = carry_all(position, velocity, over, chunk)
    num_chunks = position.shape[1] // chunk
    # At the last token of a chunk, lags are all its tokens, from the last to the first.
    ends = [x[:, chunk - 1 :: chunk].flip(2) for x in near]  # [B, P, chunk, R]
    size, channels = position.shape[0], position.shape[2]
    so_far = Carried(*(position.new_zeros(size, 0, channels) for _ in range(3)))
    rows = [so_far]
    for number in range(num_chunks - 1):
        step = Transition(*(x[:, number, None] for x in over_chunks))
        moved = carry(step, so_far)
        so_far = Carried(
            *(torch.cat((x, y[:, number]), dim=1) for x, y in zip(moved, ends, strict=True))
        )
        rows.append(so_far)
    length = (num_chunks - 1) * chunk
    far = Carried(
        *(
            torch.stack([pad(x, (0, 0, 0, length - x.shape[1])) for x in item], dim=1)
            for item in zip(*rows, strict=True)
        )
    )
    return Seen(*(_by_heads(item, num_heads) for item in (near, far)))


def _by_heads(carried: Carried, num_heads: int) -> Float[Tensor, "B N L H 3C"]:
    return torch.cat([x.unflatten(-1, (num_heads, -1)) for x in carried], dim=-1)


def attend_after(
    query: Float[Tensor, "B N G H C"],
    keys: Seen,
    values: Seen,
    rows: Rows,
    key_over: tuple[Transition, Transition],
    value_over: tuple[Transition, Transition],
    *,
    scale: float,
    average: bool,
) -> Float[Tensor, "B N G H C"]:
    r"""Return the attention of constant queries some gaps after each token.

    $$\alpha = \frac{1}{t_i + g - t_k} \Big\langle Q,\; s_k + I_{11}\, x_k + I_{12}\, \dot x_k
    \Big\rangle$$
    with integral, position and velocity of token k at a reference r, and integrals I of the
    propagator from r to $t_i + g$. For tokens of the own chunk r is $t_i$; for earlier ones it is
    the end of the chunk before. Token i sees itself, so that no row is empty.

    Args:
        query: Queries.
        keys: What they see.
        values: Likewise.
        rows: Where the rows stand.
        key_over: Transitions of keys from both references to the rows, [B, N, G, H, C].
        value_over: Those of values.
        scale: Factor of the logits.
        average: Values averaged since their token, instead of those at the time itself.
    """
    num_chunks = keys.far.shape[1]
    near = _Part(query, keys.near, values.near, rows.near_ages, rows.gaps, 1)
    near_logits = near.logits(key_over[0], scale)
    if keys.far.shape[2] == 0:
        return near.mean(near_logits.softmax(dim=-1), value_over[0], average)
    chunk = query.shape[1] // num_chunks
    far = _Part(query, keys.far, values.far, rows.far_ages, rows.gaps, chunk)
    logits = torch.cat((near_logits, far.logits(key_over[1], scale)), dim=-1)
    shares = logits.softmax(dim=-1).split((near_logits.shape[-1], keys.far.shape[2]), dim=-1)
    return near.mean(shares[0], value_over[0], average) + far.mean(
        shares[1], value_over[1], average
    )


class _Part:
    """Rows and the tokens that some of them see together: one product for each such group."""

    def __init__(
        self, query: Tensor, keys: Tensor, values: Tensor, ages: Tensor, gaps: Tensor, group: int
    ) -> None:
        self.group, self.dtype = group, query.dtype
        self.shape = query.shape[1], query.shape[2]
        self.query = self._grouped(query)
        self.keys = keys.permute(0, 1, 3, 4, 2)  # [B, P, H, 3C, L]
        self.values = values.permute(0, 1, 3, 2, 4)  # [B, P, H, L, 3C]
        elapsed = ages[:, :, None] + gaps[..., None]  # [B, N, G, L]
        self.is_absent = (ages < 0)[:, :, None, None]  # [B, N, 1, 1, L]
        self.at_once = (elapsed <= 0)[:, :, None]
        self.inverse = torch.where(elapsed <= 0, 0.0, 1.0 / torch.where(elapsed <= 0, 1.0, elapsed))
        self.inverse = self.inverse.to(query.dtype)[:, :, None]  # [B, N, 1, G, L]

    def logits(self, over: Transition, scale: float) -> Float[Tensor, "B N H G L"]:
        moved = (self.query * self._grouped(x) for x in (over.i11, over.i12))
        integrals = self._ungrouped(torch.cat((self.query, *moved), dim=-1) @ self.keys)
        channels = self.query.shape[-1]
        starts = self._ungrouped(self.query @ self.keys[..., channels : 2 * channels, :])
        logits = torch.where(self.at_once, starts, integrals * self.inverse) * scale
        return logits.masked_fill(self.is_absent, -torch.inf)

    def mean(
        self, shares: Float[Tensor, "B N H G L"], over: Transition, average: bool
    ) -> Float[Tensor, "B N G H C"]:
        if not average:
            parts = self._shared(shares).chunk(3, dim=-1)
            out = parts[1] * self._grouped(over.g11) + parts[2] * self._grouped(over.g12)
        else:
            parts = self._shared(shares * self.inverse).chunk(3, dim=-1)
            out = parts[0] + parts[1] * self._grouped(over.i11) + parts[2] * self._grouped(over.i12)
            out = out + self._shared(shares * self.at_once).chunk(3, dim=-1)[1]
        return self._ungrouped(out).transpose(2, 3)

    def _shared(self, shares: Float[Tensor, "B N H G L"]) -> Float[Tensor, "B P H r 3C"]:
        return self._grouped(shares.transpose(2, 3)) @ self.values

    def _grouped(self, x: Float[Tensor, "B N G H C"]) -> Float[Tensor, "B P H r C"]:
        x = x.to(self.dtype)
        return x.unflatten(1, (-1, self.group)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)

    def _ungrouped(self, x: Float[Tensor, "B P H r L"]) -> Float[Tensor, "B N H G L"]:
        x = x.unflatten(3, (self.group, self.shape[1]))
        return x.permute(0, 1, 3, 2, 4, 5).flatten(1, 2)
