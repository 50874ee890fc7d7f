from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osciformer.train import FitResult, TrainConfig, TrainingInterrupted, fit
from osciformer.train.module import TrainingModule
from osciformer.train.run_folder import CheckpointError

from .test_fitting import DyingSource, Killed, assert_same_weights
from .toy import MeanModel, make_model, make_sources

CONFIG = TrainConfig(
    max_epochs=4, batch_size=16, learning_rate=0.3, accelerator="cpu", weight_averaging=0.7
)
Weights = dict[str, torch.Tensor]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The weights that each optimizer step of the test leaves, one dict a step."""
    found: list[Weights] = []
    step = TrainingModule.optimizer_step

    def note(self: TrainingModule, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        found.append({name: w.detach().clone() for name, w in self.model.named_parameters()})

    monkeypatch.setattr(TrainingModule, "optimizer_step", note)
    return found


def average_of(start: nn.Module, steps: list[Weights], decay: float) -> Weights:
    """Return the average as the sum that its recursion unrolls to, in double precision."""
    rates = [min(decay, s / (s + 4)) for s in range(1, len(steps) + 1)]
    all_weights = [dict(start.named_parameters()), *steps]
    shares = [1.0, *(1 - rate for rate in rates)]
    for k in range(len(shares)):
        for rate in rates[k:]:
            shares[k] *= rate
    assert sum(shares) == pytest.approx(1.0)
    return {
        name: sum(
            share * weights[name].detach().double()
            for share, weights in zip(shares, all_weights, strict=True)
        ).float()  # type: ignore[union-attr]
        for name in all_weights[0]
    }


def run(config: TrainConfig = CONFIG, **options: Any) -> FitResult:
    return fit(make_model(), *make_sources(config), config, **options)


def timeless(result: FitResult) -> list[dict[str, float]]:
    return [{**row, "seconds": 0.0} for row in result.history]


@pytest.mark.parametrize("decay", [0.3, 0.7, 0.99])
def test_result_is_the_average_of_the_weights_of_all_steps(
    decay: float, steps: list[Weights]
) -> None:
    config = replace(CONFIG, weight_averaging=decay)
    task, train, _ = make_sources(config)
    result = fit(make_model(), task, train, None, config)
    assert len(steps) == 4 * 4
    torch.testing.assert_close(
        dict(result.model.named_parameters()), average_of(make_model(), steps, decay)
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(dict(result.model.named_parameters()), steps[-1])


def test_training_itself_is_that_without_averages(steps: list[Weights]) -> None:
    run()
    averaged, steps[:] = list(steps), []
    run(replace(CONFIG, weight_averaging=0.0))
    assert len(averaged) == len(steps) == 4 * 4
    for mine, other in zip(averaged, steps, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_best_epoch_is_that_of_the_averages(steps: list[Weights]) -> None:
    config = replace(CONFIG, monitor="loss")
    task, train, validation = make_sources(config)
    result = fit(make_model(), task, train, validation, config)
    losses = []
    for count in (4, 8, 12, 16):
        model = make_model()
        model.load_state_dict(average_of(make_model(), steps[:count], 0.7))
        losses.append(mean_loss(model.eval(), task, validation))
    assert [row["val_loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    assert min(losses) == losses[result.best_epoch]
    assert mean_loss(result.model, task, validation) == pytest.approx(min(losses), rel=1e-5)


def mean_loss(model: nn.Module, task: Any, source: Any) -> float:
    with torch.no_grad():
        sums = [task.loss(model(batch), batch) for batch in source.epoch(0)]
    return float(sum(s[0] for s in sums) / sum(s[1] for s in sums))


@pytest.mark.parametrize("is_validated", [True, False])
@pytest.mark.parametrize("error", [Killed, KeyboardInterrupt])
def test_run_that_died_goes_on_to_the_averages_of_one_that_did_not(
    is_validated: bool, error: type[BaseException], tmp_path: Path
) -> None:
    task, train, validation = make_sources(CONFIG)
    watched = validation if is_validated else None
    whole = fit(make_model(), task, train, watched, CONFIG)
    with pytest.raises((Killed, TrainingInterrupted)):
        fit(make_model(), task, DyingSource(train, 2, error), watched, CONFIG, run_dir=tmp_path)
    rest = fit(make_model(), task, train, watched, CONFIG, run_dir=tmp_path, resume=tmp_path)
    assert_same_weights(whole.model, rest.model)
    assert timeless(whole) == timeless(rest)
    again = fit(make_model(), task, train, watched, CONFIG, resume=tmp_path)
    assert_same_weights(whole.model, again.model)


def test_last_average_is_returned_where_the_best_is_not_asked_for(steps: list[Weights]) -> None:
    result = run(replace(CONFIG, restore_best=False))
    torch.testing.assert_close(
        dict(result.model.named_parameters()), average_of(make_model(), steps, 0.7)
    )


@pytest.mark.parametrize("epoch", [0, 2])
def test_interruption_in_an_epoch_leaves_the_average_of_the_steps_so_far(
    epoch: int, steps: list[Weights]
) -> None:
    task, train, _ = make_sources(CONFIG)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(make_model(), task, DyingSource(train, epoch, KeyboardInterrupt), None, CONFIG)
    assert len(steps) == 4 * epoch + 1
    torch.testing.assert_close(
        dict(caught.value.result.model.named_parameters()), average_of(make_model(), steps, 0.7)
    )


def test_interruption_in_validation_leaves_the_average(steps: list[Weights]) -> None:
    task, train, validation = make_sources(CONFIG)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(make_model(), task, train, DyingSource(validation, 0, KeyboardInterrupt), CONFIG)
    assert len(steps) == 4
    torch.testing.assert_close(
        dict(caught.value.result.model.named_parameters()), average_of(make_model(), steps, 0.7)
    )


class CountingModel(MeanModel):
    """Counts its training batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.count += 1  # type: ignore[operator]
        return super().forward(batch)


def test_buffers_are_not_averaged() -> None:
    result = fit(CountingModel(), *make_sources(CONFIG), replace(CONFIG, restore_best=False))
    assert result.model.count == 16


def test_run_is_not_continued_with_another_average(tmp_path: Path) -> None:
    run(run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"weight_averaging was 0\.7, is 0\.0"):
        run(replace(CONFIG, weight_averaging=0.0), resume=tmp_path)
