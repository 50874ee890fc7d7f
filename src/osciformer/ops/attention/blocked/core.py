"""The quadratic part of the layer: exact, without any tensor of size N^2, forward and backward.

`forward` climbs the levels once, meeting rows with keys at each. `backward` climbs again, keeping
what each climb overwrites (half of the rows and keys a level), and descends with the adjoint;
logits are recomputed tile by tile. Nothing here knows about oscillators, frequencies or queries:
it is attention over any two-dimensional linear system whose spans compose (`chain`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osciformer.ops.attention.blocked import chain
from osciformer.ops.attention.blocked.chain import Spans
from osciformer.ops.attention.blocked.levels import Group, Levels
from osciformer.ops.attention.blocked.side import (
    Side,
    SideGradients,
    SideInputs,
    make_even,
    pad_rows,
)
from osciformer.ops.attention.blocked.tiles import (
    Keys,
    Rows,
    TileGradients,
    Where,
    add_joined,
    brackets,
    inverse_gaps,
    join,
    logits,
    tiles,
    values,
)


@dataclass
class CoreInputs:
    """Inputs of the quadratic part; see `SideInputs` for the two channel sets.

    Attributes:
        key: Keys against the query (logits).
        value: Values.
        span: ``[B, X]``, length of the span that ends at each slot.
        age: ``[B, X * fan]``, time from each key to its slot.
        present: ``[B, X * fan]`` bool, or None (all present).
        num_heads: H.
        num_slots: P; X is its padding by `Levels`.
        fan: Keys a slot.
        is_drift: Whether integrals are drifts (`chain`).
    """

    key: SideInputs
    value: SideInputs
    span: Tensor
    age: Tensor
    present: Tensor | None
    num_heads: int
    num_slots: int
    fan: int
    is_drift: bool


SavedSide = tuple[Tensor, Tensor, Tensor | None]
Saved = tuple[SavedSide, SavedSide, Tensor, Tensor]


class Sweep:
    """Rows, keys and spans of both channel sets at the current level."""

    def __init__(self, inputs: CoreInputs) -> None:
        self.levels = Levels(inputs.num_slots, inputs.fan)
        self.num_heads, self.is_drift = inputs.num_heads, inputs.is_drift
        options = dict(is_drift=inputs.is_drift, is_shared=inputs.key.amplitude is None)
        self.key = Side(inputs.key, inputs.num_heads, **options)
        self.value = Side(inputs.value, inputs.num_heads, is_drift=inputs.is_drift, is_shared=False)
        self.lengths = inputs.span.unsqueeze(-1)  # [B, blocks, 1], of the spans
        self.length = torch.zeros_like(self.lengths)  # t_j - r of the rows
        self.age = inputs.age.unsqueeze(-1).clone()  # r - t_i of the keys
        self.present = None if inputs.present is None else inputs.present.unsqueeze(-1)

    def climb(self, level: int) -> None:
        """Move rows, keys and spans from `level` to the next."""
        for group in self.levels.groups(level):
            length, age = group.rows(self.length), group.keys(self.age)
            age.add_(self._span_lengths(group.spans_after_keys))
            for side in (self.key, self.value):
                side.climb(group, length, age)
            length.add_(self._span_lengths(group.spans_before_rows))
        self.even_out()
        for side in (self.key, self.value):
            side.spans = side.merged_spans(1 << level, self.lengths)
        self.lengths = self.lengths[..., 0::2, :] + self.lengths[..., 1::2, :]

    def even_out(self) -> None:
        """Append an empty span where the number of spans is odd."""
        for side in (self.key, self.value):
            side.spans = make_even(side.spans)
        count = self.lengths.shape[-2]
        self.lengths = pad_rows(self.lengths, count + count % 2)

    def saved(self, group: Group) -> Saved:
        """Return copies of what `climb` is about to overwrite."""
        return (
            self.key.saved(group),
            self.value.saved(group),
            group.rows(self.length).clone(),
            group.keys(self.age).clone(),
        )

    def restore(self, group: Group, saved: Saved) -> None:
        """Undo the climb of `group`."""
        key, value, length, age = saved
        self.key.restore(group, key)
        self.value.restore(group, value)
        group.rows(self.length).copy_(length)
        group.keys(self.age).copy_(age)

    def _span_lengths(self, index: slice) -> Tensor:
        return self.lengths[..., index, :].unsqueeze(-2)

    def rows(self, group: Group) -> Rows:
        """Return what the rows of `group` bring to their tiles."""
        query = None
        if self.is_drift and self.key.bias is None:
            whole = self.key.query(group)
            assert isinstance(whole, Tensor)
            query = join(whole.unsqueeze(0), self.num_heads)
        return Rows(
            join(group.rows(self.key.row), self.num_heads),
            query,
            group.rows(self.length).unsqueeze(1),
            join(group.rows(self.value.row), self.num_heads),
        )

    def keys(self, group: Group) -> Keys:
        """Return what the keys of `group` bring to their tiles."""
        key = group.keys(self.key.key)
        bias, constant = None, None
        if self.key.bias is not None:
            bias = group.keys(self.key.bias).permute(0, 3, 1, 2).unsqueeze(-1)
            if self.is_drift:
                assert self.key.base is not None
                product = group.at_rows(self.key.base)[0] * key[0]
                constant = chain.to_heads(product, self.num_heads)
                constant = constant.permute(0, 3, 1, 2).unsqueeze(-1)
        present = None if self.present is None else group.keys(self.present).unsqueeze(1)
        return Keys(
            join(key, self.num_heads),
            bias,
            constant,
            group.keys(self.age).unsqueeze(1),
            join(group.keys(self.value.key), self.num_heads),
            present,
        )


def forward(inputs: CoreInputs, dense: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, X, C]`` and logsumexp ``[B, H, X]`` of the row at every position.

    The row at position p sees the keys of slots before p, unless their gap is 0. Rows that see none
    get 0 and -inf.

    Args:
        inputs: The spans, keys and rows.
        dense: ``[B, H, X, K]`` to be filled with the logits, or None.
    """
    sweep = Sweep(inputs)
    batch, positions, width = sweep.value.row.shape[1:]
    heads = inputs.num_heads
    top = inputs.span.new_full((batch, heads, positions, 1), float("-inf"))
    mass = torch.zeros_like(top)
    out = inputs.span.new_zeros(batch, heads, positions, width // heads)
    for level in range(sweep.levels.num_levels):
        for group in sweep.levels.groups(level):
            rows, keys = sweep.rows(group), sweep.keys(group)
            group_top, group_mass, group_out = (group.rows(x) for x in (top, mass, out))
            for where in tiles(rows, keys):
                r, k = rows.part(where), keys.part(where)
                inverse, bias = inverse_gaps(r, k)
                score = logits(r, k, brackets(r, k).mul_(inverse), bias)
                if dense is not None:
                    _record(dense, group, where, score)
                old_top, old_mass, old_out = (
                    x[:, :, where[0], where[1]] for x in (group_top, group_mass, group_out)
                )
                new_top = torch.maximum(old_top, score.amax(-1, keepdim=True))
                shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
                weight = score.sub_(shift).exp_()
                keep = (old_top - shift).exp_()
                old_mass.mul_(keep).add_(weight.sum(-1, keepdim=True))
                old_out.mul_(keep).add_(values(r, k, weight, inverse, is_drift=sweep.is_drift))
                old_top.copy_(new_top)
        if level + 1 < sweep.levels.num_levels:
            sweep.climb(level)
    lse = top.squeeze(-1) + mass.squeeze(-1).log()
    return out.div_(mass.masked_fill(mass == 0, 1.0)), lse


def _record(dense: Tensor, group: Group, where: Where, score: Tensor) -> None:
    """Write the logits of a tile where they belong."""
    rows = range(group.row_length)[where[1]]
    keys = range(group.size * group.fan)[where[2]]
    for index, block in enumerate(range(group.count)[where[0]]):
        start = group.origin + 2 * group.size * block
        row, key = start + group.size + rows.start, start * group.fan + keys.start
        dense[:, :, row : row + len(rows), key : key + len(keys)] = score[:, :, index]


def backward(
    inputs: CoreInputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> tuple[SideInputs, SideInputs, Tensor | None, Tensor | None]:
    """Return the gradients of both channel sets, of `span` and of `age` (None unless drifts).

    Args:
        inputs: What `forward` was given.
        out: What it returned.
        lse: What it returned.
        grad_out: Gradient of `out`.
        grad_lse: Gradient of `lse`.
    """
    sweep = Sweep(inputs)
    levels = sweep.levels
    history: list[tuple[Spans, Spans, Tensor]] = []
    stash: list[list[Saved]] = []
    for level in range(levels.num_levels - 1):
        stash.append([sweep.saved(group) for group in levels.groups(level)])
        history.append((sweep.key.spans, sweep.value.spans, sweep.lengths))
        sweep.climb(level)

    is_empty = (lse == float("-inf")).unsqueeze(-1)
    shift = lse.unsqueeze(-1).masked_fill(is_empty, 0.0)
    excess = (grad_out * out).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)
    row_terms = (shift, grad_out, excess.masked_fill_(is_empty, 0.0))

    grads = _Gradients(sweep)
    for level in range(levels.num_levels - 1, -1, -1):
        for group in levels.groups(level):
            grads.meet(group, row_terms)
        if level > 0:
            sweep.key.spans, sweep.value.spans, sweep.lengths = history.pop()
            sweep.even_out()
            grads.descend(1 << (level - 1), levels.groups(level - 1), stash.pop())
    return grads.collect(inputs.span.shape[-1])


class _Gradients:
    """Gradients of a `Sweep`, pulled down level by level."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.key, self.value = SideGradients(sweep.key), SideGradients(sweep.value)
        self.length = torch.zeros_like(sweep.length)
        self.age = torch.zeros_like(sweep.age)
        self.lengths = torch.zeros_like(sweep.lengths)

    def meet(self, group: Group, row_terms: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the gradients of the tiles of `group`."""
        sweep = self.sweep
        rows, keys = sweep.rows(group), sweep.keys(group)

        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.zeros_like(x)

        to_rows = Rows(
            torch.zeros_like(rows.left),
            zeros(rows.query),
            group.rows(self.length).unsqueeze(1),
            torch.zeros_like(rows.value),
        )
        to_keys = Keys(
            torch.zeros_like(keys.right),
            zeros(keys.bias),
            zeros(keys.constant),
            group.keys(self.age).unsqueeze(1),
            torch.zeros_like(keys.value),
            None,
        )
        target = TileGradients(to_rows, to_keys, sweep.is_drift)
        terms = [group.rows(x) for x in row_terms]
        for where in tiles(rows, keys):
            lse, grad_out, excess = (x[:, :, where[0], where[1]] for x in terms)
            target.add(where, rows.part(where), keys.part(where), lse, grad_out, excess)
        add_joined(group.rows(self.key.row), to_rows.left)
        add_joined(group.rows(self.value.row), to_rows.value)
        add_joined(group.keys(self.key.key), to_keys.right)
        add_joined(group.keys(self.value.key), to_keys.value)
        if to_keys.bias is not None and self.key.bias is not None:
            group.keys(self.key.bias).add_(to_keys.bias.squeeze(-1).permute(0, 2, 3, 1))
        if to_rows.query is not None:
            grad_query = torch.zeros_like(group.rows(self.key.row[:1]))
            add_joined(grad_query, to_rows.query)
            self.key.add_query(group, grad_query[0])
        if to_keys.constant is not None:
            assert sweep.key.base is not None
            assert self.key.base is not None
            position = group.keys(sweep.key.key)[0]
            by_key = to_keys.constant.squeeze(-1).permute(0, 2, 3, 1)
            wide = chain.from_heads(by_key, position.shape[-1])
            group.keys(self.key.key)[0].addcmul_(wide, group.at_rows(sweep.key.base)[0])
            chain.accumulate(group.at_rows(self.key.base)[0], wide * position)

    def descend(self, size: int, groups: list[Group], saved: list[Saved]) -> None:
        """Pull the gradients of rows, keys and spans down to level `size`, restoring the sweep."""
        sweep = self.sweep
        pairs = sweep.lengths.shape[-2] // 2
        self.lengths = self.lengths[..., :pairs, :].repeat_interleave(2, dim=-2)
        for side in (self.key, self.value):
            side.split_spans(size, sweep.lengths, self.lengths if sweep.is_drift else None)
        for group, copies in zip(groups, saved, strict=True):
            age_after = group.keys(sweep.age).clone()
            sweep.restore(group, copies)
            length = group.rows(sweep.length)
            row_part, key_part = group.rows(self.length), group.keys(self.age)
            # A row's length after the climb is length + span: its gradient passes to both.
            if sweep.is_drift:
                self.lengths[..., group.spans_before_rows, :].add_(row_part.sum(-2))
            of_rows = row_part if sweep.is_drift else None
            of_keys = key_part if sweep.is_drift else None
            for side in (self.key, self.value):
                side.descend(group, length, of_rows, age_after, of_keys)
            if sweep.is_drift:
                self.lengths[..., group.spans_after_keys, :].add_(key_part.sum(-2))

    def collect(
        self, num_spans: int
    ) -> tuple[SideInputs, SideInputs, Tensor | None, Tensor | None]:
        """Return the gradients in the shapes of the inputs."""
        key, value = self.key.collect(num_spans), self.value.collect(num_spans)
        if not self.sweep.is_drift:
            return key, value, None, None
        return key, value, self.lengths[:, :num_spans, 0], self.age[..., 0]
