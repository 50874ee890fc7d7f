"""The pairs of ContiFormer attention: trajectories of keys and values, and the path of queries.

Pairs are packed: those that are seen lie on one axis P, and no other is solved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from osciformer._optional import need
from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.math.quadrature import gauss_legendre
from osciformer.ops.padding import last_present_index

Field = Callable[[Tensor, Tensor], Tensor]
Query = Literal["hermite", "linear"]
Direction = Literal["causal", "bidirectional"]
Quadrature = Literal["gauss", "trapezoid"]
Solver = Literal["rk4", "torchdiffeq"]
Method = Literal["rk4", "dopri5"]

_TOLERANCE = 1e-6  # of dopri5, relative and absolute; the release's constructor has the same


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    r"""How ContiFormer integrates its pairs.

    Attributes:
        query: `hermite`, the cubic spline with backward differences, or `linear`. Up to $t_j$ both
            depend on the tokens up to $t_j$ alone. They jump between tokens at one time, and
            after a jump the cubic one starts anew with a straight segment.
        direction: `causal` is $t_i \le t_j$; `bidirectional` is all pairs, where the trajectory of
            a later key runs backwards in time.
        quadrature: `gauss` with `num_nodes` nodes, or `trapezoid`: the two ends.
        num_nodes: Nodes of the Gauss-Legendre rule.
        step: Longest step of the fixed-step solvers on an interval of length 2.
        solver: `rk4`, our own, which steps onto each node, or `torchdiffeq` (extra `baselines`).
        recompute: Whether our `rk4` keeps only the state at each step for the backward pass and
            computes the step again there, rather than keep all that is inside of it.
        method: Method of torchdiffeq. `rk4` takes the same steps as ours. `dopri5` (tolerance 1e-6)
            chooses its steps for the batch as a whole, so each row depends a little on the others.
        adjoint: Whether torchdiffeq solves the adjoint equation in the backward pass.
        fuse: Whether the steps of our `rk4` are compiled by `torch.compile`: a step then passes
            over memory a few times, where it does some dozens of times without.
    """

    query: Query = "hermite"
    direction: Direction = "causal"
    quadrature: Quadrature = "gauss"
    num_nodes: int = 3
    step: float = 0.1
    solver: Solver = "rk4"
    recompute: bool = False
    method: Method = "rk4"
    adjoint: bool = False
    fuse: bool = False

    def __post_init__(self) -> None:
        check_choice("query", self.query, get_args(Query))
        check_choice("direction", self.direction, get_args(Direction))
        check_choice("quadrature", self.quadrature, get_args(Quadrature))
        check_choice("solver", self.solver, get_args(Solver))
        check_choice("method", self.method, get_args(Method))
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1; got {self.num_nodes}")
        if not 0.0 < self.step <= 2.0:
            raise ValueError(f"step must lie in (0, 2], the length of [-1, 1]; got {self.step}")
        if self.solver == "rk4" and (self.adjoint or self.method != "rk4"):
            raise ValueError("adjoint=True and method='dopri5' need solver='torchdiffeq'")
        if self.solver == "torchdiffeq" and self.recompute:
            raise ValueError("recompute needs solver='rk4'; for torchdiffeq there is adjoint=True")
        if self.solver == "torchdiffeq" and self.fuse:
            raise ValueError("fuse needs solver='rk4'")

    def rule(self) -> tuple[list[float], list[float]]:
        """Return the quadrature nodes and weights on [0, 1]."""
        if self.quadrature == "trapezoid":
            return [0.0, 1.0], [0.5, 0.5]
        nodes, weights = gauss_legendre(self.num_nodes)
        return nodes.tolist(), weights.tolist()

    def solve(self, field: Field, y: Tensor, start: Tensor, gap: Tensor) -> list[Tensor]:
        """Return the states `[P, D]` of all pairs at the nodes; `y` are those at the start."""
        # Internally an interval is [0, 1], not [-1, 1].
        nodes = self.rule()[0]
        stops = nodes if nodes[0] == 0.0 else [0.0, *nodes]
        # Of no pairs the error norm of torchdiffeq is NaN, and any solver has the same answer.
        if self.solver == "rk4" or y.numel() == 0:
            return self._solve_rk4(field, y, start, gap, stops)[-len(nodes) :]
        settings: dict[str, Any] = {"method": self.method, "rtol": _TOLERANCE, "atol": _TOLERANCE}
        if self.method == "rk4":
            grid = {"grid_constructor": lambda f, y, t: t.new_tensor(self._grid(t.tolist()))}
            settings["options"] = grid
        if self.adjoint:
            # The gap was made from the start; of their copies neither leads to the other, as the
            # adjoint equation needs it.
            start, gap = start.clone(), gap.clone()
            parameters = field.parameters() if isinstance(field, nn.Module) else ()
            settings["adjoint_params"] = (*parameters, start, gap)
        package = need("torchdiffeq", extra="baselines")
        odeint = package.odeint_adjoint if self.adjoint else package.odeint

        def velocity(x: Tensor, y: Tensor) -> Tensor:
            return _velocity(field, start, gap, x, y)

        return list(odeint(velocity, y, y.new_tensor(stops), **settings)[-len(nodes) :])

    def _solve_rk4(
        self, field: Field, y: Tensor, start: Tensor, gap: Tensor, stops: list[float]
    ) -> list[Tensor]:
        """Return the states at all stops."""

        def advance(left: Any, length: Any, y: Tensor) -> Tensor:
            if self.fuse:
                # Tensors: for every other number the step would be compiled anew.
                left, length = (y.new_full((), x) for x in (left, length))
            return (_fused_step() if self.fuse else _step)(field, start, gap, left, length, y)

        is_lean = self.recompute and torch.is_grad_enabled()
        lean: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        states = [y]
        for between in pairwise(stops):
            for left, right in pairwise(self._grid(list(between))):
                known = left, right - left, y
                y = checkpoint(advance, *known, **lean) if is_lean else advance(*known)
            states.append(y)
        return states

    def _grid(self, stops: list[float]) -> list[float]:
        """Return points on [0, 1] through all stops, at most `step / 2` apart."""
        grid = stops[:1]
        for left, right in pairwise(stops):
            # The slack is for stops in float32, which must not cost a step.
            count = max(1, math.ceil(abs(right - left) * 2.0 / self.step - 1e-5))
            grid += [left + (right - left) * n / count for n in range(1, count)] + [right]
        return grid


def _velocity(field: Field, start: Tensor, gap: Tensor, x: Any, y: Tensor) -> Tensor:
    """Return the derivatives by x, which runs from 0 to 1 over the interval of each pair."""
    return gap[..., None] * field(start + x * gap, y).to(y.dtype)


def _step(field: Field, start: Tensor, gap: Tensor, left: Any, length: Any, y: Tensor) -> Tensor:
    """Return the states after a step of Kutta's 3/8 rule, which torchdiffeq calls rk4."""

    def f(share: float, y: Tensor) -> Tensor:
        return _velocity(field, start, gap, left + share * length, y)

    k1 = f(0.0, y)
    k2 = f(1.0 / 3.0, y + length / 3.0 * k1)
    k3 = f(2.0 / 3.0, y + length * (k2 - k1 / 3.0))
    k4 = f(1.0, y + length * (k1 - k2 + k3))
    return y + length / 8.0 * (k1 + 3.0 * (k2 + k3) + k4)


@cache
def _fused_step() -> Callable[..., Tensor]:
    """Return `_step`, compiled."""
    # The number of pairs differs from call to call.
    return torch.compile(_step, dynamic=True)


@dataclass(frozen=True)
class Pairs:
    """Rows and the tokens that they see, P pairs in all, row by row.

    There are R rows, those of all series together. A row sees tokens of its own series alone.

    Attributes:
        series: The series of each row.
        row: The row of each pair.
        slot: Where in the series the token of each pair stands.
        width: Number of tokens N of a series.
    """

    series: Int[Tensor, "R"]
    row: Int[Tensor, "P"]
    slot: Int[Tensor, "P"]
    width: int

    @classmethod
    def where(cls, seen: Bool[Tensor, "B M N"]) -> Pairs:
        """Return the pairs where `seen` is True; the rows are all `B * M`."""
        size, num_rows, width = seen.shape
        series = torch.arange(size, device=seen.device).repeat_interleave(num_rows)
        row, slot = seen.flatten(0, 1).nonzero().unbind(1)
        return cls(series, row, slot, width)

    @cached_property
    def token(self) -> Int[Tensor, "P"]:
        """The token of each pair, counted through all series."""
        return self.at(self.slot)

    def at(self, slot: Int[Tensor, "P"]) -> Int[Tensor, "P"]:
        """Return the tokens at some places in the series of the pairs, counted through all."""
        return self.series.index_select(0, self.row) * self.width + slot

    @cached_property
    def _cell(self) -> Int[Tensor, "P"]:
        """The place of each pair in a grid `[R, N]`."""
        return self.row * self.width + self.slot

    def spread(self, x: Tensor, fill: float) -> Tensor:
        """Return `[P, ...]` as `[R, N, ...]`, filled up where a token is not seen."""
        shape = (len(self.series), self.width, *x.shape[1:])
        return x.new_full(shape, fill).flatten(0, 1).index_copy(0, self._cell, x).view(shape)

    def collect(self, x: Tensor) -> Tensor:
        """Return `[R, N, ...]` as `[P, ...]`: what is at the pairs."""
        return x.flatten(0, 1).index_select(0, self._cell)

    def sum_by_row(self, x: Float[Tensor, "P D"]) -> Float[Tensor, "R D"]:
        """Return the sums over the pairs of each row, 0 for a row without any."""
        return x.new_zeros(len(self.series), x.shape[1]).index_add(0, self.row, x)


def query_spline(
    q: Float[Tensor, "B N D"], times: Float[Tensor, "B N"], mask: Tensor | None, query: Query
) -> Callable[[Pairs, Tensor], Tensor]:
    """Return the query as a function from pairs and times `[P]` within their series to `[P, D]`.

    After knot n it is `q + theta * rise + theta * (1 - theta)**2 * bend`, theta in [0, 1].
    """
    held = torch.arange(times.shape[1], device=times.device).expand(times.shape)
    if mask is not None:
        # An absent token repeats the present one whose time it has: no width between them.
        first = mask.to(torch.uint8).argmax(dim=1, keepdim=True)
        last = last_present_index(mask)
        held = torch.where(last >= 0, last, first)
        q = _take(q, held)
    widths = functional.pad(times.diff(dim=1), (0, 1))
    rise = functional.pad(q.diff(dim=1), (0, 0, 0, 1))
    # A knot has the slope of the segment that ends there. So a segment ends with its own mean
    # slope, and it is bent by the slope at its start alone.
    before = held.gather(1, (held - 1).clamp(min=0))
    elapsed = times - times.gather(1, before)
    has_slope = elapsed > 0
    ratio = (widths / torch.where(has_slope, elapsed, 1.0))[..., None].to(q.dtype)
    bend = torch.where(has_slope[..., None], ratio * (q - _take(q, before)) - rise, 0.0)
    knots = times.detach()

    def evaluate(pairs: Pairs, tau: Tensor) -> Tensor:
        # Of numbers without channels a whole grid is cheap; each row has its series' knots.
        knots_of_rows = knots.index_select(0, pairs.series)  # [R, N]
        asked = pairs.spread(tau.detach(), 0.0)
        found = pairs.collect(torch.searchsorted(knots_of_rows, asked, right=True)) - 1
        segment = pairs.at(found)

        def take(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, segment)

        width = take(widths)
        inside = width > 0
        theta = (tau - take(times)) / torch.where(inside, width, 1.0)
        theta = torch.where(inside, theta, 0.0)[:, None].to(q.dtype)
        out = take(q) + theta * take(rise)
        if query == "hermite":
            out = out + theta * (1.0 - theta) ** 2 * take(bend)
        return out

    return evaluate


def _take(x: Float[Tensor, "B N D"], index: Int[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """Return `x[b, index[b, m]]`."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


class PairTokens(NamedTuple):
    """Tokens that rows attend to, and how they move."""

    queries: Float[Tensor, "B N D"]
    keys: Float[Tensor, "B N D"]
    values: Float[Tensor, "B N D"]
    num_heads: int
    key_field: Field
    value_field: Field
    options: PairOptions


def attend_pairs(
    pairs: Pairs,
    start: Float[Tensor, "P"],
    end: Float[Tensor, "P"],
    path: Callable[[Tensor], Tensor],
    own: Float[Tensor, "R D"],
    tokens: PairTokens,
) -> Float[Tensor, "R D"]:
    """Return the attended values of any rows, heads side by side; zero in rows that see nothing.

    Each pair is integrated from the time of its token to that of its row. The path maps times `[P]`
    to the queries `[P, D]` of the pairs, and `own` are the queries of the rows at their own times.
    """
    queries, keys, values, num_heads, key_field, value_field, options = tokens

    def solve(field: Field, x: Tensor) -> list[Tensor]:
        return options.solve(field, at_tokens(x), start.to(x.dtype), (end - start).to(x.dtype))

    def at_tokens(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, pairs.token)

    heads = (num_heads, values.shape[-1] // num_heads)  # H, C
    nodes, weights = options.rule()
    apart = (end != start)[:, None]
    own = own.index_select(0, pairs.row)
    logits: Any = 0.0
    for x, weight, key in zip(nodes, weights, solve(key_field, keys), strict=True):
        if x in (0.0, 1.0):
            asked = own if x else at_tokens(queries)
        else:  # lerp, unlike start + x * (end - start), never passes the end
            asked = path(torch.lerp(start, end, x))
        asked = torch.where(apart, asked, own)
        logits = logits + weight * (asked * key).unflatten(-1, heads).sum(-1)  # [P, H]
    mean: Any = 0.0
    for weight, value in zip(weights, solve(value_field, values), strict=True):
        mean = mean + weight * value

    # Logits have no channels, so that a grid of them is small beside the states.
    grid = pairs.spread(logits / math.sqrt(heads[1]), torch.finfo(logits.dtype).min)
    shares = pairs.collect(torch.softmax(grid, dim=1))
    return pairs.sum_by_row((shares[..., None] * mean.unflatten(-1, heads)).flatten(1))
