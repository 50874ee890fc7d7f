"""`bench layer`: what it prints, and that it reports no time of a wrong backend."""

from __future__ import annotations

import json
import types

from osciformer.bench.__main__ import main
from osciformer.bench.layer import KEYS
from osciformer.ops import _dispatch
from osciformer.ops.attention import short

SMALL = ["layer", "--shapes", "2x9x8", "--heads", "2", "--seconds", "0.01", "--json"]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_every_layer_is_timed_beside_the_others(capsys, tmp_path):
    assert main([*SMALL, "--output", str(tmp_path / "layer.json")]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert json.loads((tmp_path / "layer.json").read_text())["rows"] == rows
    assert all(tuple(row) == KEYS for row in rows)
    names = ["plain", "gru", "auto", "blocked"]
    wanted = [(name, which) for which in ("fwd", "fwdbwd") for name in names]
    assert [(row["layer"], row["pass"]) for row in rows] == wanted
    assert all(row["ms"] > 0 and row["ratio_gru"] > 0 for row in rows)
    assert all(row["ratio_plain"] == 1 for row in rows if row["layer"] == "plain")
    assert all(row["error"] < 1e-6 for row in rows if row["layer"] in ("auto", "blocked"))


def test_a_wrong_backend_has_no_times(capsys, monkeypatch):
    def attend(inputs):
        found = short.attend(inputs)
        return found._replace(out=found.out * 1.001)

    monkeypatch.setitem(_dispatch.MODULES, "short", types.SimpleNamespace(attend=attend))
    assert main([*SMALL, "--backends", "short,blocked"]) == 1
    captured = capsys.readouterr()
    assert "short differs from blocked" in captured.err
    assert {row["layer"] for row in rows_of(captured.out) if row["ms"] is None} == {"short"}
