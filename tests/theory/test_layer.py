"""The layer with several oscillators a channel is the architecture of the theorem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from osciformer.nn import OscillatorAttention
from osciformer.theory import ApproximateAttention, approximate_attention
from osciformer.theory.realisation import Path

WIDTH = 5  # channels, and tokens


def query(t: Tensor) -> Tensor:
    rates = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)
    return torch.cos(rates * t[:, None]) - 0.3


def key(index: int) -> Path:
    def path(t: Tensor) -> Tensor:
        phase = torch.arange(WIDTH, dtype=torch.float64) + index
        return torch.exp(-0.3 * t[:, None]) * torch.sin((1 + 0.7 * index) * t[:, None] + phase)

    return path


def layer_of(found: ApproximateAttention) -> OscillatorAttention:
    """Return a layer that one-hot tokens start on the states of a bank."""
    count, grid = found.bank.num_modes, math.pi / float(found.times[-1])
    layer = OscillatorAttention(
        *(WIDTH, 1),
        oscillators_per_channel=count,
        query="learned",
        num_modes=count,
        bank="harmonics",
        omega_range=(grid, count * grid),
        undamped=True,
        equilibrium=True,  # the zero mode
        bias=False,
    ).double()
    with torch.no_grad():
        for role, states in (("key", found.keys), ("value", found.values)):
            assert states is not None
            getattr(layer, f"{role}_spectrum").raw_omega.copy_(
                found.bank.omega[1:].log().repeat_interleave(WIDTH)
            )
            rest = torch.zeros(count, WIDTH, WIDTH, dtype=torch.float64)  # modes, channels, tokens
            rest[0] = states[:, 0, 0].T
            start = states[:, 1:, 0].permute(1, 2, 0) + rest
            speed = states[:, 1:, 1].permute(1, 2, 0).flatten(0, 1)
            getattr(layer, f"{role}_equilibrium").weight.copy_(rest.flatten(0, 1))
            getattr(layer, f"{role}_projection").weight.copy_(start.flatten(0, 1))
            # Velocities are linear in the start, and so in the token.
            velocity = speed @ torch.linalg.pinv(start.flatten(0, 1))
            getattr(layer, f"{role}_velocity").copy_(velocity[None])
        layer.output_projection.weight.copy_(torch.eye(WIDTH))
        layer.query_constant.copy_(found.query[None, 0, 0])
        layer.query_cos.copy_(found.query[None, 1:, 0])
        layer.query_sin.copy_(found.query[None, 1:, 1] / found.bank.omega[1:, None])
    return layer


@torch.no_grad()
def test_a_layer_reproduces_any_attention_to_a_proved_tolerance() -> None:
    times = torch.tensor([0.0, 0.4, 0.7, 1.9, 2.2], dtype=torch.float64)
    keys, values = [key(i) for i in range(WIDTH)], [key(i + 2) for i in range(WIDTH)]
    found = approximate_attention(query, keys, times, 1e-3, values=values)
    layer = layer_of(found)
    tokens = torch.eye(WIDTH, dtype=torch.float64)[None]
    out, inside = layer(tokens, times[None], return_internals=True)
    rows, weights = found.attend()
    torch.testing.assert_close(inside.weights[0, 0], weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(out[0], rows, rtol=0, atol=1e-9)
    assert found.certificate.weights.proved <= 1e-3
