r"""What a gap does to a driven oscillator: six numbers, and their gradients, by hand and quickly.

Over a gap s the state moves, from the drive u at its start and its change $\Delta$ until its end,

$$x \mathrel{+}= q\,(u - x) + g\,v + r\,\Delta, \qquad v = a\,v + h\,(u - x) + e\,\Delta,$$

with $g = g_{12}$, $q = \omega^2 i_{12}$, $h = \omega^2 g_{12}$, $a = 1 - q - 2\gamma g$ and, for a
drive by values, $r = \omega^2 k_{12}/s$, $e = \omega^2 i_{12}/s$. A drive by the rate of change has
$u = 0$, $r = \omega i_{12}/s$, $e = \omega g_{12}/s$. `osciformer.math.moments` gives the same
numbers; here they cost a fifth, because channels are sorted by regime once, and power series have
their coefficients by channel. Derivatives in the spectrum follow from the convolution
$c = g_{12} * g_{12}$, whose transform is $1/P^2$ as that of $g_{12}$ is $1/P$.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osciformer.math.oscillator import fastest_rate, num_terms

# Fastest rate times gap below which a channel without longer gaps has power series alone; and below
# which they replace closed forms in the others, for values and for gradients. There closed forms
# lose four of sixteen digits to cancellation, and channels with long gaps respond to those.
_RADIUS, _MIXED_RADIUS = 0.25, {False: 0.05, True: 0.25}
_MOST_TERMS = 13
# Gaps of a band at least, and bands of a segment at most.
_BAND, _MOST_BANDS = 512, 8
# |discriminant| s^2 below which an oscillator counts as critical, for values and for gradients.
_NEAR, _NEAR_TERMS = {False: 1e-6, True: 1e-2}, 5


class Hats(NamedTuple):
    r"""$g_{12}/s$, $i_{12}/s^2$, $k_{12}/s^3$, and for gradients $c/s^3$ and its integrals."""

    g: Tensor
    i: Tensor
    k: Tensor
    c: Any = None  # these are tensors if gradients are wanted
    c1: Any = None  # over s^4
    c2: Any = None  # over s^5


class Steps(NamedTuple):
    """Factors of a gap, each for position and velocity after it, ``[2, R, C]``."""

    of_x: Tensor  # 1 - q and -h
    of_v: Tensor  # g and a
    of_level: Tensor  # q and h
    of_change: Any = None  # r and e; None without a slope


class StepGrads(NamedTuple):
    """Gradients of the six numbers ``[R, C]``."""

    g: Tensor
    q: Tensor
    h: Tensor
    a: Tensor
    r: Any = None
    e: Any = None


class _Bank(NamedTuple):
    """Numbers of channels ``[C]``, and coefficients of power series ``[terms, 2 or 4, 1, C]``."""

    gamma: Tensor
    square: Tensor  # of omega
    discriminant: Tensor
    rate: Tensor  # the fastest
    tables: Tensor

    def pick(self, index: Tensor) -> _Bank:
        if len(index) == len(self.rate):
            return self
        return _Bank._make(x[..., index] for x in self)


class Channels:
    """Oscillators, sorted by regime.

    Args:
        omega: Natural frequencies ``[C]`` float64, above 0.
        zeta: Damping ratios ``[C]`` float64.
        with_gradients: Whether `pull_back` is to be called.
    """

    def __init__(self, omega: Tensor, zeta: Tensor, *, with_gradients: bool = False) -> None:
        self.omega, self.gamma, self.square = omega, zeta * omega, omega * omega
        self.discriminant = self.square * (zeta - 1.0) * (zeta + 1.0)
        self.rate, self.with_gradients = fastest_rate(omega, zeta), with_gradients
        self._space: Tensor | None = None
        self._sort()

    def _sort(self) -> None:
        tables = _series_tables(self.gamma, self.square, self.with_gradients)
        self._bank = _Bank(self.gamma, self.square, self.discriminant, self.rate, tables)
        self._radius, near = _MIXED_RADIUS[self.with_gradients], _NEAR[self.with_gradients]
        # Where a gap that is not short may count as critical, that is looked at.
        is_near = self.discriminant.abs() * (self._radius / self.rate) ** 2 < near
        is_over = self.discriminant > 0
        self._kinds: list[tuple[Tensor, Callable[..., list[Tensor]], bool]] = [
            (is_kind & (is_near == may_be_near), closed_form, may_be_near)
            for is_kind, closed_form in ((~is_over, _swinging), (is_over, _creeping))
            for may_be_near in (False, True)
        ]

    def hats(self, s: Tensor) -> Hats:
        """Return the integrals over gaps ``[R, 1]``, each ``[R, C]``."""
        # Of regular series, also with rows left out, most gaps are alike. The others are taken in
        # bands of similar length: within one, few channels need both series and closed forms.
        distinct, place = torch.unique(s, return_inverse=True)
        bands = distinct.unsqueeze(-1).chunk(min(_MOST_BANDS, 1 + len(distinct) // _BAND))
        found = zip(*map(self._hats, bands), strict=True)
        return Hats(*(torch.cat(x).index_select(0, place.squeeze(-1)) for x in found))

    def _hats(self, s: Tensor) -> list[Tensor]:
        shortest, longest = map(float, torch.aminmax(s)) if s.numel() else (0.0, 0.0)
        is_slow = self.rate * longest < _RADIUS
        index = is_slow.nonzero().squeeze(-1)
        found, places = [_series(s, self._bank.pick(index), longest)], [index]
        for is_kind, closed_form, may_be_near in self._kinds:
            index = (is_kind & ~is_slow).nonzero().squeeze(-1)
            if len(index) == 0:
                continue
            bank, options = self._bank.pick(index), (may_be_near, self.with_gradients)
            if float(bank.rate.min()) * shortest >= self._radius:
                part = closed_form(s, bank, *options)
            else:
                # Each within its own range, so that what is not taken is finite.
                border = self._radius / bank.rate
                short = _series(torch.minimum(s, border), bank, float(border.max()))
                part = closed_form(torch.maximum(s, border), bank, *options)
                is_long = (s > border).to(s.dtype)
                is_short = 1.0 - is_long
                for a, b in zip(short, part, strict=True):
                    b.mul_(is_long).addcmul_(a, is_short)
            found.append(part)
            places.append(index)
        if len(found) == 1:
            return found[0]
        back = torch.cat(places).argsort().expand(len(s), -1)
        return [torch.cat(x, dim=-1).gather(-1, back) for x in zip(*found, strict=True)]

    def steps(self, s: Tensor, hats: Hats, *, slope: str | None) -> Steps:
        """Return the factors of gaps ``[R, 1]``; `slope` is None, "value" or "rate".

        They last until the next call, which writes into the same memory.
        """
        shape = (4, 2, *hats.g.shape)
        if self._space is None or self._space.shape != shape:
            self._space = hats.g.new_empty(shape)
        of_x, of_v, of_level, of_change = self._space
        (g, a), (q, h), (r, e) = of_v, of_level, of_change
        torch.mul(s, hats.g, out=g)
        torch.mul(self.square, g, out=h)
        torch.mul(s, hats.i, out=r)
        torch.mul(self.square, r, out=e)
        torch.mul(s, e, out=q)
        torch.neg(of_level, out=of_x)
        of_x[0] += 1.0
        torch.addcmul(of_x[0], 2.0 * self.gamma, g, value=-1.0, out=a)
        if slope is None:
            return Steps(of_x, of_v, of_level)
        if slope == "rate":
            r.mul_(self.omega)
            torch.mul(self.omega, hats.g, out=e)
        else:
            torch.mul(self.square * (s * s), hats.k, out=r)
        return Steps(of_x, of_v, of_level, of_change)

    def pull_back(
        self, s: Tensor, hats: Hats, steps: Steps, grads: StepGrads, *, slope: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients in the gaps ``[R]`` and, summed over them, in omega and zeta ``[C]``."""
        g, a = steps.of_v
        gamma, square, omega = self.gamma, self.square, self.omega
        # Factors of g12, i12 and, over s, of all three; then what depends on s or the spectrum.
        of_g = grads.g + square * grads.h - 2.0 * gamma * grads.a
        of_qa = grads.q - grads.a
        d_gap = of_g * a + square * of_qa * g
        d_square = s * (s * hats.i * of_qa + hats.g * grads.h)
        d_gamma = -2.0 * g * grads.a
        d_omega = torch.zeros_like(omega)
        part_g, part_i, part_k = s * of_g, s * square * of_qa, None
        rise = hats.g - hats.i
        if slope == "rate":
            turn = 2.0 * gamma * rise + square * s * (hats.i - hats.k)
            d_gap += omega * (grads.r * rise - grads.e * turn)
            d_omega = (s * hats.i * grads.r + hats.g * grads.e).sum(0)
            part_g, part_i = part_g + omega * grads.e, part_i + omega * grads.r
        elif slope == "value":
            d_gap += square * (grads.e * rise + grads.r * s * (hats.i - hats.k))
            d_square += s * (s * hats.k * grads.r + hats.i * grads.e)
            part_i, part_k = part_i + square * grads.e, square * grads.r
        slope_c = hats.i - 2.0 * gamma * s * hats.c - square * (s * s) * hats.c1
        by_square = hats.c * part_g + s * hats.c1 * part_i
        by_gamma = slope_c * part_g + s * hats.c * part_i
        if part_k is not None:
            by_square += s * s * hats.c2 * part_k
            by_gamma += s * s * hats.c1 * part_k
        total_square = (d_square - s * s * by_square).sum(0)
        total_gamma = (d_gamma - 2.0 * s * by_gamma).sum(0)
        d_omega = d_omega + 2.0 * omega * total_square + (gamma / omega) * total_gamma
        return d_gap.sum(-1), d_omega, omega * total_gamma


def _series_tables(gamma: Tensor, square: Tensor, with_gradients: bool) -> Tensor:
    """Return coefficients by power of s of i12, k12 and, if asked for, the integrals of c."""
    powers = [torch.ones_like(gamma), -2.0 * gamma]
    while len(powers) < _MOST_TERMS:
        powers.append(-2.0 * gamma * powers[-1] - square * powers[-2])
    series = [(powers, 2), (powers, 3)]
    if with_gradients:
        squares = [
            torch.stack([powers[m] * powers[n - m] for m in range(n + 1)]).sum(0)
            for n in range(_MOST_TERMS)
        ]
        series += [(squares, 4), (squares, 5)]
    terms = [
        torch.stack([found[n] / math.factorial(n + shift) for found, shift in series])
        for n in range(_MOST_TERMS)
    ]
    return torch.stack(terms).unsqueeze(2)


def _series(s: Tensor, bank: _Bank, longest: float) -> list[Tensor]:
    """Return the hats by power series, for gaps up to `longest` that are short."""
    reach = float(bank.rate.max()) * longest if len(bank.rate) else 0.0
    count = min(num_terms(reach, 2, 1e-15), _MOST_TERMS)
    i, k, *more = _horner(bank.tables[:count], s)
    two_gamma_s, square_s2 = 2.0 * bank.gamma * s, bank.square * (s * s)
    g = torch.addcmul(1.0 - two_gamma_s * i, square_s2, k, value=-1.0)
    if not more:
        return [g, i, k]
    c1, c2 = more
    return [g, i, k, torch.addcmul(k - two_gamma_s * c1, square_s2, c2, value=-1.0), c1, c2]


def _horner(table: Tensor, s: Tensor) -> Tensor:
    last, *others = table.unbind(0)[::-1]
    total = torch.addcmul(others[0], last, s)
    for row in others[1:]:
        torch.addcmul(row, total, s, out=total)
    return total


def _swinging(s: Tensor, bank: _Bank, may_be_near: bool, more: bool) -> list[Tensor]:
    """Return the hats of oscillators that are not overdamped, for gaps that are not short."""
    root = torch.where(bank.discriminant == 0, 1.0, bank.discriminant).abs().sqrt()
    decay, angle = (-bank.gamma * s).exp_(), root * s
    even, g = decay * angle.cos(), angle.sin_().mul_(decay).div_(root)
    settled = torch.addcmul(1.0 - even, bank.gamma, g, value=-1.0)
    return _finish(s, bank, even, g, settled, may_be_near, more)


def _creeping(s: Tensor, bank: _Bank, may_be_near: bool, more: bool) -> list[Tensor]:
    """Return the hats of overdamped oscillators, for gaps that are not short."""
    slow, spread = bank.square / bank.rate, 2.0 * bank.discriminant.sqrt()
    near, far = (-slow * s).expm1_(), (-bank.rate * s).expm1_()
    even, g = 1.0 + 0.5 * (near + far), (near - far).div_(spread)
    settled = far.mul_(slow / spread).addcmul_(bank.rate / spread, near, value=-1.0)
    return _finish(s, bank, even, g, settled, may_be_near, more)


def _finish(
    s: Tensor,
    bank: _Bank,
    even: Tensor,
    g: Tensor,
    settled: Tensor,
    may_be_near: bool,
    more: bool,
) -> list[Tensor]:
    """Return the hats from the decayed even part, g12 and what has settled, 1 - g11."""
    gamma, square, discriminant = bank[:3]
    if may_be_near:
        # The smooth pair: near critical damping roots cancel.
        z = discriminant * (s * s)
        is_near = z.abs() < _NEAR[more]
        z = torch.where(is_near, z, 0.0)
        decay, terms = torch.exp(-gamma * s), range(_NEAR_TERMS)
        cosh = _power_series(z, [_INVERSE[2 * n] for n in terms])
        sinh = _power_series(z, [_INVERSE[2 * n + 1] for n in terms])
        even, g = (
            torch.where(is_near, decay * cosh, even),
            torch.where(is_near, decay * s * sinh, g),
        )
        swung = torch.addcmul(1.0 - even, gamma, g, value=-1.0)
        settled = torch.where(is_near, swung, settled)
    i = settled / square
    k = torch.addcmul(s - g, gamma, i, value=-2.0).div_(square)
    inverse = 1.0 / s
    inverse2 = inverse * inverse
    found = [g * inverse, i * inverse2, k * (inverse2 * inverse)]
    if not more:
        return found
    c = (s * even - g) / (2.0 * torch.where(discriminant == 0, 1.0, discriminant))
    if may_be_near:
        series = _power_series(z, [(n + 1) * _INVERSE[2 * n + 3] for n in terms])
        c = torch.where(is_near, decay * s**3 * series, c)
    c1 = (i - 0.5 * s * g - gamma * c) / square
    c2 = (k - c - 2.0 * gamma * c1) / square
    inverse4 = inverse2 * inverse2
    return [*found, c * (inverse2 * inverse), c1 * inverse4, c2 * (inverse4 * inverse)]


_INVERSE = [1.0 / math.factorial(n) for n in range(2 * _NEAR_TERMS + 4)]


def _power_series(z: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul_(z).add_(coefficient)
    return total
