"""`osciformer bench report`."""

from __future__ import annotations

import json

import pytest

from osciformer.bench.__main__ import main
from osciformer.bench.documents import Document
from osciformer.bench.tables import leaderboard
from osciformer.bench.tables.harness import find_table

ACCURACIES = {
    "gru_d": [95.0],
    "osciformer": [90.0, 92.0],
    "transformer": [91.0],
    "constant": [50.0],
}


def write(path, suite: str, scores, case: str, metric: str = "accuracy"):
    document = Document(path, {"suite": suite, "size": "small"})
    document.runs.append({"command": f"osciformer bench {suite}", "date": "2026-01-01"})
    for model, seeds in scores.items():
        for seed, score in enumerate(seeds):
            job = {"case": case, "model": model, "seed": seed, "trial": None}
            document.add(job, {"chosen": {}, "scores": {"test": {metric: score}}, "epochs": 3})
            document.add({**job, "trial": 0}, {"chosen": {}, "validation": 100.0})
    return path


def test_ranks_share_ties_and_need_a_competition(tmp_path):
    path = write(tmp_path / "xor.json", "xor", ACCURACIES, "event")
    settings = {"suite": "xor", "size": "small"}
    found = leaderboard.places(find_table("xor"), Document(path, settings))
    assert {name: (p.rank, p.rivals) for name, (p,) in found.items()} == {
        "gru_d": (1.0, 3),
        "osciformer": (2.5, 3),
        "transformer": (2.5, 3),
        "constant": (4.0, 3),
    }
    few = write(tmp_path / "few.json", "xor", {"gru_d": [1.0], "constant": [2.0]}, "event")
    document = Document(few, settings)
    assert leaderboard.places(find_table("xor"), document) == {}


def test_a_report_has_every_table_and_counts_suites_alike(tmp_path, capsys):
    files = [
        write(tmp_path / "xor.json", "xor", ACCURACIES, "event"),
        write(
            tmp_path / "sine.json",
            "sine",
            {"osciformer": [1.0], "gru_d": [2.0], "constant": [3.0]},
            "regression",
            "rmse",
        ),
    ]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"meta": {}, "rows": []}))
    page = tmp_path / "page.md"
    given = ["report", *map(str, files), str(other), "-o", str(page), "--pictures", str(tmp_path)]
    assert main(given) == 0
    text = page.read_text()
    assert "other.json has no table of models" in capsys.readouterr().err
    assert text.count("\n## ") == 2
    lines = [line for line in text.splitlines() if "%" in line and line.startswith("| ")]
    # osciformer: half of three rivals behind in one suite, all in the other.
    assert lines[0] == "| gru_d | 75 % | 1.0 | 2.0 |"
    assert lines[1] == "| osciformer | 75 % | 2.5 | 1.0 |"
    assert lines[2] == "| transformer | 50 % | 2.5 | - |"
    assert (tmp_path / "table_xor_small.png").stat().st_size > 5000
    assert text.count("](table_xor_small.png)") == text.count("](table_sine_small.png)") == 1


def test_two_files_of_a_suite_count_together_and_equal_scores_are_drawn(tmp_path):
    # The mean of three such numbers lies beside them.
    scores = {"osciformer": [0.1, 0.1, 0.1], "gru_d": [0.2] * 3, "constant": [0.3] * 3}
    first = write(tmp_path / "a.json", "sine", scores, "regression", "rmse")
    second = write(tmp_path / "b.json", "sine", {**scores, "gru_d": [0.0]}, "regression", "rmse")
    page = tmp_path / "page.md"
    given = ["report", str(first), str(second), "-o", str(page), "--pictures", str(tmp_path)]
    assert main(given) == 0
    assert "| osciformer | 75 % | 1.5 |" in page.read_text()


def test_files_without_a_table_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="no file has rows of a table"):
        main(["report", str(path), "-o", str(tmp_path / "page.md")])
