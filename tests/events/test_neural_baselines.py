"""Published neural processes: the laws of all processes, and the mathematics of each encoder."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from osciformer._types import Tensor
from osciformer.baselines import BASELINE_MODELS
from osciformer.baselines.event_encoders import GapFlow
from osciformer.events import (
    EventBatch,
    EventSequences,
    HawkesProcess,
    PoissonProcess,
    integrate_intensity,
    likelihood_terms,
    simulate_hawkes,
)
from osciformer.events.neural import EventModelConfig, NeuralEventProcess, make_event_model
from osciformer.events.neural.encoder import gaps_of
from osciformer.models.backbones import backbone_names

from . import test_process as laws
from .event_cases import padded, random_events

EVENTS = random_events([9, 6, 1, 0])
WITH_TIES = EventSequences.from_arrays(
    [[0.0, 0.0, 0.5, 0.5, 0.5, 2.0], [3.0], [1.0, 1.0]], [[0, 1, 1, 0, 1, 0], [1], [0, 1]]
)
# Where the state moves between events.
CONTINUOUS = ("neural_hawkes", "attnhp", "s2p2", "ode_rnn", "mtan", "contiformer")

# The slow ones learn from shorter sequences, the slowest with fewer nodes on a trajectory.
SHORT = {"contiformer": 6, "ode_rnn": 8}
QUICK = {"contiformer": {"quadrature": "trapezoid", "step": 1.0}}

each = pytest.mark.parametrize("name", list(BASELINE_MODELS))


def small(name: str, **changes: object) -> NeuralEventProcess:
    """Return a small model in float64 whose weights are all of some size, none zero."""
    torch.manual_seed(1)
    settings = {**BASELINE_MODELS[name], "dim": 8, "num_heads": 2, "dropout": 0.0, **changes}
    model = make_event_model(EventModelConfig(num_types=2, **settings)).double()
    model.fit_times(EVENTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@cache
def known(name: str) -> NeuralEventProcess:
    return small(name)


def some_gaps(batch: EventBatch, count: int = 3) -> Tensor:
    gaps = torch.rand(*batch.times.shape, count, dtype=torch.float64)
    gaps[..., 0] = 0.0
    return gaps


def changed(batch: EventBatch, where: int, change: str) -> EventBatch:
    times, types, mask = batch.times.clone(), batch.types.clone(), batch.mask.clone()
    if change == "time":
        times[:, where] += 0.25 * (times[:, where + 1] - times[:, where])
    elif change == "type":
        types[:, where] = 1 - types[:, where]
    else:
        mask[:, where:] = False
    return replace(batch, times=times, types=types, mask=mask)


@each
@pytest.mark.parametrize("change", ["time", "type", "removal"])
@torch.no_grad()
def test_no_bit_before_an_event_depends_on_it(name: str, change: str) -> None:
    model, batch, where = known(name), EVENTS[:2].batch(), 4
    other = changed(batch, where, change)
    gaps = some_gaps(batch)
    before, after = (model.intensity_after(item, gaps) for item in (batch, other))
    assert torch.equal(before[:, :where], after[:, :where])
    assert not torch.equal(before[:, where:], after[:, where:])
    # Left limits too: an event at the time of a query is not seen.
    query = torch.minimum(laws.queries(batch), batch.times[:, where, None])
    assert torch.equal(model.intensity(batch, query), model.intensity(other, query))


@each
@torch.no_grad()
def test_events_at_one_time_are_seen_by_their_index(name: str) -> None:
    model, batch = known(name), WITH_TIES.batch()
    gaps = some_gaps(batch)
    before = model.intensity_after(batch, gaps)
    assert torch.isfinite(before).all()
    after = model.intensity_after(changed(batch, 3, "type"), gaps)  # the middle one of three
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[0, 3:], after[0, 3:])
    # A query at their time sees none of them, one just after it all.
    times = torch.tensor([[0.5], [3.0], [1.0]], dtype=torch.float64)
    expected = before.new_zeros(3, 1, 2) + model.log_base.double().exp()
    expected[0] = model.intensity_after(batch, torch.full_like(gaps, 0.5))[0, 1, :1]
    torch.testing.assert_close(model.intensity(batch, times), expected, rtol=1e-12, atol=0)
    just_after = model.intensity(batch, times + 1e-12)
    torch.testing.assert_close(just_after[0, 0], before[0, 4, 0], rtol=1e-6, atol=0)


@each
@torch.no_grad()
def test_the_laws_of_processes(name: str) -> None:
    model = known(name)
    laws.test_an_event_has_its_left_limit(model)
    batch, query = EVENTS.batch(), laws.queries(EVENTS.batch())
    rates = model.intensity(batch, query)
    assert torch.isfinite(rates).all()
    assert (rates > 0).all()
    for junk in (math.nan, math.inf):
        longer = padded(batch, 3, junk)
        torch.testing.assert_close(model.intensity(longer, query), rates, rtol=1e-10, atol=0)
        terms = [model(item) for item in (longer, batch)]
        torch.testing.assert_close(
            terms[0].per_sequence, terms[1].per_sequence, rtol=1e-10, atol=1e-10
        )
    alone = model.intensity(batch.take(torch.tensor([1])), query[1:2])
    torch.testing.assert_close(alone, rates[1:2], rtol=1e-10, atol=0)


@each
@torch.no_grad()
def test_training_terms_are_those_of_the_likelihood(name: str) -> None:
    model, batch = known(name), EVENTS.batch()
    # The same rule of 15 nodes, by the model's own code and by the general one.
    own, general = model(batch), likelihood_terms(model, batch, max_halvings=0)
    assert torch.equal(own.scored, general.scored)
    for field in ("log_intensity", "compensator", "tail", "num_events"):
        got, expected = getattr(own, field), getattr(general, field)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@each
@torch.no_grad()
def test_a_single_event_and_an_empty_batch_row_are_fine(name: str) -> None:
    model = known(name)
    batch = EventSequences.from_arrays([[7.0], []], [[1], []], num_types=2).batch()
    assert batch.times.shape == (2, 1)
    rates = model.intensity(batch, torch.tensor([[6.0, 9.0], [0.0, 1.0]], dtype=torch.float64))
    assert torch.isfinite(rates).all()
    assert float(model(batch).loss) == 0.0


@each
def test_gradients_reach_every_parameter(name: str) -> None:
    model = small(name).train()
    model(EVENTS.batch()).loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert float(parameter.grad.abs().max()) > 0, key


@each
def test_float32_is_close_to_float64_and_padding_is_never_read(name: str) -> None:
    model, batch = small(name), EVENTS.batch()
    gaps = some_gaps(batch)
    exact = model.intensity_after(batch, gaps)
    rounded = model.float()
    assert rounded.encoder.states(rounded.encoder.prepare(batch), gaps).after.dtype == torch.float32
    rates = rounded.intensity_after(batch, gaps)
    torch.testing.assert_close(rates, exact, rtol=1e-3, atol=1e-4)
    junk = padded(batch, 2, math.nan)
    rounded.train()(junk).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in rounded.parameters())


@each
@torch.no_grad()
def test_the_unit_of_time_cancels(name: str) -> None:
    settings = {**BASELINE_MODELS[name], "dim": 8, "num_heads": 2}
    rates = []
    for factor in (1.0, 3600.0):
        torch.manual_seed(0)
        model = make_event_model(EventModelConfig(num_types=2, **settings)).double().eval()
        events = EVENTS.rescale(factor, "s")
        model.fit_times(events)
        batch = events.batch()
        query = batch.last_times[:, None] + 0.7 * factor
        rates.append(factor * model.intensity(batch, query))
    torch.testing.assert_close(rates[0], rates[1], rtol=1e-7, atol=0)


@each
@torch.no_grad()
def test_states_move_between_events_where_the_model_says_so(name: str) -> None:
    model, batch = known(name), EVENTS[:1].batch()
    gaps = torch.tensor([0.0, 0.5, 1e6], dtype=torch.float64).expand(1, 9, 3)
    states = model.encoder.states(model.encoder.prepare(batch), gaps)
    assert states.now is not None
    assert torch.isfinite(states.now).all()
    torch.testing.assert_close(states.now[:, :, 0], states.after, rtol=1e-10, atol=1e-12)
    # After one event multi-time attention has nothing to choose from.
    moved = (states.now[:, :, 1] - states.after).abs().amax(dim=-1)[:, 1:]
    assert bool((moved > 1e-4).all()) == (name in CONTINUOUS)


@torch.no_grad()
def test_rmtpp_compensator_is_the_integral_of_its_intensity() -> None:
    model, batch = known("rmtpp"), EVENTS[:2].batch()
    start, end = batch.times[:, :5], batch.times[:, 1:6] + 0.3
    exact = model.total_compensator(batch, start, end)
    value = integrate_intensity(model, batch, start, end, tolerance=1e-10).value.sum(dim=-1)
    torch.testing.assert_close(exact, value, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_rmtpp_is_a_recurrence_over_the_tokens() -> None:
    encoder, batch = known("rmtpp").encoder, EVENTS[:2].batch()
    gru, tokens = encoder.recurrence, encoder.embedding(batch)
    state = tokens.new_zeros(2, 8)
    after = encoder.states(encoder.prepare(batch), None).after
    for i in range(6):
        parts = zip(
            (tokens[:, i] @ gru.weight_ih_l0.T + gru.bias_ih_l0).chunk(3, dim=-1),
            (state @ gru.weight_hh_l0.T + gru.bias_hh_l0).chunk(3, dim=-1),
            strict=True,
        )
        (reset_x, reset_h), (keep_x, keep_h), (value_x, value_h) = parts
        keep = torch.sigmoid(keep_x + keep_h)
        value = torch.tanh(value_x + torch.sigmoid(reset_x + reset_h) * value_h)
        state = (1 - keep) * value + keep * state
        torch.testing.assert_close(after[:, i], state)


@torch.no_grad()
def test_neural_hawkes_cells_follow_the_equations_of_the_paper() -> None:
    encoder, batch = known("neural_hawkes").encoder, EVENTS[:1].batch()
    weight = {k: v.detach().numpy() for k, v in encoder.named_parameters()}
    gaps = gaps_of(batch)[0].numpy() / float(encoder.scale.unit)
    later = np.array([0.0, 0.3, 5.0])

    def logistic(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    cell = target = rate = output = np.zeros(8)
    expected = []
    for kind, gap in zip(batch.types[0].tolist(), gaps, strict=True):
        now = target + (cell - target) * np.exp(-rate * gap)
        hidden = output * np.tanh(now)
        raw = weight["from_type.weight"] @ weight["types.weight"][kind] + weight["from_type.bias"]
        raw = (raw + weight["from_state.weight"] @ hidden).reshape(7, 8)
        value = np.tanh(raw[5])
        cell = logistic(raw[1]) * now + logistic(raw[0]) * value
        target = logistic(raw[3]) * target + logistic(raw[2]) * value
        output, rate = logistic(raw[4]), np.log1p(np.exp(raw[6]))
        decayed = target + (cell - target) * np.exp(-np.outer(later, rate))
        expected.append(output * np.tanh(decayed))
    query = torch.from_numpy(later * float(encoder.scale.unit)).expand(1, len(gaps), 3)
    states = encoder.states(encoder.prepare(batch), query)
    np.testing.assert_allclose(states.now[0].detach(), np.array(expected), rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_transformer_hawkes_is_attention_over_the_past() -> None:
    encoder, batch = small("transformer_hawkes", num_layers=1).encoder, EVENTS[:1].batch()
    elapsed = (batch.times[0] - batch.times[0, 0]) / encoder.scale.unit
    phase = elapsed[:, None] * encoder.bank.omega
    tokens = encoder.types.weight[batch.types[0]] + torch.cat((phase.sin(), phase.cos()), dim=-1)
    block = encoder.blocks[0]
    layer, normed = block.attention, block.attention_norm(tokens)
    after = encoder.states(encoder.prepare(batch), None).after[0]
    for i in range(9):
        heads = []
        for head in (slice(0, 4), slice(4, 8)):
            query = layer.query_projection(normed[i])[head]
            logits = layer.key_projection(normed[: i + 1])[:, head] @ query / 2
            heads.append(logits.softmax(dim=0) @ layer.value_projection(normed[: i + 1])[:, head])
        row = tokens[i] + layer.output_projection(torch.cat(heads))
        row = row + block.feedforward(block.feedforward_norm(row))
        torch.testing.assert_close(after[i], encoder.norm(row), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("gap", [1e-3, 0.8, 30.0])
def test_ode_rnn_flow_solves_its_equation_in_real_time(gap: float) -> None:
    flow = GapFlow(4, num_steps=40).double()
    start = torch.randn(4, dtype=torch.float64)

    def speed(t: float, h: np.ndarray) -> np.ndarray:
        return flow.field(torch.from_numpy(h)).detach().numpy() / (1 + t)

    solved = solve_ivp(speed, (0.0, gap), start.numpy(), rtol=1e-10, atol=1e-12).y[:, -1]
    got = flow(start, torch.tensor(gap, dtype=torch.float64)).detach()
    np.testing.assert_allclose(got, solved, rtol=1e-7, atol=1e-8)
    # The default number of steps is near it.
    flow.num_steps = 4
    rough = flow(start, torch.tensor(gap, dtype=torch.float64)).detach()
    np.testing.assert_allclose(rough, solved, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_ode_rnn_flows_between_updates() -> None:
    encoder, batch = known("ode_rnn").encoder, EVENTS[:1].batch()
    gaps = gaps_of(batch) / encoder.embedding.scale.unit
    tokens, state = encoder.embedding(batch), torch.zeros(1, 8, dtype=torch.float64)
    after = encoder.states(encoder.prepare(batch), None).after
    for i in range(9):
        state = encoder.update(tokens[:, i], encoder.flow(state, gaps[:, i]) if i else state)
        torch.testing.assert_close(after[:, i], state)


@torch.no_grad()
def test_mtan_is_attention_of_times_to_times() -> None:
    encoder, batch = known("mtan").encoder, EVENTS[:1].batch()
    elapsed = (batch.times[0] - batch.times[0, 0]) / encoder.embedding.scale.unit
    time, values = encoder.time, encoder.value_projection(encoder.embedding(batch))[0]
    omega = time.reference * time.log_factor.exp()

    def embed(t: Tensor) -> Tensor:
        line = omega[0] * t + time.shift[0]
        sines = [torch.sin(w * t + a) for w, a in zip(omega[1:], time.shift[1:], strict=True)]
        return torch.stack([line, *sines])

    gaps = some_gaps(batch)
    now = encoder.states(encoder.prepare(batch), gaps).now
    for i in (0, 1, 5, 8):
        for g in range(3):
            query = encoder.query_projection(
                embed(elapsed[i] + gaps[0, i, g] / encoder.embedding.scale.unit)
            )
            keys = torch.stack([encoder.key_projection(embed(t)) for t in elapsed[: i + 1]])
            heads = []
            for head in (slice(0, 4), slice(4, 8)):
                share = (keys[:, head] @ query[head] / 2).softmax(dim=0)
                heads.append(share @ values[: i + 1, head])
            row = encoder.output_projection(torch.cat(heads))
            row = encoder.norm(row + encoder.feedforward(encoder.feedforward_norm(row)))
            torch.testing.assert_close(now[0, i, g], row, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_attnhp_is_attention_that_may_see_nothing() -> None:
    encoder, batch = known("attnhp").encoder, EVENTS[:1].batch()
    elapsed = (batch.times[0] - batch.times[0, 0]) / encoder.scale.unit
    gaps = some_gaps(batch)
    now = encoder.states(encoder.prepare(batch), gaps).now

    def encode(t: Tensor) -> Tensor:
        return torch.cat(((t * encoder.bank.omega).sin(), (t * encoder.bank.omega).cos()))

    def add(layer: torch.nn.Module, row: Tensor, past: list[Tensor]) -> Tensor:
        """Return what a layer adds to a row of a state and a time, by the sum of its definition."""
        query, total, heads = layer.query_projection(row), [1.0, 1.0], [torch.zeros(4).double()] * 2
        for known_row in past:
            key, value = layer.key_projection(known_row), layer.value_projection(known_row)
            for head, part in enumerate((slice(0, 4), slice(4, 8))):
                weight = (query[part] @ key[part] / 2).exp()
                heads[head] = heads[head] + weight * value[part]
                total[head] = total[head] + weight
        return torch.tanh(torch.cat([h / w for h, w in zip(heads, total, strict=True)]))

    first, second = encoder.layers
    times = [encode(t) for t in elapsed]
    below = [
        torch.cat((encoder.types.weight[k], z)) for k, z in zip(batch.types[0], times, strict=True)
    ]
    above = [
        torch.cat((row[:8] + add(first, row, below[:i]), z))
        for i, (row, z) in enumerate(zip(below, times, strict=True))
    ]
    for i in (0, 1, 5, 8):
        for g in range(3):
            z = encode(elapsed[i] + gaps[0, i, g] / encoder.scale.unit)
            h = torch.zeros(8).double()
            h = h + add(first, torch.cat((h, z)), below[: i + 1])
            h = h + add(second, torch.cat((h, z)), above[: i + 1])
            torch.testing.assert_close(now[0, i, g], h, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_s2p2_layers_solve_their_equations() -> None:
    encoder, batch = known("s2p2").encoder, EVENTS[:1].batch()
    gaps = gaps_of(batch)[0].numpy() / float(encoder.scale.unit)
    later = np.array([0.0, 0.3, 2.0])
    prepared = encoder.prepare(batch)
    query = torch.from_numpy(later * float(encoder.scale.unit)).expand(1, len(gaps), 3)
    now = encoder.states(prepared, query).now
    first, second = encoder.layers

    def modes(linear: torch.nn.Linear, x: Tensor) -> np.ndarray:
        pairs = linear(x).numpy().reshape(-1, 2)
        return pairs[:, 0] + 1j * pairs[:, 1]

    def finish(layer: torch.nn.Module, x: np.ndarray, u: Tensor | None) -> Tensor:
        y = layer.leave(torch.from_numpy(np.stack([x.real, x.imag], axis=-1).ravel()))
        y = y if u is None else y + layer.skip * layer.norm(u)
        value, gate = layer.gate(y).chunk(2)
        out = value * torch.sigmoid(gate)
        return out if u is None else u + out

    def rates(layer: torch.nn.Module) -> np.ndarray:
        return -layer.log_decay.exp().numpy() + 1j * layer.angle.numpy()

    start = [layer.start.numpy() @ np.array([1, 1j]) for layer in (first, second)]
    x, held = list(start), None
    for i, gap in enumerate(gaps):
        jump = encoder.types.weight[batch.types[0, i]]
        x[0] = np.exp(rates(first) * gap) * x[0] + modes(first.jump, jump)
        if held is not None:

            def speed(t: float, state: np.ndarray, held: Tensor = held) -> np.ndarray:
                factor = torch.nn.functional.softplus(second.step(held)).numpy()
                return factor * rates(second) * (state + modes(second.enter, held))

            x[1] = solve_ivp(speed, (0.0, gap), x[1], rtol=1e-10, atol=1e-12).y[:, -1]
        x[1] = x[1] + modes(second.jump, jump)
        u = finish(first, x[0], None)
        held = second.norm(u)
        np.testing.assert_allclose(prepared.states[0][0, i], x[0], rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(prepared.states[1][0, i], x[1], rtol=1e-7, atol=1e-8)
        for g, wait in enumerate(later):
            input_now = finish(first, np.exp(rates(first) * wait) * x[0], None)
            factor = np.exp(
                torch.nn.functional.softplus(second.step(held)).numpy() * rates(second) * wait
            )
            moved = factor * x[1] + (factor - 1.0) * modes(second.enter, held)
            expected = encoder.norm(finish(second, moved, input_now))
            torch.testing.assert_close(now[0, i, g], expected, rtol=1e-7, atol=1e-8)


PICKS = ("rmtpp", "neural_hawkes", "transformer_hawkes", "attnhp", "s2p2", "ode_rnn")


@pytest.mark.parametrize("name", PICKS)
@torch.no_grad()
def test_events_that_are_picked_have_the_same_states(name: str) -> None:
    encoder, batch = known(name).encoder, EVENTS[:2].batch()
    gaps, events = some_gaps(batch), torch.tensor([[0, 8, 3], [5, 5, 1]])
    prepared = encoder.prepare(batch)
    whole = encoder.states(prepared, gaps)
    series = torch.arange(2)[:, None]
    found = encoder.states(encoder.pick(prepared, events), gaps[series, events])
    for got, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(got, expected[series, events], rtol=1e-12, atol=1e-12)


def test_options_that_an_encoder_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="'steps'; did you mean 'num_steps'"):
        make_event_model(
            EventModelConfig(num_types=2, encoder="ode_rnn", encoder_options={"steps": 3})
        )
    with pytest.raises(ValueError, match="gaps_per_unit must be positive"):
        make_event_model(
            EventModelConfig(
                num_types=2, encoder="contiformer", encoder_options={"gaps_per_unit": 0}
            )
        )
    model = make_event_model(
        EventModelConfig(num_types=2, encoder="ode_rnn", encoder_options={"num_steps": 3})
    )
    assert model.encoder.flow.num_steps == 3
    assert set(backbone_names("events")) == {"osciformer", *BASELINE_MODELS}


# Each type excites itself strongly.
SELF_EXCITING = HawkesProcess(base=[0.2, 0.2], branching=[[0.7, 0.0], [0.0, 0.7]], decay=4.0)


@cache
def simulated(count: int = 100) -> tuple[EventSequences, EventSequences]:
    """Return sequences of that process to learn from, and 40 others."""
    settings = {"horizon": 20.0, "generator": torch.Generator().manual_seed(0)}
    events = simulate_hawkes(SELF_EXCITING, num_sequences=count + 40, **settings)
    return events[:count], events[count:]


@each
def test_a_few_steps_of_training_beat_poisson(name: str) -> None:
    train, held_out = (events.first(SHORT.get(name, 24)) for events in simulated())
    settings = {**BASELINE_MODELS[name], "dim": 16, "dropout": 0.0}
    settings["encoder_options"] = QUICK.get(name, {})
    model = make_event_model(EventModelConfig(num_types=2, **settings)).fit_times(train)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(6):
        for batch in train.batches(25, shuffle=True, seed=epoch):
            optimizer.zero_grad()
            model(batch).loss.backward()
            optimizer.step()
    model.eval()
    poisson = PoissonProcess.fit(train)
    with torch.no_grad():
        # The general code judges, not the model's own terms.
        learned = -float(likelihood_terms(model, held_out.batch(), max_halvings=0).loss)
    constant = -float(likelihood_terms(poisson, held_out.batch()).loss)
    assert learned > constant + 0.1


@pytest.mark.parametrize(("name", "share"), [("s2p2", 0.9), ("attnhp", 0.6)])
def test_longer_training_comes_near_the_process_itself(name: str, share: float) -> None:
    process, (train, held_out) = SELF_EXCITING, simulated(300)
    torch.manual_seed(0)
    settings = {**BASELINE_MODELS[name], "dim": 16, "dropout": 0.0}
    model = make_event_model(EventModelConfig(num_types=2, **settings)).fit_times(train)
    optimizer = torch.optim.Adam(model.parameters())
    num_epochs, num_batches = 10, 12
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, num_epochs * num_batches)
    for epoch in range(num_epochs):
        for batch in train.batches(25, shuffle=True, seed=epoch):
            optimizer.zero_grad()
            model(batch).loss.backward()
            optimizer.step()
            schedule.step()
    batch = held_out.batch()
    with torch.no_grad():
        learned, right, constant = (
            -float(likelihood_terms(item, batch, max_halvings=0).loss)
            for item in (model.eval(), process, PoissonProcess.fit(train))
        )
    assert constant + share * (right - constant) < learned < right + 0.02
