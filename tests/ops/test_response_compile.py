"""The response operator as a node of torch's graphs."""

from __future__ import annotations

import torch

from osciformer.ops import oscillator_response

from .response_cases import DOUBLE, make_case


def scan_inputs(push):
    values, times, omega, zeta = make_case(2, 5, 2, smallest=1e-2, missing=0.0)
    gaps = torch.nn.functional.pad(times.diff(dim=1), (0, 1))
    state = torch.randn(2, 2, 2, len(omega), dtype=DOUBLE)
    tensors = (values, gaps, omega[None], zeta[None], state)
    return (*(x.clone().requires_grad_() for x in tensors), push, False)


def test_opcheck():
    torch.library.opcheck(torch.ops.osciformer.response_forward.default, scan_inputs(0))


def test_opcheck_of_the_adjoint():
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in scan_inputs(0)]
    states = torch.ops.osciformer.response_forward.default(*args)
    operator = torch.ops.osciformer.response_backward.default
    torch.library.opcheck(operator, (*args, states, torch.randn_like(states), True))


def test_compiles_as_one_graph():
    values, times, omega, zeta = make_case(smallest=1e-2)
    query = times[:, 3:6] + 0.01

    def loss(values, times, omega, zeta):
        read = oscillator_response(values, times, omega, zeta, query_times=query)
        return sum((z**2).sum() for z in read)

    found = []
    for run in (loss, torch.compile(loss, backend="eager", fullgraph=True)):
        given = [x.clone().requires_grad_() for x in (values, times, omega, zeta)]
        total = run(*given)
        found.append((total.detach(), *torch.autograd.grad(total, given)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8 * float(b.abs().max()))
