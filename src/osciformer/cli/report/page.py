"""The page as a whole: what it shows as JSON, the scripts that draw it, one HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from osciformer import __version__
from osciformer._files import finite_json, write_text
from osciformer.cli import evaluate, predict
from osciformer.cli.report.charts import text
from osciformer.cli.report.explorer import choose, explore
from osciformer.cli.report.sections import make_sections
from osciformer.config import SERIES_TASKS

_ROUNDS = 200  # of the bootstrap of scores
_SCRIPTS = ("vendor/chart.umd.min.js", "vendor/chartjs-chart-matrix.min.js", "page.js")


def write_report(
    model: predict.Model,
    path: Path,
    data: Any,
    truth: np.ndarray | None = None,
    chosen: Any = None,
) -> int:
    """Write the page on a model, and return its size in bytes.

    Args:
        model: The model, with the names of its columns.
        path: The file.
        data: Series in memory, or sequences of events, to score the model with and to explain.
        truth: Their classes or values, or None if they are not known; other tasks have none.
        chosen: Series to explain; some of the data if not given.
    """
    estimator = model.estimator
    if estimator.task not in SERIES_TASKS:
        truth = None
    judged, scores = None, {}
    is_scored = truth is not None or estimator.task not in SERIES_TASKS
    if estimator.task == "events":
        is_scored = bool((data.lengths > 1).any())
    if is_scored:
        judged = evaluate.judge(model, data, truth, 0)
        scores = evaluate.bootstrap(judged.score, judged.num_series, rounds=_ROUNDS, seed=0)
    found: Any = None if judged is None else judged.found
    real = None if judged is None else judged.truth
    if chosen is None:
        if found is None and estimator.task in SERIES_TASKS:
            is_class = estimator.task == "classification"
            found = estimator.predict_proba(data) if is_class else estimator.predict(data)
            found = found.reshape(len(data), -1)
        places = choose(estimator, data, found, real)
        chosen = data[places]
        truths = [None] * len(places) if truth is None else [truth[place] for place in places]
    else:
        by_id = {} if truth is None else dict(zip(data.ids.tolist(), truth, strict=True))
        truths = [by_id.get(id) for id in chosen.ids.tolist()]
    sections = [
        explore(estimator, chosen, truths, str(model.layout.get("time", "time"))),
        *make_sections(estimator, data, truth, judged, scores),
    ]
    shown = [item for item in sections if item is not None]
    page = assemble({"facts": _facts(model, data), "sections": shown})
    write_text(path, page)
    return len(page.encode("utf-8"))


def assemble(content: Mapping[str, Any]) -> str:
    r"""Return the HTML of a page.

    Nothing of the content is HTML: it is JSON whose `<` cannot end the element that holds it, and
    the script shows it as text.
    """
    folder = files("osciformer") / "cli" / "report"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    data = json.dumps(finite_json(content), allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    # Maps of the sources are not there, and a browser would ask for them.
    scripts = [read(name).partition("//# sourceMappingURL=")[0] for name in _SCRIPTS]
    parts = {
        "STYLE": read("page.css"),
        "VERSION": __version__,
        "LICENSES": read("vendor/LICENSES.txt"),
        "DATA": data,
        "SCRIPTS": "\n".join(f"<script>\n{script}\n</script>" for script in scripts),
    }
    head, *rest = read("page.html").split("{{")
    filled = [head]
    for piece in rest:
        name, _, after = piece.partition("}}")
        filled += [parts[name], after]
    return "".join(filled)


def _facts(model: predict.Model, data: Any) -> list[list[str]]:
    """Return what stands at the top of the page."""
    estimator = model.estimator
    network = getattr(estimator, "model_", None)
    facts = {"Task": model.task, "Model": type(estimator).__name__}
    if network is not None:
        facts["Parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    if getattr(estimator, "resonator_", None) is not None:
        weight = estimator.network_weight_
        facts["Mixture"] = f"network {weight:.2f}, resonators {1 - weight:.2f}"
    if len(weights := getattr(estimator, "blend_weights_", {})) > 1:
        facts["Mixture"] = ", ".join(f"{name} {weight:.2f}" for name, weight in weights.items())
    targets: Any = model.settings.get("target") or getattr(estimator, "target_names_", ())
    if len(targets):
        facts["Target"] = ", ".join(map(text, targets[:8]))
    is_events = model.task == "events"
    names = estimator.type_names_ if is_events else estimator.feature_names_in_
    facts["Types" if is_events else "Variables"] = str(len(names))
    kind = "sequences" if is_events else "series"
    facts["Table"] = f"{len(data):,} {kind}, {len(data.times):,} rows"
    return [[name, value] for name, value in facts.items()]
