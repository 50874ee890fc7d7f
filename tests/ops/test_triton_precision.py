"""Half precision of the Triton kernels in Triton's interpreter, and its yardstick.

Kernels may err about as much as the formula does, written pair by pair in plain PyTorch of the same
precision (`plain`, `assert_within`).
"""

from __future__ import annotations

import pytest
import torch

from .cases import DOUBLE
from .interpreter_cases import (  # noqa: F401  (fixtures)
    assert_close,
    no_blocked,
    path_inputs,
    quick_interpreter,
    rounding_to_nearest,
    short_spans,
    tied_times,
    tiled,
)
from .triton_cases import assert_within, errors, exact, make_inputs, plain, run

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.mark.usefixtures("rounding_to_nearest", "short_spans")
@pytest.mark.parametrize(
    ("dtype", "length", "query", "value"),
    [
        (torch.bfloat16, 65, "hold", "average"),
        (torch.bfloat16, 20, "hold", "point"),
        (torch.float16, 65, "hold", "average"),
        (torch.bfloat16, 140, "linear", "average"),
        (torch.bfloat16, 20, "ridge", "average"),
        (torch.float16, 65, "linear", "average"),
    ],
    ids=["bf16-average", "bf16-point", "fp16", "linear-bf16", "ridge-bf16", "linear-fp16"],
)
def test_half_precision_errs_as_plain_pytorch_does(dtype, length, query, value):
    x = path_inputs(query, 1, length, dtype=dtype)
    options = {"query": query, "value": value}
    want = run(exact(x), backend="blocked", **options)
    got = run(x, backend="triton", **options)
    assert got["out"].dtype == got["q"].dtype == got["key_velocity"].dtype == dtype
    assert_within(errors(got, want), errors(plain(x, dtype, **options), want), dtype)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("rows", [None, 9], ids=["self", "cross"])
def test_the_yardstick_of_precision_is_the_formula(rows, direction, value):
    x = make_inputs(2, 12, rows, heads=2, dtype=DOUBLE)
    mask = torch.arange(12)[None] % 5 != torch.tensor([[1], [4]])
    options = {"value": value, "direction": direction, "mask": mask}
    got = plain(x, DOUBLE, budget=12 * 32 * 2 * 5, **options)
    assert_close(got, run(x, backend="reference", **options), 1e-11)


@pytest.mark.parametrize("value", ["average", "point"])
@pytest.mark.parametrize("query", ["linear", "ridge", "learned"])
def test_the_yardstick_of_shared_paths_is_the_formula(query, value):
    times = tied_times(12, [(0, 1), (4, 6)])
    x = exact(path_inputs(query, 1, 12, heads=2, times=times))
    got = plain(x, DOUBLE, query=query, value=value, budget=12 * 12 * 2 * 5)
    assert_close(got, run(x, backend="reference", query=query, value=value), 1e-11)
