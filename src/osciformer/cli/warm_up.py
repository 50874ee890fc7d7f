"""`osciformer warm-up`: compile the kernels for a GPU before the first training waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from osciformer.cli.errors import CommandError, Misuse
from osciformer.cli.fit import find_model
from osciformer.config import TASKS, estimator_defaults

if TYPE_CHECKING:
    import torch

    from osciformer.nn import OscillatorAttention

HEAD_SIZES = range(1, 129)
DTYPES = ("float32", "bfloat16", "float16")
#: Batch sizes and lengths that take all kernels: of pairs, of one span of tiles, of several spans.
SHAPES = ((2, 40), (128, 300), (2, 1200))

_RUN = Argument(help="Run folder or model file, for the kernels that it needs.")
_HEAD_SIZE = Option(help="Channels a head, 1 to 128. May be given several times.")
_DTYPE = Option(help="float32, bfloat16 or float16. May be given several times.")


class Layers(NamedTuple):
    """Attention layers and the precision that they run in."""

    name: str
    layers: Sequence[OscillatorAttention]
    dtype: str


def warm_up(
    run: Annotated[Path | None, _RUN] = None,
    *,
    head_size: Annotated[list[int] | None, _HEAD_SIZE] = None,
    dtype: Annotated[list[str] | None, _DTYPE] = None,
) -> None:
    """Compile the attention kernels for this GPU, so that no training waits for them.

    Without arguments those of the default models, in float32 and bfloat16. Kernels stay on disk,
    and compiling again what is there takes a second. On a machine without a CUDA GPU there is
    nothing to compile.
    """
    for one in head_size or ():
        if one not in HEAD_SIZES:
            raise Misuse(f"--head-size must be from 1 to {HEAD_SIZES[-1]}; got {one}")
    for given in dtype or ():
        if given not in DTYPES:
            raise Misuse(f"--dtype must be one of {', '.join(DTYPES)}; got {given}")
    if run is not None and head_size:
        raise Misuse("--head-size does not apply to a model, which has its own; leave it out")
    path = None if run is None else find_model(run)
    import torch

    if not torch.cuda.is_available():
        raise CommandError(
            "torch sees no CUDA GPU here, and only there are kernels to compile; on a CPU the first"
            " step is as fast as the others"
        )
    from osciformer.ops.attention import triton

    trouble = triton.missing(torch.device("cuda"))
    if trouble is not None:
        raise CommandError(f"there are no kernels to compile: {trouble}")
    groups = default_layers(head_size, dtype) if path is None else layers_of(path, dtype)
    started = time.perf_counter()
    compiled = prepare_kernels(groups, torch.device("cuda"))
    seconds = time.perf_counter() - started
    folder, size = cache_size()
    told = f"{compiled} kernels were compiled" if compiled else "all kernels were there"
    typer.echo(f"{told}, {seconds:.0f} s; {folder} has {size / 2**20:.0f} MiB")


def default_layers(head_sizes: Sequence[int] | None, dtypes: Sequence[str] | None) -> list[Layers]:
    """Return layers as the default models have them, or with other head sizes."""
    from osciformer.nn import OscillatorAttention

    if not head_sizes:
        defaults = [estimator_defaults(task) for task in TASKS]
        head_sizes = sorted({one["dim"] // one["num_heads"] for one in defaults} & {*HEAD_SIZES})
    return [
        Layers(
            f"head size {size}, {dtype}",
            # Those of classifiers, and of forecasts and events.
            [OscillatorAttention(2 * size, 2, value=value) for value in ("point", "average")],
            dtype,
        )
        for size in head_sizes
        for dtype in dtypes or DTYPES[:2]
    ]


def layers_of(path: Path, dtypes: Sequence[str] | None) -> list[Layers]:
    """Return the attention layers of a saved model, in the precision that it was trained in."""
    from osciformer.estimators import load_estimator
    from osciformer.nn import OscillatorAttention

    estimator = load_estimator(path)
    model = getattr(estimator, "model_", None)
    layers = [] if model is None else [x for x in model.modules() if type(x) is OscillatorAttention]
    if not layers:
        raise CommandError(f"{path} has no oscillator attention, so that it needs no kernels")
    precision = estimator.settings()["precision"]
    trained = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}[precision]
    return [Layers(f"{path.name}, {one}", layers, one) for one in dtypes or [trained]]


def prepare_kernels(groups: Sequence[Layers], device: torch.device) -> int:
    """Run each layer forward and backward, and return how many kernels that compiled."""
    from rich.console import Console
    from rich.progress import Progress

    from osciformer.ops.attention.triton import CHANNELS, compilation

    before, console = count_kernels(), Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        for group in groups:
            # Other head sizes have kernels of short series alone.
            calls = [
                (layer, *shape)
                for layer in group.layers
                for shape in (SHAPES if layer.inner_dim in CHANNELS else SHAPES[:1])
            ]
            task = bar.add_task(group.name, total=len(calls))
            for layer, batch, length in calls:
                # Kernels are compiled together; the bar moves by each of them.
                begun = bar.tasks[task].completed

                def watch(done: int, count: int, task: Any = task, begun: float = begun) -> None:
                    bar.update(task, completed=begun + done / (count + 1))

                with compilation.watched(watch):
                    run_layer(layer, batch, length, group.dtype, device)
                bar.update(task, completed=begun + 1)
    return count_kernels() - before


def run_layer(
    layer: OscillatorAttention, batch: int, length: int, dtype: str, device: torch.device
) -> None:
    """Run a copy of a layer forward and backward, as a training does."""
    import copy

    import torch

    layer = copy.deepcopy(layer).to(device).train()
    number = getattr(torch, dtype)
    x = torch.randn(batch, length, layer.dim, device=device, requires_grad=True)
    times = torch.rand(batch, length, device=device).sort(dim=1).values
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    with torch.autocast(device.type, number, enabled=number != torch.float32):
        out = layer(x, times, mask)
    out.float().sum().backward()


def cache_size() -> tuple[Path, int]:
    """Return where compiled kernels lie, and their size in bytes."""
    from osciformer.ops.attention.triton import compilation

    folder = compilation.cache_folder()
    return folder, sum(path.stat().st_size for path in folder.glob("*/*") if path.is_file())


def count_kernels() -> int:
    """Return how many compiled kernels there are."""
    return len(list(cache_size()[0].glob("*/*.cubin")))
