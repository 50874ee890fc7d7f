"""Accuracy on multivariate series of the UEA archive, of which a part of the rows is dropped.

    PYTHONPATH=src python benchmarks/uea_dropping.py --output uea.json --table uea.md --jobs 16
    PYTHONPATH=src python benchmarks/uea_dropping.py --output toy.json --quick   # to see it run

`OsciFormerClassifier` with its default settings, and the same with other backbones, on the
archive's own split. The data are found through the environment variable OSCIFORMER_DATA. A run
that ends before all jobs are done is continued by the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from shared import (
    TINY,
    Document,
    estimator_settings,
    make_parser,
    run_benchmark,
    spread,
    training_entries,
)

from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.workers import Job
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.ragged import offsets_of
from osciformer.estimators import OsciFormerClassifier

DATASETS = ("JapaneseVowels", "BasicMotions")
PERCENTAGES = (0, 30, 50, 70)
BACKBONES = ("osciformer", "transformer", "gru_d", "contiformer")
FEWEST_ROWS = 2

PROTOCOL = """\
Protocol: the archive's own training and test series. Of each series, in both parts, the given
percentage of its rows (all channels of a time step, rounded down, at least 2 rows stay) is removed
at random before anything else; the rows that stay keep their times. A seed decides which rows go
and all randomness of training. `OsciFormerClassifier` has its default settings and sees no test
series before it is scored; it keeps a tenth of the training series, class by class, for early
stopping. The other backbones take the place of the oscillator attention in the same estimator,
with the same inputs, width and training. Test accuracy, mean ± standard deviation over the seeds;
in brackets the number of seeds where it is not {seeds}."""


def drop_rows(
    series: IrregularSeries, percentage: int, generator: np.random.Generator
) -> IrregularSeries:
    """Return the series without a percentage of their rows, rounded down; at least 2 rows stay."""
    kept = []
    for start, length in zip(series.offsets[:-1], series.lengths, strict=True):
        fewest = min(FEWEST_ROWS, int(length))
        stay = max(int(length) - percentage * int(length) // 100, fewest)
        kept.append(start + np.sort(generator.permutation(length)[:stay]))
    index = np.concatenate(kept)
    return series.replace(
        times=series.times[index],
        values=series.values[index],
        offsets=offsets_of(np.array([len(rows) for rows in kept])),
    )


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Train and score one classifier."""
    parts = []
    for number, split in enumerate(("train", "test")):
        series = get_dataset(job["dataset"], split)
        # Drawn apart, so that the test series do not depend on the number of training series.
        generator = np.random.default_rng([job["seed"], job["percentage"], number])
        parts.append(drop_rows(series, job["percentage"], generator))
    train, test = parts
    model = OsciFormerClassifier(**estimator_settings(job["backbone"], job, settings)).fit(train)
    return {
        "accuracy": model.score(test),
        "train_size": len(train),
        "test_size": len(test),
        "classes": len(model.classes_),
        "median_rows": float(np.median(test.lengths)),
        **training_entries(model, job, settings),
    }


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    rows = document.finished
    seeds = len({row["seed"] for row in rows})
    percentages = sorted({row["percentage"] for row in rows})
    columns = ["data set", "classes", "training / test series", "backbone"]
    body = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        for backbone in BACKBONES:
            found = [r for r in rows if (r["dataset"], r["backbone"]) == (dataset, backbone)]
            if not found:
                continue
            line = [dataset, str(found[0]["classes"])]
            line += [f"{found[0]['train_size']} / {found[0]['test_size']}", backbone]
            for percentage in percentages:
                scores = [r["accuracy"] for r in found if r["percentage"] == percentage]
                short = f" ({len(scores)})" if 0 < len(scores) != seeds else ""
                line.append(spread(scores) + short)
            body.append(line)
    columns += [f"{percentage} % dropped" for percentage in percentages]
    return [
        "# UEA series with dropped rows",
        "",
        PROTOCOL.format(seeds=seeds),
        *document.changes(),
        "",
        *markdown_table(columns, sorted(body)),
        "",
        *document.origin(),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(__doc__)
    parser.add_argument("--datasets", type=names_among(DATASETS), default=list(DATASETS))
    parser.add_argument("--backbones", type=names_among(BACKBONES), default=list(BACKBONES[:3]))
    options = parser.parse_args(arguments)
    seeds, percentages = range(options.seeds), PERCENTAGES
    if options.quick:
        seeds, percentages = range(1), PERCENTAGES[::3]
    jobs: list[Job] = [
        {"dataset": dataset, "percentage": percentage, "backbone": backbone, "seed": seed}
        for seed in seeds  # so that an unfinished run has all cells from few seeds
        for dataset in options.datasets
        for backbone in options.backbones
        for percentage in percentages
    ]
    settings = {"estimator": TINY if options.quick else {}}
    return run_benchmark("uea_dropping.py", arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
