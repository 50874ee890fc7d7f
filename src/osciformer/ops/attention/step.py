r"""One more observation, or one more read, against cached state.

A cache holds every key and value as an oscillator state at the current time T, together with the
integrals since its own time that the query mode needs (`StepCache`). Moving the cache from T to
$T + \delta$ is one 2x2 propagator per head and channel, applied to all N tokens, and attention at T
is then a plain sum: a step costs O(N), and O(N J) for the sinusoidal queries, however long ago the
tokens were. All of it is float64, so rounding does not build up over a long stream. `ridge` has no
such form: its fit changes with every later token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from osciformer._types import Bool, Complex, Float, Int, Tensor
from osciformer.math.basis import design_matrix, solve_ridge
from osciformer.math.driven import driven_averages, driven_integrals, driven_response
from osciformer.math.integrals import modulated_averages, phi1
from osciformer.math.oscillator import moments
from osciformer.ops.attention.gap import ramp_integral, transition

# Tokens that were merged have ages within about this part of each other.
_AGE_STEP = 0.04

STREAMING_QUERIES = ("hold", "linear", "ridge_causal", "anchored", "learned")


@dataclass(frozen=True)
class Medium:
    """What moves oscillators: spectra, and the drive `(omega [H, Md], cos, sin [H, Md, C])`."""

    omega: Float[Tensor, "H C"]
    zeta: Float[Tensor, "H C"]
    gains: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def driven(self) -> tuple[Tensor, Tensor, Tensor]:
        """Drive frequencies `[H, Md, 1]` and spectra `[H, 1, C]` that broadcast with them."""
        assert self.gains is not None
        return self.gains[0][..., None], self.omega[:, None], self.zeta[:, None]


class Motion(NamedTuple):
    """Keys or values at the current time, float64."""

    position: Float[Tensor, "B N H C"]  # displacement from rest
    velocity: Float[Tensor, "B N H C"]
    rest: Float[Tensor, "B N H C"]
    force: Complex[Tensor, "B N H Md C"] | None  # amplitudes at the phase reached, if driven

    def after(self, gap: Float[Tensor, " B"], medium: Medium) -> tuple[Motion, Tensor]:
        """Return the motion after a gap, and the integral of each token over it."""
        over = transition(gap[:, None, None], medium.omega, medium.zeta)
        position, velocity = over.move(self.position, self.velocity)
        s, force = gap[:, None, None, None], self.force
        integral = over.integral(self.position, self.velocity) + s * self.rest
        if force is not None:
            pushed, sped = driven_response(s, *medium.driven)
            integral = integral + _push(force, driven_integrals(s, *medium.driven)[0])
            position, velocity = position + _push(force, pushed), velocity + _push(force, sped)
            phase = medium.driven[0] * s
            force = force * torch.polar(torch.ones_like(phase), phase)[:, None]
        return Motion(position, velocity, self.rest, force), integral


def _push(force: Tensor, response: Tensor) -> Tensor:
    return torch.einsum("bnhmc,bhmc->bnhc", force, response).real


# Start, velocity (or None) and rest position (or None) of tokens, [B, G, H, C].
Tokens = tuple[Tensor, Tensor | None, Tensor | None]


def _start_motion(tokens: Tokens, medium: Medium) -> Motion:
    start = tokens[0].double()
    velocity, rest = (torch.zeros_like(start) if x is None else x.double() for x in tokens[1:])
    force = None
    if medium.gains is not None:
        _, cos, sin = medium.gains
        force = start[:, :, :, None] * torch.complex(cos, -sin)
    return Motion(start - rest, velocity, rest, force)


def _ramp_integrals(motion: Motion, gap: Tensor, medium: Medium) -> Float[Tensor, "B N H C"]:
    r"""Return $\int_0^\delta (s / \delta)\, k(T + s)\, ds$ of every token, zero at a zero gap."""
    delta = gap[:, None, None, None]
    m = moments(delta, medium.omega, medium.zeta)
    first, second = ramp_integral(m, delta, medium.omega)
    out = first * motion.position + second * motion.velocity + 0.5 * delta * motion.rest
    if motion.force is not None:
        once, twice = driven_integrals(delta, *medium.driven)
        out = out + _push(motion.force, once - twice / torch.where(delta > 0, delta, 1.0))
    return out


def _mode_integrals(
    motion: Motion, gap: Tensor, mode_omega: Float[Tensor, " J"], medium: Medium
) -> Complex[Tensor, "B N H J C"]:
    r"""Return $\int_0^\delta e^{i w_m s} k(T + s)\, ds$ of every token and mode."""
    delta = gap[:, None, None, None]
    mode = mode_omega[:, None]
    g11, g12 = modulated_averages(delta, mode, medium.omega[:, None], medium.zeta[:, None])
    rest = phi1(1j * (mode * delta))
    out = (
        g11[:, None] * motion.position[:, :, :, None]
        + g12[:, None] * motion.velocity[:, :, :, None]
        + rest[:, None] * motion.rest[:, :, :, None]
    )
    if motion.force is not None:
        args = [x[:, None] for x in medium.driven]  # [H, 1, Md, 1] and so on
        with_mode = driven_averages(delta[..., None], mode[:, None], *args)
        against = driven_averages(delta[..., None], -mode[:, None], *args)
        # Re(F X) e^{iws} = (F X e^{iws} + conj(F X e^{-iws})) / 2
        ahead, behind = (
            torch.einsum("bnhmc,bhjmc->bnhjc", motion.force, x) for x in (with_mode, against)
        )
        out = out + 0.5 * (ahead + behind.conj())
    return out * delta[:, None]


@dataclass(frozen=True)
class StepSettings:
    """What stays the same from step to step. Tensors are float64."""

    key_medium: Medium
    value_medium: Medium
    query: str  # one of `STREAMING_QUERIES`
    value: str  # `average` or `point`
    scale: float  # factor of the logits
    omega: Float[Tensor, " J"] | None = None  # bank of the sinusoidal queries
    constant: Float[Tensor, "H C"] | None = None  # of `anchored` and `learned`, as cos and sin
    cos: Float[Tensor, "H J C"] | None = None
    sin: Float[Tensor, "H J C"] | None = None
    ridge: float = 1e-4  # of `ridge_causal`


@dataclass(frozen=True)
class StepCache:
    """All tokens so far, moved to the current time T. Integrals count from a token's own time."""

    time: Float[Tensor, " B"]  # T
    times: Float[Tensor, "B N"]  # of the tokens
    present: Bool[Tensor, "B N"]  # which tokens count
    size: Float[Tensor, "B N"]  # how many tokens each stands for, see `merge_old`
    keys: Motion
    values: Motion
    value_sum: Float[Tensor, "B N H C"]  # integral of each value
    key_sum: Float[Tensor, "B N H C"]  # integral of each key
    modes: Complex[Tensor, "B N H J C"] | None  # of each key times e^{i omega_m (tau - T)}
    score: Float[Tensor, "B N H"] | None  # of each key times the `linear` query
    last_query: Float[Tensor, "B H C"] | None  # the last knot of that query
    gram: Float[Tensor, "B P P"] | None  # sum of outer products of the fit's design rows
    targets: Float[Tensor, "B P HC"] | None  # sum of design rows times query tokens
    origin: Float[Tensor, " B"]  # time from which the fit counts its phases

    @property
    def count(self) -> Int[Tensor, " B"]:
        """Number of present tokens, those that were merged included."""
        return torch.where(self.present, self.size, 0.0).sum(dim=1).round().long()


# Everything else in a cache has a token axis.
_PER_SERIES = ("time", "last_query", "gram", "targets", "origin")


def empty_cache(batch_size: int, settings: StepSettings) -> StepCache:
    """Return a cache without tokens."""
    like = settings.key_medium.omega
    heads, channels = like.shape
    num_modes = 0 if settings.omega is None else len(settings.omega)
    tokens = like.new_zeros(batch_size, 0, heads, channels)
    series = like.new_zeros(batch_size)
    modes = score = last_query = gram = targets = None
    if settings.query == "linear":
        score, last_query = tokens[..., 0], like.new_zeros(batch_size, heads, channels)
    elif settings.query != "hold":
        shape = (batch_size, 0, heads, num_modes, channels)
        modes = torch.zeros(shape, dtype=torch.complex128, device=like.device)
    if settings.query == "ridge_causal":
        gram = like.new_zeros(batch_size, 2 * num_modes, 2 * num_modes)
        targets = like.new_zeros(batch_size, 2 * num_modes, heads * channels)
    no_times = like.new_zeros(batch_size, 0)
    keys = _start_motion((tokens, None, None), settings.key_medium)
    values = _start_motion((tokens, None, None), settings.value_medium)
    kept = (tokens, tokens, modes, score, last_query, gram, targets)
    none = no_times.bool()
    return StepCache(series, no_times, none, no_times, keys, values, *kept, series)


def advance(
    cache: StepCache,
    settings: StepSettings,
    time: Float[Tensor, " B"],
    arriving_query: Float[Tensor, "B H C"] | None = None,
) -> StepCache:
    """Return the cache at a time at or after its own; a series without tokens just takes the time.

    `arriving_query` is the value of the piecewise linear query at `time`; for `linear`.
    """
    gap = torch.where(cache.count > 0, time - cache.time, 0.0)
    keys, key_integral = cache.keys.after(gap, settings.key_medium)
    values, value_integral = cache.values.after(gap, settings.value_medium)
    score, modes = cache.score, cache.modes
    if score is not None and cache.last_query is not None and arriving_query is not None:
        ramp = _ramp_integrals(cache.keys, gap, settings.key_medium)
        slope = arriving_query.double() - cache.last_query
        score = score + torch.einsum("bnhc,bhc->bnh", key_integral, cache.last_query)
        score = score + torch.einsum("bnhc,bhc->bnh", ramp, slope)
    if modes is not None and settings.omega is not None:
        phase = (settings.omega * gap[:, None])[:, None, None, :, None]
        more = _mode_integrals(cache.keys, gap, settings.omega, settings.key_medium)
        modes = (modes + more) * torch.polar(torch.ones_like(phase), -phase)
    sums = {"key_sum": cache.key_sum + key_integral, "value_sum": cache.value_sum + value_integral}
    return replace(cache, time=time, keys=keys, values=values, modes=modes, score=score, **sums)


def append(
    cache: StepCache,
    settings: StepSettings,
    keys: Tokens,
    values: Tokens,
    queries: Float[Tensor, "B G H C"] | None = None,
    present: Bool[Tensor, "B G"] | None = None,
) -> StepCache:
    """Return the cache with more tokens that start at its current time.

    `queries` are their query tokens, for `linear` and `ridge_causal`; `present` says which count.
    """
    batch, group = keys[0].shape[:2]
    if present is None:
        present = torch.ones(batch, group, dtype=torch.bool, device=cache.present.device)
    times = cache.time[:, None].expand(batch, group)
    origin = torch.where(cache.count > 0, cache.origin, cache.time)

    last_query, gram, targets = cache.last_query, cache.gram, cache.targets
    if last_query is not None and queries is not None:
        position = torch.arange(group, device=present.device)
        final = torch.where(present, position, 0).amax(dim=1)
        last = torch.take_along_dim(queries.double(), final[:, None, None, None], dim=1)[:, 0]
        last_query = torch.where(present.any(dim=1)[:, None, None], last, last_query)
    if gram is not None and targets is not None and queries is not None:
        assert settings.omega is not None
        design = design_matrix(times - origin[:, None], settings.omega)
        design = torch.where(present[..., None], design, 0.0)
        gram = gram + torch.einsum("bgi,bgj->bij", design, design)
        targets = targets + torch.einsum("bgi,bgc->bic", design, queries.double().flatten(2))
    sums = ("value_sum", "key_sum", "modes", "score")
    more: dict[str, Any] = {name: _extended(getattr(cache, name), group) for name in sums}
    more["times"], more["present"] = _joined(cache.times, times), _joined(cache.present, present)
    more["size"] = _joined(cache.size, torch.ones_like(times))
    more["keys"] = _joined(cache.keys, _start_motion(keys, settings.key_medium))
    more["values"] = _joined(cache.values, _start_motion(values, settings.value_medium))
    return replace(cache, last_query=last_query, gram=gram, targets=targets, origin=origin, **more)


def attend(
    cache: StepCache, settings: StepSettings, q: Float[Tensor, "B R H C"] | None, num_rows: int = 1
) -> Float[Tensor, "B R H C"]:
    """Return rows of attention at the cache's current time, over all of its tokens.

    `q` are the query tokens of the rows, None for `learned`, which has `num_rows` rows instead.
    """
    elapsed = cache.time[:, None] - cache.times  # [B, N]
    positive = elapsed > 0
    inverse = torch.where(positive, 1.0 / torch.where(positive, elapsed, 1.0), 0.0)
    integral, at_zero = _scores(cache, settings, None if q is None else q.double())
    apart, mean = positive[:, None, :, None], integral * inverse[:, None, :, None]
    logits = torch.where(apart, mean, at_zero)  # [B, R, N, H]
    logits = logits * settings.scale + cache.size.log()[:, None, :, None]
    logits = torch.where(cache.present[:, None, :, None], logits, -torch.inf)
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
    cos, sin, constant, elapsed = settings.cos, settings.sin, settings.constant, cache.time
    if cache.gram is not None and cache.targets is not None:
        coefficients = solve_ridge(cache.gram, cache.targets, cache.count, settings.ridge)
        by_head = coefficients.unflatten(2, settings.key_medium.omega.shape).transpose(1, 2)
        cos, sin = by_head.chunk(2, dim=2)
        constant, elapsed = None, cache.time - cache.origin
    assert cos is not None
    assert sin is not None
    amplitude = torch.complex(cos, -sin)
    if settings.query == "anchored":
        assert q is not None
        return q if constant is None else q * constant, q[:, :, :, None] * amplitude
    phase = elapsed[:, None] * settings.omega
    turn = torch.polar(torch.ones_like(phase), phase)[:, None, :, None]
    constant = None if constant is None else constant.expand(len(phase), 1, -1, -1)
    return constant, (amplitude * turn)[:, None]


def _joined(a: Any, b: Any) -> Any:
    """Join two tensors or motions along the token axis."""
    if isinstance(a, Motion):
        return Motion(*(_joined(x, y) for x, y in zip(a, b, strict=True)))
    return None if a is None else torch.cat((a, b), dim=1)


def _extended(x: Tensor | None, count: int) -> Tensor | None:
    """Append zeros for `count` more tokens."""
    return None if x is None else _joined(x, x.new_zeros(x.shape[0], count, *x.shape[2:]))


def merge_old(cache: StepCache, window: float) -> StepCache:
    r"""Return the cache with tokens older than a window merged, those of similar age into one.

    Everything in a cache is linear in its tokens, so a merged one is their mean, with as many
    weights as there are tokens in it. Its age differs from theirs by a tenth or so: N tokens
    beyond the window become about $25 \log(T / \mathrm{window})$, T the age of the oldest.

    **Error.** A damped oscillator comes to rest, so that the mean since its start falls as 1 / age:
    past a window W the logit of a motion below $a e^{-\gamma s}$ is at most $d = \mathrm{scale}
    \sum_c |q_c| a_c / (\gamma_c W)$. So is that of a mean of such motions, and no weight changes by
    more than a factor $e^{4d}$; differences within a merged token average out.
    """
    age = cache.time[:, None] - cache.times
    is_old = cache.present & (age > window)
    steps = torch.where(is_old, age / window, 1.0).log() / math.log1p(_AGE_STEP)
    bucket = torch.where(is_old, steps.floor(), -1.0)
    # A token begins another one unless it shares the bucket of the present token before it.
    place = torch.where(cache.present, torch.arange(age.shape[1], device=age.device), -1)
    before = functional.pad(place.cummax(dim=1).values, (1, -1), value=-1)
    same = bucket == bucket.gather(1, before.clamp(min=0))
    begins = cache.present & ~(is_old & same & (before >= 0))
    count = begins.sum(dim=1)
    length = int(count.max())
    # Absent tokens go to a spare place, which is cut off.
    segment = torch.where(cache.present, begins.cumsum(dim=1) - 1, length)
    size = torch.where(cache.present, cache.size, 0.0)

    def total(x: Tensor) -> Tensor:
        index = segment.view(*segment.shape, *[1] * (x.ndim - 2)).expand_as(x)
        return x.new_zeros(len(x), length + 1, *x.shape[2:]).scatter_add_(1, index, x)[:, :length]

    present = torch.arange(length, device=age.device) < count[:, None]
    new_size = torch.where(present, total(size), 1.0)

    def mean(x: Any) -> Any:
        if isinstance(x, Motion):
            return Motion(*map(mean, x))
        if x is None:
            return None
        shape = [1] * (x.ndim - 2)
        return total(x * size.view(*size.shape, *shape)) / new_size.view(*new_size.shape, *shape)

    kept = (*_PER_SERIES, "present", "size")
    names = [field.name for field in fields(StepCache) if field.name not in kept]
    merged = {name: mean(getattr(cache, name)) for name in names}
    return replace(cache, present=present, size=new_size, **merged)


def merge(chosen: Bool[Tensor, " B"], shorter: StepCache, longer: StepCache) -> StepCache:
    """Return `shorter` for the chosen series and `longer`, which extends it, for the others.

    The tokens that `shorter` does not have are absent in the chosen series.
    """
    missing = longer.times.shape[1] - shorter.times.shape[1]

    def pick(name: str, a: Any, b: Any) -> Any:
        if isinstance(a, Motion):
            return Motion(*(pick(name, x, y) for x, y in zip(a, b, strict=True)))
        if a is None or b is None:
            return None
        a = a if name in _PER_SERIES else _extended(a, missing)
        return torch.where(chosen.view(-1, *[1] * (b.ndim - 1)), a, b)

    names = [field.name for field in fields(StepCache)]
    return StepCache(*(pick(n, getattr(shorter, n), getattr(longer, n)) for n in names))
