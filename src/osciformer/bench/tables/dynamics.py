"""`osciformer bench dynamics`: forecasts of a dozen simulated systems, seen at random times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from osciformer._types import Float
from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries

State = np.ndarray  # [D, n]


class System(NamedTuple):
    """A system of differential equations, and where its trajectories begin."""

    rate: Callable[[State], Any]  #: Rates of change of the D variables.
    low: tuple[float, ...]  #: Bounds of the first state, which is uniform between them.
    high: tuple[float, ...]
    span: float  #: Of a trajectory.


def _lotka_volterra(x: State) -> Any:
    return 1.1 * x[0] - 0.4 * x[0] * x[1], 0.1 * x[0] * x[1] - 0.4 * x[1]


def _fitzhugh_nagumo(x: State) -> Any:
    return x[0] - x[0] ** 3 / 3 - x[1] + 0.5, 0.08 * (x[0] + 0.7 - 0.8 * x[1])


def _goodwin(x: State) -> Any:
    return 1.0 / (1.0 + x[2] ** 10) - 0.1 * x[0], x[0] - 0.1 * x[1], x[1] - 0.1 * x[2]


def _lorenz(x: State) -> Any:
    a, b, c = x
    return 10.0 * (b - a), a * (28.0 - c) - b, a * b - 8.0 / 3.0 * c


def _pendulum(x: State) -> Any:
    return x[1], -np.sin(x[0]) - 0.1 * x[1]


def _van_der_pol(x: State) -> Any:
    return x[1], 2.0 * (1.0 - x[0] ** 2) * x[1] - x[0]


def _sir(x: State) -> Any:
    infected = 0.25 * x[0] * x[1]
    return -infected, infected - 0.1 * x[1], 0.1 * x[1]


def _brusselator(x: State) -> Any:
    made = x[0] ** 2 * x[1]
    return 1.0 + made - 4.0 * x[0], 3.0 * x[0] - made


def _duffing(x: State) -> Any:
    return x[1], x[0] - x[0] ** 3 - 0.05 * x[1]


def _roessler(x: State) -> Any:
    return -x[1] - x[2], x[0] + 0.2 * x[1], 0.2 + x[2] * (x[0] - 5.7)


def _selkov(x: State) -> Any:
    made = 0.08 * x[1] + x[0] ** 2 * x[1]
    return made - x[0], 0.6 - made


def _repressilator(x: State) -> Any:
    return [10.0 / (1.0 + x[k - 1] ** 4) - x[k] for k in range(3)]


#: Chaotic ones are asked for about one turn.
SYSTEMS: dict[str, System] = {
    "lotka_volterra": System(_lotka_volterra, (2.0, 1.0), (10.0, 5.0), 30.0),
    "fitzhugh_nagumo": System(_fitzhugh_nagumo, (-2.0, -0.5), (2.0, 1.5), 100.0),
    "goodwin": System(_goodwin, (0.0, 0.0, 1.3), (0.05, 0.4, 2.5), 150.0),
    "lorenz": System(_lorenz, (-15.0, -20.0, 10.0), (15.0, 20.0, 40.0), 2.0),
    "pendulum": System(_pendulum, (-2.5, -1.0), (2.5, 1.0), 25.0),
    "van_der_pol": System(_van_der_pol, (-2.0, -3.0), (2.0, 3.0), 20.0),
    "sir": System(_sir, (0.7, 0.005, 0.0), (0.95, 0.05, 0.1), 60.0),
    "brusselator": System(_brusselator, (0.5, 1.0), (2.5, 4.0), 20.0),
    "duffing": System(_duffing, (-1.5, -1.0), (1.5, 1.0), 25.0),
    "roessler": System(_roessler, (-6.0, -6.0, 0.0), (6.0, 6.0, 0.5), 25.0),
    "selkov": System(_selkov, (0.2, 0.5), (1.5, 2.5), 30.0),
    "repressilator": System(_repressilator, (0.0, 0.0, 0.0), (3.0, 3.0, 3.0), 15.0),
}
#: Steps of the solver, observations of a trajectory, what part of its span is seen, and the
#: standard deviation of noise in that of the variable.
STEPS, ROWS, SEEN, NOISE = 4000, 80, 0.6, 0.05


def solve(
    system: System, first: Float[np.ndarray, "D n"], times: Float[np.ndarray, "n T"]
) -> Float[np.ndarray, "n T D"]:
    """Return states at times, by Runge-Kutta of order 4 and cubic interpolation of its steps."""
    step = system.span / STEPS

    def rate(x: State) -> State:
        return np.stack([np.broadcast_to(part, x[0].shape) for part in system.rate(x)])

    states, x = [first], first
    for _ in range(STEPS):
        one = rate(x)
        two = rate(x + 0.5 * step * one)
        three = rate(x + 0.5 * step * two)
        x = x + step / 6 * (one + 2 * two + 2 * three + rate(x + step * three))
        states.append(x)
    path = np.stack(states)  # [STEPS + 1, D, n]
    place = np.clip((times / step).astype(int), 0, STEPS - 1)
    owner = np.arange(len(times))[:, None]
    left, right = (path[place + k, :, owner] for k in (0, 1))  # [n, T, D]
    slopes = [step * np.moveaxis(rate(np.moveaxis(x, 2, 0)), 0, 2) for x in (left, right)]
    u = (times / step - place)[..., None]
    ends = (1 + 2 * u) * (1 - u) ** 2 * left + u**2 * (3 - 2 * u) * right
    found: np.ndarray = ends + u * (1 - u) ** 2 * slopes[0] - u**2 * (1 - u) * slopes[1]
    return found


@functools.cache
def make_trajectories(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted times [n, 80], uniform over the span, and true states there [n, 80, D]."""
    system, generator = SYSTEMS[name], np.random.default_rng(seed)
    first = generator.uniform(system.low, system.high, (count, len(system.low))).T
    times = np.sort(generator.uniform(0.0, system.span, (count, ROWS)), axis=1)
    return times, solve(system, first, times)


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of a system; the data do not depend on the seed."""
    names = ("train", "validation", "test")
    found = [make_trajectories(case, size[name], number) for number, name in enumerate(names)]
    center, scale = found[0][1].mean(axis=(0, 1)), found[0][1].std(axis=(0, 1))
    parts = []
    for number, (times, states) in enumerate(found):
        true = (states - center) / scale
        noise = np.random.default_rng([number, 1]).normal(0.0, NOISE, true.shape)
        is_seen = times < SEEN * SYSTEMS[case].span
        is_seen[:, 0] = True
        rows = list(zip(times, true, noise, is_seen, strict=True))
        seen = [(t[here], (x + n)[here]) for t, x, n, here in rows]
        asked = [(t[~here], x[~here]) for t, x, _, here in rows]
        both = (IrregularSeries.from_arrays(*zip(*pairs, strict=True)) for pairs in (seen, asked))
        parts.append(Part(*both))
    settings = {"max_epochs": size["epochs"], "batch_size": size["batch"], "dim": size["dim"]}
    return Problem("forecasting", parts[0], parts[1], {"test": parts[2]}, settings)


SUITE = Table(
    name="dynamics",
    module="dynamics",
    summary="Forecasts of simulated systems at random times.",
    rows=tuple(SYSTEMS),
    load=load,
    tasks="forecasting",
    sizes={
        "small": {
            **{"train": 400, "validation": 100, "test": 200},
            **{"epochs": 60, "batch": 32, "dim": 32},
        },
        "full": {
            **{"train": 4000, "validation": 500, "test": 1000},
            **{"epochs": 100, "batch": 32, "dim": 64},
        },
        "quick": {
            **{"train": 16, "validation": 8, "test": 8},
            **{"epochs": 1, "batch": 16, "dim": 8},
        },
    },
    note=(
        "Trajectories from random first states, at 80 random times; those in the first 60 % of the "
        "span are seen, with noise of 0.05, and the true states at the others are asked. Values "
        "are in standard deviations of each variable, so that the constant forecast, the mean, has "
        "an RMSE of about 1; `last` repeats what was seen last."
    ),
)
