"""`osciformer bench report`: one page of all tables that files have, and who leads."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from osciformer._files import replacing, write_text
from osciformer.bench.documents import Document
from osciformer.bench.report import markdown_table, progress
from osciformer.bench.tables.harness import Table, find_table
from osciformer.bench.tables.problem import RISING

#: Fewer models than this are no competition.
FEWEST = 3


class Place(NamedTuple):
    """Where a model came in among those of one test."""

    rank: float  # from 1, the best; equal scores share the mean of their ranks
    rivals: int


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="osciformer bench report", description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", help="JSON files of tables; others are left out")
    add("-o", "--output", type=Path, required=True, help="Markdown file")
    add("--pictures", type=Path, help="folder for a figure of each table")
    options = parser.parse_args(list(argv))
    found = [pair for path in options.files if (pair := open_table(path)) is not None]
    if not found:
        raise SystemExit(f"no file has rows of a table; got {', '.join(map(str, options.files))}")
    lines = ["# Tables of models", "", *leaderboard(found)]
    for table, document in found:
        heading, *rest = table.tables_of(document)
        lines += ["", "#" + heading]
        for name, draw in table.figures().items() if options.pictures is not None else ():
            figure = draw(document)
            path = options.pictures / f"{name}_{document.settings['size']}.png"
            with replacing(path) as part:
                figure.savefig(part, dpi=110)
            progress(f"drew {path}")
            shown = Path(os.path.relpath(path, options.output.parent)).as_posix()
            lines += ["", f"![{table.name}, size {document.settings['size']}]({shown})"]
        lines += ["#" + line if line[:1] == "#" else line for line in rest]
    write_text(options.output, "\n".join(lines) + "\n")
    progress(f"wrote {options.output}: {len(found)} tables")
    return 0


def open_table(path: Path) -> tuple[Table, Document] | None:
    """Return the suite of a file and its rows; None if it has no scores of models."""
    content = json.loads(path.read_text(encoding="utf-8"))
    settings = content.get("settings", {})
    if "suite" not in settings or settings.get("size") == "quick":
        progress(f"{path} has no table of models, or one of toy size: it is left out")
        return None
    document = Document(path, settings)
    return (find_table(settings["suite"]), document) if document.finished else None


def places(table: Table, document: Document) -> dict[str, list[Place]]:
    """Return where each model came in, test by test, by the mean of its seeds."""
    scores: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in document.finished:
        if row["trial"] is None:
            metric = next(iter(table.metrics_of(row["case"])))
            sign = -1.0 if metric in RISING else 1.0
            for test, found in row["scores"].items():
                scores[row["case"], test][row["model"]].append(sign * found[metric])
    found_places: dict[str, list[Place]] = defaultdict(list)
    for by_model in scores.values():
        means = {model: statistics.fmean(some) for model, some in by_model.items()}
        if len(means) < FEWEST:
            continue
        for model, mean in means.items():
            ahead = sum(other < mean for other in means.values())
            level = sum(other == mean for other in means.values())
            place = Place(ahead + (level + 1) / 2, len(means) - 1)
            found_places[model].append(place)
    return found_places


def leaderboard(found: Sequence[tuple[Table, Document]]) -> list[str]:
    """Return the lines of the leaderboard, in which each suite counts alike.

    Not every model is in every test, so the order is by the share of rivals that are behind.
    """
    collected: dict[str, dict[str, list[Place]]] = defaultdict(dict)
    for table, document in found:
        for model, some in places(table, document).items():
            collected[model].setdefault(table.name, []).extend(some)
    suites = list(dict.fromkeys(table.name for table, _ in found))
    body = []
    for model, by_suite in collected.items():
        behind = statistics.fmean(
            statistics.fmean(1.0 - (p.rank - 1.0) / p.rivals for p in some)
            for some in by_suite.values()
        )
        ranks = {name: statistics.fmean(p.rank for p in some) for name, some in by_suite.items()}
        cells = [f"{ranks[name]:.1f}" if name in ranks else "-" for name in suites]
        body.append((behind, [model, f"{100 * behind:.0f} %", *cells]))
    body.sort(key=lambda pair: -pair[0])
    words = (
        "The share of its rivals that a model leaves behind, and its mean rank in each suite. "
        "Means are over the tests of a suite, then over the suites, that a model is in. Tests with "
        f"fewer than {FEWEST} models do not count."
    )
    columns = ["model", "rivals behind", *suites]
    return [words, "", *markdown_table(columns, [line for _, line in body])]
