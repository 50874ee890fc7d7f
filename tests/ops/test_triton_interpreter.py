"""What the tests do to Triton's interpreter changes no bit of what it computes."""

from __future__ import annotations

import pytest
import torch

from .interpreter_cases import (  # noqa: F401  (a fixture)
    made_quick,
    path_inputs,
    tied_times,
    tiled,
)
from .triton_cases import run

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.mark.parametrize(
    ("query", "dtype", "options"),
    [
        ("hold", torch.float32, {"value": "point"}),
        ("hold", torch.bfloat16, {}),
        ("learned", torch.float16, {}),
    ],
    ids=["hold-f32", "hold-bf16", "learned-f16"],
)
def test_the_quick_interpreter_gives_the_same_bits(query, dtype, options):
    def inputs(length):
        return path_inputs(query, 1, length, dtype=dtype, times=tied_times(length, [(2, 4)]))

    options = {"query": query, "backend": "triton", **options}
    bare = run(inputs(9), **options)
    with made_quick():
        run(inputs(5), **options)  # so that there is something to remember
        quick = run(inputs(9), **options)
    for name, want in bare.items():
        assert quick[name].dtype == want.dtype
        assert torch.equal(quick[name], want), name
