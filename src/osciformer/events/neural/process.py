"""Neural point processes: an encoder of histories and a head that makes intensities of states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from osciformer._types import Float, Int, QueryTimes, Tensor
from osciformer.config import EventModelConfig
from osciformer.events.likelihood import LikelihoodTerms, kronrod_rule
from osciformer.events.neural.encoder import EventEncoder, EventStates, Gaps, gaps_of
from osciformer.events.neural.heads import EventHead, EventPairs, make_head
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventBatch, EventSequences
from osciformer.models.backbones import build_backbone

# Random nodes per gap in training, one in each of as many strata.
_TRAINING_NODES = 6
# Entries of the padded batch from which time scales are estimated.
LARGEST_BATCH = 4_000_000
# Reads that `intensity` makes at once.
LARGEST_READ = 50_000


class NeuralEventProcess(nn.Module, EventProcess):
    """A point process whose intensities are those of a network.

    The encoder gives the state some gap after event i if no other one comes, from the events 0 to i
    by their index. So an intensity at t comes from the last event strictly before t and never sees
    an event at t. Before the first event intensities are the mean rates of the training events.

    Call `fit_times` once with the training events, before the optimizer is built.

    Args:
        encoder: Reads histories.
        head: Turns states into intensities.
        config: What both are made from; `make_event_model` sets it.
    """

    log_base: Tensor

    def __init__(self, encoder: EventEncoder, head: EventHead, config: EventModelConfig) -> None:
        super().__init__()
        self.encoder, self.head, self.config = encoder, head, config
        self.num_types = config.num_types
        self.register_buffer("log_base", torch.zeros(config.num_types))
        self._held: tuple[EventBatch | None, Any] = (None, None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the weights are."""
        return self.log_base.device

    @torch.no_grad()
    def fit_times(self, sequences: EventSequences) -> Self:
        """Set the unit of time, the time scales and the first intensities from training events."""
        # If a padded batch of all were too large, evenly spaced sequences.
        longest = int(sequences.lengths.max(initial=1))
        step = max(1, -(-len(sequences) * longest // LARGEST_BATCH))
        self.encoder.fit_times(sequences[::step].batch().to(self.device))
        is_pair = np.diff(np.repeat(np.arange(len(sequences)), sequences.lengths)) == 0
        found = sequences.gaps, sequences.types[:-1][is_pair], sequences.types[1:][is_pair]
        gaps, before, after = (torch.from_numpy(x).to(self.device) for x in found)
        pairs = EventPairs(gaps, before, after, self.num_types)
        self.head.fit(pairs)
        span = float(gaps.sum())
        if span > 0:
            self.log_base.copy_((pairs.shares * (len(gaps) / span)).log())
        return self

    def forward(self, batch: EventBatch) -> LikelihoodTerms:
        """Return the terms of the log-likelihood of events 2 to N.

        Without a closed form the compensator is, in training, an unbiased mean over random nodes,
        otherwise the rule of Kronrod with 15 nodes; the error is its difference from that with 7.
        """
        scored = torch.zeros_like(batch.mask)
        scored[:, 1:] = batch.mask[:, 1:]
        waits = nn.functional.pad(gaps_of(batch)[:, 1:], (0, 1))  # the gap behind each event
        share, weight, coarse = self._nodes(waits)
        before = batch.count_before(batch.clean_times)
        # How many events are known at each event; those that are not scored get own slots.
        known = torch.where(before > 0, before, batch.lengths[:, None])
        steps = torch.arange(1, known.shape[1] + 1, device=known.device)
        placed = _Placed(batch, batch.clean_times, torch.where(batch.mask, known, steps))
        gaps = torch.cat((placed.gaps, waits[..., None] * share), dim=-1)
        states, log_rates = self._log_rates(self.encoder.prepare(batch), batch.clean_types, gaps)
        if self.head.is_closed:
            compensator = self.head.hazard_integral(states, waits[..., None])[..., 0].double()
            error = torch.zeros_like(compensator)
        else:
            total = log_rates[:, :, placed.depth :].exp().sum(dim=-1)
            compensator = waits * (total * weight).sum(dim=-1)
            error = (compensator - waits * (total * coarse).sum(dim=-1)).abs().detach()
        of_events = placed.back(log_rates[:, :, : placed.depth])
        # An event at the time of the first one has nothing before it.
        of_events = torch.where((before > 0)[..., None], of_events, self.log_base.double())
        log_rate = of_events.gather(-1, batch.clean_types[..., None])[..., 0]
        compensator, error = (nn.functional.pad(x[:, :-1], (1, 0)) for x in (compensator, error))
        terms = (torch.where(scored, x, 0.0) for x in (log_rate, compensator, error))
        log_rate, compensator, error = terms
        rest = torch.zeros_like(compensator[:, 0]), error.sum(dim=1), batch.lengths
        return LikelihoodTerms(log_rate, compensator, scored, *rest)

    def _nodes(self, waits: Float[Tensor, "B N"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes as parts of gaps [B, N, n], their weights and those of a rougher rule."""
        if self.head.is_closed:
            none = waits.new_zeros(*waits.shape, 0)
            return none, none, none
        if not self.training:
            nodes, fine, coarse = (item.to(waits) for item in kronrod_rule())
            return nodes.expand(*waits.shape, -1), fine, coarse
        strata = torch.arange(_TRAINING_NODES, device=waits.device)
        random = torch.rand(*waits.shape, _TRAINING_NODES, dtype=waits.dtype, device=waits.device)
        root = (strata + random) / _TRAINING_NODES
        # Squares lie closer together just after the event, where intensities change most.
        weight = 2.0 * root / _TRAINING_NODES
        return root.square(), weight, weight

    def intensity_after(self, batch: EventBatch, gaps: Tensor) -> Tensor:
        """Return the intensities that each event would be followed by if no other one came."""
        gaps = gaps.clamp(min=0.0)
        return self._log_rates(self._prepared(batch), batch.clean_types, gaps)[1].exp()

    def total_compensator_after(self, batch: EventBatch, gaps: Tensor) -> Tensor | None:
        """Return the exact integral of the total intensity since each event, where there is one."""
        if not self.head.is_closed:
            return None
        states = self.encoder.states(self._prepared(batch), None)
        return self.head.hazard_integral(states, gaps.clamp(min=0.0)).double()

    def intensity(self, batch: EventBatch, query_times: Tensor) -> Tensor:
        """Return the intensity of each type at any times, as left limits."""
        query_times = query_times.double()
        known = batch.count_before(query_times)
        prepared, types, index = self._prepared(batch), batch.clean_types, None
        # Often one event of each row is asked about, the last one: no others are read then.
        asked = _events_asked(known, batch.mask.shape[1])
        picked = None if asked is None else self.encoder.pick(prepared, asked[1])
        if asked is not None and picked is not None:
            prepared, index, types = picked, asked[0], types.gather(1, asked[1])
        placed = _Placed(batch, query_times, known, index, types.shape[1])
        # Many times behind one event make many slots behind all of them: a few slots at a time.
        step = max(1, LARGEST_READ // types.numel())
        gaps = placed.gaps.split(step, dim=-1)
        parts = [self._log_rates(prepared, types, part)[1] for part in gaps]
        rates = placed.back(torch.cat(parts, dim=2)).exp()
        base = self.log_base.double().exp().to(rates)
        return torch.where((known > 0)[..., None], rates, base)

    def _log_rates(
        self, prepared: Any, types: Tensor, gaps: Gaps
    ) -> tuple[EventStates, Float[Tensor, "B N G K"]]:
        """Return the states and log intensities some gaps after each event of an encoded batch."""
        states = self.encoder.states(prepared, gaps if self.head.needs_now else None)
        return states, self.head.log_intensity(states, types, gaps).double()

    def total_compensator(self, batch: EventBatch, start: Tensor, end: Tensor) -> Tensor | None:
        """Return the exact integral of the total intensity, where the head has one."""
        if not self.head.is_closed:
            return None
        waits = nn.functional.pad(gaps_of(batch)[:, 1:], (0, 1))
        states = self.encoder.states(self._prepared(batch), None)
        whole = self.head.hazard_integral(states, waits[..., None])[..., 0].double()
        whole = torch.where(batch.mask, whole, 0.0)
        # Integrals over the gaps behind all events before the last known one.
        before = nn.functional.pad(whole.cumsum(dim=1), (1, 0))[:, :-1]
        base = self.log_base.double().exp().sum()
        start, end = start.double(), end.double()
        num_start, num_end = batch.count_until(start), batch.count_before(end)
        from_first = []
        for times, known in ((start, num_start), (end, num_end)):
            placed = _Placed(batch, times, known)
            inside = placed.back(self.head.hazard_integral(states, placed.gaps)[..., None])[..., 0]
            so_far = before.gather(1, (known - 1).clamp(min=0)) + inside.double()
            until_first = base * (times - batch.first_times[:, None])
            from_first.append(torch.where(known > 0, so_far, until_first))
        # Within one gap the integrals over earlier ones cancel to the last bit only if left out.
        same = (num_start == num_end) & (num_start > 0)
        earlier = torch.where(same, before.gather(1, (num_start - 1).clamp(min=0)), 0.0)
        found = (from_first[1] - earlier) - (from_first[0] - earlier)
        # What lies before the first event must not know when that comes, not even by a bit.
        return torch.where(num_end == 0, base * (end - start), found).clamp(min=0.0)

    @contextmanager
    def remember(self, batch: EventBatch) -> Iterator[None]:
        """Encode a batch once for all questions within, which must not train the model."""
        held = self._held
        if held[0] is not batch:
            with torch.no_grad():
                self._held = (batch, self.encoder.prepare(batch))
        try:
            yield
        finally:
            self._held = held

    def _prepared(self, batch: EventBatch) -> Any:
        is_held = self._held[0] is batch and not torch.is_grad_enabled()
        return self._held[1] if is_held else self.encoder.prepare(batch)


def make_event_model(config: EventModelConfig) -> NeuralEventProcess:
    """Return the untrained process of a configuration.

    Example:
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 2.5], [0.5, 0.7]])
        >>> model = make_event_model(EventModelConfig(num_types=1, dim=8)).fit_times(events)
        >>> model.intensity(events.batch(), torch.tensor([[2.0, 3.0], [0.6, 9.0]])).shape
        torch.Size([2, 2, 1])
    """
    options = config.encoder_options or {}
    sizes = {"num_types": config.num_types, "dim": config.dim}
    encoder: EventEncoder = build_backbone(config.encoder, "events", config, options, **sizes)
    return NeuralEventProcess(encoder, make_head(config, encoder.dim), config)


def _events_asked(known: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    """Return each query's last event in a list of events, and that list; None if it is long."""
    index = (known - 1).clamp(min=0)
    order = torch.argsort(index, dim=1, stable=True)
    ordered = index.gather(1, order)
    rank = torch.zeros_like(ordered)
    rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
    count = int(rank.max()) + 1 if rank.numel() else width
    if 2 * count > width:
        return None
    events = ordered.new_zeros(len(known), count).scatter(1, rank, ordered)
    return torch.empty_like(rank).scatter_(1, order, rank), events


class _Placed:
    """Times `[B, M]` sorted to the last event known at each, as `[B, N, G]`, and back.

    Of each time, `known` counts the events before it, and `index` is the place of the last one of
    them along N = `width`; None if N are all events.
    """

    def __init__(
        self,
        batch: EventBatch,
        times: QueryTimes,
        known: Int[Tensor, "B M"],
        index: Int[Tensor, "B M"] | None = None,
        width: int | None = None,
    ) -> None:
        last = (known - 1).clamp(min=0)
        index = last if index is None else index
        width = batch.mask.shape[1] if width is None else width
        # Queries at one time share a slot: padding, and all that lies before the first event.
        alike = torch.where(known > 0, times, -torch.inf)
        by_time = torch.argsort(alike, dim=1, stable=True)
        order = by_time.gather(1, torch.argsort(index.gather(1, by_time), dim=1, stable=True))
        ordered, moments = index.gather(1, order), alike.gather(1, order)
        is_next = torch.ones_like(ordered, dtype=torch.bool)
        is_next[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        is_new = is_next.clone()
        is_new[:, 1:] |= moments[:, 1:] != moments[:, :-1]
        count = is_new.cumsum(dim=1)
        rank = count - torch.where(is_next, count, 0).cummax(dim=1).values
        slot = torch.empty_like(rank).scatter_(1, order, rank)
        depth = int(rank.max()) + 1 if rank.numel() else 1
        self.flat, self.depth = index * depth + slot, depth
        of_events = batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        elapsed = torch.where((known > 0) & times.isfinite(), times - of_events, 0.0).clamp(min=0.0)
        gaps = elapsed.new_zeros(len(times), width * depth).scatter(1, self.flat, elapsed)
        self.gaps: Gaps = gaps.unflatten(1, (width, depth))

    def back(self, x: Float[Tensor, "B N G K"]) -> Float[Tensor, "B M K"]:
        """Return what belongs to each of the times."""
        return x.flatten(1, 2).take_along_dim(self.flat[..., None], dim=1)
