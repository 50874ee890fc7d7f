r"""ContiFormer: attention whose keys and values follow neural differential equations, pair by pair.

Chen et al., "ContiFormer: Continuous-Time Transformer for Irregular Time Series Modeling", NeurIPS
2023. Each pair of a row j and a key i is a problem of its own over $[t_i, t_j]$, mapped to
$s \in [-1, 1]$. Those that are seen, $N (N + 1) / 2$ of a causal series without ties, are solved as
one batch, on an axis P, which costs memory D for each of them and each state kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from osciformer._optional import need
from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Mask, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.transformer import ProjectedAttention
from osciformer.events.neural.encoder import EventStates, Gaps, TokenEncoder, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.math.quadrature import gauss_legendre
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.nn.encoder import Encoded, Encoder, EncoderBlock, SeriesEmbedding
from osciformer.nn.timeline import TimeScale, check_tokens
from osciformer.ops._checks import check_float, check_mask, check_shape, check_times
from osciformer.ops.padding import blank_absent, clean_times, last_present_index

Field = Callable[[Tensor, Tensor], Tensor]
Query = Literal["hermite", "linear"]
Direction = Literal["causal", "bidirectional"]
Quadrature = Literal["gauss", "trapezoid"]
Solver = Literal["rk4", "torchdiffeq"]
Method = Literal["rk4", "dopri5"]

_TOLERANCE = 1e-6  # of dopri5, relative and absolute; the release's constructor has the same
# How parts without randomness are recomputed in the backward pass.
_NO_RNG: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
# Part of a unit between events at one time, so that times have the order of indices.
_SMALLEST_GAP = 1e-6
# Numbers in the states of the pairs that are solved at once, per vector field. Small parts stay in
# the caches of a processor; a GPU would spend its time on starting kernels.
_LARGEST_PART = {"cpu": 2**21, "cuda": 2**24}


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How ContiFormer integrates its pairs."""

    # The cubic spline with backward differences, or linear. Both are causal and jump between tokens
    # at one time; a straight segment follows a jump.
    query: Query = "hermite"
    direction: Direction = "causal"  # or all pairs: later keys run backwards in time
    quadrature: Quadrature = "gauss"  # or trapezoid: the two ends
    num_nodes: int = 3  # of the Gauss-Legendre rule
    step: float = 0.1  # longest step of the fixed-step solvers on an interval of length 2
    solver: Solver = "rk4"  # our own, which steps onto each node, or torchdiffeq (an extra)
    recompute: bool = False  # whether the backward pass computes each step of our rk4 again
    # Of torchdiffeq. rk4 takes the same steps as ours; dopri5 chooses them for the whole batch, so
    # that each row depends a little on the others.
    method: Method = "rk4"
    adjoint: bool = False  # whether torchdiffeq solves the adjoint equation in the backward pass
    fuse: bool = False  # whether torch.compile fuses the steps of our rk4, to read memory less

    def __post_init__(self) -> None:
        names = ("query", "direction", "quadrature", "solver", "method")
        for name, kind in zip(names, (Query, Direction, Quadrature, Solver, Method), strict=True):
            check_choice(name, getattr(self, name), get_args(kind))
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1; got {self.num_nodes}")
        if not 0.0 < self.step <= 2.0:
            raise ValueError(f"step must lie in (0, 2], the length of [-1, 1]; got {self.step}")
        if self.solver == "rk4" and (self.adjoint or self.method != "rk4"):
            raise ValueError("adjoint=True and method='dopri5' need solver='torchdiffeq'")
        if self.solver == "torchdiffeq" and (self.recompute or self.fuse):
            hint = "recompute needs solver='rk4'; for torchdiffeq there is adjoint=True"
            raise ValueError(hint if self.recompute else "fuse needs solver='rk4'")

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
        velocity = partial(_velocity, field, start, gap)
        return list(odeint(velocity, y, y.new_tensor(stops), **settings)[-len(nodes) :])

    def _solve_rk4(
        self, field: Field, y: Tensor, start: Tensor, gap: Tensor, stops: list[float]
    ) -> list[Tensor]:
        """Return the states at all stops."""
        advance = partial(_fused_step() if self.fuse else _step, field, start, gap)
        if self.recompute and torch.is_grad_enabled():
            advance = partial(checkpoint, advance, **_NO_RNG)
        states = [y]
        for between in pairwise(stops):
            for left, right in pairwise(self._grid(list(between))):
                step: tuple[Any, Any] = left, right - left
                if self.fuse:  # tensors: for every other number the step would be compiled anew
                    step = y.new_full((), step[0]), y.new_full((), step[1])
                y = advance(*step, y)
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
    return torch.compile(_step, dynamic=True)  # the number of pairs differs from call to call


@dataclass(frozen=True)
class Pairs:
    """The R rows of all series and the tokens of their own series that they see, row by row."""

    series: Int[Tensor, "R"]  # the series of each row
    row: Int[Tensor, "P"]  # the row of each pair
    slot: Int[Tensor, "P"]  # where in the series the token of each pair stands
    width: int  # number of tokens N of a series

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
    def _cell(self) -> Int[Tensor, "P"]:  # the place of each pair in a grid [R, N]
        return self.row * self.width + self.slot

    def spread(self, x: Tensor, fill: float) -> Tensor:
        """Return `[P, ...]` as `[R, N, ...]`, filled up where a token is not seen."""
        shape = (len(self.series), self.width, *x.shape[1:])
        return x.new_full(shape, fill).flatten(0, 1).index_copy(0, self._cell, x).view(shape)

    def collect(self, x: Tensor) -> Tensor:
        """Return `[R, N, ...]` as `[P, ...]`: what is at the pairs."""
        return x.flatten(0, 1).index_select(0, self._cell)


def query_spline(
    q: Tokens, times: Times, mask: Mask | None, query: Query
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
        q = q.take_along_dim(held[..., None], dim=1)
    widths = functional.pad(times.diff(dim=1), (0, 1))
    rise = functional.pad(q.diff(dim=1), (0, 0, 0, 1))
    # A knot has the slope of the segment that ends there. So a segment ends with its own mean
    # slope, and it is bent by the slope at its start alone.
    before = held.gather(1, (held - 1).clamp(min=0))
    elapsed = times - times.gather(1, before)
    has_slope = elapsed > 0
    ratio = (widths / torch.where(has_slope, elapsed, 1.0))[..., None].to(q.dtype)
    came = q - q.take_along_dim(before[..., None], dim=1)
    bend = torch.where(has_slope[..., None], ratio * came - rise, 0.0)

    def evaluate(pairs: Pairs, tau: Tensor) -> Tensor:
        # Of numbers without channels a whole grid is cheap; each row has its series' knots.
        knots = times.detach().index_select(0, pairs.series)  # [R, N]
        found = torch.searchsorted(knots, pairs.spread(tau.detach(), 0.0), right=True)
        segment = pairs.at(pairs.collect(found) - 1)

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


class Motion(NamedTuple):
    """How keys and values move."""

    key_field: Field
    value_field: Field
    options: PairOptions


class PairTokens(NamedTuple):
    """Tokens that rows attend to, and how they move."""

    queries: Tokens
    keys: Tokens
    values: Tokens
    num_heads: int
    motion: Motion


def attend_pairs(
    pairs: Pairs,
    start: Float[Tensor, "P"],
    end: Float[Tensor, "P"],
    path: Callable[[Tensor], Tensor],
    own_of_rows: Float[Tensor, "R D"],
    tokens: PairTokens,
) -> Float[Tensor, "R D"]:
    """Return the attended values of any rows, heads side by side; zero in rows that see nothing.

    Each pair is integrated from its token's to its row's time; the path maps `[P]` to `[P, D]`.
    """
    queries, keys, values, num_heads, (key_field, value_field, options) = tokens

    def solve(field: Field, x: Tensor) -> list[Tensor]:
        return options.solve(field, at_tokens(x), start.to(x.dtype), (end - start).to(x.dtype))

    def at_tokens(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, pairs.token)

    heads = (num_heads, values.shape[-1] // num_heads)  # H, C
    nodes, weights = options.rule()
    apart = (end != start)[:, None]
    own = own_of_rows.index_select(0, pairs.row)
    logits: Any = 0.0
    for x, weight, key in zip(nodes, weights, solve(key_field, keys), strict=True):
        if x in (0.0, 1.0):
            asked = own if x else at_tokens(queries)
        else:  # lerp, unlike start + x * (end - start), never passes the end
            asked = path(torch.lerp(start, end, x))
        asked = torch.where(apart, asked, own)
        logits = logits + weight * (asked * key).unflatten(-1, heads).sum(-1)  # [P, H]
    solved = zip(weights, solve(value_field, values), strict=True)
    mean: Any = sum(weight * value for weight, value in solved)
    # Logits have no channels, so that a grid of them is small beside the states.
    grid = pairs.spread(logits / math.sqrt(heads[1]), torch.finfo(logits.dtype).min)
    shares = pairs.collect(torch.softmax(grid, dim=1))
    weighted = (shares[..., None] * mean.unflatten(-1, heads)).flatten(1)
    return weighted.new_zeros(own_of_rows.shape).index_add(0, pairs.row, weighted)


def contiformer_attention(
    q: Float[Tensor, "B N H C"],
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    times: Times,
    mask: Mask | None = None,
    *,
    key_field: Field,
    value_field: Field,
    **options: Any,
) -> Float[Tensor, "B N H C"]:
    r"""Return attention `[B, N, H, C]` of a spline of queries to keys that move along a field.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \dot k_i = f_k(t, k_i), \quad k_i(t_i) = K_i,$$

    a softmax of $\alpha / \sqrt C$ over the keys, and values $\dot v_i = f_v(t, v_i)$ averaged over
    the same interval. Where $t_i = t_j$ the logit is $\langle Q_j, K_i \rangle$, the value $V_i$;
    tokens at one time see each other. States are float32 at least, even under autocast.

    Args:
        q: Query tokens, the knots of the spline.
        k: Key tokens, where the key trajectories start.
        v: Value tokens, likewise.
        times: Times of the tokens `[B, N]`, not decreasing within a series.
        mask: True where a token is present `[B, N]`; rows of absent ones are zero.
        key_field: Maps times `[P]` and states `[P, H * C]` of the P pairs to their derivatives.
        value_field: The same for the values.
        options: `query` (`hermite` or `linear`), `direction` (`causal` or `bidirectional`),
            `quadrature` (`gauss` with `num_nodes`, or `trapezoid`), `solver` (`rk4`, our own, with
            a largest `step` on [-1, 1], `recompute` to save memory and `fuse` to compile it; or
            `torchdiffeq` with `method` `rk4` or `dopri5`, and `adjoint`).

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8).unbind(0)
        >>> times = torch.tensor([[0.0, 0.4, 0.5, 1.7]])
        >>> fields = dict(key_field=lambda t, k: -k, value_field=VectorField(16))
        >>> contiformer_attention(q, k, v, times, **fields).shape
        torch.Size([1, 4, 2, 8])
    """
    motion = Motion(key_field, value_field, PairOptions(**options))
    for name, x in (("q", q), ("k", k), ("v", v), ("times", times)):
        check_float(name, x)
    if q.ndim != 4:
        raise ValueError(f"q must have shape [B, N, H, C], got {list(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        check_shape(name, x, tuple(q.shape), "[B, N, H, C]")
    check_shape("times", times, tuple(q.shape[:2]), "[B, N]")
    if mask is not None:
        check_mask("mask", mask, (q.shape[0], q.shape[1]))
    check_times("times", times, mask)
    if mask is not None:
        times = clean_times(times, mask)
        q, k, v = (blank_absent(x, mask) for x in (q, k, v))
    return _attend_all(q, k, v, times, mask, motion)


def _attend_all(
    q: Tensor, k: Tensor, v: Tensor, times: Times, mask: Mask | None, motion: Motion
) -> Float[Tensor, "B N H C"]:
    """Return `contiformer_attention` of tokens that are checked and whose padding is clean."""
    if v.numel() == 0:
        return torch.zeros_like(v)
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries, keys, values = (x.to(dtype).flatten(2) for x in (q, k, v))  # [B, N, D]
    present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
    seen = present[:, :, None] & present[:, None, :]  # [B, rows, keys]
    if motion.options.direction == "causal":
        seen = seen & (times[:, None, :] <= times[:, :, None])
    pairs = Pairs.where(seen)
    # Rows are tokens, too.
    start, end = (times.flatten().index_select(0, x) for x in (pairs.token, pairs.row))
    path = partial(query_spline(queries, times, mask, motion.options.query), pairs)
    tokens = PairTokens(queries, keys, values, v.shape[2], motion)
    attended = attend_pairs(pairs, start, end, path, queries.flatten(0, 1), tokens)
    return attended.view(v.shape).to(v.dtype)


class VectorField(nn.Module):
    r"""The right-hand side $f(t, y) = \phi(\mathrm{norm}(W y + b + u t))$, one or more in a row.

    Args:
        dim: Width D of the states.
        num_layers: Number of layers of that form.
        activation: $\phi$: `sigmoid, softplus` or `tanh`.
        norm: Whether there is a layer norm.
    """

    def __init__(
        self, dim: int, *, num_layers: int = 1, activation: str = "sigmoid", norm: bool = True
    ) -> None:
        super().__init__()
        kinds = {"sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "tanh": nn.Tanh}
        check_choice("activation", activation, tuple(kinds))
        self.maps = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.time_gain = nn.Parameter(torch.zeros(num_layers, dim))
        norms = (nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity() for _ in range(num_layers))
        self.norms = nn.ModuleList(norms)
        self.activation = kinds[activation]()

    def forward(self, t: Float[Tensor, "*P"], y: Float[Tensor, "*P D"]) -> Float[Tensor, "*P D"]:
        """Return the derivatives of the states `y` at the times `t`."""
        for linear, gain, norm in zip(self.maps, self.time_gain, self.norms, strict=True):
            y = self.activation(norm(linear(y) + t[..., None] * gain))
        return y


class ContiFormerAttention(ProjectedAttention):
    """Multi-head ContiFormer attention: projections, two vector fields, `contiformer_attention`.

    Defaults are those of the released experiments (microsoft/PhysioPro), except that the quadrature
    is the paper's (the release: `trapezoid`); the direction is `causal` (all pairs); the spline
    is evaluated where it is asked for (a grid of 0.01); the solver steps onto the nodes
    (interpolation); gradients go through it (the adjoint); and weights have no dropout.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H.
        vector_field: `linear`, one layer, or `mlp`, two; see `VectorField`.
        activation: Activation of the fields.
        norm: Whether the fields have layer norms.
        dropout: Dropout after the output projection.
        options: Those of `contiformer_attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        vector_field: Literal["linear", "mlp"] = "linear",
        activation: str = "sigmoid",
        norm: bool = True,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        check_choice("vector_field", vector_field, ("linear", "mlp"))
        self.options = PairOptions(**options)
        for child in self.children():
            if isinstance(child, nn.Linear):
                nn.init.xavier_uniform_(child.weight)
        layers: Any = {"num_layers": 1 if vector_field == "linear" else 2, "norm": norm}
        self.key_field = VectorField(dim, **layers, activation=activation)
        self.value_field = VectorField(dim, **layers, activation=activation)

    @property
    def motion(self) -> Motion:
        """How keys and values move."""
        return Motion(self.key_field, self.value_field, self.options)

    def forward(
        self, x: Tokens, times: Times, mask: Mask | None = None, *, validate: bool = True
    ) -> Tokens:
        """Return the attended tokens, see `OscillatorAttention.forward`; padding means nothing."""
        if validate:
            check_tokens(x, times, mask, name="x", dim=self.dim)
            check_times("times", times, mask)
            times = clean_times(times, mask)
            if mask is not None:
                x = torch.where(mask[..., None], x, 0.0)
        out = _attend_all(*self.project(x, x), times, mask, self.motion)
        return self.finish(out.flatten(2))

    def extra_repr(self) -> str:
        """Show the choices that no submodule shows."""
        settings = ", ".join(f"{name}={value}" for name, value in asdict(self.options).items())
        return f"dim={self.dim}, num_heads={self.num_heads}, {settings}"


_OPTIONS = tuple(item.name for item in fields(PairOptions))


@register_backbone(
    "contiformer", options=("feedforward_dim", "vector_field", "activation", "norm", *_OPTIONS)
)
class ContiFormerBackbone(Backbone):
    """Encoder blocks with ContiFormer attention. It cannot be read between observations."""

    can_read = False

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 1,
        num_heads: int = 2,
        feedforward_dim: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.time_scale = dim, TimeScale()
        self.embedding = SeriesEmbedding(input_dim, dim, static_dim=static_dim)
        layer = partial(ContiFormerAttention, dim, num_heads, dropout=dropout, **options)
        between: Any = {"feedforward_dim": feedforward_dim, "dropout": dropout}
        self.encoder = Encoder(EncoderBlock(layer(), **between) for _ in range(num_layers))

    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        tokens = self.embedding(values, static=static)
        return cast("Encoded", self.encoder(tokens, self.time_scale(times), mask, validate=False))

    def read(self, encoded: Any, query_times: Tensor) -> Tensor:
        """Refuse: the attention has rows at the observations only."""
        raise NotImplementedError("contiformer has states at the observations only")

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.time_scale.fit(times, mask)


@dataclass(frozen=True)
class _Prepared:
    times: Times
    tokens: Tokens
    after: Tokens
    present: Int[Tensor, "E"]
    num_seen: Int[Tensor, "E"]


@register_backbone(
    "contiformer",
    kind="events",
    options=("gaps_per_unit", "quadrature", "num_nodes", "step", "fuse"),
)
class ContiFormerEventEncoder(TokenEncoder):
    r"""Blocks of ContiFormer attention, the last of which is asked at any time after each event.

    A row some gap after event i is the token of event i, whose query is held from $t_i$ on; it
    attends to the events 0 to i, whose keys and values have moved along their vector fields until
    then. (The released event code computes the attention and does not use it.) A sequence of n
    events costs $n (n + 1) (G + 1) / 2$ trajectories for each field, solved in parts, and again in
    the backward pass.

    Args:
        num_types: Number of event types K.
        dim: Width D, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.
        gaps_per_unit: Mean training gaps in a unit of time, in which a key moves by its size.
        options: `quadrature, num_nodes, step, fuse` of `PairOptions`; by default one step a node.
    """

    def __init__(
        self,
        num_types: int,
        dim: int = 32,
        *,
        num_layers: int = 1,
        num_heads: int = 4,
        dropout: float = 0.0,
        gaps_per_unit: float = 10.0,
        **options: Any,
    ) -> None:
        if not 0.0 < gaps_per_unit < float("inf"):
            raise ValueError(f"gaps_per_unit must be positive and finite; got {gaps_per_unit}")
        super().__init__(num_types, dim, dropout)
        self.gaps_per_unit = gaps_per_unit
        # A cubic query through gaps of very different length would overshoot.
        options = {"step": 1.0, **options, "query": "linear", "recompute": True, "dropout": dropout}
        self.blocks = nn.ModuleList(
            EncoderBlock(ContiFormerAttention(dim, num_heads, **options), dropout=dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def prepare(self, batch: EventBatch) -> _Prepared:
        """Return what enters the last block and its rows at the events, see `EventEncoder`."""
        gaps = self.scale(gaps_of(batch)) / self.gaps_per_unit
        times = gaps.clamp(min=_SMALLEST_GAP).cumsum(dim=1)
        tokens = self.tokens(batch)
        for block in self.blocks[:-1]:
            tokens = block(tokens, times, batch.mask)
        after = self.norm(self.blocks[-1](tokens, times, batch.mask))
        # Parts are chosen by these numbers, which a GPU is asked for here and nowhere later.
        present = batch.mask.flatten().nonzero()[:, 0]
        num_seen = present.cpu() % batch.mask.shape[1] + 1
        return _Prepared(times, tokens, after, present, num_seen)

    def states(self, prepared: Any, gaps: Gaps | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        now = None if gaps is None else self._read(prepared, self.scale(gaps) / self.gaps_per_unit)
        return EventStates(prepared.after, now)

    def _read(self, known: _Prepared, gaps: Gaps) -> Float[Tensor, "B N G D"]:
        """Return the rows of the last block some gaps after each event; zero after absent ones."""
        block = cast("EncoderBlock", self.blocks[-1])
        layer: ContiFormerAttention = block.attention
        shape = (*gaps.shape, self.dim)
        found = (x.flatten(0, 1).index_select(0, known.present) for x in (known.tokens, gaps))
        tokens, gaps = found
        attended = self._attend(known, layer, block.attention_norm(known.tokens), gaps)
        rows: Tensor = self.norm(block.residual(tokens[:, None], layer.finish(attended)))
        return rows.new_zeros(shape).flatten(0, 1).index_copy(0, known.present, rows).view(shape)

    def _attend(
        self, known: _Prepared, layer: ContiFormerAttention, normed: Tensor, gaps: Tensor
    ) -> Tensor:
        """Return what is attended to some gaps after each present event."""
        dtype = torch.promote_types(normed.dtype, torch.float32)
        q, k, v = (x.flatten(2).to(dtype) for x in layer.project(normed, normed))
        times = known.times.flatten()
        event = known.present.repeat_interleave(gaps.shape[1])  # [R], as the rows below
        end = times.index_select(0, event) + gaps.flatten()
        num_seen = known.num_seen.repeat_interleave(gaps.shape[1])
        spline = query_spline(q, known.times, None, layer.options.query)
        # Parts are recomputed as a whole.
        motion = layer.motion._replace(options=replace(layer.options, recompute=False))

        def attend(rows: slice, num_pairs: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pairs = _past_pairs(event[rows], known.times.shape[1], num_pairs)
            last = times.index_select(0, event[rows].index_select(0, pairs.row))
            ends = times.index_select(0, pairs.token), end[rows].index_select(0, pairs.row)
            own = q.flatten(0, 1).index_select(0, event[rows])
            tokens = PairTokens(q, k, v, layer.num_heads, motion)
            return attend_pairs(
                pairs, *ends, lambda tau: spline(pairs, torch.minimum(tau, last)), own, tokens
            )

        largest = _LARGEST_PART.get(gaps.device.type, _LARGEST_PART["cpu"])
        solve = partial(checkpoint, attend, **_NO_RNG) if torch.is_grad_enabled() else attend
        parts = [solve(*part, q, k, v) for part in _parts(num_seen, largest // self.dim)]
        parts.append(v.flatten(0, 1)[:0])  # so that no event is no row
        return torch.cat(parts).to(normed.dtype).view(*gaps.shape, self.dim)


def _past_pairs(event: Int[Tensor, "R"], width: int, num_pairs: int) -> Pairs:
    """Return the pairs of events, counted through all sequences, and those up to each of them."""
    num_seen = event % width + 1
    first = num_seen.cumsum(0) - num_seen
    every = torch.arange(len(event), device=event.device)
    row = every.repeat_interleave(num_seen, output_size=num_pairs)  # known, so nothing waits
    slot = torch.arange(num_pairs, device=event.device) - first.index_select(0, row)
    return Pairs(event // width, row, slot, width)


def _parts(num_seen: Int[Tensor, "R"], largest: int) -> Iterator[tuple[slice, int]]:
    """Yield rows whose pairs are at most `largest`, or one row, and the number of their pairs."""
    ends = num_seen.cumsum(0)
    begin = done = 0
    while begin < len(ends):
        stop = max(begin + 1, int(torch.searchsorted(ends, done + largest, right=True)))
        num_pairs = int(ends[stop - 1]) - done
        yield slice(begin, stop), num_pairs
        begin, done = stop, done + num_pairs
