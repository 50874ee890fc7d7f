"""Keys at the very time of a row: the limit of a zero gap, and the merging of partial softmaxes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from osciformer._types import Int


def _flat_index(index: Tensor, length: int) -> Tensor:
    offset = torch.arange(index.shape[0], device=index.device).unsqueeze(-1) * length
    return (index + offset).flatten()


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[b, index[b, i]]`` for ``[B, N, ...]`` and ``[B, I]``."""
    rows = _flat_index(index, x.shape[1])
    return x.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape)


def _add_rows(x: Tensor, index: Tensor, value: Tensor) -> None:
    """Add ``value[b, i]`` to ``x[b, index[b, i]]``, in place; the adjoint of `take_rows`."""
    x.flatten(0, 1).index_add_(0, _flat_index(index, x.shape[1]), value.flatten(0, 1))


class Ties(NamedTuple):
    """Which present keys share a time with each row."""

    order: Int[Tensor, "B N"]  # indices of the present keys in time order
    end: Int[Tensor, "B M"]  # one past the place in `order` of the last key at the row's time
    size: Int[Tensor, "B M"]  # how many keys share its time


def find_ties(query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> Ties:
    """Return the ties of sorted rows and keys; `mask` ``[B, N]`` says which keys are present."""
    times, rows = key_times.detach().contiguous(), query_times.detach().contiguous()
    end = torch.searchsorted(times, rows, right=True)
    start = torch.searchsorted(times, rows, right=False)
    batch, num_keys = times.shape
    if mask is None:
        order = torch.arange(num_keys, device=times.device).expand(batch, -1)
        return Ties(order, end, end - start)
    order = torch.argsort(~mask, dim=1, stable=True)
    passed = torch.nn.functional.pad(mask.cumsum(dim=1), (1, 0))
    end, start = passed.gather(1, end), passed.gather(1, start)
    return Ties(order, end, end - start)


@torch.library.custom_op("osciformer::tied_forward", mutates_args=())
def _tied_forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, end: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    batch, num_rows, num_heads, _ = q.shape
    top = q.new_full((batch, num_rows, num_heads, 1), -torch.inf)
    mass = torch.zeros_like(top)
    out = q.new_zeros(batch, num_rows, num_heads, v.shape[-1])
    for place in range(int(count.max()) if count.numel() else 0):
        index, is_tied = _tied_index(order, end, count, place)
        score = (q * take_rows(k, index)).sum(-1, keepdim=True).masked_fill(~is_tied, float("-inf"))
        new_top = torch.maximum(top, score)
        shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weight, keep = (score - shift).exp(), (top - shift).exp()
        mass = mass * keep + weight
        out = out * keep + weight * take_rows(v, index)
        top = new_top
    return out / mass.masked_fill(mass == 0, 1.0), (top + mass.log()).squeeze(-1)


@_tied_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.custom_op(
    "osciformer::tied_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor order, Tensor end, Tensor count, Tensor out,"
    " Tensor lse, Tensor grad_out, Tensor grad_lse) -> (Tensor, Tensor, Tensor)",
)
def _tied_backward(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, order, end, count, out, lse, grad_out, grad_lse = args
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    is_empty = (lse == float("-inf")).unsqueeze(-1)
    excess = (grad_out * out).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)
    excess = excess.masked_fill(is_empty, 0.0)
    shift = lse.unsqueeze(-1).masked_fill(is_empty, 0.0)
    for place in range(int(count.max()) if count.numel() else 0):
        index, is_tied = _tied_index(order, end, count, place)
        keys, values = take_rows(k, index), take_rows(v, index)
        score = (q * keys).sum(-1, keepdim=True).masked_fill(~is_tied, float("-inf"))
        weight = (score - shift).exp()
        grad_score = weight * ((grad_out * values).sum(-1, keepdim=True) - excess)
        grad_q += grad_score * keys
        _add_rows(grad_k, index, grad_score * q)
        _add_rows(grad_v, index, weight * grad_out)
    return grad_q, grad_k, grad_v


@_tied_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _tied_index(order: Tensor, end: Tensor, count: Tensor, place: int) -> tuple[Tensor, Tensor]:
    index = order.gather(1, (end - 1 - place).clamp(min=0))
    return index, (count > place)[..., None, None]


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _pull_back(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _tied_backward(*ctx.saved_tensors, grad_out.contiguous(), grad_lse.contiguous())
    return (*grads, None, None, None)


_tied_forward.register_autograd(_pull_back, setup_context=_setup_context)


def attend_tied(q: Tensor, k: Tensor, v: Tensor, ties: Ties) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of dot-product attention over the keys at each row's own time.

    At a zero gap the trajectories have not moved, so the layer is plain attention there. `q` is the
    query of each row at its own time, scaled.
    """
    tensors = (x.contiguous() for x in (q, k, v, ties.order))
    found: tuple[Tensor, Tensor] = _tied_forward(*tensors, ties.end, ties.size)
    return found


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output ``[B, M, H, C]`` and logsumexp ``[B, M, H]`` over two disjoint sets of keys.

    Empty sets have logsumexp -inf; the union of two empty sets has output 0.
    """
    top = torch.maximum(lse, other_lse).detach()
    top = torch.where(top == float("-inf"), 0.0, top)
    mass, other_mass = (lse - top).exp(), (other_lse - top).exp()
    total = mass + other_mass
    is_empty = total == 0
    safe = torch.where(is_empty, 1.0, total)
    merged = (out * mass.unsqueeze(-1) + other_out * other_mass.unsqueeze(-1)) / safe.unsqueeze(-1)
    return merged, torch.where(is_empty, float("-inf"), top + safe.log())
