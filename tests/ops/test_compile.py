"""The operator as a node of torch's graphs: opcheck, compile and export."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops.attention.blocked import operator as blocked_operator
from osciformer.ops.attention.ties import find_ties

from .cases import DOUBLE, assert_agree, call, make_case, outputs_and_gradients, with_mode


def operator(name):
    return getattr(torch.ops.osciformer, name).default


def recorded(name, x, monkeypatch, **options):
    """Return the arguments that a call and its backward pass hand to a custom operator."""
    calls, run = [], getattr(blocked_operator, name)

    def copied(a):
        if isinstance(a, list):
            return [copied(item) for item in a]
        return a.detach().clone() if isinstance(a, torch.Tensor) else a

    def spy(*args):
        calls.append([copied(a) for a in args])
        return run(*args)

    monkeypatch.setattr(blocked_operator, name, spy)
    outputs_and_gradients(x, backend="blocked", **options)
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize("rows", [None, 3], ids=["self", "cross"])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge", "anchored"])
def test_opcheck_of_the_quadratic_part(query, rows, monkeypatch):
    x = with_mode(make_case(1, 5, rows, extras=False), query)
    args = recorded("_forward", x, monkeypatch, query=query, value="average" if rows else "point")
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            a.requires_grad_()
    torch.library.opcheck(operator("blocked_forward"), tuple(args))


@pytest.mark.parametrize("of_times", [True, False], ids=["times-learned", "times-fixed"])
@pytest.mark.parametrize("query", ["hold", "ridge"])
def test_opcheck_of_its_backward(query, of_times, monkeypatch):
    x = with_mode(make_case(1, 5, 3, extras=False), query)
    args = recorded("_backward", x, monkeypatch, query=query, of_times=of_times)
    torch.library.opcheck(operator("blocked_backward"), tuple(args))


def tied_inputs():
    times = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=DOUBLE)
    q, k, v = torch.randn(3, 2, 3, 2, 4, dtype=DOUBLE).unbind(0)
    order, end, count = find_ties(times, times, None)
    return q, k, v, order.contiguous(), end, count


def test_opcheck_of_attention_over_ties():
    q, k, v, *rest = tied_inputs()
    tokens = tuple(x.clone().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(operator("tied_forward"), (*tokens, *rest))


def test_opcheck_of_its_backward_over_ties():
    args = tied_inputs()
    out, lse = operator("tied_forward")(*args)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    torch.library.opcheck(operator("tied_backward"), (*args, out, lse, *grads))


def assert_compiles(query, rows, backend, **options):
    x = with_mode(make_case(2, 6, rows, smallest=1e-3), query)
    if rows is None:
        x["times"] = x.pop("key_times")
        del x["query_times"]
    torch.compiler.reset()
    eager = outputs_and_gradients(x, query=query, backend="blocked", **options)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(x):
        return call(x, query=query, backend="blocked", **options)

    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    out = compiled(leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)
    grads = torch.autograd.grad((out * direction).sum(), list(leaves.values()))
    got = {"out": out.detach()}
    got |= {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}
    assert_agree(got, eager, 1e-10)


@pytest.mark.parametrize(
    ("query", "rows"), [("hold", None), ("linear", 4)], ids=["hold-self", "linear-cross"]
)
def test_one_graph_gives_the_same_output_and_gradients(query, rows):
    assert_compiles(query, rows, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 4], ids=["self", "cross"])
@pytest.mark.parametrize("query", ["hold", "linear", "ridge"])
def test_one_graph_of_every_kind_gives_the_same(query, rows):
    assert_compiles(query, rows, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("query", ["ridge_causal", "anchored", "learned"])
def test_one_graph_of_both_directions(query):
    assert_compiles(query, None, "aot_eager", direction="bidirectional")


@pytest.mark.slow
def test_one_graph_with_a_mask():
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    assert_compiles("hold", None, "aot_eager", mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("query", ["hold", "linear", "ridge"])
def test_inductor_gives_the_same_output_and_gradients(query):
    assert_compiles(query, None, "inductor")


class Attention(torch.nn.Module):
    """Self-attention with learned spectra, the least that can be exported."""

    def __init__(self, x, query):
        super().__init__()
        self.query = query
        self.names = [n for n in x if n.endswith(("_omega", "_zeta")) or n in ("bank",)]
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(x[name]))

    def forward(self, q, k, v, times):
        learned = {name: getattr(self, name) for name in self.names}
        return call({"q": q, "k": k, "v": v, "times": times} | learned, query=self.query)


@pytest.mark.parametrize("query", ["hold", "linear", pytest.param("ridge", marks=pytest.mark.slow)])
def test_export_gives_the_same_for_any_batch_size(query):
    x = with_mode(make_case(3, 6, extras=False), query)
    module = Attention(x, query)
    args = (x["q"], x["k"], x["v"], x["key_times"])
    size = torch.export.Dim("batch", min=2, max=16)
    program = torch.export.export(module, args, dynamic_shapes=({0: size},) * 4)
    other = make_case(5, 6, extras=False, seed=3)
    args = (other["q"], other["k"], other["v"], other["key_times"])
    torch.testing.assert_close(program.module()(*args), module(*args))
