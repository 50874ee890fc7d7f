"""Buffers and launches of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from osciformer.ops.attention.fused.attend import is_interpreted
from osciformer.ops.attention.fused.closed_form import NUM_PLANES, build_table
from osciformer.ops.attention.fused.near_launch import run_near
from osciformer.ops.attention.fused.spans import set_up, span_matrices, span_times
from osciformer.ops.attention.fused.sweep_forward import sweep_forward
from osciformer.ops.attention.fused.tiling import TILE, Stage, reaching, tiling

# Rows of all heads and series from which on a call is done in two parts.
_MANY_ROWS = 2**17


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

    Tokens are contiguous, or a part of the heads of one series that are.

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
        # Tokens of one head are that many heads apart.
        self.stride = self.q.stride(1) // self.channels
        self._span_times: dict[int, tuple[Tensor, Tensor]] = {}

    def part(self, series: slice, heads: slice) -> Call:
        """Return the call for some of the series, or for some heads of the only one."""
        q, k, v, key_velocity, value_velocity = (
            None if x is None else x[series, :, heads]
            for x in (self.q, self.k, self.v, self.key_velocity, self.value_velocity)
        )
        assert q is not None
        assert k is not None
        assert v is not None
        return Call(
            q,
            k,
            v,
            key_velocity,
            value_velocity,
            self.times[series],
            None if self.mask is None else self.mask[series],
            self.key_table[heads],
            self.value_table[heads],
            self.scale,
            self.is_average,
            self.is_strict,
        )

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

    def span_times(self, span: int) -> tuple[Tensor, Tensor]:
        """Return times from the start and to the end of the tokens' spans, in units of logits.

        Both are ``[B, padded]`` float32.
        """
        if span not in self._span_times:
            shape, rows = (self.batch, self.padded), 256
            age, rest = (
                torch.empty(shape, dtype=torch.float32, device=self.q.device) for _ in range(2)
            )
            span_times[(triton.cdiv(self.padded, rows), self.batch)](
                self.times,
                age,
                rest,
                self.length,
                self.padded,
                1.0 / self.logit_scale,
                SPAN=span,
                ROWS=rows,
                num_warps=4,
            )
            self._span_times[span] = age, rest
        return self._span_times[span]

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
            # On 4 and on 8 warps bfloat16 products of 64 rows over 16 channels have read beyond
            # shared memory (Triton 3.6, found by compute-sanitizer); float32 needs the registers.
            "num_warps": 4 if self.precision.is_precise and self.channels <= 32 else 2,
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
            call.stride,
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
            call.stride,
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
        call.span_times(stage.span)[1],
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
        call.stride,
        call.logit_scale,
        IS_LAST=out is not None,
        **sweep_options(call, stage),
    )


def cut_in_parts(call: Call) -> list[tuple[slice, slice]]:
    """Return series and heads that are done one after another, so that they share memory.

    Two parts, each of enough rows to keep the device busy; fewer rows are one.
    """
    num_series, num_heads = call.batch, call.heads
    if num_series * num_heads * call.padded < _MANY_ROWS or num_series * num_heads == 1:
        return [(slice(None), slice(None))]
    if num_series > 1:
        return [(piece, slice(None)) for piece in _halves(num_series)]
    return [(slice(None), piece) for piece in _halves(num_heads)]


def _halves(count: int) -> tuple[slice, slice]:
    half = (count + 1) // 2
    return slice(0, half), slice(half, count)


def planes_of(x: Tensor, call: Call, series: slice, heads: slice) -> Tensor:
    """Return the part of ``[B H, ...]`` that belongs to a part of a call."""
    return x.unflatten(0, (call.batch, call.heads))[series, heads].flatten(0, 1)


def run_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp to base 2, ``[B H, padded]``."""
    lse, out = call.per_row(), torch.empty_like(call.q)
    for part in cut_in_parts(call):
        _run_part(call.part(*part), out[part[0], :, part[1]], planes_of(lse, call, *part))
    return out, lse


def _run_part(call: Call, out: Tensor, lse: Tensor) -> None:
    acc, prepared = call.buffer(1, torch.float32), empty_set_up(call)
    run_near(call, prepared, acc, lse)
    stages = reaching((call.tiling.middle, call.tiling.far), call.length)
    for stage in stages:
        # The near stage has written the set-up of the first.
        if stage is not stages[0]:
            fill_set_up(call, stage, prepared)
        fill_matrices(call, stage, prepared)
        run_sweep(call, stage, prepared, acc, lse, out if stage is stages[-1] else None)
