"""`osciformer tune`: budget, resuming, what it writes, and that `fit` repeats the best trial."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("optuna", reason="tune needs Optuna")

from osciformer.cli.tune import Between, space_of

Call = Callable[..., Any]
SMALL = ["--dim=8", "--num-layers=1", "--epochs=1", "--accelerator=cpu", "--progress=none"]
ILL = ["--task=classification", "--id=who", "--time=hour", "--features=a,b", "--target=ill"]


def trials_of(study: Path) -> list[dict[str, Any]]:
    content = json.loads((study / "study.json").read_text())
    return [{**trial, "seconds": 0} for trial in content["trials"]]


@pytest.fixture(scope="module")
def study(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from osciformer.cli import main

    folder = tmp_path_factory.mktemp("tune") / "study"
    call = ["tune", tables / "wide.parquet", *ILL, *SMALL, "--trials=4", "-o", folder]
    assert main([str(item) for item in call]) == 0
    return folder


def test_study_holds_all_trials_and_the_best_settings(study: Path) -> None:
    trials = trials_of(study)
    assert [trial["number"] for trial in trials] == [0, 1, 2, 3]
    assert trials[0]["settings"] == {
        "num_heads": 1,
        "dropout": 0.2,
        "learning_rate": 1e-3,
        "batch_size": "auto",
    }
    assert len({str(trial["settings"]) for trial in trials}) == 4
    with (study / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows] == [trial["value"] for trial in trials]
    best = min(trials, key=lambda trial: trial["value"])
    written = yaml.safe_load((study / "best.yaml").read_text())
    assert best["settings"].items() <= written.items()
    assert {path.name for path in study.iterdir()} == {"study.json", "trials.csv", "best.yaml"}


def test_fit_with_the_best_settings_is_the_best_trial(
    cli: Call, study: Path, tmp_path: Path
) -> None:
    outcome = cli("fit", "--config", study / "best.yaml", "--progress=none", "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    best = min(trials_of(study), key=lambda trial: trial["value"])
    assert metrics["validation"][best["metric"]] == best["value"]


def test_stopped_study_goes_on_as_if_it_had_not_been(
    cli: Call, study: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.cli.tune import _Study

    call = ["tune", tables / "wide.parquet", *ILL, *SMALL, "--trials=4", "-o", tmp_path / "again"]
    run = _Study.run

    def run_two(self: Any) -> Any:
        if len(self.trials) == 2:
            raise KeyboardInterrupt
        return run(self)

    with monkeypatch.context() as patch:
        patch.setattr(_Study, "run", run_two)
        outcome = cli(*call)
    assert outcome.code == 130
    assert "2 trials are kept" in outcome.err
    assert len(trials_of(tmp_path / "again")) == 2
    outcome = cli(*call)
    assert outcome.code == 1
    assert "--resume" in outcome.err
    other = cli("tune", "--resume", "--dim=16", "-o", tmp_path / "again")
    assert other.code == 2
    assert "--dim was 8" in other.err
    other = cli("tune", tables / "narrow.csv", "--resume", *ILL, "-o", tmp_path / "again")
    assert other.code == 1
    outcome = cli("tune", "--resume", "--target=ill", "--trials=4", "-o", tmp_path / "again")
    assert outcome.code == 0, outcome.err
    assert "budget: 4 trials, 2 done" in outcome.err
    assert "trial 4/4" in outcome.err
    assert trials_of(tmp_path / "again") == trials_of(study)


def test_trial_that_fails_is_told_and_the_search_goes_on(
    cli: Call, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.cli import fit

    make, made = fit.make_estimator, []

    def make_some(*args: Any, **given: Any) -> Any:
        made.append(make(*args, **given))
        if len(made) == 2:
            made[-1].fit = lambda *_, **__: (_ for _ in ()).throw(FloatingPointError("loss is NaN"))
        return made[-1]

    monkeypatch.setattr(fit, "make_estimator", make_some)
    flags = ["--task=regression", "--id=who", "--time=hour", "--features=a,b", "--target=score"]
    outcome = cli("tune", tables / "wide.csv", *flags, *SMALL, "--trials=3", "-o", tmp_path / "s")
    assert outcome.code == 0, outcome.err
    problems = [trial["problem"] for trial in trials_of(tmp_path / "s")]
    assert problems == ["", "loss is NaN", ""]


def test_no_trial_begins_after_the_time_is_over(cli: Call, tables: Path, tmp_path: Path) -> None:
    flags = ["--task=events", "--id=who", "--time=hour", "--type=variable", "--minutes=0.0001"]
    outcome = cli("tune", tables / "narrow.csv", *flags, *SMALL, "-o", tmp_path / "s")
    assert outcome.code == 0, outcome.err
    (trial,) = trials_of(tmp_path / "s")
    assert trial["metric"] == "log_likelihood"
    assert "minutes are over" in outcome.err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--model=resonator"], 2, "settings of the network"),
        (["--validation-fraction=0"], 2, "validation series"),
        (["--devices=2"], 2, "leave out --devices"),
        (["--minutes=-1"], 2, "--minutes must be positive"),
        (["--logger=tensorboard"], 2, "leave it to `fit`"),
        (["--resume"], 2, "no study to resume"),
        (["--id=nobody"], 1, "nobody"),
    ],
)
def test_wrong_calls_say_what_to_do_and_leave_nothing(
    flags: list[str], code: int, message: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    outcome = cli("tune", tables / "wide.csv", *ILL, *flags, "-o", tmp_path / "s")
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err
    assert not (tmp_path / "s").exists()


def test_given_settings_are_not_searched() -> None:
    space = space_of(
        {"task": "regression", "num_heads": 3, "dropout": 0.5, "blocks": ("attention",)}
    )
    assert set(space) == {"dim", "learning_rate", "batch_size"}
    assert all(dim % 3 == 0 for dim in space["dim"])
    assert isinstance(space["learning_rate"], Between)


def test_damaged_study_is_refused(cli: Call, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"settings": {"task": 3}}')
    outcome = cli("tune", "--resume", "-o", tmp_path)
    assert outcome.code == 1
    assert "is no study" in outcome.err
