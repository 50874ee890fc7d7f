"""`data`, `info`, `bench`, `demo`, and the program itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from osciformer.data import IrregularSeries, load_npz

Call = Callable[..., Any]

HEAVY = ("torch", "pandas", "pyarrow", "pytorch_lightning", "sklearn", "matplotlib", "scipy")


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        pytest.param(["--help"], 0, "evaluate", id="help"),
        pytest.param(["fit", "--help"], 0, "--num-layers", id="help of a command"),
        pytest.param(["--version"], 0, "osciformer ", id="version"),
        pytest.param(["fit", "--dimm=3"], 2, "--dim", id="unknown flag"),
        pytest.param(
            ["fit", "no.csv", "--task=classify", "--output=x"], 2, "classification", id="task"
        ),
        pytest.param(
            ["fit", "no.csv", "--task=regression", "--output=x"], 1, "no file", id="missing table"
        ),
        pytest.param(
            ["predict", "no", "no.csv", "--output=x.csv"], 1, "no run folder", id="no run"
        ),
    ],
)
def test_help_and_wrong_calls_import_nothing_heavy(
    arguments: list[str], code: int, shown: str, tmp_path: Path
) -> None:
    program = (
        f"import sys\nfrom osciformer.cli import main\ncode = main({arguments})\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == code, result.stderr
    assert result.stderr.strip().endswith("[]")
    assert shown in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []


def test_module_is_the_program() -> None:
    source = str(Path(__file__).parents[2] / "src")
    result = subprocess.run(
        [sys.executable, "-m", "osciformer", "nonsense"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert result.returncode == 2
    assert "nonsense" in result.stderr


def test_info_names_versions_and_the_backend(cli: Call) -> None:
    content = json.loads(cli("info", "--json").out)
    assert "torch" in content["versions"]
    assert "blocked" in content["backends"]["cpu float32"]
    assert "blocked" in cli("info").out


def test_data_list_describe_and_errors(cli: Call) -> None:
    assert "physionet2012" in cli("data", "list").out
    assert "physionet2012" not in cli("data", "list", "--task=events").out
    assert cli("data", "list", "--task=cooking").code == 2
    assert "ODC-By" in cli("data", "describe", "physionet2012").out
    wrong = cli("data", "describe", "physionet2013")
    assert wrong.code == 1
    assert "did you mean 'physionet2012'" in wrong.err


def test_data_describe_sums_up_a_table(cli: Call, tables: Path) -> None:
    flags = ["--id=who", "--time=hour", "--variable=variable", "--value=value"]
    outcome = cli("data", "describe", tables / "narrow.csv", *flags)
    assert outcome.code == 0, outcome.err
    assert "40 series" in outcome.out


@pytest.fixture
def toy_set(monkeypatch: pytest.MonkeyPatch) -> str:
    from osciformer.data import registry
    from osciformer.data.dataset_info import DatasetInfo, Request, Source

    def load(request: Request) -> IrregularSeries:
        return IrregularSeries.from_arrays(
            [[0.0, 1.0], [2.0]],
            [[[1.0], [2.0]], [[3.0]]],
            feature_names=("Weight",),
            static=[[70.0], [80.0]],
            static_names=("Weight",),
            labels=[0, 1],
        )

    info = DatasetInfo(
        name="toy",
        description="Two series.",
        task="classification",
        splits=("train",),
        split_definition="All.",
        licence="none",
        citation="none",
        local=Source(files=(), load=load),
    )
    monkeypatch.setitem(registry._REGISTRY, "toy", info)
    monkeypatch.setattr(registry, "find_files", lambda info, *_: (info.local, {}))
    return "toy"


@pytest.mark.parametrize("ending", ["csv", "parquet", "npz"])
def test_data_get_writes_a_split(ending: str, cli: Call, toy_set: str, tmp_path: Path) -> None:
    path = tmp_path / f"toy.{ending}"
    outcome = cli("data", "get", toy_set, "--split=train", "-o", path)
    assert outcome.code == 0, outcome.err
    if ending == "npz":
        assert len(load_npz(path)) == 2
        return
    found = pd.read_csv(path) if ending == "csv" else pd.read_parquet(path)
    assert list(found) == ["id", "time", "Weight", "static_Weight", "label"]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_data_get_without_output_names_files(cli: Call, toy_set: str, tmp_path: Path) -> None:
    assert cli("data", "get", toy_set).code == 0
    assert cli("data", "get", toy_set, "-o", tmp_path / "x.csv").code == 2
    assert cli("data", "get", toy_set, "--split=train", "-o", tmp_path / "x.doc").code == 2


def test_data_describe_reads_from_disk(cli: Call, tables: Path) -> None:
    flags = ["--id=who", "--time=hour", "--stream"]
    outcome = cli("data", "describe", tables / "wide.parquet", *flags)
    assert outcome.code == 0, outcome.err
    assert "read from disk" in outcome.out


def test_bench_passes_its_arguments_on(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import osciformer.bench.__main__ as bench

    seen: list[list[str]] = []
    monkeypatch.setattr(bench, "main", lambda argv: seen.append(list(argv)) or 3)
    assert cli("bench", "speed", "--quick", "--n", "64").code == 3
    assert seen == [["speed", "--quick", "--n", "64"]]


def test_demo_compares_and_leaves_a_usable_model(cli: Call, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    outcome = cli("demo", "--size=60", "--epochs=1", "-o", run)
    assert outcome.code == 0, outcome.err
    assert "boosting on summaries" in outcome.out
    assert "change of log-odds" in outcome.out
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert f"to open in a browser: {run / 'report.html'}" in outcome.out
    scores = json.loads((run / "test_metrics.json").read_text())
    for model in ("OsciFormer", "resonators alone", "boosting on summaries"):
        assert {"auroc", "auprc"} <= set(scores[model])
    assert "Goldberger" in (run / "ATTRIBUTION.txt").read_text()
    call = ["predict", run, run / "stays-test.parquet", "-o", tmp_path / "p.csv"]
    assert cli(*call).code == 0
    assert len(pd.read_csv(tmp_path / "p.csv")) == 500
    assert cli("demo", "--size=60", "--epochs=1", "-o", run).code == 0  # replaces the first


def test_demo_computes_in_one_thread_and_leaves_their_number(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from osciformer.cli import fit

    seen: list[int] = []

    def fail(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise OSError("no training here")

    monkeypatch.setattr(fit, "train", fail)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert cli("demo", "--size=60", "-o", tmp_path / "demo").code == 1
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_demo_data_are_small_and_attributed() -> None:
    folder = files("osciformer") / "demo_data"
    size = sum(len((folder / f"stays-{part}.parquet").read_bytes()) for part in ("train", "test"))
    assert size < 1_500_000
    text = (folder / "ATTRIBUTION.txt").read_text(encoding="utf-8")
    assert "Silva" in text
    assert "ODC-By" in text
