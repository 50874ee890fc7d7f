"""The model card of a run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer.config import TASKS

Call = Callable[..., Any]
TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=2", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
ILL = ["--task=classification", "--id=who", "--time=hour", "--features=a,b", "--target=ill"]
ILL += ["--no-resonators"]


def card_of(run: Path) -> str:
    return (run / "model-card.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", TASKS)
def test_every_run_has_a_card_of_counts_scores_and_limits(
    task: str, runs: Path, frame: Any
) -> None:
    card = card_of(runs / task)
    titles = re.findall("^#+ (.+)$", card, re.M)
    assert titles[0] == f"Model card: {task}"
    assert titles[-2:] == ["Known limits", "Licence and use"]
    rows = len(frame) if task not in ("forecasting", "events") else frame[["a", "b"]].count().sum()
    if task != "forecasting":  # there both variables share rows
        assert f"- Size: 40 series, {rows} {'events' if task == 'events' else 'rows'}" in card
    assert "| dim | 8 |" in card
    metrics = json.loads((runs / task / "metrics.json").read_text())
    for name, value in metrics["validation"].items():
        shown = "undefined" if value is None else f"{value:.4f}"
        assert f"| {name.replace('_', chr(92) + '_')} | {shown} |" in card
    assert "Measured on 4 series of the table that were not trained on." in card
    assert "Licence of this model: (fill in)" in card
    assert "model-card.md" in json.loads((runs / task / "manifest.json").read_text())["files"]


def test_card_counts_classes_and_names_the_rare_ones(runs: Path) -> None:
    card = card_of(runs / "classification")
    assert "| 0 | 20 |\n| 1 | 20 |" in card
    assert "fewer than 50 examples: 0, 1." in card
    assert "Mixture, by weight: network" in card


def test_card_of_events_counts_types(runs: Path, frame: Any) -> None:
    card = card_of(runs / "events")
    assert f"| a | {frame['a'].count()} |\n| b | {frame['b'].count()} |" in card


def test_card_of_resonators_says_what_was_scored(cli: Call, tables: Path, tmp_path: Path) -> None:
    flags = [f for f in ILL if f != "--no-resonators"]
    outcome = cli(
        "fit", tables / "wide.csv", *flags, "--model=resonator", "--progress=none", "-o", tmp_path
    )
    assert outcome.code == 0, outcome.err
    assert "on 40 training series, each by a model of the others" in card_of(tmp_path)


def test_names_of_the_data_cannot_change_the_card(cli: Call, frame: Any, tmp_path: Path) -> None:
    odd = "x|y<b>\x1b[2J"
    table = frame.assign(ill=np.where(frame["ill"] == 1, odd, "# no"))
    table.to_csv(tmp_path / "t.csv", index=False)
    outcome = cli("fit", tmp_path / "t.csv", *ILL, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    card = card_of(tmp_path / "run")
    assert "\x1b" not in card
    assert r"| x\|y\<b\>" in card
    assert len(re.findall("^#", card, re.M)) == 6


def test_resuming_keeps_what_the_user_filled_in_and_overwriting_does_not(
    cli: Call, tables: Path, runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "regression", tmp_path / "run")
    before = card_of(run)
    filled = before.replace("Contact: (fill in)", "Contact: Ada")
    (run / "model-card.md").write_text(filled, encoding="utf-8")
    assert cli("fit", "--resume", "--progress=none", "-o", run).code == 0
    assert card_of(run) == filled
    flags = ["--config", run / "config.yaml", "--progress=none", "--overwrite", "-o", run]
    outcome = cli("fit", tables / "wide.csv", *flags)
    assert outcome.code == 0, outcome.err
    assert "Contact: (fill in)" in card_of(run)


def test_card_that_the_user_added_to_an_old_run_is_not_taken_for_ours(
    cli: Call, tables: Path, runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "regression", tmp_path / "run")
    (run / "manifest.json").unlink()  # as versions did that wrote no card
    (run / "model-card.md").write_text("mine")
    for flag in ("--overwrite", "--resume"):
        outcome = cli("fit", tables / "wide.csv", *ILL, *TINY, flag, "-o", run)
        assert outcome.code in (1, 2), outcome.err
        assert card_of(run) == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--validation={}"], "on 40 series of the table given for validation"),
        (["--validation-fraction=0"], "Nothing was kept apart for validation"),
        (["--stream"], "on 4 series of the table that were not trained on"),
    ],
)
def test_card_says_what_the_scores_were_measured_on(
    flags: list[str], words: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    table = tables / "wide.parquet"
    flags = [flag.format(table) for flag in flags]
    outcome = cli("fit", table, *ILL, *TINY, *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert words in card_of(tmp_path / "run")
