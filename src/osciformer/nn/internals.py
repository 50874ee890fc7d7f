"""What happened inside a layer, as data: weights, spectra and trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.math.driven import driven_response
from osciformer.math.oscillator import propagator
from osciformer.ops.attention.drive import Drive


@dataclass(frozen=True)
class Oscillators:
    """Keys or values as they start: one damped oscillator per token, head and channel.

    Attributes:
        start: Position at the token's own time.
        velocity: Velocity there; None is zero.
        equilibrium: The rest position it swings about; None is zero.
    """

    start: Float[Tensor, "B N H C"]
    velocity: Float[Tensor, "B N H C"] | None = None
    equilibrium: Float[Tensor, "B N H C"] | None = None


@dataclass(frozen=True)
class AttentionInternals:
    """The inside of one call of `OscillatorAttention`.

    Attributes:
        weights: Attention weights; a row sums to 1, or is 0 where it sees no key.
        times: Key times, padding replaced.
        query_times: Times of the rows.
        mask: True where a key is present; None if all are.
        keys: The keys as they start.
        values: The values as they start.
        key_omega: Natural frequencies of the keys; `key_zeta` their damping ratios.
        key_zeta: Damping ratios of the keys.
        value_omega: Natural frequencies of the values.
        value_zeta: Damping ratios of the values.
        drive: The drive, if the layer has one.
        direction: `causal` or `bidirectional`.
    """

    weights: Float[Tensor, "B H M N"]
    times: Float[Tensor, "B N"]
    query_times: Float[Tensor, "B M"]
    mask: Bool[Tensor, "B N"] | None
    keys: Oscillators
    values: Oscillators
    key_omega: Float[Tensor, "H C"]
    key_zeta: Float[Tensor, "H C"]
    value_omega: Float[Tensor, "H C"]
    value_zeta: Float[Tensor, "H C"]
    drive: Drive | None = None
    direction: str = "causal"

    def key_trajectories(self, grid: Float[Tensor, "*B T"]) -> Float[Tensor, "B T N H C"]:
        """Return k_i(t) on a grid of times `[T]` or `[B, T]`; NaN where there is no trajectory.

        A causal key does not exist before its own time, a padded key nowhere. In a bidirectional
        layer it also runs backwards from there.
        """
        return self._trajectories(grid, self.keys, self.key_omega, self.key_zeta, "key")

    def value_trajectories(self, grid: Float[Tensor, "*B T"]) -> Float[Tensor, "B T N H C"]:
        """Return v_i(t) on a grid of times, as `key_trajectories` does for keys."""
        return self._trajectories(grid, self.values, self.value_omega, self.value_zeta, "value")

    def _trajectories(
        self,
        grid: Tensor,
        start: Oscillators,
        omega: Tensor,
        zeta: Tensor,
        role: Literal["key", "value"],
    ) -> Tensor:
        grid = torch.atleast_2d(grid).to(self.times.dtype)
        elapsed = grid[:, :, None] - self.times[:, None, :]  # [B, T, N]
        alive = torch.ones_like(elapsed, dtype=torch.bool)
        if self.direction == "causal":
            alive = elapsed >= 0
        if self.mask is not None:
            alive = alive & self.mask[:, None, :]
        s = torch.where(alive, elapsed.abs(), 0.0)[..., None, None]  # [B, T, N, 1, 1]
        g11, g12, _, _ = propagator(s, omega.to(s.dtype), zeta.to(s.dtype))
        position = start.start[:, None]
        rest = 0.0 if start.equilibrium is None else start.equilibrium[:, None]
        out = rest + g11 * (position - rest)
        if start.velocity is not None:
            out = out + g12 * start.velocity[:, None]
        gains = None if self.drive is None else self.drive.gains(role)
        if gains is not None:
            drive_omega, cos, sin = gains
            # [B, T, N, H, Md, C]
            response, _ = driven_response(
                s[..., None], drive_omega[..., None], omega[:, None], zeta[:, None]
            )
            pushed = (torch.complex(cos, -sin) * response).real.sum(dim=-2)
            out = out + pushed.to(out.dtype) * position
        return torch.where(alive[..., None, None], out, torch.nan)


# So that torch.export can return them.
for _cls in (Oscillators, AttentionInternals):
    torch.export.register_dataclass(_cls, serialized_type_name=f"osciformer.{_cls.__name__}")
