"""Mortality in PhysioNet 2012 in the protocol of Raindrop: five random 80/10/10 splits.

    python benchmarks/raindrop.py --output raindrop.json --table raindrop.md --jobs 8
    python benchmarks/raindrop.py --output toy.json --quick

Zhang et al. (ICLR 2022) leave out the stays without measurements, split the others at random into
80 % for training, 10 % for validation and 10 % for testing, five times, and report mean and
standard deviation of AUROC and AUPRC over the splits. Their splits are of 11,988 stays; here are
those of set-a and set-b. All that is chosen (epoch, number of trees, weight of the network) is
chosen by the validation part. `network` and `resonators` are the two parts of the default
classifier, fitted each by a job of its own; `osciformer`, which joins them as the classifier does,
is computed from their outputs. A run that ends before all jobs are done is continued by the same
command; with --checkpoints, trainings that were stopped go on as well. The data are found through
the environment variable OSCIFORMER_DATA.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from physionet2012 import COMPARED, compare
from shared import TINY, estimator_settings, make_parser, run_benchmark, training_entries
from summary_boosting import CANDIDATES, FEWEST_KNOWN, boosting, summaries

from osciformer.bench.documents import Document, spread
from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.workers import Job
from osciformer.cli.evaluate import class_scores
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.series import concatenate
from osciformer.estimators import OsciFormerClassifier, ResonatorClassifier
from osciformer.estimators.base import draw_seed
from osciformer.estimators.joining import class_log_likelihood, mix, weigh_network

#: What the splits of the paper keep for training and for validation; the rest is tested.
TRAIN_PART, VALIDATION_PART = 0.8, 0.1
NUM_SPLITS = 5
# Twice the width of ours, and the learning rate that `physionet2012.py` chose.
_RIVAL: Mapping[str, Any] = {"dim": 64, "num_heads": 2, "learning_rate": 2e-3}
#: Settings of the networks, by the name of the backbone but for ours.
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "network": {},
    "gru_d": _RIVAL,
    "transformer": _RIVAL,
}
#: Methods, cheap ones first.
METHODS = ("resonators", "boosting", *NETWORKS)
OURS = "osciformer"
#: AUROC and AUPRC in percent that others report for 11,988 stays, and where that was read.
PUBLISHED = {
    "MTM": ("88.0", "58.6", "a note on arXiv 2509.17809"),
    "ISTS-PLM": ("87.6", "57.6", "its authors' repository"),
    "DBVT": ("86.9", "56.1", "its authors' repository"),
    "Warpformer": ("86.6", "55.5", "tables of later papers"),
    "GraFITi": ("86.6", "54.8", "tables of later papers"),
    "GARLIC": ("86.4", "56.9", "tables of later papers"),
    "ViTST": ("85.1", "51.1", "tables of later papers"),
    "mTAND": ("84.2", "48.2", "tables of later papers"),
    "Transformer": ("83.3", "47.9", "tables of later papers"),
    "Raindrop": ("82.8", "-", "tables of later papers"),
    "ContiFormer": ("82.1", "-", "tables of later papers"),
    "GRU-D": ("81.9", "-", "tables of later papers"),
}
_MOST_TREES, _TOY_TREES = 300, 4
_TOY_STAYS = 200
_ROUNDS = 1000

PROTOCOL = """\
Protocol: the {stays} stays of set-a and set-b that have measurements (the paper: 11,988 of three
sets), 37 variables and five descriptors. A seed decides a random split into 80 % for training, 10 %
for validation and 10 % for testing, and all other randomness. Epochs, trees, and the weight of the
network are chosen by the validation part. Mean ± standard deviation over {splits} splits. AUROC and
AUPRC in percent. Test parts have some {test} stays with some {deaths} deaths."""


class Parts(NamedTuple):
    """The three parts of a split."""

    train: IrregularSeries
    validation: IrregularSeries
    test: IrregularSeries


@functools.cache
def load_stays() -> IrregularSeries:
    """Return the stays of set-a and set-b that have measurements."""
    stays = concatenate([get_dataset("physionet2012", split) for split in ("set-a", "set-b")])
    return stays[np.flatnonzero(stays.num_observed > 0)]


def split_stays(stays: IrregularSeries, seed: int, most: int | None = None) -> Parts:
    """Return the parts of a split; `most` takes no more than so many stays in all."""
    order = np.random.default_rng(seed).permutation(len(stays))[:most]
    num_train, num_validation = (round(x * len(order)) for x in (TRAIN_PART, VALIDATION_PART))
    cuts = [num_train, num_train + num_validation]
    return Parts(*(stays[part] for part in np.split(order, cuts)))


def answer(job: Job, parts: Parts, settings: dict[str, Any]) -> Row:
    """Return the logits of class 1 of the validation and the test stays, and facts of the fit."""
    train, validation, test = parts
    method, seed = job["method"], job["seed"]
    if method == "boosting":
        return _answer_by_boosting(parts, seed, _TOY_TREES if settings["stays"] else _MOST_TREES)
    if method == "resonators":
        # The seed that the joined classifier gives its resonators.
        model: Any = ResonatorClassifier(random_state=draw_seed(seed)).fit(train)
        found: Row = {}
    else:
        backbone = "osciformer" if method == "network" else method
        chosen = {**NETWORKS[method], **estimator_settings(backbone, job, settings)}
        model = OsciFormerClassifier(**chosen, resonators=False)
        model.fit(train, validation_data=validation)
        found = training_entries(model, job, settings)
    logits = {
        name: _plain(np.diff(model.predict_log_proba(series), axis=1)[:, 0])
        for name, series in (("validation_logits", validation), ("logits", test))
    }
    return found | logits


def _answer_by_boosting(parts: Parts, seed: int, most_trees: int) -> Row:
    """Boosting on summaries, with the settings and trees of the best AUROC of validation."""
    tables = [summaries(series) for series in parts]
    is_used = (~np.isnan(tables[0])).sum(axis=0) >= FEWEST_KNOWN
    train, validation, test = (table[:, is_used] for table in tables)
    labels, judges = (np.asarray(series.labels) for series in parts[:2])
    best: tuple[float, int, Any] = (-np.inf, 0, None)
    for candidate in CANDIDATES:
        model = boosting(candidate, seed, most_trees).fit(train, labels)
        stages = np.stack([stage[:, 0] for stage in _stages(model, validation)])
        scores = [COMPARED["auroc"](stage[None], judges) for stage in stages]
        place = int(np.argmax(scores))
        if scores[place] > best[0]:
            given = _stages(model, test)
            chosen = next(stage for number, stage in enumerate(given) if number == place)
            best = scores[place], place + 1, (stages[place], chosen[:, 0])
    _, trees, (found, of_test) = best
    return {"epochs": trees, "validation_logits": _plain(found), "logits": _plain(of_test)}


def _stages(model: Any, table: np.ndarray) -> Any:
    """Yield the logits [n, 1] after each tree."""
    return (stage.reshape(len(table), -1) for stage in model.staged_decision_function(table))


def _plain(logits: np.ndarray) -> list[float]:
    return [round(float(logit), 5) for logit in logits]


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Fit one method to one split, and score it."""
    parts = split_stays(load_stays(), job["seed"], settings["stays"])
    started, cpu = time.perf_counter(), time.process_time()
    found = answer(job, parts, settings)
    found |= {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "sizes": [len(part) for part in parts],
        "deaths": int(np.sum(parts.test.labels)),
        "ids": np.asarray(parts.test.ids).tolist(),
        "labels": np.asarray(parts.test.labels).tolist(),
        "validation_labels": np.asarray(parts.validation.labels).tolist(),
    }
    return found | score(found["logits"], found["labels"])


def score(logits: Sequence[float], labels: Sequence[int]) -> Row:
    """Return AUROC, AUPRC and log loss."""
    chance = 1.0 / (1.0 + np.exp(-np.asarray(logits)))
    found = class_scores(np.stack((1.0 - chance, chance), axis=1), np.asarray(labels))
    return {name: found[name] for name in ("auroc", "auprc", "log_loss")}


def join(network: Row, resonators: Row) -> Row:
    """Return the row of the joined classifier, whose weight the validation stays decide."""
    pair = network, resonators
    judges = np.asarray(network["validation_labels"])
    known, asked = (
        [np.stack((np.zeros(len(row[name])), row[name]), axis=1) for row in pair]
        for name in ("validation_logits", "logits")
    )
    likelihood = partial(class_log_likelihood, classes=judges, weight=np.ones(len(judges)))
    weight = weigh_network(*known, likelihood)
    logits = mix(*asked, weight)[:, 1].tolist()
    shared = {name: network[name] for name in ("seed", "ids", "labels", "sizes", "deaths")}
    times = {name: network[name] + resonators[name] for name in ("seconds", "cpu_seconds")}
    row = {**shared, **times, "method": OURS, "network_weight": weight, "logits": logits}
    return row | score(logits, network["labels"])


def with_joined(rows: Sequence[Row]) -> list[Row]:
    """Return rows after those of the joined classifier, wherever both of its parts are there."""
    found = {(row["method"], row["seed"]): row for row in rows}
    joined = [
        join(row, found["resonators", seed])
        for (method, seed), row in sorted(found.items())
        if method == "network" and ("resonators", seed) in found
    ]
    return [*joined, *rows]


def differences(rows: Sequence[Row], rounds: int = _ROUNDS) -> dict[str, dict[str, Row]]:
    """Return how far the joined classifier is ahead of others, with intervals of resampled stays.

    Without a row of it there are none.
    A stay that is in several test parts is drawn equally often in all of them.

    Args:
        rows: Those of `with_joined`.
        rounds: How often stays are resampled.
    """
    found = {(row["method"], row["seed"]): row for row in rows}
    seeds = sorted({seed for method, seed in found if method == OURS})
    if not seeds:
        return {}
    others = [m for m in METHODS if all((m, seed) in found for seed in seeds)]
    ids = np.unique([id for seed in seeds for id in found[OURS, seed]["ids"]])
    places = [np.searchsorted(ids, found[OURS, seed]["ids"]) for seed in seeds]
    generator = np.random.default_rng(0)
    draws = [np.ones(len(ids), dtype=np.int64)]
    draws += [
        generator.multinomial(len(ids), np.full(len(ids), 1 / len(ids))) for _ in "1" * rounds
    ]
    result: dict[str, dict[str, Row]] = {}
    for name, measure in COMPARED.items():
        drawn = {}
        for method in (OURS, *others):
            scores = np.zeros(len(draws))
            for seed, place in zip(seeds, places, strict=True):
                row = found[method, seed]
                logits, labels = np.asarray(row["logits"]), np.asarray(row["labels"])
                for number, count in enumerate(draws):
                    index = np.repeat(np.arange(len(place)), count[place])
                    scores[number] += measure(logits[None, index], labels[index]) / len(seeds)
            drawn[method] = scores
        result[name] = {other: compare(drawn[OURS], drawn[other]) for other in others}
    return result


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    rows = with_joined(document.finished)
    if not rows:
        return ["# Mortality in Raindrop's protocol", "", *document.origin()]
    sizes, splits = rows[0]["sizes"], len({row["seed"] for row in rows})
    facts = {"stays": sum(sizes), "splits": splits, "test": sizes[2], "deaths": rows[0]["deaths"]}
    body = []
    for method in (OURS, *METHODS):
        own = [row for row in rows if row["method"] == method]
        if own:
            cells = [spread([100 * row[name] for row in own], "{:.1f}") for name in COMPARED]
            cells += [spread([row["log_loss"] for row in own]), str(len(own))]
            cells += [spread([row["cpu_seconds"] for row in own], "{:.0f}"), "-", "-"]
            body.append([f"`{method}`", *cells])
    for name, (auroc, auprc, source) in PUBLISHED.items():
        body.append([name, *"-----", f"{auroc} / {auprc}", source])
    titles = ["model", "AUROC", "AUPRC", "log loss", "splits", "CPU s"]
    titles += ["published, 11,988 stays", "source"]
    lines = ["# Mortality in Raindrop's protocol", "", PROTOCOL.format(**facts)]
    lines += [*document.changes(), "", *markdown_table(titles, body)]
    compared = differences(rows)
    for name, found in compared.items():
        lines += [
            "",
            f"`{OURS}` less others, {name.upper()}, 95 % intervals of resampled stays:",
            "",
        ]
        lines += [
            f"- {other}: {entry['difference']:+.4f} ({entry['low']:+.4f} to {entry['high']:+.4f})"
            for other, entry in found.items()
        ]
    return [*lines, "", *document.origin()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(__doc__)
    parser.add_argument("--methods", type=names_among(METHODS), default=list(METHODS))
    options = parser.parse_args(arguments)
    seeds = range(1 if options.quick else min(options.seeds, NUM_SPLITS))
    jobs: list[Job] = [{"method": m, "seed": seed} for m in options.methods for seed in seeds]
    settings: dict[str, Any] = {"estimator": {}, "stays": None}
    if options.quick:
        settings = {"estimator": TINY, "stays": _TOY_STAYS}
    return run_benchmark("raindrop.py", arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
