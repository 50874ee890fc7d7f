"""How each kind of query path enters the quadratic part: amplitudes, basis, integrals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from osciformer.math.oscillator import moments
from osciformer.ops.attention.blocked.recompute import recomputed
from osciformer.ops.attention.blocked.sinusoids import basis_steps, is_short, sinusoid_integral
from osciformer.ops.attention.blocked.spans import (
    constant_integral,
    constant_spans,
    for_moments,
    linear_integral,
    transition,
)
from osciformer.ops.attention.blocked.timeline import Timeline
from osciformer.ops.attention.query import ConstantPath, LinearPath, QueryPath, SinusoidPath


@dataclass
class PathSpans:
    """Spans of one channel set together with the query's basis functions over them.

    Attributes:
        matrix: ``[2 + F, 2, B, X, D]`` (`chain.Spans`).
        is_drift: Whether its integrals are drifts.
        end: ``[F, B, X, 1|D]``, for drifts: basis functions where each span ends, or None (1).
        step: ``[F, B, X, 1|D]``, for drifts: their change over the span, or None.
    """

    matrix: Tensor
    is_drift: bool
    end: Tensor | None = None
    step: Tensor | None = None


class BlockedPath(ABC):
    """A query path on a time line.

    Attributes:
        amplitude: ``[F, B, X, D]``, coefficients by position, or None where all rows share the
            path.
    """

    amplitude: Tensor | None

    def __init__(self, line: Timeline, dtype: torch.dtype, *, is_drift: bool) -> None:
        self.line, self.dtype, self.is_drift = line, dtype, is_drift

    @abstractmethod
    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        """Return the spans between slots, or from each key to its slot.

        Args:
            omega: ``[D]`` float64.
            zeta: ``[D]`` float64.
            of_keys: Which of the two.
        """

    def _where(self, of_keys: bool) -> tuple[Tensor, Tensor]:
        """Return start and length of the spans, ``[B, X, 1]``."""
        line = self.line
        start, gap = (line.key_times, line.age) if of_keys else (line.starts, line.gaps)
        return start.unsqueeze(-1), gap.unsqueeze(-1)


class _Constant(BlockedPath):
    def __init__(self, path: ConstantPath, line: Timeline, scale: float, **options: object) -> None:
        super().__init__(line, **options)  # type: ignore[arg-type]
        tokens = line.rows_to_positions(path.q.flatten(-2))
        self.amplitude = (tokens.to(self.dtype) * scale).unsqueeze(0)

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        _, gap = self._where(of_keys)
        matrix = constant_spans(gap, omega, zeta, self.dtype, is_drift=self.is_drift)
        return PathSpans(matrix, self.is_drift)


class _Linear(BlockedPath):
    amplitude = None

    def __init__(self, path: LinearPath, line: Timeline, scale: float, **options: object) -> None:
        super().__init__(line, **options)  # type: ignore[arg-type]
        self.path = LinearPath(path.q.double() * scale, path.times.double())
        self.at_starts = line.rows_to_positions(self.path.q)
        after = self.at_starts[:, -1:]
        holds_query = line.holds_query()
        if holds_query is not None:
            # A position without a query comes before all queries of its time: the path arrives.
            there = holds_query[..., None, None]
            arriving = self.path.evaluate(line.starts, from_left=True)
            self.at_starts = torch.where(there[:, :-1], self.at_starts, arriving)
            last = line.starts[:, -1:] + line.gaps[:, -1:]
            after = self.path.evaluate(last, from_left=True)
        self.at_ends = torch.cat([self.at_starts[:, 1:], after], dim=1)

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        _, gap = self._where(of_keys)
        begin, end = self.at_starts, self.at_ends
        if of_keys and self.line.age is not self.line.gaps:
            begin = self.path.evaluate(self.line.key_times)
            end = end.repeat_interleave(self.line.levels.fan, dim=1)
        begin, end = begin.flatten(-2), end.flatten(-2)
        step, is_drift = end - begin, self.is_drift

        def function(
            gap: Tensor, begin: Tensor, step: Tensor, omega: Tensor, zeta: Tensor
        ) -> list[Tensor]:
            m = moments(gap, omega, zeta)
            integral = linear_integral(m, gap, omega, begin, step, is_drift=is_drift)
            return transition(m, omega, zeta) + integral

        gap, omega, zeta = for_moments(gap, omega, zeta, self.dtype)
        begin, change = begin.to(gap.dtype), step.to(gap.dtype)
        width = gap.shape[0] * omega.shape[0]
        planes = recomputed(function, [gap, begin, change], [omega, zeta], width, self.dtype)
        matrix = planes.unflatten(0, (3, 2))
        if not is_drift:
            return PathSpans(matrix, False)
        return PathSpans(matrix, True, end.to(self.dtype)[None], step.to(self.dtype)[None])


class _Sinusoid(BlockedPath):
    """Shared by all rows: the path itself is the basis. Else: cos and sin of each mode, and 1."""

    def __init__(self, path: SinusoidPath, line: Timeline, scale: float, **options: object) -> None:
        super().__init__(line, **options)  # type: ignore[arg-type]
        self.bank = path.omega.double()
        constant = None if path.constant is None else path.constant.double() * scale
        cos, sin = path.cos.double() * scale, path.sin.double() * scale
        origin = path.origin.double()
        self.amplitude = None
        if path.is_shared:
            self.origin = origin.unsqueeze(-1)
            # [B, 1, H, J, C] -> [B, J, F = 1, D]
            self.cos, self.sin = (
                x[:, 0].transpose(1, 2).flatten(-2)[:, :, None] for x in (cos, sin)
            )
            self.constant = None if constant is None else constant[:, 0].flatten(-2)[:, None, None]
            return
        first = line.starts[:, :1].detach()
        self.origin = first.unsqueeze(-1)
        angle = ((origin - first).unsqueeze(-1) * self.bank)[:, :, None, :, None]
        pairs = (
            cos * angle.cos() - sin * angle.sin(),
            cos * angle.sin() + sin * angle.cos(),
        )
        planes = torch.stack(pairs, dim=4).flatten(3, 4)  # [B, M, H, 2J, C]: cos, sin, cos, ...
        if constant is not None:
            still = constant.expand(*planes.shape[:3], -1).unsqueeze(3)
            planes = torch.cat([planes, still], dim=3)
        by_position = line.rows_to_positions(planes)
        self.amplitude = by_position.permute(3, 0, 1, 2, 4).flatten(-2).to(self.dtype)
        self.cos, self.sin, self.constant = _one_hot(
            self.bank, self.amplitude.shape[-1], has_constant=constant is not None
        )

    def spans(self, omega: Tensor, zeta: Tensor, *, of_keys: bool) -> PathSpans:
        start, gap = self._where(of_keys)
        start, is_drift = start - self.origin, self.is_drift
        work = torch.float64
        if self.dtype == torch.float32 and not torch.compiler.is_compiling():
            # As in `for_moments`: where nothing turns far within a gap, all is series.
            work = torch.float32 if is_short(gap, self.bank, omega, zeta) else work
        omega, zeta = omega.to(work), zeta.to(work)
        fixed = [self.cos.to(work), self.sin.to(work), self.bank, omega, zeta]
        fixed += [] if self.constant is None else [self.constant.to(work)]

        def function(start: Tensor, gap: Tensor, *fixed: Tensor) -> list[Tensor]:
            cos, sin, bank, omega, zeta, *rest = fixed
            length = gap.to(omega.dtype)
            m = moments(length, omega, zeta)
            first, second = sinusoid_integral(
                start, gap, cos, sin, bank, omega, zeta, m, is_drift=is_drift
            )
            for constant in rest:
                still = constant_integral(m, length, omega, is_drift=is_drift)
                first = first + constant * still[0].unsqueeze(-2)
                second = second + constant * still[1].unsqueeze(-2)
            integrals = torch.stack([first, second], dim=-2).flatten(-3, -2).unbind(-2)
            return [*transition(m, omega, zeta), *integrals]

        width = gap.shape[0] * self.cos.shape[-2] * omega.shape[0]
        planes = recomputed(function, [start, gap], fixed, width, self.dtype)
        matrix = planes.unflatten(0, (-1, 2))
        if not is_drift:
            return PathSpans(matrix, False)
        angle = (start + gap) * self.bank
        ends, steps = (angle.cos(), angle.sin()), basis_steps(start, gap, self.bank)
        if self.amplitude is None:
            return PathSpans(matrix, True, self._along(ends, 1.0), self._along(steps, 0.0))
        return PathSpans(matrix, True, self._bases(ends, 1.0), self._bases(steps, 0.0))

    def _along(self, basis: tuple[Tensor, Tensor], share_of_constant: float) -> Tensor:
        """Return the shared path (or its steps), ``[1, B, X, D]``."""
        path = basis[0] @ self.cos.squeeze(-2) + basis[1] @ self.sin.squeeze(-2)
        if self.constant is not None:
            path = path + share_of_constant * self.constant.squeeze(-2)
        return path.to(self.dtype).unsqueeze(0)

    def _bases(self, basis: tuple[Tensor, Tensor], constant: float) -> Tensor:
        """Return cos, sin, cos, sin, ... and the constant (or their steps), ``[F, B, X, 1]``."""
        planes = torch.stack(basis, dim=-1).flatten(-2)  # [B, X, 2J]
        if self.constant is not None:
            planes = torch.cat([planes, torch.full_like(planes[..., :1], constant)], dim=-1)
        return planes.movedim(-1, 0).unsqueeze(-1).to(self.dtype)


def _one_hot(
    bank: Tensor, width: int, *, has_constant: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return coefficients of cos and sin of each mode, two by two, and of a last function 1."""
    modes = bank.shape[0]
    count = 2 * modes + has_constant
    pick = torch.eye(count, dtype=bank.dtype, device=bank.device)
    shape = (1, modes, count, width)
    cos = pick[0 : 2 * modes : 2, :, None].expand(shape)
    sin = pick[1 : 2 * modes : 2, :, None].expand(shape)
    if not has_constant:
        return cos, sin, None
    return cos, sin, pick[-1, :, None].expand(1, 1, count, width)


def blocked_path(
    path: QueryPath, line: Timeline, scale: float, dtype: torch.dtype, *, is_drift: bool
) -> BlockedPath:
    """Return `path`, times `scale`, as seen from the positions of `line`."""
    if isinstance(path, ConstantPath):
        return _Constant(path, line, scale, dtype=dtype, is_drift=is_drift)
    if isinstance(path, LinearPath):
        return _Linear(path, line, scale, dtype=dtype, is_drift=is_drift)
    return _Sinusoid(path, line, scale, dtype=dtype, is_drift=is_drift)


def query_at_rows(
    path: QueryPath, rows: Tensor, cols: Tensor, ties: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return ``[B, M, H, C]``, the query of each row at its own time.

    That time counts as the time of the key it is tied with, as in the limit <q_j(t_i), K_i>.
    """
    if not isinstance(path, SinusoidPath):
        return path.q
    order, end, count = ties
    tied = cols.gather(1, order.gather(1, (end - 1).clamp(min=0)))
    return path.evaluate(torch.where(count > 0, tied, rows))
