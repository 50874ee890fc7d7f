"""Trains the toy model and writes its weights; run by torchrun, or alone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from osciformer.train import TrainConfig, fit


def load_toy() -> Any:
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    return toy


def main(target: str) -> None:
    toy = load_toy()
    config = TrainConfig(max_epochs=3, batch_size=16, learning_rate=0.05, accelerator="cpu")
    # 61 series: batches that two processes cannot halve.
    result = fit(toy.make_model(dropout=0.0), *toy.make_sources(config, count=61), config)
    torch.save(
        {"weights": result.model.state_dict(), "history": result.history},
        f"{target}-{os.environ.get('RANK', '0')}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1])
