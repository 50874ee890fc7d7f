"""From the inputs of the operator to those of the quadratic part, and back to rows."""

from __future__ import annotations

import torch

from osciformer._types import Tensor
from osciformer.ops.attention.blocked import operator, paths
from osciformer.ops.attention.blocked.operator import CoreInputs, SideInputs
from osciformer.ops.attention.blocked.timeline import CrossTimeline, SelfTimeline, Timeline
from osciformer.ops.attention.drive import Drive, Role, detuning
from osciformer.ops.attention.inputs import AttentionInputs, AttentionResult, Oscillators
from osciformer.ops.attention.query import QueryPath, SinusoidPath
from osciformer.ops.attention.ties import attend_tied, find_ties, merge


def attend(inputs: AttentionInputs) -> AttentionResult:
    """Return output, logsumexp and (detached) weights of causal oscillator attention, exactly.

    Closed forms are float64; the quadratic part runs in the dtype of the tokens (at least float32;
    float64 if times need gradients or keys are driven), in memory linear in N and M.
    """
    path, mask, drive = inputs.path, inputs.mask, inputs.drive
    k, v = inputs.keys.start, inputs.values.start
    keys, key_groups = expand_channels(inputs.keys, drive, "key")
    values, value_groups = expand_channels(inputs.values, drive, "value")
    is_drift = inputs.query_times.requires_grad or inputs.key_times.requires_grad
    # The derivative in time of an average over a gap is a difference divided by the gap, and a
    # driven oscillator is a difference of oscillators that are larger than it.
    needs_double = k.dtype == torch.float64 or is_drift or drive is not None
    dtype = torch.float64 if needs_double else torch.float32
    rows, cols = inputs.query_times.double(), inputs.key_times.double()
    line = _timeline(inputs, rows, cols)
    setup = paths.Setup(line, dtype, is_drift)
    key_path = paths.blocked_path(expand_path(path, key_groups), setup, inputs.scale)
    value_path = paths.Constant(setup, with_integral=inputs.value == "average")
    sides = _side(key_path, line, keys), _side(value_path, line, values)
    layout = operator.Layout(k.shape[2], line.levels.num_slots, line.levels.fan, is_drift)
    core = CoreInputs(*sides, line.gaps.to(dtype), line.age.to(dtype), line.present, layout)
    by_position, lse = operator.attend_strictly_before(core)
    out = collapse(line.positions_to_rows(by_position.transpose(1, 2)), value_groups)
    lse = line.positions_to_rows(lse.transpose(1, 2))
    ties = find_ties(rows, cols, mask)
    own = (paths.query_at_rows(path, rows, cols, ties) * inputs.scale).to(dtype)
    if not inputs.strict:
        out, lse = merge(out, lse, *attend_tied(own, k.to(dtype), v.to(dtype), ties))
    weights = None
    if inputs.return_weights:
        with torch.no_grad():
            # Logits of keys before each row come from a second run.
            shape = (rows.shape[0], k.shape[2], line.gaps.shape[1], line.age.shape[1])
            dense = own.new_full(shape, -torch.inf)
            operator.forward(core, dense)
            by_row = line.positions_to_rows(dense.transpose(1, 2))  # [B, M, H, K]
            logits = line.places_to_keys(by_row, k.shape[1]).transpose(1, 2)
            if not inputs.strict:
                is_tied = (rows[..., None] == cols[:, None]) & inputs.present[:, None]
                tied = torch.einsum("bmhc,bnhc->bhmn", own, k.to(dtype))
                logits = torch.where(is_tied[:, None], tied, logits)
            total = torch.where(lse == float("-inf"), 0.0, lse).transpose(1, 2)[..., None]
            weights = (logits - total).exp().to(v.dtype)
    return AttentionResult(out.to(v.dtype), lse.transpose(1, 2), weights)


def _timeline(inputs: AttentionInputs, rows: Tensor, cols: Tensor) -> Timeline:
    is_same = is_self = inputs.query_times is inputs.key_times
    if not is_self and not torch.compiler.is_compiling() and rows.shape == cols.shape:
        is_self = torch.equal(rows, cols)
    if not is_self:
        return CrossTimeline(rows, cols, inputs.mask)
    has_gradient = inputs.query_times.requires_grad or inputs.key_times.requires_grad
    # Two tensors of equal times keep their own gradients.
    return SelfTimeline(rows, cols if has_gradient and not is_same else rows, inputs.mask)


def _aged(line: Timeline, tokens: Oscillators, spans: paths.PathSpans) -> Tensor:
    """Return states and integrals of the keys at their slots, from their own spans.

    The same as `gap.append_to_key` from a key that has just begun.
    """
    dtype, matrix = spans.matrix.dtype, spans.matrix
    x1 = line.keys_to_places(tokens.start.flatten(-2)).to(dtype)
    moved = x1 * matrix[:, 0]
    if tokens.velocity is not None:
        x2 = line.keys_to_places(tokens.velocity.flatten(-2)).to(dtype)
        moved = torch.addcmul(moved, x2, matrix[:, 1])
        moved[1] += x2
    if spans.is_drift and matrix.shape[0] > 2:
        growth = moved[:1] if spans.end is None else spans.end * moved[0]
        if spans.step is not None:
            growth = torch.addcmul(growth, spans.step, x1)
        moved = torch.cat([moved[:2], moved[2:] - line.age.to(dtype).unsqueeze(-1) * growth])
    moved[0] += x1
    return moved


def _side(path: paths.BlockedPath, line: Timeline, tokens: Oscillators) -> SideInputs:
    spectrum = tokens.omega.double().flatten(), tokens.zeta.double().flatten()
    over = path.spans(*spectrum, of_keys=False)
    own = over if line.age is line.gaps else path.spans(*spectrum, of_keys=True)
    base = None
    if over.end is not None and over.step is not None:
        start = over.end[..., :1, :] - over.step[..., :1, :]
        base = torch.cat([start, over.end], dim=-2)  # positions 0 .. X
    return SideInputs(over.matrix, _aged(line, tokens, own), path.amplitude, base, over.step)


def expand_channels(
    tokens: Oscillators, drive: Drive | None, role: Role
) -> tuple[Oscillators, int]:
    r"""Return tokens with rest positions and drives as free oscillators, and how many a channel.

    A forced oscillator is its steady state plus a free oscillation. The steady state at a drive
    frequency is itself an undamped oscillator of that frequency, and a rest position is one of
    frequency zero. So a token with a rest position and M drive modes is 2 + M free oscillators a
    channel, laid out ``[B, N, H, (2 + M) C]``, started from

    $$x_m = \mathrm{Re}\,[H(\varpi_m) f_m], \quad
    \dot x_m = \mathrm{Re}\,[i \varpi_m H(\varpi_m) f_m], \quad
    f_m = (g_m - i h_m) \odot K_i,$$

    and the free one from what is left of $(K_i, \dot K_i)$.
    """
    omega, zeta = tokens.omega, tokens.zeta
    gains = None if drive is None else drive.gains(role)
    can_read = not torch.compiler.is_compiling()
    if drive is not None and can_read and drive.loses_digits(role, omega, zeta, tokens.start.dtype):
        raise ValueError(
            f"drive.omega is too near the frequency of a {role} channel with little damping, where"
            " the split into steady state and free oscillation loses its digits; use"
            f" backend='reference' or 'auto', or a larger {role}_zeta there"
        )
    if tokens.equilibrium is None and gains is None:
        return tokens, 1
    start = tokens.start.double()
    speed = torch.zeros_like(start) if tokens.velocity is None else tokens.velocity.double()
    # Start, frequency, damping and speed of each; the first is the free oscillation.
    free, undamped = [start, speed], torch.zeros_like(zeta)
    steady: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    if tokens.equilibrium is not None:
        rest = tokens.equilibrium.double()
        free[0] = start - rest
        steady.append((rest, torch.zeros_like(omega), undamped, torch.zeros_like(rest)))
    if gains is not None:
        mode, cos, sin = (g.double() for g in gains)
        real, imag = detuning(mode[..., None], omega.double()[:, None], zeta.double()[:, None])
        size = real * real + imag * imag
        # H (g - i h) with H = (real - i imag) / size
        in_phase = (real * cos - imag * sin) / size
        quadrature = -(real * sin + imag * cos) / size
        for m in range(mode.shape[-1]):
            position = start * in_phase[:, m]
            rate = -start * quadrature[:, m] * mode[:, m, None]
            free = [free[0] - position, free[1] - rate]
            drive_omega = mode[:, m, None].expand(omega.shape).to(omega.dtype)
            steady.append((position, drive_omega, undamped, rate))
    parts = [(free[0], omega, zeta, free[1]), *steady]
    joined = (torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True))
    return Oscillators(*joined), len(parts)


def collapse(out: Tensor, groups: int) -> Tensor:
    """Add up the groups of ``[..., groups * C]``."""
    return out if groups == 1 else out.unflatten(-1, (groups, -1)).sum(-2)


def expand_path(path: QueryPath, groups: int) -> QueryPath:
    """Return the path that asks every group of channels the same."""
    if groups == 1:
        return path
    names = ("constant", "cos", "sin") if isinstance(path, SinusoidPath) else ("q",)
    return path.map(lambda x: torch.cat([x] * groups, dim=-1), *names)
