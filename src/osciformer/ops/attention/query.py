r"""What each row asks for: the query as a function of time.

The six query modes are three kinds of path: a `ConstantPath` (``hold``), a `LinearPath`
(``linear``) and a `SinusoidPath` (the others). A backend sees only a path, so a mode that fits or
learns its coefficients costs no backend anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.math.banks import frequency_bank
from osciformer.math.basis import prefix_ridge_fit, ridge_fit
from osciformer.ops._checks import QUERIES, check_choice
from osciformer.ops.padding import clean_times, last_present_index

QueryMode = Literal["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]

DEFAULT_NUM_MODES = 8
DEFAULT_RIDGE = 1e-4

_ALLOWED_PARAMS: dict[str, tuple[str, ...]] = {"hold": (), "linear": ("mask",)}
_ALLOWED_PARAMS |= dict.fromkeys(("ridge", "ridge_causal"), ("omega", "ridge", "mask"))
_ALLOWED_PARAMS |= dict.fromkeys(("anchored", "learned"), ("omega", "constant", "cos", "sin"))


@dataclass(frozen=True)
class _Path:
    """What all kinds share: tensors whose axes 0 and 1 are series and rows, and `omega`."""

    ODD: ClassVar[tuple[str, ...]] = ()  # tensors that change sign under time reversal

    def map(self, function: Callable[[Tensor], Tensor], *names: str) -> Self:
        """Return the path with `function` applied to the tensors `names`, or all but `omega`."""
        chosen = names or [field.name for field in fields(self) if field.name != "omega"]
        tensors = {name: getattr(self, name) for name in chosen}
        return replace(self, **{n: function(x) for n, x in tensors.items() if x is not None})

    def row(self, b: int, j: int) -> Self:
        """Return the path of one row as a path of one series and one row."""
        return self.map(lambda x: x[b : b + 1, j : j + 1] if x.shape[1] > 1 else x[b : b + 1])

    def mirrored(self) -> Self:
        """Return the path under time reversal, rows in reverse order."""
        flipped = self.map(lambda x: x.flip(1))
        return flipped.map(torch.neg, *self.ODD) if self.ODD else flipped


@dataclass(frozen=True)
class ConstantPath(_Path):
    """Row j asks for `q[:, j]` at every time."""

    q: Float[Tensor, "B M H C"]

    def evaluate(self, tau: Float[Tensor, "B M *S"]) -> Float[Tensor, "B M *S H C"]:
        """Return the query of row j at the times `tau[:, j]`."""
        shape = self.q.shape
        q = self.q.reshape(*shape[:2], *[1] * (tau.ndim - 2), *shape[2:])
        return q.expand(*tau.shape, *shape[2:])


@dataclass(frozen=True)
class LinearPath(_Path):
    """Straight lines through the query tokens, constant outside them.

    Consecutive tokens bound a segment. Tokens at one time bound segments of length zero, so the
    path jumps there: it arrives at the first of them and leaves from the last. Only at a zero gap
    does a row read its own token, `q[:, j]`.
    """

    ODD = ("times",)
    q: Float[Tensor, "B M H C"]
    times: Float[Tensor, "B M"]

    def evaluate(
        self, tau: Float[Tensor, "B R *S"], *, from_left: bool = False
    ) -> Float[Tensor, "B R *S H C"]:
        """Return the path, the same for all rows, at the times `tau`.

        At a jump it is the limit from the right, or from the left.
        """
        flat = tau.reshape(tau.shape[0], -1).contiguous()
        knots = self.times.detach().contiguous()
        right = torch.searchsorted(knots, flat.detach(), right=not from_left)
        lower, upper = (right - 1).clamp(min=0), right.clamp(max=self.q.shape[1] - 1)
        out = _between(self.q, self.times, lower, upper, flat)
        return out.reshape(*tau.shape, *out.shape[2:])

    def check_knots(self, query_times: Float[Tensor, "B M"]) -> None:
        """Refuse rows that do not end at the knots: then one pass over the segments serves all."""
        if not torch.equal(self.times.double(), query_times):
            raise ValueError(
                "a LinearPath must have its knots at query_times; build both from one tensor"
            )


@dataclass(frozen=True)
class SinusoidPath(_Path):
    r"""A constant plus J sinusoids per channel, with coefficients per row or shared by all rows.

    $$q_j(\tau) = q_0 + \sum_m A_m \cos(\omega_m(\tau - o_j)) + B_m \sin(\omega_m(\tau - o_j))$$

    A row axis of size 1 is shared by all rows; the three row axes are independent.
    """

    ODD = ("sin", "origin")
    omega: Float[Tensor, " J"]  # frequencies of the bank
    constant: Float[Tensor, "B Rq H C"] | None  # q_0; None is zero
    cos: Float[Tensor, "B R H J C"]  # A
    sin: Float[Tensor, "B R H J C"]  # B
    origin: Float[Tensor, "B Ro"]  # o_j, the time that phases count from

    @property
    def is_shared(self) -> bool:
        """Whether all rows see the same path."""
        parts = (self.cos, self.sin, self.origin, self.constant)
        return all(x.shape[1] == 1 for x in parts if x is not None)

    def evaluate(self, tau: Float[Tensor, "B M *S"]) -> Float[Tensor, "B M *S H C"]:
        """Return the query of row j at the times `tau[:, j]`."""
        batch, rows = tau.shape[:2]
        flat = tau.reshape(batch, rows, -1)
        phase = (flat - self.origin[:, :, None])[..., None] * self.omega
        out = torch.zeros((), device=tau.device)
        for basis, weight in ((phase.cos(), self.cos), (phase.sin(), self.sin)):
            shared = max(basis.shape[1], weight.shape[1])
            dtype = torch.promote_types(basis.dtype, weight.dtype)
            pair = (x.to(dtype).expand(-1, shared, *x.shape[2:]) for x in (basis, weight))
            out = out + torch.einsum("bmsj,bmhjc->bmshc", *pair)
        if self.constant is not None:
            out = out + self.constant[:, :, None]
        return out.reshape(*tau.shape, *out.shape[-2:])


QueryPath = ConstantPath | LinearPath | SinusoidPath


def resolve_query(
    query: str,
    q: Float[Tensor, "B M H C"] | None,
    query_times: Float[Tensor, "B M"],
    query_params: Mapping[str, Any] | None = None,
    mask_of_queries: Bool[Tensor, "B M"] | None = None,
) -> QueryPath:
    """Return the path that a query mode and its tokens stand for.

    `query_params` are those of `oscillator_attention`. `mask_of_queries` says which query tokens
    are present if `query_params` has no `mask`: absent ones take no part in a fit, bend no line.
    """
    check_choice("query", query, QUERIES)
    params = dict(query_params or {})
    unknown = sorted(set(params) - set(_ALLOWED_PARAMS[query]))
    if unknown:
        allowed = ", ".join(_ALLOWED_PARAMS[query]) or "no parameters"
        raise ValueError(
            f"query_params has unknown keys {unknown} for query={query!r}; allowed: {allowed}"
        )
    if q is None and query != "learned":
        raise ValueError(f"q is None: only query='learned' has no query tokens, got {query!r}")
    mask = params.get("mask", mask_of_queries)
    if mask is not None and mask.shape != query_times.shape:
        raise ValueError(
            f"query_params['mask'] must have the shape of query_times "
            f"{list(query_times.shape)}, got {list(mask.shape)}"
        )

    if query in ("anchored", "learned"):
        return _trajectory(query, q, query_times, params)
    assert q is not None
    if query == "hold":
        return ConstantPath(q)
    if query == "linear":
        return LinearPath(q if mask is None else _bridge_absent(q, query_times, mask), query_times)
    if params.get("omega") is None:
        params["omega"] = frequency_bank("log_spaced", DEFAULT_NUM_MODES)
    omega = _param(params, "omega", query_times, (None,))
    # The fitted curve does not depend on the origin, so no gradient has to pass through it.
    origin = clean_times(query_times, mask)[:, :1].detach().double()  # of the first present token
    fit = ridge_fit if query == "ridge" else prefix_ridge_fit
    ridge = params.get("ridge", DEFAULT_RIDGE)
    cos, sin = fit(q, query_times - origin, omega, ridge=ridge, mask=mask)
    if query == "ridge":
        cos, sin = cos[:, None], sin[:, None]
    return SinusoidPath(omega, None, cos, sin, origin)


def resolve_reversed(
    path: QueryPath,
    query: str,
    q: Tensor | None,
    query_times: Tensor,
    query_params: Mapping[str, Any] | None = None,
    mask: Tensor | None = None,
) -> QueryPath:
    """Return the path of the rows in reverse order on the reversed time axis.

    `path` is what `resolve_query` makes of the other arguments. It is mirrored, but a function of
    the time before the row becomes one of the time after it.
    """
    if query not in ("anchored", "ridge_causal"):
        return path.mirrored()
    assert q is not None
    params = dict(query_params or {})
    if params.get("mask") is not None:
        params["mask"] = params["mask"].flip(1)
    mask = None if mask is None else mask.flip(1)
    return resolve_query(query, q.flip(1), -query_times.flip(1), params, mask)


def _trajectory(
    query: str, q: Tensor | None, times: Tensor, params: Mapping[str, Any]
) -> SinusoidPath:
    """Return the path of `anchored` or `learned` from its coefficients."""
    for key in ("omega", "cos", "sin"):
        if params.get(key) is None:
            raise ValueError(f"query={query!r} needs query_params[{key!r}]")
    heads, channels = q.shape[2:] if q is not None else (None, None)
    omega = _param(params, "omega", times, (None,))
    cos = _param(params, "cos", times, (heads, omega.shape[0], channels))
    sin = _param(params, "sin", times, tuple(cos.shape))
    constant = None
    if params.get("constant") is not None:
        constant = _param(params, "constant", times, (cos.shape[0], cos.shape[2]))
    if query == "anchored":
        assert q is not None
        tokens = q[:, :, :, None, :]
        constant = q if constant is None else q * constant
        return SinusoidPath(omega, constant, tokens * cos, tokens * sin, times)
    batch = times.shape[0]
    if constant is not None:
        constant = constant.expand(batch, 1, *constant.shape)
    cos, sin = (x.expand(batch, 1, *x.shape) for x in (cos, sin))
    # The learned trajectory lives on the time axis itself, so phases count from time zero.
    return SinusoidPath(omega, constant, cos, sin, times.new_zeros(batch, 1))


def _param(
    params: Mapping[str, Any], key: str, like: Tensor, shape: tuple[int | None, ...]
) -> Tensor:
    """Return a parameter as a tensor; refuse another shape (None is any size)."""
    tensor: Tensor = torch.as_tensor(params[key], device=like.device)
    sizes = zip(shape, tensor.shape, strict=False)
    if tensor.ndim != len(shape) or any(want not in (None, got) for want, got in sizes):
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"query_params[{key!r}] must have shape [{want}], got {list(tensor.shape)}"
        )
    return tensor if tensor.is_floating_point() else tensor.to(like.dtype)


def _bridge_absent(q: Tensor, times: Tensor, mask: Tensor) -> Float[Tensor, "B M H C"]:
    """Move absent tokens onto the line between their present neighbours, so they bend nothing."""
    last = times.shape[1] - 1
    before, after = last_present_index(mask), last - last_present_index(mask.flip(1)).flip(1)
    lower = torch.where(before >= 0, before, after).clamp(max=last)
    upper = torch.where(after <= last, after, before).clamp(min=0)
    bridged = _between(q, times, lower, upper, times).to(q.dtype)
    return torch.where(mask[..., None, None], q, bridged)


def _between(
    q: Float[Tensor, "B M H C"], times: Tensor, lower: Tensor, upper: Tensor, at: Tensor
) -> Float[Tensor, "B S H C"]:
    """Return the lines from token `lower` to token `upper` at the times `at`, all ``[B, S]``."""
    t_lower, t_upper = times.gather(1, lower), times.gather(1, upper)
    width = t_upper - t_lower
    inside = width > 0
    # Outside the tokens lower == upper: any finite fraction gives the constant.
    theta = torch.where(inside, (at - t_lower) / torch.where(inside, width, 1.0), 0.0)
    shape = (*at.shape, *q.shape[2:])
    q_lower, q_upper = (q.gather(1, x[..., None, None].expand(shape)) for x in (lower, upper))
    return q_lower + theta[..., None, None] * (q_upper - q_lower)
