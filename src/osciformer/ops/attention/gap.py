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


def transition(
    gaps: Float[Tensor, "*S"], omega: Float[Tensor, "*R"], zeta: Float[Tensor, "*R"]
) -> Transition:
    """Return the transitions of channels over gaps (not negative), with a further last axis.

    They are exact to the last digits of the dtype of `gaps`; single precision takes less work.

    Example:
        >>> over = transition(torch.zeros(2, 3), torch.ones(4), torch.ones(4))
        >>> over.g11.shape, bool((over.g11 == 1).all()), bool((over.i11 == 0).all())
        (torch.Size([2, 3, 4]), True, True)
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
    pairs = zip(
        constant_integral(m, gap, omega, is_drift=is_drift),
        ramp_integral(m, gap, omega),
        strict=True,
    )
    return [torch.addcmul(start * constant, step, ramp) for constant, ramp in pairs]


class Spans(NamedTuple):
    """Spans of one channel set, one per block. Point values have no integrals."""

    matrix: Tensor  # [2 + F, 2, B, K, D]: P - I, then an integral for each of F basis functions
    step: Tensor | None  # [F, B, K, 1|D], change of the basis (drifts whose basis is not constant)

    def zeros_like(self) -> Spans:
        """Return spans of zeros, to collect gradients in."""
        step = None if self.step is None else torch.zeros_like(self.step)
        return Spans(torch.zeros_like(self.matrix), step)

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


def prepend_to_row(row: Tensor, first: Tensor, spans: Spans, length: Tensor) -> None:
    """Move a row's reference time back over `spans`, in place.

    `row` holds G1, G2 and the amplitudes (none if the basis is the query itself), `first` the whole
    first component of the row (of the propagator for point values), `length` ``[B, g, n, 1]`` the
    time t_j - r.
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
    length: Tensor,
    grad_length: Tensor | None,
) -> Tensor:
    """Pull gradients back through `prepend_to_row`.

    `grad_row` changes in place from the gradient of the moved row to that of `row`, except for the
    part that flows through `first`, which is returned: the caller knows what `first` was made of.
    `grad_spans` and `grad_length` are added to.
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
        for f in range(change.shape[0] - 2):
            growth = _growth(change[0], key[0], spans, base_after, f)
            change[2 + f].addcmul_(age, growth, value=-1.0)
    if bias is None:
        key.add_(change)
    else:
        key.add_(change[:2])
        bias.add_(to_heads(change[2], bias.shape[-1]))


def _growth(change: Tensor, x1: Tensor, spans: Spans, base_after: Tensor | None, f: int) -> Tensor:
    """Return by how much basis function times key position grows over a span."""
    growth = change if base_after is None else change * base_after[f]
    return growth if spans.step is None else torch.addcmul(growth, spans.step[f], x1)


def append_to_key_adjoint(
    grad_key: Tensor,
    grad_bias: Tensor | None,
    key: Tensor,
    spans: Spans,
    grad_spans: Spans,
    age: tuple[Tensor, Tensor | None] | None,
    base_after: tuple[Tensor, Tensor] | None,
) -> None:
    """Pull gradients back through `append_to_key`; `grad_key` changes in place.

    Gradients of integrals are the same before and after the move. `key` is the key before the move;
    `age` and `base_after` come as pairs of value and gradient, which is added to.
    """
    matrix = spans.matrix
    grad = grad_key.clone()
    if grad_bias is not None:
        grad = torch.cat([grad, from_heads(grad_bias, key.shape[-1]).unsqueeze(0)])
    if age is not None:
        base, grad_base = (None, None) if base_after is None else base_after
        change = torch.addcmul(key[0] * matrix[0, 0], key[1], matrix[0, 1])
        for f in range(grad.shape[0] - 2):
            aged = age[0] * grad[2 + f]
            if age[1] is not None:
                accumulate(age[1], -grad[2 + f] * _growth(change, key[0], spans, base, f))
            if spans.step is not None:
                assert grad_spans.step is not None
                accumulate(grad_spans.step[f], -aged * key[0])
                grad_key[0].addcmul_(aged, spans.step[f], value=-1.0)
            if base is None or grad_base is None:
                grad[0].sub_(aged)
            else:
                accumulate(grad_base[f], -aged * change)
                grad[0].addcmul_(aged, base[f], value=-1.0)
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
    grad_merged: Spans,
    spans: Spans,
    lengths: Tensor | None,
    base_between: Tensor | None,
    grad_spans: Spans,
    grad_lengths: Tensor | None,
) -> Tensor | None:
    """Pull gradients back through `merge_spans`; return that of `base_between`.

    `grad_spans` and `grad_lengths` are added to.
    """
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
    if lengths is None or late.shape[0] == 2:
        return grad_base
    length = lengths[..., 1::2, :]
    for f in range(late.shape[0] - 2):
        base: Tensor | float = 1.0 if base_between is None else base_between[f]
        if grad_lengths is not None:
            accumulate(grad_lengths[..., 1::2, :], grad_first[2 + f] * base)
        if grad_base is not None:
            accumulate(grad_base[f], grad_first[2 + f] * length)
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
    return grad_base
