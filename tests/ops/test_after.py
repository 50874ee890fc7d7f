"""Attention some time after each token: against the reference, the oracle and plain sums."""

from __future__ import annotations

import pytest
import torch

from osciformer._types import Tensor
from osciformer.math.oscillator import propagator
from osciformer.ops import oscillator_attention
from osciformer.ops.attention.after import (
    Rows,
    Transition,
    accumulate,
    attend_after,
    compose,
    look_back,
    states_by_lag,
    transition,
)
from osciformer.testing import relative_error

SIZE, HEADS, CHANNELS = 2, 2, 3
WIDTH = HEADS * CHANNELS
# All regimes, slow and fast: underdamped, nearly critical, critical, overdamped, undamped.
OMEGA = torch.tensor([0.3, 2.0, 40.0, 5.0, 1.0, 7.0], dtype=torch.float64)
ZETA = torch.tensor([0.05, 0.999999, 1.0, 2.5, 0.0, 0.4], dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_times(num_tokens: int, ties: bool = False) -> Tensor:
    """Return times with tiny and huge gaps."""
    gaps = torch.exp(2.0 * draw(SIZE, num_tokens, seed=9))
    if ties:
        gaps[:, 3::4] = 0.0
    return gaps.cumsum(dim=1)


def attend(
    q: Tensor,
    starts: list[Tensor],
    times: Tensor,
    gaps: Tensor,
    chunk: int,
    average: bool,
    spectrum: tuple[Tensor, Tensor] = (OMEGA, ZETA),
) -> Tensor:
    """Return `attend_after` of tokens in chunks; the spectra of keys and values are swapped."""
    num_tokens = times.shape[1]
    index = torch.arange(num_tokens)
    ends = torch.cat((times[:, :1], times[:, chunk - 1 :: chunk]), dim=1)
    lags, far = torch.arange(chunk), torch.arange(num_tokens - chunk)
    near_ages = times[..., None] - times[:, (index[:, None] - lags).clamp(min=0)]
    far_ages = times[..., None] - times[:, None, : len(far)]
    rows = Rows(
        gaps,
        torch.where(lags <= index[:, None] % chunk, near_ages, -1.0),
        torch.where(far < (index // chunk * chunk)[:, None], far_ages, -1.0),
    )
    seen, overs = [], []
    swapped = [x.flip(0) for x in spectrum]
    for number, (omega, zeta) in enumerate((spectrum, swapped)):
        seen.append(
            look_back(
                starts[2 * number],
                starts[2 * number + 1],
                transition(times.diff(dim=1, prepend=times[:, :1]), omega, zeta),
                transition(ends.diff(dim=1), omega, zeta),
                chunk=chunk,
                num_heads=HEADS,
            )
        )
        near = transition(gaps, omega, zeta)
        since = transition(times - ends[:, index // chunk], omega, zeta)
        far_over = compose(near, Transition(*(x[:, :, None] for x in since)))
        overs.append(
            tuple(
                Transition(*(x.unflatten(-1, (HEADS, CHANNELS)) for x in over))
                for over in (near, far_over)
            )
        )
    return attend_after(q, *seen, rows, *overs, scale=CHANNELS**-0.5, average=average)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("backend", "num_tokens", "chunk"),
    [("reference", 1, 1), ("reference", 12, 4), ("reference", 7, 1), ("oracle", 4, 2)],
)
def test_rows_are_those_of_the_operator(
    backend: str, average: bool, num_tokens: int, chunk: int
) -> None:
    times = draw_times(num_tokens)
    # Before the next token, so that a row sees the same tokens by its time as by its index.
    waits = times.diff(dim=1, append=times[:, -1:] + 3.0)
    gaps = waits[..., None] * torch.tensor([0.0, 1e-9, 0.4, 0.99], dtype=torch.float64)
    q = draw(SIZE, num_tokens, 4, HEADS, CHANNELS, seed=1).requires_grad_()
    starts = [draw(SIZE, num_tokens, WIDTH, seed=n).requires_grad_() for n in (2, 3, 4, 5)]
    out = attend(q, starts, times, gaps, chunk, average)
    by_head = [x.unflatten(-1, (HEADS, CHANNELS)) for x in starts]
    spectra = [x.reshape(HEADS, CHANNELS) for x in (OMEGA, ZETA, OMEGA.flip(0), ZETA.flip(0))]
    want = oscillator_attention(
        q.flatten(1, 2),
        by_head[0],
        by_head[2],
        (times[..., None] + gaps).flatten(1),
        times,
        key_omega=spectra[0],
        key_zeta=spectra[1],
        value_omega=spectra[2],
        value_zeta=spectra[3],
        key_velocity=by_head[1],
        value_velocity=by_head[3],
        value="average" if average else "point",
        backend=backend,
    ).unflatten(1, (num_tokens, 4))
    torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-8)
    weight = draw(*out.shape, seed=8)
    found = torch.autograd.grad((out * weight).sum(), [q, *starts])
    wanted = torch.autograd.grad((want * weight).sum(), [q, *starts])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


OFFSETS = ((-1e-3, -1e-6, -1e-9, 0.0, 1e-9, 1e-3), (-1e-5, -4e-7, -1e-12, 1e-12, 6e-7, 1e-5))


@pytest.mark.parametrize("offsets", OFFSETS, ids=["near", "nearer"])
@pytest.mark.parametrize("average", [True, False], ids=["average", "point"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_the_oracle_agrees_through_critical_damping(
    dtype: torch.dtype, average: bool, offsets: tuple[float, ...]
) -> None:
    """Outputs and all gradients, those of frequencies and damping ratios included."""
    num_tokens, chunk = 4, 2
    times = torch.tensor([[0.0, 0.3, 1.0, 3.0]], dtype=torch.float64)
    waits = times.diff(dim=1, append=times[:, -1:] + 3.0)
    gaps = waits[..., None] * torch.tensor([0.0, 0.4, 0.99], dtype=torch.float64)
    times, gaps = times.to(dtype), gaps.to(dtype)
    q = draw(1, num_tokens, 3, HEADS, CHANNELS, seed=1).to(dtype).requires_grad_()
    starts = [draw(1, num_tokens, WIDTH, seed=n).to(dtype).requires_grad_() for n in (2, 3, 4, 5)]
    omega = torch.tensor([0.3, 2.0, 12.0, 5.0, 1.0, 7.0], dtype=torch.float64).requires_grad_()
    zeta = (1.0 + torch.tensor(offsets, dtype=torch.float64)).requires_grad_()
    out = attend(q, starts, times, gaps, chunk, average, (omega, zeta))
    by_head = [x.unflatten(-1, (HEADS, CHANNELS)) for x in starts]
    spectra = [x.reshape(HEADS, CHANNELS) for x in (omega, zeta, omega.flip(0), zeta.flip(0))]
    want = oscillator_attention(
        q.flatten(1, 2),
        by_head[0],
        by_head[2],
        (times.double()[..., None] + gaps.double()).flatten(1),
        times.double(),
        key_omega=spectra[0],
        key_zeta=spectra[1],
        value_omega=spectra[2],
        value_zeta=spectra[3],
        key_velocity=by_head[1],
        value_velocity=by_head[3],
        value="average" if average else "point",
        backend="oracle",
    ).unflatten(1, (num_tokens, 3))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative_error(out, want) <= tolerance
    weight = draw(*out.shape, seed=8)
    inputs = [q, *starts, omega, zeta]
    found = torch.autograd.grad((out * weight).sum(), inputs)
    for got, wanted in zip(found, torch.autograd.grad((want * weight).sum(), inputs), strict=True):
        assert relative_error(got, wanted) <= 10 * tolerance


@pytest.mark.parametrize("average", [True, False])
def test_chunks_make_no_difference_even_at_ties_and_beyond_the_next_token(average: bool) -> None:
    times = draw_times(12, ties=True)
    gaps = torch.tensor([0.0, 0.7, 50.0], dtype=torch.float64).expand(SIZE, 12, 3)
    q = draw(SIZE, 12, 3, HEADS, CHANNELS, seed=1)
    starts = [draw(SIZE, 12, WIDTH, seed=n) for n in (2, 3, 4, 5)]
    whole = attend(q, starts, times, gaps, 12, average)
    for chunk in (1, 3, 6):
        part = attend(q, starts, times, gaps, chunk, average)
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-11)


def test_a_row_sees_no_later_token_bit_for_bit() -> None:
    times = draw_times(8)
    gaps = torch.tensor([0.0, 100.0], dtype=torch.float64).expand(SIZE, 8, 2)
    q = draw(SIZE, 8, 2, HEADS, CHANNELS, seed=1)
    starts = [draw(SIZE, 8, WIDTH, seed=n) for n in (2, 3, 4, 5)]
    before = attend(q, starts, times, gaps, 4, True)
    later, changed = times.clone(), [x.clone() for x in starts]
    later[:, 5:] += 1.0
    for x in changed:
        x[:, 5:] *= -2.0
    after = attend(q, changed, later, gaps, 4, True)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_transitions_compose_and_start_at_the_identity() -> None:
    first, second = draw_times(1)[:, 0], 0.3 * draw_times(1)[:, 0]
    both = compose(transition(second, OMEGA, ZETA), transition(first, OMEGA, ZETA))
    for a, b in zip(both, transition(first + second, OMEGA, ZETA), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_single_precision_is_reached_by_plain_formulas() -> None:
    gaps = torch.logspace(-6, 3, 60, dtype=torch.float64)
    spectra = [x.clone().requires_grad_() for x in (OMEGA, ZETA)]
    exact = transition(gaps.float().double(), *spectra)
    plain = transition(gaps.float(), *spectra)
    # Of each entry, what it is multiplied with: a velocity is about omega times a position.
    sizes = (gaps[:, None], gaps[:, None] / OMEGA, 1.0, 1 / OMEGA, OMEGA, 1.0)
    for a, b, size in zip(plain, exact, sizes, strict=True):
        assert a.dtype == torch.float32
        assert ((a - b).abs() / size).max() < 3e-6
        slopes = [torch.autograd.grad((x / size).sum(), spectra, retain_graph=True) for x in (a, b)]
        for one, other in zip(*slopes, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16])
def test_kicks_add_up_to_the_sum_over_tokens(num_tokens: int) -> None:
    times = draw_times(num_tokens)
    position, velocity = (draw(SIZE, num_tokens, WIDTH, seed=n) for n in (1, 2))
    over = transition(times.diff(dim=1, prepend=times[:, :1]), OMEGA, ZETA)
    found = accumulate(position, velocity, over)
    ages = times[:, :, None] - times[:, None]
    g11, g12, g21, g22 = propagator(ages.clamp(min=0)[..., None], OMEGA, ZETA)
    is_past = (ages >= 0)[..., None]
    wanted = (
        (is_past * (g11 * position[:, None] + g12 * velocity[:, None])).sum(dim=2),
        (is_past * (g21 * position[:, None] + g22 * velocity[:, None])).sum(dim=2),
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_lags", [1, 3, 5, 8])
def test_lags_hold_what_each_token_has_become(num_lags: int) -> None:
    times = draw_times(8)
    position, velocity = (draw(SIZE, 8, WIDTH, seed=n) for n in (1, 2))
    over = transition(times.diff(dim=1, prepend=times[:, :1]), OMEGA, ZETA)
    known = states_by_lag(position, velocity, over, num_lags)
    assert known.position.shape == (SIZE, 8, num_lags, WIDTH)
    for lag in range(num_lags):
        moved = transition(times[:, lag:] - times[:, : 8 - lag], OMEGA, ZETA)
        start = position[:, : 8 - lag], velocity[:, : 8 - lag]
        torch.testing.assert_close(
            known.integral[:, lag:, lag],
            moved.i11 * start[0] + moved.i12 * start[1],
            rtol=1e-9,
            atol=1e-11,
        )
        torch.testing.assert_close(
            known.velocity[:, lag:, lag],
            moved.g21 * start[0] + moved.g22 * start[1],
            rtol=1e-9,
            atol=1e-10,
        )
        assert (known.position[:, :lag, lag] == 0).all()
