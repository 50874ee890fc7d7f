"""How many oscillators reproduce the attention of a trained ContiFormer?

    PYTHONPATH=src python benchmarks/contiformer_theorem.py --output theorem.json --table theorem.md
    PYTHONPATH=src python benchmarks/contiformer_theorem.py --output toy.json --quick

A ContiFormer of one block is trained on sines of two frequencies at irregular times. Then the
trajectories of its keys and values, and its query, are put on one bank of oscillators per head and
series (`osciformer.theory.approximate_attention`), for ever smaller tolerances.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
from osciformer.theory import Path as Trajectory
from osciformer.theory import approximate_attention

ROWS, SPAN, NOISE = 24, 10.0, 0.2
FREQUENCIES = (0.15, 0.3)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)
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
    weights: Tensor  # [N, N], as the layer computes them
    lipschitz: float


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
    _, count, heads, width = q.shape
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
    # A sigmoid is at most 1 in each channel; a spline is as steep as on a fine grid.
    found = []
    for h in range(q.shape[2]):
        part = slice(h * width, (h + 1) * width)

        def cut(path: Trajectory, part: slice = part) -> Trajectory:
            return lambda t: path(t)[:, part]

        paths = cut(query), [cut(x) for x in keys], [cut(x) for x in values_of]
        found.append(Head(*paths, times, weights[h], math.sqrt(width)))
    return found
