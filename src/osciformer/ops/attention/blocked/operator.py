"""The quadratic part of the layer as one operator: no tensor of size N^2, forward or backward.

`forward` climbs the levels once; rows meet keys at each. `backward` climbs again, keeping what each
climb overwrites (half of the rows and keys a level), and descends with the adjoints; logits are
recomputed tile by tile. It is attention over any two-dimensional linear system whose spans compose
(`gap.Spans`). Both passes are `torch.library` operators, opaque nodes for compile and export.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from osciformer.ops.attention import gap
from osciformer.ops.attention.blocked import tiles
from osciformer.ops.attention.blocked.tiles import add_joined, join
from osciformer.ops.attention.blocked.timeline import Group, Levels
from osciformer.ops.attention.gap import Spans


class SideInputs(NamedTuple):
    """What one channel set (keys against the query, or values) brings; all are differentiable.

    X spans, K = X * fan keys and X positions, X as padded by `Levels`; D = H * C channels. Without
    amplitudes the basis is the query itself; without `base` it is the constant 1.
    """

    matrix: Tensor  # [2 + F, 2, B, X, D], the spans that end at each slot (`gap.Spans`)
    key: Tensor  # [2 + F, B, K, D], state and integrals of each key at the time of its slot
    amplitude: Tensor | None = None  # [F, B, X, D], coefficients of the basis by position
    base: Tensor | None = None  # [F, B, X + 1, 1|D], for drifts: basis functions by position
    step: Tensor | None = None  # [F, B, X, 1|D], for drifts: their change over each span


class Layout(NamedTuple):
    """Heads, slots, keys a slot, and whether integrals are drifts (`gap.Spans`)."""

    num_heads: int
    num_slots: int
    fan: int
    is_drift: bool


class CoreInputs(NamedTuple):
    """Inputs of the quadratic part."""

    key: SideInputs  # keys against the query (logits)
    value: SideInputs
    span: Tensor  # [B, X], length of the span that ends at each slot
    age: Tensor  # [B, K], time from each key to its slot
    present: Tensor | None  # [B, K] bool, or None (all present)
    layout: Layout


def attend_strictly_before(inputs: CoreInputs) -> tuple[Tensor, Tensor]:
    """Return what `forward` does, with gradients (of `span` and `age` if integrals are drifts)."""
    key, value, *rest, layout = inputs
    found: tuple[Tensor, Tensor] = _forward(*key, *value, *rest, *layout)
    return found


def _inputs(tensors: list[Tensor | None], present: Tensor | None, layout: Layout) -> CoreInputs:
    """Return the inputs from the five tensors of each side, `span` and `age`."""
    key, value = SideInputs._make(tensors[:5]), SideInputs._make(tensors[5:10])
    return CoreInputs._make([key, value, *tensors[10:], present, layout])


_SIDE = (
    "Tensor {0}_matrix, Tensor {0}_key, Tensor? {0}_amplitude, Tensor? {0}_base, Tensor? {0}_step"
)
_LAYOUT = "int num_heads, int num_slots, int fan, bool is_drift"


@torch.library.custom_op(
    "osciformer::blocked_forward",
    mutates_args=(),
    schema=f"({_SIDE.format('key')}, {_SIDE.format('value')}, Tensor span, Tensor age,"
    f" Tensor? present, {_LAYOUT}) -> (Tensor, Tensor)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs(list(args[:12]), args[12], Layout(*args[13:]))
    with torch.autocast(inputs.span.device.type, enabled=False):
        return forward(inputs)


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    key, span, heads = args[6], args[10], args[13]
    shape = (span.shape[0], heads, span.shape[1])
    return span.new_empty(*shape, key.shape[-1] // heads), span.new_empty(shape)


@torch.library.custom_op(
    "osciformer::blocked_backward",
    mutates_args=(),
    schema="(Tensor[] given, bool[] is_given, Tensor? present, Tensor out, Tensor lse,"
    f" Tensor grad_out, Tensor grad_lse, {_LAYOUT}) -> Tensor[]",
)
def _backward(
    given: list[Tensor], is_given: list[bool], present: Tensor | None, *args: Any
) -> list[Tensor]:
    rest = iter(given)
    tensors = [next(rest) if there else None for there in is_given]
    inputs = _inputs(tensors, present, Layout(*args[4:]))
    with torch.autocast(inputs.span.device.type, enabled=False):
        key, value, span, age = backward(inputs, *args[:4])
    return [
        torch.zeros_like(tensor) if grad is None else _own(grad)
        for tensor, grad in zip(tensors, [*key, *value, span, age], strict=True)
        if tensor is not None
    ]


def _own(x: Tensor) -> Tensor:
    """Return `x` as a tensor of its own memory, which is what operators must return."""
    is_whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if is_whole and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


@_backward.register_fake
def _(given: list[Tensor], *args: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, present, ctx.layout = inputs[:12], inputs[12], inputs[13:]
    ctx.is_given = [t is not None for t in tensors]
    ctx.save_for_backward(*(t for t in tensors if t is not None), present, *output)


def _pull_back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *given, present, out, lse = ctx.saved_tensors
    grads = tuple(g.contiguous() for g in grads)
    found = iter(_backward(given, ctx.is_given, present, out, lse, *grads, *ctx.layout))
    return (*(next(found) if there else None for there in ctx.is_given), *[None] * 5)


_forward.register_autograd(_pull_back, setup_context=_setup_context)


class Side:
    """The rows and keys of one channel set at the current level, and the spans of that level.

    If all rows share the query (`is_shared`), a key's integrals are added up over channels.
    """

    def __init__(self, inputs: SideInputs, layout: Layout, *, is_shared: bool) -> None:
        self.spans, self.base = Spans(inputs.matrix, inputs.step), inputs.base
        self.is_point = inputs.matrix.shape[0] == 2
        self.is_drift = layout.is_drift and not self.is_point
        self.key = inputs.key[: 2 if is_shared else None].clone()
        # [B, K, H]
        self.bias = gap.to_heads(inputs.key[2], layout.num_heads) if is_shared else None
        self.row = inputs.matrix.new_zeros(2, *inputs.matrix.shape[2:])
        if inputs.amplitude is not None:
            self.row = torch.cat([self.row, inputs.amplitude])

    def query(self, group: Group) -> Tensor | float:
        """Return the query of each row at the reference time of its block."""
        row = group.rows(self.row)
        base = None if self.base is None else group.at_rows(self.base)
        return gap.combine(row[2:] if row.shape[0] > 2 else None, base)

    def first(self, group: Group, length: Tensor) -> Tensor:
        """Return the whole first component of the rows' integrals (or of their propagator)."""
        row = group.rows(self.row[0])
        if not self.is_drift:
            return 1.0 + row if self.is_point else row
        query = self.query(group)
        return row + length * query if isinstance(query, float) else row.addcmul(length, query)

    def climb(self, group: Group, length: Tensor, age: Tensor) -> None:
        """Move rows back to the start and keys on to the end of their parents.

        `length` ``[B, g, r, 1]`` is t_j - r before it, `age` ``[B, g, k, 1]`` r - t_i after it.
        """
        before = self.spans.take(group.spans_before_rows)
        gap.prepend_to_row(group.rows(self.row), self.first(group, length), before, length)
        after = self.spans.take(group.spans_after_keys)
        bias = None if self.bias is None else group.keys(self.bias)
        base = None if self.base is None else group.at_parent_end(self.base)
        gap.append_to_key(group.keys(self.key), bias, after, age if self.is_drift else None, base)

    def between(self, size: int) -> Tensor | None:
        """Return the basis functions at which spans 2K and 2K + 1 of level `size` meet, or None."""
        base = self.base
        return None if base is None else base.index_select(-2, self.meeting_points(base, size))

    def meeting_points(self, base: Tensor, size: int) -> Tensor:
        """Return the positions at which spans 2K and 2K + 1 of level `size` meet."""
        pairs = torch.arange(self.spans.matrix.shape[-2] // 2, device=base.device)
        return (size * (1 + 2 * pairs)).clamp_(max=base.shape[-2] - 1)


class Sweep:
    """Rows, keys and spans of both channel sets at the current level."""

    def __init__(self, inputs: CoreInputs) -> None:
        layout = inputs.layout
        self.levels = Levels(layout.num_slots, layout.fan)
        self.num_heads, self.is_drift = layout.num_heads, layout.is_drift
        self.key = Side(inputs.key, layout, is_shared=inputs.key.amplitude is None)
        self.value = Side(inputs.value, layout, is_shared=False)
        self.lengths = inputs.span.unsqueeze(-1)  # [B, blocks, 1], of the spans
        self.length = torch.zeros_like(self.lengths)  # t_j - r of the rows
        self.age = inputs.age.unsqueeze(-1).clone()  # r - t_i of the keys
        self.present = None if inputs.present is None else inputs.present.unsqueeze(-1)

    def climb(self, level: int) -> None:
        """Move rows, keys and spans from `level` to the next."""
        for group in self.levels.groups(level):
            length, age = group.rows(self.length), group.keys(self.age)
            age.add_(self.lengths[..., group.spans_after_keys, :].unsqueeze(-2))
            for side in (self.key, self.value):
                side.climb(group, length, age)
            length.add_(self.lengths[..., group.spans_before_rows, :].unsqueeze(-2))
        self.even_out()
        for side in (self.key, self.value):
            lengths = self.lengths if side.is_drift else None
            side.spans = gap.merge_spans(side.spans, lengths, side.between(1 << level))
        self.lengths = self.lengths[..., 0::2, :] + self.lengths[..., 1::2, :]

    def even_out(self) -> None:
        """Append an empty span if the number of spans is odd."""
        if self.lengths.shape[-2] % 2:
            for side in (self.key, self.value):
                side.spans = side.spans.map(lambda x: pad(x, (0, 0, 0, 1)))
            self.lengths = pad(self.lengths, (0, 0, 0, 1))

    def overwritten(self, group: Group) -> list[Tensor]:
        """Return views of what `climb` overwrites, but for the spans."""
        views = [group.rows(self.length), group.keys(self.age)]
        for side in (self.key, self.value):
            views += [group.rows(side.row[:2]), group.keys(side.key)]
            views += [] if side.bias is None else [group.keys(side.bias)]
        return views

    def tile(self, group: Group) -> tiles.Tile:
        """Return what the rows and keys of `group` bring to their tiles."""
        key, heads = group.keys(self.key.key), self.num_heads
        query, bias, constant = None, None, None
        if self.key.bias is not None:
            bias = group.keys(self.key.bias).permute(0, 3, 1, 2).unsqueeze(-1)
            if self.is_drift:
                assert self.key.base is not None
                constant = gap.to_heads(group.at_rows(self.key.base)[0] * key[0], heads)
                constant = constant.permute(0, 3, 1, 2).unsqueeze(-1)
        elif self.is_drift:
            whole = self.key.query(group)
            assert isinstance(whole, Tensor)
            query = join(whole.unsqueeze(0), heads)
        left, right = (join(group.rows(side.row), heads) for side in (self.key, self.value))
        rows = tiles.Rows(left, query, group.rows(self.length).unsqueeze(1), right)
        present = None if self.present is None else group.keys(self.present).unsqueeze(1)
        age, value = group.keys(self.age).unsqueeze(1), join(group.keys(self.value.key), heads)
        keys = tiles.Keys(join(key, heads), bias, constant, age, value, present)
        return tiles.Tile(rows, keys)


def forward(inputs: CoreInputs, dense: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, X, C]`` and logsumexp ``[B, H, X]`` of the row at every position.

    The row at position p sees the keys of slots before p, unless their gap is 0. Rows that see none
    get 0 and -inf. `dense` ``[B, H, X, K]`` is filled with the logits if given.
    """
    sweep = Sweep(inputs)
    batch, positions, width = sweep.value.row.shape[1:]
    heads = sweep.num_heads
    top = inputs.span.new_full((batch, heads, positions, 1), float("-inf"))
    mass = torch.zeros_like(top)
    out = inputs.span.new_zeros(batch, heads, positions, width // heads)
    for level in range(sweep.levels.num_levels):
        for group in sweep.levels.groups(level):
            rows, keys = sweep.tile(group)
            sums = [group.rows(x) for x in (top, mass, out)]
            for where in tiles.cut(rows, keys):
                r, k = tiles.tile_of(where, rows, keys)
                inverse, bias = tiles.inverse_gaps(r, k)
                score = tiles.logits(r, k, tiles.brackets(r, k).mul_(inverse), bias)
                if dense is not None:
                    _record(dense, group, where, score)
                old_top, old_mass, old_out = (x[:, :, where[0], where[1]] for x in sums)
                new_top = torch.maximum(old_top, score.amax(-1, keepdim=True))
                shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
                weight = score.sub_(shift).exp_()
                keep = (old_top - shift).exp_()
                old_mass.mul_(keep).add_(weight.sum(-1, keepdim=True))
                more = tiles.values(r, k, weight, inverse, is_drift=sweep.is_drift)
                old_out.mul_(keep).add_(more)
                old_top.copy_(new_top)
        if level + 1 < sweep.levels.num_levels:
            sweep.climb(level)
    lse = top.squeeze(-1) + mass.squeeze(-1).log()
    return out.div_(mass.masked_fill(mass == 0, 1.0)), lse


def _record(dense: Tensor, group: Group, where: tiles.Where, score: Tensor) -> None:
    """Write the logits of a tile to their places."""
    rows = range(group.row_length)[where[1]]
    keys = range(group.size * group.fan)[where[2]]
    for index, block in enumerate(range(group.count)[where[0]]):
        start = group.origin + 2 * group.size * block
        row, key = start + group.size + rows.start, start * group.fan + keys.start
        dense[:, :, row : row + len(rows), key : key + len(keys)] = score[:, :, index]


# Gradients of both channel sets, of `span` and of `age` (None unless drifts).
Gradients = tuple[SideInputs, SideInputs, Tensor | None, Tensor | None]


def backward(
    inputs: CoreInputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Pull the gradients of `out` and `lse`, which `forward` returned, back to its inputs."""
    sweep = Sweep(inputs)
    levels = sweep.levels
    history = []
    for level in range(levels.num_levels - 1):
        copies = [[x.clone() for x in sweep.overwritten(g)] for g in levels.groups(level)]
        history.append((copies, sweep.key.spans, sweep.value.spans, sweep.lengths))
        sweep.climb(level)

    is_empty = (lse == -torch.inf).unsqueeze(-1)
    shift = lse.unsqueeze(-1).masked_fill(is_empty, 0.0)
    excess = (grad_out * out).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)
    terms = tiles.RowTerms(shift, grad_out, excess.masked_fill_(is_empty, 0.0))

    grads = _SweepGradients(sweep)
    for level in range(levels.num_levels - 1, -1, -1):
        for group in levels.groups(level):
            grads.meet(group, terms)
        if level > 0:
            copies, sweep.key.spans, sweep.value.spans, sweep.lengths = history.pop()
            sweep.even_out()
            grads.descend(1 << (level - 1), levels.groups(level - 1), copies)
    return grads.collect(inputs.span.shape[-1])


class _SideGradients:
    """Gradients of a `Side`, pulled down through the levels."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.row, self.key = torch.zeros_like(side.row), torch.zeros_like(side.key)
        self.bias = None if side.bias is None else torch.zeros_like(side.bias)
        self.base = None if side.base is None else torch.zeros_like(side.base)
        self.spans = side.spans.map(torch.zeros_like)

    def add_query(self, group: Group, grad: Tensor) -> None:
        """Add the gradient ``[B, g, r, D]`` of the query of each row at the reference time."""
        amplitude, grad_amplitude = group.rows(self.side.row)[2:], group.rows(self.row)[2:]
        has_amplitude = amplitude.shape[0] > 0
        if self.side.base is None or self.base is None:
            if has_amplitude:
                grad_amplitude[0].add_(grad)
            return
        base, grad_base = group.at_rows(self.side.base), group.at_rows(self.base)
        gap.accumulate(grad_base, grad * amplitude if has_amplitude else grad.unsqueeze(0))
        if has_amplitude:
            grad_amplitude.addcmul_(grad, base)

    def descend(self, group: Group, length: gap.Pair, age: gap.Pair) -> None:
        """Pull gradients back through `Side.climb`; the side holds what it held before it.

        `length` is that before the climb, `age` that after it.
        """
        side = self.side
        indices = group.spans_before_rows, group.spans_after_keys
        before, after = ((side.spans.take(i), self.spans.take(i)) for i in indices)
        row = group.rows(side.row), group.rows(self.row)
        first = side.first(group, length[0])
        grad_first = gap.prepend_to_row_adjoint(row, first, before, length)
        row[1][0].add_(grad_first)
        if side.is_drift:
            gap.accumulate(length[1], grad_first * side.query(group))
            self.add_query(group, grad_first.mul_(length[0]))
        base = None
        if side.base is not None and self.base is not None:
            base = group.at_parent_end(side.base), group.at_parent_end(self.base)
        key = group.keys(side.key), group.keys(self.key)
        grad_bias = None if self.bias is None else group.keys(self.bias)
        gap.append_to_key_adjoint(key, grad_bias, after, age if side.is_drift else None, base)

    def split_spans(self, size: int, lengths: gap.Pair) -> None:
        """Pull the gradients of the next level's spans back to those of level `size`."""
        side = self.side
        # An empty span may have been appended above.
        merged = self.spans.first(side.spans.matrix.shape[-2] // 2)
        self.spans = side.spans.map(torch.zeros_like)
        spans = side.spans, self.spans
        given = lengths if side.is_drift else None
        grad_between = gap.merge_spans_adjoint(merged, spans, given, side.between(size))
        if grad_between is not None and self.base is not None:
            self.base.index_add_(-2, side.meeting_points(self.base, size), grad_between)

    def collect(self, num_spans: int) -> SideInputs:
        """Return the gradients in the shapes of the inputs, at the lowest level."""
        spans, key = self.spans.first(num_spans), self.key
        if self.bias is not None:
            key = torch.cat([key, gap.from_heads(self.bias, key.shape[-1]).unsqueeze(0)])
        amplitude = self.row[2:] if self.row.shape[0] > 2 else None
        return SideInputs(spans.matrix, key, amplitude, self.base, spans.step)


class _SweepGradients:
    """Gradients of a `Sweep`, pulled down level by level."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.key, self.value = _SideGradients(sweep.key), _SideGradients(sweep.value)
        self.length = torch.zeros_like(sweep.length)
        self.age = torch.zeros_like(sweep.age)
        self.lengths = torch.zeros_like(sweep.lengths)

    def meet(self, group: Group, terms: tiles.RowTerms) -> None:
        """Add the gradients of the tiles of `group`."""
        sweep = self.sweep
        rows, keys = sweep.tile(group)
        to_rows, to_keys = tiles.each(torch.zeros_like, rows), tiles.each(torch.zeros_like, keys)
        to_rows = to_rows._replace(length=group.rows(self.length).unsqueeze(1))
        to_keys = to_keys._replace(age=group.keys(self.age).unsqueeze(1))
        terms = tiles.each(group.rows, terms)
        for where in tiles.cut(rows, keys):
            part, target = tiles.tile_of(where, rows, keys), tiles.tile_of(where, to_rows, to_keys)
            row_terms = tiles.rows_of(where, terms)
            tiles.add_tile_gradients(part, row_terms, target, is_drift=sweep.is_drift)
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
            wide = gap.from_heads(by_key, position.shape[-1])
            group.keys(self.key.key)[0].addcmul_(wide, group.at_rows(sweep.key.base)[0])
            gap.accumulate(group.at_rows(self.key.base)[0], wide * position)

    def descend(self, size: int, groups: list[Group], saved: list[list[Tensor]]) -> None:
        """Pull the gradients of rows, keys and spans down to level `size`, restoring the sweep."""
        sweep = self.sweep
        pairs = sweep.lengths.shape[-2] // 2
        self.lengths = self.lengths[..., :pairs, :].repeat_interleave(2, dim=-2)
        for side in (self.key, self.value):
            side.split_spans(size, (sweep.lengths, self.lengths))
        for group, copies in zip(groups, saved, strict=True):
            age_after = group.keys(sweep.age).clone()
            for view, copy in zip(sweep.overwritten(group), copies, strict=True):
                view.copy_(copy)
            length, age = group.rows(self.length), group.keys(self.age)
            # A row's length after the climb is length + span: its gradient passes to both.
            self.lengths[..., group.spans_before_rows, :].add_(length.sum(-2))
            for side in (self.key, self.value):
                side.descend(group, (group.rows(sweep.length), length), (age_after, age))
            self.lengths[..., group.spans_after_keys, :].add_(age.sum(-2))

    def collect(self, num_spans: int) -> Gradients:
        """Return the gradients in the shapes of the inputs."""
        key, value = self.key.collect(num_spans), self.value.collect(num_spans)
        if not self.sweep.is_drift:
            return key, value, None, None
        return key, value, self.lengths[:, :num_spans, 0], self.age[..., 0]
