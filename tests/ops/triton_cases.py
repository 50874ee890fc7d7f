"""Inputs, judges and error budgets for the tests of the Triton kernels, on a CPU and on a GPU."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from osciformer.math.oscillator import moments, propagator
from osciformer.ops.attention.blocked.sinusoids import Modes, sinusoid_integral
from osciformer.ops.attention.gap import linear_integral
from osciformer.ops.attention.query import LinearPath, resolve_query
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


def cotangent(out, seed=9):
    """Return the direction that gradients are taken along."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=g, dtype=DOUBLE).to(out.device)


def run(x, *, frozen=(), seed=9, **options):
    """Return the output and the gradient of every input but times and those in `frozen`.

    `seed` is that of the direction that gradients are taken along.
    """
    leaves = {
        name: t.detach().clone().requires_grad_()
        for name, t in x.items()
        if not name.endswith("times") and name not in frozen
    }
    out = call(x | leaves, **options)
    loss = (out.double() * cotangent(out, seed)).sum()
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


def plain(
    x,
    dtype,
    *,
    query="hold",
    value="average",
    direction="causal",
    mask=None,
    budget=2**22,
    seed=9,
):
    """Return what `run` returns, from the formula written pair by pair in plain PyTorch.

    Closed forms are evaluated in float64 and rounded to `dtype`; all else, the moved keys and
    values, their products, the softmax and its gradient, is PyTorch's arithmetic in `dtype`. Rows
    are taken in chunks of `budget` pairs times channels; chunks are summed in float64.

    Under a path that all rows share (causal self-attention without a mask) the closed forms of
    keys are averages of path times propagator (`path_factors`).
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
    direction_of_loss = cotangent(x.get("q", x["k"]), seed)
    sums = {name: torch.zeros(x[name].shape, dtype=DOUBLE, device=keys.device) for name in names}
    of_path, factors = {}, []
    if query != "hold":
        assert direction == "causal"
        assert mask is None
        in_path = [n for n in names if n not in ("k", "v", *VELOCITIES) and "value" not in n]
        of_path = {name: x[name].detach().double().requires_grad_() for name in in_path}
        factors = path_factors(of_path, keys, query, budget)
    to_factors = [torch.empty_like(f) for f in factors]
    outs = []
    for start in range(0, rows.shape[1], step):
        part = slice(start, start + step)
        leaves = {}
        for name in names:
            if name not in of_path:
                kept = x[name].detach().to(DOUBLE if name in SPECTRA else dtype)
                leaves[name] = (kept[:, part] if name == "q" else kept).requires_grad_()
        gap = rows[:, part, None] - keys[:, None]
        seen = present[:, None] & ((gap >= 0) | (direction == "bidirectional"))
        s = torch.where(seen, gap.abs(), 0.0)[:, None, :, :, None]  # [B, 1, R, N, 1]
        held = [f[:, :, part].detach().to(dtype).requires_grad_() for f in factors]
        if query == "hold":
            q = leaves["q"]
            q = q if absent_rows is None else q.masked_fill(absent_rows[:, part], 0.0)
            forms = _forms(leaves, s, "key", dtype, is_average=True)
            logits = (_moved(leaves, "k", "key", *forms) @ q.transpose(1, 2)[..., None]).squeeze(-1)
        else:
            logits = _moved(leaves, "k", "key", *held).sum(-1)
        logits = logits * (1.0 / math.sqrt(channels))
        seen = seen[:, None]
        logits = logits.masked_fill(~seen, float("-inf"))
        logits = torch.where(seen.any(-1, keepdim=True), logits, 0.0)
        weights = torch.where(seen, logits.softmax(-1), 0.0)
        forms = _forms(leaves, s, "value", dtype, is_average=value == "average")
        moved = _moved(leaves, "v", "value", *forms)
        out = (weights[..., None, :] @ moved).squeeze(-2).transpose(1, 2)
        loss = (out.double() * direction_of_loss[:, part]).sum()
        grads = list(torch.autograd.grad(loss, [*leaves.values(), *held]))
        for to in reversed(to_factors):
            to[:, :, part] = grads.pop()
        for name, grad in zip(leaves, grads, strict=True):
            (sums[name][:, part] if name == "q" else sums[name]).add_(grad)
        outs.append(out.detach())
    if of_path:
        grads = torch.autograd.grad(factors, list(of_path.values()), to_factors)
        for name, grad in zip(of_path, grads, strict=True):
            sums[name].add_(grad)
    tokens = {name: s.to(dtype if s.ndim == 4 else DOUBLE) for name, s in sums.items()}
    return {"out": torch.cat(outs, 1)} | tokens


def _forms(leaves, s, side, dtype, *, is_average):
    """Return what multiplies position and velocity of a token after `s`, ``[B, H, R, N, C]``."""
    omega, zeta = (leaves[f"{side}_{n}"][:, None, None] for n in ("omega", "zeta"))
    m = moments(s, omega, zeta)
    first, second = 1.0 - omega**2 * m.i12, m.g12
    if is_average:
        length = torch.where(s > 0, s, 1.0)
        first, second = 1.0 - omega**2 * (m.k12 / length), m.i12 / length
    return first.to(dtype), second.to(dtype)


def _moved(leaves, role, side, first, second):
    """Return every key (or value) as each row meets it, ``[B, H, R, N, C]``."""
    moved = first * leaves[role].transpose(1, 2)[:, :, None]
    velocity = leaves.get(f"{side}_velocity")
    if velocity is not None:
        moved = moved + second * velocity.transpose(1, 2)[:, :, None]
    return moved


def gap_integrals(path, times, omega, zeta):
    """Return a shared path's integrals over gaps, ``[B, H, 2, N - 1, C]`` float64.

    Against the propagator's first row, by the closed forms of `blocked`.
    """
    gap, heads = torch.diff(times)[..., None], omega.shape[0]
    omega, zeta = omega.flatten(), zeta.flatten()
    m = moments(gap, omega, zeta)
    if isinstance(path, LinearPath):
        q = path.q.flatten(-2)
        begin, step = q[:, :-1], torch.diff(q, dim=1)
        found = linear_integral(m, gap, omega, begin, step, is_drift=False)
    else:
        assert path.constant is None
        # [B, 1, H, J, C] to [B, J, 1, H C]
        weights = (w[:, 0].transpose(1, 2).flatten(-2).unsqueeze(-2) for w in (path.cos, path.sin))
        start = (times[:, :-1] - path.origin)[..., None]
        modes = Modes(*weights, path.omega, omega, zeta)
        found = sinusoid_integral(start, gap, modes, m, is_drift=False)
        found = [x.squeeze(-2) for x in found]
    return torch.stack(list(found), 1).unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)


def path_factors(inputs, times, query, budget):
    """Return what multiplies positions and velocities of keys under a shared path.

    Two tensors ``[B, H, N, N, C]`` float64: the average over each pair's gap of the path times the
    propagator's first row; at a tie the path at the row. Channels are taken a few at a time, as
    many as `budget` allows, and again in the backward pass.
    """
    params = {
        name.removeprefix("mode_").replace("bank", "omega"): t
        for name, t in inputs.items()
        if name == "bank" or name.startswith("mode_")
    }
    if query == "ridge":
        params["ridge"] = 1e-3  # as in `call`
    path = resolve_query(query, inputs.get("q"), times, params)
    omega, zeta = inputs["key_omega"], inputs["key_zeta"]
    integral = gap_integrals(path, times, omega, zeta)
    own = path.q if query == "linear" else path.evaluate(times[:, None])[:, 0]
    step = max(1, budget // (times.shape[0] * times.shape[1] ** 2 * omega.shape[0]))
    parts = []
    for start in range(0, omega.shape[1], step):
        few = slice(start, start + step)
        given = (integral[..., few], own[..., few], times, omega[:, few], zeta[:, few])
        parts.append(checkpoint(_average_path, *given, use_reentrant=False))
    return [torch.cat(part, -1) for part in zip(*parts, strict=True)]


def _average_path(integral, own, times, omega, zeta):
    """Do what `path_factors` does, as sums over the gaps between key and row."""
    place = torch.arange(times.shape[1], device=times.device)
    since = (times[:, :-1, None] - times[:, None]).clamp(min=0)  # [B, N - 1, N]
    spectrum = (omega[:, None, None], zeta[:, None, None])
    p11, p12, p21, p22 = propagator(since[:, None, ..., None], *spectrum)
    is_later = (place[:-1, None] >= place)[..., None]
    gap = (times[:, :, None] - times[:, None])[:, None, ..., None]
    apart = gap > 0
    first, second = (m[..., None, :] for m in integral.unbind(2))
    found = []
    for to_first, to_second, tied in (
        (p11, p21, own.transpose(1, 2)[:, :, :, None]),
        (p12, p22, 0.0),
    ):
        gained = torch.where(is_later, first * to_first + second * to_second, 0.0).cumsum(2)
        total = torch.nn.functional.pad(gained, (0, 0, 0, 0, 1, 0))
        found.append(torch.where(apart, total / torch.where(apart, gap, 1.0), tied))
    return tuple(found)


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
