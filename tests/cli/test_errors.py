"""Errors say what is wrong and what to do, with an exit code, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer._advice import Mention, advise
from osciformer.cli.errors import explain

Call = Callable[..., Any]

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=1", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
COLUMNS = ["--id=who", "--time=hour", "--features=a,b"]
ILL = ["--task=classification", "--no-resonators", *COLUMNS, "--target=ill"]


def change(frame: Any, **columns: Any) -> Any:
    return frame.assign(**columns)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        pytest.param([*ILL[:-1], "--target=il"], "did you mean 'ill'", id="missing column"),
        pytest.param([*ILL, "--features=a,c"], "'c'", id="missing feature"),
        pytest.param(["--task=classify"], "did you mean 'classification'", id="unknown task"),
        pytest.param([], "--task is needed", id="no task"),
        pytest.param(["--task=classification"], "--id is needed", id="no id"),
        pytest.param(ILL[:-1], "--target is needed", id="no target"),
        pytest.param([*ILL, "--dim=wide"], "--dim must be a whole number", id="no number"),
        pytest.param([*ILL, "--horizon=3"], "setting of forecasting", id="other task"),
        pytest.param([*ILL, "--class-weight={a"], "JSON", id="no JSON"),
        pytest.param([*ILL, "--progress=ba"], "did you mean 'bar'", id="progress"),
        pytest.param([*ILL, "--precision=half"], "precision must be one of", id="precision"),
        pytest.param([*ILL, "--labels=none.csv", "--labels-id=x"], "no file", id="no labels"),
        pytest.param(["--task=imputation", *COLUMNS, "--target=z"], "no feature 'z'", id="z"),
    ],
)
def test_wrong_calls_are_explained(
    flags: list[str], wanted: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    outcome = cli("fit", tables / "wide.parquet", *TINY, *flags, "-o", run)
    assert outcome.code in (1, 2)
    assert wanted in outcome.err
    assert "Traceback" not in outcome.err
    assert not run.exists()


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        pytest.param({"ill": 1}, "one class only", id="one class"),
        pytest.param({"a": np.nan, "b": np.nan}, "all values of all 40 series", id="all missing"),
        pytest.param({"hour": "noon"}, "--time-format iso", id="times as text"),
        pytest.param({"ill": 0.5}, "Use --task regression", id="no class"),
        pytest.param({"a": "high"}, "must hold numbers", id="text as feature"),
        pytest.param({"hour": 1.0}, "--duplicates", id="equal times"),
    ],
)
def test_wrong_data_are_explained(
    columns: dict[str, Any], wanted: str, cli: Call, frame: Any, tmp_path: Path
) -> None:
    table, run = tmp_path / "table.parquet", tmp_path / "run"
    change(frame, **columns).to_parquet(table)
    outcome = cli("fit", table, *ILL, *TINY, "-o", run)
    assert outcome.code == 1
    assert wanted in outcome.err
    assert "Traceback" not in outcome.err
    assert not run.exists()


def test_series_without_values_can_be_dropped(cli: Call, frame: Any, tmp_path: Path) -> None:
    empty = frame.who == 3
    table = tmp_path / "table.parquet"
    change(frame, a=frame.a.mask(empty), b=frame.b.mask(empty)).to_parquet(table)
    refused = cli("fit", table, *ILL, *TINY, "-o", tmp_path / "run")
    assert refused.code == 1
    assert "--empty drop" in refused.err
    assert cli("fit", table, *ILL, *TINY, "--empty=drop", "-o", tmp_path / "run").code == 0


@pytest.mark.parametrize("name", ["cut.parquet", "cut.csv.gz", "no.parquet", "table.xyz"])
def test_unreadable_files_are_explained(name: str, cli: Call, tables: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "cut.parquet":
        path.write_bytes((tables / "wide.parquet").read_bytes()[:-400])
    elif name != "no.parquet":
        path.write_bytes(b"\x1f\x8b not what it seems")
    outcome = cli("fit", path, *ILL, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert str(path) in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("drop_out: 0.1", "did you mean 'dropout'", id="unknown key"),
        pytest.param("dim: wide", "must be a whole number", id="wrong kind"),
        pytest.param("carry: 3", "true or false", id="no switch"),
        pytest.param("- a", "must hold lines", id="no mapping"),
        pytest.param("a: [", "cannot be read as YAML", id="no YAML"),
    ],
)
def test_config_file_is_checked(
    text: str, wanted: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    outcome = cli("fit", tables / "wide.csv", *ILL, "--config", config, "-o", tmp_path / "run")
    assert outcome.code in (1, 2)
    assert wanted in outcome.err
    assert str(config) in outcome.err


@pytest.mark.parametrize("kind", ["foreign", "pickle", "damaged", "folder", "nothing"])
def test_foreign_models_are_refused(
    kind: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.safetensors"
    if kind == "foreign":
        from safetensors.torch import save_file

        save_file({"w": torch.ones(2)}, model)
    elif kind == "pickle":
        torch.save({"w": torch.ones(2)}, model)
    elif kind == "damaged":
        model.write_bytes((runs / "regression/model.safetensors").read_bytes())
        cut_short(model)
    elif kind == "folder":
        model.mkdir()
    outcome = cli("predict", model, tables / "wide.csv", "-o", tmp_path / "p.csv")
    assert outcome.code == 1
    assert str(model) in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "p.csv").exists()


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predictions_that_cannot_be_written_leave_nothing(
    ending: str, cli: Call, runs: Path, tables: Path, tmp_path: Path, small_disk: None
) -> None:
    output = tmp_path / f"p.{ending}"
    outcome = cli("predict", runs / "imputation", tables / "wide.parquet", "-o", output)
    assert outcome.code == 1
    assert "no room left on the disk" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_full_disk_while_predicting_keeps_the_old_file(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "p.csv"
    output.write_text("old")
    monkeypatch.setattr("pyarrow.table", no_room)
    outcome = cli("predict", runs / "regression", tables / "wide.csv", "-o", output)
    assert outcome.code == 1
    assert "no room left on the disk" in outcome.err
    assert output.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


@pytest.mark.parametrize(
    "place", ["osciformer.train.callbacks.write_history", "osciformer.saving.write_bytes"]
)
def test_full_disk_while_training_leaves_no_half_written_run(
    place: str, cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(place, no_room)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "-o", run)
    assert outcome.code == 1
    assert "no room left on the disk" in outcome.err
    assert not (run / "model.safetensors").exists()
    # Either there is nothing, or a checkpoint from which to go on.
    assert not run.exists() or (run / "last.ckpt").is_file()
    monkeypatch.undo()
    if run.exists():
        assert cli("fit", "--resume", "-o", run, "--progress=none").code == 0
        assert (run / "model.safetensors").is_file()


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no file of this process grow beyond a kilobyte."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_disk")
def test_checkpoint_that_cannot_be_written_leaves_no_run(
    cli: Call, tables: Path, tmp_path: Path
) -> None:
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "no room left on the disk" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(cli: Call, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cli("fit", tmp_path / "no.csv", *ILL, "-o", tmp_path / "run", "--debug")


def test_ctrl_c_elsewhere_ends_with_130(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyarrow.table", stop)
    outcome = cli("predict", runs / "regression", tables / "wide.csv", "-o", tmp_path / "p.csv")
    assert outcome.code == 130
    assert list(tmp_path.iterdir()) == []


def test_unknown_option_ends_with_2(cli: Call) -> None:
    assert cli("fit", "--no-such-option").code == 2


def test_torch_that_cannot_write_means_a_full_disk() -> None:
    error = RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3")
    assert "no room left" in explain(error)


def test_what_was_not_foreseen_names_its_kind() -> None:
    assert "--debug" in explain(AssertionError("odd"))


@pytest.mark.parametrize(
    ("mention", "python", "flag"),
    [
        (Mention("origin", "series"), "origin='series'", "--origin series"),
        (Mention("values", ["a", "b"]), "values=['a', 'b']", "--features a,b"),
        (Mention("random_state"), "random_state", "--seed"),
        (Mention("blend_with", None), "blend_with=None", "--blend-with none"),
        (Mention("stream", False, "read_parquet"), "read_parquet", "--no-stream"),
        (Mention("other", 3), "other=3", "other=3"),
        (
            Mention("data list", python="list_datasets()"),
            "list_datasets()",
            "`osciformer data list`",
        ),
    ],
)
def test_advice_speaks_of_flags(mention: Mention, python: str, flag: str) -> None:
    error = advise(TypeError, "use ", mention, " here")
    assert str(error) == f"use {python} here"
    assert explain(error) == f"use {flag} here"


def test_program_without_its_extras_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['typer'] = None\n"
        "from osciformer.cli import main; sys.exit(main(['info']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "osciformer[cli]"' in result.stderr


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        pytest.param(["--accelerator=gpu"], "--accelerator gpu needs a CUDA device", id="gpu"),
        pytest.param(["--strategy=fsdp"], "--strategy fsdp needs GPUs", id="fsdp"),
        pytest.param(["--accelerator=tpu"], "one of 'auto', 'cpu', 'gpu'; got 'tpu'", id="tpu"),
    ],
)
def test_devices_that_are_not_there_are_refused_before_the_table_is_read(
    flags: list[str],
    wanted: str,
    cli: Call,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, *flags, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert wanted in outcome.err
    assert "series" not in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accelerator", ["gpu", "tpu"])
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_predictions_without_the_device_are_refused(
    command: str,
    accelerator: str,
    cli: Call,
    runs: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = [command, runs / "regression", tables / "wide.csv", f"--accelerator={accelerator}"]
    outcome = cli(*call, "-o", tmp_path / "p.csv")
    assert outcome.code == 1
    assert accelerator in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_missing_logger_is_said_before_the_table_is_read(
    cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--task=imputation", "--id=who", "--time=hour", "--logger=wandb"]
    outcome = cli("fit", tables / "wide.csv", *flags, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert outcome.err.strip().endswith("run: pip install wandb")
    assert "error: --logger wandb needs" in outcome.err
    assert "series" not in outcome.err
    assert not (tmp_path / "run").exists()
