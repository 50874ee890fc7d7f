"""Kernels of a call are known before it, compiled together, and few: one form for all lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from osciformer.ops.attention.triton import compilation  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a process without the interpreter says that compiles for a GPU that is not there."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "compile_without_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_prepares_both_passes_and_prediction_one(report):
    forward, training = set(report["forward"]), set(report["training"])
    assert {"chunk_keys", "chunk_values", "tile_forward", "sweep_forward"} <= forward
    assert training > forward
    assert {"chunk_backward", "tile_backward", "sweep_keys", "sweep_rows"} <= training - forward


def test_kernels_are_compiled_and_kept_on_disk(report):
    assert all(count >= 1 for count in report["compiled"].values())
    assert report["on_disk"] >= len(report["compiled"])


def test_one_line_says_what_takes_so_long(report):
    (line,) = report["told"]
    assert "GPU kernels for a test" in line
    assert "osciformer warm-up" in line
    assert "\n" not in line


def test_a_failure_leaves_the_ordinary_way_and_says_so(report):
    (line,) = report["failed"]
    assert "one after another" in line
    assert "no rehearsal" in line


def test_an_interruption_gets_through_and_leaves_nothing(report):
    assert report["is_tried_again"]


def test_lengths_share_their_kernels(report):
    assert report["after_other_lengths"] == report["compiled"]


def test_short_series_of_all_lengths_have_one_kernel_a_pass(report):
    assert report["pairs"] == {"pair_forward": 1, "pair_backward": 1}
    assert report["pairs_forward"] == ["pair_forward"]


def test_a_watcher_sees_each_kernel(report):
    done = [one[0] for one in report["watched"]]
    assert done == list(range(1, len(done) + 1))
    assert report["watched"][-1] == [len(done), len(done)]


def test_nothing_is_recorded_outside():
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args, options))

    with compilation.recorded() as launches:
        compilation.launch(Kernel(), (2,), 3, K=4)
    assert calls == []
    assert launches[0][1:] == ((3,), {"K": 4})
    compilation.launch(Kernel(), (2,), 3, K=4)
    assert calls == [((2,), (3,), {"K": 4})]


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    alone = compilation.count_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert compilation.count_threads() == 1 <= alone
