"""Five charged bodies, each seen at its own irregular times: where are they later?

    PYTHONPATH=src python benchmarks/nbody.py --output nbody.jsonl                # hours on a CPU
    PYTHONPATH=src python benchmarks/nbody.py --output nbody.jsonl --device cuda --models egnn,plain
    PYTHONPATH=src python benchmarks/nbody.py --output flat.jsonl --flat --sizes 1000
    PYTHONPATH=src python benchmarks/nbody.py --output cost.jsonl --cost --device cuda
    PYTHONPATH=src python benchmarks/nbody.py --output toy.jsonl --quick          # to see it run
    PYTHONPATH=src python benchmarks/nbody.py --table nbody.jsonl cost.jsonl      # Markdown

One line of JSON is appended for each finished training, so that several processes can share the
work, each with an output of its own. What the output has already is not run again.

Models, all of which predict what is to be added to the forecast at constant velocity, divided by
the time since the body was seen: `equivariant` is `EquivariantOsciFormer`. `plain` is the same
network with its constraints lifted: linear maps and couplings of all components, a spectrum for
each component, the same width. `plain_turned` is that, trained on systems turned at random.
`egnn` is an equivariant graph network on the last observation of each body, with the time since
then as a feature. `constant_velocity` is the forecast itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from e3nn import o3
from shared import describe
from torch import Tensor, nn

from osciformer.bench.documents import spread
from osciformer.bench.report import Row, markdown_table, names_among, progress
from osciformer.equivariant import (
    AveragedOscillators,
    Bridge,
    ChannelLinear,
    ChannelNorm,
    EquivariantAttention,
    EquivariantOsciFormer,
    GatedFeedForward,
    Kinds,
    Observations,
    RadialBasis,
    find_neighbours,
)
from osciformer.nn import OscillatorAttention, Spectrum, parameter_groups

BODIES, SIGHTINGS, READS = 5, 6, 3
SEEN, SPAN, STEP = 2.0, 3.0, 0.005
SOFTENING = 0.5
DROPPED, BLIND = 0.2, 0.3
NUM_TEST, NUM_VALIDATION = 2000, 500
MODELS = ("equivariant", "plain", "plain_turned", "egnn", "constant_velocity")
SIZES = (100, 1000, 10000)
NETWORK: dict[str, Any] = {
    "channels": 16,
    "num_layers": 2,
    "num_heads": 4,
    "cutoff": 8.0,
    "num_radial": 8,
    "omega_range": (0.05, 10.0),
}
BATCH, RATE, DECAY = 50, 3e-3, 1e-4

PROTOCOL = """\
Protocol: five bodies of charge ±1 and mass 1, normal positions (deviation 1) and velocities (0.5),
Coulomb forces softened at 0.5, leapfrog with step 0.005 in float64. Each body is seen at 6 random
times of its own in [0, 2], of which a fifth is dropped; position, charge and, in 7 of 10 sightings,
velocity. All bodies are to be predicted at 3 random times in [2, 3]. Where the last velocity is
missing, constant velocity takes the difference of the last two positions. 2,000 test systems, 500
for the choice of the epoch; {steps} steps of AdamW, batches of 50, cosine schedule, for all
networks. Error: mean squared distance, mean ± standard deviation over the seeds."""


class Systems(NamedTuple):
    """Sightings ``[B, N]``, N = 5 bodies x 6, and what is asked ``[B, M]``, M = 5 bodies x 3."""

    features: Tensor  # [B, N, 5]: charge, whether the velocity is known, velocity or zero
    positions: Tensor  # [B, N, 3]
    times: Tensor
    bodies: Tensor
    mask: Tensor
    asked_bodies: Tensor
    asked_times: Tensor
    elapsed: Tensor  # [B, M], since the last sighting of the body
    velocity: Tensor  # [B, M, 3], the last one known
    forecast: Tensor  # [B, M, 3], at constant velocity
    target: Tensor  # [B, M, 3]

    def take(self, index: Tensor | slice) -> Systems:
        """Return some systems."""
        return Systems(*(x[index] for x in self))

    def to(self, device: torch.device) -> Systems:
        """Return the systems on a device."""
        return Systems(*(x.to(device) for x in self))

    def turn(self, rotation: Tensor) -> Systems:
        """Return the systems turned by a matrix each ``[B, 3, 3]``."""
        turned = {
            name: getattr(self, name) @ rotation.mT
            for name in ("positions", "velocity", "forecast", "target")
        }
        scalars, velocity = self.features[..., :2], self.features[..., 2:]
        features = torch.cat([scalars, velocity @ rotation.mT], dim=-1)
        return self._replace(features=features, **turned)


def simulate(number: int, seed: int, *, flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return charges ``[B, 5]``, positions and velocities ``[T, B, 5, 3]`` at all steps.

    `flat` systems start, and so stay, close to a plane that is the same for all.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (number, BODIES, 3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    v = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    v = v - v.mean(dim=1, keepdim=True)
    if flat:
        x[..., 2] *= 0.1
        v[..., 2] *= 0.1
    charges = 2.0 * torch.randint(2, shape[:2], generator=generator).double() - 1.0

    def force(x: Tensor) -> Tensor:
        offset = x[:, :, None] - x[:, None]
        near = (offset.square().sum(dim=-1) + SOFTENING**2) ** -1.5
        return torch.einsum("bij,bijk->bik", charges[:, :, None] * charges[:, None] * near, offset)

    places, speeds, push = [x], [v], force(x)
    for _ in range(round(SPAN / STEP)):
        half = v + 0.5 * STEP * push
        x = x + STEP * half
        push = force(x)
        v = half + 0.5 * STEP * push
        places.append(x)
        speeds.append(v)
    return charges, torch.stack(places), torch.stack(speeds)


def make_systems(number: int, seed: int, *, flat: bool = False) -> Systems:
    """Return observed systems; those of one seed do not depend on how many there are."""
    chunk = 500
    parts = [
        _observe(*simulate(chunk, 1000 * seed + k, flat=flat), seed=1000 * seed + k)
        for k in range(math.ceil(number / chunk))
    ]
    whole = Systems(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return whole.take(slice(number))


def _observe(charges: Tensor, places: Tensor, speeds: Tensor, *, seed: int) -> Systems:
    generator = torch.Generator().manual_seed(seed + 10**9)
    number = len(charges)

    def draw(low: float, high: float, *shape: int) -> Tensor:
        steps = (round(low / STEP), round(high / STEP) + 1)
        return torch.randint(*steps, shape, generator=generator)

    step = draw(0, SEEN, number, BODIES, SIGHTINGS).sort(dim=-1).values
    mask = torch.rand(step.shape, generator=generator) >= DROPPED
    mask[..., 0] |= ~mask.any(dim=-1)  # each body is seen
    is_known = torch.rand(step.shape, generator=generator) >= BLIND
    asked = draw(SEEN, SPAN, number, READS)

    system = torch.arange(number)[:, None, None]
    body = torch.arange(BODIES)[None, :, None].expand_as(step)
    position, velocity = places[step, system, body], speeds[step, system, body]
    velocity = velocity * is_known[..., None]
    target = places[asked[:, None], system, torch.arange(BODIES)[None, :, None]]  # [B, 5, 3, 3]

    # The last sighting, and the one before it: itself if there is none.
    order = torch.where(mask, torch.arange(SIGHTINGS), -1)
    last = order.amax(dim=-1, keepdim=True)
    former = torch.where(order < last, order, -1).amax(dim=-1, keepdim=True)
    former = torch.where(former < 0, last, former)

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.take_along_dim(index if x.ndim == 3 else index[..., None], dim=2)

    when = STEP * step
    gap = (pick(when, last) - pick(when, former)).clamp(min=STEP)
    slope = (pick(position, last) - pick(position, former)) / gap[..., None]
    pace = torch.where(pick(is_known, last)[..., None], pick(velocity, last), slope)  # [B, 5, 1, 3]
    elapsed = STEP * asked[:, None] - pick(when, last)  # [B, 5, 3]
    forecast = pick(position, last) + pace * elapsed[..., None]
    charge = charges[:, :, None].expand_as(step)
    features = torch.cat([charge[..., None], is_known[..., None], velocity], dim=-1)
    asked_bodies = torch.arange(BODIES)[None, :, None].expand_as(elapsed)
    asked_times = (STEP * asked)[:, None].expand_as(elapsed)
    found = Systems(
        features,
        position,
        when,
        body,
        mask,
        asked_bodies,
        asked_times,
        elapsed,
        pace.expand_as(forecast),
        forecast,
        target,
    )
    flat = Systems(*(x.flatten(1, 2) for x in found))
    return Systems(*(x.float() if x.is_floating_point() else x for x in flat))


class ConstantVelocity(nn.Module):
    """Nothing is added to the forecast."""

    def forward(self, systems: Systems) -> Tensor:
        return torch.zeros_like(systems.forecast)


class Oscillating(nn.Module):
    """`EquivariantOsciFormer`, or the same without its constraints."""

    def __init__(self, *, free: bool) -> None:
        super().__init__()
        self.net = EquivariantOsciFormer("2x0e+1o", "1o", **NETWORK)
        if free:
            lift_constraints(self.net)
        start_at_zero(self.net.head)

    def forward(self, s: Systems) -> Tensor:
        reads = {"query_points": s.asked_bodies, "query_times": s.asked_times}
        found: Tensor = self.net(s.features, s.positions, s.times, s.bodies, s.mask, **reads)
        return found


def start_at_zero(*maps: nn.Module) -> None:
    """Let a network start as the forecast at constant velocity."""
    for parameter in (p for each in maps for p in each.parameters()):
        nn.init.zeros_(parameter)


class FreeLinear(nn.Module):
    """A linear map of all components of all channels."""

    def __init__(self, inputs: int, outputs: int, size: int, *, bias: bool, zero: bool) -> None:
        super().__init__()
        self.map, self.size = nn.Linear(inputs * size, outputs * size, bias), size
        if zero:
            nn.init.zeros_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.flatten(-2)).unflatten(-1, (-1, self.size))


def lift_constraints(module: nn.Module) -> None:
    """Put unconstrained parts of the same width in place of the equivariant ones."""
    for name, part in module.named_children():
        free: nn.Module | None = None
        if isinstance(part, o3.Linear):
            free = nn.Linear(part.irreps_in.dim, part.irreps_out.dim)
        elif isinstance(part, ChannelLinear):
            _, inputs, outputs = part.weight.shape
            settings = {"bias": part.bias is not None, "zero": not bool(part.weight.any())}
            free = FreeLinear(inputs, outputs, len(part.of_component), **settings)
        elif isinstance(part, ChannelNorm):
            free = nn.RMSNorm([len(part.weight), len(part.of_component)])
        elif isinstance(part, GatedFeedForward):
            _, inputs, hidden = part.expand.weight.shape
            ends = (inputs, hidden), (hidden, inputs)
            plain = {"bias": True, "zero": False}
            maps = [FreeLinear(*end, len(part.of_component), **plain) for end in ends]
            free = nn.Sequential(maps[0], nn.SiLU(), maps[1])
        if free is not None:
            setattr(module, name, free)
            continue
        if isinstance(part, AveragedOscillators):
            channels, size = len(part.spectrum.omega), len(part.of_component)
            part.spectrum = Spectrum(channels, size, omega_range=NETWORK["omega_range"])
            part.of_component = torch.arange(size)
        elif isinstance(part, Bridge):
            size = part.matrices.square().mean().sqrt().float()
            matrices = size * torch.randn(part.matrices.shape)
            del part.matrices
            part.matrices = nn.Parameter(matrices)
        lift_constraints(part)


class GraphNetwork(nn.Module):
    """EGNN (Satorras and others, 2021) with velocities, on the last sighting of each body."""

    def __init__(self, dim: int = 64, num_layers: int = 4) -> None:
        super().__init__()

        def net(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, dim), nn.SiLU(), nn.Linear(dim, outputs))

        self.embedding = nn.Linear(3, dim)
        layers = range(num_layers)
        self.edges = nn.ModuleList(net(2 * dim + 2, dim) for _ in layers)
        self.pushes = nn.ModuleList(net(dim, 1) for _ in layers)
        self.paces = nn.ModuleList(net(dim, 1) for _ in layers)
        self.nodes = nn.ModuleList(net(2 * dim, dim) for _ in layers)
        start_at_zero(*(net[-1] for net in (*self.pushes, *self.paces)))

    def forward(self, s: Systems) -> Tensor:
        def graphs(x: Tensor) -> Tensor:  # one for each system and time that is asked for
            return x.unflatten(1, (BODIES, READS)).transpose(1, 2)  # [B, READS, BODIES, ...]

        start = graphs(s.forecast - s.velocity * s.elapsed[..., None])
        v, elapsed = graphs(s.velocity), graphs(s.elapsed)
        charge = s.features[:, ::SIGHTINGS, 0][:, None].expand_as(elapsed)
        x = start
        h = self.embedding(torch.stack([charge, elapsed, v.norm(dim=-1)], dim=-1))
        for edge, push, pace, node in zip(
            self.edges, self.pushes, self.paces, self.nodes, strict=True
        ):
            offset = x[..., :, None, :] - x[..., None, :, :]
            squared = offset.square().sum(dim=-1, keepdim=True)
            product = (charge[..., :, None] * charge[..., None, :])[..., None]
            ends = h[..., :, None, :].expand(*offset.shape[:-1], -1)
            message = edge(torch.cat([ends, ends.transpose(-3, -2), squared, product], dim=-1))
            away = offset / ((squared + 1e-8).sqrt() + 1.0)  # no slope at zero otherwise
            x = x + (away * push(message)).sum(dim=-2) / (BODIES - 1) + pace(h) * v
            h = h + node(torch.cat([h, message.sum(dim=-2)], dim=-1))
        return (x - start).transpose(1, 2).flatten(1, 2)


def make_model(name: str) -> nn.Module:
    """Return an untrained model."""
    if name in ("equivariant", "plain", "plain_turned"):
        return Oscillating(free=name != "equivariant")
    return GraphNetwork() if name == "egnn" else ConstantVelocity()


def predict(model: nn.Module, systems: Systems) -> Tensor:
    """Return positions ``[B, M, 3]`` at the times that are asked for."""
    return systems.forecast + systems.elapsed[..., None] * model(systems)


def error(predicted: Tensor, systems: Systems) -> Tensor:
    """Return the mean squared distance."""
    return (predicted - systems.target).square().sum(dim=-1).mean()


@torch.no_grad()
def predict_all(model: nn.Module, systems: Systems) -> Tensor:
    """Return predictions for many systems."""
    chunks = range(0, len(systems.times), 250)
    return torch.cat([predict(model, systems.take(slice(k, k + 250))) for k in chunks])


def random_rotations(number: int, generator: torch.Generator) -> Tensor:
    """Return orthogonal matrices ``[B, 3, 3]``, half of them reflections."""
    draw = torch.randn(number, 3, 3, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(draw)
    return (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).float()


def train(
    name: str,
    systems: Systems,
    check: Systems,
    seed: int,
    *,
    steps: int,
    seconds: float,
    rate: float,
) -> tuple[nn.Module, Row]:
    """Return a trained model, the best of its epochs on `check`, and what training took.

    The schedule follows the steps, or the time where that is further: it always ends.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    device = systems.times.device
    model = make_model(name).to(device)
    if name == "constant_velocity":
        return model, {"steps": 0, "seconds": 0.0, "parameters": 0}
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=rate)
    best, kept, count, started, part = math.inf, {}, 0, time.perf_counter(), 0.0
    batches: list[Tensor] = []
    while part < 1.0:
        part = max(count / steps, (time.perf_counter() - started) / seconds)
        if count % max(1, steps // 20) == 0 or part >= 1.0:
            found = error(predict_all(model, check), check).item()
            if found < best:
                best = found
                kept = {key: x.clone() for key, x in model.state_dict().items()}
        if not batches:
            order = torch.randperm(len(systems.times), generator=generator).to(device)
            batches = list(order.split(BATCH))
        batch = systems.take(batches.pop())
        if name == "plain_turned":
            batch = batch.turn(random_rotations(len(batch.times), generator).to(device))
        warm = min(1.0, (count + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1.0 + math.cos(math.pi * min(1.0, part)))
        optimizer.zero_grad(set_to_none=True)
        error(predict(model, batch), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        count += 1
    model.load_state_dict(kept)
    return model, {
        "steps": count,
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation": best,
    }


def score(model: nn.Module, test: Systems) -> Row:
    """Return errors on test systems as they are and turned, and how far results fail to turn."""
    rotation = random_rotations(len(test.times), torch.Generator().manual_seed(7)).to(test.times)
    turned = test.turn(rotation)
    straight, rotated = predict_all(model, test), predict_all(model, turned)
    astray = (rotated - straight @ rotation.mT).square().sum(dim=-1)
    return {
        "mse": error(straight, test).item(),
        "mse_turned": error(rotated, turned).item(),
        "distance": (straight - test.target).norm(dim=-1).mean().item(),
        "turn_error": astray.mean().sqrt().item(),
    }


def cost_rows(device: torch.device, backend: str, *, quick: bool) -> list[Row]:
    """Return times of a forward and backward pass of one layer, beside the plain layer's."""
    kinds, channels, batch = Kinds("0e+1o"), NETWORK["channels"], 8
    dim = channels * kinds.size
    heads, radial = NETWORK["num_heads"], NETWORK["num_radial"]
    ranges = {"omega_range": NETWORK["omega_range"]}
    layer = EquivariantAttention(kinds, channels, heads, num_radial=radial, **ranges).to(device)
    plain = OscillatorAttention(dim, heads, backend=backend, **ranges).to(device)
    basis = RadialBasis("bessel", radial, 2)
    grids = [(5, 8)] if quick else [(5, n) for n in (4, 8, 16, 32)]
    grids += [] if quick else [(n, 8) for n in (10, 20, 40)]
    rows = []
    for points, sightings in grids:
        number = points * sightings
        x = torch.randn(batch, number, channels, kinds.size, device=device, requires_grad=True)
        times = torch.rand(batch, number, device=device).sort(dim=1).values
        # Points fill a cube at one density, so that a cut-off leaves each about as many neighbours.
        side = points ** (1 / 3)
        places = side * torch.rand(batch, points, 1, 3, device=device)
        positions = places.expand(-1, -1, sightings, -1).flatten(1, 2)
        owner = torch.arange(points, device=device)[None, :, None].expand(batch, -1, sightings)
        seen = Observations(positions, times, owner.flatten(1, 2), torch.ones_like(times) > 0)

        def attend(cutoff: float, x: Tensor = x, seen: Observations = seen) -> Tensor:
            pairs = find_neighbours(seen, seen, basis, cutoff=cutoff)
            found: Tensor = layer(x, x, pairs)
            return found

        calls = {
            f"plain ({backend})": lambda x=x, times=times: plain(x.flatten(2), times),
            "equivariant": lambda side=side, attend=attend: attend(2.0 * side),
            "equivariant, cut-off 1": lambda attend=attend: attend(1.0),
        }
        for name, call in calls.items():
            ms = 1e3 * _median_seconds(call, device, repeats=3 if quick else 10)
            row = {"kind": "cost", "layer": name, "points": points, "sightings": sightings}
            rows.append({**row, "tokens": number, "batch": batch, "dim": dim, "ms": round(ms, 3)})
    return rows


def _median_seconds(call: Any, device: torch.device, *, repeats: int) -> float:
    found = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call().square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


TITLES = {
    "mse": "error",
    "mse_turned": "error, test systems turned",
    "turn_error": "root mean square failure to turn",
    "distance": "mean distance",
    "steps": "steps",
}


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def _errors(rows: Sequence[Row], key: str, title: str) -> list[str]:
    sizes = sorted({row["size"] for row in rows})
    forms = {"turn_error": "{:.1e}", "steps": "{:.0f}"}

    def cell(model: str, size: int) -> str:
        found = [r[key] for r in rows if r["model"] == model and r["size"] == size]
        return spread(found, forms.get(key, "{:.4f}")) + (f" ({len(found)})" if found else "")

    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    body = [[model, *(cell(model, size) for size in sizes)] for model in models]
    return markdown_table([title, *(f"{size:,} systems (seeds)" for size in sizes)], body)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of Markdown."""
    lines: list[str] = []
    errors = [row for row in rows if row["kind"] == "error"]
    if errors:
        lines += [PROTOCOL.format(steps=_range(row["steps"] for row in errors if row["steps"])), ""]
    for flat, rate in sorted({(row["flat"], row["rate"]) for row in errors}):
        chosen = [row for row in errors if (row["flat"], row["rate"]) == (flat, rate)]
        lines += [f"{'Flat systems' if flat else 'Systems'}, learning rate {rate:g}:", ""]
        for key, title in TITLES.items():
            lines += [*_errors(chosen, key, title), ""]
    costs = [row for row in rows if row["kind"] == "cost"]
    if costs:
        names = list(dict.fromkeys(row["layer"] for row in costs))
        grids = list(dict.fromkeys((row["points"], row["sightings"]) for row in costs))
        by = {(row["layer"], row["points"], row["sightings"]): row["ms"] for row in costs}
        body = [[*map(str, g), *(f"{by[name, *g]:.1f}" for name in names)] for g in grids]
        lines += markdown_table(["points", "sightings", *(f"{n}, ms" for n in names)], body)
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON lines; finished trainings are not run again")
    add("--table", type=Path, nargs="+", help="print the table of these files, and do no more")
    add("--models", type=names_among(MODELS), default=list(MODELS))
    add("--sizes", default=",".join(map(str, SIZES)), help="training systems")
    add("--seeds", default="0,1,2")
    add("--minutes", type=float, default=math.inf, help="after which no training is started")
    add("--steps", type=int, default=3000)
    add("--seconds", type=float, default=math.inf, help="of one training at most")
    add("--rate", type=float, default=RATE, help="learning rate")
    add("--flat", action="store_true", help="systems that keep to one plane; a test turns them")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--cost", action="store_true", help="time the layer instead")
    add("--backend", default="auto", help="of the plain layer that is timed")
    add("--commit", help="to record, where git cannot tell")
    add("--quick", action="store_true", help="toy size, only to see it run")
    options = parser.parse_args(arguments)
    if options.table:
        texts = [path.read_text(encoding="utf-8") for path in options.table]
        print("\n".join(table([json.loads(x) for text in texts for x in text.splitlines()])))
        return 0
    if options.output is None:
        parser.error("--output is needed")
    device, deadline = torch.device(options.device), time.monotonic() + 60.0 * options.minutes

    def append(row: Row) -> None:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    done = set()
    if options.output.exists():
        rows = [json.loads(x) for x in options.output.read_text(encoding="utf-8").splitlines()]
        kept = [row for row in rows if row["kind"] == "error"]
        done = {(r["model"], r["size"], r["seed"], r["flat"], r["rate"]) for r in kept}
    meta = describe("nbody.py", arguments, device=device, commit=options.commit, packages=["e3nn"])
    append({"kind": "run", **meta})
    if options.cost:
        for row in cost_rows(device, options.backend, quick=options.quick):
            append(row)
        return 0

    sizes, seeds = ([int(x) for x in text.split(",")] for text in (options.sizes, options.seeds))
    numbers = (12, 12) if options.quick else (NUM_TEST, NUM_VALIDATION)
    sizes = [12] if options.quick else sizes
    steps = 2 if options.quick else options.steps
    frame = {"flat": options.flat}
    test, check = (
        make_systems(n, k, **frame).to(device) for n, k in zip(numbers, (90, 91), strict=True)
    )
    limits = {"steps": steps, "seconds": options.seconds, "rate": options.rate}
    for seed in seeds:
        train_all = make_systems(max(sizes), seed, **frame).to(device)
        for size, name in itertools.product(sizes, options.models):
            job = (name, size, seed, options.flat, options.rate)
            if job in done or time.monotonic() > deadline:
                continue
            model, row = train(name, train_all.take(slice(size)), check, seed, **limits)
            keys = ("model", "size", "seed", "flat", "rate")
            row |= {**score(model, test), "device": options.device}
            append({"kind": "error", **dict(zip(keys, job, strict=True)), **row})
            progress(json.dumps({**dict(zip(keys, job, strict=True)), **row}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
