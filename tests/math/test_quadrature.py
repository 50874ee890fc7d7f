from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer.math.quadrature import gauss_legendre, graded_panels


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 16, 64])
def test_rule_is_exact_up_to_its_degree_and_not_beyond(num_nodes: int) -> None:
    nodes, weights = gauss_legendre(num_nodes)
    assert nodes.dtype == weights.dtype == torch.float64
    assert ((nodes > 0) & (nodes < 1)).all()
    assert (nodes.diff() > 0).all()
    assert (weights > 0).all()
    for degree in range(2 * num_nodes):
        value = float((weights * nodes**degree).sum())
        assert value == pytest.approx(1 / (degree + 1), rel=1e-13)
    if num_nodes <= 5:  # beyond that the excess is below rounding
        value = float((weights * nodes ** (2 * num_nodes)).sum())
        assert abs(value - 1 / (2 * num_nodes + 1)) > 1e-8


def test_writing_into_a_rule_does_not_change_the_next_one() -> None:
    nodes, weights = gauss_legendre(4)
    nodes.zero_()
    weights.zero_()
    assert float(gauss_legendre(4)[1].sum()) == pytest.approx(1.0)
    assert float(gauss_legendre(4)[0].min()) > 0


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0, 17.0, 1e3, 1e6])
@pytest.mark.parametrize("phase", [0.0, 1.0, 50.0, 2000.0])
def test_panels_integrate_damped_waves(decay: float, phase: float) -> None:
    nodes, weights = graded_panels(phase, max_decay=decay)
    wave = torch.exp(torch.complex(-decay * nodes, phase * nodes))
    rate = torch.tensor(complex(-decay, phase), dtype=torch.complex128)
    exact = torch.expm1(rate) / rate if abs(rate) > 0 else torch.ones_like(rate)
    assert abs((weights * wave).sum() - exact) <= 1e-13 * max(abs(exact), 1 / (1 + decay))


@pytest.mark.parametrize("decay", [0.0, 3.0, 400.0])
def test_one_rule_serves_every_rate_below_its_limit(decay: float) -> None:
    nodes, weights = graded_panels(0.0, max_decay=1e6)
    exact = -math.expm1(-decay) / decay if decay else 1.0
    assert float((weights * (-decay * nodes).exp()).sum()) == pytest.approx(exact, rel=1e-13)


@given(st.floats(0, 1e3), st.floats(0, 1e8), st.integers(1, 20))
def test_panels_cover_the_unit_interval(phase: float, decay: float, num_nodes: int) -> None:
    nodes, weights = graded_panels(phase, max_decay=decay, num_nodes=num_nodes)
    assert (nodes.diff() > 0).all()
    assert 0 < float(nodes[0]) <= float(nodes[-1]) < 1
    assert float(weights.sum()) == pytest.approx(1.0, rel=1e-12)
    assert float((weights * nodes).sum()) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gauss_legendre(0), "num_nodes must be at least 1; got 0"),
        (lambda: graded_panels(-1.0), "max_phase must be finite and not negative; got -1.0"),
        (lambda: graded_panels(1.0, max_decay=math.nan), "max_decay .* got nan"),
        (lambda: graded_panels(math.inf), "max_phase .* got inf"),
        (lambda: graded_panels(1.0, phase_per_panel=0.0), "phase_per_panel .* got 0.0"),
    ],
    ids=["no-nodes", "negative-phase", "nan-decay", "infinite-phase", "zero-panel"],
)
def test_errors_name_argument_and_value(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
