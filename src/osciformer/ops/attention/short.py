r"""Short series on a CPU: all pairs of rows and keys as one matrix product, in float64.

An average over a gap is a difference quotient of the antiderivative y of the oscillator,

$$\frac{1}{t_j - t_i} \int_{t_i}^{t_j} k_i = \frac{y_i(t_j) - y_i(t_i)}{t_j - t_i},$$

and y is an oscillator of the same channel. With its two modes kept apart, one reference time r, the
first key's, splits $y_i(t_j)$ into factors of the row, $e^{-\gamma(t_j - r)} \cos(\nu (t_j - r))$
and its sine, and factors of the key, which grow as $e^{\gamma(t_i - r)}$. Each is accurate to the
last bit, so their product is, whatever their size: only the range of exponents is a limit. Logits
are a product of inner size 3C, and the difference loses $10^{-16}$ of the time since r over the
gap. Pairs closer than that allows, those at one time included, take two Taylor terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from osciformer._types import Float, Tensor
from osciformer.ops._checks import can_look
from osciformer.ops.attention import blocked
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult, Oscillators
from osciformer.ops.attention.query import ConstantPath
from osciformer.ops.attention.ties import find_ties

# Below this gap, times the fastest rate, two Taylor terms err by less than 1e-7.
_NEAR = 5e-4
_MAX_NEAR = 4  # such pairs a row, on average
_MAX_DECAY = 500.0  # exponent over the span of the keys; float64 ends at 708
_MAX_PHASE = 1e6
# Slower channels lose digits as 1 / (rate * span)^2, those near critical damping likewise.
_MIN_RATE, _MIN_SPLIT = 0.03, 0.03

MAX_LENGTH = 1024  # beyond it, `blocked` is as fast
_TILE = 2**18  # pairs worked on at once, so that they stay in the cache
_ROWS = 128  # rows worked on at once; keys after the last of them are left out
_KEPT = 2**23  # pairs whose weights are kept for the backward pass, not computed again


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return output, logsumexp and (detached) weights of causal oscillator attention.

    Calls that `unserved` names run on `blocked`.
    """
    if unserved(inputs) is not None:
        return blocked.attend(inputs)
    path, keys, values = inputs.path, inputs.keys, inputs.values
    assert isinstance(path, ConstantPath)
    pairs = _Pairs(inputs)
    constants = _constants(keys, True), _constants(values, pairs.average)
    tokens = (path.q, keys.start, keys.velocity, values.start, values.velocity)
    out, lse, weights = _Attention.apply(*tokens, *constants, pairs)
    return AttentionResult(out, lse, weights if inputs.return_weights else None)


def is_for(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Return whether `auto` takes this method for so many rows or keys."""
    is_eager = not torch.compiler.is_compiling()
    return is_eager and device.type == "cpu" and dtype != torch.float64 and length <= MAX_LENGTH


def unserved(inputs: AttentionInputs) -> str | None:
    """Return why a call is not one for this method; None if it is."""
    path, rows, cols = inputs.path, inputs.query_times, inputs.key_times
    if not isinstance(path, ConstantPath):
        return "the query changes with time"
    if inputs.drive is not None:
        return "there is a drive"
    if inputs.keys.equilibrium is not None or inputs.values.equilibrium is not None:
        return "there is a rest position"
    if rows.requires_grad or cols.requires_grad:
        return "times want gradients"
    tokens = (path.q, inputs.keys.start, inputs.values.start)
    if any(x.dtype == torch.float64 for x in tokens):
        return "tokens are float64"
    if not can_look(cols):
        return "values cannot be read here"
    with torch.no_grad():
        return _out_of_range(inputs)


def _out_of_range(inputs: AttentionInputs) -> str | None:
    cols, rows = inputs.key_times.double(), inputs.query_times.double()
    both = (inputs.keys, inputs.values)
    omega, zeta = (torch.stack([getattr(x, n).double() for x in both]) for n in ("omega", "zeta"))
    rates = _rates(omega, zeta)
    # Values read at a time need no antiderivative.
    slowest = rates.slowest if inputs.value == "average" else rates.slowest[:1]
    span, reach = (cols[:, -1] - cols[:, 0]).max(), (rows[:, -1] - cols[:, 0]).max()
    numbers = [rates.fast.max(), slowest.min(), rates.split.min(), _fastest(omega, zeta)]
    decay, slow, split, fastest = torch.stack(numbers).mul(span).tolist()
    if decay > _MAX_DECAY:
        return f"a channel decays by exp(-{decay:.0f}) over the series"
    if fastest * max(1.0, float(reach / span)) > _MAX_PHASE:
        return "rows lie very many periods after the first key"
    if not slow > _MIN_RATE or not split > _MIN_SPLIT:
        return "a channel is slow or close to critical damping"
    ends = (find_ties(x, cols, inputs.mask).end for x in (rows, rows - _NEAR * span / fastest))
    count = next(ends) - next(ends)
    if int(count.sum()) > _MAX_NEAR * count.numel():
        return "many tokens lie close together"
    return None


def _fastest(omega: Tensor, zeta: Tensor) -> Tensor:
    """Return a bound on all rates of change."""
    return (omega.detach() * (1.0 + 2.0 * zeta.detach())).max()


class _Rates(NamedTuple):
    """Rates of the two modes of a channel: decays, or a damped wave."""

    over: Tensor  # whether the channel is overdamped
    split: Tensor  # half the difference of the decays, or the frequency of the wave
    slow: Tensor  # the slower decay
    fast: Tensor  # the faster one; the same for a wave

    @property
    def slowest(self) -> Tensor:
        """The rate that antiderivatives divide by."""
        return torch.where(self.over, self.slow, torch.hypot(self.slow, self.split))


def _rates(omega: Tensor, zeta: Tensor) -> _Rates:
    over, gamma = zeta > 1.0, zeta * omega
    split = omega * ((zeta - 1.0) * (zeta + 1.0)).abs().sqrt()
    fast = torch.where(over, gamma + split, gamma)
    # An undamped wave must not divide by its decay, not even where the quotient is not used.
    slow = torch.where(over, omega * omega / torch.where(over, fast, 1.0), gamma)
    return _Rates(over, split, slow, fast)


class _Constants(NamedTuple):
    """What a channel multiplies start K and velocity V with, and its rates.

    The amplitudes of both modes are `first_k` K + `first_v` V and `second_k` K + `second_v` V;
    `begin_k` K + `begin_v` V is minus the antiderivative at the token's own time.
    """

    first_k: Tensor
    first_v: Tensor
    second_k: Tensor
    second_v: Tensor
    begin_k: Tensor
    begin_v: Tensor
    decay: Tensor  # of the first mode
    decay_second: Tensor
    turning: Tensor  # frequency of a damped wave, 0 if overdamped


def _constants(tokens: Oscillators, average: bool) -> Float[Tensor, "9 H C"]:
    """Return `_Constants` of the oscillators, or of their antiderivatives, with gradients."""
    omega, zeta = tokens.omega.double(), tokens.zeta.double()
    over, split, slow, fast = _rates(omega, zeta)
    half = 0.5 / split
    if average:
        slow_safe, fast_safe = (torch.where(over, x, 1.0) for x in (slow, fast))
        begin_k, begin_v = 2.0 * zeta / omega, 1.0 / (omega * omega)
        amplitudes = [
            torch.where(over, -half * fast / slow_safe, -begin_k),
            torch.where(over, -half / slow_safe, -begin_v),
            torch.where(over, half * slow / fast_safe, (1.0 - 2.0 * zeta * zeta) / split),
            torch.where(over, half / fast_safe, -zeta / (omega * split)),
        ]
    else:
        begin_k = begin_v = torch.zeros_like(omega)
        amplitudes = [
            torch.where(over, half * fast, 1.0),
            torch.where(over, half, 0.0),
            torch.where(over, -half * slow, slow / split),
            torch.where(over, -half, 1.0 / split),
        ]
    return torch.stack([*amplitudes, begin_k, begin_v, slow, fast, torch.where(over, 0.0, split)])


class _Waves:
    """Both modes of every channel at some times, as factors of rows and of keys."""

    def __init__(self, constants: Float[Tensor, "9 H C"], time: Float[Tensor, "B 1 1 N"]) -> None:
        by = self.by = _Constants(*constants.unsqueeze(-1))
        self.time, over = time, by.turning == 0
        self.over = over.double() if bool(over.any()) else None
        self.fade = torch.exp(-(by.decay * time))  # [B, H, C, N]
        self.fade_second = self.fade
        if self.over is not None:
            self.fade_second = torch.exp(-(by.decay_second * time))
        phase = by.turning * time
        self.cos, self.sin = phase.cos(), phase.sin_()

    def modes(self) -> tuple[Tensor, Tensor]:
        """Return both modes ``[B, H, C, N]``."""
        sin = self.sin if self.over is None else self.sin + self.over
        return self.fade * self.cos, self.fade_second * sin

    def keys(self, start: Tensor, velocity: Tensor | None, size: int) -> Float[Tensor, "B H F N"]:
        """Return the factors of tokens ``[B, N, H, C]``: both modes, and `begin` if F is 3C."""
        by, start = self.by, _by_channel(start)
        batch, heads, channels, num_keys = start.shape
        first, second = by.first_k * start, by.second_k * start
        if velocity is not None:
            velocity = _by_channel(velocity)
            first.addcmul_(by.first_v, velocity)
            second.addcmul_(by.second_v, velocity)
        out = start.new_empty(batch, heads, size, num_keys)
        parts = out.split(channels, dim=2)
        torch.mul(first, self.cos, out=parts[0]).addcmul_(second, self.sin, value=-1.0)
        torch.mul(first, self.sin, out=parts[1]).addcmul_(second, self.cos)
        parts[0].div_(self.fade)
        parts[1].div_(self.fade_second)
        if len(parts) == 3:
            torch.mul(by.begin_k, start, out=parts[2])
            if velocity is not None:
                parts[2].addcmul_(by.begin_v, velocity)
        return out

    def keys_adjoint(
        self, start: Tensor, velocity: Tensor | None, keys: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, Float[Tensor, "9 H C"]]:
        """Return gradients of tokens and constants from that of `keys`, which is overwritten."""
        by, tokens = self.by, [_by_channel(start)]
        if velocity is not None:
            tokens.append(_by_channel(velocity))
        grads = grad.split(start.shape[-1], dim=2)
        rates = _rate_gradients(grads, keys.split(start.shape[-1], dim=2), self.time)
        grads[0].div_(self.fade)
        grads[1].div_(self.fade_second)
        first = (grads[0] * self.cos).addcmul_(grads[1], self.sin)
        second = (grads[1] * self.cos).addcmul_(grads[0], self.sin, value=-1.0)
        parts = (first, second, *grads[2:])
        factors = ((by.first_k, by.first_v), (by.second_k, by.second_v), (by.begin_k, by.begin_v))
        found, constants = [], torch.zeros_like(torch.stack(by).squeeze(-1))
        for which, token in enumerate(tokens):
            total = torch.zeros_like(token)
            for number, part in enumerate(parts):
                total.addcmul_(factors[number][which], part)
                constants[2 * number + which] = (part * token).sum((0, 3))
            found.append(_by_token(total))
        constants[6:] = rates
        return found[0], found[1] if len(found) > 1 else None, constants


def _rate_gradients(
    grads: tuple[Tensor, ...], factors: tuple[Tensor, ...], time: Tensor, sign: float = 1.0
) -> Float[Tensor, "3 H C"]:
    """Return the gradients of both decays and of the frequency through factors of keys.

    Keys grow where rows decay: these have `sign` -1.
    """
    first, second = grads[0] * time, grads[1] * time
    turning = (second * factors[0]).addcmul_(first, factors[1], value=-1.0)
    first.mul_(factors[0])
    second.mul_(factors[1])
    return torch.stack([first.sum((0, 3)) * sign, second.sum((0, 3)) * sign, turning.sum((0, 3))])


def _by_channel(x: Float[Tensor, "B N H C"]) -> Float[Tensor, "B H C N"]:
    return x.detach().permute(0, 2, 3, 1).to(torch.float64, memory_format=torch.contiguous_format)


def _by_token(x: Float[Tensor, "B H C N"]) -> Float[Tensor, "B N H C"]:
    return x.permute(0, 3, 1, 2).contiguous()


class _Block(NamedTuple):
    """Pairs of some rows of some series with the keys up to the last of these rows."""

    series: slice
    rows: slice
    keys: slice
    hidden: Tensor  # [b, 1, R, I], whether the row does not see the key
    inverse: Tensor  # [b, 1, R, I], one over the gap; 0 for hidden and near pairs
    empty: Tensor | None  # [b, 1, R, 1], rows that see nothing, if there are any
    near: tuple[Tensor, slice, Tensor, Tensor]  # near pairs as an index into [b, H, R, I]
    near_row: Tensor  # [P], their rows among all B * M
    near_key: Tensor  # [P], their keys among all B * N
    near_half: Tensor  # [P, 1, 1], half their gap

    def tiles(self, heads: int) -> Iterator[slice]:
        """Yield heads to work on at once."""
        step = max(1, _TILE // self.hidden.numel())
        for first in range(0, heads, step):
            yield slice(first, min(first + step, heads))

    def asked(self, rows: Float[Tensor, "B M H C"]) -> Float[Tensor, "P H C"]:
        """Return the rows of near pairs."""
        return rows.flatten(0, 1)[self.near_row].double()

    def moved(self, start: Tensor, velocity: Tensor | None) -> Float[Tensor, "P H C"]:
        """Return the tokens of near pairs, averaged over their gap."""
        token = start.flatten(0, 1)[self.near_key].double()
        if velocity is not None:
            token.addcmul_(self.near_half, velocity.flatten(0, 1)[self.near_key].double())
        return token

    def add_moved(self, start: Tensor, velocity: Tensor | None, grad: Tensor) -> None:
        """Add the gradient of `moved` to those of the tokens."""
        start.flatten(0, 1).index_add_(0, self.near_key, grad)
        if velocity is not None:
            velocity.flatten(0, 1).index_add_(0, self.near_key, grad * self.near_half)


class _Pairs:
    """The times of a call as blocks of pairs."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self.rows, self.cols = inputs.query_times.double(), inputs.key_times.double()
        start, both = self.cols[:, :1], (inputs.keys, inputs.values)
        self.key_time = (self.cols - start)[:, None, None]  # [B, 1, 1, N]
        self.is_self = inputs.query_times is inputs.key_times
        self.row_time = self.key_time
        if not self.is_self:
            # Rows before the first key see nothing.
            self.row_time = (self.rows - start).clamp_(min=0.0)[:, None, None]  # [B, 1, 1, M]
        self.mask, self.strict, self.scale = inputs.mask, inputs.strict, inputs.scale
        self.average, self.return_weights = inputs.value == "average", inputs.return_weights
        self.tiny = _NEAR / max(float(_fastest(x.omega, x.zeta)) for x in both)
        self.heads = inputs.keys.start.shape[2]
        self.is_kept = self.rows.numel() * self.cols.shape[1] * self.heads <= _KEPT
        self._blocks = list(self._cut()) if self.is_kept else None

    def blocks(self) -> Iterable[_Block]:
        """Return the blocks; those of a large call are made anew each time."""
        return self._cut() if self._blocks is None else self._blocks

    def _cut(self) -> Iterator[_Block]:
        (batch, num_rows), num_keys = self.rows.shape, self.cols.shape[1]
        step = min(num_rows, _ROWS)
        group = max(1, _TILE // (step * num_keys * self.heads))
        for b in range(0, batch, group):
            series = slice(b, min(b + group, batch))
            for j in range(0, num_rows, step):
                yield self._block(series, slice(j, min(j + step, num_rows)))

    def _block(self, series: slice, rows: slice) -> _Block:
        (_, num_rows), num_keys = self.rows.shape, self.cols.shape[1]
        stop = num_keys
        if rows.stop - rows.start < num_rows:
            seen = self.cols[series] <= self.rows[series, rows.stop - 1, None]
            stop = max(1, int(seen.sum(1).max()))
        gap = self.rows[series, rows, None] - self.cols[series, None, :stop]
        hidden = gap <= 0 if self.strict else gap < 0
        if self.mask is not None:
            hidden |= ~self.mask[series, None, :stop]
        is_near = (gap <= self.tiny).logical_and_(~hidden)
        b, j, i = is_near.nonzero().unbind(1)
        near_row = (b + series.start) * num_rows + (j + rows.start)
        near = (near_row, (b + series.start) * num_keys + i, 0.5 * gap[b, j, i][:, None, None])
        inverse = gap.reciprocal_().masked_fill_(is_near.logical_or_(hidden), 0.0)
        empty = hidden.all(-1, keepdim=True)[:, None]
        shown = (hidden[:, None], inverse[:, None], empty if bool(empty.any()) else None)
        return _Block(series, rows, slice(0, stop), *shown, (b, slice(None), j, i), *near)


class _Scratch:
    """Memory that tiles use in turn: fresh memory costs more than the arithmetic in it."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a tensor of this shape in the memory of this name."""
        size, found = torch.Size(shape).numel(), self._memory.get(name)
        if found is None or found.numel() < size:
            found = self._memory[name] = torch.empty(size, dtype=dtype)
        return found[:size].view(shape)


def _rows(token: Tensor, modes: tuple[Tensor, Tensor], size: int) -> Float[Tensor, "B H F M"]:
    """Return ``[B, H, C, M]`` times both modes, and times 1 if F is 3C."""
    batch, heads, channels, num_rows = token.shape
    out = token.new_empty(batch, heads, size, num_rows)
    parts = out.split(channels, dim=2)
    for mode, part in zip(modes, parts, strict=False):
        torch.mul(token, mode, out=part)
    if len(parts) == 3:
        parts[2].copy_(token)
    return out


def _rows_adjoint(
    modes: tuple[Tensor, Tensor], grad: Float[Tensor, "B H F M"]
) -> Float[Tensor, "B H C M"]:
    first, second, *rest = grad.split(modes[0].shape[2], dim=2)
    total = (modes[0] * first).addcmul_(modes[1], second)
    return total.add_(rest[0]) if rest else total


class _Tile(NamedTuple):
    """Some heads of a block, with the factors of its rows and keys."""

    block: _Block
    heads: slice
    scratch: _Scratch

    @property
    def shape(self) -> tuple[int, ...]:
        hidden = self.block.hidden.shape
        return (hidden[0], self.heads.stop - self.heads.start, *hidden[2:])

    def rows(self, x: Float[Tensor, "B H F M"]) -> Float[Tensor, "bh F R"]:
        """Return the part of factors of rows."""
        return x[self.block.series, self.heads, :, self.block.rows].flatten(0, 1)

    def keys(self, x: Float[Tensor, "B H F N"]) -> Float[Tensor, "bh F I"]:
        """Return the part of factors of keys."""
        return x[self.block.series, self.heads, :, self.block.keys].flatten(0, 1)

    def product(self, rows: Tensor, keys: Tensor) -> Float[Tensor, "b h R I"]:
        """Return the products of all pairs."""
        out = self.scratch.take("product", self.shape)
        torch.bmm(self.rows(rows).transpose(1, 2), self.keys(keys), out=out.flatten(0, 1))
        return out

    def weights(self, rows: Tensor, keys: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax and the logits ``[b, h, R, I]``; `near` has those of near pairs."""
        product = self.product(rows, keys).mul_(self.block.inverse)
        logits = self.scratch.take("logits", self.shape, torch.float32).copy_(product)
        logits[self.block.near] = near[:, self.heads]
        logits.masked_fill_(self.block.hidden, -torch.inf)
        p = torch.softmax(logits, -1)
        if self.block.empty is not None:
            p.masked_fill_(self.block.empty, 0.0)
        return p, logits

    def logsumexp(self, logits: Tensor, p: Tensor) -> Float[Tensor, "b h R"]:
        """Return it from the largest entry of each row."""
        lse = logits.amax(-1).sub_(p.amax(-1).log_())
        if self.block.empty is not None:
            lse.masked_fill_(self.block.empty.squeeze(-1), -torch.inf)
        return lse

    def shares(self, p: Tensor, average: bool) -> Float[Tensor, "bh R I"]:
        """Return what weights the factors of values have."""
        out = self.scratch.take("shares", self.shape)
        if average:
            torch.mul(p, self.block.inverse, out=out)
        else:
            out.copy_(p)
        return out.flatten(0, 1)


class _Attention(torch.autograd.Function):
    """The layer in closed form: products and sums in float64, the softmax in float32."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, k_velocity, v, v_velocity, *constants, pairs = args
        batch, num_rows, heads, channels = q.shape
        size = (3 if pairs.average else 2) * channels
        at_keys = tuple(_Waves(x, pairs.key_time) for x in constants)
        at_rows = at_keys
        if not pairs.is_self:
            at_rows = tuple(_Waves(x, pairs.row_time) for x in constants)
        modes = tuple(x.modes() for x in at_rows)
        queries = _rows(_by_channel(q).mul_(pairs.scale), modes[0], 3 * channels)
        keys = at_keys[0].keys(k, k_velocity, 3 * channels)
        values = at_keys[1].keys(v, v_velocity, size)
        sums = values.new_empty(batch, heads, size, num_rows)
        lse = torch.empty(batch, heads, num_rows)
        near_out = values.new_zeros(batch * num_rows, heads, channels)
        weights = torch.zeros(batch, heads, num_rows, k.shape[1]) if pairs.return_weights else None
        kept, scratch = [], _Scratch()
        for block in pairs.blocks():
            near = (block.asked(q) * block.moved(k, k_velocity)).sum(-1).mul_(pairs.scale).float()
            near_values = block.moved(v, v_velocity) if pairs.average else None
            for part in block.tiles(heads):
                tile = _Tile(block, part, scratch)
                p, logits = tile.weights(queries, keys, near)
                kept += [p] if pairs.is_kept else []
                lse[block.series, part, block.rows] = tile.logsumexp(logits, p)
                if weights is not None:
                    weights[block.series, part, block.rows, block.keys] = p
                if near_values is not None:
                    found = p[block.near].unsqueeze(-1) * near_values[:, part]
                    near_out[:, part].index_add_(0, block.near_row, found)
                found = torch.bmm(tile.keys(values), tile.shares(p, pairs.average).transpose(1, 2))
                sums[block.series, part, :, block.rows] = found.unflatten(0, p.shape[:2])
        exact = _by_token(_rows_adjoint(modes[1], sums)).add_(near_out.view(q.shape))
        ctx.save_for_backward(q, k, k_velocity, v, v_velocity)
        ctx.rest = pairs, at_keys, modes, queries, keys, values, sums, exact, kept
        ctx.set_materialize_grads(False)
        if weights is not None:
            weights = weights.to(v.dtype)
            ctx.mark_non_differentiable(weights)
        return exact.to(v.dtype), lse, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, k_velocity, v, v_velocity = tokens = ctx.saved_tensors
        pairs, at_keys, modes, queries, keys, values, sums, exact, kept = ctx.rest
        grad_out = torch.zeros_like(q) if grads[0] is None else grads[0]
        # The softmax takes the mean off its gradient: that is known from the output.
        excess = (grad_out * exact).sum(-1).transpose(1, 2)  # [B, H, M]
        excess = (excess if grads[1] is None else excess - grads[1]).unsqueeze(-1)
        asks = _rows(_by_channel(grad_out), modes[1], values.shape[2])
        of_queries = torch.empty_like(queries)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        found: list[Any] = [
            None if x is None else x.new_zeros(x.shape, dtype=torch.float64) for x in tokens
        ]
        of_q, of_k, of_k_velocity, of_v, of_v_velocity = found
        scratch, at_hand = _Scratch(), iter(kept)
        for block in pairs.blocks():
            asked, asking = block.asked(q), block.asked(grad_out)
            near_keys = block.moved(k, k_velocity)
            near = (asked * near_keys).sum(-1).mul_(pairs.scale)
            near_slope, near_share = torch.empty_like(near), torch.zeros_like(near)
            near_grad = (asking * block.moved(v, v_velocity)).sum(-1)
            for part in block.tiles(q.shape[2]):
                tile = _Tile(block, part, scratch)
                p = next(at_hand) if kept else tile.weights(queries, keys, near.float())[0]
                slope = tile.product(asks, values)
                if pairs.average:
                    slope.mul_(block.inverse)
                    slope[block.near] = near_grad[:, part]
                    near_share[:, part] = p[block.near].double()
                slope.sub_(excess[block.series, part, block.rows]).mul_(p)
                near_slope[:, part] = slope[block.near]
                slope = slope.mul_(block.inverse).flatten(0, 1)
                tile.rows(of_queries).copy_(torch.bmm(tile.keys(keys), slope.transpose(1, 2)))
                tile.keys(of_keys).add_(torch.bmm(tile.rows(queries), slope))
                shares = tile.shares(p, pairs.average)
                tile.keys(of_values).add_(torch.bmm(tile.rows(asks), shares))
            near_slope = near_slope.mul_(pairs.scale).unsqueeze(-1)
            of_q.flatten(0, 1).index_add_(0, block.near_row, near_slope * near_keys)
            block.add_moved(of_k, of_k_velocity, near_slope * asked)
            block.add_moved(of_v, of_v_velocity, near_share.unsqueeze(-1) * asking)
        of_q.add_(_by_token(_rows_adjoint(modes[0], of_queries)), alpha=pairs.scale)
        constants = []
        for waves, start, velocity, factors, grad, rows, of_rows, own in (
            (at_keys[0], k, k_velocity, keys, of_keys, queries, of_queries, (of_k, of_k_velocity)),
            (at_keys[1], v, v_velocity, values, of_values, asks, sums, (of_v, of_v_velocity)),
        ):
            *of_tokens, of_constants = waves.keys_adjoint(start, velocity, factors, grad)
            for total, part in zip(own, of_tokens, strict=True):
                if total is not None:
                    total.add_(part)
            size = q.shape[-1]
            pair = of_rows.split(size, dim=2), rows.split(size, dim=2)
            of_constants[6:] += _rate_gradients(*pair, pairs.row_time, -1.0)
            constants.append(of_constants)
        out = (None if x is None else x.to(y.dtype) for x, y in zip(found, tokens, strict=True))
        return (*out, *constants, None)
