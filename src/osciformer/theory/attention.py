r"""Attention of any continuous query and keys, reproduced by one bank, with a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad

from osciformer._text import check_choice
from osciformer._types import Float, Tensor
from osciformer.math.quadrature import graded_panels
from osciformer.ops._checks import check_times
from osciformer.ops.oscillator_attention import oscillator_attention
from osciformer.theory.bank import OscillatorBank
from osciformer.theory.bounds import logit_bound, output_bound, softmax_bound
from osciformer.theory.realisation import Path, fejer_states, least_squares_states

Method = Literal["least_squares", "fejer"]

# Grid points for the suprema: a turn of the fastest mode has 64, an interval at least 256.
_POINTS_PER_MODE, _FEWEST_POINTS = 32, 256
_MOST_POINTS = 1 << 18
# Part of the tolerance that fits may lose to keep their states small.
_RANK_SHARE = 1e-3
# What float64 may add to an error, in parts of the path and of the waves that make it up.
_ROUNDING = 1e-14
# Phase over the interval that quadrature resolves, beside that of the bank.
_PATH_PHASE = 64 * math.pi


class Evidence(NamedTuple):
    """An error as it was measured, and what it cannot exceed."""

    measured: float
    proved: float


@dataclass(frozen=True)
class Certificate:
    """How far the attention of a bank is from the attention that it stands for.

    Errors of paths are suprema of Euclidean norms over the times at which they are needed.
    """

    num_modes: int  #: Modes M of the bank beside the zero mode.
    query_error: float  #: Bound on the error of the query.
    key_error: float  #: Bound on that of any key.
    value_error: float | None  #: Bound on that of any value, if there are values.
    logits: Evidence  #: Largest error of a logit, before it is scaled.
    weights: Evidence  #: Largest sum of absolute errors in a row of the attention matrix.
    outputs: Evidence | None  #: Largest error of a row of averaged values, if there are values.
    is_proof: bool  #: True if a Lipschitz constant was given; else the grid is trusted.

    @property
    def holds(self) -> bool:
        """Whether no measured error exceeds what was proved."""
        pairs = [self.logits, self.weights] + ([] if self.outputs is None else [self.outputs])
        return all(pair.measured <= pair.proved for pair in pairs)


@dataclass(frozen=True)
class ApproximateAttention:
    """A bank, the initial states of all paths on it, and a certificate."""

    bank: OscillatorBank  #: The oscillators that all paths share.
    times: Float[Tensor, "N"]  #: Times of keys and rows.
    query: Float[Tensor, "M+1 2 d"] | None  #: State of the query at the first time; None if exact.
    keys: Float[Tensor, "N M+1 2 d"]  #: States of the keys at their own times.
    values: Float[Tensor, "N M+1 2 e"] | None  #: States of the values, if there are some.
    certificate: Certificate  #: Measured errors and proved bounds.

    def attend(self) -> tuple[Float[Tensor, "N e"], Float[Tensor, "N N"]]:
        """Return averaged values (keys, if there are none) and weights, by the package's operator.

        A mode of a channel is a channel of `oscillator_attention`, and the query, which all modes
        of a channel are asked, is a learned path. So all integrals are closed forms.
        """
        if self.query is None:
            raise ValueError("exact_query=True leaves no query on the bank to attend with")
        values = self.keys if self.values is None else self.values
        num_modes, width = len(self.bank.omega), max(self.keys.shape[-1], values.shape[-1])
        omega = self.bank.omega.repeat_interleave(width)[None]
        still = torch.zeros_like(omega)
        spectra: dict[str, Any] = {"key_omega": omega, "key_zeta": still}
        spectra |= {"value_omega": omega, "value_zeta": still}

        def starts(states: Tensor) -> tuple[Tensor, Tensor]:
            states = pad(states, (0, width - states.shape[-1]))
            position, velocity = states.movedim(-2, 0).flatten(-2)[:, None, :, None]
            return position, velocity

        (k, key_velocity), (v, value_velocity) = starts(self.keys), starts(values)
        moving = self.bank.omega[1:]
        query = pad(self.query, (0, width - self.query.shape[-1])).repeat(1, 1, num_modes)
        path = {"constant": query[:1, 0], "cos": query[None, 1:, 0], "omega": moving}
        path["sin"] = query[None, 1:, 1] / moving[:, None]
        times = (self.times - self.times[0])[None]  # the path counts from the first one
        out, weights = oscillator_attention(
            *(None, k, v, times, times),
            **spectra,
            key_velocity=key_velocity,
            value_velocity=value_velocity,
            query="learned",
            query_params=path,
            scale=self.keys.shape[-1] ** -0.5,
            return_weights=True,
        )
        rows = out[0, :, 0].unflatten(-1, (num_modes, width)).sum(dim=1)
        return rows[:, : values.shape[-1]], weights[0, 0]


def gap_means(
    paths: Sequence[Path], times: Float[Tensor, "N"], *, max_phase: float = _PATH_PHASE
) -> Float[Tensor, "N N d"]:
    r"""Return the mean of path i over $[t_i, t_j]$ at `[j, i]`, by quadrature.

    It is the value at $t_i$ where $t_j = t_i$, and 0 where the row j is earlier than the key i.

    Args:
        paths: Paths; i is asked for times from $t_i$ to the last time.
        times: Times, not decreasing; paths may have corners there.
        max_phase: Phase over all times, in radians, that panels of 16 Gauss nodes resolve.
    """
    knots, where = torch.unique(times, return_inverse=True)
    length = float(knots[-1] - knots[0])
    widths = knots.diff().tolist()
    panels = [graded_panels(max_phase * width / length) for width in widths]
    rules = zip(knots.tolist(), widths, panels, strict=False)  # no interval follows the last knot
    nodes = [left + width * x for left, width, (x, _) in rules]
    shares = [width * w for width, (_, w) in zip(widths, panels, strict=True)]
    columns = []
    for path, first in zip(paths, where.tolist(), strict=True):
        here = path(knots[first : first + 1]).double()  # [1, d]
        column = here.new_zeros(len(knots), here.shape[-1])
        column[first] = here[0]
        if first < len(widths):
            sizes = [len(x) for x in nodes[first:]]
            values = path(torch.cat(nodes[first:])).double().split(sizes)
            pieces = [w @ x for w, x in zip(shares[first:], values, strict=True)]
            elapsed = (knots[first + 1 :] - knots[first])[:, None]
            column[first + 1 :] = torch.stack(pieces).cumsum(dim=0) / elapsed
        columns.append(column[where])
    return torch.stack(columns, dim=1)


def approximate_attention(
    q: Path,
    keys: Sequence[Path],
    times: Float[Tensor, "N"],
    tol: float,
    *,
    values: Sequence[Path] | None = None,
    exact_query: bool = False,
    method: Method = "least_squares",
    lipschitz: float | None = None,
    max_modes: int = 256,
) -> ApproximateAttention:
    r"""Return a bank that reproduces continuous-time attention, and a proof of how well.

    Rows of the softmax of $\alpha_i(t_j)/\sqrt d$, with $\alpha_i(t_j)$ the mean of $\langle q, k_i
    \rangle$ over $[t_i, t_j]$, are reproduced to `tol` in the sum of absolute errors, and averaged
    values, if given, to `tol` in norm. The number of modes is the smallest that bisection finds.

    The suprema that the bounds start from are taken on a grid. Between its points an error is
    trusted to grow by no more than it differs from one of them to the next, anywhere. With a
    `lipschitz` constant nothing is trusted but it and the rounding of float64.

    Args:
        q: The query, a function of times `[T]` (float64) to `[T, d]`, on all of the times.
        keys: N keys; key i is asked for times from its own to the last.
        times: Times of the keys, which are those of the rows, not decreasing.
        tol: Largest error, as proved.
        values: N values, likewise; of any number of channels.
        exact_query: Keep the query as it is, as the theorem does. A query that is rough, like a
            spline through tokens, would need many more modes than the keys.
        method: `least_squares`, or `fejer`, the construction of the proof, which needs many modes.
        lipschitz: A Lipschitz constant that query, keys and values share.
        max_modes: Number of modes at which the search gives up with an error.

    Example:
        >>> times = torch.tensor([0.0, 0.5, 2.0])
        >>> keys = [lambda t, i=i: torch.stack((t.cos(), (t - i).exp()), -1) for i in range(3)]
        >>> found = approximate_attention(lambda t: torch.stack((t, 1 - t), -1), keys, times, 1e-3)
        >>> found.certificate.weights.proved <= 1e-3, found.certificate.holds
        (True, True)
    """
    check_choice("method", method, ("least_squares", "fejer"))
    times = times.double()
    if times.ndim != 1 or len(times) == 0 or len(keys) != len(times):
        raise ValueError(
            f"times must be [N] with one time for each of the {len(keys)} keys, at least one; "
            f"got {list(times.shape)}"
        )
    if values is not None and len(values) != len(times):
        raise ValueError(f"values must be {len(times)}, one for each key; got {len(values)}")
    if not tol > 0.0:
        raise ValueError(f"tol must be positive; got {tol}")
    check_times("times", times[None], None)
    with torch.no_grad():
        search = _Search(q, keys, values, times, tol, exact_query, method, lipschitz)
        return search.certify(search.run(max_modes))


class _Fit(NamedTuple):
    """Initial states of a path, and bounds on its error and its size."""

    states: Tensor | None  # None for a path that is kept as it is
    error: float
    size: float


@dataclass(frozen=True)
class _Attempt:
    """What a number of modes gives: fits of all paths, and the bounds that follow."""

    bank: OscillatorBank
    query: _Fit
    keys: list[_Fit]
    values: list[_Fit]
    logits: float
    weights: float
    outputs: float

    @property
    def worst(self) -> float:
        return max(self.weights, self.outputs)


class _Search:
    """The problem that bisection tries numbers of modes on."""

    def __init__(
        self,
        q: Path,
        keys: Sequence[Path],
        values: Sequence[Path] | None,
        times: Tensor,
        tol: float,
        exact_query: bool,
        method: Method,
        lipschitz: float | None,
    ) -> None:
        self.q, self.keys, self.values, self.times = q, keys, values, times
        self.exact_query, self.rank_tolerance = exact_query, max(1e-13, _RANK_SHARE * tol)
        self.tol, self.method, self.lipschitz = tol, method, lipschitz
        self.start, self.end = times[0].item(), times[-1].item()
        self.length = self.end - self.start or 1.0
        self.width = q(times[:1]).shape[-1]
        self.num_points = _FEWEST_POINTS
        if lipschitz is not None:
            # What is unknown between grid points shall cost a quarter of the tolerance.
            begins = times.tolist()
            share = self._size([q, *keys], [self.start, *begins]) / math.sqrt(self.width)
            if values is not None:
                share = 1.0 + share * max(1.0, self._size(values, begins))
            wanted = 8.0 * lipschitz * self.length * share / tol
            self.num_points = min(max(_FEWEST_POINTS, math.ceil(wanted)), _MOST_POINTS)

    def run(self, max_modes: int) -> _Attempt:
        """Return the attempt with the fewest modes that doubling and bisection find."""
        low, high = 0, 1
        while (best := self.attempt(high)).worst > self.tol:
            if high >= max_modes:
                raise ValueError(
                    f"tol must be within reach of max_modes={max_modes}; got tol={self.tol:g}, and "
                    f"with {high} modes the bound is {best.worst:.3g}. Raise one of them"
                    + (", or use method='least_squares'" if self.method == "fejer" else "")
                )
            low, high = high, min(2 * high, max_modes)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.attempt(middle)
            low, high, best = (
                (low, middle, found) if found.worst <= self.tol else (middle, high, best)
            )
        return best

    def _grid(self, begin: float, num_points: int) -> Tensor:
        share = torch.linspace(0.0, 1.0, num_points + 1, dtype=torch.float64)
        return (self.end - begin) * share

    def _size(self, paths: Sequence[Path], begins: Sequence[float]) -> float:
        """Return about the largest norm of some paths."""
        found = (
            path(begin + self._grid(begin, _FEWEST_POINTS)).norm(dim=-1).max().item()
            for path, begin in zip(paths, begins, strict=True)
        )
        return max(found)

    def attempt(self, num_modes: int) -> _Attempt:
        """Fit all paths with a number of modes."""
        bank = OscillatorBank.on_grid(num_modes, self.length)
        begins = self.times.tolist()
        query = self._fit(bank, self.q, self.start, is_exact=self.exact_query)
        keys = [self._fit(bank, path, t) for path, t in zip(self.keys, begins, strict=True)]
        pairs = zip(self.values or (), begins, strict=self.values is not None)
        values = [self._fit(bank, path, t) for path, t in pairs]
        if {k.states.shape[-1] for k in keys if k.states is not None} != {self.width}:
            raise ValueError(f"keys must have the channels of the query, {self.width}, all of them")
        logits = max(logit_bound(query.size, k.size, query.error, k.error) for k in keys)
        weights = softmax_bound(logits / math.sqrt(self.width))
        outputs = 0.0
        if values:
            sizes = max(v.size for v in values), max(v.error for v in values)
            outputs = output_bound(weights, *sizes)
        return _Attempt(bank, query, keys, values, logits, weights, outputs)

    def _fit(
        self, bank: OscillatorBank, path: Path, begin: float, *, is_exact: bool = False
    ) -> _Fit:
        s = self._grid(begin, max(self.num_points, _POINTS_PER_MODE * bank.num_modes))
        wanted = path(begin + s).double()
        if wanted.ndim != 2 or len(wanted) != len(s) or not bool(wanted.isfinite().all()):
            raise ValueError(
                f"query, keys and values must map times [{len(s)}] to finite numbers "
                f"[{len(s)}, d]; one that starts at {begin:g} returned {list(wanted.shape)}"
                + (" with NaN or infinity" if not bool(wanted.isfinite().all()) else "")
            )
        half = 0.5 * s[1].item()  # no point is further from one of the grid
        size = wanted.norm(dim=-1).max().item()
        size += _largest_step(wanted) if self.lipschitz is None else half * self.lipschitz
        if is_exact:
            return _Fit(None, 0.0, size)
        if self.method == "fejer":
            # Of an interval without length nothing but the constant is left.
            end = self.start + self.length
            held = path if self.end > self.start else lambda t: path(t.clamp(max=self.end))
            states = fejer_states(held, bank, begin, start=self.start, end=end)
        else:
            options = {"end": self.end, "rank_tolerance": self.rank_tolerance}
            states = least_squares_states(path, bank, begin, **options)
        error = wanted - bank.path(states, s)
        waves = bank.amplitudes(states)
        if self.lipschitz is None:
            unseen = _largest_step(error)
        else:
            curvature = (bank.omega**2 @ waves).item()
            speed = bank.speed(states, s).norm(dim=-1).max().item() + half * curvature
            unseen = half * (self.lipschitz + speed)
        rounding = _ROUNDING * (size + waves.sum().item())
        return _Fit(states, error.norm(dim=-1).max().item() + unseen + rounding, size)

    def certify(self, found: _Attempt) -> ApproximateAttention:
        """Measure the errors of what was found."""
        bank, times = found.bank, self.times
        begins = times.tolist()

        def on_bank(fit: _Fit, begin: float) -> Path:
            states = fit.states
            return self.q if states is None else lambda t: bank.path(states, t - begin)

        def products(query: Path, keys: Sequence[Path]) -> list[Path]:
            return [_product(query, key) for key in keys]

        phase = _PATH_PHASE + 2.0 * math.pi * bank.num_modes
        near = [on_bank(fit, begin) for fit, begin in zip(found.keys, begins, strict=True)]
        ideal = gap_means(products(self.q, self.keys), times, max_phase=phase)[..., 0]
        actual = gap_means(products(on_bank(found.query, self.start), near), times, max_phase=phase)
        seen = times[:, None] >= times
        logits = [torch.where(seen, x, -torch.inf) for x in (ideal, actual[..., 0])]
        weights = [(x / math.sqrt(self.width)).softmax(dim=-1) for x in logits]
        logit_error = torch.where(seen, ideal - actual[..., 0], 0.0).abs().max().item()
        weight_error = (weights[0] - weights[1]).abs().sum(dim=-1).max().item()
        outputs = None
        if self.values is not None:
            near = [on_bank(fit, begin) for fit, begin in zip(found.values, begins, strict=True)]
            means = [gap_means(paths, times, max_phase=phase) for paths in (self.values, near)]
            rows = [(w[..., None] * x).sum(dim=1) for w, x in zip(weights, means, strict=True)]
            outputs = Evidence((rows[0] - rows[1]).norm(dim=-1).max().item(), found.outputs)
        certificate = Certificate(
            num_modes=bank.num_modes,
            query_error=found.query.error,
            key_error=max(fit.error for fit in found.keys),
            value_error=max(fit.error for fit in found.values) if found.values else None,
            logits=Evidence(logit_error, found.logits),
            weights=Evidence(weight_error, found.weights),
            outputs=outputs,
            is_proof=self.lipschitz is not None,
        )
        keys, values = (
            torch.stack([fit.states for fit in fits if fit.states is not None]) if fits else None
            for fits in (found.keys, found.values)
        )
        assert keys is not None
        return ApproximateAttention(bank, times, found.query.states, keys, values, certificate)


def _largest_step(values: Tensor) -> float:
    """Return how far a path moves at most from one point of a grid to the next."""
    return values.diff(dim=0).norm(dim=-1).max().item()


def _product(query: Path, key: Path) -> Callable[[Tensor], Tensor]:
    return lambda t: (query(t).double() * key(t).double()).sum(dim=-1, keepdim=True)
