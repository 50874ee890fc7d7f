"""Observations one by one: the same numbers as a whole batch, at O(N) a step or less."""

from __future__ import annotations

import threading
from typing import Any, Literal, cast

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.models.osciformer import OsciFormer
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.encoder import Encoder, EncoderBlock
from osciformer.nn.parameters import Spectrum
from osciformer.nn.resonator import ResonatorLayer
from osciformer.nn.timeline import TimeScale
from osciformer.ops import ResponseStream
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
    merge_old,
)

# Of times, in the unit of the model: their squares and cubes are still numbers.
_LARGEST_TIME = 1e30
# Merging is worth its work from so many observations on.
_FEWEST_MERGED = 32


class OnlineSession:
    """A causal layer, encoder or model that is fed one observation at a time.

    `observe(t, x)` adds an observation and returns its state, `read(t)` returns the state at any
    time from the last observation on. Both equal what the module gives for the whole batch, to
    rounding. A step of attention costs O(N) time for N observations so far, and its session O(N)
    memory; a resonator has a state of fixed size, and a step costs the same for ever. Gradients are
    not kept; do not train the module meanwhile. Of a classifier or regressor it is the network's
    backbone that can be fed, not the resonators that its predictions are mixed with.

    **Streams without end.** With a `window` W, attention keeps the observations of the last W units
    of time one by one, and merges older ones of similar age. A step then costs O(1) but for the
    logarithm of the whole time. The error falls with W beside the time 1 / gamma in which the
    slowest oscillators decay: see `osciformer.ops.attention.step.merge_old` for a bound.

    **Threads.** A session may be used by several threads; one step waits for the other.

    **Ties.** Times must not decrease. As in a batch, observations at one time see each other: when
    another one arrives, the states of those before it are computed again for all that follows.

    Args:
        module: An `OscillatorAttention`, `ResonatorLayer` or `Encoder`, fed with tokens `[B, D]`,
            or an `OsciFormer`, fed with values `[B, F]`, causal, in `eval` mode, and with a query
            other than `ridge`.
        batch_size: Number of series B that are fed side by side.
        static: Static features of the series, for an `OsciFormer` that has them.
        window: For how long to keep single observations, in the unit of the times; None for ever.

    Example:
        >>> session = OnlineSession(OsciFormer(2, dim=8, num_heads=2).eval())
        >>> session.observe(0.0, torch.tensor([[1.0, 2.0]])).shape, session.read(0.7).shape
        (torch.Size([1, 8]), torch.Size([1, 8]))
    """

    def __init__(
        self,
        module: OscillatorAttention | ResonatorLayer | Encoder | OsciFormer,
        *,
        batch_size: int = 1,
        static: Float[Tensor, "B S"] | None = None,
        window: float | None = None,
    ) -> None:
        if not isinstance(module, OscillatorAttention | ResonatorLayer | Encoder | OsciFormer):
            raise TypeError(
                "module must be an OscillatorAttention, ResonatorLayer, Encoder or OsciFormer; got"
                f" {type(module).__name__}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        if static is not None and not isinstance(module, OsciFormer):
            raise ValueError("static is given, but only an OsciFormer has static features")
        for part in module.modules():
            if isinstance(part, nn.Dropout) and part.training and part.p > 0:
                raise ValueError("the module's dropout is on; call module.eval() first")
        if window is not None and not 0 < window < float("inf"):
            raise ValueError(f"window must be a positive, finite length of time; got {window}")
        self.module, self.batch_size, self._static = module, batch_size, static
        self._lock = threading.Lock()
        self._encoder = module.encoder if isinstance(module, OsciFormer) else module
        if window is not None and isinstance(module, OsciFormer):
            window = window / float(module.time_scale.scale)
        if isinstance(self._encoder, Encoder):
            self._layers = [_stream(x.attention, x, batch_size, window) for x in self._encoder]
        else:
            self._layers = [_stream(self._encoder, None, batch_size, window)]
        weight = self._layers[0].attention.output_projection.weight
        self._last_token = weight.new_zeros(batch_size, self._encoder.dim)
        self._time = weight.new_zeros(batch_size, dtype=torch.float64)
        self._started = weight.new_zeros(batch_size, dtype=torch.bool)
        self._count = weight.new_zeros(batch_size, dtype=torch.long)
        no_scale = TimeScale().to(weight.device)
        self._scale = module.time_scale if isinstance(module, OsciFormer) else no_scale
        # The observations at the current time, whose states may still change.
        self._group = self._last_token[:, None][:, :0]
        self._group_present = self._started[:, None][:, :0]

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the lock, for copies."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set what `__getstate__` returned."""
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def num_observations(self) -> list[int]:
        """Number of observations of each series."""
        return cast("list[int]", self._count.tolist())

    @property
    def num_held(self) -> int:
        """Most observations, single or merged, that a layer holds of a series; 0 of resonators."""
        return max(layer.num_held for layer in self._layers)

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
            present: False for series without an observation in this step; their result is zero.
        """
        with self._lock:
            return self._observe(t, x, present)

    def _observe(self, t: float | Tensor, x: Tensor, present: Tensor | None) -> Tensor:
        present = self._per_series("present", True if present is None else present, torch.bool)
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
        self._count = self._count + present
        self._last_token = torch.where(present[:, None], token, self._last_token)
        return torch.where(present[:, None], self._finish(states[:, -1]), 0.0)

    @torch.no_grad()
    def read(self, t: float | Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """Return the states at a time (or one each) from the last observation on; store nothing."""
        with self._lock:
            return self._read(t)

    def _read(self, t: float | Tensor) -> Tensor:
        time = self._checked_time(t, torch.ones_like(self._started))
        states = self._last_token[:, None]
        for layer in self._layers:
            states = layer.read(states, time)
        return self._finish(states[:, -1])

    def _finish(self, states: Tensor) -> Tensor:
        """Return the states after the encoder's last norm."""
        return self._encoder.norm(states) if isinstance(self._encoder, Encoder) else states

    def _token(self, x: Tensor, present: Tensor) -> Tensor:
        module = self.module
        width = module.config.input_dim if isinstance(module, OsciFormer) else module.dim
        if x.shape != (self.batch_size, width):
            raise ValueError(f"x must be [B, F] = {[self.batch_size, width]}; got {list(x.shape)}")
        x = torch.where(present[:, None], x.to(self._time.device), 0.0)
        token = x.to(self._last_token.dtype)
        if isinstance(module, OsciFormer):
            token = cast("Tensor", module.embedding(x[:, None], static=self._static))[:, 0]
        # Attention would never forget it.
        bad = (~token.isfinite()).any(dim=1).nonzero().flatten().tolist()
        if bad:
            allowed = ", or NaN for a missing value" if isinstance(module, OsciFormer) else ""
            raise ValueError(
                f"x must be finite{allowed}, and not too large for {token.dtype}; series {bad[0]} "
                f"has {x[bad[0]].tolist()}. The session is as it was"
            )
        return token

    def _checked_time(self, t: float | Tensor, present: Tensor) -> Tensor:
        """Return a time in the unit of the module; refuse one that decreases or is not finite."""
        scale = self._scale
        time: Tensor = scale(self._per_series("t", t, torch.float64))
        bad = (present & ~(time.abs() <= _LARGEST_TIME)).nonzero().flatten().tolist()
        if bad:
            got = float(time[bad[0]] * scale.scale + scale.reference)
            limit = f"{_LARGEST_TIME * float(scale.scale):g}"
            raise ValueError(f"t must be finite; series {bad[0]} has t={got}, beyond {limit}")
        early = (present & self._started & (time < self._time)).nonzero().flatten().tolist()
        if early:
            b = early[0]
            got, last = (float(x[b] * scale.scale + scale.reference) for x in (time, self._time))
            raise ValueError(
                f"t must not decrease; series {b} has t={got:.17g} < {last:.17g}, its last "
                "observation. Start another session, or use the module on the whole batch"
            )
        return time

    def _per_series(self, name: str, value: float | Tensor, dtype: torch.dtype) -> Tensor:
        tensor = torch.as_tensor(value, dtype=dtype, device=self._time.device)
        if tensor.ndim > 0 and tensor.shape != (self.batch_size,):
            size, got = self.batch_size, list(tensor.shape)
            raise ValueError(f"{name} must be a number or [B] with B = {size}; got {got}")
        return tensor.expand(self.batch_size)


def _stream(
    layer: OscillatorAttention | ResonatorLayer,
    block: EncoderBlock | None,
    batch_size: int,
    window: float | None,
) -> _LayerStream | _ResonatorStream:
    """Return the memory of a layer, within its block if there is one."""
    if layer.direction != "causal":
        hint = "cannot be streamed: a row sees later tokens. Use direction='causal'"
        raise ValueError(f"direction={layer.direction!r} {hint}")
    if isinstance(layer, ResonatorLayer):
        return _ResonatorStream(layer, block, batch_size)
    return _LayerStream(layer, block, batch_size, window)


class _LayerStream:
    """The caches of one layer: `latest` has every observation, `settled` none at the last time."""

    def __init__(
        self,
        attention: OscillatorAttention,
        block: EncoderBlock | None,
        batch_size: int,
        window: float | None,
    ) -> None:
        self.attention, self.block, self.window = attention, block, window
        self.settings = step_settings(attention)
        stays = attention.drive() is not None or attention.key_equilibrium is not None
        if window is not None and stays:
            raise ValueError(
                "window needs oscillators that come to rest at 0, and this layer has drive_modes "
                "or equilibrium; leave window out"
            )
        self.limit = _FEWEST_MERGED  # of tokens, before some are merged
        self.latest: StepCache = empty_cache(batch_size, self.settings)
        self.settled = self.latest

    @property
    def num_held(self) -> int:
        return self.latest.times.shape[1]

    def observe(self, group: Tensor, present: Tensor, time: Tensor, tied: Tensor) -> Tensor:
        """Add the observations at one time, in place of those that were there before."""
        if not bool(tied.any()):
            self.settled = self.latest
        elif not bool(tied.all()):
            self.settled = merge(tied, self.settled, self.latest)
        if self.window is not None and self.settled.times.shape[1] > self.limit:
            self.settled = merge_old(self.settled, self.window)
            self.limit = self.settled.times.shape[1] * 5 // 4 + _FEWEST_MERGED
        tokens = group if self.block is None else self.block.attention_norm(group)
        queries = self.attention.project_queries(tokens)
        kv = self.attention.project_keys(tokens)
        arriving = None
        if queries is not None:
            first = present.to(torch.uint8).argmax(dim=1)[:, None, None, None]
            arriving = torch.take_along_dim(queries, first, dim=1)[:, 0]
        cache = advance(self.settled, self.settings, time, arriving)
        keys, values = ((x.start, x.velocity, x.equilibrium) for x in (kv.keys, kv.values))
        self.latest = append(cache, self.settings, keys, values, queries, present)
        return self._rows(self.latest, group, queries)

    def read(self, token: Tensor, time: Tensor) -> Tensor:
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


class _ResonatorStream:
    """The oscillators and the clock of one layer; `settled` is their state before the last time."""

    num_held = 0

    def __init__(self, layer: ResonatorLayer, block: EncoderBlock | None, batch_size: int) -> None:
        self.attention, self.block = layer, block
        omega, zeta = layer.spectrum.omega.detach().double(), layer.spectrum.zeta.detach()
        self.omega = omega
        options: Any = {"batch_size": batch_size, "drive": "hold", "initial": layer.initial()}
        self.stream = ResponseStream(omega, zeta, len(omega), **options)
        nothing = omega.new_zeros(batch_size)
        # What the clock showed at the last token, how fast it has run since, and its time.
        self.clock = {"shown": nothing, "speed": nothing, "time": nothing + torch.nan}
        self.settled = self._states()

    def observe(self, group: Tensor, present: Tensor, time: Tensor, tied: Tensor) -> Tensor:
        """Add the observations at one time, in place of those that were there before."""
        for settled, latest in zip(self.settled, self._states(), strict=True):
            for name, new in latest.items():
                is_tied = tied.view(-1, *[1] * (new.ndim - 1))
                settled[name] = torch.where(is_tied, settled[name], new)
        before, clock = self.settled
        tokens = self._normed(group)
        drive = self.attention.project_drive(tokens)
        drive = torch.where(present[..., None], drive, torch.nan)
        self.clock = dict(clock)
        shown = self._shown(time)
        _go_on(self.stream, before)
        for values in drive.unbind(dim=1):
            self.stream.step(shown, values)
        _go_on(self.stream, self.stream.state)
        if self.attention.clock is not None:
            now = {"shown": shown, "speed": clock["speed"], "time": time}
            speeds = self.attention.clock.speed(tokens)
            for speed, there in zip(speeds.unbind(1), present.unbind(1), strict=True):
                now["speed"] = torch.where(there, speed, now["speed"])
            came = present.any(dim=1)
            self.clock = {name: torch.where(came, now[name], clock[name]) for name in now}
        return self.read(group, time)

    def read(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Return the block's, or the layer's, output at a time."""
        x, v = self.stream.read(self._shown(time))
        position, velocity = (
            z.mT[:, None].to(tokens.dtype).expand(-1, tokens.shape[1], -1, -1)
            for z in (x, v / self.omega)
        )
        out = self.attention.project_output(position, velocity, self._normed(tokens))
        return out if self.block is None else self.block.residual(tokens, out)

    def _states(self) -> list[dict[str, Tensor]]:
        """Return the states of the oscillators and of the clock."""
        return [dict(self.stream.state), dict(self.clock)]

    def _shown(self, time: Tensor) -> Tensor:
        """Return what the clock shows at a time."""
        if self.attention.clock is None:
            return time
        since = (time - self.clock["time"]).nan_to_num(0.0)
        return self.clock["shown"] + self.clock["speed"] * since

    def _normed(self, tokens: Tensor) -> Tensor:
        return tokens if self.block is None else self.block.attention_norm(tokens)


def _go_on(stream: ResponseStream, state: dict[str, Tensor]) -> None:
    """Go on from a state, at any time: the session has checked those of series that started."""
    stream.load_state({**state, "now": torch.full_like(state["now"], -torch.inf)})


@torch.no_grad()
def step_settings(layer: OscillatorAttention) -> StepSettings:
    """Return what streaming needs of a layer; refuse one that looks ahead."""
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
