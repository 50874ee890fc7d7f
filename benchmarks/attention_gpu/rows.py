"""Rows, what follows from them by arithmetic, and the files that hold them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from osciformer._files import write_json, write_text
from osciformer.bench import report
from osciformer.bench.report import Row, markdown_table

#: Keys of a row, in order. Every row has all of them; what was not measured is None.
KEYS = (
    *("part", "implementation", "query", "pass", "n", "batch", "heads", "c", "j", "horizon"),
    *("dtype", "device", "ms", "low_ms", "high_ms", "repetitions", "first_ms", "peak_mib"),
    *("ratio_ms_sdpa", "ratio_mem_sdpa", "tflops_algorithm", "fraction_of_peak", "ns_per_token"),
    *("max_error", "frobenius_error", "works", "details", "error"),
)
make_row = partial(report.make_row, KEYS)

FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, BOTH)

#: Multiply-adds of matrix products for one pair of a row and a key at or before it, in one head, in
#: units of C. Only the products that the algorithm cannot do without, each counted once: a kernel
#: that computes the logits twice in its backward pass does more work, not more of these.
#:
#: ``dot`` (SDPA): logits C, output C; backward: logits again, weights' adjoint, dV, dQ, dK.
#: ``hold``: the averaged logit is a product of 3C coordinates, and so is the averaged value. The
#: backward pass has five products as above: 3C each.
#: ``shared`` (one query path for all rows): logits 2C, values 3C; backward: logits, dQ and dK 2C
#: each, weights' adjoint and dV 3C each.
PRODUCTS_PER_PAIR = {
    "dot": {"forward": 1 + 1, "backward": 5},
    "hold": {"forward": 3 + 3, "backward": 5 * 3},
    "shared": {"forward": 2 + 3, "backward": 3 * 2 + 2 * 3},
}
#: Query modes that are counted as one of the above. A mode that is not here has no count.
COUNTED_AS = {
    "dot": "dot",
    "hold": "hold",
    "linear": "shared",
    "ridge": "shared",
    "learned": "shared",
}


def causal_flops(
    query: str | None, pass_: str, *, n: int, batch: int, heads: int, c: int
) -> float | None:
    """Return floating-point operations of the matrix products of one call; None if not counted.

    A multiply-add is two operations. Pairs are those of a row and a key at or before it.
    """
    kind = COUNTED_AS.get(query or "")
    if kind is None or pass_ not in PASSES:
        return None
    products = PRODUCTS_PER_PAIR[kind]["forward"]
    if pass_ == BOTH:
        products += PRODUCTS_PER_PAIR[kind]["backward"]
    pairs = batch * heads * n * (n + 1) / 2
    return 2.0 * products * c * pairs


def complete(rows: list[Row], peak_tflops: float | None) -> list[Row]:
    """Set what follows from the time of each row, and the ratios to the SDPA rows among them.

    Args:
        rows: Rows that were measured together.
        peak_tflops: Measured rate of a large matrix product, None if unknown.

    Returns:
        The same rows.
    """
    base = {_shape(row): row for row in rows if is_sdpa(row)}
    for row in rows:
        if row["ms"]:
            shape = {key: row[key] for key in ("n", "batch", "heads", "c")}
            flops = causal_flops(row["query"], row["pass"], **shape)
            if flops is not None:
                row["tflops_algorithm"] = flops / row["ms"] / 1e9
                if peak_tflops:
                    row["fraction_of_peak"] = row["tflops_algorithm"] / peak_tflops
            row["ns_per_token"] = 1e6 * row["ms"] / (row["batch"] * row["n"])
        sdpa = base.get(_shape(row))
        if sdpa is not None:
            row["ratio_ms_sdpa"] = ratio(row["ms"], sdpa["ms"])
            row["ratio_mem_sdpa"] = ratio(row["peak_mib"], sdpa["peak_mib"])
    return rows


def is_sdpa(row: Row) -> bool:
    """Return whether a row is one of dot-product attention."""
    return str(row["implementation"]).startswith("sdpa")


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a quotient, None where a part of it is missing or 0."""
    return above / below if above and below else None


def repetitions(once_ms: float, seconds: float) -> int:
    """Return how often to repeat a call that took `once_ms`, within about `seconds`.

    At least 10 and at most 50 times; fewer than 10 only for calls longer than 200 ms.
    """
    fitting = int(1e3 * seconds / max(once_ms, 1e-3))
    if once_ms <= 200.0:
        return min(50, max(10, fitting))
    return min(10, max(1, fitting))


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return the figures that a reader looks for first.

    Returns:
        ``sdpa``: ratios of ``hold`` to SDPA by C, pass and N. ``modes``: slowest over fastest
        number of modes, by pass. ``contiformer``: its time and memory over ours by pass, way to
        run it and N, and the first N at which it runs out of memory and ours does not.
        ``paths``: time of `blocked` over ours, by query, C and pass.
        ``largest_error``: of output and gradients. ``failed``: number of rows with an error.
    """
    found: dict[str, Any] = {"sdpa": {}, "modes": {}, "contiformer": {}, "largest_error": None}
    found["paths"] = _of_paths([row for row in rows if row["part"] == "paths"])
    for row in rows:
        if row["part"] == "speed" and row["ratio_ms_sdpa"] and not is_sdpa(row):
            place = found["sdpa"].setdefault(f"C={row['c']} {row['pass']}", {})
            place[f"N={row['n']}"] = {
                "ms": row["ratio_ms_sdpa"],
                "memory": row["ratio_mem_sdpa"],
            }
    for pass_ in PASSES:
        times = [r["ms"] for r in _of(rows, "modes", pass_) if r["j"] is not None and r["ms"]]
        if len(times) > 1:
            found["modes"][pass_] = max(times) / min(times)
        compared = _against_contiformer(_of(rows, "contiformer", pass_))
        if compared:
            found["contiformer"][pass_] = compared
    errors = [r["max_error"] for r in rows if r["part"] == "error" and r["max_error"] is not None]
    if errors:
        found["largest_error"] = max(errors)
    found["failed"] = sum(row["error"] is not None for row in rows)
    return found


def _of_paths(rows: list[Row]) -> dict[str, Any]:
    """Compare each row of `blocked` with ours of the same query and shape."""
    ours = {(row["query"], *_shape(row)): row for row in rows if row["implementation"] != "blocked"}
    found: dict[str, Any] = {}
    for row in rows:
        our = ours.get((row["query"], *_shape(row)))
        if row["implementation"] == "blocked" and our is not None:
            place = found.setdefault(f"{row['query']} C={row['c']} {row['pass']}", {})
            place[f"N={row['n']}"] = ratio(row["ms"], our["ms"])
    return found


def _against_contiformer(rows: list[Row]) -> dict[str, Any]:
    """Compare each way to run ContiFormer with our row before it; rows are of one pass."""
    found: dict[str, Any] = {}
    ours: dict[int, Row] = {}
    for row in rows:
        if not is_contiformer(row):
            ours[row["n"]] = row
            continue
        our = ours.get(row["n"])
        if our is None or not our["ms"]:
            continue
        entry = found.setdefault(row["implementation"], {"first_n_alone": None})
        if row["ms"]:
            entry[f"N={row['n']}"] = {
                "ms": ratio(row["ms"], our["ms"]),
                "memory": ratio(row["peak_mib"], our["peak_mib"]),
            }
        elif is_out_of_memory(row) and entry["first_n_alone"] is None:
            entry["first_n_alone"] = row["n"]
            entry["peak_mib_ours"] = our["peak_mib"]
            entry["peak_mib_at_failure"] = row["peak_mib"]
    return found


def is_contiformer(row: Row) -> bool:
    """Return whether a row is one of ContiFormer, however run."""
    return str(row["implementation"]).startswith("contiformer")


def is_out_of_memory(row: Row) -> bool:
    """Return whether a row failed for want of memory."""
    return "OutOfMemory" in (row["error"] or "")


def middle(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of times as entries of a row."""
    if len(values) < 3:
        low, high = min(values), max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"ms": statistics.median(values), "low_ms": low, "high_ms": high}


def _of(rows: list[Row], part: str, pass_: str) -> list[Row]:
    return [row for row in rows if row["part"] == part and row["pass"] == pass_]


def _shape(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("pass", "n", "batch", "heads", "c"))


_FORMATS = {
    "ms": "{:.3f}",
    "low_ms": "{:.3f}",
    "high_ms": "{:.3f}",
    "first_ms": "{:.0f}",
    "peak_mib": "{:,.1f}",
    "ratio_ms_sdpa": "{:.2f}",
    "ratio_mem_sdpa": "{:.2f}",
    "tflops_algorithm": "{:.4g}",
    "fraction_of_peak": "{:.1%}",
    "ns_per_token": "{:.4g}",
    "horizon": "{:g}",
    "max_error": "{:.1e}",
    "frobenius_error": "{:.1e}",
}
# Left to the JSON file.
_NOT_IN_TABLES = ("part", "low_ms", "high_ms", "details")


class Document:
    """What was measured so far.

    Args:
        meta: What it was measured on.
        rows: Rows of an earlier run that are kept.
    """

    def __init__(self, meta: dict[str, Any], rows: Iterable[Row] = ()) -> None:
        self.meta = meta
        self.rows = list(rows)

    def save(self, output: Path | None, table: Path | None) -> None:
        """Write the files; a run that is stopped while writing leaves the former ones."""
        everything = {"meta": self.meta, "summary": summary(self.rows), "rows": self.rows}
        if output is not None:
            write_json(output, everything, indent=1)
        if table is not None:
            write_text(table, self.markdown() + "\n")

    def markdown(self) -> str:
        """Return the tables, one a part, then what failed and the kernels."""
        lines = [f"# {self.meta.get('gpu') or self.meta.get('cpu') or 'Results'}", ""]
        lines += [f"- {key}: {entry}" for key, entry in self.meta.items()]
        for part in dict.fromkeys(row["part"] for row in self.rows):
            of_part = [row for row in self.rows if row["part"] == part]
            lines += ["", f"## {part}", "", *part_table(of_part)]
        for row in self.rows:
            if row["part"] == "kernels" and row["details"]:
                lines += ["", *kernel_table(row)]
        return "\n".join(lines)


def part_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table: columns that are the same in all rows go into a line above."""
    columns = [key for key in KEYS if key not in _NOT_IN_TABLES]
    columns = [key for key in columns if any(row[key] is not None for row in rows)]
    shared = {}
    if len(rows) > 1:
        for key in columns:
            if key != "error" and all(row[key] == rows[0][key] for row in rows):
                shared[key] = rows[0][key]
    lines = []
    if shared:
        lines += ["; ".join(f"{key} {cell(key, entry)}" for key, entry in shared.items()), ""]
    columns = [key for key in columns if key not in shared]
    body = [[cell(key, row[key]) for key in columns] for row in rows]
    return lines + markdown_table(columns, body)


def kernel_table(row: Row) -> list[str]:
    """Return the kernels of one profiled call as the lines of a table."""
    details = row["details"]
    title = (
        f"Kernels of {row['query']}, {row['pass']}, N = {row['n']}, B = {row['batch']},"
        f" C = {row['c']}: {details['kernels_ms']:.3f} ms in {details['launches']:.0f} launches,"
        f" {row['ms']:.3f} ms a call"
    )
    body = [
        [
            f"`{entry['name'][:60]}`",
            f"{entry['ms']:.3f}",
            "-" if entry["share"] is None else f"{entry['share']:.1%}",
            f"{entry['calls']:.0f}",
        ]
        for entry in details["top"]
    ]
    return [title, "", *markdown_table(["kernel", "ms", "share", "launches"], body)]


def cell(key: str, entry: Any) -> str:
    """Return an entry of a row for a table, a dash for None."""
    if entry is None:
        return "-"
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return _FORMATS.get(key, "{}").format(entry).replace("|", "/").replace("\n", " ")
