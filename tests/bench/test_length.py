"""`osciformer bench length`."""

from __future__ import annotations

import json

import pytest
import torch

from osciformer.bench import length
from osciformer.bench.documents import Document

SETTINGS = {"batch": 2, "dim": 8, "lengths": [4, 8], "device": "cpu"}


def test_a_run_leaves_a_table_and_a_picture(tmp_path, capsys):
    file, table = tmp_path / "length.json", tmp_path / "length.md"
    rows = "osciformer,osciformer_selective,transformer"
    given = ["--quick", "-o", str(file), "--rows", rows, "--pictures", str(tmp_path)]
    assert length.SUITE.main([*given, "--table", str(table)]) == 0
    found = json.loads(file.read_text())["rows"]
    assert {row["row"] for row in found} == set(rows.split(","))
    assert all(row["lengths"] == [16, 32] and min(row["ms"]) > 0 for row in found)
    text = table.read_text()
    assert text.count("| osciformer_selective |") == 2
    assert "| transformer |" in text
    assert (tmp_path / "length.png").stat().st_size > 10_000
    assert length.SUITE.main(given) == 0  # nothing is left to do
    assert "3 of them done" not in capsys.readouterr().err


@pytest.mark.parametrize("name", length.SUITE.rows)
def test_every_model_learns_from_a_step(name):
    model, call = length.make_call(name, SETTINGS, 6)
    grads = [g for g in call() if g is not None]
    assert len(grads) > len(list(model.parameters())) // 2
    assert all(bool(g.isfinite().all()) for g in grads)
    assert any(bool(g.any()) for g in grads)


def test_what_would_take_too_long_or_too_much_is_not_tried(monkeypatch):
    for name, most in (("MOST_SECONDS", 0.0), ("MOST_MIB", -1.0)):
        with monkeypatch.context() as patched:
            patched.setattr(length, name, most)
            row = length.measure({"row": "transformer"}, SETTINGS)
            assert row["lengths"] == [4]
            assert len(row["ms"]) == len(row["mib"]) == 1


def test_exponents_are_slopes_of_the_last_lengths(tmp_path):
    lengths = [64, 128, 256, 512, 1024]
    row = {"row": "transformer", "lengths": lengths, "parameters": 1}
    row |= {"ms": [900.0, *(n**1.5 for n in lengths[1:])], "mib": [1.0, 1.0, None, None, 2.0]}
    assert length.exponent(row, "ms") == "1.50"
    assert length.exponent(row, "mib") == "-"
    document = Document(tmp_path / "x.json", {**SETTINGS, "lengths": [*lengths, 2048]})
    document.runs.append({"command": "x"})
    document.add({"row": "transformer"}, {k: v for k, v in row.items() if k != "row"})
    line = next(x for x in length.SUITE.tables_of(document) if x.startswith("| transformer"))
    assert line.split("|")[-3:-1] == [" - ", " 1.50 "]  # the length that was not tried
    memory = [x for x in length.SUITE.tables_of(document) if x.startswith("| transformer")][1]
    assert [cell.strip() for cell in memory.split("|")[3:9]] == ["1", "1", "?", "?", "2", "-"]


@pytest.mark.parametrize("name", ["osciformer_resonator", "transformer", "mtan", "log_ncde"])
def test_models_are_causal_encoders_of_one_layer(name):
    model = length.make_model(name, 8)
    times = torch.rand(1, 5).sort().values
    values = torch.randn(1, 5, length.NUM_FEATURES)
    mask = torch.ones(1, 5, dtype=torch.bool)
    whole = model.encode(values, times, mask).states
    part = model.encode(values[:, :3], times[:, :3], mask[:, :3]).states
    assert torch.allclose(whole[:, :3], part, atol=1e-6)
