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
)
from .triton_cases import VELOCITIES, cotangent, make_inputs, run

OPERATORS = {
    "fused": importlib.import_module("osciformer.ops.attention.fused.operator"),
    "shared": importlib.import_module("osciformer.ops.attention.fused.shared_operator"),
}

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


def recorded(kind, x, **options):
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
            original = getattr(OPERATORS[kind], f"_{name}")
            patch.setattr(OPERATORS[kind], f"_{name}", spy(name, original))
        run(x, backend="triton", **options)
    return found["forward"], found["backward"]


# Which operators, whether they keep to tokens, and which velocities there are.
@pytest.mark.parametrize(
    ("kind", "frozen", "velocities"),
    [
        ("fused", (), VELOCITIES),
        ("fused", SPECTRA, ("key_velocity",)),
        ("shared", (), ("key_velocity",)),
    ],
    ids=["fused", "fused-frozen", "shared"],
)
def test_opcheck(kind, frozen, velocities):
    options = {"query": "linear"} if kind == "shared" else {}
    x = make_inputs(1, 3, velocities=velocities)
    mask = torch.arange(3)[None] != 1
    forward, backward = recorded(kind, x, frozen=frozen, mask=mask, **options)
    operators = torch.ops.osciformer
    # The compiled graphs above stand for the rest.
    tests = ["test_schema", "test_faketensor"]
    op = getattr(operators, f"{kind}_backward").default
    torch.library.opcheck(op, tuple(backward), test_utils=tests)
    if not frozen:
        for a in forward[: 8 if kind == "shared" else 7]:
            if a is not None:
                a.requires_grad_()
        op = getattr(operators, f"{kind}_forward").default
        torch.library.opcheck(op, tuple(forward), test_utils=[*tests, "test_autograd_registration"])
