from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.math.spectrum import (
    damped_frequency,
    decay_rate,
    init_omega,
    init_zeta,
    omega_from_raw,
    raw_from_omega,
    raw_from_zeta,
    regime,
    zeta_from_raw,
)

PAIRS = {"omega": (omega_from_raw, raw_from_omega), "zeta": (zeta_from_raw, raw_from_zeta)}


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("name", PAIRS)
@given(value=st.floats(1e-12, 1e6))
def test_value_survives_the_round_trip(name: str, value: float) -> None:
    forward, inverse = PAIRS[name]
    # exp turns an absolute rounding of the raw value (up to 28) into a relative one.
    assert float(forward(inverse(scalar(value)))) == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("name", PAIRS)
@given(raw=st.floats(-25, 12))
def test_raw_survives_the_round_trip(name: str, raw: float) -> None:
    forward, inverse = PAIRS[name]
    assert float(inverse(forward(scalar(raw)))) == pytest.approx(raw, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("raw", [-700.0, -30.0, 0.0, 21.0, 35.0, 500.0])
def test_zeta_equals_the_logarithm_in_many_digits(raw: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(400):
        exact = float(mpmath.log1p(mpmath.exp(raw)))
    assert float(zeta_from_raw(scalar(raw))) == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("direction", [0, 1], ids=["from-raw", "to-raw"])
def test_parametrisation_gradients(name: str, direction: int) -> None:
    points = torch.tensor([1e-3, 0.05, 0.4, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PAIRS[name][direction], points, eps=1e-8)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_raw_values_keep_finite_gradients(name: str, dtype: torch.dtype) -> None:
    raw = torch.tensor([-10.0, 0.0, 10.0], dtype=dtype, requires_grad=True)
    value = PAIRS[name][0](raw)
    assert value.dtype == dtype
    assert (value > 0).all()
    value.sum().backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("name", PAIRS)
def test_refused_values_are_named(name: str, value: float) -> None:
    values = torch.tensor([[1.0, 1.0], [value, 1.0]])
    with pytest.raises(ValueError, match=rf"{name}\[1, 0\] = {value}.*fixed buffer"):
        PAIRS[name][1](values)


def test_decay_rate_is_the_product() -> None:
    omega, zeta = torch.rand(4, 1).double(), torch.rand(3).double()
    assert torch.equal(decay_rate(omega, zeta), zeta * omega)


@pytest.mark.parametrize("zeta", [0.0, 0.3, 0.999999, 1.0, 1.5])
def test_damped_frequency_is_the_imaginary_part_of_the_eigenvalues(zeta: float) -> None:
    omega = 3.0
    matrix = torch.tensor([[0.0, 1.0], [-(omega**2), -2 * zeta * omega]], dtype=torch.float64)
    expected = float(torch.linalg.eigvals(matrix).imag.abs().max())
    # A double eigenvalue is only found to the square root of the precision.
    assert float(damped_frequency(scalar(omega), scalar(zeta))) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("zeta", [0.0, 0.5, 1.0, 2.0])
def test_damped_frequency_has_finite_gradients(zeta: float) -> None:
    omega, ratio = scalar(2.0).requires_grad_(), scalar(zeta).requires_grad_()
    gradients = torch.autograd.grad(damped_frequency(omega, ratio), (omega, ratio))
    assert all(g.isfinite() for g in gradients)
    if zeta >= 1:
        assert all(g == 0 for g in gradients)


def test_regime_is_the_sign_of_decay_minus_frequency() -> None:
    omega = torch.tensor([[0.5], [2.0]]).double()
    zeta = torch.tensor([0.0, 0.4, 1.0, 1.0001, 7.0]).double()
    expected = torch.sign(decay_rate(omega, zeta) - omega).long()
    assert torch.equal(regime(omega, zeta), expected)
    assert torch.equal(regime(omega, zeta, tolerance=0.01)[0], torch.tensor([-1, -1, 0, 0, 1]))


def test_zero_frequency_counts_as_critical() -> None:
    assert torch.equal(regime(torch.zeros(2), torch.tensor([0.1, 5.0])), torch.tensor([0, 0]))


@given(
    low=st.floats(1e-6, 1.0),
    ratio=st.floats(1.0, 1e6),
    seed=st.integers(0, 2**31),
    shape=st.lists(st.integers(0, 5), max_size=3),
)
def test_draws_stay_in_range(low: float, ratio: float, seed: int, shape: list[int]) -> None:
    for draw in (init_omega, init_zeta):
        values = draw(shape, low, low * ratio, torch.Generator().manual_seed(seed))
        assert values.shape == tuple(shape)
        assert values.dtype == torch.get_default_dtype()
        assert (values >= low * (1 - 1e-6)).all()
        assert (values <= low * ratio * (1 + 1e-6)).all()
        again = draw(shape, low, low * ratio, torch.Generator().manual_seed(seed))
        assert torch.equal(values, again)


def test_omega_is_uniform_in_the_logarithm_and_zeta_in_itself() -> None:
    omega = init_omega((20000,), 0.01, 10.0, torch.Generator().manual_seed(0))
    zeta = init_zeta((20000,), generator=torch.Generator().manual_seed(0))
    for share, values in (
        ((omega.log() - math.log(0.01)) / math.log(1000), "omega"),
        ((zeta - 0.05) / 0.35, "zeta"),
    ):
        quantiles = share.double().quantile(torch.tensor([0.1, 0.5, 0.9]).double())
        # The standard error of a decile of 20000 draws is below 0.004.
        assert quantiles.tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.015), values


@pytest.mark.parametrize("draw", [init_omega, init_zeta])
@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (-1.0, 1.0), (1.0, math.inf)])
def test_wrong_ranges_are_named(draw, low: float, high: float) -> None:
    with pytest.raises(ValueError, match=rf"low={low}, high={high}"):
        draw((2,), low, high)


def test_omega_range_excludes_zero() -> None:
    with pytest.raises(ValueError, match=r"0 < low"):
        init_omega((2,), 0.0, 1.0)
