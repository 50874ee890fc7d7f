"""The Triton kernels on a GPU, at real sizes and in every precision. Run with ``pytest -m gpu``.

**Budget.** The judge is `blocked` in float64 on the same rounded inputs; `tests/ops` holds it
against the quadrature of the definition. What a precision may cost is measured, not chosen: `plain`
writes the formula pair by pair in plain PyTorch, with closed forms from float64 and everything else
in the precision of the tokens. It never splits a gap, so it is a strict yardstick. The kernels may
err at most twice as much as it does, gradients three times (`assert_within` has the small print).

**Memory.** All buffers start as NaN, so that nothing may be read before it is written.
"""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import choose_backend

from ..ops.cases import SPECTRA, call
from ..ops.triton_cases import (
    VELOCITIES,
    assert_within,
    cotangent,
    errors,
    exact,
    make_inputs,
    memory_full_of_nan,
    plain,
    run,
)

pytest.importorskip("triton", reason="kernels need Triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch and Triton, while kernels are compiled. Warnings of this package stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # With an empty cache of kernels. That they were not compiled together stays an error.
    pytest.mark.filterwarnings("ignore:compiling .* GPU kernels:UserWarning"),
]

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def uneven_times(batch, length, seed=3):
    """Gaps of 1e-6 to 1 and one of 1e3; ties over the borders of tiles and of a span of 512."""
    g = torch.Generator().manual_seed(seed)
    gaps = 10 ** (torch.rand(batch, length, generator=g, dtype=torch.float64) * 6 - 6)
    gaps[:, 300:301] = 1e3
    for first, last in ((10, 12), (60, 66), (120, 200), (505, 520)):
        gaps[:, first:last] = 0.0
    return gaps.cumsum(1)


def ragged(batch, length):
    """Series of several lengths, with gaps; the last one is empty where there are several."""
    place = torch.arange(length)[None]
    ends = torch.linspace(length, 0 if batch > 1 else length, batch).long()[:, None]
    return ((place < ends) & (place % 11 != 4)).to(DEVICE)


# dtype, B, N, M (None: self-attention), C, velocities, masked, options.
CASES = {
    "bf16-64": (BF16, 2, 1000, None, 64, VELOCITIES, False, {}),
    "bf16-32-point-mask": (BF16, 2, 2048, None, 32, (), True, {"value": "point"}),
    "bf16-128-both-ways": (BF16, 1, 1000, None, 128, (), False, {"direction": "bidirectional"}),
    "bf16-16-own-times": (BF16, 1, 900, 700, 16, VELOCITIES, False, {}),
    "bf16-32-long": (BF16, 1, 4097, None, 32, VELOCITIES, False, {}),
    "fp16-64": (FP16, 1, 1000, None, 64, VELOCITIES, False, {}),
    "fp32-32-mask": (FP32, 2, 1000, None, 32, VELOCITIES, True, {}),
    "fp32-64-point": (FP32, 1, 2048, None, 64, VELOCITIES, False, {"value": "point"}),
    "fp32-128-both-ways": (FP32, 1, 1000, None, 128, (), False, {"direction": "bidirectional"}),
    "fp32-16-long": (FP32, 1, 4097, None, 16, VELOCITIES, False, {}),
}


# The same for short series, whose pairs are evaluated one by one.
SHORT_CASES = {
    "bf16-4-24": (BF16, 3, 24, None, 4, VELOCITIES, True, {}),
    "bf16-4-200": (BF16, 2, 200, None, 4, VELOCITIES, False, {"direction": "bidirectional"}),
    "bf16-32-74": (BF16, 2, 74, None, 32, VELOCITIES, False, {}),
    "bf16-32-200-point": (BF16, 2, 200, None, 32, (), True, {"value": "point"}),
    "fp16-24-74": (FP16, 2, 74, None, 24, VELOCITIES, False, {}),
    "fp32-4-24": (FP32, 3, 24, None, 4, VELOCITIES, True, {}),
    "fp32-4-74-own-times": (FP32, 2, 74, 50, 4, VELOCITIES, True, {"value": "point"}),
    "fp32-32-200": (FP32, 2, 200, None, 32, VELOCITIES, False, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_err_as_plain_pytorch_does(case):
    compare_with_plain(case, CASES[case], buffers=11)


@pytest.mark.parametrize("case", SHORT_CASES)
def test_kernels_of_short_series_err_as_plain_pytorch_does(case):
    compare_with_plain(case, SHORT_CASES[case], buffers=7)


def compare_with_plain(name, case, *, buffers):
    """Hold the kernels' errors against those of plain PyTorch."""
    dtype, batch, num_keys, num_rows, channels, velocities, is_masked, options = case
    x = make_inputs(
        batch,
        num_keys,
        num_rows,
        heads=2,
        channels=channels,
        dtype=dtype,
        times=uneven_times(batch, num_keys),
        window=60.0,
        velocities=velocities,
        device=DEVICE,
    )
    options = options | {"mask": ragged(batch, num_keys) if is_masked else None}
    want = run(exact(x), backend="blocked", **options)
    yardstick = errors(plain(x, dtype, budget=2**22, **options), want)
    with memory_full_of_nan() as shapes:
        got = run(x, backend="triton", **options)
    assert len(shapes) >= buffers
    assert got["out"].dtype == got["k"].dtype == dtype
    found = errors(got, want)
    for result, error in found.items():
        print(f"{name:20} {result:15} {error:.1e}, plain {yardstick[result]:.1e}")  # shown with -s
    assert_within(found, yardstick, dtype)


def test_two_runs_over_short_series_agree_to_the_last_bit():
    x = make_inputs(2, 100, heads=2, times=uneven_times(2, 100), dtype=BF16, device=DEVICE)
    first, second = run(x, backend="triton"), run(x, backend="triton")
    for name in first:
        assert torch.equal(first[name], second[name]), name


def shared_path_inputs(query, channels, dtype):
    """Inputs of 1500 tokens and two heads, with what a path that all rows share needs."""
    times = uneven_times(1, 1500)
    x = make_inputs(1, 1500, heads=2, channels=channels, dtype=dtype, times=times, device=DEVICE)
    g = torch.Generator().manual_seed(1)
    if query != "linear":
        x["bank"] = torch.tensor([0.3, 2.0, 20.0], dtype=torch.float64, device=DEVICE)
    if query == "learned":
        x |= {f"mode_{n}": torch.randn(2, 3, 32, generator=g).to(DEVICE) for n in ("cos", "sin")}
        del x["q"]
    return x


@pytest.mark.parametrize(
    ("query", "channels"), [("linear", 32), ("ridge", 32), ("learned", 32), ("linear", 64)]
)
def test_shared_paths_equal_blocked(query, channels):
    x = shared_path_inputs(query, channels, FP32)
    want = run(exact(x), backend="blocked", query=query)
    found = errors(run(x, backend="triton", query=query), want)
    print(query, {name: f"{e:.1e}" for name, e in found.items()})
    assert max(found.values()) <= 1e-4, found


@pytest.mark.parametrize(("query", "channels"), [("linear", 64), ("ridge", 32)])
def test_shared_paths_err_as_plain_pytorch_does(query, channels):
    # The gradient of a slow channel's frequency is one number, a sum over all pairs of terms that
    # the long gap makes large: what is left of them, and of their rounding, is a matter of luck.
    # Gradients along several directions are measured together, as one.
    x = shared_path_inputs(query, channels, BF16)

    def together(function, x, *args, **options):
        found = [function(x, *args, query=query, seed=seed, **options) for seed in (9, 10, 11)]
        return {name: torch.stack([f[name] for f in found]) for name in found[0]}

    want = together(run, exact(x), backend="blocked")
    yardstick = errors(together(plain, x, BF16), want)
    found = errors(together(run, x, backend="triton"), want)
    for name, error in found.items():
        print(f"{query:8} {name:15} {error:.1e}, plain {yardstick[name]:.1e}")  # shown with -s
    assert_within(found, yardstick, BF16)


def usual_inputs(seed=0, **options):
    """Inputs of one size, so that its kernels are compiled once."""
    times = uneven_times(2, 1000, seed=seed + 3)
    return make_inputs(
        2, 1000, heads=2, channels=64, dtype=BF16, times=times, seed=seed, device=DEVICE, **options
    )


def test_auto_takes_the_kernels():
    x = usual_inputs()
    spectra = {role: (x[f"{role}_omega"], x[f"{role}_zeta"]) for role in ("key", "value")}
    assert choose_backend("auto", None, spectra, BF16)[0] == "triton"
    with torch.no_grad():
        assert torch.equal(call(x), call(x, backend="triton"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_times_are_refused_after_the_kernels_are_queued(bad):
    x = usual_inputs()
    x["times"][1, 700] = bad
    with pytest.raises(ValueError, match=r"times\[1, 70"):
        run(x, backend="triton")


def test_two_runs_agree_to_the_last_bit():
    # Gradients of the spectra are sums over programs, which torch adds up.
    x = usual_inputs()
    first, second = run(x, backend="triton"), run(x, backend="triton")
    for name in first.keys() - set(SPECTRA):
        assert torch.equal(first[name], second[name]), name
    found = errors(first, second)
    assert max(found[name] for name in SPECTRA) <= 1e-4, found


@torch.no_grad()
def test_a_captured_graph_follows_its_inputs():
    x, other = usual_inputs(), usual_inputs(seed=1)
    call(x, backend="triton")  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(x, backend="triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, backend="triton")
    for inputs in (usual_inputs(), other):
        for name, t in inputs.items():
            x[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call(inputs, backend="triton"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_compiled_graph_gives_the_same():
    x = usual_inputs()
    want = run(x, backend="triton")
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def compiled(x):
        return call(x, backend="triton")

    leaves = {name: t.clone().requires_grad_(name != "times") for name, t in x.items()}
    out = compiled(leaves)
    del leaves["times"]
    grads = torch.autograd.grad((out.double() * cotangent(out)).sum(), list(leaves.values()))
    found = errors({"out": out.detach()} | dict(zip(leaves, grads, strict=True)), want)
    assert max(found.values()) <= torch.finfo(BF16).eps, found


def test_a_long_series_is_finite():
    length = 65_536
    x = make_inputs(
        1, length, channels=32, dtype=BF16, times=uneven_times(1, length), device=DEVICE
    )
    with memory_full_of_nan():
        found = run(x, backend="triton")
    for name, t in found.items():
        assert bool(t.isfinite().all()), name
        assert bool(t.any()), name
