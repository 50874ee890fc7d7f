from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from osciformer.math.banks import frequency_bank
from osciformer.math.basis import design_matrix, prefix_ridge_fit, ridge_fit

B, M, H, C = 2, 23, 3, 4
FITS = {"global": ridge_fit, "prefix": prefix_ridge_fit}
BANKS = {
    "log_spaced": frequency_bank("log_spaced", 8),
    "harmonics": frequency_bank("harmonics", 5, length=2.0),
    "one": frequency_bank("linear", 1, low=1.0, high=2.0),
}


def tokens(num: int = M, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    q = torch.randn(B, num, H, C, generator=generator, dtype=torch.float64)
    times = torch.rand(B, num, generator=generator, dtype=torch.float64).sort(-1).values * 2
    return q.to(dtype), times.to(dtype)


def least_squares(q: Tensor, times: Tensor, omega: Tensor, ridge: float) -> Tensor:
    """Solve [Phi; sqrt(n rho) I] theta = [Q; 0] for one series, without a Gram matrix."""
    n, modes = len(times), 2 * len(omega)
    phase = np.outer(times.numpy(), omega.numpy())
    system = np.vstack([np.hstack([np.cos(phase), np.sin(phase)]), np.eye(modes)])
    system[n:] *= math.sqrt(n * ridge)
    target = np.vstack([q.flatten(1).numpy(), np.zeros((modes, H * C))])
    return torch.from_numpy(np.linalg.lstsq(system, target, rcond=None)[0])


def stacked(cos: Tensor, sin: Tensor) -> Tensor:
    """Return [..., 2J, H*C] coefficients from the two parts [..., H, J, C]."""
    return torch.cat((cos, sin), dim=-2).movedim(-3, -2).flatten(-2)


def test_design_matrix_has_cosines_then_sines() -> None:
    times, omega = torch.rand(2, 3).double(), torch.tensor([0.5, 4.0]).double()
    design = design_matrix(times, omega)
    for b, n, j in np.ndindex(2, 3, 2):
        phase = float(times[b, n] * omega[j])
        assert design[b, n, [j, 2 + j]].tolist() == pytest.approx(
            [math.cos(phase), math.sin(phase)], abs=1e-15
        )


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("bank", BANKS)
def test_global_fit_equals_augmented_least_squares(bank: str, ridge: float) -> None:
    q, times = tokens()
    theta = stacked(*ridge_fit(q, times, BANKS[bank], ridge=ridge))
    for b in range(B):
        expected = least_squares(q[b], times[b], BANKS[bank], ridge)
        scale = max(1.0, float(expected.abs().max()))
        assert (theta[b] - expected).abs().max() <= 1e-8 * scale


@pytest.mark.parametrize("ridge", [1e-2, 1e-4])
@pytest.mark.parametrize("bank", BANKS)
def test_prefix_fit_equals_augmented_least_squares_of_every_prefix(bank: str, ridge: float) -> None:
    q, times = tokens()
    theta = stacked(*prefix_ridge_fit(q, times, BANKS[bank], ridge=ridge))
    for b, j in np.ndindex(B, M):
        expected = least_squares(q[b, : j + 1], times[b, : j + 1], BANKS[bank], ridge)
        assert (theta[b, j] - expected).abs().max() <= 1e-8


def test_last_row_of_the_prefix_fit_is_the_global_fit() -> None:
    q, times = tokens()
    omega = BANKS["log_spaced"]
    rows, whole = prefix_ridge_fit(q, times, omega), ridge_fit(q, times, omega)
    for row, part in zip(rows, whole, strict=True):
        torch.testing.assert_close(row[:, -1], part, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fit", FITS)
def test_shapes_and_dtype(fit: str) -> None:
    q, times = tokens(dtype=torch.float32)
    rows = (M,) if fit == "prefix" else ()
    for part in FITS[fit](q, times, BANKS["log_spaced"].float()):
        assert part.shape == (B, *rows, H, 8, C)
        assert part.dtype == torch.float64


def test_tied_tokens_see_each_other() -> None:
    q, times = tokens(8)
    times[:, 3:6] = times[:, 3:4]
    omega = BANKS["harmonics"]
    rows = stacked(*prefix_ridge_fit(q, times, omega))
    for b, j in np.ndindex(B, 8):
        seen = 6 if 3 <= j < 6 else j + 1
        expected = least_squares(q[b, :seen], times[b, :seen], omega, 1e-4)
        assert (rows[b, j] - expected).abs().max() <= 1e-8
    assert torch.equal(rows[:, 3], rows[:, 5])


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("filler", [0.0, 1e30, math.nan, math.inf])
def test_padding_changes_nothing(fit: str, filler: float) -> None:
    q, times = tokens(9)
    omega = BANKS["log_spaced"]
    # One absent token before, two inside and one after the present ones.
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool).expand(B, 13)
    padded_q = torch.full((B, 13, H, C), filler, dtype=torch.float64)
    padded_times = torch.full((B, 13), filler, dtype=torch.float64)
    padded_q[mask], padded_times[mask] = q.flatten(0, 1), times.flatten()
    padded_q.requires_grad_()
    padded_times.requires_grad_()
    padded = FITS[fit](padded_q, padded_times, omega, mask=mask)
    for part, expected in zip(padded, FITS[fit](q, times, omega), strict=True):
        seen = part[mask].unflatten(0, (B, 9)) if fit == "prefix" else part
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(sum(p.sin().sum() for p in padded), (padded_q, padded_times))
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert (gradient[~mask] == 0).all()
        assert (gradient[mask] != 0).any()


def test_absent_row_repeats_the_fit_before_it_and_an_empty_prefix_is_zero() -> None:
    q, times = tokens(6)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    cos, sin = prefix_ridge_fit(q, times, BANKS["one"], mask=mask)
    assert (cos[0, :2] == 0).all()
    assert (sin[0, :2] == 0).all()
    assert torch.equal(cos[0, 4], cos[0, 3])
    assert (cos[0, 2:] != 0).all()


@pytest.mark.parametrize("fit", FITS)
def test_series_without_tokens_gives_zeros_and_zero_gradient(fit: str) -> None:
    q, times = (x.requires_grad_() for x in tokens(4))
    mask = torch.zeros(B, 4, dtype=torch.bool)
    parts = FITS[fit](q, times, BANKS["one"], mask=mask)
    assert all((part == 0).all() for part in parts)
    for gradient in torch.autograd.grad(sum(p.sum() for p in parts), (q, times)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("fit", FITS)
@given(shift=st.floats(-50, 50))
def test_path_does_not_depend_on_the_origin_of_time(fit: str, shift: float) -> None:
    q, times = tokens(12)
    omega = BANKS["log_spaced"]
    probe = torch.linspace(0, 2, 17, dtype=torch.float64).expand(B, 17)
    paths = []
    for offset in (0.0, shift):
        theta = stacked(*FITS[fit](q, times + offset, omega))
        design = design_matrix(probe + offset, omega)
        paths.append(design @ theta if fit == "global" else design[:, None] @ theta)
    # The offset itself rounds the times by up to 50 * 1e-16, which 1/ridge magnifies.
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-8, atol=1e-8)


def test_shift_of_the_origin_rotates_every_pair() -> None:
    q, times = tokens(12)
    omega, shift = BANKS["harmonics"], 0.7
    cos, sin = ridge_fit(q, times, omega)
    moved_cos, moved_sin = ridge_fit(q, times + shift, omega)
    c, s = torch.cos(omega * shift)[:, None], torch.sin(omega * shift)[:, None]
    torch.testing.assert_close(moved_cos, c * cos - s * sin, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(moved_sin, s * cos + c * sin, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("row", [0, 1, 10, M - 2])
@pytest.mark.parametrize("what", ["values", "times", "mask", "all"])
def test_later_tokens_never_change_earlier_rows(row: int, what: str) -> None:
    q, times = tokens()
    omega = BANKS["log_spaced"]
    mask = torch.ones(B, M, dtype=torch.bool)
    before = prefix_ridge_fit(q, times, omega, mask=mask)
    if what in ("values", "all"):
        q[:, row + 1 :] = 1e6 * torch.randn_like(q[:, row + 1 :])
    if what in ("times", "all"):
        later = torch.rand_like(times[:, row + 1 :]).sort(-1).values
        times[:, row + 1 :] = times[:, row, None] + 1e-9 + 40 * later
    if what in ("mask", "all"):
        mask[:, row + 1 :: 2] = False
    after = prefix_ridge_fit(q, times, omega, mask=mask)
    for old, changed in zip(before, after, strict=True):
        assert torch.equal(old[:, : row + 1], changed[:, : row + 1])
        assert not torch.equal(old[:, row + 1 :], changed[:, row + 1 :])


def test_rows_have_zero_jacobian_in_later_tokens() -> None:
    q, times = (x.requires_grad_() for x in tokens(7))
    cos, sin = prefix_ridge_fit(q, times, BANKS["harmonics"])
    for j in range(7):
        gradients = torch.autograd.grad(
            (cos[:, j] + 2 * sin[:, j]).sin().sum(), (q, times), retain_graph=True
        )
        for gradient in gradients:
            assert (gradient[:, j + 1 :] == 0).all()
            assert (gradient[:, : j + 1] != 0).any()


@pytest.mark.parametrize("fit", FITS)
def test_float32_tokens_give_the_float64_path(fit: str) -> None:
    q, times = tokens(60)
    omega = BANKS["log_spaced"]
    design = design_matrix(times, omega)
    exact = stacked(*FITS[fit](q, times, omega))
    single = stacked(*FITS[fit](q.float(), times.float(), omega.float()))
    if fit == "prefix":
        design = design[..., None, :]  # every row is read at its own time
    assert (design @ (single - exact)).abs().max() <= 1e-3 * (design @ exact).abs().max()


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("fit", FITS)
def test_gradients_in_tokens_times_and_frequencies(fit: str, masked: bool) -> None:
    q, times = tokens(5)
    q = q[:, :, :2, :1].clone().requires_grad_()
    omega = torch.tensor([0.7, 3.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(B, 5, dtype=torch.bool)
    if masked:
        mask[0, 2] = mask[1, 0] = mask[1, 4] = False
    assert torch.autograd.gradcheck(
        lambda *inputs: FITS[fit](*inputs, ridge=1e-2, mask=mask),
        (q, times.requires_grad_(), omega),
    )


@pytest.mark.parametrize("fit", FITS)
def test_fit_is_linear_in_the_tokens(fit: str) -> None:
    (q, times), other = tokens(10), torch.randn(B, 10, H, C).double()
    omega = BANKS["harmonics"]
    whole = FITS[fit](2 * q - 3 * other, times, omega)
    parts = FITS[fit](q, times, omega), FITS[fit](other, times, omega)
    for total, first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(total, 2 * first - 3 * second, rtol=1e-9, atol=1e-9)


def test_sinusoid_of_the_bank_is_recovered() -> None:
    times = torch.linspace(0, 9, 200, dtype=torch.float64)[None]
    omega = torch.tensor([1.0, 2.5, 4.0], dtype=torch.float64)
    q = (2 * torch.cos(2.5 * times) - 0.5 * torch.sin(4.0 * times))[..., None, None]
    cos, sin = ridge_fit(q, times, omega, ridge=1e-10)
    assert cos.flatten().tolist() == pytest.approx([0, 2, 0], abs=1e-8)
    assert sin.flatten().tolist() == pytest.approx([0, 0, -0.5], abs=1e-8)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("ridge", [0.0, -1.0, 1e-15, math.nan])
def test_ridge_that_cannot_be_solved_is_named(fit: str, ridge: float) -> None:
    q, times = tokens(3)
    with pytest.raises(ValueError, match=rf"ridge must be at least 1e-12 .* got {ridge}"):
        FITS[fit](q, times, BANKS["one"], ridge=ridge)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("num_modes", [8, 16])
def test_smallest_allowed_ridge_has_a_factor_for_slow_modes(fit: str, num_modes: int) -> None:
    q, times = tokens(40)
    omega = frequency_bank("log_spaced", num_modes)
    assert all(p.isfinite().all() for p in FITS[fit](q, times, omega, ridge=1e-12))


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(
    ("q_shape", "times_shape", "omega_shape", "mask_shape", "message"),
    [
        ((2, 5, 1, 1), (2, 4), (3,), None, r"q \(2, 5, 1, 1\) and times \(2, 4\)"),
        ((2, 5, 1, 1), (2, 5), (0,), None, r"at least one frequency; got \(0,\)"),
        ((2, 5, 1, 1), (2, 5), (3,), (2, 6), r"\(2, 5\); got \(2, 6\)"),
    ],
    ids=["times", "omega", "mask"],
)
def test_shape_errors_quote_both_shapes(
    fit: str, q_shape, times_shape, omega_shape, mask_shape, message: str
) -> None:
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool)
    fitted = inspect.unwrap(FITS[fit])  # annotations enforced in tests would object first
    with pytest.raises(ValueError, match=message):
        fitted(torch.ones(q_shape), torch.ones(times_shape), torch.ones(omega_shape), mask=mask)
