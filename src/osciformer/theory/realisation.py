r"""From a continuous path to the initial states of a bank that draws it.

The proof's way: Fejer means of the even extension, a shift of phase to the key's own time, and
states that realise the trigonometric polynomial exactly. The practical way: least squares over
the interval on which the key is needed, which may use sines and cosines freely.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from osciformer._types import Float, Tensor
from osciformer.math.quadrature import graded_panels
from osciformer.theory.bank import OscillatorBank

#: A path: times `[T]` in float64 to values `[T, d]`.
Path = Callable[[Tensor], Tensor]

# Relative singular value below which rounding has filled a direction of the least squares.
_RANK_TOLERANCE = 1e-13
# Gauss panels over the interval, at least: paths are no smoother than their caller made them.
_FEWEST_PANELS = 64


def fejer_kernel(order: int, theta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    r"""Return $K_N(\theta) = \frac{1}{N+1}\big(\sin\frac{(N+1)\theta}2 / \sin\frac\theta2\big)^2$.

    Example:
        >>> fejer_kernel(3, torch.tensor([0.0, 2 * math.pi])).tolist()
        [4.0, 4.0]
    """
    half = 0.5 * torch.remainder(theta + math.pi, 2 * math.pi) - 0.5 * math.pi  # in [-pi/2, pi/2]
    whole = (order + 1) * half
    # sinc takes care of the limit at 0.
    ratio = (order + 1) * torch.sinc(whole / math.pi) / torch.sinc(half / math.pi)
    return ratio * ratio / (order + 1)


def fejer_coefficients(
    path: Path, start: float, end: float, order: int, *, held_until: float | None = None
) -> Float[Tensor, "M+1 d"]:
    r"""Return c of the Fejer mean $\sum_n c_n\cos\omega_n(t - a)$ of a path on $[a, b]$.

    It is that of the even extension with period 2 (b - a), so only cosines occur.

    Args:
        path: The path; of one that starts later, only times from `held_until` on are asked for.
        start: Begin a of the interval.
        end: Its end b.
        order: Order M of the mean.
        held_until: Before this time the path has the value that it has there; None is `start`.
    """
    begin = start if held_until is None else held_until
    length = end - start
    phases = max(order, _FEWEST_PANELS) * math.pi
    nodes, weights = graded_panels(phases * (end - begin) / length) if end > begin else _EMPTY
    times = begin + (end - begin) * nodes
    n = torch.arange(order + 1, dtype=torch.float64)
    omega = n * (math.pi / length)
    waves = torch.cos(omega[:, None] * (times - start))
    held = path(torch.tensor([begin], dtype=torch.float64)).double()
    moving = path(times).double() if len(times) else held[:0]
    # The integral over the time in which the path is held has a closed form.
    before = (begin - start) * torch.sinc(omega * (begin - start) / math.pi)
    total = (waves * (end - begin) * weights) @ moving + before[:, None] * held
    share = (1.0 - n / (order + 1)) * (2.0 / length)
    share[0] /= 2.0
    return share[:, None] * total


_EMPTY = (torch.zeros(0, dtype=torch.float64),) * 2


def shift_phase(
    cos: Float[Tensor, "n d"], sin: Float[Tensor, "n d"], phase: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    r"""Return the coefficients of the same waves about an origin later by $\varphi_n$.

    $$\tilde c = \cos\varphi\,c + \sin\varphi\,s, \qquad
    \tilde s = -\sin\varphi\,c + \cos\varphi\,s$$
    """
    along, across = phase.cos()[:, None], phase.sin()[:, None]
    return along * cos + across * sin, along * sin - across * cos


def realise(
    bank: OscillatorBank, cos: Float[Tensor, "n d"], sin: Float[Tensor, "n d"]
) -> Float[Tensor, "M+1 2 d"]:
    r"""Return the states from which an undamped bank draws a trigonometric polynomial.

    $$\sum_n c_n\cos\omega_ns + s_n\sin\omega_ns$$
    Modes that it does not have stay at rest; a sine of the zero mode means nothing.
    """
    if len(cos) > len(bank.omega):
        raise ValueError(
            f"the bank must have as many modes as the polynomial, {len(cos) - 1}; "
            f"it has {bank.num_modes}"
        )
    states = torch.zeros(len(bank.omega), 2, cos.shape[1], dtype=torch.float64)
    states[: len(cos), 0] = cos
    states[: len(cos), 1] = bank.omega[: len(cos), None] * sin
    return states


def fejer_states(
    path: Path, bank: OscillatorBank, anchor: float, *, start: float, end: float
) -> Float[Tensor, "M+1 2 d"]:
    r"""Return the proof's states at `anchor` $= t_i$ of a key that lives on $[t_i, b]$.

    The key is held at its first value on $[a, t_i]$; `bank` has the grid of length b - a.
    """
    cos = fejer_coefficients(path, start, end, bank.num_modes, held_until=anchor)
    return realise(bank, *shift_phase(cos, torch.zeros_like(cos), bank.omega * (anchor - start)))


def least_squares_states(
    path: Path,
    bank: OscillatorBank,
    anchor: float,
    *,
    end: float,
    rank_tolerance: float = _RANK_TOLERANCE,
) -> Float[Tensor, "M+1 2 d"]:
    r"""Return states at `anchor` whose path fits a key on $[t_i, b]$ by least squares.

    The fit is to Chebyshev nodes, which are dense at both ends. Modes have twice the period that
    the interval needs, so no jump of value or slope at its ends slows the convergence down, as it
    does with the even extension; the price is a matrix of nearly dependent columns, of which the
    smallest singular values are left out. Works for damped banks, too.

    Args:
        path: The path, a function of times.
        bank: The bank.
        anchor: Time $t_i$ of the states.
        end: Last time b at which the path counts.
        rank_tolerance: Singular values below this part of the largest are left out. That costs a
            smooth path about this part of its size, and keeps the states of a rough one small.
    """
    columns = 2 * bank.num_modes + 1
    k = torch.arange(2 * columns + 16, dtype=torch.float64)
    s = 0.5 * (end - anchor) * (1.0 - torch.cos(math.pi * (k + 0.5) / len(k)))
    rows = bank.readout(s)
    design = torch.cat((rows[..., 0], rows[:, 1:, 1] * bank.omega[1:]), dim=-1)
    wanted = path(anchor + s).double()
    u, size, vt = torch.linalg.svd(design, full_matrices=False)
    inverse = torch.where(size > rank_tolerance * size[0], 1.0 / size, 0.0)
    found = vt.mT @ (inverse[:, None] * (u.mT @ wanted))
    cos, sin = found[: bank.num_modes + 1], found[bank.num_modes + 1 :]
    return realise(bank, cos, torch.cat((torch.zeros_like(cos[:1]), sin)))
