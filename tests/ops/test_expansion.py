"""Rest positions and drives as further free oscillators: the same motion, the same attention."""

from __future__ import annotations

import random

import pytest
import torch

from osciformer.math.driven import driven_response
from osciformer.math.oscillator import propagator
from osciformer.ops.attention.blocked.attend import collapse, expand_channels, expand_path
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.inputs import Oscillators
from osciformer.ops.attention.query import resolve_query

from .cases import (
    DOUBLE,
    GAINS,
    SPECTRA,
    C,
    H,
    assert_agree,
    call,
    make_case,
    outputs_and_gradients,
    spread_times,
    tensor,
    with_drive,
    with_mode,
)

OMEGA, ZETA = (
    tensor([[0.3, 2.0, 5.0], [1.0, 40.0, 0.0]]),
    tensor([[0.0, 0.3, 1.0], [4.0, 0.1, 0.5]]),
)
DRIVE_OMEGA = tensor([1.1, 6.0])


def pieces():
    x, velocity, rest = torch.randn(3, 1, 4, H, C, dtype=DOUBLE).unbind(0)
    cos, sin = torch.randn(2, H, 2, C, dtype=DOUBLE).unbind(0)
    return x, velocity, rest, Drive(DRIVE_OMEGA, key_cos=cos, key_sin=sin)


@pytest.mark.parametrize("s", [0.0, 1e-3, 0.4, 6.0])
def test_expanded_oscillators_move_like_the_driven_one(s):
    x, velocity, rest, drive = pieces()
    tokens = Oscillators(x, OMEGA, ZETA, velocity, rest)
    free, groups = expand_channels(tokens, drive, "key")
    g11, g12, _, _ = propagator(tensor(s), free.omega, free.zeta)
    got = collapse(g11 * free.start + g12 * free.velocity, groups)

    g11, g12, _, _ = propagator(tensor(s), OMEGA, ZETA)
    mode, cos, sin = drive.gains("key")
    response, _ = driven_response(tensor(s), mode[..., None], OMEGA[:, None], ZETA[:, None])
    force = x[:, :, :, None] * torch.complex(cos, -sin)
    want = rest + g11 * (x - rest) + g12 * velocity + (force * response).real.sum(3)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("has_rest", "has_drive", "groups"),
    [(False, False, 1), (True, False, 2), (False, True, 3), (True, True, 4)],
)
def test_each_rest_position_and_drive_mode_adds_a_group(has_rest, has_drive, groups):
    x, velocity, rest, drive = pieces()
    tokens = Oscillators(x, OMEGA, ZETA, velocity, rest if has_rest else None)
    free, found = expand_channels(tokens, drive if has_drive else None, "key")
    assert found == groups
    assert free.start.shape == (1, 4, H, groups * C)
    assert free.omega.shape == free.zeta.shape == (H, groups * C)
    torch.testing.assert_close(collapse(free.start, groups), x)
    torch.testing.assert_close(collapse(free.velocity, groups), velocity)


def test_a_drive_of_keys_leaves_values_alone():
    x, velocity, _, drive = pieces()
    tokens = Oscillators(x, OMEGA, ZETA, velocity)
    assert expand_channels(tokens, drive, "value") == (tokens, 1)


@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "anchored"])
def test_expanded_path_asks_every_group_the_same(query):
    x = with_mode(make_case(1, 4), query)
    params = {"omega": x["bank"]} if query == "ridge" else None
    if query == "anchored":
        params = {"omega": x["bank"], "cos": x["mode_cos"], "sin": x["mode_sin"]}
    path = resolve_query(query, x["q"], x["query_times"], params)
    tau = torch.rand(1, 4, 5, dtype=DOUBLE)
    wide = expand_path(path, 3).evaluate(tau)
    assert torch.equal(wide, torch.cat([path.evaluate(tau)] * 3, dim=-1))
    assert expand_path(path, 1) is path


@pytest.mark.parametrize("rows", [None, 4], ids=["self", "cross"])
@pytest.mark.parametrize("query", ["hold", "ridge"])
def test_driven_attention_equals_the_reference(query, rows):
    x = with_drive(with_mode(make_case(2, 12, rows), query))
    got = outputs_and_gradients(x, query=query, backend="blocked")
    want = outputs_and_gradients(x, query=query, backend="reference")
    assert_agree(got, want, 1e-9)


@pytest.mark.parametrize(
    ("drive_omega", "omega", "zeta", "dtype", "want"),
    [
        (2.0, 2.0, 0.0, DOUBLE, True),
        (2.0, 2.0, 0.0, torch.float32, True),
        (2.0, 2.0 * (1 + 1e-4), 0.0, DOUBLE, True),
        (2.0, 2.0 * (1 + 1e-4), 0.0, torch.float32, False),
        (2.0, 2.0, 1e-3, DOUBLE, False),
        (2.0, 2.1, 0.0, DOUBLE, False),
        (0.5, 2.0, 0.0, DOUBLE, False),
        # Slow channels under a slow drive: nothing cancels between the frequencies.
        (2e-4, 1e-4, 0.4, DOUBLE, True),
        (0.0, 0.0, 0.5, DOUBLE, True),
        (0.0, 0.0, 0.5, torch.float32, True),
    ],
)
def test_a_split_loses_digits_near_resonance(drive_omega, omega, zeta, dtype, want):
    drive = Drive(tensor([drive_omega]), key_cos=torch.ones(1, 1, 1, dtype=DOUBLE))
    rates = (tensor([[omega]]), tensor([[zeta]]), dtype)
    assert drive.loses_digits("key", *rates) is want
    assert drive.loses_digits("value", *rates) is False


@pytest.mark.parametrize("role", ["key", "value"])
def test_blocked_refuses_undamped_resonance_and_auto_takes_the_reference(role):
    x = make_case(1, 4)
    x[f"{role}_omega"], x[f"{role}_zeta"] = x[f"{role}_omega"].clone(), x[f"{role}_zeta"].clone()
    x[f"{role}_omega"][0, 1], x[f"{role}_zeta"][0, 1] = 7.0, 0.0
    x["drive_omega"], x[f"{role}_cos"] = tensor([7.0]), torch.ones(H, 1, C, dtype=DOUBLE)
    message = rf"drive.omega is too near .* a {role} channel.*backend='reference'.*{role}_zeta"
    with pytest.raises(ValueError, match=message):
        call(x, backend="blocked")
    torch.testing.assert_close(call(x), call(x, backend="oracle"), rtol=1e-10, atol=1e-10)


def drawn_near_resonance(seed):
    """Return inputs with frequencies from 0 to 10, and drives on or beside them."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    usual = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 3.0, 9.0)

    def frequency():
        return r.choice(usual) if r.random() < 0.6 else 10 ** r.uniform(-5.0, 1.0)

    length = r.choice((2, 2, 2, 3))
    omega = [[[frequency(), frequency()]] for _ in range(2)]
    zeta = [[[r.choice((0.0, 1e-6, 1e-3, 0.05, 0.4, 1.0, 1.7)) for _ in range(2)]] for _ in "kv"]
    apart = r.choice((0.0, 1e-12, 1e-9, 1e-6, 1e-4, 1e-2)) * r.choice((-1, 1))
    drives = [r.choice(omega)[0][0] * (1.0 + apart), *([frequency()] if r.random() < 0.5 else [])]
    times = spread_times(1, length, generator=g, window=r.choice((1e-3, 1.5, 5.0)))
    names = ("q", "k", "v", *(("key_velocity", "value_velocity") if r.random() < 0.5 else ()))
    x = {name: torch.randn(1, length, 1, 2, generator=g, dtype=DOUBLE) for name in names}
    x |= {"query_times": times, "key_times": times.clone(), "drive_omega": tensor(drives)}
    x |= dict(zip(SPECTRA, map(tensor, (omega[0], zeta[0], omega[1], zeta[1])), strict=True))
    for name in GAINS:
        x[name] = torch.randn(1, len(drives), 2, generator=g, dtype=DOUBLE)
    query = r.choice(("hold", "linear", "ridge", "ridge_causal"))
    options = {"value": r.choice(("average", "point")), "of_times": r.random() < 0.5}
    return with_mode(x, query), {"query": query, **options}


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 160, 20))]
)
def test_driven_attention_is_exact_near_every_resonance(first):
    """Values and gradients, by whichever way `auto` takes, against quadrature."""
    for seed in range(first, first + 20):
        x, options = drawn_near_resonance(seed)
        got = outputs_and_gradients(x, **options)
        want = outputs_and_gradients(x, backend="oracle", **options)
        for name, expected in want.items():
            size = 1.0 + expected.abs().max()
            assert (got[name] - expected).abs().max() <= 1e-10 * size, (seed, name)
