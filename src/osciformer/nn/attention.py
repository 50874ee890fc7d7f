"""Oscillator attention as a layer: projections, spectra, drives. The mathematics is in `ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.config import AttentionConfig
from osciformer.math.driven import driven_response
from osciformer.math.oscillator import propagator
from osciformer.nn.parameters import FrequencyBank, Spectrum
from osciformer.nn.timeline import (
    check_reads,
    check_time_values,
    check_tokens,
    last_observation,
    take_tokens,
)
from osciformer.ops._checks import DeferredChecks, check_spectra
from osciformer.ops.attention import inputs
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import resolve_query, resolve_reversed
from osciformer.ops.oscillator_attention import attend_unchecked
from osciformer.ops.padding import clean_times

# Modes whose path goes through the observations, so that a read needs them beside its own token.
_PATH_MODES = ("linear", "ridge", "ridge_causal")
_FIT_MODES = ("ridge", "ridge_causal")
_DRIVES = ("key_cos", "key_sin", "value_cos", "value_sin")


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
class KeyValues:
    """Keys and values of a set of tokens, ready to oscillate."""

    keys: Oscillators
    values: Oscillators


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
        return self._trajectories(grid, "key")

    def value_trajectories(self, grid: Float[Tensor, "*B T"]) -> Float[Tensor, "B T N H C"]:
        """Return v_i(t) on a grid of times, as `key_trajectories` does for keys."""
        return self._trajectories(grid, "value")

    def _trajectories(self, grid: Tensor, role: Literal["key", "value"]) -> Tensor:
        """Return the trajectories of keys or of values."""
        start: Oscillators = getattr(self, f"{role}s")
        omega, zeta = getattr(self, f"{role}_omega"), getattr(self, f"{role}_zeta")
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


class _Rows(NamedTuple):
    """Query tokens, their times, and which of them take part in a fitted path."""

    x: Float[Tensor, "B M D"]
    times: Float[Tensor, "B M"]
    mask: Bool[Tensor, "B M"] | None = None


class OscillatorAttention(nn.Module):
    r"""Multi-head attention whose keys and values are damped oscillators started by each token.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \ddot k_i + 2\zeta\omega \dot k_i + \omega^2 k_i = 0, \quad k_i(t_i) = K_i,\;
    \dot k_i(t_i) = U^k K_i,$$

    a softmax of $\alpha / \sqrt C$ over the tokens with $t_i \le t_j$, and values that oscillate in
    the same way and are averaged over $[t_i, t_j]$. Each head and channel has its own learned omega
    and zeta, for keys and for values.

    **Reading at other times.** With `query_times` the rows of the result are those times instead
    of the tokens. The query token of a read is `query_x`, or if that is not given the token of
    the last observation at or before the time (zero-order hold). Before the first observation a
    causal row sees nothing and the attention is zero, whatever its query; a bidirectional row
    takes the first observation's token. In `ridge` and `ridge_causal` the path is fitted to the
    observations alone, so a read never changes another. In `linear`, a known limitation, a read is
    a knot of the path and bends it for later reads of the same call, so these depend on which
    times are read together; read one time per call where that matters. Only reads after the last
    observation with held tokens (no `query_x`) are independent of each other.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H; 8 if neither it nor a preset is given.
        preset: `default` or `paper`; settings given explicitly win, and None keeps the preset's.
        query: What row j asks for: `hold, linear, ridge, ridge_causal, anchored` or `learned`.
            Default `hold`. This and all that follow are the fields of `AttentionConfig`.
        value: `average` over the gap (default) or `point` value at its end.
        direction: `causal` (default), or `bidirectional` with time-reversed oscillators for later
            tokens.
        num_modes: Frequencies J of the query bank (not for `hold` and `linear`). Default 8.
        bank: Kind of the query and drive bank, see `frequency_bank`; `data` is set by a model's
            `fit_time_scale`. Default `log_spaced`. The bank is fixed, not learned.
        omega_range: Ends of the initial frequencies and of the bank, in radians per unit of time.
            The default (0.1, 200) is meant for times of about unit span; `frequency_range(times)`
            gives one for any other data.
        zeta_range: Ends of the initial damping ratios. Default (0.05, 0.4).
        undamped: Keep every zeta at exactly zero. Default False.
        velocity: Learn the initial velocities $U^k K_i$, $U^v V_i$ (the maps start at zero).
            Default True.
        drive_modes: Number of sinusoids that force keys and values (their gains start at zero).
            Default 0.
        equilibrium: Learn rest positions $c_i = W_c X_i$ (the map starts at zero). Default False.
        ridge: Ridge of the query fits. Default 1e-4.
        dropout: Dropout after the output projection. Default 0.
        bias: Biases in the projections. Default True.
        scale: Factor of the logits; None is $1/\sqrt C$.
        backend: Backend of `oscillator_attention`. Default `auto`.

    Example:
        >>> layer = OscillatorAttention(16, 4)
        >>> times = torch.rand(2, 5).sort().values
        >>> layer(torch.randn(2, 5, 16), times).shape
        torch.Size([2, 5, 16])
        >>> layer(torch.randn(2, 5, 16), times, query_times=torch.tensor([[2.0], [3.0]])).shape
        torch.Size([2, 1, 16])
    """

    no_weight_decay = ("query_constant",)

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        preset: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        config = AttentionConfig.from_preset(preset, dim=dim, num_heads=num_heads, **settings)
        heads = config.num_heads
        if dim % heads:
            raise ValueError(
                f"dim must be a positive multiple of num_heads; got dim={dim}, num_heads={heads}"
            )
        if isinstance(config.omega_range, str):
            raise ValueError(
                f"omega_range must be (low, high) in a layer; got {config.omega_range!r}, which an "
                "OsciFormer finds in its training times"
            )
        self.dim, self.num_heads, self.head_dim = dim, heads, dim // heads
        self.query, self.value, self.direction = config.query, config.value, config.direction
        self.zeta_range, self.ridge = config.zeta_range, config.ridge
        self.scale, self.backend = config.scale, config.backend

        omega_range = config.omega_range
        shape = (heads, self.head_dim)
        self.key_spectrum, self.value_spectrum = (
            Spectrum(
                *shape,
                omega_range=omega_range,
                zeta_range=config.zeta_range,
                undamped=config.undamped,
            )
            for _ in range(2)
        )
        # A learned trajectory has no query tokens, hence nothing to project.
        is_learned = self.query == "learned"
        self.query_projection = None if is_learned else nn.Linear(dim, dim, config.bias)
        self.key_projection = nn.Linear(dim, dim, config.bias)
        self.value_projection = nn.Linear(dim, dim, config.bias)
        self.output_projection = nn.Linear(dim, dim, config.bias)
        self.dropout = nn.Dropout(config.dropout)

        self.key_velocity = self.value_velocity = None
        if config.velocity:
            self.key_velocity = nn.Parameter(torch.zeros(*shape, self.head_dim))
            self.value_velocity = nn.Parameter(torch.zeros(*shape, self.head_dim))
        self.key_equilibrium = self.value_equilibrium = None
        if config.equilibrium:
            self.key_equilibrium = nn.Linear(dim, dim, bias=False)
            self.value_equilibrium = nn.Linear(dim, dim, bias=False)
            nn.init.zeros_(self.key_equilibrium.weight)
            nn.init.zeros_(self.value_equilibrium.weight)

        def bank(num_modes: int) -> FrequencyBank:
            return FrequencyBank(config.bank, num_modes, omega_range=omega_range)

        self.query_bank = self.drive_bank = None
        if self.query not in ("hold", "linear"):
            self.query_bank = bank(config.num_modes)
        if self.query in ("anchored", "learned"):
            modes = (heads, config.num_modes, self.head_dim)
            # `anchored` starts as `hold`; a learned trajectory starts as a small random one.
            if self.query == "anchored":
                initial = (torch.ones(shape), torch.zeros(modes), torch.zeros(modes))
            else:
                spread = (config.num_modes + 1) ** -0.5
                initial = tuple(torch.randn(s) * spread for s in (shape, modes, modes))
            self.query_constant, self.query_cos, self.query_sin = map(nn.Parameter, initial)
        if config.drive_modes:
            self.drive_bank = bank(config.drive_modes)
            for name in _DRIVES:
                gains = nn.Parameter(torch.zeros(heads, config.drive_modes, self.head_dim))
                self.register_parameter(f"drive_{name}", gains)

    def reset_spectra(
        self,
        omega_range: tuple[float, float],
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw both spectra again from `omega_range`, and set the banks to it."""
        for spectrum in (self.key_spectrum, self.value_spectrum):
            spectrum.reset(omega_range, self.zeta_range, generator=generator)
        for bank in (self.query_bank, self.drive_bank):
            if bank is not None:
                bank.reset(omega_range, generator=generator)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        *,
        query_x: Float[Tensor, "B M D"] | None = None,
        return_internals: bool = False,
        validate: bool = True,
    ) -> Any:
        """Return the attended tokens, one row per token or per query time.

        Args:
            x: Tokens. Where `mask` is False they may hold anything, NaN included.
            times: Their times, not decreasing among the present tokens of a series.
            mask: True where a token is present. Rows of absent tokens are zero.
            query_times: Times to read at instead, in any order; M may differ from N.
            query_x: Query tokens of the reads; None holds the last observation.
            return_internals: Also return an `AttentionInternals`.
            validate: Check the arguments and clean the padding. An `Encoder`, which has done so
                for all its layers, gives False.

        Returns:
            The rows, or `(rows, internals)`.
        """
        checks = None
        if validate:
            check_tokens(x, times, mask, name="x", dim=self.dim)
            check_reads(query_times, query_x, batch=x.shape[0], dim=self.dim)
            checks = DeferredChecks()
            check_time_values(times, mask, query_times, checks)
            self.check_spectra(checks)
            checks.start() if self.tolerates_bad_values(x) else checks.finish()
            times = clean_times(times, mask)
            if mask is not None:
                x = torch.where(mask[..., None], x, 0.0)
        kv = self.project_keys(x)
        if query_times is None:
            rows = _Rows(x, times, mask)
            out, weights = self._attend(rows, kv, times, mask, return_internals)
            if mask is not None:
                out = torch.where(mask[..., None], out, 0.0)
                if weights is not None:
                    weights = torch.where(mask[:, None, :, None], weights, 0.0)
            query_times = times
        else:
            if query_x is None:
                backfill = self.direction == "bidirectional"
                held = last_observation(times, query_times, mask, backfill=backfill)
                query_x = take_tokens(x, held)
            reads = _Rows(query_x, query_times)
            out, weights = self._read(reads, x, kv, times, mask, return_internals)
        if checks is not None:
            checks.finish()
        if not return_internals or weights is None:
            return out
        return out, AttentionInternals(
            weights=weights,
            times=times,
            query_times=query_times,
            mask=mask,
            keys=kv.keys,
            values=kv.values,
            drive=self.drive(),
            direction=self.direction,
            **self._spectra(),
        )

    def _spectra(self) -> dict[str, Tensor]:
        """Return the spectra by the names of the operator's arguments."""
        return {
            "key_omega": self.key_spectrum.omega,
            "key_zeta": self.key_spectrum.zeta,
            "value_omega": self.value_spectrum.omega,
            "value_zeta": self.value_spectrum.zeta,
        }

    def check_spectra(self, checks: DeferredChecks) -> None:
        """Refuse spectra that are not finite, as after a training that diverged."""
        check_spectra(self._spectra(), self.num_heads, self.head_dim, checks)

    def tolerates_bad_values(self, x: Tensor) -> bool:
        """Return whether values may be checked after the work is queued: kernels without a fit."""
        has_kernels = x.is_cuda and x.dtype != torch.float64 and self.backend in ("auto", "triton")
        return has_kernels and self.query in ("hold", "linear")

    def project_queries(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B M H C"] | None:
        """Return the query tokens of `x`; None in mode `learned`, which has none."""
        return None if self.query_projection is None else self._heads(self.query_projection(x))

    def project_keys(self, x: Float[Tensor, "B N D"]) -> KeyValues:
        """Return the oscillators that the tokens `x` start."""
        roles = []
        for role in ("key", "value"):
            start = self._heads(getattr(self, f"{role}_projection")(x))
            maps, rest = getattr(self, f"{role}_velocity"), getattr(self, f"{role}_equilibrium")
            velocity = None if maps is None else torch.einsum("bnhc,hdc->bnhd", start, maps)
            roles.append(
                Oscillators(start, velocity, None if rest is None else self._heads(rest(x)))
            )
        return KeyValues(*roles)

    def project_output(self, attended: Float[Tensor, "B M H C"]) -> Float[Tensor, "B M D"]:
        """Return the layer's rows from what the heads attended to."""
        weight = self.output_projection.weight
        if not torch.is_autocast_enabled(weight.device.type):
            attended = attended.to(weight.dtype)
        return self.dropout(self.output_projection(attended.flatten(2)))

    def drive(self) -> Drive | None:
        """Return the forces on keys and values; None without drive modes."""
        if self.drive_bank is None:
            return None
        return Drive(self.drive_bank.omega, *(getattr(self, f"drive_{name}") for name in _DRIVES))

    def query_settings(self) -> dict[str, Any] | None:
        """Return the `query_params` of the operator."""
        if self.query_bank is None:
            return None
        if self.query in _FIT_MODES:
            return {"omega": self.query_bank.omega, "ridge": self.ridge}
        return {
            "omega": self.query_bank.omega,
            "constant": self.query_constant,
            "cos": self.query_cos,
            "sin": self.query_sin,
        }

    def _attend(
        self, rows: _Rows, kv: KeyValues, times: Tensor, mask: Tensor | None, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output at the rows, and the weights if they are asked for."""
        keys, values = (
            inputs.Oscillators(
                item.start, spectrum.omega, spectrum.zeta, item.velocity, item.equilibrium
            )
            for item, spectrum in (
                (kv.keys, self.key_spectrum),
                (kv.values, self.value_spectrum),
            )
        )
        asked = (
            self.query,
            self.project_queries(rows.x),
            rows.times,
            self.query_settings(),
            rows.mask,
        )
        given = inputs.AttentionInputs(
            resolve_query(*asked),
            rows.times,
            times,
            keys,
            values,
            self.value,
            self.drive(),
            mask,
            self.head_dim**-0.5 if self.scale is None else self.scale,
            return_weights=return_weights,
        )
        later = None if self.direction == "causal" else resolve_reversed(given.path, *asked)
        result = attend_unchecked(given, self.backend, later)
        return self.project_output(result.out), result.weights

    def _read(
        self,
        reads: _Rows,
        x: Tensor,
        kv: KeyValues,
        times: Tensor,
        mask: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `_attend` does at read times in any order."""
        rows, row_times, row_mask = reads
        skipped = 0
        if self.query in _PATH_MODES:
            present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
            is_knot = torch.full_like(row_times, self.query == "linear", dtype=torch.bool)
            rows = torch.cat((x, rows), dim=1)
            row_times = torch.cat((times, row_times.to(times.dtype)), dim=1)
            row_mask = torch.cat((present, is_knot), dim=1)
            skipped = times.shape[1]
        # Stable, so that a read at an observation's time comes after the observation.
        row_times, order = row_times.sort(dim=1, stable=True)
        rows = rows.gather(1, order[..., None].expand(rows.shape))
        if row_mask is not None:
            row_mask = row_mask.gather(1, order)
        sorted_rows = _Rows(rows, row_times, row_mask)
        out, weights = self._attend(sorted_rows, kv, times, mask, return_weights)
        back = order.argsort(dim=1)[:, skipped:]
        out = out.gather(1, back[..., None].expand(-1, -1, out.shape[2]))
        if weights is not None:
            pick = back[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[3])
            weights = weights.gather(2, pick)
        return out, weights

    def _heads(self, projected: Tensor) -> Tensor:
        """Return `[B, N, D]` as `[B, N, H, C]`."""
        return projected.unflatten(-1, (self.num_heads, self.head_dim))

    def extra_repr(self) -> str:
        """Show the choices that no submodule shows."""
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, query={self.query}, "
            f"value={self.value}, direction={self.direction}, backend={self.backend}"
        )
