r"""Attention some time after each token, to that token and those before it, by their index.

Row (i, g) is asked at $t_i + g$ and sees the tokens 0 to i, whatever comes between $t_i$ and that
time. With the reference $r = t_i$ the closed form factorises (see `math/README.md`): all that the
past contributes at $t_i$ is, per earlier token and channel, the integral so far, the position and
the velocity. Doubling moves them from token to token: what is known over $2^l$ steps gives what is
known over $2^{l+1}$, so there are log N products and one closed form per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from osciformer._types import Float, Tensor
from osciformer.ops.attention.gap import Transition, compose, transition

__all__ = ["Rows", "Seen", "Transition", "accumulate", "attend_after", "compose", "look_back"]
__all__ += ["transition"]


class State(NamedTuple):
    """Oscillators at a common time: their integrals since they began, positions, velocities."""

    integral: Tensor
    position: Tensor
    velocity: Tensor

    def after(self, over: Transition) -> State:
        """Return the oscillators after a gap."""
        integral = self.integral + over.integral(self.position, self.velocity)
        return State(integral, *over.move(self.position, self.velocity))


class Seen(NamedTuple):
    """Integrals, positions and velocities of keys or values, as the products take them."""

    intra: Float[Tensor, "B N R H 3C"]  # of the tokens of the own chunk, at each token
    past: Float[Tensor, "B P F H 3C"]  # of those of earlier chunks, at the last token before


class Rows(NamedTuple):
    """When rows are asked."""

    gaps: Float[Tensor, "B N G"]  # time since token i, not negative
    intra_ages: Float[Tensor, "B N R"]  # time from the tokens of its chunk to it; below 0 if none
    past_ages: Float[Tensor, "B N F"]  # the same for the tokens of earlier chunks


def _shift(x: Tensor, steps: int) -> Tensor:
    """Return what stood some tokens earlier in ``[B, N, ...]``, zeros before the first one."""
    return pad(x[:, :-steps], (*(0, 0) * (x.dim() - 2), steps, 0))


def _double(over: Transition, steps: int) -> Transition:
    """Return transitions over `2 * steps` tokens from those ``[B, N, R]`` over `steps`."""
    return compose(over, over.map(lambda x: _shift(x, steps)))


def accumulate(position: Tensor, velocity: Tensor, over: Transition) -> tuple[Tensor, Tensor]:
    """Return one oscillator per channel that every token kicks: its state just after each token.

    Token n adds `position[:, n]` and `velocity[:, n]` ``[B, N, R]``; `over` leads from the token
    before to each token, that of the first one is not used.
    """
    steps = 1
    while steps < position.shape[1]:
        moved = over.move(_shift(position, steps), _shift(velocity, steps))
        position, velocity = position + moved[0], velocity + moved[1]
        over = _double(over, steps)
        steps *= 2
    return position, velocity


def states_by_lag(position: Tensor, velocity: Tensor, over: Transition, num_lags: int) -> State:
    """Return at (b, i, l) the oscillators of token i - l at the time of token i, [B, N, L, R].

    `over` leads from the token before to each token. Lags that lead before the first token hold
    zeros.
    """
    known = State(*(x[:, :, None] for x in (torch.zeros_like(position), position, velocity)))
    steps = 1
    while steps < num_lags:
        more = min(steps, num_lags - steps)
        earlier = State(*(_shift(x[:, :, :more], steps) for x in known))
        moved = earlier.after(over.map(lambda x: x[:, :, None]))
        known = State(*(torch.cat(pair, dim=2) for pair in zip(known, moved, strict=True)))
        over = _double(over, steps) if 2 * steps < num_lags else over
        steps *= 2
    return known


def look_back(
    position: Float[Tensor, "B N R"],
    velocity: Float[Tensor, "B N R"],
    over: Transition,
    over_chunks: Transition,
    *,
    chunk: int,
    num_heads: int,
) -> Seen:
    """Return the states of all tokens at the tokens that come after them.

    Tokens start from `position` and `velocity` ``[B, N, R]``; N is a multiple of `chunk`. `over`
    leads from the token before to each token, `over_chunks` ``[B, P, R]`` from the end of the chunk
    before to that of each chunk.
    """
    intra = states_by_lag(position, velocity, over, chunk)
    num_chunks = position.shape[1] // chunk
    # At the last token of a chunk, lags are all its tokens, from the last to the first.
    ends = [x[:, chunk - 1 :: chunk].flip(2) for x in intra]  # [B, P, chunk, R]
    rows = [State(*(x[:, 0, :0] for x in ends))]
    for number in range(num_chunks - 1):
        moved = rows[-1].after(Transition(*(x[:, number, None] for x in over_chunks)))
        pairs = zip(moved, ends, strict=True)
        rows.append(State(*(torch.cat((x, y[:, number]), dim=1) for x, y in pairs)))
    length = (num_chunks - 1) * chunk
    past = (
        torch.stack([pad(x, (0, 0, 0, length - x.shape[1])) for x in item], dim=1)
        for item in zip(*rows, strict=True)
    )

    def by_heads(state: State) -> Float[Tensor, "B N L H 3C"]:
        return torch.cat([x.unflatten(-1, (num_heads, -1)) for x in state], dim=-1)

    return Seen(by_heads(intra), by_heads(State(*past)))


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
    the end of the chunk before. Token i sees itself, so that no row is empty. `key_over` and
    `value_over` are the transitions ``[B, N, G, H, C]`` from both references to the rows; `average`
    takes values averaged since their token instead of those at the time itself.
    """
    intra = _Part(query, keys.intra, values.intra, rows.intra_ages, rows.gaps, 1)
    intra_logits = intra.logits(key_over[0], scale)
    if keys.past.shape[2] == 0:
        return intra.mean(intra_logits.softmax(dim=-1), value_over[0], average)
    chunk = query.shape[1] // keys.past.shape[1]
    past = _Part(query, keys.past, values.past, rows.past_ages, rows.gaps, chunk)
    logits = intra_logits, past.logits(key_over[1], scale)
    shares = torch.cat(logits, dim=-1).softmax(dim=-1)
    of_intra, of_past = shares.split([x.shape[-1] for x in logits], dim=-1)
    out = intra.mean(of_intra, value_over[0], average)
    return out + past.mean(of_past, value_over[1], average)


class _Part:
    """Rows and the tokens that `group` neighbouring rows see together: one product a group."""

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
