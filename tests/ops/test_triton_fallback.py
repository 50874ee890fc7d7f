"""What the Triton kernels do not serve: `blocked` does, and a warning says so."""

from __future__ import annotations

import pytest
import torch

from .cases import DOUBLE, call
from .interpreter_cases import assert_close, way_in
from .triton_cases import exact, make_inputs, run


def with_a_drive():
    x = make_inputs(1, 5) | {"drive_omega": torch.tensor([1.3], dtype=DOUBLE)}
    return x | {"key_cos": torch.ones(1, 1, 16), "value_sin": torch.ones(1, 1, 16)}


def with_a_rest_position():
    return make_inputs(1, 5) | {"key_equilibrium": torch.ones(1, 5, 1, 16)}


UNSERVED = {
    "the query is not 'hold'|sinusoids of its own": (
        lambda: make_inputs(1, 5),
        {"query": "ridge_causal"},
    ),
    "the head size is 24": (lambda: make_inputs(1, 5, channels=24), {"query": "linear"}),
    "the head size is 130": (lambda: make_inputs(1, 5, channels=130), {}),
    "tokens are float64": (lambda: make_inputs(1, 5, dtype=DOUBLE), {}),
    "there is a drive": (with_a_drive, {}),
    "or a rest position": (with_a_rest_position, {}),
    "weights are asked for": (lambda: make_inputs(1, 5), {"return_weights": True}),
}


@pytest.fixture
def nothing_said():
    way_in._say_once.cache_clear()
    yield
    way_in._say_once.cache_clear()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("reason", UNSERVED)
def test_blocked_serves_the_rest_and_says_so_once(reason):
    make, options = UNSERVED[reason]
    x = make()
    with pytest.warns(UserWarning, match=f"({reason}).*'blocked' runs instead"):
        got = call(x, backend="triton", **options)
    again = call(x, backend="triton", **options)  # a warning here would be an error
    want = call(x, backend="blocked", **options)
    for each in (got, again):
        torch.testing.assert_close(each, want, rtol=0.0, atol=0.0)


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("scale", [0.0, -0.4], ids=str)
def test_scales_that_no_kernel_serves(scale):
    x = make_inputs(1, 65)
    with pytest.warns(UserWarning, match="is not positive"):
        got = run(x, backend="triton", scale=scale)
    assert_close(got, run(exact(x), backend="blocked", scale=scale))


@pytest.mark.usefixtures("nothing_said")
def test_times_that_want_gradients_go_to_blocked():
    x = make_inputs(1, 5)
    x["times"].requires_grad_()
    with pytest.warns(UserWarning, match="times want gradients"):
        out = call(x, backend="triton")
    want = call(x, backend="blocked")
    got, expected = (torch.autograd.grad(o.sum(), x["times"])[0] for o in (out, want))
    assert torch.equal(got, expected)
    assert got.any()


def test_no_gpu_and_no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match=r"on cpu: .*CUDA.*'blocked'.*TRITON_INTERPRET=1"):
        call(make_inputs(1, 3), backend="triton")


def test_no_triton(monkeypatch):
    monkeypatch.setattr(way_in, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"not installed: pip install triton.*'blocked'"):
        call(make_inputs(1, 3), backend="triton")
