from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .two_processes import main

SCRIPT = Path(__file__).with_name("two_processes.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two_processes")
    main(str(folder / "one"))
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(SCRIPT), str(folder / "two")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


@pytest.mark.dist
def test_two_processes_get_the_weights_of_one(results: dict[str, Any]) -> None:
    for name, weight in results["one-0"]["weights"].items():
        torch.testing.assert_close(results["two-0"]["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_processes_agree_on_weights_and_metrics(results: dict[str, Any]) -> None:
    first, second = results["two-0"], results["two-1"]
    assert all(torch.equal(second["weights"][n], w) for n, w in first["weights"].items())
    drop = ("seconds",)
    for mine, other in zip(first["history"], second["history"], strict=True):
        assert {k: v for k, v in mine.items() if k not in drop} == {
            k: v for k, v in other.items() if k not in drop
        }


@pytest.mark.dist
def test_metrics_of_two_processes_are_those_of_one(results: dict[str, Any]) -> None:
    for one, two in zip(results["one-0"]["history"], results["two-0"]["history"], strict=True):
        for name in ("train_loss", "val_loss", "val_auroc", "val_accuracy"):
            assert two[name] == pytest.approx(one[name], rel=1e-4)


@pytest.mark.dist
def test_average_of_pieces_is_that_of_the_whole(results: dict[str, Any]) -> None:
    for rank in (0, 1):
        for one, two in zip(
            results["one-0"]["average"], results[f"two-{rank}"]["average"], strict=True
        ):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.dist
def test_process_with_a_single_row_takes_part(results: dict[str, Any]) -> None:
    weights, losses = results["one-0"]["single_row"]
    for rank in (0, 1):
        torch.testing.assert_close(
            results[f"two-{rank}"]["single_row"], (weights, losses), rtol=1e-4, atol=1e-5
        )


@pytest.mark.dist
def test_lost_process_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(SCRIPT), str(tmp_path / "lost"), "--lose=1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode != 0
    assert re.search(r"process of rank 1 \(pid \d+\) is gone", done.stderr), done.stderr
    assert "--resume" in done.stderr
