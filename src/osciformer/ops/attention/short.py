r"""Short series on a CPU: all pairs of rows and keys as one matrix product, in float64.

An average over a gap is a difference quotient of the antiderivative y of the oscillator,

$$\frac{1}{t_j - t_i} \int_{t_i}^{t_j} k_i = \frac{y_i(t_j) - y_i(t_i)}{t_j - t_i},$$

and y is an oscillator of the same channel. With its two modes kept apart, a reference time r, that
of the first row, splits $y_i(t_j)$ into factors of the row, which are
$e^{-\gamma(t_j - r)} \cos(\nu (t_j - r))$ and its sine, and factors of the key, which grow as
$e^{\gamma(t_i - r)}$. Each is accurate to the last bit, so their product is, whatever their size.
Only the range of exponents is a limit: in a series that decays too far, a few blocks of rows have
references of their own. Logits are a product of inner size 3C, and the difference loses $10^{-16}$
of the time since r over the gap. Pairs closer than that allows, those at one time included, take
two Taylor terms.
"""

from __future__ import annotations

import functools
import itertools
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
_MAX_EXPONENT = 550.0  # of factors, up and down; float64 ends at 708
_MAX_PHASE = 1e6
# Slower channels lose digits as 1 / (rate * span)^2, those near critical damping likewise.
_MIN_RATE, _MIN_SPLIT = 0.03, 0.03

# Beyond these lengths `blocked` is as fast: for heads of less than 16 channels, and for others.
_MAX_LENGTHS = (512, 1024)
_ROWS, _MAX_BLOCKS = 128, 16  # rows in a block; keys after the last of them are left out
_TILE = 2**18  # pairs worked on at once, so that they stay in the cache
# Weights of pairs, and factors of keys, kept for the backward pass rather than computed again.
_KEPT, _KEPT_FACTORS = 2**22, 2**20


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return output, logsumexp and (detached) weights of causal oscillator attention.

    Calls that `unserved` names run on `blocked`.
    """
    pairs = _find_pairs(inputs)
    if isinstance(pairs, str):
        return blocked.attend(inputs)
    path, keys, values = inputs.path, inputs.keys, inputs.values
    assert isinstance(path, ConstantPath)
    constants = _constants(keys, True), _constants(values, pairs.average)
    tokens = (path.q, keys.start, keys.velocity, values.start, values.velocity)
    out, lse, weights = _Attention.apply(*tokens, *constants, pairs)
    return AttentionResult(out, lse, weights if inputs.return_weights else None)


def is_for(omega: Float[Tensor, "H C"], dtype: torch.dtype, length: int) -> bool:
    """Return whether `auto` takes this method for so many rows or keys."""
    if torch.compiler.is_compiling() or omega.device.type != "cpu" or dtype == torch.float64:
        return False
    return length <= _MAX_LENGTHS[omega.shape[-1] >= 16]


def unserved(inputs: AttentionInputs) -> str | None:
    """Return why a call is not one for this method; None if it is."""
    found = _find_pairs(inputs)
    return found if isinstance(found, str) else None


def _find_pairs(inputs: AttentionInputs) -> _Pairs | str:
    """Return the pairs of a call, or why it is not one for this method."""
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
    return _find_range(inputs)


def _find_range(inputs: AttentionInputs) -> _Pairs | str:
    cols, rows = inputs.key_times.double(), inputs.query_times.double()
    both = (inputs.keys, inputs.values)
    omega, zeta = (
        torch.stack([getattr(x, n).detach().double() for x in both]) for n in ("omega", "zeta")
    )
    rates = _rates(omega, zeta)
    # Values read at a time need no antiderivative.
    slowest = rates.slowest if inputs.value == "average" else rates.slowest[:1]
    numbers = [rates.fast.max(), slowest.min(), rates.split.min(), _fastest(omega, zeta)]
    first = torch.minimum(rows[:, 0], cols[:, 0])
    numbers += [(cols[:, -1] - cols[:, 0]).max(), (rows[:, -1] - first).max()]
    decay, slow, split, fastest, span, reach = torch.stack(numbers).tolist()
    if not fastest * max(span, reach) < _MAX_PHASE:
        return "rows lie very many periods after the first key"
    if not slow * span > _MIN_RATE or not split * span > _MIN_SPLIT:
        return "a channel is slow or close to critical damping"
    tiny = _NEAR / fastest
    ends = [find_ties(x, cols, inputs.mask).end for x in (rows - tiny, rows)]
    if int((ends[1] - ends[0]).sum()) > _MAX_NEAR * rows.numel():
        return "many tokens lie close together"
    # Where one range of exponents is not enough, references lie in the middle of a block. They
    # depend on its first row alone: no row knows of those after it.
    ahead = _MAX_EXPONENT / decay if decay * reach > _MAX_EXPONENT else 0.0
    starts = [0]
    while starts[-1] < rows.shape[1]:
        limit = 2.0 * ahead if ahead else torch.inf
        is_close = rows - rows[:, starts[-1], None] <= limit
        starts.append(min(int(is_close.sum(1).min()), starts[-1] + _ROWS))
        if len(starts) > _MAX_BLOCKS + 1:
            return "a channel decays very often within the series"
    return _Pairs(inputs, tiny, ahead, [slice(*x) for x in itertools.pairwise(starts)])


def _fastest(omega: Tensor, zeta: Tensor) -> Tensor:
    """Return a bound on all rates of change."""
    return (omega * (1.0 + 2.0 * zeta)).max()


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

    def modes(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return both modes ``[B, H, C, R]`` at some of the times."""
        cos, sin = self.cos[..., rows], self.sin[..., rows]
        sin = sin if self.over is None else sin + self.over
        return self.fade[..., rows] * cos, self.fade_second[..., rows] * sin

    def keys(self, amplitudes: list[Tensor]) -> Float[Tensor, "B H F N"]:
        """Return the factors of keys: both modes, and `begin` if it is among the amplitudes."""
        first, second, *begin = amplitudes
        batch, heads, channels, num_keys = first.shape
        out = first.new_empty(batch, heads, len(amplitudes) * channels, num_keys)
        parts = out.split(channels, dim=2)
        torch.mul(first, self.cos, out=parts[0]).addcmul_(second, self.sin, value=-1.0)
        torch.mul(first, self.sin, out=parts[1]).addcmul_(second, self.cos)
        parts[0].div_(self.fade)
        parts[1].div_(self.fade_second)
        if begin:
            parts[2].copy_(begin[0])
        return out

    def keys_adjoint(self, grads: tuple[Tensor, ...], total: list[Tensor]) -> None:
        """Add the gradients of amplitudes to `total`; those of the factors are overwritten."""
        first, second, *begin = grads
        first.div_(self.fade)
        second.div_(self.fade_second)
        total[0].addcmul_(first, self.cos).addcmul_(second, self.sin)
        total[1].addcmul_(second, self.cos).addcmul_(first, self.sin, value=-1.0)
        if begin:
            total[2].add_(begin[0])


def _amplitudes(constants: Tensor, tokens: list[Tensor], size: int) -> list[Tensor]:
    """Return those of both modes, and `begin` if `size` is 3, from starts (and velocities)."""
    by, found = constants.unsqueeze(-1), []
    for number in range(size):
        found.append(by[2 * number] * tokens[0])
        if len(tokens) > 1:
            found[-1].addcmul_(by[2 * number + 1], tokens[1])
    return found


def _amplitudes_adjoint(
    constants: Tensor, tokens: list[Tensor], grads: list[Tensor], of_constants: Tensor
) -> list[Tensor]:
    """Return the gradients of tokens, and add those of the constants."""
    by, found = constants.unsqueeze(-1), []
    for which, token in enumerate(tokens):
        total = by[which] * grads[0]
        for number, grad in enumerate(grads):
            of_constants[2 * number + which] += (grad * token).sum((0, 3))
            if number:
                total.addcmul_(by[2 * number + which], grad)
        found.append(total)
    return found


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
    key_time: Tensor  # [b, 1, 1, I], since the reference time
    row_time: Tensor | None  # [b, 1, 1, R]; None if the rows are the last keys
    hidden: Tensor  # [b, 1, R, I], whether the row does not see the key
    inverse: Tensor  # [b, 1, R, I], one over the gap; 0 for hidden and near pairs
    empty: Tensor | None  # [b, 1, R, 1], rows that see nothing, if there are any
    near: tuple[Tensor, slice, Tensor, Tensor]  # near pairs as an index into [b, H, R, I]
    near_row: Tensor  # [P], their rows among all B * M
    near_key: Tensor  # [P], their keys among all B * N
    near_half: Tensor  # [P, 1, 1], half their gap

    def cut_keys(self, x: Float[Tensor, "B H C N"]) -> Float[Tensor, "b H C I"]:
        """Return the part of these keys."""
        return x[self.series, ..., self.keys]

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

    def __init__(
        self, inputs: AttentionInputs, tiny: float, ahead: float, rows: list[slice]
    ) -> None:
        self.rows, self.cols = inputs.query_times.double(), inputs.key_times.double()
        self.is_self = inputs.query_times is inputs.key_times
        self.mask, self.strict, self.scale = inputs.mask, inputs.strict, inputs.scale
        self.average, self.return_weights = inputs.value == "average", inputs.return_weights
        self.tiny, self.ahead, self.row_blocks = tiny, ahead, rows
        self.lengths = [self.cols.shape[1]] * len(self.cols)  # up to the last present key
        if self.mask is not None:
            places = torch.arange(1, self.cols.shape[1] + 1)
            self.lengths = torch.where(self.mask, places, 1).amax(1).tolist()
        self.heads = inputs.keys.start.shape[2]
        num_factors = inputs.keys.start.numel() * len(rows)
        num_pairs = self.rows.numel() * self.cols.shape[1] * self.heads
        is_small = num_pairs <= _KEPT and num_factors <= _KEPT_FACTORS
        self.is_kept = is_small and torch.is_grad_enabled()
        self._blocks = list(self._cut()) if self.is_kept else None

    def blocks(self) -> Iterable[_Block]:
        """Return the blocks; those of a large call are made anew each time."""
        return self._cut() if self._blocks is None else self._blocks

    def _cut(self) -> Iterator[_Block]:
        (batch, _), num_keys = self.rows.shape, self.cols.shape[1]
        longest = max(x.stop - x.start for x in self.row_blocks)
        group = max(1, _TILE // (longest * num_keys * self.heads))
        for b in range(0, batch, group):
            series = slice(b, min(b + group, batch))
            stop = max(self.lengths[series])
            for rows in self.row_blocks:
                # Series of one batch are much alike in length, those of one group more so.
                yield self._block(series, rows, stop)

    def _block(self, series: slice, rows: slice, stop: int) -> _Block:
        (_, num_rows), num_keys = self.rows.shape, self.cols.shape[1]
        times, cols = self.rows[series, rows], self.cols[series, :stop]
        if len(self.row_blocks) > 1:
            stop = max(1, int((cols <= times[:, -1:]).sum(1).max()))
            cols = cols[:, :stop]
        gap = times[:, :, None] - cols[:, None]
        hidden = gap <= 0 if self.strict else gap < 0
        if self.mask is not None:
            hidden |= ~self.mask[series, None, :stop]
        is_near = (gap <= self.tiny).logical_and_(~hidden)
        b, j, i = is_near.nonzero().unbind(1)
        near_row = (b + series.start) * num_rows + (j + rows.start)
        near = (near_row, (b + series.start) * num_keys + i, 0.5 * gap[b, j, i][:, None, None])
        inverse = gap.reciprocal_().masked_fill_(is_near.logical_or_(hidden), 0.0)
        empty = hidden.all(-1, keepdim=True)[:, None]
        # Keys after the last row of their series are hidden from all: they need only be finite.
        start = times[:, :1] + self.ahead
        key_time = (torch.minimum(cols, times[:, -1:]) - start)[:, None, None]
        # Rows after the last present key are not among the keys of the block.
        is_among = self.is_self and rows.stop <= stop
        row_time = None if is_among else (times - start)[:, None, None]
        where = (series, rows, slice(0, stop), key_time, row_time)
        shown = (hidden[:, None], inverse[:, None], empty if bool(empty.any()) else None)
        return _Block(*where, *shown, (b, slice(None), j, i), *near)


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


class _Side:
    """Keys against the query, or values: their factors in one block."""

    def __init__(self, amplitudes: list[Tensor], constants: Tensor, block: _Block) -> None:
        self.waves = _Waves(constants, block.key_time)
        self.keys = self.waves.keys([block.cut_keys(x) for x in amplitudes])  # [b, H, F, I]
        if block.row_time is None:
            self.row_time = block.key_time[..., block.rows]
            self.modes = self.waves.modes(block.rows)
        else:
            self.row_time = block.row_time
            self.modes = _Waves(constants, block.row_time).modes(slice(None))

    def rows(self, token: Float[Tensor, "b H C R"]) -> Float[Tensor, "b H F R"]:
        """Return the factors of rows that multiply `token`."""
        return _rows(token, self.modes, self.keys.shape[2])

    def adjoint(
        self, rows: Tensor, of_rows: Tensor, of_keys: Tensor, total: list[Tensor], block: _Block
    ) -> Float[Tensor, "3 H C"]:
        """Return gradients of rates from those of both factors; add those of amplitudes."""
        split = functools.partial(torch.split, split_size_or_sections=self.modes[0].shape[2], dim=2)
        of_parts = split(of_keys)
        rates = _rate_gradients(of_parts, split(self.keys), block.key_time)
        rates += _rate_gradients(split(of_rows), split(rows), self.row_time, -1.0)
        self.waves.keys_adjoint(of_parts, [block.cut_keys(x) for x in total])
        return rates


class _Tile(NamedTuple):
    """The matrix products of one block."""

    block: _Block
    heads: int
    scratch: _Scratch

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes ``[b, H, R, I]``."""
        hidden = self.block.hidden.shape
        return (hidden[0], self.heads, *hidden[2:])

    def product(self, rows: Tensor, keys: Tensor) -> Float[Tensor, "b H R I"]:
        """Return the products of all pairs."""
        out = self.scratch.take("product", self.shape)
        left = rows.flatten(0, 1).transpose(1, 2)
        torch.bmm(left, keys.flatten(0, 1), out=out.flatten(0, 1))
        return out

    def to_rows(self, keys: Tensor, weights: Tensor) -> Float[Tensor, "b H F R"]:
        """Return sums over the keys of a row."""
        found = torch.bmm(keys.flatten(0, 1), weights.flatten(0, 1).transpose(1, 2))
        return found.view(*keys.shape[:3], -1)

    def to_keys(self, rows: Tensor, weights: Tensor) -> Float[Tensor, "b H F I"]:
        """Return sums over the rows of a key."""
        found = torch.bmm(rows.flatten(0, 1), weights.flatten(0, 1))
        return found.view(*rows.shape[:3], -1)

    def weights(self, rows: Tensor, keys: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax and the logits ``[b, H, R, I]``; `near` has those of near pairs."""
        product = self.product(rows, keys).mul_(self.block.inverse)
        logits = self.scratch.take("logits", self.shape, torch.float32).copy_(product)
        logits[self.block.near] = near.float()
        logits.masked_fill_(self.block.hidden, -torch.inf)
        p = torch.softmax(logits, -1)
        if self.block.empty is not None:
            p.masked_fill_(self.block.empty, 0.0)
        return p, logits

    def logsumexp(self, logits: Tensor, p: Tensor) -> Float[Tensor, "b H R"]:
        """Return it from the largest entry of each row."""
        lse = logits.amax(-1).sub_(p.amax(-1).log_())
        if self.block.empty is not None:
            lse.masked_fill_(self.block.empty.squeeze(-1), -torch.inf)
        return lse

    def shares(self, p: Tensor, average: bool) -> Float[Tensor, "b H R I"]:
        """Return what weights the factors of values have."""
        out = self.scratch.take("shares", self.shape)
        return torch.mul(p, self.block.inverse, out=out) if average else out.copy_(p)


def _by_side(*tokens: Tensor | None) -> list[Tensor]:
    return [_by_channel(x) for x in tokens if x is not None]


class _Attention(torch.autograd.Function):
    """The layer in closed form: products and sums in float64, the softmax in float32."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, k_velocity, v, v_velocity, key_constants, value_constants, pairs = args
        batch, num_rows, heads, channels = q.shape
        query = _by_channel(q).mul_(pairs.scale)
        of_keys = _amplitudes(key_constants, _by_side(k, k_velocity), 3)
        of_values = _amplitudes(value_constants, _by_side(v, v_velocity), 2 + pairs.average)
        out = torch.zeros_like(query)
        lse = torch.full((batch, heads, num_rows), -torch.inf)
        near_out = query.new_zeros(batch * num_rows, heads, channels)
        weights = torch.zeros(batch, heads, num_rows, k.shape[1]) if pairs.return_weights else None
        kept, scratch = [], _Scratch()
        for block in pairs.blocks():
            where = (block.series, slice(None), slice(None), block.rows)
            keys = _Side(of_keys, key_constants, block)
            values = _Side(of_values, value_constants, block)
            near = (block.asked(q) * block.moved(k, k_velocity)).sum(-1).mul_(pairs.scale)
            tile = _Tile(block, heads, scratch)
            p, logits = tile.weights(keys.rows(query[where]), keys.keys, near)
            lse[block.series, :, block.rows] = tile.logsumexp(logits, p)
            if weights is not None:
                weights[block.series, :, block.rows, block.keys] = p
            if pairs.average:
                found = p[block.near].unsqueeze(-1) * block.moved(v, v_velocity)
                near_out.index_add_(0, block.near_row, found)
            sums = tile.to_rows(values.keys, tile.shares(p, pairs.average))
            out[where] = _rows_adjoint(values.modes, sums)
            kept += [(p, sums, keys, values)] if pairs.is_kept else []
        exact = _by_token(out).add_(near_out.view(q.shape))
        ctx.save_for_backward(q, k, k_velocity, v, v_velocity, key_constants, value_constants)
        ctx.rest = pairs, exact, kept
        ctx.set_materialize_grads(False)
        if weights is not None:
            weights = weights.to(v.dtype)
            ctx.mark_non_differentiable(weights)
        return exact.to(v.dtype), lse, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tokens, key_constants, value_constants = ctx.saved_tensors
        q, k, k_velocity, v, v_velocity = tokens
        pairs, exact, kept = ctx.rest
        grad_out = torch.zeros_like(q) if grads[0] is None else grads[0]
        # The softmax takes the mean off its gradient: that is known from the output.
        excess = (grad_out * exact).sum(-1).transpose(1, 2)  # [B, H, M]
        excess = (excess if grads[1] is None else excess - grads[1]).unsqueeze(-1)
        grad, query = _by_channel(grad_out), _by_channel(q).mul_(pairs.scale)
        key_tokens, value_tokens = _by_side(k, k_velocity), _by_side(v, v_velocity)
        of_query = torch.zeros_like(query)
        sizes = (3, 2 + pairs.average)
        of_keys, of_values = ([torch.zeros_like(key_tokens[0]) for _ in range(n)] for n in sizes)
        if not kept:
            key_amplitudes = _amplitudes(key_constants, key_tokens, sizes[0])
            value_amplitudes = _amplitudes(value_constants, value_tokens, sizes[1])
        of_constants = torch.zeros_like(key_constants), torch.zeros_like(value_constants)
        near_of: list[Any] = [
            None if x is None else x.new_zeros(x.shape, dtype=torch.float64) for x in tokens
        ]
        scratch, at_hand = _Scratch(), iter(kept)
        for block in pairs.blocks():
            where = (block.series, slice(None), slice(None), block.rows)
            if kept:
                p, sums, keys, values = next(at_hand)
            else:
                keys = _Side(key_amplitudes, key_constants, block)
                values = _Side(value_amplitudes, value_constants, block)
            rows, asks = keys.rows(query[where]), values.rows(grad[where])
            asked, asking = block.asked(q), block.asked(grad_out)
            near_keys = block.moved(k, k_velocity)
            tile = _Tile(block, q.shape[2], scratch)
            if not kept:
                near = (asked * near_keys).sum(-1).mul_(pairs.scale)
                p, _ = tile.weights(rows, keys.keys, near)
            shares = tile.shares(p, pairs.average)
            if not kept:
                sums = tile.to_rows(values.keys, shares)
            found = tile.to_keys(asks, shares)
            of_constants[1][6:] += values.adjoint(asks, sums, found, of_values, block)
            slope = tile.product(asks, values.keys)
            if pairs.average:
                slope.mul_(block.inverse)
                slope[block.near] = (asking * block.moved(v, v_velocity)).sum(-1)
                share = p[block.near].unsqueeze(-1)
                block.add_moved(*near_of[3:], share * asking)
            slope.sub_(excess[block.series, :, block.rows]).mul_(p)
            if pairs.ahead:  # factors of hidden pairs may overflow
                slope.masked_fill_(block.hidden, 0.0)
            near_slope = slope[block.near].mul_(pairs.scale).unsqueeze(-1)
            near_of[0].flatten(0, 1).index_add_(0, block.near_row, near_slope * near_keys)
            block.add_moved(*near_of[1:3], near_slope * asked)
            slope.mul_(block.inverse)
            of_rows, found = tile.to_rows(keys.keys, slope), tile.to_keys(rows, slope)
            of_query[where] = _rows_adjoint(keys.modes, of_rows)
            of_constants[0][6:] += keys.adjoint(rows, of_rows, found, of_keys, block)
        of_query.mul_(pairs.scale)
        of_keys = _amplitudes_adjoint(key_constants, key_tokens, of_keys, of_constants[0])
        of_values = _amplitudes_adjoint(value_constants, value_tokens, of_values, of_constants[1])
        channelwise = iter((of_query, *of_keys, *of_values))
        out = (
            None if x is None else near.add_(_by_token(next(channelwise))).to(x.dtype)
            for x, near in zip(tokens, near_of, strict=True)
        )
        return (*out, *of_constants, None)
