from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

from osciformer.baselines import LogNeuralCDE, NeuralCDE, RoughTransformer
from osciformer.baselines.controlled import (
    ControlledEquation,
    ControlledField,
    LogControlledEquation,
    LogSignature,
    control_path,
    log_signatures,
)
from osciformer.testing import irregular_batch

FEATURES, DIM = 2, 5
NAN = torch.nan
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def iterated(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Return the increment and the area of a path of pieces `[K, C]` by sums over all pairs."""
    channels = pieces.shape[1]
    double = torch.zeros(channels, channels).double()  # of dX_i(s) dX_j(t) for s < t
    for t in range(len(pieces)):
        for i in range(channels):
            for j in range(channels):
                earlier = sum(float(pieces[s, i]) for s in range(t))
                double[i, j] += (earlier + 0.5 * pieces[t, i]) * pieces[t, j]
    return pieces.sum(0), 0.5 * (double - double.T)


@pytest.mark.parametrize("turns", [1, 2])
def test_log_signatures_are_iterated_sums(turns):
    pieces = torch.randn(2, 7, turns, 3).double()
    found = log_signatures(pieces, 3)
    assert found.area.shape == (2, 3, 3, 3, 3)
    for n in range(7):
        window, place = divmod(n, 3)
        part = pieces[1, 3 * window : n + 1].flatten(0, 1)
        for mine, theirs in zip(found, iterated(part), strict=True):
            torch.testing.assert_close(mine[1, window, place], theirs)


def test_a_log_signature_grows_by_a_piece():
    pieces = torch.randn(1, 4, 1, 3).double()
    found = log_signatures(pieces, 4)
    before = LogSignature(*(x[:, 0, 2] for x in found))
    for mine, theirs in zip(before.extended(pieces[:, 3, 0]), found, strict=True):
        torch.testing.assert_close(mine, theirs[:, 0, 3])


def test_paths_hold_or_join_what_was_measured():
    values = torch.tensor([[[NAN, 1.0], [2.0, NAN], [NAN, 3.0]]]).double()
    times, mask = torch.tensor([[1.0, 2.0, 4.0]]).double(), torch.ones(1, 3, dtype=torch.bool)
    one = math.log(2.0) / 3.0  # what a first measurement adds to the count
    path = control_path(values, times, mask, looks_ahead=False)
    two = math.log(3.0 / 2.0) / 3.0
    pieces = [
        [[0.0] * 5, [0.0] * 5],
        [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, one, 0.0]],
        [[2.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0, two]],
    ]
    torch.testing.assert_close(path.start, torch.tensor([[0.0, 0.0, 1.0, 0.0, one]]).double())
    torch.testing.assert_close(path.pieces[0], torch.tensor(pieces).double())
    assert path.slope[0].tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]] * 3
    path = control_path(values, times, mask, looks_ahead=True)
    third = 2.0 / 3.0
    pieces = [[0.0] * 5, [1.0, 0.0, third, one, 0.0], [2.0, 0.0, 2 * third, 0.0, two]]
    torch.testing.assert_close(path.pieces[0, :, 0], torch.tensor(pieces).double())
    torch.testing.assert_close(path.slope[0, 1], torch.tensor(pieces[2]).double() / 2.0)


def test_brackets_are_those_of_jacobians():
    field = ControlledField(DIM, 3, 2).double()
    state, increment = torch.randn(DIM).double(), torch.randn(3).double()
    area = torch.randn(3, 3).double()
    area = area - area.T
    jacobian = torch.autograd.functional.jacobian(field, state)  # [D, C, D]
    vectors = field(state)
    wanted = vectors @ increment
    for i in range(3):
        for j in range(i + 1, 3):
            bracket = jacobian[:, j] @ vectors[:, i] - jacobian[:, i] @ vectors[:, j]
            wanted = wanted + area[i, j] * bracket
    torch.testing.assert_close(field.along_signature(state, LogSignature(increment, area)), wanted)


def solve(field: ControlledField, state: Tensor, pieces: Tensor) -> Tensor:
    """Return the solution along pieces `[B, C]` by an adaptive solver."""
    for piece in pieces:
        flow = lambda _, z, piece=piece: field.along(z, piece)  # noqa: E731
        state = odeint(flow, state, torch.tensor([0.0, 1.0]).double(), rtol=1e-9, atol=1e-11)[-1]
    return state


@torch.no_grad()
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["rectilinear", "linear"])
def test_a_neural_cde_solves_its_equation(looks_ahead):
    settings = {"static_dim": 0, "num_layers": 2, "control_dim": None}
    equation = ControlledEquation(FEATURES, DIM, looks_ahead=looks_ahead, **settings).double()
    batch = irregular_batch(length=6, dim=FEATURES, ragged=False)
    values = batch.x.clone()
    values[:, 2, 0] = NAN
    path = control_path(values, batch.times, batch.mask, looks_ahead=looks_ahead)
    state = equation.initial(path.start)
    encoded = equation(values, batch.times, batch.mask)
    for n in range(1, 6):
        state = solve(equation.field, state, path.pieces[:, n].transpose(0, 1))
        torch.testing.assert_close(encoded.states[:, n], state, rtol=1e-3, atol=1e-3)
    found = equation.read(encoded, batch.times[:, 2:4].mean(dim=1, keepdim=True))
    half = 0.5 * path.slope[:, 2] * (batch.times[:, 3] - batch.times[:, 2])[:, None]
    wanted = solve(equation.field, encoded.states[:, 2], half[None])
    torch.testing.assert_close(found[:, 0], wanted, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_log_ode_is_near_the_equation_on_a_smooth_path():
    field = ControlledField(DIM, 3, 2).double()
    state = torch.randn(1, DIM).double()
    u = torch.linspace(0.0, 1.0, 65).double()
    path = torch.stack((u, (6.0 * u).cos(), (6.0 * u).sin()), dim=1)
    pieces = path.diff(dim=0)
    wanted = solve(field, state, pieces)

    def error(window: int, areas: float) -> float:
        equation = LogControlledEquation(
            1, DIM, static_dim=0, num_layers=2, looks_ahead=True, control_dim=None, window=window
        )
        equation.field, found = field, state
        signatures = log_signatures(pieces[None, :, None], window)
        for n in range(64 // window):
            increment, area = (x[:, n, -1] for x in signatures)
            found = equation._jump(found, LogSignature(increment, areas * area))
        return float((found - wanted).norm())

    assert error(16, 1.0) < 0.25 * error(16, 0.0)  # the brackets matter,
    assert error(8, 1.0) < 0.4 * error(16, 1.0) < 0.02  # and short windows are better


@torch.no_grad()
def test_rows_of_a_window_are_reached_as_its_end_is():
    settings = {"static_dim": 0, "num_layers": 1, "looks_ahead": False, "control_dim": 3}
    whole = LogControlledEquation(FEATURES, DIM, window=4, **settings).double()
    batch = irregular_batch(length=10, dim=FEATURES, ragged=False)
    encoded = whole(batch.x, batch.times, batch.mask)
    for stop in (3, 5, 8):  # the last row of a shorter series ends its window
        part = whole(batch.x[:, :stop], batch.times[:, :stop], batch.mask[:, :stop])
        torch.testing.assert_close(part.states, encoded.states[:, :stop], **EXACT)
    # The next window starts where the last one ended.
    path = control_path(batch.x, batch.times, batch.mask, looks_ahead=False)
    pieces = whole.mix(path.pieces)
    found = log_signatures(pieces[:, 5:7], 2)
    there = whole._jump(encoded.states[:, 4], LogSignature(*(x[:, 0, 1] for x in found)))
    torch.testing.assert_close(there, encoded.states[:, 6], **EXACT)


@torch.no_grad()
def test_tokens_of_a_rough_transformer_are_two_log_signatures():
    model = RoughTransformer(FEATURES, dim=8, window=3, num_layers=1).double()
    batch = irregular_batch(length=8, dim=FEATURES, ragged=False)
    encoded = model.encode(batch.x, batch.times, batch.mask)
    path = control_path(batch.x, batch.times, batch.mask, looks_ahead=False)
    pieces = model.mix(path.pieces)[1]
    pieces[0, 0] += model.mix(path.start)[1]
    series, window = encoded.views
    for n in range(8):
        for view, start in ((series, 0), (window, 3 * (n // 3))):
            part = iterated(pieces[start : n + 1].flatten(0, 1))
            for mine, theirs in zip(view, part, strict=True):
                torch.testing.assert_close(mine[1, n], theirs)
    assert torch.equal(encoded.ends, batch.times[:, [2, 5, 7]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogNeuralCDE(2, window=0), "window must be at least 1 row; got 0"),
        (lambda: RoughTransformer(2, window=0), "window must be at least 1 row; got 0"),
        (lambda: NeuralCDE(2, num_layers=0), "num_layers must be at least 1; got 0"),
        (lambda: NeuralCDE(2, direction="both"), "direction must be one of 'causal'"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
