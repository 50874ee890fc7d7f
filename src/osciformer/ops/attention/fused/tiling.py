"""How the stages are cut into spans, tiles and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from osciformer.ops.attention.fused.attend import SPAN

#: Tokens of a tile, within which pairs are near; also the spans of the middle stage.
TILE = 64
#: Spans of the far stage that form one of the last stage, in long series.
WIDE = 8


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
    group = SPAN // TILE
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
    # Twice the channels or twice the bytes: smaller steps, so that all fits. Products of 64 rows on
    # 8 warps in float32 have read beyond shared memory (Triton 3.6).
    is_large = channels >= 64 and dtype != torch.bfloat16
    rows, step = 32 if is_large else 64, 32 if channels >= 64 else 64
    warps = 8 if channels == 128 else 4
    middle = Stage(TILE, group, rows, step, warps, 1)
    far = Stage(SPAN, 0, rows, step, warps, 1)
    step = 16 if is_large else step
    is_split = channels >= 64
    back = (
        Stage(TILE, group, rows, step, warps, 1, is_split=is_split),
        Stage(SPAN, 0, rows, step, warps, 1, is_split=is_split),
    )
    return Tiling(middle=middle, far=far, rows=back, keys=back)


def reaching(stages: tuple[Stage, Stage], length: int) -> list[Stage]:
    """Return the stages that a series of `length` takes, at least the first.

    In long series spans of the far stage form spans in their turn: fewer moves of rows or keys
    from one to the next.
    """
    middle, far = stages
    wide = replace(far, span=far.span * WIDE, group=0)
    if length <= far.span:
        return [middle]
    return [middle, far] if length <= 2 * wide.span else [middle, replace(far, group=WIDE), wide]
