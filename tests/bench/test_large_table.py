"""The benchmark of a large table: its data, its arithmetic, how it sees memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .scripts import load

pytest.importorskip("pyarrow")
(script,) = load("large_table")

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")


def test_tables_of_any_size_begin_with_the_same_rows() -> None:
    small, large = (next(script.make_groups(count)) for count in (1250, 2600))
    assert small.equals(large)
    assert sum(group.num_rows for group in script.make_groups(2600)) == 2600 * script.ROWS


def test_class_moves_the_level_of_irregular_series(tmp_path: Path) -> None:
    from osciformer.data import read_parquet

    path = tmp_path / "a.parquet"
    script.write_table(path, 60)
    series = read_parquet(path, id="series", time="time", label="label")
    assert series.lengths.tolist() == [script.ROWS] * 60
    assert len(np.unique(np.diff(series[0].times))) == script.ROWS - 1
    missing = float(np.isnan(series.values).mean())
    assert missing == pytest.approx(script.MISSING, abs=0.01)
    level = np.array([np.nanmean(one.values[:, 0]) for one in series])
    assert ((level > 0) == series.labels).mean() > 0.9


def cost(command: str, rows: int, peak: float) -> Any:
    return script.Cost(command, rows, 1.0, 1.0, rows, peak)


def test_growth_compares_the_two_largest_tables() -> None:
    costs = [cost("fit", 10, 99.0), cost("fit", 2**20, 100.0), cost("fit", 2**21, 110.0)]
    found = script.growth(costs)
    assert found == {"fit": {"rows": 2.0, "memory": 1.1, "bytes_per_added_row": 10.0}}
    text = script.markdown(costs, found)
    assert "| fit | 2,097,152 | 1.0 | 1.0 | 2,097,152 | 110 |" in text
    assert "2 times the rows take 1.10 times the memory" in text


@needs_proc
def test_memory_of_a_process_and_its_children_is_seen() -> None:
    hold = "x = bytearray(64 << 20); x[::4096] = bytes(len(x[::4096])); input()"
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {hold!r}], stdin=subprocess.PIPE)\n"
        f"{hold}\nchild.communicate(b'x')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    watch = script.MemoryWatch(process.pid)
    for _ in range(2000):
        watch.look()
        if watch.peak > 128 << 20:
            break
    process.communicate(b"x")
    assert 128 << 20 < watch.peak < 220 << 20
    assert script.resident(process.pid, "VmRSS") == 0


@needs_proc
def test_failing_command_is_shown() -> None:
    with pytest.raises(RuntimeError, match="No such command"):
        script.measure("read", ["nonsense"], 1)


@needs_proc
@pytest.mark.slow
def test_all_commands_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PARTS", (2, 1))
    output, table = tmp_path / "a.json", tmp_path / "a.md"
    flags = ["--flags=--dim=8 --num-layers=1 --num-heads=1"]
    call = ["--series=80", *flags, f"--output={output}", f"--table={table}"]
    assert script.main([*call, f"--folder={tmp_path}"]) == 0
    report = json.loads(output.read_text())
    assert [c["command"] for c in report["costs"]] == ["read", "fit", "predict"] * 2
    assert all(c["peak_mib"] > 50 and c["rows_per_s"] > 0 for c in report["costs"])
    assert [facts["predictions"] for facts in report["tables"]] == [40, 80]
    assert [facts["distinct_ids"] for facts in report["tables"]] == [40, 80]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.md"]
