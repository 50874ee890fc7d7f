"""A network blended with classical processes: laws, files, fits, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from osciformer.events import (
    HawkesProcess,
    PoissonProcess,
    RenewalProcess,
    likelihood_terms,
    log_likelihood,
    sample,
)
from osciformer.events.neural import BlendConfig, BlendedEventProcess, NeuralEventProcess
from osciformer.events.neural.blended import check_can_blend, companions_of

from . import test_process as laws
from .event_cases import HAWKES, padded, random_events
from .test_neural import make


def with_network(head: str = "mixture", weights: Any = (0.5, 0.3, 0.2)) -> BlendedEventProcess:
    companions: dict[str, Any] = {
        "renewal": RenewalProcess.fit(laws.EVENTS, num_bins=6),
        "hawkes": HawkesProcess(HAWKES.base, HAWKES.branching, 1.3),
    }
    return BlendedEventProcess(make(head), companions, weights)


@pytest.mark.parametrize("head", ["mixture", "exponential"])
@pytest.mark.parametrize(
    "law",
    [
        laws.test_intensities_are_finite_and_not_negative,
        laws.test_an_event_has_its_left_limit,
        laws.test_rows_do_not_see_each_other,
        laws.test_intensity_after_an_event_knows_its_history_only,
        laws.test_total_compensator_after_an_event_is_the_integral_behind_it,
        laws.test_compensators_of_neighbouring_intervals_add_up,
    ],
    ids=lambda law: law.__name__.removeprefix("test_"),
)
@torch.no_grad()
def test_a_blend_with_a_network_obeys_the_laws_of_processes(head: str, law: Any) -> None:
    law(with_network(head))


@torch.no_grad()
@pytest.mark.parametrize("change", ["time", "type", "removal"])
def test_later_events_change_no_bit_of_a_blend_with_a_network(change: str) -> None:
    laws.test_changing_an_event_changes_no_earlier_bit(with_network(), change)


@torch.no_grad()
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_padding_changes_nothing(junk: float) -> None:
    batch, blend = laws.EVENTS.batch(), with_network()
    longer, query = padded(batch, 7, junk), laws.queries(batch)
    torch.testing.assert_close(
        blend.intensity(longer, query), blend.intensity(batch, query), rtol=1e-9, atol=0
    )
    after, before = (likelihood_terms(blend, item, span="window") for item in (longer, batch))
    torch.testing.assert_close(after.per_sequence, before.per_sequence, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_the_first_event_changes_no_bit_before_it() -> None:
    batch = laws.EVENTS[:2].batch()
    later = replace(batch, times=batch.times + 0.123)
    share = torch.rand(2, 5, dtype=torch.float64)
    query = batch.starts[:, None] + (batch.first_times - batch.starts)[:, None] * share
    blend = with_network()
    assert torch.equal(blend.intensity(batch, query), blend.intensity(later, query))


@torch.no_grad()
def test_a_state_is_loaded_into_a_model_of_the_same_configuration() -> None:
    blend = with_network()
    config = BlendConfig.from_dict(json.loads(json.dumps(blend.config.to_dict())))
    other = BlendedEventProcess.from_config(config).double().eval()
    other.load_state_dict(blend.state_dict())
    batch, query = laws.EVENTS.batch(), laws.queries(laws.EVENTS.batch())
    wanted = blend.intensity(batch, query)
    assert torch.equal(other.intensity(batch, query), wanted)
    assert other.named_weights == blend.named_weights
    assert list(blend.named_weights) == ["network", "renewal", "hawkes"]
    # Processes are made once, and anew when their tensors change.
    changed = blend.state_dict()
    changed["companions.renewal.tail_rate"] = 3 * changed["companions.renewal.tail_rate"]
    changed["companions.hawkes.base"] = 2 * changed["companions.hawkes.base"]
    other.load_state_dict(changed)
    ours, theirs = blend.members, other.members
    assert theirs[1].gaps.tail_rate == 3 * ours[1].gaps.tail_rate  # type: ignore[attr-defined]
    assert torch.equal(theirs[2].base, 2 * ours[2].base)  # type: ignore[attr-defined]
    assert other.members[1] is theirs[1]
    other.load_state_dict(blend.state_dict())
    assert torch.equal(copy.deepcopy(other).intensity(batch, query), wanted)


@torch.no_grad()
def test_a_cast_model_still_has_processes_in_double_precision() -> None:
    batch, query = laws.EVENTS.batch(), laws.queries(laws.EVENTS.batch())
    blend = with_network()
    wanted = blend.intensity(batch, query)
    single = copy.deepcopy(blend).float()
    assert single.companions["renewal"].edges.dtype == torch.float32
    assert single.members[1].gap_breaks.dtype == torch.float64  # type: ignore[union-attr]
    torch.testing.assert_close(single.intensity(batch, query), wanted, rtol=1e-3, atol=1e-4)


def test_a_kind_that_is_not_known_is_refused() -> None:
    config = with_network().config
    unknown = replace(config, companions=({"name": "p", "kind": "poisson", "shapes": {}},))
    with pytest.raises(ValueError, match="kind must be one of 'renewal', 'hawkes'; got 'poisson'"):
        BlendedEventProcess.from_config(unknown)


def test_a_fitted_blend_is_better_than_its_network() -> None:
    empty = random_events([0] * 60, windows=False).batch()
    drawn = sample(
        HAWKES,
        empty,
        until=1e6,
        generator=torch.Generator().manual_seed(3),
        max_events=15,
        at_limit="stop",
    ).sequences
    train, validation, test = drawn[:30], drawn[30:40], drawn[40:]
    network = make("mixture", seed=1)
    blend = BlendedEventProcess.fit(network, ("renewal", "hawkes"), train, validation)
    weights = blend.named_weights
    assert sum(weights.values()) == pytest.approx(1.0)
    assert max(weights, key=lambda name: weights[name]) == "hawkes"
    scores = {
        name: log_likelihood(item, test).micro
        for name, item in zip(weights, blend.members, strict=True)
    }
    assert log_likelihood(blend, test).micro > scores["network"] + 0.1
    # The validation part decided: but for the prior, no member is better on it. All but a little
    # of the weight for one member has at most the posterior of the weights that were found.
    scored, count = len(validation.gaps), len(weights)
    little = (count - 1) / (scored + count)
    allowed = (scored + 1) * math.log(1 - little) + (count - 1) * math.log(little / (count - 1))
    allowed -= sum(map(math.log, weights.values()))
    best = max(log_likelihood(member, validation).total for member in blend.members)
    assert log_likelihood(blend, validation).total >= best + allowed


@pytest.mark.parametrize(
    ("blend_with", "num_types", "wanted"),
    [
        (None, 3, ()),
        ([], 3, ()),
        ("auto", 1, ("renewal", "hawkes")),
        (["auto"], 10, ("renewal", "repeat", "hawkes")),
        ("auto", 11, ("renewal", "repeat")),
        ("hawkes", 99, ("hawkes",)),
        (["repeat", "renewal"], 2, ("repeat", "renewal")),
    ],
)
def test_companions_are_named_or_found(blend_with: Any, num_types: int, wanted: Any) -> None:
    assert companions_of(blend_with, num_types) == wanted


@pytest.mark.parametrize(
    ("blend_with", "error", "message"),
    [
        ("poisson", ValueError, "one of 'auto', 'renewal', 'repeat', 'hawkes'; got 'poisson'"),
        (["renewal", "renewal"], ValueError, r"each process once; got \('renewal', 'renewal'\)"),
        (["auto", "hawkes"], ValueError, "must be 'auto', or name each process once"),
        (True, TypeError, "'auto', names or None; got True"),
    ],
)
def test_unknown_companions_are_refused(blend_with: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        companions_of(blend_with, 2)


def test_networks_that_cannot_be_blended_are_refused() -> None:
    single = random_events([1, 0], windows=False)
    with pytest.raises(ValueError, match=r"'mixture' or 'exponential'; got 'softplus'"):
        check_can_blend(make("softplus"), laws.EVENTS)
    with pytest.raises(ValueError, match=r"two events or more.*validation_fraction"):
        check_can_blend(make("mixture"), single)
    with pytest.raises(ValueError, match="got 'decay'"):
        with_network("decay")
    network: NeuralEventProcess = make("mixture")
    with pytest.raises(TypeError, match=r"got PoissonProcess.*cannot be saved"):
        BlendedEventProcess(network, {"poisson": PoissonProcess([1.0, 1.0])}, [1.0, 1.0])  # type: ignore[dict-item]
