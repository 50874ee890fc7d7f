"""A mixture of processes: each gap is drawn from one of them, and which one is not observed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from osciformer._types import Float, Tensor
from osciformer.events.likelihood import likelihood_terms
from osciformer.events.process import EventProcess, batches_for
from osciformer.events.sequences import EventBatch, EventSequences

# Largest number of steps of expectation-maximisation, and the change of weights that ends it.
_MOST_STEPS, _SMALLEST_CHANGE = 10_000, 1e-9
# An integral so large that its member is ruled out; finite, because differences must not be NaN.
_REFUTED = 1e300


class BlendedProcess(EventProcess):
    r"""A process whose next event has, given the past, a mixture of the densities of its members.

    With the weights $w_m$, the intensities $\lambda^m$ and their integrals $\Lambda^m$ since the
    last event,
    $$p_k(t) = \sum_m w_m \lambda^m_k(t) e^{-\Lambda^m(t)}, \qquad \lambda_k(t) =
    \sum_m r_m(t) \lambda^m_k(t), \qquad r_m(t) \propto w_m e^{-\Lambda^m(t)}:$$
    the longer nothing happens, the more weight goes to members that expected a long gap. At each
    event, and at the start of a window, all members return to their weights.

    Args:
        members: Processes of the same types, with integrals in closed form.
        weights: Their weights [M], not negative; they are divided by their sum.

    Example:
        >>> from osciformer.events import PoissonProcess
        >>> process = BlendedProcess([PoissonProcess([1.0]), PoissonProcess([3.0])], [0.5, 0.5])
        >>> batch = EventSequences.from_arrays([[0.0]]).batch()
        >>> process.intensity_after(batch, torch.tensor([[[0.0, 9.0]]])).flatten()
        tensor([2.0000, 1.0000], dtype=torch.float64)
    """

    def __init__(
        self, members: Sequence[EventProcess], weights: Sequence[float] | Float[Tensor, "M"]
    ) -> None:
        weights = torch.as_tensor(weights, dtype=torch.float64)
        check_members(members, weights)
        self._members, self._weights = tuple(members), weights / weights.sum()
        self.num_types = members[0].num_types

    @property
    def members(self) -> tuple[EventProcess, ...]:
        """The processes."""
        return self._members

    @property
    def weights(self) -> Float[Tensor, "M"]:
        """Their weights, which sum to 1."""
        return self._weights

    @property
    def device(self) -> torch.device | str:  # type: ignore[override]
        """The device of the members, where one that is not the CPU wins."""
        found = {torch.device(member.device) for member in self.members}
        return max(found, key=lambda device: device.type != "cpu")

    @property
    def gap_breaks(self) -> Float[Tensor, "P"] | None:  # type: ignore[override]
        """All times since the last event at which the intensity of a member jumps."""
        breaks = [m.gap_breaks.cpu() for m in self.members if m.gap_breaks is not None]
        return torch.cat(breaks).unique() if breaks else None

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Float[Tensor, "B M K"]:
        """Return the intensities of the members, averaged with r."""
        query_times = query_times.double()
        begin = _begins(batch, batch.count_before(query_times))
        # Before the beginning there is no history that could tell the members apart.
        integrals = self._integrals(batch, torch.minimum(begin, query_times), query_times)
        return self._average(integrals, [m.intensity(batch, query_times) for m in self.members])

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G K"]:
        """Return the same at gaps after each event, if no other event follows."""
        integrals = self._integrals_after(batch, gaps)
        return self._average(integrals, [m.intensity_after(batch, gaps) for m in self.members])

    def total_compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the exact integral [B, M] of the intensity; None if an interval has events."""
        # The log of the probability of nothing until the start, minus that until the end. Before
        # the beginning it is the weighted mean of the integrals of the members.
        start, end = start.double(), torch.maximum(start, end).double()
        known = batch.count_until(start)
        if bool((batch.count_before(end) > known).any()):
            return None
        begin = _begins(batch, known)
        cut = torch.minimum(torch.maximum(begin, start), end)
        begin = torch.minimum(begin, cut)
        lefts, rights = torch.cat([start, begin, begin], dim=1), torch.cat([cut, cut, end], dim=1)
        early, to_cut, to_end = self._integrals(batch, lefts, rights).chunk(3, dim=2)
        left, less = (self._log_left(item).logsumexp(dim=0) for item in (to_cut, to_end))
        return (self._weights_like(early) * early).sum(dim=0) + (left - less).clamp(min=0.0)

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "B N G"]:
        """Return the integral of the total intensity from each event to some gaps after it."""
        left = self._log_left(self._integrals_after(batch, gaps)).logsumexp(dim=0)
        return (-left).clamp(min=0.0)

    def upper_bound(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the largest bound [B] of the members, None if one has none."""
        bounds = [member.upper_bound(batch, start, end) for member in self.members]
        known = [bound.double() for bound in bounds if bound is not None]
        # Slightly more, since r is rounded.
        return torch.stack(known).amax(dim=0) * (1 + 1e-12) if len(known) == len(bounds) else None

    @contextmanager
    def remember(self, batch: EventBatch) -> Iterator[None]:
        """Let each member encode the batch once."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.remember(batch))
            yield

    def _integrals(self, batch: EventBatch, start: Tensor, end: Tensor) -> Float[Tensor, "P B M"]:
        """Return the integrals of the total intensities of the P members."""
        return _stack_exact([m.total_compensator(batch, start, end) for m in self.members])

    def _integrals_after(self, batch: EventBatch, gaps: Tensor) -> Float[Tensor, "P B N G"]:
        return _stack_exact([m.total_compensator_after(batch, gaps) for m in self.members])

    def _average(self, integrals: Float[Tensor, "P *S"], rates: list[Tensor]) -> Tensor:
        """Return the mean of rates [*S, K] with the weights r, defined if all are ruled out."""
        shares = self._log_left(integrals.clamp(max=_REFUTED)).softmax(dim=0)
        return (shares[..., None] * torch.stack([rate.double() for rate in rates])).sum(dim=0)

    def _weights_like(self, integrals: Float[Tensor, "P *S"]) -> Float[Tensor, "P *#S"]:
        return self.weights.to(integrals).reshape(-1, *[1] * (integrals.dim() - 1))

    def _log_left(self, integrals: Float[Tensor, "P *S"]) -> Float[Tensor, "P *S"]:
        """Return the logs of the weights times the probability that nothing has happened."""
        return self._weights_like(integrals).log() - integrals


@torch.no_grad()
def log_densities(
    process: EventProcess, sequences: EventSequences, *, batch_size: int = 64
) -> Float[Tensor, "E"]:
    """Return the log-density of each event 2 to N given those before it, in nats."""
    found = [torch.zeros(0, dtype=torch.float64)]
    for batch in batches_for(process, sequences, batch_size):
        terms = likelihood_terms(process, batch)
        found.append((terms.log_intensity - terms.compensator)[terms.scored].cpu())
    return torch.cat(found)


def fit_weights(densities: Float[Tensor, "M E"], *, prior: float = 1.0) -> Float[Tensor, "M"]:
    """Return the weights of a mixture with the largest likelihood of some events.

    Args:
        densities: Log-densities under each member, of events that the members were not trained on.
        prior: Events credited to each member beforehand, so that few events do not silence it.

    Example:
        >>> fit_weights(torch.tensor([[0.0, 0.0, 0.0], [-9.0, -9.0, -9.0]]))
        tensor([0.8000, 0.2000], dtype=torch.float64)
    """
    if densities.dim() != 2 or not densities.numel():
        shape = f"{list(densities.shape)}, members by events"
        raise ValueError(f"weights need events that were not trained on; got the shape {shape}")
    if not prior > 0:
        raise ValueError(f"prior must be positive; got {prior}")
    densities = densities.double()
    if bool(densities.isnan().any()):
        member, event = densities.isnan().nonzero()[0].tolist()
        raise ValueError(f"the density of event {event} under member {member} is NaN")
    impossible = (densities.amax(dim=0) == -torch.inf).nonzero()
    if len(impossible):
        raise ValueError(
            f"event {int(impossible[0])} is impossible under all members, so that no weights "
            "explain it; add a member that allows for any event, or leave the event out"
        )
    weights = densities.new_full((len(densities),), 1.0 / len(densities))
    for _ in range(_MOST_STEPS):
        before = weights
        weights = (weights.log()[:, None] + densities).softmax(dim=0).sum(dim=1) + prior
        weights = weights / weights.sum()
        if float((weights - before).abs().max()) < _SMALLEST_CHANGE:
            break
    return weights


def check_members(members: Sequence[EventProcess], weights: Float[Tensor, "M"]) -> None:
    """Refuse members of different types, and invalid weights."""
    if not members or weights.shape != (len(members),):
        raise ValueError(
            f"there must be a weight for each member, and at least one; got {len(members)} members "
            f"and weights of the shape {list(weights.shape)}"
        )
    if not bool((weights >= 0).all() and weights.isfinite().all() and weights.sum() > 0):
        raise ValueError(f"weights must not be negative, and some positive; got {weights.tolist()}")
    counts = [member.num_types for member in members]
    if len(set(counts)) > 1:
        raise ValueError(f"members must have the same types; they have {counts} of them")


def _stack_exact(found: Sequence[Tensor | None]) -> Float[Tensor, "P *S"]:
    known = [item.double() for item in found if item is not None]
    if len(known) < len(found):
        raise ValueError(
            "a blend needs members whose integrals have a closed form: classical processes, and "
            "networks with the head 'mixture' or 'exponential'"
        )
    return torch.stack(known)


def _begins(batch: EventBatch, known: Tensor) -> Float[Tensor, "B M"]:
    """Return the last known event of each query, or the start of the window, or infinity."""
    none = batch.times.new_full((len(batch),), torch.inf) if batch.starts is None else batch.starts
    return batch.time_of_last(known, none).double()
