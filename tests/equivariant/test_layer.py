"""Closed forms against quadrature, limits of the geometry, and the rules of the input."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad_vec, solve_ivp
from scipy.special import spherical_jn
from torch import Tensor

from osciformer.equivariant import (
    AveragedOscillators,
    EquivariantAttention,
    EquivariantOsciFormer,
    Kinds,
    Observations,
    RadialBasis,
    find_neighbours,
)
from osciformer.equivariant.radial import envelope, reduced_bessel

F64 = torch.float64


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def observations(positions: Tensor, times: Tensor | None = None) -> Observations:
    shape = positions.shape[:2]
    times = torch.zeros(shape, dtype=F64) if times is None else times
    points = torch.arange(shape[1]).expand(shape)
    return Observations(positions, times, points, torch.ones(shape, dtype=torch.bool))


def make_layer(kinds: str = "0e+1o") -> EquivariantAttention:
    layer = EquivariantAttention(Kinds(kinds), 4, 2, num_radial=3, omega_range=(0.5, 8.0)).double()
    for name, parameter in layer.named_parameters():
        if "raw" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return layer


def attend(layer: EquivariantAttention, x: Tensor, seen: Observations, **settings: Any) -> Tensor:
    pairs = find_neighbours(seen, seen, RadialBasis("bessel", 3, 2), **{"cutoff": 2.0, **settings})
    return layer(x, x, pairs)


@pytest.mark.parametrize("drive_modes", [0, 2])
def test_averages_are_those_of_the_differential_equation(drive_modes: int) -> None:
    kinds = Kinds("0e+1o")
    settings: dict[str, Any] = {"omega_range": (0.5, 8.0), "zeta_range": (0.05, 1.6)}
    oscillators = AveragedOscillators(kinds, 3, **settings, drive_modes=drive_modes).double()
    gap = 1.7
    pairs = find_neighbours(
        observations(torch.zeros(1, 1, 3, dtype=F64), torch.full((1, 1), gap, dtype=F64)),
        observations(torch.zeros(1, 1, 3, dtype=F64)),
        RadialBasis("bessel", 2, 2),
        cutoff=1.0,
    )
    if drive_modes:
        torch.nn.init.normal_(oscillators.gains)
    start, velocity = random(1, 3, 4), random(1, 3, 4)
    found = oscillators(start, velocity, pairs)[0].detach()

    of = kinds.of_component
    omega, zeta = oscillators.spectrum.omega[:, of], oscillators.spectrum.zeta[:, of]
    omega, gamma = omega.detach().numpy(), (zeta * omega).detach().numpy()
    k, u = start[0].numpy(), velocity[0].numpy()

    def force(s: float) -> Any:
        if oscillators.bank is None:
            return 0.0
        cos, sin = oscillators.gains.detach()[..., of]
        phase = (oscillators.bank.omega * s)[:, None, None]
        return ((cos * phase.cos() + sin * phase.sin()).sum(dim=0)).numpy() * k

    def slope(s: float, state: Any) -> Any:  # position, velocity, integral of the position
        x, v, _ = state.reshape(3, *k.shape)
        return np.stack([v, force(s) - 2 * gamma * v - omega**2 * x, x]).ravel()

    solved = solve_ivp(slope, (0, gap), np.stack([k, u, 0 * k]).ravel(), rtol=1e-11, atol=1e-12)
    expected = solved.y[:, -1].reshape(3, *k.shape)[2] / gap
    assert abs(found.numpy() - expected).max() < 1e-8


def test_logit_is_the_integral_of_its_definition() -> None:
    layer, basis = make_layer(), RadialBasis("bessel", 3, 2)
    row = observations(random(1, 1, 3) / 3, torch.full((1, 1), 1.3, dtype=F64))
    key = observations(random(1, 1, 3) / 3)._replace(points=torch.ones(1, 1, dtype=torch.long))
    pairs = find_neighbours(row, key, basis, cutoff=2.0)
    x, y = random(1, 1, 4, 4), random(1, 1, 4, 4)
    found = layer.logits(x, y, pairs)[0].detach()

    query, bridge = layer.query(x)[0, 0].unflatten(0, (2, 2)), layer.bridge(pairs)[0, :2]
    # The first four channels and the first two heads are those of keys.
    start, velocity = layer.start(y)[0, :, :4], layer.velocity(y)[0, :, :4]
    spectrum, of = layer.oscillators.spectrum, layer.oscillators.of_component
    omega, zeta = spectrum.omega[:4, of], spectrum.zeta[:4, of]

    def integrand(s: float) -> Any:  # underdamped: the range of zeta starts and stays below 1
        gamma, turn = zeta * omega, omega * (1 - zeta**2).sqrt()
        cos, sin = (turn * s).cos(), (turn * s).sin() / turn
        decay = (-gamma * s).exp()
        moved = decay * ((cos + gamma * sin) * start + sin * velocity)
        crossed = torch.einsum("hst,hct->hcs", bridge, moved[0].unflatten(0, (2, 2)))
        return (layer.scale * (query * crossed).sum(dim=(-2, -1))).detach().numpy()

    expected, _ = quad_vec(integrand, 0.0, 1.3, epsabs=1e-12)
    assert abs(found.numpy() - expected / 1.3).max() < 1e-9


@pytest.mark.parametrize("degree", [0, 1, 4])
def test_reduced_bessel_is_scipys(degree: int) -> None:
    x = torch.cat([torch.logspace(-6, 2, 200, dtype=F64), torch.linspace(0.1, 7, 70, dtype=F64)])
    found = reduced_bessel(x, degree)
    for l in range(degree + 1):
        expected = spherical_jn(l, x.numpy()) / x.numpy() ** l
        # scipy itself loses digits of j_l at small arguments.
        clear = x.numpy() > 0.05
        assert abs(found[l].numpy() - expected)[clear].max() < 1e-13
    at_zero = reduced_bessel(torch.zeros(1, dtype=F64), 2).flatten()
    assert torch.allclose(at_zero, torch.tensor([1.0, 1 / 3, 1 / 15], dtype=F64), atol=1e-15)


@pytest.mark.parametrize("name", ["bessel", "gaussian"])
def test_radial_functions_have_height_one_and_slopes_everywhere(name: str) -> None:
    basis = RadialBasis(name, 5, 3)
    distance = torch.linspace(0, 1, 1025, dtype=F64)
    powers = distance[:, None, None] ** torch.arange(4)[:, None]
    assert torch.allclose((basis(distance**2) * powers).abs().amax(dim=0), torch.ones(4, 5).to(F64))
    squared = torch.tensor([0.0, 1e-12, 0.3, 1.0], dtype=F64, requires_grad=True)
    basis(squared).sum().backward()
    assert squared.grad.isfinite().all()


def test_envelope_and_its_slope_end_at_one() -> None:
    x = torch.tensor([0.0, 1.0 - 1e-6, 1.0, 3.0], dtype=F64, requires_grad=True)
    y = envelope(x)
    y.sum().backward()
    assert y[0] == 1.0
    assert y[1:].max() < 1e-17
    assert x.grad[1:].abs().max() < 1e-11


def test_coincident_points_have_finite_results_and_gradients() -> None:
    layer, x = make_layer(), random(1, 3, 4, 4)
    positions = torch.zeros(1, 3, 3, dtype=F64, requires_grad=True)
    out = attend(layer, x, observations(positions))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert positions.grad.isfinite().all()
    # Nothing jumps when they part.
    near = attend(layer, x, observations(1e-7 * random(1, 3, 3)))
    assert (near - out).abs().max() < 1e-4


def test_gradients_are_those_of_differences() -> None:
    layer = make_layer()
    positions = random(1, 3, 3) / 3
    positions[:, 1] = positions[:, 0]  # the first two coincide
    times = torch.tensor([[0.0, 0.4, 1.0]], dtype=F64)
    x = random(1, 3, 4, 4)

    def attended(x: Tensor, positions: Tensor) -> Tensor:
        return attend(layer, x, observations(positions, times))

    inputs = (x.requires_grad_(), positions.requires_grad_())
    assert torch.autograd.gradcheck(attended, inputs, fast_mode=True)


def test_an_isolated_row_gets_the_bias_alone_and_finite_gradients() -> None:
    layer, x = make_layer(), random(1, 2, 4, 4).requires_grad_()
    rows = observations(torch.full((1, 2, 3), 9.0, dtype=F64))
    keys = observations(torch.zeros(1, 2, 3, dtype=F64))
    pairs = find_neighbours(rows, keys, RadialBasis("bessel", 3, 2), cutoff=2.0)
    assert len(pairs.rows) == 0
    out = layer(x, x, pairs)
    out.sum().backward()
    assert torch.equal(out, layer.output(torch.zeros_like(x)))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("what", ["distance", "time"])
def test_leaving_sight_is_continuous(what: str, number: int) -> None:
    layer, x = make_layer(), random(1, number, 4, 4)

    def seen(step: float) -> Tensor:
        apart = 2.0 + step if what == "distance" else 0.0
        late = 1.0 + step if what == "time" else 0.5
        row = observations(
            torch.tensor([[[apart, 0, 0]]], dtype=F64), torch.tensor([[late]]).to(F64)
        )
        places, times = torch.zeros(1, number, 3, dtype=F64), torch.zeros(1, number, dtype=F64)
        places[:, 1:, 0], times[:, 1:] = 1.0, 0.4  # a second one stays in sight
        basis = RadialBasis("bessel", 3, 2)
        pairs = find_neighbours(row, observations(places, times), basis, cutoff=2.0, window=1.0)
        return layer(x[:, :1], x, pairs)

    assert (seen(-1e-4) - seen(1e-4)).abs().max() < (1e-9 if number == 1 else 1e-3)
    assert (seen(-0.5) - seen(1e-4)).abs().max() > 1e-2


def test_the_future_is_not_seen() -> None:
    layer, x = make_layer(), random(1, 3, 4, 4)
    positions, times = random(1, 3, 3) / 4, torch.tensor([[0.0, 1.0, 2.0]], dtype=F64)
    before = attend(layer, x, observations(positions, times))
    x[:, 2] += 1.0
    positions[:, 2] += 0.1
    after = attend(layer, x, observations(positions, times))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def make_model(**settings: Any) -> EquivariantOsciFormer:
    return EquivariantOsciFormer("0e+1o", "1o", **{"channels": 4, "cutoff": 3.0, **settings})


def make_batch() -> dict[str, Tensor]:
    return {
        "x": torch.randn(2, 5, 4),
        "positions": torch.randn(2, 5, 3),
        "times": torch.rand(2, 5),
        "points": torch.tensor([[0, 1, 0, 1, 0]] * 2),
    }


def test_single_precision_agrees_with_double() -> None:
    model, batch = make_model(), make_batch()
    single = model(**batch)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    assert torch.allclose(model.double()(**exact).float(), single, atol=1e-4)


def test_padding_may_hold_anything() -> None:
    model, batch = make_model(), make_batch()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 3] = False
    reads = {"query_points": torch.tensor([[0, 1]] * 2), "query_times": torch.full((2, 2), 2.0)}
    expected = model(**{name: x[:, mask[0]] for name, x in batch.items()}, **reads)
    for name in ("x", "positions", "times"):
        batch[name][:, 3] = torch.nan
    found = model(**batch, mask=mask, **reads)
    assert torch.allclose(found, expected, atol=1e-5)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_read_at_the_time_of_the_last_observation_is_its_state() -> None:
    model, batch = make_model(), make_batch()
    last = batch["times"].argmax(dim=1, keepdim=True)
    reads = {name: batch[name].gather(1, last) for name in ("points", "times")}
    states = model(**batch).take_along_dim(last[..., None], dim=1)
    found = model(**batch, query_points=reads["points"], query_times=reads["times"])
    assert torch.allclose(found, states, atol=1e-6)


def test_a_read_before_the_first_observation_is_zero() -> None:
    reads = {
        "query_points": torch.tensor([[0, 7]] * 2),
        "query_times": torch.tensor([[-1.0, 2]] * 2),
    }
    assert torch.equal(make_model()(**make_batch(), **reads), torch.zeros(2, 2, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": "1o+0e"}, "scalar 0e first"),
        ({"kinds": "2x0e+1o"}, "each irrep once"),
        ({"kinds": "0e"}, "irreps_in has 1o, which is not among kinds='0e'"),
        ({"channels": 6}, "multiple of num_heads; got channels=6, num_heads=4"),
        ({"basis": "splines"}, "one of bessel, gaussian; got 'splines'"),
        ({"num_layers": 0}, "num_layers must be at least 1; got 0"),
        ({"num_radial": 0}, "num_radial must be at least 1; got 0"),
        ({"cutoff": 0.0}, "cutoff must be positive; got 0.0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**settings)


def test_bad_input_is_named() -> None:
    model, batch = make_model(), make_batch()
    with pytest.raises(ValueError, match=r"positions must have shape \[B, N, 3\] = \[2, 5, 3\]"):
        model(**{**batch, "positions": torch.zeros(2, 5, 2)})
    with pytest.raises(ValueError, match="given together"):
        model(**batch, query_times=torch.zeros(2, 1))
    batch["times"][1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"times must be finite; times\[1, 2\] = nan"):
        model(**batch)


def test_without_e3nn_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in sys.modules if x.startswith(("osciformer.equivariant", "e3nn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "e3nn", None)
    with pytest.raises(ImportError, match=r'pip install "osciformer\[equivariant\]"'):
        __import__("osciformer.equivariant")
