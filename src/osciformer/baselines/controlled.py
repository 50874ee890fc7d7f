"""Differential equations that a series drives: neural CDE, and its log-ODE method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.directions import DirectedBackbone, rows_before
from osciformer.models.backbones import register_backbone
from osciformer.models.forward_fill import forward_fill
from osciformer.nn.encoder import with_indicators
from osciformer.ops.attention.ties import take_rows
from osciformer.ops.padding import clean_times
from osciformer.ops.response.path import fill


class ControlPath(NamedTuple):
    """A piecewise linear path: time, values, and log(1 + n) / 3 of each feature's n measurements.

    The published path has n itself, which on long series drives a field harder than all else.
    """

    start: Float[Tensor, "B C"]
    pieces: Float[Tensor, "B N P C"]  # increments from the row before, in turn; 0 at the first
    slope: Float[Tensor, "B N C"]  # by which the path leaves a row, per unit of time


def control_path(values: Values, times: Times, mask: Mask, *, looks_ahead: bool) -> ControlPath:
    """Return the path of a series, of C = 1 + 2 F channels; times are those of `clean_times`.

    It is rectilinear: time goes on while values are held, then they jump; a feature is 0 until it
    is measured. If it `looks_ahead`, it is linear between a feature's neighbours in time.
    """
    measured = ~values.isnan() & mask[..., None]
    if looks_ahead:
        filled = fill(values, times, measured, is_straight=True)
    else:
        filled = forward_fill(values, times, mask)[0].nan_to_num(0.0)
    counts = measured.to(filled.dtype).cumsum(dim=1).log1p() / 3.0
    known = torch.cat((filled, counts), dim=-1)
    since = (times - times[:, :1])[..., None].to(known.dtype)
    path = torch.cat((since, known), dim=-1)
    change = torch.diff(path, dim=1, prepend=path[:, :1])
    clock = torch.cat((torch.ones_like(since), torch.zeros_like(known)), dim=-1)
    if not looks_ahead:
        moved = change * clock
        return ControlPath(path[:, 0], torch.stack((moved, change - moved), dim=2), clock)
    coming = torch.diff(path, dim=1, append=path[:, -1:])
    gap = coming[..., :1]
    slope = torch.where(gap > 0, coming / torch.where(gap > 0, gap, 1.0), clock)
    return ControlPath(path[:, 0], change[:, :, None], slope)


class LogSignature(NamedTuple):
    r"""Depth 2: the increment, and the area $A_{ij} = \frac12 \int X_i dX_j - X_j dX_i$."""

    increment: Float[Tensor, "*S C"]
    area: Float[Tensor, "*S C C"]

    def extended(self, piece: Float[Tensor, "*S C"]) -> LogSignature:
        """Return that of the path with a straight piece at its end."""
        return LogSignature(self.increment + piece, self.area + _wedge(self.increment, piece))


def log_signatures(pieces: Float[Tensor, "B N P C"], window: int) -> LogSignature:
    """Return the log-signatures of pieces in windows of N `[B, W, window, ...]`.

    Each goes from the start of its window to the end of the pieces of one n; pieces of 0 fill up.
    """
    filled = functional.pad(pieces, (0, 0, 0, 0, 0, -pieces.shape[1] % window))
    steps = filled.unflatten(1, (-1, window)).flatten(2, 3)
    total = steps.cumsum(dim=2)
    area = _wedge(total - steps, steps).cumsum(dim=2)
    last = slice(pieces.shape[2] - 1, None, pieces.shape[2])
    return LogSignature(total[:, :, last], area[:, :, last])


def _wedge(x: Tensor, y: Tensor) -> Tensor:
    product = x[..., :, None] * y[..., None, :]
    return 0.5 * (product - product.mT)


def runge_kutta(flow: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return x after one unit of time, by one step of the classical method."""
    k1 = flow(x)
    k2 = flow(x + 0.5 * k1)
    k3 = flow(x + 0.5 * k2)
    k4 = flow(x + k3)
    return x + (k1 + 2.0 * (k2 + k3) + k4) / 6.0


class ControlledField(nn.Module):
    """A perceptron $f(z)$ `[.., D, C]` with values in [-1, 1], one vector for each channel.

    It starts small, so that many channels together do not make the equation explode.
    """

    def __init__(self, dim: int, channels: int, num_layers: int) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1; got {num_layers}")
        self.hidden = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.last = nn.Linear(dim, dim * channels)
        with torch.no_grad():
            self.last.weight.mul_(channels**-0.5)
            self.last.bias.mul_(channels**-0.5)
        self.shape = (dim, channels)

    def forward(self, states: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D C"]:
        """Return the vectors."""
        for layer in self.hidden:
            states = layer(states).tanh()
        vectors: Tensor = self.last(states).tanh()
        return vectors.unflatten(-1, self.shape)

    def along(self, states: Tensor, increment: Float[Tensor, "*S C"]) -> Float[Tensor, "*S D"]:
        r"""Return $\sum_i f_i\,\Delta X_i$."""
        return torch.einsum("...dc,...c->...d", self(states), increment)

    def along_signature(self, states: Tensor, found: LogSignature) -> Float[Tensor, "*S D"]:
        r"""Return $\sum_i f_i\,\Delta X_i + \sum_{i<j} A_{ij} [f_i, f_j]$.

        As A is antisymmetric, the second sum is $\sum_j Df_j\,w_j$ with $w_j = \sum_i A_{ij} f_i$.
        """
        vectors = self(states)
        ways = torch.einsum("...dc,...ce->...ed", vectors, found.area)  # [*S, C, D]
        for layer in self.hidden:  # the derivative along all ways at once
            states = layer(states).tanh()
            slope = (1.0 - states.square())[..., None, :]
            ways = functional.linear(ways, cast("nn.Linear", layer).weight) * slope
        weight = self.last.weight.unflatten(0, self.shape)
        bracket = torch.einsum("...ch,dch->...dc", ways, weight) * (1.0 - vectors.square())
        return (vectors * found.increment[..., None, :] + bracket).sum(-1)


@dataclass(frozen=True)
class _EncodedPath:
    states: Tokens
    times: Times
    mask: Mask
    slope: Tensor
    origins: tuple[Tensor, ...]  # from where each row's state, and what follows it, is found


class ControlledEquation(nn.Module):
    r"""$dz = f(z)\,dX$ over one direction of time: each piece of the path is a Runge-Kutta step.

    At the first row z is a linear map of the path and of the static features. With `control_dim`
    the path goes through a learned linear map first.
    """

    def __init__(
        self,
        input_dim: int,
        dim: int,
        *,
        static_dim: int,
        num_layers: int,
        looks_ahead: bool,
        control_dim: int | None,
    ) -> None:
        super().__init__()
        channels, self.looks_ahead = 1 + 2 * input_dim, looks_ahead
        self.initial = nn.Linear(channels + 2 * static_dim, dim)
        self.mix: nn.Module = nn.Identity()
        if control_dim is not None:
            self.mix, channels = nn.Linear(channels, control_dim, bias=False), control_dim
        self.field = ControlledField(dim, channels, num_layers)

    def forward(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> _EncodedPath:
        """Return the states of the series."""
        times = clean_times(times, mask)
        path = control_path(values, times, mask, looks_ahead=self.looks_ahead)
        start = path.start
        if static is not None:
            start = torch.cat((start, with_indicators(static).to(start.dtype)), dim=-1)
        states, origins = self._solve(self.initial(start), self.mix(path.pieces)[:, 1:])
        return _EncodedPath(states, times, mask, self.mix(path.slope), origins)

    def read(self, encoded: _EncodedPath, query_times: QueryTimes) -> Reads:
        """Return the states at any times, along the path since the row before; zero before all."""
        row, since, is_before = rows_before(encoded.times, query_times, encoded.mask)
        piece = take_rows(encoded.slope, row) * since[..., None].to(encoded.slope.dtype)
        origins = (take_rows(x, row) for x in encoded.origins)
        return self._move(*origins, piece=piece).masked_fill(is_before, 0.0)

    def _solve(self, state: Tensor, pieces: Tensor) -> tuple[Tokens, tuple[Tensor, ...]]:
        """Return the states of all rows, and their origins."""
        states = [state]
        for row in pieces.unbind(1):
            for piece in row.unbind(1):
                state = self._move(state, piece=piece)
            states.append(state)
        found = torch.stack(states, dim=1)
        return found, (found,)

    def _move(self, state: Tensor, *, piece: Tensor) -> Tensor:
        """Return where a straight piece of the path leads from origins."""
        return runge_kutta(partial(self.field.along, increment=piece), state)


class LogControlledEquation(ControlledEquation):
    r"""The same by the log-ODE method of depth 2: one step for each window of rows.

    $$z' = \sum_i f_i(z)\,\Delta X_i + \sum_{i<j} A_{ij} [f_i, f_j](z)$$

    over one unit of time. Rows within a window are reached from its start, all at once.
    """

    def __init__(self, *sizes: int, window: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.window = window

    def _solve(self, state: Tensor, pieces: Tensor) -> tuple[Tokens, tuple[Tensor, ...]]:
        windows = log_signatures(pieces, self.window)
        starts = [state, state]  # the first row is a window of its own
        for n in range(windows.area.shape[1] - 1):
            whole = LogSignature(*(x[:, n, -1] for x in windows))
            starts.append(self._jump(starts[-1], whole))
        rows = torch.arange(pieces.shape[1] + 1, device=pieces.device)
        origin = torch.stack(starts, dim=1)[:, (rows + self.window - 1) // self.window]
        increment, area = (
            torch.cat((x.new_zeros(len(x), 1, *x.shape[3:]), x.flatten(1, 2)), dim=1)[
                :, : len(rows)
            ]
            for x in windows
        )
        return self._jump(origin, LogSignature(increment, area)), (origin, increment, area)

    def _move(self, *origins: Tensor, piece: Tensor) -> Tensor:
        state, *found = origins
        return self._jump(state, LogSignature(*found).extended(piece))

    def _jump(self, state: Tensor, found: LogSignature) -> Tensor:
        return runge_kutta(partial(self.field.along_signature, found=found), state)


_OPTIONS = ("direction", "control_dim")


@register_backbone("neural_cde", settings=("num_layers",), options=_OPTIONS)
class NeuralCDE(DirectedBackbone):
    """A neural controlled differential equation as a backbone; a read is its solution there.

    Kidger et al., "Neural Controlled Differential Equations for Irregular Time Series", NeurIPS
    2020; the rectilinear path is that of Morrill et al., "Neural Controlled Differential Equations
    for Online Prediction Tasks", 2021. Each piece of the path costs four times D C outputs: with
    many features `carry=False` saves most of it, and the path holds last values anyway.

    Args:
        input_dim: Number of input columns F; the path has 1 + 2 F channels.
        static_dim: Number of static features S.
        dim: Width D.
        num_layers: Hidden layers of the field.
        direction: `causal`: a rectilinear path; or `bidirectional`: a linear one, and half of the
            width runs backwards in time.
        control_dim: Channels to which a learned map takes the path; None is no map.
    """

    _equation: ClassVar[type[ControlledEquation]] = ControlledEquation

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 2,
        direction: str = "causal",
        control_dim: int | None = None,
        **options: int,
    ) -> None:
        options |= {"static_dim": static_dim, "num_layers": num_layers}
        settings: Any = {**options, "looks_ahead": direction == "bidirectional"}
        make = partial(self._equation, input_dim, control_dim=control_dim, **settings)
        super().__init__(make, dim, direction)


@register_backbone("log_ncde", settings=("num_layers",), options=(*_OPTIONS, "window"))
class LogNeuralCDE(NeuralCDE):
    """A neural CDE, solved by the log-ODE method over windows of some rows.

    Walker et al., "Log Neural Controlled Differential Equations: The Lie Brackets Make a
    Difference", ICML 2024. The brackets of C channels cost C times the field, so a learned map
    takes the path to few ones, unless `control_dim` is None.
    """

    _equation = LogControlledEquation

    def __init__(
        self,
        input_dim: int,
        *,
        control_dim: int | None = 8,
        window: int = 8,
        **settings: Any,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 row; got {window}")
        super().__init__(input_dim, control_dim=control_dim, window=window, **settings)
