"""Hawkes processes of largest likelihood, and their simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Tensor
from osciformer.events.classical.hawkes import HawkesProcess
from osciformer.events.likelihood import Span, likelihood_terms
from osciformer.events.sequences import EventSequences

DecayShape = Literal["shared", "by_cause", "by_pair"]


@dataclass(frozen=True)
class HawkesFit:
    """A fitted Hawkes process, and how the fit went.

    Attributes:
        process: The process.
        log_likelihood: Nats per scored event of the data that it was fitted to.
        is_stationary: Whether its branching matrix has a spectral radius below 1.
        spectral_radius: That radius.
        gradient: Largest entry of the gradient at the end, in nats per event; 0 at an optimum.
        num_steps: Evaluations of the likelihood.
    """

    process: HawkesProcess
    log_likelihood: float
    is_stationary: bool
    spectral_radius: float
    gradient: float
    num_steps: int


def fit_hawkes(
    sequences: EventSequences,
    *,
    decay: DecayShape = "shared",
    span: Span = "events",
    max_steps: int = 200,
    batch_size: int = 64,
) -> HawkesFit:
    """Return the Hawkes process of largest likelihood, found by L-BFGS.

    Logarithms of all parameters are searched, from base rates that explain half of the events and
    kernels as long as a mean gap; the time unit does not matter. The likelihood is not concave in
    the decays, so the optimum is a local one.

    Args:
        sequences: Events, at least one of them scored.
        decay: `shared` by all kernels, one `by_cause`, or one `by_pair` of types.
        span: What is scored, as of `likelihood_terms`; with `events`, the first event of a sequence
            is given, and so is that nothing before it mattered.
        max_steps: Largest number of evaluations of the likelihood.
        batch_size: Sequences per batch.
    """
    check_choice("decay", decay, ("shared", "by_cause", "by_pair"))
    gaps = sequences.gaps
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    if mean_gap <= 0:
        raise ValueError("a Hawkes process needs a sequence with two events at different times")
    count = sequences.num_types
    shape = {"shared": (), "by_cause": (count,), "by_pair": (count, count)}[decay]
    counts = torch.bincount(torch.from_numpy(sequences.types), minlength=count).double() + 0.5
    share = counts / counts.sum()
    # Times in mean gaps: all parameters are then of order 1.
    log_base = (0.5 * share).log().requires_grad_()
    log_branching = (0.5 * share[:, None].expand(count, count)).log().clone().requires_grad_()
    log_decay = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    parameters = [log_base, log_branching, log_decay]
    batches = list(sequences.rescale(1 / mean_gap, "mean gap").batches(batch_size))
    num_scored = sum(int(likelihood_mask(batch.mask, span).sum()) for batch in batches)

    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=max_steps,
        max_eval=max_steps,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    evaluations = 0

    def loss() -> float:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            process = HawkesProcess(log_base.exp(), log_branching.exp(), log_decay.exp())
            part = -likelihood_terms(process, batch, span=span).per_sequence.sum() / num_scored
            part.backward()
            total += float(part.detach())
        return total

    optimizer.step(loss)
    final = loss()
    gradient = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    process = HawkesProcess(
        log_base.detach().exp() / mean_gap,
        log_branching.detach().exp(),
        log_decay.detach().exp() / mean_gap,
    )
    return HawkesFit(
        process=process,
        log_likelihood=-final - math.log(mean_gap),
        is_stationary=process.is_stationary,
        spectral_radius=process.spectral_radius,
        gradient=gradient,
        num_steps=evaluations,
    )


def likelihood_mask(mask: Tensor, span: Span) -> Tensor:
    """Return which events are scored: all, or all but the first."""
    return mask if span == "window" else mask[:, 1:]


def simulate_hawkes(
    process: HawkesProcess,
    *,
    num_sequences: int,
    horizon: float,
    generator: torch.Generator,
    max_events: int = 100_000,
    time_unit: str | None = None,
) -> EventSequences:
    """Return sequences drawn from a Hawkes process on (0, horizon], without a history.

    Thinning with the state carried along, so that a step costs the same however long the history
    is; `osciformer.events.sample` draws from any process and from any history.

    Args:
        process: The process.
        num_sequences: Number of sequences, drawn together.
        horizon: Where the windows end.
        generator: Source of randomness, on the CPU.
        max_events: Largest number of events of a sequence; more are an error.
        time_unit: Name of the unit of time.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon must be positive and finite; got {horizon}")
    base, decay = process.base, process.decay
    jump = process.branching * decay
    state = torch.zeros(num_sequences, len(decay), process.num_types, dtype=torch.float64)
    now = torch.zeros(num_sequences, dtype=torch.float64)
    live = torch.arange(num_sequences)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    counts = torch.zeros(num_sequences, dtype=torch.int64)
    while len(live):
        bound = (base + (jump * state).sum(dim=-1)).sum(dim=-1)  # it falls until the next event
        uniform = torch.rand(2, len(live), generator=generator, dtype=torch.float64)
        wait = -torch.log1p(-uniform[0]) / bound
        now = now + wait
        state = state * torch.exp(-decay * wait[:, None, None])
        rates = base + (jump * state).sum(dim=-1)  # [R, K]
        kind = torch.searchsorted(rates.cumsum(dim=-1), (uniform[1] * bound)[:, None])[:, 0]
        happens = (kind < process.num_types) & (now <= horizon)
        drawn.append((live[happens], now[happens], kind[happens]))
        counts[live[happens]] += 1
        state[happens, :, kind[happens]] += 1.0
        if bool((counts > max_events).any()):
            raise RuntimeError(
                f"a sequence has more than {max_events} events before {horizon:g}; the spectral "
                f"radius of the branching matrix is {process.spectral_radius:.3g}, and events "
                "multiply without end from 1 on"
            )
        stays = now <= horizon
        live, now, state = live[stays], now[stays], state[stays]
    owner, times, types = (torch.cat(part) for part in zip(*drawn, strict=True))
    # Stable: events were drawn in the order of time.
    order = torch.argsort(owner, stable=True)
    offsets = np.concatenate([[0], np.cumsum(counts.numpy())])
    return EventSequences(
        times[order].numpy(),
        types[order].numpy(),
        offsets,
        num_types=process.num_types,
        starts=np.zeros(num_sequences),
        ends=np.full(num_sequences, horizon),
        time_unit=time_unit,
    )
