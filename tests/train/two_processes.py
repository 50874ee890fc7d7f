"""Trains the toy model and writes its weights; run by torchrun, or alone."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from osciformer.data import IrregularSeries
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.train import Classification, SeriesSource, TrainConfig, fit
from osciformer.train.callbacks import WeightAverage, _whole_parameters


def load_toy() -> Any:
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    return toy


def average(num_epochs: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return the average and the weights after each epoch, with FSDP if there are processes.

    Lightning has FSDP for GPUs alone; so this goes through the hooks of the callback by hand. After
    the first epoch all is built anew from what a checkpoint would hold.
    """
    model, callback, trainer, optimizer = assemble()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for epoch in range(num_epochs):
        if epoch == 1:
            state = callback.state_dict()
            model, callback, trainer, optimizer = assemble(found[0], trainer.global_step)
            callback.load_state_dict(state)
        if epoch < 2:
            callback.on_train_start(trainer, model)
        callback.on_train_epoch_start(trainer, model)
        for _ in range(4):
            optimizer.zero_grad()
            (trainer.strategy.model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
            optimizer.step()
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, model)
        with torch.inference_mode(not distributed.is_initialized()), torch.no_grad():
            callback.on_validation_start(trainer, model)
            output = trainer.strategy.model(x)
        callback.on_train_epoch_end(trainer, model)
        with _whole_parameters(trainer):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(weights)
        aside = callback.state_dict()["set_aside"]
        found[-1] |= {"output": output.clone(), **{f"aside.{k}": v for k, v in aside.items()}}
    return found


def assemble(
    weights: dict[str, torch.Tensor] | None = None, step: int = 0
) -> tuple[nn.Module, WeightAverage, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    if weights is not None:
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    wrapper: nn.Module = model
    if "RANK" in os.environ:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        wrapper = FullyShardedDataParallel(model, use_orig_params=True, device_id="cpu")
        # Were they whole, nothing would be tested.
        assert sum(p.numel() for p in model.parameters()) < 26
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(model=wrapper), global_step=step)
    return model, WeightAverage(0.7), trainer, torch.optim.SGD(model.parameters(), lr=0.1)


def learn_single_row() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and losses of a model that meets a series of a single row.

    Batches hold two series, in the order of their lengths. So in the first step the first of two
    processes has a single row, and no gap of time that a frequency would need.
    """
    generator = np.random.default_rng(0)
    lengths = (1, 4, 5, 6, 7, 9, 10, 14)
    times = [np.sort(generator.uniform(0, 5, n)) for n in lengths]
    values = [generator.normal(size=(n, 2)) for n in lengths]
    series = IrregularSeries.from_arrays(times, values, labels=np.arange(8) % 2)
    config = TrainConfig(max_epochs=2, batch_size=2, learning_rate=0.02, accelerator="cpu")
    torch.manual_seed(0)
    steady = {"dropout": 0.0, "observation_dropout": 0.0}
    model = SeriesModel(
        SeriesModelConfig(input_dim=2, output_dim=2, dim=8, **steady)  # type: ignore[arg-type]
    )
    source = SeriesSource(series, config.batch_size, labels=series.labels, shuffle=False)
    result = fit(model, Classification(2), source, None, config)
    return result.model.state_dict(), [row["train_loss"] for row in result.history]


def main(target: str) -> None:
    toy = load_toy()
    config = TrainConfig(
        max_epochs=3, batch_size=16, learning_rate=0.05, accelerator="cpu", weight_averaging=0.8
    )
    # 61 series: batches that two processes cannot halve.
    result = fit(toy.make_model(dropout=0.0), *toy.make_sources(config, count=61), config)
    torch.save(
        {
            "weights": result.model.state_dict(),
            "history": result.history,
            "average": average(),
            "single_row": learn_single_row(),
        },
        f"{target}-{os.environ.get('RANK', '0')}.pt",
    )


def lose(rank: str) -> None:
    """Train until the process of this rank is killed; the other one says what happened."""
    toy = load_toy()
    config = TrainConfig(max_epochs=9, batch_size=16, accelerator="cpu")
    model, sources = toy.make_model(dropout=0.0), toy.make_sources(config, count=61)
    if os.environ["RANK"] == rank:
        steps = iter(range(5))
        model.register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(steps) == 4 else None
        )
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends at any moment
    fit(model, *sources, config)


if __name__ == "__main__":
    if sys.argv[2:]:
        lose(sys.argv[2].removeprefix("--lose="))
    else:
        main(sys.argv[1])
