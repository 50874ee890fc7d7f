"""The Triton kernels as operators of `torch.library`: registration, and compiled graphs."""

from __future__ import annotations

import importlib

import pytest
import torch

from .cases import SPECTRA, call
from .interpreter_cases import (  # noqa: F401  (fixtures)
    assert_close,
    no_blocked,
    quick_interpreter,
    tiled,
)
from .triton_cases import VELOCITIES, cotangent, make_inputs, run

OPERATORS = importlib.import_module("osciformer.ops.attention.triton.operators")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.mark.parametrize(
    "options",
    [{"direction": "bidirectional", "mask": torch.arange(5)[None] != 2}, {"query": "linear"}],
    ids=["hold", "linear"],
)
def test_one_compiled_graph_gives_the_same(options):
    x = make_inputs(1, 5)
    want = run(x, backend="triton", **options)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return call(x, backend="triton", **options)

    leaves = {name: t.clone().requires_grad_(name != "times") for name, t in x.items()}
    out = compiled(leaves)
    del leaves["times"]
    grads = torch.autograd.grad((out.double() * cotangent(out)).sum(), list(leaves.values()))
    assert_close({"out": out.detach()} | dict(zip(leaves, grads, strict=True)), want, 1e-6)


def recorded(x, **options):
    """Return the arguments that a call hands to the forward and to the backward operator."""
    found = {}

    def spy(name, original):
        def noted(*args):
            assert name not in found
            tensors = (a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
            found[name] = list(tensors)
            return original(*args)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            original = getattr(OPERATORS, f"attention_{name}")
            patch.setattr(OPERATORS, f"attention_{name}", spy(name, original))
        run(x, backend="triton", **options)
    return found["forward"], found["backward"]


@pytest.mark.parametrize(
    ("query", "frozen", "velocities"),
    [
        ("hold", (), VELOCITIES),
        ("hold", SPECTRA, ("key_velocity",)),
        ("linear", (), ("key_velocity",)),
    ],
    ids=["hold", "hold-frozen", "linear"],
)
def test_opcheck(query, frozen, velocities):
    x = make_inputs(1, 3, velocities=velocities)
    mask = torch.arange(3)[None] != 1
    forward, backward = recorded(x, frozen=frozen, mask=mask, query=query)
    operators = torch.ops.osciformer
    # The compiled graphs above stand for the rest.
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(operators.attention_backward.default, tuple(backward), test_utils=tests)
    if not frozen:
        for a in forward[:8]:
            if a is not None:
                a.requires_grad_()
        torch.library.opcheck(
            operators.attention_forward.default,
            tuple(forward),
            test_utils=[*tests, "test_autograd_registration"],
        )
