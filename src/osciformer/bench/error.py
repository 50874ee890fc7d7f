"""Parity first: the error of a backend against the quadrature of the definition."""

from __future__ import annotations

import torch

from osciformer._types import Tensor
from osciformer.bench.inputs import (
    SINUSOIDAL,
    TIMES,
    WIDE_CHANNELS,
    WIDE_HEADS,
    WIDE_MODES,
    attention,
    wide_inputs,
)
from osciformer.bench.report import Row, make_row
from osciformer.testing import relative_error

#: Largest error of outputs and gradients that is allowed, relative to the largest entry of each.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
# JSON has no infinity: stands for the error of a result that is not a number.
_HUGE = 1e300


def error_rows(
    query: str,
    *,
    backend: str,
    batch: int,
    lengths: tuple[int, ...],
    device: torch.device,
    values: tuple[str, ...] = ("average", "point"),
) -> list[Row]:
    """Return the largest error over the promised range, by dtype: of outputs, and of gradients too.

    For every length one random case is drawn. Times are learned and fixed, which takes different
    paths through the code. Inputs are rounded to float32 first, so that one evaluation of the
    oracle judges both dtypes.

    Args:
        query: Query mode.
        backend: Backend to judge.
        batch: B.
        lengths: N of each case; the place in the tuple is the seed.
        device: Where to compute.
        values: Value modes.

    Returns:
        Four rows: both dtypes, each for "fwd" (outputs) and "fwdbwd" (outputs and gradients).
    """
    worst = {(dtype, what): 0.0 for dtype in TOLERANCES for what in ("fwd", "fwdbwd")}
    for seed, length in enumerate(lengths):
        drawn = wide_inputs(query, batch=batch, length=length, seed=seed)
        x = {name: t.float().double().to(device) for name, t in drawn.items()}
        for value in values:
            want = _results(x, query=query, backend="oracle", value=value, of_times=True)
            for dtype in TOLERANCES:
                for of_times in (True, False):
                    rounded = {name: t.to(dtype) for name, t in x.items()}
                    got = _results(
                        rounded, query=query, backend=backend, value=value, of_times=of_times
                    )
                    errors = {name: relative_error(t, want[name]) for name, t in got.items()}
                    for what, found in (("fwd", errors["out"]), ("fwdbwd", max(errors.values()))):
                        worst[dtype, what] = max(worst[dtype, what], found)
    return [
        make_row(
            case="error",
            backend=backend,
            query=query,
            pass_=what,
            n=max(lengths),
            batch=batch,
            heads=WIDE_HEADS,
            c=WIDE_CHANNELS,
            j=WIDE_MODES if query in SINUSOIDAL else None,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            error=min(error, _HUGE),
        )
        for (dtype, what), error in worst.items()
    ]


def failures(rows: list[Row]) -> list[str]:
    """Return a line for every error above its tolerance."""
    lines = []
    for row in rows:
        tolerance = TOLERANCES[getattr(torch, row["dtype"])]
        if not row["error"] <= tolerance:
            of = "outputs" if row["pass"] == "fwd" else "outputs and gradients"
            lines.append(
                f"{row['backend']}, query {row['query']}, {row['dtype']}: the error of {of} is"
                f" {row['error']:.1e}, more than {tolerance:.0e}"
            )
    return lines


def _results(
    x: dict[str, Tensor], *, query: str, backend: str, value: str, of_times: bool
) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs along one random direction."""
    leaves = {
        name: t.detach().clone().requires_grad_(of_times or name not in TIMES)
        for name, t in x.items()
    }
    out = attention(leaves, query=query, backend=backend, value=value)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
    free = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(
        (out.double() * direction).sum(), list(free.values()), allow_unused=True
    )
    results = {"out": out.detach()}
    for (name, leaf), gradient in zip(free.items(), gradients, strict=True):
        results[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results
