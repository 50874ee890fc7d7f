"""Laws of the response: what physics says whatever the numbers are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from osciformer.ops import Response, oscillator_response

from .response_cases import DOUBLE, MODES, make_case

seeds = st.integers(0, 10_000)
modes = st.sampled_from(MODES)


def response(values, times, omega, zeta, mode, **options):
    drive, of = mode
    return oscillator_response(values, times, omega, zeta, drive=drive, of=of, **options)


def assert_equal(found, wanted, tolerance=1e-9):
    for a, b in zip(found, wanted, strict=True):
        scale = b.abs().amax(dim=(0, 1, 2)).clamp(min=1e-12)
        assert ((a - b).abs() / scale).max() < tolerance


def law(*strategies):
    """Few examples: each has every regime in it."""
    return lambda test: settings(max_examples=12)(given(*strategies)(test))


@law(seeds, modes)
def test_linear_in_the_values(seed, mode):
    values, times, omega, zeta = make_case(seed=seed)
    other = torch.where(values.isnan(), values, torch.randn_like(values))
    a, b = (response(x, times, omega, zeta, mode) for x in (values, other))
    both = response(2.0 * values - 3.0 * other, times, omega, zeta, mode)
    assert_equal(both, [2.0 * x - 3.0 * y for x, y in zip(a, b, strict=True)], 1e-8)


@law(seeds, modes)
def test_the_clock_may_start_anywhere(seed, mode):
    values, times, omega, zeta = make_case(seed=seed, smallest=1e-2)
    moved = response(values, times + 64.0, omega, zeta, mode)
    assert_equal(moved, response(values, times, omega, zeta, mode), 1e-7)


@law(seeds, modes, st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(seed, mode, unit):
    values, times, omega, zeta = make_case(seed=seed)
    x, v = response(values, times * unit, omega / unit, zeta, mode)
    assert_equal((x, v * unit), response(values, times, omega, zeta, mode))


@law(seeds, st.floats(0.05, 0.95))
def test_a_point_on_the_line_changes_nothing(seed, share):
    values, times, omega, zeta = make_case(seed=seed, smallest=1e-2)
    mode = ("linear", ("value", "rate")[seed % 2])
    plain = response(values, times, omega, zeta, mode)
    middle = torch.lerp(times[:, 7:8], times[:, 8:9], share)
    value = torch.lerp(values[:, 7:8], values[:, 8:9], share)  # NaN next to a missing one
    more = torch.cat([values[:, :8], value, values[:, 8:]], dim=1)
    found = response(
        more, torch.cat([times[:, :8], middle, times[:, 8:]], dim=1), omega, zeta, mode
    )
    kept = [torch.cat([z[:, :8], z[:, 9:]], dim=1) for z in found]
    assert_equal(kept, plain)


@law(seeds, st.sampled_from([m for m in MODES if m[0] != "linear"]))
def test_the_past_does_not_see_the_future(seed, mode):
    values, times, omega, zeta = make_case(seed=seed)
    values[:, 0] = 1.0  # a constant past is known from the first value
    changed = values.clone()
    changed[:, 8:] = torch.randn(2, 4, 2, dtype=DOUBLE)
    later = torch.cat([times[:, :8], times[:, 8:] + 1.0], dim=1)
    a = response(values, times, omega, zeta, mode)
    b = response(changed, later, omega, zeta, mode)
    assert_equal([z[:, :8] for z in b], [z[:, :8] for z in a], 1e-13)


@law(seeds, modes)
def test_a_series_may_be_cut_anywhere(seed, mode):
    values, times, omega, zeta = make_case(seed=seed, missing=0.0)
    whole = response(values, times, omega, zeta, mode)
    x, v = (z[:, 5] for z in whole)
    if mode[0] == "impulse":
        v = v - omega * values[:, 5, :, None]  # the row is about to act again
    rest = response(values[:, 5:], times[:, 5:], omega, zeta, mode, initial=Response(x, v))
    assert_equal(rest, [z[:, 5:] for z in whole])


@law(seeds, modes)
def test_rows_without_values_change_nothing(seed, mode):
    values, times, omega, zeta = make_case(seed=seed)
    found = response(
        pad(values, (0, 0, 0, 3), value=torch.nan),
        pad(times, (0, 3), value=torch.nan),
        omega,
        zeta,
        mode,
        mask=pad(torch.ones(2, 12, dtype=torch.bool), (0, 3)),
    )
    assert_equal([z[:, :12] for z in found], response(values, times, omega, zeta, mode), 1e-13)
