"""The operator: one signature and one result for all backends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.ops import _checks
from osciformer.ops._checks import DeferredChecks, check_float, check_shape
from osciformer.ops._dispatch import MODULES, choose_backend
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult, Oscillators
from osciformer.ops.attention.query import QueryMode, QueryPath, resolve_query, resolve_reversed
from osciformer.ops.attention.ties import merge
from osciformer.ops.padding import blank_absent, clean_times

ValueMode = Literal["average", "point"]
Direction = Literal["causal", "bidirectional"]
Backend = Literal["auto", "oracle", "reference", "blocked", "short", "triton"]


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
    How that of several tokens at one time is shared among them differs between backends; its sum
    over the tied tokens, the slope of moving them together, is the same.

    **Bidirectional.** A later key is attended to on the reversed time axis, where it is an earlier
    one. ``linear``, ``ridge`` and ``learned`` keep the same path there. The modes whose path
    belongs to a row are resolved anew: ``hold`` is its token again, ``anchored`` a function of the
    time after the row, and ``ridge_causal`` a fit to the tokens at or after it.

    Args:
        q: Query tokens. May be None for ``query="learned"``.
        k: Key tokens, the positions of the keys at their own times.
        v: Value tokens.
        query_times: Times of the rows, not decreasing within a series.
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
        direction: ``causal``, or ``bidirectional``: later keys join the same softmax.
        mask: Which keys are present; None is all. Absent keys may hold anything, NaN included.
            Where query and key times of a series agree, it also says which query tokens take part
            in a fit.
        scale: Factor of the logits; None is $1/\sqrt C$.
        backend: ``auto`` is what `choose_backend` says: ``triton`` for tokens on a CUDA device,
            float64 excepted, ``short`` for short series on a CPU, else ``blocked``. The environment
            variable OSCIFORMER_BACKEND replaces it. What ``short`` and ``triton`` do not serve runs
            on ``blocked``; of the latter, a warning says so once.
        return_weights: Also return the weights (memory M times N). They carry gradients from
            ``oracle`` and ``reference``; those of the others are detached.
        key_equilibrium: Rest position of each key, the paper's $c_i$; None is 0.
        value_equilibrium: Rest position of each value; None is 0.

    Returns:
        Output `[B, M, H, C]`; with `return_weights` also the weights `[B, H, M, N]`. Rows that see
        no key have output and weights 0.

    Example:
        >>> times = torch.tensor([[0.0, 0.4, 1.7]])
        >>> q, k, v = torch.randn(3, 1, 3, 2, 4).unbind(0)
        >>> spectra = dict(key_omega=torch.ones(2, 4), key_zeta=torch.full((2, 4), 0.1))
        >>> spectra |= dict(value_omega=torch.ones(2, 4), value_zeta=torch.full((2, 4), 0.1))
        >>> oscillator_attention(q, k, v, times, times, **spectra).shape
        torch.Size([1, 3, 2, 4])
    """
    _checks.check_choice("query", query, _checks.QUERIES)
    _checks.check_choice("value", value, _checks.VALUES)
    _checks.check_choice("direction", direction, _checks.DIRECTIONS)
    keys = Oscillators(k, key_omega, key_zeta, key_velocity, key_equilibrium)
    values = Oscillators(v, value_omega, value_zeta, value_velocity, value_equilibrium)
    checks = DeferredChecks()
    _check_tensors(q, keys, values, query_times, key_times)
    spectra = {"key_omega": key_omega, "key_zeta": key_zeta}
    spectra |= {"value_omega": value_omega, "value_zeta": value_zeta}
    batch, num_keys, heads, channels = k.shape
    _checks.check_spectra(spectra, heads, channels, checks)
    if mask is not None:
        _checks.check_mask("mask", mask, (batch, num_keys))
    _check_drive(drive, heads, channels)
    _checks.check_times("key_times", key_times, mask, checks)
    query_mask = _query_mask(query_times, key_times, mask)
    is_self = query_times is key_times
    if not is_self:
        _checks.check_times("query_times", query_times, query_mask, checks)
    length = max(query_times.shape[1], num_keys)
    chosen, _ = choose_backend(backend, drive, _spectra(keys, values), k.dtype, length)
    # Kernels tolerate bad values, a fit does not: the host reads the checks after the launch.
    is_deferred = chosen == "triton" and query in ("hold", "linear")
    (checks.start if is_deferred else checks.finish)()

    if mask is not None:
        key_times = clean_times(key_times, mask)
        keys, values = (x.map_tokens(partial(blank_absent, mask=mask)) for x in (keys, values))
    if query_mask is not None:
        query_times = key_times if is_self else clean_times(query_times, query_mask)
        q = None if q is None else blank_absent(q, query_mask)
    asked = (query, q, query_times, query_params, query_mask)
    path, scale = resolve_query(*asked), 1.0 / math.sqrt(channels) if scale is None else scale
    tokens = (path, query_times, key_times, keys, values)
    inputs = AttentionInputs(*tokens, value, drive, mask, scale, return_weights=return_weights)
    later = None if direction == "causal" else resolve_reversed(inputs.path, *asked)
    result = attend_unchecked(inputs, chosen, later)
    if is_deferred:
        checks.finish()
    return result.out if result.weights is None else (result.out, result.weights)


def _spectra(keys: Oscillators, values: Oscillators) -> dict[Role, tuple[Tensor, Tensor]]:
    return {"key": (keys.omega, keys.zeta), "value": (values.omega, values.zeta)}


def attend_unchecked(
    inputs: AttentionInputs, backend: str = "auto", reversed_path: QueryPath | None = None
) -> AttentionResult:
    """Return what `oscillator_attention` does, for inputs that the caller has validated.

    Times are sorted and finite, those of absent tokens come from `clean_times`, and absent tokens
    hold finite numbers. With `reversed_path`, from `resolve_reversed`, rows also see later keys.
    """
    (batch, num_rows), num_keys = inputs.query_times.shape, inputs.key_times.shape[1]
    if batch == 0 or num_rows == 0 or num_keys == 0:
        heads, channels = inputs.keys.start.shape[2:]
        out = inputs.values.start.new_zeros(batch, num_rows, heads, channels)
        lse = out.new_full((batch, heads, num_rows), -math.inf)
        weights = out.new_zeros(batch, heads, num_rows, num_keys)
        return AttentionResult(out, lse, weights if inputs.return_weights else None)
    spectra, dtype = _spectra(inputs.keys, inputs.values), inputs.keys.start.dtype
    name, _ = choose_backend(backend, inputs.drive, spectra, dtype, max(num_rows, num_keys))
    attend = MODULES[name].attend
    past: AttentionResult = attend(inputs)
    return past if reversed_path is None else _union(past, attend(inputs.mirrored(reversed_path)))


def _union(past: AttentionResult, mirrored: AttentionResult) -> AttentionResult:
    """Merge both halves of the bidirectional case into one softmax."""
    lse, later_lse = past.lse.transpose(1, 2), mirrored.lse.flip(2).transpose(1, 2)
    later_out = mirrored.out.flip(1).to(lse.dtype)
    out, total = merge(past.out.to(lse.dtype), lse, later_out, later_lse)
    weights = None
    if past.weights is not None and mirrored.weights is not None:
        safe = torch.where(total == -math.inf, 0.0, total)
        share, later_share = (
            (x - safe).exp().transpose(1, 2)[..., None].to(past.weights.dtype)
            for x in (lse, later_lse)
        )
        weights = past.weights * share + mirrored.weights.flip(2, 3) * later_share
    return AttentionResult(out.to(past.out.dtype), total.transpose(1, 2), weights)


def _check_tensors(
    q: Tensor | None, keys: Oscillators, values: Oscillators, query_times: Tensor, key_times: Tensor
) -> None:
    """Refuse wrong types and shapes."""
    k = keys.start
    tensors = {"k": k, "v": values.start, "query_times": query_times, "key_times": key_times}
    for name, x in tensors.items():
        check_float(name, x)
    if k.ndim != 4:
        raise ValueError(f"k must have shape [B, N, H, C], got {list(k.shape)}")
    batch, shape = k.shape[0], tuple(k.shape)
    check_shape("v", values.start, shape, "[B, N, H, C]")
    check_shape("key_times", key_times, shape[:2], "[B, N]")
    if query_times.ndim != 2 or query_times.shape[0] != batch:
        raise ValueError(
            f"query_times must have shape [B, M] with B = {batch} as in k, got"
            f" {list(query_times.shape)}"
        )
    if q is not None:
        check_float("q", q)
        check_shape("q", q, (*query_times.shape, *shape[2:]), "[B, M, H, C]")
    extras = {"key_velocity": keys.velocity, "value_velocity": values.velocity}
    extras |= {"key_equilibrium": keys.equilibrium, "value_equilibrium": values.equilibrium}
    for name, extra in extras.items():
        if extra is not None:
            check_float(name, extra)
            check_shape(name, extra, shape, "[B, N, H, C]")


def _check_drive(drive: Drive | None, heads: int, channels: int) -> None:
    for field in fields(drive)[1:] if drive is not None else ():
        gain = getattr(drive, field.name)
        if gain is not None and gain.shape[::2] != (heads, channels):
            raise ValueError(
                f"drive.{field.name} must have shape [H, Md, C] with H = {heads} and"
                f" C = {channels} as in k, got {list(gain.shape)}"
            )


def _query_mask(query_times: Tensor, key_times: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which query tokens are present: the key mask if query and key times agree."""
    if mask is None or query_times is key_times:
        return mask
    if query_times.shape != key_times.shape:
        return None
    # NaN padding equals NaN padding here.
    same = (query_times == key_times) | (query_times.isnan() & key_times.isnan())
    return mask | ~same.all(dim=1, keepdim=True)
