"""The contract of the backends: each module has `attend(inputs) -> AttentionResult`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import QueryPath


@dataclass(frozen=True)
class Oscillators:
    """Keys or values: each token starts one damped oscillator per head and channel."""

    start: Float[Tensor, "B N H C"]  # positions at the tokens' own times
    omega: Float[Tensor, "H C"]  # natural frequencies
    zeta: Float[Tensor, "H C"]  # damping ratios
    velocity: Float[Tensor, "B N H C"] | None = None  # initial velocities; None is 0
    equilibrium: Float[Tensor, "B N H C"] | None = None  # rest positions; None is 0

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> Oscillators:
        """Return the oscillators with `function` applied to every ``[B, N, H, C]`` tensor."""
        velocity = None if self.velocity is None else function(self.velocity)
        rest = None if self.equilibrium is None else function(self.equilibrium)
        return replace(self, start=function(self.start), velocity=velocity, equilibrium=rest)


@dataclass(frozen=True)
class AttentionInputs:
    """One causal half of the operator: rows see the keys at or before their own time.

    Nothing is validated. Padding must hold finite numbers, with times from `clean_times`.
    """

    path: QueryPath  # the query as a function of time, from `resolve_query`
    query_times: Float[Tensor, "B M"]  # of the rows, sorted within a series
    key_times: Float[Tensor, "B N"]  # of the keys, sorted within a series
    keys: Oscillators
    values: Oscillators
    value: str = "average"  # over the gap; or `point`, the value at the query time
    drive: Drive | None = None  # sinusoidal forces on keys and values
    mask: Bool[Tensor, "B N"] | None = None  # which keys are present; None is all
    scale: float = 1.0  # factor of the logits
    strict: bool = False  # whether a key must lie strictly before the row to be seen
    return_weights: bool = False

    @property
    def present(self) -> Bool[Tensor, "B N"]:
        """Which keys are present."""
        if self.mask is not None:
            return self.mask
        return torch.ones_like(self.key_times, dtype=torch.bool)

    def mirrored(self, path: QueryPath) -> AttentionInputs:
        """Return the other half: rows and keys in reverse order on the reversed time axis.

        Keys at a row's own time belong to the first half, so this one is strict. `path` is the
        query of the reversed rows, from `resolve_reversed`.
        """
        rows = -self.query_times.flip(1)
        cols = rows if self.query_times is self.key_times else -self.key_times.flip(1)
        keys, values = (x.map_tokens(lambda x: x.flip(1)) for x in (self.keys, self.values))
        mask = None if self.mask is None else self.mask.flip(1)
        tokens = (path, rows, cols, keys, values, self.value, self.drive, mask, self.scale)
        return AttentionInputs(*tokens, strict=True, return_weights=self.return_weights)


class AttentionResult(NamedTuple):
    """What a backend returns; a row that sees no key has output 0, weights 0 and logsumexp -inf."""

    out: Float[Tensor, "B M H C"]
    lse: Float[Tensor, "B H M"]  # logsumexp of the scaled logits
    weights: Float[Tensor, "B H M N"] | None = None  # None if not asked for
