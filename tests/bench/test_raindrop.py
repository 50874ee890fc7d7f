"""The benchmark in Raindrop's protocol, on toy stays with known labels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import average_precision_score, roc_auc_score

from osciformer.bench.documents import Document
from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier

from .scripts import load

shared, script = load("shared", "raindrop")

SETTINGS = {"estimator": shared.TINY, "device": "cpu", "checkpoints": None, "stays": 10**6}


def stays(count: int, seed: int = 0) -> IrregularSeries:
    """Return stays whose level tells the label, with noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    times = [np.sort(generator.uniform(0, 2880, 6)) for _ in range(count)]
    values = [generator.normal(size=(6, 2)) + 0.7 * label for label in labels]
    return IrregularSeries.from_arrays(times, values, labels=labels, ids=np.arange(count))


def test_a_split_has_parts_of_four_fifths_and_two_tenths():
    series = stays(50)
    parts = script.split_stays(series, 0)
    assert [len(part) for part in parts] == [40, 5, 5]
    assert sorted(np.concatenate([part.ids for part in parts])) == list(range(50))
    others = script.split_stays(series, 1)
    assert set(parts.test.ids) != set(others.test.ids)
    assert len(script.split_stays(series, 0, 20).train) == 16


@pytest.fixture(scope="module")
def rows():
    """One split of 120 stays: resonators, boosting and a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "load_stays", lambda: stays(120))
        methods = ("resonators", "boosting", "network")
        jobs = [{"method": method, "seed": 3} for method in methods]
        return [job | script.work(job, SETTINGS) for job in jobs]


def test_scores_are_those_of_scikit_learn_on_the_test_stays(rows):
    test = script.split_stays(stays(120), 3).test
    for row in rows:
        assert row["sizes"] == [96, 12, 12]
        assert row["ids"] == test.ids.tolist()
        assert row["labels"] == test.labels.tolist()
        assert row["auroc"] == pytest.approx(roc_auc_score(test.labels, row["logits"]))
        chance = expit(row["logits"])
        assert row["auprc"] == pytest.approx(average_precision_score(test.labels, chance))
    assert rows[0]["auroc"] > 0.7
    assert 1 <= rows[1]["epochs"] <= 4


def test_the_joined_row_is_what_the_joined_classifier_says(rows):
    train, validation, test = script.split_stays(stays(120), 3)
    model = OsciFormerClassifier(**shared.TINY, random_state=3, accelerator="cpu")
    model.fit(train, validation_data=validation)
    joined, *others = script.with_joined(rows)
    assert others == rows
    assert joined["network_weight"] == model.network_weight_
    chance = model.predict_proba(test)[:, 1]
    assert expit(joined["logits"]) == pytest.approx(chance, abs=1e-4)
    assert joined["cpu_seconds"] == rows[0]["cpu_seconds"] + rows[2]["cpu_seconds"]


def test_nothing_is_joined_or_compared_without_both_parts(rows):
    assert script.with_joined(rows[:2]) == rows[:2]
    assert script.differences(rows[:2]) == {}


def test_differences_are_of_the_mean_and_have_its_sign(rows):
    worse = {**rows[1], "logits": [-x for x in rows[1]["logits"]]}
    found = script.with_joined([rows[0], worse, rows[2]])
    compared = script.differences(found, rounds=50)
    entry = compared["auroc"]["boosting"]
    labels = rows[0]["labels"]
    wanted = roc_auc_score(labels, found[0]["logits"]) - roc_auc_score(labels, worse["logits"])
    assert entry["difference"] == pytest.approx(wanted)
    assert entry["low"] < entry["difference"] < entry["high"]
    assert set(compared["auprc"]) == {"resonators", "boosting", "network"}


def test_the_table_has_all_models_and_published_numbers_apart(rows, tmp_path):
    found = Document(tmp_path / "out.json", {"estimator": {}, "stays": None})
    found.runs.append(shared.describe("raindrop.py", [], commit="abc"))
    for row in rows:
        found.add({"method": row["method"], "seed": 3}, row)
    lines = script.tables(found)
    table = [line for line in lines if line.startswith("| ")]
    shown = [line.split(" | ")[0] for line in table]
    assert shown[2:6] == ["| `osciformer`", "| `resonators`", "| `boosting`", "| `network`"]
    mine = next(line for line in table if "resonators" in line)
    assert f" {100 * rows[0]['auroc']:.1f} | " in mine
    theirs = next(line for line in table if line.startswith("| MTM"))
    assert theirs == "| MTM | - | - | - | - | - | 88.0 / 58.6 | a note on arXiv 2509.17809 |"
    assert any(line.startswith("- boosting: ") for line in lines)
