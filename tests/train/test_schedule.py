from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.train.module import warmup_cosine


@given(num_steps=st.integers(1, 500), warmup=st.floats(0, 0.9), step=st.integers(0, 600))
def test_factor_stays_within_zero_and_one(num_steps: int, warmup: float, step: int) -> None:
    assert 0.0 <= warmup_cosine(step, num_steps, warmup) <= 1.0


def test_factor_rises_and_then_falls() -> None:
    factors = [warmup_cosine(s, 50, 0.2) for s in range(51)]
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[-1] == pytest.approx(0.0)
    assert factors[0] == pytest.approx(0.1)
