"""Observations one by one: the same numbers as a whole batch, at O(N) a step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.models.osciformer import OsciFormer
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.encoder import Encoder, EncoderBlock
from osciformer.nn.parameters import Spectrum
from osciformer.ops.attention.drive import Drive
from osciformer.ops.attention.step import (
    STREAMING_QUERIES,
    Medium,
    StepCache,
    StepSettings,
    advance,
    append,
    attend,
    empty_cache,
    merge,
)


class OnlineSession:
    """A causal layer, encoder or model that is fed one observation at a time.

    `observe(t, x)` adds an observation and returns its state, `read(t)` returns the state at any
    time from the last observation on. Both equal what the module gives for the whole batch, to
    rounding. A step costs O(N) time for N observations so far, and the session O(N) memory.

    **Ties.** Times must not decrease; equal times are allowed. As in a batch, observations at
    one time see each other: when a second one arrives, the states of those before it at that time
    are computed again inside, for all that follows. What `observe` had returned for them stays
    what was known at that moment, and the last of them has the state of the batch.

    The session takes the module as it is when the session starts: do not train it meanwhile. No
    gradients are kept.

    Args:
        module: An `OscillatorAttention` or `Encoder`, fed with tokens `[B, D]`, or an `OsciFormer`,
            fed with values `[B, F]` in which NaN is missing. It must be causal, its query one of
            `hold, linear, ridge_causal, anchored, learned`, and its dropout off.
        batch_size: Number of series B that are fed side by side.
        static: Static features of the series, for an `OsciFormer` that has them.

    Example:
        >>> session = OnlineSession(OsciFormer(2, dim=8, num_heads=2).eval())
        >>> session.observe(0.0, torch.tensor([[1.0, 2.0]])).shape
        torch.Size([1, 8])
        >>> session.read(0.7).shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        module: OscillatorAttention | Encoder | OsciFormer,
        *,
        batch_size: int = 1,
        static: Float[Tensor, "B S"] | None = None,
    ) -> None:
        if not isinstance(module, OscillatorAttention | Encoder | OsciFormer):
            raise TypeError(
                "module must be an OscillatorAttention, an Encoder or an OsciFormer; "
                f"got {type(module).__name__}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        if static is not None and not isinstance(module, OsciFormer):
            raise ValueError("static is given, but only an OsciFormer has static features")
        for part in module.modules():
            if isinstance(part, nn.Dropout) and part.training and part.p > 0:
                raise ValueError("the module's dropout is on; call module.eval() first")
        self.module = module
        self.batch_size = batch_size
        self._static = static
        self._encoder = module.encoder if isinstance(module, OsciFormer) else module
        if isinstance(self._encoder, OscillatorAttention):
            self._layers = [_LayerStream(self._encoder, None, batch_size)]
        else:
            self._layers = [
                _LayerStream(block.attention, block, batch_size) for block in self._encoder
            ]
        weight = self._layers[0].attention.output_projection.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._time = torch.zeros(batch_size, dtype=torch.float64, device=self._device)
        self._started = torch.zeros(batch_size, dtype=torch.bool, device=self._device)
        dim = self._encoder.dim
        # The observations at the current time, whose states may still change.
        self._group = torch.zeros(batch_size, 0, dim, dtype=self._dtype, device=self._device)
        self._group_present = torch.zeros(batch_size, 0, dtype=torch.bool, device=self._device)
        self._last_token = torch.zeros(batch_size, dim, dtype=self._dtype, device=self._device)

    @property
    def num_observations(self) -> list[int]:
        """Number of observations of each series."""
        counts: list[int] = self._layers[0].latest.count.tolist()
        return counts

    @torch.no_grad()
    def observe(
        self,
        t: float | Float[Tensor, " B"],
        x: Float[Tensor, "B F"],
        present: Bool[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B D"]:
        """Add an observation to each series and return their states.

        Args:
            t: Its time, one for all series or one each.
            x: Its token, or for an `OsciFormer` its values.
            present: False for series that have no observation in this step; their `t` and `x`
                may hold anything, and their row of the result is zero.

        Raises:
            ValueError: If a time decreases or is not finite.
        """
        if present is None:
            present = torch.ones(self.batch_size, dtype=torch.bool, device=self._device)
        present = self._per_series("present", present, torch.bool)
        time = torch.where(present, self._checked_time(t, present), self._time)
        token = self._token(x, present)
        tied = self._started & (time == self._time)
        if bool(tied.any()):
            kept = self._group_present & tied[:, None]
            group = torch.cat((self._group, token[:, None]), dim=1)
            group_present = torch.cat((kept, present[:, None]), dim=1)
        else:
            group, group_present = token[:, None], present[:, None]
        states = group
        for layer in self._layers:
            states = layer.observe(states, group_present, time, tied)
        self._group, self._group_present = group, group_present
        self._time, self._started = time, self._started | present
        self._last_token = torch.where(present[:, None], token, self._last_token)
        return torch.where(present[:, None], self._finish(states[:, -1]), 0.0)

    @torch.no_grad()
    def read(self, t: float | Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """Return the states at a time at or after the last observation; nothing is stored.

        Args:
            t: The time, one for all series or one each. A series without observations gives what
                the module gives before the first one.

        Raises:
            ValueError: If the time lies before the last observation or is not finite.
        """
        everyone = torch.ones(self.batch_size, dtype=torch.bool, device=self._device)
        time = self._checked_time(t, everyone)
        states = self._last_token[:, None]
        for layer in self._layers:
            states = layer.read(states, time)
        return self._finish(states[:, -1])

    def _finish(self, states: Tensor) -> Tensor:
        """Return the states after the encoder's last norm."""
        return (
            states if isinstance(self._encoder, OscillatorAttention) else self._encoder.norm(states)
        )

    def _token(self, x: Tensor, present: Tensor) -> Tensor:
        """Return the tokens of an observation."""
        width = self.module.dim
        if isinstance(self.module, OsciFormer):
            width = self.module.config.input_dim
        if x.shape != (self.batch_size, width):
            raise ValueError(f"x must be [B, F] = {[self.batch_size, width]}; got {list(x.shape)}")
        x = torch.where(present[:, None], x.to(self._device), 0.0)
        if isinstance(self.module, OsciFormer):
            embedded: Tensor = self.module.embedding(x[:, None], static=self._static)
            return embedded[:, 0]
        return x.to(self._dtype)

    def _checked_time(self, t: float | Tensor, present: Tensor) -> Tensor:
        """Return a time in the unit of the module; refuse one that decreases or is not finite."""
        time = self._per_series("t", t, torch.float64)
        if isinstance(self.module, OsciFormer):
            time = self.module.time_scale(time)
        bad = present & ~time.isfinite()
        if bool(bad.any()):
            b = int(bad.to(torch.uint8).argmax())
            raise ValueError(f"t must be finite; series {b} has t={time[b].item()}")
        early = present & self._started & (time < self._time)
        if bool(early.any()):
            b = int(early.to(torch.uint8).argmax())
            raise ValueError(
                f"t must not decrease; series {b} has t={self._unit(time[b]):.17g} "
                f"< {self._unit(self._time[b]):.17g}, its last observation. "
                "Start another session, or use the module on the whole batch"
            )
        return time

    def _unit(self, time: Tensor) -> float:
        """Return a time in the unit of the data."""
        if isinstance(self.module, OsciFormer):
            scale = self.module.time_scale
            time = time * scale.scale + scale.reference
        return float(time)

    def _per_series(self, name: str, value: float | Tensor, dtype: torch.dtype) -> Tensor:
        """Return one number for each series."""
        tensor = torch.as_tensor(value, dtype=dtype, device=self._device)
        if tensor.ndim == 0:
            tensor = tensor.expand(self.batch_size)
        if tensor.shape != (self.batch_size,):
            raise ValueError(
                f"{name} must be a number or [B] with B = {self.batch_size}; "
                f"got {list(tensor.shape)}"
            )
        return tensor


class _LayerStream:
    """The caches of one layer: `latest` has every observation, `settled` none at the last time."""

    def __init__(
        self, attention: OscillatorAttention, block: EncoderBlock | None, batch_size: int
    ) -> None:
        self.attention, self.block = attention, block
        self.settings = step_settings(attention)
        self.latest: StepCache = empty_cache(batch_size, self.settings)
        self.settled = self.latest

    def observe(self, group: Tensor, present: Tensor, time: Tensor, tied: Tensor) -> Tensor:
        """Add the observations at one time, in place of those that were there before."""
        if not bool(tied.any()):
            self.settled = self.latest
        elif not bool(tied.all()):
            self.settled = merge(tied, self.settled, self.latest)
        tokens = group if self.block is None else self.block.attention_norm(group)
        queries = self.attention.project_queries(tokens)
        kv = self.attention.project_keys(tokens)
        arriving = None
        if queries is not None:
            first = present.to(torch.uint8).argmax(dim=1)[:, None, None, None]
            arriving = torch.take_along_dim(queries, first, dim=1)[:, 0]
        cache = advance(self.settled, self.settings, time, arriving)
        self.latest = append(
            cache,
            self.settings,
            (kv.keys.start, kv.keys.velocity, kv.keys.equilibrium),
            (kv.values.start, kv.values.velocity, kv.values.equilibrium),
            queries,
            present,
        )
        return self._rows(self.latest, group, queries)

    def read(self, token: Tensor, time: Tensor) -> Tensor:
        """Attend from a token that is not stored."""
        normed = token if self.block is None else self.block.attention_norm(token)
        queries = self.attention.project_queries(normed)
        arriving = None if queries is None else queries[:, 0]
        cache = advance(self.latest, self.settings, time, arriving)
        return self._rows(cache, token, queries)

    def _rows(self, cache: StepCache, tokens: Tensor, queries: Tensor | None) -> Tensor:
        """Return the layer's output at the time of a cache."""
        attended = attend(cache, self.settings, queries, num_rows=tokens.shape[1])
        out = self.attention.project_output(attended.to(tokens.dtype))
        return out if self.block is None else self.block.residual(tokens, out)


@torch.no_grad()
def step_settings(layer: OscillatorAttention) -> StepSettings:
    """Return what streaming needs of a layer; refuse one that looks ahead."""
    if layer.direction != "causal":
        raise ValueError(
            f"direction={layer.direction!r} cannot be streamed: a row sees later tokens. "
            "Use direction='causal'"
        )
    if layer.query not in STREAMING_QUERIES:
        raise ValueError(
            f"query={layer.query!r} cannot be streamed: its fit uses tokens that are still to "
            f"come. Use one of {', '.join(STREAMING_QUERIES)}"
        )
    params, names = layer.query_settings() or {}, ("omega", "constant", "cos", "sin")
    return StepSettings(
        key_medium=_medium(layer.key_spectrum, layer.drive(), "key"),
        value_medium=_medium(layer.value_spectrum, layer.drive(), "value"),
        query=layer.query,
        value=layer.value,
        scale=layer.head_dim**-0.5 if layer.scale is None else layer.scale,
        ridge=layer.ridge,
        **{name: params[name].double() for name in names if name in params},
    )


def _medium(spectrum: Spectrum, drive: Drive | None, role: Literal["key", "value"]) -> Medium:
    """Return the spectrum and the drive of keys or values, float64."""
    gains = None if drive is None else drive.gains(role)
    if gains is not None:
        omega, cos, sin = gains
        gains = omega.double(), cos.double(), sin.double()
    return Medium(spectrum.omega.double(), spectrum.zeta.double(), gains)
