"""The bench command: what it prints, and that it reports no speed of a wrong backend."""

from __future__ import annotations

import json
import types

import pytest
import torch

from osciformer.bench.__main__ import main
from osciformer.bench.report import Report, make_row, shown_command
from osciformer.bench.speed import (
    LARGEST_ZETA,
    OMEGA_RANGE,
    SMALLEST_GAP,
    Setting,
    error_rows,
    failures,
    memory_row,
    peak_mib,
    wide_inputs,
)
from osciformer.ops import _dispatch
from osciformer.ops.attention import blocked

CPU = torch.device("cpu")
# In the order in which they are printed.
KINDS = {
    "case": str,
    "backend": str,
    "query": str,
    "pass": str,
    "n": int,
    "batch": int,
    "heads": int,
    "c": int,
    "j": (int, type(None)),
    "dtype": str,
    "device": str,
    "ms": (float, type(None)),
    "peak_mib": (float, type(None)),
    "error": (float, type(None)),
    "ratio_sdpa": (float, type(None)),
    "ratio_reference": (float, type(None)),
}
TINY = ["--quick", "--heads", "2", "--channels", "4", "--error-n", "3"]
LENGTHS = ["--n", "16,32", "--reference-n", "16", "--modes-n", "16", "--memory-n", "0"]


@pytest.fixture(scope="module")
def no_repetitions():
    """Repeat as little as the command allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("osciformer.bench.speed.MAX_REPETITIONS", 1)
        patch.setattr("osciformer.bench.speed.MIN_REPETITIONS", 1)
        yield


@pytest.fixture(scope="module")
def tiny_run(no_repetitions, tmp_path_factory):
    """Rows on the standard output and the file of one tiny run."""
    output = tmp_path_factory.mktemp("results") / "deeper" / "run.json"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        stream = types.SimpleNamespace(write=lines.append, flush=lambda: None)
        patch.setattr("sys.stdout", stream)
        status = main(["speed", "--json", *TINY, *LENGTHS, "--output", str(output)])
    assert status == 0
    rows = [json.loads(line) for line in "".join(lines).splitlines()]
    return rows, json.loads(output.read_text())


def select(rows, **entries):
    return [row for row in rows if all(row[key] == entry for key, entry in entries.items())]


def test_every_line_is_an_object_with_exactly_the_promised_keys(tiny_run):
    rows, _ = tiny_run
    for row in rows:
        assert list(row) == list(KINDS)
        for key, kind in KINDS.items():
            assert isinstance(row[key], kind), (key, row)
        assert row["pass"] in ("fwd", "fwdbwd")


def test_errors_come_first_for_every_query_and_dtype(tiny_run):
    rows, _ = tiny_run
    errors = select(rows, case="error")
    assert rows[: len(errors)] == errors
    found = {(row["query"], row["dtype"], row["pass"]) for row in errors}
    assert len(found) == len(errors) == 6 * 2 * 2
    assert all(0.0 < row["error"] < 1e-5 for row in errors)


@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
def test_ratios_divide_times_of_the_same_pass_and_length(tiny_run, which, length):
    rows = select(tiny_run[0], case="speed", **{"pass": which, "n": length})
    (sdpa,) = select(rows, backend="sdpa", query="dot")
    timed = select(rows, backend="blocked")
    assert {row["query"] for row in timed} == {"hold", "ridge"}
    for row in timed:
        assert row["ratio_sdpa"] == pytest.approx(row["ms"] / sdpa["ms"])
        references = select(rows, backend="reference", query=row["query"])
        assert len(references) == (length == 16 and which == "fwd")
        if references:
            assert row["ratio_reference"] == pytest.approx(row["ms"] / references[0]["ms"])
        else:
            assert row["ratio_reference"] is None


def test_modes_are_those_of_ridge(tiny_run):
    rows = select(tiny_run[0], case="modes")
    assert [row["j"] for row in rows] == [4, 8, 16, 32]
    assert {row["query"] for row in rows} == {"ridge"}


def test_file_holds_the_same_rows_and_how_they_were_measured(tiny_run):
    rows, saved = tiny_run
    assert saved["rows"] == rows
    wanted = {"command", "date", "torch", "osciformer", "python", "cpu", "threads"}
    assert wanted <= saved["meta"].keys()
    assert saved["meta"]["command"].startswith("python -m osciformer.bench speed --json")


def test_table_has_a_line_a_row(capsys):
    report = Report(is_json=False)
    report.add([make_row(case="speed", pass_="fwd", n=16, ms=1.25), make_row(case="speed")])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == list(KINDS)
    assert "1.250" in first.split()
    assert second.split() == ["speed"] + ["-"] * (len(KINDS) - 1)


def test_the_command_has_file_names_for_absolute_paths():
    command = shown_command("osciformer", "bench", arguments=["-o", "/home/me/cells", "--jobs=2"])
    assert command == "osciformer bench -o cells --jobs=2"


def test_unknown_key_of_a_row_is_refused():
    with pytest.raises(ValueError, match="no key colour"):
        make_row(colour="red")


class _Off(torch.autograd.Function):
    """The identity, with a gradient that is wrong by a thousandth."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


def break_blocked(monkeypatch, change):
    def attend(inputs):
        result = blocked.attend(inputs)
        return result._replace(out=change(result.out))

    broken = types.SimpleNamespace(attend=attend)
    monkeypatch.setitem(_dispatch.MODULES, "blocked", broken)


@pytest.mark.parametrize(
    "change", [lambda x: x * 1.001, lambda x: x * float("nan"), _Off.apply],
    ids=["outputs", "nan", "gradients"],
)  # fmt: skip
def test_no_speed_of_a_wrong_backend_is_reported(monkeypatch, capsys, change):
    break_blocked(monkeypatch, change)
    monkeypatch.setattr("osciformer.bench.__main__.QUERIES", ("hold",))
    assert main(["speed", "--json", *TINY, *LENGTHS]) == 1
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert {row["case"] for row in rows} == {"error"}
    assert "no speed is reported" in printed.err
    assert "query hold, float32" in printed.err


def test_small_errors_pass_and_large_ones_are_named():
    rows = error_rows("hold", "blocked", batch=2, lengths=(3,), device=CPU)
    assert failures(rows) == []
    rows[0]["error"] = 2e-10
    (line,) = failures(rows)
    assert "2.0e-10, more than 1e-10" in line


def test_wide_inputs_reach_both_ends_of_every_range():
    x = wide_inputs("hold", batch=2, length=5)
    for role in ("key", "value"):
        omega, zeta = x[f"{role}_omega"], x[f"{role}_zeta"]
        torch.testing.assert_close(torch.stack([omega.min(), omega.max()]).tolist(), [*OMEGA_RANGE])
        assert {0.0, 1.0, LARGEST_ZETA} <= set(zeta.flatten().tolist())
    gaps = x["key_times"].diff(dim=1)
    assert gaps.min().item() == pytest.approx(SMALLEST_GAP)
    assert gaps.max().item() == pytest.approx(1.0)
    # Rounded to float32 they are still distinct times.
    assert (x["key_times"].float().diff(dim=1) > 0).all()


def test_memory_of_a_call_counts_what_it_holds_at_its_peak():
    megabytes = 64

    def call():
        return torch.ones(megabytes, 2**18).sum()

    measured = peak_mib(call, CPU)
    assert measured is None or measured == pytest.approx(megabytes, abs=8)


def test_memory_row_measures_forward_and_backward():
    setting = Setting(batch=1, heads=2, c=4, dtype=torch.float32, device=CPU)
    row = memory_row("hold", 64, setting=setting)
    assert (row["case"], row["pass"], row["n"]) == ("memory", "fwdbwd", 64)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(no_repetitions, capsys):
    lengths = ["--n", "16", "--reference-n", "0", "--memory-n", "64"]
    assert main(["speed", "--json", *TINY, *lengths]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (row,) = select(rows, case="memory")
    assert list(row) == list(KINDS)
    assert row["n"] == 64
