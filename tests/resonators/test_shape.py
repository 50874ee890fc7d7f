"""Shapes: filters are the responses that they claim to be, pooled as loops would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from osciformer.data.batches import collate
from osciformer.ops import oscillator_response
from osciformer.resonators import shape
from osciformer.resonators.shape import GROUP, MOST_VARIABLES, POOL, Shape, _draw_mixes, _pool

from .cases import fitted, ragged


def ride(
    times: np.ndarray, values: np.ndarray, omega: float, zeta: float, reads: np.ndarray
) -> np.ndarray:
    """Return x and x' / omega [2, M] by a general solver, from rest at the first value."""

    def motion(t: float, z: np.ndarray) -> list[float]:
        push = omega**2 * (np.interp(t, times, values) - z[0]) - 2 * zeta * omega * z[1]
        return [z[1], push]

    settings = {"rtol": 1e-8, "atol": 1e-9, "max_step": 0.05}
    found = solve_ivp(motion, reads[[0, -1]], [values[0], 0.0], t_eval=reads, **settings)
    return found.y / np.array([[1.0], [omega]])


def test_the_basis_rides_on_the_series_forwards_and_backwards() -> None:
    series = ragged(3)
    family = fitted(Shape, series)
    bases = dict(family._bases(series))
    scale, which, variable = 3, 1, 0
    omega = 2 * np.pi / family.arrays["period"][scale, which]
    zeta = 0.5 / family.arrays["q"][scale, which]
    one = series[1:2]
    reads = np.linspace(one.times[0], one.times[-1], int(family.arrays["readings"]))
    seen = ~np.isnan(one.values[:, variable])
    times, values = one.times[seen], one.values[seen, variable].astype(float)
    ahead = ride(times, values, omega, zeta, reads)
    back = ride(-times[::-1], values[::-1], omega, zeta, -reads[::-1])[:, ::-1]
    wanted = np.stack((*ahead, *back))
    # Position and velocity of all oscillators forwards, then backwards.
    places = [which + shape.NUM_OSCILLATORS * k for k in range(4)]
    found = bases[0, scale][places, variable, 1].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    # Driven by rates: x' / omega, and x'' / omega^2 from the equation of motion.
    drives = np.interp(reads, times, values)
    wanted = [z for x, v in (ahead, back) for z in (v, drives - x - 2 * zeta * v)]
    np.testing.assert_allclose(bases[1, scale][places, variable, 1].numpy(), wanted, atol=2e-4)


def test_rates_are_those_of_the_operator() -> None:
    series = ragged(3)
    family = fitted(Shape, series)
    bases, scale = dict(family._bases(series)), 5
    batch = collate(series)
    omega = torch.from_numpy(2 * np.pi / family.arrays["period"][scale])
    zeta = torch.from_numpy(0.5 / family.arrays["q"][scale])
    steps = np.linspace(0.0, 1.0, int(family.arrays["readings"]))
    first, last = series.times[series.offsets[:-1]], series.times[series.offsets[1:] - 1]
    reads = torch.from_numpy(first[:, None] + (last - first)[:, None] * steps)
    x, v = oscillator_response(
        batch.values.double(),
        batch.times,
        omega,
        zeta,
        of="rate",
        mask=batch.mask,
        query_times=reads,
        backend="reference",
    )
    wanted = torch.cat((x, v / omega), dim=-1).permute(3, 2, 0, 1)
    found = bases[1, scale][: 2 * shape.NUM_OSCILLATORS].double()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_filters_are_mixes_of_the_basis() -> None:
    series = ragged(3)
    family = fitted(Shape, series)
    for number, basis in family._bases(series):
        found = family._filtered(basis, number, slice(2, 5)).numpy()
        for place, filtered in zip(range(2, 5), found, strict=True):
            weight, mix = (family.arrays[name][number][place] for name in ("weight", "mix"))
            wanted = sum(
                weight[b] * mix[f] * basis[b, f].numpy() for b, f in np.ndindex(*basis.shape[:2])
            )
            np.testing.assert_allclose(filtered, wanted, atol=1e-4)


def test_pooling_is_what_its_statistics_say() -> None:
    generator = torch.Generator().manual_seed(0)
    responses = torch.randn(2 * GROUP, 3, 11, generator=generator)
    level = torch.randn(2 * GROUP, generator=generator)
    level[0] = 99.0  # never above
    found = _pool(responses.clone(), level).numpy()
    table, place = responses.numpy().astype(float), np.linspace(0.0, 1.0, 11)
    for k, n in np.ndindex(2 * GROUP, 3):
        row, rivals = table[k, n], table[k // GROUP * GROUP : k // GROUP * GROUP + GROUP, n]
        above = [m for m in range(11) if row[m] > level[k]]
        wins = sum(row[m] for m in range(11) if row[m] == max(rivals[:, m])) / 11
        losses = sum(row[m] == min(rivals[:, m]) for m in range(11)) / 11
        wanted = (
            len(above) / 11,
            np.mean([row[m] - float(level[k]) for m in above]) if above else 0.0,
            np.mean(place[above]) if above else 0.0,
            np.sqrt(max(wins, 0.0)),
            np.sqrt(losses),
        )
        np.testing.assert_allclose(found[k, :, n], wanted, atol=1e-5)


def test_levels_lie_within_the_responses_to_the_sample() -> None:
    series = ragged()
    family = fitted(Shape, series)
    for number, basis in family._bases(series):
        responses = family._filtered(basis, number, slice(None)).flatten(1)
        level = torch.from_numpy(family.arrays["level"][number])
        assert (level >= responses.amin(1) - 1e-5).all()
        assert (level <= responses.amax(1) + 1e-5).all()
        assert (responses.std(1) > 0).all()


@pytest.mark.parametrize("variables", [1, 2, 9, 40])
def test_mixes_are_of_length_one_and_few_variables(variables: int) -> None:
    mixes = _draw_mixes(np.random.default_rng(0), (2, 3, 64), variables)
    np.testing.assert_allclose(np.linalg.norm(mixes, axis=-1), 1.0, rtol=1e-6)
    used = mixes != 0
    assert used.sum(axis=-1).max() <= min(variables, MOST_VARIABLES)
    assert used.any(axis=(0, 1, 2)).all()
    together = used.reshape(2, 3, -1, shape._NEIGHBOURS, variables).any(axis=3)
    assert together.sum(axis=-1).max() <= POOL
