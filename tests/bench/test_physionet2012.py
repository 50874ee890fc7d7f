"""The benchmark on PhysioNet 2012: its arithmetic, and a toy run on the data of the package."""

from __future__ import annotations

import contextlib
import json
import shlex

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from .scripts import ROOT, load

boosting, script = load("summary_boosting", "physionet2012")

from osciformer.cli import main as osciformer  # noqa: E402
from osciformer.data import IrregularSeries  # noqa: E402

NAN = float("nan")
MODELS = "network,resonator,boosting"
SEEN = ["GCS", "BUN", "HR", "Urine"]
TINY = "--max-epochs 2 --dim 8 --num-layers 1 --num-heads 1"


def row(model: str, seed: int, auroc: float, **entries):
    scores = dict.fromkeys((*script.SCORES, "epochs", "wall_s", "cpu_s"), 1.0)
    first = {"model": model, "seed": seed, "learning_rate": None, "validation_auroc": 0.5}
    return {**first, **scores, "auroc": auroc, **entries}


def run_here(self, command, log):
    """Run a command in this process, which has imported everything, in place of one of its own."""
    with contextlib.chdir(self.folder):
        if command[0] == "osciformer":
            status = osciformer(list(command[1:]))
        else:
            status = boosting.main(command[2:])
    if status:
        raise script.FailedJob(shlex.join(command))
    return 2.0, 1.5


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A work folder with small tables after two jobs, and the arguments that made it."""
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("physionet")
    data = ROOT / "src" / "osciformer" / "demo_data"
    for name, count in (("stays-train.parquet", 160), ("stays-test.parquet", 80)):
        table = parquet.read_table(data / name).to_pandas()
        table = table[[*script.DEMO.static, "record_id", "minute", "in_hospital_death", *SEEN]]
        ids = table["record_id"].unique()[:count]
        table[table["record_id"].isin(ids)].to_parquet(folder / name, index=False)
    files = ["--output", str(folder / "out.json"), "--table", str(folder / "out.md")]
    arguments = ["--work", str(folder), *files, "--demo", "--models", MODELS]
    arguments += ["--seeds", "3", f"--fit-options={TINY}", "--max-trees", "4", "--commit", "abc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Workplace, "run", run_here)
        assert script.main(arguments) == 0
    return folder, arguments


def test_every_job_is_a_row_with_scores_and_commands(toy):
    folder, _ = toy
    found = json.loads((folder / "out.json").read_text())
    assert [(r["model"], r["seed"]) for r in found["rows"]] == [(m, 3) for m in MODELS.split(",")]
    neural, resonator, trees = found["rows"]
    assert neural["series"] == resonator["series"] == trees["series"] == 80
    assert neural["without_rows"] == 0
    assert neural["commands"][0] == (
        "osciformer fit stays-train.parquet --task classification --progress lines "
        "--id=record_id --time=minute --target=in_hospital_death "
        "--static=Age,Gender,Height,ICUType,AdmissionWeight --seed=3 "
        f"--no-resonators {TINY} -o network-seed3/run"
    )
    assert resonator["commands"][0].endswith("--seed=3 --model=resonator -o resonator-seed3/run")
    assert resonator["epochs"] is None
    assert resonator["auroc"] > 0.55
    assert neural["epochs"] == 2
    assert neural["best_epoch"] in (1, 2)
    assert (neural["wall_s"], neural["cpu_s"]) == (2.0, 1.5)
    assert 1 <= trees["epochs"] <= 4
    assert trees["settings"] in list(boosting.CANDIDATES)
    assert found["meta"]["commit"] == "abc"
    for name in ("auroc", "auprc"):
        differences = found[f"{name}_differences"]
        assert list(differences) == ["resonator - network", "resonator - boosting"]
        entry = differences["resonator - boosting"]
        assert entry["difference"] == pytest.approx(resonator[name] - trees[name], abs=1e-6)
        assert entry["low"] < entry["difference"] < entry["high"]
    assert str(folder) not in found["meta"]["command"]


def test_scores_are_those_of_evaluate_where_no_stay_is_missing(toy):
    folder, _ = toy
    neural = json.loads((folder / "out.json").read_text())["rows"][0]
    for name in script.SCORES:
        command = neural["evaluate"]["metrics"][name]["value"]
        assert neural[name] == pytest.approx(command, abs=1e-6), name


def test_boosting_on_few_stays_is_better_than_chance(toy):
    folder, _ = toy
    assert json.loads((folder / "out.json").read_text())["rows"][-1]["auroc"] > 0.55


def test_finished_jobs_are_not_run_again(toy, monkeypatch):
    folder, arguments = toy
    before = json.loads((folder / "out.json").read_text())["rows"]
    (folder / "out.json").unlink()

    def refuse(*_, **__):
        raise AssertionError("a finished job was started again")

    monkeypatch.setattr(script.Workplace, "run", refuse)
    assert script.main(arguments) == 0
    assert json.loads((folder / "out.json").read_text())["rows"] == before


@pytest.mark.parametrize(
    ("flag", "message"), [("--commit=other", "commit abc"), ("--fit-options=--dim 4", "commands")]
)
def test_rows_of_other_code_or_settings_are_refused(toy, flag, message):
    _, arguments = toy
    with pytest.raises(SystemExit, match=rf"(?s)row.json has the {message}.*another --work"):
        script.main([*arguments, flag])


def test_a_failed_job_leaves_the_others_and_is_reported(toy, capsys, monkeypatch):
    folder, arguments = toy
    monkeypatch.setattr(script.Workplace, "run", run_here)
    status = script.main([*arguments, "--models=gru_d,boosting", "--fit-options=--dim none"])
    assert status == 1
    assert "failed: osciformer fit stays-train.parquet" in capsys.readouterr().err
    found = json.loads((folder / "out.json").read_text())["rows"]
    assert [r["model"] for r in found] == ["boosting"]


def test_a_command_is_a_process_that_is_timed_and_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    place = script.Workplace(tmp_path, script.DEMO, threads=1, commit=None)
    log = tmp_path / "log.txt"
    wall, cpu = place.run(["osciformer", "--help"], log)
    assert 0.05 < cpu < wall + 60  # the wall time may be shorter on several cores
    assert wall > 0.05
    text = log.read_text()
    assert text.startswith("$ osciformer --help\n")
    assert "evaluate" in text
    with pytest.raises(script.FailedJob, match=r"osciformer predict: status 2: .*; see .*log\.txt"):
        place.run(["osciformer", "predict"], log)


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no model 'rnn'; known are osciformer"):
        script.main(["--work", str(tmp_path), "--models", "rnn"])


def test_stays_without_rows_are_given_the_frequency():
    truth = script.Truth(np.array([1, 2, 3, 4]), np.array([0, 1, 0, 1]), frequency=0.3)
    found = truth.score({1: 0.1, 2: 0.9, 4: 0.2})
    assert (found["series"], found["without_rows"]) == (4, 1)
    # Series 4 lies below series 3, which was given 0.3: one of four pairs is in the wrong order.
    assert found["auroc"] == pytest.approx(0.75)
    said = np.log([0.9, 0.9, 0.7, 0.2])
    assert found["log_loss"] == pytest.approx(-said.mean())
    with pytest.raises(script.FailedJob, match=r"unknown ids: \[9\]"):
        truth.score({9: 0.5})


def test_runs_are_compared_on_the_same_resampled_series():
    generator = np.random.default_rng(0)
    labels = np.arange(200) % 2
    truth = script.Truth(np.arange(200), labels, frequency=0.5)
    good = 0.5 * labels + generator.random((3, 200))
    scores = {"auroc": roc_auc_score, "auprc": average_precision_score}
    drawn = [truth.resample(x, rounds=50) for x in (good, good[:1], generator.random((2, 200)))]
    for name, score in scores.items():
        several, one, bad = (x[name] for x in drawn)
        each = [score(labels, chance) for chance in good]
        assert script.compare(several, one)["difference"] == pytest.approx(np.mean(each) - each[0])
        assert script.compare(one, one) == {"difference": 0, "low": 0, "high": 0}
        worse = script.compare(several, bad)
        assert 0 < worse["low"] < worse["difference"] < worse["high"]
        assert np.isnan(script.COMPARED[name](good, np.zeros(200)))


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_scikit_learn_where_probabilities_are_equal(seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, 40)
    chances = generator.integers(0, 6, (3, 40)) / 5
    expected = np.mean([average_precision_score(labels, chance) for chance in chances])
    assert script.mean_auprc(chances, labels) == pytest.approx(expected)


def test_the_learning_rate_is_chosen_on_validation_series_of_the_first_seed():
    rows = [
        row("gru_d", 0, 0.9, validation_auroc=0.7),
        row("gru_d", 0, 0.8, validation_auroc=0.8, learning_rate=1e-3),
        row("gru_d", 1, 0.9, validation_auroc=0.9),
        row("osciformer", 0, 0.9, validation_auroc=0.95),
    ]
    assert script.chosen_rate(rows, "gru_d", 0) == 1e-3
    assert script.chosen_rate(rows, "osciformer", 0) is None
    assert script.summarize(rows, 0)["gru_d"]["seeds"] == [0]


def test_only_the_chosen_rate_goes_on_to_the_other_seeds(monkeypatch, tmp_path):
    ran = []

    def fake(self, job, name, commands, truth):
        ran.append(name)
        found = {**job, "validation_auroc": 0.6 if job["learning_rate"] is None else 0.7}
        return {**row("", 0, 0.5), **found, "date": ""}

    monkeypatch.setattr(script.Workplace, "prepare", lambda self: None)
    monkeypatch.setattr(script.Workplace, "row", fake)
    monkeypatch.setattr(script.Bench, "_compare", lambda self, truth: None)
    models = "--models=osciformer,transformer"
    assert script.main(["--work", str(tmp_path), models, "--seeds=0,1", "--commit=a"]) == 0
    assert ran == [
        *("osciformer-seed0", "osciformer-seed1"),
        *("transformer-seed0", "transformer-seed0-lr0.002", "transformer-seed1-lr0.002"),
    ]


def test_summary_and_table_have_mean_and_deviation_of_a_sample():
    rows = [row("osciformer", seed, auroc) for seed, auroc in enumerate((0.84, 0.85, 0.86))]
    summary = script.summarize([*rows, row("boosting", 0, 0.8)], 0)
    assert summary["osciformer"]["auroc"] == pytest.approx({"mean": 0.85, "sd": 0.01})
    assert summary["boosting"]["auroc"] == {"mean": 0.8, "sd": None}
    difference = {"difference": 0.05, "low": -0.01, "high": 0.11}
    compared = {"auroc": {"osciformer - boosting": difference}}
    text = script.markdown({"commit": "abc"}, rows, summary, compared)
    assert "- osciformer - boosting: +0.0500 (-0.0100 to +0.1100)" in text
    assert "| osciformer | default | 3 | 0.8500 ± 0.0100 | 1.0000 ± 0.0000 |" in text
    assert "| boosting | default | 1 | 0.8000 | 1.0000 |" in text
    assert "- commit: abc" in text


def test_summaries_of_a_feature():
    series = IrregularSeries.from_arrays(
        [[0.0, 1.0, 3.0], [5.0, 6.0]],
        [[[1.0, NAN], [2.0, NAN], [4.0, 7.0]], [[NAN, 3.0], [NAN, 3.0]]],
        static=[[10.0], [20.0]],
    )
    found = boosting.summaries(series)
    assert found.shape == (2, 10 * 2 + 1)
    by_name = {name: found[:, 2 * k : 2 * k + 2] for k, name in enumerate(boosting.SUMMARIES)}
    expected = {
        "count": [[3, 1], [0, 2]],
        "first": [[1, 7], [NAN, 3]],
        "last": [[4, 7], [NAN, 3]],
        "min": [[1, 7], [NAN, 3]],
        "max": [[4, 7], [NAN, 3]],
        "mean": [[7 / 3, 7], [NAN, 3]],
        "std": [[np.std([1, 2, 4]), 0], [NAN, 0]],
        "slope": [[1, NAN], [NAN, 0]],
        "first_time": [[0, 3], [NAN, 5]],
        "last_time": [[3, 3], [NAN, 6]],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(by_name[name], values, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found[:, -1], [10, 20])


def test_series_without_rows_have_no_summaries():
    series = IrregularSeries.from_arrays([[0.0], []], [[[1.0]], np.empty((0, 1))], empty="keep")
    with pytest.raises(ValueError, match="without rows have no summaries"):
        boosting.summaries(series)


def test_last_values_stay_within_their_series() -> None:
    nan = np.nan
    values = [[[1.0, 5.0], [2.0, nan]], [[nan, 7.0]]]
    series = IrregularSeries.from_arrays([[0.0, 1.0], [0.0]], values)
    np.testing.assert_array_equal(boosting.last_values(series), [[2.0, 5.0], [nan, 7.0]])
