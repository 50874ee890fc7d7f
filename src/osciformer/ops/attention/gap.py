r"""The algebra of a gap: what oscillators do over a stretch of time, and how stretches compose.

Over a gap [a, b] the state $x = (k, \dot k)$ of one channel becomes $P x$, $P = e^{A(b-a)}$, and
the integral of query times position grows by $M x$, $M = \int_a^b f(\tau)\,e_1^\top
e^{A(\tau-a)}\,d\tau$ for a query f. Three groups of functions share this algebra:

- closed forms of P and M over one gap, from the moments of `math.oscillator`;
- `Transition`, which holds P and M for a constant query; autograd differentiates it;
- `Spans`, which hold $P - I$ and M for any number of basis functions f, *whole* or as *drifts*, and
  move rows, keys and one another in place, with hand-written adjoints. The README explains them.

Planes lead: rows and keys are ``[planes, B, g, n, D]``, g blocks of n, with the span of each block
as ``[planes, 2, B, g, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from osciformer._types import Float, Tensor
from osciformer.math.oscillator import Moments, moments, single_precision_moments


class Transition(NamedTuple):
    """What an oscillator does over a gap; all tensors have one shape."""

    i11: Tensor  # integral of the position, from the position
    i12: Tensor  # integral of the position, from the velocity
    g11: Tensor  # position from position
    g12: Tensor  # position from velocity
    g21: Tensor  # velocity from position
    g22: Tensor  # velocity from velocity

    def integral(self, position: Tensor, velocity: Tensor) -> Tensor:
        """Return the integral of the position over the gap."""
        return self.i11 * position + self.i12 * velocity

    def move(self, position: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return position and velocity after the gap."""
        moved = self.g21 * position + self.g22 * velocity
        return self.g11 * position + self.g12 * velocity, moved

    def map(self, function: Callable[[Tensor], Tensor]) -> Transition:
        """Return the transition with `function` applied to every tensor."""
        return Transition._make(map(function, self))


def transition(
    gaps: Float[Tensor, "*S"], omega: Float[Tensor, "*R"], zeta: Float[Tensor, "*R"]
) -> Transition:
    """Return the transitions of channels over gaps (not negative), with a further last axis.

    They are exact to the last digits of the dtype of `gaps`; single precision takes less work.
    """
    if gaps.dtype == torch.float64:
        g12, i12 = moments(gaps[..., None], omega, zeta)[:2]
    else:
        omega, zeta = omega.double(), zeta.double()
        g12, i12 = single_precision_moments(gaps.double()[..., None], omega, zeta)
    two_gamma, squared = 2.0 * zeta * omega, omega * omega
    g11 = 1.0 - squared * i12
    over = (g12 + two_gamma * i12, i12, g11, g12, -squared * g12, g11 - two_gamma * g12)
    return Transition(*(x.to(gaps.dtype) for x in over))


def compose(later: Transition, earlier: Transition) -> Transition:
    """Return the transition over two gaps one after the other."""
    a, b = later, earlier
    (g11, g21), (g12, g22) = a.move(b.g11, b.g21), a.move(b.g12, b.g22)
    i11, i12 = b.i11 + a.integral(b.g11, b.g21), b.i12 + a.integral(b.g12, b.g22)
    return Transition(i11, i12, g11, g12, g21, g22)


def propagator_change(m: Moments, omega: Tensor, zeta: Tensor) -> list[Tensor]:
    """Return the entries 11, 12, 21, 22 of P - I over a gap."""
    squared = omega * omega
    a11 = -squared * m.i12
    return [a11, m.g12, -squared * m.g12, torch.addcmul(a11, zeta * omega, m.g12, value=-2.0)]


def constant_integral(m: Moments, gap: Tensor, omega: Tensor, *, is_drift: bool) -> list[Tensor]:
    """Return the integral of a constant query of 1: of g11 (less 1 for drifts) and of g12."""
    drift = -omega * omega * m.k12
    return [drift if is_drift else gap + drift, m.i12]


def ramp_integral(m: Moments, gap: Tensor, omega: Tensor) -> list[Tensor]:
    """Return the integral of a query that goes from 0 to 1 over the gap: of g11 and of g12."""
    over_gap = 1.0 / torch.where(gap > 0, gap, 1.0)
    first = 0.5 * gap - omega * omega * (m.k12 - m.l12 * over_gap)
    return [first, m.i12 - m.k12 * over_gap]


def linear_integral(
    m: Moments, gap: Tensor, omega: Tensor, start: Tensor, step: Tensor, *, is_drift: bool
) -> list[Tensor]:
    """Return the integral of a query that goes from `start` to `start + step` over the gap."""
    constants = constant_integral(m, gap, omega, is_drift=is_drift)
    pairs = zip(constants, ramp_integral(m, gap, omega), strict=True)
    return [torch.addcmul(start * constant, step, ramp) for constant, ramp in pairs]


class Spans(NamedTuple):
    """Spans of one channel set, one per block. Point values have no integrals."""

    matrix: Tensor  # [2 + F, 2, B, K, D]: P - I, then an integral for each of F basis functions
    step: Tensor | None  # [F, B, K, 1|D], change of the basis (drifts whose basis is not constant)

    def map(self, function: Callable[[Tensor], Tensor]) -> Spans:
        """Return the spans with `function` applied to both tensors."""
        return Spans(function(self.matrix), None if self.step is None else function(self.step))

    def first(self, count: int) -> Spans:
        """Return the first `count` spans."""
        return self.map(lambda x: x[..., :count, :])

    def take(self, index: slice) -> Spans:
        """Return the spans of the blocks in `index`, with an axis of size 1 that broadcasts."""
        return self.map(lambda x: x[..., index, :].unsqueeze(-2))


# Adjoints take values paired with their gradients, which are added to.
Pair = tuple[Tensor, Tensor]
SpansPair = tuple[Spans, Spans]


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


def prepend_to_row(row: Tensor, first: Tensor, spans: Spans, length: Tensor) -> None:
    """Move a row's reference time back over `spans`, in place.

    `row` holds G1, G2 and the amplitudes (none if the basis is the query itself), `first` the whole
    first component of the row (of the propagator for point values), `length` ``[B, g, n, 1]`` the
    time t_j - r.
    """
    matrix, pair = spans.matrix, row[:2]
    is_shared = row.shape[0] == 2 and matrix.shape[0] > 2
    moved = pair + matrix[2] if is_shared else pair.clone()
    for plane in range(2, row.shape[0]):
        moved.addcmul_(row[plane], matrix[plane])
    moved.addcmul_(first, matrix[0]).addcmul_(row[1], matrix[1])
    if spans.step is not None:
        step = combine(row[2:] if row.shape[0] > 2 else None, spans.step)
        assert isinstance(step, Tensor)
        moved[0].addcmul_(length, step)
    pair.copy_(moved)


def prepend_to_row_adjoint(rows: Pair, first: Tensor, both: SpansPair, lengths: Pair) -> Tensor:
    """Pull gradients back through `prepend_to_row`.

    The gradient in `rows` changes in place from that of the moved row to that of the row, except
    for the part through `first`, which is returned: the caller knows what `first` was made of.
    """
    (row, grad_row), (spans, grad_spans), (length, grad_length) = rows, both, lengths
    matrix, grad_matrix = spans.matrix, grad_spans.matrix
    grad = grad_row[:2].clone()
    grad_matrix[0].add_((grad * first).sum(-2, keepdim=True))
    grad_matrix[1].add_((grad * row[1]).sum(-2, keepdim=True))
    for plane in range(2, row.shape[0]):
        grad_matrix[plane].add_((grad * row[plane]).sum(-2, keepdim=True))
        grad_row[plane].add_(_dot(grad, matrix[plane]))
    if row.shape[0] == 2 and matrix.shape[0] > 2:
        grad_matrix[2].add_(grad.sum(-2, keepdim=True))
    if spans.step is not None:
        assert grad_spans.step is not None
        grad_step = (length * grad[0]).unsqueeze(0)
        amplitude = row[2:] if row.shape[0] > 2 else None
        accumulate(grad_spans.step, grad_step if amplitude is None else grad_step * amplitude)
        if amplitude is not None:
            grad_row[2:].addcmul_(grad_step, spans.step)
        accumulate(grad_length, grad[0] * combine(amplitude, spans.step))
    grad_row[1].add_(_dot(grad, matrix[1]))
    return _dot(grad, matrix[0])


def append_to_key(
    key: Tensor, bias: Tensor | None, spans: Spans, age: Tensor | None, base_after: Tensor | None
) -> None:
    """Move a key's reference time on over `spans`, in place.

    `key` holds x1, x2 and the integrals (none for point values or if `bias` holds them); `bias`
    ``[B, g, n, H]`` is the integral against a query that all rows share, summed over the channels
    of a head. For drifts, `age` ``[B, g, n, 1]`` is r'' - t_i and `base_after`
    ``[F, B, g, 1, 1|D]`` the basis functions at r'' (None if constant).
    """
    change = key[0] * spans.matrix[:, 0]
    change.addcmul_(key[1], spans.matrix[:, 1])
    if age is not None:
        change[2:].addcmul_(age, _growth(change[0], key[0], spans, base_after), value=-1.0)
    if bias is None:
        key.add_(change)
    else:
        key.add_(change[:2])
        bias.add_(to_heads(change[2], bias.shape[-1]))


def _growth(change: Tensor, x1: Tensor, spans: Spans, base_after: Tensor | None) -> Tensor:
    """Return by how much each basis function times key position grows over a span."""
    growth = change.unsqueeze(0) if base_after is None else change * base_after
    return growth if spans.step is None else torch.addcmul(growth, spans.step, x1)


def append_to_key_adjoint(
    keys: Pair, grad_bias: Tensor | None, both: SpansPair, age: Pair | None, base_after: Pair | None
) -> None:
    """Pull gradients back through `append_to_key`, from the key before the move.

    Gradients of integrals are the same before and after the move.
    """
    (key, grad_key), (spans, grad_spans) = keys, both
    matrix, grad = spans.matrix, grad_key.clone()
    if grad_bias is not None:
        grad = torch.cat([grad, from_heads(grad_bias, key.shape[-1]).unsqueeze(0)])
    if age is not None:
        base, grad_base = (None, None) if base_after is None else base_after
        change = torch.addcmul(key[0] * matrix[0, 0], key[1], matrix[0, 1])
        aged = age[0] * grad[2:]
        growth = _growth(change, key[0], spans, base).expand_as(aged)
        accumulate(age[1], -_dot(grad[2:], growth))
        if spans.step is not None and grad_spans.step is not None:
            accumulate(grad_spans.step, -aged * key[0])
            grad_key[0].sub_(_dot(aged, spans.step))
        if base is None or grad_base is None:
            grad[0].sub_(aged.sum(0))
        else:
            accumulate(grad_base, -aged * change)
            grad[0].sub_(_dot(aged, base))
    for column in range(2):
        grad_spans.matrix[:, column].add_((grad * key[column]).sum(-2, keepdim=True))
        grad_key[column].add_(_dot(grad, matrix[:, column]))


def to_heads(x: Tensor, num_heads: int) -> Tensor:
    """Sum ``[..., D]`` over the channels of each head: ``[..., H]``."""
    return x.unflatten(-1, (num_heads, -1)).sum(-1)


def from_heads(x: Tensor, width: int) -> Tensor:
    """Repeat ``[..., H]`` over the channels of each head: ``[..., D]``."""
    return x.unsqueeze(-1).expand(*x.shape, width // x.shape[-1]).flatten(-2)


def merge_spans(spans: Spans, lengths: Tensor | None, base_between: Tensor | None) -> Spans:
    """Merge K (even) neighbouring spans [a, b], [b, c] two by two to K/2.

    For drifts, `lengths` ``[B, K, 1]`` are their lengths and `base_between` ``[F, B, K/2, 1|D]``
    the basis functions at each b (None if constant).
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


def merge_spans_adjoint(
    grad_merged: Spans, both: SpansPair, both_lengths: Pair | None, base_between: Tensor | None
) -> Tensor | None:
    """Pull gradients back through `merge_spans`; return that of `base_between`."""
    spans, grad_spans = both
    lengths, grad_lengths = (None, None) if both_lengths is None else both_lengths
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
    grad_base = None if base_between is None else torch.zeros_like(base_between)
    if lengths is None or grad_lengths is None or late.shape[0] == 2:
        return grad_base
    length, grad_length, grads = lengths[..., 1::2, :], grad_lengths[..., 1::2, :], grad_first[2:]
    accumulate(grad_length, grads.sum(0) if base_between is None else _dot(grads, base_between))
    if grad_base is not None:
        accumulate(grad_base, grads * length)
    if spans.step is not None and grad_spans.step is not None and grad_merged.step is not None:
        accumulate(grad_spans.step[..., 0::2, :], grad[2:, 0] * length)
        accumulate(grad_length, _dot(grad[2:, 0], spans.step[..., 0::2, :]))
        grad_spans.step.add_(grad_merged.step.repeat_interleave(2, dim=-2))
    return grad_base
