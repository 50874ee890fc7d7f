from __future__ import annotations

import math

import pytest
import torch

from osciformer.nn import FrequencyBank, Spectrum


@torch.no_grad()
def test_initial_spectra_lie_in_their_ranges():
    spectrum = Spectrum(4, 500, omega_range=(0.1, 100.0), zeta_range=(0.05, 0.4))
    assert 0.0999 <= float(spectrum.omega.min()) < 0.2
    assert 50.0 < float(spectrum.omega.max()) <= 100.01
    # Log-uniform: half of the draws lie below the geometric mean.
    assert abs(float((spectrum.omega < math.sqrt(10.0)).double().mean()) - 0.5) < 0.05
    assert 0.0499 <= float(spectrum.zeta.min()) < 0.06
    assert 0.39 < float(spectrum.zeta.max()) <= 0.4001


def test_a_generator_decides_the_draw():
    draws = [
        Spectrum(2, 3, omega_range=(1.0, 2.0), generator=torch.Generator().manual_seed(seed)).omega
        for seed in (5, 5, 6)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@torch.no_grad()
def test_reset_moves_the_frequencies_and_keeps_damping_unless_asked():
    spectrum = Spectrum(2, 3, omega_range=(1.0, 2.0))
    zeta = spectrum.zeta
    spectrum.reset((50.0, 60.0))
    assert float(spectrum.omega.min()) > 49.9
    assert torch.equal(spectrum.zeta, zeta)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_leaves_spectra_in_float32(half):
    spectrum = Spectrum(2, 3, omega_range=(1.0, 2.0))
    omega = spectrum.omega
    spectrum.to(half)
    assert spectrum.raw_omega.dtype == torch.float32
    assert torch.equal(spectrum.omega, omega)
    assert spectrum.double().omega.dtype == torch.float64


def test_undamped_zeta_is_a_buffer_of_exact_zeros():
    spectrum = Spectrum(2, 3, omega_range=(1.0, 2.0), undamped=True)
    assert [name for name, _ in spectrum.named_parameters()] == ["raw_omega"]
    assert torch.equal(spectrum.zeta, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [1.0, 4.5, 8.0]),
        ("geometric", [2.0, 4.0, 8.0]),
        ("harmonics", [1.0, 2.0, 3.0]),
        ("log_spaced", [1.0, math.sqrt(8.0), 8.0]),
        ("data", [1.0, math.sqrt(8.0), 8.0]),
    ],
)
def test_a_bank_follows_its_range(kind, expected):
    bank = FrequencyBank(kind, 3, omega_range=(1.0, 8.0))
    torch.testing.assert_close(bank.omega, torch.tensor(expected, dtype=torch.float64))
    bank.reset((2.0, 16.0))
    torch.testing.assert_close(bank.omega, 2.0 * torch.tensor(expected, dtype=torch.float64))


def test_a_bank_is_never_rounded_or_learned():
    bank = FrequencyBank("log_spaced", 5, omega_range=(0.1, 10.0))
    omega = bank.omega.clone()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(bank.to(dtype).omega, omega)
    assert not list(bank.parameters())
