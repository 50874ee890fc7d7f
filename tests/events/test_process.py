"""What every process must obey: add one to PROCESSES, and all of this is asked of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from osciformer._types import Tensor
from osciformer.events import (
    BlendedProcess,
    EventBatch,
    EventProcess,
    HawkesProcess,
    InhomogeneousPoissonProcess,
    PoissonProcess,
    RenewalProcess,
    integrate_intensity,
    likelihood_terms,
)
from osciformer.events.process import query_after

from .event_cases import HAWKES, WithoutClosedForms, padded, random_events

EVENTS = random_events([40, 33, 1, 0])
PROCESSES: dict[str, EventProcess] = {
    "poisson": PoissonProcess([0.5, 1.0]),
    "inhomogeneous": InhomogeneousPoissonProcess(
        lambda t: torch.stack([1 + torch.sin(t), 2 - torch.cos(t)], dim=-1),
        num_types=2,
        cumulative=lambda t: torch.stack([t - torch.cos(t), 2 * t - torch.sin(t)], dim=-1),
        bound=5.0,
    ),
    "hawkes": HAWKES,
    "hawkes_shared_decay": HawkesProcess(HAWKES.base, HAWKES.branching, 1.7),
    "renewal": RenewalProcess.fit(EVENTS, num_bins=6),
    "renewal_without_bins": RenewalProcess.fit(EVENTS, num_bins=0, marks="repeat"),
    "blend": BlendedProcess([PoissonProcess([0.5, 1.0]), HAWKES], [1.0, 2.0]),
    "blend_with_bins": BlendedProcess(
        [HAWKES, RenewalProcess.fit(EVENTS, num_bins=6), PoissonProcess([0.1, 0.3])],
        [0.5, 0.3, 0.2],
    ),
}
WITHOUT_MEMORY = ("poisson", "inhomogeneous")
HAVE_MEMORY = {name: PROCESSES[name] for name in PROCESSES if name not in WITHOUT_MEMORY}

each = pytest.mark.parametrize("process", list(PROCESSES.values()), ids=list(PROCESSES))
with_memory = pytest.mark.parametrize("process", list(HAVE_MEMORY.values()), ids=list(HAVE_MEMORY))

# Quadrature is not meant for intensities that jump between events.
SMOOTH = {name: process for name, process in PROCESSES.items() if process.gap_breaks is None}
smooth_ones = pytest.mark.parametrize("process", list(SMOOTH.values()), ids=list(SMOOTH))


def queries(batch: EventBatch, count: int = 30) -> Tensor:
    """Return times before, between and after the events of each row, in no order, and theirs."""
    low, high = batch.first_times - 1, batch.last_times + 2
    share = torch.rand(len(batch), count, dtype=torch.float64)
    between = low[:, None] + (high - low)[:, None] * share
    own = torch.where(batch.mask, batch.times, batch.last_times[:, None])
    return torch.cat([between, own], dim=1)


@each
def test_intensities_are_finite_and_not_negative(process: EventProcess) -> None:
    batch = EVENTS.batch()
    query = queries(batch)
    rates = process.intensity(batch, query)
    assert rates.shape == (*query.shape, 2)
    assert torch.isfinite(rates).all()
    assert (rates >= 0).all()
    torch.testing.assert_close(process.total_intensity(batch, query), rates.sum(-1))


@with_memory
@pytest.mark.parametrize("change", ["time", "type", "removal"])
def test_changing_an_event_changes_no_earlier_bit(process: EventProcess, change: str) -> None:
    batch, where = EVENTS[:2].batch(), 20
    times, types, mask = batch.times.clone(), batch.types.clone(), batch.mask.clone()
    if change == "time":
        times[:, where] = (times[:, where] + times[:, where + 1]) / 2
    elif change == "type":
        types[:, where] = 1 - types[:, where]
    else:
        mask[:, where:] = False
    other = replace(batch, times=times, types=types, mask=mask)
    # Up to the event itself, whose left limit does not see it.
    query = torch.minimum(queries(batch), batch.times[:, where, None])
    assert torch.equal(process.intensity(batch, query), process.intensity(other, query))
    before, after = likelihood_terms(process, batch), likelihood_terms(process, other)
    assert torch.equal(before.log_intensity[:, :where], after.log_intensity[:, :where])
    assert torch.equal(before.compensator[:, :where], after.compensator[:, :where])
    # The gaps of a process with constant hazard do not remember when they began.
    if change != "time" or process is not PROCESSES["renewal_without_bins"]:
        following = batch.times[:, where + 1 : where + 2]
        later, changed = (process.intensity(item, following) for item in (batch, other))
        assert not torch.equal(later, changed)


@each
def test_an_event_has_its_left_limit(process: EventProcess) -> None:
    batch = EVENTS[:2].batch()
    query = torch.where(batch.mask, batch.times, batch.last_times[:, None])
    at = process.intensity(batch, query)
    just_before = process.intensity(batch, query - 1e-9 * (1 + query.abs()))
    torch.testing.assert_close(at, just_before, rtol=1e-4, atol=1e-7)


@each
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_padding_changes_nothing(process: EventProcess, junk: float) -> None:
    batch = EVENTS.batch()
    longer = padded(batch, 7, junk)
    query = queries(batch)
    torch.testing.assert_close(
        process.intensity(longer, query), process.intensity(batch, query), rtol=1e-12, atol=0
    )
    for span in ("events", "window"):
        after, before = (likelihood_terms(process, item, span=span) for item in (longer, batch))
        torch.testing.assert_close(after.per_sequence, before.per_sequence, rtol=1e-12, atol=1e-12)


@each
def test_rows_do_not_see_each_other(process: EventProcess) -> None:
    batch = EVENTS.batch()
    query = queries(batch)
    whole = process.intensity(batch, query)
    for row in range(len(batch)):
        alone = process.intensity(batch.take(torch.tensor([row])), query[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-12, atol=0)


@each
def test_intensity_after_an_event_knows_its_history_only(process: EventProcess) -> None:
    batch = EVENTS.batch()
    gaps = torch.rand(*batch.mask.shape, 3, dtype=torch.float64)
    found = process.intensity_after(batch, gaps)
    default = EventProcess.intensity_after(process, batch, gaps)
    assert torch.isfinite(default).all()
    torch.testing.assert_close(found[batch.mask], default[batch.mask], rtol=1e-9, atol=1e-12)
    cut = EVENTS.first(5).batch()
    late = process.intensity_after(cut, gaps[:, :5])
    torch.testing.assert_close(late[cut.mask], found[:, :5][cut.mask], rtol=1e-12, atol=0)


@smooth_ones
def test_exact_compensator_is_the_integral_of_the_intensity(process: EventProcess) -> None:
    terms = likelihood_terms(process, EVENTS.batch(), span="window")
    other = likelihood_terms(
        WithoutClosedForms(process), EVENTS.batch(), span="window", tolerance=1e-9
    )
    assert float(terms.error.max()) == 0
    torch.testing.assert_close(other.compensator, terms.compensator, rtol=0, atol=1e-8)
    torch.testing.assert_close(other.tail, terms.tail, rtol=0, atol=1e-8)


@each
def test_compensators_of_neighbouring_intervals_add_up(process: EventProcess) -> None:
    batch = EVENTS[:2].batch()
    start = batch.times[:, :10] + 0.25 * batch.times[:, :11].diff(dim=1)
    end = batch.times[:, 1:11]
    middle = (start + end) / 2
    parts = []
    for a, b in ((start, middle), (middle, end), (start, end)):
        value = process.compensator(batch, a, b)
        parts.append(integrate_intensity(process, batch, a, b).value if value is None else value)
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=1e-9, atol=1e-12)


@each
def test_total_compensator_after_an_event_is_the_integral_behind_it(process: EventProcess) -> None:
    batch = EVENTS.batch()
    for gap in (1e-6, 0.3, 9.0):
        wanted = integral_after(process, batch, gap)
        gaps = torch.full((*batch.mask.shape, 1), gap, dtype=torch.float64)
        found = process.total_compensator_after(batch, gaps)
        assert found is not None
        torch.testing.assert_close(found[..., 0][batch.mask], wanted[batch.mask], rtol=1e-7, atol=0)


def integral_after(process: EventProcess, batch: EventBatch, gap: float) -> Tensor:
    """Return the integral of `intensity_after` by panels that jumps do not lie in."""
    breaks = [] if process.gap_breaks is None else process.gap_breaks.tolist()
    # Short panels first: kernels fade.
    cuts = sorted({0.0, gap, *(b for b in breaks if b < gap), *(gap * 2.0**-k for k in range(14))})
    nodes, weights = np.polynomial.legendre.leggauss(20)
    total = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for low, high in pairwise(cuts):
        points = torch.from_numpy((low + high) / 2 + (high - low) / 2 * nodes)
        rates = process.intensity_after(batch, points.expand(*batch.mask.shape, -1)).sum(dim=-1)
        total += (high - low) / 2 * (rates @ torch.from_numpy(weights))
    return total


@each
@pytest.mark.parametrize("windows", [True, False], ids=["in a window", "without windows"])
def test_before_the_first_event_integrals_are_those_of_the_intensity(
    process: EventProcess, windows: bool
) -> None:
    batch = EVENTS.batch()
    if not windows:
        batch = replace(batch, starts=None, ends=None)
    # Behind no edge of the histograms, and in part before the window.
    begin = batch.first_times if batch.starts is None else batch.starts
    start = begin[:, None] - torch.tensor([[1.0, 0.3, 0.2]], dtype=torch.float64)
    width = torch.tensor([[0.4, 0.35, 0.2]], dtype=torch.float64)
    end = torch.minimum(start + width, batch.first_times[:, None])
    middle = torch.minimum(begin[:, None], end)  # where the intensity has a corner
    wanted = sum(
        integrate_intensity(process, batch, a, b, tolerance=1e-10).value.sum(dim=-1)
        for a, b in ((start, middle), (middle, end))
    )
    found = process.total_compensator(batch, start, end)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@each
def test_bound_is_above_the_intensity(process: EventProcess) -> None:
    batch = EVENTS.batch()
    now = batch.last_times + 0.3
    bound = process.upper_bound(batch, now, now + 4)
    assert bound is not None
    query = now[:, None] + torch.linspace(0, 4, 300, dtype=torch.float64)[1:]
    assert (process.total_intensity(batch, query) <= bound[:, None]).all()


def test_query_after_an_event_is_later_than_it() -> None:
    times = torch.tensor([1e9, 0.0, -3.0], dtype=torch.float64)
    gaps = torch.tensor([1e-9, 0.0, 2.0], dtype=torch.float64)
    later = query_after(times, gaps)
    assert (later > times).all()
    assert float(later[2]) == -1.0


class SmallNetwork(torch.nn.Module, EventProcess):
    """A float32 network on the time since the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.num_types = 2
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Softplus()
        )

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Tensor:
        last = (batch.count_before(query_times) - 1).clamp(min=0)
        since = query_times - batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        return self.layers(since.float()[..., None])


@pytest.mark.parametrize("max_halvings", [0, 30])
def test_a_network_is_trained_by_its_likelihood(max_halvings: int) -> None:
    network, batch = SmallNetwork(), EVENTS.batch()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = likelihood_terms(network, batch, max_halvings=max_halvings).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())
    # As good as the best constant rates.
    constant = -float(likelihood_terms(PoissonProcess.fit(EVENTS), batch).loss)
    assert -losses[-1] > constant - 0.1 > -losses[0]
