"""The blocked backend on a GPU: the same numbers as on the CPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import oscillator_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = ["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]
B, N, H, C, J = 2, 70, 2, 4, 3


def inputs(dtype):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    gaps = 10 ** (torch.rand(B, N, generator=g, dtype=torch.float64) * 8 - 8)
    omega = torch.logspace(-3, 2.3, H * C, dtype=torch.float64).view(H, C)
    zeta = torch.tensor([0.0, 0.3, 1.0, 20.0], dtype=torch.float64).expand(H, C)
    x = {name: normal(B, N, H, C) for name in ("q", "k", "v", "key_velocity", "value_velocity")}
    x |= {"key_omega": omega, "key_zeta": zeta, "value_omega": omega.flip(1), "value_zeta": zeta}
    x |= {"cos": normal(H, J, C), "sin": normal(H, J, C)}
    return {name: t.to(dtype).contiguous() for name, t in x.items()}, gaps.cumsum(1)


def outputs_and_gradients(x, times, query, device):
    leaves = {name: t.to(device).requires_grad_() for name, t in x.items()}
    tokens = dict(leaves)
    modes = {"omega": torch.tensor([0.1, 2.0, 30.0], dtype=torch.float64, device=device)}
    shape = {"cos": tokens.pop("cos"), "sin": tokens.pop("sin")}
    if query in ("anchored", "learned"):
        modes |= shape
    q, k, v = (tokens.pop(name) for name in "qkv")
    t = times.to(device)
    out = oscillator_attention(
        q,
        k,
        v,
        t,
        t,
        **tokens,
        query=query,
        query_params=None if query in ("hold", "linear") else modes,
        direction="bidirectional",
        mask=torch.arange(N, device=device).expand(B, N) % 7 != 3,
        backend="blocked",  # "auto" takes the kernels, and says why it then cannot
    )
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device)
    loss = (out.double().flatten() * weights).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out.detach().cpu()}
    found |= {n: g.cpu() for n, g in zip(leaves, grads, strict=True) if g is not None}
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("query", MODES)
def test_gpu_equals_cpu(query, dtype, tolerance):
    torch.backends.cuda.matmul.allow_tf32 = False
    x, times = inputs(dtype)
    exact = {name: t.double() for name, t in x.items()}
    want = outputs_and_gradients(exact, times, query, "cpu")
    got = outputs_and_gradients(x, times, query, "cuda")
    for name, expected in want.items():
        error = (got[name].double() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, (name, float(error))
