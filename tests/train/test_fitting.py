from __future__ import annotations

import csv
import random
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osciformer.data import collate
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.train import (
    FitResult,
    Quantiles,
    Regression,
    SeriesSource,
    TrainConfig,
    TrainingInterrupted,
    choose_device,
    fit,
)
from osciformer.train.fitting import _processes, check_hardware
from osciformer.train.module import TrainingModule
from osciformer.train.run_folder import SETUP_KEY, CheckpointError

from .toy import LevelModel, MeanModel, make_model, make_sources, shifted_series

CONFIG = TrainConfig(max_epochs=4, batch_size=16, learning_rate=0.3, accelerator="cpu")


class Killed(Exception):
    """Stands in for a process that dies."""


class DyingSource(SeriesSource):
    """Training batches that raise in the middle of an epoch."""

    def __init__(self, source: SeriesSource, epoch: int, error: type[BaseException]) -> None:
        vars(self).update(vars(source))
        self.last, self.error = epoch, error

    def epoch(self, number: int, **place: int) -> Any:
        batches = super().epoch(number, **place)
        return DyingBatches(batches, self.error) if number == self.last else batches


class DyingBatches:
    def __init__(self, batches: Any, error: type[BaseException]) -> None:
        self.batches, self.error = batches, error

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        yield next(iter(self.batches))
        raise self.error


def run(config: TrainConfig = CONFIG, **options: Any) -> FitResult:
    return fit(make_model(), *make_sources(config), config, **options)


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    weights = second.state_dict()
    assert [
        name for name, w in first.state_dict().items() if not torch.equal(w, weights[name])
    ] == []


def test_model_learns_what_is_there_to_learn() -> None:
    result = run()
    assert result.history[-1]["val_auroc"] > 0.9
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert not result.model.training


def test_same_seed_gives_the_same_weights() -> None:
    assert_same_weights(run().model, run().model)


def test_another_seed_gives_other_weights() -> None:
    other = run(TrainConfig(**{**CONFIG.to_dict(), "seed": 1})).model
    with pytest.raises(AssertionError):
        assert_same_weights(run().model, other)


def test_generators_of_the_caller_stay_as_they_are() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    wanted = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    model, sources = make_model(), make_sources(CONFIG)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    fit(model, *sources, CONFIG)
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted  # noqa: NPY002


@pytest.mark.parametrize("is_real", [False, True], ids=["mean", "osciformer"])
def test_run_that_died_goes_on_to_the_weights_of_one_that_did_not(
    is_real: bool, tmp_path: Path
) -> None:
    def model() -> nn.Module:
        if not is_real:
            return make_model()
        torch.manual_seed(0)
        config = SeriesModelConfig(input_dim=2, output_dim=2, dim=8, num_layers=1, num_heads=1)
        batch = collate(shifted_series(60))
        return SeriesModel(config).fit_time_scale(batch.times, batch.mask)

    task, train, validation = make_sources(CONFIG)
    whole = fit(model(), task, train, validation, CONFIG)
    dying = DyingSource(train, 2, Killed)
    with pytest.raises(Killed):
        fit(model(), task, dying, validation, CONFIG, run_dir=tmp_path)
    rest = fit(model(), task, train, validation, CONFIG, run_dir=tmp_path, resume=tmp_path)
    assert_same_weights(whole.model, rest.model)
    timeless = [[{**row, "seconds": 0} for row in r.history] for r in (whole, rest)]
    assert timeless[0] == timeless[1]


def test_finished_run_that_is_resumed_gives_its_result_again(tmp_path: Path) -> None:
    whole = run(run_dir=tmp_path)
    again = run(run_dir=tmp_path, resume=tmp_path)
    assert len(again.history) == len(whole.history)
    assert_same_weights(whole.model, again.model)


def test_interruption_leaves_a_checkpoint_and_the_best_weights(tmp_path: Path) -> None:
    task, train, validation = make_sources(CONFIG)
    dying = DyingSource(train, 2, KeyboardInterrupt)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(make_model(), task, dying, validation, CONFIG, run_dir=tmp_path)
    assert caught.value.checkpoint == tmp_path / "last.ckpt"
    assert len(caught.value.result.history) == 2
    rest = fit(make_model(), task, train, validation, CONFIG, resume=caught.value.checkpoint)
    assert_same_weights(run().model, rest.model)


def test_sigterm_interrupts_and_is_given_back_to_the_caller() -> None:
    import signal

    from osciformer._processes import Terminated

    before = signal.getsignal(signal.SIGTERM)
    model, (task, train, validation) = make_model(), make_sources(CONFIG)

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    model.register_forward_hook(stop)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(model, task, train, validation, CONFIG)
    assert isinstance(caught.value.__cause__, Terminated)
    assert signal.getsignal(signal.SIGTERM) is before


def test_interruption_gives_ctrl_c_back_to_the_caller() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    task, train, validation = make_sources(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), task, DyingSource(train, 0, KeyboardInterrupt), validation, CONFIG)
    assert signal.getsignal(signal.SIGINT) is before


def test_best_epoch_is_restored_and_training_stops_early() -> None:
    # With this learning rate the loss soon rises again.
    config = TrainConfig(
        max_epochs=30,
        batch_size=8,
        learning_rate=5.0,
        patience=2,
        monitor="loss",
        accelerator="cpu",
    )
    task, train, validation = make_sources(config)
    result = fit(make_model(), task, train, validation, config)
    losses = [row["val_loss"] for row in result.history]
    assert result.stopped_early
    assert result.best_epoch == int(np.argmin(losses)) == len(losses) - 1 - 2
    logits = [(result.model(b), b) for b in validation.epoch(0)]
    sums = [task.loss(output, batch) for output, batch in logits]
    loss = sum(s[0].item() for s in sums) / sum(s[1].item() for s in sums)
    assert loss == pytest.approx(min(losses), rel=1e-5)


def test_run_folder_has_a_line_per_epoch_and_no_leftovers(tmp_path: Path) -> None:
    result = run(run_dir=tmp_path)
    with (tmp_path / "history.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[-1]["val_loss"]) == result.history[-1]["val_loss"]
    assert not list(tmp_path.glob("*.part"))


def test_without_validation_the_last_weights_stay() -> None:
    task, train, _ = make_sources(CONFIG)
    result = fit(make_model(), task, train, None, CONFIG)
    assert result.best_epoch == 3
    assert "val_loss" not in result.history[0]


@pytest.mark.parametrize(("verbose", "shown"), [(0, ""), (1, "training"), (2, "epoch 4/4")])
def test_only_what_is_asked_for_is_printed(
    verbose: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run(TrainConfig(**{**CONFIG.to_dict(), "verbose": verbose}))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert shown in printed.err if shown else printed.err == ""


def test_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    run(run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.3, is 0\.5"):
        run(TrainConfig(**{**CONFIG.to_dict(), "learning_rate": 0.5}), resume=tmp_path)


def small_model(**settings: Any) -> SeriesModel:
    config = {"input_dim": 2, "output_dim": 2, "dim": 8, "num_layers": 1, "num_heads": 1}
    return SeriesModel(SeriesModelConfig(**config | settings))


def test_other_model_is_refused_on_resume_by_the_name_of_the_setting(tmp_path: Path) -> None:
    config = TrainConfig(max_epochs=1, batch_size=16, accelerator="cpu")
    sources = make_sources(config)
    fit(small_model(), *sources, config, run_dir=tmp_path)
    fit(small_model(), *sources, config, resume=tmp_path)
    # Dropout has no weights, so that nothing but the configuration tells.
    with pytest.raises(CheckpointError, match=r"dropout was 0\.2, is 0\.1"):
        fit(small_model(dropout=0.1), *sources, config, resume=tmp_path)


def test_other_task_or_settings_are_refused_on_resume(tmp_path: Path) -> None:
    task, *sources = make_sources(CONFIG)
    same, other = {"clip": (1, 2)}, replace(task, label_smoothing=0.2)
    fit(make_model(), task, *sources, CONFIG, run_dir=tmp_path, settings=same)
    with pytest.raises(CheckpointError, match=r"label_smoothing was 0\.0, is 0\.2"):
        fit(make_model(), other, *sources, CONFIG, resume=tmp_path)
    with pytest.raises(CheckpointError, match=r"clip was \[1, 2\], is None"):
        fit(make_model(), task, *sources, CONFIG, resume=tmp_path, settings={"clip": None})
    assert fit(make_model(), task, *sources, CONFIG, resume=tmp_path, settings=same).history


def test_checkpoint_that_says_nothing_of_the_model_is_taken(tmp_path: Path) -> None:
    run(run_dir=tmp_path)
    path = tmp_path / "last.ckpt"
    content = torch.load(path, weights_only=True)
    del content[SETUP_KEY]
    torch.save(content, path)
    assert len(run(resume=tmp_path).history) == CONFIG.max_epochs


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nonsense", b"hello"])
def test_file_that_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        run(resume=tmp_path)


def test_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    run(run_dir=tmp_path)
    data = (tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(resume=tmp_path)


def test_checkpoint_with_code_is_not_executed(tmp_path: Path) -> None:
    torch.save({"bomb": Path}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(resume=tmp_path)


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to continue from"):
        run(resume=tmp_path)


def test_loss_that_is_not_finite_is_an_error() -> None:
    model = make_model()
    with torch.no_grad():
        model.linear.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"loss became nan in epoch 0; use a smaller"):
        fit(model, *make_sources(CONFIG), CONFIG)


def test_trainings_in_two_threads_keep_their_seeds() -> None:
    found: list[FitResult] = []
    # Made before, as `make_model` draws weights outside of `fit`.
    given = [(make_model(), *make_sources(CONFIG), CONFIG) for _ in range(2)]
    threads = [threading.Thread(target=lambda one=one: found.append(fit(*one))) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = run().model.state_dict()
    for result in found:
        assert all(torch.equal(x, want[name]) for name, x in result.model.state_dict().items())
    assert len(found) == 2


class Steep(torch.autograd.Function):
    """The same numbers, with slopes of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope * float("nan")


def test_weights_that_overflow_in_the_last_step_are_an_error() -> None:
    class Model(MeanModel):
        def forward(self, batch):
            return Steep.apply(super().forward(batch))

    config = TrainConfig(**{**CONFIG.to_dict(), "max_epochs": 1, "batch_size": 64})
    task, train, _ = make_sources(config)
    with pytest.raises(FloatingPointError, match=r"the weights became .* in epoch 0"):
        fit(Model(), task, train, None, config)


def test_a_validation_loss_of_nan_is_an_error() -> None:
    task, train, _ = make_sources(CONFIG)
    bad = shifted_series(10)
    bad = bad.replace(values=np.full_like(bad.values, np.nan))
    watched = SeriesSource(bad, CONFIG.batch_size, labels=bad.labels, shuffle=False)
    with pytest.raises(FloatingPointError, match=r"the validation loss became nan in epoch 0"):
        fit(make_model(), task, train, watched, CONFIG)


def test_sharding_without_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy='fsdp' needs GPUs; use strategy='ddp'"):
        run(TrainConfig(**{**CONFIG.to_dict(), "strategy": "fsdp"}))


def test_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"accelerator='gpu' needs a CUDA device.*'auto'"):
        run(TrainConfig(**{**CONFIG.to_dict(), "accelerator": "gpu"}))
    with pytest.raises(ValueError, match="accelerator must be one of 'auto', 'cpu', 'gpu'"):
        choose_device("tpu")


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="devices=2 needs as many GPUs, and torch sees 1 here"):
        check_hardware("gpu", "auto", 2)
    check_hardware("gpu", "fsdp", 1)
    check_hardware("cpu", "ddp", 2)


def test_gradient_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    clip = nn.utils.clip_grad_norm_

    def note(parameters: Any, bound: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        bounds.append(bound)
        return clip(parameters, bound, *args, **kwargs)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", note)
    run(TrainConfig(**{**CONFIG.to_dict(), "max_epochs": 1, "gradient_clip": 0.25}))
    assert set(bounds) == {0.25}
    bounds.clear()
    run(TrainConfig(**{**CONFIG.to_dict(), "max_epochs": 1, "gradient_clip": None}))
    assert bounds == []


def test_gradient_in_pieces_is_clipped_by_their_owner() -> None:
    # FSDP's wrapper of the model knows the norm over all pieces; a stand-in, for want of GPUs.
    bounds: list[float] = []
    module = TrainingModule(make_model(), make_sources(CONFIG)[0], CONFIG)
    wrapper = SimpleNamespace(clip_grad_norm_=bounds.append)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(model=wrapper))  # type: ignore[assignment]
    module.configure_gradient_clipping(None, 0.25, "norm")
    assert bounds == [0.25]


def test_sharding_is_what_lightning_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = TrainConfig(accelerator="gpu", strategy="fsdp", devices=2, num_nodes=3)
    asked = _processes(config)
    assert (asked["devices"], asked["num_nodes"]) == (2, 3)
    assert type(asked["strategy"]).__name__ == "FSDPStrategy"


def test_mixed_precision_learns_too() -> None:
    result = run(TrainConfig(**{**CONFIG.to_dict(), "precision": "bf16-mixed"}))
    assert result.history[-1]["val_auroc"] > 0.9


def test_regression_recovers_a_linear_target() -> None:
    series = shifted_series(80)
    batch = collate(series)
    target = (batch.values.nanmean(dim=1) @ torch.tensor([1.0, -2.0])).numpy()
    config = TrainConfig(max_epochs=30, batch_size=16, learning_rate=0.1, accelerator="cpu")
    source = SeriesSource(series, 16, labels=target[:, None])
    model = MeanModel(output_dim=1, dropout=0.0)
    result = fit(model, Regression(), source, source, config)
    assert result.history[-1]["val_rmse"] < 0.1


def test_quantiles_approach_those_of_the_data() -> None:
    series = shifted_series(100)
    source = SeriesSource(series, 20, draw=lambda s, _: (s, s))
    levels = (0.1, 0.5, 0.9)
    config = TrainConfig(max_epochs=30, batch_size=20, learning_rate=0.1, accelerator="cpu")
    result = fit(LevelModel(2, 3), Quantiles(levels), source, source, config)
    found = result.model.level.detach().numpy()  # type: ignore[union-attr, operator]
    assert found == pytest.approx(np.quantile(series.values, levels, axis=0).T, abs=0.15)
    assert result.history[-1]["val_coverage"] == pytest.approx(0.8, abs=0.05)
