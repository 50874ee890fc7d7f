"""Periodograms of irregular series: what undamped oscillators, kicked by a series, end with."""

from __future__ import annotations

import math

import torch

from osciformer._types import Bool, Complex, Float, Tensor

_CHUNK = 1 << 22  # numbers at a time


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
    return _wave_sums(times, step, lines, kicks)[0]


def _wave_sums(
    times: Float[Tensor, "B N"],
    step: float | Tensor,
    lines: int,
    kicks: Float[Tensor, "B N F"],
    weights: Float[Tensor, "B N W"] | None = None,
) -> tuple[Complex[Tensor, "B V L"], ...]:
    """Return the sums of `line_sums`; those of weights besides, and also of twice the step."""
    rows, width = kicks.shape[1:]
    inner = min(64, lines)
    outer = -(-lines // inner)
    high = torch.arange(outer, dtype=torch.float64, device=times.device)[:, None] * inner + 1.0
    low = torch.arange(inner, dtype=torch.float64, device=times.device)

    def sums(times: Tensor, *drives: Tensor) -> list[Tensor]:
        turns = times * step
        ahead, behind = _spin(turns[:, None, :] * high), _spin(turns[:, :, None] * low)

        def along(drive: Tensor) -> Tensor:
            kicked = drive.float().transpose(1, 2)[:, :, None, :] * ahead[:, None]
            found = kicked.flatten(1, 2) @ behind
            return found.unflatten(1, (-1, outer)).flatten(2)[..., :lines]

        found = [along(drive) for drive in drives]
        if weights is not None:
            ahead, behind = ahead.square(), behind.square()
            found.append(along(drives[-1]))
        return found

    drives = (kicks,) if weights is None else (kicks, weights)
    if torch.compiler.is_compiling():  # which cannot count chunks of a batch of any size
        return tuple(sums(times, *drives))
    size = max(1, _CHUNK // max(1, rows * (outer * width + inner)))
    parts = zip(*(x.split(size) for x in (times, *drives)), strict=True)
    return tuple(torch.cat(found) for found in zip(*(sums(*part) for part in parts), strict=True))


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
    sums, one, two = _wave_sums(times, step, lines, kicks, weights)
    # Products of cosine and sine without their means: the best sine beside a mean.
    cosine = 0.5 * (count + two.real) - one.real**2 / count
    sine = 0.5 * (count - two.real) - one.imag**2 / count
    both = 0.5 * two.imag - one.real * one.imag / count
    fitted = sine * sums.real**2 + cosine * sums.imag**2 - 2.0 * both * sums.real * sums.imag
    share = fitted / torch.maximum(cosine * sine - both**2, 1e-3 * count**2)
    return (share / total.clamp(min=1e-12)).clamp(0.0, 1.0), count, total


def centred(
    values: Float[Tensor, "B N F"], known: Bool[Tensor, "B N F"]
) -> tuple[Float[Tensor, "B N F"], Float[Tensor, "B F 1"], Float[Tensor, "B F 1"]]:
    """Return values less their mean, 0 if unknown; how many there are; and their squares."""
    count = known.sum(1).clamp(min=1).double()
    filled = torch.where(known, values, 0.0)
    kicks = torch.where(known, filled - (filled.sum(1) / count)[:, None], 0.0)
    return kicks, count[..., None], kicks.square().sum(1)[..., None]


def _spin(turns: Tensor) -> Tensor:
    angle = ((turns - turns.round()) * (2.0 * math.pi)).float()  # exact for times of any size
    return torch.polar(torch.ones_like(angle), angle)
