"""What is measured: ordinary inputs to time, and inputs over the whole range to compare."""

from __future__ import annotations

import math
from typing import Any

import torch

from osciformer._types import Tensor
from osciformer.math.banks import frequency_bank
from osciformer.math.spectrum import init_omega, init_zeta
from osciformer.ops import oscillator_attention

#: Query modes with sinusoids, so with a number of modes J.
SINUSOIDAL = ("ridge", "ridge_causal", "anchored", "learned")
TOKENS = ("q", "k", "v")
TIMES = ("query_times", "key_times")
SPECTRA = ("key_omega", "key_zeta", "value_omega", "value_zeta")
# Parameters of the sinusoidal modes, by their names in `query_params`.
_PARAMS = {"mode_omega": "omega", "mode_cos": "cos", "mode_sin": "sin", "mode_constant": "constant"}

# The range in which the error is promised: gaps from 1e-9 to a window of 1.
OMEGA_RANGE = (1e-3, 200.0)
LARGEST_ZETA = 20.0
SMALLEST_GAP = 1e-9
WIDE_HEADS, WIDE_CHANNELS = 2, 6
WIDE_MODES = 4


def timing_inputs(
    length: int,
    *,
    batch: int,
    heads: int,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return normal tokens at uniform times in [0, 1], with the paper's initial spectra.

    Tokens and spectra require gradients, times do not. Times and spectra stay in float32 where
    `dtype` is shorter.

    Args:
        length: N, queries and keys at the same times.
        batch: B.
        heads: H.
        channels: C.
        dtype: Dtype of the tokens.
        device: Where the tensors live; they are drawn on the CPU.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = torch.promote_types(dtype, torch.float32)
    x = {
        name: torch.randn(batch, length, heads, channels, generator=generator).to(device, dtype)
        for name in TOKENS
    }
    for role in ("key", "value"):
        shape = (heads, channels)
        x[f"{role}_omega"] = init_omega(shape, 1e-2, 10.0, generator).to(device, exact)
        x[f"{role}_zeta"] = init_zeta(shape, 0.05, 0.4, generator).to(device, exact)
    for leaf in x.values():
        leaf.requires_grad_()
    times = torch.rand(batch, length, generator=generator, dtype=torch.float64).sort(dim=1).values
    x["query_times"] = x["key_times"] = times.to(device, exact)
    return x


def wide_inputs(query: str, *, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Return float64 inputs that span every range in which the error is promised.

    omega is log-uniform in [1e-3, 200] with both ends present; zeta is uniform in [0, 2] or [0, 20]
    with 0, 1 and 20 present; gaps are log-uniform from 1e-9 to the window. Gaps grow along
    the series, so that float32 can hold all of them. Velocities matter as much as positions.

    Args:
        query: Query mode; its parameters are part of the inputs.
        batch: B. Spectra share their gradient over the batch: in a single short series it may by
            chance cancel to far less than its terms, and so may the digits of what is left.
        length: N, at least 3.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, channels = WIDE_HEADS, WIDE_CHANNELS

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = {name: normal(batch, length, heads, channels) for name in TOKENS}
    for role in ("key", "value"):
        low, high = (math.log(edge) for edge in OMEGA_RANGE)
        position = uniform(heads * channels)
        position[:2] = torch.tensor([0.0, 1.0])
        zeta = uniform(heads * channels) * torch.tensor([2.0, LARGEST_ZETA]).repeat(
            heads * channels // 2
        )
        zeta[:3] = torch.tensor([0.0, 1.0, LARGEST_ZETA])
        # Which extreme frequency meets which damping differs between keys and values.
        order = torch.randperm(heads * channels, generator=generator)
        omega = torch.exp(low + (high - low) * position).reshape(heads, channels)
        x[f"{role}_omega"], x[f"{role}_zeta"] = omega, zeta[order].reshape(heads, channels)
        x[f"{role}_velocity"] = normal(batch, length, heads, channels) * omega
    exponents = uniform(batch, length - 1).sort(dim=1).values
    exponents[:, 0], exponents[:, -1] = 0.0, 1.0
    gaps = SMALLEST_GAP ** (1.0 - exponents)
    x["key_times"] = torch.nn.functional.pad(gaps.cumsum(1), (1, 0))
    x["query_times"] = x["key_times"].clone()
    if query in SINUSOIDAL:
        x["mode_omega"] = frequency_bank("log_spaced", WIDE_MODES).double()
    if query in ("anchored", "learned"):
        x["mode_cos"] = normal(heads, WIDE_MODES, channels)
        x["mode_sin"] = normal(heads, WIDE_MODES, channels)
        x["mode_constant"] = normal(heads, channels)
    if query == "learned":
        del x["q"]
    return x


def attention(x: dict[str, Tensor], *, query: str, backend: str, value: str = "average") -> Tensor:
    """Return `oscillator_attention` of inputs that are named as above."""
    x = dict(x)
    params = {name: x.pop(key) for key, name in _PARAMS.items() if key in x}
    arguments: dict[str, Any] = {
        **x,
        "q": x.get("q"),
        "query": query,
        "query_params": params or None,
        "value": value,
        "backend": backend,
    }
    out = oscillator_attention(**arguments)
    assert isinstance(out, torch.Tensor)
    return out
