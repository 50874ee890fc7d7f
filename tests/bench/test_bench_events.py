"""The benchmark of event prediction: protocols, models, cells and restarts."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pytorch_lightning")

from osciformer.bench.events import datasets, harness, models  # noqa: E402
from osciformer.bench.events.datasets import TASKS, EventTask, Parts  # noqa: E402
from osciformer.bench.events.harness import Cell, make_cells  # noqa: E402
from osciformer.events import EventSequences, log_likelihood  # noqa: E402
from osciformer.events.classical import PoissonProcess  # noqa: E402
from osciformer.events.likelihood import choose  # noqa: E402

from .events_toy import random_parts  # noqa: E402


def table_of(times: list[list[float]], types: list[list[int]] | None = None, **columns: list):
    owner = np.repeat(np.arange(len(times)), [len(t) for t in times])
    kinds = np.concatenate(types) if types else np.zeros(len(owner), dtype=int)
    return pa.table(
        {"seq_id": owner, "time": np.concatenate(times), "type": kinds}
        | {name: np.asarray(column) for name, column in columns.items()}
    )


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers would not know the toy data sets: cells run here, one after the other."""

    def run_jobs(jobs, work, settings, *, num_workers, deadline, is_ready=lambda job: True):
        waiting = list(jobs)
        while waiting and time.monotonic() < deadline:
            job = next((job for job in waiting if is_ready(job)), waiting[0])
            waiting.remove(job)
            try:
                row = work(job, settings)
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"}
            yield job, row

    monkeypatch.setattr(harness, "run_jobs", run_jobs)


# Protocols.


def test_clipped_gaps_are_added_up_anew():
    events = EventSequences.from_arrays([[2.0, 2.5, 99.0], [], [1.0, 1.5]])
    found = datasets.clip_gaps(events, 3.0)
    assert [item.times.tolist() for item in found] == [[0.0, 0.5, 3.5], [], [0.0, 0.5]]


def test_sequences_may_begin_with_their_first_events():
    found = datasets.from_first(EventSequences.from_arrays([[5.0, 7.0], [3.0]]))
    assert found.times.tolist() == [0.0, 2.0, 0.0]


def test_the_simulated_process_does_not_explode():
    assert TASKS["hawkes"].truth().spectral_radius == pytest.approx(0.65, abs=0.005)


def test_settings_follow_the_size_of_the_data_and_the_publications():
    settings = models.TrainingSettings(device="cuda")
    assert settings.length(2828) == {"batch_size": 64, "max_epochs": 45, "patience": 10}
    sizes = {"dim": 32, "num_layers": 1, "num_heads": 4}
    expected = {**sizes, "encoder_options": {"fuse": True}}
    assert settings.model_options("contiformer") == expected
    assert models.find_model("osciformer+decay").title == "osciformer+decay"


def test_bookorder_is_scaled_cut_and_clipped(monkeypatch):
    # 150 events a minute apart, the third gap longer than 70 thousandths of a minute.
    gaps = np.full(150, 0.001)
    gaps[3] = 0.5
    tables = {
        split: table_of([np.cumsum(gaps)] * count) for split, count in (("train", 20), ("test", 3))
    }
    monkeypatch.setattr(datasets, "get_dataset", lambda name, split, fold=None: tables[split])
    parts = TASKS["bookorder"].load(1)
    assert (len(parts.train), len(parts.dev), len(parts.test)) == (18, 2, 3)
    assert not set(parts.train.ids) & set(parts.dev.ids)
    for part in parts:
        assert part.lengths.tolist() == [100] * len(part)
        assert part.gaps.max() == pytest.approx(70.0)
        assert np.median(part.gaps) == pytest.approx(1.0)
        assert part[0].times[0] == 0.0
    # The last of 100 events: 98 gaps of 1 and one of 70.
    assert parts.test[0].times[-1] == pytest.approx(98.0 + 70.0)


def test_stackoverflow_counts_from_the_first_event_in_millions_of_seconds(monkeypatch):
    times = 1.3e9 + 5e5 * np.arange(120)
    tables = {split: table_of([times] * count) for split, count in (("train", 30), ("test", 2))}
    asked = []

    def get_dataset(name, split, fold=None):
        asked.append((name, split, fold))
        return tables[split]

    monkeypatch.setattr(datasets, "get_dataset", get_dataset)
    parts = TASKS["stackoverflow"].load(3)
    assert {fold for _, _, fold in asked} == {1}
    assert (len(parts.train), len(parts.dev), len(parts.test)) == (27, 3, 2)
    assert parts.test[0].times == pytest.approx(0.5 * np.arange(100))
    assert parts.test.num_types == 22
    assert parts.test.time_unit == "1e6 s"
    # Another seed trains on the same sequences.
    assert TASKS["stackoverflow"].load(4).dev.ids.tolist() == parts.dev.ids.tolist()


def test_folds_of_neonate_are_infants_and_each_is_tested_once(monkeypatch):
    rng = np.random.default_rng(0)
    times = [60.0 * np.arange(1 + infant % 4) + rng.uniform() for infant in range(40)]
    table = table_of(times, expert=["ABC"] * sum(map(len, times)))
    other = table_of([[0.0, 1.0]], expert=["A", "A"])
    table = pa.concat_tables([table, other])
    monkeypatch.setattr(datasets, "get_dataset", lambda name, split: table)
    tested = []
    for fold in (1, 2, 3, 4, 5):
        parts = TASKS["neonate"].load(fold)
        ids = [set(part.ids) for part in parts]
        assert not ids[0] & ids[1]
        assert not ids[0] & ids[2]
        assert not ids[1] & ids[2]
        assert sum(map(len, ids)) == 30  # those with two seizures or more
        assert parts.test.lengths.min() > 1
        assert parts.test.gaps == pytest.approx(1.0)  # minutes
        tested += parts.test.ids.tolist()
    assert len(tested) == len(set(tested)) == 30


def taobao(monkeypatch) -> None:
    """Put sequences in the place of Taobao's, a third of whose gaps in train and dev are long."""
    rng = np.random.default_rng(0)

    def gaps(is_test: bool) -> np.ndarray:
        found = rng.uniform(0.0, 0.5, size=30)
        found[::3] += 0.0 if is_test else 10.0
        return found

    tables = {
        split: table_of([1.5e5 + np.cumsum(gaps(split == "test")) for _ in range(count)])
        for split, count in (("train", 20), ("dev", 5), ("test", 10))
    }
    monkeypatch.setattr(datasets, "get_dataset", lambda name, split, fold=None: tables[split])


def test_long_gaps_of_taobao_are_drawn_anew_in_train_and_dev_alone(monkeypatch):
    taobao(monkeypatch)
    given, alike = (TASKS[name].load(0) for name in ("taobao", "taobao_alike"))
    assert np.array_equal(given.test.times, alike.test.times)
    for before, after in zip(given[:2], alike[:2], strict=True):
        long = before.gaps >= 1.0
        assert long.mean() == pytest.approx(9 / 29)
        assert after.gaps[~long] == pytest.approx(before.gaps[~long], abs=1e-9)
        assert 0.0 < after.gaps[long].min() < 0.02
        assert 0.08 < after.gaps[long].max() < 0.1
    assert np.array_equal(alike.train.times, TASKS["taobao_alike"].load(3).train.times)


def test_folds_of_taobao_are_of_its_test_part(monkeypatch):
    taobao(monkeypatch)
    whole, tested = TASKS["taobao"].load(0).test, []
    for fold in (1, 2, 3, 4, 5):
        parts = TASKS["taobao_folds"].load(fold)
        assert [len(part) for part in parts] == [6, 2, 2]
        tested += parts.test.ids.tolist()
    assert sorted(tested) == sorted(whole.ids.tolist())


def test_the_simulation_never_changes_and_its_truth_is_best():
    first, again = (datasets.simulate.__wrapped__("dev") for _ in range(2))
    assert first is not again
    assert np.array_equal(first.times, again.times)
    assert (first.lengths == datasets.NUM_EVENTS).all()
    best = log_likelihood(TASKS["hawkes"].truth(), first).micro
    assert best > log_likelihood(PoissonProcess.fit(first), first).micro + 0.3


# Models.


def test_test_sequences_reach_neither_fit_nor_choice(toy_task, monkeypatch):
    assert "test" not in models.FitRequest._fields
    settings = {
        "training": {"learning_rates": (0.01,), "dims": (8,), "max_epochs": 2},
        "folder": "",
    }
    found = []
    for other in (0, 5):
        parts = random_parts(1)
        changed = Parts(parts.train, parts.dev, random_parts(other).test)
        task = EventTask("folds", "folds", 2, "fold", lambda task, n, p=changed: p, 0.01)
        monkeypatch.setitem(TASKS, "folds", task)
        for name in ("renewal_markov", "rmtpp"):
            found.append(
                harness.run_cell({"dataset": "folds", "model": name, "repeat": 1}, settings)
            )
    for one, other in (found[::2], found[1::2]):
        assert one["ll_micro"] != other["ll_micro"]
        for key in ("dev_ll", "chosen", "parameters", "horizon"):
            assert one[key] == other[key]


def test_likelihoods_alone_are_the_same_and_leave_out_the_rest(toy_task):
    settings = {"training": {}, "folder": ""}
    job = {"dataset": "folds", "model": "renewal_markov", "repeat": 1}
    whole = harness.run_cell(job, settings)
    alone = harness.run_cell(job, {**settings, "with_predictions": False})
    for key in ("ll_micro", "ll_macro", "ll_error", "num_scored"):
        assert alone[key] == whole[key]
    left_out = {"accuracy", "accuracy_at_time", "time_rmse", "time_mae", "horizon", "never"}
    assert {key for key in whole if alone[key] is None and whole[key] is not None} == left_out


def test_the_last_events_are_drawn_and_rules_are_asked_where_there_are_enough(toy_task):
    settings = {"training": {}, "folder": "", "with_horizon": True}
    rng = np.random.default_rng(0)

    def long_ones(count: int) -> EventSequences:
        times = [np.cumsum(rng.exponential(size=25)) for _ in range(count)]
        return EventSequences.from_arrays(times, [np.arange(25) % 5] * count, time_unit="h")

    parts = Parts(long_ones(20), long_ones(5), long_ones(30))
    task = EventTask("folds", "folds", 5, "fold", lambda task, number: parts, 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "folds", task)
        found = {}
        for name in ("constant", "repeat", "renewal_markov", "poisson"):
            job = {"dataset": "folds", "model": name, "repeat": 1}
            found[name] = harness.run_cell(job, settings)
    for row in found.values():
        assert row["horizon_histories"] == 30
        assert row["horizon_tolerances"][-1] == pytest.approx(2.4, rel=0.1)  # a quarter of 10
        json.dumps(row)
    # Types take turns: the rule that repeats ten events and the Markov chain know them.
    assert "ll_micro" not in found["repeat"]
    for better, worse in (("repeat", "constant"), ("renewal_markov", "poisson")):
        assert found[better]["horizon_t_map"] > found[worse]["horizon_t_map"] + 0.05
        assert found[better]["horizon_transport"] < found[worse]["horizon_transport"] - 1.0
    short = harness.run_cell({"dataset": "folds", "model": "poisson", "repeat": 1}, settings)
    assert "horizon_t_map" not in short
    assert "horizon_t_map" not in harness.run_cell(
        {"dataset": "folds", "model": "poisson", "repeat": 1}, {**settings, "with_horizon": False}
    )


def test_settings_are_those_with_the_best_dev_likelihood(toy_task):
    parts = TASKS["folds"].load(1)
    rates = {"slow": PoissonProcess([0.1, 0.1]), "right": PoissonProcess.fit(parts.train)}
    best = choose(rates.items(), parts.dev)
    assert best.settings == "right"
    assert best.process is rates["right"]
    assert best.likelihood == log_likelihood(best.process, parts.dev).micro
    # A type that cannot come has no finite likelihood, and is not chosen.
    broken = [("broken", PoissonProcess([0.0, 9.0])), ("slow", rates["slow"])]
    assert choose(broken, parts.dev).settings == "slow"


def test_cells_are_those_that_differ(toy_task):
    repeats = {"fold": [1, 2], "seed": [0, 3]}
    names = ["truth", "poisson", "poisson_markov", "rmtpp"]
    found = {(c.dataset, c.model, c.repeat) for c in make_cells(["folds", "seeds"], names, repeats)}
    assert found == {
        *(("folds", name, fold) for name in names[1:] for fold in (1, 2)),
        ("seeds", "poisson", 0),  # a constant: another seed is the same
        ("seeds", "poisson_markov", 0),
        ("seeds", "rmtpp", 0),
        ("seeds", "rmtpp", 3),
    }
    rules = [
        {c.model for c in make_cells(["folds"], ["poisson", "repeat"], repeats, with_horizon)}
        for with_horizon in (False, True)
    ]
    assert rules == [{"poisson"}, {"poisson", "repeat"}]
    one_type = make_cells(["neonate"], ["poisson", "renewal_repeat"], repeats)
    assert {cell.model for cell in one_type} == {"poisson"}
    order = make_cells(["mimic2", "stackoverflow"], ["rmtpp", "contiformer"], repeats)
    assert (order[0].dataset, order[0].model) == ("stackoverflow", "contiformer")


def test_an_unknown_model_is_refused_by_name(capsys):
    assert harness.main(["-o", "unused", "--models", "osciformr"]) == 2
    assert "'osciformr'" in capsys.readouterr().err


# Cells.


def run(folder: Path, *more: str) -> int:
    return harness.main(
        ["-o", str(folder), "--datasets", "folds", "--folds", "1,2", "--models", "poisson",
         "--table", str(folder / "table.md"), *more]
    )  # fmt: skip


def test_a_run_is_continued_and_finished_cells_stay(tmp_path, toy_task, in_this_process):
    assert run(tmp_path, "--folds", "1") == 0
    first = Cell("folds", "poisson", 1).path(tmp_path)
    before = first.stat().st_mtime_ns
    assert run(tmp_path) == 0
    assert first.stat().st_mtime_ns == before
    rows = harness.read_cells(tmp_path)
    assert [row["repeat"] for row in rows] == [1, 2]
    parts = TASKS["folds"].load(2)
    process = PoissonProcess.fit(parts.train, smoothing=0.5)
    expected = log_likelihood(process, parts.test)
    assert rows[1]["ll_micro"] == expected.micro
    assert rows[1]["ll_macro"] == expected.macro
    assert rows[1]["dev_ll"] == log_likelihood(process, parts.dev).micro
    assert rows[1]["num_scored"] == len(parts.test.gaps)
    assert rows[1]["data"]["dev"]["sequences"] == 6
    assert str(tmp_path) not in json.dumps(rows)


def test_a_failed_cell_is_recorded_and_tried_again(
    tmp_path, toy_task, in_this_process, monkeypatch
):
    good = TASKS["folds"].read

    def read(task: EventTask, fold: int) -> Parts:
        if fold == 1:
            raise OSError("the disk is gone")
        return good(task, fold)

    broken = EventTask("folds", "folds", 2, "fold", read, 0.01)
    with monkeypatch.context() as patch:
        patch.setitem(TASKS, "folds", broken)
        assert run(tmp_path) == harness.FAILED
    rows = {row["repeat"]: row for row in harness.read_cells(tmp_path)}
    assert rows[1]["error"] == "OSError: the disk is gone"
    assert rows[2]["error"] is None
    page = (tmp_path / "table.md").read_text()
    assert "failed: folds, poisson, 1: OSError: the disk is gone" in page
    assert run(tmp_path) == 0
    assert all(row["error"] is None for row in harness.read_cells(tmp_path))


def test_time_that_runs_out_leaves_cells_for_later(tmp_path, toy_task, in_this_process):
    assert run(tmp_path, "--minutes", "0") == harness.UNFINISHED
    assert harness.read_cells(tmp_path) == []
    (tmp_path / "notes.md").write_text("## A note\n")
    assert run(tmp_path, "--report-only", "--notes", str(tmp_path / "notes.md")) == 0
    assert harness.read_cells(tmp_path) == []  # nothing is run
    page = (tmp_path / "table.md").read_text()
    assert page.index("**LL**") < page.index("\n\n## A note\n\n") < page.index("## How it was run")


def test_ctrl_c_keeps_what_is_finished(tmp_path, toy_task, in_this_process, monkeypatch):
    real, done = harness.run_cell, []

    def work(job, settings):
        if done:
            raise KeyboardInterrupt
        done.append(job)
        return real(job, settings)

    monkeypatch.setattr(harness, "run_cell", work)
    assert run(tmp_path) == harness.INTERRUPTED
    assert len(harness.read_cells(tmp_path)) == 1


def test_a_neural_cell_trains_and_seeds_share_the_learning_rate_of_the_first(
    tmp_path, toy_task, in_this_process
):
    status = harness.main(
        ["-o", str(tmp_path), "--datasets", "seeds", "--seeds", "0,1", "--models", "rmtpp",
         "--max-epochs", "2", "--dims", "8", "--learning-rates", "0.01,0.0001",
         "--table", str(tmp_path / "table.md"), "--json", str(tmp_path / "all.json")]
    )  # fmt: skip
    assert status == 0
    pilot, other = harness.read_cells(tmp_path)
    assert [trial["learning_rate"] for trial in pilot["trials"]] == [0.01, 0.0001]
    best = max(pilot["trials"], key=lambda trial: trial["dev"])
    assert pilot["chosen"]["learning_rate"] == best["learning_rate"]
    assert pilot["dev_ll"] == best["dev"]
    assert [trial["learning_rate"] for trial in other["trials"]] == [best["learning_rate"]]
    assert pilot["epochs"] == 2
    assert not pilot["hit_time_limit"]
    assert pilot["parameters"] > 0
    assert math.isfinite(pilot["ll_micro"])
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["summary"]["seeds"]["rmtpp"]["ll_micro"]["count"] == 2


@pytest.mark.parametrize("name", ["rmtpp", "rmtpp_blend"])
def test_a_training_over_its_time_has_its_best_epoch_so_far(toy_task, name):
    task = TASKS["folds"]
    parts = task.load(1)
    settings = models.TrainingSettings(
        learning_rates=(0.01,), dims=(8,), max_epochs=100_000, patience=100_000, cell_minutes=2 / 60
    )
    fitted = models.find_model(name).fit(
        models.FitRequest(task, parts.train, parts.dev, 0, settings)
    )
    assert fitted.training["hit_time_limit"]
    assert 0 < fitted.training["epochs"] < 100_000
    # What the limit cuts short is blended all the same.
    network = fitted.process.network if name == "rmtpp_blend" else fitted.process
    found = log_likelihood(network, parts.dev).micro
    assert fitted.dev_ll == pytest.approx(found, abs=1e-3)


def test_an_epoch_is_timed(toy_task):
    settings = models.TrainingSettings(dims=(8,))
    network = models.find_model("rmtpp").network
    found = models.seconds_per_epoch(network, TASKS["folds"].load(1).train, settings)
    assert found["steps"] == 3  # 24 sequences, 8 a step
    assert found["timed"] >= 5
    assert found["seconds"] > 0
