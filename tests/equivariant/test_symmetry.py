"""Rotations, reflections, shifts and permutations, and what breaks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e3nn import o3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import osciformer.equivariant.irreps as irreps_module
from osciformer.equivariant import (
    Bridge,
    ChannelLinear,
    EquivariantAttention,
    EquivariantOsciFormer,
    Kinds,
    Observations,
    RadialBasis,
    find_neighbours,
)
from osciformer.nn.parameters import Spectrum

IRREPS_IN, IRREPS_OUT = "2x0e+1o", "0e+2x1o"
TOLERANCE = 1e-9
KINDS = ("0e+1o", "0e+0o+1o+1e+2e")


def matrix_of(irreps: Any, rotation: Tensor) -> Tensor:
    """Return how e3nn turns features of `irreps`; in single precision unless that is changed."""
    torch.set_default_dtype(torch.float64)
    try:
        return o3.Irreps(irreps).D_from_matrix(rotation)
    finally:
        torch.set_default_dtype(torch.float32)


def excite(module: nn.Module) -> None:
    """Give the parameters that start at zero a value, so that nothing is tested only at zero."""
    for name, parameter in module.named_parameters():
        if "raw" not in name:
            nn.init.normal_(parameter, std=0.5)


def make_model(kinds: str = "0e+1o", **settings: Any) -> EquivariantOsciFormer:
    chosen: dict[str, Any] = {"channels": 4, "num_heads": 2, "cutoff": 3.0, "num_radial": 3}
    chosen |= {"omega_range": (0.5, 20.0), "drive_modes": 2, **settings}
    model = EquivariantOsciFormer(IRREPS_IN, IRREPS_OUT, kinds=kinds, **chosen).double()
    excite(model)
    return model


def make_inputs(seed: int = 0, batch: int = 2, number: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(batch, number, o3.Irreps(IRREPS_IN).dim),
        "positions": normal(batch, number, 3),
        "times": torch.rand(batch, number, generator=generator, dtype=torch.float64),
        "points": torch.randint(3, (batch, number), generator=generator),
        "mask": torch.rand(batch, number, generator=generator) < 0.9,
        "query_points": torch.tensor([[0, 1, 2, 0]]).expand(batch, -1),
        "query_times": torch.tensor([[0.5, 1.0, 1.5, 2.0]], dtype=torch.float64).expand(batch, -1),
    }


def random_rotation(seed: int, *, improper: bool) -> Tensor:
    draw = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = torch.linalg.qr(draw).Q
    sign = -1.0 if improper else 1.0
    return q * torch.linalg.det(q) * sign


def turned(inputs: dict[str, Tensor], rotation: Tensor, shift: Tensor) -> dict[str, Tensor]:
    matrix = matrix_of(IRREPS_IN, rotation)
    moved = {"x": inputs["x"] @ matrix.T, "positions": inputs["positions"] @ rotation.T + shift}
    return {**inputs, **moved}


def turn_error(model: nn.Module, rotation: Tensor) -> float:
    """Return by how much the result of turned input differs from the turned result."""
    inputs, shift = make_inputs(), torch.tensor([3.0, -20.0, 7.0], dtype=torch.float64)
    expected = model(**inputs) @ matrix_of(IRREPS_OUT, rotation).T
    found = model(**turned(inputs, rotation, shift))
    assert expected.abs().max() > 0.1
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("basis", ["bessel", "gaussian"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("improper", [False, True])
def test_results_turn_and_mirror_with_the_input(kinds: str, basis: str, improper: bool) -> None:
    model = make_model(kinds, basis=basis, window=1.2)
    for seed in range(3):
        assert turn_error(model, random_rotation(seed, improper=improper)) < TOLERANCE


def layer_and_pairs(kinds: str, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return a layer, features of tokens and a function from positions to their neighbours."""
    layer = EquivariantAttention(Kinds(kinds), 4, 2, num_radial=3, drive_modes=1).double()
    excite(layer)
    basis = RadialBasis("bessel", 3, 2 * max(kind.l for kind in Kinds(kinds).all))
    tokens = torch.randn(*inputs["times"].shape, 4, Kinds(kinds).size, dtype=torch.float64)

    def pairs(**changes: Tensor) -> Any:
        names = ("positions", "times", "points", "mask")
        seen = Observations(*({**inputs, **changes}[name] for name in names))
        return find_neighbours(seen, seen, basis, cutoff=3.0)

    return layer, tokens, pairs


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), improper=st.booleans(), kinds=st.sampled_from(KINDS))
def test_logits_are_invariant(seed: int, improper: bool, kinds: str) -> None:
    inputs, rotation = make_inputs(seed), random_rotation(seed, improper=improper)
    layer, tokens, pairs = layer_and_pairs(kinds, inputs)
    before = layer.logits(tokens, tokens, pairs())
    positions = inputs["positions"] @ rotation.T + 5.0
    turned_tokens = tokens @ matrix_of(kinds, rotation).T
    moved = pairs(positions=positions, times=inputs["times"] - 40.0)
    after = layer.logits(turned_tokens, turned_tokens, moved)
    assert (after - before).abs().max() < TOLERANCE


def test_logits_depend_on_direction_and_not_on_distance_alone() -> None:
    inputs = make_inputs()
    layer, tokens, pairs = layer_and_pairs("0e+1o", inputs)
    rotated = pairs(positions=inputs["positions"] @ random_rotation(1, improper=False).T)
    change = layer.logits(tokens, tokens, rotated) - layer.logits(tokens, tokens, pairs())
    assert change.abs().max() > 1e-2


def test_a_bridge_turns_with_its_offset() -> None:
    kinds = "0e+1o+1e+2e"
    bridge, basis = Bridge(Kinds(kinds), 2, 3).double(), RadialBasis("gaussian", 3, 4)
    inputs = make_inputs(number=2)

    def across(rotation: Tensor) -> Tensor:
        positions = inputs["positions"] @ rotation.T
        seen = Observations(positions, inputs["times"], inputs["points"], inputs["mask"])
        return bridge(find_neighbours(seen, seen, basis, cutoff=9.0))

    straight = across(torch.eye(3, dtype=torch.float64))
    for improper in (False, True):
        rotation = random_rotation(2, improper=improper)
        matrix = matrix_of(kinds, rotation)
        assert (across(rotation) - matrix @ straight @ matrix.T).abs().max() < 1e-12


def test_a_shift_of_all_times_changes_nothing() -> None:
    model, inputs = make_model(), make_inputs()
    later = {name: inputs[name] + 1e3 for name in ("times", "query_times")}
    assert (model(**{**inputs, **later}) - model(**inputs)).abs().max() < TOLERANCE


def test_order_of_observations_and_numbers_of_points_do_not_matter() -> None:
    model, inputs = make_model(), make_inputs()
    order = torch.randperm(inputs["times"].shape[1])
    names = ("x", "positions", "times", "points", "mask")
    permuted = {**inputs, **{name: inputs[name][:, order] for name in names}}
    permuted |= {name: 17 - 3 * permuted[name] for name in ("points", "query_points")}
    assert (model(**permuted) - model(**inputs)).abs().max() < TOLERANCE
    del inputs["query_points"], inputs["query_times"], permuted["query_points"]
    del permuted["query_times"]
    assert (model(**permuted) - model(**inputs)[:, order]).abs().max() < TOLERANCE


def test_a_spectrum_for_each_component_breaks_it() -> None:
    model = make_model(drive_modes=0)
    for block in model.blocks:
        size, oscillators = model.kinds.size, block.attention.oscillators
        oscillators.spectrum = Spectrum(8, size, omega_range=(0.5, 20.0)).double()
        oscillators.of_component = torch.arange(size)
    assert turn_error(model, random_rotation(0, improper=False)) > 1e-2


def test_a_bias_on_vectors_breaks_it() -> None:
    model = make_model()
    for module in model.modules():
        if isinstance(module, ChannelLinear):
            module.register_forward_hook(lambda module, inputs, output: output + 0.3)
    assert turn_error(model, random_rotation(0, improper=False)) > 1e-2


def test_the_cross_product_survives_rotations_and_breaks_reflections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_parity(query: Any, key: Any, degree: int) -> bool:
        return abs(query.l - key.l) <= degree <= query.l + key.l

    monkeypatch.setattr(irreps_module, "is_allowed", without_parity)
    model = make_model()
    assert turn_error(model, random_rotation(0, improper=False)) < TOLERANCE
    assert turn_error(model, random_rotation(0, improper=True)) > 1e-2
