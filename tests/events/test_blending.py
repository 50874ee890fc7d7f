"""Blends against sums of densities by quadrature, and their weights."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from osciformer.events import (
    BlendedProcess,
    EventBatch,
    EventProcess,
    EventSequences,
    GapDensity,
    PoissonProcess,
    RenewalProcess,
    calibrate,
    fit_weights,
    likelihood_terms,
    log_likelihood,
    predict_next,
    rescaled_gaps,
    sample,
)
from osciformer.events.blending import log_densities

from .event_cases import HAWKES, hawkes_rate, random_events
from .test_neural import make

# Events at one time among them, and a window that begins earlier.
TIMES = np.array([0.4, 1.0, 1.0, 1.7, 3.1])
TYPES = np.array([0, 1, 0, 1, 1])
START, END = -0.5, 6.0
EVENTS = EventSequences.from_arrays([TIMES], [TYPES], num_types=2, starts=[START], ends=[END])

RATES = np.array([0.7, 0.2])
EDGES, MASS, TAIL = np.array([0.0, 0.5, 0.8, 2.5]), np.array([0.2, 0.4, 0.3]), 0.6
CHAIN, INITIAL = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0.4, 0.6])
RENEWAL = RenewalProcess(
    GapDensity(torch.from_numpy(EDGES), torch.from_numpy(MASS), TAIL),
    torch.from_numpy(CHAIN),
    torch.from_numpy(INITIAL),
)
WEIGHTS = np.array([0.2, 0.5, 0.3])
BLEND = BlendedProcess([PoissonProcess(RATES), HAWKES, RENEWAL], WEIGHTS)


def integrate(function: Any, low: float, high: float) -> Any:
    """Return the integral of a function of an array, which may jump at edges of the histogram."""
    cuts = sorted({low, high, *(e for e in (low + EDGES) if low < e < high)})
    nodes, weights = np.polynomial.legendre.leggauss(30)
    return sum(
        (b - a) / 2 * (weights @ function((a + b) / 2 + (b - a) / 2 * nodes))
        for a, b in pairwise(cuts)
    )


def past(moment: float) -> tuple[float, int]:
    """Return when the time since the last event began, and the number of events before."""
    known = int((moment > TIMES).sum())
    return (TIMES[known - 1] if known else START), known


def poisson_density(times: np.ndarray, begin: float, known: int) -> np.ndarray:
    return RATES * np.exp(-RATES.sum() * (times[:, None] - begin))


def hawkes_density(times: np.ndarray, begin: float, known: int) -> np.ndarray:
    def rates(at: np.ndarray) -> np.ndarray:
        return np.array(
            [[hawkes_rate(HAWKES, TIMES[:known], TYPES[:known], t, k) for k in (0, 1)] for t in at]
        )

    lost = [integrate(lambda at: rates(at).sum(axis=1), begin, t) for t in times]
    return rates(times) * np.exp(-np.array(lost))[:, None]


def renewal_density(times: np.ndarray, begin: float, known: int) -> np.ndarray:
    gaps = times - begin
    bins = np.searchsorted(EDGES, gaps) - 1
    inside = (MASS / np.diff(EDGES))[np.minimum(bins, len(MASS) - 1)]
    beyond = (1 - MASS.sum()) * TAIL * np.exp(-TAIL * (gaps - EDGES[-1]))
    marks = CHAIN[TYPES[known - 1]] if known else INITIAL
    return np.where(bins < len(MASS), inside, beyond)[:, None] * marks


def density(times: np.ndarray, begin: float, known: int) -> np.ndarray:
    """Return the density of the next event by type [n, K]: the sum of those of the members."""
    parts = (poisson_density, hawkes_density, renewal_density)
    return sum(w * p(times, begin, known) for w, p in zip(WEIGHTS, parts, strict=True))


def test_density_of_an_event_is_the_sum_of_those_of_the_members() -> None:
    terms = likelihood_terms(BLEND, EVENTS.batch(), span="window")
    found = (terms.log_intensity - terms.compensator)[0].exp()
    for i in (0, 1, 3, 4):  # of those at one time, the first
        begin, known = past(TIMES[i])
        wanted = density(TIMES[i : i + 1], begin, known)[0, TYPES[i]]
        assert float(found[i]) == pytest.approx(wanted, rel=1e-9)
    left = 1 - integrate(lambda t: density(t, TIMES[-1], 5).sum(axis=1), TIMES[-1], END)
    assert float(terms.tail[0]) == pytest.approx(-math.log(left), rel=1e-9)
    # Events at one time do not see each other: they have the same rates, and no gap.
    rates = BLEND.intensity(EVENTS.batch(), torch.from_numpy(TIMES)[None])[0]
    assert torch.equal(rates[1], rates[2])
    assert float(terms.compensator[0, 2]) == 0
    assert terms.error.tolist() == [0.0]


@pytest.mark.parametrize("moment", [-0.3, 0.1, 0.4, 0.45, 1.0, 1.0000001, 1.65, 2.3, 3.1, 5.9, 20])
def test_intensity_is_density_over_survival(moment: float) -> None:
    begin, known = past(moment)
    left = 1 - integrate(lambda t: density(t, begin, known).sum(axis=1), begin, moment)
    wanted = density(np.array([moment]), begin, known)[0] / left
    query = torch.tensor([[moment]], dtype=torch.float64)
    found = BLEND.intensity(EVENTS.batch(), query)[0, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-8)
    start = torch.full_like(query, begin)
    lost = BLEND.total_compensator(EVENTS.batch(), start, query)
    assert float(lost) == pytest.approx(-math.log(left), rel=1e-8)


def test_before_any_beginning_members_count_by_their_weights() -> None:
    query = torch.tensor([[TIMES[0] - 3.0, TIMES[0]]], dtype=torch.float64)
    for batch in (replace(EVENTS.batch(), starts=None), random_events([0], windows=False).batch()):
        wanted = sum(
            w * member.intensity(batch, query)
            for w, member in zip(WEIGHTS, BLEND.members, strict=True)
        )
        torch.testing.assert_close(BLEND.intensity(batch, query), wanted, rtol=1e-12, atol=0)
    early = BLEND.intensity(EVENTS.batch(), query[:, :1])  # before the window
    torch.testing.assert_close(early, wanted[:, :1], rtol=1e-12, atol=0)


def test_a_long_wait_is_believed_to_those_who_expected_it_until_an_event_comes() -> None:
    slow, fast = PoissonProcess([0.01, 0.01]), PoissonProcess([5.0, 5.0])
    blend = BlendedProcess([slow, fast], [0.5, 0.5])
    batch = EVENTS.batch()
    moments = [[START, 0.4, 0.4 + 1e-9, 3.1, 3.1 + 1e-9, 30.0]]
    query = torch.tensor(moments, dtype=torch.float64)
    rates = blend.total_intensity(batch, query)[0]
    for start in (0, 2, 4):
        assert float(rates[start]) == pytest.approx((0.02 + 10.0) / 2, rel=1e-5)
    assert float(rates[1]) < 0.05
    assert float(rates[5]) == pytest.approx(0.02, rel=1e-9)


@pytest.mark.parametrize("number", range(3))
def test_a_member_with_all_the_weight_is_the_blend(number: int) -> None:
    weights = [0.0, 0.0, 0.0]
    weights[number] = 7.0
    blend, alone = BlendedProcess(BLEND.members, weights), BLEND.members[number]
    batch = EVENTS.batch()
    one, two = (likelihood_terms(item, batch, span="window") for item in (blend, alone))
    torch.testing.assert_close(one.log_intensity, two.log_intensity, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.compensator, two.compensator, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.tail, two.tail, rtol=1e-12, atol=1e-12)
    one, two = (predict_next(item, batch, horizon=200.0) for item in (blend, alone))
    torch.testing.assert_close(one.median, two.median, rtol=1e-6, atol=1e-9)


def test_where_all_members_are_refuted_intensities_stay_finite() -> None:
    whole = GapDensity(torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0]).double(), 1.0)
    sure = RenewalProcess(whole, RENEWAL.transition, RENEWAL.initial)
    batch = EVENTS.batch()
    start, query = torch.tensor([[[3.1]], [[9.0]]], dtype=torch.float64)
    blend = BlendedProcess([sure, sure], [0.5, 0.5])
    torch.testing.assert_close(blend.intensity(batch, query), sure.intensity(batch, query))
    # It cannot happen, and the blend says so as its members do.
    assert float(sure.total_compensator(batch, start, query)) == math.inf
    assert float(blend.total_compensator(batch, start, query)) == math.inf


def draw(process: EventProcess, count: int, until: float, seed: int = 0) -> EventSequences:
    starts = torch.zeros(count, dtype=torch.float64)
    empty = EventBatch(
        times=torch.zeros(count, 1, dtype=torch.float64),
        types=torch.zeros(count, 1, dtype=torch.int64),
        mask=torch.zeros(count, 1, dtype=torch.bool),
        starts=starts,
    )
    generator = torch.Generator().manual_seed(seed)
    return sample(process, empty, until=until, generator=generator).sequences


def test_samples_of_a_blend_are_exponential_after_rescaling() -> None:
    drawn = draw(BLEND, 80, 25.0)
    assert calibrate(rescaled_gaps(BLEND, drawn, span="window")).p_value > 1e-3
    for other in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        wrong = BlendedProcess(BLEND.members, other)
        assert calibrate(rescaled_gaps(wrong, drawn, span="window")).p_value < 1e-3


class Unbounded(PoissonProcess):
    """A process that does not say what its intensity does not exceed, as networks do not."""

    def upper_bound(self, batch: EventBatch, start: Any, end: Any) -> None:
        return None


def test_a_narrow_bin_is_met_without_a_bound() -> None:
    edges, mass = torch.tensor([0.0, 1.0, 1.001, 3.0]), torch.tensor([0.2, 0.6, 0.1])
    peaked = RenewalProcess(
        GapDensity(edges.double(), mass.double(), 1.0), RENEWAL.transition, RENEWAL.initial
    )
    blend = BlendedProcess([peaked, Unbounded([0.3, 0.2])], [0.7, 0.3])
    drawn = draw(blend, 60, 20.0)
    gaps = np.concatenate([np.diff(one.times, prepend=0.0) for one in drawn])
    share = np.mean((gaps > 1.0) & (gaps <= 1.001))
    expected = 0.7 * 0.6 + 0.3 * (math.exp(-0.5) - math.exp(-0.5005))
    assert abs(share - expected) < 4 * math.sqrt(0.25 / len(gaps))


def three_members(count: int = 60) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).normal(size=(3, count)) * 2)


@pytest.mark.parametrize("prior", [1e-6, 1.0, 30.0])
def test_weights_are_those_that_a_general_optimizer_finds(prior: float) -> None:
    densities = three_members()

    def loss(scores: np.ndarray) -> float:
        weights = np.exp(scores - np.logaddexp.reduce(scores))
        mixed = np.log(weights @ np.exp(densities.numpy()))
        return float(-mixed.sum() - prior * np.log(weights).sum())

    best = optimize.minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    wanted = np.exp(best - np.logaddexp.reduce(best))
    np.testing.assert_allclose(fit_weights(densities, prior=prior), wanted, atol=1e-5)


@pytest.mark.parametrize("member", [None, 0, 1, 2])
def test_weights_with_a_tiny_prior_are_as_good_as_any_member(member: int | None) -> None:
    densities = three_members()
    if member is not None:
        densities[member] += 20.0  # so much better that nothing else is left
    mixed = torch.logsumexp(fit_weights(densities, prior=1e-9).log()[:, None] + densities, dim=0)
    assert float(mixed.sum()) >= float(densities.sum(dim=1).max()) - 1e-6


def test_weights_of_a_blend_raise_the_likelihood_of_what_it_made() -> None:
    drawn = draw(BLEND, 60, 40.0, seed=2)
    densities = torch.stack([log_densities(item, drawn) for item in BLEND.members])
    weights = fit_weights(densities, prior=1e-9)
    np.testing.assert_allclose(weights, WEIGHTS, atol=0.12)
    blend = BlendedProcess(BLEND.members, weights)
    best = log_likelihood(blend, drawn)
    mixed = torch.logsumexp(weights.log()[:, None] + densities, dim=0)
    assert best.total == pytest.approx(float(mixed.sum()), rel=1e-10)
    for other in (BLEND, *BLEND.members):
        assert best.total >= log_likelihood(other, drawn).total


@pytest.mark.parametrize(
    ("densities", "prior", "message"),
    [
        (torch.zeros(3), 1.0, r"shape \[3\], members by events"),
        (torch.zeros(2, 0), 1.0, r"events that were not trained on.*\[2, 0\]"),
        (torch.zeros(2, 3), 0.0, "prior must be positive; got 0.0"),
        (torch.tensor([[0.0, math.nan], [0.0, 0.0]]), 1.0, "event 1 under member 0 is NaN"),
        (torch.tensor([[0.0, -math.inf], [0.0, -math.inf]]), 1.0, "event 1 is impossible.*leave"),
    ],
    ids=["shape", "none", "prior", "nan", "impossible"],
)
def test_densities_that_say_nothing_are_refused(
    densities: torch.Tensor, prior: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_weights(densities, prior=prior)


@pytest.mark.parametrize(
    ("members", "weights", "message"),
    [
        ([PoissonProcess([1.0]), HAWKES], [1.0, 1.0], r"same types; they have \[1, 2\]"),
        ([HAWKES], [-1.0], r"must not be negative.*got \[-1.0\]"),
        ([HAWKES, HAWKES], [0.0, 0.0], r"some positive; got \[0.0, 0.0\]"),
        ([HAWKES], [math.nan], "got .*nan"),
        ([HAWKES], [1.0, 2.0], r"1 members and weights of the shape \[2\]"),
        ([], [], "at least one; got 0 members"),
    ],
    ids=["types", "negative", "zero", "nan", "number", "none"],
)
def test_members_that_do_not_go_together_are_refused(
    members: list[EventProcess], weights: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlendedProcess(members, weights)


def test_members_without_closed_integrals_are_refused() -> None:
    blend = BlendedProcess([HAWKES, make("softplus")], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"closed form.*'mixture' or 'exponential'"):
        blend.intensity(EVENTS.batch(), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="closed form"):
        blend.intensity_after(EVENTS.batch(), torch.zeros(1, 5, 1))
