"""How many oscillators reproduce the attention of a trained ContiFormer?

    PYTHONPATH=src python benchmarks/contiformer_theorem.py --output theorem.json --table theorem.md
    PYTHONPATH=src python benchmarks/contiformer_theorem.py --output toy.json --quick

A ContiFormer of one block is trained on sines of two frequencies at irregular times. Then the
trajectories of its keys and values, and its query, are put on one bank of oscillators per head and
series (`osciformer.theory.approximate_attention`), for ever smaller tolerances.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from shared import describe
from torch import Tensor

from osciformer._files import write_json, write_text
from osciformer.baselines.contiformer import (
    ContiFormerAttention,
    Pairs,
    contiformer_attention,
    query_spline,
)
from osciformer.bench.report import Row, markdown_table, progress
from osciformer.config import estimator_arguments
from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier
from osciformer.theory import (
    ApproximateAttention,
    OscillatorBank,
    approximate_attention,
    least_squares_states,
)
from osciformer.theory import Path as Trajectory

ROWS, SPAN, NOISE = 24, 10.0, 0.2
FREQUENCIES = (0.15, 0.3)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
#: Smaller ones would take thousands of modes.
LEAST_FEJER = 1e-1
SETTINGS: dict[str, Any] = {
    "backbone": "contiformer",
    "backbone_options": {"step": 0.5},
    "dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "max_epochs": 60,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "patience": None,
    "dropout": 0.0,
    "observation_dropout": 0.0,
    "carry": False,
    "skip": False,  # the attention alone answers
    "resonators": False,
    "random_state": 0,
    "accelerator": "cpu",
}
# Steps of the solver from a key's time to the end of the series, and of the cubic between them.
SOLVER_STEPS = 2000


def make_series(number: int, seed: int) -> IrregularSeries:
    """Return noisy sines of random phase whose label is the number of their frequency."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % len(FREQUENCIES)
    times = np.sort(generator.uniform(0, SPAN, (number, ROWS)), axis=1)
    turns = np.array(FREQUENCIES)[labels][:, None] * times + generator.uniform(0, 1, (number, 1))
    values = np.sin(2 * np.pi * turns) + NOISE * generator.standard_normal(times.shape)
    return IrregularSeries.from_arrays(times, values[..., None], labels=labels)


class Head(NamedTuple):
    """One head on one series: what it computes, as functions of time."""

    query: Trajectory
    keys: list[Trajectory]
    values: list[Trajectory]
    times: Tensor
    layer: Tensor  # [N, N], the attention matrix as the layer computes it
    rule: tuple[list[float], list[float]]  # nodes and weights on [0, 1] by which it integrates


def solve(field: Any, start: Tensor, times: Tensor) -> list[Trajectory]:
    """Return the trajectories `[T] -> [T, D]` of all tokens, by many steps of Runge-Kutta."""
    gap = times[-1] - times  # of each token, to the end
    step = 1.0 / SOLVER_STEPS

    def velocity(x: float, y: Tensor) -> Tensor:
        return gap[:, None] * field(times + x * gap, y)

    y, states, slopes = start, [], []
    for number in range(SOLVER_STEPS + 1):
        x = number * step
        first = velocity(x, y)
        states.append(y)
        slopes.append(first)
        second = velocity(x + step / 2, y + step / 2 * first)
        third = velocity(x + step / 2, y + step / 2 * second)
        fourth = velocity(x + step, y + step * third)
        y = y + step / 6 * (first + 2 * second + 2 * third + fourth)
    knots, speeds = torch.stack(states), torch.stack(slopes)  # [S + 1, N, D]

    def path(token: int) -> Trajectory:
        begin, length = float(times[token]), float(gap[token]) or 1.0

        def at(t: Tensor) -> Tensor:
            place = ((t - begin) / length).clamp(0, 1) * SOLVER_STEPS
            left = place.floor().clamp(max=SOLVER_STEPS - 1).long()
            u = (place - left)[:, None]
            y0, y1 = knots[left, token], knots[left + 1, token]
            f0, f1 = step * speeds[left, token], step * speeds[left + 1, token]
            bend = u * (1 - u) * ((1 - u) * (f0 - (y1 - y0)) - u * (f1 - (y1 - y0)))
            return y0 + u * (y1 - y0) + bend

        return at

    return [path(token) for token in range(len(times))]


def layer_weights(q: Tensor, k: Tensor, times: Tensor, layer: ContiFormerAttention) -> Tensor:
    """Return the attention matrices `[H, N, N]` of the layer: its output for values that mark."""
    count, width = q.shape[1], q.shape[3]
    options = {n: getattr(layer.options, n) for n in ("query", "quadrature", "num_nodes", "step")}
    columns = []
    for first in range(0, count, width):
        marks = torch.zeros_like(q)
        for c in range(min(width, count - first)):
            marks[:, first + c, :, c] = 1.0
        fields = {"key_field": layer.key_field, "value_field": lambda t, y: torch.zeros_like(y)}
        columns.append(contiformer_attention(q, k, marks, times[None], **fields, **options)[0])
    return torch.cat(columns, dim=-1)[..., :count].transpose(0, 1)


@torch.no_grad()
def heads_of(model: Any, times: Tensor, values: Tensor) -> list[Head]:
    """Return what the heads of the model's layer compute on one series, in float64."""
    backbone = model.backbone
    (block,) = backbone.encoder
    layer: ContiFormerAttention = block.attention
    times = backbone.time_scale(times)[0]
    tokens = block.attention_norm(backbone.embedding(values))
    q, k, v = layer.project(tokens, tokens)  # [1, N, H, C]
    spline = query_spline(q.flatten(2), times[None], None, layer.options.query)

    def query(t: Tensor) -> Tensor:
        each = torch.arange(len(t))
        zeros = torch.zeros_like(each)
        return spline(Pairs(zeros, each, zeros, len(times)), t)

    keys = solve(layer.key_field, k[0].flatten(1), times)
    values_of = solve(layer.value_field, v[0].flatten(1), times)
    weights = layer_weights(q, k, times, layer)
    width = q.shape[-1]
    found = []
    for h in range(q.shape[2]):
        part = slice(h * width, (h + 1) * width)

        def cut(path: Trajectory, part: slice = part) -> Trajectory:
            return lambda t: path(t)[:, part]

        paths = cut(query), [cut(x) for x in keys], [cut(x) for x in values_of]
        found.append(Head(*paths, times, weights[h], layer.options.rule()))
    return found


def by_layer_rule(head: Head, found: ApproximateAttention) -> float:
    """Return the largest error in a row of the layer's own matrix, with keys of the bank in it."""
    nodes, shares = head.rule
    logits = torch.full_like(head.layer, -torch.inf)
    for i, begin in enumerate(head.times.tolist()):
        gaps = head.times[i:] - begin
        total = torch.zeros_like(gaps)
        for x, share in zip(nodes, shares, strict=True):
            keys = found.bank.path(found.keys[i], x * gaps)
            total += share * (head.query(begin + x * gaps) * keys).sum(dim=-1)
        logits[i:, i] = total
    weights = (logits / math.sqrt(found.keys.shape[-1])).softmax(dim=-1)
    return float((weights - head.layer).abs().sum(dim=-1).max())


def measure(head: Head, tolerances: Sequence[float]) -> list[Row]:
    """Return what each tolerance takes, keys and values on the bank and the query as it is."""
    rows = []
    for tol in tolerances:
        started = time.process_time()
        parts = (head.query, head.keys, head.times, tol)
        found = approximate_attention(*parts, exact_query=True)
        seconds = time.process_time() - started
        certificate = found.certificate
        row = {"tol": tol, "modes": certificate.num_modes, "holds": certificate.holds}
        row |= {"measured": certificate.weights.measured, "proved": certificate.weights.proved}
        row |= {"layer": by_layer_rule(head, found), "seconds": round(seconds, 2)}
        outputs = approximate_attention(*parts, values=head.values, exact_query=True).certificate
        assert outputs.outputs is not None
        row |= {"output_modes": outputs.num_modes, "output_measured": outputs.outputs.measured}
        if tol >= LEAST_FEJER:
            with contextlib.suppress(ValueError):  # out of reach of 256 modes
                fejer = approximate_attention(*parts, exact_query=True, method="fejer")
                row |= {"fejer_modes": fejer.certificate.num_modes}
        rows.append(row)
    return rows


def query_errors(head: Head, modes: Sequence[int]) -> list[Row]:
    """Return how far the query on a bank is from the query, relative to its largest norm."""
    begin, end = float(head.times[0]), float(head.times[-1])
    grid = torch.linspace(0.0, end - begin, 8001, dtype=torch.float64)
    wanted, rows = head.query(begin + grid), []
    for count in modes:
        bank = OscillatorBank.on_grid(count, end - begin)
        states = least_squares_states(head.query, bank, begin, end=end)
        error = (wanted - bank.path(states, grid)).norm(dim=-1).max()
        rows.append({"modes": count, "error": float(error / wanted.norm(dim=-1).max())})
    return rows


def tables(content: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""

    def count(rows: list[Row], name: str) -> str:
        counts = [row[name] for row in rows if name in row]
        if not counts:
            return "-"
        missing = f"; {len(rows) - len(counts)} above 256" if len(counts) < len(rows) else ""
        return f"{statistics.median(counts):g} ({min(counts)} to {max(counts)}{missing})"

    body = []
    for tol in content["settings"]["tolerances"]:
        rows = [row for row in content["rows"] if row["tol"] == tol]
        errors_of = [f"{max(row[name] for row in rows):.1e}" for name in ("proved", "measured")]
        own = f"{max(row['layer'] for row in rows):.1e}"
        more = [count(rows, name) for name in ("output_modes", "fejer_modes")]
        body.append([f"{tol:g}", count(rows, "modes"), *errors_of, own, *more])
    columns = ("tolerance", "modes M", "proved", "measured", "layer's own rule")
    table = markdown_table([*columns, "M for values too", "M of Fejer means"], body)
    errors: dict[int, list[float]] = {}
    for row in content["query"]:
        errors.setdefault(row["modes"], []).append(row["error"])
    query = ", ".join(f"{statistics.median(x):.2g} (M = {m})" for m, x in errors.items())
    accuracy = content["accuracy"]
    return [*table, "", f"Test accuracy {accuracy:.3f}. Relative error of the query: {query}."]


def main(arguments: Sequence[str]) -> int:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--table", type=Path, help="Markdown file; without it, standard output")
    parser.add_argument("--commit", help="to record, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see it run")
    options = parser.parse_args(arguments)
    number, num_series, tolerances, modes = 400, 3, TOLERANCES, (16, 64, 256)
    chosen = SETTINGS
    if options.quick:
        number, num_series, tolerances, modes = 32, 1, TOLERANCES[:2], (16,)
        chosen = {**SETTINGS, "max_epochs": 1}
    meta = describe("contiformer_theorem.py", arguments, commit=options.commit)
    train, test = make_series(number, 0), make_series(number, 1)
    model = OsciFormerClassifier(**estimator_arguments("classification", chosen)).fit(train)
    accuracy = model.score(test)
    progress(f"test accuracy {accuracy:.3f} after {model.n_iter_} epochs")
    settings = {"estimator": chosen, "series": number, "tolerances": tolerances}
    content: dict[str, Any] = {
        "meta": meta,
        "settings": settings,
        "accuracy": accuracy,
        "rows": [],
        "query": [],
    }
    network = model.model_.double().eval()
    scaled = model.transform_.transform(test.take(range(num_series)))
    for n in range(num_series):
        part = scaled.take([n])
        times, values = (torch.tensor(x, dtype=torch.float64) for x in (part.times, part.values))
        for number, head in enumerate(heads_of(network, times[None], values[None])):
            where = {"series": n, "head": number}
            content["rows"] += [{**where, **row} for row in measure(head, tolerances)]
            content["query"] += [{**where, **row} for row in query_errors(head, modes)]
            progress(f"series {n}, head {number} done")
            write_json(options.output, content, indent=1)
    lines = tables(content)
    if options.table is None:
        print("\n".join(lines))
    else:
        write_text(options.table, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
