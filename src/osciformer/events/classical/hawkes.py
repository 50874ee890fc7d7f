"""Hawkes processes with exponential kernels: events make others likelier for a while."""

from __future__ import annotations

from typing import Any

import torch

from osciformer._types import Float, Int, Tensor
from osciformer.events.batch import EventBatch
from osciformer.events.classical.poisson import check_rates
from osciformer.events.process import EventProcess


class HawkesProcess(EventProcess):
    r"""Events at base rates, and each event of type j raises the rate of type k for a while.

    $$\lambda_k(t) = \mu_k + \sum_{t_i < t} \alpha_{k j_i} \beta_{k j_i} e^{-\beta_{k j_i}(t-t_i)}$$
    `branching[k, j]`, $\alpha_{kj}$, is the number of events of type k that an event of type j
    causes directly, on average. The process is stationary if the spectral radius of that matrix is
    below 1.

    Intensities cost O(N log N) for each kernel: sums over past events are a linear recurrence,
    evaluated by doubling. Differences of times are all that enters, and all factors are at most 1.

    Args:
        base: Base rates $\mu$ [K], not negative.
        branching: $\alpha$ [K, K], caused type first, causing type second; not negative.
        decay: $\beta$, positive: a number, one for each causing type [K], or [K, K]. The first two
            need K times less memory than the last.

    Example:
        >>> from osciformer.events import EventSequences
        >>> process = HawkesProcess([0.5], [[0.8]], 2.0)
        >>> batch = EventSequences.from_arrays([[0.0]]).batch()
        >>> process.intensity(batch, torch.tensor([[0.0, 1e-9]], dtype=torch.float64)).squeeze()
        tensor([0.5000, 2.1000], dtype=torch.float64)
    """

    def __init__(self, base: Any, branching: Any, decay: Any) -> None:
        self.base = torch.as_tensor(base, dtype=torch.float64)
        self.branching = torch.as_tensor(branching, dtype=torch.float64)
        decay = torch.as_tensor(decay, dtype=torch.float64)
        check_rates("base", self.base.detach())
        self.num_types = count = len(self.base)
        if self.branching.shape != (count, count):
            raise ValueError(
                f"branching must be [{count}, {count}]; got {list(self.branching.shape)}"
            )
        check_rates("branching", self.branching.detach().flatten())
        if decay.shape not in ((), (count,), (1, count), (count, count)):
            raise ValueError(
                f"decay must be a number, [{count}] or [{count}, {count}]; got {list(decay.shape)}"
            )
        # [1 or K, K]: kernels that all caused types share need one state only.
        self.decay = decay if decay.dim() == 2 else decay.expand(1, count)
        if not bool((torch.isfinite(self.decay) & (self.decay > 0)).all()):
            raise ValueError(f"decay must be positive and finite; got {decay.tolist()}")

    @property
    def spectral_radius(self) -> float:
        """Largest modulus of the eigenvalues of the branching matrix."""
        return float(torch.linalg.eigvals(self.branching.detach()).abs().max())

    @property
    def is_stationary(self) -> bool:
        """Whether the number of events per unit of time stays bounded."""
        return self.spectral_radius < 1

    @property
    def stationary_rates(self) -> Float[Tensor, "K"]:
        """Mean events of each type per unit of time in the long run."""
        if not self.is_stationary:
            raise ValueError(
                f"there is no stationary rate: the branching matrix has the spectral radius "
                f"{self.spectral_radius:.3g}, which must be below 1"
            )
        eye = torch.eye(self.num_types, dtype=torch.float64)
        return torch.linalg.solve(eye - self.branching.detach(), self.base.detach())

    def intensity(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return the intensities at any times, from the events strictly before."""
        return self._rates(self._state_at(batch, query_times, strictly=True))

    def intensity_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G K"]:
        """Return the intensities that follow each event if no other one comes."""
        after = self._states(batch)[:, :, None]  # [B, N, 1, 1 or K, K]
        fade = torch.exp(-self.decay.to(gaps.device) * gaps[..., None, None])
        return self._rates(after * fade)

    def total_compensator_after(
        self, batch: EventBatch, gaps: Float[Tensor, "B N G"]
    ) -> Float[Tensor, "B N G"]:
        """Return the base rates times the gaps, and of all causes what has faded since."""
        after = self._states(batch)[:, :, None]
        faded = after * -torch.expm1(-self.decay.to(gaps.device) * gaps[..., None, None])
        caused = _sum_causes(self.branching.to(gaps.device), faded).sum(dim=-1)
        return self.base.sum().to(gaps.device) * gaps + caused

    def compensator(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        r"""Return the exact integrals over (start, end], events within them included.

        $$\int_s^e \lambda_k = \mu_k (e - s) + \sum_j \alpha_{kj} \Big[ S_{kj}(s^+)
        (1 - e^{-\beta_{kj} (e-s)}) + \sum_{s < t_i < e,\, j_i = j} (1 - e^{-\beta_{kj} (e-t_i)})
        \Big]$$
        in which S sums the faded past events. The last sum is the number of events inside, plus
        S(s+) faded until e, less S(e-); without events inside it is exactly 0.
        """
        width = (end - start)[..., None, None]
        decay, base = self.decay.to(start.device), self.base.to(start.device)
        after = self._state_at(batch, start, strictly=False)
        inside = self._events_inside(batch, start, end)
        inner = torch.where(
            inside.sum(dim=-1)[..., None, None] > 0,
            inside[..., None, :]
            + after * torch.exp(-decay * width)
            - self._state_at(batch, end, strictly=True),
            torch.zeros_like(after),
        )
        total = after * -torch.expm1(-decay * width) + inner
        return base * width[..., 0] + _sum_causes(self.branching.to(start.device), total)

    def upper_bound(
        self, batch: EventBatch, start: Float[Tensor, "B"], end: Float[Tensor, "B"]
    ) -> Float[Tensor, "B"]:
        """Return the total intensity just after the start, from which it only falls."""
        state = self._state_at(batch, start[:, None], strictly=False)
        # A hair more, since the sum is rounded in another order than that of a candidate.
        return self._rates(state).sum(dim=-1)[:, 0] * (1 + 1e-12)

    def _rates(self, state: Float[Tensor, "*S R K"]) -> Float[Tensor, "*S K"]:
        jump = (self.branching * self.decay).to(state.device)
        return self.base.to(state.device) + _sum_causes(jump, state)

    def _states(self, batch: EventBatch) -> Float[Tensor, "B N R K"]:
        """Return sums of faded past events just after each event, itself included."""
        times = batch.times.masked_fill(~batch.mask, 0.0)
        gaps = torch.diff(times, dim=1, prepend=times[:, :1]).clamp(min=0.0)
        present = batch.mask[..., None] & (
            batch.clean_types[..., None] == torch.arange(self.num_types, device=times.device)
        )
        jumps = present.double()[:, :, None].expand(-1, -1, len(self.decay), -1)
        fade = torch.exp(-self.decay.to(times.device) * gaps[..., None, None])
        return scan_decay(fade, jumps)

    def _state_at(
        self, batch: EventBatch, query_times: Float[Tensor, "B M"], *, strictly: bool
    ) -> Float[Tensor, "B M R K"]:
        """Return sums of faded events before any times, or also of those at that time."""
        known = batch.count_before(query_times) if strictly else batch.count_until(query_times)
        last = (known - 1).clamp(min=0)  # [B, M]
        states = self._states(batch)
        picked = states.gather(1, last[..., None, None].expand(-1, -1, *states.shape[2:]))
        none = (known == 0)[..., None, None]
        since = query_times - batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        fade = torch.exp(-self.decay.to(since.device) * since.clamp(min=0.0)[..., None, None])
        return torch.where(none, torch.zeros_like(picked), picked * fade)

    def _events_inside(
        self, batch: EventBatch, start: Float[Tensor, "B M"], end: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Return how many events of each type lie in (start, end)."""
        count = torch.nn.functional.one_hot(batch.clean_types, self.num_types)
        count = (count * batch.mask[..., None]).cumsum(dim=1)
        count = torch.nn.functional.pad(count, (0, 0, 1, 0))  # [B, N + 1, K]

        def of_first(known: Int[Tensor, "B M"]) -> Int[Tensor, "B M K"]:
            return count.gather(1, known[..., None].expand(-1, -1, self.num_types))

        inside = of_first(batch.count_before(end)) - of_first(batch.count_until(start))
        return inside.clamp(min=0).double()  # negative for an empty interval at an event


def _sum_causes(
    weight: Float[Tensor, "K K"], state: Float[Tensor, "*S R K"]
) -> Float[Tensor, "*S K"]:
    """Return the sums over causing types, without a table of all pairs where kernels are shared."""
    if state.shape[-2] == 1:
        return state.squeeze(-2) @ weight.T
    return (weight * state).sum(dim=-1)


def scan_decay(
    fade: Float[Tensor, "B N *S"], jumps: Float[Tensor, "B N *S"]
) -> Float[Tensor, "B N *S"]:
    r"""Return $s_i = f_i s_{i-1} + j_i$ along the second axis, with $s_0 = j_0$, by doubling.

    Each entry is made of entries before it alone, in an order that does not depend on what follows:
    a later event changes no bit of an earlier state.

    Args:
        fade: Factors f.
        jumps: Terms j.

    Example:
        >>> ones = torch.ones(1, 4)
        >>> scan_decay(0.5 * ones, ones)
        tensor([[1.0000, 1.5000, 1.7500, 1.8750]])
    """
    width, reach = jumps.shape[1], 1
    while reach < width:
        carried = jumps[:, reach:] + fade[:, reach:] * jumps[:, :-reach]
        jumps = torch.cat([jumps[:, :reach], carried], dim=1)
        fade = torch.cat([fade[:, :reach], fade[:, reach:] * fade[:, :-reach]], dim=1)
        reach *= 2
    return jumps
