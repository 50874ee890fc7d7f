"""Oscillator attention as a layer: projections, spectra, drives. The mathematics is in `ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.math.banks import BankKind
from osciformer.nn.checks import check_choice, check_reads, check_tokens
from osciformer.nn.internals import AttentionInternals, Oscillators
from osciformer.nn.presets import ATTENTION_PRESETS, resolve_preset
from osciformer.nn.spectrum import FrequencyBank, Spectrum
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops import oscillator_attention
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import QueryMode
from osciformer.ops.oscillator_attention import Backend
from osciformer.ops.padding import clean_times

# Modes whose path goes through the observations, so that a read needs them beside its own token.
_PATH_MODES = ("linear", "ridge", "ridge_causal")
_FIT_MODES = ("ridge", "ridge_causal")


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of a set of tokens, ready to oscillate."""

    keys: Oscillators
    values: Oscillators


class OscillatorAttention(nn.Module):
    r"""Multi-head attention whose keys and values are damped oscillators started by each token.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \ddot k_i + 2\zeta\omega \dot k_i + \omega^2 k_i = 0, \quad k_i(t_i) = K_i,\;
    \dot k_i(t_i) = U^k K_i,$$

    a softmax of $\alpha / \sqrt C$ over the tokens with $t_i \le t_j$, and values that oscillate in
    the same way and are averaged over $[t_i, t_j]$. Each head and channel has its own learned omega
    and zeta, for keys and for values.

    **Reading at other times.** With `query_times` the rows of the result are those times instead
    of the tokens. The query token of a read is `query_x`, or where that is not given the token of
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
        query: What row j asks for: `hold, linear, ridge, ridge_causal, anchored` or `learned`.
            Default `hold`.
        value: `average` over the gap or `point` value at its end.
        direction: `causal`, or `bidirectional` with time-reversed oscillators for later tokens.
        num_modes: Frequencies J of the query bank (not for `hold` and `linear`). Default 8.
        bank: Kind of the query and drive bank, see `frequency_bank`; `data` is set by a model's
            `fit_time_scale`. Default `log_spaced`. The bank is fixed, not learned.
        omega_range: Ends of the initial frequencies and of the bank, in radians per unit of time.
            The default (0.1, 200) is meant for times of about unit span; `frequency_range(times)`
            gives one for any other data.
        zeta_range: Ends of the initial damping ratios. Default (0.05, 0.4).
        undamped: Keep every zeta at exactly zero.
        velocity: Learn the initial velocities $U^k K_i$, $U^v V_i$ (the maps start at zero).
        drive_modes: Number of sinusoids that force keys and values (their gains start at zero).
        equilibrium: Learn rest positions $c_i = W_c X_i$ (the map starts at zero).
        ridge: Ridge of the query fits.
        dropout: Dropout after the output projection. Default 0.
        bias: Biases in the projections.
        scale: Factor of the logits; None is $1/\sqrt C$.
        backend: Backend of `oscillator_attention`.
        preset: `default` or `paper`; arguments given explicitly win.

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
        query: QueryMode | None = None,
        value: Literal["average", "point"] = "average",
        direction: Literal["causal", "bidirectional"] = "causal",
        num_modes: int | None = None,
        bank: BankKind | None = None,
        omega_range: tuple[float, float] | None = None,
        zeta_range: tuple[float, float] | None = None,
        undamped: bool = False,
        velocity: bool = True,
        drive_modes: int = 0,
        equilibrium: bool = False,
        ridge: float = 1e-4,
        dropout: float | None = None,
        bias: bool = True,
        scale: float | None = None,
        backend: Backend = "auto",
        preset: str | None = None,
    ) -> None:
        super().__init__()
        given = {
            "num_heads": num_heads,
            "query": query,
            "num_modes": num_modes,
            "bank": bank,
            "omega_range": omega_range,
            "zeta_range": zeta_range,
            "dropout": dropout,
        }
        settings = resolve_preset(ATTENTION_PRESETS, preset or "default", given)
        heads: int = settings["num_heads"]
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(
                f"dim must be a positive multiple of num_heads; got dim={dim}, num_heads={heads}"
            )
        check_choice("query", settings["query"], get_args(QueryMode))
        check_choice("value", value, ("average", "point"))
        check_choice("direction", direction, ("causal", "bidirectional"))
        check_choice("bank", settings["bank"], get_args(BankKind))
        if not 0.0 <= settings["dropout"] < 1.0:
            raise ValueError(f"dropout must lie in [0, 1); got {settings['dropout']}")
        if drive_modes < 0:
            raise ValueError(f"drive_modes must not be negative; got {drive_modes}")

        self.dim, self.num_heads, self.head_dim = dim, heads, dim // heads
        self.query: QueryMode = settings["query"]
        self.value, self.direction = value, direction
        self.zeta_range: tuple[float, float] = tuple(settings["zeta_range"])
        self.ridge, self.scale = ridge, scale
        self.backend: Backend = backend

        omega_range = tuple(settings["omega_range"])
        shape = (heads, self.head_dim)
        self.key_spectrum, self.value_spectrum = (
            Spectrum(*shape, omega_range=omega_range, zeta_range=self.zeta_range, undamped=undamped)
            for _ in range(2)
        )
        # A learned trajectory has no query tokens, hence nothing to project.
        self.query_projection = None if self.query == "learned" else nn.Linear(dim, dim, bias)
        self.key_projection = nn.Linear(dim, dim, bias)
        self.value_projection = nn.Linear(dim, dim, bias)
        self.output_projection = nn.Linear(dim, dim, bias)
        self.dropout = nn.Dropout(settings["dropout"])

        self.key_velocity = self.value_velocity = None
        if velocity:
            self.key_velocity = nn.Parameter(torch.zeros(*shape, self.head_dim))
            self.value_velocity = nn.Parameter(torch.zeros(*shape, self.head_dim))
        self.key_equilibrium = self.value_equilibrium = None
        if equilibrium:
            self.key_equilibrium = nn.Linear(dim, dim, bias=False)
            self.value_equilibrium = nn.Linear(dim, dim, bias=False)
            nn.init.zeros_(self.key_equilibrium.weight)
            nn.init.zeros_(self.value_equilibrium.weight)

        self.query_bank = self.drive_bank = None
        if self.query not in ("hold", "linear"):
            self.query_bank = FrequencyBank(
                settings["bank"], settings["num_modes"], omega_range=omega_range
            )
        if self.query in ("anchored", "learned"):
            modes = (heads, settings["num_modes"], self.head_dim)
            # `anchored` starts as `hold`; a learned trajectory starts as a small random one.
            if self.query == "anchored":
                initial = (torch.ones(shape), torch.zeros(modes), torch.zeros(modes))
            else:
                spread = (settings["num_modes"] + 1) ** -0.5
                initial = tuple(torch.randn(s) * spread for s in (shape, modes, modes))
            self.query_constant, self.query_cos, self.query_sin = map(nn.Parameter, initial)
        if drive_modes:
            self.drive_bank = FrequencyBank(settings["bank"], drive_modes, omega_range=omega_range)
            for name in ("key_cos", "key_sin", "value_cos", "value_sin"):
                gains = nn.Parameter(torch.zeros(heads, drive_modes, self.head_dim))
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
    ) -> Any:
        """Return the attended tokens, one row per token or per query time.

        Args:
            x: Tokens. Where `mask` is False they may hold anything, NaN included.
            times: Their times, not decreasing among the present tokens of a series.
            mask: True where a token is present. Rows of absent tokens are zero.
            query_times: Times to read at instead, in any order; M may differ from N.
            query_x: Query tokens of the reads; None holds the last observation.
            return_internals: Also return an `AttentionInternals`.

        Returns:
            The rows, or `(rows, internals)`.
        """
        check_tokens(x, times, mask, name="x", dim=self.dim)
        check_reads(query_times, query_x, batch=x.shape[0], dim=self.dim)
        times = clean_times(times, mask)
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
        kv = self.project_keys(x)
        if query_times is None:
            out, weights = self._attend(x, times, mask, kv, times, mask, return_internals)
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
            out, weights = self._read(x, times, mask, kv, query_times, query_x, return_internals)
        if not return_internals:
            return out
        return out, self._internals(weights, times, query_times, mask, kv)

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
        names = ("key_cos", "key_sin", "value_cos", "value_sin")
        return Drive(self.drive_bank.omega, *(getattr(self, f"drive_{name}") for name in names))

    def query_settings(self, mask: Bool[Tensor, "B M"] | None = None) -> dict[str, Any] | None:
        """Return the `query_params` of the operator for query tokens with this mask."""
        if self.query_bank is None:
            return {"mask": mask} if self.query == "linear" and mask is not None else None
        if self.query in _FIT_MODES:
            fit: dict[str, Any] = {"omega": self.query_bank.omega, "ridge": self.ridge}
            return fit if mask is None else {**fit, "mask": mask}
        return {
            "omega": self.query_bank.omega,
            "constant": self.query_constant,
            "cos": self.query_cos,
            "sin": self.query_sin,
        }

    def _attend(
        self,
        rows: Tensor,
        row_times: Tensor,
        row_mask: Tensor | None,
        kv: KeyValues,
        times: Tensor,
        mask: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        result = oscillator_attention(
            self.project_queries(rows),
            kv.keys.start,
            kv.values.start,
            row_times,
            times,
            key_omega=self.key_spectrum.omega,
            key_zeta=self.key_spectrum.zeta,
            value_omega=self.value_spectrum.omega,
            value_zeta=self.value_spectrum.zeta,
            key_velocity=kv.keys.velocity,
            value_velocity=kv.values.velocity,
            key_equilibrium=kv.keys.equilibrium,
            value_equilibrium=kv.values.equilibrium,
            query=self.query,
            query_params=self.query_settings(row_mask),
            value=self.value,
            drive=self.drive(),
            direction=self.direction,
            mask=mask,
            scale=self.scale,
            backend=self.backend,
            return_weights=return_weights,
        )
        if isinstance(result, tuple):
            return self.project_output(result[0]), result[1]
        return self.project_output(result), None

    def _read(
        self,
        x: Tensor,
        times: Tensor,
        mask: Tensor | None,
        kv: KeyValues,
        query_times: Tensor,
        query_x: Tensor,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows, row_times, row_mask = query_x, query_times, None
        skipped = 0
        if self.query in _PATH_MODES:
            rows = torch.cat((x, query_x), dim=1)
            row_times = torch.cat((times, query_times.to(times.dtype)), dim=1)
            present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
            reads = torch.full_like(query_times, self.query == "linear", dtype=torch.bool)
            row_mask = torch.cat((present, reads), dim=1)
            skipped = times.shape[1]
        elif mask is not None and query_times.shape == times.shape:
            # The operator takes rows at exactly the key times for the keys' own rows and would
            # blank those of absent keys. A read is none of them: one row more tells it so.
            rows = torch.cat((rows, rows[:, -1:]), dim=1)
            row_times = torch.cat((row_times, row_times[:, -1:]), dim=1)
        # Stable, so that a read at an observation's time comes after the observation.
        row_times, order = row_times.sort(dim=1, stable=True)
        rows = rows.gather(1, order[..., None].expand(rows.shape))
        if row_mask is not None:
            row_mask = row_mask.gather(1, order)
        out, weights = self._attend(rows, row_times, row_mask, kv, times, mask, return_weights)
        back = order.argsort(dim=1)[:, skipped : skipped + query_times.shape[1]]
        out = out.gather(1, back[..., None].expand(-1, -1, out.shape[2]))
        if weights is not None:
            pick = back[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[3])
            weights = weights.gather(2, pick)
        return out, weights

    def _internals(
        self,
        weights: Tensor | None,
        times: Tensor,
        query_times: Tensor,
        mask: Tensor | None,
        kv: KeyValues,
    ) -> AttentionInternals:
        assert weights is not None
        return AttentionInternals(
            weights=weights,
            times=times,
            query_times=query_times,
            mask=mask,
            keys=kv.keys,
            values=kv.values,
            key_omega=self.key_spectrum.omega,
            key_zeta=self.key_spectrum.zeta,
            value_omega=self.value_spectrum.omega,
            value_zeta=self.value_spectrum.zeta,
            drive=self.drive(),
            direction=self.direction,
        )

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, self.head_dim))

    def extra_repr(self) -> str:
        """Say the choices that no submodule shows."""
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, query={self.query}, "
            f"value={self.value}, direction={self.direction}, backend={self.backend}"
        )
