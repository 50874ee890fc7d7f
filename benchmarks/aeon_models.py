"""Classifiers of aeon, which needs an older numpy: they run in a virtual environment of their own.

`prepare` makes the environment on first use, and `score` has a process of it for company.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from aeon_worker import NAMES

from osciformer.bench.report import Row, progress
from osciformer.data.registry import cache_folder

MODELS = tuple(NAMES)
PACKAGES = ("torch==2.13.0", "aeon")
WORKER = Path(__file__).with_name("aeon_worker.py")


def default_folder() -> Path:
    """Return where the environment is kept if no other place is given."""
    return cache_folder() / "aeon-venv"


def prepare(folder: Path) -> None:
    """Make the virtual environment, unless it is there and has aeon."""
    python = _python(folder)
    check = [str(python), "-c", "import importlib.util as u; assert u.find_spec('aeon')"]
    if python.exists() and not subprocess.run(check, capture_output=True).returncode:
        return
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", *PACKAGES],
    ]
    shown = " && ".join(map(shlex.join, commands))
    progress(f"a virtual environment for aeon is made, once: {shown}")
    for command in commands:
        if subprocess.run(command).returncode:
            raise SystemExit(
                f"{shlex.join(command)} failed. Make the environment yourself with {shown}, name "
                f"another one by --aeon-venv, or leave out {', '.join(MODELS)} by --models"
            )


def score(folder: Path, model: str, seed: int, arrays: Mapping[str, np.ndarray]) -> Row:
    """Return accuracy, processor seconds of fitting and versions.

    Args:
        folder: The virtual environment.
        model: One of `MODELS`.
        seed: Seed of the classifier.
        arrays: `train`, `test` [n, F, T], `train_labels`, `test_labels` [n].
    """
    worker = _worker(folder)
    assert worker.stdin is not None
    assert worker.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data.npz"
        np.savez(data, **arrays)
        request = {"data": str(data), "model": model, "seed": seed}
        with suppress(BrokenPipeError):  # from a dead process, which gives no answer either
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        line = worker.stdout.readline()
    if not line:
        _worker.cache_clear()
        worker.communicate()  # closes the pipes
        raise RuntimeError(f"the process of {model} ended with status {worker.returncode}")
    found: Row = json.loads(line)
    if "error" in found:
        raise RuntimeError(f"{model}: {found['error']}")
    return found


@functools.cache  # to import aeon takes longer than many of its classifiers
def _worker(folder: Path) -> subprocess.Popen[str]:
    command = [str(_python(folder)), str(WORKER)]
    env = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def _python(folder: Path) -> Path:
    return folder.absolute() / "bin" / "python"
