"""What suites with a command line share: the command, its rows in a file, and pictures."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osciformer._files import replacing
from osciformer.bench.documents import Document, current_commit, make_parser, run_documented
from osciformer.bench.report import Row, describe_run, names_among, progress, shown_command
from osciformer.bench.workers import Job, Work
from osciformer.plots import axes

#: Black is for references.
REFERENCE = "#000000"
COLOURS = tuple(colour for colour in axes.COLOURS if colour != REFERENCE)
PACKAGES = ("pytorch-lightning", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark of `osciformer bench`: its rows, how one is made, and what is made of all."""

    name: str
    summary: str
    rows: Sequence[str]  # what `--rows` chooses among, the most important first
    pictures: Mapping[str, Callable[[Document], Any]] = field(default_factory=dict)  # by file name
    seeds: int = 3

    @abstractmethod
    def jobs_of(self, options: argparse.Namespace) -> list[Job]:
        """Return all jobs, the most important first."""

    @abstractmethod
    def work_on(self, options: argparse.Namespace) -> Work:
        """Return what does a job."""

    @abstractmethod
    def tables_of(self, document: Document) -> list[str]:
        """Return the lines of the Markdown file."""

    def with_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Return the parser with arguments of the benchmark's own."""
        return parser

    def settings_of(self, options: argparse.Namespace) -> Row:
        """Return plain values that all rows share."""
        return {"quick": options.quick}

    def figures(self) -> Mapping[str, Callable[[Document], Any]]:
        """Return what draws the pictures, by the names of their files."""
        return self.pictures

    def is_ready(self, document: Document, job: Job) -> bool:
        """Return whether nothing that a job needs is missing."""
        return True

    def main(self, argv: Sequence[str]) -> int:
        """Run the command and return its exit status: 0 if no job is missing."""
        parser = make_parser(argparse.ArgumentParser(prog=f"osciformer bench {self.name}"))
        parser.description = (
            f"{self.summary} Rows are kept in the output file; the same command continues it."
        )
        known, add = ",".join(self.rows), parser.add_argument
        add("--rows", type=names_among(self.rows), default=list(self.rows), help=f"of {known}")
        add("--pictures", type=Path, help="folder for figures of all rows that are there")
        parser.set_defaults(seeds=self.seeds)
        options = self.with_arguments(parser).parse_args(list(argv))
        command = shown_command("osciformer", "bench", self.name, arguments=argv)
        settings = self.settings_of(options)

        def describe() -> Row:
            device = torch.device(getattr(options, "device", "cpu"))
            meta = describe_run(command, device, packages=PACKAGES)
            return {**meta, "commit": options.commit or current_commit(Path(__file__).parent)}

        def tables(document: Document) -> list[str]:
            toy = ["", "Toy size, not a result."] if options.quick else []
            return [*self.tables_of(document), *toy]

        given = (options, self.jobs_of(options), self.work_on(options), settings, tables)
        status = run_documented(describe, *given, is_ready=self.is_ready, file=str(options.output))
        if options.pictures is not None:
            document = Document(options.output, settings)
            if not document.finished:
                progress("no picture is drawn: no row is finished")
                return status
            for name, draw in self.figures().items():
                figure = draw(document)
                with replacing(options.pictures / f"{name}.png") as part:
                    figure.savefig(part, dpi=110)
        return status


@dataclass(frozen=True, kw_only=True)
class Suite(Benchmark):
    """A benchmark of which a job is a row and a seed, or what else its functions make of them."""

    jobs: Callable[[Sequence[str], int], list[Job]]  # of chosen rows and a number of seeds
    work: Work
    tables: Callable[[Document], list[str]]

    def jobs_of(self, options: argparse.Namespace) -> list[Job]:
        """Return all jobs."""
        return self.jobs(options.rows, 1 if options.quick else options.seeds)

    def work_on(self, options: argparse.Namespace) -> Work:
        """Return what does a job."""
        return self.work

    def tables_of(self, document: Document) -> list[str]:
        """Return the lines of the Markdown file."""
        return self.tables(document)


def jobs_by_seed(rows: Sequence[str], seeds: int) -> list[Job]:
    """Return a job for each row and seed."""
    return [{"row": row, "seed": seed} for seed in range(seeds) for row in rows]


def rounded(entry: Any) -> Any:
    """Return a row with five digits of each number, also of those in lists."""
    if isinstance(entry, dict):
        return {key: rounded(x) for key, x in entry.items()}
    if isinstance(entry, list):
        return [rounded(x) for x in entry]
    return float(f"{entry:.5g}") if isinstance(entry, float) else entry


def of_row(document: Document, row: str) -> list[Row]:
    """Return the finished jobs of a row, one per seed."""
    return [found for found in document.finished if found["row"] == row]


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, np.ndarray]:
    """Return a figure and its axes `[rows, columns]`."""
    figure, found = axes.panels(rows, columns, sharex=False, sharey=False)
    figure.set_size_inches(size)
    return figure, found
