from __future__ import annotations

import math

import pytest
import torch

from osciformer.models import OsciFormer
from osciformer.nn import parameter_groups
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    assert_time_shift_invariant,
    irregular_batch,
    relative_error,
)

FEATURES = 3
CAUSAL_QUERIES = ("hold", "linear", "ridge_causal", "anchored", "learned")


def make_model(query: str = "hold", **settings) -> OsciFormer:
    settings = {"dim": 8, "num_heads": 2, "num_modes": 3, "omega_range": (0.5, 20.0), **settings}
    return OsciFormer(FEATURES, query=query, **settings).double()


@pytest.fixture
def batch():
    return irregular_batch(3, 7, FEATURES)


@pytest.mark.parametrize("query", CAUSAL_QUERIES)
def test_the_future_does_not_reach_the_past(query):
    batch = irregular_batch(2, 7, FEATURES, ragged=False)
    model = make_model(query)
    assert_causal(lambda *args: model(*args).states, batch.x, batch.times)


@pytest.mark.parametrize("query", [*CAUSAL_QUERIES, "ridge"])
def test_padding_and_batch_order_change_nothing(batch, query):
    model = make_model(query)
    args = (lambda *args: model(*args).states, batch.x, batch.times, batch.mask)
    assert_padding_invariant(*args, tolerance=1e-9)
    assert_batch_order_invariant(*args)


@pytest.mark.parametrize("query", ["hold", "linear", "anchored"])
def test_a_shift_of_all_times_changes_nothing(batch, query):
    model = make_model(query).fit_time_scale(batch.times, batch.mask)
    args = (lambda *args: model(*args).states, batch.x, batch.times, batch.mask)
    assert_time_shift_invariant(*args)


def test_the_unit_of_time_changes_nothing(batch):
    """Seconds or days: the model fitted to either gives the same states."""
    states = []
    for unit in (1.0, 86400.0):
        torch.manual_seed(0)
        model = make_model(omega_range="data").fit_time_scale(unit * batch.times, batch.mask)
        states.append(model(batch.x, unit * batch.times, batch.mask).states)
    assert relative_error(*states) < 1e-6


def test_a_fully_masked_series_is_finite_with_zero_gradients(batch):
    model = make_model(static_dim=1)
    static = torch.ones(3, 1, dtype=torch.float64)
    encoded = model(batch.x, batch.times, torch.zeros_like(batch.mask), static)
    assert bool((encoded.states == 0).all())
    encoded.states.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or bool((parameter.grad == 0).all()), name


@pytest.mark.parametrize("query", [*CAUSAL_QUERIES, "ridge"])
def test_gradients_reach_every_parameter(batch, query):
    model = make_model(query, static_dim=2, drive_modes=1, equilibrium=True)
    static = torch.randn(3, 2, dtype=torch.float64)
    encoded = model(batch.x, batch.times, batch.mask, static)
    (encoded.states * torch.randn_like(encoded.states)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize("query", [*CAUSAL_QUERIES, "ridge"])
def test_a_read_at_an_observation_is_its_state(batch, query):
    model = make_model(query)
    encoded = model(batch.x, batch.times, batch.mask)
    reads = model.read(encoded, batch.times.nan_to_num(2.0))
    assert relative_error(reads[batch.mask], encoded.states[batch.mask]) < 1e-9


def test_reads_are_functions_of_time(batch):
    model = make_model().fit_time_scale(batch.times, batch.mask)
    grid = torch.linspace(-0.2, 2.0, 9, dtype=torch.float64).expand(3, 9)
    encoded = model(batch.x, batch.times, batch.mask, query_times=grid)
    again = model.read(encoded, grid[:, [7, 2]])
    assert relative_error(again, encoded.reads[:, [7, 2]]) < 1e-12
    grid = grid.clone().requires_grad_()
    reads = model.read(encoded, grid)
    (reads * torch.randn_like(reads)).sum().backward()
    assert bool(grid.grad.isfinite().all())
    assert float(grid.grad.abs().max()) > 1e-3


@torch.no_grad()
def test_frequencies_come_from_the_data():
    times = torch.arange(0.0, 100.25, 0.5).expand(2, -1)
    model = OsciFormer(FEATURES, dim=64, num_heads=2).fit_time_scale(1e6 + times.double())
    assert (model.time_scale.reference.item(), model.time_scale.scale.item()) == (1e6, 100.0)
    for block in model.encoder:
        omega = block.attention.key_spectrum.omega
        # Per unit of 100: half a turn in 100 to half a turn in 0.5.
        assert math.pi * 0.999 < float(omega.min()) < 3 * math.pi
        assert 60 * math.pi < float(omega.max()) < 200.2 * math.pi


@torch.no_grad()
def test_typical_frequencies_ignore_rare_short_gaps():
    times = torch.arange(0.0, 100.0, 2.0, dtype=torch.float64)[None]
    hurried = torch.cat((times, times[:, 5:15] + 0.01), dim=1).sort().values
    model = OsciFormer(FEATURES, dim=64, num_heads=2, omega_range="typical")
    omega = torch.stack(
        [
            spectrum.omega
            for block in model.fit_time_scale(hurried).encoder
            for spectrum in (block.attention.key_spectrum, block.attention.value_spectrum)
        ]
    )
    # Per unit of 98, the span: one radian in 98 to half a turn in 2.
    assert 0.999 < float(omega.min()) < 3.0
    assert 20 * math.pi < float(omega.max()) < 49.1 * math.pi


@torch.no_grad()
def test_given_frequencies_are_kept():
    model = make_model("ridge", omega_range=(1.0, 2.0))
    omega = model.encoder.blocks[0].attention.key_spectrum.omega
    model.fit_time_scale(irregular_batch(2, 50, 1, span=1e3, ragged=False).times)
    assert torch.equal(model.encoder.blocks[0].attention.key_spectrum.omega, omega)
    assert model.encoder.blocks[0].attention.query_bank.omega.tolist()[0] == 1.0


def test_missing_values_and_statics(batch):
    model = make_model(static_dim=2)
    x = batch.x.clone()
    x[0, 2, 1] = torch.nan
    static = torch.tensor([[0.0, torch.nan]] * 3, dtype=torch.float64)
    assert bool(model(x, batch.times, batch.mask, static).states.isfinite().all())
    observed = ~x.isnan()
    junk = torch.where(observed, x, 7.0)
    a = model(x, batch.times, batch.mask, static)
    b = model(junk, batch.times, batch.mask, static, observed=observed)
    assert torch.equal(a.states, b.states)


def test_weights_of_a_saved_model_give_the_same_states(batch):
    model = make_model("ridge_causal", omega_range="data").fit_time_scale(batch.times, batch.mask)
    other = OsciFormer.from_config(model.config).double()
    other.load_state_dict(model.state_dict())
    args = (batch.x, batch.times, batch.mask)
    assert torch.equal(other(*args).states, model(*args).states)


def test_float32_stays_close_to_float64(batch):
    model = make_model()
    expected = model(batch.x, batch.times, batch.mask).states
    model = model.float()
    states = model(batch.x.float(), batch.times, batch.mask).states
    assert states.dtype == torch.float32
    assert relative_error(states, expected) < 1e-5


def test_a_few_steps_of_training_reduce_the_loss():
    batch = irregular_batch(16, 12, FEATURES, ragged=False, dtype=torch.float32)
    model = OsciFormer(FEATURES, dim=16, num_heads=2).fit_time_scale(batch.times)
    head = torch.nn.Linear(16, FEATURES)
    groups = parameter_groups(torch.nn.ModuleList((model, head)), weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses = []
    for _ in range(15):
        states = model(batch.x[:, :-1], batch.times[:, :-1]).states
        loss = (head(states) - batch.x[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_bad_input_is_refused(batch):
    model = make_model()
    with pytest.raises(ValueError, match=r"values must be \[B, N, 3\]; got \[3, 7, 2\]"):
        model(batch.x[..., :2], batch.times)
    with pytest.raises(ValueError, match="times must be a floating-point tensor"):
        model(batch.x, torch.zeros(3, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"query_times must be \[B, M\] with B = 3"):
        model.read(model(batch.x, batch.times, batch.mask), torch.zeros(2, 1))
