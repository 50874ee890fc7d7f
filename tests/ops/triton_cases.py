"""Inputs, judges and error budgets for the tests of the Triton kernels, on a CPU and on a GPU."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from osciformer.math.oscillator import moments
from osciformer.ops.padding import clean_times

from .cases import DOUBLE, SPECTRA, call

#: Every damping regime: undamped, under, near critical from both sides, critical, over, far over.
ZETA = (0.0, 0.05, 0.3, 0.999, 1.0, 1.00001, 1.1, 3.0, 100.0)
VELOCITIES = ("key_velocity", "value_velocity")


def make_inputs(
    batch=1,
    num_keys=64,
    num_rows=None,
    *,
    heads=1,
    channels=16,
    dtype=torch.float32,
    times=None,
    window=1.5,
    velocities=VELOCITIES,
    seed=0,
    device="cpu",
):
    """Return all inputs as one flat dict; `times` is both times of self-attention.

    omega is spread over 1e-2 to 1e2 and zeta over `ZETA` in each head; velocities are scaled so
    that they matter as much as the displacements. Spectra and times are float64.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(length):
        return torch.randn(batch, length, heads, channels, generator=g, dtype=DOUBLE)

    def spectrum(prime):
        # Strides that are no divisors of the sizes pair every omega range with every zeta.
        place = torch.arange(heads * channels).view(heads, channels) * prime
        omega = torch.logspace(-2, 2, channels, dtype=DOUBLE)[place % channels]
        zeta = torch.tensor(ZETA, dtype=DOUBLE)[place % len(ZETA)]
        return omega, zeta

    if times is None:
        times = (torch.rand(batch, num_keys, generator=g, dtype=DOUBLE) * window).sort(1).values
    x = {"times": times.clone()}
    if num_rows is not None:
        # Before the first key, after the last, at times of keys (some twice) and between.
        own = torch.rand(batch, num_rows, generator=g, dtype=DOUBLE) * (1.4 * window) - 0.2 * window
        own[:, ::3] = times[:, torch.arange(num_rows)[::3] // 2 % num_keys]
        x = {"query_times": own.sort(1).values, "key_times": x["times"]}
    x["key_omega"], x["key_zeta"] = spectrum(5)
    x["value_omega"], x["value_zeta"] = spectrum(7)
    x["q"] = normal(num_keys if num_rows is None else num_rows)
    x |= {name: normal(num_keys) for name in "kv"}
    for name in velocities:
        x[name] = normal(num_keys) * x[name.replace("velocity", "omega")]
    return {name: t.to(device, dtype if t.ndim == 4 else DOUBLE) for name, t in x.items()}


def exact(x):
    """Return the same inputs, rounded as they are, in float64."""
    return {name: t.double() for name, t in x.items()}


def cotangent(out):
    """Return the direction that gradients are taken along."""
    g = torch.Generator().manual_seed(9)
    return torch.randn(out.shape, generator=g, dtype=DOUBLE).to(out.device)


def run(x, *, frozen=(), **options):
    """Return the output and the gradient of every input but times and those in `frozen`."""
    leaves = {
        name: t.detach().clone().requires_grad_()
        for name, t in x.items()
        if not name.endswith("times") and name not in frozen
    }
    out = call(x | leaves, **options)
    loss = (out.double() * cotangent(out)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[name] = torch.zeros_like(leaf) if grad is None else grad
    return found


@contextmanager
def memory_full_of_nan():
    """Fill every new buffer of floats with NaN; yield the list of their shapes."""
    shapes = []

    def filling(make):
        def made(*args, **options):
            x = make(*args, **options)
            if x.is_floating_point():
                x.fill_(torch.nan)
                shapes.append(tuple(x.shape))
            return x

        return made

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, filling(getattr(owner, name)))
        yield shapes


def plain(x, dtype, *, value="average", direction="causal", mask=None, budget=2**22):
    """Return what `run` returns, from the formula written pair by pair in plain PyTorch.

    Closed forms are evaluated in float64 and rounded to `dtype`; all else, the moved keys and
    values, their products, the softmax and its gradient, is PyTorch's arithmetic in `dtype`. Rows
    are taken in chunks of `budget` pairs times channels; chunks are summed in float64.
    """
    names = [name for name in x if not name.endswith("times")]
    rows = x.get("query_times", x.get("times"))
    keys = x.get("key_times", x.get("times"))
    present = torch.ones_like(keys, dtype=torch.bool) if mask is None else mask
    # Absent tokens of self-attention have rows too: of queries 0, at times of their neighbours.
    absent_rows = None
    if mask is not None and "times" in x:
        rows = keys = clean_times(keys, mask)
        absent_rows = ~mask[..., None, None]
    batch, num_keys, heads, channels = x["k"].shape
    step = max(1, budget // (batch * num_keys * heads * channels))
    direction_of_loss = cotangent(x["q"])
    sums = {name: torch.zeros(x[name].shape, dtype=DOUBLE, device=keys.device) for name in names}
    outs = []
    for start in range(0, rows.shape[1], step):
        part = slice(start, start + step)
        leaves = {}
        for name in names:
            kept = x[name].detach().to(DOUBLE if name in SPECTRA else dtype)
            leaves[name] = (kept[:, part] if name == "q" else kept).requires_grad_()
        gap = rows[:, part, None] - keys[:, None]
        seen = present[:, None] & ((gap >= 0) | (direction == "bidirectional"))
        s = torch.where(seen, gap.abs(), 0.0)[:, None, :, :, None]  # [B, 1, R, N, 1]
        moved = [
            _moved(leaves, s, role, side, dtype, is_average=side == "key" or value == "average")
            for role, side in (("k", "key"), ("v", "value"))
        ]
        q = leaves["q"]
        q = q if absent_rows is None else q.masked_fill(absent_rows[:, part], 0.0)
        q = q.transpose(1, 2)[..., None]
        logits = (moved[0] @ q).squeeze(-1) * (1.0 / math.sqrt(channels))
        seen = seen[:, None]
        logits = logits.masked_fill(~seen, float("-inf"))
        logits = torch.where(seen.any(-1, keepdim=True), logits, 0.0)
        weights = torch.where(seen, logits.softmax(-1), 0.0)
        out = (weights[..., None, :] @ moved[1]).squeeze(-2).transpose(1, 2)
        loss = (out.double() * direction_of_loss[:, part]).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            (sums[name][:, part] if name == "q" else sums[name]).add_(grad)
        outs.append(out.detach())
    tokens = {name: s.to(DOUBLE if name in SPECTRA else dtype) for name, s in sums.items()}
    return {"out": torch.cat(outs, 1)} | tokens


def _moved(leaves, s, role, side, dtype, *, is_average):
    """Return every key (or value) as each row meets it, ``[B, H, R, N, C]``."""
    omega, zeta = (leaves[f"{side}_{n}"][:, None, None] for n in ("omega", "zeta"))
    m = moments(s, omega, zeta)
    first, second = 1.0 - omega**2 * m.i12, m.g12
    if is_average:
        length = torch.where(s > 0, s, 1.0)
        first, second = 1.0 - omega**2 * (m.k12 / length), m.i12 / length
    start = leaves[role].transpose(1, 2)[:, :, None]
    moved = first.to(dtype) * start
    velocity = leaves.get(f"{side}_velocity")
    if velocity is not None:
        moved = moved + second.to(dtype) * velocity.transpose(1, 2)[:, :, None]
    return moved


def errors(got, want):
    """Return the largest error of each result, relative to its largest entry.

    Where one key takes all the weight, gradients of queries and keys are what is left after a
    cancellation: they are measured against a tenth of those of the values, at least.
    """
    assert got.keys() == want.keys()
    found = {}
    for name, expected in want.items():
        assert got[name].shape == expected.shape, name
        size = float(expected.double().abs().max())
        if name in ("q", "k"):
            size = max(size, 0.1 * float(want["v"].double().abs().max()))
        error = float((got[name].double() - expected.double()).abs().max())
        found[name] = error / size if size > 0 else error
        if math.isnan(error):
            found[name] = float("inf")
    return found


def assert_within(found, plain_errors, dtype):
    """Check errors against those of plain PyTorch: at most twice, three times for gradients.

    A little is added, because the largest of a few errors is a matter of luck: half a unit in the
    last place, and in float32, where sums of products in three parts and of exponentials count for
    more than the rounding of tokens, sixteen.
    """
    eps = torch.finfo(dtype).eps
    floor = 16 * eps if dtype == torch.float32 else 0.5 * eps
    # A yardstick that errs by more computes something else.
    assert max(plain_errors.values()) < 0.2, plain_errors
    wrong = {}
    for name, error in found.items():
        allowed = (2 if name == "out" else 3) * plain_errors[name] + floor
        if not error <= allowed:
            wrong[name] = f"{error:.1e} > {allowed:.1e} (plain {plain_errors[name]:.1e})"
    assert not wrong, wrong
