"""Neural point processes: an encoder of histories and a head that makes intensities of states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from osciformer._types import Float, Int, Tensor
from osciformer.config import EventModelConfig
from osciformer.events.likelihood import LikelihoodTerms, kronrod_rule
from osciformer.events.neural.encoder import EventEncoder, gaps_of
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

    Everything goes through one question: what is the state some gap after event i, if no other
    event comes? The encoder answers it from the events 0 to i by their index, so an intensity at t
    is that of the last event strictly before t, and never sees an event at t. Before the first
    event of a sequence the intensities are constant, the mean rates of the training events.

    Call `fit_times` once with the training events, before the optimizer is built.

    Args:
        encoder: Reads histories.
        head: Turns states into intensities.
        config: What both are made from; `make_event_model` sets it.

    Example:
        >>> from osciformer.events import EventSequences
        >>> from osciformer.events.neural import EventModelConfig, make_event_model
        >>> events = EventSequences.from_arrays([[0.0, 1.0, 2.5], [0.5, 0.7]])
        >>> model = make_event_model(EventModelConfig(num_types=1, dim=8)).fit_times(events)
        >>> model.intensity(events.batch(), torch.tensor([[2.0, 3.0], [0.6, 9.0]])).shape
        torch.Size([2, 2, 1])
    """

    log_base: Tensor

    def __init__(self, encoder: EventEncoder, head: EventHead, config: EventModelConfig) -> None:
        super().__init__()
        self.encoder, self.head, self.config = encoder, head, config
        self.num_types = config.num_types
        self.register_buffer("log_base", torch.zeros(config.num_types))
        self._held: tuple[EventBatch, Any] | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the weights are."""
        return self.log_base.device

    @torch.no_grad()
    def fit_times(self, sequences: EventSequences) -> Self:
        """Set the unit of time, the time scales and the first intensities from training events."""
        self.encoder.fit_times(_some_of(sequences).batch().to(self.device))
        is_pair = torch.from_numpy(np.diff(np.repeat(np.arange(len(sequences)), sequences.lengths)))
        types, is_pair = torch.from_numpy(sequences.types), is_pair == 0
        gaps, before, after = (
            x.to(self.device)
            for x in (torch.from_numpy(sequences.gaps), types[:-1][is_pair], types[1:][is_pair])
        )
        pairs = EventPairs(gaps, before, after, self.num_types)
        self.head.fit(pairs)
        span = float(gaps.sum())
        if span > 0:
            self.log_base.copy_((pairs.shares * (len(gaps) / span)).log())
        return self

    def forward(self, batch: EventBatch) -> LikelihoodTerms:
        """Return the terms of the log-likelihood of events 2 to N.

        Where the head has no closed form the compensator is, in training, a mean over one random
        node in each of several strata of every gap (unbiased), otherwise the rule of Kronrod with
        15 nodes, whose difference from that with 7 is the stated error.
        """
        scored = torch.zeros_like(batch.mask)
        scored[:, 1:] = batch.mask[:, 1:]
        waits = nn.functional.pad(gaps_of(batch)[:, 1:], (0, 1))  # the gap behind each event
        share, weight, coarse = self._nodes(waits)
        known = self._known(batch)
        placed = _Placed(batch, batch.clean_times, known, (known - 1).clamp(min=0), known.shape[1])
        gaps = torch.cat((placed.gaps, waits[..., None] * share), dim=-1)
        states = self.encoder.states(
            self.encoder.prepare(batch), gaps if self.head.needs_now else None
        )
        log_rates = self.head.log_intensity(states, batch.clean_types, gaps).double()
        if self.head.is_closed:
            compensator = self.head.hazard_integral(states, waits[..., None])[..., 0].double()
            error = torch.zeros_like(compensator)
        else:
            total = log_rates[:, :, placed.depth :].exp().sum(dim=-1)
            compensator = waits * (total * weight).sum(dim=-1)
            error = (compensator - waits * (total * coarse).sum(dim=-1)).abs().detach()
        of_events = placed.back(log_rates[:, :, : placed.depth])
        # An event at the time of the first one has nothing before it.
        has_past = (batch.count_before(batch.clean_times) > 0)[..., None]
        of_events = torch.where(has_past, of_events, self.log_base.double())
        log_rate = of_events.gather(-1, batch.clean_types[..., None])[..., 0]
        behind, error = (nn.functional.pad(x[:, :-1], (1, 0)) for x in (compensator, error))
        log_intensity, compensator, error = (
            torch.where(scored, x, 0.0) for x in (log_rate, behind, error)
        )
        return LikelihoodTerms(
            log_intensity=log_intensity,
            compensator=compensator,
            scored=scored,
            tail=torch.zeros_like(compensator[:, 0]),
            error=error.sum(dim=1),
            num_events=batch.lengths,
        )

    @staticmethod
    def _known(batch: EventBatch) -> Int[Tensor, "B N"]:
        """Return how many events are known at each event; those not scored get own slots."""
        steps = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
        known = batch.count_before(batch.clean_times)
        known = torch.where(known > 0, known, batch.lengths[:, None])
        return torch.where(batch.mask, known, steps)

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
        return self._rates(self._prepared(batch), batch.clean_types, gaps.clamp(min=0.0))

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
        prepared, types = self._prepared(batch), batch.clean_types
        index, events = _events_asked(known, batch.mask.shape[1])
        # Often one event of each row is asked about, the last one: no others are read then.
        picked = None if events is None else self.encoder.pick(prepared, events)
        if events is not None and picked is not None:
            prepared, types = picked, types.gather(1, events)
        else:
            index = (known - 1).clamp(min=0)
        placed = _Placed(batch, query_times, known, index, types.shape[1])
        # Many times behind one event make many slots behind all of them: a few slots at a time.
        step = max(1, LARGEST_READ // types.numel())
        parts = [self._rates(prepared, types, part) for part in placed.gaps.split(step, dim=-1)]
        rates = placed.back(torch.cat(parts, dim=2))
        base = self.log_base.double().exp().to(rates)
        return torch.where((known > 0)[..., None], rates, base)

    def _rates(self, prepared: Any, types: Tensor, gaps: Tensor) -> Tensor:
        """Return the intensities some gaps after each event of an encoded batch."""
        states = self.encoder.states(prepared, gaps if self.head.needs_now else None)
        return self.head.log_intensity(states, types, gaps).double().exp()

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
        from_first = []
        edges = (start.double(), batch.count_until(start)), (end.double(), batch.count_before(end))
        for times, known in edges:
            placed = _Placed(batch, times, known, (known - 1).clamp(min=0), batch.mask.shape[1])
            inside = placed.back(self.head.hazard_integral(states, placed.gaps)[..., None])[..., 0]
            first = batch.first_times[:, None]
            so_far = before.gather(1, (known - 1).clamp(min=0)) + inside.double()
            from_first.append(torch.where(known > 0, so_far, base * (times - first)))
        # Within one gap the integrals over earlier ones cancel to the last bit only if left out.
        same = (edges[0][1] == edges[1][1]) & (edges[0][1] > 0)
        earlier = before.gather(1, (edges[0][1] - 1).clamp(min=0))
        found = torch.where(
            same,
            (from_first[1] - earlier) - (from_first[0] - earlier),
            from_first[1] - from_first[0],
        )
        # What lies before the first event must not know when that comes, not even by a bit.
        found = torch.where(edges[1][1] == 0, base * (edges[1][0] - edges[0][0]), found)
        return found.clamp(min=0.0)

    @contextmanager
    def remember(self, batch: EventBatch) -> Iterator[None]:
        """Encode a batch once for all questions within, which must not train the model."""
        held = self._held
        if held is None or held[0] is not batch:
            with torch.no_grad():
                self._held = (batch, self.encoder.prepare(batch))
        try:
            yield
        finally:
            self._held = held

    def _prepared(self, batch: EventBatch) -> Any:
        """Return the encoded batch, the remembered one if it is the same."""
        held = self._held
        is_held = held is not None and held[0] is batch and not torch.is_grad_enabled()
        return held[1] if held is not None and is_held else self.encoder.prepare(batch)


def make_event_model(config: EventModelConfig) -> NeuralEventProcess:
    """Return the untrained process of a configuration.

    Example:
        >>> model = make_event_model(EventModelConfig(num_types=4, dim=16))
        >>> model.num_types
        4
    """
    options = config.encoder_options or {}
    encoder: EventEncoder = build_backbone(
        config.encoder, "events", config, options, num_types=config.num_types, dim=config.dim
    )
    return NeuralEventProcess(encoder, make_head(config, encoder.dim), config)


def _some_of(sequences: EventSequences) -> EventSequences:
    """Return the sequences, or evenly spaced ones, so few that a padded batch is not too large."""
    longest = max(1, int(sequences.lengths.max(initial=0)))
    step = -(-len(sequences) * longest // LARGEST_BATCH)
    return sequences if step <= 1 else sequences[::step]


def _events_asked(known: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the place of each query's last event in a list of events, and that list.

    The list is None if it holds most of the N = `width` events; then the places are among all.
    """
    index = (known - 1).clamp(min=0)
    order = torch.argsort(index, dim=1, stable=True)
    ordered = index.gather(1, order)
    rank = torch.zeros_like(ordered)
    rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
    count = int(rank.max()) + 1 if rank.numel() else width
    if 2 * count > width:
        return index, None
    events = ordered.new_zeros(len(known), count).scatter(1, rank, ordered)
    return torch.empty_like(rank).scatter_(1, order, rank), events


class _Placed:
    """Times `[B, M]` sorted to the last event known at each, as `[B, N, G]`, and back.

    Of each time, `known` counts the events before it, and `index` is its place along N = `width`.
    """

    def __init__(
        self,
        batch: EventBatch,
        times: Float[Tensor, "B M"],
        known: Int[Tensor, "B M"],
        index: Int[Tensor, "B M"],
        width: int,
    ) -> None:
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
        last = (known - 1).clamp(min=0)
        of_events = batch.times.masked_fill(~batch.mask, 0.0).gather(1, last)
        elapsed = torch.where((known > 0) & times.isfinite(), times - of_events, 0.0).clamp(min=0.0)
        gaps = elapsed.new_zeros(len(times), width * depth).scatter(1, self.flat, elapsed)
        self.gaps: Float[Tensor, "B N G"] = gaps.unflatten(1, (width, depth))

    def back(self, x: Float[Tensor, "B N G K"]) -> Float[Tensor, "B M K"]:
        """Return what belongs to each of the times."""
        flat = x.flatten(1, 2)
        return flat.gather(1, self.flat[..., None].expand(-1, -1, x.shape[-1]))
