"""The report of the benchmark of events, as Markdown and JSON: means, spreads, differences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from osciformer._optional import need
from osciformer.bench.events.datasets import TASKS
from osciformer.bench.events.models import MODELS, BenchModel, find_model
from osciformer.bench.report import Row, markdown_table

#: Scores of a cell, and whether more is better, and their headings.
SCORES = {
    "ll_micro": (True, "LL"),
    "ll_macro": (True, "LL macro"),
    "accuracy": (True, "accuracy"),
    "accuracy_at_time": (True, "at its time"),
    "time_rmse": (False, "RMSE"),
    "time_mae": (False, "MAE"),
    "horizon_t_map": (True, "T-mAP"),
    "horizon_transport": (False, "OTD"),
}
_HORIZON = ("horizon_t_map", "horizon_transport")
_NUMBERS = (*SCORES, "ll_error", "dev_ll", "epochs", "parameters", "hit_time_limit")
# Further columns of a table.
_COLUMNS = {"dev_ll": "{:.3f}", "seconds": "{:.2g}", "epochs": "{:,.0f}", "parameters": "{:,.0f}"}
REFERENCE = "osciformer"
#: A row made of others: at each repeat, the head of OsciFormer with the best dev likelihood.
CHOSEN_HEAD = "osciformer_chosen"
_HEADS = ("osciformer", "osciformer_softplus", "osciformer_decay")
_FITTED = ("rule", "trivial", "classical", "neural")
# 97.5 % quantiles of Student's t by degrees of freedom, for the few repeats there are.
_STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# What the scores mean; then, by data set, its source, unit, what was cut, and the grid of times.
_PAGE = (files("osciformer.bench.events") / "protocol.md").read_text(encoding="utf-8")
PROTOCOL, *_SECTIONS = _PAGE.strip().split("\n\n## ")
NOTES = {name: " ".join(note.split()) for name, _, note in (s.partition("\n") for s in _SECTIONS)}


@dataclass(frozen=True)
class Difference:
    """Mean advantage of the reference over another model, its standard error, and the repeats."""

    mean: float
    error: float | None
    count: int

    @property
    def is_within_spread(self) -> bool:
        """Whether zero lies within the 95 % interval of Student's t, or there is one repeat."""
        if self.error is None:
            return True
        return abs(self.mean) <= _STUDENT[min(self.count, len(_STUDENT)) - 1] * self.error

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error}{' ≈' if error and self.is_within_spread else ''}"

    def in_words(self) -> str:
        """Return how far the reference is ahead or behind."""
        text = f"{abs(self.mean):.3f} {'ahead' if self.mean > 0 else 'behind'}"
        if self.error is None:
            return text + " by a single run"
        within = ", within the spread" if self.is_within_spread else ""
        return f"{text} (± {self.error:.3f}{within})"


def good_cells(rows: Sequence[Row]) -> Any:
    """Return a data frame of the cells that did not fail, and of those with the chosen head."""
    pd = need("pandas", extra="data")
    names = ["dataset", "model", "repeat", "data", *_NUMBERS]
    kept = [[row.get(name) for name in names] for row in rows if row["error"] is None]
    cells = pd.DataFrame(kept, columns=names).astype(dict.fromkeys(_NUMBERS, float))
    heads = cells[cells["model"].isin(_HEADS)].groupby(["dataset", "repeat"], sort=False)
    # One head alone is no choice.
    heads = heads.filter(lambda group: len(group) == len(_HEADS))
    best = heads.groupby(["dataset", "repeat"], sort=False)["dev_ll"].idxmax()
    return pd.concat([cells, cells.loc[best].assign(model=CHOSEN_HEAD)], ignore_index=True)


def spreads(cells: Any, key: str) -> Any:
    """Return mean, standard deviation (n - 1) and count of a score for each model."""
    return cells.groupby("model", sort=False)[key].agg(mean="mean", sd="std", count="count")


def differences(cells: Any, reference: str = REFERENCE) -> dict[str, Difference]:
    """Return how much better the LL of a reference is than that of each other model, paired."""
    # Rules have none.
    cells = cells[cells["ll_micro"].notna()]
    wide = cells.pivot(index="repeat", columns="model", values="ll_micro")
    found = {}
    for name in wide.columns.drop(reference) if reference in wide else ():
        other = wide[name].dropna().iloc[0] if _is_constant(name, cells) else wide[name]
        apart = (wide[reference] - other).dropna()
        if len(apart):
            error = float(apart.sem()) if len(apart) > 1 else None
            found[name] = Difference(float(apart.mean()), error, len(apart))
    return found


def best_of(cells: Any, key: str, kinds: Sequence[str]) -> str | None:
    """Return the model with the best mean of a score among some kinds, or None."""
    found = spreads(cells, key)
    most = found["count"].max()
    # Models of which fewer runs have the score are left out, unless their runs would be alike.
    is_in = [
        count > 0 and _row(name).kind in kinds and (count == most or _is_constant(name, cells))
        for name, count in found["count"].items()
    ]
    means = found["mean"][is_in] * (1 if SCORES[key][0] else -1)
    return None if means.empty else str(means.idxmax())


def _row(name: str) -> BenchModel:
    if name == CHOSEN_HEAD:
        return replace(MODELS[REFERENCE], title="OsciFormer, head by dev")
    return find_model(name)


def _is_constant(name: str, cells: Any) -> bool:
    """Return whether all repeats of a model would be alike, so that there is one."""
    return TASKS[cells["dataset"].iloc[0]].repeat == "seed" and not _row(name).is_random


def _has(cells: Any, key: str) -> bool:
    return bool(cells[key].notna().any())


def _has_types(cells: Any) -> bool:
    return bool(cells["data"].iloc[0]["types"] > 1)


def _in_order(names: Iterable[str]) -> list[str]:
    order = list(MODELS)
    order.insert(order.index(_HEADS[-1]) + 1, CHOSEN_HEAD)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def markdown(rows: Sequence[Row], speeds: Sequence[Row], command: str, notes: str = "") -> str:
    """Return the page: protocol, overviews, notes, a table for each data set, and what failed."""
    cells = good_cells(rows)
    by_dataset = dict(iter(cells.groupby("dataset")))
    by_dataset = {name: by_dataset[name] for name in TASKS if name in by_dataset}
    lines = ["# Event prediction", "", PROTOCOL, ""]
    if by_dataset:
        lines += ["## Overview: LL in nats per event", "", *_overview(by_dataset, "ll_micro")]
        lines += ["", *_verdicts(by_dataset)]
        lines += ["", "## Overview: accuracy", "", *_overview(by_dataset, "accuracy")]
        ahead = {name: found for name, found in by_dataset.items() if _has(found, _HORIZON[0])}
        for key in _HORIZON if ahead else ():
            title = f"## Overview: the last ten events, {SCORES[key][1]}"
            lines += ["", title, "", *_overview(ahead, key)]
    lines += ["", notes.strip()] if notes.strip() else []
    for dataset, found in by_dataset.items():
        lines += ["", f"## {TASKS[dataset].title}", "", _notes(found), ""]
        timed = [speed for speed in speeds if speed["dataset"] == dataset]
        lines += _table(found, {speed["model"]: speed["seconds"] for speed in timed})
    lines += ["", "## How it was run", "", *_origins(rows, speeds), "", "```text", command, "```"]
    return "\n".join(lines) + "\n"


def _overview(by_dataset: dict[str, Any], key: str) -> list[str]:
    columns = [
        _scores(cells, key, dict.fromkeys(cells["model"], cells.groupby("model").size().max()))
        for cells in by_dataset.values()
    ]
    found = ((name, text) for column in columns for name, text in column.items())
    names = _in_order(dict.fromkeys(name for name, text in found if text != "-"))
    body = [[_row(name).title, *(column.get(name, "-") for column in columns)] for name in names]
    return markdown_table(["model", *(TASKS[dataset].title for dataset in by_dataset)], body)


def _scores(cells: Any, key: str, runs: dict[str, int]) -> dict[str, str]:
    """Return mean and spread of each model, with the number of scores if there are fewer runs."""
    best, best_neural = (best_of(cells, key, kinds) for kinds in (_FITTED, ("neural",)))
    is_told = _has_types(cells) or not key.startswith("accuracy")
    form, form_sd = ("{:.4g}", "{:.2g}") if key.startswith("time") else ("{:.3f}", "{:.3f}")
    texts = {}
    for name, mean, sd, count in spreads(cells, key).itertuples():
        text = form.format(mean) + (f" ± {form_sd.format(sd)}" if count > 1 else "")
        text = f"**{text}**" if name == best_neural else text
        text += " \\*" if name == best else ""
        is_short = count < runs[name] and not _is_constant(name, cells)
        texts[name] = text + (f" ({count})" if is_short else "") if count and is_told else "-"
    return texts


def _verdicts(by_dataset: dict[str, Any]) -> list[str]:
    """Return a sentence per data set about OsciFormer's rows and the best of the others."""
    lines = []
    for dataset, cells in by_dataset.items():
        is_ours = cells["model"].str.startswith(REFERENCE)
        best = None if is_ours.all() else best_of(cells[~is_ours], "ll_micro", _FITTED)
        if best is None:
            continue
        said = []
        for name in _in_order(cells["model"][is_ours & (cells["model"] != CHOSEN_HEAD)].unique()):
            found = differences(cells, name).get(best)
            if found is not None:
                said.append(f"{_row(name).title.removeprefix('OsciFormer, ')} {found.in_words()}")
        if said:
            lines.append(f"- {TASKS[dataset].title}, beside {_row(best).title}: {'; '.join(said)}.")
    head = ["OsciFormer beside the best other fitted model, in nats per event:", ""]
    return [*head, *lines] if lines else []


def _notes(cells: Any) -> str:
    data, dataset, repeat = cells.iloc[0][["data", "dataset", "repeat"]]
    sizes = ", ".join(
        f"{part} {data[part]['sequences']:,} ({data[part]['scored']:,} scored events)"
        for part in ("train", "dev", "test")
    )
    return (
        f"{NOTES.get(dataset, '')} Sequences of {TASKS[dataset].repeat} {repeat}: {sizes};"
        f" {data['types']} types; time in {data['time_unit']}, mean gap {data['mean_gap']:.3g},"
        f" smallest positive gap {data['smallest_gap']:.2g}, {data['zero_gaps']} gaps of zero,"
        f" longest sequence {data['longest_sequence']} events. Largest estimated error of LL by"
        f" quadrature: {cells['ll_error'].max():.1e}."
    )


def _table(cells: Any, seconds: dict[str, float]) -> list[str]:
    keys = [key for key in SCORES if key not in _HORIZON or _has(cells, key)]
    keys = [key for key in keys if _has_types(cells) or not key.startswith("accuracy")]
    grouped, deltas = cells.groupby("model"), differences(cells)
    runs, means = grouped.size(), grouped[list(_NUMBERS)].mean()
    stopped = grouped["hit_time_limit"].sum()
    columns = [_scores(cells, key, runs) for key in keys]
    body = []
    for name in _in_order(runs.index):
        cut = f" ({stopped[name]:.0f} stopped by the time limit)" if stopped[name] else ""
        numbers = {**means.loc[name], "seconds": seconds.get(name, math.nan)}
        more = [
            "-" if math.isnan(numbers[key]) else form.format(numbers[key])
            for key, form in _COLUMNS.items()
        ]
        scores = [column[name] for column in columns]
        first = [_row(name).title + cut, str(runs[name])]
        body.append([*first, *scores, str(deltas.get(name, "-")), *more])
    titles = ["model", "runs", *(SCORES[key][1] for key in keys), "Δ LL", "dev LL", "s/epoch"]
    return markdown_table([*titles, "epochs", "parameters"], body)


def _origins(rows: Sequence[Row], speeds: Sequence[Row]) -> list[str]:
    """Return the commands and settings behind the cells, each once, and what failed."""
    lines, shown = [], ("commit", "date", "torch", "cpu", "gpu", "osciformer")
    for origin in _distinct(row["origin"] for row in (*rows, *speeds)):
        parts = [f"{key} {origin[key]}" for key in shown if origin.get(key)]
        lines.append(f"- `{origin['command']}`: {', '.join(parts)}")
    for settings in _distinct(row["training"] for row in rows if row.get("training")):
        lines.append("- training: " + ", ".join(f"{key} {it}" for key, it in settings.items()))
    where = "- failed: {dataset}, {model}, {repeat}: {error}"
    return lines + [where.format_map(row) for row in rows if row["error"] is not None]


def _distinct(items: Any) -> list[Any]:
    return [json.loads(text) for text in dict.fromkeys(json.dumps(item) for item in items)]


def document(rows: Sequence[Row], speeds: Sequence[Row], command: str) -> dict[str, Any]:
    """Return everything for a JSON file: summary, differences, and every cell."""
    origins = _distinct(row["origin"] for row in rows)
    summary: dict[str, Any] = {}
    for dataset, cells in good_cells(rows).groupby("dataset", sort=False):
        deltas, of_dataset = differences(cells), summary.setdefault(dataset, {})
        for name, of_model in cells.groupby("model", sort=False):
            entry: dict[str, Any] = {"kind": _row(name).kind, "repeats": sorted(of_model["repeat"])}
            for key in (*SCORES, "dev_ll", "epochs"):
                spread = spreads(of_model, key).iloc[0]
                entry[key] = {**spread, "count": int(spread["count"])} if spread["count"] else None
            if name in deltas:
                within = {"is_within_spread": deltas[name].is_within_spread}
                entry["reference_ahead"] = asdict(deltas[name]) | within
            of_dataset[name] = entry
    return {
        "meta": {"command": command, "reference": REFERENCE, "origins": origins},
        "summary": summary,
        "speed": list(speeds),
        "rows": [{**row, "origin": origins.index(row["origin"])} for row in rows],
    }
