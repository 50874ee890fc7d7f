"""The response operator: oscillators driven by a series; one signature, several backends."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import pad

from osciformer._types import Bool, Float, Tensor, Times, Values
from osciformer.ops import _checks
from osciformer.ops._checks import can_look, check_float, check_shape
from osciformer.ops.attention.ties import take_rows
from osciformer.ops.attention.triton import missing
from osciformer.ops.padding import clean_times
from osciformer.ops.response.operators import respond
from osciformer.ops.response.path import fill, read_times
from osciformer.ops.response.settings import DriveMode, DrivenBy, check_bank, resolve_push
from osciformer.ops.response.step import Push, Response, advance, run_rows

ResponseBackend = Literal["auto", "reference", "chunked", "triton"]


def oscillator_response(
    values: Values,
    times: Times,
    omega: Float[Tensor, "*#F K"],
    zeta: Float[Tensor, "*#F K"],
    *,
    drive: DriveMode = "linear",
    of: DrivenBy = "value",
    mask: Bool[Tensor, "B N"] | None = None,
    initial: Literal["steady", "rest"] | Response = "steady",
    query_times: Float[Tensor, "B M"] | None = None,
    backend: ResponseBackend = "auto",
) -> Response:
    r"""Return how damped oscillators respond to irregular series that drive them.

    Variable f of a series drives a bank of K oscillators,

    $$\ddot x + 2\zeta\omega\dot x + \omega^2 x = \omega^2 u_f(t),$$

    so that x follows slow drives, rings at $\omega$ and forgets fast ones. The response to the
    path through the observations is exact, whatever the gaps and the damping. A missing value does
    not interrupt a variable: its path goes on between its own neighbours. Before its first
    observation a variable counts as that observation, after its last one as that; one that a series
    never has is 0. Of rows at equal times the drive takes the values in turn, in no time.

    Work is O(N) for N rows and so is memory, also of gradients, which go to every argument.

    **Rates.** `of="rate"` drives by $\omega\dot u$ in place of $\omega^2 u$. Then x is
    $\dot x/\omega$ of the response to values, from a constant past. A jump of the drive (``hold``,
    equal times) is a kick of the velocity by $\omega$ times the jump.

    Args:
        values: Values; NaN is a missing one.
        times: Their times, not decreasing among the present rows of a series.
        omega: Natural frequencies above 0, radians per unit of time: one bank for all variables
            `[K]`, or `[F, K]`.
        zeta: Damping ratios of the same shape or broadcast with it; 1 is critical, 0 undamped,
            $1/(2\zeta)$ the quality factor Q.
        drive: ``linear`` (straight between observations), ``hold`` (the last one) or ``impulse``:
            an observation u kicks the velocity by $\omega u$, and the oscillator swings freely in
            between. Undamped, $x^2 + (\dot x/\omega)^2$ is then the periodogram at $\omega$.
        of: ``value`` or ``rate``, what of the path drives; impulses have no rate.
        mask: Which rows are present; None is all. Absent rows may hold anything, NaN included.
        initial: State at the first present row, before that acts: ``steady``, that of a constant
            past (rest for impulses and rates), ``rest``, or positions and velocities `[B, F, K]`.
        query_times: Where to read the states, in any order; None is at all rows. Before the first
            row that is the initial state, after the last one the drive is held, and at a row it is
            what the row leaves behind.
        backend: ``chunked`` (a scan over chunks), ``triton`` (kernels for CUDA), ``reference`` (one
            row after the other) or ``auto``: ``triton`` for single
            precision on CUDA, where it can run, else ``chunked``.

    Returns:
        Positions and velocities `[B, N, F, K]`, or `[B, M, F, K]` at query times, of the dtype of
        the values. Absent rows repeat the last present one. Inside all is float64.

    Example:
        >>> times = torch.linspace(0.0, 50.0, 400).unsqueeze(0)
        >>> found = oscillator_response(
        ...     torch.sin(times).unsqueeze(-1), times, torch.tensor([0.1, 1.0]), torch.tensor(0.1)
        ... )
        >>> found.position.abs().amax(1).round(decimals=1)  # resonance: Q times the drive
        tensor([[[0.1000, 5.0000]]])
    """
    push = resolve_push(drive, of)
    _checks.check_choice("backend", backend, ("auto", "reference", "chunked", "triton"))
    _check_tensors(values, times, mask, initial, query_times)
    omega, zeta = check_bank(omega, zeta, values.shape[-1])
    if isinstance(initial, tuple):
        shape = (values.shape[0], values.shape[-1], omega.shape[-1])
        for name, z in zip(Response._fields, initial, strict=True):
            check_float(f"initial.{name}", z)
            check_shape(f"initial.{name}", z, shape, "[B, F, K]")

    with_kernels = _runs_kernels(backend, values)
    times = clean_times(times.double(), mask)
    measured = ~values.isnan() if mask is None else ~values.isnan() & mask.unsqueeze(-1)
    if drive == "impulse":
        path = torch.where(measured, values, 0.0)
    else:
        path = fill(values, times, measured, is_straight=drive == "linear")
    start = _initial_state(initial, path, omega, push)
    if of == "rate" and drive == "hold":
        path = pad(path.diff(dim=1), (0, 0, 1, 0))
    # Where there is no row, its place is taken by one at which nothing happens.
    if times.shape[1] == 0:
        path, times = (
            path.new_zeros(path.shape[0], 1, path.shape[2]),
            times.new_zeros(path.shape[0], 1),
        )
    gaps = pad(times.diff(dim=1), (0, 1))
    if backend == "reference":
        found = run_rows(path, gaps, omega, zeta, start, push)
    else:
        found = respond(path, gaps, omega, zeta, start, push, with_kernels=with_kernels)
    if query_times is None:
        return Response(*(z[:, : values.shape[1]] for z in found))
    return _read(found, path, times, query_times.double(), omega, zeta, start, push)


def _runs_kernels(backend: str, values: Tensor) -> bool:
    """Return whether Triton's kernels are to run; refuse them where they cannot."""
    if backend == "triton" and (trouble := missing(values.device, instead="chunked")) is not None:
        raise RuntimeError(f"backend='triton' cannot run here: {trouble}")
    # On a GPU the kernels were seen to err by 3e-9, which is too much for double precision.
    is_apt = values.device.type == "cuda" and values.dtype != torch.float64
    return backend == "triton" or (backend == "auto" and is_apt and missing(values.device) is None)


def _initial_state(initial: str | Response, path: Tensor, omega: Tensor, push: Push) -> Response:
    if isinstance(initial, tuple):
        return Response(*(z.to(path.dtype) for z in initial))
    at_rest = path.new_zeros(path.shape[0], path.shape[-1], omega.shape[-1])
    if initial == "rest" or not push.has_level or path.shape[1] == 0:
        return Response(at_rest, at_rest)
    return Response(path[:, 0, :, None] + at_rest, at_rest)


def _read(
    rows: Response,
    path: Values,
    times: Times,
    query_times: Float[Tensor, "B M"],
    omega: Tensor,
    zeta: Tensor,
    start: Response,
    push: Push,
) -> Response:
    """Return the states at query times, each one step from the last row before it."""
    index, since, level, change = read_times(path.double(), times, query_times)
    last = Response(*(take_rows(z, index.clamp(min=0)).double() for z in rows))
    drive = (level.unsqueeze(-1), change.unsqueeze(-1))
    found = advance(last, *drive, since[..., None, None], omega, zeta, push)
    is_before = (index < 0)[..., None, None]
    pairs = zip(start, found, strict=True)
    return Response(*(torch.where(is_before, a[:, None], z.to(path.dtype)) for a, z in pairs))


def _check_tensors(
    values: Tensor,
    times: Tensor,
    mask: Tensor | None,
    initial: str | Response,
    query_times: Tensor | None,
) -> None:
    check_float("values", values)
    check_float("times", times)
    if values.ndim != 3:
        raise ValueError(f"values must have shape [B, N, F], got {list(values.shape)}")
    batch, rows = values.shape[:2]
    check_shape("times", times, (batch, rows), "[B, N]")
    if mask is not None:
        _checks.check_mask("mask", mask, (batch, rows))
    if not isinstance(initial, tuple):
        _checks.check_choice("initial", initial, ("steady", "rest"))
    _checks.check_times("times", times, mask)
    if can_look(values):
        present = values.isinf() if mask is None else values.isinf() & mask.unsqueeze(-1)
        if bool(present.any()):
            b, n, f = present.nonzero()[0].tolist()
            raise ValueError(
                f"values must be finite or NaN (missing); values[{b}, {n}, {f}] ="
                f" {values[b, n, f].item()}"
            )
    if query_times is not None:
        check_float("query_times", query_times)
        if query_times.ndim != 2 or query_times.shape[0] != batch:
            raise ValueError(
                f"query_times must have shape [B, M] with B = {batch} as in values, got"
                f" {list(query_times.shape)}"
            )
        if can_look(query_times) and not bool(query_times.isfinite().all()):
            b, m = (~query_times.isfinite()).nonzero()[0].tolist()
            got = query_times[b, m].item()
            raise ValueError(f"query_times must be finite; query_times[{b}, {m}] = {got}")
