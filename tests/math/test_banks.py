from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.math.banks import frequency_bank, frequency_range

TIMES = torch.tensor([[0.0, 0.5, 0.6, 2.0, 4.0], [1.0, 1.3, 1.9, 2.0, 3.0]])
KINDS = {
    "log_uniform": {},
    "log_spaced": {},
    "linear": {},
    "random_uniform": {},
    "geometric": {},
    "harmonics": {"length": 2.5},
    "data": {"times": TIMES},
}
RANDOM = ["log_uniform", "random_uniform"]
# For tests of our own error messages: annotations enforced in tests would object first.
unchecked_bank = inspect.unwrap(frequency_bank)
unchecked_range = inspect.unwrap(frequency_range)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_modes", [1, 2, 8, 33])
def test_bank_is_positive_increasing_float64(kind: str, num_modes: int) -> None:
    bank = frequency_bank(kind, num_modes, **KINDS[kind])
    assert bank.shape == (num_modes,)
    assert bank.dtype == torch.float64
    assert (bank > 0).all()
    assert bank.isfinite().all()
    assert (bank.diff() > 0).all()


@pytest.mark.parametrize("kind", [*RANDOM, "log_spaced", "linear"])
@given(
    low=st.floats(1e-6, 1e3),
    ratio=st.floats(1.0, 1e8),
    num_modes=st.integers(1, 40),
)
def test_bank_stays_within_its_ends(kind: str, low: float, ratio: float, num_modes: int) -> None:
    high = low * ratio
    bank = frequency_bank(kind, num_modes, low=low, high=high)
    assert bank.shape == (num_modes,)
    assert low <= float(bank.min()) <= float(bank.max()) <= high
    assert (bank.diff() >= 0).all()
    if kind not in RANDOM and num_modes > 1:
        assert bank[[0, -1]].tolist() == pytest.approx([low, high], rel=1e-12)


def test_log_spaced_has_equal_ratios_and_linear_equal_steps() -> None:
    ratios = frequency_bank("log_spaced", 7, low=0.01, high=10.0).log().diff()
    assert ratios.tolist() == pytest.approx([math.log(1000) / 6] * 6)
    assert frequency_bank("linear", 4, low=1.0, high=7.0).tolist() == pytest.approx([1, 3, 5, 7])


@given(high=st.floats(1e-3, 1e3), num_modes=st.integers(1, 20))
def test_geometric_bank_is_octaves_downwards_from_high(high: float, num_modes: int) -> None:
    bank = frequency_bank("geometric", num_modes, high=high)
    expected = [high / 2**n for n in reversed(range(num_modes))]
    assert bank.tolist() == pytest.approx(expected, rel=1e-15)


@given(length=st.floats(1e-3, 1e3), num_modes=st.integers(1, 20))
def test_harmonics_vanish_as_sines_at_both_ends(length: float, num_modes: int) -> None:
    bank = frequency_bank("harmonics", num_modes, length=length)
    assert (bank * length / math.pi).tolist() == pytest.approx(list(range(1, num_modes + 1)))
    assert torch.sin(bank * length).abs().max() < 1e-12


@pytest.mark.parametrize("kind", RANDOM)
def test_random_banks_repeat_with_their_generator_only(kind: str) -> None:
    first, again, other = (
        frequency_bank(kind, 9, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_log_uniform_is_uniform_in_the_logarithm() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind, transform in (("log_uniform", torch.log), ("random_uniform", lambda x: x)):
        bank = frequency_bank(kind, 20000, low=0.01, high=10.0, generator=generator)
        ends = transform(torch.tensor([0.01, 10.0], dtype=torch.float64))
        share = (transform(bank) - ends[0]) / (ends[1] - ends[0])
        assert share[[2000, 10000, 18000]].tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.015)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "octaves", "num_modes": 3}, "'octaves'"),
        ({"kind": "linear", "num_modes": 0}, "num_modes must be at least 1; got 0"),
        ({"kind": "harmonics", "num_modes": 3}, "length .* 'harmonics'; got None"),
        ({"kind": "harmonics", "num_modes": 3, "length": -2.0}, "length .* got -2.0"),
        ({"kind": "data", "num_modes": 3}, "times must be given for the kind 'data'"),
        ({"kind": "log_spaced", "num_modes": 3, "low": 0.0}, "low=0.0, high=10.0"),
        ({"kind": "log_uniform", "num_modes": 3, "low": 5.0, "high": 2.0}, "low=5.0, high=2.0"),
        ({"kind": "geometric", "num_modes": 3, "high": math.inf}, "high=inf"),
    ],
    ids=["kind", "modes", "no-length", "length", "no-times", "zero", "swapped", "infinite"],
)
def test_errors_name_argument_and_value(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unchecked_bank(**arguments)


def test_unknown_kind_lists_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="kind must be one of") as error:
        unchecked_bank("octaves", 3)
    assert all(kind in str(error.value) for kind in KINDS)


def test_range_of_a_regular_grid_is_half_a_turn_over_span_and_step() -> None:
    times = torch.arange(101, dtype=torch.float64)[None] * 0.25 + 17.0
    assert frequency_range(times) == pytest.approx((math.pi / 25.0, math.pi / 0.25))


def test_data_bank_spans_the_range() -> None:
    low, high = frequency_range(TIMES)
    bank = frequency_bank("data", 6, times=TIMES)
    assert bank.tolist() == pytest.approx(
        frequency_bank("log_spaced", 6, low=low, high=high).tolist()
    )


@pytest.mark.parametrize("filler", [0.0, -1e9, math.nan, math.inf])
def test_range_ignores_padding(filler: float) -> None:
    padding = torch.full((2, 3), filler)
    times = torch.cat((padding, TIMES, padding), dim=1)
    mask = torch.cat((torch.zeros(2, 3), torch.ones(2, 5), torch.zeros(2, 3)), dim=1).bool()
    assert frequency_range(times, mask) == frequency_range(TIMES)
    empty = torch.cat((times, torch.full((1, 11), filler)))
    mask = torch.cat((mask, torch.zeros(1, 11, dtype=torch.bool)))
    assert frequency_range(empty, mask) == frequency_range(TIMES)


def test_range_ignores_duplicates_and_order() -> None:
    shuffled = TIMES.repeat(1, 3)[:, torch.randperm(15)]
    assert frequency_range(shuffled) == frequency_range(TIMES)


def test_one_tiny_gap_does_not_set_the_highest_frequency() -> None:
    times = torch.arange(100, dtype=torch.float64)
    low, high = frequency_range(torch.cat((times, times[50:51] + 1e-9))[None])
    assert high == pytest.approx(math.pi)
    assert low == pytest.approx(math.pi / 99)


@given(
    shift=st.floats(-100, 100),
    factor=st.floats(1e-2, 1e2),
)
def test_range_scales_with_the_unit_of_time(shift: float, factor: float) -> None:
    times = TIMES.double()
    low, high = frequency_range(times)
    assert frequency_range(times * factor + shift) == pytest.approx(
        (low / factor, high / factor), rel=1e-9
    )


def test_times_without_a_scale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two distinct .* got 4 present tokens in 2 series"):
        frequency_range(torch.tensor([[1.0, 1.0], [5.0, 5.0]]))


def test_single_column_is_refused() -> None:
    with pytest.raises(ValueError, match="no positive gap"):
        frequency_range(torch.tensor([[1.0], [2.0]]))


def test_non_finite_time_is_named() -> None:
    times = TIMES.clone()
    times[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"times\[1, 2\] = nan"):
        frequency_range(times)


def test_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\); got \(2, 4\)"):
        unchecked_range(TIMES, torch.ones(2, 4, dtype=torch.bool))
