"""What acts on each observation by itself: linear maps, norms, gates."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.equivariant.irreps import Kinds


class ChannelLinear(nn.Module):
    """A linear map of the channels, one for each kind, and a bias on scalars alone.

    Args:
        kinds: Kinds of a channel.
        inputs: Channels before.
        outputs: Channels after.
        bias: Whether scalars have a bias.
        zero: Start from the zero map.
    """

    of_component: Tensor

    def __init__(
        self, kinds: Kinds, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False
    ) -> None:
        super().__init__()
        scale = 0.0 if zero else inputs**-0.5
        self.weight = nn.Parameter(scale * torch.randn(len(kinds), inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.register_buffer("of_component", kinds.of_component, persistent=False)

    def forward(self, x: Float[Tensor, "*B U S"]) -> Float[Tensor, "*B V S"]:
        """Return the mixed channels."""
        rows = x.flatten(0, -3).permute(2, 0, 1)  # one matrix product a component
        mixed = (rows @ self.weight.index_select(0, self.of_component)).permute(1, 2, 0)
        if self.bias is not None:
            scalar = mixed[..., :1] + self.bias[:, None]
            mixed = torch.cat([scalar, mixed[..., 1:]], dim=-1)
        return mixed.unflatten(0, x.shape[:-2])


class ChannelNorm(nn.Module):
    """Divides each kind by its root mean square over channels and components, then scales it."""

    of_component: Tensor
    pool: Tensor

    def __init__(self, kinds: Kinds, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, len(kinds)))
        self.register_buffer("of_component", kinds.of_component, persistent=False)
        self.register_buffer("pool", mean_of_kind(kinds), persistent=False)

    def forward(self, x: Float[Tensor, "*B U S"]) -> Float[Tensor, "*B U S"]:
        """Return features of unit size; zeros stay zeros."""
        size = (x.square().mean(dim=-2, keepdim=True) @ self.pool + 1e-5).rsqrt()
        return x * (self.weight * size).index_select(-1, self.of_component)


class GatedFeedForward(nn.Module):
    r"""Two linear maps, and between them gates that see invariants alone.

    The invariants of a hidden channel are its scalar and the mean square of each other kind. A
    linear map and SiLU make the scalars, a sigmoid the factors of the other kinds.

    Args:
        kinds: Kinds of a channel.
        channels: Channels before and after.
        hidden: Channels in between.
    """

    of_component: Tensor
    pool: Tensor

    def __init__(self, kinds: Kinds, channels: int, hidden: int) -> None:
        super().__init__()
        self.expand = ChannelLinear(kinds, channels, hidden)
        self.gates = nn.Linear(hidden * len(kinds), hidden * len(kinds))
        self.contract = ChannelLinear(kinds, hidden, channels)
        self.register_buffer("of_component", kinds.of_component, persistent=False)
        self.register_buffer("pool", mean_of_kind(kinds), persistent=False)

    def forward(self, x: Float[Tensor, "*B U S"]) -> Float[Tensor, "*B U S"]:
        """Return the new features."""
        x = self.expand(x)
        invariants = torch.cat([x[..., :1], x.square() @ self.pool[:, 1:]], dim=-1)
        gates = self.gates(invariants.flatten(-2)).unflatten(-1, invariants.shape[-2:])
        scalars = nn.functional.silu(gates[..., :1])
        others = x[..., 1:] * gates.sigmoid().index_select(-1, self.of_component[1:])
        return self.contract(torch.cat([scalars, others], dim=-1))


def mean_of_kind(kinds: Kinds) -> Float[Tensor, "S K"]:
    """Return the matrix that takes components to the mean of each kind."""
    member = nn.functional.one_hot(kinds.of_component, len(kinds)).to(torch.get_default_dtype())
    return member / member.sum(dim=0)
