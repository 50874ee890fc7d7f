"""Queries of a network cost what they are, not what the padding around them is."""

from __future__ import annotations

import torch

from osciformer._types import Tensor
from osciformer.events import EventSequences, likelihood_terms
from osciformer.events.neural import EventModelConfig, NeuralEventProcess, make_event_model

from .event_cases import random_events

EVENTS = random_events([30, 2, 1], windows=False)


def make_model(head: str = "mixture") -> NeuralEventProcess:
    torch.manual_seed(0)
    config = EventModelConfig(num_types=2, head=head, dim=8, num_layers=1, num_heads=2)  # type: ignore[arg-type]
    return make_event_model(config).fit_times(EVENTS).double().eval()


class Counted(torch.nn.Module):
    """An encoder that remembers how many events, and gaps of each, it was asked for."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder, self.depths, self.widths = encoder, [0], [0]

    def prepare(self, batch: object) -> object:
        return self.encoder.prepare(batch)

    def pick(self, prepared: object, events: Tensor) -> object:
        return self.encoder.pick(prepared, events)

    def states(self, prepared: object, gaps: Tensor | None) -> object:
        if gaps is not None:
            self.depths.append(gaps.shape[2])
            self.widths.append(gaps.shape[1])
        return self.encoder.states(prepared, gaps)


def test_padding_asks_for_nothing() -> None:
    model = make_model()
    model.encoder = counted = Counted(model.encoder)  # type: ignore[assignment]
    with torch.no_grad():
        likelihood_terms(model, EVENTS.batch())
    assert max(counted.depths) == 2  # the next event of a gap, and the edge of the last one


def test_queries_at_one_time_are_asked_once_and_answered_alike() -> None:
    model, batch = make_model("softplus"), EVENTS.batch()
    times = batch.times[:, :1] + torch.tensor([0.7, -1.0, 0.7, 3.0, -2.0, 0.7])
    with torch.no_grad():
        together = model.intensity(batch, times)
        alone = torch.cat([model.intensity(batch, times[:, [k]]) for k in range(6)], dim=1)
        counted = Counted(model.encoder)
        model.encoder = counted  # type: ignore[assignment]
        model.intensity(batch, times[:, [0, 2, 5]])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert max(counted.depths) == 1


def test_no_queries_give_no_answers() -> None:
    events = EventSequences.from_arrays([[0.0, 1.0]], num_types=2)
    assert make_model().intensity(events.batch(), torch.empty(1, 0)).shape == (1, 0, 2)


def test_after_the_last_event_no_other_is_read() -> None:
    model, batch = make_model("softplus"), EVENTS.batch()
    late = batch.last_times[:, None] + torch.tensor([0.3, 5.0, 1.0], dtype=torch.float64)
    gaps = late - batch.last_times[:, None]
    with torch.no_grad():
        whole = model.intensity_after(batch, gaps[:, None].expand(-1, batch.mask.shape[1], -1))
        rows = torch.arange(len(batch))
        model.encoder = counted = Counted(model.encoder)  # type: ignore[assignment]
        found = model.intensity(batch, late)
    assert max(counted.widths) == 1
    torch.testing.assert_close(found, whole[rows, batch.lengths - 1], rtol=1e-10, atol=1e-12)
