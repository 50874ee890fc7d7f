"""Ids, classes and columns keep their names on the way through the command line."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Call = Callable[..., Any]
QUICK = ["--model=resonator", "--families=summary", "--seed=0"]
ILL = ["--task=classification", "--time=hour", "--features=a,b"]
IDS = ["7", "07", "007", "1e2", "100", "=1+1", "-2", "@x", "+3", " 7"]
IDS += [f"n{number}" for number in range(20)]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def odd(frame: Any, tmp_path: Path) -> Any:
    """Return the table with ids and classes that look like numbers, and the path of its CSV."""
    some = frame[frame.who < len(IDS)]
    some = some.assign(who=[IDS[k] for k in some.who], ill=np.where(some.ill == 1, "01", "1"))
    some.to_csv(tmp_path / "odd.csv", index=False)
    return some, tmp_path / "odd.csv"


def test_ids_and_classes_come_back_as_written(cli: Call, odd: Any, tmp_path: Path) -> None:
    table, path = odd
    run, output = tmp_path / "run", tmp_path / "p.csv"
    flags = [*ILL, *QUICK, "--id=who", "--target=ill", '--class-weight={"01": 2}']
    outcome = cli("fit", path, *flags, "-o", run)
    assert outcome.code == 0, outcome.err
    assert cli("predict", run, path, "-o", output).code == 0
    rows = read(output)
    assert [row["who"] for row in rows] == IDS
    assert {row["prediction"] for row in rows} == {"01", "1"}
    assert cli("evaluate", run, path, "--bootstrap=0").code == 0
    # Spreadsheets would compute some of these ids.
    assert cli("predict", run, path, "--safe-csv", "-o", output).code == 0
    wanted = [f"'{id}" if id[0] in "=+-@" else id for id in IDS]
    assert [row["who"] for row in read(output)] == wanted
    refused = cli("predict", run, path, "--safe-csv", "-o", tmp_path / "p.parquet")
    assert refused.code == 2
    assert "--safe-csv is for output to CSV" in refused.err
    # Labels of another table, of another type.
    outcomes = table.groupby("who", as_index=False).ill.first()
    outcomes.to_parquet(tmp_path / "outcomes.parquet")
    labels = ["--labels", tmp_path / "outcomes.parquet"]
    outcome = cli("evaluate", run, path, *labels, "--target=ill", "--bootstrap=0")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ["prediction", "probability_1"])
def test_ids_called_like_predictions_are_kept(
    name: str, cli: Call, frame: Any, tmp_path: Path
) -> None:
    table = frame.rename(columns={"who": name})
    table.to_csv(tmp_path / "t.csv", index=False)
    flags = [*ILL, *QUICK, f"--id={name}", "--target=ill"]
    assert cli("fit", tmp_path / "t.csv", *flags, "-o", tmp_path / "run").code == 0
    outcome = cli("predict", tmp_path / "run", tmp_path / "t.csv", "-o", tmp_path / "p.csv")
    assert outcome.code == 0, outcome.err
    assert f"the predicted one is called '{name}_'" in outcome.err
    rows = read(tmp_path / "p.csv")
    assert [row[name] for row in rows] == [str(number) for number in range(40)]
    assert set(rows[0]) == {name, "prediction", "probability_0", "probability_1", f"{name}_"}


@pytest.mark.parametrize(("id", "time"), [("variable", "q0.5"), ("prediction", "variable")])
def test_keys_called_like_forecasts_are_kept(
    id: str, time: str, cli: Call, runs: Path, tables: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from osciformer.cli import predict

    load = predict.Model.load

    def renamed(*args: Any, **settings: Any) -> Any:
        model = load(*args, **settings)
        return model._replace(layout={**model.layout, "id": id, "time": time, "variable": "v"})

    monkeypatch.setattr(predict.Model, "load", renamed)
    text = (tables / "narrow.csv").read_text().replace("who,hour,variable", f"{id},{time},v", 1)
    (tmp_path / "t.csv").write_text(text)
    call = ["predict", runs / "forecasting", tmp_path / "t.csv", "--quantiles", "--horizon=2"]
    outcome = cli(*call, "--every=2", "-o", tmp_path / "p.csv")
    assert outcome.code == 0, outcome.err
    rows = read(tmp_path / "p.csv")
    names = ["variable", "prediction", *(f"q{level}" for level in (0.05, 0.25, 0.5, 0.75, 0.95))]
    wanted = [f"{name}_" if name in (id, time) else name for name in names]
    assert list(rows[0]) == [id, time, *wanted]
    assert [row[id] for row in rows[::2]] == [str(number) for number in range(40)]
    assert {row[wanted[0]] for row in rows} == {"a", "b"}


@pytest.mark.parametrize("entry", ["", "NA", "?"])
def test_missing_outcomes_are_named(
    entry: str, cli: Call, tables: Path, frame: Any, tmp_path: Path
) -> None:
    outcomes = frame.groupby("who", as_index=False).ill.first().astype(str)
    outcomes.loc[3, "ill"] = entry
    outcomes.to_csv(tmp_path / "o.csv", index=False)
    flags = [*ILL, *QUICK, "--id=who", "--labels", tmp_path / "o.csv", "--target=ill"]
    outcome = cli("fit", tables / "wide.parquet", *flags, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "label column 'ill' is empty for series '3'" in outcome.err or "series 3" in outcome.err
    assert not (tmp_path / "run").exists()


def test_blank_types_of_events_are_refused(cli: Call, tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("who,t,what\na,0,x\na,1,\nb,0,y\nb,1,x\n")
    flags = ["--task=events", "--id=who", "--time=t", "--type=what"]
    outcome = cli("fit", tmp_path / "e.csv", *flags, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "column 'what' has 1 rows without a type, the first is row 1" in outcome.err


@pytest.mark.parametrize(
    ("types", "names"),
    [
        (["0", "1", "2"], ["0", "1", "2"]),
        (["0", "01", "1"], ["0", "01", "1"]),
        (["1", "1", "3"], ["0", "1", "2", "3"]),
        (["-1", "x", "1"], ["-1", "1", "x"]),
    ],
)
def test_types_of_events_are_codes_or_names(
    types: list[str], names: list[str], tmp_path: Path
) -> None:
    from osciformer.cli.tables import read_events

    path, layout = tmp_path / "e.csv", {"id": "who", "time": "t", "type": "what"}
    path.write_text("who,t,what\n" + "".join(f"07,{k},{type}\n" for k, type in enumerate(types)))
    events = read_events(path, layout)
    assert events.ids.tolist() == ["07"]
    found = events.type_names or [str(number) for number in range(events.num_types)]
    assert list(found) == names
    # With the types of a model, names count: type 3 is the one called 3, not the fourth.
    known = read_events(path, layout, [*sorted(set(types)), "z"])
    assert [(known.type_names or ())[k] for k in known.types] == types


def test_control_characters_do_not_reach_the_terminal(cli: Call, tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e"
    (tmp_path / "t.csv").write_text(f"id,t,x\n{evil},0,1\n{evil},0,2\n", encoding="utf-8")
    flags = ["--task=imputation", "--id=id", "--time=t", "-o", tmp_path / "run"]
    outcome = cli("fit", tmp_path / "t.csv", *flags)
    assert outcome.code == 1
    assert r"\x1b[2J\u202e" in outcome.err
    assert "\x1b" not in outcome.err
    assert "\u202e" not in outcome.err


@pytest.mark.filterwarnings("default")
def test_warnings_are_a_line(cli: Call, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,t,x\na,0,16777217\na,1,2\n")
    outcome = cli("data", "describe", tmp_path / "t.csv", "--id=id", "--time=t")
    assert outcome.code == 0
    (line,) = outcome.err.splitlines()
    assert line.startswith("warning: feature column 'x': 1 whole numbers beyond 2**24 lose digits")


def test_warnings_that_differ_in_numbers_are_printed_once(capsys: pytest.CaptureFixture) -> None:
    from osciformer.cli.errors import guarded

    @guarded
    def warn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for text in ("part 1 loses 2 digits", "part 2 loses 17 digits", "another"):
                warnings.warn(text, stacklevel=1)

    warn()
    assert capsys.readouterr().err == "warning: part 1 loses 2 digits\nwarning: another\n"
