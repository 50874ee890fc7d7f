from __future__ import annotations

import pytest
import torch

from osciformer.ops.attention.drive import Drive

H, MODES, C = 3, 2, 4


def test_missing_gains_are_zero_and_a_missing_role_is_not_driven():
    gain = torch.randn(H, MODES, C)
    drive = Drive(torch.rand(MODES), key_sin=gain)
    omega, cos, sin = drive.gains("key")
    assert omega.shape == (H, MODES)
    assert torch.equal(cos, torch.zeros_like(gain))
    assert torch.equal(sin, gain)
    assert drive.gains("value") is None


def test_frequencies_may_differ_between_heads():
    omega = torch.rand(H, MODES)
    assert torch.equal(Drive(omega, value_cos=torch.rand(H, MODES, C)).gains("value")[0], omega)


def test_integer_frequencies_are_refused():
    with pytest.raises(TypeError, match=r"drive.omega must be a floating-point tensor.*int64"):
        Drive(torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("omega", "gain", "message"),
    [
        (torch.rand(2, 2, 2), torch.rand(H, 2, C), r"drive.omega must have shape \[Md\]"),
        (torch.rand(3), torch.rand(H, 2, C), r"drive.key_cos .*Md = 3.*got \[3, 2, 4\]"),
        (torch.rand(2, 2), torch.rand(H, 2, C), r"drive.key_cos .*got \[3, 2, 4\]"),
    ],
)
def test_mismatched_gains_are_named(omega, gain, message):
    with pytest.raises(ValueError, match=message):
        Drive(omega, key_cos=gain)
