"""One call of the kernels: its tensors, its precision, and how its stages are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from osciformer.ops.attention.triton.closed_form import NUM_PLANES, build_table
from osciformer.ops.attention.triton.compilation import launch
from osciformer.ops.attention.triton.primitives import TILE, Format, Side, Tokens, sizes_of
from osciformer.ops.attention.triton.sweep import Cut, span_times

#: Tokens of a span of the far stage.
SPAN = 512
#: Spans of the far stage that form one of the last stage, in long series.
WIDE = 8
# Rows of all heads and series from which on a call is done in two parts.
_MANY_ROWS = 2**17


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def format_for(channels: int, dtype: torch.dtype, is_average: bool = True) -> Format:
    """Return the precision for tokens of `dtype`."""
    if dtype == torch.bfloat16:
        mode = "upcast" if is_interpreted() else "tf32"
        return Format(channels, tl.bfloat16, mode, False, is_average)
    if dtype == torch.float16:
        # tf32 has as many digits, and a range that integrals over long times cannot leave.
        return Format(channels, tl.float32, "tf32", False, is_average)
    return Format(channels, tl.float32, "tf32x3", True, is_average)


# --- How the stages are cut. ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """How one stage of the sweep is cut."""

    span: int  # keys with one reference time
    group: int  # spans a row may meet at this stage, its own and those before; 0 is all
    rows: int  # rows a program; divides `span`
    step: int  # keys at a time
    warps: int  # warps a program
    stages: int  # depth of the pipeline
    registers: int | None = None  # limit a thread, so that more programs share a processor
    is_split: bool = False  # whether the backward pass takes keys and values in turn

    def cut(self, of_keys: bool, of_values: bool) -> Cut:
        """Return what the sweep kernels are compiled for."""
        return Cut(self.span, self.rows, self.step, self.stages, of_keys, of_values)


@dataclass(frozen=True)
class Tiling:
    """How a head size is cut: the sweep over tiles of a row's own span, and over spans before."""

    forward: tuple[Stage, Stage]
    rows: tuple[Stage, Stage]  # backward along rows
    keys: tuple[Stage, Stage]  # backward along keys


def tiling(channels: int, dtype: torch.dtype) -> Tiling:
    """Return the tile sizes for a head size and the dtype of the products."""
    tile: int = TILE.value
    group = SPAN // tile
    if dtype == torch.bfloat16 and channels <= 32:
        middle = Stage(tile, group, tile, 64, 4, 2)
        return Tiling(
            forward=(middle, Stage(SPAN, 0, 64, 64, 4, 2, registers=168)),
            rows=(middle, Stage(SPAN, 0, 64, 64, 4, 2)),
            keys=(Stage(tile, group, tile, 64, 4, 1, is_split=True), Stage(SPAN, 0, 128, 64, 8, 2)),
        )
    if dtype == torch.bfloat16 and channels == 64:
        return Tiling(
            forward=(Stage(tile, group, tile, 64, 8, 2), Stage(SPAN, 0, 128, 64, 8, 3)),
            rows=(Stage(tile, group, tile, 32, 4, 1), Stage(SPAN, 0, 64, 32, 4, 2)),
            keys=(Stage(tile, group, tile, 64, 8, 1), Stage(SPAN, 0, 64, 32, 4, 2, is_split=True)),
        )
    # Twice the channels or twice the bytes: smaller steps, so that all fits. Products of 64 rows on
    # 8 warps in float32 have read outside shared memory (Triton 3.6).
    is_large = channels >= 64 and dtype != torch.bfloat16
    rows, step = 32 if is_large else 64, 32 if channels >= 64 else 64
    middle = Stage(tile, group, rows, step, 8 if channels == 128 else 4, 1)
    back = replace(middle, step=16 if is_large else step, is_split=channels >= 64)
    both = (back, replace(back, span=SPAN, group=0))
    return Tiling(forward=(middle, replace(middle, span=SPAN, group=0)), rows=both, keys=both)


def stages_for(stages: tuple[Stage, Stage], length: int) -> list[Stage]:
    """Return the stages that a series of `length` takes, at least the first.

    In long series spans of the far stage form spans in their turn: fewer moves of rows or keys
    from one to the next.
    """
    middle, far = stages
    wide = replace(far, span=far.span * WIDE, group=0)
    if length <= far.span:
        return [middle]
    return [middle, far] if length <= 2 * wide.span else [middle, replace(far, group=WIDE), wide]


def padded_length(length: int, channels: int, dtype: torch.dtype) -> int:
    """Return the number of rows of the buffers for a series of `length`."""
    cut = tiling(channels, format_for(channels, dtype).dtype)
    unit = max(TILE.value, cut.forward[1].rows, cut.keys[1].rows)
    return (length + unit - 1) // unit * unit


# --- The call. ------------------------------------------------------------------------------------


def spectrum_table(spectrum: Tensor) -> Tensor:
    """Return ``[H, planes, C]`` float64 for `closed_form.load_spectrum`, from gamma and omega^2."""
    _, heads, channels = spectrum.shape
    shape = (heads, NUM_PLANES.value, channels)
    table = torch.empty(shape, dtype=torch.float64, device=spectrum.device)
    gamma, omega2 = (x.contiguous() for x in spectrum.detach().double())
    launch(build_table, (heads,), gamma, omega2, table, C=channels, num_warps=1)
    return table


@dataclass
class Call:
    """One call: tokens that share their times, and what does not change.

    If all rows share the query's path, `path` ``[B H, 2, padded, C]`` float32 are its integrals
    over the gaps after the tokens (`path_integrals`), and the queries are the path at the tokens.
    """

    tokens: Tokens  # contiguous, or a part of the heads of one series that are
    scale: float
    is_average: bool
    is_strict: bool
    path: Tensor | None = None

    def __post_init__(self) -> None:
        q: Tensor = self.tokens.q
        self.device = q.device
        self.batch, self.length, self.heads, self.channels = q.shape
        self.format = format_for(self.channels, q.dtype, self.is_average)
        self.tiling = tiling(self.channels, self.format.dtype)
        self.num_planes = self.batch * self.heads
        self.padded = padded_length(self.length, self.channels, q.dtype)
        # Tokens of one head are that many heads apart.
        stride = q.stride(1) // self.channels
        logit_scale = self.scale / math.log(2.0)
        self.sizes = sizes_of(self.length, self.padded, stride, self.scale, logit_scale)
        self._span_times: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def has_far(self) -> bool:
        """Whether rows meet keys of other far spans."""
        return self.length > self.tiling.forward[1].span

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid of kernels whose programs take `rows` rows."""
        return self.padded // rows, self.heads, self.batch

    def sides(self) -> tuple[tuple[Side, Format], tuple[Side, Format]]:
        """Return keys and values; a side's format says whether its row factors are integrals."""
        of_keys = replace(self.format, AVERAGE=self.path is None)
        return (self.tokens.k, of_keys), (self.tokens.v, self.format)

    def num_spans(self, stage: Stage) -> tuple[int, int]:
        """Return the number of spans of a series and how many of them a row may meet."""
        spans = triton.cdiv(self.length, stage.span)
        return spans, stage.group or spans

    def new(self, *shape: int) -> Tensor:
        """Return an empty float32 tensor."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def buffer(self, planes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an empty ``[B H, planes, padded, C]``."""
        shape = (self.num_planes, planes, self.padded, self.channels)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def per_row(self) -> Tensor:
        """Return an empty ``[B H, padded]`` float32."""
        return self.new(self.num_planes, self.padded)

    def span_times(self, span: int) -> tuple[Tensor, Tensor]:
        """Return times from the start and to the end of tokens' spans, in logits' units."""
        if span not in self._span_times:
            age, rest = (self.new(self.batch, self.padded) for _ in range(2))
            sizes, rows = (self.length, self.padded, 1.0 / self.sizes.logit_scale), 256
            grid, given = (
                (triton.cdiv(self.padded, rows), self.batch),
                (self.tokens.times, age, rest),
            )
            launch(span_times, grid, *given, *sizes, SPAN=span, ROWS=rows, num_warps=4)
            self._span_times[span] = age, rest
        return self._span_times[span]

    def parts(self) -> list[tuple[slice, slice]]:
        """Return series and heads that are done one after another, so that they share memory."""
        whole = slice(None)
        # Two parts have enough rows each to keep the device busy.
        is_small = self.num_planes * self.padded < _MANY_ROWS or self.num_planes == 1
        if is_small or self.path is not None:
            return [(whole, whole)]
        if self.batch > 1:
            return [(piece, whole) for piece in _halves(self.batch)]
        return [(whole, piece) for piece in _halves(self.heads)]

    def part(self, series: slice, heads: slice) -> Call:
        """Return the call for some of the series, or for some heads of the only one."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[series, :, heads]

        q, k, v, times, mask = self.tokens
        k, v = (Side(cut(x.x), cut(x.velocity), x.spectrum[heads]) for x in (k, v))
        mask = None if mask is None else mask[series]
        return replace(self, tokens=Tokens(cut(q), k, v, times[series], mask))

    def planes_of(self, x: Tensor, series: slice, heads: slice) -> Tensor:
        """Return the part of ``[B H, ...]`` that belongs to a part of the call."""
        return x.unflatten(0, (self.batch, self.heads))[series, heads].flatten(0, 1)


def _halves(count: int) -> tuple[slice, slice]:
    half = (count + 1) // 2
    return slice(0, half), slice(half, count)
