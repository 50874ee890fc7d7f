from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer.models import OsciFormer
from osciformer.nn import Encoder, EncoderBlock, OscillatorAttention
from osciformer.ops.attention.step import advance, append, attend, empty_cache, merge_old
from osciformer.streaming import OnlineSession, step_settings
from osciformer.testing import irregular_batch, relative_error

QUERIES = ("hold", "linear", "ridge_causal", "anchored", "learned")
DIM = 8


def shake(module: torch.nn.Module) -> torch.nn.Module:
    """Move parameters that start at zero, which would hide what they do."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module


def make_layer(query: str = "hold", **settings) -> OscillatorAttention:
    settings = {"num_modes": 3, "omega_range": (0.5, 20.0), **settings}
    return shake(OscillatorAttention(DIM, 2, query=query, **settings).double())


def make_model(query: str = "hold", **settings) -> OsciFormer:
    settings = {"dim": DIM, "num_heads": 2, "num_modes": 3, "omega_range": "data", **settings}
    return shake(OsciFormer(3, query=query, **settings).double())


def play(session: OnlineSession, x, times, present=None) -> torch.Tensor:
    steps = range(times.shape[1])
    rows = [
        session.observe(times[:, n], x[:, n], None if present is None else present[:, n])
        for n in steps
    ]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "driven"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_layer_streams_as_in_a_batch(query, extras, value):
    batch = irregular_batch(2, 9, DIM, ragged=False)
    layer = make_layer(query, value=value, drive_modes=2 * extras, equilibrium=extras)
    session = OnlineSession(layer, batch_size=2)
    assert relative_error(play(session, batch.x, batch.times), layer(batch.x, batch.times)) < 1e-10
    later = batch.times[:, -1:] + 0.3
    expected = layer(batch.x, batch.times, query_times=later)[:, 0]
    assert relative_error(session.read(later[:, 0]), expected) < 1e-10


@pytest.mark.parametrize("query", QUERIES)
def test_several_oscillators_of_a_channel_stream_as_in_a_batch(query):
    batch = irregular_batch(2, 7, DIM, ragged=False)
    layer = make_layer(query, oscillators_per_channel=3, drive_modes=2, equilibrium=True)
    session = OnlineSession(layer, batch_size=2)
    assert relative_error(play(session, batch.x, batch.times), layer(batch.x, batch.times)) < 1e-10


@pytest.mark.parametrize("query", QUERIES)
def test_a_model_streams_as_in_a_batch(query):
    batch = irregular_batch(2, 8, 3, ragged=False, span=50.0)
    static = torch.randn(2, 2, dtype=torch.float64)
    model = make_model(query, static_dim=2).fit_time_scale(batch.times)
    x = batch.x.clone()
    x[0, 3, 1] = torch.nan
    session = OnlineSession(model, batch_size=2, static=static)
    encoded = model(x, batch.times, static=static)
    assert relative_error(play(session, x, batch.times), encoded.states) < 1e-10
    expected = model.read(encoded, torch.full((2, 1), 70.0, dtype=torch.float64))[:, 0]
    assert relative_error(session.read(70.0), expected) < 1e-10


@pytest.mark.parametrize("query", QUERIES)
def test_float32_streams_as_in_a_batch(query):
    batch = irregular_batch(2, 12, 3, ragged=False, dtype=torch.float32)
    model = make_model(query, omega_range=(0.5, 20.0)).float()
    states = model(batch.x, batch.times).states
    streamed = play(OnlineSession(model, batch_size=2), batch.x, batch.times)
    assert streamed.dtype == torch.float32
    assert relative_error(streamed, states) < 1e-5


def test_an_encoder_streams_as_in_a_batch():
    batch = irregular_batch(2, 6, DIM, ragged=False)
    encoder = Encoder(EncoderBlock(make_layer()) for _ in range(2)).double()
    streamed = play(OnlineSession(encoder, batch_size=2), batch.x, batch.times)
    assert relative_error(streamed, encoder(batch.x, batch.times).states) < 1e-10


@pytest.mark.parametrize("query", QUERIES)
def test_reads_between_observations_equal_the_prefix_and_leave_no_trace(query):
    batch = irregular_batch(2, 6, DIM, ragged=False)
    layer = make_layer(query)
    quiet, asked = (OnlineSession(layer, batch_size=2) for _ in range(2))
    for n in range(6):
        t, x = batch.times[:, n], batch.x[:, n]
        assert torch.equal(quiet.observe(t, x), asked.observe(t, x))
        later = t + 0.01
        seen = (batch.x[:, : n + 1], batch.times[:, : n + 1])
        expected = layer(*seen, query_times=later[:, None])[:, 0]
        assert relative_error(asked.read(later), expected) < 1e-10
        assert torch.equal(asked.read(later), asked.read(later))


@pytest.mark.parametrize("query", QUERIES)
def test_observations_at_one_time_see_each_other_as_in_a_batch(query):
    batch = irregular_batch(3, 8, 3, ragged=False)
    times = batch.times.clone()
    times[:, 3] = times[:, 4] = times[:, 2]
    times[0, 7] = times[0, 6]  # a tie in one series alone
    model = make_model(query, omega_range=(0.5, 20.0))
    states = model(batch.x, times).states
    session = OnlineSession(model, batch_size=3)
    streamed = play(session, batch.x, times)
    final = torch.ones(3, 8, dtype=torch.bool)
    final[:, 2:4] = False
    final[0, 6] = False
    assert relative_error(streamed[final], states[final]) < 1e-10
    # Of a tie the earlier ones were returned before the later ones were known.
    assert relative_error(streamed[~final], states[~final]) > 1e-3


def test_series_may_skip_steps():
    batch = irregular_batch(3, 7, DIM, ragged=False)
    layer = make_layer("linear")
    present = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0], [0] * 7]).bool()
    x = torch.where(present[..., None], batch.x, torch.nan)
    times = torch.where(present, batch.times, torch.nan)
    session = OnlineSession(layer, batch_size=3)
    assert relative_error(play(session, x, times, present), layer(x, times, present)) < 1e-10
    assert session.num_observations == [7, 3, 0]
    expected = layer(x, times, present, torch.full((3, 1), 2.0, dtype=torch.float64))[:, 0]
    assert relative_error(session.read(2.0), expected) < 1e-10


def test_a_read_before_any_observation_is_that_of_an_empty_series():
    model = make_model()
    empty = torch.zeros(1, 1, dtype=torch.bool)
    encoded = model(torch.zeros(1, 1, 3).double(), torch.zeros(1, 1).double(), empty)
    expected = model.read(encoded, torch.ones(1, 1, dtype=torch.float64))[:, 0]
    assert relative_error(OnlineSession(model).read(1.0), expected) < 1e-12


def test_a_long_stream_does_not_drift():
    batch = irregular_batch(1, 400, DIM, ragged=False, span=30.0)
    layer = make_layer(undamped=True, omega_range=(0.01, 50.0))
    streamed = play(OnlineSession(layer), batch.x, batch.times)
    assert relative_error(streamed, layer(batch.x, batch.times)) < 1e-10


@settings(max_examples=25)
@given(
    gaps=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-9, 1e-3), st.floats(1e-3, 50.0)),
        min_size=1,
        max_size=6,
    ),
    omega=st.floats(1e-3, 200.0),
    zeta=st.one_of(st.floats(1e-6, 0.1), st.floats(0.9, 1.1), st.floats(1.0, 20.0)),
    query=st.sampled_from(QUERIES),
)
def test_any_gaps_and_spectra_stream_as_in_a_batch(gaps, omega, zeta, query):
    torch.manual_seed(0)
    ranges = {"omega_range": (omega, omega), "zeta_range": (zeta, zeta)}
    layer = OscillatorAttention(DIM, 2, query=query, num_modes=3, **ranges).double()
    times = torch.tensor([gaps], dtype=torch.float64).cumsum(dim=1)
    x = torch.randn(1, len(gaps), DIM, dtype=torch.float64)
    streamed = play(OnlineSession(layer), x, times)
    rows = layer(x, times)
    last_of_tie = torch.ones_like(times, dtype=torch.bool)
    last_of_tie[:, :-1] = times.diff(dim=1) > 0
    assert relative_error(streamed[last_of_tie], rows[last_of_tie]) < 1e-10


def test_decreasing_and_infinite_times_are_refused():
    session = OnlineSession(make_layer(), batch_size=2)
    x = torch.zeros(2, DIM, dtype=torch.float64)
    session.observe(torch.tensor([1.0, 2.0]), x)
    with pytest.raises(ValueError, match=r"t must not decrease; series 1 has t=1.5 < 2"):
        session.observe(torch.tensor([1.0, 1.5]), x)
    with pytest.raises(ValueError, match=r"t must not decrease; series 1 has t=1.75 < 2"):
        session.read(1.75)
    for bad in (torch.nan, torch.inf, 1e300):
        with pytest.raises(
            ValueError, match=f"t must be finite; series 0 has t={bad}".replace("+", ".")
        ):
            session.observe(bad, x)
    # What was refused has changed nothing.
    assert session.num_observations == [1, 1]


def test_decreasing_times_are_named_in_the_unit_of_the_data():
    model = make_model().fit_time_scale(torch.tensor([[100.0, 150.0, 200.0]]))
    session = OnlineSession(model)
    session.observe(160.0, torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="series 0 has t=150 < 160"):
        session.read(150.0)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (lambda: make_layer("ridge"), ValueError, "query='ridge' cannot be streamed.*hold, linear"),
        (
            lambda: make_layer(direction="bidirectional"),
            ValueError,
            "direction='bidirectional' cannot be streamed",
        ),
        (lambda: make_layer(dropout=0.1), ValueError, r"dropout is on; call module.eval\(\)"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "got Linear"),
    ],
    ids=["ridge", "bidirectional", "dropout", "type"],
)
def test_modules_that_cannot_be_streamed_are_refused(module, error, message):
    with pytest.raises(error, match=message):
        OnlineSession(module())


def test_wrong_shapes_are_refused():
    session = OnlineSession(make_layer(), batch_size=2)
    with pytest.raises(ValueError, match=r"x must be \[B, F\] = \[2, 8\]; got \[1, 8\]"):
        session.observe(0.0, torch.zeros(1, DIM))
    with pytest.raises(ValueError, match=r"t must be a number or \[B\] with B = 2; got \[3\]"):
        session.read(torch.zeros(3))
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        OnlineSession(make_layer(), batch_size=0)
    with pytest.raises(ValueError, match="only an OsciFormer has static features"):
        OnlineSession(make_layer(), static=torch.zeros(1, 2))


@pytest.mark.parametrize("make", [make_layer, make_model])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_an_infinite_observation_is_refused_and_leaves_no_trace(make, bad):
    module = make()
    width = DIM if isinstance(module, OscillatorAttention) else 3
    sessions = [OnlineSession(module, batch_size=2) for _ in range(2)]
    x = torch.randn(3, 2, width, dtype=torch.float64)
    spoilt = x[1].clone()
    spoilt[1, 2] = bad
    for session in sessions:
        session.observe(0.0, x[0])
    with pytest.raises(ValueError, match=r"x must be finite.*series 1 has .*The session is as"):
        sessions[0].observe(1.0, spoilt)
    # A series without an observation may hold anything.
    absent = torch.tensor([True, False])
    got, want = sessions[0].observe(1.0, spoilt, absent), sessions[1].observe(1.0, x[1], absent)
    assert torch.equal(got, want)
    assert torch.equal(sessions[0].observe(2.0, x[2]), sessions[1].observe(2.0, x[2]))


def test_threads_share_a_session_without_losing_observations():
    torch.manual_seed(0)
    layer, x = make_layer(), torch.randn(120, 1, DIM, dtype=torch.float64)
    shared, alone = OnlineSession(layer), OnlineSession(layer)

    def feed(part):
        for row in part:
            shared.observe(1.0, row)  # at one time, at which the order does not matter
            shared.read(2.0)

    threads = [threading.Thread(target=feed, args=(x[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in x:
        alone.observe(1.0, row)
    assert shared.num_observations == [120]
    got, want = (session.observe(2.0, x[0]) for session in (shared, alone))
    assert relative_error(got, want) < 1e-10


def test_a_session_can_be_copied_to_go_on_twice():
    batch = irregular_batch(1, 6, DIM, ragged=False)
    session = OnlineSession(make_layer(), window=5.0)
    play(session, batch.x, batch.times)
    again = copy.deepcopy(session)
    later = float(batch.times[0, -1]) + 1.0
    assert torch.equal(again.observe(later, batch.x[:, 0]), session.observe(later, batch.x[:, 0]))


def random_stream(length, width=DIM, batch=1):
    g = torch.Generator().manual_seed(3)
    gaps = torch.rand(batch, length, generator=g, dtype=torch.float64)
    return gaps.cumsum(dim=1), torch.randn(batch, length, width, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("query", QUERIES)
def test_a_window_bounds_memory_and_the_error(query):
    torch.manual_seed(0)
    layer = make_layer(query, omega_range=(2.0, 20.0))
    times, x = random_stream(150)
    whole = play(OnlineSession(layer), x, times)
    errors = []
    for window in (4.0, 16.0):
        session = OnlineSession(layer, window=window)
        errors.append(relative_error(play(session, x, times), whole))
        assert session.num_observations == [150]
        assert session.num_held < 120
    assert errors[0] < 1e-3
    assert errors[1] < errors[0] / 2.0


def test_a_window_is_in_the_unit_of_the_data():
    times, x = random_stream(150, 3)
    model = make_model(omega_range=(5.0, 20.0)).fit_time_scale(10.0 * times)
    session = OnlineSession(model, window=2000.0)
    assert relative_error(play(session, x, 10.0 * times), model(x, 10.0 * times).states) < 1e-10
    assert session.num_held == 150
    session = OnlineSession(model, window=100.0)
    play(session, x, 10.0 * times)
    assert session.num_held < 110


def test_series_of_a_batch_forget_on_their_own():
    torch.manual_seed(0)
    layer = make_layer(omega_range=(2.0, 20.0))
    times, x = random_stream(120, batch=2)
    times[1] = (4.0 * times[1]).floor() / 4.0  # with ties
    present = torch.rand(2, 120) < 0.8
    session = OnlineSession(layer, batch_size=2, window=10.0)
    both = play(session, x, times, present)
    assert session.num_held < 110
    for b in range(2):
        kept = present[b]
        alone = play(OnlineSession(layer), x[b : b + 1, kept], times[b : b + 1, kept])
        assert relative_error(both[b, kept], alone[0]) < 1e-3


@pytest.mark.parametrize("window", [1.0, 4.0, 16.0])
def test_the_error_of_merging_stays_within_its_bound(window):
    torch.manual_seed(1)
    layer = make_layer(omega_range=(1.0, 8.0), zeta_range=(0.1, 0.5))
    settings, n = step_settings(layer), 60
    cache = empty_cache(1, settings)
    times, _ = random_stream(n)
    size = torch.zeros(2, n, 2, DIM // 2, dtype=torch.float64)  # integrals of |motion|
    for step in range(n):
        cache = advance(cache, settings, times[:, step])
        for role, medium in enumerate((settings.key_medium, settings.value_medium)):
            start, velocity = torch.randn(2, 1, 1, 2, DIM // 2, dtype=torch.float64)
            gamma = medium.omega * medium.zeta
            damped = medium.omega * (1.0 - medium.zeta**2).sqrt()
            size[role, step] = torch.hypot(start, (velocity + gamma * start) / damped)[0, 0] / gamma
            if role == 0:
                keys = (start, velocity, None)
        cache = append(cache, settings, keys, (start, velocity, None))
    cache = advance(cache, settings, times[:, -1] + 1.0)
    q = torch.randn(1, 1, 2, DIM // 2, dtype=torch.float64)
    merged = merge_old(cache, window)
    assert merged.times.shape[1] < n
    assert merged.count.tolist() == cache.count.tolist() == [n]
    age = (cache.time[:, None] - cache.times)[0]
    old = age > window
    d = settings.scale * ((q[0, 0].abs() * size[0, old]).sum(dim=-1) / window).max()
    values = cache.value_sum[0] / age[:, None, None]
    most = torch.where(old[:, None, None], size[1] / window, values.abs()).amax(dim=0)
    bound = (torch.expm1(4.0 * d) * most + 2.0 * (size[1, old] / window).amax(dim=0)).flatten()
    error = (attend(merged, settings, q) - attend(cache, settings, q)).abs().flatten()
    assert (error <= bound).all()
    # Differences average out: the error is far below what is promised.
    assert error.max() < 0.1 * bound.max()


def test_nothing_changes_while_no_observation_is_old():
    times, x = random_stream(80)
    layer = make_layer()
    session = OnlineSession(layer, window=1000.0)
    assert relative_error(play(session, x, times), layer(x, times)) < 1e-10


@pytest.mark.parametrize("extras", [{"drive_modes": 2}, {"equilibrium": True}])
def test_motions_that_never_rest_have_no_window(extras):
    with pytest.raises(ValueError, match="window needs oscillators that come to rest"):
        OnlineSession(make_layer(**extras), window=5.0)


@pytest.mark.parametrize("window", [0.0, -1.0, torch.inf, torch.nan])
def test_a_window_is_a_length_of_time(window):
    with pytest.raises(ValueError, match="window must be a positive, finite length of time"):
        OnlineSession(make_layer(), window=window)
