"""Neural processes: laws of all point processes, closed forms, and what training reaches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from osciformer._types import Tensor
from osciformer.events import (
    EventBatch,
    EventProcess,
    EventSequences,
    PoissonProcess,
    integrate_intensity,
    likelihood_terms,
    log_likelihood,
    sample,
)
from osciformer.events.neural import (
    EventHead,
    EventModelConfig,
    EventStates,
    NeuralEventProcess,
    make_event_model,
)
from osciformer.events.neural.encoder import gaps_of
from osciformer.events.neural.heads import CopyLast, EventPairs

from .event_cases import HAWKES, padded, random_events
from .test_process import queries

EVENTS = random_events([24, 19, 1, 0])
TIED = EventSequences.from_arrays(
    [[1.0, 1.0, 2.0, 3.5, 3.5, 3.5, 4.0], [0.5, 0.75], [2.0], []],
    [[0, 1, 1, 0, 1, 0, 1], [1, 0], [1], []],
    num_types=2,
)


def make(head: str = "mixture", seed: int = 0, **settings: Any) -> NeuralEventProcess:
    """Return a small untrained process in float64, its weights far from their start."""
    torch.manual_seed(seed)
    config = EventModelConfig(num_types=2, head=head, dim=8, num_heads=2, dropout=0.0, **settings)
    model = make_event_model(config).double().fit_times(EVENTS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


MODELS = {
    "mixture": make("mixture"),
    "softplus": make("softplus", num_layers=2),
    "decay": make("decay"),
    "exponential": make("exponential"),
    "average": make("softplus", encoder_options={"value": "average"}),
    "without_memory": make("softplus", encoder_options={"memory": False}),
    "short_context": make("mixture", encoder_options={"context": 5}),
}
each = pytest.mark.parametrize("model", list(MODELS.values()), ids=list(MODELS))


@each
def test_changing_an_event_changes_no_earlier_bit(model: NeuralEventProcess) -> None:
    batch, where = EVENTS[:2].batch(), 15
    times, types = batch.times.clone(), batch.types.clone()
    times[:, where] = (times[:, where] + times[:, where + 1]) / 2
    types[:, where] = 1 - types[:, where]
    other = replace(batch, times=times, types=types)
    query = torch.minimum(queries(batch), batch.times[:, where, None])
    assert torch.equal(model.intensity(batch, query), model.intensity(other, query))
    before, after = model(batch), model(other)
    assert torch.equal(before.log_intensity[:, :where], after.log_intensity[:, :where])
    assert torch.equal(before.compensator[:, :where], after.compensator[:, :where])
    following = batch.times[:, where + 1 : where + 2]
    assert not torch.equal(model.intensity(batch, following), model.intensity(other, following))


@each
def test_an_event_has_its_left_limit(model: NeuralEventProcess) -> None:
    batch = EVENTS[:2].batch()
    query = torch.where(batch.mask, batch.times, batch.last_times[:, None])
    at = model.intensity(batch, query)
    just_before = model.intensity(batch, query - 1e-9 * (1 + query.abs()))
    torch.testing.assert_close(at, just_before, rtol=1e-4, atol=1e-7)
    just_after = model.intensity(batch, torch.nextafter(query, query + 1))
    assert not torch.allclose(at[:, 1:-6], just_after[:, 1:-6], rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "junk"),
    [*((name, math.nan) for name in MODELS), ("mixture", math.inf), ("softplus", -1e30)],
)
def test_padding_changes_nothing(name: str, junk: float) -> None:
    model = MODELS[name]
    batch = EVENTS.batch()
    longer, query = padded(batch, 7, junk), queries(batch)
    torch.testing.assert_close(
        model.intensity(longer, query), model.intensity(batch, query), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(
        model(longer).per_sequence, model(batch).per_sequence, rtol=1e-10, atol=1e-12
    )
    loss = model(longer).loss
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


@each
def test_rows_do_not_see_each_other(model: NeuralEventProcess) -> None:
    batch = EVENTS.batch()
    query = queries(batch)
    whole = model.intensity(batch, query)
    for row in range(len(batch)):
        alone = model.intensity(batch.take(torch.tensor([row])), query[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-10, atol=0)


@each
def test_intensity_after_an_event_knows_its_history_only(model: NeuralEventProcess) -> None:
    for events in (EVENTS[:2].first(12), TIED):
        batch = events.batch()
        gaps = 5 * torch.rand(*batch.mask.shape, 3, dtype=torch.float64)
        found = model.intensity_after(batch, gaps)
        rows, slots = batch.mask.nonzero(as_tuple=True)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            history = batch.known_until(torch.tensor([row]), torch.tensor([slot + 1]))
            alone = model.intensity_after(history, gaps[row : row + 1, : slot + 1])
            torch.testing.assert_close(alone[0, slot], found[row, slot], rtol=1e-9, atol=1e-12)


@each
@pytest.mark.parametrize("events", [EVENTS.first(9), TIED], ids=["plain", "tied"])
def test_the_loss_is_the_likelihood(model: NeuralEventProcess, events: EventSequences) -> None:
    batch = events.batch()
    fast, careful = model(batch), likelihood_terms(model, batch, tolerance=1e-7)
    assert torch.equal(fast.scored, careful.scored)
    torch.testing.assert_close(fast.log_intensity, careful.log_intensity, rtol=1e-9, atol=1e-10)
    bound = 1e-6 + float(fast.error.max())
    torch.testing.assert_close(fast.per_sequence, careful.per_sequence, rtol=0, atol=bound)


@pytest.mark.parametrize("head", ["mixture", "exponential"])
def test_closed_compensators_are_integrals(head: str) -> None:
    model, batch = MODELS[head], EVENTS[:2].first(8).batch()
    low, high = batch.first_times[:, None] - 0.5, batch.last_times[:, None] + 3
    edges = (low + (high - low) * torch.rand(2, 8, dtype=torch.float64)).sort().values
    start, end = edges[:, :-1], edges[:, 1:]  # some with events in them
    exact = model.total_compensator(batch, start, end)
    assert exact is not None
    by_rule = integrate_intensity(model, batch, start, end, tolerance=1e-8).value.sum(dim=-1)
    torch.testing.assert_close(exact, by_rule, rtol=1e-8, atol=1e-9)


def test_random_nodes_are_unbiased() -> None:
    model = make("decay")
    batch = EVENTS[:1].first(4).batch()
    many = EventBatch(*(x.expand(500, -1) for x in (batch.times, batch.types, batch.mask)))
    exact = model(batch).compensator[0]
    torch.manual_seed(0)
    drawn = model.train()(many).compensator.detach()
    spread = drawn.std(dim=0) / math.sqrt(500)
    assert (spread[1:] > 0).all()
    assert ((drawn.mean(dim=0) - exact).abs() < 4.5 * spread + 1e-6).all()


@each
def test_a_change_of_unit_shifts_the_likelihood_by_its_logarithm(
    model: NeuralEventProcess,
) -> None:
    factor = 3600.0
    scaled = EVENTS.rescale(factor, "s")
    torch.manual_seed(0)
    config = model.config
    states = model.state_dict()
    other = make_event_model(config).double().fit_times(scaled).eval()
    own = {k: v for k, v in states.items() if not k.endswith((".unit", "log_base", ".offset"))}
    missing = other.load_state_dict(own, strict=False).missing_keys
    assert all(k.endswith((".unit", "log_base", ".offset")) for k in missing)
    here, there = (
        -float(a(b.batch()).loss.detach()) for a, b in ((model, EVENTS), (other, scaled))
    )
    assert there == pytest.approx(here - math.log(factor), abs=1e-6)


def test_the_mixture_is_a_density_and_has_no_peak_on_the_grid() -> None:
    rng = np.random.default_rng(0)
    times = [np.cumsum(rng.integers(1, 6, size=30)) / 52 for _ in range(40)]
    events = EventSequences.from_arrays(times)
    config = EventModelConfig(num_types=1, dim=8, num_heads=2, num_components=4)
    model = make_event_model(config).double().fit_times(events).eval()
    last = model.head.mixture[-1]
    with torch.no_grad():
        last.bias[8:] = -50.0  # as narrow as components can be
        last.bias[4:8] = torch.log(
            torch.tensor([1, 2, 3, 4]) / 52 / model.head.scale.unit + model.head.scale.offset
        )
    batch = events[:1].first(1).batch()
    gaps = torch.linspace(0, 4, 20_001, dtype=torch.float64)[None, None]
    start, end = batch.times.expand(1, gaps.shape[-1]), batch.times + gaps[0]
    with torch.no_grad():
        hazard = model.intensity_after(batch, gaps)[0, 0, :, 0]
        survival = torch.exp(-model.total_compensator(batch, start, end)[0])
    density = hazard * survival
    assert float(torch.trapezoid(density, gaps[0, 0])) == pytest.approx(1.0, abs=1e-4)
    assert float(density.max()) < 52.0  # one step of the grid wide, at least


def test_a_preference_for_the_last_type_starts_at_the_likeliest_one() -> None:
    rng = np.random.default_rng(1)
    before = torch.from_numpy(rng.integers(0, 5, size=4000))
    after = torch.where(torch.rand(4000) < 0.6, before, torch.from_numpy(rng.integers(0, 5, 4000)))
    pairs = EventPairs(torch.ones(4000), before, after, 5)
    copy = CopyLast(4, 5).double()
    copy.fit(pairs)

    def likelihood(preference: float) -> float:
        scores = pairs.shares.log().expand(4000, 5).clone()
        scores[torch.arange(4000), before] += preference
        return float(scores.log_softmax(-1)[torch.arange(4000), after].sum())

    best = float(copy.gate.bias.detach())
    assert likelihood(best) > max(likelihood(best - 0.05), likelihood(best + 0.05))


@pytest.mark.parametrize("head", ["mixture", "softplus"])
def test_training_comes_close_to_the_process_that_made_the_events(head: str) -> None:
    empty = random_events([0] * 140, windows=False).batch()
    drawn = sample(
        HAWKES,
        empty,
        until=1e6,
        generator=torch.Generator().manual_seed(3),
        max_events=40,
        at_limit="stop",
    ).sequences
    train, test = drawn[:100], drawn[100:]
    torch.manual_seed(0)
    config = EventModelConfig(num_types=2, head=head, dim=16, num_heads=2, dropout=0.0)
    model = make_event_model(config).fit_times(train)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(6):
        for batch in train.batches(20, shuffle=True, seed=epoch):
            optimizer.zero_grad()
            model(batch).loss.backward()
            optimizer.step()
    model.eval()
    true, constant = (
        log_likelihood(item, test).micro for item in (HAWKES, PoissonProcess.fit(train))
    )
    found = -float(model(test.batch()).loss.detach())
    assert found > constant + 0.6 * (true - constant)
    assert found < true + 0.05


class _RealMark(EventHead):
    """A head of another kind: one type, and a constant hazard per unit of the state's first."""

    def log_intensity(self, states: EventStates, last_types: Tensor, gaps: Tensor) -> Tensor:
        assert states.now is not None
        return torch.tanh(states.now[..., :1])


def test_the_head_is_replaceable() -> None:
    model = make("softplus")
    other = NeuralEventProcess(model.encoder, _RealMark(), EventModelConfig(num_types=1)).double()
    events = random_events([5, 3], num_types=1)
    terms = other.eval()(events.batch())
    careful = likelihood_terms(other, events.batch())
    bound = 1e-6 + float(terms.error.max())
    torch.testing.assert_close(terms.per_sequence, careful.per_sequence, rtol=0, atol=bound)


def test_gaps_of_a_batch_start_with_zero() -> None:
    gaps = gaps_of(TIED.batch())
    assert gaps[0].tolist() == [0.0, 0.0, 1.0, 1.5, 0.0, 0.0, 0.5]
    assert gaps[2:].abs().sum() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_types": 0}, "num_types must be at least 1"),
        ({"num_types": 2, "head": "gauss"}, "head"),
        ({"num_types": 2, "encoder": "gru"}, "encoder"),
        ({"num_types": 2, "dropout": 1.0}, "dropout"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_event_model(EventModelConfig(**settings))


def test_a_process_is_one_even_without_training() -> None:
    assert isinstance(MODELS["mixture"], EventProcess)
    empty = random_events([0, 0]).batch()
    rates = MODELS["mixture"].intensity(empty, torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(rates, MODELS["mixture"].log_base.exp().expand(2, 3, 2))


def test_time_scales_come_from_a_part_of_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = random_events([6] * 40 + [0, 1], windows=False)
    whole = make_event_model(EventModelConfig(num_types=2, dim=8)).fit_times(events)
    monkeypatch.setattr("osciformer.events.neural.process.LARGEST_BATCH", 60)
    part = make_event_model(EventModelConfig(num_types=2, dim=8)).fit_times(events)
    # Rates and shares are those of all events, the unit of the encoder that of some.
    torch.testing.assert_close(part.log_base, whole.log_base)
    torch.testing.assert_close(part.head.scale.unit, whole.head.scale.unit)
    ratio = float(part.encoder.embedding.scale.unit / whole.encoder.embedding.scale.unit)
    assert ratio != 1
    assert 0.5 < ratio < 2
