"""Closed forms once per gap: the spans of each kind of query path, and of the values.

Closed forms are float64 and then cast. They are evaluated in chunks that fit the cache, not kept,
and evaluated again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osciformer.math.oscillator import SERIES_RADIUS, fastest_rate, moments
from osciformer.ops.attention.blocked import sinusoids
from osciformer.ops.attention.blocked.timeline import Timeline
from osciformer.ops.attention.gap import constant_integral, linear_integral, propagator_change
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath
from osciformer.ops.attention.ties import Ties

# Elements of one temporary for each thread: a quarter of a mebibyte stays in a core's own cache.
_CHUNK_ELEMENTS = 1 << 15
# Elsewhere launches cost more than memory traffic: few chunks, 64 MiB for a temporary.
_DEVICE_CHUNK_ELEMENTS = 1 << 23
# Gaps that differ by less than this many leading bits are one to results in float32, which have 24.
_GAP_BITS = 36


class Setup(NamedTuple):
    """What all closed forms of a call share: time line, dtype of results, drifts or not."""

    line: Timeline
    dtype: torch.dtype
    is_drift: bool


class PathSpans(NamedTuple):
    """Spans of one channel set together with the query's basis functions over them."""

    matrix: Tensor  # [2 + F, 2, B, X, D] (`gap.Spans`)
    is_drift: bool
    end: Tensor | None = None  # [F, B, X, 1|D], for drifts: basis at the end of each span; None: 1
    step: Tensor | None = None  # [F, B, X, 1|D], for drifts: its change over the span


_Function = Callable[..., list[Tensor]]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, function: _Function, chunk: int, sliced: int, dtype: torch.dtype, *inputs: Tensor
    ) -> Tensor:
        ctx.function, ctx.chunk, ctx.sliced = function, chunk, sliced
        ctx.save_for_backward(*inputs)
        output = inputs[0]
        for start, size, parts in _chunks(inputs, sliced, chunk):
            planes = function(*parts)
            if start == 0:
                *axes, _, width = torch.broadcast_shapes(*(p.shape for p in planes))
                shape = (len(planes), *axes, inputs[0].shape[-2], width)
                output = planes[0].new_empty(shape, dtype=dtype)
            for target, plane in zip(output, planes, strict=True):
                target.narrow(-2, start, size).copy_(plane)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        needed = [i for i, want in enumerate(ctx.needs_input_grad[4:]) if want]
        sums = {i: torch.zeros_like(inputs[i]) for i in needed}
        for start, size, cut in _chunks(inputs, ctx.sliced, ctx.chunk):
            parts = [p.detach().requires_grad_(i in sums) for i, p in enumerate(cut)]
            with torch.enable_grad():
                planes = ctx.function(*parts)
            outputs, along = [], []
            for plane, grad in zip(planes, grads.narrow(-2, start, size), strict=True):
                if plane.requires_grad:
                    outputs.append(plane)
                    along.append(grad.to(plane.dtype).expand_as(plane))
            wanted = [parts[i] for i in needed]
            found = torch.autograd.grad(outputs, wanted, along, allow_unused=True)
            for i, grad in zip(needed, found, strict=True):
                if grad is not None:
                    target = sums[i].narrow(-2, start, size) if i < ctx.sliced else sums[i]
                    target.add_(grad)
        return (None, None, None, None, *(sums.get(i) for i in range(len(inputs))))


def _chunks(
    inputs: tuple[Tensor, ...], sliced: int, chunk: int
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield start, size and the inputs of each chunk; the first `sliced` inputs are cut."""
    length = inputs[0].shape[-2]
    for start in range(0, length, chunk):
        size = min(chunk, length - start)
        yield start, size, [x.narrow(-2, start, size) for x in inputs[:sliced]] + [*inputs[sliced:]]


def _recomputed(
    function: _Function, along: list[Tensor], whole: list[Tensor], width: int, dtype: torch.dtype
) -> Tensor:
    """Return the planes of `function(*along, *whole)`, stacked along a leading axis and cast.

    The function is pointwise along axis -2, along which the tensors ``[..., X, .]`` of `along` are
    cut into chunks; `width` is the number of elements per position of its largest temporary.
    """
    if torch.compiler.is_compiling():
        planes = torch.broadcast_tensors(*function(*along, *whole))
        return torch.stack([p.to(dtype) for p in planes])
    is_cpu = along[0].device.type == "cpu"
    budget = _CHUNK_ELEMENTS * torch.get_num_threads() if is_cpu else _DEVICE_CHUNK_ELEMENTS
    chunk = max(1, budget // max(1, width))
    result: Tensor = _Recompute.apply(function, chunk, len(along), dtype, *along, *whole)
    return result


def distinct_gaps(gap: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return gaps that occur, ``[1, U, 1]``, and the place of each in them, ``[B X]``, if few do.

    Observations at even steps with some missing have few different gaps, and closed forms are most
    of the work for short series. Otherwise the gaps ``[B, X, 1]`` come back as they are, with None.
    """
    if torch.compiler.is_compiling() or gap.device.type != "cpu" or gap.requires_grad:
        return gap, None
    # Differences of scaled times are equal up to rounding only.
    unit = 1 << (53 - _GAP_BITS)
    rounded = ((gap.flatten().view(torch.int64) + unit // 2) & -unit).view(torch.float64)
    found, place = rounded.unique(return_inverse=True)
    if 2 * found.numel() > gap.numel():
        return gap, None
    return found[None, :, None], place


def _for_moments(
    gap: Tensor, omega: Tensor, zeta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `moments` in the precision that results of `dtype` need.

    Long gaps need float64, for their phases. If every gap is short, all is power series without
    cancellation, and single precision loses nothing that the result could hold.
    """
    if dtype == torch.float32 and not torch.compiler.is_compiling() and gap.numel():
        reach = fastest_rate(omega, zeta).detach().max() * gap.detach().max()
        if bool(reach < SERIES_RADIUS):
            return gap.float(), omega.float(), zeta.float()
    return gap, omega, zeta


class Constant:
    """A constant query; averaged values are a query of 1, and point values need no integral."""

    def __init__(
        self, setup: Setup, amplitude: Tensor | None = None, *, with_integral: bool = True
    ) -> None:
        self.setup, self.amplitude, self.with_integral = setup, amplitude, with_integral

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        """Return the spans between slots, or from each key to its slot, of channels ``[D]``."""
        line, dtype, is_drift = self.setup
        gap, place = (line.age if of_keys else line.gaps).unsqueeze(-1), None
        shape = gap.shape[:2]

        def function(gap: Tensor, omega: Tensor, zeta: Tensor) -> list[Tensor]:
            m = moments(gap, omega, zeta)
            planes = propagator_change(m, omega, zeta)
            if self.with_integral:
                planes += constant_integral(m, gap, omega, is_drift=is_drift)
            return planes

        if dtype == torch.float32:
            gap, place = distinct_gaps(gap)
        gap, omega, zeta = _for_moments(gap, omega, zeta, dtype)
        width = gap.shape[0] * omega.shape[0]
        planes = _recomputed(function, [gap], [omega, zeta], width, dtype)
        if place is not None:
            planes = planes[:, 0].index_select(1, place).unflatten(1, shape)
        return PathSpans(planes.unflatten(0, (-1, 2)), is_drift)


class _Linear:
    amplitude: Tensor | None = None

    def __init__(self, path: LinearPath, setup: Setup, scale: float) -> None:
        self.setup, line = setup, setup.line
        self.path = LinearPath(path.q.double() * scale, path.times.double())
        self.at_starts = line.rows_to_positions(self.path.q)
        after = self.at_starts[:, -1:]
        if line.holds_query is not None:
            # A position without a query comes before all queries of its time: the path arrives.
            there = line.holds_query[..., None, None]
            arriving = self.path.evaluate(line.starts, from_left=True)
            self.at_starts = torch.where(there[:, :-1], self.at_starts, arriving)
            last = line.starts[:, -1:] + line.gaps[:, -1:]
            after = self.path.evaluate(last, from_left=True)
        self.at_ends = torch.cat([self.at_starts[:, 1:], after], dim=1)

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        line, dtype, is_drift = self.setup
        gap = (line.age if of_keys else line.gaps).unsqueeze(-1)
        begin, end = self.at_starts, self.at_ends
        if of_keys and line.age is not line.gaps:
            begin = self.path.evaluate(line.key_times)
            end = end.repeat_interleave(line.levels.fan, dim=1)
        begin, end = begin.flatten(-2), end.flatten(-2)
        step = end - begin

        def function(*tensors: Tensor) -> list[Tensor]:
            gap, begin, step, omega, zeta = tensors
            m = moments(gap, omega, zeta)
            integral = linear_integral(m, gap, omega, begin, step, is_drift=is_drift)
            return propagator_change(m, omega, zeta) + integral

        gap, omega, zeta = _for_moments(gap, omega, zeta, dtype)
        begin, change = begin.to(gap.dtype), step.to(gap.dtype)
        width = gap.shape[0] * omega.shape[0]
        planes = _recomputed(function, [gap, begin, change], [omega, zeta], width, dtype)
        bases = (end.to(dtype)[None], step.to(dtype)[None]) if is_drift else ()
        return PathSpans(planes.unflatten(0, (3, 2)), is_drift, *bases)


class _Sinusoid:
    """Shared by all rows: the path itself is the basis. Else: cos and sin of each mode, and 1."""

    def __init__(self, path: SinusoidPath, setup: Setup, scale: float) -> None:
        self.setup, line = setup, setup.line
        self.bank = path.omega.double()
        constant = None if path.constant is None else path.constant.double() * scale
        cos, sin = path.cos.double() * scale, path.sin.double() * scale
        origin = path.origin.double()
        self.amplitude: Tensor | None = None
        if path.is_shared:
            self.origin = origin.unsqueeze(-1)
            # [B, 1, H, J, C] -> [B, J, F = 1, D]
            cos, sin = (x[:, 0].transpose(1, 2).flatten(-2)[:, :, None] for x in (cos, sin))
            self.cos, self.sin = cos, sin
            self.constant = None if constant is None else constant[:, 0].flatten(-2)[:, None, None]
            return
        first = line.starts[:, :1].detach()
        self.origin = first.unsqueeze(-1)
        angle = ((origin - first).unsqueeze(-1) * self.bank)[:, :, None, :, None]
        c, s = angle.cos(), angle.sin()
        planes = torch.stack((cos * c - sin * s, cos * s + sin * c), dim=4).flatten(
            3, 4
        )  # [B, M, H, 2J, C]: cos, sin, cos, ...
        if constant is not None:
            still = constant.expand(*planes.shape[:3], -1).unsqueeze(3)
            planes = torch.cat([planes, still], dim=3)
        by_position = line.rows_to_positions(planes)
        self.amplitude = by_position.permute(3, 0, 1, 2, 4).flatten(-2).to(setup.dtype)
        # Coefficients of cos and sin of each mode, two by two, and of a last function 1.
        num_modes, num_planes = self.bank.shape[0], planes.shape[3]
        one_hot = torch.eye(num_planes, dtype=self.bank.dtype, device=self.bank.device)
        one_hot = one_hot[:, :, None].expand(-1, -1, self.amplitude.shape[-1])[None]
        self.cos, self.sin = one_hot[:, 0 : 2 * num_modes : 2], one_hot[:, 1 : 2 * num_modes : 2]
        self.constant = None if constant is None else one_hot[:, -1:]

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        line, dtype, is_drift = self.setup
        start, gap = (line.key_times, line.age) if of_keys else (line.starts, line.gaps)
        start, gap = start.unsqueeze(-1) - self.origin, gap.unsqueeze(-1)
        work = torch.float64
        if dtype == torch.float32 and not torch.compiler.is_compiling():
            # As in `_for_moments`: if nothing turns far within a gap, all is series.
            work = torch.float32 if sinusoids.is_short(gap, self.bank, omega, zeta) else work
        omega, zeta = omega.to(work), zeta.to(work)
        fixed = [self.cos.to(work), self.sin.to(work), self.bank, omega, zeta]
        fixed += [] if self.constant is None else [self.constant.to(work)]

        def function(start: Tensor, gap: Tensor, *fixed: Tensor) -> list[Tensor]:
            modes = sinusoids.Modes(*fixed[:5])
            omega, zeta = modes.omega, modes.zeta
            length = gap.to(omega.dtype)
            m = moments(length, omega, zeta)
            pair = sinusoids.sinusoid_integral(start, gap, modes, m, is_drift=is_drift)
            first, second = pair
            for constant in fixed[5:]:
                still = constant_integral(m, length, omega, is_drift=is_drift)
                first = first + constant * still[0].unsqueeze(-2)
                second = second + constant * still[1].unsqueeze(-2)
            integrals = torch.stack([first, second], dim=-2).flatten(-3, -2).unbind(-2)
            return [*propagator_change(m, omega, zeta), *integrals]

        width = gap.shape[0] * self.cos.shape[-2] * omega.shape[0]
        planes = _recomputed(function, [start, gap], fixed, width, dtype)
        matrix = planes.unflatten(0, (-1, 2))
        if not is_drift:
            return PathSpans(matrix, False)
        angle = (start + gap) * self.bank
        ends, steps = (angle.cos(), angle.sin()), sinusoids.basis_steps(start, gap, self.bank)
        read = self._along if self.amplitude is None else self._bases
        return PathSpans(matrix, True, read(ends, 1.0), read(steps, 0.0))

    def _along(self, basis: tuple[Tensor, Tensor], share_of_constant: float) -> Tensor:
        """Return the shared path (or its steps), ``[1, B, X, D]``."""
        path = basis[0] @ self.cos.squeeze(-2) + basis[1] @ self.sin.squeeze(-2)
        if self.constant is not None:
            path = path + share_of_constant * self.constant.squeeze(-2)
        return path.to(self.setup.dtype).unsqueeze(0)

    def _bases(self, basis: tuple[Tensor, Tensor], constant: float) -> Tensor:
        """Return cos, sin, cos, sin, ... and the constant (or their steps), ``[F, B, X, 1]``."""
        planes = torch.stack(basis, dim=-1).flatten(-2)  # [B, X, 2J]
        if self.constant is not None:
            planes = torch.cat([planes, torch.full_like(planes[..., :1], constant)], dim=-1)
        return planes.movedim(-1, 0).unsqueeze(-1).to(self.setup.dtype)


BlockedPath = Constant | _Linear | _Sinusoid


def blocked_path(path: QueryPath, setup: Setup, scale: float) -> BlockedPath:
    """Return `path`, times `scale`, as seen from the positions of the time line.

    Its `amplitude` ``[F, B, X, D]`` are coefficients by position, or None if all rows share the
    path; its method `spans` returns the spans between slots, or from each key to its slot.
    """
    if isinstance(path, ConstantPath):
        tokens = setup.line.rows_to_positions(path.q.flatten(-2))
        return Constant(setup, (tokens.to(setup.dtype) * scale).unsqueeze(0))
    if isinstance(path, LinearPath):
        return _Linear(path, setup, scale)
    return _Sinusoid(path, setup, scale)


def query_at_rows(path: QueryPath, rows: Tensor, cols: Tensor, ties: Ties) -> Tensor:
    """Return ``[B, M, H, C]``, the query of each row at its own time.

    That time counts as the time of the key it is tied with, as in the limit <q_j(t_i), K_i>.
    """
    if not isinstance(path, SinusoidPath):
        return path.q
    tied = cols.gather(1, ties.order.gather(1, (ties.end - 1).clamp(min=0)))
    return path.evaluate(torch.where(ties.size > 0, tied, rows))
