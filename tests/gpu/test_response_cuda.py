"""The response's kernels on a GPU, at real sizes. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import oscillator_response

from ..ops.response_cases import DOUBLE, MODES, make_case

pytest.importorskip("triton", reason="kernels need Triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


# Many short series, a few of middle length, and one that is cut into many chunks.
@pytest.mark.parametrize(("batch", "rows", "variables"), [(50, 40, 5), (3, 700, 2), (1, 5000, 1)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize(("drive", "of"), MODES)
def test_kernels_agree_with_the_scan_on_the_cpu(drive, of, dtype, batch, rows, variables):
    values, times, omega, zeta = make_case(batch, rows, variables, smallest=1e-6, dtype=dtype)
    omega = omega.clamp(max=20.0)
    found = []
    for device, backend in (("cpu", "chunked"), ("cuda", "auto")):
        given = [x.clone().to(device).requires_grad_() for x in (values, times, omega, zeta)]
        x, v = oscillator_response(*given, drive=drive, of=of, backend=backend)
        g = torch.Generator().manual_seed(1)
        loss = sum((torch.randn(z.shape, generator=g).to(z) * z).sum() for z in (x, v))
        found.append([z.detach().cpu() for z in (x, v, *torch.autograd.grad(loss, given))])
    tolerance = 1e-9 if dtype == DOUBLE else 2e-5
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_auto_takes_the_kernels_and_they_are_faster():
    values = torch.randn(64, 1000, 6, device="cuda")
    times = torch.rand(64, 1000, device="cuda", dtype=DOUBLE).cumsum(1)
    omega = torch.logspace(-2, 0.5, 64, device="cuda")
    zeta = torch.full((64,), 0.1, device="cuda")
    seconds = {}
    for backend in ("auto", "chunked"):
        oscillator_response(values, times, omega, zeta, backend=backend)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        oscillator_response(values, times, omega, zeta, backend=backend)
        end.record()
        torch.cuda.synchronize()
        seconds[backend] = start.elapsed_time(end) / 1e3
    assert seconds["auto"] < seconds["chunked"] / 3
