"""Neural point processes on a GPU say what they say on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from osciformer.baselines import BASELINE_MODELS
from osciformer.events import (
    EventSequences,
    HawkesProcess,
    RenewalProcess,
    likelihood_terms,
    predict_next,
)
from osciformer.events.neural import BlendedEventProcess, EventModelConfig, make_event_model

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
EVENTS = EventSequences.from_arrays(
    [np.cumsum(RNG.exponential(size=n)) for n in (40, 17, 1)],
    [RNG.integers(0, 3, size=n) for n in (40, 17, 1)],
    num_types=3,
)
CONFIGS = {
    **{f"osciformer_{head}": {"head": head} for head in ("mixture", "softplus", "decay")},
    **BASELINE_MODELS,
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_likelihood_gradients_and_intensities_are_those_of_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    settings = {**CONFIGS[name], "dim": 16, "num_heads": 2, "dropout": 0.0}
    here = make_event_model(EventModelConfig(num_types=3, **settings)).double().fit_times(EVENTS)
    there = copy.deepcopy(here).cuda()
    batch = EVENTS.batch()
    query = batch.last_times[:, None] + torch.tensor([[0.0, 0.5, 30.0]], dtype=torch.float64)
    losses = []
    for model in (here.eval(), there.eval()):
        moved = batch.to(model.device)
        # cuDNN's recurrent layers have no backward pass in evaluation mode.
        with torch.backends.cudnn.flags(enabled=False):
            loss = model(moved).loss
            loss.backward()
        losses.append(loss.detach().cpu())
        assert torch.isfinite(likelihood_terms(model, moved, max_halvings=0).per_sequence).all()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=1e-6, atol=1e-8)
    found = there.intensity(batch.to("cuda"), query.cuda()).cpu()
    torch.testing.assert_close(found, here.intensity(batch, query), rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_blend_with_classical_processes_says_what_it_says_on_the_cpu() -> None:
    torch.manual_seed(0)
    config = EventModelConfig(num_types=3, dim=16, num_heads=2)
    companions: dict[str, RenewalProcess | HawkesProcess] = {
        "renewal": RenewalProcess.fit(EVENTS, num_bins=6),
        "hawkes": HawkesProcess([0.2, 0.1, 0.3], np.full((3, 3), 0.1), 1.5),
    }
    network = make_event_model(config).double().fit_times(EVENTS).eval()
    here = BlendedEventProcess(network, companions, [0.5, 0.3, 0.2])
    batch = EVENTS.batch()
    query = batch.last_times[:, None] + torch.tensor([[0.0, 0.5, 30.0]], dtype=torch.float64)
    wanted = here.intensity(batch, query)  # before the processes are moved
    there = copy.deepcopy(here).cuda()
    found = there.intensity(batch.to("cuda"), query.cuda()).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    ours, theirs = (likelihood_terms(m, batch.to(m.device)).per_sequence for m in (here, there))
    torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-8, atol=1e-10)
    ours, theirs = (predict_next(m, batch.to(m.device), horizon=50.0).median for m in (here, there))
    torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-6, atol=1e-8)
    back = there.cpu()
    assert torch.equal(back.intensity(batch, query), wanted)
