"""The report of the benchmark of events: differences, marks and counts, and the scores in it."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pytorch_lightning")

from osciformer.bench.events import report
from osciformer.events import EventSequences, score
from osciformer.events.classical import PoissonProcess

# The report.


def cell(model: str, repeat: int, ll: float, *, dataset: str = "folds", **more: float) -> dict:
    data = {part: {"sequences": 3, "events": 9, "scored": 6} for part in ("train", "dev", "test")}
    data |= {"types": 2, "time_unit": "h", "longest_sequence": 4, "mean_gap": 1.0}
    data |= {"longest_train_gap": 2.0, "smallest_gap": 0.5, "zero_gaps": 0}
    row = {
        "dataset": dataset, "model": model, "repeat": repeat, "error": None, "ll_micro": ll,
        "ll_macro": ll, "ll_error": 1e-7, "accuracy": 0.5, "accuracy_at_time": 0.5,
        "time_rmse": 1.0, "time_mae": 1.0, "dev_ll": ll, "parameters": 10, "data": data,
        "training": None, "origin": {"command": "osciformer bench events"},
    }  # fmt: skip
    return row | more


def test_differences_are_paired(toy_task):
    ours, theirs = [1.0, 2.0, 4.0], [0.5, 1.9, 3.6]
    rows = [cell("osciformer", n, ll) for n, ll in enumerate(ours, 1)]
    rows += [cell("rmtpp", n, ll) for n, ll in enumerate(theirs, 1)]
    rows += [cell("poisson", 1, 0.0)]
    cells = report.good_cells(rows)
    found = report.differences(cells)
    # 0.5, 0.1, 0.4: mean 1/3, standard deviation sqrt(0.13 / 3)
    assert found["rmtpp"].mean == pytest.approx(1 / 3)
    assert found["rmtpp"].error == pytest.approx(math.sqrt(0.13 / 3) / math.sqrt(3))
    assert found["rmtpp"].is_within_spread  # 0.333 < 4.303 x 0.12
    assert found["poisson"].count == 1  # only the fold that both have
    spread = report.spreads(cells, "ll_micro").loc["osciformer"]
    assert (spread["mean"], spread["sd"]) == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)))


def test_a_constant_model_is_compared_with_every_seed(toy_task):
    rows = [cell("osciformer", n, 1.0 + n / 100, dataset="seeds") for n in range(5)]
    rows += [cell("renewal_markov", 0, 0.5, dataset="seeds")]
    found = report.differences(report.good_cells(rows))["renewal_markov"]
    assert found.count == 5
    assert found.mean == pytest.approx(0.52)
    assert not found.is_within_spread


def test_the_head_is_chosen_by_dev_and_not_by_test(toy_task):
    rows = [
        cell("osciformer", 1, 0.9, dev_ll=0.1),
        cell("osciformer_softplus", 1, 0.2, dev_ll=0.3),
        cell("osciformer_decay", 1, 0.5, dev_ll=0.2),
        cell("osciformer", 2, 0.9, dev_ll=0.1),
    ]
    cells = report.good_cells(rows)
    chosen = cells[cells["model"] == report.CHOSEN_HEAD]
    assert chosen[["repeat", "ll_micro"]].to_numpy().tolist() == [[1, 0.2]]


def test_the_page_marks_the_best_and_what_is_within_the_spread(toy_task):
    rows = [cell("osciformer", n, ll) for n, ll in ((1, -1.0), (2, -1.2))]
    rows += [cell("rmtpp", n, ll, accuracy=0.9) for n, ll in ((1, -1.1), (2, -1.15))]
    rows += [cell("renewal_markov", n, -0.5, time_rmse=0.25) for n in (1, 2)]
    rows += [{**cell("mtan", 1, 0.0), "error": "MemoryError: too much"}]
    speeds = [{"dataset": "folds", "model": "rmtpp", "seconds": 0.125, "origin": {"command": "x"}}]
    page = report.markdown(rows, speeds, "osciformer bench events")
    lines = {line.split(" | ")[0]: line for line in page.split("## folds")[1].splitlines()}
    assert "**-1.100 ± 0.141**" in lines["| OsciFormer, mixture"]
    assert "| **0.900 ± 0.000** \\* |" in lines["| RMTPP"]
    assert "| +0.025 ± 0.075 ≈ |" in lines["| RMTPP"]
    assert "| 0.12 |" in lines["| RMTPP"] or "| 0.13 |" in lines["| RMTPP"]
    assert "| -0.500 ± 0.000 \\* |" in lines["| renewal x Markov"]
    assert "| 0.25 ± 0 \\* |" in lines["| renewal x Markov"]
    assert "failed: folds, mtan, 1: MemoryError: too much" in page
    assert "| mTAN |" not in page
    fewer = report.markdown(rows[:-2], speeds, "osciformer bench events")
    assert "| renewal x Markov | -0.500 (1) |" in fewer
    said = "folds, beside renewal x Markov: mixture 0.600 behind (± 0.100, within the spread)."
    assert said in page
    assert "folds, beside RMTPP: mixture 0.025 ahead (± 0.075, within the spread)." in fewer
    content = report.document(rows, speeds, "osciformer bench events")
    assert content["summary"]["folds"]["rmtpp"]["reference_ahead"]["mean"] == pytest.approx(0.025)
    assert len(content["rows"]) == 7


def test_a_score_that_some_runs_lack_is_counted_and_is_never_the_best(toy_task):
    rows = [cell("osciformer", n, -1.0, accuracy=0.5) for n in (1, 2)]
    rows += [cell("mtan", 1, -1.1, accuracy=0.9), cell("mtan", 2, -1.1, accuracy=None)]
    page = report.markdown(rows, [], "osciformer bench events")
    overview = page.split("## Overview: accuracy")[1].split("## folds")[0]
    assert "| mTAN | 0.900 (1) |" in overview
    assert "| OsciFormer, mixture | **0.500 ± 0.000** \\* |" in overview
    (line,) = [row for row in page.split("## folds")[1].splitlines() if "| mTAN" in row]
    assert line.startswith("| mTAN | 2 | -1.100 ± 0.000 |")
    assert "| 0.900 (1) |" in line


def test_horizons_have_tables_of_their_own_where_they_were_scored(toy_task):
    ahead = {"horizon_t_map": 0.4, "horizon_transport": 12.0}
    rows = [cell("osciformer", 1, -1.0, **ahead), cell("osciformer", 2, -1.0)]
    rows += [cell("rmtpp", 1, -1.1, horizon_t_map=0.1, horizon_transport=14.0)]
    scored = ("ll_micro", "ll_macro", "dev_ll", "accuracy", "parameters", "ll_error")
    rule = {**cell("repeat", 1, 0.0), **dict.fromkeys(scored)}
    rows += [{**rule, "horizon_t_map": 0.2, "horizon_transport": 11.0}]
    rows += [cell("osciformer", 1, -1.0, dataset="seeds")]
    page = report.markdown(rows, [], "osciformer bench events")
    likelihoods = page.split("## Overview: LL")[1].split("## Overview")[0]
    assert "the last ten again" not in likelihoods
    assert "beside RMTPP: mixture 0.100 ahead" in likelihoods
    precision = page.split("events, T-mAP")[1].split("## Overview")[0]
    assert "| model | folds |" in precision
    assert "| OsciFormer, mixture | **0.400** \\* (1) |" in precision
    distance = page.split("events, OTD")[1].split("## folds")[0]
    assert "| the last ten again | 11.000 \\* (1) |" in distance
    assert "| OsciFormer, mixture | **12.000** (1) |" in distance
    table, other = page.split("## folds")[1].split("## seeds")
    assert "| T-mAP | OTD |" in table
    assert "OTD" not in other.split("## How")[0]
    summary = report.document(rows, [], "osciformer bench events")["summary"]["folds"]
    assert summary["repeat"]["ll_micro"] is None
    assert summary["repeat"]["horizon_transport"]["mean"] == 11.0


# Scores.


def test_restricted_and_conditional_expectations_differ_as_they_should():
    events = EventSequences.from_arrays([[0.0, 1.0, 1.5]])
    process = PoissonProcess([1.0])
    restricted = score(process, events, horizon=2.0, expectation="restricted")
    mean = 1 - math.exp(-2.0)
    expected = math.sqrt(((mean - 1.0) ** 2 + (mean - 0.5) ** 2) / 2)
    assert restricted.time_rmse == pytest.approx(expected, rel=1e-5)
    given = mean - 2.0 * math.exp(-2.0)
    given /= 1 - math.exp(-2.0)
    expected = math.sqrt(((given - 1.0) ** 2 + (given - 0.5) ** 2) / 2)
    assert score(process, events, horizon=2.0).time_rmse == pytest.approx(expected, rel=1e-5)
    rough = score(process, events, horizon=2.0, prediction_tolerance=1e-3)
    assert rough.time_rmse == pytest.approx(expected, rel=1e-2)
    with pytest.raises(ValueError, match="expectation"):
        score(process, events, expectation="typical")  # type: ignore[arg-type]
