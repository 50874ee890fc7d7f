"""Each recurrent cell against its equations, solved or written out by other means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.signal import cont2discrete
from scipy.special import eval_legendre
from torch import Tensor, nn
from torchdiffeq import odeint

from osciformer.baselines import (
    GRUODE,
    ODELSTM,
    ODERNN,
    AugmentedLSTM,
    Cell,
    ClosedFormContinuous,
    ContinuousTimeGRU,
    ContinuousTimeLSTM,
    ContinuousTimeRNN,
    CoupledOscillators,
    GapGRU,
    LegendreMemoryUnit,
    LiquidTimeConstant,
    PhasedLSTM,
    RNNDecay,
)
from osciformer.baselines.memory_cells import legendre_system
from osciformer.baselines.recurrence import CellRecurrence

INPUTS, DIM, ROWS = 3, 4, 5


def make(kind: Callable[..., Cell], **options) -> Cell:
    cell = kind(INPUTS, DIM, **options).double().eval()
    for name, parameter in cell.named_parameters():
        if "raw" not in name and "log" not in name:
            nn.init.uniform_(parameter, -1.0, 1.0)
    return cell


def rows() -> tuple[Tensor, Tensor]:
    """Return inputs `[1, N, I]` and gaps `[1, N, 1]`."""
    return torch.randn(1, ROWS, INPUTS).double(), 3.0 * torch.rand(1, ROWS, 1).double()


def arrays(cell: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in cell.named_parameters()}


def logistic(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def affine(weights: dict[str, np.ndarray], name: str, *parts: np.ndarray) -> np.ndarray:
    return weights[f"{name}.weight"] @ np.concatenate(parts) + weights.get(f"{name}.bias", 0.0)


def test_what_a_cell_gets_of_a_series() -> None:
    """Values, indicators, the gap and static features, row by row; the first gap is 1."""

    class Recorder(Cell):
        sees_gap = True

        def step(self, state: Tensor, inputs: Tensor, gap: Tensor) -> Tensor:
            return torch.cat((inputs, gap), dim=-1)

    nan = torch.nan
    values = torch.tensor([[[nan, 9.0], [2.0, nan], [nan, nan], [4.0, 5.0]]])
    mask = torch.tensor([[False, True, True, True]])
    times, static = torch.tensor([[nan, 10.0, 10.5, 12.0]]), torch.tensor([[7.0, nan]])
    states = CellRecurrence(Recorder(10, 10))(values, times, mask, static).states
    expected = torch.tensor(
        [
            [2.0, 0.0, 1.0, 0.0, 1.0, 7.0, 0.0, 1.0, 0.0, 1.0],
            [0.0, 0.0, 0.0, 0.0, 0.5, 7.0, 0.0, 1.0, 0.0, 0.5],
            [4.0, 5.0, 1.0, 1.0, 1.5, 7.0, 0.0, 1.0, 0.0, 1.5],
        ]
    )
    torch.testing.assert_close(states[0, 1:], expected)
    assert not states[0, 0].any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "theirs"), [(AugmentedLSTM, nn.LSTMCell), (GapGRU, nn.GRUCell)], ids=["lstm", "gru"]
)
def test_all_rows_at_once_are_row_by_row(kind, theirs) -> None:
    cell, one = make(kind), theirs(INPUTS, DIM).double()
    weights = cell.recurrence.state_dict()
    one.load_state_dict({name.removesuffix("_l0"): value for name, value in weights.items()})
    inputs, gaps = rows()
    states, state = cell.run(inputs, gaps), None
    for n in range(ROWS):
        state = one(inputs[:, n], state)
        hidden = state[0] if isinstance(state, tuple) else state
        torch.testing.assert_close(states[:, n], hidden)


@torch.no_grad()
@pytest.mark.parametrize("kind", [RNNDecay, ODERNN])
def test_a_gru_updates_what_has_decayed_or_flowed(kind) -> None:
    cell, (inputs, gaps) = make(kind), rows()
    states, hidden = cell.run(inputs, gaps), np.zeros(DIM)
    for n in range(ROWS):
        gap = float(gaps[0, n, 0])
        if kind is RNNDecay:
            hidden = hidden * np.exp(-gap * np.log1p(np.exp(arrays(cell)["raw_rate"])))
        else:
            hidden = cell.flow(torch.from_numpy(hidden), gaps[0, n, 0]).numpy()
        hidden = cell.update(inputs[:, n], torch.from_numpy(hidden)[None])[0].numpy()
        np.testing.assert_allclose(states[0, n], hidden, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_the_output_of_an_ode_lstm_flows_and_its_memory_does_not() -> None:
    cell, (inputs, gaps) = make(ODELSTM, num_steps=30), rows()
    states, output, memory = cell.run(inputs, gaps), np.zeros(DIM), torch.zeros(1, DIM).double()

    def speed(t: float, h: np.ndarray) -> np.ndarray:
        return cell.flow.field(torch.from_numpy(h)).numpy() / (1.0 + t)

    for n in range(ROWS):
        span = (0.0, float(gaps[0, n, 0]))
        output = solve_ivp(speed, span, output, rtol=1e-10, atol=1e-12).y[:, -1]
        new, memory = cell.update(inputs[:, n], (torch.from_numpy(output)[None], memory))
        output = new[0].numpy()
        np.testing.assert_allclose(states[0, n], [*output, *memory[0]], rtol=1e-6, atol=1e-7)


def velocity_of(cell: Cell, inputs: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the right side of the equation as the papers write it."""
    w = dict(cell.named_parameters())
    drive = inputs @ w["drive.weight"].T + w["drive.bias"]

    def velocity(t: Tensor, h: Tensor) -> Tensor:
        if isinstance(cell, GRUODE):
            r, z, own = drive.split(DIM, dim=-1)
            for_r, for_z = w["gates.weight"].split(DIM)
            reset, keep = torch.sigmoid(r + h @ for_r.T), torch.sigmoid(z + h @ for_z.T)
            return (1 - keep) * (torch.tanh(own + (reset * h) @ w["candidate.weight"].T) - h)
        total = drive + h @ w["recurrent.weight"].T
        if isinstance(cell, ContinuousTimeRNN):
            return torch.exp(w["raw_rate"]) * (torch.tanh(total) - h)
        f = torch.exp(w["raw_gain"]) * torch.sigmoid(total)
        return -(torch.exp(w["raw_rate"]) + f) * h + f * w["level"]

    return velocity


@torch.no_grad()
@pytest.mark.parametrize("kind", [ContinuousTimeRNN, GRUODE, LiquidTimeConstant])
def test_a_relaxing_cell_solves_its_equation(kind) -> None:
    cell, (inputs, gaps) = make(kind), rows()
    hidden, results = torch.zeros(1, DIM).double(), []
    for n in range(ROWS):
        span = torch.tensor([0.0, float(gaps[0, n, 0])], dtype=torch.float64)
        velocity = velocity_of(cell, inputs[:, n])
        hidden = odeint(velocity, hidden, span, rtol=1e-10, atol=1e-12)[-1]
        results.append(hidden)
    exact = torch.stack(results, dim=1)
    after = {}
    for cell.num_steps in (6, 400, 800):
        after[cell.num_steps] = cell.hidden(cell.run(inputs, gaps))
    errors = {steps: float((found - exact).abs().max()) for steps, found in after.items()}
    assert errors[6] < 0.2
    # The solver has order 1, so that the errors of two runs cancel.
    assert 1.9 < errors[400] / errors[800] < 2.1
    torch.testing.assert_close(2.0 * after[800] - after[400], exact, rtol=0, atol=3e-6)
    # After the last row the inputs go on, and a huge gap leads to a state, not away.
    state = cell.run(inputs, gaps)[:, -1]
    cell.num_steps = 800
    span = torch.tensor([0.0, 2.0], dtype=torch.float64)
    later = odeint(velocity_of(cell, inputs[:, -1]), state[:, :DIM], span, rtol=1e-9, atol=1e-11)
    found = cell.hidden(cell.evolve(state, torch.tensor([[2.0]]).double()))
    torch.testing.assert_close(found, later[-1], rtol=0, atol=5e-3)
    cell.num_steps = 6
    assert float(cell.hidden(cell.evolve(state, torch.tensor([[1e8]]).double())).abs().max()) <= 1.0


@torch.no_grad()
def test_cells_of_a_continuous_time_lstm_decay_to_their_targets() -> None:
    cell, (inputs, gaps) = make(ContinuousTimeLSTM), rows()
    w, states = arrays(cell), cell.run(inputs, gaps)
    later = np.array([0.0, 0.3, 5.0])
    start = target = rate = output = np.zeros(DIM)
    for n in range(ROWS):
        before = target + (start - target) * np.exp(-rate * gaps[0, n].numpy())
        raw = affine(w, "gates", inputs[0, n].numpy(), output * np.tanh(before)).reshape(7, DIM)
        value = np.tanh(raw[5])
        start = logistic(raw[1]) * before + logistic(raw[0]) * value
        target = logistic(raw[3]) * target + logistic(raw[2]) * value
        output, rate = logistic(raw[4]), np.log1p(np.exp(raw[6]))
        expected = output * np.tanh(target + (start - target) * np.exp(-np.outer(later, rate)))
        evolved = cell.evolve(states[:, n].expand(3, -1), torch.from_numpy(later)[:, None])
        np.testing.assert_allclose(cell.hidden(evolved), expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_traces_of_a_continuous_time_gru_decay_at_their_scales() -> None:
    cell, (inputs, gaps) = make(ContinuousTimeGRU, num_scales=3), rows()
    w, states = arrays(cell), cell.run(inputs, gaps)
    scales = [10**-0.5, 1.0, 10**0.5]
    traces = np.zeros((DIM, 3))

    def weights(wanted: float) -> np.ndarray:
        closeness = np.exp([-((wanted - np.log(scale)) ** 2) for scale in scales])
        return closeness / closeness.sum()

    for n in range(ROWS):
        x = inputs[0, n].numpy()
        traces = traces * np.exp(-gaps[0, n].numpy() / np.array(scales))
        choice = affine(w, "choice", x, traces.sum(axis=1)).reshape(2, DIM)
        retrieved = np.array([weights(choice[0, d]) @ traces[d] for d in range(DIM)])
        event = np.tanh(affine(w, "event", x, retrieved))
        for d in range(DIM):
            share = weights(choice[1, d])
            traces[d] = (1 - share) * traces[d] + share * event[d]
        np.testing.assert_allclose(states[0, n], traces.flatten(), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(cell.hidden(states[0, n]), traces.sum(axis=1), rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mixed_memory", [False, True])
def test_a_closed_form_cell_is_its_gate(gated: bool, mixed_memory: bool) -> None:
    cell = make(ClosedFormContinuous, trunk_dim=6, gated=gated, mixed_memory=mixed_memory)
    (inputs, gaps), w = rows(), arrays(cell)
    states, hidden, memory = cell.run(inputs, gaps), np.zeros(DIM), torch.zeros(1, DIM).double()
    for n in range(ROWS):
        if mixed_memory:
            pair = torch.from_numpy(hidden)[None], memory
            found, memory = cell.memory(inputs[:, n], pair)
            hidden = found[0].numpy()
        trunk = 1.7159 * np.tanh(2 / 3 * affine(w, "trunk", inputs[0, n].numpy(), hidden))
        f, g, a, b = affine(w, "heads", trunk).reshape(4, DIM)

        def at(t: float, heads: tuple[np.ndarray, ...] = (f, g, a, b)) -> np.ndarray:
            f, g, a, b = heads
            late = logistic(a * t + b)
            return (1 - late if gated else 1) * np.tanh(f) + late * np.tanh(g)

        hidden = at(float(gaps[0, n, 0]))
        np.testing.assert_allclose(cell.hidden(states[0, n]), hidden, rtol=1e-10, atol=1e-12)
        evolved = cell.evolve(states[:, n], torch.full((1, 1), 0.7, dtype=torch.float64))
        expected = at(float(gaps[0, n, 0]) + 0.7)
        np.testing.assert_allclose(cell.hidden(evolved)[0], expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_small_steps_of_coupled_oscillators_solve_their_equation() -> None:
    cell = make(CoupledOscillators, step=1e-3, stiffness=2.0, friction=0.5)
    w, inputs = arrays(cell), torch.randn(1, 1, INPUTS).double()

    def speed(t: float, state: np.ndarray) -> np.ndarray:
        force = np.tanh(affine(w, "force", inputs[0, 0].numpy(), state))
        return np.concatenate((state[DIM:], force - 2.0 * state[:DIM] - 0.5 * state[DIM:]))

    solved = solve_ivp(speed, (0.0, 3.0), np.zeros(2 * DIM), rtol=1e-10, atol=1e-12).y[:, -1]
    found = cell.run(inputs.expand(1, 3000, -1), inputs.new_ones(1, 3000, 1))[0, -1]
    np.testing.assert_allclose(found, solved, rtol=0, atol=3e-3)


@torch.no_grad()
def test_the_gates_of_a_phased_lstm_open_and_close_once_a_period() -> None:
    cell, (inputs, gaps) = make(PhasedLSTM, open_share=0.4), rows()
    period, shift = torch.exp(cell.log_period), cell.shift
    at = {phase: cell.opening((shift + (7 + phase) * period)[:, None]) for phase in (0.1, 0.3, 0.7)}
    for phase, expected in ((0.1, 0.5), (0.3, 0.5), (0.7, 0.0)):
        torch.testing.assert_close(at[phase].diagonal(), torch.full((DIM,), expected).double())
    cell.train()
    leaked = cell.opening((shift + 0.7 * period)[:, None]).diagonal()
    torch.testing.assert_close(leaked, torch.full((DIM,), 0.7e-3).double())
    cell.eval()
    states = cell.run(inputs, gaps)
    hidden, memory = torch.zeros(2, 1, DIM).double()
    for n in range(ROWS):
        new, filled = cell.update(inputs[:, n], (hidden, memory))
        for d in range(DIM):
            turns = (float(gaps[0, : n + 1].sum()) - float(shift[d])) / float(period[d])
            phase = turns % 1.0
            share = phase / 0.2 if phase < 0.2 else 2.0 - phase / 0.2 if phase < 0.4 else 0.0
            hidden[:, d] = share * new[:, d] + (1 - share) * hidden[:, d]
            memory[:, d] = share * filled[:, d] + (1 - share) * memory[:, d]
        torch.testing.assert_close(states[:, n, : 2 * DIM], torch.cat((hidden, memory), dim=-1))


@torch.no_grad()
def test_the_memory_of_a_legendre_unit_is_the_discrete_system_of_each_gap() -> None:
    cell = make(LegendreMemoryUnit, order=5, window=4.0, num_memories=2)
    (inputs, gaps), w = rows(), arrays(cell)
    states, hidden, memory = cell.run(inputs, gaps), np.zeros(DIM), np.zeros((2, 5))
    a = [[-1, -1, -1, -1, -1], [3, -3, -3, -3, -3], [-5, 5, -5, -5, -5]]
    a += [[7, -7, 7, -7, -7], [-9, 9, -9, 9, -9]]
    b = [[1], [-3], [5], [-7], [9]]
    assert [x.tolist() for x in legendre_system(5)] == [a, b]
    a, b = np.array(a) / 4.0, np.array(b) / 4.0
    for n in range(ROWS):
        x = inputs[0, n].numpy()
        signal = affine(w, "signal", x, hidden, memory.flatten())
        system = (a, b, np.eye(5), np.zeros((5, 1)))
        step, entry, *_ = cont2discrete(system, float(gaps[0, n, 0]), method="zoh")
        memory = memory @ step.T + signal[:, None] * entry.T
        hidden = np.tanh(affine(w, "update", x, hidden, memory.flatten()))
        expected = [*hidden, *memory.flatten()]
        np.testing.assert_allclose(states[0, n], expected, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_a_legendre_memory_holds_its_window_at_irregular_times() -> None:
    cell = LegendreMemoryUnit(1, 1, order=12, window=8.0).double()
    cell.signal.weight.copy_(torch.eye(1, 14))  # the signal is the input
    cell.signal.bias.zero_()
    gaps = 0.1 * torch.rand(1, 400, 1).double() + 0.01
    times = gaps.cumsum(dim=1)
    memory = cell.run(torch.sin(times), gaps)[0, -1, 1:].numpy()
    for share in (0.1, 0.5, 0.9):
        past = float(torch.sin(times[0, -1, 0] - 8.0 * share))
        read = sum(m * eval_legendre(k, 2.0 * share - 1.0) for k, m in enumerate(memory))
        assert read == pytest.approx(past, abs=0.05)
