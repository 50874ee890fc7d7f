"""The GPU benchmark: its arithmetic, its tables, and a tiny run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from .scripts import ROOT, load

cases, checks, measure, parts, rows_of = load(
    *(f"attention_gpu.{name}" for name in ("cases", "checks", "measure", "parts", "rows"))
)
(script,) = load("gpu_attention")

CPU = torch.device("cpu")
SHAPE = {"n": 8, "batch": 2, "heads": 4, "c": 16}


def row(implementation: str, query: str, **entries):
    entries = {"part": "speed", "pass_": "forward", **SHAPE, **entries}
    return rows_of.make_row(implementation=implementation, query=query, **entries)


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The JSON document and the Markdown of the whole script at toy size, in a process."""
    folder = tmp_path_factory.mktemp("gpu_attention")
    files = {"--output": folder / "deeper" / "out.json", "--table": folder / "out.md"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    arguments = [str(part) for pair in files.items() for part in pair]
    done = subprocess.run(
        [sys.executable, script.__file__, "--quick", "--device", "cpu", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(files["--output"].read_text()), files["--table"].read_text()


def test_every_part_has_rows_with_all_keys(quick_run):
    rows = quick_run[0]["rows"]
    assert all(tuple(found) == rows_of.KEYS for found in rows)
    assert {found["part"] for found in rows} == {*script.PARTS, "compile"} - {"graphs"}


def test_what_a_cpu_can_run_does_not_fail(quick_run):
    # The adjoint of ContiFormer needs torchdiffeq.
    failed = [
        found
        for found in quick_run[0]["rows"]
        if found["error"] and not found["implementation"].startswith("contiformer")
    ]
    assert failed == []


def test_rows_of_the_operator_have_ratios_to_sdpa(quick_run):
    for found in quick_run[0]["rows"]:
        if found["part"] in ("speed", "queries", "modes", "blocked"):
            assert found["ratio_ms_sdpa"] > 0
            assert found["ns_per_token"] > 0
            assert found["tflops_algorithm"] > 0
            assert found["fraction_of_peak"] > 0
            assert found["low_ms"] <= found["ms"] <= found["high_ms"]


def test_errors_are_those_of_bfloat16(quick_run):
    found = [r for r in quick_run[0]["rows"] if r["part"] == "error"]
    assert {r["query"] for r in found} == {"hold", "linear", "ridge", "learned"}
    assert all(0 < r["frobenius_error"] < 0.02 and 0 < r["max_error"] < 0.05 for r in found)
    assert {"out", "q", "k", "v", "key_omega", "value_zeta"} <= set(found[0]["details"])


def test_the_other_checks_work(quick_run):
    found = [r for r in quick_run[0]["rows"] if r["part"] in ("long", "compile", "kernels")]
    assert len(found) == 4
    assert all(r["works"] for r in found)
    profiled = [r["details"] for r in found if r["part"] == "kernels"]
    assert all(1 <= len(d["top"]) <= checks.TOP_KERNELS for d in profiled)


def test_meta_says_what_ran_without_paths(quick_run):
    meta = quick_run[0]["meta"]
    assert meta["command"] == (
        "python benchmarks/gpu_attention.py --quick --device cpu --output out.json --table out.md"
    )
    assert {"date", "torch", "triton", "commit", "matmul_tflops", "seconds"} <= set(meta)
    assert set(meta["seconds"]) == set(script.PARTS)


def test_markdown_has_a_table_for_every_part(quick_run):
    text = quick_run[1]
    for part in (*(set(script.PARTS) - {"graphs"}), "compile"):
        assert f"\n## {part}\n" in text
    assert "| implementation | query | pass |" in text
    assert "Kernels of hold, forward, N = 16" in text


def test_summary_compares_with_sdpa_and_contiformer(quick_run):
    found = quick_run[0]["summary"]
    assert set(found["sdpa"]) == {"C=4 forward", "C=4 forward+backward"}
    assert set(found["sdpa"]["C=4 forward"]) == {"N=64", "N=128"}
    assert found["modes"]["forward"] >= 1
    assert 0 < found["largest_error"] < 0.05


def test_append_replaces_the_rows_of_a_part_alone(tmp_path):
    output = tmp_path / "out.json"
    shared = ["--quick", "--device", "cpu", "--output", str(output), "--table", str(tmp_path / "t")]
    assert script.main([*shared, "--part", "modes", "--n", "8"]) == 0
    assert script.main([*shared, "--part", "speed", "--n", "8", "--append"]) == 0
    assert script.main([*shared, "--part=speed", "--n=8", "--c=2", "--append"]) == 0
    found = json.loads(output.read_text())
    assert {r["part"]: r["c"] for r in found["rows"]} == {"modes": 4, "speed": 2}
    assert len(found["meta"]["earlier_commands"]) == 2
    assert list(found["meta"]["seconds"]) == ["modes", "speed"]


def test_the_rest_runs_anew_after_the_device_broke(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(script, "is_broken", lambda device: True)
    monkeypatch.setattr(script.os, "execv", lambda path, argv: started.append(argv))
    shared = ["--quick", "--device", "cpu", "--output", str(tmp_path / "out.json"), "--n", "8"]
    script.main([*shared, "--table", str(tmp_path / "t.md"), "--part", "speed,modes"])
    options = script._parser().parse_args(started[0][2:])
    assert options.part == ["modes"]
    assert options.append
    assert 5 < options.minutes < 5.5  # what is left of the default


def test_late_measurements_are_skipped_and_recorded(tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--quick", "--device", "cpu", "--output", str(output), "--minutes", "0"]
    script.main([*arguments, "--table", str(tmp_path / "t.md")])
    rows = json.loads(output.read_text())["rows"]
    assert {r["error"] for r in rows} == {parts.LATE}
    assert {r["part"] for r in rows} == {*script.PARTS, "compile"} - {"graphs"}


def test_a_part_that_breaks_leaves_a_row(tmp_path, monkeypatch):
    def broken(run):
        raise RuntimeError("no luck in /home/someone/file.py")
        yield

    monkeypatch.setitem(script.PARTS, "speed", broken)
    output = tmp_path / "out.json"
    arguments = ["--quick", "--device", "cpu", "--part", "speed", "--output", str(output)]
    assert script.main([*arguments, "--table", str(tmp_path / "t.md")]) == 0
    (found,) = json.loads(output.read_text())["rows"]
    assert found["error"] == "RuntimeError: no luck in file.py"


def test_full_sizes_are_refused_on_a_cpu():
    with pytest.raises(SystemExit, match="needs --quick"):
        script.main(["--device", "cpu"])


@pytest.mark.parametrize(
    ("query", "pass_", "products"),
    [
        ("dot", "forward", 2),
        ("dot", "forward+backward", 7),
        ("hold", "forward", 6),
        ("hold", "forward+backward", 21),
        ("ridge", "forward", 5),
        ("linear", "forward+backward", 17),
    ],
)
def test_flops_count_causal_pairs(query, pass_, products):
    pairs = 2 * 4 * 36  # batch, heads, 1 + 2 + ... + 8
    assert rows_of.causal_flops(query, pass_, **SHAPE) == 2 * products * 16 * pairs


@pytest.mark.parametrize("query", ["hermite", None])
def test_flops_of_other_implementations_are_not_counted(query):
    assert rows_of.causal_flops(query, "forward", **SHAPE) is None


def test_summary_compares_blocked_with_ours_for_each_query():
    paths = {"part": "paths"}
    rows = [
        row("triton", "linear", **paths, ms=2.0),
        row("blocked", "linear", **paths, ms=20.0),
        row("triton", "hold", **paths, ms=4.0),
        row("blocked", "hold", **paths, error="RuntimeError"),
    ]
    found = rows_of.summary(rows)["paths"]
    assert found == {"linear C=16 forward": {"N=8": 10.0}, "hold C=16 forward": {"N=8": None}}


def test_ratios_are_to_sdpa_of_the_same_shape_and_pass():
    rows = [
        row("sdpa_flash", "dot", ms=2.0, peak_mib=10.0),
        row("triton", "hold", ms=3.0, peak_mib=25.0),
        row("triton", "hold", ms=3.0, peak_mib=25.0, pass_="forward+backward"),
        row("triton", "hold", error="RuntimeError"),
    ]
    rows_of.complete(rows, 100.0)
    assert [r["ratio_ms_sdpa"] for r in rows] == [1.0, 1.5, None, None]
    assert [r["ratio_mem_sdpa"] for r in rows] == [1.0, 2.5, None, None]
    flops = rows_of.causal_flops("hold", "forward", **SHAPE)
    assert rows[1]["tflops_algorithm"] == pytest.approx(flops / 3e-3 / 1e12)
    assert rows[1]["fraction_of_peak"] == pytest.approx(flops / 3e-3 / 1e14)
    assert rows[1]["ns_per_token"] == pytest.approx(3e6 / 16)


@pytest.mark.parametrize(
    ("once_ms", "seconds", "wanted"),
    [(0.1, 1.0, 50), (50.0, 1.0, 20), (150.0, 1.0, 10), (250.0, 1.0, 4), (9000.0, 1.0, 1)],
)
def test_long_calls_are_repeated_less(once_ms, seconds, wanted):
    assert rows_of.repetitions(once_ms, seconds) == wanted


def test_summary_finds_where_contiformer_does_not_fit():
    conti = {"part": "contiformer", "batch": 1}
    full = "OutOfMemoryError: CUDA out of memory"
    rows = [
        row("triton", "hold", **conti | {"n": 512}, ms=1.0, peak_mib=4.0),
        row("contiformer", "hermite", **conti | {"n": 512}, ms=50.0, peak_mib=400.0),
        row("triton", "hold", **conti | {"n": 1024}, ms=2.0, peak_mib=8.0),
        row("contiformer", "hermite", **conti | {"n": 1024}, error=full, peak_mib=999.0),
        # Each way to run it is compared with the row before its own.
        row("triton", "hold", **conti | {"n": 512}, ms=2.0, peak_mib=4.0),
        row("contiformer_adjoint", "hermite", **conti | {"n": 512}, ms=30.0, peak_mib=40.0),
    ]
    found = rows_of.summary(rows)["contiformer"]["forward"]
    assert found["contiformer"] == {
        "first_n_alone": 1024,
        "N=512": {"ms": 50.0, "memory": 100.0},
        "peak_mib_ours": 8.0,
        "peak_mib_at_failure": 999.0,
    }
    assert found["contiformer_adjoint"]["N=512"] == {"ms": 15.0, "memory": 10.0}
    assert rows_of.summary(rows)["failed"] == 1


@pytest.mark.parametrize(
    ("ms", "peak_mib", "wanted"),
    [
        (None, None, False),  # failed
        (100.0, 10.0, True),
        (900.0, 10.0, False),  # the next would take 3.6 s
        (900.0, 300.0, True),  # the next cannot fit, and fails soon
        (1100.0, 300.0, False),
    ],
)
def test_contiformer_grows_while_there_is_time(ms, peak_mib, wanted):
    last = row("contiformer", "hermite", ms=ms, peak_mib=peak_mib)
    assert parts.may_grow(last, limit_ms=1000.0, memory_mib=1000.0) is wanted


def test_a_failing_call_does_not_stop_the_others():
    def full():
        raise torch.cuda.OutOfMemoryError("no memory")

    calls = {"good": lambda: lambda: None, "bad": lambda: full, "worse": full}
    found = measure.measure_in_turn(calls, CPU, seconds=0.001)
    assert found["good"].is_good
    assert found["good"].entries["repetitions"] >= 10
    for name in ("bad", "worse"):
        assert not found[name].is_good
        assert found[name].entries["error"] == "OutOfMemoryError: no memory"


def test_a_first_call_beyond_patience_is_not_repeated():
    ran = []
    calls = {"slow": lambda: lambda: ran.append(1)}
    found = measure.measure_in_turn(calls, CPU, seconds=1.0, patience_ms={"slow": 0.0})
    assert len(ran) == found["slow"].entries["repetitions"] == 1


def test_errors_are_told_shortly():
    told = measure.in_words(ValueError("at /opt/x/y.py:3\n" + "long " * 500))
    assert told.startswith("ValueError: at y.py:3 long")
    assert len(told) < 450


@pytest.mark.parametrize("query", ["hold", "ridge", "learned"])
def test_inputs_are_irregular_and_in_range(query):
    case = cases.Case("blocked", query, "forward+backward", 256, 3, 2, 4)
    x = cases.make_inputs(case, CPU)
    times, gaps = x["key_times"], x["key_times"].diff(dim=1)
    assert x["query_times"] is times
    assert times.dtype == torch.float64
    assert (gaps >= 0).all()
    assert (gaps < 1e-3 * gaps.mean(dim=1, keepdim=True)).sum() >= 6
    assert times.amax(dim=1).tolist() == pytest.approx([4.0, 2.0, 1.0], rel=0.1)
    assert x["k"].dtype == torch.bfloat16
    assert x["key_omega"].min() >= 0.999 * torch.pi / 4
    assert x["key_omega"].max() <= 200.0
    assert ("q" in x) == (query != "learned")
    learned = {name for name, t in x.items() if t.requires_grad}
    assert learned == set(cases.leaf_names(x))


def test_tables_leave_out_what_is_empty_or_shared():
    rows = [row("sdpa", "dot", ms=1.0), row("triton", "hold", ms=2.0, works=True)]
    lines = rows_of.part_table(rows)
    assert lines[0] == "pass forward; n 8; batch 2; heads 4; c 16"
    assert lines[2:] == [
        "| implementation | query | ms | works |",
        "| --- | --- | --- | --- |",
        "| sdpa | dot | 1.000 | - |",
        "| triton | hold | 2.000 | yes |",
    ]


def test_files_hold_no_infinity(tmp_path):
    made = rows_of.Document({"command": "x"}, [row("triton", "hold", ms=float("nan"))])
    made.save(tmp_path / "out.json", tmp_path / "out.md")
    (found,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert found["ms"] is None
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.json", "out.md"]


def test_kernels_are_listed_by_time():
    spent = {"a": (1000.0, 2), "b": (3000.0, 4)}
    found = checks.breakdown(spent, 2, 2.5)
    assert [entry["name"] for entry in found["top"]] == ["b", "a"]
    assert found["kernels_ms"] == 2.0
    assert found["outside_kernels_ms"] == 0.5
    assert found["launches"] == 3
    assert found["top"][0]["share"] == 0.75


def test_rows_refuse_unknown_keys():
    with pytest.raises(ValueError, match="no key speed"):
        rows_of.make_row(speed=1.0)
