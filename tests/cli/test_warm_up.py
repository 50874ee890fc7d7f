"""`osciformer warm-up`, but for the compiler, which wants a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from osciformer.cli import warm_up
from osciformer.ops.attention import triton
from osciformer.ops.attention.inputs import AttentionInputs, Oscillators
from osciformer.ops.attention.query import ConstantPath
from osciformer.ops.attention.triton import compilation
from osciformer.ops.attention.triton.attend import is_paired

Call = Callable[..., Any]


def test_a_machine_without_gpu_is_told(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = cli("warm-up")
    assert outcome.code == 1
    assert "no CUDA GPU" in outcome.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--head-size=129"], "--head-size must be from 1 to 128; got 129"),
        (["--dtype=float64"], "--dtype must be one of float32, bfloat16, float16; got float64"),
        (["run", "--head-size=32"], "--head-size does not apply to a model"),
    ],
    ids=["head size", "dtype", "both"],
)
def test_wrong_calls(cli: Call, flags: list[str], words: str) -> None:
    outcome = cli("warm-up", *flags)
    assert outcome.code == 2
    assert words in outcome.err


def test_default_layers_are_those_of_default_models() -> None:
    groups = warm_up.default_layers(None, None)
    assert {group.dtype for group in groups} == {"float32", "bfloat16"}
    assert {layer.value for group in groups for layer in group.layers} == {"point", "average"}
    (asked,) = warm_up.default_layers([64], ["float16"])
    assert {layer.head_dim for layer in asked.layers} == {64}


def test_kernels_are_counted_and_found(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def compiling(layer: Any, batch: int, length: int, dtype: str, device: torch.device) -> None:
        lengths.append(length)
        folder = tmp_path / f"{layer.value}-{length}-{dtype}"
        if not folder.exists():
            folder.mkdir()
            (folder / "kernel.cubin").write_bytes(bytes(2**20))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warm_up, "run_layer", compiling)
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    first, second = (cli("warm-up", "--head-size=32", "--dtype=float32") for _ in range(2))
    assert first.code == second.code == 0, first.err
    assert "6 kernels were compiled" in first.out
    assert f"{tmp_path} has 6 MiB" in first.out
    assert "all kernels were there" in second.out
    assert sorted({*lengths}) == [length for _, length in warm_up.SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", triton.CHANNELS)
def test_each_shape_is_for_kernels_of_its_own(channels: int, dtype: torch.dtype) -> None:
    found = []
    for size in warm_up.SHAPES:
        tokens = torch.empty(*size, 1, channels, dtype=dtype, device="meta")
        times, spectrum = torch.empty(size), torch.empty(1, channels)
        side = Oscillators(tokens, spectrum, spectrum)
        found.append(is_paired(AttentionInputs(ConstantPath(tokens), times, times, side, side)))
    # The tiles of the first shape are those of the second.
    assert found[1:] == [False, False]
    assert found[0] or channels == max(triton.CHANNELS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_runs_forward_and_backward(dtype: str) -> None:
    (group,) = warm_up.default_layers([16], [dtype])
    before = [x.detach().clone() for x in group.layers[0].parameters()]
    warm_up.run_layer(group.layers[0], 2, 5, dtype, torch.device("cpu"))
    assert all(map(torch.equal, before, group.layers[0].parameters()))
    assert all(x.grad is None for x in group.layers[0].parameters())


def test_layers_of_a_model_run_in_the_precision_of_its_training(runs: Path) -> None:
    path = next(iter(sorted(runs.glob("*/model.safetensors"))))
    (group,) = warm_up.layers_of(path, None)
    assert group.dtype == "float32"
    assert len(group.layers) >= 1
    assert [one.dtype for one in warm_up.layers_of(path, ["bfloat16"])] == ["bfloat16"]
