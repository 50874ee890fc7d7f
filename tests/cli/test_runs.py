"""Run folders: what is the user's stays, what is ours is replaced as a whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from osciformer._files import PART_MARK
from osciformer.cli import runs as folders
from osciformer.cli.runs import CARD, CHECKPOINT, MANIFEST, NEXT, PART, READY, WRITTEN
from osciformer.saving import load_model

Call = Callable[..., Any]

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=2", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
ILL = ["--task=classification", "--id=who", "--time=hour", "--features=a,b", "--target=ill"]
ILL += ["--no-resonators"]


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """Return a run that may be changed; its task is regression."""
    return shutil.copytree(runs / "regression", tmp_path / "run")


def content(folder: Path) -> dict[str, Any]:
    """Return files by name, links as what they lead to."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def task_of(run: Path) -> str:
    found: str = yaml.safe_load((run / "config.yaml").read_text())["task"]
    return found


class Killed(BaseException):
    """Stands for a kill: nothing may be put right afterwards."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die at the call of this number, from the swap on, of what changes the folder."""
    left = [number]

    def mortal(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    move_in = folders._move_in

    def move_mortally(path: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", mortal(os.replace))
            patch.setattr(folders, "_remove", mortal(folders._remove))
            move_in(path)

    monkeypatch.setattr(folders, "_move_in", move_mortally)


def test_manifest_names_the_files_of_each_run(runs: Path) -> None:
    for folder in runs.iterdir():
        named = json.loads((folder / MANIFEST).read_text())["files"]
        assert {path.name for path in folder.iterdir()} <= set(named) <= WRITTEN


@pytest.mark.parametrize("flags", [["--learning-rate=0"], ["--monitor=beauty"]])
def test_failed_resume_touches_nothing(
    flags: list[str], cli: Call, tables: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("alias")
    (home / "download.part").write_text("half")
    before = content(home)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, *flags, "--resume", "-o", home)
    assert outcome.code != 0
    assert content(home) == before


@pytest.mark.parametrize("name", [".git/HEAD", "table.csv", "curves.png", ".env", "last.part.txt"])
def test_overwrite_refuses_a_run_folder_with_files_of_others(
    name: str, cli: Call, tables: Path, run: Path
) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("precious")
    before = content(run)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run)
    assert outcome.code == 1
    assert name.split("/")[0] in outcome.err
    assert "leaves it alone" in outcome.err
    assert content(run) == before


@pytest.mark.parametrize("files", [["config.yaml"], ["config.yaml", "src.py"], ["metrics.json"]])
@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_folder_with_a_configuration_of_something_else_is_left_alone(
    flag: str, files: list[str], cli: Call, tables: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in files:
        (project / name).write_text("task: classification")
    before = content(project)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, flag, "-o", project)
    assert outcome.code == 1, outcome.err
    assert files[0] in outcome.err
    assert content(project) == before


def test_manifest_cannot_name_files_of_others(cli: Call, tables: Path, run: Path) -> None:
    (run / "thesis.txt").write_text("precious")
    named = ["thesis.txt", "../table.csv", "config.yaml"]
    (run / MANIFEST).write_text(json.dumps({"files": named}))
    before = content(run)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run)
    assert outcome.code == 1
    assert content(run) == before


def test_table_of_the_run_that_would_be_replaced_is_refused(cli: Call, run: Path) -> None:
    for name in (MANIFEST, CARD):  # as a demo of an older version
        (run / name).unlink()
    (run / "stays-train.parquet").write_bytes(b"a table")
    before = content(run)
    flags = [*ILL, *TINY, "--overwrite"]
    outcome = cli("fit", run / "stays-train.parquet", *flags, "-o", run)
    assert outcome.code == 1
    assert "copy it" in outcome.err
    assert content(run) == before


def test_run_of_an_older_version_can_be_replaced(cli: Call, tables: Path, run: Path) -> None:
    for name in (MANIFEST, CARD):
        (run / name).unlink()
    (run / "last.part").write_bytes(b"half")
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1.host").write_bytes(b"log")
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run)
    assert outcome.code == 0, outcome.err
    assert task_of(run) == "classification"
    assert {path.name for path in run.iterdir()} == set(
        json.loads((run / MANIFEST).read_text())["files"]
    )


def test_linked_run_folder_stays_a_link(cli: Call, tables: Path, run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", link)
    assert outcome.code == 0, outcome.err
    assert os.readlink(link) == str(run)
    assert task_of(run) == "classification"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "run"}


@pytest.fixture
def stopped(cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run that has two epochs before it."""
    call = ["fit", tables / "wide.csv", *ILL, *TINY, "--epochs=3", "-o", tmp_path / "stopped"]
    with monkeypatch.context() as patch:
        stop_after_the_first_epoch(patch)
        assert cli(*call).code == 130
    return tmp_path / "stopped"


def stop_after_the_first_epoch(patch: pytest.MonkeyPatch) -> None:
    from osciformer.train.callbacks import RunWriter

    write = RunWriter.on_train_epoch_end

    def write_and_stop(self: Any, trainer: Any, module: Any) -> None:
        write(self, trainer, module)
        if trainer.current_epoch == 0:
            raise KeyboardInterrupt

    patch.setattr(RunWriter, "on_train_epoch_end", write_and_stop)


@pytest.mark.parametrize("name", ["last.part", "history.part", "history.csv", "last.ckpt"])
def test_links_in_a_run_folder_are_not_written_through(
    name: str, cli: Call, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def rename_within(source: Any, target: Any, **options: Any) -> None:
        # Lightning moves checkpoints from there, and copies them from another file system.
        if Path(source).parent == Path(tempfile.gettempdir()):
            raise OSError(errno.EXDEV, "another file system")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", rename_within)
    outside, link = tmp_path / "outside", stopped / name
    outside.write_bytes(link.read_bytes() if link.exists() else b"precious")
    before = outside.read_bytes()
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    outcome = cli("fit", "--resume", "--progress=none", "-o", stopped)
    assert outside.read_bytes() == before
    if name == "last.part":  # which older versions wrote, and nobody else should
        assert outcome.code == 1
        assert "'last.part'" in outcome.err
        return
    assert outcome.code == 0, outcome.err
    assert len((stopped / "history.csv").read_text().splitlines()) == 4
    assert outside.stat().st_nlink == 1


@pytest.mark.parametrize("name", [NEXT, PART, READY, "tensorboard"])
def test_linked_folders_in_a_run_folder_are_refused(
    name: str, cli: Call, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (run / name).symlink_to(tmp_path / "outside")
    outcome = cli("fit", "--resume", "--progress=none", "-o", run)
    assert outcome.code == 1
    assert "is a link" in outcome.err
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_kill_while_files_are_put_in_place_leaves_the_new_run(
    number: int,
    cli: Call,
    tables: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_at(monkeypatch, number)
    call = ["fit", tables / "wide.csv", *ILL, *TINY, "--overwrite", "-o", run]
    was_killed = False
    try:
        cli(*call)
    except Killed:
        was_killed = True
    assert was_killed or number > 6
    monkeypatch.undo()
    # All is new to those who read it, before and after it is put in place.
    assert yaml.safe_load(folders.located(run, "config.yaml").read_text())["task"] == (
        "classification"
    )
    done = cli("predict", run, tables / "wide.csv", "-o", tmp_path / "p.csv")
    assert done.code == 0, done.err
    assert "probability_1" in (tmp_path / "p.csv").read_text()
    again = cli("fit", "--resume", "--progress=none", "-o", run)
    assert again.code == 0, again.err
    assert ("killed while" in again.err) == was_killed
    assert {path.name for path in run.iterdir()} == set(
        json.loads((run / MANIFEST).read_text())["files"]
    )


def test_unfinished_replacement_leaves_the_old_run_and_goes_on(
    cli: Call, tables: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["fit", tables / "wide.csv", *ILL, *TINY, "--epochs=3"]
    assert cli(*call, "-o", tmp_path / "whole").code == 0
    before = content(run)
    with monkeypatch.context() as patch:
        stop_after_the_first_epoch(patch)
        stopped = cli(*call, "--overwrite", "-o", run)
    assert stopped.code == 130
    assert f"osciformer fit --resume -o {run}" in stopped.err
    assert {k: v for k, v in content(run).items() if NEXT not in k} == before
    assert (run / NEXT / CHECKPOINT).is_file()
    refused = cli(*call, "-o", run)
    assert refused.code == 1
    resumed = cli("fit", "--resume", "--progress=none", "-o", run)
    assert resumed.code == 0, resumed.err
    one, two = (content(tmp_path / name) for name in ("whole", "run"))
    assert one.keys() == two.keys()
    first, second = (load_model(tmp_path / x / "model.safetensors") for x in ("whole", "run"))
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(second.weights[name], weight)
    assert json.loads(two["metrics.json"])["num_epochs"] == 3


def test_what_a_kill_left_is_mentioned_and_removed(cli: Call, tables: Path, run: Path) -> None:
    ours, foreign = (
        f".history.0123456789abcdef{PART_MARK}.csv",
        f".thesis.0123456789abcdef{PART_MARK}.csv",
    )
    (run / ours).write_text("half")
    (run / PART).mkdir()
    (run / PART / "model.safetensors").write_bytes(b"half")
    (run / NEXT).mkdir()  # of a fit that was killed before it wrote its settings
    (run / NEXT / MANIFEST).write_text("{}")
    (run / foreign).write_text("precious")
    outcome = cli("fit", "--resume", "--progress=none", "-o", run)
    assert outcome.code == 0, outcome.err
    assert ours in outcome.err
    assert not (run / ours).exists()
    assert not (run / PART).exists()
    assert not (run / NEXT).exists()
    assert (run / foreign).exists()


def test_failed_call_leaves_no_folders(cli: Call, tables: Path, tmp_path: Path) -> None:
    outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, "--dim=0", "-o", tmp_path / "a/b/c")
    assert outcome.code != 0
    assert not (tmp_path / "a").exists()


def test_folder_that_another_process_writes_to_is_refused(
    cli: Call, tables: Path, run: Path, tmp_path: Path
) -> None:
    before = content(run)
    for folder, flag in ((run, "--overwrite"), (run, "--resume"), (tmp_path / "new", "--resume")):
        with folders.hold(folder, is_resuming=True, is_overwriting=False):
            outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, flag, "-o", folder)
        assert outcome.code == 2
        assert "another osciformer is writing" in outcome.err
    assert content(run) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["same", "link", "hard link", "through a link", "in a folder"])
def test_predictions_never_replace_their_input(
    kind: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    table = tmp_path / "parts/one.parquet"
    table.parent.mkdir()
    shutil.copy(tables / "wide.parquet", table)
    before, given, output = table.read_bytes(), table, table
    if kind == "link":
        output = tmp_path / "link.parquet"
        output.symlink_to(table)
    elif kind == "hard link":
        output = tmp_path / "link.parquet"
        os.link(table, output)
    elif kind == "through a link":
        (tmp_path / "link").symlink_to(table.parent)
        output = tmp_path / "link/one.parquet"
    elif kind == "in a folder":
        given = table.parent
    outcome = cli("predict", runs / "imputation", given, "-o", output)
    assert outcome.code == 2
    assert "which stays" in outcome.err
    assert table.read_bytes() == before
    assert output.samefile(table)


def test_other_inputs_and_files_of_the_run_stay(
    cli: Call, run: Path, tables: Path, tmp_path: Path
) -> None:
    times = tmp_path / "times.csv"
    times.write_text("hour\n5\n")
    call = ["predict", run, tables / "wide.csv"]
    assert cli(*call, "--times", times, "-o", times).code == 2
    assert cli(*call, "-o", run / "history.csv").code == 2
    call[0] = "evaluate"
    assert cli(*call, "-o", run / "metrics.json").code == 2
    assert times.read_text() == "hour\n5\n"
    done = cli(*call, "--bootstrap=0", "-o", run / "test.json")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("task", "table", "changes"),
    [
        ("classification", "wide.parquet", {"a": "values", "hour": "times", "ill": "labels"}),
        ("classification", "wide.parquet", {"who": "ids", "age": "static"}),
        ("events", "narrow.csv", {"hour": "times", "variable": "types"}),
    ],
)
def test_resume_refuses_another_table_of_equal_counts(
    task: str,
    table: str,
    changes: dict[str, str],
    cli: Call,
    runs: Path,
    tables: Path,
    tmp_path: Path,
) -> None:
    import pandas as pd

    run = shutil.copytree(runs / task, tmp_path / "run")
    before = content(run)
    read = pd.read_csv if table.endswith(".csv") else pd.read_parquet
    for column, what in changes.items():
        frame = read(tables / table)
        if column == "who":
            frame["who"] = frame["who"].replace(39, 390)
        elif column == "ill":
            frame["ill"] = np.where(frame["who"] == 0, 1 - frame["ill"], frame["ill"])
        elif column == "age":
            frame["age"] += frame["who"] == 3
        elif column == "variable":
            frame.loc[0, column] = "b" if frame.loc[0, column] == "a" else "a"
        else:
            frame.loc[0, column] -= 0.001
        frame.to_parquet(tmp_path / "other.parquet")
        outcome = cli("fit", tmp_path / "other.parquet", "--resume", "--progress=none", "-o", run)
        assert outcome.code == 1
        assert f"other {what}" in outcome.err
        assert content(run) == before


def test_same_data_in_another_format_may_go_on(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    # Not of classes, which are numbers in this Parquet table, and text in CSV.
    run = shutil.copytree(runs / "regression", tmp_path / "run")
    outcome = cli("fit", tables / "wide.parquet", "--resume", "--progress=none", "-o", run)
    assert outcome.code == 0, outcome.err
    assert "older version" not in outcome.err


def test_run_without_a_fingerprint_goes_on_with_a_warning(cli: Call, run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    del facts["data"]["fingerprint"]
    (run / "run.json").write_text(json.dumps(facts))
    outcome = cli("fit", "--resume", "--progress=none", "-o", run)
    assert outcome.code == 0, outcome.err
    assert "older version" in outcome.err
    assert "fingerprint" in json.loads((run / "run.json").read_text())["data"]


def test_fingerprint_on_disk_is_that_in_memory(tables: Path) -> None:
    from osciformer.cli.fingerprint import fingerprint
    from osciformer.data import Layout, ParquetSeries, read_table

    layout = Layout(id="who", time="hour", values=("a", "b"), label="ill", static=("age",))
    on_disk = ParquetSeries(tables / "wide.parquet", layout, chunk_rows=32)
    assert len(list(on_disk.chunks())) > 1
    found = fingerprint(read_table(tables / "wide.parquet", layout))
    assert found == fingerprint(on_disk)
    assert set(found) == {"ids", "lengths", "times", "values", "labels", "static"}


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_ctrl_c_while_files_are_put_in_place_comes_too_late(
    flag: str, cli: Call, tables: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag == "--resume":
        call = ["fit", "--progress=none", flag]
    else:  # which has no checkpoint to go on from
        call = ["fit", tables / "wide.csv", *ILL[:-1], "--model=resonator", "--families=summary"]
        call += ["--progress=none", flag]
    move_in, calls = folders._move_in, []

    def stop_at_first(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        move_in(path)

    monkeypatch.setattr(folders, "_move_in", stop_at_first)
    outcome = cli(*call, "-o", run)
    assert outcome.code == 130, outcome.err
    assert len(calls) == 2
    assert "when all was done" in outcome.err
    assert "nothing is kept" not in outcome.err
    names = {path.name for path in run.iterdir()}
    assert names == set(json.loads((run / MANIFEST).read_text())["files"])
    assert {"config.yaml", "model.safetensors", "metrics.json"} <= names
