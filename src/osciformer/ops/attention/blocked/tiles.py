"""One block of rows against one block of keys: logits, softmax sums, values, and their adjoint.

With the reference time r of the block between all its keys and all its rows, u = r - t_i and
d = t_j - r, the logit and the averaged value are

    logit = <q_j(r), x_i> + [ <G_j, x_i> + <q_j, S_i> ] / (u + d)
    value = xv_i + [ Gv_j . xv_i + Sv_i ] / (u + d)

from drifts, where the bracket vanishes like the square of the gap, so that derivatives in time lose
no digits; from whole integrals they are the fractions alone. Each bracket is one matrix product. If
all rows share the query, <q, S_i> and <q(r), x_i> are one number a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Largest number of logits held at a time, and the largest side of a tile. On a CPU a few MiB stay
# in cache; a GPU wants few large launches.
_TILE_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}
_TILE_ROWS = {"cpu": 512, "cuda": 2048}

Where = tuple[slice, slice, slice]
Parts = TypeVar("Parts", "Rows", "Keys", "RowTerms")


class Rows(NamedTuple):
    """The rows of a group, ``[B, H, g, r, .]``."""

    left: Tensor  # row side of the bracket of the logit
    query: Tensor | None  # for drifts: the query at r; a shared one is in `Keys.constant`
    length: Tensor  # [B, 1, g, r, 1], t_j - r
    value: Tensor  # first and second component of the row side of the values


class Keys(NamedTuple):
    """The keys of a group, ``[B, H, g, k, .]``."""

    right: Tensor  # key side of the bracket of the logit
    bias: Tensor | None  # [B, H, g, k, 1], what a shared query adds to the bracket
    constant: Tensor | None  # [B, H, g, k, 1], what it adds to the logit (drifts only)
    age: Tensor  # [B, 1, g, k, 1], r - t_i
    value: Tensor  # key side of the values
    present: Tensor | None  # [B, 1, g, k, 1] bool, or None (all)


class Tile(NamedTuple):
    """Rows and keys of one tile."""

    rows: Rows
    keys: Keys


class RowTerms(NamedTuple):
    """What the backward pass needs of each row, ``[B, H, g, r, .]``."""

    lse: Tensor  # over all its keys (0 for empty rows)
    grad_out: Tensor
    excess: Tensor  # <grad_out, out> minus the gradient of the logsumexp


def each(function: Callable[[Tensor], Tensor], parts: Parts) -> Parts:
    """Return the parts with `function` applied to each tensor."""
    return type(parts)._make(None if x is None else function(x) for x in parts)


def rows_of(where: Where, parts: Parts) -> Parts:
    """Return the rows of a tile."""
    return each(lambda x: x[:, :, where[0], where[1]], parts)


def tile_of(where: Where, rows: Rows, keys: Keys) -> Tile:
    """Return the rows and keys of a tile."""
    return Tile(rows_of(where, rows), each(lambda x: x[:, :, where[0], where[2]], keys))


def cut(rows: Rows, keys: Keys) -> Iterator[Where]:
    """Cut a group into tiles of bounded size: slices of (blocks, rows, keys)."""
    batch, heads, blocks, num_rows = rows.left.shape[:4]
    num_keys = keys.right.shape[3]
    device = rows.left.device.type
    room = max(1, _TILE_LOGITS.get(device, 1 << 22) // (batch * heads))
    if num_rows * num_keys <= room:
        step = max(1, room // (num_rows * num_keys))
        for start in range(0, blocks, step):
            yield slice(start, start + step), slice(None), slice(None)
        return
    row_step = min(num_rows, _TILE_ROWS.get(device, 1024))
    key_step = max(16, room // row_step)
    for block in range(blocks):
        for row in range(0, num_rows, row_step):
            for key in range(0, num_keys, key_step):
                rows_, keys_ = slice(row, row + row_step), slice(key, key + key_step)
                yield slice(block, block + 1), rows_, keys_


def join(planes: Tensor, num_heads: int) -> Tensor:
    """Lay planes ``[R, B, g, n, D]`` side by side per head: ``[B, H, g, n, R * C]``."""
    # Plane by plane: one copy of six permuted axes is many times slower.
    by_head = planes.unflatten(-1, (num_heads, -1)).permute(0, 1, 4, 2, 3, 5)
    return torch.cat(by_head.unbind(0), dim=-1)


def add_joined(planes: Tensor, joined: Tensor) -> None:
    """Add ``[B, H, g, n, R * C]`` to planes ``[R, B, g, n, D]``: the adjoint of `join`."""
    heads, count = joined.shape[1], planes.shape[0]
    for plane, part in zip(planes, joined.chunk(count, dim=-1), strict=True):
        plane.unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4).add_(part)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T over the last two axes: ``[B, H, g, r, k]``."""
    return torch.bmm(_flat(a), _flat(b).mT).view(*a.shape[:4], b.shape[3])


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return a b over the last two axes."""
    return torch.bmm(_flat(a), _flat(b)).view(*a.shape[:4], b.shape[4])


def _add_transposed(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b over the last two axes to `target`."""
    target.add_(torch.bmm(_flat(a).mT, _flat(b)).view(*target.shape))


def inverse_gaps(rows: Rows, keys: Keys) -> tuple[Tensor, Tensor | None]:
    """Return 1 / (u + d), 0 where the gap is 0, and a bias of -inf for pairs that do not meet."""
    gap = rows.length + keys.age.mT
    inverse = gap.reciprocal()
    is_tied = gap == 0
    has_ties = bool(is_tied.any())
    if has_ties:
        inverse.masked_fill_(is_tied, 0.0)
    if keys.present is None and not has_ties:
        return inverse, None
    bias = torch.zeros_like(gap).masked_fill_(is_tied, float("-inf"))
    if keys.present is not None:
        bias.masked_fill_(~keys.present.mT, float("-inf"))
    return inverse, bias


def brackets(rows: Rows, keys: Keys) -> Tensor:
    """Return what the logits ``[B, H, g, r, k]`` divide by the gap."""
    bracket = _outer(rows.left, keys.right)
    return bracket if keys.bias is None else bracket.add_(keys.bias.mT)


def logits(rows: Rows, keys: Keys, score: Tensor, bias: Tensor | None) -> Tensor:
    """Complete brackets divided by their gaps to logits, in place."""
    if rows.query is not None:
        position = keys.right[..., : rows.query.shape[-1]]
        _flat(score).baddbmm_(_flat(rows.query), _flat(position).mT)
    if keys.constant is not None:
        score.add_(keys.constant.mT)
    if bias is not None:
        score.add_(bias)
    return score


def values(rows: Rows, keys: Keys, weight: Tensor, inverse: Tensor, *, is_drift: bool) -> Tensor:
    """Return the weighted sum of values ``[B, H, g, r, C]``. `weight` is destroyed."""
    first, second = rows.value.chunk(2, dim=-1)
    channels = first.shape[-1]
    if keys.value.shape[-1] == 2 * channels:  # point values: first is the propagator's 11 less 1
        position, velocity = _inner(weight, keys.value).split(channels, dim=-1)
        return torch.addcmul(position, first, position).addcmul_(second, velocity)
    whole = _inner(weight, keys.value[..., :channels]) if is_drift else None
    position, velocity, rest = _inner(weight.mul_(inverse), keys.value).split(channels, dim=-1)
    out = torch.addcmul(rest, first, position).addcmul_(second, velocity)
    return out if whole is None else out.add_(whole)


def add_tile_gradients(tile: Tile, terms: RowTerms, target: Tile, *, is_drift: bool) -> None:
    """Add the gradients of one tile to `target`; those of lengths and ages for drifts only."""
    (rows, keys), (to_rows, to_keys) = tile, target
    inverse, bias = inverse_gaps(rows, keys)
    bracket = brackets(rows, keys)
    score = bracket * inverse if is_drift else bracket.mul_(inverse)
    weight = logits(rows, keys, score, bias).sub_(terms.lse).exp_()
    grad_weight, value_bracket = _add_value_gradients(
        tile, target, weight, inverse, terms.grad_out, is_drift=is_drift
    )
    grad_score = grad_weight.sub_(terms.excess).mul_(weight)
    if is_drift:
        grad_inverse = bracket.mul_(grad_score)
        if value_bracket is not None:
            grad_inverse.addcmul_(weight, value_bracket)
        grad_gap = grad_inverse.sum(1, keepdim=True).mul_(inverse).mul_(inverse).neg_()
        to_rows.length.add_(grad_gap.sum(-1, keepdim=True))
        to_keys.age.add_(grad_gap.sum(-2, keepdim=True).mT)
    if rows.query is not None and to_rows.query is not None:
        width = rows.query.shape[-1]
        to_rows.query.add_(_inner(grad_score, keys.right[..., :width]))
        _add_transposed(to_keys.right[..., :width], grad_score, rows.query)
    if to_keys.constant is not None:
        to_keys.constant.add_(grad_score.sum(-2, keepdim=True).mT)
    grad_bracket = grad_score.mul_(inverse)
    if to_keys.bias is not None:
        to_keys.bias.add_(grad_bracket.sum(-2, keepdim=True).mT)
    to_rows.left.add_(_inner(grad_bracket, keys.right))
    _add_transposed(to_keys.right, grad_bracket, rows.left)


def _add_value_gradients(
    tile: Tile, target: Tile, weight: Tensor, inverse: Tensor, grad_out: Tensor, *, is_drift: bool
) -> tuple[Tensor, Tensor | None]:
    """Add the gradients of the values; return that of the weights, and the values' bracket."""
    value, to_value = tile.keys.value, target.keys.value
    first, second = tile.rows.value.chunk(2, dim=-1)
    to_first, to_second = target.rows.value.chunk(2, dim=-1)
    channels = first.shape[-1]
    value_bracket = None
    if value.shape[-1] == 2 * channels:
        lifted = torch.cat([torch.addcmul(grad_out, grad_out, first), grad_out * second], -1)
        grad_weight = _outer(lifted, value)
        sums = _inner(weight, value)
        _add_transposed(to_value, weight, lifted)
    else:
        lifted = torch.cat([grad_out * first, grad_out * second, grad_out], dim=-1)
        value_bracket = _outer(lifted, value)
        grad_weight = value_bracket * inverse if is_drift else value_bracket.mul_(inverse)
        averaging = weight * inverse
        sums = _inner(averaging, value[..., : 2 * channels])
        _add_transposed(to_value, averaging, lifted)
        if is_drift:
            _flat(grad_weight).baddbmm_(_flat(grad_out), _flat(value[..., :channels]).mT)
            _add_transposed(to_value[..., :channels], weight, grad_out)
    to_first.addcmul_(grad_out, sums[..., :channels])
    to_second.addcmul_(grad_out, sums[..., channels:])
    return grad_weight, value_bracket
