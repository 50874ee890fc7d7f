from __future__ import annotations

import pytest
import torch

from osciformer.math.quadrature import gauss_legendre
from osciformer.nn import OscillatorAttention
from osciformer.ops.padding import clean_times
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    assert_time_shift_invariant,
    irregular_batch,
    relative_error,
)

QUERIES = ("hold", "linear", "ridge", "ridge_causal", "anchored", "learned")
CAUSAL_QUERIES = tuple(query for query in QUERIES if query != "ridge")
DIM, HEADS = 8, 2


def make_layer(query: str = "hold", *, dtype: torch.dtype = torch.float64, **settings):
    settings = {"omega_range": (0.5, 20.0), "num_modes": 3, **settings}
    layer = OscillatorAttention(DIM, HEADS, query=query, **settings).to(dtype)
    # Parameters that start at zero would hide what they do.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


@pytest.fixture
def batch():
    return irregular_batch(3, 7, DIM)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", QUERIES)
def test_rows_are_finite_and_padding_rows_are_zero(batch, query, value, direction):
    layer = make_layer(query, value=value, direction=direction)
    out = layer(batch.x, batch.times, batch.mask)
    assert out.shape == batch.x.shape
    assert bool(out.isfinite().all())
    assert bool((out[~batch.mask] == 0).all())
    assert bool((out[batch.mask] != 0).all())


@pytest.mark.parametrize("query", QUERIES)
def test_padding_changes_nothing(batch, query):
    layer = make_layer(query)
    # The ridge fits solve a system of condition 1e5.
    tolerance = 1e-9 if query.startswith("ridge") else 1e-12
    assert_padding_invariant(layer, batch.x, batch.times, batch.mask, tolerance=tolerance)


@pytest.mark.parametrize("query", ["hold", "linear", "ridge_causal"])
def test_padding_inside_a_series_equals_leaving_the_tokens_out(query):
    batch = irregular_batch(2, 7, DIM, ragged=False)
    layer = make_layer(query)
    mask = batch.mask.clone()
    mask[:, [0, 3]] = False
    out = layer(batch.x, batch.times, mask)
    kept = [1, 2, 4, 5, 6]
    assert relative_error(out[:, kept], layer(batch.x[:, kept], batch.times[:, kept])) < 1e-9


@pytest.mark.parametrize("query", QUERIES)
def test_batch_order_changes_nothing(batch, query):
    assert_batch_order_invariant(make_layer(query), batch.x, batch.times, batch.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("query", CAUSAL_QUERIES)
def test_the_future_does_not_reach_the_past(query, dtype):
    batch = irregular_batch(2, 8, DIM, ragged=False, ties=True, dtype=dtype)
    assert_causal(make_layer(query, dtype=dtype), batch.x, batch.times)


def test_ridge_lets_the_future_reach_the_past():
    batch = irregular_batch(2, 8, DIM, ragged=False)
    with pytest.raises(AssertionError, match="reach the past"):
        assert_causal(make_layer("ridge"), batch.x, batch.times)


@pytest.mark.parametrize("query", ["hold", "linear", "anchored"])
def test_a_shift_of_all_times_changes_nothing(batch, query):
    layer = make_layer(query, drive_modes=2)
    assert_time_shift_invariant(layer, batch.x, batch.times, batch.mask)


def test_a_learned_trajectory_lives_on_the_time_axis(batch):
    with pytest.raises(AssertionError, match="shift of all times"):
        assert_time_shift_invariant(make_layer("learned"), batch.x, batch.times, batch.mask)


@pytest.mark.parametrize("query", QUERIES)
def test_a_fully_masked_series_is_zero_with_zero_gradients(query):
    layer = make_layer(query)
    x = torch.full((2, 4, DIM), torch.nan, dtype=torch.float64, requires_grad=True)
    times = torch.full((2, 4), torch.nan, dtype=torch.float64, requires_grad=True)
    out = layer(x, times, torch.zeros(2, 4, dtype=torch.bool))
    assert bool((out == 0).all())
    out.sum().backward()
    for name, tensor in [("x", x), ("times", times), *layer.named_parameters()]:
        assert tensor.grad is None or bool((tensor.grad == 0).all()), name


@pytest.mark.parametrize("query", QUERIES)
def test_one_token_gives_its_own_value(query):
    layer = make_layer(query)
    x = torch.randn(2, 1, DIM, dtype=torch.float64)
    out = layer(x, torch.full((2, 1), 3.0, dtype=torch.float64))
    assert relative_error(out, layer.output_projection(layer.value_projection(x))) < 1e-14


@pytest.mark.parametrize("query", QUERIES)
def test_gradients_reach_every_parameter(batch, query):
    layer = OscillatorAttention(
        DIM, HEADS, query=query, drive_modes=2, equilibrium=True, omega_range=(0.5, 20.0)
    ).double()
    times = torch.where(batch.mask, batch.times, 0.0).requires_grad_()
    layer(batch.x, times, batch.mask).square().sum().backward()
    for name, tensor in [("times", times), *layer.named_parameters()]:
        assert tensor.grad is not None, name
        assert bool(tensor.grad.isfinite().all()), name
        assert float(tensor.grad.abs().max()) > 0, name
    assert bool((times.grad[~batch.mask] == 0).all())


@pytest.mark.parametrize("query", QUERIES)
def test_a_read_at_an_observation_is_its_row(batch, query):
    layer = make_layer(query)
    out = layer(batch.x, batch.times, batch.mask)
    reads = layer(batch.x, batch.times, batch.mask, batch.times.nan_to_num(2.0))
    tolerance = 1e-9 if query.startswith("ridge") else 1e-12
    assert relative_error(reads[batch.mask], out[batch.mask]) < tolerance


@pytest.mark.parametrize("query", [query for query in QUERIES if query != "linear"])
def test_a_read_does_not_depend_on_other_reads_or_their_order(batch, query):
    layer = make_layer(query)
    query_times = torch.tensor([[0.9, -1.0, 0.3, 0.5, 4.0]], dtype=torch.float64).expand(3, 5)
    together = layer(batch.x, batch.times, batch.mask, query_times)
    alone = [layer(batch.x, batch.times, batch.mask, query_times[:, [m]]) for m in range(5)]
    assert relative_error(together, torch.cat(alone, dim=1)) < 1e-9


@pytest.mark.parametrize("query", QUERIES)
def test_reads_at_the_times_of_absent_tokens_are_reads_like_any_other(query):
    batch = irregular_batch(2, 6, DIM, ragged=False)
    layer = make_layer(query)
    mask = batch.mask.clone()
    mask[:, [1, 5]] = False
    clean = clean_times(batch.times, mask)
    together = layer(batch.x, batch.times, mask, clean)
    alone = [layer(batch.x, batch.times, mask, clean[:, [m]]) for m in range(6)]
    assert relative_error(together, torch.cat(alone, dim=1)) < 1e-9


def test_linear_reads_after_the_last_observation_are_independent(batch):
    layer = make_layer("linear")
    query_times = torch.tensor([[4.0, 1.5, 1.1]], dtype=torch.float64).expand(3, 3)
    together = layer(batch.x, batch.times, batch.mask, query_times)
    alone = [layer(batch.x, batch.times, batch.mask, query_times[:, [m]]) for m in range(3)]
    assert relative_error(together, torch.cat(alone, dim=1)) < 1e-12


@pytest.mark.parametrize("query", CAUSAL_QUERIES)
def test_a_read_does_not_see_later_observations(query):
    batch = irregular_batch(2, 8, DIM, ragged=False)
    layer = make_layer(query)
    query_times = 0.5 * (batch.times[:, 3:4] + batch.times[:, 4:5])
    whole = layer(batch.x, batch.times, query_times=query_times)
    prefix = layer(batch.x[:, :4], batch.times[:, :4], query_times=query_times)
    assert relative_error(whole, prefix) < 1e-9


def test_a_read_before_the_first_observation_attends_to_nothing(batch):
    layer = make_layer()
    query_times = torch.full((3, 2), -1.0, dtype=torch.float64)
    out, inside = layer(batch.x, batch.times, batch.mask, query_times, return_internals=True)
    assert bool((inside.weights == 0).all())
    assert torch.equal(out, layer.output_projection.bias.expand_as(out))


def test_query_tokens_of_reads_can_be_given(batch):
    layer = make_layer()
    query_times = torch.full((3, 2), 2.0, dtype=torch.float64)
    query_x = torch.randn(3, 2, DIM, dtype=torch.float64, requires_grad=True)
    given = layer(batch.x, batch.times, batch.mask, query_times, query_x=query_x)
    held = layer(batch.x, batch.times, batch.mask, query_times)
    assert relative_error(given, held) > 1e-3
    given.sum().backward()
    assert float(query_x.grad.abs().max()) > 0


def test_weights_sum_to_one_and_are_zero_on_what_a_row_does_not_see(batch):
    _, inside = make_layer()(batch.x, batch.times, batch.mask, return_internals=True)
    total = inside.weights.sum(dim=-1)  # [B, H, M]
    seen = batch.mask[:, None].expand_as(total)
    assert relative_error(total[seen], torch.ones_like(total[seen])) < 1e-12
    assert bool((total[~seen] == 0).all())
    assert bool((inside.weights.triu(1) == 0).all())


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("driven", [False, True], ids=["free", "driven"])
def test_trajectories_and_weights_explain_the_output(driven, direction):
    batch = irregular_batch(1, 4, DIM, ragged=False)
    layer = make_layer(
        value="point", drive_modes=2 * driven, equilibrium=driven, direction=direction
    )
    out, inside = layer(batch.x, batch.times, return_internals=True)
    values = inside.value_trajectories(batch.times[0]).nan_to_num(0.0)  # [B, T, N, H, C]
    attended = torch.einsum("bhmn,bmnhc->bmhc", inside.weights, values)
    assert relative_error(layer.project_output(attended), out) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("query", QUERIES)
def test_equal_oscillators_of_a_channel_are_one(batch, query, direction):
    settings = {"direction": direction, "drive_modes": 2, "equilibrium": True}
    one, three = (
        make_layer(query, **settings),
        make_layer(query, oscillators_per_channel=3, **settings),
    )
    shares = torch.tensor([0.5, 0.7, -0.2], dtype=torch.float64)
    for name, wanted in three.state_dict().items():
        given = one.state_dict()[name]
        if name.startswith(("key_projection", "value_projection", "key_equi", "value_equi")):
            by_head = given.unflatten(0, (HEADS, 1, -1))  # the oscillators share the token's start
            parts = shares.view(1, 3, 1, *[1] * (given.ndim - 1)) * by_head
            given = parts.flatten(0, 2)
        elif name.endswith("velocity"):
            given = torch.stack([torch.block_diag(x, x, x) for x in given])
        elif given.shape != wanted.shape:  # spectra and drives are the same for each
            given = torch.cat([given] * 3, dim=-1)
        wanted.copy_(given)
    rows = [layer(batch.x, batch.times, batch.mask) for layer in (one, three)]
    assert relative_error(*rows) < 1e-10
    reads = torch.rand(3, 4, dtype=torch.float64)
    rows = [layer(batch.x, batch.times, batch.mask, reads) for layer in (one, three)]
    assert relative_error(*rows) < 1e-10


@torch.no_grad()
def test_several_oscillators_of_a_channel_add_up(batch):
    layer = make_layer(oscillators_per_channel=3)
    x, times = batch.x[:1, :4], batch.times[:1, :4]
    _, inside = layer(x, times, return_internals=True)
    assert inside.keys.start.shape == (1, 4, HEADS, 3 * DIM // HEADS)
    queries = layer.query_projection(x).unflatten(-1, (HEADS, -1))[0]  # [N, H, C]
    nodes, weights = gauss_legendre(40)
    for j in range(4):
        logits = torch.full((HEADS, 4), -torch.inf, dtype=torch.float64)
        for i in range(j + 1):
            grid = times[0, i] + (times[0, j] - times[0, i]) * nodes
            keys = inside.key_trajectories(grid)[0, :, i].unflatten(-1, (3, -1)).sum(dim=-2)
            logits[:, i] = torch.einsum("hc,thc,t->h", queries[j], keys, weights)
        wanted = (logits * (DIM // HEADS) ** -0.5).softmax(dim=-1)
        torch.testing.assert_close(inside.weights[0, :, j], wanted, rtol=0, atol=1e-9)


@torch.no_grad()
def test_several_oscillators_start_as_large_as_one():
    torch.manual_seed(0)
    sizes = []
    for count in (1, 16):
        layer = OscillatorAttention(64, 2, oscillators_per_channel=count)
        start = layer.project_keys(torch.randn(4, 50, 64)).keys.start
        sizes.append(float(start.unflatten(-1, (count, -1)).sum(dim=-2).std()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


@torch.no_grad()
def test_key_trajectories_start_at_the_key_and_obey_the_equation_of_motion():
    batch = irregular_batch(1, 3, DIM, ragged=False)
    layer = make_layer()
    _, inside = layer(batch.x, batch.times, return_internals=True)
    at_start = inside.key_trajectories(batch.times)[0]
    own = torch.stack([at_start[n, n] for n in range(3)])
    assert relative_error(own, inside.keys.start[0]) < 1e-14
    assert bool(at_start[0, 1:].isnan().all())

    t = torch.tensor(2.0, dtype=torch.float64)
    h = 1e-4
    before, here, after = inside.key_trajectories(torch.stack((t - h, t, t + h)))[0]
    acceleration = (after - 2 * here + before) / h**2
    speed = (after - before) / (2 * h)
    omega, zeta = inside.key_omega, inside.key_zeta
    residual = acceleration + 2 * zeta * omega * speed + omega**2 * here
    assert float(residual.abs().max()) < 1e-4 * float((omega**2 * here).abs().max())


def test_times_may_be_more_precise_than_the_layer():
    batch = irregular_batch(2, 6, DIM, ragged=False)
    layer = make_layer()
    expected = layer(batch.x, batch.times)
    out = layer.float()(batch.x.float(), batch.times + 1e9)
    assert out.dtype == torch.float32
    # float64 keeps 1e-7 of the unit here, float32 would keep 64 units.
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("query", QUERIES)
def test_autocast_to_bf16_stays_close(query):
    batch = irregular_batch(2, 6, DIM, ragged=False, dtype=torch.float32)
    layer = make_layer(query, dtype=torch.float32)
    expected = layer(batch.x, batch.times)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(batch.x, batch.times)
    assert relative_error(out, expected) < 0.05


def test_spectra_and_banks_survive_half_precision():
    layer = make_layer("ridge", drive_modes=2, dtype=torch.float32)
    omega, bank = layer.key_spectrum.omega, layer.query_bank.omega.clone()
    layer = layer.bfloat16()
    assert layer.key_projection.weight.dtype == torch.bfloat16
    assert layer.key_spectrum.raw_omega.dtype == torch.float32
    assert torch.equal(layer.key_spectrum.omega, omega)
    assert torch.equal(layer.query_bank.omega, bank)
    batch = irregular_batch(2, 6, DIM, ragged=False, dtype=torch.float32)
    out = layer(batch.x.bfloat16(), batch.times)
    assert out.dtype == torch.bfloat16
    assert bool(out.isfinite().all())


def test_no_damping_is_an_exact_zero_that_is_not_learned(batch):
    layer = make_layer(undamped=True)
    assert bool((layer.key_spectrum.zeta == 0).all())
    assert not any("zeta" in name for name, _ in layer.named_parameters())
    assert bool(layer(batch.x, batch.times, batch.mask).isfinite().all())


def test_velocity_maps_start_at_zero_and_can_be_left_out(batch):
    torch.manual_seed(0)
    with_maps = OscillatorAttention(DIM, HEADS).double()
    torch.manual_seed(0)
    without = OscillatorAttention(DIM, HEADS, velocity=False).double()
    args = (batch.x, batch.times, batch.mask)
    assert without.key_velocity is None
    assert relative_error(with_maps(*args), without(*args)) < 1e-14


def test_anchored_starts_as_hold(batch):
    torch.manual_seed(0)
    hold = OscillatorAttention(DIM, HEADS).double()
    anchored = OscillatorAttention(DIM, HEADS, query="anchored").double()
    missing = anchored.load_state_dict(hold.state_dict(), strict=False)
    assert not missing.unexpected_keys
    args = (batch.x, batch.times, batch.mask)
    assert relative_error(anchored(*args), hold(*args)) < 1e-12


def test_dropout_acts_in_training_only(batch):
    layer = make_layer(dropout=0.5)
    args = (batch.x, batch.times, batch.mask)
    assert not torch.equal(layer(*args), layer(*args))
    layer.eval()
    assert torch.equal(layer(*args), layer(*args))


@torch.no_grad()
def test_paper_preset_and_what_overrides_it():
    layer = OscillatorAttention(256, preset="paper")
    assert (layer.query, layer.num_heads, layer.head_dim) == ("ridge", 8, 32)
    assert layer.query_bank.omega.numel() == 8
    assert layer.dropout.p == 0.1
    for spectrum in (layer.key_spectrum, layer.value_spectrum):
        assert 1e-2 <= float(spectrum.omega.min()) <= float(spectrum.omega.max()) <= 10.001
        assert 0.049 <= float(spectrum.zeta.min()) <= float(spectrum.zeta.max()) <= 0.401
    assert bool((layer.key_velocity == 0).all())
    other = OscillatorAttention(16, 2, preset="paper", query="hold", dropout=0.0)
    assert (other.query, other.num_heads, other.dropout.p) == ("hold", 2, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 10, "num_heads": 4}, "dim=10, num_heads=4"),
        ({"query": "holt"}, "query must be one of 'hold', 'linear'.*'holt'"),
        ({"value": "mean"}, "value must be one of 'average', 'point'; got 'mean'"),
        ({"direction": "both"}, "direction must be one of 'causal', 'bidirectional'"),
        ({"bank": "octaves"}, "bank must be one of"),
        ({"preset": "papers"}, "preset must be one of 'default', 'paper'; got 'papers'"),
        ({"dropout": 1.5}, "dropout must be from 0 to below 1; got 1.5"),
        ({"drive_modes": -1}, "drive_modes must be not negative; got -1"),
        ({"oscillators_per_channel": 0}, "oscillators_per_channel must be at least 1; got 0"),
        ({"omega_range": (2.0, 1.0)}, "low=2.0, high=1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OscillatorAttention(**{"dim": 8, "num_heads": 2, **settings})


X, T = torch.zeros(2, 3, DIM), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X[..., :4], T), r"x must be \[B, N, 8\]; got \[2, 3, 4\]"),
        ((X.long(), T), "x must be a floating-point tensor; got torch.int64"),
        ((X, T[:, :2]), r"times must be \[B, N\] = \[2, 3\] like x; got \[2, 2\]"),
        ((X, T.long()), "times must be a floating-point tensor; got torch.int64"),
        ((X, T, T), "mask must be bool"),
        ((X, T, T[:1] > 0), r"mask must be \[B, N\] = \[2, 3\]"),
        ((X, T, None, T[0]), r"query_times must be \[B, M\] with B = 2; got \[3\]"),
        ((X, torch.tensor([[0.0, 2.0, 1.0]] * 2)), "times.*1.*2"),
        ((X, torch.tensor([[0.0, torch.nan, 1.0]] * 2)), "times"),
    ],
)
def test_bad_input_is_refused(args, message):
    layer = OscillatorAttention(DIM, HEADS)
    with pytest.raises((ValueError, TypeError), match=message):
        layer(*args)


def test_query_tokens_without_times_are_refused():
    layer = OscillatorAttention(DIM, HEADS)
    with pytest.raises(ValueError, match="query_x is given without query_times"):
        layer(X, T, query_x=X)
    with pytest.raises(ValueError, match=r"query_x must be \[B, M, D\] = \[2, 3, 8\]"):
        layer(X, T, None, T, query_x=X[:, :2])
