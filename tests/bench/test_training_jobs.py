"""The queue of jobs that train estimators, and the files it writes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch

from osciformer.bench import documents, workers
from osciformer.bench.documents import Document, spread
from osciformer.bench.report import names_among

from .scripts import load

(shared,) = load("shared")

# A module of its own, since a worker must be able to import what it does.
TOY_WORK = """
import os, time, torch

def work(job, settings):
    kind = job["kind"]
    if kind == "raise":
        raise ValueError("bad job")
    if kind == "die":
        os._exit(7)
    if kind == "sleep":
        open(settings["started"], "w").close()
        time.sleep(600)
    return {"threads": torch.get_num_threads(), "twice": 2 * settings["factor"]}
"""


@pytest.fixture
def toy_work(tmp_path, monkeypatch):
    (tmp_path / "toy_training_work.py").write_text(TOY_WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("toy_training_work").work
    sys.modules.pop("toy_training_work", None)


def test_a_job_that_fails_or_kills_its_process_leaves_the_others_alone(toy_work, monkeypatch):
    for name in workers._ONE_THREAD:
        monkeypatch.setenv(name, "1")  # restored afterwards
    jobs = [{"kind": kind} for kind in ("die", "raise", "good")]
    rows = {
        job["kind"]: row
        for job, row in workers.run_jobs(
            jobs, toy_work, {"factor": 21}, num_workers=1, deadline=time.monotonic() + 300
        )
    }
    assert rows["good"] == {"threads": 1, "twice": 42}
    assert rows["raise"]["error"] == "ValueError: bad job"
    assert "toy_training_work" in rows["raise"]["traceback"]
    assert rows["die"]["error"] == "its process ended with status 7"
    assert multiprocessing.active_children() == []


def test_what_runs_at_the_deadline_is_stopped(toy_work, tmp_path, monkeypatch):
    for name in workers._ONE_THREAD:
        monkeypatch.setenv(name, "1")
    settings = {"started": str(tmp_path / "started")}
    rows = workers.run_jobs(
        [{"kind": "sleep"}], toy_work, settings, num_workers=2, deadline=time.monotonic() + 1.0
    )
    assert list(rows) == []
    assert multiprocessing.active_children() == []


def job_of(seed: int) -> dict[str, int]:
    return {"seed": seed}


def run(tmp_path: Path, monkeypatch, work, *arguments: str, settings=None) -> tuple[int, dict, str]:
    """Return exit status, JSON and Markdown of a benchmark with three jobs, in this process."""

    def one_by_one(jobs, work, settings, *, num_workers, deadline):
        for job in jobs:
            yield job, work(job, settings)

    monkeypatch.setattr(documents, "run_jobs", one_by_one)
    files = ["--output", str(tmp_path / "out.json"), "--table", str(tmp_path / "out.md")]
    options = shared.make_parser("toy").parse_args([*files, *arguments])
    status = shared.run_benchmark(
        "toy.py",
        [*files, *arguments],
        options,
        [job_of(seed) for seed in range(3)],
        work,
        settings or {"estimator": {}},
        lambda found: [spread([row["score"] for row in found.finished]), *found.origin()],
    )
    return (
        status,
        json.loads((tmp_path / "out.json").read_text()),
        (tmp_path / "out.md").read_text(),
    )


def test_a_table_alone_needs_no_description_of_the_machine(tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, lambda job, _: {"score": 1.0})
    monkeypatch.setattr(shared, "describe", lambda *_, **__: pytest.fail("no run is recorded"))
    status, found, _ = run(tmp_path, monkeypatch, None, "--minutes=0", "--device=cuda")
    assert (status, len(found["runs"])) == (0, 1)


def test_a_run_does_what_is_missing_and_tries_failed_jobs_again(tmp_path, monkeypatch):
    done = []

    def first(job, settings):
        done.append(job["seed"])
        return {"error": "no memory"} if job["seed"] == 1 else {"score": float(job["seed"])}

    status, content, table = run(tmp_path, monkeypatch, first, "--commit", "abc")
    assert status == 1
    assert done == [0, 1, 2]
    assert "failed: no memory" in table
    status, content, table = run(tmp_path, monkeypatch, lambda job, _: {"score": 4.0})
    assert status == 0
    assert {row["seed"]: row["score"] for row in content["rows"]} == {0: 0.0, 1: 4.0, 2: 2.0}
    assert {row["seed"]: row["run"] for row in content["rows"]} == {0: 0, 1: 1, 2: 0}
    assert content["runs"][0]["commit"] == "abc"
    assert content["runs"][0]["torch"] == torch.__version__
    # The command can be repeated, and says nothing about folders of the machine.
    assert content["runs"][0]["command"] == (
        "python benchmarks/toy.py --output out.json --table out.md --commit abc"
    )
    assert table.startswith("2.000 ± 2.000\n- `python")


def test_without_time_only_the_table_is_written(tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, lambda job, _: {"score": 1.0})
    (tmp_path / "out.md").unlink()
    before = (tmp_path / "out.json").read_text()
    status, _, table = run(tmp_path, monkeypatch, None, "--minutes", "0")
    assert status == 0
    assert table.startswith("1.000 ± 0.000")
    assert (tmp_path / "out.json").read_text() == before


def test_unfinished_jobs_show_in_the_exit_status(tmp_path, monkeypatch):
    Document(tmp_path / "out.json", {"estimator": {}}).save()
    assert run(tmp_path, monkeypatch, None, "--minutes", "0")[0] == 3


def test_rows_of_other_settings_are_not_continued(tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, lambda job, _: {"score": 1.0})
    with pytest.raises(SystemExit, match=r"max_epochs.*give another --output"):
        run(tmp_path, monkeypatch, None, settings={"estimator": {"max_epochs": 1}})


def test_rows_of_another_file_are_taken_unless_they_failed(tmp_path):
    paths = [tmp_path / name for name in ("mine.json", "theirs.json")]
    mine, theirs = (Document(path, {"estimator": {}}) for path in paths)
    for found, commit in ((mine, "a"), (theirs, "b")):
        found.runs.append(shared.describe("x.py", [], commit=commit))
    mine.add(job_of(0), {"score": 1.0})
    mine.add(job_of(1), {"error": "no memory"})
    theirs.add(job_of(0), {"error": "no memory"})
    theirs.add(job_of(1), {"score": 2.0})
    mine.merge(paths[1])
    assert {row["seed"]: row["score"] for row in mine.finished} == {0: 1.0, 1: 2.0}
    commits = {row["seed"]: mine.runs[row["run"]]["commit"] for row in mine.rows}
    assert commits == {0: "a", 1: "b"}


def test_an_estimator_trains_where_it_is_told_to_and_goes_on(tmp_path):
    settings = {"estimator": {"dim": 8}, "device": "cuda", "checkpoints": tmp_path}
    chosen = shared.estimator_settings("gru_d", {"task": "x", "seed": 3}, settings)
    assert chosen == {
        "dim": 8,
        "model_options": {"backbone": "gru_d"},
        "random_state": 3,
        "accelerator": "gpu",
        "run_dir": tmp_path / "x-3",
        "resume": True,
    }


def test_unknown_names_are_refused_with_the_known_ones(capsys):
    parser = shared.make_parser("toy")
    parser.add_argument("--tasks", type=names_among(("a", "b")))
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", "x", "--tasks", "a,c"])
    assert "unknown: c; choose among a, b" in capsys.readouterr().err
