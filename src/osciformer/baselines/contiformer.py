r"""ContiFormer: attention whose keys and values follow neural differential equations, pair by pair.

Chen et al., "ContiFormer: Continuous-Time Transformer for Irregular Time Series Modeling", NeurIPS
2023. Each pair of a row j and a key i is a problem of its own over $[t_i, t_j]$, mapped to
$s \in [-1, 1]$. Those that are seen, $N (N + 1) / 2$ of a causal series without ties, are solved as
one batch, which costs memory D for each of them and each state kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from osciformer._text import check_choice
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.baselines.contiformer_pairs import (
    Field,
    PairOptions,
    Pairs,
    PairTokens,
    attend_pairs,
    query_spline,
)
from osciformer.baselines.transformer import ProjectedAttention
from osciformer.events.neural.encoder import EventStates, TokenEncoder, gaps_of
from osciformer.events.sequences import EventBatch
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.nn.encoder import Encoded, Encoder, EncoderBlock, SeriesEmbedding
from osciformer.nn.timeline import TimeScale, check_tokens
from osciformer.ops._checks import check_float, check_mask, check_shape, check_times
from osciformer.ops.padding import blank_absent, clean_times

Activation = Literal["sigmoid", "softplus", "tanh"]

# Events at one time are kept apart by this part of a unit, so that the order of their times is the
# order of their indices.
_SMALLEST_GAP = 1e-6
# Numbers in the states of the pairs that are solved at once, per vector field. Small parts stay in
# the caches of a processor; a GPU would spend its time on starting kernels.
_LARGEST_PART = {"cpu": 2**21, "cuda": 2**24}
_NO_RNG: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def contiformer_attention(
    q: Float[Tensor, "B N H C"],
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    times: Float[Tensor, "B N"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    key_field: Field,
    value_field: Field,
    **options: Any,
) -> Float[Tensor, "B N H C"]:
    r"""Return attention between a spline of queries and keys that move along a vector field.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \dot k_i = f_k(t, k_i), \quad k_i(t_i) = K_i,$$

    a softmax of $\alpha / \sqrt C$ over the keys, and values $\dot v_i = f_v(t, v_i)$ averaged over
    the same interval. Where $t_i = t_j$ the logit is $\langle Q_j, K_i \rangle$, the value $V_i$;
    tokens at one time see each other. States are kept in float32 at least, even if the fields
    compute in less (autocast).

    Args:
        q: Query tokens, the knots of the spline.
        k: Key tokens, where the key trajectories start.
        v: Value tokens, where the value trajectories start.
        times: Times of the tokens, not decreasing within a series.
        mask: True where a token is present; absent ones may hold anything, NaN included.
        key_field: Maps times `[P]` and states `[P, H * C]` to the derivatives of the states. P is
            the number of pairs that are seen; no other is solved. One field moves all heads
            together.
        value_field: The same for the values.
        options: Fields of `PairOptions`: `query, direction, quadrature, num_nodes, step, solver,
            recompute, method, adjoint, fuse`.

    Returns:
        The attended values, in the dtype of `v`; zero in the rows of absent tokens.

    Raises:
        ValueError: For shapes that do not fit, times that decrease, unknown modes.
        TypeError: For tensors that are not floating point, masks that are not boolean.
        ImportError: If torchdiffeq is asked for and not installed.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8).unbind(0)
        >>> times = torch.tensor([[0.0, 0.4, 0.5, 1.7]])
        >>> fields = dict(key_field=lambda t, k: -k, value_field=VectorField(16))
        >>> contiformer_attention(q, k, v, times, **fields).shape
        torch.Size([1, 4, 2, 8])
    """
    pair_options = PairOptions(**options)
    for name, x in (("q", q), ("k", k), ("v", v), ("times", times)):
        check_float(name, x)
    if q.ndim != 4:
        raise ValueError(f"q must have shape [B, N, H, C], got {list(q.shape)}")
    batch, length = q.shape[:2]
    check_shape("k", k, tuple(q.shape), "[B, N, H, C]")
    check_shape("v", v, tuple(q.shape), "[B, N, H, C]")
    check_shape("times", times, (batch, length), "[B, N]")
    if mask is not None:
        check_mask("mask", mask, (batch, length))
    check_times("times", times, mask)
    if mask is not None:
        times = clean_times(times, mask)
        q, k, v = (blank_absent(x, mask) for x in (q, k, v))
    return _attend_all(q, k, v, times, mask, key_field, value_field, pair_options)


def _attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    mask: Tensor | None,
    key_field: Field,
    value_field: Field,
    options: PairOptions,
) -> Float[Tensor, "B N H C"]:
    """Return `contiformer_attention` of tokens that are checked and whose padding is clean."""
    if v.numel() == 0:
        return torch.zeros_like(v)
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries, keys, values = (x.to(dtype).flatten(2) for x in (q, k, v))  # [B, N, D]
    # [B, rows, keys]
    if options.direction == "causal":
        seen = times[:, None, :] <= times[:, :, None]
    else:
        seen = times.new_ones(*times.shape, times.shape[1], dtype=torch.bool)
    if mask is not None:
        seen = seen & mask[:, :, None] & mask[:, None, :]
    pairs = Pairs.where(seen)
    attended = attend_pairs(
        pairs,
        # Rows are tokens, too.
        times.flatten().index_select(0, pairs.token),
        times.flatten().index_select(0, pairs.row),
        partial(query_spline(queries, times, mask, options.query), pairs),
        queries.flatten(0, 1),
        PairTokens(queries, keys, values, v.shape[2], key_field, value_field, options),
    )
    return attended.view(v.shape).to(v.dtype)


class VectorField(nn.Module):
    r"""The right-hand side $f(t, y) = \phi(\mathrm{norm}(W y + b + u t))$, one or more in a row.

    Args:
        dim: Width D of the states.
        num_layers: Number of layers of that form.
        activation: $\phi$: `sigmoid, softplus` or `tanh`.
        norm: Whether there is a layer norm.

    Example:
        >>> VectorField(8)(torch.rand(5), torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        num_layers: int = 1,
        activation: Activation = "sigmoid",
        norm: bool = True,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, get_args(Activation))
        self.maps = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.time_gain = nn.Parameter(torch.zeros(num_layers, dim))
        norms = (nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity() for _ in range(num_layers))
        self.norms = nn.ModuleList(norms)
        kinds = {"sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "tanh": nn.Tanh}
        self.activation = kinds[activation]()

    def forward(self, t: Float[Tensor, "*P"], y: Float[Tensor, "*P D"]) -> Float[Tensor, "*P D"]:
        """Return the derivatives of the states `y` at the times `t`."""
        for linear, gain, norm in zip(self.maps, self.time_gain, self.norms, strict=True):
            y = self.activation(norm(linear(y) + t[..., None] * gain))
        return y


class ContiFormerAttention(ProjectedAttention):
    """Multi-head ContiFormer attention: projections, two vector fields, `contiformer_attention`.

    The defaults are those of the released code (microsoft/PhysioPro, the configurations of its
    experiments) in the vector field, the solver, its step, the spline and the initial weights. The
    quadrature is the paper's; its number of nodes is the default of the release, whose
    experiments use `trapezoid`.

    Differences from the release: the default direction is `causal`, as in `OscillatorAttention`,
    while the release attends to all pairs; the spline is evaluated where it is asked for, not on a
    grid of 0.01; our solver steps onto the nodes, while the release interpolates between its steps;
    gradients go through the solver, while the release has `solver="torchdiffeq", adjoint=True`;
    there is no dropout on the weights.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H.
        vector_field: `linear`, one layer, or `mlp`, two; see `VectorField`.
        activation: Activation of the fields.
        norm: Whether the fields have layer norms.
        dropout: Dropout after the output projection.
        options: Those of `contiformer_attention`.

    Example:
        >>> layer = ContiFormerAttention(16, 4)
        >>> layer(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        vector_field: Literal["linear", "mlp"] = "linear",
        activation: Activation = "sigmoid",
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
        num_layers = 1 if vector_field == "linear" else 2
        self.key_field, self.value_field = (
            VectorField(dim, num_layers=num_layers, activation=activation, norm=norm)
            for _ in range(2)
        )

    def forward(
        self, x: Tensor, times: Tensor, mask: Tensor | None = None, *, validate: bool = True
    ) -> Float[Tensor, "B N D"]:
        """Return the attended tokens; rows where `mask` is False mean nothing.

        Arguments are those of `OscillatorAttention.forward`: tokens `[B, N, D]`, times `[B, N]`.
        """
        if validate:
            check_tokens(x, times, mask, name="x", dim=self.dim)
            check_times("times", times, mask)
            times = clean_times(times, mask)
            if mask is not None:
                x = torch.where(mask[..., None], x, 0.0)
        fields = self.key_field, self.value_field
        out = _attend_all(*self.project(x, x), times, mask, *fields, self.options)
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
        self.dim = dim
        self.time_scale = TimeScale()
        self.embedding = SeriesEmbedding(input_dim, dim, static_dim=static_dim)
        self.encoder = Encoder(
            EncoderBlock(
                ContiFormerAttention(dim, num_heads, dropout=dropout, **options),
                feedforward_dim=feedforward_dim,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )

    def encode(
        self, values: Tensor, times: Tensor, mask: Tensor, static: Tensor | None = None
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        tokens = self.embedding(values, static=static)
        encoded: Encoded = self.encoder(tokens, self.time_scale(times), mask, validate=False)
        return encoded

    def read(self, encoded: Any, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Refuse: the attention has rows at the observations only."""
        raise NotImplementedError("contiformer has states at the observations only")

    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        self.time_scale.fit(times, mask)


@dataclass(frozen=True)
class _Prepared:
    """What a batch of events has before gaps are known."""

    times: Float[Tensor, "B N"]
    tokens: Float[Tensor, "B N D"]
    after: Float[Tensor, "B N D"]
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
    then. Without a gap it is the row of event i itself. (The released event code computes the
    attention and does not use it.)

    A sequence of n events costs $n (n + 1) (G + 1) / 2$ trajectories for each field, and padding
    none. They are solved in parts and solved again in the backward pass.

    Args:
        num_types: Number of event types K.
        dim: Width D, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        dropout: Dropout.
        gaps_per_unit: Mean gaps of the training events in a unit of the fields' time. The fields
            are bounded, so this is how many events it takes until a key has moved by its size.
        options: `quadrature, num_nodes, step` and `fuse` of `PairOptions`; the defaults take one
            step of Runge-Kutta from node to node.
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

    def states(self, prepared: Any, gaps: Float[Tensor, "B N G"] | None) -> EventStates:
        """Return the states after each event, and at gaps after it, see `EventEncoder`."""
        if gaps is None:
            return EventStates(prepared.after, None)
        return EventStates(
            prepared.after, self._read(prepared, self.scale(gaps) / self.gaps_per_unit)
        )

    def _read(self, known: _Prepared, gaps: Float[Tensor, "B N G"]) -> Float[Tensor, "B N G D"]:
        """Return the rows of the last block some gaps after each event; zero after absent ones."""
        block = cast("EncoderBlock", self.blocks[-1])
        layer: ContiFormerAttention = block.attention
        size, width, num_gaps = gaps.shape
        tokens, gaps = (
            x.flatten(0, 1).index_select(0, known.present) for x in (known.tokens, gaps)
        )
        attended = self._attend(known, layer, block.attention_norm(known.tokens), gaps)
        rows: Tensor = self.norm(block.residual(tokens[:, None], layer.finish(attended)))
        states = rows.new_zeros(size * width, num_gaps, self.dim)
        states = states.index_copy(0, known.present, rows)
        return states.unflatten(0, (size, width))

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
        fields = layer.key_field, layer.value_field
        # Parts are recomputed as a whole.
        options = replace(layer.options, recompute=False)

        def attend(rows: slice, num_pairs: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pairs = _past_pairs(event[rows], known.times.shape[1], num_pairs)
            last = times.index_select(0, event[rows].index_select(0, pairs.row))
            return attend_pairs(
                pairs,
                times.index_select(0, pairs.token),
                end[rows].index_select(0, pairs.row),
                lambda tau: spline(pairs, torch.minimum(tau, last)),
                q.flatten(0, 1).index_select(0, event[rows]),
                PairTokens(q, k, v, layer.num_heads, *fields, options),
            )

        largest = _LARGEST_PART.get(gaps.device.type, _LARGEST_PART["cpu"])
        parts = [v.flatten(0, 1)[:0]]
        for part in _parts(num_seen, largest // self.dim):
            if torch.is_grad_enabled():
                parts.append(checkpoint(attend, *part, q, k, v, **_NO_RNG))
            else:
                parts.append(attend(*part, q, k, v))
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
        stop = int(torch.searchsorted(ends, done + largest, right=True))
        stop = max(stop, begin + 1)
        num_pairs = int(ends[stop - 1]) - done
        yield slice(begin, stop), num_pairs
        begin, done = stop, done + num_pairs
