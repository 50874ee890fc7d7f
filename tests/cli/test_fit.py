"""`osciformer fit`: settings, run folders, resuming."""

from __future__ import annotations

import csv
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from osciformer.cli.fit import fit
from osciformer.cli.settings import SETTINGS
from osciformer.config import TASKS, estimator_settings
from osciformer.estimators import load_estimator
from osciformer.saving import load_model

Call = Callable[..., Any]

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=2", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
ILL = ["--task=classification", "--id=who", "--time=hour", "--features=a,b", "--target=ill"]
ILL += ["--no-resonators"]


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_of_the_estimator_has_a_flag_and_its_default_in_the_help(task: str) -> None:
    flags = inspect.signature(fit).parameters
    for setting in estimator_settings(task).values():
        option = flags[setting.name].annotation.__metadata__[0]
        names = option.default, *option.param_decls  # typer takes the first name for a default
        assert names[0].split("/")[0] == setting.flag
        default = setting.defaults[task]
        if default not in (None, ()):
            words = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert words in option.help


@pytest.mark.parametrize("task", TASKS)
def test_run_folder_holds_config_seed_versions_metrics_history_and_model(
    task: str, runs: Path
) -> None:
    run = runs / task
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == task
    facts = json.loads((run / "run.json").read_text())
    assert facts["seed"] == 0
    assert {"osciformer", "torch", "python"} <= set(facts["versions"])
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["is_finished"]
    assert metrics["validation"]["loss"] > 0
    with (run / "history.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert load_model(run / "model.safetensors").content["params"]["dim"] == 8
    assert not list(run.glob(".*")) + list(run.glob("*.part"))


def test_scores_are_printed(cli: Call, tables: Path, tmp_path: Path) -> None:
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "auroc" in outcome.out
    assert str(tmp_path / "run") in outcome.out


def test_resonators_are_joined_unless_refused(cli: Call, runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "classification", tmp_path / "run")

    def found() -> tuple[bool, dict[str, float] | None]:
        metrics = json.loads((run / "metrics.json").read_text())
        is_joined = "resonator" in load_model(run / "model.safetensors").content
        return is_joined, metrics.get("blend_weights")

    is_joined, weights = found()
    assert is_joined
    assert weights is not None
    assert set(weights) == {"network", "resonators"}
    assert sum(weights.values()) == pytest.approx(1.0)
    # The network does not depend on them, so that a run may go on without.
    outcome = cli("fit", "--resume", "--no-resonators", "--progress=none", "-o", run)
    assert outcome.code == 0, outcome.err
    assert found() == (False, None)


def test_an_ensemble_is_a_flag_and_a_run_may_grow_one(
    cli: Call, runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "classification", tmp_path / "run")
    before = load_model(run / "model.safetensors").weights
    outcome = cli("fit", "--resume", "--ensemble-size=3", "--progress=none", "-o", run)
    assert outcome.code == 0, outcome.err
    saved = load_model(run / "model.safetensors")
    assert saved.content["params"]["ensemble_size"] == 3
    assert len(saved.content["more_histories"]) == 2
    own = [name for name in before if not name.startswith("resonator/")]
    for name in own:
        assert torch.equal(saved.weights[name], before[name])
        assert saved.weights["network-2/" + name].shape == before[name].shape
    assert json.loads((run / "metrics.json").read_text())["seconds"] == pytest.approx(
        sum(
            row["seconds"]
            for history in (saved.content["history"], *saved.content["more_histories"])
            for row in history
        )
    )


def test_flags_win_over_the_yaml_file(cli: Call, tables: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "task": "classification",
                "id": "who",
                "time": "hour",
                "target": "ill",
                "features": ["a", "b"],
                "table": str(tables / "wide.csv"),
                "dim": 16,
                "patience": None,
                "max-epochs": 1,
                "weight-averaging": 0.5,
                "statistics": ["last"],
                "resonators": False,
            }
        )
    )
    run = tmp_path / "run"
    more = ["--seed=7", "--statistics=std,age", "--blocks=resonator,attention"]
    outcome = cli("fit", "--config", config, *TINY, *more, "-o", run)
    assert outcome.code == 0, outcome.err
    estimator: Any = load_estimator(run / "model.safetensors")
    found = estimator.settings()
    assert (found["dim"], found["patience"], found["max_epochs"]) == (8, None, 2)
    assert found["random_state"] == 7
    assert (found["weight_averaging"], found["statistics"]) == (0.5, ("std", "age"))
    assert estimator.model_.config.blocks == found["blocks"] == ("resonator", "attention")


@pytest.mark.parametrize("flag", ["--foresight=0.2", "--keep-latest", "--no-keep-latest"])
def test_removed_flags_are_refused_by_name(
    flag: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, flag, "-o", tmp_path / "run")
    assert outcome.code == 2
    name = "--foresight" if "foresight" in flag else "--keep-latest"
    assert f"{name} was removed" in outcome.err
    assert name not in cli("fit", "--help").out


@pytest.mark.parametrize(
    ("text", "code"), [("foresight: 0.0\nkeep_latest: false", 0), ("foresight: 0.3", 1)]
)
def test_removed_settings_of_a_file_may_be_off(
    text: str, code: int, cli: Call, tables: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    call = ["fit", tables / "wide.csv", *ILL, *TINY, "--config", tmp_path / "run.yaml"]
    outcome = cli(*call, "-o", tmp_path / "run")
    assert outcome.code == code, outcome.err
    assert code == 0 or "without foresight" in outcome.err


def test_labels_may_come_from_another_table(cli: Call, tables: Path, tmp_path: Path) -> None:
    labels = ["--labels", tables / "outcomes.csv", "--labels-id=patient", "--target=ill"]
    narrow = ["--variable=variable", "--value=value", "--id=who", "--time=hour"]
    call = ["fit", tables / "narrow.csv", "--task=classification", *narrow, *labels, *TINY]
    outcome = cli(*call, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    score = cli("evaluate", tmp_path / "run", tables / "narrow.csv", *labels, "--json")
    assert set(json.loads(score.out)["metrics"]) >= {"auroc", "auprc", "log_loss"}


def test_stream_trains_and_predicts_from_disk(cli: Call, tables: Path, tmp_path: Path) -> None:
    narrow = ["--variable=variable", "--value=value", "--id=who", "--time=hour"]
    labels = ["--labels", tables / "outcomes.csv", "--labels-id=patient", "--target=ill"]
    call = ["fit", tables / "narrow.parquet", "--task=classification", *narrow, *labels, *TINY]
    outcome = cli(*call, "--stream", "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "read from disk" in outcome.err
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["stream"]
    files = tmp_path / "disk.csv", tmp_path / "memory.csv"
    for file, flag in zip(files, ("--stream", "--no-stream"), strict=True):
        done = cli("predict", tmp_path / "run", tables / "narrow.parquet", flag, "-o", file)
        assert done.code == 0, done.err
    assert files[0].read_text() == files[1].read_text()


def test_validation_table_takes_the_place_of_a_part(
    cli: Call, tables: Path, tmp_path: Path
) -> None:
    flags = ["--validation", tables / "wide.parquet", "--validation-fraction=0"]
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "run/metrics.json").read_text())["validation"]


def test_folder_that_is_not_empty_is_refused(cli: Call, runs: Path, tables: Path) -> None:
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "-o", runs / "regression")
    assert outcome.code == 1
    assert "--overwrite" in outcome.err
    assert yaml.safe_load((runs / "regression/config.yaml").read_text())["task"] == "regression"


def test_overwrite_replaces_a_run(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "regression", run)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run)
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == "classification"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_failed_overwrite_keeps_the_old_run(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "regression", run)
    before = (run / "model.safetensors").read_bytes()
    wrong = cli(
        "fit", tables / "wide.csv", *ILL, *TINY, "--monitor=beauty", "--overwrite", "-o", run
    )
    assert wrong.code == 1
    assert "beauty" in wrong.err
    assert (run / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_overwrite_leaves_foreign_folders_alone(cli: Call, tables: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", tmp_path)
    assert outcome.code == 1
    assert "leaves it alone" in outcome.err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_interrupted_run_goes_on_to_the_same_weights(
    cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.train.callbacks import RunWriter

    call = ["fit", tables / "wide.csv", *ILL, *TINY, "--epochs=3"]
    assert cli(*call, "-o", tmp_path / "whole").code == 0
    write = RunWriter.on_train_epoch_end

    def write_and_stop(self: Any, trainer: Any, module: Any) -> None:
        write(self, trainer, module)
        if trainer.current_epoch == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunWriter, "on_train_epoch_end", write_and_stop)
    stopped = cli(*call, "-o", tmp_path / "part")
    monkeypatch.undo()
    assert stopped.code == 130
    assert f"osciformer fit --resume -o {tmp_path / 'part'}" in stopped.err
    assert not json.loads((tmp_path / "part/metrics.json").read_text())["is_finished"]
    assert (
        cli("predict", tmp_path / "part", tables / "wide.csv", "-o", tmp_path / "p.csv").code == 0
    )

    resumed = cli("fit", "--resume", "-o", tmp_path / "part", "--progress=none")
    assert resumed.code == 0, resumed.err
    one, two = (load_model(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    for name in one.weights:  # NaN fills tables of resonators
        np.testing.assert_array_equal(one.weights[name], two.weights[name])


@pytest.mark.parametrize("had_run", [True, False])
def test_ctrl_c_in_the_first_epoch_leaves_what_was_there(
    had_run: bool,
    cli: Call,
    tables: Path,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from osciformer.train.callbacks import Journal

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    if had_run:
        shutil.copytree(runs / "regression", run)
    monkeypatch.setattr(Journal, "on_train_epoch_end", stop)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run)
    assert outcome.code == 130
    assert "nothing is kept" in outcome.err
    if had_run:
        assert yaml.safe_load((run / "config.yaml").read_text())["task"] == "regression"
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if had_run else [])


def test_series_files_need_no_columns(cli: Call, tables: Path, tmp_path: Path) -> None:
    from osciformer.data import read_csv, save_npz

    series = read_csv(tables / "wide.csv", id="who", time="hour", values=["a", "b"], label="ill")
    save_npz(series, tmp_path / "s.npz")
    run, output = tmp_path / "run", tmp_path / "p.csv"
    outcome = cli("fit", tmp_path / "s.npz", "--task=classification", *TINY, "-o", run)
    assert outcome.code == 0, outcome.err
    assert cli("evaluate", run, tmp_path / "s.npz", "--bootstrap=0").code == 0
    assert cli("predict", run, tmp_path / "s.npz", "-o", output).code == 0
    refused = cli("predict", run, tables / "wide.csv", "-o", output)
    assert refused.code == 1
    assert ".npz" in refused.err


def test_resume_refuses_other_data(
    cli: Call, runs: Path, tables: Path, frame: Any, tmp_path: Path
) -> None:
    shutil.copytree(runs / "classification", tmp_path / "run")
    frame[frame.who < 30].to_parquet(tmp_path / "fewer.parquet")
    outcome = cli("fit", tmp_path / "fewer.parquet", "--resume", "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "other series: 40, not 30" in outcome.err


def test_finished_run_that_is_resumed_stays_as_it_is(cli: Call, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "classification", tmp_path / "run")
    outcome = cli("fit", "--resume", "-o", tmp_path / "run", "--progress=none")
    assert outcome.code == 0, outcome.err
    one, two = (
        load_model(run / "model.safetensors") for run in (runs / "classification", tmp_path / "run")
    )
    for name in one.weights:  # NaN fills tables of resonators
        np.testing.assert_array_equal(one.weights[name], two.weights[name])


@pytest.mark.parametrize(("task", "default"), [("classification", 0.2), ("forecasting", 0.1)])
def test_resume_refuses_other_settings(
    cli: Call, runs: Path, tmp_path: Path, task: str, default: float
) -> None:
    shutil.copytree(runs / task, tmp_path / "run")
    outcome = cli("fit", "--resume", "--dropout=0.5", "-o", tmp_path / "run")
    assert outcome.code == 2
    assert f"--dropout was {default} when the run was begun, and is 0.5" in outcome.err
    outcome = cli(
        "fit", "--resume", f"--dropout={default}", "--progress=none", "-o", tmp_path / "run"
    )
    assert outcome.code == 0, outcome.err


def test_run_with_defaults_of_an_older_version_goes_on_with_them(
    cli: Call, runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "classification", run)
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    del checkpoint["osciformer.config"]["weight_averaging"]
    del checkpoint["callbacks"]["osciformer.average"]
    checkpoint["osciformer.config"]["learning_rate"] = 2e-3
    torch.save(checkpoint, run / "last.ckpt")
    call = ["fit", "--resume", "-o", run, "--progress=none"]
    outcome = cli(*call)
    assert outcome.code == 1
    assert "rate was 0.002, is 0.001; weight_averaging was 0.0, is 0.99" in outcome.err
    outcome = cli(*call, "--weight-averaging=0", "--learning-rate=0.002")
    assert outcome.code == 0, outcome.err


def test_resume_needs_a_run(cli: Call, tmp_path: Path) -> None:
    outcome = cli("fit", "--resume", "--task=regression", "-o", tmp_path / "none")
    assert outcome.code == 2
    assert "no run to resume" in outcome.err


def environment() -> Mapping[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_a_checkpoint(number: int, code: int, tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call = [sys.executable, "-m", "osciformer", "fit", tables / "wide.csv", *ILL, *TINY]
    process = subprocess.Popen(
        [*map(str, call), "--epochs=5000", "--patience=none", "-o", str(run)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (run / "last.ckpt").is_file() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert "osciformer fit --resume" in err
    assert "Traceback" not in err
    assert (run / "model.safetensors").is_file()


def test_signal_outside_of_training_has_its_exit_code(
    cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.cli import tables as reading

    def stop(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(reading, "open_table", stop)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 143
    assert "terminated" in outcome.err
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.dist
def test_same_command_under_torchrun_gives_the_same_model(
    cli: Call, tables: Path, tmp_path: Path
) -> None:
    steady = ["--dropout=0", "--observation-dropout=0"]
    call = ["fit", str(tables / "wide.csv"), *ILL, *TINY, *steady]
    assert cli(*call, "-o", tmp_path / "one").code == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "osciformer", *call, "-o", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder") == 1
    one, two = (load_model(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.weights.items():
        # A bias of keys adds the same to all logits: its gradient is rounding alone.
        if not name.endswith("in_proj_bias"):
            torch.testing.assert_close(two.weights[name], weight, rtol=1e-4, atol=1e-5)


def test_settings_have_distinct_flags() -> None:
    flags = [flag for s in SETTINGS.values() for flag in (s.flag, s.short) if flag]
    assert len(set(flags)) == len(flags)
