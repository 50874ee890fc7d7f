"""Periodograms of irregular series: what undamped oscillators, kicked by a series, end with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from osciformer._types import Bool, Complex, Float, Tensor

_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 18  # numbers at a time; on a CPU they stay in the cache
_INNER = 64  # lines of a block: the second of the two exponentials takes so many


def line_sums(
    times: Float[Tensor, "B N"], kicks: Float[Tensor, "B N F"], step: float | Tensor, lines: int
) -> Complex[Tensor, "B F L"]:
    r"""Return $\sum_i u_i e^{2\pi i k f t_i}$ for k = 1, ..., L and the step f, complex64.

    That is what undamped oscillators end with. Line k = 1 + aB + b needs the product of two
    exponentials only, so that all lines are one matrix product.

    Args:
        times: Times, float64.
        kicks: What happens at them, u; 0 for nothing.
        step: Spacing f of the lines, in turns a unit of time.
        lines: Their number L.
    """

    def sums(times: Tensor, kicks: Tensor) -> Tensor:
        return _Waves(times, step, lines).sums(kicks)

    return _in_parts(sums, lines, times, kicks)


def variance_shares(
    times: Float[Tensor, "B N"],
    values: Float[Tensor, "B N F"],
    known: Bool[Tensor, "B N F"],
    step: float | Tensor,
    lines: int,
) -> tuple[Float[Tensor, "B F L"], Float[Tensor, "B F 1"], Float[Tensor, "B F 1"]]:
    r"""Return the shares of the variance of series that a sine explains, from 0 to 1.

    It is the normalised periodogram of Lomb and Scargle with a floating mean: of line k the best
    $c + a \cos 2\pi k f t + b \sin 2\pi k f t$ for all times of a series.

    Args:
        times: Times, float64.
        values: Values, float64; what is not known may be anything.
        known: Which values count.
        step: Spacing f of the lines, in turns a unit of time.
        lines: Their number L.

    Returns:
        The shares, the numbers of known values (1 at least), and their squares about the mean.
    """
    kicks, count, total = centred(values, known)
    weights = known.double()
    if not torch.compiler.is_compiling() and bool((known == known[..., :1]).all()):
        weights = weights[..., :1]  # all variables are in all rows: one set of weights serves them

    def shares(
        times: Tensor, kicks: Tensor, weights: Tensor, count: Tensor, total: Tensor
    ) -> Tensor:
        waves = _Waves(times, step, lines)
        twice = _Waves(times, 2.0 * step, lines)  # squares of the others would err by more
        found = waves.sums(kicks), waves.sums(weights), twice.sums(weights)
        parts = (torch.view_as_real(x).double().unbind(-1) for x in found)
        (a, b), (cos, sin), (cos_two, sin_two) = parts
        # Products of cosine and sine without their means: the best sine beside a mean.
        cosine = 0.5 * (count + cos_two) - cos.square() / count
        sine = 0.5 * (count - cos_two) - sin.square() / count
        mixed = 0.5 * sin_two - cos * sin / count
        fitted = sine * a.square() + cosine * b.square() - 2.0 * mixed * a * b
        share = fitted / torch.maximum(cosine * sine - mixed.square(), 1e-3 * count.square())
        return (share / total.clamp(min=1e-12)).clamp(0.0, 1.0)

    return _in_parts(shares, lines, times, kicks, weights, count, total), count, total


def centred(
    values: Float[Tensor, "B N F"], known: Bool[Tensor, "B N F"]
) -> tuple[Float[Tensor, "B N F"], Float[Tensor, "B F 1"], Float[Tensor, "B F 1"]]:
    """Return values less their mean, 0 if unknown; how many there are; and their squares."""
    count = known.sum(1).clamp(min=1).double()
    filled = torch.where(known, values, 0.0)
    kicks = torch.where(known, filled - (filled.sum(1) / count)[:, None], 0.0)
    return kicks, count[..., None], kicks.square().sum(1)[..., None]


class _Waves:
    """All lines at all times, as products of two exponentials."""

    def __init__(self, times: Float[Tensor, "B N"], step: float | Tensor, lines: int) -> None:
        inner = min(_INNER, lines)
        outer = -(-lines // inner)
        high = torch.arange(outer, dtype=torch.float64, device=times.device) * inner + 1.0
        low = torch.arange(inner, dtype=torch.float64, device=times.device)
        turns = times * step
        self.lines = lines
        self.high = _spin(turns[:, None, :] * high[:, None])  # [B, L / inner, N]
        self.low = _spin(turns[..., None] * low)  # [B, N, inner]

    def sums(self, kicks: Float[Tensor, "B N F"]) -> Complex[Tensor, "B F L"]:
        """Return what `line_sums` does."""
        kicked = kicks.float().transpose(1, 2)[:, :, None, :] * self.high[:, None]
        found = kicked.flatten(1, 2) @ self.low
        return found.unflatten(1, (kicks.shape[2], -1)).flatten(2)[..., : self.lines]


def _in_parts(function: Callable[..., Tensor], lines: int, *given: Tensor) -> Tensor:
    """Return what a function gives for times and kicks, of so many series that memory is small."""
    if torch.compiler.is_compiling():  # which cannot count chunks of a batch of any size
        return function(*given)
    rows, width = given[1].shape[1:]
    inner = min(_INNER, lines)
    chunk = _CPU_CHUNK if given[0].device.type == "cpu" else _CHUNK
    size = max(1, chunk // max(1, rows * (-(-lines // inner) * width + inner)))
    parts = zip(*(x.split(size) for x in given), strict=True)
    return torch.cat([function(*part) for part in parts])


def _spin(turns: Tensor) -> Tensor:
    angle = turns.round().sub_(turns).mul_(-2.0 * math.pi).float()  # exact for times of any size
    return torch.view_as_complex(torch.stack((angle.cos(), angle.sin()), dim=-1))
