r"""The algebra of spans: how keys, rows and whole blocks move from one reference time to another.

A *span* [a, b] of one oscillator channel is a small matrix with two columns: two rows are $P - I$
with $P = e^{A(b-a)}$ (less the identity, so that short spans keep all their digits), and one row
for each basis function $f$ of the query is an integral, in one of two forms:

- *whole*: $\int_a^b f(\tau)\,e_1^\top e^{A(\tau - a)}\,d\tau$;
- *drift*: the same less its leading term $(b - a)\,f(a)\,e_1^\top$, so that it vanishes like
  $(b-a)^2$.

Whole integrals cost less. Drifts keep the derivative with respect to times exact however short a
gap is, so they are used where times want gradients. Spans compose, and composing is all the
quadratic part of the layer ever does with time: closed forms are evaluated once per gap and never
per pair.

Three things move, each by one product with that matrix per channel:

- a *row* j, the numbers $(G_1, G_2, a_f)$: its integral $G$ over its own span $[r, t_j]$ and its
  amplitudes; it moves $r$ back by prepending a span;
- a *key* i, the numbers $(x_1, x_2, S_f)$: its state $x$ at $r$ and its integrals over $[t_i, r]$;
  it moves $r$ on by appending a span;
- two neighbouring *spans* merge.

Every function has its adjoint beside it. Planes lead: rows and keys are ``[planes, B, g, n, D]``, g
blocks of n, with the span of each block as ``[planes, 2, B, g, 1, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Spans:
    """Spans of one channel set, one per block.

    Attributes:
        matrix: ``[2 + F, 2, B, K, D]``: P - I, then an integral for each of F basis functions (no
            integrals for point values).
        step: ``[F, B, K, 1|D]``, change of the basis functions over the span, or None: they are
            constant, or the integrals are whole.
    """

    matrix: Tensor
    step: Tensor | None

    def zeros_like(self) -> Spans:
        """Return spans of zeros, to collect gradients in."""
        return Spans(
            torch.zeros_like(self.matrix),
            None if self.step is None else torch.zeros_like(self.step),
        )

    def first(self, count: int) -> Spans:
        """Return the first `count` spans."""
        step = None if self.step is None else self.step[..., :count, :]
        return Spans(self.matrix[..., :count, :], step)

    def take(self, index: slice) -> Spans:
        """Return the spans of the blocks in `index`, with an axis of size 1 that broadcasts."""
        step = None if self.step is None else self.step[..., index, :].unsqueeze(-2)
        return Spans(self.matrix[..., index, :].unsqueeze(-2), step)


def accumulate(target: Tensor, value: Tensor) -> None:
    """Add `value` to `target`, summing over the axes that `target` holds as size 1."""
    target.add_(value.sum_to_size(target.shape))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over the leading axis of a * b."""
    total = a[0] * b[0]
    for i in range(1, a.shape[0]):
        total.addcmul_(a[i], b[i])
    return total


def combine(amplitude: Tensor | None, basis: Tensor | None) -> Tensor | float:
    """Return the sum of amplitude times basis; a missing factor counts as 1."""
    if amplitude is None:
        return 1.0 if basis is None else basis[0]
    return amplitude[0] if basis is None else _dot(amplitude, basis)


def leading(drift: Tensor, length: Tensor, query: Tensor | float) -> Tensor:
    """Return the whole first component of an integral: its drift plus length times query."""
    if isinstance(query, float):
        return drift + length * query
    return torch.addcmul(drift, length, query)


def prepend_to_row(row: Tensor, first: Tensor, spans: Spans, length: Tensor | None) -> None:
    """Move a row's reference time back over `spans`, in place.

    Args:
        row: G1, G2 and the amplitudes (none where the basis is the query itself).
        first: Whole first component of the row (of the propagator for point values).
        spans: The span [r', r] of each block.
        length: ``[B, g, n, 1]``, t_j - r; needed only where the basis has steps.
    """
    matrix, pair = spans.matrix, row[:2]
    if row.shape[0] > 2:
        moved = torch.addcmul(pair, row[2], matrix[2])
        for plane in range(3, row.shape[0]):
            moved.addcmul_(row[plane], matrix[plane])
    else:
        moved = pair + matrix[2] if matrix.shape[0] > 2 else pair.clone()
    moved.addcmul_(first, matrix[0]).addcmul_(row[1], matrix[1])
    if spans.step is not None:
        assert length is not None
        step = combine(row[2:] if row.shape[0] > 2 else None, spans.step)
        assert isinstance(step, Tensor)
        moved[0].addcmul_(length, step)
    pair.copy_(moved)


def prepend_to_row_adjoint(
    grad_row: Tensor,
    row: Tensor,
    first: Tensor,
    spans: Spans,
    grad_spans: Spans,
    length: Tensor | None,
    grad_length: Tensor | None,
) -> Tensor:
    """Pull gradients back through `prepend_to_row`.

    `grad_row` is changed in place from the gradient of the moved row to that of `row`, except for
    the part that flows through `first`, which is returned: the caller knows what `first` was made
    of. `grad_spans` is views that are added to.
    """
    matrix, grad_matrix = spans.matrix, grad_spans.matrix
    grad = grad_row[:2].clone()
    grad_matrix[0].add_((grad * first).sum(-2, keepdim=True))
    grad_matrix[1].add_((grad * row[1]).sum(-2, keepdim=True))
    if row.shape[0] > 2:
        for plane in range(2, row.shape[0]):
            grad_matrix[plane].add_((grad * row[plane]).sum(-2, keepdim=True))
            grad_row[plane].add_(_dot(grad, matrix[plane]))
    elif matrix.shape[0] > 2:
        grad_matrix[2].add_(grad.sum(-2, keepdim=True))
    if spans.step is not None:
        assert length is not None
        assert grad_spans.step is not None
        grad_step = length * grad[0]
        amplitude = row[2:] if row.shape[0] > 2 else None
        for f in range(spans.step.shape[0]):
            part = grad_step if amplitude is None else grad_step * amplitude[f]
            accumulate(grad_spans.step[f], part)
            if amplitude is not None:
                grad_row[2 + f].addcmul_(grad_step, spans.step[f])
        if grad_length is not None:
            accumulate(grad_length, grad[0] * combine(amplitude, spans.step))
    grad_row[1].add_(_dot(grad, matrix[1]))
    return _dot(grad, matrix[0])


def append_to_key(
    key: Tensor,
    bias: Tensor | None,
    spans: Spans,
    age: Tensor | None,
    base_after: Tensor | None,
) -> None:
    """Move a key's reference time on over `spans`, in place.

    Args:
        key: x1, x2 and the integrals (none for point values or where `bias` holds them).
        bias: ``[B, g, n, H]``, the integral against a query shared by all rows, summed over the
            channels of a head, or None.
        spans: The span [r, r''] of each block.
        age: ``[B, g, n, 1]``, r'' - t_i, for drifts; None for whole integrals.
        base_after: ``[F, B, g, 1, 1|D]``, basis functions at r'', or None (constant, or whole).
    """
    change = key[0] * spans.matrix[:, 0]
    change.addcmul_(key[1], spans.matrix[:, 1])
    if age is not None:
        for f in range(change.shape[0] - 2):
            change[2 + f].addcmul_(
                age, _growth(change[0], key[0], spans, base_after, f), value=-1.0
            )
    if bias is None:
        key.add_(change)
    else:
        key.add_(change[:2])
        bias.add_(to_heads(change[2], bias.shape[-1]))


def _growth(gain: Tensor, x1: Tensor, spans: Spans, base_after: Tensor | None, f: int) -> Tensor:
    """Return by how much basis function times key position grows over a span."""
    change = gain if base_after is None else gain * base_after[f]
    return change if spans.step is None else torch.addcmul(change, spans.step[f], x1)


def append_to_key_adjoint(
    grad_key: Tensor,
    grad_bias: Tensor | None,
    key: Tensor,
    spans: Spans,
    grad_spans: Spans,
    age: Tensor | None,
    grad_age: Tensor | None,
    base_after: Tensor | None,
    grad_base_after: Tensor | None,
) -> None:
    """Pull gradients back through `append_to_key`; `grad_key` is changed in place.

    Gradients of integrals are the same before and after the move. `key` is the key before the move.
    """
    matrix = spans.matrix
    grad = grad_key.clone()
    if grad_bias is not None:
        grad = torch.cat([grad, from_heads(grad_bias, key.shape[-1]).unsqueeze(0)])
    if age is not None:
        gain = torch.addcmul(key[0] * matrix[0, 0], key[1], matrix[0, 1])
        for f in range(grad.shape[0] - 2):
            aged = age * grad[2 + f]
            if grad_age is not None:
                accumulate(grad_age, -grad[2 + f] * _growth(gain, key[0], spans, base_after, f))
            if spans.step is not None:
                assert grad_spans.step is not None
                accumulate(grad_spans.step[f], -aged * key[0])
                grad_key[0].addcmul_(aged, spans.step[f], value=-1.0)
            if base_after is None:
                grad[0].sub_(aged)
            else:
                assert grad_base_after is not None
                accumulate(grad_base_after[f], -aged * gain)
                grad[0].addcmul_(aged, base_after[f], value=-1.0)
    for column in range(2):
        grad_spans.matrix[:, column].add_((grad * key[column]).sum(-2, keepdim=True))
        grad_key[column].add_(_dot(grad, matrix[:, column]))


def to_heads(x: Tensor, num_heads: int) -> Tensor:
    """Sum ``[..., D]`` over the channels of each head: ``[..., H]``."""
    return x.unflatten(-1, (num_heads, -1)).sum(-1)


def from_heads(x: Tensor, width: int) -> Tensor:
    """Repeat ``[..., H]`` over the channels of each head: ``[..., D]``."""
    return x.unsqueeze(-1).expand(*x.shape, width // x.shape[-1]).flatten(-2)


def compose(spans: Spans, lengths: Tensor | None, base_between: Tensor | None) -> Spans:
    """Merge neighbouring spans [a, b], [b, c] two by two.

    Args:
        spans: An even number K of spans.
        lengths: ``[B, K, 1]``, their lengths, for drifts; None for whole integrals.
        base_between: ``[F, B, K/2, 1|D]``, basis functions at each b, or None (constant, or whole).

    Returns:
        K/2 spans.
    """
    early, late = spans.matrix[..., 0::2, :], spans.matrix[..., 1::2, :]
    merged = early + late
    merged.addcmul_(_whole(late, lengths, base_between).unsqueeze(1), early[0])
    merged.addcmul_(late[:, 1:], early[1])
    step = None
    if spans.step is not None:
        assert lengths is not None
        merged[2:, 0].addcmul_(lengths[..., 1::2, :], spans.step[..., 0::2, :])
        step = spans.step[..., 0::2, :] + spans.step[..., 1::2, :]
    return Spans(merged, step)


def _whole(late: Tensor, lengths: Tensor | None, base_between: Tensor | None) -> Tensor:
    """Return the first column of spans with the leading term of drifts put back."""
    if lengths is None or late.shape[0] == 2:
        return late[:, 0]
    length = lengths[..., 1::2, :]
    first = late[:, 0].clone()
    first[2:].add_(length if base_between is None else length * base_between)
    return first


def compose_adjoint(
    grad_merged: Spans,
    spans: Spans,
    lengths: Tensor | None,
    base_between: Tensor | None,
    grad_spans: Spans,
    grad_lengths: Tensor | None,
    grad_base_between: Tensor | None,
) -> None:
    """Add to `grad_spans` (and the others) the gradients pulled back through `compose`."""
    early, late = spans.matrix[..., 0::2, :], spans.matrix[..., 1::2, :]
    grad_early, grad_late = grad_spans.matrix[..., 0::2, :], grad_spans.matrix[..., 1::2, :]
    grad = grad_merged.matrix
    first = _whole(late, lengths, base_between)
    grad_early.add_(grad)
    grad_late.add_(grad)
    for column in range(2):
        grad_early[0, column].add_(_dot(grad[:, column], first))
        grad_early[1, column].add_(_dot(grad[:, column], late[:, 1]))
    grad_first = _dot(grad.transpose(0, 1), early[0].unsqueeze(1))
    grad_late[:, 0].add_(grad_first)
    grad_late[:, 1].add_(_dot(grad.transpose(0, 1), early[1].unsqueeze(1)))
    if lengths is None or late.shape[0] == 2:
        return
    length = lengths[..., 1::2, :]
    for f in range(late.shape[0] - 2):
        base: Tensor | float = 1.0 if base_between is None else base_between[f]
        if grad_lengths is not None:
            accumulate(grad_lengths[..., 1::2, :], grad_first[2 + f] * base)
        if grad_base_between is not None:
            accumulate(grad_base_between[f], grad_first[2 + f] * length)
        if spans.step is not None:
            assert grad_spans.step is not None
            accumulate(grad_spans.step[f][..., 0::2, :], grad[2 + f, 0] * length)
            if grad_lengths is not None:
                early_step = spans.step[f][..., 0::2, :]
                accumulate(grad_lengths[..., 1::2, :], grad[2 + f, 0] * early_step)
    if spans.step is not None:
        assert grad_spans.step is not None
        assert grad_merged.step is not None
        grad_spans.step[..., 0::2, :].add_(grad_merged.step)
        grad_spans.step[..., 1::2, :].add_(grad_merged.step)
