"""Checks of layers on irregular series, for use in tests: parity, causality, padding, time shift.

Every check takes a function `apply(x, times, mask) -> [B, N, ...]`: a layer, a model, or an
operator with its arguments bound. The tokens `x` are [B, N, F], their `times` [B, N]; `mask`
[B, N] is True where a token is present, or None if all are. `tolerance` is the largest relative
error. A failed check raises `AssertionError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from osciformer._types import Bool, Float, Tensor

Mask = Tensor | None
Positions = Sequence[int] | None
Apply = Callable[[Tensor, Tensor, Mask], Tensor]


@dataclass(frozen=True)
class ToyBatch:
    """Padded tokens `x`, their `times`, increasing within a series, and True where present."""

    x: Float[Tensor, "B N F"]
    times: Float[Tensor, "B N"]
    mask: Bool[Tensor, "B N"]


def irregular_batch(
    batch_size: int = 3,
    length: int = 7,
    dim: int = 4,
    *,
    span: float = 1.0,
    ties: bool = False,
    ragged: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> ToyBatch:
    """Return noisy sinusoids [B, N, F] at random times in [0, span], padded with NaN.

    With `ties`, the second and third token of a series share their time; with `ragged`, later
    series are shorter. The global seed is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)

    times = draw(batch_size, length).sort(dim=1).values * span
    if ties and length > 2:
        times[:, 2] = times[:, 1]
    omega, phase = 1.0 + 19.0 * draw(batch_size, 1, dim), 6.283 * draw(batch_size, 1, dim)
    x = torch.sin(omega * times[..., None] / span + phase) + draw(batch_size, length, dim) - 0.5
    lengths = [max(1, length - 2 * b) if ragged else length for b in range(batch_size)]
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    x = torch.where(mask[..., None], x, torch.nan).to(dtype)
    return ToyBatch(x, torch.where(mask, times, torch.nan).to(dtype), mask)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; inf for a NaN."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    error = float((actual - expected).abs().max() / scale)
    return float("inf") if math.isnan(error) else error


def assert_parity(
    actual: Callable[..., Tensor],
    expected: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    tolerance: float,
    grad_tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Check that two functions give the same output and the same gradient of every input.

    The reference `expected` is called in float64. Gradients of floating-point `inputs` are taken
    along a random direction; their `grad_tolerance` is `tolerance` if not given.
    """
    grad_tolerance = tolerance if grad_tolerance is None else grad_tolerance
    ours = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    theirs = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out, reference = actual(*ours), expected(*theirs)
    error = relative_error(out, reference)
    assert error <= tolerance, f"output differs by {error:.3g}, more than {tolerance:.3g}"
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(reference.shape, generator=generator, dtype=torch.float64)
    for result in (out, reference):
        result.backward(direction.to(result))
    for position, pair in enumerate(zip(ours, theirs, strict=True)):
        if not pair[0].is_floating_point():
            continue
        got, want = (torch.zeros_like(one) if one.grad is None else one.grad for one in pair)
        is_zero = float(want.abs().max()) == 0.0
        error = float(got.abs().max()) if is_zero else relative_error(got, want)
        problem = f"is {error:.3g}, not zero" if is_zero else f"differs by {error:.3g}"
        assert error <= grad_tolerance, (
            f"gradient of input {position} {problem}; the limit is {grad_tolerance:.3g}"
        )


@torch.no_grad()
def assert_causal(
    apply: Apply, x: Tensor, times: Tensor, mask: Mask = None, *, positions: Positions = None
) -> None:
    """Check that a token's values and time reach no earlier row, to the last bit.

    Each token of `positions` (None: all but the first) is replaced and moved later, alone and with
    all tokens after it; every row strictly before its time must be bit-identical.
    """
    before = apply(x, times, mask)
    length = times.shape[1]
    for n in range(1, length) if positions is None else positions:
        for stop in sorted({n + 1, length}):
            changed, moved = x.clone(), times.clone()
            changed[:, n:stop] = 3.0 - 2.0 * changed[:, n:stop]
            if stop == length:
                moved[:, n:] += 0.37
            else:
                moved[:, n] = 0.5 * (moved[:, n] + moved[:, n + 1])
            differs = (apply(changed, moved, mask)[:, :n] != before[:, :n]).flatten(2).any(dim=2)
            earlier = times[:, :n] < times[:, n : n + 1]
            leaks = (differs & earlier & (True if mask is None else mask[:, :n])).nonzero()
            assert not len(leaks), (
                f"tokens {n}..{stop - 1} reach the past: row {int(leaks[0, 1])} of series "
                f"{int(leaks[0, 0])} changes ({len(leaks)} rows in all)"
            )


@torch.no_grad()
def assert_padding_invariant(
    apply: Apply,
    x: Tensor,
    times: Tensor,
    mask: Mask = None,
    *,
    extra: int = 3,
    tolerance: float = 1e-12,
) -> None:
    """Check that `extra` tokens of padding, NaN or huge numbers, change no present row."""
    mask = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
    before = apply(x, times, mask)
    pad = torch.nn.functional.pad
    longer = pad(mask, (0, extra), value=False)
    for junk in (torch.nan, torch.inf, -1e30):
        padded_x = torch.where(longer[..., None], pad(x, (0, 0, 0, extra)), junk)
        after = apply(padded_x, torch.where(longer, pad(times, (0, extra)), junk), longer)
        assert after.isfinite().all(), f"padding of {junk} reaches the output, which is not finite"
        error = relative_error(after[:, : x.shape[1]][mask], before[mask])
        assert error <= tolerance, f"padding of {junk} changes present rows by {error:.3g}"


@torch.no_grad()
def assert_time_shift_invariant(
    apply: Apply,
    x: Tensor,
    times: Tensor,
    mask: Tensor | None = None,
    *,
    shift: float = 64.0,
    tolerance: float = 1e-10,
) -> None:
    """Check that a constant `shift` of all times changes nothing beyond rounding."""
    error = relative_error(apply(x, times + shift, mask), apply(x, times, mask))
    assert error <= tolerance, f"a shift of all times by {shift} changes the output by {error:.3g}"


@torch.no_grad()
def assert_batch_order_invariant(
    apply: Apply, x: Tensor, times: Tensor, mask: Tensor | None = None, *, tolerance: float = 1e-12
) -> None:
    """Check that a series gives the same rows at another position in the batch."""
    after = apply(x.flip(0), times.flip(0), None if mask is None else mask.flip(0)).flip(0)
    error = relative_error(after, apply(x, times, mask))
    assert error <= tolerance, f"the order of the batch changes the output by {error:.3g}"
