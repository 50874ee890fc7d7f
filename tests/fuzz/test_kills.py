"""KILL, TERM and INT at random moments leave the old result or the new one, and a run goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("typer", "rich", "yaml", "pandas", "pyarrow", "pytorch_lightning", "sklearn"):
    pytest.importorskip(package)

from osciformer._files import PART_MARK  # noqa: E402
from osciformer.cli.runs import MANIFEST, NEXT, located  # noqa: E402
from osciformer.saving import load_model  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KINDS = ("fit", "overwrite", "predict")
TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=3", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none", "--no-resonators", "--task=classification"]
TINY += ["--id=who", "--time=hour", "--target=ill"]
SOURCE = str(Path(__file__).parents[2] / "src")
SEEDS = {"old": 1, "new": 2}


class World:
    """A process that runs calls, finished runs to compare with, and how long each call takes."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        import pandas as pd

        self.folder, self.process, self.number = folder, process, 0
        generator = np.random.default_rng(0)
        who = np.repeat(np.arange(24), 5)
        columns = {"who": who, "hour": np.tile(np.arange(5.0), 24), "ill": who % 2}
        table = pd.DataFrame(columns | {"a": who % 2 + generator.normal(size=120)})
        table.to_csv(folder / "table.csv", index=False)
        self.seconds: dict[str, float] = {}
        self.events: dict[str, int] = {}
        for name in SEEDS:
            self.time("fit", self.fit(name), folder / name)
        run = folder / "again"
        shutil.copytree(folder / "old", run)
        self.time("overwrite", [*self.fit("new"), "--overwrite"], run)
        for name in SEEDS:
            self.time("predict", self.predict(folder / name), folder / f"{name}.csv")
        self.tables = {name: (folder / f"{name}.csv").read_bytes() for name in SEEDS}
        assert self.tables["old"] != self.tables["new"]

    def fit(self, name: str) -> list[str]:
        return ["fit", str(self.folder / "table.csv"), *TINY, f"--seed={SEEDS[name]}"]

    def predict(self, run: Path) -> list[str]:
        return ["predict", str(run), str(self.folder / "table.csv")]

    def call(self, arguments: list[str], output: Path, **more: Any) -> dict[str, Any]:
        log = self.folder / "log"
        call = {"arguments": [*arguments, "-o", str(output)], "log": str(log), **more}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # Temporary files lie beside a file that is written.
        call["below"] = str(output if "fit" in arguments else output.parent)
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return {**json.loads(self.process.stdout.readline()), "log": log.read_text()}

    def time(self, kind: str, arguments: list[str], output: Path) -> None:
        started = time.perf_counter()
        found = self.call(arguments, output)
        assert found["status"] == 0, found["log"]
        self.seconds[kind] = time.perf_counter() - started
        self.events[kind] = found["events"]

    def check(self, arguments: list[str], output: Path) -> dict[str, Any]:
        """Run to the end, without a signal."""
        found = self.call(arguments, output)
        assert found["status"] == 0, found["log"]
        return found

    def is_like(self, run: Path, name: str) -> bool:
        one, two = (load_model(located(x, "model.safetensors")) for x in (run, self.folder / name))
        return all(np.array_equal(two.weights[n], w) for n, w in one.weights.items())

    def which(self, run: Path) -> str:
        """Return whether a run is the old or the new one, by all that is in it."""
        (name,) = [name for name in SEEDS if self.is_like(run, name)]
        assert f"seed: {SEEDS[name]}" in located(run, "config.yaml").read_text()
        assert json.loads(located(run, "metrics.json").read_text())["is_finished"]
        self.number += 1
        predictions = self.folder / f"p{self.number}.csv"
        self.check(self.predict(run), predictions)
        assert predictions.read_bytes() == self.tables[name]
        return name

    def draw(self, kind: str, at: random.Random) -> dict[str, Any]:
        """Return a random moment of a call."""
        if at.random() < 0.5:
            return {"seconds": at.uniform(0, self.seconds[kind])}
        return {"event": at.randrange(self.events[kind])}

    def kill(self, kind: str, number: int, moment: dict[str, Any]) -> str:
        """Kill a call, check what it leaves, and return what that was."""
        self.number += 1
        place = self.folder / f"{kind}{self.number}"
        place.mkdir()
        check = {"fit": self.kill_fit, "overwrite": self.kill_overwrite}
        print(kind, number, moment)
        return check.get(kind, self.kill_predict)(place, signal=number, **moment)

    def kill_fit(self, place: Path, **moment: Any) -> str:
        run = place / "run"
        found = self.call(self.fit("new"), run, **moment)
        check_status(found, moment["signal"])
        if found["status"] == 0:
            assert self.which(run) == "new"
            return "new"
        had_checkpoint = (run / "last.ckpt").is_file()
        self.check([*self.fit("new"), "--resume"], run)
        assert self.which(run) == "new"
        check_clean(place)
        return "resumed" if had_checkpoint else "nothing"

    def kill_overwrite(self, place: Path, **moment: Any) -> str:
        run = place / "run"
        shutil.copytree(self.folder / "old", run)
        found = self.call([*self.fit("new"), "--overwrite"], run, **moment)
        check_status(found, moment["signal"])
        name = self.which(run)
        assert found["status"] != 0 or name == "new"
        if (run / NEXT / "config.yaml").is_file():
            self.check(["fit", "--progress=none", "--resume"], run)
            assert self.which(run) == "new"
            name += ", resumed"
        else:
            self.check(["fit", "--progress=none", "--resume"], run)
            assert self.which(run) == name
        check_clean(place)
        return name

    def kill_predict(self, place: Path, **moment: Any) -> str:
        output = place / "p.csv"
        output.write_bytes(self.tables["old"])
        found = self.call(self.predict(self.folder / "new"), output, **moment)
        check_status(found, moment["signal"])
        (name,) = [name for name in SEEDS if output.read_bytes() == self.tables[name]]
        assert found["status"] != 0 or name == "new"
        left = [path.name for path in place.iterdir() if path != output]
        assert all(PART_MARK in item for item in left)
        assert not left or moment["signal"] == signal.SIGKILL
        return name


def check_status(found: dict[str, Any], number: int) -> None:
    """After a signal outside of the command it is the system's, or 1 for Ctrl-C."""
    assert found["status"] in (0, -number, 128 + number, 1 if number == signal.SIGINT else 0), found
    assert "Traceback" not in found["log"], found["log"]


def check_clean(place: Path) -> None:
    """Nothing is left of deaths once a fit has gone to its end."""
    assert [path.name for path in place.iterdir()] == ["run"]
    named = json.loads((place / "run" / MANIFEST).read_text())["files"]
    assert {path.name for path in (place / "run").iterdir()} <= set(named)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("mortal.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    ) as process:  # ends when its input does
        yield World(tmp_path_factory.mktemp("kills"), process)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("overwrite", 9), ("overwrite", 15), ("fit", 9), ("predict", 9)],
)
def test_kill_leaves_the_old_or_the_new(kind: str, number: int, world: World) -> None:
    world.kill(kind, number, world.draw(kind, random.Random(f"{kind} {number}")))


@pytest.mark.slow
def test_fifty_kills_leave_the_old_or_the_new(world: World) -> None:
    at, counts = random.Random(0), Counter[str]()
    for turn in range(54):
        kind, number = KINDS[turn % 3], SIGNALS[turn // 3 % 3]
        left = world.kill(kind, number, world.draw(kind, at))
        counts[f"{kind} {number.name}: {left}"] += 1
    print("\n".join(f"{count:3d} {name}" for name, count in sorted(counts.items())))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_kill_at_each_file_of_a_replacement(number: signal.Signals, world: World) -> None:
    last = world.events["overwrite"]  # the swap, and what is written before it
    left = [world.kill("overwrite", number, {"event": k}) for k in range(last - 16, last)]
    assert {"old, resumed", "new"} <= set(left)
    print(Counter(left))
