from __future__ import annotations

import pytest
import torch
from torch import nn

from osciformer.nn import EncoderBlock, OscillatorAttention, parameter_groups


def names_of(module: nn.Module, parameters) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in module.named_parameters() if id(parameter) in wanted}


def test_spectra_norms_and_biases_are_spared():
    block = EncoderBlock(OscillatorAttention(8, 2, query="anchored", drive_modes=1))
    decayed, spared = (
        names_of(block, group["params"]) for group in parameter_groups(block, weight_decay=0.1)
    )
    assert not decayed & spared
    assert decayed | spared == {name for name, _ in block.named_parameters()}
    for name in spared:
        assert "raw_" in name or "norm" in name or "bias" in name or "constant" in name
    assert {"attention.key_spectrum.raw_omega", "attention.value_spectrum.raw_zeta"} <= spared
    assert {"attention.key_projection.weight", "attention.key_velocity"} <= decayed


def test_an_optimizer_step_without_gradient_leaves_spectra_alone():
    layer = OscillatorAttention(8, 2)
    optimizer = torch.optim.AdamW(parameter_groups(layer, weight_decay=0.5), lr=0.1)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(layer.key_spectrum.raw_omega, before["key_spectrum.raw_omega"])
    assert not torch.equal(layer.key_projection.weight, before["key_projection.weight"])


def test_shared_parameters_occur_once_and_frozen_ones_not_at_all():
    shared, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    groups = parameter_groups(nn.Sequential(shared, shared, frozen), weight_decay=0.1)
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_negative_decay_is_refused():
    with pytest.raises(ValueError, match="weight_decay must not be negative; got -1"):
        parameter_groups(nn.Linear(2, 2), weight_decay=-1.0)
