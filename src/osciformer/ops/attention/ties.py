"""Keys at the very time of a row: the limit of a zero gap, and the merging of partial softmaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from osciformer._types import Bool, Float, Int
from osciformer.ops.attention.rows import add_rows, take_rows


def find_ties(
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
    mask: Bool[Tensor, "B N"] | None,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B M"], Int[Tensor, "B M"]]:
    """Return which present keys share a time with each row.

    Args:
        query_times: Sorted times of the rows.
        key_times: Sorted times of the keys.
        mask: Which keys are present; None is all.

    Returns:
        `order`, the indices of the present keys in time order; `end`, for each row one past the
        place in `order` of the last key at its time; `count`, how many keys share it.
    """
    times, rows = key_times.detach().contiguous(), query_times.detach().contiguous()
    end = torch.searchsorted(times, rows, right=True)
    start = torch.searchsorted(times, rows, right=False)
    batch, num_keys = times.shape
    if mask is None:
        return torch.arange(num_keys, device=times.device).expand(batch, -1), end, end - start
    order = torch.argsort(~mask, dim=1, stable=True)
    passed = torch.nn.functional.pad(mask.cumsum(dim=1), (1, 0))
    end, start = passed.gather(1, end), passed.gather(1, start)
    return order, end, end - start


@torch.library.custom_op("osciformer::tied_forward", mutates_args=())
def _tied_forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, end: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    batch, num_rows, num_heads, _ = q.shape
    top = q.new_full((batch, num_rows, num_heads, 1), float("-inf"))
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


@torch.library.custom_op("osciformer::tied_backward", mutates_args=())
def _tied_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    end: Tensor,
    count: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
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
        add_rows(grad_k, index, grad_score * q)
        add_rows(grad_v, index, weight * grad_out)
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


def attend_tied(
    q: Float[Tensor, "B M H C"],
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H V"],
    order: Int[Tensor, "B N"],
    end: Int[Tensor, "B M"],
    count: Int[Tensor, "B M"],
) -> tuple[Float[Tensor, "B M H V"], Float[Tensor, "B M H"]]:
    """Return output and logsumexp of dot-product attention over the keys at each row's own time.

    At a zero gap the trajectories have not moved, so the layer is plain attention there.

    Args:
        q: The query of each row at its own time, scaled.
        k: Keys at their own times.
        v: Values at their own times.
        order: From `find_ties`.
        end: From `find_ties`.
        count: From `find_ties`.
    """
    found: tuple[Tensor, Tensor] = _tied_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), order.contiguous(), end, count
    )
    return found


def merge(
    out: Float[Tensor, "B M H C"],
    lse: Float[Tensor, "B M H"],
    other_out: Float[Tensor, "B M H C"],
    other_lse: Float[Tensor, "B M H"],
) -> tuple[Float[Tensor, "B M H C"], Float[Tensor, "B M H"]]:
    """Return output and logsumexp over the union of two disjoint sets of keys.

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
