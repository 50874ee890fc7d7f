"""One channel set (keys against the query, or values) on its way through the levels."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from osciformer.ops.attention.blocked import chain
from osciformer.ops.attention.blocked.chain import Spans
from osciformer.ops.attention.blocked.levels import Group


@dataclass
class SideInputs:
    """What one channel set brings: the differentiable inputs of the quadratic part.

    X spans, K = X * fan keys and X positions, X as padded by `Levels`; D = H * C channels.

    Attributes:
        matrix: ``[2 + F, 2, B, X, D]``, the spans that end at each slot (`chain.Spans`).
        key: ``[2 + F, B, K, D]``, state and integrals of each key at the time of its slot.
        amplitude: ``[F, B, X, D]``, coefficients of the basis functions by position, or None: the
            basis is the query itself.
        base: ``[F, B, X + 1, 1|D]``, for drifts: basis functions by position, or None (constant 1).
        step: ``[F, B, X, 1|D]``, for drifts: their change over each span, or None.
    """

    matrix: Tensor
    key: Tensor
    amplitude: Tensor | None
    base: Tensor | None
    step: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """Return the fields in order."""
        return [getattr(self, field.name) for field in fields(self)]


class Side:
    """The rows and keys of one channel set at the current level, and the spans of that level.

    Args:
        inputs: What the channel set brings.
        num_heads: H.
        is_drift: Whether integrals are drifts.
        is_shared: Whether all rows share the query, so that a key's integrals add up over channels.
    """

    def __init__(
        self, inputs: SideInputs, num_heads: int, *, is_drift: bool, is_shared: bool
    ) -> None:
        self.spans = Spans(inputs.matrix, inputs.step)
        self.is_point = inputs.matrix.shape[0] == 2
        self.is_drift = is_drift and not self.is_point
        self.base = inputs.base
        self.bias: Tensor | None = None  # [B, K, H]
        if is_shared:
            self.key = inputs.key[:2].clone()
            self.bias = chain.to_heads(inputs.key[2], num_heads)
        else:
            self.key = inputs.key.clone()
        amplitude = inputs.amplitude
        planes = 2 if amplitude is None else 2 + amplitude.shape[0]
        self.row = inputs.matrix.new_zeros(planes, *inputs.matrix.shape[2:])
        if amplitude is not None:
            self.row[2:] = amplitude

    def query(self, group: Group) -> Tensor | float:
        """Return the query of each row at the reference time of its block."""
        row = group.rows(self.row)
        base = None if self.base is None else group.at_rows(self.base)
        return chain.combine(row[2:] if row.shape[0] > 2 else None, base)

    def first(self, group: Group, length: Tensor) -> Tensor:
        """Return the whole first component of the rows' integrals (or of their propagator)."""
        row = group.rows(self.row[0])
        if self.is_point:
            return 1.0 + row
        return chain.leading(row, length, self.query(group)) if self.is_drift else row

    def base_after(self, group: Group, base: Tensor | None) -> Tensor | None:
        """Return `base` at the end of each parent of the group's pairs, or None."""
        return None if base is None else group.at_parent_end(base)

    def climb(self, group: Group, length: Tensor, age: Tensor) -> None:
        """Move rows back to the start and keys on to the end of their parents.

        Args:
            group: The pairs.
            length: ``[B, g, r, 1]``, t_j - r before the move.
            age: ``[B, g, k, 1]``, r - t_i after the move.
        """
        chain.prepend_to_row(
            group.rows(self.row),
            self.first(group, length),
            self.spans.take(group.spans_before_rows),
            length,
        )
        chain.append_to_key(
            group.keys(self.key),
            None if self.bias is None else group.keys(self.bias),
            self.spans.take(group.spans_after_keys),
            age if self.is_drift else None,
            self.base_after(group, self.base),
        )

    def saved(self, group: Group) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return copies of what `climb` is about to overwrite."""
        bias = None if self.bias is None else group.keys(self.bias).clone()
        return group.rows(self.row[:2]).clone(), group.keys(self.key).clone(), bias

    def restore(self, group: Group, saved: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Undo `climb`."""
        row, key, bias = saved
        group.rows(self.row[:2]).copy_(row)
        group.keys(self.key).copy_(key)
        if bias is not None and self.bias is not None:
            group.keys(self.bias).copy_(bias)

    def merged_spans(self, size: int, lengths: Tensor) -> Spans:
        """Return the spans of the next level."""
        return chain.compose(
            self.spans, lengths if self.is_drift else None, self.between(size, lengths)
        )

    def between(self, size: int, lengths: Tensor) -> Tensor | None:
        """Return the basis functions where spans 2K and 2K + 1 of level `size` meet, or None."""
        if self.base is None:
            return None
        return self.base.index_select(-2, meeting_points(self.base, size, lengths.shape[-2] // 2))


def meeting_points(base: Tensor, size: int, count: int) -> Tensor:
    """Return the positions where the first `count` pairs of spans of length `size` meet."""
    points = size * (1 + 2 * torch.arange(count, device=base.device))
    return points.clamp_(max=base.shape[-2] - 1)


def pad_rows(x: Tensor, total: int) -> Tensor:
    """Pad axis -2 with zeros at the end, up to `total`."""
    missing = total - x.shape[-2]
    return x if missing == 0 else torch.nn.functional.pad(x, (0, 0, 0, missing))


def make_even(spans: Spans) -> Spans:
    """Append an empty span where the number of spans is odd."""
    count = spans.matrix.shape[-2]
    total = count + count % 2
    step = None if spans.step is None else pad_rows(spans.step, total)
    return Spans(pad_rows(spans.matrix, total), step)


class SideGradients:
    """Gradients of a `Side`, pulled down through the levels."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.row, self.key = torch.zeros_like(side.row), torch.zeros_like(side.key)
        self.bias = None if side.bias is None else torch.zeros_like(side.bias)
        self.base = None if side.base is None else torch.zeros_like(side.base)
        self.spans = side.spans.zeros_like()

    def add_query(self, group: Group, grad: Tensor) -> None:
        """Add the gradient ``[B, g, r, D]`` of the query of each row at the reference time."""
        amplitude = group.rows(self.side.row)[2:]
        grad_amplitude = group.rows(self.row)[2:]
        if self.side.base is None or self.base is None:
            if amplitude.shape[0]:
                grad_amplitude[0].add_(grad)
            return
        base, grad_base = group.at_rows(self.side.base), group.at_rows(self.base)
        for f in range(base.shape[0]):
            if amplitude.shape[0]:
                chain.accumulate(grad_base[f], grad * amplitude[f])
                grad_amplitude[f].addcmul_(grad, base[f])
            else:
                chain.accumulate(grad_base[f], grad)

    def descend(
        self,
        group: Group,
        length: Tensor,
        grad_length: Tensor | None,
        age: Tensor,
        grad_age: Tensor | None,
    ) -> None:
        """Pull gradients back through `Side.climb`; the side holds what it held before it.

        Args:
            group: The pairs.
            length: ``[B, g, r, 1]``, t_j - r before the climb.
            grad_length: Its gradient, added to, or None.
            age: ``[B, g, k, 1]``, r - t_i after the climb.
            grad_age: Its gradient, added to, or None.
        """
        side = self.side
        before, after = group.spans_before_rows, group.spans_after_keys
        grad_row = group.rows(self.row)
        grad_first = chain.prepend_to_row_adjoint(
            grad_row,
            group.rows(side.row),
            side.first(group, length),
            side.spans.take(before),
            self.spans.take(before),
            length,
            grad_length,
        )
        grad_row[0].add_(grad_first)
        if side.is_drift:
            if grad_length is not None:
                chain.accumulate(grad_length, grad_first * side.query(group))
            self.add_query(group, grad_first.mul_(length))
        chain.append_to_key_adjoint(
            group.keys(self.key),
            None if self.bias is None else group.keys(self.bias),
            group.keys(side.key),
            side.spans.take(after),
            self.spans.take(after),
            age if side.is_drift else None,
            grad_age,
            side.base_after(group, side.base),
            side.base_after(group, self.base),
        )

    def split_spans(self, size: int, lengths: Tensor, grad_lengths: Tensor | None) -> None:
        """Pull the gradients of the next level's spans back to this level's."""
        side = self.side
        count = lengths.shape[-2] // 2  # an empty span may have been appended above
        merged, self.spans = self.spans.first(count), side.spans.zeros_like()
        base = side.between(size, lengths)
        grad_between = None if base is None else torch.zeros_like(base)
        chain.compose_adjoint(
            merged,
            side.spans,
            lengths if side.is_drift else None,
            base,
            self.spans,
            grad_lengths,
            grad_between,
        )
        if grad_between is not None and self.base is not None:
            self.base.index_add_(-2, meeting_points(self.base, size, count), grad_between)

    def collect(self, num_spans: int) -> SideInputs:
        """Return the gradients in the shapes of the inputs, at the lowest level."""
        spans, key = self.spans.first(num_spans), self.key
        if self.bias is not None:
            key = torch.cat([key, chain.from_heads(self.bias, key.shape[-1]).unsqueeze(0)])
        amplitude = self.row[2:] if self.row.shape[0] > 2 else None
        return SideInputs(spans.matrix, key, amplitude, self.base, spans.step)
