"""The tables of the benchmark of events, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osciformer.bench.events.cells import MODELS, find_model
from osciformer.bench.events.datasets import TASKS
from osciformer.bench.events.summary import (
    CHOSEN_HEAD,
    REFERENCE,
    SCORES,
    Difference,
    Row,
    best_of,
    by_model,
    differences,
    good_rows,
    is_constant,
    kind_of,
    spread_of,
    title_of,
)

_FITTED = ("trivial", "classical", "neural")
_HEADINGS = {
    "ll_micro": "LL",
    "ll_macro": "LL macro",
    "accuracy": "accuracy",
    "accuracy_at_time": "at its time",
    "time_rmse": "RMSE",
    "time_mae": "MAE",
}
PROTOCOL = """\
Each event after the first is predicted from those before it. **LL** is the log-likelihood in nats
per scored event (micro average) in the stated unit of time, without a term after the last event;
**LL macro** is that of the ContiFormer protocol, of each sequence divided by all its events, then
the mean. **Accuracy** is that of the likeliest type whenever the event would come, **at its
time** when the time is known. **RMSE** is of the expected gap (gaps beyond the longest training
gap count as that), **MAE** of the median gap. Mean ± standard deviation over folds or seeds.
Settings and epochs are chosen by the LL of the dev part alone, and the test part is scored once.
All neural models have the same epochs, patience, batches and learning rates to choose from, and
the width 64 (ContiFormer 32) or one of those named below. **Blended** is a network
and the classical processes of `blend_with="auto"` as one, by weights that the dev part decides.

Bold: the best neural model. \\*: the best of all fitted models; both of those with all runs.
**Δ LL** is how much better OsciFormer with the mixture head is, paired over folds or seeds, ± its
standard error; ≈ where 0 lies within the 95 % interval of Student's t, which knows folds or seeds
and not the size of the test part. Models without randomness have one run where only seeds differ. A
row "head by dev" takes, at each repeat, the head of OsciFormer with the best dev LL; the dev LL of
a blended row is that of its network alone. In brackets: how many runs have the score, where that
is fewer than of others; some were scored by their likelihood alone. Seconds of an epoch are those
of training alone, one model at a time (`--speed`); a dash where that was not measured."""


def markdown(rows: Sequence[Row], speeds: Sequence[Row], command: str) -> str:
    """Return the page: protocol, an overview, a table for each data set, and what failed.

    Args:
        rows: Contents of all cells.
        speeds: Times of epochs.
        command: That writes this page.
    """
    good = good_rows(rows)
    datasets = [name for name in TASKS if any(row["dataset"] == name for row in good)]
    lines = ["# Event prediction", "", PROTOCOL, ""]
    if datasets:
        lines += ["## Overview: LL in nats per event", "", *_overview(good, datasets, "ll_micro")]
        lines += ["", *_verdicts(good, datasets)]
        lines += ["", "## Overview: accuracy", "", *_overview(good, datasets, "accuracy")]
    for dataset in datasets:
        lines += ["", f"## {TASKS[dataset].title}", "", *_notes(good, dataset), ""]
        lines += _table(good, speeds, dataset)
    lines += ["", "## How it was run", "", *_origins(rows, speeds)]
    lines += ["", "```text", command, "```"]
    return "\n".join(lines) + "\n"


def _names(cells: dict[str, dict[int, Row]]) -> list[str]:
    """Return the models in the order of the table, others behind."""
    order = list(MODELS)
    place = order.index("osciformer_decay") + 1
    order.insert(place, CHOSEN_HEAD)
    return sorted(cells, key=lambda name: order.index(name) if name in order else len(order))


def _overview(rows: Sequence[Row], datasets: Sequence[str], key: str) -> list[str]:
    cells = {dataset: by_model(rows, dataset) for dataset in datasets}
    names = _names({name: {} for of_dataset in cells.values() for name in of_dataset})
    body = []
    for name in names:
        line = [title_of(name)]
        for dataset in datasets:
            wanted = max(len(of_model) for of_model in cells[dataset].values())
            line.append(_score(cells[dataset], name, key, runs=wanted))
        body.append(line)
    return _markdown_table(["model", *(TASKS[dataset].title for dataset in datasets)], body)


def _score(cells: dict[str, dict[int, Row]], name: str, key: str, *, runs: int) -> str:
    """Return mean and spread, with the number of runs that have the score if that is short."""
    spread = spread_of(cells.get(name, {}), key)
    if spread is None or (key.startswith("accuracy") and _num_types(cells) == 1):
        return "-"
    forms = ("{:.4g}", "{:.2g}") if key.startswith("time") else ("{:.3f}", "{:.3f}")
    text = forms[0].format(spread.mean)
    if spread.sd is not None:
        text += f" ± {forms[1].format(spread.sd)}"
    if name == best_of(cells, key, ("neural",)):
        text = f"**{text}**"
    if name == best_of(cells, key, _FITTED):
        text += " \\*"
    is_short = spread.count < runs and not is_constant(name, _first(cells)["dataset"])
    return text + (f" ({spread.count})" if is_short else "")


def _num_types(cells: dict[str, dict[int, Row]]) -> int:
    return int(_first(cells)["data"]["types"])


def _first(cells: dict[str, dict[int, Row]]) -> Row:
    return next(iter(next(iter(cells.values())).values()))


def _verdicts(rows: Sequence[Row], datasets: Sequence[str]) -> list[str]:
    """Return a sentence per data set about OsciFormer's rows and the best of the others."""
    lines = []
    for dataset in datasets:
        cells = by_model(rows, dataset)
        others = {n: c for n, c in cells.items() if not n.startswith(REFERENCE)}
        best = best_of(others, "ll_micro", _FITTED)
        if best is None:
            continue
        compared = [
            (title_of(name).removeprefix("OsciFormer, "), found[best])
            for name in _names(cells)
            if name.startswith(REFERENCE) and name != CHOSEN_HEAD
            for found in [differences(rows, dataset, reference=name)]
            if best in found
        ]
        if compared:
            said = "; ".join(f"{title} {_ahead(found)}" for title, found in compared)
            lines.append(f"- {TASKS[dataset].title}, beside {title_of(best)}: {said}.")
    if not lines:
        return []
    return ["OsciFormer beside the best other fitted model, in nats per event:", "", *lines]


def _ahead(found: Difference) -> str:
    text = f"{abs(found.mean):.3f} {'ahead' if found.mean > 0 else 'behind'}"
    if found.error is None:
        return text + " by a single run"
    return f"{text} (± {found.error:.3f}{', within the spread' if found.is_within_spread else ''})"


def _notes(rows: Sequence[Row], dataset: str) -> list[str]:
    task = TASKS[dataset]
    cells = by_model(rows, dataset)
    data = _first(cells)["data"]
    sizes = ", ".join(
        f"{part} {data[part]['sequences']:,} ({data[part]['scored']:,} scored events)"
        for part in ("train", "dev", "test")
    )
    errors = [row["ll_error"] for row in rows if row["dataset"] == dataset]
    first = f"{task.repeat} {_first(cells)['repeat']}"
    return [
        f"{task.notes} Sequences of {first}: {sizes}; {data['types']} types; time in "
        f"{data['time_unit']}, mean gap {data['mean_gap']:.3g}, smallest positive gap "
        f"{data['smallest_gap']:.2g}, {data['zero_gaps']} gaps of zero, longest sequence "
        f"{data['longest_sequence']} events. Largest estimated error of LL by quadrature: "
        f"{max(errors):.1e}."
    ]


def _table(rows: Sequence[Row], speeds: Sequence[Row], dataset: str) -> list[str]:
    cells = by_model(rows, dataset)
    deltas = differences(rows, dataset)
    keys = [key for key in SCORES if not (key.startswith("accuracy") and _num_types(cells) == 1)]
    times = {row["model"]: row["seconds"] for row in speeds if row["dataset"] == dataset}
    body = []
    for name in _names(cells):
        of_model = cells[name]
        runs = len(of_model)
        line = [title_of(name), str(runs), *(_score(cells, name, key, runs=runs) for key in keys)]
        line.append(_delta(deltas.get(name)))
        dev = spread_of(of_model, "dev_ll")
        line.append("-" if dev is None else f"{dev.mean:.3f}")
        line.append(f"{times[name]:.2g}" if name in times else "-")
        for key in ("epochs", "parameters"):
            spread = spread_of(of_model, key)
            line.append("-" if spread is None else f"{spread.mean:,.0f}")
        stopped = sum(bool(cell.get("hit_time_limit")) for cell in of_model.values())
        line[0] += f" ({stopped} stopped by the time limit)" if stopped else ""
        body.append(line)
    columns = ["model", "runs", *(_HEADINGS[key] for key in keys), "Δ LL", "dev LL"]
    return _markdown_table([*columns, "s/epoch", "epochs", "parameters"], body)


def _delta(found: Difference | None) -> str:
    if found is None:
        return "-"
    text = f"{found.mean:+.3f}"
    if found.error is not None:
        text += f" ± {found.error:.3f}"
    return text + (" ≈" if found.is_within_spread and found.error is not None else "")


def _origins(rows: Sequence[Row], speeds: Sequence[Row]) -> list[str]:
    lines = []
    shown = ("commit", "date", "torch", "cpu", "gpu", "osciformer")
    for text in dict.fromkeys(json.dumps(row["origin"]) for row in (*rows, *speeds)):
        origin = json.loads(text)
        parts = [f"{key} {origin[key]}" for key in shown if origin.get(key)]
        lines.append(f"- `{origin['command']}`: {', '.join(parts)}")
    settings = [row["training"] for row in rows if row.get("training")]
    for text in dict.fromkeys(json.dumps(entry) for entry in settings):
        entries = json.loads(text).items()
        lines.append("- training: " + ", ".join(f"{key} {value}" for key, value in entries))
    for row in rows:
        if row["error"] is not None:
            where = f"{row['dataset']}, {row['model']}, {row['repeat']}"
            lines.append(f"- failed: {where}: {row['error']}")
    return lines


def document(rows: Sequence[Row], speeds: Sequence[Row], command: str) -> dict[str, Any]:
    """Return everything for a JSON file: summary, differences, and every cell.

    Args:
        rows: Contents of all cells.
        speeds: Times of epochs.
        command: That writes the file.
    """
    good = good_rows(rows)
    origins: list[Any] = []
    kept = []
    for row in rows:
        if row["origin"] not in origins:
            origins.append(row["origin"])
        kept.append({**row, "origin": origins.index(row["origin"])})
    summary: dict[str, Any] = {}
    for dataset in dict.fromkeys(row["dataset"] for row in good):
        of_dataset: dict[str, Any] = {}
        deltas = differences(good, dataset)
        for name, cells in by_model(good, dataset).items():
            spreads = {key: spread_of(cells, key) for key in (*SCORES, "dev_ll", "epochs")}
            entry: dict[str, Any] = {"kind": kind_of(name), "repeats": sorted(cells)}
            entry |= {key: None if item is None else vars(item) for key, item in spreads.items()}
            found = deltas.get(name)
            if found is not None:
                entry["reference_ahead"] = {
                    **vars(found),
                    "is_within_spread": found.is_within_spread,
                }
            of_dataset[name] = entry
        summary[dataset] = of_dataset
    return {
        "meta": {"command": command, "reference": REFERENCE, "origins": origins},
        "summary": summary,
        "speed": list(speeds),
        "rows": kept,
    }


def check_models(names: Sequence[str]) -> None:
    """Refuse names of models that are not there."""
    for name in names:
        find_model(name)


def read_speeds(folder: Path) -> list[Row]:
    """Return the times of epochs that were measured into a folder."""
    files = sorted((folder / "speed").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _markdown_table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]
