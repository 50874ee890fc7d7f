"""Keys at a row's very time, other than the row's own: plain attention, over any number of tiles.

Mostly there are none: a program that finds all times of its tile different is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.near_backward import tied_pair
from osciformer.ops.attention.fused.near_forward import tie_range, tied_logits
from osciformer.ops.attention.fused.pieces import load_tokens, product, soften, time_at


@triton.jit
def has_ties(times, tile, length, TILE: tl.constexpr):
    """Return whether a token of the tile has its time from another token, of any tile."""
    tokens = tile * TILE + tl.arange(0, TILE)
    t = time_at(times, tokens, length)
    after = (time_at(times, tokens + 1, length) == t) & (tokens + 1 < length)
    before = (time_at(times, tl.maximum(tokens - 1, 0), length) == t) & (tokens > 0)
    return tl.max(((after | before) & (tokens < length)).to(tl.int32), 0) > 0


@triton.jit
def other_tokens(tile, other, TILE: tl.constexpr):
    """Return ``[rows, keys]``: whether row and key are different tokens."""
    place = tl.arange(0, TILE)
    return (tile != other) | (place[:, None] != place[None, :])


@triton.jit
def tied_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    times_ptr,
    mask_ptr,
    out_ptr,
    lse_ptr,
    length,
    padded,
    heads,
    logit_scale,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to each row the other keys at its time.

    `out_ptr` ``[B H, padded, C]`` and `lse_ptr` ``[B H, padded]`` are updated.
    """
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    first_token = series.to(tl.int64) * length
    times = times_ptr + first_token
    plane = (series * heads + head).to(tl.int64) * padded
    place = tl.arange(0, TILE)
    tokens = tile * TILE + place
    if has_ties(times, tile, length, TILE):
        low, high = tie_range(times, tile, length, TILE)
        before = tl.load(lse_ptr + plane + tokens)
        top = before
        mass = tl.where(before == float("-inf"), 0.0, 1.0)
        for other in range(low, high + 1):
            # fmt: off
            logits = tied_logits(
                q_ptr, k_ptr, times, mask_ptr, first_token, tile, other, length, head, heads,
                logit_scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
            )
            # fmt: on
            logits = tl.where(other_tokens(tile, other, TILE), logits, float("-inf"))
            top, mass, _, keep = soften(top, mass, logits)
        lse = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
        tl.store(lse_ptr + plane + tokens, lse)
        shift = tl.where(mass > 0, lse, 0.0)
        keep = tl.exp2(before - shift)
        for start in range(0, C, WIDTH):
            channels = start + tl.arange(0, WIDTH)
            at = out_ptr + plane * C + tokens.to(tl.int64)[:, None] * C + channels[None, :]
            acc = tl.load(at) * keep[:, None]
            for other in range(low, high + 1):
                # fmt: off
                logits = tied_logits(
                    q_ptr, k_ptr, times, mask_ptr, first_token, tile, other, length, head, heads,
                    logit_scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
                )
                # fmt: on
                logits = tl.where(other_tokens(tile, other, TILE), logits, float("-inf"))
                others = other * TILE + place
                v = load_tokens(
                    v_ptr, first_token + others, others < length, head, heads, C, channels
                )
                part = tl.exp2(logits - shift[:, None]).to(OPERAND)
                acc += product(part, v.to(OPERAND), PREC)
            tl.store(at, acc)


@triton.jit
def add_plane(x, rows, more, C: tl.constexpr, channels):
    """Add to `channels` of rows of a float32 plane ``[padded, C]``."""
    at = x + rows.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(at, tl.load(at) + more)


@triton.jit
def tied_backward(
    q_ptr,
    k_ptr,
    v_ptr,
    times_ptr,
    mask_ptr,
    to_out_ptr,
    lse_ptr,
    delta_ptr,
    to_q,
    to_k,
    to_v,
    length,
    padded,
    heads,
    logit_scale,
    scale,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add to the gradients ``[B H, padded, C]`` of queries, keys and values what ties give."""
    tile = tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    first_token = series.to(tl.int64) * length
    times = times_ptr + first_token
    plane = (series * heads + head).to(tl.int64) * padded
    tokens = tile * TILE + tl.arange(0, TILE)
    if has_ties(times, tile, length, TILE):
        low, high = tie_range(times, tile, length, TILE)
        for other in range(low, high + 1):
            others = other * TILE + tl.arange(0, TILE)
            inside = others < length
            different = other_tokens(tile, other, TILE)
            # fmt: off
            _, to_raw = tied_pair(
                q_ptr, k_ptr, v_ptr, to_out_ptr, times, mask_ptr, lse_ptr + plane,
                delta_ptr + plane, first_token, tile, other, length, head, heads, logit_scale,
                scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
            )
            from_theirs, to_raw_theirs = tied_pair(
                q_ptr, k_ptr, v_ptr, to_out_ptr, times, mask_ptr, lse_ptr + plane,
                delta_ptr + plane, first_token, other, tile, length, head, heads, logit_scale,
                scale, HAS_MASK, TILE, C, WIDTH, PREC, OPERAND,
            )
            # fmt: on
            to_raw = tl.where(different, to_raw, 0.0).to(OPERAND)
            from_theirs = tl.trans(tl.where(different, from_theirs, 0.0).to(OPERAND))
            to_raw_theirs = tl.trans(tl.where(different, to_raw_theirs, 0.0).to(OPERAND))
            for start in range(0, C, WIDTH):
                channels = start + tl.arange(0, WIDTH)
                k = load_tokens(k_ptr, first_token + others, inside, head, heads, C, channels)
                q = load_tokens(q_ptr, first_token + others, inside, head, heads, C, channels)
                o = load_tokens(to_out_ptr, first_token + others, inside, head, heads, C, channels)
                more = product(to_raw, k.to(OPERAND), PREC)
                add_plane(to_q + plane * C, tokens, more, C, channels)
                more = product(to_raw_theirs, q.to(OPERAND), PREC)
                add_plane(to_k + plane * C, tokens, more, C, channels)
                more = product(from_theirs, o.to(OPERAND), PREC)
                add_plane(to_v + plane * C, tokens, more, C, channels)
