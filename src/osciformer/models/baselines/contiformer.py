r"""ContiFormer attention: keys and values follow neural differential equations, pair by pair.

Chen et al., "ContiFormer: Continuous-Time Transformer for Irregular Time Series Modeling", NeurIPS
2023. Each pair of a row j and a key i is a problem of its own over $[t_i, t_j]$, mapped to
$s \in [-1, 1]$. Those that are seen, $N (N + 1) / 2$ of a causal series without ties, are solved as
one batch, which costs memory D for each of them and each state kept.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.models.baselines.contiformer_pairs import (
    Direction,
    Field,
    Method,
    PairOptions,
    Pairs,
    Quadrature,
    Query,
    Solver,
    attend_pairs,
    query_spline,
)
from osciformer.nn.checks import check_tokens
from osciformer.ops._checks import check_choice, check_float, check_mask, check_shape, check_times
from osciformer.ops.padding import blank_absent, clean_times

Activation = Literal["sigmoid", "softplus", "tanh"]


def contiformer_attention(
    q: Float[Tensor, "B N H C"],
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    times: Float[Tensor, "B N"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    key_field: Field,
    value_field: Field,
    query: Query = "hermite",
    direction: Direction = "causal",
    quadrature: Quadrature = "gauss",
    num_nodes: int = 3,
    step: float = 0.1,
    solver: Solver = "rk4",
    recompute: bool = False,
    method: Method = "rk4",
    adjoint: bool = False,
    fuse: bool = False,
) -> Float[Tensor, "B N H C"]:
    r"""Return attention between a spline of queries and keys that move along a vector field.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \dot k_i = f_k(t, k_i), \quad k_i(t_i) = K_i,$$

    a softmax of $\alpha / \sqrt C$ over the keys, and values $\dot v_i = f_v(t, v_i)$ averaged over
    the same interval. Where $t_i = t_j$ the logit is $\langle Q_j, K_i \rangle$, the value $V_i$;
    tokens at one time see each other. States are kept in float32 at least, also where the fields
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
        query: `hermite`, the cubic spline with backward differences, or `linear`. Up to $t_j$ both
            depend on the tokens up to $t_j$ alone. They jump between tokens at one time, and
            after a jump the cubic one starts anew with a straight segment.
        direction: `causal` is $t_i \le t_j$; `bidirectional` is all pairs, where the trajectory of
            a later key runs backwards in time.
        quadrature: `gauss` with `num_nodes` nodes, or `trapezoid`: the two ends.
        num_nodes: Nodes of the Gauss-Legendre rule.
        step: Longest step of the fixed-step solvers in s; the interval has length 2.
        solver: `rk4`, our own, which steps onto each node, or `torchdiffeq` (extra `baselines`).
        recompute: Whether our `rk4` keeps only the state at each step for the backward pass and
            computes the step again there, rather than keep all that is inside of it.
        method: Method of torchdiffeq. `rk4` takes the same steps as ours. `dopri5` (tolerance 1e-6)
            chooses its steps for the batch as a whole, so each row depends a little on the others.
        adjoint: Whether torchdiffeq solves the adjoint equation in the backward pass.
        fuse: Whether the steps of our `rk4` are compiled by `torch.compile`: a step then passes
            over memory a few times, where it does some dozens of times without.

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
    options = PairOptions(
        query, direction, quadrature, num_nodes, step, solver, recompute, method, adjoint, fuse
    )
    _check_tensors(q, k, v, times, mask)
    if v.numel() == 0:
        return torch.zeros_like(v)
    dtype = torch.promote_types(v.dtype, torch.float32)
    times = clean_times(times, mask)
    if mask is not None:
        q, k, v = (blank_absent(x, mask) for x in (q, k, v))
    tokens, keys, values = (x.to(dtype).flatten(2) for x in (q, k, v))  # [B, N, D]

    # [B, rows, keys]
    if direction == "causal":
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
        partial(query_spline(tokens, times, mask, query), pairs),
        tokens=tokens,
        keys=keys,
        values=values,
        own=tokens.flatten(0, 1),
        num_heads=v.shape[2],
        key_field=key_field,
        value_field=value_field,
        options=options,
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


class ContiFormerAttention(nn.Module):
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
        step: This, `num_nodes, quadrature, solver, recompute, method, adjoint, fuse, direction`
            and `query` are those of `contiformer_attention`.
        vector_field: `linear`, one layer, or `mlp`, two; see `VectorField`.
        activation: Activation of the fields.
        norm: Whether the fields have layer norms.
        dropout: Dropout after the output projection.

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
        step: float = 0.1,
        num_nodes: int = 3,
        quadrature: Quadrature = "gauss",
        solver: Solver = "rk4",
        recompute: bool = False,
        method: Method = "rk4",
        adjoint: bool = False,
        fuse: bool = False,
        direction: Direction = "causal",
        query: Query = "hermite",
        vector_field: Literal["linear", "mlp"] = "linear",
        activation: Activation = "sigmoid",
        norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(
                f"dim must be a positive multiple of num_heads; got dim={dim}, {num_heads=}"
            )
        check_choice("vector_field", vector_field, ("linear", "mlp"))
        self.options = PairOptions(
            query, direction, quadrature, num_nodes, step, solver, recompute, method, adjoint, fuse
        )
        self.dim, self.num_heads = dim, num_heads
        self.query_projection, self.key_projection, self.value_projection = (
            nn.Linear(dim, dim) for _ in range(3)
        )
        self.output_projection = nn.Linear(dim, dim)
        for child in self.children():
            nn.init.xavier_uniform_(child.weight)  # type: ignore[arg-type]
        num_layers = 1 if vector_field == "linear" else 2
        self.key_field, self.value_field = (
            VectorField(dim, num_layers=num_layers, activation=activation, norm=norm)
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return the attended tokens; rows where `mask` is False mean nothing.

        Args:
            x: Tokens. Where `mask` is False they may hold anything, NaN included.
            times: Their times, not decreasing among the present tokens of a series.
            mask: True where a token is present.
        """
        check_tokens(x, times, mask, name="x", dim=self.dim)
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1))
            for projection in (self.query_projection, self.key_projection, self.value_projection)
        )
        options: dict[str, Any] = {"key_field": self.key_field, "value_field": self.value_field}
        out = contiformer_attention(q, k, v, times, mask, **options, **asdict(self.options))
        attended: Tensor = self.dropout(self.output_projection(out.flatten(2)))
        return attended

    def extra_repr(self) -> str:
        """Say the choices that no submodule shows."""
        settings = ", ".join(f"{name}={value}" for name, value in asdict(self.options).items())
        return f"dim={self.dim}, num_heads={self.num_heads}, {settings}"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, times: Tensor, mask: Tensor | None) -> None:
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
