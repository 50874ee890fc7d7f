"""Launches of the kernels, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from osciformer.ops.attention.triton import intra_chunk, intra_tile, shared_path, sweep
from osciformer.ops.attention.triton.call import Call, Stage, is_interpreted, stages_for
from osciformer.ops.attention.triton.compilation import launch
from osciformer.ops.attention.triton.primitives import CHUNK, TILE, WIDTH, Gradients, Side, Upstream
from osciformer.ops.attention.triton.shared_path import COLUMNS, SpanPath, TilePath
from osciformer.ops.attention.triton.sweep import Spans

# --- Options of kernels. --------------------------------------------------------------------------


def _chunk_options(call: Call) -> dict[str, Any]:
    # A thread has two channels: sums over channels then take few steps, and registers last. The
    # interpreter is the faster the more a program does.
    chunks = 8 if is_interpreted() else 64 // min(call.channels, 32)
    return {"CHUNKS": chunks, "K": call.format, "num_warps": 1, "num_stages": 1}


def _half_tile_options(call: Call) -> dict[str, Any]:
    # A warp has sixteen rows, the least that products take; float64 takes registers.
    return {"K": call.format, "num_warps": 8 if call.format.PRECISE else 2, "num_stages": 1}


def _tile_options(call: Call) -> dict[str, Any]:
    # On 4 and on 8 warps bfloat16 products of 64 rows over 16 channels have read outside shared
    # memory (Triton 3.6, found by compute-sanitizer); float32 needs the registers.
    is_wide = call.format.PRECISE and call.channels <= 32
    return {"K": call.format, "num_warps": 4 if is_wide else 2}


def _token_options(call: Call) -> dict[str, Any]:
    return {"K": call.format, "num_warps": 4}


def _sweep_options(call: Call, stage: Stage, turn: tuple[bool, bool]) -> dict[str, Any]:
    """Return options of a sweep; `turn` says whether it is for keys and for values."""
    options = {"GROUP": call.num_spans(stage)[1], "S": stage.cut(*turn), "K": call.format}
    options |= {"num_warps": stage.warps, "num_stages": stage.stages}
    return options if stage.registers is None else options | {"maxnreg": stage.registers}


# --- Set-up of the sweeps. ------------------------------------------------------------------------


def empty_spans(call: Call) -> Spans:
    """Return buffers for a set-up, without matrices; the stages take turns in using them."""
    return Spans(*(call.buffer(n, call.format.dtype) for n in (3, 3, 2, 2)))


def _fill_set_up(call: Call, stage: Stage, spans: Spans) -> None:
    """Write states and row factors of a stage."""
    t = call.tokens
    buffers = ((spans.key_state, spans.key_factor), (spans.value_state, spans.value_factor))
    for (side, precision), buffer in zip(call.sides(), buffers, strict=True):
        given = (side, t.times, t.mask, *buffer, call.sizes, stage.span)
        launch(sweep.set_up, call.grid(TILE.value), *given, K=precision, num_warps=4)


def _with_matrices(call: Call, stage: Stage, spans: Spans, *, is_spectral: bool) -> Spans:
    """Return a set-up with the spans between the ends of key spans and the starts of row spans."""
    count, group = call.num_spans(stage)
    found = []
    for side, precision in call.sides():
        matrix = call.new(call.num_planes, count, group, 18 if is_spectral else 6, call.channels)
        given = (call.tokens.times, side.spectrum, matrix, call.sizes, stage.span, group)
        options = {"SPECTRAL": is_spectral, "K": precision, "num_warps": 4}
        launch(sweep.span_matrices, (count, call.heads, call.batch), *given, **options)
        found.append(matrix)
    return spans._replace(key_matrix=found[0], value_matrix=found[1])


# --- Forward. -------------------------------------------------------------------------------------


def run_forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[B, N, H, C]``, logsumexp to base 2 ``[B H, padded]``, and biases.

    Under a shared path the biases ``[2, B H, padded]``, integrals of path times key from each key
    to the end of its tile and of its far span, are what the backward pass does not compute again.
    Else they are empty.
    """
    lse, out = call.per_row(), torch.empty_like(call.tokens.q)
    if call.path is not None:
        return out, lse, _forward_path(call, call.path, out, lse)
    for part in call.parts():
        _forward_part(call.part(*part), out[part[0], :, part[1]], call.planes_of(lse, *part))
    return out, lse, call.new(0)


def _forward_part(call: Call, out: Tensor, lse: Tensor) -> None:
    acc, spans = call.buffer(1), empty_spans(call)
    grid, pairs = _chunk_weights(call, spans, lse)
    given = (call.tokens, spans, pairs, acc, call.sizes)
    launch(intra_chunk.chunk_values, grid, *given, **_chunk_options(call))
    rows, grid = (call.tokens, acc, lse, call.sizes), call.grid(TILE.value)
    launch(intra_tile.tile_forward, grid, *rows, **_half_tile_options(call))
    if not call.is_strict:
        launch(intra_tile.ties_forward, grid, *rows, **_tile_options(call))
    stages = stages_for(call.tiling.forward, call.length)
    for stage in stages:
        # The kernels of chunks have written the set-up of the first.
        if stage is not stages[0]:
            _fill_set_up(call, stage, spans)
        whole = _with_matrices(call, stage, spans, is_spectral=False)
        _forward_sweep(call, stage, whole, acc, lse, out if stage is stages[-1] else None)
        del whole  # the matrices of two stages need not exist at once


def _chunk_weights(call: Call, spans: Spans, lse: Tensor) -> tuple[tuple[int, int, int], Tensor]:
    """Return the grid of chunks, and weights of pairs within them ``[B H, 36, padded / 8]``.

    The forward pass gives buffers for the set-up, the backward pass none.
    """
    options = _chunk_options(call)
    grid = call.grid(CHUNK.value * options["CHUNKS"])
    count = intra_chunk.NUM_PAIRS.value
    pairs = call.new(call.num_planes, count, call.padded // CHUNK.value)
    given = (call.tokens, spans, pairs, lse, call.sizes)
    launch(intra_chunk.chunk_keys, grid, *given, STRICT=call.is_strict, **options)
    return grid, pairs


def _forward_sweep(
    call: Call, stage: Stage, spans: Spans, acc: Tensor, lse: Tensor, out: Tensor | None
) -> None:
    """Run a stage of the sweep; with `out` it is the last one."""
    rest = call.span_times(stage.span)[1]
    grid = (triton.cdiv(call.length, stage.rows), call.heads, call.batch)
    given = (call.tokens, rest, spans, acc, lse, out, call.sizes)
    launch(sweep.sweep_forward, grid, *given, **_sweep_options(call, stage, (True, True)))


# --- Backward. ------------------------------------------------------------------------------------


class GradientSums:
    """Sums of gradients. With `is_spectral` the spectra want some.

    `tokens` are those of q, k, v, and of velocities, or None, ``[B H, 1, padded, C]`` float32;
    `parts`, of keys and of values, those of gamma and omega^2, ``[B H, programs, 2, C]``.
    """

    def __init__(self, call: Call, *, is_spectral: bool) -> None:
        t = call.tokens
        tokens = (t.q, t.k.x, t.v.x, t.k.velocity, t.v.velocity)
        self.call, self.is_spectral = call, is_spectral
        self.tokens = [None if x is None else call.buffer(1) for x in tokens]
        self.parts: tuple[list[Tensor], list[Tensor]] = [], []

    def new_part(self, count: int) -> Tensor:
        """Return an empty ``[B H, count, 2, C]``: gradients of a spectrum, by program."""
        return self.call.new(self.call.num_planes, count, 2, self.call.channels)

    def pointers(self, count: int) -> Gradients:
        """Return what a kernel of `count` programs a head writes to."""
        spectra: list[Tensor | None] = [None, None]
        if self.is_spectral:
            spectra = [self.new_part(count), self.new_part(count)]
            for parts, part in zip(self.parts, spectra, strict=True):
                parts.append(part)  # type: ignore[arg-type]
        q, k, v, key_velocity, value_velocity = self.tokens
        keys, values = Side(k, key_velocity, spectra[0]), Side(v, value_velocity, spectra[1])
        return Gradients(q, keys, values)

    def by_token(self) -> list[Tensor]:
        """Return the sums of q, k, v and of those velocities that exist, as ``[B, N, H, C]``."""
        call = self.call
        shape = (call.batch, call.heads, call.padded, call.channels)
        sums = (x.view(shape)[:, :, : call.length] for x in self.tokens if x is not None)
        return [x.transpose(1, 2) for x in sums]

    def spectra(self) -> list[Tensor]:
        """Return the gradients of (gamma, omega^2) of keys and values, ``[2, H, C]`` float64."""
        found = []
        for parts in self.parts:
            total = sum(p.sum(1, dtype=torch.float64) for p in parts)
            assert isinstance(total, Tensor)
            total = total.unflatten(0, (self.call.batch, self.call.heads))
            found.append(total.sum(0).transpose(0, 1))
        return found


def _upstream(call: Call, out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor) -> Upstream:
    """Return what the kernels need of rows, delta included."""
    delta = call.per_row()
    given = (call.tokens.times, out, d_out, d_lse, delta, call.sizes)
    launch(intra_tile.row_sums, call.grid(TILE.value), *given, **_token_options(call))
    return Upstream(d_out, lse, delta)


def run_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    biases: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    *,
    is_spectral: bool,
) -> list[Tensor]:
    """Return gradients from those of output and logsumexp ``[B H, padded]``.

    Of q, k, v, of those velocities that exist, with `is_spectral` (always under a shared path) of
    (gamma, omega^2) of keys and of values, ``[2, H, C]`` float64, and of the path's integrals, if
    there are any.
    """
    t = call.tokens
    if call.path is not None:
        up = _upstream(call, out, d_out, lse, d_lse)
        sums, d_path = _backward_path(call, call.path, biases, up)
        tokens = [x.to(t.q.dtype).contiguous() for x in sums.by_token()]
        return [*tokens, *(x.contiguous() for x in sums.spectra()), d_path]
    given = (t.q, t.k.x, t.v.x, t.k.velocity, t.v.velocity)
    found = [torch.empty_like(x) for x in given if x is not None]
    shape, device = (2, call.heads, call.channels), call.device
    spectra = [torch.zeros(shape, dtype=torch.float64, device=device)] if is_spectral else []
    spectra += [torch.zeros_like(x) for x in spectra]
    for series, heads in call.parts():
        piece = call.part(series, heads)
        outs = (x[series, :, heads] for x in (out, d_out))
        logsums = (call.planes_of(x, series, heads) for x in (lse, d_lse))
        sums = _backward_part(piece, _upstream(piece, *outs, *logsums), is_spectral=is_spectral)
        for to, x in zip(found, sums.by_token(), strict=True):
            to[series, :, heads] = x
        for to, more in zip(spectra, sums.spectra() if is_spectral else (), strict=True):
            to[:, heads] += more
    return found + spectra


def _backward_part(call: Call, up: Upstream, *, is_spectral: bool) -> GradientSums:
    sums = GradientSums(call, is_spectral=is_spectral)
    _backward_tiles(call, sums, up)
    spans = empty_spans(call)
    by_rows, by_keys = (stages_for(s, call.length) for s in (call.tiling.rows, call.tiling.keys))
    for along_rows, along_keys in zip(by_rows, by_keys, strict=True):
        if call.length <= along_rows.span:
            continue
        _fill_set_up(call, along_rows, spans)
        whole = _with_matrices(call, along_rows, spans, is_spectral=is_spectral)
        _backward_keys(call, along_keys, whole, sums, up, None)
        _backward_rows(call, along_rows, whole, sums, up, None)
        del whole
    return sums


def _backward_tiles(call: Call, sums: GradientSums, up: Upstream) -> None:
    """Write the gradients that pairs within tiles contribute."""
    t = call.tokens
    grid, weights = _chunk_weights(call, Spans(None, None, None, None), up.lse)
    grads = sums.pointers(grid[0])
    given = (t, up, grads, weights, torch.empty_like(weights), call.sizes)
    # Values first: they give the gradients of the weights.
    for of_keys in (False, True):
        launch(intra_chunk.chunk_backward, grid, *given, OF_KEYS=of_keys, **_chunk_options(call))
    grid = call.grid(TILE.value)
    levels = intra_tile.NUM_LEVELS.value - intra_tile.FIRST_LEVEL.value
    rows = (t, up, sums.pointers(grid[0] * levels), call.sizes)
    launch(intra_tile.tile_backward, grid, *rows, **_half_tile_options(call))
    if not call.is_strict:
        launch(intra_tile.ties_backward, grid, *rows, **_tile_options(call))


def _weighed_rows(call: Call, x: Tensor, factor: Tensor) -> Tensor:
    """Return row factors times rows ``[B, N, H, C]``."""
    weighed = torch.empty_like(factor)
    given = (x, call.tokens.times, factor, weighed, call.sizes)
    launch(sweep.weigh_rows, call.grid(TILE.value), *given, **_token_options(call))
    return weighed


def _turns(stage: Stage) -> list[tuple[bool, bool]]:
    """Return whether each launch of a backward sweep takes keys, and whether it takes values."""
    return [(True, False), (False, True)] if stage.is_split else [(True, True)]


def _backward_keys(
    call: Call, stage: Stage, spans: Spans, sums: GradientSums, up: Upstream, d_bias: Tensor | None
) -> None:
    """Add to the gradients of keys and values, and of their spectra, by one stage."""
    factors = {"value_factor": _weighed_rows(call, up.d_out, spans.value_factor)}
    if call.path is None:
        factors["key_factor"] = _weighed_rows(call, call.tokens.q, spans.key_factor)
    grid, times = call.grid(stage.rows), call.span_times(stage.span)
    grads = sums.pointers(grid[0])
    given = (call.tokens, *times, spans._replace(**factors), up, d_bias, grads, call.sizes)
    for turn in _turns(stage):
        launch(sweep.sweep_keys, grid, *given, **_sweep_options(call, stage, turn))


def _backward_rows(
    call: Call, stage: Stage, spans: Spans, sums: GradientSums, up: Upstream, between: Tensor | None
) -> Tensor | None:
    """Add to the gradients of queries, of the spectra and of a path's integrals `between` spans.

    Returns, if spectra want gradients, ``[B H, 4, padded, C]`` float32, whose first two planes are
    the gradients of the row factors of keys.
    """
    grid = (triton.cdiv(call.length, stage.rows), call.heads, call.batch)
    rest, grads = call.span_times(stage.span)[1], sums.pointers(grid[0])
    d_factor = call.buffer(4).zero_() if sums.is_spectral else None
    given = (call.tokens, rest, spans, up, grads, d_factor, between, call.sizes)
    # Values have no gradient of their own along rows, only their spectrum has.
    for turn in _turns(stage) if sums.is_spectral else [(True, False)]:
        launch(sweep.sweep_rows, grid, *given, **_sweep_options(call, stage, turn))
    if d_factor is None:
        return None
    grid = call.grid(TILE.value)
    for index, (side, precision) in enumerate(call.sides()):
        if index == 0 and call.path is not None:
            continue  # row factors of a shared path are inputs of their own
        part = sums.new_part(grid[0])
        factors = (call.tokens.times, side.spectrum, d_factor[:, 2 * index :], part, call.sizes)
        launch(sweep.factors_backward, grid, *factors, SPAN=stage.span, K=precision, num_warps=4)
        sums.parts[index].append(part)
    return d_factor


# --- Query paths that all rows share. -------------------------------------------------------------


def _path_grids(call: Call, count: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the grids of the kernels within spans and between them."""
    within = (count, call.heads * (call.channels // WIDTH.value), call.batch)
    programs = triton.cdiv(count, group) * triton.cdiv(group, COLUMNS.value)
    return within, (programs, call.num_planes)


def with_path(
    call: Call, stage: Stage, spans: Spans, *, is_spectral: bool
) -> tuple[Spans, SpanPath]:
    """Return row factors of keys and matrices of a stage, with the path's integrals in them."""
    count = triton.cdiv(call.padded, stage.span)
    num_spans, group = call.num_spans(stage)
    shape = (call.num_planes, count, 2, call.channels)
    path = SpanPath(call.new(*shape), call.new(*shape))
    within, between = _path_grids(call, count, group)
    options = _token_options(call)
    given = (call.tokens, call.path, spans.key_factor, path.total, call.sizes)
    launch(shared_path.path_factors, within, *given, SPAN=stage.span, **options)
    spans = _with_matrices(call, stage, spans, is_spectral=is_spectral)
    matrices = (spans.key_matrix, path, num_spans, count, group)
    launch(shared_path.path_between, between, *matrices, SPECTRAL=is_spectral, **options)
    return spans, path


def _forward_path(call: Call, integrals: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Write output and logsumexp, and return the biases ``[2, B H, padded]``."""
    acc, biases = call.buffer(1), call.new(2, call.num_planes, call.padded)
    (middle, far), empty = call.tiling.forward, empty_spans(call)
    spans, path = with_path(call, middle, empty, is_spectral=False)
    tile_path = TilePath(integrals, path.remainder if call.has_far else None)
    given = (call.tokens, tile_path, spans, tuple(biases), acc, lse, call.sizes)
    options = {"STRICT": call.is_strict, **_tile_options(call)}
    launch(shared_path.tile_path_forward, call.grid(TILE.value), *given, **options)
    spans = spans._replace(bias=biases[0])
    _forward_sweep(call, middle, spans, acc, lse, None if call.has_far else out)
    del spans
    if call.has_far:
        _fill_set_up(call, far, empty)
        spans, _ = with_path(call, far, empty, is_spectral=False)
        _forward_sweep(call, far, spans._replace(bias=biases[1]), acc, lse, out)
    else:
        biases[1].zero_()  # not read, but returned
    return biases


def _backward_path(
    call: Call, integrals: Tensor, biases: Tensor, up: Upstream
) -> tuple[GradientSums, Tensor]:
    """Return the gradients of tokens and spectra, and those of the path's integrals.

    From far to near: the gradients of a stage's biases go on to the tiles.
    """
    sums, d_path = GradientSums(call, is_spectral=True), torch.zeros_like(integrals)
    for x in sums.tokens[1:]:
        if x is not None:
            x.zero_()
    empty = empty_spans(call)
    d_bias = d_far_bias = d_remainder = middle = None
    if call.has_far:
        d_far_bias, far = _backward_path_sweep(call, 1, empty, sums, biases, up)
        _finish_path(call, far, None, sums, d_path)
        del far
    if call.length > call.tiling.rows[0].span:
        d_bias, middle = _backward_path_sweep(call, 0, empty, sums, biases, up)
        d_remainder = torch.empty_like(middle.path.remainder) if call.has_far else None
    grid = call.grid(TILE.value)
    grads = sums.pointers(grid[0])
    path = TilePath(integrals, None if middle is None else middle.path.remainder)
    given = (call.tokens, path, up, (d_bias, d_far_bias), grads, TilePath(d_path, d_remainder))
    options = {"STRICT": call.is_strict, **_tile_options(call)}
    launch(shared_path.tile_path_backward, grid, *given, call.sizes, **options)
    if middle is not None:
        _finish_path(call, middle, d_remainder, sums, d_path)
    return sums, d_path


class _PathSweep(NamedTuple):
    """What the backward sweeps of a stage leave for `_finish_path`."""

    stage: Stage
    spans: Spans
    path: SpanPath
    d_factor: Tensor  # gradients of the row factors of keys
    d_between: Tensor  # gradients of the path's integrals between spans


def _backward_path_sweep(
    call: Call, index: int, spans: Spans, sums: GradientSums, biases: Tensor, up: Upstream
) -> tuple[Tensor, _PathSweep]:
    """Run both backward sweeps of stage 0 or 1, and return the gradient of its biases."""
    stage, along_keys = call.tiling.rows[index], call.tiling.keys[index]
    _fill_set_up(call, stage, spans)
    spans, path = with_path(call, stage, spans, is_spectral=True)
    spans = spans._replace(bias=biases[index])
    d_between = call.new(call.num_planes, *call.num_spans(stage), 2, call.channels).zero_()
    d_bias = call.per_row()
    _backward_keys(call, along_keys, spans, sums, up, d_bias)
    d_factor = _backward_rows(call, stage, spans, sums, up, d_between)
    assert d_factor is not None
    return d_bias, _PathSweep(stage, spans, path, d_factor, d_between)


def _finish_path(
    call: Call, swept: _PathSweep, d_remainder: Tensor | None, sums: GradientSums, d_path: Tensor
) -> None:
    """Pull the gradients of a stage's path integrals and row factors back to those over gaps."""
    stage, spans, path, d_factor, d_between = swept
    num_spans, group = call.num_spans(stage)
    count = path.total.shape[1]
    within, between = _path_grids(call, count, group)
    chunks = triton.cdiv(group, COLUMNS.value)
    d_totals = call.new(call.num_planes, chunks, count, 2, call.channels)
    parts = sums.new_part(between[0]), torch.empty_like(path.total)
    matrices = (spans.key_matrix, path, SpanPath(d_totals, d_remainder), d_between, parts[0])
    options, sizes = _token_options(call), (num_spans, count, group)
    launch(shared_path.path_between_backward, between, *matrices, *sizes, **options)
    given = (call.tokens, call.path, d_factor, d_totals.sum(1), d_path, parts[1], call.sizes)
    launch(shared_path.path_factors_backward, within, *given, SPAN=stage.span, **options)
    sums.parts[0].extend(parts)
