"""Several processes as one: each gap is drawn from one of them, and nobody says from which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from osciformer._types import Float, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.likelihood import check_num_types, likelihood_terms
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

# Steps of the algorithm of expectation and maximisation, and the change that ends it.
_MOST_STEPS, _SMALLEST_CHANGE = 10_000, 1e-9


class BlendedProcess(EventProcess):
    r"""A process whose next event has, given the past, a mixture of the densities of its members.

    With the weights $w_m$, the intensities $\lambda^m$ and their integrals $\Lambda^m$ since the
    last event,
    $$p_k(t) = \sum_m w_m \lambda^m_k(t) e^{-\Lambda^m(t)}, \qquad \lambda_k(t) =
    \sum_m r_m(t) \lambda^m_k(t), \qquad r_m(t) \propto w_m e^{-\Lambda^m(t)}:$$
    the longer nothing happens, the more it is those members that expected so which are believed.
    After each event all begin again with their weights. Integrals are exact, since those of the
    members must be. Before the first event of a row without a window, r are the weights.

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
        """Their weights, of the sum 1."""
        return self._weights

    @property
    def device(self) -> torch.device | str:  # type: ignore[override]
        """Where the members compute; those that do so anywhere follow the others."""
        found = {torch.device(member.device) for member in self.members}
        return max(found, key=lambda device: device.type != "cpu")

    @property
    def gap_breaks(self) -> Float[Tensor, "P"] | None:  # type: ignore[override]
        """All times since the last event at which the intensity of a member jumps."""
        breaks = [m.gap_breaks.cpu() for m in self.members if m.gap_breaks is not None]
        return torch.cat(breaks).unique() if breaks else None

    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the intensities of the members by what is left of their weights."""
        query_times = query_times.double()
        known = batch.count_before(query_times)
        since = torch.minimum(_edges(batch, known, query_times), query_times)
        shares = self._log_left(
            [_integral(m.total_compensator(batch, since, query_times)) for m in self.members]
        ).softmax(dim=0)
        rates = torch.stack([m.intensity(batch, query_times).double() for m in self.members])
        return (shares[..., None] * rates).sum(dim=0)

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the same at gaps after each event, if no other one came."""
        shares = self._log_left(self._integrals_after(batch, gaps)).softmax(dim=0)
        rates = torch.stack([m.intensity_after(batch, gaps).double() for m in self.members])
        return (shares[..., None] * rates).sum(dim=0)

    def total_compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M"] | None:
        """Return the exact integral of the total intensity; None if an interval has events in it.

        It is minus the logarithm of the probability that nothing happens until the end, less that
        until the start.
        """
        known = batch.count_until(start)
        if bool((batch.count_before(end) > known).any()):
            return None
        last = torch.minimum(_edges(batch, known, start), start)
        left = [
            self._log_left(
                [_integral(m.total_compensator(batch, last, edge)) for m in self.members]
            ).logsumexp(dim=0)
            for edge in (start.double(), torch.maximum(start, end).double())
        ]
        return (left[0] - left[1]).clamp(min=0.0)

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"]:
        """Return the integral of the total intensity from each event to some gaps after it."""
        left = self._log_left(self._integrals_after(batch, gaps)).logsumexp(dim=0)
        return (-left).clamp(min=0.0)

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"] | None:
        """Return the largest bound of the members, None if one has none."""
        bounds = [member.upper_bound(batch, start, end) for member in self.members]
        known = [bound.double() for bound in bounds if bound is not None]
        if len(known) < len(bounds):
            return None
        # A hair more, since shares of a sum of 1 are rounded.
        return torch.stack(known).amax(dim=0) * (1 + 1e-12)

    @contextmanager
    def remember(self, batch: EventBatch) -> Iterator[None]:
        """Let each member encode the batch once."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.remember(batch))
            yield

    def _integrals_after(self, batch: EventBatch, gaps: Tensor) -> list[Tensor]:
        return [_integral(m.total_compensator_after(batch, gaps)) for m in self.members]

    def _log_left(self, integrals: Sequence[Tensor]) -> Float[Tensor, "M *S"]:
        """Return the logarithms of the weights times the probability of nothing so far."""
        integral = torch.stack([item.double() for item in integrals])
        shape = (-1, *[1] * (integral.dim() - 1))
        return self.weights.to(integral.device).log().reshape(shape) - integral


@torch.no_grad()
def log_densities(
    process: EventProcess, sequences: EventSequences, *, batch_size: int = 64
) -> Float[Tensor, "E"]:
    """Return the log-density of each event 2 to N given those before it, in nats.

    Args:
        process: The process.
        sequences: The sequences, of which all events are in one row.
        batch_size: Sequences per batch.
    """
    check_num_types(process, sequences)
    found = []
    for batch in sequences.batches(batch_size):
        terms = likelihood_terms(process, batch.to(process.device))
        found.append((terms.log_intensity - terms.compensator)[terms.scored].cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def fit_weights(densities: Float[Tensor, "M E"], *, prior: float = 1.0) -> Float[Tensor, "M"]:
    r"""Return the weights of a mixture with the largest likelihood of some events.

    By expectation and maximisation, which finds the only maximum there is: the log-likelihood is
    concave in the weights.

    Args:
        densities: Log-densities of events under each member, of events that were not used to train
            the members.
        prior: Events that each member is taken to have made besides, so that few events do not
            silence a member.

    Example:
        >>> fit_weights(torch.tensor([[0.0, 0.0, 0.0], [-9.0, -9.0, -9.0]]))
        tensor([0.8000, 0.2000], dtype=torch.float64)
    """
    if densities.dim() != 2 or not densities.numel():
        raise ValueError(
            f"weights need events that were not trained on; got densities of the shape "
            f"{list(densities.shape)}, members by events"
        )
    densities = densities.double()
    if not prior > 0:
        raise ValueError(f"prior must be positive; got {prior}")
    impossible = (densities.amax(dim=0) == -torch.inf).nonzero()
    if len(impossible):
        raise ValueError(f"event {int(impossible[0])} is impossible under all members")
    weights = densities.new_full((len(densities),), 1.0 / len(densities))
    for _ in range(_MOST_STEPS):
        shares = (weights.log()[:, None] + densities).softmax(dim=0)
        new = shares.sum(dim=1) + prior
        new /= new.sum()
        change = float((new - weights).abs().max())
        weights = new
        if change < _SMALLEST_CHANGE:
            break
    return weights


def check_members(members: Sequence[EventProcess], weights: Float[Tensor, "M"]) -> None:
    """Refuse members of different types, and weights that are none."""
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


def _integral(found: Tensor | None) -> Tensor:
    if found is None:
        raise ValueError(
            "a blend needs members whose integrals have a closed form: classical processes, and "
            "networks with the head 'mixture' or 'exponential'"
        )
    return found


def _edges(batch: EventBatch, known: Tensor, otherwise: Tensor) -> Float[Tensor, "B M"]:
    """Return the last known event of each query, or the start of the window, or the query."""
    times = batch.times.masked_fill(~batch.mask, 0.0).double()
    last = times.gather(1, (known - 1).clamp(min=0))
    start = otherwise.double() if batch.starts is None else batch.starts[:, None].double()
    return torch.where(known > 0, last, start.expand_as(last))
