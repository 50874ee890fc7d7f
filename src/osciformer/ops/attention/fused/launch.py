"""Tile sizes, buffers and launches of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from osciformer.ops.attention.fused.attend import SPAN, is_interpreted
from osciformer.ops.attention.fused.closed_form import NUM_PLANES, build_table
from osciformer.ops.attention.fused.near_launch import run_near
from osciformer.ops.attention.fused.spans import set_up, span_matrices
from osciformer.ops.attention.fused.sweep_forward import sweep_forward

#: Tokens of a tile, within which pairs are near; also the spans of the middle stage.
TILE = 64


@dataclass(frozen=True)
class Stage:
    """How one stage of the sweep is cut.

    Attributes:
        span: Keys with one reference time.
        group: Spans a row may meet at this stage, its own and those before; 0 is all.
        rows: Rows a program; divides `span`.
        step: Keys at a time.
        warps: Warps a program.
        stages: Depth of the pipeline.
        registers: Limit of registers a thread, so that more programs share a processor.
        is_split: Whether the backward pass along keys takes keys and values in turn.
    """

    span: int
    group: int
    rows: int
    step: int
    warps: int
    stages: int
    registers: int | None = None
    is_split: bool = False


@dataclass(frozen=True)
class Tiling:
    """How a head size is cut.

    Attributes:
        middle: The sweep over the tiles of a row's own span.
        far: The sweep over the spans before it.
        rows: Both in the backward pass, along rows.
        keys: Both in the backward pass, along keys.
    """

    middle: Stage
    far: Stage
    rows: tuple[Stage, Stage]
    keys: tuple[Stage, Stage]


def tiling(channels: int, dtype: torch.dtype) -> Tiling:
    """Return the tile sizes for a head size and the dtype of the products."""
    group, narrow = SPAN // TILE, 4 if channels <= 32 else 8
    if dtype == torch.bfloat16 and channels <= 32:
        return Tiling(
            middle=Stage(TILE, group, TILE, 64, 4, 2),
            far=Stage(SPAN, 0, 64, 64, 4, 2, registers=168),
            rows=(Stage(TILE, group, TILE, 64, 4, 2), Stage(SPAN, 0, 64, 64, 4, 2)),
            keys=(
                Stage(TILE, group, TILE, 64, 4, 1, is_split=True),
                Stage(SPAN, 0, 128, 64, 8, 2),
            ),
        )
    if dtype == torch.bfloat16 and channels == 64:
        return Tiling(
            middle=Stage(TILE, group, TILE, 64, 8, 2),
            far=Stage(SPAN, 0, 128, 64, 8, 3),
            rows=(Stage(TILE, group, TILE, 32, 4, 1), Stage(SPAN, 0, 64, 32, 4, 2)),
            keys=(
                Stage(TILE, group, TILE, 64, 8, 1),
                Stage(SPAN, 0, 64, 32, 4, 2, is_split=True),
            ),
        )
    # Twice the channels or twice the bytes: smaller steps, so that all fits.
    is_huge = channels == 128 and dtype != torch.bfloat16
    rows, step = 32 if is_huge else 64, 32 if channels >= 64 else 64
    middle = Stage(TILE, group, rows, step, narrow, 1)
    far = Stage(SPAN, 0, rows, step, narrow, 1)
    step = step if dtype == torch.bfloat16 or channels <= 32 else 16
    is_split = channels >= 64
    back = (
        Stage(TILE, group, rows, step, narrow, 1, is_split=is_split),
        Stage(SPAN, 0, rows, step, narrow, 1, is_split=is_split),
    )
    return Tiling(middle=middle, far=far, rows=back, keys=back)


@dataclass(frozen=True)
class Precision:
    """How products run: dtype of the operands, name of the float32 mode, float64 closed forms."""

    operand: torch.dtype
    name: str
    is_precise: bool

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the kernels."""
        kinds = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
        return {"OPERAND": kinds[self.operand], "PREC": self.name, "PRECISE": self.is_precise}


def precision(dtype: torch.dtype) -> Precision:
    """Return the precision for tokens of `dtype`.

    float16 tokens get tf32 products: as many digits, but a range that integrals over long times
    cannot leave.
    """
    if dtype == torch.bfloat16:
        return Precision(torch.bfloat16, "upcast" if is_interpreted() else "tf32", False)
    if dtype == torch.float16:
        return Precision(torch.float32, "tf32", False)
    return Precision(torch.float32, "tf32x3", True)


def padded_length(length: int, channels: int, dtype: torch.dtype) -> int:
    """Return the number of rows of the buffers for a series of `length`."""
    cut = tiling(channels, precision(dtype).operand)
    unit = max(TILE, cut.far.rows, cut.keys[1].rows)
    return (length + unit - 1) // unit * unit


def spectrum_table(gamma: Tensor, omega2: Tensor) -> Tensor:
    """Return the constants of `closed_form.load_spectrum`, ``[H, planes, C]`` float64."""
    heads, channels = gamma.shape
    table = torch.empty(
        (heads, NUM_PLANES.value, channels), dtype=torch.float64, device=gamma.device
    )
    build_table[(heads,)](
        gamma.detach().double().contiguous(),
        omega2.detach().double().contiguous(),
        table,
        C=channels,
        num_warps=1,
    )
    return table


def spectrum_tables(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables of keys and values from their spectra ``[2, H, C]``."""
    return spectrum_table(*key.unbind(0)), spectrum_table(*value.unbind(0))


@dataclass
class Call:
    """One call: tokens ``[B, N, H, C]`` that share their times, and what does not change.

    Where all rows share the query's path, `moment` ``[B H, 2, padded, C]`` float32 are its
    integrals over the gaps after the tokens (`path_pieces`), and `q` is the path at the tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_velocity: Tensor | None
    value_velocity: Tensor | None
    times: Tensor
    mask: Tensor | None
    key_table: Tensor
    value_table: Tensor
    scale: float
    is_average: bool
    is_strict: bool
    moment: Tensor | None = None

    def __post_init__(self) -> None:
        self.batch, self.length, self.heads, self.channels = self.q.shape
        self.precision = precision(self.q.dtype)
        self.tiling = tiling(self.channels, self.precision.operand)
        self.num_planes = self.batch * self.heads
        self.padded = padded_length(self.length, self.channels, self.q.dtype)

    @property
    def logit_scale(self) -> float:
        """The scale of logits to base 2."""
        return self.scale / math.log(2.0)

    def buffer(self, planes: int, dtype: torch.dtype) -> Tensor:
        """Return an empty ``[B H, planes, padded, C]``."""
        shape = (self.num_planes, planes, self.padded, self.channels)
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def per_row(self) -> Tensor:
        """Return an empty ``[B H, padded]`` float32."""
        shape = (self.num_planes, self.padded)
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def near_options(self) -> dict[str, Any]:
        """Return the arguments of the near kernels that are known when they are compiled."""
        return {
            "HAS_KU": self.key_velocity is not None,
            "HAS_VU": self.value_velocity is not None,
            "HAS_MASK": self.mask is not None,
            "STRICT": self.is_strict,
            "AVERAGE": self.is_average,
            "TILE": TILE,
            "LEVELS": TILE.bit_length() - 1,
            "C": self.channels,
            "WIDTH": 16,
            # Products of 64 rows on 8 warps have read beyond shared memory (Triton 3.6).
            "num_warps": 4,
            **self.precision.options,
        }

    def sides(self) -> tuple[tuple[Tensor, Tensor | None, Tensor, bool], ...]:
        """Return tokens, velocities, table and kind of row factor of keys and of values."""
        return (
            (self.k, self.key_velocity, self.key_table, self.moment is None),
            (self.v, self.value_velocity, self.value_table, self.is_average),
        )

    @property
    def mask_or_times(self) -> Tensor:
        """The mask, or a pointer that no kernel reads."""
        return self.times if self.mask is None else self.mask


@dataclass
class Prepared:
    """Set-up of a stage: states at span ends, row factors from span starts, spans between.

    Under a shared path also its integrals against each key, to the span's end: `bias`.
    """

    key_state: Tensor
    value_state: Tensor
    key_factor: Tensor
    value_factor: Tensor
    matrices: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None


def empty_set_up(call: Call) -> Prepared:
    """Return buffers for a set-up; the stages take turns in using them."""
    operand = call.precision.operand
    return Prepared(
        call.buffer(3, operand),
        call.buffer(3, operand),
        call.buffer(2, operand),
        call.buffer(2, operand),
    )


def fill_set_up(call: Call, stage: Stage, prepared: Prepared) -> None:
    """Write states and row factors of a stage."""
    rows = 64
    buffers = (
        (prepared.key_state, prepared.key_factor),
        (prepared.value_state, prepared.value_factor),
    )
    for (x, u, table, is_average), (state, factor) in zip(call.sides(), buffers, strict=True):
        set_up[(call.padded // rows, call.heads, call.batch)](
            x,
            x if u is None else u,
            call.times,
            call.mask_or_times,
            table,
            state,
            factor,
            call.length,
            call.padded,
            call.heads,
            HAS_U=u is not None,
            HAS_MASK=call.mask is not None,
            AVERAGE=is_average,
            SPAN=stage.span,
            ROWS=rows,
            C=call.channels,
            PRECISE=call.precision.is_precise,
            num_warps=4,
        )


def num_groups(call: Call, stage: Stage) -> tuple[int, int]:
    """Return the number of spans of a series and how many of them a row may meet."""
    spans = triton.cdiv(call.length, stage.span)
    return spans, stage.group or spans


def fill_matrices(call: Call, stage: Stage, prepared: Prepared, planes: int = 6) -> None:
    """Write the spans between the ends of key spans and the starts of row spans."""
    spans, group = num_groups(call, stage)
    shape = (call.num_planes, spans, group, planes, call.channels)
    prepared.matrices = None  # those of the stage before, in case, must not stay beside the new
    found = []
    for _, _, table, is_average in call.sides():
        matrix = torch.empty(shape, dtype=torch.float32, device=call.q.device)
        span_matrices[(spans, call.heads, call.batch)](
            call.times,
            table,
            matrix,
            call.length,
            call.heads,
            SPAN=stage.span,
            GROUP=group,
            PLANES=planes,
            AVERAGE=is_average,
            WIDTH=8,
            C=call.channels,
            PRECISE=call.precision.is_precise,
            num_warps=4,
        )
        found.append(matrix)
    prepared.matrices = (found[0], found[1])


def sweep_options(call: Call, stage: Stage, planes: int = 6) -> dict[str, Any]:
    """Return the arguments of the sweep kernels that are known when they are compiled."""
    return {
        "SHARED": call.moment is not None,
        "HAS_MASK": call.mask is not None,
        "AVERAGE": call.is_average,
        "SPAN": stage.span,
        "GROUP": num_groups(call, stage)[1],
        "PLANES": planes,
        "STEP": stage.step,
        "ROWS": stage.rows,
        "C": call.channels,
        "STAGES": stage.stages,
        "PREC": call.precision.name,
        "OPERAND": call.precision.options["OPERAND"],
        "num_warps": stage.warps,
        "num_stages": stage.stages,
        **({} if stage.registers is None else {"maxnreg": stage.registers}),
    }


def run_sweep(
    call: Call, stage: Stage, prepared: Prepared, acc: Tensor, lse: Tensor, out: Tensor | None
) -> None:
    """Run a stage of the sweep; with `out` it is the last one."""
    assert prepared.matrices is not None
    sweep_forward[(triton.cdiv(call.length, stage.rows), call.heads, call.batch)](
        call.q,
        call.times,
        call.mask_or_times,
        prepared.key_state,
        prepared.value_state,
        prepared.key_factor,
        prepared.value_factor,
        *prepared.matrices,
        lse if prepared.bias is None else prepared.bias,
        acc,
        lse,
        acc if out is None else out,
        call.length,
        call.padded,
        call.heads,
        call.logit_scale,
        IS_LAST=out is not None,
        **sweep_options(call, stage),
    )


def run_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp to base 2, ``[B H, padded]``."""
    acc, lse, out = call.buffer(1, torch.float32), call.per_row(), torch.empty_like(call.q)
    prepared = empty_set_up(call)
    run_near(call, prepared, acc, lse)
    middle, far = call.tiling.middle, call.tiling.far
    fill_matrices(call, middle, prepared)
    has_far = call.length > far.span
    run_sweep(call, middle, prepared, acc, lse, None if has_far else out)
    if has_far:
        fill_set_up(call, far, prepared)
        fill_matrices(call, far, prepared)
        run_sweep(call, far, prepared, acc, lse, out)
    return out, lse
