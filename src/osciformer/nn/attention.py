"""Oscillator attention as a layer: projections, spectra, drives. The mathematics is in `ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from osciformer._types import Bool, Float, Mask, QueryTimes, Reads, Tensor, Times, Tokens
from osciformer.config import AttentionConfig
from osciformer.math.driven import driven_response
from osciformer.math.oscillator import propagator
from osciformer.nn.parameters import FrequencyBank, Spectrum
from osciformer.nn.timeline import check_time_values, check_tokens, last_observation, take_tokens
from osciformer.ops._checks import DeferredChecks, check_spectra
from osciformer.ops.attention import inputs
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.query import resolve_query, resolve_reversed
from osciformer.ops.oscillator_attention import attend_unchecked
from osciformer.ops.padding import clean_times

_FIT_MODES = ("ridge", "ridge_causal")
_ROLES = ("key", "value")
_DRIVES = ("key_cos", "key_sin", "value_cos", "value_sin")


@dataclass(frozen=True)
class Oscillators:
    """Keys or values as they start: one damped oscillator per token, head and channel.

    With `oscillators_per_channel=M` they have M times the channels of a head: all channels of the
    first oscillators, then all of the second ones, and so on.
    """

    start: Float[Tensor, "B N H C"]  #: Position at the token's own time.
    velocity: Float[Tensor, "B N H C"] | None = None  #: Velocity there; None is zero.
    equilibrium: Float[Tensor, "B N H C"] | None = None  #: Rest position; None is zero.


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of a set of tokens, ready to oscillate."""

    keys: Oscillators
    values: Oscillators


@dataclass(frozen=True)
class AttentionInternals:
    """The inside of one call of `OscillatorAttention`."""

    weights: Float[Tensor, "B H M N"]  #: A row sums to 1, or is 0 where it sees no key.
    times: Times  #: Key times, padding replaced.
    query_times: QueryTimes  #: Times of the rows.
    mask: Bool[Tensor, "B N"] | None  #: True where a key is present; None if all are.
    keys: Oscillators  #: The keys as they start.
    values: Oscillators  #: The values as they start.
    key_omega: Float[Tensor, "H C"]  #: Natural frequencies of the keys.
    key_zeta: Float[Tensor, "H C"]  #: Damping ratios of the keys.
    value_omega: Float[Tensor, "H C"]  #: Natural frequencies of the values.
    value_zeta: Float[Tensor, "H C"]  #: Damping ratios of the values.
    drive: Drive | None = None  #: The drive, if the layer has one.
    direction: str = "causal"  #: `causal` or `bidirectional`.

    def key_trajectories(self, grid: Float[Tensor, "*B T"]) -> Float[Tensor, "B T N H C"]:
        """Return k_i(t) on a grid of times `[T]` or `[B, T]`; NaN where there is no trajectory.

        A causal key has none before its own time, a padded key nowhere.
        """
        return self._trajectories(grid, "key")

    def value_trajectories(self, grid: Float[Tensor, "*B T"]) -> Float[Tensor, "B T N H C"]:
        """Return v_i(t) on a grid of times, as `key_trajectories` does for keys."""
        return self._trajectories(grid, "value")

    def _trajectories(self, grid: Tensor, role: Literal["key", "value"]) -> Tensor:
        start: Oscillators = getattr(self, f"{role}s")
        omega, zeta = getattr(self, f"{role}_omega"), getattr(self, f"{role}_zeta")
        grid = torch.atleast_2d(grid).to(self.times.dtype)
        elapsed = grid[:, :, None] - self.times[:, None, :]  # [B, T, N]
        alive = elapsed >= (0 if self.direction == "causal" else -torch.inf)
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
            spectrum = omega[:, None], zeta[:, None]
            response, _ = driven_response(s[..., None], drive_omega[..., None], *spectrum)
            # [B, T, N, H, Md, C], summed over the modes Md
            pushed = (torch.complex(cos, -sin) * response).real.sum(dim=-2)
            out = out + pushed.to(out.dtype) * position
        return torch.where(alive[..., None, None], out, torch.nan)


# So that torch.export can return them.
for _cls in (Oscillators, AttentionInternals):
    torch.export.register_dataclass(_cls, serialized_type_name=f"osciformer.{_cls.__name__}")

# Query tokens, their times, and which of them take part in a fitted path.
_Rows = tuple[Tensor, Tensor, Tensor | None]


class OscillatorAttention(nn.Module):
    r"""Multi-head attention whose keys and values are damped oscillators started by each token.

    $$\alpha_i(t_j) = \frac{1}{t_j - t_i} \int_{t_i}^{t_j} \langle q(\tau), k_i(\tau) \rangle d\tau,
    \qquad \ddot k_i + 2\zeta\omega \dot k_i + \omega^2 k_i = 0, \quad k_i(t_i) = K_i,\;
    \dot k_i(t_i) = U^k K_i,$$

    a softmax of $\alpha / \sqrt C$ over the tokens with $t_i \le t_j$, and values that oscillate in
    the same way and are averaged over $[t_i, t_j]$. Each head and channel has its own learned omega
    and zeta, for keys and for values.

    **Reading at other times.** With `query_times` the rows of the result are those times instead
    of the tokens. The query token of a read is `query_x`, or else the token of the last observation
    at or before the time (zero-order hold). Before the first observation a causal row sees nothing
    and the attention is zero; a bidirectional row takes the first observation's token. In `ridge`
    and `ridge_causal` the path is fitted to the observations alone, so a read never changes
    another. In `linear`, a known limitation, a read is a knot of the path and bends it for later
    reads of the same call, except where they hold the last token of all: read one time per call.

    Args:
        dim: Width D of the tokens; a multiple of `num_heads`.
        num_heads: Number of heads H; 8 if neither it nor a preset is given.
        preset: `default` or `paper`; settings given explicitly win, and None keeps the preset's.
        query: `hold` (default), `linear, ridge, ridge_causal, anchored` or `learned`, see
            `oscillator_attention`. This and all that follow are the fields of `AttentionConfig`.
        value: `average` over the gap (default) or `point` value at its end.
        direction: `causal` (default), or `bidirectional`: later tokens run backwards in time.
        oscillators_per_channel: Number M of oscillators that a channel of a key or value is the sum
            of, each started by a linear map of the token; M times the inner size. Default 1.
        num_modes: Frequencies J of the query bank (not for `hold` and `linear`). Default 8.
        bank: Kind of the fixed query and drive bank, see `frequency_bank`; `data` is set by a
            model's `fit_time_scale`. Default `log_spaced`.
        omega_range: Ends of the initial frequencies and of the bank, in radians per unit of time.
            The default (0.1, 200) suits times of about unit span; else take `frequency_range`.
        zeta_range: Ends of the initial damping ratios. Default (0.05, 0.4).
        undamped: Keep every zeta at exactly zero. Default False.
        velocity: Learn initial velocities $U^k K_i$, $U^v V_i$ (from zero maps). Default True.
        drive_modes: Number of sinusoids that force keys and values (from zero). Default 0.
        equilibrium: Learn rest positions $c_i = W_c X_i$ (from a zero map). Default False.
        ridge: Ridge of the query fits. Default 1e-4.
        dropout: Dropout after the output projection. Default 0.
        bias: Biases in the projections. Default True.
        scale: Factor of the logits; None is $1/\sqrt C$.
        backend: Backend of `oscillator_attention`. Default `auto`.

    Example:
        >>> layer = OscillatorAttention(16, 4)
        >>> layer(torch.randn(2, 5, 16), torch.rand(2, 5).sort().values).shape
        torch.Size([2, 5, 16])
    """

    no_weight_decay = ("query_constant",)

    def __init__(
        self, dim: int, num_heads: int | None = None, *, preset: str | None = None, **settings: Any
    ) -> None:
        super().__init__()
        config = AttentionConfig.from_preset(preset, dim=dim, num_heads=num_heads, **settings)
        heads, omega_range = config.num_heads, config.omega_range
        if dim % heads:
            got = f"{dim=}, num_heads={heads}"
            raise ValueError(f"dim must be a positive multiple of num_heads; got {got}")
        if isinstance(omega_range, str):
            raise ValueError(
                f"omega_range must be (low, high) in a layer; got {omega_range!r}, which an "
                "OsciFormer finds in its training times"
            )
        self.dim, self.num_heads, self.head_dim = dim, heads, dim // heads
        self.query, self.value, self.direction = config.query, config.value, config.direction
        self.zeta_range, self.ridge, self.backend = config.zeta_range, config.ridge, config.backend
        self.scale, self.oscillators_per_channel = config.scale, config.oscillators_per_channel

        self.inner_dim = self.head_dim * self.oscillators_per_channel  # oscillators a head
        shape, width = (heads, self.inner_dim), heads * self.inner_dim
        ranges: dict[str, Any] = {"omega_range": omega_range, "zeta_range": config.zeta_range}
        self.key_spectrum = Spectrum(*shape, **ranges, undamped=config.undamped)
        self.value_spectrum = Spectrum(*shape, **ranges, undamped=config.undamped)
        # A learned trajectory has no query tokens, hence nothing to project.
        is_learned = self.query == "learned"
        self.query_projection = None if is_learned else nn.Linear(dim, dim, config.bias)
        self.key_projection = nn.Linear(dim, width, config.bias)
        self.value_projection = nn.Linear(dim, width, config.bias)
        self.output_projection = nn.Linear(dim, dim, config.bias)
        self.dropout = nn.Dropout(config.dropout)

        for role in _ROLES:
            # The sum of the oscillators of a channel starts as large as one alone would be.
            for parameter in getattr(self, f"{role}_projection").parameters():
                parameter.data *= self.oscillators_per_channel**-0.5
            velocity = (
                nn.Parameter(torch.zeros(*shape, self.inner_dim)) if config.velocity else None
            )
            self.register_parameter(f"{role}_velocity", velocity)
            rest = nn.Linear(dim, width, bias=False) if config.equilibrium else None
            self.register_module(f"{role}_equilibrium", rest)
            if rest is not None:
                nn.init.zeros_(rest.weight)

        def bank(num_modes: int) -> FrequencyBank:
            return FrequencyBank(config.bank, num_modes, omega_range=omega_range)

        self.query_bank = self.drive_bank = None
        if self.query not in ("hold", "linear"):
            self.query_bank = bank(config.num_modes)
        if self.query in ("anchored", "learned"):
            modes = (heads, config.num_modes, self.head_dim)
            # `anchored` starts as `hold`; a learned trajectory starts as a small random one.
            if self.query == "anchored":
                initial = (torch.ones(modes[::2]), torch.zeros(modes), torch.zeros(modes))
            else:
                spread = (config.num_modes + 1) ** -0.5
                initial = tuple(torch.randn(s) * spread for s in (modes[::2], modes, modes))
            self.query_constant, self.query_cos, self.query_sin = map(nn.Parameter, initial)
        if config.drive_modes:
            self.drive_bank = bank(config.drive_modes)
            for name in _DRIVES:
                gains = nn.Parameter(torch.zeros(heads, config.drive_modes, self.inner_dim))
                self.register_parameter(f"drive_{name}", gains)

    def reset_spectra(
        self, omega_range: tuple[float, float], *, generator: torch.Generator | None = None
    ) -> None:
        """Draw both spectra again from `omega_range`, and set the banks to it."""
        for spectrum in (self.key_spectrum, self.value_spectrum):
            spectrum.reset(omega_range, self.zeta_range, generator=generator)
        for bank in (self.query_bank, self.drive_bank):
            if bank is not None:
                bank.reset(omega_range, generator=generator)

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
        """Return the attended tokens, one row per token or per query time.

        Args:
            x: Tokens `[B, N, D]`. Where `mask` is False they may hold anything, NaN included.
            times: Their times `[B, N]`, not decreasing among the present tokens of a series.
            mask: True where a token is present `[B, N]`. Rows of absent tokens are zero.
            query_times: Times `[B, M]` to read at instead, in any order.
            query_x: Query tokens `[B, M, D]` of the reads; None holds the last observation.
            return_internals: Also return an `AttentionInternals`.
            validate: Check the arguments and clean the padding; False if the caller has done so.

        Returns:
            The rows, or `(rows, internals)`.
        """
        checks, spectra = DeferredChecks(), self._spectra()
        if validate:
            check_tokens(x, times, mask, query_times, query_x, name="x", dim=self.dim)
            check_time_values(times, mask, query_times, checks)
            check_spectra(spectra, self.num_heads, self.inner_dim, checks)
            checks.start() if self.tolerates_bad_values(x) else checks.finish()
            times = clean_times(times, mask)
            if mask is not None:
                x = torch.where(mask[..., None], x, 0.0)
        kv = self.project_keys(x)
        seen = kv, spectra, times, mask
        if query_times is None:
            out, weights = self._attend((x, times, mask), *seen, return_internals)
            if mask is not None:
                out = torch.where(mask[..., None], out, 0.0)
                if weights is not None:
                    weights = torch.where(mask[:, None, :, None], weights, 0.0)
        else:
            if query_x is None:
                backfill = self.direction == "bidirectional"
                held = last_observation(times, query_times, mask, backfill=backfill)
                query_x = take_tokens(x, held)
            rows, back = self._sorted_rows(query_x, query_times, x, times, mask)
            out, weights = self._attend(rows, *seen, return_internals)
            out = out.take_along_dim(back[..., None], dim=1)
            if weights is not None:
                weights = weights.take_along_dim(back[:, None, :, None], dim=2)
        checks.finish()
        if weights is None or not return_internals:
            return out
        asked = times if query_times is None else query_times
        settings: Any = {"drive": self.drive(), "direction": self.direction, **spectra}
        return out, AttentionInternals(weights, times, asked, mask, kv.keys, kv.values, **settings)

    def _spectra(self) -> dict[str, Tensor]:
        """Return the spectra by the names of the operator's arguments."""
        keys, values = self.key_spectrum, self.value_spectrum
        of_keys = {"key_omega": keys.omega, "key_zeta": keys.zeta}
        return {**of_keys, "value_omega": values.omega, "value_zeta": values.zeta}

    def check_spectra(self, checks: DeferredChecks) -> None:
        """Refuse spectra that are not finite, as after a training that diverged."""
        with torch.no_grad():
            check_spectra(self._spectra(), self.num_heads, self.inner_dim, checks)

    def tolerates_bad_values(self, x: Tensor) -> bool:
        """Return whether values may be checked after the work is queued: kernels without a fit."""
        has_kernels = x.is_cuda and x.dtype != torch.float64 and self.backend in ("auto", "triton")
        return has_kernels and self.query in ("hold", "linear")

    def project_queries(self, x: Float[Tensor, "B M D"]) -> Float[Tensor, "B M H C"] | None:
        """Return the query tokens of `x`; None in mode `learned`, which has none.

        All oscillators of a channel are asked the same, so C counts oscillators here, too.
        """
        if self.query_projection is None:
            return None
        return self._repeated(self._heads(self.query_projection(x)))

    def project_keys(self, x: Float[Tensor, "B N D"]) -> KeyValues:
        """Return the oscillators that the tokens `x` start."""
        roles = []
        for role in _ROLES:
            start = self._heads(getattr(self, f"{role}_projection")(x))
            maps, rest = getattr(self, f"{role}_velocity"), getattr(self, f"{role}_equilibrium")
            velocity = None if maps is None else torch.einsum("bnhc,hdc->bnhd", start, maps)
            equilibrium = None if rest is None else self._heads(rest(x))
            roles.append(Oscillators(start, velocity, equilibrium))
        return KeyValues(*roles)

    def project_output(self, attended: Float[Tensor, "B M H C"]) -> Float[Tensor, "B M D"]:
        """Return the layer's rows from what the heads attended to."""
        weight = self.output_projection.weight
        if not torch.is_autocast_enabled(weight.device.type):
            attended = attended.to(weight.dtype)
        if self.oscillators_per_channel > 1:
            attended = attended.unflatten(-1, (-1, self.head_dim)).sum(dim=-2)
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
        learned = ((name, getattr(self, f"query_{name}")) for name in ("constant", "cos", "sin"))
        return {"omega": self.query_bank.omega, **{n: self._repeated(x) for n, x in learned}}

    def _attend(
        self,
        rows: _Rows,
        kv: KeyValues,
        spectra: dict[str, Tensor],
        times: Tensor,
        mask: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output at the rows, and the weights if they are asked for."""
        row_x, row_times, row_mask = rows
        key, value = ((spectra[f"{role}_omega"], spectra[f"{role}_zeta"]) for role in _ROLES)
        keys, values = (
            inputs.Oscillators(x.start, *spectrum, x.velocity, x.equilibrium)
            for x, spectrum in ((kv.keys, key), (kv.values, value))
        )
        queries = self.project_queries(row_x)
        asked = self.query, queries, row_times, self.query_settings(), row_mask
        path = resolve_query(*asked)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        settings = self.value, self.drive(), mask, scale
        given = inputs.AttentionInputs(
            path, row_times, times, keys, values, *settings, return_weights=return_weights
        )
        later = None if self.direction == "causal" else resolve_reversed(path, *asked)
        result = attend_unchecked(given, self.backend, later)
        return self.project_output(result.out), result.weights

    def _sorted_rows(
        self, reads: Tensor, query_times: Tensor, x: Tensor, times: Tensor, mask: Tensor | None
    ) -> tuple[_Rows, Tensor]:
        """Return the rows of reads by time, and where each read is among them `[B, M]`."""
        row_mask, skipped = None, 0
        # A path through the observations needs them as rows; only in `linear` is a read a knot.
        if self.query == "linear" or self.query in _FIT_MODES:
            is_knot = torch.full_like(query_times, self.query == "linear", dtype=torch.bool)
            present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
            reads = torch.cat((x, reads), dim=1)
            query_times = torch.cat((times, query_times.to(times.dtype)), dim=1)
            row_mask, skipped = torch.cat((present, is_knot), dim=1), times.shape[1]
        # Stable, so that a read at an observation's time comes after the observation.
        row_times, order = query_times.sort(dim=1, stable=True)
        rows = reads.take_along_dim(order[..., None], dim=1)
        row_mask = None if row_mask is None else row_mask.gather(1, order)
        return (rows, row_times, row_mask), order.argsort(dim=1)[:, skipped:]

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1))

    def _repeated(self, x: Float[Tensor, "*S C"]) -> Tensor:
        """Return what the channels of a head have for each of their oscillators."""
        count = self.oscillators_per_channel
        return x if count == 1 else torch.cat([x] * count, dim=-1)

    def extra_repr(self) -> str:
        """Show the choices that no submodule shows."""
        names = ("dim", "num_heads", "query", "value", "direction", "backend")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
