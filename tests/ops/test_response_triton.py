"""The response's kernels in Triton's interpreter: what the scan for any device gives."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import Response, oscillator_response

from .interpreter_cases import quick_interpreter  # noqa: F401
from .response_cases import DOUBLE, MODES, ZETAS, make_case

triton_scan = pytest.importorskip("osciformer.ops.response.triton.scan")


@pytest.mark.parametrize(("drive", "of"), MODES)
def test_kernels_agree_with_the_scan(drive, of, monkeypatch):
    # Half of the modes have one bank for all variables, half one each; and both dtypes occur.
    of_variables, dtype = of == "rate", torch.float32 if drive == "hold" else DOUBLE
    # Chunks and segments so small that all borders are met.
    monkeypatch.setattr(triton_scan.KernelBlock, "segment_size", 60)
    monkeypatch.setattr(triton_scan, "plan", lambda batch, rows, width: (batch, 2))
    values, times, omega, zeta = make_case(1, 9, 2, smallest=1e-6, dtype=dtype)
    if of_variables:
        omega = omega * torch.tensor([[1.0], [0.3]], dtype=DOUBLE)
    start = torch.randn(2, 1, 2, len(ZETAS), dtype=dtype)
    found = []
    for backend in ("chunked", "triton"):
        given = [x.clone().requires_grad_() for x in (values, times, omega, zeta, start)]
        options = dict(drive=drive, of=of, initial=Response(*given[4]), backend=backend)
        x, v = oscillator_response(*given[:4], **options)
        g = torch.Generator().manual_seed(1)
        loss = sum((torch.randn(z.shape, generator=g).to(z) * z).sum() for z in (x, v))
        found.append((x, v, *torch.autograd.grad(loss, given)))
    tolerance = 1e-9 if dtype == DOUBLE else 1e-5
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def test_kernels_are_refused_where_they_cannot_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = (torch.ones(1, 2, 1), torch.ones(1, 2), torch.ones(1), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run here.*backend='chunked'"):
        oscillator_response(*given, backend="triton")
