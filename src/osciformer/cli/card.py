"""The model card of a run: what was trained, on what, how well, and what it is not good for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osciformer import __version__, config
from osciformer._text import printable
from osciformer.cli.settings import SETTINGS, model_of
from osciformer.cli.tables import is_streamed
from osciformer.cli.undefined import shown

if TYPE_CHECKING:
    from osciformer.cli.fit import Job

#: What follows this heading is the user's; a continued run keeps it.
FOR_THE_USER = "## Licence and use"
_FEW_SERIES = 50  # of a class, or to validate with: fewer, and the card warns
_MOST_NAMES = 50
_BLANKS = """
- Software: OsciFormer, Apache-2.0. It says nothing about the licence of this model.
- Licence of this model: (fill in)
- Source and licence of the data: (fill in)
- Intended use, and uses to avoid: (fill in)
- Contact: (fill in)
"""


def write_card(
    estimator: Any,
    job: Job,
    given: Mapping[str, Any],
    metrics: Mapping[str, Any],
    before: str = "",
) -> str:
    """Return the card of a trained model, in Markdown; sums and counts, nothing of one series.

    Args:
        estimator: The fitted estimator.
        job: What it was trained on.
        given: The settings.
        metrics: What `metrics.json` holds.
        before: An earlier card of the same run, of which the part for the user stays.
    """
    task, counts = given["task"], _class_counts(estimator, job)
    kept = before.partition(FOR_THE_USER)[2]
    sections = {
        f"# Model card: {task}": _model_lines(estimator, given, metrics),
        "## Data": _data_lines(estimator, job, given, counts),
        "## Settings that differ from the defaults": _setting_lines(given),
        "## Scores": _score_lines(estimator, job, metrics, counts),
        "## Known limits": _limit_lines(estimator, job, metrics, counts),
    }
    parts = [f"{title}\n\n" + "\n".join(lines).lstrip() + "\n" for title, lines in sections.items()]
    return "\n".join([*parts, FOR_THE_USER]) + (kept or f"\n{_BLANKS}")


def _model_lines(
    estimator: Any, given: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Iterable[str]:
    model = getattr(estimator, "model_", None)
    size = "" if model is None else f", {sum(p.numel() for p in model.parameters())} parameters"
    yield f"- Model: {type(estimator).__name__} ({model_of(given)}){size}"
    if len(weights := metrics.get("blend_weights", {})) > 1:
        yield "- Mixture, by weight: " + ", ".join(f"{n} {x:.3f}" for n, x in weights.items())
    best = metrics.get("best_epoch")
    epochs = "" if best is None else f", epoch {best + 1} of {metrics['num_epochs']}"
    yield f"- Training: {metrics['seconds']:.0f} s{epochs}, seed {given['seed']}"
    yield f"- Written by OsciFormer {__version__}; `run.json` has the other versions"


def _data_lines(
    estimator: Any, job: Job, given: Mapping[str, Any], counts: Mapping[str, int]
) -> Iterable[str]:
    data = job.data
    rows = int((data.num_rows if is_streamed(data) else data.lengths).sum())
    yield f"- Table: {_safe(Path(given['table']).name)}"
    yield f"- Size: {len(data)} series, {rows} {'events' if 'types' in job.facts else 'rows'}"
    unit = getattr(estimator, "time_unit_", None) or estimator.time_axis_.unit
    named = f", column {_safe(given['time'])}" if given.get("time") else ""
    yield f"- Unit of time: {_safe(unit) if unit else 'not named'}{named}"
    if (longest := _longest(data)) is not None:
        yield f"- Longest series: about {longest:.2g} units of time"
    for title, name in (("Variables", "feature_names_in_"), ("Static", "static_names_in_")):
        if names := [str(item) for item in getattr(estimator, name, ())]:
            yield f"- {title} ({len(names)}): {_listed(names)}"
    if given.get("target"):
        yield f"- Target: {_listed(given['target'])}"
    if hasattr(estimator, "target_center_"):
        pairs = zip(estimator.target_center_, estimator.target_scale_, strict=True)
        spread = ", ".join(f"{center:.4g} ± {scale:.2g}" for center, scale in pairs)
        yield f"- Targets, mean and standard deviation: {spread}"
    if counts:
        yield from _table((_kind_of(job), "number"), [(n, str(x)) for n, x in counts.items()])


def _setting_lines(given: Mapping[str, Any]) -> Iterable[str]:
    task = given["task"]
    others = [
        (name, str(config.plain(value)), str(config.plain(SETTINGS[name].defaults[task])))
        for name, value in given.items()
        if SETTINGS[name].panel != config.TABLE and value != SETTINGS[name].defaults[task]
    ]
    if others:
        yield from _table(("setting", "value", "default"), others)
    else:
        yield "None."


def _score_lines(
    estimator: Any, job: Job, metrics: Mapping[str, Any], counts: Mapping[str, int]
) -> Iterable[str]:
    scores, number = metrics["validation"], _num_validated(estimator, job, counts)
    if not scores:
        yield "Nothing was kept apart for validation, so that there are no scores."
        return
    if "best_epoch" not in metrics:
        yield f"Measured on {number} training series, each by a model of the others."
    else:
        origin = "the table that were not trained on"
        if job.validation is not None:
            origin = (
                "the table given for validation; that none of them was in training is not\nchecked"
            )
        yield f"Measured on {number} series of {origin}."
        yield "They decided when training stopped and which epoch was kept: expect slightly"
        yield "worse ones on new series."
        if len(metrics.get("blend_weights", ())) > 1:
            yield "They are scores of the network alone, before it was mixed with the others."
    yield from _table(("metric", "value"), [(name, shown(x)) for name, x in scores.items()])
    for name, reason in metrics.get("undefined", {}).items():
        yield f"\n{name} is undefined: {reason}."


def _limit_lines(
    estimator: Any, job: Job, metrics: Mapping[str, Any], counts: Mapping[str, int]
) -> Iterable[str]:
    if not metrics["is_finished"]:
        yield "- Training was interrupted; this is the best model so far."
    rare = [name for name, number in counts.items() if number < _FEW_SERIES]
    if rare:
        yield f"- Each {_kind_of(job)} here has fewer than {_FEW_SERIES} examples: {_listed(rare)}."
    number = _num_validated(estimator, job, counts)
    if metrics["validation"] and number < _FEW_SERIES:
        yield f"- The scores rest on {number} series, and may be far off."
    yield "- Scores are not of an independent test set; `osciformer evaluate` gives those, with"
    yield "  intervals."
    if (longest := _longest(job.data)) is not None:
        yield f"- No series of training was longer than about {longest:.2g} units of time; beyond"
        yield "  that, and for other units or devices of measurement, nothing is known."
    yield "- How often intervals and probabilities are right on new data was not measured."
    yield "- Groups of people or devices were not compared; the model may serve some worse."
    yield "- What predicts is not thereby a cause."


def _class_counts(estimator: Any, job: Job) -> dict[str, int]:
    """Return how many series each class has, or how many events each type."""
    if "types" in job.facts:
        numbers, names = job.data.types, job.data.type_names
    elif hasattr(estimator, "classes_"):
        from osciformer.estimators.labels import encode_classes, read_labels

        names = estimator.classes_.tolist()
        numbers = encode_classes(read_labels(job.data, job.labels), estimator.classes_)
    else:
        return {}
    found = np.bincount(numbers, minlength=len(names)).tolist()
    return dict(zip(map(str, names), found, strict=True))


def _kind_of(job: Job) -> str:
    return "type of events" if "types" in job.facts else "class"


def _num_validated(estimator: Any, job: Job, counts: Mapping[str, int]) -> int:
    """Return how many series the scores are of."""
    if job.validation is not None:
        watched = job.validation
        return len(watched[0] if isinstance(watched, tuple) else watched)
    if hasattr(estimator, "left_out_scores_"):
        return len(job.data)
    if hasattr(estimator, "validation_index_"):
        return len(estimator.validation_index_)
    from osciformer.estimators.base import split

    strata = np.repeat(np.arange(max(1, len(counts))), list(counts.values()) or [len(job.data)])
    return len(split(strata, estimator.validation_fraction, np.random.default_rng(0))[1])


def _longest(data: Any) -> float | None:
    """Return the time from first to last row of the longest series; None if it is unknown."""
    if is_streamed(data):
        return None
    filled = data.lengths > 0
    first, last = data.offsets[:-1][filled], data.offsets[1:][filled] - 1
    return float(np.max(data.times[last] - data.times[first], initial=0.0))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    yield ""
    for row in (head, ["---"] * len(head), *rows[:_MOST_NAMES]):
        cells = row if row[0] == "---" else map(_safe, row)
        yield f"| {' | '.join(cells)} |"
    if len(rows) > _MOST_NAMES:
        yield f"\nand {len(rows) - _MOST_NAMES} more"


def _listed(names: Iterable[str]) -> str:
    names = [*map(_safe, names)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _safe(text: str) -> str:
    """Return text of the data that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", printable(str(text)).replace("\n", " "))
