"""The operator: one signature and one result for all backends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.ops._checks import (
    DIRECTIONS,
    QUERIES,
    VALUES,
    Doubts,
    check_choice,
    check_float,
    check_mask,
    check_shape,
    check_spectra,
    check_times,
)
from osciformer.ops._dispatch import backend_module, choose_backend
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import QueryPath, resolve_query
from osciformer.ops.attention.ties import merge
from osciformer.ops.padding import blank_absent, clean_times

QueryMode = Literal["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]
ValueMode = Literal["average", "point"]
Direction = Literal["causal", "bidirectional"]
Backend = Literal["auto", "oracle", "reference", "blocked", "triton"]

# Paths that depend on the row are resolved anew in reversed time; shared ones are just mirrored.
_ROW_DEPENDENT = ("hold", "anchored", "ridge_causal")


def oscillator_attention(
    q: Float[Tensor, "B M H C"] | None,
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
    *,
    key_omega: Float[Tensor, "H C"],
    key_zeta: Float[Tensor, "H C"],
    value_omega: Float[Tensor, "H C"],
    value_zeta: Float[Tensor, "H C"],
    key_velocity: Float[Tensor, "B N H C"] | None = None,
    value_velocity: Float[Tensor, "B N H C"] | None = None,
    query: QueryMode = "hold",
    query_params: Mapping[str, Any] | None = None,
    value: ValueMode = "average",
    drive: Drive | None = None,
    direction: Direction = "causal",
    mask: Bool[Tensor, "B N"] | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
    return_weights: bool = False,
    key_equilibrium: Float[Tensor, "B N H C"] | None = None,
    value_equilibrium: Float[Tensor, "B N H C"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return attention between queries and keys that swing as damped oscillators in real time.

    Key i starts at $t_i$ in the state $(K_i, \dot K_i)$ and moves, in every channel, as
    $\ddot k + 2\zeta\omega\dot k + \omega^2 k = F_i$; values likewise with their own spectrum. Row
    j at $t_j$ gives key i the logit

    $$\alpha_{ij} = \frac{1}{t_j - t_i}
    \int_{t_i}^{t_j} \langle q_j(\tau), k_i(\tau)\rangle\,d\tau,$$

    $\langle q_j(t_i), K_i\rangle$ where $t_j = t_i$, and takes the softmax of `scale` times the
    logits over all present keys with $t_i \le t_j$. Tokens at one time see each other whatever
    their order. The output is the weighted sum of values averaged over $[t_i, t_j]$, or read at
    $t_j$. Every backend computes the same numbers; all but `oracle` do so in closed form.

    **Zero gaps.** There the logit is $\langle q_j(t_i), K_i\rangle$ and the value $V_i$, and by
    convention neither has a derivative in the gap: times get a gradient only through the path.

    **Bidirectional.** A later key is attended to on the reversed time axis, where it is an earlier
    one. ``linear``, ``ridge`` and ``learned`` keep the same path there. The modes whose path
    belongs to a row are resolved anew: ``hold`` is its token again, ``anchored`` a function of the
    time after the row, and ``ridge_causal`` a fit to the tokens at or after it.

    Args:
        q: Query tokens. May be None for ``query="learned"``.
        k: Key tokens, the positions of the keys at their own times.
        v: Value tokens.
        query_times: Times of the rows, not decreasing within a series. Any times: a row before the
            first key sees nothing and gets 0.
        key_times: Times of the keys, not decreasing within a series.
        key_omega: Natural frequencies of the keys, in radians per unit of time.
        key_zeta: Damping ratios of the keys; 1 is critical, 0 undamped.
        value_omega: Natural frequencies of the values.
        value_zeta: Damping ratios of the values.
        key_velocity: Initial velocities of the keys; None is 0.
        value_velocity: Initial velocities of the values; None is 0.
        query: How a row's query depends on time: ``hold`` (constant), ``linear`` (through the query
            tokens), ``ridge`` (sinusoids fitted to all query tokens: the paper; not causal),
            ``ridge_causal`` (fitted to those up to the row), ``anchored`` (token times a learned
            function of the time before the row), ``learned`` (one learned trajectory per head).
        query_params: What the mode needs. ``ridge``, ``ridge_causal``: ``omega [J]`` (default 8
            log-spaced modes in [0.01, 10]), ``ridge`` (default 1e-4), ``mask [B, M]`` (tokens in
            the fit). ``anchored``, ``learned``: ``omega [J]``, ``cos [H, J, C]``, ``sin [H, J, C]``
            and optionally ``constant [H, C]``. ``linear``: optionally ``mask [B, M]``.
        value: ``average`` over $[t_i, t_j]$ or ``point``, the value at $t_j$.
        drive: Sinusoidal forces on keys and values that start with each token.
        direction: ``causal``, or ``bidirectional``: keys after a row swing backwards in time from
            their own time (the same oscillators on the reversed time axis) and join the same
            softmax.
        mask: Which keys are present; None is all. Absent keys may hold anything, NaN included.
            Where query and key times of a series agree, it also says which query tokens take part
            in a fit.
        scale: Factor of the logits; None is $1/\sqrt C$.
        backend: ``auto`` is ``blocked``; ``reference`` for a drive in resonance with an undamped
            channel; ``triton`` for tokens on a CUDA device, float64 excepted. The environment
            variable OSCIFORMER_BACKEND replaces it. `choose_backend` says which one a call gets.
            What ``triton`` has no kernel for runs on ``blocked``, and a warning says so once.
        return_weights: Also return the weights (memory M times N). They carry gradients from
            ``oracle`` and ``reference``; those of ``blocked`` are detached.
        key_equilibrium: Rest position of each key, the paper's $c_i$; None is 0.
        value_equilibrium: Rest position of each value; None is 0.

    Returns:
        Output `[B, M, H, C]`; with `return_weights` also the weights `[B, H, M, N]`. Rows that see
        no key have output and weights 0.

    Raises:
        ValueError: For times that are not finite or decrease, negative frequencies or damping
            ratios, shapes that do not fit, unknown modes.
        TypeError: For tensors that are not floating point, masks that are not boolean.

    Example:
        >>> times = torch.tensor([[0.0, 0.4, 1.7]])
        >>> q, k, v = torch.randn(3, 1, 3, 2, 4).unbind(0)
        >>> spectrum = dict(omega=torch.ones(2, 4), zeta=torch.full((2, 4), 0.1))
        >>> spectra = {
        ...     f"{side}_{key}": x for side in ("key", "value") for key, x in spectrum.items()
        ... }
        >>> oscillator_attention(q, k, v, times, times, **spectra).shape
        torch.Size([1, 3, 2, 4])
    """
    tensors = {"k": k, "v": v, "query_times": query_times, "key_times": key_times}
    per_key = {
        "key_velocity": key_velocity,
        "value_velocity": value_velocity,
        "key_equilibrium": key_equilibrium,
        "value_equilibrium": value_equilibrium,
    }
    spectra = {
        "key_omega": key_omega,
        "key_zeta": key_zeta,
        "value_omega": value_omega,
        "value_zeta": value_zeta,
    }
    check_choice("query", query, QUERIES)
    check_choice("value", value, VALUES)
    check_choice("direction", direction, DIRECTIONS)
    doubts = Doubts()
    _check_tensors(q, tensors, per_key, spectra, mask, drive, query, doubts)
    is_self = query_times is key_times
    check_times("key_times", key_times, mask, doubts)
    query_mask = _query_mask(query_times, key_times, mask)
    if not is_self:
        check_times("query_times", query_times, query_mask, doubts)

    batch, num_rows = query_times.shape
    num_keys, num_heads, channels = k.shape[1:]
    name, _ = choose_backend(
        backend,
        drive,
        {"key": (key_omega, key_zeta), "value": (value_omega, value_zeta)},
        k.dtype,
    )
    # The kernels bear any values, unlike a fit: then the answer is read when they are queued.
    is_read_later = name == "triton" and query in ("hold", "linear")
    if is_read_later:
        doubts.send()
    else:
        doubts.settle()
    if num_rows == 0 or num_keys == 0 or batch == 0:
        doubts.settle()
        out = v.new_zeros(batch, num_rows, num_heads, channels)
        weights = v.new_zeros(batch, num_heads, num_rows, num_keys)
        return (out, weights) if return_weights else out

    if mask is not None:
        key_times = clean_times(key_times, mask)
        k, v = (blank_absent(x, mask) for x in (k, v))
        per_key = {key: None if x is None else blank_absent(x, mask) for key, x in per_key.items()}
    if query_mask is not None:
        query_times = key_times if is_self else clean_times(query_times, query_mask)
        q = None if q is None else blank_absent(q, query_mask)

    path = resolve_query(query, q, query_times, query_params, query_mask)
    attend = backend_module(name).attend
    options = dict(
        **spectra,
        value=value,
        drive=drive,
        scale=1.0 / math.sqrt(channels) if scale is None else scale,
        return_weights=return_weights,
    )
    out, lse, weights = attend(
        path, k, v, query_times, key_times, mask=mask, strict=False, **per_key, **options
    )
    if direction == "bidirectional":
        mirrored_times = -query_times.flip(1)
        mirrored_keys = mirrored_times if query_times is key_times else -key_times.flip(1)
        if query in _ROW_DEPENDENT:
            flipped_mask = None if query_mask is None else query_mask.flip(1)
            params = _flipped_params(query_params)
            assert q is not None
            back: QueryPath = resolve_query(query, q.flip(1), mirrored_times, params, flipped_mask)
        else:
            back = path.mirrored()
        later_out, later_lse, later_weights = attend(
            back,
            k.flip(1),
            v.flip(1),
            mirrored_times,
            mirrored_keys,
            mask=None if mask is None else mask.flip(1),
            strict=True,
            **{key: None if x is None else x.flip(1) for key, x in per_key.items()},
            **options,
        )
        total = torch.logaddexp(lse, later_lse.flip(2)) if return_weights else None
        if weights is not None and later_weights is not None and total is not None:
            safe = torch.where(total == float("-inf"), 0.0, total)
            weights = weights * (lse - safe).exp().unsqueeze(-1).to(weights.dtype) + (
                later_weights.flip(2, 3)
                * (later_lse.flip(2) - safe).exp().unsqueeze(-1).to(weights.dtype)
            )
        out = merge(
            out.to(lse.dtype),
            lse.transpose(1, 2),
            later_out.flip(1).to(lse.dtype),
            later_lse.flip(2).transpose(1, 2),
        )[0].to(out.dtype)
    if is_read_later:
        doubts.settle()
    if return_weights:
        assert weights is not None
        return out, weights
    return out


def _check_tensors(
    q: Tensor | None,
    tensors: dict[str, Tensor],
    per_key: dict[str, Tensor | None],
    spectra: dict[str, Tensor],
    mask: Tensor | None,
    drive: Drive | None,
    query: str,
    doubts: Doubts,
) -> None:
    for name, x in tensors.items():
        check_float(name, x)
    k, key_times, query_times = tensors["k"], tensors["key_times"], tensors["query_times"]
    if k.ndim != 4:
        raise ValueError(f"k must have shape [B, N, H, C], got {list(k.shape)}")
    batch, num_keys, num_heads, channels = k.shape
    shape = (batch, num_keys, num_heads, channels)
    check_shape("v", tensors["v"], shape, "[B, N, H, C]")
    check_shape("key_times", key_times, (batch, num_keys), "[B, N]")
    if query_times.ndim != 2 or query_times.shape[0] != batch:
        raise ValueError(
            f"query_times must have shape [B, M] with B = {batch} as in k, got"
            f" {list(query_times.shape)}"
        )
    if q is not None:
        check_float("q", q)
        check_shape("q", q, (batch, query_times.shape[1], num_heads, channels), "[B, M, H, C]")
    for name, extra in per_key.items():
        if extra is not None:
            check_float(name, extra)
            check_shape(name, extra, shape, "[B, N, H, C]")
    check_spectra(spectra, num_heads, channels, doubts)
    if mask is not None:
        check_mask("mask", mask, (batch, num_keys))
    if drive is not None:
        for field in fields(drive)[1:]:
            gain = getattr(drive, field.name)
            if gain is not None and gain.shape[::2] != (num_heads, channels):
                raise ValueError(
                    f"drive.{field.name} must have shape [H, Md, C] with H = {num_heads} and"
                    f" C = {channels} as in k, got {list(gain.shape)}"
                )


def _query_mask(query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which query tokens are present: the key mask where the times are the same."""
    if mask is None:
        return None
    if query_times is key_times:
        return mask
    if query_times.shape != key_times.shape:
        return None
    # NaN padding equals NaN padding here.
    same = (query_times == key_times) | (query_times.isnan() & key_times.isnan())
    return mask | ~same.all(dim=1, keepdim=True)


def _flipped_params(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if not params or params.get("mask") is None:
        return params
    return {**params, "mask": params["mask"].flip(1)}
