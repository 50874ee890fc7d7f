from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from osciformer.models import OsciFormer
from osciformer.nn import Clock, Encoder, EncoderBlock, ResonatorLayer, parameter_groups
from osciformer.streaming import OnlineSession
from osciformer.testing import (
    assert_batch_order_invariant,
    assert_causal,
    assert_padding_invariant,
    assert_time_shift_invariant,
    irregular_batch,
    relative_error,
)

DIM = 6
DIRECTIONS = ("causal", "bidirectional")
#: Of layers: their direction, and whether the tokens drive their clock.
KINDS = [(direction, selective) for direction in DIRECTIONS for selective in (False, True)]


def make_layer(
    direction: str = "causal", selective: bool = False, **settings: Any
) -> ResonatorLayer:
    settings = {"omega_range": (0.5, 20.0), "selective": selective, **settings}
    return with_uneven_clock(ResonatorLayer(DIM, direction=direction, **settings).double())


def with_uneven_clock(model: nn.Module) -> Any:
    """Return the model with clocks that no longer run as time does."""
    for part in model.modules():
        if isinstance(part, Clock):
            nn.init.normal_(part.speed_projection.weight)
    return model


def make_model(*blocks: str, **settings: Any) -> OsciFormer:
    blocks = blocks or ("resonator", "attention")
    settings = {"dim": DIM, "num_heads": 2, "omega_range": (0.5, 20.0), **settings}
    return with_uneven_clock(OsciFormer(3, blocks=blocks, **settings).double())


@pytest.fixture
def batch():
    return irregular_batch(3, 7, DIM, ties=True)


def solved(layer: ResonatorLayer, x, times, at: float) -> torch.Tensor:
    """Return positions, velocities over omega and amplitudes, by exponentials of matrices."""
    omega, zeta = layer.spectrum.omega[:, 0], layer.spectrum.zeta[:, 0]
    drive, stops = layer.drive_projection(x), [t for t in times.tolist() if t <= at] + [at]
    start = torch.stack((drive[0], 0 * omega))
    speeds = torch.ones(len(x), dtype=torch.float64)
    if layer.clock is not None:
        start = layer.start * torch.stack((1.0 + 0 * omega, omega))
        speeds = (layer.clock.speed_projection(x)[:, 0].exp() + 1.0).log()
    rows = []
    for c in range(DIM):
        w, z = omega[c].item(), zeta[c].item()
        motion = torch.tensor([[0.0, 1.0], [-w * w, -2 * z * w]], dtype=torch.float64)
        state = start[:, c]
        gaps = torch.tensor(stops, dtype=torch.float64).diff() * speeds[: len(stops) - 1]
        for level, gap in zip(drive[:, c].tolist(), gaps, strict=False):
            rest = torch.tensor([level, 0.0], dtype=torch.float64)
            state = rest + torch.linalg.matrix_exp(motion * gap) @ (state - rest)
        x, v = state[0], state[1] / w
        rows.append(torch.stack((x, v, (x * x + v * v + 1e-6).sqrt())))
    return torch.stack(rows, dim=1).flatten()


@pytest.mark.parametrize("selective", [False, True])
def test_rows_and_reads_are_the_gated_solution_of_the_equation_of_motion(selective):
    batch, layer = irregular_batch(1, 6, DIM, ties=True), make_layer(selective=selective)
    reads = batch.times[:, [0, 3, 4]] + 0.05
    for rows, at in (
        (layer(batch.x, batch.times), batch.times),
        (layer(batch.x, batch.times, query_times=reads), reads),
    ):
        for n, t in enumerate(at[0].tolist()):
            is_row = at is batch.times
            token = batch.x[0, n if is_row else int((batch.times[0] <= t).sum()) - 1]
            state = solved(layer, batch.x[0], batch.times[0], t)
            gate = nn.functional.silu(layer.gate_projection(token))
            assert relative_error(rows[0, n], gate * layer.output_projection(state)) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_future_does_not_reach_the_past(dtype):
    batch = irregular_batch(2, 8, DIM, ragged=False, dtype=dtype)
    assert_causal(make_layer(omega_range=(0.1, 200.0)).to(dtype), batch.x, batch.times)
    model = make_model(omega_range="data").to(dtype).fit_time_scale(batch.times)
    assert_causal(lambda *args: model(*args).states, batch.x[..., :3], batch.times)


def test_the_future_does_not_reach_the_clock():
    batch = irregular_batch(2, 8, DIM, ragged=False, dtype=torch.float32)
    layer = make_layer(selective=True, omega_range=(0.1, 200.0)).float()
    assert_causal(layer, batch.x, batch.times)
    assert_causal(lambda *args: layer.clock(*args)[0][..., None], batch.x, batch.times)


@pytest.mark.parametrize(("direction", "selective"), KINDS)
def test_padding_order_and_shifts_change_nothing(batch, direction, selective):
    layer = make_layer(direction, selective)
    given = (layer, batch.x, batch.times, batch.mask)
    assert_padding_invariant(*given)
    assert_batch_order_invariant(*given)
    assert_time_shift_invariant(*given)
    rows = layer(batch.x, batch.times, batch.mask)
    assert bool((rows[~batch.mask] == 0).all())


@pytest.mark.parametrize(("direction", "selective"), KINDS)
def test_padding_inside_a_series_equals_leaving_the_tokens_out(direction, selective):
    batch, layer = irregular_batch(2, 9, DIM, ragged=False), make_layer(direction, selective)
    keep = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 0]).bool()
    rows = layer(batch.x, batch.times, keep.expand(2, 9))[:, keep]
    assert relative_error(rows, layer(batch.x[:, keep], batch.times[:, keep])) < 1e-12


def test_bidirectional_is_its_own_mirror_image():
    batch, layer = irregular_batch(2, 7, DIM, ragged=False), make_layer("bidirectional")
    _, seen = layer(batch.x, batch.times, return_internals=True)
    _, mirrored = layer(batch.x.flip(1), -batch.times.flip(1), return_internals=True)
    for ours, theirs in ((seen.position, mirrored.position), (seen.velocity, mirrored.velocity)):
        assert ours.shape == (2, 7, 2, DIM)
        assert relative_error(ours, theirs.flip(1).flip(2)) < 1e-12


@pytest.mark.parametrize(("direction", "selective"), KINDS)
def test_reads_equal_rows_and_do_not_depend_on_each_other(batch, direction, selective):
    layer = make_layer(direction, selective)
    rows = layer(batch.x, batch.times, batch.mask)
    asked = batch.times.nan_to_num(3.0)
    reads = layer(batch.x, batch.times, batch.mask, asked)
    is_final = batch.mask.clone()
    is_final[:, 1] = False  # of tokens at one time, a read has the last one's
    assert relative_error(reads[is_final], rows[is_final]) < 1e-12
    order = [3, 0, 6, 1]
    some = layer(batch.x, batch.times, batch.mask, asked[:, order])
    assert relative_error(some, reads[:, order]) < 1e-12
    tokens = layer(batch.x, batch.times, batch.mask, asked, query_x=batch.x.nan_to_num())
    assert relative_error(tokens[batch.mask], rows[batch.mask]) < 1e-12


def test_a_read_sees_nothing_of_later_observations(batch):
    layer = make_layer()
    early = torch.full((3, 1), -1.0, dtype=torch.float64)
    _, seen = layer(batch.x, batch.times, batch.mask, early, return_internals=True)
    assert not bool(seen.position.any() | seen.velocity.any())
    model = make_model()
    x = batch.x[..., :3]
    reads = model.read(model(x, batch.times, batch.mask), early)
    assert torch.equal(reads, reads[:1].expand_as(reads))
    middle = batch.times[:1, 3:4]
    before = layer(batch.x[:1, :4], batch.times[:1, :4], query_times=middle)
    assert relative_error(layer(batch.x[:1], batch.times[:1], query_times=middle), before) < 1e-12


def test_a_series_without_tokens_is_zero_with_zero_gradients():
    layer, x = make_layer(), torch.full((2, 4, DIM), torch.nan).double().requires_grad_()
    times = torch.full((2, 4), torch.nan, dtype=torch.float64)
    rows = layer(x, times, torch.zeros(2, 4, dtype=torch.bool))
    rows.sum().backward()
    assert not bool(rows.any())
    assert not bool(x.grad.any())
    assert layer(x[:, :0], times[:, :0]).shape == (2, 0, DIM)
    assert bool(layer(x[:, :0], times[:, :0], query_times=torch.ones(2, 3)).isfinite().all())


@pytest.mark.parametrize(("direction", "selective"), KINDS)
def test_gradients_are_those_of_finite_differences(direction, selective):
    batch, layer = irregular_batch(2, 5, DIM, ragged=False), make_layer(direction, selective)
    reads = torch.tensor([[0.3, 1.2]] * 2, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def rows(x, times, *given):
        given = dict(zip(parameters, given, strict=True))
        call = lambda *args: torch.func.functional_call(layer, given, args)  # noqa: E731
        return torch.cat((call(x, times), call(x, times, None, reads)), dim=1)

    given = [batch.x, batch.times, *parameters.values()]
    given = [z.detach().clone().requires_grad_() for z in given]
    assert torch.autograd.gradcheck(rows, given, fast_mode=True, rtol=1e-5, atol=1e-7)
    rows(*given).square().sum().backward()
    assert all(bool(z.grad.any()) for z in given)


def test_spectra_have_no_weight_decay_and_survive_half_precision():
    layer = ResonatorLayer(DIM)
    decaying = {id(x) for x in parameter_groups(layer, 0.1)[0]["params"]}
    assert id(layer.spectrum.raw_omega) not in decaying
    batch = irregular_batch(2, 9, DIM, ragged=False, dtype=torch.float32)
    whole = layer(batch.x, batch.times)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(layer(batch.x, batch.times), whole) < 0.05
    half = layer.bfloat16()
    assert half.spectrum.raw_omega.dtype == torch.float32
    assert relative_error(half(batch.x.bfloat16(), batch.times), whole) < 0.05


def test_the_spectrum_comes_from_the_training_times():
    times = 100 * torch.rand(4, 50).sort(dim=1).values
    generator = torch.Generator().manual_seed(0)
    model = make_model(omega_range="data", zeta_range=(0.1, 0.2)).fit_time_scale(
        times, generator=generator
    )
    spectrum = next(iter(model.encoder)).attention.spectrum
    assert bool((spectrum.omega >= 3.1).all())  # half a turn over the longest series
    assert bool(((spectrum.zeta > 0.099) & (spectrum.zeta < 0.201)).all())


@settings(max_examples=20)
@given(st.data())
def test_any_stack_streams_as_in_a_batch(data):
    kinds = data.draw(
        st.lists(st.sampled_from(["resonator", "selective", "attention"]), min_size=1, max_size=3)
    )
    length = data.draw(st.integers(1, 6))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.1, 2.0]), min_size=length, max_size=length))
    present = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    torch.manual_seed(len(gaps))
    model = make_model(*kinds)
    times = torch.tensor(gaps, dtype=torch.float64).cumsum(0).expand(2, -1) - 3.0
    present = torch.tensor(present).view(2, length)
    x = torch.randn(2, length, 3, dtype=torch.float64)
    encoded = model(x, times, present)
    session = OnlineSession(model, batch_size=2)
    for n in range(length):
        row = session.observe(times[:, n], x[:, n], present[:, n])
    is_last = present[:, -1]
    assert session.num_observations == present.sum(dim=1).tolist()
    assert relative_error(row[is_last], encoded.states[is_last, -1]) < 1e-9
    later = times[:, -1] + 0.7
    assert relative_error(session.read(later), model.read(encoded, later[:, None])[:, 0]) < 1e-9


@pytest.mark.parametrize("selective", [False, True])
def test_a_layer_streams_as_in_a_batch_in_constant_memory(selective):
    batch, layer = (
        irregular_batch(2, 200, DIM, ragged=False, span=30.0),
        make_layer(selective=selective),
    )
    session = OnlineSession(layer, batch_size=2)
    rows = [session.observe(batch.times[:, n], batch.x[:, n]) for n in range(200)]
    assert relative_error(torch.stack(rows, dim=1), layer(batch.x, batch.times)) < 1e-10
    (memory,) = session._layers
    held = sum(z.numel() for state in memory._states() for z in state.values())
    assert held == 2 * (4 * DIM + 4)


def test_what_cannot_be_streamed_or_made_is_refused():
    with pytest.raises(ValueError, match="direction='bidirectional' cannot be streamed"):
        OnlineSession(make_model(direction="bidirectional"))
    with pytest.raises(ValueError, match="direction must be one of causal, bidirectional"):
        ResonatorLayer(4, direction="both")
    with pytest.raises(ValueError, match=r"x must be \[B, N, 6\]"):
        make_layer()(torch.zeros(1, 2, 4), torch.zeros(1, 2))


def test_internals_come_one_per_block(batch):
    x, model = batch.x[..., :3], make_model()
    first, second = model(x, batch.times, batch.mask, return_internals=True).internals
    assert first.position.shape == (3, 7, 1, DIM)
    assert second.weights.shape == (3, 2, 7, 7)


def test_blocks_of_both_kinds_form_an_encoder(batch):
    encoder = Encoder(EncoderBlock(make_layer(d), feedforward_dim=8) for d in DIRECTIONS).double()
    encoded = encoder(batch.x, batch.times, batch.mask, batch.times.nan_to_num(2.0))
    is_final = batch.mask.clone()
    is_final[:, 1] = False
    assert relative_error(encoded.reads[is_final], encoded.states[is_final]) < 1e-10


def odd_streams(count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bits with a last row of 0, times, and whether the number of ones is odd."""
    bits = torch.randint(0, 2, (count, length)).float()
    times = torch.arange(length + 1.0).expand(count, -1)
    return nn.functional.pad(bits, (0, 1))[..., None], times, bits.sum(dim=1).long() % 2


@pytest.mark.parametrize(("kind", "solves"), [("selective", True), ("resonator", False)])
def test_a_clock_counts_what_went_by(kind, solves):
    torch.manual_seed(1)
    settings = {"dim": 16, "omega_range": (0.5, 4.0)}
    model, head = OsciFormer(1, blocks=[kind], **settings), nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.02)
    for _ in range(200):
        values, times, is_odd = odd_streams(128, int(torch.randint(1, 6, ())))
        loss = nn.functional.cross_entropy(head(model(values, times).last()), is_odd)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    values, times, is_odd = odd_streams(500, 5)
    with torch.no_grad():
        found = head(model(values, times).last()).argmax(dim=1)
    share = float((found == is_odd).double().mean())
    assert share > 0.95 if solves else share < 0.75
