r"""One more observation, or one more read, against cached state.

A cache holds every key and value as an oscillator state at the current time T, together with the
integrals since its own time that the query mode needs. Moving the cache from T to $T + \delta$ is
one 2x2 propagator per head and channel, applied to all N tokens, and attention at T is then a plain
sum: a step costs O(N), and O(N J) for the sinusoidal queries, however long ago the tokens were.

========================  =====================================================================
query                     integral kept per token
========================  =====================================================================
hold                      $\int k_i$
linear                    $\int \langle q, k_i \rangle$
anchored, learned         $\int k_i$ and $\int k_i e^{i\omega_m(\tau - T)}$, m = 1..J
ridge_causal              $\int k_i e^{i\omega_m(\tau - T)}$, and the Gram matrix of the fit
========================  =====================================================================

All of it is float64, so rounding does not build up over a long stream. `ridge` has no such form:
its fit changes with every later token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from osciformer._types import Bool, Complex, Float, Int, Tensor
from osciformer.math.basis import design_matrix
from osciformer.ops.attention.motion import (
    Medium,
    Motion,
    integral,
    join,
    mode_integrals,
    move,
    plain_weights,
    ramp_weights,
    start_motion,
)

STREAMING_QUERIES = ("hold", "linear", "ridge_causal", "anchored", "learned")


@dataclass(frozen=True)
class StepSettings:
    """What stays the same from step to step. Tensors are float64.

    Attributes:
        key_medium: Spectra and drive of the keys.
        value_medium: Spectra and drive of the values.
        query: One of `STREAMING_QUERIES`.
        value: `average` or `point`.
        scale: Factor of the logits.
        omega: Bank of the sinusoidal queries.
        constant: Constant of `anchored` and `learned`.
        cos: Cosine coefficients of `anchored` and `learned`.
        sin: Sine coefficients of `anchored` and `learned`.
        ridge: Ridge of `ridge_causal`.
    """

    key_medium: Medium
    value_medium: Medium
    query: str
    value: str
    scale: float
    omega: Float[Tensor, " J"] | None = None
    constant: Float[Tensor, "H C"] | None = None
    cos: Float[Tensor, "H J C"] | None = None
    sin: Float[Tensor, "H J C"] | None = None
    ridge: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse a query that has no streaming form."""
        if self.query not in STREAMING_QUERIES:
            raise ValueError(
                f"query={self.query!r} cannot be streamed: it uses tokens that are still to come. "
                f"Use one of {', '.join(STREAMING_QUERIES)}"
            )


@dataclass(frozen=True)
class StepCache:
    r"""All tokens so far, moved to the current time.

    Attributes:
        time: Current time of each series.
        times: Times of the tokens.
        present: Which tokens count.
        keys: The keys in motion.
        values: The values in motion.
        value_sum: Integral of each value since its own time.
        key_sum: Integral of each key since its own time.
        modes: The same, weighted with $e^{i\omega_m(\tau - T)}$.
        score: Integral of query times key since the key's own time.
        last_query: The last knot of the piecewise linear query.
        gram: Sum of the outer products of the fit's design rows.
        moment: Sum of design rows times query tokens.
        origin: Time from which the fit counts its phases.
    """

    time: Float[Tensor, " B"]
    times: Float[Tensor, "B N"]
    present: Bool[Tensor, "B N"]
    keys: Motion
    values: Motion
    value_sum: Float[Tensor, "B N H C"]
    key_sum: Float[Tensor, "B N H C"]
    modes: Complex[Tensor, "B N H J C"] | None
    score: Float[Tensor, "B N H"] | None
    last_query: Float[Tensor, "B H C"] | None
    gram: Float[Tensor, "B P P"] | None
    moment: Float[Tensor, "B P HC"] | None
    origin: Float[Tensor, " B"]

    @property
    def count(self) -> Int[Tensor, " B"]:
        """Number of present tokens."""
        return self.present.sum(dim=1)


# Everything else in a cache has a token axis.
_PER_SERIES = ("time", "last_query", "gram", "moment", "origin")


def empty_cache(batch_size: int, settings: StepSettings) -> StepCache:
    """Return a cache without tokens."""
    like = settings.key_medium.omega
    heads, channels = like.shape
    num_modes = 0 if settings.omega is None else len(settings.omega)
    tokens = like.new_zeros(batch_size, 0, heads, channels)
    series = like.new_zeros(batch_size)
    modes = score = last_query = gram = moment = None
    if settings.query == "linear":
        score, last_query = tokens[..., 0], like.new_zeros(batch_size, heads, channels)
    elif settings.query != "hold":
        shape = (batch_size, 0, heads, num_modes, channels)
        modes = torch.zeros(shape, dtype=torch.complex128, device=like.device)
    if settings.query == "ridge_causal":
        gram = like.new_zeros(batch_size, 2 * num_modes, 2 * num_modes)
        moment = like.new_zeros(batch_size, 2 * num_modes, heads * channels)
    return StepCache(
        time=series,
        times=like.new_zeros(batch_size, 0),
        present=torch.zeros(batch_size, 0, dtype=torch.bool, device=like.device),
        keys=start_motion(tokens, None, None, settings.key_medium),
        values=start_motion(tokens, None, None, settings.value_medium),
        value_sum=tokens,
        key_sum=tokens,
        modes=modes,
        score=score,
        last_query=last_query,
        gram=gram,
        moment=moment,
        origin=series,
    )


def advance(
    cache: StepCache,
    settings: StepSettings,
    time: Float[Tensor, " B"],
    arriving_query: Float[Tensor, "B H C"] | None = None,
) -> StepCache:
    """Return the cache at a later time; a series without tokens just takes the time.

    Args:
        cache: The cache.
        settings: The settings it was made with.
        time: The time to move to, at or after `cache.time` where a series has tokens.
        arriving_query: Where the piecewise linear query is at `time`; for `linear`.
    """
    gap = torch.where(cache.count > 0, time - cache.time, 0.0)
    key_medium, value_medium = settings.key_medium, settings.value_medium
    key_gain = integral(plain_weights(gap, key_medium), cache.keys)
    score, modes = cache.score, cache.modes
    if score is not None and cache.last_query is not None and arriving_query is not None:
        ramp = integral(ramp_weights(gap, key_medium), cache.keys)
        slope = arriving_query.double() - cache.last_query
        score = score + torch.einsum("bnhc,bhc->bnh", key_gain, cache.last_query)
        score = score + torch.einsum("bnhc,bhc->bnh", ramp, slope)
    if modes is not None and settings.omega is not None:
        phase = (settings.omega * gap[:, None])[:, None, None, :, None]
        gained = mode_integrals(cache.keys, gap, settings.omega, key_medium)
        modes = (modes + gained) * torch.polar(torch.ones_like(phase), -phase)
    return replace(
        cache,
        time=time,
        keys=move(cache.keys, gap, key_medium),
        values=move(cache.values, gap, value_medium),
        value_sum=cache.value_sum + integral(plain_weights(gap, value_medium), cache.values),
        key_sum=cache.key_sum + key_gain,
        modes=modes,
        score=score,
    )


def append(
    cache: StepCache,
    settings: StepSettings,
    keys: tuple[Tensor, Tensor | None, Tensor | None],
    values: tuple[Tensor, Tensor | None, Tensor | None],
    queries: Float[Tensor, "B G H C"] | None = None,
    present: Bool[Tensor, "B G"] | None = None,
) -> StepCache:
    """Return the cache with more tokens that start at its current time.

    Args:
        cache: The cache, at the time of the tokens.
        settings: The settings it was made with.
        keys: Start, velocity (or None) and rest position (or None) of the keys, `[B, G, H, C]`.
        values: The same for the values.
        queries: Their query tokens; for `linear` and `ridge_causal`.
        present: Which of them count.
    """
    key_motion = start_motion(*keys, settings.key_medium)
    value_motion = start_motion(*values, settings.value_medium)
    batch, group = key_motion.position.shape[:2]
    if present is None:
        present = torch.ones(batch, group, dtype=torch.bool, device=cache.present.device)
    times = cache.time[:, None].expand(batch, group)
    origin = torch.where(cache.count > 0, cache.origin, cache.time)

    def extended(old: Tensor) -> Tensor:
        return torch.cat((old, old.new_zeros(batch, group, *old.shape[2:])), dim=1)

    last_query, gram, moment = cache.last_query, cache.gram, cache.moment
    if last_query is not None and queries is not None:
        position = torch.arange(group, device=present.device)
        final = torch.where(present, position, 0).amax(dim=1)
        last = torch.take_along_dim(queries.double(), final[:, None, None, None], dim=1)[:, 0]
        last_query = torch.where(present.any(dim=1)[:, None, None], last, last_query)
    if gram is not None and moment is not None and queries is not None:
        assert settings.omega is not None
        design = design_matrix(times - origin[:, None], settings.omega)
        design = torch.where(present[..., None], design, 0.0)
        gram = gram + torch.einsum("bgi,bgj->bij", design, design)
        moment = moment + torch.einsum("bgi,bgc->bic", design, queries.double().flatten(2))
    return replace(
        cache,
        times=torch.cat((cache.times, times), dim=1),
        present=torch.cat((cache.present, present), dim=1),
        keys=join(cache.keys, key_motion),
        values=join(cache.values, value_motion),
        value_sum=extended(cache.value_sum),
        key_sum=extended(cache.key_sum),
        modes=None if cache.modes is None else extended(cache.modes),
        score=None if cache.score is None else extended(cache.score),
        last_query=last_query,
        gram=gram,
        moment=moment,
        origin=origin,
    )


def attend(
    cache: StepCache,
    settings: StepSettings,
    q: Float[Tensor, "B R H C"] | None,
    num_rows: int = 1,
) -> Float[Tensor, "B R H C"]:
    """Return rows of attention at the cache's current time, over all of its tokens.

    Args:
        cache: The cache, moved to the time of the rows.
        settings: The settings it was made with.
        q: Query tokens of the rows; None for `learned`.
        num_rows: Number of rows where there are no query tokens.
    """
    elapsed = cache.time[:, None] - cache.times  # [B, N]
    positive = elapsed > 0
    inverse = torch.where(positive, 1.0 / torch.where(positive, elapsed, 1.0), 0.0)
    integral, at_zero = _scores(cache, settings, None if q is None else q.double())
    logits = torch.where(
        positive[:, None, :, None], integral * inverse[:, None, :, None], at_zero
    )  # [B, R, N, H]
    logits = torch.where(cache.present[:, None, :, None], logits * settings.scale, -torch.inf)
    some = cache.present.any(dim=1)[:, None, None, None]
    weights = torch.where(some, torch.softmax(torch.where(some, logits, 0.0), dim=2), 0.0)
    # At a zero gap the position is the token's own start, the limit of the average.
    values = cache.values.position + cache.values.rest
    if settings.value == "average":
        average = cache.value_sum * inverse[..., None, None]
        values = torch.where(positive[..., None, None], average, values)
    rows = torch.einsum("brnh,bnhc->brhc", weights, values)
    # A path that all rows share gives one row for all of them.
    return rows.expand(-1, num_rows if q is None else q.shape[1], -1, -1)


def _scores(
    cache: StepCache, settings: StepSettings, q: Tensor | None
) -> tuple[Float[Tensor, "B #R N H"], Float[Tensor, "B #R N H"]]:
    """Return the integral of query times key, and its limit per unit of time at a zero gap."""
    start = cache.keys.position + cache.keys.rest
    if cache.modes is None:
        assert q is not None
        at_zero = torch.einsum("brhc,bnhc->brnh", q, start)
        if cache.score is not None:
            return cache.score[:, None], at_zero
        return torch.einsum("brhc,bnhc->brnh", q, cache.key_sum), at_zero
    constant, amplitude = _sinusoids(cache, settings, q)
    # Phases of the cache count from the current time, where the path is the sum of its parts.
    here = amplitude.real.sum(dim=3)
    total = torch.einsum("brhjc,bnhjc->brnh", amplitude, cache.modes).real
    if constant is not None:
        here = here + constant
        total = total + torch.einsum("brhc,bnhc->brnh", constant, cache.key_sum)
    return total, torch.einsum("brhc,bnhc->brnh", here, start)


def _sinusoids(
    cache: StepCache, settings: StepSettings, q: Tensor | None
) -> tuple[Float[Tensor, "B #R H C"] | None, Complex[Tensor, "B #R H J C"]]:
    r"""Return constant and amplitudes of $q(\tau) = q_0 + Re \sum_m a_m e^{i w_m (\tau - T)}$."""
    assert settings.omega is not None
    if cache.gram is not None and cache.moment is not None:
        coefficients = _fit(cache, settings.ridge)  # [B, 2J, H*C]
        heads, channels = settings.key_medium.omega.shape
        cos, sin = coefficients.unflatten(2, (heads, channels)).transpose(1, 2).chunk(2, dim=2)
        phase = (cache.time - cache.origin)[:, None] * settings.omega
        turn = torch.polar(torch.ones_like(phase), phase)[:, None, :, None]
        return None, (torch.complex(cos, -sin) * turn)[:, None]
    assert settings.cos is not None
    assert settings.sin is not None
    amplitude = torch.complex(settings.cos, -settings.sin)
    if settings.query == "anchored":
        assert q is not None
        return q if settings.constant is None else q * settings.constant, q[
            :, :, :, None
        ] * amplitude
    phase = cache.time[:, None] * settings.omega
    turn = torch.polar(torch.ones_like(phase), phase)[:, None, :, None]
    constant = (
        None if settings.constant is None else settings.constant.expand(len(phase), 1, -1, -1)
    )
    return constant, (amplitude * turn)[:, None]


def _fit(cache: StepCache, ridge: float) -> Float[Tensor, "B P HC"]:
    assert cache.gram is not None
    assert cache.moment is not None
    count = cache.count.clamp(min=1)[:, None, None]
    eye = torch.eye(cache.gram.shape[1], dtype=cache.gram.dtype, device=cache.gram.device)
    factor = torch.linalg.cholesky(cache.gram / count + ridge * eye)
    return torch.cholesky_solve(cache.moment / count, factor)


def merge(chosen: Bool[Tensor, " B"], shorter: StepCache, longer: StepCache) -> StepCache:
    """Return `shorter` for the chosen series and `longer`, which extends it, for the others.

    The tokens that `shorter` does not have are absent in the chosen series.
    """
    missing = longer.times.shape[1] - shorter.times.shape[1]

    def pick(a: Tensor | None, b: Tensor | None, per_series: bool) -> Tensor | None:
        if a is None or b is None:
            return None
        if not per_series:
            a = torch.cat((a, a.new_zeros(a.shape[0], missing, *a.shape[2:])), dim=1)
        return torch.where(chosen.view(-1, *[1] * (b.ndim - 1)), a, b)

    def pick_all(a: object, b: object) -> dict[str, Tensor | Motion | None]:
        picked: dict[str, Tensor | Motion | None] = {}
        for field in fields(a):  # type: ignore[arg-type]
            old, new = getattr(a, field.name), getattr(b, field.name)
            if isinstance(old, Motion):
                picked[field.name] = Motion(**pick_all(old, new))  # type: ignore[arg-type]
            else:
                picked[field.name] = pick(old, new, field.name in _PER_SERIES)
        return picked

    return StepCache(**pick_all(shorter, longer))  # type: ignore[arg-type]
