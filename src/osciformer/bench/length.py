"""`osciformer bench length`: time and memory of a training step against the length of series."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.bench.documents import Document
from osciformer.bench.layer import timed
from osciformer.bench.report import Row, markdown_table
from osciformer.bench.speed import peak_mib
from osciformer.bench.suite import COLOURS, REFERENCE, Benchmark, new_figure, rounded
from osciformer.bench.workers import Job, Work
from osciformer.config import SeriesModelConfig
from osciformer.models.backbones import Backbone, backbone_names, make_backbone

#: Ours, by their encoder blocks; all other models are backbones by their names.
OURS: Mapping[str, tuple[str, ...]] = {
    "osciformer": ("attention",),
    "osciformer_resonator": ("resonator",),
    "osciformer_selective": ("selective",),
}
NUM_FEATURES, HEADS = 4, 4
#: A longer series is not tried once a step took so long, or would take so much memory.
MOST_SECONDS, MOST_MIB = 20.0, 6000.0
#: For the repetitions at one length, and the most of them.
SECONDS, MOST = 2.0, 20
#: Lengths at the end of a curve that its exponent is fitted to.
FITTED = 4


@dataclass(frozen=True, kw_only=True)
class Lengths(Benchmark):
    """The benchmark; its rows are models."""

    def with_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Return the parser with the device."""
        told = "cpu (one thread a process) or cuda; the rows of a file are of one device"
        parser.add_argument("--device", default="cpu", help=told)
        return parser

    def settings_of(self, options: argparse.Namespace) -> Row:
        """Return sizes and device."""
        full = {"batch": 8, "dim": 64, "lengths": [2**k for k in range(6, 15)]}
        toy = {"batch": 2, "dim": 8, "lengths": [16, 32]}
        return {**(toy if options.quick else full), "device": options.device}

    def jobs_of(self, options: argparse.Namespace) -> list[Job]:
        """Return a job for each model: one process grows the series until that takes too long."""
        return [{"row": row} for row in options.rows]

    def work_on(self, options: argparse.Namespace) -> Work:
        """Return what does a job."""
        return measure

    def tables_of(self, document: Document) -> list[str]:
        """Return the lines of the Markdown file."""
        given = document.settings
        lengths = given["lengths"]
        lines = [
            f"# {self.name}: {self.summary}",
            "",
            f"One encoder layer of width {given['dim']} ({given['device']}, float32), forward and "
            f"backward with gradients of all weights, on {given['batch']} series of "
            f"{NUM_FEATURES} variables at random times. Milliseconds are medians: of the processor "
            "on a CPU, of events on a GPU. The exponent is that of the time over the last "
            f"{FITTED} lengths. A dash is a length that was not tried, since a step at the one "
            f"before took over {MOST_SECONDS:.0f} s, or it would have needed more than "
            f"{MOST_MIB / 1000:.0f} GB; a question mark is a memory that could not be told.",
        ]
        for key, what in (("ms", "Milliseconds"), ("mib", "Peak memory, MiB")):
            body = []
            for row in self._found(document):
                cells = [_cell(x) for x in row[key]] + ["-"] * (len(lengths) - len(row[key]))
                body.append([row["row"], f"{row['parameters']:,}", *cells, exponent(row, key)])
            columns = ["model", "parameters", *(f"N = {n:,}" for n in lengths), "exponent"]
            lines += ["", f"## {what}", "", *markdown_table(columns, body)]
        return [*lines, "", *document.origin()]

    def figures(self) -> Mapping[str, Callable[[Document], Any]]:
        """Return what draws both panels."""
        return {"length": self.draw}

    def draw(self, document: Document) -> Any:
        """Return the figure: time and memory against the length, both logarithmic."""
        figure, panels = new_figure(1, 2, (12.0, 5.0))
        rows = self._found(document)
        for axis, key in zip(panels[0], ("ms", "mib"), strict=True):
            others = [row["row"] for row in rows if row["row"] not in OURS]
            for row in rows:
                name = row["row"]
                if name in OURS:
                    place = list(OURS).index(name)
                    style: dict[str, Any] = {"color": COLOURS[place], "lw": 2.2, "zorder": 3}
                else:
                    place = others.index(name)
                    style = {"color": REFERENCE, "alpha": 0.55, "lw": 1.0}
                    style["marker"] = "osd^v<>pPX*h8"[place % 13]
                lengths = document.settings["lengths"][: len(row[key])]
                axis.plot(lengths, row[key], label=name, ms=4, **style)
            axis.set(xscale="log", yscale="log", xlabel="observations a series")
        panels[0, 0].set(ylabel="ms a training step")
        panels[0, 1].set(ylabel="peak memory, MiB")
        panels[0, 1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    def _found(self, document: Document) -> list[Row]:
        found = {row["row"]: row for row in document.finished}
        return [found[name] for name in self.rows if name in found]


def exponent(row: Row, key: str) -> str:
    """Return the slope of a curve in log-log coordinates over its last lengths, in words."""
    curve = [(n, x) for n, x in zip(row["lengths"], row[key], strict=True) if x]
    if len(curve) < FITTED:
        return "-"
    n, x = np.log(np.array(curve[-FITTED:])).T
    return f"{np.polyfit(n, x, 1)[0]:.2f}"


def _cell(x: float | None) -> str:
    return "?" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def make_model(name: str, dim: int) -> Backbone:
    """Return a causal encoder of one layer."""
    settings: dict[str, Any] = {"backbone": name, "num_layers": 1}
    if name in OURS:
        settings = {"backbone": "osciformer", "blocks": OURS[name]}
    sizes: Any = {"input_dim": NUM_FEATURES, "output_dim": 1, "dim": dim, "num_heads": HEADS}
    config = SeriesModelConfig(**sizes, dropout=0.0, **settings)
    return make_backbone(config, NUM_FEATURES, direction="causal")


def make_step(
    model: Backbone,
    values: Float[Tensor, "B N F"],
    times: Float[Tensor, "B N"],
) -> Callable[[], object]:
    """Return a function that encodes the series and returns the gradients of all weights."""
    mask = torch.ones_like(times, dtype=torch.bool)
    weights = [p for p in model.parameters() if p.requires_grad]

    def step() -> object:
        loss = model.encode(values, times, mask).states.float().square().mean()
        return torch.autograd.grad(loss, weights, allow_unused=True)

    return step


def measure(job: Job, settings: Mapping[str, Any]) -> Row:
    """Return time and memory of a step at growing lengths."""
    found: dict[str, Any] = {"lengths": [], "ms": [], "mib": []}
    device = torch.device(settings["device"])
    make_call(job["row"], settings, settings["lengths"][0])[1]()  # code and stacks do not count
    for length in settings["lengths"]:
        # Memory grows at most with the square of the length.
        slow = found["ms"] and found["ms"][-1] > 1e3 * MOST_SECONDS
        if slow or (found["mib"] and 4 * (found["mib"][-1] or 0.0) > MOST_MIB):
            break
        model, call = make_call(job["row"], settings, length)
        times = [timed(call, device)]
        found["mib"].append(peak_mib(call, device))
        affordable = int(1e3 * SECONDS / max(times[0].wall_ms, 1e-3))
        # The first call at a length also takes memory from the system: it counts if it is alone.
        times += [timed(call, device) for _ in range(min(affordable, MOST))]
        found["ms"].append(statistics.median(t.ms for t in times[1:] or times))
        found["lengths"].append(length)
        found["parameters"] = sum(p.numel() for p in model.parameters())
    row: Row = rounded(found)
    return row


def make_call(
    name: str, settings: Mapping[str, Any], length: int
) -> tuple[Backbone, Callable[[], object]]:
    """Return a model, and a function that does a training step of it without the update."""
    torch.manual_seed(0)
    times = torch.rand(settings["batch"], length, dtype=torch.float64).sort(1).values
    model = make_model(name, settings["dim"]).fit_time_scale(times).to(settings["device"])
    values = torch.randn(settings["batch"], length, NUM_FEATURES)
    return model, make_step(model, values.to(settings["device"]), times.to(settings["device"]))


def _rows() -> Sequence[str]:
    return (*OURS, *(name for name in backbone_names() if name not in OURS))


SUITE = Lengths(
    name="length",
    summary="Time and memory of a training step against the length of the series.",
    rows=_rows(),
)
