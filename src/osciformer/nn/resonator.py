"""Resonators as a layer: tokens drive oscillators, whose states are read, mixed and gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osciformer._types import Float, Mask, QueryTimes, Reads, Tensor, Times, Tokens
from osciformer.config import DEFAULT_OMEGA_RANGE, Direction
from osciformer.nn.clock import Clock
from osciformer.nn.parameters import Spectrum
from osciformer.nn.timeline import check_time_values, check_tokens, last_observation, take_tokens
from osciformer.ops import Response, oscillator_response
from osciformer.ops._checks import DIRECTIONS, DeferredChecks, check_choice
from osciformer.ops.padding import clean_times

# Keeps the slope of the amplitude bounded where oscillators are at rest at 0.
_LEAST_ENERGY = 1e-6


@dataclass(frozen=True)
class ResonatorInternals:
    """The inside of one call of `ResonatorLayer`; R is 1, or 2 with the time-reversed response."""

    position: Float[Tensor, "B M R D"]  #: Positions of the oscillators at the rows.
    velocity: Float[Tensor, "B M R D"]  #: Velocities over omega, so that both compare.
    times: Times  #: Times of the tokens, padding replaced.
    query_times: QueryTimes  #: Times of the rows.
    mask: Mask | None  #: True where a token is present; None if all are.
    omega: Float[Tensor, " D"]  #: Natural frequencies.
    zeta: Float[Tensor, " D"]  #: Damping ratios.


# So that torch.export can return them.
torch.export.register_dataclass(
    ResonatorInternals, serialized_type_name="osciformer.ResonatorInternals"
)


class ResonatorLayer(nn.Module):
    r"""A bank of damped oscillators that the tokens drive, one per channel, in linear time.

    $$\ddot x_c + 2\zeta_c\omega_c \dot x_c + \omega_c^2 x_c = \omega_c^2 u_c(t), \qquad
    y_j = \mathrm{silu}(G X_j) \cdot W\,(x, \dot x/\omega, a)(t_j), \qquad
    a = \sqrt{x^2 + \dot x^2/\omega^2},$$

    with the drive $u = W_u X$ held from each token to the next one and a learned spectrum. Where
    oscillator attention compares pairs of tokens, a resonator sums up all that came before in a
    state of two numbers a channel: which frequencies there are (the amplitude a), and in which
    phase. The response is exact at irregular times, costs O(N) and streams in constant memory.

    A row sees earlier tokens through the oscillators and its own one through the gate; before the
    first token all are at rest in a constant past. With `direction="bidirectional"` the drive is
    linear between the tokens, and a second response runs backwards in time.

    Rows at other times are read as those of `OscillatorAttention` are: `query_x`, or else the token
    of the last observation at or before the time, is what opens the gate. Before the first
    observation a causal layer has no response.

    **Selective.** With `selective` the oscillators live on a clock that the tokens drive (`Clock`):
    frequencies and damping depend on the data, gap by gap, as in selective state-space models. They
    start from a learned state instead of rest, so that their phases count what went by: whether a
    stream of bits has an odd number of ones, for example.

    Args:
        dim: Width D of the tokens, and number of oscillators.
        direction: `causal` or `bidirectional`.
        omega_range: Ends of the initial frequencies, in radians per unit of time.
        zeta_range: Ends of the initial damping ratios.
        selective: Let the tokens drive the clock of the oscillators.
        undamped: Keep every zeta at exactly zero.
        dropout: Dropout of the result.
        bias: Biases in the projections.

    Example:
        >>> layer = ResonatorLayer(16)
        >>> layer(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        *,
        direction: Direction = "causal",
        omega_range: tuple[float, float] = DEFAULT_OMEGA_RANGE,
        zeta_range: tuple[float, float] = (0.05, 0.4),
        selective: bool = False,
        undamped: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_choice("direction", direction, DIRECTIONS)
        self.dim, self.direction, self.zeta_range = dim, direction, zeta_range
        ranges: Any = {"omega_range": omega_range, "zeta_range": zeta_range}
        self.spectrum = Spectrum(dim, 1, **ranges, undamped=undamped)
        self.drive_projection = nn.Linear(dim, dim, bias)
        self.gate_projection = nn.Linear(dim, dim, bias)
        width = 3 * dim if direction == "causal" else 6 * dim
        self.output_projection = nn.Linear(width, dim, bias)
        self.dropout = nn.Dropout(dropout)
        self.clock = Clock(dim) if selective else None
        #: Positions, and velocities over omega, at the first token.
        self.start = nn.Parameter(0.5 * torch.randn(2, dim)) if selective else None

    def reset_spectra(
        self, omega_range: tuple[float, float], *, generator: torch.Generator | None = None
    ) -> None:
        """Draw the spectrum again from `omega_range`."""
        self.spectrum.reset(omega_range, self.zeta_range, generator=generator)

    def forward(
        self,
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        query_times: QueryTimes | None = None,
        *,
        query_x: Reads | None = None,
        return_internals: bool = False,
        validate: bool = True,
    ) -> Any:
        """Return the gated response, one row per token or per query time.

        Arguments are those of `OscillatorAttention.forward`.

        Returns:
            The rows `[B, N, D]` or `[B, M, D]`, or `(rows, internals)`.
        """
        if validate:
            check_tokens(x, times, mask, query_times, query_x, name="x", dim=self.dim)
            checks = DeferredChecks()
            check_time_values(times, mask, query_times, checks)
            checks.finish()
            times = clean_times(times, mask)
            if mask is not None:
                x = torch.where(mask[..., None], x, 0.0)
        position, velocity = self._respond(x, times, mask, query_times)
        tokens, is_row = x, mask
        if query_times is not None:
            backfill = self.direction == "bidirectional"
            held = last_observation(times, query_times, mask, backfill=backfill)
            tokens = take_tokens(x, held) if query_x is None else query_x
            # The constant past is that of the first observation, which is not known before it.
            has_past = (held >= 0)[..., None, None]
            position, velocity = (torch.where(has_past, z, 0.0) for z in (position, velocity))
            is_row = None
        out = self.project_output(position, velocity, tokens)
        if is_row is not None:
            out = torch.where(is_row[..., None], out, 0.0)
        if not return_internals:
            return out
        asked = times if query_times is None else query_times
        spectrum = self.spectrum.omega[:, 0], self.spectrum.zeta[:, 0]
        return out, ResonatorInternals(position, velocity, times, asked, mask, *spectrum)

    def project_drive(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return what drives the oscillators, at least float32."""
        drive: Tensor = self.drive_projection(x)
        return drive.to(torch.promote_types(drive.dtype, torch.float32))

    def project_output(
        self,
        position: Float[Tensor, "B M R D"],
        velocity: Float[Tensor, "B M R D"],
        tokens: Float[Tensor, "B M D"],
    ) -> Float[Tensor, "B M D"]:
        """Return the layer's rows from positions, velocities over omega, and the rows' tokens."""
        weight = self.output_projection.weight
        amplitude = (position.square() + velocity.square() + _LEAST_ENERGY).sqrt()
        read = torch.cat((position, velocity, amplitude), dim=-1).flatten(2)
        if not torch.is_autocast_enabled(weight.device.type):
            read = read.to(weight.dtype)
        gate = nn.functional.silu(self.gate_projection(tokens))
        return self.dropout(gate * self.output_projection(read))

    def initial(self) -> Response | None:
        """Return the learned state at the first token `[D, 1]`; None is that of a constant past."""
        if self.start is None:
            return None
        position, velocity = self.start[..., None].double()
        return Response(position, velocity * self.spectrum.omega)

    def _respond(
        self, x: Tensor, times: Tensor, mask: Tensor | None, query_times: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return positions and velocities over omega, `[B, M, R, D]` of R directions."""
        drive = self.project_drive(x)
        if self.clock is not None:
            times, query_times = self.clock(x, times, mask, query_times)
        options: dict[str, Any] = {"drive": "hold", "mask": mask, "query_times": query_times}
        if self.direction == "bidirectional":
            # Both directions are one batch: the second half of it runs backwards.
            options["drive"] = "linear"
            drive = torch.cat((drive, drive.flip(1)))
            times = torch.cat((times, -times.flip(1)))
            options["mask"] = None if mask is None else torch.cat((mask, mask.flip(1)))
            if query_times is not None:
                options["query_times"] = torch.cat((query_times, -query_times))
        start = self.initial()
        if start is not None:
            options["initial"] = Response(*(z.expand(len(drive), -1, -1) for z in start))
        found = oscillator_response(
            drive, times, self.spectrum.omega, self.spectrum.zeta, **options
        )
        if self.direction == "causal":
            position, velocity = (z.movedim(3, 2) for z in found)
        else:
            both = []
            for z in found:
                ahead, back = z[..., 0].chunk(2)
                back = back.flip(1) if query_times is None else back
                both.append(torch.stack((ahead, back), dim=2))
            position, velocity = both
        return position, velocity / self.spectrum.omega[:, 0]

    def extra_repr(self) -> str:
        """Show the choices that no submodule shows."""
        selective = ", selective=True" if self.clock is not None else ""
        return f"dim={self.dim}, direction={self.direction}{selective}"
